// device/mma.cuh: matrix products on Ampere and later: cp.async, ldmatrix, mma.sync. This file must not depend on
// operations or tiles.
//
// Fragments of mma.sync m16n8k(32 bytes), for lane = 4 g + t. A "word" is 32 bits of neighbours along k: one f32, two
// 16-bit or four 8-bit values.
//   A  a[0] (row g,     word t)       a[1] (row g + 8, word t)
//      a[2] (row g,     word t + 4)   a[3] (row g + 8, word t + 4)
//   B  b[0] (column g,  word t)       b[1] (column g,  word t + 4)
//   D  d[0] (row g, column 2t)        d[1] (row g, column 2t + 1)
//      d[2] (row g + 8, column 2t)    d[3] (row g + 8, column 2t + 1)
// ldmatrix loads exactly these words if the 16-byte rows in shared memory run along k. If the rows run along m
// or n, ldmatrix.trans loads these words; this works for 16-bit elements only.
#pragma once
#include "device/base.cuh"

// Returns an address of shared memory in the form that PTX operands require.
TE_DEV te_u32 te_smem(const void *p) { return (te_u32)__cvta_generic_to_shared(p); }

// ---- copies from device to shared memory ----------------------------------------------------------------------------

// Starts a copy to 16 bytes of shared memory. Only the first `bytes` bytes (0 to 16) of src are read; the rest of dst
// becomes zero. Both addresses must be multiples of 16.
TE_DEV void te_cp_async16(te_u32 dst, const void *src, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(bytes) : "memory");
}
// Starts a copy of 16 bytes. The L2 cache also fetches the aligned 256 bytes around src, because they are loaded next.
// ONCE: nothing reads them again soon, so the cache replaces them before all else.
template <bool ONCE> TE_DEV void te_cp_async16_ahead(te_u32 dst, const void *src) {
    if (ONCE) {
        // as createpolicy.fractional.L2::evict_first computes it, at each copy, for all architectures
        const te_u64 policy = 0x12f0000000000000;
        asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::256B [%0], [%1], 16, %2;" ::"r"(dst), "l"(src),
                     "l"(policy)
                     : "memory");
    } else asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" ::"r"(dst), "l"(src) : "memory");
}
// Starts a copy of four bytes.
TE_DEV void te_cp_async4(te_u32 dst, const void *src) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(dst), "l"(src) : "memory");
}
TE_DEV void te_cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until all of this thread's copies have arrived, also those of no group yet.
TE_DEV void te_cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }
// Waits until this thread's groups of copies, except the latest N groups, have arrived.
template <int N> TE_DEV void te_cp_async_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

TE_DEV void te_sts16(te_u32 dst, uint4 v) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(dst), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}
TE_DEV void te_sts8(te_u32 dst, float x, float y) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(dst), "f"(x), "f"(y) : "memory");
}
TE_DEV void te_lds8(te_u32 src, float &x, float &y) {
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x), "=f"(y) : "r"(src));
}
TE_DEV void te_sts4(te_u32 dst, te_u32 v) { asm volatile("st.shared.b32 [%0], %1;" ::"r"(dst), "r"(v) : "memory"); }
TE_DEV te_u16 te_lds2(te_u32 src) {
    te_u16 v;
    asm volatile("ld.shared.b16 %0, [%1];" : "=h"(v) : "r"(src) : "memory");
    return v;
}
TE_DEV uint4 te_lds16(te_u32 src) {
    uint4 v;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(src)
                 : "memory");
    return v;
}
TE_DEV te_u32 te_lds4(te_u32 src) {
    te_u32 r;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(r) : "r"(src));
    return r;
}

// ---- fragments from shared memory -----------------------------------------------------------------------------------
// Loads four 8x8 matrices of 16-bit words. Lanes 8 i to 8 i + 7 pass the row addresses of matrix i, which goes to r[i].
// te_ldmatrix4_trans also transposes.

