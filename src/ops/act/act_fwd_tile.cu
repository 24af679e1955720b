// ops/act/act_fwd_tile.cu: the forward pass of activations, into FP8 with a column-wise copy. It reads x once and
// writes the codes both row-wise and transposed. The formulas are in act.cuh, the tiles in act_tile.cuh.
//
//   y = f(x) or f(a) b;   q = saturate(y * scale), amax = max |y|;   row [m, ld] and col [n, ldc], padded with 0
//
// Tiles cover `ld` columns and `ldc` rows, padding included.
//
// Benchmark: "gelu forward e4m3 both copies", "swiglu forward e4m3 both copies" in tests/bench/h200.csv.
//
// Launch: block of 256 threads; the grid has one block for each tile of 128 x 64, consecutive along a row of tiles. Any
// size and any alignment are allowed.
//
// te:baseline
// te:row ACT=8 X_DT=3 Y_DT=4
// te:row ACT=1 X_DT=3 Y_DT=4
// te:row ACT=12 X_DT=3 Y_DT=4
// te:row ACT=8 X_DT=2 Y_DT=5
// te:row ACT=6 X_DT=1 Y_DT=4
#include "ops/act/act.cuh"
#include "ops/act/act_tile.cuh"
#ifdef ACT
#define HELD X_DT
#else
#define ACT a.rule.act
#define X_DT a.x_dt
#define Y_DT a.y_dt
#define HELD TE_F32 // the format of elements in registers: f32, unpacked
#endif

extern "C" __global__ void __launch_bounds__(256) te_act_fwd_tile(const __grid_constant__ te__act_fwd_kargs a) {
    te_follow();
    __shared__ __align__(16) te_u32 tile[TE_TILE_COLUMNS * TE_TILE_WORDS];
    te_act_place p(a.tiles_n);
    te_i64 left = a.m - p.row, cols = a.n - p.col, width = te_act_gated(ACT) ? 2 * a.n : a.n,
           at = p.row * width + p.col;
    int rows = left > 4 ? 4 : left < 0 ? 0 : (int)left;
    te_raw<HELD> x[4], gate[4];
    te_act_load<HELD>(a.x, at, width, X_DT, rows, cols, a.vector_x, x);
    if (te_act_gated(ACT)) te_act_load<HELD>(a.x, at + a.n, width, X_DT, rows, cols, a.vector_x, gate);
    float scale = *a.scale, seen = a.amax ? *a.amax : 0.0f, largest = 0.0f, slope;
    if (a.scale_inv && blockIdx.x == 0 && threadIdx.x == 0) *a.scale_inv = __frcp_rn(scale);
    te_u32 code[4][2];
#pragma unroll te_act_unroll
    for (int r = 0; r < 4; r++) {
        float y[8];
#pragma unroll te_act_unroll
        for (int k = 0; k < 8; k++) {
            float u = te_raw_get(x[r], k);
            y[k] = te_act_gated(ACT) ? te_act_gate(ACT, u, te_raw_get(gate[r], k), a.rule)
                                     : te_act(ACT, u, &slope);
            largest = fmaxf(largest, fabsf(y[k]));
            y[k] *= scale;
            if (r >= rows || k >= cols) y[k] = 0.0f; // even if the scale is NaN
        }
#pragma unroll
        for (int h = 0; h < 2; h++)
            code[r][h] = te_f32x2_to_fp8(y[4 * h], y[4 * h + 1], Y_DT) |
                         (te_u32)te_f32x2_to_fp8(y[4 * h + 2], y[4 * h + 3], Y_DT) << 16;
        if (a.y && r < rows)
            te_act_store_codes((te_u8 *)a.y + (p.row + r) * a.ld + p.col, a.ld - p.col, a.vector_y, code[r]);
    }
    if (a.col) {
        te_act_turn(tile, code);
        __syncthreads();
        te_tile_store(tile, a.col, a.ldc, p.first_row, p.first_col, a.n, 1, a.vector_col);
    }
    if (a.amax) te_act_amax(a.amax, seen, largest, TE_F32);
}
