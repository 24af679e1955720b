/* lm/causal_lm.c: CausalLM, a language model of the Llama kind: its forward, and the making of its modules. This file
 * must not depend on files on disk. */

/* ---- GEMMs that stay in high precision ---- */

/* Runs the child `name` with autocast switched off. */
static te_tensor *te__run_plain(te_module *m, const char *name, te_forward_args *args) {
    te_autocast_desc off = TE_ZERO;
    te_tensor *y;
    off.disabled = true;
    if (!te__autocast_now(m->te)) return te__run_child(m, name, args);
    if (te_autocast_begin(m->te, &off) != TE_OK) return NULL;
    y = te__run_child(m, name, args);
    return te_autocast_end(m->te) == TE_OK ? y : NULL;
}

/* ---- DecoderModel, CausalLM ---- */

/* A file of the opened folder, kept in memory. te_hf_save writes it unchanged to the new folder. */
typedef struct te__carried_file {
    const char *name; /* a literal */
    te__text bytes;
    struct te__carried_file *next;
} te__carried_file;

typedef struct te__causal_lm {
    te_causal_lm_desc desc; /* defaults filled in; all pointers but those of groups NULL */
    bool met;               /* the ranks of tp_group have compared the model */
    te_group *world;        /* the ranks that save the model together (te_hf_save), or NULL */
    /* The fields below describe the folder that te_hf_open has read. They are NULL and 0 if the model was created
     * without a folder. */
    char *folder;                 /* the path given to te_hf_open */
    te__model_facts facts;
    char *config;                 /* the text of config.json */
    const te__lm_rule *names;     /* the rules that convert tensors of the files to parameters (lm/families.c) */
    te__carried_file *carried;    /* files of the tokenizer, and generation_config.json */
    te__st_part *kept;          /* tensors of the files that belong to no parameter of the model */
    int num_kept;
} te__causal_lm;
static void te__carried_free(te_ctx *te, te__carried_file *f) {
    while (f) {
        te__carried_file *next = f->next;
        te__text_free(&f->bytes);
        te__free(te, f);
        f = next;
    }
}

/* Rounds x to `dtype` if that is BF16 or F16; returns x unchanged for other dtypes. */
static float te__rounded_to(float x, te_dtype dtype) {
    return dtype == TE_BF16  ? te__bf16_to_f32(te__f32_to_bf16(x))
           : dtype == TE_F16 ? te__f16_to_f32(te__f32_to_f16(x))
                             : x;
}

typedef struct te__decoder_model {
    float embedding_scale; /* 0: none */
    te_group *tokens;      /* ranks that share the tokens between products; NULL: none */
} te__decoder_model;

/* Returns the ids that embed_tokens looks up so that this rank gets its part of the tokens: as [n * b, s / n], whose
 * first dimension n ranks divide, and of a table that is whole on each rank its part of them. */
static te_tensor *te__ids_in_parts(te_module *m, te_tensor *ids, te_group *tokens, int parts) {
    const te_module *table = te_module_find(m, "embed_tokens");
    int64_t shape[2];
    char text[TE__SHAPE_TEXT];
    if (parts < 2) return ids;
    if (ids->ndim != 2 || ids->shape[1] % parts)
        return te__no_tensor(m->te, TE_ERR_SHAPE,
                             "DecoderModel: the ids are %s, and %d ranks share the tokens (sequence_parallel) and must "
                             "divide the second size; pad the sequences",
                             te__shape_text(ids, text), parts);
    shape[0] = ids->shape[0] * parts;
    shape[1] = ids->shape[1] / parts;
    ids = te_tensor_view(te_tensor_contiguous(ids), 2, shape);
    shape[0] /= parts;
    return table && table->parallel.size > 1
               ? ids
               : te_tensor_contiguous(te_tensor_narrow(ids, 0, te__group_rank(tokens) * shape[0], shape[0]));
}
/* ids [b, s] -> normalised hidden states [b, s, hidden], or of n ranks that share the tokens [b, s / n, hidden]. */
static te_result te__decoder_model_forward(te_module *m, te_forward_args *args) {
    const te__decoder_model *s = (const te__decoder_model *)m->state;
    te_module *layers = te_module_find(m, "layers");
    te_tensor *ids = te__ids_in_parts(m, args->input, s->tokens, te__token_parts(m, te__group_size(s->tokens))),
              *x = ids ? te__run_on(m, "embed_tokens", ids, args) : NULL;
    int i;
    if (x && s->embedding_scale != 0.0f) x = te_scale(x, te__rounded_to(s->embedding_scale, x->dtype));
    for (i = 0; i < te_module_num_children(layers) && x; i++) {
        te_forward_args in = TE_ZERO;
        te__hand_on(&in, args);
        in.input = x;
        x = te_forward_with(te_module_child(layers, i), &in);
        /* Frees all temporaries of this forward pass except x and the tensors that the tape holds. */
        if (x) te__frame_sweep(m->te, &x, 1);
    }
    return te__output(m, args, te__run_on(m, "norm", x, args));
}
static const te_module_class te__decoder_model_class = {"DecoderModel", sizeof(te__decoder_model),
                                                        te__decoder_model_forward, NULL, NULL};

