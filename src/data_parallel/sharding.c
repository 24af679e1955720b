/* data_parallel/sharding.c: makes units, sets their flags (te_fsdp_state), and exchanges the gradients of a pipeline
 * stage. This file must not depend on what a module computes. */

/* ---- units ---- */

static te_result te__unit_share(te_group *group, te_module *m) {
    te_result result = TE_OK;
    int i;
    for (i = 0; i < m->num_entries && result == TE_OK; i++) {
        te_tensor *x = m->entries[i].tensor;
        if (x->quantized)
            return te__refuse(group, TE__BROADCAST,
                              te__fail(m->te, TE_ERR_UNSUPPORTED,
                                       "te_data_parallel: \"%s\" of \"%s\" is stored quantized, and is not copied from "
                                       "rank 0; seed all ranks "
                                       "alike and set no_init_sync",
                                       m->entries[i].name, m->name));
        result = te__need_memory(x, "te_data_parallel");
        result = result == TE_OK ? te_broadcast(group, x, 0) : te__refuse(group, TE__BROADCAST, result);
    }
    for (i = 0; i < m->num_children && result == TE_OK; i++) result = te__unit_share(group, m->children[i]);
    return result;
}
/* Checks the fields of a desc that decide what is sharded. u: the unit that m is already, or NULL. */
static te_result te__unit_may_shard(const te__dp_unit *u, const te_module *m, const te_data_parallel_desc *desc,
                                    const char *who) {
    if ((int)desc->shard < 0 || desc->shard > TE_SHARD_PARAMETERS)
        return te__fail(m->te, TE_ERR_INVALID,
                        "%s: shard is %d; TE_SHARD_NONE to TE_SHARD_PARAMETERS (0 to %d) are possible", who,
                        (int)desc->shard, (int)TE_SHARD_PARAMETERS);
    if (desc->shard && desc->post_backward)
        return te__fail(m->te, TE_ERR_INVALID,
                        "%s: shard is %d and post_backward is given; a sharded unit's gradients go to the ranks of "
                        "their slices by te.h's own exchange: leave one of them out",
                        who, (int)desc->shard);
    if (u && (u->desc.shard != desc->shard || (desc->shard && u->desc.group != desc->group)))
        return te__fail(m->te, TE_ERR_INVALID,
                        "%s: \"%s\" is a unit with shard %d already, and shard %d%s is asked for; take the unit back "
                        "first (desc NULL)",
                        who, m->name, (int)u->desc.shard, (int)desc->shard,
                        u->desc.group != desc->group ? " in another group" : "");
    return TE_OK;
}
/* Appends the parameters of a unit to its set. With TE_SHARD_OPTIMIZER only those that are trained have states. */
static te_result te__unit_shard_tree(te__dp_unit *u, te_module *m, const char *who) {
    te_result result = TE_OK;
    int i;
    if (m != u->module && te__unit_of(m)) return TE_OK;
    for (i = 0; i < m->num_entries && result == TE_OK; i++) {
        te_tensor *x = m->entries[i].tensor;
        if (m->entries[i].kind != TE_ENTRY_PARAMETER || (!x->requires_grad && u->desc.shard < TE_SHARD_PARAMETERS))
            continue;
        if (!te__shards_add(u->set, x, who, m->entries[i].name)) result = te_error_code(m->te);
    }
    for (i = 0; i < m->num_children && result == TE_OK; i++) result = te__unit_shard_tree(u, m->children[i], who);
    return result;
}
static te_result te__unit_shard(te__dp_unit *u, const char *who) {
    te_ctx *te = u->module->te;
    te_result result;
    u->set = (te__shard_set *)te__alloc_zero(te, sizeof(te__shard_set));
    if (!u->set) return TE_ERR_OUT_OF_MEMORY;
    u->set->te = te;
    u->set->group = u->desc.group;
    u->set->rank = te__group_rank(u->desc.group);
    u->set->size = te__group_size(u->desc.group);
    u->set->name = u->module->name;
    result = te__unit_shard_tree(u, u->module, who);
    if (result != TE_OK || u->desc.shard < TE_SHARD_PARAMETERS) return result;
    te__modules_of(te)->around = &te__units_around;
    return te__shards_begin(u->set);
}
static te_result te__unit_make_now(te_module *m, const te_data_parallel_desc *desc, bool whole, const char *who) {
    te__dp_unit *u = te__unit_of(m), **end;
    const bool copies = whole && desc && !desc->no_init_sync && !(u && u->set);
    const bool meets = desc && (copies || (desc->shard && !u));
    te_result result = TE_OK;
    if (!m) return TE_ERR_STATE;
    if (m->te->error_code != TE_OK) return m->te->error_code;
    if (m->te->capture) return te__refuse_capture(m->te, who, "make units before te_graph_begin");
    if (u && u->whole != whole)
        return te__fail(m->te, TE_ERR_INVALID, "%s: \"%s\" is a unit by %s; take that back first (desc NULL)", who,
                        m->name, whole ? "te_fsdp_unit" : "te_data_parallel");
    if (!desc) {
        if (u && u->set) result = te__shards_gather(u->set); /* the parameters become whole again */
        if (result == TE_OK) te_module_remove_attribute(m, TE__UNIT);
        return result;
    }
    if (desc->group && desc->group->te != m->te)
        return te__fail(
            m->te, TE_ERR_INVALID,
            "%s: the group is of another context (%s) than the module (%s); each rank takes the group that it joined",
            who, desc->group->te->device_name, m->te->device_name);
    if (!(desc->gradient_divide_factor >= 0.0f && desc->gradient_divide_factor <= FLT_MAX))
        return te__fail(m->te, TE_ERR_INVALID,
                        "%s: gradient_divide_factor is %g; a positive number, or 0 for the number of ranks, is needed",
                        who, (double)desc->gradient_divide_factor);
    if (!(desc->bucket_cap_mb >= 0.0f && desc->bucket_cap_mb <= FLT_MAX))
        return te__fail(m->te, TE_ERR_INVALID,
                        "%s: bucket_cap_mb is %g; a positive number of MiB, or 0 for %d, is needed", who,
                        (double)desc->bucket_cap_mb, TE__BUCKET_CAP_MB);
    result = te__unit_may_shard(u, m, desc, who);
    if (result != TE_OK) return result;
    if (meets) result = te__unit_meets(m, desc); /* else ranks meet in the first exchange */
    if (result == TE_OK && copies) result = te__unit_share(desc->group, m);
    if (result != TE_OK) return result;
    if (!u) {
        u = (te__dp_unit *)te__alloc_zero(m->te, sizeof(te__dp_unit));
        if (!u) return TE_ERR_OUT_OF_MEMORY;
        u->module = m;
        u->whole = whole;
        u->met = meets;
        u->state.is_last_backward = u->state.reshard_after_backward = u->state.requires_gradient_sync = true;
        if (te_module_set_attribute(m, TE__UNIT, u, te__unit_free) != TE_OK) {
            te__free(m->te, u);
            return te_error_code(m->te);
        }
        for (end = &te__sharding_of(m->te)->units; *end; end = &(*end)->next) {}
        *end = u;
        m->te->tape.watched++;
        u->desc = *desc;
        result = desc->shard ? te__unit_shard(u, who) : TE_OK;
        if (result != TE_OK) te_module_remove_attribute(m, TE__UNIT);
        return result;
    }
    u->desc = *desc;
    return TE_OK;
}
/* Makes a unit. If this rank cannot, the others fail in the collective that they wait for next. */
static te_result te__unit_make(te_module *m, const te_data_parallel_desc *desc, bool whole, const char *who) {
    const te__dp_unit *u = te__unit_of(m);
    te_group *group = desc ? desc->group : u ? u->desc.group : NULL;
    te_result result;
    if (m && group && group->te == m->te) te__group_tells_again(group);
    result = te__unit_make_now(m, desc, whole, who);
    return result != TE_OK && group && m && group->te == m->te ? te__refuse(group, TE__BETWEEN, result) : result;
}
TE_API te_result te_data_parallel(te_module *m, const te_data_parallel_desc *desc) {
    return te__unit_make(m, desc, true, "te_data_parallel");
}
TE_API te_result te_fsdp_unit(te_module *m, const te_data_parallel_desc *desc) {
    return te__unit_make(m, desc, false, "te_fsdp_unit");
}

