/* nn/transformer.c: MultiheadAttention and TransformerLayer. They are made of other modules: layers such as Linear and
 * LayerNormMLP, and DotProductAttention. This file must not call the operations of api/ops.h (te_op_...). */

/* Copies the options of a module's call into the call of one of its children. */
static void te__hand_on(te_forward_args *to, const te_forward_args *from) {
    to->attention = from->attention;
    to->cross = from->cross;
    to->is_first_microbatch = from->is_first_microbatch;
    to->rotary = from->rotary;
    to->kv_cache = from->kv_cache;
    to->rotary_key = from->rotary_key;
    to->encoder_output = from->encoder_output;
    to->user = from->user;
}

/* Adds the new module `child` to `parent`. Destroys the child on failure. */
static void te__adopt(te_module *parent, const char *name, te_module *child) {
    if (!te_module_add_child(parent, name, child)) te_module_destroy(child);
}

/* Marks m as the module that is being created, until te__close_part. Sets *outer to the module that was marked before.
 * Returns m, which may be NULL. */
static te_module *te__begin_part(te_module *m, te_module **outer) {
    if (!m) return NULL;
    *outer = te__modules_of(m->te)->making;
    return te__modules_of(m->te)->making = m;
}
static te_module *te__open_part(te_ctx *te, const te_module_class *cls, const char *name, te_module **outer) {
    return te__begin_part(te_module_create(te, cls, name), outer);
}
static te_module *te__close_part(te_module *m, te_module *outer) {
    te__modules_of(m->te)->making = outer;
    return te__module_built(m);
}

/* Runs the child named `name`. Looks the child up at each call, because the program may have replaced it.
 * te__tree_whole has checked that the child exists. */
static te_tensor *te__run_child(te_module *m, const char *name, te_forward_args *args) {
    return te_forward_with(te_module_find(m, name), args);
}

/* ---- MultiheadAttention ---- */

/* Runs a projection that is a child of m. */
static te_tensor *te__project(te_module *m, const char *name, te_tensor *x, const te_forward_args *args,
                              te_outputs *outputs) {
    te_forward_args call = TE_ZERO;
    te_tensor *y;
    te__hand_on(&call, args);
    call.input = x;
    y = te__run_child(m, name, &call);
    *outputs = call.outputs;
    return y;
}

/* Returns true if the child makes a new output at each call: a Linear or LayerNormLinear that the program has not
 * changed. */
static bool te__makes_output(const te_module *child) {
    return child && child->built_in && !child->own_forward &&
           (child->cls == &te__linear_class || child->cls == &te__layernorm_linear_class) && !te__runs_graphs(child);
}
/* Returns true if core_attention can read q, k and v directly from the projection's output y. `later` is true if q or k
 * will still change, for example by norms. */
static bool te__mha_packs(te_module *m, const te_forward_args *args, const te__packing *p, const te_tensor *y,
                          bool later) {
    const te_module *core = te_module_find(m, "core_attention");
    return !later && y && y->buffer && core && te__dpa_of(core) && core->built_in && !core->own_forward &&
           !te__runs_graphs(core) && te__core_reads_packed(core, &args->attention, p);
}
/* Returns true if the projection's output y can be written into the cache of the core as it is split and rotated. Sets
 * *rows. `later`: see te__mha_packs. */
static bool te__mha_writes_rows(te_module *m, const te_forward_args *args, const te__packing *p, const te_tensor *y,
                                bool later, te__cache_rows *rows) {
    const te_attn_options *o = &((const te_multihead_attention_desc *)m->state)->attention;
    te_module *core = te_module_find(m, "core_attention");
    return args->attention.inference_params && !later && y && y->buffer && core && te__dpa_of(core) &&
           core->built_in && !core->own_forward && !te__runs_graphs(core) &&
           te__inference_rows(args->attention.inference_params, core, y, p->groups, p->head_dim, o->qkv_format, rows);
}
static te_tensor *te__as_packed(te_tensor *y, const te__packing *p, int leading) {
    int64_t heads = te__packing_width(p) / p->head_dim, shape[TE_MAX_DIMS];
    int n = leading;
    y = te_tensor_contiguous(y);
    if (!y) return NULL;
    memcpy(shape, y->shape, sizeof(shape));
    if (p->interleaved || p->keys) shape[n++] = p->interleaved ? p->groups : 2;
    shape[n] = n == leading ? heads : heads / shape[n - 1];
    shape[n + 1] = p->head_dim;
    return te_tensor_view(y, n + 2, shape);
}

