/* train/checkpoint_save.c: saves a model, its optimizer and the random state as one safetensors file, or as a set of
 * files if ranks share it (train/checkpoint_files.c). This file must not depend on what a module computes. The names in
 * the file:
 *
 *     layers.0.self_attention.proj.weight             a parameter or buffer, by its path
 *     layers.0 ... .weight.row.data                   a tensor of a quantized weight (.row.scale,
 *                                                     .row.amax, .col. ..)
 *     optimizer/layers.0 ... .weight.exp_avg          a state of the optimizer (.exp_avg_sq, .master_param,
 *                                                     .exp_avg_scale ..)
 *     optimizer/layers.0 ... .weight.started          a flag: the parameter has taken part in a step; only in files of
 *                                                     an optimizer whose first step differs from later ones. Older
 *                                                     files have all flags in one tensor, optimizer/started
 *     te.steps, te.lr, te.seed, te.offset             metadata: numbers of the optimizer and of the random state
 *     te.lr.0                                         the learning rate of the optimizer's first group, if it has one
 *                                                     of its own
 *
 * The scaling state of delayed recipes is saved as buffers of the modules. */

/* The tensors of a module tree and of an optimizer, each with its name in the file. */
typedef struct te__ckpt {
    te_ctx *te;
    te__ckpt_files *file; /* the checkpoint that is loaded; NULL: saving */
    te__st_list items;
    te__st_list values; /* loading: quantized weights that the file holds in high precision */
    te__ckpt_slice *slices;
    int num_slices, cap_slices;
    bool sharded;    /* saving: parameters that are no experts are sharded, over the ranks of `group` */
    te_group *group;
    te_tensor **turn; /* loading: quantized weights whose column-wise copy the file lacks; this copy is made from the
                       * row-wise copy */
    int num_turn, cap_turn;
} te__ckpt;

static bool te__ckpt_add(te__ckpt *c, const char *name, te_tensor *tensor) {
    return te__st_list_put(&c->items, name, tensor);
}

/* ---- slices ---- */

/* Returns how ranks divide a parameter; NULL: each rank has the whole. */
static const te__split *te__ckpt_split(const te_tensor *x) {
    return x && x->split && x->split->size > 1 ? x->split : NULL;
}
/* Returns whether only this rank of a group has a parameter. */
static bool te__ckpt_is_own(const te__split *s) { return s && s->dim < 0; }

/* Writes to `whole` the name that a rank with all experts has for `name`: the number at the end of a part of it ("fc1.
 * weight3.exp_avg") counts the experts of all ranks. */
static void te__ckpt_whole_name(const char *name, const te__split *split, char *whole, size_t size) {
    size_t end = strlen(name), at;
    const bool numbered = te__ckpt_is_own(split) && split->own == TE__OWN_NUMBERED;
    for (; numbered && end > 0 && (name[end - 1] < '0' || name[end - 1] > '9'); end--)
        while (end > 1 && name[end - 1] != '.') end--; /* a part without a number */
    for (at = end; numbered && at > 0 && name[at - 1] >= '0' && name[at - 1] <= '9';) at--;
    if (!numbered || at == end) snprintf(whole, size, "%s", name);
    else snprintf(whole, size, "%.*s%ld%s", (int)at, name, strtol(name + at, NULL, 10) + split->first, name + end);
}

/* Adds what this rank has of a tensor, which ranks divide as `split` says (NULL: not at all). `shape`: of the part.
 * `shard`: the slice of it that this rank has; NULL: all. */
static te__ckpt_slice *te__ckpt_add_slice(te__ckpt *c, const char *name, te_tensor *tensor, te_dtype dtype, int ndim,
                                          const int64_t *shape, const te__split *split, const te__shard *shard) {
    te__ckpt_slice *x;
    char whole[704];
    if (!tensor || !te__grow(c->te, (void **)&c->slices, &c->cap_slices, c->num_slices, sizeof(te__ckpt_slice)))
        return NULL;
    te__ckpt_whole_name(name, split, whole, sizeof(whole));
    x = &c->slices[c->num_slices];
    memset(x, 0, sizeof(*x));
    x->name = te__copy_string(c->te, whole);
    x->tensor = tensor;
    x->dtype = dtype;
    x->unit = te__dtype_size(dtype);
    te__ckpt_set_part(x, ndim, shape, split);
    if (shard) {
        x->length = shard->length;
        x->start = shard->start;
        x->shard_group = te__shard_group(shard);
    }
    if (!x->name) return NULL;
    c->num_slices++;
    return x;
}
/* Adds a tensor that is not sharded. */
static bool te__ckpt_put(te__ckpt *c, const char *name, te_tensor *x, const te__split *split) {
    if (!split) return te__ckpt_add(c, name, x);
    return te__ckpt_add_slice(c, name, x, x->dtype, x->ndim, x->shape, split, NULL) != NULL;
}
/* Copies rows of codes between this rank's block of slices, where they lie close together, and x->tensor, whose rows
 * are those of the whole tensor. */
