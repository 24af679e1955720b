/* api/train.h: optimizers and checkpoints. */

/* Parameters of an optimizer with numbers of their own, named by a pattern or by a list. Each belongs to the first
 * group that has it, and those of no group keep the numbers of the optimizer's desc. Source: torch.optim,
 * param_groups. */
typedef struct te_param_group {
    const char *pattern;        /* of paths below the optimizer's module, as in files: * stands for any characters, ?
                                 * for one ("*.bias"); NULL => params */
    te_tensor *const *params;   /* [num_params] the very tensors (te_module_parameter); NULL => pattern */
    int num_params;             /* how many */
    float lr;                   /* 0 => the optimizer's, te_optimizer_set_lr included; te_optimizer_set_group_lr */
    float weight_decay;         /* 0 => the optimizer's */
    bool no_weight_decay;       /* none, in place of the optimizer's */
    float beta1, beta2, eps;    /* of Adam; 0 => the optimizer's */
} te_param_group;
#define TE_MAX_PARAM_GROUPS 64 /* the most groups of an optimizer */

/* Adam and AdamW. Parameters of 16 bits, and those stored quantized, get master weights. Its states are "exp_avg",
 * "exp_avg_sq" and "master_param".
 * States in f16 and e4m3, masters in f16 among them, have one scale each, which every step chooses anew (te_op_adam).
 * te_graph takes every optimizer, so `capturable` has no field.
 * Source: transformer_engine.pytorch.optimizers.FusedAdam. */
typedef struct te_fused_adam_desc {
    float lr;                 /* learning rate; 0 => 1e-3 */
    float beta1, beta2;       /* decay of the two moments; 0 => 0.9, 0.999 */
    float eps;                /* added to the root of the second moment; 0 => 1e-8 */
    float weight_decay;       /* 0 => none */
    bool no_adam_w_mode;      /* weight decay goes into the gradient (Adam); false => into the step (AdamW) */
    bool no_bias_correction;  /* the moments are taken as they are; false => divided by 1 - beta^step */
    bool amsgrad;             /* refused, as by TransformerEngine */
    bool no_master_weights;   /* 16-bit parameters are stepped in their own format (TransformerEngine's default);
                               * refused for weights that are stored quantized */
    te_dtype master_weight_dtype; /* of masters: f32 or f16; 0 => f32 */
    te_dtype exp_avg_dtype;       /* of the first moment: f32, bf16, f16 or e4m3; 0 => f32 */
    te_dtype exp_avg_sq_dtype;    /* of the second moment, likewise */
    bool store_param_remainders;  /* of an f32 master the 16 bits are kept that a bf16 parameter lacks; others have
                                   * whole masters */
    bool use_decoupled_grad;      /* gradients are read from te_tensor_decoupled_grad */
    bool no_set_grad_none;    /* gradients are filled with zeros where they would be forgotten */
    float max_grad_norm;      /* 0 => no clipping; else gradients are scaled by min(1, max / norm) */
    bool decay_matrices_only; /* no weight decay for tensors of fewer than 2 dimensions */
    const te_param_group *groups; /* [num_groups] parameters with numbers of their own; read by the create function */
    int num_groups;           /* 0 => none; at most TE_MAX_PARAM_GROUPS */
} te_fused_adam_desc;
/* An optimizer of every parameter of `m` that requires a gradient; desc may be NULL. Owned by the caller:
 * te_optimizer_destroy, before the context.
 * Retains the parameters. Allocates the states. TE_ERR_STATE inside a graph's capture. */
TE_API te_optimizer *te_fused_adam_create(te_ctx *te, te_module *m, const te_fused_adam_desc *desc);

/* Stochastic gradient descent (te_op_sgd). Parameters of 16 bits, and those stored quantized, get f32 master weights.
 * Its states are "momentum_buffer", if there is a momentum, and "master_param". Gradients of any format are read as
 * they are, so `materialize_master_grads` has no field.
 * Source: transformer_engine.pytorch.optimizers.FusedSGD. */
typedef struct te_fused_sgd_desc {
    float lr;                 /* learning rate; needed */
    float momentum;           /* 0 => none */
    float dampening;          /* share of the gradient that the momentum does not take, but for its first one; 0 =>
                               * none */
    float weight_decay;       /* 0 => none */
    bool nesterov;            /* needs a momentum and no dampening */
    bool wd_after_momentum;   /* weight decay stays out of the momentum */
    bool no_set_grad_none;    /* gradients are filled with zeros where they would be forgotten */
    bool no_master_weights;   /* 16-bit parameters, and their momentum, are stepped in their own format; refused for
                               * weights that are stored quantized */
    float max_grad_norm;      /* 0 => no clipping; else gradients are scaled by min(1, max / norm) */
    bool decay_matrices_only; /* no weight decay for tensors of fewer than 2 dimensions */
    const te_param_group *groups; /* [num_groups] parameters with numbers of their own; read by the create function */
    int num_groups;           /* 0 => none; at most TE_MAX_PARAM_GROUPS */
} te_fused_sgd_desc;
/* The same as te_fused_adam_create, but desc is needed. With dampening the first step of each parameter comes before a
 * graph's capture (TE_ERR_STATE). */
