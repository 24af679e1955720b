// ops/gemm/gemm_hopper.cu: computes D = epilogue(scale_a scale_b op(A) op(B) + bias) + D on Hopper. The operands are
// bf16, f16, FP8, or f32, which TMA rounds to TF32.
//
//          BN
//       +-------+
//    BM |  wg 1 |  64 * WAVES
//       +-------+
//       |  wg 2 |
//       +-------+
//
// A block has three warpgroups. The first is the producer. One of its threads loads slabs of A and B by TMA into a ring
// of slots. A slab is 128 bytes of k.
//
// The consumers are two warpgroups (wg 1, wg 2). Each has half the rows of a tile, in WAVES accumulators of 64 x BN.
// With WAVES = 0, BM is 64 and each consumer has half the columns.
//
// Blocks are persistent. The slabs of the next tile are loaded during the epilogue of the current one.
//
// TMA stores slabs in the 128-byte swizzle that wgmma reads. TMA fills elements outside the operands with zeros.
//
// A slab consists of TMA boxes, one after the other in shared memory:
//
//   K-major operand   a box has 128 bytes of k for each of many lines (rows of A or columns of B)
//   MN-major operand  a box has 64 lines by 64 values of k
//
// CLUSTER = 2: two blocks compute adjacent tiles and share the larger operand of a tile. If BM > BN they share A.
// Otherwise they share B. Each block loads half of the shared slab, and TMA multicasts this half to both blocks.
//
// A slot is empty when the consumers of both blocks have released it. A block's shared memory exists only until the
// block ends. So a block must not end while its partner still writes slabs or signals barriers in this memory. After
// the last slab, the producer waits until all slots are empty.
//
// With 1 x 128 blocks of B the consumers wait instead. A waiting producer would make ptxas schedule their loop worse
// (tests/bench/notes.md).
//
// PINGPONG: each consumer computes whole tiles of 128 x 128. The consumers take turns: one multiplies during the
// epilogue of the other.
//
// STORE & 1: TMA stores D in chunks of 64 rows by 128 bytes. Each warpgroup has two or four buffers for chunks. With
// accumulation, TMA adds f32 chunks to D in the L2 cache.
//
// A 16-bit chunk may need aux or the old D. TMA loads them into the chunk's buffer two or four chunks ahead.
//
// The bias gradient is left as sums over 16 rows of D. column_sum or column_sum_short adds them up later.
//
// Without STORE & 1, epilogue.cuh stores D. These cases need epilogue.cuh:
//
//   rows of D or aux that do not start and end at multiples of 16 bytes (TMA writes whole pieces of 16 bytes)
//   scales of single rows or columns
//   f32 D with dGELU
//   16-bit D with both accumulation and aux
//
// Block scales: wgmma's sums of each slab are scaled, and added up in f32. Threads read the scales of A, and the scales
// of 128 x 128 blocks of B, from device memory. Scales of 1 x 128 blocks of B are loaded with the slab to shared
// memory.
//
// BLOCK = 4: the scales belong to 128 x 128 blocks of B, and B begins up to seven columns after the start of a block.
// So the last eight columns of a tile may lie in two of these blocks.
//
// GROUPED: te_op_grouped_gemm, whose groups divide the rows (1) or k (2). gemm_groups has computed the offsets and the
// tiles of the groups, and tensor maps that end with a group:
//
//   1: maps of D and aux. The last tile of a group does not write the rows of the next group.
//   2: maps of A and B. The last slab of a group ends in zeros.
//
// In case 1, strips of 64 rows of a tile belong to the two consumers in turn, and clusters always share A. If WAVES is
// 2, a half tile without rows of the group is not loaded.
//
// The cost of a tile depends on its group, so tiles are scheduled dynamically. The first block of a cluster draws the
// number of the next tile, and sends it to the second block through shared memory.
//
// In case 2 with BLOCK = 1, every group begins at a multiple of 128 of k. An empty group has one slab of zeros. This
// slab uses the scales of the last 128 values of k.
//
// TMA loads start at multiples of 16 bytes. In case 2 a group may start between such multiples. Then the load starts at
// the multiple before, and the elements of the previous group are set to 0.
//
// Options:
//          A_DT, B_DT  te_dtypes: both bf16, both f16, both f32 (K-major, without GROUPED), or FP8 formats, but not
//                      e5m2 for both
//          A_T, B_T    1: A is stored as k x m; 1: B is stored as n x k
//          BN          128, 192 (only with WAVES = 1 and without GROUPED) or 256
//          WAVES       0: BM is 64; 1 or 2: BM is 128 WAVES; BM + BN <= 384
//          CLUSTER     1 or 2
//          PROMOTE     1: in FP8, the sums of each 128 values of k are added up in f32; BN is 128 or 192
//          STORE       bits TE__GEMM_STORE_...
//          D_DT        te_dtype of D
//          PINGPONG    1 only with WAVES = 1 and BN = 128, without PROMOTE; 0 if left out
//          BLOCK       te__gemm_block_kind, with PROMOTE and BN = 128; 0 if left out
//          GROUPED     1 or 2, without PINGPONG; 0 if left out
//
// Launch: grid (blocks, 1, 1), any number of whole clusters; block 384; shared memory TE__GEMM_HOPPER_SHARED.
//
// A, B and their rows start at multiples of 16 bytes. If TMA stores D, rows of D and aux start and end at such
// multiples.
//
// Split s of a tile multiplies k from s * k_split on. Its D is at s * d_split (with TMA: at z = s of d_map).
//
// With BLOCK, block_b is at a multiple of 16 bytes, and k_split is a multiple of 128.
//
// Benchmark: "gemm ...", "grouped ...", "odd ..." in tests/bench/h200.csv.
// te:arch 90a
// te:row A_DT=3 B_DT=3 A_T=0 B_T=1 BN=256 WAVES=1 CLUSTER=2 PROMOTE=0 STORE=1|3|15|17|33 D_DT=3
// te:row A_DT=3 B_DT=3 A_T=0 B_T=0|1 BN=128 WAVES=1 CLUSTER=2 PINGPONG=1 PROMOTE=0 STORE=0|15|81 D_DT=3
// te:row A_DT=4 B_DT=4 A_T=0 B_T=1 BN=128 WAVES=1 CLUSTER=2 PINGPONG=1 PROMOTE=0 STORE=15|17 D_DT=3
// te:row A_DT=3 B_DT=3 A_T=1 B_T=0 BN=192|256 WAVES=1 CLUSTER=2 PROMOTE=0 STORE=33 D_DT=1
// te:row A_DT=3 B_DT=3 A_T=1 B_T=0 BN=128 WAVES=2 CLUSTER=2 PROMOTE=0 STORE=1 D_DT=1
// te:row A_DT=3 B_DT=3 A_T=0 B_T=0|1 BN=128|192 WAVES=1 CLUSTER=1 PROMOTE=0 STORE=0|2|15|46|81|128 D_DT=3
// te:row A_DT=3 B_DT=3 A_T=0 B_T=0 BN=256 WAVES=1 CLUSTER=2 PROMOTE=0 STORE=16 D_DT=1
// te:row A_DT=4 B_DT=4 A_T=0 B_T=1 BLOCK=2 BN=128 WAVES=2 CLUSTER=2 PROMOTE=1 STORE=0|1|15|48|81 D_DT=3
// te:row A_DT=4 B_DT=4 A_T=0 B_T=1 BN=256 WAVES=1 CLUSTER=2 PROMOTE=0 STORE=1|2 D_DT=3
// te:row A_DT=4 B_DT=4 A_T=0 B_T=1 BLOCK=1 BN=128 WAVES=2 CLUSTER=2 PROMOTE=1 STORE=33|0 D_DT=1
// te:row A_DT=3 B_DT=3 A_T=0 B_T=1 BN=256 WAVES=0 CLUSTER=1 PROMOTE=0 STORE=1 D_DT=1
// te:row A_DT=3 B_DT=3 A_T=1 B_T=0 BN=128 WAVES=0 CLUSTER=1 PROMOTE=0 STORE=0 D_DT=3
// te:row A_DT=4 B_DT=4 A_T=0 B_T=1 BN=128|192 WAVES=1 CLUSTER=1 PROMOTE=0|1 STORE=1|2|3|81 D_DT=3
// te:row A_DT=5 B_DT=4 A_T=0 B_T=1 BN=192 WAVES=1 CLUSTER=2 PROMOTE=1 STORE=15 D_DT=3
// te:row A_DT=4 B_DT=4 A_T=0 B_T=1 BN=192 WAVES=1 CLUSTER=1 PROMOTE=1 STORE=33 D_DT=1
// te:row A_DT=2 B_DT=2 A_T=0 B_T=1 BN=128 WAVES=0 CLUSTER=2 PROMOTE=0 STORE=1 D_DT=2
// te:row A_DT=4 B_DT=4 A_T=0 B_T=1 BN=128 WAVES=0 CLUSTER=2 PROMOTE=0 STORE=15 D_DT=3
// te:row A_DT=5 B_DT=4 A_T=0 B_T=1 BN=128 WAVES=2 CLUSTER=2 PROMOTE=1 STORE=33 D_DT=1 GROUPED=0|2
// te:row A_DT=4 B_DT=5 A_T=0 B_T=1 BN=128 WAVES=0|1 CLUSTER=1 PROMOTE=1 STORE=1 D_DT=3
// te:row A_DT=4 B_DT=4 A_T=0 B_T=1 BLOCK=1 BN=128 WAVES=1 CLUSTER=1 PROMOTE=1 STORE=0 D_DT=3
// te:row A_DT=5 B_DT=4 A_T=0 B_T=1 BLOCK=2|4 BN=128 WAVES=1 CLUSTER=1 PROMOTE=1 STORE=1 D_DT=3
// te:row A_DT=4 B_DT=5 A_T=0 B_T=1 BLOCK=3 BN=128 WAVES=2 CLUSTER=2 PROMOTE=1 STORE=1 D_DT=3
// te:row A_DT=3 B_DT=3 A_T=0 B_T=0|1 BN=128 WAVES=2 CLUSTER=2 PROMOTE=0 STORE=1|15|17|33 D_DT=3 GROUPED=1
// te:row A_DT=3 B_DT=3 A_T=0 B_T=1 BN=256 WAVES=0 CLUSTER=1 PROMOTE=0 STORE=0|16 D_DT=3 GROUPED=1
// te:row A_DT=5 B_DT=4 A_T=0 B_T=1 BN=128 WAVES=2 CLUSTER=1 PROMOTE=0|1 STORE=1 D_DT=3 GROUPED=1
// te:row A_DT=4 B_DT=4 A_T=0 B_T=1 BLOCK=2 BN=128 WAVES=2 CLUSTER=2 PROMOTE=1 STORE=1 D_DT=3 GROUPED=1
// te:row A_DT=3 B_DT=3 A_T=1 B_T=0 BN=256 WAVES=1 CLUSTER=2 PROMOTE=0 STORE=33 D_DT=1 GROUPED=2
// te:row A_DT=3 B_DT=3 A_T=1 B_T=1 BN=128 WAVES=1 CLUSTER=1 PROMOTE=0 STORE=33 D_DT=3 GROUPED=2
// te:row A_DT=4 B_DT=4 A_T=0 B_T=1 BN=256 WAVES=1 CLUSTER=1 PROMOTE=0 STORE=0 D_DT=1 GROUPED=2
// te:row A_DT=4 B_DT=4 A_T=0 B_T=1 BLOCK=1 BN=128 WAVES=1|2 CLUSTER=1 PROMOTE=1 STORE=1 D_DT=3 GROUPED=2
// te:row A_DT=4 B_DT=4 A_T=0 B_T=1 BLOCK=1 BN=128 WAVES=2 CLUSTER=1 PROMOTE=1 STORE=0|1 D_DT=1 GROUPED=2
// te:row A_DT=1 B_DT=1 A_T=0 B_T=1 BN=256 WAVES=1 CLUSTER=2 PROMOTE=0 STORE=1|33 D_DT=1
// te:row A_DT=1 B_DT=1 A_T=0 B_T=1 BN=128 WAVES=2 CLUSTER=2 PROMOTE=0 STORE=0|1|15 D_DT=1
// te:row A_DT=1 B_DT=1 A_T=0 B_T=1 BN=128 WAVES=0|1 CLUSTER=1 PROMOTE=0 STORE=1 D_DT=1
#include "device/hopper.cuh"
#include "ops/gemm/groups.cuh"

