/* train/initialize.c: makes the states of an optimizer's parameters, and updates them when a parameter changes its
 * format. This file must not depend on what a step does. */

/* Returns the optimizer's entry for a parameter, or NULL. Searches from the end, because a new parameter is at the end,
 * and is looked up for each of its states. */
static te__opt_param *te__opt_find(const te_optimizer *opt, const te_tensor *param) {
    int i;
    for (i = opt->num_params - 1; i >= 0; i--)
        if (opt->params[i].param == param) return &opt->params[i];
    return NULL;
}
/* Returns the index of the state called `name` in the optimizer's class. Returns TE__OPT_STATES if the class has no
 * such state. */
static int te__opt_state_place(const te_optimizer *opt, const char *name) {
    int k;
    for (k = 0; k < TE__OPT_STATES; k++)
        if (opt->cls->state[k] && strcmp(opt->cls->state[k], name) == 0) return k;
    return TE__OPT_STATES;
}

static bool te__opt_wants_master(const te_optimizer *opt, const te_tensor *param) {
    return (param->dtype != TE_F32 || param->quantized) && !opt->options.no_master_weights;
}
static bool te__opt_wants_remainders(const te_optimizer *opt, const te_tensor *param) {
    const te_dtype dtype = opt->options.dtype[TE__OPT_MASTER];
    return opt->options.store_param_remainders && (!dtype || dtype == TE_F32) && param->dtype == TE_BF16 &&
           !param->quantized;
}

/* ---- te_initialize_state of FusedAdam ---- */

/* Makes one state of a parameter. `mended` is true for te_initialize_state, and false for te_initialize_state_legacy.
 * Only te_initialize_state accepts quantized parameters, and copies the parameter's flag `sharded` to the state. */
static te_result te__initialize_state(te_optimizer *opt, te_tensor *param, const char *name, bool zero_buffer,
                                      bool store_param_remainders, bool mended) {
    const char *const who = mended ? "te_initialize_state" : "te_initialize_state_legacy";
    te__opt_param *p;
    te__opt_state *s, fresh = TE_ZERO;
    te_dtype dtype;
    te_ctx *te;
    bool ok;
    int k;
    if (!opt) return TE_ERR_STATE;
    te = opt->te;
    if (te->capture) return te__refuse_capture(te, who, "make states before te_graph_begin");
    p = param ? te__opt_find(opt, param) : NULL;
    k = name ? te__opt_state_place(opt, name) : TE__OPT_STATES;
    if (!p || k == TE__OPT_STATES)
        return te__fail(te, TE_ERR_INVALID,
                        "%s: %s%.40s%s; a parameter of this optimizer and one of its states are needed", who,
                        !param  ? "the parameter is NULL"
                        : !p    ? "the tensor is no parameter of this optimizer"
                        : !name ? "the state's name is NULL"
                                : "there is no state \"",
                        p && name ? name : "", p && name ? "\"" : "");
    if (param->quantized && !mended)
        return te__fail(te, TE_ERR_UNSUPPORTED,
                        "%s: parameter %s is stored quantized, and this function makes states of plain ones alone; "
                        "call te_apply_patches before the optimizer is made",
                        who, p->path);
    dtype = store_param_remainders ? TE_U8 : opt->options.dtype[k] ? opt->options.dtype[k] : TE_F32;
    te__frame_begin(te);
    ok = te__opt_state_make(&fresh, dtype, dtype != TE_F32 && !store_param_remainders,
                            zero_buffer || store_param_remainders, param);
    te__frame_end(te, NULL, 0);
    if (!ok) {
        te__opt_state_close(&fresh);
        return te_error_code(te);
    }
    if (!te__opt_is_scaled(dtype)) { /* the scale exists, stays 1, and no arithmetic reads it */
        fresh.unit = fresh.scale;
        fresh.scale = NULL;
    }
    te_tensor_set_sharded(fresh.x, mended && param->sharded);
    s = &p->state[k];
    if (s->x)
        te__graphs_forget(te, opt, "a state of its optimizer was made anew",
                          "destroying a state of an optimizer that has stepped");
    te__opt_state_close(s);
    *s = fresh;
    if (k == TE__OPT_MASTER) p->behind = true;
    return TE_OK;
}

