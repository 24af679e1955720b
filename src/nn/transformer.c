/* nn/transformer.c: DotProductAttention, MultiheadAttention, TransformerLayer: composed of the layers before. Knows modules alone. */

/* Hands the options of a call on to a child's. */
static void te__hand_on(te_forward_args *to, const te_forward_args *from) {
    to->attention = from->attention;
    to->cross = from->cross;
    to->is_first_microbatch = from->is_first_microbatch;
    to->rotary = from->rotary;
    to->kv_cache = from->kv_cache;
    to->user = from->user;
}

/* A child that was just made goes to `parent`, or is destroyed. */
static void te__adopt(te_module *parent, const char *name, te_module *child) {
    if (!te_module_add_child(parent, name, child)) te_module_destroy(child);
}

/* Runs the child of that name, looked up at each call: the program may have replaced it, or destroyed it. */
static te_tensor *te__run_child(te_module *m, const char *name, te_forward_args *args) {
    te_module *child = te_module_find(m, name);
    if (!child) te__fail(m->te, TE_ERR_STATE, "%s: its child \"%s\" is gone", m->cls->name, name);
    return te_forward_with(child, args);
}

/* ---- DotProductAttention ---- */

static te_result te__dpa_forward(te_module *m, te_forward_args *args) {
    const te_attention_options *o = &((const te_dot_product_attention_desc *)m->state)->attention;
    te_attention_desc a = TE_ZERO;
    te_tensor *y;
    int64_t shape[3];
    char t[TE__SHAPE_TEXT], u[TE__SHAPE_TEXT];
    if (args->attention.checkpoint_core_attention && !m->checkpoint && te_grad_enabled(m->te)) {
        te_forward_args call = *args;
        te_result result;
        call.attention.checkpoint_core_attention = false;
        result = te__module_run_checkpointed(m, &call);
        args->outputs = call.outputs;
        return result;
    }
    if (!args->key || !args->value) return te__fail(m->te, TE_ERR_INVALID, "DotProductAttention: key and value are needed beside the input (the query)");
    if (args->input->ndim != 4 || args->input->shape[2] != o->num_attention_heads || args->input->shape[3] != o->kv_channels || args->key->ndim != 4 ||
        args->key->shape[2] != o->num_gqa_groups)
        return te__fail(m->te, TE_ERR_SHAPE, "DotProductAttention: query %s and key %s; [.., .., %d, %lld] and [.., .., %d, %lld] are needed",
                        te__shape_text(args->input, t), te__shape_text(args->key, u), o->num_attention_heads, (long long)o->kv_channels, o->num_gqa_groups,
                        (long long)o->kv_channels);
    a.format = o->qkv_format;
    a.mask = args->attention.attn_mask_type ? args->attention.attn_mask_type : o->attn_mask_type;
    a.window = args->attention.window.on ? args->attention.window : o->window;
    a.softmax_scale = o->softmax_scale;
    a.dropout_p = te_module_is_training(m) ? o->attention_dropout : 0.0f;
    y = te_attention(args->input, args->key, args->value, &a);
    if (!y) return te_error_code(m->te);
    shape[0] = y->shape[0];
    shape[1] = y->shape[1];
    shape[2] = y->shape[2] * y->shape[3];
    return te__output(m, args, te_tensor_view(y, 3, shape));
}
static const te_module_class te__dpa_class = {"DotProductAttention", sizeof(te_dot_product_attention_desc), te__dpa_forward, NULL, NULL};

/* Masks that te_attention has and modules do not yet: their calls have no lengths. */
static bool te__mask_is_later(te_attn_mask mask) { return (int)mask >= (int)TE_MASK_PADDING && (int)mask <= (int)TE_MASK_ARBITRARY; }

TE_API te_module *te_dot_product_attention_create(te_ctx *te, const te_dot_product_attention_desc *desc) {
    te_module *m;
    te_attention_options o;
    if (!te || !te__has_desc(te, desc, "te_dot_product_attention_create") || !te__options_ok(te, "te_dot_product_attention_create", TE__DESC_DPA, desc)) return NULL;
    o = desc->attention;
    if (!o.num_gqa_groups) o.num_gqa_groups = o.num_attention_heads;
    if (o.num_attention_heads < 1 || o.num_gqa_groups < 1 || o.num_attention_heads % o.num_gqa_groups || o.kv_channels < 1) {
        te__fail(te, TE_ERR_INVALID, "te_dot_product_attention_create: %d heads of %lld channels in %d groups; the groups must divide the heads",
                 o.num_attention_heads, (long long)o.kv_channels, o.num_gqa_groups);
        return NULL;
    }
    if ((int)o.attn_mask_type < 0 || o.attn_mask_type > TE_MASK_CAUSAL_BOTTOM_RIGHT || (int)o.qkv_format < 0 || o.qkv_format > TE_BSHD) {
        bool later = te__mask_is_later(o.attn_mask_type) || o.qkv_format == TE_THD;
        te__fail(te, later ? TE_ERR_UNSUPPORTED : TE_ERR_INVALID, "te_dot_product_attention_create: attention.attn_mask_type %d, attention.qkv_format %d%s; masks up to "
                 "TE_MASK_CAUSAL_BOTTOM_RIGHT (3), TE_SBHD (0) and TE_BSHD (1) are possible", (int)o.attn_mask_type, (int)o.qkv_format, later ? ", which is not there yet" : "");
        return NULL;
    }
    m = te_module_create(te, &te__dpa_class, desc->name ? desc->name : "core_attention");
    if (!m) return NULL;
    if (!o.attn_mask_type) o.attn_mask_type = TE_MASK_CAUSAL;
    ((te_dot_product_attention_desc *)m->state)->attention = o;
    m->checkpoint = o.checkpoint_core_attention;
    return te__module_built(m);
}

