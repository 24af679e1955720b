// ops/optim/l2norm_partial.cu: computes the sum of squares of each chunk of 65,536 elements, for many tensors.
//
// A group is eight elements. Thread t adds up the groups t, t + 256, ... of the chunk one after another. te_block_sum
// adds up the threads. So the order of additions depends only on an element's index in its tensor.
//
// The block of a tensor's first chunk also records the index of this chunk. An empty tensor has one chunk, with the sum
// 0.
//
// Benchmark: "norm of 64 tensors" in tests/bench/h200.csv.
//
// Launch: block 256; the grid has one block for each chunk of this launch.
//
// te:baseline
#include "device/vector.cuh"
#include "ops/optim/kargs.h"
#include "ops/optim/multi.cuh"

// Returns this thread's sum of squares in a whole chunk. A call without an inverse scale passes inv_scale = 1, which
// changes no bit.
template <int DT> TE_DEV float te_squares(const void *x, te_i64 begin, float inv_scale) {
    float sum = 0.0f;
#pragma unroll 4
    for (int g = 0; g < TE__NORM_CHUNK / 2048; g++) {
        float v[8];
        te_load8(x, begin + threadIdx.x * 8 + g * 2048, DT, v);
#pragma unroll
        for (int k = 0; k < 8; k++) v[k] = __fmul_rn(v[k], inv_scale), sum = fmaf(v[k], v[k], sum);
    }
    return sum;
}

extern "C" __global__ void __launch_bounds__(256) te_l2norm_partial(const __grid_constant__ te__l2norm_kargs a) {
    te_follow();
    __shared__ float scratch[32];
    int t = te_tensor_of(a.first, a.tensors, blockIdx.x), dt = a.dt[t];
    te_i64 begin = (te_i64)(blockIdx.x - a.first[t]) * TE__NORM_CHUNK,
           end = begin + TE__NORM_CHUNK < a.n[t] ? begin + TE__NORM_CHUNK : a.n[t];
    const void *x = a.x[t];
    float sum = 0.0f, inv_scale = a.inv_scale ? *a.inv_scale : 1.0f;
    if (a.vector[t] && end - begin == TE__NORM_CHUNK) {
        sum = dt == TE_F32    ? te_squares<TE_F32>(x, begin, inv_scale)
              : dt == TE_BF16 ? te_squares<TE_BF16>(x, begin, inv_scale)
                              : te_squares<TE_F16>(x, begin, inv_scale);
    } else {
        for (te_i64 i = begin + threadIdx.x * 8; i < end; i += 2048)
            for (int k = 0; k < 8 && i + k < end; k++) {
                float v = __fmul_rn(te_load(x, i + k, dt), inv_scale);
                sum = fmaf(v, v, sum);
            }
    }
    sum = te_block_sum(sum, scratch);
    if (threadIdx.x != 0) return;
    a.partial[a.chunk + blockIdx.x] = sum;
    if (begin == 0) a.first_chunk[a.tensor + t] = a.chunk + blockIdx.x;
    if (a.last && blockIdx.x == gridDim.x - 1) a.first_chunk[a.tensor + a.tensors] = a.chunk + gridDim.x;
}
