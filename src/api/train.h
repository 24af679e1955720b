/* api/train.h: optimizers and checkpoints. */

/* A group of an optimizer's parameters that have their own learning rate and other hyperparameters. A pattern or a list
 * names the parameters. A parameter belongs to the first group that names it. Parameters in no group use the
 * optimizer's own hyperparameters. Source: torch.optim, param_groups. */
typedef struct te_param_group {
    const char *pattern;        /* pattern of parameter paths below the optimizer's module, as for file names: * stands
                                 * for any characters, ? for one ("*.bias"). NULL => `params` is used */
    te_tensor *const *params;   /* [num_params] the parameters themselves (te_module_parameter); NULL => `pattern` is
                                 * used */
    int num_params;             /* length of params */
    float lr;                   /* learning rate. 0 => the optimizer's, also after te_optimizer_set_lr.
                                 * te_optimizer_set_group_lr may set it later */
    float weight_decay;         /* 0 => the optimizer's */
    bool no_weight_decay;       /* the group has no weight decay, even if the optimizer has one */
    float beta1, beta2, eps;    /* hyperparameters of Adam; 0 => the optimizer's */
} te_param_group;
#define TE_MAX_PARAM_GROUPS 64 /* the most groups of an optimizer */

/* Options of te_fused_adam_create: Adam and AdamW. Parameters of 16 bits, and parameters stored quantized, get master
 * weights. The states are "exp_avg", "exp_avg_sq" and "master_param".
 * A state in f16 or e4m3 (f16 masters included) has one scale, which every step computes anew (te_op_adam). te_graph
 * can capture every optimizer, so TransformerEngine's `capturable` has no field.
 * Source: transformer_engine.pytorch.optimizers.FusedAdam. */
typedef struct te_fused_adam_desc {
    float lr;                 /* learning rate; 0 => 1e-3 */
    float beta1, beta2;       /* decay of the two moments; 0 => 0.9, 0.999 */
    float eps;                /* added to the root of the second moment; 0 => 1e-8 */
    float weight_decay;       /* 0 => none */
    bool no_adam_w_mode;      /* weight decay is added to the gradient (Adam); false => it is added to the update
                               * (AdamW) */
    bool no_bias_correction;  /* the moments are used as they are; false => they are divided by 1 - beta^step */
    bool amsgrad;             /* refused, as by TransformerEngine */
    bool no_master_weights;   /* 16-bit parameters are updated in their own format, without masters; false => with
                               * masters. true is refused for weights that are stored quantized. TransformerEngine's
                               * default is no master weights (master_weights=False) */
    te_dtype master_weight_dtype; /* format of masters: f32 or f16; 0 => f32 */
    te_dtype exp_avg_dtype;       /* format of the first moment: f32, bf16, f16 or e4m3; 0 => f32 */
    te_dtype exp_avg_sq_dtype;    /* format of the second moment: f32, bf16, f16 or e4m3; 0 => f32 */
    bool store_param_remainders;  /* the f32 master of a bf16 parameter is stored as remainders: the 16 bits that the
                                   * parameter lacks. Other parameters have whole masters */
    bool use_decoupled_grad;      /* gradients are read from te_tensor_decoupled_grad */
    bool no_set_grad_none;    /* after a step gradients are filled with zeros; false => dropped */
    float max_grad_norm;      /* gradients are scaled by min(1, max_grad_norm / norm); 0 => no clipping */
    bool decay_matrices_only; /* no weight decay for tensors of fewer than 2 dimensions */
    const te_param_group *groups; /* [num_groups] groups with their own hyperparameters; read by the create function */
    int num_groups;           /* 0 => none; at most TE_MAX_PARAM_GROUPS */
} te_fused_adam_desc;
/* Makes an optimizer for every parameter of `m` that requires a gradient; desc may be NULL. The caller owns the
 * optimizer, and must call te_optimizer_destroy before the context is destroyed. Retains the parameters. Allocates the
 * states. TE_ERR_STATE inside a graph's capture. */
TE_API te_optimizer *te_fused_adam_create(te_ctx *te, te_module *m, const te_fused_adam_desc *desc);

