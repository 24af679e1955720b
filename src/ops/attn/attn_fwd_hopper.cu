// ops/attn/attn_fwd_hopper.cu: computes O = softmax(scale Q K^T, masked) V on Hopper, in bf16 or f16, with TMA,
// mbarriers and wgmma.
//
//               keys
//            BN   BN
//          +----+----+----
//      wg 1|    |    | ...
//      wg 2|    |    |
//
// A tile has 64 * WAVES queries of one head. Warpgroup 0 is the producer: one thread takes the numbers of tiles from a
// counter, another thread starts all loads. Each other warpgroup is a consumer. It has 64 rows of the tile, with S, P
// and O in registers. Blocks of BN keys go from right to left, so that the first one has the diagonal:
//
//     Q K(n-1), softmax | Q K(n-2) beside P V(n-1), softmax | ... | Q K(first) beside P V, softmax | P V(first), store
//
// Thread blocks are persistent. The loads of the next tile overlap with the products, and so does the store of the
// previous tile.
//
// Shared memory (panels of 64 channels, 128-byte swizzle), for D = D_V = 128 and WAVES = 2:
//
//     | Q, 2 stages | K, 2 stages | V, 2 stages | O     | barriers | tiles |
//     | 64 KB       | 64 KB       | 64 KB       | 32 KB |
//
// A stage of Q has WAVES parts of 64 rows, and so has O. Above 128 channels Q has one stage (STAGES_Q). O shares Q's
// memory (O_IN_Q) above 128 channels, with TILES, and with KEYS above 64 channels.
//
// TILES: each consumer has one or two tiles of the bias, 64 rows by BN keys, where O would be. The producer warpgroup
// has one thread for each consumer, which loads that consumer's tiles by TMA. The consumer reads them by ldmatrix while
// its products run.
//
// KEYS: an additional product adds the bias to S. Its operands, ones and B, lie in front of the barriers, without a
// swizzle. A row of an operand has 16 elements along k, but only the first eight (16 bytes) are stored in the operand.
// The other eight are 0, and both operands read them from one area of zeros. (memcheck of compute-sanitizer assumes 32
// bytes for each row. Even such rows end within shared memory.)
//
//     | ones, 64 rows | B, 2 stages of BN keys | zeros, BN rows |
//
// Each stage has two barriers. X is Q, K, V, T (the description of a tile), or B (the bias of one consumer).
// - FULL_X: the producer arrives and announces how many bytes TMA will bring; the consumers wait.
// - EMPTY_X: each consumer warp arrives (for T each thread that has read the description); the producer waits before it
//   fills the stage again.
// Named barrier 1 + w gives consumer w its turn at the tensor cores (TURNS). At named barrier 8 + w the threads of
// consumer w wait for each other before and after the store of O.
//
// te__attn_seq (sequence.h) says which keys a tile needs. The producer and the consumers each read the block mask, and
// skip its empty blocks. A tile that a packed sequence ends in is stored row by row, others by TMA. Keys beyond a
// sequence may have any content, so their rows of V are cleared.
//
// ALiBi is an additional product, whose operand B has the column numbers (te_line). A bias that all queries share
// (KEYS) is one, too: S += ones B^T. Row j of B has the three parts of key j's bias (attn_bias_line.cu). A block of B
// is loaded with the block of K, to the stage of the same number. Any other bias without TILES is loaded to registers
// before the products. Dropout's bits set elements of P to 0 after P is packed.
//
// Options:
// - X_DT, X_D, X_D_V: see hopper.cuh.
// - X_WAVES: 2, 3. 3 allows only X_ALIBI of hopper_scores.cuh.
// - X_TILES: 1: a bias of 16 bits that TMA can read, with X_PAIRS = 1.
// - X_KEYS: 1: a bias that all queries share, without X_BIAS.
// - All of hopper_scores.cuh and hopper_dropout.cuh.
//
// Launch:
// - Any number of blocks of 128 (WAVES + 1) threads.
// - Shared memory: TE__ATTN_FWD_SHARED, or TE__ATTN_BIAS_SHARED with X_TILES, or TE__ATTN_KEYS_SHARED with X_KEYS; with
//   ALiBi TE__ATTN_LINE_BYTES more.
// - Maps: boxes of 64 channels. q and o have 64 rows, k and v BN rows.
// - Map of the bias: boxes of 64 rows by 64 keys. If the bias is the same for all heads or sequences, this dimension
//   has size 1.
// - Addresses and strides of q, k, v and o are multiples of 16 bytes, d and d_v of 8; scale > 0.
// te:arch 90a
// te:row X_DT=3 X_D=64 X_D_V=64 X_WAVES=2|3 X_DROPOUT=0|1
// te:row X_DT=3 X_D=96 X_D_V=96 X_WAVES=2 X_DROPOUT=0|1
// te:row X_DT=2|3 X_D=128 X_D_V=128 X_WAVES=2 X_DROPOUT=0|1|2
// te:row X_DT=3 X_D=192 X_D_V=128|192 X_WAVES=2 X_DROPOUT=0|1
// te:row X_DT=3 X_D=256 X_D_V=256 X_WAVES=2 X_DROPOUT=0|1
// te:row X_DT=3 X_D=64 X_D_V=64 X_WAVES=3 X_DROPOUT=0 X_ALIBI=1
// te:row X_DT=3 X_D=128 X_D_V=128 X_WAVES=2 X_DROPOUT=0|1 X_ALIBI=1
// te:row X_DT=3 X_D=128 X_D_V=128 X_WAVES=2 X_DROPOUT=0 X_BIAS=1|3 X_PAIRS=0|1|2
// te:row X_DT=3 X_D=256 X_D_V=256 X_WAVES=2 X_DROPOUT=0 X_BIAS=3 X_PAIRS=1
// te:row X_DT=2 X_D=128 X_D_V=128 X_WAVES=2 X_DROPOUT=0 X_BIAS=2 X_PAIRS=1 X_TILES=1
// te:row X_DT=3 X_D=64 X_D_V=64 X_WAVES=2 X_DROPOUT=0 X_BIAS=3 X_PAIRS=1 X_TILES=1
// te:row X_DT=3 X_D=128 X_D_V=128 X_WAVES=2 X_DROPOUT=0|1 X_BIAS=3 X_PAIRS=1 X_TILES=1
// te:row X_DT=3 X_D=192 X_D_V=192 X_WAVES=2 X_DROPOUT=0 X_BIAS=3 X_PAIRS=1 X_TILES=1
// te:row X_DT=3 X_D=256 X_D_V=256 X_WAVES=2 X_DROPOUT=0 X_BIAS=3 X_PAIRS=1 X_TILES=1
// te:row X_DT=3 X_D=64 X_D_V=64 X_WAVES=2 X_DROPOUT=0|1 X_KEYS=1
// te:row X_DT=2|3 X_D=128 X_D_V=128 X_WAVES=2 X_DROPOUT=0|1 X_KEYS=1
// te:row X_DT=3 X_D=192 X_D_V=128|192 X_WAVES=2 X_DROPOUT=0 X_KEYS=1
// te:row X_DT=3 X_D=256 X_D_V=256 X_WAVES=2 X_DROPOUT=0 X_KEYS=1
// te:row X_DT=3 X_D=128 X_D_V=128 X_WAVES=2 X_DROPOUT=0 X_KEYS=1 X_BLOCKS=1
// te:row X_DT=3 X_D=128 X_D_V=128 X_WAVES=2 X_DROPOUT=0 X_KEYS=1 X_MOD=3 X_MASK=1
// te:row X_DT=3 X_D=128 X_D_V=128 X_WAVES=2 X_DROPOUT=0 X_MASK=1
// te:row X_DT=3 X_D=128 X_D_V=128 X_WAVES=2 X_DROPOUT=0 X_MOD=1|2|3
// te:row X_DT=3 X_D=64 X_D_V=64 X_WAVES=2 X_DROPOUT=0 X_CAP=1
// te:row X_DT=3 X_D=128 X_D_V=128 X_WAVES=2 X_DROPOUT=1 X_CAP=1
// te:spills 32 X_DT=3 X_D=128 X_D_V=128 X_WAVES=2 X_DROPOUT=0 X_CAP=1
// te:row X_DT=3 X_D=128 X_D_V=128 X_WAVES=2 X_DROPOUT=0 X_CAP=1 X_MOD=3
// te:row X_DT=3 X_D=256 X_D_V=256 X_WAVES=2 X_DROPOUT=0 X_CAP=1
// te:row X_DT=3 X_D=128 X_D_V=128 X_WAVES=2 X_DROPOUT=0 X_BLOCKS=1
// te:row X_DT=3 X_D=128 X_D_V=128 X_WAVES=2 X_DROPOUT=0 X_BLOCKS=1 X_MOD=3
// te:row X_DT=3 X_D=256 X_D_V=256 X_WAVES=2 X_DROPOUT=0 X_BLOCKS=1
#include "ops/attn/hopper_dropout.cuh"

