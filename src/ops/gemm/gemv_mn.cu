// ops/gemm/gemv_mn.cu: computes D = epilogue(scale_a scale_b op(A) op(B) + bias) + D if one operand has at most eight
// lines. A line is a row of A or a column of B. The short operand is Y, and the long one is X. X is MN-major. Reading X
// is the limit.
//
//            lines of X
//        +----+----+-- .. --+----+
//      k |    |    | STEP   |    |
//        +----+----+-- .. --+----+
//        |    |    |        |    |
//        +----+----+-- .. --+----+
//
// A block has STEP lines of X. Its warps divide k among themselves. A warp multiplies 16 values of k at a time. Both
// operands are loaded into registers.
//
// mma.sync multiplies 16 lines of X by 8 lines of Y, over 16 values of k. The order of lines and of k is free. So lane
// 4 g + t loads PIECE neighbouring lines, from line PIECE g on, for four values of k. A loaded word has two lines for
// one k, but mma.sync needs one line for two k. So words are rearranged. Then the lane's lines 2 i and 2 i + 1 are rows
// g and g + 8 of product i.
//
// A row of X has the values of all lines for one k. Loads need aligned addresses. If X is not ALIGNED, rows start at
// different offsets from a multiple of PIECE elements. The offsets repeat after PIECE rows. So a warp takes every
// PIECE-th row, and all its rows have the same offset. The warp's lines begin that many lines (0 to PIECE - 1) before
// those of the block.
//
// Benchmark: "gemv bf16 NN" in tests/bench/h200.csv, and tests/bench/notes.md.
//
// Options:
//          A_DT, B_DT  3 or 2: both are bf16, or both are f16
//          SHORT_A     1: A is the short operand
//          Y_T         1: Y is MN-major too
//          PIECE       number of neighbouring lines that a lane loads at once: 4 or 8
//          ALIGNED     1: all rows of X start at multiples of a piece
//          WARPS       warps of a block: 16, or 8 if PIECE is 8, which needs more registers. Two blocks are resident on
//                      a multiprocessor
//
// Launch: grid (ceil(lines of X / STEP), splits), block 32 WARPS. X has at least PIECE lines. Split s multiplies k from
// s * k_split on, and writes to D + s * d_split.
//
// te:arch 80
// te:row A_DT=3 B_DT=3 SHORT_A=1 Y_T=0|1 PIECE=4 ALIGNED=0|1 WARPS=16
// te:row A_DT=3 B_DT=3 SHORT_A=1 Y_T=0 PIECE=8 ALIGNED=1 WARPS=8
// te:row A_DT=2 B_DT=2 SHORT_A=0 Y_T=0 PIECE=8 ALIGNED=0 WARPS=8
#include "device/mma.cuh"
#include "ops/gemm/gemv.cuh"

#define LINES (8 * PIECE) // lines that a warp reads
#define STEP (ALIGNED ? LINES : LINES - PIECE)
#define KINDS (ALIGNED ? 1 : PIECE) // alignments of rows, by where they start within a piece
#define TURN (16 * KINDS)           // rows that KINDS neighbouring warps read at a time, 16 rows each

// The values of PIECE lines (rows of A or columns of B) for one k.
struct te_gemv_piece {
    te_u32 word[PIECE / 2];
    // Nothing may write the memory at `at` while the kernel runs. If PIECE is 4, words 2 and 3 do not exist. The first
    // asm does not run then, but must compile. So its last two operands are words PIECE / 2 - 2 and PIECE / 2 - 1.
    TE_DEV void load(te_u64 at) {
        if (PIECE == 8)
            asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                : "=r"(word[0]), "=r"(word[1]), "=r"(word[PIECE / 2 - 2]), "=r"(word[PIECE / 2 - 1])
                : "l"(at));
        else asm("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(word[0]), "=r"(word[1]) : "l"(at));
    }
    // Loads only lines `first` to `last` of a piece. The remaining lines get copies of these lines.
    TE_DEV void load_some(te_u64 at, int first, int last) {
#pragma unroll
        for (int i = 0; i < PIECE; i++) {
            te_u32 v = __ldg((const te_u16 *)at + max(first, min(i, last)));
            word[i / 2] = i % 2 ? word[i / 2] | v << 16 : v;
        }
    }
    TE_DEV void clear() {
#pragma unroll
        for (int i = 0; i < PIECE / 2; i++) word[i] = 0;
    }
};

