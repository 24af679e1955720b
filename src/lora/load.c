/* lora/load.c: te_lora_load reads a folder of the peft library. This file must not depend on what adapters compute. The
 * files are not trusted: all checks precede the first change of the model. */

enum { TE__PEFT_MAX_CONFIG = 1 << 24, TE__PEFT_MAX_PATTERNS = 1000, TE__PEFT_CHUNK = 1 << 16 };

/* One entry of alpha_pattern. The key is a path or a regular expression. The expression matches a whole path, or the
 * rest of a path after one of its dots. */
typedef struct te__peft_alpha {
    const char *path; /* points into the text; NULL: `pattern` is used */
    te__pattern pattern;
    float alpha;
} te__peft_alpha;
typedef struct te__peft {
    te__json j;
    te_module *model;
    te_safetensors *file;
    float alpha, dropout;
    bool rslora, dora, ties; /* use_rslora, use_dora, ensure_weight_tying (embedding and lm_head trained as one) */
    te_lora_bias bias;
    const char *base;   /* value of base_model_name_or_path (points into the text of the config), or NULL */
    const char **saved; /* modules_to_save; the names point into the text of the config */
    int num_saved, cap_saved;
    te__peft_alpha *alphas;
    int num_alphas, cap_alphas, num_patterns;
    te__lora_list fresh; /* sites that get new adapters from this call */
    te__lora_list all;   /* all sites that the file has adapters for */
    te__trained_list trained;
} te__peft;

static bool te__peft_refuse(te__peft *p, const char *key, const char *what) {
    p->j.failed = true;
    return te__not_ok(p->j.te, TE_ERR_UNSUPPORTED, "%s: \"%s\" is %s, which te.h's LoRA does not know", p->j.path, key,
                      what);
}

/* ---- adapter_config.json ---- */

/* Reads one key of alpha_pattern. peft tests re.match("(.*\\.)?(KEY)$", path). A key that is the path of a site of the
 * model is compared as plain text instead, because te_lora_save writes paths without escaping them. */
static bool te__peft_open_alpha(te__peft *p, const char *key, te__peft_alpha *to) {
    char expression[TE__PATTERN_LENGTH + 16], who[512];
    te__lora_site s;
    int product;
    memset(to, 0, sizeof(*to));
    if (te__lora_find_site(p->model, key, &s, &product)) {
        to->path = key;
        return true;
    }
    if (strlen(key) > TE__PATTERN_LENGTH || p->num_patterns++ == TE__PEFT_MAX_PATTERNS)
        return te__not_ok(
            p->j.te, TE_ERR_FORMAT,
            "%s: the alpha_pattern has \"%.60s\"; regular expressions of up to %d bytes, and up to %d of them, "
            "are possible",
            p->j.path, key, (int)TE__PATTERN_LENGTH, (int)TE__PEFT_MAX_PATTERNS);
    snprintf(expression, sizeof(expression), "(.*\\.)?(%s)$", key);
    snprintf(who, sizeof(who), "%.480s: alpha_pattern", p->j.path);
    return te__pattern_open(&to->pattern, p->j.te, who, key, expression);
}
static bool te__peft_parse_alphas(te__peft *p) {
    const char *key;
    for (key = te__json_first(&p->j); key; key = te__json_next(&p->j)) {
        float alpha;
        if (!te__grow(p->j.te, (void **)&p->alphas, &p->cap_alphas, p->num_alphas, sizeof(te__peft_alpha)))
            return false;
        if (!te__peft_open_alpha(p, key, &p->alphas[p->num_alphas])) {
            p->j.failed = true;
            return false;
        }
        p->num_alphas++;
        p->alphas[p->num_alphas - 1].alpha = alpha = (float)te__json_number(&p->j);
        if (!(fabsf(alpha) <= FLT_MAX)) {
            te__fail(p->j.te, TE_ERR_FORMAT, "%s: the alpha_pattern of \"%.200s\" is %g; a finite number is needed",
                     p->j.path, key, (double)alpha);
            p->j.failed = true;
            return false;
        }
    }
    return !p->j.failed;
}
/* Reads modules_to_save: a list of names, or null. */
static bool te__peft_parse_saved(te__peft *p) {
    bool more;
    te__json_space(&p->j);
    if (*p->j.at != '[') {
        te__json_skip_word(&p->j);
        return !p->j.failed;
    }
    for (more = te__json_open(&p->j, '[', ']'); more; more = te__json_more(&p->j, ']')) {
        const char *name = te__json_string(&p->j);
        if (!name ||
            !te__grow(p->j.te, (void **)(uintptr_t)&p->saved, &p->cap_saved, p->num_saved, sizeof(const char *)))
            return false;
        p->saved[p->num_saved++] = name;
    }
    return !p->j.failed;
}
/* If the next value is JSON's null or false, or an empty list or object, reads it and returns true. */
static bool te__peft_is_nothing(te__json *j) {
    int word;
    te__json_space(j);
    if (*j->at == '[' || *j->at == '{') {
        const char close = *j->at == '[' ? ']' : '}';
        return !te__json_open(j, *j->at, close) && !j->failed;
    }
    word = te__json_word(j);
    return word == 0 || word == 2;
}
static bool te__peft_parse_bias(te__peft *p) {
    static const char *const names[] = {"none", "all", "lora_only"}; /* in the order of te_lora_bias */
    const char *text = te__json_string(&p->j);
    int i;
    for (i = 0; i < TE__COUNT(names) && text; i++)
        if (strcmp(text, names[i]) == 0) {
            p->bias = (te_lora_bias)i;
            return true;
        }
    return text && te__peft_refuse(p, "bias", text);
}
/* Reads one key of the config. Skips the keys that give the modules and their ranks, because both follow from the
 * tensors in the file. */
