/* ops/norm/kargs.h: the arguments of the norm kernels. The host's compiler and the kernels' compiler both read it:
 * plain structs alone. */

/* Arguments of norm_fwd and norm_fwd_queue: y = (x - mean) * rstd * gamma' + beta over m rows of n. */
typedef struct te__norm_fwd_kargs {
    const void *x;     /* [m, n] */
    const void *gamma; /* [n] */
    const void *beta;  /* [n], or NULL */
    void *y;           /* [m, ld]; columns n .. ld-1 are written as 0 */
    float *mean, *rstd;        /* [m], or NULL */
    const float *scale;        /* [1], or NULL: y is not quantized */
    float *scale_inv;          /* [1], or NULL */
    float *amax;               /* [1], or NULL; raised to the largest |y| */
    long long m, n, ld;
    float eps;
    int x_dt, gamma_dt, beta_dt, y_dt;
    int layernorm;     /* 0: RMSNorm */
    int zero_centered; /* gamma' = gamma + 1 */
    int rounded;       /* RMSNorm: x * rstd is rounded to x's format first */
    /* norm_fwd_queue: */
    int unit;          /* neighbouring rows that a block takes from the counter at once */
    int own;           /* units that a block takes by its block number, without the counter */
    int questions;     /* how often all blocks together ask the counter for further units */
    unsigned *counter; /* 0 between kernels */
} te__norm_fwd_kargs;

/* Arguments of norm_amax, which writes y_amax after norm_fwd. */
typedef struct te__norm_amax_kargs {
    float *amax;   /* [1]: te__plan_largest's number */
    float *y_amax; /* [1] */
    int y_dt;
} te__norm_amax_kargs;

/* Arguments of norm_bwd_sum: adds up the partial sums to dgamma and dbeta. */
typedef struct te__norm_bwd_sum_kargs {
    const float *partial;  /* [parts, kinds, n] */
    void *dgamma, *dbeta;  /* [n], or NULL */
    long long parts, n;
    int kinds;             /* 2: dgamma and dbeta; 1: dgamma alone */
    int dgamma_dt, dbeta_dt;
    int accumulate;
} te__norm_bwd_sum_kargs;

/* Arguments of norm_bwd: dx = rstd * (g - mean(g xhat) xhat - mean(g)) + add, with g = dy * gamma'; and partial sums of
 * dy xhat and of dy. */
typedef struct te__norm_bwd_kargs {
    const void *dy, *x, *gamma, *add; /* add may be NULL */
    const float *mean, *rstd;         /* [m]; mean: LayerNorm only */
    void *dx;
    float *partial; /* [blocks, layernorm ? 2 : 1, n]: sums of dgamma, and of dbeta; or NULL */
    long long m, n;
    int dy_dt, x_dt, gamma_dt, add_dt, dx_dt;
    int layernorm, zero_centered;
    int rounded; /* dx is rounded to its format before add is added */
    unsigned *counter; /* for te_grid_wait, in a cooperative launch that adds up the partial sums itself; or NULL */
    te__norm_bwd_sum_kargs sum;
} te__norm_bwd_kargs;

/* Arguments of l2normalize. Forward: y = x * rnorm over m rows of n, with rnorm = 1 / sqrt(sum x^2 + eps). Backward, if
 * dy is given: y gets dx = rnorm * (dy - x * rnorm^2 * sum(x * dy)). */
typedef struct te__l2normalize_kargs {
    const void *x, *dy; /* dy: NULL in the forward pass */
    void *y;
    float *rnorm; /* [m], or NULL; the backward pass reads it */
    long long m, n;
    float eps;
    int x_dt, dy_dt, y_dt;
} te__l2normalize_kargs;
