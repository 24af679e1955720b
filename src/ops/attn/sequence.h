/* ops/attn/sequence.h: where the rows of a sequence lie, which keys they see, ALiBi's slopes, and what dropout keeps.
 * The host and the kernels both include this file. It may use the kernels' arguments (kargs.h). It must not depend on
 * tensors or tiles. */
#ifndef TE__ATTN_SEQUENCE_H
#define TE__ATTN_SEQUENCE_H

/* Turns a causal mask and a window into two diagonals: row i sees the keys i + *lo .. i + *hi. `left` and `right` are
 * the sizes of the window; -1 means no bound. `delta` is the diagonal that the mask and the window count from. *lo and
 * *hi are limited to -s_q - 1 .. s_kv; this does not change which keys a row sees. */
TE__BOTH void te__attn_diagonals(int left, int right, int causal, int delta, int s_q, int s_kv, int *lo, int *hi) {
    const int beyond = s_q + s_kv + 1;
    int from = left < 0 || left > beyond ? -beyond : delta - left,
        to = right < 0 || right > beyond ? beyond : delta + right;
    if (causal && to > delta) to = delta;
    *lo = from < -s_q ? -s_q : from > s_kv ? s_kv : from;
    *hi = to < -s_q - 1 ? -s_q - 1 : to > s_kv ? s_kv : to;
}

/* One sequence of a batch. The fields s_q, s_kv, lo and hi are those of te__attn_kargs, but for this sequence alone. */
typedef struct te__attn_seq {
    int s_q, s_kv, lo, hi;
    int delta;                    /* ALiBi's distance is |i + delta - j| */
    int q_end, kv_end;            /* Rows 0 .. q_end - 1 of o and dq are written, and rows 0 .. kv_end - 1 of dk and
                                   * dv. Rows from s_q or s_kv on become 0. */
    long long q_at, kv_at;        /* the row of the tensor where the sequence begins */
    long long lse_at, lse_head;   /* lse of row i and head h is at lse_at + h * lse_head + i */
    long long work_at, work_head; /* lse2 and delta of row i and head h are at work_at + h * work_head + i */
} te__attn_seq;

/* Returns how many floats the buffer lse2 needs for one head of packed sequences; the buffer delta needs as many. Each
 * sequence starts at a multiple of four floats. Behind each sequence there is space for whole tiles. */
TE__BOTH long long te__attn_packed_rows(int tokens, int batch) {
    return ((long long)tokens + 3) / 4 * 4 + (long long)(batch + 1) * (TE__ATTN_PAD + 4);
}

/* Returns the length of sequence b according to the cumulative lengths `cu`, and sets *first to its first row. `tokens`
 * is the number of rows of the packed tensor, and `longest` is the largest length. `at` has the first rows of packed
 * sequences, or is NULL. Nothing has checked `cu` and `at`, so the length is cut until no row lies outside of the
 * tensor. */
TE__BOTH int te__attn_extent(const int *cu, const int *at, int tokens, int packed, int longest, int b,
                             long long *first) {
    long long length = cu ? (long long)cu[b + 1] - cu[b] : longest, room = longest, start = 0;
    if (packed) {
        start = at ? at[b] : cu[b];
        start = start < 0 ? 0 : start > tokens ? tokens : start;
        if (room > tokens - start) room = tokens - start;
        if (at && room > at[b + 1] - start) room = at[b + 1] - start;
    }
    *first = start;
    if (length > room) length = room;
    return length < 0 ? 0 : (int)length;
}

TE__BOTH te__attn_seq te__attn_seq_of(const te__attn_kargs *a, int b) {
    const te__attn_extra *x = &a->x;
    te__attn_seq s;
    s.s_q = te__attn_extent(x->cu_q, x->at_q, x->t_q, x->packed_q, a->s_q, b, &s.q_at);
    s.s_kv = te__attn_extent(x->cu_kv, x->at_kv, x->t_kv, x->packed_kv, a->s_kv, b, &s.kv_at);
    s.delta = x->bottom_right ? s.s_kv - s.s_q : 0;
    te__attn_diagonals(x->left, x->right, x->causal, s.delta, s.s_q, s.s_kv, &s.lo, &s.hi);
    s.q_end = x->packed_q ? s.s_q : a->s_q;
    s.kv_end = x->packed_kv ? s.s_kv : a->s_kv;
    s.lse_head = x->packed_q ? x->t_q : a->s_q;
    s.lse_at = x->packed_q ? s.q_at : (long long)b * a->heads * a->s_q;
    s.work_head = x->packed_q ? te__attn_packed_rows(x->t_q, a->batch) : a->s_pad;
    s.work_at =
        x->packed_q ? (s.q_at + 3) / 4 * 4 + (long long)b * (TE__ATTN_PAD + 4) : (long long)b * a->heads * a->s_pad;
    return s;
}

/* Returns the index of tile m of dQ, for head h of sequence b. q_at is the first row of the sequence. A packed sequence
 * has at most one tile that its rows fill only in part. The `+ b` makes space for that tile. */
TE__BOTH long long te__attn_dq_tile(const te__attn_bwd_hopper_kargs *a, int b, int h, int q_at, int m) {
    if (!a->a.x.packed_q) return ((long long)b * a->a.heads + h) * a->tiles_of_head + m;
    return (long long)h * a->tiles_of_head + q_at / a->queries + b + m;
}

