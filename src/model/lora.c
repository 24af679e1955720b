/* model/lora.c: LoRA on Linears: choosing them, their adapters, the forward that adds these, merging and removing. Knows Linear and the module tree; must not know files. */

/* The numbers of a Linear's adapters, which the Linear keeps as its attribute TE__LORA. */
typedef struct te__lora {
    te_ctx *te;
    int64_t dim;
    float alpha, dropout;
    te_dropout_position position;
} te__lora;

static te__lora *te__lora_of(const te_module *m) {
    void *value = NULL;
    return te_module_attribute(m, TE__LORA, &value) ? (te__lora *)value : NULL;
}
static void te__lora_free(void *value) {
    te__lora *l = (te__lora *)value;
    te__free(l->te, l, sizeof(*l));
}

/* The names from the child of `root` down to m; "" for `root` itself. */
static const char *te__path_below(const te_module *root, const te_module *m, char *buffer, size_t size) {
    const te_module *chain[TE_MAX_MODULE_DEPTH];
    int n = 0;
    for (; m && m != root && n < TE_MAX_MODULE_DEPTH; m = m->parent) chain[n++] = m;
    return te__join_names(chain, n, buffer, size);
}
static te_tensor *te__lora_weight(te_module *m, const char *adapter) { return te_module_parameter(te_module_find(m, adapter), "weight"); }

/* ---- forward ---- */

static te_result te__lora_forward(te_module *m, te_forward_args *args) {
    const te__lora *l = te__lora_of(m);
    const te_tensor *a = te__lora_weight(m, "lora_A");
    const float p = te_module_is_training(m) ? l->dropout : 0.0f;
    te_forward_args in = TE_ZERO;
    te_tensor *x = args->input, *y;
    te_result result;
    if (args->fp8_output || args->fp8_grad)
        return te__fail(m->te, TE_ERR_UNSUPPORTED, "LoRA: %s: the sum of two products stays in high precision: leave it false, or te_lora_merge first", args->fp8_output ? "fp8_output" : "fp8_grad");
    result = m->cls->forward(m, args);
    y = args->outputs.out;
    if (result != TE_OK || !a || !y || (!y->buffer && !y->quantized)) return result; /* without memory: shapes alone came in */
    te__hand_on(&in, args);
    if (x->quantized && (p > 0.0f || x->dtype != a->dtype)) x = te_dequantize(x, x->dtype);
    if (x && x->dtype != a->dtype) x = te_tensor_cast(x, a->dtype);
    in.input = l->position == TE_DROPOUT_PRE ? te_dropout(x, p) : x;
    /* the factor stands between the two products, as Automodel has it */
    in.input = te_scale(te__run_child(m, "lora_A", &in), l->alpha / (float)l->dim);
    x = te__run_child(m, "lora_B", &in);
    if (l->position == TE_DROPOUT_POST) x = te_dropout(x, p);
    if (x && x->dtype != y->dtype) x = te_tensor_cast(x, y->dtype);
    return te__output(m, args, te_add(y, x));
}

/* ---- adapters ---- */

static te_result te__lora_fill_uniform(void *user, te_tensor *weight) {
    te_op_random_args args = TE_ZERO;
    te__draw draw = te__rng_draw(weight->te, 1);
    (void)user;
    args.dst = weight;
    args.kind = TE_RANDOM_UNIFORM;
    args.b = 1.0f / sqrtf((float)te__cols(weight));
    args.a = -args.b;
    args.seed = draw.seed;
    args.offset = draw.offset;
    args.rng = draw.rng;
    return te_op_random(weight->te, &args);
}
static te_result te__lora_fill_zero(void *user, te_tensor *weight) {
    (void)user;
    return te_tensor_fill(weight, 0.0);
}

static void te__lora_take_away(te_module *m) {
    te_module_set_forward(m, NULL);
    te__module_drop(m, "lora_A");
    te__module_drop(m, "lora_B");
    te_module_remove_attribute(m, TE__LORA);
}

