// ops/attn/attn_bwd_fp8_hopper.cu: computes dQ, dK and dV on Hopper from FP8 codes: E4M3 of Q, K and V, E5M2 of dO. It
// is deterministic. Blocks, tiles, the order of sums and the warps' roles are those of attn_bwd_hopper.cu. This comment
// describes the differences.
//
// Products of codes are S^T = K Q^T, dP^T = V dO^T and dQ = dS K. For the last one dS is rounded to E5M2 by dp_scale,
// as te_attn_fp8 says. wgmma reads FP8 operands only K-major, and dV = P^T dO and dK = dS^T Q have k along the queries.
// So these two multiply bf16: P and dS, which are rounded no further, and the codes of dO and Q as numbers, which
// attn_bwd_fp8_rows.cu has written. All factors of codes are multiplied in where sums leave the registers. delta is
// o * dO, from the forward's o.
//
// Order. The consumers take turns at the tensor cores (named barriers 4 and 5), so that one computes P and dS while the
// other multiplies. In its turn a consumer issues its half of dQ, dV += P^T dO and dK += dS^T Q, and passes the turn on
// when dQ and dV are ready. dK goes on beside S^T of the next tile:
//
//     S^T, dP^T | P, dS^T dp_scale = P^T (dP^T of_dp - delta) | codes of dS to shared memory | turn: dQ, dV, dK
//
// dQ needs dS of both consumers. Consumer 0 has the first turn, and takes dQ of the tile before this one. Consumer 1
// takes dQ of this tile. So dS of a tile is overwritten, two tiles later, only after both have multiplied it. delta and
// of_dp have the factor dp_scale.
//
// K of dQ = dS K must be K-major, too, so the consumers make K^T at first. Its keys are permuted inside each 16:
// position 2 r + h has key r + 8 h. A thread has dS of the keys r and r + 8 of a query, so that its two codes make a
// word of 16 bits, and stmatrix transposes words.
//
// Sums over keys. wgmma on FP8 keeps about 13 bits below the largest term of a sum. The sums of FP8 products are over
// channels, and in dQ over the 128 keys of a block. The blocks are added in f32.
//
// Shared memory. FP8: rows of 128 bytes with the 128-byte swizzle. bf16: panels of 64 channels.
//
//     | K, K^T, V | Q, dO, 2 stages | Q, dO in bf16, 2 stages | dS, 2    | dQ (f32), 2 | lse2, delta | barriers
//     | 3 x 16 KB | 4 x 8 KB        | 4 x 16 KB               | 2 x 8 KB | 2 x 32 KB   | 1 KB        |
//
// Barriers: those of attn_bwd_hopper.cu, and FULL_DS: the 8 consumer warps have written their part of dS.
//
// Heads of less than 128 channels have zeros in the missing ones.
//
// Options: X_OUT: bf16, f16: the format of dK and dV.
//
// Launch: as attn_bwd_hopper.cu, with shared memory TE__ATTN_BWD_FP8_SHARED. Maps: boxes of 128 codes by 64 rows of q
// or d_o, by 128 rows of k or v; boxes of 64 channels by 64 rows of q and d_o in bf16, of dk and of dv.
// Benchmark: "fp8 attention backward" in tests/bench/h200.csv.
// te:arch 90a
// te:row X_OUT=2|3
#define X_DT 3
#include "ops/attn/hopper_backward.cuh"

enum {
    D = TE__ATTN_BWD_FP8_D,
    BK = 128,
    BQ = 64,
    BYTES_K = BK * D,
    BYTES_Q = BQ * D,
    BYTES_Q16 = BQ * D * 2,
    BYTES_DS = BQ * BK,
    BYTES_DQ = BQ * D * 4,
    BYTES_ROWS = BQ * 4,
    AT_K = 0,
    AT_K_T = AT_K + BYTES_K,
    AT_V = AT_K_T + BYTES_K,
    AT_Q = AT_V + BYTES_K,
    AT_DO = AT_Q + 2 * BYTES_Q,
    AT_Q16 = AT_DO + 2 * BYTES_Q,
    AT_DO16 = AT_Q16 + 2 * BYTES_Q16,
    AT_DS = AT_DO16 + 2 * BYTES_Q16,
    AT_DQ = AT_DS + 2 * BYTES_DS,
    AT_LSE = AT_DQ + 2 * BYTES_DQ,
    AT_DELTA = AT_LSE + 2 * BYTES_ROWS,
    AT_BARRIERS = AT_DELTA + 2 * BYTES_ROWS,
    AT_NUMBER = AT_BARRIERS + 16 * 8,
    SHARED = AT_NUMBER + 16
};
static_assert(SHARED == TE__ATTN_BWD_FP8_SHARED && SHARED <= TE__ATTN_SHARED_MAX, "what the host asks for");
enum { FULL_Q = 0, EMPTY_Q = 2, FULL_DO = 4, EMPTY_DO = 6, FULL_DQ = 8, EMPTY_DQ = 12, FULL_DS = 14 };