TE_API te_optimizer *te_fused_sgd_create(te_ctx *te, te_module *m, const te_fused_sgd_desc *desc);
/* Releases the optimizer and its states. NULL is fine. */
TE_API void te_optimizer_destroy(te_optimizer *opt);
/* Steps all parameters that have a gradient, then forgets the gradients (unless te_optimizer_keep_grad). Does nothing
 * if the context has an error; a step that fails changes no parameter (see te_clear_error). Asynchronous on CUDA. */
TE_API te_result te_optimizer_step(te_optimizer *opt);
/* keep: gradients stay after a step, until te_optimizer_zero_grad. */
TE_API void te_optimizer_keep_grad(te_optimizer *opt, bool keep);
/* Forgets the gradients of the optimizer's parameters, and those that wait for te_backward_dw. */
TE_API void te_optimizer_zero_grad(te_optimizer *opt);
/* Sets the learning rate of the next steps, those of launched graphs included. Groups with one of their own keep it.
 * TE_ERR_INVALID for one that is negative or not finite. */
TE_API void te_optimizer_set_lr(te_optimizer *opt, float lr);
/* The learning rate; 0 for NULL. */
TE_API float te_optimizer_lr(const te_optimizer *opt);
/* Gives group `group` of the desc (from 0; -1: the parameters of no group) a learning rate of its own, likewise.
 * TE_ERR_INVALID for a group that is not there. */
TE_API void te_optimizer_set_group_lr(te_optimizer *opt, int group, float lr);
/* The learning rate of that group; TE_ERR_INVALID likewise. */
TE_API float te_optimizer_group_lr(const te_optimizer *opt, int group);
/* How many groups the desc had; 0 for NULL. */
TE_API int te_optimizer_num_groups(const te_optimizer *opt);
/* How many steps have been made; 0 for NULL. After a step by te_grad_scaler_step it syncs, and leaves out those that
 * were skipped. */
TE_API int64_t te_optimizer_steps(const te_optimizer *opt);
/* The norm of all gradients of the last step, before clipping, f32 [1] (borrowed); NULL without clipping or before the
 * first step. */
TE_API te_tensor *te_optimizer_grad_norm(const te_optimizer *opt);

/* A scale of the loss, for gradients in f16 whose small numbers would vanish: it falls where a gradient is not finite,
 * and that step is skipped, and grows after growth_interval steps without one. All of it stays on the device, as under
 * `capturable` of TransformerEngine's FusedAdam, and te_graph takes it after one step outside. A step:
 *
 *     te_backward(te_grad_scaler_scale(scaler, loss));
 *     te_grad_scaler_step(scaler, opt);
 *     te_grad_scaler_update(scaler);
 *
 * Source: torch.amp.GradScaler. */
typedef struct te_grad_scaler te_grad_scaler;
/* Its numbers. */
typedef struct te_grad_scaler_desc {
    float init_scale;      /* 0 => 65536 */
    float growth_factor;   /* above 1; 0 => 2 */
    float backoff_factor;  /* between 0 and 1; 0 => 0.5 */
    int growth_interval;   /* 0 => 2000 */
    bool not_enabled;      /* losses stay as they are, and steps are te_optimizer_step's */
} te_grad_scaler_desc;
/* A scaler; desc may be NULL. Owned by the caller: te_grad_scaler_destroy, before the context. TE_ERR_STATE inside a
 * graph's capture. */
TE_API te_grad_scaler *te_grad_scaler_create(te_ctx *te, const te_grad_scaler_desc *desc);
/* Releases it. NULL is fine. */
TE_API void te_grad_scaler_destroy(te_grad_scaler *s);
/* The loss times the scale, recorded. NULL with an error. */
TE_API te_tensor *te_grad_scaler_scale(te_grad_scaler *s, te_tensor *loss);
/* Divides the gradients of opt by the scale, in place, for whoever looks at them or clips them before
 * te_grad_scaler_step (whose own max_grad_norm needs no such call). At most once before each step (TE_ERR_STATE);
 * TE_ERR_DTYPE for gradients in f16. */
TE_API te_result te_grad_scaler_unscale(te_grad_scaler *s, te_optimizer *opt);
/* te_optimizer_step on gradients divided by the scale; where one of them is not finite nothing changes (but gradients
 * are forgotten), and the step counts in no bias correction. Does not sync, except before the first step of an SGD with
 * dampening. */
