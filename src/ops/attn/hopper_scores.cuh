// ops/attn/hopper_scores.cuh: turns products Q K^T into scores, for the attention kernels of sm_90a. This file depends
// on the layout of fragments of S. It must not depend on a kernel's pipeline.
//
// A score is scale * product + bias - slope |i + delta - j|, changed by the user's rule (te_score_mod). S is the
// fragment in registers:
// - In general S holds score / scale. So ALiBi and a bias are divided by the scale.
// - With the user's rule S holds the scores.
// - With a soft cap S holds the tanh, and ALiBi and a bias are not possible.
//
// Options (plain attention has none):
// - X_ALIBI: 0, 1.
// - X_BIAS: 0, or the bias's te_dtype.
// - X_PAIRS: 0: a bias is read element by element. 1: two adjacent elements at a time; rows must start at multiples of
//   two elements. 2: as 1, and all queries share one row.
// - X_MASK: 0, 1.
// - X_CAP: 0, 1.
// - X_MOD: see attn.cuh.
#pragma once
#include "ops/attn/hopper.cuh"

#ifndef X_ALIBI
#define X_ALIBI 0
#endif
#ifndef X_BIAS
#define X_BIAS 0
#endif
#ifndef X_PAIRS
#define X_PAIRS 0
#endif
#ifndef X_MASK
#define X_MASK 0
#endif
enum {
    ALIBI = X_ALIBI,
    BIAS = X_BIAS,
    PAIRS = X_PAIRS,
    MASK = X_MASK,
    HIDES = X_MASK || MOD_HIDES,
    SCORES = X_ALIBI || X_BIAS || X_MASK || X_MOD || X_CAP,
    CHANGES = X_MOD || X_CAP
};

// Returns the factor that turns S into units of log2. The softmax multiplies S by it.
TE_DEV float te_softmax_scale2(const te__attn_kargs &a) { return MOD ? TE_LOG2E : CAP ? a.x.softcap2 : a.scale2; }
// Returns the factor that turns S into the scores that the user's rule gets.
TE_DEV float te_score_scale(const te__attn_kargs &a) { return CAP ? a.x.softcap : a.scale; }
// Replaces products by their tanh if there is a soft cap. It must run before masks set elements of S to -inf, because
// tanh would turn -inf into -1.
template <int N> TE_DEV void te_cap(float (&s)[N], const te__attn_kargs &a) {
#pragma unroll
    for (int i = 0; i < (CAP ? N : 0); i++) s[i] = te_attn_tanh(a, s[i]);
}
// Replaces a thread's products by their tanh if there is a soft cap. `near` allows a cheaper polynomial, which is
// used if all products of the thread are small. `near` must be false for a tile with rows or keys beyond the sequence:
// those may be of another sequence, which must not change the result.
template <int N> TE_DEV void te_cap(float (&s)[N], const te__attn_kargs &a, bool near) {
    static_assert(N % 16 == 0, "whole parts");
    if (!CAP) return;
    float fourth = 0.0f; // the sum of the fourth powers. If it is at most 1/16, every element is within -0.5 .. 0.5
#pragma unroll
    for (int n = 0; n < N; n++) {
        s[n] *= a.x.softcap_in;
        const float square = s[n] * s[n];
        fourth = fmaf(square, square, fourth);
    }
    if (near && fourth <= 0.0625f) {
#pragma unroll
        for (int n = 0; n < N; n++) s[n] = te__attn_tanh_near(s[n], s[n] * s[n]);
    } else {
#pragma unroll 1
        // There are registers for sixteen results only. The array is rotated, so that every index is a constant.
        for (int part = 0; part < N; part += 16) {
            float of[16];
#pragma unroll
            for (int n = 0; n < 16; n++) of[n] = te__attn_tanh(s[n]);
#pragma unroll
            for (int n = 0; n < N - 16; n++) s[n] = s[n + 16];
#pragma unroll
            for (int n = 0; n < 16; n++) s[N - 16 + n] = of[n];
        }
    }
}
// Returns ALiBi's slope in units of products.
TE_DEV float te_slope(const te__attn_kargs &a, int b, int h) {
    return __fdividef(te_attn_of<1>::slope2(a, b, h), a.scale2);
}
// Returns the factor of a bias in units of products.
TE_DEV float te_bias_scale(const te__attn_kargs &a) { return __fdividef(a.x.bias_scale, a.scale); }

