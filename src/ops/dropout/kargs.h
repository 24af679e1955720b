/* ops/dropout/kargs.h: the arguments of the dropout kernel. The host's compiler and the kernel's compiler both read it:
 * plain structs alone. */

/* y = residual + keep(x + bias) * keep_scale. The backward pass is the same without bias and residual. */
typedef struct te__dropout_add_kargs {
    const void *x;
    const void *bias;     /* [n], or NULL */
    const void *residual; /* like x, or NULL */
    void *y;
    long long count, n; /* elements in all; elements of a row */
    long long run; /* so many neighbours are kept or not together */
    unsigned long long seed, offset;
    const void *rng; /* te__rng_read */
    float p, keep_scale; /* keep_scale = 1 / (1 - p) */
    int x_dt, bias_dt, residual_dt, y_dt;
} te__dropout_add_kargs;
