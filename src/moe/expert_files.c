/* moe/expert_files.c: loads and saves the weights of this rank's experts in files with the tensor names of Hugging
 * Face. This file must not depend on what experts compute. */

TE_API te_result te_expert_range(te_ctx *te, int n_experts, int rank, int size, int *first, int *count) {
    if (!te || !first || !count)
        return te ? te__fail(te, TE_ERR_INVALID, "te_expert_range: %s is NULL; both results have a place",
                             first ? "count" : "first")
                  : TE_ERR_STATE;
    if (n_experts < 0 || size < 1 || rank < 0 || rank >= size)
        return te__fail(te, TE_ERR_INVALID,
                        "te_expert_range: %d experts, and rank %d of %d; ranks count from 0 to size - 1", n_experts,
                        rank, size);
    *first = rank * (n_experts / size) + te__min(rank, n_experts % size);
    *count = n_experts / size + (rank < n_experts % size);
    return TE_OK;
}

enum { TE__GATE_PROJ, TE__UP_PROJ, TE__DOWN_PROJ, TE__PROJS, TE__MISSING_SHOWN = 5 };

/* Transposes y in place by swapping its sizes and strides. y must be an alias that only the caller uses. */
static void te__turn(te_tensor *y) {
    const int64_t rows = y->shape[0], step = y->stride[0];
    y->shape[0] = y->shape[1];
    y->stride[0] = y->stride[1];
    y->shape[1] = rows;
    y->stride[1] = step;
}
/* y is an alias of the rows of the gate and up projections together. Narrows y to the rows of one of them: `proj` is
 * TE__GATE_PROJ or TE__UP_PROJ. */
static void te__proj_rows(const te__experts_module *s, te_tensor *y, int proj) {
    const bool alternate = te__expert_activations[s->config.expert_activation].alternate;
    const int64_t step = y->stride[0];
    y->shape[0] /= 2;
    if (alternate) y->stride[0] *= 2;
    if (proj == TE__UP_PROJ) y->offset += step * (alternate ? 1 : y->shape[0]) * te__dtype_size(y->dtype);
}
/* Returns a view of one projection of local expert i, in the layout of the files: weight [out, in] or bias [out]. */
static te_tensor *te__proj_view(te_module *m, int proj, bool bias, int i) {
    const te__experts_module *s = (const te__experts_module *)m->state;
    const te_experts_tensor which =
        bias ? (proj == TE__DOWN_PROJ ? TE_EXPERTS_DOWN_PROJ_BIAS : TE_EXPERTS_GATE_UP_PROJ_BIAS)
             : (proj == TE__DOWN_PROJ ? TE_EXPERTS_DOWN_PROJS : TE_EXPERTS_GATE_AND_UP_PROJS);
    const bool linears = m->cls == &te__te_experts_class,
               half = te__expert_is_gated(s->config.expert_activation) && proj != TE__DOWN_PROJ;
    te_tensor *x = linears ? te__te_parameter(m, which, i) : te_module_parameter(m, te_experts_tensor_name(which)), *y;
    if (!x || te__need_memory(x, te_experts_tensor_name(which)) != TE_OK) return NULL;
    if (x->quantized)
        return te__no_tensor(
            m->te, TE_ERR_UNSUPPORTED,
            "\"%s\": its weights are stored quantized, which files with Hugging Face's names do not have; "
            "te_model_save and te_model_load know them",
            m->name);
    y = linears ? te__alias(x) : te__of_expert(x, i);
    if (y && !bias && !linears) te__turn(y); /* stacks store [in, out] */
    if (y && half) te__proj_rows(s, y, proj);
    return y;
}

/* A function that te__each_proj calls for each projection of each local expert. `name` is the tensor's name in the
 * files. */
typedef te_result (*te__proj_fn)(void *user, te_module *m, const char *name, int proj, bool bias, int expert);
static te_result te__each_proj(te_module *m, const char *prefix, te__proj_fn fn, void *user) {
    const te__experts_module *s = (const te__experts_module *)m->state;
    const int first = te__group_rank(s->group) * s->local;
    char name[512];
    te_result result = TE_OK;
    int i, proj, bias;
    for (i = 0; i < s->local && result == TE_OK; i++)
        for (proj = te__expert_is_gated(s->config.expert_activation) ? TE__GATE_PROJ : TE__UP_PROJ;
             proj < TE__PROJS && result == TE_OK; proj++)
            for (bias = 0; bias <= (s->config.expert_bias ? 1 : 0) && result == TE_OK; bias++) {
                int length = snprintf(name, sizeof(name), "%sexperts.%d.%s.%s", prefix ? prefix : "", first + i,
                                      s->proj[proj], bias ? "bias" : "weight");
                if (length >= (int)sizeof(name))
                    return te__fail(m->te, TE_ERR_INVALID,
                                    "the prefix has %d characters; names of at most %d are possible",
                                    (int)strlen(prefix), (int)sizeof(name) - 1);
                result = fn(user, m, name, proj, bias != 0, i);
            }
    return result;
}

/* ---- reading ---- */

