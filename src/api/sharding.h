/* api/sharding.h: data parallelism. Decides when ranks with the same model and different data exchange gradients, and
 * which of them keeps what of parameters, gradients and optimizer states.
 *
 * A unit is a module whose gradients are exchanged together: those of all parameters below it, except parameters of
 * units further down. They travel in buckets, of the last parameters first (te_data_parallel_desc.bucket_cap_mb).
 * te_backward begins to exchange a bucket when all of its gradients are complete (delay_wgrad_compute: at the end of
 * the last te_backward_dw). Buckets take turns in the reverse order of their modules in the model; one that is complete
 * early waits for those before it. A unit with requires_gradient_sync sums its gradients over its group in f32, divides
 * them by the number of ranks, and rounds them once. Other units keep their gradients, so several microbatches can
 * exchange once:
 *
 *     te_data_parallel(model, &(te_data_parallel_desc){ .group = group });
 *     for (int i = 0; i < n; i++) {
 *         te_model_set_requires_grad_sync(model, i == n - 1);
 *         te_backward(te_scale(loss_of(model, batch[i]), 1.0f / n));
 *     }
 *     te_optimizer_step(adam);                                           // the same on all ranks
 *
 * All ranks must make the same calls of te_backward. Each call must reach the parameters of the model on all ranks or
 * on none. A parameter without a gradient on this rank gets that of the other ranks, if there is one.
 *
 * Gradients travel in f32, or in 16 bits where the results are those of f32. That is so if all parameters of a bucket
 * have the same 16-bit format, none has a main_grad in f32, and
 *   - the unit is sharded: each rank gets its slices from all ranks, and adds them up in f32 (a custom group needs
 *     all_to_all); or
 *   - the unit is not sharded, has two ranks and bf16, and its sums are divided by a power of two.
 * Gradients near 2^-126, the smallest normal number, may lose bits: some are divided before they are added. The
 * formats decide, so all ranks must give the same parameters main_grads of the same formats.
 *
 * Overlap. A group of processes (NCCL) runs these collectives on a second stream, while the pass goes on: at most two
 * exchanges are under way, and all have ended when te_backward returns. In a capture the second stream becomes part of
 * the graph, and joins the first before te_backward returns. The group of threads, and a custom group, run them at
 * once.
 *
 * A rank that fails. If a forward (te_forward_with), a backward pass or a te_optimizer_step of this rank fails, or a
 * unit cannot be made, the other ranks of the groups that its model uses fail with this rank's error, in the call that
 * they wait in or in their next one: groups of units, of the modules' options, of earlier collectives in these modules,
 * and groups whose collectives the program has called itself since its last step. Ranks of other models' groups hear
 * nothing. So an error of a call between is told by the next of these calls. Each error is told once, until
 * te_clear_error. The group of threads goes on afterwards; a group of processes ends for good; for a custom group the
 * program must call te_group_abort.
 *
 * Exchanges stand between the other collectives of a backward pass, such as those of tensor or expert parallelism. Two
 * ranks that are together in another group must therefore reach the same units, else each may wait for the other. Where
 * they do not, leave requires_gradient_sync false in the pass; set it behind the pass, and call te_fsdp_post_backward
 * for each unit. If no node of the pass shows that it reads some trained parameter of a unit, the unit waits for all
 * nodes of te_record, whose functions may play a pass of their own (te_enable_grad_begin).
 *
 * Sharded units. With te_data_parallel_desc.shard each of the n ranks of the group owns one slice of each parameter of
 * the unit. Make units from the modules below to those above, then the optimizer:
 *
 *     te_data_parallel_desc d = { .group = group, .shard = TE_SHARD_PARAMETERS };
 *     for (each layer) te_fsdp_unit(layer, &d);
 *     te_fsdp_unit(model, &d);
 *     te_optimizer *adam = te_fused_adam_create(te, model, &options);
 *
 *   - The exchange gives each rank the gradient of its slices alone, by te_all_to_all, or in f32 by te_reduce_scatter.
 *     te_tensor_grad of the parameter is NULL then, and te_fsdp_get_slice has the gradient.
 *   - The optimizer's states and masters are those of the slices. te_optimizer_step updates them, rounds them to the
 *     parameter's format, or quantizes them (te_quantize_master_weights), and with TE_SHARD_OPTIMIZER gathers the new
 *     parameters: codes of 8 or 4 bits for weights that are stored quantized (te_post_all_gather_processing follows).
 *   - With TE_SHARD_PARAMETERS a parameter has memory only while it is needed: the forward of a module of the unit
 *     gathers the unit's parameters and releases them, and te_backward does the same. Beside the work of one unit the
 *     next one is gathered: the one that came next in the last forward, or backward pass (no_prefetch: when it is
 *     needed). One that does not come next after all costs its bytes once more.
 *     All ranks must run the same modules, forward and backward, in the same order. Functions that read parameters
 *     outside of a forward (te_tensor_to_f32) need te_fsdp_unshard before.
 *     A checkpoint (te_module_set_checkpoint) should not span units: the gradients of all of them wait for its end.
 *   - te_model_save and te_model_load write and read slices, also of tensor-parallel parts and of experts: a checkpoint
 *     opens in any layout.
 *   - te_optimizer_step, te_grad_scaler_unscale, te_clip_grad_norm and te_optimizer_set_scaled_state of remainders are
 *     calls that all ranks must make. Norms and overflows are those of all slices.
 *
 * The group of threads adds numbers in rank order. So a sharded unit has the bits of one that is whole, except with
 * clipping: the norm of all slices is the norm of the ranks' norms, and its last bits may differ.
 *
 * A slice is ceil(ceil(elements / n) / 8) * 8 elements of a plain parameter, or ceil(rows / n) rows of a weight that is
 * stored quantized; the last ranks may have fewer or none. Memory of a rank, for a model of P bytes of parameters, G of
 * gradients and S of optimizer states and masters, whose largest unit has p bytes, and whose largest bucket has e
 * elements that travel in w bytes each, 2 or 4 (up to rounding):
 *
 *     shard                   between steps     and at the most, in a step, beside activations
 *     TE_SHARD_NONE           P + S             G + w e
 *     TE_SHARD_OPTIMIZER      P + S/n           G/n + gradients of units not exchanged yet + 4 e + 4 e/n; or 2 p (step)
 *     TE_SHARD_PARAMETERS     P/n + S/n         G/n + gradients of one unit + 4 e + 4 e/n + p, or 2 p to gather; p for
 *                                               each unit around the one that runs (the model itself, as a rule)
 *
 * With TE_SHARD_NONE, NCCL (from 2.22 on) sums gradients where they are if they have that format already: w e is 0
 * then. A group that runs exchanges on a second stream has two of them, which is 4 e + 4 e/n, or w e, once more. The p
 * is the unit that is gathered ahead (no_prefetch: 0).
 *
 * Bytes that a rank sends in a step of m microbatches, of E elements in all, whose gradients travel in w bytes each:
 *
 *     TE_SHARD_NONE           2 (n - 1)/n w E
 *     TE_SHARD_OPTIMIZER      (n - 1)/n (w E + P)
 *     TE_SHARD_PARAMETERS     (n - 1)/n (w E + 2 m P); with no_reshard_after_forward (n - 1)/n (w E + m P); m P more
 *                             where a checkpoint that is not within one unit runs the forward again
 *
 * Without requires_gradient_sync nothing of a gradient is exchanged, and whole gradients, G, stay until a later pass
 * exchanges them. P is 2 E in bf16, and E in FP8; MXFP8 has two copies, 2 E. The amaxes of new codes are reduced beside
 * this: at the most E / 4 bytes, of MXFP8. Three things cost memory beside this: the transposed copies that codes of 8
 * bits, other than MXFP8's, get where they are gathered, which are as large as the codes; views and joined copies of
 * parameters that the tape saves (parameters_split); and, with delayed scaling, quantized copies of weights that are
 * stored in high precision.
 *
 * A model that no rank could hold: te_hf_open with te_hf_desc.units reads a folder unit by unit, and te_hf_save writes
 * one, with the parameters of one unit in memory, beside the slices, and those of one tensor of the file. Or make the
 * model with the device TE_PARAMS_META, and unit by unit call te_module_reset_parameters, which allocates the unit's
 * parameters, and te_fsdp_unit, which releases them again. Then te_model_load reads the slices.
 *
 * Graphs. A te_graph may hold passes and te_optimizer_step of units of each kind, if the group queues its collectives
 * (te_group_desc.captures: NCCL; the group of threads does not). A launch has the bits of the calls. It gathers
 * parameters from the slices as they are then, into memory of the graph. te_graph_begin releases all parameters that
 * are gathered, as te_fsdp_reshard does, and te_graph_launch those of the graph's units. TE_ERR_STATE:
 *   - in a capture, for the exchange of a gradient that this rank does not have, since the host asks whether other
 *     ranks have it;
 *   - in a capture, for the exchange of a sharded parameter's gradient that was there before te_graph_begin, since each
 *     launch would add to it;
 *   - in a capture, for te_grad_scaler_step of sharded weights that are stored quantized, since the host asks whether
 *     the step is skipped;
 *   - for te_graph_begin and te_graph_launch inside of a forward of a unit whose parameters are sharded;
 *   - for te_graph_launch, if a sharded unit of the graph was taken back.
 *
 * Errors of sharded units: TE_ERR_UNSUPPORTED for hybrid and custom quantizers, and for states in f16 or e4m3;
 * TE_ERR_STATE for parameters that were added, cast or unfrozen after the unit was made, for a step with gradients that
 * were not exchanged, and for reading a parameter that is not gathered.
 *
 * Source: torch.nn.parallel.DistributedDataParallel, torch.distributed.fsdp (FSDPModule), ZeRO (Rajbhandari 2019),
 * nemo_automodel.components.moe.fsdp_mixin. */

