// ops/moe/moe.cuh: finds the rows of a token's copies in a row_id_map, which is a mask map (made from a routing mask)
// or an index map (made from expert indices).
#pragma once
#include "device/vector.cuh"
#include "ops/moe/loop.cuh"

// Returns how many copies token t may have.
TE_DEV te_i64 te_moe_count(const int *map, te_i64 t, te_i64 copies, int experts) {
    if (!experts) return copies;
    int n = map[t * (2 * experts + 1) + 2 * experts];
    return n < 0 ? 0 : n < experts ? n : experts;
}
// Returns the row of copy i of token t, or -1. Sets *place to the position of the copy among the token's probabilities.
TE_DEV_CALL te_i64 te_moe_row(const int *map, const void *pad_offsets, int offsets_dt, te_i64 t, te_i64 i,
                              te_i64 tokens, te_i64 rows, int experts, te_i64 *place) {
    te_i64 row;
    if (!experts) {
        *place = i;
        row = map[i * tokens + t];
    } else {
        const int *at = map + t * (2 * experts + 1);
        *place = at[experts + i];
        row = at[i];
        if (*place < 0 || *place >= experts) return -1;
        if (row >= 0 && pad_offsets) row += te_load_index(pad_offsets, *place, offsets_dt);
    }
    return row >= 0 && row < rows ? row : -1;
}
