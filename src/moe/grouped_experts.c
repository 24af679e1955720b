/* moe/grouped_experts.c: the modules GroupedExperts, GroupedExpertsDeepEP and GroupedExpertsTE. The experts of
 * moe/block.c use the forward function of these modules, too. This file must not depend on gates. */

enum { TE__EXPERTS_UP, TE__EXPERTS_DOWN, TE__EXPERTS_PRODUCTS }; /* the two linear layers of an expert */

typedef struct te__experts_module {
    te_moe_config config;
    te_activation activation; /* between the two linear layers */
    te_activation_params params;
    te_experts_backend way;
    te_group *group;
    int ranks, local; /* ranks that share the experts; experts on each rank */
    bool exchanges;   /* true: ranks exchange rows; false: ranks gather all tokens */
    int64_t bound, longest; /* bound: of te_set_max_dispatch_tokens, or 0. longest: the largest number of tokens that a
                             * rank has had in the last call that has gathered, outside of captures */
    bool met;         /* the ranks have compared a call since `bound` was set */
    bool gmm;         /* true: the backend TE_EXPERTS_GMM uses grouped GEMMs; false: it uses a loop over experts */
    /* Names of the GroupedLinear children of each linear layer, which has two, one or no children. The outputs of two
     * children are concatenated. A missing name is NULL. Without children, the weights are parameters of this module
     * itself. */
    const char *linears[TE__EXPERTS_PRODUCTS][2];
    const char *proj[3]; /* names of gate, up and down in files */
} te__experts_module;

typedef struct te__experts_call te__experts_call;
/* A function that returns y plus a term, for instance the output of LoRA adapters. y is the output of linear layer
 * `product` for x. */
typedef te_tensor *(*te__experts_add_fn)(te_module *m, const te__experts_call *c, int product, te_tensor *x,
                                         te_tensor *y);
struct te__experts_call {
    const te_forward_args *args;
    te__expert_way way; /* implementation of GEMMs with stacks of weights */
    te__expert_rows rows;
    const int64_t *splits; /* group sizes on the host; if NULL, the GroupedLinears read rows.sizes on the device */
    te__experts_add_fn add; /* NULL: no term is added */
};

static int64_t te__up_size(const te_moe_config *c) {
    return (te__expert_is_gated(c->expert_activation) ? 2 : 1) * c->moe_inter_dim;
}

/* Checks the arguments of a call. Sets *x [T, dim], *indices and *padding, and fills *d. */
static te_result te__experts_begin(te_module *m, te_forward_args *args, te__dispatch *d, te_tensor **x,
                                   te_tensor **indices, te_tensor **padding) {
    te__experts_module *s = (te__experts_module *)m->state;
    te_tensor *w = args->topk_weights, *k = args->topk_indices;
    bool map;
    char a[TE__SHAPE_TEXT], b[TE__SHAPE_TEXT];
    *x = te__moe_matrix(m, args->input, te__expert_dim(&s->config));
    if (!*x) return te_error_code(m->te);
    if (s->ranks > 1 && m->te->capture && !d->bound)
        return te__refuse_capture(m->te, "a call of experts that ranks share, whose numbers of tokens are not known",
                                  s->exchanges ? "call te_set_max_dispatch_tokens before te_graph_begin"
                                               : "call te_set_max_dispatch_tokens, or the module once, before "
                                                 "te_graph_begin");
    if (d->bound && te__rows(*x) > d->bound)
        return te__fail(m->te, TE_ERR_SHAPE,
                        "%s: the input is %s, and a rank has %lld tokens at most (%s); %s", m->cls->name,
                        te__shape_text(args->input, a), (long long)d->bound,
                        s->bound ? "te_set_max_dispatch_tokens" : "the last call before te_graph_begin",
                        s->bound ? "set a larger number on all ranks"
                                 : "call te_set_max_dispatch_tokens before te_graph_begin");
    if (te_tensor_is_sharded(args->input))
        return te__fail(m->te, TE_ERR_INVALID,
                        "%s: the input is a shard (te_tensor_set_sharded); experts take a rank's own tokens, whole",
                        m->cls->name);
    if (!w || !k)
        return te__fail(m->te, TE_ERR_STATE, "%s: topk_weights and topk_indices are %s; a gate gives both",
                        m->cls->name,
                        !w && !k ? "NULL"
                        : w      ? "given and NULL"
                                 : "NULL and given");
    if (!te__same_ctx(w, m->te, m->cls->name) || !te__same_ctx(k, m->te, m->cls->name) ||
        !te__need_float(w, m->cls->name))
        return te_error_code(m->te);
    map = k->dtype == TE_U8 && s->linears[0][1]; /* a routing map is possible only for the experts of moe/block.c */
    if (w->ndim != 2 || !te__same_shape(w, k) || w->shape[0] != te__rows(*x) || w->shape[1] < 1 ||
        !(map ? w->shape[1] == (int64_t)s->local * s->ranks : te__is_index(k->dtype)))
        return te__fail(
            m->te, TE_ERR_SHAPE,
            "%s: topk_weights are %s and topk_indices %s %s; both must be [%lld, K], and indices i32 or i64",
            m->cls->name, te__shape_text(w, a), te_dtype_name(k->dtype), te__shape_text(k, b), (long long)te__rows(*x));
    if (!te__moe_padding(m, args, te__rows(*x), padding)) return te_error_code(m->te);
    if (map && *padding)
        return te__fail(m->te, TE_ERR_UNSUPPORTED, "%s: padding with a map of the choice; lists of experts go with it",
                        m->cls->name);
    d->group = s->group;
    d->ranks = s->ranks;
    d->local = s->local;
    d->tokens = te__rows(*x);
    d->topk = map ? 0 : w->shape[1];
    d->rows = d->tokens;
    d->chosen = s->config.n_activated_experts;
    d->copies = d->tokens * d->chosen;
    d->weights = te_tensor_cast(te_tensor_contiguous(w), TE_F32);
    *indices = te_tensor_contiguous(k);
    return d->weights && *indices ? TE_OK : te_error_code(m->te);
}
/* Tells the other ranks that a call fails before its collectives, so that they do not wait. Returns `result`. m may be
 * NULL. */
