/* model/inject.c: te_inject_te_attention replaces the attention of existing models by DotProductAttention. This file
 * must not depend on files on disk. */

#define TE__ATTN_MODULE "attn_module"
#define TE__ATTN_INJECTED "_te_attention_injected"
#define TE__ATTN_SDPA "te_sdpa" /* name of the attribute that holds the te_sdpa_patch of a module with attn_module */
#define TE__ATTN_ATTRIBUTES "attn_attributes"

/* ---- counters ---- */

struct te_sdpa_patch {
    te_ctx *te;
    te_make_te_sdpa_desc desc;
    te_attn_stats stats;
    te_module_forward_fn before; /* own_forward of the patched module before the patch, or NULL */
    bool injected;               /* this patch has set the module's attribute attn_module */
    bool had_null;               /* the attribute attn_module already existed, with the value NULL */
    bool missed;                 /* the warning was given that nothing calls this patch */
    te__closable closable;       /* registered while no module owns the patch */
};

TE_API te_attn_stats te_attn_get_stats(const te_ctx *te) {
    te_attn_stats none = TE_ZERO;
    return te ? te__sdpa_of(te)->stats : none;
}
TE_API void te_attn_reset_stats(te_ctx *te) {
    if (te) memset(&te__sdpa_of(te)->stats, 0, sizeof(te__sdpa_of(te)->stats));
}
static uint64_t te__stats_sum(const te_attn_stats *s) {
    return s->te_hits + s->fallback_mask + s->fallback_scale_mismatch + s->fallback_other;
}

/* Adds 1 to a counter of te_attn_stats, both in the stats of f and in those of the context. `counter` is its byte
 * offset. */
static void te__sdpa_count(te_sdpa_patch *f, size_t counter) {
    te_ctx *te = f->te;
    const te_attn_stats *s = &te__sdpa_of(te)->stats;
    const int every = te__sdpa_of(te)->stats_every;
    ++*(uint64_t *)(void *)((char *)&f->stats + counter);
    ++*(uint64_t *)(void *)((char *)&te__sdpa_of(te)->stats + counter);
    if (every > 0 && te__stats_sum(s) % (uint64_t)every == 0)
        te__log(te, TE_LOG_INFO,
                "te_attention: of %llu calls %llu by DotProductAttention; fallbacks: %llu for masks, %llu for scales, "
                "%llu others",
                (unsigned long long)te__stats_sum(s), (unsigned long long)s->te_hits,
                (unsigned long long)s->fallback_mask, (unsigned long long)s->fallback_scale_mismatch,
                (unsigned long long)s->fallback_other);
}
#define TE__COUNTER(name) offsetof(te_attn_stats, name)

static bool te__stats_every_ok(te_ctx *te, const char *who) {
    if (!te__sdpa_of(te)->bad_every[0]) return true;
    return te__not_ok(
        te, TE_ERR_INVALID,
        "%s: AUTOMODEL_TE_STATS_EVERY was \"%s\" when the context was made; a whole number of calls is needed, 0 "
        "for no lines in the log",
        who, te__sdpa_of(te)->bad_every);
}

/* ---- the replacement ---- */

static void te__te_sdpa_close(void *owner) { te_sdpa_patch_destroy((te_sdpa_patch *)owner); }
TE_API void te_sdpa_patch_destroy(te_sdpa_patch *f) {
    if (!f) return;
    te__closable_remove(&f->closable);
    te__free(f->te, f);
}
TE_API te_sdpa_patch *te_make_te_sdpa(te_ctx *te, const te_make_te_sdpa_desc *desc) {
    te_sdpa_patch *f;
    if (!te || !te__has_desc(te, desc, "te_make_te_sdpa") || !te__stats_every_ok(te, "te_make_te_sdpa")) return NULL;
    if (!desc->attn_module || desc->attn_module->te != te || desc->num_heads < 1 || desc->num_kv_heads < 1 ||
        desc->num_heads % desc->num_kv_heads) {
        te__fail(te, TE_ERR_INVALID,
                 "te_make_te_sdpa: attn_module is %s, num_heads %d, num_kv_heads %d; a module of this context is "
                 "needed, and heads of which the second number divides the first",
                 !desc->attn_module            ? "NULL"
                 : desc->attn_module->te != te ? "of another context"
                                               : "given",
                 desc->num_heads, desc->num_kv_heads);
        return NULL;
    }
    f = (te_sdpa_patch *)te__alloc_zero(te, sizeof(*f));
    if (!f) return NULL;
    f->te = te;
    f->desc = *desc;
    if (!f->desc.original) f->desc.original = te__plain_sdpa_call;
    te__closable_add(te, &f->closable, "te_sdpa", te__te_sdpa_close, f);
    return f;
}
TE_API te_attn_stats te_sdpa_patch_stats(const te_sdpa_patch *f) {
    te_attn_stats none = TE_ZERO;
    return f ? f->stats : none;
}

