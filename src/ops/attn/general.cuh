// ops/attn/general.cuh: the tiles of the general attention kernels. These kernels compute in f32. The tensors can have
// any float format, any strides, and head sizes up to 1024.
//
// A block of four warps owns 16 queries (keys for dK and dV), four for each warp. It reads 32 rows of the opposite
// tensor at a time. For scores, each lane has one of the 32 rows. For sums over these rows, each lane has channels lane
// + 32 t.
//
// WIDE: heads of more than TE__ATTN_CHUNK channels are processed in chunks. Products are summed over the chunks. Block
// y of the grid writes chunk y of the result. Shared memory holds one chunk of the 16 rows and one of the 32 rows.
//
// Option: X_WIDE (0, 1; not defined: the kernel tests the head sizes).
#pragma once
#include "ops/attn/attn.cuh"

#define TE_MINE 4                         // rows of a warp
#define TE_CHANNELS (TE__ATTN_CHUNK / 32) // channels of a lane

#ifdef X_WIDE
#define WIDE X_WIDE
#else
#define WIDE (max(a.d, a.d_v) > TE__ATTN_CHUNK)
#endif

// Copies rows first .. first + n - 1 of one head to shared memory as f32, `ld` floats apart. Missing rows and channels
// become 0. `paged` is for keys in pages. `factors`: x has codes, and its rows have factors.
TE_DEV_CALL void te_attn_stage(float *dst, int ld, const te__attn_view &x, int b, int h, int first, int n, int end,
                               int d, const te__attn_extra *paged = 0, const te__attn_view *factors = 0) {
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    for (int r = warp; r < n; r += TE__ATTN_ROWS / TE_MINE) {
        int row = first + r;
        te_i64 page = b;
        if (EXTRA && paged && paged->pages && first + r < end) page = te__attn_page(paged, b, first + r, &row);
        const te_i64 from = page * x.b + h * x.h + row * x.s;
        float factor = 1.0f;
        if (EXTRA && factors && factors->p && first + r < end)
            factor =
                te__e8m0_to_f32(((const te_u8 *)factors->p)[page * factors->b + h * factors->h + row * factors->s]);
#pragma unroll 1
        for (int c = lane; c < ld; c += 32)
            dst[r * ld + c] = first + r < end && c < d ? te_load(x.p, from + c, x.dt) * factor : 0.0f;
    }
}

// Computes out[r] = (row r of `mine`) . (this lane's row of `theirs`). Rows have d channels, then zeros up to a
// multiple of four.
TE_DEV void te_attn_products(float out[TE_MINE], const float *mine, int ld_mine, const float *theirs, int d) {
#pragma unroll
    for (int r = 0; r < TE_MINE; r++) out[r] = 0.0f;
#pragma unroll 2
    for (int c = 0; c < d; c += 4) {
        float4 y = *(const float4 *)(theirs + c);
#pragma unroll
        for (int r = 0; r < TE_MINE; r++) {
            float4 x = *(const float4 *)(mine + r * ld_mine + c);
            out[r] += x.x * y.x;
            out[r] += x.y * y.y;
            out[r] += x.z * y.z;
            out[r] += x.w * y.w;
        }
    }
}

// Returns x from channel c on.
TE_DEV te__attn_view te_attn_channels(const te__attn_view &x, int c) {
    te__attn_view y = x;
    y.p = (char *)x.p + (te_i64)c * te_attn_bytes(x.dt);
    return y;
}
// Returns how many of the d channels are in the chunk from channel c on; 0 or a negative number means none.
TE_DEV int te_attn_chunk(int d, int c) { return min(TE__ATTN_CHUNK, d - c); }

// Does the work of te_attn_products for wide heads. The operands are 16 rows of x, from row `first` of head hx on, and
// 32 rows of y, from row `other` of head hy on.
TE_DEV_CALL void te_attn_products_wide(float out[TE_MINE], float *mine, const te__attn_view &x, int hx, int first,
                                       int end_x, float *theirs, const te__attn_view &y, int hy, int other, int end_y,
                                       int b, int d, const te__attn_extra *paged = 0,
                                       const te__attn_view *factors = 0) {
    const int ld_mine = TE__ATTN_ROW(TE__ATTN_CHUNK), ld = TE__ATTN_LANE_ROW(TE__ATTN_CHUNK), warp = threadIdx.x >> 5,
              lane = threadIdx.x & 31;
#pragma unroll
    for (int r = 0; r < TE_MINE; r++) out[r] = 0.0f;
#pragma unroll 1
    for (int c = 0; c < d; c += TE__ATTN_CHUNK) {
        float part[TE_MINE];
        const int n = te_attn_chunk(d, c);
        __syncthreads();
        te_attn_stage(mine, ld_mine, te_attn_channels(x, c), b, hx, first, TE__ATTN_ROWS, end_x, n);
        te_attn_stage(theirs, ld, te_attn_channels(y, c), b, hy, other, TE__ATTN_LANES, end_y, n, paged,
                      factors);
        __syncthreads();
        te_attn_products(part, mine + warp * TE_MINE * ld_mine, ld_mine, theirs + lane * ld, n);
#pragma unroll
        for (int r = 0; r < TE_MINE; r++) out[r] += part[r];
    }
}
// Copies channels c .. c + n - 1 of 32 rows of y to `theirs`, for te_attn_gather. The first of these rows is row
// `other` of head hy.
TE_DEV void te_attn_stage_wide(float *theirs, const te__attn_view &y, int hy, int other, int end_y, int b, int c, int n,
                               const te__attn_extra *paged = 0, const te__attn_view *factors = 0) {
    __syncthreads();
    te_attn_stage(theirs, TE__ATTN_LANE_ROW(TE__ATTN_CHUNK), te_attn_channels(y, c), b, hy, other, TE__ATTN_LANES,
                  end_y, n, paged, factors);
    __syncthreads();
}

// acc[r][t] += sum over the 32 rows j of weight[j][r] * rows[j][lane + 32 t].
TE_DEV void te_attn_gather(float acc[TE_MINE][TE_CHANNELS], const float *weight, const float *rows, int ld, int d) {
    int lane = threadIdx.x & 31;
#pragma unroll 2
    for (int j = 0; j < TE__ATTN_LANES; j++) {
        float4 w = *(const float4 *)(weight + j * TE_MINE);
#pragma unroll
        for (int t = 0; t < TE_CHANNELS; t++) {
            if (32 * t < d) {
                float x = rows[j * ld + lane + 32 * t];
                acc[0][t] += w.x * x;
                acc[1][t] += w.y * x;
                acc[2][t] += w.z * x;
                acc[3][t] += w.w * x;
            }
        }
    }
}

TE_DEV void te_attn_clear(float acc[TE_MINE][TE_CHANNELS]) {
#pragma unroll
    for (int r = 0; r < TE_MINE; r++)
#pragma unroll
        for (int t = 0; t < TE_CHANNELS; t++) acc[r][t] = 0.0f;
}

// Stores the lanes' sums times `scale` to the rows first .. first + 3 of head h.
TE_DEV void te_attn_put(const te__attn_view &x, int b, int h, int first, int end, int d,
                        const float acc[TE_MINE][TE_CHANNELS], float scale) {
    int lane = threadIdx.x & 31;
#pragma unroll
    for (int r = 0; r < TE_MINE; r++)
#pragma unroll
        for (int t = 0; t < TE_CHANNELS; t++)
            if (first + r < end && lane + 32 * t < d)
                te_store(x.p, te_attn_at(x, b, h, first + r) + lane + 32 * t, x.dt, acc[r][t] * scale);
}
