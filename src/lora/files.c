/* lora/files.c: te_lora_save writes adapters as a folder of the peft library. This file must not depend on what
 * adapters compute. */

#define TE__PEFT_PREFIX "base_model.model."
enum { TE__PEFT_NAME = TE__TREE_PATH + 64 };

/* Fills the buffer `name` with the peft name of an adapter tensor, and returns `name`. `adapter` is "lora_A", "lora_B"
 * or TE__MAGNITUDE. `product` is the index of a group of a GroupedLinear, or of a Linear of experts. */
static const char *te__peft_name(const te__lora_site *s, const char *path, const char *adapter, int product,
                                 char name[TE__PEFT_NAME]) {
    const char *dot = path[0] ? "." : "";
    char expert[64];
    if (te__is_experts(s->owner))
        snprintf(name, TE__PEFT_NAME, TE__PEFT_PREFIX "%s%s%s.%s.weight", path, dot,
                 te__product_name(s->owner, product, expert, sizeof(expert)), adapter);
    else if (s->owner->cls == &te__embedding_class)
        snprintf(name, TE__PEFT_NAME, TE__PEFT_PREFIX "%s%slora_embedding_%s", path, dot, adapter + strlen("lora_"));
    else if (strcmp(adapter, TE__MAGNITUDE) == 0)
        snprintf(name, TE__PEFT_NAME, TE__PEFT_PREFIX "%s%s" TE__MAGNITUDE, path, dot);
    else if (te__is_grouped(s->owner))
        snprintf(name, TE__PEFT_NAME, TE__PEFT_PREFIX "%s%s%s.weight%d", path, dot, adapter, product);
    else snprintf(name, TE__PEFT_NAME, TE__PEFT_PREFIX "%s%s%s.weight", path, dot, adapter);
    return name;
}
/* Fills the buffer `name` with the peft name of a parameter, and returns `name`. As in peft, "base_layer." precedes
 * e->name if the module m has adapters. */
static const char *te__peft_parameter(const te_module *root, const te_module *m, const te__entry *e,
                                      char name[TE__PEFT_NAME]) {
    char path[TE__TREE_PATH];
    te__path_below(root, m, path, sizeof(path));
    snprintf(name, TE__PEFT_NAME, TE__PEFT_PREFIX "%s%s%s%s", path, path[0] ? "." : "",
             te__lora_of(m) ? "base_layer." : "", e->name);
    return name;
}

/* ---- adapter_config.json ---- */

/* Appends the peft names of a site to a JSON list or object. Experts have one name for each Linear. *n counts the
 * names. If `value` is not NULL, it follows each name. */
static void te__peft_put_site(te__text *t, const te_module *root, const te__lora_site *s, const double *value, int *n) {
    const int names = te__is_experts(s->owner) ? te__expert_products(s->owner) : 1;
    char path[TE__TREE_PATH + 64];
    size_t length;
    int i;
    te__lora_path(root, s, path, TE__TREE_PATH);
    length = strlen(path);
    for (i = 0; i < names; i++) {
        if (te__is_experts(s->owner)) {
            if (length) path[length] = '.';
            te__product_name(s->owner, i, path + length + (length > 0), 63);
        }
        te__text_put(t, (*n)++ ? ", " : "");
        te__json_put_string(t, path);
        if (value) te__text_put(t, ": ");
        if (value) te__text_number(t, *value);
    }
}
/* Writes alpha_pattern if `alpha` is true, otherwise rank_pattern. The pattern lists the peft modules whose alpha
 * or rank differs from that of the first one. */
static void te__peft_put_pattern(te__text *t, const te__lora_list *l, const char *key, bool alpha) {
    const te__lora *first = te__lora_of(te__lora_holder(&l->list[0]));
    int i, n = 0;
    te__text_printf(t, "  \"%s\": {", key);
    for (i = 0; i < l->n; i++) {
        const te__lora *x = te__lora_of(te__lora_holder(&l->list[i]));
        const double value = alpha ? (double)x->alpha : (double)x->dim;
        if (alpha ? x->alpha == first->alpha : x->dim == first->dim) continue;
        te__peft_put_site(t, l->root, &l->list[i], &value, &n);
    }
    te__text_put(t, "},\n");
}
/* The result of te__peft_look, which looks for parameters trained in addition to adapters. */
typedef struct te__peft_beside {
    te__text *text;      /* receives modules_to_save as a JSON list; NULL if nobody wants the list */
    const te_module *root;
    int saved;           /* number of modules in that list */
    bool biases, others; /* `biases`: biases are trained; `others`: biases of modules without adapters are trained */
} te__peft_beside;
static bool te__peft_look(void *user, te_module *m) {
    te__peft_beside *b = (te__peft_beside *)user;
    const te__trained *t = te__trained_of(m), *above = m != b->root && m->parent ? te__trained_of(m->parent) : NULL;
    char path[TE__TREE_PATH];
    if (!t) return true;
    if (!t->whole) {
        b->biases = true;
        b->others = b->others || !te__lora_is_owner(m);
    } else if (!above || !above->whole) {
        if (b->text) te__text_put(b->text, b->saved ? ", " : "[");
        if (b->text) te__json_put_string(b->text, te__path_below(b->root, m, path, sizeof(path)));
        b->saved++;
    }
    return true;
}
/* Returns true if the model uses its embedding table as lm_head too, and the table is trained. */
static bool te__peft_ties(const te_module *root) {
    const te__trained *t = te__trained_of(te__tied_table(root));
    return t && t->whole;
}
/* Returns the base model's name: the name that the program set, else the model's folder. NULL if that folder is not
 * UTF-8 or not known. */