/* Returns true if the rotation of the cached keys changes when the sequence grows from `length` to `length` + `added`
 * positions. With longrope, a sequence longer than original_max_position_embeddings rotates all positions by the long
 * factors. */
static bool te__rotation_changes(const te_lm_rotary *r, int64_t length, int64_t added) {
    const int64_t original = r->scaling.original_max_position_embeddings;
    return r->scaling.type == TE_ROPE_LONGROPE && length > 0 && length <= original && length + added > original;
}
/* Narrows the range *least .. *most of cache lengths to those at which a step of `added` tokens rotates keys as it does
 * at `length`. */
static void te__rotation_range(const te_lm_rotary *r, int64_t length, int64_t added, int64_t *least, int64_t *most) {
    const int64_t original = r->scaling.original_max_position_embeddings;
    const bool dynamic = r->scaling.type == TE_ROPE_DYNAMIC, beyond = length + added > original;
    if (!dynamic && r->scaling.type != TE_ROPE_LONGROPE) return;
    if (!beyond) *most = te__min(*most, original - added);
    else if (dynamic || length <= original) *least = *most = length; /* each length has frequencies of its own, or the
                                                                      * step begins a sequence */
    else *least = te__max(*least, original + 1);
}
static te_result te__kv_cache_fits(te_module *m, const te_kv_cache *c, const te_tensor *ids) {
    const te_causal_lm_desc *d = &((const te__causal_lm *)m->state)->desc;
    const int64_t *shape = c->layers[0].k->shape;
    const int heads = d->num_key_value_heads / te__group_size(d->tp_group);
    char text[TE__SHAPE_TEXT];
    if (c->te != m->te || c->num_layers != d->num_hidden_layers || shape[2] != heads ||
        shape[3] != d->head_dim)
        return te__fail(m->te, TE_ERR_INVALID,
                        "CausalLM: kv_cache has %d layers of %lld heads of %lld%s, the model %d of %d of %lld; "
                        "te_kv_cache_create makes one for a model",
                        c->num_layers, (long long)shape[2], (long long)shape[3],
                        c->te != m->te ? " in another context" : "", d->num_hidden_layers, heads,
                        (long long)d->head_dim);
    if (te_grad_enabled(m->te))
        return te__fail(m->te, TE_ERR_STATE,
                        "CausalLM: a call with kv_cache cannot be recorded; open te_no_grad_begin first");
    if (te__rotation_changes(&d->rotary, c->length, ids->shape[1]) ||
        te__rotation_changes(&d->sliding_rotary, c->length, ids->shape[1]))
        return te__fail(m->te, TE_ERR_STATE,
                        "CausalLM: kv_cache has %lld positions, %lld follow, and sequences of more than "
                        "original_max_position_embeddings rotate their keys by long_factor from the first one on; "
                        "te_kv_cache_truncate it to 0, and give all ids again",
                        (long long)c->length, (long long)ids->shape[1]);
    if (ids->shape[0] != c->batch || ids->shape[1] > c->max_length - c->length)
        return te__fail(
            m->te, TE_ERR_INVALID,
            "CausalLM: the ids are %s, and kv_cache has room for %lld sequences of %lld, of which %lld are there",
            te__shape_text(ids, text), (long long)c->batch, (long long)c->max_length, (long long)c->length);
    return TE_OK;
}

/* Returns whether the ranks of tp_group share the vocabulary. */
static bool te__vocab_is_shared(const te_causal_lm_desc *d) { return d->parallel.vocab_parallel == TE_ON; }

/* Returns the last `kept` positions of x [b, s, .]. */
static te_tensor *te__last_positions(te_tensor *x, int64_t kept) {
    return x ? te_tensor_contiguous(te_tensor_narrow(x, 1, x->shape[1] - kept, kept)) : NULL;
}
/* Returns the logits of args->input, this rank's hidden states: of all ranks' tokens, [b, s, columns], where `parts`
 * ranks share these. */
