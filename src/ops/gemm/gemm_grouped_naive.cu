// ops/gemm/gemm_grouped_naive.cu: te_grouped_gemm in plain f32 FMAs: every format, layout, size and alignment, either kind of groups.
// The oracle of the tensor-core kernels, and the fallback where those cannot run. naive.cuh has the tile, groups.cuh the groups.
//
// Launch: grid (tiles, 1, 1), one block a tile; along rows at least as many as there can be, along k exactly; block 256; no dynamic shared
// memory; no alignment.
//
// te:baseline
#include "ops/gemm/groups.cuh"
#include "ops/gemm/naive.cuh"

extern "C" __global__ void __launch_bounds__(256, 1) te_gemm_grouped_naive(const __grid_constant__ te__gemm_grouped_kargs a) {
    te_follow();
    te__gemm_kargs g;
    te_u32 tile;
    if (te_group_open(a, TILE, TILE, blockIdx.x, g, tile)) te_naive_tile(g, tile);
}
