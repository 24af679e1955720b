/* model/snapshots.c: takes f32 copies of a model's tensors, and puts them back by path. */

typedef struct te__fp32_copy {
    char *path;
    te_tensor *value; /* retained; without memory if the tensor had none */
    te_entry_kind kind;
} te__fp32_copy;
struct te_fp32_snapshots {
    te_ctx *te;
    te__fp32_copy *copy;
    int num, cap;
    te__closable closable;
};

TE_API void te_fp32_snapshots_destroy(te_fp32_snapshots *s) {
    te_ctx *te;
    int i;
    if (!s) return;
    te = s->te;
    te__closable_remove(&s->closable);
    for (i = 0; i < s->num; i++) {
        te__free(te, s->copy[i].path);
        te_tensor_release(s->copy[i].value);
    }
    te__free(te, s->copy);
    te__free(te, s);
}
static void te__snapshots_close(void *owner) { te_fp32_snapshots_destroy((te_fp32_snapshots *)owner); }

static te_tensor *te__fp32_copy_of(te_tensor *x) {
    te_tensor *y;
    if (x->quantized) return te__quant_value(x, TE_F32);
    if (!x->buffer) return te_tensor_describe(x->te, TE_F32, x->ndim, x->shape);
    y = te__empty_like(x, TE_F32);
    return y ? te__checked(y, te_tensor_copy(y, x)) : NULL;
}
typedef struct te__snapshotting {
    te__cast walk; /* must be the first field, because te__snapshot_visit casts its address to te__snapshotting * */
    te_fp32_snapshots *s;
    const char *const *keywords[2]; /* indexed by te_entry_kind */
    int count[2];
} te__snapshotting;
static bool te__snapshot_visit(te__cast *walk, const te_module *m, const te__entry *e) {
    const te__snapshotting *made = (const te__snapshotting *)walk;
    te_fp32_snapshots *s = made->s;
    te__fp32_copy *c;
    (void)m;
    if (!te__is_floating(e->tensor) || !te__is_first(&walk->firsts, e) ||
        !te__word_matches(made->keywords[e->kind], made->count[e->kind], walk->path))
        return true;
    if (!te__grow(s->te, (void **)&s->copy, &s->cap, s->num, sizeof(te__fp32_copy))) return false;
    c = &s->copy[s->num++];
    memset(c, 0, sizeof(*c));
    c->kind = e->kind;
    c->path = te__copy_string(s->te, walk->path);
    te__frame_begin(s->te);
    c->value = te_tensor_retain(te__fp32_copy_of(e->tensor));
    te__frame_end(s->te, NULL, 0);
    return c->path && c->value;
}
TE_API te_fp32_snapshots *te_snapshot_fp32_tensors(te_module *m, const char *const *parameter_keywords,
                                                   int num_parameter_keywords, const char *const *buffer_keywords,
                                                   int num_buffer_keywords) {
    static const char who[] = "te_snapshot_fp32_tensors";
    te__snapshotting made = TE_ZERO;
    te_fp32_snapshots *s;
    if (!m || te__recast_may(m, who) != TE_OK || !te__words_ok(m, parameter_keywords, num_parameter_keywords, who) ||
        !te__words_ok(m, buffer_keywords, num_buffer_keywords, who))
        return NULL;
    s = (te_fp32_snapshots *)te__alloc_zero(m->te, sizeof(*s));
    if (!s) return NULL;
    s->te = m->te;
    te__closable_add(m->te, &s->closable, "snapshot of te_snapshot_fp32_tensors", te__snapshots_close, s);
    made.walk = te__cast_of(m, TE_F32);
    made.s = s;
    made.keywords[TE_ENTRY_PARAMETER] = parameter_keywords;
    made.keywords[TE_ENTRY_BUFFER] = buffer_keywords;
    made.count[TE_ENTRY_PARAMETER] = num_parameter_keywords;
    made.count[TE_ENTRY_BUFFER] = num_buffer_keywords;
    if (te__cast_walk(&made.walk, te__snapshot_visit)) return s;
    te_fp32_snapshots_destroy(s);
    return NULL;
}
TE_API int te_fp32_snapshots_count(const te_fp32_snapshots *s) { return s ? s->num : 0; }
TE_API te_tensor *te_fp32_snapshots_at(const te_fp32_snapshots *s, int index, const char **path, te_entry_kind *kind) {
    if (!s || index < 0 || index >= s->num) return NULL;
    if (path) *path = s->copy[index].path;
    if (kind) *kind = s->copy[index].kind;
    return s->copy[index].value;
}