TE_API bool te_fsdp_get_state(const te_module *m, te_fsdp_state *state) {
    const te__dp_unit *u = te__unit_of(m);
    if (u && state) *state = u->state;
    return u != NULL;
}
static bool te__unit_set(void *user, te_module *m) {
    te__dp_unit *u = te__unit_of(m);
    if (u) u->state = *(const te_fsdp_state *)user;
    return true;
}
TE_API te_result te_fsdp_set_state(te_module *m, te_fsdp_state state) {
    if (!m) return TE_ERR_STATE;
    if (!te__unit_of(m))
        return te__fail(m->te, TE_ERR_INVALID,
                        "te_fsdp_set_state: \"%s\" is no unit; te_fsdp_unit or te_data_parallel makes one", m->name);
    te_module_visit(m, te__unit_set, &state);
    return TE_OK;
}
static void te__unit_set_all(te_module *m, bool on) {
    te_fsdp_state state;
    state.is_last_backward = state.reshard_after_backward = state.requires_gradient_sync = on;
    te_module_visit(m, te__unit_set, &state);
}

/* ---- sharded parameters ---- */

typedef struct te__unit_move_walk {
    bool gathers;
    te__shard_set *asked; /* its gathering has begun; or NULL */
    te_result result;
} te__unit_move_walk;
/* Each gathering begins before the one ahead of it is taken, so that the bytes of a unit travel while the parameters of
 * the unit before it are written. */