/* Returns the context-parallel state of f's module. NULL if the module has no context parallelism. */
static te__context *te__sdpa_ranks(const te_sdpa_patch *f) {
    te__dpa_module *s = te__dpa_of(f->desc.attn_module);
    return s && te__context_size(&s->context) > 1 ? &s->context : NULL;
}
/* Tells the other context-parallel ranks that this rank's call fails before it reaches the module, so that they do not
 * wait. Returns NULL. */
static te_tensor *te__sdpa_fails(te_sdpa_patch *f) {
    te__context *ranks = te__sdpa_ranks(f);
    const te_attn_desc nothing = TE_ZERO;
    te_tensor *const parts[3] = {NULL, NULL, NULL};
    const te_result result = te_error_code(f->te);
    return ranks ? te__context_attention_run(parts, &nothing, ranks, result == TE_OK ? TE_ERR_STATE : result) : NULL;
}
/* Returns true if f->desc.original may take a call that f's module cannot take. Fails under context parallelism,
 * because f->desc.original would see only this rank's keys. */
static bool te__sdpa_may_fall_back(te_sdpa_patch *f, const char *why) {
    te__context *ranks = te__sdpa_ranks(f);
    if (!ranks) return true;
    te__fail(f->te, TE_ERR_UNSUPPORTED,
             "te_attention: DotProductAttention cannot take the call (%s), and the attention from before knows this "
             "rank's keys alone, of cp_group with %d ranks; make calls with "
             "is_causal in the place of a mask, or inject without cp_group",
             why, te__context_size(ranks));
    te__sdpa_fails(f);
    return false;
}
/* Converts x [b, heads, s, d] to [b, s, kept, d]. x has `kept` different heads, and heads / kept adjacent copies of
 * each head. Keeps one copy of each head. */
static te_tensor *te__heads_unrepeated(te_tensor *x, int kept) {
    const int64_t step = x->shape[1] / kept;
    int64_t shape[5];
    if (step > 1) {
        memcpy(shape + 2, x->shape + 1, 3 * sizeof(int64_t));
        shape[0] = x->shape[0];
        shape[1] = kept;
        shape[2] = step;
        x = te_tensor_contiguous(te_tensor_narrow(te_tensor_view(te_tensor_contiguous(x), 5, shape), 2, 0, 1));
        shape[2] = shape[3];
        shape[3] = shape[4];
        x = te_tensor_view(x, 4, shape);
    }
    return te__attn_turned(x);
}

/* Runs f's module by te_forward_with, with this `dropout_p` for the call. Returns [b, s, heads, dv]. */
static te_tensor *te__run_dpa(te_sdpa_patch *f, te_forward_args *call, float dropout_p) {
    te_module *m = f->desc.attn_module;
    te__dpa_module *s = te__dpa_of(m);
    int64_t shape[4];
    if (s) s->core.desc.rule.dropout_p = f->desc.ignore_dropout ? 0.0f : dropout_p;
    if (!te_forward_with(m, call)) return NULL;
    te__log(f->te, TE_LOG_DEBUG, "te_attention: the call is %s's, with attn_mask_type %d", m->name,
            (int)call->attention.attn_mask_type);
    te__sdpa_count(f, TE__COUNTER(te_hits));
    memcpy(shape, call->input->shape, sizeof(shape));
    shape[3] = call->value->shape[3];
    return te_tensor_view(te_tensor_contiguous(call->outputs.out), 4, shape);
}

