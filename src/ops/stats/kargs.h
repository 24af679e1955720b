/* ops/stats/kargs.h: the arguments of the statistics kernels. The host's compiler and the kernels' compiler both read
 * this file. So it has plain structs only. */

enum { TE__STATS_CHUNK = 8192, TE__STATS_COUNTS = 5 };

/* The partial result of one block. */
typedef struct te__quant_error_partial {
    float xx, yy, xy, dd, largest; /* the sums of x^2, y^2, x * y and (x - y)^2, and the largest |x - y|. Elements
                                    * with infinite or NaN x or y are left out */
    unsigned count[5];             /* underflows, saturated, NaN, infinite, zeros */
} te__quant_error_partial;

typedef struct te__quant_error_kargs {
    const void *x;
    const float *y, *limit; /* limit may be NULL */
    long long *counts;      /* [6] */
    float *sums;            /* [5] */
    te__quant_error_partial *partial;
    long long n, partials;
    int x_dt;
    int vector; /* x, y and limit are aligned to 16 bytes */
} te__quant_error_kargs;