#ifndef BLOCK
#define BLOCK 0
#endif
#ifndef PINGPONG
#define PINGPONG 0
#endif
#ifndef GROUPED
#define GROUPED 0
#endif

#if WAVES
#define WN BN
#elif BN == 256
#define WN 128
#else
#define WN 64
#endif
#define BM (WAVES ? 128 * WAVES : 64)
#define SUMS (PINGPONG ? 2 : WAVES ? WAVES : 1) // accumulators of a warpgroup, each 64 x WN
#define FP8 (A_DT == 4 || A_DT == 5) // numbers of te_dtype, whose names the preprocessor does not know
#define TF32 (A_DT == 1)
#define SLAB 128                     // bytes of k
#define BK (FP8 ? 128 : TF32 ? 32 : 64) // elements of k
#define SLOT ((BM + BN) * SLAB)
#define SHARE_A (CLUSTER == 2 && (BM > BN || GROUPED == 1))
#define SHARE_B (CLUSTER == 2 && !SHARE_A)
#define B_1D (BLOCK == 1 || BLOCK == 3) // numbers of te__gemm_block_kind
#define A_2D (BLOCK == 3)
#define PARTS (BLOCK == 4 ? 3 : 1) // number of B's scales that a thread needs for a slab
#define SCALES (B_1D ? BN * 4 : 0) // bytes of the scales of a slab
// The number of buffers of a warpgroup for chunks of D. Four still leave shared memory for three slots of A and B.
#define BUFFERS (TMA_OUT && (PINGPONG || (PROMOTE && STORE & 16)) ? 4 : 2)
#define BIASES (TMA_OUT && STORE & 2 ? WN * 4 : 0) // bytes of a warpgroup's bias
#define OTHERS (32 + 2 * (STAGED + BUFFERS * 8 + BIASES) + (GROUPED ? 16 + ENTRIES * 48 : 0)) // bytes beside the slots
#define STAGES ((TE__GEMM_HOPPER_SHARED - OTHERS) / (SLOT + SCALES + 16))
#define GROUP (64 * SLAB) // bytes of one box of an operand that is not k-major
#define BUFFER (64 * 128) // bytes of a chunk of D
#define COLUMNS (WN % 128 ? 64 : 128) // COLS of te_gemm_stage
// bytes of shared memory through which a warpgroup stores D
#define STAGED (TMA_OUT ? BUFFERS * BUFFER : 4 * te_gemm_stage<COLUMNS>::BYTES)
#define CHUNK (D_DT == 1 ? 32 : 64) // columns of a chunk
#define CHUNKS (SUMS * WN / CHUNK)  // chunks of a warpgroup's part of a tile
#define STEP (GROUPED == 1 ? 128 : 64) // rows from one accumulator of a warpgroup to the next
#define HALVES (GROUPED == 1 && WAVES == 2) // whether A is loaded in two halves, the second one only if the group has
                                            // rows there
