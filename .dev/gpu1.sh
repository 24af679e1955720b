set -u
nvidia-smi --query-gpu=name,driver_version --format=csv | tail -1
s=$(date +%s)
make -j16 CFLAGS="-O2 -march=native" build/te_test build/minimal build/te_bench build/train_gpt build/te_info 2>&1 | grep -v "^  build" | head -20
echo "built in $(($(date +%s)-s)) s"
for i in 1 2 3; do TE_CACHE_DIR=/tmp/cold$i bash -c "time build/minimal" 2>&1 | grep -E "step  0|step 19|real|error"; done
TE_CACHE_DIR=/tmp/cold1 bash -c "time build/minimal" 2>&1 | grep -E "step  0|step 19|real"
export TE_THREADS=4 TE_CACHE_DIR=/tmp/tests
t() { n=$1; shift; timeout 420 build/te_test "$@" > /tmp/log_$n 2>&1; echo "exit $?" >> /tmp/log_$n; }
s=$(date +%s)
t A ops/gemm & t B ops/grouped ops/attn & t C ops/act ops/norm ops/rope & t D ops/cast ops/block ops/mxfp8 ops/math ops/dropout ops/loss ops/optim ops/stats ops/shard &
t E ops/nvfp4 mend/ & t F nn/ & t G quant/ train/ & t H core/ cuda/ faults/ io/ dist/ sys/ base/ &
wait
echo "tests in $(($(date +%s)-s)) s"
for n in A B C D E F G H; do echo "== $n: $(tail -3 /tmp/log_$n | tr '\n' ' ')"; grep -v "^ok\|^skip" /tmp/log_$n | head -${1:-25}; done > $OUT/summary
cat /tmp/log_* > $OUT/all.log
cat $OUT/summary
