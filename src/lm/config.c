/* lm/config.c: converts a config.json of Hugging Face transformers to a te_causal_lm_desc. Each family of models has a
 * row in the table te__lm_families (lm/families.c). The row controls the conversion. This file must not depend on
 * weights.
 *
 * Every key that changes the computation is either read or rejected. So a model that te_hf_open opens computes the same
 * as in transformers. */

enum { TE__HF_MAX_CONFIG = 16 << 20, TE__HF_MAX_LAYERS = 100000, TE__LM_ROWS = 4 };

/* A list of integers from the file: layer numbers, or one flag per layer. */
typedef struct te__lm_list {
    int64_t *items;
    int n, cap;
} te__lm_list;

/* The keys of a config.json, or of a JSON text in te__lm_families. A missing key is NAN, -1 or NULL, depending on its
 * type (io/config_keys.c). */
typedef struct te__lm_config {
    te__json j;
    char *text; /* a copy of the text; j parses it in place, and all char * fields point into it */
    char *model_type, *hidden_act, *hidden_activation;
    int64_t vocab_size, hidden_size, intermediate_size, num_hidden_layers, num_attention_heads, num_key_value_heads,
        head_dim;
    int64_t sliding_window, max_window_layers, sliding_window_pattern, num_local_experts, num_experts_per_tok,
        moe_intermediate_size, decoder_sparse_step, original_max_position_embeddings, max_position_embeddings;
    double rms_norm_eps, rope_theta, rope_local_base_freq, query_pre_attn_scalar, attn_logit_softcapping,
        final_logit_softcapping, attention_dropout, partial_rotary_factor, router_jitter_noise, resid_pdrop;
    /* 0, 1, or -1 if missing */
    int64_t tie_word_embeddings, attention_bias, mlp_bias, use_sliding_window, use_bidirectional_attention, is_causal,
        norm_topk_prob;
    /* Traits of the family (te__lm_traits): 1 if te__lm_families gives the trait to the family, otherwise -1. */
    int64_t qkv_bias, qk_norm, zero_centered_gamma, scaled_embedding, feedforward_norms, experts, gelu_is_tanh,
        null_kv_heads, lists_layer_types, lists_dense_layers, rope_by_layer_type, partial_rotary, longrope_alone,
        uncapped_scores, uncapped_logits;
    /* `scaling` is the object "rope_scaling", and `parameters` is "rope_parameters". `full` and `sliding` are the
     * objects "full_attention" and "sliding_attention" inside of "rope_parameters". */
    te__hf_rope scaling, parameters, full, sliding;
    te__lm_list layer_types, mlp_only_layers;       /* layer_types has 1 for "sliding_attention", 0 for
                                                     * "full_attention" */
    const char *other_layer; /* the first entry of "layer_types" that te.h does not support; NULL: none */
    bool *slides, *dense;    /* [num_hidden_layers]; the te_causal_lm_desc points to them as sliding_layers and
                              * dense_layers. NULL: not allocated */
    bool quantized, per_layer; /* quantized: the file has "quantization_config"; per_layer: it has "per_layer_config" */
    size_t inner_at;           /* the value of "text_config" begins at text + inner_at; 0: missing */
    struct te__lm_config *rows; /* [TE__LM_ROWS] the parsed JSON texts of the family; char * fields of this struct may
                                 * point into these texts */
} te__lm_config;

#define TE__LM_KEY(kind, name) {#name, kind, offsetof(te__lm_config, name)}
/* Keys that all families read. Some have an effect only if the family has a certain trait. */
static const te__hf_key te__lm_keys[] = {
    TE__LM_KEY(TE__HF_STRING, model_type),
    TE__LM_KEY(TE__HF_STRING, hidden_act),
    TE__LM_KEY(TE__HF_COUNT, vocab_size),
    TE__LM_KEY(TE__HF_COUNT, hidden_size),
    TE__LM_KEY(TE__HF_COUNT, intermediate_size),
    TE__LM_KEY(TE__HF_COUNT, num_hidden_layers),
    TE__LM_KEY(TE__HF_COUNT, num_attention_heads),
    TE__LM_KEY(TE__HF_COUNT, num_key_value_heads),
    TE__LM_KEY(TE__HF_COUNT, head_dim),
    TE__LM_KEY(TE__HF_COUNT, num_local_experts),
    {"num_experts", TE__HF_COUNT, offsetof(te__lm_config, num_local_experts)},
    TE__LM_KEY(TE__HF_COUNT, num_experts_per_tok),
    TE__LM_KEY(TE__HF_COUNT, original_max_position_embeddings),
    TE__LM_KEY(TE__HF_COUNT, max_position_embeddings),
    TE__LM_KEY(TE__HF_NUMBER, rms_norm_eps),
    TE__LM_KEY(TE__HF_NUMBER, rope_theta),
    TE__LM_KEY(TE__HF_NUMBER, partial_rotary_factor),
    TE__LM_KEY(TE__HF_NUMBER, attention_dropout),
    TE__LM_KEY(TE__HF_BOOL, tie_word_embeddings),
    TE__LM_KEY(TE__HF_BOOL, is_causal),
    TE__LM_KEY(TE__HF_BOOL, use_bidirectional_attention)};
