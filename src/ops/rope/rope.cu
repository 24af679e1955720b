// ops/rope/rope.cu: rotary embedding, and its inverse. It rotates one tensor, or a packed projection. A packed
// projection is rotated in place or while it is split into q, k and v.
//
//   pair i of a head at position t:  (x, y) -> (x cos - y sin, y cos + x sin)
//                                    angle = (float(t) * position_scale) * inv_freq[i]
//
// The CPU computes the angle by the same two f32 products. attention_factor multiplies cosine and sine. A block first
// computes the angles of its tokens in shared memory. Then it loops over the heads of these tokens.
//
// A unit of work is W channel pairs, or W channels that are not rotated. W is 8 with `vector`, else 1. In a pair x is
// channel i and y is channel half + i; in an interleaved pair they are neighbours.
//
// With freqs x and y have one angle each, and the transposed rotation exchanges their sines. A token whose position has
// no row in freqs becomes NaN.
//
// CACHED: k and v are rows of caches. CODED: these have E4M3 codes, and a warp writes a row, a head of a token.
//
// Options: X_DT is the te_dtype of all tensors; without it each tensor has its own. X_VECTOR replaces a.vector. X_FREQS
// replaces a.has_freqs, and X_CACHED a.cached + a.coded.
// Benchmark: "rotary embedding" in tests/bench/h200.csv.
//
// Launch: grid ceil(batch * seq / tokens), block 256, shared memory 8 * tokens * half bytes, or 16 * tokens * half
// bytes with freqs. With `vector` all addresses are multiples of 16 bytes; all strides, d and half are multiples of 8.
// te:baseline
// te:row X_DT=1|2|3 X_VECTOR=1 X_FREQS=0|1 X_CACHED=0|1|2
#include "device/vector.cuh"
#include "device/coded_row.cuh"
#include "ops/rope/rope_pair.cuh"

#ifdef X_DT
#define DT_OF(view) X_DT
#define VECTOR X_VECTOR
#define FREQS X_FREQS
#define CACHED (X_CACHED != 0)
#define CODED (X_CACHED == 2)
#else
#define DT_OF(view) ((view).dt)
#define VECTOR a.vector
#define FREQS a.has_freqs
#define CACHED a.cached
#define CODED a.coded
#endif

// The tokens of the block. Each token has an outer and an inner index. If batch_first is set, the outer index is the
// token's sequence and the inner index is its position. Otherwise the inner index is the sequence. `outer` and `inner`
// are the indices of the block's first token. Inner indices are below `size`.
struct te_rope_tokens {
    te_i64 outer;
    te_u32 inner, size;
    int count;
    bool batch_first;
    TE_DEV te_rope_tokens(const te__rope_kargs &a) : batch_first(a.batch_first) {
        const te_i64 first = (te_i64)blockIdx.x * a.tokens, left = (te_i64)a.batch * a.seq - first;
        count = left < a.tokens ? (int)left : a.tokens;
        size = (te_u32)(batch_first ? a.seq : a.batch);
        outer = first >> 31 ? first / size : (te_i64)((te_u32)first / size); // a 64-bit division is slow
        inner = (te_u32)(first - outer * size);
    }
    TE_DEV void locate(int token, int &t, int &b) const {
        te_u32 in = inner + (te_u32)token, out = (te_u32)outer;
        if (size == 1) {
            out += in, in = 0;
        } else if (in >= size) {
            te_u32 more = in / size;
            out += more, in -= more * size;
        }
        t = (int)(batch_first ? in : out), b = (int)(batch_first ? out : in);
    }
};

// te_rope_ask loads W elements of dtype dt. If W is 1, it also converts the element to f32. te_rope_values returns the
// loaded elements as floats. te_rope_store stores floats.
template <int W> TE_DEV te_raw<TE_ANY, W> te_rope_ask(const void *p, te_i64 at, int dt) {
    if constexpr (W == 8) return te_raw_ask<8>(p, at, dt);
    else return te_raw<TE_ANY, 1>{{__float_as_uint(te_load(p, at, dt))}};
}
template <int W> TE_DEV void te_rope_values(const te_raw<TE_ANY, W> &bits, int dt, float v[W]) {
    if constexpr (W == 8) te_raw_values<8>(bits, dt, v);
    else v[0] = __uint_as_float(bits.w[0]);
}
template <int W> TE_DEV void te_rope_store(void *p, te_i64 at, int dt, const float v[W]) {
    if constexpr (W == 8) te_store8(p, at, dt, v);
    else te_store(p, at, dt, v[0]);
}

