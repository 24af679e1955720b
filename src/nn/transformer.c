/* nn/transformer.c: DotProductAttention, MultiheadAttention, TransformerLayer: composed of the layers before. Knows modules alone. */

/* A mask or window given to the call replaces the module's own. */
static void te__mask_args(te_forward_args *to, const te_forward_args *from) {
    to->mask = from->mask;
    to->has_window = from->has_window;
    to->window_left = from->window_left;
    to->window_right = from->window_right;
    to->is_first_microbatch = from->is_first_microbatch;
    to->rotary = from->rotary;
    to->user = from->user;
}

/* A child that was just made goes to `parent`, or is destroyed. */
static void te__adopt(te_module *parent, const char *name, te_module *child) {
    if (!te_module_add_child(parent, name, child)) te_module_destroy(child);
}

/* Runs a child. Looked up by name each time: somebody may have put another in its place, or none. */
static te_tensor *te__run_child(te_module *m, const char *name, te_forward_args *args) {
    te_module *child = te_module_find(m, name);
    if (!child) te__fail(m->te, TE_ERR_STATE, "%s: its child \"%s\" is gone", m->cls->name, name);
    return te_forward_with(child, args);
}

/* ---- DotProductAttention ---- */

static te_result te__dpa_forward(te_module *m, te_forward_args *args) {
    const te_dot_product_attention_desc *d = (const te_dot_product_attention_desc *)m->state;
    te_attention_desc a = TE_ZERO;
    te_tensor *o;
    int64_t shape[3];
    char t[TE__SHAPE_TEXT], u[TE__SHAPE_TEXT];
    if (!args->key || !args->value) return te__fail(m->te, TE_ERR_INVALID, "DotProductAttention: key and value are needed beside the input (the query)");
    if (args->input->ndim != 4 || args->input->shape[2] != d->num_attention_heads || args->input->shape[3] != d->kv_channels || args->key->ndim != 4 ||
        args->key->shape[2] != d->num_gqa_groups)
        return te__fail(m->te, TE_ERR_SHAPE, "DotProductAttention: query %s and key %s; [.., .., %d, %lld] and [.., .., %d, %lld] are needed",
                        te__shape_text(args->input, t), te__shape_text(args->key, u), d->num_attention_heads, (long long)d->kv_channels, d->num_gqa_groups,
                        (long long)d->kv_channels);
    a.format = d->qkv_format;
    a.mask = args->mask ? args->mask : d->attn_mask_type;
    a.has_window = args->has_window || d->has_window;
    a.window_left = args->has_window ? args->window_left : d->window_left;
    a.window_right = args->has_window ? args->window_right : d->window_right;
    a.softmax_scale = d->softmax_scale;
    a.dropout_p = te_module_is_training(m) ? d->attention_dropout : 0.0f;
    o = te_attention(args->input, args->key, args->value, &a);
    if (!o) return te_error_code(m->te);
    shape[0] = o->shape[0];
    shape[1] = o->shape[1];
    shape[2] = o->shape[2] * o->shape[3];
    return te__output(m, args, te_tensor_view(o, 3, shape));
}
static const te_module_class te__dpa_class = {"DotProductAttention", sizeof(te_dot_product_attention_desc), te__dpa_forward, NULL, NULL};

TE_API te_module *te_dot_product_attention_create(te_ctx *te, const te_dot_product_attention_desc *desc) {
    te_module *m;
    te_dot_product_attention_desc *s;
    int groups;
    if (!te || !te__has_desc(te, desc, "te_dot_product_attention_create")) return NULL;
    groups = desc->num_gqa_groups ? desc->num_gqa_groups : desc->num_attention_heads;
    if (desc->num_attention_heads < 1 || groups < 1 || desc->num_attention_heads % groups || desc->kv_channels < 1) {
        te__fail(te, TE_ERR_INVALID, "te_dot_product_attention_create: %d heads of %lld channels in %d groups; the groups must divide the heads",
                 desc->num_attention_heads, (long long)desc->kv_channels, groups);
        return NULL;
    }
    m = te_module_create(te, &te__dpa_class, desc->name ? desc->name : "core_attention");
    if (!m) return NULL;
    s = (te_dot_product_attention_desc *)m->state;
    *s = *desc;
    s->num_gqa_groups = groups;
    if (!s->attn_mask_type) s->attn_mask_type = TE_MASK_CAUSAL;
    return te__module_built(m);
}

