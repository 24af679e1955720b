// ops/mxfp8/mxfp8_quantize.cu: quantizes x to MXFP8 along rows, along columns, or both. Each group of 32 elements (32 x
// 32 if two_dimensional) gets a scale, the exponent e.
//
//   e = RN(max |x| * RN(1 / fp8_max)), rounded up to a power of two, as E8M0; NaN is ignored
//   q = saturate(RNE(x * 2^(127 - e)))
//
// RN rounds to f32. RNE rounds to the FP8 format, to nearest even.
//
// x stays in registers. Along rows, four neighbouring lanes hold a group, and reduce it by shuffles. Along columns, the
// warps' maxima go through shared memory.
//
// The row-wise copy has `ld` columns, and the column-wise copy has `ldc` columns. The scales are padded to multiples of
// 128 rows and columns. The tiles cover the largest of these sizes. So all padding is written, with zeros.
//
// Benchmark: "quantize mxfp8 both copies", "quantize mxfp8 rowwise" in tests/bench/h200.csv.
//
// Launch: block 256; grid: x counts tiles along n, y and z count tiles along m. Any size and any alignment is allowed.
//
// te:baseline
// te:row X_DT=3 Y_DT=4
// te:row X_DT=3 Y_DT=5
// te:row X_DT=2 Y_DT=4
// te:row X_DT=2 Y_DT=5
// te:row X_DT=1 Y_DT=4
// te:row X_DT=1 Y_DT=5
#include "device/vector.cuh"
#include "ops/mxfp8/kargs.h"
#include "ops/mxfp8/mxfp8.cuh"
#ifndef X_DT
#define X_DT a.x_dt
#define Y_DT a.y_dt
#define BLOCKS 1 /* resident blocks a multiprocessor: few, to leave room for registers */
#else
#define BLOCKS (!TE_HAS_FP8_CVT ? 2 : X_DT == TE_F32 ? 4 : __CUDA_ARCH__ < 1000 ? 6 : 5)
#endif

TE_DEV float te_mx_half(te_u32 pair, int high, int dt) {
    te_u16 half = (te_u16)(high ? pair >> 16 : pair);
    return dt == TE_BF16 ? te_bf16_to_f32(half) : te_f16_to_f32(half);
}

// te_mx_rows_most writes the maximum of |x| over each of the thread's rows. te_mx_columns_most does so for each of the
// thread's columns. NaN is ignored.
TE_DEV void te_mx_rows_most(const te_raw<TE_ANY> w[4], int dt, float most[4]) {
#pragma unroll
    for (int r = 0; r < 4; r++) {
        if (dt == TE_F32) {
            most[r] = 0.0f;
#pragma unroll
            for (int k = 0; k < 8; k++) most[r] = fmaxf(most[r], fabsf(__uint_as_float(w[r].w[k])));
        } else {
            te_u32 pair = 0;
#pragma unroll
            for (int h = 0; h < 4; h++) pair = te_half2_max(pair, w[r].w[h] & 0x7fff7fffu, dt);
            most[r] = fmaxf(te_mx_half(pair, 0, dt), te_mx_half(pair, 1, dt));
        }
    }
}
TE_DEV void te_mx_columns_most(const te_raw<TE_ANY> w[4], int dt, float most[8]) {
#pragma unroll
    for (int h = 0; h < 4; h++) {
        if (dt == TE_F32) {
#pragma unroll
            for (int k = h; k < 8; k += 4) {
                most[k] = 0.0f;
#pragma unroll
                for (int r = 0; r < 4; r++) most[k] = fmaxf(most[k], fabsf(__uint_as_float(w[r].w[k])));
            }
        } else {
            te_u32 pair = 0;
#pragma unroll
            for (int r = 0; r < 4; r++) pair = te_half2_max(pair, w[r].w[h] & 0x7fff7fffu, dt);
            most[2 * h] = te_mx_half(pair, 0, dt), most[2 * h + 1] = te_mx_half(pair, 1, dt);
        }
    }
}
// v has the maxima of the lane's four rows. Four neighbouring lanes have a group of 32 columns. Returns the maximum of
// row `lane % 4` over these four lanes.
TE_DEV float te_mx_group_most(const float v[4], int lane) {
    bool up = lane & 2;
    float a = fmaxf(up ? v[2] : v[0], __shfl_xor_sync(TE_MX_ALL, up ? v[0] : v[2], 2));
    float b = fmaxf(up ? v[3] : v[1], __shfl_xor_sync(TE_MX_ALL, up ? v[1] : v[3], 2));
    up = lane & 1;
    return fmaxf(up ? b : a, __shfl_xor_sync(TE_MX_ALL, up ? a : b, 1));
}

// Writes the codes of the thread's 4 x 8 elements. `to` is the address of the first code. The output has only the first
// `rows` of the four rows, and the first `there` of the eight columns. If `columnwise`, `scale` has a factor for each
// column, otherwise for each row.
TE_DEV void te_mx_store_codes(te_u8 *to, te_i64 ld, int rows, int there, bool vector, const te_raw<TE_ANY> w[4], int dt,
                              const float scale[8], bool columnwise, int y_dt) {
#pragma unroll
    for (int r = 0; r < 4; r++) {
        te_u32 c[4];
#pragma unroll
        for (int h = 0; h < 4; h++) {
            float lo = __fmul_rn(te_raw_value(w[r], 2 * h, dt), columnwise ? scale[2 * h] : scale[r]);
            float hi = __fmul_rn(te_raw_value(w[r], 2 * h + 1, dt), columnwise ? scale[2 * h + 1] : scale[r]);
            c[h] = te_f32x2_to_fp8(lo, hi, y_dt);
        }
        c[0] |= c[1] << 16, c[1] = c[2] | c[3] << 16;
        if (r >= rows) continue;
        if (vector && there == 8) {
            *(uint2 *)(to + r * ld) = make_uint2(c[0], c[1]);
        } else {
#pragma unroll
            for (int k = 0; k < 8; k++)
                if (k < there) to[r * ld + k] = (te_u8)(c[k >> 2] >> (8 * (k & 3)));
        }
    }
}

