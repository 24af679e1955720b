/* api/step.h: tells te.h which microbatch of a training step the next calls belong to: the first, a later one, or the
 * last. Hooks prepare modules for the first and the last microbatch. The names are NeMo Automodel's. */

/* Sets the is_first_microbatch of Linear and GroupedLinear for calls that do not set it. The default is
 * TE_MICROBATCH_NONE. With TE_MICROBATCH_LATER, the first call after an optimizer's step still quantizes the weight
 * anew, unlike in Automodel. Source: IS_FIRST_MICROBATCH. */
TE_API void te_step_set_is_first_microbatch(te_ctx *te, te_microbatch value);
/* Returns the value that te_step_set_is_first_microbatch has set; TE_MICROBATCH_NONE for NULL. */
TE_API te_microbatch te_step_get_is_first_microbatch(const te_ctx *te);
/* Sets whether the next backward pass is the last one of its step. False by default. Source: IS_OPTIM_STEP. */
TE_API void te_step_set_is_optim_step(te_ctx *te, bool value);
/* Returns true if the next backward pass is the last one of its step; false for NULL. */
TE_API bool te_step_get_is_optim_step(const te_ctx *te);

/* Hook functions of one module, each of which may be NULL. They return TE_OK or an error code. */
typedef struct te_step_hooks {
    te_result (*prepare_for_grad_accumulation)(te_module *part, void *user); /* before the first microbatch of a step */
    te_result (*prepare_for_final_backward)(te_module *part, void *user);    /* before the last microbatch of a step */
    void *user; /* handed to both; borrowed */
} te_step_hooks;
/* Sets the hooks of a module (borrowed for the module's lifetime; NULL removes them). */
TE_API te_result te_module_set_step_hooks(te_module *m, const te_step_hooks *hooks);
/* Call this before the first microbatch of a step. Sets is_optim_step to false and is_first_microbatch to
 * TE_MICROBATCH_FIRST. Then calls the hooks of parts[0 .. num_parts - 1] (borrowed; NULL entries are skipped), and
 * stops at the first error. With pipeline parallelism pass NULL and 0, and prepare the modules yourself (Automodel:
 * pp_enabled). */
TE_API te_result te_prepare_for_grad_accumulation(te_ctx *te, te_module *const *parts, int num_parts);
/* Call this before the last microbatch of a step. Sets is_optim_step to true, then calls the hooks as
 * te_prepare_for_grad_accumulation does. */
TE_API te_result te_prepare_for_final_backward(te_ctx *te, te_module *const *parts, int num_parts);
/* Call this after forward and backward of the first microbatch. Sets is_first_microbatch to TE_MICROBATCH_LATER. */
TE_API void te_prepare_after_first_microbatch(te_ctx *te);
