/* lora/trained.c: parameters trained in addition to adapters: biases, and all parameters of modules in modules_to_save.
 * This file must not depend on files on disk.
 *
 * Training changes a copy of each parameter. The module keeps the original tensor, which te_lora_remove puts back. */

#define TE__TRAINED "te.lora.trained"

typedef struct te__trained_item {
    int entry;
    te_tensor *before; /* the original tensor; NULL: the parameter had no values to copy (TE_PARAMS_META) */
} te__trained_item;
/* The trained parameters of a module; its attribute TE__TRAINED. */
typedef struct te__trained {
    te_ctx *te;
    bool whole; /* true: all parameters (modules_to_save); false: biases alone */
    te__trained_item *items;
    int n, cap;
} te__trained;

static te__trained *te__trained_of(const te_module *m) { return (te__trained *)te__attribute_of(m, TE__TRAINED); }
static void te__trained_free(void *value) {
    te__trained *t = (te__trained *)value;
    int i;
    for (i = 0; i < t->n; i++) te_tensor_release(t->items[i].before);
    te__free(t->te, t->items);
    te__free(t->te, t);
}
static bool te__is_trained(const te__trained *t, int entry) {
    int i;
    for (i = 0; t && i < t->n; i++)
        if (t->items[i].entry == entry) return true;
    return false;
}
/* Returns true if e is a parameter with the name of a bias, such as "bias", "fc1_bias" or "bias0". */
static bool te__is_bias(const te__entry *e) {
    size_t n = strlen(e->name);
    while (n > 0 && e->name[n - 1] >= '0' && e->name[n - 1] <= '9') n--;
    return e->kind == TE_ENTRY_PARAMETER && n >= 4 && strncmp(e->name + n - 4, "bias", 4) == 0 &&
           (n == 4 || e->name[n - 5] == '_');
}

/* Removes all but the first n parameters from m's list of trained parameters, and puts their original tensors back.
 * Sets t->whole to `whole`. */
static void te__trained_cut(te_module *m, int n, bool whole) {
    te__trained *t = te__trained_of(m);
    if (!t) return;
    while (t->n > n) {
        const te__trained_item *item = &t->items[--t->n];
        te__entry *e = &m->entries[item->entry];
        if (!item->before) continue;
        te_tensor_release(e->tensor);
        e->tensor = item->before;
    }
    t->whole = whole;
    if (n == 0 && !whole) te_module_remove_attribute(m, TE__TRAINED);
}
/* Replaces the tensor of entry e by a copy, and sets *before to the original. A tensor without memory stays, and
 * *before becomes NULL. */
static te_result te__trained_copy(te_module *m, te__entry *e, te_tensor **before) {
    te_tensor *x = e->tensor, *copy, *main_grad = te_tensor_main_grad(x);
    te_result result;
    if (x->quantized)
        return te__fail(m->te, TE_ERR_UNSUPPORTED,
                        "LoRA: the parameter \"%s\" of \"%s\" is stored quantized, and modules_to_save trains a copy "
                        "in high precision; leave the module out, or make the "
                        "model outside of te_quantized_model_init_begin",
                        e->name, m->name);
    *before = NULL;
    /* allocates the tape variable now, because te__lora_train cannot report a lack of memory */
    if (!x->buffer) return te__var_of(x) ? TE_OK : te_error_code(m->te);
    te__frame_begin(m->te);
    copy = te_tensor_set_requires_grad(te__copied(x, x->dtype), true);
    if (copy && x->name) te_tensor_set_name(copy, x->name);
    result = te_error_code(m->te);
    if (result == TE_OK && main_grad) result = te_tensor_set_main_grad(copy, main_grad);
    if (result == TE_OK) {
        te_tensor_set_sequence_parallel(copy, x->sequence_parallel);
        te__split_same(copy, x);
        *before = x; /* takes over the entry's reference */
        e->tensor = te_tensor_retain(copy);
    }
    te__frame_end(m->te, NULL, 0);
    return result;
}
/* Returns m's attribute TE__TRAINED, a new one if m has none. */
static te__trained *te__trained_open(te_module *m) {
    te__trained *t = te__trained_of(m);
    if (t) return t;
    t = (te__trained *)te__alloc_zero(m->te, sizeof(te__trained));
    if (!t) return NULL;
    t->te = m->te;
    if (te_module_set_attribute(m, TE__TRAINED, t, te__trained_free) == TE_OK) return t;
    te__trained_free(t);
    return NULL;
}
/* Makes all parameters of m trained if `whole` is true, otherwise only its biases. Skips those that are trained
 * already. */
static te_result te__trained_give(te_module *m, bool whole) {
    te__trained *t = NULL;
    te_result result = TE_OK;
    int i;
    for (i = 0; i < m->num_entries && result == TE_OK; i++) {
        te__entry *e = &m->entries[i];
        if (!(whole ? e->kind == TE_ENTRY_PARAMETER : te__is_bias(e)) || te__is_trained(te__trained_of(m), i)) continue;
        if (!t) t = te__trained_open(m);
        if (!t || !te__grow(m->te, (void **)&t->items, &t->cap, t->n, sizeof(te__trained_item)))
            return te_error_code(m->te);
        result = te__trained_copy(m, e, &t->items[t->n].before);
        if (result == TE_OK) t->items[t->n++].entry = i;
    }
    if (result != TE_OK || !whole) return result;
    t = te__trained_open(m);
    if (!t) return te_error_code(m->te);
    t->whole = true;
    return TE_OK;
}

