/* ops/moe/kargs.h: the arguments of the moe kernels. The host's and the kernels' compilers both read this file. */

/* TE__MOE_SORT_CHUNK: items (elements of `experts`) of one block of moe_sort.
 *
 * TE__MOE_SCAN: numbers that a thread of moe_scan reads at a time.
 *
 * TE__MOE_SORT_BUCKETS: buckets in one pass of the sort. */
#define TE__MOE_SORT_CHUNK 1024
#define TE__MOE_SCAN 8
#define TE__MOE_SORT_BUCKETS 256

typedef struct te__moe_splits_kargs {
    const void *sizes; /* [n], or NULL for values */
    void *padded, *offsets; /* [n]; offsets may be NULL */
    long long n, align;
    int sizes_dt, padded_dt, offsets_dt;
    long long values[64];
} te__moe_splits_kargs;

/* The arguments of moe_count, moe_scan and moe_rows, which make a row_id_map from a routing mask. The sort
 * (te__moe_sort_kargs) uses moe_scan too. */
typedef struct te__moe_map_kargs {
    const void *routing; /* [tokens, experts] */
    int *map;            /* [tokens, 2 experts + 1] */
    void *counts_out;    /* [experts], or NULL */
    int *counts;         /* [experts, chunks]: how many tokens of each chunk go to each expert. moe_scan replaces each
                          * count by the row where these tokens begin */
    int *rows;           /* [tokens, experts] */
    long long tokens, experts, chunks, chunk; /* chunk: tokens of one chunk */
    int routing_dt, counts_dt;
} te__moe_map_kargs;

typedef struct te__moe_local_kargs {
    const void *experts;          /* [items] */
    const unsigned char *dropped; /* [items / topk], or NULL */
    int *local;                   /* [items] */
    int *counts;                  /* [count, chunks] */
    long long first;
    unsigned items, topk;
    int count, experts_dt;
} te__moe_local_kargs;

/* The arguments of one pass of the sort. A pass orders items by eight bits of their key. Items with equal bits keep
 * their order. */
typedef struct te__moe_sort_kargs {
    const void *experts;             /* [items]: the keys, if `from` is NULL */
    const int *from;                 /* [2, items]: the items in the order of the previous pass. Row 0 has their keys.
                                      * Row 1 has their indices in `experts`. NULL in the first pass */
    int *to;                         /* [2, items]: the same rows as in `from`, in the order of this pass. NULL in the
                                      * last pass, which writes `map` instead */
    int *map;                        /* [topk, tokens] */
    int *counts;                     /* [256, chunks] */
    long long items, chunks, tokens, topk, kept;
    int shift, experts_dt;
} te__moe_sort_kargs;

typedef struct te__moe_chunk_map_kargs {
    struct te__outside *outside;
    const void *sizes, *sorted_index, *offsets; /* [n]; the last two may be NULL */
    int *map;                                   /* [tokens] */
    long long n, tokens;
    int sizes_dt, sorted_dt, offsets_dt;
    int numbers; /* whether the map gets numbers of chunks instead of rows */
} te__moe_chunk_map_kargs;

/* The arguments of moe_invert and moe_gather. source[row] becomes token * copies + place, where `place` is the index
 * of the copy among the token's copies. Rows without a copy keep -1. */
typedef struct te__moe_rows_kargs {
    const int *map;
    const void *pad_offsets; /* [experts], or NULL */
    int *source;             /* [rows] */
    const void *x;           /* [tokens, h] */
    void *y;                 /* [rows, h] */
    const void *probs;       /* [tokens, copies], or NULL */
    void *permuted_probs;    /* [rows], or NULL */
    long long tokens, copies, rows, h;
    int experts; /* 0: the map is an index map */
    int offsets_dt, x_dt, y_dt, probs_dt;
    int unit;    /* a row has h units of `unit` bytes. If `unit` is 0, a row has h elements, which are multiplied by
                  * probs */
    int zeroes;  /* whether a copy with probability 0 becomes a row of zeros */
} te__moe_rows_kargs;

/* The arguments of moe_unpermute and moe_dot. moe_dot computes the dot product of a token's row of dy with each of
 * the token's copies. */
typedef struct te__moe_sum_kargs {
    const int *map;
    const void *pad_offsets;    /* [experts], or NULL */
    const void *x;              /* [rows, h] */
    const void *merging_probs;  /* [tokens, copies], or NULL */
    const void *permuted_probs; /* [rows], or NULL */
    const void *dy;             /* [tokens, h], for moe_dot */
    void *y;                    /* [tokens, h] */
    void *probs;                /* [tokens, copies], or NULL */
    long long tokens, copies, rows, h;
    int experts;
    int offsets_dt, x_dt, y_dt, merging_dt, permuted_dt, probs_dt, dy_dt;
    int vector; /* whether rows of x, y and dy start at multiples of 16 bytes */
} te__moe_sum_kargs;

typedef struct te__moe_router_kargs {
    struct te__outside *outside;      /* for the backward pass */
    const void *logits, *bias; /* [tokens, experts], [experts] or NULL */
    void *probs;               /* [tokens, experts], or NULL; in the backward pass: dlogits */
    void *topk_probs;          /* [tokens, topk], or NULL */
    const void *dprobs;        /* [tokens, experts]; if there are indices, [tokens, topk] */
    unsigned char *map, *bits; /* [tokens, experts] and [tokens, experts / 8 rounded up]; either may be NULL. The
                                * backward pass reads the map */
    void *indices;             /* [tokens, topk], or NULL; read by the backward pass */
    long long tokens;
    float scaling;
    int experts, topk, groups, group_topk, group_best;
    int score;                 /* te_score_function */
    int pre_softmax, all_scores, normalise, biased; /* biased: whether the bias is added to the scores before they
                                                     * become probabilities */
    int zero_groups;           /* whether experts in groups that are not chosen are ranked by the key 0, instead of
                                * -infinity */
    int logits_dt, bias_dt, probs_dt, topk_probs_dt, dprobs_dt, indices_dt;
} te__moe_router_kargs;

typedef struct te__moe_loss_kargs {
    const void *probs, *counts; /* [rows, cols], [cols] */
    const long long *total;     /* [1], or NULL for total_host */
    const void *dloss;          /* [1] */
    void *out;                  /* [1]; in the backward pass: dprobs [rows, cols] */
    float *partial;             /* [blocks] */
    unsigned *counter;
    long long rows, cols, chunk; /* chunk: rows of a block */
    float total_host, factor;    /* factor: coeff * num_experts / topk */
    int probs_dt, counts_dt, dloss_dt, out_dt;
} te__moe_loss_kargs;

typedef struct te__grouped_column_sum_kargs {
    const void *x, *sizes; /* [m, n], [groups] */
    void *out;             /* [groups, n] */
    long long m, n, groups;
    int x_dt, sizes_dt, out_dt;
} te__grouped_column_sum_kargs;
