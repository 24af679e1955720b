// ops/attn/hopper.cuh: products by wgmma, tiles in shared memory, and the keys of a tile of queries, for all attention
// kernels of sm_90a. It must not depend on a kernel's pipeline.
//
// Shared memory holds a matrix of 16-bit channels in panels of 64 channels: rows of 128 bytes, with TMA's 128-byte
// swizzle.
//
// Options:
// - X_DT: bf16, f16.
// - X_D: channels of q and k. X_D_V: channels of v and o. Both are 64, 96, 128, 192 or 256. Missing channels are zeros.
// - X_BLOCKS: 1: there is a block mask; default 0.
#pragma once
#include "device/hopper.cuh"
#include "ops/attn/attn.cuh"

#if X_DT == 3
#define TE__ATTN_TYPES "k16.f32.bf16.bf16"
#else
#define TE__ATTN_TYPES "k16.f32.f16.f16"
#endif

#define TE_ALL 0xffffffffu // lanes of a warp

#ifndef X_BLOCKS
#define X_BLOCKS 0
#endif
enum { BLOCKS = X_BLOCKS };

TE_DEV constexpr int te_panels(int d) { return (d + 63) / 64; }

// Computes d = A B (FRESH) or d += A B: 64 rows, 2 N columns, 16 elements along k. a and b are descriptors. A_T, B_T:
// 0: K-major; 1: MN-major.
template <int A_T, int B_T, bool FRESH, int N> TE_DEV void te_multiply(float (&d)[N], te_u64 a, te_u64 b) {
    static_assert(A_T <= B_T, "of the products of attention");
#define TE__FLAGS(n, flags)                                                                   \
    if constexpr (FRESH) TE_WGMMA_TO_##n("=f", TE__ATTN_TYPES, flags, d, a, b, 0);            \
    else TE_WGMMA_TO_##n("+f", TE__ATTN_TYPES, flags, d, a, b, 1);
#define TE__PRODUCT(n)                                                                        \
    if constexpr (N == n / 2) {                                                               \
        if constexpr (A_T) { TE__FLAGS(n, ", 1, 1, 1, 1") }                                   \
        else if constexpr (B_T) { TE__FLAGS(n, ", 1, 1, 0, 1") }                              \
        else { TE__FLAGS(n, ", 1, 1, 0, 0") }                                                 \
    }
    TE__PRODUCT(32)
    TE__PRODUCT(64)
    TE__PRODUCT(96)
    TE__PRODUCT(128)
    TE__PRODUCT(192)
    TE__PRODUCT(256)
#undef TE__PRODUCT
#undef TE__FLAGS
}
// Computes d += A B over 16 elements along k. A is in registers. B is in shared memory, MN-major.
template <int N> TE_DEV void te_multiply(float (&d)[N], const te_u32 *a, te_u64 b) {
#define TE__PRODUCT(n) \
    if constexpr (N == n / 2) TE_WGMMA_A_##n(TE__ATTN_TYPES, ", 1, 1, 1", d, a, b, 1);
    TE__PRODUCT(64)
    TE__PRODUCT(96)
    TE__PRODUCT(128)
    TE__PRODUCT(192)
    TE__PRODUCT(256)
#undef TE__PRODUCT
}

// Rounds two f32 to 16-bit values and returns them in one word. `lo` is in the low half.
TE_DEV te_u32 te_pack16(float lo, float hi) { return te_f32x2_to_half(lo, hi, X_DT); }
// Converts a warpgroup's accumulator of 64 rows to operand A of the next product: four words for every 16 columns.
template <int N> TE_DEV void te_pack16(te_u32 (&p)[N / 2], const float (&s)[N]) {
#pragma unroll
    for (int i = 0; i < N / 2; i++) p[i] = te_pack16(s[2 * i], s[2 * i + 1]);
}

// Returns the offset in bytes of piece p (16 bytes) of row r in a panel with the 128-byte swizzle.
TE_DEV te_u32 te_swizzled(int r, int p) { return r * 128 + ((p ^ (r & 7)) << 4); }

// Stage and parity of a queue of N buffers.
template <int N> struct te_queue {
    int stage = 0, parity = 0;
    TE_DEV void next() {
        if (++stage == N) stage = 0, parity ^= 1;
    }
};

