/* lora/lora.c: sites that can have adapters, and the forward passes with adapters. This file must not depend on how
 * adapters are chosen, or on files on disk.
 *
 * A *site* is one weight matrix of a module. In a GroupedLinear or an experts module, all weight matrices together are
 * one site. The module is the *owner* of the site.
 * The *holder* of a site has the children lora_A and lora_B. The holder is the owner, except for LayerNormMLP, which
 * has two sites: there the holders are the children fc1 and fc2. */

/* The settings of the adapters of one site. The holder has them as its attribute TE__LORA. */
typedef struct te__lora {
    te_ctx *te;
    int64_t dim;
    float alpha, dropout;
    te_dropout_position position;
    bool dora; /* DoRA: the holder also has the child lora_magnitude_vector */
} te__lora;

static te__lora *te__lora_of(const te_module *m) { return (te__lora *)te__attribute_of(m, TE__LORA); }
static void te__lora_free(void *value) {
    te__lora *l = (te__lora *)value;
    te__free(l->te, l);
}
static float te__lora_factor(const te__lora *l) { return l->alpha / (float)l->dim; }

/* Writes the path of m below `root` to `buffer`, the names joined by dots, and returns it. The path of `root` itself is
 * "". */
static const char *te__path_below(const te_module *root, const te_module *m, char *buffer, size_t size) {
    const te_module *chain[TE_MAX_MODULE_DEPTH];
    int n = 0;
    for (; m && m != root && n < TE_MAX_MODULE_DEPTH; m = m->parent) chain[n++] = m;
    return te__join_names(chain, n, buffer, size);
}

/* ---- forward ---- */

/* Casts x, which may be NULL, to `dtype` if needed. */
static te_tensor *te__lora_cast(te_tensor *x, te_dtype dtype) {
    return x && x->dtype != dtype ? te_tensor_cast(x, dtype) : x;
}

/* Returns B(A(x) * alpha / dim) in the dtype of A and B, the children lora_A and lora_B of m. `dropped`: dropout was
 * applied to x already. */
static te_tensor *te__lora_product(te_module *m, const te_forward_args *args, te_tensor *x, bool dropped) {
    const te__lora *l = te__lora_of(m);
    const te_module *a = te_module_find(m, "lora_A");
    const bool ids = m->cls == &te__embedding_class; /* x has ids; no dropout, as in peft */
    const float p = te_module_is_training(m) && !ids ? l->dropout : 0.0f;
    te_forward_args in = TE_ZERO;
    te__hand_on(&in, args);
    in.m_splits = args->m_splits;
    in.m_splits_tensor = args->m_splits_tensor;
    if (a && !ids) {
        const te_dtype dtype = a->entries[0].tensor->dtype;
        if (x->quantized && (p > 0.0f || x->dtype != dtype)) x = te_dequantize(x, x->dtype);
        x = te__lora_cast(x, dtype);
        if (x && l->position == TE_DROPOUT_PRE && !dropped) x = te_dropout(x, p);
    }
    if (!x) return NULL;
    in.input = x;
    /* the factor is applied between lora_A and lora_B, as in Automodel */
    in.input = te_scale(te__run_child(m, "lora_A", &in), te__lora_factor(l));
    x = in.input ? te__run_child(m, "lora_B", &in) : NULL;
    return x && l->position == TE_DROPOUT_POST ? te_dropout(x, p) : x;
}
/* Returns y plus the adapters' output for x. */
static te_tensor *te__lora_added(te_module *m, const te_forward_args *args, te_tensor *x, te_tensor *y) {
    return te_add(y, te__lora_cast(te__lora_product(m, args, x, false), y->dtype));
}
static te_result te__lora_call_ok(const te_module *m, const te_forward_args *args) {
    if (!args->fp8_output && !args->fp8_grad) return TE_OK;
    return te__fail(m->te, TE_ERR_UNSUPPORTED,
                    "LoRA: %s: the sum of two products stays in high precision: leave it false, or te_lora_merge first",
                    args->fp8_output ? "fp8_output" : "fp8_grad");
}
/* Forward of a Linear, GroupedLinear, Embedding or LayerNormLinear with adapters. For LayerNormLinear the adapters get
 * the output of the norm. */
