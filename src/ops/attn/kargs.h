/* ops/attn/kargs.h: the arguments of the attention kernels. The host's compiler and the kernels' compiler both read
 * this file. */
#ifndef TE__ATTN_KARGS_H
#define TE__ATTN_KARGS_H

/* The address, strides and format of q, k, v, o or one of their gradients. Channels are contiguous. */
typedef struct te__attn_view {
    long long s, b, h; /* Strides in elements: s between positions, b between sequences, h between heads.
                        * NVRTC 12.0 has a bug: if a kernel modifies a copy of a view, the generated code still reads
                        * the first member from the original view. So the first member is s, which no kernel
                        * modifies. */
    void *p;           /* element [0, 0, 0, 0] */
    int dt;            /* te_dtype */
} te__attn_view;

/* A tensor [batch, heads, s_q, s_kv] of a bias or a mask. It repeats along a dimension whose stride is 0. */
typedef struct te__attn_table {
    void *p;               /* NULL: none */
    long long b, h, i, j;  /* strides in elements */
    int dt;                /* te_dtype */
} te__attn_table;

/* The options of te_attn_rule and te_attn_fp8. Plain attention uses only `causal`, `bottom_right`, `left` and
 * `right`. */
typedef struct te__attn_extra {
    int on;                    /* 1: an option other than the causal mask, the diagonal and the window is used */
    int causal, bottom_right;  /* `causal` is 1 if the mask has a diagonal. bottom_right is 1 if the diagonal ends at
                                * the last row and key, 0 if it begins at row 0 and key 0. */
    int left, right;           /* the window: number of keys that a row sees left and right of the diagonal; -1: no
                                * bound */
    int packed_q, packed_kv;   /* 1: sequences are stored one after the other, without a batch dimension (TE_THD) */
    int t_q, t_kv;             /* if packed: the number of rows of q (t_q), and of k and v (t_kv) */
    const int *cu_q, *cu_kv;   /* [batch + 1]: cumulative lengths; NULL: all lengths are s_q (s_kv) */
    const int *at_q, *at_kv;   /* if packed: [batch + 1], the first row of each sequence; NULL: cu_q, cu_kv */
    const int *pages;          /* the page table, [batch, pages_of_each]; NULL: keys are not in pages */
    int page_size, num_pages, pages_of_each;
    te__attn_table bias, mask; /* mask: u8; an element that is not 0 hides its key */
    te__attn_table blocks;     /* the block mask, u8: a te_attn_block for TE_ATTN_BLOCK_SIZE rows by TE_ATTN_BLOCK_SIZE
                                * keys */
    float bias_scale;          /* the factor c of the bias B: c B is added to the scores, and dB is c dS */
    float softcap;             /* the soft cap of the scaled products; 0: none */
    float softcap_in, softcap2; /* softcap_in: scale / softcap; softcap2: softcap * log2(e) */
    int alibi;
    const float *slopes; /* ALiBi's slopes, [heads] or [batch, heads]; NULL: te__attn_slope computes them */
    int slopes_b;        /* distance in elements from the slopes of one sequence to those of the next */
    int softmax;         /* te_softmax_type */
    const float *sink;   /* [heads]: the offsets of TE_SOFTMAX_LEARNABLE */
    float *max_logit;    /* [heads], or NULL */
    te__attn_table dbias;
    int dbias_b, dbias_h, dbias_i; /* sizes of dbias: batch, heads and queries; each is 1 or the size of the scores */
    float *dsink;                  /* [heads], or NULL */
    const void *aux[4];            /* tensors that the user's expressions read (score_mod.cuh) */
    long long aux_n[4];            /* the number of elements of each tensor in aux */
    int s_dt, dp_dt;               /* the FP8 formats to which S and dP are rounded (see te_attn_fp8); 0: no rounding */
    int by_row;                    /* 1: each row of S has a scale of its own, and s_scale is NULL */
    int sums_delta;                /* 1 (FP8): delta is the sum of P dP over the keys, not of dO O over channels */
    int codes;                     /* 1: q, k and v are FP8 codes; in the backward pass d_o, too */
    const float *s_scale, *dp_scale;
    float *s_amax, *dp_amax; /* or NULL */
    const float *q_inv, *k_inv, *v_inv, *do_inv; /* the factors of the codes; NULL without codes */
    te__attn_view k_factors, v_factors; /* e8m0: k and v are e4m3 codes of a cache, and each of their rows has a
                                         * factor. dt 0: none */
} te__attn_extra;