static bool te__peft_take(te__peft *p, const char *key) {
    static const char *const beyond[] = {
        "fan_in_fan_out", "lora_bias",       "target_parameters", "trainable_token_indices",
        "use_qalora",     "megatron_config", "layer_replication", "alora_invocation_tokens",
        "arrow_config",   "kasa_config",     "monteclora_config", "use_bdlora",
        "velora_config"};
    static const char *const harmless[] = {"gaussian", "orthogonal", "eva"};
    const char *text;
    int i;
    for (i = 0; i < TE__COUNT(beyond); i++)
        if (strcmp(key, beyond[i]) == 0)
            return te__peft_is_nothing(&p->j) || p->j.failed || te__peft_refuse(p, key, "set");
    if (strcmp(key, "peft_type") == 0) {
        text = te__json_string(&p->j);
        return text && (strcmp(text, "LORA") == 0 || te__peft_refuse(p, key, text));
    }
    if (strcmp(key, "bias") == 0) return te__peft_parse_bias(p);
    if (strcmp(key, "modules_to_save") == 0) return te__peft_parse_saved(p);
    te__json_space(&p->j);
    if (strcmp(key, "init_lora_weights") == 0 && *p->j.at == '"') { /* refuses methods by which peft changes the
                                                                     * weight itself */
        text = te__json_string(&p->j);
        for (i = 0; text && i < TE__COUNT(harmless); i++)
            if (strcmp(text, harmless[i]) == 0) return true;
        return text && te__peft_refuse(p, key, text);
    }
    if (strcmp(key, "base_model_name_or_path") == 0 && *p->j.at == '"') {
        p->base = te__json_string(&p->j);
        return p->base != NULL;
    }
    if (strcmp(key, "lora_alpha") == 0)
        p->alpha = (float)te__json_number(&p->j);
    else if (strcmp(key, "lora_dropout") == 0)
        p->dropout = (float)te__json_number(&p->j);
    else if (strcmp(key, "use_rslora") == 0)
        p->rslora = te__json_word(&p->j) == 1;
    else if (strcmp(key, "use_dora") == 0)
        p->dora = te__json_word(&p->j) == 1;
    else if (strcmp(key, "ensure_weight_tying") == 0)
        p->ties = te__json_word(&p->j) == 1;
    else if (strcmp(key, "alpha_pattern") == 0)
        return te__peft_parse_alphas(p);
    else
        te__json_skip(&p->j, 0);
    return !p->j.failed;
}
static bool te__peft_parse(te__peft *p, te__text *config) {
    const char *key;
    p->alpha = 8.0f; /* peft's defaults */
    p->j = te__json_of(p->j.te, p->j.path, "the text", config->s, config->n);
    for (key = te__json_first(&p->j); key; key = te__json_next(&p->j))
        if (!te__peft_take(p, key)) return false;
    if (!te__json_end(&p->j)) return false;
    if (fabsf(p->alpha) <= FLT_MAX && p->dropout >= 0.0f && p->dropout < 1.0f) return true;
    return te__not_ok(
        p->j.te, TE_ERR_FORMAT,
        "%s: lora_alpha is %g and lora_dropout %g; a finite number, and one from 0 to below 1, are needed", p->j.path,
        (double)p->alpha, (double)p->dropout);
}

/* ---- names of tensors in the file ---- */

typedef struct te__peft_tensor {
    const char *adapter; /* "lora_A", "lora_B" or TE__MAGNITUDE; NULL: the tensor is a parameter of the model */
    char path[TE__PEFT_NAME]; /* path of the site, or of the parameter's module */
    te__lora_site site;
    int product;
    te_module *m; /* the module that owns the parameter */
    int entry;
    bool head; /* the tensor is lm_head.weight of a tied model; m and entry are those of the embedding table */
} te__peft_tensor;

