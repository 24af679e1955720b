// ops/gemm/gemv_norm.cuh: each block of a kernel normalizes all rows of A on their way to shared memory. This file must
// not depend on what the kernel does with them.
//
// The sums of a row are added up as in norm_fwd (norm_row.cuh): among `warps` warps, of which a lane has up to four
// vectors of eight elements. So both kernels have the same bits. A part is what one warp has of a row. The parts of all
// rows are dealt out to the block's warps in turn:
//
//     warps 4, three rows:   row 0 [0] [1] [2] [3]   row 1 [4] [5] [6] [7]   row 2 [8] [9] [10] [11]
//     block of 8 warps:      warp 0 has parts 0 and 8, warp 1 has parts 1 and 9, .., warp 7 has part 7
//
// With the sums, elements do not depend on one another. Each thread of the block normalizes vectors. It loads its first
// one while the sums are added up.
#pragma once
#include "ops/gemm/epilogue.cuh"
#include "ops/norm/norm_formula.cuh"

// LAYER: LayerNorm, else RMSNorm. DT: A's format, of 16 bits. WEIGHT: the format of gamma and beta. WARPS_OF_BLOCK: the
// block's number of warps. ALONE: A has one row.
template <bool LAYER, int DT, int WEIGHT, int WARPS_OF_BLOCK, bool ALONE> struct te_gemv_norm {
    enum { MOST = TE__GEMV_NORM_CHUNKS };
    const te__gemv_norm &how;
    const te_u16 *a; // [m, k]
    te_i64 lda;
    int vectors, parts; // vectors: of a row
    te_raw<WEIGHT> gamma, beta;
    te_raw<DT> x; // the thread's vector

    TE_DEV te_gemv_norm(const te__gemv_norm &how, const void *a, te_i64 lda, int m, int k)
        : how(how), a((const te_u16 *)a), lda(lda), vectors(k >> 3), parts(m * how.warps) {}

    // Loads gamma and beta of vector `at` of a row. The first call may come before te_follow, if nothing writes gamma
    // and beta.
    TE_DEV void ask_weights(int at) {
        gamma = te_raw_load_hinted<WEIGHT, TE_LOAD_HERE>(how.gamma, 8 * at);
        beta = te_raw_zero<WEIGHT>();
        if (LAYER && how.beta) beta = te_raw_load_hinted<WEIGHT, TE_LOAD_HERE>(how.beta, 8 * at);
    }
    // Loads the elements of a vector.
    TE_DEV void ask(int row, int at) { x = te_raw_load_hinted<DT, TE_LOAD_HERE>(a + row * lda, 8 * at); }
    // Adds up the sums of all rows. `scratch`: four floats for each part. All threads of the block call this.
    TE_DEV void add_up(float *scratch) const {
        const int warp = threadIdx.x >> 5;
        te_raw<DT> of[MOST];
        for (int p = warp; p < parts; p += WARPS_OF_BLOCK) load(p, of), put(scratch, p, sum(p, of, 0.0f));
        __syncthreads();
        if (!LAYER) return;
#pragma unroll 1
        for (int p = warp; p < parts; p += WARPS_OF_BLOCK) {
            te_norm_moments moments;
            if (!moments.first<LAYER>(total(scratch, row_of(p)), how.one_nth)) continue;
            load(p, of);
            put(scratch + 2 * parts, p, sum(p, of, moments.mean));
        }
        __syncthreads();
    }
    // Normalizes the vector. Raises `largest`, whose halves are the bits of the largest |y| of even and of odd places;
    // NaN is ignored.
    TE_DEV void finish(int row, const float *scratch, te_u32 &largest) {
        te_norm_moments of;
        if (of.first<LAYER>(total(scratch, row), how.one_nth)) of.second(total(scratch + 2 * parts, row), how.one_nth);
        of.finish(how.eps);
        float y[8];
        te_norm_result<LAYER>(x, of, gamma, beta, how.zero_centered, how.rounded, y);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            x.w[j] = te_f32x2_to_half(y[2 * j], y[2 * j + 1], DT);
            largest = te_half2_max(largest, x.w[j] & 0x7fff7fff, DT);
        }
    }

private:
    // Returns the number in its row of the lane's vector c of a part.
    TE_DEV int vector(int part, int c) const {
        return ((ALONE ? part : part % how.warps) + c * how.warps) * 32 + (threadIdx.x & 31);
    }
    TE_DEV int row_of(int part) const { return ALONE ? 0 : part / how.warps; }
    TE_DEV void load(int part, te_raw<DT> x[MOST]) const {
        const te_u16 *from = a + row_of(part) * lda;
#pragma unroll
        for (int c = 0; c < MOST; c++) {
            const int v = vector(part, c);
            x[c] = te_raw_zero<DT>();
            if (v < vectors) x[c] = te_raw_load_hinted<DT, TE_LOAD_HERE>(from, 8 * v);
        }
    }
    // Returns the sums of x - shift and of (x - shift)^2 over a part.
    TE_DEV float2 sum(int part, const te_raw<DT> x[MOST], float shift) const {
        float2 s = make_float2(0.0f, 0.0f);
#pragma unroll
        for (int c = 0; c < MOST; c++)
            if (vector(part, c) < vectors) te_norm_add_share<LAYER>(s, x[c], shift);
        if (LAYER) return te_warp_sum2(s);
        s.y = te_warp_sum(s.y);
        return s;
    }
    TE_DEV void put(float *scratch, int part, float2 s) const {
        if ((threadIdx.x & 31) != 0) return;
        if (LAYER) scratch[parts + part] = s.x;
        scratch[part] = s.y;
    }
    // Returns the sums over a row, added in the order of its parts.
    TE_DEV float2 total(const float *scratch, int row) const {
        float2 s = make_float2(0.0f, 0.0f);
#pragma unroll 4
        for (int w = row * how.warps; w < (row + 1) * how.warps; w++) {
            if (LAYER) s.x += scratch[parts + w];
            s.y += scratch[w];
        }
        return s;
    }
};
