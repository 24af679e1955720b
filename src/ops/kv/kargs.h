/* ops/kv/kargs.h: the arguments of the kernels for sequence lengths and KV caches. The host's and the kernels'
 * compilers both read this file. */
#ifndef TE__KV_KARGS_H
#define TE__KV_KARGS_H

#define TE__CU_SEQLENS_THREADS 1024

typedef struct te__cu_seqlens_kargs {
    const unsigned char *mask; /* 0: a token */
    int *cu;                   /* [sequences + 1] */
    long long sequences, length;
} te__cu_seqlens_kargs;

/* The arguments of the kernel advance_kv_cache, which has TE__CU_SEQLENS_THREADS threads, too. */
typedef struct te__kv_advance_kargs {
    int *start;        /* [sequences] */
    int *cu_q, *cu_kv; /* [sequences + 1] */
    long long sequences;
    int added, step;
} te__kv_advance_kargs;

/* The arguments of the copy of keys, or of the copy of values. The channels of a head are adjacent. */
typedef struct te__kv_side {
    const void *x;
    void *cache;               /* [pages, page_size, heads, d] */
    long long x_s, x_b, x_h;   /* strides of x in elements, from one token (x_s), sequence (x_b) or head (x_h) to the
                                * next */
    long long page, row, head; /* strides of the cache in elements, from one page, row (token) or head to the next */
    void *factors;             /* e8m0: of each row of an e4m3 cache */
    long long factor_page, factor_row, factor_head; /* strides of the factors */
    int d, x_dt, cache_dt;
} te__kv_side;

typedef struct te__kv_copy_kargs {
    te__kv_side side[2];   /* keys, values */
    const int *cu;         /* [sequences + 1] */
    const int *start;      /* [sequences] */
    const int *table;      /* [sequences, pages_of_each]; if NULL, page b belongs to sequence b */
    long long tokens;      /* rows of x, of all sequences */
    int sequences, heads, packed, batch_first; /* packed: cu says which sequence a row belongs to */
    long long rows_of_each;                    /* rows of x of each sequence, unless packed */
    int page_size, pages, pages_of_each;
} te__kv_copy_kargs;

#define TE__MASK_THREADS 1024

typedef struct te__causal_mask_kargs {
    const void *mask;
    int *causal;
    float *failed;      /* a word in device memory that is 0 between kernels */
    unsigned *counter;  /* counter of te_last_block */
    long long rows;     /* rows that are checked */
    long long heads, s; /* heads: the number of heads with different masks, if strict */
    long long stride_b, stride_h, stride_i, stride_j;
    long long left;     /* number of keys that a row sees before its own */
    int dt, strict;
} te__causal_mask_kargs;

/* Returns the position in the mask of the first element of a row. `at` is the row's index among the rows that are
 * checked. Sets *i to the row's index within its matrix. */
TE__BOTH long long te__mask_row(const te__causal_mask_kargs *a, long long at, long long *i) {
    const long long matrix = a->strict ? at / a->s : at / 2, h = a->strict ? matrix % a->heads : 0,
                    b = a->strict ? matrix / a->heads : matrix;
    *i = a->strict ? at % a->s : at % 2 ? a->s - 1 : 0;
    return b * a->stride_b + h * a->stride_h + *i * a->stride_i;
}
/* Returns whether v, the mask's element for row i and key j, is that of a causal mask. Without `strict`, checks only
 * two keys of the `first` row. */
TE__BOTH bool te__mask_key_fits(const te__causal_mask_kargs *a, bool first, long long i, long long j, float v) {
    if (a->strict) return j <= i && i - j <= a->left ? v == 0.0f : v < -10000.0f;
    return !first || ((j > 0 || v > -10000.0f) && (j < a->s - 1 || v < -10000.0f));
}
/* Returns how many keys row i sees. */
TE__BOTH long long te__mask_row_keys(const te__causal_mask_kargs *a, long long i) {
    return i < a->left ? i + 1 : a->left + 1;
}

/* Finds where row `at` of x (new keys or values) goes in the cache: *page and *row. Sets *b to the sequence
 * of row `at`, and *t to the row's index along x's tokens. Returns false if the row is padding or does not fit. */
TE__BOTH bool te__kv_place(const te__kv_copy_kargs *a, long long at, int *b, long long *t, long long *page,
                           long long *row) {
    long long i;
    if (a->packed) {
        *b = te__sequence_of(a->cu, a->sequences, at);
        *t = at;
        i = at - a->cu[*b];
    } else {
        *b = (int)(a->batch_first ? at / a->rows_of_each : at % a->sequences);
        *t = i = a->batch_first ? at % a->rows_of_each : at / a->sequences;
    }
    return te__cache_place(a->cu, a->start, a->table, a->pages_of_each, a->page_size, a->pages, *b, i, page, row);
}

#endif