// The current unit of work of a thread: W channel pairs, or W channels without a pair. `head` is an index among
// the processed heads. te__rope_packed_head converts this index to an index in `packed`. next() goes TE__ROPE_THREADS
// units further, without a division.
struct te_rope_walk {
    int units, heads; // units per head, heads per token
    int unit, head, token, on_unit, on_head, on_token;
    TE_DEV te_rope_walk(int units_, int heads_, int at) : units(units_), heads(heads_) {
        split(at, unit, head, token);
        split(TE__ROPE_THREADS, on_unit, on_head, on_token);
    }
    TE_DEV void split(te_u32 at, int &u, int &h, int &t) const {
        te_u32 in_all = at / (te_u32)units, in_tokens = in_all / (te_u32)heads;
        u = (int)(at - in_all * (te_u32)units), h = (int)(in_all - in_tokens * (te_u32)heads), t = (int)in_tokens;
    }
    TE_DEV void next() {
        unit += on_unit, head += on_head, token += on_token;
        if (unit >= units) unit -= units, head++;
        if (head >= heads) head -= heads, token++;
    }
};

// A unit of work of a thread: its addresses and its elements.
template <int W> struct te_rope_unit {
    te_raw<TE_ANY, W> x, y;
    void *dst;
    te_i64 to; // -1: the unit is not stored
    int turn; // index of the first angle in shared memory; the next ones follow in steps of half / W; -1: no rotation
    int cx, cy, src_dt, dst_dt; // cx, cy: the channels of x and y; cy -1: there is no y

    TE_DEV void ask(const te__rope_kargs &a, const te_rope_tokens &tokens, te_rope_walk &walk) {
        const int pairs = a.half / W, unit = walk.unit, token = walk.token,
                  packed_head = te__rope_packed_head(&a, walk.head);
        int where_t, where_b, part = 0, h = packed_head; // part: 0: q, 1: k, 2: v; h: the head in that tensor
        tokens.locate(token, where_t, where_b);
        if (a.groups && a.grouped) {
            const int per_group = a.heads / a.groups + 2, group = packed_head / per_group,
                      in_group = packed_head - group * per_group;
            part = max(0, in_group - (per_group - 3));
            h = part ? group : group * (per_group - 2) + in_group;
        } else if (a.groups) {
            part = h < a.heads ? 0 : h < a.heads + a.groups ? 1 : 2;
            h -= part == 0 ? 0 : part == 1 ? a.heads : a.heads + a.groups;
        }
        const te__rope_view &one = part == 0 || a.whole ? a.q : part == 1 ? a.k : a.v;
        te_i64 of_t = where_t, of_b = where_b;
        const bool placed = !CACHED || part == 0 || te__rope_cache_place(&a, where_t, where_b, &of_t, &of_b);
        const te_i64 in_one = of_t * one.s + of_b * one.b + (a.whole ? packed_head : h) * one.h;
        const te_i64 in_packed = where_t * a.packed.s + where_b * a.packed.b + packed_head * a.packed.h;
        const te_i64 from = a.gather ? in_one : in_packed;
        const void *src = a.gather ? one.p : a.packed.p;
        to = a.gather ? in_packed : placed ? in_one : -1, dst = a.gather ? a.packed.p : one.p;
        src_dt = a.gather ? DT_OF(one) : DT_OF(a.packed), dst_dt = a.gather ? DT_OF(a.packed) : DT_OF(one);
        if (unit >= pairs) { // channels that are not rotated
            cx = (unit + pairs) * W, cy = turn = -1;
        } else {
            cx = a.interleaved ? 2 * W * unit : W * unit, cy = a.interleaved ? cx + W : cx + a.half;
            turn = part < 2 ? token * a.half + unit : -1;
            y = te_rope_ask<W>(src, from + cy, src_dt);
        }
        x = te_rope_ask<W>(src, from + cx, src_dt);
        walk.next();
    }
    TE_DEV void finish(const te__rope_kargs &a, const float2 *table, const float2 *mates) const {
        float u[W], v[W];
        te_rope_values<W>(x, src_dt, u);
        if (cy >= 0) te_rope_values<W>(y, src_dt, v);
        if (turn >= 0) {
            float2 by[W], mate[W]; // by: angles of x; mate: angles of y
#pragma unroll
            for (int i = 0; i < W; i++) {
                by[i] = table[turn + i * (a.half / W)];
                mate[i] = FREQS ? mates[turn + i * (a.half / W)] : by[i];
            }
            if (a.interleaved && W > 1) {
#pragma unroll
                for (int i = 0; i < W; i++) {
                    float *lo = i < W / 2 ? u + 2 * i : v + 2 * i - W, p = lo[0], q = lo[1];
                    lo[0] = te_rope_first(p, q, by[i]);
                    lo[1] = te_rope_second(p, q, mate[i]);
                }
            } else {
#pragma unroll
                for (int i = 0; i < W; i++) {
                    float p = u[i], q = v[i];
                    u[i] = te_rope_first(p, q, by[i]);
                    v[i] = te_rope_second(p, q, mate[i]);
                }
            }
        }
        if (CACHED && to < 0) return;
        te_rope_store<W>(dst, to + cx, dst_dt, u);
        if (cy >= 0) te_rope_store<W>(dst, to + cy, dst_dt, v);
    }
};

