/* data_parallel/sharding.c: units, their flags (te_fsdp_state), and the gradient exchanges of a pipeline stage. A unit
 * is a module whose gradients the ranks exchange together. This file must not depend on what a module computes. */

#define TE__UNIT "te.unit" /* the module attribute that holds the te__dp_unit */
typedef struct te__dp_unit {
    struct te__dp_unit *next; /* the next unit in the list of all units of the context, in order of creation */
    te_module *module;
    te_data_parallel_desc desc;
    bool whole; /* true: created by te_data_parallel; false: created by te_fsdp_unit */
    bool reached; /* the last backward pass has written a gradient of the unit */
    bool chosen;  /* chosen by te__units_choose */
    te_fsdp_state state;
    uint64_t exchanged_at; /* the value of te->writes after the last exchange */
} te__dp_unit;

typedef struct te__sharding_state {
    te__dp_unit *units; /* the list of all units of the context */
} te__sharding_state;
static const te__slot te__sharding_slot = {sizeof(te__sharding_state)};
static te__sharding_state *te__sharding_of(const te_ctx *te) {
    return (te__sharding_state *)te__slot_of(te, &te__sharding_slot);
}

static te__dp_unit *te__unit_of(const te_module *m) { return (te__dp_unit *)te__attribute_of(m, TE__UNIT); }
static void te__unit_free(void *value) {
    te__dp_unit *u = (te__dp_unit *)value, **at;
    te_ctx *te = u->module->te;
    for (at = &te__sharding_of(te)->units; *at; at = &(*at)->next)
        if (*at == u) {
            *at = u->next;
            break;
        }
    te__free(te, u);
}

/* ---- the exchange ---- */

/* The trained parameters of a unit, each listed once. */
typedef struct te__unit_params {
    te_module *unit;
    te_tensor **list;
    int n, cap;
    int64_t numel;
} te__unit_params;

static bool te__unit_list(te__unit_params *p, te_module *m) {
    int i, k;
    if (m != p->unit && te__unit_of(m)) return true;
    for (i = 0; i < m->num_entries; i++) {
        te_tensor *x = m->entries[i].tensor;
        if (m->entries[i].kind != TE_ENTRY_PARAMETER || !x->requires_grad) continue;
        for (k = 0; k < p->n && p->list[k] != x; k++) {}
        if (k < p->n) continue;
        if (!te__grow(m->te, (void **)&p->list, &p->cap, p->n, sizeof(te_tensor *))) return false;
        p->list[p->n++] = x;
        p->numel += te__numel(x);
    }
    for (i = 0; i < m->num_children; i++)
        if (!te__unit_list(p, m->children[i])) return false;
    return true;
}
static void te__unit_params_free(te_ctx *te, te__unit_params *p) {
    te__free(te, p->list);
}

/* Returns whether a gradient of u was written since u last exchanged. */
static bool te__unit_is_reached(const te__dp_unit *u, const te__unit_params *p) {
    int i, k;
    for (i = 0; i < p->n; i++)
        for (k = 0; k < 2; k++) {
            const te_tensor *grad = k ? te_tensor_main_grad(p->list[i]) : te_tensor_grad(p->list[i]);
            if (grad && grad->buffer && grad->buffer->written_at > u->exchanged_at) return true;
        }
    return false;
}

/* Computes out = factor * x. Treats x and out as vectors; they have the same number of elements. */
static te_result te__unit_move(te_tensor *x, te_tensor *out, float factor) {
    te_op_axpby_args a = TE_ZERO;
    if (te__numel(x) == 0) return TE_OK;
    a.x = te__alias_1d(x, 0, x->dtype, te__numel(x));
    a.out = te__alias_1d(out, 0, out->dtype, te__numel(out));
    a.alpha = factor;
    return a.x && a.out ? te_op_axpby(x->te, &a) : te_error_code(x->te);
}
/* Returns one f32 vector of all gradients; a missing gradient counts as zeros.
 * Behind the gradients, the vector has one number per parameter: 1 if this rank has the gradient, else 0. So the
 * all-reduce also counts the ranks that have the gradient.
 * Sets *lacks if this rank lacks a gradient. */
static te_tensor *te__unit_flat(te_ctx *te, const te__unit_params *p, te_tensor **grads, bool *lacks) {
    te_tensor *flat = te__empty_1d(te, TE_F32, p->numel + p->n);
    int64_t at = 0;
    te_result result = flat ? te_tensor_fill(te_tensor_narrow(flat, 0, p->numel, p->n), 1.0) : te_error_code(te);
    int i;
    for (i = 0; i < p->n && result == TE_OK; i++) {
        te_tensor *to = te_tensor_narrow(flat, 0, at, te__numel(p->list[i]));
        at += te__numel(p->list[i]);
        result = to ? te__main_or_grad(p->list[i], &grads[i]) : te_error_code(te);
        if (result != TE_OK) break;
        if (grads[i]) {
            result = te__unit_move(grads[i], to, 1.0f);
            continue;
        }
        *lacks = true;
        result = te_tensor_fill(to, 0.0);
        if (result == TE_OK) result = te_tensor_fill(te_tensor_narrow(flat, 0, p->numel + i, 1), 0.0);
    }
    return result == TE_OK ? flat : NULL;
}
/* Stores the summed gradients, times `factor`, as gradients of the parameters. If only other ranks have the gradient
 * of a parameter, creates it on this rank. */
