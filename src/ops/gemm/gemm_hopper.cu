// ops/gemm/gemm_hopper.cu: D = epilogue(scale_a scale_b op(A) op(B) + bias) + D on Hopper: TMA, mbarriers, wgmma; bf16, f16, fp8; any m, n, k.
//
//          BN                     Three warpgroups. The first copies: one of its threads asks TMA for slab after slab of A and B (128 bytes of
//       +-------+                 k: 64 values of 16 bits, 128 of 8) into a ring of slots, waiting on empty[slot]. The other two multiply:
//    BM |  wg 1 |  64 * WAVES     each has half the rows of a tile as WAVES accumulators of 64 x BN, waits on full[slot], and gives slots back.
//       +-------+                 Blocks stay: block i does tiles i, i + gridDim.x, ... and slabs of the next tile arrive while the
//       |  wg 2 |                 accumulators of this one are written out. WAVES = 0: BM is 64, and each has half the columns.
//       +-------+
//
// TMA lays slabs out in the 128-byte swizzle that wgmma reads, fills with zeros what lies outside the operands, and takes 16-bit operands as
// they lie: k-major boxes are 128 bytes of k by rows of A or B, the others 64 elements of m or n by 64 of k, one box after the other.
//
// CLUSTER = 2: two blocks do neighbouring tiles and have the larger operand of a tile in common: B of tiles above each other, or, if BM > BN,
// A of tiles beside each other. Each asks for its half, and TMA writes it into both: a third less to read from the L2 cache. A slot is then
// empty when both blocks' warps have given it back.
//
// D leaves by TMA as well (STORE): chunks of 128 bytes of 64 rows go through two buffers of each warpgroup, and clip at D's edges by
// themselves. f32 is added to D by the L2 cache; what D or aux must give for a 16-bit chunk is brought into its buffer two chunks before. Other D
// (rows that are not at multiples of 16 bytes) and scales of rows or columns take the way of epilogue.cuh.
//
// Block scales: wgmma's sums of each slab are scaled and added up in f32. A's scales, and the one of a 128 x 128 block of B, are read by the
// threads that need them while wgmma runs; the 128 of B's 1 x 128 blocks come with the slab, into shared memory behind the slots.
//
// GROUPED: te_grouped_gemm, along rows (1) or along k (2). gemm_groups has found out where groups lie, which tiles they have, and has made maps
// that end with a group: along rows of D and aux, so that the last tile of a group leaves the next one's rows alone; along k of A and B, so
// that the last slab ends in zeros. Otherwise a tile is a tile: rows (or k) are counted through all groups. The warpgroups take the
// rows of a tile in turns of 64; what lies beyond the group's end is not multiplied, and if that is half of a tile (WAVES = 2) not read either.
//
// Options: A_DT, B_DT (bf16 or f16 alike, or fp8 but e5m2 x e5m2), A_T (A lies k x m), B_T (B lies n x k), BN (128, 256), WAVES (0, 1, 2; BM =
//          128 WAVES, or 64; BM + BN <= 384), CLUSTER (1, 2), PROMOTE (fp8: partial sums of 128 k are added up in f32; BN = 128), BLOCK
//          (te__gemm_block_kind, with PROMOTE; 0 if left out), STORE (bits of te__gemm_store), D_DT (with STORE), GROUPED (0 if left out;
//          along rows clusters share A always).
// Launch: grid (blocks, 1, 1), any number of whole clusters; block 384; shared TE__GEMM_HOPPER_SHARED. A, B and their rows at multiples of 16
//         bytes, with STORE those of D and aux too. Split s of a tile does k from s * k_split on, to D + s * d_split (STORE: z = s of d_map). BLOCK: block_b at a multiple of 16 bytes, k_split of 128.
// te:arch 90a
// te:row A_DT=3 B_DT=3 A_T=0 B_T=1 BN=256 WAVES=1 CLUSTER=2 PROMOTE=0 STORE=1 D_DT=3
// te:row A_DT=3 B_DT=3 A_T=0 B_T=1 BN=256 WAVES=1 CLUSTER=2 PROMOTE=0 STORE=3 D_DT=3
// te:row A_DT=3 B_DT=3 A_T=0 B_T=1 BN=256 WAVES=1 CLUSTER=2 PROMOTE=0 STORE=15 D_DT=3
// te:row A_DT=3 B_DT=3 A_T=0 B_T=0 BN=256 WAVES=1 CLUSTER=2 PROMOTE=0 STORE=17 D_DT=3
// te:row A_DT=3 B_DT=3 A_T=0 B_T=0 BN=256 WAVES=1 CLUSTER=2 PROMOTE=0 STORE=33 D_DT=3
// te:row A_DT=3 B_DT=3 A_T=1 B_T=0 BN=256 WAVES=1 CLUSTER=2 PROMOTE=0 STORE=33 D_DT=1
// te:row A_DT=3 B_DT=3 A_T=1 B_T=0 BN=128 WAVES=2 CLUSTER=2 PROMOTE=0 STORE=1 D_DT=1
// te:row A_DT=3 B_DT=3 A_T=0 B_T=1 BN=128 WAVES=1 CLUSTER=1 PROMOTE=0 STORE=0
// te:row A_DT=3 B_DT=3 A_T=0 B_T=1 BN=256 WAVES=0 CLUSTER=1 PROMOTE=0 STORE=1 D_DT=1
// te:row A_DT=3 B_DT=3 A_T=1 B_T=0 BN=128 WAVES=0 CLUSTER=1 PROMOTE=0 STORE=0
// te:row A_DT=2 B_DT=2 A_T=1 B_T=1 BN=128 WAVES=2 CLUSTER=1 PROMOTE=0 STORE=1 D_DT=2
// te:row A_DT=4 B_DT=4 A_T=0 B_T=1 BN=256 WAVES=1 CLUSTER=2 PROMOTE=0 STORE=1 D_DT=3
// te:row A_DT=4 B_DT=4 A_T=0 B_T=1 BN=128 WAVES=1 CLUSTER=1 PROMOTE=0 STORE=1 D_DT=3
// te:row A_DT=5 B_DT=4 A_T=0 B_T=1 BN=128 WAVES=2 CLUSTER=2 PROMOTE=1 STORE=33 D_DT=1
// te:row A_DT=4 B_DT=5 A_T=0 B_T=1 BN=128 WAVES=1 CLUSTER=1 PROMOTE=1 STORE=1 D_DT=3
// te:row A_DT=4 B_DT=4 A_T=0 B_T=1 BLOCK=1 BN=128 WAVES=2 CLUSTER=2 PROMOTE=1 STORE=33 D_DT=1
// te:row A_DT=4 B_DT=4 A_T=0 B_T=1 BLOCK=1 BN=128 WAVES=1 CLUSTER=1 PROMOTE=1 STORE=0
// te:row A_DT=4 B_DT=4 A_T=0 B_T=1 BLOCK=2 BN=128 WAVES=2 CLUSTER=2 PROMOTE=1 STORE=1 D_DT=3
// te:row A_DT=5 B_DT=4 A_T=0 B_T=1 BLOCK=2 BN=128 WAVES=1 CLUSTER=1 PROMOTE=1 STORE=1 D_DT=3
// te:row A_DT=4 B_DT=5 A_T=0 B_T=1 BLOCK=3 BN=128 WAVES=2 CLUSTER=2 PROMOTE=1 STORE=1 D_DT=3
// te:row A_DT=3 B_DT=3 A_T=0 B_T=1 BN=128 WAVES=2 CLUSTER=2 PROMOTE=0 STORE=1 D_DT=3 GROUPED=1
// te:row A_DT=3 B_DT=3 A_T=0 B_T=1 BN=128 WAVES=2 CLUSTER=1 PROMOTE=0 STORE=15 D_DT=3 GROUPED=1
// te:row A_DT=3 B_DT=3 A_T=0 B_T=0 BN=128 WAVES=2 CLUSTER=2 PROMOTE=0 STORE=17 D_DT=3 GROUPED=1
// te:row A_DT=3 B_DT=3 A_T=0 B_T=0 BN=128 WAVES=2 CLUSTER=2 PROMOTE=0 STORE=33 D_DT=3 GROUPED=1
// te:row A_DT=3 B_DT=3 A_T=0 B_T=1 BN=256 WAVES=0 CLUSTER=1 PROMOTE=0 STORE=0 GROUPED=1
// te:row A_DT=4 B_DT=4 A_T=0 B_T=1 BN=128 WAVES=2 CLUSTER=2 PROMOTE=0 STORE=1 D_DT=3 GROUPED=1
// te:row A_DT=5 B_DT=4 A_T=0 B_T=1 BN=128 WAVES=2 CLUSTER=1 PROMOTE=1 STORE=1 D_DT=3 GROUPED=1
// te:row A_DT=4 B_DT=4 A_T=0 B_T=1 BLOCK=2 BN=128 WAVES=2 CLUSTER=2 PROMOTE=1 STORE=1 D_DT=3 GROUPED=1
// te:row A_DT=3 B_DT=3 A_T=1 B_T=0 BN=256 WAVES=1 CLUSTER=2 PROMOTE=0 STORE=33 D_DT=1 GROUPED=2
// te:row A_DT=3 B_DT=3 A_T=1 B_T=0 BN=128 WAVES=1 CLUSTER=1 PROMOTE=0 STORE=33 D_DT=3 GROUPED=2
// te:row A_DT=4 B_DT=5 A_T=0 B_T=1 BN=128 WAVES=2 CLUSTER=2 PROMOTE=1 STORE=33 D_DT=1 GROUPED=2
// te:row A_DT=4 B_DT=4 A_T=0 B_T=1 BN=256 WAVES=1 CLUSTER=1 PROMOTE=0 STORE=0 GROUPED=2
#include "device/hopper.cuh"
#include "ops/gemm/groups.cuh"

