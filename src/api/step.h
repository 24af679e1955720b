/* api/step.h: the position of a call in a training step: its microbatch, whether its backward pass is the last of the
 * step, and hooks that prepare the parts of a model. The names are NeMo Automodel's. */

/* Sets the microbatch that Linear and GroupedLinear assume in calls without is_first_microbatch; one that the call
 * gives takes precedence. TE_MICROBATCH_NONE by default. The kept weights notice every write, so TE_MICROBATCH_LATER
 * after an optimizer's step quantizes them anew (Automodel multiplies by the old ones). Source: IS_FIRST_MICROBATCH. */
TE_API void te_step_set_is_first_microbatch(te_ctx *te, te_microbatch value);
/* Returns the microbatch in force; TE_MICROBATCH_NONE for NULL. */
TE_API te_microbatch te_step_get_is_first_microbatch(const te_ctx *te);
/* Sets whether the next backward pass is the last one of its step. False by default. Source: IS_OPTIM_STEP. */
TE_API void te_step_set_is_optim_step(te_ctx *te, bool value);
/* Returns true if the next backward pass is the last one of its step; false for NULL. */
TE_API bool te_step_get_is_optim_step(const te_ctx *te);

/* Functions that te_prepare_for_grad_accumulation and te_prepare_for_final_backward call for a part of a model. Each
 * may be NULL. Each returns TE_OK, or an error's code. */
typedef struct te_step_hooks {
    te_result (*prepare_for_grad_accumulation)(te_module *part, void *user); /* before the first microbatch of a step */
    te_result (*prepare_for_final_backward)(te_module *part, void *user);    /* before the last microbatch of a step */
    void *user; /* handed to both; borrowed */
} te_step_hooks;
/* Sets the hooks of a module (borrowed for the module's lifetime; NULL removes them). */
TE_API te_result te_module_set_step_hooks(te_module *m, const te_step_hooks *hooks);
/* Call before the first microbatch of a step. Sets is_optim_step to false and is_first_microbatch to
 * TE_MICROBATCH_FIRST; then calls the hooks of parts[0 .. num_parts - 1] (borrowed for the call; a NULL is skipped).
 * With pipeline parallelism give NULL and 0: the caller prepares the parts (Automodel: pp_enabled). Stops at the first
 * hook that fails and returns that hook's code. */
TE_API te_result te_prepare_for_grad_accumulation(te_ctx *te, te_module *const *parts, int num_parts);
/* Call before the last microbatch of a step. Sets is_optim_step to true; then calls the hooks as
 * te_prepare_for_grad_accumulation. */
TE_API te_result te_prepare_for_final_backward(te_ctx *te, te_module *const *parts, int num_parts);
/* Call after forward and backward of the first microbatch. Sets is_first_microbatch to TE_MICROBATCH_LATER. */
TE_API void te_prepare_after_first_microbatch(te_ctx *te);