// Returns the row of the block mask that contains query i. It has one te_attn_block for every TE_ATTN_BLOCK_SIZE keys.
TE_DEV const te_u8 *te_blocks_of(const te__attn_kargs &a, int b, int h, int i) {
    const te__attn_table &t = a.x.blocks;
    return (const te_u8 *)t.p + b * t.b + h * t.h + i / TE_ATTN_BLOCK_SIZE * t.i;
}
// Returns the last block of begin .. end - 1 (BN keys each) that is not empty in the block mask, or begin - 1. Sets
// `full` to true if that block is TE_ATTN_BLOCK_FULL. All 32 threads of the warp must call this function.
template <int BN> TE_DEV int te_last_seen(const te_u8 *row, int begin, int end, bool &full) {
    const int lane = threadIdx.x & 31;
    for (; end > begin; end -= 32) {
        const int n = end - 1 - lane, kind = n >= begin ? row[n * BN / TE_ATTN_BLOCK_SIZE] : TE_ATTN_BLOCK_EMPTY;
        const te_u32 seen = __ballot_sync(TE_ALL, kind != TE_ATTN_BLOCK_EMPTY);
        if (!seen) continue;
        const int first = __ffs(seen) - 1;
        full = __shfl_sync(TE_ALL, kind, first) == TE_ATTN_BLOCK_FULL;
        return end - 1 - first;
    }
    return begin - 1;
}
// Returns the same block as the function above, but does not set `full`. A single thread may call this function.
template <int BN> TE_DEV int te_last_seen(const te_u8 *row, int begin, int end) {
    for (; end > begin; end -= 8) { // eight loads at a time
        te_u32 seen = 0;
#pragma unroll
        for (int i = 1; i <= 8; i++)
            seen |= (te_u32)(end - i >= begin && row[(end - i) * BN / TE_ATTN_BLOCK_SIZE] != TE_ATTN_BLOCK_EMPTY)
                    << (i - 1);
        if (seen) return end - __ffs(seen);
    }
    return begin - 1;
}

// A tile of BM queries of a head. These queries see only keys of the blocks `begin` .. `end` - 1 (BN keys each).
//
// Tiles are numbered group by group, and a group is order.together heads. Within a group, the tiles of all heads at the
// same rows have neighbouring numbers, so that the keys of these heads stay in the L2 cache. The last rows come first:
// a causal mask gives them the most work. Groups take all heads of sequence 0, then all heads of sequence 1, and so
// on. With BY_HEAD, groups take head 0 of all sequences, then head 1 of all sequences, and so on, because the sequences
// may share a bias.
template <int BM, int BN, bool BY_HEAD = false> struct te_attn_tile {
    int begin, end;
    int row, head, batch;
    int s_q, s_kv, lo, hi;      // as in te__attn_seq
    int q_at, kv_at, q_end;
    // Only blocks of keys from number hidden_from on, and those before number hidden_to, may have keys that a row does
    // not see.
    int hidden_from, hidden_to;
    // true: the last block of keys reaches beyond the sequence, into memory that may have any content
    bool tail;

    template <class ARGS> TE_DEV void find(const ARGS &args, te_u32 number) {
        const te__attn_kargs &a = args.a;
        const te__attn_order &order = args.order;
        const te_u32 heads = (te_u32)a.heads * (te_u32)a.batch, section = (te_u32)order.together * (te_u32)order.rows;
        const te_u32 s = number / section, r = number - s * section,
                     width = min((te_u32)order.together, heads - s * order.together), m = r / width;
        const te_u32 at = s * order.together + r - m * width;
        if (BY_HEAD) {
            head = (int)(at / (te_u32)a.batch);
            batch = (int)(at - (te_u32)head * (te_u32)a.batch);
        } else {
            batch = (int)(at / (te_u32)a.heads);
            head = (int)(at - (te_u32)batch * (te_u32)a.heads);
        }
        row = (order.rows - 1 - (int)m) * BM;
        const te__attn_seq seq = te__attn_seq_of(&a, batch);
        s_q = seq.s_q, s_kv = seq.s_kv, lo = seq.lo, hi = seq.hi, q_end = seq.q_end;
        q_at = (int)seq.q_at, kv_at = (int)seq.kv_at;
        const int last = min(row + BM, s_q) - 1;
        begin = max(0, row + lo) / BN;
        end = row < s_q ? (min(s_kv, last + hi + 1) + BN - 1) / BN : 0; // may be negative
        if (BLOCKS && begin < end) end = te_last_seen<BN>(te_blocks_of(a, batch, head, row), begin, end) + 1;
        hidden_from = max(begin, max(0, row + hi + 1) / BN);
        hidden_to = max(begin, (last + lo + BN - 1) / BN);
        tail = end * BN > s_kv && s_kv < (a.x.packed_kv ? a.x.t_kv - kv_at : a.s_kv);
    }
    TE_DEV void tell(te_u32 to, bool more) const {
        te_sts16(to, make_uint4(begin, end, row, head));
        te_sts16(to + 16, make_uint4(batch, s_q, s_kv, lo));
        te_sts16(to + 32, make_uint4(hi, q_at, q_end, hidden_from));
        te_sts16(to + 48, make_uint4(hidden_to, tail, more, kv_at));
    }
    // Reads the tile that tell() wrote. Returns false if there are no more tiles. WARP tells the compiler that the
    // values are uniform.
    template <bool WARP> TE_DEV bool hear(te_u32 from) {
        auto one = [](te_u32 x) { return (int)(WARP ? __shfl_sync(TE_ALL, x, 0) : x); };
        uint4 x = te_lds16(from);
        begin = one(x.x), end = one(x.y), row = one(x.z), head = one(x.w);
        x = te_lds16(from + 16);
        batch = one(x.x), s_q = one(x.y), s_kv = one(x.z), lo = one(x.w);
        x = te_lds16(from + 32);
        hi = one(x.x), q_at = one(x.y), q_end = one(x.z), hidden_from = one(x.w);
        x = te_lds16(from + 48);
        hidden_to = one(x.x), tail = one(x.y) != 0, kv_at = one(x.w);
        return one(x.z) != 0;
    }
};

