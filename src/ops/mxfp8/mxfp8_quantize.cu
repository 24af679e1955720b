// ops/mxfp8/mxfp8_quantize.cu: MXFP8 codes and scales along rows, along columns, or both, from one read of x. Per group of 32:
//   e = E8M0(RN(max |x| * RN(1 / fp8_max))) rounded up, NaN ignored;  q = saturate(RNE(x * 2^(127 - e)))
//
// mxfp8.cuh has the picture: 16 warps, each a tile of 32 x 32, all in registers. Only the scales meet in shared memory, so that they
// leave in words: as the 512 bytes of 128 x 4 scales that the swizzled layout is made of, plain or not.
//
// Beyond the edges of x a tile holds zeros, whose codes and scales are 0, and tiles cover `ld` and `ldc` columns: that is how all padding
// is written.
//
// Launch: block 512, grid: tiles of 128 x 128, along n in x, along m in y and z. Any size, any alignment of at least an element.
//
// te:baseline
// te:row X_DT=3 Y_DT=4
// te:row X_DT=3 Y_DT=5
// te:row X_DT=2 Y_DT=4
// te:row X_DT=2 Y_DT=5
// te:row X_DT=1 Y_DT=4
// te:row X_DT=1 Y_DT=5
#include "ops/mxfp8/kargs.h"
#include "ops/mxfp8/mxfp8.cuh"
#ifndef X_DT
#define X_DT a.x_dt
#define Y_DT a.y_dt
#define BLOCKS 1 /* a multiprocessor should hold: room for registers */
#else
#define BLOCKS (TE_HAS_FP8_CVT ? 2 : 1)
#endif

// Eight elements as they lie in memory: 4 words of 16-bit formats, 8 of f32.
TE_DEV void te_mx_load8(const void *x, te_i64 i, int dt, te_u32 w[8]) {
    const uint4 *q = (const uint4 *)((const te_u8 *)x + i * (dt == TE_F32 ? 4 : 2));
    uint4 u = q[0];
    w[0] = u.x, w[1] = u.y, w[2] = u.z, w[3] = u.w;
    if (dt == TE_F32) {
        u = q[1];
        w[4] = u.x, w[5] = u.y, w[6] = u.z, w[7] = u.w;
    }
}
// The same of any alignment; only `there` of them exist, the others are 0.
TE_DEV void te_mx_load_some(const void *x, te_i64 i, int there, int dt, te_u32 w[8]) {
#pragma unroll
    for (int k = 0; k < 8; k++) {
        if (k >= there) break;
        if (dt == TE_F32) w[k] = ((const te_u32 *)x)[i + k];
        else w[k >> 1] |= (te_u32)((const te_u16 *)x)[i + k] << (16 * (k & 1));
    }
}
TE_DEV float te_mx_half(te_u32 pair, int high, int dt) {
    te_u16 half = (te_u16)(high ? pair >> 16 : pair);
    return dt == TE_BF16 ? te_bf16_to_f32(half) : te_f16_to_f32(half);
}
TE_DEV float te_mx_value(const te_u32 w[8], int k, int dt) { return dt == TE_F32 ? __uint_as_float(w[k]) : te_mx_half(w[k >> 1], k & 1, dt); }

