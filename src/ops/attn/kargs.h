/* ops/attn/kargs.h: arguments of the attention kernels. Read by both compilers. */
#ifndef TE__ATTN_KARGS_H
#define TE__ATTN_KARGS_H

/* Where one of the tensors q, k, v, o or their gradients lies. Its channels are adjacent. */
typedef struct te__attn_view {
    long long s, b, h; /* strides in elements: position, sequence, head. NVRTC 12.0 reads the first member of a
                        * modified copy from the unmodified arguments, so s, which no kernel modifies, comes first */
    void *p;           /* element [0, 0, 0, 0] */
    int dt;            /* te_dtype */
} te__attn_view;

/* A tensor over [batch, heads, s_q, s_kv] that is added to the scores or masks them. A stride of 0 repeats it along
 * that dimension. */
typedef struct te__attn_table {
    void *p;               /* NULL: none */
    long long b, h, i, j;  /* strides in elements */
    int dt;                /* te_dtype */
} te__attn_table;

/* The options of te_attn_rule and te_attn_fp8. Plain attention uses only causal, bottom_right, left and right. */
typedef struct te__attn_extra {
    int on;                    /* 1: an option other than causal mask, diagonal and window is used */
    int causal, bottom_right;  /* causal: the mask has a diagonal. bottom_right: the diagonal ends at the last row
                                * and the last key, else it starts at row 0 and key 0 */
    int left, right;           /* the window: keys left and right of the diagonal that a row sees; -1: no bound */
    int packed_q, packed_kv;   /* 1: sequences follow each other without a batch dimension (TE_THD) */
    int t_q, t_kv;             /* packed: number of rows of q, and of k and v */
    const int *cu_q, *cu_kv;   /* [batch + 1], cumulative lengths; NULL: all are s_q (s_kv) */
    const int *at_q, *at_kv;   /* [batch + 1], packed: first rows of the sequences; NULL: cu_q, cu_kv */
    const int *pages;          /* [batch, pages_of_each], the page table; NULL: keys are not paged */
    int page_size, num_pages, pages_of_each;
    te__attn_table bias, mask; /* mask: u8; not 0: hidden */
    te__attn_table blocks;     /* u8: a te_attn_block for each TE_ATTN_BLOCK_SIZE rows and keys */
    float bias_scale;          /* factor of the bias B in the scores, and of dS in dB */
    float softcap;             /* cap of the scaled products; 0: none */
    float softcap_in, softcap2; /* scale / softcap; softcap * log2(e) */
    int alibi;
    const float *slopes; /* [heads] or [batch, heads]; NULL: te__attn_slope computes them */
    int slopes_b;        /* elements from one sequence's slopes to the next's */
    int softmax;         /* te_softmax_type */
    const float *sink;   /* [heads], the offsets of TE_SOFTMAX_LEARNABLE */
    float *max_logit;    /* [heads], or NULL */
    te__attn_table dbias;
    int dbias_b, dbias_h, dbias_i; /* sizes of dbias, each 1 or that of the scores */
    float *dsink;                  /* [heads], or NULL */
    const void *aux[4];            /* tensors that the user's expressions read (score_mod.cuh) */
    long long aux_n[4];            /* number of elements of each */
    int s_dt, dp_dt;               /* FP8 formats that S and dP (of te_attn_fp8) are rounded to; 0: not rounded */
    const float *s_scale, *dp_scale;
    float *s_amax, *dp_amax; /* or NULL */
} te__attn_extra;

/* The arguments of all attention kernels; each kernel reads a part of them. te__attn_problem_of (op.c) fills all but
 * lse2 and delta. */
typedef struct te__attn_kargs {
    te__attn_view q, k, v, o, d_o, dq, dk, dv;
    float *lse;          /* [batch, heads, s_q], natural logarithm; may be NULL in the forward */
    float *lse2, *delta; /* backward, [batch, heads, s_pad]: see attn_delta.cu; packed: see te__attn_seq */
    int batch, heads, groups;
    int s_q, s_kv, s_pad; /* s_pad: s_q rounded up to TE__ATTN_PAD */
    int d, d_v;           /* channels of q and k; channels of v and o */
    int lo, hi;           /* row i sees the keys from i + lo to i + hi, of 0 .. s_kv - 1 */
    float scale, scale2;  /* factor of the products; scale * log2(e) */
    float dropout_p, keep_scale; /* a multiple of 2^-16; 1 / (1 - dropout_p) */
    unsigned long long seed, offset;
    const void *rng; /* random state for te__rng_read, or NULL */
    te__attn_extra x;
} te__attn_kargs;

