// ops/cast/fp8_dequantize.cu: computes y [m, n] = f32(q) * scale_inv from the codes q [m, ld], and rounds the product
// once, to y's format. With GROUPS each row has the scale of its group, and a row without a group becomes 0.
//
// Benchmark: "dequantize e4m3" in tests/bench/h200.csv.
//
// Launch: block 256. Each block handles 1024 pieces of eight columns. Each thread handles four pieces, 256 apart. Any
// size and any alignment are allowed.
//
// te:baseline
// te:row Q_DT=4 Y_DT=3
// te:row Q_DT=5 Y_DT=3
// te:row Q_DT=4 Y_DT=1
// te:row Q_DT=4 Y_DT=3 GROUPS=1
#include "device/vector.cuh"
#include "ops/cast/kargs.h"
#ifndef Q_DT
#define Q_DT a.q_dt
#define Y_DT a.y_dt
#define GROUPS (a.groups != nullptr)
#elif !defined(GROUPS)
#define GROUPS 0
#endif

// With GROUPS: reads the scale of the row's group. Returns false if the row has no group; such a row becomes 0.
TE_DEV bool te_dequantize_scale(const te__fp8_dequantize_kargs &a, te_i64 row, float &scale_inv) {
    if (!GROUPS) return true;
    int group = a.groups[row];
    bool known = group >= 0 && group < a.count;
    scale_inv = known ? a.scale_inv[group] : 0.0f;
    return known;
}

TE_DEV void te_dequantize8(uint2 code, int dt, float scale_inv, float v[8]) {
    te_fp8x2_to_f32(code.x, dt, v + 0, v + 1);
    te_fp8x2_to_f32(code.x >> 16, dt, v + 2, v + 3);
    te_fp8x2_to_f32(code.y, dt, v + 4, v + 5);
    te_fp8x2_to_f32(code.y >> 16, dt, v + 6, v + 7);
#pragma unroll
    for (int k = 0; k < 8; k++) v[k] = __fmul_rn(v[k], scale_inv);
}

extern "C" __global__ void __launch_bounds__(256)
    te_fp8_dequantize(const __grid_constant__ te__fp8_dequantize_kargs a) {
    te_follow();
    te_i64 per_row = te_div_up(a.n, 8), groups = a.m * per_row, first = (te_i64)blockIdx.x * 1024 + threadIdx.x;
    float scale_inv = GROUPS ? 0.0f : *a.scale_inv, v[8];
    te_i64 row[4], col[4];
    bool whole = a.vector;
#pragma unroll
    for (int r = 0; r < 4; r++) {
        te_i64 g = first + r * 256;
        row[r] = groups >> 31 ? g / per_row : (te_i64)((te_u32)g / (te_u32)per_row);
        col[r] = (g - row[r] * per_row) * 8;
        whole = whole && g < groups && col[r] + 8 <= a.n;
    }
    const te_u8 *q = (const te_u8 *)a.q;
    if (whole) {
        uint2 code[4];
#pragma unroll
        for (int r = 0; r < 4; r++) code[r] = *(const uint2 *)(q + row[r] * a.ld + col[r]);
        TE_UNROLL(4)
        for (int r = 0; r < 4; r++) {
            if (!te_dequantize_scale(a, row[r], scale_inv)) code[r] = make_uint2(0, 0);
            te_dequantize8(code[r], Q_DT, scale_inv, v);
            te_store8(a.y, row[r] * a.n + col[r], Y_DT, v);
        }
    } else {
        TE_UNROLL(4)
        for (int r = 0; r < 4; r++) {
            if (row[r] >= a.m) break;
            bool known = te_dequantize_scale(a, row[r], scale_inv);
            TE_UNROLL(8)
            for (int k = 0; k < 8; k++) {
                if (col[r] + k >= a.n) break;
                te_fp8x2_to_f32(known ? q[row[r] * a.ld + col[r] + k] : 0, Q_DT, v, v + 1);
                te_store(a.y, row[r] * a.n + col[r] + k, Y_DT, __fmul_rn(v[0], scale_inv));
            }
        }
    }
}
