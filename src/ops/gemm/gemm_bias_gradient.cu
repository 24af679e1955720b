// ops/gemm/gemm_bias_gradient.cu: the sums of D's columns, out of those of 64 rows each that gemm_hopper left.
//
//        32 columns
//      +-----------+
//      |  warp w adds rows w, w + 8, w + 16 ...  then the eight warps are added in order
//      +-----------+
//
// A few hundred rows of sums, just written: bound by how soon it begins and by the L2 cache's answers, so all of a thread's loads are under way at once.
//
// Launch: grid ceil(n / 32), block 256.
// te:row
#include "ops/gemm/epilogue.cuh"

extern "C" __global__ void __launch_bounds__(256) te_gemm_bias_gradient(const __grid_constant__ te__gemm_bias_gradient_kargs a) {
    te_follow();
    __shared__ float part[8][32];
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    te_i64 col = (te_i64)blockIdx.x * 32 + lane;
    float sum = 0.0f;
    if (col < a.n)
        for (te_i64 row = warp; row < a.rows; row += 128) {
            float x[16];
#pragma unroll
            for (int i = 0; i < 16; i++) x[i] = row + 8 * i < a.rows ? a.sums[(row + 8 * i) * a.n + col] : 0.0f;
#pragma unroll
            for (int i = 0; i < 16; i++) sum += x[i];
        }
    part[warp][lane] = sum;
    __syncthreads();
    if (warp || col >= a.n) return;
#pragma unroll
    for (int w = 1; w < 8; w++) sum += part[w][lane];
    te_gemm_store(a.out, col, a.out_dt, sum);
}
