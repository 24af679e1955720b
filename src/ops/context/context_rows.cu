// ops/context/context_rows.cu: for sequences that are split among ranks, finds the rank of each row and the index of
// the row on that rank (te__context_place). It writes these places as the map (row_id_map) of moe_permute, or writes
// the inverse of this map.
//
// Launch: blocks of 256 threads. There is a thread for each row, or fewer threads, which then step through the rows.
//
// te:baseline
#include "device/base.cuh"
#include "base/sequences.h"
#include "ops/context/kargs.h"

extern "C" __global__ void __launch_bounds__(256) te_context_rows(const __grid_constant__ te__context_rows_kargs a) {
    te_follow();
    for (te_i64 w = (te_i64)blockIdx.x * 256 + threadIdx.x; w < a.rows; w += (te_i64)gridDim.x * 256) {
        te_i64 rank, local, at = w;
        if (te__context_place(&a, w, &rank, &local)) at = rank * (a.rows / a.ranks) + local;
        a.map[a.inverse ? w : at] = (int)(a.inverse ? at : w);
    }
}
