/* lora/merge.c: te_lora_merge and te_lora_remove. This file must not depend on files on disk. */

/* ---- shared weights ---- */

/* Returns true if x and y share memory. */
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
/* Returns another module of the context, one of whose parameters shares memory with x; NULL if there is none. Sets
 * *entry to the index of the parameter. */
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

/* Returns the name of an adapter that the site has lost, or NULL if the site still has all its adapters. */
static const char *te__lora_gone(const te__lora_site *s) {
    te_module *holder = te__lora_holder(s);
    int i;
    if (te__is_experts(holder)) {
        for (i = 0; i < 2 * TE__EXPERTS_PRODUCTS; i++)
            if (!te__adapter_stack(holder, i / 2, i % 2)) return te__expert_adapter_names[i / 2][i % 2];
        return NULL;
    }
    return !te_module_find(holder, "lora_A")   ? "lora_A"
           : !te_module_find(holder, "lora_B") ? "lora_B"
           : te__lora_of(holder)->dora && !te_module_find(holder, TE__MAGNITUDE) ? TE__MAGNITUDE
                                                                                  : NULL;
}
static bool te__has_values(void *user, te_module *m) {
    (void)user;
    return !m->meta;
}
/* Checks that the adapters of a site can be merged into its weights. */
static te_result te__lora_mergeable(const te__lora_site *s) {
    const te__lora_shape shape = te__lora_shape_of(s, 0);
    te_module *m = s->owner, *holder = te__lora_holder(s);
    const char *gone = te__lora_gone(s);
    char path[256], other_path[256];
    int i, entry;
    te_module_path(holder, path, sizeof(path));
    if (gone)
        return te__fail(m->te, TE_ERR_STATE,
                        "te_lora_merge: \"%s\": its child \"%s\" is gone; te_lora_remove takes the others away", path,
                        gone);
    if (!te_module_visit(m, te__has_values, NULL))
        return te__fail(
            m->te, TE_ERR_STATE,
            "te_lora_merge: \"%s\" or its adapters have no values yet; te_module_reset_parameters gives them", path);
    for (i = 0; i < shape.products * shape.parts; i++) {
        te_tensor *weight = te__lora_base(s, i);
        const te_module *other;
        if (!weight) return te_error_code(m->te) != TE_OK ? te_error_code(m->te) : TE_ERR_STATE;
        other = te__other_owner(te__is_experts(m) ? te__product_owner(m, i) : m, weight, &entry);
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

/* Computes n merged weight matrices of a site, from matrix number `first` on. A matrix can consist of several
 * parameters (te__lora_shape). Writes one tensor for each parameter to `sums`. */
static te_result te__lora_sums(const te__lora_site *s, int first, int n, te_tensor **sums) {
    const te__lora_shape shape = te__lora_shape_of(s, 0);
    te_module *holder = te__lora_holder(s);
    const te__lora *l = te__lora_of(holder);
    int product, part;
    for (product = first; product < first + n; product++) {
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
/* Merges a site's adapters into n of its weight matrices, from matrix number `first` on. Computes all merged matrices
 * before it changes any. Then sets the tensors in `zero` to 0, if `zero` is not NULL; `zero` has TE__EXPERTS_PRODUCTS
 * tensors. */
static te_result te__lora_merge_some(const te__lora_site *s, int first, int n, te_tensor *const *zero) {
    const int parts = te__lora_shape_of(s, 0).parts;
    const size_t bytes = (size_t)(n * parts) * sizeof(te_tensor *);
    te_ctx *te = s->owner->te;
    te_tensor **sums = (te_tensor **)te__alloc_zero(te, bytes);
    te_result result;
    int i;
    if (!sums) return TE_ERR_OUT_OF_MEMORY;
    te__frame_begin(te);
    te_no_grad_begin(te);
    result = te__lora_sums(s, first, n, sums);
    for (i = 0; i < n * parts && result == TE_OK; i++) {
        te_tensor *weight = te__lora_base(s, first * parts + i);
        result = !weight             ? te_error_code(te)
                 : weight->quantized ? te__primary_start(weight, sums[i])
                                     : te_tensor_copy(weight, sums[i]);
    }
    for (i = 0; zero && i < TE__EXPERTS_PRODUCTS && result == TE_OK; i++) result = te_tensor_fill(zero[i], 0.0);
    te_no_grad_end(te);
    te__frame_end(te, NULL, 0);
    te__free(te, sums);
    return result;
}
/* Merges a site's adapters into its weights. Experts are merged one by one to save memory. Sets lora_B of each
 * merged expert to 0. If a later expert fails, the adapters stay, and those of the merged experts then add nothing. */
static te_result te__lora_merge(const te__lora_site *s) {
    const int products = te__lora_shape_of(s, 0).products;
    te_module *m = s->owner;
    te_result result = TE_OK;
    int i, k, each;
    if (!te__is_experts(m)) return te__lora_merge_some(s, 0, products, NULL);
    each = products / te__experts_local(m);
    for (i = 0; i < te__experts_local(m) && result == TE_OK; i++) {
        te_tensor *zero[TE__EXPERTS_PRODUCTS];
        te__frame_begin(m->te);
        for (k = 0; k < TE__EXPERTS_PRODUCTS; k++) zero[k] = te__of_expert(te__adapter_stack(m, k, 1), i);
        result = zero[0] && zero[1] ? te__lora_merge_some(s, i * each, each, zero) : te_error_code(m->te);
        te__frame_end(m->te, NULL, 0);
    }
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
    if (result == TE_OK && !te_module_visit(model, te__trained_follow, NULL)) result = te_error_code(model->te);
    for (i = 0; i < l.n && result == TE_OK; i++) te__lora_take_away(&l.list[i]);
    if (result == TE_OK) te__trained_forget(model, false);
    if (result == TE_OK) te_module_remove_attribute(model, TE__LORA_BASE);
    te__lora_list_free(&l);
    return result;
}