static te_result te__ckpt_move_codes(const te__ckpt_slice *x, bool into_block) {
    const te__shard *s = x->value;
    const int64_t rows = x->tensor->shape[0], ld = (int64_t)te__row_bytes(x->dtype, x->tensor->shape[1]),
                  n = s->part[x->part].row_bytes;
    te_tensor *packed, *padded;
    if (rows == 0) return TE_OK;
    packed = te__shard_view(s->set->block, s->part[x->part].at, TE_U8, 1, rows, n, rows * n, n);
    padded = te__shard_view(x->tensor, 0, TE_U8, 1, rows, n, rows * ld, ld);
    if (!packed || !padded) return te_error_code(s->set->te);
    return into_block ? te_tensor_copy(packed, padded) : te_tensor_copy(padded, packed);
}
/* Adds this rank's codes of a part of a quantized parameter. */
static bool te__ckpt_add_codes(te__ckpt *c, const char *name, te__shard *s, int part) {
    const te_tensor *x = te__shard_memory(s, part);
    const int64_t rows = s->length / te__max(s->width, 1), first = s->start / te__max(s->width, 1),
                  ld = (int64_t)te__row_bytes(x->dtype, x->shape[1]);
    int64_t shape[2];
    te__ckpt_slice *slice;
    te_tensor *own;
    shape[0] = rows;
    shape[1] = x->shape[1];
    own = s->set->of_parameters ? te_tensor_zeros(c->te, x->dtype, 2, shape)
                                : te__alias_as(x, first * ld, x->dtype, 2, shape);
    slice = te__ckpt_add_slice(c, name, own, x->dtype, 2, x->shape, te__ckpt_split(s->param), s);
    if (!slice) return false;
    slice->unit = 1; /* rows of codes are bytes */
    slice->start = first * ld;
    slice->length = rows * ld;
    slice->codes = true;
    slice->value = s;
    slice->part = part;
    return c->file || !s->set->of_parameters || te__ckpt_move_codes(slice, false) == TE_OK;
}
/* Releases what is gathered of a sharded parameter: its slice has the value then. A set of files has one value of each
 * parameter, and of ranks that share a unit in several groups, nobody knows whether they have one. */
static bool te__ckpt_meet(te__ckpt *c, const te__shard *s) {
    if (!c->file && !te__ckpt_is_own(te__ckpt_split(s->param))) {
        if (c->sharded && c->group != s->set->group)
            return te__not_ok(c->te, TE_ERR_UNSUPPORTED,
                              "te_model_save: unit \"%s\" is shared by another group (%d ranks) than the units before "
                              "it (%d), and its parameters are not those of experts, of which each rank has its own; "
                              "save the modules of each group to a path of their own",
                              s->set->name, te__group_size(s->set->group), te__group_size(c->group));
        c->sharded = true;
        c->group = s->set->group;
    }
    return te__shards_scatter(s->set) == TE_OK;
}
/* Returns whether a parameter is saved, or loaded, by slices. */
static bool te__ckpt_slices(const te__ckpt *c, const te_tensor *x) {
    return x->shard && te__numel(x) > 0 && (!c->file || x->shard->set->of_parameters);
}

/* Returns the number of elements of a whole tensor. */
static int64_t te__ckpt_count(const te__ckpt_slice *x) {
    int64_t n = 1;
    int i;
    for (i = 0; i < x->ndim; i++) n *= x->shape[i];
    return n;
}

static const char te__ckpt_flags[] = "optimizer/started"; /* all flags, in older files */
/* The names of the tensors of a copy of a quantized weight. */
static const char *const te__ckpt_parts[3] = {"data", "scale", "amax"};