/* The arguments of all attention kernels. te__attn_problem_of (op.c) fills in all fields except lse2 and delta. */
typedef struct te__attn_kargs {
    te__attn_view q, k, v, o, d_o, dq, dk, dv;
    float *lse;          /* [batch, heads, s_q]: natural logarithm of the sums of exponentials; may be NULL in the
                          * forward pass */
    float *lse2, *delta; /* backward pass: [batch, heads, s_pad], see attn_delta.cu; if packed, see te__attn_seq */
    int batch, heads, groups;
    int s_q, s_kv, s_pad; /* s_pad: s_q rounded up to TE__ATTN_PAD */
    int d, d_v;           /* d: channels of q and k; d_v: channels of v and o */
    int lo, hi;           /* row i sees the keys i + lo .. i + hi that exist, that is, those in 0 .. s_kv - 1 */
    float scale, scale2;  /* scale: factor of the products; scale2: scale * log2(e) */
    float dropout_p, keep_scale; /* dropout_p: a multiple of 2^-16; keep_scale: 1 / (1 - dropout_p) */
    unsigned long long seed, offset;
    const void *rng; /* random state for te__rng_read, or NULL */
    te__attn_extra x;
} te__attn_kargs;

/* The arguments of attn_decode.cu. A `place` is a sequence and a KV head. */
typedef struct te__attn_decode_kargs {
    te__attn_kargs a;
    float *part;        /* [places of the launch, splits, rows, d_v + 4]: the sums of each chunk, then `top` and `l` of
                         * the row; NULL if `splits` is 1 */
    unsigned *counters; /* one for each place of the launch, 0 between kernels */
    int splits;         /* the number of blocks for each place */
    int share;          /* the largest number of chunks of a place; depends only on the number of KV heads */
    int first;          /* the first sequence of the launch */
    int heads;          /* the number of query heads of one KV head */
    int clustered;      /* 1: the first TE__ATTN_DECODE_TOGETHER chunks of a place, or all that there are, are the
                         * blocks of a cluster */
    int early;          /* 1: the lengths, the page table and the rows of keys and values of sequence b before row
                         * old[b] may be read while the kernels ahead still run (ops/early.c) */
    const int *old;     /* NULL: all rows */
} te__attn_decode_kargs;
#define TE__ATTN_DECODE_WARPS 4
#define TE__ATTN_DECODE_STAGES 2
#define TE__ATTN_DECODE_ROWS 16    /* the largest number of rows: queries times query heads of one KV head */
/* About the most blocks of a sequence: enough for the bandwidth of a large GPU. */
#define TE__ATTN_DECODE_BLOCKS 132
/* A sequence of few keys has at most this number of chunks. They can be the blocks of a cluster, which add up their
 * sums through their shared memory. */
#define TE__ATTN_DECODE_TOGETHER 8
#define TE__ATTN_DECODE_SHORT (TE__ATTN_DECODE_TOGETHER * 256)
/* The number of keys of a chunk, for `keys` keys in at most `share` chunks. A multiple of one step of a block. */
#define TE__ATTN_DECODE_CHUNK(keys, share)                                                                        \
    TE__ATTN_DECODE_CHUNK_OF(keys, (keys) <= TE__ATTN_DECODE_SHORT && (share) > TE__ATTN_DECODE_TOGETHER          \
                                       ? TE__ATTN_DECODE_TOGETHER                                                 \
                                       : (share))
