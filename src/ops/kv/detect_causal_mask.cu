// ops/kv/detect_causal_mask.cu: finds out whether a mask is the mask of causal attention with a sliding window. v is an
// element of the mask.
//
//   strict      Checks every row of every matrix. Row i must have v == 0 for the keys i - left .. i, and v < -10000 for
//               all other keys.
//   otherwise   Checks only rows 0 and s - 1 of head 0 of each sequence. The number of keys with v > -10000 must be the
//               number of keys that the row sees. In the very first row, keys 0 and s - 1 are checked too.
//
// A block takes one row after the other. The block that ends last writes the result, and sets the flag `failed` to 0.
//
// Launch: blocks of 1024 threads, up to one for each row.
//
// te:baseline
#include "device/base.cuh"
#include "base/sequences.h"
#include "ops/kv/kargs.h"

extern "C" __global__ void __launch_bounds__(TE__MASK_THREADS)
    te_detect_causal_mask(const __grid_constant__ te__causal_mask_kargs a) {
    te_follow();
    bool fits = true;
#pragma unroll 1
    for (te_i64 at = blockIdx.x; at < a.rows && fits; at += gridDim.x) {
        te_i64 i;
        const te_i64 row = te__mask_row(&a, at, &i);
        const te_i64 most = te__mask_row_keys(&a, i);
        int seen = 0;
#pragma unroll 4
        for (te_i64 j = threadIdx.x; j < a.s; j += TE__MASK_THREADS) {
            const te_i64 k = row + j * a.stride_j;
            const float v =
                a.dt == TE_U8 ? ((const unsigned char *)a.mask)[k] ? 0.0f : -TE_INF : te_load(a.mask, k, a.dt);
            seen += v > -10000.0f;
            fits = fits && te__mask_key_fits(&a, at == 0, i, j, v);
        }
        __shared__ int sum;
        if (threadIdx.x == 0) sum = 0;
        __syncthreads();
        seen = __reduce_add_sync(0xffffffffu, seen);
        if (threadIdx.x % TE_WARP == 0) atomicAdd(&sum, seen);
        fits = __syncthreads_and(fits) && sum == most;
        __syncthreads();
    }
    if (threadIdx.x == 0 && !fits) *(volatile float *)a.failed = 1.0f;
    if (!te_last_block(a.counter) || threadIdx.x != 0) return;
    *a.causal = *(volatile float *)a.failed == 0.0f;
    *a.failed = 0.0f;
}
