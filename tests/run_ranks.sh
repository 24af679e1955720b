#!/bin/bash
# The examples in ranks, against one rank: run_ranks.sh BUILD [LAUNCHER ...], from the repository's root. LAUNCHER is a command in which N stands for the number of
# ranks; without one, those that set the variables of torchrun, mpirun and srun (tests/dist/launch.sh). On the CPU the ranks compute over the library that stands in for
# NCCL, which cannot show what NCCL does; TE_RANKS_DEVICE=cuda:0 puts them on one GPU, over TE_NCCL_PATH, and TE_RANKS_DEVICE=gpus each on a GPU of its own.
# TE_RANKS_AT_MOST=2 leaves out the layouts of more ranks. TE_RANKS_WORDS: some of the names alone; TE_RANKS_FOLDER: where models are written, and stay. The last line is
# `N passed, M failed, K skipped`.
build=$1
shift
launchers=("$@")
[ $# -gt 0 ] || launchers=("tests/dist/launch.sh torchrun N" "tests/dist/launch.sh openmpi N" "tests/dist/launch.sh mpich N" "tests/dist/launch.sh srun N")
device=${TE_RANKS_DEVICE:-cpu} most=${TE_RANKS_AT_MOST:-4}
on=(--device "$device")
[ "$device" != gpus ] || on=()
exact=()
[ "$device" = cpu ] || exact=(--exact) # products of f32 without rounding to TF32
[ "$device" != cpu ] || export TE_NCCL_PATH=$build/nccl_stand_in.so TE_THREADS=1
folder=${TE_RANKS_FOLDER:-$(mktemp -d)}
[ -n "$TE_RANKS_FOLDER" ] || trap 'rm -rf "$folder"' EXIT
mkdir -p "$folder"
export TE_NCCL_STAND_IN_DIR=$folder
passed=0 failed=0 skipped=0 turn=0
wanted() { # NAME
    [ -z "$TE_RANKS_WORDS" ] || [[ " $TE_RANKS_WORDS " == *" $1 "* ]]
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
launch() { # N COMMAND ...: each call takes the next launcher
    local n=$1
    shift
    timeout 120 ${launchers[$((turn++ % ${#launchers[@]}))]//N/$n} "$@"
}

# ---- llama: the losses of one rank, and the same file --------------------------------------------------------------------------------

for model in llama mixtral; do python3 tests/dist/make_folder.py $model "$folder/$model" || exit 1; done
llama() { # OUT N MODEL OPTION ...
    local out=$folder/$1 n=$2 model=$folder/$3
    shift 3
    launch $n "$build/llama" "$model" --train "$model/ids" --out "$out" --lr 1e-2 --sequences 4 "${on[@]}" "${exact[@]}" "$@" >"$out.log" 2>&1
}
# Sums of ranks have another order. The losses of 8 steps differ by 1e-6 of themselves where this was written; samples that are repeated or skipped make a difference of 0.1.
same_losses() { # OUT LIKE: the steps that both have
    awk -v file="$2" '/^step/ { if (FILENAME == file) { want[$2] = $4; next } n++; d = $4 / want[$2] - 1; if (!(d < 1e-4 && d > -1e-4)) { print "step " $2 ": " $4 ", not " want[$2]; exit 1 } }
        END { if (n == 0) { print "no step"; exit 1 } }' "$2" "$1"
}
# The values of all tensors, f32: 1e-4 of weights of 0.2, whose 8 steps are of 0.01 each. On the CPU sums are of doubles. On a GPU they are not, and where a gradient is almost 0 its sign is
# as good as chance: Adam's step has the size of the learning rate whichever it is. So few values differ by steps, and all together by a hundredth.
same_files() {
    python3 - "$1" "$2" $device <<'PYTHON'
import json, os, struct, sys
def read(folder):
    index, tensors = os.path.join(folder, "model.safetensors.index.json"), {}
    names = sorted(set(json.load(open(index))["weight_map"].values())) if os.path.exists(index) else ["model.safetensors"]
    if names != sorted(n for n in os.listdir(folder) if n.startswith("model") and n.endswith(".safetensors")): # the last layout's files alone
        sys.exit("the files of the folder are not %s alone" % names)
    for name in names:
        data = open(os.path.join(folder, name), "rb").read()
        n = struct.unpack("<Q", data[:8])[0]
        h = json.loads(data[8:8 + n])
        h.pop("__metadata__")
        for k, v in h.items():
            first, last = (8 + n + x for x in v["data_offsets"])
            tensors[k] = (v["shape"], struct.unpack("<%df" % ((last - first) // 4), data[first:last]))
    return tensors
a, b = read(sys.argv[1]), read(sys.argv[2])
worst = max(abs(x - y) for k in b for x, y in zip(a[k][1], b[k][1])) if a.keys() == b.keys() and all(a[k][0] == b[k][0] for k in a) else 1e9
error = sum((x - y) ** 2 for k in b for x, y in zip(a[k][1], b[k][1])) / sum(y * y for k in b for y in b[k][1]) if worst < 1e9 else 1e9
sys.exit(0 if worst < 1e-4 or sys.argv[3] != "cpu" and error < 1e-4 else "names or shapes differ" if worst == 1e9 else "a value differs by %g, all by %g" % (worst, error ** 0.5))
PYTHON
}
too_many() { # NAME N: there are not so many ranks
    [ $2 -gt $most ] || return 1
    echo "skip  $1: it takes $2 ranks"
    skipped=$((skipped + 1))
}
layout() { # OUT N MODEL OPTION ...: 8 steps equal those of one rank
    wanted $1 || return
    too_many $1 $2 && return
    llama "$@" --steps 8
    status=$?
    result "$1: $2 ranks train a $3" $status "exit $status: $(grep -v '^step' "$folder/$1.log" | head -3)"
    [ $status = 0 ] || return
    message=$(same_losses "$folder/$1.log" "$folder/$3-1.log")
    result "$1: to the losses of one rank" $? "$message"
    message=$(same_files "$folder/$1" "$folder/$3-1" 2>&1)
    result "$1: and the same folder" $? "$message"
}
for model in llama mixtral; do
    llama $model-1 1 $model --steps 8
    result "one rank trains a $model" $? "$(cat "$folder/$model-1.log")"
done
layout dp2 2 llama
layout dp2-shard 2 llama --shard
layout tp2 2 llama --tp 2
layout tp2-sequence 2 llama --tp 2 --sequence-parallel
layout tp2-sequence-ub 2 llama --tp 2 --sequence-parallel --ub
layout cp2 2 llama --cp 2
layout dp4-shard 4 llama --shard
layout tp2-dp2 4 llama --tp 2
layout cp2-dp2-shard 4 llama --cp 2 --dp 2 --shard
layout tp2-cp2 4 llama --tp 2 --cp 2
layout ep2 2 mixtral --ep 2
layout ep2-dp2 4 mixtral --ep 2
layout ep2-tp2 4 mixtral --ep 2 --tp 2
layout moe-dp2-shard 2 mixtral --shard
layout tp2-dp2-shard 4 llama --tp 2 --shard
layout ep2-dp2-shard 4 mixtral --ep 2 --shard

# Four steps in one layout, four in another: no sequence is repeated or skipped.
resume() { # MODEL OUT FIRST-N "FIRST OPTIONS" N OPTION ...
    local model=$1 name=$2 first=$3 options=$4 n=$5
    shift
    wanted $name || return
    too_many $name $((first > n ? first : n)) && return
    shift 4
    llama $name $first $model --steps 4 $options && llama $name $n $model --steps 8 --resume "$@"
    status=$?
    result "$name: resumes" $status "exit $status: $(grep -v '^step' "$folder/$name.log" | head -3)"
    message=$(same_losses "$folder/$name.log" "$folder/$model-1.log")
    result "$name: to the losses of one rank" $? "$message"
    message=$(same_files "$folder/$name" "$folder/$model-1" 2>&1)
    result "$name: and the same folder" $? "$message"
}
resume llama one-then-tp2 1 "" 2 --tp 2
resume llama shard-then-one 2 --shard 1
resume llama tp2-then-cp2-shard 2 "--tp 2" 4 --cp 2 --dp 2 --shard
resume llama dp4-shard-then-tp2-cp2 4 --shard 4 --tp 2 --cp 2
resume llama tp2-dp2-shard-then-dp2 4 "--tp 2 --shard" 2
resume mixtral one-then-ep2-dp2-shard 1 "" 4 --ep 2 --shard
resume mixtral ep2-tp2-then-shard 4 "--ep 2 --tp 2" 2 --shard

# ---- train_gpt -----------------------------------------------------------------------------------------------------------------------

cat README.md src/README.md >"$folder/text" # one that stays as it is
gpt() { # OUT N OPTION ...
    local out=$folder/$1 n=$2
    shift 2
    launch $n "$build/train_gpt" "${on[@]}" --layers 2 --hidden 64 --heads 4 --kv-heads 2 --seq 32 --batch 4 --lr 1e-3 --sample 3 --out "$out" "$@" "$folder/text" >"$out.log" 2>&1
}
# Sums in another order round otherwise, and in FP8 a rank's parts have scales of their own. Losses of 12 steps, of both runs, differ by 1e-4 in BF16 and by 4e-4 in FP8 where
# this was written, and by 0.01 from one step to the next. Columns: the step, training and validation in BF16, both in FP8; a validation loss is there of some steps.
same_curves() {
    awk -F, -v file="$2" '$1 !~ /^[0-9]+$/ { next }
        { for (c = 2; c <= 5; c++) {
              if (FILENAME == file) { want[$1, c] = $c; continue }
              if ($c == "" && want[$1, c] == "") continue
              n[c]++; d = want[$1, c] == "" || $c == "" ? 1 : $c / want[$1, c] - 1
              if (!(d < 2e-3 && d > -2e-3)) { print "step " $1 ", column " c ": " $c ", not " want[$1, c]; wrong = 1; exit 1 } } }
        END { if (!wrong && (n[2] < 12 || n[4] < 12 || n[3] < 2 || n[5] < 2)) { print n[2] " and " n[4] " steps, with " n[3] " and " n[5] " validation losses"; exit 1 } }' "$2" "$1"
}
like_one() { # OUT N OPTION ...
    wanted $1 || return
    too_many $1 $2 && return
    gpt "$@" --steps 12
    status=$?
    result "train_gpt, $1: $2 ranks" $status "exit $status: $(tail -3 "$folder/$1.log")"
    message=$(same_curves "$folder/$1/loss.csv" "$folder/gpt-1/loss.csv" 2>&1)
    result "train_gpt, $1: to the losses of one rank" $? "$message"
}
if [ -z "$TE_RANKS_WORDS" ]; then
    gpt gpt-1 1 --steps 12
    result "train_gpt: one rank" $? "$(tail -3 "$folder/gpt-1.log")"
fi
like_one gpt-dp2-shard 2 --dp 2 --shard
like_one gpt-tp2 2 --tp 2
like_one gpt-tp2-sequence 2 --tp 2 --sequence-parallel
like_one gpt-cp2 2 --cp 2
like_one gpt-tp2-cp2 4 --tp 2 --cp 2
like_one gpt-tp2-dp2-shard 4 --tp 2 --dp 2 --shard
# Six steps in one layout, and on to twelve in another, as one rank does that ends and goes on.
gpt_resume() { # OUT FIRST-N "FIRST OPTIONS" N OPTION ...
    local name=$1 first=$2 options=$3 n=$4
    shift 4
    gpt $name $first --steps 6 $options && gpt $name $n --steps 12 --resume "$@"
    status=$?
    result "train_gpt, $name: resumes" $status "exit $status: $(tail -3 "$folder/$name.log")"
}
if wanted gpt-shard-then-tp2 && ! too_many gpt-shard-then-tp2 2; then
    gpt_resume gpt-1-then-1 1 "" 1
    gpt_resume gpt-shard-then-tp2 2 --shard 2 --tp 2
    message=$(same_curves "$folder/gpt-shard-then-tp2/loss.csv" "$folder/gpt-1-then-1/loss.csv" 2>&1)
    result "train_gpt, gpt-shard-then-tp2: to the losses of one rank" $? "$message"
fi

# ---- what cannot be ------------------------------------------------------------------------------------------------------------------

refused() { # NAME N TEXT OPTION ...
    local name=$1 n=$2 text=$3
    wanted $name || return
    too_many $1 $2 && return
    shift 3
    llama $name $n llama --steps 1 "$@"
    status=$?
    [ $status != 0 ] && grep -q "$text" "$folder/$name.log"
    result "$name: refused" $? "exit $status, without \"$text\": $(head -3 "$folder/$name.log")"
}
refused too-many 2 "make 8 ranks, and there are 2" --tp 4 --dp 2
refused heads 4 "the ranks must divide each" --tp 4
refused experts 2 "num_local_experts is 0" --ep 2

# ---- tools that measure ranks ----------------------------------------------------------------------------------------------------------

# Each message of each collective has a line and a row, and so has each part of te_bench dist, with a figure to stand beside.
tool() { # NAME N COMMAND ...
    local name=$1 n=$2
    shift 2
    launch $n "$@" "${on[@]}" --csv "$folder/$name.csv" >"$folder/$name.log" 2>&1
    result "$name: $n ranks" $? "$(tail -3 "$folder/$name.log")"
}
says() { # NAME TEXT
    grep -q "$2" "$folder/$1.log"
    result "$1: $2" $? "$(head -20 "$folder/$1.log")"
}
rows() { # NAME N: so many rows of figures above 0; "exposed" is a difference of two times, of any sign
    local n=$(python3 -c 'import csv, sys; print(sum(len(r) > 3 and r[0] != "what" and r[0][0] != "#" and r[0][:7] != "exposed" and float(r[3]) > 0 for r in csv.reader(open(sys.argv[1]))))' "$folder/$1.csv")
    [ $n = $2 ]
    result "$1: $2 rows" $? "there are $n"
}
tool te_info 2 "$build/te_info" --ranks --most 16384
says te_info "^2 ranks on 1 host"
says te_info "^rank 1: .*, process"
says te_info "^NCCL: .*, 2\.[0-9]*\.[0-9]*$"
says te_info "^send .* 16 KiB .* GB/s .* GB/s"
rows te_info 12 # six collectives, 4 KiB and 16 KiB
tool te_bench 2 "$build/te_bench" dist --small gather tensor size
says te_bench "loss [0-9.]* after one step, [0-9.]* after the last, of the same ids$"
rows te_bench 9 # two gathers, five ways of a pass, a step and its peak of memory
if [ "$device" = cpu ]; then # tools/two_gpus.sh runs the other parts on GPUs
    tool te_bench-whole 2 "$build/te_bench" dist --small
    rows te_bench-whole 25 # four ways to share, a pass and a step of each; a pass and three steps as graphs; two gathers, five ways of a pass; context; experts; two models
    if ! too_many te_bench-of-four 4; then
        tool te_bench-of-four 4 "$build/te_bench" dist --small tensor context experts model
        says te_bench-of-four "^tensor: left out, since 4 ranks do not divide 2 heads of keys$"
        rows te_bench-of-four 6 # context; experts; two models
    fi
fi

echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" = 0 ]