typedef te_attn_keys<BK, BQ> te_key_block;
struct te_keys : te_key_block {
    TE_DEV te_keys(const te__attn_bwd_hopper_kargs &a, te_u32 number) : te_key_block(a.a, a.order, number) {}
};

TE_DEV void te_load_tiles(const te__attn_bwd_fp8_kargs &args, te_u32 smem) {
    const te__attn_bwd_hopper_kargs &a = args.b;
    const te_keys t(a, te_lds4(smem + AT_NUMBER));
    const int batch_q = a.a.x.packed_q ? 0 : t.batch, batch_kv = a.a.x.packed_kv ? 0 : t.batch;
    int stage = 0, parity = 1;
    bool keys = true; // K and V are still to load; they come with the first tile
    for (te_attn_queries i(a.a, t); i.left > 0; i.next(), keys = false) {
        const te_i64 rows = te_attn_work(a.a, t.batch, i.head, t.q_at) + i.m * BQ;
        auto part = [&](int full, int empty, const void *map, int to, const void *map16, int to16, const float *of_rows,
                        int rows_to, const void *map_kv, int kv_to) {
            const te_u32 b = smem + AT_BARRIERS + 8 * (full + stage);
            te_mbar_wait(smem + AT_BARRIERS + 8 * (empty + stage), parity);
            te_mbar_expect(b, BYTES_Q + BYTES_Q16 + BYTES_ROWS + (keys ? BYTES_K : 0));
            if (keys) te_tma_load4(smem + kv_to, map_kv, 0, t.kv_at + t.n * BK, t.head, batch_kv, b);
            te_tma_load4(smem + to + stage * BYTES_Q, map, 0, t.q_at + i.m * BQ, i.head, batch_q, b);
            te_bulk_load(smem + rows_to + stage * BYTES_ROWS, of_rows + rows, BYTES_ROWS, b);
            for (int c = 0; c < D / 64; c++)
                te_tma_load4(smem + to16 + stage * BYTES_Q16 + c * BQ * 128, map16, 64 * c, (int)rows, 0, 0, b);
        };
        part(FULL_Q, EMPTY_Q, a.q_map, AT_Q, args.q16_map, AT_Q16, a.a.lse2, AT_LSE, a.k_map, AT_K);
        part(FULL_DO, EMPTY_DO, a.do_map, AT_DO, args.do16_map, AT_DO16, a.a.delta, AT_DELTA, a.v_map, AT_V);
        stage ^= 1;
        if (stage == 0) parity ^= 1;
    }
}

TE_DEV void te_add_tiles(const te__attn_bwd_hopper_kargs &a, te_u32 smem, int mine) {
    const te_keys t(a, te_lds4(smem + AT_NUMBER));
    int buffer = 0, parity = 0;
    for (te_attn_queries i(a.a, t); i.left > 0; i.next()) {
        if (buffer == mine)
            te_add_tile<BQ * D>(a, te__attn_dq_tile(&a, t.batch, i.head, t.q_at, i.m),
                                t.n - max(0, i.m * BQ + t.lo) / BK, smem + AT_DQ + buffer * BYTES_DQ,
                                smem + AT_BARRIERS + 8 * (FULL_DQ + 2 * buffer),
                                smem + AT_BARRIERS + 8 * (EMPTY_DQ + buffer), parity);
        buffer ^= 1;
        if (buffer == 0) parity ^= 1;
    }
}

