// device/base.cuh: number formats in memory, warp and block reductions, small math functions. This file must not depend
// on any operation.
//
// NVRTC compiles this file without any toolkit header. Conversions use hardware instructions if the GPU has them, and
// otherwise the integer code of base/numbers.h. Both give the same bits.
#pragma once
#include "api/enums.h"
#include "base/numbers.h"
#include "base/philox.h"
#include "base/scaling.h"

typedef unsigned char te_u8;
typedef unsigned short te_u16;
typedef unsigned int te_u32;
typedef unsigned long long te_u64;
typedef long long te_i64;

#define TE_DEV __device__ __forceinline__
// TE_SMALL is defined for the embedded PTX, which is a part of te.h and must be small. It changes three macros:
//   TE_DEV_CALL      The function is called, not inlined. Used for format conversions that are called in many places.
//   TE_UNROLL(n)     The loop is not unrolled.
//   TE_WIDE(vector)  The value is 0: rows are read element by element.
#ifdef TE_SMALL
#define TE_DEV_CALL static __device__ __noinline__
#define TE_UNROLL(n) _Pragma("unroll 1")
#define TE_WIDE(vector) 0
#else
#define TE__PRAGMA(text) _Pragma(#text)
#define TE_DEV_CALL TE_DEV
#define TE_UNROLL(n) TE__PRAGMA(unroll n)
#define TE_WIDE(vector) (vector)
#endif
#define TE_WARP 32
#define TE_FLT_MAX 3.402823466e+38f
#define TE_INF __int_as_float(0x7f800000)

#if __CUDA_ARCH__ >= 890
#define TE_HAS_FP8_CVT 1 // cvt between fp8 and f16/f32
#else
#define TE_HAS_FP8_CVT 0
#endif

// Waits until all earlier kernels in the stream have ended and their writes are visible. A kernel with this call is
// launched early: its blocks may start while earlier kernels still run (programmatic dependent launch).
// Write the call as a statement of its own at the top level of a kernel. Before the call, the kernel must not access
// device memory other than its arguments, with one exception: it may read what the host has found to be settled
// (ops/early.c), if an argument says so. Without that argument such a kernel also calls te_follow at its beginning,
// inside an `if`; the second call then waits for nothing. Before the call a kernel must not write. At least one of its
// blocks must get to the call, since a kernel must not end before those ahead of it.
// Afterwards, a kernel of at most 64 blocks lets the next kernel start. A larger kernel does so only at its end,
// because waiting blocks slow down running ones (tests/bench/notes.md). The next kernel waits for this kernel in its
// own te_follow, so the order stays safe.
TE_DEV void te_follow() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
    if (gridDim.x * gridDim.y * gridDim.z <= 64) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Lets the next kernel of the stream start as soon as all blocks of this one have, as te_follow does in kernels of at
// most 64 blocks. Stands behind te_follow, in kernels that a small one follows, or one whose blocks find equal room on
// all multiprocessors (tests/bench/notes.md). In gemv_joint it stands before te_follow, so that the next kernel starts
// sooner to read its weights. The order stays safe: the next kernel waits until this one has ended, and this one does
// not end before those ahead of it.
TE_DEV void te_lead() {
#if __CUDA_ARCH__ >= 900
    if (gridDim.x * gridDim.y * gridDim.z > 64) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Stays about as long as the blocks of the next kernel need to start, behind te_lead. 3000 cycles are less than two
// microseconds.
TE_DEV void te_linger() {
#if __CUDA_ARCH__ >= 900
    const long long from = clock64();
    while (clock64() - from < 3000) {}
#endif
}

// ---- one element ---------------------------------------------------------------------------------------------------

TE_DEV float te_bf16_to_f32(te_u16 h) { return __int_as_float((int)((te_u32)h << 16)); }
TE_DEV te_u16 te_f32_to_bf16(float f) {
    te_u16 h;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h) : "f"(f));
    return h;
}
TE_DEV float te_f16_to_f32(te_u16 h) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
    return f;
}
TE_DEV te_u16 te_f32_to_f16(float f) {
    te_u16 h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f));
    return h;
}
// Converts two f32 to two numbers of a 16-bit format, with `a` in the low half. Uses one instruction instead of three.
TE_DEV te_u32 te_f32x2_to_half(float a, float b, int dt) {
    te_u32 r;
    if (dt == TE_BF16) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(b), "f"(a));
    else asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(b), "f"(a));
    return r;
}
// Converts two f32 to two FP8 codes, with `a` in the low byte. Saturates large values and infinities, and keeps NaN.
TE_DEV_CALL te_u16 te_f32x2_to_fp8(float a, float b, int dt) {
#if TE_HAS_FP8_CVT
    te_u16 r;
    if (dt == TE_F8E4M3)
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(b), "f"(a));
    else
        asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(r) : "f"(b), "f"(a));
    return r;
#else
    if (dt == TE_F8E4M3) return (te_u16)(te__f32_to_e4m3(a) | te__f32_to_e4m3(b) << 8);
    return (te_u16)(te__f32_to_e5m2(a) | te__f32_to_e5m2(b) << 8);
#endif
}
TE_DEV_CALL float te_fp8_to_f32(te_u8 c, int dt) { return dt == TE_F8E4M3 ? te__e4m3_to_f32(c) : te__e5m2_to_f32(c); }
// Converts two FP8 codes to f32: the low byte to *lo, the high byte to *hi. The conversion through f16 is exact,
// because f16 can hold every FP8 value.
TE_DEV void te_fp8x2_to_f32(te_u32 codes, int dt, float *lo, float *hi) {
#if TE_HAS_FP8_CVT
    te_u32 h;
    if (dt == TE_F8E4M3) asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(h) : "h"((te_u16)codes));
    else asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(h) : "h"((te_u16)codes));
    *lo = te_f16_to_f32((te_u16)h), *hi = te_f16_to_f32((te_u16)(h >> 16));
