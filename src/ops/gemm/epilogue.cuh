// ops/gemm/epilogue.cuh: the epilogue of an accumulator, and the order of tiles.
//
//   v = scale_a scale_b acc + bias
//   GELU:  aux = v, v = gelu(v)      DGELU:  v = v gelu'(aux)
//   D = v + (accumulate ? D : 0)
//
// scale_a may have one number for each row of D, and scale_b one for each column. Block scales have already been
// applied to the partial sums.
//
// In tensor-core kernels, te_gemm_stage stores D through shared memory. So each store writes many neighbouring
// elements.
#pragma once
#include "device/vector.cuh"
#include "ops/gemm/kargs.h"

// ---- D, aux and bias: f32, f16 or bf16, known at run time ------------------------------------------------------
// te_gemm_load and te_gemm_store call te_load8, te_load and te_store in one branch for each format. In a branch the
// format is a constant, so the branch has the code for this format alone. N is the number of elements. If N is 8, the
// elements start at a multiple of 16 bytes.

// Loads N elements as floats. The formats are written out: the compiler orders gemv_k's loads worse if a loop tries one
// format after the other (tests/bench/notes.md).
template <int N> TE_DEV void te_gemm_load(const void *p, te_i64 i, int dt, float v[N]) {
    if constexpr (N == 8) {
        dt == TE_F32    ? te_load8(p, i, TE_F32, v)
        : dt == TE_BF16 ? te_load8(p, i, TE_BF16, v)
                        : te_load8(p, i, TE_F16, v);
    } else {
        v[0] = dt == TE_F32 ? te_load(p, i, TE_F32) : dt == TE_BF16 ? te_load(p, i, TE_BF16) : te_load(p, i, TE_F16);
    }
}
template <int N> TE_DEV void te_gemm_store(void *p, te_i64 i, int dt, const float v[N]) {
    if constexpr (N == 8) {
        te_u32 w[8];
#pragma unroll
        for (int k = 0; k < 8; k++)
            w[k] = dt == TE_F32 ? __float_as_uint(v[k]) : k < 4 ? te_f32x2_to_half(v[2 * k], v[2 * k + 1], dt) : 0;
#pragma unroll
        // inline assembly, because in gemm_hopper the compiler would store a uint4 word by word
        for (int k = 0; k < (dt == TE_F32 ? 8 : 4); k += 4)
            asm volatile(
                "st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"((char *)p + i * (dt == TE_F32 ? 4 : 2) + 4 * k),
                "r"(w[k]), "r"(w[k + 1]), "r"(w[k + 2]), "r"(w[k + 3]));
    } else {
        dt == TE_F32    ? te_store(p, i, TE_F32, v[0])
        : dt == TE_BF16 ? te_store(p, i, TE_BF16, v[0])
                        : te_store(p, i, TE_F16, v[0]);
    }
}

// ---- one value ------------------------------------------------------------------------------------------------------

// GELU is the tanh form of Hendrycks and Gimpel, as in TransformerEngine. It is computed as x sigmoid(2 u), since 0.5 +
// 0.5 tanh(u) = sigmoid(2 u). This form has no cancellation for large negative x.
TE_DEV float te_gemm_exp2(float x) {
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}
TE_DEV float te_gemm_reciprocal(float x) { // returns 1 / x for x up to 2^126, faster than a division
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}
// Returns exp(-2 u), where tanh(u) is the tanh of GELU. The limit 2^60 keeps the product of two results finite.
TE_DEV float te_gemm_exp_minus_2u(float x) {
    float xx = x * x;
    return te_gemm_exp2(fminf(x * (-2.3022082f - 0.10294324f * xx), 60.0f));
}
TE_DEV float te_gemm_sigmoid2u(float x) { return __fdividef(1.0f, 1.0f + te_gemm_exp_minus_2u(x)); }
// Returns the sigmoids of x and y with one reciprocal. Special functions have a quarter of the normal rate.
TE_DEV float2 te_gemm_sigmoid2u(float x, float y) {
    float a = 1.0f + te_gemm_exp_minus_2u(x), b = 1.0f + te_gemm_exp_minus_2u(y), r = te_gemm_reciprocal(a * b);
    return make_float2(r * b, r * a);
}
TE_DEV float te_gemm_gelu(float x) { return x * te_gemm_sigmoid2u(x); }
// Returns GELU's derivatives at x and y, which must be between -8 and 8 or NaN. x and y share one reciprocal. If one
// of them is NaN, the result for the other is still right, because te_gemm_exp_minus_2u turns NaN into 2^60. The result
// for the NaN is NaN, because x (or y) is also a factor of its own result.
TE_DEV float2 te_gemm_dgelu_within_8(float x, float y) {
    float2 s = te_gemm_sigmoid2u(x, y);
    return make_float2(fmaf(x * fmaf(x * x, 0.2140644486f, 1.59576912f), fmaf(-s.x, s.x, s.x), s.x),
                       fmaf(y * fmaf(y * y, 0.2140644486f, 1.59576912f), fmaf(-s.y, s.y, s.y), s.y));
}
TE_DEV float te_gemm_dgelu(float x) { // beyond 8 the slope is 0 or 1; NaN stays
    x = x < -8.0f ? -8.0f : x > 8.0f ? 8.0f : x;
    return te_gemm_dgelu_within_8(x, x).x;
}
// Returns the product of the scales that are the same for all of D, or for all of one group's D.
TE_DEV float te_gemm_scale(const te__gemm_kargs &a, int group = 0) {
    return (a.scale_a && !a.rows_a ? a.scale_a[a.groups.each_a ? group : 0] * a.factor_a : 1.0f) *
           (a.scale_b && !a.columns_b ? a.scale_b[a.groups.each_b ? group : 0] * a.factor_b : 1.0f);
}

