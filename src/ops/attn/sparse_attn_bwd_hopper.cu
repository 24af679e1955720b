// ops/attn/sparse_attn_bwd_hopper.cu: the backward pass of sparse attention (sparse_attn_query.cu) by wgmma, for 512
// channels. A block multiplies 64 heads of one query by tiles of 64 keys:
//
//   S, dP [64, 32]         = Q K^T, dO K^T      each warpgroup has 32 keys; P and dS go to shared memory
//   dQ [64, 256]          += dS K               each warpgroup has half of the channels, here and below
//   partial [64 keys, 256] = dS^T Q + P^T dO    stored in device memory, for sparse_attn_bwd_sum.cu
//
// Many queries read a key, in no known order. The partial gradient of each is stored, in the format of the gradient,
// and sparse_attn_bwd_sum.cu adds them up in a fixed order. Atomic additions would have another order in each run.
//
// P and dS are multiplied by 64, which is exact, so that dS of f16 is no denormal number. dS has the scale of the
// scores.
//
// The next tile of keys is gathered while the consumers compute and store the partial gradients.
//
// Options: X_DT: bf16, f16.
//
// Launch: grid: any number of blocks, block 384, shared memory TE__SPARSE_HOPPER_SHARED(1).
//
// Benchmark: "sparse attention backward" in tests/bench/h200.csv.
// te:arch 90a
// te:row X_DT=2|3
#include "ops/attn/sparse_hopper.cuh"

#define TE_SPARSE_LOG_FACTOR 6
#define TE_SPARSE_FACTOR (1 << TE_SPARSE_LOG_FACTOR)

// Returns the dot product of two pieces of 16 bytes.
TE_DEV float te_sparse_dot(uint4 x, uint4 y) {
    const te_u32 u[4] = {x.x, x.y, x.z, x.w}, v[4] = {y.x, y.y, y.z, y.w};
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const te_u16 p = (te_u16)(u[i / 2] >> 16 * (i % 2)), q = (te_u16)(v[i / 2] >> 16 * (i % 2));
        sum += X_DT == 3 ? te_bf16_to_f32(p) * te_bf16_to_f32(q) : te_f16_to_f32(p) * te_f16_to_f32(q);
    }
    return sum;
}
// Computes lse2 and delta of the query's heads, and stores them in device memory and, at `rows`, in shared memory:
// lse2 of 64 heads, then delta. A warp has eight heads. Missing heads have lse2 = +inf, so that their P is 0.
TE_DEV void te_sparse_rows(const te__sparse_attn_kargs &a, const te_sparse_item &at, te_u32 rows) {
    const int warp = (threadIdx.x >> 5) - 4, lane = threadIdx.x & 31;
#pragma unroll 4
    for (int i = 0; i < 8; i++) {
        const int r = 8 * warp + i, h = at.first + r;
        float lse2 = TE_INF, delta = 0.0f;
        if (h < a.heads) {
            const uint4 *o = (const uint4 *)((const te_u16 *)a.o.p + te_attn_at(a.o, at.b, h, at.i)) + lane,
                        *g = (const uint4 *)((const te_u16 *)a.d_o.p + te_attn_at(a.d_o, at.b, h, at.i)) + lane;
            const te_i64 row = ((te_i64)at.b * a.heads + h) * a.s_q + at.i;
            delta = te_warp_sum(te_sparse_dot(o[0], g[0]) + te_sparse_dot(o[32], g[32]));
            lse2 = a.lse[row] * TE_LOG2E;
            if (lse2 == -TE_INF) lse2 = TE_INF;
            if (lane == 0) a.lse2[row] = lse2, a.delta[row] = delta;
        }
        if (lane == 0) {
            te_sts4(rows + 4 * r, (te_u32)__float_as_int(lse2));
            te_sts4(rows + 256 + 4 * r, (te_u32)__float_as_int(delta));
        }
    }
}
// Stores a warpgroup's 64 x 32 accumulators in a panel, from column 32 * half on.
TE_DEV void te_sparse_stage(te_u32 panel, const float (&x)[16], int half) {
    const int lane = threadIdx.x & 31, row = (threadIdx.x >> 5 & 3) * 16 + (lane & 15);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        te_u32 w[4];
#pragma unroll
        for (int j = 0; j < 4; j++) w[j] = te_pack16(x[8 * i + 2 * j], x[8 * i + 2 * j + 1]);
        te_stmatrix4(panel + te_swizzled(row, 4 * half + 2 * i + (lane >> 4)), w);
    }
}

