// ops/attn/attn_decode.cu: computes O = softmax(scale Q K^T, masked) V for few queries and many keys, in bf16 or f16. A
// decoding step has this shape, and is limited by reading K and V once.
//
//                 keys: chunk 0        chunk 1
//           +----+----+----+----+----+----+----+--
//     row 0 | w0 | w1 | w2 | w3 | w0 | w1 | w2 |     w0 .. w3: the warps of a block, 16 keys each
//     row 1 |    |    |    |    |    |    |    |
//
// All queries of the query heads that share one KV head are rows of one tile: row r is query r % s_q of the group's
// head r / s_q. So every key is read once. The keys of a sequence are split into chunks, one for each block. The length
// of a chunk depends only on the number of the sequence's keys and on the number of KV heads. So a sequence has the
// same bits in every batch that this kernel runs, and in a cache of any size.
//
// A warp copies its own keys by cp.async, a step ahead, and has its own maximum and sums, so that warps do not
// wait for each other. At the end the block adds up the sums of its warps. For each sequence and KV head, the last
// block to finish adds up the chunks, always in the same order.
//
// Options: X_DT (te_dtype of q, k, v and o), X_D (the larger of d and d_v, rounded up to a multiple of 32, or of 64 if
// above 128; channels beyond d or d_v are zeros), X_EXTRA (attn.cuh; without block masks, user's rules and dropout).
//
// Launch: grid (splits, places of this launch), block 32 WARPS, shared memory TE__ATTN_DECODE_SHARED. Rows start at
// multiples of 16 bytes, d and d_v are multiples of 8, scale > 0. A page has a multiple of 16 keys, or all keys.
// te:arch 80
// te:row X_DT=3 X_D=32|64|96|128|192|256 X_EXTRA=0|1
// te:row X_DT=2 X_D=128 X_EXTRA=0|1
#include "ops/attn/fragments.cuh"

#ifndef X_DT // the rows above name every option; these defaults are for an editor
#define X_DT 3
#define X_D 128
#endif
enum {
    DT = X_DT,
    D = X_D,
    STAGES = TE__ATTN_DECODE_STAGES,
    WARPS = TE__ATTN_DECODE_WARPS,
    KEYS = 16, // of a warp's step
    THREADS = 32 * WARPS,
    PIECES = D / 8, // of 16 bytes, in a row
    SLOT = te_tile<D>::ROW * KEYS // bytes of a warp's keys, or of its values, in one stage
};

// Copies a warp's tiles of 16 keys, or of their values. Eight or four lanes copy a row.
struct te_rows_of {
    enum { GROUP = D % 64 == 0 ? 8 : 4, STEP = 32 / GROUP };
    const char *at; // row 0, from this lane's first piece on
    te_i64 row, page; // bytes from one row, or page, to the next
    int pieces;
    te_u32 to;
    TE_DEV te_rows_of(const te__attn_view &x, int b, int h, int d, bool paged) : row(2 * x.s), page(2 * x.b) {
        const int lane = threadIdx.x & 31, r = lane / GROUP, c = lane % GROUP;
        at = (const char *)x.p + 2 * (h * x.h + (paged ? 0 : b * x.b)) + r * row + 16 * c;
        pieces = d / 8 - c;
        to = te_tile<D>::piece(r, c);
    }
    // Copies the tile that begins at row `first` of page `of_page`. Its first `there` rows exist; the others become 0.
    TE_DEV void copy(te_u32 tile, int of_page, int first, int there) const {
        const char *from = at + of_page * page + first * row;
        there -= (threadIdx.x & 31) / GROUP;
#pragma unroll
        for (int i = 0; i < KEYS / STEP; i++) {
#pragma unroll
            for (int j = 0; j < PIECES / GROUP; j++)
                te_cp_async16(tile + to + i * STEP * te_tile<D>::ROW + j * GROUP * 16, from + j * GROUP * 16,
                              there > i * STEP && pieces > j * GROUP ? 16 : 0);
            from += STEP * row;
        }
    }
};