static te_tensor *te__lm_head_logits(te_module *m, te_forward_args *args, int parts) {
    const te_causal_lm_desc *d = &((const te__causal_lm *)m->state)->desc;
    const bool shared = te__vocab_is_shared(d), whole = args->kv_cache || !d->parallel.parallel_output;
    te__parallel p = TE_ZERO;
    te_tensor *x = args->input;
    int64_t shape[3];
    shape[0] = x->shape[0];
    shape[1] = x->shape[1] * parts;
    shape[2] = -1;
    if (d->tie_word_embeddings) {
        if (shared) {
            p.group = d->tp_group;
            p.size = te__group_size(d->tp_group);
            p.mode = TE_PARALLEL_COLUMN;
            p.sequence = parts > 1;
        }
        x = te__lm_logits(x, te_module_parameter(te_module_find(m, "model.embed_tokens"), "weight"), &p, false,
                          &m->met);
    } else if (!d->quantized_lm_head) {
        x = te__run_plain(m, "lm_head", args);
    } else {
        x = args->kv_cache ? te__run_child_alone(m, "lm_head", args) : te__run_child(m, "lm_head", args);
    }
    if (!shared) x = parts > 1 ? te__join_parts(d->tp_group, x, false) : x;
    else if (whole) x = te__join_parts(d->tp_group, x, true);
    return x && parts > 1 ? te_tensor_view(x, 3, shape) : x;
}

/* Compares models and calls of the ranks of tp_group before the first exchange. If one rank fails, all ranks fail. */
static te_result te__causal_lm_meets(te_module *m, const te_forward_args *args, te_result result) {
    te__causal_lm *s = (te__causal_lm *)m->state;
    const te_causal_lm_desc *d = &s->desc;
    const te_lm_parallel_options *p = &d->parallel;
    char what[384] = "", text[TE__SHAPE_TEXT];
    if (te__is_unallocated(args->input) || !te__group_compares(d->tp_group, s->met)) return result;
    if (result == TE_OK)
        snprintf(what, sizeof(what),
                 "CausalLM of %d layers, hidden_size %lld, vocab_size %lld, of ids %s; vocab_parallel %s, "
                 "parallel_output %s, sequence_parallel %s, quantized_lm_head %s",
                 d->num_hidden_layers, (long long)d->hidden_size, (long long)d->vocab_size,
                 te__shape_text(args->input, text), te__vocab_is_shared(d) ? "on" : "off",
                 p->parallel_output ? "true" : "false", p->sequence_parallel ? "true" : "false",
                 d->quantized_lm_head ? "true" : "false");
    result = te__group_compare(d->tp_group, what, result);
    s->met = s->met || (result == TE_OK && !m->te->warming);
    return result;
}
static te_result te__causal_lm_forward(te_module *m, te_forward_args *args) {
    const te_causal_lm_desc *d = &((const te__causal_lm *)m->state)->desc;
    te__functions_state *f = te__functions_of(m->te);
    const bool whole_rows = f->whole_rows,
               keeps = args->logits_to_keep > 0 && args->logits_to_keep < args->input->shape[1];
    te_forward_args in = TE_ZERO;
    te_tensor *x;
    int parts;
    te_result result = TE_OK;
    char text[TE__SHAPE_TEXT];
    if (args->input->ndim != 2 || te__numel(args->input) == 0)
        return te__fail(m->te, TE_ERR_SHAPE, "CausalLM: the ids are %s; [b, s] is needed, at least one of each",
                        te__shape_text(args->input, text));
    if (args->logits_to_keep < 0 || args->logits_to_keep > args->input->shape[1])
        return te__fail(m->te, TE_ERR_INVALID,
                        "CausalLM: logits_to_keep is %lld, and the ids are %s; 0, for all logits, to %lld are possible",
                        (long long)args->logits_to_keep, te__shape_text(args->input, text),
                        (long long)args->input->shape[1]);
    if (args->kv_cache) {
        const int64_t length = args->kv_cache->length, added = args->input->shape[1];
        int64_t least = 0, most = INT64_MAX;
        result = te__kv_cache_fits(m, args->kv_cache, args->input);
        te__rotation_range(&d->rotary, length, added, &least, &most);
        te__rotation_range(&d->sliding_rotary, length, added, &least, &most);
        if (result == TE_OK) result = te__kv_cache_begin(args->kv_cache, added, least, most);
    }
    result = te__causal_lm_meets(m, args, result);
    if (result != TE_OK) return result;
    te__hand_on(&in, args);
    in.input = args->input;
    f->whole_rows = whole_rows || args->kv_cache; /* a step has a token or a few, which ranks need not divide */
    parts = te__token_parts(m, d->parallel.sequence_parallel ? te__group_size(d->tp_group) : 1);
    x = te__run_child(m, "model", &in);
    if (x && parts == 1 && keeps) x = te__last_positions(x, args->logits_to_keep);
    in.input = x;
    if (x) x = te__lm_head_logits(m, &in, parts);
    if (x && parts > 1 && keeps) x = te__last_positions(x, args->logits_to_keep);
    f->whole_rows = whole_rows;
    if (!x) return te_error_code(m->te);
    if (d->final_logit_softcapping != 0.0f) x = te_softcap(x, d->final_logit_softcapping);
    if (x && args->kv_cache) result = te__kv_cache_end(args->kv_cache, args->input->shape[1]);
    return result == TE_OK ? te__output(m, args, x) : result;
}
static void te__causal_lm_destroy(te_module *m) {
    te__causal_lm *s = (te__causal_lm *)m->state;
    te__free(m->te, s->config);
    te__free(m->te, s->folder);
    te__carried_free(m->te, s->carried);
    te__st_free_kept(m->te, s->kept, s->num_kept);
}
static const te_module_class te__causal_lm_class = {"CausalLM", sizeof(te__causal_lm), te__causal_lm_forward,
                                                    te__causal_lm_destroy, NULL};
