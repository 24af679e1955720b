// ops/attn/attn_decode.cu: computes O = softmax(scale Q K^T, masked) V for few queries and many keys. A decoding step
// has this shape, and is limited by reading K and V once.
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
// In a captured decoding step, all of a sequence's keys but the newest are there before the step begins. `early` says
// that lengths and these keys may be read before te_follow. Kernels ahead write Q and the newest keys.
//
// A warp copies its own keys by cp.async, a step ahead, and has its own maximum and sums, so that warps do not
// wait for each other. At the end the block adds up the sums of its warps. For each sequence and KV head, the last
// block to finish adds up the chunks, always in the same order. If the blocks form a cluster, they send each other
// their sums instead, and each block adds up all chunks for a share of the channels, in the same order. Blocks that
// run at the same time read neighbouring rows: those of all KV heads of a token.
//
// Products are transposed: S^T = K Q^T and O^T += V^T P^T. An mma.sync has 16 rows and 8 columns, and there are 16 keys
// or channels, but often at most 8 rows of queries.
//
// Codes (X_CODES): K and V are E4M3 codes of a cache, and each row of them has a factor 2^e. Codes are converted to
// f16, exactly, in registers, and are multiplied in f16. A row of Q is scaled by a power of two, so that it fits into
// f16: numbers below 2^-28 of its largest lose bits. Scores are multiplied by the factors of K. P is multiplied by the
// factors of V, relative to the largest one so far.
//
// Options: X_DT (te_dtype of q and o, and of k and v unless they are codes), X_D (the larger of d and d_v, rounded up
// to a multiple of 32, or of 64 if above 128; channels beyond d or d_v are zeros), X_ROWS (8 or 16: the number of rows
// of a tile), X_CODES, X_EXTRA (attn.cuh; without block masks, user's rules and dropout; 1 with X_CODES).
//
// Launch: grid (KV heads, splits, sequences of this launch), block 32 WARPS, shared memory by te__attn_decode_shared.
// Rows start at multiples of 16 bytes, and have whole pieces of 16 bytes; scale > 0. A page has a multiple of 16 keys,
// or all keys.
// te:arch 80
// te:row X_DT=3 X_D=32|64|96|128|192|256 X_ROWS=8|16 X_CODES=0 X_EXTRA=0|1
// te:row X_DT=2 X_D=128 X_ROWS=8 X_CODES=0 X_EXTRA=0|1
// te:row X_DT=3 X_D=32|64|96|128|192|256 X_ROWS=8|16 X_CODES=1 X_EXTRA=1
// te:row X_DT=2 X_D=128 X_ROWS=8 X_CODES=1 X_EXTRA=1
#include "device/hopper.cuh"
#include "ops/attn/fragments.cuh"

#ifndef X_DT // the rows above name every option; these defaults are for an editor
#define X_DT 3
#define X_D 128
#define X_ROWS 8
#define X_CODES 0
#endif
enum {
    DT = X_DT,
    D = X_D,
    ROWS = X_ROWS,
    N = ROWS / 8, // tiles of 8 rows
    CODES = X_CODES,
    STAGES = TE__ATTN_DECODE_STAGES,
    WARPS = TE__ATTN_DECODE_WARPS,
    KEYS = 16, // of a warp's step
    THREADS = 32 * WARPS,
    OPERANDS = CODES ? TE_F16 : DT, // the format of products
    BYTES = CODES ? 1 : 2, // of an element of K and V
    PIECES = D * BYTES / 16, // of 16 bytes, in a row of K or V
    ROW_Q = 2 * D + 16, ROW_K = TE__ATTN_DECODE_ROW_K(D, CODES), ROW_V = TE__ATTN_DECODE_ROW_V(D, CODES),
    SLOT = KEYS * (ROW_K + ROW_V), // bytes of a warp's keys and values in one stage
    TILES = TE__ATTN_DECODE_TILES(D, ROWS, CODES), SUMS = TE__ATTN_DECODE_SUMS(D, ROWS), // bytes
    TOGETHER = TE__ATTN_DECODE_TOGETHER,
    QUADS = D / 4, // of a row
    BEFORE_SENT = TILES > SUMS ? TILES : SUMS,
    Q_PIECES = (ROWS * D / 8 + THREADS - 1) / THREADS, // of 16 bytes, of Q, for each thread
    ROW_SUMS = D + 4 // floats of a row of a warp's sums: rows 2 t of the lanes of a quad lie in different banks
};

