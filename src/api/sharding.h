/* api/sharding.h: data parallelism. Decides when ranks with the same model and different data exchange gradients.
 *
 * A unit is a module whose gradients are exchanged together: those of all parameters below it, except parameters of
 * units further down. The exchange is at the end of each te_backward (delay_wgrad_compute: of the last te_backward_dw).
 * A unit with requires_gradient_sync sums its gradients over its group in f32, divides them by the number of ranks, and
 * rounds them once. Other units keep their gradients. Several microbatches can exchange once:
 *
 *     te_data_parallel(model, &(te_data_parallel_desc){ .group = group });
 *     for (int i = 0; i < n; i++) {
 *         te_model_set_requires_grad_sync(model, i == n - 1);
 *         te_backward(te_scale(loss_of(model, batch[i]), 1.0f / n));
 *     }
 *     te_optimizer_step(adam);                                           // the same on all ranks
 *
 * All ranks must make the same calls of te_backward. Each call must reach the parameters of the model on all ranks or
 * on none. A parameter without a gradient on this rank gets that of the other ranks, if there is one. If a rank fails
 * before the exchanges, it reports the failure to the ranks that wait. Two failures are not reported: an error that the
 * rank's context already had, and running out of memory between the exchanges of two units. The rank must then call
 * te_group_abort, which frees the waiting ranks. Parameters are whole on every rank: units save no memory.
 *
 * Source: torch.nn.parallel.DistributedDataParallel, torch.distributed.fsdp (FSDPModule),
 * nemo_automodel.components.moe.fsdp_mixin. */

/* The flags of a unit (FSDPModule's set_is_last_backward and so on). All are true in a new unit. */
typedef struct te_fsdp_state {
    bool is_last_backward;       /* the next backward pass is the last one of the step. For post_backward functions;
                                  * te.h's own exchange does not read it */
    bool reshard_after_backward; /* parameters gathered by post_backward functions may be freed */
    bool requires_gradient_sync; /* gradients are exchanged */
} te_fsdp_state;

/* How the gradients of a unit are exchanged. Zero-initialised; copied. */
typedef struct te_data_parallel_desc {
    te_group *group;               /* the ranks that have the same module and other data; a group of the module's
                                    * context (borrowed for the unit's lifetime). NULL => one rank */
    float gradient_divide_factor;  /* divisor of the sums; 0 => the number of ranks */
    bool no_init_sync;             /* te_data_parallel: parameters and buffers keep their values; false => rank 0's */
    /* The program's own exchange. It is called after te_backward has computed the gradients, if requires_gradient_sync
     * is set. Returns TE_OK or an error code. NULL => te.h's exchange. */
    te_result (*post_backward)(void *user, te_module *unit);
    /* te_stage_backward and te_fsdp_post_backward call this function after the exchanges of all units. NULL => none. */
    te_result (*root_post_backward)(void *user, te_module *unit);
    void *user;                    /* handed to post_backward and root_post_backward; borrowed for the unit's
                                    * lifetime */
} te_data_parallel_desc;

/* Makes m and all modules below it one unit (DistributedDataParallel); a NULL desc undoes that. All ranks must call it:
 * it sets parameters and buffers to rank 0's. Errors:
 *   TE_ERR_UNSUPPORTED for weights that are stored quantized: seed all ranks alike and set no_init_sync instead.
 *   TE_ERR_INVALID for a module that is a unit of te_fsdp_unit already, for a group of another context, or for a
 *   gradient_divide_factor that is negative or not finite.
 *   TE_ERR_STATE inside a graph's capture.
 * Allocates memory. Syncs if collectives of the group sync. */
TE_API te_result te_data_parallel(te_module *m, const te_data_parallel_desc *desc);
/* Makes m one of several units of its model (fully_shard, for gradients only); a NULL desc undoes that. Parameters keep
 * their values. Errors: as te_data_parallel. */
TE_API te_result te_fsdp_unit(te_module *m, const te_data_parallel_desc *desc);
/* Writes the flags of a unit into *state, and returns true; false for a module that is not a unit. */
TE_API bool te_fsdp_get_state(const te_module *m, te_fsdp_state *state);
/* Sets the flags of the unit and of all units below it. TE_ERR_INVALID for a module that is not a unit. */
TE_API te_result te_fsdp_set_state(te_module *m, te_fsdp_state state);

