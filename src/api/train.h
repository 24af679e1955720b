/* api/train.h: optimizers and checkpoints. */

/* transformer_engine.pytorch.optimizers.FusedAdam. Parameters of 16 bits get f32 master weights unless no_master_weights. */
typedef struct te_fused_adam_desc {
    float lr;           /* 0 => 1e-3 */
    float beta1, beta2; /* 0 => 0.9, 0.999 */
    float eps;          /* 0 => 1e-8 */
    float weight_decay;
    bool l2_mode;            /* Adam with L2 in place of AdamW */
    bool no_bias_correction;
    bool no_master_weights;
    float max_grad_norm;     /* 0 => no clipping; else gradients are scaled by min(1, max / norm) */
    bool decay_matrices_only; /* no weight decay for tensors of fewer than 2 dimensions */
} te_fused_adam_desc;
/* For every parameter of `m` that requires a gradient. Owned by the caller: te_optimizer_destroy, before the module. Allocates the
 * states. */
TE_API te_optimizer *te_fused_adam_create(te_ctx *te, te_module *m, const te_fused_adam_desc *desc);
TE_API void te_optimizer_destroy(te_optimizer *opt);
/* One step over all parameters that have a gradient, then the gradients are forgotten (unless te_optimizer_keep_grad). Does
 * nothing when the context has an error; a step that fails changes no parameter (see te_clear_error). No host wait. */
TE_API te_result te_optimizer_step(te_optimizer *opt);
TE_API void te_optimizer_keep_grad(te_optimizer *opt, bool keep);
TE_API void te_optimizer_zero_grad(te_optimizer *opt);
TE_API void te_optimizer_set_lr(te_optimizer *opt, float lr);
TE_API float te_optimizer_lr(const te_optimizer *opt);
TE_API int64_t te_optimizer_steps(const te_optimizer *opt);
/* f32 [1], the norm that the last step clipped by (borrowed); NULL without clipping or before the first step. */
TE_API te_tensor *te_optimizer_grad_norm(const te_optimizer *opt);

/* A checkpoint is one safetensors file: every parameter and buffer of `m` by path, the optimizer's states
 * ("optimizer/<path>.exp_avg" ...), the scaling state of delayed recipes, the random state, and `metadata`. Of a weight that is stored
 * quantized it has the codes and scales of each copy ("<path>.row.data", ".row.scale", ".col.data" ...). Written to a
 * temporary file beside it, synced and renamed: a failure leaves the previous file whole. Syncs. m and opt may be NULL. */
typedef struct te_metadata {
    const char *key, *value;
} te_metadata;
TE_API te_result te_checkpoint_save(te_ctx *te, const char *path, te_module *m, te_optimizer *opt, const te_metadata *metadata,
                                    int num_metadata);
/* Reads it back. Every name, shape and format is checked, and all memory taken, before the first byte changes: any error
 * but the disk's own leaves all as it was. Entries of the file that the model lacks are ignored with a warning; those that
 * the file lacks are errors. For a weight that is stored quantized the file may have a plain one of any float format, which is quantized. */
TE_API te_result te_checkpoint_load(te_ctx *te, const char *path, te_module *m, te_optimizer *opt);
/* The value of one metadata entry of a file into buffer; TE_ERR_INVALID if there is none. */
TE_API te_result te_checkpoint_metadata(te_ctx *te, const char *path, const char *key, char *buffer, size_t size);
