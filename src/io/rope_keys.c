/* io/rope_keys.c: reads the keys of a rotary embedding in a config.json. Converts them to a te_rope_scaling as the
 * transformers library does. This file must not depend on models. */

/* The JSON object of a rotary embedding in a config.json. A missing key is NAN, -1 or NULL. */
typedef struct te__hf_rope {
    bool given;
    char *type, *older_type; /* the values of "rope_type" and "type", which point into the text; NULL: missing */
    double theta, factor, low_freq_factor, high_freq_factor, partial_rotary_factor, beta_fast, beta_slow, mscale,
        mscale_all_dim, attention_factor;
    int64_t original, truncate;
    float short_factor[TE_MAX_ROPE_FACTORS], long_factor[TE_MAX_ROPE_FACTORS]; /* for longrope */
    int num_short_factors, num_long_factors;
} te__hf_rope;

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
static void te__hf_rope_clear(te__hf_rope *rope) { te__hf_clear(rope, te__hf_rope_keys, TE__COUNT(te__hf_rope_keys)); }

/* Reads the list short_factor or long_factor of longrope. Appends its numbers to `list`, which has *n numbers. */
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

/* Reads the value of the key `name` into *rope, or skips an unknown key. */
static bool te__hf_rope_take(te__json *j, te__hf_rope *rope, const char *name) {
    bool known;
    if (strcmp(name, "short_factor") == 0) return te__hf_factors(j, name, rope->short_factor, &rope->num_short_factors);
    if (strcmp(name, "long_factor") == 0) return te__hf_factors(j, name, rope->long_factor, &rope->num_long_factors);
    if (!te__hf_take(j, rope, te__hf_rope_keys, TE__COUNT(te__hf_rope_keys), name, &known)) return false;
    if (!known) te__json_skip(j, 0);
    rope->given = rope->given || known;
    return !j->failed;
}

/* ---- meaning of the keys ---- */

/* Reads the numbers that only YaRN has. A missing number stays 0, the default of te_rope_scaling. */
static bool te__hf_yarn(const te__json *j, const te__hf_rope *r, te_rope_scaling *s) {
    s->no_truncate = r->truncate == 0;
    if (!te__hf_positive(j, "beta_fast", r->beta_fast, 0, &s->beta_fast) ||
        !te__hf_positive(j, "beta_slow", r->beta_slow, 0, &s->beta_slow) ||
        !te__hf_positive(j, "mscale", r->mscale, 0, &s->mscale) ||
        !te__hf_positive(j, "mscale_all_dim", r->mscale_all_dim, 0, &s->mscale_all_dim) ||
        !te__hf_positive(j, "attention_factor", r->attention_factor, 0, &s->attention_factor))
        return false;
    if ((s->beta_fast != 0.0f ? s->beta_fast : 32.0f) > (s->beta_slow != 0.0f ? s->beta_slow : 1.0f)) return true;
    return te__hf_refuse(
        j, TE_ERR_FORMAT,
        "rope_type is \"yarn\", beta_fast %g and beta_slow %g (0: missing, 32 and 1); the first must be the larger one",
        (double)s->beta_fast, (double)s->beta_slow);
}
/* Reads the two lists that only LongRoPE has, with one number for each of `pairs` pairs of channels. *s then points to
 * the lists of *r. */
static bool te__hf_longrope(const te__json *j, const te__hf_rope *r, int64_t pairs, te_rope_scaling *s) {
    int i;
    if (r->num_short_factors != pairs || r->num_long_factors != pairs)
        return te__hf_refuse(j, TE_ERR_FORMAT,
                             "rope_type is \"longrope\", short_factor has %d numbers and long_factor %d; %lld are "
                             "needed, one for each pair of channels",
                             r->num_short_factors, r->num_long_factors, (long long)pairs);
    for (i = 0; i < r->num_short_factors; i++)
        if (!(r->short_factor[i] > 0.0f && r->short_factor[i] <= FLT_MAX && r->long_factor[i] > 0.0f &&
              r->long_factor[i] <= FLT_MAX))
            return te__hf_refuse(j, TE_ERR_FORMAT,
                                 "short_factor[%d] is %g and long_factor[%d] %g; positive numbers are needed", i,
                                 (double)r->short_factor[i], i, (double)r->long_factor[i]);
    s->short_factor = r->short_factor;
    s->long_factor = r->long_factor;
    return te__hf_positive(j, "attention_factor", r->attention_factor, 0, &s->attention_factor);
}
/* Numbers that rotary embeddings need, but that config.json stores outside of the object of the rotary embedding. */
typedef struct te__hf_lengths {
    int64_t original, max_position; /* original_max_position_embeddings and max_position_embeddings; -1: missing */
    int64_t pairs;                  /* the number of pairs of channels that are rotated */
} te__hf_lengths;