/* Options of te_fused_sgd_create: stochastic gradient descent (te_op_sgd). Parameters of 16 bits, and parameters stored
 * quantized, get f32 master weights. The states are "momentum_buffer" (if momentum is not 0) and "master_param".
 * Gradients of any format are read as they are, so TransformerEngine's `materialize_master_grads` has no field.
 * Source: transformer_engine.pytorch.optimizers.FusedSGD. */
typedef struct te_fused_sgd_desc {
    float lr;                 /* learning rate; needed */
    float momentum;           /* 0 => none */
    float dampening;          /* the gradient is multiplied by (1 - dampening) before it is added to the momentum,
                               * except in a parameter's first step */
    float weight_decay;       /* 0 => none */
    bool nesterov;            /* Nesterov momentum; needs momentum not 0 and dampening 0 */
    bool wd_after_momentum;   /* weight decay is added after the momentum; false => before it */
    bool no_set_grad_none;    /* after a step gradients are filled with zeros; false => dropped */
    bool no_master_weights;   /* 16-bit parameters and their momentum are updated in their own format, without masters;
                               * false => with f32 masters. true is refused for weights that are stored quantized.
                               * TransformerEngine's default is no master weights */
    float max_grad_norm;      /* gradients are scaled by min(1, max_grad_norm / norm); 0 => no clipping */
    bool decay_matrices_only; /* no weight decay for tensors of fewer than 2 dimensions */
    const te_param_group *groups; /* [num_groups] groups with their own hyperparameters; read by the create function */
    int num_groups;           /* 0 => none; at most TE_MAX_PARAM_GROUPS */
} te_fused_sgd_desc;
/* Makes an SGD optimizer, in the same way as te_fused_adam_create; desc is needed. With dampening, the first step of
 * each parameter must run before a graph's capture (else TE_ERR_STATE). */
TE_API te_optimizer *te_fused_sgd_create(te_ctx *te, te_module *m, const te_fused_sgd_desc *desc);
/* Releases the optimizer and its states. NULL is fine. */
TE_API void te_optimizer_destroy(te_optimizer *opt);
/* Updates all parameters that have a gradient, then drops the gradients, unless te_optimizer_keep_grad was called
 * (TransformerEngine's step always keeps them). Does nothing if the context has an error. A step that fails changes no
 * parameter (see te_clear_error). Asynchronous on CUDA. */
TE_API te_result te_optimizer_step(te_optimizer *opt);
/* Sets whether gradients are kept after a step, until te_optimizer_zero_grad; off by default. */
TE_API void te_optimizer_keep_grad(te_optimizer *opt, bool keep);
/* Drops the gradients of the optimizer's parameters, and weight gradients that te_backward_dw has not computed yet. */
TE_API void te_optimizer_zero_grad(te_optimizer *opt);
/* Sets the learning rate of the next steps, including steps in launched graphs. Groups with their own learning rate
 * keep theirs. TE_ERR_INVALID for a rate that is negative or not finite. */
TE_API void te_optimizer_set_lr(te_optimizer *opt, float lr);
/* Returns the learning rate; 0 for NULL. */
TE_API float te_optimizer_lr(const te_optimizer *opt);
/* Sets the learning rate of group number `group` of the desc (from 0) for the next steps, including steps in launched
 * graphs. With `group` -1 the call does the same as te_optimizer_set_lr. TE_ERR_INVALID for a group that does not
 * exist, or a rate that is negative or not finite. */
TE_API void te_optimizer_set_group_lr(te_optimizer *opt, int group, float lr);
/* Returns the learning rate of group `group` (from 0; -1: the parameters of no group). TE_ERR_INVALID for a group that
 * does not exist. */
TE_API float te_optimizer_group_lr(const te_optimizer *opt, int group);
/* Returns the number of groups that the desc had; 0 for NULL. */
TE_API int te_optimizer_num_groups(const te_optimizer *opt);
/* Returns the number of steps made so far; 0 for NULL. If te_grad_scaler_step was used, the call syncs, and skipped
 * steps are not counted. */
TE_API int64_t te_optimizer_steps(const te_optimizer *opt);
/* Returns the norm of all gradients in the last step, from before clipping, f32 [1] (borrowed). NULL if there is no
 * clipping, and before the first step. */
