#!/bin/bash
# The figures that one GPU cannot give, in three parts of less than ten minutes each: two_gpus.sh 1|2|3 [SECONDS], from the repository's root.
#
#     1   correctness and bandwidth: each collective by size, beside torch.distributed; a gather of weights in FP8 and in BF16; a data-parallel pass as a
#         graph; the tests of processes and of parallel forms, each rank on a GPU of its own; the examples in two ranks against one       (400 s)
#     2   scaling, beside one GPU: a pass and a step with gradients and parameters in shards; a Llama of 1.5 G beside FSDP2; train_gpt; ranks that share
#         layers, sequences, experts                                                                                                   (250 s)
#     3   size: a Llama of 8 G in shards, layers checkpointed; peak memory against the formula                                          (120 s)
#
# A part is rows, most valuable first. A row begins only if the SECONDS (300) that are left suffice for it. A row that has passed is noted in RESULTS/partN.done,
# and the next call goes on behind it; RESULTS/partN.csv has the figures, in te_bench's columns, and RESULTS/partN.log all that was said.
#
#     RESULTS   where they go ($OUT, else build/two_gpus); an earlier call's files there are gone on from
#     BUILD     where te_info, te_bench, te_test, train_gpt and llama are (build); if it has binaries.tar.xz, they are unpacked from there, and NCCL from
#               nccl.so.xz, for a machine that cannot build:
#                   make -j2 CFLAGS=-O2 TEST_CFLAGS=-O1 BUILD=/tmp/b /tmp/b/te_info /tmp/b/te_bench /tmp/b/te_test /tmp/b/train_gpt /tmp/b/llama
#                   strip /tmp/b/te_info /tmp/b/te_bench /tmp/b/te_test /tmp/b/train_gpt /tmp/b/llama
#                   git describe --always --dirty >/tmp/b/commit
#                   tar -C /tmp/b -cJf build/two/binaries.tar.xz commit te_info te_bench te_test train_gpt llama nccl_stand_in.so
#     TE_NCCL_PATH   NCCL; else nccl.so.xz of BUILD, else PyTorch's. PyTorch is made to use the same, by LD_PRELOAD
#     ROWS      names of rows: only these
#     RANKS     2: ranks, each on a GPU of its own
#     DRY       set: small sizes, and as many ranks on one GPU (NCCL 2.30 and above), or with DRY=cpu on the CPU, over the library that stands in for NCCL
#
# Without PyTorch its rows are left out, and the log says so. NVLink multicast stays off.
part=$1 limit=${2:-300} ranks=${RANKS:-2}
case $part in 1 | 2 | 3) ;; *) sed -n '2,/^part=/p' "$0" | grep '^#' | cut -c3-; exit 2 ;; esac
build=${BUILD:-build} results=${RESULTS:-${OUT:-build/two_gpus}}
mkdir -p "$results" && work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
log=$results/part$part.log csv=$results/part$part.csv done=$results/part$part.done
touch "$log" "$done"
say() { echo "$*" | tee -a "$log"; }

export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
unpack() { xz -dc "$1" 2>/dev/null || python3 -c 'import lzma, shutil, sys; shutil.copyfileobj(lzma.open(sys.argv[1]), sys.stdout.buffer)' "$1"; }
if [ -f "$build/binaries.tar.xz" ]; then
    unpacked=/tmp/te_two_gpus # once, for all parts
    if [ ! "$unpacked/whole" -nt "$build/binaries.tar.xz" ]; then
        mkdir -p "$unpacked" && unpack "$build/binaries.tar.xz" | tar -C "$unpacked" -xf - || exit 1
        [ ! -f "$build/nccl.so.xz" ] || unpack "$build/nccl.so.xz" >"$unpacked/libnccl.so.2"
        touch "$unpacked/whole"
    fi
    [ -n "$TE_NCCL_PATH" ] || [ ! -f "$unpacked/libnccl.so.2" ] || export TE_NCCL_PATH=$unpacked/libnccl.so.2
    build=$unpacked
fi
torch=$(python3 -c 'import torch; print(torch.__version__)' 2>/dev/null)
device=() small=() most=268435456
[ -z "$DRY" ] || small=(--small) most=65536
if [ "$DRY" = cpu ]; then
    device=(--device cpu)
    export TE_NCCL_PATH=$build/nccl_stand_in.so TE_NCCL_STAND_IN_DIR=$work TE_THREADS=1
else
    [ -n "$TE_NCCL_PATH" ] || export TE_NCCL_PATH=$(python3 -c 'import nvidia.nccl; print(list(nvidia.nccl.__path__)[0] + "/lib")' 2>/dev/null)
    [ -z "$DRY" ] && export TE_TEST_GPUS=$ranks || export NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL_MAX_CTAS=4
fi
launch() { tests/dist/launch.sh torchrun $ranks "$@"; }

