// ops/nvfp4/nvfp4_quantize.cu: quantizes x to e2m1 codes and e4m3 block scales: row-wise, column-wise (transposed), or
// both from one read of x.
//
//              128 columns (64 of f32)
//            +-----------------------+   by rows:     a thread casts 32 neighbours: 16 bytes of codes, two scales ->row
//    128     |  x, in shared memory, |
//    rows    |  272 bytes a row      |   by columns:  a thread has 16 rows of one column, transforms them, and puts
//            +-----------------------+                8 bytes of codes and a scale into `turned`                  ->col
//
//   `turned` has 64 bytes of codes and 8 scales for each column. One store to `col` writes 16 bytes of codes. One store
//   to `col_scale` writes 4 scales.
//
// 272 bytes a row avoid bank conflicts. Tiles cover all padding, so zeros are written there.
//
// Blocks of 16 x 16: a pass over the tile first finds the 64 scales. With 4-over-6 each copy chooses its own scales.
//
// With MEASURE the launch is cooperative. Blocks first find the amaxes of their tiles. Then they cast their tiles in
// reverse order, since the last tile is still in shared memory.
//
// With PER_LINE each row and column, or each group of rows, has its own amax. The 16 rows of a block must belong to the
// same group.
//
// Benchmark: "quantize nvfp4 ..." in tests/bench/h200.csv.
//
// Launch: block 256; grid: one block a tile, consecutive along a row of tiles. With MEASURE all blocks must run at the
// same time. Any size and any alignment are allowed.
//
// te:baseline
// te:row X_DT=3 TWO=0 RHT=0 STOCHASTIC=0 FOUR=0 MEASURE=0 PER_LINE=0
// te:row X_DT=3 TWO=0 RHT=0 STOCHASTIC=0 FOUR=0 MEASURE=0 PER_LINE=1
// te:row X_DT=3 TWO=0 RHT=1 STOCHASTIC=0 FOUR=0 MEASURE=0 PER_LINE=0
// te:row X_DT=3 TWO=0 RHT=0 STOCHASTIC=1 FOUR=0 MEASURE=0 PER_LINE=0
// te:row X_DT=3 TWO=0 RHT=1 STOCHASTIC=1 FOUR=0 MEASURE=0 PER_LINE=0
// te:row X_DT=3 TWO=1 RHT=0 STOCHASTIC=0 FOUR=0 MEASURE=0 PER_LINE=0
// te:row X_DT=3 TWO=0 RHT=1 STOCHASTIC=0 FOUR=1 MEASURE=0 PER_LINE=0
// te:row X_DT=3 TWO=1 RHT=0 STOCHASTIC=0 FOUR=2 MEASURE=0 PER_LINE=0
// te:row X_DT=3 TWO=0 RHT=1 STOCHASTIC=0 FOUR=0 MEASURE=1 PER_LINE=0
// te:row X_DT=3 TWO=0 RHT=1 STOCHASTIC=1 FOUR=0 MEASURE=1 PER_LINE=0
// te:row X_DT=3 TWO=1 RHT=0 STOCHASTIC=0 FOUR=0 MEASURE=1 PER_LINE=0
// te:row X_DT=1 TWO=0 RHT=0 STOCHASTIC=0 FOUR=0 MEASURE=0 PER_LINE=0
// te:row X_DT=2 TWO=0 RHT=1 STOCHASTIC=0 FOUR=0 MEASURE=0 PER_LINE=0
#include "device/mma.cuh"
#include "device/vector.cuh"
#include "ops/nvfp4/nvfp4.cuh"
#ifndef X_DT
#define X_DT a.x_dt
#define TWO a.two
#define RHT a.rht
#define STOCHASTIC a.stochastic
#define FOUR a.four
#define MEASURE (a.part != nullptr)
#define PER_LINE (a.per_row || a.per_col)
#endif

#define TE_SIZE (X_DT == TE_F32 ? 4 : 2)
#define TE_COLUMNS (256 / TE_SIZE) // columns of a tile
#define TE_STRIDE 272 // bytes of a row of the tile
#define TE_TURNED 72  // bytes of a column of the transposed codes