TE_API te_tensor *te_optimizer_grad_norm(const te_optimizer *opt);

/* A factor (scale) of the loss. It keeps small f16 gradients from becoming 0. If a gradient is not finite, the scale
 * falls and the step is skipped. After growth_interval steps without such a gradient, the scale grows. The whole state
 * of a scaler stays on the device, as with `capturable` of TransformerEngine's FusedAdam. te_graph can capture a scaler
 * after one step outside of the graph. A step is:
 *
 *     te_backward(te_grad_scaler_scale(scaler, loss));
 *     te_grad_scaler_step(scaler, opt);
 *     te_grad_scaler_update(scaler);
 *
 * Source: torch.amp.GradScaler. */
typedef struct te_grad_scaler te_grad_scaler;
/* Options of te_grad_scaler_create. */
typedef struct te_grad_scaler_desc {
    float init_scale;      /* the first scale; 0 => 65536 */
    float growth_factor;   /* multiplies the scale when it grows; above 1; 0 => 2 */
    float backoff_factor;  /* multiplies the scale when it falls; between 0 and 1; 0 => 0.5 */
    int growth_interval;   /* steps between growths; 0 => 2000 */
    bool disabled;      /* losses are not scaled, and te_grad_scaler_step does the same as te_optimizer_step */
} te_grad_scaler_desc;
/* Makes a scaler; desc may be NULL. The caller owns it, and must call te_grad_scaler_destroy before the context is
 * destroyed. TE_ERR_STATE inside a graph's capture. */
TE_API te_grad_scaler *te_grad_scaler_create(te_ctx *te, const te_grad_scaler_desc *desc);
/* Releases the scaler. NULL is fine. */
TE_API void te_grad_scaler_destroy(te_grad_scaler *s);
/* Returns the loss times the scale, recorded for te_backward. NULL after an error. */
TE_API te_tensor *te_grad_scaler_scale(te_grad_scaler *s, te_tensor *loss);
/* Divides the gradients of opt by the scale, in place. It serves code that reads or clips gradients before
 * te_grad_scaler_step (clipping by max_grad_norm needs no such call). A second call before the same step gives
 * TE_ERR_STATE. TE_ERR_DTYPE for gradients in f16. */
TE_API te_result te_grad_scaler_unscale(te_grad_scaler *s, te_optimizer *opt);
/* Runs te_optimizer_step on the gradients divided by the scale. If a gradient is not finite, the step is skipped: the
 * gradients are dropped, nothing else changes, and the bias corrections do not count this step. Does not sync, except
 * before the first step of an SGD with dampening. */
TE_API te_result te_grad_scaler_step(te_grad_scaler *s, te_optimizer *opt);
/* Computes the scale of the next loss. Call it after the steps of all optimizers. */
TE_API te_result te_grad_scaler_update(te_grad_scaler *s);
/* Returns the scale, f32 [1] on the device (borrowed), or NULL if s is NULL. */
TE_API te_tensor *te_grad_scaler_get_scale(const te_grad_scaler *s);
/* The state of a scaler. A program can store it in a file's metadata (te_metadata). */
typedef struct te_grad_scaler_state {
    float scale;        /* the scale in force */
    int growth_tracker; /* steps without an overflow since the scale last changed */
} te_grad_scaler_state;
/* Reads the state of the scaler. Syncs. */
TE_API te_grad_scaler_state te_grad_scaler_get_state(const te_grad_scaler *s);
/* Sets the state of the scaler; TE_ERR_INVALID for a scale that is not above 0. */
TE_API te_result te_grad_scaler_set_state(te_grad_scaler *s, te_grad_scaler_state state);

/* Returns the values of a parameter's state `state_name` as a new f32 tensor of the parameter's shape, in the innermost
 * scope. If the state has a scale, the values are multiplied by it. For a master stored as remainders
 * (store_param_remainders) the whole master is returned, and the call syncs. `param` is the parameter itself
 * (te_module_parameter). If there is no state of that name, the error is TE_ERR_INVALID, and NULL is returned. */
TE_API te_tensor *te_optimizer_get_unscaled_state(te_optimizer *opt, const te_tensor *param, const char *state_name);
/* Sets a parameter's state `state_name` from f32 values of the parameter's shape, with a new scale if the state has
 * one. If the state is a master stored as remainders, the parameter changes too, and the call syncs. If the state is a
 * whole master, the parameter changes in the next step. */
