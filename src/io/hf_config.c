/* io/hf_config.c: config.json of Hugging Face transformers as a te_causal_lm_desc. Knows the keys of each model_type,
 * those of older files included; must not know weights.
 *
 * A key that changes what a model computes is either read or refused: a model that opens computes what transformers
 * computes. */

enum { TE__HF_MAX_CONFIG = 16 << 20, TE__HF_MAX_LAYERS = 100000 };

/* Traits of a family of models. */
enum {
    TE__HF_GEMMA = 1,    /* 1 + weight, scaled embedding, GELU; tied unless the file says otherwise */
    TE__HF_QKV_BIAS = 2, /* whatever attention_bias says */
    TE__HF_ATTENTION_BIAS = 4, /* attention_bias counts */
    TE__HF_QK_NORM = 8,
    TE__HF_FEEDFORWARD_NORMS = 16,
    TE__HF_SOFTCAPS = 32,
    TE__HF_EXPERTS = 64,
    TE__HF_LAYER_TYPES = 128,      /* the file may say which layers have a window */
    TE__HF_USE_SLIDING_WINDOW = 256, /* there are windows only where use_sliding_window is true */
    TE__HF_HIDDEN_ACTIVATION = 512, /* the key hidden_activation in place of hidden_act */
    TE__HF_KV_HEADS = 1024         /* num_key_value_heads: null means num_attention_heads */
};
typedef struct te__hf_family {
    const char *model_type;
    double rms_norm_eps, rope_theta; /* defaults of transformers, as these: */
    int64_t head_dim;                /* 0 => hidden_size / num_attention_heads */
    int64_t sliding_window;          /* 0 => none */
    unsigned has;
} te__hf_family;
static const te__hf_family te__hf_families[] = {
    {"llama", 1e-6, 10000, 0, 0, TE__HF_ATTENTION_BIAS | TE__HF_KV_HEADS},
    {"mistral", 1e-6, 10000, 0, 4096, 0},
    {"mixtral", 1e-5, 1000000, 0, 0, TE__HF_EXPERTS},
    {"qwen2", 1e-6, 10000, 0, 4096, TE__HF_QKV_BIAS | TE__HF_LAYER_TYPES | TE__HF_USE_SLIDING_WINDOW | TE__HF_KV_HEADS},
    {"qwen3", 1e-6, 10000, 128, 4096,
     TE__HF_ATTENTION_BIAS | TE__HF_QK_NORM | TE__HF_LAYER_TYPES | TE__HF_USE_SLIDING_WINDOW | TE__HF_KV_HEADS},
    {"gemma", 1e-6, 10000, 256, 0, TE__HF_GEMMA | TE__HF_ATTENTION_BIAS},
    {"gemma2", 1e-6, 10000, 256, 4096,
     TE__HF_GEMMA | TE__HF_ATTENTION_BIAS | TE__HF_FEEDFORWARD_NORMS | TE__HF_SOFTCAPS | TE__HF_LAYER_TYPES |
         TE__HF_HIDDEN_ACTIVATION},
    {"gemma3_text", 1e-6, 1000000, 256, 4096,
     TE__HF_GEMMA | TE__HF_ATTENTION_BIAS | TE__HF_QK_NORM | TE__HF_FEEDFORWARD_NORMS | TE__HF_SOFTCAPS |
         TE__HF_LAYER_TYPES | TE__HF_HIDDEN_ACTIVATION}};

/* Relatives of these that te.h does not compute: model_type, the trait, a way to a model that opens. */
static const char *const te__hf_others[][3] = {
    {"gemma3", ", Gemma 3 with vision",
     ". Its text alone opens, as a folder that this line of Python writes, with transformers: m = "
     "Gemma3ForConditionalGeneration.from_pretrained(FOLDER, dtype=\"auto\"); "
     "t = Gemma3ForCausalLM(m.config.text_config); t.model = m.model.language_model; t.tie_weights(); "
     "t.save_pretrained(NEW)"},
    {"llama4", ", Llama 4 with vision, chunked attention and experts of its own", ". Of Llama, 1 to 3 open (llama)"},
    {"llama4_text", ", Llama 4 with chunked attention and experts of its own", ". Of Llama, 1 to 3 open (llama)"}};

/* The scaling of rotary frequencies, and with it their base: "rope_parameters", or the older "rope_scaling". */
typedef struct te__hf_rope {
    bool given;
    char *type, *older_type; /* "rope_type", "type"; they point into the text, NULL where they are not given */
    double theta, factor, low_freq_factor, high_freq_factor, partial_rotary_factor, beta_fast, beta_slow, mscale,
        mscale_all_dim, attention_factor;
    int64_t original, truncate;
    float short_factor[TE_MAX_ROPE_FACTORS], long_factor[TE_MAX_ROPE_FACTORS]; /* of longrope */
    int num_short_factors, num_long_factors;
} te__hf_rope;

/* The keys as they are in the file. Missing: NAN, -1, NULL. Where null does not mean the default, it has a number of
 * its own, which no file can contain. */