static te_result te__experts_refuse(te_module *m, te_result result) {
    const te__experts_module *s = m ? (const te__experts_module *)m->state : NULL;
    return s && s->ranks > 1 ? te__refuse(s->group, s->exchanges ? TE__ALL_TO_ALL : TE__ALL_REDUCE, result) : result;
}
/* Compares the calls of all ranks before the first exchange: ranks with different bounds exchange different things.
 * `result` is this rank's result so far. If one rank fails, all ranks fail. */
static te_result te__experts_meet(te_module *m, const te__dispatch *d, const te_tensor *x, te_result result) {
    te__experts_module *s = (te__experts_module *)m->state;
    const char *linear = s->linears[TE__EXPERTS_UP][0]; /* other experts read no recipe */
    char what[384] = "", most[48] = "any number of", recipe[TE__RECIPE_TEXT];
    te__autocast cast;
    bool quantizes;
    if (s->ranks < 2 || !te__group_compares(s->group, s->met))
        return result == TE_OK ? result : te__experts_refuse(m, result);
    quantizes = linear && te__autocast_of(te_module_find(m, linear), &cast) && cast.enabled;
    if (d->bound) snprintf(most, sizeof(most), "at most %lld", (long long)d->bound);
    if (result == TE_OK)
        snprintf(what, sizeof(what),
                 "%d experts on each rank, for tokens of %lld numbers in %s, %lld experts each, %s, %s; a rank has %s "
                 "tokens (te_set_max_dispatch_tokens %lld)",
                 s->local, (long long)te__cols(x), te_dtype_name(x->dtype), (long long)d->chosen,
                 s->exchanges ? "by all-to-all" : "gathered",
                 te__recipe_told(quantizes ? &cast.recipe : NULL, recipe), most, (long long)s->bound);
    result = te__group_compare(s->group, what, result);
    s->met = s->met || (result == TE_OK && !m->te->warming);
    return result;
}
/* Dispatches the tokens of the call. Fills *rows with the rows of this rank's experts. */
static te_result te__experts_rows(te_module *m, te_forward_args *args, te__dispatch *d, bool on_host,
                                  te__expert_rows *rows) {
    te__experts_module *s = (te__experts_module *)m->state;
    const bool before = !s->config.apply_router_weight_after_down, ids = s->config.expert_bias && before;
    te_tensor *x = NULL, *indices = NULL, *padding = NULL;
    te_result result = te__experts_begin(m, args, d, &x, &indices, &padding);
    result = te__experts_meet(m, d, x, result);
    if (result != TE_OK) return result;
    d->dtype = x->dtype;
    if (!d->topk) return te__mapped_rows(d, x, indices, before, rows);
    return s->exchanges && !d->bound ? te__exchanged_rows(d, x, indices, padding, ids, rows)
                                     : te__gathered_rows(d, x, indices, padding, on_host, ids, rows);
}
/* Sends the experts' output y back to the ranks that have the tokens. y is NULL if this rank failed. The rank still
 * joins the collectives. */
