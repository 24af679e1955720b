/* api/ops_train.h: raw operations of losses and optimizers, and the declarations of the functions of all operations. */

/* ---- loss ---- */

/* Computes the cross entropy of each row x of logits [M, V] with the target y, where e = label_smoothing (0 to 1):
 *   loss f32 [M] = (1-e)(lse - x_y) + e*lse - (e/V) sum x
 *   lse f32 [M] = log sum exp(x)
 * The options and other tensors:
 *   count   optional f32 [1], written: the number of targets that are not ignored
 *   target  i32 or i64 [M]; ignore_index gives loss 0 and gradient 0. TE_ERR_INVALID for another target outside 0 ..
 *           vocab_size - 1. The CPU returns this error from the call. A GPU ignores the target, and the next call that
 *           waits (te_synchronize) returns the error
 *   vocab_size, vocab_start   logits are columns vocab_start .. vocab_start + V - 1 of a vocabulary of vocab_size,
 *                             which ranks share. vocab_size 0 => V
 *   parts   f32 [M, 3], written instead of loss and lse, over this rank's columns: lse, x_y (-inf if another rank has
 *           column y) and, if e > 0, sum x */
typedef struct te_op_cross_entropy_fwd_args {
    const te_tensor *logits, *target;
    te_tensor *loss, *lse, *count;
    float label_smoothing;
    int64_t ignore_index; /* TransformerEngine's default is -100; 0 is a legal target, so this field has no default */
    int64_t vocab_size, vocab_start;
    te_tensor *parts;
} te_op_cross_entropy_fwd_args;
/* Computes loss and lse, f32 [M], from the `parts` of R ranks, f32 [R, M, 3]. */
typedef struct te_op_cross_entropy_merge_args {
    const te_tensor *parts, *target; /* target: the forward's */
    te_tensor *loss, *lse;
    float label_smoothing; /* the forward's */
    int64_t ignore_index, vocab_size; /* the forward's */
} te_op_cross_entropy_merge_args;
/* Computes dlogits [M, V] = (softmax - target distribution) * dloss[m] * scale / max(count, 1). dloss is f32 [M], or
 * f32 [1] for all rows. count is optional. dlogits may be logits. */
typedef struct te_op_cross_entropy_bwd_args {
    const te_tensor *logits, *target, *lse, *dloss, *count; /* logits, target, lse: the forward's */
    te_tensor *dlogits;
    float scale; /* 0 => 1 */
    float label_smoothing; /* the forward's */
    int64_t ignore_index; /* the forward's */
    int64_t vocab_size, vocab_start; /* the forward's */
} te_op_cross_entropy_bwd_args;

/* Computes loss f32 [1] = mean((x - target)^2). x and target have one shape, and each may have any float format. */
typedef struct te_op_mse_fwd_args {
    const te_tensor *x, *target;
    te_tensor *loss;
} te_op_mse_fwd_args;
/* Computes dx = dloss * 2 (x - target) / numel. dx has the shape of x and target, and any float format; dloss is f32
 * [1]. */
typedef struct te_op_mse_bwd_args {
    const te_tensor *x, *target, *dloss;
    te_tensor *dx;
} te_op_mse_bwd_args;

/* ---- optim ---- */

/* Hyperparameters of Adam for one parameter. They are used as they are: 0 does not mean a default. */
typedef struct te_adam_numbers {
    float lr, beta1, beta2, eps, weight_decay; /* as those of te_op_adam_args */
} te_adam_numbers;
/* One parameter of te_op_adam. All tensors but the scales and a u8 `master` have the same number of elements.
 *   grad, param  f32, f16 or bf16
 *   m, v         the moments: f32 or bf16; or f16 or e4m3 with a scale
 *   master       optional: the step updates master, then param = round(master). The format is f32, or f16 with a scale,
 *                or, with a bf16 param, u8 ("remainders"). A u8 master has twice as many elements, and holds only the
 *                lower 16 bits of each f32 value. The upper 16 bits are those of param, minus 1 where the lower 16 bits
 *                are 2^15 or more
 *   m_scale, v_scale, master_scale  f32 [1], needed for f16 and e4m3 (else NULL): the value of m, v or master is its
 *                                   elements times its scale. A step sets the scale to max |x| / 32752 (f16) or
 *                                   max |x| / 448 (e4m3) of the new values x; NaN is ignored. If max |x| is too small,
 *                                   zeros are stored */