#define INSIDE (GROUPED == 2 && (!A_T || B_T)) // whether a group starts in the middle of rows in memory
#define ENTRIES 16 // entries for messages between blocks and threads, if GROUPED: see te_entry
#define TMA_OUT (STORE & 1)
#define LOADS (STORE & 16 || (STORE & 32 && D_DT != 1))
static_assert((!FP8 && !TF32) || (!A_T && B_T), "fp8 and f32 operands are k-major");
static_assert(!TF32 || (B_DT == 1 && !GROUPED), "f32 operands are of one product");
static_assert(!BLOCK || (PROMOTE && FP8 && BN == 128), "blocks of fp8");
static_assert(BN != 192 || (WAVES == 1 && !GROUPED), "not of groups");
static_assert(!PINGPONG || (WAVES == 1 && BN == 128 && !PROMOTE), "two waves of one warpgroup are a tile");
static_assert(!GROUPED || STAGES + 2 <= ENTRIES, "mail");
static_assert(GROUPED != 1 || !A_T, "groups along rows are rows of A");
static_assert(!GROUPED || (!PINGPONG && (!BLOCK || (GROUPED == 1 ? BLOCK == 2 : BLOCK == 1 && CLUSTER == 1))),
              "what groups cannot have");
static_assert(!TMA_OUT || !(STORE & 16) || D_DT != 1, "aux is read two values a word");