// The softmax state of a row over some keys: the maximum score in units of log2, and the sum of 2^(score - top).
struct te_part {
    float top, l;
};
// Adds up four channels of a row over `n` parts, in order. Returns the sum relative to 2^sum.top. AWAY: other blocks
// have written the parts.
template <bool AWAY>
TE_DEV float4 te_join(const float4 *o, int o_step, const te_part *parts, int step, int n, te_part &sum) {
    float4 all = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    sum.top = -TE_INF, sum.l = 0.0f;
#pragma unroll 4
    for (int i = 0; i < n; i++) sum.top = fmaxf(sum.top, parts[i * step].top);
    const float base = sum.top == -TE_INF ? 0.0f : sum.top;
#pragma unroll AWAY ? 16 : 4
    for (int i = 0; i < n; i++) {
        const float4 v = AWAY ? __ldcg(o + (te_i64)i * o_step) : o[i * o_step];
        const float w = te_exp2(parts[i * step].top - base);
        sum.l = fmaf(w, parts[i * step].l, sum.l);
        all.x = fmaf(w, v.x, all.x), all.y = fmaf(w, v.y, all.y);
        all.z = fmaf(w, v.z, all.z), all.w = fmaf(w, v.w, all.w);
    }
    return all;
}

// The query and the head of a row. Most steps have one query, and need no division.
struct te_row {
    int i, h;
    TE_DEV te_row(const te__attn_kargs &a, int first_head, int r)
        : i(a.s_q == 1 ? 0 : r % a.s_q), h(first_head + (a.s_q == 1 ? r : r / a.s_q)) {}
};

