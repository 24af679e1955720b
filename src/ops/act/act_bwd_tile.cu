// ops/act/act_bwd_tile.cu: the backward pass of activations, for results that need a whole tile: codes of dx along
// columns, and sums of the columns of dx (the gradient of a bias). The formulas are in act.cuh, the tiles in
// act_tile.cuh.
//
//   dx = dy f'(x);   gated: [da | db] = [dy f'(a) b | dy f(a)]
//   FP8: q = saturate(dx * scale), row-wise [m, ld] and transposed [n or 2n, ldc], padded with 0;
//   amax = max |dx|, rounded to the format amax_dt
//   partial [tile along m][column] = sum of dx over the tile's rows, before it is rounded
//   ROUNDED: dx is rounded to x's format first, as if it had been stored in that format and read again
//
// Tiles cover dy, up to `ld` columns and `ldc` rows, so that they write the padding too. With a gated input, da and db
// have one tile each in shared memory.
//
// Benchmark: "gelu backward e5m2 both copies", "swiglu backward e5m2 both copies" in tests/bench/h200.csv.
//
// Launch: block of 256 threads; the grid has one block for each tile of 128 x 64, consecutive along a row of tiles. Any
// size and any alignment are allowed.
//
// te:baseline
// te:row ACT=8 DY_DT=3 X_DT=3 DX_DT=4 BIAS=0 ROUNDED=0
// te:row ACT=8 DY_DT=3 X_DT=3 DX_DT=5 BIAS=0 ROUNDED=0
// te:row ACT=8 DY_DT=3 X_DT=3 DX_DT=5 BIAS=1 ROUNDED=0
// te:row ACT=8 DY_DT=3 X_DT=3 DX_DT=5 BIAS=0 ROUNDED=1
// te:row ACT=8 DY_DT=3 X_DT=3 DX_DT=5 BIAS=1 ROUNDED=1
// te:row ACT=1 DY_DT=3 X_DT=3 DX_DT=5 BIAS=0 ROUNDED=0
// te:row ACT=1 DY_DT=3 X_DT=3 DX_DT=5 BIAS=1 ROUNDED=0
// te:row ACT=1 DY_DT=3 X_DT=3 DX_DT=3 BIAS=1 ROUNDED=0
// te:row ACT=1 DY_DT=3 X_DT=3 DX_DT=3 BIAS=1 ROUNDED=1
// te:row ACT=12 DY_DT=3 X_DT=3 DX_DT=5 BIAS=0 ROUNDED=0
// te:row ACT=6 DY_DT=1 X_DT=1 DX_DT=1 BIAS=1 ROUNDED=0
#include "ops/act/act.cuh"
#include "ops/act/act_tile.cuh"
#ifdef ACT
#define HELD_DY DY_DT
#define HELD X_DT
#define GATED te_act_gated(ACT)
// blocks resident on a multiprocessor, if the registers suffice
#define BLOCKS (__CUDA_ARCH__ >= 890 && HELD != TE_F32 && !(GATED && BIAS) ? GATED ? 3 : 4 : 1)
#else
#define ACT a.rule.act
#define DY_DT a.dy_dt
#define X_DT a.x_dt
#define DX_DT a.dx_dt
#define HELD_DY TE_F32 // the formats of elements in registers: f32, unpacked
#define HELD TE_F32
#define GATED true
#define BLOCKS 1
#define BIAS (a.partial != nullptr)
#define ROUNDED a.rounded
#endif

