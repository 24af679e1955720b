// ops/loss/mse_fwd.cu: computes partial sums of (x - target)^2.
//
//   block b of B sums elements b * 2048 .. b * 2048 + 2047, then those B * 2048 further on, and so on; B depends on the
//   count alone
//
// Benchmark: "mean squared error forward" in tests/bench/h200.csv.
//
// Launch: block of 256 threads, grid `parts`. If the kernel is compiled with options, count is a multiple of 8, and x
// and target are aligned to 16 bytes.
//
// te:baseline
// te:row X_DT=3 T_DT=3
// te:row X_DT=1 T_DT=1
// te:row X_DT=3 T_DT=1
#include "device/vector.cuh"
#include "ops/loss/kargs.h"

extern "C" __global__ void __launch_bounds__(256) te_mse_fwd(const __grid_constant__ te__mse_kargs a) {
    te_follow();
    __shared__ float scratch[32];
    float sum = 0.0f;
    te_i64 stride = (te_i64)gridDim.x * 2048;
#ifdef X_DT
#pragma unroll 2
    for (te_i64 i = ((te_i64)blockIdx.x * 256 + threadIdx.x) * 8; i < a.count; i += stride) {
        float x[8], t[8];
        te_load8(a.x, i, X_DT, x);
        te_load8(a.target, i, T_DT, t);
#pragma unroll
        for (int j = 0; j < 8; j++) x[j] = (x[j] - t[j]) * (x[j] - t[j]);
        sum += ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]));
    }
#else
    for (te_i64 first = (te_i64)blockIdx.x * 2048 + threadIdx.x; first < a.count; first += stride)
        for (te_i64 i = first; i < first + 2048 && i < a.count; i += 256) {
            float d = te_load(a.x, i, a.x_dt) - te_load(a.target, i, a.target_dt);
            sum += d * d;
        }
#endif
    sum = te_block_sum(sum, scratch);
    if (threadIdx.x == 0) a.partial[blockIdx.x] = sum;
}
