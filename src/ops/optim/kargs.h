/* ops/optim/kargs.h: arguments of the multi-tensor kernels: tables of tensors by value. Read by the host's compiler and by the kernels':
 * plain structs alone, at most 4,000 bytes each.
 *
 * The work of a launch is cut into chunks of TE__*_CHUNK elements; chunk c belongs to the last tensor i with first[i] <= c. */

#define TE__ADAM_MAX 70
#define TE__ADAM_CHUNK 1024
typedef struct te__adam_kargs {
    const void *grad[TE__ADAM_MAX];
    void *param[TE__ADAM_MAX];
    float *m[TE__ADAM_MAX], *v[TE__ADAM_MAX];
    float *master[TE__ADAM_MAX]; /* or NULL */
    long long n[TE__ADAM_MAX];   /* elements */
    const float *grad_scale, *found_inf, *lr_device; /* [1], or NULL */
    const float *unbias; /* [2]: in place of unbias1, unbias2; or NULL */
    unsigned first[TE__ADAM_MAX];
    unsigned char grad_dt[TE__ADAM_MAX], param_dt[TE__ADAM_MAX];
    unsigned char vector[TE__ADAM_MAX]; /* every array starts at a multiple of four elements */
    float lr, beta1, beta2, eps, weight_decay;
    float unbias1, unbias2; /* 1 / (1 - beta^step) */
    int l2_mode, tensors;
} te__adam_kargs;

/* l2norm_partial, one block a chunk: partial[c] = sum of x^2; and first_chunk[t] for l2norm_tensor. */
#define TE__NORM_MAX 180
#define TE__NORM_CHUNK 65536
typedef struct te__l2norm_kargs {
    const void *x[TE__NORM_MAX];
    long long n[TE__NORM_MAX];
    float *partial;                /* [all chunks of the operation] */
    unsigned *first_chunk;         /* [all tensors + 1] */
    unsigned chunk, tensor;        /* where this launch's begin */
    unsigned first[TE__NORM_MAX];
    unsigned char dt[TE__NORM_MAX];
    unsigned char vector[TE__NORM_MAX]; /* x starts at a multiple of 16 bytes */
    int tensors;
    int last; /* this launch ends the tables */
} te__l2norm_kargs;
/* l2norm_tensor, one block a tensor: sum of its partials; then l2norm_final: their sum. */
typedef struct te__l2norm_final_kargs {
    const float *partial;
    const unsigned *first_chunk;
    float *tensor_sum; /* [tensors]: sums of squares */
    float *norm, *per_tensor, *clip; /* [1], [tensors], [1]; or NULL */
    int tensors;
    float max_norm;
} te__l2norm_final_kargs;

#define TE__SCALE_MAX 120
#define TE__SCALE_CHUNK 8192
typedef struct te__multi_scale_kargs {
    const void *in[TE__SCALE_MAX];
    void *out[TE__SCALE_MAX];
    long long n[TE__SCALE_MAX];
    const float *scale_device; /* [1], or NULL for 1 */
    float *found_inf;          /* [1], or NULL */
    unsigned first[TE__SCALE_MAX];
    unsigned char in_dt[TE__SCALE_MAX], out_dt[TE__SCALE_MAX];
    unsigned char vector[TE__SCALE_MAX]; /* both start at a multiple of 16 bytes */
    float scale;
    int tensors;
} te__multi_scale_kargs;
