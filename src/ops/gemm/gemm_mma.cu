// ops/gemm/gemm_mma.cu: computes D = epilogue(scale_a scale_b op(A) op(B) + bias) + D with mma.sync (sm_80 and later).
//
//            BN
//       +----+----+
//    BM | w0 | w1 |  ...
//       +----+----+
//       | w2 | w3 |  ...
//       +----+----+
//
// A block computes a tile of D of BM x BN elements. Each of its warps computes WM x WN elements of the tile.
//
// A and B are copied to shared memory in slabs of 64 bytes of k. There are four slots for slabs. While slab s is
// multiplied, cp.async copies slab s + 3. Operands that are not ALIGNED go through registers instead of cp.async.
//
// Operands of 16 or 32 bits may be K-major or MN-major. FP8 operands are K-major.
//
// Within each row of a slot, pieces of 16 bytes are permuted to avoid bank conflicts.
//
// The tensor cores multiply bf16, f16, or f32 rounded to TF32. On sm_89 and sm_120 they also multiply FP8. On other
// GPUs FP8 is decoded exactly into f16.
//
// With block scales, the sum over each two slabs (128 values of k) is scaled, and added up in f32.
//
// Options:
//          A_DT, B_DT  te_dtypes of the same size
//          A_T, B_T    1: A is stored as k x m; 1: B is stored as n x k
//          TILE        0 to 3, see the table
//          ALIGNED     1: A, B and their rows start at multiples of 16 bytes
//          PROMOTE     1: in FP8, the sums of each 128 values of k are added up in f32
//          BLOCK       te__gemm_block_kind, for FP8; 0 if left out
//          GROUPED     1: te_op_grouped_gemm in both forms. groups.cuh finds the group and the tile of a block;
//                      the rest is an ordinary product. 0 if left out
//
// Launch: grid (tiles, splits). Split s multiplies k from s * k_split on, and writes to D + s * d_split. With BLOCK,
// k_split is a multiple of 128. With GROUPED there is one split, and `tiles` is the largest possible number of tiles.
//
// Block and shared memory follow from TILE:
//
//          TILE   BM x BN     warps of      block   shared
//          0      64 x 64     32 x 32       128     32 KB
//          1      128 x 128   64 x 64       128     64 KB
//          2      128 x 256   64 x 64       256     96 KB
//          3      128 x 128   64 x 32       256     64 KB
//
// Products with f32, PROMOTE, BLOCK or ALIGNED = 0 need more registers than TILE 1 and 2 have. TILE 3 is for them.
// te:arch 80
// te:row A_DT=3 B_DT=3 A_T=0 B_T=0|1 TILE=1 ALIGNED=1 PROMOTE=0 GROUPED=0|1
// te:row A_DT=3 B_DT=3 A_T=1 B_T=0 TILE=2 ALIGNED=1 PROMOTE=0 GROUPED=0|1
// te:row A_DT=2 B_DT=2 A_T=1 B_T=1 TILE=0 ALIGNED=1 PROMOTE=0
// te:row A_DT=2 B_DT=2 A_T=0 B_T=1 TILE=3 ALIGNED=0 PROMOTE=0
// te:row A_DT=1 B_DT=1 A_T=0 B_T=1 TILE=3 ALIGNED=1 PROMOTE=0 GROUPED=0|1
// te:row A_DT=1 B_DT=1 A_T=1 B_T=0 TILE=3 ALIGNED=0 PROMOTE=0
// te:row A_DT=4 B_DT=4 A_T=0 B_T=1 TILE=1|2 ALIGNED=1 PROMOTE=0 GROUPED=0|1
// te:row A_DT=5 B_DT=4 A_T=0 B_T=1 TILE=3 ALIGNED=0|1 PROMOTE=1 GROUPED=1
// te:row A_DT=4 B_DT=4 A_T=0 B_T=1 BLOCK=2 TILE=3 ALIGNED=1 PROMOTE=0 GROUPED=0|1
// te:row A_DT=5 B_DT=4 A_T=0 B_T=1 BLOCK=1|3 TILE=3 ALIGNED=0|1 PROMOTE=0
// te:row A_DT=4 B_DT=4 A_T=0 B_T=1 BLOCK=1 TILE=3 ALIGNED=0 PROMOTE=0 GROUPED=1
// te:row A_DT=4 B_DT=5 A_T=0 B_T=1 BLOCK=0|1 TILE=0 ALIGNED=0 PROMOTE=0|1
#include "device/mma.cuh"
#include "ops/gemm/groups.cuh"
#include "ops/gemm/shift.cuh"

