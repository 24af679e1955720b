/* train/optimizer.c: the code that all optimizers share: gradients, steps, and states by name. This file must not
 * depend on the arithmetic of any optimizer, or on files on disk. */

/* ---- creation ---- */

static bool te__opt_add(void *user, te_module *m, const char *path, te_tensor *x, te_entry_kind kind) {
    te_optimizer *opt = (te_optimizer *)user;
    te_ctx *te = opt->te;
    te__opt_param *p;
    (void)m;
    if (kind != TE_ENTRY_PARAMETER || !x->requires_grad || te__opt_find(opt, x)) return true;
    if (x->quantized ? !x->quantized->quantizer : (!x->buffer && !x->shard) || !te__is_contiguous(x))
        return te__not_ok(
            te, TE_ERR_INVALID,
            "%s: parameter %s is %s; a plain contiguous tensor, or a quantized one that has its quantizer, is needed",
            opt->cls->create, path,
            x->quantized ? "quantized and has none"
            : x->buffer  ? "strided"
                         : "without memory");
    if (x->quantized && opt->options.no_master_weights)
        return te__not_ok(
            te, TE_ERR_INVALID,
            "%s: parameter %s is stored quantized, and no_master_weights is set; quantized weights need masters",
            opt->cls->create, path);
    if (x->shard && !te__opt_may_shard(opt, path)) return false;
    if (!te__grow(te, (void **)&opt->params, &opt->cap_params, opt->num_params, sizeof(te__opt_param))) return false;
    p = &opt->params[opt->num_params++];
    memset(p, 0, sizeof(*p));
    p->path = te__copy_string(te, path);
    p->param = te_tensor_retain(x);
    p->shard = x->shard;
    if (p->shard) p->shard->refs++;
    opt->sharded = opt->sharded || p->shard;
    opt->spreads = opt->spreads || p->shard || x->split;
    if (!p->path) return false;
    return te__opt_make_all(opt, p) == TE_OK;
}

TE_API void te_optimizer_destroy(te_optimizer *opt) {
    te_ctx *te;
    int i, k;
    if (!opt || te__refuse_hook(opt->te, "te_optimizer_destroy") != TE_OK) return;
    te = opt->te;
    te__quant_of(te)->num_optimizers--;
    te__graphs_forget(te, opt, "its optimizer was destroyed", "destroying an optimizer that has stepped");
    for (i = 0; i < opt->num_params; i++) {
        te__opt_param *p = &opt->params[i];
        te__free(te, p->path);
        te__shard_release(te, p->shard);
        te_tensor_release(p->param);
        for (k = 0; k < TE__OPT_STATES; k++) te__opt_state_close(&p->state[k]);
    }
    te_tensor_release(opt->norm);
    te_tensor_release(opt->clip);
    te_tensor_release(opt->started);
    te_tensor_release(opt->skips.found);
    te_tensor_release(opt->skips.skipped);
    te_tensor_release(opt->skips.betas);
    te__free(te, opt->groups);
    te__free(te, opt->list);
    te__free(te, opt->order);
    te__free(te, opt->flags);
    te__free(te, (void *)opt->grads);
    te__free(te, opt->spread);
    te__free(te, opt->params);
    te__free(te, opt);
}

/* The parameter groups of a desc. `usual` has the learning rate, betas, eps and weight decay of parameters that are in
 * none of these groups. */
typedef struct te__opt_groups {
    const te_param_group *groups;
    int num_groups;
    te__opt_group usual;
} te__opt_groups;

/* Returns a new optimizer that has no parameters yet, or NULL with an error. */
static te_optimizer *te__opt_create(te_ctx *te, te_module *m, const te__opt_class *cls, const te__opt_options *options,
                                    size_t entry_size) {
    te_optimizer *opt;
    if (te_module_ctx(m) != te) {
        te__fail(te, TE_ERR_INVALID, "%s: module %s belongs to another context", cls->create, te_module_name(m));
        return NULL;
    }
    if (te->capture) {
        te__refuse_capture(te, cls->create, "make it before te_graph_begin");
        return NULL;
    }
    opt = (te_optimizer *)te__alloc_zero(te, sizeof(te_optimizer));
    if (!opt) return NULL;
    opt->te = te;
    opt->cls = cls;
    opt->options = *options;
    opt->entry_size = entry_size;
    te__quant_of(te)->num_optimizers++;
    return opt;
}
/* Adds groups, parameters and states to `opt`, and returns it. On an error destroys `opt` and returns NULL.
 * If keep_started is true, checkpoints hold the `started` flags. */