/* Keys that only some families read. The field `reads` of a te__lm_family lists those that the family reads. */
static const te__hf_key te__lm_own_keys[] = {
    TE__LM_KEY(TE__HF_STRING, hidden_activation),
    TE__LM_KEY(TE__HF_COUNT, sliding_window),
    TE__LM_KEY(TE__HF_COUNT, max_window_layers),
    TE__LM_KEY(TE__HF_COUNT, sliding_window_pattern),
    TE__LM_KEY(TE__HF_COUNT, moe_intermediate_size),
    TE__LM_KEY(TE__HF_COUNT, decoder_sparse_step),
    TE__LM_KEY(TE__HF_NUMBER, rope_local_base_freq),
    TE__LM_KEY(TE__HF_NUMBER, query_pre_attn_scalar),
    TE__LM_KEY(TE__HF_CAP, attn_logit_softcapping),
    TE__LM_KEY(TE__HF_CAP, final_logit_softcapping),
    TE__LM_KEY(TE__HF_NUMBER, router_jitter_noise),
    TE__LM_KEY(TE__HF_NUMBER, resid_pdrop),
    TE__LM_KEY(TE__HF_BOOL, attention_bias),
    TE__LM_KEY(TE__HF_BOOL, mlp_bias),
    TE__LM_KEY(TE__HF_BOOL, use_sliding_window),
    TE__LM_KEY(TE__HF_BOOL, norm_topk_prob)};
/* Traits are properties of a model family. Only te__lm_families can set them; a config.json cannot. */
static const te__hf_key te__lm_traits[] = {
    TE__LM_KEY(TE__HF_BOOL, qkv_bias),            /* q_proj, k_proj and v_proj have a bias, despite attention_bias */
    TE__LM_KEY(TE__HF_BOOL, qk_norm),             /* the field of this name in te_causal_lm_desc */
    TE__LM_KEY(TE__HF_BOOL, zero_centered_gamma), /* the field of this name in te_causal_lm_desc */
    TE__LM_KEY(TE__HF_BOOL, feedforward_norms),   /* the field of this name in te_causal_lm_desc */
    TE__LM_KEY(TE__HF_BOOL, scaled_embedding),    /* the embedding's rows are multiplied by sqrt(hidden_size) */
    TE__LM_KEY(TE__HF_BOOL, experts),             /* the layers have experts (MoE) */
    TE__LM_KEY(TE__HF_BOOL, lists_dense_layers),  /* "mlp_only_layers" and "decoder_sparse_step" are obeyed */
    TE__LM_KEY(TE__HF_BOOL, gelu_is_tanh),        /* "gelu" in the file means gelu_pytorch_tanh */
    TE__LM_KEY(TE__HF_BOOL, null_kv_heads),       /* a null num_key_value_heads means num_attention_heads */
    TE__LM_KEY(TE__HF_BOOL, lists_layer_types),   /* "layer_types" says which layers have a window */
    TE__LM_KEY(TE__HF_BOOL, rope_by_layer_type),  /* layers with a sliding window have their own RoPE base and
                                                   * scaling */
    TE__LM_KEY(TE__HF_BOOL, partial_rotary),      /* partial_rotary_factor may be less than 1 */
    TE__LM_KEY(TE__HF_BOOL, longrope_alone),      /* the RoPE types "su" and "yarn" mean "longrope"; types other than
                                                   * "longrope" and "default" are refused */
    TE__LM_KEY(TE__HF_BOOL, uncapped_scores),     /* transformers ignores attn_logit_softcapping */
    TE__LM_KEY(TE__HF_BOOL, uncapped_logits)};    /* transformers ignores final_logit_softcapping */
#undef TE__LM_KEY
/* The three tables of keys above. */
static const struct {
    const te__hf_key *keys;
    int n;
} te__lm_tables[3] = {{te__lm_keys, TE__COUNT(te__lm_keys)},
                      {te__lm_own_keys, TE__COUNT(te__lm_own_keys)},
                      {te__lm_traits, TE__COUNT(te__lm_traits)}};

