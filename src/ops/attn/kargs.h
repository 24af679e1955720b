/* ops/attn/kargs.h: arguments of the attention kernels. Read by both compilers. */
#ifndef TE__ATTN_KARGS_H
#define TE__ATTN_KARGS_H

/* One of q, k, v, o and their gradients. Channels are adjacent. */
typedef struct te__attn_view {
    void *p;           /* element [0, 0, 0, 0] */
    long long s, b, h; /* elements from one position, sequence, head to the next */
    int dt;            /* te_dtype */
} te__attn_view;

/* The arguments of all attention kernels; each reads a part of them. */
typedef struct te__attn_kargs {
    te__attn_view q, k, v, o, d_o, dq, dk, dv;
    float *lse;          /* [batch, heads, s_q], natural logarithm; may be NULL in the forward */
    float *lse2, *delta; /* backward, [batch, heads, s_pad]: see attn_delta.cu */
    int batch, heads, groups;
    int s_q, s_kv, s_pad; /* s_pad: s_q rounded up to TE__ATTN_PAD */
    int d, d_v;           /* channels of q and k, of v and o */
    int lo, hi;           /* row i sees the keys from i + lo to i + hi, of 0 .. s_kv - 1 */
    float scale, scale2;  /* of the scores; times log2(e) */
    float dropout_p, keep_scale; /* 1 / (1 - p) */
    unsigned long long seed, offset;
    const void *rng; /* te__rng_read */
} te__attn_kargs;

/* The backward reads whole tiles of lse2 and delta, so their rows are padded to the largest tile. */
#define TE__ATTN_PAD 128

/* The general kernels: four warps, four rows a warp against 32 rows of the other side. */
#define TE__ATTN_ROWS 16
#define TE__ATTN_LANES 32
#define TE__ATTN_MAX_D 256

/* Floats in a row of their shared memory: read four at a time at one offset of eight neighbouring rows, or along one row. */
#define TE__ATTN_ROW(d) (((d) + 3) / 4 * 4)
#define TE__ATTN_LANE_ROW(d) (((d) + 31) / 32 * 32 + 4)

#endif