// Splits a word of two f16 or bf16 into floats.
TE_DEV void te_gemm_unpack(te_u32 w, int dt, float &lo, float &hi) {
    lo = dt == TE_BF16 ? __uint_as_float(w << 16) : te_f16_to_f32((te_u16)w);
    hi = dt == TE_BF16 ? __uint_as_float(w & 0xffff0000u) : te_f16_to_f32((te_u16)(w >> 16));
}

// Returns the block scale of line `line` for block number `block` of k. A line is a row of A or a column of B.
TE_DEV float te_gemm_block_scale(const float *scale, int two_d, te_i64 ld, te_i64 line, te_i64 block) {
    return two_d ? scale[(line >> 7) * ld + block] : scale[block * ld + line];
}
// Returns the product of two block scales, limited to the largest f32, because 0 times infinity would be NaN.
TE_DEV float te_gemm_block_product(float a, float b) {
    float s = a * b;
    return s > TE_FLT_MAX ? TE_FLT_MAX : s;
}

// ---- neighbours of a row --------------------------------------------------------------------------------------------

// Loads the bias of N columns from `col` on. It is 0 beyond the last column, and everywhere if there is no bias.
template <int N> TE_DEV void te_gemm_bias(const te__gemm_kargs &a, te_i64 col, float bias[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) {
        bias[i] = 0.0f;
        if (a.bias && col + i < a.n) te_gemm_load<1>(a.bias, col + i, a.bias_dt, bias + i);
    }
}

// A row of D: its number, and the positions of its first element in D and in aux.
struct te_gemm_row {
    te_i64 number, d, aux;
    TE_DEV te_gemm_row(const te__gemm_kargs &a, te_i64 row) : number(row), d(row * a.ldd), aux(row * a.ldaux) {}
    // Returns the number of columns from `col` to the first that starts at a multiple of 16 bytes in both D and aux.
    // Returns `all` if there is none.
    TE_DEV int before_piece(const te__gemm_kargs &a, te_i64 col, int all) const {
        if (a.vector) return 0;
        int size = a.d_dt == TE_F32 ? 4 : 2, off = (int)((te_u64)a.d + (d + col) * size) & 15,
            off_aux = (int)((te_u64)a.aux + (aux + col) * size) & 15;
        return a.aux && off != off_aux ? all : min(((16 - off) & 15) / size, all);
    }
};

// Applies the epilogue to v[N], the accumulators of a row from column `col` on, and stores D. If N is 8, `col` starts
// at a multiple of 16 bytes in D and aux.
template <int N>
TE_DEV void te_gemm_finish(const te__gemm_kargs &a, float scale, const float bias[N], const te_gemm_row &row,
                           te_i64 col, float v[N]) {
    float other[N], of_row = a.rows_a ? a.scale_a[row.number] * a.factor_a : 1.0f;
#pragma unroll
    for (int i = 0; i < N; i++) {
        if (a.rows_a) v[i] *= of_row;
        if (a.columns_b) v[i] *= a.scale_b[col + i] * a.factor_b;
        v[i] = fmaf(v[i], scale, bias[i]);
    }
    if (a.epilogue == TE_EPILOGUE_GELU) {
        if (a.aux) te_gemm_store<N>(a.aux, row.aux + col, a.d_dt, v);
#pragma unroll
        for (int i = 0; i < N; i++) v[i] = te_gemm_gelu(v[i]);
    } else if (a.epilogue == TE_EPILOGUE_DGELU) {
        te_gemm_load<N>(a.aux, row.aux + col, a.d_dt, other);
#pragma unroll
        for (int i = 0; i < N; i++) v[i] *= te_gemm_dgelu(other[i]);
    }
    if (a.accumulate) {
        te_gemm_load<N>(a.d, row.d + col, a.d_dt, other);
#pragma unroll
        for (int i = 0; i < N; i++) v[i] += other[i];
    }
    te_gemm_store<N>(a.d, row.d + col, a.d_dt, v);
}
TE_DEV void te_gemm_finish(const te__gemm_kargs &a, float scale, const te_gemm_row &row, te_i64 col, float acc) {
    float bias[1];
    te_gemm_bias<1>(a, col, bias);
    te_gemm_finish<1>(a, scale, bias, row, col, &acc);
}
TE_DEV void te_gemm_finish(const te__gemm_kargs &a, float scale, te_i64 row, te_i64 col, float acc) {
    te_gemm_finish(a, scale, te_gemm_row(a, row), col, acc);
}