/* Projects the input to queries, keys and values, and stores them in *core. If `rotary` is not NULL, also rotates
 * queries and keys. `later`: see te__mha_packs. */
static bool te__mha_parts(te_module *m, const te_forward_args *args, const te_rotary_desc *rotary, bool later,
                          te_forward_args *core, te_tensor **ln_out) {
    const te_multihead_attention_desc *d = (const te_multihead_attention_desc *)m->state;
    const te_attn_options *o = &d->attention;
    const int leading = o->qkv_format == TE_THD ? 1 : 2;
    te__packing p = TE_ZERO;
    te_outputs first, kv;
    te_tensor *y, *parts[3] = {NULL, NULL, NULL};
    te__cache_rows rows = TE_ZERO;
    bool writes;
    int i;
    p.heads = (int)te__per_rank(m, o->num_attention_heads);
    p.groups = (int)te__per_rank(m, o->num_gqa_groups);
    p.head_dim = o->kv_channels;
    p.interleaved = !o->no_qkv_weight_interleaved && !o->no_fuse_qkv_params;
    p.keys = o->attention_type == TE_ATTENTION_CROSS;
    core->attention.qkv_interleave_dim = p.interleaved ? -2 : -3;
    if (!p.keys) {
        const char *const name = d->input_layernorm ? "layernorm_qkv" : "qkv";
        y = te__project(m, name, args->input, args, &first);
        *ln_out = first.ln_out;
        if (te__mha_packs(m, args, &p, y, later)) {
            if (rotary) y = te__rotate_qkv(y, &p, o->qkv_format, rotary, te__makes_output(te_module_find(m, name)));
            core->attention.qkv_layer = te__as_packed(y, &p, leading);
            return core->attention.qkv_layer != NULL;
        }
        writes = te__mha_writes_rows(m, args, &p, y, later, &rows);
        if (!y || !te__split_qkv(y, &p, o->qkv_format, rotary, writes ? &rows : NULL, parts)) return false;
    } else {
        y = te__project(m, d->input_layernorm ? "layernorm_query" : "query_layer", args->input, args, &first);
        *ln_out = first.ln_out;
        core->input = parts[0] = te__as_heads(y, leading, p.heads, p.head_dim);
        if (!core->input) return false; /* ranks that know of it would not come to the exchange of key_value */
        y = te__project(m, "key_value", args->encoder_output, args, &kv);
        if (te__mha_packs(m, args, &p, y, later || rotary)) {
            core->attention.kv_layer = te__as_packed(y, &p, leading);
            return core->input && core->attention.kv_layer;
        }
        y = p.interleaved ? te__as_heads(y, leading, p.groups, 2 * p.head_dim)
                          : te__as_heads(y, leading, 2 * p.groups, p.head_dim);
        for (i = 1; i < 3; i++) { /* interleaved: each group of heads has its key and then its value; otherwise all keys
                                   * come first, then all values */
            int dim = p.interleaved ? leading + 1 : leading;
            int64_t half = y ? y->shape[dim] / 2 : 0;
            parts[i] = te_tensor_contiguous(te_tensor_narrow(y, dim, (i - 1) * half, half));
            if (rotary && i == 1) parts[i] = te_apply_rotary_pos_emb(parts[i], rotary, o->qkv_format);
        }
        if (rotary) parts[0] = te_apply_rotary_pos_emb(parts[0], rotary, o->qkv_format);
    }
    core->attention.qkv_interleave_dim = 0;
    core->input = parts[0];
    core->key = parts[1];
    core->value = parts[2];
    return parts[0] && parts[1] && parts[2];
}

/* Prepares a rotation for a call with a key-value cache. Positions that the caller does not give continue after the
 * cached tokens of each sequence. */
static bool te__rotary_goes_on(te_rotary_desc *r, te_inference_params *cache) {
    if (!r->positions) r->start_positions = te_inference_params_get_seqlens_pre_step(cache);
    if (!r->max_seqlen) r->max_seqlen = te__inference_longest(cache);
    return r->positions || r->start_positions;
}

/* Sets r->cp_size and r->cp_rank under context parallelism, unless the caller gives positions. Fails if the caller has
 * set other values. */
