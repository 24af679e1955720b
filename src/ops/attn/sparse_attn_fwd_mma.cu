// ops/attn/sparse_attn_fwd_mma.cu: the forward pass of sparse attention (sparse_attn_query.cu) by mma.sync, for 512
// channels. A block of eight warps computes 64 heads of one query, 32 entries of its list at a time. Tiles whose
// entries all are no keys are left out.
//
// A warp has 16 heads and half of the channels: Q as operand A, and O, both in registers. So it computes half of each
// score. The two warps of the same heads exchange their halves through shared memory, and both get the same scores.
// Keys are read twice from shared memory, for scores and for sums; the next tile arrives meanwhile.
//
// Options: X_DT: bf16, f16.
//
// Launch: grid: the queries, each times its tiles of 64 heads; block 256, shared memory TE__SPARSE_MMA_SHARED.
//
// Benchmark: "sparse attention forward, mma.sync" in tests/bench/h200.csv.
// te:arch 80
// te:row X_DT=2|3
#include "ops/attn/fragments.cuh"
#include "ops/attn/sparse_tiles.cuh"

enum { KEYS = 32, D = TE__SPARSE_D, TILE = KEYS * te_tile<D>::ROW, STEPS = D / 2 / 16 };

// The next 32 entries of a list that have a key. A lane has the key of entry k + lane, or -1.
struct te_sparse_next {
    int k, key;
    te_u32 mask; // bit e: entry k + e is a key
    // k is n or more if there are no more keys.
    TE_DEV void find(const te__sparse_attn_kargs &a, const int *list, int from) {
        for (k = from; k < a.n; k += KEYS) {
            key = te_sparse_key(a, list, k + (threadIdx.x & 31));
            mask = __ballot_sync(0xffffffffu, key >= 0);
            if (mask) return;
        }
    }
    // Copies the keys to a tile; zeros for entries that are no keys.
    TE_DEV void copy(te_u32 tile, const char *from, te_i64 row_bytes) const {
        const int lane = threadIdx.x & 31;
#pragma unroll
        for (int r = threadIdx.x >> 5; r < KEYS; r += 8) {
            const int of_row = __shfl_sync(0xffffffffu, key, r);
#pragma unroll
            for (int i = 0; i < D / 256; i++)
                te_cp_async16(tile + te_tile<D>::piece(r, 32 * i + lane),
                              from + max(of_row, 0) * row_bytes + 512 * i + 16 * lane, of_row >= 0 ? 16 : 0);
        }
    }
};

// Waits for the other warp of the same 16 heads.
TE_DEV void te_sparse_meet(int heads) { asm volatile("bar.sync %0, 64;" ::"r"(heads + 1) : "memory"); }

extern "C" __global__ void __launch_bounds__(256, 1)
    te_sparse_attn_fwd_mma(const __grid_constant__ te__sparse_attn_kargs a) {
    te_follow();
    extern __shared__ float4 te_shared[];
    const te_u32 keys = te_smem(te_shared), scores = keys + 2 * TILE;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, heads = warp & 3, half = warp >> 2,
              row = 16 * heads + (lane >> 2);
    const te_sparse_item at(a, blockIdx.x);
    const int *list = a.indices + ((te_i64)at.b * a.s_q + at.i) * a.n;
    const char *from = (const char *)a.kv.p + 2 * at.b * a.kv.b;
    const te_reader<D> reader_k(false), reader_v(true);
    te_u32 q[STEPS][4];
    float o[D / 4], m[2] = {-1e30f * TE_LOG2E, -1e30f * TE_LOG2E}, l[2] = {0.0f, 0.0f};
    te_sparse_next now;
    now.find(a, list, 0);
    if (now.k < a.n) now.copy(keys, from, 2 * a.kv.s);
    te_cp_async_commit();
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int h = at.first + row + 8 * r;
        const te_u32 *x =
            (const te_u32 *)((const te_u16 *)a.q.p + te_attn_at(a.q, at.b, h, at.i) + D / 2 * half) + (lane & 3);
#pragma unroll
        for (int i = 0; i < STEPS; i++) {
            q[i][r] = h < a.heads ? x[8 * i] : 0;
            q[i][r + 2] = h < a.heads ? x[8 * i + 4] : 0;
        }
    }
#pragma unroll
    for (int i = 0; i < D / 4; i++) o[i] = 0.0f;
#pragma unroll 1
    for (int stage = 0; now.k < a.n; stage ^= 1) {
        const te_u32 tile = keys + stage * TILE, mask = now.mask;
        float s[16], shrink[2];
        now.find(a, list, now.k + KEYS);
        te_cp_async_wait<0>();
        __syncthreads(); // all copies have arrived, and nobody reads the other tile any more
        if (now.k < a.n) now.copy(keys + (stage ^ 1) * TILE, from, 2 * a.kv.s);
        te_cp_async_commit();
#pragma unroll
        for (int i = 0; i < 16; i++) s[i] = 0.0f;
#pragma unroll
        for (int i = 0; i < STEPS; i++)
#pragma unroll
            for (int j = 0; j < KEYS / 8; j += 2) {
                te_u32 b[4];
                te_ldmatrix4(b, reader_k.at(tile, 8 * j, STEPS * half + i));
                te_mma<X_DT>(s + 4 * j, q[i], b);
                te_mma<X_DT>(s + 4 * j + 4, q[i], b + 2);
            }
        const te_u32 mine = scores + (half * 4 + heads) * 2048 + 16 * lane,
                     other = scores + ((half ^ 1) * 4 + heads) * 2048 + 16 * lane;
#pragma unroll
        for (int i = 0; i < 4; i++)
            te_sts16(mine + 512 * i, make_uint4((te_u32)__float_as_int(s[4 * i]), (te_u32)__float_as_int(s[4 * i + 1]),
                                                (te_u32)__float_as_int(s[4 * i + 2]),
                                                (te_u32)__float_as_int(s[4 * i + 3])));
        te_sparse_meet(heads);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const uint4 x = te_lds16(other + 512 * i);
            s[4 * i] += __int_as_float((int)x.x), s[4 * i + 1] += __int_as_float((int)x.y);
            s[4 * i + 2] += __int_as_float((int)x.z), s[4 * i + 3] += __int_as_float((int)x.w);
        }
        if (mask != ~0u) te_sparse_hide(s, mask);
        te_sparse_softmax(s, m, l, shrink, a.scale2);
        if (__any_sync(0xffffffffu, shrink[0] != 1.0f || shrink[1] != 1.0f)) {
#pragma unroll
            for (int i = 0; i < D / 4; i++) o[i] *= shrink[i >> 1 & 1];
        }
#pragma unroll
        for (int k = 0; k < KEYS / 16; k++) {
            te_u32 p[4];
            te_pack_a<X_DT>(p, s + 8 * k, s + 8 * k + 4);
#pragma unroll
            for (int i = 0; i < STEPS; i++) {
                te_u32 b[4];
                te_ldmatrix4_trans(b, reader_v.at(tile, 16 * k, STEPS * half + i));
                te_mma<X_DT>(o + 8 * i, p, b);
                te_mma<X_DT>(o + 8 * i + 4, p, b + 2);
            }
        }
    }
    te_sparse_finish(a, at, row, half, o, m, l);
}
