// ops/attn/attn_fwd_fp8_hopper.cu: computes O = softmax(scale Q K^T, masked) V on Hopper from E4M3 codes of Q, K and V.
// wgmma multiplies the FP8 codes in both products. Schedule, tiles and barriers are those of attn_fwd_hopper.cu. This
// comment describes the differences.
//
// Softmax. A row's sum is known only at the end of the row, so P cannot be scaled by te_attn_fp8.s_scale, which is for
// the normalized softmax. P is rounded relative to m, the largest score of the row so far (units of log2):
//
//     p_ij = 2^(S_ij scale2 - m + TE__ATTN_FP8_LATE)    O_i = sum_j e4m3(p_ij) V_j / l_i    l_i = sum_j p_ij
//
// The first two blocks of keys update m by their maximum, since one block has too few keys for a good guess. Later
// blocks keep m until an element exceeds E4M3's largest number. Then m becomes the maximum so far, and O and the sums
// are rescaled (rise). Each row decides by its own elements. l and lse sum p before rounding. In a row with one large
// element, O would have the rounding error of that element's code. So in O's denominator the row's largest element,
// `peak`, is replaced by its code. peak / l is the row's largest softmax before rounding. The maximum of all rows is
// the amax of S.
//
// Sums over keys. wgmma on FP8 keeps about 13 bits below the largest term of a sum, so long sums would lose low bits of
// every term. The product P V of each block of keys therefore starts at 0 (`part`), and is added to O in f32. wgmma
// reads P from registers, so the warps wait for P V. It is issued before Q K of the next block, and its result is added
// to O while Q K runs.
//
// V. wgmma reads FP8 operands only K-major, so attn_fwd_fp8_values.cu writes V^T, with zeros beyond a sequence. It
// permutes the keys so that the accumulators of S become operand A without moving between lanes.
//
// Shared memory, for D = 128: rows of 128 bytes, with the 128-byte swizzle. Rows of Q and K have D bytes, and a swizzle
// of D bytes.
//
//     | Q, 2 stages | K, 2 stages | V^T, 2 stages | O     | barriers | tiles |
//     | 32 KB       | 32 KB       | 32 KB         | 32 KB |
//
// Options:
// - X_DT: bf16, f16: the format of O.
// - X_D: 64, 128. Missing channels are zeros.
//
// Launch:
// - Any number of blocks of 384 threads, shared memory TE__ATTN_FP8_SHARED.
// - Maps: q has boxes of D codes by 64 rows, k by 128 rows. v (V^T) has boxes of 128 keys by D channels. o has boxes of
//   64 channels by 64 rows.
// Benchmark: "fp8 attention forward" in tests/bench/h200.csv.
// te:arch 90a
// te:row X_DT=3 X_D=64|128
// te:row X_DT=2 X_D=128
#include "ops/attn/hopper.cuh"

enum {
    D = X_D,
    BM = 128,
    BN = TE__ATTN_FP8_KEYS,
    STAGES = TE__ATTN_FP8_STAGES,
    THREADS = 384,
    PART_Q = 64 * D, // bytes of a consumer's rows of Q
    PART_O = TE__ATTN_BYTES(64, X_D),
    BYTES_K = BN * D,
    BYTES_V = BN * D,
    AT_Q = 0,
    AT_K = AT_Q + 4 * PART_Q,
    AT_V = AT_K + STAGES * BYTES_K,
    AT_O = AT_V + STAGES * BYTES_V,
    AT_BARRIERS = AT_O + 2 * PART_O,
    FULL_Q = 0,
    EMPTY_Q = FULL_Q + 2,
    FULL_T = EMPTY_Q + 2,
    EMPTY_T = FULL_T + 2,
    FULL_K = EMPTY_T + 2,
    EMPTY_K = FULL_K + STAGES,
    FULL_V = EMPTY_K + STAGES,
    EMPTY_V = FULL_V + STAGES,
    AT_TILES = AT_BARRIERS + 8 * (EMPTY_V + STAGES),
    SHARED = AT_TILES + 2 * 64
};
static_assert(SHARED <= TE__ATTN_FP8_SHARED(X_D) && TE__ATTN_FP8_SHARED(X_D) <= TE__ATTN_SHARED_MAX,
              "what the host asks for");