static bool te__rotary_is_shared(te_module *m, te_rotary_desc *r) {
    const te__context *c = te__context_of_core(te_module_find(m, "core_attention"));
    const int size = c ? te__context_size(c) : 1, rank = c ? te__context_rank(c) : 0;
    if (size < 2 || r->positions) return true;
    if (r->cp_size && (r->cp_size != size || r->cp_rank != rank))
        return te__not_ok(
            m->te, TE_ERR_INVALID,
            "MultiheadAttention: rotary->cp_rank is %d of cp_size %d, and its core is rank %d of %d (cp_group); "
            "leave both 0",
            r->cp_rank, r->cp_size, rank, size);
    r->cp_size = size;
    r->cp_rank = rank;
    return true;
}

/* Copies the call's te_rotary_desc for the queries (`which` is 0) or the keys (1) to *own, and fills in the fields that
 * the caller has left out. Sets *rotary to `own`, or to NULL if nothing is to be rotated. */
static te_result te__mha_rotary(te_module *m, const te_forward_args *args, int which, te_rotary_desc *own,
                                const te_rotary_desc **rotary) {
    const te_attn_options *o = &((const te_multihead_attention_desc *)m->state)->attention;
    const te_attn_call *c = &args->attention;
    const te_rotary_desc *given = which && args->rotary_key ? args->rotary_key : args->rotary;
    const bool cross = o->attention_type == TE_ATTENTION_CROSS;
    *rotary = NULL;
    if (!given) return TE_OK;
    *own = *given;
    *rotary = own;
    if (!te__rotary_is_shared(m, own)) return TE_ERR_INVALID;
    if (c->inference_params) {
        if (given->start_positions)
            return te__fail(m->te, TE_ERR_INVALID,
                            "MultiheadAttention: rotary->start_positions with inference_params, which knows where each "
                            "sequence stands; leave one of them NULL");
        if (!te__rotary_goes_on(own, c->inference_params)) return te_error_code(m->te);
    }
    if (o->qkv_format != TE_THD) {
        if (!own->cu_seqlens) return TE_OK;
        return te__fail(m->te, TE_ERR_INVALID,
                        "MultiheadAttention: rotary->cu_seqlens with qkv_format %d; it belongs to packed sequences, "
                        "TE_THD (%d): leave it NULL",
                        (int)o->qkv_format, (int)TE_THD);
    }
    if (!own->max_seqlen) own->max_seqlen = cross && which ? c->max_seqlen_kv : c->max_seqlen_q;
    if (own->cu_seqlens) return TE_OK;
    if (c->inference_params) own->cu_seqlens = te__inference_cu_seqlens(c->inference_params);
    else if (cross && which)
        own->cu_seqlens =
            c->cu_seqlens_kv_padded && c->pad_between_seqs != TE_OFF ? c->cu_seqlens_kv_padded : c->cu_seqlens_kv;
    else
        own->cu_seqlens =
            c->cu_seqlens_q_padded && c->pad_between_seqs != TE_OFF ? c->cu_seqlens_q_padded : c->cu_seqlens_q;
    if (own->cu_seqlens) return TE_OK;
    if (te_error_code(m->te) != TE_OK) return te_error_code(m->te);
    return te__fail(m->te, TE_ERR_INVALID,
                    "MultiheadAttention: rotary with qkv_format TE_THD and cu_seqlens_%s NULL; positions begin anew at "
                    "each sequence's start",
                    cross && which ? "kv" : "q");
}

/* Checks the number of dimensions of a call's tensors. Only self attention may have a key-value cache. */
static te_result te__mha_call_ok(te_module *m, const te_forward_args *args) {
    const te_attn_options *o = &((const te_multihead_attention_desc *)m->state)->attention;
    const bool packed = o->qkv_format == TE_THD, cross = o->attention_type == TE_ATTENTION_CROSS;
    const int ndim = packed ? 2 : 3;
    char text[TE__SHAPE_TEXT];
    if (args->input->ndim != ndim)
        return te__fail(m->te, TE_ERR_SHAPE, "MultiheadAttention: the input is %s; %s is needed",
                        te__shape_text(args->input, text), packed ? "[tokens, h]" : "[s, b, h] or [b, s, h]");
    if (cross && (!args->encoder_output || args->encoder_output->ndim != ndim))
        return te__fail(
            m->te, args->encoder_output ? TE_ERR_SHAPE : TE_ERR_INVALID,
            "MultiheadAttention: encoder_output is %s; cross attention takes keys and values from it: %s is needed",
            args->encoder_output ? te__shape_text(args->encoder_output, text) : "NULL",
            packed ? "[tokens, h]" : "[s_kv, b, h] or [b, s_kv, h]");
    if (args->attention.qkv_layer || args->attention.kv_layer)
        return te__fail(m->te, TE_ERR_INVALID,
                        "MultiheadAttention: %s is given; it projects its input to queries, keys and values itself: "
                        "leave it NULL, or call DotProductAttention",
                        args->attention.qkv_layer ? "qkv_layer" : "kv_layer");
    if (!args->attention.inference_params) return TE_OK;
    if (cross)
        return te__fail(m->te, TE_ERR_INVALID,
                        "MultiheadAttention: inference_params with cross attention, whose keys are those of "
                        "encoder_output; leave it NULL");
    return te__inference_ready(args->attention.inference_params, m->te, "MultiheadAttention");
}

