// ops/moe/moe_splits.cu: sets padded[i] to sizes[i] rounded up to a multiple of `align`, and offsets[i] to the sum of
// the padding before group i.
//
// Launch: one block of 32 threads, which take the groups 32 at a time.
//
// te:baseline
#include "ops/moe/loop.cuh"

TE_DEV void te_store_index(void *p, te_i64 i, int dt, te_i64 v) {
    if (dt == TE_I64) ((te_i64 *)p)[i] = v;
    else ((int *)p)[i] = (int)v;
}

extern "C" __global__ void __launch_bounds__(32) te_moe_splits(const __grid_constant__ te__moe_splits_kargs a) {
    te_follow();
    int lane = threadIdx.x;
    te_i64 before = 0;
    TE_LOOP
    for (te_i64 first = 0; first < a.n; first += 32) {
        te_i64 i = first + lane, size = 0, padded = 0;
        if (i < a.n) {
            size = a.sizes ? te_load_index(a.sizes, i, a.sizes_dt) : a.values[i];
            size = size < 0 ? 0 : size;
            padded = te_div_up(size, a.align) * a.align;
            te_store_index(a.padded, i, a.padded_dt, padded);
        }
        te_i64 upto = padded - size;
#pragma unroll
        for (int d = 1; d < 32; d <<= 1) {
            te_i64 left = __shfl_up_sync(0xffffffffu, upto, d);
            if (lane >= d) upto += left;
        }
        if (a.offsets && i < a.n) te_store_index(a.offsets, i, a.offsets_dt, before + upto - (padded - size));
        before += __shfl_sync(0xffffffffu, upto, 31);
    }
}
