// ops/gemm/epilogue.cuh: the epilogue of an accumulator: scale, bias, GELU or its derivative, accumulate, store. And the order of tiles.
//
//   v = scale_a scale_b acc + bias      GELU: aux = v, v = gelu(v)      DGELU: v = v gelu'(aux)      D = v + (accumulate ? D : 0)
//
// scale_a may be one number for each row of D, scale_b one for each column: they are multiplied in first. Scales of blocks of k are not the
// epilogue's: they have been applied to partial sums.
//
// Tensor-core kernels pass their accumulators through a stage of shared memory, 16 rows of 64 columns for each warp, so that device
// memory sees whole rows whatever the fragment looks like.
#pragma once
#include "device/vector.cuh"
#include "ops/gemm/kargs.h"

// ---- D, aux and bias: f32, f16 or bf16, known at run time -------------------------------------------------------------
// With a literal format the functions of base.cuh fold to one case; these choose among the three that can come.

TE_DEV float te_gemm_load(const void *p, te_i64 i, int dt) {
    return dt == TE_F32 ? te_load(p, i, TE_F32) : dt == TE_BF16 ? te_load(p, i, TE_BF16) : te_load(p, i, TE_F16);
}
TE_DEV void te_gemm_store(void *p, te_i64 i, int dt, float v) {
    if (dt == TE_F32)
        te_store(p, i, TE_F32, v);
    else if (dt == TE_BF16)
        te_store(p, i, TE_BF16, v);
    else
        te_store(p, i, TE_F16, v);
}
TE_DEV void te_gemm_load8(const void *p, te_i64 i, int dt, float v[8]) {
    if (dt == TE_F32)
        te_load8(p, i, TE_F32, v);
    else if (dt == TE_BF16)
        te_load8(p, i, TE_BF16, v);
    else
        te_load8(p, i, TE_F16, v);
}
TE_DEV void te_gemm_store8(void *p, te_i64 i, int dt, const float v[8]) {
    if (dt == TE_F32)
        te_store8(p, i, TE_F32, v);
    else if (dt == TE_BF16)
        te_store8(p, i, TE_BF16, v);
    else
        te_store8(p, i, TE_F16, v);
}

// ---- one value -------------------------------------------------------------------------------------------------------

// The tanh form of Hendrycks and Gimpel, as TransformerEngine has it, by 0.5 + 0.5 tanh(u) = sigmoid(2 u): one exponential and one reciprocal,
// and no cancellation where x is far below 0.
TE_DEV float te_gemm_exp2(float x) {
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}
TE_DEV float te_gemm_reciprocal(float x) { // of at most 2^126: without a division's care for more
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}
// exp(-2 u), at most 2^60: beyond, the sigmoid is as good as 0, and products of two stay finite.
TE_DEV float te_gemm_exp_minus_2u(float x) {
    float xx = x * x;
    return te_gemm_exp2(fminf(x * (-2.3022082f - 0.10294324f * xx), 60.0f));
}
TE_DEV float te_gemm_sigmoid2u(float x) { return __fdividef(1.0f, 1.0f + te_gemm_exp_minus_2u(x)); }
// Of two, for one reciprocal: special functions are a quarter as fast as the others.
TE_DEV float2 te_gemm_sigmoid2u(float x, float y) {
    float a = 1.0f + te_gemm_exp_minus_2u(x), b = 1.0f + te_gemm_exp_minus_2u(y), r = te_gemm_reciprocal(a * b);
    return make_float2(r * b, r * a);
}
TE_DEV float te_gemm_gelu(float x) { return x * te_gemm_sigmoid2u(x); }
// The derivative for two between -8 and 8, or NaN, which stays where it is: the exponential is at most 2^60 for it too, and the other one's reciprocal finite.
TE_DEV float2 te_gemm_dgelu_within_8(float x, float y) {
    float2 s = te_gemm_sigmoid2u(x, y);
    return make_float2(fmaf(x * fmaf(x * x, 0.2140644486f, 1.59576912f), fmaf(-s.x, s.x, s.x), s.x), fmaf(y * fmaf(y * y, 0.2140644486f, 1.59576912f), fmaf(-s.y, s.y, s.y), s.y));
}
TE_DEV float te_gemm_dgelu(float x) { // beyond 8 the slope is 0 or 1; NaN stays
    x = x < -8.0f ? -8.0f : x > 8.0f ? 8.0f : x;
    return te_gemm_dgelu_within_8(x, x).x;
}
// The scales that all of D, or of one group's, has in common.
TE_DEV float te_gemm_scale(const te__gemm_kargs &a, int group = 0) {
    return (a.scale_a && !a.rows_a ? a.scale_a[a.groups.each_a ? group : 0] * a.factor_a : 1.0f) *
           (a.scale_b && !a.columns_b ? a.scale_b[a.groups.each_b ? group : 0] * a.factor_b : 1.0f);
}

