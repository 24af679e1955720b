// ops/attn/attn_bwd_bias_hopper.cu: computes dB = c dS on Hopper, summed over the dimensions along which the bias B
// repeats. The operands are bf16 or f16. The kernel is deterministic. c is 1, or the scale with TE_ATTN_BIAS_PRE_SCALE.
//
// A block takes its tiles of B from a counter in global memory. A tile is 128 queries by 128 keys. For each tile the
// block goes through the sequences and heads that share the tile. Each of the two consumer warpgroups has 64 queries.
// Its steps are:
//
//     S = Q K^T | bias, masks and user's rule (hopper_scores.cuh) | P = 2^(scale2 S - lse2)
//     dP = dO V^T | sum += P (dP - delta)
//
// If all queries share B, a tile is 128 keys, and the innermost loop is over tiles of queries. At the end the warps add
// up their columns one after the other. If there are few tiles, the loop of a tile is cut into ranges for several
// blocks. The sums of the ranges are stored in f32, and attn_bwd_bias_put.cu adds them in order.
//
// Warpgroup 0 is the producer. One of its threads does all its work. A pair is a tile of queries and a tile of keys.
// For each tile of B the thread finds the pairs that are needed, and loads them. A stage of the pipeline has panels and
// a message to the consumers: a pair to multiply, a sum to store, or the end. A head may have up to 256 channels, that
// is, several panels.
//
// Shared memory, in all 225 KB:
//
//     |             | stages    | tile of B | messages | sums of columns | barriers |
//     | B of 16 bit | 6 x 32 KB | 32 KB     | 6 x 48 B | 512 B           |          |
//     | B in f32    | 5 x 32 KB | 64 KB     |          |                 |          |
//
// A stage is a panel of Q or dO and a panel of K or V. A panel is 128 rows by 64 channels, with the 128-byte swizzle.
// The tile of B is stored in the order of the registers. It is read once for all sequences and heads.
//
// Each stage has two barriers: FULL (the message and the loads of TMA have arrived), and EMPTY (the 8 consumer warps
// have read the stage). At named barrier 1 the consumers wait for each other when they add up columns.
//
// A consumer completes P before it begins dP, because its registers have room for the sum, for S, and for either the
// bias or dP. Memory beyond a sequence may have any content, and 0 times NaN is NaN. So at the edge of a sequence
// elements with P = 0 are not added.
//
// Options: X_DT, X_D, X_D_V (hopper.cuh), X_OUT (te_dtype of the sums that are written), those of hopper_dropout.cuh,
// and those of hopper_scores.cuh (X_BIAS is always set, X_ALIBI and X_CAP are never set).
//
// Launch: grid min(tiles, multiprocessors), block 384, shared memory TE__ATTN_DBIAS_SHARED. Maps: boxes of 128 rows by
// 64 channels. The conditions are those of attn_fwd_hopper.cu.
// te:arch 90a
// te:row X_DT=2|3 X_D=128 X_D_V=128 X_DROPOUT=0 X_OUT=3 X_BIAS=3 X_PAIRS=0|1|2
// te:row X_DT=3 X_D=128 X_D_V=128 X_DROPOUT=0|1 X_OUT=1 X_BIAS=1 X_PAIRS=0|1|2
// te:row X_DT=3 X_D=64 X_D_V=64 X_DROPOUT=0 X_OUT=3 X_BIAS=3 X_PAIRS=1
// te:row X_DT=3 X_D=96 X_D_V=96 X_DROPOUT=1 X_OUT=3 X_BIAS=3 X_PAIRS=1
// te:row X_DT=3 X_D=192 X_D_V=128 X_DROPOUT=0 X_OUT=3 X_BIAS=3 X_PAIRS=1
// te:row X_DT=3 X_D=256 X_D_V=256 X_DROPOUT=1 X_OUT=3 X_BIAS=3 X_PAIRS=1
// te:row X_DT=3 X_D=128 X_D_V=128 X_DROPOUT=0 X_OUT=3 X_BIAS=3 X_PAIRS=1 X_MASK=1
// te:row X_DT=3 X_D=128 X_D_V=128 X_DROPOUT=1 X_OUT=3 X_BIAS=3 X_PAIRS=1 X_MOD=2|3
// te:row X_DT=3 X_D=128 X_D_V=128 X_DROPOUT=0 X_OUT=3 X_BIAS=3 X_PAIRS=1 X_BLOCKS=1 X_MOD=3
#include "ops/attn/hopper_dropout.cuh"

