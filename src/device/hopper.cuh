// device/hopper.cuh: instructions that only sm_90a has: mbarriers, TMA, wgmma, register counts. This file must not
// depend on operations or tiles.
#pragma once
#include "device/mma.cuh"

// ---- mbarriers (8 bytes of shared memory, by address) ---------------------------------------------------------------

TE_DEV void te_mbar_init(te_u32 bar, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}
// Makes initialized mbarriers visible to TMA and to other threads. Call te_mbar_init_done after the last te_mbar_init
// and before a barrier.
TE_DEV void te_mbar_init_done() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
TE_DEV void te_mbar_arrive(te_u32 bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
// Arrives at the mbarrier. The current phase also waits for copies of `bytes` bytes.
TE_DEV void te_mbar_expect(te_u32 bar, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
// Waits until the phase with this parity is over. On a new mbarrier the phase with parity 1 counts as over.
TE_DEV void te_mbar_wait(te_u32 bar, int parity) {
    int done;
    do {
        asm volatile("{ .reg .pred p;\n"
                     "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                     "selp.b32 %0, 1, 0, p; }"
                     : "=r"(done)
                     : "r"(bar), "r"(parity)
                     : "memory");
    } while (!done);
}

// As te_mbar_wait, for bytes that other blocks of the cluster store: their writes are visible behind it.
TE_DEV void te_mbar_wait_sent(te_u32 bar, int parity) {
    int done;
    do {
        asm volatile("{ .reg .pred p;\n"
                     "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
                     "selp.b32 %0, 1, 0, p; }"
                     : "=r"(done)
                     : "r"(bar), "r"(parity)
                     : "memory");
    } while (!done);
}

// ---- clusters: blocks that see each other's shared memory -----------------------------------------------------------

TE_DEV te_u32 te_cluster_rank() {
    te_u32 r;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
    return r;
}
// Waits for all threads of the cluster. Makes no writes visible to other blocks, except those of te_mbar_init if
// te_mbar_init_done was called before. Making all writes visible would cost a fence for the whole device.
TE_DEV void te_cluster_meet() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;\n"
                 "barrier.cluster.wait.acquire.aligned;" ::
                     : "memory");
}
// The two halves of te_cluster_meet. Threads that have ended are not waited for.
TE_DEV void te_cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory"); }
TE_DEV void te_cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }

// Translates a shared address of this block to the address of the same variable in block `rank`. te_cluster_at(at + n,
// rank) is te_cluster_at(at, rank) + n.
TE_DEV te_u32 te_cluster_at(te_u32 at, te_u32 rank) {
    te_u32 r;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(at), "r"(rank));
    return r;
}
// Arrives at an mbarrier of another block; `bar` is from te_cluster_at. When that block sees the arrival, all TMA and
// wgmma accesses that this thread has waited for are done. This thread's own writes to other blocks may not have
// arrived yet.
TE_DEV void te_mbar_arrive_there(te_u32 bar) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(bar) : "memory");
}

// Stores a 4-byte word in shared memory of block `rank`. The 4 bytes count towards an mbarrier of that block. `at` and
// `bar` are addresses in this block, not from te_cluster_at. Needs PTX 8.1.
TE_DEV void te_store_at(te_u32 at, te_u32 value, te_u32 bar, te_u32 rank) {
    asm volatile("{ .reg .b32 to, there;\n"
                 "mapa.shared::cluster.u32 to, %0, %3;\n"
                 "mapa.shared::cluster.u32 there, %2, %3;\n"
                 "st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [to], %1, [there]; }" ::"r"(at),
                 "r"(value), "r"(bar), "r"(rank)
                 : "memory");
}

// Store floats in shared memory of a block of the cluster. The bytes count towards an mbarrier of that block. `at` and
// `bar` are from te_cluster_at, of the same block. No block may end before all that it is sent has arrived.
#define TE_HAS_STORE_ASYNC /* PTX 8.1 */ \
    (__CUDA_ARCH__ >= 900 && (__CUDACC_VER_MAJOR__ > 12 || __CUDACC_VER_MINOR__ >= 1))
#if TE_HAS_STORE_ASYNC
TE_DEV void te_store16_there(te_u32 at, float4 v, te_u32 bar) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(at),
                 "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(bar)
                 : "memory");
}
TE_DEV void te_store8_there(te_u32 at, float x, float y, te_u32 bar) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(at), "f"(x),
                 "f"(y), "r"(bar)
                 : "memory");
}
#endif

