// ops/cast/fp8_quantize.cu: quantizes x to FP8 by q = saturate(round_to_nearest_even(f32(x) * scale)). It writes the
// row-wise copy, the transposed copy, or both, from one read of x (two reads with CURRENT).
//
//             64 columns (tx: 8 each)               transposed, through shared memory (transpose.cuh)
//           +-------------------------+             +---------------- 128 rows ----------------+
//    128    | ty: 4 rows              |   ->  row   |                                          |  64 columns  ->  col
//    rows   |    x eight columns      |             |                                          |
//           +-------------------------+             +------------------------------------------+
//
// Beyond the edges of x a tile holds zeros. Tiles cover `ld` columns and `ldc` rows, so the padding is written too.
// amax is max |x| before x is scaled. NaN is ignored. A block raises amax by at most one atomic. scale_inv is 1 /
// scale, correctly rounded.
//
// CURRENT: the kernel computes the scale itself. The launch is cooperative, and each block goes over its tiles twice.
// First it finds the maximum of its tiles, in ascending order. Then the blocks wait for each other, and each computes
// the scale from the largest of all maxima. Finally each block casts its tiles in descending order, since the last tile
// is still in its registers. Hints that keep the end of x in the L2 cache (ld.cs, st.cs) made the kernel slower.
//
// x_amax: the kernel that wrote x has left the amax of x here, and this kernel computes the scale from it. The amax is
// half of a 64-bit word. The other half counts the blocks that have read it, so a block reads and counts by one atomic.
// The block that reads last sets the word to 0.
//
// GROUPS: each row has the scale of its group, and raises the amax of its group. Rows that belong to no group become 0.
//
// BIAS: the kernel also writes sums [tile along m][column], which are the sums of x over the rows of each tile.
// math/column_sum adds up the sums of all tiles.
//
// Benchmark: "quantize e4m3 ...", "quantize e5m2 ..." in tests/bench/h200.csv.
//
// Launch: block 256; the grid has one block for each tile, in row-major order, and at least one block. With CURRENT all
// blocks of the grid must run at the same time, TE__CAST_RESIDENT of them on a multiprocessor (TE__CAST_RESIDENT_HALVES
// if the kernel is compiled for an x of 16 bits). The grid then has one block for each element of `partial`. Any size
// and any alignment are allowed.
//
// te:baseline
// te:row X_DT=3 Y_DT=4 CURRENT=0 BIAS=0
// te:row X_DT=3 Y_DT=5 CURRENT=0 BIAS=0
// te:row X_DT=3 Y_DT=5 CURRENT=0 BIAS=1
// te:row X_DT=2 Y_DT=4 CURRENT=0 BIAS=0
// te:row X_DT=1 Y_DT=4 CURRENT=0 BIAS=0
// te:row X_DT=1 Y_DT=5 CURRENT=0 BIAS=0
// te:row X_DT=3 Y_DT=4 CURRENT=1 BIAS=0
// te:row X_DT=3 Y_DT=5 CURRENT=1 BIAS=0
// te:row X_DT=3 Y_DT=5 CURRENT=1 BIAS=1
// te:row X_DT=1 Y_DT=4 CURRENT=1 BIAS=0
// te:row X_DT=3 Y_DT=4 CURRENT=0 BIAS=0 GROUPS=1
// te:row X_DT=3 Y_DT=5 CURRENT=0 BIAS=0 GROUPS=1
// te:row X_DT=1 Y_DT=4 CURRENT=0 BIAS=0 GROUPS=1
#include "device/vector.cuh"
#include "device/transpose.cuh"
#include "ops/cast/kargs.h"
#ifndef X_DT
#define X_DT a.x_dt
#define Y_DT a.y_dt
#define CURRENT a.current
#define HELD TE_F32 // the format of elements in registers: f32, unpacked
#define BIAS 0 /* this variant of the kernel, for all formats, has no column sums, so that it compiles faster; the plan
                * sums the columns of x separately */
#define RESIDENT TE__CAST_RESIDENT
#define GROUPS (a.groups != nullptr)
#else
#ifndef GROUPS
#define GROUPS 0
#endif
#define HELD X_DT
#define RESIDENT (CURRENT ? (PACKED ? TE__CAST_RESIDENT_HALVES : TE__CAST_RESIDENT) : 1)
#endif

#define PACKED (HELD != TE_F32)