/* ---- MultiheadAttention ---- */

/* The state is the desc, with defaults filled in. */
static te_result te__mha_forward(te_module *m, te_forward_args *args) {
    const te_multihead_attention_desc *d = (const te_multihead_attention_desc *)m->state;
    const te_attention_options *o = &d->attention;
    te_forward_args in = TE_ZERO, core = TE_ZERO, proj = TE_ZERO;
    te_tensor *parts[3];
    char text[TE__SHAPE_TEXT];
    if (args->input->ndim != 3)
        return te__fail(m->te, TE_ERR_SHAPE, "MultiheadAttention: the input is %s; [s, b, h] or [b, s, h] is needed", te__shape_text(args->input, text));
    te__hand_on(&in, args);
    in.input = args->input;
    if (!te__run_child(m, d->input_layernorm ? "layernorm_qkv" : "qkv", &in)) return te_error_code(m->te);
    if (!te__split_qkv(in.outputs.out, o->num_attention_heads, o->num_gqa_groups, o->kv_channels, !o->no_qkv_weight_interleaved, o->qkv_format, args->rotary, parts))
        return te_error_code(m->te);
    te__hand_on(&core, args);
    core.input = parts[0];
    core.key = parts[1];
    core.value = parts[2];
    te__hand_on(&proj, args);
    proj.input = te__run_child(m, "core_attention", &core);
    te__run_child(m, "proj", &proj);
    args->outputs = proj.outputs;
    args->outputs.ln_out = in.outputs.ln_out;
    return te__output(m, args, proj.outputs.out);
}
static const te_module_class te__mha_class = {"MultiheadAttention", sizeof(te_multihead_attention_desc), te__mha_forward, NULL, NULL};

/* Fills the defaults; false with the error recorded when the sizes do not fit, or all heads together have more channels than a layer. */
static bool te__heads_ok(te_ctx *te, const char *function, int64_t hidden, te_attention_options *o) {
    if (o->num_attention_heads >= 1 && o->kv_channels == 0 && hidden >= 1 && hidden % o->num_attention_heads == 0) o->kv_channels = hidden / o->num_attention_heads;
    if (o->num_gqa_groups == 0) o->num_gqa_groups = o->num_attention_heads;
    if (o->num_attention_heads >= 1 && o->num_gqa_groups >= 1 && o->num_attention_heads % o->num_gqa_groups == 0 && o->kv_channels >= 1 && hidden >= 1 &&
        o->kv_channels <= TE__MAX_LAYER_SIZE / (o->num_attention_heads + 2 * (int64_t)o->num_gqa_groups))
        return true;
    te__fail(te, TE_ERR_INVALID,
             "%s: hidden_size %lld, num_attention_heads %d, num_gqa_groups %d, kv_channels %lld; the heads must divide the hidden size (or kv_channels "
             "be given), the groups must divide the heads, and all channels be fewer than 2^62",
             function, (long long)hidden, o->num_attention_heads, o->num_gqa_groups, (long long)o->kv_channels);
    return false;
}

