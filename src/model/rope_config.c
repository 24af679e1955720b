/* model/rope_config.c: reads the rotary embedding of a config.json as the models of NeMo Automodel do. This file must
 * not depend on how tensors are rotated.
 *
 * A missing number is NAN or -1 in te__hf_rope, but 0 in the public te_rope_config. */

typedef struct te__rope_text {
    te__hf_rope parameters, scaling;
    te_rope_config config[2]; /* results of rope_parameters and rope_scaling; the caller gets the first that exists */
    double theta, partial;    /* top-level rope_theta, partial_rotary_factor; NAN: missing */
    int64_t max_position, original; /* top-level max_position_embeddings, original_...; -1: missing */
    bool is_null;             /* rope_parameters is null */
} te__rope_text;

/* Parses the object of rope_parameters or rope_scaling. j reads a copy of `text`, but to->rope_parameters points into
 * `text` itself. */
static bool te__rope_object(te__json *j, const char *text, te__hf_rope *rope, te_rope_config *to) {
    const char *name;
    if (te__json_word(j) == 2) return true;
    te__json_space(j);
    if (rope->given) return te__json_fail(j, "the parameters of the rotary embedding are given twice");
    rope->given = true;
    to->rope_parameters = text + (j->at - j->begin);
    for (name = te__json_first(j); name; name = te__json_next(j))
        if (!te__hf_rope_take(j, rope, name)) return false;
    to->rope_parameters_size = (size_t)(text + (j->at - j->begin) - to->rope_parameters);
    return !j->failed;
}
static bool te__rope_parse(te__json *j, const char *text, te__rope_text *t) {
    const te__hf_key keys[] = {{"rope_theta", TE__HF_NUMBER, offsetof(te__rope_text, theta)},
                               {"partial_rotary_factor", TE__HF_NUMBER, offsetof(te__rope_text, partial)},
                               {"max_position_embeddings", TE__HF_COUNT, offsetof(te__rope_text, max_position)},
                               {"original_max_position_embeddings", TE__HF_COUNT, offsetof(te__rope_text, original)}};
    const char *name;
    bool known;
    te__hf_clear(t, keys, TE__COUNT(keys));
    te__hf_rope_clear(&t->parameters);
    te__hf_rope_clear(&t->scaling);
    for (name = te__json_first(j); name; name = te__json_next(j)) {
        if (strcmp(name, "rope_parameters") == 0) {
            te__rope_object(j, text, &t->parameters, &t->config[0]);
            t->is_null = !t->parameters.given;
        } else if (strcmp(name, "rope_scaling") == 0) te__rope_object(j, text, &t->scaling, &t->config[1]);
        else if (!te__hf_take(j, t, keys, TE__COUNT(keys), name, &known)) return false;
        else if (!known) te__json_skip(j, 0);
        if (j->failed) return false;
    }
    return te__json_end(j);
}

static double te__or_zero(double given) { return isnan(given) ? 0 : given; }
static int64_t te__count_or_zero(int64_t given) { return given < 0 ? 0 : given; }
/* Copies the numbers of `r` to the public struct. */
static void te__rope_fill(te_rope_config *to, const te__hf_rope *r, const te__rope_text *t, double theta,
                          double partial) {
    const char *type = r->type ? r->type : r->older_type ? r->older_type : "";
    snprintf(to->rope_type, sizeof(to->rope_type), "%s", type);
    to->rope_theta = theta;
    to->partial_rotary_factor = isnan(partial) ? 1 : partial;
    to->factor = te__or_zero(r->factor);
    to->beta_fast = te__or_zero(r->beta_fast);
    to->beta_slow = te__or_zero(r->beta_slow);
    to->mscale = te__or_zero(r->mscale);
    to->mscale_all_dim = te__or_zero(r->mscale_all_dim);
    to->attention_factor = te__or_zero(r->attention_factor);
    to->low_freq_factor = te__or_zero(r->low_freq_factor);
    to->high_freq_factor = te__or_zero(r->high_freq_factor);
    to->no_truncate = r->truncate == 0;
    memcpy(to->short_factor, r->short_factor, sizeof(to->short_factor));
    memcpy(to->long_factor, r->long_factor, sizeof(to->long_factor));
    to->num_short_factors = r->num_short_factors;
    to->num_long_factors = r->num_long_factors;
    /* the top-level count has priority, as in transformers */
    to->original_max_position_embeddings = te__count_or_zero(t->original >= 0 ? t->original : r->original);
    to->max_position_embeddings = te__count_or_zero(t->max_position);
}