/* ---- MultiheadAttention ---- */

/* The state is the desc, with defaults filled in. */
static te_result te__mha_forward(te_module *m, te_forward_args *args) {
    const te_multihead_attention_desc *d = (const te_multihead_attention_desc *)m->state;
    te_forward_args in = TE_ZERO, core = TE_ZERO, proj = TE_ZERO;
    te_tensor *parts[3];
    te_result result;
    char text[TE__SHAPE_TEXT];
    int i;
    if (args->input->ndim != 3)
        return te__fail(m->te, TE_ERR_SHAPE, "MultiheadAttention: the input is %s; [s, b, h] or [b, s, h] is needed", te__shape_text(args->input, text));
    te__mask_args(&in, args);
    in.input = args->input;
    if (!te__run_child(m, d->input_layernorm ? "layernorm_qkv" : "qkv", &in)) return te_error_code(m->te);
    if (!te__split_qkv(in.outputs[0], d->num_attention_heads, d->num_gqa_groups, d->kv_channels, !d->qkv_weight_not_interleaved, d->qkv_format, args->rotary,
                       parts))
        return te_error_code(m->te);
    te__mask_args(&core, args);
    core.input = parts[0];
    core.key = parts[1];
    core.value = parts[2];
    te__mask_args(&proj, args);
    proj.input = te__run_child(m, "core_attention", &core);
    te__run_child(m, "proj", &proj);
    result = te__output(m, args, proj.outputs[0]);
    for (i = 1; i < proj.num_outputs && result == TE_OK; i++) result = te__output(m, args, proj.outputs[i]);
    if (result == TE_OK && d->return_layernorm_output && d->input_layernorm) result = te__output(m, args, in.outputs[1]);
    return result;
}
static const te_module_class te__mha_class = {"MultiheadAttention", sizeof(te_multihead_attention_desc), te__mha_forward, NULL, NULL};

/* Fills the defaults; false with the error recorded when the sizes do not fit, or all heads together have more channels than a layer. */
static bool te__heads_ok(te_ctx *te, const char *function, int64_t hidden, int heads, int *groups, int64_t *channels) {
    if (heads >= 1 && *channels == 0 && hidden >= 1 && hidden % heads == 0) *channels = hidden / heads;
    if (*groups == 0) *groups = heads;
    if (heads >= 1 && *groups >= 1 && heads % *groups == 0 && *channels >= 1 && hidden >= 1 &&
        *channels <= TE__MAX_LAYER_SIZE / (heads + 2 * (int64_t)*groups))
        return true;
    te__fail(te, TE_ERR_INVALID,
             "%s: hidden_size %lld, num_attention_heads %d, num_gqa_groups %d, kv_channels %lld; the heads must divide the hidden size (or kv_channels "
             "be given), the groups must divide the heads, and all channels be fewer than 2^62",
             function, (long long)hidden, heads, *groups, (long long)*channels);
    return false;
}

