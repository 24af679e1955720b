/* modules/step.c: whether the current microbatch is the first, whether an optimizer step follows, and the step hooks of
 * modules. This file must not depend on how gradients are exchanged. */

TE_API void te_step_set_is_first_microbatch(te_ctx *te, te_microbatch value) {
    if (!te) return;
    if ((int)value < 0 || value > TE_MICROBATCH_LATER)
        te__fail(
            te, TE_ERR_INVALID,
            "te_step_set_is_first_microbatch: %d; TE_MICROBATCH_NONE to TE_MICROBATCH_LATER (0 to %d) are possible",
            (int)value, (int)TE_MICROBATCH_LATER);
    else te__quant_of(te)->is_first_microbatch = value;
}
TE_API te_microbatch te_step_get_is_first_microbatch(const te_ctx *te) {
    return te ? te__quant_of(te)->is_first_microbatch : TE_MICROBATCH_NONE;
}
TE_API void te_step_set_is_optim_step(te_ctx *te, bool value) {
    if (te) te__modules_of(te)->is_optim_step = value;
}
TE_API bool te_step_get_is_optim_step(const te_ctx *te) { return te && te__modules_of(te)->is_optim_step; }

#define TE__STEP_HOOKS "te_step_hooks" /* key of the attribute that holds the hooks */
TE_API te_result te_module_set_step_hooks(te_module *m, const te_step_hooks *hooks) {
    if (hooks) return te_module_set_attribute(m, TE__STEP_HOOKS, (void *)(uintptr_t)hooks, NULL);
    te_module_remove_attribute(m, TE__STEP_HOOKS);
    return m ? TE_OK : TE_ERR_STATE;
}
static te_result te__step_hooks_run(te_ctx *te, te_module *const *parts, int num_parts, bool final, const char *who) {
    te_result result = TE_OK;
    int i;
    if (num_parts < 0 || (num_parts && !parts))
        return te__fail(te, TE_ERR_INVALID, "%s: %d parts, and parts is %s", who, num_parts, parts ? "given" : "NULL");
    for (i = 0; i < num_parts && result == TE_OK; i++) {
        const te_step_hooks *hooks = (const te_step_hooks *)te__attribute_of(parts[i], TE__STEP_HOOKS);
        te_result (*hook)(te_module *part, void *user);
        if (!hooks) continue;
        hook = final ? hooks->prepare_for_final_backward : hooks->prepare_for_grad_accumulation;
        if (!hook) continue;
        result = te__returned(te, hook(parts[i], hooks->user), "the hook", te_module_name(parts[i]));
        /* if the hook has recorded an error itself, te__fail keeps that error */
        if (result != TE_OK)
            te__fail(te, result, "%s: the hook of \"%s\" returned %s", who, te_module_name(parts[i]),
                     te_result_name(result));
    }
    return result;
}
TE_API te_result te_prepare_for_grad_accumulation(te_ctx *te, te_module *const *parts, int num_parts) {
    if (!te) return TE_ERR_STATE;
    te_step_set_is_optim_step(te, false);
    te_step_set_is_first_microbatch(te, TE_MICROBATCH_FIRST);
    return te__step_hooks_run(te, parts, num_parts, false, "te_prepare_for_grad_accumulation");
}
TE_API te_result te_prepare_for_final_backward(te_ctx *te, te_module *const *parts, int num_parts) {
    if (!te) return TE_ERR_STATE;
    te_step_set_is_optim_step(te, true);
    return te__step_hooks_run(te, parts, num_parts, true, "te_prepare_for_final_backward");
}
TE_API void te_prepare_after_first_microbatch(te_ctx *te) { te_step_set_is_first_microbatch(te, TE_MICROBATCH_LATER); }