/* Returns true if the last two sizes of `mask` are those of this call, or of all context-parallel ranks together.
 * Refuses a broadcast mask, because te_detect_causal_mask reads only stored elements. If f->desc.mask.strict is set,
 * refuses a mask that needs a gradient, because only f->desc.original computes this gradient. */
static bool te__mask_is_of_call(const te_sdpa_patch *f, const te_tensor *mask, const te_tensor *q, const te_tensor *k) {
    te__context *c = te__sdpa_ranks(f);
    const int64_t ranks = c ? te__context_size(c) : 1;
    if (f->desc.mask.strict && te__wants_grad(mask)) return false;
    return mask->ndim == 4 && q->ndim == 4 && k->ndim == 4 &&
           ((mask->shape[2] == q->shape[2] && mask->shape[3] == k->shape[2]) ||
            (mask->shape[2] == ranks * q->shape[2] && mask->shape[3] == ranks * k->shape[2]));
}
/* Returns the reason why f's module cannot take a call, and sets *counter to the counter of this reason. If there is no
 * reason, fills *call. */
static const char *te__sdpa_refusal(te_sdpa_patch *f, te_tensor *q, te_tensor *k, te_tensor *v,
                                    const te_sdpa_args *args, te_forward_args *call, size_t *counter) {
    const te_make_te_sdpa_desc *d = &f->desc;
    const te__dpa_module *dpa = te__dpa_of(d->attn_module);
    te_attn_call *c = &call->attention;
    int64_t step = 1;
    *counter = TE__COUNTER(fallback_scale_mismatch);
    if (args->scale != 0.0f && d->softmax_scale != 0.0f && !(fabsf(args->scale - d->softmax_scale) <= 1e-6f)) {
        if (!te__sdpa_of(f->te)->scale_warned)
            te__warn(f->te,
                     "te_attention: a call's scale is %g, that of its DotProductAttention %g: such calls keep the "
                     "attention from before; counted as fallback_scale_mismatch",
                     (double)args->scale, (double)d->softmax_scale);
        te__sdpa_of(f->te)->scale_warned = true;
        return "scale";
    }
    *counter = TE__COUNTER(fallback_mask);
    c->attn_mask_type = args->attn_mask || args->is_causal ? TE_MASK_CAUSAL : TE_MASK_NONE;
    c->window = d->window_size;
    if (args->attn_mask) {
        if (!te__mask_is_of_call(f, args->attn_mask, q, k)) return "its mask learns, or is not [.., s_q, s_kv]";
        if (!te_detect_causal_mask(args->attn_mask, d->window_size, &d->mask, &c->window))
            return f->te->capture ? "its mask is not known to be causal, and a capture cannot ask"
                                  : "its mask is not causal";
    } else if (!args->is_causal) {
        c->window.on = true;
        c->window.left = c->window.right = -1;
    }
    *counter = TE__COUNTER(fallback_other);
    if (q->ndim != 4 || k->ndim != 4 || v->ndim != 4 || q->shape[1] != d->num_heads || k->shape[1] != v->shape[1])
        return "heads or sizes";
    if (!args->enable_gqa && d->num_kv_heads < d->num_heads && k->shape[1] > d->num_kv_heads)
        step = k->shape[1] / d->num_kv_heads;
    if (k->shape[1] != step * d->num_kv_heads || (dpa && q->shape[3] != dpa->core.channels) ||
        (args->dropout_p > 0.0f && !d->ignore_dropout && !dpa))
        return "heads, sizes or dropout";
    call->input = te__attn_turned(q);
    call->key = te__heads_unrepeated(k, d->num_kv_heads);
    call->value = te__heads_unrepeated(v, d->num_kv_heads);
    return NULL;
}
static te_tensor *te__te_sdpa_run(te_sdpa_patch *f, te_tensor *q, te_tensor *k, te_tensor *v,
                                  const te_sdpa_args *args) {
    te_forward_args call = TE_ZERO;
    size_t counter;
    const char *why = te__sdpa_refusal(f, q, k, v, args, &call, &counter);
    if (call.input && call.key && call.value) return te__attn_turned(te__run_dpa(f, &call, args->dropout_p));
    if (!why || te_error_code(f->te) != TE_OK) return te__sdpa_fails(f);
    if (!te__sdpa_may_fall_back(f, why)) return NULL;
    te__log(f->te, TE_LOG_DEBUG, "te_attention: %s: the call is the original's", why);
    te__sdpa_count(f, counter);
    return te__sdpa_call(f->desc.original, f->desc.original_user, q, k, v, args);
}
TE_API te_tensor *te_sdpa_patch_call(void *user, te_tensor *q, te_tensor *k, te_tensor *v, const te_sdpa_args *args) {
    te_sdpa_patch *f = (te_sdpa_patch *)user;
    te_sdpa_args zero = TE_ZERO;
    if (!f) return NULL;
    if (!q || !k || !v || !te__same_ctx(q, f->te, "te_sdpa_patch_call") ||
        !te__same_ctx(k, f->te, "te_sdpa_patch_call") || !te__same_ctx(v, f->te, "te_sdpa_patch_call"))
        return te__sdpa_fails(f);
    te__frame_begin(f->te);
    return te__frame_return(f->te, te__te_sdpa_run(f, q, k, v, args ? args : &zero));
}