typedef te_attn_tile<BM, BN> te_q_tile;
#define TE__LARGEST 448.0f // of E4M3
// The factor of O against the truncation of wgmma's sums. A product of 128 keys loses up to 1.1e-3 of its value if all
// terms are alike, and nothing if one term dominates. The factor makes up for half of the largest loss.
#define TE__MENDED 1.00055f

// Takes the numbers of tiles from a counter, and describes each tile to the other threads. One thread runs this
// function.
TE_DEV void te_schedule(const te__attn_fwd_fp8_kargs &a, te_u32 smem) {
    const te_u32 bar = smem + AT_BARRIERS;
    te_queue<2> turn;
    bool more = true;
    for (te_u32 number = blockIdx.x; more; turn.next()) {
        te_q_tile t = {};
        do { // skips tiles after the end of a packed sequence
            more = number < (te_u32)a.order.tiles;
            if (!more) break;
            t.find(a, number);
            number = atomicAdd(a.order.counter, 1u) + gridDim.x;
        } while (t.row >= t.q_end);
        te_mbar_wait(bar + 8 * (EMPTY_T + turn.stage), turn.parity ^ 1);
        t.tell(smem + AT_TILES + 64 * turn.stage, more);
        te_mbar_arrive(bar + 8 * (FULL_T + turn.stage));
    }
    // The last block that has found no more tiles sets the counter of tiles to 0 for the next launch.
    if (atomicInc(a.order.counter + 1, gridDim.x - 1) == gridDim.x - 1) a.order.counter[0] = 0;
}

// Starts all loads. One thread runs this function.
TE_DEV void te_load_tiles(const te__attn_fwd_fp8_kargs &a, te_u32 smem) {
    const te_u32 bar = smem + AT_BARRIERS;
    te_queue<STAGES> k, v;
    te_queue<2> q, turn;
    auto load = [&](const void *map, int full, int empty, te_u32 to, te_queue<STAGES> &at, int x, int y, int head,
                    int batch) {
        te_mbar_wait(bar + 8 * (empty + at.stage), at.parity ^ 1);
        te_mbar_expect(bar + 8 * (full + at.stage), BYTES_K);
        te_tma_load4(to + at.stage * BYTES_K, map, x, y, head, batch, bar + 8 * (full + at.stage));
        at.next();
    };
    // The block of V that is still to load, if `key` is not -1. The next block of K is loaded before it, even if that
    // block of K belongs to the next tile.
    int key = -1, head = 0, batch = 0;
    auto load_v = [&] {
        if (key >= 0) load(a.v_map, FULL_V, EMPTY_V, smem + AT_V, v, key, 0, head, batch);
        key = -1;
    };
    for (;;) {
        te_q_tile t;
        te_mbar_wait(bar + 8 * (FULL_T + turn.stage), turn.parity);
        const bool more = t.template hear<false>(smem + AT_TILES + 64 * turn.stage);
        te_mbar_arrive(bar + 8 * (EMPTY_T + turn.stage));
        turn.next();
        if (!more) break;
        if (t.begin >= t.end) { // consumers store zeros
            load_v();
            continue;
        }
        const int batch_q = a.a.x.packed_q ? 0 : t.batch, batch_kv = a.a.x.packed_kv ? 0 : t.batch,
                  group = t.head / (a.a.heads / a.a.groups),
                  v_at = a.a.x.packed_kv ? te__attn_fp8_values_at(t.kv_at, t.batch) : 0;
        te_mbar_wait(bar + 8 * (EMPTY_Q + q.stage), q.parity ^ 1);
        te_mbar_expect(bar + 8 * (FULL_Q + q.stage), 2 * PART_Q);
        for (int w = 0; w < 2; w++)
            te_tma_load4(smem + AT_Q + (2 * q.stage + w) * PART_Q, a.q_map, 0, t.q_at + t.row + 64 * w, t.head, batch_q,
                         bar + 8 * (FULL_Q + q.stage));
        q.next();
        for (int n = t.end - 1; n >= t.begin; n--) {
            load(a.k_map, FULL_K, EMPTY_K, smem + AT_K, k, 0, t.kv_at + n * BN, group, batch_kv);
            load_v();
            key = v_at + n * BN, head = group, batch = batch_kv;
        }
    }
    load_v();
}

