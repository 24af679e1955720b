/* ops/attn/kargs.h: the arguments of the attention kernels. The host's compiler and the kernels' compiler both read
 * this file. */
#ifndef TE__ATTN_KARGS_H
#define TE__ATTN_KARGS_H

/* The address, strides and format of q, k, v, o or one of their gradients. Channels are contiguous. */
typedef struct te__attn_view {
    long long s, b, h; /* Strides in elements: s from position to position, b from sequence to sequence, h from head to
                        * head. When a kernel modifies a copy of the struct, NVRTC 12.0 still reads its first member
                        * from the original. So the first member is s, which no kernel modifies. */
    void *p;           /* element [0, 0, 0, 0] */
    int dt;            /* te_dtype */
} te__attn_view;

/* A tensor [batch, heads, s_q, s_kv] that is added to the scores or masks them. If a stride is 0, the tensor repeats
 * along that dimension. */
typedef struct te__attn_table {
    void *p;               /* NULL: none */
    long long b, h, i, j;  /* strides in elements */
    int dt;                /* te_dtype */
} te__attn_table;

/* The options of te_attn_rule and te_attn_fp8. Plain attention uses only the fields `causal`, `bottom_right`,
 * `left` and `right`. */
typedef struct te__attn_extra {
    int on;                    /* 1: an option other than the causal mask, the diagonal and the window is used */
    int causal, bottom_right;  /* `causal` is 1 if the mask has a diagonal. If bottom_right is 1, the diagonal ends at
                                * the last row and the last key. If it is 0, the diagonal begins at row 0 and key 0. */
    int left, right;           /* the window: how many keys a row sees to the left and to the right of the diagonal; -1:
                                * no bound */
    int packed_q, packed_kv;   /* 1: sequences are stored one after the other, without a batch dimension (TE_THD) */
    int t_q, t_kv;             /* if packed: the number of rows of q (t_q), and of k and v (t_kv) */
    const int *cu_q, *cu_kv;   /* [batch + 1]: cumulative lengths; NULL: all lengths are s_q (s_kv) */
    const int *at_q, *at_kv;   /* if packed: [batch + 1], the first row of each sequence; NULL: cu_q, cu_kv have the
                                * first rows */
    const int *pages;          /* the page table, [batch, pages_of_each]; NULL: keys are not in pages */
    int page_size, num_pages, pages_of_each;
    te__attn_table bias, mask; /* mask: u8; an element that is not 0 hides its key */
    te__attn_table blocks;     /* the block mask, u8: one te_attn_block for each block of TE_ATTN_BLOCK_SIZE rows and
                                * TE_ATTN_BLOCK_SIZE keys */
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
    const float *s_scale, *dp_scale;
    float *s_amax, *dp_amax; /* or NULL */
} te__attn_extra;

/* The arguments of all attention kernels. Each kernel reads only a part of them. te__attn_problem_of (op.c) fills in
 * all fields except lse2 and delta. */
typedef struct te__attn_kargs {
    te__attn_view q, k, v, o, d_o, dq, dk, dv;
    float *lse;          /* [batch, heads, s_q]: the natural logarithm of the sums of exponentials; may be NULL in the
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

/* The order in which a Hopper kernel numbers its tiles. counter[0] gives out the numbers of tiles, and counter[1]
 * counts the thread blocks that have finished. Both are 0 between kernels. */
typedef struct te__attn_order {
    unsigned *counter;
    int tiles, rows; /* tiles: number of tiles of all heads; rows: of one head */
    int together;    /* number of heads whose tiles run at the same time */
    int pad;
} te__attn_order;

/* Dropout's bits in memory. A bit is 1 if the element of P is kept. For every 128 keys there is an array of `rows`
 * rows, in the order of lse2 (the log-sum-exp of each row). A row has four words, each computed by
 * te__attn_keep_word. */
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
    te__attn_table bias, to; /* to: bf16 [batch or 1, heads or 1, keys, 8]; its strides count keys of 16 bytes */
    int heads;               /* number of heads of the bias: 1 or all */
    int s_kv, keys;          /* keys: s_kv rounded up to a multiple of the forward kernel's block of keys */
    float factor;            /* turns the bias into units of products Q K^T */
} te__attn_line_kargs;