/* ---- a module's attention ---- */

typedef struct te__attn_attributes {
    te_attn_attributes values; /* the first field: the attribute is a te_attn_attributes * */
    te_ctx *te;
} te__attn_attributes;
static void te__attn_attributes_free(void *value) {
    te__free(((te__attn_attributes *)value)->te, value);
}
TE_API te_result te_module_set_attn_attributes(te_module *m, const te_attn_attributes *attributes) {
    te__attn_attributes *a;
    te_result result;
    if (!m) return TE_ERR_STATE;
    if (!te__has_desc(m->te, attributes, "te_module_set_attn_attributes")) return TE_ERR_INVALID;
    a = (te__attn_attributes *)te__alloc(m->te, sizeof(*a));
    if (!a) return te_error_code(m->te);
    a->values = *attributes;
    a->te = m->te;
    result = te_module_set_attribute(m, TE__ATTN_ATTRIBUTES, a, te__attn_attributes_free);
    if (result != TE_OK) te__attn_attributes_free(a);
    return result;
}

TE_API int64_t te_proj_out_features(const te_module *proj) {
    while (proj) {
        const int64_t *given = (const int64_t *)te__attribute_of(proj, "out_features");
        const te_tensor *weight = te_module_parameter(proj, "weight");
        if (given) return *given;
        if (weight && weight->ndim > 0) return weight->shape[0];
        proj = te_module_find((te_module *)proj, "linear");
    }
    return 0;
}

/* Returns the child `sdpa` of m if its class is SDPA, which injection can replace. Otherwise returns NULL. */
static te_module *te__core_of(te_module *m) {
    te_module *core = te_module_find(m, "sdpa");
    return core && core->cls == &te__sdpa.cls ? core : NULL;
}
static const te_sdpa_desc *te__sdpa_desc_of(te_module *m) {
    te_module *core = te__core_of(m);
    return core ? &te__attn_core_of(core)->desc : NULL;
}
static te_inject_reason te__attn_params_of(te_module *m, te_attn_params *p) {
    const int64_t q_out = te_proj_out_features(te_module_find(m, "q_proj")),
                  k_out = te_proj_out_features(te_module_find(m, "k_proj"));
    const te_sdpa_desc *s = te__sdpa_desc_of(m);
    const te__head_facts *heads = (const te__head_facts *)te__attribute_of(m, TE__HEAD_FACTS);
    const te_attn_attributes *given = (const te_attn_attributes *)te__attribute_of(m, TE__ATTN_ATTRIBUTES);
    te_attn_attributes a = TE_ZERO;
    memset(p, 0, sizeof(*p));
    if (!te_module_find(m, "q_proj") || !te_module_find(m, "k_proj") || !te_module_find(m, "v_proj"))
        return TE_INJECT_PROJECTIONS;
    if (given) a = *given;
    if (heads) {
        if (!a.num_heads) a.num_heads = heads->heads;
        if (!a.num_key_value_heads) a.num_key_value_heads = heads->groups;
        if (!a.head_dim) a.head_dim = heads->head_dim;
    }
    if (a.head_dim < 1) return TE_INJECT_HEAD_DIM;
    p->head_dim = a.head_dim;
    p->num_heads = a.num_heads             ? a.num_heads
                   : a.num_attention_heads ? a.num_attention_heads
                                           : (int)te__min(q_out / a.head_dim, INT_MAX);
    p->num_kv_heads = a.num_key_value_heads ? a.num_key_value_heads
                      : k_out               ? (int)te__min(k_out / a.head_dim, INT_MAX)
                                            : p->num_heads;
    if (a.sliding_window > 0) {
        p->window_size.on = true;
        p->window_size.left = a.sliding_window - 1;
    } else if (a.sliding_window == 0 && s)
        p->window_size = s->rule.window;
    p->softmax_scale = te__attn_scale(a.scaling == 0.0f && s ? s->rule.softmax_scale : a.scaling, a.head_dim);
    return TE_INJECT_OK;
}
TE_API bool te_infer_attn_params(te_module *self_attn, te_attn_params *params) {
    te_attn_params p;
    return self_attn && te__attn_params_of(self_attn, params ? params : &p) == TE_INJECT_OK;
}