/* A child of m, which is divided among m's ranks if m is divided in the same way. Under sequence parallelism ranks have different rows, so the gradient of a child that is not
 * divided is this rank's part. */
static bool te__lora_add_child(te_module *m, const char *name, int64_t in, int64_t out, te_parallel_mode mode, const te_init *init, te_dtype dtype) {
    const te__linear_module *s = (const te__linear_module *)m->state;
    const bool divided = m->parallel.size > 1 && s->desc.parallel.parallel_mode == mode;
    te_linear_desc d = TE_ZERO;
    te_module *child;
    d.in_features = in;
    d.out_features = out;
    d.name = name;
    d.gemm.no_bias = true;
    d.gemm.params_dtype = dtype;
    d.gemm.init = *init;
    if (m->meta && !m->awaits_group) d.gemm.device = TE_PARAMS_META;
    if (divided) {
        d.parallel = s->desc.parallel;
        d.parallel.tp_group = m->parallel.group;
        d.parallel.tp_size = m->parallel.size;
    }
    child = te_linear_create(m->te, &d);
    if (!child) return false;
    if (!te_module_add_child(m, NULL, child) || !te__module_need(child)) {
        te_module_destroy(child);
        return false;
    }
    child->evaluating = m->evaluating;
    if (m->parallel.sequence && !divided) te_tensor_set_sequence_parallel(te_module_parameter(child, "weight"), true);
    return true;
}

/* Gives m its adapters; after a failure it has none. */
static te_result te__lora_give(te_module *m, const te_lora_desc *d) {
    const te__linear_module *s = (const te__linear_module *)m->state;
    te_quantized_model_init_desc off = TE_ZERO;
    te_init a = TE_ZERO, b = TE_ZERO;
    te_dtype dtype = d->lora_dtype ? d->lora_dtype : m->entries[s->params.weights].tensor->dtype;
    te__lora *l = (te__lora *)te__alloc_zero(m->te, sizeof(te__lora));
    bool fine;
    if (!l) return TE_ERR_OUT_OF_MEMORY;
    l->te = m->te;
    l->dim = d->dim;
    l->alpha = d->alpha;
    l->dropout = d->dropout;
    l->position = d->dropout_position;
    if (te_module_set_attribute(m, TE__LORA, l, te__lora_free) != TE_OK) {
        te__lora_free(l);
        return te_error_code(m->te);
    }
    if (d->lora_A_init == TE_LORA_XAVIER)
        a.std = sqrtf(2.0f / (float)(s->desc.in_features + d->dim));
    else
        a.init_method = te__lora_fill_uniform;
    b.init_method = te__lora_fill_zero;
    off.not_enabled = true; /* adapters are trained: they are never stored quantized */
    fine = te_quantized_model_init_begin(m->te, &off) == TE_OK;
    if (fine) {
        fine = te__lora_add_child(m, "lora_A", s->desc.in_features, d->dim, TE_PARALLEL_ROW, &a, dtype) &&
               te__lora_add_child(m, "lora_B", d->dim, s->desc.out_features, TE_PARALLEL_COLUMN, &b, dtype);
        te_quantized_model_init_end(m->te);
    }
    if (!fine) {
        te__lora_take_away(m);
        return te_error_code(m->te);
    }
    te_module_set_forward(m, te__lora_forward);
    return TE_OK;
}

/* ---- choosing modules ---- */

/* Modules of a tree. */
typedef struct te__lora_list {
    te_ctx *te;
    te_module *root;
    const te_lora_desc *desc;
    te_module **list;
    int n, cap;
} te__lora_list;

static bool te__lora_list_add(te__lora_list *l, te_module *m) {
    if (!te__grow(l->te, (void **)&l->list, &l->cap, l->n, sizeof(te_module *))) return false;
    l->list[l->n++] = m;
    return true;
}
static void te__lora_list_free(te__lora_list *l) { te__free(l->te, l->list, (size_t)l->cap * sizeof(te_module *)); }