// Loads 16 neighbouring elements of a row of the tile. Returns the largest magnitude among them.
TE_DEV float te_nvfp4_row16(const te_u8 *p, int dt, float v[16]) {
    if (dt == TE_F32) {
        te_load8(p, 0, dt, v);
        te_load8(p, 8, dt, v + 8);
        return te_nvfp4_amax(v);
    }
    uint4 lo = *(const uint4 *)p, hi = *(const uint4 *)(p + 16);
    te_u32 w[8] = {lo.x, lo.y, lo.z, lo.w, hi.x, hi.y, hi.z, hi.w}, most = w[0];
#pragma unroll
    for (int i = 1; i < 8; i++) most = te_nvfp4_max2(most, w[i], dt);
#pragma unroll
    for (int i = 0; i < 16; i++) v[i] = te_nvfp4_of_word(w[i >> 1], i & 1, dt);
    return te_nvfp4_max_nan(fabsf(te_nvfp4_of_word(most, 0, dt)), fabsf(te_nvfp4_of_word(most, 1, dt)));
}
TE_DEV void te_nvfp4_bytes(te_u8 *to, const te_u32 *w, te_i64 n, int most) {
#pragma unroll
    for (int b = 0; b < most; b++)
        if (b < n) to[b] = (te_u8)(w[b >> 2] >> (8 * (b & 3)));
}

// Returns the index of the amax of row `row`. This is the index of the row's group, or 0 for a row of no group.
TE_DEV te_i64 te_nvfp4_group(const te__nvfp4_quantize_kargs &a, te_i64 row) {
    int group = row < a.m ? a.groups[row] : 0;
    return group > 0 && group < a.count ? group : 0;
}

// A tile of x, and its shared memory.
struct te_nvfp4_tile {
    te_u8 *tile, *turned;
    int *tile_code; // scales of the 16 x 16 blocks; with 4-over-6, those of the column-wise copy start at 64
    const te_nvfp4_tensor *of_tensor;
    const float (*multipliers)[128]; // multipliers of all 128 block scales, for rows and for columns
    te_i64 first_row, first_col;

    TE_DEV void place(const te__nvfp4_quantize_kargs &a, te_u32 at) {
        te_u32 tile_m = at / a.tiles_n;
        first_row = (te_i64)tile_m * 128, first_col = (te_i64)(at - tile_m * a.tiles_n) * TE_COLUMNS;
    }
    TE_DEV void load(const te__nvfp4_quantize_kargs &a) const;
    TE_DEV void measure(const te__nvfp4_quantize_kargs &a, float &of_row, float &of_col) const;
    TE_DEV void choose(const te__nvfp4_quantize_kargs &a, const te_nvfp4_rounding &how, bool columns,
                       te_i64 blocks) const;
    TE_DEV void cast(const te__nvfp4_quantize_kargs &a) const;
};

// Issues the loads of the tile. Before the block reads the tile, all threads must call te_cp_async_wait<0>() and then
// __syncthreads().
TE_DEV void te_nvfp4_tile::load(const te__nvfp4_quantize_kargs &a) const {
    int t = threadIdx.x;
    if (a.vector_x && first_row + 128 <= a.m && first_col + TE_COLUMNS <= a.n) {
        const te_u8 *from = (const te_u8 *)a.x + ((first_row + (t >> 4)) * a.n + first_col) * TE_SIZE + 16 * (t & 15);
        te_u32 to = (te_u32)__cvta_generic_to_shared(tile + (t >> 4) * TE_STRIDE + 16 * (t & 15));
        te_i64 step = 16 * TE_SIZE * a.n;
#pragma unroll
        for (int i = 0; i < 8; i++, from += step) te_cp_async16(to + i * 16 * TE_STRIDE, from, 16);
        te_cp_async_commit();
    } else if (a.vector_x) {
#pragma unroll 1
        for (int i = 0; i < 8; i++) {
            int r = (t >> 4) + 16 * i, piece = t & 15;
            te_i64 left = (a.n - first_col) * TE_SIZE - 16 * piece;
            int bytes = first_row + r < a.m && left > 0 ? (int)(left < 16 ? left : 16) : 0;
            const te_u8 *from = (const te_u8 *)a.x + ((first_row + r) * a.n + first_col) * TE_SIZE + 16 * piece;
            te_cp_async16((te_u32)__cvta_generic_to_shared(tile + r * TE_STRIDE + 16 * piece),
                          bytes ? from : (const te_u8 *)a.x, bytes);
        }
        te_cp_async_commit();
    } else {
#pragma unroll 1
        for (int i = t; i < 128 * TE_COLUMNS; i += 256) {
            int r = i / TE_COLUMNS, c = i - r * TE_COLUMNS;
            bool there = first_row + r < a.m && first_col + c < a.n;
            te_i64 at = (first_row + r) * a.n + first_col + c;
            if (TE_SIZE == 4) *(te_u32 *)(tile + r * TE_STRIDE + 4 * c) = there ? ((const te_u32 *)a.x)[at] : 0;
            else *(te_u16 *)(tile + r * TE_STRIDE + 2 * c) = there ? ((const te_u16 *)a.x)[at] : (te_u16)0;
        }
    }
}

