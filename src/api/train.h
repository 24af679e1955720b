/* api/train.h: optimizers and checkpoints. */

/* A group of parameters that has its own hyperparameters. Its parameters are chosen by a pattern or by a list. A
 * parameter that several groups choose belongs to the first of them. Source: torch.optim, param_groups. */
typedef struct te_param_group {
    const char *pattern;        /* pattern of parameter paths below the optimizer's module: * stands for any characters,
                                 * ? for one ("*.bias"). NULL => `params` is used */
    te_tensor *const *params;   /* [num_params] the parameters (te_module_parameter); NULL => `pattern` is used */
    int num_params;             /* length of params */
    float lr;                   /* learning rate. 0 => the optimizer's, also after te_optimizer_set_lr */
    float weight_decay;         /* 0 => the optimizer's */
    bool no_weight_decay;       /* the group has no weight decay, even if the optimizer has one */
    float beta1, beta2, eps;    /* hyperparameters of Adam; 0 => the optimizer's */
} te_param_group;
#define TE_MAX_PARAM_GROUPS 64 /* the most groups of an optimizer */

/* Options of te_fused_adam_create: Adam and AdamW. Parameters of 16 bits, and parameters stored quantized, get master
 * weights. The states are "exp_avg", "exp_avg_sq" and "master_param".
 * A state in f16 or e4m3 has one scale, which every step computes anew (te_op_adam). There is no field `capturable`:
 * te_graph captures every optimizer.
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
    bool no_master_weights;   /* 16-bit parameters are updated in their own format, without masters. Refused for weights
                               * that are stored quantized. TransformerEngine's default is no masters
                               * (master_weights=False) */
    te_dtype master_weight_dtype; /* format of masters: f32 or f16; 0 => f32 */
    te_dtype exp_avg_dtype;       /* format of the first moment: f32, bf16, f16 or e4m3; 0 => f32 */
    te_dtype exp_avg_sq_dtype;    /* format of the second moment: f32, bf16, f16 or e4m3; 0 => f32 */
    bool store_param_remainders;  /* the f32 master of a bf16 parameter is stored as remainders: the 16 bits that the
                                   * parameter lacks */
    bool use_decoupled_grad;      /* gradients are read from te_tensor_decoupled_grad */
    bool no_set_grad_none;    /* after a step gradients are filled with zeros; false => dropped */
    float max_grad_norm;      /* gradients are scaled by min(1, max_grad_norm / norm); 0 => no clipping */
    bool decay_matrices_only; /* no weight decay for tensors of fewer than 2 dimensions */
    const te_param_group *groups; /* [num_groups] groups with their own hyperparameters; read by the create function */
    int num_groups;           /* 0 => none; at most TE_MAX_PARAM_GROUPS */
} te_fused_adam_desc;
/* Makes an optimizer for every parameter of `m` that requires a gradient; desc may be NULL. The caller owns it
 * (te_optimizer_destroy, before te_ctx_destroy). Retains the parameters. Allocates. TE_ERR_STATE inside a graph's
 * capture. */
TE_API te_optimizer *te_fused_adam_create(te_ctx *te, te_module *m, const te_fused_adam_desc *desc);

/* Options of te_fused_sgd_create: stochastic gradient descent (te_op_sgd). Parameters of 16 bits, and parameters stored
 * quantized, get f32 master weights. The states are "momentum_buffer" (if momentum is not 0) and "master_param". There
 * is no `materialize_master_grads`: gradients may have any format.
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
    bool no_master_weights;   /* 16-bit parameters and their momentum are updated in their own format, without masters.
                               * Refused for weights that are stored quantized. TransformerEngine's default is no
                               * masters */
    float max_grad_norm;      /* gradients are scaled by min(1, max_grad_norm / norm); 0 => no clipping */
    bool decay_matrices_only; /* no weight decay for tensors of fewer than 2 dimensions */
    const te_param_group *groups; /* [num_groups] groups with their own hyperparameters; read by the create function */
    int num_groups;           /* 0 => none; at most TE_MAX_PARAM_GROUPS */
} te_fused_sgd_desc;
/* Makes an SGD optimizer. The function is like te_fused_adam_create, but desc is needed. With dampening, the first step
 * of each parameter must run before a graph's capture (else TE_ERR_STATE). */
