// ops/cast/amax.cu: computes amax = max |x|. NaN is ignored, infinity is kept. Each block writes its maximum to
// partial[block]. The block that ends last reduces them to amax.
//
//   x   | head | vector 0 | vector 1 | ...                                       | tail |
//              |<- block 0: 2048 vectors of 16 bytes ->|<- block 1 ->| ... |<- block 0 again ...
//
// Vectors are aligned. Block 0 also reads the head and the tail, element by element.
//
// Benchmark: "amax" in tests/bench/h200.csv.
//
// Launch: block 512; at most as many blocks as run at the same time. One short block for each 2048 vectors would be
// slower, because each block ends with a reduction and an atomic count. Any alignment of at least one element is
// allowed.
//
// te:baseline
// te:row X_DT=3
// te:row X_DT=2
// te:row X_DT=1
#include "device/base.cuh"
#include "ops/cast/kargs.h"
#ifndef X_DT
#define X_DT a.x_dt
#endif

// Returns the maximum of `most` and |w|: one f32, or two bf16 or f16. If one operand is NaN, the instruction returns
// the other one.
TE_DEV te_u32 te_amax_word(te_u32 w, int dt, te_u32 most) {
    te_u32 magnitude = w & (dt == TE_F32 ? 0x7fffffffu : 0x7fff7fffu), r;
    if (dt == TE_F32) return (te_u32)__float_as_int(fmaxf(__int_as_float((int)most), __int_as_float((int)magnitude)));
    if (dt == TE_BF16) asm("max.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(most), "r"(magnitude));
    else asm("max.f16x2 %0, %1, %2;" : "=r"(r) : "r"(most), "r"(magnitude));
    return r;
}

TE_DEV te_u32 te_amax_vector(uint4 u, int dt, te_u32 most) {
    return te_amax_word(u.w, dt, te_amax_word(u.z, dt, te_amax_word(u.y, dt, te_amax_word(u.x, dt, most))));
}

extern "C" __global__ void __launch_bounds__(512) te_amax(const __grid_constant__ te__amax_kargs a) {
    te_follow();
    __shared__ float scratch[32];
    const int size = X_DT == TE_F32 ? 4 : 2;
    const uint4 *body = (const uint4 *)((const te_u8 *)a.x + a.head * size);
    te_u32 most = 0;
    if (a.noop && *a.noop == 1.0f) return;
    te_i64 i = (te_i64)blockIdx.x * 2048 + threadIdx.x;
#pragma unroll 1
    for (; i + 3 * 512 < a.vectors; i += (te_i64)gridDim.x * 2048) {
        uint4 u[4];
#pragma unroll
        for (int r = 0; r < 4; r++) u[r] = body[i + r * 512];
#pragma unroll
        for (int r = 0; r < 4; r++) most = te_amax_vector(u[r], X_DT, most);
    }
#pragma unroll
    for (int r = 0; r < 3; r++)
        if (i + r * 512 < a.vectors) most = te_amax_vector(body[i + r * 512], X_DT, most);
    float largest = X_DT == TE_F32 ? __int_as_float((int)most)
                    : X_DT == TE_BF16 ? fmaxf(te_bf16_to_f32((te_u16)most), te_bf16_to_f32((te_u16)(most >> 16)))
                                      : fmaxf(te_f16_to_f32((te_u16)most), te_f16_to_f32((te_u16)(most >> 16)));
    te_i64 inside = a.vectors * (16 / size);
    if (blockIdx.x == 0 && threadIdx.x < a.n - inside) // head and tail: fewer than 16 elements
        largest = fmaxf(largest, fabsf(te_load(a.x, threadIdx.x < a.head ? threadIdx.x : inside + threadIdx.x, X_DT)));
    largest = te_block_max(largest, scratch);
    if (threadIdx.x == 0) a.partial[blockIdx.x] = largest;
    if (!te_last_block(a.counter)) return;
    largest = 0.0f;
    for (int b = threadIdx.x; b < gridDim.x; b += 512) largest = fmaxf(largest, __ldcg(a.partial + b));
    largest = te_block_max(largest, scratch);
    if (threadIdx.x == 0 && (!a.keep || largest > *a.amax)) *a.amax = largest;
}
