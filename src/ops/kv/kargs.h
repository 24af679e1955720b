/* ops/kv/kargs.h: arguments of the kernels of sequences' lengths and of caches of keys and values. Read by both
 * compilers. */
#ifndef TE__KV_KARGS_H
#define TE__KV_KARGS_H

#define TE__CU_SEQLENS_THREADS 1024

typedef struct te__cu_seqlens_kargs {
    const unsigned char *mask; /* [sequences, length]: 0 => a token */
    int *cu;                   /* [sequences + 1] */
    long long sequences, length;
} te__cu_seqlens_kargs;

/* Keys or values: channels are adjacent. */
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
    float *failed;      /* of the plan: 0 between kernels */
    unsigned *counter;  /* of te_last_block */
    long long rows;     /* that are looked at */
    long long heads, s; /* heads: strict: those that differ */
    long long stride_b, stride_h, stride_i, stride_j;
    long long left;     /* keys in front of a row's own that it sees */
    int dt, strict;
} te__causal_mask_kargs;

/* Row `at` of those that are looked at: its first element, and its place i in the matrix. */
TE__BOTH long long te__mask_row(const te__causal_mask_kargs *a, long long at, long long *i) {
    const long long matrix = a->strict ? at / a->s : at / 2, h = a->strict ? matrix % a->heads : 0,
                    b = a->strict ? matrix / a->heads : matrix;
    *i = a->strict ? at % a->s : at % 2 ? a->s - 1 : 0;
    return b * a->stride_b + h * a->stride_h + *i * a->stride_i;
}
/* Is v, key j of row i, what a causal mask has there, as far as keys are looked at one by one? first: it is of the
 * first row of all. */
TE__BOTH bool te__mask_key_fits(const te__causal_mask_kargs *a, bool first, long long i, long long j, float v) {
    if (a->strict) return j <= i && i - j <= a->left ? v == 0.0f : v < -10000.0f;
    return !first || ((j > 0 || v > -10000.0f) && (j < a->s - 1 || v < -10000.0f));
}
/* How many keys row i sees. */
TE__BOTH long long te__mask_row_keys(const te__causal_mask_kargs *a, long long i) {
    return i < a->left ? i + 1 : a->left + 1;
}

/* Where row `at` of x goes: false for padding, and for a row that the cache has no place for. *b, *t: its sequence, and
 * its place along x's dimension of tokens. */
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