extern "C" __global__ void __launch_bounds__(256, BLOCKS)
    te_mxfp8_quantize(const __grid_constant__ te__mxfp8_quantize_kargs a) {
    te_follow();
    __shared__ __align__(16) float part[8][TE__MX_COLS]; // [warp][column]: maxima over each warp's rows
    __shared__ __align__(16) te_u16 factors[TE__MX_COLS]; // upper halves of floats: a power of two has zeros in the
                                                          // lower half
    te_mx_place p;
    int rows = te_mx_left(a.m, p.row, 4), cols = te_mx_left(a.n, p.col, 8);
    te_raw<TE_ANY> w[4];
    // All loads are issued before the first element is used, so that their latencies overlap.
    if (a.vector_x && rows == 4 && cols == 8) {
#pragma unroll
        for (int r = 0; r < 4; r++) w[r] = te_raw_ask<8>(a.x, (p.row + r) * a.n + p.col, X_DT);
    } else {
#pragma unroll
        for (int r = 0; r < 4; r++)
            w[r] = te_raw_ask_part<8>(a.x, (p.row + r) * a.n + p.col, X_DT, r < rows ? cols : 0);
    }
    if (a.noop && *a.noop == 1.0f) return;
    float max_inverse = Y_DT == TE_F8E4M3 ? TE__E4M3_MAX_INVERSE : TE__E5M2_MAX_INVERSE, scale[8];

    if (a.col || a.two_dimensional) {
        float most[8], amax = 0.0f;
        te_mx_columns_most(w, X_DT, most);
#pragma unroll
        for (int h = 0; h < 2; h++)
            *(float4 *)(part[p.warp] + p.lane * 8 + 4 * h) =
                make_float4(most[4 * h], most[4 * h + 1], most[4 * h + 2], most[4 * h + 3]);
        __syncthreads();
#pragma unroll
        for (int i = 0; i < 8; i++) amax = fmaxf(amax, part[i][threadIdx.x]);
        if (a.two_dimensional) amax = te_warp_max(amax);
        te_u8 e = te__mxfp8_exponent(amax, max_inverse);
        factors[threadIdx.x] = (te_u16)(__float_as_uint(te__mxfp8_multiplier(e)) >> 16);
        // The scale of a 32 x 32 block is repeated for each row and column, but only for those that exist.
        te_i64 col = p.first_col + threadIdx.x, row = p.first_row + p.lane, group = p.first_row / 32;
        if (a.col && col < a.scale_cols && p.first_row < a.scale_rows)
            a.col_scale[te_mx_scale_at(col, group, a.scale_cols, a.scale_rows / 32, true, a.swizzled)] =
                col < a.n ? e : (te_u8)0;
        group = p.first_col / 32 + p.warp;
        if (a.two_dimensional && a.row && row < a.scale_rows && group * 32 < a.scale_cols)
            a.row_scale[te_mx_scale_at(row, group, a.scale_rows, a.scale_cols / 32, false, a.swizzled)] =
                row < a.m ? e : (te_u8)0;
        __syncthreads();
    }
    if (a.row) {
        if (a.two_dimensional) {
            scale[0] = scale[1] = scale[2] = scale[3] = __uint_as_float((te_u32)factors[p.lane * 8] << 16);
        } else {
            float most[4];
            te_mx_rows_most(w, X_DT, most);
            te_u8 e = te__mxfp8_exponent(te_mx_group_most(most, p.lane), max_inverse);
            te_i64 row = p.row + p.lane % 4, group = p.first_col / 32 + p.lane / 4;
            if (row < a.scale_rows && group * 32 < a.scale_cols)
                a.row_scale[te_mx_scale_at(row, group, a.scale_rows, a.scale_cols / 32, false, a.swizzled)] = e;
            float mine = te__mxfp8_multiplier(e);
#pragma unroll
            for (int r = 0; r < 4; r++) scale[r] = __shfl_sync(TE_MX_ALL, mine, (p.lane & 28) | r);
        }
        te_mx_store_codes((te_u8 *)a.row + p.row * a.ld + p.col, a.ld, rows, te_mx_left(a.ld, p.col, 8), a.vector_row,
                          w, X_DT, scale, false, Y_DT);
    }
    if (a.col) {
        uint4 u = *(const uint4 *)(factors + p.lane * 8);
        te_u32 pair[4] = {u.x, u.y, u.z, u.w};
#pragma unroll
        for (int k = 0; k < 8; k++) scale[k] = __uint_as_float(k & 1 ? pair[k >> 1] & 0xffff0000u : pair[k >> 1] << 16);
        te_mx_store_codes((te_u8 *)a.col + p.row * a.ldc + p.col, a.ldc, rows, te_mx_left(a.ldc, p.col, 8),
                          a.vector_col, w, X_DT, scale, true, Y_DT);
    }
}
