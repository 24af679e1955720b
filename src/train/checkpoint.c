/* train/checkpoint.c: saves and loads a model, its optimizer and the random state as one safetensors file. This file
 * must not depend on what a module computes. The names in the file:
 *
 *     layers.0.self_attention.proj.weight             a parameter or buffer, by its path
 *     layers.0 ... .weight.row.data                   a tensor of a quantized weight (.row.scale,
 *                                                     .row.amax, .col. ..)
 *     optimizer/layers.0 ... .weight.exp_avg          a state of the optimizer (.exp_avg_sq, .master_param,
 *                                                     .exp_avg_scale ..)
 *     optimizer/started                               flags: the parameter has taken part in a step; only in files of
 *                                                     an optimizer whose first step differs from later ones
 *     te.steps, te.lr, te.seed, te.offset             metadata: numbers of the optimizer and of the random state
 *     te.lr.0                                         the learning rate of the optimizer's first group, if it has one
 *                                                     of its own
 *
 * Loading quantizes weights that the file has in high precision. The scaling state of delayed recipes is saved as
 * buffers of the modules. */

/* The tensors of a module tree and of an optimizer, each with its name in the file. */
typedef struct te__ckpt {
    te_ctx *te;
    const te_safetensors *file; /* the file that is loaded; NULL: saving */
    te__st_list items;
    te__st_list values; /* loading: quantized weights that the file holds in high precision */
    te_tensor **turn; /* loading: quantized weights whose column-wise copy the file lacks; this copy is made from the
                       * row-wise copy */
    int num_turn, cap_turn;
} te__ckpt;

static bool te__ckpt_add(te__ckpt *c, const char *name, te_tensor *tensor) {
    return te__st_list_put(&c->items, name, tensor);
}

/* The names of the tensors of a copy of a quantized weight. */
static const char *const te__ckpt_parts[3] = {"data", "scale", "amax"};

/* Lists the parts of a weight that is stored quantized. */
static bool te__ckpt_add_quantized(te__ckpt *c, const char *path, te_tensor *x) {
    static const char *const copies[2] = {"row", "col"};
    const char *const *parts = te__ckpt_parts;
    char name[640];
    int i, k;
    if (c->file && te_safetensors_find(c->file, path)) return te__st_list_put(&c->values, path, x);
    for (i = 0; i < 2; i++) {
        const te__quant_copy *copy = i ? &x->quantized->col : &x->quantized->row;
        te_tensor *part[3];
        snprintf(name, sizeof(name), "%s.%s.data", path, copies[i]);
        if (i && c->file && copy->data && !te_safetensors_find(c->file, name) && te__column_follows(x)) {
            if (!te__grow(c->te, (void **)&c->turn, &c->cap_turn, c->num_turn, sizeof(te_tensor *))) return false;
            c->turn[c->num_turn++] = x;
            continue;
        }
        part[0] = copy->data;
        /* a tensor that both copies share is saved once */
        part[1] = i && copy->scale == x->quantized->row.scale ? NULL : copy->scale;
        part[2] = i && copy->amax == x->quantized->row.amax ? NULL : copy->amax;
        for (k = 0; k < 3; k++) {
            snprintf(name, sizeof(name), "%s.%s.%s", path, copies[i], parts[k]);
            if (part[k] && !te__ckpt_add(c, name, part[k])) return false;
        }
    }
    return true;
}
static bool te__ckpt_add_entry(void *user, te_module *m, const char *path, te_tensor *tensor, te_entry_kind kind) {
    if (kind == TE_ENTRY_BUFFER && te__module_is_transient(m, tensor)) return true;
    return tensor->quantized ? te__ckpt_add_quantized((te__ckpt *)user, path, tensor)
                             : te__ckpt_add((te__ckpt *)user, path, tensor);
}
static bool te__ckpt_add_state(void *user, const char *name, te_tensor *tensor) {
    return te__ckpt_add((te__ckpt *)user, name, tensor);
}