static bool te__peft_unknown(te__peft *p, const te_safetensors_entry *e) {
    if (te__tied_table(p->model) && te__starts_with(e->name, TE__PEFT_PREFIX "lm_head."))
        return te__st_fail(
            p->file, TE_ERR_UNSUPPORTED,
            "tensor " TE__ST_NAME " is an adapter of lm_head, which this model has none of: it multiplies by the "
                                  "embedding's table (tie_word_embeddings); "
            "set that to false in config.json, with lm_head.weight beside the table, and open the model again",
            e->name);
    return te__st_fail(
        p->file, TE_ERR_FORMAT,
        "tensor " TE__ST_NAME
        " is no adapter of a product of this model, and none of its parameters; adapters' names are " TE__PEFT_PREFIX
        "PATH.lora_A.weight and ...lora_B.weight",
        e->name);
}
/* Cuts the last component off the dotted path text[0 .. *n) and returns it, or "" for an empty path. Shortens *n. */
static const char *te__peft_component(char *text, size_t *n) {
    size_t at = *n;
    text[at] = 0;
    while (at > 0 && text[at - 1] != '.') at--;
    *n = at > 0 ? at - 1 : 0;
    return text + at;
}
static bool te__peft_look_up(te__peft *p, const te_safetensors_entry *e, te__peft_tensor *t) {
    static const char *const names[][2] = {
        {"lora_embedding_A", "lora_A"}, {"lora_embedding_B", "lora_B"}, {TE__MAGNITUDE, TE__MAGNITUDE}};
    const size_t before = strlen(TE__PEFT_PREFIX);
    char text[TE__PEFT_NAME], name[TE__PEFT_NAME];
    const char *last, *above;
    const te__entry *entry;
    size_t n;
    int i;
    memset(t, 0, sizeof(*t));
    if (!te__starts_with(e->name, TE__PEFT_PREFIX) || strlen(e->name) >= TE__PEFT_NAME) return te__peft_unknown(p, e);
    n = strlen(e->name) - before;
    memcpy(text, e->name + before, n + 1);
    last = te__peft_component(text, &n);
    for (i = 0; i < TE__COUNT(names); i++)
        if (strcmp(last, names[i][0]) == 0) t->adapter = names[i][1];
    memcpy(t->path, text, n);
    t->path[n] = 0;
    if (!t->adapter) {
        const size_t parameter = n;
        above = te__peft_component(text, &n);
        if (te__starts_with(last, "weight") && (strcmp(above, "lora_A") == 0 || strcmp(above, "lora_B") == 0))
            t->adapter = above[5] == 'A' ? "lora_A" : "lora_B";
        t->path[t->adapter || strcmp(above, "base_layer") == 0 ? n : parameter] = 0;
        for (i = 6; t->adapter && last[i] >= '0' && last[i] <= '9' && t->product < TE_MAX_GEMMS; i++)
            t->product = 10 * t->product + (last[i] - '0');
    }
    if (t->adapter) /* accepts only the one name that te__peft_name gives */
        return (te__lora_find_site(p->model, t->path, &t->site, &t->product) &&
                te__lora_path(p->model, &t->site, t->path, sizeof(t->path)) &&
                t->product < te__lora_shape_of(&t->site, 0).products &&
                strcmp(te__peft_name(&t->site, t->path, t->adapter, t->product, name), e->name) == 0) ||
               te__peft_unknown(p, e);
    t->m = te_module_find(p->model, t->path);
    if (!t->m && te__tied_table(p->model) && strcmp(t->path, "lm_head") == 0) {
        t->m = te__tied_table(p->model);
        t->head = true;
    }
    entry = te__module_entry(t->m, last);
    if (!entry || entry->kind != TE_ENTRY_PARAMETER || t->m->cls == &te__lora_part_class ||
        (t->m->parent && te__lora_of(t->m->parent)))
        return te__peft_unknown(p, e);
    t->entry = (int)(entry - t->m->entries);
    return true;
}

/* ---- parameters trained in addition to adapters ---- */

/* Returns true if the path of m, or of a module above m, ends in a name of modules_to_save. As in peft, the name may
 * begin in the middle of a component of the path. Sets *whole to true if a name begins at the start of a component. */
static bool te__peft_saves(const te__peft *p, const te_module *m, bool *whole) {
    char path[TE__TREE_PATH];
    bool any = false;
    int i;
    *whole = false;
    for (; m != p->model; m = m->parent) {
        te__path_below(p->model, m, path, sizeof(path));
        for (i = 0; i < p->num_saved; i++) {
            any = any || te__ends_with(path, p->saved[i]);
            *whole = *whole || te__path_ends_in(path, p->saved[i]);
        }
    }
    return any;
}
/* Returns true if the file has adapters for one of m's sites. */
static bool te__peft_adapts(const te__peft *p, te_module *m) {
    char path[TE__TREE_PATH], name[TE__PEFT_NAME];
    te__lora_site s;
    int sites;
    s.owner = m;
    if (!te__lora_has_sites(m, &sites)) return false;
    for (s.gemm = 0; s.gemm < sites; s.gemm++)
        if (te_safetensors_find(p->file,
                                te__peft_name(&s, te__lora_path(p->model, &s, path, sizeof(path)), "lora_A", 0, name)))
            return true;
    return false;
}
/* Returns true if the config says that the parameter was trained. */
static bool te__peft_trains(const te__peft *p, te_module *m, int entry) {
    bool whole;
    if (te__peft_saves(p, m, &whole)) return true;
    return te__is_bias(&m->entries[entry]) &&
           (p->bias == TE_LORA_BIAS_ALL || (p->bias == TE_LORA_BIAS_LORA_ONLY && te__peft_adapts(p, m)));
}
/* Returns the file's tensor for a parameter; NULL if there is none. Its name may contain "base_layer.". */
static const te_safetensors_entry *te__peft_find_parameter(const te__peft *p, const te_module *m, int entry) {
    static const char *const between[] = {"", "base_layer."};
    char path[TE__TREE_PATH], name[TE__PEFT_NAME];
    const te_safetensors_entry *e = NULL;
    int i;
    te__path_below(p->model, m, path, sizeof(path));
    for (i = 0; i < 2 && !e; i++) {
        snprintf(name, sizeof(name), TE__PEFT_PREFIX "%s%s%s%s", path, path[0] ? "." : "", between[i],
                 m->entries[entry].name);
        e = te_safetensors_find(p->file, name);
    }
    return e;
}
static bool te__peft_value_fits(te__peft *p, const te_safetensors_entry *e, const te_tensor *x) {
    char a[TE__SHAPE_TEXT], b[TE__SHAPE_TEXT];
    if (!te__is_float(e->dtype))
        return te__st_fail(p->file, TE_ERR_DTYPE, "tensor " TE__ST_NAME " is %s; f32, f16 and bf16 are possible",
                           e->name, te_dtype_name(e->dtype));
    if (e->ndim == x->ndim && memcmp(e->shape, x->shape, (size_t)x->ndim * sizeof(int64_t)) == 0) return true;
    return te__st_fail(p->file, TE_ERR_SHAPE, "tensor " TE__ST_NAME " is %s, and that of the model %s", e->name,
                       te__dims_text(e->ndim, e->shape, a), te__shape_text(x, b));
}
/* Compares x and y, which have the same shape, after a cast to `dtype`. Returns -1 if x and y are equal, and -2 after
 * an error. Otherwise returns the index of a row. The first difference is in this row or in a later one. */
