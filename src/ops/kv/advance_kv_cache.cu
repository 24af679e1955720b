// ops/kv/advance_kv_cache.cu: adds the tokens of a step to the lengths of the sequences, and writes the numbers of the
// next step.
//
//   start[b] += added
//   cu_q[0] = 0,   cu_q[b + 1] = cu_q[b] + step
//   cu_kv[0] = 0,  cu_kv[b + 1] = cu_kv[b] + start[b] + step
//
// Each thread adds up all lengths in order, and writes the sum up to its own sequence.
//
// Launch: one block of 1024 threads.
//
// te:baseline
#include "device/base.cuh"
#include "base/sequences.h"
#include "ops/kv/kargs.h"

extern "C" __global__ void __launch_bounds__(TE__CU_SEQLENS_THREADS)
    te_advance_kv_cache(const __grid_constant__ te__kv_advance_kargs a) {
    te_follow();
    __shared__ int lengths[TE__CU_SEQLENS_THREADS];
    int before = 0; // keys of the sequences before this round's
    if (threadIdx.x == 0) a.cu_q[0] = a.cu_kv[0] = 0;
    for (te_i64 first = 0; first < a.sequences; first += TE__CU_SEQLENS_THREADS) {
        const int n =
            (int)(a.sequences - first < TE__CU_SEQLENS_THREADS ? a.sequences - first : TE__CU_SEQLENS_THREADS);
        const te_i64 b = first + threadIdx.x;
        if ((int)threadIdx.x < n) {
            const int start = a.start[b] + a.added;
            a.start[b] = start;
            a.cu_q[b + 1] = (int)(b + 1) * a.step;
            lengths[threadIdx.x] = start + a.step;
        }
        __syncthreads();
        int sum = before;
        for (int i = 0; i < n; i++) {
            sum += lengths[i];
            if (i == (int)threadIdx.x) a.cu_kv[b + 1] = sum;
        }
        before = sum;
        __syncthreads();
    }
}