// Copies a warp's tiles of 16 keys, or of their values. A row has ROW bytes of shared memory. Eight, four or two lanes
// copy a row.
template <int ROW> struct te_rows_of {
    enum { GROUP = PIECES % 8 == 0 ? 8 : PIECES % 4 == 0 ? 4 : 2, STEP = 32 / GROUP };
    const char *at; // this lane's first piece of row 0 or, without pages, of the tile that is copied next
    te_i64 row, page; // bytes from one row, or page, to the next
    int pieces;
    te_u32 to;
    TE_DEV te_rows_of(const te__attn_view &x, int b, int h, int d, bool paged, int first)
        : row(BYTES * x.s), page(BYTES * x.b) {
        const int lane = threadIdx.x & 31, r = lane / GROUP, c = lane % GROUP;
        at = (const char *)x.p + BYTES * (h * x.h + (paged ? 0 : b * x.b)) + (r + (paged ? 0 : first)) * row + 16 * c;
        pieces = d * BYTES / 16 - c;
        to = (te_u32)(r * ROW + 16 * c);
    }
    // Copies the tile whose row 0 is at `from`. Its first `there` rows exist; the others become 0. WHOLE: all rows and
    // all pieces exist.
    template <bool WHOLE> TE_DEV void copy(te_u32 tile, const char *from, int there) const {
        there -= (threadIdx.x & 31) / GROUP;
#pragma unroll
        for (int i = 0; i < KEYS / STEP; i++) {
#pragma unroll
            for (int j = 0; j < PIECES / GROUP; j++)
                te_cp_async16(tile + to + i * STEP * ROW + j * GROUP * 16, from + j * GROUP * 16,
                              WHOLE || (there > i * STEP && pieces > j * GROUP) ? 16 : 0);
            from += STEP * row;
        }
    }
};

// ---- products ----

// With codes, a lane reads 4 UNIT neighbouring codes of a key at a time: those of 4 channels for each of UNIT steps of
// the product. So the channels of Q have the same order: te_place is the place of channel c in a row of Q.
enum { UNIT = CODES && D % 64 == 0 ? 4 : 2 };
TE_DEV int te_place(int c) {
    const int in = c % (16 * UNIT), lane = in / (4 * UNIT), step = in / 4 % UNIT, r = in % 4;
    return c - in + 16 * step + 2 * lane + (r & 1) + 4 * (r & 2);
}
template <int WORDS> TE_DEV void te_words(te_u32 w[WORDS], te_u32 at) {
    if (WORDS == 4) {
        const uint4 v = te_lds16(at);
        w[0] = v.x, w[1] = v.y, w[WORDS - 2] = v.z, w[WORDS - 1] = v.w;
    } else {
        const float2 v = te_lds8(at);
        w[0] = __float_as_uint(v.x), w[1] = __float_as_uint(v.y);
    }
}
// This lane's addresses of the operands, relative to the beginning of their tile.
struct te_operands {
    te_u32 k, v, q;
    TE_DEV te_operands() {
        const int lane = threadIdx.x & 31, low = lane & 7, second = lane >> 3 & 1, third = lane >> 4;
        k = CODES ? (lane >> 2) * ROW_K + (lane & 3) * 4 * UNIT : (low + 8 * second) * ROW_K + 16 * third;
        v = CODES ? (low + 8 * second) * ROW_V + 16 * third : (low + 8 * third) * ROW_V + 16 * second;
        q = N == 1 ? low * ROW_Q + 16 * (lane >> 3) : (low + 8 * third) * ROW_Q + 16 * second;
    }
};
// s = K Q^T: rows are keys, s[n] has the queries from 8 n on as columns.
TE_DEV void te_score_products(float (&s)[N][4], te_u32 k, te_u32 q) {
    float odd[N][4]; // sums of every second step, since an mma waits for the one that it adds to
#pragma unroll
    for (int at = 0; at < 4 * N; at++) s[at >> 2][at & 3] = odd[at >> 2][at & 3] = 0.0f;
#pragma unroll
    for (int first = 0; first < D / 16; first += UNIT) {
        te_u32 a[UNIT][4];
        if (CODES) {
            te_u32 low[UNIT], high[UNIT]; // of keys g and g + 8
            te_words<UNIT>(low, k + 16 * first);
            te_words<UNIT>(high, k + 16 * first + 8 * ROW_K);
#pragma unroll
            for (int step = 0; step < UNIT; step++) {
                a[step][0] = te_fp8x2_to_f16(low[step], 0, TE_F8E4M3);
                a[step][1] = te_fp8x2_to_f16(high[step], 0, TE_F8E4M3);
                a[step][2] = te_fp8x2_to_f16(low[step], 1, TE_F8E4M3);
                a[step][3] = te_fp8x2_to_f16(high[step], 1, TE_F8E4M3);
            }
        } else {
#pragma unroll
            for (int step = 0; step < UNIT; step++) te_ldmatrix4(a[step], k + 32 * (first + step));
        }
#pragma unroll
        for (int step = 0; step < UNIT; step += 2) {
            te_u32 b[4];
            te_ldmatrix4(b, q + 32 * (first + step)); // N == 1: of two steps; else of one
            te_mma<OPERANDS>(s[0], a[step], b);
            if (N == 1) {
                te_mma<OPERANDS>(odd[0], a[step + 1], b + 2);
            } else {
                te_mma<OPERANDS>(s[N - 1], a[step], b + 2);
                te_ldmatrix4(b, q + 32 * (first + step + 1));
                te_mma<OPERANDS>(odd[0], a[step + 1], b);
                te_mma<OPERANDS>(odd[N - 1], a[step + 1], b + 2);
            }
        }
    }
#pragma unroll
    for (int at = 0; at < 4 * N; at++) s[at >> 2][at & 3] += odd[at >> 2][at & 3];
}
// Transposes an 8x8 matrix of 16-bit words: lane 4 i + t has words 2 t and 2 t + 1 of row i.
TE_DEV te_u32 te_transposed(te_u32 x) {
    te_u32 y;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}
