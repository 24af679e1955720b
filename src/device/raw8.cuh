// device/raw8.cuh: eight neighbours of a row as they lie in memory, and how they come. Knows formats; nothing of what is made of them.
//
// A row waits in registers between the passes over it. Sixteen-bit formats stay packed there: half the registers, and
// unpacking costs one instruction an element.
#pragma once
#include "device/mma.cuh"

template <int DT> constexpr int te_size = DT == TE_F32 ? 4 : 2; // bytes of an element

template <int DT> struct te_raw8 {
    te_u32 w[DT == TE_F32 ? 8 : 4];
};

// p + i is aligned to 16 bytes, and nothing writes there while the kernel runs: the compiler may move the load up.
template <int DT> TE_DEV te_raw8<DT> te_raw8_load(const void *p, te_i64 i) {
    te_raw8<DT> r;
    const char *q = (const char *)p + i * te_size<DT>;
#pragma unroll
    for (int k = 0; k < (DT == TE_F32 ? 8 : 4); k += 4)
        asm("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(r.w[k]), "=r"(r.w[k + 1]), "=r"(r.w[k + 2]), "=r"(r.w[k + 3]) : "l"(q + 4 * k));
    return r;
}
// The same of what is read once: it leaves the L1 cache to what all rows share.
template <int DT> TE_DEV te_raw8<DT> te_raw8_load_once(const void *p, te_i64 i) {
    te_raw8<DT> r;
    const char *q = (const char *)p + i * te_size<DT>;
#pragma unroll
    for (int k = 0; k < (DT == TE_F32 ? 8 : 4); k += 4)
        asm("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(r.w[k]), "=r"(r.w[k + 1]), "=r"(r.w[k + 2]), "=r"(r.w[k + 3]) : "l"(q + 4 * k));
    return r;
}
// The same, where it stands: the compiler would rather have all of a loop's loads at its beginning, and no registers for them.
template <int DT> TE_DEV te_raw8<DT> te_raw8_load_here(const void *p, te_i64 i) {
    te_raw8<DT> r;
    const char *q = (const char *)p + i * te_size<DT>;
#pragma unroll
    for (int k = 0; k < (DT == TE_F32 ? 8 : 4); k += 4)
        asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(r.w[k]), "=r"(r.w[k + 1]), "=r"(r.w[k + 2]), "=r"(r.w[k + 3]) : "l"(q + 4 * k) : "memory");
    return r;
}
template <int DT> TE_DEV te_raw8<DT> te_raw8_zero() {
    te_raw8<DT> r;
#pragma unroll
    for (int j = 0; j < (DT == TE_F32 ? 8 : 4); j++) r.w[j] = 0;
    return r;
}
// Element j, a literal once the loop around it is unrolled.
template <int DT> TE_DEV float te_raw8_get(const te_raw8<DT> &r, int j) {
    if constexpr (DT == TE_F32) return __int_as_float((int)r.w[j]);
    if constexpr (DT == TE_BF16) return __int_as_float((int)(j & 1 ? r.w[j >> 1] & 0xffff0000u : r.w[j >> 1] << 16));
    return te_f16_to_f32((te_u16)(r.w[j >> 1] >> (16 * (j & 1))));
}
// The largest |v| of eight; NaN drops out.
TE_DEV float te_largest8(const float v[8]) {
    float m[4];
#pragma unroll
    for (int j = 0; j < 4; j++) m[j] = fmaxf(fabsf(v[j]), fabsf(v[j + 4]));
    return fmaxf(fmaxf(m[0], m[1]), fmaxf(m[2], m[3]));
}
// Both sums over a warp at once: half of it goes on with x and half with y, which takes seven shuffles in place of ten.
TE_DEV float2 te_warp_sum2(float2 v) {
    bool second = threadIdx.x & 16;
    float mine = second ? v.y : v.x;
    mine += __shfl_xor_sync(0xffffffffu, second ? v.x : v.y, 16);
#pragma unroll
    for (int d = 8; d; d >>= 1) mine += __shfl_xor_sync(0xffffffffu, mine, d);
    return make_float2(__shfl_sync(0xffffffffu, mine, 0), __shfl_sync(0xffffffffu, mine, 16));
}
// Keeps the compiler from carrying unpacked elements from one pass to the next: they take twice the registers.
template <int DT, int N> TE_DEV void te_raw8_seal(te_raw8<DT> (&r)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++)
#pragma unroll
        for (int j = 0; j < (DT == TE_F32 ? 8 : 4); j++) asm volatile("" : "+r"(r[i].w[j]));
}

// From shared memory, at a multiple of 16; 16-bit formats.
template <int DT> TE_DEV te_raw8<DT> te_raw8_shared(te_u32 at) {
    te_raw8<DT> r;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(r.w[0]), "=r"(r.w[1]), "=r"(r.w[2]), "=r"(r.w[3]) : "r"(at) : "memory");
    return r;
}

// A queue of pieces of rows in shared memory, in which every thread finds again what it fetched itself, so that no barrier is needed:
// slot s has PIECES of them for each of THREADS threads, 16 bytes of neighbouring threads next to each other.
template <int DT, int PIECES, int THREADS> struct te_raw8_queue {
    static constexpr int parts = DT == TE_F32 ? 2 : 1;
    static constexpr int slot_bytes = PIECES * parts * THREADS * 16;
    te_u32 mine; // where the thread's first 16 bytes go
    TE_DEV te_u32 at(int slot, int piece, int part) const { return mine + slot * slot_bytes + (piece * parts + part) * (THREADS * 16); }
    TE_DEV void clear(int slots) const {
        for (int i = 0; i < slots * PIECES * parts; i++) te_sts16(mine + i * (THREADS * 16), make_uint4(0, 0, 0, 0));
    }
    TE_DEV void fetch(int slot, int piece, const char *p) const {
#pragma unroll
        for (int k = 0; k < parts; k++) te_cp_async16(at(slot, piece, k), p + 16 * k, 16);
    }
    TE_DEV te_raw8<DT> get(int slot, int piece) const {
        te_raw8<DT> r;
#pragma unroll
        for (int k = 0; k < parts; k++)
            asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(r.w[4 * k]), "=r"(r.w[4 * k + 1]), "=r"(r.w[4 * k + 2]), "=r"(r.w[4 * k + 3])
                         : "r"(at(slot, piece, k)));
        return r;
    }
};
