#!/bin/sh
# Compiles te.h in every way that its users do: matrix.sh FOLDER [PART]. Run it from the repository's root. Without a part all of them, at once.
# The last line is `N passed, M failed, K skipped`.
out=${1:-build/matrix}
part=$2
# gcc 12 takes 14 s for -Wmisleading-indentation in a C file of te.h's length. The development build has it, part by part.
warn="-Wall -Wextra -Wpedantic -Werror -Wno-misleading-indentation"
libs="-lm -ldl -pthread"
passed=0 failed=0 skipped=0

if [ -z "$part" ]; then
    rm -rf "$out"
    mkdir -p "$out"
    parts="gcc clang contents wings windows machines floats"
    for part in $parts; do "$0" "$out/$part" $part >"$out/$part.log" 2>&1 & done
    wait
    for part in $parts; do
        grep -v 'passed, .* failed, .* skipped$' "$out/$part.log"
        counts=$(sed -n 's/^\([0-9]*\) passed, \([0-9]*\) failed, \([0-9]*\) skipped$/\1 \2 \3/p' "$out/$part.log")
        read -r p f s <<COUNTS
${counts:-0 1 0}
COUNTS
        passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + s))
    done
    echo "$passed passed, $failed failed, $skipped skipped"
    [ "$failed" = 0 ]
    exit
fi
rm -rf "$out"
mkdir -p "$out"

# check NAME COMMAND ...: one line, and what the command printed if it failed.
check() {
    name=$1
    shift
    if "$@" >"$out/log" 2>&1; then
        echo "ok    $name"
        passed=$((passed + 1))
    else
        echo "FAIL  $name"
        head -c 4000 "$out/log" | sed 's/^/  /'
        failed=$((failed + 1))
    fi
}
skip() {
    echo "skip  $1: $2"
    skipped=$((skipped + 1))
}

# Runs `command`, which must print nothing.
prints_nothing() { ! sh -c "$1" | grep .; }

# ---- the header alone, and the implementation, under every warning ---------------------------------------------------

header() { # NAME COMPILER DIALECT LANGUAGE
    echo '#include "te.h"' >"$out/header.$4"
    check "$1" "$2" -std="$3" $warn -I. -fsyntax-only "$out/header.$4"
}

# program NAME COMPILER DIALECT LANGUAGE FLAGS-OF-MAIN FLAGS-OF-OTHER FLAGS-OF-ALL: compiles both files, links, runs.
build_and_run() {
    "$1" -std="$2" -x "$3" $warn $6 -I. $4 -c tests/build/main.c -o "$out/main.o" &&
        "$1" -std="$2" -x "$3" $warn $6 -I. $5 -c tests/build/other.c -o "$out/other.o" &&
        "$1" $6 "$out/main.o" "$out/other.o" -o "$out/program" $libs &&
        "$out/program"
}
program() {
    name=$1
    shift
    check "$name" build_and_run "$@"
}

one="-DFIRST_HAS_IMPLEMENTATION"
two="-DSECOND_HAS_IMPLEMENTATION"
# For optimized builds, which are about arithmetic: the rooms that compute are compiled, in half of the time.
lean="-DTE_NO_AUTOMODEL -DTE_NO_LORA -DTE_NO_LM -DTE_NO_ONNX -DTE_NO_MOE -DTE_NO_DIST"

# every_way C-COMPILER C++-COMPILER
every_way() {
    cc=$1 cxx=$2
    if ! command -v "$cc" >/dev/null; then
        skip "$cc" "not on this machine"
    else
        for dialect in c99 c11 c17 gnu17; do header "$cc $dialect, header" "$cc" $dialect c; done
        program "$cc c11, implementation in one of two files" "$cc" c11 c "$one" "" -O0
        # gcc's is what `make test` runs: te_test_packed.
        [ "$cc" = gcc ] || program "$cc gnu17, optimised" "$cc" gnu17 c "" "$two" "-O2 -march=native $lean"
        # C by gcc, C++ by clang: each compiles te.h twice.
        [ "$cc" != gcc ] || program "$cc c11, TE_STATIC in both files" "$cc" c11 c "-DTE_STATIC $one" "-DTE_STATIC $two" -O0
    fi
    if ! command -v "$cxx" >/dev/null; then
        skip "$cxx" "not on this machine"
    else
        for dialect in c++11 c++14 c++17 c++20; do header "$cxx $dialect, header" "$cxx" $dialect c++; done
        program "$cxx c++17, implementation in one of two files" "$cxx" c++17 c++ "$one" "" -O0
        [ "$cxx" != clang++ ] || program "$cxx c++17, TE_STATIC in both files" "$cxx" c++17 c++ "-DTE_STATIC $one" "-DTE_STATIC $two" -O0
        program "$cxx c++20, without exceptions and rtti" "$cxx" c++20 c++ "" "$two" "-O0 -fno-exceptions -fno-rtti"
    fi
}

# ---- what is in it -----------------------------------------------------------------------------------------------------