#define JOIN_OF(a, b) a##b
#define JOIN(a, b) JOIN_OF(a, b)
#define TYPE_2 "f16"
#define TYPE_3 "bf16"
#define TYPE_4 "e4m3"
#define TYPE_5 "e5m2"
#define FLAG_A_0 ", 0"
#define FLAG_A_1 ", 1"
#define FLAG_B_0 ", 1"
#define FLAG_B_1 ", 0"
#if FP8
#define TYPES "k32.f32." JOIN(TYPE_, A_DT) "." JOIN(TYPE_, B_DT)
#define FLAGS ", 1, 1"
#elif TF32
#define TYPES "k8.f32.tf32.tf32"
#define FLAGS ", 1, 1"
#else
#define TYPES "k16.f32." JOIN(TYPE_, A_DT) "." JOIN(TYPE_, B_DT)
#define FLAGS ", 1, 1" JOIN(FLAG_A_, A_T) JOIN(FLAG_B_, B_T)
#endif
#define MULTIPLY JOIN(TE_WGMMA_, WN)

// A position in the ring of slots, and the parity of the slot's barrier phase.
struct te_ring {
    int slot, parity;
    TE_DEV void next() {
        if (++slot == STAGES) slot = 0, parity ^= 1;
    }
    TE_DEV void skip(int slabs) {
        int at = slot + slabs;
        parity ^= at / STAGES & 1, slot = at % STAGES;
    }
    TE_DEV int before() const { return slot ? slot - 1 : STAGES - 1; }
};

// Returns the address in shared memory of entry i. Blocks and threads pass data through entries of 48 bytes:
// + 0   The number of the next tile. The first block of a cluster sends it to the second. The first block is at most
//       STAGES + 1 tiles ahead of the second.
// + 8   The barrier at which the second block waits for this number.
// + 16  The te_work whose first slab is in slot i, for the consumers.
TE_DEV te_u32 te_entry(te_u32 entries, te_u32 i) { return entries + i % ENTRIES * 48; }

// te_tiles_m and te_tiles_n return the number of tiles along m and n. Two tiles that share an operand count as one.
TE_DEV te_u32 te_tiles_m(const te__gemm_kargs &a) { return (te_u32)te_div_up(a.m, SHARE_B ? 2 * BM : BM); }
TE_DEV te_u32 te_tiles_n(const te__gemm_kargs &a) { return (te_u32)te_div_up(a.n, SHARE_A ? 2 * BN : BN); }

// A work item is a tile of D with the range of k of one split.
struct te_work {
    int row, col, rows_end, slabs, k0;
    int split;  // the third coordinate in D's tensor map: the split, or the group if the groups divide k
    int before; // elements of the first slab that belong to the group before
    int group;  // -1: there is no more work
    TE_DEV explicit te_work(te_u32 entry) {
        uint4 u = te_lds16(entry + 16), v = te_lds16(entry + 32);
        row = (int)u.x, col = (int)u.y, rows_end = (int)u.z, slabs = (int)u.w;
        k0 = (int)v.x, split = (int)v.y, before = (int)v.z, group = (int)v.w;
    }
    TE_DEV void put(te_u32 entry) const {
        te_sts16(entry + 16, make_uint4((te_u32)row, (te_u32)col, (te_u32)rows_end, (te_u32)slabs));
        te_sts16(entry + 32, make_uint4((te_u32)k0, (te_u32)split, (te_u32)before, (te_u32)group));
    }
    // Finds item number `work`. A block takes its items in ascending order. `group_` is the group of the block's
    // previous item. The constructor sets `group_` to the group of this item.
    TE_DEV te_work(const te__gemm_hopper_kargs &all, te_u32 work, te_u32 rank, te_u32 &group_) : group(0) {
        const te__gemm_kargs &a = all.g;
        te_u32 tile, across = te_tiles_n(a), down = te_tiles_m(a), tm, tn;
        int begin, end; // begin, end: of k, or of the group's rows
        row = 0, rows_end = (int)a.m;
        if (GROUPED) {
            const int4 *rows = (const int4 *)all.rows; // te__gemm_group_row
            int4 at = rows[group_];
            while (work >= (te_u32)at.w) at = rows[++group_];
            tile = work - (te_u32)at.z;
            begin = at.x, end = at.y;
            group = (int)group_, split = GROUPED == 2 ? group : 0;
        } else {
            tile = work / a.splits;
            split = (int)(work - tile * a.splits);
            begin = split * (int)a.k_split, end = a.k - begin < a.k_split ? (int)a.k : begin + (int)a.k_split;
        }
        if (GROUPED == 1) {
            down = (te_u32)(end - begin) / BM;
            row = begin, rows_end = end;
            begin = 0, end = (int)a.k;
        }
        if (GROUPED != 1 || tile < down * across) te_gemm_raster(tile, down, across, tm, tn);
        else tm = down, tn = tile - down * across; // the rows below the last full tile come last, when B is in the L2
                                                   // cache
        if (SHARE_B) tm = 2 * tm + rank;
        if (SHARE_A) tn = 2 * tn + rank;
        row += (int)tm * BM, col = (int)tn * BN;
        before = INSIDE ? begin & (FP8 ? 15 : 7) : 0;
        k0 = begin - before;
        slabs = (end - k0 + BK - 1) / BK;
        // an empty group has one slab of zeros, which TMA reads from beyond the end of k
        if (GROUPED == 2 && begin == end) slabs = 1, k0 = (int)te_div_up(a.k, BK) * BK, before = 0;
    }
    // Returns whether the group has row `from` + 128. If `from` is a consumer's first row, the consumer's second
    // accumulator begins at row `from` + 128. If `from` is the tile's first row, the second half of the tile's rows of
    // A begins at row `from` + 128. Without HALVES returns true.
    TE_DEV bool tall(int from) const { return !HALVES || from + 128 < rows_end; }
};