TE_API te_module *te_multihead_attention_create(te_ctx *te, const te_multihead_attention_desc *desc) {
    te_multihead_attention_desc d;
    te_dot_product_attention_desc core = TE_ZERO;
    te_linear_desc proj = TE_ZERO;
    te_module *m, *outer;
    int64_t qkv_rows;
    if (!te || !te__has_desc(te, desc, "te_multihead_attention_create")) return NULL;
    d = *desc;
    if (!te__heads_ok(te, "te_multihead_attention_create", d.hidden_size, d.num_attention_heads, &d.num_gqa_groups, &d.kv_channels)) return NULL;
    m = te_module_create(te, &te__mha_class, d.name ? d.name : "self_attention");
    if (!m) return NULL;
    *(te_multihead_attention_desc *)m->state = d;
    outer = te->making;
    te->making = m;
    qkv_rows = (d.num_attention_heads + 2 * (int64_t)d.num_gqa_groups) * d.kv_channels;
    if (d.input_layernorm) {
        te_layernorm_linear_desc l = TE_ZERO;
        l.name = "layernorm_qkv";
        l.in_features = d.hidden_size;
        l.out_features = qkv_rows;
        l.eps = d.layernorm_epsilon;
        l.normalization = d.normalization;
        l.zero_centered_gamma = d.zero_centered_gamma;
        l.no_bias = d.no_bias;
        l.return_layernorm_output = d.return_layernorm_output;
        l.init = d.init;
        l.params_dtype = d.params_dtype;
        l.fuse_wgrad_accumulation = d.fuse_wgrad_accumulation;
        te__adopt(m, l.name, te_layernorm_linear_create(te, &l));
    } else {
        te_linear_desc l = TE_ZERO;
        l.name = "qkv";
        l.in_features = d.hidden_size;
        l.out_features = qkv_rows;
        l.no_bias = d.no_bias;
        l.init = d.init;
        l.params_dtype = d.params_dtype;
        l.fuse_wgrad_accumulation = d.fuse_wgrad_accumulation;
        te__adopt(m, l.name, te_linear_create(te, &l));
    }
    core.num_attention_heads = d.num_attention_heads;
    core.num_gqa_groups = d.num_gqa_groups;
    core.kv_channels = d.kv_channels;
    core.attention_dropout = d.attention_dropout;
    core.qkv_format = d.qkv_format;
    core.attn_mask_type = d.attn_mask_type;
    core.has_window = d.has_window;
    core.window_left = d.window_left;
    core.window_right = d.window_right;
    core.softmax_scale = d.softmax_scale;
    te__adopt(m, "core_attention", te_dot_product_attention_create(te, &core));
    proj.name = "proj";
    proj.in_features = d.num_attention_heads * d.kv_channels;
    proj.out_features = d.hidden_size;
    proj.no_bias = d.no_bias;
    proj.return_bias = d.return_bias;
    proj.init = d.output_layer_init;
    proj.params_dtype = d.params_dtype;
    proj.fuse_wgrad_accumulation = d.fuse_wgrad_accumulation;
    te__adopt(m, proj.name, te_linear_create(te, &proj));
    te->making = outer;
    return te__module_built(m);
}

/* ---- TransformerLayer ---- */

/* The bias that a module left for the caller to add, and its norm's output, in whatever order it gave them. */
static te_tensor *te__returned_bias(const te_forward_args *a, bool has_bias) { return has_bias ? a->outputs[1] : NULL; }

static te_result te__layer_forward(te_module *m, te_forward_args *args) {
    const te_transformer_layer_desc *d = (const te_transformer_layer_desc *)m->state;
    float p = te_module_is_training(m) ? d->hidden_dropout : 0.0f;
    bool bias = !d->no_bias && !d->parallel_attention_mlp;
    bool post = d->apply_residual_connection_post_layernorm;
    te_forward_args attention = TE_ZERO, mlp = TE_ZERO, norm = TE_ZERO;
    te_tensor *x = args->input, *h, *out, *residual;
    te__mask_args(&attention, args);
    attention.input = x;
    if (!te__run_child(m, "self_attention", &attention)) return te_error_code(m->te);
    te__mask_args(&mlp, args);
    if (d->parallel_attention_mlp) { /* both branches see the input; one residual */
        mlp.input = x;
        if (!te__run_child(m, "layernorm_mlp", &mlp)) return te_error_code(m->te);
        out = te_bias_dropout_add(te_add(attention.outputs[0], mlp.outputs[0]), NULL, x, p);
    } else {
        residual = post && !d->output_layernorm ? attention.outputs[attention.num_outputs - 1] : x;
        h = te_bias_dropout_add(attention.outputs[0], te__returned_bias(&attention, bias), residual, p);
        mlp.input = h;
        if (!te__run_child(m, "layernorm_mlp", &mlp)) return te_error_code(m->te);
        residual = post ? mlp.outputs[mlp.num_outputs - 1] : h;
        out = te_bias_dropout_add(mlp.outputs[0], te__returned_bias(&mlp, bias), residual, p);
    }
    if (d->output_layernorm) {
        norm.input = out;
        out = te__run_child(m, "layernorm", &norm);
    }
    return te__output(m, args, out);
}
static const te_module_class te__layer_class = {"TransformerLayer", sizeof(te_transformer_layer_desc), te__layer_forward, NULL, NULL};