static const char *te__peft_base(const te_module *model) {
    const te_module *m;
    void *value;
    const char *folder;
    for (m = model; m; m = m->parent)
        if (te_module_attribute(m, TE__LORA_BASE, &value)) return ((const te__lora_name *)value)->text;
    folder = te__model_folder(model);
    return folder && te__is_utf8(folder) ? folder : NULL;
}
static void te__peft_put_config(te__text *t, const te__lora_list *l) {
    const te__lora *first = te__lora_of(te__lora_holder(&l->list[0]));
    const char *base = te__peft_base(l->root);
    te__peft_beside beside = TE_ZERO;
    int i, n = 0;
    beside.root = l->root;
    te__text_put(t, "{\n");
    te__peft_put_pattern(t, l, "alpha_pattern", true);
    te__text_put(t, "  \"base_model_name_or_path\": ");
    if (base) te__json_put_string(t, base);
    else te__text_put(t, "null");
    te_module_visit(l->root, te__peft_look, &beside);
    te__text_printf(t, ",\n  \"bias\": \"%s\",\n", beside.others ? "all" : beside.biases ? "lora_only" : "none");
    te__text_printf(t, "  \"ensure_weight_tying\": %s,\n", te__peft_ties(l->root) ? "true" : "false");
    te__text_put(t, "  \"fan_in_fan_out\": false,\n  \"inference_mode\": true,\n  \"lora_alpha\": ");
    te__text_number(t, (double)first->alpha);
    te__text_put(t, ",\n  \"lora_dropout\": ");
    te__text_number(t, (double)first->dropout);
    te__text_put(t, ",\n  \"modules_to_save\": ");
    beside.text = t;
    beside.saved = 0;
    te_module_visit(l->root, te__peft_look, &beside);
    te__text_put(t, beside.saved ? "]" : "null");
    te__text_printf(t, ",\n  \"peft_type\": \"LORA\",\n  \"r\": %lld,\n", (long long)first->dim);
    te__peft_put_pattern(t, l, "rank_pattern", false);
    te__text_put(t, "  \"target_modules\": [");
    for (i = 0; i < l->n; i++) te__peft_put_site(t, l->root, &l->list[i], NULL, &n);
    te__text_printf(t, "],\n  \"task_type\": \"CAUSAL_LM\",\n  \"use_dora\": %s,\n  \"use_rslora\": false\n}\n",
                    first->dora ? "true" : "false");
}

/* ---- adapter_model.safetensors ---- */

