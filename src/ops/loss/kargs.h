/* ops/loss/kargs.h: the arguments of the loss kernels. The host's compiler and the kernels' compiler both read it:
 * plain structs alone. */

/* Computes loss[m] and lse[m], or `parts` instead, from logits [m, v]: the columns from `start` on of a vocabulary of
 * `vocab`. */
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

/* Computes loss[m] and lse[m] from the parts of `ranks` ranks. */
typedef struct te__cross_entropy_merge_kargs {
    struct te__outside *outside;
    const float *parts; /* [ranks][m][3] */
    const void *target; /* [m] */
    float *loss, *lse;  /* [m] */
    long long m, vocab, ignore_index;
    float smoothing;
    int ranks, target_dt;
} te__cross_entropy_merge_kargs;

/* count = the number of targets that are neither ignored nor outside 0 .. v-1. */
typedef struct te__cross_entropy_count_kargs {
    const void *target; /* [m] */
    float *count;       /* [1] */
    long long m, v, ignore_index;
    int target_dt;
} te__cross_entropy_count_kargs;

/* dlogits = (softmax - target distribution) * dloss * scale / max(count, 1). */
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

/* Arguments of mse_fwd, which writes partial sums, of mse_sum, which adds them up, and of mse_bwd, which writes dx. */
typedef struct te__mse_kargs {
    const void *x, *target;
    void *dx;
    const float *dloss; /* [1] */
    float *partial;     /* [parts] */
    float *loss;        /* [1] */
    long long count, parts;
    int x_dt, target_dt, dx_dt;
} te__mse_kargs;