/* ---- reading ---- */

static void te__lm_config_close(te__lm_config *c) {
    te_ctx *te = c->j.te;
    int i;
    te__free(te, c->text);
    te__free(te, c->layer_types.items);
    te__free(te, c->mlp_only_layers.items);
    te__free(te, c->slides);
    te__free(te, c->dense);
    for (i = 0; i < TE__LM_ROWS && c->rows; i++) te__free(te, c->rows[i].text);
    te__free(te, c->rows);
}

/* Parses a RoPE object into `rope`. If `by_kind` is true, "full_attention" and "sliding_attention" in it are RoPE
 * objects for c->full and c->sliding. */
static bool te__lm_parse_rope(te__lm_config *c, te__hf_rope *rope, bool by_kind) {
    te__json *j = &c->j;
    const char *name;
    if (te__json_word(j) == 2) return true;
    for (name = te__json_first(j); name; name = te__json_next(j)) {
        if (by_kind && strcmp(name, "full_attention") == 0) te__lm_parse_rope(c, &c->full, false);
        else if (by_kind && strcmp(name, "sliding_attention") == 0) te__lm_parse_rope(c, &c->sliding, false);
        else te__hf_rope_take(j, rope, name);
    }
    return !j->failed;
}

/* Parses the value of key `name` into `list`; null leaves `list` empty. If `kinds` is true, the value lists attention
 * types, stored as 1 for sliding and 0 for full. Otherwise it lists numbers. */
static bool te__lm_parse_list(te__lm_config *c, te__lm_list *list, const char *name, bool kinds) {
    te__json *j = &c->j;
    bool more;
    if (te__json_word(j) == 2) return true;
    if (list->n) return te__json_fail(j, "\"%s\" is given twice", name);
    for (more = te__json_open(j, '[', ']'); more; more = te__json_more(j, ']')) {
        const char *kind = kinds ? te__json_string(j) : "";
        const int64_t item = kinds ? kind && kind[0] == 's' : (int64_t)te__json_uint(j);
        if (j->failed) return false;
        if (kinds && !c->other_layer && strcmp(kind, "full_attention") != 0 && strcmp(kind, "sliding_attention") != 0)
            c->other_layer = kind;
        if (c->other_layer) continue;
        if (list->n == TE__HF_MAX_LAYERS)
            return te__json_fail(j, "\"%s\" has more than %d entries", name, (int)TE__HF_MAX_LAYERS);
        if (!te__grow(j->te, (void **)&list->items, &list->cap, list->n, sizeof(int64_t))) return false;
        list->items[list->n++] = item;
    }
    return !j->failed;
}

/* Skips a value; returns false if the value is null. */
static bool te__hf_is_there(te__json *j) {
    if (te__json_word(j) == 2) return false;
    te__json_skip(j, 0);
    return true;
}

/* Reads the value of key `name` if one of the first `num_tables` tables has the key; otherwise skips the value. */
static bool te__lm_take(te__lm_config *c, const char *name, int num_tables) {
    bool known = false;
    int i;
    for (i = 0; i < num_tables && !known; i++)
        if (!te__hf_take(&c->j, c, te__lm_tables[i].keys, te__lm_tables[i].n, name, &known)) return false;
    if (!known) te__json_skip(&c->j, 0);
    return !c->j.failed;
}
static bool te__lm_parse_inner(te__lm_config *c) {
    te__json_space(&c->j);
    if (c->inner_at) return te__json_fail(&c->j, "\"text_config\" is given twice");
    if (*c->j.at == '{') c->inner_at = (size_t)(c->j.at - c->j.begin);
    te__json_skip(&c->j, 0);
    return !c->j.failed;
}