// Raises of_row to the largest |x| of the tile. Raises of_col to the largest magnitude in the tile after the transform
// of its columns.
TE_DEV void te_nvfp4_tile::measure(const te__nvfp4_quantize_kargs &a, float &of_row, float &of_col) const {
#pragma unroll 1
    for (int i = threadIdx.x; i < 2048 / TE_SIZE; i += 256) { // 16 rows of a column
        const te_u8 *from = tile + 16 * (i >> 6 & 7) * TE_STRIDE + 4 * (i & 63);
        float v[16];
#pragma unroll
        for (int r = 0; r < 16; r++) v[r] = te_nvfp4_of_word(*(const te_u32 *)(from + r * TE_STRIDE), i >> 9, X_DT);
        of_row = fmaxf(of_row, te_nvfp4_largest(v));
        if (RHT && a.col) te_nvfp4_transform(v, RHT, X_DT), of_col = fmaxf(of_col, te_nvfp4_largest(v));
    }
}

// Finds the scales of the tile's 16 x 16 blocks, for the column-wise copy if `columns`. Each of 16 lanes has one row or
// column of a block.
TE_DEV void te_nvfp4_tile::choose(const te__nvfp4_quantize_kargs &a, const te_nvfp4_rounding &how, bool columns,
                                  te_i64 blocks) const {
    const int groups = TE_COLUMNS / 16; // blocks in a row of the tile
    const te_nvfp4_tensor s = of_tensor[columns];
#pragma unroll 1
    for (int i = threadIdx.x; i < 128 * groups; i += 256) {
        float v[16], largest;
        int block = i >> 4, down = block / groups, across = block - down * groups,
            line = (columns ? across : down) * 16 + (i & 15);
        if (columns) {
            const te_u8 *from = tile + 16 * down * TE_STRIDE + (line * TE_SIZE & ~3);
#pragma unroll
            for (int k = 0; k < 16; k++)
                v[k] = te_nvfp4_of_word(*(const te_u32 *)(from + k * TE_STRIDE), line & 1, X_DT);
            largest = te_nvfp4_largest(v);
        } else {
            largest = te_nvfp4_row16(tile + line * TE_STRIDE + 16 * across * TE_SIZE, X_DT, v);
            if (largest != largest) largest = te_nvfp4_largest(v);
        }
#pragma unroll
        for (int d = 8; d; d >>= 1) largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, d));
        if (!FOUR) {
            if ((i & 15) == 0) tile_code[block] = te_nvfp4_block_code(largest, s);
            continue;
        }
        te_u32 random[4];
        te_i64 at = columns ? (first_col + line) * blocks + first_row / 16 + down
                            : (first_row + line) * blocks + first_col / 16 + across;
        if (how.stochastic) te_nvfp4_draw(how, (te_u64)at, random);
        te_u8 code = te_nvfp4_four_over_six(how, v, largest, s, random, true);
        if ((i & 15) == 0) tile_code[64 * columns + block] = code;
    }
}