TE_API te_group *te_causal_lm_logits_group(const te_module *m) {
    const te_causal_lm_desc *d =
        m && m->cls == &te__causal_lm_class ? &((const te__causal_lm *)m->state)->desc : NULL;
    return d && te__vocab_is_shared(d) && d->parallel.parallel_output ? d->tp_group : NULL;
}

/* Makes the tensors of a layer, of which `shape` is that of the keys. Returns false on failure. */
static bool te__kv_layer_make(te_ctx *te, te__kv_layer *l, te_dtype dtype, const int64_t shape[4]) {
    const bool codes = dtype == TE_F8E4M3;
    l->k = te_tensor_retain(te_tensor_zeros(te, dtype, 4, shape));
    l->v = te_tensor_retain(te_tensor_zeros(te, dtype, 4, shape));
    if (codes) l->k_factors = te_tensor_retain(te_tensor_zeros(te, TE_F8E8M0, 3, shape));
    if (codes) l->v_factors = te_tensor_retain(te_tensor_zeros(te, TE_F8E8M0, 3, shape));
    return l->k && l->v && (!codes || (l->k_factors && l->v_factors));
}
TE_API te_kv_cache *te_kv_cache_create(te_module *model, int64_t batch, int64_t max_length) {
    te_kv_cache_desc desc = TE_ZERO;
    desc.batch = batch;
    desc.max_length = max_length;
    return te_kv_cache_create_with(model, &desc);
}
TE_API te_kv_cache *te_kv_cache_create_with(te_module *model, const te_kv_cache_desc *desc) {
    const te_causal_lm_desc *d;
    const te_tensor *table;
    te_kv_cache *c;
    te_ctx *te;
    bool warming, made;
    int64_t batch, max_length;
    te_dtype dtype;
    int i;
    if (!model || !te__has_desc(model->te, desc, "te_kv_cache_create_with")) return NULL;
    te = model->te;
    batch = desc->batch;
    max_length = desc->max_length;
    d = &((const te__causal_lm *)model->state)->desc;
    if (model->cls != &te__causal_lm_class || batch < 1 || max_length < 1 || max_length > INT32_MAX / batch) {
        te__fail(te, TE_ERR_INVALID,
                 "te_kv_cache_create: a %s, %lld sequences of %lld; a CausalLM, at least one of one, and less than "
                 "2^31 positions in all, are needed",
                 model->cls->name, (long long)batch, (long long)max_length);
        return NULL;
    }
    if (te->capture) {
        te__refuse_capture(te, "te_kv_cache_create", "make the cache before te_graph_begin");
        return NULL;
    }
    /* The cache gets the dtype of the embedding table. A model that has been cast has another dtype than its desc. */
    table = te_module_parameter(te_module_find(model, "model.embed_tokens"), "weight");
    dtype = table ? table->dtype : d->params_dtype;
    if (desc->dtype && desc->dtype != dtype && desc->dtype != TE_F8E4M3) {
        te__fail(te, TE_ERR_DTYPE,
                 "te_kv_cache_create_with: dtype is %s, and the model is %s; 0, %s and e4m3 are possible",
                 te_dtype_name(desc->dtype), te_dtype_name(dtype), te_dtype_name(dtype));
        return NULL;
    }
    if (desc->dtype) dtype = desc->dtype;
    if (dtype == TE_F8E4M3 && d->head_dim > TE__CODED_ROW) {
        te__fail(te, TE_ERR_UNSUPPORTED,
                 "te_kv_cache_create_with: dtype is e4m3, and heads have %lld channels; at most %d are possible",
                 (long long)d->head_dim, (int)TE__CODED_ROW);
        return NULL;
    }
    c = (te_kv_cache *)te__alloc_zero(te, sizeof(*c));
    if (!c) return NULL;
    c->te = te;
    c->batch = batch;
    c->max_length = max_length;
    te__closable_add(te, &c->closable, "cache", te__kv_cache_close, c);
    c->layers = (te__kv_layer *)te__alloc_zero(te, (size_t)d->num_hidden_layers * sizeof(te__kv_layer));
    if (c->layers) c->num_layers = d->num_hidden_layers;
    int64_t shape[4] = {batch, max_length, d->num_key_value_heads / te__group_size(d->tp_group), d->head_dim};
    /* After te_warmup_begin no kernels run. But positions that are not taken must be finite even then, because
     * attention multiplies them by 0. */
    warming = te->warming;
    te->warming = false;
    te__frame_begin(te);
    c->numbers = te_tensor_retain(te__empty_1d(te, TE_I32, 3 * batch + 2));
    for (i = 0; i < c->num_layers && c->numbers; i++) {
        if (!te__kv_layer_make(te, &c->layers[i], dtype, shape)) break;
    }
    te__frame_end(te, NULL, 0);
    made = c->layers && i == c->num_layers && te__kv_cache_write(c, 1) == TE_OK;
    te->warming = warming;
    if (made) return c;
    te_kv_cache_destroy(c);
    return NULL;
}

