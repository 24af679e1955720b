/* ops/loss/kargs.h: the arguments of the loss kernels. The host's and the kernels' compilers both read this file. */

/* The arguments of cross_entropy_fwd. If `parts` is not NULL, `loss` and `lse` are not written. The logits [m, v]
 * are those of vocabulary entries `start` to `start` + v - 1. */
typedef struct te__cross_entropy_fwd_kargs {
    struct te__outside *outside;
    const void *logits;
    const void *target; /* [m] */
    float *loss, *lse;  /* [m] */
    float *parts;       /* [m][3]: lse, x_target and sum x of each row; or NULL */
    long long m, v, vocab, start, ignore_index;
    float smoothing;
    int logits_dt, target_dt;
} te__cross_entropy_fwd_kargs;

/* The arguments of cross_entropy_merge, which computes loss[m] and lse[m] from the parts of `ranks` ranks. */
typedef struct te__cross_entropy_merge_kargs {
    struct te__outside *outside;
    const float *parts; /* [ranks][m][3] */
    const void *target; /* [m] */
    float *loss, *lse;  /* [m] */
    long long m, vocab, ignore_index;
    float smoothing;
    int ranks, target_dt;
} te__cross_entropy_merge_kargs;

/* The arguments of cross_entropy_count, which counts the targets that are ids of the vocabulary (0 .. v - 1)
 * and not ignored. */
typedef struct te__cross_entropy_count_kargs {
    const void *target; /* [m] */
    float *count;       /* [1] */
    long long m, v, ignore_index;
    int target_dt;
} te__cross_entropy_count_kargs;

/* The arguments of cross_entropy_bwd: dlogits = (softmax - target distribution) * dloss * scale / max(count, 1). */
typedef struct te__cross_entropy_bwd_kargs {
    struct te__outside *outside;
    const void *logits, *target;
    const float *lse, *dloss; /* [m]; dloss [m] or [1] */
    const float *count;       /* [1], or NULL */
    void *dlogits;            /* may be logits */
    long long m, v, vocab, start, ignore_index;
    long long dloss_step; /* 1, or 0: dloss has one number for all rows */
    float scale, smoothing;
    int logits_dt, target_dt, dlogits_dt;
} te__cross_entropy_bwd_kargs;

/* The arguments of three kernels: mse_fwd writes partial sums, mse_sum adds them up, and mse_bwd writes dx. */
typedef struct te__mse_kargs {
    const void *x, *target;
    void *dx;
    const float *dloss; /* [1] */
    float *partial;     /* [parts] */
    float *loss;        /* [1] */
    long long count, parts;
    int x_dt, target_dt, dx_dt;
} te__mse_kargs;
