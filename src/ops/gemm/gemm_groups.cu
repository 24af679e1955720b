// ops/gemm/gemm_groups.cu: before gemm_hopper by groups: sizes, which only the device knows, to where each group lies, which tiles it has, and
// tensor maps that end where it ends: TMA reads zeros beyond, and writes nothing there, and tiles need no special case.
//
// Launch: grid (1, 1, 1), block 32: a lane does groups lane, lane + 32, ...
// te:arch 90a
#include "device/hopper.cuh"
#include "ops/gemm/groups.cuh"

extern "C" __global__ void __launch_bounds__(32) te_gemm_groups(const __grid_constant__ te__gemm_groups_kargs a) {
    te_follow();
    te_i64 before = 0, tiles_before = 0;
    if (threadIdx.x == 0) a.rows[a.groups.count].begin = 0; // how many numbers have been drawn
    for (te_u32 first = 0; first < (te_u32)a.groups.count; first += 32) {
        te_u32 g = first + threadIdx.x;
        te_i64 begin, end;
        te_group_range(a.groups, g, a.total, before, begin, end);
        te_i64 tiles = a.groups.along_k ? (a.skip_empty && begin == end ? 0 : a.per_row) : (end - begin + a.bm - 1) / a.bm * a.per_row;
        if (g >= (te_u32)a.groups.count) tiles = 0;
        te_i64 tiles_end = tiles_before + te_warp_scan(tiles);
        if (g < (te_u32)a.groups.count) {
            te__gemm_group_row row = {(int)begin, (int)end, (te_u32)(tiles_end - tiles), (te_u32)tiles_end};
            a.rows[g] = row;
#pragma unroll
            for (int i = 0; i < 2; i++) {
                if (a.dim[i] < 0) continue;
                te_u64 *map = a.maps + (g * 2 + i) * 16;
#pragma unroll
                for (int w = 0; w < 16; w++) map[w] = a.map[i][w];
                int size = end > 0 ? (int)end : 1; // of an empty group at the very start, whose first row is never used
                if (a.dim[i]) te_tma_map_end<1>(map, size);
                else te_tma_map_end<0>(map, size);
            }
        }
        before = __shfl_sync(0xffffffffu, end, 31);
        tiles_before = __shfl_sync(0xffffffffu, tiles_end, 31);
    }
    te_tma_map_release();
}