// Loads a word (te_ldg8: two words), which no kernel may write at the same time. `volatile` keeps the load early.
TE_DEV te_u32 te_ldg4(const void *p) {
    te_u32 x;
    asm volatile("ld.global.nc.b32 %0, [%1];" : "=r"(x) : "l"(p));
    return x;
}
TE_DEV void te_ldg8(const void *p, te_u32 &x, te_u32 &y) {
    asm volatile("ld.global.nc.v2.b32 {%0, %1}, [%2];" : "=r"(x), "=r"(y) : "l"(p));
}

TE_DEV te_u32 te_ldg2(const void *p) {
    te_u16 x;
    asm volatile("ld.global.nc.u16 %0, [%1];" : "=h"(x) : "l"(p));
    return x;
}

// The bias for a thread's fragment of S, whose rows are queries. The N elements are two rows, 8 apart, and two of every
// eight columns.
template <int N> struct te_bias_rows {
    enum {
        SIZE = BIAS == TE_F32 ? 4 : 2,
        ROWS = PAIRS == 2 ? 1 : 2,
        OF_PAIR = SIZE / 2,                         // words of two elements
        AHEAD = ROWS * OF_PAIR == 4 ? N / 8 : N / 4, // groups of eight columns that are loaded ahead: as many as fit
                                                     // into N / 2 registers
        WORDS = AHEAD * ROWS * OF_PAIR
    };
    const char *row[ROWS]; // addresses of the thread's first column in its rows
    te_i64 column;         // bytes from one column to the next
    int count;             // number of columns that exist from the thread's first column on
    te_u32 word[WORDS];

    // Sets the position to rows i and i + 8 and the columns from j on. A row beyond the last one reads the last one.
    TE_DEV void open(const te__attn_kargs &a, int b, int h, int i, int j) {
        const te__attn_table &t = a.x.bias;
        column = PAIRS ? SIZE : SIZE * t.j;
        count = a.s_kv - j;
#pragma unroll
        for (int r = 0; r < ROWS; r++)
            row[r] = (const char *)t.p + SIZE * (b * t.b + h * t.h + min(i + 8 * r, a.s_q - 1) * t.i) + j * column;
    }
    // Loads two columns from address `from` into x and y. Without WHOLE, columns from number `left` on become 0.
    template <bool WHOLE> TE_DEV void two(const char *from, int left, te_u32 &x, te_u32 &y) const {
        if (!WHOLE) x = y = 0;
        if (!WHOLE && left <= 0) return;
        if (PAIRS && BIAS == TE_F32) te_ldg8(from, x, y);
        else if (PAIRS || BIAS == TE_F32) x = te_ldg4(from);
        else x = te_ldg2(from);
        if (PAIRS || (!WHOLE && left == 1)) return;
        if (BIAS == TE_F32) y = te_ldg4(from + column);
        else x |= te_ldg2(from + column) << 16;
    }
    template <bool WHOLE> TE_DEV void load_part(int first) {
#pragma unroll
        for (int j = 0; j < AHEAD; j++)
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                te_u32 *const to = word + (j * ROWS + r) * OF_PAIR;
                two<WHOLE>(row[r] + (first + 8 * j) * column, count - first - 8 * j, to[0], to[OF_PAIR - 1]);
            }
    }
    // Loads the first AHEAD groups of eight columns, beginning at column `first`.
    TE_DEV void load(int first) {
        if (first + 2 * N - 6 <= count) load_part<true>(first);
        else load_part<false>(first);
    }
    // Reads all words from a tile of 64 rows in shared memory, in TMA's layout. The result is 0, and depends on every
    // load: an instruction that uses it waits for the loads.
    TE_DEV te_u32 take(te_u32 tile) {
        const int row = threadIdx.x & 127;
        te_u32 any = 0;
#pragma unroll
        for (int j = 0; j < WORDS / 4; j++) {
            const int piece = 2 * j + (row >> 4 & 1);
            te_ldmatrix4(word + 4 * j, tile + (piece >> 3) * 8192 + te_swizzled(row >> 5 << 4 | (row & 15), piece & 7));
            any |= word[4 * j];
        }
        // at most 32 bits are set, and 32 >> 6 is 0
        asm volatile("{ .reg .b32 bits; popc.b32 bits, %1; shr.u32 %0, bits, 6; }" : "=r"(any) : "r"(any));
        return any;
    }
    // Returns the bias for row `half`: x for column first + 8 j, y for the column after it.
    TE_DEV void get(int first, int j, int half, float &x, float &y) const {
        const int r = half % ROWS;
        te_u32 v, w;
        if (j < AHEAD) v = word[(j * ROWS + r) * OF_PAIR], w = word[(j * ROWS + r) * OF_PAIR + OF_PAIR - 1];
        else two<false>(row[r] + (first + 8 * j) * column, count - first - 8 * j, v, w);
        if (BIAS == TE_F32) x = __uint_as_float(v), y = __uint_as_float(w);
        else if (BIAS == TE_BF16) x = __uint_as_float(v << 16), y = __uint_as_float(v & 0xffff0000u);
        else x = te_f16_to_f32((te_u16)v), y = te_f16_to_f32((te_u16)(v >> 16));
    }
    TE_DEV void add(float (&s)[N], int first, float scale) const {
#pragma unroll
        for (int i = 0; i < N / 2; i++) {
            float x, y;
            get(first, i / 2, i % 2, x, y);
            s[2 * i] = fmaf(x, scale, s[2 * i]);
            s[2 * i + 1] = fmaf(y, scale, s[2 * i + 1]);
        }
    }
};