static int64_t te__peft_difference(te_tensor *x, te_tensor *y, te_dtype dtype) {
    te_ctx *te = x->te;
    const int64_t rows = x->ndim ? x->shape[0] : 1, cols = te__numel(x) / te__max(rows, 1),
                  chunk = te__max(1, TE__PEFT_CHUNK / te__max(cols, 1));
    const size_t bytes = (size_t)(te__min(rows, chunk) * cols * te__dtype_size(dtype));
    char *host = (char *)te__alloc(te, 2 * bytes);
    int64_t at, n, found = host ? -1 : -2;
    for (at = 0; at < rows && found == -1; at += n) {
        te_tensor *a, *b;
        n = te__min(rows - at, chunk);
        te__frame_begin(te);
        a = te_tensor_cast(te_tensor_narrow(x, 0, at, n), dtype);
        b = te_tensor_cast(te_tensor_narrow(y, 0, at, n), dtype);
        if (!a || !b || te_tensor_to_host(a, host) != TE_OK || te_tensor_to_host(b, host + bytes) != TE_OK) found = -2;
        else if (memcmp(host, host + bytes, te_tensor_bytes(a)) != 0) found = at;
        te__frame_end(te, NULL, 0);
    }
    te__free(te, host);
    return found;
}
/* Checks that tensor `e` of the file equals tensor `other` of the file or, if `other` is NULL, the model's parameter x.
 * Values that are equal after a cast to the dtype of either tensor count as equal. */
static bool te__peft_is_base(te__peft *p, const te_safetensors_entry *e, const te_safetensors_entry *other,
                             te_tensor *x) {
    te_tensor *value;
    int64_t at = -2;
    if (!other && !te__peft_value_fits(p, e, x)) return false;
    if (!other && x->quantized)
        return te__st_fail(p->file, TE_ERR_UNSUPPORTED,
                           "tensor " TE__ST_NAME " is a parameter of the base model, which is stored quantized here, "
                                                 "so that the two cannot be compared; open the model "
                           "outside of te_quantized_model_init_begin",
                           e->name);
    te__frame_begin(p->j.te);
    te_no_grad_begin(p->j.te);
    value = te_safetensors_read(p->file, e->name);
    if (other) x = te_safetensors_read(p->file, other->name);
    if (value && x) at = te__peft_difference(value, x, x->dtype);
    if (at >= 0 && value->dtype != x->dtype) at = te__peft_difference(value, x, value->dtype);
    te_no_grad_end(p->j.te);
    te__frame_end(p->j.te, NULL, 0);
    if (at < 0) return at == -1;
    if (other)
        return te__st_fail(p->file, TE_ERR_UNSUPPORTED,
                           "tensor " TE__ST_NAME " differs from " TE__ST_NAME
                           " in or behind row %lld, and the model has one for both (tie_word_embeddings)",
                           e->name, other->name, (long long)at);
    return te__st_fail(p->file, TE_ERR_FORMAT,
                       "tensor " TE__ST_NAME " differs from the model's in or behind row %lld, and modules_to_save and "
                                             "bias do not name it: these adapters belong to another base "
                       "model",
                       e->name, (long long)at);
}
static bool te__peft_check_parameter(te__peft *p, const te_safetensors_entry *e, const te__peft_tensor *t) {
    te_tensor *x = t->m->entries[t->entry].tensor;
    if (t->m->meta || (!x->buffer && !x->quantized))
        return te__st_fail(p->file, TE_ERR_STATE, "\"%s\" has no memory yet; te_module_reset_parameters gives it",
                           t->path);
    if (t->head && te__peft_trains(p, t->m, t->entry)) {
        const te_safetensors_entry *table = te__peft_find_parameter(p, t->m, t->entry);
        return table && te__peft_value_fits(p, e, x) && te__peft_value_fits(p, table, x)
                   ? te__peft_is_base(p, e, table, NULL)
               : table ? false
                       : te__peft_unknown(p, e);
    }
    if (!te__peft_trains(p, t->m, t->entry)) return te__peft_is_base(p, e, NULL, x);
    if (x->quantized)
        return te__st_fail(p->file, TE_ERR_UNSUPPORTED,
                           "tensor " TE__ST_NAME " is of modules_to_save, and the model's is stored quantized; open it "
                                                 "outside of te_quantized_model_init_begin",
                           e->name);
    if (t->m->parallel.size > 1)
        return te__st_fail(p->file, TE_ERR_UNSUPPORTED,
                           "\"%s\" is shared by %d ranks; te_model_load reads this rank's part", t->path,
                           t->m->parallel.size);
    if (t->m == te__tied_table(p->model) && !p->ties &&
        !te_safetensors_find(p->file, TE__PEFT_PREFIX "lm_head.weight"))
        return te__st_fail(p->file, TE_ERR_UNSUPPORTED,
                           "tensor " TE__ST_NAME " is trained, and lm_head, which is the same in this model "
                                                 "(tie_word_embeddings), is not (ensure_weight_tying); set "
                           "tie_word_embeddings to false in config.json, with lm_head.weight beside the table, and "
                           "open the model again",
                           e->name);
    return te__peft_value_fits(p, e, x);
}
/* Checks that the file has every parameter of m that an earlier call made trainable. If modules_to_save names m
 * (te__peft_saves), the file must have all parameters of m. If each such name begins in the middle of a component, the
 * file may also have none of them. */
