// ops/attn/attn.cuh: the mask (the keys that a row attends to), scores and dropout, for all attention kernels.
// This file must not depend on tiles.
#pragma once
#include "device/base.cuh"
#include "ops/attn/kargs.h"
#include "ops/attn/sequence.h"
#include "ops/attn/tanh.h"

#define TE_LOG2E 1.4426950408889634f
#define TE_LN2 0.6931471805599453f

// Returns 2^x by the hardware's instruction, within 2 ulp; 2^-inf = 0.
TE_DEV float te_exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// The sequence (b), head (h) and tile of a thread block. Neighbouring thread blocks have tiles of one head and read the
// same keys. last_first begins with the last tiles, which have the most work under a causal mask.
struct te_attn_place {
    int b, h, tile;
    TE_DEV te_attn_place(int tiles, int heads, bool last_first) {
        te_u32 at = blockIdx.x / (te_u32)tiles;
        tile = (int)(blockIdx.x - at * (te_u32)tiles);
        if (last_first) tile = tiles - 1 - tile;
        b = (int)(at / (te_u32)heads);
        h = (int)(at - (te_u32)b * (te_u32)heads);
    }
};

// Rows `first` .. `last` see no keys outside of te_attn_keys_begin .. te_attn_keys_end - 1. S is te__attn_kargs or
// te__attn_seq.
template <class S> TE_DEV int te_attn_keys_begin(const S &a, int first) { return max(0, first + a.lo); }
template <class S> TE_DEV int te_attn_keys_end(const S &a, int last) { return min(a.s_kv, last + a.hi + 1); }
// No row outside of te_attn_rows_begin .. te_attn_rows_end - 1 sees one of the keys `first` .. `last`.
template <class S> TE_DEV int te_attn_rows_begin(const S &a, int first) { return max(0, first - a.hi); }
template <class S> TE_DEV int te_attn_rows_end(const S &a, int last) { return min(a.s_q, last - a.lo + 1); }

template <class S> TE_DEV bool te_attn_sees(const S &a, int i, int j) {
    return i < a.s_q && j < a.s_kv && j >= i + a.lo && j <= i + a.hi;
}

// Returns the bytes of an element of q, k, v, o, a gradient or factors.
TE_DEV int te_attn_bytes(int dt) { return dt == TE_F32 ? 4 : dt == TE_F16 || dt == TE_BF16 ? 2 : 1; }
TE_DEV char *te_attn_head(const te__attn_view &x, int b, int h, int element_bytes) {
    return (char *)x.p + (b * x.b + h * x.h) * element_bytes;
}
// Returns the index of element [b, i, h, 0] of x. te_load and te_store take this index.
TE_DEV te_i64 te_attn_at(const te__attn_view &x, int b, int h, int i) { return b * x.b + h * x.h + i * x.s; }

// Option X_EXTRA of all attention kernels. 0: plain attention. 1: all options of te__attn_extra, as in all kernels
// embedded as PTX.
#ifndef X_EXTRA
#define X_EXTRA 1
#endif
enum { EXTRA = X_EXTRA };

// Returns true if the block mask marks the tile at row i and key j as empty. The tile lies in one block of the mask.
TE_DEV bool te_attn_is_empty(const te__attn_kargs &a, int b, int h, int i, int j) {
    return a.x.blocks.p && te__attn_block_at(&a.x, b, h, i, j) == TE_ATTN_BLOCK_EMPTY;
}
// The entries of the block mask for query i. empty(j) is true if the tile at key j is empty.
struct te_attn_blocks {
    const te_u8 *row; // NULL: no block mask
    TE_DEV te_attn_blocks(const te__attn_kargs &a, int b, int h, int i) : row(0) {
        const te__attn_table &t = a.x.blocks;
        if (EXTRA && t.p) row = (const te_u8 *)t.p + b * t.b + h * t.h + i / TE_ATTN_BLOCK_SIZE * t.i;
    }
    // A row of the block mask is contiguous, so the stride t.j is not used here.
    TE_DEV bool empty(int j) const { return EXTRA && row && row[j / TE_ATTN_BLOCK_SIZE] == TE_ATTN_BLOCK_EMPTY; }
};
// Returns the row or key at which the first tile of n rows or keys begins. A block mask needs each tile in one block of
// the mask. Dropout needs the bits of each row of a tile in one 32-bit word.
TE_DEV int te_attn_tile_begin(const te__attn_kargs &a, int begin, int n) {
    return a.x.blocks.p || a.dropout_p > 0.0f ? begin / n * n : begin;
}