static te_result te__experts_back(te_module *m, te_forward_args *args, const te__dispatch *d, te_tensor *y,
                                  const te__expert_rows *rows) {
    te__experts_module *s = (te__experts_module *)m->state;
    const bool after = s->config.apply_router_weight_after_down;
    if (s->exchanges && !d->bound)
        y = te__exchanged_back(d, after ? te__scale_rows(y, rows->probs) : y, d->dtype, te__expert_dim(&s->config));
    else
        y = te__gathered_back(d, y, after);
    return te__output(m, args,
                      y && args->input->ndim != 2 ? te_tensor_view(y, args->input->ndim, args->input->shape) : y);
}

/* ---- the call ---- */

static te__expert_way te__experts_way(te_module *m) {
    const te__experts_module *s = (const te__experts_module *)m->state;
    if (s->linears[0][0]) return TE__EXPERTS_GROUPED;
    if (s->way == TE_EXPERTS_TORCH_MM_MXFP8) return te__mxfp8_way(m->te, &s->config);
    return s->way == TE_EXPERTS_TORCH_MM || (s->way == TE_EXPERTS_GMM && s->gmm) ? TE__EXPERTS_GROUPED
                                                                                 : TE__EXPERTS_LOOP;
}
/* Runs the child `name` on the rows x of all experts. `splits` NULL: the group sizes are c->rows.sizes. Sets *bias to
 * the child's output `bias` [E, out]. */
static te_tensor *te__experts_child(te_module *m, const te__experts_call *c, const char *name, te_tensor *x,
                                    const int64_t *splits, te_tensor **bias) {
    te_forward_args args = TE_ZERO;
    te_tensor *y;
    if (!x) return NULL;
    args.input = x;
    args.is_first_microbatch = c->args->is_first_microbatch;
    args.user = c->args->user;
    args.m_splits = splits;
    if (!splits) args.m_splits_tensor = c->rows.sizes;
    y = te__run_child(m, name, &args);
    if (bias) *bias = args.outputs.bias;
    return y;
}
/* Runs linear layer `product` on x, and adds the bias [E, out]. If router weights must be applied to the bias before it
 * is added, returns the bias in *bias instead. */
static te_tensor *te__experts_product(te_module *m, const te__experts_call *c, int product, te_tensor *x,
                                      te_tensor **bias) {
    const te__experts_module *s = (const te__experts_module *)m->state;
    const bool down = product == TE__EXPERTS_DOWN;
    const char *const *name = s->linears[product];
    te_tensor *parts[2], *w, *y;
    int i;
    *bias = NULL;
    if (!x) return NULL;
    if (name[0]) {
        for (i = 0; i < 2 && name[i]; i++) parts[i] = te__experts_child(m, c, name[i], x, c->splits, bias);
        y = i == 2 ? te_concat(parts, 2, -1) : parts[0];
    } else {
        te_tensor *added = te_module_parameter(m, down ? "down_proj_bias" : "gate_up_proj_bias");
        w = te_module_parameter(m, down ? "down_projs" : "gate_and_up_projs");
        if (te__need_memory(w, m->cls->name) != TE_OK) return NULL;
        if (down && !s->config.apply_router_weight_after_down) {
            *bias = added;
            added = NULL;
        }
        y = te__expert_product(&c->rows, c->way, x, w, added);
    }
    return y && c->add ? c->add(m, c, product, x, y) : y;
}
/* Runs the experts on their rows: up, activation, router weights, down. Returns [rows, dim]. If
 * apply_router_weight_after_down is set, the caller applies the router weights. */
static te_tensor *te__experts_compute(te_module *m, const te__experts_call *c) {
    const te__experts_module *s = (const te__experts_module *)m->state;
    te_tensor *bias, *y = te__experts_product(m, c, TE__EXPERTS_UP, c->rows.x, &bias);
    y = te_activate(y, s->activation, &s->params);
    if (!s->config.apply_router_weight_after_down) y = te__scale_rows(y, c->rows.probs);
    y = te__experts_product(m, c, TE__EXPERTS_DOWN, y, &bias);
    return y && bias ? te__weighted_bias(&c->rows, y, bias) : y;
}

