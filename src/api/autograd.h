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
/* The gradient gathered so far, [same shape, same format] (borrowed), or NULL. */
TE_API te_tensor *te_tensor_grad(const te_tensor *x);
/* Forgets the gradient. */
TE_API void te_tensor_zero_grad(te_tensor *x);
/* A buffer [same shape], f32 or x's format, that weight-gradient GEMMs add into directly (TransformerEngine's
 * fuse_wgrad_accumulation). Retained. NULL takes it away. TE_ERR_INVALID if it lies in x's own memory, or is a parameter with such a buffer itself. */
TE_API te_result te_tensor_set_main_grad(te_tensor *x, te_tensor *main_grad);
TE_API te_tensor *te_tensor_main_grad(const te_tensor *x);

/* Gradients of a one-element tensor with respect to every leaf that it depends on. Asynchronous on CUDA. What was recorded
 * up to `loss` is gone afterwards. A NULL loss, or one in a context with a pending error, changes nothing. */
TE_API te_result te_backward(te_tensor *loss);
/* The same from any tensor, with its gradient given: [same shape]. */
TE_API te_result te_backward_from(te_tensor *y, te_tensor *grad);

/* Between these nothing is recorded. Nests. */
TE_API void te_no_grad_begin(te_ctx *te);
TE_API void te_no_grad_end(te_ctx *te);
TE_API bool te_grad_enabled(const te_ctx *te);
