// ops/moe/moe_invert.cu: inverts a map of copies of tokens to rows. source[row] becomes token * copies + place, where
// `place` is the index of the copy among the token's copies. Before the launch, `source` must be filled with -1. Rows
// without a copy keep the -1.
//
// Launch: block 256, one thread for each token and copy; grid: tokens * copies / 256 rounded up.
//
// te:baseline
#include "ops/moe/moe.cuh"

extern "C" __global__ void __launch_bounds__(256) te_moe_invert(const __grid_constant__ te__moe_rows_kargs a) {
    te_follow();
    te_i64 at = (te_i64)blockIdx.x * 256 + threadIdx.x, t = at / a.copies, i = at % a.copies, place;
    if (t >= a.tokens || i >= te_moe_count(a.map, t, a.copies, a.experts)) return;
    te_i64 row = te_moe_row(a.map, a.pad_offsets, a.offsets_dt, t, i, a.tokens, a.rows, a.experts, &place);
    // if a wrong map moves two copies to the same row, the copy with the larger number always wins
    if (row >= 0) atomicMax(a.source + row, (int)(t * a.copies + place));
}