/* Pads the rows and router weights of each expert to the alignment of the recipe. Writes the padded sizes to
 * `splits`. */
static te_result te__pad_rows(te_module *m, te__experts_call *c, int64_t *splits) {
    te__experts_module *s = (te__experts_module *)m->state;
    te__expert_rows *rows = &c->rows;
    te_forward_args args = TE_ZERO;
    te_tensor *p;
    args.input = rows->x;
    args.m_splits = rows->host;
    args.padded_m_splits = splits;
    rows->x = te__run_child(m, "fp8_padding", &args);
    args.input = te__view_2d(rows->probs, te__numel(rows->probs), 1);
    p = rows->x && args.input ? te__run_child(m, "fp8_padding", &args) : NULL;
    rows->probs = p ? te_tensor_view(p, 1, p->shape) : NULL;
    rows->sizes = rows->probs ? te__moe_splits(m->te, NULL, splits, s->local, 1, NULL) : NULL;
    if (rows->sizes && rows->ids) rows->ids = te__ids_of_sizes(m->te, splits, s->local);
    c->splits = splits;
    return rows->sizes ? TE_OK : te_error_code(m->te);
}
/* Runs the experts of a GroupedExpertsTE. Under autocast it pads the rows of each expert first and removes the padding
 * afterwards. */
static te_tensor *te__te_experts_compute(te_module *m, te__experts_call *c) {
    const size_t bytes = (size_t)((const te__experts_module *)m->state)->local * sizeof(int64_t);
    int64_t *padded;
    te__autocast cast;
    te_tensor *y = NULL;
    c->splits = c->rows.host;
    if (!te__autocast_of(m, &cast) || !cast.enabled) return te__experts_compute(m, c);
    padded = (int64_t *)te__alloc(m->te, bytes);
    if (!padded) return NULL;
    if (te__pad_rows(m, c, padded) == TE_OK)
        y = te__experts_child(m, c, "fp8_unpadding", te__experts_compute(m, c), c->rows.host, NULL);
    te__free(m->te, padded);
    return y;
}
static te_result te__experts_run(te_module *m, te_forward_args *args, te__experts_add_fn add) {
    te__experts_module *s = (te__experts_module *)m->state;
    te__experts_call c = TE_ZERO;
    te__dispatch d = TE_ZERO;
    te_result result;
    bool on_host;
    if (s->ranks > 1) d.bound = s->bound || !m->te->capture ? s->bound : s->longest;
    on_host = s->linears[0][0] && !s->linears[0][1] && !d.bound; /* GroupedExpertsTE */
    c.args = args;
    c.way = te__experts_way(m);
    if (d.bound && c.way == TE__EXPERTS_LOOP) c.way = TE__EXPERTS_GROUPED; /* a loop needs the sizes on the host */
    c.add = add;
    result = te__experts_rows(m, args, &d, on_host || c.way == TE__EXPERTS_LOOP, &c.rows);
    if (result == TE_OK) {
        te_tensor *y = on_host ? te__te_experts_compute(m, &c) : te__experts_compute(m, &c);
        result = te__experts_back(m, args, &d, y, &c.rows);
    }
    if (result == TE_OK && d.longest && !d.bound && !m->te->warming) s->longest = d.longest;
    te__free(m->te, d.host);
    return result;
}
static te_result te__experts_forward(te_module *m, te_forward_args *args) { return te__experts_run(m, args, NULL); }

static bool te__experts_set_bound(void *user, te_module *m) {
    te__experts_module *s = (te__experts_module *)m->state;
    if (m->cls->forward != te__experts_forward) return true;
    s->bound = *(const int64_t *)user;
    s->met = false;
    return true;
}
TE_API te_result te_set_max_dispatch_tokens(te_module *m, int64_t tokens) {
    if (!m) return TE_ERR_STATE;
    if (tokens < 0 || tokens > INT32_MAX)
        return te__fail(m->te, TE_ERR_INVALID,
                        "te_set_max_dispatch_tokens: tokens is %lld; give the largest number of tokens that a rank has "
                        "in a call, at most 2^31 - 1, or 0, for which the host waits in each call",
                        (long long)tokens);
    te_module_visit(m, te__experts_set_bound, &tokens);
    return TE_OK;
}

