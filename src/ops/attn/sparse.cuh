// ops/attn/sparse.cuh: the tiles of sparse attention: a block of four warps owns eight heads of one query, two a warp, and walks over the keys of the
// query's list, a tile at a time, in f32. Scores: each lane has one of the tile's keys. Sums over the keys: each lane has channels lane + 32 t.
//
// Options: X_DT: te_dtype of q, kv, o and their gradients, if they all have one.
#pragma once
#include "ops/attn/attn.cuh"

#ifdef X_DT
#define TE_SPARSE_DT(x) X_DT
#else
#define TE_SPARSE_DT(x) (x).dt
#endif
#define TE_SPARSE_MINE 2                            // heads of a warp
#define TE_SPARSE_CHANNELS (TE__SPARSE_MAX_D / 32) // of a lane

struct te_sparse_place {
    int b, i, first; // first: the block's first head
    TE_DEV te_sparse_place(const te__sparse_attn_kargs &a) {
        const te_u32 tiles = (te_u32)(a.heads + TE__SPARSE_ROWS - 1) / TE__SPARSE_ROWS, row = blockIdx.x / tiles; // blocks of one query read the same keys
        first = (int)(blockIdx.x - row * tiles) * TE__SPARSE_ROWS;
        b = (int)(row / (te_u32)a.s_q);
        i = (int)(row - (te_u32)b * (te_u32)a.s_q);
    }
    TE_DEV te_i64 row(const te__sparse_attn_kargs &a, int h) const { return ((te_i64)b * a.heads + h) * a.s_q + i; } // of lse, lse2 and delta
};

// The key that slot k of a query's list names, -1 for none.
TE_DEV int te_sparse_key(const te__sparse_attn_kargs &a, const int *list, int k) {
    const int key = k < a.n ? list[k] : -1;
    return key >= 0 && key < a.s_kv ? key : -1;
}

// Eight heads of a query; channels from d on are 0, and so are heads that are not there.
TE_DEV void te_sparse_heads(float *dst, int ld, const te__attn_view &x, const te_sparse_place &at, int heads, int d) {
    for (int c = threadIdx.x; c < TE__SPARSE_ROWS * ld; c += 128) {
        const int r = c / ld, channel = c - r * ld, h = at.first + r;
        dst[c] = h < heads && channel < d ? te_load(x.p, te_attn_at(x, at.b, h, at.i) + channel, TE_SPARSE_DT(x)) : 0.0f;
    }
}

// The keys of slots k0 .. k0 + tile - 1 into shared memory; those of no key become 0. Returns this lane's key. Between two barriers, but where no slot has a key.
TE_DEV int te_sparse_keys(float *dst, int ld, const te__sparse_attn_kargs &a, const int *list, int b, int k0) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, mine = lane < a.tile ? te_sparse_key(a, list, k0 + lane) : -1;
    if (!__any_sync(0xffffffffu, mine >= 0)) return -1; // alike in all warps
    __syncthreads();
    for (int r = warp; r < a.tile; r += 4) {
        const int key = __shfl_sync(0xffffffffu, mine, r);
        const te_i64 from = te_attn_at(a.kv, b, 0, key);
#pragma unroll 1
        for (int c = lane; c < ld; c += 32) dst[r * ld + c] = key >= 0 && c < a.d ? te_load(a.kv.p, from + c, TE_SPARSE_DT(a.kv)) : 0.0f;
    }
    __syncthreads();
    return mine;
}

// out[r] = the product of row r of `mine` (same for all lanes) and this lane's key; d channels, `mine` padded with zeros to four.
TE_DEV void te_sparse_products(float out[TE_SPARSE_MINE], const float *mine, int ld, const float *key, int d) {
    out[0] = out[1] = 0.0f;
#pragma unroll 1
    for (int c = 0; c < d; c += 4) {
        const float4 y = *(const float4 *)(key + c);
#pragma unroll
        for (int r = 0; r < TE_SPARSE_MINE; r++) {
            const float4 x = *(const float4 *)(mine + r * ld + c);
            out[r] += x.x * y.x;
            out[r] += x.y * y.y;
            out[r] += x.z * y.z;
            out[r] += x.w * y.w;
        }
    }
}

// acc[r][t] += sum over the tile's keys j of weight[j][r] * keys[j][lane + 32 t].
TE_DEV void te_sparse_gather(float acc[TE_SPARSE_MINE][TE_SPARSE_CHANNELS], const float *weight, const float *keys, int ld, int tile, int d) {
    const int lane = threadIdx.x & 31;
#pragma unroll 1
    for (int j = 0; j < tile; j++) {
        const float2 w = *(const float2 *)(weight + j * TE_SPARSE_MINE);
#pragma unroll
        for (int t = 0; t < TE_SPARSE_CHANNELS; t++)
            if (32 * t < d) {
                const float x = keys[j * ld + lane + 32 * t];
                acc[0][t] += w.x * x;
                acc[1][t] += w.y * x;
            }
    }
}

TE_DEV void te_sparse_put(const te__attn_view &x, const te_sparse_place &at, int first, int heads, int d, const float acc[TE_SPARSE_MINE][TE_SPARSE_CHANNELS],
                          const float scale[TE_SPARSE_MINE]) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int r = 0; r < TE_SPARSE_MINE; r++)
#pragma unroll
        for (int t = 0; t < TE_SPARSE_CHANNELS; t++)
            if (first + r < heads && lane + 32 * t < d) te_store(x.p, te_attn_at(x, at.b, first + r, at.i) + lane + 32 * t, TE_SPARSE_DT(x), acc[r][t] * scale[r]);
}
