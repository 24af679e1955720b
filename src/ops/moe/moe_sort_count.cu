// ops/moe/moe_sort_count.cu: sets counts[b][c] to the number of items (elements of `experts`) of chunk c in bucket b.
// An item's key is its expert id. A pass sorts by eight bits of the key, and has one bucket for each value of these
// bits.
//
// Launch: block 256, one thread for each bucket; grid: chunks of TE__MOE_SORT_CHUNK items.
//
// te:baseline
#include "ops/moe/sort.cuh"

extern "C" __global__ void __launch_bounds__(256) te_moe_sort_count(const __grid_constant__ te__moe_sort_kargs a) {
    te_follow();
    __shared__ te_u8 bits[TE__MOE_SORT_CHUNK];
    int n = te_moe_sort_bits(a, bits), count = 0;
    TE_LOOP
    for (int i = 0; i < n; i++) count += bits[i] == threadIdx.x;
    a.counts[threadIdx.x * a.chunks + blockIdx.x] = count;
}