/* ---- GroupedExperts, GroupedExpertsDeepEP ---- */

static const struct te__stacked_name {
    const char *name;
    bool bias;
} te__stacked_names[4] = {
    {"gate_and_up_projs", false}, {"down_projs", false}, {"gate_up_proj_bias", true}, {"down_proj_bias", true}};
TE_API const char *te_experts_tensor_name(te_experts_tensor which) {
    return (unsigned)which < 4 ? te__stacked_names[which].name : "?";
}

static te_result te__stacked_reset(te_module *m) {
    te__experts_module *s = (te__experts_module *)m->state;
    te_init init = TE_ZERO;
    te_result result = TE_OK;
    int i;
    init.std = s->config.init_std;
    for (i = 0; i < m->num_entries && result == TE_OK; i++) {
        te_tensor *x = m->entries[i].tensor;
        result = x->ndim == 3 ? te__init_fill(x, &init) : te_tensor_fill(x, 0.0);
    }
    return result;
}
static const te_module_class te__grouped_experts_class = {"GroupedExperts", sizeof(te__experts_module),
                                                          te__experts_forward, NULL, te__stacked_reset};
static const te_module_class te__deepep_class = {"GroupedExpertsDeepEP", sizeof(te__experts_module),
                                                 te__experts_forward, NULL, te__stacked_reset};

/* Adds the parameter `name` with the shape [n, rows, cols], or [n, cols] if rows is 0. */
static void te__add_experts(te_module *m, const char *name, te_dtype dtype, int64_t n, int64_t rows, int64_t cols) {
    const int64_t shape[3] = {n, rows ? rows : cols, cols};
    te__add_shaped(m, name, dtype, rows ? 3 : 2, shape);
}
static te_module *te__experts_create(te_ctx *te, const char *who, const te_module_class *cls,
                                     const te_moe_config *config, const te_moe_backend *backend) {
    te_moe_config c;
    te_module *m;
    te__experts_module *s;
    int ranks;
    if (!te__moe_config_ok(te, who, config, &c) || !te__has_moe_backend(te, backend, who)) return NULL;
    ranks = te__group_size(backend->ep_group);
    if (backend->ep_group && backend->ep_group->te != te)
        return te__no_module(te, TE_ERR_INVALID, "%s: ep_group belongs to another context", who);
    if (c.n_routed_experts % ranks)
        return te__no_module(te, TE_ERR_INVALID,
                             "%s: n_routed_experts is %d, and ep_group has %d ranks; they must divide it", who,
                             c.n_routed_experts, ranks);
    m = te__module_named(te, cls, c.name, "experts");
    if (!m) return NULL;
    s = (te__experts_module *)m->state;
    s->config = c;
    s->config.name = NULL;
    s->activation = te__expert_function(c.expert_activation, &c, &s->params);
    s->proj[0] = "gate_proj";
    s->proj[1] = "up_proj";
    s->proj[2] = "down_proj";
    s->way = backend->experts ? backend->experts : te_ctx_is_cuda(te) ? TE_EXPERTS_TORCH_MM : TE_EXPERTS_TORCH;
    s->group = backend->ep_group;
    te__module_shares(m, s->group);
    s->ranks = ranks;
    s->local = c.n_routed_experts / ranks;
    s->gmm = cls != &te__grouped_experts_class;
    s->exchanges = s->gmm && ranks > 1;
    te__params_on(m, c.device);
    return m;
}
/* Notes that the parameters of m are those of experts that only this rank of `group` has: `local` of them. */
static void te__experts_own(te_module *m, te_group *group, te__own_form own, int local) {
    int i;
    for (i = 0; m && te__group_size(group) > 1 && i < m->num_entries; i++)
        te__split_own(m->entries[i].tensor, group, own, te__group_rank(group) * local);
}
static te_module *te__stacked_experts_create(te_ctx *te, const char *who, const te_module_class *cls,
                                             const te_moe_config *config, const te_moe_backend *backend) {
    te_module *m = te__experts_create(te, who, cls, config, backend);
    const te__experts_module *s = m ? (const te__experts_module *)m->state : NULL;
    if (!m) return NULL;
    te__add_experts(m, "gate_and_up_projs", s->config.dtype, s->local, te__expert_dim(&s->config),
                    te__up_size(&s->config));
    te__add_experts(m, "down_projs", s->config.dtype, s->local, s->config.moe_inter_dim, te__expert_dim(&s->config));
    if (s->config.expert_bias) {
        te__add_experts(m, "gate_up_proj_bias", s->config.dtype, s->local, 0, te__up_size(&s->config));
        te__add_experts(m, "down_proj_bias", s->config.dtype, s->local, 0, te__expert_dim(&s->config));
    }
    te__experts_own(m, s->group, TE__OWN_STACKED, s->local);
    return te__module_built(m);
}
TE_API te_module *te_grouped_experts_create(te_ctx *te, const te_moe_config *config, const te_moe_backend *backend) {
    return te__stacked_experts_create(te, "te_grouped_experts_create", &te__grouped_experts_class, config, backend);
}
TE_API te_module *te_grouped_experts_deepep_create(te_ctx *te, const te_moe_config *config,
                                                   const te_moe_backend *backend) {
    return te__stacked_experts_create(te, "te_grouped_experts_deepep_create", &te__deepep_class, config, backend);
}

