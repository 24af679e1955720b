/* api/autograd.h: automatic differentiation with a tape, the record of the functions that ran.
 *
 * A function is recorded if one of its inputs requires a gradient. te_backward runs the backward functions of the tape,
 * last first. The tape retains what they read, and releases it as they run. Gradients add up in the leaves (model
 * parameters, and tensors of te_tensor_set_requires_grad) until te_module_zero_grad, te_optimizer_zero_grad or
 * te_tensor_zero_grad.
 *
 * A leaf's gradient has memory of its own and may be written in place. Gradients of other tensors exist during
 * te_backward alone and may share memory. A user's backward function (te_record) must not write them. */

/* Makes x a leaf (f32, f16, bf16; TE_ERR_DTYPE otherwise). `on` false => functions of x are not recorded from now on.
 * Returns x. */
TE_API te_tensor *te_tensor_set_requires_grad(te_tensor *x, bool on);
/* Returns whether x is a leaf or a recorded function of one. */
TE_API bool te_tensor_requires_grad(const te_tensor *x);
/* Returns the sum of x's gradients so far (borrowed), contiguous, in x's shape and format; NULL if x has none. The sum
 * may be written in place. */
TE_API te_tensor *te_tensor_grad(const te_tensor *x);
/* Forgets x's gradient. */
TE_API void te_tensor_zero_grad(te_tensor *x);
/* Gives x the buffer main_grad (retained; NULL removes it), of x's shape, in f32 or x's format. Weight-gradient GEMMs
 * with fuse_wgrad_accumulation add to it. TE_ERR_INVALID if the buffer shares memory with x or has a main_grad of its
 * own, or if x is itself a gradient. TransformerEngine: main_grad. */
TE_API te_result te_tensor_set_main_grad(te_tensor *x, te_tensor *main_grad);
/* Returns the buffer that te_tensor_set_main_grad gave to x (borrowed), or NULL. */
TE_API te_tensor *te_tensor_main_grad(const te_tensor *x);
/* Gives x a second gradient `grad` (retained; NULL removes it), contiguous, of x's shape, in any float format.
 * Optimizers with use_decoupled_grad read it in place of te_tensor_grad. The caller fills it: te.h writes it only in
 * te_grad_scaler_unscale, and when it sets gradients to zero. TransformerEngine: decoupled_grad. */
TE_API te_result te_tensor_set_decoupled_grad(te_tensor *x, te_tensor *grad);
/* Returns the gradient that te_tensor_set_decoupled_grad gave to x (borrowed), or NULL. */
TE_API te_tensor *te_tensor_decoupled_grad(const te_tensor *x);

/* Computes the gradient of `loss`, a tensor of one element, with respect to every leaf. Adds it to the leaf's gradient.
 * Asynchronous on CUDA. The functions that led to `loss` then leave the tape. With a NULL loss, or while the context
 * has an error, the call changes nothing.
 *
 * TE_ERR_STATE if a parameter or activation that a backward function reads was written since the forward pass.
 * te_tensor_touch counts as a write. A weight that is only read as a quantized copy may change.
 * After an error, new gradients are dropped. Older gradients may have received a part of the sum.
 *
 * A backward function may itself call te_backward. This inner call may run functions that the backward function has
 * recorded after te_enable_grad_begin, and functions that are no part of the outer te_backward. It gives TE_ERR_STATE
 * if it reaches a function that is part of the outer te_backward, even one that has already run. Leaves get the sum of
 * the gradients of both calls. */
TE_API te_result te_backward(te_tensor *loss);
/* Like te_backward, but starts from a tensor y of any size with the gradient `grad`, of y's shape (retained during the
 * call). */
TE_API te_result te_backward_from(te_tensor *y, te_tensor *grad);

/* No function is recorded from te_no_grad_begin to te_no_grad_end. Pairs may be nested. */
TE_API te_result te_no_grad_begin(te_ctx *te);
TE_API void te_no_grad_end(te_ctx *te);
/* From te_enable_grad_begin to te_enable_grad_end functions are recorded, even inside te_no_grad_begin or a backward
 * function. Pairs may be nested. When a backward function returns, functions that it left on the tape are dropped. */
TE_API te_result te_enable_grad_begin(te_ctx *te);
TE_API void te_enable_grad_end(te_ctx *te);
/* Returns whether functions are recorded at present. */
TE_API bool te_grad_enabled(const te_ctx *te);

/* The function that te_checkpoint runs, in the forward pass and again in the backward pass. It must do the same each
 * time. It reads parameters, `inputs` and `user`; anything else that it reads must not change until te_backward. It
 * fills `outputs` with tensors of the innermost scope. Returns TE_OK or an error code. */
typedef te_result (*te_checkpoint_fn)(te_ctx *te, void *user, te_tensor *const *inputs, int num_inputs,
                                      te_tensor **outputs, int num_outputs);