#ifndef A_DT // the rows above name every option; these stand in for them in an editor
#define A_DT 3
#define B_DT 3
#define A_T 0
#define B_T 1
#define BN 256
#define WAVES 1
#define CLUSTER 1
#define PROMOTE 0
#define STORE 0
#endif
#ifndef BLOCK
#define BLOCK 0
#endif
#ifndef D_DT
#define D_DT 1
#endif
#ifndef GROUPED
#define GROUPED 0
#endif

#define BM (WAVES ? 128 * WAVES : 64)
#define SUMS (WAVES ? WAVES : 1)  // accumulators of a warpgroup, each 64 x WN
#define WN (WAVES ? BN : BN / 2)
#define FP8 (A_DT == 4 || A_DT == 5) // in numbers: the preprocessor does not know te_dtype
#define SLAB 128                     // bytes of k
#define BK (FP8 ? 128 : 64)          // elements of k
#define SLOT ((BM + BN) * SLAB)
#define SHARE_A (CLUSTER == 2 && (BM > BN || GROUPED == 1))
#define SHARE_B (CLUSTER == 2 && !SHARE_A)
#define B_1D (BLOCK == 1 || BLOCK == 3) // of te__gemm_block_kind
#define A_2D (BLOCK == 3)
#define STAGES (192 * 1024 / SLOT - B_1D)
#define SCALES (B_1D ? BN * 4 : 0) // bytes of a slab
#define GROUP (64 * SLAB) // bytes of one box of an operand that is not k-major
#define BUFFER (64 * 128) // bytes of a chunk of D
// Rows from one accumulator of a warpgroup to the next. Groups along rows: the warpgroups take turns, so that what is left of a group at its end
// keeps both busy.
#define STEP (GROUPED == 1 ? 128 : 64)
#define HALVES (GROUPED == 1 && WAVES == 2) // A comes in halves, the second one only if the group has rows there
#define CHUNK (D_DT == 1 ? 32 : 64) // columns of it
#define CHUNKS (SUMS * WN / CHUNK)  // of a warpgroup's part of a tile
#define LOADS (STORE && (STORE & 16 || (STORE & 32 && D_DT != 1)))
static_assert(!FP8 || (!A_T && B_T), "fp8 operands are k-major");
static_assert(STAGES * (SLOT + SCALES) + 4 * BUFFER + 16 * STAGES + 32 + 1024 <= TE__GEMM_HOPPER_SHARED, "shared memory");
static_assert(!BLOCK || (PROMOTE && FP8 && BN == 128), "blocks of fp8");
static_assert(GROUPED != 1 || !A_T, "groups along rows are rows of A");
static_assert(!GROUPED || !BLOCK || (GROUPED == 1 && BLOCK == 2), "blocks of groups");
static_assert(4 * BUFFER == 8 * TE_GEMM_STAGE_BYTES, "both ways out use the same memory");

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
#if BN == 256 && WAVES
#define MULTIPLY TE_WGMMA_256
#elif BN == 128 && !WAVES
#define MULTIPLY TE_WGMMA_64
#else
#define MULTIPLY TE_WGMMA_128
#endif