enum {
    OUT = X_OUT,
    TILE = 128,
    N = TILE / 2, // number of registers that a thread needs for its part of a tile
    STAGES = BIAS == TE_F32 ? 5 : 6,
    BYTES = TE__ATTN_BYTES(TILE, 64), // bytes of a panel; a stage has two panels
    // true: the bias stays in shared memory while a tile is summed. false: the bias stays in registers.
    KEPT = BIAS == TE_F32 || PAIRS != 2,
    WORDS = N / 4 * te_bias_rows<N>::ROWS * te_bias_rows<N>::OF_PAIR, // words of B of a thread
    TOLD = 48,
    AT_BIAS = STAGES * 2 * BYTES,
    AT_TOLD = AT_BIAS + (BIAS == TE_F32 ? 4 : 2) * TILE * TILE,
    AT_SUMS = AT_TOLD + 6 * TOLD,
    AT_BARRIERS = AT_SUMS + TILE * 4,
    FULL = 0,
    EMPTY = STAGES,
    SHARED = AT_BARRIERS + 6 * 16
};
static_assert(SHARED == TE__ATTN_DBIAS_SHARED, "what the host asks for");
static_assert(BIAS && !ALIBI, "the gradient of a bias");
// Messages to the consumers: PAIR (multiply a pair of tiles), PUT (store the sum), STOP. Flags of a PAIR:
// - EDGE: some rows and keys do not see each other or do not exist.
// - SEEN: the user's mask hides nothing.
enum { PAIR, PUT, STOP, EDGE = 16, SEEN = 32 };

struct te_producer {
    const te__attn_bias_hopper_kargs &a;
    const te_u32 smem, bar;
    te_queue<STAGES> at;

