// ops/attn/hopper_scores.cuh: what the attention kernels of sm_90a do to a product before the softmax: ALiBi, a bias, a
// mask of elements, the user's rule. Knows fragments of S, no pipeline.
//
// A score is  scale * product + bias - slope |i + delta - j|,  changed by the user's rule. S is in units of products,
// so that the softmax multiplies by scale2 as ever: what is added is divided by the scale. The user's rule makes it the
// score itself. A soft cap, with which nothing is added, makes S the tanh, and the softmax multiplies by the cap.
//
// Options: X_ALIBI (0, 1), X_BIAS (0 or its te_dtype), X_PAIRS (0: a bias is read element by element; 1: its rows, of
//          adjacent elements, start at multiples of two; 2: as 1, and all queries have one row), X_MASK (0, 1), X_CAP
//          (0, 1: without X_ALIBI and X_BIAS), X_MOD (attn.cuh).
//          Plain attention has none of them.
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

// The softmax's factor of S, in units of log2.
TE_DEV float te_softmax_scale2(const te__attn_kargs &a) { return MOD ? TE_LOG2E : CAP ? a.x.softcap2 : a.scale2; }
// Of S as the user's rule meets it: products, or their tanh.
TE_DEV float te_score_scale(const te__attn_kargs &a) { return CAP ? a.x.softcap : a.scale; }
// Products to their tanh, before anything is hidden: the derivative of what is hidden becomes 0 by itself.
template <int N> TE_DEV void te_cap(float (&s)[N], const te__attn_kargs &a) {
#pragma unroll
    for (int i = 0; i < (CAP ? N : 0); i++) s[i] = te_attn_tanh(a, s[i]);
}
// The same of a thread's part of S. Where all of it is below 0.5 a polynomial does, in half of the operations. `near`
// allows that: it is false for tiles with rows or keys beyond the sequence, which may be a neighbour's, so that a
// sequence has the same bits anywhere.
template <int N> TE_DEV void te_cap(float (&s)[N], const te__attn_kargs &a, bool near) {
    static_assert(N % 16 == 0, "whole parts");
    if (!CAP) return;
    float fourth = 0.0f; // no element is beyond 0.5 if the sum of fourth powers is not beyond 1/16
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
        for (int part = 0; part < N; part += 16) { // all at once would want more registers than there are, so the array
                                                   // goes round
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
// ALiBi's slope, and the factor of a bias, in units of products.
TE_DEV float te_slope(const te__attn_kargs &a, int b, int h) {
    return __fdividef(te_attn_of<1>::slope2(a, b, h), a.scale2);
}
TE_DEV float te_bias_scale(const te__attn_kargs &a) { return __fdividef(a.x.bias_scale, a.scale); }

// A word of memory that no kernel writes meanwhile. Volatile: where a load is issued decides what it waits beside.
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

// The bias beside a thread's part of S with queries along the rows: two rows, 8 apart, and of every eight columns two;
// N elements in all.
template <int N> struct te_bias_rows {
    enum {
        SIZE = BIAS == TE_F32 ? 4 : 2,
        ROWS = PAIRS == 2 ? 1 : 2,
        OF_PAIR = SIZE / 2,                         // words
        AHEAD = ROWS * OF_PAIR == 4 ? N / 8 : N / 4, // groups of eight columns that are loaded ahead: as many as fit
                                                     // into N / 2 registers
        WORDS = AHEAD * ROWS * OF_PAIR
    };
    const char *row[ROWS]; // from the thread's first column on
    te_i64 column;         // bytes from one to the next
    int count;             // columns from there on
    te_u32 word[WORDS];

    // Of rows i and i + 8, and columns from j on. Rows beyond the last one, which nobody stores, are read as that one.
    TE_DEV void open(const te__attn_kargs &a, int b, int h, int i, int j) {
        const te__attn_table &t = a.x.bias;
        column = PAIRS ? SIZE : SIZE * t.j;
        count = a.s_kv - j;
#pragma unroll
        for (int r = 0; r < ROWS; r++)
            row[r] = (const char *)t.p + SIZE * (b * t.b + h * t.h + min(i + 8 * r, a.s_q - 1) * t.i) + j * column;
    }
    // Two columns; WHOLE: both are there.
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
    // Ahead, of columns from `first` on.
    TE_DEV void load(int first) {
        if (first + 2 * N - 6 <= count) load_part<true>(first);
        else load_part<false>(first);
    }
    // From a tile of 64 rows in shared memory, as TMA brings it: all of the words. Returns 0, worked out of a word of
    // every load: whatever needs it waits for all loads.
    TE_DEV te_u32 take(te_u32 tile) {
        const int row = threadIdx.x & 127;
        te_u32 any = 0;
#pragma unroll
        for (int j = 0; j < WORDS / 4; j++) {
            const int piece = 2 * j + (row >> 4 & 1);
            te_ldmatrix4(word + 4 * j, tile + (piece >> 3) * 8192 + te_swizzled(row >> 5 << 4 | (row & 15), piece & 7));
            any |= word[4 * j];
        }
        // at most 32 bits are set
        asm volatile("{ .reg .b32 bits; popc.b32 bits, %1; shr.u32 %0, bits, 6; }" : "=r"(any) : "r"(any));
        return any;
    }
    // Of columns first + 8 j and the next one.
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

// What S starts with under ALiBi, in a thread's fragment: -slope times the distance between query and key. Those of
// neighbours along a row differ by 1, of the next eight by 8, and of the row 8 further down by -8. at: of the thread's
// first element, with its sign; least: of all of its warp. ADD: to what is there.
template <bool ADD, int N> TE_DEV void te_start_alibi(float (&s)[N], float slope, int at, int least) {
    const bool rising = least >= 0, falling = least + 2 * N + 14 <= 0;
    if (rising || falling) { // a line, whose steps are constants
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

// ALiBi as one more product, for S with queries along the rows. On one side of the diagonal it is a line along a row,
// tilt (at + column), of which the tensor cores add  tilt * column  to S, and  tilt * at,  a number of the row, is left
// to the softmax, as `shift`. tilt = hi + mid + lo, of bf16 each: columns are exact in bf16, too, and so is what is
// added.
//
// Compilers behind CUDA 13.0 are not asked for it: that of 13.5 finds no registers for a product from registers onto S,
// and lets all products wait for each other. There S gets an addition for each element, behind the wait.
struct te_line {
    enum { PRODUCT = __CUDACC_VER_MAJOR__ < 13 || (__CUDACC_VER_MAJOR__ == 13 && __CUDACC_VER_MINOR__ == 0) };
    float slope, tilt, shift[2]; // shift: of the thread's two rows
    te_u32 rising, a[4];   // the slope as operand A, and the product's
    bool bent;             // the warp has elements on both sides: there is no product
    TE_DEV void open(float of) {
        const int t = threadIdx.x & 3;
        const float hi = te_bf16_to_f32(te_f32_to_bf16(of)), mid = te_bf16_to_f32(te_f32_to_bf16(of - hi));
        slope = of;
        rising = t == 0   ? te_f32x2_to_half(hi, mid, TE_BF16)
                 : t == 1 ? te_f32x2_to_half(of - hi - mid, 0.0f, TE_BF16)
                          : 0;
    }
    // at: of the upper row and column 0, key minus query, with its sign; first, last: of all of the warp that is seen.
    TE_DEV void start(int at, int first, int last) {
        const bool up = last <= 0, down = !up && first >= 0;
        bent = !up && !down;
        tilt = up ? slope : down ? -slope : 0.0f;
        if (!PRODUCT) at += 2 * (threadIdx.x & 3); // to the thread's first column
        a[0] = a[1] = up ? rising : down ? rising ^ 0x80008000u : 0;
        a[2] = a[3] = 0;
        shift[0] = tilt * (float)at;
        shift[1] = tilt * (float)(at - 8);
    }
    TE_DEV static constexpr int bytes(int n) { return 16 * (n + 8); }
    // An operand K-major without a swizzle: eight rows by eight of k in 128 bytes, and 128 to the next rows. `next`:
    // bytes to the next eight of k.
    TE_DEV static te_u64 desc(te_u32 at, int next) {
        return (te_u64)((at & 0x3ffff) >> 4) | (te_u64)(next >> 4) << 16 | (te_u64)(128 >> 4) << 32;
    }
    // Operand B in shared memory at `to`, by `threads`: rows of eight elements, their own number three times and zeros;
    // eight zeros more, which the second half of k reads.
    TE_DEV static void columns(te_u32 to, int n, int thread, int threads) {
        for (int i = thread; i < n + 8; i += threads) {
            const float j = i < n ? (float)i : 0.0f;
            te_sts16(to + 16 * i,
                     make_uint4(te_f32x2_to_half(j, j, TE_BF16), te_f32x2_to_half(j, 0.0f, TE_BF16), 0, 0));
        }
    }
    template <int N> TE_DEV void add(float (&s)[N], te_u32 columns) const {
        if (!PRODUCT) return;
        // no swizzle: 128 bytes to the next eight of k, and of rows
        const te_u64 b = desc(columns, 128);
#define TE__PRODUCT(n) \
    if constexpr (N == n / 2) TE_WGMMA_A_##n("k16.f32.bf16.bf16", ", 1, 1, 0", s, a, b, 1);
        TE__PRODUCT(64)
        TE__PRODUCT(96)
        TE__PRODUCT(128)
#undef TE__PRODUCT
    }
    // Behind the products: the distances where they have none. at: of the thread's first element.
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
    // S becomes all of it.
    template <int N> TE_DEV void finish(float (&s)[N]) {
#pragma unroll
        for (int i = 0; i < N; i++) s[i] += shift[i / 2 % 2];
        shift[0] = shift[1] = 0.0f;
    }
};

// Bit 4 k + 2 half + e: the mask of elements and the user's show key to query, of row `half` of a thread's fragment and
// column 8 k + e. i, j: the query and the key of its first element; full: the user's is not asked. STEP: groups of four
// elements that are loaded at a time.
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
        asm volatile("" : "+r"(some)); // or all of it is done in 64 bits
        bits |= (te_u64)some << (4 * first);
    }
    return bits;
}

// P of a score in the backward pass, -inf: none. factor: P times the derivative of the soft cap and of the user's rule,
// which dP - delta is multiplied by.
TE_DEV float te_weight(const te__attn_kargs &a, float s, float lse2, int b, int h, int i, int j, float &factor) {
    const te_attn_mod mod(a.x);
    float p = te_exp2(fmaf(MOD ? mod.score(s * te_score_scale(a), b, h, i, j) : s, te_softmax_scale2(a), -lse2));
    if (MOD && s == -TE_INF) p = 0.0f;
    factor = CAP ? p * te_attn_slope(s) : p;
    if (MOD) factor = p == 0.0f ? 0.0f : factor * mod.bprop(s * te_score_scale(a), b, h, i, j);
    return p;
}

// A bias beside S^T, with keys along the rows, for S to start with. It is loaded as it is, a tile ahead, or taken from
// a tile that TMA has brought.
template <int N> struct te_bias_columns {
    enum { SIZE = BIAS == TE_F32 ? 4 : 2, ONE = PAIRS == 2 };
    TE_DEV static te_u32 element(const char *p) {
        if (BIAS == TE_F32) return te_ldg4(p);
        return te_ldg2(p);
    }
    // Of queries i, i + 1, i + 8 .. and keys j and j + 8. In the place of those that are not there, which see nothing,
    // others are read. One address leads to the next: all at a time would be more than registers hold.
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
    // The same from a tile in shared memory, as TMA brings it: boxes of 64 queries, 16 KB apart, with rows of the
    // warpgroup's 64 keys.
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
    // What was loaded becomes what S starts with.
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
