/* model/backend_text.c: reads and writes te_backend_config as text, by the names of fields and values. This file must
 * not depend on what a backend is, or on which backends go together. */

/* ---- names ---- */

/* The names of the values 0, 1, 2 ... of an enum. A value with the name NULL means "not given" and cannot be
 * written. */
typedef struct te__names {
    const char *const *name;
    int count;
} te__names;
static const char *const te__attn_names[] = {NULL, "te", "sdpa", "flex", "eager", "tilelang", "cudnn", "magi"};
static const char *const te__linear_names[] = {NULL, "torch", "te", "quack"};
static const char *const te__rms_norm_names[] = {NULL, "torch", "torch_fp32", "te", "quack"};
static const char *const te__rope_names[] = {"torch", "quack"};
static const char *const te__experts_names[] = {NULL, "torch", "torch_mm", "torch_mm_mxfp8", "gmm", "te"};
static const char *const te__dispatcher_names[] = {NULL, "torch", "deepep", "uccl_ep", "hybridep", "mok"};
static const char *const te__switch_names[] = {NULL, "true", "false"};
static const char *const te__bool_names[] = {"false", "true"};
static const char *const te__fp8_names[] = {"current", "block", "mxfp8"};
static const char *const te__graph_names[] = {"attn", "te_dpa", "moe_router", "moe_preprocess"};

/* PyTorch's names of the dtypes that te.h has. */
static const struct {
    const char *name;
    te_dtype dtype;
} te__dtype_words[] = {{"float32", TE_F32},   {"float", TE_F32}, {"float16", TE_F16}, {"half", TE_F16},
                       {"bfloat16", TE_BF16}, {"bf16", TE_BF16}, {"uint8", TE_U8},    {"int32", TE_I32},
                       {"int", TE_I32},       {"int64", TE_I64}, {"long", TE_I64}};
/* PyTorch's names of dtypes that te.h does not have. */
static const char *const te__foreign_dtypes[] = {"float64", "double", "int8",      "int16",
                                                 "short",   "bool",   "complex64", "cfloat"};

/* ---- the fields ---- */

typedef enum te__field_kind {
    TE__FIELD_ENUM,    /* an enum of the size of int; `names` has its values */
    TE__FIELD_BOOL,
    TE__FIELD_NOT,     /* a bool of the struct, named no_x, for a field x of the text: no_x is true if x is false */
    TE__FIELD_INT,
    TE__FIELD_NUMBER,  /* a double */
    TE__FIELD_DTYPE,
    TE__FIELD_FP8,     /* sets has_te_fp8 and te_fp8 */
    TE__FIELD_MODULES  /* cuda_graph.modules: bits whose names are joined by + */
} te__field_kind;
typedef struct te__config_field {
    const char *name;
    te__field_kind kind;
    size_t offset;
    te__names names; /* the possible values if they have names */
} te__config_field;