TE_API te_optimizer *te_fused_sgd_create(te_ctx *te, te_module *m, const te_fused_sgd_desc *desc);
/* Releases the optimizer and its states. NULL is fine. */
TE_API void te_optimizer_destroy(te_optimizer *opt);
/* Updates all parameters that have a gradient, then drops the gradients unless te_optimizer_keep_grad is on.
 * TransformerEngine keeps them. Changes no parameter if the step fails or the context has an error. Asynchronous on
 * CUDA. */
TE_API te_result te_optimizer_step(te_optimizer *opt);
/* Sets whether a step keeps the gradients. Kept gradients stay until te_optimizer_zero_grad. By default a step drops
 * them. */
TE_API void te_optimizer_keep_grad(te_optimizer *opt, bool keep);
/* Drops the gradients of the optimizer's parameters, and weight gradients that te_backward_dw has not computed yet. */
TE_API void te_optimizer_zero_grad(te_optimizer *opt);
/* Sets the learning rate of the next steps, also of steps in graphs. Groups with their own rate keep it. TE_ERR_INVALID
 * for a negative or not finite rate. */
TE_API void te_optimizer_set_lr(te_optimizer *opt, float lr);
/* Returns the learning rate; 0 for NULL. */
TE_API float te_optimizer_lr(const te_optimizer *opt);
/* Sets the learning rate of group number `group` for the next steps, also of steps in graphs. The first group is 0. -1
 * => does the same as te_optimizer_set_lr. TE_ERR_INVALID for other groups, and for a negative or not finite rate. */
TE_API void te_optimizer_set_group_lr(te_optimizer *opt, int group, float lr);
/* Returns the learning rate of group number `group`. The first group is 0. -1 => returns the rate of the parameters
 * that are in no group. TE_ERR_INVALID for other groups. */
TE_API float te_optimizer_group_lr(const te_optimizer *opt, int group);
/* Returns the number of groups that the desc had; 0 for NULL. */
TE_API int te_optimizer_num_groups(const te_optimizer *opt);
/* Returns the number of steps so far, without skipped ones; 0 for NULL. Syncs if te_grad_scaler_step was used. */
TE_API int64_t te_optimizer_steps(const te_optimizer *opt);
/* Returns the norm of all gradients in the last step, before clipping, f32 [1] (borrowed). NULL without clipping, and
 * before the first step. */
TE_API te_tensor *te_optimizer_grad_norm(const te_optimizer *opt);

/* Scales the loss, to keep small f16 gradients from becoming 0. If a gradient is not finite, the scale falls and the
 * step is skipped. After growth_interval steps without such a gradient, the scale grows. The state stays on the device.
 * te_graph can capture a scaler after one step outside of the graph. A step is:
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
    bool disabled;      /* losses are not scaled, and te_grad_scaler_step only calls te_optimizer_step */
} te_grad_scaler_desc;
/* Makes a scaler; desc may be NULL. The caller owns it (te_grad_scaler_destroy, before the context is destroyed).
 * TE_ERR_STATE inside a graph's capture. */
TE_API te_grad_scaler *te_grad_scaler_create(te_ctx *te, const te_grad_scaler_desc *desc);
/* Releases the scaler. NULL is fine. */
TE_API void te_grad_scaler_destroy(te_grad_scaler *s);
/* Returns the loss times the scale, recorded for te_backward. NULL after an error. */
TE_API te_tensor *te_grad_scaler_scale(te_grad_scaler *s, te_tensor *loss);
/* Divides the gradients of opt by the scale, in place (clipping by max_grad_norm does not need this). TE_ERR_STATE for
 * a second call before a step. TE_ERR_DTYPE for gradients in f16. */
