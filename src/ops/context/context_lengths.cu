// ops/context/context_lengths.cu: counts, in each sequence, the tokens of the chunks that the argument `chunks`
// selects. These are one or both chunks of a rank, or the first chunks of the sequence (te__context_length). The kernel
// writes the cumulative counts, and the rows where the selected chunks begin.
//
// It takes 1024 sequences at a time. Each thread adds up all counts up to its own sequence. A parallel scan is not
// needed, because a batch has few sequences.
//
// Launch: one block of 1024 threads.
//
// te:baseline
#include "device/base.cuh"
#include "base/sequences.h"
#include "ops/context/kargs.h"

extern "C" __global__ void __launch_bounds__(TE__CONTEXT_THREADS)
    te_context_lengths(const __grid_constant__ te__context_lengths_kargs a) {
    te_follow();
    __shared__ int lengths[TE__CONTEXT_THREADS];
    const int t = threadIdx.x;
    int before = 0; // tokens of all sequences before `first`
    if (t == 0) {
        a.out[0] = 0;
        a.starts[a.sequences] = a.padded[a.sequences] / (a.chunks == TE_CHUNKS_UP_TO ? 1 : a.ranks);
    }
    for (te_i64 first = 0; first < a.sequences; first += TE__CONTEXT_THREADS) {
        const int n = (int)(a.sequences - first < TE__CONTEXT_THREADS ? a.sequences - first : TE__CONTEXT_THREADS);
        if (t < n) lengths[t] = te__context_length(&a, first + t, a.starts + first + t);
        __syncthreads();
        int sum = before;
        for (int b = 0; b < n; b++) {
            sum += lengths[b];
            if (b == t) a.out[first + b + 1] = sum;
        }
        before = sum;
        __syncthreads();
    }
}