// Describes a tile whose rows of D bytes have the swizzle of D bytes.
TE_DEV te_u64 te_rows_desc(te_u32 tile) {
    return D == 128 ? te_wgmma_desc(tile, 0)
                    : (te_u64)((tile & 0x3ffff) >> 4) | (te_u64)(512 >> 4) << 32 | (te_u64)2 << 62;
}
TE_DEV te_u32 te_codes4(float a, float b, float c, float d) {
    return te_f32x2_to_fp8(a, b, TE_F8E4M3) | (te_u32)te_f32x2_to_fp8(c, d, TE_F8E4M3) << 16;
}
TE_DEV float te_row_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(TE_ALL, x, 1));
    return fmaxf(x, __shfl_xor_sync(TE_ALL, x, 2));
}
TE_DEV float te_row_sum(float x) {
    x += __shfl_xor_sync(TE_ALL, x, 1);
    return x + __shfl_xor_sync(TE_ALL, x, 2);
}

// The state of consumer warpgroup w, with one function for each step of a tile.
struct te_consumer {
    const te__attn_fwd_fp8_kargs &a;
    const te_u32 smem, bar;
    const int w, lane, warp, own; // own: the thread's upper row in a tile
    float scale2; // factor from products of codes to log2
    te_queue<STAGES> k, v;
    te_queue<2> q, turn;
    te_q_tile t;
    float o[D / 2], part[D / 2], s[BN / 2];
    float m[2], sum[2], peak[2]; // of the two rows: m, the thread's part of the sum, its largest element
    te_u32 p[BN / 4];

    TE_DEV te_consumer(const te__attn_fwd_fp8_kargs &a, te_u32 smem, int w)
        : a(a), smem(smem), bar(smem + AT_BARRIERS), w(w), lane(threadIdx.x & 31), warp(threadIdx.x >> 5 & 3),
          own(w * 64 + (threadIdx.x >> 5 & 3) * 16 + ((threadIdx.x & 31) >> 2)) {
        // above 0, so that hidden scores remain -inf
        scale2 = fmaxf(a.a.scale2 * (*a.a.x.q_inv * *a.a.x.k_inv), 1e-30f);
    }