TE_API te_module *te_transformer_layer_create(te_ctx *te, const te_transformer_layer_desc *desc) {
    te_transformer_layer_desc d;
    te_multihead_attention_desc a = TE_ZERO;
    te_layernorm_mlp_desc p = TE_ZERO;
    te_module *m, *outer;
    if (!te || !te__has_desc(te, desc, "te_transformer_layer_create")) return NULL;
    d = *desc;
    if (!te__heads_ok(te, "te_transformer_layer_create", d.hidden_size, d.num_attention_heads, &d.num_gqa_groups, &d.kv_channels)) return NULL;
    m = te_module_create(te, &te__layer_class, d.name ? d.name : "layer");
    if (!m) return NULL;
    *(te_transformer_layer_desc *)m->state = d;
    outer = te->making;
    te->making = m;
    a.name = "self_attention";
    a.hidden_size = d.hidden_size;
    a.num_attention_heads = d.num_attention_heads;
    a.num_gqa_groups = d.num_gqa_groups;
    a.kv_channels = d.kv_channels;
    a.attention_dropout = d.attention_dropout;
    a.layernorm_epsilon = d.layernorm_epsilon;
    a.input_layernorm = !d.output_layernorm;
    a.return_layernorm_output = d.apply_residual_connection_post_layernorm && !d.output_layernorm;
    a.normalization = d.normalization;
    a.zero_centered_gamma = d.zero_centered_gamma;
    a.qkv_format = d.attn_input_format;
    a.attn_mask_type = d.self_attn_mask_type;
    a.has_window = d.has_window;
    a.window_left = d.window_left;
    a.window_right = d.window_right;
    a.no_bias = d.no_bias;
    a.return_bias = !d.parallel_attention_mlp;
    a.qkv_weight_not_interleaved = d.qkv_weight_not_interleaved;
    a.init = d.init;
    a.output_layer_init = d.output_layer_init;
    a.params_dtype = d.params_dtype;
    a.fuse_wgrad_accumulation = d.fuse_wgrad_accumulation;
    te__adopt(m, a.name, te_multihead_attention_create(te, &a));
    p.name = "layernorm_mlp";
    p.hidden_size = d.hidden_size;
    p.ffn_hidden_size = d.ffn_hidden_size;
    p.eps = d.layernorm_epsilon;
    p.normalization = d.normalization;
    p.activation = d.activation;
    p.zero_centered_gamma = d.zero_centered_gamma;
    p.no_bias = d.no_bias;
    p.return_bias = !d.parallel_attention_mlp;
    p.return_layernorm_output = d.apply_residual_connection_post_layernorm;
    p.init = d.init;
    p.output_layer_init = d.output_layer_init;
    p.params_dtype = d.params_dtype;
    p.fuse_wgrad_accumulation = d.fuse_wgrad_accumulation;
    te__adopt(m, p.name, te_layernorm_mlp_create(te, &p));
    if (d.output_layernorm) {
        te_norm_desc n = TE_ZERO;
        n.hidden_size = d.hidden_size;
        n.eps = d.layernorm_epsilon;
        n.zero_centered_gamma = d.zero_centered_gamma;
        n.params_dtype = d.params_dtype;
        n.name = "layernorm";
        te__adopt(m, n.name, d.normalization == TE_RMSNORM ? te_rmsnorm_create(te, &n) : te_layernorm_create(te, &n));
    }
    te->making = outer;
    return te__module_built(m);
}
