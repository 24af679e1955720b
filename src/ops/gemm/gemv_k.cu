// ops/gemm/gemv_k.cu: computes D = epilogue(scale_a scale_b op(A) op(B) + bias) + D if one operand has at most sixteen
// lines. A line is a row of A or a column of B. The short operand is Y, and the long one is X. Both are K-major.
// Reading X is the limit.
//
//        k
//        +----+----+-- ..  --+----+----+
//     16 | w0 | w1 |         | w0 | w1 | ..
//        +----+----+-- ..  --+----+----+
//
// A block has 16 lines of X. k is divided into turns of 128 bytes. Warp w multiplies the turns w, w + WARPS and so on.
// X and Y are loaded straight into registers, because no other block needs these bytes of X.
//
// mma.sync multiplies 16 lines of X by 8 lines of Y, over 16 values of k. X and Y may have any order of k, if it is the
// same. So each lane loads whole pieces of 16 bytes. Of each 64 bytes, lane 4 g + t loads piece t, for lines g and g +
// 8 of X and for line g of Y.
//
// FP8 is decoded into f16. MXFP8 and NVFP4, with their scales, are decoded into bf16. All this is exact.
//
// Lines may have any alignment. 16 bytes that are not aligned are shifted together from two aligned pieces.
//
// Benchmark: "gemv ..." in tests/bench/h200.csv.
//
// Options:
//          A_DT, B_DT  te_dtypes: both bf16, both f16, both fp4, or FP8 formats
//          SHORT_A     1: A is the short operand
//          EIGHTS      1: Y has up to 8 lines; 2: Y has up to 16 lines (only with ALIGNED and without BLOCK)
//          ALIGNED     1: A, B and their lines start at multiples of 16 bytes
//          WARPS       warps of a block: 16 for a small grid, with ALIGNED and EIGHTS=1, without BLOCK and SCALES;
//                      otherwise 8, since a thread then has more registers
//          BLOCK       te__gemm_block_kind: the sum of each turn (128 values of k in FP8) is scaled in f32; 0: none
//          SCALES      1: scales of MXFP8; 2: scales of NVFP4; row-wise, at block_a and block_b; 0: none
//          SWIZZLED    1: these scales are swizzled
//
// Launch: grid ceil(lines of X / 16), block 32 WARPS.
//
// te:arch 80
// te:row A_DT=3 B_DT=3 BLOCK=0 SCALES=0 SWIZZLED=0 SHORT_A=1 EIGHTS=1 ALIGNED=1 WARPS=16
// te:row A_DT=3 B_DT=3 BLOCK=0 SCALES=0 SWIZZLED=0 SHORT_A=0 EIGHTS=1 ALIGNED=0 WARPS=8
// te:row A_DT=2 B_DT=2 BLOCK=0 SCALES=0 SWIZZLED=0 SHORT_A=1 EIGHTS=2 ALIGNED=1 WARPS=8
// te:row A_DT=4 B_DT=4 BLOCK=0 SCALES=0 SWIZZLED=0 SHORT_A=1 EIGHTS=1 ALIGNED=1 WARPS=8|16
// te:row A_DT=5 B_DT=4 BLOCK=0 SCALES=0 SWIZZLED=0 SHORT_A=1 EIGHTS=1 ALIGNED=0 WARPS=8
// te:row A_DT=4 B_DT=4 BLOCK=1 SCALES=0 SWIZZLED=0 SHORT_A=0 EIGHTS=1 ALIGNED=0 WARPS=8
// te:row A_DT=4 B_DT=4 BLOCK=2 SCALES=0 SWIZZLED=0 SHORT_A=1 EIGHTS=1 ALIGNED=1 WARPS=8
// te:row A_DT=4 B_DT=5 BLOCK=3 SCALES=0 SWIZZLED=0 SHORT_A=1 EIGHTS=1 ALIGNED=1 WARPS=8
// te:row A_DT=4 B_DT=4 BLOCK=0 SCALES=0 SWIZZLED=0 SHORT_A=0 EIGHTS=2 ALIGNED=1 WARPS=8
// te:row A_DT=4 B_DT=4 BLOCK=0 SCALES=1 SWIZZLED=0 SHORT_A=1 EIGHTS=1|2 ALIGNED=1 WARPS=8
// te:row A_DT=7 B_DT=7 BLOCK=0 SCALES=2 SWIZZLED=0 SHORT_A=1 EIGHTS=1|2 ALIGNED=1 WARPS=8
// te:row A_DT=5 B_DT=4 BLOCK=0 SCALES=1 SWIZZLED=1 SHORT_A=0 EIGHTS=1 ALIGNED=0 WARPS=8
// te:row A_DT=7 B_DT=7 BLOCK=0 SCALES=2 SWIZZLED=1 SHORT_A=0 EIGHTS=1 ALIGNED=0 WARPS=8
#include "ops/gemm/decode.cuh"
#include "ops/gemm/gemv.cuh"
#include "ops/gemm/shift.cuh"