static te_result te__rope_read(te_ctx *te, const char *who, const char *config, te__rope_text *t) {
    te__json j;
    size_t n = strlen(config);
    char *copy = (char *)te__alloc(te, n + 1); /* a copy, because strings are unescaped in place */
    te_result result;
    if (!copy) return TE_ERR_OUT_OF_MEMORY;
    memcpy(copy, config, n + 1);
    j = te__json_of(te, who, "the text", copy, n);
    result = te__rope_parse(&j, config, t) ? TE_OK : te_error_code(te);
    if (result == TE_OK) { /* must come before `copy` is freed, because r->type points into it */
        te_rope_config *first = &t->config[t->parameters.given ? 0 : 1];
        const te__hf_rope *r = t->parameters.given ? &t->parameters : &t->scaling;
        te__rope_fill(first, r, t, r->theta, isnan(r->partial_rotary_factor) ? (double)NAN : r->partial_rotary_factor);
    }
    te__free(te, copy);
    return result;
}
static te_result te__rope_positive(te_ctx *te, const char *who, const char *name, double value) {
    if (value > 0 && value <= FLT_MAX) return TE_OK;
    return te__fail(te, TE_ERR_FORMAT, "%s: %s is %g; a positive number is needed", who, name, value);
}
static te_result te__rope_config_get(te_ctx *te, const char *who, const char *config, bool llama,
                                     te_rope_config *rope) {
    te__rope_text *t;
    te_rope_config *from;
    te_result result;
    if (!te) return TE_ERR_STATE;
    if (!config || !rope) return te__fail(te, TE_ERR_INVALID, "%s: %s is NULL", who, config ? "rope" : "config");
    t = (te__rope_text *)te__alloc_zero(te, sizeof(te__rope_text));
    if (!t) return TE_ERR_OUT_OF_MEMORY;
    result = te__rope_read(te, who, config, t);
    from = &t->config[t->parameters.given ? 0 : 1];
    if (result == TE_OK && !llama && !t->parameters.given)
        result = te__fail(
            te, TE_ERR_FORMAT,
            "%s: the config %s; an object with rope_theta is needed (te_rope_config_read_llama reads older keys)", who,
            t->is_null ? "has rope_parameters that are null" : "has no rope_parameters");
    if (result == TE_OK && llama) {
        if (isnan(from->rope_theta)) from->rope_theta = isnan(t->theta) ? 10000 : t->theta;
        if (!isnan(t->partial) && isnan(t->parameters.partial_rotary_factor) && isnan(t->scaling.partial_rotary_factor))
            from->partial_rotary_factor = t->partial;
    }
    if (result == TE_OK && isnan(from->rope_theta))
        result =
            te__fail(te, TE_ERR_FORMAT, "%s: rope_parameters has no rope_theta, the base of the rotary embedding", who);
    if (result == TE_OK) result = te__rope_positive(te, who, "rope_theta", from->rope_theta);
    if (result == TE_OK) result = te__rope_positive(te, who, "partial_rotary_factor", from->partial_rotary_factor);
    if (result == TE_OK) *rope = *from;
    te__free(te, t);
    return result;
}
TE_API te_result te_rope_config_read(te_ctx *te, const char *config, te_rope_config *rope) {
    return te__rope_config_get(te, "te_rope_config_read", config, false, rope);
}
TE_API te_result te_rope_config_read_llama(te_ctx *te, const char *config, te_rope_config *rope) {
    return te__rope_config_get(te, "te_rope_config_read_llama", config, true, rope);
}

/* ---- te_rotary_desc ---- */