#define TE__NAMES(list) {list, TE__COUNT(list)}
#define TE__ROW(field, kind, list) {#field, kind, offsetof(te_backend_config, field), TE__NAMES(list)}
#define TE__NO_NAMES {NULL, 0}
#define TE__PLAIN(field, kind) {#field, kind, offsetof(te_backend_config, field), TE__NO_NAMES}
#define TE__MOK(field, kind)                                                                                       \
    {"mok." #field, kind, offsetof(te_backend_config, mok) + offsetof(te_mok_backend_config, field), TE__NO_NAMES}
enum { TE__BACKEND_FIELDS = 6 }; /* the first 6 fields choose backends */
static const te__config_field te__config_fields[] = {
    TE__ROW(attn, TE__FIELD_ENUM, te__attn_names),
    TE__ROW(linear, TE__FIELD_ENUM, te__linear_names),
    TE__ROW(rms_norm, TE__FIELD_ENUM, te__rms_norm_names),
    TE__ROW(rope, TE__FIELD_ENUM, te__rope_names),
    TE__ROW(experts, TE__FIELD_ENUM, te__experts_names),
    TE__ROW(dispatcher, TE__FIELD_ENUM, te__dispatcher_names),
    TE__ROW(rope_fusion, TE__FIELD_ENUM, te__switch_names),
    TE__ROW(keep_rope_fusion, TE__FIELD_BOOL, te__bool_names),
    TE__PLAIN(dispatcher_num_sms, TE__FIELD_INT),
    {"dispatcher_share_token_dispatcher", TE__FIELD_NOT,
     offsetof(te_backend_config, no_dispatcher_share_token_dispatcher), TE__NAMES(te__bool_names)},
    TE__ROW(dispatcher_async_dispatch, TE__FIELD_BOOL, te__bool_names),
    TE__MOK(fwd_num_comm_sms, TE__FIELD_INT),
    TE__MOK(bwd_num_comm_sms, TE__FIELD_INT),
    TE__MOK(minibatch_size, TE__FIELD_INT),
    TE__MOK(macrobatch_size, TE__FIELD_INT),
    TE__MOK(schedule_capacity_multiplier, TE__FIELD_NUMBER),
    TE__MOK(all_gather_top_experts_chunk_bytes, TE__FIELD_INT),
    TE__ROW(enable_deepep, TE__FIELD_ENUM, te__switch_names),
    TE__ROW(fake_balanced_gate, TE__FIELD_BOOL, te__bool_names),
    TE__PLAIN(fake_gate_noise, TE__FIELD_NUMBER),
    {"enable_hf_state_dict_adapter", TE__FIELD_NOT, offsetof(te_backend_config, no_hf_state_dict_adapter),
     TE__NAMES(te__bool_names)},
    TE__ROW(enable_fsdp_optimizations, TE__FIELD_BOOL, te__bool_names),
    TE__ROW(te_fp8, TE__FIELD_FP8, te__fp8_names),
    TE__PLAIN(gate_precision, TE__FIELD_DTYPE),
    TE__ROW(compile_attn, TE__FIELD_BOOL, te__bool_names),
    TE__ROW(cuda_graph, TE__FIELD_MODULES, te__graph_names),
    {"te_fp8.recipe", TE__FIELD_FP8, offsetof(te_backend_config, te_fp8),
     TE__NAMES(te__fp8_names)}, /* the last two entries are other names of te_fp8 and cuda_graph; they are read but
                                 * never written */
    {"cuda_graph.modules", TE__FIELD_MODULES, offsetof(te_backend_config, cuda_graph), TE__NAMES(te__graph_names)}};
#undef TE__ROW
#undef TE__PLAIN
#undef TE__MOK
enum { TE__CONFIG_WRITTEN = TE__COUNT(te__config_fields) - 2 };

/* ---- the nearest name ---- */

enum { TE__MAX_WORD = 64 }; /* longer words are not compared */

/* Returns the edit distance of a and b (Levenshtein 1966). It keeps only one row of the distance table. */
static int te__edits(const char *a, size_t n, const char *b) {
    int row[TE__MAX_WORD + 1];
    size_t m = strlen(b), i, k;
    if (n > TE__MAX_WORD || m > TE__MAX_WORD) return INT_MAX;
    for (k = 0; k <= m; k++) row[k] = (int)k;
    for (i = 1; i <= n; i++) {
        int corner = row[0];
        row[0] = (int)i;
        for (k = 1; k <= m; k++) {
            int replaced = corner + (a[i - 1] != b[k - 1]);
            corner = row[k];
            row[k] = (int)te__min(replaced, te__min(row[k], row[k - 1]) + 1);
        }
    }
    return row[m];
}
/* Computes the edit distance between `word` and `name`. If it is less than *edits, sets *edits to it and *best to
 * `name`. */
static void te__nearer(const char *word, size_t n, const char *name, const char **best, int *edits) {
    int d = te__edits(word, n, name);
    if (d >= *edits) return;
    *edits = d;
    *best = name;
}
/* If `edits` is small enough, appends the question whether `best` is meant. */
static void te__text_nearest(te__text *t, const char *best, int edits) {
    if (best && edits <= 2 + (int)strlen(best) / 4 && edits < (int)strlen(best))
        te__text_printf(t, "; is \"%s\" meant?", best);
}
/* Appends the names whose bits are set in `bits`, separated by `between`. */
static void te__text_names(te__text *t, const te__names *names, unsigned bits, const char *between) {
    const char *before = "";
    int i;
    for (i = 0; i < names->count; i++) {
        if (!names->name[i] || !(bits >> i & 1)) continue;
        te__text_printf(t, "%s%s", before, names->name[i]);
        before = between;
    }
}
/* Records TE_ERR_INVALID for a word that is not in `names`. The message names the function `who` and the field
 * `field`. */
static te_result te__unknown_name(te_ctx *te, const char *who, const char *field, const char *word, size_t n,
                                  const te__names *names) {
    te__text t = TE_ZERO;
    const char *best = NULL;
    int i, edits = INT_MAX;
    te_result result;
    for (i = 0; i < names->count; i++)
        if (names->name[i]) te__nearer(word, n, names->name[i], &best, &edits);
    te__text_names(&t, names, ~0u, ", ");
    te__text_put(&t, names->count ? " are possible" : "");
    te__text_nearest(&t, best, edits);
    result = te__fail(te, TE_ERR_INVALID, "%s: %s is \"%.*s\"; %s", who, field, (int)te__min((int64_t)n, TE__MAX_WORD),
                      word, te__text_str(&t));
    te__text_free(&t);
    return result;
}
/* Returns the index of the word in the names, or -1. */
static int te__name_index(const te__names *names, const char *word, size_t n) {
    int i;
    for (i = 0; i < names->count; i++)
        if (names->name[i] && strlen(names->name[i]) == n && memcmp(names->name[i], word, n) == 0) return i;
    return -1;
}

static const char *te__name_of(const te__names *names, int value) {
    if (value < 0 || value >= names->count) return "?";
    return names->name[value] ? names->name[value] : "default";
}

/* ---- reading ---- */

/* A piece of the caller's text. */
typedef struct te__word {
    const char *at;
    size_t n;
} te__word;
static te__word te__word_trimmed(const char *at, size_t n) {
    te__word w;
    while (n && (*at == ' ' || *at == '\t' || *at == '\n' || *at == '\r')) at++, n--;
    while (n && (at[n - 1] == ' ' || at[n - 1] == '\t' || at[n - 1] == '\n' || at[n - 1] == '\r')) n--;
    w.at = at;
    w.n = n;
    return w;
}

/* Reads a dtype by its PyTorch name, in any letter case, with or without "torch." in front. */
static te_result te__dtype_parse(te_ctx *te, const char *who, const te__config_field *f, te__word w, te_dtype *dtype) {
    const char *known[TE__COUNT(te__dtype_words)];
    char lower[TE__MAX_WORD + 1];
    te__names names;
    size_t n = w.n < (size_t)TE__MAX_WORD ? w.n : (size_t)TE__MAX_WORD, i;
    int k;
    for (i = 0; i < n; i++) lower[i] = (char)(w.at[i] >= 'A' && w.at[i] <= 'Z' ? w.at[i] - 'A' + 'a' : w.at[i]);
    lower[n] = 0;
    if (te__starts_with(lower, "torch.")) memmove(lower, lower + 6, (n -= 6) + 1);
    for (k = 0; k < TE__COUNT(te__dtype_words); k++) {
        known[k] = te__dtype_words[k].name;
        if (strcmp(lower, known[k]) != 0) continue;
        *dtype = te__dtype_words[k].dtype;
        return TE_OK;
    }
    for (k = 0; k < TE__COUNT(te__foreign_dtypes); k++)
        if (strcmp(lower, te__foreign_dtypes[k]) == 0)
            return te__fail(te, TE_ERR_UNSUPPORTED,
                            "%s: %s is \"%s\", a format that te.h does not have; float32 is its widest", who, f->name,
                            lower);
    names.name = known;
    names.count = TE__COUNT(known);
    return te__unknown_name(te, who, f->name, lower, n, &names);
}

/* Reads names joined by + and sets the bit of each in *modules. Refuses a name that occurs twice. An empty word gives
 * no bits. */
static te_result te__modules_parse(te_ctx *te, const char *who, const te__config_field *f, te__word w, int *modules) {
    size_t at = 0;
    *modules = 0;
    while (w.n && at <= w.n) {
        const char *plus = (const char *)memchr(w.at + at, '+', w.n - at);
        size_t n = plus ? (size_t)(plus - w.at) - at : w.n - at;
        te__word one = te__word_trimmed(w.at + at, n);
        int i = te__name_index(&f->names, one.at, one.n);
        if (i < 0) return te__unknown_name(te, who, f->name, one.at, one.n, &f->names);
        if (*modules & 1 << i)
            return te__fail(te, TE_ERR_INVALID, "%s: %s has \"%s\" twice; once is enough", who, f->name,
                            f->names.name[i]);
        *modules |= 1 << i;
        at += n + 1;
    }
    return TE_OK;
}

static const char *te__number_wanted(const te__config_field *f) {
    return f->kind == TE__FIELD_INT ? "a whole number" : "a number";
}
static te_result te__number_parse(te_ctx *te, const char *who, const te__config_field *f, te__word w, double *value) {
    bool whole = f->kind == TE__FIELD_INT;
    if (w.n && te__read_number(w.at, w.n, value) == w.n && *value - *value == 0 &&
        (!whole || (*value == floor(*value) && fabs(*value) <= INT_MAX)))
        return TE_OK;
    return te__fail(te, TE_ERR_INVALID, "%s: %s is \"%.*s\"; %s is needed", who, f->name,
                    (int)te__min((int64_t)w.n, TE__MAX_WORD), w.at, te__number_wanted(f));
}

/* Reads the value of one field from the word w and writes it to *config. */
static te_result te__field_parse(te_ctx *te, const char *who, const te__config_field *f, te__word w,
                                 te_backend_config *config) {
    char *at = (char *)config + f->offset;
    double number = 0;
    te_result result;
    int i;
    switch (f->kind) {
    case TE__FIELD_DTYPE: return te__dtype_parse(te, who, f, w, &config->gate_precision);
    case TE__FIELD_MODULES: return te__modules_parse(te, who, f, w, &config->cuda_graph.modules);
    case TE__FIELD_INT:
    case TE__FIELD_NUMBER:
        result = te__number_parse(te, who, f, w, &number);
        if (result == TE_OK && f->kind == TE__FIELD_INT) *(int *)(void *)at = (int)number;
        if (result == TE_OK && f->kind == TE__FIELD_NUMBER) *(double *)(void *)at = number;
        return result;
    default: break;
    }
    i = te__name_index(&f->names, w.at, w.n);
    if (i < 0) return te__unknown_name(te, who, f->name, w.at, w.n, &f->names);
    if (f->kind == TE__FIELD_ENUM) *(int *)(void *)at = i;
    else if (f->kind == TE__FIELD_BOOL) *(bool *)(void *)at = i == 1;
    else if (f->kind == TE__FIELD_NOT) *(bool *)(void *)at = i == 0;
    else {
        config->has_te_fp8 = true;
        config->te_fp8.recipe = (te_fp8_recipe)i;
        config->te_fp8.object = NULL;
    }
    return TE_OK;
}

static const te__config_field *te__field_find(const char *name, size_t n) {
    int i;
    for (i = 0; i < TE__COUNT(te__config_fields); i++)
        if (strlen(te__config_fields[i].name) == n && memcmp(te__config_fields[i].name, name, n) == 0)
            return &te__config_fields[i];
    return NULL;
}
/* Returns the bit that marks a field as given. If a field has two names, both have the same bit. */
static uint64_t te__field_bit(const te__config_field *f) {
    int i;
    for (i = 0; te__config_fields[i].offset != f->offset || te__config_fields[i].kind != f->kind; i++) {}
    return (uint64_t)1 << i;
}
static te_result te__unknown_field(te_ctx *te, const char *who, te__word w) {
    te__text t = TE_ZERO;
    const char *best = NULL;
    int i, edits = INT_MAX;
    te_result result;
    for (i = 0; i < TE__COUNT(te__config_fields); i++) te__nearer(w.at, w.n, te__config_fields[i].name, &best, &edits);
    te__text_nearest(&t, best, edits);
    result = te__fail(te, TE_ERR_INVALID, "%s: \"%.*s\" is no field of a te_backend_config%s", who,
                      (int)te__min((int64_t)w.n, TE__MAX_WORD), w.at, te__text_str(&t));
    te__text_free(&t);
    return result;
}

TE_API te_result te_backend_config_parse(te_ctx *te, const char *text, te_backend_config *config) {
    static const char who[] = "te_backend_config_parse";
    te_backend_config read;
    uint64_t given = 0;
    if (!te) return TE_ERR_STATE;
    if (!text || !config) return te__fail(te, TE_ERR_INVALID, "%s: %s is NULL", who, text ? "config" : "text");
    read = *config;
    while (*text) {
        size_t n = strcspn(text, ",");
        const char *sign = (const char *)memchr(text, '=', n);
        te__word pair = te__word_trimmed(text, n), name, value;
        const te__config_field *f;
        te_result result;
        if (!sign) {
            if (pair.n == 0 && !text[n]) break; /* spaces, or a comma at the end */
            return te__fail(te, TE_ERR_INVALID,
                            "%s: \"%.*s\" has no '='; pairs such as attn=te, with commas between them, are needed", who,
                            (int)te__min((int64_t)pair.n, TE__MAX_WORD), pair.at);
        }
        name = te__word_trimmed(text, (size_t)(sign - text));
        value = te__word_trimmed(sign + 1, n - (size_t)(sign + 1 - text));
        f = te__field_find(name.at, name.n);
        if (!f) return te__unknown_field(te, who, name);
        if (given & te__field_bit(f))
            return te__fail(te, TE_ERR_INVALID, "%s: %s is given twice; leave one out", who, f->name);
        given |= te__field_bit(f);
        result = te__field_parse(te, who, f, value, &read);
        if (result != TE_OK) return result;
        text += n + (text[n] == ',');
    }
    *config = read;
    return TE_OK;
}

TE_API const char *te_backend_config_field(int index, char *values, size_t size) {
    const te__config_field *f;
    te__text t = TE_ZERO;
    int i;
    if (values && size) values[0] = 0;
    if (index < 0 || index >= TE__CONFIG_WRITTEN) return NULL;
    f = &te__config_fields[index];
    te__text_names(&t, &f->names, ~0u, ", ");
    for (i = 0; i < TE__COUNT(te__dtype_words) && f->kind == TE__FIELD_DTYPE; i++)
        te__text_printf(&t, "%s%s", i ? ", " : "", te__dtype_words[i].name);
    if (f->kind == TE__FIELD_INT || f->kind == TE__FIELD_NUMBER) te__text_put(&t, te__number_wanted(f));
    if (values && size) snprintf(values, size, "%s", te__text_str(&t));
    te__text_free(&t);
    return f->name;
}

TE_API te_result te_fp8_config_parse(te_ctx *te, const char *name, bool unknown_is_current, te_fp8_config *config) {
    const te__names names = TE__NAMES(te__fp8_names);
    int i;
    if (!te) return TE_ERR_STATE;
    if (!name || !config)
        return te__fail(te, TE_ERR_INVALID, "te_fp8_config_parse: %s is NULL", name ? "config" : "name");
    i = te__name_index(&names, name, strlen(name));
    if (i < 0 && !unknown_is_current)
        return te__unknown_name(te, "te_fp8_config_parse", "recipe", name, strlen(name), &names);
    config->recipe = i < 0 ? TE_FP8_CURRENT : (te_fp8_recipe)i;
    config->object = NULL;
    return TE_OK;
}

static const te__config_field *te__backend_field(const char *field) {
    const te__config_field *f = field ? te__field_find(field, strlen(field)) : NULL;
    return f && f - te__config_fields < TE__BACKEND_FIELDS ? f : NULL;
}
TE_API te_result te_backend_parse(te_ctx *te, const char *field, const char *name, int *value) {
    const te__config_field *f = te__backend_field(field);
    int i;
    if (!te) return TE_ERR_STATE;
    if (!f || !name || !value)
        return te__fail(te, TE_ERR_INVALID,
                        "te_backend_parse: field \"%s\", %s; attn, linear, rms_norm, rope, experts and dispatcher are "
                        "possible, with a name and a place for its value",
                        field ? field : "NULL",
                        !name   ? "name NULL"
                        : value ? name
                                : "value NULL");
    i = te__name_index(&f->names, name, strlen(name));
    if (i < 0) return te__unknown_name(te, "te_backend_parse", field, name, strlen(name), &f->names);
    *value = i;
    return TE_OK;
}
TE_API const char *te_backend_name(const char *field, int value) {
    const te__config_field *f = te__backend_field(field);
    return f ? te__name_of(&f->names, value) : "?";
}

/* ---- writing ---- */

static const char *te__dtype_word(te_dtype dtype) {
    int i;
    for (i = 0; i < TE__COUNT(te__dtype_words); i++)
        if (te__dtype_words[i].dtype == dtype) return te__dtype_words[i].name;
    return te_dtype_name(dtype);
}
static void te__text_field(te__text *t, const te__config_field *f, const te_backend_config *config) {
    const char *at = (const char *)config + f->offset;
    const int number = f->kind == TE__FIELD_ENUM || f->kind == TE__FIELD_INT ? *(const int *)(const void *)at : 0;
    bool set = number != 0;
    if (f->kind == TE__FIELD_BOOL || f->kind == TE__FIELD_NOT) set = *(const bool *)(const void *)at;
    if (f->kind == TE__FIELD_NUMBER) set = *(const double *)(const void *)at != 0;
    if (f->kind == TE__FIELD_DTYPE) set = config->gate_precision != TE_DTYPE_NONE;
    if (f->kind == TE__FIELD_FP8) set = config->has_te_fp8;
    if (f->kind == TE__FIELD_MODULES) set = config->cuda_graph.modules != 0;
    if (!set) return;
    te__text_printf(t, "%s%s=", t->n ? "," : "", f->name);
    switch (f->kind) {
    case TE__FIELD_ENUM: te__text_put(t, te__name_of(&f->names, number)); break;
    case TE__FIELD_BOOL: te__text_put(t, "true"); break;
    case TE__FIELD_NOT: te__text_put(t, "false"); break;
    case TE__FIELD_INT: te__text_printf(t, "%d", number); break;
    case TE__FIELD_NUMBER: te__text_number(t, *(const double *)(const void *)at); break;
    case TE__FIELD_DTYPE: te__text_put(t, te__dtype_word(config->gate_precision)); break;
    case TE__FIELD_FP8:
        te__text_put(t, config->te_fp8.recipe == TE_FP8_OBJECT ? "object"
                                                               : te__name_of(&f->names, (int)config->te_fp8.recipe));
        break;
    case TE__FIELD_MODULES: te__text_names(t, &f->names, (unsigned)config->cuda_graph.modules, "+"); break;
    }
}
TE_API size_t te_backend_config_print(const te_backend_config *config, char *buffer, size_t size) {
    te__text t = TE_ZERO;
    size_t n;
    int i;
    if (buffer && size) buffer[0] = 0;
    if (!config) return 0;
    for (i = 0; i < TE__CONFIG_WRITTEN; i++) te__text_field(&t, &te__config_fields[i], config);
    n = t.n;
    if (buffer && size) snprintf(buffer, size, "%s", te__text_str(&t));
    te__text_free(&t);
    return n;
}
