// ops/attn/attn_dropout_bits.cu: before Hopper's kernels with dropout, of the forward and of the backward pass: what is kept of P, a bit each, of the keys that rows see.
//
// A thread has a row and 128 keys at a time, four words of te__attn_keep_word (sequence.h), whose draws do not wait for each other. Neighbours have neighbouring rows: their 16 bytes are
// adjacent.
//
// Launch: grid (tiles of 128 rows of the longest sequence, of all heads and sequences; ceil(s_kv / TE__ATTN_BITS_KEYS)), block 256: two tiles of 128 keys.
// te:arch 90a
// te:row
#include "ops/attn/attn.cuh"

extern "C" __global__ void __launch_bounds__(256) te_attn_dropout_bits(const __grid_constant__ te__attn_bits_kargs args) {
    te_follow();
    const te__attn_kargs &a = args.a;
    const te_u32 tiles = (a.s_q + 127) / 128, of_head = blockIdx.x / tiles;
    const int first = (int)(blockIdx.x - of_head * tiles) * 128, b = (int)(of_head / a.heads), h = (int)(of_head - (te_u32)b * a.heads);
    const te__attn_seq seq = te__attn_seq_of(&a, b);
    const int i = first + (threadIdx.x & 127), last = min(first + 128, seq.s_q) - 1;
    if (i > last) return;
    const int begin = te_attn_keys_begin(seq, first) / 128, end = (te_attn_keys_end(seq, last) + 127) / 128, mine = blockIdx.y * (TE__ATTN_BITS_KEYS / 128);
    const te_u32 threshold = te__attn_threshold(&a);
    const te_i64 row = seq.work_at + h * seq.work_head + i;
    uint64_t seed = a.seed, offset = a.offset;
    te__rng_read(a.rng, &seed, &offset);
    const uint64_t w = te__attn_keep_row(&a, b, h, i);
#pragma unroll 1
    for (int n = mine + (threadIdx.x >> 7); n < min(end, mine + TE__ATTN_BITS_KEYS / 128); n += 2) {
        te_u32 keep[4];
        if (n < begin) continue;
#pragma unroll
        for (int k = 0; k < 4; k++) keep[k] = te__attn_keep_word(threshold, seed, offset, w + 4 * n + k);
        ((uint4 *)args.bits.words)[n * args.bits.rows + row] = make_uint4(keep[0], keep[1], keep[2], keep[3]);
    }
}
