/* ops/attn/sequence.h: a sequence's rows, the keys they see, ALiBi's slopes, and what dropout keeps. It must not depend
 * on tensors or tiles. */
#ifndef TE__ATTN_SEQUENCE_H
#define TE__ATTN_SEQUENCE_H

/* Turns a causal mask and a window into two diagonals: row i sees the keys i + *lo .. i + *hi. `left` and `right` count
 * from diagonal `delta`; -1 means no bound. */
TE__BOTH void te__attn_diagonals(int left, int right, int causal, int delta, int s_q, int s_kv, int *lo, int *hi) {
    const int beyond = s_q + s_kv + 1;
    int from = left < 0 || left > beyond ? -beyond : delta - left,
        to = right < 0 || right > beyond ? beyond : delta + right;
    if (causal && to > delta) to = delta;
    *lo = from < -s_q ? -s_q : from > s_kv ? s_kv : from;
    *hi = to < -s_q - 1 ? -s_q - 1 : to > s_kv ? s_kv : to;
}

/* One sequence of a batch. s_q, s_kv, lo and hi are as in te__attn_kargs, but for this sequence alone. */
typedef struct te__attn_seq {
    int s_q, s_kv, lo, hi;
    int delta;                    /* ALiBi's distance is |i + delta - j| */
    int q_end, kv_end;            /* rows 0 .. q_end - 1 of o and dq, and 0 .. kv_end - 1 of dk and dv, are
                                   * written. Rows beyond s_q or s_kv become 0. */
    long long q_at, kv_at;        /* the row of the tensor where the sequence begins */
    long long lse_at, lse_head;   /* lse of row i and head h is at lse_at + h * lse_head + i */
    long long work_at, work_head; /* lse2 and delta of row i and head h are at work_at + h * work_head + i */
} te__attn_seq;

/* Returns the number of floats that lse2 (or delta) has for one head of packed sequences. Each sequence starts at a
 * multiple of four, with space for whole tiles behind it. */
TE__BOTH long long te__attn_packed_rows(int tokens, int batch) {
    return ((long long)tokens + 3) / 4 * 4 + (long long)(batch + 1) * (TE__ATTN_PAD + 4);
}

/* Returns the length of sequence b, and sets *first to its first row. `tokens` is the number of packed rows, `longest`
 * the largest length. Nothing has checked `cu` and `at`, so the results are limited to rows that exist. */
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

/* Returns where V^T (attn_fwd_fp8_values.cu) has the first key of packed sequence b, which begins at row kv_at. Each
 * sequence begins at a whole block of keys, behind those of the sequence before it. */
TE__BOTH int te__attn_fp8_values_at(int kv_at, int b) {
    return (kv_at / TE__ATTN_FP8_KEYS + b) * TE__ATTN_FP8_KEYS;
}

/* Returns the index of tile m of dQ, for head h of sequence b. q_at is the sequence's first row. `+ b` makes space for
 * incomplete tiles. */
TE__BOTH long long te__attn_dq_tile(const te__attn_bwd_hopper_kargs *a, int b, int h, int q_at, int m) {
    if (!a->a.x.packed_q) return ((long long)b * a->a.heads + h) * a->tiles_of_head + m;
    return (long long)h * a->tiles_of_head + q_at / a->queries + b + m;
}

/* Returns the page of key j of sequence b, and sets *row to the key's row within the page. Nothing has checked the page
 * ids, so they are clamped. */
TE__BOTH long long te__attn_page(const te__attn_extra *x, int b, int j, int *row) {
    const int page = x->pages[(long long)b * x->pages_of_each + j / x->page_size];
    *row = j % x->page_size;
    return page < 0 ? 0 : page >= x->num_pages ? x->num_pages - 1 : page;
}

/* Returns the te_attn_block for row i and key j of head h of sequence b. If there is no block mask, this is
 * TE_ATTN_BLOCK_PARTIAL. */
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

/* Returns dropout's threshold: p in units of 2^-16. Dropout keeps an element of P if its 16-bit random number is at
 * least the threshold. A 32-bit word holds bit n of the numbers of 32 neighbouring keys, so that one operation serves
 * all 32. Bits below the threshold's lowest set bit cannot change the result, and are not drawn.
 *
 * The generator is Philox4x32-7: seven rounds pass all tests of BigCrush (Salmon et al.).
 * Let row = (b * heads + h) * s_q + i, and w = row * ceil(s_kv / 32) + j / 32.
 * Bit n of key j's number is bit j % 32 of word n % 4 in Philox block 4 * w + n / 4. */
TE__BOTH uint32_t te__attn_threshold(const te__attn_kargs *a) { return (uint32_t)(a->dropout_p * 65536.0f); }
/* Returns the word number w (see te__attn_threshold) for keys 0 .. 31 of row i. */
TE__BOTH uint64_t te__attn_keep_row(const te__attn_kargs *a, int b, int h, int i) {
    return (((uint64_t)b * (uint64_t)a->heads + (uint64_t)h) * (uint64_t)a->s_q + (uint64_t)i) *
           (uint64_t)((a->s_kv + 31) / 32);
}
TE__BOTH uint32_t te__majority(uint32_t a, uint32_t b, uint32_t c) { return (a & b) | (a & c) | (b & c); }
/* Continues the comparison of 32 random numbers with the threshold. Bit j of at_least is 1 if the lower bits of number
 * j are at least the threshold's. `bits` has the next four bits of each number. A new bit that differs from the
 * threshold's bit decides; an equal bit keeps the old answer. This is the majority of the new bit, the old answer and
 * the threshold's inverse bit. */
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
        if (!(threshold & ((16u << (4 * block)) - 1u))) continue; /* no threshold bits up to this block */
        te__philox_rounds(7, seed, offset, 4 * w + (uint64_t)block, bits);
        keep = te__attn_keep_step(keep, bits, threshold, block);
    }
    return threshold >> 16 ? 0u : keep;
}

/* Rounds x * scale to an FP8 code of format `dt`, and returns the code's value times `inverse`. `inverse` is 1 / scale,
 * rounded to nearest. */
TE__BOTH float te__attn_rounded(int dt, float x, float scale, float inverse) {
    return (dt == (int)TE_F8E5M2 ? te__e5m2_to_f32(te__f32_to_e5m2(x * scale))
                                 : te__e4m3_to_f32(te__f32_to_e4m3(x * scale))) *
           inverse;
}

#endif