#else
    *lo = te_fp8_to_f32((te_u8)codes, dt), *hi = te_fp8_to_f32((te_u8)(codes >> 8), dt);
#endif
}

// Returns element i of an array in format dt, as f32. If dt is a compile-time constant, the compiler removes the
// switch.
TE_DEV_CALL float te_load(const void *p, te_i64 i, int dt) {
    switch (dt) {
    case TE_F32: return ((const float *)p)[i];
    case TE_F16: return te_f16_to_f32(((const te_u16 *)p)[i]);
    case TE_BF16: return te_bf16_to_f32(((const te_u16 *)p)[i]);
    case TE_F8E4M3:
    case TE_F8E5M2: return te_fp8_to_f32(((const te_u8 *)p)[i], dt);
    case TE_U8: return (float)((const te_u8 *)p)[i];
    case TE_I32: return (float)((const int *)p)[i];
    case TE_I64: return (float)((const te_i64 *)p)[i];
    default: return 0.0f;
    }
}
TE_DEV_CALL void te_store(void *p, te_i64 i, int dt, float f) {
    switch (dt) {
    case TE_F32: ((float *)p)[i] = f; break;
    case TE_F16: ((te_u16 *)p)[i] = te_f32_to_f16(f); break;
    case TE_BF16: ((te_u16 *)p)[i] = te_f32_to_bf16(f); break;
    case TE_F8E4M3:
    case TE_F8E5M2: ((te_u8 *)p)[i] = (te_u8)te_f32x2_to_fp8(f, 0.0f, dt); break;
    case TE_U8: ((te_u8 *)p)[i] = (te_u8)f; break;
    case TE_I32: ((int *)p)[i] = (int)f; break;
    case TE_I64: ((te_i64 *)p)[i] = (te_i64)f; break;
    default: break;
    }
}
// Returns element i of an index array (i32 or i64).
TE_DEV te_i64 te_load_index(const void *p, te_i64 i, int dt) {
    return dt == TE_I64 ? ((const te_i64 *)p)[i] : (te_i64)((const int *)p)[i];
}

// ---- reductions ----------------------------------------------------------------------------------------------------
//
// All threads of the warp or block must call these functions; all get the result. The order of summation is fixed.

TE_DEV float te_warp_sum(float v) {
#pragma unroll
    for (int d = 16; d; d >>= 1) v += __shfl_xor_sync(0xffffffffu, v, d);
    return v;
}
TE_DEV float te_warp_max(float v) {
#pragma unroll
    for (int d = 16; d; d >>= 1) v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, d));
    return v;
}
// Returns the sums of v.x and of v.y over a warp. Each half of the warp reduces one of them: seven shuffles instead of
// ten.
TE_DEV float2 te_warp_sum2(float2 v) {
    bool second = threadIdx.x & 16;
    float mine = second ? v.y : v.x;
    mine += __shfl_xor_sync(0xffffffffu, second ? v.x : v.y, 16);
#pragma unroll
    for (int d = 8; d; d >>= 1) mine += __shfl_xor_sync(0xffffffffu, mine, d);
    return make_float2(__shfl_sync(0xffffffffu, mine, 0), __shfl_sync(0xffffffffu, mine, 16));
}
// Returns the sum of v over a block; te_block_max: the maximum. `scratch` is 32 floats of shared memory, free after the
// call. blockDim.x must be a multiple of 32.
TE_DEV float te_block_sum(float v, float *scratch) {
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    v = te_warp_sum(v);
    if (warps == 1) return v;
    if (lane == 0) scratch[warp] = v;
    __syncthreads();
    v = te_warp_sum(lane < warps ? scratch[lane] : 0.0f);
    __syncthreads();
    return v;
}
TE_DEV float te_block_max(float v, float *scratch) {
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    v = te_warp_max(v);
    if (warps == 1) return v;
    if (lane == 0) scratch[warp] = v;
    __syncthreads();
    v = te_warp_max(lane < warps ? scratch[lane] : -TE_INF);
    __syncthreads();
    return v;
}
// Returns true in all threads of the last block to call this function. That block sees the writes of thread 0 of every
// block. The counter is 0 again afterwards.
TE_DEV bool te_last_block(te_u32 *counter) {
    __shared__ bool last;
    if (threadIdx.x == 0) {
        __threadfence();
        last = atomicInc(counter, gridDim.x - 1) == gridDim.x - 1;
        __threadfence();
    }
    __syncthreads();
    return last;
}
// Waits until all blocks of a cooperative launch have called this function. Then earlier writes by thread 0 of every
// block are visible. counter[1] counts the waits.
TE_DEV void te_grid_wait(te_u32 *counter) {
    if (threadIdx.x == 0) {
        volatile te_u32 *times = counter + 1;
        te_u32 before = *times;
        __threadfence();
        if (atomicInc(counter, gridDim.x - 1) == gridDim.x - 1) {
            __threadfence();
            *times = before + 1;
        } else {
            while (*times == before) {}
        }
        __threadfence();
    }
    __syncthreads();
}
// Atomically computes *amax = max(*amax, v) for v >= 0, not NaN. The bits of non-negative floats, read as integers,
// have the order of the floats.
TE_DEV void te_atomic_amax(float *amax, float v) { atomicMax((int *)amax, __float_as_int(v)); }

// ---- small math ----------------------------------------------------------------------------------------------------

TE_DEV te_i64 te_div_up(te_i64 a, te_i64 b) { return (a + b - 1) / b; }
TE_DEV float te_sigmoid(float x) { return __fdiv_rn(1.0f, 1.0f + expf(-x)); }