/* Copies `text` and parses the JSON object that begins at offset `at`. Error messages name the text by `path`. */
static bool te__lm_parse(te__lm_config *c, te_ctx *te, const char *path, const char *text, size_t at, int num_tables) {
    te__json *j = &c->j;
    const char *name;
    int i;
    memset(c, 0, sizeof(*c));
    j->te = te;
    for (i = 0; i < TE__COUNT(te__lm_tables); i++) te__hf_clear(c, te__lm_tables[i].keys, te__lm_tables[i].n);
    te__hf_rope_clear(&c->scaling);
    te__hf_rope_clear(&c->parameters);
    te__hf_rope_clear(&c->full);
    te__hf_rope_clear(&c->sliding);
    c->text = te__copy_string(te, text); /* a copy, because the parser unescapes strings in place */
    if (!c->text) return false;
    *j = te__json_of(te, path, "the text", c->text, strlen(c->text));
    j->at += at;
    for (name = te__json_first(j); name; name = te__json_next(j)) {
        if (strcmp(name, "rope_parameters") == 0) te__lm_parse_rope(c, &c->parameters, true);
        else if (strcmp(name, "rope_scaling") == 0) te__lm_parse_rope(c, &c->scaling, false);
        else if (strcmp(name, "layer_types") == 0) te__lm_parse_list(c, &c->layer_types, name, true);
        else if (strcmp(name, "mlp_only_layers") == 0) te__lm_parse_list(c, &c->mlp_only_layers, name, false);
        else if (strcmp(name, "quantization_config") == 0) c->quantized = te__hf_is_there(j);
        else if (strcmp(name, "per_layer_config") == 0) c->per_layer = te__hf_is_there(j);
        else if (strcmp(name, "text_config") == 0) te__lm_parse_inner(c);
        else te__lm_take(c, name, num_tables);
        if (j->failed || te->error_code != TE_OK) return false;
    }
    return at ? !j->failed : te__json_end(j);
}

/* ---- the row ---- */

/* Returns true if `text`, a JSON text of te__lm_families, has the key. */
static bool te__lm_names(const char *text, const char *key) {
    const size_t n = strlen(key);
    const char *at = text;
    while ((at = strstr(at, key)) != NULL && !(at[-1] == '"' && at[n] == '"')) at += n;
    return at != NULL;
}
static void te__lm_set(te__lm_config *c, const te__lm_config *from, const te__hf_key *key) {
    const size_t n = key->kind == TE__HF_STRING                              ? sizeof(char *)
                     : key->kind == TE__HF_NUMBER || key->kind == TE__HF_CAP ? sizeof(double)
                                                                             : sizeof(int64_t);
    memcpy((char *)c + key->offset, (const char *)from + key->offset, n);
}
/* Copies to c the keys that `row` has. If `all` is true, copies every such key; otherwise only those that c lacks. */
static void te__lm_fill(te__lm_config *c, const te__lm_config *row, bool all) {
    int t, i;
    for (t = 0; t < TE__COUNT(te__lm_tables); t++)
        for (i = 0; i < te__lm_tables[t].n; i++) {
            const te__hf_key *key = &te__lm_tables[t].keys[i];
            if (!te__hf_missing((const char *)row + key->offset, key->kind) &&
                (all || te__hf_missing((const char *)c + key->offset, key->kind)))
                te__lm_set(c, row, key);
        }
}
/* Applies entry `f` of te__lm_families to c: drops keys that the family does not read, fills in defaults, sets fixed
 * keys. `outer` is the entry of the multimodal model around the text model c, or NULL. */
static bool te__lm_resolve(te__lm_config *c, const te__lm_family *f, const te__lm_family *outer) {
    const char *texts[TE__LM_ROWS];
    int i;
    texts[0] = f->reads;
    texts[1] = te__lm_defaults;
    texts[2] = f->always;
    texts[3] = outer ? outer->always : "{}";
    c->rows = (te__lm_config *)te__alloc_zero(c->j.te, TE__LM_ROWS * sizeof(te__lm_config));
    if (!c->rows) return false;
    for (i = 0; i < TE__COUNT(te__lm_own_keys); i++)
        if (!te__lm_names(f->reads, te__lm_own_keys[i].name)) te__hf_clear(c, &te__lm_own_keys[i], 1);
    for (i = 0; i < TE__LM_ROWS; i++) {
        if (!te__lm_parse(&c->rows[i], c->j.te, f->model_type, texts[i], 0, TE__COUNT(te__lm_tables))) return false;
        te__lm_fill(c, &c->rows[i], i >= 2);
    }
    return true;
}

/* Sets an error: no family has this model_type. */
static bool te__lm_unknown(te__lm_config *c) {
    const char *type = c->model_type, *why = "", *way = "";
    te__text types = TE_ZERO;
    int i;
    types.memory = &c->j.te->host_allocator;
    for (i = 0; i < TE__COUNT(te__lm_families); i++)
        te__text_printf(&types, "%s%s", i == 0 ? "" : i == TE__COUNT(te__lm_families) - 1 ? " and " : ", ",
                        te__lm_families[i].model_type);
    for (i = 0; i < TE__COUNT(te__lm_others); i++)
        if (strcmp(te__lm_others[i][0], type) == 0) {
            why = te__lm_others[i][1];
            way = te__lm_others[i][2];
        }
    te__hf_refuse(&c->j, TE_ERR_UNSUPPORTED, "model_type is \"%.60s\"%s; %s are there%s", type, why,
                  te__text_str(&types), way);
    te__text_free(&types);
    return false;
}
/* *c has the keys of a multimodal model, which contains a language model. Replaces them by the keys of "text_config",
 * except model_type and tie_word_embeddings. */