TE_API te_result te_initialize_state(te_optimizer *opt, te_tensor *param, const char *state_name, bool zero_buffer,
                                     bool store_param_remainders) {
    return te__initialize_state(opt, param, state_name, zero_buffer, store_param_remainders, true);
}
TE_API te_result te_initialize_state_legacy(te_optimizer *opt, te_tensor *param, const char *state_name,
                                            bool zero_buffer, bool store_param_remainders) {
    return te__initialize_state(opt, param, state_name, zero_buffer, store_param_remainders, false);
}

TE_API te_fused_adam_methods te_fused_adam_get_methods(const te_ctx *te) {
    te_fused_adam_methods own = TE_ZERO;
    own.initialize_state = te_initialize_state;
    own.capabilities = TE_STATE_DEQUANTIZES | TE_STATE_ZEROS_LIKE | TE_STATE_EMPTY_LIKE;
    return te && te__train_of(te)->fused_adam.initialize_state ? te__train_of(te)->fused_adam : own;
}
TE_API te_result te_fused_adam_set_methods(te_ctx *te, const te_fused_adam_methods *methods) {
    te_fused_adam_methods none = TE_ZERO;
    if (!te) return TE_ERR_STATE;
    if (methods && !methods->initialize_state)
        return te__fail(te, TE_ERR_INVALID,
                        "te_fused_adam_set_methods: initialize_state is NULL; give a function, or NULL in place of the "
                        "methods for te.h's own");
    te__train_of(te)->fused_adam = methods ? *methods : none;
    return TE_OK;
}
TE_API te_result te_optimizer_initialize_state(te_optimizer *opt, te_tensor *param, const char *state_name,
                                               bool zero_buffer, bool store_param_remainders) {
    if (!opt) return TE_ERR_STATE;
    if (!opt->cls->has_methods)
        return te__fail(opt->te, TE_ERR_UNSUPPORTED,
                        "te_optimizer_initialize_state: the optimizer is made by %s; those of te_fused_adam_create "
                        "have the function",
                        opt->cls->create);
    return te__returned(opt->te,
                        te_fused_adam_get_methods(opt->te).initialize_state(opt, param, state_name, zero_buffer,
                                                                            store_param_remainders),
                        "initialize_state", state_name);
}
TE_API te_tensor *te_optimizer_state(const te_optimizer *opt, const te_tensor *param, const char *state_name,
                                     te_tensor **scale) {
    const te__opt_param *p = opt && param ? te__opt_find(opt, param) : NULL;
    const int k = p && state_name ? te__opt_state_place(opt, state_name) : TE__OPT_STATES;
    const te__opt_state *s = k < TE__OPT_STATES ? &p->state[k] : NULL;
    if (scale) *scale = !s ? NULL : s->scale ? s->scale : s->unit;
    return s ? s->x : NULL;
}

/* ---- the states of a parameter ---- */

/* Makes state k of p. A master does not have the parameter's value yet, so it is marked as `behind`. Other states are
 * zero. */
