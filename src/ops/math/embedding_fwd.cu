// ops/math/embedding_fwd.cu: copies the rows `ids` of table [vocab, h] to y [tokens, h]. An id outside of the table
// gives zeros. If it is outside of the vocabulary too, it is reported.
//
// Benchmark: "embedding forward" in tests/bench/h200.csv.
//
// Launch: block 256, one warp for each token; grid tokens / 8, rounded up. With `vector` the rows of table and y start
// at multiples of 16 bytes.
//
// te:baseline
// te:row TABLE_DT=3 Y_DT=3
// te:row TABLE_DT=1 Y_DT=1
#include "device/outside.cuh"
#include "device/vector.cuh"
#include "ops/math/kargs.h"
#ifndef TABLE_DT
#define TABLE_DT a.table_dt
#define Y_DT a.y_dt
#endif

extern "C" __global__ void __launch_bounds__(256) te_embedding_fwd(const __grid_constant__ te__embedding_fwd_kargs a) {
    te_follow();
    te_i64 token = (te_i64)blockIdx.x * 8 + (threadIdx.x >> 5);
    int lane = threadIdx.x & 31;
    if (token >= a.tokens) return;
    te_i64 given = te_load_index(a.ids, token, a.ids_dt), id = te_from_begin(given, a.all, a.from_end);
    if (lane == 0 && (te_u64)id >= (te_u64)a.all) te_tell_outside(a.outside, given, token, a.all);
    id -= a.first;
    bool known = id >= 0 && id < a.vocab;
    te_i64 whole = a.vector ? a.h / 8 * 8 : 0;
#pragma unroll 4
    for (te_i64 col = lane * 8; col < whole; col += 256) {
        float v[8] = {};
        if (known) te_load8(a.table, id * a.h + col, TABLE_DT, v);
        te_store8(a.y, token * a.h + col, Y_DT, v);
    }
    for (te_i64 col = whole + lane; col < a.h; col += 32)
        te_store(a.y, token * a.h + col, Y_DT, known ? te_load(a.table, id * a.h + col, TABLE_DT) : 0.0f);
}