TE_DEV void te_ldmatrix4(te_u32 r[4], te_u32 row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(row)
                 : "memory");
}
TE_DEV void te_ldmatrix4_trans(te_u32 r[4], te_u32 row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(row)
                 : "memory");
}

// ---- products: d += a b, one warp -----------------------------------------------------------------------------------

#define TE__MMA(instruction, d, a, b)                                                                               \
    asm volatile("mma.sync.aligned." instruction " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                                   \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))

TE_DEV void te_mma_bf16(float d[4], const te_u32 a[4], const te_u32 b[2]) {
    TE__MMA("m16n8k16.row.col.f32.bf16.bf16.f32", d, a, b);
}
TE_DEV void te_mma_f16(float d[4], const te_u32 a[4], const te_u32 b[2]) {
    TE__MMA("m16n8k16.row.col.f32.f16.f16.f32", d, a, b);
}
TE_DEV void te_mma_tf32(float d[4], const te_u32 a[4], const te_u32 b[2]) {
    TE__MMA("m16n8k8.row.col.f32.tf32.tf32.f32", d, a, b);
}

// Of signed bytes.
TE_DEV void te_mma_s8(int d[4], const te_u32 a[4], const te_u32 b[2]) {
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Rounds an f32 to TF32, to the nearest value and ties away from zero. The result is in f32 format.
TE_DEV te_u32 te_tf32(te_u32 f) {
    te_u32 r;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(r) : "f"(__int_as_float((int)f)));
    return r;
}

// ---- fp8 ------------------------------------------------------------------------------------------------------------

// Converts two of four FP8 codes to f16: the lower two if half is 0, else the upper two. Exact: both FP8 formats are
// subsets of f16.
TE_DEV te_u32 te_fp8x2_to_f16(te_u32 codes, int half, int dt) {
    // Each code becomes the upper byte of an f16. For E5M2 this is the result.
    te_u32 r = __byte_perm(codes, 0, half ? 0x3424 : 0x1404);
    if (dt == TE_F8E5M2) return r;
#if TE_HAS_FP8_CVT
    if (half) // no shift: the instruction takes the upper half itself
        asm("{ .reg .b16 l, h; mov.b32 {l, h}, %1; cvt.rn.f16x2.e4m3x2 %0, h; }" : "=r"(r) : "r"(codes));
    else asm("{ .reg .b16 l, h; mov.b32 {l, h}, %1; cvt.rn.f16x2.e4m3x2 %0, l; }" : "=r"(r) : "r"(codes));
#else
    // Moves the E4M3 bits S.EEEE.MMM to S.0EEEE.MMM0000000. Read as f16, the moved bits are the value times 2^-8, also
    // for denormals. S.1111.111 is NaN.
    te_u32 nan = ((r & 0x7f007f00u) + 0x01000100u) & 0x80008000u;
    r = (r & 0x80008000u) | ((r & 0x7f007f00u) >> 1);
    asm("mul.f16x2 %0, %0, %1;" : "+r"(r) : "r"(0x5c005c00u));
    r |= nan - (nan >> 15); // 0x8000 => 0x7fff
#endif
    return r;
}

// mma.sync for FP8, on GPUs whose tensor cores support it. Elsewhere the instruction is missing or emulated by f16
// products.
#if __CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1200
#define TE_HAS_FP8_MMA 1
TE_DEV void te_mma_e4m3_e4m3(float d[4], const te_u32 a[4], const te_u32 b[2]) {
    TE__MMA("m16n8k32.row.col.f32.e4m3.e4m3.f32", d, a, b);
}
TE_DEV void te_mma_e4m3_e5m2(float d[4], const te_u32 a[4], const te_u32 b[2]) {
    TE__MMA("m16n8k32.row.col.f32.e4m3.e5m2.f32", d, a, b);
}
TE_DEV void te_mma_e5m2_e4m3(float d[4], const te_u32 a[4], const te_u32 b[2]) {
    TE__MMA("m16n8k32.row.col.f32.e5m2.e4m3.f32", d, a, b);
}
#else
#define TE_HAS_FP8_MMA 0
#endif