#define TE__HF_NULL (-2)          /* of a TE__HF_COUNT */
#define TE__HF_NULL_CAP ((double)-INFINITY) /* of a TE__HF_CAP */
typedef struct te__hf_config {
    te__json j;
    char *model_type, *hidden_act, *hidden_activation;
    int64_t vocab_size, hidden_size, intermediate_size, num_hidden_layers, num_attention_heads, num_key_value_heads,
        head_dim;
    int64_t sliding_window, max_window_layers, sliding_window_pattern, num_local_experts, num_experts_per_tok,
        original_max_position_embeddings, max_position_embeddings;
    double rms_norm_eps, rope_theta, rope_local_base_freq, query_pre_attn_scalar, attn_logit_softcapping,
        final_logit_softcapping, attention_dropout, partial_rotary_factor;
    double router_jitter_noise;
    /* 0, 1 */
    int64_t tie_word_embeddings, attention_bias, mlp_bias, use_sliding_window, use_bidirectional_attention, is_causal;
    te__hf_rope scaling, parameters, full, sliding; /* rope_scaling; rope_parameters, of all layers or by the kind of
                                                     * layer */
    bool *slides; /* [num_slides]: "layer_types" */
    int num_slides, cap_slides;
    const char *other_layer; /* the first of "layer_types" that is no type of a family here, number num_slides; NULL =>
                              * none */
    bool quantized, per_layer; /* "quantization_config", "per_layer_config" */
} te__hf_config;

typedef enum te__hf_kind {
    TE__HF_COUNT,
    TE__HF_NUMBER,
    TE__HF_CAP, /* a number; null does not mean the default */
    TE__HF_BOOL,
    TE__HF_STRING
} te__hf_kind;
typedef struct te__hf_key {
    const char *name;
    te__hf_kind kind;
    size_t offset;
} te__hf_key;

#define TE__HF_KEY(kind, name) {#name, kind, offsetof(te__hf_config, name)}
static const te__hf_key te__hf_keys[] = {TE__HF_KEY(TE__HF_STRING, model_type),
                                         TE__HF_KEY(TE__HF_STRING, hidden_act),
                                         TE__HF_KEY(TE__HF_STRING, hidden_activation),
                                         TE__HF_KEY(TE__HF_COUNT, vocab_size),
                                         TE__HF_KEY(TE__HF_COUNT, hidden_size),
                                         TE__HF_KEY(TE__HF_COUNT, intermediate_size),
                                         TE__HF_KEY(TE__HF_COUNT, num_hidden_layers),
                                         TE__HF_KEY(TE__HF_COUNT, num_attention_heads),
                                         TE__HF_KEY(TE__HF_COUNT, num_key_value_heads),
                                         TE__HF_KEY(TE__HF_COUNT, head_dim),
                                         TE__HF_KEY(TE__HF_COUNT, sliding_window),
                                         TE__HF_KEY(TE__HF_COUNT, max_window_layers),
                                         TE__HF_KEY(TE__HF_COUNT, sliding_window_pattern),
                                         TE__HF_KEY(TE__HF_COUNT, num_local_experts),
                                         TE__HF_KEY(TE__HF_COUNT, num_experts_per_tok),
                                         {"num_experts", TE__HF_COUNT, offsetof(te__hf_config, num_local_experts)},
                                         TE__HF_KEY(TE__HF_BOOL, is_causal),
                                         TE__HF_KEY(TE__HF_COUNT, original_max_position_embeddings),
                                         TE__HF_KEY(TE__HF_COUNT, max_position_embeddings),
                                         TE__HF_KEY(TE__HF_NUMBER, rms_norm_eps),
                                         TE__HF_KEY(TE__HF_NUMBER, rope_theta),
                                         TE__HF_KEY(TE__HF_NUMBER, rope_local_base_freq),
                                         TE__HF_KEY(TE__HF_NUMBER, query_pre_attn_scalar),
                                         TE__HF_KEY(TE__HF_CAP, attn_logit_softcapping),
                                         TE__HF_KEY(TE__HF_CAP, final_logit_softcapping),
                                         TE__HF_KEY(TE__HF_NUMBER, attention_dropout),
                                         TE__HF_KEY(TE__HF_NUMBER, partial_rotary_factor),
                                         TE__HF_KEY(TE__HF_NUMBER, router_jitter_noise),
                                         TE__HF_KEY(TE__HF_BOOL, tie_word_embeddings),
                                         TE__HF_KEY(TE__HF_BOOL, attention_bias),
                                         TE__HF_KEY(TE__HF_BOOL, mlp_bias),
                                         TE__HF_KEY(TE__HF_BOOL, use_sliding_window),
                                         TE__HF_KEY(TE__HF_BOOL, use_bidirectional_attention)};
