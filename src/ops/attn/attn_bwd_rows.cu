// ops/attn/attn_bwd_rows.cu: runs before Hopper's backward kernels. It writes delta and lse2 of each query row, as
// attn_delta.cu does. If attn_bwd_hopper.cu follows, this kernel also sets the counter `added` of each tile of dQ to 0.
// Operands have 16 bits, and their rows are aligned. PIECES threads share a row, with 16 bytes each. A thread handles
// EACH rows, and the loads of these rows overlap. All rows of a block belong to one head, since s_pad is a multiple of
// the number of rows of a block.
//
// Options: X_DT, X_D (64, 128 or 256, at least the number of channels of v).
//
// Launch: grid batch * heads * s_pad / (EACH * ROWS), block 256.
// te:arch 90a
// te:row X_DT=2|3 X_D=64|128|256
#include "device/vector.cuh"
#include "ops/attn/attn.cuh"

enum { PIECES = X_D / 8, ROWS = 256 / PIECES, EACH = 4 };
static_assert(TE__ATTN_PAD % (EACH * ROWS) == 0, "a block's rows are one head's");

extern "C" __global__ void __launch_bounds__(256)
    te_attn_bwd_rows(const __grid_constant__ te__attn_bwd_hopper_kargs args) {
    te_follow();
    const te__attn_kargs &a = args.a;
    const int piece = threadIdx.x % PIECES;
    const te_i64 row = (te_i64)blockIdx.x * (EACH * ROWS), head = row / a.s_pad;
    const int first = (int)(row - head * a.s_pad) + threadIdx.x / PIECES, b = (int)(head / a.heads),
              h = (int)(head - (te_i64)b * a.heads);
    const te__attn_seq seq = te__attn_seq_of(&a, b);
    const int end = 8 * piece < a.d_v ? seq.s_q : 0; // rows of o and d_o that this thread reads end here
    te_raw<X_DT> o[EACH], g[EACH];
    float lse[EACH];
#pragma unroll
    for (int k = 0; k < EACH; k++) {
        const int i = first + k * ROWS;
        if (i < end) {
            const te_i64 at = seq.q_at + i;
            o[k] = te_raw_load<X_DT>(a.o.p, b * a.o.b + at * a.o.s + h * a.o.h + 8 * piece, X_DT);
            g[k] = te_raw_load<X_DT>(a.d_o.p, b * a.d_o.b + at * a.d_o.s + h * a.d_o.h + 8 * piece, X_DT);
        }
        lse[k] = piece == 0 && i < seq.s_q ? a.lse[seq.lse_at + h * seq.lse_head + i] : TE_INF;
    }
#pragma unroll
    for (int k = 0; k < EACH; k++) {
        const int i = first + k * ROWS;
        float sum = 0.0f;
        if (i < end) {
#pragma unroll
            for (int c = 0; c < 8; c++) sum = fmaf(te_raw_get<X_DT>(o[k], c), te_raw_get<X_DT>(g[k], c), sum);
        }
#pragma unroll
        for (int far = PIECES / 2; far; far /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, far);
        if (piece == 0 &&
            !(a.x.on && i >= (seq.s_q + TE__ATTN_PAD - 1) / TE__ATTN_PAD * TE__ATTN_PAD && i >= seq.q_end)) {
            const float lse2 = lse[k] * TE_LOG2E;
            a.delta[seq.work_at + h * seq.work_head + i] = sum;
            a.lse2[seq.work_at + h * seq.work_head + i] = lse2 == -TE_INF ? TE_INF : lse2;
            if (args.added && i % args.queries == 0 && (!a.x.packed_q || i < seq.s_q))
                args.added[te__attn_dq_tile(&args, b, h, (int)seq.q_at, i / args.queries)] = 0;
        }
    }
}
