/* io/folder.c: helpers for folders of models and adapters: paths of files in a folder, and lists of tensors to write
 * there. This part may use files and modules. It must not depend on the meaning of the files. */

/* Writes the path of a file in a folder to *t. */
static bool te__hf_join(te__text *t, te_ctx *te, const char *folder, const char *name) {
    t->memory = &te->host_allocator;
    te__text_clear(t);
    te__text_printf(t, "%s%s%s", folder, folder[0] && te__is_slash(folder[strlen(folder) - 1]) ? "" : "/", name);
    if (t->oom) te__fail(te, TE_ERR_OUT_OF_MEMORY, "%s", te__no_memory_text);
    return !t->oom;
}

/* Tensors to write; the list owns their names. */
typedef struct te__hf_list {
    te_ctx *te;
    te_safetensors_item *items;
    int n, cap;
} te__hf_list;

static bool te__hf_list_put(te__hf_list *l, const char *name, te_tensor *x) {
    if (!te__grow(l->te, (void **)&l->items, &l->cap, l->n, sizeof(te_safetensors_item))) return false;
    l->items[l->n].name = te__copy_string(l->te, name);
    l->items[l->n].tensor = x;
    return l->items[l->n].name && l->items[l->n++].tensor;
}
/* Adds a parameter under its path, decoded if it is quantized; a visitor of te_module_visit_tensors. */
static bool te__hf_list_add(void *user, te_module *m, const char *path, te_tensor *x, te_entry_kind kind) {
    (void)m;
    return kind != TE_ENTRY_PARAMETER ||
           te__hf_list_put((te__hf_list *)user, path, x->quantized ? te_dequantize(x, TE_DTYPE_NONE) : x);
}
static void te__hf_list_free(te__hf_list *l) {
    int i;
    for (i = 0; i < l->n; i++) te__free(l->te, (char *)l->items[i].name);
    te__free(l->te, l->items);
}
