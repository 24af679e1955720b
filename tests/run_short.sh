#!/bin/sh
# A short training run whose losses are checked, the same run interrupted and resumed, a mixture of experts, and the README's program:
# run_short.sh build/train_gpt build/moe build/minimal, from the repository's root.
# The last line is `N passed, M failed, K skipped`.
train=$1
moe=$2
minimal=$3
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
passed=0 failed=0
steps=150
# The loss that training on this repository's sources reaches in so few steps, from 5.5 nats per byte, with room for other sources.
bound=3.3
tolerance=0.01 # between the validation losses of FP8 and BF16; at this learning rate it is some 0.2 %

options="--device cpu --steps $steps --layers 2 --hidden 64 --heads 4 --kv-heads 2 --seq 64 --batch 8 --lr 1e-3 --sample 0"
run() { # OUT [OPTION ...]
    out=$1
    shift
    "$train" $options --out "$folder/$out" "$@" </dev/null >"$folder/$out.log" 2>&1
}
result() { # NAME STATUS [WHAT WENT WRONG]
    if [ "$2" = 0 ]; then
        echo "ok    $1"
        passed=$((passed + 1))
    else
        echo "FAIL  $1: $3"
        failed=$((failed + 1))
    fi
}

run whole
status=$?
result "it runs to its end" $status "exit $status: $(tail -3 "$folder/whole.log")"
for file in loss.csv loss.svg model.safetensors bf16.safetensors; do
    test -s "$folder/whole/$file"
    result "it leaves $file" $? "missing or empty"
done

# loss.csv: step, then training and validation loss of BF16, then of FP8.
last=$(tail -1 "$folder/whole/loss.csv")
message=$(echo "$last" | awk -F, -v steps=$steps -v bound=$bound -v tolerance=$tolerance '
    NF != 5 || $1 != steps { print "the last line is not five numbers of step " steps; exit 1 }
    $3 == "" || $5 == "" { print "no validation at the last step"; exit 1 }
    !($3 < bound) || !($5 < bound) { print "the losses are not below " bound; exit 1 }
    { ratio = $5 / $3 - 1 }
    ratio > tolerance || ratio < -tolerance { print "FP8 is " 100 * ratio " % away from BF16"; exit 1 }')
result "the losses fall alike" $? "$message: $last"
echo "      $(head -1 "$folder/whole/loss.csv"): $last"

# Ctrl-C once it has shown some steps, then --resume: the same curves, bit for bit.
: >"$folder/halved.log" # the loop below may look before the program has started
"$train" $options --out "$folder/halved" </dev/null >"$folder/halved.log" 2>&1 &
process=$!
waited=0
while [ "$(grep -c '^step' "$folder/halved.log")" -lt 2 ] && kill -0 $process 2>/dev/null && [ $waited -lt 600 ]; do
    sleep 0.1
    waited=$((waited + 1))
done
kill -INT $process 2>/dev/null
wait $process
interrupted=$(tail -1 "$folder/halved/loss.csv" 2>/dev/null | cut -d, -f1)
run halved --resume
status=$?
result "it resumes after an interruption at step ${interrupted:-none}" $status "exit $status: $(tail -3 "$folder/halved.log")"
cmp "$folder/whole/loss.csv" "$folder/halved/loss.csv" >"$folder/cmp.log" 2>&1
result "to the same losses" $? "$(cat "$folder/cmp.log")"

# A mixture of experts, recorded as a graph: from 2.0 at its beginning to 0.2 where this was written, with room for sums in another order.
"$moe" 100 </dev/null >"$folder/moe.log" 2>&1
result "a mixture of experts runs to its end" $? "$(tail -3 "$folder/moe.log")"
last=$(tail -1 "$folder/moe.log")
message=$(echo "$last" | awk '!($1 == "step" && $2 == 99 && $4 < 0.5) { print "the loss of step 99 is not below 0.5"; exit 1 }')
result "and learns" $? "$message: $last"
echo "      $last"

# The README's first program is examples/minimal.c without its first line; it learns: from 0.25 to 0.0095 where this was written.
awk '/^```c$/ { on = 1; next } /^```$/ && on { exit } on' README.md | diff - examples/minimal.c >"$folder/minimal.diff"
[ "$(grep '^[<>]' "$folder/minimal.diff")" = "> $(head -1 examples/minimal.c)" ]
result "the README shows examples/minimal.c" $? "$(cat "$folder/minimal.diff")"
"$minimal" </dev/null >"$folder/minimal.log" 2>&1
result "it runs to its end" $? "$(tail -3 "$folder/minimal.log")"
last=$(tail -1 "$folder/minimal.log")
message=$(awk 'NR == 1 { first = $4 } END { if (!($1 == "step" && $2 == 19 && first > 0.2 && $4 < first / 10)) { print "step 19 has not a tenth of the loss of step 0"; exit 1 } }' "$folder/minimal.log")
result "and learns" $? "$message: $last"
echo "      $last"

echo "$passed passed, $failed failed, 0 skipped"
[ "$failed" = 0 ]
