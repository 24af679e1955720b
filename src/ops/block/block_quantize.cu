// ops/block/block_quantize.cu: quantizes x to FP8 with scales: a row-wise copy, a transposed column-wise copy, or both.
//
//   1-D blocks   Each 128 elements of a row (row-wise copy) or of a column (column-wise copy) have a scale.
//   2-D blocks   Each 128 x 128 elements have a scale.
//
//             128 columns (tx: 8 each)
//           +-------------------------+
//    128    | ty: 4 rows              |   A thread (tx = t % 16, ty = t / 16) keeps 4 x 8 elements of x in registers.
//    rows   |    x eight columns      |
//           +-------------------------+
//
// The amax of a row is reduced over 16 threads, by shuffles. The amax of a column is reduced over two threads of each
// warp, then over the 16 warps in shared memory.
//
// For the column-wise copy, the codes of four rows of one column are a word. The words pass through shared memory
// (transpose.cuh), so that each store writes 16 bytes.
//
// Beyond the edges of x a tile holds zeros. Tiles cover `ld` columns and `ldc` rows, so the padding is written too. A
// tile that is only padding has no scales.
//
// Benchmark: "quantize 1x128 blocks both copies", "quantize 128x128 blocks both copies" in tests/bench/h200.csv.
//
// Launch: block 512; grid: one block for each tile, in row-major order. Any size and alignment are allowed.
//
// te:baseline
// te:row X_DT=3 Y_DT=4
// te:row X_DT=3 Y_DT=5
// te:row X_DT=2 Y_DT=4
// te:row X_DT=2 Y_DT=5
// te:row X_DT=1 Y_DT=4
// te:row X_DT=1 Y_DT=5
#include "ops/block/kargs.h"
#include "device/vector.cuh"
#include "device/transpose.cuh"
#include "base/scaling.h"
#ifdef X_DT
#define HELD X_DT
// blocks resident on a multiprocessor, if the registers suffice
#define BLOCKS (TE_HAS_FP8_CVT && PACKED ? (__CUDA_ARCH__ < 1200 ? 3 : 2) : 1)
#else
#define X_DT a.x_dt
#define Y_DT a.y_dt
#define HELD TE_F32 // the format of elements in registers: f32, unpacked
#define BLOCKS 1
#endif
#define PACKED (HELD != TE_F32)

// One step of a maximum over pairs of lanes that differ in the bit `lane_bit`. Both have 2n values. The lane with the
// bit set gets the upper n maxima, the other lane the lower n.
template <int n> TE_DEV void te_halve(float *v, int lane_bit) {
    bool upper = threadIdx.x & lane_bit;
#pragma unroll
    for (int i = 0; i < n; i++) {
        float other = __shfl_xor_sync(0xffffffffu, upper ? v[i] : v[i + n], lane_bit);
        v[i] = fmaxf(upper ? v[i + n] : v[i], other);
    }
}

