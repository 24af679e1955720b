// ops/attn/sparse.cuh: the tiles of sparse attention, in f32. A block of four warps computes eight heads of one query.
// It goes through the query's list of keys, one tile at a time. For scores, a lane has one key. For sums over keys, it
// has channels lane + 32 t.
//
// X_DT: the te_dtype of q, kv, o and their gradients, set only if all have the same.
#pragma once
#include "ops/attn/attn.cuh"

#ifdef X_DT
#define TE_SPARSE_DT(x) X_DT
#define TE_SPARSE_UNROLL 4
#else
#define TE_SPARSE_DT(x) (x).dt
#define TE_SPARSE_UNROLL 1
#endif
#define TE_SPARSE_MINE 2 // heads of a warp
#ifdef TE_SMALL
#define TE_SPARSE_WIDE 1 // number of channels that a lane of te_sparse_gather sums at a time
#else
#define TE_SPARSE_WIDE 4
#endif

// Embedded PTX (TE_SMALL) must be small. There, loads and stores are calls of two functions, which support only f32,
// bf16 and f16.
#ifdef TE_SMALL
static __device__ __noinline__ float te_sparse_load(const void *p, te_i64 i, int dt) {
    if (dt == TE_F32) return ((const float *)p)[i];
    const te_u16 h = ((const te_u16 *)p)[i];
    return dt == TE_BF16 ? te_bf16_to_f32(h) : te_f16_to_f32(h);
}
static __device__ __noinline__ void te_sparse_store(void *p, te_i64 i, int dt, float f) {
    if (dt == TE_F32) ((float *)p)[i] = f;
    else ((te_u16 *)p)[i] = dt == TE_BF16 ? te_f32_to_bf16(f) : te_f32_to_f16(f);
}
#else
TE_DEV float te_sparse_load(const void *p, te_i64 i, int dt) { return te_load(p, i, dt); }
TE_DEV void te_sparse_store(void *p, te_i64 i, int dt, float f) { te_store(p, i, dt, f); }
#endif

struct te_sparse_place {
    int b, i, first; // first: the block's first head
    TE_DEV te_sparse_place(const te__sparse_attn_kargs &a) {
        // the blocks of one query have neighbouring numbers, so that the keys that they share stay in the L2 cache
        const te_u32 tiles = (te_u32)(a.heads + TE__SPARSE_ROWS - 1) / TE__SPARSE_ROWS, row = blockIdx.x / tiles;
        first = (int)(blockIdx.x - row * tiles) * TE__SPARSE_ROWS;
        b = (int)(row / (te_u32)a.s_q);
        i = (int)(row - (te_u32)b * (te_u32)a.s_q);
    }
    // Returns the position of head h in lse, lse2 and delta.
    TE_DEV te_i64 row(const te__sparse_attn_kargs &a, int h) const { return ((te_i64)b * a.heads + h) * a.s_q + i; }
};

// Returns entry k of a query's list of keys, or -1 if the entry is not a valid key.
TE_DEV int te_sparse_key(const te__sparse_attn_kargs &a, const int *list, int k) {
    const int key = k < a.n ? list[k] : -1;
    return key >= 0 && key < a.s_kv ? key : -1;
}

// Copies eight heads of a query to shared memory as f32. Missing heads and channels become 0.
TE_DEV void te_sparse_heads(float *dst, int ld, const te__attn_view &x, const te_sparse_place &at, int heads, int d) {
#pragma unroll 1
    for (int c = threadIdx.x; c < TE__SPARSE_ROWS * ld; c += 128) {
        const int r = c / ld, channel = c - r * ld, h = at.first + r;
        dst[c] = h < heads && channel < d ? te_sparse_load(x.p, te_attn_at(x, at.b, h, at.i) + channel, TE_SPARSE_DT(x))
                                          : 0.0f;
    }
}

// Copies the keys of a list's entries k0 .. k0 + tile - 1 to dst; zeros if an entry has no key. If no entry has a key,
// this function copies nothing and passes no barrier. Otherwise it passes one before and one after the copy. Returns
// the key of entry k0 + lane, or -1.
TE_DEV int te_sparse_keys(float *dst, int ld, const te__sparse_attn_kargs &a, const int *list, int b, int k0) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31,
              mine = lane < a.tile ? te_sparse_key(a, list, k0 + lane) : -1;
    if (!__any_sync(0xffffffffu, mine >= 0)) return -1; // the same in all warps
    __syncthreads();
#pragma unroll 1
    for (int r = warp; r < a.tile; r += 4) {
        const int key = __shfl_sync(0xffffffffu, mine, r);
        const te_i64 from = te_attn_at(a.kv, b, 0, key);
#pragma unroll 1
        for (int c = lane; c < ld; c += 32)
            dst[r * ld + c] = key >= 0 && c < a.d ? te_sparse_load(a.kv.p, from + c, TE_SPARSE_DT(a.kv)) : 0.0f;
    }
    __syncthreads();
    return mine;
}

// Computes out[r] = the dot product of row r of `mine` and this lane's key, over d channels. `mine` has zeros up to a
// multiple of four.
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

// Computes acc[r][c] = acc[r][c] * shrink[r] + sum over the tile's keys j of weight[j][r] * keys[j][c], for c < d. Rows
// of acc are ld_acc floats apart.
TE_DEV void te_sparse_gather(float *acc, int ld_acc, const float shrink[TE_SPARSE_MINE], const float *weight,
                             const float *keys, int ld, int tile, int d) {
#pragma unroll 1
    for (int first = threadIdx.x & 31; first < d; first += 32 * TE_SPARSE_WIDE) {
        float sum[TE_SPARSE_MINE][TE_SPARSE_WIDE] = {};
#pragma unroll 1
        for (int j = 0; j < tile; j++) {
            const float2 w = *(const float2 *)(weight + j * TE_SPARSE_MINE);
#pragma unroll
            for (int t = 0; t < TE_SPARSE_WIDE; t++) {
                const float x = first + 32 * t < d ? keys[j * ld + first + 32 * t] : 0.0f;
                sum[0][t] += w.x * x;
                sum[1][t] += w.y * x;
            }
        }
#pragma unroll
        for (int t = 0; t < TE_SPARSE_WIDE; t++)
#pragma unroll
            for (int r = 0; r < TE_SPARSE_MINE; r++)
                if (first + 32 * t < d)
                    acc[r * ld_acc + first + 32 * t] = acc[r * ld_acc + first + 32 * t] * shrink[r] + sum[r][t];
    }
}

// Multiplies the sums of a warp's heads by `scale` and stores them.
TE_DEV void te_sparse_put(const te__attn_view &x, const te_sparse_place &at, int first, int heads, int d,
                          const float *acc, int ld_acc, const float scale[TE_SPARSE_MINE]) {
#pragma unroll 1
    for (int c = threadIdx.x & 31; c < d; c += 32)
#pragma unroll
        for (int r = 0; r < TE_SPARSE_MINE; r++)
            if (first + r < heads)
                te_sparse_store(x.p, te_attn_at(x, at.b, first + r, at.i) + c, TE_SPARSE_DT(x),
                                acc[r * ld_acc + c] * scale[r]);
}