static te_optimizer *te__opt_fill(te_optimizer *opt, te_module *m, const te__opt_groups *groups, bool keep_started) {
    te_ctx *te = opt->te;
    bool ok;
    te__frame_begin(te);
    ok = te__groups_open(opt, groups->groups, groups->num_groups, &groups->usual) &&
         te_module_visit_tensors(m, te__opt_add, opt) && te__groups_share(opt, groups->groups);
    if (ok && opt->options.max_grad_norm > 0.0f) {
        opt->norm = te_tensor_retain(te__empty_1d(te, TE_F32, 1));
        opt->clip = te_tensor_retain(te__empty_1d(te, TE_F32, 1));
        ok = opt->norm && opt->clip;
    }
    if (ok && keep_started) {
        const int64_t n = opt->num_params;
        opt->started = te_tensor_retain(te_tensor_zeros(te, TE_U8, 1, &n));
        opt->flags = (uint8_t *)te__alloc_zero(te, (size_t)n);
        ok = opt->started && opt->flags;
    }
    if (ok) {
        opt->list = te__alloc_zero(te, (size_t)opt->num_params * opt->entry_size);
        opt->order = (int *)te__alloc_zero(te, (size_t)opt->num_params * sizeof(int));
        opt->grads = (const te_tensor **)te__alloc_zero(te, (size_t)opt->num_params * sizeof(te_tensor *));
        opt->spread = (te__spread *)te__alloc_zero(te, 2 * (size_t)opt->num_params * sizeof(te__spread));
        ok = opt->list && opt->order && opt->grads && opt->spread;
    }
    te__frame_end(te, NULL, 0);
    if (ok) return opt;
    te_optimizer_destroy(opt);
    return NULL;
}

/* ---- stepping ---- */

/* Sets *grad to the gradient of a parameter, or to NULL. If there is a main gradient, adds the gradient
 * on the tape to it, and sets *grad to the main gradient. */
static te_result te__main_or_grad(te_tensor *param, te_tensor **grad) {
    te_tensor *main_grad = te_tensor_main_grad(param);
    *grad = te_tensor_grad(param);
    if (!main_grad) return TE_OK;
    if (*grad) {
        const te_result result = te__axpby_into(main_grad, main_grad, *grad, 1.0f, 1.0f);
        if (result != TE_OK) return result;
        if (!param->te->warming) te_tensor_zero_grad(param);
    }
    *grad = main_grad;
    return TE_OK;
}
/* Checks that the states of p are those of the slice, or of the whole parameter, that this rank has. */
static te_result te__opt_same_unit(const te__opt_param *p, const char *who) {
    const te__shard *now = p->param->shard;
    if (now == p->shard) return TE_OK;
    if (!p->shard)
        return te__fail(p->param->te, TE_ERR_STATE,
                        "%s: parameter %s was sharded by unit \"%s\" after the optimizer was made; make the optimizer "
                        "after the units",
                        who, p->path, now->set->name);
    return te__fail(p->param->te, TE_ERR_STATE,
                    "%s: the unit of parameter %s was %s; make the optimizer after the units", who, p->path,
                    now ? "made anew" : "taken back");
}
static te_result te__opt_shard_grad(const te_optimizer *opt, const te__opt_param *p, te_tensor **grad) {
    te_tensor *x = p->param, *whole = te_tensor_decoupled_grad(x);
    *grad = NULL;
    if (opt->options.use_decoupled_grad) {
        *grad = whole ? te__shard_of_whole(p->shard, whole) : NULL;
        return whole && !*grad ? te_error_code(opt->te) : TE_OK;
    }
    if (te_tensor_grad(x) && opt->te->warming) { /* a warm-up exchanges nothing */
        *grad = te__shard_of_whole(p->shard, te_tensor_grad(x));
        return *grad ? TE_OK : te_error_code(opt->te);
    }
    if (te_tensor_grad(x))
        return te__fail(opt->te, TE_ERR_STATE,
                        "te_optimizer_step: parameter %s is sharded, and its gradient was not exchanged: "
                        "requires_gradient_sync of unit \"%s\" was false in the last backward pass; set it before that "
                        "pass (te_model_set_requires_grad_sync)",
                        p->path, p->shard->set->name);
    *grad = x->var ? x->var->shard_grad : NULL;
    return TE_OK;
}
static te_result te__opt_grad(const te_optimizer *opt, const te__opt_param *p, te_tensor **grad) {
    te_tensor *param = p->param;
    const te_result same = te__opt_same_unit(p, "te_optimizer_step");
    if (same != TE_OK) return same;
    if (p->shard) return te__opt_shard_grad(opt, p, grad);
    if (!opt->options.use_decoupled_grad) return te__main_or_grad(param, grad);
    *grad = te_tensor_decoupled_grad(param);
    return TE_OK;
}

static void te__opt_forget(const te_optimizer *opt, te_tensor *param) {
    const bool decoupled = opt->options.use_decoupled_grad;
    te_tensor *grad = decoupled       ? te_tensor_decoupled_grad(param)
                      : !param->shard ? te_tensor_grad(param)
                      : param->var    ? param->var->shard_grad
                                      : NULL;
    if (opt->options.zero_grads && grad) te_tensor_fill(grad, 0.0);
    else if (decoupled) te_tensor_set_decoupled_grad(param, NULL);
    else te_tensor_zero_grad(param);
    if (!decoupled && te_tensor_main_grad(param)) te_tensor_fill(te_tensor_main_grad(param), 0.0);
}