// Issues the TMA loads of one slab of an operand with R rows.
//
// SHARED: each block of the cluster loads half of the slab, into both blocks.
//
// HALVED: a K-major operand is loaded in two halves, the second one only if `both`.
//
// STACKED: reads matrix z of a stack of matrices. Not with SHARED.
template <int R, int K_MAJOR, int SHARED, int HALVED, int STACKED>
TE_DEV void te_load_slab(te_u32 dst, const void *map, int k, int row, int z, te_u32 bar, te_u32 rank, bool both) {
    const bool half_k = SHARED && !K_MAJOR && R / 2 % 64; // 192 lines are three boxes of 64, so each block loads half
                                                          // of k instead
    const int mine = SHARED && !half_k ? R / 2 : R, box = !K_MAJOR ? 64 : HALVED ? R / 2 : mine;
    int first = SHARED && !half_k ? (int)rank * mine : 0;
    if (half_k) k += (int)rank * 32, dst += rank * (GROUP / 2);
#pragma unroll
    for (int i = 0; i < mine; i += box) {
        int at = first + i, x = K_MAJOR ? k : row + at, y = K_MAJOR ? row + at : k;
        if (HALVED && at >= R / 2 && !both) break;
        if (SHARED) te_tma_load2_to(dst + at * SLAB, map, x, y, bar, 3);
        else if (STACKED) te_tma_load3(dst + at * SLAB, map, x, y, z, bar);
        else te_tma_load2(dst + at * SLAB, map, x, y, bar);
    }
}

// Returns which block of 128 values of k holds the slab at k. The slab of an empty group counts as a part of the last
// block.
TE_DEV te_i64 te_block_of(const te__gemm_kargs &a, int k) {
    int block = k / 128;
    return GROUPED == 2 && k >= a.k ? (int)((a.k - 1) / 128) : block;
}

// Sets the first n values of k of a slab with R rows to 0. The n values fill less than 16 bytes. 256 threads must call
// this function.
template <int R, int K_MAJOR> TE_DEV void te_clear_start(char *slab, int n) {
    if (K_MAJOR) { // the values lie in the first 16 bytes of each row; the address includes the swizzle
        for (int r = threadIdx.x & 255; r < R; r += 256) {
            te_u32 *w = (te_u32 *)(slab + r * SLAB + ((r & 7) << 4));
            int bytes = n * (FP8 ? 1 : 2);
#pragma unroll
            for (int i = 0; i < 4; i++)
                w[i] = bytes >= 4 * i + 4 ? 0 : bytes <= 4 * i ? w[i] : w[i] >> (bytes & 3) * 8 << (bytes & 3) * 8;
        }
    } else { // the values are the first rows of each box
        for (int i = threadIdx.x & 255; i < R / 64 * n * 8; i += 256)
            *(uint4 *)(slab + i / (n * 8) * GROUP + i % (n * 8) * 16) = make_uint4(0, 0, 0, 0);
    }
}

// Multiplies `part` by its block scales and adds it to `acc`. `of_rows` has the scales of the thread's two rows.
// `of_tile` has B's scales of the tile. With B_1D, each column has its own scale instead, and `of_columns` is the
// shared-memory address of the scales of the thread's columns.
TE_DEV void te_add_scaled(float (&acc)[WN / 2], const float (&part)[WN / 2], const float of_rows[2],
                          const float of_tile[PARTS], te_u32 of_columns) {
#pragma unroll
    for (int j = 0; j < WN / 8; j++) {
        float2 c;
        if (B_1D) te_lds8(of_columns + 32 * j, c.x, c.y);
#pragma unroll
        for (int e = 0; e < 4; e++) {
            float &sum = acc[4 * j + e], more = part[4 * j + e], of_row = of_rows[e / 2];
            if (B_1D) sum = fmaf(more * of_row, e % 2 ? c.y : c.x, sum);
            else
                sum = fmaf(more, te_gemm_block_product(of_row, of_tile[PARTS > 1 && j == WN / 8 - 1 ? 1 + e % 2 : 0]),
                           sum);
        }
    }
}