// Divides a row's sums by the denominator, and stores them as channels c .. c + 3 of O.
TE_DEV void te_finish(const te__attn_kargs &a, const te_of::sequence &seq, int b, int first_head, int r, int c,
                      float4 o, te_part sum) {
    const te_row row(a, first_head, r);
    const int h = row.h, i = row.i;
    if (i >= te_of::q_end(seq)) return;
    const float shrink = EXTRA ? te_attn_add_sink(te_attn_sink2(a, h), &sum.top, &sum.l) : 1.0f,
                inverse = sum.l == 0.0f ? 0.0f : __fdividef(shrink, sum.l);
    const te_of::view view = te_of::queries(a.o, seq);
    uint2 pairs;
    pairs.x = te_pack<DT>(o.x * inverse, o.y * inverse);
    pairs.y = te_pack<DT>(o.z * inverse, o.w * inverse);
    *(uint2 *)((te_u16 *)view.p + te_attn_at(view, b, h, i) + c) = pairs;
    if (c == 0 && a.lse)
        a.lse[te_of::lse_at(seq, b, h) + i] = sum.l == 0.0f ? -TE_INF : (sum.top + __log2f(sum.l)) * TE_LN2;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    te_attn_decode(const __grid_constant__ te__attn_decode_kargs args) {
    te_follow();
    te_lead();
    extern __shared__ uint4 te_shared[];
    __shared__ te_part of_warps[WARPS * 16];
    __shared__ bool last;
    const te__attn_kargs &a = args.a;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int split = blockIdx.x, place = args.first + blockIdx.y, b = place / a.groups, group = place - b * a.groups;
    const int rows = args.heads * a.s_q, first_head = group * args.heads;
    TE_ATTN_SEQUENCE(a, b);
    const te_of::view q_view = te_of::queries(a.q, seq), k_view = te_of::keys(a.k, seq), v_view = te_of::keys(a.v, seq);
    const int begin = te_attn_keys_begin(seq, 0) / KEYS * KEYS,
              end = seq.s_q > 0 ? te_attn_keys_end(seq, seq.s_q - 1) : 0;
    const int chunk = TE__ATTN_DECODE_CHUNK(end > begin ? end - begin : 1, args.share),
              used = end > begin ? (end - begin + chunk - 1) / chunk : 1;
    if (split >= used) return;
    const int from = begin + split * chunk, to = min(end, from + chunk);

    const te_u32 shared = te_smem(te_shared), q = shared, mine = q + 16 * te_tile<D>::ROW + warp * (STAGES * 2 * SLOT);
    const bool paged = EXTRA && a.x.pages;
    const te_rows_of keys(k_view, b, group, a.d, paged), values(v_view, b, group, a.d_v, paged);
    const te_reader<D> rows_first(true), channels_first(false);

    for (int at = threadIdx.x; at < 16 * PIECES; at += THREADS) {
        const int r = at / PIECES, c = at % PIECES;
        const te_row row(a, first_head, r);
        const bool there = r < rows && row.i < seq.s_q && 8 * c < a.d;
        te_cp_async16(q + te_tile<D>::piece(r, c),
                      (const te_u16 *)q_view.p + (there ? te_attn_at(q_view, b, row.h, row.i) + 8 * c : 0),
                      there ? 16 : 0);
    }

    float o[1][D / 8][4], top[2] = {-TE_INF, -TE_INF}, l[2] = {0.0f, 0.0f}; // top and l: of rows lane / 4 and + 8
    te_clear(o);
    int of_row[2], head_of[2]; // query and head of these rows. A row that does not exist has query s_q: it sees no key.
    float slope2[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int r = (lane >> 2) + 8 * half;
        const te_row row(a, first_head, r);
        of_row[half] = r < rows ? row.i : a.s_q;
        head_of[half] = r < rows ? row.h : first_head;
        slope2[half] = te_of::slope2(a, b, head_of[half]);
    }
    const bool plain = !EXTRA || !(a.x.bias.p || a.x.mask.p || a.x.alibi || a.x.softcap > 0.0f);
    int copied = 0, slot = 0; // slots of the next tile to copy, and of the next one to multiply
    // Each turn copies a tile, and multiplies the one that was copied STAGES - 1 turns before.
    const int turns = max(to - from + WARPS * KEYS - 1, 0) / (WARPS * KEYS);
#pragma unroll 1
    for (int turn = 1 - STAGES; turn < turns; turn++) {
        const int j0 = from + (turn * WARPS + warp) * KEYS, next = j0 + (STAGES - 1) * WARPS * KEYS;
        if (next < to) {
            int row = next, page = 0;
            if (paged) page = (int)te__attn_page(&a.x, b, next, &row); // all rows of the tile are in one page
            const te_u32 tile = mine + copied * (2 * SLOT);
            keys.copy(tile, page, row, to - next);
            values.copy(tile + SLOT, page, row, to - next);
        }
        te_cp_async_commit();
        copied = copied == STAGES - 1 ? 0 : copied + 1;
        if (turn < 0) continue;
        te_cp_async_wait<STAGES - 1>();
        if (turn == 0)
            __syncthreads(); // all warps have copied Q
        else
            __syncwarp();
        if (j0 >= to) continue;
        const te_u32 k = mine + slot * (2 * SLOT), v = k + SLOT;
        float s[1][2][4];
        te_clear(s);
        te_products<DT, D>(s, rows_first, q, channels_first, k);
        float grown[2] = {-TE_INF, -TE_INF};
        if (plain) {
#pragma unroll
            for (int at = 0; at < 8; at++) {
                const int n = at >> 2, e = at & 3, j = j0 + 8 * n + 2 * (lane & 3) + (e & 1);
                s[0][n][e] = j < to && te_attn_sees(seq, of_row[e >> 1], j) ? s[0][n][e] * a.scale2 : -TE_INF;
            }
        } else if (EXTRA) { // Each turn takes element 0, and puts its score behind the others.
#pragma unroll 1
            for (int at = 0; at < 8; at++) {
                const int n = at >> 2, e = at & 3, j = j0 + 8 * n + 2 * (lane & 3) + (e & 1);
                const float product = s[0][0][0],
                            x = j < to ? te_of::score2(a, seq, b, e < 2 ? head_of[0] : head_of[1],
                                                       e < 2 ? of_row[0] : of_row[1], j, product,
                                                       e < 2 ? slope2[0] : slope2[1])
                                       : -TE_INF;
#pragma unroll
                for (int i = 0; i < 7; i++) s[0][i >> 2][i & 3] = s[0][(i + 1) >> 2][(i + 1) & 3];
                s[0][1][3] = x;
            }
        }
#pragma unroll
        for (int at = 0; at < 8; at++) grown[at >> 1 & 1] = fmaxf(grown[at >> 1 & 1], s[0][at >> 2][at & 3]);
        bool grows = false;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            grown[half] = fmaxf(grown[half], __shfl_xor_sync(0xffffffffu, grown[half], 1));
            grown[half] = fmaxf(grown[half], __shfl_xor_sync(0xffffffffu, grown[half], 2));
            grows = grows || grown[half] > top[half];
        }
        if (__any_sync(0xffffffffu, grows)) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const float now = fmaxf(top[half], grown[half]),
                            shrink = now == -TE_INF ? 1.0f : te_exp2(top[half] - now);
                top[half] = now;
                l[half] *= shrink;
#pragma unroll
                for (int n = 0; n < D / 8; n++) o[0][n][2 * half] *= shrink, o[0][n][2 * half + 1] *= shrink;
            }
        }
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int half = e >> 1;
                float &x = s[0][n][e];
                x = te_exp2(x - (top[half] == -TE_INF ? 0.0f : top[half]));
                l[half] += x;
            }
        te_weighted<DT, D>(o, s, rows_first, v);
        __syncwarp(); // the next copy overwrites this slot
        slot = slot == STAGES - 1 ? 0 : slot + 1;
    }

    // ---- the block's warps ----
    te_cp_async_wait<0>();
    __syncthreads(); // the tiles' memory takes the sums of the warps: [warp][row][channel]
    float *sums = (float *)te_shared;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int r = (lane >> 2) + 8 * half;
        l[half] += __shfl_xor_sync(0xffffffffu, l[half], 1);
        l[half] += __shfl_xor_sync(0xffffffffu, l[half], 2);
