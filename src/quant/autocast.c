/* quant/autocast.c: the stack of autocast regions, the update of delayed scales, and the choice of quantizers. A slot
 * of a module is one operand of a matrix product. This file must not depend on what a module computes. */

/* Checks a hybrid quantizer. Delayed scaling inside it needs a given scale, because no module would update the
 * scale. */
static te_result te__custom_hybrid_ok(te_ctx *te, const te_quantizer_desc *desc) {
    const te__quant_class *cls = te__quant_class_of(desc->kind);
    int i;
    for (i = 0; i < 2 && cls && cls->form == TE__FORM_PARTS; i++) {
        const te_quantizer_desc *d = i ? desc->hybrid.columnwise_quantizer : desc->hybrid.rowwise_quantizer;
        const te__quant_class *half = d ? te__quant_class_of(d->kind) : NULL;
        if (half && half->facts & TE__SCALE_GIVEN && !d->delayed.scale)
            return te__fail(te, TE_ERR_INVALID,
                            "recipe custom: the %s quantizer of a %s one is %s without a scale, and nothing would "
                            "update one; give delayed.scale and delayed.amax, or take "
                            "another kind",
                            i ? "column-wise" : "row-wise", cls->name, half->name);
    }
    return TE_OK;
}
/* Calls the factory of a custom recipe for every operand of a module's products. Keeps the quantizers in s->custom. */
static te_result te__custom_prepare(te_ctx *te, te__scaling *s, const te_recipe *r, const char *module_type) {
    te__custom_slots *slots;
    te_result result = TE_OK;
    int i;
    if (te__custom_slots_of(s, r)) return TE_OK;
    if (te->capture) return te__refuse_capture(te, "the first run of a module under a custom recipe", TE__RUN_FIRST);
    slots = (te__custom_slots *)te__alloc_zero(te, te__custom_slots_bytes(s));
    if (!slots) return TE_ERR_OUT_OF_MEMORY;
    slots->factory = r->custom.factory;
    slots->user = r->custom.user;
    slots->format = r->format;
    for (i = 0; i < s->num_gemms * TE__CUSTOM_SLOTS && result == TE_OK; i++) {
        te__custom_slot *c = &slots->slot[i];
        const te__quant_class *cls;
        int slot = i % TE__CUSTOM_SLOTS;
        te_quantizer_desc desc = TE_ZERO;
        te_quantizer_role role = TE_ZERO;
        role.module_type = module_type;
        role.name = te->module_path;
        role.gemm = i / TE__CUSTOM_SLOTS;
        role.tensor_type = (te_tensor_type)slot;
        result = te__recipe_ask(te, r, &role, &desc);
        if (result != TE_OK) break;
        cls = te__quant_class_of(desc.kind);
        result = te__custom_hybrid_ok(te, &desc);
        if (result != TE_OK) break;
        if (cls && cls->facts & TE__SCALE_GIVEN && !desc.delayed.scale) {
            te_dtype dtype = te__recipe_dtype(r, slot >= (int)TE_TENSOR_GRAD_OUTPUT);
            if (desc.dtype != TE_DTYPE_NONE && desc.dtype != dtype)
                result = te__fail(te, TE_ERR_DTYPE,
                                  "recipe custom: a delayed slot in %s; the scales of this direction are updated for "
                                  "the recipe's format, %s: "
                                  "change te_recipe.format, or give the quantizer a scale of its own",
                                  te_dtype_name(desc.dtype), te_dtype_name(dtype));
            desc.dtype = dtype;
            c->own_scale = slots->any_own_scale = true;
        }
        if (result == TE_OK) result = te__spec_open_whole(te, &desc, &c->spec, c->child, "recipe custom");
    }
    if (result != TE_OK) {
        te__custom_slots_close(s, slots);
        return result;
    }
    slots->next = s->custom;
    s->custom = slots;
    return TE_OK;
}

/* Returns true if a module keeps scales and amax histories under this recipe. */
static bool te__keeps_scales(const te__scaling *s, const te_recipe *r) {
    const te__custom_slots *custom = te__asks_factory(r) ? te__custom_slots_of(s, r) : NULL;
    return te__recipe_has(r, TE__SCALE_GIVEN) || (custom && custom->any_own_scale);
}

/* ---- the delayed update ---- */

/* Updates the scales on the host, with the user's amax_fn and scale_fn. Then shifts the amax history. Both steps are
 * those of TransformerEngine's unfused update. */