// o += V^T P^T: rows of o[m][n] are 16 channels from 16 m on, its columns the queries from 8 n on. p has the layout of
// te_score_products. Lane 4 g + t has channels te_channel(g, 0) and te_channel(g, 1) of these 16.
TE_DEV int te_channel(int g, int half) { return CODES ? 2 * g + half : g + 8 * half; }
TE_DEV void te_add_values(float (&o)[D / 16][N][4], const float (&p)[N][4], te_u32 v) {
    te_u32 b[N][2];
#pragma unroll
    for (int n = 0; n < N; n++) {
        b[n][0] = te_transposed(te_pack<OPERANDS>(p[n][0], p[n][1]));
        b[n][1] = te_transposed(te_pack<OPERANDS>(p[n][2], p[n][3]));
    }
#pragma unroll
    for (int m = 0; m < D / 16; m += 2) {
        te_u32 a[2][4];
        if (CODES) {
            te_u32 pairs[4]; // each of two channels of two keys: the 16-bit words of ldmatrix are pairs of channels
            te_ldmatrix4_trans(pairs, v + 16 * m);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const te_u32 codes = __byte_perm(pairs[i], 0, 0x3120);
                a[i >> 1][2 * (i & 1)] = te_fp8x2_to_f16(codes, 0, TE_F8E4M3);
                a[i >> 1][2 * (i & 1) + 1] = te_fp8x2_to_f16(codes, 1, TE_F8E4M3);
            }
        } else {
            te_ldmatrix4_trans(a[0], v + 32 * m);
            te_ldmatrix4_trans(a[1], v + 32 * m + 32);
        }
#pragma unroll
        for (int n = 0; n < N; n++) {
            te_mma<OPERANDS>(o[m][n], a[0], b[n]);
            te_mma<OPERANDS>(o[m + 1][n], a[1], b[n]);
        }
    }
}

// ---- factors of codes ----

// Returns 2^(e - 127), or NaN for the E8M0 code 255. Code 0, which rows of zeros have, counts as 0.
TE_DEV float te_factor(int e) { return __int_as_float(e == 255 ? 0x7fffffff : e << 23); }
// te_scaled_row scales a row of Q by 2^(14 - e), so that its largest element is in 2^14 .. 2^15; FACTOR_P is the factor
// of P. Both keep small numbers away from the subnormals of f16.
enum { SCALED_Q = 14, FACTOR_P = 15 };
// Copies a row of Q, of which d channels exist, from `from` into shared memory; NULL: zeros. Returns the factor that
// makes the copy's numbers those of Q.
TE_DEV float te_scaled_row(te_u32 to, const te_u16 *from, int d) {
    enum { PAIRS = (D + 63) / 64 }; // of a lane
    const int lane = threadIdx.x & 31;
    float x[PAIRS][2], top = 0.0f;
#pragma unroll
    for (int at = 0; at < 2 * PAIRS; at++) {
        const int c = 64 * (at >> 1) + 2 * lane + (at & 1);
        x[at >> 1][at & 1] = from && c < d ? te_load(from, c, DT) : 0.0f;
        top = fmaxf(top, fabsf(x[at >> 1][at & 1]));
    }
    const int e = min(max(__float_as_int(te_warp_max(top)) >> 23, SCALED_Q + 1), 253);
    const float by = __int_as_float((254 + SCALED_Q - e) << 23);
#pragma unroll
    for (int i = 0; i < PAIRS; i++) {
        const int c = 64 * i + 2 * lane;
        if (c < D) te_sts4(to + 2 * te_place(c), te_pack<TE_F16>(x[i][0] * by, x[i][1] * by));
    }
    return __int_as_float((e - SCALED_Q) << 23);
}

