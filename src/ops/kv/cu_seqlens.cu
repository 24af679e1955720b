// ops/kv/cu_seqlens.cu: writes the cumulative numbers of tokens of the sequences. Each 0 in the mask is a token.
//
//   cu[0] = 0,  cu[b + 1] = cu[b] + number of zeros in mask[b, 0 .. length - 1]
//
// A warp counts a sequence. Each thread adds up all counts up to its own sequence.
//
// Launch: one block of 1024 threads.
//
// te:baseline
#include "device/base.cuh"
#include "base/sequences.h"
#include "ops/kv/kargs.h"

extern "C" __global__ void __launch_bounds__(TE__CU_SEQLENS_THREADS)
    te_cu_seqlens(const __grid_constant__ te__cu_seqlens_kargs a) {
    te_follow();
    __shared__ int counts[TE__CU_SEQLENS_THREADS];
    const int warp = threadIdx.x / TE_WARP, lane = threadIdx.x % TE_WARP, warps = TE__CU_SEQLENS_THREADS / TE_WARP;
    int before = 0; // tokens of the sequences before this round's
    if (threadIdx.x == 0) a.cu[0] = 0;
    for (te_i64 first = 0; first < a.sequences; first += TE__CU_SEQLENS_THREADS) {
        const int n =
            (int)(a.sequences - first < TE__CU_SEQLENS_THREADS ? a.sequences - first : TE__CU_SEQLENS_THREADS);
        for (int b = warp; b < n; b += warps) {
            int count = 0;
            for (te_i64 i = lane; i < a.length; i += TE_WARP) count += a.mask[(first + b) * a.length + i] == 0;
            count = __reduce_add_sync(0xffffffffu, count);
            if (lane == 0) counts[b] = count;
        }
        __syncthreads();
        int sum = before;
        for (int b = 0; b < n; b++) {
            sum += counts[b];
            if (b == (int)threadIdx.x) a.cu[first + b + 1] = sum;
        }
        before = sum;
        __syncthreads();
    }
}