failed=0 left=0
# row NAME SECONDS COMMAND ...: SECONDS is what it takes about. The command writes figures to $piece.
row() {
    local name=$1 needs=$2 began=$SECONDS status
    shift 2
    case " ${ROWS:-$name} " in *" $name "*) ;; *) return ;; esac
    if grep -qx "$name" "$done"; then say "== $name: done before"; return; fi
    if [ $((limit - SECONDS)) -lt $needs ]; then
        say "== $name: left for the next call: it takes $needs s, and $((limit - SECONDS)) s are left"
        left=$((left + 1))
        return
    fi
    piece=$work/$name.csv
    set -m # a process group of its own, which ends as one
    "$@" >"$work/row" 2>&1 </dev/null &
    set +m
    local process=$! end=$limit
    while kill -0 $process 2>/dev/null && [ $SECONDS -lt $end ]; do sleep 0.2; done
    if [ $SECONDS -ge $end ]; then kill -KILL -- -$process 2>/dev/null; fi
    wait $process 2>/dev/null
    status=$?
    say "== $name: $([ $status = 0 ] && echo passed || echo "FAILED ($status)") in $((SECONDS - began)) s"
    tee -a "$log" <"$work/row" | tail -n 70
    if [ $status = 0 ]; then echo "$name" >>"$done"; else failed=$((failed + 1)); fi
    [ $status = 0 ] && [ -s "$piece" ] || return
    [ -s "$csv" ] || { grep -m1 '^#' "$piece"; echo what,shape,microseconds,ours,unit,against,theirs,ratio; } >"$csv"
    grep -v '^#\|^what,' "$piece" >>"$csv"
}
with_torch() { # NAME SECONDS WHAT: beside the rows that are there
    case " ${ROWS:-$1} " in *" $1 "*) ;; *) return ;; esac
    if [ -z "$torch" ]; then
        say "== $1: left out: no PyTorch on this machine"
    elif [ ! -s "$csv" ]; then
        say "== $1: left out: there are no rows of te.h to stand beside"
    else
        row "$1" "$2" torch_run "$3"
    fi
}
torch_run() {
    local preload=$TE_NCCL_PATH
    [ -f "$preload" ] && [ "$DRY" != cpu ] || preload=
    LD_PRELOAD=$preload launch python3 tools/two_gpus.py "$1" "$csv" "${small[@]}"
}
info() { launch "$build/te_info" --ranks "${device[@]}" --most $most --csv "$piece"; }
bench() { TE_BENCH_COMMIT=$(cat "$build/commit" 2>/dev/null || git describe --always --dirty 2>/dev/null) launch "$build/te_bench" dist "${device[@]}" "${small[@]}" --csv "$piece" "$@"; }

# Every case of processes on GPUs, a killed rank and steps as graphs among them, and the forms that threads test on devices.
tests() {
    local words=("nccl.gpu_" "shard_processes.gpu_" "overlap.gpu_" "killed.gpu_" "starving_process.gpu_" "gpu_context_over_processes" "gpu_experts_over_processes"
        "gpu_tensor_parallel_over_processes" "gpu_products_beside_in_a_graph" "parallel_on_devices [cuda:0]" "shards_equal_whole_on_devices [cuda:0]"
        "context_parallel_equals_one_rank [cuda:0]" "context_parallel_trains_a_layer [cuda:0]")
    [ -z "$DRY" ] || words=("overlap.gpu_overlap")
    [ "$DRY" != cpu ] || words=("nccl.layout" "overlap_of_processes")
    "$build/te_test" --jobs 4 "${words[@]}"
}
examples() {
    local where=gpus
    [ -z "$DRY" ] || where=cuda:0
    [ "$DRY" != cpu ] || where=cpu
    TE_RANKS_DEVICE=$where TE_RANKS_AT_MOST=$ranks tests/run_ranks.sh "$build"
}

# Tokens a second between the first and the last line that train_gpt prints, which leaves out the start.
gpt_speed() { # NAME BATCH RANKS
    local steps=150 seq=1024 options=()
    [ -z "$DRY" ] || { steps=40 seq=32 options=(--layers 2 --hidden 64 --heads 4 --kv-heads 2 --seq 32); }
    local start=(tests/dist/launch.sh torchrun "$3")
    "${start[@]}" "$build/train_gpt" "${device[@]}" "${options[@]}" --steps $steps --batch $2 --recipe none --sample 1 --out "$work/$1" >"$work/$1.log" || return 1
    awk -v k=$((seq * $2)) '/validation/ && /tokens\/s/ { split($2, a, "/"); for (i = 1; i <= NF; i++) if ($i == "tokens/s") t = a[1] * k / $(i - 1); if (!n++) { s0 = a[1]; t0 = t } s = a[1] }
        END { if (n < 2 || t <= t0) exit 1; printf "%.0f\n", (s - s0) * k / (t - t0) }' "$work/$1.log"
}
train_gpt() {
    local one same more
    one=$(gpt_speed gpt-one 8 1) && same=$(gpt_speed gpt-same 8 $ranks) && more=$(gpt_speed gpt-more $((8 * ranks)) $ranks) || { cat "$work"/gpt-*.log; return 1; }
    awk -v n=$ranks -v one=$one -v same=$same -v more=$more 'BEGIN {
        printf "\"train_gpt, batch 8\",\"%d ranks\",,%d,token/s,one GPU,%d,%.3f\n", n, same, one, same / one
        printf "\"train_gpt, batch of 8 each\",\"%d ranks\",,%d,token/s,one GPU,%d,%.3f\n", n, more, one, more / one }' | tee "$piece"
}

say "$(date -u +%FT%TZ) part $part: $ranks ranks$([ -z "$DRY" ] || echo ", dry run ($DRY)"); PyTorch ${torch:-none}; NCCL ${TE_NCCL_PATH:-none}"
case $part in
1)
    nvidia-smi topo -m 2>/dev/null | sed 's/\x1b\[[0-9;]*m//g' | head -6 | tee -a "$log"
    row bandwidth 10 info
    with_torch torch-bandwidth 20 bandwidth
    row gather-and-graph 15 bench gather graph
    row tests 280 tests
    row examples 40 examples
    ;;
2)
    row overlap 30 bench overlap
    row model 15 bench model
    with_torch torch-fsdp 30 fsdp
    row tensor 12 bench tensor
    row context 6 bench context
    row experts 6 bench experts
    row train_gpt 45 train_gpt
    with_torch torch-fsdp-compiled 60 compiled
    ;;
3) row size 40 bench size ;;
esac
say "$(wc -l <"$done") rows passed so far, $failed failed, $left left for the next call, in $SECONDS s"
[ $failed = 0 ]
