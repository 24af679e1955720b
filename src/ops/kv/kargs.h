/* ops/kv/kargs.h: arguments of the kernels of sequences' lengths and of caches of keys and values. Read by both compilers. */
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

/* Where row `at` of x goes: false for padding, and for a row that the cache has no place for. *b, *t: its sequence, and its place along x's dimension of tokens. */
TE__BOTH bool te__kv_place(const te__kv_copy_kargs *a, long long at, int *b, long long *t, long long *page, long long *row) {
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
    if (i < 0 || i >= (long long)a->cu[*b + 1] - a->cu[*b] || to < 0 || to >= (long long)a->page_size * a->pages_of_each) return false;
    *page = a->table ? a->table[(long long)*b * a->pages_of_each + to / a->page_size] : *b;
    *row = to % a->page_size;
    return *page >= 0 && *page < a->pages;
}

#endif
