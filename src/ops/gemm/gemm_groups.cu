// ops/gemm/gemm_groups.cu: prepares a grouped GEMM for gemm_hopper, from the sizes of the groups in device memory. It
// computes where each group lies and which tiles it has. It also makes tensor maps that end where a group ends. Beyond
// this end TMA reads zeros and writes nothing.
//
// Launch: grid (1, 1, 1), block 32. Each lane handles the groups lane, lane + 32, ...
// te:arch 90a
#include "device/hopper.cuh"
#include "ops/gemm/groups.cuh"

extern "C" __global__ void __launch_bounds__(32) te_gemm_groups(const __grid_constant__ te__gemm_groups_kargs a) {
    te_follow();
    te_group_scan at;
    if (threadIdx.x == 0) a.rows[a.groups.count].begin = 0; // the counter from which gemm_hopper's blocks draw tile
                                                            // numbers
    for (te_u32 first = 0; first < (te_u32)a.groups.count; first += 32) {
        te_u32 g = first + threadIdx.x;
        at.next(a.groups, g, a.total, a.bm, a.per_row, a.skip_empty);
        if (g < (te_u32)a.groups.count) {
            te__gemm_group_row row = {(int)at.begin, (int)at.end, (te_u32)at.tiles_begin, (te_u32)at.tiles_end};
            a.rows[g] = row;
#pragma unroll
            for (int i = 0; i < 2; i++) {
                if (a.dim[i] < 0) continue;
                te_u64 *map = a.maps + (g * 2 + i) * 16;
#pragma unroll
                for (int w = 0; w < 16; w++) map[w] = a.map[i][w];
                // a map ends at the end of the group, but cannot have size 0: an empty group at the start gets size 1
                int size = at.end > 0 ? (int)at.end : 1;
                if (a.dim[i]) te_tma_map_end<1>(map, size);
                else te_tma_map_end<0>(map, size);
            }
        }
    }
    te_tma_map_release();
}