/* `name` as te_lora_desc has it. Automodel's ".*" is "*". */
static bool te__lora_name_matches(const char *name, const char *path) {
    char pattern[TE__TREE_PATH];
    size_t n = 0, length = strlen(path);
    for (; *name && n + 1 < sizeof(pattern); name++)
        if (!(name[0] == '.' && name[1] == '*')) pattern[n++] = *name;
    pattern[n] = 0;
    if (*name) return false; /* longer than any path */
    if (te__matches(pattern, path)) return true;
    return !strchr(pattern, '*') && !strchr(pattern, '?') && length > n && path[length - n - 1] == '.' && strcmp(path + length - n, pattern) == 0;
}
static bool te__lora_any_matches(const char *const *names, int n, const char *path) {
    int i;
    for (i = 0; i < n; i++)
        if (te__lora_name_matches(names[i], path)) return true;
    return false;
}
static bool te__lora_wants(const te_lora_desc *d, bool linear, const char *path) {
    if (d->match_all_linear) return linear;
    if (d->num_exclude_modules) return linear && !te__lora_any_matches(d->exclude_modules, d->num_exclude_modules, path);
    return d->num_target_modules ? te__lora_any_matches(d->target_modules, d->num_target_modules, path) : te__matches("*_proj", path);
}

/* Can m have adapters? False with the error. */
static bool te__lora_can(te_module *m, const char *path) {
    const te_module *up = m->parent ? m->parent->parent : NULL;
    if (m->cls != &te__linear_class)
        te__fail(m->te, TE_ERR_UNSUPPORTED, "LoRA: \"%s\" is a %s; adapters stand beside a Linear: name Linears alone", path, m->cls->name);
    else if (up && up->cls == &te__experts_class)
        te__fail(m->te, TE_ERR_UNSUPPORTED, "LoRA: \"%s\" is an expert's, and a GroupedLinear multiplies by the weights of all experts together; leave experts out (exclude_modules)", path);
    else if (te__lora_of(m))
        te__fail(m->te, TE_ERR_INVALID, "LoRA: \"%s\" has adapters already; te_lora_merge or te_lora_remove them first, or name other modules", path);
    else if (m->own_forward)
        te__fail(m->te, TE_ERR_INVALID, "LoRA: \"%s\" has a forward of its own, which adapters would replace; take it away first (te_module_set_forward with NULL)", path);
    else
        return true;
    return false;
}
static bool te__lora_choose(void *user, te_module *m) {
    te__lora_list *l = (te__lora_list *)user;
    const bool linear = m->cls == &te__linear_class;
    char buffer[TE__TREE_PATH];
    const char *path = te__path_below(l->root, m, buffer, sizeof(buffer));
    /* a pattern may well name containers, norms and embeddings: these are passed over */
    if (!linear && m->cls != &te__grouped_class && m->cls != &te__layernorm_linear_class && m->cls != &te__layernorm_mlp_class) return true;
    if (m->parent && te__lora_of(m->parent)) return true; /* an adapter */
    if (!path[0]) path = m->name;
    return !te__lora_wants(l->desc, linear, path) || (te__lora_can(m, path) && te__lora_list_add(l, m));
}