// ---- a warp's stage: 16 rows of 32 or 64 f32, or 8 of 128 -----------------------------------------------------------

template <int COLS> struct te_gemm_stage {
    static const int ROWS = COLS == 128 ? 8 : 16, PITCH = COLS + 4; // PITCH: floats from one row to the next; rows
                                                                    // start in different banks
    static const int BYTES = ((ROWS - 1) * PITCH + COLS) * 4;
    // each lane stores PIECES pieces (8 elements each) of a row; LANES lanes together store the whole row
    static const int PIECES = COLS == 128 ? 2 : 1, LANES = COLS / 8 / PIECES;
    float *at;

    // Writes an m16n8 fragment to columns col .. col + 7. A stage of 8 rows holds only the upper (half = 0) or lower
    // (half = 1) eight rows.
    TE_DEV void put(int col, const float *d, int half = 0) const {
        float *to = at + (threadIdx.x & 31) / 4 * PITCH + col + threadIdx.x % 4 * 2;
        *(float2 *)to = make_float2(d[2 * half], d[2 * half + 1]);
        if (ROWS == 16) *(float2 *)(to + 8 * PITCH) = make_float2(d[2], d[3]);
    }

    // Applies the epilogue to the stage, and stores the result to D from (row0, col0) on. All 32 lanes must call this
    // function. On return the stage can be overwritten.
    TE_DEV void finish(const te__gemm_kargs &a, float scale, te_i64 row0, te_i64 col0) const {
        int lane = threadIdx.x & 31;
        // Without this line the compiler computes values from `lane` before the main loop, and they occupy registers.
        asm volatile("" : "+r"(lane));
        int first = lane % LANES, cols = a.n - col0 < COLS ? (int)(a.n - col0) : COLS;
        float bias[PIECES][8];
        __syncwarp();
#pragma unroll
        for (int i = 0; i < PIECES && a.vector; i++) te_gemm_bias<8>(a, col0 + 8 * (first + i * LANES), bias[i]);
#pragma unroll 1
        for (int r = lane / LANES; r < ROWS && row0 + r < a.m && cols > 0; r += 32 / LANES) {
            const te_gemm_row row(a, row0 + r);
            const float *from = at + r * PITCH;
            int before = row.before_piece(a, col0, cols), singles = before + (cols - before) % 8;
#pragma unroll
            for (int i = 0; i < PIECES; i++) {
                int c = before + 8 * (first + i * LANES);
                float v[8];
                if (c + 8 > cols) break;
#pragma unroll
                for (int e = 0; e < 8; e++) v[e] = from[c + e];
                if (!a.vector) te_gemm_bias<8>(a, col0 + c, bias[i]);
                te_gemm_finish<8>(a, scale, bias[i], row, col0 + c, v);
            }
#pragma unroll 1
            for (int i = first; i < singles; i += LANES) {
                int single = i < before ? i : cols - singles + i;
                te_gemm_finish(a, scale, row, col0 + single, from[single]);
            }
        }
        __syncwarp();
    }
};

// ---- order of tiles -------------------------------------------------------------------------------------------------

// Sets tm and tn to the tile row and tile column of `tile`. Tiles go in bands of eight tile rows, column by column. So
// concurrent blocks share operands in the L2 cache. Tile numbers have 32 bits, because 64-bit division is slow. No
// memory holds a D with more tiles.
TE_DEV void te_gemm_raster(te_u32 tile, te_u32 tiles_m, te_u32 tiles_n, te_u32 &tm, te_u32 &tn) {
    te_u32 band = tile / (8 * tiles_n), at = tile - band * 8 * tiles_n;
    te_u32 rows = tiles_m - band * 8 < 8 ? tiles_m - band * 8 : 8;
    tn = at / rows;
    tm = band * 8 + (at - tn * rows);
}
