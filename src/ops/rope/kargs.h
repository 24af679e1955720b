/* ops/rope/kargs.h: the arguments of the rotary kernel. The host's compiler and the kernel's compiler both read it. */
#ifndef TE__ROPE_KARGS_H
#define TE__ROPE_KARGS_H

/* A tensor of heads in memory. Channels of a head are adjacent. */
typedef struct te__rope_view {
    void *p;           /* element [0, 0, 0, 0] */
    long long s, b, h; /* elements from one position, from one sequence, from one head to the next */
    int dt;            /* te_dtype */
} te__rope_view;

#define TE__ROPE_MAX_HALF 512
#define TE__ROPE_THREADS 256

enum { TE__ROPE_IN_PLACE = 2 };

/* Either one tensor of heads (te_rope: `packed` is x and `q` is y), or a packed projection on one side and q, k and v
 * on the other. */
typedef struct te__rope_kargs {
    te__rope_view packed, q, k, v;
    const int *start;        /* [batch], or with `cu` [sequences]: a first position that is added; may be NULL */
    const int *cu;           /* [sequences + 1], or NULL: where sequences start that lie behind each other in one
                              * batch */
    const void *positions;   /* i32 or i64, of each token; NULL: a token's position is its place */
    int positions_dt;        /* te_dtype */
    int positions_step;      /* from one sequence to the next; 0: all sequences have the same positions */
    const float *freqs;      /* with has_freqs: [rows, 1 or sequences, 2 half], the angles; else inv_freq has
                              * frequencies */
    long long freqs_rows, freqs_row, freqs_step; /* freqs_row, freqs_step: elements from one row, and from one sequence,
                                                  * to the next; step 0: all sequences share the rows */
    int has_freqs;
    long long offset;        /* added to every position */
    float position_scale, attention_factor; /* attention_factor multiplies cosine and sine */
    int cp_size, cp_rank;    /* context parallelism: ranks, and this rank; cp_size 1: a rank has whole sequences */
    int sequences;           /* with `cu` */
    int batch, seq, batch_first; /* batch_first: tokens are numbered with the batch outermost, in the order of memory */
    int heads, groups;       /* groups: heads of k and of v; 0: there is only q */
    int grouped;             /* packed heads come in groups of (heads / groups of q, one k, one v); else all q, all k,
                              * all v */
    int d, half;             /* half: channel pairs that are rotated; 0: none */
    int interleaved;         /* the channels of a pair are neighbours; else they are half apart */
    int gather;              /* packed is written; else it is read */
    int whole;               /* q is a packed projection too; TE__ROPE_IN_PLACE: it is `packed` itself */
    float direction;         /* 1, or -1 for the transposed rotation */
    int tokens;              /* tokens of a block */
    int vector;              /* addresses and sizes allow eight channels at a time */
    float inv_freq[TE__ROPE_MAX_HALF];
} te__rope_kargs;

/* Returns how many heads of a token are processed. In place the values' heads are left out: they are the last head of
 * each group, or the last `groups` heads of all. */
TE__BOTH int te__rope_heads(const te__rope_kargs *a) {
    return a->heads + (a->whole == TE__ROPE_IN_PLACE ? 1 : 2) * a->groups;
}
/* Returns the packed head that is number n of the processed heads. */
TE__BOTH int te__rope_packed_head(const te__rope_kargs *a, int n) {
    return a->whole == TE__ROPE_IN_PLACE && a->grouped ? n + n / (a->heads / a->groups + 1) : n;
}

/* Returns the place of token t in its whole sequence. A rank has `length` tokens of the sequence: two of 2 cp_size
 * chunks, one behind the other. */
TE__BOTH long long te__rope_place(const te__rope_kargs *a, long long t, long long length) {
    const long long half = length / 2;
    if (a->cp_size == 1) return t;
    return t < half ? t + a->cp_rank * half : (2 * a->cp_size - 1 - a->cp_rank) * half + t - half;
}
/* Returns the position of token t of batch entry *b. With `cu`, *b becomes the token's sequence. */
TE__BOTH long long te__rope_position(const te__rope_kargs *a, int t, int *b) {
    const long long at = a->positions_step * (long long)*b + t;
    long long place = t, length = a->seq;
    if (a->cu) {
        *b = te__sequence_of(a->cu, a->sequences, (long long)t * a->cp_size);
        place -= a->cu[*b] / a->cp_size;
        length = (a->cu[*b + 1] - a->cu[*b]) / a->cp_size;
        if (a->has_freqs && (place < 0 || place >= length)) place = 0; /* a token of no sequence takes place 0, so that
                                                                        * the table needs no row for it */
    }
    place = !a->positions               ? te__rope_place(a, place, length)
            : a->positions_dt == TE_I64 ? ((const long long *)a->positions)[at]
                                        : ((const int *)a->positions)[at];
    return place + a->offset + (a->start ? a->start[*b] : 0);
}
/* Returns the 2 half angles of a token of sequence b, or NULL if freqs has no row for its position. */
TE__BOTH const float *te__rope_row(const te__rope_kargs *a, long long position, int b) {
    return position < 0 || position >= a->freqs_rows
               ? 0
               : a->freqs + position * a->freqs_row + (long long)b * a->freqs_step;
}

#endif