/* *d: the desc with its defaults; false with the error. */
static bool te__lora_desc_ok(te_ctx *te, const te_lora_desc *desc, te_lora_desc *d) {
    bool targets, excludes;
    int i, names;
    if (desc) *d = *desc;
    if (d->dim == 0) d->dim = 8;
    if (d->alpha == 0.0f) d->alpha = 32.0f;
    targets = d->num_target_modules != 0;
    excludes = d->num_exclude_modules != 0;
    names = d->num_target_modules + d->num_exclude_modules;
    if (d->use_dora)
        te__fail(te, TE_ERR_UNSUPPORTED, "te_lora_apply: use_dora: DoRA is not there for TransformerEngine's Linear; leave it false");
    else if (d->dim < 1 || !(fabsf(d->alpha) <= FLT_MAX) || !(d->dropout >= 0.0f && d->dropout < 1.0f))
        te__fail(te, TE_ERR_INVALID, "te_lora_apply: dim %d, alpha %g, dropout %g; dim is at least 1, alpha finite, dropout from 0 to below 1", d->dim, (double)d->alpha, (double)d->dropout);
    else if ((int)d->dropout_position < 0 || d->dropout_position > TE_DROPOUT_PRE || (int)d->lora_A_init < 0 || d->lora_A_init > TE_LORA_KAIMING)
        te__fail(te, TE_ERR_INVALID, "te_lora_apply: dropout_position %d, lora_A_init %d; TE_DROPOUT_POST and TE_DROPOUT_PRE, TE_LORA_XAVIER and TE_LORA_KAIMING (0 and 1 each) are possible",
                 (int)d->dropout_position, (int)d->lora_A_init);
    else if (d->lora_dtype && !te__is_float(d->lora_dtype))
        te__fail(te, TE_ERR_DTYPE, "te_lora_apply: lora_dtype %s; f32, f16 and bf16 are possible", te_dtype_name(d->lora_dtype));
    else if (d->num_target_modules < 0 || d->num_exclude_modules < 0 || (targets && !d->target_modules) || (excludes && !d->exclude_modules))
        te__fail(te, TE_ERR_INVALID, "te_lora_apply: %d target_modules (%s) and %d exclude_modules (%s); each number goes with a list of as many names", d->num_target_modules,
                 d->target_modules ? "given" : "NULL", d->num_exclude_modules, d->exclude_modules ? "given" : "NULL");
    else if ((int)targets + (int)excludes + (int)d->match_all_linear > 1)
        te__fail(te, TE_ERR_INVALID, "te_lora_apply: %s and %s exclude each other; give one of target_modules, exclude_modules and match_all_linear",
                 targets ? "target_modules" : "exclude_modules", d->match_all_linear ? "match_all_linear" : "exclude_modules");
    else {
        for (i = 0; i < names && (targets ? d->target_modules : d->exclude_modules)[i]; i++) {}
        if (i == names) return true;
        te__fail(te, TE_ERR_INVALID, "te_lora_apply: name %d of %d is NULL", i, names);
    }
    return false;
}

static bool te__has_no_graphs(void *user, te_module *m) {
    (void)user;
    return !m->graphed;
}
/* May modules of this tree change? Graphs of theirs would go on as they were captured. */
static te_result te__lora_open(te_module *model, const char *who) {
    const te_module *up;
    bool graphed;
    if (!model) return TE_ERR_STATE;
    if (model->te->error_code != TE_OK) return model->te->error_code;
    if (model->te->capture) return te__refuse_capture(model->te, who, "change modules before te_graph_begin");
    if (te__refuse_hook(model->te, who) != TE_OK) return TE_ERR_STATE;
    graphed = !te_module_visit(model, te__has_no_graphs, NULL);
    for (up = model->parent; up && !graphed; up = up->parent) graphed = up->graphed != NULL;
    if (!graphed) return TE_OK;
    return te__fail(model->te, TE_ERR_STATE, "%s: a module of the tree has graphs (te_make_graphed_callables), which would go on as they were; call it before these are made", who);
}

static bool te__lora_train(void *user, te_module *m) {
    (void)user;
    if (!te__lora_of(m)) return true;
    te_module_set_requires_grad(m, false);
    te_module_set_requires_grad(te_module_find(m, "lora_A"), true);
    te_module_set_requires_grad(te_module_find(m, "lora_B"), true);
    return true;
}
/* Freezes what is no adapter; `whole` false: of the modules with adapters alone. */
static void te__lora_freeze(te_module *model, bool whole) {
    if (whole) te_module_set_requires_grad(model, false);
    te_module_visit(model, te__lora_train, NULL);
}