// ---- TMA ------------------------------------------------------------------------------------------------------------

TE_DEV void te_tma_prefetch_map(const void *map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }
// Sets the size of dimension DIM (0 or 1) of a tensor map in device memory. `size` must be positive. Needs PTX 8.3.
template <int DIM> TE_DEV void te_tma_map_end(void *map, int size) {
    asm volatile("tensormap.replace.tile.global_dim.global.b1024.b32 [%0], %1, %2;" ::"l"(map), "n"(DIM), "r"(size)
                 : "memory");
}
// Call te_tma_map_release after changing a map. A thread calls te_tma_map_acquire before its first use of the changed
// map.
TE_DEV void te_tma_map_release() { asm volatile("fence.proxy.tensormap::generic.release.gpu;" ::: "memory"); }
TE_DEV void te_tma_map_acquire(const void *map) {
    asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" ::"l"(map) : "memory");
}
// Loads the box at element (x, y); x counts along the contiguous dimension. The box counts towards the mbarrier `bar`.
// Elements outside of the tensor become zeros.
TE_DEV void te_tma_load2(te_u32 dst, const void *map, int x, int y, te_u32 bar) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, "
                 "%3}], [%4];" ::"r"(dst),
                 "l"(map), "r"(x), "r"(y), "r"(bar)
                 : "memory");
}
// Like te_tma_load2, but loads the box into each block of the cluster whose bit is set in `blocks`, at the same
// addresses `dst` and `bar`.
TE_DEV void te_tma_load2_to(te_u32 dst, const void *map, int x, int y, te_u32 bar, te_u16 blocks) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(dst),
                 "l"(map), "r"(x), "r"(y), "r"(bar), "h"(blocks)
                 : "memory");
}
TE_DEV void te_tma_load3(te_u32 dst, const void *map, int x, int y, int z, te_u32 bar) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, "
                 "%4}], [%5];" ::"r"(dst),
                 "l"(map), "r"(x), "r"(y), "r"(z), "r"(bar)
                 : "memory");
}
TE_DEV void te_tma_load4(te_u32 dst, const void *map, int x, int y, int z, int w, te_u32 bar) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, "
                 "%4, %5}], [%6];" ::"r"(dst),
                 "l"(map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(bar)
                 : "memory");
}
// Prefetches the box that te_tma_load4 would load, into the L2 cache only.
TE_DEV void te_tma_prefetch4(const void *map, int x, int y, int z, int w) {
    asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global.tile [%0, {%1, %2, %3, %4}];" ::"l"(map), "r"(x), "r"(y),
                 "r"(z), "r"(w)
                 : "memory");
}
// Stores shared memory to the box at (x, y, z). te_tma_add3 adds to the box instead.
// Elements outside of the tensor are not written, except behind the end of a row: TMA writes whole 16-byte chunks.
// Before the call, all threads that wrote the shared memory call te_async_fence() and meet at a barrier.
TE_DEV void te_tma_store3(const void *map, te_u32 src, int x, int y, int z) {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3}], [%4];" ::"l"(map),
                 "r"(x), "r"(y), "r"(z), "r"(src)
                 : "memory");
}
TE_DEV void te_tma_add3(const void *map, te_u32 src, int x, int y, int z) {
    asm volatile(
        "cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.tile.bulk_group [%0, {%1, %2, %3}], [%4];" ::"l"(map),
        "r"(x), "r"(y), "r"(z), "r"(src)
        : "memory");
}
TE_DEV void te_tma_store4(const void *map, te_u32 src, int x, int y, int z, int w) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3, %4}], [%5];" ::"l"(map),
                 "r"(x), "r"(y), "r"(z), "r"(w), "r"(src)
                 : "memory");
}
// Stores `bytes` bytes, a multiple of 16, from shared memory to device memory. te_bulk_add instead adds them, as f32
// numbers, to device memory.
TE_DEV void te_bulk_store(void *dst, te_u32 src, int bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(dst), "r"(src), "r"(bytes)
                 : "memory");
}
TE_DEV void te_bulk_add(void *dst, te_u32 src, int bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(dst), "r"(src),
                 "r"(bytes)
                 : "memory");
}
TE_DEV void te_bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until this thread's groups of stores, except the latest N groups, have read shared memory.
template <int N> TE_DEV void te_bulk_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}
// Waits until this thread's groups of stores, except the latest N groups, have written device memory.
template <int N> TE_DEV void te_bulk_wait() { asm volatile("cp.async.bulk.wait_group %0;" ::"n"(N) : "memory"); }
// Makes writes of other threads, which this thread has acquired, visible to later TMA accesses to device memory.
TE_DEV void te_async_fence_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }
TE_DEV int te_load_acquire(const int *p) {
    int v;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
TE_DEV void te_add_release(int *p, int v) {
    asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
// Makes this thread's writes to shared memory visible to TMA and wgmma. A barrier must follow.
TE_DEV void te_async_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Copies `bytes` bytes from device memory to shared memory. `bytes` and both addresses must be multiples of 16. The
// bytes count towards the mbarrier `bar`.
TE_DEV void te_bulk_load(te_u32 dst, const void *src, int bytes, te_u32 bar) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(dst),
                 "l"(src), "r"(bytes), "r"(bar)
                 : "memory");
}