/* The state of the module is its te_multihead_attention_desc with the defaults filled in. */
static te_result te__mha_forward(te_module *m, te_forward_args *args) {
    static const char *const norms[2] = {"q_norm", "k_norm"};
    const te_multihead_attention_desc *d = (const te_multihead_attention_desc *)m->state;
    const te_attn_options *o = &d->attention;
    const te_rotary_desc *rotary[2];
    te_rotary_desc own[2];
    te_forward_args core = TE_ZERO, proj = TE_ZERO;
    te_tensor *ln_out = NULL;
    te_result result = te__mha_call_ok(m, args);
    bool apart; /* true: q and k are rotated after the split into q, k and v; false: the split rotates them, too */
    int i;
    for (i = 0; i < 2 && result == TE_OK; i++) result = te__mha_rotary(m, args, i, &own[i], &rotary[i]);
    if (result != TE_OK) return result;
    apart = (args->rotary_key && args->rotary_key != args->rotary) || o->qkv_format == TE_THD ||
            (o->qk_norm_type && o->qk_norm_before_rope);
    te__hand_on(&core, args);
    if (!te__mha_parts(m, args, apart ? NULL : rotary[0], o->qk_norm_type || (apart && (rotary[0] || rotary[1])), &core,
                       &ln_out))
        return te_error_code(m->te) != TE_OK ? te_error_code(m->te) : TE_ERR_STATE;
    for (i = 0; i < 2; i++) {
        te_tensor **part = i == 0 ? &core.input : &core.key;
        te_outputs normed;
        if (o->qk_norm_type && o->qk_norm_before_rope) *part = te__project(m, norms[i], *part, args, &normed);
        if (apart && rotary[i]) *part = te_apply_rotary_pos_emb(*part, rotary[i], o->qkv_format);
        if (o->qk_norm_type && !o->qk_norm_before_rope) *part = te__project(m, norms[i], *part, args, &normed);
    }
    te__hand_on(&proj, args);
    core.fp8_output = te__hands_fp8(te_module_find(m, "core_attention"), te_module_find(m, "proj"));
    proj.input = te__run_child(m, "core_attention", &core);
    te__run_child(m, "proj", &proj);
    args->outputs = proj.outputs;
    args->outputs.ln_out = ln_out;
    args->outputs.max_logit = core.outputs.max_logit;
    return te__output(m, args, proj.outputs.out);
}
static const te_module_class te__mha_class = {"MultiheadAttention", sizeof(te_multihead_attention_desc),
                                              te__mha_forward, NULL, NULL};

/* Fills in the defaults of the options. Fails if the sizes do not fit together, or if all heads together have too many
 * channels for a layer. */
static bool te__heads_ok(te_ctx *te, const char *function, int64_t hidden, te_attn_options *o) {
    if (o->num_attention_heads >= 1 && o->kv_channels == 0 && hidden >= 1 && hidden % o->num_attention_heads == 0)
        o->kv_channels = hidden / o->num_attention_heads;
    if (o->num_gqa_groups == 0) o->num_gqa_groups = o->num_attention_heads;
    if (o->num_attention_heads >= 1 && o->num_gqa_groups >= 1 && o->num_attention_heads % o->num_gqa_groups == 0 &&
        o->kv_channels >= 1 && hidden >= 1 &&
        o->kv_channels <= TE__MAX_LAYER_SIZE / (o->num_attention_heads + 2 * (int64_t)o->num_gqa_groups))
        return true;
    return te__not_ok(
        te, TE_ERR_INVALID,
        "%s: hidden_size %lld, num_attention_heads %d, num_gqa_groups %d, kv_channels %lld; the heads must divide "
        "the hidden size (or kv_channels "
        "be given), the groups must divide the heads, and all channels be fewer than 2^62",
        function, (long long)hidden, o->num_attention_heads, o->num_gqa_groups, (long long)o->kv_channels);
}