#ifndef BLOCK
#define BLOCK 0
#endif
#ifndef GROUPED
#define GROUPED 0
#endif

#if TILE == 0
#define BM 64
#define BN 64
#define WM 32
#define WN 32
#else
#define BM 128
#define BN (TILE == 2 ? 256 : 128)
#define WM 64
#define WN (TILE == 3 ? 32 : 64)
#endif
#define STAGES 4
#define THREADS (BM / WM * (BN / WN) * 32)
#define MI (WM / 16) // fragments of a warp's tile
#define NI (WN / 8)

#define SIZE (A_DT == TE_F32 ? 4 : A_DT >= TE_F8E4M3 ? 1 : 2) // bytes of an element
#define FP8 (A_DT == 4 || A_DT == 5) // numbers of te_dtype, whose names the preprocessor does not know
#define SLAB 64           // bytes of k
#define BK (SLAB / SIZE)  // elements of k
#define SLOT ((BM + BN) * SLAB)
// FP8 tensor cores accumulate with less precision than f32. So their sums over 128 values of k are added up in f32.
// Other GPUs turn FP8 codes into f16, whose products are summed in f32 anyway.
#define PROMOTING (BLOCK || (PROMOTE && TE_HAS_FP8_MMA))
static_assert(TILE == 0 || TILE == 3 || (SIZE != 4 && ALIGNED && !PROMOTING), "registers");
static_assert(!FP8 || (!A_T && B_T), "fp8 operands are k-major");
static_assert(FP8 || !BLOCK, "blocks of fp8");

// ---- device to shared memory ----------------------------------------------------------------------------------------

// Returns where piece `piece` (16 bytes) of row `row` begins in a slab. The permutation avoids bank conflicts.
//
// K-major: a row has four pieces. Two rows fill all banks.
// MN-major: a row has R elements. Eight rows of 16-bit elements, or four rows of 32-bit elements, are read at a time.
template <int R, int K_MAJOR> TE_DEV te_u32 te_piece(int row, int piece) {
    if (K_MAJOR) return (te_u32)(row * SLAB + ((piece ^ ((row >> 1) & 3)) << 4));
    return (te_u32)(row * R * SIZE + ((piece ^ (SIZE == 2 ? row & 7 : (row & 3) << 1)) << 4));
}

// One thread's copies of an operand to shared memory: PIECES pieces of 16 bytes of each slab, STEP rows apart.
template <int R, int K_MAJOR> struct te_copier {
    enum {
        PER_ROW = K_MAJOR ? SLAB / 16 : R * SIZE / 16, // pieces
        STEP = THREADS / PER_ROW,
        PIECES = R * SLAB / 16 / THREADS
    };
    const char *base, *at, *end; // base: the operand; at: this thread's first piece of the next slab; end: end of the
                                 // operand
    te_i64 ld, k_left;     // ld: bytes from row to row; k_left: k left from this thread's first piece on, in bytes
                           // (K-major) or rows
    int valid;             // K-major: bit i is set if row i exists. Else: bytes of the piece that exist
    te_u32 to;
    te_part part[PIECES];

    TE_DEV void begin(const void *operand, te_i64 ld_elements, te_i64 row0, te_i64 rows, te_i64 k0, te_i64 k1) {
        int piece = threadIdx.x % PER_ROW, row = threadIdx.x / PER_ROW;
        base = (const char *)operand;
        ld = ld_elements * SIZE;
        end = base + (K_MAJOR ? (rows - 1) * ld + k1 * SIZE : (k1 - 1) * ld + rows * SIZE);
        to = te_piece<R, K_MAJOR>(row, piece);
        if (K_MAJOR) {
            at = base + (row0 + row) * ld + k0 * SIZE + piece * 16;
            k_left = (k1 - k0) * SIZE - piece * 16;
            valid = 0;
#pragma unroll
            for (int i = 0; i < PIECES; i++) valid |= (row0 + row + i * STEP < rows) << i;
        } else {
            te_i64 left = (rows - row0) * SIZE - piece * 16;
            at = base + (k0 + row) * ld + row0 * SIZE + piece * 16;
            k_left = k1 - k0 - row;
            valid = left >= 16 ? 16 : left > 0 ? (int)left : 0;
        }
    }

    // Starts the copy of a slab. Operands that are not ALIGNED are loaded into registers, for put().
    TE_DEV void ask(te_u32 slot) {
#pragma unroll
        for (int i = 0; i < PIECES; i++) {
            const char *from = at + i * STEP * ld;
            int bytes = !K_MAJOR                           ? (i * STEP < k_left ? valid : 0)
                        : !(valid >> i & 1) || k_left <= 0 ? 0
                        : k_left < 16                      ? (int)k_left
                                                           : 16;
            if (ALIGNED) te_cp_async16(slot + to_of(i), bytes ? from : base, bytes);
            else part[i].ask((const te_u8 *)from, 8 * bytes, (const te_u8 *)end);
        }
        at += K_MAJOR ? SLAB : BK * ld;
        k_left -= K_MAJOR ? SLAB : BK;
    }
    TE_DEV void put(te_u32 slot) const {
#pragma unroll
        for (int i = 0; i < PIECES && !ALIGNED; i++) te_sts16(slot + to_of(i), part[i].get());
    }
    // STEP is a multiple of the permutation's period in te_piece.
    TE_DEV te_u32 to_of(int i) const { return to + (te_u32)(i * STEP * (K_MAJOR ? SLAB : R * SIZE)); }
};