/* Returns the page that holds key j of sequence b in a paged cache, and sets *row to the key's row within the page.
 * Nothing has checked the page ids, so ids outside of the cache are clamped. */
TE__BOTH long long te__attn_page(const te__attn_extra *x, int b, int j, int *row) {
    const int page = x->pages[(long long)b * x->pages_of_each + j / x->page_size];
    *row = j % x->page_size;
    return page < 0 ? 0 : page >= x->num_pages ? x->num_pages - 1 : page;
}

/* Returns the te_attn_block for row i and key j of head h of sequence b, or TE_ATTN_BLOCK_PARTIAL if there is no block
 * mask. */
TE__BOTH int te__attn_block_at(const te__attn_extra *x, int b, int h, int i, int j) {
    const te__attn_table *t = &x->blocks;
    if (!t->p) return (int)TE_ATTN_BLOCK_PARTIAL;
    return ((const unsigned char *)
                t->p)[b * t->b + h * t->h + i / TE_ATTN_BLOCK_SIZE * t->i + j / TE_ATTN_BLOCK_SIZE * t->j];
}

/* Returns ALiBi's default slope of head h (Press, Smith and Lewis, 2022), by the formula at te_attn_rule. */
TE__BOTH float te__attn_slope(int heads, int h) {
    int n = 1;
    while (2 * n <= heads) n *= 2;
    return exp2f(h < n ? -8.0f * (float)(h + 1) / (float)n : -4.0f * (float)(2 * (h - n) + 1) / (float)n);
}

/* Returns dropout's threshold: p in units of 2^-16. Dropout draws a 16-bit number for each element of P, and keeps the
 * element if the number is at least the threshold. The random bits are stored bit by bit: one 32-bit word holds bit n
 * of the numbers of 32 neighbouring keys. So one operation on a word serves 32 numbers. Bits below the lowest set bit
 * of the threshold are not drawn, because they cannot change the comparison. The generator is Philox4x32-7, with four
 * words in a block. Let row = (b * heads + h) * s_q + i, and w = row * ceil(s_kv / 32) + j / 32. Then bit n of key j's
 * random number is bit j % 32 of word n % 4 in Philox block 4 * w + n / 4. Seven rounds pass all tests of BigCrush, as
 * ten do (Salmon et al.). */
TE__BOTH uint32_t te__attn_threshold(const te__attn_kargs *a) { return (uint32_t)(a->dropout_p * 65536.0f); }
/* Returns the word number w (see te__attn_threshold) for keys 0 .. 31 of row i. */
TE__BOTH uint64_t te__attn_keep_row(const te__attn_kargs *a, int b, int h, int i) {
    return (((uint64_t)b * (uint64_t)a->heads + (uint64_t)h) * (uint64_t)a->s_q + (uint64_t)i) *
           (uint64_t)((a->s_kv + 31) / 32);
}
TE__BOTH uint32_t te__majority(uint32_t a, uint32_t b, uint32_t c) { return (a & b) | (a & c) | (b & c); }
/* Continues the comparison of 32 random numbers with the threshold. Bit j of at_least says whether the lower bits of
 * number j are at least the lower bits of the threshold. `bits` has the next four bits of each number, which are in
 * Philox block `block`. The result says the same as at_least, but with these bits included. Where a new bit differs
 * from the threshold's bit, it decides. Where they are equal, the old answer stays. Both cases are one formula: the
 * majority of the new bit, the old answer, and the inverse of the threshold's bit. */
TE__BOTH uint32_t te__attn_keep_step(uint32_t at_least, const uint32_t bits[4], uint32_t threshold, int block) {
    int n;
    for (n = 0; n < 4; n++) {
        const uint32_t other = (threshold >> (4 * block + n) & 1u) - 1u;
        at_least = te__majority(at_least, bits[n], other);
    }
    return at_least;
}
/* Returns which of the 32 keys of word w are kept: bit j is set if key j is kept. */
TE__BOTH uint32_t te__attn_keep_word(uint32_t threshold, uint64_t seed, uint64_t offset, uint64_t w) {
    uint32_t keep = 0xffffffffu, bits[4];
    int block;
    for (block = 0; block < 4; block++) {
        if (!(threshold & ((16u << (4 * block)) - 1u))) continue; /* all bits of the threshold up to this block are 0,
                                                                   * and every number is at least 0 */
        te__philox_rounds(7, seed, offset, 4 * w + (uint64_t)block, bits);
        keep = te__attn_keep_step(keep, bits, threshold, block);
    }
    return threshold >> 16 ? 0u : keep;
}

/* Rounds x * scale to an FP8 code of format `dt`, and returns the value of the code times `inverse`. This value
 * is an operand of FP8 attention's products. `inverse` is 1 / scale, rounded to nearest. */
TE__BOTH float te__attn_rounded(int dt, float x, float scale, float inverse) {
    return (dt == (int)TE_F8E5M2 ? te__e5m2_to_f32(te__f32_to_e5m2(x * scale))
                                 : te__e4m3_to_f32(te__f32_to_e4m3(x * scale))) *
           inverse;
}

#endif