/* Returns true if the optimizer `user` has a parameter of the module whose scaling state is `owner`. te__deferred_take
 * calls this for each postponed weight gradient. */
static bool te__opt_steps_owner(const void *owner, const void *user) {
    const te_module *m = ((const te__scaling *)owner)->module;
    const te_optimizer *opt = (const te_optimizer *)user;
    int i, k;
    for (i = 0; m && i < m->num_entries; i++)
        for (k = 0; k < opt->num_params; k++)
            if (opt->params[k].param == m->entries[i].tensor) return true;
    return false;
}
static void te__opt_forget_all(te_optimizer *opt) {
    int i;
    for (i = 0; i < opt->num_params; i++) te__opt_forget(opt, opt->params[i].param);
    opt->skips.unscaled = false;
}
TE_API void te_optimizer_zero_grad(te_optimizer *opt) {
    if (!opt) return;
    /* This drops the gradients that te_backward_dw would have computed. */
    te__deferred_take(opt->te, te__opt_steps_owner, opt, false);
    te__opt_forget_all(opt);
}

/* Returns true if the current capture writes the parameter. Then every launch of the graph changes the parameter, and
 * the captured step must read the parameter into its f32 master first. */
static bool te__opt_written_inside(const te_tensor *param) {
    const te__buffer *b = te__param_buffer(param);
    if (param->shard && param->shard->set->of_parameters) return te__shard_is_written(param->shard);
    return b && b->written == b->te->capture->id;
}
/* Returns true if `grad` may be in other memory at the next step. A captured step must not use such a gradient. */
static bool te__opt_grad_moves(const te_tensor *param, const te_tensor *grad) {
    const te_tensor *decoupled = te_tensor_decoupled_grad(param);
    if (param->shard && decoupled && decoupled->buffer == grad->buffer) return false; /* a slice of it */
    return grad != te_tensor_main_grad(param) && grad != decoupled && grad->buffer && !grad->buffer->arena;
}

/* Appends a group's parameters to opt->order and their gradients to opt->grads. Skips parameters without a gradient.
 * If `all` is false, takes only matrices (`matrices` is true) or only the other parameters (`matrices` is false). */
static te_result te__opt_collect_group(te_optimizer *opt, int group, bool matrices, bool all, int *n) {
    int i;
    for (i = 0; i < opt->num_params; i++) {
        te__opt_param *p = &opt->params[i];
        te_tensor *grad;
        te_result result;
        bool stale;
        if (p->group != group) continue;
        if (!all && (p->param->ndim >= 2) != matrices) continue;
        result = te__opt_grad(opt, p, &grad);
        if (result != TE_OK) return result;
        if (!grad) continue;
        if (opt->te->capture && te__opt_grad_moves(p->param, grad))
            return te__refuse_capture(
                opt->te, "te_optimizer_step with a gradient from before, which will be elsewhere next time",
                "forget gradients before te_graph_begin and capture te_backward too, or use te_tensor_set_main_grad");
        if (opt->te->capture && opt->cls->may_capture) result = opt->cls->may_capture(opt, p);
        if (result != TE_OK) return result;
        stale = te__opt_is_stale(p);
        if (p->state[TE__OPT_MASTER].x && (stale || p->behind) && !opt->te->warming) {
            if (opt->te->capture && !(stale && te__opt_written_inside(p->param)))
                p->behind = true;
            else
                result = te__opt_take_master(p);
            if (result != TE_OK) return result;
        }
        p->listed = true;
        opt->grads[*n] = grad;
        opt->spread[*n] = te__spread_of(p->param, p->shard);
        opt->order[*n] = i;
        ++*n;
    }
    return TE_OK;
}

/* Calls te__opt_collect_group for each group, so that the parameters of a group are neighbours. */
static te_result te__opt_collect(te_optimizer *opt, bool matrices, bool all, int *n) {
    te_result result = TE_OK;
    int g;
    for (g = 0; g < opt->num_groups && result == TE_OK; g++) result = te__opt_collect_group(opt, g, matrices, all, n);
    return result;
}

/* The steps that a graph contains. */
typedef struct te__opt_steps {
    int steps;
    short word[(int)TE__GRAPH_WORDS / 2]; /* word[i]: where the numbers of step i (learning rates ..) begin in g->word;
                                           * each step needs two words or more */
    bool clipped; /* the optimizer's `clipped` before the capture */
    bool scaled;  /* the last step uses loss scaling */
    bool counts;  /* each launch first adds `found`, the overflow flag of the step before the launch, to `skipped` */
} te__opt_steps;
/* Returns the flags [num_params] that are stored behind the struct. A flag is true if the captured steps update the
 * parameter. */