#define TE_MAX_CHECKPOINT_INPUTS 32  /* maximum number of inputs of te_checkpoint */
#define TE_MAX_CHECKPOINT_OUTPUTS 16 /* maximum number of outputs of te_checkpoint */
/* The arguments of te_checkpoint. The lists of inputs and outputs are read during the call. */
typedef struct te_checkpoint_desc {
    te_checkpoint_fn fn;      /* runs now, and again in te_backward */
    void *user;               /* handed to fn */
    size_t user_size;         /* number of bytes of `user` to copy for te_backward; 0 => `user` is borrowed until
                               * te_backward or the end of the scope */
    te_tensor *const *inputs; /* [num_inputs], retained until te_backward; each input that requires a gradient receives
                               * it */
    int num_inputs;           /* 0 to TE_MAX_CHECKPOINT_INPUTS */
    te_tensor **outputs;      /* [num_outputs], written: fn's tensors, in the innermost scope; all NULL on failure */
    int num_outputs;          /* 1 to TE_MAX_CHECKPOINT_OUTPUTS */
    bool distribute_saved_activations; /* each rank of tp_group keeps its part of the first input, and te_backward
                                        * gathers the parts. The first input must not be quantized, and must be the same
                                        * on all ranks. The number of its elements must be a multiple of the number of
                                        * ranks */
    te_group *tp_group;       /* the ranks of distribute_saved_activations, which all must make this call (borrowed
                               * until te_backward) */
} te_checkpoint_desc;
/* Runs fn with activation checkpointing: without recording, so that activations are freed at once. te_backward runs fn
 * again from the inputs, records it, and runs its backward functions. Calls may be nested to any depth. While gradients
 * are disabled, fn simply runs. For modules there is te_module_set_checkpoint.
 *
 * Losses and gradients have the same bits as without checkpointing. The second call of fn has the random states (also
 * of te_rng_tracker_add), autocast regions and scales of the first. It records no amaxes.
 *
 * TE_ERR_STATE for an input that is NULL.
 * TE_ERR_STATE if fn leaves a scope or region (te_no_grad, te_enable_grad, autocast) open, or ends one that it did not
 * begin. The earlier regions are then restored.
 * te_backward gives TE_ERR_STATE if fn made other outputs or called other modules than the first time.
 * te_backward gives TE_ERR_STATE if a parameter was written in between.
 * Source: transformer_engine.pytorch.checkpoint; Chen et al. 2016. */
TE_API te_result te_checkpoint(te_ctx *te, const te_checkpoint_desc *desc);

/* User functions that offload, compress or inspect the tensors that the tape saves
 * (torch.autograd.graph.saved_tensors_hooks). A tape node calls `pack` when it saves a tensor, and `unpack` right
 * before its backward function reads the tensor. */
typedef struct te_saved_tensors_hooks {
    /* Gets a tensor that a node saves (borrowed): a plain or quantized activation, never a parameter. Returns the
     * handle that the node keeps instead; NULL => it keeps the tensor. Several nodes may save one tensor. */
    void *(*pack)(void *user, te_tensor *x);
    /* Returns the tensor of a handle, in the shape and format that `pack` got. The tensor belongs to the innermost
     * scope or is retained by the hooks' owner. Called once per handle. */
    te_tensor *(*unpack)(void *user, void *handle);
    /* Releases the handle of a node that is dropped before its backward function. NULL => no release is needed. */
    void (*drop)(void *user, void *handle);
    void *user; /* handed to the three functions; must outlive the nodes recorded in the region */
} te_saved_tensors_hooks;
/* Begins a region that ends at te_saved_tensors_end. Tape nodes recorded in it call `hooks` (copied) for the tensors
 * that they save. Regions may be nested: the innermost hooks are called. */
TE_API te_result te_saved_tensors_begin(te_ctx *te, const te_saved_tensors_hooks *hooks);
/* Ends the innermost region of te_saved_tensors_begin. TE_ERR_STATE if none is open. */
TE_API te_result te_saved_tensors_end(te_ctx *te);

/* Options of te_cpu_offload_begin; zero-initialise. */
typedef struct te_cpu_offload_desc {
    float fraction;       /* fraction of the saved bytes that is offloaded, at most 1, spread evenly over the region; 0
                           * => all */
    int64_t min_bytes;    /* tensors of fewer bytes stay on the device; 0 => 512 KiB */
    int64_t window_bytes; /* bytes of device memory for copies in progress and for the tensors that the backward pass
                           * reads first; 0 => twice the largest offloaded tensor */
} te_cpu_offload_desc;
/* Begins a region of CPU offload. Up to te_cpu_offload_end, activations that tape nodes save are copied to pinned host
 * memory. The backward pass copies them back before they are needed. On CUDA the copies run on a stream of their own;
 * the CPU backend copies too. Results have the same bits as without offload.
 *
 * Parameters and activations that the caller's scope holds stay on the device. The caller's scope holds the output of a
 * layer that the caller runs directly. It does not hold outputs of layers inside a module (te_sequential_create, or a
 * user's class). The part of the saved bytes that `fraction` leaves out also stays on the device. The tensors that were
 * saved last are copied to the host, but also stay on the device, up to window_bytes, because the backward pass reads
 * them first.
 * The device waits where the link to the host is slower than the computation. The host waits only while the driver
 * allocates pinned memory, which is kept until te_memory_trim.
 *
 * desc is copied; NULL => the defaults. Regions may be nested. Hooks of an outer te_saved_tensors_begin are not called.
 * te_memory_get_stats counts the offloaded bytes.
 * TE_ERR_INVALID for a value outside its range.
 * TE_ERR_STATE in a graph's capture.
 * TE_ERR_OUT_OF_MEMORY, from the call that saves a tensor, if pinned memory runs out.
 * Source: transformer_engine.pytorch.get_cpu_offload_context. */
TE_API te_result te_cpu_offload_begin(te_ctx *te, const te_cpu_offload_desc *desc);
/* Ends the innermost region of CPU offload. TE_ERR_STATE if none is open, or a te_saved_tensors_begin is open
 * inside. */
TE_API te_result te_cpu_offload_end(te_ctx *te);
