// ops/gemm/gemm_hopper.cu: D = epilogue(scale_a scale_b op(A) op(B) + bias) + D on Hopper: TMA, mbarriers, wgmma; bf16, f16, fp8; any m, n, k.
//
//          BN                     Three warpgroups. The first copies: one of its threads asks TMA for slab after slab of A and B (128 bytes of
//       +-------+                 k: 64 values of 16 bits, 128 of 8) into a ring of slots, waiting on empty[slot]. The other two multiply:
//    BM |  wg 1 |  64 * WAVES     each has half the rows of a tile as WAVES accumulators of 64 x BN, waits on full[slot], and gives slots back.
//       +-------+                 Blocks stay: block i does tiles i, i + gridDim.x, ... and slabs of the next tile arrive while the
//       |  wg 2 |                 accumulators of this one are written out.
//       +-------+
//
// TMA lays slabs out in the 128-byte swizzle that wgmma reads, fills with zeros what lies outside the operands, and takes 16-bit operands as
// they lie: k-major boxes are 128 bytes of k by BM or BN rows, the others 64 elements of m or n by 64 of k, one box after the other.
//
// Block scales: wgmma's sums of each slab are scaled and added up in f32. A's scales, and the one of a 128 x 128 block of B, are read by the
// threads that need them while wgmma runs; the 128 of B's 1 x 128 blocks come with the slab, into shared memory behind the slots.
//
// Options: A_DT, B_DT (bf16 or f16 alike, or fp8 but e5m2 x e5m2), A_T (A lies k x m), B_T (B lies n x k), BN (128, 256), WAVES (1, 2; BM =
//          128 WAVES, BM + BN <= 384), PROMOTE (fp8: partial sums of 128 k are added up in f32; BN = 128), BLOCK (te__gemm_block_kind, with
//          PROMOTE; 0 if left out).
// Launch: grid (blocks, 1, 1), any number; block 384; shared TE__GEMM_HOPPER_SHARED. A, B and their rows at multiples of 16 bytes. Split s of
//          a tile does k from s * k_split on, to D + s * d_split. BLOCK: block_b at a multiple of 16 bytes, k_split of 128.
// te:arch 90a
// te:row A_DT=3 B_DT=3 A_T=0 B_T=1 BN=256 WAVES=1 PROMOTE=0
// te:row A_DT=3 B_DT=3 A_T=0 B_T=0 BN=256 WAVES=1 PROMOTE=0
// te:row A_DT=3 B_DT=3 A_T=1 B_T=0 BN=128 WAVES=1 PROMOTE=0
// te:row A_DT=2 B_DT=2 A_T=1 B_T=1 BN=128 WAVES=2 PROMOTE=0
// te:row A_DT=4 B_DT=4 A_T=0 B_T=1 BN=256 WAVES=1 PROMOTE=0
// te:row A_DT=4 B_DT=4 A_T=0 B_T=1 BN=128 WAVES=1 PROMOTE=0
// te:row A_DT=5 B_DT=4 A_T=0 B_T=1 BN=128 WAVES=2 PROMOTE=1
// te:row A_DT=4 B_DT=5 A_T=0 B_T=1 BN=128 WAVES=1 PROMOTE=1
// te:row A_DT=4 B_DT=4 A_T=0 B_T=1 BLOCK=1 BN=128 WAVES=2 PROMOTE=1
// te:row A_DT=4 B_DT=4 A_T=0 B_T=1 BLOCK=1 BN=128 WAVES=1 PROMOTE=1
// te:row A_DT=4 B_DT=4 A_T=0 B_T=1 BLOCK=2 BN=128 WAVES=2 PROMOTE=1
// te:row A_DT=5 B_DT=4 A_T=0 B_T=1 BLOCK=2 BN=128 WAVES=1 PROMOTE=1
// te:row A_DT=4 B_DT=5 A_T=0 B_T=1 BLOCK=3 BN=128 WAVES=2 PROMOTE=1
#include "device/hopper.cuh"
#include "ops/gemm/epilogue.cuh"