/* The flags of a unit (FSDPModule's set_is_last_backward and so on). All are true in a new unit. */
typedef struct te_fsdp_state {
    bool is_last_backward;       /* the next backward pass is the last one of the step. For post_backward functions;
                                  * te.h's own exchange does not read it */
    bool reshard_after_backward; /* sharded parameters are released after the backward pass; false => they stay until
                                  * te_optimizer_step. Parameters gathered by post_backward functions may be freed */
    bool requires_gradient_sync; /* gradients are exchanged */
} te_fsdp_state;

/* Names the state of a unit that is divided: each rank of the unit's group keeps one slice of it. */
typedef enum te_shard {
    TE_SHARD_NONE = 0,      /* nothing: all is whole on each rank (DistributedDataParallel) */
    TE_SHARD_OPTIMIZER = 1, /* optimizer states, masters, and gradients after their exchange (ZeRO-2) */
    TE_SHARD_PARAMETERS = 2 /* the parameters as well (ZeRO-3; FSDP's FULL_SHARD) */
} te_shard;

/* How the gradients of a unit are exchanged. Zero-initialised; copied. */
typedef struct te_data_parallel_desc {
    te_group *group;               /* the ranks that have the same module and other data; a group of the module's
                                    * context (borrowed for the unit's lifetime). NULL => one rank */
    float gradient_divide_factor;  /* divisor of the sums; 0 => the number of ranks */
    bool no_init_sync;             /* te_data_parallel: parameters and buffers keep their values; false => rank 0's */
    te_shard shard;                /* what each rank keeps a slice of; 0 => nothing */
    bool no_reshard_after_forward; /* TE_SHARD_PARAMETERS: gathered parameters stay until the unit's backward pass has
                                    * read them (SHARD_GRAD_OP of FSDP); false => they are released after the forward,
                                    * and gathered again. For the unit of a whole model, as FSDP2 has it: backward
                                    * begins with its parameters, and nothing runs beside their gathering */
    bool no_prefetch;              /* TE_SHARD_PARAMETERS: the unit is gathered when it is needed; false => one unit
                                    * ahead, beside the unit before it */
    float bucket_cap_mb;           /* gradients are exchanged as soon as so many MiB of them, in f32, are complete;
                                    * 0 => 25 (DistributedDataParallel's). Smaller numbers need less memory and more
                                    * collectives */
    /* The program's own exchange; not with `shard`. It is called after te_backward has computed the gradients, if
     * requires_gradient_sync is set. Returns TE_OK or an error code. NULL => te.h's exchange. */
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
 *   gradient_divide_factor or bucket_cap_mb that is negative or not finite.
 *   TE_ERR_STATE inside a graph's capture, and if ranks have units of other parameters (names, shapes, formats, which
 *   are trained), or another bucket_cap_mb: the error names both. With no_init_sync the first exchange finds this.
 * Allocates memory. Syncs. */