// Option X_CAP of the tensor-core kernels. 1: scores have a soft cap. The general kernels do not have this option. They
// read a.x.softcap.
#ifndef X_CAP
#define X_CAP 0
#endif
enum { CAP = X_CAP };
// Returns tanh(scale * product / cap). The capped score is this number times the cap.
TE_DEV float te_attn_tanh(const te__attn_kargs &a, float product) { return te__attn_tanh(product * a.x.softcap_in); }
// Returns the derivative of the capped score by the scaled product. `tanh` is the result of te_attn_tanh. Rounding
// could make the derivative negative, so it is limited to 0 .. 1.
TE_DEV float te_attn_slope(float tanh) { return __saturatef(fmaf(-tanh, tanh, 1.0f)); }
// Returns the derivative of the score by the scaled product. log2(P) + lse2 is the capped score in units of log2.
TE_DEV float te_attn_slope_of(const te__attn_kargs &a, float p, float lse2) {
    return CAP ? te_attn_slope(__fdividef(__log2f(p) + lse2, a.x.softcap2)) : 1.0f;
}

// Option X_MOD is 0 if the user has no rule for scores and masks. Otherwise it is the id of the rule's text (see
// score_mod.cuh).
#ifndef X_MOD
#define X_MOD 0
#endif
enum { MOD = X_MOD != 0 };
#if X_MOD
#define INFINITY __int_as_float(0x7f800000)
#include "ops/attn/score_mod.cuh"
#endif
#ifndef TE_MOD_SCORE
#define TE_MOD_SCORE score
#endif
#ifndef TE_MOD_BPROP
#define TE_MOD_BPROP 1.0f
#endif
#ifdef TE_MOD_MASK
enum { MOD_HIDES = 1 };
#else
enum { MOD_HIDES = 0 };
#define TE_MOD_MASK true
#endif
#ifndef TE_AUX0
#define TE_AUX0 TE_F32
#endif
#ifndef TE_AUX1
#define TE_AUX1 TE_F32
#endif
#ifndef TE_AUX2
#define TE_AUX2 TE_F32
#endif
#ifndef TE_AUX3
#define TE_AUX3 TE_F32
#endif

