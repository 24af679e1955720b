/* ops/nvfp4/kargs.h: the arguments of the NVFP4 kernels. The host's compiler and the kernels' compiler both read it:
 * plain structs alone. */

typedef struct te__nvfp4_amax_kargs {
    const void *x;       /* [m, n] */
    float *row, *col;    /* outputs: each [1]; or row [m], col [n]; either may be NULL */
    float *row_part, *col_part; /* [blocks]: the blocks' maxima; the last block reduces them to row [1] and col [1] */
    unsigned *counter;   /* for te_last_block */
    const float *noop;
    const int *groups;   /* [m]: the group of each row, the same for each 16 rows; row and col are then [count]; NULL:
                          * no groups */
    long long m, n;
    unsigned across;     /* pieces of 128 columns in a row of pieces */
    long long pieces;    /* number of pieces of 16 rows and 128 columns */
    int x_dt;
    int per_row;         /* row is [m] */
    int per_col;         /* col is [n] */
    int rht;             /* input of col: 0: x itself, 1: transformed, 2: transformed without signs */
    int vector;          /* rows of x start at multiples of four elements */
    int keep;            /* row and col are maxima with the values already there */
    int count;           /* number of groups */
} te__nvfp4_amax_kargs;

/* Arguments of nvfp4_quantize. A tile has 128 rows and 256 bytes of each. */
typedef struct te__nvfp4_quantize_kargs {
    const void *x;               /* [m, n] */
    unsigned char *row;          /* [m, ld] codes, or NULL */
    unsigned char *row_scale;    /* [round_up(m, 128), row_groups] */
    unsigned char *col;          /* [n, ldc] codes, or NULL */
    unsigned char *col_scale;    /* [round_up(n, 128), col_groups] */
    const float *amax_row, *amax_col; /* amaxes of the two copies; may be the same; not read if part is given */
    float *out_row, *out_col;   /* with part: receive the amaxes; or NULL */
    float *part;                /* [2, blocks]: the blocks' maxima, if the kernel finds the amaxes itself (MEASURE);
                                 * else NULL */
    unsigned *counter;          /* for te_grid_wait, with part */
    const float *noop;
    const int *groups;          /* [m]: the group of each row; amax_row and amax_col are then [count], and per_row and
                                 * per_col set; NULL: no groups */
    long long m, n, ld, ldc, row_groups, col_groups;
    unsigned long long seed, offset;
    const void *rng; /* te__rng_read */
    unsigned tiles, tiles_n; /* tiles: of x; tiles_n: of a row of tiles */
    float code_max;   /* the largest block scale: 448 or 256 */
    int x_dt;
    int per_row;      /* amax_row is [m] */
    int per_col;      /* amax_col is [n] */
    int two;          /* blocks of 16 x 16 */
    int rht;          /* as in te__nvfp4_amax_kargs; if set, a NaN makes the scales of its blocks NaN, in the row-wise
                       * copy too */
    int stochastic;
    int four;         /* te_4over6_error */
    int swizzled;
    int vector_x;     /* rows of x start at multiples of 16 bytes */
    int vector_row;   /* rows of codes start at multiples of 16 bytes, and rows of `row_scale` at even addresses */
    int vector_col;   /* rows of codes start at multiples of 16 bytes, and rows of `col_scale` at multiples of four */
    int count;        /* number of groups */
    int pad;
} te__nvfp4_quantize_kargs;

typedef struct te__nvfp4_dequantize_kargs {
    const unsigned char *q;     /* [m, ld], or column-wise [n, ld] */
    const unsigned char *scale; /* [.., groups] */
    const float *amax;
    const int *group_of;        /* [m]: the group of each row; amax is then [count]; NULL: no groups */
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
    int count;    /* number of groups */
} te__nvfp4_dequantize_kargs;