static bool te__unit_move_set(void *user, te_module *m) {
    te__unit_move_walk *w = (te__unit_move_walk *)user;
    te__dp_unit *u = te__unit_of(m);
    te__shard_set *before = w->asked;
    if (!u || !u->set || u->set->depth > 0) return true;
    if (!w->gathers) {
        w->result = te__shards_scatter(u->set);
        return w->result == TE_OK;
    }
    w->asked = u->set;
    if (!u->desc.no_prefetch) w->result = te__shards_ask(u->set);
    if (w->result == TE_OK && before) w->result = te__shards_gather(before);
    if (w->result != TE_OK && before) te__shards_forget(before);
    return w->result == TE_OK;
}
static te_result te__units_move(te_module *m, bool gathers) {
    te__unit_move_walk w = TE_ZERO;
    if (!m) return TE_ERR_STATE;
    if (m->te->error_code != TE_OK) return m->te->error_code;
    w.gathers = gathers;
    te_module_visit(m, te__unit_move_set, &w);
    if (w.asked && w.result == TE_OK) w.result = te__shards_gather(w.asked);
    else if (w.asked) te__shards_forget(w.asked);
    return w.result;
}
TE_API te_result te_fsdp_unshard(te_module *m) { return te__units_move(m, true); }
TE_API te_result te_fsdp_reshard(te_module *m) { return te__units_move(m, false); }
TE_API bool te_fsdp_get_slice(const te_tensor *param, te_fsdp_slice *slice) {
    const te__shard *s = param ? param->shard : NULL;
    if (!s || !slice) return s != NULL;
    slice->group = s->set->group;
    slice->shard = s->set->of_parameters ? TE_SHARD_PARAMETERS : TE_SHARD_OPTIMIZER;
    slice->start = s->start;
    slice->length = s->length;
    slice->grad = param->var ? param->var->shard_grad : NULL;
    return true;
}

/* ---- the units of a model ---- */

typedef struct te__unit_walk {
    te_module_visit_fn visit;
    void *user;
    bool stopped;
} te__unit_walk;

static void te__unit_yield(te__unit_walk *w, te_module *m) {
    if (te__unit_of(m) && !w->stopped) w->stopped = !w->visit(w->user, m);
}
static bool te__unit_yield_tree(void *user, te_module *m) {
    te__unit_yield((te__unit_walk *)user, m);
    return true;
}
static bool te__is_multimodal(const char *name) {
    static const char *const names[] = {"visual",
                                        "vision_tower",
                                        "vision_model",
                                        "vit_model",
                                        "image_encoder",
                                        "vision_encoder",
                                        "audio_tower",
                                        "audio_encoder",
                                        "audio_model",
                                        "embed_vision",
                                        "embed_audio",
                                        "mm_projector",
                                        "multi_modal_projector",
                                        "multimodal_projector",
                                        "vision_projector",
                                        "vit_large_projector",
                                        "audio_projector"};
    int i;
    for (i = 0; i < TE__COUNT(names); i++)
        if (strcmp(name, names[i]) == 0) return true;
    return false;
}
/* Visits the multimodal towers and projectors below m, each with all modules below it. */
static void te__units_multimodal(te__unit_walk *w, te_module *m) {
    int i;
    for (i = 0; i < m->num_children; i++) {
        te_module *child = m->children[i];
        if (te__is_multimodal(child->name))
            te_module_visit(child, te__unit_yield_tree, w);
        else
            te__units_multimodal(w, child);
    }
}
static void te__units_layers(te__unit_walk *w, te_module *layers, bool blocks) {
    static const char *const experts[] = {"mlp.experts", "moe.experts", "block_sparse_moe.experts"};
    int i, k;
    for (i = 0; i < te_module_num_children(layers); i++) {
        te_module *block = te_module_child(layers, i);
        if (blocks) te__unit_yield(w, block);
        for (k = 0; k < TE__COUNT(experts); k++) te__unit_yield(w, te_module_find(block, experts[k]));
    }
}
TE_API bool te_fsdp_units_visit(te_module *model, te_module_visit_fn visit, void *user) {
    te__unit_walk w = TE_ZERO;
    te_module *inner;
    if (!model) return true;
    if (!te__has_visitor(model, visit != NULL, "te_fsdp_units_visit")) return false;
    w.visit = visit;
    w.user = user;
    inner = te_module_find(model, "model");
    te__unit_yield(&w, model);
    te__unit_yield(&w, inner);
    if (!inner) inner = model;
    te__unit_yield(&w, te_module_find(inner, "embed_tokens"));
    te__unit_yield(&w, te_module_find(model, "lm_head"));
    te__units_multimodal(&w, model);
    te__units_layers(&w, te_module_find(inner, "layers"), false);
    te__units_layers(&w, te_module_find(model, "mtp.layers"), true);
    return !w.stopped;
}