/* ---- GroupedExpertsTE ---- */

static const te_module_class te__te_experts_class = {"GroupedExpertsTE", sizeof(te__experts_module),
                                                     te__experts_forward, NULL, NULL};

static void te__te_child(te_module *m, const char *name, int64_t in, int64_t out, bool return_bias) {
    te__experts_module *s = (te__experts_module *)m->state;
    te_grouped_linear_desc d = TE_ZERO;
    te_module *child;
    d.num_gemms = s->local;
    d.in_features = in;
    d.out_features = out;
    d.gemm.no_bias = !s->config.expert_bias;
    d.gemm.return_bias = return_bias && s->config.expert_bias;
    d.gemm.params_dtype = s->config.dtype;
    d.gemm.device = s->config.device;
    child = te_grouped_linear_create(m->te, &d);
    te__experts_own(child, s->group, TE__OWN_NUMBERED, s->local);
    te__adopt(m, name, child);
}
TE_API te_module *te_grouped_experts_te_create(te_ctx *te, const te_moe_config *config, const te_moe_backend *backend) {
    static const char who[] = "te_grouped_experts_te_create";
    te_module *m, *outer;
    te__experts_module *s;
    te_fp8_padding_desc pad = TE_ZERO;
    if (te && config && config->apply_router_weight_after_down)
        return te__no_module(
            te, TE_ERR_INVALID,
            "%s: apply_router_weight_after_down; GroupedLinears take the weights before: use other experts "
            "(torch_mm, gmm), or leave it false",
            who);
    m = te__experts_create(te, who, &te__te_experts_class, config, backend);
    if (!m) return NULL;
    s = (te__experts_module *)m->state;
    m->meta = false; /* only the children of this module have parameters, the module itself has none */
    s->linears[TE__EXPERTS_UP][0] = "gate_up_linear";
    s->linears[TE__EXPERTS_DOWN][0] = "down_linear";
    te__begin_part(m, &outer);
    pad.num_gemms = s->local;
    te__te_child(m, "gate_up_linear", te__expert_dim(&s->config), te__up_size(&s->config), false);
    te__te_child(m, "down_linear", s->config.moe_inter_dim, te__expert_dim(&s->config), true);
    te__adopt(m, "fp8_padding", te_fp8_padding_create(te, &pad));
    te__adopt(m, "fp8_unpadding", te_fp8_unpadding_create(te, &pad));
    return te__close_part(m, outer);
}

/* ---- stacks ---- */

/* Returns the child "experts" of m, or m itself if there is no such child. Returns NULL if the class of this module is
 * not defined in this file. */
static te_module *te__experts_of(te_module *m) {
    te_module *child = te_module_find(m, "experts");
    if (child) m = child;
    return m && (m->cls == &te__grouped_experts_class || m->cls == &te__deepep_class || m->cls == &te__te_experts_class)
               ? m
               : NULL;
}
/* Returns parameter `which` of expert i of a GroupedExpertsTE. */
static te_tensor *te__te_parameter(const te_module *m, te_experts_tensor which, int i) {
    te_module *child =
        te_module_find((te_module *)(uintptr_t)m,
                       which == TE_EXPERTS_GATE_AND_UP_PROJS || which == TE_EXPERTS_GATE_UP_PROJ_BIAS ? "gate_up_linear"
                                                                                                      : "down_linear");
    char name[32];
    snprintf(name, sizeof(name), "%s%d", te__stacked_names[which].bias ? "bias" : "weight", i);
    return te_module_parameter(child, name);
}
/* Returns x[i], the part of expert i in x [E, ...], as an alias. */
static te_tensor *te__of_expert(const te_tensor *x, int i) {
    int64_t bytes = te__numel(x) / te__max(1, x->shape[0]) * te__dtype_size(x->dtype);
    return te__alias_as(x, i * bytes, x->dtype, x->ndim - 1, x->shape + 1);
}
/* Copies one kind of parameter (`which`) of all local experts of a GroupedExpertsTE to `stack` [experts, ...]. If
 * `into` is true, copies from `stack` to these parameters instead. */
