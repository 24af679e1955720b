/* model/lora_files.c: adapters as the peft library's folders: adapter_config.json and adapter_model.safetensors. Knows model/lora.c and the files; must not know what adapters compute. */

#define TE__PEFT_PREFIX "base_model.model."
enum { TE__PEFT_MAX_CONFIG = 1 << 24, TE__PEFT_NAME = TE__TREE_PATH + 64 };

/* The name of an adapter's tensor in the file. */
static const char *te__peft_name(const char *path, const char *adapter, char name[TE__PEFT_NAME]) {
    snprintf(name, TE__PEFT_NAME, TE__PEFT_PREFIX "%s%s%s.weight", path, path[0] ? "." : "", adapter);
    return name;
}

/* ---- writing ---- */

/* Ranks and alphas that are not the first one's. */
static void te__peft_put_pattern(te__text *t, const te__lora_list *l, const char *key, bool alpha) {
    const te__lora *first = te__lora_of(l->list[0]);
    char path[TE__TREE_PATH];
    int i, n = 0;
    te__text_printf(t, "  \"%s\": {", key);
    for (i = 0; i < l->n; i++) {
        const te__lora *x = te__lora_of(l->list[i]);
        if (alpha ? x->alpha == first->alpha : x->dim == first->dim) continue;
        te__text_put(t, n++ ? ", " : "");
        te__json_put_string(t, te__path_below(l->root, l->list[i], path, sizeof(path)));
        te__text_put(t, ": ");
        te__text_number(t, alpha ? (double)x->alpha : (double)x->dim);
    }
    te__text_put(t, "},\n");
}
static void te__peft_put_config(te__text *t, const te__lora_list *l) {
    const te__lora *first = te__lora_of(l->list[0]);
    char path[TE__TREE_PATH];
    int i;
    te__text_put(t, "{\n");
    te__peft_put_pattern(t, l, "alpha_pattern", true);
    te__text_put(t, "  \"base_model_name_or_path\": null,\n  \"bias\": \"none\",\n  \"fan_in_fan_out\": false,\n  \"inference_mode\": true,\n  \"lora_alpha\": ");
    te__text_number(t, (double)first->alpha);
    te__text_put(t, ",\n  \"lora_dropout\": ");
    te__text_number(t, (double)first->dropout);
    te__text_printf(t, ",\n  \"peft_type\": \"LORA\",\n  \"r\": %lld,\n", (long long)first->dim);
    te__peft_put_pattern(t, l, "rank_pattern", false);
    te__text_put(t, "  \"target_modules\": [");
    for (i = 0; i < l->n; i++) {
        te__text_put(t, i ? ", " : "");
        te__json_put_string(t, te__path_below(l->root, l->list[i], path, sizeof(path)));
    }
    te__text_put(t, "],\n  \"task_type\": \"CAUSAL_LM\",\n  \"use_dora\": false,\n  \"use_rslora\": false\n}\n");
}

static te_result te__lora_write(te__lora_list *l, te__hf_list *items, const char *folder, te__text *config, te__text *path, te__text *why) {
    static const te_metadata format[1] = {{"format", "pt"}}; /* transformers refuses a file without this entry */
    static const char *const adapters[] = {"lora_A", "lora_B"};
    char at[TE__TREE_PATH], name[TE__PEFT_NAME];
    te_result result;
    int i, k;
    for (i = 0; i < l->n; i++) {
        te__path_below(l->root, l->list[i], at, sizeof(at));
        if (l->list[i]->parallel.size > 1)
            return te__fail(l->te, TE_ERR_UNSUPPORTED, "te_lora_save: \"%s\" is shared by %d ranks, and each has its part of the adapters; te_model_save writes this rank's", at, l->list[i]->parallel.size);
        for (k = 0; k < TE__COUNT(adapters); k++)
            if (!te__hf_list_add(items, l->list[i], te__peft_name(at, adapters[k], name), te__lora_weight(l->list[i], adapters[k]), TE_ENTRY_PARAMETER)) return te_error_code(l->te);
    }
    te__peft_put_config(config, l);
    if (config->oom) return te__fail(l->te, TE_ERR_OUT_OF_MEMORY, "%s", te__no_memory_text);
    if (!te__dir_make(folder, why)) return te__fail(l->te, TE_ERR_IO, "%s", te__text_str(why));
    if (!te__hf_join(path, l->te, folder, "adapter_model.safetensors")) return te_error_code(l->te);
    result = te_safetensors_write(l->te, path->s, items->items, items->n, format, 1);
    if (result != TE_OK || !te__hf_join(path, l->te, folder, "adapter_config.json")) return te_error_code(l->te);
    return te__file_write_atomic(path->s, config->s, config->n, why) ? TE_OK : te__fail(l->te, TE_ERR_IO, "%s", te__text_str(why));
}