#define TE__ATTN_DECODE_CHUNK_OF(keys, share)                                                                     \
    ((((keys) + (share) - 1) / (share) + 16 * TE__ATTN_DECODE_WARPS - 1) / (16 * TE__ATTN_DECODE_WARPS) *         \
     (16 * TE__ATTN_DECODE_WARPS))
/* Bytes of shared memory of a row of keys, and of values, so that lanes that read different rows at a time find them in
 * different banks. `codes`: elements are codes of one byte. */
#define TE__ATTN_DECODE_ROW_K(d, codes) ((codes) ? (d) % 128 ? (d) : (d) + 64 : 2 * (d) + 16)
#define TE__ATTN_DECODE_ROW_V(d, codes) ((codes) ? (d) + 16 : 2 * (d) + 16)
/* Bytes of shared memory: Q and the warps' stages of keys and values. At the end the sums of all warps lie there, and
 * then the maxima and sums of all rows of all chunks. */
#define TE__ATTN_DECODE_TILES(d, rows, codes)                                                                     \
    ((2 * (d) + 16) * (rows) + 16 * TE__ATTN_DECODE_WARPS * TE__ATTN_DECODE_STAGES *                              \
                                   (TE__ATTN_DECODE_ROW_K(d, codes) + TE__ATTN_DECODE_ROW_V(d, codes)))
#define TE__ATTN_DECODE_SUMS(d, rows) (4 * TE__ATTN_DECODE_WARPS * (rows) * ((d) + 4))
#define TE__ATTN_DECODE_JOINED(rows, share) (8 * (share) * (rows))
/* Bytes behind the tiles and the sums for what a block receives from the blocks of its cluster: 16 from each for each
 * four channels of its share, and 8 from each for each row. `rows`: those that there are. The shares of all blocks are
 * `rows` * d / 4 fours, a multiple of eight, and up to six more, since shares are rounded up. */
#define TE__ATTN_DECODE_SENT(d, rows) \
    (16 * ((rows) * (d) / 4 + TE__ATTN_DECODE_TOGETHER - 2) + 8 * TE__ATTN_DECODE_TOGETHER * (rows))

/* The arguments of attn_cache_numbers.cu. */
typedef struct te__attn_cache_kargs {
    te__attn_kargs a;
    void *k, *v; /* [batch, s_kv, groups, d or d_v], of q's format */
} te__attn_cache_kargs;
#define TE__ATTN_CACHE_ZEROS 256 /* at least a tile of keys of any kernel, from any first key on */

/* The order of a Hopper kernel's tiles. Thread blocks take tiles from counter[0]. counter[1] counts the thread blocks
 * that have finished. Both are 0 between kernels. */
typedef struct te__attn_order {
    unsigned *counter;
    int tiles, rows; /* tiles: number of tiles of all heads; rows: number of tiles of one head */
    int together;    /* number of heads whose tiles run at the same time */
    int pad;
} te__attn_order;

/* Dropout's bits in memory. A bit is 1 if dropout keeps the element of P. For each block of 128 keys there are `rows`
 * rows, one for each element of lse2 and in the same order. A row has 128 bits: four results of te__attn_keep_word. */
typedef struct te__attn_bits {
    long long rows;
    unsigned *words; /* NULL: kernels draw the bits themselves */
} te__attn_bits;
typedef struct te__attn_bits_kargs {
    te__attn_kargs a;
    te__attn_bits bits;
} te__attn_bits_kargs;
#define TE__ATTN_BITS_KEYS 1024 /* number of keys of a block of attn_dropout_bits.cu */

/* The arguments of attn_bias_line.cu. */
typedef struct te__attn_line_kargs {
    te__attn_table bias, to; /* to: bf16 [batch or 1, heads or 1, keys, 8]. The strides of `to` are in units of one
                              * key (8 elements, 16 bytes) */
    int heads;               /* number of heads of the bias: 1 or all */
    int s_kv, keys;          /* keys: s_kv rounded up to a multiple of the forward kernel's block of keys */
    float factor;            /* turns the bias into units of products Q K^T */
} te__attn_line_kargs;