static bool *te__opt_listed(te__opt_steps *s) { return (bool *)(s + 1); }

static te_result te__opt_before(te_graph *g, void *owner, void *data) {
    te_optimizer *opt = (te_optimizer *)owner;
    te__opt_steps *s = (te__opt_steps *)data;
    const bool *listed = te__opt_listed(s);
    te_result result = TE_OK;
    int i;
    for (i = 0; i < opt->num_params && result == TE_OK; i++) {
        te__opt_param *p = &opt->params[i];
        p->untouched = !te__opt_is_stale(p);
        if (p->state[TE__OPT_MASTER].x && listed[i] && (p->behind || !p->untouched)) result = te__opt_take_master(p);
    }
    for (i = 0; i < s->steps; i++) {
        float numbers[3 * (TE_MAX_PARAM_GROUPS + 1) + 1];
        te__opt_numbers(opt, opt->steps + 1 + i, numbers);
        memcpy(&g->word[s->word[i]], numbers, (size_t)te__opt_numbers_count(opt) * sizeof(float));
    }
    /* Clears the overflow flag if it was already counted, since the launch would count it again. */
    if (opt->skips.found && !opt->skips.pending && result == TE_OK) result = te_tensor_fill(opt->skips.found, 0.0);
    return result;
}
static void te__opt_after(te_graph *g, void *owner, void *data) {
    te_optimizer *opt = (te_optimizer *)owner;
    te__opt_steps *s = (te__opt_steps *)data;
    const bool *listed = te__opt_listed(s);
    int i;
    (void)g;
    for (i = 0; i < opt->num_params; i++)
        if (listed[i] || opt->params[i].untouched) opt->params[i].version = te__value_version(opt->params[i].param);
    opt->steps += s->steps;
    opt->clipped = opt->clip != NULL;
    opt->skips.pending = s->scaled || (opt->skips.pending && !s->counts);
}
static void te__opt_captured(te_graph *g, void *owner, void *data) {
    te_optimizer *opt = (te_optimizer *)owner;
    te__opt_steps *s = (te__opt_steps *)data;
    (void)g;
    opt->steps -= s->steps;
    opt->clipped = s->clipped;
}

/* Adds a step to the optimizer's data in the captured graph, and sets *steps to this data. Sets step->lr, step->numbers
 * and step->number to views of the graph's state in device memory. */
static te_result te__opt_capture(te_optimizer *opt, te__opt_steps **steps, te__opt_step *step) {
    te_graph *g = opt->te->capture;
    te__graph_part *part = te__graph_find_part(g, opt);
    const int groups = opt->num_groups, word = te__graph_take_words(g, (te__opt_numbers_count(opt) + 1) / 2);
    te__shard_set *set;
    int at = -1;
    if (word < 0) return te_error_code(opt->te);
    /* their parts come first, since te__opt_after reads the versions that they set; also of those that a later step of
     * the capture is the first one to need */
    while (!part && (set = te__opt_next_set(opt, &at, false)) != NULL)
        if (te__shards_capture(set) != TE_OK) return TE_ERR_OUT_OF_MEMORY;
    if (!part) {
        part = te__graph_add_part(g, opt, sizeof(te__opt_steps) + (size_t)opt->num_params * sizeof(bool));
        if (!part) return TE_ERR_OUT_OF_MEMORY;
        part->steps = true;
        part->before = te__opt_before;
        part->after = te__opt_after;
        part->captured = te__opt_captured;
        ((te__opt_steps *)part->data)->clipped = opt->clipped;
    }
    *steps = (te__opt_steps *)part->data;
    (*steps)->word[(*steps)->steps] = (short)word;
    step->lr = te__graph_view(g, TE_F32, 8 * word, groups);
    step->numbers = te__graph_view(g, TE_F32, 8 * word + 4 * groups, 2 * groups);
    step->number = te__graph_view(g, TE_F32, 8 * word + 12 * groups, 1);
    return step->lr && step->numbers && step->number ? TE_OK : te_error_code(opt->te);
}

/* ---- loss scaling ----
 *
 * The host does not know which steps are skipped. A step writes its overflow flag to te__opt_skips.found. The next step
 * first adds this flag to te__opt_skips.skipped. The flag of a failed step is never counted. */