// Two neighbours as one word of f16 or bf16, and back.
TE_DEV te_u32 te_gemm_pack(float lo, float hi, int dt) {
    te_u32 r;
    if (dt == TE_BF16) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
    else asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
    return r;
}
TE_DEV void te_gemm_unpack(te_u32 w, int dt, float &lo, float &hi) {
    lo = dt == TE_BF16 ? __uint_as_float(w << 16) : te_f16_to_f32((te_u16)w);
    hi = dt == TE_BF16 ? __uint_as_float(w & 0xffff0000u) : te_f16_to_f32((te_u16)(w >> 16));
}

// The block scale of line `line` (a row of A, a column of B) in block `block` of k.
TE_DEV float te_gemm_block_scale(const float *scale, int two_d, te_i64 ld, te_i64 line, te_i64 block) {
    return two_d ? scale[(line >> 7) * ld + block] : scale[block * ld + line];
}
// The product of two block scales, kept finite: 0 times it must stay 0.
TE_DEV float te_gemm_block_product(float a, float b) {
    float s = a * b;
    return s > TE_FLT_MAX ? TE_FLT_MAX : s;
}

// aux, old: the elements of aux (with DGELU) and of D (with accumulate).
TE_DEV void te_gemm_finish(const te__gemm_kargs &a, float scale, te_i64 row, te_i64 col, float acc, float aux, float old) {
    if (a.rows_a) acc *= a.scale_a[row] * a.factor_a;
    if (a.columns_b) acc *= a.scale_b[col] * a.factor_b;
    float v = fmaf(acc, scale, a.bias ? te_gemm_load(a.bias, col, a.bias_dt) : 0.0f);
    if (a.epilogue == TE_EPILOGUE_GELU) {
        if (a.aux) te_gemm_store(a.aux, row * a.ldaux + col, a.d_dt, v);
        v = te_gemm_gelu(v);
    } else if (a.epilogue == TE_EPILOGUE_DGELU) {
        v *= te_gemm_dgelu(aux);
    }
    if (a.accumulate) v += old;
    te_gemm_store(a.d, row * a.ldd + col, a.d_dt, v);
}
TE_DEV void te_gemm_finish(const te__gemm_kargs &a, float scale, te_i64 row, te_i64 col, float acc) {
    float aux = a.epilogue == TE_EPILOGUE_DGELU ? te_gemm_load(a.aux, row * a.ldaux + col, a.d_dt) : 0.0f;
    te_gemm_finish(a, scale, row, col, acc, aux, a.accumulate ? te_gemm_load(a.d, row * a.ldd + col, a.d_dt) : 0.0f);
}

// ---- eight neighbours of a row ---------------------------------------------------------------------------------------

// bias[8] for the columns from `col` on; zeros without one and beyond the last.
TE_DEV void te_gemm_bias8(const te__gemm_kargs &a, te_i64 col, float bias[8]) {
#pragma unroll
    for (int i = 0; i < 8; i++) bias[i] = a.bias && col + i < a.n ? te_gemm_load(a.bias, col + i, a.bias_dt) : 0.0f;
}

// v[8] holds the accumulators of row `row`, columns `col` (a multiple of 8) to col + 7; row < m, col < n.
TE_DEV void te_gemm_finish8(const te__gemm_kargs &a, float scale, const float bias[8], te_i64 row, te_i64 col, float v[8]) {
    if (!a.vector || col + 8 > a.n) {
        for (int i = 0; i < 8 && col + i < a.n; i++) te_gemm_finish(a, scale, row, col + i, v[i]);
        return;
    }
    float old[8];
    if (a.rows_a) {
        float of_row = a.scale_a[row] * a.factor_a;
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] *= of_row;
    }
    if (a.columns_b) {
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] *= a.scale_b[col + i] * a.factor_b;
    }
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = fmaf(v[i], scale, bias[i]);
    if (a.epilogue == TE_EPILOGUE_GELU) {
        if (a.aux) te_gemm_store8(a.aux, row * a.ldaux + col, a.d_dt, v);
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] = te_gemm_gelu(v[i]);
    } else if (a.epilogue == TE_EPILOGUE_DGELU) {
        te_gemm_load8(a.aux, row * a.ldaux + col, a.d_dt, old);
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] *= te_gemm_dgelu(old[i]);
    }
    if (a.accumulate) {
        te_gemm_load8(a.d, row * a.ldd + col, a.d_dt, old);
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] += old[i];
    }
    te_gemm_store8(a.d, row * a.ldd + col, a.d_dt, v);
}

// ---- a warp's stage: 16 rows of 64 f32 -------------------------------------------------------------------------------
// 16-byte pieces are permuted within their row so that fragment writes (float2 at column 2t of rows g) and row reads both touch every
// bank once.

#define TE_GEMM_STAGE_BYTES 4096

