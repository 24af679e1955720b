// ops/attn/sparse_hopper.cuh: sparse attention by wgmma: how a block's producer gathers keys.
//
// A block computes 64 heads of one query at a time. It goes through the query's list of keys, 64 entries at a time.
// Tiles are panels of 64 channels (hopper.cuh). Tiles of entries that all are no keys are left out.
//
// The first warpgroup is the producer. It gathers rows of keys by cp.async, since TMA cannot gather. Two warpgroups
// multiply.
//
// Options: X_DT (hopper.cuh).
#pragma once
#include "ops/attn/hopper.cuh"
#include "ops/attn/sparse_tiles.cuh"

enum { SPARSE_PANELS = TE__SPARSE_D / 64, SPARSE_PANEL = TE__SPARSE_TILE_ROWS * 128 };

// A mbarrier arrival of this thread that happens when all its cp.async copies so far have arrived.
TE_DEV void te_mbar_arrive_copied(te_u32 bar) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(bar) : "memory");
}

// Copies a row to row r of a tile, by one warp; zeros if it is not there.
TE_DEV void te_sparse_copy(te_u32 tile, int r, const char *from, bool there) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int i = 0; i < SPARSE_PANELS / 4; i++)
        te_cp_async16(tile + (4 * i + (lane >> 3)) * SPARSE_PANEL + te_swizzled(r, lane & 7),
                      from + 512 * i + 16 * lane, there ? 16 : 0);
}
// Copies the heads of a query by the producer's four warps.
TE_DEV void te_sparse_copy_heads(te_u32 tile, const te__attn_view &x, const te_sparse_item &at, int heads) {
    const char *from = (const char *)x.p + 2 * te_attn_at(x, at.b, at.first, at.i);
#pragma unroll 1
    for (int r = threadIdx.x >> 5; r < TE__SPARSE_TILE_ROWS; r += 4) {
        const bool there = at.first + r < heads;
        te_sparse_copy(tile, r, from + (there ? 2 * r * x.h : 0), there);
    }
}

// Brings the heads of a query into the L2 cache.
TE_DEV void te_sparse_prefetch_heads(const te__attn_view &x, const te_sparse_item &at, int heads) {
    const char *from = (const char *)x.p + 2 * te_attn_at(x, at.b, at.first, at.i) + 128 * (threadIdx.x & 7);
#pragma unroll 1
    for (int r = threadIdx.x >> 3; r < TE__SPARSE_TILE_ROWS && at.first + r < heads; r += 16)
        asm volatile("prefetch.global.L2 [%0];" ::"l"(from + 2 * r * x.h));
}

// 64 entries of a list, from entry k on. A lane has the keys of entries lane and lane + 32, or -1.
struct te_sparse_entries {
    int k, low, high;
    te_u32 mask_low, mask_high; // bit e: entry k + e, or k + 32 + e, is a key
    // Finds the first entries from `from` on that have a key. k is n or more if there are none.
    TE_DEV void find(const te__sparse_attn_kargs &a, const int *list, int from) {
        const int lane = threadIdx.x & 31;
        mask_low = mask_high = 0;
        for (k = from; k < a.n; k += TE__SPARSE_TILE_ROWS) {
            low = te_sparse_key(a, list, k + lane), high = te_sparse_key(a, list, k + 32 + lane);
            mask_low = __ballot_sync(TE_ALL, low >= 0), mask_high = __ballot_sync(TE_ALL, high >= 0);
            if (mask_low | mask_high) return;
        }
        low = high = -1;
    }
};

// The mbarriers and records of a block. Each tile of keys has a record: the mask of its entries (two words), its first
// entry, and whether more tiles of the query follow.
template <int STAGES> struct te_sparse_pipe {
    te_u32 q_full, q_empty, full, empty, records;
    TE_DEV te_sparse_pipe(te_u32 at)
        : q_full(at), q_empty(at + 8), full(at + 16), empty(full + 8 * STAGES), records(at + 16 + 16 * STAGES) {}
    TE_DEV void init() const { // by one thread
        te_mbar_init(q_full, 128);
        te_mbar_init(q_empty, 8); // one lane of each warp that multiplies
        for (int i = 0; i < STAGES; i++) {
            te_mbar_init(full + 8 * i, 129); // the copies of 128 threads, and the record
            te_mbar_init(empty + 8 * i, 8);
        }
        te_mbar_init_done();
    }
};

// The producer: 128 threads. q: where the query's heads go, those of dO behind them. keys: STAGES tiles.
template <int STAGES, bool BACKWARD>
TE_DEV void te_sparse_produce(const te__sparse_attn_kargs &a, const te_sparse_pipe<STAGES> &pipe, te_u32 q,
                              te_u32 keys) {
    const int warp = threadIdx.x >> 5;
    const te_u32 works = te_sparse_item::count(a);
    te_queue<STAGES> to;
    int parity = 1;
#pragma unroll 1
    for (te_u32 work = blockIdx.x; work < works; work += gridDim.x, parity ^= 1) {
        const te_sparse_item at(a, work);
        const int *list = a.indices + ((te_i64)at.b * a.s_q + at.i) * a.n;
        te_sparse_entries now;
        te_mbar_wait(pipe.q_empty, parity);
        te_sparse_copy_heads(q, a.q, at, a.heads);
        if (BACKWARD) te_sparse_copy_heads(q + TE__SPARSE_HOPPER_TILE, a.d_o, at, a.heads);
        te_mbar_arrive_copied(pipe.q_full);
        now.find(a, list, 0);
        if (now.k >= a.n) now.k = 0; // a query without keys has one tile of zeros
        const char *from = (const char *)a.kv.p + 2 * at.b * a.kv.b;
#pragma unroll 1
        for (bool more = true; more; to.next()) {
            te_mbar_wait(pipe.empty + 8 * to.stage, to.parity ^ 1);
#pragma unroll 4
            for (int r = warp; r < TE__SPARSE_TILE_ROWS; r += 4) {
                const int key = __shfl_sync(TE_ALL, r < 32 ? now.low : now.high, r & 31);
                te_sparse_copy(keys + to.stage * TE__SPARSE_HOPPER_TILE, r, from + 2 * max(key, 0) * a.kv.s, key >= 0);
            }
            const te_u32 record = pipe.records + 16 * to.stage;
            if (threadIdx.x == 0) te_sts16(record, make_uint4(now.mask_low, now.mask_high, (te_u32)now.k, 0));
            now.find(a, list, now.k + TE__SPARSE_TILE_ROWS);
            more = now.k < a.n;
            if (threadIdx.x == 0) {
                te_sts4(record + 12, more);
                te_mbar_arrive(pipe.full + 8 * to.stage);
            }
            te_mbar_arrive_copied(pipe.full + 8 * to.stage);
        }
        if (work + gridDim.x < works) {
            const te_sparse_item next(a, work + gridDim.x);
            te_sparse_prefetch_heads(a.q, next, a.heads);
            if (BACKWARD) te_sparse_prefetch_heads(a.d_o, next, a.heads);
            if (BACKWARD) te_sparse_prefetch_heads(a.o, next, a.heads);
        }
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
}

// Waits for the tile of a stage, and makes the producer's copies visible to wgmma.
template <int STAGES> TE_DEV void te_sparse_wait(const te_sparse_pipe<STAGES> &pipe, const te_queue<STAGES> &from) {
    te_mbar_wait(pipe.full + 8 * from.stage, from.parity);
    te_async_fence();
}
