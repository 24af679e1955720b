/* ops/cast/kargs.h: the arguments of the cast kernels. The host's compiler and the kernels' compiler both read it:
 * plain structs alone, at most 4,000 bytes each. */

typedef struct te__amax_kargs {
    const void *x;
    float *partial;    /* [blocks]: the maximum of each block */
    float *amax;       /* [1]: the maximum of all, by the last block */
    unsigned *counter; /* for te_last_block */
    const float *noop; /* [1], or NULL */
    long long n;
    long long vectors; /* pieces of 16 bytes, from element `head` on; the elements before and behind them are read one
                        * by one */
    int head;
    int x_dt;
    int keep; /* amax is the maximum with the value already there */
} te__amax_kargs;

/* Arguments of amax_groups, and of amax_groups_zero before it. */
typedef struct te__amax_groups_kargs {
    const void *x;     /* [m, n] */
    const int *groups; /* [m] */
    float *amax;       /* [count], `stride` apart */
    long long m, n, stride;
    int count;
    int x_dt;
    int vector; /* rows of x start at multiples of 16 bytes */
    int pad;
} te__amax_groups_kargs;

typedef struct te__scale_from_amax_kargs {
    const float *amax;        /* [n] */
    float *scale, *scale_inv; /* [n]; scale_inv may be NULL */
    long long n;
    float fp8_max, epsilon;
    int power_of_two;
} te__scale_from_amax_kargs;

/* A table of states for delayed_update and delayed_gather. Slot s of the launch belongs to the state i with first[i] <=
 * s < first[i + 1]. Each distinct length is stored once, so that TE__DELAYED_MAX states fit. */
#define TE__DELAYED_MAX 186
#define TE__DELAYED_LENGTHS 16
typedef struct te__delayed_kargs {
    float *history[TE__DELAYED_MAX]; /* [length, n] */
    float *scale[TE__DELAYED_MAX];   /* [n]; unused by the gather */
    float *amaxes; /* amaxes of this launch's slots: the update reads them in place of row 0, or has NULL; the gather
                    * writes them */
    unsigned first[TE__DELAYED_MAX + 1];
    unsigned length[TE__DELAYED_LENGTHS];          /* 0: unused */
    unsigned char length_index[TE__DELAYED_MAX]; /* where in `length` each state's length is */
    float scaled_max; /* fp8_max / 2^margin */
    int most_recent, states;
} te__delayed_kargs;

/* A tile has 128 rows and 64 columns. */
#define TE__CAST_RESIDENT 3 /* blocks on a multiprocessor at once, if they find the scale themselves */
#define TE__CAST_RESIDENT_HALVES 4 /* the same for x of 16 bits, which stays packed in registers */
typedef struct te__fp8_quantize_kargs {
    const void *x; /* [m, n] */
    void *row;     /* [m, ld], or NULL */
    void *col;     /* [n, ldc], or NULL */
    const float *scale;
    float *scale_inv, *amax; /* [1], or NULL */
    const float *noop;
    float *partial;    /* with `current`: [blocks], the blocks' maxima */
    unsigned *counter; /* with `current`: for te_grid_wait */
    float *sums;       /* [tiles along m, n]: column sums of each tile, or NULL */
    unsigned long long *x_amax; /* [1], or NULL: the lower half is the amax of x, the upper half counts the blocks that
                                 * have read it */
    const int *groups; /* [m]: scale, scale_inv and amax have a number for each group; or NULL */
    long long scale_stride, amax_stride; /* from one group to the next */
    long long m, n, ld, ldc;
    unsigned tiles, tiles_n; /* tiles: of x; tiles_n: of a row of tiles */
    float fp8_max, epsilon;  /* for a scale that the kernel finds itself */
    int current;             /* the kernel finds the scale itself, from x, which it reads twice */
    int count;               /* number of groups */
    int power_of_two;
    int x_dt, y_dt;
    int vector_x;   /* rows of x start at multiples of 16 bytes */
    int vector_row; /* rows of `row` start at multiples of 8 bytes */
    int vector_col; /* rows of `col` start at multiples of 16 bytes */
    int pad;
} te__fp8_quantize_kargs;

typedef struct te__fp8_dequantize_kargs {
    const void *q; /* [m, ld] */
    const float *scale_inv; /* [1], or [count] */
    const int *groups;      /* [m]: the group of each row, which has that group's scale; NULL: no groups */
    void *y; /* [m, n] */
    long long m, n, ld;
    int count;
    int q_dt, y_dt;
    int vector; /* rows of q start at multiples of 8 bytes, rows of y of 16 */
} te__fp8_dequantize_kargs;

/* Arguments of transpose_nibbles. A block does two tiles of 256 rows and 64 columns, beside each other. */
typedef struct te__transpose_nibbles_kargs {
    const void *src; /* [m, lds] */
    void *dst;       /* [n, ldd] */
    long long m, n, lds, ldd; /* lds and ldd in bytes */
    unsigned tiles_n; /* pairs of tiles in a row of tiles */
    int vector_src; /* rows of src start at multiples of 4 bytes */
    int vector_dst; /* rows of dst start at multiples of 16 bytes */
    int pad;
} te__transpose_nibbles_kargs;
