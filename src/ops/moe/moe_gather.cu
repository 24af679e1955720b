// ops/moe/moe_gather.cu: fills each row of y [rows, h] with the row of x [tokens, h] that `source` names, or with 0.
//
// If `unit` is not 0, rows are copied unchanged, in units of `unit` bytes. If `unit` is 0, each row is multiplied by
// the probability of its copy.
//
// Launch: block 256, one warp for each row; grid: rows / 8 rounded up.
//
// te:baseline
#include "ops/moe/moe.cuh"

template <typename T> TE_DEV void te_move_row(const void *x, te_i64 from, void *y, te_i64 to, te_i64 h, bool zero) {
    const T *in = (const T *)x + from * h;
    T *out = (T *)y + to * h;
    TE_UNROLL(4)
    for (te_i64 i = threadIdx.x & 31; i < h; i += 32) out[i] = zero ? T() : in[i];
}

extern "C" __global__ void __launch_bounds__(256) te_moe_gather(const __grid_constant__ te__moe_rows_kargs a) {
    te_follow();
    te_i64 row = (te_i64)blockIdx.x * 8 + (threadIdx.x >> 5);
    int lane = threadIdx.x & 31;
    if (row >= a.rows) return;
    te_i64 from = a.source[row], token = from < 0 ? 0 : from / a.copies;
    float p = a.probs && from >= 0 ? te_get(a.probs, from, a.probs_dt) : 0.0f;
    bool zero = from < 0 || (a.zeroes && p == 0.0f);
    if (a.permuted_probs && lane == 0) te_put(a.permuted_probs, row, a.probs_dt, p);
    switch (a.unit) {
    case 16: te_move_row<uint4>(a.x, token, a.y, row, a.h, zero); break;
    case 8: te_move_row<te_u64>(a.x, token, a.y, row, a.h, zero); break;
    case 4: te_move_row<te_u32>(a.x, token, a.y, row, a.h, zero); break;
    case 2: te_move_row<te_u16>(a.x, token, a.y, row, a.h, zero); break;
    case 1: te_move_row<te_u8>(a.x, token, a.y, row, a.h, zero); break;
    default:
        TE_LOOP
        for (te_i64 i = lane; i < a.h; i += 32)
            te_put(a.y, row * a.h + i, a.y_dt, zero ? 0.0f : te_get(a.x, token * a.h + i, a.x_dt) * p);
    }
}
