/* ops/nvfp4/kargs.h: arguments of the NVFP4 kernels. Read by the host's compiler and by the kernels': plain structs
 * alone. */

typedef struct te__nvfp4_amax_kargs {
    const void *x;       /* [m, n] */
    float *row, *col;    /* [1], or row [m], col [n]; either may be NULL */
    float *row_part, *col_part; /* [blocks]: of which the last block makes row [1] and col [1] */
    unsigned *counter;   /* of te_last_block */
    const float *noop;
    const int *groups;   /* [m]: row and col are [count], of each group, and 16 rows are of one; or NULL */
    long long m, n;
    unsigned across;     /* pieces of 128 columns */
    long long pieces;    /* all pieces of 16 rows and 128 columns */
    int x_dt;
    int per_row;         /* row is [m] */
    int per_col;         /* col is [n] */
    int rht;             /* the input of col: 0 x itself, 1 transformed, 2 transformed without signs */
    int vector;          /* rows of x start at multiples of four elements */
    int keep;            /* the maximum with the values in row and col */
    int count;           /* groups */
} te__nvfp4_amax_kargs;

/* A tile has 128 rows and 256 bytes of each. */
typedef struct te__nvfp4_quantize_kargs {
    const void *x;               /* [m, n] */
    unsigned char *row;          /* [m, ld] codes, or NULL */
    unsigned char *row_scale;    /* [round_up(m, 128), row_groups] */
    unsigned char *col;          /* [n, ldc] codes, or NULL */
    unsigned char *col_scale;    /* [round_up(n, 128), col_groups] */
    const float *amax_row, *amax_col; /* of the two copies; may be the same. Not read with part */
    float *out_row, *out_col;   /* with part: where the amaxes go, or NULL */
    float *part;                /* [2, blocks]: the amaxes are made here (MEASURE) */
    unsigned *counter;          /* of te_grid_wait, with part */
    const float *noop;
    const int *groups;          /* [m]: amax_row and amax_col are [count], of each group, and per_row and per_col are
                                 * set; or NULL */
    long long m, n, ld, ldc, row_groups, col_groups;
    unsigned long long seed, offset;
    const void *rng; /* te__rng_read */
    unsigned tiles, tiles_n; /* in all, along n */
    float code_max;   /* the largest block scale: 448 or 256 */
    int x_dt;
    int per_row;      /* amax_row is [m] */
    int per_col;      /* amax_col is [n] */
    int two;          /* blocks of 16 x 16 */
    int rht;          /* as in te__nvfp4_amax_kargs; a NaN then makes the scales of its blocks NaN, without col too */
    int stochastic;
    int four;         /* te_4over6_error */
    int swizzled;
    int vector_x;     /* rows of x start at multiples of 16 bytes */
    int vector_row;   /* rows of codes start at multiples of 16 bytes, and rows of `row_scale` at even addresses */
    int vector_col;   /* rows of codes start at multiples of 16 bytes, and those of `col_scale` at multiples of four */
    int count;        /* groups */
    int pad;
} te__nvfp4_quantize_kargs;

typedef struct te__nvfp4_dequantize_kargs {
    const unsigned char *q;     /* [m, ld], or column-wise [n, ld] */
    const unsigned char *scale; /* [.., groups] */
    const float *amax;
    const int *group_of;        /* [m]: amax is [count], of each group of rows; or NULL */
    void *y;                    /* [m, n] */
    long long m, n, ld, groups;
    unsigned tiles_n;
    float code_max;
    int y_dt;
    int per_row;
    int columnwise;
    int rht;
    int swizzled;
    int vector_q; /* rows of q start at multiples of 8 bytes */
    int vector_y; /* rows of y start at multiples of 16 bytes */
    int count;    /* groups */
} te__nvfp4_dequantize_kargs;