/* Aligns a struct of kernel arguments to 64 bytes, because tensor maps need that alignment. The structs are padded to
 * multiples of 64 bytes, so that the host's compiler and the kernels' compiler give them the same size. */
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
    te__attn_table line;             /* X_KEYS: the operand that attn_bias_line.cu made of the bias. The unit of its
                                      * strides is one key, 16 bytes. */
    unsigned char pad_bias[64 - (sizeof(te__attn_table) + 8) % 64];
} te__attn_fwd_hopper_kargs;
typedef char te__attn_fwd_hopper_kargs_fit[sizeof(te__attn_fwd_hopper_kargs) % 64 == 0 ? 1 : -1];

typedef struct TE__ATTN_ALIGN_64 te__attn_bwd_hopper_kargs {
    /* Only attn_bwd_dq_hopper.cu reads dq_map. */
    unsigned long long q_map[16], do_map[16], k_map[16], v_map[16], dk_map[16], dv_map[16], dq_map[16];
    long long tiles_of_head;
    te__attn_bits bits;
    te__attn_kargs a;
    te__attn_order order; /* The order of blocks of keys, or of tiles of queries. */
    float *dq_sum;        /* attn_bwd_hopper.cu: tiles of dQ in f32, in the order of the accumulator registers */
    int *added;           /* for each tile of dq_sum: how many key blocks have been added to it; NULL: there is no
                           * dq_sum */
    int queries, pad_queries; /* queries: number of queries of a tile */
    unsigned char
        pad[64 -
            (sizeof(te__attn_kargs) + sizeof(te__attn_order) + sizeof(te__attn_bits) + 2 * sizeof(void *) + 16) % 64];
    unsigned long long bias_map[16]; /* attn_bwd_hopper.cu with X_TILES */
    long long bias_row;              /* X_SUMS: s_kv rounded up to whole blocks of keys */
    float *bias_sum;                 /* [batch, groups, bias_row]: sums of dS over all queries and over the heads of a
                                      * group */
    float bias_factor;               /* turns a bias into units of products Q K^T */
    unsigned char pad_bias[64 - sizeof(void *) - 12];
} te__attn_bwd_hopper_kargs;
typedef char te__attn_bwd_hopper_kargs_fit[sizeof(te__attn_bwd_hopper_kargs) % 64 == 0 ? 1 : -1];
#define TE__ATTN_BWD_QUERIES(d) (8192 / (d))
#define TE__ATTN_BWD_SHARED(d)                                                                \
    (2 * TE__ATTN_BYTES(128, d) + 4 * 16384 + 2 * 256 * TE__ATTN_BWD_QUERIES(d) + 2 * 32768 + \
     16 * TE__ATTN_BWD_QUERIES(d) + 16 * 8 + 16)

/* Sizes of the backward kernels for heads above 128 channels. STAGES is the number of pipeline stages, SHARED is
 * the number of bytes of shared memory. DKV is attn_bwd_dkv_hopper.cu, which has stages of queries. DQ is
 * attn_bwd_dq_hopper.cu, which has stages of keys and stages of values. */
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
    te__attn_table to;    /* This is dB, or f32 partial sums of dB, [parts, dbias_b, dbias_h, dbias_i, keys]. If
                           * attn_bwd_hopper.cu made the sums of dS, this is its bias_sum. */
    te__attn_kargs a;
    te__attn_order order; /* tiles: number of tiles of all parts; rows: number of tiles of 128 queries */
    int parts, tiles_of_part;
    int aligned;          /* true: rows of `to` can be written 16 bytes at a time (f32: 8 bytes) */
    float by;             /* factor by which the sums are multiplied */
    unsigned char pad[64 - (sizeof(te__attn_kargs) + sizeof(te__attn_order) + sizeof(te__attn_table) +
                            sizeof(te__attn_bits) + 24) %
                               64];
} te__attn_bias_hopper_kargs;
typedef char te__attn_bias_hopper_kargs_fit[sizeof(te__attn_bias_hopper_kargs) % 64 == 0 ? 1 : -1];
/* Shared memory of attn_bwd_bias_hopper.cu: 7 * 32768 bytes for the pipeline's stages and the tile of the bias. Each of
 * at most six stages also has a message to the consumers (48 bytes) and a pair of barriers (16 bytes). The sums
 * of a tile's columns take 512 bytes. */
