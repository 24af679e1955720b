// ops/math/embedding_bwd.cu: computes dtable [vocab, h], the gradient of an embedding table. The row of an id is the
// sum of the rows of dy [tokens, h] with this id, in f32 and in the order of the tokens. With `accumulate` the old row
// is added.
//
//              256 columns: lane l has columns 8l .. 8l+7
//            +--------+--------+--------+--------+
//   id       | warp 0 | warp 1 | warp 0 | warp 1 |   here splits = 2
//            +--------+--------+--------+--------+
//
// `splits` warps share the columns of an id. With a small vocabulary `splits` is larger, so that warps fill the GPU.
//
// Benchmark: "embedding backward" in tests/bench/h200.csv.
//
// Launch: block 256; grid vocab * splits / 8, rounded up. If `vector` is set, rows of dy and dtable start at multiples
// of 16 bytes, and h is a multiple of 8.
//
// te:baseline
// te:row DY_DT=3 DTABLE_DT=3
// te:row DY_DT=3 DTABLE_DT=1
// te:row DY_DT=1 DTABLE_DT=1
#include "device/vector.cuh"
#include "ops/math/kargs.h"
#ifndef DY_DT
#define DY_DT a.dy_dt
#define DTABLE_DT a.dtable_dt
#endif

// Loads elements i .. i+7, of which only n exist. `whole` says that all eight exist and i is a multiple of eight.
TE_DEV void te_load_part(const void *p, te_i64 i, int dt, bool whole, te_i64 n, float out[8]) {
    if (whole) return te_load8(p, i, dt, out);
#pragma unroll
    for (int k = 0; k < 8; k++)
        if (k < n) out[k] = te_load(p, i + k, dt);
}

// Adds up columns col .. col + 7 of dy for one id, whose tokens are order[begin] to order[end - 1]. All 32 lanes must
// call this function.
TE_DEV void te_embedding_add(const te__embedding_bwd_kargs &a, te_i64 id, te_u32 begin, te_u32 end, te_i64 col) {
    te_i64 there = a.h - col; // columns from `col` on. With `vector`, this number is at least 8 or at most 0
    bool whole = a.vector && there > 0;
    int lane = threadIdx.x & 31;
    float sum[8] = {}, old[8] = {};
    for (te_u32 base = begin; base < end; base += 32) {
        int rows = end - base < 32 ? (int)(end - base) : 32, r = 0;
        te_u32 token = lane < rows ? a.order[base + lane] : 0;
        // Eight rows are loaded at once. The additions of a frequent id depend on each other, so only its loads can
        // overlap.
        for (; a.vector && r + 8 <= rows; r += 8) {
            te_u32 row[8];
            te_raw<TE_ANY, 8> bits[8];
#pragma unroll
            for (int s = 0; s < 8; s++) row[s] = __shfl_sync(0xffffffffu, token, r + s);
            if (!whole) continue;
#pragma unroll
            for (int s = 0; s < 8; s++) bits[s] = te_raw_ask<8>(a.dy, row[s] * a.h + col, DY_DT);
#pragma unroll
            for (int s = 0; s < 8; s++) {
                float v[8];
                te_raw_values<8>(bits[s], DY_DT, v);
#pragma unroll
                for (int k = 0; k < 8; k++) sum[k] += v[k];
            }
        }
        for (; r < rows; r++) {
            float v[8] = {};
            te_load_part(a.dy, __shfl_sync(0xffffffffu, token, r) * a.h + col, DY_DT, whole, there, v);
#pragma unroll
            for (int k = 0; k < 8; k++) sum[k] += v[k];
        }
    }
    if (a.accumulate) te_load_part(a.dtable, id * a.h + col, DTABLE_DT, whole, there, old);
#pragma unroll
    for (int k = 0; k < 8; k++) sum[k] += old[k];
    te_store_part(a.dtable, id * a.h + col, DTABLE_DT, there, a.vector, sum);
}

extern "C" __global__ void __launch_bounds__(256) te_embedding_bwd(const __grid_constant__ te__embedding_bwd_kargs a) {
    te_follow();
    te_i64 warp = (te_i64)blockIdx.x * 8 + (threadIdx.x >> 5);
    // splits > 1 only with a small vocabulary, so 32 bits suffice
    te_i64 id = a.splits == 1 ? warp : (te_i64)((te_u32)warp / a.splits);
    if (id >= a.vocab) return;
    te_u32 begin = a.start[id], end = a.start[id + 1];
    if (begin == end && a.accumulate) return;
    for (te_i64 col = (warp - id * a.splits) * 256; col < a.h; col += a.splits * 256)
        te_embedding_add(a, id, begin, end, col + (threadIdx.x & 31) * 8);
}
