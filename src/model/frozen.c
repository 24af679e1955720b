/* model/frozen.c: te_cast_frozen_modules_to_compute_dtype. It casts frozen tensors, and all tensors of modules that
 * have frozen weights and adapters. */

enum {
    TE__HAS_PARAMS = 1,
    TE__HAS_TRAINABLE = 2 /* at or below the module */,
    TE__OWNS_BASE = 4 /* the module itself has a frozen weight that trainable parameters may adapt */
};

typedef struct te__frozen {
    te__cast cast;
    unsigned char *mark; /* [num]: the TE__HAS_* and TE__OWNS_BASE bits of each module of the tree, parents first */
    int num, at;
    bool any_base;
} te__frozen;

static bool te__count_module(void *user, te_module *m) {
    (void)m;
    ++*(int *)user;
    return true;
}
/* Returns true if e is a frozen floating parameter that is not sharded and may leave f32. */
static bool te__frozen_casts(const te__frozen *f, const te__entry *e) {
    return !e->tensor->requires_grad && te__is_floating(e->tensor) && !e->tensor->sharded &&
           !te__cast_keeps(&f->cast, e);
}
/* Sets f->mark for m and the modules below it. f->cast.path must be the path of m. A shared parameter counts
 * only for the first module that has it. */
static unsigned char te__frozen_mark(te__frozen *f, te_module *m) {
    const size_t used = strlen(f->cast.path);
    const int own = f->at++;
    unsigned char mark = 0;
    int i;
    for (i = 0; i < m->num_entries; i++) {
        const te__entry *e = &m->entries[i];
        te__path_append(f->cast.path, used, e->name);
        if (e->kind == TE_ENTRY_BUFFER || !te__is_first(&f->cast.firsts, e)) continue;
        mark |= TE__HAS_PARAMS | (e->tensor->requires_grad ? TE__HAS_TRAINABLE : 0);
        if (te__frozen_casts(f, e) && (f->any_base || e->tensor->ndim >= 2)) mark |= TE__OWNS_BASE;
    }
    for (i = 0; i < m->num_children; i++) {
        te__path_append(f->cast.path, used, m->children[i]->name);
        mark |= te__frozen_mark(f, m->children[i]) & (TE__HAS_PARAMS | TE__HAS_TRAINABLE);
    }
    f->cast.path[used] = 0;
    return f->mark[own] = mark;
}
/* Lists the tensors of m, and of the modules below it, with their new dtypes.
 * `mixed`: a module above m has a frozen weight and trainable parameters.
 * `frozen`: a module above m has parameters, none of them trainable. */
static bool te__frozen_list(te__frozen *f, te_module *m, bool mixed, bool frozen) {
    const size_t used = strlen(f->cast.path);
    const unsigned char mark = f->mark[f->at++];
    bool more = true;
    int i;
    mixed = mixed || (mark & (TE__OWNS_BASE | TE__HAS_TRAINABLE)) == (TE__OWNS_BASE | TE__HAS_TRAINABLE);
    frozen = frozen || (mark & (TE__HAS_PARAMS | TE__HAS_TRAINABLE)) == TE__HAS_PARAMS;
    for (i = 0; i < m->num_entries && more; i++) {
        const te__entry *e = &m->entries[i];
        const bool buffer = e->kind == TE_ENTRY_BUFFER;
        bool casts;
        if (!te__is_first(&f->cast.firsts, e)) continue;
        te__path_append(f->cast.path, used, e->name);
        casts = buffer ? frozen || mixed : (!e->tensor->requires_grad || mixed) && !e->tensor->sharded;
        casts = casts && !te__cast_keeps(&f->cast, e) && !te__is_scaling_path(f->cast.path, e->kind);
        more = te__recast_add(&f->cast.list, e->tensor, casts ? f->cast.dtype : e->tensor->dtype, !casts);
    }
    for (i = 0; i < m->num_children && more; i++) {
        te__path_append(f->cast.path, used, m->children[i]->name);
        more = te__frozen_list(f, m->children[i], mixed, frozen);
    }
    f->cast.path[used] = 0;
    return more;
}

TE_API te_result te_cast_frozen_modules_to_compute_dtype(te_module *m, const te_cast_frozen_desc *desc) {
    static const char who[] = "te_cast_frozen_modules_to_compute_dtype";
    te__frozen f = TE_ZERO;
    te_result result;
    bool ok;
    if (!m) return TE_ERR_STATE;
    if (!desc || !desc->compute_dtype) return TE_OK;
    result = te__recast_may(m, who);
    if (result == TE_OK) result = te__want_floating(m->te, desc->compute_dtype, who, "compute_dtype");
    if (result != TE_OK) return result;
    f.cast = te__cast_of(m, desc->compute_dtype);
    f.cast.sharded = false; /* With false, te__cast_keeps obeys all words of te_module_set_keep_in_fp32, even those that
                             * are not strict. Sharded parameters need no rule here, because te__frozen_list never
                             * casts them. */
    f.any_base = desc->any_frozen_base;
    te_module_visit(m, te__count_module, &f.num);
    f.mark = (unsigned char *)te__alloc_zero(m->te, (size_t)f.num);
    if (!f.mark) return te_error_code(m->te);
    ok = te__firsts_open(&f.cast.firsts, m);
    if (ok) {
        te__frozen_mark(&f, m);
        f.at = 0;
        ok = te__frozen_list(&f, m, false, false);
        te__firsts_close(&f.cast.firsts);
    }
    te__free(m->te, f.mark);
    return te__recast_run(&f.cast.list, ok);
}