#define TE__ATTN_DBIAS_SHARED (7 * 32768 + 6 * (48 + 16) + 512)

/* TE__ATTN_BYTES is the size in bytes of `rows` rows of d channels, in whole panels of 64 channels. TE__ATTN_FWD_* are
 * sizes in attn_fwd_hopper.cu: the keys of a block of K (KEYS), the stages of Q (STAGES_Q), and bytes of shared memory.
 * `waves` is the number of consumer warpgroups. */
#define TE__ATTN_BYTES(rows, d) ((rows) * 128 * (((d) + 63) / 64))
#define TE__ATTN_FWD_KEYS(d, d_v) ((d) <= 128 || (d_v) <= 128 ? 128 : (d) <= 192 ? 96 : 64)
#define TE__ATTN_FWD_STAGES_Q(d, d_v, waves) ((d) <= 128 ? 2 : 1)
#define TE__ATTN_FWD_INPUTS(d, d_v, waves)                                                                  \
    (TE__ATTN_FWD_STAGES_Q(d, d_v, waves) * (waves) * TE__ATTN_BYTES(64, d) +                               \
     2 * TE__ATTN_BYTES(TE__ATTN_FWD_KEYS(d, d_v), d) + 2 * TE__ATTN_BYTES(TE__ATTN_FWD_KEYS(d, d_v), d_v))
#define TE__ATTN_FWD_SHARED(d, d_v, waves)                                                      \
    (TE__ATTN_FWD_INPUTS(d, d_v, waves) +                                                       \
     (TE__ATTN_FWD_STAGES_Q(d, d_v, waves) == 1 ? 0 : (waves) * TE__ATTN_BYTES(64, d_v)) + 256)
/* Bytes of shared memory that ALiBi needs in addition, for an operand that holds the column indices of S (te_line).
 * Together with the 256 bytes of barriers they are a multiple of 1024, so that O, which follows them, is aligned. For
 * 65 to 128 channels the kernel then uses all TE__ATTN_SHARED_MAX bytes. */
#define TE__ATTN_LINE_BYTES(d) ((d) > 64 && (d) <= 128 ? 2816 : 3840)
/* Shared memory of attn_fwd_hopper.cu with tiles of a bias (X_TILES). O takes the place of Q. The tiles have two stages
 * if they fit, otherwise one. TE__ATTN_SHARED_MAX is the number of bytes that a block can have. */
#define TE__ATTN_SHARED_MAX 232448
#define TE__ATTN_BIAS_TILE(d, d_v) TE__ATTN_BYTES(64, TE__ATTN_FWD_KEYS(d, d_v))
#define TE__ATTN_BIAS_SHARED_OF(d, d_v, waves, stages)                                           \
    (TE__ATTN_FWD_INPUTS(d, d_v, waves) + (stages) * (waves) * TE__ATTN_BIAS_TILE(d, d_v) + 320)