    // Waits until the next stage is empty, and writes a message to it. TMA will bring `bytes` bytes to the stage.
    TE_DEV void tell(uint4 x, uint4 y, uint4 z, int bytes) {
        const te_u32 told = smem + AT_TOLD + TOLD * at.stage;
        te_mbar_wait(bar + 8 * (EMPTY + at.stage), at.parity ^ 1);
        te_sts16(told, x), te_sts16(told + 16, y), te_sts16(told + 32, z);
        if (bytes) te_mbar_expect(bar + 8 * (FULL + at.stage), bytes);
        else te_mbar_arrive(bar + 8 * (FULL + at.stage));
    }
    // Loads the panels of both operands, one stage for each pair of panels. If `first` is true, the current stage
    // already has a message.
    template <int CHANNELS>
    TE_DEV void load(const void *rows, int row, int head, int batch_q, const void *keys, int key, int group,
                     int batch_kv, bool first) {
        for (int c = 0; c < te_panels(CHANNELS); c++, at.next()) {
            const te_u32 full = bar + 8 * (FULL + at.stage), to = smem + at.stage * 2 * BYTES;
            if (!first || c) {
                te_mbar_wait(bar + 8 * (EMPTY + at.stage), at.parity ^ 1);
                te_mbar_expect(full, 2 * BYTES);
            }
            te_tma_load4(to, rows, 64 * c, row, head, batch_q, full);
            te_tma_load4(to + BYTES, keys, 64 * c, key, group, batch_kv, full);
        }
    }
    // Sends the message for the tiles that begin at `row` and `key`, unless no row sees any of the keys.
    TE_DEV void pair(const te__attn_seq &seq, int b, int h, int row, int key) {
        const te__attn_kargs &k = a.a;
        const te__attn_extra &x = k.x;
        const int last = min(row + TILE, seq.s_q) - 1, group = h / (k.heads / k.groups), batch_q = x.packed_q ? 0 : b,
                  batch_kv = x.packed_kv ? 0 : b;
        if (row >= seq.s_q || key >= min(seq.s_kv, last + seq.hi + 1) || key + TILE <= row + seq.lo) return;
        int kind = PAIR;
        if (BLOCKS) {
            const int block = te_blocks_of(k, b, h, row)[key / TE_ATTN_BLOCK_SIZE];
            if (block == TE_ATTN_BLOCK_EMPTY) return;
            if (block == TE_ATTN_BLOCK_FULL) kind |= SEEN;
        }
        if (key + TILE > min(seq.s_kv, row + seq.hi + 1) || key < row + TILE - 1 + seq.lo || row + TILE > seq.s_q)
            kind |= EDGE;
        const te_u64 work = (te_u64)(seq.work_at + h * seq.work_head + row);
        tell(make_uint4(kind, b, h, row), make_uint4(key, seq.s_q, seq.s_kv, seq.lo),
             make_uint4(seq.hi, (te_u32)work, (te_u32)(work >> 32), 0), 2 * BYTES);
        load<X_D>(a.q_map, (int)seq.q_at + row, h, batch_q, a.k_map, (int)seq.kv_at + key, group, batch_kv, true);
        load<X_D_V>(a.do_map, (int)seq.q_at + row, h, batch_q, a.v_map, (int)seq.kv_at + key, group, batch_kv, false);
    }
    // Sends the PAIR messages for the pairs of query and key tiles whose dS are summed in tile `number`, in a fixed
    // order. Then sends the PUT message. Tile `number` is a tile of dB or one part of its sum.
    TE_DEV void tile(te_u32 number) {
        const te__attn_kargs &k = a.a;
        const te__attn_extra &x = k.x;
        const int batches = x.dbias_b == 1 ? k.batch : 1, heads = x.dbias_h == 1 ? k.heads : 1,
                  rows = x.dbias_i == 1 ? a.order.rows : 1;
        const te_u32 part = number / (te_u32)a.tiles_of_part, n = (te_u32)(k.s_kv + TILE - 1) / TILE,
                     own_rows = x.dbias_i == 1 ? 1 : a.order.rows;
        te_u32 rest = number - part * (te_u32)a.tiles_of_part;
        const int key = (int)(rest % n) * TILE;
        rest /= n;
        const int row = (int)(rest % own_rows) * TILE;
        rest /= own_rows;
        const int th = (int)(rest % (te_u32)x.dbias_h), tb = (int)(rest / (te_u32)x.dbias_h);
        const te_i64 pairs = (te_i64)batches * heads * rows, first = pairs * part / a.parts;
        te_i64 left = pairs * (part + 1) / a.parts - first;
        int m = (int)(first % rows), h = (int)(first / rows % heads), b = (int)(first / rows / heads);
        for (; left > 0; b++, h = 0) {
            const te__attn_seq seq = te__attn_seq_of(&k, tb + b);
            for (; left > 0 && h < heads; h++, m = 0)
                for (; left > 0 && m < rows; m++, left--) pair(seq, tb + b, th + h, row + m * TILE, key);
        }
        tell(make_uint4(PUT, tb, th, row), make_uint4(key, part, 0, 0), make_uint4(0, 0, 0, 0), 0);
        at.next();
    }
    TE_DEV void run() {
        for (te_u32 number = blockIdx.x; number < (te_u32)a.order.tiles;) {
            const te_u32 next = atomicAdd(a.order.counter, 1u) + gridDim.x;
            tile(number);
            number = next;
        }
        tell(make_uint4(STOP, 0, 0, 0), make_uint4(0, 0, 0, 0), make_uint4(0, 0, 0, 0), 0);
        // atomicInc counts the thread blocks that take no more tile numbers. The last such block sets the counter to 0
        // for the next launch.
        if (atomicInc(a.order.counter + 1, gridDim.x - 1) == gridDim.x - 1) a.order.counter[0] = 0;
    }
};

// Transposes four words of each lane of a quad: lane k gets word k of every lane. The four words that a lane then has
// are neighbours in one row of the tile.
TE_DEV void te_transpose_quad(te_u32 (&v)[4]) {
    const bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
    te_u32 x = __shfl_xor_sync(TE_ALL, odd ? v[0] : v[1], 1), y = __shfl_xor_sync(TE_ALL, odd ? v[2] : v[3], 1);
    if (odd) v[0] = x, v[2] = y;
    else v[1] = x, v[3] = y;
    x = __shfl_xor_sync(TE_ALL, high ? v[0] : v[2], 2), y = __shfl_xor_sync(TE_ALL, high ? v[1] : v[3], 2);
    if (high) v[0] = x, v[1] = y;
    else v[2] = x, v[3] = y;
}

// Consumer warpgroup w.
struct te_consumer {
    const te__attn_bias_hopper_kargs &a;
    const te_u32 smem, bar;
    const int w, lane, warp, own, column; // own, column: row and column of the thread's first element in a tile
    te_queue<STAGES> at;
    float sum[N], s[N], dp[N];