// Makes consumer w's rows of K^T: channels 64 w to 64 w + 63.
TE_DEV void te_transpose_keys(te_u32 smem, int w) {
    const int row = threadIdx.x & 63, c = 64 * w + row;
#pragma unroll 1
    for (int piece = threadIdx.x >> 4 & 4, end = piece + 4; piece < end; piece++) {
        te_u32 word[4] = {0, 0, 0, 0};
#pragma unroll
        for (int p = 0; p < 16; p++) {
            const int key = 16 * piece + (p & 1) * 8 + (p >> 1);
            te_u32 code;
            asm volatile("ld.shared.u8 %0, [%1];"
                         : "=r"(code)
                         : "r"(smem + AT_K + te_swizzled(key, c >> 4) + (c & 15))
                         : "memory");
            word[p >> 2] |= code << (8 * (p & 3));
        }
        te_sts16(smem + AT_K_T + w * 8192 + te_swizzled(row, piece), make_uint4(word[0], word[1], word[2], word[3]));
    }
}

TE_DEV void te_consume(const te__attn_bwd_fp8_kargs &args, te_u32 smem, int w) {
    const te__attn_bwd_hopper_kargs &a = args.b;
    const te__attn_extra &x = a.a.x;
    const te_keys t(a, te_lds4(smem + AT_NUMBER));
    const te_u32 bar = smem + AT_BARRIERS;
    const int tid = threadIdx.x & 127, warp = tid >> 5, lane = tid & 31;
    const int key = t.n * BK + 64 * w + 16 * warp + (lane >> 2); // this thread's upper key
    // above 0, so that hidden scores remain -inf
    const float scale2 = fmaxf(a.a.scale2 * (*x.q_inv * *x.k_inv), 1e-30f), of_dp = *x.do_inv * *x.v_inv * *x.dp_scale;
    float dk[D / 2], dv[D / 2], s[BQ / 2], dp[BQ / 2];
    float(&dq)[BQ / 2] = s; // with registers of its own ptxas spills
    float most = 0.0f;      // the largest |dS| dp_scale
    te_u32 p[BQ / 4], ds[BQ / 4];
    te_attn_queries i(a.a, t);
    if (i.left > 0) { // K and V have arrived with the first tile
        te_mbar_wait(bar + 8 * FULL_Q, 0);
        te_mbar_wait(bar + 8 * FULL_DO, 0);
        if ((t.n + 1) * BK > t.s_kv && t.s_kv < (x.packed_kv ? x.t_kv - t.kv_at : a.a.s_kv)) {
            te_clear_rows<1>(smem + AT_K, BK, t.s_kv - t.n * BK);
            te_clear_rows<1>(smem + AT_V, BK, t.s_kv - t.n * BK);
            te_meet<128>(2 + w);
        }
        te_transpose_keys(smem, w);
        te_async_fence();
        te_meet<128>(2 + w);
    }
#pragma unroll
    for (int j = 0; j < D / 2; j++) dk[j] = dv[j] = 0.0f;
    const te_u64 k_rows = te_wgmma_desc(smem + AT_K + w * 8192, 0), v_rows = te_wgmma_desc(smem + AT_V + w * 8192, 0),
                 k_columns = te_wgmma_desc(smem + AT_K_T + w * 8192, 0);
    const te_u64 q_tile = te_wgmma_desc(smem + AT_Q, 0), do_tile = te_wgmma_desc(smem + AT_DO, 0),
                 ds_tile = te_wgmma_desc(smem + AT_DS, 0);
    const te_u64 q16_tile = te_wgmma_desc(smem + AT_Q16, BQ * 128), do16_tile = te_wgmma_desc(smem + AT_DO16, BQ * 128);
#define TE__CODES(types, d, left, right)                                                                     \
    do {                                                                                                     \
        te_wgmma_fence();                                                                                    \
        TE_WGMMA_TO_64("=f", "k32.f32." types, ", 1, 1", d, left, right, 0);                                 \
        _Pragma("unroll") for (int k = 1; k < 4; k++)                                                        \
            TE_WGMMA_TO_64("+f", "k32.f32." types, ", 1, 1", d, (left) + 2 * k, (right) + 2 * k, 1);         \
        te_wgmma_commit();                                                                                   \
    } while (0)
    auto accumulate = [&](float(&d)[D / 2], const te_u32 *left, te_u64 right) {
        te_wgmma_fence();
#pragma unroll
        for (int k = 0; k < BQ / 16; k++) te_multiply(d, left + 4 * k, right + k * 128);
        te_wgmma_commit();
    };
    // the number of tiles that have rows of q beyond the end of the sequence; they come first
    int tails = t.tiles() > 0 && t.m_end * BQ > t.s_q && t.s_q < (x.packed_q ? x.t_q - t.q_at : a.a.s_q)
                    ? a.a.heads / a.a.groups
                    : 0;
    int number = 0; // of tiles so far
    if (w == 1) te_meet_later<256>(4); // consumer 0 multiplies first
    auto multiply_dq = [&](int tile) { // starts dQ of a tile; tile -1 gives no result
        if (tile >= 0) te_mbar_wait(bar + 8 * (FULL_DS + (tile & 1)), tile >> 1 & 1);
        TE__CODES("e5m2.e4m3", dq, ds_tile + (tile & 1) * (BYTES_DS >> 4), k_columns);
    };
    auto store_dq = [&](int tile) { // hands the finished dQ of a tile to the warps that add it
        const int buffer = tile & 1;
        te_mbar_wait(bar + 8 * (EMPTY_DQ + buffer), tile >> 1 & 1 ^ 1);
#pragma unroll
        for (int j = 0; j < 8; j++)
            te_sts16(smem + AT_DQ + buffer * BYTES_DQ + w * (BYTES_DQ / 2) + tid * 16 + j * 2048,
                     make_uint4(__float_as_uint(dq[4 * j]), __float_as_uint(dq[4 * j + 1]),
                                __float_as_uint(dq[4 * j + 2]), __float_as_uint(dq[4 * j + 3])));
        te_async_fence();
        __syncwarp();
        if (lane == 0) te_mbar_arrive(bar + 8 * (FULL_DQ + 2 * buffer + w));
    };
#pragma unroll 1
    for (; i.left > 0; i.next(), number++) {
        const int stage = number & 1, parity = number >> 1 & 1;
        te_mbar_wait(bar + 8 * (FULL_Q + stage), parity);
        if (tails > 0) { // 0 times NaN is NaN
            te_mbar_wait(bar + 8 * (FULL_DO + stage), parity);
            te_clear_rows<1>(smem + AT_Q + stage * BYTES_Q, BQ, t.s_q - i.m * BQ);
            te_clear_rows<1>(smem + AT_DO + stage * BYTES_Q, BQ, t.s_q - i.m * BQ);
            tails--;
            te_async_fence();
            te_meet<128>(2 + w);
        }
        TE__CODES("e4m3.e4m3", s, k_rows, q_tile + stage * (BYTES_Q >> 4));
        te_wgmma_wait<1>();
        te_wgmma_keep(dk);
        if (number > 0 && lane == 0) te_mbar_arrive(bar + 8 * (EMPTY_Q + (stage ^ 1)));
        te_mbar_wait(bar + 8 * (FULL_DO + stage), parity);
        TE__CODES("e4m3.e5m2", dp, v_rows, do_tile + stage * (BYTES_Q >> 4));
        te_wgmma_wait<1>();
        te_wgmma_keep(s);
        if (t.hides(i.m)) te_hide_queries(s, t, key, i.m * BQ + 2 * (lane & 3));
        const te_u32 lse2 = smem + AT_LSE + stage * BYTES_ROWS + (lane & 3) * 8,
                     delta = smem + AT_DELTA + stage * BYTES_ROWS + (lane & 3) * 8;
#pragma unroll
        for (int j = 0; j < BQ / 8; j++) {
            float l[2];
            te_lds8(lse2 + j * 32, l[0], l[1]);
#pragma unroll
            for (int e = 0; e < 4; e++) s[4 * j + e] = te_exp2(fmaf(s[4 * j + e], scale2, -l[e & 1]));
        }
        te_pack16(p, s);
        te_wgmma_wait<0>();
        te_wgmma_keep(dp);
#pragma unroll
        for (int j = 0; j < BQ / 8; j++) {
            float d[2];
            te_lds8(delta + j * 32, d[0], d[1]);
#pragma unroll
            for (int e = 0; e < 4; e++) {
                float &y = dp[4 * j + e];
                y = s[4 * j + e] * fmaf(y, of_dp, -d[e & 1]);
                most = fmaxf(most, fabsf(y));
            }
        }
        te_pack16(ds, dp);
#pragma unroll
        for (int half = 0; half < 2; half++) { // codes of 32 queries
            te_u32 codes[4];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const float *const y = dp + 16 * half + 4 * j;
                codes[j] =
                    te_f32x2_to_fp8(y[0], y[2], TE_F8E5M2) | (te_u32)te_f32x2_to_fp8(y[1], y[3], TE_F8E5M2) << 16;
            }
            te_stmatrix4_trans(smem + AT_DS + stage * BYTES_DS + te_swizzled(32 * half + lane, 4 * w + warp), codes);
        }
        te_async_fence();
        __syncwarp();
        if (lane == 0) te_mbar_arrive(bar + 8 * (FULL_DS + stage));
        te_meet<256>(4 + w);
        const int tile = w ? number : number - 1; // the tile whose dQ is computed now
        multiply_dq(tile);
        accumulate(dv, p, do16_tile + stage * (BYTES_Q16 >> 4));
        accumulate(dk, ds, q16_tile + stage * (BYTES_Q16 >> 4));
        te_wgmma_wait<1>();
        te_wgmma_keep(dq);
        te_wgmma_keep(dv);
        te_meet_later<256>(5 - w);
        if (lane == 0) te_mbar_arrive(bar + 8 * (EMPTY_DO + stage));
        if (tile >= 0) store_dq(tile);
    }
    te_wgmma_wait<0>();
    te_wgmma_keep(dk);
    if (w == 0 && number > 0) {
        multiply_dq(number - 1);
        te_wgmma_wait<0>();
        te_wgmma_keep(dq);
        store_dq(number - 1);
    }