#define TE__ATTN_BIAS_STAGES(d, d_v, waves) (TE__ATTN_BIAS_SHARED_OF(d, d_v, waves, 2) <= TE__ATTN_SHARED_MAX ? 2 : 1)
#define TE__ATTN_BIAS_SHARED(d, d_v, waves) TE__ATTN_BIAS_SHARED_OF(d, d_v, waves, TE__ATTN_BIAS_STAGES(d, d_v, waves))
/* Shared memory of attn_fwd_hopper.cu with a bias that all queries share (X_KEYS). TE__ATTN_KEYS_BYTES is for the
 * operands of the product that adds the bias. Operand A has 64 rows of 16 bytes. Operand B has 16 bytes per key.
 * There are two stages of operand B, and zeros as large as one stage. Above 64 channels O takes the place of Q. */
#define TE__ATTN_KEYS_BYTES(d, d_v) (1024 + 3 * 16 * TE__ATTN_FWD_KEYS(d, d_v))
#define TE__ATTN_KEYS_SHARED(d, d_v, waves)                                                     \
    (TE__ATTN_FWD_INPUTS(d, d_v, waves) + ((d) <= 64 ? (waves) * TE__ATTN_BYTES(64, d_v) : 0) + \
     TE__ATTN_KEYS_BYTES(d, d_v) + 256)

/* The rows of lse2 and delta are padded to a multiple of this number. It is the size of the largest tile, and backward
 * kernels read whole tiles. */
#define TE__ATTN_PAD 128

/* Sizes of the general kernels (general.cuh). The four warps of a block have TE__ATTN_ROWS rows of one side (queries or
 * keys), four for each warp. They process TE__ATTN_LANES rows of the other side at a time. */
#define TE__ATTN_ROWS 16
#define TE__ATTN_LANES 32
#define TE__ATTN_CHUNK 256 /* number of channels that the general kernels can process at a time; wider heads are
                            * processed in chunks */
#define TE__ATTN_MAX_D 1024

/* The arguments of the sparse attention kernels. A query reads only the keys of its own list in `indices`. There are
 * `heads` query heads and one head of keys. The keys are also the values. */
typedef struct te__sparse_attn_kargs {
    te__attn_view q, kv, o, d_o, dq, dkv; /* kv and dkv are [batch, s_kv, d]. The first d_v channels of a key are also
                                           * its value. */
    const int *indices;  /* [batch, s_q, n]: the row numbers of the keys that a query reads; a number outside of 0 ..
                          * s_kv - 1 is no key */
    const float *sinks;  /* [heads], or NULL */
    float *lse;          /* [batch, heads, s_q]: the natural logarithm of the sums of exponentials; may be NULL in the
                          * forward pass */
    float *lse2, *delta; /* backward pass: [batch, heads, s_q], as in attn_delta.cu */
    int *cursor;         /* backward pass: [batch, chunks, s_kv]. At first an entry counts how many queries of the
                          * chunk read the key. Later it is the position in `list` where the indices of these queries
                          * are written. */
    int *start, *list;   /* backward pass: start [batch, s_kv + 1], list [batch, s_q n]. The queries that read key j are
                          * list[start[j]] to list[start[j + 1] - 1], in ascending order. */
    int batch, heads, s_q, s_kv, n, d, d_v;
    int tile;            /* number of keys in shared memory at a time, 16 or 32 */
    int chunks, step;    /* see sparse_attn_list.cu */
    float scale, scale2; /* scale: factor of the products; scale2: scale * log2(e) */
} te__sparse_attn_kargs;
#define TE__SPARSE_ROWS 8 /* number of query heads of a block */
#define TE__SPARSE_MAX_D 576

/* The number of floats in a row of d channels in the shared memory of the general and sparse kernels. With TE__ATTN_ROW
 * four floats can be read at a time along a row. With TE__ATTN_LANE_ROW eight lanes can also read four floats each, at
 * the same offset in eight neighbouring rows, without bank conflicts. */
#define TE__ATTN_ROW(d) (((d) + 3) / 4 * 4)
#define TE__ATTN_LANE_ROW(d) (((d) + 31) / 32 * 32 + 4)

#endif