// The block scales of the next slab, for the thread's rows and for the tile. With BLOCK = 4 there are two more, for the
// thread's last two columns.
struct te_ahead {
    const float *rows, *tile[PARTS];
    int at[2 * SUMS]; // where the rows' scales lie
    float of_rows[2 * SUMS], of_tile[PARTS];
    TE_DEV te_ahead(const te__gemm_kargs &a, const float *block_b, te_i64 block, te_i64 line, te_i64 col) : of_tile() {
        rows = a.block_a + block * (A_2D ? 1 : a.ld_block_a);
#pragma unroll
        for (int i = 0; i < PARTS; i++) {
            te_i64 c = i ? col + WN - 9 + threadIdx.x % 4 * 2 + i : col;
            tile[i] = block_b + (c < a.n ? (BLOCK == 4 ? a.first_b + c : c) >> 7 : 0) * a.ld_block_b + block;
        }
#pragma unroll
        for (int i = 0; i < 2 * SUMS; i++) {
            te_i64 own = line + i / 2 * STEP + i % 2 * 8, l = own < a.m ? own : a.m - 1;
            at[i] = (int)(A_2D ? (l >> 7) * a.ld_block_a : BLOCK == 4 ? a.phase + l * a.phases : l);
        }
        ask(a, 0);
    }
    // Loads the scales of the slab that is `slabs` slabs after the slab of the previous call.
    TE_DEV void ask(const te__gemm_kargs &a, int slabs) {
        rows += slabs * (A_2D ? 1 : a.ld_block_a);
#pragma unroll
        for (int i = 0; i < (B_1D ? 0 : PARTS); i++) of_tile[i] = *(tile[i] += slabs);
#pragma unroll
        for (int i = 0; i < 2 * SUMS; i++) of_rows[i] = rows[at[i]];
    }
};

#include "ops/gemm/epilogue_store.cuh"

extern "C" __global__ void __launch_bounds__(384, 1) te_gemm_hopper(const __grid_constant__ te__gemm_hopper_kargs a) {
    extern __shared__ __align__(1024) char shared[];
    char *base = shared; // at a multiple of 1024: only the system's 1 KB of shared memory lies before it
    te_u32 slots = te_smem(base), staged = slots + STAGES * SLOT, scales = staged + 2 * STAGED,
           full = scales + STAGES * SCALES, empty = full + 8 * STAGES;
    te_u32 loads = empty + 8 * STAGES, busy = loads + 2 * BUFFERS * 8, biases = busy + 16;
    te_u32 entries = (biases + 2 * BIASES + 15) & ~15u, rank = CLUSTER > 1 ? te_cluster_rank() : 0;
    int group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0), group_before = -1;
    te_u32 first = blockIdx.x / CLUSTER, step = gridDim.x / CLUSTER, at_group = 0;
    const void *a_map = a.a_map, *b_map = a.b_map;

    if (threadIdx.x == 0) {
        te_tma_prefetch_map(a.a_map);
        te_tma_prefetch_map(a.b_map);
        if (TMA_OUT) te_tma_prefetch_map(a.d_map);
        if (TMA_OUT && STORE & 24 && !GROUPED) te_tma_prefetch_map(a.aux_map);
        for (int i = 0; i < STAGES; i++) {
            te_mbar_init(full + 8 * i, 1);
            te_mbar_init(empty + 8 * i, (PINGPONG ? 4 : 8) * CLUSTER); // arrivals: one lane of each warp that
                                                                       // multiplies
        }
        for (int i = 0; i < 2 * BUFFERS; i++) te_mbar_init(loads + 8 * i, 1);
        for (int i = 0; i < 2; i++) te_sts4(busy + 4 * i, 0);
        for (int i = 0; i < (GROUPED && CLUSTER > 1 ? ENTRIES : 0); i++) te_mbar_init(te_entry(entries, i) + 8, 1);
        te_mbar_init_done();
    }
    __syncthreads();
    if (CLUSTER > 1) te_cluster_meet();
    te_follow();

    te_u32 works = GROUPED ? a.rows[a.g.groups.count - 1].tiles_end : te_tiles_m(a.g) * te_tiles_n(a.g) * a.g.splits;
    te_ring ring = {0, 0};
    if (group == 0) {
        te_registers_down<GROUPED ? 56 : 24>();
        if (threadIdx.x == 0) {
            unsigned *counter = (unsigned *)&a.rows[a.g.groups.count];
            for (te_u32 work = first, next = 0, number = 0; work < works; work = next, number++) {
                if (!GROUPED) next = work + step;
                else if (rank == 0)
                    next =
                        step + atomicAdd(counter, 1u); // asked for before the slabs are loaded, which hides the
                                                       // atomic's latency
                te_work w(a, work, rank, at_group);
                bool both = w.tall(w.row);
                if (GROUPED == 2 && w.group != group_before) {
                    group_before = w.group;
                    a_map = a.maps + w.group * 32, b_map = a.maps + w.group * 32 + 16;
                    te_tma_map_acquire(a_map);
                    te_tma_map_acquire(b_map);
                }
                for (int slab = 0; slab < w.slabs; slab++, ring.next()) {
                    te_u32 bar = full + 8 * ring.slot, slot = slots + ring.slot * SLOT;
                    int k = w.k0 + slab * BK;
                    te_mbar_wait(empty + 8 * ring.slot, ring.parity ^ 1);
                    if (GROUPED && slab == 0) w.put(te_entry(entries, ring.slot));
                    te_i64 columns = B_1D ? (a.g.n + 3) / 4 * 4 - w.col : 0; // columns that have scales
                    int bytes = columns <= 0 ? 0 : columns < BN ? (int)columns * 4 : BN * 4;
                    te_mbar_expect(bar, (both ? SLOT : SLOT - BM / 2 * SLAB) + bytes);
                    if (bytes)
                        te_bulk_load(scales + ring.slot * SCALES,
                                     a.g.block_b + te_block_of(a.g, k) * a.g.ld_block_b + w.col, bytes, bar);
                    te_load_slab<BM, !A_T, SHARE_A, HALVES, 0>(slot, a_map, k, w.row, 0, bar, rank, both);
                    te_load_slab<BN, B_T, SHARE_B, 0, GROUPED == 1>(slot + BM * SLAB, b_map, k, w.col, w.group, bar,
                                                                    rank, true);
                    if (GROUPED && CLUSTER > 1 && rank == 0 && slab == 0)
                        te_store_at(te_entry(entries, number), next, te_entry(entries, number) + 8, 1);
                }
                if (GROUPED && CLUSTER > 1 && rank == 1) {
                    te_mbar_expect(te_entry(entries, number) + 8, 4);
                    te_mbar_wait(te_entry(entries, number) + 8, number / ENTRIES & 1);
                    next = te_lds4(te_entry(entries, number));
                }
            }
            te_ring last = ring; // CLUSTER = 2: the producer waits for one slot after another to become empty
            for (int i = 0; i < (CLUSTER > 1 && !B_1D ? STAGES : 0); i++, last.next())
                te_mbar_wait(empty + 8 * last.slot, last.parity ^ 1);
            if (GROUPED) {
                te_mbar_wait(empty + 8 * ring.slot, ring.parity ^ 1);
                te_sts4(te_entry(entries, ring.slot) + 44, ~0u); // the work's group is -1: there is no more
                te_mbar_arrive(full + 8 * ring.slot);
            }
        }
        return;
    }

    te_registers_up<GROUPED ? 224 : 240>();
    int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32 - 4, 0), lane = threadIdx.x & 31;
    group--;
    // step_a and step_b advance the operands' wgmma descriptors by 32 bytes of k. This warpgroup computes the tile from
    // row `rows` and column `columns` on.
    const int step_a = A_T ? 128 : 2, step_b = B_T ? 2 : 128;
    int rows = WAVES && !PINGPONG ? group * (STEP == 128 ? 64 : 64 * WAVES) : 0, columns = WAVES ? 0 : group * WN;
