/* ops/attn/kargs.h: arguments of the attention kernels. Read by both compilers. */
#ifndef TE__ATTN_KARGS_H
#define TE__ATTN_KARGS_H

/* One of q, k, v, o and their gradients. Channels are adjacent. */
typedef struct te__attn_view {
    long long s, b, h; /* elements from one position, sequence, head to the next. First, since no kernel changes s in a
                        * copy: NVRTC 12.0 reads the first member of a changed copy from the arguments themselves */
    void *p;           /* element [0, 0, 0, 0] */
    int dt;            /* te_dtype */
} te__attn_view;

/* A tensor over [batch, heads, s_q, s_kv] that is added to the scores, or masks them; strides of 0 repeat it. */
typedef struct te__attn_table {
    void *p;               /* NULL: none */
    long long b, h, i, j;  /* elements */
    int dt;                /* te_dtype */
} te__attn_table;

/* The part of te_attn_rule and te_attn_fp8 that plain attention does not have. */
typedef struct te__attn_extra {
    int on;                    /* any of it */
    int causal, bottom_right;  /* the mask has a diagonal; the diagonal ends in the corner of the last row and the last
                                * key */
    int left, right;           /* the window; -1: no bound */
    int packed_q, packed_kv;   /* sequences lie one behind the other */
    int t_q, t_kv;             /* packed: rows of q, of k and v */
    const int *cu_q, *cu_kv;   /* [batch + 1], lengths; NULL: s_q and s_kv */
    const int *at_q, *at_kv;   /* [batch + 1], packed: where sequences lie; NULL: cu_q, cu_kv */
    const int *pages;          /* [batch, pages_of_each]; NULL: keys are not paged */
    int page_size, num_pages, pages_of_each;
    te__attn_table bias, mask; /* mask: u8 */
    te__attn_table blocks;     /* u8: te_attn_block of the keys and rows of TE_ATTN_BLOCK_SIZE */
    float bias_scale;          /* of B in the scores, and of dS in dB */
    float softcap;             /* of scaled products; 0: none */
    float softcap_in, softcap2; /* scale / softcap; softcap times log2(e) */
    int alibi;
    const float *slopes; /* NULL: te__attn_slope */
    int slopes_b;        /* from one sequence to the next */
    int softmax;         /* te_softmax_type */
    const float *sink;   /* [heads], TE_SOFTMAX_LEARNABLE */
    float *max_logit;    /* [heads], or NULL */
    te__attn_table dbias;
    int dbias_b, dbias_h, dbias_i; /* its sizes, each 1 or all */
    float *dsink;                  /* [heads], or NULL */
    const void *aux[4];            /* of the user's expressions (score_mod.cuh); */
    long long aux_n[4];            /* their elements */
    int s_dt, dp_dt;               /* te_dtype: S, and dP, are rounded to codes; 0: not */
    const float *s_scale, *dp_scale;
    float *s_amax, *dp_amax; /* or NULL */
} te__attn_extra;

/* The arguments of all attention kernels; each reads a part of them. te__attn_problem_of (op.c) fills all but lse2 and
 * delta. */
typedef struct te__attn_kargs {
    te__attn_view q, k, v, o, d_o, dq, dk, dv;
    float *lse;          /* [batch, heads, s_q], natural logarithm; may be NULL in the forward */
    float *lse2, *delta; /* backward, [batch, heads, s_pad]: see attn_delta.cu; packed: te__attn_seq */
    int batch, heads, groups;
    int s_q, s_kv, s_pad; /* s_pad: s_q rounded up to TE__ATTN_PAD */
    int d, d_v;           /* channels of q and k, of v and o */
    int lo, hi;           /* row i sees the keys from i + lo to i + hi, of 0 .. s_kv - 1 */
    float scale, scale2;  /* of the scores; times log2(e) */
    float dropout_p, keep_scale; /* a multiple of 2^-16; 1 / (1 - p) */
    unsigned long long seed, offset;
    const void *rng; /* te__rng_read */
    te__attn_extra x;
} te__attn_kargs;

/* The tiles of a Hopper kernel: how they are numbered, and two counters that are 0 between kernels. */
typedef struct te__attn_order {
    unsigned *counter;
    int tiles, rows; /* all, and those of a head */
    int together;    /* heads that run at one time */
    int pad;
} te__attn_order;