TE_API te_result te_grad_scaler_unscale(te_grad_scaler *s, te_optimizer *opt);
/* Runs te_optimizer_step on the gradients divided by the scale. If a gradient is not finite, only drops the gradients;
 * bias corrections do not count this step. Syncs only before the first step of an SGD with dampening. */
TE_API te_result te_grad_scaler_step(te_grad_scaler *s, te_optimizer *opt);
/* Computes the scale of the next loss. Call it after the steps of all optimizers. */
TE_API te_result te_grad_scaler_update(te_grad_scaler *s);
/* Returns the scale, f32 [1] on the device (borrowed), or NULL if s is NULL. */
TE_API te_tensor *te_grad_scaler_get_scale(const te_grad_scaler *s);
/* The state of a scaler. */
typedef struct te_grad_scaler_state {
    float scale;        /* the scale in force */
    int growth_tracker; /* steps without an overflow since the scale last changed */
} te_grad_scaler_state;
/* Reads the state of the scaler. Syncs. */
TE_API te_grad_scaler_state te_grad_scaler_get_state(const te_grad_scaler *s);
/* Sets the state of the scaler; TE_ERR_INVALID for a scale that is not above 0. */
TE_API te_result te_grad_scaler_set_state(te_grad_scaler *s, te_grad_scaler_state state);

/* Returns a parameter's state, times the state's scale, as a new f32 tensor of the parameter's shape. For remainders,
 * returns the whole f32 master (syncs). Of a sharded parameter, the values and the shape are those of this rank's
 * slice, [te_fsdp_slice.length], here and in te_optimizer_state. NULL with TE_ERR_INVALID for an unknown state. */
TE_API te_tensor *te_optimizer_get_unscaled_state(te_optimizer *opt, const te_tensor *param, const char *state_name);
/* Sets a parameter's state, and the state's scale, from f32 values of the parameter's shape. Setting remainders changes
 * the parameter at once (syncs), on all ranks of a sharded one, which must all make the call. Setting a whole master
 * changes the parameter in the next step. */
TE_API te_result te_optimizer_set_scaled_state(te_optimizer *opt, te_tensor *param, const char *state_name,
                                               const te_tensor *unscaled_state);

/* Computes out[i] = in[i] * scale. An output may be the same tensor as its input, or may have another float format.
 * found_inf (optional f32 [1]) becomes 1 if an input is not finite.
 * Source: transformer_engine.pytorch.optimizers. */
TE_API te_result te_multi_tensor_scale(te_ctx *te, te_tensor *const *in, te_tensor *const *out, int num_tensors,
                                       float scale, te_tensor *found_inf);
/* Returns a new f32 [1]: the Euclidean norm of all elements, summed in a fixed order. *per_tensor (optional) receives
 * each tensor's norm, f32 [num_tensors]. NULL after an error. */
TE_API te_tensor *te_multi_tensor_l2norm(te_ctx *te, te_tensor *const *tensors, int num_tensors,
                                         te_tensor **per_tensor);
/* Like te_multi_tensor_l2norm, but multiplies each element by `inv_scale` first (f32 [1] on the device; NULL => 1). The
 * tensors stay as they are. */
TE_API te_tensor *te_multi_tensor_unscale_l2norm(te_ctx *te, te_tensor *const *tensors, int num_tensors,
                                                 const te_tensor *inv_scale, te_tensor **per_tensor);
/* Multiplies the gradients of m and of the modules below by min(1, max_norm / (norm + 1e-6)), in place, as
 * torch.nn.utils.clip_grad_norm_. Takes main gradients where there are any. Returns the old norm, a new f32 [1]; NULL
 * after an error. */
TE_API te_tensor *te_clip_grad_norm(te_module *m, float max_norm);

