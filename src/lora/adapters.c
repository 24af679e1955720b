/* lora/adapters.c: creates and removes the adapters of a site (te__lora_site). This file must not depend on files on
 * disk or on how sites are chosen. */

static void te__lora_take_away(const te__lora_site *s) {
    te_module *m = te__lora_holder(s);
    if (m == s->owner) {
        te_module_set_forward(m, NULL);
        if (te__is_experts(m)) te__adapters_drop(m);
        te__module_drop(m, "lora_A");
        te__module_drop(m, "lora_B");
        te__module_drop(m, TE__MAGNITUDE);
        te_module_remove_attribute(m, TE__LORA);
        return;
    }
    te__module_drop(s->owner, te__lora_mlp_names[s->gemm]);
    if (!te_module_find(s->owner, te__lora_mlp_names[TE__FC1]) &&
        !te_module_find(s->owner, te__lora_mlp_names[TE__FC2]))
        te_module_set_forward(s->owner, NULL);
}

/* One adapter, lora_A or lora_B, of a site: its name, sizes and initial values. */
typedef struct te__lora_adapter {
    const char *name;
    int64_t in, out;
    te_parallel_mode mode; /* the adapter is sharded over ranks only if this equals the parallel mode of the site's
                            * weight */
    te_init init;
    te_dtype dtype;
} te__lora_adapter;

static te_gemm_options te__lora_gemm(const te__lora_adapter *a, te_params_device device) {
    te_gemm_options o = TE_ZERO;
    o.no_bias = true;
    o.params_dtype = a->dtype;
    o.init = a->init;
    o.device = device;
    return o;
}
static te_module *te__lora_create_linear(const te__lora_site *site, const te__lora_adapter *a,
                                         te_params_device device) {
    te_module *m = site->owner;
    const te__lora_shape shape = te__lora_shape_of(site, 0);
    const bool divided = m->parallel.size > 1 && shape.mode == a->mode;
    te_linear_desc d = TE_ZERO;
    d.in_features = a->in;
    d.out_features = a->out;
    d.name = a->name;
    d.gemm = te__lora_gemm(a, device);
    if (divided) {
        d.parallel.parallel_mode = a->mode;
        d.parallel.sequence_parallel = m->parallel.sequence;
        d.parallel.tp_group = m->parallel.group;
        d.parallel.tp_size = m->parallel.size;
    }
    return te__linear_create(m->te, &d, divided && a->mode == TE_PARALLEL_COLUMN ? shape.rows : NULL);
}
#ifndef TE_NO_MOE
static te_module *te__lora_create_grouped(const te__lora_site *site, const te__lora_adapter *a,
                                          te_params_device device) {
    te_grouped_linear_desc d = TE_ZERO;
    d.num_gemms = te__lora_shape_of(site, 0).products;
    d.in_features = a->in;
    d.out_features = a->out;
    d.name = a->name;
    d.gemm = te__lora_gemm(a, device);
    return te_grouped_linear_create(site->owner->te, &d);
}
#endif
/* Creates lora_A for an Embedding. This lora_A is an Embedding itself. Its table is the transpose of peft's
 * lora_embedding_A. */
static te_module *te__lora_create_table(const te__lora_site *site, const te__lora_adapter *a, te_params_device device) {
    te_embedding_desc d = TE_ZERO;
    if (site->owner->parallel.size > 1)
        return te__no_module(site->owner->te, TE_ERR_UNSUPPORTED,
                             "te_lora_apply: \"%s\" is an Embedding whose rows %d ranks share, and its adapter would "
                             "need all rows; leave it out of target_modules, or make the model with vocab_parallel off",
                             site->owner->name, site->owner->parallel.size);
    d.num_embeddings = a->in;
    d.embedding_dim = a->out;
    d.name = a->name;
    d.params_dtype = a->dtype;
    d.init = a->init;
    d.device = device;
    return te_embedding_create(site->owner->te, &d);
}
/* Creates adapter `a` and adds it to `holder`. Under sequence parallelism each rank has only some rows of the input. So
 * each rank computes only its part of the gradient of an adapter that is not sharded. The weight of such an adapter is
 * marked as sequence parallel, because the gradient must be summed over the ranks. */
static bool te__lora_add(const te__lora_site *site, te_module *holder, const te__lora_adapter *a) {
    te_module *m = site->owner, *child;
    const te_params_device device = m->meta && !m->awaits_group ? TE_PARAMS_META : TE_PARAMS_DEFAULT;
#ifndef TE_NO_MOE
    if (te__is_grouped(m)) child = te__lora_create_grouped(site, a, device);
    else
#endif
    if (m->cls == &te__embedding_class && a->mode == TE_PARALLEL_ROW)
        child = te__lora_create_table(site, a, device);
    else child = te__lora_create_linear(site, a, device);
    if (!te__lora_attach(holder, child)) return false;
    if (m->parallel.sequence && child->parallel.size < 2)
        te_tensor_set_sequence_parallel(te_module_parameter(child, "weight"), true);
    return true;
}
/* Adds lora_A and lora_B. lora_A starts with random values and lora_B with zeros. For an Embedding it is the other way
 * round, as in peft. */