static bool te__lm_read_inner(te__lm_config *c, const char *text, const te__lm_family *f) {
    const te__lm_family *inner = te__lm_family_of(f->inner->type);
    te__lm_config whole = *c;
    bool fine;
    if (!c->inner_at)
        return te__hf_refuse(&c->j, TE_ERR_FORMAT, "text_config is missing, and a %s needs it", f->model_type);
    fine = te__lm_parse(c, whole.j.te, whole.j.path, text, whole.inner_at, 2);
    if (fine && c->model_type && strcmp(c->model_type, inner->model_type) != 0)
        fine = te__hf_refuse(&c->j, TE_ERR_UNSUPPORTED, "text_config has model_type \"%.60s\"; that of a %s is %s",
                             c->model_type, f->model_type, inner->model_type);
    fine = fine && te__lm_resolve(c, inner, f);
    c->model_type = (char *)(uintptr_t)f->model_type;
    c->tie_word_embeddings = whole.tie_word_embeddings;
    c->quantized = c->quantized || whole.quantized;
    c->per_layer = c->per_layer || whole.per_layer;
    te__lm_config_close(&whole);
    return fine;
}
/* Parses the text of a config.json, and applies the entry of the model's family in te__lm_families. Sets *family to
 * this entry. */
static bool te__lm_config_read(te__lm_config *c, te_ctx *te, const char *path, const char *text,
                               const te__lm_family **family) {
    if (!te__lm_parse(c, te, path, text, 0, 2)) return false;
    if (!c->model_type) return te__hf_refuse(&c->j, TE_ERR_FORMAT, "model_type is missing");
    *family = te__lm_family_of(c->model_type);
    if (!*family) return te__lm_unknown(c);
    return te__lm_resolve(c, *family, NULL) && (!(*family)->inner || te__lm_read_inner(c, text, *family));
}

/* ---- from keys to the desc ---- */

static bool te__lm_cap(te__lm_config *c, const char *name, double value, bool ignored, float *to) {
    if (isnan(value) || value == TE__HF_NULL_CAP) return true;
    if (ignored)
        return te__hf_refuse(&c->j, TE_ERR_UNSUPPORTED,
                             "%s is %g, and transformers computes a %s without; null is needed", name, value,
                             c->model_type);
    return te__hf_positive(&c->j, name, value, 0, to);
}

/* Converts `r` to a te_lm_rotary. If r->theta is missing, uses `theta` instead; `theta_name` is the key of config.json
 * that has this value. */
static bool te__lm_rotary(te__lm_config *c, te__hf_rope *r, const char *theta_name, double theta, te_lm_rotary *to) {
    const double share = !isnan(r->partial_rotary_factor)   ? r->partial_rotary_factor
                         : !isnan(c->partial_rotary_factor) ? c->partial_rotary_factor
                                                            : 1;
    const int dim = share > 0 && share <= 1 ? (int)((double)c->head_dim * share) : 0;
    const char *type = te__hf_rope_type(r);
    te__hf_lengths l;
    if (!te__hf_positive(&c->j, isnan(r->theta) ? theta_name : "rope_theta", isnan(r->theta) ? theta : r->theta, 0,
                         &to->base))
        return false;
    if (share != 1 && c->partial_rotary != 1)
        return te__hf_refuse(&c->j, TE_ERR_UNSUPPORTED, "partial_rotary_factor is %g; only 1, all channels, is there",
                             share);
    if (share != 1 && (dim < 2 || dim % 2))
        return te__hf_refuse(&c->j, TE_ERR_FORMAT,
                             "partial_rotary_factor is %g, which rotates %d of %lld channels (head_dim); an even "
                             "number of them is needed",
                             share, dim, (long long)c->head_dim);
    if (share != 1) to->rotary_dim = dim;
    if (c->longrope_alone == 1 && (strcmp(type, "su") == 0 || strcmp(type, "yarn") == 0))
        type = r->type = (char *)(uintptr_t)"longrope";
    if (c->longrope_alone == 1 && strcmp(type, "default") != 0 && strcmp(type, "longrope") != 0)
        return te__hf_refuse(&c->j, TE_ERR_UNSUPPORTED, "rope_type is \"%.60s\"; a %s has default and longrope", type,
                             c->model_type);
    l.original = c->original_max_position_embeddings;
    l.max_position = c->max_position_embeddings;
    l.pairs = dim / 2;
    return te__hf_scaling(&c->j, r, &l, &to->scaling);
}