// ---- warpgroups -----------------------------------------------------------------------------------------------------

// Sets the number of registers per thread of a warpgroup to N. te_registers_up raises the number, te_registers_down
// lowers it. The number of registers of the whole block must never exceed the number that the block started with. A
// block of three warpgroups starts with 3 * 128 * 168 registers.
template <int N> TE_DEV void te_registers_up() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N)); }
template <int N> TE_DEV void te_registers_down() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N)); }

// Waits at the named barrier `id` (1 to 15) until COUNT threads, which are whole warps, have arrived.
template <int COUNT> TE_DEV void te_meet(int id) { asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(COUNT) : "memory"); }
// Arrives at the named barrier `id` without waiting. COUNT is the number of threads that use the barrier.
template <int COUNT> TE_DEV void te_meet_later(int id) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "n"(COUNT) : "memory");
}

// Stores four 8x8 matrices of 16-bit words; the inverse of te_ldmatrix4. Lanes 8 i to 8 i + 7 pass the addresses of the
// rows of matrix i.
TE_DEV void te_stmatrix4(te_u32 row, const te_u32 r[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(r[0]), "r"(r[1]),
                 "r"(r[2]), "r"(r[3])
                 : "memory");
}

// As te_stmatrix4, but stores each matrix transposed: lanes 8 i to 8 i + 7 pass the addresses of its columns.
TE_DEV void te_stmatrix4_trans(te_u32 column, const te_u32 r[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(column), "r"(r[0]),
                 "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}

// ---- wgmma ----------------------------------------------------------------------------------------------------------
// A warpgroup computes D += A B, with D [64, N]. A is 64 rows by 32 bytes of k, B is 32 bytes of k by N columns.
// Descriptors give the addresses of A and B in shared memory.
//
// Accumulators: warp w has rows 16 w to 16 w + 15 of D. In that warp, lane 4 g + t has
//   d[4 j], d[4 j + 1]       row g, columns 8 j + 2 t and 8 j + 2 t + 1
//   d[4 j + 2], d[4 j + 3]   row g + 8, the same columns
//
// The descriptors here are for tiles with the 128-byte swizzle. Each tile of A or B starts at a multiple of 1024 bytes.
//   K-major   Each tile has rows of 128 bytes along k. 8 rows form an atom of 1024 bytes. Adding 2 to the descriptor
//             advances 32 bytes along k.
//   MN-major  (16-bit types) Each tile has one row for each k. A row has 64 elements along m (tiles of A) or n (tiles
//             of B). 8 rows form an atom of 1024 bytes. group_bytes is the distance to the next 64 elements of m or n.
//             Adding 128 to the descriptor advances 16 rows along k.

TE_DEV te_u64 te_wgmma_desc(te_u32 tile, int group_bytes) {
    return (te_u64)((tile & 0x3ffff) >> 4) | (te_u64)(group_bytes >> 4) << 16 | (te_u64)(1024 >> 4) << 32 |
           (te_u64)1 << 62;
}
TE_DEV void te_wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
TE_DEV void te_wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> TE_DEV void te_wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }
// Keeps the compiler from moving uses of registers across a wait. Call te_wgmma_keep after the wait: before the first
// use of accumulators, or before the next write of an operand.
template <int N> TE_DEV void te_wgmma_keep(float (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i])::"memory");
}
template <int N> TE_DEV void te_wgmma_keep(te_u32 (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+r"(d[i])::"memory");
}

#define TE__REGISTERS_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define TE__REGISTERS_32 \
    TE__REGISTERS_16 ", " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define TE__REGISTERS_48 \
    TE__REGISTERS_32 ", " \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define TE__REGISTERS_64 \
    TE__REGISTERS_32 ", " \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define TE__REGISTERS_96 \
    TE__REGISTERS_64 ", " \
    "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
    "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define TE__REGISTERS_128 \
    TE__REGISTERS_96 ", " \
    "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
    "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define TE__FLOATS_8(out, d, i)                                                                                        \
    out(d[i]), out(d[i + 1]), out(d[i + 2]), out(d[i + 3]), out(d[i + 4]), out(d[i + 5]), out(d[i + 6]), out(d[i + 7])
#define TE__FLOATS_16(out, d, i) TE__FLOATS_8(out, d, i), TE__FLOATS_8(out, d, i + 8)
#define TE__FLOATS_32(out, d, i) TE__FLOATS_16(out, d, i), TE__FLOATS_16(out, d, i + 16)
#define TE__FLOATS_64(out, d, i) TE__FLOATS_32(out, d, i), TE__FLOATS_32(out, d, i + 32)

// Arguments of the macros:
//   types  the instruction's shape and types, such as "k16.f32.bf16.bf16"
//   flags  ", 1, 1" (imm-scale-a, imm-scale-b); for 16-bit types also ", trans-a, trans-b", where 1 means MN-major
//   keep   0: D = A B; otherwise D += A B
//   out    "+f", or "=f" if keep is always 0. "=f" tells the compiler that the old D is not read
#define TE_WGMMA_64(types, flags, d, a, b, keep) TE_WGMMA_TO_64("+f", types, flags, d, a, b, keep)
#define TE_WGMMA_96(types, flags, d, a, b, keep) TE_WGMMA_TO_96("+f", types, flags, d, a, b, keep)
#define TE_WGMMA_128(types, flags, d, a, b, keep) TE_WGMMA_TO_128("+f", types, flags, d, a, b, keep)
#define TE_WGMMA_192(types, flags, d, a, b, keep) TE_WGMMA_TO_192("+f", types, flags, d, a, b, keep)
#define TE_WGMMA_256(types, flags, d, a, b, keep) TE_WGMMA_TO_256("+f", types, flags, d, a, b, keep)
#define TE_WGMMA_TO_32(out, types, flags, d, a, b, keep)                                                        \
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %18, 0;\n"                                                     \
                 "wgmma.mma_async.sync.aligned.m64n32" types " {" TE__REGISTERS_16 "}, %16, %17, p" flags "; }" \
                 : TE__FLOATS_16(out, d, 0)                                                                     \
                 : "l"(a), "l"(b), "r"((int)(keep)))