extern "C" __global__ void __launch_bounds__(32 * WARPS, 2) te_gemv_mn(const __grid_constant__ te__gemm_kargs a) {
    te_follow();
    __shared__ float sums[WARPS][8][LINES];
    const te_i64 k0 = blockIdx.y * a.k_split, end_k = min(a.k, k0 + a.k_split);
    const te_i64 lines = SHORT_A ? a.n : a.m, first = (te_i64)blockIdx.x * STEP, ld = SHORT_A ? a.ldb : a.lda;
    const int few = (int)(SHORT_A ? a.m : a.n);
    int warp = threadIdx.x >> 5, g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;

    // `row` is this lane's first row of X (one k), and `line` is this lane's first line. The lines of the warp start
    // `by` lines before those of the block, for aligned loads.
    te_i64 row = k0 + warp % KINDS + KINDS * 4 * t + TURN * (warp / KINDS);
    te_u64 x = (te_u64)(SHORT_A ? a.b : a.a) + 2 * row * ld;
    int by = ALIGNED ? 0 : (int)(x / 2 % PIECE);
    te_i64 line = min(first + PIECE * g, (lines - 1 + by) / PIECE * PIECE) - by; // beyond the end: the last lines
    x += 2 * line;

    // y points to line g of Y (the short operand). If Y has no line g, y points to the last line, and the products are
    // not stored.
    const te_i64 ld_y = SHORT_A ? a.lda : a.ldb, y_k = Y_T ? ld_y : 1, y_line = Y_T ? 1 : ld_y;
    const te_u16 *y = (const te_u16 *)(SHORT_A ? a.a : a.b) + min(g, few - 1) * y_line + row * y_k;

    // sum[i][e] is the sum for line 2 i + e / 2 of X and line 2 t + e % 2 of Y. Lines of X count from this lane's first
    // line.
    float sum[PIECE / 2][4] = {};
    auto take = [&](bool end) {
        te_gemv_piece u[4];
        te_u32 v[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            te_u64 at = x + 2 * i * KINDS * ld;
            te_i64 left = end_k - row - i * KINDS;
            if (!end || left > 1) u[i].load(at);
            else if (left == 1)
                u[i].load_some(at, line < 0 ? (int)-line : 0,
                               (int)min(lines - line, (te_i64)PIECE) - 1); // the last row of X may end the memory, so
                                                                           // nothing beyond may be read
            else u[i].clear();
            v[i] = !end || left > 0 ? __ldg(y + i * KINDS * y_k) : 0;
        }
        te_u32 of_y[2] = {v[0] | v[1] << 16, v[2] | v[3] << 16};
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
        row += 16 * WARPS, x += 32 * WARPS * ld, y += 16 * WARPS * y_k;
    };
    // whole: number of turns (TURN rows each) that do not touch the last row of X
    te_i64 turn = warp / KINDS, turns = te_div_up(end_k - k0, TURN), whole = (end_k - k0 - (end_k == a.k)) / TURN;
#pragma unroll 2
    for (; turn < whole; turn += WARPS / KINDS) take(false);
#pragma unroll 1
    for (; turn < turns; turn += WARPS / KINDS) take(true);
#pragma unroll
    for (int i = 0; i < PIECE; i++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            int at = PIECE * g + i - by;
            if (at >= 0) sums[warp][2 * t + e][at] = sum[i / 2][i % 2 * 2 + e];
        }
    te_gemv_finish<STEP>(a, te_gemm_scale(a), sums, first);
}