/* Sets d->rotary for layers without a sliding window and d->sliding_rotary for layers with one. */
static bool te__lm_rotaries(te__lm_config *c, te_causal_lm_desc *d) {
    const bool by_kind = c->rope_by_layer_type == 1, kinds = c->full.given || c->sliding.given;
    if (c->scaling.given && (c->parameters.given || kinds))
        return te__hf_refuse(
            &c->j, TE_ERR_UNSUPPORTED,
            "it has rope_scaling and rope_parameters; rope_parameters alone, with what both say, is needed");
    if (by_kind ? c->parameters.given : kinds)
        return te__hf_refuse(
            &c->j, TE_ERR_UNSUPPORTED,
            "rope_parameters are %s, and transformers reads those of a %s %s kinds of layers",
            by_kind ? "of all layers" : "by kinds of layers", c->model_type, by_kind ? "by" : "without");
    if (!te__lm_rotary(c,
                       c->full.given      ? &c->full
                       : c->scaling.given ? &c->scaling
                                          : &c->parameters,
                       "rope_theta", c->rope_theta, &d->rotary))
        return false;
    d->sliding_rotary = d->rotary;
    if (!by_kind) return true;
    memset(&d->sliding_rotary, 0, sizeof(d->sliding_rotary));
    return te__lm_rotary(c, &c->sliding, "rope_local_base_freq", c->rope_local_base_freq, &d->sliding_rotary);
}

static bool te__lm_activation(te__lm_config *c, te_activation *to) {
    const char *name = c->hidden_activation ? c->hidden_activation : c->hidden_act;
    char known[160];
    if (c->gelu_is_tanh == 1 && strcmp(name, "gelu") == 0) name = "gelu_pytorch_tanh";
    *to = te__activation_named(name, TE__ACT_GATED);
    if (*to) return true;
    return te__hf_refuse(&c->j, TE_ERR_UNSUPPORTED, "%s is \"%.60s\"; one of these is needed: %s",
                         c->hidden_activation ? "hidden_activation" : "hidden_act", name,
                         te__activation_names(TE__ACT_GATED, known, sizeof(known)));
}

/* Returns true if layer i has a sliding window, according to all keys except layer_types. A key that the family does
 * not read is -1. */
static bool te__lm_slides(const te__lm_config *c, int i) {
    return c->sliding_window >= 0 && c->use_sliding_window != 0 && i >= c->max_window_layers &&
           (c->sliding_window_pattern < 0 || (i + 1) % c->sliding_window_pattern != 0);
}

/* Finds the layers with a sliding window. d->sliding_layers points to c->slides, so c must outlive *d. */
static bool te__lm_windows(te__lm_config *c, te_causal_lm_desc *d) {
    static const char *const names[2] = {"full_attention", "sliding_attention"};
    const te__lm_list *list = &c->layer_types;
    bool any = false;
    int i;
    if (list->n && list->n != d->num_hidden_layers)
        return te__hf_refuse(&c->j, TE_ERR_FORMAT, "layer_types has %d entries and num_hidden_layers is %d", list->n,
                             d->num_hidden_layers);
    if (!list->n && c->sliding_window_pattern != -1 &&
        !te__hf_count(&c->j, "sliding_window_pattern", c->sliding_window_pattern, 1))
        return false;
    if (!list->n && c->max_window_layers != -1 &&
        !te__hf_count(&c->j, "max_window_layers", c->max_window_layers, 0))
        return false;
    c->slides = (bool *)te__alloc_zero(c->j.te, (size_t)d->num_hidden_layers * sizeof(bool));
    if (!c->slides) return false;
    for (i = 0; i < d->num_hidden_layers; i++) {
        const bool slides = list->n && c->lists_layer_types == 1 ? list->items[i] != 0 : te__lm_slides(c, i);
        if (list->n && (list->items[i] != 0) != slides)
            return te__hf_refuse(&c->j, TE_ERR_UNSUPPORTED,
                                 "layer_types[%d] is \"%s\", and every layer of a %s with its sliding_window is "
                                 "\"%s\": transformers ignores layer_types there; remove them",
                                 i, names[!slides], c->model_type, names[slides]);
        c->slides[i] = slides;
        any = any || slides;
    }
    if (!any) return true;
    if (c->use_sliding_window == 0)
        return te__hf_refuse(&c->j, TE_ERR_FORMAT,
                             "layer_types has sliding_attention, and use_sliding_window is not true");
    if (!te__hf_count(&c->j, "sliding_window", c->sliding_window, 1)) return false;
    d->sliding_window = c->sliding_window;
    d->sliding_layers = c->slides;
    return true;
}