/* Makes the tensors of te__opt_skips. The first step under loss scaling calls this. */
static te_result te__skips_open(te_optimizer *opt) {
    te__opt_skips *s = &opt->skips;
    te_ctx *te = opt->te;
    const int64_t one = 1, shape[2] = {opt->num_groups, 2};
    float betas[2 * (TE_MAX_PARAM_GROUPS + 1)];
    te_tensor *found, *skipped, *pairs = NULL;
    bool warming = te->warming;
    int g;
    if (s->found) return TE_OK;
    if (te->capture)
        return te__refuse_capture(te, "the first step of an optimizer under loss scaling",
                                  "make it before te_graph_begin");
    for (g = 0; g < opt->num_groups; g++) {
        betas[2 * g] = opt->groups[g].beta1;
        betas[2 * g + 1] = opt->groups[g].beta2;
    }
    te__frame_begin(te);
    te->warming = false; /* these tensors outlive the warm-up */
    found = te_tensor_zeros(te, TE_F32, 1, &one);
    skipped = te_tensor_zeros(te, TE_F32, 1, &one);
    if (opt->cls->has_betas) pairs = te_tensor_from_f32(te, TE_F32, 2, shape, betas);
    te->warming = warming;
    if (found && skipped && (pairs || !opt->cls->has_betas)) {
        s->found = te_tensor_retain(found);
        s->skipped = te_tensor_retain(skipped);
        s->betas = te_tensor_retain(pairs);
    }
    te__frame_end(te, NULL, 0);
    return s->found ? TE_OK : te_error_code(te);
}
/* Adds the overflow flag of the last step to te__opt_skips.skipped, if this was not done yet, and clears the flag. If
 * `step` is not NULL, computes the bias corrections of `step`. `again` is true if te_grad_scaler_unscale has already
 * counted the last step's flag and written the flag of `step`. Then no flag is counted or cleared. */
static te_result te__skips_count(te_optimizer *opt, te__opt_step *step, bool again) {
    te__opt_skips *s = &opt->skips;
    te_op_step_numbers_args args = TE_ZERO;
    te_result result;
    args.found_inf = again ? NULL : s->found;
    args.skipped = s->skipped;
    args.count = s->pending || opt->te->capture;
    args.step = opt->steps + 1;
    args.step_device = step ? step->number : NULL;
    args.no_bias_correction = opt->options.no_bias_correction;
    if (step && s->betas) {
        args.betas = s->betas;
        args.bias_correction = te__empty_2d(opt->te, TE_F32, opt->num_groups, 2);
        if (!args.bias_correction) return te_error_code(opt->te);
        step->numbers = args.bias_correction;
    }
    result = te_op_step_numbers(opt->te, &args);
    if (result == TE_OK && !again && !opt->te->warming && !opt->te->capture) s->pending = false;
    return result;
}
/* Returns what other ranks have of each parameter, whether it has a gradient here or not: [num_params], behind those of
 * the gradients. */
static const te__spread *te__opt_kinds(te_optimizer *opt) {
    te__spread *kinds = opt->spread + opt->num_params;
    int i;
    for (i = 0; i < opt->num_params; i++) kinds[i] = te__spread_of(opt->params[i].param, opt->params[i].shard);
    return kinds;
}
/* Computes step->grad_scale, the factor for all gradients. If clipping or the overflow check needs the norm of the
 * gradients, computes that too. */
static te_result te__opt_measure(te_optimizer *opt, const te__opt_scaling *scaling, te__opt_step *step) {
    const te_tensor *inv_scale = scaling ? scaling->inv_scale : NULL;
    te_ctx *te = opt->te;
    te_op_l2norm_args norm = TE_ZERO;
    te_result result = TE_OK;
    step->grad_scale = opt->clip ? opt->clip : inv_scale;
    if (scaling) step->found_inf = opt->skips.found;
    if (opt->clip || inv_scale) {
        norm.tensors = opt->grads;
        norm.num_tensors = step->count;
        norm.norm = opt->norm ? opt->norm : te__empty_1d(te, TE_F32, 1);
        norm.clip = opt->clip;
        norm.max_norm = opt->options.max_grad_norm;
        norm.inv_scale = inv_scale;
        norm.found_inf = inv_scale ? opt->skips.found : NULL;
        result = norm.norm ? TE_OK : te_error_code(te);
        if (opt->spreads) {
            result = te__spread_l2norm(te, &norm, opt->spread, te__opt_kinds(opt), opt->num_params, result);
            opt->told = opt->sharded && result != TE_OK;
        } else if (result == TE_OK)
            result = te_op_l2norm(te, &norm);
    }
    if (result == TE_OK && opt->clip && inv_scale) {
        te_tensor *both = te__empty_1d(te, TE_F32, 1);
        step->grad_scale = both;
        result = both ? te__times_into(both, opt->clip, inv_scale) : te_error_code(te);
    }
    if (result == TE_OK && scaling)
        result = te__axpby_into(scaling->any_inf, scaling->any_inf, opt->skips.found, 1.0f, 1.0f);
    return result;
}

/* If a parameter takes its first step, and first steps differ from later ones, sets *skipped to whether the step was
 * skipped. For this, the host waits for the overflow flag. In all other cases, and in a warm-up, sets *skipped to false
 * without reading the flag. */
static te_result te__opt_was_skipped(te_optimizer *opt, bool *skipped) {
    bool asks = false;
    float found = 0.0f;
    te_result result = TE_OK;
    int i;
    for (i = 0; i < opt->num_params && opt->started && !opt->te->warming; i++)
        asks = asks || (opt->params[i].listed && !opt->params[i].started);
    if (asks) result = te_tensor_to_host(opt->skips.found, &found);
    *skipped = found != 0.0f;
    return result;
}