/* ---- making ---- */

static void te__add_linear(te_module *parent, const te_causal_lm_desc *d, const char *name, int64_t in, int64_t out,
                           bool bias, te_parallel_mode mode) {
    te_linear_desc l = TE_ZERO;
    if (te__group_size(d->tp_group) > 1 && mode != TE_PARALLEL_NONE) {
        l.parallel.parallel_mode = mode;
        l.parallel.tp_group = d->tp_group;
        l.parallel.sequence_parallel = d->parallel.sequence_parallel;
        l.parallel.ub_overlap_ag = d->parallel.ub_overlap_ag;
        l.parallel.ub_overlap_rs = d->parallel.ub_overlap_rs;
        l.parallel.ub_overlap_rs_dgrad = d->parallel.ub_overlap_rs_dgrad;
        l.parallel.ub_bulk_dgrad = d->parallel.ub_bulk_dgrad;
        l.parallel.ub_bulk_wgrad = d->parallel.ub_bulk_wgrad;
    }
    l.name = name;
    l.in_features = in;
    l.out_features = out;
    l.gemm.no_bias = !bias;
    l.gemm.params_dtype = d->params_dtype;
    l.gemm.device = d->device;
    l.gemm.init = d->init;
    te__adopt(parent, name, te_linear_create(parent->te, &l));
}
/* Adds lm_head: a Linear without bias, whose weight is stored quantized only with quantized_lm_head. */
static void te__add_lm_head(te_module *parent, const te_causal_lm_desc *d) {
    static const char name[] = "lm_head";
    te_quantized_model_init_desc off = TE_ZERO;
    te_module *m;
    off.disabled = true;
    if (!d->quantized_lm_head && te_quantized_model_init_begin(parent->te, &off) != TE_OK) return;
    te__add_linear(parent, d, name, d->hidden_size, d->vocab_size, false,
                   te__vocab_is_shared(d) ? TE_PARALLEL_COLUMN : TE_PARALLEL_NONE);
    if (!d->quantized_lm_head) te_quantized_model_init_end(parent->te);
    m = te_module_find(parent, name);
    if (d->parallel.sequence_parallel && !te__vocab_is_shared(d)) te__takes_own_tokens(m);
    if (m && !d->quantized_lm_head)
        m->entries[0].product_weight = false; /* so a meta weight stays unquantized when it gets memory */
}
static void te__add_norm(te_module *parent, const te_causal_lm_desc *d, const char *name, int64_t size) {
    te_norm_desc n = TE_ZERO;
    n.name = name;
    n.hidden_size = size;
    n.norm.eps = d->rms_norm_eps;
    n.norm.zero_centered_gamma = d->zero_centered_gamma;
    n.params_dtype = d->params_dtype;
    n.device = d->device;
    n.parallel.sequence_parallel = d->parallel.sequence_parallel;
    te__adopt(parent, name, te_rmsnorm_create(parent->te, &n));
}