/* Dropout's bits in memory: for each 128 keys, and for each row in the order of lse2, four words of
 * te__attn_keep_word. */
typedef struct te__attn_bits {
    long long rows;
    unsigned *words; /* NULL: kernels draw them */
} te__attn_bits;
typedef struct te__attn_bits_kargs {
    te__attn_kargs a;
    te__attn_bits bits;
} te__attn_bits_kargs;
#define TE__ATTN_BITS_KEYS 1024 /* keys of a block of attn_dropout_bits.cu */

/* attn_bias_line.cu */
typedef struct te__attn_line_kargs {
    te__attn_table bias, to; /* to: bf16 [b|1, h|1, keys, 8]; strides in keys, 16 bytes each */
    int heads;               /* that the bias has: 1 or all */
    int s_kv, keys;          /* keys: s_kv up to whole blocks of the forward kernel */
    float factor;            /* of the bias in units of products */
} te__attn_line_kargs;

/* Tensor maps must lie at multiples of 64 bytes, which kernel arguments do only when their type asks for it. Sizes are
 * multiples of 64, so that both compilers see one. */
#ifdef __CUDACC__
#define TE__ATTN_ALIGN_64 __align__(64)
#else
#define TE__ATTN_ALIGN_64
#endif
typedef struct TE__ATTN_ALIGN_64 te__attn_fwd_hopper_kargs {
    unsigned long long q_map[16], k_map[16], v_map[16], o_map[16];
    te__attn_bits bits;
    te__attn_kargs a;
    te__attn_order order;
    unsigned char pad[64 - (sizeof(te__attn_kargs) + sizeof(te__attn_order) + sizeof(te__attn_bits)) % 64];
    unsigned long long bias_map[16]; /* X_TILES */
    float bias_factor;               /* of a bias in units of products */
    int pad_factor;
    te__attn_table line;             /* X_KEYS: what attn_bias_line.cu made of the bias; strides as there */
    unsigned char pad_bias[64 - (sizeof(te__attn_table) + 8) % 64];
} te__attn_fwd_hopper_kargs;
typedef char te__attn_fwd_hopper_kargs_fit[sizeof(te__attn_fwd_hopper_kargs) % 64 == 0 ? 1 : -1];

typedef struct TE__ATTN_ALIGN_64 te__attn_bwd_hopper_kargs {
    /* dq_map: of attn_bwd_dq_hopper.cu alone */
    unsigned long long q_map[16], do_map[16], k_map[16], v_map[16], dk_map[16], dv_map[16], dq_map[16];
    long long tiles_of_head;
    te__attn_bits bits;
    te__attn_kargs a;
    te__attn_order order; /* of blocks of keys, or of queries; counter: numbers drawn */
    float *dq_sum;        /* of attn_bwd_hopper.cu: tiles of dQ in f32, each in the order of the registers */
    int *added;           /* for each of them: key blocks that have added to it; NULL: there are none */
    int queries, pad_queries; /* of a tile */
    unsigned char
        pad[64 -
            (sizeof(te__attn_kargs) + sizeof(te__attn_order) + sizeof(te__attn_bits) + 2 * sizeof(void *) + 16) % 64];
    unsigned long long bias_map[16]; /* of attn_bwd_hopper.cu: X_TILES */
    long long bias_row;              /* X_SUMS: keys, up to whole blocks */
    float *bias_sum;                 /* [batch, groups, bias_row], of dS over a group's heads and all queries */
    float bias_factor;               /* of a bias in units of products */
    unsigned char pad_bias[64 - sizeof(void *) - 12];
} te__attn_bwd_hopper_kargs;
typedef char te__attn_bwd_hopper_kargs_fit[sizeof(te__attn_bwd_hopper_kargs) % 64 == 0 ? 1 : -1];
#define TE__ATTN_BWD_QUERIES(d) (8192 / (d))
#define TE__ATTN_BWD_SHARED(d)                                                                \
    (2 * TE__ATTN_BYTES(128, d) + 4 * 16384 + 2 * 256 * TE__ATTN_BWD_QUERIES(d) + 2 * 32768 + \
     16 * TE__ATTN_BWD_QUERIES(d) + 16 * 8 + 16)