TE_API te_result te_grad_scaler_step(te_grad_scaler *s, te_optimizer *opt);
/* The scale of the next loss, after the steps of all optimizers. */
TE_API te_result te_grad_scaler_update(te_grad_scaler *s);
/* The scale, f32 [1] on the device (borrowed); NULL for NULL. */
TE_API te_tensor *te_grad_scaler_get_scale(const te_grad_scaler *s);
/* The numbers that change, for a file (te_metadata). */
typedef struct te_grad_scaler_state {
    float scale;        /* in force */
    int growth_tracker; /* steps without an overflow since the scale last changed */
} te_grad_scaler_state;
/* Reads them. Syncs. */
TE_API te_grad_scaler_state te_grad_scaler_get_state(const te_grad_scaler *s);
/* Sets them; TE_ERR_INVALID for a scale that is not above 0. */
TE_API te_result te_grad_scaler_set_state(te_grad_scaler *s, te_grad_scaler_state state);

/* A state of a parameter (the very tensor: te_module_parameter) by its name, as a new f32 tensor of its shape in the
 * innermost scope: without its scale; a master of remainders as the whole master. Syncs for the latter. NULL with
 * TE_ERR_INVALID if there is none of the name. */
TE_API te_tensor *te_optimizer_get_unscaled_state(te_optimizer *opt, const te_tensor *param, const char *state_name);
/* Sets it from f32 of the parameter's shape: with a new scale where it has one. A master of remainders sets the
 * parameter, too, and syncs; any other one shows in the parameter after the next step. */
TE_API te_result te_optimizer_set_scaled_state(te_optimizer *opt, te_tensor *param, const char *state_name,
                                               const te_tensor *unscaled_state);

/* out[i] = in[i] * scale; out[i] may be in[i], of any float formats otherwise. found_inf: f32 [1], becomes 1 if an
 * input is not finite; may be NULL.
 * The multi_tensor functions of transformer_engine.pytorch.optimizers: te_op_multi_scale, te_op_l2norm, te_op_adam,
 * te_op_sgd have more. */
TE_API te_result te_multi_tensor_scale(te_ctx *te, te_tensor *const *in, te_tensor *const *out, int num_tensors,
                                       float scale, te_tensor *found_inf);
/* The norm of all elements, f32 [1], in a fixed order; and if per_tensor is not NULL that of each tensor, f32
 * [num_tensors], there. New tensors of the innermost scope; NULL with an error. */
TE_API te_tensor *te_multi_tensor_l2norm(te_ctx *te, te_tensor *const *tensors, int num_tensors,
                                         te_tensor **per_tensor);
/* The same of the elements times inv_scale, f32 [1] on the device (NULL => 1); the tensors stay as they are. */
TE_API te_tensor *te_multi_tensor_unscale_l2norm(te_ctx *te, te_tensor *const *tensors, int num_tensors,
                                                 const te_tensor *inv_scale, te_tensor **per_tensor);
/* Scales all gradients of a module tree (main gradients, where there are some) in place by min(1, max_norm / (norm +
 * 1e-6)), and returns the norm that they had, f32 [1] of the innermost scope; NULL with an error. As
 * torch.nn.utils.clip_grad_norm_. */
TE_API te_tensor *te_clip_grad_norm(te_module *m, float max_norm);

/* An entry of a file's metadata: two UTF-8 strings, borrowed for the call. */
typedef struct te_metadata {
    const char *key, *value; /* neither is NULL; keys are unique */
} te_metadata;
/* Writes a model as one safetensors file: every parameter and buffer of `m` by path, the optimizer's states
 * ("optimizer/<path>.exp_avg" ...), the scaling state of delayed recipes, the random state, and `metadata`. A weight
 * that is stored quantized has the codes and scales of each copy ("<path>.row.data", ".row.scale", ".col.data" ...).
 * Written to a temporary file beside it, synced and renamed (see te_safetensors_write): a failure leaves the previous
 * file whole. Syncs. m and opt may be NULL. The optimizer's learning rates, those of groups included, go with it; a
 * te_grad_scaler's state does not (te_grad_scaler_get_state). Errors: TE_ERR_IO; the context's error, if it has one:
 * nothing is written then. */
TE_API te_result te_model_save(te_ctx *te, const char *path, te_module *m, te_optimizer *opt,
                               const te_metadata *metadata, int num_metadata);
/* Reads such a file into `m` and `opt` (each may be NULL). Every name, shape and format is checked, and all memory
 * allocated, before the first byte changes: after any error but TE_ERR_IO (a read failed) all is as it was. Entries
 * that the model lacks are ignored with a warning; entries that the file lacks are errors. For a weight that is stored
 * quantized the file may have a plain one of any float format, which is quantized (by a custom quantizer, whose
 * function may fail or want memory, after other tensors were read). Syncs. */
TE_API te_result te_model_load(te_ctx *te, const char *path, te_module *m, te_optimizer *opt);
/* Writes the value of one metadata entry of a file into buffer; TE_ERR_INVALID if there is no such entry or it does not
 * fit. */
TE_API te_result te_model_metadata(te_ctx *te, const char *path, const char *key, char *buffer, size_t size);