/* An entry of a file's metadata: two UTF-8 strings, borrowed for the call. */
typedef struct te_metadata {
    const char *key, *value; /* neither is NULL; keys are unique */
} te_metadata;
/* Writes a model as one safetensors file, through a temporary file (te_safetensors_write). m and opt may be NULL.
 * Syncs. The file has:
 *   - every parameter and buffer of `m` by path. A weight that is stored quantized is written as the codes and scales
 *     of its copies ("<path>.row.data", ".row.scale", ".col.data" ...);
 *   - the optimizer's states ("optimizer/<path>.exp_avg" ...);
 *   - the learning rates of the optimizer and of its groups;
 *   - the scaling state of delayed recipes, the random state, and `metadata`.
 * The state of a te_grad_scaler is not written: te_grad_scaler_get_state returns it. If the context has an error,
 * nothing is written and that error is returned. TE_ERR_IO if writing fails.
 * Ranks that share a model write one set of files, all at once: slices of sharded units (api/sharding.h), parts of
 * tensor-parallel modules, experts of an ep_group, and any of these together. All ranks of these groups must make the
 * call, with the same path on a shared disk, and all groups must be lines of one grid, as those of te_dist_init are.
 * Rank 0 of all groups writes the file `path`, last: what is whole, its own slices, and the names of the other ranks'
 * files, "<path>.ID.1-of-4" and so on. Such files of earlier saves to the path are removed then, by any save, also one
 * of one rank; so only one save to a path may run at a time. If a rank fails, all fail with its error, and the
 * checkpoint that was there stays; if ranks lose each other while the index gets its name, it may be the new one.
 * Buffers, scaling state and random state are those of rank 0; buffers of an expert that has a name of its own are
 * those of its rank.
 * The files hold successive elements of whole tensors. Ranks that have columns of a matrix (row-parallel) exchange its
 * rows, one tensor at a time, so that each has some rows of all columns. So beside the model and the optimizer a rank
 * needs twice the memory of what it has of one such tensor, and it sends what it has of each once.
 * Tensor-parallel parts that are stored quantized are written as values in the parameter's own format, since the scales
 * of their codes are one rank's: opening quantizes them again, which gives other codes at the most where a scale is no
 * power of two. Their f32 masters are exact.
 * TE_ERR_INVALID if ranks give different names of files. TE_ERR_UNSUPPORTED if units of other modules than experts have
 * several groups, and for states in f16 or e4m3 of tensor-parallel parts. */
TE_API te_result te_model_save(te_ctx *te, const char *path, te_module *m, te_optimizer *opt,
                               const te_metadata *metadata, int num_metadata);
/* Reads a file of te_model_save into `m` and `opt` (each may be NULL). Syncs. Entries that only the file has give a
 * warning. Entries that only the model has are errors. A plain weight in the file is quantized if the model stores it
 * quantized; codes in the file are decoded, and quantized again, if it stores a tensor-parallel part of them. Values
 * that are quantized so are in memory together until all are read. An error changes nothing, except TE_ERR_IO (a read
 * failed) and an error of a custom quantizer.
 * A file, or a set of files that ranks have written, opens in any layout: on one rank, or on any number of ranks that
 * share the model in any ways; each rank reads what it keeps, and of matrices of which it has columns whole rows, one
 * tensor at a time: tp times what it keeps of the largest one is needed beside the model, and nothing is exchanged.
 * All ranks of the model's groups must make the call, with the same path; if one fails, all do. TE_ERR_FORMAT or
 * TE_ERR_IO if a file of the set is missing or is not of the same save. */
TE_API te_result te_model_load(te_ctx *te, const char *path, te_module *m, te_optimizer *opt);
/* Writes the value of a file's metadata entry `key` into buffer. TE_ERR_INVALID if there is no such entry, or its value
 * does not fit. */
TE_API te_result te_model_metadata(te_ctx *te, const char *path, const char *key, char *buffer, size_t size);
