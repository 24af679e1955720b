// ops/moe/sort.cuh: reads the items of one pass of the sort that makes a row_id_map from `experts`.
#pragma once
#include "ops/moe/loop.cuh"

TE_DEV int te_moe_sort_key(const te__moe_sort_kargs &a, te_i64 i) {
    return a.from ? a.from[i] : (int)te_load_index(a.experts, i, a.experts_dt);
}

// A pass sorts by eight bits of the keys. Writes these bits of each key of the block's chunk to bits[]. Returns the
// number of items of the chunk.
TE_DEV int te_moe_sort_bits(const te__moe_sort_kargs &a, te_u8 *bits) {
    te_i64 begin = (te_i64)blockIdx.x * TE__MOE_SORT_CHUNK, left = a.items - begin;
    int n = left < TE__MOE_SORT_CHUNK ? (int)left : TE__MOE_SORT_CHUNK;
    TE_LOOP
    for (int i = threadIdx.x; i < n; i += 256) bits[i] = (te_u8)((te_u32)te_moe_sort_key(a, begin + i) >> a.shift);
    __syncthreads();
    return n;
}