// The place of one thread's 4 x 8 elements (rows x columns) in tile `at`, and a function that loads them from x.
struct te_cast_place {
    te_i64 first_row, first_col, row, col;
    bool inside;
    TE_DEV te_cast_place(const te__fp8_quantize_kargs &a, te_u32 at) {
        te_u32 tile_m = at / a.tiles_n, tile_n = at - tile_m * a.tiles_n;
        first_row = (te_i64)tile_m * 128, first_col = (te_i64)tile_n * TE_TILE_COLUMNS;
        row = first_row + (threadIdx.x >> 3) * 4, col = first_col + (threadIdx.x & 7) * 8;
        inside = row + 4 <= a.m && col + 8 <= a.n;
    }
    // Loads the thread's elements. All loads are issued before the first element is used, so that their latencies
    // overlap.
    TE_DEV void ask(const te__fp8_quantize_kargs &a, te_raw<HELD> w[4]) const {
        if (a.vector_x && inside) {
#pragma unroll
            for (int r = 0; r < 4; r++) w[r] = te_raw_load<HELD>(a.x, (row + r) * a.n + col, X_DT);
        } else {
#pragma unroll
            for (int r = 0; r < 4; r++)
                w[r] = te_raw_load_part<HELD>(a.x, (row + r) * a.n + col, X_DT, row + r < a.m ? a.n - col : 0);
        }
    }
};

TE_DEV float te_cast_largest(const te_raw<HELD> w[4], float largest, int dt) {
    if constexpr (PACKED) {
        te_u32 most = 0; // never NaN: the maximum of a NaN and a number is the number
#pragma unroll
        for (int i = 0; i < 16; i++) most = te_half2_max(most, w[i >> 2].w[i & 3] & 0x7fff7fffu, dt);
        te_raw<HELD> both = {{most}};
        return fmaxf(largest, fmaxf(te_raw_get(both, 0), te_raw_get(both, 1)));
    }
#pragma unroll
    for (int i = 0; i < 32; i++) largest = fmaxf(largest, fabsf(te_raw_get(w[i >> 3], i & 7)));
    return largest;
}

// Returns the amax of x to every thread of the block. The kernel that wrote x left it in *word.
TE_DEV float te_cast_found(te_u64 *word, float *scratch) {
    if (threadIdx.x == 0) {
        te_u64 was = atomicAdd(word, (te_u64)1 << 32);
        if ((te_u32)(was >> 32) == gridDim.x - 1) *word = 0;
        *scratch = __uint_as_float((te_u32)was);
    }
    __syncthreads();
    return *scratch;
}

// Returns the group of a row, or -1.
TE_DEV int te_cast_group(const te__fp8_quantize_kargs &a, te_i64 row) {
    int group = row < a.m ? a.groups[row] : -1;
    return group < a.count ? group : -1;
}
// Raises the amaxes of the groups of a thread's rows. All 32 threads of the warp must call this function.
TE_DEV void te_cast_group_amaxes(const te__fp8_quantize_kargs &a, const te_cast_place &p, const te_raw<HELD> w[4]) {
#pragma unroll
    for (int r = 0; r < 4; r++) {
        float largest = 0.0f;
#pragma unroll
        for (int k = 0; k < 8; k++) largest = fmaxf(largest, fabsf(te_raw_get(w[r], k)));
#pragma unroll
        // over the eight threads of a row
        for (int d = 4; d; d >>= 1) largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, d));
        int group = te_cast_group(a, p.row + r);
        if ((threadIdx.x & 7) || group < 0) continue;
        float *to = a.amax + group * a.amax_stride;
        if (largest > *(volatile float *)to) te_atomic_amax(to, largest);
    }
}

// Writes the codes of a thread's elements to both copies.
TE_DEV void te_cast_tile(const te__fp8_quantize_kargs &a, const te_cast_place &p, const te_raw<HELD> w[4], float scale,
                         te_u32 *tile) {
    float v[4][8];
    te_u32 code[4][2]; // eight columns of a row
    float sum[8];
#pragma unroll
    for (int i = 0; i < 32; i++) v[i >> 3][i & 7] = te_raw_get(w[i >> 3], i & 7);
    if (BIAS) {
#pragma unroll
        for (int k = 0; k < 8; k++) sum[k] = (v[0][k] + v[1][k]) + (v[2][k] + v[3][k]);
    }
#pragma unroll
    for (int r = 0; r < 4; r++) {
        if (GROUPS) {
            int group = te_cast_group(a, p.row + r);
            scale = group < 0 ? 0.0f : a.scale[group * a.scale_stride];
            if (group < 0) { // 0 even if x is NaN
#pragma unroll
                for (int k = 0; k < 8; k++) v[r][k] = 0.0f;
            }
        }
#pragma unroll
        for (int k = 0; k < 8; k++) v[r][k] = __fmul_rn(v[r][k], scale);
        if (!p.inside) { // elements outside x are 0 even if the scale is NaN
#pragma unroll
            for (int k = 0; k < 8; k++)
                if (p.row + r >= a.m || p.col + k >= a.n) v[r][k] = 0.0f;
        }
#pragma unroll
        for (int h = 0; h < 2; h++)
            code[r][h] = te_f32x2_to_fp8(v[r][4 * h], v[r][4 * h + 1], Y_DT) |
                         (te_u32)te_f32x2_to_fp8(v[r][4 * h + 2], v[r][4 * h + 3], Y_DT) << 16;
    }
    if (a.row) {
        te_u8 *q = (te_u8 *)a.row;
#pragma unroll
        for (int r = 0; r < 4; r++) {
            if (p.row + r >= a.m) break;
            if (a.vector_row && p.col + 8 <= a.ld) {
                *(uint2 *)(q + (p.row + r) * a.ld + p.col) = make_uint2(code[r][0], code[r][1]);
            } else {
#pragma unroll
                for (int k = 0; k < 8; k++)
                    if (p.col + k < a.ld) q[(p.row + r) * a.ld + p.col + k] = (te_u8)(code[r][k >> 2] >> (8 * (k & 3)));
            }
        }
    }
    if (a.col) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            te_u32 in[4] = {code[0][h], code[1][h], code[2][h], code[3][h]}, out[4];
            te_transpose_bytes(in, out);
#pragma unroll
            for (int j = 0; j < 4; j++) te_tile_put(tile, threadIdx.x & 7, threadIdx.x >> 3, 4 * h + j, out[j]);
        }
        __syncthreads();
        te_tile_store(tile, a.col, a.ldc, p.first_row, p.first_col, a.n, 1, a.vector_col);
    }
    if (BIAS && p.first_row < a.m) {
        __syncthreads(); // the tile has been read
        te_tile_column_sums(sum, (float *)tile, a.sums + (p.first_row >> 7) * a.n + p.first_col, a.n - p.first_col);
    }
}