// ---- shared memory to fragments -------------------------------------------------------------------------------------

// Loads the fragments of A for rows row .. row + 15 of the tile, and for the first (half = 0) or second half of the
// slab.
TE_DEV void te_load_a(te_u32 a[4], te_u32 slot, int row, int half) {
    int lane = threadIdx.x & 31;
    if (!A_T) {
        te_ldmatrix4(a, slot + te_piece<BM, 1>(row + (lane & 15), 2 * half + (lane >> 4)));
    } else if (SIZE == 2) {
        te_ldmatrix4_trans(a,
                           slot + te_piece<BM, 0>(16 * half + (lane & 7) + (lane >> 4) * 8, row / 8 + (lane >> 3 & 1)));
    } else {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int k = 8 * half + (lane & 3) + (i >> 1) * 4, m = row + (lane >> 2) + (i & 1) * 8;
            a[i] = te_lds4(slot + te_piece<BM, 0>(k, m / 4) + (te_u32)(m % 4 * 4));
        }
    }
    if (SIZE == 4) {
#pragma unroll
        for (int i = 0; i < 4; i++) a[i] = te_tf32(a[i]);
    }
}

// Loads columns col .. col + 15 of B. b[0] and b[1] hold the first eight columns, b[2] and b[3] the last eight.
TE_DEV void te_load_b(te_u32 b[4], te_u32 slot, int col, int half) {
    int lane = threadIdx.x & 31;
    if (B_T) {
        te_ldmatrix4(b, slot + te_piece<BN, 1>(col + (lane & 7) + (lane >> 4) * 8, 2 * half + (lane >> 3 & 1)));
    } else if (SIZE == 2) {
        te_ldmatrix4_trans(b, slot + te_piece<BN, 0>(16 * half + (lane & 15), col / 8 + (lane >> 4)));
    } else {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int k = 8 * half + (lane & 3) + (i & 1) * 4, n = col + (lane >> 2) + (i >> 1) * 8;
            b[i] = te_lds4(slot + te_piece<BN, 0>(k, n / 4) + (te_u32)(n % 4 * 4));
        }
    }
    if (SIZE == 4) {
#pragma unroll
        for (int i = 0; i < 4; i++) b[i] = te_tf32(b[i]);
    }
}

struct te_fragments {
    te_u32 a[MI][4], b[NI / 2][4];

    TE_DEV void load(te_u32 slot, int half) {
        int warp = threadIdx.x >> 5, row = warp / (BN / WN) * WM, col = warp % (BN / WN) * WN;
#pragma unroll
        for (int i = 0; i < MI; i++) te_load_a(a[i], slot, row + 16 * i, half);
#pragma unroll
        for (int j = 0; j < NI / 2; j++) te_load_b(b[j], slot + BM * SLAB, col + 16 * j, half);
    }
};