static te_module *te__decoder_attention_create(te_ctx *te, const te_causal_lm_desc *d, int layer, bool slides) {
    const te_lm_rotary *r = slides ? &d->sliding_rotary : &d->rotary;
    const int64_t channels = d->num_attention_heads * d->head_dim, kv_channels = d->num_key_value_heads * d->head_dim;
    te_sdpa_desc core = TE_ZERO;
    te_module *outer, *m = te__open_part(te, &te__decoder_attention_class, "self_attn", &outer);
    te__decoder_attention *s;
    int i;
    if (!m) return NULL;
    s = (te__decoder_attention *)m->state;
    s->layer = layer;
    s->of.heads = d->num_attention_heads / te__group_size(d->tp_group);
    s->of.groups = d->num_key_value_heads / te__group_size(d->tp_group);
    s->of.head_dim = d->head_dim;
    s->parts = d->parallel.sequence_parallel ? te__group_size(d->tp_group) : 1;
    te_module_set_attribute(m, TE__HEAD_FACTS, &s->of, NULL);
    s->norm = d->qk_norm;
    s->rotary.base = r->base;
    s->rotary.scaling = r->scaling;
    /* the added 0.5 ensures that floor(rotary_percent * head_dim) equals rotary_dim in spite of float rounding */
    if (r->rotary_dim) s->rotary.rotary_percent = ((float)r->rotary_dim + 0.5f) / (float)d->head_dim;
    te__decoder_attention_factors(m, r->rotary_dim);
    te__add_linear(m, d, "q_proj", d->hidden_size, channels, d->qkv_bias, TE_PARALLEL_COLUMN);
    te__add_linear(m, d, "k_proj", d->hidden_size, kv_channels, d->qkv_bias, TE_PARALLEL_COLUMN);
    te__add_linear(m, d, "v_proj", d->hidden_size, kv_channels, d->qkv_bias, TE_PARALLEL_COLUMN);
    te__add_linear(m, d, "o_proj", channels, d->hidden_size, d->o_bias, TE_PARALLEL_ROW);
    if (d->qk_norm) {
        te__add_norm(m, d, "q_norm", d->head_dim);
        te__add_norm(m, d, "k_norm", d->head_dim);
        for (i = 0; i < 2 && te__group_size(d->tp_group) > 1; i++) /* each rank has gradients of its heads */
            te_tensor_set_sequence_parallel(te_module_parameter(te_module_find(m, i ? "k_norm" : "q_norm"), "weight"),
                                            true);
    }
    core.format = TE_BSHD;
    core.rule.mask = TE_MASK_CAUSAL;
    core.rule.window.on = slides;
    core.rule.window.left = d->sliding_window - 1;
    core.rule.softmax_scale = d->softmax_scale;
    core.rule.softcap = d->attn_logit_softcapping;
    core.rule.dropout_p = d->attention_dropout;
    te__adopt(m, "sdpa", te_sdpa_create(te, &core));
    te__sdpa_share(te_module_find(m, "sdpa"), d->cp_group, slides, d->tp_group);
    return te__close_part(m, outer);
}

static te_module *te__decoder_mlp_create(te_ctx *te, const te_causal_lm_desc *d) {
    te__gated_mlp state = TE_ZERO;
    te_module *outer, *m;
    state.gate = "gate_proj";
    state.up = "up_proj";
    state.down = "down_proj";
    state.activation = d->activation;
    m = te__gated_mlp_open(te, "mlp", &state, &outer);
    if (!m) return NULL;
    te__add_linear(m, d, state.gate, d->hidden_size, d->intermediate_size, d->mlp_bias, TE_PARALLEL_COLUMN);
    te__add_linear(m, d, state.up, d->hidden_size, d->intermediate_size, d->mlp_bias, TE_PARALLEL_COLUMN);
    te__add_linear(m, d, state.down, d->intermediate_size, d->hidden_size, d->mlp_bias, TE_PARALLEL_ROW);
    return te__close_part(m, outer);
}
#ifdef TE_NO_MOE
static te_module *te__decoder_experts_create(te_ctx *te, const te_causal_lm_desc *d) {
    return te__no_module(
        te, TE_ERR_UNSUPPORTED,
        "te_causal_lm_create: num_local_experts is %d, and te.h was compiled with TE_NO_MOE; compile it without",
        d->num_local_experts);
}
#else
static te_module *te__decoder_experts_create(te_ctx *te, const te_causal_lm_desc *d) {
    te__moe_block block = TE_ZERO;
    te_moe_config *c = &block.config;
    c->name = "block_sparse_moe";
    c->n_routed_experts = d->num_local_experts;
    c->n_activated_experts = d->num_experts_per_tok;
    c->dim = d->hidden_size;
    c->moe_inter_dim = d->moe_intermediate_size ? d->moe_intermediate_size : d->intermediate_size;
    c->softmax_before_topk = d->norm_topk_prob == TE_OFF; /* otherwise softmax of the top-k scores, with sum 1 */
    c->expert_bias = d->mlp_bias;
    c->dtype = d->params_dtype;
    c->device = d->device;
    block.init = d->init;
    block.activation = d->activation;
    block.ep_group = d->ep_group;
    block.gate = "w1";
    block.up = "w3";
    block.down = "w2";
    return te__moe_block_create(te, &block);
}
#endif

static te_module *te__decoder_layer_create(te_ctx *te, const te_causal_lm_desc *d, int layer, const char *name) {
    const bool slides = d->sliding_window > 0 && (!d->sliding_layers || d->sliding_layers[layer]);
    te_module *outer, *m = te__open_part(te, &te__decoder_layer_class, name, &outer);
    if (!m) return NULL;
    te__add_norm(m, d, "input_layernorm", d->hidden_size);
    te__adopt(m, "self_attn", te__decoder_attention_create(te, d, layer, slides));
    te__add_norm(m, d, "post_attention_layernorm", d->hidden_size);
    if (d->feedforward_norms) {
        te__add_norm(m, d, "pre_feedforward_layernorm", d->hidden_size);
        te__add_norm(m, d, "post_feedforward_layernorm", d->hidden_size);
    }
    if (d->num_local_experts && !(d->dense_layers && d->dense_layers[layer])) {
        te__adopt(m, "block_sparse_moe", te__decoder_experts_create(te, d));
        if (d->parallel.sequence_parallel) te__takes_own_tokens(te_module_find(m, "block_sparse_moe"));
    } else
        te__adopt(m, "mlp", te__decoder_mlp_create(te, d));
    return te__close_part(m, outer);
}