// Loads element i of a tensor that the user's expressions read. DT is the tensor's dtype. No kernel may write the
// tensor at the same time. The load is unconditional, so the compiler can merge loads of one element.
template <int DT> struct te_attn_aux {
    typedef float type;
    TE_DEV static type at(const void *p, te_i64 i) { return te_load(p, i, DT); }
};
template <> struct te_attn_aux<TE_F32> {
    typedef float type;
    TE_DEV static type at(const void *p, te_i64 i) { return __ldg((const float *)p + i); }
};
template <> struct te_attn_aux<TE_I32> {
    typedef int type;
    TE_DEV static type at(const void *p, te_i64 i) { return __ldg((const int *)p + i); }
};
template <> struct te_attn_aux<TE_I64> {
    typedef te_i64 type;
    TE_DEV static type at(const void *p, te_i64 i) { return ((const te_i64 *)p)[i]; }
};
template <> struct te_attn_aux<TE_U8> {
    typedef int type;
    TE_DEV static type at(const void *p, te_i64 i) { return ((const te_u8 *)p)[i]; }
};
template <int DT> struct te_attn_aux_view {
    const void *p;
    te_i64 n;
    // Returns element i, or 0 if i is outside of the tensor. For an int i one 32-bit comparison is enough.
    template <class T> TE_DEV typename te_attn_aux<DT>::type operator[](T i) const {
        const bool is_int = sizeof(T) == 4 && (T)0.5f == (T)0 && (T)-1 < (T)0;
        const te_u32 end = n >> 31 ? 0x80000000u : (te_u32)n;
        const bool inside = is_int ? (te_u32)i < end : (te_i64)i >= 0 && (te_i64)i < n;
        const typename te_attn_aux<DT>::type x = te_attn_aux<DT>::at(p, inside ? (te_i64)i : 0);
        return inside ? x : 0;
    }
};
// In the user's expressions tanhf means te__attn_tanh. CUDA's own tanhf has branches, and takes several times as long
// as the softmax.
#define tanhf(x) te__attn_tanh(x)
struct te_attn_mod {
    te_attn_aux_view<TE_AUX0> aux0;
    te_attn_aux_view<TE_AUX1> aux1;
    te_attn_aux_view<TE_AUX2> aux2;
    te_attn_aux_view<TE_AUX3> aux3;
    TE_DEV te_attn_mod(const te__attn_extra &e)
        : aux0{e.aux[0], e.aux_n[0]}, aux1{e.aux[1], e.aux_n[1]}, aux2{e.aux[2], e.aux_n[2]},
          aux3{e.aux[3], e.aux_n[3]} {}
    TE_DEV float score(float score, int b, int h, int q_idx, int kv_idx) const { return (float)(TE_MOD_SCORE); }
    TE_DEV float bprop(float score, int b, int h, int q_idx, int kv_idx) const { return (float)(TE_MOD_BPROP); }
    TE_DEV bool mask(int b, int h, int q_idx, int kv_idx) const { return (bool)(TE_MOD_MASK); }
};
#undef tanhf

