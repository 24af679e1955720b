// ops/gemm/groups.cuh: device functions for grouped GEMMs. These functions find the group and the tile of a thread
// block from the sizes of the groups in device memory. Every warp repeats this search.
#pragma once
#include "ops/gemm/epilogue.cuh"

// Returns the sum of v over this lane and all lanes with smaller numbers.
TE_DEV te_i64 te_warp_scan(te_i64 v) {
    int lane = threadIdx.x & 31;
#pragma unroll
    for (int d = 1; d < 32; d <<= 1) {
        te_i64 below = __shfl_up_sync(0xffffffffu, v, d);
        if (lane >= d) v += below;
    }
    return v;
}
TE_DEV te_i64 te_clamp(te_i64 v, te_i64 low, te_i64 high) { return v < low ? low : v > high ? high : v; }

// Goes through the groups in order, 32 groups at a time: each lane has one group. Tiles are counted through all groups.
// All 32 lanes must call next().
struct te_group_scan {
    te_i64 before, tiles_before; // where the next 32 groups start
    te_i64 begin, end;           // rows, or values of k, of the lane's group
    te_i64 tiles_begin, tiles_end;
    TE_DEV te_group_scan() : before(0), tiles_before(0) {}
    // Moves this lane on to group g. No group ends beyond `total`. Groups behind the last one are empty.
    //
    // Groups of rows: each `bm` rows have per_row tiles. Groups along k: a group has per_row tiles, but an empty one
    // has none if skip_empty.
    TE_DEV void next(const te__gemm_grouping &s, te_u32 g, te_i64 total, int bm, te_u32 per_row, bool skip_empty) {
        bool there = g < (te_u32)s.count;
        if (s.offsets) {
            begin = te_clamp(te_load_index(s.sizes, there ? g : s.count, s.dt), 0, total);
            end = te_clamp(te_load_index(s.sizes, there ? g + 1 : s.count, s.dt), begin, total);
        } else {
            te_i64 size = there ? te_clamp(te_load_index(s.sizes, g, s.dt), 0, total) : 0,
                   sum = before + te_warp_scan(size);
            begin = te_clamp(sum - size, 0, total);
            end = te_clamp(sum, 0, total);
        }
        te_i64 tiles = !there      ? 0
                       : s.along_k ? (skip_empty && begin == end ? 0 : per_row)
                                   : (end - begin + bm - 1) / bm * per_row;
        tiles_end = tiles_before + te_warp_scan(tiles);
        tiles_begin = tiles_end - tiles;
        before = __shfl_sync(0xffffffffu, end, 31);
        tiles_before = __shfl_sync(0xffffffffu, tiles_end, 31);
    }
};

TE_DEV int te_gemm_size(int dt) { return dt == TE_F32 ? 4 : dt == TE_F16 || dt == TE_BF16 ? 2 : 1; }
TE_DEV const void *te_gemm_at(const void *p, te_i64 element, int dt) {
    return (const char *)p + element * te_gemm_size(dt);
}

// Returns the arguments of one group's product. `begin` and `size` count rows, or values of k.
TE_DEV te__gemm_kargs te_group_product(const te__gemm_kargs &a, te_u32 group, te_i64 begin, te_i64 size) {
    te__gemm_kargs g = a;
    if (a.groups.along_k) {
        g.a = te_gemm_at(g.a, begin * (g.a_t ? g.lda : 1), g.a_dt);
        g.b = te_gemm_at(g.b, begin * (g.b_t ? 1 : g.ldb), g.b_dt);
        g.d = (void *)te_gemm_at(g.d, group * a.groups.b_elements, g.d_dt);
#if !defined(BLOCK) || BLOCK == 1 // BLOCK: gemm_mma's option. Groups along k have only block scales of kind 1
        g.block_a += (begin >> 7) * g.ld_block_a; // groups begin with a block
        g.block_b += (begin >> 7) * g.ld_block_b;
#endif
        g.k = size;
    } else {
        g.a = te_gemm_at(g.a, begin * g.lda, g.a_dt);
        g.b = te_gemm_at(g.b, group * a.groups.b_elements, g.b_dt);
        g.d = (void *)te_gemm_at(g.d, begin * g.ldd, g.d_dt);
        if (g.aux) g.aux = (void *)te_gemm_at(g.aux, begin * g.ldaux, g.d_dt);
        if (g.bias) g.bias = te_gemm_at(g.bias, group * g.n, g.bias_dt);
        g.block_a += begin; // 1-D: scales of lines are neighbours
        g.block_b += group * a.groups.block_b;
        g.m = size;
    }
    if (a.groups.each_a) g.scale_a += group;
    if (a.groups.each_b) g.scale_b += group;
    return g;
}

// Finds the group of a tile. `tile` counts through all groups on entry, and within its group on return. Returns false
// if there is no such tile.
TE_DEV bool te_group_open(const te__gemm_kargs &a, int bm, int bn, te_u32 &tile, te__gemm_kargs &g) {
    te_u32 per_row = (te_u32)te_div_up(a.n, bn) * (a.groups.along_k ? (te_u32)te_div_up(a.m, bm) : 1);
    te_group_scan at;
    for (te_u32 first = 0; first < (te_u32)a.groups.count; first += 32) {
        at.next(a.groups, first + (threadIdx.x & 31), a.groups.along_k ? a.k : a.m, bm, per_row, a.accumulate);
        te_u32 found = __ballot_sync(0xffffffffu, tile < at.tiles_end);
        if (!found) continue;
        int lane = __ffs((int)found) - 1;
        te_i64 begin = __shfl_sync(0xffffffffu, at.begin, lane), end = __shfl_sync(0xffffffffu, at.end, lane);
        tile -= (te_u32)__shfl_sync(0xffffffffu, at.tiles_begin, lane);
        g = te_group_product(a, first + lane, begin, end - begin);
        return true;
    }
    return false;
}