static te_module *te__decoder_model_create(te_ctx *te, const te_causal_lm_desc *d) {
    te_embedding_desc table = TE_ZERO;
    te_module *outer, *m = te__open_part(te, &te__decoder_model_class, "model", &outer), *list;
    te__decoder_model *s;
    int i;
    if (!m) return NULL;
    s = (te__decoder_model *)m->state;
    s->embedding_scale = d->embedding_scale;
    s->tokens = d->parallel.sequence_parallel ? d->tp_group : NULL;
    table.num_embeddings = d->vocab_size;
    table.embedding_dim = d->hidden_size;
    table.params_dtype = d->params_dtype;
    table.device = d->device;
    table.init = d->init;
    if (te__vocab_is_shared(d)) {
        table.parallel.tp_group = d->tp_group;
        table.parallel.sequence_parallel = d->parallel.sequence_parallel;
    }
    te__adopt(m, "embed_tokens", te_embedding_create(te, &table));
    if (d->parallel.sequence_parallel && !te__vocab_is_shared(d))
        te__takes_own_tokens(te_module_find(m, "embed_tokens"));
    list = te_module_create(te, &te__list_class, "layers");
    te__adopt(m, "layers", list);
    for (i = 0; i < d->num_hidden_layers && te_error_code(te) == TE_OK; i++) {
        char name[16];
        snprintf(name, sizeof(name), "%d", i);
        te__adopt(list, name, te__decoder_layer_create(te, d, i, name));
    }
    te__add_norm(m, d, "norm", d->hidden_size);
    return te__close_part(m, outer);
}

