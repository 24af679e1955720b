# places.sh: the parts of matrix.sh that are about other machines, other systems and other flags. Uses its check, skip, program.

# ---- Windows --------------------------------------------------------------------------------------------------------------

# All that programs include in front of te.h there, and nothing left out of it.
windows_headers="winsock2.h ws2tcpip.h windows.h windowsx.h commctrl.h commdlg.h dlgs.h mmsystem.h ole2.h rpc.h rpcndr.h shellapi.h unknwn.h winioctl.h"

# Macros of these headers, without those of the C library's own.
windows_macros() { # COMPILER LANGUAGE
    for h in $windows_headers; do echo "#include <$h>"; done >"$out/all.h"
    for h in fenv float limits math stdarg stdbool stddef stdint stdio stdlib string time xmmintrin; do echo "#include <$h.h>"; done >"$out/plain.h"
    for h in all plain; do "$1" -x "$2" -E -dM "$out/$h.h" | awk '{ sub(/\(.*/, "", $2); print $2 }' | sort -u >"$out/$h.macros"; done
    comm -23 "$out/all.macros" "$out/plain.macros"
}
# Names in te.h that are such macros: what it calls of Windows is upper case, but for the Interlocked functions. Some are macros of Microsoft's headers alone.
no_windows_macros() { # COMPILER LANGUAGE
    { windows_macros "$1" "$2"; printf '%s\n' far near small hyper interface min max; } | grep '[a-z]' | grep -v '^Interlocked' | sort -u >"$out/macros"
    "$1" -fpreprocessed -dD -E -P -x c te.h 2>/dev/null | sed 's/"\([^"\\]\|\\.\)*"//g' | grep -oE '[A-Za-z_][A-Za-z0-9_]*' | sort -u >"$out/names"
    grep -qx s_addr "$out/macros" && grep -qx te_ctx_create "$out/names" || { echo "the lists are not whole"; return 1; }
    ! comm -12 "$out/macros" "$out/names" | grep .
}

mingw() { # COMPILER DIALECT LANGUAGE FLAGS
    for h in $windows_headers; do echo "#include <$h>"; done >"$out/behind.$3"
    printf '#define TE_IMPLEMENTATION\n#include "te.h"\n' >>"$out/behind.$3"
    check "$1 $2, header" "$1" -std="$2" $warn -I. -x "$3" -fsyntax-only tests/build/header.h
    check "$1 $2, implementation" "$1" -std="$2" $4 $warn -I. -DTE_IMPLEMENTATION -x "$3" -c te.h -o "$out/te.o"
    # Only what te.h itself gives rise to: those headers are not written for -Wpedantic.
    check "$1 $2, behind all of windows.h" "$1" -std="$2" -Wall -Wextra -Werror -Wno-misleading-indentation -I. -fsyntax-only "$out/behind.$3"
}

# Whole programs, with the te.o of the C compiler.
examples() { # COMPILER
    for name in minimal moe train_gpt llama; do
        check "$1, examples/$name.c" "$1" -std=c11 -O0 $warn -I. -DTE_IMPLEMENTATION_DONE examples/$name.c "$out/te.o" -o "$out/$name.exe" -static -pthread
    done
}

# Microsoft's rules by clang: its target, its dialect, headers that hold what Microsoft's declare. -U__clang__: te.h then takes what it has for MSVC.
msvc="-fms-compatibility -fms-extensions -fms-compatibility-version=19.30 -U__clang__ -nostdlibinc -isystem tests/build/msvc -ffreestanding"
msvc() { # TARGET DIALECT LANGUAGE MORE
    check "MSVC's rules, $1 $2${4:+, $4}" clang --target="$1-pc-windows-msvc" $msvc -std="$2" $4 -Wall -Wextra -Werror -Wno-unused-function \
        -I. -DTE_IMPLEMENTATION -x "$3" -fsyntax-only te.h
}
# Words of gcc and clang alone; va_list is theirs in clang's own header.
no_extensions() {
    clang --target=x86_64-pc-windows-msvc $msvc -std=c11 -I. -DTE_IMPLEMENTATION -x c -E te.h >"$out/msvc.i" || return 1
    ! awk '/^# [0-9]+ "/ { ours = $3 ~ /te\.h"/ } ours' "$out/msvc.i" | grep -n '__builtin_\|__attribute__\|__extension__\|__asm\|typeof' | grep -v '__builtin_va_\|__builtin_offsetof'
}