/* How a Hopper kernel numbers its tiles, and two counters from which blocks draw numbers. The counters are 0 between
 * kernels. */
typedef struct te__attn_order {
    unsigned *counter;
    int tiles, rows; /* tiles: of all heads; rows: tiles of one head */
    int together;    /* heads whose tiles run at one time */
    int pad;
} te__attn_order;

/* Dropout's bits in memory, 1 for a kept element of P. For every 128 keys there is an array of `rows` rows in the
 * order of lse2. A row is four words of te__attn_keep_word. */
typedef struct te__attn_bits {
    long long rows;
    unsigned *words; /* NULL: kernels draw the bits themselves */
} te__attn_bits;
typedef struct te__attn_bits_kargs {
    te__attn_kargs a;
    te__attn_bits bits;
} te__attn_bits_kargs;
#define TE__ATTN_BITS_KEYS 1024 /* keys that a block of attn_dropout_bits.cu covers */

/* The arguments of attn_bias_line.cu. */
typedef struct te__attn_line_kargs {
    te__attn_table bias, to; /* to: bf16 [b|1, h|1, keys, 8]; its strides count keys of 16 bytes */
    int heads;               /* heads of the bias: 1 or all */
    int s_kv, keys;          /* keys: s_kv rounded up to whole key blocks of the forward kernel */
    float factor;            /* turns the bias into units of products Q K^T */
} te__attn_line_kargs;

/* Aligns a struct of kernel arguments to 64 bytes, which tensor maps need. The structs are padded to multiples of 64
 * bytes, so that both compilers see the same size. */
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
    float bias_factor;               /* turns a bias into units of products Q K^T */
    int pad_factor;
    te__attn_table line;             /* X_KEYS: the operand that attn_bias_line.cu made of the bias; strides in keys */
    unsigned char pad_bias[64 - (sizeof(te__attn_table) + 8) % 64];
} te__attn_fwd_hopper_kargs;
typedef char te__attn_fwd_hopper_kargs_fit[sizeof(te__attn_fwd_hopper_kargs) % 64 == 0 ? 1 : -1];

typedef struct TE__ATTN_ALIGN_64 te__attn_bwd_hopper_kargs {
    /* dq_map: read only by attn_bwd_dq_hopper.cu */
    unsigned long long q_map[16], do_map[16], k_map[16], v_map[16], dk_map[16], dv_map[16], dq_map[16];
    long long tiles_of_head;
    te__attn_bits bits;
    te__attn_kargs a;
    te__attn_order order; /* order of blocks of keys, or of queries; counter: numbers drawn so far */
    float *dq_sum;        /* attn_bwd_hopper.cu: tiles of dQ in f32, each in the order of the registers */
    int *added;           /* for each tile of dq_sum: number of key blocks added to it so far; NULL: there is no
                           * dq_sum */
    int queries, pad_queries; /* queries: of a tile */
    unsigned char
        pad[64 -
            (sizeof(te__attn_kargs) + sizeof(te__attn_order) + sizeof(te__attn_bits) + 2 * sizeof(void *) + 16) % 64];
    unsigned long long bias_map[16]; /* attn_bwd_hopper.cu with X_TILES */
    long long bias_row;              /* X_SUMS: s_kv rounded up to whole blocks of keys */
    float *bias_sum;                 /* [batch, groups, bias_row]: sums of dS over a group's heads and all queries */
    float bias_factor;               /* turns a bias into units of products Q K^T */
    unsigned char pad_bias[64 - sizeof(void *) - 12];
} te__attn_bwd_hopper_kargs;
typedef char te__attn_bwd_hopper_kargs_fit[sizeof(te__attn_bwd_hopper_kargs) % 64 == 0 ? 1 : -1];
#define TE__ATTN_BWD_QUERIES(d) (8192 / (d))
#define TE__ATTN_BWD_SHARED(d)                                                                \
    (2 * TE__ATTN_BYTES(128, d) + 4 * 16384 + 2 * 256 * TE__ATTN_BWD_QUERIES(d) + 2 * 32768 + \
     16 * TE__ATTN_BWD_QUERIES(d) + 16 * 8 + 16)

/* Pipeline stages and bytes of shared memory of the backward kernels for heads above 128 channels. DKV:
 * attn_bwd_dkv_hopper.cu, with stages of queries. DQ: attn_bwd_dq_hopper.cu, with stages of keys and of values. */