static bool te__peft_lacks_parameter(void *user, te_module *m) {
    te__peft *p = (te__peft *)user;
    const te__trained *t = te__trained_of(m);
    char name[TE__PEFT_NAME];
    bool whole, saves = te__peft_saves(p, m, &whole), some = false;
    int i;
    for (i = 0; i < m->num_entries && saves; i++)
        some = some || (m->entries[i].kind == TE_ENTRY_PARAMETER && te__peft_find_parameter(p, m, i));
    for (i = 0; i < m->num_entries; i++) {
        if (m->entries[i].kind != TE_ENTRY_PARAMETER || !(((whole || some) && saves) || te__is_trained(t, i)) ||
            te__peft_find_parameter(p, m, i))
            continue;
        return te__st_fail(p->file, TE_ERR_FORMAT, "there is no tensor " TE__ST_NAME ", which %s",
                           te__peft_parameter(p->model, m, &m->entries[i], name),
                           saves ? "modules_to_save names" : "is trained; te_lora_remove first");
    }
    return true;
}
/* Makes the parameters of m trained if the config says so. */
static bool te__peft_give_trained(void *user, te_module *m) {
    te__peft *p = (te__peft *)user;
    bool whole, some = false;
    int i;
    if (m->cls == &te__lora_part_class || (m->parent && te__lora_of(m->parent))) return true;
    if (te__peft_saves(p, m, &whole)) {
        for (i = 0; i < m->num_entries; i++) some = some || te__peft_find_parameter(p, m, i);
        return (!whole && !some) || te__trained_list_give(&p->trained, m, true) == TE_OK;
    }
    if (p->bias == TE_LORA_BIAS_NONE || (p->bias == TE_LORA_BIAS_LORA_ONLY && !te__peft_adapts(p, m))) return true;
    return te__trained_list_give(&p->trained, m, false) == TE_OK;
}
/* Copies a tensor of the file to `weight`. */
static te_result te__peft_read(te__peft *p, const char *name, te_tensor *weight, bool transposed) {
    te_tensor *value;
    te_result result;
    if (!weight)
        return te__fail(p->j.te, TE_ERR_STATE, "%s: tensor " TE__ST_NAME ": the child that it is for is gone",
                        p->j.path, name);
    te__frame_begin(p->j.te);
    value = te_tensor_cast(te_safetensors_read(p->file, name), weight->dtype);
    if (value && transposed) value = te_tensor_transpose(value, 0, 1);
    result = value ? te_tensor_copy(weight, value) : te_error_code(p->j.te);
    te__frame_end(p->j.te, NULL, 0);
    return result;
}
static bool te__peft_fill_trained(void *user, te_module *m) {
    te__peft *p = (te__peft *)user;
    const te__trained *t = te__trained_of(m);
    te_result result = TE_OK;
    int i;
    for (i = 0; t && i < t->n && result == TE_OK; i++) {
        const int entry = t->items[i].entry;
        const te_safetensors_entry *e = te__peft_find_parameter(p, m, entry);
        if (e) result = te__peft_read(p, e->name, m->entries[entry].tensor, false);
    }
    return result == TE_OK;
}

/* ---- adapters ---- */

/* Checks that the file has a float tensor `name` [rows, cols], or [rows] if cols is 0. `with` (for the message) is the
 * tensor that needs `name`. */
static bool te__peft_adapter_fits(te__peft *p, const char *name, const char *with, const char *path, int64_t rows,
                                  int64_t cols) {
    const te_safetensors_entry *e = te_safetensors_find(p->file, name);
    if (!e)
        return te__st_fail(p->file, TE_ERR_FORMAT, "tensor " TE__ST_NAME " is there without " TE__ST_NAME, with, name);
    if (!te__is_float(e->dtype))
        return te__st_fail(p->file, TE_ERR_DTYPE, "tensor " TE__ST_NAME " is %s; f32, f16 and bf16 are possible",
                           e->name, te_dtype_name(e->dtype));
    if (e->ndim == (cols ? 2 : 1) && e->shape[0] == rows && (!cols || e->shape[1] == cols)) return true;
    if (cols)
        return te__st_fail(p->file, TE_ERR_SHAPE,
                           "tensor " TE__ST_NAME " has %d dimensions, %lld and %lld; [%lld, %lld] is needed for the "
                                                 "features of \"%s\", and all its adapters have one rank",
                           e->name, e->ndim, (long long)e->shape[0], (long long)e->shape[1], (long long)rows,
                           (long long)cols, path);
    return te__st_fail(p->file, TE_ERR_SHAPE,
                       "tensor " TE__ST_NAME
                       " has %d dimensions, the first one %lld; [%lld], the output features of \"%s\", is needed",
                       e->name, e->ndim, (long long)e->shape[0], (long long)rows, path);
}
/* Returns the number of rows that lora_A of a site has in the file (the rank); 0 if the file has no such matrix. */
static int64_t te__peft_rank(const te__peft *p, const te__lora_site *s, const char *path) {
    char name[TE__PEFT_NAME];
    const te_safetensors_entry *e = te_safetensors_find(p->file, te__peft_name(s, path, "lora_A", 0, name));
    return e && e->ndim == 2 ? e->shape[0] : 0;
}
/* Returns a peft module's alpha: the value of the first matching key of alpha_pattern (as in peft), or lora_alpha if no
 * key matches. */
