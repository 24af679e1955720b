/* nn/fp8_core.c: which calls of an attention core run in FP8, on one rank (nn/fp8_attention.c) or on several
 * (nn/fp8_context.c). */

/* Returns true if the current autocast region quantizes the attention core m. Sets *cast to the autocast settings of
 * m. */
static bool te__runs_fp8_attention(const te_module *m, te__autocast *cast) {
    return te__autocast_of(m, cast) && cast->enabled && (cast->recipe.fp8_dpa || cast->recipe.fp8_mha);
}

/* Fills in *call for a call of m in FP8. */
static te_result te__fp8_attention_call(te_module *m, te__scaling *s, const te__autocast *cast, te__quant_call *call) {
    const te_recipe inner = te__attention_inner_recipe(&cast->recipe);
    te_result result = te__scaling_prepare(m, s, call);
    if (result == TE_OK && te__attention_measures(&cast->recipe)) result = te__scaling_slots(m, s, &inner, call);
    if (result == TE_OK && te__asks_factory(&cast->recipe)) result = te__attention_answers_fit(m, call);
    call->group = cast->amax_group; /* not over tp_group, whose ranks have different heads */
    return result;
}

/* Runs te_attention or FP8 attention. Returns [.., H dv]. `s` is the scaling state of m, for TE__ATTENTION_GEMMS
 * GEMMs. */
static te_tensor *te__core_attention(te_module *m, te__scaling *s, te_tensor *parts[3], const te_attn_desc *desc,
                                     bool fp8_output) {
    te__autocast cast;
    te__quant_call call;
    te_result result;
    if (!te__runs_fp8_attention(m, &cast)) return te__heads_joined(te__attention_run(parts, NULL, desc));
    if (desc->rule.k_factors || desc->rule.v_factors)
        return te__no_tensor(m->te, TE_ERR_UNSUPPORTED,
                             "%s: keys are %s codes of a cache, whose rows have factors, and the recipe has %s, which "
                             "has one factor for all: te_module_set_recipe(core, NULL, true) keeps this core in high "
                             "precision, or make the cache in bf16",
                             m->cls->name, te_dtype_name(parts[1]->dtype), cast.recipe.fp8_mha ? "fp8_mha" : "fp8_dpa");
    result = te__fp8_attention_call(m, s, &cast, &call);
    return result == TE_OK ? te__fp8_attention_run(parts, desc, &call, fp8_output) : NULL;
}
/* The same over the tokens of all ranks of *c. All ranks make the call. */
static te_tensor *te__core_context(te_module *m, te__scaling *s, te_tensor *parts[3], const te_attn_desc *desc,
                                   te__context *c, bool fp8_output) {
    te__autocast cast;
    te__quant_call call;
    te_result result;
    if (!te__runs_fp8_attention(m, &cast)) return te__heads_joined(te__context_attention_run(parts, desc, c, TE_OK));
    result = te__fp8_attention_call(m, s, &cast, &call);
    call.also[0] = c->heads;
    call.also[1] = c->ring;
    return te__fp8_context_run(parts, desc, c, &call, fp8_output, result);
}

/* Returns true if `core` gives a quantized output to `proj`. Both must be unchanged modules of te.h, with per-tensor
 * recipes of the same kind. */
static bool te__hands_fp8(const te_module *core, const te_module *proj) {
    te__autocast a, b;
    return core && proj && core->built_in && !core->own_forward && proj->built_in && !proj->own_forward &&
           core->has_fp8_output && proj->cls == &te__linear_class && te__runs_fp8_attention(core, &a) &&
           te__autocast_of(proj, &b) && a.recipe.kind == b.recipe.kind &&
           !te__recipe_has(&a.recipe, TE__BLOCKS_IN_ATTENTION) &&
           (!te__asks_factory(&a.recipe) ||
            (a.recipe.custom.factory == b.recipe.custom.factory && a.recipe.custom.user == b.recipe.custom.user)) &&
           !te__runs_graphs(proj);
}
