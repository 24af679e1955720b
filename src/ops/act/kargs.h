/* ops/act/kargs.h: the arguments of the activation kernels. This file has only plain structs, because both the host's
 * compiler and the kernels' compiler read it. */
#ifndef TE__ACT_KARGS_H
#define TE__ACT_KARGS_H

/* Numbers that replace the division of i / 8 by width / 8, for i / 8 less than 2^31. A negative shift means a plain
 * division.
 *     quotient = (upper 32 bits of (i / 8) * magic) >> shift */
typedef struct te__act_divisor {
    unsigned magic;
    int shift;
} te__act_divisor;

/* An activation and its parameters. */
typedef struct te__act_rule {
    long long block; /* gated: the two halves of x alternate in blocks of this many columns; if it is n, each half is
                      * one block */
    float limit, alpha, offset;
    int act;
} te__act_rule;

/* Arguments of act_fwd and act_fwd_tile: y = f(x).
 *     x  [m, n], or [m, 2n] if gated
 *     y  [m, ld]; columns n .. ld - 1 become 0 */
typedef struct te__act_fwd_kargs {
    const void *x;
    void *y;             /* [m, ld], or NULL */
    void *col;           /* the transposed codes [n, ldc], or NULL */
    const float *scale;      /* [1], or NULL: y is not quantized */
    float *scale_inv, *amax; /* [1], or NULL */
    long long m, n, ld, ldc;
    unsigned tiles_n;        /* act_fwd_tile: tiles along n */
    te__act_divisor divisor; /* act_fwd with options: divides by ld */
    te__act_rule rule;
    int x_dt, y_dt;
    int vector_x;   /* true: all rows of x begin at multiples of 16 bytes; if gated, the rows of both halves */
    int vector_y;   /* true: rows of y begin at multiples of 16 bytes, or of 8 bytes if y is FP8 */
    int vector_col; /* true: rows of col begin at multiples of 16 bytes */
} te__act_fwd_kargs;

/* Arguments of scaled_act_fwd and scaled_act_bwd. y and dy are [m, n]. x and dx are [m, n], or [m, 2n] if gated.
 *     y = f(x) scales[row]
 *     dx = (dy scales[row]) f'(x)
 *     dscales[row] = sum of dy f(x) over the row */
typedef struct te__scaled_act_kargs {
    const void *dy, *x, *scales; /* dy: NULL in the forward pass; scales: [m] */
    void *out;                   /* y or dx */
    void *dscales;               /* [m], or NULL */
    long long m, n;
    te__act_divisor divisor; /* scaled_act_fwd with options: divides by n */
    te__act_rule rule;
    int dy_dt, x_dt, scales_dt, out_dt, dscales_dt;
} te__scaled_act_kargs;

/* Arguments of act_bwd and act_bwd_tile: dx = dy f'(x).
 *     dy  [m, n]
 *     x   [m, n], or [m, 2n] if gated
 *     dx  [m, ld]; only an FP8 dx may be wider than x */
typedef struct te__act_bwd_kargs {
    const void *dy, *x;
    void *dx;                /* or NULL */
    void *col;               /* the transposed codes [n or 2n, ldc], or NULL */
    const float *scale;      /* [1], or NULL: dx is not quantized */
    float *scale_inv, *amax; /* [1], or NULL */
    float *partial;          /* the column sums of dx in each tile along m, or NULL: [tiles, n or 2n] */
    long long m, n, ld, ldc;
    unsigned tiles_n;        /* act_bwd_tile: tiles along n */
    te__act_divisor divisor; /* act_bwd with options: divides by n */
    te__act_rule rule;
    int dy_dt, x_dt, dx_dt;
    int rounded;    /* true: dx is first rounded to the format of x; only in act_bwd_tile */
    int amax_dt;    /* amax is rounded to this format */
    int vector_x;   /* true: all rows of dy and x begin at multiples of 16 bytes; if gated, the rows of both halves of
                     * x */
    int vector_dx;  /* true: all rows of dx begin at multiples of 16 bytes, or of 8 bytes if dx is FP8. If gated, this
                     * is true for the rows of both halves. */
    int vector_col; /* true: rows of col begin at multiples of 16 bytes */
} te__act_bwd_kargs;

#endif