static te_result te__opt_step_once(te_optimizer *opt, const te__opt_scaling *scaling) {
    te_ctx *te = opt->te;
    te__opt_steps *captured = NULL;
    te__opt_step step = TE_ZERO;
    te_result result;
    bool split, skipped = false;
    int i, n = 0, decayed;
    opt->told = false;
    te__opt_sets_begin(opt);
    result = te__opt_follow(opt);
    if (result == TE_OK) result = te__opt_scatter(opt);
    if (result != TE_OK) return opt->sharded ? te__opt_publish(opt, NULL, result) : result;
    split = opt->options.decay_matrices_only && te__opt_decays(opt);
    for (i = 0; i < opt->num_params; i++) {
        opt->params[i].listed = false;
        opt->params[i].untouched = !te__opt_is_stale(&opt->params[i]);
    }
    result = te__opt_collect(opt, true, !split, &n);
    decayed = n;
    if (split && result == TE_OK) result = te__opt_collect(opt, false, false, &n);
    step.count = n;
    step.num_undecayed = n - decayed;
    if (result == TE_OK && opt->skips.unscaled && opt->skips.unscaled_in != te->capture)
        result =
            te__fail(te, TE_ERR_STATE,
                     "te_grad_scaler_step: te_grad_scaler_unscale was called %s a graph's capture, and this step is "
                     "made %s one; a launch repeats both or neither: make "
                     "both calls on the same side",
                     opt->skips.unscaled_in ? "inside of" : "outside of", te->capture ? "inside of" : "outside of");
    if (scaling && result == TE_OK) result = te__skips_open(opt);
    if (te->capture && result == TE_OK) result = te__opt_capture(opt, &captured, &step);
    if (opt->skips.found && result == TE_OK) result = te__skips_count(opt, &step, opt->skips.unscaled);
    if ((n > 0 || opt->spreads) && result == TE_OK) result = te__opt_measure(opt, scaling, &step);
    if (scaling && result == TE_OK) result = te__opt_was_skipped(opt, &skipped);
    /* No allocation follows te__opt_prepare_values, so lack of memory cannot leave a step half done. */
    if (result == TE_OK) result = te__opt_prepare_values(opt, scaling != NULL);
    if (result == TE_OK && n > 0) result = opt->cls->run(opt, &step);
    if (result == TE_OK) result = te__opt_requantize(opt, step.found_inf);
    if (opt->sharded) result = te__opt_publish(opt, step.found_inf, result);
    /* Records the versions of the parameters, so that the next step does not copy the parameters to their masters.
     * Masters match the parameters even after a failed step. An `untouched` parameter has a new version too if it
     * shares memory with a stepped parameter. */
    for (i = 0; i < opt->num_params; i++)
        if ((opt->params[i].listed && !te->warming) || opt->params[i].untouched)
            opt->params[i].version = te__value_version(opt->params[i].param);
    opt->skips.unscaled = false;
    if (te->warming || result != TE_OK) return result; /* a warm-up leaves counts and gradients unchanged */
    if (captured) {
        captured->steps++;
        captured->scaled = scaling != NULL;
        captured->counts = captured->counts || opt->skips.found;
        for (i = 0; i < opt->num_params; i++)
            te__opt_listed(captured)[i] = te__opt_listed(captured)[i] || opt->params[i].listed;
    }
    if (!captured) opt->skips.pending = scaling != NULL;
    opt->steps++;
    opt->clipped = opt->clip && n > 0;
    for (i = 0; i < opt->num_params && !skipped; i++)
        opt->params[i].started = opt->params[i].started || opt->params[i].listed;
    if (!opt->keep_grad) te__opt_forget_all(opt);
    return TE_OK;
}
static te_result te__opt_step_with(te_optimizer *opt, const te__opt_scaling *scaling) {
    te__rng_state before;
    te_ctx *te;
    te_result result;
    bool entered;
    if (!opt) return TE_ERR_STATE;
    te = opt->te;
    before = te__rng_now(te);
    if (te__num_deferred(te) > 0)
        te__warn(te,
                 "te_optimizer_step: %d weight gradients wait for te_backward_dw (delay_wgrad_compute): this step goes "
                 "without them",
                 te__num_deferred(te));
    result = te->error_code == TE_OK ? te__device_enter(te, &entered) : te->error_code;
    if (result == TE_OK) {
        te__frame_begin(te);
        result = te__opt_step_once(opt, scaling);
        te__frame_end(te, NULL, 0);
        te__device_leave(te, entered);
    }
    memset(te->loose, 0, sizeof(te->loose)); /* nothing of the step waits for other ranks any more */
    if (result == TE_OK) {
        te__step_ends(te);
    } else {
        te__opt_tell(opt, result);
        te__step_fails(te);
        te__rng_back(te, before);
    }
    return result;
}