    template <int N> TE_DEV void await(int full, const te_queue<N> &at) const {
        te_mbar_wait(bar + 8 * (full + at.stage), at.parity);
    }
    template <int N> TE_DEV void release(int empty, te_queue<N> &at) {
        if (lane == 0) te_mbar_arrive(bar + 8 * (empty + at.stage));
        at.next();
    }
    TE_DEV bool next_tile() {
        await(FULL_T, turn);
        const bool more = t.template hear<true>(smem + AT_TILES + 64 * turn.stage);
        te_mbar_arrive(bar + 8 * (EMPTY_T + turn.stage));
        turn.next();
        return more;
    }
    TE_DEV void ask() { // S = Q K^T
        const te_u64 at_q = te_rows_desc(smem + AT_Q + (2 * q.stage + w) * PART_Q),
                     at_k = te_rows_desc(smem + AT_K + k.stage * BYTES_K);
        TE_WGMMA_TO_128("=f", "k32.f32.e4m3.e4m3", ", 1, 1", s, at_q, at_k, 0);
#pragma unroll
        for (int i = 1; i < D / 32; i++)
            TE_WGMMA_TO_128("+f", "k32.f32.e4m3.e4m3", ", 1, 1", s, at_q + 2 * i, at_k + 2 * i, 1);
        te_wgmma_commit();
    }
    TE_DEV void gather() { // part = P V
        const te_u64 at_v = te_wgmma_desc(smem + AT_V + v.stage * BYTES_V, 0);
#define TE__PRODUCT(n)                                                                                   \
    if constexpr (D == n) {                                                                              \
        TE_WGMMA_A_TO_##n("=f", "k32.f32.e4m3.e4m3", ", 1, 1", part, p, at_v, 0);                        \
        TE_WGMMA_A_TO_##n("+f", "k32.f32.e4m3.e4m3", ", 1, 1", part, p + 4, at_v + 2, 1);                \
        TE_WGMMA_A_TO_##n("+f", "k32.f32.e4m3.e4m3", ", 1, 1", part, p + 8, at_v + 4, 1);                \
        TE_WGMMA_A_TO_##n("+f", "k32.f32.e4m3.e4m3", ", 1, 1", part, p + 12, at_v + 6, 1);               \
    }
        static_assert(BN == 128, "four products of 32 keys");
        TE__PRODUCT(64)
        TE__PRODUCT(128)
#undef TE__PRODUCT
        te_wgmma_commit();
    }
    TE_DEV void add() { // O += part
#pragma unroll
        for (int i = 0; i < D / 2; i++) o[i] += part[i];
    }
    // Computes P from S, by the bases of the two rows. z[0] + z[1] becomes the sum of the thread's elements of the
    // upper row, z[2] + z[3] that of the lower row. top[0] and top[1] become the largest elements, if these are larger.
    TE_DEV void exponentials(const float (&base)[2], float (&z)[4], float (&top)[2]) {
#pragma unroll
        for (int g = 0; g < BN / 16; g++) {
            float e[8];
#pragma unroll
            for (int i = 0; i < 8; i++) e[i] = te_exp2(fmaf(s[8 * g + i], scale2, -base[i / 2 & 1]));
#pragma unroll
            for (int i = 0; i < 4; i++) z[i] = g ? z[i] + (e[i] + e[i + 4]) : e[i] + e[i + 4];
#pragma unroll
            for (int i = 0; i < 4; i++) // numbers >= 0 have the order of their bits
                top[i / 2] = __int_as_float(
                    max(max(__float_as_int(top[i / 2]), __float_as_int(e[i])), __float_as_int(e[i + 4])));
            p[4 * (g / 2) + 2 * (g & 1)] = te_codes4(e[0], e[1], e[4], e[5]);
            p[4 * (g / 2) + 2 * (g & 1) + 1] = te_codes4(e[2], e[3], e[6], e[7]);
        }
    }
    // The bases that exponentials() takes. A row that has seen no key has m = -inf.
    TE_DEV static float base_of(float m) { return (m == -TE_INF ? 0.0f : m) - TE__ATTN_FP8_LATE; }
    // Raises m of the rows that `mine` names to their maximum so far.
    TE_DEV void rise(const bool (&mine)[2]) {
        float y[2] = {-TE_INF, -TE_INF}, by[2];
#pragma unroll
        for (int i = 0; i < BN / 2; i++) y[i / 2 & 1] = fmaxf(y[i / 2 & 1], s[i]);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float row = te_row_max(y[i]) * scale2, to = mine[i] ? fmaxf(m[i], row) : m[i];
            by[i] = m[i] == -TE_INF ? 0.0f : te_exp2(base_of(m[i]) - base_of(to));
            m[i] = to, sum[i] *= by[i], peak[i] *= by[i];
        }
#pragma unroll
        for (int i = 0; i < D / 2; i++) o[i] *= by[i / 2 & 1];
    }
    // `look`: first raises m of both rows to the maximum so far.
    TE_DEV void softmax(bool look) {
        float z[4];
        if (look) rise({true, true});
        // a row without keys so far has the base -inf, whose elements are inf or NaN
        const float base[2] = {m[0] - TE__ATTN_FP8_LATE, m[1] - TE__ATTN_FP8_LATE};
        float top[2] = {peak[0], peak[1]};
        exponentials(base, z, top);
        const bool over[2] = {!(top[0] <= TE__LARGEST), !(top[1] <= TE__LARGEST)};
        if (__any_sync(TE_ALL, over[0] || over[1])) {
            bool mine[2]; // the four lanes of a row decide together
#pragma unroll
            for (int i = 0; i < 2; i++) mine[i] = __ballot_sync(TE_ALL, over[i]) >> (lane & 28) & 15;
            rise(mine);
            const float again[2] = {base_of(m[0]), base_of(m[1])};
            exponentials(again, z, peak);
        } else {
            peak[0] = top[0], peak[1] = top[1];
        }
        sum[0] += z[0] + z[1], sum[1] += z[2] + z[3];
    }
    TE_DEV void hide(int n) {
        const int row = t.row + own, column = n * BN + 2 * (lane & 3), last = t.s_kv - 1 - column;
#pragma unroll
        for (int half = 0; half < 2; half++)
            te_hide_outside(s, half, row + 8 * half + t.lo - column, min(row + 8 * half + t.hi - column, last));
    }
    TE_DEV void first() {
        const int n = t.end - 1;
        float z[4], base[2];
        await(FULL_Q, q);
        await(FULL_K, k);
        te_wgmma_fence();
        ask();
        te_wgmma_wait<0>();
        te_wgmma_keep(s);
        release(EMPTY_K, k);
        if (n >= t.hidden_from || n < t.hidden_to || (n + 1) * BN > t.s_kv) hide(n);
        float y[2] = {-TE_INF, -TE_INF};
#pragma unroll
        for (int i = 0; i < BN / 2; i++) y[i / 2 & 1] = fmaxf(y[i / 2 & 1], s[i]);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            m[i] = te_row_max(y[i]) * scale2;
            base[i] = base_of(m[i]);
            peak[i] = 0.0f;
        }
        exponentials(base, z, peak);
        sum[0] = z[0] + z[1], sum[1] = z[2] + z[3];
