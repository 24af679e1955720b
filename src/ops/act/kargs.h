/* ops/act/kargs.h: the arguments of the activation kernels. Plain structs alone, because both the host's compiler
 * and the kernels' compiler read this file. */
#ifndef TE__ACT_KARGS_H
#define TE__ACT_KARGS_H

/* Divides i / 8 < 2^31 by width / 8: quotient = (upper 32 bits of (i / 8) * magic) >> shift. shift < 0: these sizes
 * need a plain division. */
typedef struct te__act_divisor {
    unsigned magic;
    int shift;
} te__act_divisor;

/* An activation and its parameters. */
typedef struct te__act_rule {
    long long block; /* gated: the halves of x alternate in blocks of this many columns; n: one block for each half */
    float limit, alpha, offset;
    int act;
} te__act_rule;

/* Arguments of act_fwd and act_fwd_tile: y [m, ld] = f(x); x [m, n] or, gated, [m, 2n]; columns n .. ld-1 of y become
 * 0. */
typedef struct te__act_fwd_kargs {
    const void *x;
    void *y;             /* [m, ld], or NULL */
    void *col;           /* [n, ldc]: the codes transposed, or NULL */
    const float *scale;      /* [1], or NULL: y is not quantized */
    float *scale_inv, *amax; /* [1], or NULL */
    long long m, n, ld, ldc;
    unsigned tiles_n;        /* act_fwd_tile: tiles along n */
    te__act_divisor divisor; /* act_fwd with options: divides by ld */
    te__act_rule rule;
    int x_dt, y_dt;
    int vector_x;   /* all rows of x, and of its halves, start at multiples of 16 bytes */
    int vector_y;   /* rows of y start at multiples of 16 bytes, of 8 if it is FP8 */
    int vector_col; /* rows of col start at multiples of 16 bytes */
} te__act_fwd_kargs;

/* Arguments of scaled_act_fwd and scaled_act_bwd: y [m, n] = f(x) scales[row]; backward dx = (dy scales[row]) f'(x),
 * dscales[row] = sum of dy f(x). x and dx are [m, n] or, gated, [m, 2n]. */
typedef struct te__scaled_act_kargs {
    const void *dy, *x, *scales; /* dy: for the backward pass; scales [m] */
    void *out;                   /* y or dx */
    void *dscales;               /* [m], or NULL */
    long long m, n;
    te__act_divisor divisor; /* scaled_act_fwd with options: divides by n */
    te__act_rule rule;
    int dy_dt, x_dt, scales_dt, out_dt, dscales_dt;
} te__scaled_act_kargs;

/* Arguments of act_bwd and act_bwd_tile: dx = dy f'(x). dy is [m, n]; x [m, n] or, gated, [m, 2n]; dx [m, ld], where ld
 * is at least x's width, and larger only if dx is FP8. */
typedef struct te__act_bwd_kargs {
    const void *dy, *x;
    void *dx;                /* or NULL */
    void *col;               /* [n or 2n, ldc]: the codes transposed, or NULL */
    const float *scale;      /* [1], or NULL: dx is not quantized */
    float *scale_inv, *amax; /* [1], or NULL */
    float *partial;          /* [tiles along m, n or 2n]: sums of each column over a tile's rows, or NULL */
    long long m, n, ld, ldc;
    unsigned tiles_n;        /* act_bwd_tile: tiles along n */
    te__act_divisor divisor; /* act_bwd with options: divides by n */
    te__act_rule rule;
    int dy_dt, x_dt, dx_dt;
    int rounded;    /* act_bwd_tile: dx is rounded to x's format first */
    int amax_dt;    /* amax is rounded to this format */
    int vector_x;   /* all rows of dy and x, and of its halves, start at multiples of 16 bytes */
    int vector_dx;  /* rows of dx, and of its halves, start at multiples of 16 bytes, of 8 if it is FP8 */
    int vector_col; /* rows of col start at multiples of 16 bytes */
} te__act_bwd_kargs;

#endif
