/* ops/block/kargs.h: arguments of the block-scaling kernels. Read by the host's compiler and by the kernels': plain
 * structs alone. */

/* A thread block does one tile of 128 rows and 128 columns. */
typedef struct te__block_quantize_kargs {
    const void *x;               /* [m, n] */
    void *row;                   /* [m, ld], or NULL */
    void *col;                   /* [n, ldc], or NULL */
    float *row_scale, *col_scale; /* [.., ld_row_scale], [.., ld_col_scale]; NULL with the copy they belong to */
    const float *noop;           /* [1], or NULL */
    long long m, n, ld, ldc, ld_row_scale, ld_col_scale;
    float epsilon, limit; /* limit: the scale where the quotient is beyond f32 */
    unsigned tiles_n;     /* tiles along n */
    int x_dt, y_dt;
    int two_dimensional, power_of_two;
    int vector_x;   /* rows of x start at multiples of 16 bytes */
    int vector_row; /* rows of `row` start at multiples of 16 bytes */
    int vector_col; /* rows of `col` start at multiples of 16 bytes */
} te__block_quantize_kargs;

/* y [m, n]. */
typedef struct te__block_dequantize_kargs {
    const void *q;          /* [m, ld]; column-wise: [n, ld] */
    const float *scale_inv; /* [.., ld_scale] */
    void *y;
    long long m, n, ld, ld_scale;
    unsigned tiles_n; /* column-wise: tiles along n */
    int q_dt, y_dt;
    int two_dimensional;
    int vector_q; /* rows of q start at multiples of 8 bytes; column-wise: of 16 */
    int vector_y; /* rows of y start at multiples of 16 bytes */
} te__block_dequantize_kargs;
