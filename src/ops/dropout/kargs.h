/* ops/dropout/kargs.h: the arguments of the dropout kernel. The host's compiler and the kernel's compiler both read
 * this file, so it has a plain struct alone. */

/* The arguments of y = residual + keep(x + bias) * keep_scale, where keep sets some elements to 0. The backward pass
 * has neither bias nor residual. */
typedef struct te__dropout_add_kargs {
    const void *x;
    const void *bias;     /* [n], or NULL */
    const void *residual; /* like x, or NULL */
    void *y;
    long long count, n; /* count: elements in all; n: elements of a row */
    long long run; /* number of neighbouring elements that are kept or dropped together */
    unsigned long long seed, offset;
    const void *rng; /* NULL, or two words in device memory: one replaces `seed`, the other is added to `offset` */
    float p, keep_scale; /* keep_scale = 1 / (1 - p) */
    int x_dt, bias_dt, residual_dt, y_dt;
} te__dropout_add_kargs;