// Rounds x to a number of format dt.
TE_DEV float te_rope_rounded(float x, int dt) {
    if (dt == TE_BF16) return te_bf16_to_f32(te_f32_to_bf16(x));
    return dt == TE_F16 ? te_f16_to_f32(te_f32_to_f16(x)) : x;
}
// Writes the rows of k and v of a block's tokens as codes, of rotated numbers that are rounded to the projection's
// format first, as if they had been stored. `table` and `mates` are those of te_rope_units, `width` its W.
TE_DEV_CALL void te_rope_coded_rows(const te__rope_kargs &a, const te_rope_tokens &tokens, const float2 *table,
                                    const float2 *mates, int width) {
#pragma unroll 1
    for (int at = threadIdx.x / TE_WARP; at < tokens.count * 2 * a.groups; at += TE__ROPE_THREADS / TE_WARP) {
        const int token = at / (2 * a.groups), in_token = at - token * 2 * a.groups, part = in_token < a.groups ? 1 : 2,
                  h = in_token - (part - 1) * a.groups;
        const te__rope_view &to = part == 1 ? a.k : a.v, &factors = part == 1 ? a.k_factors : a.v_factors;
        int t, b;
        te_i64 page, row;
        tokens.locate(token, t, b);
        if (!te__rope_cache_place(&a, t, b, &page, &row)) continue;
        const te_i64 from = t * a.packed.s + b * a.packed.b + te__rope_coded_head(&a, part, h) * a.packed.h;
        te_put_coded_row((te_u8 *)to.p + page * to.s + row * to.b + h * to.h,
                         (te_u8 *)factors.p + page * factors.s + row * factors.b + h * factors.h, a.d, [&](int c) {
                             const float x = te_load(a.packed.p, from + c, DT_OF(a.packed));
                             if (part == 2 || c >= 2 * a.half) return x;
                             const bool second = a.interleaved ? c & 1 : c >= a.half;
                             const int pair = a.interleaved ? c >> 1 : second ? c - a.half : c,
                                       other = a.interleaved ? c ^ 1 : second ? c - a.half : c + a.half;
                             const int angle = token * a.half + pair % width * (a.half / width) + pair / width;
                             const float y = te_load(a.packed.p, from + other, DT_OF(a.packed));
                             const float2 by = second && FREQS ? mates[angle] : table[angle];
                             return te_rope_rounded(second ? te_rope_second(y, x, by) : te_rope_first(x, y, by),
                                                    DT_OF(a.packed));
                         });
    }
}

template <int W> TE_DEV void te_rope_units(const te__rope_kargs &a, float2 *table) {
    const te_rope_tokens tokens(a);
    float2 *const mates = table + tokens.count * a.half;
    te_rope_walk walk((a.d - a.half) / W, te__rope_heads(&a), threadIdx.x);
    const int all = tokens.count * walk.heads * walk.units;
    int at = threadIdx.x;
    te_rope_unit<W> one, other; // the first two units are loaded while the angles are computed
    if (at < all) one.ask(a, tokens, walk);
    if (at + TE__ROPE_THREADS < all) other.ask(a, tokens, walk);
    for (int i = threadIdx.x; i < tokens.count * a.half; i += TE__ROPE_THREADS) {
        const int token = i / a.half, pair = i - token * a.half;
        const int to = token * a.half + pair % W * (a.half / W) + pair / W; // neighbouring lanes will read adjacent
                                                                            // words
        int t, b;
        tokens.locate(token, t, b);
        const te_i64 position = te__rope_position(&a, t, &b);
        if (FREQS) {
            const float *row = te__rope_row(&a, position, b);
            const int x = a.interleaved ? 2 * pair : pair, y = a.interleaved ? 2 * pair + 1 : pair + a.half;
            const float2 of_x = te_rope_turn(a, row ? row[x] : NO_ROW), of_y = te_rope_turn(a, row ? row[y] : NO_ROW);
            const bool back = a.direction < 0.0f;
            table[to] = make_float2(of_x.x, back ? of_y.y : of_x.y);
            mates[to] = make_float2(of_y.x, back ? of_x.y : of_y.y);
        } else {
            table[to] = te_rope_turn(a, te_rope_angle(a, position, pair));
        }
    }
    __syncthreads();
    for (; at < all; at += 2 * TE__ROPE_THREADS) { // one unit is rotated while the other is loaded
        one.finish(a, table, mates);
        if (at + 2 * TE__ROPE_THREADS < all) one.ask(a, tokens, walk);
        if (at + TE__ROPE_THREADS < all) other.finish(a, table, mates);
        if (at + 3 * TE__ROPE_THREADS < all) other.ask(a, tokens, walk);
    }
    if (CODED) te_rope_coded_rows(a, tokens, table, mates, W);
}

extern "C" __global__ void __launch_bounds__(TE__ROPE_THREADS, 3) te_rope(const __grid_constant__ te__rope_kargs a) {
    te_follow();
    extern __shared__ float2 table[]; // (cos, sin) of each token's angles; with freqs those of x, then those of y
    if (TE_WIDE(VECTOR)) te_rope_units<8>(a, table);
    else te_rope_units<1>(a, table);
}