/* Aligns kernel arguments to 64 bytes, as tensor maps need. The structs are padded, so that both compilers give them
 * the same size. */
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
    te__attn_table line;             /* X_KEYS: the bias as an operand, made by attn_bias_line.cu. Its strides are in
                                      * units of one key (8 elements, 16 bytes) */
    unsigned char pad_bias[64 - (sizeof(te__attn_table) + 8) % 64];
} te__attn_fwd_hopper_kargs;
typedef char te__attn_fwd_hopper_kargs_fit[sizeof(te__attn_fwd_hopper_kargs) % 64 == 0 ? 1 : -1];

/* The arguments of attn_fwd_fp8_hopper.cu. v_map is the map of V^T. */
typedef struct TE__ATTN_ALIGN_64 te__attn_fwd_fp8_kargs {
    unsigned long long q_map[16], k_map[16], v_map[16], o_map[16];
    te__attn_kargs a;
    te__attn_order order;
    unsigned char pad[64 - (sizeof(te__attn_kargs) + sizeof(te__attn_order)) % 64];
} te__attn_fwd_fp8_kargs;
typedef char te__attn_fwd_fp8_kargs_fit[sizeof(te__attn_fwd_fp8_kargs) % 64 == 0 ? 1 : -1];
/* The arguments of attn_fwd_fp8_values.cu. */
typedef struct te__attn_fp8_values_kargs {
    te__attn_kargs a;
    void *to;      /* [batch, groups, d_v, row] codes, if packed [groups, d_v, row] */
    long long row; /* keys of a row, a multiple of TE__ATTN_FP8_KEYS */
} te__attn_fp8_values_kargs;
/* Sizes of attn_fwd_fp8_hopper.cu: the keys of a block, stages of K and V^T, bytes of shared memory. d is 64 or 128. */
#define TE__ATTN_FP8_KEYS 128
#define TE__ATTN_FP8_STAGES 2
#define TE__ATTN_FP8_SHARED(d) \
    (4 * 64 * (d) + 2 * TE__ATTN_FP8_STAGES * TE__ATTN_FP8_KEYS * (d) + 2 * TE__ATTN_BYTES(64, d) + 512)
/* FP8 attention with a scale for each row. ROW: the general kernels and the CPU scale a row's largest element to 2^ROW.
 * LATE: attn_fwd_fp8_hopper.cu scales the largest element so far to 2^LATE, which leaves room for larger ones. */
#define TE__ATTN_FP8_ROW 8.0f
#define TE__ATTN_FP8_LATE 3.0f

typedef struct TE__ATTN_ALIGN_64 te__attn_bwd_hopper_kargs {
    /* Only attn_bwd_dq_hopper.cu reads dq_map. */
    unsigned long long q_map[16], do_map[16], k_map[16], v_map[16], dk_map[16], dv_map[16], dq_map[16];
    long long tiles_of_head;
    te__attn_bits bits;
    te__attn_kargs a;
    te__attn_order order; /* The order of blocks of keys, or of tiles of queries. */
    float *dq_sum;        /* attn_bwd_hopper.cu: tiles of dQ in f32, in the order of the accumulator registers */
    int *added;           /* for each tile of dq_sum: number of key blocks added so far; NULL: no dq_sum */
    int queries, pad_queries; /* queries: number of queries of a tile */
    unsigned char
        pad[64 -
            (sizeof(te__attn_kargs) + sizeof(te__attn_order) + sizeof(te__attn_bits) + 2 * sizeof(void *) + 16) % 64];
    unsigned long long bias_map[16]; /* attn_bwd_hopper.cu with X_TILES */
    long long bias_row;              /* X_SUMS: s_kv rounded up to whole blocks of keys */
    float *bias_sum;                 /* [batch, groups, bias_row]: sums of dS over all queries and a group's heads */
    float bias_factor;               /* turns a bias into units of products Q K^T */
    unsigned char pad_bias[64 - sizeof(void *) - 12];
} te__attn_bwd_hopper_kargs;
typedef char te__attn_bwd_hopper_kargs_fit[sizeof(te__attn_bwd_hopper_kargs) % 64 == 0 ? 1 : -1];
/* The arguments of attn_bwd_fp8_rows.cu and attn_bwd_fp8_hopper.cu. In `b` the maps of q, d_o, k and v are those of
 * codes. */
