// ops/attn/attn_bwd_put.cu: runs after attn_bwd_hopper.cu, which leaves the sums of dQ in f32. This kernel computes dQ
// = scale times these sums, and writes dQ in its own format and with its own strides. Tiles to which no block of keys
// has added become 0.
//
// A block handles one tile. It reads the sums of two warpgroups, which lie in the order of the registers, and puts them
// into rows in shared memory.
//
// Options: X_DT, X_D (64, 128).
//
// Launch: the grid has one block for each tile of the longest sequence, for all heads and sequences; block 256.
// te:arch 90a
// te:row X_DT=2|3 X_D=64|128
#include "ops/attn/attn.cuh"

enum { D = X_D, BQ = TE__ATTN_BWD_QUERIES(X_D), PIECES = D / 8, ROWS = 256 / PIECES, PITCH = D / 2 + 4 };

extern "C" __global__ void __launch_bounds__(256)
    te_attn_bwd_put(const __grid_constant__ te__attn_bwd_hopper_kargs args) {
    te_follow();
    __shared__ __align__(16) te_u32 tile[BQ * PITCH];
    const te__attn_kargs &a = args.a;
    const te_u32 tiles = (te_u32)(a.s_q + BQ - 1) / BQ, head = blockIdx.x / tiles;
    const int m = (int)(blockIdx.x - head * tiles), b = (int)(head / (te_u32)a.heads),
              h = (int)(head - (te_u32)b * (te_u32)a.heads), w = threadIdx.x >> 7, lane = threadIdx.x & 31;
    const te__attn_seq seq = te__attn_seq_of(&a, b);
    // attn_bwd_fp8_hopper.cu leaves sums of codes of K, in units of dp_scale
    const float scale = a.x.codes ? a.scale * *a.x.k_inv / *a.x.dp_scale : a.scale;
    if (m * BQ >= seq.q_end) return;
    const int row = (D == 64 ? 64 * w : 0) + 16 * (threadIdx.x >> 5 & 3) + (lane >> 2),
              column = (D == 64 ? 0 : 32 * w) + (lane & 3);
    float4 v[8] = {};
    if (m * BQ < seq.s_q) {
        const te_i64 number = te__attn_dq_tile(&args, b, h, (int)seq.q_at, m);
        const float4 *from =
            (const float4 *)args.dq_sum + number * (BQ * D / 4) + w * (BQ * D / 8) + (threadIdx.x & 127);
        if (args.added[number] > 0) {
#pragma unroll
            for (int j = 0; j < 8; j++) v[j] = __ldcs(from + j * 128);
        }
    }
#pragma unroll
    for (int j = 0; j < 8; j++) {
        tile[row * PITCH + column + 4 * j] = te_f32x2_to_half(v[j].x * scale, v[j].y * scale, X_DT);
        tile[(row + 8) * PITCH + column + 4 * j] = te_f32x2_to_half(v[j].z * scale, v[j].w * scale, X_DT);
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < BQ / ROWS; k++) {
        const int r = k * ROWS + threadIdx.x / PIECES, piece = threadIdx.x % PIECES, i = m * BQ + r;
        if (i < seq.q_end && 8 * piece < a.d)
            *(uint4 *)((char *)a.dq.p + 2 * (b * a.dq.b + (seq.q_at + i) * a.dq.s + h * a.dq.h + 8 * piece)) =
                *(const uint4 *)&tile[r * PITCH + piece * 4];
    }
}