TE_API te_result te_optimizer_step(te_optimizer *opt) { return te__opt_step_with(opt, NULL); }

/* ---- reading and setting ---- */

TE_API void te_optimizer_keep_grad(te_optimizer *opt, bool keep) {
    if (opt) opt->keep_grad = keep;
}
TE_API void te_optimizer_set_lr(te_optimizer *opt, float lr) {
    if (opt && te__opt_in_range(opt->te, "te_optimizer_set_lr", "lr", lr, FLT_MAX)) opt->options.lr = lr;
}
TE_API float te_optimizer_lr(const te_optimizer *opt) { return opt ? opt->options.lr : 0.0f; }
TE_API int64_t te_optimizer_steps(const te_optimizer *opt) {
    float skipped = 0.0f, last = 0.0f;
    if (!opt) return 0;
    if (!opt->skips.found || opt->te->capture || opt->te->error_code != TE_OK) return opt->steps;
    te_tensor_to_host(opt->skips.skipped, &skipped);
    if (opt->skips.pending) te_tensor_to_host(opt->skips.found, &last);
    return opt->steps - (int64_t)skipped - (last != 0.0f);
}
TE_API te_tensor *te_optimizer_grad_norm(const te_optimizer *opt) { return opt && opt->clipped ? opt->norm : NULL; }

/* Returns the state `name` of a parameter, or NULL with an error. First updates a master that is older than its
 * parameter. Sets *found to the parameter's entry. */
static te__opt_state *te__opt_named_state(te_optimizer *opt, const te_tensor *param, const char *name,
                                          const char *function, te__opt_param **found) {
    te_ctx *te = opt->te;
    te__opt_param *p = param ? te__opt_find(opt, param) : NULL;
    int k;
    *found = p;
    if (te->error_code != TE_OK) return NULL;
    if (!p || !name) {
        te__fail(te, TE_ERR_INVALID, "%s: %s", function,
                 !param  ? "the parameter is NULL"
                 : !name ? "the state's name is NULL"
                         : "the tensor is no parameter of this optimizer");
        return NULL;
    }
    if (te__opt_same_unit(p, function) != TE_OK || te__opt_follow(opt) != TE_OK) return NULL;
    k = te__opt_state_place(opt, name);
    if (k < TE__OPT_STATES && p->state[k].x) {
        const bool stale = k == TE__OPT_MASTER && (p->behind || te__opt_is_stale(p));
        if (stale && te->capture) { /* a capture would record the copy without running it */
            te__refuse_capture(te, function,
                               "look at the master of a parameter that was written since before te_graph_begin");
            return NULL;
        }
        if (stale && !te->warming && te__opt_take_master(p) != TE_OK) return NULL;
        return &p->state[k];
    }
    te__fail(te, TE_ERR_INVALID, "%s: parameter %s has no state \"%.40s\"; this optimizer's are %s%s%s%s%s", function,
             p->path, name, opt->cls->state[0], opt->cls->state[1] ? ", " : "",
             opt->cls->state[1] ? opt->cls->state[1] : "", " and, of parameters that have masters, ",
             opt->cls->state[TE__OPT_MASTER]);
    return NULL;
}

TE_API te_tensor *te_optimizer_get_unscaled_state(te_optimizer *opt, const te_tensor *param, const char *state_name) {
    te__opt_param *p;
    te__opt_state *s;
    te_tensor *out;
    if (!opt) return NULL;
    s = te__opt_named_state(opt, param, state_name, "te_optimizer_get_unscaled_state", &p);
    out = s ? te__own_empty(p->param, TE_F32) : NULL;
    if (!out) return NULL;
    return te__checked(out, te__opt_is_remainders(s) ? te__opt_remainders(te__own_value(p->param), s, out, false)
                                                     : te__opt_unscale(s, out));
}
TE_API te_result te_optimizer_set_scaled_state(te_optimizer *opt, te_tensor *param, const char *state_name,
                                               const te_tensor *unscaled_state) {
    static const char function[] = "te_optimizer_set_scaled_state";
    char a[TE__SHAPE_TEXT], b[TE__SHAPE_TEXT];
    int64_t own[TE_MAX_DIMS];
    te__opt_param *p;
    te__opt_state *s;
    te_result result;
    if (!opt) return TE_ERR_STATE;
    s = te__opt_named_state(opt, param, state_name, function, &p);
    if (!s) return te_error_code(opt->te);
    result = te__want(opt->te, function, "unscaled_state", unscaled_state);
    if (result == TE_OK && unscaled_state->dtype != TE_F32)
        result = te__fail(opt->te, TE_ERR_DTYPE, "%s: unscaled_state is %s; f32 is needed", function,
                          te_dtype_name(unscaled_state->dtype));
    if (result == TE_OK && (unscaled_state->ndim != te__own_shape(param, own) ||
                            memcmp(unscaled_state->shape, own, (size_t)unscaled_state->ndim * sizeof(int64_t)) != 0))
        result = te__fail(opt->te, TE_ERR_SHAPE, "%s: unscaled_state is %s and the %s %s", function,
                          te__shape_text(unscaled_state, a),
                          param->shard ? "slice of the parameter on this rank" : "parameter",
                          te__dims_text(te__own_shape(param, own), own, b));
    if (result != TE_OK) return result;
    te__frame_begin(opt->te);
    if (te__opt_is_remainders(s)) {
        result = te__opt_set_remainders(p, (te_tensor *)unscaled_state);
        p->version = te__value_version(p->param);
    } else
        result = te__opt_store(s, unscaled_state);
    te__frame_end(opt->te, NULL, 0);
    /* the next step continues from this momentum */
    if (result == TE_OK && s == &p->state[TE__OPT_FIRST]) p->started = true;
    return result;
}