/* Lists the parts of a weight that is stored quantized. */
static bool te__ckpt_add_quantized(te__ckpt *c, const char *path, te_tensor *x) {
    static const char *const copies[2] = {"row", "col"};
    const char *const *parts = te__ckpt_parts;
    const te__split *split = te__ckpt_split(x);
    const bool slices = te__ckpt_slices(c, x);
    char name[640], whole[704];
    int i, k;
    te__ckpt_whole_name(path, split, whole, sizeof(whole));
    if (c->file && te__ckpt_find(c->file, whole)) return te__st_list_put(&c->values, whole, x);
    for (i = 0; i < 2; i++) {
        const te__quant_copy *copy = i ? &x->quantized->col : &x->quantized->row;
        te_tensor *part[3];
        if (slices && i == x->shard->num_parts) break; /* the column-wise copy follows from the row-wise one */
        snprintf(name, sizeof(name), "%s.%s.data", path, copies[i]);
        te__ckpt_whole_name(name, split, whole, sizeof(whole));
        if (i && c->file && copy->data && !te__ckpt_find(c->file, whole) && te__column_follows(x)) {
            if (!te__grow(c->te, (void **)&c->turn, &c->cap_turn, c->num_turn, sizeof(te_tensor *))) return false;
            c->turn[c->num_turn++] = x;
            continue;
        }
        part[0] = slices ? NULL : copy->data;
        if (slices && !te__ckpt_add_codes(c, name, x->shard, i)) return false;
        /* a tensor that both copies share is saved once */
        part[1] = i && copy->scale == x->quantized->row.scale ? NULL : copy->scale;
        part[2] = i && copy->amax == x->quantized->row.amax ? NULL : copy->amax;
        for (k = 0; k < 3; k++) {
            snprintf(name, sizeof(name), "%s.%s.%s", path, copies[i], parts[k]);
            if (part[k] && !te__ckpt_put(c, name, part[k], split)) return false;
        }
    }
    return true;
}
/* Adds the value of a part that is stored quantized: the scales of its codes are this rank's, and no other layout could
 * read them. A file may have codes of the whole parameter. */
static bool te__ckpt_add_decoded(te__ckpt *c, const char *path, te_tensor *x, const te__split *split) {
    te__ckpt_slice *slice;
    if (c->file) return te__st_list_put(&c->values, path, x);
    slice = te__ckpt_add_slice(c, path, x, x->dtype, x->ndim, x->shape, split, x->shard);
    if (slice) slice->stored = x;
    return slice != NULL;
}
/* Returns how ranks divide the experts of a module: its buffers are then those of one rank, too. */
static const te__split *te__ckpt_split_of_buffers(const te_module *m) {
    int i;
    for (i = 0; i < m->num_entries; i++) {
        const te__split *s = te__ckpt_split(m->entries[i].tensor);
        if (te__ckpt_is_own(s) && s->own == TE__OWN_NAMED) return s;
    }
    return NULL;
}
static bool te__ckpt_add_entry(void *user, te_module *m, const char *path, te_tensor *tensor, te_entry_kind kind) {
    te__ckpt *c = (te__ckpt *)user;
    te__shard *s = tensor->shard;
    const te__split *split = te__ckpt_split(tensor);
    te__ckpt_slice *slice;
    if (kind == TE_ENTRY_BUFFER && te__module_is_transient(m, tensor)) return true;
    if (kind == TE_ENTRY_BUFFER) split = te__ckpt_split_of_buffers(m);
    if (s && !te__ckpt_meet(c, s)) return false;
    if (split && split->dim >= 0 && tensor->quantized) return te__ckpt_add_decoded(c, path, tensor, split);
    if (tensor->quantized) return te__ckpt_add_quantized(c, path, tensor);
    if (tensor->moves && te__numel(tensor) == 0) return true;
    if (!te__ckpt_slices(c, tensor)) return te__ckpt_put(c, path, tensor, split);
    slice = te__ckpt_add_slice(c, path, te__shard_value(s), s->dtype, tensor->ndim, tensor->shape, split, s);
    if (slice) slice->value = s;
    return slice != NULL;
}
static bool te__ckpt_add_state(void *user, const char *name, te_tensor *tensor, te_tensor *param, te__shard *shard,
                               te__state_kind kind) {
    te__ckpt *c = (te__ckpt *)user;
    const te__split *split = te__ckpt_split(param);
    const bool pairs = kind == TE__STATE_VALUES && tensor->dtype == TE_U8; /* remainders */
    te__ckpt_slice *slice;
    if (kind == TE__STATE_FLAG && c->file && te__ckpt_find(c->file, te__ckpt_flags)) return true;
    if (kind == TE__STATE_FLAGS) return !c->file || !te__ckpt_find(c->file, name) || te__ckpt_add(c, name, tensor);
    if (kind != TE__STATE_VALUES && split && (split->dim >= 0 || split->own == TE__OWN_STACKED)) {
        if (kind == TE__STATE_FLAG) return te__ckpt_add(c, name, tensor); /* alike on all ranks */
        return te__not_ok(c->te, TE_ERR_UNSUPPORTED,
                          "%s: \"%s\" is one number for the part that this rank has of a parameter, which is divided "
                          "over %d ranks; states in f32 and bf16 have none",
                          c->file ? "te_model_load" : "te_model_save", name, split->size);
    }
    if (kind != TE__STATE_VALUES) return te__ckpt_put(c, name, tensor, split);
    if (shard && !shard->set)
        return te__not_ok(c->te, TE_ERR_STATE,
                          "%s: the unit of optimizer state %s was taken back; make the optimizer after the units",
                          c->file ? "te_model_load" : "te_model_save", name);
    if (shard && !te__ckpt_meet(c, shard)) return false;
    if (shard && te__numel(param) == 0) return true;
    if (!shard && !split) return te__ckpt_add(c, name, tensor);
    slice = te__ckpt_add_slice(c, name, tensor, tensor->dtype, param->ndim, param->shape, split, shard);
    if (!slice || !pairs) return slice != NULL;
    slice->shape[0] = te__ckpt_count(slice);
    slice->shape[1] = slice->unit = 2;
    slice->ndim = 2;
    return true;
}