#undef TE__HF_KEY
#define TE__HF_KEY(kind, name, field) {name, kind, offsetof(te__hf_rope, field)}
static const te__hf_key te__hf_rope_keys[] = {TE__HF_KEY(TE__HF_STRING, "rope_type", type),
                                              TE__HF_KEY(TE__HF_STRING, "type", older_type),
                                              TE__HF_KEY(TE__HF_NUMBER, "rope_theta", theta),
                                              TE__HF_KEY(TE__HF_NUMBER, "factor", factor),
                                              TE__HF_KEY(TE__HF_NUMBER, "low_freq_factor", low_freq_factor),
                                              TE__HF_KEY(TE__HF_NUMBER, "high_freq_factor", high_freq_factor),
                                              TE__HF_KEY(TE__HF_NUMBER, "partial_rotary_factor", partial_rotary_factor),
                                              TE__HF_KEY(TE__HF_NUMBER, "beta_fast", beta_fast),
                                              TE__HF_KEY(TE__HF_NUMBER, "beta_slow", beta_slow),
                                              TE__HF_KEY(TE__HF_NUMBER, "mscale", mscale),
                                              TE__HF_KEY(TE__HF_NUMBER, "mscale_all_dim", mscale_all_dim),
                                              TE__HF_KEY(TE__HF_NUMBER, "attention_factor", attention_factor),
                                              TE__HF_KEY(TE__HF_BOOL, "truncate", truncate),
                                              TE__HF_KEY(TE__HF_COUNT, "original_max_position_embeddings", original)};
#undef TE__HF_KEY

/* All missing. */
static void te__hf_clear(void *s, const te__hf_key *keys, int num_keys) {
    int i;
    for (i = 0; i < num_keys; i++) {
        char *at = (char *)s + keys[i].offset;
        if (keys[i].kind == TE__HF_NUMBER || keys[i].kind == TE__HF_CAP) *(double *)(void *)at = (double)NAN;
        else if (keys[i].kind == TE__HF_STRING) *(char **)(void *)at = NULL;
        else *(int64_t *)(void *)at = -1;
    }
}
static bool te__hf_missing(const char *at, te__hf_kind kind) {
    if (kind == TE__HF_NUMBER || kind == TE__HF_CAP) return isnan(*(const double *)(const void *)at);
    if (kind == TE__HF_STRING) return !*(char *const *)(const void *)at;
    return *(const int64_t *)(const void *)at == -1;
}

/* The value of a known key into its field, or true without doing anything if the key is none of these. */
static bool te__hf_take(te__json *j, void *s, const te__hf_key *keys, int num_keys, const char *name, bool *known) {
    int i;
    for (i = 0; i < num_keys && strcmp(keys[i].name, name) != 0; i++) {}
    *known = i < num_keys;
    if (!*known) return true;
    {
        char *at = (char *)s + keys[i].offset;
        int word = te__json_word(j);
        if (j->failed) return false;
        if (!te__hf_missing(at, keys[i].kind)) return te__json_fail(j, "\"%.60s\" is given twice", name);
        if (word == 2 && keys[i].kind == TE__HF_CAP) *(double *)(void *)at = TE__HF_NULL_CAP;
        if (word == 2 && keys[i].kind == TE__HF_COUNT) *(int64_t *)(void *)at = TE__HF_NULL;
        if (word == 2) return true;
        if (word >= 0 && keys[i].kind != TE__HF_BOOL)
            return te__json_fail(j, "\"%.60s\" is %s", name, word ? "true" : "false");
        if (keys[i].kind == TE__HF_COUNT) *(int64_t *)(void *)at = (int64_t)te__json_uint(j);
        else if (keys[i].kind == TE__HF_NUMBER || keys[i].kind == TE__HF_CAP)
            *(double *)(void *)at = te__json_number(j);
        else if (keys[i].kind == TE__HF_STRING) *(char **)(void *)at = (char *)te__json_string(j);
        else if (word < 0) return te__json_fail(j, "\"%.60s\" is neither true nor false", name);
        else *(int64_t *)(void *)at = word;
    }
    return !j->failed;
}

/* The value of a key: a list of longrope. */
static bool te__hf_factors(te__json *j, const char *name, float *list, int *n) {
    bool more;
    if (te__json_word(j) == 2) return true;
    if (*n) return te__json_fail(j, "\"%s\" is given twice", name);
    for (more = te__json_open(j, '[', ']'); more; more = te__json_more(j, ']')) {
        if (*n == TE_MAX_ROPE_FACTORS)
            return te__json_fail(j, "\"%s\" has more than %d numbers", name, (int)TE_MAX_ROPE_FACTORS);
        list[(*n)++] = (float)te__json_number(j);
    }
    return !j->failed;
}

/* An object of numbers, or with `by_kind` one such object for each kind of layer. */
static bool te__hf_parse_rope(te__hf_config *c, te__hf_rope *rope, bool by_kind) {
    te__json *j = &c->j;
    bool more, known;
    if (te__json_word(j) == 2) return true;
    for (more = te__json_open(j, '{', '}'); more; more = te__json_more(j, '}')) {
        const char *name = te__json_string(j);
        if (!te__json_expect(j, ':')) return false;
        if (by_kind && strcmp(name, "full_attention") == 0) te__hf_parse_rope(c, &c->full, false);
        else if (by_kind && strcmp(name, "sliding_attention") == 0) te__hf_parse_rope(c, &c->sliding, false);
        else if (strcmp(name, "short_factor") == 0)
            te__hf_factors(j, name, rope->short_factor, &rope->num_short_factors);
        else if (strcmp(name, "long_factor") == 0) te__hf_factors(j, name, rope->long_factor, &rope->num_long_factors);
        else if (!te__hf_take(j, rope, te__hf_rope_keys, TE__COUNT(te__hf_rope_keys), name, &known)) return false;
        else if (!known) te__json_skip(j, 0);
        else rope->given = true;
    }
    return !j->failed;
}

