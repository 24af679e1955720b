/* api/sharding.h: data parallelism. Ranks have the same model and different data; this part decides when they exchange
 * gradients.
 *
 * A unit is a module whose gradients are exchanged together: those of all parameters below it, except parameters of
 * units further down. The exchange takes place at the end of each te_backward or, with delay_wgrad_compute, at the end
 * of the te_backward_dw that computes the last gradient. Each unit whose requires_gradient_sync is set sums its
 * gradients over its group in f32, divides them by the number of ranks, and rounds them once. Other units keep their
 * gradients, and the next microbatch adds to them. So a step of several microbatches can exchange once:
 *
 *     te_data_parallel(model, &(te_data_parallel_desc){ .group = group });
 *     for (int i = 0; i < n; i++) {
 *         te_model_set_requires_grad_sync(model, i == n - 1);
 *         te_backward(te_scale(loss_of(model, batch[i]), 1.0f / n));
 *     }
 *     te_optimizer_step(adam);                                           // the same on all ranks
 *
 * The exchanges are part of te_backward. So all ranks must make the same calls of te_backward, and each call must reach
 * the parameters of the model on all ranks or on none. A parameter without a gradient on this rank gets the gradient of
 * the other ranks; if no rank has one, none is made. If a pass fails on one rank before the exchanges, that rank
 * reports the failure to the ranks that wait in the first exchange. There are two cases in which a rank reports no
 * failure: its context had an error already, so that it never gets to the exchange, or it runs out of memory between
 * two units. Such a rank must call te_group_abort, which frees the waiting ranks. te.h's parameters are whole on every
 * rank: units decide when gradients are exchanged, and save no memory.
 *
 * Source: torch.nn.parallel.DistributedDataParallel, torch.distributed.fsdp (FSDPModule),
 * nemo_automodel.components.moe.fsdp_mixin. */

/* The three flags of a unit (FSDPModule's set_is_last_backward, set_reshard_after_backward and
 * set_requires_gradient_sync). All are true in a new unit. */
typedef struct te_fsdp_state {
    bool is_last_backward;       /* the next backward pass is the last one of the step. A post_backward function may
                                  * read this flag; te.h's own exchange does not read it */
    bool reshard_after_backward; /* parameters gathered by post_backward functions may be freed. te.h's own parameters
                                  * are whole and are never freed */
    bool requires_gradient_sync; /* gradients are exchanged */
} te_fsdp_state;

/* How the gradients of a unit are exchanged. Zero-initialised; copied. */
typedef struct te_data_parallel_desc {
    te_group *group;               /* the ranks with other data: a group of the module's context (borrowed for the
                                    * unit's lifetime). NULL => one rank */
    float gradient_divide_factor;  /* divisor of the sums; 0 => the number of ranks */
    bool no_init_sync;             /* for te_data_parallel: parameters and buffers keep their values; false => they get
                                    * those of rank 0 */
    /* The program's own exchange, in place of te.h's. It is called when te_backward has computed the gradients, if the
     * unit's requires_gradient_sync is set. Returns TE_OK or an error code. NULL => te.h's exchange. */
    te_result (*post_backward)(void *user, te_module *unit);
    /* A function that te_stage_backward and te_fsdp_post_backward call after the exchanges of all units. NULL =>
     * none. */
    te_result (*root_post_backward)(void *user, te_module *unit);
    void *user;                    /* handed to post_backward and root_post_backward; borrowed for the unit's
                                    * lifetime */
} te_data_parallel_desc;

/* Makes m and all modules below it one unit (DistributedDataParallel); a NULL desc undoes that. First sets parameters
 * and buffers to the values of rank 0, so all ranks must call it. Errors:
 *   TE_ERR_UNSUPPORTED for weights that are stored quantized: seed all ranks alike and set no_init_sync instead.
 *   TE_ERR_INVALID for a module that is a unit of te_fsdp_unit already, for a group of another context, or for a
 *   gradient_divide_factor that is negative or not finite.
 *   TE_ERR_STATE inside a graph's capture.
 * Allocates memory. Syncs if collectives of the group sync. */
TE_API te_result te_data_parallel(te_module *m, const te_data_parallel_desc *desc);
/* Makes m one of several units of its model (fully_shard, but only for gradients); a NULL desc undoes that. Parameters
 * keep their values. The errors are those of te_data_parallel. */
TE_API te_result te_fsdp_unit(te_module *m, const te_data_parallel_desc *desc);
/* Writes the flags of a unit (of te_data_parallel or te_fsdp_unit) into *state, and returns true; false for any other
 * module. */