static te_result te__te_stack(te_module *m, te_experts_tensor which, te_tensor *stack, bool into) {
    const te__experts_module *s = (const te__experts_module *)m->state;
    te_result result = TE_OK;
    int i;
    m->te->tape.no_grad++;
    te__frame_begin(m->te);
    for (i = 0; i < s->local && result == TE_OK; i++) {
        te_tensor *x = te__te_parameter(m, which, i), *y = te__of_expert(stack, i);
        result = te__need_memory(x, te_experts_tensor_name(which));
        if (result == TE_OK && x->quantized)
            result = into ? te__fail(m->te, TE_ERR_UNSUPPORTED,
                                     "te_experts_set: weight%d is stored quantized; set it before it is, outside of "
                                     "te_quantized_model_init_begin",
                                     i)
                          : TE_OK;
        if (result == TE_OK) x = te__plain(x);
        if (x && y && !te__stacked_names[which].bias) x = te_tensor_transpose(x, 0, 1);
        if (result == TE_OK) result = x && y ? te_tensor_copy(into ? x : y, into ? y : x) : te_error_code(m->te);
    }
    te__frame_end(m->te, NULL, 0);
    m->te->tape.no_grad--;
    return result;
}
static bool te__stack_known(te_module *m, te_module *experts, te_experts_tensor which, const char *who) {
    if (m && te__tree_whole(m) != TE_OK) return false;
    if (experts && (unsigned)which < 4) return true;
    if (m)
        te__fail(m->te, TE_ERR_INVALID, "%s: %s; experts, or an MoE, and one of te_experts_tensor are needed", who,
                 experts ? "no such tensor" : m->name);
    return false;
}
TE_API te_tensor *te_experts_get(te_module *m, te_experts_tensor which) {
    te_module *experts = te__experts_of(m);
    const te__experts_module *s;
    te_tensor *first, *y;
    if (!te__stack_known(m, experts, which, "te_experts_get")) return NULL;
    if (experts->cls != &te__te_experts_class) return te_module_parameter(experts, te_experts_tensor_name(which));
    s = (const te__experts_module *)experts->state;
    first = te__te_parameter(experts, which, 0);
    if (!first) return NULL;
    const int64_t shape[3] = {s->local, first->shape[first->ndim - 1], first->shape[0]};
    y = te_tensor_empty(m->te, first->dtype, first->ndim + 1, shape);
    return y && te__te_stack(experts, which, y, false) == TE_OK ? y : NULL;
}
TE_API te_result te_experts_set(te_module *m, te_experts_tensor which, te_tensor *value) {
    te_module *experts = te__experts_of(m);
    te_tensor *like;
    te_result result;
    char a[TE__SHAPE_TEXT], b[TE__SHAPE_TEXT];
    if (!te__stack_known(m, experts, which, "te_experts_set")) return m ? te_error_code(m->te) : TE_ERR_STATE;
    if (!value) return TE_OK;
    if (!te__same_ctx(value, m->te, "te_experts_set") || !te__need_float(value, "te_experts_set"))
        return te_error_code(m->te);
    te__frame_begin(m->te);
    like = te_experts_get(m, which);
    value = te_tensor_contiguous(value);
    if (!like)
        result = te__fail(m->te, TE_ERR_INVALID,
                          "te_experts_set: the experts have no %s; create them with expert_bias, or leave it out",
                          te_experts_tensor_name(which));
    else if (!te__same_shape(like, value))
        result = te__fail(m->te, TE_ERR_SHAPE, "te_experts_set: %s is %s and the value %s; they must be equal",
                          te_experts_tensor_name(which), te__shape_text(like, a), te__shape_text(value, b));
    else
        result = experts->cls == &te__te_experts_class ? te__te_stack(experts, which, value, true)
                                                       : te_tensor_copy(like, value);
    te__frame_end(m->te, NULL, 0);
    return result;
}
