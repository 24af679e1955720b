// ops/gemm/gemv_mn.cu: D = epilogue(scale_a scale_b op(A) op(B) + bias) + D where one operand has at most eight lines (rows of A, columns of
// B), and the other, X, is MN-major: values of one k of all its lines are contiguous. gemv_k is for K-major X. The floor is X's bytes.
//
//            lines of X                             A block has STEP lines of X. Its warps have turns of 16 values of k, and their sums are added at the
//        +----+----+-- .. --+----+                  end, in order. Both operands are loaded from memory into registers.
//      k |    |    | STEP   |    |
//        +----+----+-- .. --+----+                  mma.sync multiplies 16 x 8 x 16 values: lines of X, of the short operand, Y, and k. Their order is free:
//        |    |    |        |    |                  lane 4 g + t loads PIECE neighbouring lines, from PIECE g on, of four values of k; two lines each
//        +----+----+-- .. --+----+                  are rows g and g + 8 of a product, once words of two lines have become words of two k.
//
// Rows (of one k) may have any alignment, but pieces are loaded from aligned addresses: a lane shifts its lines out of the piece that holds the first of
// them and of the next one, which the lane of the next lines has loaded. The last lanes of a warp have no such neighbour: their lines are the next
// block's.
//
// Benchmark: "gemv bf16 NN" in tests/bench/h200.csv, and tests/bench/notes.md.
//
// Options: A_DT, B_DT  3 or 2: bf16 or f16, alike
//          SHORT_A     A is the short operand
//          Y_T         the short operand is MN-major too
//          PIECE       lines of a lane: 4 or 8
//          ALIGNED     all rows of X start at multiples of a piece
//          WARPS       of a block: 16, or 8 with PIECE=8, which needs more registers; two blocks are resident on a multiprocessor
// Launch: grid (ceil(lines of X / STEP), splits, 1), block 32 WARPS. X has at least PIECE lines. Split s does k from s * k_split on, to D + s * d_split.
//
// te:arch 80
// te:row A_DT=3 B_DT=3 SHORT_A=1 Y_T=0|1 PIECE=4 ALIGNED=0|1 WARPS=16
// te:row A_DT=3 B_DT=3 SHORT_A=1 Y_T=0 PIECE=8 ALIGNED=1 WARPS=8
// te:row A_DT=2 B_DT=2 SHORT_A=0 Y_T=0 PIECE=8 ALIGNED=0 WARPS=8
#include "device/mma.cuh"
#include "ops/gemm/gemv.cuh"
#include "ops/gemm/shift.cuh"

#define LINES (8 * PIECE) // that a warp reads
#define STEP (ALIGNED ? LINES : LINES - PIECE)

// PIECE lines of one k.
struct te_gemv_piece {
    te_u32 word[4]; // four lines have two
    // The first `count` at `at`, and zeros behind them. Nothing writes there while the kernel runs, and hardly any byte is read twice.
    TE_DEV void load(const te_u16 *at, te_i64 count) {
        word[0] = word[1] = word[2] = word[3] = 0;
        if (count < PIECE) {
#pragma unroll
            for (int i = 0; i < PIECE; i++) word[i / 2] |= i < count ? (te_u32)__ldg(at + i) << i % 2 * 16 : 0;
        } else if (PIECE == 8) {
            asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3]) : "l"(at));
        } else {
            asm("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(word[0]), "=r"(word[1]) : "l"(at));
        }
    }
    // Its bytes from `by` on, and behind them the first ones of the next piece, which lane + 4 has.
    TE_DEV void shift(int by) {
        te_u32 w[8] = {};
#pragma unroll
        for (int i = 0; i < PIECE / 2; i++) w[i] = word[i], w[PIECE / 2 + i] = __shfl_down_sync(0xffffffffu, word[i], 4);
        uint4 u = te_shift(make_uint4(w[0], w[1], w[2], w[3]), make_uint4(w[4], w[5], w[6], w[7]), by);
        word[0] = u.x, word[1] = u.y, word[2] = u.z, word[3] = u.w;
    }
};