static te_result te__lora_forward(te_module *m, te_forward_args *args) {
    te_tensor *x = args->input, *y;
    te_result result = te__lora_call_ok(m, args);
    if (result == TE_OK)
        result =
            m->cls == &te__layernorm_linear_class ? te__layernorm_linear_run(m, args, &x) : m->cls->forward(m, args);
    y = args->outputs.out;
    /* an output without memory: the call only infers shapes */
    if (result != TE_OK || !y || (!y->buffer && !y->quantized)) return result;
    return te__output(m, args, te__lora_added(m, args, x, y));
}

#ifndef TE_NO_MOE
static te_tensor *te__adapters_apply(te_module *m, const te__experts_call *c, int product, te_tensor *x, te_tensor *y) {
    const te__expert_way way =
        c->way == TE__EXPERTS_MXFP8 ? TE__EXPERTS_GROUPED : c->way; /* adapters stay in high precision */
    te_tensor *a = te__adapter_stack(m, product, 0), *b = te__adapter_stack(m, product, 1), *z;
    if (!a || !b || te__need_memory(a, m->cls->name) != TE_OK || te__need_memory(b, m->cls->name) != TE_OK) return NULL;
    z = te__expert_product(&c->rows, way, x, a, NULL);
    z = z ? te__expert_product(&c->rows, way, z, b, NULL) : NULL;
    return te_add(y, te_scale(z, te__lora_factor(te__lora_of(m))));
}
static te_result te__lora_experts_forward(te_module *m, te_forward_args *args) {
    return te__experts_run(m, args, te__adapters_apply);
}

/* Adds the adapters' output to a gate's logits. Autocast is off, because gates stay in high precision under every
 * recipe. */
static te_tensor *te__lora_gate_add(te_module *m, const te_forward_args *args, te_tensor *x, te_tensor *logits) {
    te_autocast_desc off = TE_ZERO;
    off.disabled = true;
    if (te_autocast_begin(m->te, &off) != TE_OK) return NULL;
    logits = te__lora_added(m, args, x, logits);
    return te_autocast_end(m->te) == TE_OK ? logits : NULL;
}
static te_result te__lora_gate_forward(te_module *m, te_forward_args *args) {
    return te__gate_run(m, args, te__lora_gate_add);
}
#endif

static const char *const te__lora_mlp_names[2] = {"fc1", "fc2"}; /* indexed by TE__FC1 and TE__FC2 */

static te_result te__lora_mlp_part_forward(te_module *m, te_forward_args *args) {
    return te__output(m, args, te__lora_product(m, args, args->input, false));
}
/* The child of a LayerNormMLP that has the adapters of fc1 or fc2. Its forward returns the adapters' output. */
static const te_module_class te__lora_part_class = {"LoRA", 0, te__lora_mlp_part_forward, NULL, NULL};

static te_tensor *te__lora_mlp_add(te_module *m, const te_forward_args *args, int gemm, te_tensor *x, te_tensor *y) {
    te_forward_args in = TE_ZERO;
    if (!te_module_find(m, te__lora_mlp_names[gemm])) return y; /* this site has no adapters */
    te__hand_on(&in, args);
    in.input = x;
    return x ? te_add(y, te__lora_cast(te__run_child(m, te__lora_mlp_names[gemm], &in), y->dtype)) : NULL;
}
static te_result te__lora_mlp_forward(te_module *m, te_forward_args *args) {
    const te_result result = te__lora_call_ok(m, args);
    return result == TE_OK ? te__layernorm_mlp_run(m, args, te__lora_mlp_add) : result;
}

/* ---- sites ---- */