typedef struct TE__ATTN_ALIGN_64 te__attn_bwd_fp8_kargs {
    te__attn_bwd_hopper_kargs b;
    unsigned long long q16_map[16], do16_map[16];
    void *q16, *do16; /* bf16 [rows, TE__ATTN_BWD_FP8_D]: the codes of q and d_o as numbers, without their factors. The
                       * rows are those of lse2, with zeros beyond a sequence */
    unsigned char pad[64 - 2 * sizeof(void *)];
} te__attn_bwd_fp8_kargs;
typedef char te__attn_bwd_fp8_kargs_fit[sizeof(te__attn_bwd_fp8_kargs) % 64 == 0 ? 1 : -1];
/* Sizes of attn_bwd_fp8_hopper.cu: the channels of a head, and bytes of shared memory. */
#define TE__ATTN_BWD_FP8_D 128
#define TE__ATTN_BWD_FP8_SHARED (3 * 16384 + 4 * 8192 + 4 * 16384 + 2 * 8192 + 2 * 32768 + 4 * 256 + 16 * 8 + 16)

#define TE__ATTN_BWD_QUERIES(d) (8192 / (d))
#define TE__ATTN_BWD_SHARED(d)                                                                \
    (2 * TE__ATTN_BYTES(128, d) + 4 * 16384 + 2 * 256 * TE__ATTN_BWD_QUERIES(d) + 2 * 32768 + \
     16 * TE__ATTN_BWD_QUERIES(d) + 16 * 8 + 16)

/* Sizes of the backward kernels for heads above 128 channels: pipeline stages and bytes of shared memory. DQ
 * (attn_bwd_dq_hopper.cu) has stages of keys (K) and of values (V). */
#define TE__ATTN_DKV_STAGES(d) ((d) <= 192 ? 3 : 2)
#define TE__ATTN_DKV_SHARED(d, d_v)                                                                 \
    ((TE__ATTN_DKV_STAGES(d) + 1) * (TE__ATTN_BYTES(64, d) + TE__ATTN_BYTES(64, d_v)) + 2 * 16384 + \
     2 * 256 * TE__ATTN_DKV_STAGES(d) + 8 * (4 * TE__ATTN_DKV_STAGES(d) + 16))
#define TE__ATTN_DQ_STAGES_K(d) ((d) <= 192 ? 3 : 2)
#define TE__ATTN_DQ_STAGES_V(d) ((d) <= 192 ? 2 : 1)
#define TE__ATTN_DQ_SHARED(d, d_v)                                                                                     \
    ((2 + TE__ATTN_DQ_STAGES_K(d)) * TE__ATTN_BYTES(64, d) + (2 + TE__ATTN_DQ_STAGES_V(d)) * TE__ATTN_BYTES(64, d_v) + \
     8 * (2 + 2 * TE__ATTN_DQ_STAGES_K(d) + 2 * TE__ATTN_DQ_STAGES_V(d)))

