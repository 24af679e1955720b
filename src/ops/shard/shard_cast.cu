// ops/shard/shard_cast.cu: writes the codes of a slice into a row-wise copy of the matrix, or into a buffer that has
// only the slice.
//
// A thread handles a group: 16 neighbouring columns of one row, beginning at a multiple of 16. A group has one
// multiplier, except in MXFP8's column-wise copy. With `straight`, the matrix is treated as one long row, because a
// byte may hold the 4-bit codes of two rows. A group is then 16 neighbours in this long row. Groups that lie only
// partly in the slice, and groups of unaligned tensors, are processed element by element.
//
//   q = saturate(RNE(RN(x * multiplier)))      multiplier: TENSOR: the scale; BLOCK_2D: `multiplier`, or
//                                              RN(1 / scale_inv); MXFP8: 2^(127 - e), e is the code of
//                                              the scale; NVFP4: S / d, S is the scale of the tensor and
//                                              d the scale of the block
//
// Launch: block 256; one thread for each group.
//
// te:baseline
// te:row X_DT=3 SCALING=0
// te:row X_DT=3 SCALING=2
// te:row X_DT=3 SCALING=3
// te:row X_DT=3 SCALING=4
// te:row X_DT=2 SCALING=0
// te:row X_DT=2 SCALING=2
// te:row X_DT=2 SCALING=3
// te:row X_DT=2 SCALING=4
// te:row X_DT=1 SCALING=0
// te:row X_DT=1 SCALING=2
// te:row X_DT=1 SCALING=3
// te:row X_DT=1 SCALING=4
#include "ops/shard/kargs.h"
#include "ops/shard/shard.cuh"
#include "base/scaling.h"
#ifndef X_DT
#define X_DT a.x_dt
#define SCALING a.scaling
#endif

// Returns the multiplier of element (row, column).
TE_DEV float te_shard_multiplier(const te__shard_cast_kargs &a, te_i64 row, te_i64 column) {
    if (SCALING == TE_SCALING_TENSOR) return *(const float *)a.scale;
    if (SCALING == TE_SCALING_BLOCK_2D) {
        te_i64 at = (row >> 7) * a.scale_ld + (column >> 7);
        return a.multiplier ? a.multiplier[at] : te__rcp_f32(((const float *)a.scale)[at]);
    }
    const te_u8 *code = (const te_u8 *)a.scale;
    if (SCALING == TE_SCALING_MXFP8)
        return te__mxfp8_multiplier(
            code[a.columnwise ? (row >> 5) * a.scale_ld + column : row * a.scale_ld + (column >> 5)]);
    return te__nvfp4_multiplier(code[row * a.scale_ld + (column >> 4)],
                                te__nvfp4_tensor_scale(*a.amax_tensor, a.code_max));
}

// Packs the codes of sixteen values, four bits each.
TE_DEV uint2 te_e2m1x16(const float v[16]) {
    te_u32 w[2] = {};
#pragma unroll
    for (int k = 0; k < 16; k++) w[k >> 3] |= (te_u32)te__f32_to_e2m1(v[k]) << (4 * (k & 7));
    return make_uint2(w[0], w[1]);
}

extern "C" __global__ void __launch_bounds__(256) te_shard_cast(const __grid_constant__ te__shard_cast_kargs a) {
    te_follow();
    __shared__ float scratch[32];
    te_i64 group = (te_i64)blockIdx.x * 256 + threadIdx.x;
    bool some = group < a.count;
    group += a.first;
    te_i64 row;
    if (a.straight) row = 0;
    else if (((group | a.groups_per_row) >> 32) == 0)
        row = (te_u32)group / (te_u32)a.groups_per_row; // a 64-bit division is slow
    else row = group / a.groups_per_row;
    te_i64 column = (group - row * a.groups_per_row) * 16, width = a.straight ? a.rows * a.columns : a.columns;
    te_i64 i = row * width + column - a.start; // the group's first element is x[i]
    float largest = 0.0f;
    te_u8 *dst = (te_u8 *)a.dst;
    if (some && a.vector && i >= 0 && i + 16 <= a.n) {
        float v[16];
        te_load8(a.x, i, X_DT, v);
        te_load8(a.x, i + 8, X_DT, v + 8);
        if (SCALING == TE_SCALING_MXFP8 && a.columnwise) {
            uint4 u = *(const uint4 *)((const te_u8 *)a.scale + (row >> 5) * a.scale_ld + column);
            te_u32 e[4] = {u.x, u.y, u.z, u.w};
#pragma unroll
            for (int k = 0; k < 16; k++)
                v[k] = __fmul_rn(v[k], te__mxfp8_multiplier((te_u8)(e[k >> 2] >> (8 * (k & 3)))));
        } else {
            float multiplier = te_shard_multiplier(a, row, column);
#pragma unroll
            for (int k = 0; k < 16; k++) {
                if (SCALING == TE_SCALING_TENSOR) largest = fmaxf(largest, fabsf(v[k]));
                v[k] = __fmul_rn(v[k], multiplier);
            }
        }
        te_i64 at = a.flat ? i : row * a.ld + column;
        if (SCALING == TE_SCALING_NVFP4) {
            *(uint2 *)(dst + at / 2) = te_e2m1x16(v);
        } else {
            te_u32 w[4];
#pragma unroll
            for (int k = 0; k < 4; k++)
                w[k] = te_f32x2_to_fp8(v[4 * k], v[4 * k + 1], a.q_dt) |
                       (te_u32)te_f32x2_to_fp8(v[4 * k + 2], v[4 * k + 3], a.q_dt) << 16;
            *(uint4 *)(dst + at) = make_uint4(w[0], w[1], w[2], w[3]);
        }
    } else if (some) {
        te_u8 low = 0;
        bool have_low = false;
#pragma unroll 1
        for (int k = 0; k < 16 && column + k < width; k++) {
            bool inside = i + k >= 0 && i + k < a.n;
            te_u8 code = 0;
            if (inside) {
                te_i64 r = row, c = column + k;
                if (a.straight) r = c / a.columns, c -= r * a.columns;
                float x = te_load(a.x, i + k, X_DT), q;
                largest = fmaxf(largest, fabsf(x));
                q = __fmul_rn(x, te_shard_multiplier(a, r, c));
                if (SCALING == TE_SCALING_NVFP4) code = te__f32_to_e2m1(q);
                else dst[a.flat ? i + k : row * a.ld + column + k] = (te_u8)te_f32x2_to_fp8(q, 0.0f, a.q_dt);
            }
            if (SCALING != TE_SCALING_NVFP4) continue;
            // A byte is written whole if both of its codes are in the slice. Otherwise only one half of the byte is
            // changed.
            te_u8 *byte = a.flat ? dst + (i + k + (a.start & 1)) / 2 : dst + row * ((a.ld + 1) / 2) + (column + k) / 2;
            if ((k & 1) == 0) {
                low = code, have_low = inside;
                bool high_follows = column + k + 1 < width && i + k + 1 < a.n;
                if (inside && !high_follows) *byte = (te_u8)((*byte & 0xf0) | code);
            } else if (inside) {
                *byte = (te_u8)((have_low ? low : *byte & 0x0f) | code << 4);
            }
        }
    }
    if (SCALING == TE_SCALING_TENSOR && a.amax) {
        largest = te_block_max(largest, scratch);
        if (threadIdx.x == 0 && largest > *(volatile float *)a.amax) te_atomic_amax(a.amax, largest);
    }
}