extern "C" __global__ void __launch_bounds__(256, RESIDENT)
    te_fp8_quantize(const __grid_constant__ te__fp8_quantize_kargs a) {
    te_follow();
    __shared__ __align__(16) te_u32 tile[TE_TILE_COLUMNS * TE_TILE_WORDS];
    __shared__ float scratch[32];
    te_raw<HELD> w[4];
    float largest = 0.0f, scale;
    te_u32 at = blockIdx.x;
    te_cast_place p(a, at);
    p.ask(a, w);
    if (a.noop && *a.noop == 1.0f) return;
    if (CURRENT) {
#pragma unroll 1
        while (at + gridDim.x < a.tiles) {
            // 16-bit elements of the next tile are loaded while this tile is reduced. Two tiles of f32 do not fit into
            // the registers, so a tile of f32 is reduced before the next one is loaded.
            te_raw<HELD> next[4];
            if (!PACKED) largest = te_cast_largest(w, largest, X_DT);
            at += gridDim.x;
            p = te_cast_place(a, at);
            p.ask(a, next);
            if (PACKED) largest = te_cast_largest(w, largest, X_DT);
#pragma unroll
            for (int r = 0; r < 4; r++) w[r] = next[r];
        }
        largest = te_cast_largest(w, largest, X_DT);
        largest = te_block_max(largest, scratch);
        if (threadIdx.x == 0) a.partial[blockIdx.x] = largest;
        te_grid_wait(a.counter);
        largest = 0.0f;
        for (te_u32 b = threadIdx.x; b < gridDim.x; b += 256) largest = fmaxf(largest, __ldcg(a.partial + b));
        largest = te_block_max(largest, scratch);
    }
    if (CURRENT || a.x_amax) {
        if (!CURRENT) largest = te_cast_found(a.x_amax, scratch);
        scale = te__block_scale(largest, a.fp8_max, a.epsilon, TE_FLT_MAX, a.power_of_two);
        if (a.amax && blockIdx.x == 0 && threadIdx.x == 0) *a.amax = largest;
    } else if (GROUPS) {
        scale = 0.0f;
        if (a.amax) te_cast_group_amaxes(a, p, w);
    } else {
        scale = *a.scale;
        if (a.amax) largest = te_cast_largest(w, largest, X_DT);
    }
    if (GROUPS) {
        for (int i = threadIdx.x; a.scale_inv && blockIdx.x == 0 && i < a.count; i += 256)
            a.scale_inv[i] = __frcp_rn(a.scale[i * a.scale_stride]);
    } else if (a.scale_inv && blockIdx.x == 0 && threadIdx.x == 0)
        *a.scale_inv = __frcp_rn(scale);

#pragma unroll 1
    for (;;) {
        te_cast_tile(a, p, w, scale, tile);
        if (!CURRENT || at < gridDim.x) break;
        at -= gridDim.x;
        p = te_cast_place(a, at);
        p.ask(a, w);
        __syncthreads(); // the tile before has been written
    }
    if (!CURRENT && a.amax && !a.x_amax && !GROUPS) {
        largest = te_block_max(largest, scratch);
        // Most blocks read a larger value, and need no atomic.
        if (threadIdx.x == 0 && largest > *(volatile float *)a.amax) te_atomic_amax(a.amax, largest);
    }
}