static const char *te__hf_rope_type(const te__hf_rope *r) {
    return r->type ? r->type : r->older_type ? r->older_type : "default";
}
/* Fills *s, which must be zero, according to the type of *r. For longrope *s then points to the factor lists of *r. */
static bool te__hf_scaling(const te__json *j, const te__hf_rope *r, const te__hf_lengths *l, te_rope_scaling *s) {
    static const struct {
        const char *name;
        te_rope_type type;
    } types[] = {{"default", TE_ROPE_DEFAULT}, {"linear", TE_ROPE_LINEAR}, {"dynamic", TE_ROPE_DYNAMIC},
                 {"llama3", TE_ROPE_LLAMA3},   {"yarn", TE_ROPE_YARN},     {"longrope", TE_ROPE_LONGROPE}};
    const char *name = te__hf_rope_type(r);
    double factor = r->factor;
    int64_t original = l->original; /* takes precedence over the object's own number */
    int i = 0;
    while (i < TE__COUNT(types) && strcmp(types[i].name, name) != 0) i++;
    if (i == TE__COUNT(types))
        return te__hf_refuse(j, TE_ERR_UNSUPPORTED,
                             "rope_type is \"%.60s\"; default, linear, dynamic, llama3, yarn and longrope are possible",
                             name);
    s->type = types[i].type;
    if (s->type == TE_ROPE_DEFAULT) return true;
    if (original == -1) original = r->original;
    if (s->type == TE_ROPE_DYNAMIC || (s->type == TE_ROPE_LONGROPE && original == -1)) original = l->max_position;
    if (s->type != TE_ROPE_LINEAR &&
        !te__hf_count(j, s->type == TE_ROPE_DYNAMIC ? "max_position_embeddings" : "original_max_position_embeddings",
                      original, 1))
        return false;
    if (s->type != TE_ROPE_LINEAR) s->original_max_position_embeddings = original;
    if (isnan(factor) && (s->type == TE_ROPE_YARN || s->type == TE_ROPE_LONGROPE) && l->max_position > 0)
        factor = (double)l->max_position / (double)original;
    /* longrope needs the factor only if attention_factor is missing */
    if (isnan(factor) && (s->type != TE_ROPE_LONGROPE || isnan(r->attention_factor)))
        return te__hf_refuse(j, TE_ERR_FORMAT, "rope_type is \"%s\", and factor is missing", name);
    if (!te__hf_positive(j, "factor", factor, 1, &s->factor)) return false;
    if (s->type == TE_ROPE_YARN) return te__hf_yarn(j, r, s);
    if (s->type == TE_ROPE_LONGROPE) return te__hf_longrope(j, r, l->pairs, s);
    if (s->type != TE_ROPE_LLAMA3) return true;
    if (isnan(r->low_freq_factor) || isnan(r->high_freq_factor) || !(r->high_freq_factor > r->low_freq_factor))
        return te__hf_refuse(
            j, TE_ERR_FORMAT,
            "rope_type is \"llama3\", low_freq_factor %g and high_freq_factor %g; the second must be the larger one",
            r->low_freq_factor, r->high_freq_factor);
    return te__hf_positive(j, "low_freq_factor", r->low_freq_factor, 1, &s->low_freq_factor) &&
           te__hf_positive(j, "high_freq_factor", r->high_freq_factor, 1, &s->high_freq_factor);
}