/* Finds the layers without experts, in families that may have such layers. d->dense_layers points to c->dense, so c
 * must outlive *d. */
static bool te__lm_dense_layers(te__lm_config *c, te_causal_lm_desc *d) {
    const te__lm_list *list = &c->mlp_only_layers;
    int i;
    if (c->lists_dense_layers != 1) return true;
    if (!te__hf_count(&c->j, "decoder_sparse_step", c->decoder_sparse_step, 1)) return false;
    c->dense = (bool *)te__alloc_zero(c->j.te, (size_t)d->num_hidden_layers * sizeof(bool));
    if (!c->dense) return false;
    for (i = 0; i < d->num_hidden_layers; i++) c->dense[i] = (i + 1) % c->decoder_sparse_step != 0;
    for (i = 0; i < list->n; i++)
        if (list->items[i] < d->num_hidden_layers) c->dense[list->items[i]] = true;
    d->dense_layers = c->dense;
    return true;
}
static bool te__lm_experts(te__lm_config *c, te_causal_lm_desc *d) {
    if (c->experts != 1) return true;
#ifdef TE_NO_MOE
    return te__hf_refuse(&c->j, TE_ERR_UNSUPPORTED,
                         "model_type \"%s\" has experts, and te.h was compiled with TE_NO_MOE; compile it without",
                         c->model_type);
#endif
    if (!te__hf_count(&c->j, "num_local_experts", c->num_local_experts, 1) ||
        !te__hf_count(&c->j, "num_experts_per_tok", c->num_experts_per_tok, 1) ||
        (c->moe_intermediate_size != -1 &&
         !te__hf_count(&c->j, "moe_intermediate_size", c->moe_intermediate_size, 1)))
        return false;
    if (c->num_experts_per_tok > c->num_local_experts)
        return te__hf_refuse(&c->j, TE_ERR_FORMAT, "num_experts_per_tok is %lld and num_local_experts %lld",
                             (long long)c->num_experts_per_tok, (long long)c->num_local_experts);
    d->num_local_experts = (int)c->num_local_experts;
    d->num_experts_per_tok = (int)c->num_experts_per_tok;
    d->moe_intermediate_size = te__max(c->moe_intermediate_size, 0);
    d->norm_topk_prob = c->norm_topk_prob < 0 ? TE_DEFAULT : c->norm_topk_prob ? TE_ON : TE_OFF;
    return te__lm_dense_layers(c, d);
}

static bool te__lm_softmax(te__lm_config *c, te_causal_lm_desc *d) {
    float scalar;
    if (!te__hf_positive(&c->j, "query_pre_attn_scalar", c->query_pre_attn_scalar, 0, &scalar)) return false;
    d->softmax_scale = scalar != 0.0f ? 1.0f / sqrtf(scalar) : 0.0f;
    return te__lm_cap(c, "attn_logit_softcapping", c->attn_logit_softcapping, c->uncapped_scores == 1,
                      &d->attn_logit_softcapping) &&
           te__lm_cap(c, "final_logit_softcapping", c->final_logit_softcapping, c->uncapped_logits == 1,
                      &d->final_logit_softcapping);
}

/* Refuses settings that no family in te.h supports. */
static bool te__lm_is_possible(te__lm_config *c) {
    if (c->other_layer)
        return te__hf_refuse(&c->j, TE_ERR_UNSUPPORTED,
                             "layer_types[%d] is \"%.60s\"; full_attention and sliding_attention are possible",
                             c->layer_types.n, c->other_layer);
    if (c->quantized)
        return te__hf_refuse(&c->j, TE_ERR_UNSUPPORTED,
                             "it has a quantization_config; dequantize the model in transformers and save it again");
    if (c->per_layer)
        return te__hf_refuse(&c->j, TE_ERR_UNSUPPORTED,
                             "it has a per_layer_config; only models whose layers have one configuration are there");
    if (c->use_bidirectional_attention == 1 || c->is_causal == 0)
        return te__hf_refuse(&c->j, TE_ERR_UNSUPPORTED, "%s; only causal models are there",
                             c->is_causal == 0 ? "is_causal is false" : "use_bidirectional_attention is true");
    if (c->router_jitter_noise > 0)
        return te__hf_refuse(&c->j, TE_ERR_UNSUPPORTED, "router_jitter_noise is %g; only 0 is there",
                             c->router_jitter_noise);
    if (c->resid_pdrop > 0)
        return te__hf_refuse(&c->j, TE_ERR_UNSUPPORTED, "resid_pdrop is %g; only 0 is there", c->resid_pdrop);
    return true;
}