TE_DEV void te_nvfp4_tile::cast(const te__nvfp4_quantize_kargs &a) const {
    int t = threadIdx.x, lane = t & 31;
    const int chunks = TE_COLUMNS / 32;
    te_i64 row_blocks = te_div_up(a.n, 16), col_blocks = te_div_up(a.m, 16), rows_padded = te_div_up(a.m, 128) * 128;
    te_nvfp4_rounding by_row = {STOCHASTIC != 0, RHT != 0, FOUR, a.seed, a.offset, a.rng};
    te_nvfp4_rounding by_col = {STOCHASTIC != 0, RHT != 0, FOUR, a.seed, a.offset + 1, a.rng};
    te_nvfp4_tensor of_row = of_tensor[0];

    if (TWO) {
#pragma unroll 1
        for (int columns = 0; columns <= (FOUR != 0); columns++)
            if (!FOUR || (columns ? a.col : a.row))
                choose(a, columns ? by_col : by_row, columns != 0, columns ? col_blocks : row_blocks);
        __syncthreads();
    }

    if (a.row) {
#pragma unroll 1
        for (int i = t >> 5; i < 4 * chunks; i += 8) { // 16 warps' work for 16-bit formats, 8 for f32
            int chunk = chunks == 4 ? (lane & 1) + (lane >> 3 & 1) * 2 : lane & 1;
            int r = chunks == 4 ? i * 8 + (lane >> 4) * 4 + (lane >> 1 & 3) : i * 16 + (lane >> 1);
            te_i64 row = first_row + r, col = first_col + 32 * chunk;
            te_u32 code[4];
            te_u8 scale[2];
            if (PER_LINE && a.per_row && row < a.m)
                of_row = te_nvfp4_tensor_of(a.amax_row[a.groups ? te_nvfp4_group(a, row) : row], a.code_max);
#pragma unroll
            for (int h = 0; h < 2; h++) {
                float v[16];
                int j = 2 * chunk + h;
                float amax = te_nvfp4_row16(tile + r * TE_STRIDE + 16 * j * TE_SIZE, X_DT, v);
                uint2 u = te_nvfp4_block(by_row, v, amax, of_row, PER_LINE && a.per_row ? NULL : multipliers[0], TWO,
                                         tile_code[(r >> 4) * (TE_COLUMNS / 16) + j],
                                         (te_u64)(row * row_blocks + (col >> 4) + h), scale + h);
                te_i64 left = a.n - col - 16 * h;
                if (RHT && scale[h] == 0x7f && left < 16) { // elements beyond the edge get 0, not NaN
                    u.x &= left < 8 ? (1u << (4 * (int)left)) - 1 : 0xffffffffu;
                    u.y &= left < 8 ? 0 : (1u << (4 * (int)left - 32)) - 1;
                }
                code[2 * h] = u.x, code[2 * h + 1] = u.y;
            }
            if (row < a.m) {
                te_i64 bytes = (a.ld + 1) >> 1;
                te_u8 *to = a.row + row * bytes + (col >> 1);
                if (a.vector_row && col + 32 <= a.ld) *(uint4 *)to = make_uint4(code[0], code[1], code[2], code[3]);
                else te_nvfp4_bytes(to, code, bytes - (col >> 1), 16);
            }
            if (TWO && row >= a.m) scale[0] = scale[1] = 0; // the scale of a 16 x 16 block is not repeated beyond the
                                                            // edge
            te_i64 group = col >> 4;
            if (row < rows_padded && group < a.row_groups) { // `group` is even, and so is row_groups
                te_u8 *to = a.row_scale + te__nvfp4_scale_at(row, group, a.row_groups, a.swizzled);
                if (a.vector_row) *(te_u16 *)to = (te_u16)(scale[0] | scale[1] << 8);
                else to[0] = scale[0], to[1] = scale[1];
            }
        }
    }
    if (!a.col) return;
    te_nvfp4_tensor of_col = of_tensor[1];

    // w: 16 words of one column, or of two neighbouring columns
#pragma unroll 1
    for (int i = t; i < 512; i += 256) {
        int word = i & 63, g = i >> 6;
        // With the transform there are not enough registers to keep the words. So each column reads the words again.
        te_u32 w[16], most = 0;
        const te_u8 *from = tile + 16 * g * TE_STRIDE + 4 * word;
        if (!RHT) {
#pragma unroll
            for (int r = 0; r < 16; r++) w[r] = *(const te_u32 *)(from + r * TE_STRIDE);
            most = w[0];
            if (X_DT != TE_F32)
#pragma unroll
                for (int r = 1; r < 16; r++) most = te_nvfp4_max2(most, w[r], X_DT);
        }
#pragma unroll 1
        for (int half = 0; half < 4 / TE_SIZE; half++) {
            int c = TE_SIZE == 4 ? word : 2 * word + half;
            float v[16];
            te_u8 scale;
#pragma unroll
            for (int r = 0; r < 16; r++)
                v[r] = te_nvfp4_of_word(RHT ? *(const te_u32 *)(from + r * TE_STRIDE) : w[r], half, X_DT);
            te_nvfp4_transform(v, RHT, X_DT);
            if (PER_LINE && a.per_col)
                of_col = te_nvfp4_tensor_of(a.amax_col[a.groups              ? te_nvfp4_group(a, first_row + 16 * g)
                                                       : first_col + c < a.n ? first_col + c
                                                                             : 0],
                                            a.code_max);
            float amax = X_DT == TE_F32 || RHT ? te_nvfp4_amax(v) : fabsf(te_nvfp4_of_word(most, half, X_DT));
            uint2 u = te_nvfp4_block(by_col, v, amax, of_col, PER_LINE && a.per_col ? NULL : multipliers[1],
                                     TWO, tile_code[(FOUR ? 64 : 0) + g * (TE_COLUMNS / 16) + (c >> 4)],
                                     (te_u64)((first_col + c) * col_blocks + (first_row >> 4) + g), &scale);
            *(uint2 *)(turned + c * TE_TURNED + 8 * g) = u;
            turned[c * TE_TURNED + 64 + g] = scale;
        }
    }
    __syncthreads();
    te_i64 bytes = (a.ldc + 1) >> 1;
#pragma unroll 1
    for (int i = t; i < 4 * TE_COLUMNS; i += 256) {
        int c = i >> 2, chunk = i & 3;
        te_i64 n = first_col + c, m = first_row + 32 * chunk;
        if (n >= a.n || m >= a.ldc) continue;
        uint2 lo = *(const uint2 *)(turned + c * TE_TURNED + 16 * chunk),
              hi = *(const uint2 *)(turned + c * TE_TURNED + 16 * chunk + 8);
        te_u32 code[4] = {lo.x, lo.y, hi.x, hi.y};
        te_u8 *to = a.col + n * bytes + (m >> 1);
        if (a.vector_col && m + 32 <= a.ldc) *(uint4 *)to = make_uint4(code[0], code[1], code[2], code[3]);
        else te_nvfp4_bytes(to, code, bytes - (m >> 1), 16);
    }
    for (int i = t; i < 2 * TE_COLUMNS; i += 256) { // tiles reach round_up(n, 128) columns, or further
        int c = i >> 1;
        te_i64 n = first_col + c, group = (first_row >> 4) + 4 * (i & 1);
        if (n >= te_div_up(a.n, 128) * 128 || group >= a.col_groups) continue;
        te_u32 scales = n < a.n ? *(const te_u32 *)(turned + c * TE_TURNED + 64 + 4 * (i & 1)) : 0;
        te_u8 *to = a.col_scale + te__nvfp4_scale_at(n, group, a.col_groups, a.swizzled);
        if (a.vector_col) *(te_u32 *)to = scales;
        else te_nvfp4_bytes(to, &scales, 4, 4);
    }
}

