// ops/gemm/gemm_naive.cu: D = epilogue(scale_a scale_b op(A) op(B) + bias) + D in plain f32 FMAs: every format, layout, size and alignment.
// The oracle of the tensor-core kernels, and the fallback where those cannot run.
// naive.cuh has the tile.
//
// Launch: grid (tiles, 1, 1), one block a tile; block 256; no dynamic shared memory; no alignment.
//
// te:baseline
#include "ops/gemm/naive.cuh"

extern "C" __global__ void __launch_bounds__(256) te_gemm_naive(const __grid_constant__ te__gemm_kargs a) {
    te_follow();
    te_naive_tile(a, blockIdx.x);
}