TE_API te_result te_lora_save(te_module *model, const char *folder) {
    te__lora_list l = TE_ZERO;
    te__hf_list items = TE_ZERO;
    te__text config = TE_ZERO, path = TE_ZERO, why = TE_ZERO;
    te_result result;
    if (!model) return TE_ERR_STATE;
    if (model->te->error_code != TE_OK) return model->te->error_code;
    if (!folder) return te__fail(model->te, TE_ERR_INVALID, "te_lora_save: folder is NULL");
    if (te__tree_whole(model) != TE_OK) return TE_ERR_STATE;
    config.memory = &model->te->host_allocator;
    items.te = model->te;
    te__frame_begin(model->te);
    result = te__lora_all(&l, model, "te_lora_save");
    if (result == TE_OK) result = te__lora_write(&l, &items, folder, &config, &path, &why);
    te__frame_end(model->te, NULL, 0);
    te__hf_list_free(&items);
    te__lora_list_free(&l);
    te__text_free(&config);
    te__text_free(&path);
    te__text_free(&why);
    return result;
}

/* ---- reading ---- */

/* The alpha of the modules that `pattern` names: a path or its end behind a dot, in which * stands for any characters. */
typedef struct te__peft_alpha {
    char *pattern; /* points into the text */
    bool whole;    /* the path from its beginning */
    float alpha;
} te__peft_alpha;
typedef struct te__peft {
    te__json j;
    te_module *model;
    te_safetensors *file;
    float alpha, dropout;
    bool rslora;
    te__peft_alpha *alphas;
    int num_alphas, cap_alphas;
    te__lora_list fresh; /* modules that get adapters, */
    te__lora_list all;   /* and all that the file has some for */
} te__peft;

