/* data_parallel/exchange.c: units, and when and how their gradients travel between ranks. A unit is a module whose
 * gradients the ranks exchange together. This file must not depend on what a module computes.
 *
 * The exchange of a unit happens as soon as te_backward has all of its gradients. All ranks must make the exchanges in
 * one order, and not every rank reaches every unit, so the units of a model have a fixed order: the reverse of the
 * order of their modules in the tree, which a backward pass follows as a rule. A unit that is ready early waits for
 * those before it. Units that wait at the end of the pass are exchanged then. */

#define TE__UNIT "te.unit" /* the module attribute that holds the te__dp_unit */
typedef struct te__dp_unit {
    struct te__dp_unit *next; /* the next unit in the list of all units of the context, in order of creation */
    te_module *module;
    te_data_parallel_desc desc;
    bool whole; /* true: created by te_data_parallel; false: created by te_fsdp_unit */
    bool reached; /* the last backward pass has written a gradient of the unit */
    bool chosen;  /* chosen by te__units_choose */
    bool done;    /* exchanged since the last te_backward began */
    te_fsdp_state state;
    uint64_t exchanged_at; /* the value of te->writes after the last exchange */
    te__shard_set *set; /* desc.shard: the slices of this rank; or NULL */
    int depth;          /* how many forwards of the unit's modules run now */
    bool inner;         /* gathered by a node of a checkpointed function that te_backward has run again */
    int pending;        /* how often nodes that te_backward has not played yet read a parameter of the unit */
    bool hidden;        /* no node of the pass is known to read some trained parameter of the unit */
    int place;          /* of the module in its model; used by te__units_number */
} te__dp_unit;

typedef struct te__sharding_state {
    te__dp_unit *units; /* the list of all units of the context */
    te__dp_unit **turn; /* the units that this backward pass exchanges, in order */
    int num_turn, cap_turn, next;
    bool told; /* the ranks know already that this pass has failed: a collective has failed on all of them */
    int foreign;       /* nodes of te_record that te_backward has not played yet */
    bool met_foreign;  /* the pass has such nodes */
    uint64_t began_at; /* te->writes when the pass began */
} te__sharding_state;
static const te__slot te__sharding_slot = {sizeof(te__sharding_state)};
static te__sharding_state *te__sharding_of(const te_ctx *te) {
    return (te__sharding_state *)te__slot_of(te, &te__sharding_slot);
}

static te__dp_unit *te__unit_of(const te_module *m) { return (te__dp_unit *)te__attribute_of(m, TE__UNIT); }
static void te__unit_mark_params(te_module *m, te__dp_unit *u, void *mark) {
    int i;
    if (m != u->module && te__unit_of(m)) return;
    for (i = 0; i < m->num_entries; i++)
        if (m->entries[i].tensor->var) m->entries[i].tensor->var->unit = mark;
    for (i = 0; i < m->num_children; i++) te__unit_mark_params(m->children[i], u, mark);
}
static void te__unit_free(void *value) {
    te__dp_unit *u = (te__dp_unit *)value, **at;
    te_ctx *te = u->module->te;
    te__sharding_state *s = te__sharding_of(te);
    for (at = &s->units; *at; at = &(*at)->next)
        if (*at == u) {
            *at = u->next;
            break;
        }
    te__unit_mark_params(u->module, u, NULL);
    s->num_turn = s->next = 0;
    te->tape.watched--;
    te__shards_close(u->set);
    te__free(te, u);
    if (s->units) return;
    te__free(te, s->turn);
    s->turn = NULL;
    s->cap_turn = 0;
}

/* ---- the exchange ---- */

/* Returns the collective that exchanges the unit's gradients. */
static te__collective te__unit_collective(const te__dp_unit *u) {
    return u->set ? TE__REDUCE_SCATTER : TE__ALL_REDUCE;
}

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