extern "C" __global__ void __launch_bounds__(256, 4)
    te_nvfp4_quantize(const __grid_constant__ te__nvfp4_quantize_kargs a) {
    te_follow();
    __shared__ __align__(16) te_u8 tile[128 * TE_STRIDE];
    __shared__ __align__(16) te_u8 turned[128 * TE_TURNED];
    __shared__ int tile_code[128];
    __shared__ te_nvfp4_tensor of_tensor[2];
    __shared__ float multipliers[2][128];
    te_nvfp4_tile x = {tile, turned, tile_code, of_tensor, multipliers, 0, 0};
    int t = threadIdx.x;
    te_u32 at = blockIdx.x;
    x.place(a, at);
    x.load(a);
    if (a.noop && *a.noop == 1.0f) return;
    if (MEASURE) {
        __shared__ float scratch[32];
        float of_row = 0.0f, of_col = 0.0f;
#pragma unroll 1
        for (;;) {
            te_cp_async_wait<0>();
            __syncthreads();
            x.measure(a, of_row, of_col);
            if (at + gridDim.x >= a.tiles) break;
            at += gridDim.x;
            x.place(a, at);
            __syncthreads();
            x.load(a);
        }
        of_row = te_block_max(of_row, scratch);
        of_col = te_block_max(of_col, scratch);
        if (t == 0) a.part[blockIdx.x] = of_row, a.part[gridDim.x + blockIdx.x] = of_col;
        te_grid_wait(a.counter);
        of_row = of_col = 0.0f;
        for (int b = t; b < gridDim.x; b += 256)
            of_row = fmaxf(of_row, __ldcg(a.part + b)), of_col = fmaxf(of_col, __ldcg(a.part + gridDim.x + b));
        of_row = te_block_max(of_row, scratch);
        of_col = RHT && a.out_col ? te_block_max(of_col, scratch) : of_row;
        if (t < 2) of_tensor[t] = te_nvfp4_tensor_of(t ? of_col : of_row, a.code_max);
        if (t == 0 && blockIdx.x == 0) {
            if (a.out_row) *a.out_row = of_row;
            if (a.out_col) *a.out_col = of_col;
        }
    } else if (t < 2) {
        of_tensor[t] = te_nvfp4_tensor_of(t ? *a.amax_col : *a.amax_row, a.code_max); // has divisions, so is called
                                                                                      // once a block
    }
    __syncthreads();
    multipliers[t >> 7][t & 127] = te_nvfp4_multiplier((te_u8)(t & 127), of_tensor[t >> 7]);
#pragma unroll 1
    for (;;) {
        te_cp_async_wait<0>();
        __syncthreads();
        x.cast(a);
        if (!MEASURE || at < gridDim.x) break;
        at -= gridDim.x;
        x.place(a, at);
        __syncthreads();
        x.load(a);
    }
}