typedef struct te__lora_site {
    te_module *owner;
    int gemm; /* TE__FC1 or TE__FC2 in a LayerNormMLP; otherwise 0, because all other modules have one site */
} te__lora_site;

/* Returns the holder of a site. NULL if the site is in a LayerNormMLP and has no adapters. */
static te_module *te__lora_holder(const te__lora_site *s) {
    return s->owner->cls == &te__layernorm_mlp_class ? te_module_find(s->owner, te__lora_mlp_names[s->gemm]) : s->owner;
}
static te__lora_site te__lora_site_of(te_module *holder) {
    const bool part = holder->cls == &te__lora_part_class;
    te__lora_site s;
    s.owner = part ? holder->parent : holder;
    s.gemm = part && strcmp(holder->name, te__lora_mlp_names[TE__FC2]) == 0 ? TE__FC2 : TE__FC1;
    return s;
}
/* Returns the number of ranks that share a site and its adapters. */
static int te__lora_ranks(const te__lora_site *s) {
    return te__is_experts(s->owner) ? te__experts_ranks(s->owner) : s->owner->parallel.size;
}
/* Returns true if one of m's sites has adapters. */
static bool te__lora_is_owner(te_module *m) {
    const te_module *experts = te__experts_above(m);
    if (experts && te__lora_of(experts)) return m->cls == &te__linear_class;
    if (m->cls != &te__layernorm_mlp_class) return te__lora_of(m) && m->cls != &te__lora_part_class;
    return te_module_find(m, te__lora_mlp_names[TE__FC1]) || te_module_find(m, te__lora_mlp_names[TE__FC2]);
}
/* Writes the path of a site below `root` to `buffer`, and returns `buffer`. The path is that of the holder. */
static const char *te__lora_path(const te_module *root, const te__lora_site *s, char *buffer, size_t size) {
    size_t n;
    te__path_below(root, s->owner, buffer, size);
    n = strlen(buffer);
    if (s->owner->cls == &te__layernorm_mlp_class)
        snprintf(buffer + n, size - n, "%s%s", n ? "." : "", te__lora_mlp_names[s->gemm]);
    return buffer;
}
/* Returns true if modules of m's class can have adapters. Sets *sites to the number of m's sites. */
static bool te__lora_has_sites(const te_module *m, int *sites) {
    *sites = m->cls == &te__layernorm_mlp_class ? 2 : 1;
    return m->cls == &te__linear_class || m->cls == &te__layernorm_linear_class || m->cls == &te__layernorm_mlp_class ||
           te__is_grouped(m) || m->cls == &te__embedding_class || te__is_experts(m) || te__is_block_gate(m);
}
/* Finds a Linear of an expert by `path`: "PATH.3.w1" is w1 of expert 3 of the module at PATH. Sets *s and *product.
 * Returns false if there is none. */
static bool te__lora_find_experts(te_module *root, const char *path, te__lora_site *s, int *product) {
    char above[TE__TREE_PATH];
    size_t n = strlen(path);
    int dots = 0;
    while (n > 0 && dots < 2) dots += path[--n] == '.';
    if (dots < (n ? 2 : 1) || n >= sizeof(above)) return false;
    memcpy(above, path, n);
    above[n] = 0;
    s->owner = te_module_find(root, above);
    s->gemm = 0;
    if (!te__is_experts(s->owner)) return false;
    *product = te__product_named(s->owner, path + n + (dots == 2));
    return *product >= 0;
}
/* Finds the site at `path`. Sets *product only if the site belongs to experts. Returns false if there is no site. */
static bool te__lora_find_site(te_module *root, const char *path, te__lora_site *s, int *product) {
    const char *dot = strrchr(path, '.'), *last = dot ? dot + 1 : path;
    char above[TE__TREE_PATH];
    int sites;
    if (te__lora_find_experts(root, path, s, product)) return true;
    s->owner = te_module_find(root, path);
    s->gemm = 0;
    if (s->owner && te__is_experts(s->owner)) return false;
    if (s->owner && s->owner->cls != &te__layernorm_mlp_class && te__lora_has_sites(s->owner, &sites)) return true;
    s->gemm = strcmp(last, te__lora_mlp_names[TE__FC2]) == 0 ? TE__FC2 : TE__FC1;
    if (strcmp(last, te__lora_mlp_names[s->gemm]) != 0 || (size_t)(last - path) >= sizeof(above)) return false;
    memcpy(above, path, (size_t)(last - path));
    above[dot ? dot - path : 0] = 0;
    s->owner = te_module_find(root, above);
    return s->owner && s->owner->cls == &te__layernorm_mlp_class;
}