static te_result te__slots_update_host(te_ctx *te, te__slots *slots, const te_recipe *r, float fp8_max,
                                       const float *reduced) {
    int length = (int)slots->history->shape[0], n = slots->n, i, k;
    size_t bytes = (size_t)(length * n + n + length) * sizeof(float);
    float *history = (float *)te__alloc(te, bytes), *scale, *column;
    te__floats floats;
    te_result result;
    if (!history) return TE_ERR_OUT_OF_MEMORY;
    scale = history + length * n;
    column = scale + n;
    result = te_tensor_to_host(slots->history, history);
    if (result == TE_OK) result = te_tensor_to_host(slots->scale, scale);
    floats = te__floats_begin();
    for (i = 0; i < n && result == TE_OK; i++) {
        float amax = 0.0f;
        for (k = 0; k < length; k++) column[k] = history[k * n + i];
        if (reduced && reduced[i] != 0.0f) column[0] = reduced[i];
        if (r->delayed.amax_fn)
            amax = r->delayed.amax_fn(r->delayed.user, column, length);
        else if (r->delayed.amax_algo == TE_AMAX_MOST_RECENT)
            amax = column[0];
        else
            for (k = 0; k < length; k++) amax = fmaxf(amax, column[k]);
        if (r->delayed.scale_fn)
            scale[i] = r->delayed.scale_fn(r->delayed.user, amax, scale[i], fp8_max);
        else if (amax > 0.0f && amax <= FLT_MAX) {
            scale[i] = fp8_max * exp2f(-r->delayed.margin) / amax;
            if (scale[i] > FLT_MAX) scale[i] = FLT_MAX;
        }
        for (k = 1; k < length; k++) history[k * n + i] = column[(k + 1) % length];
        history[i] = 0.0f;
    }
    te__floats_end(&floats);
    if (result == TE_OK) result = te_tensor_copy_from_host(slots->history, history);
    if (result == TE_OK) result = te_tensor_copy_from_host(slots->scale, scale);
    te__free(te, history);
    return result;
}

static te__slots *te__slots_of(te__scaling *s, bool backward) { return backward ? &s->backward : &s->forward; }

/* Updates the scales of `first` by one operation, together with all pending scales of the same recipe and group. */
static te_result te__update_alike(te_ctx *te, te__scaling *first, bool backward) {
    te_op_delayed_update_args args = TE_ZERO;
    te__scaling *s;
    te_tensor **list, *reduced = NULL;
    int64_t amaxes = 0;
    int count = 0, i = 0;
    size_t bytes;
    te_result result = TE_OK;
    const te_recipe recipe = te__slots_of(first, backward)->recipe;
    te_group *first_group = te__slots_of(first, backward)->group, *groups[3];
    bool shared = false;
#define TE__ALIKE(s)                                                                          \
    (te__slots_of(s, backward)->pending && te__slots_of(s, backward)->group == first_group && \
     !memcmp(te__slots_of(s, backward)->also, groups + 1, 2 * sizeof(te_group *)) &&           \
     te__recipe_same(&te__slots_of(s, backward)->recipe, &recipe))
    groups[0] = recipe.delayed.no_reduce_amax ? NULL : first_group;
    memcpy(groups + 1, te__slots_of(first, backward)->also, 2 * sizeof(te_group *));
    for (i = 0; i < 3; i++) shared = shared || te__group_size(groups[i]) > 1;
    i = 0;
    for (s = first; s; s = s->next) count += TE__ALIKE(s);
    bytes = 2 * (size_t)count * sizeof(te_tensor *);
    list = (te_tensor **)te__alloc(te, bytes);
    if (!list) return te__amax_over(groups, NULL, TE_ERR_OUT_OF_MEMORY);
    for (s = first; s; s = s->next) {
        te__slots *slots = te__slots_of(s, backward);
        if (!TE__ALIKE(s)) continue;
        list[i] = slots->history;
        list[count + i++] = slots->scale;
        amaxes += slots->n;
    }
    te__frame_begin(te);
    args.amax_history = list;
    args.scale = list + count;
    args.count = count;
    args.fp8_max = te_dtype_max(te__recipe_dtype(&recipe, backward));
    args.margin = recipe.delayed.margin;
    args.algo = recipe.delayed.amax_algo;
    if (shared) {
        te_op_delayed_gather_args gather = TE_ZERO;
        gather.amax_history = list;
        gather.count = count;
        gather.amaxes = reduced = te__empty_1d(te, TE_F32, amaxes);
        result = reduced ? te_op_delayed_gather(te, &gather) : te_error_code(te);
        result = te__amax_over(groups, reduced, result);
        args.reduced = reduced;
    }
    if (result == TE_OK && !recipe.delayed.amax_fn && !recipe.delayed.scale_fn)
        result = te_op_delayed_update(te, &args);
    if (result == TE_OK && (recipe.delayed.amax_fn || recipe.delayed.scale_fn) && !te->warming) {
        float *host = reduced ? (float *)te__alloc(te, (size_t)amaxes * sizeof(float)) : NULL;
        int64_t at = 0;
        if (reduced) result = host ? te_tensor_to_host(reduced, host) : TE_ERR_OUT_OF_MEMORY;
        for (s = first; s && result == TE_OK; s = s->next) {
            te__slots *slots = te__slots_of(s, backward);
            if (!TE__ALIKE(s)) continue;
            result = te__slots_update_host(te, slots, &recipe, args.fp8_max, host ? host + at : NULL);
            at += slots->n;
        }
        te__free(te, host);
    }
    for (s = first; s; s = s->next)
        if (s != first && TE__ALIKE(s)) te__slots_of(s, backward)->pending = false;
    te__slots_of(first, backward)->pending = false;
#undef TE__ALIKE
    te__frame_end(te, NULL, 0);
    te__free(te, list);
    return result;
}
static te_result te__update_slots(te_ctx *te, bool backward) {
    te__scaling *s;
    te_result result = TE_OK;
    for (s = te__quant_of(te)->scaling; s && result == TE_OK; s = s->next)
        if (te__slots_of(s, backward)->pending) result = te__update_alike(te, s, backward);
    return result;
}
static void te__update_backward_slots(te_ctx *te) { te__update_slots(te, true); }