#ifndef X_TILES
#define X_TILES 0
#endif
#ifndef X_KEYS
#define X_KEYS 0
#endif
enum {
    TILES = X_TILES,
    KEYS = X_KEYS,
    D = X_D,
    D_V = X_D_V,
    WAVES = X_WAVES,
    BM = 64 * WAVES,
    BN = TE__ATTN_FWD_KEYS(X_D, X_D_V),
    STAGES_Q = TE__ATTN_FWD_STAGES_Q(X_D, X_D_V, X_WAVES),
    TURNS = WAVES == 3,
    // true: one loop handles all blocks of keys. Two loops would need too much code or too many registers.
    ONE_LOOP = HIDES || (BIAS && (!TILES || D > 192)) || BLOCKS || (DROPOUT && (D > 128 || DROPOUT == 2)) ||
        CAP,
    THREADS = 128 * (WAVES + 1),
    PART_Q = TE__ATTN_BYTES(64, X_D), // bytes of a consumer's rows of Q
    PART_O = TE__ATTN_BYTES(64, X_D_V),
    PART_LINE = TE__ATTN_LINE_BYTES(X_D) + 256, // ALiBi's columns, then barriers and descriptions of tiles
    BYTES_K = TE__ATTN_BYTES(BN, X_D),
    BYTES_V = TE__ATTN_BYTES(BN, X_D_V),
    AT_Q = 0,
    AT_K = AT_Q + STAGES_Q * WAVES * PART_Q,
    AT_V = AT_K + 2 * BYTES_K,
    O_IN_Q = STAGES_Q == 1 || TILES || (KEYS && D > 64),
    STAGES_B = TE__ATTN_BIAS_STAGES(X_D, X_D_V, X_WAVES),
    TILE_B = TE__ATTN_BIAS_TILE(X_D, X_D_V),
    AT_LINE = AT_V + 2 * BYTES_V + (KEYS && !O_IN_Q ? WAVES * PART_O : 0),
    AT_O = O_IN_Q ? AT_Q
    : KEYS        ? AT_V + 2 * BYTES_V
                  : AT_LINE + (ALIBI ? PART_LINE : 0), // if O_IN_Q: in Q's first stage
    AT_B = AT_V + 2 * BYTES_V,
    AT_ONES = AT_LINE, // KEYS: operand A
    LINE_B = 16 * BN, // bytes of a stage of operand B: its first eight elements along k
    AT_LINES = AT_ONES + 64 * 16,
    AT_ZEROS = AT_LINES + 2 * LINE_B, // the other eight elements along k of both A and B
    AT_BARRIERS = KEYS ? AT_ZEROS + LINE_B
    : ALIBI            ? AT_LINE + te_line::bytes(BN)
                       : AT_V + 2 * BYTES_V +
                             (TILES    ? WAVES * STAGES_B * TILE_B
                              : O_IN_Q ? 0
                                       : WAVES * PART_O),
    AT_TILES = AT_BARRIERS + (TILES ? 24 : 16) * 8,
    SHARED = !ALIBI ? AT_TILES + 2 * 64 : AT_LINE + PART_LINE + (O_IN_Q ? 0 : WAVES * PART_O),
    PART_STORE = O_IN_Q ? PART_Q : PART_O // bytes from one consumer's rows of O to the next consumer's
};
static_assert(SHARED == (TILES ? TE__ATTN_BIAS_SHARED(X_D, X_D_V, X_WAVES)
                               : (KEYS ? TE__ATTN_KEYS_SHARED(X_D, X_D_V, X_WAVES)
                                       : TE__ATTN_FWD_SHARED(X_D, X_D_V, X_WAVES)) +
                                     (ALIBI ? TE__ATTN_LINE_BYTES(X_D) : 0)) &&
                  SHARED <= TE__ATTN_SHARED_MAX,
              "what the host asks for");