/* The state of one module before a call that marks some of its parameters as trained. It is used to undo a failed
 * call. */
typedef struct te__trained_change {
    te_module *m;
    int n;
    bool whole;
} te__trained_change;
typedef struct te__trained_list {
    te_ctx *te;
    te__trained_change *list;
    int n, cap;
} te__trained_list;

static te_result te__trained_list_give(te__trained_list *l, te_module *m, bool whole) {
    const te__trained *t = te__trained_of(m);
    te__trained_change *c;
    if (!te__grow(l->te, (void **)&l->list, &l->cap, l->n, sizeof(te__trained_change))) return te_error_code(l->te);
    c = &l->list[l->n++];
    c->m = m;
    c->n = t ? t->n : 0;
    c->whole = t && t->whole;
    return te__trained_give(m, whole);
}
/* Frees the list. If `failed` is true, it first undoes all changes in the list. */
static void te__trained_list_close(te__trained_list *l, bool failed) {
    for (; failed && l->n > 0; l->n--)
        te__trained_cut(l->list[l->n - 1].m, l->list[l->n - 1].n, l->list[l->n - 1].whole);
    te__free(l->te, l->list);
}

/* Casts the original tensors of m to the dtype that their trained copies have now. */
static bool te__trained_follow(void *user, te_module *m) {
    te__trained *t = te__trained_of(m);
    int i;
    (void)user;
    for (i = 0; t && i < t->n && m->te->error_code == TE_OK; i++) {
        te__trained_item *item = &t->items[i];
        const te_tensor *now = m->entries[item->entry].tensor;
        te_tensor *cast;
        if (!item->before || item->before->dtype == now->dtype) continue;
        te__frame_begin(m->te);
        te_no_grad_begin(m->te);
        cast = te_tensor_cast(item->before, now->dtype);
        if (cast && now->name) te_tensor_set_name(cast, now->name);
        if (m->te->error_code == TE_OK) {
            te_tensor_set_sequence_parallel(cast, now->sequence_parallel);
            te__split_same(cast, now);
            te_tensor_release(item->before);
            item->before = te_tensor_retain(cast);
        }
        te_no_grad_end(m->te);
        te__frame_end(m->te, NULL, 0);
    }
    return m->te->error_code == TE_OK;
}
static bool te__trained_forget_one(void *user, te_module *m) {
    const bool keep = *(const bool *)user;
    const te__trained *t = te__trained_of(m);
    int i;
    for (i = 0; t && i < t->n; i++)
        te_tensor_set_requires_grad(
            keep || !t->items[i].before ? m->entries[t->items[i].entry].tensor : t->items[i].before, false);
    if (keep) te_module_remove_attribute(m, TE__TRAINED); /* keeps the trained values */
    else te__trained_cut(m, 0, false);
    return true;
}
/* Ends the training of additional parameters in a tree and freezes them. `keep` keeps the trained values; otherwise the
 * original tensors come back. */
static void te__trained_forget(te_module *model, bool keep) { te_module_visit(model, te__trained_forget_one, &keep); }

/* ---- freezing ---- */

static bool te__lora_freeze_owner(void *user, te_module *m) {
    const te_module *owner = te__lora_of(m) ? te__lora_site_of(m).owner : NULL;
    int i;
    (void)user;
    if (owner && te__is_experts(m)) te_module_set_requires_grad(m, false);
    for (i = 0; owner && i < owner->num_entries; i++)
        if (owner->entries[i].kind == TE_ENTRY_PARAMETER) te_tensor_set_requires_grad(owner->entries[i].tensor, false);
    return true;
}
static bool te__lora_train(void *user, te_module *m) {
    static const char *const names[] = {"lora_A", "lora_B", TE__MAGNITUDE};
    const te__trained *t = te__trained_of(m);
    int i;
    (void)user;
    for (i = 0; i < TE__COUNT(names) && te__lora_of(m); i++)
        te_module_set_requires_grad(te_module_find(m, names[i]), true);
    for (i = 0; i < 2 * TE__EXPERTS_PRODUCTS && te__lora_of(m) && te__is_experts(m); i++)
        te_module_set_requires_grad(te_module_find(m, te__expert_adapter_names[i / 2][i % 2]), true);
    for (i = 0; t && i < t->n; i++) te_tensor_set_requires_grad(m->entries[t->items[i].entry].tensor, true);
    return true;
}
/* Freezes all parameters except adapters and those trained in addition. If `whole` is false, does so only in modules
 * that have adapters. */
static void te__lora_freeze(te_module *model, bool whole) {
    if (whole) te_module_set_requires_grad(model, false);
    else te_module_visit(model, te__lora_freeze_owner, NULL);
    te_module_visit(model, te__lora_train, NULL);
}
