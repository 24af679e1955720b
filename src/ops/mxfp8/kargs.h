/* ops/mxfp8/kargs.h: the arguments of the MXFP8 kernels. The host's compiler and the kernels' compiler both read this
 * file, so it has plain structs alone. */

/* The tile of a thread block. */
#define TE__MX_ROWS 32
#define TE__MX_COLS 256

typedef struct te__mxfp8_quantize_kargs {
    const void *x; /* [m, n] */
    void *row;     /* [m, ld], or NULL */
    void *col;     /* [m, ldc], or NULL */
    unsigned char *row_scale, *col_scale;
    const float *noop; /* [1], or NULL */
    long long m, n, ld, ldc;
    long long scale_rows, scale_cols; /* m and n rounded up to multiples of 128: the scales are padded to these sizes,
                                       * and the padding is written too */
    int x_dt, y_dt;
    int two_dimensional, swizzled;
    int vector_x;      /* whether rows of x start at multiples of 16 bytes */
    int vector_row;    /* whether rows of `row` start at multiples of 8 bytes */
    int vector_col;    /* whether rows of `col` start at multiples of 8 bytes */
} te__mxfp8_quantize_kargs;

typedef struct te__mxfp8_dequantize_kargs {
    const void *q; /* [m, ld] */
    const unsigned char *scale;
    void *y; /* [m, n] */
    long long m, n, ld;
    int q_dt, y_dt;
    int columnwise, swizzled;
    int vector; /* whether rows of q start at multiples of 8 bytes and rows of y at multiples of 16 bytes */
} te__mxfp8_dequantize_kargs;