static_assert(!KEYS || (!BIAS && !TILES && !ALIBI), "a bias excludes ALiBi");
static_assert(!ALIBI || ((int)AT_TILES + 2 * 64 <= AT_LINE + PART_LINE && (!O_IN_Q || 32 * BN <= PART_LINE)),
              "memcheck takes the columns' numbers for 32 bytes of each");
static_assert(!TILES || (WAVES == 2 && PAIRS == 1 && BIAS != TE_F32),
              "a producer's warp for each consumer, and words of pairs");
static_assert(!BLOCKS || (BM == TE_ATTN_BLOCK_SIZE && TE_ATTN_BLOCK_SIZE % BN == 0),
              "a tile, and its keys, lie in one block of a block mask");
enum {
    FULL_Q = 0,
    EMPTY_Q = 2,
    FULL_K = 4,
    EMPTY_K = 6,
    FULL_V = 8,
    EMPTY_V = 10,
    FULL_T = 12,
    EMPTY_T = 14,
    FULL_B = 16,
    EMPTY_B = 20
};

typedef te_attn_tile<BM, BN, BIAS || KEYS> te_q_tile;

// Takes the numbers of tiles from a counter, and describes each tile to the other threads. One thread runs this
// function.
TE_DEV void te_schedule(const te__attn_fwd_hopper_kargs &a, te_u32 smem) {
    const te_u32 bar = smem + AT_BARRIERS;
    te_queue<2> turn;
    bool more = true;
    for (te_u32 number = blockIdx.x; more; turn.next()) {
        te_q_tile t = {};
        do { // skips tiles after the end of a packed sequence
            more = number < (te_u32)a.order.tiles;
            if (!more) break;
            t.find(a, number);
            number = atomicAdd(a.order.counter, 1u) + gridDim.x;
        } while (t.row >= t.q_end);
        te_mbar_wait(bar + 8 * (EMPTY_T + turn.stage), turn.parity ^ 1);
        t.tell(smem + AT_TILES + 64 * turn.stage, more);
        te_mbar_arrive(bar + 8 * (FULL_T + turn.stage));
    }
    // atomicInc counts the thread blocks that have found no more tiles. The last such block sets the counter of tiles
    // to 0 for the next launch.
    if (atomicInc(a.order.counter + 1, gridDim.x - 1) == gridDim.x - 1) a.order.counter[0] = 0;
}

