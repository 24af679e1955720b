/* ops/optim/kargs.h: the arguments of the multi-tensor kernels, as tables of tensors. The host's and the kernels'
 * compilers both read this file. Each struct has at most 4,000 bytes, since kernel arguments are limited to 4,096.
 *
 * The work of a launch is cut into chunks of TE__*_CHUNK elements. first[i] is the first chunk of tensor i. */

/* The numbers of a step of Adam. */
typedef struct te__adam_numbers {
    const float *grad_scale, *found_inf, *lr_device; /* [1], or NULL. lr_device points into a table that has one
                                                      * learning rate for each group of parameters */
    const float *unbias; /* [2], or NULL. Replaces unbias1 and unbias2. Points into a table that has two numbers for
                          * each group of parameters */
    float lr, beta1, beta2, eps, weight_decay;
    float unbias1, unbias2; /* 1 / (1 - beta^step) */
    int l2_mode;
} te__adam_numbers;

#define TE__ADAM_MAX 70
#define TE__ADAM_CHUNK 1024
typedef struct te__adam_kargs {
    const void *grad[TE__ADAM_MAX];
    void *param[TE__ADAM_MAX];
    float *m[TE__ADAM_MAX], *v[TE__ADAM_MAX];
    float *master[TE__ADAM_MAX]; /* or NULL */
    long long n[TE__ADAM_MAX];   /* elements */
    te__adam_numbers numbers;
    unsigned first[TE__ADAM_MAX];
    unsigned char grad_dt[TE__ADAM_MAX], param_dt[TE__ADAM_MAX];
    unsigned char vector[TE__ADAM_MAX]; /* every array starts at a multiple of four elements */
    int tensors;
} te__adam_kargs;

/* Arguments for tensors whose states are not all in f32. Three kernels run in this order:
 * - adam_amax, only with scales: one block for each chunk finds the largest magnitudes of the new states.
 * - adam_scales, only with scales: one block for each tensor makes scales from these magnitudes.
 * - adam_states does the step. */
#define TE__ADAM_STATES_MAX 44
#define TE__ADAM_STATES_CHUNK 4096
enum { TE__STATE_M, TE__STATE_V, TE__STATE_MASTER, TE__STATES };
typedef struct te__adam_states_kargs {
    const void *grad[TE__ADAM_STATES_MAX];
    void *param[TE__ADAM_STATES_MAX];
    void *state[TE__STATES][TE__ADAM_STATES_MAX];  /* the master may be NULL */
    float *scale[TE__STATES][TE__ADAM_STATES_MAX]; /* [1], or NULL */
    long long n[TE__ADAM_STATES_MAX];
    te__adam_numbers numbers;
    float *amax;   /* [chunks of this launch][TE__STATES]; NULL: no scales */
    float *factor; /* [tensors of this launch][2][TE__STATES]: first the scales before the step, then the multipliers
                    * after the step */
    unsigned first[TE__ADAM_STATES_MAX];
    unsigned char grad_dt[TE__ADAM_STATES_MAX], param_dt[TE__ADAM_STATES_MAX],
        state_dt[TE__STATES][TE__ADAM_STATES_MAX];
    int tensors;
} te__adam_states_kargs;

/* Arguments of store_state, which computes `state` and `scale` from x and the amax of x. */
typedef struct te__store_state_kargs {
    const void *x;
    const float *amax; /* [1] */
    void *state;
    float *scale; /* [1] */
    long long n;
    int x_dt, state_dt;
} te__store_state_kargs;

#define TE__SGD_MAX 64
#define TE__SGD_CHUNK 4096
typedef struct te__sgd_kargs {
    const void *grad[TE__SGD_MAX];
    void *param[TE__SGD_MAX], *momentum[TE__SGD_MAX]; /* momentum: or NULL */
    float *master[TE__SGD_MAX]; /* or NULL */
    long long n[TE__SGD_MAX];
    const float *grad_scale, *found_inf, *lr_device; /* [1], or NULL */
    unsigned begin[TE__SGD_MAX];
    unsigned char grad_dt[TE__SGD_MAX], param_dt[TE__SGD_MAX], momentum_dt[TE__SGD_MAX], first[TE__SGD_MAX];
    float lr, momentum_factor, dampening, weight_decay;
    int nesterov, wd_after_momentum, tensors;
} te__sgd_kargs;

/* Arguments of l2norm_partial, which has one block for each chunk. partial[c] is the sum of x^2 of chunk c, and
 * first_chunk[t] is the first chunk of tensor t. */
#define TE__NORM_MAX 180
#define TE__NORM_CHUNK 65536
typedef struct te__l2norm_kargs {
    const void *x[TE__NORM_MAX];
    long long n[TE__NORM_MAX];
    const float *inv_scale;        /* [1], or NULL */
    float *partial;                /* [all chunks of the operation] */
    unsigned *first_chunk;         /* [all tensors + 1] */
    unsigned chunk, tensor;        /* `chunk` and `tensor` are the first chunk and the first tensor of this launch */
    unsigned first[TE__NORM_MAX];
    unsigned char dt[TE__NORM_MAX];
    unsigned char vector[TE__NORM_MAX]; /* x starts at a multiple of 16 bytes */
    int tensors;
    int last; /* this is the last launch of the operation */
} te__l2norm_kargs;
/* Arguments of two kernels. l2norm_tensor adds up the partial sums of a tensor. l2norm_final adds up all tensors. */
typedef struct te__l2norm_final_kargs {
    const float *partial;
    const unsigned *first_chunk;
    float *tensor_sum; /* [tensors]: sums of squares */
    float *norm, *per_tensor, *clip, *found_inf; /* [1], [tensors], [1], [1]; or NULL */
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
    unsigned char vector[TE__SCALE_MAX]; /* in and out start at multiples of 16 bytes */
    float scale;
    int tensors;
} te__multi_scale_kargs;

/* Arguments of step_numbers, which has one block. For each of `places` pairs in `betas`, it computes the bias
 * corrections of beta1 and beta2. */
typedef struct te__step_numbers_kargs {
    float *found_inf, *skipped;       /* [1]; found_inf may be NULL */
    const float *step_device, *betas; /* [1], [2 * places]; or NULL */
    float *bias_correction;           /* [2 * places], or NULL */
    double step;
    int places, count, no_bias_correction;
} te__step_numbers_kargs;

/* Arguments of update_scale, which has one thread. */
typedef struct te__update_scale_kargs {
    float *scale, *inv_scale, *growth_tracker, *found_inf; /* [1] */
    float growth_factor, backoff_factor, growth_interval;
} te__update_scale_kargs;
