/* api/autograd.h: automatic differentiation with a tape, the record of the functions that ran.
 *
 * If an input of a function requires a gradient, the function is recorded on the tape. te_backward runs the backward
 * functions of the tape, last first. The tape retains what the backward functions read, and releases it as they run.
 * Gradients add up in the leaves (model parameters, and tensors marked by te_tensor_set_requires_grad) until
 * te_module_zero_grad, te_optimizer_zero_grad or te_tensor_zero_grad.
 *
 * A leaf's gradient has memory of its own and may be written in place. The gradients of other tensors exist during
 * te_backward alone and may share memory: both inputs of te_add get one and the same gradient tensor. A user's backward
 * function (te_record) reads the gradients that it is given and must not write them. */

/* Makes x a leaf (f32, f16, bf16; TE_ERR_DTYPE otherwise). If the argument `on` is false, functions of x are not
 * recorded from now on. Returns x. */
TE_API te_tensor *te_tensor_set_requires_grad(te_tensor *x, bool on);
/* Returns whether x is a leaf or a recorded function of one. */
TE_API bool te_tensor_requires_grad(const te_tensor *x);
/* Returns the sum of x's gradients so far (borrowed), or NULL if x has none. It is contiguous and has x's shape and
 * format. No other gradient and no tensor of the caller shares its memory, so it may be scaled or reduced in place. */
TE_API te_tensor *te_tensor_grad(const te_tensor *x);
/* Forgets x's gradient. */
TE_API void te_tensor_zero_grad(te_tensor *x);
/* Gives x the buffer main_grad (retained; NULL removes it), of x's shape, in f32 or x's format. The weight-gradient
 * GEMMs of modules with fuse_wgrad_accumulation add to it. TE_ERR_INVALID if main_grad shares memory with x or has a
 * main_grad itself, or if x is itself a gradient. TransformerEngine: main_grad. */
TE_API te_result te_tensor_set_main_grad(te_tensor *x, te_tensor *main_grad);
/* Returns the buffer that te_tensor_set_main_grad gave to x (borrowed), or NULL. */
TE_API te_tensor *te_tensor_main_grad(const te_tensor *x);
/* Gives x a second gradient `grad` (retained; NULL removes it), contiguous, of x's shape, in any float format.
 * Optimizers with use_decoupled_grad read it in place of te_tensor_grad. te.h writes to it only where an optimizer
 * zeroes gradients. TransformerEngine: decoupled_grad. */
TE_API te_result te_tensor_set_decoupled_grad(te_tensor *x, te_tensor *grad);
/* Returns the gradient that te_tensor_set_decoupled_grad gave to x (borrowed), or NULL. */
TE_API te_tensor *te_tensor_decoupled_grad(const te_tensor *x);

/* Computes the gradient of `loss`, a tensor of one element, with respect to every leaf that it depends on, and adds it
 * to the leaf's gradient. Asynchronous on CUDA. Afterwards the tape no longer has the functions that led to `loss`.
 * With a NULL loss, or while the context has a pending error, the call changes nothing.
 *
 * Errors: TE_ERR_STATE if a parameter or activation that a backward function reads was written since the forward pass.
 * te_tensor_touch counts as a write. A weight that the forward pass read as a quantized copy may change, since the
 * backward pass reads that copy. After an error, gradients that did not exist before the call are dropped. Gradients
 * that existed before may have received a part of the sum.
 *
 * A backward function may itself call te_backward on functions that it has recorded after te_enable_grad_begin, or on
 * a part of the tape that the outer te_backward does not need any more (TE_ERR_STATE otherwise). A leaf that both
 * calls reach gets the sum of both gradients. */
TE_API te_result te_backward(te_tensor *loss);
/* Like te_backward, but starts from a tensor y of any size, whose gradient is `grad`. `grad` has the shape of y and is
 * retained during the call. */
TE_API te_result te_backward_from(te_tensor *y, te_tensor *grad);

/* No function is recorded from te_no_grad_begin to te_no_grad_end. Pairs may be nested. */
TE_API te_result te_no_grad_begin(te_ctx *te);
TE_API void te_no_grad_end(te_ctx *te);
/* From te_enable_grad_begin to te_enable_grad_end functions are recorded, even in a region of te_no_grad_begin or in a
 * backward function. Pairs may be nested. A backward function may itself call te_backward on the functions that it
 * recorded. Recorded functions that it leaves on the tape are dropped when it returns. */
TE_API te_result te_enable_grad_begin(te_ctx *te);
TE_API void te_enable_grad_end(te_ctx *te);
/* Returns whether functions are recorded at present. */
TE_API bool te_grad_enabled(const te_ctx *te);

/* The function that te_checkpoint runs, in the forward pass and again in the backward pass. It must do the same each
 * time. It reads parameters, `inputs` and `user`; anything else that it reads must not change until te_backward. It
 * fills `outputs` with tensors of the innermost scope, and returns TE_OK or an error code. */
typedef te_result (*te_checkpoint_fn)(te_ctx *te, void *user, te_tensor *const *inputs, int num_inputs,
                                      te_tensor **outputs, int num_outputs);