static te_result te__opt_make(te_optimizer *opt, te__opt_param *p, int k) {
    const te__opt_options *o = &opt->options;
    const bool master = k == TE__OPT_MASTER, remainders = master && te__opt_wants_remainders(opt, p->param);
    te_dtype dtype = o->dtype[k] ? o->dtype[k] : te__opt_wants_master(opt, p->param) ? TE_F32 : p->param->dtype;
    te_result result;
    if (opt->cls->has_methods) {
        result = te_optimizer_initialize_state(opt, p->param, opt->cls->state[k], !master, remainders);
        if (result == TE_OK && !p->state[k].x)
            result = te__fail(opt->te, TE_ERR_STATE,
                              "%s: the function initialize_state of te_fused_adam_set_methods returned TE_OK, and "
                              "parameter %s has no state \"%s\"; te_initialize_state "
                              "makes one",
                              opt->cls->create, p->path, opt->cls->state[k]);
        return result == TE_OK ? te_error_code(opt->te)
                               : te__fail(opt->te, result, "%s: initialize_state of parameter %s returned %s",
                                          opt->cls->create, p->path, te_result_name(result));
    }
    if (remainders) dtype = TE_U8;
    if (master) p->behind = true;
    return te__opt_state_make(&p->state[k], dtype, o->dtype[k] && te__opt_is_scaled(dtype), true, p->param)
               ? TE_OK
               : te_error_code(opt->te);
}
/* Makes all states of a new parameter. */
static te_result te__opt_make_all(te_optimizer *opt, te__opt_param *p) {
    const bool master = te__opt_wants_master(opt, p->param);
    te_result result = TE_OK;
    int k;
    p->dtype = p->param->dtype;
    for (k = 0; k < TE__OPT_STATES && result == TE_OK; k++)
        if (opt->cls->state[k] && (k != TE__OPT_MASTER || master)) result = te__opt_make(opt, p, k);
    return result == TE_OK && master ? te__opt_take_master(p) : result;
}

/* Replaces the remainders of a parameter by a whole f32 master, after the parameter was cast from bf16 to f32 or f16. A
 * cast back to bf16 gives the upper half of the master. The cast to f16 and the cast back are exact for values in the
 * normal range of f16. */
static te_result te__opt_whole_master(te__opt_param *p) {
    te__opt_state *s = &p->state[TE__OPT_MASTER], whole = TE_ZERO;
    const bool written = p->behind || te__opt_is_stale(p);
    te_tensor *upper = te__copied(p->param, TE_BF16);
    te_result result = upper && te__opt_state_make(&whole, TE_F32, false, false, p->param)
                           ? te__opt_remainders(upper, s, whole.x, false)
                           : te_error_code(p->param->te);
    if (result != TE_OK) {
        te__opt_state_close(&whole);
        return result;
    }
    te_tensor_set_sharded(whole.x, s->x->sharded);
    te__opt_state_close(s);
    *s = whole;
    p->behind = written;
    return TE_OK;
}
/* Makes the masters that parameters need after a cast (te_cast_model_to_dtype), with the values of the parameters.
 * Existing masters keep their values. */
static te_result te__opt_follow(te_optimizer *opt) {
    te_ctx *te = opt->te;
    const bool warming = te->warming;
    te_result result = TE_OK;
    int i;
    for (i = 0; i < opt->num_params && result == TE_OK; i++) {
        te__opt_param *p = &opt->params[i];
        const te__opt_state *master = &p->state[TE__OPT_MASTER];
        if (p->dtype != p->param->dtype) {
            if (p->shard)
                return te__fail(te, TE_ERR_STATE,
                                "%s: parameter %s is sharded, and was cast from %s to %s; cast the model first, then "
                                "make units and the optimizer",
                                opt->cls->create, p->path, te_dtype_name(p->dtype), te_dtype_name(p->param->dtype));
            if (te->capture)
                return te__refuse_capture(te, "the first te_optimizer_step after a cast of its parameters",
                                          "make it before te_graph_begin");
            te__frame_begin(te);
            te->warming = false; /* states outlive the warm-up */
            if (te__opt_is_remainders(master) && p->param->dtype != TE_BF16) result = te__opt_whole_master(p);
            else if (!master->x && te__opt_wants_master(opt, p->param)) result = te__opt_make(opt, p, TE__OPT_MASTER);
            te->warming = warming;
            te__frame_end(te, NULL, 0);
            if (result == TE_OK) p->dtype = p->param->dtype;
        }
        if (result == TE_OK && master->x && p->behind && !te->capture && !warming) result = te__opt_take_master(p);
    }
    return result;
}