static te_result te__unit_spread(te__dp_unit *u, const te__unit_params *p, te_tensor *flat, te_tensor **grads,
                                 bool lacks, float factor) {
    te_ctx *te = u->module->te;
    const int fresh = te->tape.num_fresh;
    float *count = lacks ? (float *)te__alloc(te, ((size_t)p->n + 1) * sizeof(float)) : NULL;
    int64_t at = 0;
    te_result result = lacks && !count ? TE_ERR_OUT_OF_MEMORY : TE_OK;
    int i;
    if (count) result = te_tensor_to_f32(te_tensor_narrow(flat, 0, p->numel, p->n), count);
    for (i = 0; i < p->n && result == TE_OK; i++) {
        te_tensor *param = p->list[i], *from = te_tensor_narrow(flat, 0, at, te__numel(param)), *to = grads[i];
        at += te__numel(param);
        if (!to && count[i] == 0.0f) continue;
        if (!to) to = te_tensor_empty(te, param->dtype, param->ndim, param->shape);
        result = from && to ? te__unit_move(from, to, factor) : te_error_code(te);
        if (result == TE_OK && !grads[i]) result = te__var_add_grad(te, param->var, to);
    }
    result = te__leaves_own(te, fresh, result);
    te__free(te, count);
    return result;
}
static te_result te__unit_reduce(te__dp_unit *u, const te__unit_params *p) {
    te_ctx *te = u->module->te;
    const int size = te__group_size(u->desc.group);
    const float divide = u->desc.gradient_divide_factor > 0.0f ? u->desc.gradient_divide_factor : (float)size;
    te_tensor **grads, *flat;
    bool lacks = false;
    te_result result;
    if (p->n == 0 || (size == 1 && divide == 1.0f)) return TE_OK;
    grads = (te_tensor **)te__alloc_zero(te, (size_t)p->n * sizeof(te_tensor *));
    te__frame_begin(te);
    te->tape.no_grad++;
    flat = grads ? te__unit_flat(te, p, grads, &lacks) : NULL;
    result = flat ? te__all_reduce(u->desc.group, flat, TE_REDUCE_SUM)
                  : te__refuse(u->desc.group, TE__ALL_REDUCE, te_error_code(te));
    if (result == TE_OK) result = te__unit_spread(u, p, flat, grads, lacks, 1.0f / divide);
    te->tape.no_grad--;
    te__frame_end(te, NULL, 0);
    te__free(te, grads);
    return result;
}
/* Exchanges the gradients of u between the ranks now, if state.requires_gradient_sync is set. */
static te_result te__unit_exchange(te__dp_unit *u) {
    te__unit_params p = TE_ZERO;
    te_ctx *te = u->module->te;
    te_result result = TE_OK;
    p.unit = u->module;
    if (!u->state.requires_gradient_sync) return TE_OK;
    if (!te__unit_list(&p, u->module))
        result = te__refuse(u->desc.group, TE__ALL_REDUCE, te_error_code(te));
    else if (u->desc.post_backward) {
        result = te__returned(te, u->desc.post_backward(u->desc.user, u->module), "the post_backward", u->module->name);
        /* if the callback has already set an error, that error stays */
        if (result != TE_OK)
            te__fail(te, result, "the post_backward of \"%s\" returned %s", u->module->name, te_result_name(result));
    } else
        result = te__unit_reduce(u, &p);
    u->exchanged_at = te->writes;
    te__unit_params_free(te, &p);
    return result;
}

/* Marks the variables that a backward pass from the `count` tensors y can reach. If the pass fails, te__units_exchange
 * searches for a model with marked parameters, and tells the other ranks of this model about the failure. */
