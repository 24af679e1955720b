// ops/math/embedding_bwd.cu: dtable [vocab, h] = (accumulate ? dtable : 0) + for each id the rows of dy at its tokens, added in f32 in the
// order of the tokens. embedding_sort has made the lists.
//
//   one warp: 256 columns of one id; a lane has eight of them. Ids without a token cost a read of two list ends, and a row of zeros
//   unless accumulating.
//
// Launch: block 256, grid: the (id, 256 columns) pairs / 8 up, columns fastest. `vector`: rows start at multiples of 16 bytes.
//
// te:baseline
// te:row DY_DT=3 DTABLE_DT=3
// te:row DY_DT=3 DTABLE_DT=1
// te:row DY_DT=1 DTABLE_DT=1
#include "device/base.cuh"
#include "ops/math/kargs.h"
#ifndef DY_DT
#define DY_DT a.dy_dt
#define DTABLE_DT a.dtable_dt
#endif

extern "C" __global__ void __launch_bounds__(256) te_embedding_bwd(const __grid_constant__ te__embedding_bwd_kargs a) {
    te_i64 pair = (te_i64)blockIdx.x * 8 + (threadIdx.x >> 5), per_row = te_div_up(a.h, 256);
    te_i64 id = pair / per_row, col = (pair - id * per_row) * 256 + (threadIdx.x & 31) * 8;
    if (id >= a.vocab || col >= a.h) return;
    te_u32 begin = a.start[id], end = a.start[id + 1];
    if (begin == end && a.accumulate) return;
    bool whole = a.vector && col + 8 <= a.h;
    float sum[8] = {};
    if (whole) {
        // Sixteen rows on their way at once: a frequent id is a long chain of dependent additions, and only its loads can overlap.
        te_u32 i = begin;
        for (; i + 16 <= end; i += 16) {
            float v[16][8];
#pragma unroll
            for (int r = 0; r < 16; r++) te_load8(a.dy, (te_i64)a.order[i + r] * a.h + col, DY_DT, v[r]);
#pragma unroll
            for (int r = 0; r < 16; r++)
#pragma unroll
                for (int k = 0; k < 8; k++) sum[k] += v[r][k];
        }
#pragma unroll 4
        for (; i < end; i++) {
            float v[8];
            te_load8(a.dy, (te_i64)a.order[i] * a.h + col, DY_DT, v);
#pragma unroll
            for (int k = 0; k < 8; k++) sum[k] += v[k];
        }
        if (a.accumulate) {
            float old[8];
            te_load8(a.dtable, id * a.h + col, DTABLE_DT, old);
#pragma unroll
            for (int k = 0; k < 8; k++) sum[k] = old[k] + sum[k];
        }
        te_store8(a.dtable, id * a.h + col, DTABLE_DT, sum);
    } else {
        for (te_u32 i = begin; i < end; i++)
            for (int k = 0; k < 8; k++)
                if (col + k < a.h) sum[k] += te_load(a.dy, (te_i64)a.order[i] * a.h + col + k, DY_DT);
        for (int k = 0; k < 8; k++) {
            if (col + k >= a.h) break;
            if (a.accumulate) sum[k] += te_load(a.dtable, id * a.h + col + k, DTABLE_DT);
            te_store(a.dtable, id * a.h + col + k, DTABLE_DT, sum[k]);
        }
    }
}