static bool te__hf_parse_layer_types(te__hf_config *c) {
    te__json *j = &c->j;
    bool more;
    if (te__json_word(j) == 2) return true;
    if (c->num_slides) return te__json_fail(j, "\"layer_types\" is given twice");
    for (more = te__json_open(j, '[', ']'); more; more = te__json_more(j, ']')) {
        const char *type = te__json_string(j);
        if (j->failed) return false;
        if (!c->other_layer && strcmp(type, "full_attention") != 0 && strcmp(type, "sliding_attention") != 0)
            c->other_layer = type;
        if (c->other_layer) continue;
        if (c->num_slides == TE__HF_MAX_LAYERS)
            return te__json_fail(j, "\"layer_types\" has more than %d entries", (int)TE__HF_MAX_LAYERS);
        if (!te__grow(j->te, (void **)&c->slides, &c->cap_slides, c->num_slides, sizeof(bool))) return false;
        c->slides[c->num_slides++] = type[0] == 's';
    }
    return !j->failed;
}

/* Skips a value; false if it is null. */
static bool te__hf_is_there(te__json *j) {
    if (te__json_word(j) == 2) return false;
    te__json_skip(j, 0);
    return true;
}

static void te__hf_config_close(te__hf_config *c) {
    te__free(c->j.te, c->slides, (size_t)c->cap_slides * sizeof(bool));
}

/* Reads `text`, which is changed: strings are unescaped in it. */
static bool te__hf_config_parse(te__hf_config *c, te_ctx *te, const char *path, char *text, size_t n) {
    te__json *j = &c->j;
    bool more, known;
    memset(c, 0, sizeof(*c));
    j->te = te;
    j->path = path;
    j->part = "the text";
    j->begin = j->at = text;
    j->end = text + n;
    te__hf_clear(c, te__hf_keys, TE__COUNT(te__hf_keys));
    te__hf_clear(&c->scaling, te__hf_rope_keys, TE__COUNT(te__hf_rope_keys));
    te__hf_clear(&c->parameters, te__hf_rope_keys, TE__COUNT(te__hf_rope_keys));
    te__hf_clear(&c->full, te__hf_rope_keys, TE__COUNT(te__hf_rope_keys));
    te__hf_clear(&c->sliding, te__hf_rope_keys, TE__COUNT(te__hf_rope_keys));
    for (more = te__json_open(j, '{', '}'); more; more = te__json_more(j, '}')) {
        const char *name = te__json_string(j);
        if (!te__json_expect(j, ':')) return false;
        if (strcmp(name, "rope_parameters") == 0) te__hf_parse_rope(c, &c->parameters, true);
        else if (strcmp(name, "rope_scaling") == 0) te__hf_parse_rope(c, &c->scaling, false);
        else if (strcmp(name, "layer_types") == 0) te__hf_parse_layer_types(c);
        else if (strcmp(name, "quantization_config") == 0) c->quantized = te__hf_is_there(j);
        else if (strcmp(name, "per_layer_config") == 0) c->per_layer = te__hf_is_there(j);
        else if (!te__hf_take(j, c, te__hf_keys, TE__COUNT(te__hf_keys), name, &known)) return false;
        else if (!known) te__json_skip(j, 0);
        if (j->failed || te->error_code != TE_OK) return false;
    }
    if (j->failed) return false;
    te__json_space(j);
    return j->at == j->end ? true : te__json_fail(j, "something follows the end");
}

/* ---- what the keys mean ---- */

TE_PRINTF(3, 4) static bool te__hf_refuse(te__hf_config *c, te_result code, const char *format, ...) {
    char text[512];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    te__fail(c->j.te, code, "%s: %s", c->j.path, text);
    return false;
}

/* A whole number from `least` on that an int holds. */
static bool te__hf_count(te__hf_config *c, const char *name, int64_t value, int64_t least) {
    if (value < 0) return te__hf_refuse(c, TE_ERR_FORMAT, "%s is %s", name, value == TE__HF_NULL ? "null" : "missing");
    if (value >= least && value <= INT_MAX) return true;
    return te__hf_refuse(c, TE_ERR_FORMAT, "%s is %lld; %lld to %d are possible", name, (long long)value,
                         (long long)least, INT_MAX);
}
/* A positive number that an f32 holds, or `missing` where there is none. */
static bool te__hf_positive(te__hf_config *c, const char *name, double value, double missing, float *to) {
    const bool fits = isnan(value) || (value > 0 && value <= FLT_MAX && (float)value > 0.0f);
    *to = (float)(isnan(value) ? missing : fits ? value : 0);
    if (fits) return true;
    return te__hf_refuse(c, TE_ERR_FORMAT, "%s is %g; a positive number is needed", name, value);
}

