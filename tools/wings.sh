#!/usr/bin/env bash
# wings.sh [RUNS]: sizes and compile times of te.h with each wing left out, as rows of a table (make wings). RUNS (5): the median of so many
# compilations counts, in seconds of the processor. CC_LIST: the compilers. Every run compiles all rows once, so that a machine which is slower
# for some minutes is slower for all rows.
runs=${1:-5}
wings="AUTOMODEL LORA LM ONNX MOE DIST CUDA PTX"
compilers=${CC_LIST:-gcc clang}
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
printf '#define TE_IMPLEMENTATION\n#include "te.h"\n' >"$out/te.c"

every=
for w in $wings; do every="$every -DTE_NO_$w"; done
rows() { # NAME:FLAGS, a row a line
    echo "whole:"
    for w in $wings; do echo "TE_NO_$w:-DTE_NO_$w"; done
    echo "all but TE_NO_CUDA and TE_NO_PTX:$(echo "$every" | sed 's/-DTE_NO_CUDA//; s/-DTE_NO_PTX//')"
    echo "all:$every"
}
median() { sort -n | awk '{ a[NR] = $1 } END { print a[int((NR + 1) / 2)] }'; }

for i in $(seq "$runs"); do
    rows | while IFS=: read -r name flags; do
        for cc in $compilers; do
            TIMEFORMAT=%U
            { time "$cc" -std=gnu17 -O2 $flags -I. -c "$out/te.c" -o "$out/$name.$cc.o" >/dev/null 2>&1; } 2>>"$out/$name.$cc.seconds"
        done
    done
done
rows | while IFS=: read -r name flags; do
    line="$name"
    for cc in $compilers; do
        text=$(size -A "$out/$name.$cc.o" | awk '/^\.text/ { s += $2 } END { printf "%d", s / 1000 }')
        line="$line,$cc,$text,$(($(wc -c <"$out/$name.$cc.o") / 1000)),$(median <"$out/$name.$cc.seconds")"
    done
    # kernels' text and PTX: the strings of the embedded files
    kernels=$(gcc -E -P $flags -DTE_IMPLEMENTATION -I. -x c te.h 2>/dev/null | awk '/te__source_[0-9]*\[\] =/ { on = 1 } /te__sources\[\]/ { on = 0 } on { s += length($0) } END { printf "%d", s / 1000 }')
    echo "$line,kernels,$kernels"
done