#pragma unroll
        for (int i = 0; i < D / 2; i++) o[i] = 0.0f;
    }
    // Issues P V of block n + 1 and then Q K of block n, and computes the softmax of block n.
    template <bool MASKED> TE_DEV void step(int n) {
        await(FULL_V, v);
        te_wgmma_keep(p);
        te_wgmma_fence();
        gather();
        await(FULL_K, k);
        te_wgmma_fence();
        ask();
        te_wgmma_wait<1>();
        te_wgmma_keep(part);
        te_wgmma_keep(p);
        release(EMPTY_V, v);
        add();
        te_wgmma_wait<0>();
        te_wgmma_keep(s);
        release(EMPTY_K, k);
        if (MASKED) hide(n);
        softmax(n == t.end - 2);
        te_wgmma_keep(p);
    }
    TE_DEV void last() {
        await(FULL_V, v);
        te_wgmma_keep(p);
        te_wgmma_fence();
        gather();
        te_wgmma_wait<0>();
        te_wgmma_keep(part);
        te_wgmma_keep(p);
        release(EMPTY_V, v);
        add();
    }
    TE_DEV void store() {
        const te__attn_kargs &g = a.a;
        const int row = t.row + own, thread = threadIdx.x & 127;
        const float values = *g.x.v_inv * TE__MENDED;
        float by[2], largest = 0.0f;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float all = te_row_sum(sum[i]);
            const bool sees = row + 8 * i < t.s_q && all != 0.0f;
            const float top = te_row_max(peak[i]);
            float coded, none;
            te_fp8x2_to_f32(te_f32x2_to_fp8(top, 0.0f, TE_F8E4M3), TE_F8E4M3, &coded, &none);
            by[i] = sees ? __fdividef(values, all + (coded - top)) : 0.0f;
            if (sees) largest = fmaxf(largest, __fdividef(top, all));
            if (g.lse && (lane & 3) == 0 && row + 8 * i < t.q_end) {
                const te_i64 at =
                    g.x.packed_q ? t.q_at + (te_i64)t.head * g.x.t_q : ((te_i64)t.batch * g.heads + t.head) * g.s_q;
                g.lse[at + row + 8 * i] = sees ? (base_of(m[i]) + __log2f(all)) * TE_LN2 : -TE_INF;
            }
        }
        if (g.x.s_amax) {
            largest = te_warp_max(largest);
            if (lane == 0 && largest > 0.0f) atomicMax((int *)g.x.s_amax, __float_as_int(largest));
        }
        const te_u32 out = smem + AT_O + w * PART_O;
        if (thread == 0) te_bulk_wait_read<0>(); // the last tile's O has been read
        te_meet<128>(8 + w);