// How a kernel gets the lengths, diagonals, views and scores of one sequence. EXTRA = 0: from the kernel's arguments.
// EXTRA = 1: from a te__attn_seq.
template <int EXTRA> struct te_attn_of {
    typedef const te__attn_kargs &sequence;
    typedef const te__attn_view &view;
    TE_DEV static view queries(const te__attn_view &x, sequence) { return x; }
    TE_DEV static view keys(const te__attn_view &x, sequence) { return x; }
    TE_DEV static int q_end(sequence s) { return s.s_q; } // number of rows that are written
    TE_DEV static int kv_end(sequence s) { return s.s_kv; }
    TE_DEV static te_i64 lse_at(sequence s, int b, int h) { return ((te_i64)b * s.heads + h) * s.s_q; }
    TE_DEV static te_i64 work_at(sequence s, int b, int h) { return ((te_i64)b * s.heads + h) * s.s_pad; }
    TE_DEV static bool sums_delta(const te__attn_kargs &) { return false; }
    TE_DEV static bool by_row(const te__attn_kargs &) { return false; }
    TE_DEV static float of_codes(const float *) { return 1.0f; }
    // Returns the factor that turns S into units of log2. With EXTRA = 1, te_adjust has already scaled S, so the factor
    // is 1.
    TE_DEV static float scale2(const te__attn_kargs &a) { return a.scale2; }
    TE_DEV static float slope2(const te__attn_kargs &, int, int) { return 0.0f; }
    TE_DEV static float score2(const te__attn_kargs &a, sequence s, int, int, int i, int j, float product, float) {
        return te_attn_sees(s, i, j) ? product * a.scale2 : -TE_INF;
    }
    TE_DEV static float bprop(const te__attn_kargs &, sequence, int, int, int, int, float, float) { return 1.0f; }
    TE_DEV static float slope(const te__attn_kargs &, float) { return 1.0f; }
};
template <> struct te_attn_of<1> {
    typedef te__attn_seq sequence;
    typedef te__attn_view view;
    TE_DEV static view from(const te__attn_view &x, te_i64 row) {
        view y = x;
        if (x.p) y.p = (char *)x.p + row * x.s * te_attn_bytes(x.dt);
        return y;
    }
    TE_DEV static view queries(const te__attn_view &x, const sequence &s) { return from(x, s.q_at); }
    TE_DEV static view keys(const te__attn_view &x, const sequence &s) { return from(x, s.kv_at); }
    TE_DEV static int q_end(const sequence &s) { return s.q_end; }
    TE_DEV static int kv_end(const sequence &s) { return s.kv_end; }
    TE_DEV static te_i64 lse_at(const sequence &s, int, int h) { return s.lse_at + h * s.lse_head; }
    TE_DEV static te_i64 work_at(const sequence &s, int, int h) { return s.work_at + h * s.work_head; }
    // Returns true if delta is the sum of P dP (FP8 attention), not of dO * O.
    TE_DEV static bool sums_delta(const te__attn_kargs &a) { return a.x.sums_delta; }
    // Returns true if each row of S has a scale of its own.
    TE_DEV static bool by_row(const te__attn_kargs &a) { return a.x.by_row; }
    // Returns the factor of FP8 codes of q, k, v or d_o; 1 without codes.
    TE_DEV static float of_codes(const float *inv) { return inv ? *inv : 1.0f; }
    TE_DEV static float scale2(const te__attn_kargs &) { return 1.0f; }
    // Returns ALiBi's slope of a head in units of log2, like the scores. Returns 0 if there is no ALiBi.
    TE_DEV static float slope2(const te__attn_kargs &a, int b, int h) {
        if (!a.x.alibi) return 0.0f;
        return TE_LOG2E * (a.x.slopes ? a.x.slopes[(te_i64)b * a.x.slopes_b + h] : te__attn_slope(a.heads, h));
    }
    // Returns the product after scaling and the soft cap.
    TE_DEV static float capped(const te__attn_kargs &a, float product) {
        return a.x.softcap > 0.0f ? a.x.softcap * te_attn_tanh(a, product) : product * a.scale;
    }
    // Returns the derivative of capped() with respect to the scaled product.
    TE_DEV static float slope(const te__attn_kargs &a, float product) {
        return a.x.softcap > 0.0f ? te_attn_slope(te_attn_tanh(a, product)) : 1.0f;
    }
    // Returns the score of row i and key j before the user's rule for scores.
    TE_DEV static float score(const te__attn_kargs &a, const sequence &s, int b, int h, int i, int j, float product,
                              float slope2) {
        const te__attn_table &bias = a.x.bias;
        float x = capped(a, product);
        if (bias.p) x += a.x.bias_scale * te_load(bias.p, b * bias.b + h * bias.h + i * bias.i + j * bias.j, bias.dt);
        if (a.x.alibi) x -= slope2 * TE_LN2 * fabsf((float)(i + s.delta - j));
        return x;
    }
    // Returns the derivative of the user's rule with respect to its argument, the score. Row i must see key j.
    TE_DEV static float bprop(const te__attn_kargs &a, const sequence &s, int b, int h, int i, int j, float product,
                              float slope2) {
        return MOD ? te_attn_mod(a.x).bprop(score(a, s, b, h, i, j, product, slope2), b, h, i, j) : 1.0f;
    }
    // Returns the score of row i and key j in units of log2. `product` is their product. Returns -inf if the key is
    // masked.
    TE_DEV static float score2(const te__attn_kargs &a, const sequence &s, int b, int h, int i, int j, float product,
                               float slope2) {
        if (!te_attn_sees(s, i, j)) return -TE_INF;
        const te__attn_table &bias = a.x.bias, &mask = a.x.mask;
        if (mask.p && ((const te_u8 *)mask.p)[b * mask.b + h * mask.h + i * mask.i + j * mask.j]) return -TE_INF;
        if (MOD) {
            const te_attn_mod mod(a.x);
            const bool full = te__attn_block_at(&a.x, b, h, i, j) == TE_ATTN_BLOCK_FULL;
            return full || mod.mask(b, h, i, j)
                       ? mod.score(score(a, s, b, h, i, j, product, slope2), b, h, i, j) * TE_LOG2E
                       : -TE_INF;
        }
        float x = a.x.softcap > 0.0f ? a.x.softcap2 * te_attn_tanh(a, product) : product * a.scale2;
        if (bias.p)
            x +=
                a.x.bias_scale * TE_LOG2E * te_load(bias.p, b * bias.b + h * bias.h + i * bias.i + j * bias.j, bias.dt);
        if (a.x.alibi) x -= slope2 * fabsf((float)(i + s.delta - j));
        return x;
    }
};

