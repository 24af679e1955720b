// ops/context/context_merge.cu: merges the attention to some keys (x) into the attention to other keys (o):
//
//   with lse:     L = log(exp(lse) + exp(x_lse)),  o = o exp(lse - L) + x exp(x_lse - L),  lse = L
//   without lse:  o += x
//
// Each lane of a row computes L and both factors itself. This costs less than an exchange between lanes.
//
// Options: X_VECTOR, the te_dtype of x. With it, a lane has eight channels. Without it, a warp has one row at a time,
// and any formats and strides are allowed.
//
// Launch: blocks of 128 threads, in any number, since the warps step through the rows. With X_VECTOR a warp has 32 / (d
// / 8) rows at a time. The first block also merges the largest logits of the heads. With X_VECTOR all addresses are
// multiples of 16 bytes, strides and d are multiples of 8 elements, d is at most 256, and there are fewer than 2^31
// rows.
//
// te:baseline
// te:row X_VECTOR=1|2|3
#include "device/vector.cuh"
#include "base/sequences.h"
#include "ops/context/kargs.h"

// The positions of row number `row`, in elements: `from` in x, `to` in o, `lse` in lse, and `x_lse` in x_lse.
template <typename T> struct te_context_row {
    te_i64 from, to, lse, x_lse;
    TE_DEV te_context_row(const te__context_merge_kargs &a, T row) {
        const T heads = (T)a.size[2], places = (T)a.size[1], token = row / heads, h = row - token * heads,
                b = token / places, s = token - b * places;
        from = b * a.x_stride[0] + s * a.x_stride[1] + h * a.x_stride[2];
        to = b * a.o_stride[0] + s * a.o_stride[1] + h * a.o_stride[2];
        lse = b * a.lse_stride[0] + s * a.lse_stride[1] + h * a.lse_stride[2];
        x_lse = (b * a.size[2] + h) * a.size[1] + s;
    }
};

#ifdef X_VECTOR
TE_DEV void te_context_rows(const te__context_merge_kargs &a) {
    const int lane = threadIdx.x % TE_WARP, of_row = a.d / 8, together = TE_WARP / of_row, mine = lane / of_row,
              c = (lane - mine * of_row) * 8;
    const te_u32 rows = (te_u32)(a.size[0] * a.size[1] * a.size[2]);
    for (te_u32 first = (blockIdx.x * 4 + threadIdx.x / TE_WARP) * together; first < rows;
         first += gridDim.x * 4 * together) {
        const bool on = mine < together && first + mine < rows;
        const te_context_row<te_u32> at(a, on ? first + mine : first);
        te_raw<TE_ANY> x, o;
        float of_o = 1.0f, of_x = 1.0f, sum = 0.0f, u[8], v[8];
        if (on) x = te_raw_ask<8>(a.x, at.from + c, X_VECTOR), o = te_raw_ask<8>(a.o, at.to + c, a.o_dt);
        if (a.lse) {
            if (on) sum = te__context_lse(a.lse[at.lse], a.x_lse[at.x_lse], &of_o, &of_x);
            __syncwarp();
            if (on && c == 0) a.lse[at.lse] = sum;
        }
        if (!on) continue;
        te_raw_values<8>(x, X_VECTOR, u);
        te_raw_values<8>(o, a.o_dt, v);
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] = v[i] * of_o + u[i] * of_x;
        te_store8(a.o, at.to + c, a.o_dt, v);
    }
}
#else
TE_DEV void te_context_rows(const te__context_merge_kargs &a) {
    const int lane = threadIdx.x % TE_WARP;
    const te_i64 rows = a.size[0] * a.size[1] * a.size[2];
    for (te_i64 row = (te_i64)blockIdx.x * 4 + threadIdx.x / TE_WARP; row < rows; row += (te_i64)gridDim.x * 4) {
        const te_context_row<te_i64> at(a, row);
        float of_o = 1.0f, of_x = 1.0f;
        if (a.lse) {
            const float sum = te__context_lse(a.lse[at.lse], a.x_lse[at.x_lse], &of_o, &of_x);
            __syncwarp();
            if (lane == 0) a.lse[at.lse] = sum;
        }
        for (int c = lane; c < a.d; c += TE_WARP)
            te_store(a.o, at.to + c, a.o_dt,
                     te_load(a.o, at.to + c, a.o_dt) * of_o + te_load(a.x, at.from + c, a.x_dt) * of_x);
    }
}
#endif

extern "C" __global__ void __launch_bounds__(128) te_context_merge(const __grid_constant__ te__context_merge_kargs a) {
    te_follow();
    if (blockIdx.x == 0 && a.largest)
        for (te_i64 h = threadIdx.x; h < a.size[2]; h += 128)
            if (a.x_max[h] > a.largest[h]) a.largest[h] = a.x_max[h];
    te_context_rows(a);
}