/* Returns the parallel options for a child of m. If ranks do not share m, the options have no group. */
static te_parallel_options te__child_parallel(const te_module *m, const te_parallel_options *o, te_parallel_mode mode) {
    te_parallel_options p = *o;
    p.parallel_mode = mode;
    if (m->parallel.size < 2) {
        p.tp_group = NULL;
        p.tp_size = 0;
        p.sequence_parallel = false;
    }
    return p;
}

/* Adds a projection to m, with a norm before it if `norm` is true. blocks[] has the numbers of weight rows for queries,
 * keys and values. If such a number is 0, the projection does not make that tensor. Blocks that are not interleaved are
 * divided among the ranks separately. With no_fuse_qkv_params, each block is a parameter of its own. */
static void te__add_projection(te_module *m, const te_multihead_attention_desc *d, const char *name, bool norm,
                               const int64_t blocks[3]) {
    static const char *const parts[3] = {"query", "key", "value"};
    const char *names[3];
    int64_t sizes[3];
    te_linear_desc l = TE_ZERO;
    te__sharding sharding = TE_ZERO;
    int i, n = 0;
    for (i = 0; i < 3; i++) {
        if (!blocks[i]) continue;
        names[n] = parts[i];
        sizes[n] = sharding.block[n] = blocks[i];
        n++;
    }
    if (d->attention.no_qkv_weight_interleaved) sharding.num_blocks = n;
    l.name = name;
    l.in_features = d->hidden_size;
    for (i = 0; i < n; i++) l.out_features += sizes[i];
    l.gemm = d->gemm;
    l.gemm.return_bias = false;
    l.parallel =
        te__child_parallel(m, &d->parallel, d->parallel.set_parallel_mode ? TE_PARALLEL_COLUMN : TE_PARALLEL_NONE);
    if (d->attention.no_fuse_qkv_params) {
        l.parameters_split.names = names;
        l.parameters_split.sizes = sizes;
        l.parameters_split.count = n;
        sharding.num_blocks = 0; /* each parameter is one block */
    }
    te__adopt(m, name,
              norm ? te__layernorm_linear_create(m->te, &l, &d->norm, d->return_layernorm_output, false, &sharding)
                   : te__linear_create(m->te, &l, &sharding));
}
/* Adds the norms of queries and keys. All heads use the same parameters, so ranks that divide the heads must sum the
 * parameters' gradients. */
static void te__add_qk_norms(te_module *m, const te_multihead_attention_desc *d) {
    static const char *const names[2] = {"q_norm", "k_norm"};
    te_norm_desc n = TE_ZERO;
    te_l2normalization_desc l2 = TE_ZERO;
    int i;
    n.hidden_size = d->attention.kv_channels;
    n.norm.eps = l2.eps = d->attention.qk_norm_eps > 0.0f ? d->attention.qk_norm_eps : 1e-6f;
    n.params_dtype = d->gemm.params_dtype;
    n.device = d->gemm.device;
    n.parallel.sequence_parallel = m->parallel.size > 1;
    for (i = 0; i < 2; i++) {
        n.name = l2.name = names[i];
        te__adopt(m, n.name, d->attention.qk_norm_type == TE_QK_NORM_L2        ? te_l2normalization_create(m->te, &l2)
                             : d->attention.qk_norm_type == TE_QK_NORM_RMSNORM ? te_rmsnorm_create(m->te, &n)
                                                                               : te_layernorm_create(m->te, &n));
    }
}
/* Checks choices that no other place checks. */
static te_result te__mha_choices_ok(te_ctx *te, const te_attn_options *o) {
    if ((int)o->attention_type < 0 || o->attention_type > TE_ATTENTION_CROSS || (int)o->qk_norm_type < 0 ||
        o->qk_norm_type > TE_QK_NORM_LAYERNORM || !(o->qk_norm_eps >= 0.0f))
        return te__fail(
            te, TE_ERR_INVALID,
            "te_multihead_attention_create: attention_type %d, qk_norm_type %d, qk_norm_eps %g; TE_ATTENTION_SELF "
            "(0) and TE_ATTENTION_CROSS (1), "
            "TE_QK_NORM_NONE (0) to TE_QK_NORM_LAYERNORM (3), and 0 or more are possible",
            (int)o->attention_type, (int)o->qk_norm_type, (double)o->qk_norm_eps);
    return TE_OK;
}