/* Returns whether a gradient of a unit was written after te->writes was `since`. */
static bool te__unit_is_reached(const te__unit_params *p, uint64_t since) {
    int i, k;
    for (i = 0; i < p->n; i++)
        for (k = 0; k < 2; k++) {
            const te_tensor *grad = k ? te_tensor_main_grad(p->list[i]) : te_tensor_grad(p->list[i]);
            if (grad && grad->buffer && grad->buffer->written_at > since) return true;
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
    else te__sharding_of(te)->told = true;
    te->tape.no_grad--;
    te__frame_end(te, NULL, 0);
    te__free(te, grads);
    return result;
}
/* ---- the exchange of slices ---- */

/* Returns f32 [ranks, n]: 1 where this rank has the gradient of a parameter, else 0. */
static te_tensor *te__unit_flags(te_ctx *te, te_tensor *const *grads, int n, int ranks) {
    const size_t bytes = ((size_t)ranks * (size_t)n + 1) * sizeof(float);
    float *flags = (float *)te__alloc(te, bytes);
    int64_t shape[2];
    te_tensor *x;
    int r, i;
    if (!flags) return NULL;
    for (r = 0; r < ranks; r++)
        for (i = 0; i < n; i++) flags[r * n + i] = grads[i] ? 1.0f : 0.0f;
    shape[0] = ranks;
    shape[1] = n;
    x = te_tensor_from_host(te, TE_F32, 2, shape, flags);
    te__free(te, flags);
    return x;
}
/* Returns one f32 matrix [ranks, columns] of all gradients; row r is for rank r, and has its slices of the gradients.
 * Behind them, each row has one number per parameter: 1 if this rank has the gradient, else 0. Sets *lacks if this rank
 * lacks a gradient. */
static te_tensor *te__unit_rows(te__dp_unit *u, const te__unit_params *p, int64_t columns, te_tensor **grads,
                                bool *lacks) {
    te_ctx *te = u->module->te;
    te_tensor *rows = te__empty_2d(te, TE_F32, u->set->size, columns), *flags;
    te_result result = rows ? TE_OK : te_error_code(te);
    const int64_t size = (int64_t)sizeof(float);
    int64_t at = 0;
    bool gaps = false; /* slices may be shorter than their places */
    int i;
    for (i = 0; i < p->n && result == TE_OK; i++) {
        const te__shard *s = p->list[i]->shard;
        result = te__main_or_grad(p->list[i], &grads[i]);
        gaps = gaps || !grads[i] || s->chunk * u->set->size != s->rows;
    }
    if (result == TE_OK && gaps) result = te_tensor_fill(rows, 0.0);
    for (i = 0; i < p->n && result == TE_OK; i++) {
        const te__shard *s = p->list[i]->shard;
        if (grads[i])
            result = te__shard_copy(rows, columns * size, at * size, TE_F32, grads[i], grads[i]->dtype, s, s->width,
                                    s->width, true);
        *lacks = *lacks || !grads[i];
        at += s->chunk * s->width;
    }
    if (result != TE_OK) return NULL;
    flags = te__unit_flags(te, grads, p->n, u->set->size);
    return flags && te_tensor_copy(te_tensor_narrow(rows, 1, at, p->n), flags) == TE_OK ? rows : NULL;
}
/* Adds this rank's slices of the summed gradients, times `factor`, to the gradients of the slices. Drops the whole
 * gradients. */
static te_result te__unit_keep_slices(te__dp_unit *u, const te__unit_params *p, te_tensor *row, te_tensor **grads,
                                      bool lacks, float factor) {
    te_ctx *te = u->module->te;
    float *count = lacks ? (float *)te__alloc(te, ((size_t)p->n + 1) * sizeof(float)) : NULL;
    te_result result = lacks && !count ? TE_ERR_OUT_OF_MEMORY : TE_OK;
    int64_t at = 0;
    int i;
    if (count) result = te_tensor_to_f32(te_tensor_narrow(row, 0, te__numel(row) - p->n, p->n), count);
    for (i = 0; i < p->n && result == TE_OK; i++) {
        te_tensor *x = p->list[i], *own, *from;
        te__shard *s = x->shard;
        const int64_t begin = at;
        at += s->chunk * s->width;
        if (!grads[i] && count[i] == 0.0f) continue;
        from = te_tensor_narrow(row, 0, begin, s->length);
        own = x->var->shard_grad;
        if (own) { /* an exchange before this one, since the last step */
            result = from ? te__axpby_into(own, from, own, factor, 1.0f) : te_error_code(te);
        } else {
            own = te__empty_1d(te, grads[i] ? grads[i]->dtype : x->dtype, s->length);
            result = from && own ? te__unit_move(from, own, factor) : te_error_code(te);
            if (result != TE_OK) break;
            x->var->shard_grad = te_tensor_retain(own);
            own->is_gradient = s->fresh = true;
        }
        if (result == TE_OK && te_tensor_main_grad(x)) result = te_tensor_fill(te_tensor_main_grad(x), 0.0);
        te_tensor_release(x->var->grad);
        x->var->grad = NULL;
    }
    te__free(te, count);
    return result;
}
/* Checks that the unit's trained parameters are those that it had when it was sharded. */
static te_result te__unit_same_params(const te__dp_unit *u, const te__unit_params *p) {
    int i;
    for (i = 0; i < p->n; i++)
        if (!p->list[i]->shard || p->list[i]->shard->set != u->set)
            return te__fail(u->module->te, TE_ERR_STATE,
                            "unit \"%s\": its trained parameter %d of %d was added, or made trainable, after the unit "
                            "was sharded; make the unit after all parameters",
                            u->module->name, i + 1, p->n);
    return te__shards_same(u->set);
}
static te_result te__unit_reduce_scatter(te__dp_unit *u, const te__unit_params *p) {
    te_ctx *te = u->module->te;
    const int size = u->set->size;
    const float divide = u->desc.gradient_divide_factor > 0.0f ? u->desc.gradient_divide_factor : (float)size;
    te_tensor **grads, *rows = NULL, *row = NULL;
    te_result result = te->capture ? te__refuse_capture(te, "the exchange of sharded gradients",
                                                        "leave te_data_parallel_desc.shard 0 in graphs")
                                   : te__unit_same_params(u, p);
    int64_t columns = p->n;
    bool lacks = false;
    int i;
    if (result != TE_OK) {
        te__sharding_of(te)->told = true;
        return te__refuse(u->desc.group, TE__REDUCE_SCATTER, result);
    }
    if (p->n == 0) return TE_OK;
    for (i = 0; i < p->n; i++) columns += p->list[i]->shard->chunk * p->list[i]->shard->width;
    grads = (te_tensor **)te__alloc_zero(te, (size_t)p->n * sizeof(te_tensor *));
    te__frame_begin(te);
    te->tape.no_grad++;
    if (grads) rows = te__unit_rows(u, p, columns, grads, &lacks);
    if (rows) row = te__empty_1d(te, TE_F32, columns);
    result = row ? te__reduce_scatter(u->desc.group, rows, row)
                 : te__refuse(u->desc.group, TE__REDUCE_SCATTER, te_error_code(te));
    if (result != TE_OK) te__sharding_of(te)->told = true;
    else if (!te->warming) result = te__unit_keep_slices(u, p, row, grads, lacks, 1.0f / divide);
    te->tape.no_grad--;
    te__frame_end(te, NULL, 0);
    te__free(te, grads);
    return result;
}

/* ---- one unit ---- */

/* Exchanges the gradients of u between the ranks now, if state.requires_gradient_sync is set. */
static te_result te__unit_exchange(te__dp_unit *u) {
    te__unit_params p = TE_ZERO;
    te_ctx *te = u->module->te;
    te_result result = TE_OK;
    int i;
    p.unit = u->module;
    if (!u->state.requires_gradient_sync) return TE_OK;
    if (!te__unit_list(&p, u->module)) result = te_error_code(te);
    for (i = 0; i < p.n && result == TE_OK; i++) /* during te_backward a gradient may share memory with another */
        if (p.list[i]->var) result = te__leaf_own(te, p.list[i]->var);
    if (result != TE_OK) {
        te__sharding_of(te)->told = true;
        result = te__refuse(u->desc.group, te__unit_collective(u), result);
    } else if (u->desc.post_backward) {
        result = te__returned(te, u->desc.post_backward(u->desc.user, u->module), "the post_backward", u->module->name);
        /* if the callback has already set an error, that error stays */
        if (result != TE_OK)
            te__fail(te, result, "the post_backward of \"%s\" returned %s", u->module->name, te_result_name(result));
        te__sharding_of(te)->told = result != TE_OK; /* its own collectives are its own affair */
    } else
        result = u->set ? te__unit_reduce_scatter(u, &p) : te__unit_reduce(u, &p);
    u->done = true;
    u->exchanged_at = te->writes;
    te__unit_params_free(te, &p);
    return result;
}

/* ---- a backward pass ---- */

/* Gives each unit of the context the place of its module in its model. */
static bool te__unit_number(void *user, te_module *m) {
    te__dp_unit *u = te__unit_of(m);
    if (u) u->place = *(int *)user;
    ++*(int *)user;
    return true;
}
/* Appends the units of a model to those that exchange in this pass: the last module of the tree comes first. */
static void te__units_queue(te_ctx *te, const te_module *root) {
    te__sharding_state *s = te__sharding_of(te);
    const int first = s->num_turn;
    te__dp_unit *u;
    int places = 0;
    te_module_visit((te_module *)root, te__unit_number, &places);
    for (u = s->units; u; u = u->next) {
        int i;
        if (!u->state.requires_gradient_sync || u->done || te__root_of(u->module) != root) continue;
        if (!te__grow(te, (void **)&s->turn, &s->cap_turn, s->num_turn, sizeof(te__dp_unit *))) return;
        for (i = s->num_turn++; i > first && s->turn[i - 1]->place < u->place; i--) s->turn[i] = s->turn[i - 1];
        s->turn[i] = u;
    }
}
/* Returns whether u is the first unit of its model in the list of all units. */
static bool te__unit_is_first(const te__sharding_state *s, const te__dp_unit *u) {
    const te__dp_unit *other = s->units;
    while (te__root_of(other->module) != te__root_of(u->module)) other = other->next;
    return other == u;
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
/* Adds `step` to the counts of the unit that has the variable v. */
static void te__unit_count(te__var *v, int step) {
    if (v && v->unit) ((te__dp_unit *)v->unit)->pending += step;
}
/* Adds `step` to the counts of the units that have the parameters that a node reads. */
static void te__units_count(te__sharding_state *s, const te__node *node, int step) {
    const te__snapshot *again = te__checkpoint_snapshot(node);
    int k;
    if (node->foreign) s->foreign += step;
    for (k = 0; k < node->num_inputs; k++) te__unit_count(node->inputs[k], step);
    for (k = 0; again && k < again->num_params; k++) te__unit_count(again->params[k]->var, step);
}
/* Returns whether a trained parameter of u was not marked in the pass number `pass`. */
static bool te__unit_is_hidden(const te__dp_unit *u, const te_module *m, uint64_t pass) {
    bool hidden = false;
    int i;
    if (m != u->module && te__unit_of(m)) return false;
    for (i = 0; i < m->num_entries && !hidden; i++) {
        const te_tensor *x = m->entries[i].tensor;
        hidden = m->entries[i].kind == TE_ENTRY_PARAMETER && x->requires_grad && !(x->var && x->var->pass == pass);
    }
    for (i = 0; i < m->num_children && !hidden; i++) hidden = te__unit_is_hidden(u, m->children[i], pass);
    return hidden;
}
/* Marks the variables that a backward pass from the `count` tensors y can reach, and counts how often its nodes read
 * parameters of each unit. Decides which units exchange gradients in the pass. */
static void te__units_mark(te_ctx *te, const te__segment *s, te_tensor *const *y, int count) {
    const uint64_t pass = ++te->tape.passes;
    te__sharding_state *state = te__sharding_of(te);
    te__dp_unit *u;
    int i, k;
    state->num_turn = state->next = state->foreign = 0;
    state->told = state->met_foreign = false;
    state->began_at = te->writes;
    if (!state->units) return;
    for (u = state->units; u; u = u->next) {
        u->pending = 0;
        u->done = false;
        te__unit_mark_params(u->module, u, u);
    }
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
        te__units_count(state, node, 1);
    }
    state->met_foreign = state->foreign > 0;
    for (u = state->units; u; u = u->next) u->hidden = state->met_foreign && te__unit_is_hidden(u, u->module, pass);
    for (u = state->units; u; u = u->next)
        if (te__unit_is_first(state, u) && te__units_are_marked(te__root_of(u->module), pass))
            te__units_queue(te, te__root_of(u->module));
}

/* Returns whether te_backward_dw still has to compute weight gradients of `top` or of a module below it. */
static bool te__units_are_deferred(const te_module *top) {
    const te__deferred *d = top->te->deferred;
    while (d && !te__scaling_below(d->owner, top)) d = d->next;
    return d != NULL;
}

/* Returns whether a node has saved a parameter of u whose memory is gathered and released. */
static bool te__unit_is_saved(const te__dp_unit *u, const te__node *node) {
    int i;
    for (i = 0; i < node->num_saved; i++) {
        const te_tensor *x = node->saved[i];
        if (x && x->moves && x->shard && x->shard->set == u->set) return true;
    }
    return false;
}
/* Called before te_backward plays a node: gathers the sharded parameters that the node has saved. If a checkpointed
 * function spans several units, first releases those that its nodes have gathered before: as a rule their turn is
 * over, else the next node gathers them again. */
static te_result te__units_node_begins(te_ctx *te, te__node *node) {
    te__sharding_state *s = te__sharding_of(te);
    te_result result = TE_OK;
    te__dp_unit *u;
    bool gathers = false;
    for (u = s->units; u && !gathers; u = u->next)
        gathers = u->set && !te__shards_are_whole(u->set) && te__unit_is_saved(u, node);
    if (!gathers) return TE_OK;
    for (u = s->units; u && result == TE_OK; u = u->next) {
        if (!u->inner || u->depth > 0 || te__unit_is_saved(u, node)) continue;
        u->inner = false;
        if (u->state.reshard_after_backward) result = te__shards_scatter(u->set);
    }
    for (u = s->units; u && result == TE_OK; u = u->next) {
        if (!u->set || te__shards_are_whole(u->set) || !te__unit_is_saved(u, node)) continue;
        result = te__shards_gather(u->set);
        u->inner = te->tape.plays > 1;
        if (result != TE_OK) s->told = s->told || u->set->told;
    }
    return result;
}
/* Called when te_backward has played a node. Releases gathered parameters that no later node reads, and exchanges the
 * gradients of units that are complete and whose turn it is. */
static te_result te__units_node_ends(te_ctx *te, te__node *node) {
    te__sharding_state *s = te__sharding_of(te);
    te_result result = TE_OK;
    te__dp_unit *u;
    if (te->tape.plays != 1) return TE_OK; /* a checkpoint's node counts for the nodes of its function */
    te__units_count(s, node, -1);
    for (u = s->units; u && result == TE_OK; u = u->next)
        if (u->set && u->set->whole && u->pending == 0 && u->depth == 0 && u->state.reshard_after_backward)
            result = te__shards_scatter(u->set);
    while (result == TE_OK && !te->warming && s->next < s->num_turn) {
        u = s->turn[s->next];
        if (u->pending != 0 || u->desc.post_backward || te__units_are_deferred(u->module)) break;
        if (u->hidden && s->foreign > 0) break; /* such a node may make the gradient that is still missing */
        s->next++;
        result = te__unit_exchange(u);
    }
    return result;
}

/* Ends a pass: releases gathered parameters, and drops the slices' gradients that a failed pass has made. */
static te_result te__units_leave(te_ctx *te, te_result result) {
    te__sharding_state *s = te__sharding_of(te);
    te__dp_unit *u;
    int i;
    for (u = s->units; u; u = u->next) {
        te__unit_mark_params(u->module, u, NULL);
        u->inner = false;
        for (i = 0; u->set && i < u->set->n; i++) {
            te__shard *x = u->set->list[i];
            if (x->fresh && result != TE_OK && x->param->var) {
                te_tensor_release(x->param->var->shard_grad);
                x->param->var->shard_grad = NULL;
            }
            x->fresh = false;
        }
        if (u->set && u->depth == 0 && u->state.reshard_after_backward) {
            const te_result scattered = te__shards_scatter(u->set);
            if (result == TE_OK) result = scattered;
        }
    }
    s->num_turn = s->next = 0;
    return result;
}
/* Queues the units of models whose gradients were written, though te__units_mark has not seen that nodes read their
 * parameters. m: the module of a te_backward_dw, which has completed gradients. NULL: a pass with nodes of te_record.
 */
static te_result te__units_queue_written(te_ctx *te, const te_module *m) {
    te__sharding_state *s = te__sharding_of(te);
    te_result result = TE_OK;
    te__dp_unit *u, *other;
    if (m) s->num_turn = s->next = 0;
    for (u = s->units; u && result == TE_OK; u = u->next) {
        te__unit_params p = TE_ZERO;
        p.unit = u->module;
        if (!te__unit_list(&p, u->module)) result = te_error_code(te);
        u->reached = result == TE_OK && !te__units_are_deferred(te__root_of(u->module)) &&
                     te__unit_is_reached(&p, m ? u->exchanged_at : s->began_at);
        te__unit_params_free(te, &p);
    }
    for (u = s->units; u && result == TE_OK; u = u->next) {
        bool reached = false;
        if (!te__unit_is_first(s, u)) continue;
        if (!m && te__units_are_marked(te__root_of(u->module), te->tape.passes)) continue; /* queued already */
        for (other = u; other; other = other->next)
            reached = reached || (other->reached && te__root_of(other->module) == te__root_of(u->module));
        if (reached) te__units_queue(te, te__root_of(u->module));
    }
    return result;
}
/* Tells the other ranks of the failed model that this rank has failed. m: the module of a te_backward_dw, or NULL. */
static void te__units_refuse(te_ctx *te, const te_module *m, te_result result) {
    te__sharding_state *s = te__sharding_of(te);
    if (s->told) return;
    if (m) {
        s->num_turn = s->next = 0;
        te__units_queue(te, te__root_of(m));
    }
    if (s->next < s->num_turn)
        te__refuse(s->turn[s->next]->desc.group, te__unit_collective(s->turn[s->next]), result);
}
/* Exchanges what was not exchanged yet when a backward pass ends. If the pass has reached one unit of a model,
 * exchanges the gradients of all units of the model, because other ranks may have reached other units. */
static te_result te__units_exchange(te_ctx *te, const te_module *m, te_result result) {
    te__sharding_state *s = te__sharding_of(te);
    if (!s->units) return result;
    if (te->warming) return te__units_leave(te, result);
    if (m) s->told = false;
    if ((m || s->met_foreign) && result == TE_OK) result = te__units_queue_written(te, m);
    if (result != TE_OK) te__units_refuse(te, m, result);
    while (result == TE_OK && s->next < s->num_turn) {
        te__dp_unit *u = s->turn[s->next++];
        /* te_backward_dw will compute the remaining gradients and exchange them */
        if (u->done || te__units_are_deferred(te__root_of(u->module))) continue;
        result = te__unit_exchange(u);
    }
    return te__units_leave(te, result);
}

static const te__room te__sharding_room = {&te__sharding_slot, NULL, NULL, NULL, NULL, NULL, NULL, te__units_mark, NULL,
                                           te__units_exchange, te__units_node_begins, te__units_node_ends, NULL};

/* ---- around forwards ---- */

/* Returns the unit that m belongs to, if its parameters are sharded; or NULL. */
static te__dp_unit *te__unit_around(const te_module *m) {
    te__dp_unit *u = NULL;
    for (; m && !u; m = m->parent) u = te__unit_of(m);
    return u && u->set && u->set->of_parameters ? u : NULL;
}
/* Returns whether te_backward runs the forward of u's module, or of a module in it, again. The parameters are needed
 * right after it. */
static bool te__unit_is_replayed(const te__dp_unit *u) {
    const te_module *m = te__checkpoint_module(u->module->te->playing);
    while (m && m != u->module) m = m->parent;
    return u->module->te->tape.replays > 0 && m;
}
static te_result te__unit_enter(te_module *m) {
    te__dp_unit *u = te__unit_around(m);
    te_result result = TE_OK;
    if (!u) return TE_OK;
    if (u->depth == 0) result = te__shards_gather(u->set);
    if (result == TE_OK) u->depth++;
    else if (u->set->told) te__sharding_of(m->te)->told = true;
    return result;
}
/* Releases the unit's parameters after its outermost forward. After a failure of this rank, tells the ranks that wait
 * for it in a gathering. */
static te_result te__unit_leave(te_module *m, te_result result) {
    te__dp_unit *u = te__unit_around(m), *other;
    te__sharding_state *s = te__sharding_of(m->te);
    te_result scattered;
    bool outermost = true;
    if (!u || --u->depth > 0) return result;
    for (other = s->units; other; other = other->next) outermost = outermost && other->depth == 0;
    if (outermost && m->te->tape.plays == 0) {
        if (result != TE_OK && !s->told) te__refuse(u->desc.group, TE__ALL_GATHER, result);
        s->told = false;
    }
    if (result == TE_OK && (te__unit_is_replayed(u) || (u->desc.no_reshard_after_forward && te_grad_enabled(m->te))))
        return TE_OK;
    scattered = te__shards_scatter(u->set);
    return result == TE_OK ? scattered : result;
}
static const te__around te__units_around = {te__unit_enter, te__unit_leave};