static float te__peft_alpha_of(te__peft *p, const char *path) {
    int i;
    for (i = 0; i < p->num_alphas && !(p->alphas[i].path ? strcmp(p->alphas[i].path, path) == 0
                                                         : te__pattern_matches(&p->alphas[i].pattern, path));
         i++) {}
    return i < p->num_alphas ? p->alphas[i].alpha : p->alpha;
}

/* ---- adapters of experts ---- */

/* Writes the peft path of a site to `path` and returns `path`. For experts this is the path of Linear number n. */
static const char *te__peft_module(const te__peft *p, const te__lora_site *s, int n, char path[TE__PEFT_NAME]) {
    char expert[64];
    te__lora_path(p->model, s, path, TE__TREE_PATH);
    if (te__is_experts(s->owner)) {
        const size_t length = strlen(path);
        snprintf(path + length, TE__PEFT_NAME - length, "%s%s", length ? "." : "",
                 te__product_name(s->owner, n, expert, sizeof(expert)));
    }
    return path;
}
/* Returns lora_A of weight matrix n as f32 in host memory, which the caller frees. On failure records an error and
 * returns NULL. */
static float *te__peft_values(te__peft *p, const te__lora_site *s, const char *path, int n, size_t *bytes) {
    char name[TE__PEFT_NAME];
    te_tensor *x;
    float *host = NULL;
    te__frame_begin(p->j.te);
    x = te_safetensors_read(p->file, te__peft_name(s, path, "lora_A", n, name));
    *bytes = x ? (size_t)te__numel(x) * sizeof(float) : 0;
    host = x ? (float *)te__alloc(p->j.te, *bytes) : NULL;
    if (host && te_tensor_to_f32(x, host) != TE_OK) {
        te__free(p->j.te, host);
        host = NULL;
    }
    te__frame_end(p->j.te, NULL, 0);
    return host;
}
/* Returns a site's LoRA rank in te.h divided by the rank in the file: 1 or 2. On failure returns 0.
 *
 * In te.h the gate and up Linears of an expert share one lora_A. If the file has two different ones, lora_A gets the
 * rows of both. Then each lora_B has zeros for the lora_A rows of the other Linear. */
static int te__peft_ranks(te__peft *p, const te__lora_site *s, const char *path) {
    const bool gated = te__is_experts(s->owner) && te__first_proj(s->owner) == TE__GATE_PROJ;
    const int products = gated ? te__expert_products(s->owner) : 0;
    int n, ranks = 1;
    for (n = 0; n < products && ranks == 1; n += TE__PROJS) {
        size_t bytes[2] = {0, 0};
        float *gate = te__peft_values(p, s, path, n + TE__GATE_PROJ, &bytes[0]),
              *up = gate ? te__peft_values(p, s, path, n + TE__UP_PROJ, &bytes[1]) : NULL;
        if (!up) ranks = 0;
        else if (bytes[0] != bytes[1] || memcmp(gate, up, bytes[0]) != 0) ranks = 2;
        te__free(p->j.te, gate);
        te__free(p->j.te, up);
    }
    return ranks;
}
/* Checks that all Linears of a site's experts have the same alpha, because a site has one scaling factor. */
static bool te__peft_one_alpha(te__peft *p, const te__lora_site *s) {
    char path[TE__PEFT_NAME];
    const float alpha = te__peft_alpha_of(p, te__peft_module(p, s, 0, path));
    int n;
    for (n = 1; n < te__lora_shape_of(s, 0).products && te__is_experts(s->owner); n++)
        if (te__peft_alpha_of(p, te__peft_module(p, s, n, path)) != alpha)
            return te__st_fail(p->file, TE_ERR_UNSUPPORTED,
                               "alpha_pattern: \"%s\" has another alpha than the Linears before it, and the adapters "
                               "of experts have one",
                               path);
    return true;
}
/* Reads the adapters of experts from the file into the stacked tensors of the site (te__adapter_stack). `ranks` is the
 * result of te__peft_ranks. */
static te_result te__peft_fill_experts(te__peft *p, const te__lora_site *s, const char *path, int ranks) {
    const int64_t rank = te__peft_rank(p, s, path);
    te_result result = TE_OK;
    char name[TE__PEFT_NAME];
    int i, n, proj;
    for (i = 0; i < 2 * TE__EXPERTS_PRODUCTS && result == TE_OK; i++)
        result = te_tensor_fill(te__adapter_stack(s->owner, i / 2, i % 2), 0.0);
    for (n = 0; n < te__expert_products(s->owner) && result == TE_OK; n++)
        for (i = 0; i < 2 && result == TE_OK; i++) {
            te_tensor *to;
            te__product_expert(s->owner, n, &proj);
            te__frame_begin(p->j.te);
            te_no_grad_begin(p->j.te);
            to = te__product_adapter(s->owner, n, i);
            to = te_tensor_narrow(to, i, ranks == 2 && proj == TE__UP_PROJ ? rank : 0, rank);
            result = to ? te__peft_read(p, te__peft_name(s, path, i ? "lora_B" : "lora_A", n, name), to, false)
                        : te_error_code(p->j.te);
            te_no_grad_end(p->j.te);
            te__frame_end(p->j.te, NULL, 0);
        }
    return result;
}

/* ---- adapters of all sites ---- */

/* Checks the shapes of the file's adapters for a site. Adapters that the site already has must have the needed LoRA
 * rank. */
