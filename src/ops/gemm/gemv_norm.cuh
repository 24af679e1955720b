// ops/gemm/gemv_norm.cuh: each block of a kernel normalizes all rows of A on their way to shared memory. This file must
// not depend on what the kernel does with them.
//
// A row is divided as in norm_fwd (norm_row.cuh): among `warps` warps, of which a lane has up to four vectors of eight
// elements. So both kernels have the same bits. A part is what one warp has of a row. The parts of all rows are dealt
// out to the block's warps in turn:
//
//     warps 4, three rows:   row 0 [0] [1] [2] [3]   row 1 [4] [5] [6] [7]   row 2 [8] [9] [10] [11]
//     block of 8 warps:      warp 0 has parts 0 and 8, warp 1 has parts 1 and 9, .., warp 7 has part 7
//
// A warp's first part stays in registers; the elements of others are loaded once more when their row is normalized.
#pragma once
#include "ops/gemm/epilogue.cuh"
#include "ops/norm/norm_formula.cuh"

// LAYER: LayerNorm, else RMSNorm. DT: A's format, of 16 bits. WEIGHT: the format of gamma and beta. WARPS_OF_BLOCK: the
// block's number of warps.
template <bool LAYER, int DT, int WEIGHT, int WARPS_OF_BLOCK> struct te_gemv_norm {
    enum { MOST = TE__GEMV_NORM_CHUNKS };
    const te__gemv_norm &how;
    const te_u16 *a; // [m, k]
    te_i64 lda;
    int lane, warp, vectors, parts, share; // vectors: of a row; share: the place of `gamma` in a row
    te_raw<WEIGHT> gamma[MOST], beta[LAYER ? MOST : 1];

    TE_DEV te_gemv_norm(const te__gemv_norm &how, const void *a, te_i64 lda, int m, int k)
        : how(how), a((const te_u16 *)a), lda(lda), lane(threadIdx.x & 31), warp(threadIdx.x >> 5), vectors(k >> 3),
          parts(m * how.warps), share(-1) {}

    // Returns the number of the lane's vector c in a row, of the part at place `at`.
    TE_DEV int vector(int at, int c) const { return (at + c * how.warps) * 32 + lane; }

    // Loads gamma and beta at place `at` of a row, if they are not there. The first call may come before te_follow, if
    // nothing writes gamma and beta.
    TE_DEV void ask_weights(int at) {
        if (at == share) return;
        share = at;
#pragma unroll
        for (int c = 0; c < MOST; c++) {
            const int v = vector(at, c);
            gamma[c] = te_raw_zero<WEIGHT>();
            if (v < vectors) gamma[c] = te_raw_load_hinted<WEIGHT, TE_LOAD_HERE>(how.gamma, 8 * v);
            if (!LAYER) continue;
            beta[c] = te_raw_zero<WEIGHT>();
            if (v < vectors && how.beta) beta[c] = te_raw_load_hinted<WEIGHT, TE_LOAD_HERE>(how.beta, 8 * v);
        }
    }
    TE_DEV void ask_weights() { ask_weights(warp % how.warps); }

    // Computes all rows, each from shared-memory address `to` + row * `bytes` on. Returns the bits of the largest |y|
    // that the thread has stored, of even and of odd places, in the halves of a word; NaN is ignored. `scratch`: four
    // floats for each part. All threads call this, and wait for each other before they read rows.
    TE_DEV te_u32 rows(te_u32 to, int bytes, float *scratch) {
        const float one_nth = 1.0f / (float)(8 * vectors);
        const int last = warp + (parts - 1 - warp) / WARPS_OF_BLOCK * WARPS_OF_BLOCK;
        float *const again = scratch + 2 * parts;
        te_u32 largest = 0;
        te_raw<DT> x[MOST]; // of the warp's first part after the loop
        if (warp < parts)
#pragma unroll 1
            for (int p = last; p >= warp; p -= WARPS_OF_BLOCK) ask(p, x), put(scratch, p, sum(p, x, 0.0f));
        __syncthreads();
        if (LAYER) {
#pragma unroll 1
            for (int p = last; p >= warp && p < parts; p -= WARPS_OF_BLOCK) {
                te_norm_moments of;
                if (parts > WARPS_OF_BLOCK) ask(p, x);
                if (of.first<LAYER>(total(scratch, p), one_nth)) put(again, p, sum(p, x, of.mean));
            }
            __syncthreads();
        }
#pragma unroll 1
        for (int p = warp; p < parts; p += WARPS_OF_BLOCK) {
            if (p != warp) ask(p, x);
            finish(p, x, scratch, again, one_nth, to, bytes, largest);
        }
        return largest;
    }

private:
    TE_DEV void ask(int part, te_raw<DT> x[MOST]) const {
        const int row = part / how.warps, at = part - row * how.warps;
        const te_u16 *from = a + row * lda;
#pragma unroll
        for (int c = 0; c < MOST; c++) {
            const int v = vector(at, c);
            x[c] = te_raw_zero<DT>();
            if (v < vectors) x[c] = te_raw_load_hinted<DT, TE_LOAD_HERE>(from, 8 * v);
        }
    }
    // Returns the sums of x - shift and of (x - shift)^2 over a part.
    TE_DEV float2 sum(int part, const te_raw<DT> x[MOST], float shift) const {
        float2 s = make_float2(0.0f, 0.0f);
#pragma unroll
        for (int c = 0; c < MOST; c++)
            if (vector(part % how.warps, c) < vectors) te_norm_add_share<LAYER>(s, x[c], shift);
        if (LAYER) return te_warp_sum2(s);
        s.y = te_warp_sum(s.y);
        return s;
    }
    TE_DEV void put(float *scratch, int part, float2 s) const {
        if (lane != 0) return;
        if (LAYER) scratch[parts + part] = s.x;
        scratch[part] = s.y;
    }
    // Returns the sums over the row of a part, added in the order of its parts.
    TE_DEV float2 total(const float *scratch, int part) const {
        const int from = part / how.warps * how.warps;
        float2 s = make_float2(0.0f, 0.0f);
#pragma unroll 4
        for (int w = 0; w < how.warps; w++) {
            if (LAYER) s.x += scratch[parts + from + w];
            s.y += scratch[from + w];
        }
        return s;
    }
    TE_DEV void finish(int part, const te_raw<DT> x[MOST], const float *scratch, const float *again, float one_nth,
                       te_u32 to, int bytes, te_u32 &largest) {
        const int row = part / how.warps, at = part - row * how.warps;
        te_norm_moments of;
        if (of.first<LAYER>(total(scratch, part), one_nth)) of.second(total(again, part), one_nth);
        of.finish(how.eps);
        ask_weights(at);
#pragma unroll
        for (int c = 0; c < MOST; c++) {
            const int v = vector(at, c);
            if (v >= vectors) continue;
            float y[8];
            te_u32 w[4];
            te_norm_result<LAYER>(x[c], of, gamma[c], beta[LAYER ? c : 0], how.zero_centered, how.rounded, y);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                w[j] = te_f32x2_to_half(y[2 * j], y[2 * j + 1], DT);
                largest = te_half2_max(largest, w[j] & 0x7fff7fff, DT);
            }
            te_sts16(to + row * bytes + v * 16, make_uint4(w[0], w[1], w[2], w[3]));
        }
    }
};