// Sets a thread's fragment of S to -slope |distance|, or adds that to it (ADD). `at` is the first element's distance,
// column - row. `least` is the warp's least distance.
template <bool ADD, int N> TE_DEV void te_start_alibi(float (&s)[N], float slope, int at, int least) {
    const bool rising = least >= 0, falling = least + 2 * N + 14 <= 0;
    if (rising || falling) { // the distance is linear along a row, so it changes by constants
        const float tilt = rising ? -slope : slope;
#pragma unroll
        for (int i = 0; i < N; i++) {
            const float from = tilt * (float)(at - 8 * (i / 2 % 2));
            s[i] = fmaf(tilt, (float)(8 * (i / 4) + i % 2), ADD ? s[i] + from : from);
        }
    } else {
#pragma unroll
        for (int i = 0; i < N; i++)
            s[i] = fmaf(-slope, fabsf((float)(at - 8 * (i / 2 % 2) + 8 * (i / 4) + i % 2)), ADD ? s[i] : 0.0f);
    }
}

// ALiBi as an additional matrix product. The rows of S are queries. On one side of the diagonal ALiBi is linear along a
// row: tilt * (at + column). `at` is the difference key - query at column 0. The tensor cores add tilt * column to S.
// The softmax adds tilt * at, called `shift`. tilt is the sum of three bf16 numbers. Column numbers are exact in bf16.
//
// The product is used with CUDA up to 13.0 only. The compiler of 13.5 lacks registers for it, and makes all products
// wait for each other. With newer compilers bend() adds tilt * column.
struct te_line {
    enum { PRODUCT = __CUDACC_VER_MAJOR__ < 13 || (__CUDACC_VER_MAJOR__ == 13 && __CUDACC_VER_MINOR__ == 0) };
    float slope, tilt, shift[2]; // shift: tilt * at, for each of the thread's two rows
    te_u32 rising, a[4];   // rising: operand A for a rising line; a: operand A of the next product
    bool bent;             // true: the warp has elements on both sides of the diagonal, so there is no product
    TE_DEV void open(float of) {
        const int t = threadIdx.x & 3;
        const float hi = te_bf16_to_f32(te_f32_to_bf16(of)), mid = te_bf16_to_f32(te_f32_to_bf16(of - hi));
        slope = of;
        rising = t == 0   ? te_f32x2_to_half(hi, mid, TE_BF16)
                 : t == 1 ? te_f32x2_to_half(of - hi - mid, 0.0f, TE_BF16)
                          : 0;
    }
    // Prepares operand A and the shift. `at` is the difference key - query at column 0 of the thread's upper row.
    // `first` and `last` are the least and the greatest such difference among the elements that the warp's rows see.
    TE_DEV void start(int at, int first, int last) {
        const bool up = last <= 0, down = !up && first >= 0;
        bent = !up && !down;
        tilt = up ? slope : down ? -slope : 0.0f;
        if (!PRODUCT) at += 2 * (threadIdx.x & 3); // moves `at` to the thread's first column
        a[0] = a[1] = up ? rising : down ? rising ^ 0x80008000u : 0;
        a[2] = a[3] = 0;
        shift[0] = tilt * (float)at;
        shift[1] = tilt * (float)(at - 8);
    }
    TE_DEV static constexpr int bytes(int n) { return 16 * (n + 8); }
    // Returns the descriptor of a K-major operand without a swizzle. Eight rows by eight elements along k have 128
    // bytes. `next` is the distance in bytes to the next eight elements along k.
    TE_DEV static te_u64 desc(te_u32 at, int next) {
        return (te_u64)((at & 0x3ffff) >> 4) | (te_u64)(next >> 4) << 16 | (te_u64)(128 >> 4) << 32;
    }
    // Writes operand B to shared memory; all `threads` threads must call this function. B has n rows of eight elements.
    // The first three elements of a row are the number of the row, the other five are 0. Eight rows of zeros follow
    // row n - 1, because the product reads row r + 8 as the continuation of row r.
    TE_DEV static void columns(te_u32 to, int n, int thread, int threads) {
        for (int i = thread; i < n + 8; i += threads) {
            const float j = i < n ? (float)i : 0.0f;
            te_sts16(to + 16 * i,
                     make_uint4(te_f32x2_to_half(j, j, TE_BF16), te_f32x2_to_half(j, 0.0f, TE_BF16), 0, 0));
        }
    }
    template <int N> TE_DEV void add(float (&s)[N], te_u32 columns) const {
        if (!PRODUCT) return;
        // The second half of k is the next eight rows. Operand A is 0 there.
        const te_u64 b = desc(columns, 128);
#define TE__PRODUCT(n) \
    if constexpr (N == n / 2) TE_WGMMA_A_##n("k16.f32.bf16.bf16", ", 1, 1, 0", s, a, b, 1);
        TE__PRODUCT(64)
        TE__PRODUCT(96)
        TE__PRODUCT(128)
#undef TE__PRODUCT
    }
    // Adds the part of ALiBi that the products have not added. It runs after the products. `at` is key - query of the
    // thread's first element.
    template <int N> TE_DEV void bend(float (&s)[N], int at) const {
        if (!bent) {
#pragma unroll
            for (int i = 0; i < (PRODUCT ? 0 : N); i++) s[i] = fmaf(tilt, (float)(8 * (i / 4) + i % 2), s[i]);
            return;
        }
#pragma unroll
        for (int i = 0; i < N; i++)
            s[i] = fmaf(-slope, fabsf((float)(at - 8 * (i / 2 % 2) + 8 * (i / 4) + i % 2)), s[i]);
    }
    // Adds the shift to S. This is for the user's rule for scores, which needs complete scores.
    template <int N> TE_DEV void finish(float (&s)[N]) {
#pragma unroll
        for (int i = 0; i < N; i++) s[i] += shift[i / 2 % 2];
        shift[0] = shift[1] = 0.0f;
    }
};

