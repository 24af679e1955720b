/* api/sharding.h: data parallelism: ranks that have the same model and other data, and when they exchange gradients.
 *
 * A unit is a module whose gradients are exchanged together: the gradients of the parameters below it that belong to no
 * unit further down. At the end of each te_backward (with delay_wgrad_compute: of the te_backward_dw that computes the
 * last gradient) each unit whose requires_gradient_sync is set sums its gradients over its group, in f32 and rounded
 * once, and divides them by the number of ranks. Other units keep their gradients, and the next microbatch adds to
 * them. So a step of several microbatches exchanges once:
 *
 *     te_data_parallel(model, &(te_data_parallel_desc){ .group = group });
 *     for (int i = 0; i < n; i++) {
 *         te_model_set_requires_grad_sync(model, i == n - 1);
 *         te_backward(te_scale(loss_of(model, batch[i]), 1.0f / n));
 *     }
 *     te_optimizer_step(adam);                                           // the same on all ranks
 *
 * The exchanges are part of te_backward: all ranks call it alike, and each call reaches the parameters of the model on
 * all ranks or on none. A parameter without a gradient on this rank gets that of the others; where no rank has one,
 * none is made. If a pass fails on one rank before the exchanges, that rank tells the ranks that wait in the first
 * exchange. A rank that never gets so far (its context had an error already), or that runs out of memory between two
 * units, tells nobody: it must call te_group_abort, which frees the waiting ranks. te.h's parameters are whole on every
 * rank: units decide when gradients are exchanged, and save no memory.
 *
 * Source: torch.nn.parallel.DistributedDataParallel, torch.distributed.fsdp (FSDPModule),
 * nemo_automodel.components.moe.fsdp_mixin. */

/* The three flags of a unit (FSDPModule's set_is_last_backward, set_reshard_after_backward and
 * set_requires_gradient_sync). All are true in a new unit. */
typedef struct te_fsdp_state {
    bool is_last_backward;       /* the next backward pass is the step's last: for post_backward functions; te.h's own
                                  * exchange does not read it */
    bool reshard_after_backward; /* parameters that post_backward functions have gathered may be freed; te.h's own
                                  * parameters are whole, and stay */
    bool requires_gradient_sync; /* gradients are exchanged */
} te_fsdp_state;

/* How the gradients of a unit are exchanged. Zero-initialised; copied. */
typedef struct te_data_parallel_desc {
    te_group *group;               /* the ranks with other data (borrowed for the unit's lifetime, of the module's
                                    * context); NULL => one rank */
    float gradient_divide_factor;  /* sums are divided by it; 0 => by the number of ranks */
    bool no_init_sync;             /* te_data_parallel: parameters and buffers stay what they are; false => they become
                                    * rank 0's */
    /* An exchange of the program's own, in place of te.h's: called once te_backward has gradients and the unit's
     * requires_gradient_sync is set. Returns TE_OK, or an error's code. NULL => te.h's exchange. */
    te_result (*post_backward)(void *user, te_module *unit);
    /* Called by te_stage_backward and te_fsdp_post_backward after the exchanges of all units. NULL => nothing. */
    te_result (*root_post_backward)(void *user, te_module *unit);
    void *user;                    /* handed to post_backward and root_post_backward; borrowed for the unit's
                                    * lifetime */
} te_data_parallel_desc;

/* Makes the tree of m one unit (DistributedDataParallel); desc NULL undoes that. First sets parameters and buffers to
 * rank 0's (TE_ERR_UNSUPPORTED for weights that are stored quantized: seed all ranks alike and set no_init_sync), so
 * all ranks must call it. TE_ERR_INVALID for a module that te_fsdp_unit has made a unit, a group of another context, or
 * a factor that is negative or not finite; TE_ERR_STATE inside a graph's capture. Allocates; syncs if the group
 * does. */
TE_API te_result te_data_parallel(te_module *m, const te_data_parallel_desc *desc);
/* Makes m a unit among others of its tree (fully_shard, of gradients alone); desc NULL undoes that. Parameters stay
 * what they are. Errors as te_data_parallel. */
