/* ops/softmax/kargs.h: the arguments of the softmax kernels. The host's compiler and the kernels' compiler both read
 * this file. So it has plain structs only. */

/* Arguments of the kernel that computes y = softmax(scale * x), for m rows of n columns. The rows form matrices of s_q
 * rows each. `heads` neighbouring matrices share a mask. */
typedef struct te__softmax_fwd_kargs {
    const void *x;
    const unsigned char *mask; /* [batches or 1][s_q][n], or NULL */
    void *y;
    long long m, n, s_q, heads;
    float scale;
    int causal, one_mask; /* one_mask: all batches share one mask */
    int x_dt, y_dt;
} te__softmax_fwd_kargs;

/* Arguments of the kernel that computes dx = scale * (y * dy - y * sum(y * dy)), for m rows of n columns. */
typedef struct te__softmax_bwd_kargs {
    const void *dy, *y;
    void *dx;
    long long m, n;
    float scale;
    int dy_dt, y_dt, dx_dt;
} te__softmax_bwd_kargs;