#ifndef A_DT // the rows above name every option; these stand in for them in an editor
#define A_DT 3
#define B_DT 3
#define A_T 0
#define B_T 1
#define BN 256
#define WAVES 1
#define PROMOTE 0
#endif
#ifndef BLOCK
#define BLOCK 0
#endif

#define BM (128 * WAVES)
#define FP8 (A_DT == 4 || A_DT == 5) // in numbers: the preprocessor does not know te_dtype
#define SLAB 128                     // bytes of k
#define BK (FP8 ? 128 : 64)          // elements of k
#define SLOT ((BM + BN) * SLAB)
#define B_1D (BLOCK == 1 || BLOCK == 3) // of te__gemm_block_kind
#define A_2D (BLOCK == 3)
#define STAGES (192 * 1024 / SLOT - B_1D)
#define SCALES (B_1D ? BN * 4 : 0) // bytes of a slab
#define GROUP (64 * SLAB) // bytes of one box of an operand that is not k-major
static_assert(!FP8 || (!A_T && B_T), "fp8 operands are k-major");
static_assert(STAGES * (SLOT + SCALES) + 8 * TE_GEMM_STAGE_BYTES + 16 * STAGES + 1024 <= TE__GEMM_HOPPER_SHARED, "shared memory");
static_assert(!BLOCK || (PROMOTE && FP8 && BN == 128), "blocks of fp8");

#if A_DT == 2
#define TYPES "k16.f32.f16.f16"
#elif A_DT == 3
#define TYPES "k16.f32.bf16.bf16"
#elif A_DT == 5
#define TYPES "k32.f32.e5m2.e4m3"
#elif B_DT == 5
#define TYPES "k32.f32.e4m3.e5m2"
#else
#define TYPES "k32.f32.e4m3.e4m3"
#endif
#if FP8
#define FLAGS ", 1, 1"
#elif A_T
#define FLAGS ", 1, 1, 1" FLAG_B
#else
#define FLAGS ", 1, 1, 0" FLAG_B
#endif
#define FLAG_B B_FLAG(B_T)
#define B_FLAG(t) B_FLAG_OF(t)
#define B_FLAG_OF(t) B_FLAG_##t
#define B_FLAG_0 ", 1"
#define B_FLAG_1 ", 0"
#if BN == 256
#define MULTIPLY TE_WGMMA_256
#else
#define MULTIPLY TE_WGMMA_128
#endif

// Slabs go by as (slot, parity of the slot's phase): the same walk for the warpgroup that fills and those that empty.
struct te_ring {
    int slot, parity;
    TE_DEV void next() {
        if (++slot == STAGES) slot = 0, parity ^= 1;
    }
};

// The tile and the k of work item `work`.
struct te_work {
    te_i64 row, col, k0;
    int split, slabs;
    TE_DEV te_work(const te__gemm_kargs &a, te_u32 work) {
        te_u32 tile = work / a.splits, tm, tn;
        split = (int)(work - tile * a.splits);
        te_gemm_raster(tile, (te_u32)te_div_up(a.m, BM), (te_u32)te_div_up(a.n, BN), tm, tn);
        row = (te_i64)tm * BM, col = (te_i64)tn * BN, k0 = split * a.k_split;
        slabs = (int)te_div_up(a.k - k0 < a.k_split ? a.k - k0 : a.k_split, BK);
    }
};

// One slab of an operand of R rows; x, y: coordinates along k and along m or n.
template <int R, int K_MAJOR> TE_DEV void te_load_slab(te_u32 dst, const void *map, int k, int row, te_u32 bar) {
    if (K_MAJOR) {
        te_tma_load2(dst, map, k, row, bar);
    } else {
#pragma unroll
        for (int i = 0; i < R / 64; i++) te_tma_load2(dst + i * GROUP, map, row + 64 * i, k, bar);
    }
}