/* Gives adapters to all of a list, or to none. */
static te_result te__lora_give_all(te__lora_list *l, const te_lora_desc *d) {
    te__rng_state random = te__rng_now(l->te);
    te_result result = TE_OK;
    int i;
    for (i = 0; i < l->n && result == TE_OK; i++) result = te__lora_give(l->list[i], d);
    if (result == TE_OK) return result;
    for (i--; i >= 0; i--) te__lora_take_away(l->list[i]);
    te__rng_back(l->te, random);
    return result;
}

TE_API te_result te_lora_apply(te_module *model, const te_lora_desc *desc, int *num_modules) {
    te_lora_desc d = TE_ZERO;
    te__lora_list l = TE_ZERO;
    te_result result = te__lora_open(model, "te_lora_apply");
    if (num_modules) *num_modules = 0;
    if (result == TE_OK) result = te__tree_whole(model);
    if (result != TE_OK) return result;
    if (!te__lora_desc_ok(model->te, desc, &d)) return te_error_code(model->te);
    l.te = model->te;
    l.root = model;
    l.desc = &d;
    if (!te_module_visit(model, te__lora_choose, &l)) result = te_error_code(l.te);
    if (result == TE_OK && l.n == 0)
        result = te__fail(l.te, TE_ERR_INVALID, "te_lora_apply: no Linear below \"%s\" is one of %s; te_module_print shows the names", model->name,
                          d.match_all_linear ? "all" : d.num_exclude_modules ? "those that exclude_modules leave" : d.num_target_modules ? d.target_modules[0] : "*_proj");
    if (result == TE_OK) result = te__lora_give_all(&l, &d);
    if (result == TE_OK) {
        te__lora_freeze(model, !d.skip_freeze);
        if (num_modules) *num_modules = l.n;
    }
    te__lora_list_free(&l);
    return result;
}

/* ---- merging and removing ---- */

static bool te__lora_collect(void *user, te_module *m) { return !te__lora_of(m) || te__lora_list_add((te__lora_list *)user, m); }
/* All modules of the tree that have adapters: one at least. */
static te_result te__lora_all(te__lora_list *l, te_module *model, const char *who) {
    l->te = model->te;
    l->root = model;
    if (!te_module_visit(model, te__lora_collect, l)) return te_error_code(l->te);
    return l->n ? TE_OK : te__fail(l->te, TE_ERR_INVALID, "%s: no module below \"%s\" has adapters; te_lora_apply or te_lora_load gives them", who, model->name);
}

typedef struct te__holders {
    const te_tensor *x;
    int n;
} te__holders;
static bool te__count_holders(void *user, te_module *m, const char *path, te_tensor *x, te_entry_kind kind) {
    te__holders *h = (te__holders *)user;
    (void)m, (void)path, (void)kind;
    h->n += x == h->x;
    return true;
}
/* Can m's weights take their sums? */
static te_result te__lora_mergeable(te_module *m) {
    const te__linear_module *s = (const te__linear_module *)m->state;
    te_module *root = m;
    char path[256];
    int i;
    while (root->parent) root = root->parent;
    te_module_path(m, path, sizeof(path));
    if (m->meta || te_module_find(m, "lora_A")->meta || te_module_find(m, "lora_B")->meta)
        return te__fail(m->te, TE_ERR_STATE, "te_lora_merge: \"%s\" or its adapters have no values yet; te_module_reset_parameters gives them", path);
    for (i = 0; i < s->params.count; i++) {
        te__holders h = TE_ZERO;
        h.x = m->entries[s->params.weights + i].tensor;
        if (h.x->quantized && !h.x->quantized->quantizer)
            return te__fail(m->te, TE_ERR_STATE, "te_lora_merge: the weight of \"%s\" is quantized without its quantizer, and cannot take a new value", path);
        te_module_visit_tensors(root, te__count_holders, &h);
        if (h.n > 1) return te__fail(m->te, TE_ERR_UNSUPPORTED, "te_lora_merge: the weight of \"%s\" is that of %d modules, and the others would change with it; untie it first", path, h.n);
    }
    return TE_OK;
}

