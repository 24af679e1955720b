// ops/attn/attn_bwd_rows.cu: before Hopper's backward kernels: delta and lse2 of each query row as attn_delta.cu has them, and 0 to the counts of tiles of dQ,
// where there are any. 16-bit operands in aligned rows: PIECES threads have a row, 16 bytes each.
//
// Options: X_DT, X_D (64, 128, 256: as many channels as v has, or more).
//
// Launch: grid ceil(batch * heads * s_pad / (256 / PIECES)), block 256.
// te:arch 90a
// te:row X_DT=2|3 X_D=64|128|256
#include "device/vector.cuh"
#include "ops/attn/attn.cuh"

enum { PIECES = X_D / 8, ROWS = 256 / PIECES };

extern "C" __global__ void __launch_bounds__(256) te_attn_bwd_rows(const __grid_constant__ te__attn_bwd_hopper_kargs args) {
    te_follow();
    const te__attn_kargs &a = args.a;
    const int piece = threadIdx.x % PIECES;
    const te_i64 row = (te_i64)blockIdx.x * ROWS + threadIdx.x / PIECES, head = row / a.s_pad;
    const int i = (int)(row - head * a.s_pad), b = (int)(head / a.heads), h = (int)(head - (te_i64)b * a.heads);
    if (b >= a.batch) return; // whole warps: s_pad is a multiple of their rows
    const te__attn_seq seq = te__attn_seq_of(&a, b);
    const bool there = i < seq.s_q && 8 * piece < a.d_v;
    float sum = 0.0f;
    if (there) {
        const te_i64 at = seq.q_at + i;
        const te_raw<X_DT> o = te_raw_load<X_DT>(a.o.p, b * a.o.b + at * a.o.s + h * a.o.h + 8 * piece, X_DT);
        const te_raw<X_DT> g = te_raw_load<X_DT>(a.d_o.p, b * a.d_o.b + at * a.d_o.s + h * a.d_o.h + 8 * piece, X_DT);
#pragma unroll
        for (int c = 0; c < 8; c++) sum = fmaf(te_raw_get<X_DT>(o, c), te_raw_get<X_DT>(g, c), sum);
    }
#pragma unroll
    for (int far = PIECES / 2; far; far /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, far);
    if (piece || (a.x.on && i >= (seq.s_q + TE__ATTN_PAD - 1) / TE__ATTN_PAD * TE__ATTN_PAD && i >= seq.q_end)) return;
    float lse2 = i < seq.s_q ? a.lse[seq.lse_at + h * seq.lse_head + i] * TE_LOG2E : TE_INF;
    a.delta[seq.work_at + h * seq.work_head + i] = sum;
    a.lse2[seq.work_at + h * seq.work_head + i] = lse2 == -TE_INF ? TE_INF : lse2;
    if (args.added && i % args.queries == 0 && (!a.x.packed_q || i < seq.s_q)) args.added[te__attn_dq_tile(&args, b, h, (int)seq.q_at, i / args.queries)] = 0;
}