TE_DEV void te_load_tiles(const te__attn_fwd_hopper_kargs &a, te_u32 smem) {
    const te_u32 bar = smem + AT_BARRIERS;
    te_queue<2> k, v, turn;
    te_queue<STAGES_Q> q;
    auto load = [&](const void *map, int full, int empty, te_u32 to, int bytes, int panels, te_queue<2> &at, int row,
                    int head, int batch, const char *line = 0) {
        te_mbar_wait(bar + 8 * (empty + at.stage), at.parity ^ 1);
        te_mbar_expect(bar + 8 * (full + at.stage), bytes + (KEYS && line ? LINE_B : 0));
        if (KEYS && line) te_bulk_load(smem + AT_LINES + at.stage * LINE_B, line, LINE_B, bar + 8 * (full + at.stage));
        for (int i = 0; i < panels; i++)
            te_tma_load4(to + at.stage * bytes + i * BN * 128, map, 64 * i, row, head, batch,
                         bar + 8 * (full + at.stage));
        at.next();
    };
    auto load_v = [&](int row, int head, int batch) {
        load(a.v_map, FULL_V, EMPTY_V, smem + AT_V, BYTES_V, te_panels(D_V), v, row, head, batch);
    };
    // The block of V that is still to load. If `row` is -1, there is none. The next block of K is usually loaded before
    // it, even if that block of K belongs to the next tile.
    int row = -1, head = 0, batch = 0;
    for (;;) {
        te_q_tile t;
        te_mbar_wait(bar + 8 * (FULL_T + turn.stage), turn.parity);
        const bool more = t.template hear<false>(smem + AT_TILES + 64 * turn.stage);
        te_mbar_arrive(bar + 8 * (EMPTY_T + turn.stage));
        turn.next();
        if (!more) break;
        // Consumers need the block of V at `row` before they release Q, and before they begin a tile without keys.
        if (row >= 0 && (STAGES_Q == 1 || t.begin >= t.end)) {
            load_v(row, head, batch);
            row = -1;
        }
        if (t.begin >= t.end) { // consumers store zeros, with O_IN_Q to an empty stage of Q
            if (O_IN_Q) {
                te_mbar_wait(bar + 8 * (EMPTY_Q + q.stage), q.parity ^ 1);
                te_mbar_arrive(bar + 8 * (FULL_Q + q.stage));
                q.next();
            }
            continue;
        }
        const int batch_q = a.a.x.packed_q ? 0 : t.batch, batch_kv = a.a.x.packed_kv ? 0 : t.batch,
                  group = t.head / (a.a.heads / a.a.groups);
        te_mbar_wait(bar + 8 * (EMPTY_Q + q.stage), q.parity ^ 1);
        te_mbar_expect(bar + 8 * (FULL_Q + q.stage), WAVES * PART_Q);
        for (int w = 0; w < WAVES; w++)
            for (int i = 0; i < te_panels(D); i++)
                te_tma_load4(smem + AT_Q + (q.stage * WAVES + w) * PART_Q + i * 8192, a.q_map, 64 * i,
                             t.q_at + t.row + 64 * w, t.head, batch_q, bar + 8 * (FULL_Q + q.stage));
        q.next();
        const te_u8 *const blocks = BLOCKS ? te_blocks_of(a.a, t.batch, t.head, t.row) : 0;
        const char *const line = KEYS ? (const char *)a.line.p + 16 * (t.batch * a.line.b + t.head * a.line.h) : 0;
        for (int n = t.end - 1; n >= t.begin; n = BLOCKS ? te_last_seen<BN>(blocks, t.begin, n) : n - 1) {
            load(a.k_map, FULL_K, EMPTY_K, smem + AT_K, BYTES_K, te_panels(D), k, t.kv_at + n * BN, group, batch_kv,
                 KEYS ? line + (te_i64)n * LINE_B : 0);
            if (row >= 0) load_v(row, head, batch);
            row = t.kv_at + n * BN, head = group, batch = batch_kv;
        }
    }
    if (row >= 0) load_v(row, head, batch);
}

// Loads the tiles of the bias for consumer w. One thread runs this function.
TE_DEV void te_load_bias(const te__attn_fwd_hopper_kargs &a, te_u32 smem, int w) {
    const te_u32 bar = smem + AT_BARRIERS;
    te_queue<2> turn;
    te_queue<STAGES_B> b;
    for (;;) {
        te_q_tile t;
        te_mbar_wait(bar + 8 * (FULL_T + turn.stage), turn.parity);
        const bool more = t.template hear<false>(smem + AT_TILES + 64 * turn.stage);
        te_mbar_arrive(bar + 8 * (EMPTY_T + turn.stage));
        turn.next();
        if (!more) return;
        const int row = t.row + 64 * w, head = a.a.x.bias.h ? t.head : 0, batch = a.a.x.bias.b ? t.batch : 0;
        const te_u8 *const blocks = BLOCKS && t.begin < t.end ? te_blocks_of(a.a, t.batch, t.head, t.row) : 0;
        for (int n = t.end - 1, below; n >= t.begin; n = below) {
            const int at = w * STAGES_B + b.stage;
            below = BLOCKS ? te_last_seen<BN>(blocks, t.begin, n) : n - 1;
            // prefetched one iteration early
            if (below >= t.begin)
                for (int i = 0; i < te_panels(BN); i++)
                    te_tma_prefetch4(a.bias_map, below * BN + 64 * i, row, head, batch);
            te_mbar_wait(bar + 8 * (EMPTY_B + at), b.parity ^ 1);
            te_mbar_expect(bar + 8 * (FULL_B + at), TILE_B);
            for (int i = 0; i < te_panels(BN); i++)
                te_tma_load4(smem + AT_B + at * TILE_B + i * 8192, a.bias_map, n * BN + 64 * i, row, head, batch,
                             bar + 8 * (FULL_B + at));
            b.next();
        }
    }
}

// Writes -inf to S where a row does not see a key of block `block`. `row` is the thread's upper row; the lower one is 8
// below.
TE_DEV void te_hide(float (&s)[BN / 2], const te_q_tile &t, int row, int block) {
    const int column = block * BN + 2 * (threadIdx.x & 3), last = t.s_kv - 1 - column;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int from = row + 8 * half + t.lo - column, to = min(row + 8 * half + t.hi - column, last);
#pragma unroll
        for (int j = 0; j < BN / 8; j++)
#pragma unroll
            for (int e = 0; e < 2; e++)
                if (8 * j + e < from || 8 * j + e > to) s[4 * j + 2 * half + e] = -TE_INF;
    }
}

