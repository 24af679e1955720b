#!/usr/bin/env bash
# wings.sh [RUNS]: sizes and compile times of te.h with each wing left out, as rows of a table (make wings). RUNS (5): the median of so many
# compilations counts, in seconds of the processor. CC_LIST: the compilers.
runs=${1:-5}
wings="AUTOMODEL LORA LM ONNX MOE DIST CUDA PTX"
compilers=${CC_LIST:-gcc clang}
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
printf '#define TE_IMPLEMENTATION\n#include "te.h"\n' >"$out/te.c"

seconds() { # COMPILER FLAGS: the processor's seconds of one compilation
    { TIMEFORMAT=%U bash -c 'time "$@" >/dev/null 2>&1' - "$@"; } 2>&1
}
median() { sort -n | awk '{ a[NR] = $1 } END { print a[int((NR + 1) / 2)] }'; }

row() { # NAME FLAGS
    name=$1
    shift
    line="$name"
    for cc in $compilers; do
        t=$(for i in $(seq "$runs"); do TIMEFORMAT=%U; { time "$cc" -std=gnu17 -O2 "$@" -I. -c "$out/te.c" -o "$out/te.o" >/dev/null 2>&1; } 2>&1; done | median)
        text=$(size -A "$out/te.o" | awk '/^\.text/ { s += $2 } END { printf "%d", s / 1000 }')
        object=$(($(wc -c <"$out/te.o") / 1000))
        line="$line,$cc,$text,$object,$t"
    done
    # kernels' text and PTX: the strings of the embedded files
    kernels=$(gcc -E -P "$@" -DTE_IMPLEMENTATION -I. -x c te.h 2>/dev/null | awk '/te__source_[0-9]*\[\] =/ { on = 1 } /te__sources\[\]/ { on = 0 } on { s += length($0) } END { printf "%d", s / 1000 }')
    echo "$line,kernels,$kernels"
}

row whole
every=
for w in $wings; do
    flags="-DTE_NO_$w"
    row "TE_NO_$w" $flags
    every="$every -DTE_NO_$w"
done
row "all but TE_NO_CUDA and TE_NO_PTX" $(echo "$every" | sed 's/-DTE_NO_CUDA//; s/-DTE_NO_PTX//')
row all $every