static bool te__peft_refuse(te__peft *p, const char *key, const char *what) {
    p->j.failed = true;
    te__fail(p->j.te, TE_ERR_UNSUPPORTED, "%s: \"%s\" is %s; te.h reads plain LoRA alone", p->j.path, key, what);
    return false;
}
/* A key of alpha_pattern is a regular expression, of which ^, $, an escaped dot and .* are known. It becomes the pattern in place. The path of a module may have any characters. */
static bool te__peft_pattern(te__peft *p, char *key, te__peft_alpha *to) {
    const char *in;
    char *out = key;
    to->pattern = key;
    to->whole = key[0] == '^';
    if (te_module_find(p->model, key)) return true;
    for (in = key + to->whole; *in && (*in != '$' || in[1]); in++) {
        if ((in[0] == '\\' && in[1] == '.') || (in[0] == '.' && in[1] == '*')) in++;
        else if (strchr("\\*?+|()[]{}^$", *in))
            return te__fail(p->j.te, TE_ERR_UNSUPPORTED, "%s: the alpha_pattern has \"%.200s\", a regular expression; paths, their ends, and .* in them are possible", p->j.path, key) == TE_OK;
    }
    for (in = key + to->whole; *in && (*in != '$' || in[1]); in++) {
        if ((in[0] == '\\' && in[1] == '.') || (in[0] == '.' && in[1] == '*')) in++;
        *out++ = *in;
    }
    *out = 0;
    return true;
}
/* Does the key name the module? By peft's rule: the whole path, or what stands behind one of its dots. */
static bool te__peft_names(const te__peft_alpha *a, const char *path) {
    while (path && !te__matches(a->pattern, path)) {
        path = a->whole ? NULL : strchr(path, '.');
        if (path) path++;
    }
    return path != NULL;
}
static bool te__peft_parse_alphas(te__peft *p) {
    bool more;
    for (more = te__json_open(&p->j, '{', '}'); more; more = te__json_more(&p->j, '}')) {
        char *path = (char *)(uintptr_t)te__json_string(&p->j);
        if (!path || !te__json_expect(&p->j, ':') || !te__grow(p->j.te, (void **)&p->alphas, &p->cap_alphas, p->num_alphas, sizeof(te__peft_alpha))) return false;
        if (!te__peft_pattern(p, path, &p->alphas[p->num_alphas])) {
            p->j.failed = true;
            return false;
        }
        p->alphas[p->num_alphas].alpha = (float)te__json_number(&p->j);
        if (!(fabsf(p->alphas[p->num_alphas].alpha) <= FLT_MAX)) {
            te__fail(p->j.te, TE_ERR_FORMAT, "%s: the alpha_pattern of \"%.200s\" is %g; a finite number is needed", p->j.path, path, (double)p->alphas[p->num_alphas].alpha);
            p->j.failed = true;
            return false;
        }
        p->num_alphas++;
    }
    return !p->j.failed;
}
/* A value of whatever kind: does it ask for nothing (null, false, an empty list or object)? */
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
/* One key of the config. Which modules have adapters, and of what rank, the tensors themselves say. */
static bool te__peft_take(te__peft *p, const char *key) {
    static const char *const beyond[] = {"use_dora", "fan_in_fan_out", "modules_to_save", "lora_bias", "target_parameters", "trainable_token_indices", "use_qalora", "megatron_config",
                                         "layer_replication", "alora_invocation_tokens"};
    static const char *const harmless[] = {"gaussian", "orthogonal", "eva"};
    const char *text;
    int i;
    for (i = 0; i < TE__COUNT(beyond); i++)
        if (strcmp(key, beyond[i]) == 0) return te__peft_is_nothing(&p->j) || p->j.failed || te__peft_refuse(p, key, "set");
    if (strcmp(key, "peft_type") == 0) {
        text = te__json_string(&p->j);
        return text && (strcmp(text, "LORA") == 0 || te__peft_refuse(p, key, text));
    }
    if (strcmp(key, "bias") == 0) {
        text = te__json_string(&p->j);
        return text && (strcmp(text, "none") == 0 || te__peft_refuse(p, key, text));
    }
    te__json_space(&p->j);
    if (strcmp(key, "init_lora_weights") == 0 && *p->j.at == '"') { /* peft changes the weight itself where adapters begin as parts of it */
        text = te__json_string(&p->j);
        for (i = 0; text && i < TE__COUNT(harmless); i++)
            if (strcmp(text, harmless[i]) == 0) return true;
        return text && te__peft_refuse(p, key, text);
    }
    if (strcmp(key, "lora_alpha") == 0)
        p->alpha = (float)te__json_number(&p->j);
    else if (strcmp(key, "lora_dropout") == 0)
        p->dropout = (float)te__json_number(&p->j);
    else if (strcmp(key, "use_rslora") == 0)
        p->rslora = te__json_word(&p->j) == 1;
    else if (strcmp(key, "alpha_pattern") == 0)
        return te__peft_parse_alphas(p);
    else
        te__json_skip(&p->j, 0);
    return !p->j.failed;
}
static bool te__peft_parse(te__peft *p, te__text *config) {
    bool more;
    p->alpha = 8.0f; /* peft's defaults */
    p->j.part = "the text";
    p->j.begin = p->j.at = config->s;
    p->j.end = config->s + config->n;
    for (more = te__json_open(&p->j, '{', '}'); more; more = te__json_more(&p->j, '}')) {
        const char *key = te__json_string(&p->j);
        if (!key || !te__json_expect(&p->j, ':') || !te__peft_take(p, key)) return false;
    }
    if (p->j.failed) return false;
    te__json_space(&p->j);
    if (p->j.at != p->j.end) return te__json_fail(&p->j, "something follows the end");
    if (fabsf(p->alpha) <= FLT_MAX && p->dropout >= 0.0f && p->dropout < 1.0f) return true;
    te__fail(p->j.te, TE_ERR_FORMAT, "%s: lora_alpha is %g and lora_dropout %g; a finite number, and one from 0 to below 1, are needed", p->j.path, (double)p->alpha, (double)p->dropout);
    return false;
}

