/* api/autograd.h: the tape.
 *
 * Functions that take a tensor which requires a gradient record themselves; te_backward plays the record backwards. The
 * tape retains what the backward functions need, and lets go of it as they run. Gradients add up in the leaves (model
 * parameters, and tensors marked by te_tensor_set_requires_grad) until te_zero_grad or te_tensor_zero_grad.
 *
 * A leaf's gradient is its own: nobody else has its memory, and it may be written in place. The gradients of tensors in between are there during
 * te_backward alone, and shared: te_add gives one tensor to both of its inputs. A backward function of one's own (te_record) reads those it is
 * given and writes none. */

TE_API te_tensor *te_tensor_set_requires_grad(te_tensor *x, bool on);
TE_API bool te_tensor_requires_grad(const te_tensor *x);
/* The gradient gathered so far, [same shape, same format], contiguous (borrowed), or NULL. A leaf owns its gradient: no other gradient and no tensor
 * of the caller's has the same memory, so it may be scaled or reduced in place. */
TE_API te_tensor *te_tensor_grad(const te_tensor *x);
/* Forgets the gradient. */
TE_API void te_tensor_zero_grad(te_tensor *x);
/* A buffer [same shape], f32 or x's format, that weight-gradient GEMMs add into directly (TransformerEngine's
 * fuse_wgrad_accumulation). Retained. NULL takes it away. TE_ERR_INVALID if it lies in x's own memory, or is a parameter with such a buffer itself. */
TE_API te_result te_tensor_set_main_grad(te_tensor *x, te_tensor *main_grad);
TE_API te_tensor *te_tensor_main_grad(const te_tensor *x);

/* Gradients of a one-element tensor with respect to every leaf that it depends on. Asynchronous on CUDA. What was recorded
 * up to `loss` is gone afterwards. A NULL loss, or one in a context with a pending error, changes nothing.
 *
 * Errors: TE_ERR_STATE if a parameter or activation that a backward function reads was written since the forward pass (te_tensor_touch counts; a
 * quantized copy is the forward's own, so the weight that it was made of may change). After an error the gradients
 * that this call began are forgotten; those that were there before may have been added to.
 *
 * A backward function may call it too: for what it has recorded itself inside te_enable_grad_begin, or for a part of the outer tape, which the outer
 * te_backward must then not need (TE_ERR_STATE). Leaves that both reach get the sum. */
TE_API te_result te_backward(te_tensor *loss);
/* The same from any tensor, with its gradient given: [same shape]. */
TE_API te_result te_backward_from(te_tensor *y, te_tensor *grad);

/* Between these nothing is recorded. Nests. */
TE_API void te_no_grad_begin(te_ctx *te);
TE_API void te_no_grad_end(te_ctx *te);
/* Between these functions are recorded again, inside of te_no_grad_begin or in a backward function, where nothing is recorded by itself. Nests. What a
 * backward function records is played by a te_backward of its own or forgotten when it returns. */
TE_API void te_enable_grad_begin(te_ctx *te);
TE_API void te_enable_grad_end(te_ctx *te);
TE_API bool te_grad_enabled(const te_ctx *te);

/* Activation checkpointing (transformer_engine.pytorch.checkpoint; Chen et al. 2016): fn runs without a record, so that what its backward pass would
 * need is freed at once; when te_backward comes to it, it runs again from its inputs, recorded, and is played. Losses and gradients are, bit for bit,
 * those without it: the second run sees the random state, the autocast regions and the scales of delayed recipes of the first, and leaves no second
 * amaxes. Nests. Modules: te_module_set_checkpoint.
 *
 * fn must do the same each time, and reach parameters and inputs alone: what else it reads must not change until te_backward. It fills outputs
 * (borrowed from the innermost scope) and returns TE_OK, or an error's code. */
typedef te_result (*te_checkpoint_fn)(te_ctx *te, void *user, te_tensor *const *inputs, int num_inputs, te_tensor **outputs, int num_outputs);
#define TE_MAX_CHECKPOINT_INPUTS 32
#define TE_MAX_CHECKPOINT_OUTPUTS 16
typedef struct te_checkpoint_desc {
    te_checkpoint_fn fn;
    void *user;       /* handed to fn */
    size_t user_size; /* so many bytes of it are copied for the second run; 0 => it is borrowed until te_backward or the end of the scope */
    te_tensor *const *inputs; /* those that require a gradient get one; retained until te_backward */
    int num_inputs;
    te_tensor **outputs; /* written; NULLs on failure */
    int num_outputs;
} te_checkpoint_desc;
/* With gradients disabled fn simply runs. TE_ERR_STATE from te_backward: fn made other outputs than the first time, called other modules, or a
 * parameter was written in between. */
TE_API te_result te_checkpoint(te_ctx *te, const te_checkpoint_desc *desc);

/* Hooks on saved tensors (torch.autograd.graph.saved_tensors_hooks): what tape nodes keep for their backward functions goes through `pack`, and comes back
 * through `unpack` right before it is read: to offload it, to compress it, to look at it. */
typedef struct te_saved_tensors_hooks {
    /* Gets a tensor that a node saves (borrowed; activations, plain or quantized: parameters are not offered) and returns a handle in its place; NULL => the
     * tensor stays. Several nodes may save one tensor. */
    void *(*pack)(void *user, te_tensor *x);
    /* Gives a tensor of that shape and format back for a handle, once (borrowed from the innermost scope, or retained by the hooks' owner). */
    te_tensor *(*unpack)(void *user, void *handle);
    /* Lets go of a handle whose node is forgotten without being played; NULL => nothing to let go of. */
    void (*drop)(void *user, void *handle);
    void *user; /* handed to all three; lives until the nodes that were recorded in the region are gone */
} te_saved_tensors_hooks;
/* Between these, nodes that are recorded pack what they save. Nests: the innermost region's hooks count. hooks is copied. */
TE_API te_result te_saved_tensors_begin(te_ctx *te, const te_saved_tensors_hooks *hooks);
TE_API te_result te_saved_tensors_end(te_ctx *te);