#pragma unroll
        for (int n = 0; n < D / 8; n++)
            *(float2 *)(sums + (warp * 16 + r) * D + 8 * n + 2 * (lane & 3)) =
                make_float2(o[0][n][2 * half], o[0][n][2 * half + 1]);
        if ((lane & 3) == 0) of_warps[warp * 16 + r].top = top[half], of_warps[warp * 16 + r].l = l[half];
    }
    __syncthreads();
    enum { QUADS = D / 4 };
    const te_i64 row_floats = a.d_v + 4, part_floats = rows * row_floats; // a row's sums, then top, l, and padding
    float *all = args.part + (te_i64)blockIdx.y * args.splits * part_floats;
    for (int at = threadIdx.x; at < rows * QUADS; at += THREADS) {
        const int r = at / QUADS, c = 4 * (at % QUADS);
        te_part sum;
        if (c >= a.d_v) continue;
        const float4 joined =
            te_join<false>((const float4 *)(sums + r * D + c), 16 * D / 4, of_warps + r, 16, WARPS, sum);
        if (used == 1) {
            te_finish(a, seq, b, first_head, r, c, joined, sum);
            continue;
        }
        float *to_row = all + split * part_floats + r * row_floats;
        *(float4 *)(to_row + c) = joined;
        if (c == 0) *(float2 *)(to_row + a.d_v) = make_float2(sum.top, sum.l);
    }
    if (used == 1) return;

    // ---- the chunks ----
    __syncthreads();
    if (threadIdx.x == 0) {
        te_u32 before;
        asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
                     : "=r"(before)
                     : "l"(args.counters + blockIdx.y), "r"(used - 1)
                     : "memory");
        last = before == (te_u32)used - 1;
    }
    __syncthreads();
    if (!last) return;
    te_part *parts = (te_part *)te_shared; // [chunk][row]
    for (int at = threadIdx.x; at < used * rows; at += THREADS) {
        const int part = at / rows, r = at % rows;
        const float2 x = __ldcg((const float2 *)(all + part * part_floats + r * row_floats + a.d_v));
        parts[at].top = x.x, parts[at].l = x.y;
    }
    __syncthreads();
    for (int at = threadIdx.x; at < rows * QUADS; at += THREADS) {
        const int r = at / QUADS, c = 4 * (at % QUADS);
        te_part sum;
        if (c >= a.d_v) continue;
        const float4 joined = te_join<true>((const float4 *)(all + r * row_floats + c), (int)(part_floats / 4),
                                            parts + r, rows, used, sum);
        te_finish(a, seq, b, first_head, r, c, joined, sum);
    }
}