typedef struct te_adam_tensor {
    const te_tensor *grad;
    te_tensor *param, *m, *v, *master;
    te_tensor *m_scale, *v_scale, *master_scale;
    bool own_numbers;        /* the parameter uses `numbers`, not those of the args */
    te_adam_numbers numbers; /* neighbouring tensors with equal numbers share a launch */
    int place;               /* index of the parameter in lr_device and in bias_correction */
} te_adam_tensor;
/* Takes one Adam(W) step over a list of tensors (as FusedAdam). The call changes all parameters, or none.
 *   p -= lr * (m/bc1 / (sqrt(v/bc2) + eps) + weight_decay * p)       bc = 1 - beta^step, or 1 if no_bias_correction
 * These tensors are on the device, f32 and optional; P is larger than every `place`:
 *   grad_scale       [1]: multiplies every gradient (clipping, un-scaling)
 *   found_inf        [1]: if not 0, the step changes nothing
 *   lr_device        [P]: replaces lr
 *   bias_correction  [P, 2]: 1/bc1 and 1/bc2, replaces step and no_bias_correction */
typedef struct te_op_adam_args {
    const te_adam_tensor *tensors;             /* [num_tensors] */
    int num_tensors, num_undecayed;            /* the last num_undecayed take no weight decay */
    float lr, beta1, beta2, eps, weight_decay; /* read as they are: no defaults */
    int64_t step;                              /* 1 for the first */
    bool no_adam_w_mode;                       /* weight decay goes into the gradient (Adam); false => AdamW */
    bool no_bias_correction;                   /* bc = 1 */
    const te_tensor *grad_scale, *found_inf, *lr_device, *bias_correction;
} te_op_adam_args;

/* Stores x as te_op_adam stores a state: writes `state` (f16 or e4m3) and scale f32 [1]. amax f32 [1] must be max
 * |x|. */
typedef struct te_op_store_state_args {
    const te_tensor *x, *amax;
    te_tensor *state, *scale;
} te_op_store_state_args;

/* Hyperparameters of SGD for one parameter. They are used as they are: 0 does not mean a default. */
typedef struct te_sgd_numbers {
    float lr, weight_decay; /* as those of te_op_sgd_args */
} te_sgd_numbers;
/* One parameter of te_op_sgd. grad, param and momentum are f32, f16 or bf16. momentum and master (f32) are optional. A
 * step updates the master, then param = round(master). */
typedef struct te_sgd_tensor {
    const te_tensor *grad;
    te_tensor *param, *momentum, *master;
    bool first;             /* first step: the momentum becomes the gradient, without dampening */
    bool own_numbers;       /* the parameter uses `numbers`, not those of the args */
    te_sgd_numbers numbers; /* read if own_numbers */
    int place;              /* index of the parameter's learning rate in lr_device */
} te_sgd_tensor;
/* Takes one step of stochastic gradient descent over a list of tensors (as FusedSGD). The call changes all parameters,
 * or none. grad_scale, found_inf and lr_device are as in te_op_adam.
 *   d = grad * grad_scale
 *   d += weight_decay * p                               if not wd_after_momentum
 *   b = momentum * b + (1 - dampening) * d              if momentum is not 0; b is the tensor te_sgd_tensor.momentum
 *   d = b                                               if momentum is not 0, without nesterov
 *   d += momentum * b                                   if momentum is not 0, with nesterov
 *   d += weight_decay * p                               if wd_after_momentum
 *   p -= lr * d */