static bool te__hf_cap(te__hf_config *c, const char *name, double value, double missing, float *to) {
    *to = isnan(value) ? (float)missing : 0.0f;
    return isnan(value) || value == TE__HF_NULL_CAP || te__hf_positive(c, name, value, missing, to);
}

/* YaRN's own numbers: those that are missing stay 0, the default of te_rope_scaling. */
static bool te__hf_yarn(te__hf_config *c, const te__hf_rope *r, te_rope_scaling *s) {
    s->no_truncate = r->truncate == 0;
    if (!te__hf_positive(c, "beta_fast", r->beta_fast, 0, &s->beta_fast) ||
        !te__hf_positive(c, "beta_slow", r->beta_slow, 0, &s->beta_slow) ||
        !te__hf_positive(c, "mscale", r->mscale, 0, &s->mscale) ||
        !te__hf_positive(c, "mscale_all_dim", r->mscale_all_dim, 0, &s->mscale_all_dim) ||
        !te__hf_positive(c, "attention_factor", r->attention_factor, 0, &s->attention_factor))
        return false;
    if ((s->beta_fast != 0.0f ? s->beta_fast : 32.0f) > (s->beta_slow != 0.0f ? s->beta_slow : 1.0f)) return true;
    return te__hf_refuse(
        c, TE_ERR_FORMAT,
        "rope_type is \"yarn\", beta_fast %g and beta_slow %g (0: missing, 32 and 1); the first must be the larger one",
        (double)s->beta_fast, (double)s->beta_slow);
}
/* LongRoPE's: its lists stay the config's. */
static bool te__hf_longrope(te__hf_config *c, const te__hf_rope *r, te_rope_scaling *s) {
    int i;
    if (r->num_short_factors != c->head_dim / 2 || r->num_long_factors != c->head_dim / 2)
        return te__hf_refuse(c, TE_ERR_FORMAT,
                             "rope_type is \"longrope\", short_factor has %d numbers and long_factor %d; %lld are "
                             "needed, one for each pair of channels",
                             r->num_short_factors, r->num_long_factors, (long long)(c->head_dim / 2));
    for (i = 0; i < r->num_short_factors; i++)
        if (!(r->short_factor[i] > 0.0f && r->short_factor[i] <= FLT_MAX && r->long_factor[i] > 0.0f &&
              r->long_factor[i] <= FLT_MAX))
            return te__hf_refuse(c, TE_ERR_FORMAT,
                                 "short_factor[%d] is %g and long_factor[%d] %g; positive numbers are needed", i,
                                 (double)r->short_factor[i], i, (double)r->long_factor[i]);
    s->short_factor = r->short_factor;
    s->long_factor = r->long_factor;
    return te__hf_positive(c, "attention_factor", r->attention_factor, 0, &s->attention_factor);
}
/* theta: where r has none, that of the config's key theta_name, or the family's. */
static bool te__hf_rotary(te__hf_config *c, const te__hf_rope *r, const char *theta_name, double theta,
                          te_lm_rotary *to) {
    static const struct {
        const char *name;
        te_rope_type type;
    } types[] = {{"default", TE_ROPE_DEFAULT}, {"linear", TE_ROPE_LINEAR}, {"dynamic", TE_ROPE_DYNAMIC},
                 {"llama3", TE_ROPE_LLAMA3},   {"yarn", TE_ROPE_YARN},     {"longrope", TE_ROPE_LONGROPE}};
    const char *name = r->type ? r->type : r->older_type ? r->older_type : "default";
    te_rope_scaling *s = &to->scaling;
    double factor = r->factor;
    int64_t original = c->original_max_position_embeddings; /* this one counts where the rotation has one, too */
    int i = 0;
    if (!te__hf_positive(c, isnan(r->theta) ? theta_name : "rope_theta", isnan(r->theta) ? theta : r->theta, 0,
                         &to->base))
        return false;
    if (!isnan(r->partial_rotary_factor) && r->partial_rotary_factor != 1)
        return te__hf_refuse(c, TE_ERR_UNSUPPORTED, "partial_rotary_factor is %g; only 1, all channels, is there",
                             r->partial_rotary_factor);
    while (i < TE__COUNT(types) && strcmp(types[i].name, name) != 0) i++;
    if (i == TE__COUNT(types))
        return te__hf_refuse(c, TE_ERR_UNSUPPORTED,
                             "rope_type is \"%.60s\"; default, linear, dynamic, llama3, yarn and longrope are possible",
                             name);
    s->type = types[i].type;
    if (s->type == TE_ROPE_DEFAULT) return true;
    if (original == -1) original = r->original;
    if (s->type == TE_ROPE_DYNAMIC || (s->type == TE_ROPE_LONGROPE && original == -1))
        original = c->max_position_embeddings;
    if (s->type != TE_ROPE_LINEAR &&
        !te__hf_count(c, s->type == TE_ROPE_DYNAMIC ? "max_position_embeddings" : "original_max_position_embeddings",
                      original, 1))
        return false;
    if (s->type != TE_ROPE_LINEAR) s->original_max_position_embeddings = original;
    if (isnan(factor) && (s->type == TE_ROPE_YARN || s->type == TE_ROPE_LONGROPE) && c->max_position_embeddings > 0)
        factor = (double)c->max_position_embeddings / (double)original;
    if (isnan(factor)) return te__hf_refuse(c, TE_ERR_FORMAT, "rope_type is \"%s\", and factor is missing", name);
    if (!te__hf_positive(c, "factor", factor, 1, &s->factor)) return false;
    if (s->type == TE_ROPE_YARN) return te__hf_yarn(c, r, s);
    if (s->type == TE_ROPE_LONGROPE) return te__hf_longrope(c, r, s);
    if (s->type != TE_ROPE_LLAMA3) return true;
    if (isnan(r->low_freq_factor) || isnan(r->high_freq_factor) || !(r->high_freq_factor > r->low_freq_factor))
        return te__hf_refuse(
            c, TE_ERR_FORMAT,
            "rope_type is \"llama3\", low_freq_factor %g and high_freq_factor %g; the second must be the larger one",
            r->low_freq_factor, r->high_freq_factor);
    return te__hf_positive(c, "low_freq_factor", r->low_freq_factor, 1, &s->low_freq_factor) &&
           te__hf_positive(c, "high_freq_factor", r->high_freq_factor, 1, &s->high_freq_factor);
}