TE_API te_module *te_multihead_attention_create(te_ctx *te, const te_multihead_attention_desc *desc) {
    te_multihead_attention_desc d;
    te_dot_product_attention_desc core = TE_ZERO;
    te_linear_desc proj = TE_ZERO;
    te_module *m, *outer;
    int64_t blocks[3];
    if (!te || !te__has_desc(te, desc, "te_multihead_attention_create")) return NULL;
    d = *desc;
    if (te__mha_choices_ok(te, &d.attention) != TE_OK ||
        !te__heads_ok(te, "te_multihead_attention_create", d.hidden_size, &d.attention))
        return NULL;
    m = te__begin_part(te__module_with_desc(te, &te__mha_class, &d, d.name, "self_attention"), &outer);
    if (!m) return NULL;
    if (!te__heads_shared(m, &d.parallel, d.parallel.set_parallel_mode ? TE_PARALLEL_COLUMN : TE_PARALLEL_NONE,
                          d.attention.num_attention_heads, d.attention.num_gqa_groups))
        return te__close_part(m, outer);
    blocks[0] = d.attention.num_attention_heads * d.attention.kv_channels;
    blocks[1] = blocks[2] = d.attention.num_gqa_groups * d.attention.kv_channels;
    if (d.attention.attention_type == TE_ATTENTION_SELF)
        te__add_projection(m, &d, d.input_layernorm ? "layernorm_qkv" : "qkv", d.input_layernorm, blocks);
    else {
        int64_t keys[3];
        memcpy(keys, blocks, sizeof(keys));
        blocks[1] = blocks[2] = keys[0] = 0;
        te__add_projection(m, &d, d.input_layernorm ? "layernorm_query" : "query_layer", d.input_layernorm, blocks);
        te__add_projection(m, &d, "key_value", false, keys);
    }
    if (d.attention.qk_norm_type) te__add_qk_norms(m, &d);
    core.name = "core_attention";
    core.attention = d.attention;
    if (!core.attention.rng_tracker_name) core.attention.rng_tracker_name = d.gemm.rng_tracker_name;
    core.parallel = te__child_parallel(m, &d.parallel, TE_PARALLEL_NONE);
    te__adopt(m, core.name, te_dot_product_attention_create(te, &core));
    proj.name = "proj";
    proj.in_features = d.attention.num_attention_heads * d.attention.kv_channels;
    proj.out_features = d.hidden_size;
    proj.gemm = d.gemm;
    proj.parallel =
        te__child_parallel(m, &d.parallel, d.parallel.set_parallel_mode ? TE_PARALLEL_ROW : TE_PARALLEL_NONE);
    proj.gemm.init = d.output_layer_init;
    te__adopt(m, proj.name, te_linear_create(te, &proj));
    return te__close_part(m, outer);
}

/* ---- TransformerLayer ---- */

/* Returns residual + dropout(y + bias). In training, te_drop_path decides for each index of the first dimension whether
 * to leave out dropout(y + bias). The probability of leaving it out is `path`. */
static te_tensor *te__residual(te_module *m, const te_outputs *y, te_tensor *residual, float path) {
    const te_transformer_layer_desc *d = (const te_transformer_layer_desc *)m->state;
    bool training = te_module_is_training(m);
    float p = training ? d->hidden_dropout : 0.0f;
    if (!training || path == 0.0f) return te_bias_dropout_add(y->out, y->bias, residual, p);
    return te_drop_path(te_bias_dropout_add(y->out, y->bias, NULL, p), residual, path);
}

/* Fills the attention options *self and *cross. Self attention has as many keys as queries. If only one of the two
 * attentions has a padding mask, the other one gets no sequence lengths. */