extern "C" __global__ void __launch_bounds__(384, 1)
    te_sparse_attn_bwd_hopper(const __grid_constant__ te__sparse_attn_kargs a) {
    extern __shared__ __align__(1024) char te_shared[];
    const te_u32 q = te_smem(te_shared), g = q + TE__SPARSE_HOPPER_TILE, keys = g + TE__SPARSE_HOPPER_TILE,
                 staged = keys + TE__SPARSE_HOPPER_TILE, rows = staged + 4 * SPARSE_PANEL;
    const te_sparse_pipe<1> pipe(rows + 512);
    const int group = __shfl_sync(TE_ALL, threadIdx.x >> 7, 0);
    if (threadIdx.x == 0) pipe.init();
    __syncthreads();
    te_follow();
    if (group == 0) {
        te_registers_down<72>();
        te_sparse_produce<1, true>(a, pipe, q, keys);
        return;
    }
    te_registers_up<216>();
    const int warp = __shfl_sync(TE_ALL, threadIdx.x >> 5 & 3, 0), lane = threadIdx.x & 31,
              row = 16 * warp + (lane >> 2), half = group - 1;
    const te_u32 works = te_sparse_item::count(a);
    te_queue<1> from;
    const float by[2] = {1.0f / TE_SPARSE_FACTOR, 1.0f / TE_SPARSE_FACTOR};
    int parity = 0, turn = 0; // turn: P and dS have two places, so that one barrier for each tile is enough
#pragma unroll 1
    for (te_u32 work = blockIdx.x; work < works; work += gridDim.x, parity ^= 1) {
        const te_sparse_item at(a, work);
        const int partial = (at.tile * (a.i_end - a.i_begin) * (a.b_end - a.b_begin) + at.at) * a.n; // its first row
        float dq[128];
        bool more;
        te_meet<256>(1); // nobody reads the rows of the query before any more
        te_sparse_rows(a, at, rows);
        te_meet<256>(1);
#pragma unroll
        for (int i = 0; i < 128; i++) dq[i] = 0.0f;
        te_mbar_wait(pipe.q_full, parity);
#pragma unroll 1
        do {
            te_sparse_wait(pipe, from);
            te_u32 base = q;
            asm volatile("" : "+r"(base)); // what follows is computed again for each tile, which saves registers
            const te_u64 d_q = te_wgmma_desc(base, SPARSE_PANEL), d_g = d_q + (TE__SPARSE_HOPPER_TILE >> 4),
                         d_keys = d_q + (2 * TE__SPARSE_HOPPER_TILE >> 4), d_k = d_keys + half * (32 * 128 >> 4),
                         d_v = d_keys + half * (4 * SPARSE_PANEL >> 4),
                         d_p = d_q + ((3 * TE__SPARSE_HOPPER_TILE + turn * 2 * SPARSE_PANEL) >> 4),
                         d_ds = d_p + (SPARSE_PANEL >> 4);
            {
                float s[16], dp[16];
                te_wgmma_fence();
                te_multiply<0, 0, true>(s, d_q, d_k);
#pragma unroll
                for (int i = 1; i < 4 * SPARSE_PANELS; i++)
                    te_multiply<0, 0, false>(s, d_q + i / 4 * (SPARSE_PANEL >> 4) + i % 4 * 2,
                                             d_k + i / 4 * (SPARSE_PANEL >> 4) + i % 4 * 2);
                te_wgmma_commit();
                te_multiply<0, 0, true>(dp, d_g, d_k);
#pragma unroll
                for (int i = 1; i < 4 * SPARSE_PANELS; i++)
                    te_multiply<0, 0, false>(dp, d_g + i / 4 * (SPARSE_PANEL >> 4) + i % 4 * 2,
                                             d_k + i / 4 * (SPARSE_PANEL >> 4) + i % 4 * 2);
                te_wgmma_commit();
                te_wgmma_wait<1>();
                te_wgmma_keep(s);
                te_sparse_hide(s, te_lds4(pipe.records + 4 * half));
                float lse2[2], delta[2];
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    lse2[r] = __int_as_float((int)te_lds4(rows + 4 * (row + 8 * r))) - TE_SPARSE_LOG_FACTOR;
                    delta[r] = __int_as_float((int)te_lds4(rows + 256 + 4 * (row + 8 * r)));
                }
#pragma unroll
                for (int i = 0; i < 16; i++) s[i] = te_exp2(fmaf(s[i], a.scale2, -lse2[i >> 1 & 1]));
                te_wgmma_wait<0>();
                te_wgmma_keep(dp);
#pragma unroll
                for (int i = 0; i < 16; i++) dp[i] = s[i] * ((dp[i] - delta[i >> 1 & 1]) * a.scale);
                // nobody reads P and dS of the tile before the last any more
                te_sparse_stage(staged + turn * 2 * SPARSE_PANEL, s, half);
                te_sparse_stage(staged + turn * 2 * SPARSE_PANEL + SPARSE_PANEL, dp, half);
            }
            te_async_fence();
            te_meet<256>(1);
            const uint4 record = te_lds16(pipe.records);
            more = __shfl_sync(TE_ALL, record.w, 0) != 0;
            te_wgmma_fence();
#pragma unroll
            for (int i = 0; i < 4; i++) te_multiply<0, 1, false>(dq, d_ds + 2 * i, d_v + 128 * i);
            te_wgmma_commit();
            te_wgmma_wait<0>();
            te_wgmma_keep(dq);
            if (lane == 0) te_mbar_arrive(pipe.empty);
            float x[32]; // one panel of 64 channels; while a warpgroup stores it, the other multiplies
            const te_u32 valid = (warp & 2 ? record.y : record.x) >> (row & 31);
            te_u16 *to =
                (te_u16 *)a.partial + (te_i64)(partial + (int)record.z + row) * TE__SPARSE_D + 256 * half;
#pragma unroll 1
            for (int c = 0; c < 4; c++) {
                const te_u64 of_q = d_q + (half * 4 + c) * (SPARSE_PANEL >> 4),
                             of_g = d_g + (half * 4 + c) * (SPARSE_PANEL >> 4);
                te_wgmma_fence();
                te_multiply<1, 1, true>(x, d_ds, of_q);
#pragma unroll
                for (int i = 1; i < 4; i++) te_multiply<1, 1, false>(x, d_ds + 128 * i, of_q + 128 * i);
#pragma unroll
                for (int i = 0; i < 4; i++) te_multiply<1, 1, false>(x, d_p + 128 * i, of_g + 128 * i);
                te_wgmma_commit();
                te_wgmma_wait<0>();
                te_wgmma_keep(x);
                if (c == 3 && !more && lane == 0) te_mbar_arrive(pipe.q_empty);
                te_sparse_put_rows(x, by, to + 64 * c, 8 * TE__SPARSE_D, valid & 1, valid >> 8 & 1);
            }
            from.next();
            turn ^= 1;
        } while (more);
        asm volatile("" : "+r"(work)); // computes the item again, which saves registers during the loop
        te_sparse_put_heads(a.dq, te_sparse_item(a, work), row, a.heads, 256 * half, dq, by);
    }
}