// Returns a bit for each element of a thread's fragment; 1: no mask hides the key. Bit 4 * k + 2 * half + e is row
// `half` and column 8 k + e. The first element is query i and key j. `full`: the user's mask is not evaluated.
template <int N, bool TRANSPOSED, int STEP = 4>
TE_DEV te_u64 te_shown(const te__attn_kargs &a, int b, int h, int i, int j, bool full) {
    const te__attn_table &t = a.x.mask;
    const te_attn_mod mod(a.x);
    const te_u8 *const mask = (const te_u8 *)t.p + b * t.b + h * t.h;
    te_u64 bits = 0;
    static_assert(N / 4 % STEP == 0 && STEP <= 8, "whole steps, of 32 bits at most");
    if (!MASK && full) return ~bits;
#pragma unroll 1
    for (int first = 0; first < N / 4; first += STEP) {
        te_u32 some = 0;
#pragma unroll
        for (int k = 0; k < STEP; k++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int down = 8 * (e / 2), along = 8 * (first + k) + e % 2, query = i + (TRANSPOSED ? along : down),
                          key = j + (TRANSPOSED ? down : along);
                bool sees = full || mod.mask(b, h, query, key);
                if (MASK) sees = sees && !mask[min(query, a.s_q - 1) * t.i + min(key, a.s_kv - 1) * t.j];
                some |= sees ? 1u << (4 * k + e) : 0u;
            }
        asm volatile("" : "+r"(some)); // otherwise the compiler does all of it in 64 bits
        bits |= (te_u64)some << (4 * first);
    }
    return bits;
}

