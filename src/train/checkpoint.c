/* train/checkpoint.c: loads what train/checkpoint_save.c has saved. Quantizes weights that the file has in high
 * precision. This file must not depend on what a module computes. */

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

/* A visitor: returns false at a parameter that only this rank of a group has. */
static bool te__ckpt_is_shared(void *user, te_module *m, const char *path, te_tensor *x, te_entry_kind kind) {
    (void)user, (void)m, (void)path, (void)kind;
    return !te__ckpt_is_own(te__ckpt_split(x));
}
/* Returns true if the file may have this entry because other ranks have other experts: the nearest module of its name
 * has some of this rank's. */
static bool te__ckpt_is_elsewhere(te_module *m, const char *entry) {
    char path[640];
    char *dot;
    te_module *owner = NULL;
    if (te__starts_with(entry, "optimizer/")) entry += strlen("optimizer/");
    snprintf(path, sizeof(path), "%s", entry);
    while (m && !owner && (dot = strrchr(path, '.')) != NULL) {
        *dot = 0;
        owner = te_module_find(m, path);
    }
    return owner && !te_module_visit_tensors(owner, te__ckpt_is_shared, NULL);
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

static int te__ckpt_by_slice(const void *a, const void *b) {
    return strcmp(((const te__ckpt_slice *)a)->name, ((const te__ckpt_slice *)b)->name);
}
/* Checks that the checkpoint has a tensor. */
static te_result te__ckpt_has(te__ckpt_files *files, const char *name) {
    if (te__ckpt_find(files, name)) return TE_OK;
    te__st_fail(files->file[0], TE_ERR_FORMAT, "there is no tensor " TE__ST_NAME ", which the %s has", name,
                te__starts_with(name, "optimizer/") ? "optimizer" : "model");
    return TE_ERR_FORMAT;
}

/* Writes the name of a tensor of the row-wise copy of a quantized weight. `part`: index in te__ckpt_parts. */
static void te__ckpt_part_name(char *name, size_t size, const char *weight, int part) {
    snprintf(name, size, "%s.row.%s", weight, te__ckpt_parts[part]);
}
/* Returns whether an entry of a checkpoint is the value of `weight`, or belongs to its codes. */
static bool te__ckpt_is_of_value(const char *entry, const char *weight) {
    const size_t n = strlen(weight);
    return strncmp(entry, weight, n) == 0 &&
           (!entry[n] || te__starts_with(entry + n, ".row.") || te__starts_with(entry + n, ".col."));
}
/* Returns a new tensor with the value of this rank's part of a weight whose codes, of the whole weight, the checkpoint
 * has. x is the part. */
static te_tensor *te__ckpt_read_codes(te__ckpt_files *files, const char *weight, const te_tensor *x,
                                      const te__split *split) {
    te_tensor *whole, *value, *own, *part[3];
    te__ckpt_slice all;
    te_result result = TE_OK;
    char name[704];
    int k;
    te__ckpt_set_part(&all, x->ndim, x->shape, split);
    if (!x->quantized->quantizer) /* a tensor of a spec alone is no parameter */
        return te__no_tensor(files->te, TE_ERR_UNSUPPORTED, "te_model_load: " TE__ST_NAME " has no quantizer", weight);
    whole = te_quantizer_make_empty(x->quantized->quantizer, x->dtype, x->ndim, all.shape);
    if (!whole) return NULL;
    part[0] = whole->quantized->row.data;
    part[1] = whole->quantized->row.scale;
    part[2] = whole->quantized->row.amax;
    for (k = 0; k < 3 && result == TE_OK; k++) {
        if (!part[k]) continue;
        te__ckpt_part_name(name, sizeof(name), weight, k);
        result = te__ckpt_has(files, name);
        if (result == TE_OK) result = te__ckpt_fits(files, name, part[k]->dtype, part[k]->ndim, part[k]->shape);
        if (result == TE_OK) result = te__ckpt_read_range(files, name, 0, part[k]);
    }
    value = result == TE_OK ? te_dequantize(whole, TE_DTYPE_NONE) : NULL;
    own = value ? te_tensor_empty(files->te, x->dtype, x->ndim, x->shape) : NULL;
    return own ? te__checked(own, te__split_take(own, value, split)) : NULL;
}

/* Checks every name, shape, format and number, before anything is changed. */
static te_result te__ckpt_check(te__ckpt_plan *p, te__ckpt_files *files, te_module *m, te_optimizer *opt) {
    te_safetensors *f = files->file[0];
    te_ctx *te = p->have.te;
    const char *first = NULL;
    int i, unused = 0;
    if (p->have.items.n)
        qsort(p->have.items.items, (size_t)p->have.items.n, sizeof(te_safetensors_item), te__ckpt_by_name);
    for (i = 0; i < p->have.items.n; i++) {
        const te_tensor *x = p->have.items.items[i].tensor;
        te_result result = te__ckpt_has(files, p->have.items.items[i].name);
        if (result == TE_OK && !x->buffer) {
            te__st_fail(f, TE_ERR_INVALID,
                        "tensor " TE__ST_NAME " cannot be read into a tensor that is quantized or has no memory",
                        p->have.items.items[i].name);
            return TE_ERR_INVALID;
        }
        if (result == TE_OK) result = te__ckpt_fits(files, p->have.items.items[i].name, x->dtype, x->ndim, x->shape);
        if (result != TE_OK) return result;
    }
    if (p->have.num_slices)
        qsort(p->have.slices, (size_t)p->have.num_slices, sizeof(te__ckpt_slice), te__ckpt_by_slice);
    for (i = 0; i < p->have.num_slices; i++) {
        const te__ckpt_slice *x = &p->have.slices[i];
        te_result result = te__ckpt_has(files, x->name);
        if (result == TE_OK) result = te__ckpt_fits(files, x->name, x->dtype, x->ndim, x->shape);
        if (result != TE_OK) return result;
    }
    for (i = 0; i < p->have.values.n; i++) { /* formats are converted; shapes must match */
        const te_safetensors_entry *e = te__ckpt_find(files, p->have.values.items[i].name);
        if (!e) { /* a part, of which the file may have codes */
            char codes[704];
            te__ckpt_part_name(codes, sizeof(codes), p->have.values.items[i].name, 0);
            if (te__ckpt_has(files, codes) != TE_OK) return TE_ERR_FORMAT;
            continue;
        }
        const te_tensor *x = p->have.values.items[i].tensor;
        te__ckpt_slice whole;
        char a[TE__SHAPE_TEXT], b[TE__SHAPE_TEXT];
        te__ckpt_set_part(&whole, x->ndim, x->shape, te__ckpt_split(x));
        if (te__is_float(e->dtype) && e->ndim == x->ndim &&
            memcmp(e->shape, whole.shape, (size_t)x->ndim * sizeof(int64_t)) == 0)
            continue;
        te__st_fail(f, TE_ERR_SHAPE,
                    "tensor " TE__ST_NAME
                    " is %s %s; the model's is %s, stored quantized: f32, f16 or bf16 of that size is needed",
                    e->name, te_dtype_name(e->dtype), te__dims_text(e->ndim, e->shape, a),
                    te__dims_text(x->ndim, whole.shape, b));
        return TE_ERR_SHAPE;
    }
    for (i = 0; i < files->num_entries; i++) {
        const te_safetensors_entry *e = files->entry[i];
        bool state = te__starts_with(e->name, "optimizer/");
        te_safetensors_item key;
        te__ckpt_slice slice;
        int k;
        key.name = e->name;
        key.tensor = NULL;
        slice.name = (char *)(uintptr_t)e->name;
        if (state ? !opt : !m) continue; /* the caller did not ask for this part */
        for (k = 0; k < p->have.values.n && !te__ckpt_is_of_value(e->name, p->have.values.items[k].name); k++) {}
        if (k < p->have.values.n) continue;
        if (p->have.items.n &&
            bsearch(&key, p->have.items.items, (size_t)p->have.items.n, sizeof(key), te__ckpt_by_name))
            continue;
        if (p->have.num_slices &&
            bsearch(&slice, p->have.slices, (size_t)p->have.num_slices, sizeof(slice), te__ckpt_by_slice))
            continue;
        if (!state && (te__ckpt_passes_over(m, e->name) || te__ckpt_take_fresh(p, m, e))) continue;
        if (te__ckpt_is_elsewhere(m, e->name)) continue;
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

/* Reads the slices of this rank. */
static te_result te__ckpt_read_slices(te__ckpt *c, const te_tensor *scratch) {
    te_result result = TE_OK;
    int i;
    for (i = 0; i < c->num_slices && result == TE_OK; i++) {
        const te__ckpt_slice *x = &c->slices[i];
        result = te__ckpt_read_slice(c->file, x, scratch);
        if (result != TE_OK || !x->value) continue;
        if (x->codes) result = te__ckpt_move_codes(x, true);
        x->value->version =
            x->value->param->quantized ? te__param_version(x->value->param) : x->value->version + 1;
        x->value->written_at = ++c->te->writes;
    }
    return result;
}
/* Returns the set whose parameters are gathered for a new value of x, or NULL. */
static te__shard_set *te__ckpt_moving_set(const te_tensor *x) { return x->moves && x->shard ? x->shard->set : NULL; }
/* Writes the values of quantized weights that the file has in high precision. A sharded weight is gathered for it, by
 * all ranks, which hear of a failure before the next gathering. */
static te_result te__ckpt_start_values(te__ckpt_plan *p) {
    te_result result = TE_OK;
    bool told = false;
    int i;
    for (i = 0; i < p->have.values.n; i++)
        if (te__ckpt_moving_set(p->have.values.items[i].tensor))
            te__ckpt_moving_set(p->have.values.items[i].tensor)->visited = false;
    for (i = 0; i < p->have.values.n && !told; i++) {
        te_tensor *x = (te_tensor *)p->have.values.items[i].tensor;
        te__shard_set *set = te__ckpt_moving_set(x);
        if (set && !set->visited) { /* all ranks gather it here */
            const bool failed = result != TE_OK;
            if (!failed) result = te__shards_gather(set);
            else te__refuse(set->group, TE__ALL_GATHER, result);
            told = result != TE_OK && (failed || set->told);
            set->visited = true;
        }
        if (result == TE_OK) result = te__primary_start(x, p->value[i]);
    }
    for (i = 0; i < p->have.values.n && result == TE_OK; i++)
        if (te__ckpt_moving_set(p->have.values.items[i].tensor))
            result = te__shards_scatter(te__ckpt_moving_set(p->have.values.items[i].tensor));
    return result;
}

/* Reads the tensors. */
static te_result te__ckpt_read(te__ckpt_plan *p) {
    te__ckpt_files *files = p->have.file;
    te_ctx *te = p->have.te;
    te_tensor *scratch = NULL;
    te_result result = TE_OK;
    int64_t most = 0;
    int i;
    /* Allocations come first, because they can be undone. */
    if (!te__ckpt_stage(files)) return TE_ERR_OUT_OF_MEMORY;
    for (i = 0; i < p->have.num_slices; i++) most = te__max(most, te__ckpt_scratch_bytes(&p->have.slices[i]));
    if (most > 0) scratch = te__empty_1d(te, TE_U8, most);
    if (most > 0 && !scratch) return te_error_code(te);
    p->value = (te_tensor **)te__alloc_zero(te, ((size_t)p->have.values.n + 1) * sizeof(te_tensor *));
    if (!p->value) return TE_ERR_OUT_OF_MEMORY;
    for (i = 0; i < p->have.values.n; i++) {
        const te_safetensors_item *x = &p->have.values.items[i];
        const te__split *split = te__ckpt_split(x->tensor);
        const bool part = split && split->dim >= 0;
        te__frame_begin(te);
        p->value[i] = part && !te__ckpt_find(files, x->name) ? te__ckpt_read_codes(files, x->name, x->tensor, split)
                      : part ? te__ckpt_read_part(files, x->name, x->tensor, split)
                             : te__ckpt_read_new(files, x->name);
        p->value[i] = te__frame_return(te, te_tensor_cast(p->value[i], x->tensor->dtype));
        if (!p->value[i]) return te_error_code(te);
    }
    for (i = 0; i < p->num_fresh; i++) {
        p->fresh[i].tensor = te__ckpt_read_new(files, p->fresh[i].entry);
        if (!te_module_add_buffer(p->fresh[i].m, p->fresh[i].name, p->fresh[i].tensor)) {
            while (i > 0) te__module_remove_last(p->fresh[--i].m);
            return te_error_code(te);
        }
    }
    for (i = 0; i < p->have.items.n && result == TE_OK; i++) {
        const te_safetensors_item *x = &p->have.items.items[i];
        if (te__is_contiguous(x->tensor))
            result = te__ckpt_read_range(files, x->name, 0, (te_tensor *)x->tensor);
        else
            result = te_tensor_copy((te_tensor *)x->tensor, te__ckpt_read_new(files, x->name));
    }
    return result == TE_OK ? te__ckpt_read_slices(&p->have, scratch) : result;
}
/* Makes what follows from the tensors that were read, and sets the numbers of the optimizer and the random state. */
static te_result te__ckpt_finish(te__ckpt_plan *p, te_optimizer *opt) {
    te_result result = te__ckpt_start_values(p);
    int i;
    for (i = 0; i < p->have.num_turn && result == TE_OK; i++) result = te__quant_add_columnwise(p->have.turn[i]);
    if (result != TE_OK) return result;
    if (opt) result = te__optimizer_restored(opt, (int64_t)p->steps, (float)p->lr[0]);
    if (result != TE_OK) return result;
    for (i = 1; opt && i < opt->num_groups; i++) {
        opt->groups[i].own_lr = p->has_lr[i];
        if (p->has_lr[i]) opt->groups[i].lr = (float)p->lr[i];
    }
    if (p->has_rng) te_rng_set(p->have.te, p->seed, p->offset);
    return TE_OK;
}

TE_API te_result te_model_load(te_ctx *te, const char *path, te_module *m, te_optimizer *opt) {
    te__ckpt_plan p;
    te__ckpt_files *f = NULL;
    te__ckpt_groups groups;
    te_result result, found;
    if (!te) return TE_ERR_STATE;
    memset(&p, 0, sizeof(p));
    te__frame_begin(te);
    result = te__ckpt_ready(&p.have, te, "te_model_load", path, m, opt);
    found = te__ckpt_find_groups(&groups, te, m, opt);
    if (result == TE_OK) result = found;
    if (result == TE_OK) f = te__ckpt_files_open(te, path);
    if (result == TE_OK && !f) result = te_error_code(te);
    p.have.file = f;
    if (result == TE_OK) result = te__ckpt_collect(&p.have, te, m, opt);
    if (result == TE_OK) result = te__ckpt_check(&p, f, m, opt);
    /* a rank that cannot open its files stops the others before they change anything, and before they gather */
    result = te__ckpt_agree_all(&groups, result);
    if (result == TE_OK) result = te__ckpt_agree_all(&groups, te__ckpt_read(&p));
    if (result == TE_OK) result = te__ckpt_finish(&p, opt);
    if (result == TE_OK) te__step_ends(te); /* te_clear_error must not restore the scales that were there before
                                             * loading */
    te__free(te, p.fresh);
    te__free(te, p.value);
    te__ckpt_close(&p.have);
    te__ckpt_files_close(f);
    te__ckpt_groups_close(&groups);
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
