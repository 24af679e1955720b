// ops/gemm/gemm_reduce.cu: the end of a split-K product: D = epilogue(scale_a scale_b sum_s partial[s] + bias) + D.
//
// `partial` is f32 [splits, m, n rounded up to a multiple of 8]. The sum runs over s in ascending order, so the bits
// are the same each time.
//
// Launch: block 256, any one-dimensional grid. Any alignment is allowed.
//
// te:arch 80
#include "device/base.cuh"
#include "ops/gemm/epilogue.cuh"

extern "C" __global__ void __launch_bounds__(256) te_gemm_reduce(const __grid_constant__ te__gemm_kargs a) {
    te_follow();
    te_u32 per_row = (te_u32)te_div_up(a.n, 8), all = (te_u32)a.m * per_row; // 32 bits suffice: D is small where k is
                                                                             // split
    float scale = te_gemm_scale(a);
    for (te_u32 at = blockIdx.x * 256 + threadIdx.x; at < all; at += gridDim.x * 256) {
        te_i64 row = at / per_row, col = (te_i64)(at - (te_u32)row * per_row) * 8;
        const float *p = a.partial + (te_i64)at * 8; // rows are padded to pieces of eight, with any content
        float v[8] = {}, bias[8];
#pragma unroll 4
        for (int s = 0; s < a.splits; s++, p += (te_i64)all * 8) {
            float4 u = *(const float4 *)p, w = *(const float4 *)(p + 4);
            v[0] += u.x, v[1] += u.y, v[2] += u.z, v[3] += u.w, v[4] += w.x, v[5] += w.y, v[6] += w.z, v[7] += w.w;
        }
        if (!a.vector || col + 8 > a.n) {
#pragma unroll 1
            // always uses v[0], because with a variable index the compiler would put v into memory
            for (int i = 0; i < 8 && col + i < a.n; i++) {
                te_gemm_finish(a, scale, row, col + i, v[0]);
#pragma unroll
                for (int k = 0; k < 7; k++) v[k] = v[k + 1];
            }
            continue;
        }
        te_gemm_bias<8>(a, col, bias);
        te_gemm_finish<8>(a, scale, bias, te_gemm_row(a, row), col, v);
    }
}