#define TE__ATTN_DKV_STAGES(d) ((d) <= 192 ? 3 : 2)
#define TE__ATTN_DKV_SHARED(d, d_v)                                                                 \
    ((TE__ATTN_DKV_STAGES(d) + 1) * (TE__ATTN_BYTES(64, d) + TE__ATTN_BYTES(64, d_v)) + 2 * 16384 + \
     2 * 256 * TE__ATTN_DKV_STAGES(d) + 8 * (4 * TE__ATTN_DKV_STAGES(d) + 16))
#define TE__ATTN_DQ_STAGES_K(d) ((d) <= 192 ? 3 : 2)
#define TE__ATTN_DQ_STAGES_V(d) ((d) <= 192 ? 2 : 1)
#define TE__ATTN_DQ_SHARED(d, d_v)                                                                                     \
    ((2 + TE__ATTN_DQ_STAGES_K(d)) * TE__ATTN_BYTES(64, d) + (2 + TE__ATTN_DQ_STAGES_V(d)) * TE__ATTN_BYTES(64, d_v) + \
     8 * (2 + 2 * TE__ATTN_DQ_STAGES_K(d) + 2 * TE__ATTN_DQ_STAGES_V(d)))

/* The arguments of attn_bwd_bias_hopper.cu, and of attn_bwd_bias_put.cu, which runs after it. */
typedef struct TE__ATTN_ALIGN_64 te__attn_bias_hopper_kargs {
    unsigned long long q_map[16], do_map[16], k_map[16], v_map[16];
    long long part;       /* elements from one part of the sum to the next */
    te__attn_bits bits;
    te__attn_table to;    /* the gradient dB, or its parts in f32, [parts, dbias_b, dbias_h, dbias_i, keys]; after
                           * attn_bwd_hopper.cu: bias_sum */
    te__attn_kargs a;
    te__attn_order order; /* tiles: of all parts; rows: tiles of 128 queries */
    int parts, tiles_of_part;
    int aligned;          /* rows of `to` can be written 16 bytes at a time (f32: 8 bytes) */
    float by;             /* factor of the sums */
    unsigned char pad[64 - (sizeof(te__attn_kargs) + sizeof(te__attn_order) + sizeof(te__attn_table) +
                            sizeof(te__attn_bits) + 24) %
                               64];
} te__attn_bias_hopper_kargs;
typedef char te__attn_bias_hopper_kargs_fit[sizeof(te__attn_bias_hopper_kargs) % 64 == 0 ? 1 : -1];
/* Stages and the tile of the bias (7 * 32768 bytes), six messages of 48 bytes, six pairs of barriers, sums of
 * columns (512). */
#define TE__ATTN_DBIAS_SHARED (7 * 32768 + 6 * (48 + 16) + 512)

/* TE__ATTN_BYTES: bytes of `rows` rows of d channels, in whole panels of 64 channels. TE__ATTN_FWD_*, for
 * attn_fwd_hopper.cu: keys of a block, stages of Q, and bytes of shared memory. waves: number of consumer
 * warpgroups. */
#define TE__ATTN_BYTES(rows, d) ((rows) * 128 * (((d) + 63) / 64))
#define TE__ATTN_FWD_KEYS(d, d_v) ((d) <= 128 || (d_v) <= 128 ? 128 : (d) <= 192 ? 96 : 64)
#define TE__ATTN_FWD_STAGES_Q(d, d_v, waves) ((d) <= 128 ? 2 : 1)
#define TE__ATTN_FWD_INPUTS(d, d_v, waves)                                                                  \
    (TE__ATTN_FWD_STAGES_Q(d, d_v, waves) * (waves) * TE__ATTN_BYTES(64, d) +                               \
     2 * TE__ATTN_BYTES(TE__ATTN_FWD_KEYS(d, d_v), d) + 2 * TE__ATTN_BYTES(TE__ATTN_FWD_KEYS(d, d_v), d_v))
#define TE__ATTN_FWD_SHARED(d, d_v, waves)                                                      \
    (TE__ATTN_FWD_INPUTS(d, d_v, waves) +                                                       \
     (TE__ATTN_FWD_STAGES_Q(d, d_v, waves) == 1 ? 0 : (waves) * TE__ATTN_BYTES(64, d_v)) + 256)
/* Bytes of shared memory that ALiBi needs in addition, for the columns' numbers (te_line). With the 256 bytes of
 * barriers they are a multiple of 1024, since O lies behind them. From 65 to 128 channels they use up
 * TE__ATTN_SHARED_MAX. */