static void te__units_mark(te_ctx *te, const te__segment *s, te_tensor *const *y, int count) {
    const uint64_t pass = ++te->tape.passes;
    int i, k;
    for (i = 0; i < count; i++)
        if (y[i]->var) y[i]->var->pass = pass;
    for (i = s->num_nodes - 1; i >= 0; i--) {
        const te__node *node = s->nodes[i];
        const te__snapshot *again;
        for (k = 0; node && k < node->num_outputs && !(node->outputs[k] && node->outputs[k]->pass == pass); k++) {}
        if (!node || k == node->num_outputs) continue;
        for (k = 0; k < node->num_inputs; k++)
            if (node->inputs[k]) node->inputs[k]->pass = pass;
        again = te__checkpoint_snapshot(node);
        for (k = 0; again && k < again->num_params; k++)
            if (again->params[k]->var) again->params[k]->var->pass = pass;
    }
}
/* Returns whether te__units_mark has marked a parameter of m, or of a module below, in the pass number `pass`. */
static bool te__units_are_marked(const te_module *m, uint64_t pass) {
    bool marked = false;
    int i;
    for (i = 0; i < m->num_entries && !marked; i++)
        marked = m->entries[i].tensor->var && m->entries[i].tensor->var->pass == pass;
    for (i = 0; i < m->num_children && !marked; i++) marked = te__units_are_marked(m->children[i], pass);
    return marked;
}
/* Returns whether te_backward_dw still has to compute weight gradients of `root` or of a module below it. */
static bool te__units_are_deferred(const te_module *root) {
    const te__deferred *d = root->te->deferred;
    while (d && !te__scaling_below(d->owner, root)) d = d->next;
    return d != NULL;
}
/* Exchanges the gradients at the end of a backward pass. If the pass has reached one unit of a model, exchanges the
 * gradients of all units of the model, because other ranks may have reached other units.
 * After a failure, tells the other ranks of the failed model that this rank has failed. */
static te_result te__units_exchange(te_ctx *te, const te_module *m, te_result result) {
    te__dp_unit *u, *other;
    if (te->warming) return result;
    for (u = te__sharding_of(te)->units; u && result == TE_OK; u = u->next) {
        te__unit_params p = TE_ZERO;
        p.unit = u->module;
        u->reached = false;
        /* te_backward_dw will compute the remaining gradients and exchange them. */
        if (te__units_are_deferred(te__root_of(u->module))) continue;
        if (!te__unit_list(&p, u->module)) result = te_error_code(te);
        u->reached = result == TE_OK && te__unit_is_reached(u, &p);
        te__unit_params_free(te, &p);
    }
    for (u = te__sharding_of(te)->units; u; u = u->next) {
        const te_module *root = te__root_of(u->module);
        bool reached = false;
        if (!u->state.requires_gradient_sync) continue;
        if (result != TE_OK) {
            if (m ? root == te__root_of(m) : te__units_are_marked(root, te->tape.passes))
                return te__refuse(u->desc.group, TE__ALL_REDUCE, result);
            continue;
        }
        for (other = te__sharding_of(te)->units; other && !reached; other = other->next)
            reached = other->reached && te__root_of(other->module) == root;
        if (reached) result = te__unit_exchange(u);
        if (result != TE_OK) return result;
    }
    return result;
}

static const te__room te__sharding_room = {&te__sharding_slot, NULL, NULL, NULL, NULL, NULL, NULL, te__units_mark, NULL,
                                           te__units_exchange, NULL};

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
static te_result te__unit_make(te_module *m, const te_data_parallel_desc *desc, bool whole, const char *who) {
    te__dp_unit *u = te__unit_of(m), **end;
    te_result result = TE_OK;
    if (!m) return TE_ERR_STATE;
    if (m->te->error_code != TE_OK) return m->te->error_code;
    if (m->te->capture) return te__refuse_capture(m->te, who, "make units before te_graph_begin");
    if (u && u->whole != whole)
        return te__fail(m->te, TE_ERR_INVALID, "%s: \"%s\" is a unit by %s; take that back first (desc NULL)", who,
                        m->name, whole ? "te_fsdp_unit" : "te_data_parallel");
    if (!desc) {
        te_module_remove_attribute(m, TE__UNIT);
        return TE_OK;
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
    if (whole && !desc->no_init_sync) result = te__unit_share(desc->group, m);
    if (result != TE_OK) return result;
    if (!u) {
        u = (te__dp_unit *)te__alloc_zero(m->te, sizeof(te__dp_unit));
        if (!u) return TE_ERR_OUT_OF_MEMORY;
        u->module = m;
        u->whole = whole;
        u->state.is_last_backward = u->state.reshard_after_backward = u->state.requires_gradient_sync = true;
        if (te_module_set_attribute(m, TE__UNIT, u, te__unit_free) != TE_OK) {
            te__unit_free(u);
            return te_error_code(m->te);
        }
        for (end = &te__sharding_of(m->te)->units; *end; end = &(*end)->next) {}
        *end = u;
    }
    u->desc = *desc;
    return TE_OK;
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
    return first ? te__refuse(first->desc.group, TE__ALL_REDUCE, result) : result;
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
        result = result == TE_OK ? te_fsdp_post_backward(stage) : te__refuse(u->desc.group, TE__ALL_REDUCE, result);
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