#if GROUPED == 1
#define TE_GROUP_OF(w) ((int)(w).group)
#define TE_GROUP_BLOCKS(w) ((w).group * all.groups.block_b)
#else
#define TE_GROUP_OF(w) 0
#define TE_GROUP_BLOCKS(w) 0
#endif

// Slabs go by as (slot, parity of the slot's phase): the same walk for the warpgroup that fills and those that empty.
struct te_ring {
    int slot, parity;
    TE_DEV void next() {
        if (++slot == STAGES) slot = 0, parity ^= 1;
    }
    TE_DEV int before() const { return slot ? slot - 1 : STAGES - 1; }
};

// Work items are splits of tiles, of two tiles with CLUSTER.
TE_DEV te_u32 te_tiles_m(const te__gemm_kargs &a) { return (te_u32)te_div_up(a.m, SHARE_B ? 2 * BM : BM); }
TE_DEV te_u32 te_tiles_n(const te__gemm_kargs &a) { return (te_u32)te_div_up(a.n, SHARE_A ? 2 * BN : BN); }

#if GROUPED
typedef te__gemm_hopper_grouped_kargs te_arguments;
// A block goes through its work upwards, and so through the groups.
struct te_work {
    te_i64 row, col, k0;
    int split, slabs; // split: of d_map, whose third dimension are the groups of D
    te_u32 group;
    te_i64 rows_end;