windows() {
    for arch in x86_64 i686; do
        if command -v $arch-w64-mingw32-g++ >/dev/null; then
            mingw $arch-w64-mingw32-gcc c11 c "-O0"
            [ $arch = x86_64 ] && examples $arch-w64-mingw32-gcc
            mingw $arch-w64-mingw32-g++ c++17 c++ "-O0"
        else
            skip "$arch-w64-mingw32-gcc, -g++" "not on this machine"
        fi
    done
    if command -v x86_64-w64-mingw32-g++ >/dev/null; then
        check "no name is a macro of windows.h" no_windows_macros x86_64-w64-mingw32-g++ c++
    fi
    if command -v clang >/dev/null; then
        for target in x86_64 i686; do
            msvc $target c11 c
            msvc $target c++17 c++ "-include windows.h"
        done
        msvc x86_64 c11 c "-include windows.h -DTE_STATIC"
        check "MSVC's rules, no extension of gcc and clang" no_extensions
    else
        skip "MSVC's rules" "clang is not on this machine"
    fi
    check "literals.c" gcc -std=c11 $warn tests/build/literals.c -o "$out/literals"
    check "string literals are short enough for MSVC" "$out/literals" te.h
    # A literal of 16,381 bytes, and five of 14,000 that become one.
    { printf 'const char *a = "%16381s";\nconst char *b = ' ""; for i in 1 2 3 4 5; do printf '"%14000s" /* " */\n' ""; done; echo ";"; } >"$out/long.c"
    check "longer ones are found" sh -c "! '$out/literals' '$out/long.c' >'$out/found' && test \$(wc -l <'$out/found') = 2"
}

# ---- 32 bits ----------------------------------------------------------------------------------------------------------------

machines() {
    echo 'int main(void) { return 0; }' >"$out/empty.c"
    for cc in gcc clang; do
        if ! $cc -m32 "$out/empty.c" -o "$out/empty" 2>/dev/null; then
            skip "$cc -m32" "it lacks a 32-bit C library here (gcc-multilib, g++-multilib)"
            continue
        fi
        cxx=g++
        [ $cc = gcc ] || cxx=clang++
        program "$cc -m32 with SSE" $cc c11 c "$one" "" "-m32 -msse2 -mfpmath=sse -O0"
        program "$cc -m32 with SSE, 64-bit files" $cc c11 c "$one" "" "-m32 -msse2 -mfpmath=sse -D_FILE_OFFSET_BITS=64 -O0"
        program "$cc -m32 with the x87" $cc gnu17 c "$one" "" "-m32 -mno-sse -O0"
        program "$cxx -m32 with SSE" $cxx c++17 c++ "$one" "" "-m32 -msse2 -mfpmath=sse -O0"
    done
}

# ---- -ffast-math ------------------------------------------------------------------------------------------------------------

# The compiler refuses with the one sentence.
refused() { # COMPILER FLAGS
    printf '#define TE_IMPLEMENTATION\n#include "te.h"\n' >"$out/refused.c"
    "$1" -std=c11 $2 -I. -fsyntax-only "$out/refused.c" >"$out/said" 2>&1 && { echo "it was compiled"; return 1; }
    grep -q 'error.*-fno-fast-math' "$out/said" && [ "$(grep -c '[0-9]: error' "$out/said")" = 1 ] || { cat "$out/said"; return 1; }
}
# Compiled, and refused by te_ctx_create.
refused_later() { # COMPILER FLAGS
    build_and_run "$1" c11 c "$one" "" "-O1 $2 $lean -DTE_NO_CUDA -DTE_NO_PTX" >"$out/said" 2>&1 && { echo "it ran"; return 1; }
    grep -q 'te.h was compiled with flags' "$out/said" || { cat "$out/said"; return 1; }
}
# The answer to te_ctx_create's question: 0, arithmetic is exact, or 1.
asks() { # ANSWER COMPILER FLAGS
    "$2" -std=c11 $3 -Wall -Wextra -Werror -Wno-unused-function -Isrc tests/build/exact.c -o "$out/exact" $libs || return 1
    "$out/exact"
    [ $? = "$1" ]
}

floats() {
    for cc in gcc clang; do
        command -v $cc >/dev/null || { skip "$cc -ffast-math" "not on this machine"; continue; }
        for flags in -ffast-math -Ofast -ffinite-math-only; do check "$cc $flags is refused" refused $cc $flags; done
        check "$cc -ffast-math, header" $cc -std=c11 $warn -ffast-math -I. -x c -fsyntax-only tests/build/header.h
        # Linked so, the program flushes subnormals from its start on.
        program "$cc -ffast-math, exempted" $cc c11 c "-fno-fast-math -Wno-overriding-t-option $one" "" "-O0 -ffast-math"
    done
    for flags in -funsafe-math-optimizations -fno-signed-zeros -freciprocal-math "-fassociative-math -fno-signed-zeros -fno-trapping-math"; do
        command -v gcc >/dev/null && check "gcc $flags is refused" refused gcc "$flags"
        for level in -O1 -O2 -O3; do
            command -v clang >/dev/null && check "clang $level $flags is seen" asks 1 clang "$level $flags"
        done
    done
    for level in -O0 -O1 -O2 "-O3 -march=native" "-O2 -ffp-contract=fast -march=native" "-O2 -frounding-math"; do
        for cc in gcc clang; do
            command -v $cc >/dev/null && check "$cc $level is exact" asks 0 $cc "$level"
        done
    done
    command -v clang >/dev/null && check "clang -funsafe-math-optimizations is refused when a context is made" refused_later clang -funsafe-math-optimizations
}
