#!/bin/sh
# Runs test programs one after the other and adds up their last lines: run.sh "COMMAND ..." ["COMMAND ..." ...]
# The last line is `N passed, M failed, K skipped`.
passed=0 failed=0 skipped=0
output=$(mktemp)
trap 'rm -f "$output"' EXIT
for command in "$@"; do
    echo "== $command"
    { $command </dev/null 2>&1; echo "exit $?"; } | tee "$output" | grep -v '^exit [0-9]*$'
    status=$(sed -n '$s/^exit //p' "$output")
    counts=$(sed -n 's/^\([0-9]*\) passed, \([0-9]*\) failed, \([0-9]*\) skipped$/\1 \2 \3/p' "$output" | tail -1)
    if [ -z "$counts" ]; then
        echo "== $command ended without a summary (exit $status)"
        failed=$((failed + 1))
        continue
    fi
    read -r p f s <<COUNTS
$counts
COUNTS
    # A leak that a sanitizer finds at the end, say, is in no test's count.
    [ "$status" = 0 ] || [ "$f" -gt 0 ] || f=1
    passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + s))
done
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" = 0 ]
