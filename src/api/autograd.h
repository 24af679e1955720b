/* api/autograd.h: the tape.
 *
 * A function of a tensor that requires a gradient is recorded; te_backward plays the record backwards. The tape retains
 * what the backward functions read, and releases it as they run. Gradients add up in the leaves (model parameters, and
 * tensors marked by te_tensor_set_requires_grad) until te_module_zero_grad, te_optimizer_zero_grad or
 * te_tensor_zero_grad.
 *
 * A leaf's gradient has memory of its own and may be written in place. The gradients of other tensors exist during
 * te_backward alone and may share memory: te_add gives one tensor to both of its inputs. A user's backward function
 * (te_record) reads the gradients that it is given and must not write them. */

/* Makes x a leaf (f32, f16, bf16; TE_ERR_DTYPE otherwise). With `on` false, functions of x are not recorded from here
 * on. Returns x. */
TE_API te_tensor *te_tensor_set_requires_grad(te_tensor *x, bool on);
/* Returns whether x is a leaf or a recorded function of one. */
TE_API bool te_tensor_requires_grad(const te_tensor *x);
/* Returns the sum of x's gradients so far, contiguous, of x's shape and format (borrowed), or NULL. The memory is
 * shared with no other gradient and no tensor of the caller, so it may be scaled or reduced in place. */
TE_API te_tensor *te_tensor_grad(const te_tensor *x);
/* Forgets x's gradient. */
TE_API void te_tensor_zero_grad(te_tensor *x);
/* Gives x a buffer of x's shape, f32 or x's format (retained; NULL removes it), into which the weight-gradient GEMMs of
 * modules with fuse_wgrad_accumulation add. TE_ERR_INVALID if main_grad shares memory with x or has a main_grad itself,
 * or if x is itself a gradient. TransformerEngine: main_grad. */
TE_API te_result te_tensor_set_main_grad(te_tensor *x, te_tensor *main_grad);
/* Returns the buffer that te_tensor_set_main_grad gave to x (borrowed), or NULL. */
TE_API te_tensor *te_tensor_main_grad(const te_tensor *x);
/* Gives x a second gradient: contiguous, of x's shape and any float format (retained; NULL removes it). Optimizers with
 * use_decoupled_grad read it in place of te_tensor_grad. te.h writes to it only where an optimizer zeroes gradients.
 * TransformerEngine: decoupled_grad. */
TE_API te_result te_tensor_set_decoupled_grad(te_tensor *x, te_tensor *grad);
/* Returns the gradient that te_tensor_set_decoupled_grad gave to x (borrowed), or NULL. */
TE_API te_tensor *te_tensor_decoupled_grad(const te_tensor *x);

/* Adds the gradient of a one-element tensor to every leaf that the tensor depends on. Asynchronous on CUDA. The record
 * up to `loss` is gone afterwards. A NULL loss, or a loss in a context with a pending error, changes nothing.
 *
 * Errors: TE_ERR_STATE if a parameter or activation that a backward function reads was written since the forward pass.
 * te_tensor_touch counts as a write. A weight whose quantized copy was used may change, since the copy belongs to the
 * forward pass. After an error the gradients that this call began are forgotten; gradients that existed before may have
 * been added to.
 *
 * A backward function may call te_backward too: for what it has recorded itself inside te_enable_grad_begin, or for a
 * part of the outer tape that the outer te_backward does not need any more (TE_ERR_STATE otherwise). Leaves that both
 * calls reach get the sum. */
TE_API te_result te_backward(te_tensor *loss);
/* Like te_backward, from a tensor of any size whose gradient is given: `grad` has the shape of y and is retained during
 * the call. */
TE_API te_result te_backward_from(te_tensor *y, te_tensor *grad);

/* Nothing is recorded from te_no_grad_begin to te_no_grad_end. Nests. */
TE_API te_result te_no_grad_begin(te_ctx *te);
TE_API void te_no_grad_end(te_ctx *te);
/* From te_enable_grad_begin to te_enable_grad_end functions are recorded even inside te_no_grad_begin or in a backward
 * function. Pairs may be nested. A backward function may call te_backward itself on the functions that it recorded;
 * those that it leaves on the tape are dropped when it returns. */
TE_API te_result te_enable_grad_begin(te_ctx *te);
TE_API void te_enable_grad_end(te_ctx *te);
/* Returns whether functions are recorded at present. */
TE_API bool te_grad_enabled(const te_ctx *te);

/* The function of te_checkpoint. It runs twice and must do the same each time. It reads parameters, `inputs` and
 * `user`; anything else that it reads must not change until te_backward. It fills `outputs` (tensors of the innermost
 * scope) and returns TE_OK or an error's code. */
typedef te_result (*te_checkpoint_fn)(te_ctx *te, void *user, te_tensor *const *inputs, int num_inputs,
                                      te_tensor **outputs, int num_outputs);