typedef te_attn_of<EXTRA> te_of;
// Return the factors of the products of codes of q and k, and of d_o and v; 1 without codes.
TE_DEV float te_attn_scores_of(const te__attn_kargs &a) {
    return te_of::of_codes(a.x.q_inv) * te_of::of_codes(a.x.k_inv);
}
TE_DEV float te_attn_dp_of(const te__attn_kargs &a) {
    return te_of::of_codes(a.x.do_inv) * te_of::of_codes(a.x.v_inv);
}
// Declares `seq`, which describes sequence b. A macro, because a function here would change the machine code of the
// whole kernel.
#if X_EXTRA
#define TE_ATTN_SEQUENCE(a, b) const te__attn_seq seq = te__attn_seq_of(&(a), b)
#else
#define TE_ATTN_SEQUENCE(a, b) const te__attn_kargs &seq = (a)
#endif

// Rounds S or dP to FP8 codes (see te_attn_fp8), and keeps the greatest absolute value. With EXTRA = 0 it does nothing.
template <int EXTRA> struct te_attn_rounding {
    TE_DEV te_attn_rounding(int, const float *) {}
    TE_DEV static constexpr bool on() { return false; }
    TE_DEV float operator()(float x) { return x; }
    TE_DEV float of(float x, float) { return x; }
    TE_DEV void publish(float *) {}
};
template <> struct te_attn_rounding<1> {
    int dt;
    float scale, inverse, top;
    TE_DEV te_attn_rounding(int dt, const float *scale)
        : dt(dt), scale(dt && scale ? *scale : 1.0f), inverse(1.0f), top(0.0f) {
        if (dt) inverse = __frcp_rn(this->scale);
    }
    TE_DEV bool on() const { return dt != 0; }
    TE_DEV float operator()(float x) { return of(x, x); }
    // Rounds x, which stands for the element `real`.
    TE_DEV float of(float x, float real) {
        if (!dt) return x;
        top = fmaxf(top, fabsf(real));
        return te__attn_rounded(dt, x, scale, inverse);
    }
    // Raises *amax to the warp's greatest absolute value. Floats >= 0 have the same order when they are compared as
    // integers, so an integer maximum is right.
    TE_DEV void publish(float *amax) {
        float all = te_warp_max(top);
        if (dt && amax && all > 0.0f && (threadIdx.x & 31) == 0) atomicMax((int *)amax, __float_as_int(all));
    }
};

// Returns the softmax's offset of head h in units of log2. The denominator has the additional term 2^offset. Returns
// -inf without an offset.
TE_DEV float te_attn_sink2(const te__attn_kargs &a, int h) {
    return a.x.softmax == TE_SOFTMAX_LEARNABLE    ? a.x.sink[h] * TE_LOG2E
           : a.x.softmax == TE_SOFTMAX_OFF_BY_ONE ? 0.0f
                                                  : -TE_INF;
}
// Includes the softmax's offset sink2 in a row's maximum *top and sum *sum. Returns the factor for earlier sums. A row
// that sees no key stays unchanged.
TE_DEV float te_attn_add_sink(float sink2, float *top, float *sum) {
    if (sink2 == -TE_INF || *sum == 0.0f) return 1.0f;
    float base = fmaxf(*top, sink2), shrink = exp2f(*top - base);
    *sum = *sum * shrink + exp2f(sink2 - base);
    *top = base;
    return shrink;
}
// Raises *logit, the greatest score of a head, to top2 * ln 2 if that is larger. As integers, positive floats have the
// same order, and negative floats the reverse order.
TE_DEV void te_attn_raise(float *logit, float top2) {
    float v = top2 * TE_LN2 + 0.0f;
    if (v == -TE_INF) return;
    if (v >= 0.0f)
        atomicMax((int *)logit, __float_as_int(v));
    else
        atomicMin((te_u32 *)logit, __float_as_uint(v));
}

