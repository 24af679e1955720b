/* lm/decoder.c: what a layer of a CausalLM computes: attention with rotated heads and a cache, residuals. This file
 * must not depend on who creates the modules. */

/* ---- DecoderAttention ---- */

/* Returns among how many ranks the tokens between products are divided in this call. `parts`: in calls without a
 * cache. */
static int te__token_parts(const te_module *m, int parts) { return te__functions_of(m->te)->whole_rows ? 1 : parts; }

typedef struct te__decoder_attention {
    int layer;
    te__head_facts of; /* numbers of heads and the head size */
    int parts;   /* ranks that share the tokens between products (sequence_parallel); else 1 */
    bool norm; /* true: each query and key head is normalised */
    te_rotary_desc rotary;
    float *factors; /* NULL without longrope; otherwise an array of head_dim floats: first the list of short factors,
                     * then the list of long factors */
} te__decoder_attention;

/* Projects args->input with the child `proj` to heads [b, s, n, d]. Normalizes the heads with the child `norm`, and
 * rotates them by `rotary`. `norm` and `rotary` may be NULL. */
static te_tensor *te__project_heads(te_module *m, const te_forward_args *args, const char *proj, const char *norm,
                                    int n, const te_rotary_desc *rotary) {
    const te__decoder_attention *s = (const te__decoder_attention *)m->state;
    te_forward_args in = TE_ZERO;
    te_tensor *y;
    int64_t shape[4];
    te__hand_on(&in, args);
    in.input = args->input;
    y = te__run_child(m, proj, &in);
    shape[0] = args->input->shape[0];
    shape[1] = args->input->shape[1] * te__token_parts(m, s->parts);
    shape[2] = n;
    shape[3] = s->of.head_dim;
    y = te_tensor_view(y, 4, shape);
    if (y && norm && s->norm) {
        in.input = y;
        y = te__run_child(m, norm, &in);
    }
    return y && rotary ? te_apply_rotary_pos_emb(y, rotary, TE_BSHD) : y;
}

/* Projects args->input to queries, keys and values, each by itself, rotates them, and extends the cache if there is
 * one. Stores them in *core. Behind one that fails there is no other: ranks that know of it would not come to its
 * exchange. */
static te_result te__decoder_parts(te_module *m, const te_forward_args *args, const te_rotary_desc *rotary,
                                   bool on_device, te_forward_args *core) {
    const te__decoder_attention *s = (const te__decoder_attention *)m->state;
    te_kv_cache *cache = args->kv_cache;
    core->input = te__project_heads(m, args, "q_proj", "q_norm", s->of.heads, rotary);
    if (core->input) core->key = te__project_heads(m, args, "k_proj", "k_norm", s->of.groups, rotary);
    if (core->key) core->value = te__project_heads(m, args, "v_proj", NULL, s->of.groups, NULL);
    if (!core->value) return te_error_code(m->te);
    if (!cache) return TE_OK;
    if (te_grad_enabled(m->te))
        return te__fail(m->te, TE_ERR_STATE,
                        "DecoderAttention: a call with kv_cache cannot be recorded; open te_no_grad_begin first");
    if (te__kv_cache_takes(m, cache, s->layer, core->key) != TE_OK) return te_error_code(m->te);
    return (on_device ? te__kv_cache_append : te__kv_cache_extend)(cache, s->layer, &core->key, &core->value,
                                                                   &core->attention);
}

/* Returns whether one operation can compute the queries, keys and values of a step, as neighbouring columns of one
 * tensor. From there they are rotated into the cache. */
static bool te__decoder_packs(te_module *m, const te_forward_args *args) {
    const te__decoder_attention *s = (const te__decoder_attention *)m->state;
    const te_kv_cache *c = args->kv_cache;
    return !s->norm && !te_grad_enabled(m->te) && !te__functions_of(m->te)->any_rows && c->te == m->te &&
           s->layer < c->num_layers &&
           (c->layers[s->layer].k->dtype == args->input->dtype || te__kv_cache_codes(&c->layers[s->layer])) &&
           te__is_plain_linear(te_module_find(m, "q_proj")) && te__is_plain_linear(te_module_find(m, "k_proj")) &&
           te__is_plain_linear(te_module_find(m, "v_proj"));
}
/* Projects args->input, which is the output of `norm` if that is not NULL, to queries, keys and values. Rotates the
 * queries into a new tensor core->input, and keys and values into the cache, which core->key and core->value become. */