static void te__ckpt_close(te__ckpt *c) {
    te__st_list_free(&c->items);
    te__st_list_free(&c->values);
    te__free(c->te, c->turn);
}

static te_result te__ckpt_ready(te__ckpt *c, te_ctx *te, const char *function, const char *path, te_module *m,
                                te_optimizer *opt) {
    memset(c, 0, sizeof(*c));
    c->te = c->items.te = c->values.te = te;
    if (te->error_code != TE_OK) return te->error_code; /* The error may have left tensors incomplete. A file of such
                                                         * tensors must not replace a good file */
    if (!path) return te__fail(te, TE_ERR_INVALID, "%s: path is NULL", function);
    if ((m && te_module_ctx(m) != te) || (opt && opt->te != te))
        return te__fail(te, TE_ERR_INVALID, "%s: the %s belongs to another context", function,
                        m && te_module_ctx(m) != te ? "module" : "optimizer");
    return m ? te__tree_whole(m) : TE_OK;
}
static te_result te__ckpt_collect(te__ckpt *c, te_ctx *te, te_module *m, te_optimizer *opt) {
    if (te_module_visit_tensors(m, te__ckpt_add_entry, c) && te__optimizer_visit(opt, te__ckpt_add_state, c))
        return TE_OK;
    return te_error_code(te);
}

/* ---- saving ---- */

static const char te__ckpt_prefix[] = "te.";

static void te__ckpt_put(te_metadata *all, int *n, const char *key, const char *value) {
    all[*n].key = key;
    all[(*n)++].value = value;
}

TE_API te_result te_model_save(te_ctx *te, const char *path, te_module *m, te_optimizer *opt,
                               const te_metadata *metadata, int num_metadata) {
    te__ckpt c;
    te__text lr[TE_MAX_PARAM_GROUPS + 1];
    char key[TE_MAX_PARAM_GROUPS + 1][24];
    const size_t all_bytes = ((size_t)te__max(num_metadata, 0) + 4 + TE_MAX_PARAM_GROUPS) * sizeof(te_metadata);
    te_metadata *all = NULL;
    te_result result;
    char steps[24], seed[24], offset[24];
    int i, n = 0;
    if (!te) return TE_ERR_STATE;
    if (num_metadata < 0 || (num_metadata > 0 && !metadata))
        return te__fail(te, TE_ERR_INVALID, "te_model_save: metadata is missing");
    for (i = 0; i <= (int)TE_MAX_PARAM_GROUPS; i++) memset(&lr[i], 0, sizeof(lr[i]));
    result = te__ckpt_ready(&c, te, "te_model_save", path, m, opt);
    if (result == TE_OK) result = te__optimizer_before_save(opt);
    if (result == TE_OK) result = te__ckpt_collect(&c, te, m, opt);
    for (i = 0; i < num_metadata && result == TE_OK; i++)
        if (metadata[i].key && te__starts_with(metadata[i].key, te__ckpt_prefix))
            result =
                te__fail(te, TE_ERR_INVALID,
                         "te_model_save: metadata key \"%.100s\": te.h keeps those that begin with \"%s\" for itself",
                         metadata[i].key, te__ckpt_prefix);
    if (result == TE_OK) all = (te_metadata *)te__alloc(te, all_bytes);
    if (result == TE_OK && !all) result = TE_ERR_OUT_OF_MEMORY;
    if (result == TE_OK) {
        if (num_metadata) memcpy(all, metadata, (size_t)num_metadata * sizeof(te_metadata));
        n = num_metadata;
        snprintf(seed, sizeof(seed), "%llu", (unsigned long long)te->seed);
        snprintf(offset, sizeof(offset), "%llu", (unsigned long long)te->rng_offset);
        te__ckpt_put(all, &n, "te.seed", seed);
        te__ckpt_put(all, &n, "te.offset", offset);
    }
    if (result == TE_OK && opt) {
        snprintf(steps, sizeof(steps), "%lld", (long long)te_optimizer_steps(opt));
        te__ckpt_put(all, &n, "te.steps", steps);
        for (i = 0; i < opt->num_groups; i++) {
            if (i > 0 && !opt->groups[i].own_lr) continue;
            snprintf(key[i], sizeof(key[i]), i ? "te.lr.%d" : "te.lr", i - 1);
            te__text_number(&lr[i], (double)te__group_lr(opt, i));
            te__ckpt_put(all, &n, key[i], te__text_str(&lr[i]));
        }
    }
    if (result == TE_OK) result = te_safetensors_write(te, path, c.items.items, c.items.n, all, n);
    for (i = 0; i <= (int)TE_MAX_PARAM_GROUPS; i++) te__text_free(&lr[i]);
    te__free(te, all);
    te__ckpt_close(&c);
    return result;
}