/* Sizes and weights of a site. */
typedef struct te__lora_shape {
    int64_t in, out;         /* input and output features of all ranks together; Embedding: rows of the table, and size
                              * of a row */
    te_parallel_mode mode;   /* how ranks share the weight */
    const te__sharding *rows; /* the blocks of the weight's rows (such as q, k, v); each block is sharded by itself;
                              * NULL: one block */
    int products;            /* number of weight matrices: groups of GroupedLinear, Linears of experts, otherwise 1 */
    int parts;               /* number of parameters whose rows together make one weight matrix */
    int weights;             /* index of the site's first weight among the entries of the owner; the site has
                              * `products` * `parts` weights, which are adjacent there */
} te__lora_shape;

/* Returns the shape of a site. `product` matters only for experts: their Linears differ in size. */
static te__lora_shape te__lora_shape_of(const te__lora_site *site, int product) {
    te_module *m = site->owner;
    te__lora_shape x = TE_ZERO;
    (void)product; /* without experts */
    x.products = x.parts = 1;
    if (m->cls == &te__linear_class || m->cls == &te__layernorm_linear_class) {
        const te__linear_module *s = (const te__linear_module *)m->state;
        x.in = s->desc.in_features;
        x.out = s->desc.out_features;
        x.mode = s->desc.parallel.parallel_mode;
        x.rows = &s->sharding;
        x.parts = s->params.count;
        x.weights = s->params.weights;
    } else if (m->cls == &te__layernorm_mlp_class) {
        const te__layernorm_mlp_module *s = (const te__layernorm_mlp_module *)m->state;
        const int64_t up = s->desc.ffn_hidden_size * (te_activation_is_gated(s->desc.activation) ? 2 : 1);
        x.in = site->gemm == TE__FC1 ? s->desc.hidden_size : s->desc.ffn_hidden_size;
        x.out = site->gemm == TE__FC1 ? up : s->desc.hidden_size;
        x.mode = te__mlp_mode(s, site->gemm);
        if (site->gemm == TE__FC1) x.rows = &s->fc1_sharding;
        x.weights = (int)(te__module_entry(m, site->gemm == TE__FC1 ? "fc1_weight" : "fc2_weight") - m->entries);
#ifndef TE_NO_MOE
    } else if (te__is_grouped(m)) {
        const te__grouped_module *s = (const te__grouped_module *)m->state;
        x.in = s->desc.in_features;
        x.out = s->desc.out_features;
        x.products = s->desc.num_gemms;
    } else if (te__is_experts(m)) {
        const te_moe_config *c = &te__experts_state(m)->config;
        int proj;
        te__product_expert(m, product, &proj);
        x.in = proj == TE__DOWN_PROJ ? c->moe_inter_dim : te__expert_dim(c);
        x.out = proj == TE__DOWN_PROJ ? te__expert_dim(c) : c->moe_inter_dim;
        x.products = te__expert_products(m);
    } else if (te__is_block_gate(m)) {
        const te_moe_config *c = &((const te__gate_module *)m->state)->config;
        x.in = c->dim;
        x.out = c->n_routed_experts;
#endif
    } else {
        const te_embedding_desc *d = (const te_embedding_desc *)m->state;
        x.in = d->num_embeddings;
        x.out = d->embedding_dim;
    }
    return x;
}
static te_tensor *te__lora_base(const te__lora_site *s, int weight) {
    if (te__is_experts(s->owner)) return te__product_base(s->owner, weight);
    return s->owner->entries[te__lora_shape_of(s, 0).weights + weight].tensor;
}
/* Returns the weight of the adapter "lora_A" or "lora_B" for the site's weight matrix number `product`; NULL if this
 * adapter was removed. */
