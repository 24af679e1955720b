/* api/step.h: the position of a call in a training step: which microbatch it belongs to, and whether its backward pass
 * is the last one of the step. Hooks prepare modules for the first and the last microbatch of a step. The names are
 * NeMo Automodel's. */

/* Sets the microbatch that Linear and GroupedLinear assume in calls without is_first_microbatch; TE_MICROBATCH_NONE by
 * default. A value that the call gives takes precedence. The modules notice every write to a weight of which they keep
 * a quantized copy. After an optimizer's step they quantize the weight anew even with TE_MICROBATCH_LATER, where
 * Automodel multiplies by the old copy. Source: IS_FIRST_MICROBATCH. */
TE_API void te_step_set_is_first_microbatch(te_ctx *te, te_microbatch value);
/* Returns the microbatch in force; TE_MICROBATCH_NONE for NULL. */
TE_API te_microbatch te_step_get_is_first_microbatch(const te_ctx *te);
/* Sets whether the next backward pass is the last one of its step. False by default. Source: IS_OPTIM_STEP. */
TE_API void te_step_set_is_optim_step(te_ctx *te, bool value);
/* Returns true if the next backward pass is the last one of its step; false for NULL. */
TE_API bool te_step_get_is_optim_step(const te_ctx *te);

/* Hook functions of one module. te_prepare_for_grad_accumulation and te_prepare_for_final_backward call them. Each may
 * be NULL. Each returns TE_OK or an error code. */
typedef struct te_step_hooks {
    te_result (*prepare_for_grad_accumulation)(te_module *part, void *user); /* before the first microbatch of a step */
    te_result (*prepare_for_final_backward)(te_module *part, void *user);    /* before the last microbatch of a step */
    void *user; /* handed to both; borrowed */
} te_step_hooks;
/* Sets the hooks of a module (borrowed for the module's lifetime; NULL removes them). */
TE_API te_result te_module_set_step_hooks(te_module *m, const te_step_hooks *hooks);
/* Prepares for the first microbatch of a step; call it before that microbatch. Sets is_optim_step to false and
 * is_first_microbatch to TE_MICROBATCH_FIRST. Then calls the hooks of parts[0 .. num_parts - 1] (borrowed for the call;
 * a NULL entry is skipped). With pipeline parallelism pass NULL and 0; the caller then prepares the modules itself
 * (Automodel: pp_enabled). Stops at the first hook that fails and returns that hook's code. */
TE_API te_result te_prepare_for_grad_accumulation(te_ctx *te, te_module *const *parts, int num_parts);
/* Prepares for the last microbatch of a step; call it before that microbatch. Sets is_optim_step to true, then calls
 * the hooks in the same way as te_prepare_for_grad_accumulation. */
TE_API te_result te_prepare_for_final_backward(te_ctx *te, te_module *const *parts, int num_parts);
/* Sets is_first_microbatch to TE_MICROBATCH_LATER; call it after forward and backward of the first microbatch. */
TE_API void te_prepare_after_first_microbatch(te_ctx *te);