#pragma unroll
        for (int j = 0; j < D / 16; j++) {
            te_u32 r[4];
#pragma unroll
            for (int i = 0; i < 4; i++) // rows beyond the sequence may have any O, even NaN
                r[i] = by[i & 1] == 0.0f
                           ? 0u
                           : te_pack16(o[8 * j + 2 * i] * by[i & 1], o[8 * j + 2 * i + 1] * by[i & 1]);
            const int piece = 2 * j + (lane >> 4);
            te_stmatrix4(out + (piece >> 3) * 8192 + te_swizzled(warp * 16 + (lane & 15), piece & 7), r);
        }
        te_async_fence();
        te_meet<128>(8 + w);
        if (!g.x.packed_q || t.row + 64 * (w + 1) <= t.q_end) {
            if (thread == 0) {
                for (int i = 0; i < te_panels(D); i++)
                    te_tma_store4(a.o_map, out + i * 8192, 64 * i, t.q_at + t.row + 64 * w, t.head,
                                  g.x.packed_q ? 0 : t.batch);
                te_bulk_commit();
            }
            return;
        }
        char *to = (char *)g.o.p + 2 * (t.head * g.o.h + (t.q_at + t.row + 64 * w) * g.o.s);
        const int rows = t.q_end - t.row - 64 * w, pieces = g.d_v / 8;
        for (int i = thread; i < 64 * pieces; i += 128) {
            const int r = i / pieces, piece = i - r * pieces;
            if (r < rows)
                *(uint4 *)(to + 2 * r * g.o.s + 16 * piece) =
                    te_lds16(out + (piece >> 3) * 8192 + te_swizzled(r, piece & 7));
        }
    }
    TE_DEV void run() {
        bool more = next_tile();
        while (more) { // with `for`, ptxas would compute addresses of shared memory again in every step
            if (t.begin < t.end) {
                first();
                int n = t.end - 2;
#pragma unroll 1
                for (; n >= t.hidden_from; n--) step<true>(n);
#pragma unroll 1
                for (; n >= t.hidden_to; n--) step<false>(n);
#pragma unroll 1
                for (; n >= t.begin; n--) step<true>(n);
                release(EMPTY_Q, q);
                last();
            } else {
                sum[0] = sum[1] = 0.0f;
                m[0] = m[1] = -TE_INF;
#pragma unroll
                for (int i = 0; i < D / 2; i++) o[i] = 0.0f;
            }
            store();
            more = next_tile();
        }
        if ((threadIdx.x & 127) == 0) te_bulk_wait_read<0>(); // shared memory must outlive the store
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    te_attn_fwd_fp8_hopper(const __grid_constant__ te__attn_fwd_fp8_kargs a) {
    te_follow();
    extern __shared__ __align__(1024) char shared[];
    const te_u32 smem = te_smem(shared), bar = smem + AT_BARRIERS;
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2; i++) {
            te_mbar_init(bar + 8 * (FULL_Q + i), 1);
            te_mbar_init(bar + 8 * (EMPTY_Q + i), 8);
            te_mbar_init(bar + 8 * (FULL_T + i), 1);
            te_mbar_init(bar + 8 * (EMPTY_T + i), 257); // all consumers, and the thread that loads
        }
        for (int i = 0; i < STAGES; i++) {
            te_mbar_init(bar + 8 * (FULL_K + i), 1);
            te_mbar_init(bar + 8 * (EMPTY_K + i), 8);
            te_mbar_init(bar + 8 * (FULL_V + i), 1);
            te_mbar_init(bar + 8 * (EMPTY_V + i), 8);
        }
        te_mbar_init_done();
    }
    __syncthreads();
    const int group = __shfl_sync(TE_ALL, threadIdx.x / 128, 0);
    if (group == 0) {
        te_registers_down<40>();
        if (threadIdx.x == 0) te_load_tiles(a, smem);
        if (threadIdx.x == 32) te_schedule(a, smem);
    } else {
        te_registers_up<232>();
        te_consumer consumer(a, smem, group - 1);
        consumer.run();
    }
}
