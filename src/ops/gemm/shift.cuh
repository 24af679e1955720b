// ops/gemm/shift.cuh: sixteen bytes that lie anywhere, out of the aligned ones that hold them.
#pragma once
#include "device/base.cuh"

// Bytes by .. by + 15 of lo and hi; by: 0 to 15.
TE_DEV uint4 te_shift(uint4 lo, uint4 hi, int by) {
    te_u32 w[8] = {lo.x, lo.y, lo.z, lo.w, hi.x, hi.y, hi.z, hi.w}, out[4];
    if (by & 8) {
#pragma unroll
        for (int i = 0; i < 6; i++) w[i] = w[i + 2];
    }
    if (by & 4) {
#pragma unroll
        for (int i = 0; i < 5; i++) w[i] = w[i + 1];
    }
#pragma unroll
    for (int i = 0; i < 4; i++) out[i] = __funnelshift_r(w[i], w[i + 1], 8 * (by & 3));
    return make_uint4(out[0], out[1], out[2], out[3]);
}

// The first `bits` (1 .. 128) at `from`, and zeros behind them. Whole pieces are read where they end before `end`, else byte by byte.
TE_DEV uint4 te_load_part(const te_u8 *from, int bits, const te_u8 *end) {
    int by = (int)((te_u64)from & 15), n = (bits + 7) / 8;
    bool two = by + n > 16;
    te_u32 w[4] = {0, 0, 0, 0};
    if (from - by + (two ? 32 : 16) <= end) {
        uint4 u = *(const uint4 *)(from - by);
        if (by) u = te_shift(u, two ? *(const uint4 *)(from - by + 16) : u, by);
        w[0] = u.x, w[1] = u.y, w[2] = u.z, w[3] = u.w;
    } else {
#pragma unroll
        for (int i = 0; i < 16; i++)
            if (i < n) w[i / 4] |= (te_u32)from[i] << (8 * (i % 4));
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int left = bits - 32 * i;
        w[i] = left >= 32 ? w[i] : left <= 0 ? 0 : w[i] & ((1u << left) - 1);
    }
    return make_uint4(w[0], w[1], w[2], w[3]);
}