/* weight + factor * delta, summed in f32, as a new tensor. */
static te_tensor *te__lora_merged(te_tensor *weight, te_tensor *delta, float factor) {
    te_op_axpby_args sum = TE_ZERO;
    sum.x = weight->quantized ? te_dequantize(weight, TE_F32) : weight;
    sum.out = sum.x ? te__empty_like(sum.x, sum.x->dtype) : NULL;
    sum.y = delta;
    sum.alpha = 1.0f;
    sum.beta = factor;
    return sum.out && delta && te_op_axpby(weight->te, &sum) == TE_OK ? sum.out : NULL;
}
static te_result te__lora_merge(te_module *m) {
    const te__linear_module *s = (const te__linear_module *)m->state;
    const te__lora *l = te__lora_of(m);
    te_ctx *te = m->te;
    const size_t bytes = (size_t)s->params.count * sizeof(te_tensor *);
    te_tensor *a, *b, **sums = (te_tensor **)te__alloc_zero(te, bytes);
    te_op_gemm_args gemm = TE_ZERO;
    te_result result;
    int64_t at = 0;
    int i;
    if (!sums) return TE_ERR_OUT_OF_MEMORY;
    te__frame_begin(te);
    te_no_grad_begin(te);
    a = te_tensor_cast(te__lora_weight(m, "lora_A"), TE_F32);
    b = te_tensor_cast(te__lora_weight(m, "lora_B"), TE_F32);
    gemm.d = a && b ? te__empty_2d(te, TE_F32, te__rows(b), te__cols(a)) : NULL;
    result = gemm.d ? te__product(te, b, false, a, false, &gemm) : te_error_code(te);
    for (i = 0; i < s->params.count && result == TE_OK; i++) {
        te_tensor *weight = m->entries[s->params.weights + i].tensor;
        sums[i] = te__lora_merged(weight, te_tensor_narrow(gemm.d, 0, at, te__rows(weight)), l->alpha / (float)l->dim);
        if (!sums[i]) result = te_error_code(te);
        at += te__rows(weight);
    }
    for (i = 0; i < s->params.count && result == TE_OK; i++) { /* all of a module's weights change, or none */
        te_tensor *weight = m->entries[s->params.weights + i].tensor;
        result = weight->quantized ? te__primary_start(weight, sums[i]) : te_tensor_copy(weight, sums[i]);
    }
    te_no_grad_end(te);
    te__frame_end(te, NULL, 0);
    te__free(te, sums, bytes);
    return result;
}

TE_API te_result te_lora_merge(te_module *model) {
    te__lora_list l = TE_ZERO;
    te_result result = te__lora_open(model, "te_lora_merge");
    bool entered;
    int i;
    if (result == TE_OK) result = te__tree_whole(model);
    if (result != TE_OK) return result;
    result = te__lora_all(&l, model, "te_lora_merge");
    for (i = 0; i < l.n && result == TE_OK; i++) result = te__lora_mergeable(l.list[i]);
    if (result == TE_OK) result = te__device_enter(l.te, &entered);
    if (result == TE_OK) {
        for (i = 0; i < l.n && result == TE_OK; i++) {
            result = te__lora_merge(l.list[i]);
            if (result == TE_OK) te__lora_take_away(l.list[i]);
        }
        te__device_leave(l.te, entered);
    }
    te__lora_list_free(&l);
    return result;
}
TE_API te_result te_lora_remove(te_module *model) {
    te__lora_list l = TE_ZERO;
    te_result result = te__lora_open(model, "te_lora_remove");
    int i;
    if (result != TE_OK) return result;
    result = te__lora_all(&l, model, "te_lora_remove");
    for (i = 0; i < l.n && result == TE_OK; i++) te__lora_take_away(l.list[i]);
    te__lora_list_free(&l);
    return result;
}
