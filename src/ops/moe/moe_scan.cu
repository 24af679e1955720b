// ops/moe/moe_scan.cu: replaces each number of counts [buckets, chunks] by the sum of all numbers before it. Writes the
// total of each bucket to counts_out. A bucket is an expert. In a pass of the sort (moe_sort.cu), a bucket is one
// value of the eight bits of the key that the pass sorts by.
//
// Launch: one block of 1024 threads, each of which takes TE__MOE_SCAN counts at a time.
//
// te:baseline
#include "ops/moe/loop.cuh"

extern "C" __global__ void __launch_bounds__(1024) te_moe_scan(const __grid_constant__ te__moe_map_kargs a) {
    te_follow();
    __shared__ int totals[32];
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, before = 0;
    te_i64 n = a.experts * a.chunks;
    TE_LOOP
    for (te_i64 first = 0; first < n; first += 1024 * TE__MOE_SCAN) {
        te_i64 i = first + threadIdx.x * TE__MOE_SCAN;
        int mine[TE__MOE_SCAN], sum = 0;
#pragma unroll
        for (int k = 0; k < TE__MOE_SCAN; k++) {
            mine[k] = i + k < n ? a.counts[i + k] : 0;
            sum += mine[k];
        }
        int upto = sum;
#pragma unroll
        for (int d = 1; d < 32; d <<= 1) {
            int left = __shfl_up_sync(0xffffffffu, upto, d);
            if (lane >= d) upto += left;
        }
        if (lane == 31) totals[warp] = upto;
        __syncthreads();
        int at = before + upto - sum;
        TE_LOOP
        for (int w = 0; w < 32; w++) {
            if (w < warp) at += totals[w];
            before += totals[w];
        }
#pragma unroll
        for (int k = 0; k < TE__MOE_SCAN; k++) {
            if (i + k < n) a.counts[i + k] = at;
            at += mine[k];
        }
        __syncthreads();
    }
    if (!a.counts_out) return;
    TE_LOOP
    for (te_i64 e = threadIdx.x; e < a.experts; e += 1024) {
        int begin = a.chunks ? a.counts[e * a.chunks] : 0,
            end = a.chunks && e + 1 < a.experts ? a.counts[(e + 1) * a.chunks] : before;
        if (a.counts_dt == TE_I64) ((te_i64 *)a.counts_out)[e] = end - begin;
        else ((int *)a.counts_out)[e] = end - begin;
    }
}