/* Of heads above 128 channels: stages of queries (attn_bwd_dkv_hopper.cu), of keys and of values
 * (attn_bwd_dq_hopper.cu), and shared memory. */
#define TE__ATTN_DKV_STAGES(d) ((d) <= 192 ? 3 : 2)
#define TE__ATTN_DKV_SHARED(d, d_v)                                                                 \
    ((TE__ATTN_DKV_STAGES(d) + 1) * (TE__ATTN_BYTES(64, d) + TE__ATTN_BYTES(64, d_v)) + 2 * 16384 + \
     2 * 256 * TE__ATTN_DKV_STAGES(d) + 8 * (4 * TE__ATTN_DKV_STAGES(d) + 16))
#define TE__ATTN_DQ_STAGES_K(d) ((d) <= 192 ? 3 : 2)
#define TE__ATTN_DQ_STAGES_V(d) ((d) <= 192 ? 2 : 1)
#define TE__ATTN_DQ_SHARED(d, d_v)                                                                                     \
    ((2 + TE__ATTN_DQ_STAGES_K(d)) * TE__ATTN_BYTES(64, d) + (2 + TE__ATTN_DQ_STAGES_V(d)) * TE__ATTN_BYTES(64, d_v) + \
     8 * (2 + 2 * TE__ATTN_DQ_STAGES_K(d) + 2 * TE__ATTN_DQ_STAGES_V(d)))

/* attn_bwd_bias_hopper.cu, and attn_bwd_bias_put.cu behind it. */
typedef struct TE__ATTN_ALIGN_64 te__attn_bias_hopper_kargs {
    unsigned long long q_map[16], do_map[16], k_map[16], v_map[16];
    long long part;       /* elements from one part to the next */
    te__attn_bits bits;
    te__attn_table to;    /* the gradient, or its parts in f32: [parts, dbias_b, dbias_h, dbias_i, keys]; bias_sum */
    te__attn_kargs a;
    te__attn_order order; /* tiles: of all parts; rows: tiles of 128 queries */
    int parts, tiles_of_part;
    int aligned;          /* of `to`, keys can be written 16 bytes at a time, of f32 8 */
    float by;             /* what sums are multiplied by */
    unsigned char pad[64 - (sizeof(te__attn_kargs) + sizeof(te__attn_order) + sizeof(te__attn_table) +
                            sizeof(te__attn_bits) + 24) %
                               64];
} te__attn_bias_hopper_kargs;
typedef char te__attn_bias_hopper_kargs_fit[sizeof(te__attn_bias_hopper_kargs) % 64 == 0 ? 1 : -1];
#define TE__ATTN_DBIAS_SHARED (7 * 32768 + 6 * (48 + 16) + 512) /* stages and the tile of the bias, messages and
                                                                 * barriers, sums of columns */

/* Hopper's forward: keys of a block, stages of Q, and shared memory, by channels and consumer warpgroups. Bytes of rows
 * of d channels, in whole panels of 64. */
#define TE__ATTN_BYTES(rows, d) ((rows) * 128 * (((d) + 63) / 64))
#define TE__ATTN_FWD_KEYS(d, d_v) ((d) <= 128 || (d_v) <= 128 ? 128 : (d) <= 192 ? 96 : 64)
#define TE__ATTN_FWD_STAGES_Q(d, d_v, waves) ((d) <= 128 ? 2 : 1)
#define TE__ATTN_FWD_INPUTS(d, d_v, waves)                                                                  \
    (TE__ATTN_FWD_STAGES_Q(d, d_v, waves) * (waves) * TE__ATTN_BYTES(64, d) +                               \
     2 * TE__ATTN_BYTES(TE__ATTN_FWD_KEYS(d, d_v), d) + 2 * TE__ATTN_BYTES(TE__ATTN_FWD_KEYS(d, d_v), d_v))
#define TE__ATTN_FWD_SHARED(d, d_v, waves)                                                      \
    (TE__ATTN_FWD_INPUTS(d, d_v, waves) +                                                       \
     (TE__ATTN_FWD_STAGES_Q(d, d_v, waves) == 1 ? 0 : (waves) * TE__ATTN_BYTES(64, d_v)) + 256)