static te_module *te__make_attn_module(te_ctx *te, const te_attn_params *p, const te_parallel_options *parallel,
                                       te_qkv_format format, te_softmax_type softmax_type, te_tensor *sinks) {
    te_parallel_options ranks = TE_ZERO;
    te__attn_core core = TE_ZERO;
    te_module *m;
    bool learns;
    core.desc.name = TE__ATTN_MODULE;
    core.desc.format = format;
    core.desc.rule.window = p->window_size;
    core.desc.rule.softmax_scale = p->softmax_scale;
    core.desc.rule.softmax_type = softmax_type;
    core.heads = p->num_heads;
    core.groups = p->num_kv_heads;
    core.channels = p->head_dim;
    if (parallel) ranks = *parallel;
    if (ranks.cp_group) ranks.cp_comm_type = p->window_size.on ? TE_CP_ALL_GATHER : TE_CP_P2P;
    m = te__dpa_create(te, core, &ranks, NULL);
    if (!m || !sinks) return m;
    learns = sinks->requires_grad; /* saved, because te_module_add_parameter changes requires_grad of `sinks` */
    if (!te_module_add_parameter(m, "softmax_offset", sinks)) {
        te_module_destroy(m);
        return NULL;
    }
    te_tensor_set_requires_grad(sinks, learns);
    return m;
}
TE_API te_module *te_create_te_dot_product_attention(te_ctx *te, const te_attn_params *params) {
    return te && te__has_desc(te, params, "te_create_te_dot_product_attention")
               ? te__make_attn_module(te, params, NULL, TE_BSHD, TE_SOFTMAX_VANILLA, NULL)
               : NULL;
}

/* ---- injection ---- */

TE_API const char *te_inject_reason_text(te_inject_reason reason) {
    static const char *const texts[] = {
        "injected",
        "it has an attn_module",
        "it has no q_proj, k_proj and v_proj",
        "the size of its heads is not known, or above 1024",
        "its numbers of heads are not known, do not divide each other, or do not fit its projections",
        "its sdpa caps scores",
        "its sdpa is of packed sequences"};
    return (unsigned)reason < TE__COUNT(texts) ? texts[reason] : "";
}