# Sizes of the public structs, under every switch.
sizes() { # FILE COMPILER LANGUAGE FLAGS
    {
        echo '#include "te.h"'
        echo '#include <stdio.h>'
        echo 'int main(void) {'
        sed -n 's/^typedef struct \(te_[a-z0-9_]*\) {.*/\1/p' "$out/public" | sort -u | sed 's/.*/printf("& %d\\n", (int)sizeof(&));/'
        echo 'return 0; }'
    } >"$out/sizes.$3"
    $2 $4 -I. "$out/sizes.$3" -o "$out/sizes" $libs && "$out/sizes" >"$1"
}
same_sizes() { sizes "$out/sizes.other" "$@" && test -s "$out/sizes.plain" && diff "$out/sizes.plain" "$out/sizes.other"; }

contents() {
    printf '#define TE_IMPLEMENTATION\n#include "te.h"\n' >"$out/implementation.c"
    check "implementation, for the symbols" gcc -std=c11 -O0 $warn -I. -c "$out/implementation.c" -o "$out/implementation.o"
    check "exported symbols are te_name or TE_NAME" \
        prints_nothing "nm -g --defined-only '$out/implementation.o' | awk '{print \$NF}' | grep -v '^te_[a-z0-9]\|^TE_[A-Z0-9]'"
    check "every public function is there" sh -c "
        { gcc -E -P -I. -x c te.h | tr '\n' ' ' | tr ';' '\n' | sed -n 's/^ *extern .*[ *]\(te_[a-z0-9_]*\)(.*/\1/p'; } | sort -u >'$out/declared'
        nm -g --defined-only '$out/implementation.o' | awk '{print \$NF}' | sort -u >'$out/defined'
        test -s '$out/declared' && diff '$out/declared' '$out/defined'"
    printf '#include "te.h"\n#include "examples/inspect.h"\n#include "examples/curves.h"\n' >"$out/unused.c"
    check "examples' headers, of which nothing is used" gcc -std=c11 $warn -I. -c "$out/unused.c" -o "$out/unused.o"
    check "no CUDA header is included" prints_nothing "gcc -M -I. '$out/implementation.c' | tr ' ' '\n' | grep -i 'cuda\|nccl\|nvrtc'"
    check "TE_STATIC exports nothing" sh -c "
        gcc -std=c11 -DTE_STATIC $warn -I. -c '$out/implementation.c' -o '$out/static.o' && ! nm -g --defined-only '$out/static.o' | grep ."

    sed '/TE_H_INCLUDED \*\//q' te.h >"$out/public"
    sizes "$out/sizes.plain" gcc c ""
    check "public structs: TE_STATIC, TE_IMPLEMENTATION" same_sizes gcc c "-DTE_STATIC -DTE_IMPLEMENTATION"
    check "public structs: NDEBUG" same_sizes gcc c -DNDEBUG
    if command -v g++ >/dev/null; then check "public structs: C++" same_sizes g++ cc ""; fi
    if command -v clang >/dev/null; then check "public structs: clang" same_sizes clang c ""; fi
}

# ---- wings: each left out, and all, as C and as C++ ----------------------------------------------------------------------

wing() { # NAME COMPILER FLAGS
    name=$1 compiler=$2
    shift 2
    check "$name" sh -c "$compiler -O0 $warn $* -I. tests/build/wings.c -o '$out/wings' $libs && '$out/wings'"
}
# Two files of one program, of which the first has the implementation and leaves out what the second calls: the link fails and names it.
split() {
    printf '#include "te.h"\nint other(void) { return (int)te_group_size(NULL); }\n' >"$out/split.c"
    printf '#define TE_NO_DIST\n#define TE_IMPLEMENTATION\n#include "te.h"\nint other(void);\nint main(void) { return other(); }\n' >"$out/main.c"
    ! gcc -std=c11 -O0 -I. "$out/main.c" "$out/split.c" -o "$out/split" $libs >"$out/split.log" 2>&1 && grep -q te_group_size "$out/split.log"
}
wings() {
    every= cc=gcc cxx=g++ # clang compiles in half of the time
    if command -v clang++ >/dev/null; then cc=clang cxx=clang++; fi
    for w in AUTOMODEL LORA LM ONNX MOE DIST CUDA PTX; do
        wing "TE_NO_$w, C" "$cc -std=c11" -DTE_NO_$w
        if command -v $cxx >/dev/null; then wing "TE_NO_$w, C++" "$cxx -std=c++17 -x c++" -DTE_NO_$w; fi
        every="$every -DTE_NO_$w"
    done
    wing "nothing left out, C" "gcc -std=c11"
    wing "all left out, C" "gcc -std=c11" $every
    if command -v g++ >/dev/null; then wing "all left out, C++" "g++ -std=c++17 -x c++" $every; fi
    if command -v clang >/dev/null; then wing "all left out, clang" "clang -std=c11" $every; fi
    check "a file that calls what another has left out does not link" split
}

. tests/build/places.sh

case $part in
gcc) every_way gcc g++ ;;
clang) every_way clang clang++ ;;
*) $part ;;
esac

echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" = 0 ]
