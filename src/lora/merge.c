/* lora/merge.c: te_lora_merge and te_lora_remove. Knows the sites of adapters and what shares their weights; must
 * not know files. */

/* ---- who else has a weight ---- */

/* Do x and y hold the same bytes, or a part of them? */
static bool te__values_meet(te_tensor *x, te_tensor *y) {
    te_tensor *a[TE__MAX_PARTS], *b[TE__MAX_PARTS];
    const int n = te__parts(x, a), k = te__parts(y, b);
    te__span s, t;
    int i, j;
    for (i = 0; i < n; i++)
        for (j = 0; j < k; j++) {
            if (!a[i] || !b[j] || !a[i]->buffer || !b[j]->buffer) continue;
            te__span_of(a[i], &s);
            te__span_of(b[j], &t);
            if (te__spans_meet(s, t)) return true;
        }
    return x == y;
}
/* The module beside `owner`, of whatever tree, that has x among its parameters, and its number there; NULL: none
 * has. */
static const te_module *te__other_owner(const te_module *owner, te_tensor *x, int *entry) {
    const te__closable *c;
    for (c = owner->te->closables; c; c = c->next) {
        const te_module *m = (const te_module *)c->owner;
        if (c->close != te__module_close || m == owner) continue;
        for (*entry = 0; *entry < m->num_entries; ++*entry)
            if (te__values_meet(x, m->entries[*entry].tensor)) return m;
    }
    return NULL;
}

/* Can the weights of a site take their sums? */
static te_result te__lora_mergeable(const te__lora_site *s) {
    const te__lora_shape shape = te__lora_shape_of(s);
    te_module *m = s->owner, *holder = te__lora_holder(s);
    const te_module *a = te_module_find(holder, "lora_A"), *b = te_module_find(holder, "lora_B"),
                    *length = te_module_find(holder, TE__MAGNITUDE);
    char path[256], other_path[256];
    int i, entry;
    te_module_path(holder, path, sizeof(path));
    if (!a || !b || (te__lora_of(holder)->dora && !length))
        return te__fail(m->te, TE_ERR_STATE,
                        "te_lora_merge: \"%s\": its child \"%s\" is gone; te_lora_remove takes the others away", path,
                        !a   ? "lora_A"
                        : !b ? "lora_B"
                             : TE__MAGNITUDE);
    if (m->meta || a->meta || b->meta || (length && length->meta))
        return te__fail(
            m->te, TE_ERR_STATE,
            "te_lora_merge: \"%s\" or its adapters have no values yet; te_module_reset_parameters gives them", path);
    for (i = 0; i < shape.products * shape.parts; i++) {
        te_tensor *weight = te__lora_base(s, i);
        const te_module *other = te__other_owner(m, weight, &entry);
        if (weight->quantized && !weight->quantized->quantizer)
            return te__fail(
                m->te, TE_ERR_STATE,
                "te_lora_merge: the weight of \"%s\" is quantized without its quantizer, and cannot take a new value",
                path);
        if (other)
            return te__fail(m->te, TE_ERR_UNSUPPORTED,
                            "te_lora_merge: the weight of \"%s\" is also \"%s\" of \"%s\"%s%s%s, which would change "
                            "with it; give one of them a copy (te_module_add_parameter)",
                            path, other->entries[entry].name, te_module_path(other, other_path, sizeof(other_path)),
                            te__root_of(other) == te__root_of(m) ? "" : " in the tree of \"",
                            te__root_of(other) == te__root_of(m) ? "" : te__root_of(other)->name,
                            te__root_of(other) == te__root_of(m) ? "" : "\"");
    }
    if (te__is_tied_table(m))
        return te__fail(m->te, TE_ERR_UNSUPPORTED,
                        "te_lora_merge: the weight of \"%s\" is that of lm_head, too (tie_word_embeddings), which has "
                        "no adapters and would change with it; te_lora_remove or "
                        "te_lora_save them",
                        path);
    return TE_OK;
}

/* ---- merging ---- */

/* The merged weights of a site, in the order of its parameters. */
static te_result te__lora_sums(const te__lora_site *s, te_tensor **sums) {
    const te__lora_shape shape = te__lora_shape_of(s);
    te_module *holder = te__lora_holder(s);
    const te__lora *l = te__lora_of(holder);
    int product, part;
    for (product = 0; product < shape.products; product++) {
        te_tensor *delta = te__lora_delta(s, product);
        int64_t at = 0;
        for (part = 0; part < shape.parts && delta; part++, sums++) {
            te_tensor *weight = te__lora_base(s, product * shape.parts + part);
            *sums = te__lora_sum(weight, te_tensor_narrow(delta, 0, at, te__rows(weight)), te__lora_factor(l));
            if (l->dora) *sums = te__dora_merged(holder, *sums, at);
            if (!*sums) return te_error_code(holder->te);
            at += te__rows(weight);
        }
        if (!delta) return te_error_code(holder->te);
    }
    return TE_OK;
}
static te_result te__lora_merge(const te__lora_site *s) {
    const te__lora_shape shape = te__lora_shape_of(s);
    const int n = shape.products * shape.parts;
    te_ctx *te = s->owner->te;
    te_tensor **sums = (te_tensor **)te__alloc_zero(te, (size_t)n * sizeof(te_tensor *));
    te_result result;
    int i;
    if (!sums) return TE_ERR_OUT_OF_MEMORY;
    te__frame_begin(te);
    te_no_grad_begin(te);
    result = te__lora_sums(s, sums);
    for (i = 0; i < n && result == TE_OK; i++) { /* all of a site's weights change, or none */
        te_tensor *weight = te__lora_base(s, i);
        result = weight->quantized ? te__primary_start(weight, sums[i]) : te_tensor_copy(weight, sums[i]);
    }
    te_no_grad_end(te);
    te__frame_end(te, NULL, 0);
    te__free(te, sums, (size_t)n * sizeof(te_tensor *));
    return result;
}

TE_API te_result te_lora_merge(te_module *model) {
    te__lora_list l = TE_ZERO;
    te_result result = te__lora_open(model, "te_lora_merge");
    bool entered;
    int i;
    if (result == TE_OK) result = te__tree_whole(model);
    if (result != TE_OK) return result;
    result = te__lora_all(&l, model, "te_lora_merge");
    for (i = 0; i < l.n && result == TE_OK; i++) result = te__lora_mergeable(&l.list[i]);
    if (result == TE_OK) result = te__device_enter(l.te, &entered);
    if (result == TE_OK) {
        for (i = 0; i < l.n && result == TE_OK; i++) {
            result = te__lora_merge(&l.list[i]);
            if (result == TE_OK) te__lora_take_away(&l.list[i]);
        }
        te__device_leave(l.te, entered);
    }
    if (result == TE_OK) te__trained_forget(model, true);
    if (result == TE_OK) te_module_remove_attribute(model, TE__LORA_BASE);
    te__lora_list_free(&l);
    return result;
}
TE_API te_result te_lora_remove(te_module *model) {
    te__lora_list l = TE_ZERO;
    te_result result = te__lora_open(model, "te_lora_remove");
    int i;
    if (result != TE_OK) return result;
    result = te__lora_all(&l, model, "te_lora_remove");
    if (result == TE_OK) result = te__trained_follow(model);
    for (i = 0; i < l.n && result == TE_OK; i++) te__lora_take_away(&l.list[i]);
    if (result == TE_OK) te__trained_forget(model, false);
    if (result == TE_OK) te_module_remove_attribute(model, TE__LORA_BASE);
    te__lora_list_free(&l);
    return result;
}
