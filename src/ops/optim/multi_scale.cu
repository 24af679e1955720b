// ops/optim/multi_scale.cu: computes out = in * scale for many tensors. Sets found_inf to 1 if an input is not finite.
//
// Benchmark: "64 tensors scaled" in tests/bench/h200.csv.
//
// Launch: block 256; one block for each chunk of 8192 elements, four groups of eight elements for each thread.
//
// te:baseline
#include "device/vector.cuh"
#include "ops/optim/kargs.h"
#include "ops/optim/multi.cuh"

// Scales a whole chunk. All loads come before the first store, so `in` and `out` may be the same array. Returns true if
// all elements were finite.
template <int IN, int OUT> TE_DEV bool te_scale_chunk(const void *in, void *out, te_i64 begin, float scale) {
    float v[4][8];
    bool finite = true;
#pragma unroll
    for (int g = 0; g < 4; g++) te_load8(in, begin + threadIdx.x * 8 + g * 2048, IN, v[g]);
#pragma unroll
    for (int g = 0; g < 4; g++) {
#pragma unroll
        for (int k = 0; k < 8; k++)
            finite = finite && fabsf(v[g][k]) <= TE_FLT_MAX, v[g][k] = __fmul_rn(v[g][k], scale);
        te_store8(out, begin + threadIdx.x * 8 + g * 2048, OUT, v[g]);
    }
    return finite;
}

extern "C" __global__ void __launch_bounds__(256) te_multi_scale(const __grid_constant__ te__multi_scale_kargs a) {
    te_follow();
    float scale = a.scale_device ? __fmul_rn(a.scale, *a.scale_device) : a.scale;
    int t = te_tensor_of(a.first, a.tensors, blockIdx.x), in_dt = a.in_dt[t], out_dt = a.out_dt[t];
    te_i64 begin = (te_i64)(blockIdx.x - a.first[t]) * TE__SCALE_CHUNK,
           end = begin + TE__SCALE_CHUNK < a.n[t] ? begin + TE__SCALE_CHUNK : a.n[t];
    bool finite = true, whole = a.vector[t] && end - begin == TE__SCALE_CHUNK;
    if (whole && in_dt == TE_F32 && out_dt == TE_F32) {
        finite = te_scale_chunk<TE_F32, TE_F32>(a.in[t], a.out[t], begin, scale);
    } else if (whole && in_dt == TE_BF16 && out_dt == TE_BF16) {
        finite = te_scale_chunk<TE_BF16, TE_BF16>(a.in[t], a.out[t], begin, scale);
    } else if (whole && in_dt == TE_F16 && out_dt == TE_F16) {
        finite = te_scale_chunk<TE_F16, TE_F16>(a.in[t], a.out[t], begin, scale);
    } else {
        for (te_i64 i = begin + threadIdx.x; i < end; i += 256) {
            float v = te_load(a.in[t], i, in_dt);
            finite = finite && fabsf(v) <= TE_FLT_MAX;
            te_store(a.out[t], i, out_dt, __fmul_rn(v, scale));
        }
    }
    if (!finite && a.found_inf) *a.found_inf = 1.0f; // all writers write the same value
}