/* ---- loading ---- */

/* A buffer of scaling state that the file has, and that its module lacks because the module has not run yet. The tensor
 * of the file becomes the module's buffer. */
typedef struct te__ckpt_new {
    te_module *m;
    const char *entry; /* name in the file */
    const char *name;  /* name of the buffer: the last part of `entry` */
    te_tensor *tensor; /* NULL until it is read; te__frame_end in te_model_load releases it */
} te__ckpt_new;

typedef struct te__ckpt_plan {
    te__ckpt have; /* the tensors that the model has; each of them is read from the file */
    te__ckpt_new *fresh;
    int num_fresh, cap_fresh;
    te_tensor **value; /* [have.values.n]: the file's values for the weights in have.values; te__frame_end in
                        * te_model_load releases them */
    bool has_rng, has_opt;
    uint64_t seed, offset, steps;
    double lr[TE_MAX_PARAM_GROUPS + 1];
    bool has_lr[TE_MAX_PARAM_GROUPS + 1]; /* for each group: the file has a learning rate */
} te__ckpt_plan;

/* Reads a number from the metadata. Other text is an error. If `found` is NULL, a missing number is an error too.
 * Otherwise sets *found. */
static bool te__ckpt_number(te_safetensors *f, const char *key, bool *found, uint64_t *value, double *real) {
    const char *text = te_safetensors_metadata(f, key);
    double number = 0.0;
    size_t used, n = text ? strlen(text) : 0;
    if (found) *found = text != NULL;
    if (!text && found) return true;
    used = text ? te__read_number(text, n, &number) : 0;
    if (used == 0 || used != n)
        return te__st_fail(f, TE_ERR_FORMAT, "metadata \"%s\" is %s%.40s%s; a number is needed", key,
                           text ? "\"" : "missing", text ? text : "", text ? "\"" : "");
    if (real) *real = number;
    if (!value) return true;
    if (n > 20 || strspn(text, "0123456789") != n || (n == 20 && strcmp(text, "18446744073709551615") > 0))
        return te__st_fail(f, TE_ERR_FORMAT, "metadata \"%s\" is \"%.40s\"; a whole number below 2^64 is needed", key,
                           text);
    *value = (uint64_t)strtoull(text, NULL, 10);
    return true;
}

/* Returns true if `name` is the name of a buffer that te__scaling_slots makes. */
static bool te__is_scaling_name(const char *name) {
    int i;
    for (i = 0; i < 4; i++)
        if (strcmp(name, te__scaling_names[i / 2][i % 2]) == 0) return true;
    return false;
}
/* Returns true if an entry has the dtype and shape of m's scaling state: f32 scales [n], or an f32 amax history
 * [length, n]. */
static bool te__is_scaling_state(const te_module *m, const char *name, const te_safetensors_entry *e) {
    const te__scaling *s = te__quant_of(m->te)->scaling;
    const bool history = te__starts_with(name, "fp8_amax_history_");
    while (s && s->module != m) s = s->next;
    if (!s || e->dtype != TE_F32 || e->ndim != (history ? 2 : 1) ||
        (history && (e->shape[0] < 1 || e->shape[0] > INT32_MAX)))
        return false;
    return e->shape[e->ndim - 1] == (strcmp(name + strlen(name) - 3, "fwd") == 0 ? s->forward.n : s->backward.n);
}

