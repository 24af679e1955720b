// ops/gemm/gemm_skinny.cu: D = epilogue(scale_a scale_b op(A) op(B) + bias) + D where one operand has at most eight lines (rows of A, columns of B):
// a matrix times a few vectors, as when a model writes one word after the other. The floor is the long operand's bytes.
//
//        k                                          A block has 16 lines of the long operand, X. Its warps take turns of 128 bytes of k,
//        +----+----+-- ..  --+----+----+            and add up their sums at the end, in order. Both operands go from memory straight into
//     16 | w0 | w1 |         | w0 | w1 | ..         registers: nobody else needs the bytes, and those of Y, the short one, are in the L1 cache.
//        +----+----+-- ..  --+----+----+
//
// mma.sync multiplies 16 x 8 x 16 values of 16 bits: lines of X, of Y, and k. Which k they are is the same to it, as long as X and Y agree: so lane
// 4 g + t loads the 16 bytes t of 64 of lines g and g + 8 of X and of line g of Y, and these are its operands word by word. FP8 is decoded into f16,
// exactly. Lines may start anywhere: 16 bytes that do not begin at a multiple of 16 come out of the two pieces that hold them.
//
// Options: A_DT, B_DT  bf16 or f16 alike, or fp8
//          FEW_A       A is the short one
//          ALIGNED     A, B and their lines start at multiples of 16 bytes
//          WARPS       of a block: 16, where there are few blocks, ALIGNED and without BLOCK; else 8, which have more registers
//          BLOCK       te__gemm_block_kind, fp8; 0 if left out: sums of 128 k, a turn, are scaled in f32
// Launch: grid (ceil(lines of X / 16), 1, 1), block 32 WARPS. Both operands k-major.
//
// te:arch 80
// te:row A_DT=3 B_DT=3 FEW_A=1 ALIGNED=1 WARPS=16
// te:row A_DT=3 B_DT=3 FEW_A=0 ALIGNED=0 WARPS=8
// te:row A_DT=2 B_DT=2 FEW_A=1 ALIGNED=1 WARPS=8
// te:row A_DT=4 B_DT=4 FEW_A=1 ALIGNED=1 WARPS=16
// te:row A_DT=5 B_DT=4 FEW_A=1 ALIGNED=0 WARPS=8
// te:row A_DT=4 B_DT=4 BLOCK=1 FEW_A=0 ALIGNED=0 WARPS=8
// te:row A_DT=4 B_DT=4 BLOCK=2 FEW_A=1 ALIGNED=1 WARPS=8
// te:row A_DT=4 B_DT=5 BLOCK=3 FEW_A=1 ALIGNED=1 WARPS=8
#include "device/mma.cuh"
#include "ops/gemm/epilogue.cuh"
#include "ops/gemm/shift.cuh"

#ifndef A_DT // the rows above name every option; these stand in for them in an editor
#define A_DT 3
#define B_DT 3
#define FEW_A 1
#define ALIGNED 1
#define WARPS 16
#endif
#ifndef BLOCK
#define BLOCK 0
#endif

#define X_DT (FEW_A ? B_DT : A_DT)
#define Y_DT (FEW_A ? A_DT : B_DT)
#define FP8 (A_DT == 4 || A_DT == 5)
#define SIZE (FP8 ? 1 : 2)
#define PIECE (16 / SIZE)   // elements of 16 bytes
#define TURN (128 / SIZE)   // of a turn: two steps of four lanes
#define A_2D (BLOCK == 3)   // of te__gemm_block_kind
#define B_2D (BLOCK == 2)

// Sixteen bytes that nothing writes while the kernel runs.
TE_DEV uint4 te_skinny_ask(const te_u8 *p) {
    uint4 u;
    asm("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(u.x), "=r"(u.y), "=r"(u.z), "=r"(u.w) : "l"(p));
    return u;
}
TE_DEV uint4 te_skinny_ask_once(const te_u8 *p) {
    uint4 u;
    asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(u.x), "=r"(u.y), "=r"(u.z), "=r"(u.w) : "l"(p));
    return u;
}

// A line of an operand: the last one in place of one that is not there, whose products nobody asks for.
struct te_skinny_line {
    const te_u8 *from, *end; // the line's; the operand's
    TE_DEV te_skinny_line(const void *operand, te_i64 ld, te_i64 lines, te_i64 k, te_i64 line)
        : from((const te_u8 *)operand + min(line, lines - 1) * ld * SIZE), end((const te_u8 *)operand + ((lines - 1) * ld + k) * SIZE) {}

    // Sixteen bytes from element `at` on. Not aligned: up to 15 bytes on both sides are read with them.
    TE_DEV uint4 load(te_i64 at, bool kept) const { // kept: in the L1 cache, for it will be asked for again
        const te_u8 *p = from + at * SIZE;
        int by = ALIGNED ? 0 : (int)((te_u64)p & 15);
        uint4 u = !ALIGNED || kept ? te_skinny_ask(p - by) : te_skinny_ask_once(p);
        return ALIGNED ? u : te_shift(u, te_skinny_ask(p - by + (by ? 16 : 0)), by);
    }
    // The same where the line may end, or the operand: zeros beyond.
    TE_DEV uint4 load_end(te_i64 at, te_i64 k) const {
        const te_u8 *p = from + at * SIZE;
        int by = (int)((te_u64)p & 15), left = k - at < PIECE ? (int)(k - at) : PIECE;
        te_u32 w[4] = {0, 0, 0, 0};
        if (left == PIECE && (ALIGNED || p - by + (by ? 32 : 16) <= end)) return load(at, true);
#pragma unroll
        for (int i = 0; i < PIECE; i++) {
            te_u32 v = i >= left ? 0 : FP8 ? p[i] : ((const te_u16 *)p)[i];
            w[i * SIZE / 4] |= v << i * SIZE % 4 * 8;
        }
        return make_uint4(w[0], w[1], w[2], w[3]);
    }
};

