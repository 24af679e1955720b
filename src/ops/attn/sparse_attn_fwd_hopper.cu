// ops/attn/sparse_attn_fwd_hopper.cu: the forward pass of sparse attention (sparse_attn_query.cu) by wgmma, for 512
// channels. A block multiplies 64 heads of one query by tiles of 64 keys:
//
//   S [64, 64] = Q K^T        both warpgroups compute all of S, so that they need not wait for each other
//   O [64, 512] += P V        each warpgroup has 256 channels of O; V is the tile of keys
//
// While the softmax of one warpgroup runs, the other multiplies. Blocks are persistent: the producer
// (sparse_hopper.cuh) loads the next query's heads and keys while the consumers finish the current one.
//
// Options: X_DT: bf16, f16.
//
// Launch: grid: any number of blocks, block 384, shared memory TE__SPARSE_HOPPER_SHARED(0).
//
// Benchmark: "sparse attention forward" in tests/bench/h200.csv.
// te:arch 90a
// te:row X_DT=2|3
#include "ops/attn/sparse_hopper.cuh"

extern "C" __global__ void __launch_bounds__(384, 1)
    te_sparse_attn_fwd_hopper(const __grid_constant__ te__sparse_attn_kargs a) {
    extern __shared__ __align__(1024) char te_shared[];
    enum { STAGES = 2 };
    const te_u32 q = te_smem(te_shared), keys = q + TE__SPARSE_HOPPER_TILE;
    const te_sparse_pipe<STAGES> pipe(keys + STAGES * TE__SPARSE_HOPPER_TILE);
    const int group = __shfl_sync(TE_ALL, threadIdx.x >> 7, 0);
    if (threadIdx.x == 0) pipe.init();
    __syncthreads();
    te_follow();
    if (group == 0) {
        te_registers_down<72>();
        te_sparse_produce<STAGES, false>(a, pipe, q, keys);
        return;
    }
    te_registers_up<216>();
    const int warp = __shfl_sync(TE_ALL, threadIdx.x >> 5 & 3, 0), lane = threadIdx.x & 31,
              row = 16 * warp + (lane >> 2), half = group - 1;
    const te_u32 works = te_sparse_item::count(a);
    te_queue<STAGES> from;
    int parity = 0;
#pragma unroll 1
    for (te_u32 work = blockIdx.x; work < works; work += gridDim.x, parity ^= 1) {
        const te_sparse_item at(a, work);
        float o[128], m[2], l[2];
        te_u32 p[16];
        bool more;
#pragma unroll
        for (int i = 0; i < 128; i++) o[i] = 0.0f;
        m[0] = m[1] = -1e30f * TE_LOG2E, l[0] = l[1] = 0.0f;
        te_mbar_wait(pipe.q_full, parity);
#pragma unroll 1
        do {
            te_sparse_wait(pipe, from);
            const uint4 record = te_lds16(pipe.records + 16 * from.stage);
            const te_u32 tile = keys + from.stage * TE__SPARSE_HOPPER_TILE;
            const te_u64 dq = te_wgmma_desc(q, SPARSE_PANEL), dk = te_wgmma_desc(tile, SPARSE_PANEL),
                         dv = te_wgmma_desc(tile + half * 4 * SPARSE_PANEL, SPARSE_PANEL);
            float s[32];
            more = __shfl_sync(TE_ALL, record.w, 0) != 0;
            te_wgmma_fence();
            te_multiply<0, 0, true>(s, dq, dk);
#pragma unroll
            for (int i = 1; i < 4 * SPARSE_PANELS; i++)
                te_multiply<0, 0, false>(s, dq + i / 4 * (SPARSE_PANEL >> 4) + i % 4 * 2,
                                         dk + i / 4 * (SPARSE_PANEL >> 4) + i % 4 * 2);
            te_wgmma_commit();
            te_wgmma_wait<0>();
            te_wgmma_keep(s);
            if (!more && lane == 0) te_mbar_arrive(pipe.q_empty);
            if ((record.x & record.y) != ~0u) {
                float(&left)[16] = *(float(*)[16])s, (&right)[16] = *(float(*)[16])(s + 16);
                te_sparse_hide(left, record.x);
                te_sparse_hide(right, record.y);
            }
            float shrink[2];
            te_sparse_softmax(s, m, l, shrink, a.scale2);
            te_pack16(p, s);
            if (__any_sync(TE_ALL, shrink[0] != 1.0f || shrink[1] != 1.0f)) {
#pragma unroll
                for (int i = 0; i < 128; i++) o[i] *= shrink[i >> 1 & 1];
            }
            te_wgmma_keep(o);
            te_wgmma_keep(p);
            te_wgmma_fence();
#pragma unroll
            for (int i = 0; i < 4; i++) te_multiply(o, p + 4 * i, dv + 128 * i);
            te_wgmma_commit();
            te_wgmma_wait<0>();
            te_wgmma_keep(o);
            te_wgmma_keep(p);
            if (lane == 0) te_mbar_arrive(pipe.empty + 8 * from.stage);
            from.next();
        } while (more);
        te_sparse_finish(a, at, row, half, o, m, l);
    }
}