/* Returns the module that an entry of the file belongs to, or NULL. Sets *name to the entry's name after the last
 * dot. */
static te_module *te__ckpt_module(te_module *m, const char *entry, const char **name) {
    const char *dot = strrchr(entry, '.');
    char path[512];
    size_t n = dot ? (size_t)(dot - entry) : 0;
    *name = dot ? dot + 1 : entry;
    if (n >= sizeof(path)) return NULL;
    memcpy(path, entry, n);
    path[n] = 0;
    return te_module_find(m, path);
}
/* Returns the parameter or buffer of the model that an entry of the file is named after, or NULL. */
static const te__entry *te__ckpt_entry(te_module *m, const char *name_in_file) {
    const char *name;
    const te_module *owner = te__ckpt_module(m, name_in_file, &name);
    return owner ? te__module_entry(owner, name) : NULL;
}
/* Returns true if the file may have this entry although the model does not load it: a transient buffer, or a tensor of
 * the column-wise copy of a weight that has only a row-wise copy here (te_quantized_model_init_begin). */
static bool te__ckpt_passes_over(te_module *m, const char *entry) {
    const te__entry *e = te__ckpt_entry(m, entry);
    const char *part = strrchr(entry, '.');
    char weight[512];
    const size_t n = part ? (size_t)(part - entry) : 0;
    int i;
    if (e) return e->transient;
    for (i = 0; part && i < TE__COUNT(te__ckpt_parts) && strcmp(part + 1, te__ckpt_parts[i]) != 0; i++) {}
    if (i == TE__COUNT(te__ckpt_parts) || n < sizeof(".col") || n >= sizeof(weight) ||
        memcmp(part - 4, ".col", 4) != 0)
        return false;
    memcpy(weight, entry, n - 4);
    weight[n - 4] = 0;
    e = te__ckpt_entry(m, weight);
    return e && e->tensor->quantized && !e->tensor->quantized->col.data;
}

/* Adds an entry to p->fresh if it is scaling state without a buffer in its module. Returns false for other entries. */
static bool te__ckpt_take_fresh(te__ckpt_plan *p, te_module *m, const te_safetensors_entry *e) {
    te__ckpt_new x;
    memset(&x, 0, sizeof(x));
    x.entry = e->name;
    x.m = te__ckpt_module(m, e->name, &x.name);
    if (!x.m || !te__is_scaling_name(x.name) || !te__is_scaling_state(x.m, x.name, e) ||
        !te__grow(p->have.te, (void **)&p->fresh, &p->cap_fresh, p->num_fresh, sizeof(x)))
        return false;
    p->fresh[p->num_fresh++] = x;
    return true;
}

static int te__ckpt_by_name(const void *a, const void *b) {
    return strcmp(((const te_safetensors_item *)a)->name, ((const te_safetensors_item *)b)->name);
}

