// ops/math/argmax.cu: computes out [m]: out[i] is the index of the largest element of row i of x [m, n].
//
//   block b      elements [c * chunk, (c + 1) * chunk) of row b / chunks, with c = b % chunks
//
// Integer keys order the elements (te__argmax_key), so the result does not depend on the order of the comparisons. If a
// row has several chunks, the last block to finish compares the chunks' keys, a warp for each row.
//
// Launch: block 256; grid m * chunks. With `vector` x is aligned to 16 bytes, and n is a multiple of 8.
//
// te:baseline
// te:row X_DT=3
// te:row X_DT=1
#include "device/vector.cuh"
#include "ops/math/kargs.h"
#ifndef X_DT
#define X_DT a.x_dt
#endif

TE_DEV te_u64 te_warp_largest(te_u64 key) {
#pragma unroll
    for (int d = 16; d; d >>= 1) {
        const te_u64 other = __shfl_xor_sync(0xffffffffu, key, d);
        key = other > key ? other : key;
    }
    return key;
}

extern "C" __global__ void __launch_bounds__(256) te_argmax(const __grid_constant__ te__argmax_kargs a) {
    te_follow();
    __shared__ te_u64 keys[8];
    const int warp = threadIdx.x / TE_WARP, lane = threadIdx.x % TE_WARP;
    const te_i64 row = blockIdx.x / a.chunks, begin = (te_i64)(blockIdx.x % a.chunks) * a.chunk,
                 end = begin + a.chunk < a.n ? begin + a.chunk : a.n;
    te_u64 best = 0;
    for (te_i64 i = begin + threadIdx.x * 8; i < end; i += TE__ARGMAX_STEP) {
        float v[8];
        const int n = end - i < 8 ? (int)(end - i) : 8;
        if (a.vector) te_load8(a.x, row * a.n + i, X_DT, v);
#pragma unroll
        for (int k = 0; k < 8; k++) {
            if (k >= n) break;
            if (!a.vector) v[k] = te_load(a.x, row * a.n + i + k, X_DT);
            const te_u64 key = te__argmax_key(__float_as_uint(v[k]), i + k);
            best = key > best ? key : best;
        }
    }
    best = te_warp_largest(best);
    if (lane == 0) keys[warp] = best;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int w = 1; w < 8; w++) best = keys[w] > best ? keys[w] : best;
        if (a.chunks == 1) a.out[row] = te__argmax_index(best);
        else a.best[blockIdx.x] = best;
    }
    if (a.chunks == 1 || !te_last_block(a.counter)) return;
    for (te_i64 r = warp; r < a.m; r += 8) {
        te_u64 largest = 0;
        for (int c = lane; c < a.chunks; c += TE_WARP) {
            const te_u64 key = *(volatile te_u64 *)(a.best + r * a.chunks + c);
            largest = key > largest ? key : largest;
        }
        largest = te_warp_largest(largest);
        if (lane == 0) a.out[r] = te__argmax_index(largest);
    }
}
