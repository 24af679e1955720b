/* api/train.h: optimizers and checkpoints. */

/* A group of an optimizer's parameters with numbers of their own, named by a pattern or by a list. Each parameter
 * belongs to the first group that names it. Parameters of no group keep the numbers of the optimizer's desc. Source:
 * torch.optim, param_groups. */
typedef struct te_param_group {
    const char *pattern;        /* of paths below the optimizer's module, as for file names: * stands for any
                                 * characters, ? for one ("*.bias"); NULL => params */
    te_tensor *const *params;   /* [num_params] the parameters themselves (te_module_parameter); NULL => pattern */
    int num_params;             /* length of params */
    float lr;                   /* 0 => the optimizer's, which te_optimizer_set_lr changes too;
                                 * te_optimizer_set_group_lr sets it later */
    float weight_decay;         /* 0 => the optimizer's */
    bool no_weight_decay;       /* no weight decay, whatever the optimizer's is */
    float beta1, beta2, eps;    /* of Adam; 0 => the optimizer's */
} te_param_group;
#define TE_MAX_PARAM_GROUPS 64 /* the most groups of an optimizer */

/* Options of te_fused_adam_create: Adam and AdamW. Parameters of 16 bits, and parameters stored quantized, get master
 * weights. The states are "exp_avg", "exp_avg_sq" and "master_param".
 * Each state in f16 or e4m3, an f16 master too, has one scale, which every step computes anew (te_op_adam). te_graph
 * takes every optimizer, so `capturable` has no field.
 * Source: transformer_engine.pytorch.optimizers.FusedAdam. */
typedef struct te_fused_adam_desc {
    float lr;                 /* learning rate; 0 => 1e-3 */
    float beta1, beta2;       /* decay of the two moments; 0 => 0.9, 0.999 */
    float eps;                /* added to the root of the second moment; 0 => 1e-8 */
    float weight_decay;       /* 0 => none */
    bool no_adam_w_mode;      /* weight decay is added to the gradient (Adam); false => to the step (AdamW) */
    bool no_bias_correction;  /* the moments are used as they are; false => divided by 1 - beta^step */
    bool amsgrad;             /* refused, as by TransformerEngine */
    bool no_master_weights;   /* 16-bit parameters are stepped in their own format; refused for weights that are stored
                               * quantized; false => they have master weights. TransformerEngine's default is no master
                               * weights (master_weights=False) */
    te_dtype master_weight_dtype; /* of masters: f32 or f16; 0 => f32 */
    te_dtype exp_avg_dtype;       /* of the first moment: f32, bf16, f16 or e4m3; 0 => f32 */
    te_dtype exp_avg_sq_dtype;    /* of the second moment: f32, bf16, f16 or e4m3; 0 => f32 */
    bool store_param_remainders;  /* the f32 master of a bf16 parameter is stored as the 16 bits that the parameter
                                   * lacks; other parameters have whole masters */
    bool use_decoupled_grad;      /* gradients are read from te_tensor_decoupled_grad */
    bool no_set_grad_none;    /* after a step gradients are filled with zeros; false => dropped */
    float max_grad_norm;      /* gradients are scaled by min(1, max_grad_norm / norm); 0 => no clipping */
    bool decay_matrices_only; /* no weight decay for tensors of fewer than 2 dimensions */
    const te_param_group *groups; /* [num_groups] parameters with numbers of their own; read by the create function */
    int num_groups;           /* 0 => none; at most TE_MAX_PARAM_GROUPS */
} te_fused_adam_desc;
/* Makes an optimizer of every parameter of `m` that requires a gradient; desc may be NULL. Owned by the caller:
 * te_optimizer_destroy, before the context. Retains the parameters. Allocates the states. TE_ERR_STATE inside a graph's
 * capture. */
TE_API te_optimizer *te_fused_adam_create(te_ctx *te, te_module *m, const te_fused_adam_desc *desc);

/* Options of te_fused_sgd_create: stochastic gradient descent (te_op_sgd). Parameters of 16 bits, and parameters stored
 * quantized, get f32 master weights. The states are "momentum_buffer", if there is a momentum, and "master_param".
 * Gradients of any format are read as they are, so `materialize_master_grads` has no field.
 * Source: transformer_engine.pytorch.optimizers.FusedSGD. */
typedef struct te_fused_sgd_desc {
    float lr;                 /* learning rate; needed */
    float momentum;           /* 0 => none */
    float dampening;          /* share of the gradient that the momentum leaves out, except in a parameter's first step;
                               * 0 => none */
    float weight_decay;       /* 0 => none */
    bool nesterov;            /* needs a momentum and no dampening */
    bool wd_after_momentum;   /* weight decay does not enter the momentum; false => it does */
    bool no_set_grad_none;    /* after a step gradients are filled with zeros; false => dropped */
    bool no_master_weights;   /* 16-bit parameters, and their momentum, are stepped in their own format; refused for
                               * weights that are stored quantized; false => they have f32 master weights.
                               * TransformerEngine's default is no master weights */
    float max_grad_norm;      /* gradients are scaled by min(1, max_grad_norm / norm); 0 => no clipping */
    bool decay_matrices_only; /* no weight decay for tensors of fewer than 2 dimensions */
    const te_param_group *groups; /* [num_groups] parameters with numbers of their own; read by the create function */
    int num_groups;           /* 0 => none; at most TE_MAX_PARAM_GROUPS */
} te_fused_sgd_desc;
/* Makes an optimizer as te_fused_adam_create; desc is needed. With dampening each parameter's first step must run
 * before a graph's capture (TE_ERR_STATE). */