extern "C" __global__ void __launch_bounds__(256, BLOCKS) te_act_bwd_tile(const __grid_constant__ te__act_bwd_kargs a) {
    te_follow();
    constexpr int halves = GATED ? 2 : 1;
    __shared__ __align__(16) te_u32 tile[halves * TE_TILE_COLUMNS * TE_TILE_WORDS];
    te_act_place p(a.tiles_n);
    bool gated = te_act_gated(ACT), fp8 = DX_DT == TE_F8E4M3 || DX_DT == TE_F8E5M2;
    te_i64 left = a.m - p.row, cols = a.n - p.col, width = gated ? 2 * a.n : a.n, at = p.row * width + p.col;
    int rows = left > 4 ? 4 : left < 0 ? 0 : (int)left;
    te_raw<HELD_DY> dy[4];
    te_raw<HELD> x[4], gate[4];
    te_act_load<HELD_DY>(a.dy, p.row * a.n + p.col, a.n, DY_DT, rows, cols, a.vector_x, dy);
    te_act_load<HELD>(a.x, at, width, X_DT, rows, cols, a.vector_x, x);
    if (gated) te_act_load<HELD>(a.x, at + a.n, width, X_DT, rows, cols, a.vector_x, gate);
    float scale = a.scale ? *a.scale : 1.0f, seen = a.amax ? *a.amax : 0.0f, largest = 0.0f, sum[halves][8] = {};
    if (a.scale_inv && blockIdx.x == 0 && threadIdx.x == 0) *a.scale_inv = __frcp_rn(scale);
    te_u32 code[halves][4][2] = {};
#pragma unroll te_act_unroll
    for (int r = 0; r < 4; r++) {
        float dx[halves][8];
#pragma unroll te_act_unroll
        for (int k = 0; k < 8; k++) {
            float g = te_raw_get(dy[r], k), u = te_raw_get(x[r], k);
            if (gated) {
                te_act_gate_grad(ACT, u, te_raw_get(gate[r], k), g, a.rule, &dx[0][k], &dx[halves - 1][k]);
            } else {
                te_act(ACT, u, &dx[0][k]);
                dx[0][k] *= g;
            }
#pragma unroll
            for (int h = 0; h < halves; h++) {
                if (h == 1 && !gated) break;
                largest = fmaxf(largest, fabsf(dx[h][k]));
                if (ROUNDED) dx[h][k] = te_act_rounded(dx[h][k], X_DT);
                if (BIAS) sum[h][k] += dx[h][k];
                if (!fp8) continue;
                dx[h][k] *= scale;
                if (r >= rows || k >= cols) dx[h][k] = 0.0f; // even if the scale is NaN
            }
        }
#pragma unroll
        for (int h = 0; h < halves; h++) {
            if (h == 1 && !gated) break;
            // Only the last half is followed by padding.
            te_i64 to = (p.row + r) * a.ld + h * a.n + p.col, there = h == 1 || !gated ? a.ld - h * a.n - p.col : cols;
            if (!fp8) {
                if (r < rows) te_store_part<te_act_unroll>(a.dx, to, DX_DT, there, a.vector_dx, dx[h]);
                continue;
            }
#pragma unroll
            for (int i = 0; i < 2; i++)
                code[h][r][i] = te_f32x2_to_fp8(dx[h][4 * i], dx[h][4 * i + 1], DX_DT) |
                                (te_u32)te_f32x2_to_fp8(dx[h][4 * i + 2], dx[h][4 * i + 3], DX_DT) << 16;
            if (a.dx && r < rows) te_act_store_codes((te_u8 *)a.dx + to, there, a.vector_dx, code[h][r]);
        }
    }
    if (a.col) {
#pragma unroll
        for (int h = 0; h < halves; h++) te_act_turn(tile + h * TE_TILE_COLUMNS * TE_TILE_WORDS, code[h]);
        __syncthreads();
#pragma unroll
        for (int h = 0; h < halves; h++) {
            if (h == 1 && !gated) break;
            te_tile_store(tile + h * TE_TILE_COLUMNS * TE_TILE_WORDS, (te_u8 *)a.col + h * a.n * a.ldc, a.ldc,
                          p.first_row, p.first_col, a.n, 1, a.vector_col);
        }
    }
    if (BIAS && p.first_row < a.m) {
        __syncthreads(); // the tiles have been read
#pragma unroll
        for (int h = 0; h < halves; h++) {
            if (h == 1 && !gated) break;
            te_tile_column_sums(sum[h], (float *)tile, a.partial + p.tile_m * width + h * a.n + p.first_col,
                                a.n - p.first_col);
        }
    }
    if (a.amax) te_act_amax(a.amax, seen, largest, a.amax_dt);
}
