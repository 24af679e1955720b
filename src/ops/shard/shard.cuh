// ops/shard/shard.cuh: loads eight neighbouring elements of a matrix row; some may lie outside of the slice. This file
// must not depend on the cast.
#pragma once
#include "device/vector.cuh"

// Loads x[i] .. x[i + 7]. The row has only `columns_left` elements from x[i] on. The slice is x[0] .. x[n - 1], and i
// may be negative. Elements outside of the row or of the slice become 0. With `vector`, i is a multiple of eight and x
// is aligned to 16 bytes.
TE_DEV void te_shard_load8(const void *x, te_i64 i, te_i64 n, te_i64 columns_left, bool vector, int dt, float v[8]) {
    if (vector && columns_left >= 8 && i >= 0 && i + 8 <= n) {
        te_load8(x, i, dt, v);
        return;
    }
#pragma unroll
    for (int k = 0; k < 8; k++) v[k] = k < columns_left && i + k >= 0 && i + k < n ? te_load(x, i + k, dt) : 0.0f;
}
