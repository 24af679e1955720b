// ops/moe/loop.cuh: says how loops are compiled, and how single numbers are read and written.
//
// In embedded PTX (TE_SMALL) loops are not unrolled, and numbers are read and written by function calls.
#pragma once
#include "device/outside.cuh"
#include "ops/moe/kargs.h"
#ifdef TE_SMALL
#define TE_LOOP _Pragma("unroll 1")
#else
#define TE_LOOP
#endif

// te_get reads one number, and te_put writes one: f32, f16 or bf16. te_get can also read i32 and i64.
#ifdef TE_SMALL
static __device__ __noinline__ float te_get(const void *p, te_i64 i, int dt) {
    if (dt == TE_F32) return ((const float *)p)[i];
    if (dt == TE_BF16) return te_bf16_to_f32(((const te_u16 *)p)[i]);
    if (dt == TE_F16) return te_f16_to_f32(((const te_u16 *)p)[i]);
    return (float)te_load_index(p, i, dt);
}
static __device__ __noinline__ void te_put(void *p, te_i64 i, int dt, float f) {
    if (dt == TE_F32) ((float *)p)[i] = f;
    else if (dt == TE_BF16) ((te_u16 *)p)[i] = te_f32_to_bf16(f);
    else ((te_u16 *)p)[i] = te_f32_to_f16(f);
}
#else
TE_DEV float te_get(const void *p, te_i64 i, int dt) { return te_load(p, i, dt); }
TE_DEV void te_put(void *p, te_i64 i, int dt, float f) { te_store(p, i, dt, f); }
#endif