#if TMA_OUT
    te_tma_store_path out(a, staged + group * BUFFERS * BUFFER, loads + group * BUFFERS * 8, biases + group * BIASES,
                          group);
#endif
    // computed only once, because mapping an address to the cluster's other block is slow
    te_u32 empty_there = CLUSTER > 1 ? te_cluster_at(empty, rank ^ 1) : 0;
    auto release = [&](int slot) {
        if (lane == 0) te_mbar_arrive(empty + 8 * slot);
        if (CLUSTER > 1 && lane == 1) te_mbar_arrive_there(empty_there + 8 * slot);
    };

    // PINGPONG: a warpgroup starts a tile only after the last slab of its partner's tile has arrived (barrier 3 +
    // group). A wait at a slot's barrier knows only the parity of the phase: without this order the wait could end too
    // early.
    if (PINGPONG && group == 1) te_meet_later<256>(3);
    // PROMOTE: a warpgroup waits until the other has done half of its multiplications. So one adds its sums while the
    // other multiplies. The wait is only for speed, and ends after a few tries. Results do not depend on it.
    auto set_busy = [&](te_u32 is) {
        if (threadIdx.x % 128 == 0) te_sts4(busy + 4 * group, is);
    };
    te_u32 number = 0;
    for (te_u32 work = first;; work += step, number++) {
        if (GROUPED) te_mbar_wait(full + 8 * ring.slot, ring.parity);
        else if (work >= works) break;
        te_work w = GROUPED ? te_work(te_entry(entries, ring.slot)) : te_work(a, work, rank, at_group);
        if (w.group < 0) break;
        if (PINGPONG && (number & 1) != group) {
            ring.skip(w.slabs);
            continue;
        }
        int row = w.row + rows, col = w.col + columns;
        // Clears the elements of another group in `slab`, which must have arrived.
        auto clear = [&](int slab) {
            if (!INSIDE || slab || !w.before) return;
            char *slot = base + ring.slot * SLOT;
            te_clear_start<BM, !A_T>(slot, w.before);
            te_clear_start<BN, B_T>(slot + BM * SLAB, w.before);
            te_async_fence();
            te_meet<256>(3);
        };
        if (GROUPED && (row >= w.rows_end || col >= a.g.n)) { // nothing to multiply
            for (int slab = 0; slab < w.slabs; slab++, ring.next()) {
                te_mbar_wait(full + 8 * ring.slot, ring.parity);
                clear(slab);
                release(ring.slot);
            }
            continue;
        }
#if GROUPED && TMA_OUT
        if (w.group != group_before) {
            group_before = w.group;
            out.enter(w.group);
        }
        out.tall = w.tall(row);
#endif
        float acc[SUMS][WN / 2];
        // out.begin is called at slab `begin`, and waits until TMA has read the chunks of the previous tile. By the
        // fifth slab, TMA has read these chunks.
        int begin = w.slabs > 4 ? 4 : 0;
        if (PINGPONG) te_meet<256>(3 + group);
#if PROMOTE || HALVES
#pragma unroll
        for (int i = 0; i < SUMS * WN / 2; i++) acc[i / (WN / 2)][i % (WN / 2)] = 0.0f;
#endif
#if BLOCK
        te_ahead ahead(a.g, a.g.block_b + w.group * a.g.groups.block_b, te_block_of(a.g, w.k0),
                       row + warp % 4 * 16 + lane / 4, col);
#endif
#pragma unroll 1
        for (int slab = 0; slab < w.slabs; slab++, ring.next()) {
            te_u32 slot = slots + ring.slot * SLOT;
            te_u64 da = te_wgmma_desc(slot + rows * SLAB, GROUP),
                   db = te_wgmma_desc(slot + (BM + columns) * SLAB, GROUP);
#if BLOCK
            te_ahead now = ahead; // loaded a slab ago: the latency of the L2 cache is longer than the product of a slab
            te_u32 of_columns = scales + ring.slot * SCALES + (columns + threadIdx.x % 4 * 2) * 4;
#endif
            te_mbar_wait(full + 8 * ring.slot, ring.parity);
            clear(slab);
#if PROMOTE
#pragma unroll
            for (int v = 0; v < SUMS; v++) {
                float part[WN / 2];
                if (v && !w.tall(row)) break;
#pragma unroll 1
                for (int times = 0; times < 12 && te_lds4(busy + 4 * (group ^ 1)); times++) continue;
                set_busy(1);
                te_wgmma_fence();
#pragma unroll
                for (int s = 0; s < 4; s++) {
                    MULTIPLY(TYPES, FLAGS, part, da + v * (STEP * SLAB >> 4) + s * step_a, db + s * step_b, s != 0);
                    if (s % 2) te_wgmma_commit();
                }
#if BLOCK
                if (v == 0 && slab + 1 < w.slabs) ahead.ask(a.g, 1);
#endif
#if TMA_OUT
                if (v == 0 && slab == begin) out.begin(row, col, w.split);
#endif
                te_wgmma_wait<1>();
                set_busy(0);
                te_wgmma_wait<0>();
                te_wgmma_keep(part);
                if (!B_1D && (v == SUMS - 1 || !w.tall(row))) release(ring.slot);
#if BLOCK
                te_add_scaled(acc[v], part, now.of_rows + 2 * v, now.of_tile, of_columns);
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
            if (!w.tall(row)) {
                te_wgmma_fence();
#pragma unroll
                for (int s = 0; s < 4; s++)
                    MULTIPLY(TYPES, FLAGS, acc[0], da + s * step_a, db + s * step_b, (slab | s) != 0);
            } else {
                te_wgmma_fence();
#pragma unroll
                for (int s = 0; s < 4; s++)
#pragma unroll
                    for (int v = 0; v < SUMS; v++)
                        MULTIPLY(TYPES, FLAGS, acc[v], da + v * (STEP * SLAB >> 4) + s * step_a, db + s * step_b,
                                 (slab | s) != 0);
            }
            te_wgmma_commit();
#if TMA_OUT
            if (slab == begin) out.begin(row, col, w.split);
#endif
            te_wgmma_wait<1>(); // the product of the slab before has ended
            if (slab) release(ring.before());
#endif
        }
#if !PROMOTE
        if (PINGPONG) te_meet_later<256>(4 - group);
        te_wgmma_wait<0>();
#pragma unroll
        for (int v = 0; v < SUMS; v++) te_wgmma_keep(acc[v]);
        release(ring.before());
#endif
#if TMA_OUT
        out.finish(acc, row, col, w.split);
#else
        te__gemm_kargs e = a.g;
        // sets these fields to what the options say, so that the compiler knows their values
        e.d_dt = D_DT, e.epilogue = STORE & 4 ? TE_EPILOGUE_GELU : STORE & 16 ? TE_EPILOGUE_DGELU : TE_EPILOGUE_NONE;
        if (!(STORE & 2)) e.bias = NULL;
        if (!(STORE & 24)) e.aux = NULL;
        if (!(STORE & 32)) e.accumulate = 0;
        if (!(STORE & 128)) e.rows_a = e.columns_b = 0;
        float scale = te_gemm_scale(a.g, w.group);
        if (GROUPED) e.m = w.rows_end;
        if (GROUPED == 2) e.d = (void *)te_gemm_at(e.d, w.group * a.g.groups.b_elements, e.d_dt);
        if (GROUPED == 1 && e.bias) e.bias = te_gemm_at(e.bias, w.group * e.n, e.bias_dt);
        // A warp stores its 16 rows of an accumulator in parts. A part fills one te_gemm_stage. The parts form a grid
        // of DOWN rows and ACROSS columns.
        const int ACROSS = WN / COLUMNS, DOWN = COLUMNS == 128 ? 2 : 1;
        te_gemm_stage<COLUMNS> stage = {(float *)(base + STAGES * SLOT + warp * te_gemm_stage<COLUMNS>::BYTES)};
#pragma unroll 1
        // The outer loop is not unrolled, so that the store's code exists once. The inner loop is unrolled, because an
        // index at run time cannot choose a register.
        for (int part = 0; part < SUMS * ACROSS * DOWN; part++) {
#pragma unroll
            for (int p = 0; p < SUMS * ACROSS * DOWN; p++)
                if (p == part) {
#pragma unroll
                    for (int j = 0; j < COLUMNS / 8; j++)
                        stage.put(8 * j, &acc[p / DOWN / ACROSS][p / DOWN % ACROSS * (COLUMNS / 2) + 4 * j], p % DOWN);
                }
            int rows_on = part / DOWN / ACROSS * STEP + part % DOWN * 8, columns_on = part / DOWN % ACROSS * COLUMNS;
            stage.finish(e, scale, row + warp % 4 * 16 + rows_on, col + columns_on);
        }
#endif
    }
#if TMA_OUT
    if (out.leader) te_bulk_wait_read<0>(); // shared memory ends with the block
#endif
    for (int i = 0; i < (CLUSTER > 1 && B_1D ? STAGES : 0); i++, ring.next())
        te_mbar_wait(empty + 8 * ring.slot, ring.parity ^ 1);
}