/* Returns true if the projection has `channels` outputs, twice as many (only if `gated`), or an unknown number. */
static bool te__proj_fits(te_module *m, const char *name, int64_t channels, bool gated) {
    const int64_t out = te_proj_out_features(te_module_find(m, name));
    return out == 0 || out == channels || (gated && out == 2 * channels);
}
static te_inject_reason te__inject_params(te_module *m, const te_inject_desc *desc, te_attn_params *p) {
    const te_sdpa_desc *s = te__sdpa_desc_of(m);
    const int ranks =
        (int)te__max(desc->parallel.tp_group ? te__group_size(desc->parallel.tp_group) : desc->parallel.tp_size, 1);
    te_inject_reason reason;
    void *value;
    if (te_module_attribute(m, TE__ATTN_MODULE, &value) && (value || desc->rules_of_automodel))
        return TE_INJECT_PRESENT;
    reason = te__attn_params_of(m, p);
    if (reason != TE_INJECT_OK) return reason;
    if (p->head_dim > TE__ATTN_MAX_D) return TE_INJECT_HEAD_DIM;
    if (p->num_heads < 1 || p->num_kv_heads < 1 || p->num_heads % p->num_kv_heads) return TE_INJECT_HEADS;
    if (!desc->rules_of_automodel && ranks == 1 &&
        !(te__proj_fits(m, "q_proj", p->num_heads * p->head_dim, true) &&
          te__proj_fits(m, "k_proj", p->num_kv_heads * p->head_dim, false)))
        return TE_INJECT_HEADS;
    if (s && s->rule.softcap != 0.0f) return TE_INJECT_SOFTCAP;
    if (s && s->format == TE_THD) return TE_INJECT_FORMAT;
    return TE_INJECT_OK;
}
TE_API te_inject_reason te_inject_check(te_module *self_attn, const te_inject_desc *desc) {
    const te_inject_desc zero = TE_ZERO;
    te_attn_params p;
    return self_attn ? te__inject_params(self_attn, desc ? desc : &zero, &p) : TE_INJECT_PROJECTIONS;
}

TE_API te_sdpa_patch *te_injected_sdpa(const te_module *self_attn) {
    return (te_sdpa_patch *)te__attribute_of(self_attn, TE__ATTN_SDPA);
}

/* Forward of a child `sdpa` after injection. */
static te_result te__injected_core_forward(te_module *m, te_forward_args *args) {
    te_sdpa_patch *f = te_injected_sdpa(te_module_parent(m));
    const te_sdpa_desc *s = &te__attn_core_of(m)->desc;
    te_forward_args call = *args;
    te_window *w = &call.attention.window;
    if (!f) return m->cls->forward(m, args); /* `sdpa` was moved to another parent */
    if (!te__options_ok(m->te, "SDPA", &te__sdpa_call_group, &args->attention)) {
        te__sdpa_fails(f);
        return TE_ERR_UNSUPPORTED;
    }
    if (!call.attention.attn_mask_type) call.attention.attn_mask_type = s->rule.mask;
    if (!w->on) *w = s->rule.window;
    if (call.attention.attn_mask_type != TE_MASK_NONE) w->right = 0;
    if (args->input->ndim != 4 || !args->value || args->value->ndim != 4 ||
        (w->on && call.attention.attn_mask_type == TE_MASK_NONE && (w->left < 0) != (w->right < 0))) {
        if (!te__sdpa_may_fall_back(f, "sizes or a window")) return TE_ERR_UNSUPPORTED;
        te__sdpa_count(f, TE__COUNTER(fallback_other));
        return m->cls->forward(m, args);
    }
    return te__output(m, args, te__run_dpa(f, &call, te_module_is_training(m) ? s->rule.dropout_p : 0.0f));
}

/* The forward function that te__patch_forward gives a module. Opens a region of te_sdpa_begin, and runs the module's
 * previous forward function in it. Then closes this region, and all regions that the previous forward function has left
 * open. */
static te_result te__injected_forward(te_module *m, te_forward_args *args) {
    te_sdpa_patch *f = te_injected_sdpa(m);
    const int depth = te__sdpa_of(m->te)->depth;
    uint64_t before;
    te_result result;
    if (!f) return m->cls->forward(m, args);
    before = te__stats_sum(&f->stats);
    result = te_sdpa_begin(m->te, te_sdpa_patch_call, f);
    if (result != TE_OK) return result;
    result = f->before ? f->before(m, args) : m->cls->forward(m, args);
    te__sdpa_of(m->te)->depth = depth;
    if (result == TE_OK && !f->missed && before == te__stats_sum(&f->stats)) {
        f->missed = true;
        te__warn(m->te,
                 "te_inject_te_attention: %s has run without a call of te_scaled_dot_product_attention: it computes "
                 "attention by itself, as before",
                 m->te->module_path);
    }
    return result;
}

