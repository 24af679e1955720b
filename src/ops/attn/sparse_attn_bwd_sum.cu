// ops/attn/sparse_attn_bwd_sum.cu: adds up the partial gradients that sparse_attn_bwd_hopper.cu has stored. A block
// owns one key. It goes through the slots that name the key (sparse_attn_list.cu) in one part of the queries. Each of
// its four groups of threads takes every fourth slot. a.sums has the sums of the earlier parts. The last part stores
// the gradient. The order of additions depends only on the sequence's lists and on the size of a part.
//
// Options: X_DT: bf16, f16.
//
// Launch: grid: (b_end - b_begin) * s_kv, block 256.
//
// Benchmark: "sparse attention backward" in tests/bench/h200.csv.
// te:arch 80
// te:row X_DT=2|3
#include "ops/attn/sparse.cuh"

extern "C" __global__ void __launch_bounds__(256, 4)
    te_sparse_attn_bwd_sum(const __grid_constant__ te__sparse_attn_kargs a) {
    te_follow();
    enum { D = TE__SPARSE_D, LANES = D / 8, GROUPS = 4 };
    __shared__ float sums[GROUPS][D];
    const int of = (int)(blockIdx.x / (te_u32)a.s_kv), b = a.b_begin + of,
              j = (int)(blockIdx.x - (te_u32)of * (te_u32)a.s_kv), group = threadIdx.x / LANES,
              lane = threadIdx.x % LANES;
    const bool last = a.i_end == a.s_q;
    const int chunks = a.i_begin / a.part * a.cuts; // of the parts before
    const int *cursor = a.cursor + ((te_i64)b * a.chunks + chunks) * a.s_kv + j,
              *list = a.list + (te_i64)b * a.s_q * a.n;
    const int start = a.start[(te_i64)b * (a.s_kv + 1) + j], begin = start + (chunks ? cursor[-(te_i64)a.s_kv] : 0),
              end = start + cursor[(te_i64)(min(chunks + a.cuts, a.chunks) - chunks - 1) * a.s_kv];
    float sum[8] = {};
    if (begin == end && !last) return;
    const te_i64 rows = (te_i64)(a.i_end - a.i_begin) * a.n, tiles = rows * (a.b_end - a.b_begin);
#pragma unroll 1
    for (int tile = 0; tile < a.head_tiles; tile++) {
        const uint4 *from =
            (const uint4 *)a.partial + (tile * tiles + of * rows - (te_i64)a.i_begin * a.n) * LANES + lane;
#pragma unroll 8
        for (int e = begin + group; e < end; e += GROUPS) {
            const uint4 x = from[(te_i64)list[e] * LANES];
            const te_u32 w[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const te_u16 y = (te_u16)(w[i / 2] >> 16 * (i % 2));
                sum[i] += X_DT == 3 ? te_bf16_to_f32(y) : te_f16_to_f32(y);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < 8; i++) sums[group][8 * lane + i] = sum[i];
    __syncthreads();
    float *so_far = a.sums + ((te_i64)b * a.s_kv + j) * D;
#pragma unroll
    for (int c = threadIdx.x; c < D; c += 256) {
        float y = begin > start ? so_far[c] : 0.0f;
#pragma unroll
        for (int i = 0; i < GROUPS; i++) y += sums[i][c];
        if (last) te_sparse_store(a.dkv.p, te_attn_at(a.dkv, b, 0, j) + c, X_DT, y);
        else so_far[c] = y;
    }
}
