// ops/math/random.cu: fills an array with uniform or normal random numbers. Element i comes from word i % 4 of Philox
// block i / 4. The bits equal those of the CPU.
//
// Benchmark: "normal random" in tests/bench/h200.csv.
//
// Launch: block 256; a block handles 1024 elements, a thread one Philox block. Any alignment of at least one element is
// allowed.
//
// te:baseline
// te:row DT=3
// te:row DT=1
#include "device/vector.cuh"
#include "ops/math/kargs.h"
#ifndef DT
#define DT a.dt
#endif

extern "C" __global__ void __launch_bounds__(256) te_random(const __grid_constant__ te__random_kargs a) {
    te_follow();
    te_i64 block = (te_i64)blockIdx.x * 256 + threadIdx.x;
    te_u32 word[4];
    float v[4];
    if (block * 4 >= a.n) return;
    uint64_t seed = a.seed, offset = a.offset;
    te__rng_read(a.rng, &seed, &offset);
    te__philox(seed, offset, (te_u64)block, word);
    if (a.kind == TE_RANDOM_NORMAL) {
        te__normal2(word[0], word[1], v);
        te__normal2(word[2], word[3], v + 2);
#pragma unroll
        for (int k = 0; k < 4; k++) v[k] = fmaf(v[k], a.b, a.a);
    } else {
#pragma unroll
        for (int k = 0; k < 4; k++) v[k] = fminf(fmaf(te__uniform01(word[k]), __fsub_rn(a.b, a.a), a.a), a.below_b);
    }
    if (block * 4 + 4 <= a.n && ((te_u64)a.dst & 15) == 0) return te_store_n<4>(a.dst, block * 4, DT, v);
#pragma unroll
    for (int k = 0; k < 4; k++)
        if (block * 4 + k < a.n) te_store(a.dst, block * 4 + k, DT, v[k]);
}