#define TE_MAX_CHECKPOINT_INPUTS 32  /* maximum number of inputs of te_checkpoint */
#define TE_MAX_CHECKPOINT_OUTPUTS 16 /* maximum number of outputs of te_checkpoint */
/* The arguments of te_checkpoint. The lists of inputs and outputs are read during the call. */
typedef struct te_checkpoint_desc {
    te_checkpoint_fn fn;      /* runs now, and again in te_backward */
    void *user;               /* handed to fn */
    size_t user_size;         /* number of bytes of `user` that are copied for the run in te_backward; 0 => nothing is
                               * copied, and `user` is borrowed until te_backward or the end of the scope */
    te_tensor *const *inputs; /* [num_inputs], retained until te_backward; each input that requires a gradient receives
                               * it */
    int num_inputs;           /* 0 to TE_MAX_CHECKPOINT_INPUTS */
    te_tensor **outputs;      /* [num_outputs], written: the tensors that fn made, which belong to the innermost scope;
                               * all NULL on failure */
    int num_outputs;          /* 1 to TE_MAX_CHECKPOINT_OUTPUTS */
    bool distribute_saved_activations; /* each rank of tp_group keeps only its part of the first input, and te_backward
                                        * gathers the parts. The first input must be plain and the same on all ranks,
                                        * and its number of elements must be a multiple of the number of ranks */
    te_group *tp_group;       /* read with distribute_saved_activations: the ranks that keep the parts; each of these
                               * ranks must make this call (borrowed until te_backward) */
} te_checkpoint_desc;
/* Runs fn with activation checkpointing. fn first runs with nothing recorded on the tape, so that its activations are
 * freed at once. When te_backward reaches this call, it runs fn again from the inputs, records it, and runs the
 * backward functions of the record. Losses and gradients have the same bits as without checkpointing: the second run
 * has the same random states (also those of te_rng_tracker_add), autocast regions and scales of delayed recipes as the
 * first. The second run does not record amaxes again. Calls may be nested to any depth. While gradients
 * are disabled, fn simply runs. For modules there is te_module_set_checkpoint.
 *
 * TE_ERR_STATE for an input that is NULL.
 * TE_ERR_STATE if fn leaves a scope or a region of te_no_grad, te_enable_grad or autocast open, or ends one that it has
 * not begun. The call then restores the regions that were open before.
 * te_backward gives TE_ERR_STATE if fn made other outputs or called other modules than the first time, or if a
 * parameter was written between the two runs.
 * Source: transformer_engine.pytorch.checkpoint; Chen et al. 2016. */
TE_API te_result te_checkpoint(te_ctx *te, const te_checkpoint_desc *desc);

/* User functions that offload, compress or inspect the tensors that the tape saves
 * (torch.autograd.graph.saved_tensors_hooks). When a node of the tape saves a tensor for its backward function, `pack`
 * is called; right before the backward function reads the tensor, `unpack` is called. */
typedef struct te_saved_tensors_hooks {
    /* Gets a tensor that a node saves (borrowed): a plain or quantized activation, never a parameter. Returns a handle,
     * which the node keeps in place of the tensor. If it returns NULL, the node keeps the tensor itself. Several nodes
     * may save the same tensor. */
    void *(*pack)(void *user, te_tensor *x);
    /* Returns the tensor of a handle, in the shape and format that `pack` got. The tensor belongs to the innermost
     * scope, or the owner of the hooks retains it. Called once per handle. */
    te_tensor *(*unpack)(void *user, void *handle);
    /* Releases the handle of a node that is dropped before the node's backward function has run. NULL => handles need
     * no release. */
    void (*drop)(void *user, void *handle);
    void *user; /* handed to the three functions; must live until the nodes that were recorded in the region are gone */
} te_saved_tensors_hooks;
/* Begins a region that ends at te_saved_tensors_end. Tape nodes that are recorded in the region call `hooks` for
 * the tensors that they save. Regions may be nested: then the hooks of the innermost one are called. `hooks` is
 * copied. */
TE_API te_result te_saved_tensors_begin(te_ctx *te, const te_saved_tensors_hooks *hooks);
/* Ends the innermost region of te_saved_tensors_begin. TE_ERR_STATE if none is open. */
TE_API te_result te_saved_tensors_end(te_ctx *te);

/* Options of te_cpu_offload_begin; zero-initialise. */
typedef struct te_cpu_offload_desc {
    float fraction;       /* fraction of the saved bytes that is offloaded, at most 1, spread evenly over the region; 0
                           * => all */
    int64_t min_bytes;    /* tensors of fewer bytes stay on the device; 0 => 512 KiB */
    int64_t window_bytes; /* bytes of device memory for copies in progress and for the tensors that the backward pass
                           * reads first; 0 => twice the largest tensor that is offloaded */
} te_cpu_offload_desc;
/* Begins a region of CPU offload. Up to te_cpu_offload_end, activations that tape nodes save are copied to pinned host
 * memory while the forward pass goes on. While the backward pass runs, they are copied back before they are needed. The
 * copies run on a stream of their own. Results have the same bits as without offload.
 *
 * Parameters stay on the device. So does an activation that the caller's scope holds, such as the output of a layer
 * that the caller runs directly. If a module runs the layers (te_sequential_create, or a class of the user's), the
 * caller's scope does not hold their outputs. The saved bytes on the device are those that `fraction` does not offload,
 * and up to window_bytes more. The device waits where the link to the host is slower than the computation. The host
 * waits only while the driver allocates pinned memory. This memory is kept for later calls until te_memory_trim. On the
 * CPU backend the copies are made as well.
 *
 * desc is copied; NULL means the defaults. Regions may be nested. If the region lies inside a region of
 * te_saved_tensors_begin, the hooks of that outer region are not called. te_memory_get_stats counts the
 * offloaded bytes.
 * TE_ERR_INVALID for a value outside its range.
 * TE_ERR_STATE in a graph's capture.
 * TE_ERR_OUT_OF_MEMORY, from the call that saves a tensor, if pinned memory runs out.
 * Source: transformer_engine.pytorch.get_cpu_offload_context. */
TE_API te_result te_cpu_offload_begin(te_ctx *te, const te_cpu_offload_desc *desc);
/* Ends the innermost region of CPU offload. TE_ERR_STATE if the innermost region is one of te_saved_tensors_begin, or
 * none is open. */
TE_API te_result te_cpu_offload_end(te_ctx *te);