// ---- fragments to accumulators --------------------------------------------------------------------------------------

// Adds A B over 32 bytes of k to acc.
TE_DEV void te_multiply(float acc[MI][NI][4], const te_fragments &f) {
#if FP8 && !TE_HAS_FP8_MMA
    // A word has four FP8 codes, but mma.sync of f16 takes two values a word. So the lower two codes of each word go to
    // one mma.sync, and the upper two to another. This changes the order of k, but in A and B alike.
#pragma unroll
    for (int half = 0; half < 2; half++) {
        te_u32 bh[NI][2];
#pragma unroll
        for (int j = 0; j < NI; j++)
#pragma unroll
            for (int w = 0; w < 2; w++) bh[j][w] = te_fp8x2_to_f16(f.b[j / 2][j % 2 * 2 + w], half, B_DT);
#pragma unroll
        for (int i = 0; i < MI; i++) {
            te_u32 ah[4];
#pragma unroll
            for (int w = 0; w < 4; w++) ah[w] = te_fp8x2_to_f16(f.a[i][w], half, A_DT);
#pragma unroll
            for (int j = 0; j < NI; j++) te_mma_f16(acc[i][j], ah, bh[j]);
        }
    }
#else
#pragma unroll
    for (int i = 0; i < MI; i++)
#pragma unroll
        for (int j = 0; j < NI; j++) {
            const te_u32 *b = &f.b[j / 2][j % 2 * 2];
#if FP8
            if (A_DT == TE_F8E5M2)
                te_mma_e5m2_e4m3(acc[i][j], f.a[i], b);
            else if (B_DT == TE_F8E5M2)
                te_mma_e4m3_e5m2(acc[i][j], f.a[i], b);
            else
                te_mma_e4m3_e4m3(acc[i][j], f.a[i], b);
#else
            if (A_DT == TE_F32)
                te_mma_tf32(acc[i][j], f.a[i], b);
            else if (A_DT == TE_F16)
                te_mma_f16(acc[i][j], f.a[i], b);
            else
                te_mma_bf16(acc[i][j], f.a[i], b);
#endif
        }
#endif
}

// ---- sums of 128 k to sums of all -----------------------------------------------------------------------------------

#define A_2D (BLOCK == 3) // numbers of te__gemm_block_kind
#define B_2D (BLOCK == 2)

// The block scales of this thread's rows and columns:
//
// a[2 i], a[2 i + 1]  rows g and g + 8 of fragment i
// b[2 j + c]          column 2 t + c of fragment j
//
// A tile lies within one 2-D block. The block's scale is multiplied into the scales of the other operand.
struct te_block_scales {
    float a[2 * MI], b[2 * NI];

    TE_DEV void load(const te__gemm_kargs &k, te_i64 row, te_i64 col, te_i64 block) {
        int g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
        float of_a = A_2D ? te_gemm_block_scale(k.block_a, 1, k.ld_block_a, row, block) : 1.0f;
        float of_b = B_2D ? te_gemm_block_scale(k.block_b, 1, k.ld_block_b, col, block) : 1.0f;
#pragma unroll
        for (int i = 0; i < 2 * MI && !A_2D; i++) {
            te_i64 at = row + 8 * i + g;
            float s = te_gemm_block_scale(k.block_a, 0, k.ld_block_a, at < k.m ? at : k.m - 1, block);
            a[i] = B_2D ? te_gemm_block_product(s, of_b) : s;
        }
#pragma unroll
        for (int j = 0; j < 2 * NI && !B_2D; j++) {
            te_i64 at = col + j / 2 * 8 + 2 * t + j % 2;
            float s = te_gemm_block_scale(k.block_b, 0, k.ld_block_b, at < k.n ? at : k.n - 1, block);
            b[j] = A_2D ? te_gemm_block_product(s, of_a) : s;
        }
    }
    // Returns acc plus `part` times its block scales. `part` is element e of fragment (i, j).
    TE_DEV float add(float acc, float part, int i, int j, int e) const {
        if (BLOCK == 1) return fmaf(part * a[2 * i + e / 2], b[2 * j + e % 2], acc);
        return fmaf(part, A_2D ? b[2 * j + e % 2] : a[2 * i + e / 2], acc);
    }
};

// ---- the kernel -----------------------------------------------------------------------------------------------------