static void te__layer_calls(te_module *m, const te_forward_args *args, te_attn_call *self,
                            te_attn_call *cross) {
    const te_transformer_layer_desc *d = (const te_transformer_layer_desc *)m->state;
    const te_cross_attention_call *c = &args->cross;
    const bool pads =
        te__attn_pads(args->attention.attn_mask_type ? args->attention.attn_mask_type : d->attention.attn_mask_type);
    const bool cross_pads =
        d->layer_type == TE_LAYER_DECODER &&
        te__attn_pads(c->enc_dec_attn_mask_type ? c->enc_dec_attn_mask_type : d->enc_dec_attn_mask_type);
    te_attn_call *other = !pads && cross_pads ? self : pads && !cross_pads ? cross : NULL;
    *self = *cross = args->attention;
    self->cu_seqlens_kv = self->cu_seqlens_q;
    self->cu_seqlens_kv_padded = self->cu_seqlens_q_padded;
    self->max_seqlen_kv = self->max_seqlen_q;
    cross->attn_mask_type = c->enc_dec_attn_mask_type;
    cross->window = c->enc_dec_window;
    cross->bottom_right_diagonal = c->enc_dec_bottom_right_diagonal;
    cross->attention_mask = c->enc_dec_attn_mask;
    cross->attention_mask_q = c->enc_dec_attn_mask_q;
    cross->inference_params = NULL; /* The key-value cache collects the new keys of each decoding step. Cross attention
                                     * has no new keys, because all its keys come from encoder_output. */
    if (other)
        other->cu_seqlens_q = other->cu_seqlens_kv = other->cu_seqlens_q_padded = other->cu_seqlens_kv_padded = NULL;
}

static te_result te__layer_forward(te_module *m, te_forward_args *args) {
    const te_transformer_layer_desc *d = (const te_transformer_layer_desc *)m->state;
    te_forward_args attention = TE_ZERO, cross = TE_ZERO, mlp = TE_ZERO, norm = TE_ZERO;
    te_attn_call calls[2];
    te_rotary_desc rotary;
    te_tensor *x = args->input, *h, *out;
    te__layer_calls(m, args, &calls[0], &calls[1]);
    te__hand_on(&attention, args);
    attention.attention = calls[0];
    attention.input = x;
    if (!te__run_child(m, "self_attention", &attention)) return te_error_code(m->te);
    te__hand_on(&mlp, args);
    if (d->parallel_attention_mlp) { /* attention and MLP read the same input, and the residual is added once to their
                                      * sum */
        mlp.input = x;
        if (!te__run_child(m, "layernorm_mlp", &mlp)) return te_error_code(m->te);
        mlp.outputs.out = te_add(attention.outputs.out, mlp.outputs.out);
        mlp.outputs.bias = NULL;
        out = te__residual(m, &mlp.outputs, x, d->drop_path_rate);
    } else { /* Each residual is the output of the norm before the attention or MLP if the norm returns it, otherwise
              * the norm's input. */
        h = te__residual(m, &attention.outputs, attention.outputs.ln_out ? attention.outputs.ln_out : x,
                         d->drop_path_rate);
        if (d->layer_type == TE_LAYER_DECODER) {
            te__hand_on(&cross, args);
            cross.input = h;
            cross.attention = calls[1];
            /* The queries of cross attention have the same positions as the queries of self attention. */
            if (args->attention.inference_params && args->rotary) {
                rotary = *args->rotary;
                if (!te__rotary_goes_on(&rotary, args->attention.inference_params)) return te_error_code(m->te);
                cross.rotary_key = args->rotary_key ? args->rotary_key : args->rotary;
                cross.rotary = &rotary;
            }
            if (!te__run_child(m, "inter_attention", &cross)) return te_error_code(m->te);
            /* TransformerEngine does not use drop_path_rate here, so te.h does not either */
            h = te__residual(m, &cross.outputs, cross.outputs.ln_out ? cross.outputs.ln_out : h, 0.0f);
        }
        mlp.input = h;
        if (!te__run_child(m, "layernorm_mlp", &mlp)) return te_error_code(m->te);
        out = te__residual(m, &mlp.outputs, mlp.outputs.ln_out ? mlp.outputs.ln_out : h, d->drop_path_rate);
    }
    if (d->output_layernorm) {
        norm.input = out;
        out = te__run_child(m, "layernorm", &norm);
    }
    args->outputs.max_logit = attention.outputs.max_logit;
    return te__output(m, args, out);
}
static const te_module_class te__layer_class = {"TransformerLayer", sizeof(te_transformer_layer_desc),
                                                te__layer_forward, NULL, NULL};