    TE_DEV te_work() : group(0) {}
    // There are rows for a second accumulator, or a second half of A, above the first ones, which start at `from`.
    TE_DEV bool tall(te_i64 from) const { return from + 128 < rows_end; }
    TE_DEV void open(const te_arguments &all, te_u32 work, te_u32 rank) {
        const te__gemm_kargs &a = all.h.g;
        const int4 *rows = (const int4 *)all.rows; // te__gemm_group_row
        int4 at = rows[group];
        te_u32 tm, tn;
        while (work >= (te_u32)at.w) at = rows[++group];
        te_gemm_raster(work - (te_u32)at.z, GROUPED == 1 ? (te_u32)(at.y - at.x + BM - 1) / BM : te_tiles_m(a), te_tiles_n(a), tm, tn);
        if (SHARE_B) tm = 2 * tm + rank;
        if (SHARE_A) tn = 2 * tn + rank;
        row = (te_i64)tm * BM, col = (te_i64)tn * BN;
        if (GROUPED == 1) {
            row += at.x, rows_end = at.y, k0 = 0, split = 0;
            slabs = (int)te_div_up(a.k, BK);
        } else {
            rows_end = a.m, split = (int)group;
            slabs = (at.y - at.x + BK - 1) / BK, k0 = at.x;
            if (!slabs) slabs = 1, k0 = 0x7fffffff - 1024; // nothing: a slab of zeros, from beyond the end
        }
    }
};
#else
typedef te__gemm_hopper_kargs te_arguments;
// The tile and the k of work item `work` for block `rank` of the cluster.
struct te_work {
    te_i64 row, col, k0;
    int split, slabs;
    TE_DEV bool tall(te_i64) const { return true; }
    TE_DEV void open(const te_arguments &all, te_u32 work, te_u32 rank) {
        const te__gemm_kargs &a = all.g;
        te_u32 tile = work / a.splits, tm, tn;
        split = (int)(work - tile * a.splits);
        te_gemm_raster(tile, te_tiles_m(a), te_tiles_n(a), tm, tn);
        if (SHARE_B) tm = 2 * tm + rank;
        if (SHARE_A) tn = 2 * tn + rank;
        row = (te_i64)tm * BM, col = (te_i64)tn * BN, k0 = split * a.k_split;
        slabs = (int)te_div_up(a.k - k0 < a.k_split ? a.k - k0 : a.k_split, BK);
    }
};
#endif

// One slab of an operand of R rows; x, y: coordinates along k and along m or n. SHARED: this block's half of it, into both blocks. STACKED: of
// matrix `z` of several, and not shared.
template <int R, int K_MAJOR, int SHARED, int STACKED>
TE_DEV void te_load_slab(te_u32 dst, const void *map, int k, int row, int z, te_u32 bar, te_u32 rank) {
    const int mine = SHARED ? R / 2 : R;
    int first = SHARED ? (int)rank * mine : 0;
    if (K_MAJOR) {
        if (SHARED) te_tma_load2_to(dst + first * SLAB, map, k, row + first, bar, 3);
        else if (STACKED) te_tma_load3(dst, map, k, row, z, bar);
        else te_tma_load2(dst, map, k, row, bar);
    } else {
#pragma unroll
        for (int i = 0; i < mine; i += 64) {
            if (SHARED) te_tma_load2_to(dst + (first + i) * SLAB, map, row + first + i, k, bar, 3);
            else if (STACKED) te_tma_load3(dst + i * SLAB, map, row + i, k, z, bar);
            else te_tma_load2(dst + i * SLAB, map, row + i, k, bar);
        }
    }
}

// acc += part times the block scales. of_rows: of rows g and g + 8; of_columns: shared memory, of the tile's columns, or NULL.
TE_DEV void te_add_scaled(float (&acc)[WN / 2], const float (&part)[WN / 2], const float of_rows[2], const float *of_columns) {
    if (!of_columns) {
#pragma unroll
        for (int i = 0; i < WN / 2; i++) acc[i] = fmaf(part[i], of_rows[i / 2 % 2], acc[i]);
        return;
    }
#pragma unroll
    for (int j = 0; j < WN / 8; j++) {
        float2 c = *(const float2 *)(of_columns + 8 * j + threadIdx.x % 4 * 2);
#pragma unroll
        for (int e = 0; e < 4; e++) acc[4 * j + e] = fmaf(part[4 * j + e] * of_rows[e / 2], e % 2 ? c.y : c.x, acc[4 * j + e]);
    }
}