static te_result te__decoder_step(te_module *m, const te_forward_args *args, te__late_norm *norm,
                                  const te_rotary_desc *rotary, te_forward_args *core) {
    static const char *const names[3] = {"q_proj", "k_proj", "v_proj"};
    const te__decoder_attention *s = (const te__decoder_attention *)m->state;
    te__packing packing = TE_ZERO;
    te__cache_rows rows;
    te_tensor *packed, *place[3], *y[3] = {NULL, NULL, NULL}, *part[3], keys;
    te__qkv_state split;
    te_op_joint_gemm_args step = TE_ZERO;
    te__joint joint;
    te_forward_args in = TE_ZERO;
    te_result result = TE_OK;
    int64_t shape[3];
    int i;
    packing.heads = s->of.heads;
    packing.groups = s->of.groups;
    packing.head_dim = s->of.head_dim;
    shape[0] = args->input->shape[0];
    shape[1] = args->input->shape[1];
    shape[2] = te__packing_width(&packing);
    packed = te_tensor_empty(m->te, args->input->dtype, 3, shape);
    if (!packed) return te_error_code(m->te);
    keys = *packed;
    keys.ndim = 4;
    keys.shape[2] = packing.groups;
    keys.shape[3] = packing.head_dim;
    if (te__kv_cache_takes(m, args->kv_cache, s->layer, &keys) != TE_OK ||
        !te__kv_cache_rows(args->kv_cache, s->layer, &rows) ||
        !te__kv_cache_lengths(args->kv_cache, &rows, &core->attention) ||
        !te__split_open(packed, &packing, TE_BSHD, rotary, &rows, &split, part))
        return te_error_code(m->te);
    te__hand_on(&in, args);
    in.input = args->input;
    te__joint_open(m->te, &joint);
    joint.norm = norm;
    for (i = 0, shape[0] = 0; i < 3 && result == TE_OK; i++, shape[0] += shape[1]) {
        shape[1] = (i == 0 ? packing.heads : packing.groups) * packing.head_dim;
        place[i] = te__functions_of(m->te)->place = te_tensor_narrow(packed, 2, shape[0], shape[1]);
        y[i] = place[i] ? te__run_child(m, names[i], &in) : NULL;
        te__functions_of(m->te)->place = NULL;
        if (!y[i]) result = TE_ERR_STATE;
    }
    step.rope = split.args;
    step.rope.qkv = NULL;
    step.product[0].d = packed;
    for (i = 0; i < 3; i++)
        if (!te__joint_has(&joint, i, y[i]) || y[i]->buffer != packed->buffer) step.rope.q = NULL;
    result = te__joint_run(m->te, &joint, result, step.rope.q ? &step : NULL);
    for (i = 0; i < 3 && result == TE_OK; i++) /* a projection that had another place */
        if (y[i]->buffer != packed->buffer) result = te_tensor_copy(place[i], y[i]);
    if (result == TE_OK && !step.rope.q) result = te_op_qkv_rope(m->te, &split.args);
    if (result != TE_OK) return te_error_code(m->te);
    core->input = part[0];
    core->key = rows.k;
    core->value = rows.v;
    return TE_OK;
}

static te_result te__decoder_attention_forward(te_module *m, te_forward_args *args) {
    const te__decoder_attention *s = (const te__decoder_attention *)m->state;
    static const char *const names[3] = {"q_proj", "k_proj", "v_proj"};
    te_kv_cache *cache = args->kv_cache;
    te_forward_args core = TE_ZERO, out = TE_ZERO, in;
    te_rotary_desc rotary = s->rotary;
    te_tensor *residual = te__take_residual(m->te);
    te__late_norm *norm = te__take_norm(m->te);
    bool on_device = false; /* the step takes its positions and lengths from the cache's tensor of numbers */
    te__shared_input shared, *outer;
    const te__context *context;
    te_tensor *y;
    te_result result;
    const int parts = te__token_parts(m, s->parts);
    int64_t shape[3];
    char text[TE__SHAPE_TEXT];
    if (args->input->ndim != 3)
        return te__fail(m->te, TE_ERR_SHAPE, "DecoderAttention: the input is %s; [b, s, hidden] is needed",
                        te__shape_text(args->input, text));
    context = te__context_of_core(te_module_find(m, "sdpa"));
    if (context && te__context_size(context) > 1) {
        if (cache)
            return te__fail(m->te, TE_ERR_UNSUPPORTED,
                            "DecoderAttention: kv_cache is given, and %d ranks share each sequence (cp_group); open "
                            "the model without it to generate",
                            te__context_size(context));
        rotary.cp_size = te__context_size(context);
        rotary.cp_rank = te__context_rank(context);
    }
    if (cache) {
        on_device = te__kv_cache_on_device(cache, args->input->shape[1] * parts) &&
                    te__is_plain_sdpa(te_module_find(m, "sdpa"));
        if (m->te->capture && !on_device)
            return te__refuse_capture(m->te, "a call with kv_cache of a part of a model, or of one with another sdpa",
                                      "capture the CausalLM, whose sdpa has the forward of its class");
        rotary.max_seqlen = cache->length + args->input->shape[1] * parts;
        if (!on_device) rotary.position_offset = cache->length;
        else if (!(rotary.start_positions = te__kv_cache_list(cache, 2))) return te_error_code(m->te);
    }
    te__hand_on(&core, args);
    core.attention.attn_mask_type = TE_MASK_CAUSAL;
    in = *args;
    in.input = te__input_sum_begin(m, args->input, names, 3);
    if (!in.input) {
        te__input_sum_end(m->te);
        return te_error_code(m->te);
    }
    outer = te__share_begin(&shared, in.input);
    if (on_device && te__decoder_packs(m, args)) result = te__decoder_step(m, args, norm, &rotary, &core);
    else {
        result = te__late_norm_run(norm);
        if (result == TE_OK) result = te__decoder_parts(m, &in, &rotary, on_device, &core);
    }
    te__share_end(&shared, outer);
    te__input_sum_end(m->te);
    if (result != TE_OK) return te_error_code(m->te);
    y = te__run_child(m, "sdpa", &core);
    shape[0] = args->input->shape[0] * parts; /* o_proj leaves this rank's part of the first dimension */
    shape[1] = args->input->shape[1];
    shape[2] = -1;
    te__hand_on(&out, args);
    out.input = te_tensor_view(te_tensor_contiguous(y), 3, shape);
    return te__output(m, args, te__run_child_added(m, "o_proj", &out, residual));
}
static void te__decoder_attention_destroy(te_module *m) {
    te__decoder_attention *s = (te__decoder_attention *)m->state;
    te__free(m->te, s->factors);
}
static const te_module_class te__decoder_attention_class = {"DecoderAttention", sizeof(te__decoder_attention),
                                                            te__decoder_attention_forward,
                                                            te__decoder_attention_destroy, NULL};
