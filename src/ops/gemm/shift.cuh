// ops/gemm/shift.cuh: loads sixteen bytes from an address of any alignment.
#pragma once
#include "device/base.cuh"

// Takes `lo` followed by `hi` as an array of 32 bytes. Returns sixteen bytes of the array. The first of them has index
// `by` (0 to 15).
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

// Loads the first `bits` bits at `from` (at most 128), followed by zeros. If `bits` is 0 or less, all are zeros. Reads
// nothing from `end` on. Several loads can be under way between ask() and get().
struct te_part {
    const te_u8 *from;
    int bits;
    bool whole;
    uint4 lo, hi;

    TE_DEV void ask(const te_u8 *at, int n, const te_u8 *end) {
        int by = (int)((te_u64)at & 15);
        bool two = by + (n + 7) / 8 > 16;
        from = at, bits = n;
        whole = !n || at - by + (two ? 32 : 16) <= end;
        if (n && whole) lo = *(const uint4 *)(at - by);
        if (two && whole) hi = *(const uint4 *)(at - by + 16);
    }
    TE_DEV uint4 get() const {
        uint4 u = te_shift(lo, hi, (int)((te_u64)from & 15));
        te_u32 w[4] = {u.x, u.y, u.z, u.w};
        if (!whole) {
#pragma unroll
            for (int i = 0; i < 16; i++)
                w[i / 4] = (i % 4 ? w[i / 4] : 0) | (8 * i < bits ? (te_u32)from[i] << (8 * (i % 4)) : 0);
        }
#pragma unroll
        // clears the bits behind the last
        for (int i = 0; i < 4; i++) w[i] &= __funnelshift_rc(0xffffffffu, 0, max(32 * (i + 1) - bits, 0));
        return make_uint4(w[0], w[1], w[2], w[3]);
    }
};
TE_DEV uint4 te_load_part(const te_u8 *from, int bits, const te_u8 *end) {
    te_part part;
    part.ask(from, bits, end);
    return part.get();
}