// Block n of BK keys of a head of K and V, and the tiles m_begin .. m_end - 1 of BQ queries that see any of these keys.
//
// Blocks are numbered group by group, and a group is order.together heads. Within a group, the blocks of all heads at
// the same n have neighbouring numbers. The first keys come first: a causal mask gives them the most work. Groups take
// the heads of keys in the order of te_attn_tile.
template <int BK, int BQ, bool BY_HEAD = false> struct te_attn_keys {
    int n, head, batch; // head: a head of keys
    int s_q, s_kv, lo, hi, q_at, kv_at, kv_end;
    int m_begin, m_end;
    TE_DEV te_attn_keys(const te__attn_kargs &a, const te__attn_order &order, te_u32 number) {
        const te_u32 heads = (te_u32)a.groups * (te_u32)a.batch, section = (te_u32)order.together * (te_u32)order.rows;
        const te_u32 s = number / section, r = number - s * section,
                     width = min((te_u32)order.together, heads - s * order.together), row = r / width;
        const te_u32 at = s * order.together + r - row * width;
        const te_u32 of_each = (te_u32)(BY_HEAD ? a.batch : a.groups), slow = at / of_each, fast = at - slow * of_each;
        batch = (int)(BY_HEAD ? fast : slow);
        head = (int)(BY_HEAD ? slow : fast);
        n = (int)row;
        const te__attn_seq seq = te__attn_seq_of(&a, batch);
        s_q = seq.s_q, s_kv = seq.s_kv, lo = seq.lo, hi = seq.hi, kv_end = seq.kv_end;
        q_at = (int)seq.q_at, kv_at = (int)seq.kv_at;
        m_begin = max(0, n * BK - hi) / BQ;
        m_end = n * BK < s_kv ? (max(0, min(s_q, (n + 1) * BK - lo)) + BQ - 1) / BQ : 0;
    }
    TE_DEV int tiles() const { return max(0, m_end - m_begin); }
    // Returns true if tile m has a query that does not see all keys of the block, or has rows beyond the sequence.
    TE_DEV bool hides(int m) const {
        return (n + 1) * BK > min(s_kv, m * BQ + hi + 1) || n * BK < m * BQ + BQ - 1 + lo || m * BQ + BQ > s_q;
    }
};
// Goes through the tiles of a te_attn_keys, from the last to the first: each tile once for each query head of the
// group.
struct te_attn_queries {
    int first, heads, m, head, left;
    template <class KEYS> TE_DEV te_attn_queries(const te__attn_kargs &a, const KEYS &t) {
        heads = a.heads / a.groups, first = t.head * heads, head = first;
        m = t.m_end - 1, left = heads * t.tiles();
    }
    TE_DEV void next() {
        left--;
        if (++head == first + heads) head = first, m--;
    }
};
// As te_attn_queries, but leaves out tiles that a block mask leaves empty. With a block mask all 32 threads of the warp
// must call next().
template <int BK, int BQ> struct te_attn_tiles : te_attn_queries {
    bool full; // true: the current tile is TE_ATTN_BLOCK_FULL, so the user's mask hides nothing in it
    template <class KEYS>
    TE_DEV te_attn_tiles(const te__attn_kargs &a, const KEYS &t) : te_attn_queries(a, t), full(false) {
        if (BLOCKS) head--, left++, next(a, t);
    }
    template <class KEYS> TE_DEV void next(const te__attn_kargs &a, const KEYS &t) {
        if (!BLOCKS) {
            te_attn_queries::next();
            return;
        }
        const int lane = threadIdx.x & 31;
        for (int at = (t.m_end - 1 - m) * heads + head - first + 1; --left > 0; at += 32, left -= 31) {
            const int row = (at + lane) / heads, h = first + at + lane - row * heads;
            const int kind = lane < left
                                 ? te_blocks_of(a, t.batch, h, (t.m_end - 1 - row) * BQ)[t.n * BK / TE_ATTN_BLOCK_SIZE]
                                 : TE_ATTN_BLOCK_EMPTY;
            const te_u32 seen = __ballot_sync(TE_ALL, kind != TE_ATTN_BLOCK_EMPTY);
            if (!seen) continue;
            const int found = __ffs(seen) - 1;
            full = __shfl_sync(TE_ALL, kind, found) == TE_ATTN_BLOCK_FULL;
            m = t.m_end - 1 - __shfl_sync(TE_ALL, row, found), head = __shfl_sync(TE_ALL, h, found), left -= found;
            return;
        }
    }
};
// Returns true if this thread of a producer's warp issues loads. Without a block mask only one thread of the warp calls
// this function.
TE_DEV bool te_leads() { return !BLOCKS || threadIdx.x % 32 == 0; }