TE_API te_module *te_multihead_attention_create(te_ctx *te, const te_multihead_attention_desc *desc) {
    te_multihead_attention_desc d;
    te_dot_product_attention_desc core = TE_ZERO;
    te_linear_desc proj = TE_ZERO;
    te_module *m, *outer;
    int64_t qkv_rows;
    if (!te || !te__has_desc(te, desc, "te_multihead_attention_create") || !te__options_ok(te, "te_multihead_attention_create", TE__DESC_MHA, desc)) return NULL;
    d = *desc;
    if (!te__heads_ok(te, "te_multihead_attention_create", d.hidden_size, &d.attention)) return NULL;
    m = te_module_create(te, &te__mha_class, d.name ? d.name : "self_attention");
    if (!m) return NULL;
    *(te_multihead_attention_desc *)m->state = d;
    outer = te->making;
    te->making = m;
    qkv_rows = (d.attention.num_attention_heads + 2 * (int64_t)d.attention.num_gqa_groups) * d.attention.kv_channels;
    if (d.input_layernorm) {
        te_layernorm_linear_desc l = TE_ZERO;
        l.name = "layernorm_qkv";
        l.in_features = d.hidden_size;
        l.out_features = qkv_rows;
        l.norm = d.norm;
        l.gemm = d.gemm;
        l.parallel = d.parallel;
        l.gemm.return_bias = false;
        l.return_layernorm_output = d.return_layernorm_output;
        te__adopt(m, l.name, te_layernorm_linear_create(te, &l));
    } else {
        te_linear_desc l = TE_ZERO;
        l.name = "qkv";
        l.in_features = d.hidden_size;
        l.out_features = qkv_rows;
        l.gemm = d.gemm;
        l.parallel = d.parallel;
        l.gemm.return_bias = false;
        te__adopt(m, l.name, te_linear_create(te, &l));
    }
    core.name = "core_attention";
    core.attention = d.attention;
    core.parallel = d.parallel;
    te__adopt(m, core.name, te_dot_product_attention_create(te, &core));
    proj.name = "proj";
    proj.in_features = d.attention.num_attention_heads * d.attention.kv_channels;
    proj.out_features = d.hidden_size;
    proj.gemm = d.gemm;
    proj.parallel = d.parallel;
    proj.gemm.init = d.output_layer_init;
    te__adopt(m, proj.name, te_linear_create(te, &proj));
    te->making = outer;
    return te__module_built(m);
}

/* ---- TransformerLayer ---- */

static te_result te__layer_forward(te_module *m, te_forward_args *args) {
    const te_transformer_layer_desc *d = (const te_transformer_layer_desc *)m->state;
    float p = te_module_is_training(m) ? d->hidden_dropout : 0.0f;
    te_forward_args attention = TE_ZERO, mlp = TE_ZERO, norm = TE_ZERO;
    te_tensor *x = args->input, *h, *out;
    te__hand_on(&attention, args);
    attention.input = x;
    if (!te__run_child(m, "self_attention", &attention)) return te_error_code(m->te);
    te__hand_on(&mlp, args);
    if (d->parallel_attention_mlp) { /* both branches see the input; one residual */
        mlp.input = x;
        if (!te__run_child(m, "layernorm_mlp", &mlp)) return te_error_code(m->te);
        out = te_bias_dropout_add(te_add(attention.outputs.out, mlp.outputs.out), NULL, x, p);
    } else { /* a residual begins at the norm's output if the norm returns it, else at the norm's input */
        h = te_bias_dropout_add(attention.outputs.out, attention.outputs.bias, attention.outputs.ln_out ? attention.outputs.ln_out : x, p);
        mlp.input = h;
        if (!te__run_child(m, "layernorm_mlp", &mlp)) return te_error_code(m->te);
        out = te_bias_dropout_add(mlp.outputs.out, mlp.outputs.bias, mlp.outputs.ln_out ? mlp.outputs.ln_out : h, p);
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
    if (!te || !te__has_desc(te, desc, "te_transformer_layer_create") || !te__options_ok(te, "te_transformer_layer_create", TE__DESC_LAYER, desc)) return NULL;
    d = *desc;
    if (!te__heads_ok(te, "te_transformer_layer_create", d.hidden_size, &d.attention)) return NULL;
    m = te_module_create(te, &te__layer_class, d.name ? d.name : "layer");
    if (!m) return NULL;
    d.gemm.return_bias = !d.parallel_attention_mlp; /* te_bias_dropout_add adds the biases */
    *(te_transformer_layer_desc *)m->state = d;
    outer = te->making;
    te->making = m;
    a.name = "self_attention";
    a.hidden_size = d.hidden_size;
    a.attention = d.attention;
    a.norm = d.norm;
    a.gemm = d.gemm;
    a.parallel = d.parallel;
    a.output_layer_init = d.output_layer_init;
    a.input_layernorm = !d.output_layernorm;
    a.return_layernorm_output = d.apply_residual_connection_post_layernorm && !d.output_layernorm;
    te__adopt(m, a.name, te_multihead_attention_create(te, &a));
    p.name = "layernorm_mlp";
    p.hidden_size = d.hidden_size;
    p.ffn_hidden_size = d.ffn_hidden_size;
    p.activation = d.activation;
    p.activation_params = d.activation_params;
    p.norm = d.norm;
    p.gemm = d.gemm;
    p.parallel = d.parallel;
    p.output_layer_init = d.output_layer_init;
    p.return_layernorm_output = d.apply_residual_connection_post_layernorm && !d.parallel_attention_mlp;
    te__adopt(m, p.name, te_layernorm_mlp_create(te, &p));
    if (d.output_layernorm) {
        te_norm_desc n = TE_ZERO;
        n.hidden_size = d.hidden_size;
        n.norm = d.norm;
        n.params_dtype = d.gemm.params_dtype;
        n.device = d.gemm.device;
        n.parallel = d.parallel;
        n.name = "layernorm";
        te__adopt(m, n.name, d.norm.normalization == TE_RMSNORM ? te_rmsnorm_create(te, &n) : te_layernorm_create(te, &n));
    }
    te->making = outer;
    return te__module_built(m);
}
