/* ops/norm/kargs.h: the arguments of the norm kernels. The host's and the kernels' compilers both read this file. */

/* The arguments of norm_fwd and norm_fwd_queue: y = (x - mean) * rstd * gamma' + beta. gamma' is gamma or gamma + 1. */
typedef struct te__norm_fwd_kargs {
    const void *x;     /* [m, n] */
    const void *gamma; /* [n] */
    const void *beta;  /* [n], or NULL */
    void *y;           /* [m, ld]; columns n .. ld-1 are written as 0 */
    float *mean, *rstd;        /* [m], or NULL */
    const float *scale;        /* [1], or NULL: y is not quantized */
    float *scale_inv;          /* [1], or NULL */
    float *amax;               /* [1], or NULL. The kernel raises it to the largest |y| */
    long long m, n, ld;
    float eps;
    int x_dt, gamma_dt, beta_dt, y_dt;
    int layernorm;     /* 0: RMSNorm */
    int zero_centered; /* gamma' = gamma + 1 */
    int rounded;       /* RMSNorm: whether x * rstd is rounded to x's format before it is multiplied by gamma' */
    /* norm_fwd_queue: */
    int unit;          /* a unit is this number of neighbouring rows, which a block takes at once */
    int own;           /* number of units that a block takes by its block number, without the counter */
    int questions;     /* total number of increments of `counter` by all blocks. Each increment asks for one further
                        * unit */
    unsigned *counter; /* 0 between kernels */
} te__norm_fwd_kargs;

/* The arguments of norm_amax, which runs after norm_fwd and writes y_amax. */
typedef struct te__norm_amax_kargs {
    float *amax;   /* [1]: te__plan_largest's number */
    float *y_amax; /* [1] */
    int y_dt;
} te__norm_amax_kargs;

/* The arguments of norm_bwd_sum, which adds up the partial sums of dgamma and dbeta. */
typedef struct te__norm_bwd_sum_kargs {
    const float *partial;  /* [parts, kinds, n] */
    void *dgamma, *dbeta;  /* [n], or NULL */
    long long parts, n;
    int kinds;             /* 2: dgamma and dbeta; 1: dgamma alone */
    int dgamma_dt, dbeta_dt;
    int accumulate;
} te__norm_bwd_sum_kargs;

/* The arguments of norm_bwd: dx = rstd * (g - mean(g xhat) xhat - mean(g)) + add, where g = dy * gamma' and gamma'
 * is gamma or gamma + 1. RMSNorm does not subtract mean(g). */
typedef struct te__norm_bwd_kargs {
    const void *dy, *x, *gamma, *add; /* add may be NULL */
    const float *mean, *rstd;         /* [m]; mean: LayerNorm only */
    void *dx;
    float *partial; /* [blocks, layernorm ? 2 : 1, n], or NULL: the partial sums of dgamma, and of dbeta */
    long long m, n;
    int dy_dt, x_dt, gamma_dt, add_dt, dx_dt;
    int layernorm, zero_centered;
    int rounded; /* whether dx is rounded to its format before `add` is added */
    unsigned *counter; /* for te_grid_wait in a cooperative launch, which adds up the partial sums itself. NULL in other
                        * launches */
    te__norm_bwd_sum_kargs sum;
} te__norm_bwd_kargs;

/* The arguments of l2normalize. Forward: y = x * rnorm, where rnorm = 1 / sqrt(sum x^2 + eps). Backward: y gets dx =
 * rnorm * (dy - x * rnorm^2 * sum(x * dy)). */
typedef struct te__l2normalize_kargs {
    const void *x, *dy; /* dy: NULL in the forward pass */
    void *y;
    float *rnorm; /* [m], or NULL in the forward pass; the backward pass reads it */
    long long m, n;
    float eps;
    int x_dt, dy_dt, y_dt;
} te__l2normalize_kargs;
