/* ops/cast/kargs.h: arguments of the cast kernels. Read by the host's compiler and by the kernels': plain structs alone. */

typedef struct te__amax_kargs {
    const void *x;
    float *amax;       /* [1] */
    const float *noop; /* [1], or NULL */
    long long n;
    int x_dt;
    int vector; /* x is aligned to 16 bytes */
} te__amax_kargs;

typedef struct te__scale_from_amax_kargs {
    const float *amax;        /* [n] */
    float *scale, *scale_inv; /* [n]; scale_inv may be NULL */
    long long n;
    float fp8_max, epsilon;
    int power_of_two;
} te__scale_from_amax_kargs;

typedef struct te__delayed_update_kargs {
    float *history;       /* [length, n] */
    float *scale;         /* [n] */
    const float *reduced; /* [n], or NULL */
    long long length, n;
    float scaled_max; /* fp8_max / 2^margin */
    int most_recent;
} te__delayed_update_kargs;

/* A block does one tile of 128 rows and 64 columns. */
typedef struct te__fp8_quantize_kargs {
    const void *x; /* [m, n] */
    void *row;     /* [m, ld], or NULL */
    void *col;     /* [n, ldc], or NULL */
    const float *scale;
    float *scale_inv, *amax; /* [1], or NULL */
    const float *noop;
    long long m, n, ld, ldc;
    unsigned tiles_n; /* tiles along n */
    int x_dt, y_dt;
    int vector_x;   /* rows of x start at multiples of 16 bytes */
    int vector_row; /* rows of `row` start at multiples of 8 bytes */
    int vector_col; /* rows of `col` start at multiples of 16 bytes */
} te__fp8_quantize_kargs;

typedef struct te__fp8_dequantize_kargs {
    const void *q; /* [m, ld] */
    const float *scale_inv;
    void *y; /* [m, n] */
    long long m, n, ld;
    int q_dt, y_dt;
    int vector; /* rows of q start at multiples of 8 bytes, rows of y of 16 */
} te__fp8_dequantize_kargs;

/* A block does one tile of 128 / size rows and 64 columns. */
typedef struct te__transpose_kargs {
    const void *src; /* [m, lds] */
    void *dst;       /* [n, ldd] */
    long long m, n, lds, ldd;
    unsigned tiles_n;
    int size;       /* bytes of an element: 1, 2 or 4 */
    int vector_src; /* rows of src start at multiples of 8 elements and of 16 bytes (8 for bytes) */
    int vector_dst; /* rows of dst start at multiples of 16 bytes */
} te__transpose_kargs;