/* ---- autocast ---- */

TE_API te_result te_autocast_begin(te_ctx *te, const te_autocast_desc *desc) {
    te__autocast *a;
    if (!te) return TE_ERR_STATE;
    if (te__quant_of(te)->num_autocast == TE__MAX_AUTOCAST)
        return te__fail(te, TE_ERR_STATE, "te_autocast_begin: %d regions are open; is a te_autocast_end missing?",
                        te__quant_of(te)->num_autocast);
    a = &te__quant_of(te)->autocast[te__quant_of(te)->num_autocast];
    a->recipe = desc && desc->recipe ? *desc->recipe : te_recipe_delayed_scaling();
    a->enabled = !(desc && desc->disabled);
    a->calibrating = desc && desc->calibrating;
    a->amax_group = desc ? desc->amax_group : NULL;
    if (te__group_allowed(te, a->amax_group, "te_autocast_begin", "amax_group") != TE_OK ||
        te__recipe_check(te, &a->recipe) != TE_OK)
        return te_error_code(te);
    if (te__quant_of(te)->num_autocast == 0 && (a->enabled || a->calibrating) && te__ask_step(te) != TE_OK)
        return te_error_code(te);
    te__quant_of(te)->num_autocast++;
    return TE_OK;
}

/* This rank has failed in a region. If modules keep scales, the other ranks wait for its amaxes where the outermost
 * region ends. */
static void te__amaxes_missing(const te__autocast *a, te_result result) {
    const te_recipe *r = &a->recipe;
    const bool keeps = te__recipe_has(r, TE__SCALE_GIVEN) || te__asks_factory(r) || r->fp8_dpa || r->fp8_mha;
    if (keeps && !r->delayed.no_reduce_amax) te__refuse(a->amax_group, TE__ALL_REDUCE, result);
}

TE_API te_result te_autocast_end(te_ctx *te) {
    const te__autocast *a;
    te_result result;
    if (!te) return TE_ERR_STATE;
    if (te__quant_of(te)->num_autocast == 0)
        return te__fail(te, TE_ERR_STATE, "te_autocast_end without te_autocast_begin");
    a = &te__quant_of(te)->autocast[--te__quant_of(te)->num_autocast];
    result = te->error_code;
    if (a->enabled && te->tape.no_grad == te->tape.hidden_no_grad && !te->tape.replays) {
        if (result == TE_OK && te__quant_of(te)->num_autocast == 0) result = te__update_slots(te, false);
        else if (result != TE_OK) te__amaxes_missing(a, result);
    }
    if (result != TE_OK) te__step_fails(te);
    return result;
}

static const te__autocast *te__autocast_now(const te_ctx *te) {
    return te__quant_of(te)->num_autocast ? &te__quant_of(te)->autocast[te__quant_of(te)->num_autocast - 1] : NULL;
}

TE_API bool te_autocast_enabled(const te_ctx *te) {
    const te__autocast *a = te ? te__autocast_now(te) : NULL;
    return a && a->enabled;
}

/* Returns the spec that quantizes operand `slot` of the product `gemm`. If the operand has a delayed scale, marks the
 * module's scales as pending. */
static te__quant_spec te__slot_spec(const te__quant_call *q, bool backward, int gemm, int slot, int usage) {
    te__slots *slots = backward ? &q->scaling->backward : q->forward;
    int i = gemm * (backward ? TE__SLOTS_BACKWARD : TE__SLOTS_FORWARD) + slot;
    const te__custom_slot *custom = NULL;
    te__quant_spec spec;
    if (te__asks_factory(&q->recipe)) {
        custom = &te__custom_slots_of(q->scaling, &q->recipe)
                      ->slot[gemm * TE__CUSTOM_SLOTS + (backward ? (int)TE_TENSOR_GRAD_OUTPUT : 0) + slot];
        spec = custom->spec;
    } else
        spec = te__recipe_spec(&q->recipe, backward, slot, q->group);
    spec.usage = usage;
    if (custom ? custom->own_scale : (spec.cls->facts & TE__SCALE_GIVEN) != 0) {
        spec.scale = slots->slot_scale[i];
        spec.amax = slots->slot_amax[i];
        slots->pending = true;
        slots->recipe = q->recipe;
        slots->group = q->group;
        memcpy(slots->also, q->also, sizeof(slots->also));
    }
    return spec;
}