/* The rotations of layers without and with a window. */
static bool te__hf_rotaries(te__hf_config *c, const te__hf_family *f, te_causal_lm_desc *d) {
    const double theta = isnan(c->rope_theta) ? f->rope_theta : c->rope_theta;
    const bool by_kind = strcmp(f->model_type, "gemma3_text") == 0, kinds = c->full.given || c->sliding.given;
    if (c->scaling.given && (c->parameters.given || kinds))
        return te__hf_refuse(
            c, TE_ERR_UNSUPPORTED,
            "it has rope_scaling and rope_parameters; rope_parameters alone, with what both say, is needed");
    if (by_kind ? c->parameters.given : kinds)
        return te__hf_refuse(
            c, TE_ERR_UNSUPPORTED, "rope_parameters are %s, and transformers reads those of a %s %s kinds of layers",
            by_kind ? "of all layers" : "by kinds of layers", f->model_type, by_kind ? "by" : "without");
    if (!te__hf_rotary(c,
                       c->full.given      ? &c->full
                       : c->scaling.given ? &c->scaling
                                          : &c->parameters,
                       "rope_theta", theta, &d->rotary))
        return false;
    d->sliding_rotary = d->rotary;
    if (!by_kind) return true;
    memset(&d->sliding_rotary, 0, sizeof(d->sliding_rotary)); /* Gemma 3: windowed layers turn faster, and are not
                                                               * scaled */
    return te__hf_rotary(c, &c->sliding, "rope_local_base_freq",
                         isnan(c->rope_local_base_freq) ? 10000 : c->rope_local_base_freq, &d->sliding_rotary);
}

static bool te__hf_activation(te__hf_config *c, const te__hf_family *f, te_activation *to) {
    const char *key = f->has & TE__HF_HIDDEN_ACTIVATION ? "hidden_activation" : "hidden_act";
    const char *name = f->has & TE__HF_HIDDEN_ACTIVATION ? c->hidden_activation : c->hidden_act;
    char known[160];
    *to = f->has & TE__HF_GEMMA ? TE_GEGLU : TE_SWIGLU;
    /* the first Gemma's files say gelu, and mean the other one */
    if (!name || (strcmp(f->model_type, "gemma") == 0 && strcmp(name, "gelu") == 0)) return true;
    *to = te__activation_named(name, TE__ACT_GATED);
    if (*to) return true;
    return te__hf_refuse(c, TE_ERR_UNSUPPORTED, "%s is \"%.60s\"; one of these is needed: %s", key, name,
                         te__activation_names(TE__ACT_GATED, known, sizeof(known)));
}

/* Does layer i have a window where the file does not list the layers? */
static bool te__hf_slides(const te__hf_config *c, const te__hf_family *f, int i) {
    if (c->sliding_window < 0) return false;
    if (f->has & TE__HF_USE_SLIDING_WINDOW)
        return c->use_sliding_window == 1 && i >= (c->max_window_layers < 0 ? 28 : c->max_window_layers);
    if (strcmp(f->model_type, "gemma2") == 0) return i % 2 == 0;
    if (strcmp(f->model_type, "gemma3_text") == 0)
        return (i + 1) % (c->sliding_window_pattern < 1 ? 6 : c->sliding_window_pattern) != 0;
    return strcmp(f->model_type, "llama") != 0 && strcmp(f->model_type, "gemma") != 0;
}