TE_API te_optimizer *te_fused_sgd_create(te_ctx *te, te_module *m, const te_fused_sgd_desc *desc);
/* Releases the optimizer and its states. NULL is fine. */
TE_API void te_optimizer_destroy(te_optimizer *opt);
/* Steps all parameters that have a gradient, then drops the gradients (unless te_optimizer_keep_grad;
 * TransformerEngine's step always keeps them). Does nothing if the context has an error; a step that fails changes no
 * parameter (see te_clear_error). Asynchronous on CUDA. */
TE_API te_result te_optimizer_step(te_optimizer *opt);
/* keep: gradients stay after a step, until te_optimizer_zero_grad. Off by default. */
TE_API void te_optimizer_keep_grad(te_optimizer *opt, bool keep);
/* Drops the gradients of the optimizer's parameters, and those that wait for te_backward_dw. */
TE_API void te_optimizer_zero_grad(te_optimizer *opt);
/* Sets the learning rate of the next steps, including steps of launched graphs. Groups with a learning rate of their
 * own keep it. TE_ERR_INVALID for a rate that is negative or not finite. */
TE_API void te_optimizer_set_lr(te_optimizer *opt, float lr);
/* Returns the learning rate; 0 for NULL. */
TE_API float te_optimizer_lr(const te_optimizer *opt);
/* Gives group `group` of the desc (from 0) a learning rate of its own for the next steps, including steps of launched
 * graphs; -1: as te_optimizer_set_lr. TE_ERR_INVALID for a group that does not exist, or a rate that is negative or not
 * finite. */
TE_API void te_optimizer_set_group_lr(te_optimizer *opt, int group, float lr);
/* Returns the learning rate of group `group` (from 0; -1: the parameters of no group). TE_ERR_INVALID for a group that
 * does not exist. */
TE_API float te_optimizer_group_lr(const te_optimizer *opt, int group);
/* Returns the number of groups that the desc had; 0 for NULL. */
TE_API int te_optimizer_num_groups(const te_optimizer *opt);
/* Returns the number of steps made; 0 for NULL. After a te_grad_scaler_step it syncs, and does not count skipped
 * steps. */
TE_API int64_t te_optimizer_steps(const te_optimizer *opt);
/* Returns the norm of all gradients of the last step, before clipping, f32 [1] (borrowed); NULL without clipping or
 * before the first step. */
TE_API te_tensor *te_optimizer_grad_norm(const te_optimizer *opt);

/* A scale of the loss, for f16 gradients whose small numbers would vanish without it. If a gradient is not finite, the
 * scale falls and the step is skipped; after growth_interval steps without that, the scale grows. All of its state
 * stays on the device, as under `capturable` of TransformerEngine's FusedAdam. te_graph captures it after one step
 * outside. A step:
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
    bool disabled;      /* losses are not scaled, and te_grad_scaler_step is te_optimizer_step */
} te_grad_scaler_desc;
/* Makes a scaler; desc may be NULL. Owned by the caller: te_grad_scaler_destroy, before the context. TE_ERR_STATE
 * inside a graph's capture. */
TE_API te_grad_scaler *te_grad_scaler_create(te_ctx *te, const te_grad_scaler_desc *desc);
/* Releases the scaler. NULL is fine. */
TE_API void te_grad_scaler_destroy(te_grad_scaler *s);
/* Returns the loss times the scale, recorded. NULL with an error. */
TE_API te_tensor *te_grad_scaler_scale(te_grad_scaler *s, te_tensor *loss);
/* Divides the gradients of opt by the scale, in place, for code that reads or clips them before te_grad_scaler_step
 * (clipping by max_grad_norm needs no such call). At most once before each step (TE_ERR_STATE); TE_ERR_DTYPE for
 * gradients in f16. */
TE_API te_result te_grad_scaler_unscale(te_grad_scaler *s, te_optimizer *opt);
/* Runs te_optimizer_step on gradients divided by the scale. If one of them is not finite, the gradients are dropped and
 * nothing else changes, and the step counts in no bias correction. Does not sync, except before the first step of an
 * SGD with dampening. */
