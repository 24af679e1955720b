/* ops/block/kargs.h: the arguments of the block-scaling kernels. The host's compiler and the kernels' compiler both
 * read this file, so it has plain structs alone. */

/* The arguments of the kernel block_quantize. A thread block quantizes one tile of 128 rows and 128 columns. */
typedef struct te__block_quantize_kargs {
    const void *x;               /* [m, n] */
    void *row;                   /* [m, ld], or NULL */
    void *col;                   /* [n, ldc], or NULL */
    float *row_scale, *col_scale; /* [.., ld_row_scale], [.., ld_col_scale]. row_scale is NULL if `row` is NULL, and
                                   * col_scale is NULL if `col` is NULL */
    const float *noop;           /* [1], or NULL */
    long long m, n, ld, ldc, ld_row_scale, ld_col_scale;
    float epsilon, limit; /* limit: the scale to use if fp8_max / amax overflows f32 */
    unsigned tiles_n;     /* tiles along n */
    int x_dt, y_dt;
    int two_dimensional, power_of_two;
    int vector_x;   /* whether rows of x start at multiples of 16 bytes */
    int vector_row; /* whether rows of `row` start at multiples of 16 bytes */
    int vector_col; /* whether rows of `col` start at multiples of 16 bytes */
} te__block_quantize_kargs;

/* Arguments of block_dequantize and block_dequantize_col. y is [m, n]. */
typedef struct te__block_dequantize_kargs {
    const void *q;          /* [m, ld]; column-wise: [n, ld] */
    const float *scale_inv; /* [.., ld_scale] */
    void *y;
    long long m, n, ld, ld_scale;
    unsigned tiles_n; /* column-wise: tiles along n */
    int q_dt, y_dt;
    int two_dimensional;
    int vector_q; /* whether rows of q start at multiples of 8 bytes (column-wise: of 16 bytes) */
    int vector_y; /* whether rows of y start at multiples of 16 bytes */
} te__block_dequantize_kargs;