typedef enum te__state_kind {
    TE__STATE_VALUES, /* a number, or two bytes, for each element of a parameter */
    TE__STATE_SCALE,  /* one number for a parameter */
    TE__STATE_FLAG,   /* the flag `started` of a parameter */
    TE__STATE_FLAGS   /* these flags of all parameters, as files of before have them */
} te__state_kind;
/* The type of a function that is called with each optimizer state and its name in a checkpoint. `shard`: the tensor has
 * the state of this rank's slice of a parameter; or NULL. The function returns false to stop. */
typedef bool (*te__state_visit_fn)(void *user, const char *name, te_tensor *tensor, te_tensor *param, te__shard *shard,
                                   te__state_kind kind);
static bool te__optimizer_visit(te_optimizer *opt, te__state_visit_fn visit, void *user) {
    char name[640];
    int i, k;
    if (opt && te__opt_follow(opt) != TE_OK) return false;
    for (i = 0; opt && i < opt->num_params; i++) {
        const te__opt_param *p = &opt->params[i];
        te_tensor *flag;
        for (k = 0; k < TE__OPT_STATES; k++) {
            const te__opt_state *s = &p->state[k];
            const char *state = opt->cls->state[k] ? opt->cls->state[k] : "";
            snprintf(name, sizeof(name), "optimizer/%s.%s", p->path, state);
            if (s->x && !visit(user, name, s->x, p->param, p->shard, TE__STATE_VALUES)) return false;
            snprintf(name, sizeof(name), "optimizer/%s.%s_scale", p->path, state);
            if (s->scale && !visit(user, name, s->scale, p->param, NULL, TE__STATE_SCALE)) return false;
        }
        if (!opt->started) continue;
        snprintf(name, sizeof(name), "optimizer/%s.started", p->path);
        flag = te__alias_1d(opt->started, i, TE_U8, 1);
        if (!flag || !visit(user, name, flag, p->param, NULL, TE__STATE_FLAG)) return false;
    }
    return !opt || !opt->started || visit(user, "optimizer/started", opt->started, NULL, NULL, TE__STATE_FLAGS);
}
/* Prepares the states for saving. Updates masters that are older than their parameters, because a loaded master counts
 * as equal to its parameter. Copies the flags `started` to their tensor. */
static te_result te__optimizer_before_save(te_optimizer *opt) {
    te_result result = TE_OK;
    bool copies;
    int i;
    if (!opt) return TE_OK;
    copies = !opt->te->capture && !opt->te->warming;
    if (copies) result = te__opt_follow(opt);
    for (i = 0; copies && i < opt->num_params && result == TE_OK; i++) {
        te__opt_param *p = &opt->params[i];
        if (p->state[TE__OPT_MASTER].x && te__opt_is_stale(p)) result = te__opt_take_master(p);
    }
    if (result != TE_OK || !opt->started) return result;
    for (i = 0; i < opt->num_params; i++) opt->flags[i] = opt->params[i].started;
    return te_tensor_copy_from_host(opt->started, opt->flags);
}
/* Sets the step count, learning rate and flags of the optimizer after a checkpoint was loaded. Marks each loaded master
 * as equal to its parameter. */
static te_result te__optimizer_restored(te_optimizer *opt, int64_t steps, float lr) {
    te_result result = opt->started ? te_tensor_to_host(opt->started, opt->flags) : TE_OK;
    int i;
    if (result != TE_OK) return result;
    if (opt->skips.found) result = te_tensor_fill(opt->skips.skipped, 0.0);
    if (result != TE_OK) return result;
    opt->skips.pending = opt->skips.unscaled = false;
    opt->steps = steps;
    opt->options.lr = lr;
    for (i = 0; i < opt->num_params; i++) {
        te__opt_param *p = &opt->params[i];
        p->version = te__value_version(p->param);
        p->behind = false;
        p->started = opt->flags ? opt->flags[i] != 0 : steps > 0;
    }
    return TE_OK;
}