// sum += two lines of X times one of Y, 16 bytes of each.
TE_DEV void te_skinny_multiply(float sum[4], uint4 x, uint4 x8, uint4 y) {
    const te_u32 u[4] = {x.x, x.y, x.z, x.w}, u8[4] = {x8.x, x8.y, x8.z, x8.w}, v[4] = {y.x, y.y, y.z, y.w};
    if (FP8) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            te_u32 of_x[4] = {te_fp8x2_to_f16(u[i], 0, X_DT), te_fp8x2_to_f16(u8[i], 0, X_DT), te_fp8x2_to_f16(u[i], 1, X_DT), te_fp8x2_to_f16(u8[i], 1, X_DT)};
            te_u32 of_y[2] = {te_fp8x2_to_f16(v[i], 0, Y_DT), te_fp8x2_to_f16(v[i], 1, Y_DT)};
            te_mma_f16(sum, of_x, of_y);
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        te_u32 of_x[4] = {u[i], u8[i], u[i + 1], u8[i + 1]}, of_y[2] = {v[i], v[i + 1]};
        if (A_DT == 3) te_mma_bf16(sum, of_x, of_y);
        else te_mma_f16(sum, of_x, of_y);
    }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, (!ALIGNED ? 16 : BLOCK ? 24 : 32) / WARPS) te_gemm_skinny(const __grid_constant__ te__gemm_kargs a) {
    te_follow();
    __shared__ float sums[WARPS][8][16];
    const te_i64 lines = FEW_A ? a.n : a.m, few = FEW_A ? a.m : a.n, first = (te_i64)blockIdx.x * 16;
    int warp = threadIdx.x >> 5, g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
    te_skinny_line x(FEW_A ? a.b : a.a, FEW_A ? a.ldb : a.lda, lines, a.k, first + g), x8(FEW_A ? a.b : a.a, FEW_A ? a.ldb : a.lda, lines, a.k, first + g + 8);
    te_skinny_line y(FEW_A ? a.a : a.b, FEW_A ? a.lda : a.ldb, few, a.k, g);
    float sum[4] = {}; // lines g, g, g + 8, g + 8 of X by lines 2 t, 2 t + 1 of Y, twice
    auto add = [&](te_i64 k, const uint4 (&u)[2], const uint4 (&u8)[2], const uint4 (&v)[2]) {
#if BLOCK
        float scale_x[2], scale_y[2], part[4] = {};
#pragma unroll
        for (int i = 0; i < 2; i++) {
            te_i64 of_x = min(first + g + 8 * i, lines - 1), of_y = min((te_i64)(2 * t + i), few - 1);
            scale_x[i] = te_gemm_block_scale(FEW_A ? a.block_b : a.block_a, FEW_A ? B_2D : A_2D, FEW_A ? a.ld_block_b : a.ld_block_a, of_x, k >> 7);
            scale_y[i] = te_gemm_block_scale(FEW_A ? a.block_a : a.block_b, FEW_A ? A_2D : B_2D, FEW_A ? a.ld_block_a : a.ld_block_b, of_y, k >> 7);
        }
        te_skinny_multiply(part, u[0], u8[0], v[0]);
        te_skinny_multiply(part, u[1], u8[1], v[1]);
#pragma unroll
        for (int e = 0; e < 4; e++) sum[e] = fmaf(part[e], te_gemm_block_product(scale_x[e / 2], scale_y[e % 2]), sum[e]);
#else
        te_skinny_multiply(sum, u[0], u8[0], v[0]);
        te_skinny_multiply(sum, u[1], u8[1], v[1]);
#endif
    };
    te_i64 turn = warp, turns = te_div_up(a.k, TURN), whole = (ALIGNED ? a.k : a.k - min(a.k, (te_i64)PIECE)) / TURN; // those after which there is no more to fear
#pragma unroll(ALIGNED && !BLOCK ? 2 : 1)
    for (; turn < whole; turn += WARPS) {
        uint4 u[2], u8[2], v[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            te_i64 at = turn * TURN + (4 * i + t) * PIECE;
            u[i] = x.load(at, false), u8[i] = x8.load(at, false), v[i] = y.load(at, true);
        }
        add(turn * TURN, u, u8, v);
    }
#pragma unroll 1
    for (; turn < turns; turn += WARPS) {
        uint4 u[2], u8[2], v[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            te_i64 at = turn * TURN + (4 * i + t) * PIECE;
            u[i] = x.load_end(at, a.k), u8[i] = x8.load_end(at, a.k), v[i] = y.load_end(at, a.k);
        }
        add(turn * TURN, u, u8, v);
    }
#pragma unroll
    for (int e = 0; e < 4; e++) sums[warp][2 * t + e % 2][g + e / 2 * 8] = sum[e];
    __syncthreads();
    int line = threadIdx.x & 15, of_y = threadIdx.x >> 4;
    if (of_y >= few || first + line >= lines) return;
    float all = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) all += sums[w][of_y][line];
    te_gemm_finish(a, te_gemm_scale(a), FEW_A ? of_y : first + line, FEW_A ? first + line : of_y, all);
}