/* Copies the factor lists of longrope into memory that the module owns. */
static void te__decoder_attention_factors(te_module *m, int rotary_dim) {
    te__decoder_attention *s = (te__decoder_attention *)m->state;
    te_rope_scaling *r = &s->rotary.scaling;
    const int64_t half = (rotary_dim ? rotary_dim : s->of.head_dim) / 2;
    if (r->type != TE_ROPE_LONGROPE || !r->short_factor || !r->long_factor) return;
    s->factors = (float *)te__alloc(m->te, (size_t)s->of.head_dim * sizeof(float));
    if (!s->factors) return;
    memcpy(s->factors, r->short_factor, (size_t)half * sizeof(float));
    memcpy(s->factors + half, r->long_factor, (size_t)half * sizeof(float));
    r->short_factor = s->factors;
    r->long_factor = s->factors + half;
}

/* ---- DecoderLayer ---- */

static te_tensor *te__run_on(te_module *m, const char *name, te_tensor *x, const te_forward_args *args) {
    te_forward_args in = TE_ZERO;
    te__hand_on(&in, args);
    in.input = x;
    return x ? te__run_child(m, name, &in) : NULL;
}

/* Returns x + the output of the child `name` on the output of the child `norm` on x. In a step with a cache the child
 * may compute the norm and add x itself: one of `cls`, which is a class that looks for both (te__take_norm,
 * te__take_residual). */
static te_tensor *te__add_output(te_module *m, const char *norm, const char *name, const te_module_class *cls,
                                 te_tensor *x, const te_forward_args *args) {
    const te_module *child = te_module_find(m, name);
    te__functions_state *f = te__functions_of(m->te);
    te__late_norm late = TE_ZERO;
    te_tensor *y;
    bool offered = args->kv_cache && x && child && child->cls == cls && !child->own_forward && !te__runs_graphs(child);
    f->late = offered && te__is_plain_norm(te_module_find(m, norm)) ? &late : NULL;
    y = te__run_on(m, norm, x, args);
    f->late = NULL;
    f->normed = late.y ? &late : NULL;
    f->residual = offered ? x : NULL;
    y = te__run_on(m, name, y, args);
    offered = offered && !f->residual; /* whether the child has taken x */
    f->residual = NULL;
    f->normed = NULL;
    te__late_norm_close(&late);
    return offered ? y : te_add(x, y);
}
static te_result te__decoder_layer_forward(te_module *m, te_forward_args *args) {
    const char *mlp = te_module_find(m, "mlp") ? "mlp" : "block_sparse_moe";
    te_tensor *x = args->input, *y;
    if (te_module_find(m, "pre_feedforward_layernorm")) { /* a norm follows each part, so the parts add nothing */
        y = te__run_on(m, "input_layernorm", x, args);
        y = te__run_on(m, "post_attention_layernorm", te__run_on(m, "self_attn", y, args), args);
        x = te_add(x, y);
        y = te__run_on(m, mlp, te__run_on(m, "pre_feedforward_layernorm", x, args), args);
        y = te__run_on(m, "post_feedforward_layernorm", y, args);
        return te__output(m, args, te_add(x, y));
    }
    x = te__add_output(m, "input_layernorm", "self_attn", &te__decoder_attention_class, x, args);
    return te__output(m, args, te__add_output(m, "post_attention_layernorm", mlp, &te__gated_mlp_class, x, args));
}
static const te_module_class te__decoder_layer_class = {"DecoderLayer", 0, te__decoder_layer_forward, NULL, NULL};

/* Always fails: a ModuleList cannot be run, but its children can. */
static te_result te__list_forward(te_module *m, te_forward_args *args) {
    (void)args;
    return te__fail(m->te, TE_ERR_STATE, "ModuleList: \"%s\" is a list of modules; run these", m->name);
}
static const te_module_class te__list_class = {"ModuleList", 0, te__list_forward, NULL, NULL};