// ---- D by TMA: what a warpgroup knows on its way out --------------------------------------------------------------------

struct te_way_out {
    const te__gemm_hopper_kargs &a;
    const void *d_map, *aux_map, *bias_from;
    te_u32 buffers, loads; // two chunks of shared memory; two barriers: what was loaded into them is there
    int group, lane, parity;
    bool leader; // the thread that speaks to TMA
    float scale;
    float2 bias[WN / 64]; // lane 4 g + t: of columns 64 i + 8 g + 2 t and the next

    TE_DEV te_way_out(const te__gemm_hopper_kargs &args, te_u32 buffers_, te_u32 loads_, int group_)
        : a(args), d_map(args.d_map), aux_map(args.aux_map), bias_from(args.g.bias), buffers(buffers_), loads(loads_), group(group_), lane(threadIdx.x & 31),
          parity(0), leader(threadIdx.x % 128 == 0), scale(te_gemm_scale(args.g)) {}

    TE_DEV void ask(int chunk, int row, int col, int split) const { // for what the chunk needs of aux or D
        te_u32 bar = loads + 8 * (chunk & 1);
        te_mbar_expect(bar, BUFFER);
        te_tma_load3(buffers + (chunk & 1) * BUFFER, STORE & 16 ? aux_map : d_map, col, row, split, bar);
    }

    // Before the products: what can be asked for already.
    TE_DEV void begin(int row, int col, int split) {
        if (LOADS && leader) {
            te_bulk_wait_read<0>();
            ask(0, row, col, split);
            if (CHUNKS > 1) ask(1, row, col + CHUNK, split);
        }
        __syncwarp();
        if (STORE & 2) {
#pragma unroll
            for (int i = 0; i < WN / 64; i++) {
                te_i64 at = col + 64 * i + 8 * (lane >> 2) + 2 * (lane & 3);
                bias[i].x = at < a.g.n ? te_gemm_load(bias_from, at, a.g.bias_dt) : 0.0f;
                bias[i].y = at + 1 < a.g.n ? te_gemm_load(bias_from, at + 1, a.g.bias_dt) : 0.0f;
            }
        }
    }

    // Where this thread's word of matrix rows (0, 8) and columns 8 j .. of the chunk lies: for ldmatrix and stmatrix by lanes.
    TE_DEV te_u32 word(te_u32 buffer, int j) const {
        int row = threadIdx.x % 128 / 32 * 16 + (lane & 15);
        return buffer + row * 128 + (((j + (lane >> 4)) ^ (row & 7)) << 4);
    }
    TE_DEV void put(te_u32 buffer, const float (&v)[CHUNK / 2]) const {
        if (D_DT == 1) {
            int row = threadIdx.x % 128 / 32 * 16 + (lane >> 2), t = lane & 3;
#pragma unroll
            for (int j = 0; j < CHUNK / 8; j++) {
                te_u32 at = buffer + row * 128 + (((2 * j + (t >> 1)) ^ (row & 7)) << 4) + (t & 1) * 8;
                te_sts8(at, v[4 * j], v[4 * j + 1]);
                te_sts8(at + 8 * 128, v[4 * j + 2], v[4 * j + 3]);
            }
            return;
        }
#pragma unroll
        for (int j = 0; j < CHUNK / 8; j += 2) {
            te_u32 r[4];
#pragma unroll
            for (int i = 0; i < 4; i++) r[i] = te_gemm_pack(v[4 * j + 2 * i], v[4 * j + 2 * i + 1], D_DT);
            te_stmatrix4(word(buffer, j), r);
        }
    }
    TE_DEV void send(const void *map, te_u32 buffer, int row, int col, int split) const {
        te_async_fence();
        te_meet<128>(1 + group);
        if (leader) {
            if (STORE & 32 && D_DT == 1) te_tma_add3(map, buffer, col, row, split);
            else te_tma_store3(map, buffer, col, row, split);
            te_bulk_commit();
        }
        __syncwarp();
    }