// The larger of two pairs of magnitudes: of a number and NaN, the number.
TE_DEV te_u32 te_mx_max2(te_u32 a, te_u32 b, int dt) {
    te_u32 c;
    if (dt == TE_BF16) asm("max.bf16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    else asm("max.f16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    return c;
}

// The maxima of |x| over the thread's rows and columns. They start at 0, so none ends as NaN. 16-bit formats are compared two at a time, as
// they lie.
TE_DEV void te_mx_local_max(const te_u32 w[4][8], int dt, float row_most[4], float col_most[8]) {
#pragma unroll
    for (int k = 0; k < 8; k++) col_most[k] = row_most[k & 3] = 0.0f;
    if (dt == TE_F32) {
#pragma unroll
        for (int r = 0; r < 4; r++)
#pragma unroll
            for (int k = 0; k < 8; k++) {
                float magnitude = fabsf(__uint_as_float(w[r][k]));
                row_most[r] = fmaxf(row_most[r], magnitude), col_most[k] = fmaxf(col_most[k], magnitude);
            }
    } else {
        te_u32 col[4] = {};
#pragma unroll
        for (int r = 0; r < 4; r++) {
            te_u32 row = 0;
#pragma unroll
            for (int h = 0; h < 4; h++) {
                te_u32 pair = w[r][h] & 0x7fff7fffu;
                row = te_mx_max2(row, pair, dt), col[h] = te_mx_max2(col[h], pair, dt);
            }
            row_most[r] = fmaxf(te_mx_half(row, 0, dt), te_mx_half(row, 1, dt));
        }
#pragma unroll
        for (int k = 0; k < 8; k++) col_most[k] = te_mx_half(col[k >> 1], k & 1, dt);
    }
}

// The codes of the thread's elements for one copy; `there` columns have a place in it. `scale` holds a factor for each column, or one in
// its first four for each row.
TE_DEV void te_mx_store_codes(te_u8 *to, te_i64 ld, int rows, int there, bool vector, const te_u32 w[4][8], int dt, const float scale[8],
                              bool columnwise, int y_dt) {
    uint2 code[4];
#pragma unroll
    for (int r = 0; r < 4; r++) {
        te_u32 c[4];
#pragma unroll
        for (int h = 0; h < 4; h++) {
            float lo = __fmul_rn(te_mx_value(w[r], 2 * h, dt), columnwise ? scale[2 * h] : scale[r]);
            float hi = __fmul_rn(te_mx_value(w[r], 2 * h + 1, dt), columnwise ? scale[2 * h + 1] : scale[r]);
            c[h] = te_f32x2_to_fp8(lo, hi, y_dt);
        }
        code[r] = make_uint2(c[0] | c[1] << 16, c[2] | c[3] << 16);
    }
    if (vector && rows >= 4 && there >= 8) {
#pragma unroll
        for (int r = 0; r < 4; r++) *(uint2 *)(to + r * ld) = code[r];
    } else {
#pragma unroll
        for (int r = 0; r < 4; r++)
#pragma unroll
            for (int k = 0; k < 8; k++)
                if (r < rows && k < there) to[r * ld + k] = (te_u8)((k < 4 ? code[r].x : code[r].y) >> (8 * (k & 3)));
    }
}

TE_DEV void te_mx_store_word(te_u8 *to, te_u32 w, bool vector) {
    if (vector) {
        *(te_u32 *)to = w;
    } else {
#pragma unroll
        for (int b = 0; b < 4; b++) to[b] = (te_u8)(w >> (8 * b));
    }
}

extern "C" __global__ void __launch_bounds__(512, BLOCKS) te_mxfp8_quantize(const __grid_constant__ te__mxfp8_quantize_kargs a) {
    __shared__ te_u32 row_scales[128], col_scales[128]; // 128 lines x 4 groups, swizzled: word line % 32 * 4 + line / 32, byte group
    te_mx_place p = te_mx_place_of_thread();
    int rows = te_mx_left(a.m, p.tile_m), cols = te_mx_left(a.n, p.tile_n);
    if (rows == 0) return;
    te_i64 at = te_mx_offset(p, a.n);
    te_u32 w[4][8] = {};
    if (a.vector_x && p.row + 4 <= rows && p.col + 8 <= cols) {
#pragma unroll
        for (int r = 0; r < 4; r++) te_mx_load8(a.x, at + r * a.n, X_DT, w[r]);
    } else {
#pragma unroll
        for (int r = 0; r < 4; r++) te_mx_load_some(a.x, at + r * a.n, p.row + r < rows ? cols - p.col : 0, X_DT, w[r]);
    }
    if (a.noop && *a.noop == 1.0f) return;

    float row_most[4], col_most[8], scale[8];
    te_mx_local_max(w, X_DT, row_most, col_most);
    float row_amax = te_mx_row_max(row_most, p.lane), col_amax = te_mx_col_max(col_most, p.lane);
    if (a.two_dimensional) row_amax = col_amax = te_warp_max(row_amax);

    float max_inverse = Y_DT == TE_F8E4M3 ? TE__E4M3_MAX_INVERSE : TE__E5M2_MAX_INVERSE;
    te_u8 row_e = te__mxfp8_exponent(row_amax, max_inverse), col_e = te__mxfp8_exponent(col_amax, max_inverse);
    // A tile's scale is repeated for the rows and columns that exist, and for no other.
    ((te_u8 *)row_scales)[p.lane * 16 + p.warp_m * 4 + p.warp_n] = p.scale_row < rows ? row_e : (te_u8)0;
    ((te_u8 *)col_scales)[(p.scale_col & 31) * 16 + p.warp_n * 4 + p.warp_m] = p.scale_col < cols ? col_e : (te_u8)0;

    if (a.row) {
        te_mx_spread_rows(te__mxfp8_multiplier(row_e), p.lane, scale);
        te_mx_store_codes((te_u8 *)a.row + te_mx_offset(p, a.ld), a.ld, rows - p.row, te_mx_left(a.ld, p.tile_n) - p.col, a.vector_row, w, X_DT,
                          scale, false, Y_DT);
    }
    if (a.col) {
        te_mx_spread_cols(te__mxfp8_multiplier(col_e), p.lane, scale);
        te_mx_store_codes((te_u8 *)a.col + te_mx_offset(p, a.ldc), a.ldc, rows - p.row, te_mx_left(a.ldc, p.tile_n) - p.col, a.vector_col, w, X_DT,
                          scale, true, Y_DT);
    }

    __syncthreads();
    if (cols == 0) return; // there is padding of codes here, but not of scales
    te_u32 tiles_m = (te_u32)te_div_up(a.m, 128), tiles_n = (te_u32)te_div_up(a.n, 128);
    int t = threadIdx.x & 127, line = t & 31, part = t >> 5;
    if (a.row && threadIdx.x < 128) {
        te_i64 plain = ((te_i64)p.tile_m * 128 + t) * tiles_n + p.tile_n, swizzled = ((te_i64)p.tile_m * tiles_n + p.tile_n) * 128 + t;
        te_mx_store_word(a.row_scale + (a.swizzled ? swizzled : plain) * 4, row_scales[a.swizzled ? t : line * 4 + part], a.vector_scales);
    }
    if (a.col && threadIdx.x >= 128 && threadIdx.x < 256) {
        te_i64 plain = (((te_i64)p.tile_m * 4 + part) * tiles_n + p.tile_n) * 32 + line, swizzled = ((te_i64)p.tile_n * tiles_m + p.tile_m) * 128 + t;
        te_u32 word = col_scales[t];
        if (!a.swizzled) { // four neighbouring columns of group `part`
            word = 0;
#pragma unroll
            for (int b = 0; b < 4; b++) {
                int column = line * 4 + b;
                word |= (col_scales[(column & 31) * 4 + (column >> 5)] >> (8 * part) & 0xffu) << (8 * b);
            }
        }
        te_mx_store_word(a.col_scale + (a.swizzled ? swizzled : plain) * 4, word, a.vector_scales);
    }
}