/* The arguments of attn_bwd_bias_hopper.cu and of attn_bwd_bias_put.cu. The latter runs after the former. */
typedef struct TE__ATTN_ALIGN_64 te__attn_bias_hopper_kargs {
    unsigned long long q_map[16], do_map[16], k_map[16], v_map[16];
    long long part;       /* distance in elements from one partial sum of dB to the next */
    te__attn_bits bits;
    te__attn_table to;    /* dB, or f32 partial sums of dB [parts, dbias_b, dbias_h, dbias_i, keys], or
                           * attn_bwd_hopper.cu's bias_sum */
    te__attn_kargs a;
    te__attn_order order; /* order.rows: number of tiles of 128 queries; order.tiles: number of tiles of all parts */
    int parts, tiles_of_part;
    int aligned;          /* true: rows of `to` can be written 16 bytes at a time (f32: 8 bytes) */
    float by;             /* factor by which the sums are multiplied */
    unsigned char pad[64 - (sizeof(te__attn_kargs) + sizeof(te__attn_order) + sizeof(te__attn_table) +
                            sizeof(te__attn_bits) + 24) %
                               64];
} te__attn_bias_hopper_kargs;
typedef char te__attn_bias_hopper_kargs_fit[sizeof(te__attn_bias_hopper_kargs) % 64 == 0 ? 1 : -1];
/* Shared memory of attn_bwd_bias_hopper.cu, in bytes:
 * - 7 * 32768: the pipeline's stages and the tile of the bias;
 * - 48 + 16 for each of six stages: a message to the consumers and two barriers;
 * - 512: sums of a tile's columns. */
#define TE__ATTN_DBIAS_SHARED (7 * 32768 + 6 * (48 + 16) + 512)

/* TE__ATTN_BYTES is the bytes of `rows` rows of d channels, in whole panels of 64 channels. TE__ATTN_FWD_* are sizes of
 * attn_fwd_hopper.cu: the keys of a block, the stages of Q, and bytes of shared memory. `waves` counts consumer
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
/* Bytes of shared memory for ALiBi's operand (te_line). With the 256 bytes of barriers they are a multiple of 1024,
 * because O follows and must be aligned. */
#define TE__ATTN_LINE_BYTES(d) ((d) > 64 && (d) <= 128 ? 2816 : 3840)
/* Shared memory of attn_fwd_hopper.cu with tiles of a bias (X_TILES): two stages if they fit. O shares Q's memory.
 * TE__ATTN_SHARED_MAX is a block's limit. */
#define TE__ATTN_SHARED_MAX 232448
#define TE__ATTN_BIAS_TILE(d, d_v) TE__ATTN_BYTES(64, TE__ATTN_FWD_KEYS(d, d_v))
#define TE__ATTN_BIAS_SHARED_OF(d, d_v, waves, stages)                                           \
    (TE__ATTN_FWD_INPUTS(d, d_v, waves) + (stages) * (waves) * TE__ATTN_BIAS_TILE(d, d_v) + 320)
#define TE__ATTN_BIAS_STAGES(d, d_v, waves) (TE__ATTN_BIAS_SHARED_OF(d, d_v, waves, 2) <= TE__ATTN_SHARED_MAX ? 2 : 1)
#define TE__ATTN_BIAS_SHARED(d, d_v, waves) TE__ATTN_BIAS_SHARED_OF(d, d_v, waves, TE__ATTN_BIAS_STAGES(d, d_v, waves))
/* Shared memory of attn_fwd_hopper.cu with a bias that all queries share (X_KEYS). TE__ATTN_KEYS_BYTES is for operand A
 * (64 rows of 16 bytes), two stages of operand B (16 bytes per key), and a stage of zeros. Above 64 channels O shares
 * Q's memory. */
#define TE__ATTN_KEYS_BYTES(d, d_v) (1024 + 3 * 16 * TE__ATTN_FWD_KEYS(d, d_v))
#define TE__ATTN_KEYS_SHARED(d, d_v, waves)                                                     \
    (TE__ATTN_FWD_INPUTS(d, d_v, waves) + ((d) <= 64 ? (waves) * TE__ATTN_BYTES(64, d_v) : 0) + \
     TE__ATTN_KEYS_BYTES(d, d_v) + 256)

/* The rows of lse2 and delta are padded to a multiple of this size, the largest tile, because kernels read whole
 * tiles. */