/* Undoes an injection. Restores the module's forward only if the current forward is that of the injection. */
static void te__eject(te_module *m) {
    te_sdpa_patch *f = te_injected_sdpa(m);
    te_module *core = te__core_of(m);
    bool injected, had_null;
    if (!f) return;
    injected = f->injected;
    had_null = f->had_null;
    if (core && core->own_forward == te__injected_core_forward) core->own_forward = NULL;
    if (m->own_forward == te__injected_forward) m->own_forward = f->before;
    te_module_remove_attribute(m, TE__ATTN_SDPA);
    if (!injected) return;
    if (had_null) te_module_set_attribute(m, TE__ATTN_MODULE, NULL, NULL);
    else te_module_remove_attribute(m, TE__ATTN_MODULE);
}

/* Replaces m's forward by te__injected_forward, which calls the replaced forward (f->before). */
static void te__patch_forward(te_module *m, te_sdpa_patch *f) {
    f->before = m->own_forward;
    m->own_forward = te__injected_forward;
}
TE_API te_result te_patch_module_forward(te_module *m, te_sdpa_patch *f) {
    te_result result;
    if (!m) return TE_ERR_STATE;
    if (!f || f->te != m->te)
        return te__fail(m->te, TE_ERR_INVALID,
                        "te_patch_module_forward: the te_sdpa_patch for %s is %s; one of te_make_te_sdpa is needed",
                        m->name, f ? "of another context" : "NULL");
    te__eject(m);
    result = te_module_set_attribute(m, TE__ATTN_SDPA, f, NULL);
    if (result == TE_OK) te__patch_forward(m, f);
    return result;
}

static void te__attn_module_free(void *value) { te_module_destroy((te_module *)value); }
static void te__attn_sdpa_free(void *value) { te_sdpa_patch_destroy((te_sdpa_patch *)value); }

/* Injects DotProductAttention into m. On failure records an error, leaves m unchanged and returns false. */
static bool te__inject(te_module *m, const te_inject_desc *desc, const te_attn_params *p) {
    te_ctx *te = m->te;
    te_module *core = te__core_of(m);
    const te_sdpa_desc *s = te__sdpa_desc_of(m);
    te_make_te_sdpa_desc d = TE_ZERO;
    te_sdpa_patch *f;
    te_module *dpa =
        te__make_attn_module(te, p, &desc->parallel, s ? s->format : TE_BSHD,
                             s ? s->rule.softmax_type : TE_SOFTMAX_VANILLA, s ? s->rule.softmax_offset : NULL);
    const bool had = te_module_attribute(m, TE__ATTN_MODULE, NULL);
    if (!dpa) return false;
    d.attn_module = dpa;
    d.num_heads = (int)te__per_rank(dpa, p->num_heads);
    d.num_kv_heads = (int)te__per_rank(dpa, p->num_kv_heads);
    d.original = te__sdpa_of(te)->depth ? te__sdpa_of(te)->fn[te__sdpa_of(te)->depth - 1] : NULL;
    d.original_user = te__sdpa_of(te)->depth ? te__sdpa_of(te)->user[te__sdpa_of(te)->depth - 1] : NULL;
    d.window_size = p->window_size;
    d.softmax_scale = p->softmax_scale;
    d.mask.strict = !desc->rules_of_automodel;
    d.mask.cache = desc->cache_masks;
    d.ignore_dropout = desc->rules_of_automodel;
    f = te_make_te_sdpa(te, &d);
    if (!f || te_module_set_attribute(m, TE__ATTN_SDPA, f, te__attn_sdpa_free) != TE_OK) {
        te_sdpa_patch_destroy(f);
        te_module_destroy(dpa);
        return false;
    }
    /* From here on the attributes own f and dpa, and the module destroys both. So te_ctx_destroy must not close
     * them. */
    te__closable_remove(&f->closable);
    if (te_module_set_attribute(m, TE__ATTN_MODULE, dpa, te__attn_module_free) != TE_OK) {
        te_module_remove_attribute(m, TE__ATTN_SDPA);
        te_module_destroy(dpa);
        return false;
    }
    te__closable_remove(&dpa->closable);
    f->injected = true;
    f->had_null = had;
    if (core && !core->own_forward)
        core->own_forward = te__injected_core_forward;
    else
        te__patch_forward(m, f);
    return true;
}