TE_DEV float te_row_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(TE_ALL, x, 1));
    return fmaxf(x, __shfl_xor_sync(TE_ALL, x, 2));
}

// Replaces S by 2^(scale2 (S + shift - top)). `shift` is ALiBi's part for a whole row (te_line). `top` and `sum` belong
// to the thread's two rows. The caller must multiply O by `shrink`.
template <bool FIRST>
TE_DEV void te_softmax(float (&s)[BN / 2], float (&top)[2], float (&sum)[2], float (&shrink)[2], float scale2,
                       const float (&shift)[2]) {
    float x[4] = {s[0], s[1], s[2], s[3]}, base[2], z[4];
#pragma unroll
    for (int j = 1; j < BN / 8; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) x[i] = fmaxf(x[i], s[4 * j + i]);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float y = fmaxf(x[2 * i], x[2 * i + 1]);
        if (ALIBI) y += shift[i];
        y = te_row_max(FIRST ? y : fmaxf(y, top[i]));
        const float finite = y == -TE_INF ? 0.0f : y; // 0 for rows that see no key yet
        shrink[i] = FIRST ? 1.0f : te_exp2((top[i] - finite) * scale2);
        top[i] = y;
        base[i] = (ALIBI ? finite - shift[i] : finite) * scale2;
        if (!FIRST) sum[i] *= shrink[i];
    }
#pragma unroll
    for (int j = 0; j < BN / 8; j++) {
#pragma unroll
        for (int i = 0; i < 4; i++) s[4 * j + i] = te_exp2(fmaf(s[4 * j + i], scale2, -base[i / 2]));
#pragma unroll
        for (int i = 0; i < 4; i++) z[i] = j ? z[i] + s[4 * j + i] : s[4 * j + i];
    }
#pragma unroll
    for (int i = 0; i < 2; i++) sum[i] = FIRST ? z[2 * i] + z[2 * i + 1] : sum[i] + (z[2 * i] + z[2 * i + 1]);
}
TE_DEV void te_rescale(float (&o)[D_V / 2], const float (&by)[2]) {
#pragma unroll
    for (int i = 0; i < D_V / 2; i++) o[i] *= by[i / 2 & 1];
}

// With KEYS, te_add_line adds the bias to S as a product A B^T. This function writes the elements of A and B that never
// change. B has each bias as a sum of three numbers, so a row of A is 1, 1, 1 and zeros.
TE_DEV void te_start_lines(te_u32 smem) {
    const te_u32 one = te_f32x2_to_half(1.0f, 0.0f, TE_BF16);
    for (int i = threadIdx.x; i < 64; i += THREADS)
        te_sts16(smem + AT_ONES + 16 * i, make_uint4(one | one << 16, one, 0, 0));
    for (int i = threadIdx.x; i < BN; i += THREADS) te_sts16(smem + AT_ZEROS + 16 * i, make_uint4(0, 0, 0, 0));
}
// With KEYS, adds the bias to S: computes S += A B^T with the block of B in stage `stage`.
TE_DEV void te_add_line(float (&s)[BN / 2], te_u32 smem, int stage) {
    const te_u64 a = te_line::desc(smem + AT_ONES, AT_ZEROS - AT_ONES),
                 b = te_line::desc(smem + AT_LINES + stage * LINE_B, (2 - stage) * LINE_B);
    static_assert(BN >= 64, "rows of A find zeros");
#define TE__PRODUCT(n) \
    if constexpr (BN == n) TE_WGMMA_TO_##n("+f", "k16.f32.bf16.bf16", ", 1, 1, 0, 0", s, a, b, 1);
    TE__PRODUCT(64)
    TE__PRODUCT(96)
    TE__PRODUCT(128)
#undef TE__PRODUCT
}

// The state of consumer warpgroup w, with one function for each step of a tile.
struct te_consumer {
    const te__attn_fwd_hopper_kargs &a;
    const te_u32 smem, bar;
    const int w, lane, warp, own; // own: the thread's upper row in a tile
    const float scale2;
    te_queue<2> k, v, turn;
    te_queue<STAGES_Q> q;
    te_queue<STAGES_B> b;
    te_q_tile t;
    te_bias_rows<BN / 2> bias;
    te_line line;
    const te_u8 *blocks;
    int below;              // the next block of keys that is not empty
    bool full, full_below;  // full: the user's mask hides nothing of the current block; full_below: it hides nothing
                            // of the block `below`
    float o[D_V / 2], s[BN / 2], top[2], sum[2], shrink[2];
    te_u32 p[BN / 4];

    TE_DEV te_consumer(const te__attn_fwd_hopper_kargs &a, te_u32 smem, int w)
        : a(a), smem(smem), bar(smem + AT_BARRIERS), w(w), lane(threadIdx.x & 31), warp(threadIdx.x >> 5 & 3),
          own(w * 64 + (threadIdx.x >> 5 & 3) * 16 + ((threadIdx.x & 31) >> 2)), scale2(te_softmax_scale2(a.a)) {}