static bool te__lm_sizes(te__lm_config *c, const te__lm_family *f, te_causal_lm_desc *d) {
    /* A missing head_dim is computed as hidden_size / num_attention_heads. So is a null head_dim, unless f->reads has a
     * default for head_dim. */
    const bool computed = c->head_dim == -1 || (c->head_dim == TE__HF_NULL && !te__lm_names(f->reads, "head_dim"));
    if (!te__hf_count(&c->j, "vocab_size", c->vocab_size, 1) ||
        !te__hf_count(&c->j, "hidden_size", c->hidden_size, 1) ||
        !te__hf_count(&c->j, "intermediate_size", c->intermediate_size, 1) ||
        !te__hf_count(&c->j, "num_hidden_layers", c->num_hidden_layers, 1) ||
        !te__hf_count(&c->j, "num_attention_heads", c->num_attention_heads, 1))
        return false;
    if (c->num_hidden_layers > TE__HF_MAX_LAYERS)
        return te__hf_refuse(&c->j, TE_ERR_FORMAT, "num_hidden_layers is %lld; %d at most are possible",
                             (long long)c->num_hidden_layers, (int)TE__HF_MAX_LAYERS);
    if (c->num_key_value_heads < 0 && c->null_kv_heads == 1) c->num_key_value_heads = c->num_attention_heads;
    if (!te__hf_count(&c->j, "num_key_value_heads", c->num_key_value_heads, 1)) return false;
    if (c->num_attention_heads % c->num_key_value_heads)
        return te__hf_refuse(&c->j, TE_ERR_FORMAT,
                             "num_attention_heads is %lld and num_key_value_heads %lld, which must divide it",
                             (long long)c->num_attention_heads, (long long)c->num_key_value_heads);
    if (computed && c->hidden_size % c->num_attention_heads)
        return te__hf_refuse(
            &c->j, TE_ERR_FORMAT,
            "hidden_size is %lld and num_attention_heads %lld, which must divide it where head_dim is not given",
            (long long)c->hidden_size, (long long)c->num_attention_heads);
    if (computed) c->head_dim = c->hidden_size / c->num_attention_heads;
    if (!te__hf_count(&c->j, "head_dim", c->head_dim, 1)) return false;
    d->vocab_size = c->vocab_size;
    d->hidden_size = c->hidden_size;
    d->intermediate_size = c->intermediate_size;
    d->num_hidden_layers = (int)c->num_hidden_layers;
    d->num_attention_heads = (int)c->num_attention_heads;
    d->num_key_value_heads = (int)c->num_key_value_heads;
    d->head_dim = c->head_dim;
    return true;
}

/* Fills *d with the model that the keys describe. The lists that *d points to belong to c. */
static bool te__lm_config_desc(te__lm_config *c, const te__lm_family *f, te_causal_lm_desc *d) {
    memset(d, 0, sizeof(*d));
    if (f->inner) f = te__lm_family_of(f->inner->type);
    if (!te__lm_is_possible(c) || !te__lm_sizes(c, f, d)) return false;
    d->zero_centered_gamma = c->zero_centered_gamma == 1;
    d->feedforward_norms = c->feedforward_norms == 1;
    d->qk_norm = c->qk_norm == 1;
    d->o_bias = c->attention_bias == 1;
    d->qkv_bias = c->qkv_bias == 1 || d->o_bias;
    d->mlp_bias = c->mlp_bias == 1;
    d->tie_word_embeddings = c->tie_word_embeddings == 1;
    d->embedding_scale = c->scaled_embedding == 1 ? (float)sqrt((double)d->hidden_size) : 0.0f;
    if (!te__lm_activation(c, &d->activation) ||
        !te__hf_positive(&c->j, "rms_norm_eps", c->rms_norm_eps, 0, &d->rms_norm_eps) || !te__lm_windows(c, d) ||
        !te__lm_experts(c, d) || !te__lm_rotaries(c, d) || !te__lm_softmax(c, d))
        return false;
    if (isnan(c->attention_dropout)) return true;
    if (!(c->attention_dropout >= 0 && c->attention_dropout < 1))
        return te__hf_refuse(&c->j, TE_ERR_FORMAT, "attention_dropout is %g; 0 to 1 are possible",
                             c->attention_dropout);
    d->attention_dropout = (float)c->attention_dropout;
    return true;
}
