/* ops/rope/kargs.h: arguments of the rotary kernel. Read by both compilers. */
#ifndef TE__ROPE_KARGS_H
#define TE__ROPE_KARGS_H

/* Channels are adjacent. */
typedef struct te__rope_view {
    void *p;           /* element [0, 0, 0, 0] */
    long long s, b, h; /* elements from one position, sequence, head to the next */
    int dt;            /* te_dtype */
} te__rope_view;

#define TE__ROPE_MAX_HALF 512
#define TE__ROPE_THREADS 256

/* One tensor of heads (te_rope: `packed` is x and `q` is y) or a packed projection on one side, q, k and v on the other. */
typedef struct te__rope_kargs {
    te__rope_view packed, q, k, v;
    const int *start;        /* [batch], or with `cu` [sequences]; may be NULL */
    const int *cu;           /* [sequences + 1], or NULL: tokens of sequences behind each other, in one batch */
    long long offset;        /* added to every position */
    float position_scale;
    int sequences;           /* with `cu` */
    int batch, seq, batch_first; /* tokens are numbered in the order of memory */
    int heads, groups;       /* groups: heads of k and of v; 0: there is only q */
    int grouped;             /* packed heads come as groups of (heads / groups of q, k, v), else all q, all k, all v */
    int d, half;             /* half: channel pairs that are rotated; 0: none */
    int interleaved;         /* pairs are neighbours, else half apart */
    int gather;              /* packed is written, else read */
    float direction;         /* 1, or -1 for the transposed rotation */
    int tokens;              /* of a block */
    int vector;              /* everything allows eight channels at a time */
    float inv_freq[TE__ROPE_MAX_HALF]; /* base^(-2i / rotary_dim) */
} te__rope_kargs;

/* The position of token t of sequence b. */
TE__BOTH long long te__rope_position(const te__rope_kargs *a, int t, int b) {
    long long at = t;
    if (a->cu) {
        b = te__sequence_of(a->cu, a->sequences, t);
        at -= a->cu[b];
    }
    return at + a->offset + (a->start ? a->start[b] : 0);
}

#endif