static bool te__peft_fits(te__peft *p, const te__lora_site *s) {
    te__lora_shape shape = te__lora_shape_of(s, 0);
    const te_module *m = s->owner, *holder = te__lora_holder(s);
    const te__lora *l = holder ? te__lora_of(holder) : NULL;
    char path[TE__TREE_PATH], a[TE__PEFT_NAME], b[TE__PEFT_NAME];
    const bool table = m->cls == &te__embedding_class;
    int64_t rank;
    bool dora;
    int i, ranks;
    te__lora_path(p->model, s, path, sizeof(path));
    rank = te__peft_rank(p, s, path);
    if (te__lora_ranks(s) > 1)
        return te__st_fail(p->file, TE_ERR_UNSUPPORTED,
                           "\"%s\" is shared by %d ranks; te_model_load reads this rank's part of adapters", path,
                           te__lora_ranks(s));
    if (m->meta)
        return te__st_fail(p->file, TE_ERR_STATE, "\"%s\" has no memory yet; te_module_reset_parameters gives it",
                           path);
    te__peft_name(s, path, "lora_A", 0, a);
    if (rank < 1 || rank > INT32_MAX / 2)
        return te__st_fail(p->file, TE_ERR_SHAPE,
                           "tensor " TE__ST_NAME " has rank %lld; 1 to %d are possible, and two dimensions", a,
                           (long long)rank, INT32_MAX / 2);
    for (i = 0; i < shape.products; i++) {
        te__peft_name(s, path, "lora_A", i, a);
        te__peft_name(s, path, "lora_B", i, b);
        shape = te__lora_shape_of(s, i);
        if (!te__peft_adapter_fits(p, a, b, path, rank, shape.in) ||
            !te__peft_adapter_fits(p, b, a, path, shape.out, rank))
            return false;
    }
    dora = te_safetensors_find(p->file, te__peft_name(s, path, TE__MAGNITUDE, 0, b)) != NULL && !table;
    if (dora != p->dora)
        return te__st_fail(p->file, table ? TE_ERR_UNSUPPORTED : TE_ERR_FORMAT,
                           "use_dora is %s, and \"%s\" has %s" TE__MAGNITUDE, p->dora ? "true" : "false", path,
                           table     ? "adapters of an Embedding: te.h has no "
                           : p->dora ? "no "
                                     : "a ");
    if (dora && !te__peft_adapter_fits(p, b, a, path, shape.out, 0)) return false;
    ranks = te__peft_one_alpha(p, s) ? te__peft_ranks(p, s, path) : 0;
    if (!ranks) return false;
    rank *= ranks;
    if (l && (l->dim != rank || l->dora != dora))
        return te__st_fail(p->file, TE_ERR_SHAPE,
                           "tensor " TE__ST_NAME
                           " has rank %lld%s and the adapters of \"%s\" %lld%s; te_lora_remove those",
                           a, (long long)rank, dora ? " and a magnitude" : "", path, (long long)l->dim,
                           l->dora ? " and a magnitude" : "");
    return true;
}
static bool te__peft_lacks(te__peft *p, const te__lora_site *s) {
    char path[TE__TREE_PATH], name[TE__PEFT_NAME];
    te__lora_path(p->model, s, path, sizeof(path));
    if (te_safetensors_find(p->file, te__peft_name(s, path, "lora_A", 0, name))) return false;
    te__st_fail(p->file, TE_ERR_FORMAT, "there is no tensor " TE__ST_NAME ", and \"%s\" has adapters", name, path);
    return true;
}
/* Checks one tensor of the file. The first lora_A of a site adds the site to p->all, and to p->fresh if the site has no
 * adapters. */
static bool te__peft_check_tensor(te__peft *p, const te_safetensors_entry *e) {
    te__peft_tensor t;
    char name[TE__PEFT_NAME];
    const te_module *holder;
    if (!te__peft_look_up(p, e, &t)) return false;
    if (!t.adapter) return te__peft_check_parameter(p, e, &t);
    if (t.product > 0 || strcmp(t.adapter, "lora_A") != 0) {
        te__peft_name(&t.site, t.path, "lora_A", 0, name);
        return te_safetensors_find(p->file, name) ||
               te__st_fail(p->file, TE_ERR_FORMAT, "tensor " TE__ST_NAME " is there without " TE__ST_NAME, e->name,
                           name);
    }
    holder = te__lora_holder(&t.site);
    if ((!holder || !te__lora_of(holder)) &&
        (!te__lora_can(&t.site, t.path, p->dora && t.site.owner->cls == &te__linear_class) ||
         !te__lora_list_add(&p->fresh, t.site)))
        return false;
    return te__lora_list_add(&p->all, t.site);
}
/* Checks the file. Fills p->all and p->fresh. */
static bool te__peft_check(te__peft *p) {
    te__lora_list have = TE_ZERO;
    bool fine = true;
    int i;
    for (i = 0; i < te_safetensors_count(p->file); i++)
        if (!te__peft_check_tensor(p, te_safetensors_at(p->file, i))) return false;
    if (p->all.n == 0) return te__st_fail(p->file, TE_ERR_FORMAT, "there are no adapters in it");
    for (i = 0; i < p->all.n; i++)
        if (!te__peft_fits(p, &p->all.list[i])) return false;
    have.te = p->j.te;
    fine = te_module_visit(p->model, te__lora_collect, &have);
    for (i = 0; i < have.n && fine; i++) fine = !te__peft_lacks(p, &have.list[i]);
    te__lora_list_free(&have);
    return fine && te_module_visit(p->model, te__peft_lacks_parameter, p);
}