typedef struct te__putting {
    te_module *m;
    te__firsts firsts;
    te__recast list;
} te__putting;
/* Returns the tensor of kind `kind` at `path` below p->m, or NULL. Tries each dot as the end of the module's path,
 * because tensor names may contain dots. */
static te_tensor *te__tensor_at(const te__putting *p, const char *path, te_entry_kind kind) {
    char owner[TE__TREE_PATH];
    size_t n = te__min(strlen(path), sizeof(owner) - 1);
    for (;;) { /* n: length of the module's path */
        const te__entry *e;
        while (n > 0 && path[n] != '.') n--;
        memcpy(owner, path, n);
        owner[n] = 0;
        e = te__module_entry(te_module_find(p->m, owner), n ? path + n + 1 : path);
        if (e && e->kind == kind && te__is_first(&p->firsts, e)) return e->tensor;
        if (n-- == 0) return NULL;
    }
}
/* Writes the path to `out`, without the components that a wrapper for activation checkpointing adds. */
static void te__path_unwrapped(const char *path, char *out, size_t size) {
    static const char step[] = "_checkpoint_wrapped_module.";
    size_t used = 0;
    bool begins = true;
    while (*path && used + 1 < size) {
        if (begins && te__starts_with(path, step)) {
            path += sizeof(step) - 1;
            continue;
        }
        begins = *path == '.';
        out[used++] = *path++;
    }
    out[used] = 0;
}
static te_tensor *te__snapshot_target(const te__putting *p, const te__fp32_copy *c) {
    char path[TE__TREE_PATH];
    te_tensor *x = te__tensor_at(p, c->path, c->kind);
    if (x || c->kind == TE_ENTRY_PARAMETER) return x;
    te__path_unwrapped(c->path, path, sizeof(path));
    return te__tensor_at(p, path, c->kind);
}
static te_result te__snapshots_add(te__putting *p, const te_fp32_snapshots *s, te_entry_kind kind) {
    char a[TE__SHAPE_TEXT], b[TE__SHAPE_TEXT];
    int i;
    for (i = 0; s && i < s->num; i++) {
        const te__fp32_copy *c = &s->copy[i];
        te_tensor *x = c->kind == kind ? te__snapshot_target(p, c) : NULL;
        if (!x || !te__is_floating(x)) continue;
        if (!te__same_shape(x, c->value))
            return te__fail(p->m->te, TE_ERR_SHAPE,
                            "te_restore_fp32_tensor_snapshots: \"%s\" is %s in the model and was %s: give the "
                            "snapshots of this model",
                            c->path, te__shape_text(x, a), te__shape_text(c->value, b));
        if (!te__recast_add(&p->list, x, TE_F32, 0)) return te_error_code(p->m->te);
    }
    return TE_OK;
}
/* Copies the values of the snapshots into the tensors of the model, which must be f32 already. */
static te_result te__snapshots_copy(const te__putting *p, const te_fp32_snapshots *s, te_entry_kind kind) {
    te_result result = TE_OK;
    int i;
    for (i = 0; s && i < s->num && result == TE_OK; i++) {
        te_tensor *x = s->copy[i].kind == kind ? te__snapshot_target(p, &s->copy[i]) : NULL;
        if (x && x->buffer && te__is_floating(x) && s->copy[i].value->buffer)
            result = te_tensor_copy(x, s->copy[i].value);
    }
    return result;
}
TE_API te_result te_restore_fp32_tensor_snapshots(te_module *m, const te_fp32_snapshots *parameters,
                                                  const te_fp32_snapshots *buffers) {
    te__putting p = TE_ZERO;
    te_result result;
    if (!m) return TE_ERR_STATE;
    result = te__recast_may(m, "te_restore_fp32_tensor_snapshots");
    if (result != TE_OK) return result;
    if ((parameters && parameters->te != m->te) || (buffers && buffers->te != m->te))
        return te__fail(m->te, TE_ERR_INVALID,
                        "te_restore_fp32_tensor_snapshots: the snapshots are of another context than %s; give those of "
                        "this rank's model",
                        m->name);
    p.m = m;
    p.list.te = m->te;
    if (!te__firsts_open(&p.firsts, m)) return te_error_code(m->te);
    result = te__snapshots_add(&p, parameters, TE_ENTRY_PARAMETER);
    if (result == TE_OK) result = te__snapshots_add(&p, buffers, TE_ENTRY_BUFFER);
    result = te__recast_run(&p.list, result == TE_OK);
    if (result == TE_OK) result = te__snapshots_copy(&p, parameters, TE_ENTRY_PARAMETER);
    if (result == TE_OK) result = te__snapshots_copy(&p, buffers, TE_ENTRY_BUFFER);
    te__firsts_close(&p.firsts);
    return result;
}