    // acc to rows `row` .. and columns `col` .. of D.
    TE_DEV void finish(float (&acc)[SUMS][WN / 2], int row, int col, int split) {
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; chunk++) {
            const int sum = chunk / (WN / CHUNK), first = chunk % (WN / CHUNK) * CHUNK;
            int at_row = row + STEP * sum, at_col = col + first;
            te_u32 buffer = buffers + (chunk & 1) * BUFFER;
            float v[CHUNK / 2], old[CHUNK / 2];
            if (LOADS) {
                te_mbar_wait(loads + 8 * (chunk & 1), parity);
                if (chunk & 1 || CHUNKS == 1) parity ^= 1;
#pragma unroll
                for (int j = 0; j < CHUNK / 8; j += 2) {
                    te_u32 r[4];
                    te_ldmatrix4(r, word(buffer, j));
#pragma unroll
                    for (int i = 0; i < 4; i++) te_gemm_unpack(r[i], D_DT, old[4 * j + 2 * i], old[4 * j + 2 * i + 1]);
                }
            } else {
                if (leader) te_bulk_wait_read<(STORE & 8) ? 0 : 1>();
                te_meet<128>(1 + group);
            }
#pragma unroll
            for (int j = 0; j < CHUNK / 8; j++) {
                float2 b = make_float2(0.0f, 0.0f);
                if (STORE & 2) {
                    int from = (first / 8 + j) % 8 * 4 + (lane & 3);
                    b.x = __shfl_sync(0xffffffffu, bias[first / 64].x, from), b.y = __shfl_sync(0xffffffffu, bias[first / 64].y, from);
                }
#pragma unroll
                for (int e = 0; e < 4; e++) v[4 * j + e] = fmaf(acc[sum][first / 2 + 4 * j + e], scale, e & 1 ? b.y : b.x);
            }
            if (STORE & 8) {
                put(buffers, v);
                send(aux_map, buffers, at_row, at_col, split);
                buffer = buffers + BUFFER;
            }
#pragma unroll
            for (int i = 0; i < CHUNK / 2; i++) {
                if (STORE & 4) v[i] = te_gemm_gelu(v[i]);
                if (STORE & 16) v[i] *= te_gemm_dgelu(old[i]);
                if (STORE & 32 && LOADS) v[i] += old[i];
            }
            if (LOADS) __syncwarp(); // all of the warp have read what they now write over
            put(buffer, v);
            send(d_map, buffer, at_row, at_col, split);
            if (LOADS && leader && chunk + 2 < CHUNKS) {
                te_bulk_wait_read<0>();
                ask(chunk + 2, row + STEP * ((chunk + 2) / (WN / CHUNK)), col + (chunk + 2) % (WN / CHUNK) * CHUNK, split);
            }
            __syncwarp();
        }
    }
};