static bool te__lora_add_both(const te__lora_site *site, te_module *holder, const te_lora_desc *d, te_dtype dtype) {
    const te__lora_shape shape = te__lora_shape_of(site, 0);
    const bool table = site->owner->cls == &te__embedding_class;
    te_init zero = TE_ZERO, numbers = TE_ZERO;
    te__lora_adapter a = TE_ZERO;
    zero.init_method = te__lora_fill_zero;
    if (table) numbers.std = 1.0f;
    else if (d->lora_A_init == TE_LORA_XAVIER) numbers.std = sqrtf(2.0f / (float)(shape.in + d->dim));
    else numbers.init_method = te__lora_fill_uniform;
    a.name = "lora_A";
    a.in = shape.in;
    a.out = d->dim;
    a.mode = TE_PARALLEL_ROW;
    a.init = table ? zero : numbers;
    a.dtype = dtype;
    if (!te__lora_add(site, holder, &a)) return false;
    a.name = "lora_B";
    a.in = d->dim;
    a.out = shape.out;
    a.mode = TE_PARALLEL_COLUMN;
    a.init = table ? numbers : zero;
    return te__lora_add(site, holder, &a);
}

/* Returns the module that will hold the adapters of a site: site->owner, or a new child of a LayerNormMLP. On failure
 * returns NULL. */
static te_module *te__lora_open_holder(const te__lora_site *site) {
    te_module *holder;
    if (site->owner->cls != &te__layernorm_mlp_class) return site->owner;
    holder = te_module_create(site->owner->te, &te__lora_part_class, te__lora_mlp_names[site->gemm]);
    return te__lora_attach(site->owner, holder) ? holder : NULL;
}
/* Creates the adapters of a site, and sets the forward function of site->owner. After a failure the site has no
 * adapters. */
static te_result te__lora_give(const te__lora_site *site, const te_lora_desc *d) {
    te_module *m = site->owner, *holder;
    te_quantized_model_init_desc off = TE_ZERO;
    const te_tensor *base = te__is_experts(m) ? te__experts_base(m) : te__lora_base(site, 0);
    te__lora *l = base ? (te__lora *)te__alloc_zero(m->te, sizeof(te__lora)) : NULL;
    te_dtype dtype;
    bool fine;
    if (!base) return te_error_code(m->te);
    dtype = d->lora_dtype ? d->lora_dtype : base->dtype;
    if (!l) return TE_ERR_OUT_OF_MEMORY;
    l->te = m->te;
    l->dim = d->moe_rank_scaling && te__is_experts(m) ? d->dim / te__experts_chosen(m) : d->dim;
    l->alpha = d->alpha;
    l->dropout = te__is_experts(m) ? 0.0f : d->dropout; /* experts have no dropout in Automodel */
    l->position = d->dropout_position;
    l->dora = d->use_dora;
    holder = te__lora_open_holder(site);
    if (!holder || te_module_set_attribute(holder, TE__LORA, l, te__lora_free) != TE_OK) {
        te__lora_free(l);
        if (holder && holder != m) te__module_drop(m, holder->name);
        return te_error_code(m->te);
    }
    off.disabled = true; /* adapters are never stored quantized, because they are trained */
    fine = te_quantized_model_init_begin(m->te, &off) == TE_OK;
    if (fine) {
        fine = te__is_experts(m) ? te__adapters_add(m, l->dim, d->lora_A_init, dtype)
                                 : te__lora_add_both(site, holder, d, dtype) &&
                                       (!l->dora || te__magnitude_add(m, dtype));
        te_quantized_model_init_end(m->te);
    }
    if (fine && base->sequence_parallel) te__takes_own_tokens(holder); /* adapters of a module that is whole on each
                                                                        * rank, and gets its tokens alone */
    if (!fine) {
        te__lora_take_away(site);
        return te_error_code(m->te);
    }
    te_module_set_forward(m, m->cls == &te__layernorm_mlp_class ? te__lora_mlp_forward
#ifndef TE_NO_MOE
                             : te__is_experts(m)    ? te__lora_experts_forward
                             : te__is_block_gate(m) ? te__lora_gate_forward
#endif
                             : l->dora                          ? te__dora_forward
                                                                : te__lora_forward);
    return TE_OK;
}