/* Reads the adapters of one site from the file, and sets the site's alpha. */
static te_result te__peft_fill(te__peft *p, const te__lora_site *s) {
    static const char *const adapters[] = {"lora_A", "lora_B"};
    te__lora *l = te__lora_of(te__lora_holder(s));
    const int products = te__lora_shape_of(s, 0).products;
    const bool experts = te__is_experts(s->owner);
    char path[TE__TREE_PATH], name[TE__PEFT_NAME];
    te_result result = TE_OK;
    int i, product, ranks;
    te__lora_path(p->model, s, path, sizeof(path));
    ranks = te__peft_ranks(p, s, path);
    if (!ranks) return te_error_code(p->j.te);
    if (experts) result = te__peft_fill_experts(p, s, path, ranks);
    for (i = 0; i < TE__COUNT(adapters) && !experts; i++)
        for (product = 0; product < products && result == TE_OK; product++)
            result = te__peft_read(p, te__peft_name(s, path, adapters[i], product, name),
                                   te__lora_weight(s, adapters[i], product),
                                   i == 0 && s->owner->cls == &te__embedding_class);
    if (result == TE_OK && l->dora)
        result = te__peft_read(p, te__peft_name(s, path, TE__MAGNITUDE, 0, name),
                               te_module_parameter(te_module_find(te__lora_holder(s), TE__MAGNITUDE), "weight"), false);
    if (result != TE_OK) return result;
    l->alpha =
        te__peft_alpha_of(p, te__peft_module(p, s, 0, name)) * (float)ranks; /* keeps alpha / rank as in the file */
    if (p->rslora) l->alpha *= sqrtf((float)(l->dim / ranks)); /* rsLoRA scales by alpha / sqrt(r) */
    return TE_OK;
}

/* Creates adapters for the sites in p->fresh, each with the LoRA rank that the file's adapters need. */
static te_result te__peft_give(te__peft *p) {
    te_result result = TE_OK;
    te_lora_desc d = TE_ZERO;
    char path[TE__TREE_PATH];
    int i;
    d.alpha = p->alpha;
    d.dropout = p->dropout;
    d.dropout_position = TE_DROPOUT_PRE;
    d.use_dora = p->dora;
    for (i = 0; i < p->fresh.n && result == TE_OK; i++) {
        const te__lora_site *s = &p->fresh.list[i];
        te__lora_path(p->model, s, path, sizeof(path));
        d.dim = (int)te__peft_rank(p, s, path) * te__peft_ranks(p, s, path);
        result = d.dim ? te__lora_give(s, &d) : te_error_code(p->j.te);
    }
    p->fresh.n = result == TE_OK ? i : i - (i > 0); /* the sites that have adapters now */
    return result;
}
static te_result te__peft_load(te__peft *p, const char *folder, te__text *path, te__text *config, te__text *why) {
    te_ctx *te = p->j.te;
    te__rng_state random = te__rng_now(te);
    te_result result;
    int i;
    if (!te__hf_join(path, te, folder, "adapter_config.json")) return te_error_code(te);
    if (!te__file_read(path->s, TE__PEFT_MAX_CONFIG, config, why))
        return te__fail(te, config->oom ? TE_ERR_OUT_OF_MEMORY : TE_ERR_IO, "%s", te__text_str(why));
    p->j.path = path->s;
    if (!te__peft_parse(p, config)) return te_error_code(te);
    if (!te__hf_join(path, te, folder, "adapter_model.safetensors")) return te_error_code(te);
    p->file = te_safetensors_open(te, path->s);
    if (!p->file || !te__peft_check(p)) return te_error_code(te);
    result = te__peft_give(p);
    te__rng_back(te, random); /* the random initial values of adapters are overwritten */
    if (result == TE_OK && !te_module_visit(p->model, te__peft_give_trained, p)) result = te_error_code(te);
    for (i = 0; i < p->all.n && result == TE_OK; i++) result = te__peft_fill(p, &p->all.list[i]);
    if (result == TE_OK && !te_module_visit(p->model, te__peft_fill_trained, p)) result = te_error_code(te);
    if (result == TE_OK && p->base) result = te__lora_set_name(p->model, p->base);
    if (result == TE_OK) te__lora_freeze(p->model, true);
    for (i = 0; i < p->fresh.n && result != TE_OK; i++) te__lora_take_away(&p->fresh.list[i]);
    return result;
}

TE_API te_result te_lora_load(te_module *model, const char *folder) {
    te__peft p = TE_ZERO;
    te__text config = TE_ZERO, path = TE_ZERO, why = TE_ZERO;
    te_result result = te__lora_open(model, "te_lora_load");
    int i;
    if (result == TE_OK) result = te__tree_whole(model);
    if (result != TE_OK) return result;
    if (!folder) return te__fail(model->te, TE_ERR_INVALID, "te_lora_load: folder is NULL");
    p.model = model;
    p.j.te = p.fresh.te = p.all.te = p.trained.te = model->te;
    config.memory = &model->te->host_allocator;
    result = te__peft_load(&p, folder, &path, &config, &why);
    te_safetensors_close(p.file);
    te__lora_list_free(&p.fresh);
    te__lora_list_free(&p.all);
    te__trained_list_close(&p.trained, result != TE_OK);
    for (i = 0; i < p.num_alphas; i++) te__pattern_close(&p.alphas[i].pattern);
    te__free(model->te, (void *)(uintptr_t)p.saved);
    te__free(model->te, p.alphas);
    te__text_free(&config);
    te__text_free(&path);
    te__text_free(&why);
    return result;
}