/* Checks every name, shape, format and number, before anything is changed. */
static te_result te__ckpt_check(te__ckpt_plan *p, te_safetensors *f, te_module *m, te_optimizer *opt) {
    te_ctx *te = p->have.te;
    const char *first = NULL;
    int i, unused = 0;
    if (p->have.items.n)
        qsort(p->have.items.items, (size_t)p->have.items.n, sizeof(te_safetensors_item), te__ckpt_by_name);
    for (i = 0; i < p->have.items.n; i++) {
        const char *name = p->have.items.items[i].name;
        te_result result;
        if (!te_safetensors_find(f, name)) {
            te__st_fail(f, TE_ERR_FORMAT, "there is no tensor " TE__ST_NAME ", which the %s has", name,
                        te__starts_with(name, "optimizer/") ? "optimizer" : "model");
            return TE_ERR_FORMAT;
        }
        result = te__st_fits(f, name, p->have.items.items[i].tensor);
        if (result != TE_OK) return result;
    }
    for (i = 0; i < p->have.values.n; i++) { /* formats are converted; shapes must match */
        const te_safetensors_entry *e = te_safetensors_find(f, p->have.values.items[i].name);
        const te_tensor *x = p->have.values.items[i].tensor;
        char a[TE__SHAPE_TEXT], b[TE__SHAPE_TEXT];
        if (te__is_float(e->dtype) && e->ndim == x->ndim &&
            memcmp(e->shape, x->shape, (size_t)x->ndim * sizeof(int64_t)) == 0)
            continue;
        te__st_fail(f, TE_ERR_SHAPE,
                    "tensor " TE__ST_NAME
                    " is %s %s; the model's is %s, stored quantized: f32, f16 or bf16 of that size is needed",
                    e->name, te_dtype_name(e->dtype), te__dims_text(e->ndim, e->shape, a), te__shape_text(x, b));
        return TE_ERR_SHAPE;
    }
    for (i = 0; i < te_safetensors_count(f); i++) {
        const te_safetensors_entry *e = te_safetensors_at(f, i);
        bool state = te__starts_with(e->name, "optimizer/");
        te_safetensors_item key;
        key.name = e->name;
        key.tensor = NULL;
        int k;
        if (state ? !opt : !m) continue; /* the caller did not ask for this part */
        for (k = 0; k < p->have.values.n && strcmp(p->have.values.items[k].name, e->name) != 0; k++) {
        }
        if (k < p->have.values.n) continue;
        if (p->have.items.n &&
            bsearch(&key, p->have.items.items, (size_t)p->have.items.n, sizeof(key), te__ckpt_by_name))
            continue;
        if (!state && (te__ckpt_passes_over(m, e->name) || te__ckpt_take_fresh(p, m, e))) continue;
        if (unused++ == 0) first = e->name;
    }
    if (!te__ckpt_number(f, "te.seed", &p->has_rng, &p->seed, NULL)) return TE_ERR_FORMAT;
    if (p->has_rng && !te__ckpt_number(f, "te.offset", NULL, &p->offset, NULL)) return TE_ERR_FORMAT;
    if (opt && !te__ckpt_number(f, "te.steps", NULL, &p->steps, NULL)) return TE_ERR_FORMAT;
    for (i = 0; opt && i < opt->num_groups; i++) {
        char key[24];
        snprintf(key, sizeof(key), i ? "te.lr.%d" : "te.lr", i - 1);
        if (!te__ckpt_number(f, key, i ? &p->has_lr[i] : NULL, NULL, &p->lr[i])) return TE_ERR_FORMAT;
        if (p->steps < (uint64_t)INT64_MAX && p->lr[i] >= 0.0 && p->lr[i] <= (double)FLT_MAX) continue;
        te__st_fail(f, TE_ERR_FORMAT, "metadata \"te.steps\" is %llu and \"%s\" %g: no optimizer has such values",
                    (unsigned long long)p->steps, key, p->lr[i]);
        return TE_ERR_FORMAT;
    }
    if (unused && te->error_code == TE_OK)
        te__warn(te, "%s: %d tensors that the model lacks are ignored, the first is " TE__ST_NAME, f->path, unused,
                 first);
    return te_error_code(te);
}

