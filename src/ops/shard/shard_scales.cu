// ops/shard/shard_scales.cu: computes the scales of a whole matrix from the amaxes of its tiles. The padding of the
// scale tensors becomes 0.
//
// A thread writes four neighbouring scales. The first row_m * row_n / 4 threads write row_scale, the others col_scale.
// Four one-byte scales are one store if the address is a multiple of 4.
//
// Launch: block 256; (row_m * row_n + col_m * col_n) / 4 threads are needed.
//
// te:baseline
#include "device/base.cuh"
#include "base/scaling.h"
#include "ops/shard/kargs.h"

extern "C" __global__ void __launch_bounds__(256) te_shard_scales(const __grid_constant__ te__shard_scales_kargs a) {
    te_follow();
    te_i64 at = ((te_i64)blockIdx.x * 256 + threadIdx.x) * 4;
    bool columnwise = at >= a.row_m * a.row_n;
    if (columnwise) at -= a.row_m * a.row_n;
    if (columnwise && at >= a.col_m * a.col_n) return;
    te_i64 width = columnwise ? a.col_n : a.row_n, i = at / width, j = at - i * width;
    if (a.scaling == TE_SCALING_BLOCK_2D) {
        te_i64 tiles_n = te_div_up(a.columns, 128), along = columnwise ? te_div_up(a.rows, 128) : tiles_n;
        float *out = (float *)(columnwise ? a.col_scale : a.row_scale),
              *multiplier = columnwise ? nullptr : a.multiplier;
        for (int k = 0; k < 4; k++) {
            float scale = 0.0f, inverse = 0.0f;
            if (j + k < along) {
                scale = te__block_scale(a.amax[columnwise ? (j + k) * tiles_n + i : i * tiles_n + j + k], a.fp8_max,
                                        a.epsilon, a.limit, a.power_of_two);
                inverse = te__rcp_f32(scale);
            }
            if (out) out[at + k] = inverse;
            if (multiplier) multiplier[at + k] = scale;
        }
        return;
    }
    te_u32 codes = 0;
    if (a.scaling == TE_SCALING_MXFP8) {
        const float *amax = columnwise ? a.amax_col : a.amax;
        te_i64 m = columnwise ? te_div_up(a.rows, 32) : a.rows, n = columnwise ? a.columns : te_div_up(a.columns, 32);
        for (int k = 0; k < 4 && i < m && j + k < n; k++)
            codes |= (te_u32)te__mxfp8_exponent(amax[i * n + j + k], a.fp8_max_inverse) << (8 * k);
    } else {
        te_i64 tiles_n = te_div_up(a.columns, 16), across = columnwise ? a.columns : a.rows,
               along = columnwise ? te_div_up(a.rows, 16) : tiles_n;
        float tensor_scale = te__nvfp4_tensor_scale(*a.amax_tensor, a.code_max);
        for (int k = 0; k < 4 && i < across && j + k < along; k++) {
            float amax = a.amax[columnwise ? (j + k) * tiles_n + i / 16 : i / 16 * tiles_n + j + k];
            codes |= (te_u32)te__nvfp4_block_code(amax, tensor_scale) << (8 * k);
        }
    }
    te_u8 *to = (te_u8 *)(columnwise ? a.col_scale : a.row_scale) + at;
    if (((te_u64)to & 3) == 0) {
        *(te_u32 *)to = codes;
    } else {
        for (int k = 0; k < 4; k++) to[k] = (te_u8)(codes >> (8 * k)); // the caller's memory may have any alignment
    }
}