typedef struct te_op_sgd_args {
    const te_sgd_tensor *tensors;               /* [num_tensors] */
    int num_tensors, num_undecayed;             /* the last num_undecayed take no weight decay */
    float lr, momentum, dampening, weight_decay; /* read as they are: no defaults */
    bool nesterov, wd_after_momentum;
    const te_tensor *grad_scale, *found_inf, *lr_device;
} te_op_sgd_args;

/* Computes norm f32 [1] = sqrt(the sum of x^2 over all elements x of all tensors), in a fixed order. NaN and inf
 * propagate.
 *   per_tensor  optional f32 [num_tensors], written: the norm of each tensor
 *   inv_scale   optional f32 [1]: the norms are those of x * inv_scale; the tensors do not change
 *   clip        optional f32 [1], written: min(1, max_norm / (norm + 1e-6))
 *   found_inf   optional f32 [1]: set to 1 if the norm is not finite, else unchanged */
typedef struct te_op_l2norm_args {
    const te_tensor *const *tensors;
    int num_tensors;
    te_tensor *norm, *per_tensor, *clip;
    float max_norm;
    const te_tensor *inv_scale;
    te_tensor *found_inf;
} te_op_l2norm_args;

/* Computes out[i] = in[i] * scale * (scale_device ? *scale_device : 1) for all tensors; out[i] may be in[i]. found_inf,
 * optional f32 [1], becomes 1 if an input is not finite. */
typedef struct te_op_multi_scale_args {
    const te_tensor *const *in;
    te_tensor *const *out;
    int num_tensors; /* length of in and out */
    float scale;
    const te_tensor *scale_device;
    te_tensor *found_inf;
} te_op_multi_scale_args;

/* Counts skipped steps on the device and computes the bias corrections of a step there.
 *   skipped          f32 [1]: the number of skipped steps
 *   found_inf        f32 [1] or NULL: not 0 if the last step was skipped. If it is not 0 and `count` is true, `skipped`
 *                    grows by 1. The call always sets found_inf to 0
 *   bias_correction  optional f32 [P, 2], written: 1 / (1 - beta^n) for each beta in `betas` f32 [P, 2], with n =
 *                    step - skipped, at least 1. With no_bias_correction all its elements are 1. Row i is for the
 *                    parameter with te_adam_tensor.place i
 *   step_device      optional f32 [1]: replaces step */
typedef struct te_op_step_numbers_args {
    te_tensor *found_inf, *skipped;
    bool count;
    int64_t step; /* the number of this step, from 1 on; skipped steps count too */
    const te_tensor *step_device;
    const te_tensor *betas;
    te_tensor *bias_correction;
    bool no_bias_correction;
} te_op_step_numbers_args;

/* Updates the scale of a loss after a step, as torch.amp.GradScaler. All tensors are f32 [1].
 *   found_inf not 0: scale *= backoff_factor, and growth_tracker = 0.
 *   found_inf 0: growth_tracker grows by 1. At growth_interval it becomes 0, and scale *= growth_factor if the product
 *   is finite.
 * Then inv_scale = 1 / scale, and found_inf = 0. */
typedef struct te_op_update_scale_args {
    te_tensor *scale, *inv_scale, *growth_tracker, *found_inf;
    float growth_factor, backoff_factor; /* read as they are: no defaults */
    int growth_interval;
} te_op_update_scale_args;

/* Declares the functions: te_result te_op_gemm(te_ctx *te, const te_op_gemm_args *args), and so on. Errors:
 * TE_ERR_SHAPE, TE_ERR_DTYPE, TE_ERR_INVALID, TE_ERR_UNSUPPORTED, TE_ERR_OUT_OF_MEMORY, TE_ERR_COMPILE,
 * TE_ERR_DEVICE. */
#define TE_OP_FUNCTION(lower, UPPER, family)                                      \
    TE_API te_result te_op_##lower(te_ctx *te, const te_op_##lower##_args *args);
TE_OP_LIST(TE_OP_FUNCTION)
#undef TE_OP_FUNCTION