static bool te__lm_rotary_ok(te_ctx *te, const char *who, const char *which, int rotary_dim, int64_t head_dim) {
    if (rotary_dim >= 0 && rotary_dim <= head_dim && rotary_dim % 2 == 0) return true;
    return te__not_ok(
        te, TE_ERR_INVALID,
        "%s: %s.rotary_dim is %d of %lld channels of a head; an even number of these is possible, 0 for all", who,
        which, rotary_dim, (long long)head_dim);
}
/* Fills in the defaults and checks the sizes. If the sizes do not fit, sets an error and returns false. */
static bool te__causal_lm_ok(te_ctx *te, te_causal_lm_desc *d) {
    const char *const who = "te_causal_lm_create";
    int ranks;
    if (!d->num_key_value_heads) d->num_key_value_heads = d->num_attention_heads;
    if (!d->head_dim && d->num_attention_heads > 0 && d->hidden_size % d->num_attention_heads == 0)
        d->head_dim = d->hidden_size / d->num_attention_heads;
    if (!d->activation) d->activation = TE_SWIGLU;
    if (!d->params_dtype) d->params_dtype = TE_BF16;
    if (d->num_hidden_layers < 1 || d->num_attention_heads < 1 || d->num_key_value_heads < 1 ||
        d->num_attention_heads % d->num_key_value_heads || d->head_dim < 1 ||
        d->head_dim > TE__MAX_LAYER_SIZE / d->num_attention_heads)
        return te__not_ok(
            te, TE_ERR_INVALID,
            "%s: %d layers, hidden_size %lld, %d heads of %lld channels, %d of keys and values; there is at least "
            "one of each, the heads divide the hidden size (or head_dim is "
            "given), and those of keys and values divide the heads",
            who, d->num_hidden_layers, (long long)d->hidden_size, d->num_attention_heads, (long long)d->head_dim,
            d->num_key_value_heads);
    if (te__group_allowed(te, d->tp_group, who, "tp_group") != TE_OK ||
        te__group_allowed(te, d->cp_group, who, "cp_group") != TE_OK ||
        te__group_allowed(te, d->ep_group, who, "ep_group") != TE_OK)
        return false;
    ranks = te__group_size(d->tp_group);
    if (d->num_attention_heads % ranks || d->num_key_value_heads % ranks || d->intermediate_size % ranks)
        return te__not_ok(te, TE_ERR_INVALID,
                          "%s: tp_group has %d ranks, and there are %d heads, %d of keys and values, and "
                          "intermediate_size %lld; the ranks must divide each",
                          who, ranks, d->num_attention_heads, d->num_key_value_heads, (long long)d->intermediate_size);
    if (!te__is_switch(d->parallel.vocab_parallel))
        return te__not_ok(te, TE_ERR_INVALID,
                          "%s: parallel.vocab_parallel is %d; TE_DEFAULT (0), TE_ON (1) and TE_OFF (2) are possible",
                          who, (int)d->parallel.vocab_parallel);
    if (d->parallel.vocab_parallel == TE_ON && d->vocab_size % ranks)
        return te__not_ok(te, TE_ERR_INVALID,
                          "%s: tp_group has %d ranks, and vocab_size is %lld; the ranks must divide it to share it "
                          "(vocab_parallel): pad the vocabulary, or leave the option to its default",
                          who, ranks, (long long)d->vocab_size);
    d->parallel.vocab_parallel =
        ranks > 1 && te__switch(d->parallel.vocab_parallel, d->vocab_size % ranks == 0) ? TE_ON : TE_OFF;
    d->parallel.sequence_parallel = d->parallel.sequence_parallel && ranks > 1;
    ranks = te__group_size(d->ep_group);
    if (d->num_local_experts % ranks || (ranks > 1 && !d->num_local_experts))
        return te__not_ok(te, TE_ERR_INVALID,
                          "%s: ep_group has %d ranks, and num_local_experts is %d; the ranks must divide the experts",
                          who, ranks, d->num_local_experts);
    if (!te__lm_rotary_ok(te, who, "rotary", d->rotary.rotary_dim, d->head_dim) ||
        !te__lm_rotary_ok(te, who, "sliding_rotary", d->sliding_rotary.rotary_dim, d->head_dim))
        return false;
    if (!te_activation_is_gated(d->activation))
        return te__not_ok(te, TE_ERR_INVALID, "%s: activation %d; a gated one is needed, TE_SWIGLU (%d) say", who,
                          (int)d->activation, (int)TE_SWIGLU);
    if (d->num_local_experts < 0 || d->num_local_experts > TE_MAX_GEMMS ||
        d->num_experts_per_tok < (d->num_local_experts ? 1 : 0) || d->num_experts_per_tok > d->num_local_experts)
        return te__not_ok(
            te, TE_ERR_INVALID,
            "%s: %d of %d experts for each token (num_experts_per_tok, num_local_experts); one at least and all "
            "at most of up to %d are possible",
            who, d->num_experts_per_tok, d->num_local_experts, TE_MAX_GEMMS);
    if (!te__is_switch(d->norm_topk_prob) || d->moe_intermediate_size < 0 ||
        (!d->num_local_experts && (d->norm_topk_prob || d->moe_intermediate_size || d->dense_layers)))
        return te__not_ok(
            te, TE_ERR_INVALID,
            "%s: norm_topk_prob %d, moe_intermediate_size %lld, dense_layers %s and num_local_experts %d; the "
            "first is a te_switch, the second 0 or more, and without experts all stay 0",
            who, (int)d->norm_topk_prob, (long long)d->moe_intermediate_size, d->dense_layers ? "given" : "NULL",
            d->num_local_experts);
    if (d->quantized_lm_head && d->tie_word_embeddings)
        return te__not_ok(te, TE_ERR_INVALID,
                          "%s: quantized_lm_head and tie_word_embeddings are true, and a tied model has no lm_head: "
                          "the embedding's table, which stays in high precision, gives its logits; leave one of them "
                          "false",
                          who);
    return te__layer_desc_ok(te, who, d->vocab_size, d->hidden_size, d->params_dtype) &&
           te__layer_desc_ok(te, who, d->hidden_size,
                             d->moe_intermediate_size ? d->moe_intermediate_size : d->intermediate_size,
                             d->params_dtype) &&
           te__layer_desc_ok(te, who, d->hidden_size, d->intermediate_size, d->params_dtype);
}

TE_API te_module *te_causal_lm_create(te_ctx *te, const te_causal_lm_desc *desc) {
    te_causal_lm_desc d;
    te_module *m, *outer;
    te__causal_lm *s;
    if (!te || !te__has_desc(te, desc, "te_causal_lm_create")) return NULL;
    d = *desc;
    if (!te__causal_lm_ok(te, &d)) return NULL;
    m = te__begin_part(te__module_named(te, &te__causal_lm_class, d.name, "causal_lm"), &outer);
    if (!m) return NULL;
    te__adopt(m, "model", te__decoder_model_create(te, &d));
    if (!d.tie_word_embeddings) te__add_lm_head(m, &d);
    s = (te__causal_lm *)m->state;
    s->desc = d;
    s->desc.sliding_layers = s->desc.dense_layers = NULL;
    s->desc.rotary.scaling.short_factor = s->desc.rotary.scaling.long_factor = NULL;
    s->desc.sliding_rotary.scaling.short_factor = s->desc.sliding_rotary.scaling.long_factor = NULL;
    s->desc.name = NULL;
    te__module_shares(m, d.tp_group);
    if (d.tie_word_embeddings) s->facts.table = "model.embed_tokens";
    te_module_set_attribute(m, TE__MODEL_FACTS, &s->facts, NULL);
    return te__close_part(m, outer);
}