extern "C" __global__ void __launch_bounds__(512, BLOCKS)
    te_block_quantize(const __grid_constant__ te__block_quantize_kargs a) {
    te_follow();
    __shared__ __align__(16) te_u32 tile[2 * TE_TILE_COLUMNS * TE_TILE_WORDS];
    __shared__ __align__(16) float col_scale[128];
    __shared__ float scratch[32];
    float *part = (float *)tile; // [16 warps][128 columns] of amaxes, before the tile is filled
    int tx = threadIdx.x & 15, ty = threadIdx.x >> 4, lane = threadIdx.x & 31;
    te_u32 tile_m = blockIdx.x / a.tiles_n, tile_n = blockIdx.x - tile_m * a.tiles_n;
    te_i64 first_row = (te_i64)tile_m * 128, first_col = (te_i64)tile_n * 128;
    te_i64 row = first_row + ty * 4, col = first_col + tx * 8;
    bool scaled = first_row < a.m && first_col < a.n; // else the whole tile is padding

    // All loads are issued before the first element is used, so that their latencies overlap.
    te_raw<HELD> x[4];
    if (a.vector_x && row + 4 <= a.m && col + 8 <= a.n) {
#pragma unroll
        for (int r = 0; r < 4; r++) x[r] = te_raw_load<HELD>(a.x, (row + r) * a.n + col, X_DT);
    } else {
#pragma unroll
        for (int r = 0; r < 4; r++) {
            te_i64 at = (row + r) * a.n + col, there = row + r < a.m ? a.n - col : 0;
            if (a.vector_x && there >= 8) x[r] = te_raw_load<HELD>(a.x, at, X_DT);
            else x[r] = te_raw_load_part<HELD>(a.x, at, X_DT, there);
        }
    }
    if (a.noop && *a.noop == 1.0f) return;
    float fp8_max = Y_DT == TE_F8E4M3 ? 448.0f : 57344.0f;

    // The maxima ignore NaN. Elements of 16 bits are compared two at a time, packed.
    float row_amax[4] = {}, col_amax[8] = {};
    if constexpr (PACKED) {
        te_u32 rows[4] = {}, columns[4] = {};
#pragma unroll
        for (int r = 0; r < 4; r++)
#pragma unroll
            for (int h = 0; h < 4; h++) {
                te_u32 pair = x[r].w[h] & 0x7fff7fffu;
                rows[r] = te_half2_max(rows[r], pair, X_DT), columns[h] = te_half2_max(columns[h], pair, X_DT);
            }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            te_raw<HELD> most = {{rows[i], columns[i], 0, 0}};
            row_amax[i] = fmaxf(te_raw_get(most, 0), te_raw_get(most, 1));
            col_amax[2 * i] = te_raw_get(most, 2), col_amax[2 * i + 1] = te_raw_get(most, 3);
        }
    } else {
#pragma unroll
        for (int c = 0; c < 8; c++)
#pragma unroll
            for (int r = 0; r < 4; r++) {
                float v = fabsf(te_raw_get(x[r], c));
                row_amax[r] = fmaxf(row_amax[r], v);
                col_amax[c] = fmaxf(col_amax[c], v);
            }
    }

    float row_scale; // the scale of row `mine` of the thread's four
    int mine = (lane & 1) << 1 | (lane >> 1 & 1);
    if (a.two_dimensional) {
        float amax = te_block_max(fmaxf(fmaxf(row_amax[0], row_amax[1]), fmaxf(row_amax[2], row_amax[3])), scratch);
        row_scale = te__block_scale(amax, fp8_max, a.epsilon, a.limit, a.power_of_two);
        if (threadIdx.x < 128) col_scale[threadIdx.x] = row_scale;
        // Thread 0 writes 1 / scale for the row-wise copy, thread 4 for the column-wise copy. If this number is the
        // last of its row, threads 1 to 3 (5 to 7) write zeros to the padding that follows it.
        if (scaled && threadIdx.x < 8) {
            te_i64 blocks_m = te_div_up(a.m, 128), blocks_n = te_div_up(a.n, 128);
            float inverse = threadIdx.x & 3 ? 0.0f : te__rcp_f32(row_scale);
            te_i64 at_n = (te_i64)tile_n + (threadIdx.x & 3), at_m = (te_i64)tile_m + (threadIdx.x & 3);
            if (threadIdx.x < 4 && a.row && (at_n == tile_n || (tile_n + 1 == blocks_n && at_n < a.ld_row_scale)))
                a.row_scale[tile_m * a.ld_row_scale + at_n] = inverse;
            if (threadIdx.x >= 4 && a.col && (at_m == tile_m || (tile_m + 1 == blocks_m && at_m < a.ld_col_scale)))
                a.col_scale[tile_n * a.ld_col_scale + at_m] = inverse;
        }
    } else {
        if (a.col) {
            te_halve<4>(col_amax, 16);
            int c = tx * 8 + (lane & 16) / 4; // c: the first of four neighbouring columns
            *(float4 *)(part + (threadIdx.x >> 5) * 128 + c) =
                make_float4(col_amax[0], col_amax[1], col_amax[2], col_amax[3]);
        }
        te_halve<2>(row_amax, 1);
        te_halve<1>(row_amax, 2);
        row_amax[0] = fmaxf(row_amax[0], __shfl_xor_sync(0xffffffffu, row_amax[0], 4));
        row_amax[0] = fmaxf(row_amax[0], __shfl_xor_sync(0xffffffffu, row_amax[0], 8));
        row_scale = te__block_scale(row_amax[0], fp8_max, a.epsilon, a.limit, a.power_of_two);
        if (scaled && a.row && !(lane & 12) && row + mine < a.ld_row_scale)
            a.row_scale[tile_n * a.ld_row_scale + row + mine] = row + mine < a.m ? te__rcp_f32(row_scale) : 0.0f;
        if (a.col) {
            __syncthreads();
            if (threadIdx.x < 128) {
                float amax = 0.0f;
#pragma unroll
                for (int w = 0; w < 16; w++) amax = fmaxf(amax, part[w * 128 + threadIdx.x]);
                float scale = te__block_scale(amax, fp8_max, a.epsilon, a.limit, a.power_of_two);
                te_i64 c = first_col + threadIdx.x;
                col_scale[threadIdx.x] = scale;
                if (scaled && c < a.ld_col_scale)
                    a.col_scale[tile_m * a.ld_col_scale + c] = c < a.n ? te__rcp_f32(scale) : 0.0f;
            }
        }
    }

    if (a.row) {
        te_u8 *q = (te_u8 *)a.row;
#pragma unroll
        for (int r = 0; r < 4; r++) {
            float scale = __shfl_sync(0xffffffffu, row_scale, (lane & 16) | r >> 1 | (r & 1) << 1);
            te_u32 code[2];
#pragma unroll
            for (int w = 0; w < 2; w++) {
                float v[4];
#pragma unroll
                for (int k = 0; k < 4; k++) v[k] = __fmul_rn(te_raw_get(x[r], 4 * w + k), scale);
                code[w] = te_f32x2_to_fp8(v[0], v[1], Y_DT) | (te_u32)te_f32x2_to_fp8(v[2], v[3], Y_DT) << 16;
            }
            if (row + r >= a.m) continue; // no return: all lanes must take part in the next shuffle
            if (a.vector_row && col + 8 <= a.ld) {
                *(uint2 *)(q + (row + r) * a.ld + col) = make_uint2(code[0], code[1]);
            } else {
#pragma unroll
                for (int k = 0; k < 8; k++)
                    if (col + k < a.ld) q[(row + r) * a.ld + col + k] = (te_u8)(code[k >> 2] >> (8 * (k & 3)));
            }
        }
    }
    if (a.col) {
        __syncthreads(); // the columns' scales are there, and `part` has been read
#pragma unroll
        for (int f = 0; f < 2; f++) {
            float4 scale = *(const float4 *)(col_scale + tx * 8 + 4 * f);
            float s[4] = {scale.x, scale.y, scale.z, scale.w};
#pragma unroll
            for (int k = 0; k < 4; k++) {
                float v[4];
#pragma unroll
                for (int r = 0; r < 4; r++) v[r] = __fmul_rn(te_raw_get(x[r], 4 * f + k), s[k]);
                te_u32 word = te_f32x2_to_fp8(v[0], v[1], Y_DT) | (te_u32)te_f32x2_to_fp8(v[2], v[3], Y_DT) << 16;
                te_tile_put(tile + (tx >> 3) * TE_TILE_COLUMNS * TE_TILE_WORDS, tx & 7, ty, 4 * f + k, word);
            }
        }
        __syncthreads();
        int half = threadIdx.x >> 8; // half of the block and of the columns
        te_tile_store(tile + half * TE_TILE_COLUMNS * TE_TILE_WORDS, a.col, a.ldc, first_row, first_col + 64 * half,
                      a.n, 1, a.vector_col, threadIdx.x & 255);
    }
}
