/* ops/moe/kargs.h: arguments of the kernels of mixtures of experts. Read by the host's compiler and by the kernels':
 * plain structs alone. */

/* Items that a block of moe_sort takes, and numbers that a thread of moe_scan takes at a time. */
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

/* moe_count, moe_scan, moe_rows: a mask map; moe_sort_count, moe_scan, moe_sort: one pass of the sort of an index
 * map. */
typedef struct te__moe_map_kargs {
    const void *routing; /* [tokens, experts] */
    int *map;            /* [tokens, 2 experts + 1] */
    void *counts_out;    /* [experts], or NULL */
    int *counts;         /* [experts, chunks]: of each expert in each chunk of tokens; moe_scan makes them the rows
                          * where these begin */
    int *rows;           /* [tokens, experts] */
    long long tokens, experts, chunks, chunk; /* chunk: tokens of one */
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

/* A pass orders items by eight bits of their key, and keeps the order of equal ones. */
typedef struct te__moe_sort_kargs {
    const void *experts;             /* [items]: the keys, where `from` is NULL */
    const int *from;                 /* [2, items]: keys and their places, as the pass before has left them, or NULL */
    int *to;                         /* likewise, or NULL: the last pass writes the map */
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
    int numbers; /* of chunks, in place of rows */
} te__moe_chunk_map_kargs;

/* moe_invert: for each row the copy that comes to it, t * copies + place, or -1 (written before). moe_gather: rows by
 * that. */
typedef struct te__moe_rows_kargs {
    const int *map;
    const void *pad_offsets; /* [experts], or NULL */
    int *source;             /* [rows] */
    const void *x;           /* [tokens, h] */
    void *y;                 /* [rows, h] */
    const void *probs;       /* [tokens, copies], or NULL */
    void *permuted_probs;    /* [rows], or NULL */
    long long tokens, copies, rows, h;
    int experts; /* 0: an index map */
    int offsets_dt, x_dt, y_dt, probs_dt;
    int unit;    /* rows are moved as they are, by units of so many bytes, h of them; 0: times probs, h elements */
    int zeroes;  /* a copy whose probability is 0 is a row of zeros */
} te__moe_rows_kargs;

/* moe_unpermute: a warp a token. moe_dot: a warp a token and place, and its products of rows. */
typedef struct te__moe_sum_kargs {
    const int *map;
    const void *pad_offsets;    /* [experts], or NULL */
    const void *x;              /* [rows, h] */
    const void *merging_probs;  /* [tokens, copies], or NULL */
    const void *permuted_probs; /* [rows], or NULL */
    const void *dy;             /* [tokens, h], of moe_dot */
    void *y;                    /* [tokens, h] */
    void *probs;                /* [tokens, copies], or NULL */
    long long tokens, copies, rows, h;
    int experts;
    int offsets_dt, x_dt, y_dt, merging_dt, permuted_dt, probs_dt, dy_dt;
    int vector; /* rows of x, y and dy start at multiples of 16 bytes */
} te__moe_sum_kargs;

typedef struct te__moe_router_kargs {
    struct te__outside *outside;      /* of the backward pass */
    const void *logits, *bias; /* [tokens, experts], [experts] or NULL */
    void *probs;               /* [tokens, experts], or NULL; of the backward pass: dlogits */
    void *topk_probs;          /* [tokens, topk], or NULL */
    const void *dprobs;        /* [tokens, experts], or with indices [tokens, topk] */
    unsigned char *map, *bits; /* [tokens, experts], [tokens, experts / 8 up]; may be NULL; of the backward pass:
                                * read */
    void *indices;             /* [tokens, topk], or NULL; of the backward pass: read */
    long long tokens;
    float scaling;
    int experts, topk, groups, group_topk, group_best;
    int score;                 /* te_score_function */
    int pre_softmax, all_scores, normalise, biased; /* biased: the bias is a part of the probabilities */
    int zero_groups;           /* experts of groups that are not chosen have the key 0 */
    int logits_dt, bias_dt, probs_dt, topk_probs_dt, dprobs_dt, indices_dt;
} te__moe_router_kargs;

typedef struct te__moe_loss_kargs {
    const void *probs, *counts; /* [rows, cols], [cols] */
    const long long *total;     /* [1], or NULL for total_host */
    const void *dloss;          /* [1] */
    void *out;                  /* [1]; of the backward pass: dprobs [rows, cols] */
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