/* Which layers have a window. The list is the config's, which outlives the desc. */
static bool te__hf_windows(te__hf_config *c, const te__hf_family *f, te_causal_lm_desc *d) {
    static const char *const names[2] = {"full_attention", "sliding_attention"};
    const bool listed = c->num_slides > 0;
    bool any = false;
    int i;
    if (listed && c->num_slides != d->num_hidden_layers)
        return te__hf_refuse(c, TE_ERR_FORMAT, "layer_types has %d entries and num_hidden_layers is %d", c->num_slides,
                             d->num_hidden_layers);
    if (!listed && strcmp(f->model_type, "gemma3_text") == 0 && c->sliding_window_pattern != -1 &&
        !te__hf_count(c, "sliding_window_pattern", c->sliding_window_pattern, 1))
        return false;
    if (c->sliding_window == -1 && f->sliding_window) c->sliding_window = f->sliding_window;
    for (i = 0; i < d->num_hidden_layers; i++) {
        const bool slides = te__hf_slides(c, f, i);
        if (!listed) {
            if (!te__grow(c->j.te, (void **)&c->slides, &c->cap_slides, i, sizeof(bool))) return false;
            c->slides[c->num_slides++] = slides;
        } else if (c->slides[i] != slides && !(f->has & TE__HF_LAYER_TYPES))
            return te__hf_refuse(c, TE_ERR_UNSUPPORTED,
                                 "layer_types[%d] is \"%s\", and every layer of a %s with its sliding_window is "
                                 "\"%s\": transformers ignores layer_types there; remove them",
                                 i, names[c->slides[i]], f->model_type, names[slides]);
        any = any || c->slides[i];
    }
    if (!any) return true;
    if (f->has & TE__HF_USE_SLIDING_WINDOW && c->use_sliding_window != 1)
        return te__hf_refuse(c, TE_ERR_FORMAT, "layer_types has sliding_attention, and use_sliding_window is not true");
    if (!te__hf_count(c, "sliding_window", c->sliding_window, 1)) return false;
    d->sliding_window = c->sliding_window;
    d->sliding_layers = c->slides;
    return true;
}

static bool te__hf_experts(te__hf_config *c, const te__hf_family *f, te_causal_lm_desc *d) {
    if (!(f->has & TE__HF_EXPERTS)) return true;
    if (!te__hf_count(c, "num_local_experts", c->num_local_experts, 1) ||
        !te__hf_count(c, "num_experts_per_tok", c->num_experts_per_tok, 1))
        return false;
    if (c->num_experts_per_tok > c->num_local_experts)
        return te__hf_refuse(c, TE_ERR_FORMAT, "num_experts_per_tok is %lld and num_local_experts %lld",
                             (long long)c->num_experts_per_tok, (long long)c->num_local_experts);
    if (c->router_jitter_noise > 0)
        return te__hf_refuse(c, TE_ERR_UNSUPPORTED, "router_jitter_noise is %g; only 0 is there",
                             c->router_jitter_noise);
    d->num_local_experts = (int)c->num_local_experts;
    d->num_experts_per_tok = (int)c->num_experts_per_tok;
    return true;
}

/* Gemma 2 and 3: a scale of their own, and caps. */
static bool te__hf_softmax(te__hf_config *c, const te__hf_family *f, te_causal_lm_desc *d) {
    const bool caps_scores = strcmp(f->model_type, "gemma2") == 0;
    float scalar;
    if (!(f->has & TE__HF_SOFTCAPS)) return true;
    if (!caps_scores && !isnan(c->attn_logit_softcapping) && c->attn_logit_softcapping != TE__HF_NULL_CAP)
        return te__hf_refuse(c, TE_ERR_UNSUPPORTED,
                             "attn_logit_softcapping is %g, and transformers computes a %s without; null is needed",
                             c->attn_logit_softcapping, f->model_type);
    if (!te__hf_positive(c, "query_pre_attn_scalar", c->query_pre_attn_scalar, 256, &scalar)) return false;
    d->softmax_scale = 1.0f / sqrtf(scalar);
    return te__hf_cap(c, "attn_logit_softcapping", c->attn_logit_softcapping, caps_scores ? 50 : 0,
                      &d->attn_logit_softcapping) &&
           te__hf_cap(c, "final_logit_softcapping", c->final_logit_softcapping, caps_scores ? 30 : 0,
                      &d->final_logit_softcapping);
}

