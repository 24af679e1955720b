// ops/gemm/gemv_k.cu: computes D = epilogue(scale_a scale_b op(A) op(B) + bias) + D if one operand has at most sixteen
// lines, or 32 of MXFP8 or NVFP4, which no other kernel reads. A line is a row of A or a column of B. The short operand
// is Y, and the long one is X. Both are K-major. Reading X is the limit.
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
// FP8 is decoded into f16, exactly. NVFP4 is decoded with its scales into f16 times 2^-14 (te_decode_fp4x8).
//
// The sum over each scaling group of MXFP8 is multiplied by both scales in f32. The pieces of lanes t = 0, 1 are of one
// group, those of lanes 2, 3 of the next. There are two ways to multiply them:
// FOURS:  a product has four lines of Y, each in two columns. Columns 0 to 3 have zeros in place of the second group,
//         and columns 4 to 7 in place of the first. So both groups take one product.
// EIGHTS: lanes t and t + 2 exchange halves of their pieces (te_gemv_exchange), so that chunk c is of group c. So a
//         product has eight lines of Y, and one group.
//
// SHARED: a block decodes Y once, into shared memory, and goes over many tiles of 16 lines of X (gemv_shared.cuh). With
// HIGH it quantizes Y before. The bits are the same as with Y in registers, since f16 holds each number exactly.
//
// Lines may have any alignment. 16 bytes that are not aligned are shifted together from two aligned pieces.
//
// Benchmark: "gemv ..." in tests/bench/h200.csv.
//
// Options:
//          A_DT, B_DT  te_dtypes: both bf16, both f16, both fp4, or FP8 formats
//          SHORT_A     1: A is the short operand
//          EIGHTS      1 to 4: Y has up to 8 * EIGHTS lines; 2 only with ALIGNED and without BLOCK; 3 and 4 only with
//                      SCALES and without SHARED
//          FOURS       1: Y has up to 4 lines; for MXFP8, in place of EIGHTS
//          ALIGNED     1: A, B and their lines start at multiples of 16 bytes
//          WARPS       warps of a block: 16 for a small grid, with ALIGNED and EIGHTS=1, without BLOCK and SCALES;
//                      otherwise 8, since a thread then has more registers
//          BLOCK       te__gemm_block_kind: the sum of each turn (128 values of k in FP8) is scaled in f32; 0: none
//          SCALES      1: scales of MXFP8; 2: scales of NVFP4; row-wise, at block_a and block_b; 0: none. Only with
//                      ALIGNED
//          SWIZZLED    1: these scales are swizzled
//          SHARED      1: Y is in shared memory (only FP8 or FP4, with ALIGNED)
//          HIGH        te_dtype of Y, which the kernel quantizes to Y's format, with SHARED and SHORT_A; 0: Y has codes
//
// Launch: grid ceil(lines of X / 16), block 32 WARPS; SHARED: any grid, TE__GEMV_SHARED bytes of shared memory.
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
// te:row A_DT=4 B_DT=4 BLOCK=0 SCALES=1 SWIZZLED=0|1 SHORT_A=1 FOURS=1 ALIGNED=1 WARPS=8
// te:row A_DT=4 B_DT=4 BLOCK=0 SCALES=1 SWIZZLED=0|1 SHORT_A=1 EIGHTS=1|2|3|4 ALIGNED=1 WARPS=8
// te:row A_DT=7 B_DT=7 BLOCK=0 SCALES=2 SWIZZLED=0|1 SHORT_A=1 EIGHTS=1|2|3|4 ALIGNED=1 WARPS=8
// te:row A_DT=4 B_DT=4 BLOCK=0 SCALES=0 SWIZZLED=0 SHORT_A=1 EIGHTS=1 ALIGNED=1 WARPS=8|16 SHARED=1 HIGH=0|3
// te:row A_DT=4 B_DT=4 BLOCK=0 SCALES=0 SWIZZLED=0 SHORT_A=1 EIGHTS=2 ALIGNED=1 WARPS=8 SHARED=1 HIGH=0|3
// te:row A_DT=4 B_DT=4 BLOCK=2 SCALES=0 SWIZZLED=0 SHORT_A=1 EIGHTS=1 ALIGNED=1 WARPS=8 SHARED=1 HIGH=0|3
// te:row A_DT=4 B_DT=4 BLOCK=0 SCALES=1 SWIZZLED=0 SHORT_A=1 FOURS=1 ALIGNED=1 WARPS=8 SHARED=1 HIGH=0|3
// te:row A_DT=4 B_DT=4 BLOCK=0 SCALES=1 SWIZZLED=0 SHORT_A=1 EIGHTS=1|2 ALIGNED=1 WARPS=8 SHARED=1 HIGH=0|3
// te:row A_DT=7 B_DT=7 BLOCK=0 SCALES=2 SWIZZLED=0 SHORT_A=1 EIGHTS=1|2 ALIGNED=1 WARPS=8 SHARED=1 HIGH=0|3
// te:row A_DT=5 B_DT=4 BLOCK=0 SCALES=1 SWIZZLED=1 SHORT_A=0 FOURS=1 ALIGNED=1 WARPS=8 SHARED=1
// te:row A_DT=7 B_DT=7 BLOCK=0 SCALES=2 SWIZZLED=1 SHORT_A=0 EIGHTS=2 ALIGNED=1 WARPS=8 SHARED=1
#include "ops/gemm/gemv.cuh"
#include "ops/gemm/gemv_codes.cuh"
#include "ops/gemm/shift.cuh"