static te_result te__ckpt_read(te__ckpt_plan *p, te_safetensors *f, te_optimizer *opt) {
    te_ctx *te = p->have.te;
    te_result result = TE_OK;
    int i;
    /* Allocations come first, because they can be undone. */
    if (!te__st_stage(f)) return TE_ERR_OUT_OF_MEMORY;
    p->value = (te_tensor **)te__alloc_zero(te, ((size_t)p->have.values.n + 1) * sizeof(te_tensor *));
    if (!p->value) return TE_ERR_OUT_OF_MEMORY;
    for (i = 0; i < p->have.values.n; i++) {
        p->value[i] =
            te_tensor_cast(te_safetensors_read(f, p->have.values.items[i].name), p->have.values.items[i].tensor->dtype);
        if (!p->value[i]) return te_error_code(te);
    }
    for (i = 0; i < p->num_fresh; i++) {
        p->fresh[i].tensor = te_safetensors_read(f, p->fresh[i].entry);
        if (!te_module_add_buffer(p->fresh[i].m, p->fresh[i].name, p->fresh[i].tensor)) {
            while (i > 0) te__module_remove_last(p->fresh[--i].m);
            return te_error_code(te);
        }
    }
    for (i = 0; i < p->have.items.n && result == TE_OK; i++)
        result = te_safetensors_read_into(f, p->have.items.items[i].name, (te_tensor *)p->have.items.items[i].tensor);
    for (i = 0; i < p->have.values.n && result == TE_OK; i++)
        result = te__primary_start((te_tensor *)p->have.values.items[i].tensor, p->value[i]);
    for (i = 0; i < p->have.num_turn && result == TE_OK; i++) result = te__quant_add_columnwise(p->have.turn[i]);
    if (result != TE_OK) return result;
    if (opt) result = te__optimizer_restored(opt, (int64_t)p->steps, (float)p->lr[0]);
    if (result != TE_OK) return result;
    for (i = 1; opt && i < opt->num_groups; i++) {
        opt->groups[i].own_lr = p->has_lr[i];
        if (p->has_lr[i]) opt->groups[i].lr = (float)p->lr[i];
    }
    if (p->has_rng) te_rng_set(te, p->seed, p->offset);
    return TE_OK;
}

TE_API te_result te_model_load(te_ctx *te, const char *path, te_module *m, te_optimizer *opt) {
    te__ckpt_plan p;
    te_safetensors *f = NULL;
    te_result result;
    if (!te) return TE_ERR_STATE;
    memset(&p, 0, sizeof(p));
    te__frame_begin(te);
    result = te__ckpt_ready(&p.have, te, "te_model_load", path, m, opt);
    if (result == TE_OK) f = te_safetensors_open(te, path);
    if (result == TE_OK && !f) result = te_error_code(te);
    p.have.file = f;
    if (result == TE_OK) result = te__ckpt_collect(&p.have, te, m, opt);
    if (result == TE_OK) result = te__ckpt_check(&p, f, m, opt);
    if (result == TE_OK) result = te__ckpt_read(&p, f, opt);
    if (result == TE_OK) te__step_ends(te); /* te_clear_error must not restore the scales that were there before
                                             * loading */
    te__free(te, p.fresh);
    te__free(te, p.value);
    te__ckpt_close(&p.have);
    te_safetensors_close(f);
    te__frame_end(te, NULL, 0);
    return result;
}

TE_API te_result te_model_metadata(te_ctx *te, const char *path, const char *key, char *buffer, size_t size) {
    te_safetensors *f;
    const char *value;
    te_result result = TE_OK;
    if (!te) return TE_ERR_STATE;
    if (!key || !buffer || size == 0)
        return te__fail(te, TE_ERR_INVALID, "te_model_metadata: key or buffer is missing");
    buffer[0] = 0;
    f = te_safetensors_open(te, path);
    if (!f) return te_error_code(te);
    value = te_safetensors_metadata(f, key);
    if (!value) {
        te__st_fail(f, TE_ERR_INVALID, "there is no metadata " TE__ST_NAME, key);
        result = TE_ERR_INVALID;
    } else if (strlen(value) >= size) {
        te__st_fail(f, TE_ERR_INVALID, "metadata " TE__ST_NAME " has %llu characters; the buffer has room for %llu",
                    key, (unsigned long long)strlen(value), (unsigned long long)size - 1);
        result = TE_ERR_INVALID;
    } else {
        memcpy(buffer, value, strlen(value) + 1);
    }
    te_safetensors_close(f);
    return result;
}
