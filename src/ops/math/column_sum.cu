// ops/math/column_sum.cu: computes out [n], the column sums of x [m, n]. With `accumulate` they are added to the old
// out.
//
//             256 columns: lane l has columns 8l .. 8l+7
//           +-------------------------------------------+
//    chunk  | warp w adds rows w, w + 8, w + 16 ...     |
//           +-------------------------------------------+
//
// A block adds the sums of its eight warps in order, and writes them to row `chunk` of partial [chunks, n].
//
// Column block c belongs to group c % groups. The block that ends last in a group adds up the chunks of the group's
// columns. For each column it makes four sums, each over every fourth chunk, and adds the four in order. So one launch
// is enough, and the bits depend on the shape alone.
//
// Benchmark: "column sum" in tests/bench/h200.csv.
//
// Launch: block 256; grid column_blocks * chunks, where the column block changes fastest; groups <= column_blocks.
//
// If X_DT is given, n is a multiple of 8, and rows of x start at multiples of 16 bytes.
//
// te:baseline
// te:row X_DT=3
// te:row X_DT=2
// te:row X_DT=1
#include "device/vector.cuh"
#include "ops/math/kargs.h"
#ifdef X_DT
#define RESIDENT 4
#else
#define RESIDENT 1
#endif

// Returns whether this block is the last of `count` blocks to end. The last block sees the writes of all, and sets the
// counter back to 0.
TE_DEV bool te_last_of(te_u32 *counter, te_u32 count) {
    __shared__ bool last;
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        last = atomicInc(counter, count - 1) == count - 1;
        __threadfence();
    }
    __syncthreads();
    return last;
}

// Loads four columns of a row of `partial`. Columns and rows that do not exist give 0.
TE_DEV float4 te_column_part(const te__column_sum_kargs &a, te_i64 chunk, te_i64 col) {
    const float *p = a.partial + chunk * a.n + col;
    if (chunk >= a.chunks) return make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#ifdef X_DT
    return col < a.n ? __ldcg((const float4 *)p) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#else
    return make_float4(col < a.n ? __ldcg(p) : 0.0f, col + 1 < a.n ? __ldcg(p + 1) : 0.0f,
                       col + 2 < a.n ? __ldcg(p + 2) : 0.0f, col + 3 < a.n ? __ldcg(p + 3) : 0.0f);
#endif
}

extern "C" __global__ void __launch_bounds__(256, RESIDENT)
    te_column_sum(const __grid_constant__ te__column_sum_kargs a) {
    te_follow();
    __shared__ __align__(16) float part[8][256];
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    te_u32 chunk = blockIdx.x / a.column_blocks, column_block = blockIdx.x - chunk * a.column_blocks;
    te_i64 col = (te_i64)column_block * 256 + lane * 8, begin = chunk * a.chunk,
           end = begin + a.chunk < a.m ? begin + a.chunk : a.m;
    te_i64 row = begin + warp;
    float sum[8] = {};
#ifdef X_DT
    if (col < a.n) {
        te_i64 stride = 8 * a.n * te_size<X_DT>;
        const char *at = (const char *)a.x + (row * a.n + col) * te_size<X_DT>;
        for (; row + 56 < end; row += 64, at += 8 * stride) {
            te_raw<X_DT> x[8];
#pragma unroll
            for (int r = 0; r < 8; r++) x[r] = te_raw_load_hinted<X_DT, TE_LOAD_ONCE>(at + r * stride, 0);
#pragma unroll
            for (int r = 0; r < 8; r++)
#pragma unroll
                for (int k = 0; k < 8; k++) sum[k] += te_raw_get(x[r], k);
        }
        te_raw<X_DT> x[8]; // the remaining rows, also with all loads in flight at once
#pragma unroll
        for (int r = 0; r < 8; r++)
            x[r] = row + 8 * r < end ? te_raw_load_hinted<X_DT, TE_LOAD_ONCE>(at + r * stride, 0) : te_raw_zero<X_DT>();
#pragma unroll
        for (int r = 0; r < 8; r++)
            if (row + 8 * r < end)
#pragma unroll
                for (int k = 0; k < 8; k++) sum[k] += te_raw_get(x[r], k);
    }
#else
    for (; row < end; row += 8)
#pragma unroll
        for (int k = 0; k < 8; k++)
            if (col + k < a.n) sum[k] += te_load(a.x, row * a.n + col + k, a.x_dt);
#endif
#pragma unroll
    // not at lane * 8 + k: four lanes would then share a bank
    for (int k = 0; k < 8; k++) part[warp][k * 32 + lane] = sum[k];
    __syncthreads();
    float total = 0.0f;
#pragma unroll
    for (int w = 0; w < 8; w++) total += part[w][(threadIdx.x & 7) * 32 + (threadIdx.x >> 3)];
    col = (te_i64)column_block * 256 + threadIdx.x;
    if (col < a.n) a.partial[chunk * a.n + col] = total;

    te_u32 group = column_block % a.groups, members = (a.column_blocks - group + a.groups - 1) / a.groups;
    if (!te_last_of(a.counters + group, members * (te_u32)a.chunks)) return;
    for (te_i64 first = (te_i64)group * 256; first < a.n; first += (te_i64)a.groups * 256) {
        int quad = threadIdx.x & 63, turn = threadIdx.x >> 6;
        float4 all = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        for (te_i64 r = turn; r < a.chunks; r += 40) {
            float4 v[10];
#pragma unroll
            for (int k = 0; k < 10; k++) v[k] = te_column_part(a, r + 4 * k, first + 4 * quad);
#pragma unroll
            for (int k = 0; k < 10; k++) all.x += v[k].x, all.y += v[k].y, all.z += v[k].z, all.w += v[k].w;
        }
        *(float4 *)&part[turn][4 * quad] = all;
        __syncthreads();
        col = first + threadIdx.x;
        total = ((part[0][threadIdx.x] + part[1][threadIdx.x]) + part[2][threadIdx.x]) + part[3][threadIdx.x];
        if (col < a.n) {
            if (a.accumulate) total += te_load(a.out, col, a.out_dt);
            te_store(a.out, col, a.out_dt, total);
        }
        __syncthreads();
    }
}