#define TE_WGMMA_TO_64(out, types, flags, d, a, b, keep)                                                        \
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %34, 0;\n"                                                     \
                 "wgmma.mma_async.sync.aligned.m64n64" types " {" TE__REGISTERS_32 "}, %32, %33, p" flags "; }" \
                 : TE__FLOATS_32(out, d, 0)                                                                     \
                 : "l"(a), "l"(b), "r"((int)(keep)))
#define TE_WGMMA_TO_96(out, types, flags, d, a, b, keep)                                                        \
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %50, 0;\n"                                                     \
                 "wgmma.mma_async.sync.aligned.m64n96" types " {" TE__REGISTERS_48 "}, %48, %49, p" flags "; }" \
                 : TE__FLOATS_32(out, d, 0), TE__FLOATS_16(out, d, 32)                                          \
                 : "l"(a), "l"(b), "r"((int)(keep)))
#define TE_WGMMA_TO_128(out, types, flags, d, a, b, keep)                                                        \
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %66, 0;\n"                                                      \
                 "wgmma.mma_async.sync.aligned.m64n128" types " {" TE__REGISTERS_64 "}, %64, %65, p" flags "; }" \
                 : TE__FLOATS_64(out, d, 0)                                                                      \
                 : "l"(a), "l"(b), "r"((int)(keep)))
