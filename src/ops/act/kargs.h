/* ops/act/kargs.h: arguments of the activation kernels. Read by the host's compiler and by the kernels': plain structs alone. */

/* y [m, ld] = f(x), x [m, n] or, gated, [m, 2n]; columns n .. ld-1 of y are written as 0. */
typedef struct te__act_fwd_kargs {
    const void *x;
    void *y;
    const float *scale;      /* [1], or NULL: y is not quantized */
    float *scale_inv, *amax; /* [1], or NULL */
    long long m, n, ld;
    float limit, alpha;
    int x_dt, y_dt, act;
} te__act_fwd_kargs;

/* dx = dy f'(x): dy [m, n]; x and dx [m, n] or, gated, [m, 2n]. */
typedef struct te__act_bwd_kargs {
    const void *dy, *x;
    void *dx;
    long long m, n;
    float limit, alpha;
    int dy_dt, x_dt, dx_dt, act;
} te__act_bwd_kargs;