/* Calls `visit` for the units that NeMo Automodel controls in a model. Returns false if `visit` stopped the walk or is
 * NULL. Source: _iter_fsdp_modules. NeMo Automodel controls the units among these modules:
 *   - the model, its child `model`, embed_tokens of that child, and lm_head;
 *   - the multimodal towers and projectors with all below them (vision_tower, visual, multi_modal_projector ...);
 *   - the experts of each layer (layers.N.mlp.experts, .moe.experts, and te.h's .block_sparse_moe.experts);
 *   - the blocks below mtp.layers with their experts. */
TE_API bool te_fsdp_units_visit(te_module *model, te_module_visit_fn visit, void *user);
/* Sets all flags to `on` in the units of te_fsdp_units_visit and below them. Source: MoEFSDPSyncMixin. */
TE_API te_result te_model_set_requires_grad_sync(te_module *model, bool on);
/* If `on` is true, replaces the te_step_hooks of `model` by te.h's own hooks. If `on` is false (the default), removes
 * te.h's own hooks. With these hooks, te_prepare_for_grad_accumulation sets all flags in the units of
 * te_fsdp_units_visit and below them to false, and te_prepare_for_final_backward sets the flags to true. Automodel:
 * enable_fsdp_optimizations. */
TE_API te_result te_model_set_fsdp_optimizations(te_module *model, bool on);
/* Exchanges the gradients of one unit now if its requires_gradient_sync is set. Then calls its root_post_backward.
 * TE_ERR_INVALID for a module that is not a unit. */
TE_API te_result te_fsdp_post_backward(te_module *unit);

/* The gradients that a call of te_stage_backward computes. */
typedef enum te_backward_type {
    TE_BACKWARD_FULL = 0,  /* gradients of inputs and weights ("full") */
    TE_BACKWARD_INPUT = 1, /* gradients of inputs ("input"), by te_backward. It computes gradients of weights too,
                            * except in modules with delay_wgrad_compute */
    TE_BACKWARD_WEIGHT = 2 /* the deferred gradients of weights ("weight"), by te_backward_dw */
} te_backward_type;
/* Options of te_stage_backward: the backward pass of one microbatch in one stage of a pipeline. Zero-initialised. */
typedef struct te_stage_backward_desc {
    te_backward_type type;           /* 0 => full */
    te_tensor *const *stage_outputs; /* [num_outputs] the outputs of the stage's forward; in the last stage the loss, of
                                      * one element. Not read with TE_BACKWARD_WEIGHT */
    te_tensor *const *output_grads;  /* [num_outputs] gradients of stage_outputs, from the next stage; NULL for a loss.
                                      * The list is NULL if all outputs are losses */
    int num_outputs;                 /* length of both lists; at least 1, except with TE_BACKWARD_WEIGHT */
    bool last_backward;              /* this is the stage's last backward pass of the schedule */
    bool reduce_grad_per_microbatch; /* for a unit of te_fsdp_unit. true: ranks exchange gradients in each microbatch;
                                      * false: only in the last microbatch */
} te_stage_backward_desc;
/* Runs the backward pass. The first of these cases that applies decides whether gradients are exchanged:
 *
 *   1.  te_data_parallel made the stage one unit. The unit exchanges only if last_backward is true.
 *   2.  te_fsdp_unit made the stage a unit. Before the pass, all flags of the stage and of the units below it become
 *       the value of reduce_grad_per_microbatch. If last_backward is true, the flags become true after the pass, and
 *       these units exchange.
 *   3.  te_model_set_fsdp_optimizations(stage, true) was called. Before the pass, all flags of the units of
 *       te_fsdp_units_visit become false. If last_backward and te_step_get_is_optim_step are true, the flags become
 *       true after the pass. These units then exchange, and each root_post_backward is called.
 *   4.  In all other cases the flags stay as they are.
 *
 * TE_ERR_INVALID if desc->type is not in te_backward_type, or if outputs are missing. Other errors are those of
 * te_backward_from and te_backward_dw. Source: patched_backward_maybe_with_nosync. */
TE_API te_result te_stage_backward(te_module *stage, const te_stage_backward_desc *desc);
