/* ops/norm/kargs.h: arguments of the norm kernels. Read by the host's compiler and by the kernels': plain structs
 * alone. */

/* y = (x - mean) * rstd * gamma' + beta over m rows of n. */
typedef struct te__norm_fwd_kargs {
    const void *x;     /* [m, n] */
    const void *gamma; /* [n] */
    const void *beta;  /* [n], or NULL */
    void *y;           /* [m, ld]; columns n .. ld-1 are written as 0 */
    float *mean, *rstd;        /* [m], or NULL */
    const float *scale;        /* [1], or NULL: y is not quantized */
    float *scale_inv;          /* [1], or NULL */
    float *amax;               /* [1], or NULL: keeps the larger value */
    long long m, n, ld;
    float eps;
    int x_dt, gamma_dt, beta_dt, y_dt;
    int layernorm;     /* 0: RMSNorm */
    int zero_centered; /* gamma' = gamma + 1 */
    int rounded;       /* RMSNorm: x * rstd is rounded to x's format first */
    /* norm_fwd_queue: */
    int unit;          /* neighbouring rows that a block takes from the counter at once */
    int own;           /* units that a block has by its number */
    int questions;     /* how often the counter is asked for others */
    unsigned *counter; /* 0 between kernels */
} te__norm_fwd_kargs;

/* The end of y_amax. */
typedef struct te__norm_amax_kargs {
    float *amax;   /* [1]: te__plan_largest */
    float *y_amax; /* [1] */
    int y_dt;
} te__norm_amax_kargs;

/* dgamma and dbeta from the partial sums. */
typedef struct te__norm_bwd_sum_kargs {
    const float *partial;  /* [parts, kinds, n] */
    void *dgamma, *dbeta;  /* [n], or NULL */
    long long parts, n;
    int kinds;             /* 2: dgamma and dbeta, 1: dgamma */
    int dgamma_dt, dbeta_dt;
    int accumulate;
} te__norm_bwd_sum_kargs;

/* dx = rstd * (g - mean(g xhat) xhat - mean(g)) + add, with g = dy * gamma'; partial sums of dy xhat and dy. */
typedef struct te__norm_bwd_kargs {
    const void *dy, *x, *gamma, *add; /* add may be NULL */
    const float *mean, *rstd;         /* [m]; mean: LayerNorm only */
    void *dx;
    float *partial; /* [blocks, layernorm ? 2 : 1, n]: one row of dgamma, then one of dbeta; or NULL */
    long long m, n;
    int dy_dt, x_dt, gamma_dt, add_dt, dx_dt;
    int layernorm, zero_centered;
    int rounded; /* dx is rounded to its format before add is added */
    unsigned *counter; /* of te_grid_wait, in a cooperative launch that adds the partial sums up itself; or NULL */
    te__norm_bwd_sum_kargs sum;
} te__norm_bwd_kargs;

/* y = x * rnorm of m rows of n, rnorm = 1 / sqrt(sum x^2 + eps); backward, dy given: dx, in y's place, = rnorm * (dy -
 * x * rnorm^2 * sum(x * dy)). */
typedef struct te__l2normalize_kargs {
    const void *x, *dy; /* dy: backward */
    void *y;
    float *rnorm; /* [m], or NULL; backward: read */
    long long m, n;
    float eps;
    int x_dt, dy_dt, y_dt;
} te__l2normalize_kargs;