TE_API te_result te_data_parallel(te_module *m, const te_data_parallel_desc *desc);
/* Makes m one of several units of its model (fully_shard); a NULL desc undoes that. Parameters keep their values, so
 * all ranks must have the same ones (seed alike, or load a file). Units below m must be made before it if it is
 * sharded. All ranks must call it if it is sharded, also to undo that, which gathers the parameters. Errors: as
 * te_data_parallel, and TE_ERR_INVALID if a parameter belongs to another sharded unit too, if `shard` comes with
 * post_backward, or if the unit exists with another `shard` or group. Ranks whose units differ find it here if the unit
 * is sharded, and else in the first exchange. */
TE_API te_result te_fsdp_unit(te_module *m, const te_data_parallel_desc *desc);
/* Writes the flags of a unit into *state, and returns true; false for a module that is not a unit. */
TE_API bool te_fsdp_get_state(const te_module *m, te_fsdp_state *state);
/* This rank's slice of a sharded parameter. */
typedef struct te_fsdp_slice {
    te_group *group;       /* the ranks that share the parameter (borrowed) */
    te_shard shard;        /* TE_SHARD_OPTIMIZER or TE_SHARD_PARAMETERS */
    int64_t start, length; /* the slice, in elements of the flattened parameter; length 0: this rank has none */
    te_tensor *grad;       /* gradient of the slice after the exchange, [length] (borrowed); NULL: there is none */
} te_fsdp_slice;
/* Writes the slice that this rank has of a parameter into *slice (may be NULL), and returns true; false for a parameter
 * that is not sharded. */
TE_API bool te_fsdp_get_slice(const te_tensor *param, te_fsdp_slice *slice);
/* Gathers the parameters of all units at and below m, to be read or written by the program (FSDPModule.unshard,
 * FSDP.summon_full_params). All ranks must call it, and must write the same values. They stay until te_fsdp_reshard,
 * until te_optimizer_step, or until a forward or backward pass releases them; in a capture, until te_graph_end at the
 * latest. Does nothing for parameters that are whole. Allocates. Syncs if collectives of the group sync. */
TE_API te_result te_fsdp_unshard(te_module *m);
/* Releases the parameters that te_fsdp_unshard has gathered. This rank's slices of those that were written get the new
 * values. Of no effect inside of the unit's forward. */
TE_API te_result te_fsdp_reshard(te_module *m);
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
