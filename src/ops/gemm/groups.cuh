// ops/gemm/groups.cuh: products by groups: which group and tile a block has, from sizes that lie in device memory, and one group's product as
// the arguments of an ordinary one. Every warp computes them by itself: the sizes of 32 groups are added up in five steps.
#pragma once
#include "ops/gemm/epilogue.cuh"

struct te_group {
    te_i64 begin, end; // rows, or values of k
    te_u32 index;
    te_u32 tile; // of this group's, counted from 0
};

// Sums over the lanes up to this one.
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

// Group `g`, one for each lane, 32 in a row; before: where the first of them starts. Groups end at `total` at the latest; those beyond the last
// are empty. The whole warp calls.
TE_DEV void te_group_range(const te__gemm_grouping &s, te_u32 g, te_i64 total, te_i64 before, te_i64 &begin, te_i64 &end) {
    bool there = g < (te_u32)s.count;
    if (s.offsets) {
        begin = te_clamp(te_load_index(s.sizes, there ? g : s.count, s.dt), 0, total);
        end = te_clamp(te_load_index(s.sizes, there ? g + 1 : s.count, s.dt), begin, total);
    } else {
        te_i64 size = there ? te_clamp(te_load_index(s.sizes, g, s.dt), 0, total) : 0, sum = before + te_warp_scan(size);
        begin = te_clamp(sum - size, 0, total);
        end = te_clamp(sum, 0, total);
    }
}

// Along rows: the group that has tile `tile`, when a group of m rows has ceil(m / bm) times `columns` tiles. False: there are fewer.
TE_DEV bool te_group_of_tile(const te__gemm_grouping &s, te_i64 total, int bm, te_u32 columns, te_u32 tile, te_group &out) {
    te_i64 before = 0, tiles_before = 0;
    for (te_u32 first = 0; first < (te_u32)s.count; first += 32) {
        te_i64 begin, end;
        te_group_range(s, first + (threadIdx.x & 31), total, before, begin, end);
        te_i64 tiles = (end - begin + bm - 1) / bm * columns, tiles_end = tiles_before + te_warp_scan(tiles);
        te_u32 found = __ballot_sync(0xffffffffu, tile < tiles_end);
        if (found) {
            int lane = __ffs((int)found) - 1;
            out.begin = __shfl_sync(0xffffffffu, begin, lane);
            out.end = __shfl_sync(0xffffffffu, end, lane);
            out.index = first + lane;
            out.tile = tile - (te_u32)__shfl_sync(0xffffffffu, tiles_end - tiles, lane);
            return true;
        }
        before = __shfl_sync(0xffffffffu, end, 31);
        tiles_before = __shfl_sync(0xffffffffu, tiles_end, 31);
    }
    return false;
}

// Along k: the group that has tile `tile` when each has `tiles`.
TE_DEV void te_group_along_k(const te__gemm_grouping &s, te_i64 total, te_u32 tiles, te_u32 tile, te_group &out) {
    te_i64 before = 0, begin = 0, end = 0;
    out.index = tile / tiles;
    out.tile = tile - out.index * tiles;
    for (te_u32 first = 0; first <= out.index; first += 32) {
        te_group_range(s, first + (threadIdx.x & 31), total, before, begin, end);
        before = __shfl_sync(0xffffffffu, end, 31);
    }
    out.begin = __shfl_sync(0xffffffffu, begin, out.index & 31);
    out.end = __shfl_sync(0xffffffffu, end, out.index & 31);
}

TE_DEV int te_gemm_size(int dt) { return dt == TE_F32 ? 4 : dt == TE_F16 || dt == TE_BF16 ? 2 : 1; }
TE_DEV const void *te_gemm_at(const void *p, te_i64 element, int dt) { return (const char *)p + element * te_gemm_size(dt); }

// The product of one group.
TE_DEV te__gemm_kargs te_group_product(const te__gemm_grouped_kargs &a, const te_group &group) {
    te__gemm_kargs g = a.g;
    te_i64 size = group.end - group.begin;
    if (a.groups.along_k) {
        g.a = te_gemm_at(g.a, group.begin * (g.a_t ? g.lda : 1), g.a_dt);
        g.b = te_gemm_at(g.b, group.begin * (g.b_t ? 1 : g.ldb), g.b_dt);
        g.d = (void *)te_gemm_at(g.d, group.index * a.groups.b_elements, g.d_dt);
        g.k = size;
    } else {
        g.a = te_gemm_at(g.a, group.begin * g.lda, g.a_dt);
        g.b = te_gemm_at(g.b, group.index * a.groups.b_elements, g.b_dt);
        g.d = (void *)te_gemm_at(g.d, group.begin * g.ldd, g.d_dt);
        if (g.aux) g.aux = (void *)te_gemm_at(g.aux, group.begin * g.ldaux, g.d_dt);
        if (g.bias) g.bias = te_gemm_at(g.bias, group.index * g.n, g.bias_dt);
        g.block_a += group.begin; // 1-D: lines are neighbours
        g.block_b += group.index * a.groups.block_b;
        g.m = size;
    }
    if (a.groups.each_a) g.scale_a += group.index;
    if (a.groups.each_b) g.scale_b += group.index;
    return g;
}

// The work of the block with tile `tile` of all, with tiles of bm x bn; false: none, since there are fewer tiles, or nothing to add to D.
TE_DEV bool te_group_open(const te__gemm_grouped_kargs &a, int bm, int bn, te_u32 tile, te__gemm_kargs &g, te_u32 &tile_of_group) {
    te_group group;
    te_u32 columns = (te_u32)te_div_up(a.g.n, bn);
    if (a.groups.along_k) {
        te_group_along_k(a.groups, a.g.k, (te_u32)te_div_up(a.g.m, bm) * columns, tile, group);
        if (a.g.accumulate && group.begin == group.end) return false;
    } else if (!te_group_of_tile(a.groups, a.g.m, bm, columns, tile, group)) {
        return false;
    }
    g = te_group_product(a, group);
    tile_of_group = group.tile;
    return true;
}

// The scale of one group's D.
template <typename T> TE_DEV float te_group_scale(const T &all, te_u32 group) {
    const te__gemm_kargs &g = all.h.g;
    return (g.scale_a ? g.scale_a[all.groups.each_a ? group : 0] : 1.0f) * (g.scale_b ? g.scale_b[all.groups.each_b ? group : 0] : 1.0f);
}
