// ops/context/context_rows.cu: makes a map between two orders of the rows of all ranks. One is the order of the
// sequences. The other has all rows of rank 0, then of rank 1 and so on. Row `at` of the order of the ranks is row w of
// the order of the sequences (te__context_place). The kernel writes map[at] = w or, with `inverse`, map[w] = at.
// moe_permute takes such a map as its row_id_map.
//
// Launch: blocks of 256 threads. Fewer threads than rows are allowed.
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