// A sequence's first query has the same index in lse2 and in delta. Returns this index for one head. It is work_at +
// head * work_head of te__attn_seq.
TE_DEV te_i64 te_attn_work(const te__attn_kargs &a, int batch, int head, int q_at) {
    if (a.x.packed_q)
        return (q_at + 3) / 4 * 4 + (te_i64)batch * (TE__ATTN_PAD + 4) + head * te__attn_packed_rows(a.x.t_q, a.batch);
    return ((te_i64)batch * a.heads + head) * a.s_pad;
}

// Writes -inf to the elements of row `half` (0: upper, 1: lower) left of column `from` or right of column `to`. Both
// columns are relative to the thread's first column.
template <int N> TE_DEV void te_hide_outside(float (&s)[N], int half, int from, int to) {
#pragma unroll
    for (int j = 0; j < N / 4; j++)
#pragma unroll
        for (int e = 0; e < 2; e++)
            if (8 * j + e < from || 8 * j + e > to) s[4 * j + 2 * half + e] = -TE_INF;
}

// Sets rows `from` .. 63 of a tile to 0: memory beyond a sequence may have NaN, and 0 times NaN is NaN. The whole
// warpgroup must call this function.
template <int PANELS> TE_DEV void te_clear_rows64(te_u32 tile, int from) {
    for (int i = (threadIdx.x & 127) + 8 * from; i < 8 * 64; i += 128)
        for (int panel = 0; panel < PANELS; panel++) te_sts16(tile + panel * 8192 + 16 * i, make_uint4(0, 0, 0, 0));
}

// Stores 64 rows of a gradient from a warpgroup's accumulators, through shared memory at `from`. A thread's upper row
// is multiplied by `by[0]`, its lower row by `by[1]`. A factor of 0 turns even NaN into 0. The first row goes to row
// `row` of the view. A packed tensor gets the first `rows` rows only. `named` is a named barrier.
template <int N>
TE_DEV void te_store_gradient(const float (&d)[N], const float (&by)[2], te_u32 from, const void *map,
                              const te__attn_view &view, bool packed, int d_of_head, te_i64 row, int rows, int head,
                              int batch, int named) {
    const int thread = threadIdx.x & 127, lane = threadIdx.x & 31;
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
        te_u32 r[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
            r[i] = by[i & 1] == 0.0f ? 0u : te_pack16(d[8 * j + 2 * i] * by[i & 1], d[8 * j + 2 * i + 1] * by[i & 1]);
        const int piece = 2 * j + (lane >> 4);
        te_stmatrix4(from + (piece >> 3) * 8192 + te_swizzled(16 * (thread >> 5) + (lane & 15), piece & 7), r);
    }
    te_async_fence();
    te_meet<128>(named);
    if (!packed || rows >= 64) {
        if (thread == 0) {
            for (int i = 0; i < N / 32; i++) te_tma_store4(map, from + i * 8192, 64 * i, (int)row, head, batch);
            te_bulk_commit();
            te_bulk_wait_read<0>(); // shared memory must outlive the store
        }
        return;
    }
    const int pieces = d_of_head / 8;
    char *to = (char *)view.p + 2 * (head * view.h + row * view.s);
    for (int i = thread; i < rows * pieces; i += 128) {
        const int r = i / pieces, piece = i - r * pieces;
        *(uint4 *)(to + 2 * r * view.s + 16 * piece) = te_lds16(from + (piece >> 3) * 8192 + te_swizzled(r, piece & 7));
    }
}