#define TE_MAX_CHECKPOINT_INPUTS 32  /* the most inputs of a te_checkpoint */
#define TE_MAX_CHECKPOINT_OUTPUTS 16 /* the most outputs of a te_checkpoint */
/* One call of te_checkpoint; the lists are read during the call. */
typedef struct te_checkpoint_desc {
    te_checkpoint_fn fn;      /* runs now, and again in te_backward */
    void *user;               /* handed to fn */
    size_t user_size;         /* bytes of `user` that are copied for the second run; 0 => no copy: `user` is borrowed
                               * until te_backward or the end of the scope */
    te_tensor *const *inputs; /* [num_inputs], retained until te_backward; inputs that require a gradient get one */
    int num_inputs;           /* 0 to TE_MAX_CHECKPOINT_INPUTS */
    te_tensor **outputs;      /* [num_outputs], written: the tensors that fn made, in the innermost scope; NULLs on
                               * failure */
    int num_outputs;          /* 1 to TE_MAX_CHECKPOINT_OUTPUTS */
    bool distribute_saved_activations; /* each rank of tp_group keeps only its part of the first input, and te_backward
                                        * gathers the parts. The first input is plain and the same on all ranks, and its
                                        * number of elements is a multiple of the number of ranks */
    te_group *tp_group;       /* with distribute_saved_activations: the ranks, which all make this call (borrowed until
                               * te_backward) */
} te_checkpoint_desc;
/* Activation checkpointing: fn runs without a record, so that the activations inside are freed at once. When
 * te_backward reaches the call, fn runs again from its inputs, recorded, and this record is played. Losses and
 * gradients have the same bits as without checkpointing: the second run sees the random states (named ones too),
 * autocast regions and scales of delayed recipes that the first run saw, and it does not record amaxes again. Nests to
 * any depth. With gradients disabled fn simply runs. Modules: te_module_set_checkpoint.
 *
 * TE_ERR_STATE for an input that is NULL, and if fn leaves a scope or a region of te_no_grad, te_enable_grad or
 * autocast open, or ends one that it has not begun (the open regions are as before the call then). te_backward gives
 * TE_ERR_STATE if fn made other outputs than the first time, called other modules, or a parameter was written in
 * between. Source: transformer_engine.pytorch.checkpoint; Chen et al. 2016. */
TE_API te_result te_checkpoint(te_ctx *te, const te_checkpoint_desc *desc);

/* Hooks on saved tensors (torch.autograd.graph.saved_tensors_hooks), to offload, compress or inspect them. Each tensor
 * that a tape node keeps for its backward function goes through `pack` when it is saved and through `unpack` right
 * before it is read. */
typedef struct te_saved_tensors_hooks {
    /* Gets a tensor that a node saves (borrowed; plain or quantized activations, no parameters) and returns a handle
     * that the node keeps in place of the tensor; NULL => the node keeps the tensor. Several nodes may save one
     * tensor. */
    void *(*pack)(void *user, te_tensor *x);
    /* Returns the tensor of a handle, in the shape and format that `pack` got (borrowed from the innermost scope, or
     * retained by the hooks' owner). Called once for a handle. */
    te_tensor *(*unpack)(void *user, void *handle);
    /* Releases a handle whose node is forgotten without being played; NULL => handles need no release. */
    void (*drop)(void *user, void *handle);
    void *user; /* handed to the three functions; must live until the nodes that were recorded in the region are gone */
} te_saved_tensors_hooks;
/* Begins a region whose tape nodes pack what they save, up to te_saved_tensors_end. Regions nest: the hooks of the
 * innermost one are called. hooks is copied. */
TE_API te_result te_saved_tensors_begin(te_ctx *te, const te_saved_tensors_hooks *hooks);
/* Ends the innermost region of hooks. TE_ERR_STATE if none is open. */
TE_API te_result te_saved_tensors_end(te_ctx *te);

/* A region of CPU offload; zero-initialised. */
typedef struct te_cpu_offload_desc {
    float fraction;       /* the part of the saved bytes that is offloaded, spread evenly over the region, up to 1; 0 =>
                           * all */
    int64_t min_bytes;    /* smaller tensors stay on the device; 0 => 512 KiB */
    int64_t window_bytes; /* device memory for copies under way and for the tensors that the backward pass reads first;
                           * 0 => twice the largest tensor that is offloaded */
} te_cpu_offload_desc;
/* Begins a region of CPU offload. Activations that tape nodes save up to te_cpu_offload_end are copied to pinned host
 * memory while the forward pass goes on, and copied back ahead of their use while the backward pass runs. The copies
 * run on a stream of their own. No bit changes.
 *
 * Parameters stay on the device. So does an activation that the caller's scope holds: the output of a layer that the
 * caller runs directly. A module that runs the layers (te_sequential_create, a class of the user's) holds none. Up to
 * window_bytes more than `fraction` leaves are on the device. The device waits where the link to the host is slower
 * than the computation. The host waits only while pinned memory is taken from the driver, which is done once
 * (te_memory_trim gives it back). On the CPU backend the copies are made as well.
 *
 * desc: copied; NULL => everything. Nests; inside te_saved_tensors_begin .. _end it takes the place of those hooks.
 * Errors: TE_ERR_INVALID for a value outside its range; TE_ERR_STATE in a graph's capture; TE_ERR_OUT_OF_MEMORY, given
 * by the call that saves a tensor, where pinned memory runs out. te_memory_get_stats counts the bytes. Source:
 * transformer_engine.pytorch.get_cpu_offload_context. */
TE_API te_result te_cpu_offload_begin(te_ctx *te, const te_cpu_offload_desc *desc);
/* Ends the innermost region. TE_ERR_STATE if te_cpu_offload_begin did not begin it. */
TE_API te_result te_cpu_offload_end(te_ctx *te);