TE_API bool te_inject_te_attention_into_module(te_module *self_attn, const te_inject_desc *desc) {
    const te_inject_desc zero = TE_ZERO;
    te_attn_params p;
    te_inject_reason reason;
    if (!self_attn || !te__stats_every_ok(self_attn->te, "te_inject_te_attention_into_module")) return false;
    if (!desc) desc = &zero;
    te__eject(self_attn);
    reason = te__inject_params(self_attn, desc, &p);
    return reason == TE_INJECT_OK && te__inject(self_attn, desc, &p);
}

typedef struct te__inject_walk {
    te_module *root;
    const te_inject_desc *desc;
    int injected, had, left_alone;
} te__inject_walk;

static bool te__is_self_attn(const te_module *m) {
    static const char end[] = "self_attn";
    const size_t n = strlen(m->name), e = sizeof(end) - 1;
    return n >= e && strcmp(m->name + n - e, end) == 0;
}
static bool te__inject_visit(void *user, te_module *m) {
    te__inject_walk *w = (te__inject_walk *)user;
    char path[TE__TREE_PATH];
    te_attn_params p;
    te_inject_reason reason;
    if (m == w->root || !te__is_self_attn(m)) return true;
    reason = te__inject_params(m, w->desc, &p);
    if (reason == TE_INJECT_OK && !te__inject(m, w->desc, &p)) return false;
    w->injected += reason == TE_INJECT_OK;
    w->had += reason == TE_INJECT_PRESENT;
    w->left_alone += reason != TE_INJECT_OK;
    te__log(m->te, TE_LOG_DEBUG, "te_inject_te_attention: %s: %s", te_module_path(m, path, sizeof(path)),
            te_inject_reason_text(reason));
    return true;
}
TE_API int te_inject_te_attention(te_module *model, const te_inject_desc *desc) {
    const te_inject_desc zero = TE_ZERO;
    te__inject_walk w = TE_ZERO;
    bool whole;
    if (!model || !te__stats_every_ok(model->te, "te_inject_te_attention")) return -1;
    w.root = model;
    w.desc = desc ? desc : &zero;
    whole = te__visit_modules(model, te__inject_visit, &w);
    if (w.desc->left_alone) *w.desc->left_alone = w.left_alone;
    if (w.injected && te_module_set_attribute(model, TE__ATTN_INJECTED, model, NULL) != TE_OK) whole = false;
    if (!whole) return -1;
    if (w.injected)
        te__log(model->te, TE_LOG_INFO,
                "te_inject_te_attention: %s: %d modules have DotProductAttention now, %d are left alone", model->name,
                w.injected, w.left_alone);
    else if (w.desc->parallel.tp_group || w.desc->parallel.tp_size > 1 || w.desc->parallel.cp_group) {
        te__fail(model->te, TE_ERR_INVALID,
                 "te_inject_te_attention: %s has no self_attn that could be injected, and parallel names ranks that "
                 "are to share attention; %d modules were left alone (their "
                 "reasons: te_inject_check)",
                 model->name, w.left_alone);
        return -1;
    } else if (!w.had || w.desc->rules_of_automodel)
        te__warn(model->te,
                 "te_inject_te_attention: %s has no self_attn that could be injected; %d were left alone (their "
                 "reasons: te_inject_check)",
                 model->name, w.left_alone);
    return w.injected;
}

static bool te__eject_visit(void *user, te_module *m) {
    if (te_injected_sdpa(m)) ++*(int *)user;
    te__eject(m);
    te_module_remove_attribute(m, TE__ATTN_INJECTED);
    return true;
}
TE_API int te_restore_attention(te_module *model) {
    int n = 0;
    if (model) te__visit_modules(model, te__eject_visit, &n);
    return n;
}

static bool te__find_injected(void *user, te_module *m) {
    (void)user;
    return !(te__is_self_attn(m) && te__attribute_of(m, TE__ATTN_MODULE));
}
TE_API bool te_uses_te_attention(te_module *model) {
    return model &&
           (te_module_attribute(model, TE__ATTN_INJECTED, NULL) || !te__visit_modules(model, te__find_injected, NULL));
}