// Returns word w of dropout's bits (see te__attn_keep_word in sequence.h). The four lanes of a quad pass the same w.
// Each lane computes one Philox block of the word.
TE_DEV te_u32 te_attn_keep_quad(const te__attn_kargs &a, te_u64 w) {
    const int lane = threadIdx.x & 31;
    const te_u32 threshold = te__attn_threshold(&a);
    // Bit i of the word is 1 if the 16-bit random number i is at least the threshold. Each lane of a quad draws four of
    // the 16 bits of each of the 32 numbers. If these four bits equal those of the threshold, the number's lower bits
    // decide. Other lanes draw the lower bits, so each lane computes two words. `from_less` is correct if the lower
    // bits are less than those of the threshold. `from_more` is correct if they are not less.
    te_u32 bits[4], from_less, from_more;
    uint64_t seed = a.seed, offset = a.offset;
    te__rng_read(a.rng, &seed, &offset);
    te__philox_rounds(7, seed, offset, 4 * w + (lane & 3), bits);
    from_less = te__attn_keep_step(0u, bits, threshold, lane & 3);
    from_more = te__attn_keep_step(0xffffffffu, bits, threshold, lane & 3);
#pragma unroll
    for (int far = 1; far <= 2; far *= 2) { // joins the blocks of neighbouring lanes
        const te_u32 less = __shfl_xor_sync(0xffffffffu, from_less, far),
                     more = __shfl_xor_sync(0xffffffffu, from_more, far);
        const bool upper = lane & far;
        const te_u32 low_less = upper ? less : from_less, low_more = upper ? more : from_more,
                     up_less = upper ? from_less : less, up_more = upper ? from_more : more;
        from_less = up_less | (up_more & low_less);
        from_more = up_less | (up_more & low_more);
    }
    return threshold >> 16 ? 0u : from_more;
}
// Returns the dropout bits of four rows for key j0 + lane. Bit r is for row `first` + r. j0 must be a multiple of 32.
TE_DEV te_u32 te_attn_keep_four(const te__attn_kargs &a, int b, int h, int first, int j0) {
    const int lane = threadIdx.x & 31;
    const te_u32 word = te_attn_keep_quad(a, te__attn_keep_row(&a, b, h, first + (lane >> 2 & 3)) + j0 / 32);
    te_u32 keep = 0;
#pragma unroll
    for (int r = 0; r < 4; r++) keep |= (__shfl_sync(0xffffffffu, word, 4 * r) >> lane & 1u) << r;
    return keep;
}
// Returns the dropout bits of a lane's four elements of an accumulator fragment of 16 keys x 8 queries.
// `key`, a multiple of 16, is the first key. `word` is the result of te_attn_keep_quad for the query with number
// lane / 4 of the eight queries.
// Bits 0 and 1 of the result are for the lane's first key, bits 2 and 3 for the key 8 rows further down.
TE_DEV te_u32 te_attn_keep_transposed(te_u32 word, int key) {
    const int lane = threadIdx.x & 31, at = (key & 16) + (lane >> 2);
    const te_u32 even = __shfl_sync(0xffffffffu, word, 8 * (lane & 3)) >> at,
                 odd = __shfl_sync(0xffffffffu, word, 8 * (lane & 3) + 4) >> at;
    return (even & 1u) | (odd & 1u) << 1 | (even >> 8 & 1u) << 2 | (odd >> 8 & 1u) << 3;
}