/* The module that tensor e is an adapter of, and its path; NULL with the error. */
static te_module *te__peft_module(te__peft *p, const te_safetensors_entry *e, bool *is_a, char path[TE__TREE_PATH]) {
    const size_t before = strlen(TE__PEFT_PREFIX), tail = strlen(".lora_A.weight"), n = strlen(e->name);
    const char *end = n > tail ? e->name + n - tail : "";
    te_module *m = NULL;
    *is_a = strcmp(end, ".lora_A.weight") == 0;
    path[0] = 0;
    if ((*is_a || strcmp(end, ".lora_B.weight") == 0) && te__starts_with(e->name, TE__PEFT_PREFIX) && n - tail + 1 >= before && n - tail < TE__TREE_PATH) {
        if (n - tail > before) {
            memcpy(path, e->name + before, n - tail - before);
            path[n - tail - before] = 0;
        }
        m = te_module_find(p->model, path);
        if (m && m->cls != &te__linear_class) m = NULL;
    }
    if (!m) te__st_fail(p->file, TE_ERR_FORMAT, "tensor " TE__ST_NAME " is no adapter of a Linear of this model; names are " TE__PEFT_PREFIX "PATH.lora_A.weight and ...lora_B.weight", e->name);
    return m;
}
/* Is e, one of m's two adapters, as m, the other one and the adapters that m has already need it? */
static bool te__peft_fits(te__peft *p, te_module *m, const te_safetensors_entry *e, bool is_a, const char *path) {
    const te__linear_module *s = (const te__linear_module *)m->state;
    const te__lora *l = te__lora_of(m);
    const int64_t size = is_a ? s->desc.in_features : s->desc.out_features;
    char name[TE__PEFT_NAME];
    const te_safetensors_entry *other = te_safetensors_find(p->file, te__peft_name(path, is_a ? "lora_B" : "lora_A", name));
    if (!other) return te__st_fail(p->file, TE_ERR_FORMAT, "tensor " TE__ST_NAME " is there without " TE__ST_NAME, e->name, name);
    if (m->parallel.size > 1) return te__st_fail(p->file, TE_ERR_UNSUPPORTED, "\"%s\" is shared by %d ranks; te_model_load reads this rank's part of adapters", path, m->parallel.size);
    if (m->meta) return te__st_fail(p->file, TE_ERR_STATE, "\"%s\" has no memory yet; te_module_reset_parameters gives it", path);
    if (!te__is_float(e->dtype)) return te__st_fail(p->file, TE_ERR_DTYPE, "tensor " TE__ST_NAME " is %s; f32, f16 and bf16 are possible", e->name, te_dtype_name(e->dtype));
    if (e->ndim != 2 || other->ndim != 2 || e->shape[is_a] != size || e->shape[!is_a] != other->shape[is_a] || e->shape[!is_a] < 1 || e->shape[!is_a] > INT32_MAX)
        return te__st_fail(p->file, TE_ERR_SHAPE, "tensor " TE__ST_NAME " has %d dimensions, %lld and %lld; \"%s\" has %lld %s features, and both adapters one rank", e->name, e->ndim,
                           (long long)e->shape[0], (long long)e->shape[1], path, (long long)size, is_a ? "input" : "output");
    if (l && l->dim != e->shape[!is_a])
        return te__st_fail(p->file, TE_ERR_SHAPE, "tensor " TE__ST_NAME " has rank %lld and the adapters of \"%s\" %lld; te_lora_remove those", e->name, (long long)e->shape[!is_a], path, (long long)l->dim);
    return true;
}
static bool te__peft_lacks(te__peft *p, te_module *m) {
    char path[TE__TREE_PATH], name[TE__PEFT_NAME];
    te__path_below(p->model, m, path, sizeof(path));
    if (te_safetensors_find(p->file, te__peft_name(path, "lora_A", name))) return false;
    te__st_fail(p->file, TE_ERR_FORMAT, "there is no tensor " TE__ST_NAME ", and \"%s\" has adapters", name, path);
    return true;
}
/* Compares the file with the model, and lists the modules. */
static bool te__peft_check(te__peft *p) {
    char path[TE__TREE_PATH];
    te__lora_list have = TE_ZERO;
    bool is_a, fine = true;
    int i;
    for (i = 0; i < te_safetensors_count(p->file); i++) {
        const te_safetensors_entry *e = te_safetensors_at(p->file, i);
        te_module *m = te__peft_module(p, e, &is_a, path);
        if (!m || !te__peft_fits(p, m, e, is_a, path)) return false;
        if (!is_a) continue;
        if (!te__lora_of(m) && (!te__lora_can(m, path) || !te__lora_list_add(&p->fresh, m))) return false;
        if (!te__lora_list_add(&p->all, m)) return false;
    }
    if (p->all.n == 0) return te__st_fail(p->file, TE_ERR_FORMAT, "there are no adapters in it");
    have.te = p->j.te;
    fine = te_module_visit(p->model, te__lora_collect, &have);
    for (i = 0; i < have.n && fine; i++) fine = !te__peft_lacks(p, have.list[i]);
    te__lora_list_free(&have);
    return fine;
}