// Returns P for an element s of S in the backward pass. Sets `factor`, so that dS = factor (dP - delta).
TE_DEV float te_weight(const te__attn_kargs &a, float s, float lse2, int b, int h, int i, int j, float &factor) {
    const te_attn_mod mod(a.x);
    float p = te_exp2(fmaf(MOD ? mod.score(s * te_score_scale(a), b, h, i, j) : s, te_softmax_scale2(a), -lse2));
    if (MOD && s == -TE_INF) p = 0.0f;
    factor = CAP ? p * te_attn_slope(s) : p;
    if (MOD) factor = p == 0.0f ? 0.0f : factor * mod.bprop(s * te_score_scale(a), b, h, i, j);
    return p;
}

// The bias as the initial value of S^T, whose rows are keys. load() and take() give it unconverted; start() converts
// it.
template <int N> struct te_bias_columns {
    enum { SIZE = BIAS == TE_F32 ? 4 : 2, ONE = PAIRS == 2 };
    TE_DEV static te_u32 element(const char *p) {
        if (BIAS == TE_F32) return te_ldg4(p);
        return te_ldg2(p);
    }
    // Loads the bias of queries i, i + 1, i + 8, i + 9, ... and keys j and j + 8. In place of a query or key that does
    // not exist, loads the bias of one that exists. One address moves from query to query, because registers cannot
    // hold all addresses.
    TE_DEV static void load(float (&s)[N], const te__attn_kargs &a, int b, int h, int i, int j) {
        const te__attn_table &t = a.x.bias;
        const te_i64 upper = SIZE * t.j * min(j, a.s_kv - 1), right = SIZE * t.j * min(j + 8, a.s_kv - 1) - upper,
                     down = SIZE * t.i;
        const char *at = (const char *)t.p + SIZE * (b * t.b + h * t.h + min(i, a.s_q - 1) * t.i) + upper;
#pragma unroll
        for (int k = 0; k < (ONE ? 1 : N / 2); k++) {
            s[4 * (k / 2) + k % 2] = __uint_as_float(element(at));
            s[4 * (k / 2) + 2 + k % 2] = __uint_as_float(element(at + right));
            const te_i64 step = i + 8 * ((k + 1) / 2) + (k + 1) % 2 < a.s_q ? (k % 2 ? 7 : 1) * down : 0;
            asm volatile("add.s64 %0, %0, %1;" : "+l"(at) : "l"(step));
        }
    }
    // Reads the bias from a tile in TMA's layout: boxes of 64 queries, 16 KB apart. A row has the warpgroup's 64 keys.
    TE_DEV static void take(float (&s)[N], te_u32 tile) {
        const int lane = threadIdx.x & 31, piece = 2 * (threadIdx.x >> 5 & 3) + (lane >> 3 & 1);
#pragma unroll
        for (int k = 0; k < N / 8; k++) { // 16 queries
            te_u32 word[4];
            te_ldmatrix4_trans(word, tile + (k >> 2) * 16384 +
                                         te_swizzled(16 * (k & 3) + (lane >> 4 << 3 | (lane & 7)), piece));
#pragma unroll
            for (int i = 0; i < 4; i++)
                s[8 * k + 2 * i] = __uint_as_float(word[i] & 0xffffu),
                              s[8 * k + 2 * i + 1] = __uint_as_float(word[i] >> 16);
        }
    }
    // Converts the loaded bias to f32 and multiplies it by `scale`. S^T starts with the result.
    TE_DEV static void start(float (&s)[N], float scale) {
#pragma unroll
        for (int i = 0; i < (ONE ? 4 : N); i++) {
            const te_u32 x = __float_as_uint(s[i]);
            s[i] = scale * (BIAS == TE_F32    ? __uint_as_float(x)
                            : BIAS == TE_BF16 ? __uint_as_float(x << 16)
                                              : te_f16_to_f32((te_u16)x));
        }
#pragma unroll
        for (int i = 0; i < (ONE ? N : 0); i++) s[i] = s[i / 2 % 2 * 2];
    }
};