/* The model that the keys describe. */
static bool te__hf_config_desc(te__hf_config *c, te_causal_lm_desc *d) {
    const te__hf_family *f = te__hf_families, *end = f + TE__COUNT(te__hf_families);
    const char *type = c->model_type;
    bool computed; /* head_dim, from the others */
    int i;
    memset(d, 0, sizeof(*d));
    if (!type) return te__hf_refuse(c, TE_ERR_FORMAT, "model_type is missing");
    while (f < end && strcmp(f->model_type, type) != 0) f++;
    if (f == end) {
        for (i = 0; i < TE__COUNT(te__hf_others) && strcmp(te__hf_others[i][0], type) != 0; i++) {}
        return te__hf_refuse(c, TE_ERR_UNSUPPORTED,
                             "model_type is \"%.60s\"%s; llama, mistral, mixtral, qwen2, qwen3, gemma, gemma2 and "
                             "gemma3_text are there%s",
                             type, i < TE__COUNT(te__hf_others) ? te__hf_others[i][1] : "",
                             i < TE__COUNT(te__hf_others) ? te__hf_others[i][2] : "");
    }
    if (c->other_layer)
        return te__hf_refuse(c, TE_ERR_UNSUPPORTED,
                             "layer_types[%d] is \"%.60s\"; full_attention and sliding_attention are possible",
                             c->num_slides, c->other_layer);
    if (c->quantized)
        return te__hf_refuse(c, TE_ERR_UNSUPPORTED,
                             "it has a quantization_config; dequantize the model in transformers and save it again");
    if (c->per_layer)
        return te__hf_refuse(c, TE_ERR_UNSUPPORTED,
                             "it has a per_layer_config; only models whose layers have one configuration are there");
    if (c->use_bidirectional_attention == 1 || c->is_causal == 0)
        return te__hf_refuse(c, TE_ERR_UNSUPPORTED, "%s; only causal models are there",
                             c->is_causal == 0 ? "is_causal is false" : "use_bidirectional_attention is true");
    if (!isnan(c->partial_rotary_factor) && c->partial_rotary_factor != 1)
        return te__hf_refuse(c, TE_ERR_UNSUPPORTED, "partial_rotary_factor is %g; only 1, all channels, is there",
                             c->partial_rotary_factor);
    if (!te__hf_count(c, "vocab_size", c->vocab_size, 1) || !te__hf_count(c, "hidden_size", c->hidden_size, 1) ||
        !te__hf_count(c, "intermediate_size", c->intermediate_size, 1) ||
        !te__hf_count(c, "num_hidden_layers", c->num_hidden_layers, 1) ||
        !te__hf_count(c, "num_attention_heads", c->num_attention_heads, 1))
        return false;
    if (c->num_hidden_layers > TE__HF_MAX_LAYERS)
        return te__hf_refuse(c, TE_ERR_FORMAT, "num_hidden_layers is %lld; %d at most are possible",
                             (long long)c->num_hidden_layers, (int)TE__HF_MAX_LAYERS);
    if ((c->num_key_value_heads == TE__HF_NULL && f->has & TE__HF_KV_HEADS) ||
        (c->num_key_value_heads == -1 && strcmp(type, "llama") == 0))
        c->num_key_value_heads = c->num_attention_heads;
    if (!te__hf_count(c, "num_key_value_heads", c->num_key_value_heads, 1)) return false;
    if (c->num_attention_heads % c->num_key_value_heads)
        return te__hf_refuse(c, TE_ERR_FORMAT,
                             "num_attention_heads is %lld and num_key_value_heads %lld, which must divide it",
                             (long long)c->num_attention_heads, (long long)c->num_key_value_heads);
    computed = (c->head_dim == -1 || c->head_dim == TE__HF_NULL) && !f->head_dim;
    if (computed && c->hidden_size % c->num_attention_heads)
        return te__hf_refuse(
            c, TE_ERR_FORMAT,
            "hidden_size is %lld and num_attention_heads %lld, which must divide it where head_dim is not given",
            (long long)c->hidden_size, (long long)c->num_attention_heads);
    if (computed) c->head_dim = c->hidden_size / c->num_attention_heads;
    else if (c->head_dim == -1) c->head_dim = f->head_dim;
    if (!te__hf_count(c, "head_dim", c->head_dim, 1)) return false;
    d->vocab_size = c->vocab_size;
    d->hidden_size = c->hidden_size;
    d->intermediate_size = c->intermediate_size;
    d->num_hidden_layers = (int)c->num_hidden_layers;
    d->num_attention_heads = (int)c->num_attention_heads;
    d->num_key_value_heads = (int)c->num_key_value_heads;
    d->head_dim = c->head_dim;
    d->zero_centered_gamma = (f->has & TE__HF_GEMMA) != 0;
    d->feedforward_norms = (f->has & TE__HF_FEEDFORWARD_NORMS) != 0;
    d->qk_norm = (f->has & TE__HF_QK_NORM) != 0;
    d->o_bias = f->has & TE__HF_ATTENTION_BIAS && c->attention_bias == 1;
    d->qkv_bias = f->has & TE__HF_QKV_BIAS || d->o_bias;
    d->mlp_bias = c->mlp_bias == 1 && strcmp(type, "llama") == 0;
    d->tie_word_embeddings = c->tie_word_embeddings < 0 ? d->zero_centered_gamma : c->tie_word_embeddings == 1;
    d->embedding_scale = f->has & TE__HF_GEMMA ? (float)sqrt((double)d->hidden_size) : 0.0f;
    if (!te__hf_activation(c, f, &d->activation) ||
        !te__hf_positive(c, "rms_norm_eps", c->rms_norm_eps, f->rms_norm_eps, &d->rms_norm_eps) ||
        !te__hf_windows(c, f, d) || !te__hf_experts(c, f, d) || !te__hf_rotaries(c, f, d))
        return false;
    if (!te__hf_softmax(c, f, d)) return false;
    if (isnan(c->attention_dropout)) return true;
    if (!(c->attention_dropout >= 0 && c->attention_dropout < 1))
        return te__hf_refuse(c, TE_ERR_FORMAT, "attention_dropout is %g; 0 to 1 are possible", c->attention_dropout);
    d->attention_dropout = (float)c->attention_dropout;
    return true;
}
