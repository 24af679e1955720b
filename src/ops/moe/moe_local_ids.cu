// ops/moe/moe_local_ids.cu: turns the ids of experts into their ids on this rank. An id becomes -1 if the expert is on
// another rank or the token is dropped. Writes to counts[expert][chunk] how many items of the chunk go to that local
// expert. An item is an element of `experts`.
//
// Launch: block 256; grid: chunks of TE__MOE_SORT_CHUNK items. Shared memory: 4 bytes for each local expert.
//
// te:baseline
#include "ops/moe/loop.cuh"

extern "C" __global__ void __launch_bounds__(256) te_moe_local_ids(const __grid_constant__ te__moe_local_kargs a) {
    te_follow();
    extern __shared__ int found[];
    te_u32 begin = blockIdx.x * TE__MOE_SORT_CHUNK; // 32 bits suffice for at most 2^31 - 1 items
    TE_LOOP
    for (int e = threadIdx.x; e < a.count; e += 256) found[e] = 0;
    __syncthreads();
    TE_LOOP
    for (te_u32 i = begin + threadIdx.x; i < begin + TE__MOE_SORT_CHUNK && i < a.items; i += 256) {
        te_i64 e = te_load_index(a.experts, i, a.experts_dt) - a.first;
        if (e < 0 || e >= a.count || (a.dropped && a.dropped[i / a.topk])) e = -1;
        a.local[i] = (int)e;
        if (e >= 0) atomicAdd(&found[e], 1);
    }
    __syncthreads();
    TE_LOOP
    for (int e = threadIdx.x; e < a.count; e += 256) a.counts[(te_i64)e * gridDim.x + blockIdx.x] = found[e];
}