TE_API bool te_fsdp_get_state(const te_module *m, te_fsdp_state *state);
/* Sets the flags of the unit and of all units below it. TE_ERR_INVALID for a module that is not a unit. */
TE_API te_result te_fsdp_set_state(te_module *m, te_fsdp_state state);

/* Calls `visit` once for each of the units that NeMo Automodel controls in a model. These are the units among the
 * following modules: the model itself; its child `model`; embed_tokens of that child; lm_head; the multimodal towers
 * and projectors with everything below them (vision_tower, visual, multi_modal_projector ...); the experts of each
 * layer (layers.N.mlp.experts, .moe.experts, and te.h's .block_sparse_moe.experts); and the blocks below mtp.layers
 * with their experts. Returns false if `visit` stopped the walk or is NULL. Source: _iter_fsdp_modules. */
TE_API bool te_fsdp_units_visit(te_module *model, te_module_visit_fn visit, void *user);
/* Sets all three flags to `on` in the units of te_fsdp_units_visit and in the units below them. Source:
 * MoEFSDPSyncMixin. */
TE_API te_result te_model_set_requires_grad_sync(te_module *model, bool on);
/* Sets whether the two functions that prepare a step change the flags of the model's units; off by default. If `on` is
 * true (enable_fsdp_optimizations of te_backend_config), te_prepare_for_grad_accumulation sets the flags to false and
 * te_prepare_for_final_backward sets them to true. For this the call replaces the te_step_hooks of `model`. If `on` is
 * false, neither function changes the flags. */
TE_API te_result te_model_set_fsdp_optimizations(te_module *model, bool on);
/* Exchanges the gradients of one unit now if its requires_gradient_sync is set. If the unit has a post_backward, that
 * function exchanges them. Then calls the unit's root_post_backward. TE_ERR_INVALID for a module that is not a unit. */
TE_API te_result te_fsdp_post_backward(te_module *unit);

/* The gradients that a call of te_stage_backward computes. The schedule of a pipeline may split a backward pass in
 * two. */
typedef enum te_backward_type {
    TE_BACKWARD_FULL = 0,  /* gradients of inputs and weights ("full") */
    TE_BACKWARD_INPUT = 1, /* gradients of inputs ("input"). te_backward computes them. It also computes the gradients
                            * of weights, except in modules with delay_wgrad_compute */
    TE_BACKWARD_WEIGHT = 2 /* the gradients of weights that were left for later ("weight"). te_backward_dw computes
                            * them */
} te_backward_type;
/* Options of te_stage_backward, which runs the backward pass of one microbatch in one stage of a pipeline.
 * Zero-initialised. */
typedef struct te_stage_backward_desc {
    te_backward_type type;           /* 0 => full */
    te_tensor *const *stage_outputs; /* [num_outputs] the outputs of the stage's forward: in the last stage the loss, of
                                      * one element; else tensors whose gradients come from the next stage. Not read
                                      * with TE_BACKWARD_WEIGHT */
    te_tensor *const *output_grads;  /* [num_outputs] gradients of stage_outputs, of the same shapes. An entry is NULL
                                      * if that output is a loss. The list is NULL if all outputs are losses */
    int num_outputs;                 /* length of stage_outputs and output_grads; at least 1, except with
                                      * TE_BACKWARD_WEIGHT */
    bool last_backward;              /* this is the stage's last backward pass of the schedule */
    bool reduce_grad_per_microbatch; /* for a stage to which te_fsdp_unit was applied. true: its ranks exchange
                                      * gradients in each microbatch; false: only in the last microbatch */
} te_stage_backward_desc;
/* Runs the backward pass, and decides whether gradients are exchanged. The first of these cases that applies decides:
 *
 *   1.  te_data_parallel made the stage one unit. The unit exchanges only if last_backward is true.
 *   2.  te_fsdp_unit made the stage a unit. Before the pass, all flags (te_fsdp_state) of it and of the units below it
 *       are set to reduce_grad_per_microbatch. If last_backward is true, they are set to true after the pass, and these
 *       units exchange.
 *   3.  te_model_set_fsdp_optimizations(stage, true) was called. Before the pass, all flags of the units of
 *       te_fsdp_units_visit are set to false. If last_backward and te_step_get_is_optim_step are true, they are set to
 *       true after the pass, these units exchange, and then each root_post_backward is called.
 *   4.  In all other cases the flags stay as they are.
 *
 * TE_ERR_INVALID for any other desc->type, or if outputs are missing. Other errors are those of te_backward_from and
 * te_backward_dw. Source: patched_backward_maybe_with_nosync. */
TE_API te_result te_stage_backward(te_module *stage, const te_stage_backward_desc *desc);