static te_result te__peft_read(te__peft *p, te_module *m, const char *adapter, const char *path) {
    te_tensor *weight = te__lora_weight(m, adapter), *value;
    char name[TE__PEFT_NAME];
    te_result result;
    te__frame_begin(p->j.te);
    value = te_tensor_cast(te_safetensors_read(p->file, te__peft_name(path, adapter, name)), weight->dtype);
    result = value ? te_tensor_copy(weight, value) : te_error_code(p->j.te);
    te__frame_end(p->j.te, NULL, 0);
    return result;
}
/* Reads the values of one module, whose alpha becomes the file's. */
static te_result te__peft_fill(te__peft *p, te_module *m) {
    te__lora *l = te__lora_of(m);
    char path[TE__TREE_PATH];
    te_result result;
    int i;
    te__path_below(p->model, m, path, sizeof(path));
    result = te__peft_read(p, m, "lora_A", path);
    if (result == TE_OK) result = te__peft_read(p, m, "lora_B", path);
    if (result != TE_OK) return result;
    l->alpha = p->alpha;
    for (i = 0; i < p->num_alphas && !te__peft_names(&p->alphas[i], path); i++) {}
    if (i < p->num_alphas) l->alpha = p->alphas[i].alpha; /* the first key that fits, as in peft */
    if (p->rslora) l->alpha *= sqrtf((float)l->dim); /* its factor is alpha / sqrt(r) */
    return TE_OK;
}

/* Adapters for the modules that lack them, each of the file's rank. */
static te_result te__peft_give(te__peft *p) {
    te_result result = TE_OK;
    te_lora_desc d = TE_ZERO;
    char path[TE__TREE_PATH], name[TE__PEFT_NAME];
    int i;
    d.alpha = p->alpha;
    d.dropout = p->dropout;
    d.dropout_position = TE_DROPOUT_PRE;
    for (i = 0; i < p->fresh.n && result == TE_OK; i++) {
        te__path_below(p->model, p->fresh.list[i], path, sizeof(path));
        d.dim = (int)te_safetensors_find(p->file, te__peft_name(path, "lora_A", name))->shape[0];
        result = te__lora_give(p->fresh.list[i], &d);
    }
    p->fresh.n = result == TE_OK ? i : i - (i > 0); /* those that have them now */
    return result;
}
static te_result te__peft_load(te__peft *p, const char *folder, te__text *path, te__text *config, te__text *why) {
    te_ctx *te = p->j.te;
    te__rng_state random = te__rng_now(te);
    te_result result;
    int i;
    if (!te__hf_join(path, te, folder, "adapter_config.json")) return te_error_code(te);
    if (!te__file_read(path->s, TE__PEFT_MAX_CONFIG, config, why)) return te__fail(te, config->oom ? TE_ERR_OUT_OF_MEMORY : TE_ERR_IO, "%s", te__text_str(why));
    p->j.path = path->s;
    if (!te__peft_parse(p, config)) return te_error_code(te);
    if (!te__hf_join(path, te, folder, "adapter_model.safetensors")) return te_error_code(te);
    p->file = te_safetensors_open(te, path->s);
    if (!p->file || !te__peft_check(p)) return te_error_code(te);
    result = te__peft_give(p);
    te__rng_back(te, random); /* the values that adapters begin with are replaced */
    for (i = 0; i < p->all.n && result == TE_OK; i++) result = te__peft_fill(p, p->all.list[i]);
    if (result == TE_OK) te__lora_freeze(p->model, true);
    for (i = 0; i < p->fresh.n && result != TE_OK; i++) te__lora_take_away(p->fresh.list[i]);
    return result;
}

TE_API te_result te_lora_load(te_module *model, const char *folder) {
    te__peft p = TE_ZERO;
    te__text config = TE_ZERO, path = TE_ZERO, why = TE_ZERO;
    te_result result = te__lora_open(model, "te_lora_load");
    if (result == TE_OK) result = te__tree_whole(model);
    if (result != TE_OK) return result;
    if (!folder) return te__fail(model->te, TE_ERR_INVALID, "te_lora_load: folder is NULL");
    p.model = model;
    p.j.te = p.fresh.te = p.all.te = model->te;
    config.memory = &model->te->host_allocator;
    result = te__peft_load(&p, folder, &path, &config, &why);
    te_safetensors_close(p.file);
    te__lora_list_free(&p.fresh);
    te__lora_list_free(&p.all);
    te__free(model->te, p.alphas, (size_t)p.cap_alphas * sizeof(te__peft_alpha));
    te__text_free(&config);
    te__text_free(&path);
    te__text_free(&why);
    return result;
}
