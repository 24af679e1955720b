// ops/attn/attn.cuh: shared by all attention kernels: the mask (the keys that a row attends to), and dropout. Knows no tiles.
#pragma once
#include "device/base.cuh"
#include "ops/attn/kargs.h"

#define TE_LOG2E 1.4426950408889634f
#define TE_LN2 0.6931471805599453f

// 2^x: the instruction itself, 2 ulp; 2^-inf = 0.
TE_DEV float te_exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// The (batch, head) and the tile of a block: tiles of one head follow each other, so that blocks that run at the same time read
// the same keys. `last_first`: under a causal mask the last rows have the most work.
struct te_attn_place {
    int b, h, tile;
    TE_DEV te_attn_place(int tiles, int heads, bool last_first) {
        te_u32 at = blockIdx.x / (te_u32)tiles;
        tile = (int)(blockIdx.x - at * (te_u32)tiles);
        if (last_first) tile = tiles - 1 - tile;
        b = (int)(at / (te_u32)heads);
        h = (int)(at - (te_u32)b * (te_u32)heads);
    }
};

// Keys begin .. end - 1 cover all that rows first .. last see.
TE_DEV int te_attn_keys_begin(const te__attn_kargs &a, int first) { return max(0, first + a.lo); }
TE_DEV int te_attn_keys_end(const te__attn_kargs &a, int last) { return min(a.s_kv, last + a.hi + 1); }
// Rows begin .. end - 1 cover all that see any of the keys first .. last.
TE_DEV int te_attn_rows_begin(const te__attn_kargs &a, int first) { return max(0, first - a.hi); }
TE_DEV int te_attn_rows_end(const te__attn_kargs &a, int last) { return min(a.s_q, last - a.lo + 1); }

TE_DEV bool te_attn_sees(const te__attn_kargs &a, int i, int j) {
    return i < a.s_q && j < a.s_kv && j >= i + a.lo && j <= i + a.hi;
}

TE_DEV char *te_attn_head(const te__attn_view &x, int b, int h, int element_bytes) {
    return (char *)x.p + (b * x.b + h * x.h) * element_bytes;
}
// Element [b, i, h, 0], for te_load and te_store.
TE_DEV te_i64 te_attn_at(const te__attn_view &x, int b, int h, int i) { return b * x.b + h * x.h + i * x.s; }

// The index that dropout knows element (b, h, i, 0) of P by.
TE_DEV te_u64 te_attn_dropout_row(const te__attn_kargs &a, int b, int h, int i) {
    return (((te_u64)b * a.heads + h) * a.s_q + i) * (te_u64)a.s_kv;
}
// One bit for each of the four elements of a Philox block: bit w is set if element 4 block + w is kept.
TE_DEV te_u32 te_attn_keeps4(const te__attn_kargs &a, te_u64 block) {
    te_u32 bits[4], keep = 0;
    uint64_t seed = a.seed, offset = a.offset;
    te__rng_read(a.rng, &seed, &offset);
    te__philox(seed, offset, block, bits);
#pragma unroll
    for (int w = 0; w < 4; w++) keep |= (te__uniform01(bits[w]) >= a.dropout_p ? 1u : 0u) << w;
    return keep;
}
TE_DEV bool te_attn_keeps(const te__attn_kargs &a, te_u64 element) { return te_attn_keeps4(a, element / 4) >> (element % 4) & 1u; }
// The same for an accumulator fragment, 16 rows by 8 keys, of rows whose length is a multiple of 4: bits 0 and 1 are this lane's two keys in
// its upper row, 2 and 3 those in its lower row. `upper` is the element of the fragment's first key in the lane's upper row. Two lanes share
// each Philox block: each lane computes one block, and they exchange them.
TE_DEV te_u32 te_attn_keeps_fragment(const te__attn_kargs &a, te_u64 upper) {
    const int lane = threadIdx.x & 31, odd = lane & 1;
    te_u32 mine = te_attn_keeps4(a, (upper + (odd ? 8 * (te_u64)a.s_kv : 0)) / 4 + (lane >> 1 & 1));
    te_u32 other = __shfl_xor_sync(0xffffffffu, mine, 1);
    te_u32 up = odd ? other : mine, low = odd ? mine : other;
    return (up >> (2 * odd) & 3u) | (low >> (2 * odd) & 3u) << 2;
}
// The same for the transposed fragment, 16 keys by 8 rows: bits 0 and 1 are the lane's upper key in its two rows, 2 and 3 its lower key. `corner` is
// the element of the fragment's first key in its first row. Four lanes share the blocks of their two rows, for the upper and the lower keys.
TE_DEV te_u32 te_attn_keeps_transposed(const te__attn_kargs &a, te_u64 corner) {
    const int lane = threadIdx.x & 31, key = lane >> 2, mate = key & 3;
    te_u64 row = corner + (2 * (lane & 3) + (mate & 1)) * (te_u64)a.s_kv;
    te_u32 mine = te_attn_keeps4(a, row / 4 + (key >> 2) + (mate >> 1) * 2), keep = 0;
#pragma unroll
    for (int m = 0; m < 4; m++) keep |= (__shfl_sync(0xffffffffu, mine, (lane & ~12) | m << 2) >> mate & 1u) << m;
    return keep;
}