// acc += part times the block scales. of_rows: of rows g and g + 8; of_columns: shared memory, of the tile's columns, or NULL.
TE_DEV void te_add_scaled(float (&acc)[BN / 2], const float (&part)[BN / 2], const float of_rows[2], const float *of_columns) {
    if (!of_columns) {
#pragma unroll
        for (int i = 0; i < BN / 2; i++) acc[i] = fmaf(part[i], of_rows[i / 2 % 2], acc[i]);
        return;
    }
#pragma unroll
    for (int j = 0; j < BN / 8; j++) {
        float2 c = *(const float2 *)(of_columns + 8 * j + threadIdx.x % 4 * 2);
#pragma unroll
        for (int e = 0; e < 4; e++) acc[4 * j + e] = fmaf(part[4 * j + e] * of_rows[e / 2], e % 2 ? c.y : c.x, acc[4 * j + e]);
    }
}

extern "C" __global__ void __launch_bounds__(384, 1) te_gemm_hopper(const __grid_constant__ te__gemm_hopper_kargs a) {
    extern __shared__ __align__(1024) char shared[];
    char *base = shared + (-te_smem(shared) & 1023);
    te_u32 slots = te_smem(base), full = slots + STAGES * (SLOT + SCALES) + 8 * TE_GEMM_STAGE_BYTES, empty = full + 8 * STAGES;
    int group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
    te_u32 works = (te_u32)(te_div_up(a.g.m, BM) * te_div_up(a.g.n, BN)) * a.g.splits;

    if (threadIdx.x == 0) {
        te_tma_prefetch_map(a.a_map);
        te_tma_prefetch_map(a.b_map);
        for (int i = 0; i < STAGES; i++) {
            te_mbar_init(full + 8 * i, 1);
            te_mbar_init(empty + 8 * i, 8); // one lane of each warp that multiplies
        }
        te_mbar_init_done();
    }
    __syncthreads();

    te_ring ring = {0, 0};
    if (group == 0) {
        te_registers_down<24>();
        if (threadIdx.x == 0) {
            for (te_u32 work = blockIdx.x; work < works; work += gridDim.x) {
                te_work w(a.g, work);
                for (int slab = 0; slab < w.slabs; slab++, ring.next()) {
                    te_u32 bar = full + 8 * ring.slot, slot = slots + ring.slot * SLOT;
                    int k = (int)w.k0 + slab * BK;
                    te_mbar_wait(empty + 8 * ring.slot, ring.parity ^ 1);
#if B_1D
                    te_i64 columns = (a.g.n + 3) / 4 * 4 - w.col; // that have scales
                    int bytes = columns < BN ? (int)columns * 4 : BN * 4;
                    te_mbar_expect(bar, SLOT + bytes);
                    te_bulk_load(slots + STAGES * SLOT + 8 * TE_GEMM_STAGE_BYTES + ring.slot * SCALES, a.g.block_b + (te_i64)(k / 128) * a.g.ld_block_b + w.col,
                                 bytes, bar);
#else
                    te_mbar_expect(bar, SLOT);
#endif
                    te_load_slab<BM, !A_T>(slot, a.a_map, k, (int)w.row, bar);
                    te_load_slab<BN, B_T>(slot + BM * SLAB, a.b_map, k, (int)w.col, bar);
                }
            }
        }
        return;
    }

    te_registers_up<240>();
    int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32 - 4, 0), lane = threadIdx.x & 31;
    char *stage = base + STAGES * SLOT + warp * TE_GEMM_STAGE_BYTES;
    float scale = te_gemm_scale(a.g);
    // What a step of 32 bytes of k adds to a descriptor, and the first row of this warpgroup.
    const int step_a = A_T ? 128 : 2, step_b = B_T ? 2 : 128, rows = (group - 1) * 64 * WAVES;

    for (te_u32 work = blockIdx.x; work < works; work += gridDim.x) {
        te_work w(a.g, work);
        float acc[WAVES][BN / 2];
#if PROMOTE
#pragma unroll
        for (int i = 0; i < WAVES * BN / 2; i++) acc[i / (BN / 2)][i % (BN / 2)] = 0.0f;
#endif
#pragma unroll 1
        for (int slab = 0; slab < w.slabs; slab++, ring.next()) {
            te_u32 slot = slots + ring.slot * SLOT;
            te_u64 da = te_wgmma_desc(slot + rows * SLAB, GROUP), db = te_wgmma_desc(slot + BM * SLAB, GROUP);
#if BLOCK
            // Read here, used after the products. Rows beyond the last one take its scale.
            te_i64 kb = w.k0 / 128 + slab, row = w.row + rows + warp % 4 * 16 + lane / 4;
            float of_rows[WAVES][2], of_tile = B_1D ? 1.0f : te_gemm_block_scale(a.g.block_b, 1, a.g.ld_block_b, w.col, kb);
#pragma unroll
            for (int i = 0; i < 2 * WAVES; i++) {
                te_i64 at = row + i / 2 * 64 + i % 2 * 8;
                of_rows[i / 2][i % 2] = te_gemm_block_scale(a.g.block_a, A_2D, a.g.ld_block_a, at < a.g.m ? at : a.g.m - 1, kb);
            }
            const float *of_columns = B_1D ? (const float *)(base + STAGES * SLOT + 8 * TE_GEMM_STAGE_BYTES + ring.slot * SCALES) : nullptr;
#endif
            te_mbar_wait(full + 8 * ring.slot, ring.parity);
#if PROMOTE
#pragma unroll
            for (int v = 0; v < WAVES; v++) {
                float part[BN / 2];
                te_wgmma_fence();
#pragma unroll
                for (int s = 0; s < 4; s++) MULTIPLY(TYPES, FLAGS, part, da + v * (GROUP >> 4) + s * step_a, db + s * step_b, s != 0);
                te_wgmma_commit();
                te_wgmma_wait<0>();
                te_wgmma_keep(part);
                if (!B_1D && v == WAVES - 1 && lane == 0) te_mbar_arrive(empty + 8 * ring.slot);
#if BLOCK
                if (!B_1D) {
#pragma unroll
                    for (int i = 0; i < 2; i++) of_rows[v][i] = te_gemm_block_product(of_rows[v][i], of_tile);
                }
                te_add_scaled(acc[v], part, of_rows[v], of_columns);
#else
#pragma unroll
                for (int i = 0; i < BN / 2; i++) acc[v][i] += part[i];
#endif
            }
#if B_1D
            __syncwarp(); // every lane has read its scales
            if (lane == 0) te_mbar_arrive(empty + 8 * ring.slot);
#endif
#else
            te_wgmma_fence();
#pragma unroll
            for (int s = 0; s < 4; s++)
#pragma unroll
                for (int v = 0; v < WAVES; v++)
                    MULTIPLY(TYPES, FLAGS, acc[v], da + v * (GROUP >> 4) + s * step_a, db + s * step_b, (slab | s) != 0);
            te_wgmma_commit();
            te_wgmma_wait<1>(); // the slab before this one is done with
            if (slab && lane == 0) te_mbar_arrive(empty + 8 * (ring.slot ? ring.slot - 1 : STAGES - 1));
#endif
        }
#if !PROMOTE
        te_wgmma_wait<0>();
#pragma unroll
        for (int v = 0; v < WAVES; v++) te_wgmma_keep(acc[v]);
        if (lane == 0) te_mbar_arrive(empty + 8 * (ring.slot ? ring.slot - 1 : STAGES - 1));
#endif
        te__gemm_kargs e = a.g;
        if (e.splits > 1) e.d = (float *)e.d + w.split * e.d_split;
#pragma unroll 1
        for (int part = 0; part < WAVES * BN / 64; part++) { // a loop around the long half; the short half must name its registers
#pragma unroll
            for (int p = 0; p < WAVES * BN / 64; p++)
                if (p == part) {
#pragma unroll
                    for (int j = 0; j < 8; j++) te_gemm_stage_put(stage, 8 * j, &acc[p / (BN / 64)][p % (BN / 64) * 32 + 4 * j]);
                }
            te_i64 row = w.row + rows + part / (BN / 64) * 64 + warp % 4 * 16;
            te_gemm_stage_finish<64>(e, scale, stage, row, w.col + part % (BN / 64) * 64);
        }
    }
}