#define TE__ATTN_PAD 128

/* Sizes of the general kernels. The four warps of a block have TE__ATTN_ROWS queries or keys, four each. They
 * read TE__ATTN_LANES rows of the opposite tensor at a time. */
#define TE__ATTN_ROWS 16
#define TE__ATTN_LANES 32
#define TE__ATTN_CHUNK 256 /* channels that the general kernels process at a time */
#define TE__ATTN_MAX_D 1024

/* The arguments of the sparse attention kernels. `heads` query heads share one head of keys, which are also the
 * values. */
typedef struct te__sparse_attn_kargs {
    te__attn_view q, kv, o, d_o, dq, dkv; /* kv and dkv are [batch, s_kv, d]. The first d_v channels of a key are its
                                           * value. */
    const int *indices;  /* [batch, s_q, n]: the keys that a query reads; outside of 0 .. s_kv - 1: no key */
    const float *sinks;  /* [heads], or NULL */
    float *lse;          /* [batch, heads, s_q]: natural logarithm of the sums of exponentials; may be NULL in the
                          * forward pass */
    float *lse2, *delta; /* backward pass: [batch, heads, s_q], as in attn_delta.cu */
    int *cursor;         /* backward pass, [batch, chunks of queries, s_kv]: first, how many slots of a chunk name a
                          * key; at last, how many slots of this chunk and of those before it */
    int *start, *list;   /* backward pass: start [batch, s_kv + 1], list [batch, s_q n]: key j is named by the slots
                          * list[start[j] .. start[j + 1] - 1]: query * n + entry. Queries ascend */
    int batch, heads, s_q, s_kv, n, d, d_v;
    int tile;            /* number of keys in shared memory at a time, 16 or 32 */
    int chunks, step;    /* see sparse_attn_list.cu */
    int part, cuts, rows; /* backward pass: the queries of a sequence are cut into parts of `part` queries, and each
                           * part into `cuts` chunks of `rows` queries; the last ones may be shorter */
    float scale, scale2; /* scale: factor of the products; scale2: scale * log2(e) */
    /* for the kernels on tensor cores */
    void *partial;       /* backward pass: [head tiles, sequences, queries, n, d] of a launch, of the format of dkv:
                          * what each slot adds to the gradient of its key */
    float *sums;         /* backward pass: [batch, s_kv, d]: the sums of the parts so far, if there are several */
    int head_tiles;      /* tiles of TE__SPARSE_TILE_ROWS heads */
    int b_begin, b_end, i_begin, i_end; /* the sequences and their queries that a launch computes */
} te__sparse_attn_kargs;
#define TE__SPARSE_ROWS 8 /* number of query heads of a block */
#define TE__SPARSE_MAX_D 576
/* The kernels on tensor cores. _SHARED: bytes of shared memory. On Hopper these are tiles of 64 rows, and less than
 * 1 KB for barriers, records and row sums. */
#define TE__SPARSE_D 512
#define TE__SPARSE_TILE_ROWS 64 /* number of query heads of a tile, and, on Hopper, of keys */
#define TE__SPARSE_HOPPER_TILE (TE__SPARSE_TILE_ROWS * TE__SPARSE_D * 2)
#define TE__SPARSE_MMA_SHARED (2 * 32 * (TE__SPARSE_D * 2 + 16) + 16384) /* two tiles of 32 keys, and scores */
#define TE__SPARSE_HOPPER_SHARED(backward) (3 * TE__SPARSE_HOPPER_TILE + ((backward) ? 4 * 8192 : 0) + 1024)

/* Floats in a row of d channels in shared memory. TE__ATTN_ROW: four floats can be read at a time.
 * TE__ATTN_LANE_ROW: eight lanes can read the same offset of eight neighbouring rows without bank conflicts. */
#define TE__ATTN_ROW(d) (((d) + 3) / 4 * 4)
#define TE__ATTN_LANE_ROW(d) (((d) + 31) / 32 * 32 + 4)

#endif
