/* ops/nvfp4/kargs.h: the arguments of the NVFP4 kernels. The host's compiler and the kernels' compiler both read this
 * file, so it has plain structs alone. */

typedef struct te__nvfp4_amax_kargs {
    const void *x;       /* [m, n] */
    float *row, *col;    /* the outputs, each [1] or NULL; with per_row, `row` is [m]; with per_col, `col` is [n] */
    float *row_part, *col_part; /* [blocks]: the maximum of each thread block; the last block reduces them to `row` [1]
                                 * and `col` [1] */
    unsigned *counter;   /* for te_last_block */
    const float *noop;
    const int *groups;   /* [m], or NULL: the group of each row; rows 16 i to 16 i + 15 are in the same group. With
                          * `groups`, `row` and `col` are [count] */
    long long m, n;
    unsigned across;     /* number of pieces of 128 columns along n */
    long long pieces;    /* number of pieces of 16 rows and 128 columns */
    int x_dt;
    int per_row;         /* row is [m] */
    int per_col;         /* col is [n] */
    int rht;             /* 0: `col` is the amax of x; 1: of x after the Hadamard transform with random signs; 2: of
                          * x after the transform without random signs */
    int vector;          /* whether rows of x start at multiples of four elements */
    int keep;            /* whether the maxima in `row` and `col` start from the values already there, instead of 0 */
    int count;           /* number of groups */
} te__nvfp4_amax_kargs;

/* The arguments of nvfp4_quantize. A tile of x has 128 rows of 256 bytes. */
typedef struct te__nvfp4_quantize_kargs {
    const void *x;               /* [m, n] */
    unsigned char *row;          /* [m, ld] codes, or NULL */
    unsigned char *row_scale;    /* [round_up(m, 128), row_groups] */
    unsigned char *col;          /* [n, ldc] codes, or NULL */
    unsigned char *col_scale;    /* [round_up(n, 128), col_groups] */
    const float *amax_row, *amax_col; /* the amaxes for `row` and for `col`; both may point to the same array. They are
                                       * not read if `part` is given */
    float *out_row, *out_col;   /* NULL, or where the kernel writes the amaxes if `part` is given */
    float *part;                /* [2, blocks]: the maxima of each thread block. It is given if the kernel computes the
                                 * amaxes itself (MEASURE); otherwise NULL */
    unsigned *counter;          /* for te_grid_wait, with part */
    const float *noop;
    const int *groups;          /* [m], or NULL: the group of each row. With groups, amax_row and amax_col are [count],
                                 * and per_row and per_col are set */
    long long m, n, ld, ldc, row_groups, col_groups;
    unsigned long long seed, offset;
    const void *rng; /* te__rng_read */
    unsigned tiles, tiles_n; /* tiles: number of tiles of x; tiles_n: number of tiles along n */
    float code_max;   /* the largest value that a block scale may have: 448 or 256 */
    int x_dt;
    int per_row;      /* amax_row is [m] */
    int per_col;      /* amax_col is [n] */
    int two;          /* blocks of 16 x 16 */
    int rht;          /* as in te__nvfp4_amax_kargs. If it is not 0, a NaN in x makes the scale of its block NaN, in
                       * row_scale and in col_scale */
    int stochastic;
    int four;         /* te_4over6_error */
    int swizzled;
    int vector_x;     /* whether rows of x start at multiples of 16 bytes */
    int vector_row;   /* whether rows of `row` start at multiples of 16 bytes, and rows of `row_scale` at even
                       * addresses */
    int vector_col;   /* whether rows of `col` start at multiples of 16 bytes, and rows of `col_scale` at multiples of
                       * four bytes */
    int count;        /* number of groups */
    int pad;
} te__nvfp4_quantize_kargs;

typedef struct te__nvfp4_dequantize_kargs {
    const unsigned char *q;     /* [m, ld], or column-wise [n, ld] */
    const unsigned char *scale; /* [.., groups] */
    const float *amax;
    const int *group_of;        /* [m], or NULL: the group of each row. With group_of, amax is [count] */
    void *y;                    /* [m, n] */
    long long m, n, ld, groups;
    unsigned tiles_n;
    float code_max;
    int y_dt;
    int per_row;
    int columnwise;
    int rht;
    int swizzled;
    int vector_q; /* whether rows of q start at multiples of 8 bytes */
    int vector_y; /* whether rows of y start at multiples of 16 bytes */
    int count;    /* number of groups */
} te__nvfp4_dequantize_kargs;