#define TE_WGMMA_TO_192(out, types, flags, d, a, b, keep)                                                        \
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %98, 0;\n"                                                      \
                 "wgmma.mma_async.sync.aligned.m64n192" types " {" TE__REGISTERS_96 "}, %96, %97, p" flags "; }" \
                 : TE__FLOATS_64(out, d, 0), TE__FLOATS_32(out, d, 64)                                           \
                 : "l"(a), "l"(b), "r"((int)(keep)))
#define TE_WGMMA_TO_256(out, types, flags, d, a, b, keep)                                                           \
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %130, 0;\n"                                                        \
                 "wgmma.mma_async.sync.aligned.m64n256" types " {" TE__REGISTERS_128 "}, %128, %129, p" flags "; }" \
                 : TE__FLOATS_64(out, d, 0), TE__FLOATS_64(out, d, 64)                                              \
                 : "l"(a), "l"(b), "r"((int)(keep)))

// Like TE_WGMMA_N, but A (64 x 16) is in registers, in the layout of te_ldmatrix4. Lane 4 g + t has
//   a[0]        columns 2 t and 2 t + 1 of row g
//   a[1]        the same columns of row g + 8
//   a[2], a[3]  the same two rows, 8 columns further
// The accumulators of 16 neighbouring columns, rounded to 16 bits, have this layout too. `flags` is ", 1, 1, trans-b".
#define TE__WGMMA_A(a) "r"((a)[0]), "r"((a)[1]), "r"((a)[2]), "r"((a)[3])
#define TE_WGMMA_A_64(types, flags, d, a, b, keep) TE_WGMMA_A_TO_64("+f", types, flags, d, a, b, keep)
#define TE_WGMMA_A_TO_64(out, types, flags, d, a, b, keep)                         \
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %37, 0;\n"                        \
                 "wgmma.mma_async.sync.aligned.m64n64" types " {" TE__REGISTERS_32 \
                 "}, {%32, %33, %34, %35}, %36, p" flags "; }"                     \
                 : TE__FLOATS_32(out, d, 0)                                        \
                 : TE__WGMMA_A(a), "l"(b), "r"((int)(keep)))
#define TE_WGMMA_A_96(types, flags, d, a, b, keep)                                 \
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %53, 0;\n"                        \
                 "wgmma.mma_async.sync.aligned.m64n96" types " {" TE__REGISTERS_48 \
                 "}, {%48, %49, %50, %51}, %52, p" flags "; }"                     \
                 : TE__FLOATS_32("+f", d, 0), TE__FLOATS_16("+f", d, 32)           \
                 : TE__WGMMA_A(a), "l"(b), "r"((int)(keep)))
#define TE_WGMMA_A_128(types, flags, d, a, b, keep) TE_WGMMA_A_TO_128("+f", types, flags, d, a, b, keep)
#define TE_WGMMA_A_TO_128(out, types, flags, d, a, b, keep)                         \
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %69, 0;\n"                         \
                 "wgmma.mma_async.sync.aligned.m64n128" types " {" TE__REGISTERS_64 \
                 "}, {%64, %65, %66, %67}, %68, p" flags "; }"                      \
                 : TE__FLOATS_64(out, d, 0)                                         \
                 : TE__WGMMA_A(a), "l"(b), "r"((int)(keep)))
#define TE_WGMMA_A_192(types, flags, d, a, b, keep)                                 \
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %101, 0;\n"                        \
                 "wgmma.mma_async.sync.aligned.m64n192" types " {" TE__REGISTERS_96 \
                 "}, {%96, %97, %98, %99}, %100, p" flags "; }"                     \
                 : TE__FLOATS_64("+f", d, 0), TE__FLOATS_32("+f", d, 64)            \
                 : TE__WGMMA_A(a), "l"(b), "r"((int)(keep)))
#define TE_WGMMA_A_256(types, flags, d, a, b, keep)                                  \
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %133, 0;\n"                         \
                 "wgmma.mma_async.sync.aligned.m64n256" types " {" TE__REGISTERS_128 \
                 "}, {%128, %129, %130, %131}, %132, p" flags "; }"                  \
                 : TE__FLOATS_64("+f", d, 0), TE__FLOATS_64("+f", d, 64)             \
                 : TE__WGMMA_A(a), "l"(b), "r"((int)(keep)))