extern "C" __global__ void __launch_bounds__(384, 1) te_gemm_hopper(const __grid_constant__ te_arguments all) {
#if GROUPED
    const te__gemm_hopper_kargs &a = all.h;
#else
    const te__gemm_hopper_kargs &a = all;
#endif
    extern __shared__ __align__(1024) char shared[];
    char *base = shared + (-te_smem(shared) & 1023);
    te_u32 slots = te_smem(base), staged = slots + STAGES * SLOT, scales = staged + 4 * BUFFER, full = scales + STAGES * SCALES, empty = full + 8 * STAGES;
    te_u32 loads = empty + 8 * STAGES, rank = CLUSTER > 1 ? te_cluster_rank() : 0;
    int group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
#if GROUPED
    te_u32 works = all.rows[all.groups.count - 1].tiles_end, group_before = ~0u;
#else
    te_u32 works = te_tiles_m(a.g) * te_tiles_n(a.g) * a.g.splits;
#endif
    te_u32 first = blockIdx.x / CLUSTER, step = gridDim.x / CLUSTER;
    const void *a_map = a.a_map, *b_map = a.b_map;

    if (threadIdx.x == 0) {
        te_tma_prefetch_map(a.a_map);
        te_tma_prefetch_map(a.b_map);
        if (STORE) te_tma_prefetch_map(a.d_map);
        for (int i = 0; i < STAGES; i++) {
            te_mbar_init(full + 8 * i, 1);
            te_mbar_init(empty + 8 * i, 8 * CLUSTER); // one lane of each warp that multiplies
        }
        for (int i = 0; i < 4; i++) te_mbar_init(loads + 8 * i, 1);
        te_mbar_init_done();
    }
    if (CLUSTER > 1) te_cluster_sync();
    else __syncthreads();

    te_ring ring = {0, 0};
    te_work w;
    if (group == 0) {
        te_registers_down<24>();
        if (threadIdx.x == 0) {
            for (te_u32 work = first; work < works; work += step) {
                w.open(all, work, rank);
#if GROUPED == 2
                if (w.group != group_before) {
                    group_before = w.group;
                    a_map = all.maps + w.group * 32, b_map = all.maps + w.group * 32 + 16;
                    te_tma_map_acquire(a_map);
                    te_tma_map_acquire(b_map);
                }
#endif
                for (int slab = 0; slab < w.slabs; slab++, ring.next()) {
                    te_u32 bar = full + 8 * ring.slot, slot = slots + ring.slot * SLOT;
                    int k = (int)w.k0 + slab * BK;
                    te_mbar_wait(empty + 8 * ring.slot, ring.parity ^ 1);
#if B_1D
                    te_i64 columns = (a.g.n + 3) / 4 * 4 - w.col; // that have scales
                    int bytes = columns <= 0 ? 0 : columns < BN ? (int)columns * 4 : BN * 4;
                    te_mbar_expect(bar, SLOT + bytes);
                    if (bytes) te_bulk_load(scales + ring.slot * SCALES, a.g.block_b + (te_i64)(k / 128) * a.g.ld_block_b + w.col, bytes, bar);
#else
                    te_mbar_expect(bar, HALVES && !w.tall(w.row) ? SLOT - BM / 2 * SLAB : SLOT);
#endif
#if HALVES
                    for (te_u32 half = CLUSTER > 1 ? rank : 0; half < (w.tall(w.row) ? 2 : 1); half += CLUSTER) {
                        te_u32 dst = slot + half * (BM / 2 * SLAB);
                        if (SHARE_A) te_tma_load2_to(dst, a_map, k, (int)w.row + 128 * half, bar, 3);
                        else te_tma_load2(dst, a_map, k, (int)w.row + 128 * half, bar);
                    }
#else
                    te_load_slab<BM, !A_T, SHARE_A, 0>(slot, a_map, k, (int)w.row, 0, bar, rank);
#endif
                    te_load_slab<BN, B_T, SHARE_B, GROUPED == 1>(slot + BM * SLAB, b_map, k, (int)w.col, TE_GROUP_OF(w), bar, rank);
                }
            }
        }
        return;
    }

    te_registers_up<240>();
    int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32 - 4, 0), lane = threadIdx.x & 31;
    group--;
    // What a step of 32 bytes of k adds to a descriptor, and the first row and column of this warpgroup.
    const int step_a = A_T ? 128 : 2, step_b = B_T ? 2 : 128;
    int rows = !WAVES ? 0 : group * (STEP == 128 ? 64 : 64 * WAVES), columns = WAVES ? 0 : group * WN;
#if STORE
    te_way_out out(a, staged + group * 2 * BUFFER, loads + group * 16, group);
