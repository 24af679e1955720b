/* ops/kv/kargs.h: arguments of the kernels of sequences' lengths and of caches of keys and values. Read by both
 * compilers. */
#ifndef TE__KV_KARGS_H
#define TE__KV_KARGS_H

#define TE__CU_SEQLENS_THREADS 1024

typedef struct te__cu_seqlens_kargs {
    const unsigned char *mask; /* 0: a token */
    int *cu;                   /* [sequences + 1] */
    long long sequences, length;
} te__cu_seqlens_kargs;

/* One side of the copy, keys or values. Channels are adjacent. */
typedef struct te__kv_side {
    const void *x;
    void *cache;               /* [pages, page_size, heads, d] */
    long long x_s, x_b, x_h;   /* elements of x from one token, sequence, head to the next */
    long long page, row, head; /* elements of the cache from one page, row, head to the next */
    int d, x_dt, cache_dt;
} te__kv_side;

typedef struct te__kv_copy_kargs {
    te__kv_side side[2];   /* keys, values */
    const int *cu;         /* [sequences + 1] */
    const int *start;      /* [sequences] */
    const int *table;      /* [sequences, pages_of_each], or NULL: page b is sequence b's */
    long long tokens;      /* rows of x, of all sequences */
    int sequences, heads, packed, batch_first; /* packed: cu says which sequence a row belongs to */
    long long rows_of_each;                    /* rows of x of each sequence, unless packed */
    int page_size, pages, pages_of_each;
} te__kv_copy_kargs;

#define TE__MASK_THREADS 1024

typedef struct te__causal_mask_kargs {
    const void *mask;
    int *causal;
    float *failed;      /* a word of the plan, 0 between kernels */
    unsigned *counter;  /* counter of te_last_block */
    long long rows;     /* rows that are checked */
    long long heads, s; /* heads: with strict, heads whose masks differ */
    long long stride_b, stride_h, stride_i, stride_j;
    long long left;     /* keys that a row sees in front of its own */
    int dt, strict;
} te__causal_mask_kargs;

/* Returns the first element of row `at` of the rows that are checked; *i: the row's number in its matrix. */
TE__BOTH long long te__mask_row(const te__causal_mask_kargs *a, long long at, long long *i) {
    const long long matrix = a->strict ? at / a->s : at / 2, h = a->strict ? matrix % a->heads : 0,
                    b = a->strict ? matrix / a->heads : matrix;
    *i = a->strict ? at % a->s : at % 2 ? a->s - 1 : 0;
    return b * a->stride_b + h * a->stride_h + *i * a->stride_i;
}
/* Returns whether v, key j of row i, is what a causal mask has there. Without `strict` it checks only keys 0 and s -
 * 1 of the first row of all (first), since the number of keys is checked for each row. */
TE__BOTH bool te__mask_key_fits(const te__causal_mask_kargs *a, bool first, long long i, long long j, float v) {
    if (a->strict) return j <= i && i - j <= a->left ? v == 0.0f : v < -10000.0f;
    return !first || ((j > 0 || v > -10000.0f) && (j < a->s - 1 || v < -10000.0f));
}
/* Returns how many keys row i sees. */
TE__BOTH long long te__mask_row_keys(const te__causal_mask_kargs *a, long long i) {
    return i < a->left ? i + 1 : a->left + 1;
}

/* Finds the place of row `at` of x in the cache, *page and *row. Returns false for padding, and for a row that the
 * cache has no place for. *b: the row's sequence. *t: the row's place along x's dimension of tokens. */
TE__BOTH bool te__kv_place(const te__kv_copy_kargs *a, long long at, int *b, long long *t, long long *page,
                           long long *row) {
    long long i, to;
    if (a->packed) {
        *b = te__sequence_of(a->cu, a->sequences, at);
        *t = at;
        i = at - a->cu[*b];
    } else {
        *b = (int)(a->batch_first ? at / a->rows_of_each : at % a->sequences);
        *t = i = a->batch_first ? at % a->rows_of_each : at / a->sequences;
    }
    to = i + a->start[*b];
    if (i < 0 || i >= (long long)a->cu[*b + 1] - a->cu[*b] || to < 0 ||
        to >= (long long)a->page_size * a->pages_of_each)
        return false;
    *page = a->table ? a->table[(long long)*b * a->pages_of_each + to / a->page_size] : *b;
    *row = to % a->page_size;
    return *page >= 0 && *page < a->pages;
}

#endif