    TE_DEV te_consumer(const te__attn_bias_hopper_kargs &a, te_u32 smem, int w)
        : a(a), smem(smem), bar(smem + AT_BARRIERS), w(w), lane(threadIdx.x & 31), warp(threadIdx.x >> 5 & 3),
          own(64 * w + 16 * (threadIdx.x >> 5 & 3) + ((threadIdx.x & 31) >> 2)), column(2 * (threadIdx.x & 3)) {
        clear();
    }
    TE_DEV void clear() {
#pragma unroll
        for (int i = 0; i < N; i++) sum[i] = 0.0f;
    }
    TE_DEV void release() {
        if (lane == 0) te_mbar_arrive(bar + 8 * (EMPTY + at.stage));
        at.next();
    }
    template <int CHANNELS> TE_DEV void released() {
#pragma unroll
        for (int c = 0; c < te_panels(CHANNELS); c++) release();
    }
    // Computes d = Q K^T or d = dO V^T for the 64 rows of this warpgroup and the 128 keys of the tile.
    template <int CHANNELS> TE_DEV void product(float (&d)[N]) {
        te_queue<STAGES> ahead = at;
        te_u32 panel[te_panels(CHANNELS)]; // offsets of the panels, in units of descriptors
#pragma unroll
        for (int c = 0; c < te_panels(CHANNELS); c++, ahead.next()) {
            te_mbar_wait(bar + 8 * (FULL + ahead.stage), ahead.parity);
            panel[c] = ahead.stage * (2 * BYTES >> 4);
        }
        const te_u64 left = te_wgmma_desc(smem + w * (BYTES / 2), 0), right = te_wgmma_desc(smem + BYTES, 0);
        te_wgmma_fence();
        te_multiply<0, 0, true>(d, left + panel[0], right + panel[0]);
#pragma unroll
        for (int i = 1; i < CHANNELS / 16; i++)
            te_multiply<0, 0, false>(d, left + panel[i >> 2] + (i & 3) * 2, right + panel[i >> 2] + (i & 3) * 2);
        te_wgmma_commit();
    }
    // Without KEPT, loads the first words of the bias of a pair of tiles to registers. With KEPT, loads all words to
    // shared memory, but only if `fresh` is true, which is once for each tile of dB.
    TE_DEV void load_bias(te_bias_rows<N> &bias, int b, int h, int row, int key, bool fresh) const {
        if (KEPT && !fresh) return;
        bias.open(a.a, b, h, row + own, key + column);
        if (!KEPT) bias.load(0);
#pragma unroll
        for (int first = 0; first < (KEPT ? WORDS : 0); first += te_bias_rows<N>::WORDS) {
            bias.load(8 * (first / (WORDS * 4 / N)));
#pragma unroll
            for (int i = 0; i < te_bias_rows<N>::WORDS; i += 4)
                te_sts16(kept() + (first + i) * 1024,
                         make_uint4(bias.word[i], bias.word[i + 1], bias.word[i + 2], bias.word[i + 3]));
        }
    }
    TE_DEV te_u32 kept() const { return smem + AT_BIAS + (threadIdx.x - 128) * 16; }
    TE_DEV void add_bias(te_bias_rows<N> &bias) {
        const float by = te_bias_scale(a.a);
#pragma unroll
        for (int i = 0; i < N / 2; i++) {
            const int word = (i / 2 * te_bias_rows<N>::ROWS + i % 2) * te_bias_rows<N>::OF_PAIR,
                      of = word % te_bias_rows<N>::WORDS;
            if (KEPT && i % 2 < te_bias_rows<N>::ROWS && word % 4 == 0) {
                const uint4 x = te_lds16(kept() + word * 1024);
                bias.word[of] = x.x, bias.word[of + 1] = x.y, bias.word[of + 2] = x.z, bias.word[of + 3] = x.w;
            }
            float u, v;
            bias.get(0, i / 2 % te_bias_rows<N>::AHEAD, i % 2, u, v);
            s[2 * i] = fmaf(u, by, s[2 * i]), s[2 * i + 1] = fmaf(v, by, s[2 * i + 1]);
        }
    }
    // Adds dS of a pair of tiles to the sum. `x` and the words at address `told` are the producer's message.
    TE_DEV void add(uint4 x, te_u32 told, bool fresh) {
        auto one = [](te_u32 v) { return (int)__shfl_sync(TE_ALL, v, 0); };
        const uint4 y = te_lds16(told), z = te_lds16(told + 16);
        const int kind = one(x.x), b = one(x.y), h = one(x.z), row = one(x.w), key = one(y.x), s_q = one(y.y),
                  s_kv = one(y.z), lo = one(y.w), hi = one(z.x);
        const te_i64 work = (te_i64)((te_u64)z.z << 32 | z.y) + own; // lse2 and delta are padded to whole tiles
        const te__attn_kargs &k = a.a;
        const te_attn_mod mod(k.x);
        const int i0 = row + own, j0 = key + column;
        float lse2[2], delta[2];
        te_bias_rows<N> bias;
        product<X_D>(s);
#pragma unroll
        for (int half = 0; half < 2; half++)
            lse2[half] = k.lse2[work + 8 * half], delta[half] = k.delta[work + 8 * half];
        load_bias(bias, b, h, row, key, fresh);
        te_keep_rows<TILE> keep;
        if (DROPOUT) keep.load(k, a.bits, b, h, work, i0, key);
        const te_u64 show = HIDES ? te_shown<N, false>(k, b, h, i0, j0, BLOCKS && kind & SEEN) : 0;
        te_wgmma_wait<0>();
        te_wgmma_keep(s);
        released<X_D>();
        const float scale2 = te_softmax_scale2(k);
        add_bias(bias);
        if (kind & EDGE) {
#pragma unroll
            for (int half = 0; half < 2; half++) { // hides the keys that the row does not see
                const int i = i0 + 8 * half;
                te_hide_outside(s, half, i + lo - j0, (i < s_q ? min(i + hi, s_kv - 1) : -1) - j0);
            }
        }
#pragma unroll
        for (int i = 0; i < (HIDES ? N : 0); i++)
            if (!(show >> i & 1)) s[i] = -TE_INF;
#pragma unroll
        for (int i = 0; i < N; i++) {
            const int query = i0 + 8 * (i / 2 % 2), at_key = j0 + 8 * (i / 4) + i % 2;
            const float score = MOD ? s[i] * k.scale : s[i];
            float p = te_exp2(fmaf(MOD ? mod.score(score, b, h, query, at_key) : score, scale2, -lse2[i / 2 % 2]));
            if (MOD) p = s[i] == -TE_INF || p == 0.0f ? 0.0f : p * mod.bprop(score, b, h, query, at_key);
            s[i] = p;
        }
        product<X_D_V>(dp);
        te_wgmma_wait<0>();
        te_wgmma_keep(dp);
        released<X_D_V>();
        auto ds = [&](int i) {
            return s[i] * ((!DROPOUT                            ? dp[i]
                            : keep.one(i / 2 % 2, i / 4, i % 2) ? dp[i] * k.keep_scale
                                                                : 0.0f) -
                           delta[i / 2 % 2]);
        };
        if (kind & EDGE) {
#pragma unroll
            for (int i = 0; i < N; i++) sum[i] += s[i] == 0.0f ? 0.0f : ds(i);
        } else {
#pragma unroll
            for (int i = 0; i < N; i++) sum[i] += ds(i);
        }
    }
    TE_DEV void store(char *to, float x) const {
        if (OUT == TE_F32) *(float *)to = x;
        else *(te_u16 *)to = (te_u16)te_f32x2_to_half(x, 0.0f, OUT);
    }
    // Stores the tile's sum row by row. `to` is the address for the thread's upper row and the tile's first key. `rows`
    // rows and `count` keys exist from there on.
    TE_DEV void put_rows(char *to, te_i64 row_bytes, int rows, int count) {
        enum { SIZE = OUT == TE_F32 ? 4 : 2 };
        const float by = a.by;
#pragma unroll
        for (int half = 0; half < 2; half++, to += 8 * row_bytes) {
            const bool there = 8 * half < rows;
            if (a.aligned && OUT != TE_F32) { // all lanes exchange words, even if their rows do not exist
#pragma unroll
                for (int m = 0; m < N / 16; m++) {
                    te_u32 v[4];
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        const int i = 4 * (4 * m + e) + 2 * half;
                        v[e] = te_f32x2_to_half(sum[i] * by, sum[i + 1] * by, OUT);
                    }
                    te_transpose_quad(v);
                    const int j = 8 * (4 * m + (lane & 3));
                    if (there && j < count) *(uint4 *)(to + SIZE * j) = make_uint4(v[0], v[1], v[2], v[3]);
                }
            } else if (there) {
#pragma unroll
                for (int m = 0; m < N / 4; m++) {
                    const int i = 4 * m + 2 * half, j = 8 * m + column;
                    char *const p = to + SIZE * j;
                    if (a.aligned && OUT == TE_F32) {
                        if (j < count) *(float2 *)p = make_float2(sum[i] * by, sum[i + 1] * by);
                    } else {
                        if (j < count) store(p, sum[i] * by);
                        if (j + 1 < count) store(p + SIZE, sum[i + 1] * by);
                    }
                }
            }
        }
    }
    // Stores the sum of all rows of the tile as one row. The warps add their results one after the other.
    TE_DEV void put_column_sums(char *to, int count) {
        enum { SIZE = OUT == TE_F32 ? 4 : 2 };
#pragma unroll
        for (int i = 0; i < N; i++) {
            if (i & 2) continue;
            float x = sum[i] + sum[i + 2];
#pragma unroll
            for (int far = 4; far < 32; far *= 2) x += __shfl_xor_sync(TE_ALL, x, far);
            sum[i] = x;
        }
#pragma unroll 1
        for (int turn = 0; turn < 8; turn++) {
            if (turn == 4 * w + warp && lane < 4) {
#pragma unroll
                for (int i = 0; i < N; i++) {
                    if (i & 2) continue;
                    const te_u32 place = smem + AT_SUMS + 4 * (8 * (i / 4) + column + (i & 1));
                    te_sts4(place, __float_as_uint(turn ? __uint_as_float(te_lds4(place)) + sum[i] : sum[i]));
                }
            }
            __syncwarp();
            te_meet<256>(1);
        }
        const int j = threadIdx.x & 127;
        if (w == 0 && j < count) store(to + SIZE * j, __uint_as_float(te_lds4(smem + AT_SUMS + 4 * j)) * a.by);
        __syncwarp();
        te_meet<256>(1); // the next sum overwrites this one
    }
    TE_DEV void put(uint4 x, uint4 y) {
        const te__attn_table &t = a.to;
        const int key = (int)y.x, count = a.a.s_kv - key;
        const bool columns = a.a.x.dbias_i == 1;
        const int i = columns ? 0 : (int)x.w + own;
        char *const to = (char *)t.p + (OUT == TE_F32 ? 4 : 2) *
                                           ((te_i64)y.y * a.part + (int)x.y * t.b + (int)x.z * t.h + i * t.i + key);
        if (columns) put_column_sums(to, count);
        else put_rows(to, (OUT == TE_F32 ? 4 : 2) * t.i, a.a.s_q - i, count);
        clear();
    }
    TE_DEV void run() {
        bool fresh = true; // the tile's bias has not been read
#pragma unroll 1
        for (;;) {
            const te_u32 told = smem + AT_TOLD + TOLD * at.stage;
            te_mbar_wait(bar + 8 * (FULL + at.stage), at.parity);
            const uint4 x = te_lds16(told);
            const int kind = __shfl_sync(TE_ALL, x.x, 0) & 15;
            if (kind == STOP) break;
            if (kind == PUT) {
                put(x, te_lds16(told + 16));
                __syncwarp(); // every lane has read the message
                release();
            } else {
                add(x, told + 16, fresh);
            }
            fresh = kind == PUT;
        }
    }
};

extern "C" __global__ void __launch_bounds__(384, 1)
    te_attn_bwd_bias_hopper(const __grid_constant__ te__attn_bias_hopper_kargs a) {
    te_follow();
    extern __shared__ __align__(1024) char shared[];
    const te_u32 smem = te_smem(shared), bar = smem + AT_BARRIERS;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) te_mbar_init(bar + 8 * (FULL + i), 1), te_mbar_init(bar + 8 * (EMPTY + i), 8);
        te_mbar_init_done();
    }
    __syncthreads();
    const int group = __shfl_sync(TE_ALL, threadIdx.x / 128, 0);
    if (group == 0) {
        te_registers_down<72>();
        if (threadIdx.x == 0) {
            te_producer producer = {a, smem, bar};
            producer.run();
        }
    } else {
        te_registers_up<216>();
        te_consumer consumer(a, smem, group - 1);
        consumer.run();
    }
}