#endif
    auto release = [&](int slot) {
        if (lane == 0) te_mbar_arrive(empty + 8 * slot);
        if (CLUSTER > 1 && lane == 1) te_mbar_arrive_at(empty + 8 * slot, rank ^ 1);
    };

    for (te_u32 work = first; work < works; work += step) {
        w.open(all, work, rank);
        te_i64 row = w.row + rows, col = w.col + columns;
#if GROUPED
        if (row >= w.rows_end || col >= a.g.n) { // nothing of it is this group's
            for (int slab = 0; slab < w.slabs; slab++, ring.next()) {
                te_mbar_wait(full + 8 * ring.slot, ring.parity);
                release(ring.slot);
            }
            continue;
        }
#endif
        float acc[SUMS][WN / 2];
#if STORE
#if GROUPED
        if (w.group != group_before) {
            group_before = w.group;
            out.scale = te_group_scale(all, w.group);
            if (GROUPED == 1) {
                out.d_map = all.maps + w.group * 32, out.aux_map = all.maps + w.group * 32 + 16;
                if (STORE & 2) out.bias_from = te_gemm_at(a.g.bias, w.group * a.g.n, a.g.bias_dt);
                if (out.leader) {
                    te_tma_map_acquire(out.d_map);
                    if (STORE & 24) te_tma_map_acquire(out.aux_map);
                }
                __syncwarp();
            }
        }
#endif
        out.begin((int)row, (int)col, w.split);
#endif
#if PROMOTE || HALVES
#pragma unroll
        for (int i = 0; i < SUMS * WN / 2; i++) acc[i / (WN / 2)][i % (WN / 2)] = 0.0f;
#endif
#pragma unroll 1
        for (int slab = 0; slab < w.slabs; slab++, ring.next()) {
            te_u32 slot = slots + ring.slot * SLOT;
            te_u64 da = te_wgmma_desc(slot + rows * SLAB, GROUP), db = te_wgmma_desc(slot + (BM + columns) * SLAB, GROUP);
#if BLOCK
            // Read here, used after the products. Rows beyond the last one take its scale.
            te_i64 kb = w.k0 / 128 + slab, line = row + warp % 4 * 16 + lane / 4;
            float of_rows[SUMS][2], of_tile = B_1D ? 1.0f : te_gemm_block_scale(a.g.block_b + TE_GROUP_BLOCKS(w), 1, a.g.ld_block_b, w.col < a.g.n ? w.col : 0, kb);
#pragma unroll
            for (int i = 0; i < 2 * SUMS; i++) {
                te_i64 at = line + i / 2 * STEP + i % 2 * 8;
                of_rows[i / 2][i % 2] = te_gemm_block_scale(a.g.block_a, A_2D, a.g.ld_block_a, at < a.g.m ? at : a.g.m - 1, kb);
            }
            const float *of_columns = B_1D ? (const float *)(base + (scales - slots) + ring.slot * SCALES) : nullptr;
#endif
            te_mbar_wait(full + 8 * ring.slot, ring.parity);
#if PROMOTE
#pragma unroll
            for (int v = 0; v < SUMS; v++) {
                float part[WN / 2];
                if (HALVES && v && !w.tall(row)) break;
                te_wgmma_fence();
#pragma unroll
                for (int s = 0; s < 4; s++) MULTIPLY(TYPES, FLAGS, part, da + v * (STEP * SLAB >> 4) + s * step_a, db + s * step_b, s != 0);
                te_wgmma_commit();
                te_wgmma_wait<0>();
                te_wgmma_keep(part);
                if (!B_1D && (v == SUMS - 1 || (HALVES && !w.tall(row)))) release(ring.slot);
#if BLOCK
                if (!B_1D) {
#pragma unroll
                    for (int i = 0; i < 2; i++) of_rows[v][i] = te_gemm_block_product(of_rows[v][i], of_tile);
                }
                te_add_scaled(acc[v], part, of_rows[v], of_columns);
#else
#pragma unroll
                for (int i = 0; i < WN / 2; i++) acc[v][i] += part[i];
#endif
            }
#if B_1D
            __syncwarp(); // every lane has read its scales
            release(ring.slot);
#endif
#else
            te_wgmma_fence();
#if HALVES
            if (!w.tall(row)) {
#pragma unroll
                for (int s = 0; s < 4; s++) MULTIPLY(TYPES, FLAGS, acc[0], da + s * step_a, db + s * step_b, (slab | s) != 0);
            } else
#endif
            {
#pragma unroll
                for (int s = 0; s < 4; s++)
#pragma unroll
                    for (int v = 0; v < SUMS; v++)
                        MULTIPLY(TYPES, FLAGS, acc[v], da + v * (STEP * SLAB >> 4) + s * step_a, db + s * step_b, (slab | s) != 0);
            }
            te_wgmma_commit();
            te_wgmma_wait<1>(); // the slab before this one is done with
            if (slab) release(ring.before());
#endif
        }
#if !PROMOTE
        te_wgmma_wait<0>();
#pragma unroll
        for (int v = 0; v < SUMS; v++) te_wgmma_keep(acc[v]);
        release(ring.before());
#endif
#if STORE
        out.finish(acc, (int)row, (int)col, w.split);
#else
        te__gemm_kargs e = a.g;
        char *stage = base + STAGES * SLOT + warp * TE_GEMM_STAGE_BYTES;
#if GROUPED
        float scale = te_group_scale(all, w.group);
        e.m = w.rows_end;
        if (GROUPED == 2) e.d = (void *)te_gemm_at(e.d, w.group * all.groups.b_elements, e.d_dt);
        if (GROUPED == 1 && e.bias) e.bias = te_gemm_at(e.bias, w.group * e.n, e.bias_dt);
#else
        float scale = te_gemm_scale(a.g);
        if (e.splits > 1) e.d = (float *)e.d + w.split * e.d_split;
#endif
#pragma unroll 1
        for (int part = 0; part < SUMS * WN / 64; part++) { // a loop around the long half; the short half must name its registers
#pragma unroll
            for (int p = 0; p < SUMS * WN / 64; p++)
                if (p == part) {
#pragma unroll
                    for (int j = 0; j < 8; j++) te_gemm_stage_put(stage, 8 * j, &acc[p / (WN / 64)][p % (WN / 64) * 32 + 4 * j]);
                }
            te_gemm_stage_finish<64>(e, scale, stage, row + part / (WN / 64) * STEP + warp % 4 * 16, col + part % (WN / 64) * 64);
        }
#endif
    }
#if STORE
    if (out.leader) te_bulk_wait_read<0>(); // shared memory ends with the block
#endif
    if (CLUSTER > 1) te_cluster_sync(); // the other block's slabs and signals come here until then
}