#ifndef SHARED
#define SHARED 0
#endif
#ifndef HIGH
#define HIGH 0
#endif
// RESIDENT: warps on a multiprocessor, as many as registers allow.
#define RESIDENT                                                                                                       \
    (SHARED ? (WARPS == 16 ? 32 : SETS > 1 || EXCHANGED ? 16 : 24)                                                     \
     : BLOCK && !ALIGNED                                ? 8                                                            \
     : !ALIGNED || SCALES                               ? 16                                                           \
     : BLOCK || SETS > 1                                ? 24                                                           \
                                                        : 32)
#define A_2D (BLOCK == 3) // numbers of te__gemm_block_kind
#define B_2D (BLOCK == 2)

// Loads a unit, which nothing may write while the kernel runs. .L2::256B is faster except for aligned
// 16-bit elements (tests/bench/notes.md).
#if BITS == 16 && ALIGNED
#define FETCH ""
#else
#define FETCH ".L2::256B"
#endif
template <bool ONCE> TE_DEV uint4 te_gemv_load(const te_u8 *p) {
    uint4 u;
    if (ONCE)
        asm("ld.global.nc.L1::no_allocate" FETCH ".v4.u32 {%0, %1, %2, %3}, [%4];"
            : "=r"(u.x), "=r"(u.y), "=r"(u.z), "=r"(u.w)
            : "l"(p));
    else
        asm("ld.global.nc" FETCH ".v4.u32 {%0, %1, %2, %3}, [%4];"
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

    // Loads the unit of element `at`, a multiple of UNIT. If not ALIGNED, also reads up to 15 bytes before and behind
    // it. kept: the bytes stay in the L1 cache, since they are loaded again.
    TE_DEV uint4 load(te_i64 at, bool kept) const {
        const te_u8 *p = from + at * BITS / 8;
        int by = ALIGNED ? 0 : (int)((te_u64)p & 15);
        uint4 u = !ALIGNED || kept ? te_gemv_load<false>(p - by) : te_gemv_load<true>(p);
        return ALIGNED ? u : te_shift(u, te_gemv_load<false>(p - by + (by ? 16 : 0)), by);
    }
    // Loads a unit as load() does, but the line or the operand may end within it. Bytes beyond the end become 0.
    TE_DEV uint4 load_end(te_i64 at, te_i64 k) const {
        const te_u8 *p = from + at * BITS / 8;
        int by = (int)((te_u64)p & 15), left = k - at < UNIT ? (int)(k - at) : UNIT;
        te_u32 w[4] = {0, 0, 0, 0};
        if (left == UNIT && (ALIGNED || p - by + (by ? 32 : 16) <= end)) return load(at, true);
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
    // Returns the bytes of the N scales from element `at` on, N = 1, 2 or 4, of which all have places in memory. Scales
    // behind the last one become 0.
    template <int N> TE_DEV te_u32 scales(te_i64 at, te_i64 k, bool end) const {
        const te_i64 group = at / (SCALES == 1 ? 32 : 16), last = te_div_up(k, SCALES == 1 ? 32 : 16);
        if (end && group >= last) return 0;
        const te_u8 *p = scale + te__group_scale_at(SWIZZLED, 0, ld_scale, line, group);
        te_u32 r = N == 4 ? *(const te_u32 *)p : N == 2 ? *(const te_u16 *)p : *p;
        return end && N > last - group ? r & ((1u << 8 * (int)(last - group)) - 1) : r;
    }
};

#if SHARED
#define THREADS (32 * WARPS)
#define WHOLE 0
#include "ops/gemm/gemv_shared.cuh"
#endif

// Where a lane finds the whole turns of two lines of X: turn * 128 bytes on, and its scales turn * STEP bytes on.
#define STEP ((SCALES == 1 ? 1 : 4) * (SWIZZLED ? 512 : 4))
struct te_gemv_place {
    const te_u8 *codes[2], *scales[2];
    TE_DEV void open(const te_gemv_line line[2], int t) {
#pragma unroll
        for (int l = 0; l < 2; l++) {
            codes[l] = line[l].from + 16 * t;
            if (SCALES) scales[l] = line[l].scale + te__group_scale_at(SWIZZLED, 0, line[l].ld_scale, line[l].line, 0);
            if (SCALES == 2) scales[l] += SWIZZLED ? (t >> 1) * 512 + (t & 1) * 2 : 2 * t;
        }
    }
};


// A lane's part of a turn of X, or of SETS lines of Y.
template <int LINES> struct te_gemv_turn {
    uint4 u[UNITS][LINES];
    te_u32 scale[SCALES == 1 ? 1 : UNITS][LINES]; // MXFP8: the four scales of the turn; NVFP4: both scales of a unit
    TE_DEV void load(const te_gemv_line line[LINES], te_i64 k, te_i64 last, int t, bool kept, bool end) {
#pragma unroll
        for (int i = 0; i < UNITS; i++) {
            te_i64 at = k + (4 * i + t) * UNIT;
#pragma unroll
            for (int l = 0; l < LINES; l++) {
                u[i][l] = end ? line[l].load_end(at, last) : line[l].load(at, kept);
                if (SCALES == 2) scale[i][l] = line[l].template scales<2>(at, last, end);
                if (SCALES == 1 && i == 0) scale[0][l] = line[l].template scales<4>(k, last, end);
            }
        }
    }
    TE_DEV void load(const te_gemv_place &x, int turn) {
#pragma unroll
        for (int l = 0; l < LINES; l++) {
            const te_u8 *codes = x.codes[l] + (te_i64)turn * 128, *scales = x.scales[l] + (te_i64)turn * STEP;
#pragma unroll
            for (int i = 0; i < UNITS; i++) {
                u[i][l] = te_gemv_load<true>(codes + 64 * i);
                if (SCALES == 2) scale[i][l] = *(const te_u16 *)(scales + (SWIZZLED ? 1024 : 8) * i);
            }
            if (SCALES == 1) scale[0][l] = *(const te_u32 *)scales;
        }
    }
};

extern "C" __global__ void __launch_bounds__(32 * WARPS, RESIDENT / WARPS)
    te_gemv_k(const __grid_constant__ te__gemv_kargs kargs) {
    te_follow();
#if SHARED
    extern __shared__ __align__(16) te_u8 memory[];
    float(*sums)[WARPS][SET * SETS][16] = (float(*)[WARPS][SET * SETS][16])memory; // of two tiles
    te_gemv_shared in(SHORT_A ? kargs.g.m : kargs.g.n, kargs.g.k, sums + 2);
#else
    __shared__ float sums[1][WARPS][SET * SETS][16];
#endif
    const te__gemm_kargs &a = kargs.g;
    const te_i64 few = SHORT_A ? a.m : a.n;
    const te_i64 lines = SHORT_A ? a.n : a.m;
    te_i64 first = (te_i64)blockIdx.x * 16;
    int warp = threadIdx.x >> 5, g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3, odd = 0;
    const void *scales_y = SHORT_A ? a.block_a : a.block_b;
    const te_i64 ld_scales_y = SHORT_A ? a.ld_block_a : a.ld_block_b;
    auto open_x = [&](te_gemv_line x[2]) {
#pragma unroll
        for (int i = 0; i < 2; i++)
            x[i].open(SHORT_A ? a.b : a.a, SHORT_A ? a.ldb : a.lda, lines, a.k, SHORT_A ? a.block_b : a.block_a,
                      SHORT_A ? a.ld_block_b : a.ld_block_a, first + g + 8 * i);
    };
    const int of_y = HALVES ? g & 3 : g;                // the lane's line of each set of Y
    const bool own = !HALVES || (g >> 2) == (t >> 1);   // else the lane has zeros there
    const int first_y = HALVES ? 2 * (t & 1) : 2 * t;   // the first of the set's two lines that `sum` has
    const int turns = (int)te_div_up(a.k, TURN);
    // number of turns (TURN values of k each) whose loads need not check for the end of k
    const int whole = (int)((ALIGNED ? a.k : a.k - min(a.k, (te_i64)UNIT)) / TURN);
#if SHARED
    te_gemv_turn<2> ahead; // the warp's next turn
    te_gemv_place place;
    auto load_ahead = [&]() {
        te_gemv_line x[2];
        open_x(x);
        place.open(x, t);
        if (warp < whole) ahead.load(place, warp);
    };
    load_ahead();
#if HIGH
    const float of_all_y = in.fill(a.a, a.lda, a.factor_a, kargs.q);
#else
    const float of_all_y = in.fill_codes(kargs);
#endif
    __syncthreads();
    te_u32 at_y[SETS], at_scale[SETS][2];
    const te_u32 step_y = own ? TURN * 2 : 0;
#pragma unroll
    for (int l = 0; l < SETS; l++) {
        at_y[l] = own ? in.line(SET * l + of_y, t) : in.zeros;
#pragma unroll
        for (int h = 0; h < 2; h++) at_scale[l][h] = in.scale_of(SET * l + first_y + h, HALVES ? t >> 1 : 0);
    }
#else
    te_gemv_line x[2], y[SETS];
    open_x(x);
#pragma unroll
    for (int l = 0; l < SETS; l++)
        y[l].open(SHORT_A ? a.a : a.b, SHORT_A ? a.lda : a.ldb, few, a.k, scales_y, ld_scales_y, SET * l + of_y);
#endif
    // sum[l] has the four sums of lane 4 g + t for lines SET l to SET l + SET - 1 of Y, where j is first_y:
    //   sum[l][0]  line g of X,     line SET l + j of Y        sum[l][1]  line g of X,     line SET l + j + 1 of Y
    //   sum[l][2]  line g + 8 of X, line SET l + j of Y        sum[l][3]  line g + 8 of X, line SET l + j + 1 of Y
    // With FOURS, lanes 0 and 1 have the sums of the first group of each unit of the quad, lanes 2 and 3 of the second.
    float sum[SETS][4];
    auto take = [&](const te_gemv_turn<2> &u, int turn, bool end) {
        const te_i64 k = (te_i64)turn * TURN;
        float part[SETS][4] = {};
#if !SHARED
        te_gemv_turn<SETS> v;
        v.load(y, k, a.k, t, true, end);
#pragma unroll
        for (int i = 0; i < UNITS; i++)
#pragma unroll
            for (int l = 0; l < SETS; l++) {
                if (!own) v.u[i][l] = make_uint4(0, 0, 0, 0);
                if (EXCHANGED) v.u[i][l] = te_gemv_exchange(v.u[i][l], t);
            }
#endif
#if SCALES == 1 // the scales of the turn's four groups, for the lines of `sum`
        te_u32 of_groups[SETS][2][SHARED ? 4 : 1];
#pragma unroll
        for (int l = 0; l < SETS; l++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
#if SHARED && HALVES
                of_groups[l][h][0] = te_lds4(at_scale[l][h] + turn * 16);
                of_groups[l][h][2] = te_lds4(at_scale[l][h] + turn * 16 + 8);
#elif SHARED
                uint4 four = te_lds16(at_scale[l][h] + turn * 16);
                of_groups[l][h][0] = four.x, of_groups[l][h][1] = four.y;
                of_groups[l][h][2] = four.z, of_groups[l][h][3] = four.w;
#else
                te_gemv_line of = y[0];
                of.line = min((te_i64)(SET * l + first_y + h), few - 1);
                of_groups[l][h][0] = of.scales<4>(k, a.k, end);
#endif
            }
#endif
#if SCALES == 1 || BLOCK
        // Adds the products of one scaling group or block, `part`, to `sum`. `group`: with MXFP8, the number of the
        // group in the turn, for lanes t = 0 and 1 if HALVES.
        auto add_scaled = [&](int group) {
            float s_x[2];
#pragma unroll
            for (int h = 0; h < 2; h++)
#if BLOCK
                s_x[h] = te_gemm_block_scale(SHORT_A ? a.block_b : a.block_a, SHORT_A ? B_2D : A_2D,
                                             SHORT_A ? a.ld_block_b : a.ld_block_a,
                                             min(first + g + 8 * h, lines - 1) + (SHORT_A ? a.first_b : 0), k >> 7);
#else
                s_x[h] = te__e8m0_to_f32((te_u8)(u.scale[0][h] >> (HALVES ? 8 * (t >> 1) : 0) >> (8 * group)));
#endif
#pragma unroll
            for (int l = 0; l < SETS; l++) {
                float s_y[2];
#pragma unroll
                for (int h = 0; h < 2; h++) {
#if BLOCK && SHARED && HIGH
                    s_y[h] = __uint_as_float(te_lds4(at_scale[l][h] + turn * 16));
#elif BLOCK
                    te_i64 line = min((te_i64)(SET * l + first_y + h), few - 1);
                    s_y[h] = te_gemm_block_scale((const float *)scales_y, SHORT_A ? A_2D : B_2D, ld_scales_y,
                                                 line + (SHORT_A ? 0 : a.first_b), k >> 7);
#elif SHARED
                    s_y[h] = __uint_as_float(of_groups[l][h][group]);
#elif SCALES == 1
                    s_y[h] =
                        te__e8m0_to_f32((te_u8)(of_groups[l][h][0] >> (HALVES ? 8 * (t >> 1) : 0) >> (8 * group)));
#endif
                }
#pragma unroll
                for (int e = 0; e < 4; e++) {
#if BLOCK
                    sum[l][e] = fmaf(part[l][e], te_gemm_block_product(s_x[e / 2], s_y[e % 2]), sum[l][e]);
#else
                    sum[l][e] = fmaf(part[l][e] * s_x[e / 2], s_y[e % 2], sum[l][e]); // no infinity times 0
#endif
                    part[l][e] = 0.0f;
                }
            }
        };
#endif
#pragma unroll
        for (int i = 0; i < UNITS; i++) {
            uint4 of_u[2] = {u.u[i][0], u.u[i][1]};
            if (EXCHANGED) of_u[0] = te_gemv_exchange(of_u[0], t), of_u[1] = te_gemv_exchange(of_u[1], t);
#pragma unroll
            for (int c = 0; c < CHUNKS; c++) {
                te_u32 of_x[2][4], w[4];
#pragma unroll
                for (int l = 0; l < 2; l++)
                    te_gemv_decode<X_DT>(of_u[l], c, u.scale[SCALES == 1 ? 0 : i][l], of_x[l]);
#pragma unroll
                for (int l = 0; l < SETS; l++) {
#if SHARED
                    in.chunk(at_y[l] + turn * step_y, i, c, w);
#else
                    te_gemv_decode<Y_DT>(v.u[i][l], c, v.scale[SCALES == 1 ? 0 : i][l], w);
#endif
                    te_gemv_multiply(BLOCK || SCALES == 1 ? part[l] : sum[l], of_x[0], of_x[1], w);
                }
#if SCALES == 1 || BLOCK
                const bool last = c == CHUNKS - 1;
                if (EXCHANGED || (last && (!BLOCK || i == UNITS - 1))) add_scaled(2 * i + (EXCHANGED ? c : 0));
#endif
            }
        }
    };
#pragma unroll 1
    for (;;) {
        int turn = warp;
        bool last = true;
#pragma unroll
        for (int l = 0; l < SETS; l++) sum[l][0] = sum[l][1] = sum[l][2] = sum[l][3] = 0.0f;
#if SHARED
#pragma unroll 1
        while (turn < whole) { // other warps hide the time of the loads better than more turns in registers do
            take(ahead, turn, false);
            turn += WARPS;
            if (turn < whole) ahead.load(place, turn);
        }
#else
        const int at_once = RESIDENT == 32 ? 2 : 1;
#pragma unroll at_once
        for (; turn < whole; turn += WARPS) {
            te_gemv_turn<2> u;
            u.load(x, (te_i64)turn * TURN, a.k, t, false, false);
            take(u, turn, false);
        }
#endif
#pragma unroll 1
        for (; turn < turns; turn += WARPS) {
            te_gemv_turn<2> u;
#if SHARED // x would take registers of the loop above
            te_gemv_line x[2];
            open_x(x);
#endif
            u.load(x, (te_i64)turn * TURN, a.k, t, false, true);
            take(u, turn, true);
        }
        const te_i64 done = first;
#if SHARED // the next tile's first turn comes while this tile's sums are added up
        first += (te_i64)gridDim.x * 16;
        last = first >= lines;
        if (!last) load_ahead();
#endif
        const float power = SCALES == 2 ? 1.0f / (TE_DECODE_FP4 * TE_DECODE_FP4) : 1.0f;
#pragma unroll
        for (int l = 0; l < SETS; l++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                float all = sum[l][e] * power;
                if (HALVES) all += __shfl_xor_sync(0xffffffffu, all, 2);
                if (!HALVES || t < 2) sums[odd][warp][SET * l + first_y + e % 2][g + e / 2 * 8] = all;
            }
#if HIGH
        const float scale = of_all_y * te_gemm_scale(a);
#else
        const float scale = te_gemm_scale(a);
#endif
        // te_gemv_finish waits for all warps first, so that two tiles' sums suffice.
        te_gemv_finish<16>(a, scale, sums[odd], done);
        if (last) break;
        odd ^= 1;
    }
}
