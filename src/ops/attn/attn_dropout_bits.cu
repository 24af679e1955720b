// ops/attn/attn_dropout_bits.cu: runs before Hopper's forward and backward kernels with dropout. Writes a bit for each
// element of P whose row sees its key: 1 if dropout keeps the element.
//
// A thread computes four words of te__attn_keep_word (sequence.h) at a time, for one row and 128 keys. Neighbouring
// threads have neighbouring rows, and write 16 adjacent bytes each.
//
// Launch: grid (tiles of 128 rows of the longest sequence, of all heads and sequences; ceil(s_kv /
//         TE__ATTN_BITS_KEYS)), block 256: two tiles of 128 keys.
// te:arch 90a
// te:row
#include "ops/attn/attn.cuh"

// Returns x. The shuffle makes the compiler keep x in a register, instead of computing it in each turn of a loop. All
// 32 lanes must pass the same x.
TE_DEV te_u32 te_known(te_u32 x) { return __shfl_sync(0xffffffffu, x, 0); }

extern "C" __global__ void __launch_bounds__(256)
    te_attn_dropout_bits(const __grid_constant__ te__attn_bits_kargs args) {
    te_follow();
    const te__attn_kargs &a = args.a;
    const te_u32 tiles = (a.s_q + 127) / 128, of_head = blockIdx.x / tiles;
    const int first = (int)(blockIdx.x - of_head * tiles) * 128, b = (int)(of_head / a.heads),
              h = (int)(of_head - (te_u32)b * a.heads);
    const te__attn_seq seq = te__attn_seq_of(&a, b);
    const int i = first + (threadIdx.x & 127), last = min(first + 128, seq.s_q) - 1;
    if (first > last) return;
    const int mine = blockIdx.y * (TE__ATTN_BITS_KEYS / 128), begin = max(te_attn_keys_begin(seq, first) / 128, mine);
    const int end = min((te_attn_keys_end(seq, last) + 127) / 128, mine + TE__ATTN_BITS_KEYS / 128);
    if (begin >= end) return;
    const te_u32 threshold = te__attn_threshold(&a);
    uint64_t seed = a.seed, offset = a.offset;
    te__rng_read(a.rng, &seed, &offset);
    te_u32 key[14], other[16]; // key: the keys of the seven rounds; other: the inverted bits of the threshold
#pragma unroll
    for (int n = 0; n < 7; n++)
        key[2 * n] = te_known((te_u32)seed + n * TE__PHILOX_STEP0),
                key[2 * n + 1] = te_known((te_u32)(seed >> 32) + n * TE__PHILOX_STEP1);
#pragma unroll
    for (int n = 0; n < 16; n++) other[n] = te_known((threshold >> n & 1u) - 1u);
    if (i > last) return;
    const uint64_t w = te__attn_keep_row(&a, b, h, i);
    uint4 *const to = (uint4 *)args.bits.words + (seq.work_at + h * seq.work_head + i);
#pragma unroll 1
    for (int n = begin + (threadIdx.x >> 7); n < end; n += 2) {
        te_u32 keep[4];
#pragma unroll
        for (int k = 0; k < 4; k++) keep[k] = threshold >> 16 ? 0u : 0xffffffffu;
#pragma unroll
        for (int block = 0; block < 4; block++) {
            if (!(threshold & ((16u << (4 * block)) - 1u))) continue;
#pragma unroll
            for (int k = 0; k < 4; k++) { // the steps of te__attn_keep_word
                const uint64_t at = 4 * (w + 4 * n + k) + block;
                te_u32 c[4] = {(te_u32)at, (te_u32)(at >> 32), (te_u32)offset, (te_u32)(offset >> 32)};
#pragma unroll
                for (int round = 0; round < 7; round++) te__philox_round(c, key[2 * round], key[2 * round + 1]);
#pragma unroll
                for (int bit = 0; bit < 4; bit++) keep[k] = te__majority(keep[k], c[bit], other[4 * block + bit]);
            }
        }
        to[n * args.bits.rows] = make_uint4(keep[0], keep[1], keep[2], keep[3]);
    }
}