/* Checks choices that no child checks. An encoder accepts the options of a decoder only with their default values. */
static te_result te__layer_choices_ok(te_ctx *te, const te_transformer_layer_desc *d) {
    bool decoder = d->layer_type == TE_LAYER_DECODER,
         bounded = d->enc_dec_window.on && (d->enc_dec_window.left != -1 || d->enc_dec_window.right != -1);
    bool cross = bounded || (d->enc_dec_attn_mask_type && d->enc_dec_attn_mask_type != TE_MASK_NONE) ||
                 d->enc_dec_bottom_right_diagonal;
    if ((int)d->layer_type < 0 || d->layer_type > TE_LAYER_DECODER ||
        !(d->drop_path_rate >= 0.0f && d->drop_path_rate < 1.0f))
        return te__fail(te, TE_ERR_INVALID,
                        "te_transformer_layer_create: layer_type %d, drop_path_rate %g; TE_LAYER_ENCODER (0) and "
                        "TE_LAYER_DECODER (1), and probabilities below 1 are possible",
                        (int)d->layer_type, (double)d->drop_path_rate);
    if (d->attention.attention_type != TE_ATTENTION_SELF)
        return te__fail(
            te, TE_ERR_INVALID,
            "te_transformer_layer_create: attention.attention_type %d; a layer has self attention, and cross "
            "attention beside it with layer_type TE_LAYER_DECODER: "
            "leave it 0",
            (int)d->attention.attention_type);
    if ((decoder && d->parallel_attention_mlp) || (!decoder && cross))
        return te__fail(
            te, TE_ERR_INVALID, "te_transformer_layer_create: layer_type %d with %s", (int)d->layer_type,
            decoder ? "parallel_attention_mlp; the two halves of a decoder follow each other: leave one of them out"
                    : "enc_dec_attn_mask_type, enc_dec_window or enc_dec_bottom_right_diagonal; those are a "
                      "decoder's: leave them at their defaults, or take TE_LAYER_DECODER (1)");
    if (d->parallel_attention_mlp && (d->apply_residual_connection_post_layernorm || d->output_layernorm))
        return te__fail(
            te, TE_ERR_INVALID,
            "te_transformer_layer_create: parallel_attention_mlp with %s; the halves of such a layer share one "
            "residual, which begins at its input, and each has its own "
            "norm in front: leave one of the two out",
            d->output_layernorm ? "output_layernorm" : "apply_residual_connection_post_layernorm");
    return TE_OK;
}

TE_API te_module *te_transformer_layer_create(te_ctx *te, const te_transformer_layer_desc *desc) {
    te_transformer_layer_desc d;
    te_multihead_attention_desc a = TE_ZERO;
    te_layernorm_mlp_desc p = TE_ZERO;
    te_module *m, *outer;
    if (!te || !te__has_desc(te, desc, "te_transformer_layer_create")) return NULL;
    d = *desc;
    if (te__layer_choices_ok(te, &d) != TE_OK ||
        !te__heads_ok(te, "te_transformer_layer_create", d.hidden_size, &d.attention))
        return NULL;
    d.gemm.return_bias = !d.parallel_attention_mlp; /* children return their biases, and te_bias_dropout_add adds
                                                     * them */
    m = te__begin_part(te__module_with_desc(te, &te__layer_class, &d, d.name, "layer"), &outer);
    if (!m) return NULL;
    te__parallel_open(m, &d.parallel, d.parallel.set_parallel_mode ? TE_PARALLEL_COLUMN : TE_PARALLEL_NONE);
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
    if (d.layer_type == TE_LAYER_DECODER) {
        a.name = "inter_attention";
        a.attention.attention_type = TE_ATTENTION_CROSS;
        a.attention.attn_mask_type = d.enc_dec_attn_mask_type ? d.enc_dec_attn_mask_type : TE_MASK_NONE;
        a.attention.window = d.enc_dec_window;
        a.attention.bottom_right_diagonal = d.enc_dec_bottom_right_diagonal;
        a.input_layernorm = true;
        a.return_layernorm_output = d.apply_residual_connection_post_layernorm;
        te__adopt(m, a.name, te_multihead_attention_create(te, &a));
    }
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
        n.parallel = te__child_parallel(m, &d.parallel, TE_PARALLEL_NONE);
        n.name = "layernorm";
        te__adopt(m, n.name,
                  d.norm.normalization == TE_RMSNORM ? te_rmsnorm_create(te, &n) : te_layernorm_create(te, &n));
    }
    return te__close_part(m, outer);
}
