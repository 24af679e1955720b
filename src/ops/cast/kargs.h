/* ops/cast/kargs.h: the arguments of the cast kernels. The host's compiler and the kernels' compiler both read this
 * file, so it has only plain structs. Each struct has at most 4,000 bytes, to fit into a kernel's parameters. */

typedef struct te__amax_kargs {
    const void *x;
    float *partial;    /* [blocks]: the maximum of each block */
    float *amax;       /* [1]: the maximum of all elements; the last block writes it */
    unsigned *counter; /* for te_last_block */
    const float *noop; /* [1], or NULL */
    long long n;
    long long vectors; /* number of 16-byte pieces from element `head` on; the other elements are read one by one */
    int head;
    int x_dt;
    int keep; /* whether the old value of the amax counts in the maximum */
} te__amax_kargs;

/* The arguments of the kernels amax_groups and amax_groups_zero. amax_groups_zero runs first. */
typedef struct te__amax_groups_kargs {
    const void *x;     /* [m, n] */
    const int *groups; /* [m] */
    float *amax;       /* [count], `stride` apart */
    long long m, n, stride;
    int count;
    int x_dt;
    int vector; /* whether rows of x start at multiples of 16 bytes */
    int pad;
} te__amax_groups_kargs;

typedef struct te__scale_from_amax_kargs {
    const float *amax;        /* [n] */
    float *scale, *scale_inv; /* [n]; scale_inv may be NULL */
    long long n;
    float fp8_max, epsilon;
    int power_of_two;
} te__scale_from_amax_kargs;

/* A table of states of delayed scaling. A slot is one column of a history, with its scale. Slot s of a launch belongs
 * to the state i with first[i] <= s < first[i + 1]. Each distinct history length is stored once, so that
 * TE__DELAYED_MAX states fit into a launch. */
#define TE__DELAYED_MAX 186
#define TE__DELAYED_LENGTHS 16
typedef struct te__delayed_kargs {
    float *history[TE__DELAYED_MAX]; /* [length, n] */
    float *scale[TE__DELAYED_MAX];   /* [n]; unused by the gather */
    float *amaxes; /* the amaxes of this launch's slots. delayed_gather writes them. delayed_update reads an amax
                    * instead of row 0 of the history, unless `amaxes` is NULL or the amax is 0 */
    unsigned first[TE__DELAYED_MAX + 1];
    unsigned length[TE__DELAYED_LENGTHS];          /* 0: unused */
    unsigned char length_index[TE__DELAYED_MAX]; /* the position of each state's length in `length` */
    float scaled_max; /* fp8_max / 2^margin */
    int most_recent, states;
} te__delayed_kargs;

/* A tile has 128 rows and 64 columns. */
#define TE__CAST_RESIDENT 3 /* blocks of fp8_quantize that must fit on a multiprocessor, if the kernel computes the
                             * scale */
#define TE__CAST_RESIDENT_HALVES 4 /* the same number for x of 16 bits, which stays packed in registers */
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
    unsigned long long *x_amax; /* [1], or NULL; lower half: the amax of x; upper half: number of blocks that have read
                                 * the amax */
    const int *groups; /* [m], or NULL: the group of each row; each group has its own scale, scale_inv and amax */
    long long scale_stride, amax_stride; /* distances from one group to the next, in floats */
    long long m, n, ld, ldc;
    unsigned tiles, tiles_n; /* tiles: number of tiles of x; tiles_n: number of tiles along n */
    float fp8_max, epsilon;  /* used if the kernel computes the scale */
    int current;             /* whether the kernel computes the scale from x, which it then reads twice */
    int count;               /* number of groups */
    int power_of_two;
    int x_dt, y_dt;
    int vector_x;   /* whether rows of x start at multiples of 16 bytes */
    int vector_row; /* whether rows of `row` start at multiples of 8 bytes */
    int vector_col; /* whether rows of `col` start at multiples of 16 bytes */
    int pad;
} te__fp8_quantize_kargs;

typedef struct te__fp8_dequantize_kargs {
    const void *q; /* [m, ld] */
    const float *scale_inv; /* [1], or [count] */
    const int *groups;      /* [m]: the group of each row; NULL: no groups. Each group has its own scale */
    void *y; /* [m, n] */
    long long m, n, ld;
    int count;
    int q_dt, y_dt;
    int vector; /* whether rows of q start at multiples of 8 bytes and rows of y at multiples of 16 bytes */
} te__fp8_dequantize_kargs;

/* The arguments of transpose_nibbles. A thread block transposes two neighbouring tiles of 256 rows and 64
 * columns. */
typedef struct te__transpose_nibbles_kargs {
    const void *src; /* [m, lds] */
    void *dst;       /* [n, ldd] */
    long long m, n, lds, ldd; /* lds and ldd in bytes */
    unsigned tiles_n; /* number of pairs of tiles along n */
    int vector_src; /* whether rows of src start at multiples of 4 bytes */
    int vector_dst; /* whether rows of dst start at multiples of 16 bytes */
    int pad;
} te__transpose_nibbles_kargs;