/* Fills `base` and `rotary_percent` of *rotary. Sets *dim to the number of rotated channels of a head. */
static te_result te__rope_begin(te_ctx *te, const char *who, const te_rope_config *rope, int head_dim,
                                te_rotary_desc *rotary, int *dim) {
    if (!te) return TE_ERR_STATE;
    if (!rope || !rotary) return te__fail(te, TE_ERR_INVALID, "%s: %s is NULL", who, rope ? "rotary" : "rope");
    *dim = rope->partial_rotary_factor > 0 && rope->partial_rotary_factor <= 1 && head_dim > 0
               ? (int)((double)head_dim * rope->partial_rotary_factor)
               : -1;
    if (*dim < 0 || *dim % 2)
        return te__fail(te, TE_ERR_INVALID,
                        "%s: head_dim %d times partial_rotary_factor %g rotates %d channels; an even number is needed",
                        who, head_dim, rope->partial_rotary_factor, *dim < 0 ? 0 : *dim);
    memset(rotary, 0, sizeof(*rotary));
    rotary->base = (float)rope->rope_theta;
    /* the added 0.5 makes floor(rotary_percent * head_dim) equal dim in spite of float rounding */
    rotary->rotary_percent =
        ((float)*dim + 0.5f) / (float)head_dim < 1.0f ? ((float)*dim + 0.5f) / (float)head_dim : 1.0f;
    return TE_OK;
}
TE_API te_result te_rope_config_moe_rotary(te_ctx *te, const te_rope_config *rope, int head_dim,
                                           te_rotary_desc *rotary) {
    static const char who[] = "te_rope_config_moe_rotary";
    double original, fast, slow, low, high;
    te_rotary_desc desc;
    te_result result;
    int dim = 0;
    result = te__rope_begin(te, who, rope, head_dim, &desc, &dim);
    if (result != TE_OK) return result;
    if (rope->factor > 1) {
        original = rope->original_max_position_embeddings ? (double)rope->original_max_position_embeddings : 4096;
        fast = rope->beta_fast != 0 ? rope->beta_fast : 32;
        slow = rope->beta_slow != 0 ? rope->beta_slow : 1;
        low = te__rope_pair(fast, rope->rope_theta, dim, original);
        high = te__rope_pair(slow, rope->rope_theta, dim, original);
        if (!(0 < low && low < high && high < dim / 2 - 1))
            return te__fail(te, TE_ERR_INVALID,
                            "%s: beta_fast %g, beta_slow %g, original_max_position_embeddings %g and rope_theta %g "
                            "interpolate between pairs %g and %g of %d; "
                            "0 < low < high < %d is needed",
                            who, fast, slow, original, rope->rope_theta, low, high, dim / 2, dim / 2 - 1);
        desc.scaling.type = TE_ROPE_YARN;
        desc.scaling.factor = (float)rope->factor;
        desc.scaling.original_max_position_embeddings = (int64_t)original;
        desc.scaling.beta_fast = (float)fast;
        desc.scaling.beta_slow = (float)slow;
        desc.scaling.no_truncate = true;
    }
    *rotary = desc;
    return TE_OK;
}

/* Converts a missing number from 0 (te_rope_config) to NAN (te__hf_rope). */
static double te__or_nan(double given) { return given != 0 ? given : (double)NAN; }
TE_API te_result te_rope_config_llama_rotary(te_ctx *te, const te_rope_config *rope, int head_dim,
                                             te_rotary_desc *rotary) {
    static const char who[] = "te_rope_config_llama_rotary";
    static const char *const types[] = {"default", "linear", "dynamic", "llama3", "yarn", "longrope"};
    const te__names names = {types, TE__COUNT(types)};
    te__json j = TE_ZERO;
    te__hf_rope r = TE_ZERO;
    te__hf_lengths l = TE_ZERO;
    te_rotary_desc desc;
    te_result result;
    int dim = 0, type;
    result = te__rope_begin(te, who, rope, head_dim, &desc, &dim);
    if (result != TE_OK) return result;
    type = rope->rope_type[0] ? te__name_index(&names, rope->rope_type, strlen(rope->rope_type)) : 0;
    if (type < 0) return te__unknown_name(te, who, "rope_type", rope->rope_type, strlen(rope->rope_type), &names);
    j.te = te;
    j.path = who;
    l.original = -1;
    l.max_position = rope->max_position_embeddings ? rope->max_position_embeddings : -1;
    l.pairs = dim / 2;
    r.type = (char *)(uintptr_t)types[type];
    r.factor = te__or_nan(rope->factor);
    r.low_freq_factor = te__or_nan(rope->low_freq_factor);
    r.high_freq_factor = te__or_nan(rope->high_freq_factor);
    r.beta_fast = te__or_nan(rope->beta_fast);
    r.beta_slow = te__or_nan(rope->beta_slow);
    r.mscale = te__or_nan(rope->mscale);
    r.mscale_all_dim = te__or_nan(rope->mscale_all_dim);
    r.attention_factor = te__or_nan(rope->attention_factor);
    r.truncate = rope->no_truncate ? 0 : -1;
    r.original = rope->original_max_position_embeddings ? rope->original_max_position_embeddings : -1;
    memcpy(r.short_factor, rope->short_factor, sizeof(r.short_factor));
    memcpy(r.long_factor, rope->long_factor, sizeof(r.long_factor));
    r.num_short_factors = te__min(rope->num_short_factors, TE_MAX_ROPE_FACTORS);
    r.num_long_factors = te__min(rope->num_long_factors, TE_MAX_ROPE_FACTORS);
    if (!te__hf_positive(&j, "rope_theta", rope->rope_theta, 0, &desc.base) ||
        !te__hf_scaling(&j, &r, &l, &desc.scaling))
        return te_error_code(te);
    if (desc.scaling.short_factor) desc.scaling.short_factor = rope->short_factor;
    if (desc.scaling.long_factor) desc.scaling.long_factor = rope->long_factor;
    *rotary = desc;
    return TE_OK;
}

/* ---- tables ---- */

