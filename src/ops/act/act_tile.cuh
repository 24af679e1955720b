// ops/act/act_tile.cuh: the elements of thread t in a tile of 128 rows and 64 columns, and the stores of rows and of
// their transpose. This file must not depend on the activation.
//
//            64 columns (tx = t % 8: 8 each)
//          +-------------------------+
//   128    | ty = t / 8: 4 rows      |
//   rows   |    x eight columns      |
//          +-------------------------+
#pragma once
#include "device/transpose.cuh"
#include "device/vector.cuh"

#ifdef ACT
constexpr int te_act_unroll = 8;
#else
constexpr int te_act_unroll = 1; // not unrolled: the kernel without options has code for all formats and must stay
                                 // small
#endif

struct te_act_place {
    te_u32 tile_m;
    te_i64 first_row, first_col, row, col;
    TE_DEV te_act_place(te_u32 tiles_n) {
        tile_m = blockIdx.x / tiles_n;
        first_row = (te_i64)tile_m * 128, first_col = (te_i64)(blockIdx.x - tile_m * tiles_n) * TE_TILE_COLUMNS;
        row = first_row + (threadIdx.x >> 3) * 4, col = first_col + (threadIdx.x & 7) * 8;
    }
};

// Loads four rows of eight elements from p [.., ld], beginning at element `at`. Rows from number `rows` on and columns
// from number `there` on are not loaded, and become 0.
template <int FORMAT>
TE_DEV void te_act_load(const void *p, te_i64 at, te_i64 ld, int dt, int rows, te_i64 there, bool vector,
                        te_raw<FORMAT> v[4]) {
#ifdef ACT
    if (vector && rows == 4 && there >= 8) {
#pragma unroll
        for (int r = 0; r < 4; r++) v[r] = te_raw_load<FORMAT>(p, at + r * ld, dt);
    } else {
#pragma unroll
        for (int r = 0; r < 4; r++) v[r] = te_raw_load_part<FORMAT>(p, at + r * ld, dt, r < rows ? there : 0);
    }
#else
    (void)vector;
#pragma unroll 1
    for (int i = 0; i < 32; i++)
        v[i >> 3].w[i & 7] =
            i >> 3 < rows && (i & 7) < there ? __float_as_uint(te_load(p, at + (i >> 3) * ld + (i & 7), dt)) : 0;
#endif
}

// Stores eight FP8 codes of a row at address `to`, or only the first `there` codes if `there` is less than 8.
TE_DEV void te_act_store_codes(te_u8 *to, te_i64 there, bool vector, const te_u32 code[2]) {
    if (vector && there >= 8) {
        *(uint2 *)to = make_uint2(code[0], code[1]);
    } else {
#pragma unroll
        for (int k = 0; k < 8; k++)
            if (k < there) to[k] = (te_u8)(code[k >> 2] >> (8 * (k & 3)));
    }
}
// Transposes the codes of a thread's four rows, and writes them to the tile in shared memory.
TE_DEV void te_act_turn(te_u32 *tile, const te_u32 code[4][2]) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
        te_u32 in[4] = {code[0][h], code[1][h], code[2][h], code[3][h]}, out[4];
        te_transpose_bytes(in, out);
#pragma unroll
        for (int j = 0; j < 4; j++) te_tile_put(tile, threadIdx.x & 7, threadIdx.x >> 3, 4 * h + j, out[j]);
    }
}

TE_DEV float te_act_rounded(float v, int dt) {
    return dt == TE_BF16 ? te_bf16_to_f32(te_f32_to_bf16(v)) : dt == TE_F16 ? te_f16_to_f32(te_f32_to_f16(v)) : v;
}

// Raises *amax to the warp's maximum of `largest`, rounded to dt. `seen`, an earlier value of *amax, avoids atomic
// operations. All 32 threads must call this function.
TE_DEV void te_act_amax(float *amax, float seen, float largest, int dt) {
    largest = te_act_rounded(largest, dt);
    // non-negative floats have the same order as their bits
    largest = __uint_as_float(__reduce_max_sync(0xffffffffu, __float_as_uint(largest)));
    if ((threadIdx.x & 31) == 0 && largest > seen && largest > *(volatile float *)amax) te_atomic_amax(amax, largest);
}