TE_API te_result te_fsdp_unit(te_module *m, const te_data_parallel_desc *desc);
/* Writes the flags of a unit (of either kind) into *state, and returns true; false for any other module. */
TE_API bool te_fsdp_get_state(const te_module *m, te_fsdp_state *state);
/* Sets the flags of the unit and of all units below it. TE_ERR_INVALID for a module that is no unit. */
TE_API te_result te_fsdp_set_state(te_module *m, te_fsdp_state state);

/* Calls `visit` with the units of a model that Automodel drives, each once: the model itself; its child `model`;
 * embed_tokens of that child; lm_head; the multimodal towers and projectors with everything below them (vision_tower,
 * visual, multi_modal_projector ...); the experts of each layer (layers.N.mlp.experts, .moe.experts, and te.h's
 * .block_sparse_moe.experts); and the blocks below mtp.layers with their experts. Modules that are no units are
 * skipped. Returns false if `visit` stopped the walk or is NULL. Source: _iter_fsdp_modules. */
TE_API bool te_fsdp_units_visit(te_module *model, te_module_visit_fn visit, void *user);
/* Sets all three flags of the units of te_fsdp_units_visit, and of the units below them, to `on`. Source:
 * MoEFSDPSyncMixin. */
TE_API te_result te_model_set_requires_grad_sync(te_module *model, bool on);
/* on (enable_fsdp_optimizations of te_backend_config): te_prepare_for_grad_accumulation sets the flags of the model's
 * units to false, and te_prepare_for_final_backward to true. This replaces the te_step_hooks of the model. Off, the
 * default: neither changes the flags. */
TE_API te_result te_model_set_fsdp_optimizations(te_module *model, bool on);
/* Exchanges the gradients of one unit now if its requires_gradient_sync is set (by post_backward, if it has one), then
 * calls its root_post_backward. TE_ERR_INVALID for a module that is no unit. */
TE_API te_result te_fsdp_post_backward(te_module *unit);

/* The gradients that a call of te_stage_backward computes: a pipeline's schedule may split a backward pass in two. */
typedef enum te_backward_type {
    TE_BACKWARD_FULL = 0,  /* gradients of inputs and weights ("full") */
    TE_BACKWARD_INPUT = 1, /* gradients of inputs: te_backward, where modules with delay_wgrad_compute leave those of
                            * the weights for later ("input") */
    TE_BACKWARD_WEIGHT = 2 /* gradients of the weights that were left: te_backward_dw ("weight") */
} te_backward_type;
/* Options of te_stage_backward: the backward pass of a pipeline's stage for one of its microbatches.
 * Zero-initialised. */
typedef struct te_stage_backward_desc {
    te_backward_type type;           /* 0 => full */
    te_tensor *const *stage_outputs; /* [num_outputs] what the stage's forward has made: the last stage's loss, of one
                                      * element, or tensors whose gradients come from the next stage; not read with
                                      * TE_BACKWARD_WEIGHT */
    te_tensor *const *output_grads;  /* [num_outputs] gradients of stage_outputs, of the same shapes; a NULL entry: that
                                      * output is a loss; NULL: all outputs are losses */
    int num_outputs;                 /* length of stage_outputs and output_grads; at least 1, except with
                                      * TE_BACKWARD_WEIGHT */
    bool last_backward;              /* this is the stage's last backward pass of the schedule */
    bool reduce_grad_per_microbatch; /* a stage that te_fsdp_unit made a unit exchanges with each microbatch; false =>
                                      * with the last one */
} te_stage_backward_desc;
/* Runs the backward pass, and decides whether gradients are exchanged:
 *
 *     the stage is one unit by te_data_parallel     only if last_backward
 *     the stage is a unit by te_fsdp_unit           all flags of it false (reduce_grad_per_microbatch: true); if
 *                                                   last_backward, afterwards true, and all units below it exchange
 *     te_model_set_fsdp_optimizations(stage, true)  all flags of te_fsdp_units_visit's false; if last_backward and
 *                                                   te_step_get_is_optim_step, afterwards true, and these exchange,
 * then
 *                                                   each root_post_backward
 *     none of these                                 flags stay as they are
 *
 * The first row that fits applies. TE_ERR_INVALID for another type, or outputs that are missing; other errors as
 * te_backward_from and te_backward_dw. Source: patched_backward_maybe_with_nosync. */
TE_API te_result te_stage_backward(te_module *stage, const te_stage_backward_desc *desc);
