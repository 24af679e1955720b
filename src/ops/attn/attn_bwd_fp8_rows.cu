// ops/attn/attn_bwd_fp8_rows.cu: runs before attn_bwd_fp8_hopper.cu, as attn_bwd_rows.cu runs before
// attn_bwd_hopper.cu: it writes lse2, delta = dp_scale o * dO, and 0 to the counters `added`. It also writes the codes
// of q and d_o as bf16 numbers, which have all bits of a code. Rows of the last tile beyond a sequence become zeros.
//
// PIECES threads share a row, with 16 channels each. A thread handles EACH rows. All rows of a block belong to one
// head, since s_pad is a multiple of the number of rows of a block.
//
// Options: X_DT: bf16, f16: the format of o.
//
// Launch: grid batch * heads * s_pad / (EACH * ROWS), block 256.
// te:arch 90a
// te:row X_DT=2|3
#include "device/vector.cuh"
#include "ops/attn/attn.cuh"

enum { PIECES = TE__ATTN_BWD_FP8_D / 16, ROWS = 256 / PIECES, EACH = 2 };
static_assert(TE__ATTN_PAD % (EACH * ROWS) == 0, "a block's rows are one head's");

// Writes 16 codes as bf16.
TE_DEV void te_put_codes(void *to, te_i64 row, int piece, uint4 codes, int dt) {
    const te_u32 word[4] = {codes.x, codes.y, codes.z, codes.w};
    te_u32 out[8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
        float lo, hi;
        te_fp8x2_to_f32(word[i >> 1] >> (16 * (i & 1)), dt, &lo, &hi);
        out[i] = te_f32x2_to_half(lo, hi, TE_BF16);
    }
    uint4 *const at = (uint4 *)to + row * (TE__ATTN_BWD_FP8_D / 8) + 2 * piece;
    at[0] = make_uint4(out[0], out[1], out[2], out[3]);
    at[1] = make_uint4(out[4], out[5], out[6], out[7]);
}

extern "C" __global__ void __launch_bounds__(256)
    te_attn_bwd_fp8_rows(const __grid_constant__ te__attn_bwd_fp8_kargs args) {
    te_follow();
    const te__attn_kargs &a = args.b.a;
    const int piece = threadIdx.x % PIECES;
    const te_i64 row = (te_i64)blockIdx.x * (EACH * ROWS), head = row / a.s_pad;
    const int first = (int)(row - head * a.s_pad) + threadIdx.x / PIECES, b = (int)(head / a.heads),
              h = (int)(head - (te_i64)b * a.heads);
    const te__attn_seq seq = te__attn_seq_of(&a, b);
    const float factor = *a.x.do_inv * *a.x.dp_scale;
    const uint4 zero = make_uint4(0, 0, 0, 0);
    uint4 q[EACH], g[EACH];
    te_raw<X_DT> o[EACH][2];
    float lse[EACH];
#pragma unroll
    for (int k = 0; k < EACH; k++) {
        const int i = first + k * ROWS;
        const te_i64 at = seq.q_at + i;
        q[k] = g[k] = zero;
        if (i < seq.s_q && 16 * piece < a.d)
            q[k] = *(const uint4 *)((const te_u8 *)a.q.p + b * a.q.b + at * a.q.s + h * a.q.h + 16 * piece);
        if (i < seq.s_q && 16 * piece < a.d_v) {
            g[k] = *(const uint4 *)((const te_u8 *)a.d_o.p + b * a.d_o.b + at * a.d_o.s + h * a.d_o.h + 16 * piece);
#pragma unroll
            for (int c = 0; c < 2; c++)
                o[k][c] = te_raw_load<X_DT>(a.o.p, b * a.o.b + at * a.o.s + h * a.o.h + 16 * piece + 8 * c, X_DT);
        }
        lse[k] = piece == 0 && i < seq.s_q ? a.lse[seq.lse_at + h * seq.lse_head + i] : TE_INF;
    }
#pragma unroll
    for (int k = 0; k < EACH; k++) {
        const int i = first + k * ROWS;
        float sum = 0.0f;
        if (i < seq.s_q && 16 * piece < a.d_v) {
            const te_u32 word[4] = {g[k].x, g[k].y, g[k].z, g[k].w};
#pragma unroll
            for (int c = 0; c < 16; c += 2) {
                float lo, hi;
                te_fp8x2_to_f32(word[c >> 2] >> (8 * (c & 2)), TE_F8E5M2, &lo, &hi);
                sum = fmaf(te_raw_get<X_DT>(o[k][c >> 3], c & 7), lo, sum);
                sum = fmaf(te_raw_get<X_DT>(o[k][c >> 3], (c & 7) + 1), hi, sum);
            }
        }
#pragma unroll
        for (int far = PIECES / 2; far; far /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, far);
        if (a.x.on && i >= (seq.s_q + TE__ATTN_PAD - 1) / TE__ATTN_PAD * TE__ATTN_PAD && i >= seq.q_end) continue;
        const te_i64 to = seq.work_at + h * seq.work_head + i;
        te_put_codes(args.q16, to, piece, q[k], TE_F8E4M3);
        te_put_codes(args.do16, to, piece, g[k], TE_F8E5M2);
        if (piece == 0) {
            const float lse2 = lse[k] * TE_LOG2E;
            a.delta[to] = sum * factor;
            a.lse2[to] = lse2 == -TE_INF ? TE_INF : lse2;
            if (i % args.b.queries == 0 && (!a.x.packed_q || i < seq.s_q))
                args.b.added[te__attn_dq_tile(&args.b, b, h, (int)seq.q_at, i / args.b.queries)] = 0;
        }
    }
}