// The softmax state of a row over some keys: the maximum score in units of log2, and the sum of 2^(score - top).
struct te_part {
    float top, l;
};
TE_DEV float4 te_float4_of(uint4 v) {
    return make_float4(__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w));
}
TE_DEV void te_add_part(float4 &sum, float w, const float4 &v) {
    sum.x = fmaf(w, v.x, sum.x), sum.y = fmaf(w, v.y, sum.y);
    sum.z = fmaf(w, v.z, sum.z), sum.w = fmaf(w, v.w, sum.w);
}
// Adds up four channels of a row over the block's warps, in order. Returns the sum relative to 2^sum.top.
TE_DEV float4 te_join(const float4 *o, const te_part *parts, te_part &sum) {
    float4 all = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    sum.top = -TE_INF, sum.l = 0.0f;
#pragma unroll
    for (int i = 0; i < WARPS; i++) sum.top = fmaxf(sum.top, parts[i * ROWS].top);
    const float base = sum.top == -TE_INF ? 0.0f : sum.top;
#pragma unroll
    for (int i = 0; i < WARPS; i++) {
        const float4 v = o[i * (ROWS * ROW_SUMS / 4)];
        const float w = te_exp2(parts[i * ROWS].top - base);
        sum.l = fmaf(w, parts[i * ROWS].l, sum.l);
        te_add_part(all, w, v);
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

// A multiprocessor of Hopper has shared memory for this many blocks, up to a number that registers allow.
enum {
    ROOM = 227 * 1024 / (TILES + 1024),
    MOST = 4 - (ROWS > 8) - (D > 128 || (CODES && ROWS > 8)),
    BLOCKS = ROOM < 1 ? 1 : ROOM < MOST ? ROOM : MOST
};
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    te_attn_decode(const __grid_constant__ te__attn_decode_kargs args) {
    if (!args.early) {
        te_follow();
        te_lead();
    }
    extern __shared__ uint4 te_shared[];
    __shared__ te_part of_warps[WARPS * ROWS];
    __shared__ float of_q[ROWS], slopes[ROWS];
    __shared__ bool last;
    const te__attn_kargs &a = args.a;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int split = blockIdx.y, group = blockIdx.x, b = args.first + blockIdx.z;
    const int rows = args.heads * a.s_q, first_head = group * args.heads;
    TE_ATTN_SEQUENCE(a, b);
    const te_of::view q_view = te_of::queries(a.q, seq), k_view = te_of::keys(a.k, seq), v_view = te_of::keys(a.v, seq);
    const int begin = te_attn_keys_begin(seq, 0) / KEYS * KEYS,
              end = seq.s_q > 0 ? te_attn_keys_end(seq, seq.s_q - 1) : 0;
    const int chunk = TE__ATTN_DECODE_CHUNK(end > begin ? end - begin : 1, args.share);
    const int from = begin + split * chunk, to = min(end, from + chunk);
    if (split > 0 && from >= end) return;
    const int used = end > begin ? (end - begin + chunk - 1) / chunk : 1;
#if TE_HAS_STORE_ASYNC
    // The blocks of a cluster add up the chunks together. Four channels of a row are a quad. Block i of the cluster
    // adds up the quads from i * share on, `share` of them, and receives their sums from all blocks.
    __shared__ te_u64 bar_sent;
    const bool in_cluster = args.clustered && used > 1 && used <= TOGETHER;
    const te_u32 quads = rows * QUADS, share = (quads + used - 1) / used, first_quad = split * share,
                 own_quads = first_quad < quads ? min(share, quads - first_quad) : 0;
    te_u32 inverse = (1 << 22) / share + 1; // quad / share is quad * inverse >> 22
    asm volatile("" : "+r"(inverse)); // so that it is computed here
    const te_u32 sent = te_smem(te_shared) + BEFORE_SENT, sent_parts = sent + 16 * used * share;
    if (in_cluster) {
        if (threadIdx.x == 0) {
            te_mbar_init(te_smem(&bar_sent), 1);
            te_mbar_init_done();
            te_mbar_expect(te_smem(&bar_sent), used * (16 * (int)own_quads + 8 * rows));
        }
        te_cluster_arrive();
    }
#endif

    const te_u32 shared = te_smem(te_shared), q = shared, mine = q + ROWS * ROW_Q + warp * (STAGES * SLOT);
    const bool paged = EXTRA && a.x.pages;
    const int mine_from = from + warp * KEYS;
    te_rows_of<ROW_K> keys(k_view, b, group, a.d, paged, mine_from);
    te_rows_of<ROW_V> values(v_view, b, group, a.d_v, paged, mine_from);
    const bool whole_rows = a.d == D && a.d_v == D;
    // Lanes 0 .. 15 load the factors of 16 keys, lanes 16 .. 31 those of their values.
    const te_u8 *factors = 0;
    te_i64 factor_row = 0, factor_page = 0;
    if (CODES) {
        const te__attn_view &x = lane < KEYS ? a.x.k_factors : a.x.v_factors;
        factor_row = x.s, factor_page = x.b;
        factors = (const te_u8 *)te_of::keys(x, seq).p + group * x.h + (paged ? 0 : b * x.b) +
                  ((lane & 15) + (paged ? 0 : mine_from)) * x.s;
    }
    int ahead[STAGES] = {}; // factors of the tiles that are multiplied next; the last: of the tile that was copied last
    auto copy = [&](int j, int slot, int &factor) { // copies the tile from key j on, and loads its factor
        const te_u32 tile = mine + slot * SLOT;
        const char *k = keys.at, *v = values.at;
        const te_u8 *f = factors;
        if (paged) { // all rows of the tile are in one page
            int row;
            const te_i64 page = te__attn_page(&a.x, b, j, &row);
            k += page * keys.page + row * keys.row;
            v += page * values.page + row * values.row;
            f += page * factor_page + row * factor_row;
        } else {
            keys.at += WARPS * KEYS * keys.row;
            values.at += WARPS * KEYS * values.row;
            factors += WARPS * KEYS * factor_row;
        }
        if (whole_rows && j + KEYS <= to) {
            if (CODES) factor = *f;
            keys.copy<true>(tile, k, 0);
            values.copy<true>(tile + KEYS * ROW_K, v, 0);
        } else {
            if (CODES && j + (lane & 15) < to) factor = *f;
            keys.copy<false>(tile, k, to - j);
            values.copy<false>(tile + KEYS * ROW_K, v, to - j);
        }
    };
    // The first STAGES tiles are copied before the kernels ahead have ended, unless a kernel ahead may write into them.
    const int old = args.early && args.old ? args.old[b] : to;
    auto is_old = [&](int i) { return min(mine_from + i * (WARPS * KEYS) + KEYS, to) <= old; };
    auto copy_first = [&](int i) {
        if (mine_from + i * (WARPS * KEYS) < to) copy(mine_from + i * (WARPS * KEYS), i, ahead[i]);
        te_cp_async_commit();
    };
#pragma unroll
    for (int i = 0; i < STAGES; i++)
        if (is_old(i)) copy_first(i);

    const te_operands at;
    float o[D / 16][N][4], top[N][2], l[N][2]; // top and l: of rows 8 n + 2 t and + 1; l: over this lane's keys
    int first[N][2], span[N][2]; // these rows see `span` keys from `first` on, of this block's
#pragma unroll
    for (int i = 0; i < D / 16 * N * 4; i++) o[i / (4 * N)][i / 4 % N][i % 4] = 0.0f;
#pragma unroll
    for (int i = 0; i < 2 * N; i++) {
        const int n = i >> 1, c = i & 1, r = 8 * n + 2 * (lane & 3) + c;
        const int row = a.s_q == 1 ? 0 : r % a.s_q;
        top[n][c] = -TE_INF, l[n][c] = 0.0f;
        first[n][c] = row + seq.lo;
        span[n][c] = r < rows && row < seq.s_q ? max(min(to, row + seq.hi + 1) - first[n][c], 0) : 0;
    }
    const bool plain = !EXTRA || !(a.x.bias.p || a.x.mask.p || a.x.alibi || a.x.softcap > 0.0f);
    float by_q[N][2]; // the factors that make products scores in units of log2 or, unless plain, products of Q
    if (!CODES) by_q[0][0] = plain ? a.scale2 : 1.0f;

#if TE_HAS_STORE_ASYNC
    if (in_cluster) te_cluster_wait(); // all mbarriers of the cluster are initialized
#endif
    te_follow();
    te_lead();
    uint4 of_rows[CODES ? 1 : Q_PIECES]; // this thread's pieces of Q
    if (!CODES) {
#pragma unroll
        for (int i = 0; i < Q_PIECES; i++) {
            const int at = threadIdx.x + i * THREADS, r = at / (D / 8), c = at % (D / 8);
            const te_row row(a, first_head, r);
            of_rows[i] = make_uint4(0, 0, 0, 0);
            if (r < rows && row.i < seq.s_q && 8 * c < a.d)
                of_rows[i] = *(const uint4 *)((const te_u16 *)q_view.p + te_attn_at(q_view, b, row.h, row.i) + 8 * c);
        }
    }
#pragma unroll
    for (int i = 0; i < STAGES; i++)
        if (!is_old(i)) copy_first(i);
    if (CODES) {
        for (int r = warp; r < ROWS; r += WARPS) {
            const te_row row(a, first_head, r);
            const bool there = r < rows && row.i < seq.s_q;
            const float by = te_scaled_row(
                q + r * ROW_Q, there ? (const te_u16 *)q_view.p + te_attn_at(q_view, b, row.h, row.i) : 0, a.d);
            if (lane == 0) of_q[r] = by;
        }
    } else {
#pragma unroll
        for (int i = 0; i < Q_PIECES; i++) {
            const int at = threadIdx.x + i * THREADS, r = at / (D / 8), c = at % (D / 8);
            if (r < ROWS) te_sts16(q + r * ROW_Q + 16 * c, of_rows[i]);
        }
    }
    if (EXTRA && a.x.alibi && threadIdx.x < rows)
        slopes[threadIdx.x] = te_of::slope2(a, b, te_row(a, first_head, threadIdx.x).h);
    int top_v = 0; // the largest exponent of the factors of V so far
    int slot = 0, copied = 0; // of the tile that is multiplied, and of the one that is copied
    // Each turn but the first copies a tile, and multiplies the one that was copied STAGES - 1 turns before.
    const int turns = max(to - from + WARPS * KEYS - 1, 0) / (WARPS * KEYS);
#pragma unroll 1
    for (int turn = 0; turn < turns; turn++) {
        const int j0 = mine_from + turn * (WARPS * KEYS), next = j0 + (STAGES - 1) * WARPS * KEYS;
        if (turn > 0) {
#pragma unroll
            for (int i = 1; i < STAGES; i++) ahead[i - 1] = ahead[i]; // loaded a turn ago, or earlier
            ahead[STAGES - 1] = 0;
            if (next < to) copy(next, copied, ahead[STAGES - 1]);
            copied = copied == STAGES - 1 ? 0 : copied + 1;
            te_cp_async_commit();
        }
        const int factor = ahead[0];
        te_cp_async_wait<STAGES - 1>();
        if (turn == 0) {
            __syncthreads(); // all warps have stored Q
#pragma unroll
            for (int i = 0; CODES && i < 2 * N; i++)
                by_q[i >> 1][i & 1] = of_q[8 * (i >> 1) + 2 * (lane & 3) + (i & 1)] * (plain ? a.scale2 : 1.0f);
        } else {
            __syncwarp();
        }
        if (j0 >= to) continue;
        const te_u32 k = mine + slot * SLOT, v = k + KEYS * ROW_K;
        slot = slot == STAGES - 1 ? 0 : slot + 1;
        float s[N][4];
        te_score_products(s, k + at.k, q + at.q);
        if (CODES) {
            const float of_row = te_factor(factor), low = __shfl_sync(0xffffffffu, of_row, lane >> 2),
                        high = __shfl_sync(0xffffffffu, of_row, (lane >> 2) + 8);
#pragma unroll
            for (int i = 0; i < 4 * N; i++) s[i >> 2][i & 3] *= by_q[i >> 2][i & 1] * (i & 2 ? high : low);
        } else if (plain) {
#pragma unroll
            for (int i = 0; i < 4 * N; i++) s[i >> 2][i & 3] *= by_q[0][0];
        }
        const int j = j0 + (lane >> 2); // this lane's keys are j and j + 8
        if (plain) {
#pragma unroll
            for (int i = 0; i < 4 * N; i++) {
                const int n = i >> 2, c = i & 1;
                if ((te_u32)(j + 4 * (i & 2) - first[n][c]) >= (te_u32)span[n][c]) s[n][i & 3] = -TE_INF;
            }
        } else if (EXTRA) { // Each turn takes element 0, and puts its score behind the others.
#pragma unroll 1
            for (int i = 0; i < 4 * N; i++) {
                const int key = j + 4 * (i & 2);
                const int r = 8 * (i >> 2) + 2 * (lane & 3) + (i & 1);
                const te_row row(a, first_head, r);
                const float x = key < to && r < rows
                                    ? te_of::score2(a, seq, b, row.h, row.i, key, s[0][0], slopes[r])
                                    : -TE_INF;
#pragma unroll
                for (int m = 0; m < 4 * N - 1; m++) s[m >> 2][m & 3] = s[(m + 1) >> 2][(m + 1) & 3];
                s[N - 1][3] = x;
            }
        }
        bool grows = CODES && lane >= KEYS && factor > top_v;
#pragma unroll
        for (int i = 0; i < 4 * N; i++) grows = grows || s[i >> 2][i & 3] > top[i >> 2][i & 1];
        if (__any_sync(0xffffffffu, grows)) {
            float by_v = 1.0f;
            if (CODES) {
                const int now = max(top_v, (int)__reduce_max_sync(0xffffffffu, lane < KEYS ? 0u : (te_u32)factor));
                by_v = te_exp2((float)(top_v - now));
                top_v = now;
            }
#pragma unroll
            for (int i = 0; i < 2 * N; i++) {
                const int n = i >> 1, c = i & 1;
                float now = fmaxf(top[n][c], fmaxf(s[n][c], s[n][c + 2]));
#pragma unroll
                for (int far = 4; far < 32; far *= 2) now = fmaxf(now, __shfl_xor_sync(0xffffffffu, now, far));
                const float shrink = now == -TE_INF ? 1.0f : te_exp2(top[n][c] - now);
                top[n][c] = now;
                l[n][c] *= shrink;
#pragma unroll
                for (int m = 0; m < D / 16; m++) o[m][n][c] *= shrink * by_v, o[m][n][c + 2] *= shrink * by_v;
            }
        }
        float of_value[2] = {1.0f, 1.0f}; // factors of P
        if (CODES) {
#pragma unroll
            for (int half = 0; half < 2; half++)
                of_value[half] = __int_as_float(
                    max(__shfl_sync(0xffffffffu, factor, 16 + 8 * half + (lane >> 2)) - top_v + 127 + FACTOR_P, 0)
                    << 23);
        }
#pragma unroll
        for (int i = 0; i < 4 * N; i++) {
            const int n = i >> 2, c = i & 1;
            float &x = s[n][i & 3];
            x = te_exp2(x - (top[n][c] == -TE_INF ? 0.0f : top[n][c]));
            l[n][c] += x;
            if (CODES) x *= of_value[i >> 1 & 1];
        }
        te_add_values(o, s, v + at.v);
        __syncwarp(); // the next copy overwrites this slot
    }

    // ---- the block's warps ----
    te_cp_async_wait<0>();
    __syncthreads(); // the tiles' memory takes the sums of the warps: [warp][row][channel]
    float *sums = (float *)te_shared;
    const float of_sums = CODES ? te_factor(top_v == 255 ? 255 : max(top_v - FACTOR_P, 0)) : 1.0f;
#pragma unroll
    for (int i = 0; i < 2 * N; i++) {
        const int n = i >> 1, c = i & 1, r = warp * ROWS + 8 * n + 2 * (lane & 3) + c;
#pragma unroll
        for (int far = 4; far < 32; far *= 2) l[n][c] += __shfl_xor_sync(0xffffffffu, l[n][c], far);
#pragma unroll
        for (int m = 0; m < D / 16; m++) {
            float *const to = sums + r * ROW_SUMS + 16 * m;
            const float x = o[m][n][c] * of_sums, y = o[m][n][c + 2] * of_sums;
            if (CODES) *(float2 *)(to + te_channel(lane >> 2, 0)) = make_float2(x, y);
            else to[te_channel(lane >> 2, 0)] = x, to[te_channel(lane >> 2, 1)] = y;
        }
        if (lane < 4) of_warps[r].top = top[n][c], of_warps[r].l = l[n][c];
    }
    __syncthreads();
#if TE_HAS_STORE_ASYNC
    if (in_cluster) {
        for (te_u32 at = threadIdx.x; at < quads; at += THREADS) {
            const te_u32 r = at / QUADS, c = at % QUADS, to = at * inverse >> 22;
            te_part sum;
            const float4 joined = te_join((const float4 *)(sums + r * ROW_SUMS + 4 * c), of_warps + r, sum);
            te_store16_there(te_cluster_at(sent + 16 * (split * share + at - to * share), to), joined,
                             te_cluster_at(te_smem(&bar_sent), to));
            if (c < (te_u32)used)
                te_store8_there(te_cluster_at(sent_parts + 8 * (split * rows + r), c), sum.top, sum.l,
                                te_cluster_at(te_smem(&bar_sent), c));
        }
        te_mbar_wait_sent(te_smem(&bar_sent), 0);
        for (te_u32 i = threadIdx.x; i < own_quads; i += THREADS) {
            const int r = (int)((first_quad + i) / QUADS), c = (int)(4 * ((first_quad + i) % QUADS));
            if (c >= a.d_v) continue;
            float w[TOGETHER], l[TOGETHER];
            te_part sum = {-TE_INF, 0.0f};
#pragma unroll
            for (int s = 0; s < TOGETHER; s++) {
                w[s] = -TE_INF, l[s] = 0.0f;
                if (s >= used) continue;
                const float2 part = te_lds8(sent_parts + 8 * (s * rows + r));
                w[s] = part.x, l[s] = part.y;
                sum.top = fmaxf(sum.top, part.x);
            }
            const float base = sum.top == -TE_INF ? 0.0f : sum.top;
            float4 joined = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
            for (int s = 0; s < TOGETHER; s++) {
                w[s] = te_exp2(w[s] - base);
                l[s] = __fmul_rn(l[s], w[s]); // not fused with the additions, as in the sum of a warp's lanes
                if (s < used) te_add_part(joined, w[s], te_float4_of(te_lds16(sent + 16 * (s * share + i))));
            }
            sum.l = ((l[0] + l[4]) + (l[2] + l[6])) + ((l[1] + l[5]) + (l[3] + l[7])); // the order of te_warp_sum
            te_finish(a, seq, b, first_head, r, c, joined, sum);
        }
        return;
    }
#endif
    const te_i64 row_floats = a.d_v + 4, part_floats = rows * row_floats; // a row's sums, then top, l, and padding
    const te_u32 place = blockIdx.z * gridDim.x + blockIdx.x;
    float *all = args.part + (te_i64)place * args.splits * part_floats;
    for (int at = threadIdx.x; at < rows * QUADS; at += THREADS) {
        const int r = at / QUADS, c = 4 * (at % QUADS);
        te_part sum;
        if (c >= a.d_v) continue;
        const float4 joined = te_join((const float4 *)(sums + r * ROW_SUMS + c), of_warps + r, sum);
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
                     : "l"(args.counters + place), "r"(used - 1)
                     : "memory");
        last = before == (te_u32)used - 1;
    }
    __syncthreads();
    if (!last) return;
    // The sums of chunks are loaded while their weights are computed: those of the first chunks into registers, if each
    // thread has four channels at most, and others into shared memory behind `parts`, as far as they fit.
    enum { EARLY = 8, ROOM_PARTS = TILES > SUMS ? TILES : SUMS };
    const int in_registers = rows * QUADS <= THREADS ? EARLY : 0, part_pieces = (int)part_floats / 4,
              sums_at = (rows * used * (int)sizeof(te_part) + 15) / 16 * 16,
              kept = max(0, min(used, (ROOM_PARTS - sums_at) / (16 * part_pieces)));
    const int early_r = threadIdx.x / QUADS, early_c = 4 * (threadIdx.x % QUADS);
    float4 early[EARLY];
#pragma unroll
    for (int i = 0; i < EARLY; i++)
        if (i < min(in_registers, used) && early_r < rows && early_c < a.d_v)
            early[i] = __ldcg((const float4 *)(all + early_r * row_floats + early_c + i * part_floats));
    for (int at = in_registers * part_pieces + threadIdx.x; at < kept * part_pieces; at += THREADS)
        te_cp_async16(shared + sums_at + 16 * at, (const float4 *)all + at, 16);
    te_cp_async_commit();
    te_part *parts = (te_part *)te_shared; // [row][chunk]; at last `top` is the weight of the chunk's sums
    for (int r = warp; r < rows; r += WARPS) {
        te_part *const mine = parts + r * used;
        float *const of_row = all + r * row_floats + a.d_v;
        float most = -TE_INF, total = 0.0f;
        for (int i = lane; i < used; i += 32) {
            const float2 x = __ldcg((const float2 *)(of_row + i * part_floats));
            mine[i].top = x.x, mine[i].l = x.y;
            most = fmaxf(most, x.x);
        }
        most = te_warp_max(most);
        for (int i = lane; i < used; i += 32) {
            mine[i].top = te_exp2(mine[i].top - (most == -TE_INF ? 0.0f : most));
            total = fmaf(mine[i].top, mine[i].l, total);
        }
        total = te_warp_sum(total);
        if (lane == 0) of_warps[r].top = most, of_warps[r].l = total;
    }
    te_cp_async_wait<0>();
    __syncthreads();
    for (int at = threadIdx.x; at < rows * QUADS; at += THREADS) {
        const int r = at / QUADS, c = 4 * (at % QUADS);
        if (c >= a.d_v) continue;
        const int in_part = (int)(r * row_floats + c) / 4;
        const float4 *o = (const float4 *)all + in_part;
        const te_u32 o_kept = shared + sums_at + 16 * in_part;
        const te_part *weights = parts + r * used;
        float4 joined = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int n = 0; n < EARLY; n++)
            if (n < min(in_registers, used)) te_add_part(joined, weights[n].top, early[n]);
        int i = in_registers;
#pragma unroll 8
        for (; i < kept; i++)
            te_add_part(joined, weights[i].top, te_float4_of(te_lds16(o_kept + 16 * i * part_pieces)));
#pragma unroll 16
        for (; i < used; i++) te_add_part(joined, weights[i].top, __ldcg(o + i * part_pieces));
        te_finish(a, seq, b, first_head, r, c, joined, of_warps[r]);
    }
}
