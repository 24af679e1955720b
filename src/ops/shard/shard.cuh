// ops/shard/shard.cuh: loads eight neighbours of the matrix, of which the slice may hold some. Knows positions of x's
// elements; must not know the cast.
#pragma once
#include "device/vector.cuh"

// Loads the eight elements from x[i] on; the first `columns_left` of them are of one row. The slice has n elements from
// x[0] on; elements outside are 0. vector: i is a multiple of eight, and x aligned to 16 bytes.
TE_DEV void te_shard_load8(const void *x, te_i64 i, te_i64 n, te_i64 columns_left, bool vector, int dt, float v[8]) {
    if (vector && columns_left >= 8 && i >= 0 && i + 8 <= n) {
        te_load8(x, i, dt, v);
        return;
    }
#pragma unroll
    for (int k = 0; k < 8; k++) v[k] = k < columns_left && i + k >= 0 && i + k < n ? te_load(x, i + k, dt) : 0.0f;
}