#define X_DT (SHORT_A ? B_DT : A_DT)
#define Y_DT (SHORT_A ? A_DT : B_DT)
#define FP8 (A_DT == 4 || A_DT == 5)
#define BITS (SCALES == 2 ? 4 : FP8 ? 8 : 16)
#define PIECE (128 / BITS)  // elements in 16 bytes
#define TURN (8 * PIECE)    // elements of k in a turn: two steps of four lanes
// RESIDENT: warps on a multiprocessor, as many as registers allow.
#define RESIDENT                                                                                                       \
    ((SCALES == 2 && EIGHTS > 1) || (BLOCK && !ALIGNED) ? 8 : !ALIGNED || SCALES ? 16 : BLOCK || EIGHTS > 1 ? 24 : 32)
#define A_2D (BLOCK == 3)   // numbers of te__gemm_block_kind
#define B_2D (BLOCK == 2)

// Both functions load sixteen bytes, which nothing may write while the kernel runs. .L2::256B is faster except for
// aligned 16-bit elements (tests/bench/notes.md).
#if BITS == 16 && ALIGNED
#define FETCH ""
#else
#define FETCH ".L2::256B"
#endif
TE_DEV uint4 te_gemv_load(const te_u8 *p) {
    uint4 u;
    asm("ld.global.nc" FETCH ".v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(u.x), "=r"(u.y), "=r"(u.z), "=r"(u.w) : "l"(p));
    return u;
}
TE_DEV uint4 te_gemv_load_once(const te_u8 *p) {
    uint4 u;
    asm("ld.global.nc.L1::no_allocate" FETCH ".v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(u.x), "=r"(u.y), "=r"(u.z), "=r"(u.w)
        : "l"(p));
    return u;
}

// A line (row of A or column of B) of an operand. For a number beyond the last line, open() takes the last line; the
// products for such a number are not stored.
struct te_gemv_line {
    const te_u8 *from, *end, *scale; // from: start of the line; end: end of the operand; scale: the operand's scales,
                                     // with SCALES
    te_i64 line, ld_scale;
    TE_DEV void open(const void *operand, te_i64 ld, te_i64 lines, te_i64 k, const void *scales, te_i64 ld_scales,
                     te_i64 number) {
        line = min(number, lines - 1), ld_scale = ld_scales, scale = (const te_u8 *)scales;
        from = (const te_u8 *)operand + line * ld * BITS / 8;
        end = (const te_u8 *)operand + (((lines - 1) * ld + k) * BITS + 7) / 8;
    }

    // Loads sixteen bytes from element `at` on. `at` is a multiple of PIECE. If not ALIGNED, also reads up to 15 bytes
    // before and behind the sixteen bytes.
    TE_DEV uint4 load(te_i64 at, bool kept) const { // kept: the bytes stay in the L1 cache, since they are loaded again
        const te_u8 *p = from + at * BITS / 8;
        int by = ALIGNED ? 0 : (int)((te_u64)p & 15);
        uint4 u = !ALIGNED || kept ? te_gemv_load(p - by) : te_gemv_load_once(p);
        return ALIGNED ? u : te_shift(u, te_gemv_load(p - by + (by ? 16 : 0)), by);
    }
    // Loads sixteen bytes as load() does, but the line or the operand may end within them. Bytes beyond the end become
    // 0.
    TE_DEV uint4 load_end(te_i64 at, te_i64 k) const {
        const te_u8 *p = from + at * BITS / 8;
        int by = (int)((te_u64)p & 15), left = k - at < PIECE ? (int)(k - at) : PIECE;
        te_u32 w[4] = {0, 0, 0, 0};
        if (left == PIECE && (ALIGNED || p - by + (by ? 32 : 16) <= end)) return load(at, true);
#pragma unroll
        for (int i = 0; i < (BITS == 16 ? 8 : 16); i++) {
            te_u32 v = 0;
            if (BITS == 16 && i < left) v = ((const te_u16 *)p)[i];
            if (BITS < 16 && i * 8 / BITS < left) v = p[i];
            if (BITS == 4 && 2 * i + 1 == left) v &= 15;
            w[i * (BITS == 16 ? 2 : 1) / 4] |= v << i * (BITS == 16 ? 16 : 8) % 32;
        }
        return make_uint4(w[0], w[1], w[2], w[3]);
    }
    // Returns the scales of the 16 bytes at element `at`, in the form that te_decode_fp8x2 and te_decode_fp4x2 take. 16
    // bytes have one scale in MXFP8, and two scales in NVFP4. A scale beyond the last one is returned as 0.
    TE_DEV uint2 scales(te_i64 at, te_i64 k) const {
        te_u32 r[2] = {0, 0};
#pragma unroll
        for (int i = 0; i < SCALES; i++) {
            te_i64 group = at / (SCALES == 1 ? 32 : 16) + i;
            if (SCALES == 1 ? at >= k : group * 16 >= k) continue;
            te_u8 e = scale[te__group_scale_at(SWIZZLED, 0, ld_scale, line, group)];
            r[i] = SCALES == 1 ? e * 0x0101u : te_decode_fp4_scale(e);
        }
        return make_uint2(r[0], r[1]);
    }
};

// Sixteen bytes of a line, and their scales.
struct te_gemv_piece {
    uint4 u;
    uint2 scales;
    TE_DEV te_u32 word(int i) const { return i == 0 ? u.x : i == 1 ? u.y : i == 2 ? u.z : u.w; }
    // Decodes two values of word i. `part` selects them: a word has two such parts in FP8, and four in FP4.
    template <int DT> TE_DEV te_u32 decoded(int i, int part) const {
        if (SCALES == 2) return te_decode_fp4x2(word(i), part, i < 2 ? scales.x : scales.y);
        if (SCALES == 1) return te_decode_fp8x2(word(i), part, DT, scales.x);
        return te_fp8x2_to_f16(word(i), part, DT);
    }
};

// Adds to `sum` the products of 16 bytes of two lines of X and 16 bytes of one line of Y.
TE_DEV void te_gemv_multiply(float sum[4], const te_gemv_piece &x, const te_gemv_piece &x8, const te_gemv_piece &y) {
    const int parts = BITS == 16 ? 2 : 16 / BITS; // parts of a word, each two values; words of 16-bit values are taken
                                                  // in pairs
#pragma unroll
    for (int i = 0; i < 4; i += BITS == 16 ? 2 : 1) {
#pragma unroll
        for (int part = 0; part < parts; part += 2) {
            te_u32 of_x[4], of_y[2];
#pragma unroll
            for (int h = 0; h < 2; h++) {
                of_x[2 * h] = BITS == 16 ? x.word(i + h) : x.decoded<X_DT>(i, part + h);
                of_x[2 * h + 1] = BITS == 16 ? x8.word(i + h) : x8.decoded<X_DT>(i, part + h);
                of_y[h] = BITS == 16 ? y.word(i + h) : y.decoded<Y_DT>(i, part + h);
            }
            if (A_DT == 3 || SCALES) te_mma_bf16(sum, of_x, of_y);
            else te_mma_f16(sum, of_x, of_y);
        }
    }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, RESIDENT / WARPS)
    te_gemv_k(const __grid_constant__ te__gemm_kargs a) {
    te_follow();
    __shared__ float sums[WARPS][8 * EIGHTS][16];
    const te_i64 lines = SHORT_A ? a.n : a.m, few = SHORT_A ? a.m : a.n, first = (te_i64)blockIdx.x * 16;
    int warp = threadIdx.x >> 5, g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
    const void *scales_x = SHORT_A ? a.block_b : a.block_a, *scales_y = SHORT_A ? a.block_a : a.block_b;
    const te_i64 ld_scales_x = SHORT_A ? a.ld_block_b : a.ld_block_a,
                 ld_scales_y = SHORT_A ? a.ld_block_a : a.ld_block_b;
    te_gemv_line x[2], y[EIGHTS];
#pragma unroll
    for (int i = 0; i < 2; i++)
        x[i].open(SHORT_A ? a.b : a.a, SHORT_A ? a.ldb : a.lda, lines, a.k, scales_x, ld_scales_x, first + g + 8 * i);
#pragma unroll
    for (int i = 0; i < EIGHTS; i++)
        y[i].open(SHORT_A ? a.a : a.b, SHORT_A ? a.lda : a.ldb, few, a.k, scales_y, ld_scales_y, g + 8 * i);
    // sum[l] has the four sums of lane 4 g + t for lines 8 l to 8 l + 7 of Y:
    //   sum[l][0]  line g of X,     line 8 l + 2 t of Y        sum[l][1]  line g of X,     line 8 l + 2 t + 1 of Y
    //   sum[l][2]  line g + 8 of X, line 8 l + 2 t of Y        sum[l][3]  line g + 8 of X, line 8 l + 2 t + 1 of Y
    float sum[EIGHTS][4] = {};
    auto take = [&](te_i64 k, bool end) {
        te_gemv_piece u[2][2], v[2][EIGHTS];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            te_i64 at = k + (4 * i + t) * PIECE;
#pragma unroll
            for (int l = 0; l < 2; l++)
                u[i][l].u = end ? x[l].load_end(at, a.k) : x[l].load(at, false), u[i][l].scales = x[l].scales(at, a.k);
#pragma unroll
            for (int l = 0; l < EIGHTS; l++)
                v[i][l].u = end ? y[l].load_end(at, a.k) : y[l].load(at, true), v[i][l].scales = y[l].scales(at, a.k);
        }
#pragma unroll
        for (int l = 0; l < EIGHTS; l++) {
#if BLOCK
            float part[4] = {}, of_x[2], of_y[2];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                of_x[i] = te_gemm_block_scale((const float *)scales_x, SHORT_A ? B_2D : A_2D, ld_scales_x,
                                              min(first + g + 8 * i, lines - 1) + (SHORT_A ? a.first_b : 0), k >> 7);
                of_y[i] =
                    te_gemm_block_scale((const float *)scales_y, SHORT_A ? A_2D : B_2D, ld_scales_y,
                                        min((te_i64)(8 * l + 2 * t + i), few - 1) + (SHORT_A ? 0 : a.first_b), k >> 7);
            }
#pragma unroll
            for (int i = 0; i < 2; i++) te_gemv_multiply(part, u[i][0], u[i][1], v[i][l]);
#pragma unroll
            for (int e = 0; e < 4; e++)
                sum[l][e] = fmaf(part[e], te_gemm_block_product(of_x[e / 2], of_y[e % 2]), sum[l][e]);
#else
#pragma unroll
            for (int i = 0; i < 2; i++) te_gemv_multiply(sum[l], u[i][0], u[i][1], v[i][l]);
#endif
        }
    };
    te_i64 turn = warp, turns = te_div_up(a.k, TURN);
    // number of turns (TURN values of k each) whose loads need not check for the end of k
    te_i64 whole = (ALIGNED ? a.k : a.k - min(a.k, (te_i64)PIECE)) / TURN;
    const int at_once = RESIDENT == 32 ? 2 : 1;
#pragma unroll at_once
    for (; turn < whole; turn += WARPS) take(turn * TURN, false);
#pragma unroll 1
    for (; turn < turns; turn += WARPS) take(turn * TURN, true);
#pragma unroll
    for (int l = 0; l < EIGHTS; l++)
#pragma unroll
        for (int e = 0; e < 4; e++) sums[warp][8 * l + 2 * t + e % 2][g + e / 2 * 8] = sum[l][e];
    te_gemv_finish<16>(a, sums, first);
}
