// ops/dropout/dropout_add.cu: adds a bias, applies dropout and adds a residual, in one pass. Without bias and residual
// it is also the backward pass of dropout.
//
//   y[i] = residual[i] + (u(i) >= p ? (x[i] + bias[i % n]) * (1 / (1 - p)) : 0)
//
// u(i) is a uniform random number. It comes from word r % 4 of Philox block r / 4, where r = i / run. Normally run is
// 1, so r is i. In drop path, each `run` neighbouring elements are kept or dropped together.
//
// If the kernel is compiled with options, a thread has eight neighbouring elements. If run is 1, these are two Philox
// blocks:
//
//       thread t:  | block 2t: i = 8t .. 8t+3 | block 2t+1: 8t+4 .. 8t+7 |
//
// If run is larger, the eight elements belong to one run. Without options, a thread has four neighbouring elements
// twice, 1024 elements apart.
//
// Each product and each sum is rounded by itself. The CPU does the same, so it gives the same bits.
//
// Benchmark: "residual add" in tests/bench/h200.csv.
//
// Launch: block of 256 threads, grid ceil(count / 2048). With options: x, residual and y have the format X_DT. All
// pointers are aligned to 16 bytes. count is a multiple of 8, and so is n if there is a bias. run is 1 or a multiple of
// 8. Without options there are no conditions.
//
// te:baseline
// te:row X_DT=3 W_DT=3
// te:row X_DT=1 W_DT=1
// te:row X_DT=2 W_DT=1
#include "device/vector.cuh"
#include "ops/dropout/kargs.h"

// Returns v * keep_scale if the random word w keeps the element, and 0 otherwise. v is x + bias.
TE_DEV float te_dropout_keep(const te__dropout_add_kargs &a, float v, te_u32 w) {
    return te__uniform01(w) >= a.p ? __fmul_rn(v, a.keep_scale) : 0.0f;
}

extern "C" __global__ void __launch_bounds__(256) te_dropout_add(const __grid_constant__ te__dropout_add_kargs a) {
    te_follow();
    uint64_t seed = a.seed, offset = a.offset;
    te__rng_read(a.rng, &seed, &offset);
#ifdef X_DT
    te_i64 i = ((te_i64)blockIdx.x * 256 + threadIdx.x) * 8;
    if (i >= a.count) return;
    float v[8], t[8];
    te_load8(a.x, i, X_DT, v);
    if (a.bias) {
        te_i64 column = (te_u64)a.count >> 32 ? i % a.n : (te_i64)((te_u32)i % (te_u32)a.n);
        te_load8(a.bias, column, W_DT, t);
#pragma unroll
        for (int j = 0; j < 8; j++) v[j] += t[j];
    }
    if (a.residual) te_load8(a.residual, i, X_DT, t);
    if (a.p > 0.0f) {
        te_u32 words[8];
        if (a.run == 1) {
            te__philox(seed, offset, (te_u64)i / 4, words);
            te__philox(seed, offset, (te_u64)i / 4 + 1, words + 4);
        } else {
            te_u64 r = (te_u64)i / (te_u64)a.run;
            te_u32 w[4];
            te__philox(seed, offset, r / 4, w);
            te_u32 one = r % 4 == 0 ? w[0] : r % 4 == 1 ? w[1] : r % 4 == 2 ? w[2] : w[3];
#pragma unroll
            for (int j = 0; j < 8; j++) words[j] = one;
        }
#pragma unroll
        for (int j = 0; j < 8; j++) v[j] = te_dropout_keep(a, v[j], words[j]);
    }
    if (a.residual) {
#pragma unroll
        for (int j = 0; j < 8; j++) v[j] = __fadd_rn(t[j], v[j]);
    }
    te_store8(a.y, i, X_DT, v);
#else
#pragma unroll 1
    for (int half = 0; half < 2; half++) {
        te_i64 first = (te_i64)blockIdx.x * 2048 + half * 1024 + threadIdx.x * 4;
        if (first >= a.count) return;
        te_u32 words[4];
        if (a.p > 0.0f && a.run == 1) te__philox(seed, offset, (te_u64)first / 4, words);
#pragma unroll 1
        for (int j = 0; j < 4; j++) {
            te_i64 i = first + j;
            if (i >= a.count) break;
            float v = te_load(a.x, i, a.x_dt);
            if (a.bias) v += te_load(a.bias, i % a.n, a.bias_dt);
            te_u64 r = (te_u64)(i / a.run); /* for run > 1 every element computes its Philox block again, for
                                             * simplicity */
            if (a.p > 0.0f && a.run > 1) te__philox(seed, offset, r / 4, words);
            if (a.p > 0.0f) v = te_dropout_keep(a, v, words[r % 4]);
            if (a.residual) v = __fadd_rn(te_load(a.residual, i, a.residual_dt), v);
            te_store(a.y, i, a.y_dt, v);
        }
    }
#endif
}
