// ops/math/embedding_bwd.cu: dtable [vocab, h] = (accumulate ? dtable : 0) + for each id the rows of dy at its tokens, added in f32 in the
// order of the tokens. embedding_sort has made the lists.
//
//              128 columns: lane l has columns 4l .. 4l+3
//            +--------+--------+--------+--------+
//   id       | warp 0 | warp 1 | warp 0 | warp 1 |      splits = 2: as many warps an id as fill the GPU, fewer for a large vocabulary
//            +--------+--------+--------+--------+
//
// One H200, 2026-11-21, te_bench embedding: 16384 rows of 4096 bf16 into 128256, with embedding_sort, 0.60 of copy.
//
// Launch: block 256, grid: vocab * splits / 8 up, splits fastest. `vector`: rows start at multiples of 16 bytes.
//
// te:baseline
// te:row DY_DT=3 DTABLE_DT=3
// te:row DY_DT=3 DTABLE_DT=1
// te:row DY_DT=1 DTABLE_DT=1
#include "device/base.cuh"
#include "ops/math/kargs.h"
#ifndef DY_DT
#define DY_DT a.dy_dt
#define DTABLE_DT a.dtable_dt
#endif

// Elements i .. i+3, of which `n` exist; `whole`: all of them do, and i is at a multiple of four elements.
TE_DEV void te_load4(const void *p, te_i64 i, int dt, bool whole, te_i64 n, float out[4]) {
    if (whole && dt == TE_F32) {
        float4 u = *(const float4 *)((const float *)p + i);
        out[0] = u.x, out[1] = u.y, out[2] = u.z, out[3] = u.w;
    } else if (whole) {
        uint2 u = *(const uint2 *)((const te_u16 *)p + i);
        te_u16 h[4] = {(te_u16)u.x, (te_u16)(u.x >> 16), (te_u16)u.y, (te_u16)(u.y >> 16)};
#pragma unroll
        for (int k = 0; k < 4; k++) out[k] = dt == TE_BF16 ? te_bf16_to_f32(h[k]) : te_f16_to_f32(h[k]);
    } else {
#pragma unroll
        for (int k = 0; k < 4; k++)
            if (k < n) out[k] = te_load(p, i + k, dt);
    }
}

TE_DEV void te_store4(void *p, te_i64 i, int dt, bool whole, te_i64 n, const float in[4]) {
    if (whole && dt == TE_F32) {
        *(float4 *)((float *)p + i) = make_float4(in[0], in[1], in[2], in[3]);
    } else if (whole) {
        te_u16 h[4];
#pragma unroll
        for (int k = 0; k < 4; k++) h[k] = dt == TE_BF16 ? te_f32_to_bf16(in[k]) : te_f32_to_f16(in[k]);
        *(uint2 *)((te_u16 *)p + i) = make_uint2(h[0] | (te_u32)h[1] << 16, h[2] | (te_u32)h[3] << 16);
    } else {
#pragma unroll
        for (int k = 0; k < 4; k++)
            if (k < n) te_store(p, i + k, dt, in[k]);
    }
}

extern "C" __global__ void __launch_bounds__(256) te_embedding_bwd(const __grid_constant__ te__embedding_bwd_kargs a) {
    te_follow();
    te_i64 warp = (te_i64)blockIdx.x * 8 + (threadIdx.x >> 5);
    te_i64 id = a.splits == 1 ? warp : (te_i64)((te_u32)warp / a.splits); // more splits than one come with a small vocabulary
    int lane = threadIdx.x & 31;
    if (id >= a.vocab) return;
    te_u32 begin = a.start[id], end = a.start[id + 1];
    if (begin == end && a.accumulate) return;
    for (te_i64 col = (warp - id * a.splits) * 128 + lane * 4; col - lane * 4 < a.h; col += a.splits * 128) {
        te_i64 there = a.h - col; // columns of this lane that exist; with `vector` 4 or more, or none
        bool whole = a.vector && there > 0;
        float sum[4] = {}, old[4] = {};
        for (te_u32 base = begin; base < end; base += 32) {
            int rows = end - base < 32 ? (int)(end - base) : 32, r = 0;
            te_u32 token = lane < rows ? a.order[base + lane] : 0;
            // Sixteen rows are on their way at once: a frequent id is a long chain of dependent additions, and only its loads can overlap.
            for (; a.vector && r + 16 <= rows; r += 16) {
                te_u32 row[16];
                float v[16][4];
#pragma unroll
                for (int s = 0; s < 16; s++) row[s] = __shfl_sync(0xffffffffu, token, r + s);
                if (!whole) continue;
#pragma unroll
                for (int s = 0; s < 16; s++) te_load4(a.dy, row[s] * a.h + col, DY_DT, true, 4, v[s]);
#pragma unroll
                for (int s = 0; s < 16; s++)
#pragma unroll
                    for (int k = 0; k < 4; k++) sum[k] += v[s][k];
            }
            for (; r < rows; r++) {
                float v[4] = {};
                te_load4(a.dy, __shfl_sync(0xffffffffu, token, r) * a.h + col, DY_DT, whole, there, v);
#pragma unroll
                for (int k = 0; k < 4; k++) sum[k] += v[k];
            }
        }
        if (a.accumulate) te_load4(a.dtable, id * a.h + col, DTABLE_DT, whole, there, old);
#pragma unroll
        for (int k = 0; k < 4; k++) sum[k] += old[k];
        te_store4(a.dtable, id * a.h + col, DTABLE_DT, whole, there, sum);
    }
}
