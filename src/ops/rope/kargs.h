/* ops/rope/kargs.h: the arguments of the rotary kernel. The host's compiler and the kernel's compiler both read this
 * file. */
#ifndef TE__ROPE_KARGS_H
#define TE__ROPE_KARGS_H

/* Describes where a tensor of heads lies in memory. The channels of a head are adjacent. */
typedef struct te__rope_view {
    void *p;           /* element [0, 0, 0, 0] */
    long long s, b, h; /* steps in elements: s to the next position, b to the next sequence, h to the next head */
    int dt;            /* te_dtype */
} te__rope_view;

#define TE__ROPE_MAX_HALF 512
#define TE__ROPE_THREADS 256

enum { TE__ROPE_IN_PLACE = 2 };

/* The arguments of the kernel. te_rope reads `packed` and writes `q`. The other operations split `packed` into q, k and
 * v, or make `packed` from them. */
typedef struct te__rope_kargs {
    te__rope_view packed, q, k, v; /* with `cached`, k and v are caches, whose steps s, b and h are those from one page,
                                    * row and head to the next */
    int cached;
    te__rope_view k_factors, v_factors; /* with `cached`, of caches of E4M3 codes: the factors of their rows */
    int coded;               /* 1: the caches have E4M3 codes */
    int pages, page_size, pages_of_each; /* with `cached`; these and the next ones as in te__cache_place */
    const int *cache_cu, *cache_start, *cache_table;
    const int *start;        /* [batch], or [sequences] if `cu` is given: a number for each sequence, added to the
                              * positions of its tokens; or NULL */
    const int *cu;           /* [sequences + 1]: the first token of each sequence. One batch entry has all sequences,
                              * one behind the other. NULL: each batch entry is one sequence */
    const void *positions;   /* i32 or i64, for each token; NULL: the position of a token is its index in the
                              * sequence */
    int positions_dt;        /* te_dtype */
    int positions_step;      /* elements from one sequence to the next; 0: all sequences have the same positions */
    const float *freqs;      /* used if has_freqs: the table of angles, [rows, 1 or sequences, 2 * half]. Otherwise
                              * inv_freq is used */
    long long freqs_rows, freqs_row, freqs_step; /* freqs_rows: number of rows. freqs_row: elements from one row to the
                                                  * next. freqs_step: elements from one sequence to the next; 0: all
                                                  * sequences use the same angles */
    int has_freqs;
    long long offset;        /* added to every position */
    float position_scale, attention_factor; /* attention_factor multiplies cosine and sine */
    int cp_size, cp_rank;    /* context parallelism: the number of ranks, and this rank; if cp_size is 1, a rank has
                              * whole sequences */
    int sequences;           /* with `cu` */
    int batch, seq, batch_first; /* batch_first: tokens are numbered sequence by sequence if it is 1, position by
                                  * position if it is 0. Memory has the same order */
    int heads, groups;       /* groups: number of heads of k, and of v; 0: there is only q */
    int grouped;             /* `packed` has groups: (heads / groups) heads of q, one of k, one of v. 0: all of q, then
                              * k, then v */
    int d, half;             /* half: number of channel pairs that are rotated */
    int interleaved;         /* the two channels of a pair are neighbours; otherwise they are `half` channels apart */
    int gather;              /* 1: `packed` is written; 0: `packed` is read */
    int whole;               /* 1: q is a packed projection too. TE__ROPE_IN_PLACE: q is `packed` itself. Both leave k
                              * and v unused. 0: q, k and v are separate */
    float direction;         /* 1, or -1 for the transposed rotation */
    int tokens;              /* number of tokens that a block handles */
    int vector;              /* addresses and sizes allow eight channels at a time */
    float inv_freq[TE__ROPE_MAX_HALF];
} te__rope_kargs;

/* Returns how many heads of a token are processed. A rotation in place leaves out the heads of v. With `coded`, these
 * are the heads of q; those of k and v are rows of codes (te__rope_coded_head). */
TE__BOTH int te__rope_heads(const te__rope_kargs *a) {
    return a->heads + (a->coded ? 0 : a->whole == TE__ROPE_IN_PLACE ? 1 : 2) * a->groups;
}
/* Returns the index in `packed` of the n-th processed head. */
TE__BOTH int te__rope_packed_head(const te__rope_kargs *a, int n) {
    const int left_out = a->coded ? 2 : a->whole == TE__ROPE_IN_PLACE ? 1 : 0; /* heads of each group */
    return left_out && a->grouped ? n + left_out * (n / (a->heads / a->groups + 2 - left_out)) : n;
}
/* Returns the index in `packed` of head h of k (part is 1) or v (part is 2). */
TE__BOTH int te__rope_coded_head(const te__rope_kargs *a, int part, int h) {
    const int queries = a->groups ? a->heads / a->groups : 0;
    return a->grouped ? h * (queries + 2) + queries + part - 1 : a->heads + (part - 1) * a->groups + h;
}

/* Finds the place of token t of sequence b in the caches. Returns false if it has none and must not be written. */
TE__BOTH bool te__rope_cache_place(const te__rope_kargs *a, int t, int b, long long *page, long long *row) {
    return te__cache_place(a->cache_cu, a->cache_start, a->cache_table, a->pages_of_each, a->page_size, a->pages, b, t,
                           page, row);
}

/* Returns the index of token t in its whole sequence. Context parallelism cuts the sequence into 2 * cp_size chunks. A
 * rank stores two chunks, together `length` tokens. */
TE__BOTH long long te__rope_place(const te__rope_kargs *a, long long t, long long length) {
    const long long half = length / 2;
    if (a->cp_size == 1) return t;
    return t < half ? t + a->cp_rank * half : (2 * a->cp_size - 1 - a->cp_rank) * half + t - half;
}
/* Returns the position of token t in batch entry *b. If `cu` is given, sets *b to the sequence that has the token. */
TE__BOTH long long te__rope_position(const te__rope_kargs *a, int t, int *b) {
    const long long at = a->positions_step * (long long)*b + t;
    long long place = t, length = a->seq;
    if (a->cu) {
        *b = te__sequence_of(a->cu, a->sequences, (long long)t * a->cp_size);
        place -= a->cu[*b] / a->cp_size;
        length = (a->cu[*b + 1] - a->cu[*b]) / a->cp_size;
        if (a->has_freqs && (place < 0 || place >= length)) place = 0; /* a token outside of all sequences gets index 0;
                                                                        * freqs may have no row for its true index */
    }
    place = !a->positions               ? te__rope_place(a, place, length)
            : a->positions_dt == TE_I64 ? ((const long long *)a->positions)[at]
                                        : ((const int *)a->positions)[at];
    return place + a->offset + (a->start ? a->start[*b] : 0);
}
/* Returns the angles of a token of sequence b: 2 * half numbers. Returns NULL if freqs has no row for the token's
 * position. */
TE__BOTH const float *te__rope_row(const te__rope_kargs *a, long long position, int b) {
    return position < 0 || position >= a->freqs_rows
               ? 0
               : a->freqs + position * a->freqs_row + (long long)b * a->freqs_step;
}

#endif
