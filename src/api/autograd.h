/* api/autograd.h: the tape.
 *
 * A function of a tensor that requires a gradient records itself; te_backward plays the record backwards. The tape
 * retains what the backward functions read, and releases it as they run. Gradients add up in the leaves (model
 * parameters, and tensors marked by te_tensor_set_requires_grad) until te_module_zero_grad, te_optimizer_zero_grad or
 * te_tensor_zero_grad.
 *
 * A leaf's gradient has memory of its own and may be written in place. The gradients of other tensors exist during
 * te_backward alone and may share memory: te_add gives one tensor to both of its inputs. A user's backward function
 * (te_record) reads the gradients that it is given and writes none of them. */

/* Makes x a leaf (f32, f16, bf16; TE_ERR_DTYPE otherwise), or with `on` false leaves it out of what is recorded from
 * here on. Returns x. */
TE_API te_tensor *te_tensor_set_requires_grad(te_tensor *x, bool on);
/* Is x a leaf, or a recorded function of one? */
TE_API bool te_tensor_requires_grad(const te_tensor *x);
/* The sum of the gradients so far, [shape of x] in x's format, contiguous (borrowed), or NULL. No other gradient and no
 * tensor of the caller's has the same memory, so it may be scaled or reduced in place. */
TE_API te_tensor *te_tensor_grad(const te_tensor *x);
/* Forgets the gradient. */
TE_API void te_tensor_zero_grad(te_tensor *x);
/* Gives x a buffer [shape of x], f32 or x's format (retained; NULL takes it away), into which weight-gradient GEMMs of
 * modules with fuse_wgrad_accumulation add. TE_ERR_INVALID if it lies in x's own memory, or is a parameter with such a
 * buffer itself. TransformerEngine: main_grad. */
TE_API te_result te_tensor_set_main_grad(te_tensor *x, te_tensor *main_grad);
/* That buffer (borrowed), or NULL. */
TE_API te_tensor *te_tensor_main_grad(const te_tensor *x);
/* Gives x a gradient of any float format [shape of x] (retained; NULL takes it away), contiguous, which optimizers with
 * use_decoupled_grad read in place of te_tensor_grad; nothing of te.h writes it but their zeros. TransformerEngine:
 * decoupled_grad. */
TE_API te_result te_tensor_set_decoupled_grad(te_tensor *x, te_tensor *grad);
/* That gradient (borrowed), or NULL. */
TE_API te_tensor *te_tensor_decoupled_grad(const te_tensor *x);

/* Adds the gradients of a one-element tensor to every leaf that it depends on. Asynchronous on CUDA. The record up to
 * `loss` is gone afterwards. A NULL loss, or one in a context with a pending error, changes nothing.
 *
 * Errors: TE_ERR_STATE if a parameter or activation that a backward function reads was written since the forward pass
 * (te_tensor_touch counts; a quantized copy belongs to the forward, so the weight that it was made of may change).
 * After an error the gradients that this call began are forgotten; those that existed before may have been added to.
 *
 * A backward function may call it too: for what it has recorded itself inside te_enable_grad_begin, or for a part of
 * the outer tape, which the outer te_backward must then not need (TE_ERR_STATE). Leaves that both reach get the sum. */
TE_API te_result te_backward(te_tensor *loss);
/* The same from a tensor of any size, with its gradient given: [shape of y], retained during the call. */
TE_API te_result te_backward_from(te_tensor *y, te_tensor *grad);

/* From te_no_grad_begin to te_no_grad_end nothing is recorded. Nests. */
TE_API void te_no_grad_begin(te_ctx *te);
TE_API void te_no_grad_end(te_ctx *te);
/* From te_enable_grad_begin to te_enable_grad_end functions are recorded although recording is off: inside
 * te_no_grad_begin, or in a backward function. Nests. A backward function's record is played by a te_backward of its
 * own, or forgotten when the function returns. */
TE_API void te_enable_grad_begin(te_ctx *te);
TE_API void te_enable_grad_end(te_ctx *te);
/* Are functions recorded here? */
TE_API bool te_grad_enabled(const te_ctx *te);

/* The function of te_checkpoint. It must do the same each time, and read parameters, `inputs` and `user` alone:
 * anything else that it reads must not change until te_backward. It fills `outputs` (tensors of the innermost scope)
 * and returns TE_OK, or an error's code. */
typedef te_result (*te_checkpoint_fn)(te_ctx *te, void *user, te_tensor *const *inputs, int num_inputs,
                                      te_tensor **outputs, int num_outputs);