static bool te__unit_set_visited(void *user, te_module *m) {
    te__unit_set_all(m, *(const bool *)user);
    return true;
}
TE_API te_result te_model_set_requires_grad_sync(te_module *model, bool on) {
    te_fsdp_units_visit(model, te__unit_set_visited, &on);
    return model ? TE_OK : TE_ERR_STATE;
}

static te_result te__units_defer(te_module *part, void *user) {
    (void)user;
    return te_model_set_requires_grad_sync(part, false);
}
static te_result te__units_enable(te_module *part, void *user) {
    (void)user;
    return te_model_set_requires_grad_sync(part, true);
}
static const te_step_hooks te__units_hooks = {te__units_defer, te__units_enable, NULL};
static bool te__units_are_hooked(const te_module *m) {
    return te__attribute_of(m, TE__STEP_HOOKS) == (const void *)&te__units_hooks;
}
TE_API te_result te_model_set_fsdp_optimizations(te_module *model, bool on) {
    if (!on && !te__units_are_hooked(model)) return model ? TE_OK : TE_ERR_STATE;
    return te_module_set_step_hooks(model, on ? &te__units_hooks : NULL);
}

/* ---- behind a backward pass ---- */

static te_result te__unit_root_callback(te__dp_unit *u) {
    te_result result = u->desc.root_post_backward
                           ? te__returned(u->module->te, u->desc.root_post_backward(u->desc.user, u->module),
                                          "the root_post_backward", u->module->name)
                           : TE_OK;
    /* if the callback has already set an error, that error stays */
    if (result != TE_OK)
        te__fail(u->module->te, result, "the root_post_backward of \"%s\" returned %s", u->module->name,
                 te_result_name(result));
    return result;
}
TE_API te_result te_fsdp_post_backward(te_module *unit) {
    te__dp_unit *u = te__unit_of(unit);
    te_result result;
    if (!unit) return TE_ERR_STATE;
    if (unit->te->error_code != TE_OK) return unit->te->error_code;
    if (!u)
        return te__fail(unit->te, TE_ERR_INVALID,
                        "te_fsdp_post_backward: \"%s\" is no unit; te_fsdp_unit or te_data_parallel makes one",
                        unit->name);
    result = te__unit_exchange(u);
    return result == TE_OK ? te__unit_root_callback(u) : result;
}

/* Marks module m as chosen for te__units_exchange_chosen if it is a unit. */
static bool te__unit_choose(void *user, te_module *m) {
    te__dp_unit *u = te__unit_of(m);
    (void)user;
    if (u) u->chosen = true;
    return true;
}
static bool te__units_choose(void *user, te_module *m) {
    te_module_visit(m, te__unit_choose, user);
    return true;
}
/* Exchanges the gradients of every chosen unit once, and clears the choice. */
static te_result te__units_exchange_chosen(te_ctx *te) {
    te_result result = TE_OK;
    te__dp_unit *u;
    for (u = te__sharding_of(te)->units; u; u = u->next) {
        if (u->chosen && result == TE_OK) result = te__unit_exchange(u);
        u->chosen = false;
    }
    return result;
}
/* Called when the backward pass of this rank has failed. Informs the other ranks, which wait in the exchange of the
 * first chosen unit. */