TE_DEV te_u32 te_gemm_stage_at(int row, int col) {
    int piece = col >> 2;
    piece ^= ((row & 3) << 1) ^ (piece >> 3);
    return (te_u32)(row * 256 + piece * 16 + (col & 3) * 4);
}

// One m16n8 fragment at columns `col` .. col + 7 of the stage.
TE_DEV void te_gemm_stage_put(char *stage, int col, const float d[4]) {
    int g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
    *(float2 *)(stage + te_gemm_stage_at(g, col + 2 * t)) = make_float2(d[0], d[1]);
    *(float2 *)(stage + te_gemm_stage_at(g + 8, col + 2 * t)) = make_float2(d[2], d[3]);
}

// Element by element, a lane beside the other; plain: with nothing but scale and bias to be done no row waits for the one before.
template <int COLS, int D_FORMAT>
TE_DEV void te_gemm_stage_scatter(const te__gemm_kargs &a, float scale, const char *stage, te_i64 row0, te_i64 col0, bool plain) {
    int lane = threadIdx.x & 31;
#pragma unroll 1
    for (int c = lane; c < COLS; c += 32) {
        te_i64 col = col0 + c;
        if (col >= a.n) continue;
        if (!plain) {
#pragma unroll 1
            for (int r = 0; r < 16; r += 4) { // four rows' values of D and aux are loaded at once
                float aux[4], old[4];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    bool there = row0 + r + i < a.m;
                    aux[i] = there && a.epilogue == TE_EPILOGUE_DGELU ? te_gemm_load(a.aux, (row0 + r + i) * a.ldaux + col, a.d_dt) : 0.0f;
                    old[i] = there && a.accumulate ? te_gemm_load(a.d, (row0 + r + i) * a.ldd + col, a.d_dt) : 0.0f;
                }
#pragma unroll
                for (int i = 0; i < 4; i++)
                    if (row0 + r + i < a.m) te_gemm_finish(a, scale, row0 + r + i, col, *(const float *)(stage + te_gemm_stage_at(r + i, c)), aux[i], old[i]);
            }
            continue;
        }
        float bias = a.bias ? te_gemm_load(a.bias, col, a.bias_dt) : 0.0f;
#pragma unroll 8
        for (int r = 0; r < 16; r++) {
            te_i64 row = row0 + r;
            if (row < a.m) te_store(a.d, row * a.ldd + col, D_FORMAT, fmaf(*(const float *)(stage + te_gemm_stage_at(r, c)), scale, bias));
        }
    }
}

// The stage's first COLS (32 or 64) columns to rows row0 .. and columns col0 .. of D. The whole warp calls; the stage is free again when it
// returns.
template <int COLS> TE_DEV void te_gemm_stage_finish(const te__gemm_kargs &a, float scale, const char *stage, te_i64 row0, te_i64 col0) {
    const int lanes = COLS / 8; // of one row
    int lane = threadIdx.x & 31, c = lane % lanes * 8;
    te_i64 col = col0 + c;
    __syncwarp();
    if (!a.vector) { // rows that start anywhere
        bool plain = !a.rows_a && !a.columns_b && a.epilogue == TE_EPILOGUE_NONE && !a.accumulate;
        if (a.d_dt == TE_F32) te_gemm_stage_scatter<COLS, TE_F32>(a, scale, stage, row0, col0, plain);
        else if (a.d_dt == TE_BF16) te_gemm_stage_scatter<COLS, TE_BF16>(a, scale, stage, row0, col0, plain);
        else te_gemm_stage_scatter<COLS, TE_F16>(a, scale, stage, row0, col0, plain);
    } else if (col < a.n) {
        float bias[8];
        te_gemm_bias8(a, col, bias);
#pragma unroll 1
        for (int r = lane / lanes; r < 16; r += 32 / lanes) {
            te_i64 row = row0 + r;
            if (row >= a.m) continue;
            float4 u = *(const float4 *)(stage + te_gemm_stage_at(r, c)), w = *(const float4 *)(stage + te_gemm_stage_at(r, c + 4));
            float v[8] = {u.x, u.y, u.z, u.w, w.x, w.y, w.z, w.w};
            te_gemm_finish8(a, scale, bias, row, col, v);
        }
    }
    __syncwarp();
}

// ---- order of tiles --------------------------------------------------------------------------------------------------

// Bands of eight tile rows, column by column: blocks that run at the same time share operands in the L2 cache. Tiles are counted in
// 32 bits: 64-bit division is slow, and more tiles than that do not fit into a memory.
TE_DEV void te_gemm_raster(te_u32 tile, te_u32 tiles_m, te_u32 tiles_n, te_u32 &tm, te_u32 &tn) {
    te_u32 band = tile / (8 * tiles_n), at = tile - band * 8 * tiles_n;
    te_u32 rows = tiles_m - band * 8 < 8 ? tiles_m - band * 8 : 8;
    tn = at / rows;
    tm = band * 8 + (at - tn * rows);
}