/* Adds the adapter tensors of site `index` to `items`. */
static te_result te__peft_list_site(const te__lora_list *l, int index, te__st_list *items) {
    static const char *const adapters[] = {"lora_A", "lora_B"};
    const te__lora_site *s = &l->list[index];
    te_module *m = te__lora_holder(s);
    const te__lora *x = te__lora_of(m), *first = te__lora_of(te__lora_holder(&l->list[0]));
    const int products = te__lora_shape_of(s, 0).products;
    char path[TE__TREE_PATH], name[TE__PEFT_NAME];
    int i, product;
    te__lora_path(l->root, s, path, sizeof(path));
    if (te__lora_ranks(s) > 1)
        return te__fail(l->te, TE_ERR_UNSUPPORTED,
                        "te_lora_save: \"%s\" is shared by %d ranks, and each has its part of the adapters; "
                        "te_model_save writes this rank's",
                        path, te__lora_ranks(s));
    if (x->dora != first->dora)
        return te__fail(l->te, TE_ERR_UNSUPPORTED,
                        "te_lora_save: \"%s\" has%s a magnitude (use_dora), other than \"%s\"; a folder of peft has "
                        "one use_dora for all: te_model_save writes both",
                        path, x->dora ? "" : " not",
                        te__path_below(l->root, te__lora_holder(&l->list[0]), name, sizeof(name)));
    for (i = 0; i < TE__COUNT(adapters); i++)
        for (product = 0; product < products; product++) {
            te_tensor *weight = te__lora_weight(s, adapters[i], product);
            if (!weight)
                return te__fail(l->te, TE_ERR_STATE,
                                "te_lora_save: \"%s\": its child \"%s\" is gone; te_lora_remove takes the others away",
                                path, adapters[i]);
            if (s->owner->cls == &te__embedding_class && i == 0 && weight->buffer)
                weight = te_tensor_transpose(weight, 0, 1);
            if (weight && weight->buffer) weight = te_tensor_contiguous(weight);
            if (!weight || !te__st_list_add(items, m, te__peft_name(s, path, adapters[i], product, name), weight,
                                            TE_ENTRY_PARAMETER))
                return te_error_code(l->te);
        }
    if (!x->dora) return TE_OK;
    if (!te_module_find(m, TE__MAGNITUDE))
        return te__fail(l->te, TE_ERR_STATE, "te_lora_save: \"%s\": its child \"" TE__MAGNITUDE "\" is gone", path);
    return te__st_list_add(items, m, te__peft_name(s, path, TE__MAGNITUDE, 0, name),
                           te_module_parameter(te_module_find(m, TE__MAGNITUDE), "weight"), TE_ENTRY_PARAMETER)
               ? TE_OK
               : te_error_code(l->te);
}
typedef struct te__peft_writer {
    const te_module *root;
    te__st_list *items;
} te__peft_writer;
static bool te__peft_list_trained(void *user, te_module *m) {
    te__peft_writer *w = (te__peft_writer *)user;
    const te__trained *t = te__trained_of(m);
    char name[TE__PEFT_NAME];
    int i;
    if (t && t->n > 0 && m->parallel.size > 1)
        return te__not_ok(
            m->te, TE_ERR_UNSUPPORTED,
            "te_lora_save: \"%s\" is shared by %d ranks, and each trains its part of it (modules_to_save, bias); "
            "te_model_save writes this rank's",
            te__path_below(w->root, m, name, sizeof(name)), m->parallel.size);
    for (i = 0; t && i < t->n; i++) {
        const te__entry *e = &m->entries[t->items[i].entry];
        if (!te__st_list_add(w->items, m, te__peft_parameter(w->root, m, e, name), e->tensor, TE_ENTRY_PARAMETER))
            return false;
        /* with ensure_weight_tying peft saves the tied weight under both names, embedding and lm_head */
        if (te__is_tied_table(m) && te__peft_ties(w->root) &&
            !te__st_list_add(w->items, m, TE__PEFT_PREFIX "lm_head.weight", e->tensor, TE_ENTRY_PARAMETER))
            return false;
    }
    return true;
}

static te_result te__lora_write(te__lora_list *l, te__st_list *items, const char *folder, te__text *config,
                                te__text *path, te__text *why) {
    static const te_metadata format[1] = {{"format", "pt"}}; /* transformers refuses a file without this entry */
    te__peft_writer w;
    te_result result = TE_OK;
    int i;
    for (i = 0; i < l->n && result == TE_OK; i++) result = te__peft_list_site(l, i, items);
    if (result != TE_OK) return result;
    w.root = l->root;
    w.items = items;
    if (!te_module_visit(l->root, te__peft_list_trained, &w)) return te_error_code(l->te);
    te__peft_put_config(config, l);
    if (config->oom) return te__fail(l->te, TE_ERR_OUT_OF_MEMORY, "%s", te__no_memory_text);
    if (!te__dir_make(folder, why)) return te__fail(l->te, TE_ERR_IO, "%s", te__text_str(why));
    if (!te__hf_join(path, l->te, folder, "adapter_model.safetensors")) return te_error_code(l->te);
    result = te_safetensors_write(l->te, path->s, items->items, items->n, format, 1);
    if (result != TE_OK || !te__hf_join(path, l->te, folder, "adapter_config.json")) return te_error_code(l->te);
    return te__file_write_atomic(path->s, config->s, config->n, why)
               ? TE_OK
               : te__fail(l->te, TE_ERR_IO, "%s", te__text_str(why));
}

TE_API te_result te_lora_save(te_module *model, const char *folder) {
    te__lora_list l = TE_ZERO;
    te__st_list items = TE_ZERO;
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
    te__st_list_free(&items);
    te__lora_list_free(&l);
    te__text_free(&config);
    te__text_free(&path);
    te__text_free(&why);
    return result;
}