/* Computes inv_freq for sequences of `length` tokens. If d->max_seqlen is set, it replaces `length`. Returns the number
 * of rotated channels; -1 after an error. */
static int te__rope_table_begin(te_ctx *te, const char *who, const te_rotary_desc *d, int head_dim, int64_t n,
                                int64_t length, float inv_freq[TE__ROPE_MAX_HALF], float *attention_factor) {
    float percent = d && d->rotary_percent > 0.0f && d->rotary_percent < 1.0f ? d->rotary_percent : 1.0f;
    int dim = head_dim > 0 && head_dim <= 1 << 24 ? (int)((float)head_dim * percent) : -1;
    if (dim < 0 || dim % 2 || dim > 2 * TE__ROPE_MAX_HALF || n < 0) {
        te__fail(te, TE_ERR_INVALID,
                 "%s: %d channels of %d are rotated, at %lld positions; an even number of channels, at most %d, and no "
                 "negative number of positions are possible",
                 who, dim < 0 ? 0 : dim, head_dim, (long long)n, 2 * (int)TE__ROPE_MAX_HALF);
        return -1;
    }
    if (d && d->freqs) {
        te__fail(te, TE_ERR_INVALID, "%s: rotary->freqs is given; it is such a table: leave it NULL", who);
        return -1;
    }
    if (dim == 0) return 0;
    if (d && d->max_seqlen > 0) length = d->max_seqlen;
    return te_rope_frequencies(te, d ? &d->scaling : NULL, d ? d->base : 0.0f, dim, length, inv_freq,
                               attention_factor) == TE_OK
               ? dim
               : -1;
}
/* Copies `table` to y, frees `table` and returns y. */
static te_tensor *te__rope_table_end(te_tensor *y, float *table) {
    te_result result = te_tensor_copy_from_host(y, table);
    te__free(y->te, table);
    return te__checked(y, result);
}
TE_API te_tensor *te_rope_cos_sin(te_ctx *te, const te_rotary_desc *rotary, int head_dim, const int64_t *positions,
                                  int64_t n) {
    float inv_freq[TE__ROPE_MAX_HALF], factor = 1.0f, *table;
    te_tensor *y = NULL;
    te__floats floats;
    int64_t longest = positions ? 0 : n, i;
    int dim, k;
    if (!te) return NULL;
    for (i = 0; positions && i < n; i++) {
        if (positions[i] < 0 || positions[i] > INT_MAX)
            return te__no_tensor(te, TE_ERR_INVALID, "te_rope_cos_sin: positions[%lld] is %lld; 0 to %d are possible",
                                 (long long)i, (long long)positions[i], INT_MAX);
        longest = te__max(longest, positions[i] + 1);
    }
    dim = te__rope_table_begin(te, "te_rope_cos_sin", rotary, head_dim, n, longest, inv_freq, &factor);
    y = dim >= 0 ? te__empty_2d(te, TE_F32, n, dim) : NULL; /* before `table`, because it checks the size */
    table = y ? (float *)te__alloc(te, te_tensor_bytes(y)) : NULL;
    if (!table) return NULL;
    floats = te__floats_begin();
    for (i = 0; i < n; i++)
        for (k = 0; k < dim / 2; k++) {
            float angle = (float)(positions ? positions[i] : i) * inv_freq[k];
            table[i * dim + k] = (float)cos((double)angle) * factor;
            table[i * dim + dim / 2 + k] = (float)sin((double)angle) * factor;
        }
    te__floats_end(&floats);
    return te__rope_table_end(y, table);
}
TE_API te_tensor *te_rope_freqs(te_ctx *te, const te_rotary_desc *rotary, int head_dim, int64_t n,
                                float *attention_factor) {
    float inv_freq[TE__ROPE_MAX_HALF], factor = 1.0f, *table;
    te_tensor *y;
    te__floats floats;
    int64_t i;
    int dim, k;
    if (!te) return NULL;
    dim = te__rope_table_begin(te, "te_rope_freqs", rotary, head_dim, n, n, inv_freq, &factor);
    const int64_t shape[4] = {n, 1, 1, dim};
    y = dim >= 0 ? te_tensor_empty(te, TE_F32, 4, shape) : NULL;
    table = y ? (float *)te__alloc(te, te_tensor_bytes(y)) : NULL;
    if (!table) return NULL;
    floats = te__floats_begin();
    for (i = 0; i < n; i++)
        for (k = 0; k < dim; k++)
            table[i * dim + k] = (float)i * inv_freq[rotary && rotary->interleaved ? k / 2 : k % (dim / 2)];
    te__floats_end(&floats);
    y = te__rope_table_end(y, table);
    if (y && attention_factor) *attention_factor = factor;
    return y;
}