TE_API te_result te_grad_scaler_step(te_grad_scaler *s, te_optimizer *opt);
/* Computes the scale of the next loss. Call it after the steps of all optimizers. */
TE_API te_result te_grad_scaler_update(te_grad_scaler *s);
/* Returns the scale, f32 [1] on the device (borrowed); NULL for NULL. */
TE_API te_tensor *te_grad_scaler_get_scale(const te_grad_scaler *s);
/* The state of a scaler, for a file (te_metadata). */
typedef struct te_grad_scaler_state {
    float scale;        /* the scale in force */
    int growth_tracker; /* steps without an overflow since the scale last changed */
} te_grad_scaler_state;
/* Reads the state of the scaler. Syncs. */
TE_API te_grad_scaler_state te_grad_scaler_get_state(const te_grad_scaler *s);
/* Sets the state of the scaler; TE_ERR_INVALID for a scale that is not above 0. */
TE_API te_result te_grad_scaler_set_state(te_grad_scaler *s, te_grad_scaler_state state);

/* Returns a parameter's state by name as a new f32 tensor of the parameter's shape, in the innermost scope: multiplied
 * by its scale; remainders as the whole master, for which the call syncs. param is the parameter itself
 * (te_module_parameter). NULL with TE_ERR_INVALID if there is no state of that name. */
TE_API te_tensor *te_optimizer_get_unscaled_state(te_optimizer *opt, const te_tensor *param, const char *state_name);
/* Sets a parameter's state by name from f32 of the parameter's shape, with a new scale if the state has one. A master
 * stored as remainders changes the parameter too, and the call syncs; a whole master changes the parameter in the next
 * step. */
TE_API te_result te_optimizer_set_scaled_state(te_optimizer *opt, te_tensor *param, const char *state_name,
                                               const te_tensor *unscaled_state);

/* Computes out[i] = in[i] * scale. out[i] may be in[i]; otherwise the two may have different float formats. found_inf:
 * f32 [1], set to 1 if an input is not finite; may be NULL.
 * The te_multi_tensor functions are those of transformer_engine.pytorch.optimizers; te_op_multi_scale, te_op_l2norm,
 * te_op_adam and te_op_sgd have more options. */
TE_API te_result te_multi_tensor_scale(te_ctx *te, te_tensor *const *in, te_tensor *const *out, int num_tensors,
                                       float scale, te_tensor *found_inf);
/* Returns the norm of all elements of all tensors, f32 [1], added in a fixed order. If per_tensor is not NULL,
 * *per_tensor receives the norm of each tensor, f32 [num_tensors]. New tensors of the innermost scope; NULL with an
 * error. */
TE_API te_tensor *te_multi_tensor_l2norm(te_ctx *te, te_tensor *const *tensors, int num_tensors,
                                         te_tensor **per_tensor);
/* Returns the norms of te_multi_tensor_l2norm for the elements times inv_scale, f32 [1] on the device (NULL => 1); the
 * tensors stay as they are. */
TE_API te_tensor *te_multi_tensor_unscale_l2norm(te_ctx *te, te_tensor *const *tensors, int num_tensors,
                                                 const te_tensor *inv_scale, te_tensor **per_tensor);
/* Scales all gradients of a module tree (main gradients, where there are some) in place by min(1, max_norm / (norm +
 * 1e-6)). Returns the norm from before the scaling, f32 [1] of the innermost scope; NULL with an error. As
 * torch.nn.utils.clip_grad_norm_. */
TE_API te_tensor *te_clip_grad_norm(te_module *m, float max_norm);

/* An entry of a file's metadata: two UTF-8 strings, borrowed for the call. */
typedef struct te_metadata {
    const char *key, *value; /* neither is NULL; keys are unique */
} te_metadata;
/* Writes a model as one safetensors file: every parameter and buffer of `m` by path, the optimizer's states
 * ("optimizer/<path>.exp_avg" ...) and learning rates, those of groups included, the scaling state of delayed recipes,
 * the random state, and `metadata`. A weight that is stored quantized has the codes and scales of each copy
 * ("<path>.row.data", ".row.scale", ".col.data" ...). The state of a te_grad_scaler is not written
 * (te_grad_scaler_get_state). The file is written to a temporary file beside it, synced and renamed (see
 * te_safetensors_write): a failure leaves the previous file whole. Syncs. m and opt may be NULL. Errors: TE_ERR_IO; the
 * context's error, if it has one: nothing is written then. */
TE_API te_result te_model_save(te_ctx *te, const char *path, te_module *m, te_optimizer *opt,
                               const te_metadata *metadata, int num_metadata);
/* Reads a file of te_model_save into `m` and `opt` (each may be NULL). Every name, shape and format is checked, and all
 * memory allocated, before the first byte changes: after any error but TE_ERR_IO (a read failed) everything is as it
 * was. Entries of the file that the model lacks are ignored with a warning; entries of the model that the file lacks
 * are errors. For a weight that is stored quantized the file may have a plain one of any float format, which is
 * quantized. (A custom quantizer does this after other tensors were read; its function may still fail or run out of
 * memory then.) Syncs. */
TE_API te_result te_model_load(te_ctx *te, const char *path, te_module *m, te_optimizer *opt);
/* Writes the value of one metadata entry of a file into buffer; TE_ERR_INVALID if there is no such entry or it does not
 * fit. */
TE_API te_result te_model_metadata(te_ctx *te, const char *path, const char *key, char *buffer, size_t size);