TE_API te_result te_optimizer_set_scaled_state(te_optimizer *opt, te_tensor *param, const char *state_name,
                                               const te_tensor *unscaled_state);

/* Computes out[i] = in[i] * scale. out[i] may be in[i]; otherwise the two may have different float formats. found_inf,
 * f32 [1] or NULL, is set to 1 if an input is not finite.
 * The te_multi_tensor functions are those of transformer_engine.pytorch.optimizers. te_op_multi_scale, te_op_l2norm,
 * te_op_adam and te_op_sgd have more options. */
TE_API te_result te_multi_tensor_scale(te_ctx *te, te_tensor *const *in, te_tensor *const *out, int num_tensors,
                                       float scale, te_tensor *found_inf);
/* Returns the Euclidean norm of all elements of all tensors, f32 [1]. The squares are added in a fixed order. If
 * per_tensor is not NULL, *per_tensor receives the norm of each tensor, f32 [num_tensors]. Both are new tensors of the
 * innermost scope. Returns NULL after an error. */
TE_API te_tensor *te_multi_tensor_l2norm(te_ctx *te, te_tensor *const *tensors, int num_tensors,
                                         te_tensor **per_tensor);
/* Returns the same norms as te_multi_tensor_l2norm, but of the elements times inv_scale, f32 [1] on the device (NULL =>
 * 1). The tensors themselves stay as they are. */
TE_API te_tensor *te_multi_tensor_unscale_l2norm(te_ctx *te, te_tensor *const *tensors, int num_tensors,
                                                 const te_tensor *inv_scale, te_tensor **per_tensor);
/* Clips the gradients of all parameters of m and of the modules below it, as torch.nn.utils.clip_grad_norm_: multiplies
 * them in place by min(1, max_norm / (norm + 1e-6)). A parameter's main gradient is used if there is one. Returns the
 * norm before clipping, f32 [1] of the innermost scope, or NULL after an error. */
TE_API te_tensor *te_clip_grad_norm(te_module *m, float max_norm);

/* An entry of a file's metadata: two UTF-8 strings, borrowed for the call. */
typedef struct te_metadata {
    const char *key, *value; /* neither is NULL; keys are unique */
} te_metadata;
/* Writes a model as one safetensors file. It has every parameter and buffer of `m` by path, the optimizer's states
 * ("optimizer/<path>.exp_avg" ...), the learning rates of the optimizer and of its groups, the scaling state of delayed
 * recipes, the random state, and `metadata`. A weight that is stored quantized has the codes and scales of each copy,
 * row-wise and column-wise ("<path>.row.data", ".row.scale", ".col.data" ...). The state of a te_grad_scaler is not
 * written (te_grad_scaler_get_state returns it). A temporary file is written beside `path`, flushed to disk and renamed
 * (see te_safetensors_write), so after a failure the previous file is whole. Syncs. m and opt may be NULL. If the
 * context has an error, nothing is written and that error is returned. If writing fails, the error is TE_ERR_IO. */
TE_API te_result te_model_save(te_ctx *te, const char *path, te_module *m, te_optimizer *opt,
                               const te_metadata *metadata, int num_metadata);
/* Reads a file of te_model_save into `m` and `opt` (each may be NULL). Every name, shape and format is checked, and all
 * memory is allocated, before the first byte changes. So after any error but TE_ERR_IO (a read failed) everything is as
 * it was. Entries of the file that the model lacks are ignored with a warning; entries of the model that the file lacks
 * are errors. For a weight that is stored quantized the file may have a plain weight of any float format; it is then
 * quantized. (A custom quantizer quantizes it after other tensors were read, and may still fail or run out of memory at
 * that time.) Syncs. */
TE_API te_result te_model_load(te_ctx *te, const char *path, te_module *m, te_optimizer *opt);
/* Writes the value of the metadata entry `key` of a file into buffer. TE_ERR_INVALID if there is no such entry, or if
 * its value does not fit. */
TE_API te_result te_model_metadata(te_ctx *te, const char *path, const char *key, char *buffer, size_t size);