extern "C" __global__ void __launch_bounds__(32 * WARPS, 2) te_gemv_mn(const __grid_constant__ te__gemm_kargs a) {
    te_follow();
    __shared__ float sums[WARPS][8][LINES];
    const te_i64 lines = SHORT_A ? a.n : a.m, few = SHORT_A ? a.m : a.n, ld = SHORT_A ? a.ldb : a.lda, ld_y = SHORT_A ? a.lda : a.ldb;
    const te_i64 k0 = blockIdx.y * a.k_split, end_k = min(a.k, k0 + a.k_split), first = (te_i64)blockIdx.x * STEP;
    int g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
    int warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0); // of lane 0, so that the compiler knows that all lanes loop alike

    // The lane's first line of X, and its line of Y; beyond the end the last one, whose products are not stored.
    te_i64 k = k0 + 16 * warp;
    const te_u16 *x = (const te_u16 *)(SHORT_A ? a.b : a.a), *x_end = x + (a.k - 1) * ld + lines;
    x += (k + 4 * t) * ld + min(first + PIECE * g, ALIGNED ? (lines - 1) / PIECE * PIECE : lines - 1);
    const te_i64 y_k = Y_T ? ld_y : 1, y_line = Y_T ? 1 : ld_y;
    const te_u16 *y = (const te_u16 *)(SHORT_A ? a.a : a.b) + (k + 4 * t) * y_k + min((te_i64)g, few - 1) * y_line;

    float sum[PIECE / 2][4] = {}; // lines 2 i, 2 i, 2 i + 1, 2 i + 1 of X by lines 2 t, 2 t + 1 of Y, twice
    auto take = [&](bool end) {
        te_gemv_piece u[4];
        te_u32 v[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const te_u16 *at = (const te_u16 *)((te_u64)(x + i * ld) & ~(ALIGNED ? 0 : 2 * PIECE - 1ull));
            bool there = !end || k + 4 * t + i < end_k;
            u[i].load(at, !end ? PIECE : there ? x_end - at : 0); // behind X nothing may be read
            v[i] = there ? __ldg(y + i * y_k) : 0;
        }
        te_u32 of_y[2] = {v[0] | v[1] << 16, v[2] | v[3] << 16};
#pragma unroll
        for (int i = 0; i < 4 && !ALIGNED; i++) u[i].shift((int)(te_u64)(x + i * ld) & (2 * PIECE - 1));
#pragma unroll
        for (int i = 0; i < PIECE / 2; i++) {
            te_u32 of_x[4];
#pragma unroll
            for (int h = 0; h < 2; h++) {
                of_x[2 * h] = __byte_perm(u[2 * h].word[i], u[2 * h + 1].word[i], 0x5410);
                of_x[2 * h + 1] = __byte_perm(u[2 * h].word[i], u[2 * h + 1].word[i], 0x7632);
            }
            if (A_DT == 3) te_mma_bf16(sum[i], of_x, of_y);
            else te_mma_f16(sum[i], of_x, of_y);
        }
        k += 16 * WARPS, x += 16 * WARPS * ld, y += 16 * WARPS * y_k;
    };
    const te_i64 whole = end_k - (end_k == a.k ? 16 : 15); // turns that begin before it are whole, and without the last row of X
#pragma unroll 2 // as many as registers allow
    while (k < whole) take(false);
#pragma unroll 1
    while (k < end_k) take(true);
#pragma unroll
    for (int i = 0; i < PIECE; i++)
#pragma unroll
        for (int e = 0; e < 2; e++) sums[warp][2 * t + e][PIECE * g + i] = sum[i / 2][i % 2 * 2 + e];
    te_gemv_finish<STEP>(a, sums, first);
}