static te_tensor *te__lora_weight(const te__lora_site *s, const char *adapter, int product) {
    te_module *m = te_module_find(te__lora_holder(s), adapter);
    char name[32] = "weight";
    if (te__is_experts(s->owner)) return te__product_adapter(s->owner, product, strcmp(adapter, "lora_B") == 0);
    if (te__is_grouped(s->owner)) snprintf(name, sizeof(name), "weight%d", product);
    return te_module_parameter(m, name);
}

typedef struct te__lora_list {
    te_ctx *te;
    te_module *root;
    te__lora_site *list;
    int n, cap;
} te__lora_list;

static bool te__lora_list_add(te__lora_list *l, te__lora_site s) {
    if (!te__grow(l->te, (void **)&l->list, &l->cap, l->n, sizeof(te__lora_site))) return false;
    l->list[l->n++] = s;
    return true;
}
static void te__lora_list_free(te__lora_list *l) { te__free(l->te, l->list); }

static bool te__lora_collect(void *user, te_module *m) {
    return !te__lora_of(m) || te__lora_list_add((te__lora_list *)user, te__lora_site_of(m));
}
/* Lists all sites of the tree that have adapters. Fails if there is none. */
static te_result te__lora_all(te__lora_list *l, te_module *model, const char *who) {
    l->te = model->te;
    l->root = model;
    if (!te_module_visit(model, te__lora_collect, l)) return te_error_code(l->te);
    return l->n ? TE_OK
                : te__fail(l->te, TE_ERR_INVALID,
                           "%s: no module below \"%s\" has adapters; te_lora_apply or te_lora_load gives them", who,
                           model->name);
}

/* Returns true if m is the embedding of a tied model (tie_word_embeddings): its CausalLM uses the table as lm_head
 * too. */
static bool te__is_tied_table(const te_module *m) {
    return m->cls == &te__embedding_class && m->parent && te__tied_table(m->parent->parent) == m;
}

/* ---- weights with adapters ---- */

/* Returns the product of the two adapters in f32, in the shape of the site's weight: B A, or A B^T for an Embedding. */
static te_tensor *te__lora_delta(const te__lora_site *s, int product) {
    const bool table = s->owner->cls == &te__embedding_class;
    te_tensor *a = te_tensor_contiguous(te_tensor_cast(te__lora_weight(s, "lora_A", product), TE_F32)),
              *b = te_tensor_contiguous(te_tensor_cast(te__lora_weight(s, "lora_B", product), TE_F32));
    te_op_gemm_args gemm = TE_ZERO;
    if (!a || !b) return NULL;
    gemm.d = te__empty_2d(a->te, TE_F32, te__rows(table ? a : b), table ? te__rows(b) : te__cols(a));
    if (!gemm.d) return NULL;
    return (table ? te__product(a->te, a, false, b, true, &gemm) : te__product(a->te, b, false, a, false, &gemm)) ==
                   TE_OK
               ? gemm.d
               : NULL;
}
/* Returns weight + factor * delta as a new f32 tensor. */
static te_tensor *te__lora_sum(te_tensor *weight, te_tensor *delta, float factor) {
    te_op_axpby_args sum = TE_ZERO;
    sum.x = weight && weight->quantized ? te_dequantize(weight, TE_F32) : te_tensor_contiguous(weight);
    sum.out = sum.x ? te__empty_like(sum.x, TE_F32) : NULL;
    sum.y = delta;
    sum.alpha = 1.0f;
    sum.beta = factor;
    return sum.out && delta && te_op_axpby(weight->te, &sum) == TE_OK ? sum.out : NULL;
}