/* Bytes of the columns' numbers that ALiBi multiplies by (te_line), in addition: with the 256 of barriers a multiple of
 * 1024, for O behind them, and what there is room for. */
#define TE__ATTN_LINE_BYTES(d) ((d) > 64 && (d) <= 128 ? 2816 : 3840)
/* The same with tiles of a bias (X_TILES), O in the place of Q, and stages of those tiles: as many as fit, of one and
 * two. */
#define TE__ATTN_SHARED_MAX 232448
#define TE__ATTN_BIAS_TILE(d, d_v) TE__ATTN_BYTES(64, TE__ATTN_FWD_KEYS(d, d_v))
#define TE__ATTN_BIAS_SHARED_OF(d, d_v, waves, stages)                                           \
    (TE__ATTN_FWD_INPUTS(d, d_v, waves) + (stages) * (waves) * TE__ATTN_BIAS_TILE(d, d_v) + 320)
#define TE__ATTN_BIAS_STAGES(d, d_v, waves) (TE__ATTN_BIAS_SHARED_OF(d, d_v, waves, 2) <= TE__ATTN_SHARED_MAX ? 2 : 1)
#define TE__ATTN_BIAS_SHARED(d, d_v, waves) TE__ATTN_BIAS_SHARED_OF(d, d_v, waves, TE__ATTN_BIAS_STAGES(d, d_v, waves))
/* The same with a bias that all queries share (X_KEYS): operand A of its product, 64 rows of 16 bytes; of B, 16 bytes a
 * key, two stages and zeros. O lies in the place of Q above 64 channels. */
#define TE__ATTN_KEYS_BYTES(d, d_v) (1024 + 3 * 16 * TE__ATTN_FWD_KEYS(d, d_v))
#define TE__ATTN_KEYS_SHARED(d, d_v, waves)                                                     \
    (TE__ATTN_FWD_INPUTS(d, d_v, waves) + ((d) <= 64 ? (waves) * TE__ATTN_BYTES(64, d_v) : 0) + \
     TE__ATTN_KEYS_BYTES(d, d_v) + 256)

/* The backward reads whole tiles of lse2 and delta, so their rows are padded to the largest tile. */
#define TE__ATTN_PAD 128

/* The general kernels: four warps, four rows a warp against 32 rows of the other side. */
#define TE__ATTN_ROWS 16
#define TE__ATTN_LANES 32
#define TE__ATTN_CHUNK 256 /* channels that they have at a time; heads of more are gone through in chunks */
#define TE__ATTN_MAX_D 1024

/* The arguments of the kernels of sparse attention, a query of which reads the keys of its list. They have `heads`
 * query heads, and one of keys, which are the values, too. */
typedef struct te__sparse_attn_kargs {
    te__attn_view q, kv, o, d_o, dq, dkv; /* kv, dkv: [batch, s_kv, d]; a value is the first d_v channels of its key */
    const int *indices;  /* [batch, s_q, n]; outside of 0 .. s_kv - 1: none */
    const float *sinks;  /* [heads], or NULL */
    float *lse;          /* [batch, heads, s_q], natural logarithm; may be NULL in the forward */
    float *lse2, *delta; /* backward, [batch, heads, s_q]: as in attn_delta.cu */
    int *cursor;         /* backward, [batch, chunks, s_kv]: the queries of a chunk that read the key, then where in
                          * `list` they go */
    int *start, *list;   /* backward, [batch, s_kv + 1], [batch, s_q n]: the queries that read key j are list[start[j]]
                          * to list[start[j + 1] - 1], ascending */
    int batch, heads, s_q, s_kv, n, d, d_v;
    int tile;            /* keys in shared memory at a time, 16 or 32 */
    int chunks, step;    /* of sparse_attn_list.cu */
    float scale, scale2; /* of the scores; times log2(e) */
} te__sparse_attn_kargs;
#define TE__SPARSE_ROWS 8 /* heads of a block */
#define TE__SPARSE_MAX_D 576

/* Floats in a row of their shared memory: read four at a time at one offset of eight neighbouring rows, or along one
 * row. */
#define TE__ATTN_ROW(d) (((d) + 3) / 4 * 4)
#define TE__ATTN_LANE_ROW(d) (((d) + 31) / 32 * 32 + 4)

#endif