static te_result te__units_refuse_chosen(te_ctx *te, te_result result) {
    te__dp_unit *u, *first = NULL;
    for (u = te__sharding_of(te)->units; u; u = u->next) {
        if (u->chosen && !first) first = u;
        u->chosen = false;
    }
    return first ? te__unit_refuse(first, result) : result;
}
static bool te__unit_call_root(void *user, te_module *m) {
    *(te_result *)user = te__unit_root_callback(te__unit_of(m));
    return *(te_result *)user == TE_OK;
}

static te_result te__stage_run(te_module *stage, const te_stage_backward_desc *d) {
    te_result result = TE_OK;
    int i;
    if (d->type == TE_BACKWARD_WEIGHT) return te_backward_dw(stage);
    for (i = 0; i < d->num_outputs && result == TE_OK; i++)
        result = d->output_grads && d->output_grads[i] ? te_backward_from(d->stage_outputs[i], d->output_grads[i])
                                                       : te_backward(d->stage_outputs[i]);
    if (result == TE_OK && d->type == TE_BACKWARD_FULL && stage->te->deferred) result = te_backward_dw(stage);
    return result;
}
static te_result te__stage_check(te_module *stage, const te_stage_backward_desc *d) {
    int i = 0;
    if ((int)d->type < 0 || d->type > TE_BACKWARD_WEIGHT)
        return te__fail(stage->te, TE_ERR_INVALID,
                        "te_stage_backward: type %d; TE_BACKWARD_FULL, TE_BACKWARD_INPUT and TE_BACKWARD_WEIGHT (0 to "
                        "2) are possible",
                        (int)d->type);
    if (d->type == TE_BACKWARD_WEIGHT) return TE_OK;
    while (d->stage_outputs && i < d->num_outputs && d->stage_outputs[i]) i++;
    if (i > 0 && i == d->num_outputs) return TE_OK;
    return te__fail(
        stage->te, TE_ERR_INVALID,
        "te_stage_backward: %d outputs, and stage_outputs %s; the tensors that the forward has made are needed",
        d->num_outputs, d->stage_outputs ? "has a NULL" : "is NULL");
}
/* Computes the backward passes, one per output, of a stage that is one unit. Exchanges the gradients once, at the end,
 * and only if d->last_backward is true. */
static te_result te__stage_run_whole(te_module *stage, te__dp_unit *u, const te_stage_backward_desc *d) {
    const te_fsdp_state before = u->state;
    te_result result;
    u->state.requires_gradient_sync = false;
    result = te__stage_run(stage, d);
    u->state.requires_gradient_sync = true;
    if (d->last_backward)
        result = result == TE_OK ? te_fsdp_post_backward(stage) : te__unit_refuse(u, result);
    u->state = before;
    return result;
}
TE_API te_result te_stage_backward(te_module *stage, const te_stage_backward_desc *desc) {
    te__dp_unit *u = te__unit_of(stage);
    te_result result;
    if (!stage) return TE_ERR_STATE;
    if (stage->te->error_code != TE_OK) return stage->te->error_code;
    if (!te__has_desc(stage->te, desc, "te_stage_backward")) return te_error_code(stage->te);
    result = te__stage_check(stage, desc);
    if (result != TE_OK) return result;
    if (u && u->whole) return te__stage_run_whole(stage, u, desc);
    if (u) {
        te__unit_set_all(stage, desc->reduce_grad_per_microbatch);
        result = te__stage_run(stage, desc);
        if (!desc->last_backward) return result;
        te__units_choose(NULL, stage);
        if (result != TE_OK) return te__units_refuse_chosen(stage->te, result);
        te__unit_set_all(stage, true);
        result = te__units_exchange_chosen(stage->te);
        return result == TE_OK ? te__unit_root_callback(u) : result;
    }
    if (!te__units_are_hooked(stage)) return te__stage_run(stage, desc);
    te_model_set_requires_grad_sync(stage, false);
    result = te__stage_run(stage, desc);
    if (!desc->last_backward || !te_step_get_is_optim_step(stage->te)) return result;
    te_fsdp_units_visit(stage, te__units_choose, NULL);
    if (result != TE_OK) return te__units_refuse_chosen(stage->te, result);
    te_model_set_requires_grad_sync(stage, true);
    result = te__units_exchange_chosen(stage->te);
    if (result == TE_OK) te_fsdp_units_visit(stage, te__unit_call_root, &result);
    return result;
}