#define TE_MAX_CHECKPOINT_INPUTS 32  /* the most inputs of a te_checkpoint */
#define TE_MAX_CHECKPOINT_OUTPUTS 16 /* the most outputs of a te_checkpoint */
/* One call of te_checkpoint; the lists are read during the call. */
typedef struct te_checkpoint_desc {
    te_checkpoint_fn fn;      /* runs now, and again in te_backward */
    void *user;               /* handed to fn */
    size_t user_size;         /* bytes of `user` that are copied for the second run; 0 => `user` is borrowed until
                               * te_backward or the end of the scope */
    te_tensor *const *inputs; /* [num_inputs], retained until te_backward; those that require a gradient get one */
    int num_inputs;           /* 0 to TE_MAX_CHECKPOINT_INPUTS */
    te_tensor **outputs;      /* [num_outputs], written: what fn has made, in the innermost scope; NULLs on failure */
    int num_outputs;          /* 1 to TE_MAX_CHECKPOINT_OUTPUTS */
    bool distribute_saved_activations; /* each rank of tp_group keeps its part of the first input, which is the same on
                                        * all of them, and te_backward gathers it: plain, and of a number of elements
                                        * that the ranks divide */
    te_group *tp_group;       /* with distribute_saved_activations: the ranks that call this alike (borrowed until
                               * te_backward) */
} te_checkpoint_desc;
/* Activation checkpointing: fn runs without a record, so that the activations inside are freed at once; when
 * te_backward reaches it, fn runs again from its inputs, recorded, and that record is played. Losses and gradients have
 * the bits that they have without it: the second run sees the first's random states, named ones too, autocast regions
 * and scales of delayed recipes, and records no amaxes again. Nests to any depth. With gradients disabled fn simply
 * runs. Modules: te_module_set_checkpoint.
 *
 * TE_ERR_STATE for an input that is NULL, and if fn leaves a scope or a region of te_no_grad, te_enable_grad or
 * autocast open, or ends one that it has not begun: all are put right. te_backward gives TE_ERR_STATE if fn made other
 * outputs than the first time, called other modules, or a parameter was written in between.
 * Source: transformer_engine.pytorch.checkpoint; Chen et al. 2016. */
TE_API te_result te_checkpoint(te_ctx *te, const te_checkpoint_desc *desc);

/* Hooks on saved tensors (torch.autograd.graph.saved_tensors_hooks), to offload, compress or inspect them: each tensor
 * that a tape node keeps for its backward function goes through `pack`, and comes back through `unpack` right before it
 * is read. */
typedef struct te_saved_tensors_hooks {
    /* Gets a tensor that a node saves (borrowed; activations, plain or quantized: parameters are not offered) and
     * returns a handle in its place; NULL => the tensor stays. Several nodes may save one tensor. */
    void *(*pack)(void *user, te_tensor *x);
    /* Gives a tensor of that shape and format back for a handle, once (borrowed from the innermost scope, or retained
     * by the hooks' owner). */
    te_tensor *(*unpack)(void *user, void *handle);
    /* Releases a handle whose node is forgotten without being played; NULL => handles need no release. */
    void (*drop)(void *user, void *handle);
    void *user; /* handed to all three; lives until the nodes that were recorded in the region are gone */
} te_saved_tensors_hooks;
/* Between these, nodes that are recorded pack what they save. Nests: the innermost region's hooks count. hooks is
 * copied. */
TE_API te_result te_saved_tensors_begin(te_ctx *te, const te_saved_tensors_hooks *hooks);
/* The end of the innermost region. TE_ERR_STATE without a beginning. */
TE_API te_result te_saved_tensors_end(te_ctx *te);

/* A region of CPU offload; zero-initialised. */
typedef struct te_cpu_offload_desc {
    float fraction;       /* of the bytes that nodes save, spread evenly over the region; 0 => all */
    int64_t min_bytes;    /* smaller tensors stay on the device; 0 => 512 KiB */
    int64_t window_bytes; /* device memory for copies under way and for what the backward pass needs first; 0 => twice
                           * the largest tensor that goes out */
} te_cpu_offload_desc;
/* CPU offload: activations that nodes between these save go to pinned host memory on a stream of their own while the
 * forward pass goes on, and come back ahead of their use while the backward pass runs. No bit changes. Parameters stay,
 * and so does what a scope of the caller's holds: the outputs of layers that it calls one by one; a module that calls
 * them (te_sequential_create, a class of the user's) holds none. At most window_bytes more are on the device than the
 * fraction says. The device waits where its link is slower than the computation; the host waits only while pinned
 * memory is taken from the driver, which is done once (te_memory_trim gives it back). On the CPU backend the copies are
 * made all the same.
 *
 * desc: copied; NULL => everything. Nests; inside te_saved_tensors_begin .. _end it takes the place of those hooks.
 * Errors: TE_ERR_INVALID for a value outside its range, TE_ERR_OUT_OF_MEMORY in the call that saves for want of pinned
 * memory, TE_ERR_STATE in a graph's capture. te_memory_get_stats counts the bytes. Source:
 * transformer_engine.pytorch.get_cpu_offload_context. */
TE_API te_result te_cpu_offload_begin(te_ctx *te, const te_cpu_offload_desc *desc);
/* The end of the innermost region. TE_ERR_STATE where that is none of te_cpu_offload_begin. */
TE_API te_result te_cpu_offload_end(te_ctx *te);