#define TE__ATTN_LINE_BYTES(d) ((d) > 64 && (d) <= 128 ? 2816 : 3840)
/* Shared memory of attn_fwd_hopper.cu with tiles of a bias (X_TILES): O lies in the place of Q, and the tiles have
 * two stages if they fit, else one. TE__ATTN_SHARED_MAX: bytes that a block can have. */
#define TE__ATTN_SHARED_MAX 232448
#define TE__ATTN_BIAS_TILE(d, d_v) TE__ATTN_BYTES(64, TE__ATTN_FWD_KEYS(d, d_v))
#define TE__ATTN_BIAS_SHARED_OF(d, d_v, waves, stages)                                           \
    (TE__ATTN_FWD_INPUTS(d, d_v, waves) + (stages) * (waves) * TE__ATTN_BIAS_TILE(d, d_v) + 320)
#define TE__ATTN_BIAS_STAGES(d, d_v, waves) (TE__ATTN_BIAS_SHARED_OF(d, d_v, waves, 2) <= TE__ATTN_SHARED_MAX ? 2 : 1)
#define TE__ATTN_BIAS_SHARED(d, d_v, waves) TE__ATTN_BIAS_SHARED_OF(d, d_v, waves, TE__ATTN_BIAS_STAGES(d, d_v, waves))
/* Shared memory of attn_fwd_hopper.cu with a bias that all queries share (X_KEYS). TE__ATTN_KEYS_BYTES is for the
 * operands of the bias's product: A has 64 rows of 16 bytes; B has 16 bytes a key, in two stages and a third part of
 * zeros. Above 64 channels O lies in the place of Q. */
#define TE__ATTN_KEYS_BYTES(d, d_v) (1024 + 3 * 16 * TE__ATTN_FWD_KEYS(d, d_v))
#define TE__ATTN_KEYS_SHARED(d, d_v, waves)                                                     \
    (TE__ATTN_FWD_INPUTS(d, d_v, waves) + ((d) <= 64 ? (waves) * TE__ATTN_BYTES(64, d_v) : 0) + \
     TE__ATTN_KEYS_BYTES(d, d_v) + 256)

/* The rows of lse2 and delta are padded to a multiple of this, the largest tile, since backward kernels read whole
 * tiles. */
#define TE__ATTN_PAD 128

/* The general kernels (general.cuh): the four warps of a block have TE__ATTN_ROWS rows of one side (queries or
 * keys), four a warp, against TE__ATTN_LANES rows of the other side. */
#define TE__ATTN_ROWS 16
#define TE__ATTN_LANES 32
#define TE__ATTN_CHUNK 256 /* channels that they handle at a time; wider heads are processed in chunks */
#define TE__ATTN_MAX_D 1024

/* The arguments of the sparse attention kernels. A query reads only the keys of its own list in `indices`. There are
 * `heads` query heads and one head of keys; the keys are also the values. */
typedef struct te__sparse_attn_kargs {
    te__attn_view q, kv, o, d_o, dq, dkv; /* kv, dkv: [batch, s_kv, d]; a value is the first d_v channels of its key */
    const int *indices;  /* [batch, s_q, n]: row numbers of keys; a number outside of 0 .. s_kv - 1: no key */
    const float *sinks;  /* [heads], or NULL */
    float *lse;          /* [batch, heads, s_q], natural logarithm; may be NULL in the forward */
    float *lse2, *delta; /* backward, [batch, heads, s_q]: as in attn_delta.cu */
    int *cursor;         /* backward, [batch, chunks, s_kv]: at first the number of queries of a chunk that read the
                          * key, later the position in `list` where their numbers are written */
    int *start, *list;   /* backward, [batch, s_kv + 1], [batch, s_q n]: the queries that read key j are list[start[j]]
                          * to list[start[j + 1] - 1], ascending */
    int batch, heads, s_q, s_kv, n, d, d_v;
    int tile;            /* number of keys in shared memory at a time, 16 or 32 */
    int chunks, step;    /* see sparse_attn_list.cu */
    float scale, scale2; /* factor of the products; scale * log2(e) */
} te__sparse_attn_kargs;
#define TE__SPARSE_ROWS 8 /* query heads of a block */
#define TE__SPARSE_MAX_D 576

/* Floats in a row of d channels in the shared memory of the general and sparse kernels. TE__ATTN_ROW allows reads of
 * four floats along a row. TE__ATTN_LANE_ROW also lets eight lanes read four floats at one offset of eight
 * neighbouring rows without bank conflicts. */
#define TE__ATTN_ROW(d) (((d) + 3) / 4 * 4)
#define TE__ATTN_LANE_ROW(d) (((d) + 31) / 32 * 32 + 4)

#endif
