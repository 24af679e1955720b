// ops/moe/moe_chunk_map.cu: computes the new row of each token if chunks of tokens are reordered or padded. With
// `numbers` it writes the index of the token's chunk instead.
//
// Launch: block 256, one thread for each token; grid: tokens / 256 rounded up.
//
// te:baseline
#include "ops/moe/loop.cuh"

TE_DEV te_i64 te_chunk_size(const te__moe_chunk_map_kargs &a, te_i64 i) {
    te_i64 size = te_load_index(a.sizes, i, a.sizes_dt);
    return size < 0 ? 0 : size;
}

extern "C" __global__ void __launch_bounds__(256) te_moe_chunk_map(const __grid_constant__ te__moe_chunk_map_kargs a) {
    te_follow();
    te_i64 t = (te_i64)blockIdx.x * 256 + threadIdx.x, before = 0, chunk = 0, to;
    TE_LOOP
    for (te_i64 k = t; a.sorted_index && k < a.n; k += (te_i64)gridDim.x * 256) { // reports each number outside once
        te_i64 chunk_id = te_load_index(a.sorted_index, k, a.sorted_dt);
        if ((te_u64)chunk_id >= (te_u64)a.n) te_tell_outside(a.outside, chunk_id, k, a.n);
    }
    if (t >= a.tokens) return;
    TE_LOOP
    for (; chunk < a.n; chunk++) {
        te_i64 size = te_chunk_size(a, chunk);
        if (t - before < size) break;
        before += size;
    }
    if (chunk == a.n) {
        a.map[t] = a.offsets || a.numbers ? -1 : (int)t;
        return;
    }
    if (a.numbers) {
        a.map[t] = (int)chunk;
        return;
    }
    to = t;
    if (a.offsets) to += te_load_index(a.offsets, chunk, a.offsets_dt);
    if (a.sorted_index) {
        to = t - before;
        TE_LOOP
        for (te_i64 k = 0; k < a.n; k++) {
            te_i64 other = te_load_index(a.sorted_index, k, a.sorted_dt);
            if (other == chunk) break;
            if (other >= 0 && other < a.n) to += te_chunk_size(a, other);
        }
    }
    a.map[t] = (int)to;
}