    template <int N> TE_DEV void await(int full, const te_queue<N> &at) const {
        te_mbar_wait(bar + 8 * (full + at.stage), at.parity);
    }
    template <int N> TE_DEV void release(int empty, te_queue<N> &at) {
        if (lane == 0) te_mbar_arrive(bar + 8 * (empty + at.stage));
        at.next();
    }
    TE_DEV bool next_tile() {
        await(FULL_T, turn);
        const bool more = t.template hear<true>(smem + AT_TILES + 64 * turn.stage);
        te_mbar_arrive(bar + 8 * (EMPTY_T + turn.stage));
        turn.next();
        return more;
    }
    // Returns ALiBi's signed distance: the first key of block n minus the query of the thread's upper row.
    TE_DEV int apart(int n) const { return n * BN - (t.row + own) - (a.a.x.bottom_right ? t.s_kv - t.s_q : 0); }
    TE_DEV void start(int n) {
        if (!ALIBI) return;
        const int delta = a.a.x.bottom_right ? t.s_kv - t.s_q : 0,
                  of_warp = n * BN - (t.row + 64 * w + 16 * warp) - delta;
        line.start(apart(n), max(of_warp - 15, t.lo - delta), min(of_warp + BN - 1, t.hi - delta));
    }
    TE_DEV void ask() { // S = Q K^T, and the products of ALiBi and of a bias
        const te_u64 at_q = te_wgmma_desc(smem + AT_Q + (q.stage * WAVES + w) * PART_Q, 0),
                     at_k = te_wgmma_desc(smem + AT_K + k.stage * BYTES_K, 0);
        te_multiply<0, 0, true>(s, at_q, at_k);
#pragma unroll
        for (int i = 1; i < D / 16; i++)
            te_multiply<0, 0, false>(s, at_q + i / 4 * (8192 >> 4) + i % 4 * 2,
                                     at_k + i / 4 * (BN * 128 >> 4) + i % 4 * 2);
        if (ALIBI) line.add(s, smem + AT_LINE);
        if (KEYS) te_add_line(s, smem, k.stage);
        te_wgmma_commit();
    }
    TE_DEV void gather() { // O += P V
        const te_u64 at_v = te_wgmma_desc(smem + AT_V + v.stage * BYTES_V, BN * 128);
#pragma unroll
        for (int i = 0; i < BN / 16; i++) te_multiply(o, p + 4 * i, at_v + i * 128);
        te_wgmma_commit();
    }
    // Loads dropout's bits of block n.
    TE_DEV te_keep_rows<BN> kept(int n) const {
        te_keep_rows<BN> keep;
        if (DROPOUT) keep.load(a.a, a.bits, t.batch, t.head, t.q_at, t.row + own, n * BN);
        return keep;
    }
    TE_DEV void drop(const te_keep_rows<BN> &keep) {
#pragma unroll
        for (int i = 0; i < (DROPOUT ? BN / 4 : 0); i++) p[i] &= keep.pair(i % 2, i / 2);
    }
    // load_before loads the bias of block n before the products start, so that load and products overlap. load_behind
    // loads the bias after the products have started.
    TE_DEV void load_before(int n) {
        if (BIAS && PAIRS && !TILES) bias.load(n * BN);
    }
    TE_DEV void load_behind(int n) {
        if (BIAS && !PAIRS) bias.load(n * BN);
        if (TILES) {
            const int at = w * STAGES_B + b.stage;
            te_mbar_wait(bar + 8 * (FULL_B + at), b.parity);
            // `read` is always 0, but it is computed from words that ldmatrix reads. The address of the arrival
            // contains `read`, so the arrival waits for ldmatrix.
            const te_u32 read = bias.take(smem + AT_B + at * TILE_B);
            __syncwarp();
            if (lane == 0) te_mbar_arrive(bar + 8 * (EMPTY_B + at) + read);
            b.next();
        }
    }
    // Turns the products of block n into scores. `show` is the result of shown(n).
    TE_DEV void adjust(int n, te_u64 show) {
        const int row = t.row + own, column = n * BN + 2 * (lane & 3);
        const te_attn_mod mod(a.a.x);
        if (BIAS) bias.add(s, n * BN, a.bias_factor);
        if (ALIBI) line.bend(s, apart(n) + 2 * (lane & 3));
        if (ALIBI && MOD) line.finish(s);
        te_cap(s, a.a,
               !DROPOUT && !MOD /* there are no registers for both ways */ && (n + 1) * BN <= t.s_kv &&
                   t.row + BM <= t.s_q);
        if (MOD) {
#pragma unroll
            for (int i = 0; i < BN / 2; i++)
                s[i] = mod.score(s[i] * te_score_scale(a.a), t.batch, t.head, row + 8 * (i / 2 % 2),
                                 column + 8 * (i / 4) + i % 2);
        }
        if (HIDES) {
#pragma unroll
            for (int i = 0; i < BN / 2; i++)
                if (!(show >> i & 1)) s[i] = -TE_INF;
        }
    }
    // Returns a bit for each element of S in block n. Bit number i is 1 if the masks do not hide element i.
    TE_DEV te_u64 shown(int n) const {
        return HIDES
                   ? te_shown<BN / 2, false>(a.a, t.batch, t.head, t.row + own, n * BN + 2 * (lane & 3), BLOCKS && full)
                   : 0;
    }
    // Finds the block of keys after n.
    TE_DEV void look(int n) {
        if (BLOCKS) full = full_below, below = te_last_seen<BN>(blocks, t.begin, n, full_below);
    }
    TE_DEV void first() {
        if (ALIBI) line.open(te_slope(a.a, t.batch, t.head));
        if (BLOCKS) {
            blocks = te_blocks_of(a.a, t.batch, t.head, t.row);
            full_below = blocks[(t.end - 1) * BN / TE_ATTN_BLOCK_SIZE] == TE_ATTN_BLOCK_FULL;
        }
        if (BIAS && !TILES) bias.open(a.a, t.batch, t.head, t.row + own, 2 * (lane & 3));
        load_before(t.end - 1);
        start(t.end - 1);
        await(FULL_Q, q);
        await(FULL_K, k);
        te_wgmma_fence();
        ask();
        look(t.end - 1);
        load_behind(t.end - 1);
        const te_keep_rows<BN> keep = kept(t.end - 1);
        const te_u64 show = shown(t.end - 1);
        te_wgmma_wait<0>();
        te_wgmma_keep(s);
        if (ALIBI && te_line::PRODUCT) te_wgmma_keep(line.a);
        release(EMPTY_K, k);
        adjust(t.end - 1, show);
        te_hide(s, t, t.row + own, t.end - 1);
        te_softmax<true>(s, top, sum, shrink, scale2, line.shift);
        te_pack16(p, s);
        drop(keep);
#pragma unroll
        for (int i = 0; i < D_V / 2; i++) o[i] = 0.0f;
        if (t.tail) { // clears the rows of V beyond the sequence
            await(FULL_V, v);
            const te_u32 at = smem + AT_V + v.stage * BYTES_V;
            for (int i = (threadIdx.x & 127) + 8 * (t.s_kv - (t.end - 1) * BN); i < 8 * BN; i += 128)
                for (int panel = 0; panel < te_panels(D_V); panel++)
                    te_sts16(at + panel * BN * 128 + 16 * i, make_uint4(0, 0, 0, 0));
            te_async_fence();
            te_meet<128>(8 + w);
        }
    }
    // Runs Q K(n) beside P V(n + 1), then the softmax of block n.
    template <bool MASKED> TE_DEV void step(int n) {
        load_before(n);
        start(n);
        await(FULL_K, k);
        if (TURNS) te_meet<256>(1 + w);
        te_wgmma_keep(o);
        te_wgmma_keep(p);
        if (ALIBI && te_line::PRODUCT) te_wgmma_keep(line.a);
        te_wgmma_fence();
        ask();
        await(FULL_V, v);
        te_wgmma_fence();
        gather();
        if (TURNS) te_meet_later<256>(1 + (w + 1) % WAVES);
        look(n);
        load_behind(n);
        const te_keep_rows<BN> keep = kept(n);
        const te_u64 show = shown(n);
        te_wgmma_wait<1>();
        te_wgmma_keep(s);
        if (ALIBI && te_line::PRODUCT) te_wgmma_keep(line.a);
        release(EMPTY_K, k);
        adjust(n, show);
        if (ONE_LOOP ? n >= t.hidden_from || n < t.hidden_to : MASKED) te_hide(s, t, t.row + own, n);
        te_softmax<false>(s, top, sum, shrink, scale2, line.shift);
        te_wgmma_keep(s);
        te_wgmma_wait<0>();
        te_wgmma_keep(o);
        te_wgmma_keep(p);
        release(EMPTY_V, v);
        te_pack16(p, s);
        drop(keep);
        te_rescale(o, shrink);
    }
    TE_DEV void last() {
        await(FULL_V, v);
        te_wgmma_keep(o);
        te_wgmma_keep(p);
        te_wgmma_fence();
        gather();
        te_wgmma_wait<0>();
        te_wgmma_keep(o);
        te_wgmma_keep(p);
        release(EMPTY_V, v);
    }
    TE_DEV void store() {
        const te__attn_kargs &g = a.a;
        const float sink2 = te_attn_sink2(g, t.head);
        const int row = t.row + own, thread = threadIdx.x & 127;
        float inverse[2], peak = -TE_INF;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float all = sum[i], top2 = top[i] * scale2;
            all += __shfl_xor_sync(TE_ALL, all, 1);
            all += __shfl_xor_sync(TE_ALL, all, 2);
            const bool sees = row + 8 * i < t.s_q && all != 0.0f;
            if (sees) peak = fmaxf(peak, top2);
            const float by = te_attn_add_sink(sink2, &top2, &all);
            inverse[i] = sees ? __fdividef(by * g.keep_scale, all) : 0.0f;
            if (g.lse && (lane & 3) == 0 && row + 8 * i < t.q_end) {
                const te_i64 at =
                    g.x.packed_q ? t.q_at + (te_i64)t.head * g.x.t_q : ((te_i64)t.batch * g.heads + t.head) * g.s_q;
                g.lse[at + row + 8 * i] = sees ? (top2 + __log2f(all)) * TE_LN2 : -TE_INF;
            }
        }
        if (g.x.max_logit) {
            peak = te_warp_max(peak);
            if (lane == 0) te_attn_raise(g.x.max_logit + t.head, peak);
        }
        const te_u32 out = smem + AT_O + w * PART_STORE + (O_IN_Q && STAGES_Q > 1 ? q.stage * WAVES * PART_Q : 0);
        if (!O_IN_Q) {
            if (thread == 0) te_bulk_wait_read<0>(); // the last tile's O has been read
            te_meet<128>(8 + w);
        }
#pragma unroll
        for (int j = 0; j < D_V / 16; j++) {
            te_u32 r[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float by = inverse[i & 1];
                // Rows beyond the sequence may have any O, even NaN.
                r[i] = by == 0.0f ? 0u : te_pack16(o[8 * j + 2 * i] * by, o[8 * j + 2 * i + 1] * by);
            }
            const int piece = 2 * j + (lane >> 4);
            te_stmatrix4(out + (piece >> 3) * 8192 + te_swizzled(warp * 16 + (lane & 15), piece & 7), r);
        }
        te_async_fence();
        te_meet<128>(8 + w);
        if (!g.x.packed_q || t.row + 64 * (w + 1) <= t.q_end) {
            if (thread == 0) {
                for (int i = 0; i < te_panels(D_V); i++)
                    te_tma_store4(a.o_map, out + i * 8192, 64 * i, t.q_at + t.row + 64 * w, t.head,
                                  g.x.packed_q ? 0 : t.batch);
                te_bulk_commit();
            }
        } else {
            char *to = (char *)g.o.p + 2 * (t.head * g.o.h + (t.q_at + t.row + 64 * w) * g.o.s);
            const int rows = t.q_end - t.row - 64 * w, pieces = g.d_v / 8;
            for (int i = thread; i < 64 * pieces; i += 128) {
                const int r = i / pieces, piece = i - r * pieces;
                if (r < rows)
                    *(uint4 *)(to + 2 * r * g.o.s + 16 * piece) =
                        te_lds16(out + (piece >> 3) * 8192 + te_swizzled(r, piece & 7));
            }
        }
        if (O_IN_Q) { // the next Q may overwrite O once the store has read it
            if (thread == 0) te_bulk_wait_read<0>();
            te_async_fence();
            te_meet<128>(8 + w);
        }
    }
    TE_DEV void run() {
        if (TURNS && w == 0) te_meet_later<256>(1); // the first turn
        bool more = next_tile();
        while (more) { // with `for`, ptxas would compute addresses of shared memory again in every step
            if (t.begin < t.end) {
                first();
                int n = BLOCKS ? below : t.end - 2;
                if (MOD && !ONE_LOOP) { // each loop occurs once in the code, because the user's rule may be long
#pragma unroll 1
                    while (n >= t.begin) {
#pragma unroll 1
                        for (; n >= t.hidden_to && n < t.hidden_from; n--) step<false>(n);
#pragma unroll 1
                        for (; n >= t.begin && (n >= t.hidden_from || n < t.hidden_to); n--) step<true>(n);
                    }
                } else if (!ONE_LOOP) {
#pragma unroll 1
                    for (; n >= t.hidden_from; n--) step<true>(n);
#pragma unroll 1
                    for (; n >= t.hidden_to; n--) step<false>(n);
                }
#pragma unroll 1
                for (; (!MOD || ONE_LOOP) && n >= t.begin; n = BLOCKS ? below : n - 1) step<true>(n);
                if (!O_IN_Q) release(EMPTY_Q, q);
                last();
            } else {
                if (O_IN_Q) await(FULL_Q, q);
                sum[0] = sum[1] = 0.0f;
                top[0] = top[1] = -TE_INF;
#pragma unroll
                for (int i = 0; i < D_V / 2; i++) o[i] = 0.0f;
            }
            store();
            if (O_IN_Q) release(EMPTY_Q, q);
            more = next_tile();
        }
        if ((threadIdx.x & 127) == 0) te_bulk_wait_read<0>(); // shared memory must outlive the store
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    te_attn_fwd_hopper(const __grid_constant__ te__attn_fwd_hopper_kargs a) {
    te_follow();
    extern __shared__ __align__(1024) char shared[];
    const te_u32 smem = te_smem(shared), bar = smem + AT_BARRIERS;
    if (threadIdx.x == 0) {
        for (int full = FULL_Q; full <= FULL_T; full += 4)
            for (int i = 0; i < 2; i++) {
                te_mbar_init(bar + 8 * (full + i), 1);
                // All threads of the consumers read the description of a tile, and so do the threads that load.
                te_mbar_init(bar + 8 * (full + 2 + i), full == FULL_T ? 128 * WAVES + 1 + TILES * WAVES : 4 * WAVES);
            }
        if (TILES)
            for (int i = 0; i < WAVES * STAGES_B; i++) {
                te_mbar_init(bar + 8 * (FULL_B + i), 1);
                te_mbar_init(bar + 8 * (EMPTY_B + i), 4);
            }
        te_mbar_init_done();
    }
    if (ALIBI) {
        te_line::columns(smem + AT_LINE, BN, threadIdx.x, THREADS);
        te_async_fence();
    }
    if (KEYS) {
        te_start_lines(smem);
        te_async_fence();
    }
    __syncthreads();
    const int group = __shfl_sync(TE_ALL, threadIdx.x / 128, 0);
    if (group == 0) {
        te_registers_down<WAVES == 2 ? 40 : 32>();
        if (threadIdx.x == 0) te_load_tiles(a, smem);
        if (threadIdx.x == 32) te_schedule(a, smem);
        if (TILES && threadIdx.x >= 64 && threadIdx.x % 32 == 0) te_load_bias(a, smem, threadIdx.x / 32 - 2);
    } else {
        te_registers_up<WAVES == 2 ? 232 : 160>();
        te_consumer consumer(a, smem, group - 1);
        consumer.run();
    }
}