#undef TE__CODES
    most = te_warp_max(most) / *x.dp_scale;
    if (x.dp_amax && most > 0.0f && lane == 0) atomicMax((int *)x.dp_amax, __float_as_int(most));
    te_meet<256>(1); // no one reads Q and dO any more
    const te_keys u(a, te_lds4(smem + AT_NUMBER)); // computed anew to save registers
    if (u.n * BK < u.kv_end)
        te_store_keys<X_OUT>(a, u, smem + AT_Q16, smem + AT_DO16, dk, dv, a.a.scale * *x.q_inv / *x.dp_scale, *x.do_inv,
                             w);
}

extern "C" __global__ void __launch_bounds__(384, 1)
    te_attn_bwd_fp8_hopper(const __grid_constant__ te__attn_bwd_fp8_kargs args) {
    te_follow();
    extern __shared__ __align__(1024) char shared[];
    const te_u32 smem = te_smem(shared), bar = smem + AT_BARRIERS;
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2; i++) {
            te_mbar_init(bar + 8 * (FULL_Q + i), 1), te_mbar_init(bar + 8 * (EMPTY_Q + i), 8);
            te_mbar_init(bar + 8 * (FULL_DO + i), 1), te_mbar_init(bar + 8 * (EMPTY_DO + i), 8);
            te_mbar_init(bar + 8 * (FULL_DQ + 2 * i), 4), te_mbar_init(bar + 8 * (FULL_DQ + 2 * i + 1), 4);
            te_mbar_init(bar + 8 * (EMPTY_DQ + i), 1), te_mbar_init(bar + 8 * (FULL_DS + i), 8);
        }
        te_mbar_init_done();
        const te_u32 number = atomicAdd(args.b.order.counter, 1u);
        if (number == gridDim.x - 1) *args.b.order.counter = 0; // the last block sets it to 0 for the next launch
        te_sts4(smem + AT_NUMBER, number);
    }
    __syncthreads();
    const int group = __shfl_sync(TE_ALL, threadIdx.x / 128, 0);
    if (group == 0) {
        te_registers_down<24>();
        const int warp = __shfl_sync(TE_ALL, threadIdx.x / 32, 0);
        if ((threadIdx.x & 31) == 0) {
            if (warp == 0) te_load_tiles(args, smem);
            else if (warp <= 2) te_add_tiles(args.b, smem, warp - 1);
        }
    } else {
        te_registers_up<240>();
        te_consume(args, smem, group - 1);
    }
}