extern "C" __global__ void __launch_bounds__(THREADS, TILE < 2 ? 2 : 1)
    te_gemm_mma(const __grid_constant__ te__gemm_kargs all) {
    te_follow();
    te__gemm_kargs a = all;
    te_u32 tile = blockIdx.x;
    if (GROUPED && !te_group_open(all, BM, BN, tile, a)) return;
    extern __shared__ __align__(128) char shared[];
    te_u32 tm, tn;
    te_gemm_raster(tile, (te_u32)te_div_up(a.m, BM), (te_u32)te_div_up(a.n, BN), tm, tn);
    te_i64 row0 = (te_i64)tm * BM, col0 = (te_i64)tn * BN;
    te_i64 k0 = blockIdx.y * a.k_split, k1 = a.k - k0 < a.k_split ? a.k : k0 + a.k_split;
    te_u32 slots = te_smem(shared);
    te_copier<BM, !A_T> copy_a;
    te_copier<BN, B_T> copy_b;
    copy_a.begin(a.a, a.lda, row0, a.m, k0, k1);
    copy_b.begin(a.b, a.ldb, col0, a.n, k0, k1);

    int slabs = (int)te_div_up(k1 - k0, BK), copied = 0;
    auto copy_next = [&](int stage) {
        if (copied++ < slabs) {
            copy_a.ask(slots + stage * SLOT), copy_b.ask(slots + stage * SLOT + BM * SLAB);
            copy_a.put(slots + stage * SLOT), copy_b.put(slots + stage * SLOT + BM * SLAB);
        }
        // After the last slab this commits an empty group of copies. So te_cp_async_wait<STAGES - 2> always waits for
        // the slab that is read next.
        te_cp_async_commit();
    };
    for (int s = 0; s < STAGES - 1; s++) copy_next(s);

    float acc[MI][NI][4] = {};
#if PROMOTING
    float part[MI][NI][4] = {};
#else
    auto &part = acc;
#endif
    int warp = threadIdx.x >> 5;
    te_i64 row = row0 + warp / (BN / WN) * WM, col = col0 + warp % (BN / WN) * WN;
    te_block_scales scales;
    te_fragments f[2];
    te_cp_async_wait<STAGES - 2>();
    __syncthreads();
    f[0].load(slots, 0);
    int stage = 0;
#pragma unroll 1
    for (int slab = 0; slab < slabs; slab++) {
        if (BLOCK && !(slab & 1)) scales.load(a, row, col, (k0 >> 7) + (slab >> 1));
        f[1].load(slots + stage * SLOT, 1);
        copy_next(stage == 0 ? STAGES - 1 : stage - 1); // all readers of that slot have passed the barrier below
        te_multiply(part, f[0]);
        te_cp_async_wait<STAGES - 2>();
        __syncthreads();
        stage = stage == STAGES - 1 ? 0 : stage + 1;
        f[0].load(slots + stage * SLOT, 0); // after the last slab: stale bytes, unused
        te_multiply(part, f[1]);
        if (PROMOTING && (slab & 1 || slab == slabs - 1)) {
#pragma unroll
            for (int i = 0; i < MI * NI * 4; i++) {
                float &sum = acc[i / (NI * 4)][i / 4 % NI][i % 4], &more = part[i / (NI * 4)][i / 4 % NI][i % 4];
                sum = BLOCK ? scales.add(sum, more, i / (NI * 4), i / 4 % NI, i % 4) : sum + more;
                more = 0.0f;
            }
        }
    }
    te_cp_async_wait<0>();
    __syncthreads();

    te_gemm_stage<WN> stage_of_warp = {(float *)(shared + warp * te_gemm_stage<WN>::BYTES)};
    float scale = te_gemm_scale(a);
    if (a.splits > 1) a.d = (float *)a.d + blockIdx.y * a.d_split;
#pragma unroll 1
    // The outer loop is not unrolled, so that the store's code exists once. The inner loop is unrolled, because an
    // index at run time cannot choose a register.
    for (int part = 0; part < MI; part++) {
#pragma unroll
        for (int i = 0; i < MI; i++)
            if (i == part) {
#pragma unroll
                for (int j = 0; j < NI; j++) stage_of_warp.put(8 * j, acc[i][j]);
            }
        stage_of_warp.finish(a, scale, row + 16 * part, col);
    }
}