typedef struct te__experts_load {
    te_safetensors *const *files;
    int num_files, missing;
    char names[TE__MISSING_SHOWN * 160];
    size_t used;
} te__experts_load;
static te_safetensors *te__file_with(const te__experts_load *l, const char *name) {
    int i;
    for (i = 0; i < l->num_files; i++)
        if (te_safetensors_find(l->files[i], name)) return l->files[i];
    return NULL;
}
/* Checks that the files have tensor `name`, with a float dtype and the right shape. Counts and lists the missing
 * tensors. */
static te_result te__proj_check(void *user, te_module *m, const char *name, int proj, bool bias, int expert) {
    te__experts_load *l = (te__experts_load *)user;
    te_safetensors *f = te__file_with(l, name);
    const te_safetensors_entry *e = f ? te_safetensors_find(f, name) : NULL;
    te_tensor *view = te__proj_view(m, proj, bias, expert);
    char text[TE__SHAPE_TEXT];
    if (!view) return te_error_code(m->te) != TE_OK ? te_error_code(m->te) : TE_ERR_STATE;
    if (!e) {
        if (l->missing++ < TE__MISSING_SHOWN && l->used < sizeof(l->names))
            l->used +=
                (size_t)snprintf(l->names + l->used, sizeof(l->names) - l->used, "%s%s", l->used ? ", " : "", name);
        return TE_OK;
    }
    if (!te__is_float(e->dtype))
        return te__fail(m->te, TE_ERR_DTYPE,
                        "te_experts_load_hf: %s is %s; f32, f16 and bf16 are possible: decode codes before", name,
                        te_dtype_name(e->dtype));
    if (e->ndim != view->ndim || memcmp(e->shape, view->shape, (size_t)e->ndim * sizeof(int64_t)))
        return te__fail(m->te, TE_ERR_SHAPE, "te_experts_load_hf: %s does not fit: the experts have %s there", name,
                        te__shape_text(view, text));
    return TE_OK;
}
static te_result te__proj_read(void *user, te_module *m, const char *name, int proj, bool bias, int expert) {
    te_tensor *x, *view;
    te_result result;
    te__frame_begin(m->te);
    x = te_safetensors_read(te__file_with((te__experts_load *)user, name), name);
    view = te__proj_view(m, proj, bias, expert);
    result = x && view ? te_tensor_copy(view, x) : te_error_code(m->te);
    te__frame_end(m->te, NULL, 0);
    return result;
}
TE_API te_result te_experts_load_hf(te_module *m, te_safetensors *const *files, int num_files, const char *prefix) {
    te_module *experts = te__experts_of(m);
    te__experts_load l = TE_ZERO;
    te_result result;
    int i;
    if (!te__stack_known(m, experts, TE_EXPERTS_DOWN_PROJS, "te_experts_load_hf"))
        return m ? te_error_code(m->te) : TE_ERR_STATE;
    if (m->te->error_code != TE_OK) return m->te->error_code;
    for (i = 0; i < num_files; i++)
        if (!files || !files[i])
            return te__fail(m->te, TE_ERR_INVALID,
                            "te_experts_load_hf: files[%d] is NULL; te_safetensors_open gives one", i);
    for (i = 0; i < num_files; i++)
        if (files[i]->te != m->te)
            return te__fail(m->te, TE_ERR_INVALID,
                            "te_experts_load_hf: files[%d] belongs to another context; its errors would be that one's",
                            i);
    l.files = files;
    l.num_files = num_files;
    te__frame_begin(m->te);
    result = te__each_proj(experts, prefix, te__proj_check, &l);
    if (result == TE_OK && l.missing)
        result =
            te__fail(m->te, TE_ERR_FORMAT,
                     "te_experts_load_hf: %d tensors of this rank's experts are in none of the %d files: %s%s; is the "
                     "prefix \"%s\" the right one?",
                     l.missing, num_files, l.names, l.missing > TE__MISSING_SHOWN ? " ..." : "", prefix ? prefix : "");
    te__frame_end(m->te, NULL, 0);
    return result == TE_OK ? te__each_proj(experts, prefix, te__proj_read, &l) : result;
}

/* ---- writing ---- */

static te_result te__proj_collect(void *user, te_module *m, const char *name, int proj, bool bias, int expert) {
    te_tensor *view = te__proj_view(m, proj, bias, expert), *x = view ? te__copied(view, view->dtype) : NULL;
    if (x && te__st_list_add(user, m, name, x, TE_ENTRY_PARAMETER)) return TE_OK;
    return te_error_code(m->te) != TE_OK ? te_error_code(m->te) : TE_ERR_STATE;
}
TE_API te_result te_experts_save_hf(te_module *m, const char *path, const char *prefix) {
    te_module *experts = te__experts_of(m);
    te__st_list l = TE_ZERO;
    te_result result;
    if (!te__stack_known(m, experts, TE_EXPERTS_DOWN_PROJS, "te_experts_save_hf"))
        return m ? te_error_code(m->te) : TE_ERR_STATE;
    l.te = m->te;
    te__frame_begin(m->te);
    result = te__each_proj(experts, prefix, te__proj_collect, &l);
    if (result == TE_OK) result = te_safetensors_write(m->te, path, l.items, l.n, NULL, 0);
    te__frame_end(m->te, NULL, 0);
    te__st_list_free(&l);
    return result;
}