static void te__ckpt_close(te__ckpt *c) {
    int i;
    te__st_list_free(&c->items);
    te__st_list_free(&c->values);
    for (i = 0; i < c->num_slices; i++) te__free(c->te, c->slices[i].name);
    te__free(c->te, c->slices);
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

/* The metadata of a file. */
typedef struct te__ckpt_meta {
    te_ctx *te;
    te_metadata *list;
    int n, cap, kept; /* the first `kept` entries are the caller's */
} te__ckpt_meta;
static bool te__ckpt_put_entry(te__ckpt_meta *m, const char *key, const char *value) {
    char *k, *v;
    if (!te__grow(m->te, (void **)&m->list, &m->cap, m->n, sizeof(te_metadata))) return false;
    k = te__copy_string(m->te, key);
    v = k ? te__copy_string(m->te, value) : NULL;
    if (!v) {
        te__free(m->te, k);
        return false;
    }
    m->list[m->n].key = k;
    m->list[m->n++].value = v;
    return true;
}
static bool te__ckpt_put_number(te__ckpt_meta *m, const char *key, uint64_t value) {
    char text[24];
    snprintf(text, sizeof(text), "%llu", (unsigned long long)value);
    return te__ckpt_put_entry(m, key, text);
}
static void te__ckpt_meta_free(te__ckpt_meta *m) {
    int i;
    for (i = m->kept; i < m->n; i++) {
        te__free(m->te, (char *)(uintptr_t)m->list[i].key);
        te__free(m->te, (char *)(uintptr_t)m->list[i].value);
    }
    te__free(m->te, m->list);
}
/* Puts the caller's metadata, the random state and the numbers of the optimizer. */
static te_result te__ckpt_put_all(te__ckpt_meta *all, te_optimizer *opt, const te_metadata *metadata, int n) {
    te_ctx *te = all->te;
    bool fine = true;
    int i;
    for (i = 0; i < n; i++) {
        if (metadata[i].key && te__starts_with(metadata[i].key, te__ckpt_prefix))
            return te__fail(te, TE_ERR_INVALID,
                            "te_model_save: metadata key \"%.100s\": te.h keeps those that begin with \"%s\" for "
                            "itself",
                            metadata[i].key, te__ckpt_prefix);
        if (!te__grow(te, (void **)&all->list, &all->cap, all->n, sizeof(te_metadata))) return te_error_code(te);
        all->list[all->n++] = metadata[i];
        all->kept = all->n;
    }
    fine = te__ckpt_put_number(all, "te.seed", te->seed) && te__ckpt_put_number(all, "te.offset", te->rng_offset);
    if (opt && fine) fine = te__ckpt_put_number(all, "te.steps", (uint64_t)te_optimizer_steps(opt));
    for (i = 0; opt && i < opt->num_groups && fine; i++) {
        te__text lr = TE_ZERO;
        char key[24];
        if (i > 0 && !opt->groups[i].own_lr) continue;
        snprintf(key, sizeof(key), i ? "te.lr.%d" : "te.lr", i - 1);
        te__text_number(&lr, (double)te__group_lr(opt, i));
        fine = te__ckpt_put_entry(all, key, te__text_str(&lr));
        te__text_free(&lr);
    }
    return fine ? te->error_code : te_error_code(te);
}
/* Puts the sizes of tensors in slices. A rank with experts of its own puts theirs, which the index may lack. */
static te_result te__ckpt_put_shapes(te__ckpt_meta *all, const te__ckpt *c, bool index) {
    te__text key = TE_ZERO, value = TE_ZERO;
    bool fine = true;
    int i, k;
    for (i = 0; i < c->num_slices && fine; i++) {
        const te__ckpt_slice *x = &c->slices[i];
        if (!index && !te__ckpt_is_own(x->split)) continue;
        te__text_clear(&key);
        te__text_clear(&value);
        te__text_printf(&key, "%s%s", te__ckpt_whole_key, x->name);
        for (k = 0; k < x->ndim; k++) te__text_printf(&value, k ? ",%lld" : "%lld", (long long)x->shape[k]);
        fine = !key.oom && !value.oom && te__ckpt_put_entry(all, te__text_str(&key), te__text_str(&value));
    }
    if (key.oom || value.oom) te__fail(all->te, TE_ERR_OUT_OF_MEMORY, "te_model_save: %s", te__no_memory_text);
    te__text_free(&key);
    te__text_free(&value);
    return fine ? TE_OK : te_error_code(all->te);
}
/* Puts the names of the other ranks' files. */
static te_result te__ckpt_put_set(te__ckpt_meta *all, const te__ckpt *c, const char *path, uint64_t id, int size) {
    te__text text = TE_ZERO;
    uint64_t begin;
    bool fine = te__ckpt_put_number(all, te__ckpt_parts_key, (uint64_t)size);
    int i;
    for (i = 1; i < size && fine; i++) {
        char key[32];
        snprintf(key, sizeof(key), "te.part.%d", i);
        te__ckpt_part_path(&text, path, id, i, size);
        fine = !text.oom && te__ckpt_put_entry(all, key, te__text_str(&text) + te__path_name_at(te__text_str(&text)));
    }
    for (i = 0; i < c->items.n && fine; i++)
        if (te__ckpt_slice_name(c->items.items[i].name, &begin))
            fine = te__not_ok(all->te, TE_ERR_UNSUPPORTED,
                              "te_model_save: " TE__ST_NAME " is named like a slice (NAME@N) of a tensor; rename it",
                              c->items.items[i].name);
    if (text.oom) te__fail(all->te, TE_ERR_OUT_OF_MEMORY, "te_model_save: %s", te__no_memory_text);
    te__text_free(&text);
    return fine ? TE_OK : te_error_code(all->te);
}

/* ---- the file of one rank ---- */

/* One tensor of the file: an item, a run of a slice, or this rank's share of the rows of a slice of columns, which is
 * exchanged even if it has no rows. */
typedef struct te__ckpt_out {
    te__st_part part; /* the name is owned if there is a slice */
    const te_tensor *item;
    const te__ckpt_slice *slice;
    int64_t at, n; /* of the run, in elements of the slice */
    bool rows, decodes; /* decodes: no tensor, but decodes the value of which the next ones are runs */
} te__ckpt_out;
typedef struct te__ckpt_writer {
    te__ckpt *c;
    te__ckpt_out *out;
    int n, cap;
    te__st_part *parts; /* those that have bytes, for the header */
    te_tensor *decoded; /* this rank's elements of the value that was decoded last */
    te__text header, path, why;
    void *staging;
} te__ckpt_writer;

static te__ckpt_out *te__ckpt_add_out(te__ckpt_writer *w) {
    if (!te__grow(w->c->te, (void **)&w->out, &w->cap, w->n, sizeof(te__ckpt_out))) return NULL;
    memset(&w->out[w->n], 0, sizeof(te__ckpt_out));
    return &w->out[w->n++];
}
/* Lists n elements of a slice, from `at` on, which begin at element `whole` of the whole tensor. */
static bool te__ckpt_out_run(te__ckpt_writer *w, const te__ckpt_slice *x, int64_t at, int64_t n, int64_t whole,
                             bool rows) {
    te__ckpt_out *out = n > 0 || rows ? te__ckpt_add_out(w) : NULL;
    const int64_t pairs[2] = {n, 2};
    char begin[24];
    size_t length = strlen(x->name), more;
    char *name;
    if (!out) return n == 0 && !rows;
    out->slice = x;
    out->at = at;
    out->n = n;
    out->rows = rows;
    snprintf(begin, sizeof(begin), "@%llu", (unsigned long long)(whole * x->unit));
    more = strlen(begin) + 1;
    name = (char *)te__alloc(w->c->te, length + more);
    if (!name) return false;
    memcpy(name, x->name, length);
    memcpy(name + length, begin, more);
    if (x->codes) te__st_describe(&out->part, name, x->dtype, x->tensor->ndim, x->tensor->shape);
    else te__st_describe(&out->part, name, x->dtype, x->unit == te__dtype_size(x->dtype) ? 1 : 2, pairs);
    return true;
}
/* Lists the runs of a slice. */
static bool te__ckpt_out_slice(te__ckpt_writer *w, const te__ckpt_slice *x) {
    int64_t at, whole, n, first;
    te__ckpt_rows r;
    int i;
    if (x->length == 0) return true;
    if (!te__ckpt_has_columns(x)) {
        for (i = 0; te__ckpt_run(x, i, &at, &whole, &n); i++)
            if (!te__ckpt_out_run(w, x, at, n, whole, false)) return false;
        return true;
    }
    r = te__ckpt_rows_of(x);
    te__ckpt_share_of_rows(x, &r, te__group_rank(x->split->group), &first, &n);
    return te__ckpt_out_run(w, x, 0, r.head, te__ckpt_column_at(x, &r, 0), false) &&
           (r.rows == 0 || te__ckpt_out_run(w, x, 0, n * r.all, (r.first + first) * r.all, true)) &&
           te__ckpt_out_run(w, x, x->length - r.tail, r.tail, te__ckpt_column_at(x, &r, x->length - r.tail), false);
}
/* Lists what this rank writes, tensors of wide formats first, so that each is aligned. Ranks that exchange rows have
 * the same slices in the same order. */
static te_result te__ckpt_list_out(te__ckpt_writer *w, const te__ckpt_groups *g) {
    te__ckpt *c = w->c;
    te__ckpt_out *out;
    int i, bits;
    for (bits = 64; bits > 0; bits /= 2) {
        for (i = 0; i < c->items.n && g->own == 0; i++) {
            const te_tensor *x = c->items.items[i].tensor;
            if (te_dtype_bits(x->dtype) != bits) continue;
            if (te__st_item_ok(c->te, "te_model_save", &c->items.items[i]) != TE_OK || !(out = te__ckpt_add_out(w)))
                return te_error_code(c->te);
            out->item = x;
            te__st_describe(&out->part, c->items.items[i].name, x->dtype, x->ndim, x->shape);
        }
        for (i = 0; i < c->num_slices; i++) {
            const te__ckpt_slice *x = &c->slices[i];
            te_safetensors_item item;
            item.name = x->name;
            item.tensor = x->stored ? NULL : x->tensor;
            if (te_dtype_bits(x->dtype) != bits) continue;
            if (!te__ckpt_writes(g, x->shard_group, te__ckpt_split_group(x))) continue;
            if (x->stored) { /* ranks with slices gather it, whether they write some of it or not */
                out = te__ckpt_add_out(w);
                if (!out) return te_error_code(c->te);
                out->slice = x;
                out->decodes = true;
            } else if (x->length && te__st_item_ok(c->te, "te_model_save", &item) != TE_OK)
                return te_error_code(c->te);
            if (!te__ckpt_out_slice(w, x)) return te_error_code(c->te);
        }
    }
    return TE_OK;
}
/* Lists this rank's tensors, and makes the header. Allocates what writing needs beside tensors. */
static te_result te__ckpt_prepare(te__ckpt_writer *w, const te__ckpt_groups *g, const te__ckpt_meta *meta) {
    te_ctx *te = w->c->te;
    te__st_part *sorted;
    te_result result = te__ckpt_list_out(w, g);
    int i, n = 0;
    if (result != TE_OK) return result;
    w->staging = te__alloc(te, TE__ST_CHUNK);
    w->parts = (te__st_part *)te__alloc_zero(te, 2 * ((size_t)w->n + 1) * sizeof(te__st_part));
    if (!w->staging || !w->parts) return TE_ERR_OUT_OF_MEMORY;
    for (i = 0; i < w->n; i++)
        if (w->out[i].item || w->out[i].part.bytes) w->parts[n++] = w->out[i].part;
    sorted = w->parts + w->n + 1;
    memcpy(sorted, w->parts, (size_t)n * sizeof(te__st_part));
    result = te__st_names_differ(te, "te_model_save", sorted, n);
    return result == TE_OK ? te__st_make_header(te, "te_model_save", &w->header, w->parts, n, meta->list, meta->n)
                           : result;
}
/* Decodes a parameter that is stored quantized. Returns this rank's elements, which the caller releases. */
static te_tensor *te__ckpt_decode(const te__ckpt_slice *x) {
    te__shard *s = x->stored->shard;
    te__shard_set *set = s ? s->set : NULL;
    const bool gathers = set && !te__shards_are_whole(set);
    te_tensor *value = !gathers || te__shards_gather(set) == TE_OK ? te_dequantize(x->stored, TE_DTYPE_NONE) : NULL;
    if (gathers && set->whole && te__shards_scatter(set) != TE_OK) value = NULL;
    if (value && s && x->length) value = te__shard_of_whole(s, value);
    return te_tensor_retain(value);
}
/* Writes the tensors of the file, up to its commit. Memory holds one tensor more than the model and the optimizer. */
static te_result te__ckpt_stream(te__ckpt_writer *w, te__file_out *file) {
    te_ctx *te = w->c->te;
    te_result result = file->failed ? te__fail(te, TE_ERR_IO, "%s", te__text_str(&w->why)) : TE_OK;
    int i;
    for (i = 0; i < w->n && result == TE_OK; i++) {
        const te__ckpt_out *out = &w->out[i];
        const te_tensor *x = out->item;
        te__frame_begin(te);
        if (out->decodes) {
            te_tensor_release(w->decoded);
            w->decoded = te__ckpt_decode(out->slice);
            x = w->decoded;
        } else if (out->slice) {
            te_tensor *own = out->slice->stored ? w->decoded : out->slice->tensor;
            if (out->rows) x = te__ckpt_exchange_rows(out->slice, te, own);
            else x = (own = te_tensor_contiguous(own)) ? te__ckpt_bytes_of(own, out->slice, out->at, out->n) : NULL;
        }
        if (!x) result = te_error_code(te);
        else if (out->item || out->part.bytes) result = te__st_store(te, file, x, w->staging);
        te__frame_end(te, NULL, 0);
        if (result == TE_OK && file->failed) result = te__fail(te, TE_ERR_IO, "%s", te__text_str(&w->why));
    }
    return result;
}
static void te__ckpt_writer_close(te__ckpt_writer *w) {
    te_ctx *te = w->c->te;
    int i;
    te_tensor_release(w->decoded);
    for (i = 0; i < w->n; i++)
        if (w->out[i].slice) te__free(te, (char *)(uintptr_t)w->out[i].part.name);
    te__free(te, w->out);
    te__free(te, w->parts);
    te__free(te, w->staging);
    te__text_free(&w->header);
    te__text_free(&w->path);
    te__text_free(&w->why);
}

/* ---- a set of files ---- */

/* Checks that ranks which exchange rows have the same slices. */
static te_result te__ckpt_compare_slices(const te__ckpt *c, const te__ckpt_groups *g, te_result result) {
    int i, k;
    for (k = 0; k < g->n; k++) {
        char text[96];
        uint64_t hash = 0;
        bool columns = false;
        for (i = 0; i < c->num_slices; i++) {
            const te__ckpt_slice *x = &c->slices[i];
            const int64_t place[2] = {x->start, x->length};
            if (te__ckpt_split_group(x) != g->list[k] || !te__ckpt_has_columns(x)) continue;
            columns = true;
            hash = te__hash64(place, sizeof(place), hash);
            hash = te__hash64(x->name, strlen(x->name), hash);
        }
        snprintf(text, sizeof(text), "te_model_save: slices of parts %016llx", (unsigned long long)hash);
        if (columns) result = te__group_compare(g->list[k], text, result);
    }
    return result;
}
/* Removes the files of all other ranks, which no index will name. */
static void te__ckpt_remove_parts(const char *path, uint64_t id, int size) {
    te__text part = TE_ZERO;
    int i;
    for (i = 1; i < size; i++) {
        te__ckpt_part_path(&part, path, id, i, size);
        if (!part.oom) te__file_remove(te__text_str(&part), NULL);
    }
    te__text_free(&part);
}
/* Ends a file. */
static te_result te__ckpt_commit(te__ckpt_writer *w, te__file_out *file) {
    return te__file_out_commit(file) ? TE_OK
                                     : te__fail(w->c->te, TE_ERR_IO, "%s; what was there before is untouched",
                                                te__text_str(&w->why));
}
/* Writes this rank's file of a set, at the same time as the others. The index gets its name when all others are there.
 * Ranks agree twice before: one that hears of a failure the first time removes its file, and no index will name it,
 * since rank 0 cannot agree with it again. From the second time on only rank 0 knows whether an index names the files,
 * however the ranks lose each other, so it alone removes them. */
static te_result te__ckpt_write_set(te__ckpt *c, te__ckpt_groups *g, const char *path, te__ckpt_meta *all,
                                    te_result result) {
    te__ckpt_meta own = TE_ZERO, *meta;
    te__ckpt_writer w = TE_ZERO;
    te__file_out file;
    uint64_t id = 0;
    bool begun = false, written = false;
    own.te = c->te;
    w.c = c;
    result = te__ckpt_find_members(g, path, result);
    meta = g->own == 0 ? all : &own;
    if (result == TE_OK) {
        id = g->member[0].nonce;
        te__ckpt_part_path(&w.path, path, id, g->own, g->num_members);
        if (w.path.oom) result = te__fail(c->te, TE_ERR_OUT_OF_MEMORY, "te_model_save: %s", te__no_memory_text);
    }
    result = te__ckpt_compare_slices(c, g, result);
    if (result == TE_OK && meta == all) result = te__ckpt_put_set(all, c, path, id, g->num_members);
    if (result == TE_OK) result = te__ckpt_put_shapes(meta, c, meta == all);
    if (result == TE_OK) result = te__ckpt_prepare(&w, g, meta);
    result = te__ckpt_agree_all(g, result); /* before the first exchange */
    if (result == TE_OK) {
        begun = true;
        te__st_begin(&file, meta == all ? path : te__text_str(&w.path), &w.why, &w.header);
        result = te__ckpt_stream(&w, &file);
        if (meta != all && result == TE_OK) {
            result = te__ckpt_commit(&w, &file);
            begun = false;
            written = result == TE_OK;
        }
        result = te__ckpt_agree_all(g, result);
        if (result == TE_OK) {
            result = te__ckpt_agree_all(g, result);
            if (begun && result == TE_OK) result = te__ckpt_commit(&w, &file);
            else if (begun) te__file_out_abort(&file);
            if (begun && result != TE_OK) te__ckpt_remove_parts(path, id, g->num_members);
            result = te__ckpt_agree_all(g, result);
            if (result == TE_OK && begun) te__ckpt_sweep_folder(path, id);
        } else if (begun)
            te__file_out_abort(&file);
        else if (written)
            te__file_remove(te__text_str(&w.path), NULL);
    }
    te__ckpt_meta_free(&own);
    te__ckpt_writer_close(&w);
    return result;
}

TE_API te_result te_model_save(te_ctx *te, const char *path, te_module *m, te_optimizer *opt,
                               const te_metadata *metadata, int num_metadata) {
    te__ckpt c;
    te__ckpt_groups groups;
    te__ckpt_meta all = TE_ZERO;
    te_result result, found;
    if (!te) return TE_ERR_STATE;
    if (num_metadata < 0 || (num_metadata > 0 && !metadata))
        return te__fail(te, TE_ERR_INVALID, "te_model_save: metadata is missing");
    all.te = te;
    te__frame_begin(te);
    result = te__ckpt_ready(&c, te, "te_model_save", path, m, opt);
    found = te__ckpt_find_groups(&groups, te, m, opt);
    if (result == TE_OK) result = found;
    result = te__ckpt_agree_all(&groups, result); /* after it, ranks gather stale masters together */
    if (result == TE_OK) {
        result = te__optimizer_before_save(opt);
        if (result == TE_OK) result = te__ckpt_collect(&c, te, m, opt);
        if (result == TE_OK) result = te__ckpt_put_all(&all, opt, metadata, num_metadata);
        if (groups.n > 0 || c.num_slices > 0) {
            if (result == TE_OK) result = te__st_metadata_ok(te, path, all.list, all.n);
            result = te__ckpt_write_set(&c, &groups, path, &all, result);
        } else if (result == TE_OK) {
            result = te_safetensors_write(te, path, c.items.items, c.items.n, all.list, all.n);
            if (result == TE_OK) te__ckpt_sweep_folder(path, 0);
        }
    }
    te__ckpt_meta_free(&all);
    te__ckpt_close(&c);
    te__ckpt_groups_close(&groups);
    te__frame_end(te, NULL, 0);
    return result;
}
