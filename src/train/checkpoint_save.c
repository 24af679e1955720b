/* train/checkpoint_save.c: saves a model, its optimizer and the random state as one safetensors file, or as a set of
 * files if ranks share it (train/checkpoint_files.c). This file must not depend on what a module computes. The names in
 * the file:
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
 * The scaling state of delayed recipes is saved as buffers of the modules. */

/* This rank's slice of a tensor that is sharded. */
typedef struct te__ckpt_slice {
    char *name;        /* of the whole tensor; owned */
    te_tensor *tensor; /* contiguous, and empty if this rank has no slice */
    te_dtype dtype;
    int ndim;          /* of the whole tensor */
    int64_t shape[TE_MAX_DIMS];
    uint64_t from;     /* where the slice begins, in bytes of the whole tensor */
    te__shard *value;  /* the parameter whose value this is, or NULL: a state */
    int part;          /* of `value`, if that is stored quantized: `tensor` is a copy of its rows of codes */
} te__ckpt_slice;

/* Loading: a tensor of which this rank has a part, and the whole one that the file has. */
typedef struct te__ckpt_part {
    te_tensor *x, *whole; /* te__frame_end in te_model_load releases `whole` */
    const te__split *split;
} te__ckpt_part;

/* The tensors of a module tree and of an optimizer, each with its name in the file. */
typedef struct te__ckpt {
    te_ctx *te;
    te__ckpt_files *file; /* the checkpoint that is loaded; NULL: saving */
    te__st_list items;
    te__st_list values; /* loading: quantized weights that the file holds in high precision */
    te__ckpt_slice *slices;
    int num_slices, cap_slices;
    te__ckpt_part *parts;
    int num_parts, cap_parts;
    bool told;       /* saving: the other ranks know that this one has failed */
    bool sharded;    /* parameters are sharded, over the ranks of `group` */
    te_group *group;
    te_tensor **turn; /* loading: quantized weights whose column-wise copy the file lacks; this copy is made from the
                       * row-wise copy */
    int num_turn, cap_turn;
} te__ckpt;

static bool te__ckpt_add(te__ckpt *c, const char *name, te_tensor *tensor) {
    return te__st_list_put(&c->items, name, tensor);
}

/* Adds a tensor of which each rank has the part that `split` says; NULL: it is whole. Ranks gather it to save it. */
static bool te__ckpt_add_part(te__ckpt *c, const char *name, te_tensor *x, const te__split *split) {
    int64_t shape[TE_MAX_DIMS];
    te__ckpt_part *p;
    if (!split || split->size < 2 || split->dim < 0) return te__ckpt_add(c, name, x);
    if (!c->file) {
        te_tensor *whole = te__split_whole(x, split);
        c->told = !whole;
        return whole && te__ckpt_add(c, name, whole);
    }
    if (!te__grow(c->te, (void **)&c->parts, &c->cap_parts, c->num_parts, sizeof(te__ckpt_part))) return false;
    p = &c->parts[c->num_parts];
    memcpy(shape, x->shape, sizeof(shape));
    shape[split->dim] *= split->size;
    p->x = x;
    p->split = split;
    p->whole = te_tensor_empty(c->te, x->dtype, x->ndim, shape);
    if (!p->whole) return false;
    c->num_parts++;
    return te__ckpt_add(c, name, p->whole);
}

/* ---- slices ---- */

/* Adds a slice `tensor` of the tensor `name`. `like` has the shape of the whole tensor. */
static te__ckpt_slice *te__ckpt_add_slice(te__ckpt *c, const char *name, te_tensor *tensor, te_dtype dtype, int ndim,
                                          const int64_t *shape, int64_t from) {
    te__ckpt_slice *x;
    if (!tensor || !te__grow(c->te, (void **)&c->slices, &c->cap_slices, c->num_slices, sizeof(te__ckpt_slice)))
        return NULL;
    x = &c->slices[c->num_slices];
    memset(x, 0, sizeof(*x));
    x->name = te__copy_string(c->te, name);
    x->tensor = tensor;
    x->dtype = dtype;
    x->ndim = ndim;
    memcpy(x->shape, shape, (size_t)ndim * sizeof(int64_t));
    x->from = (uint64_t)from;
    if (!x->name) return NULL;
    c->num_slices++;
    return x;
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
    slice = te__ckpt_add_slice(c, name, own, x->dtype, 2, x->shape, first * ld);
    if (!slice) return false;
    slice->value = s;
    slice->part = part;
    return c->file || !s->set->of_parameters || te__ckpt_move_codes(slice, false) == TE_OK;
}
/* Notes that a parameter is sharded. A file has one set of ranks. */
static bool te__ckpt_meet(te__ckpt *c, const te__shard *s) {
    if (!c->file && c->sharded && c->group != s->set->group)
        return te__not_ok(c->te, TE_ERR_UNSUPPORTED,
                          "te_model_save: unit \"%s\" is shared by another group (%d ranks) than the units before it "
                          "(%d); save the modules of each group to a path of their own",
                          s->set->name, te__group_size(s->set->group), te__group_size(c->group));
    c->sharded = true;
    c->group = s->set->group;
    return te__shards_scatter(s->set) == TE_OK;
}
/* Returns whether a parameter is saved, or loaded, by slices. */
static bool te__ckpt_slices(const te__ckpt *c, const te_tensor *x) {
    return x->shard && te__numel(x) > 0 && (!c->file || x->shard->set->of_parameters);
}

/* The names of the tensors of a copy of a quantized weight. */
static const char *const te__ckpt_parts[3] = {"data", "scale", "amax"};

/* Lists the parts of a weight that is stored quantized. */
static bool te__ckpt_add_quantized(te__ckpt *c, const char *path, te_tensor *x) {
    static const char *const copies[2] = {"row", "col"};
    const char *const *parts = te__ckpt_parts;
    const bool slices = te__ckpt_slices(c, x);
    char name[640];
    int i, k;
    if (c->file && te__ckpt_find(c->file, path)) return te__st_list_put(&c->values, path, x);
    for (i = 0; i < 2; i++) {
        const te__quant_copy *copy = i ? &x->quantized->col : &x->quantized->row;
        te_tensor *part[3];
        if (slices && i == x->shard->num_parts) break; /* the column-wise copy follows from the row-wise one */
        snprintf(name, sizeof(name), "%s.%s.data", path, copies[i]);
        if (i && c->file && copy->data && !te__ckpt_find(c->file, name) && te__column_follows(x)) {
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
            if (part[k] && !te__ckpt_add(c, name, part[k])) return false;
        }
    }
    return true;
}
static bool te__ckpt_add_entry(void *user, te_module *m, const char *path, te_tensor *tensor, te_entry_kind kind) {
    te__ckpt *c = (te__ckpt *)user;
    te__shard *s = tensor->shard;
    te__ckpt_slice *slice;
    if (kind == TE_ENTRY_BUFFER && te__module_is_transient(m, tensor)) return true;
    if (s && !te__ckpt_meet(c, s)) return false;
    if (tensor->split && tensor->split->dim >= 0 && (tensor->quantized || s))
        return te__not_ok(c->te, TE_ERR_UNSUPPORTED,
                          "%s: parameter %s is divided over %d ranks of a tensor-parallel group, and it is %s; plain "
                          "parameters that are not sharded are possible",
                          c->file ? "te_model_load" : "te_model_save", path, tensor->split->size,
                          s ? "sharded as well" : "stored quantized");
    if (tensor->quantized) return te__ckpt_add_quantized(c, path, tensor);
    if (tensor->moves && te__numel(tensor) == 0) return true;
    if (!te__ckpt_slices(c, tensor)) return te__ckpt_add_part(c, path, tensor, tensor->split);
    slice = te__ckpt_add_slice(c, path, te__shard_value(s), s->dtype, tensor->ndim, tensor->shape,
                               s->start * te__dtype_size(s->dtype));
    if (slice) slice->value = s;
    return slice != NULL;
}
static bool te__ckpt_add_state(void *user, const char *name, te_tensor *tensor, te_tensor *param, te__shard *shard) {
    te__ckpt *c = (te__ckpt *)user;
    const bool pairs = tensor->dtype == TE_U8; /* remainders */
    int64_t shape[TE_MAX_DIMS];
    if (!shard && param && param->split && param->split->dim >= 0 &&
        te__numel(tensor) != te__numel(param) * (pairs ? 2 : 1))
        return te__not_ok(c->te, TE_ERR_UNSUPPORTED,
                          "%s: \"%s\" is one number for the part that this rank has of a parameter, which is divided "
                          "over %d ranks of a tensor-parallel group; states in f32 and bf16 have none",
                          c->file ? "te_model_load" : "te_model_save", name, param->split->size);
    if (!shard) return te__ckpt_add_part(c, name, tensor, param ? param->split : NULL);
    if (!shard->set)
        return te__not_ok(c->te, TE_ERR_STATE,
                          "%s: the unit of optimizer state %s was taken back; make the optimizer after the units",
                          c->file ? "te_model_load" : "te_model_save", name);
    if (!te__ckpt_meet(c, shard)) return false;
    if (te__numel(shard->param) == 0) return true;
    memcpy(shape, shard->param->shape, sizeof(shape));
    if (pairs) {
        shape[0] = te__numel(shard->param);
        shape[1] = 2;
    }
    return te__ckpt_add_slice(c, name, tensor, tensor->dtype, pairs ? 2 : shard->param->ndim, shape,
                              shard->start * (pairs ? 2 : 1) * te__dtype_size(tensor->dtype)) != NULL;
}

static void te__ckpt_close(te__ckpt *c) {
    int i;
    te__st_list_free(&c->items);
    te__st_list_free(&c->values);
    for (i = 0; i < c->num_slices; i++) te__free(c->te, c->slices[i].name);
    te__free(c->te, c->slices);
    te__free(c->te, c->turn);
    te__free(c->te, c->parts);
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
/* The groups whose ranks share a model or the states of an optimizer, each listed once. The list is not allocated, so
 * that a rank without memory can still tell the others. */
enum { TE__MAX_CKPT_GROUPS = 16 };
typedef struct te__ckpt_groups {
    te_ctx *te;
    te_group *list[TE__MAX_CKPT_GROUPS];
    int n;
    te_group *set; /* the first one over which units are sharded; NULL: there is none */
    bool reads;    /* another rank of a tensor-parallel group writes what the ranks have together */
    const te_group *expert; /* the last group met whose ranks have parameters of their own (experts) */
    float own;              /* follows from this rank's places in such groups: ranks with equal experts have one number;
                             * 0: this rank has no such parameters */
    int ranks;              /* of the first such group */
    char name[160];         /* the first such parameter */
} te__ckpt_groups;
static bool te__ckpt_add_group(te__ckpt_groups *g, te_group *group) {
    int i;
    if (!group) return true;
    for (i = 0; i < g->n; i++)
        if (g->list[i] == group) return true;
    if (g->n == TE__MAX_CKPT_GROUPS)
        return te__not_ok(g->te, TE_ERR_UNSUPPORTED,
                          "te_model_save and te_model_load: the units and parameters have more than %d groups",
                          (int)TE__MAX_CKPT_GROUPS);
    g->list[g->n++] = group;
    return true;
}
static bool te__ckpt_meet_group(void *user, te_module *m, const char *path, te_tensor *x, te_entry_kind kind) {
    te__ckpt_groups *g = (te__ckpt_groups *)user;
    (void)m, (void)kind;
    if (x->split && x->split->dim < 0 && x->split->size > 1 && x->split->group != g->expert) {
        if (!g->expert) {
            g->ranks = x->split->size;
            snprintf(g->name, sizeof(g->name), "%.150s", path);
        }
        g->expert = x->split->group;
        /* below 2^24, so exact in f32 */
        g->own = (float)(((int64_t)g->own * 4099 + te__group_rank(x->split->group) + 1) % 16777213);
    }
    if (x->shard && x->shard->set) {
        if (!g->set) g->set = x->shard->set->group;
        if (!te__ckpt_add_group(g, x->shard->set->group)) return false;
    }
    if (!x->split || x->split->dim < 0) return true;
    g->reads = g->reads || te__group_rank(x->split->group) > 0;
    return te__ckpt_add_group(g, x->split->group);
}
/* Finds the ranks that make a call together. They hear of a failure even if it comes before a slice is listed. */
static te_result te__ckpt_find_groups(te__ckpt_groups *g, te_ctx *te, te_module *m, const te_optimizer *opt) {
    bool fine = true;
    int i;
    memset(g, 0, sizeof(*g));
    g->te = te;
    if (m && te_module_ctx(m) == te) fine = te_module_visit_tensors(m, te__ckpt_meet_group, g);
    for (i = 0; opt && opt->te == te && i < opt->num_params && fine; i++) {
        if (!g->set) g->set = te__shard_group(opt->params[i].shard);
        fine = te__ckpt_meet_group(g, NULL, opt->params[i].path, opt->params[i].param, TE_ENTRY_PARAMETER) &&
               te__ckpt_add_group(g, te__shard_group(opt->params[i].shard));
    }
    for (i = 0; i < g->n; i++) te__group_tells_again(g->list[i]);
    return fine ? TE_OK : te_error_code(te);
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
static bool te__ckpt_put(te__ckpt_meta *m, const char *key, const char *value) {
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
    return te__ckpt_put(m, key, text);
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
        fine = te__ckpt_put(all, key, te__text_str(&lr));
        te__text_free(&lr);
    }
    return fine ? te->error_code : te_error_code(te);
}
/* Puts the names of the other ranks' files, and the shapes of the tensors in slices. */
static te_result te__ckpt_put_set(te__ckpt_meta *all, const te__ckpt *c, const char *path, uint64_t id) {
    const int size = te__group_size(c->group);
    te__text text = TE_ZERO, value = TE_ZERO;
    uint64_t begin;
    bool fine = te__ckpt_put_number(all, te__ckpt_parts_key, (uint64_t)size);
    int i, k;
    for (i = 1; i < size && fine; i++) {
        char key[32];
        snprintf(key, sizeof(key), "te.part.%d", i);
        te__ckpt_part_path(&text, path, id, i, size);
        fine = !text.oom && te__ckpt_put(all, key, te__text_str(&text) + te__path_name_at(te__text_str(&text)));
    }
    for (i = 0; i < c->num_slices && fine; i++) {
        const te__ckpt_slice *x = &c->slices[i];
        te__text_clear(&text);
        te__text_clear(&value);
        te__text_printf(&text, "%s%s", te__ckpt_whole_key, x->name);
        for (k = 0; k < x->ndim; k++) te__text_printf(&value, k ? ",%lld" : "%lld", (long long)x->shape[k]);
        fine = !text.oom && !value.oom && te__ckpt_put(all, te__text_str(&text), te__text_str(&value));
    }
    for (i = 0; i < c->items.n && fine; i++)
        if (te__ckpt_slice_name(c->items.items[i].name, &begin))
            fine = te__not_ok(all->te, TE_ERR_UNSUPPORTED,
                              "te_model_save: " TE__ST_NAME " is named like a slice (NAME@N) of a sharded tensor; "
                              "rename it",
                              c->items.items[i].name);
    if (text.oom || value.oom) te__fail(all->te, TE_ERR_OUT_OF_MEMORY, "te_model_save: %s", te__no_memory_text);
    te__text_free(&text);
    te__text_free(&value);
    return fine ? TE_OK : te_error_code(all->te);
}

/* Tells the ranks whether this one has failed. Returns an error if any has. */
static te_result te__ckpt_agree(te_group *group, te_ctx *te, te_result result) {
    te_tensor *flag = NULL;
    if (te__group_size(group) == 1) return result;
    te__frame_begin(te);
    if (result == TE_OK) flag = te__empty_1d(te, TE_F32, 1);
    if (result == TE_OK) result = flag ? te_tensor_fill(flag, 0.0) : te_error_code(te);
    result = result == TE_OK ? te__all_reduce(group, flag, TE_REDUCE_MAX) : te__refuse(group, TE__ALL_REDUCE, result);
    if (result == TE_OK) result = te->device->synchronize(te);
    te__frame_end(te, NULL, 0);
    return result;
}
/* Does the same with the ranks of several groups. */
static te_result te__ckpt_agree_all(const te__ckpt_groups *g, te_result result) {
    int i;
    for (i = 0; i < g->n; i++) result = te__ckpt_agree(g->list[i], g->te, result);
    return result;
}
/* Does the same before ranks save to one set of files, and checks that ranks of a group have the same experts: the
 * files would lack those of all ranks but one. */
static te_result te__ckpt_agree_experts(const te__ckpt_groups *g, te_result result) {
    const int64_t two = 2;
    int i;
    for (i = 0; i < g->n; i++) {
        float number[2]; /* the largest of each are equal, but for the sign, if all numbers are */
        te_tensor *each = NULL;
        if (te__group_size(g->list[i]) == 1) continue;
        number[0] = g->own;
        number[1] = -g->own;
        te__frame_begin(g->te);
        if (result == TE_OK) {
            each = te_tensor_from_host(g->te, TE_F32, 1, &two, number);
            if (!each) result = te_error_code(g->te);
        }
        result = result == TE_OK ? te__all_reduce(g->list[i], each, TE_REDUCE_MAX)
                                 : te__refuse(g->list[i], TE__ALL_REDUCE, result);
        if (result == TE_OK) result = te_tensor_to_host(each, number);
        te__frame_end(g->te, NULL, 0);
        if (result == TE_OK && number[0] != -number[1])
            result = te__fail(g->te, TE_ERR_UNSUPPORTED,
                              "te_model_save: each of %d ranks has parameters of its own (the first is \"%s\"), and %d "
                              "ranks, which differ in them, share one set of files (shards, or tensor-parallel parts); "
                              "save each rank to a path of its own without these, or use te_hf_save",
                              g->ranks, g->name, te__group_size(g->list[i]));
    }
    return result;
}
/* Sets *id on all ranks to a number of rank 0 that no earlier save had. */
static te_result te__ckpt_choose_id(te_group *group, te_ctx *te, uint64_t *id, te_result result) {
    const int64_t bytes = sizeof(uint64_t), all = bytes * te__group_size(group);
    double now = te__time_now();
    te_tensor *own = NULL, *each = NULL;
    unsigned char *host = (unsigned char *)te__alloc(te, (size_t)all);
    *id = te__hash64(&now, sizeof(now), (uint64_t)te__process_id());
    if (result == TE_OK && !host) result = TE_ERR_OUT_OF_MEMORY;
    te__frame_begin(te);
    if (result == TE_OK) own = te_tensor_from_host(te, TE_U8, 1, &bytes, id);
    if (result == TE_OK && own) each = te_tensor_empty(te, TE_U8, 1, &all);
    if (result == TE_OK && !each) result = te_error_code(te);
    result = result == TE_OK ? te__all_gather(group, own, each) : te__refuse(group, TE__ALL_GATHER, result);
    if (result == TE_OK) result = te_tensor_to_host(each, host);
    if (result == TE_OK) memcpy(id, host, sizeof(*id));
    te__frame_end(te, NULL, 0);
    te__free(te, host);
    return result;
}

/* Writes a file with the slices of this rank. Rank 0 writes what is whole on all ranks beside them. */
static te_result te__ckpt_write(te__ckpt *c, const char *path, const te__ckpt_meta *all, bool whole) {
    te__st_list list = TE_ZERO;
    te_result result = TE_OK;
    int i;
    list.te = c->te;
    for (i = 0; i < c->items.n && whole && result == TE_OK; i++)
        if (!te__st_list_put(&list, c->items.items[i].name, (te_tensor *)c->items.items[i].tensor))
            result = te_error_code(c->te);
    for (i = 0; i < c->num_slices && result == TE_OK; i++) {
        te__text name = TE_ZERO;
        if (te__numel(c->slices[i].tensor) == 0) continue;
        te__text_printf(&name, "%s@%llu", c->slices[i].name, (unsigned long long)c->slices[i].from);
        if (name.oom) result = te__fail(c->te, TE_ERR_OUT_OF_MEMORY, "te_model_save: %s", te__no_memory_text);
        else if (!te__st_list_put(&list, te__text_str(&name), c->slices[i].tensor)) result = te_error_code(c->te);
        te__text_free(&name);
    }
    if (result == TE_OK) result = te_safetensors_write(c->te, path, list.items, list.n, all->list, all->n);
    te__st_list_free(&list);
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
/* Writes this rank's file of a set. The index is written when all others are there. From then on only rank 0 knows
 * whether an index names them, so it alone removes them. */
static te_result te__ckpt_write_set(te__ckpt *c, const char *path, te__ckpt_meta *all, te_result result) {
    const int rank = te__group_rank(c->group), size = te__group_size(c->group);
    te__ckpt_meta none = TE_ZERO;
    te__text part = TE_ZERO;
    uint64_t id;
    bool written = false;
    result = te__ckpt_choose_id(c->group, c->te, &id, result);
    if (result != TE_OK) return result;
    te__ckpt_part_path(&part, path, id, rank, size);
    if (part.oom) result = te__fail(c->te, TE_ERR_OUT_OF_MEMORY, "te_model_save: %s", te__no_memory_text);
    if (rank == 0 && result == TE_OK) result = te__ckpt_put_set(all, c, path, id);
    if (rank > 0 && result == TE_OK) {
        result = te__ckpt_write(c, te__text_str(&part), &none, false);
        written = result == TE_OK;
    }
    result = te__ckpt_agree(c->group, c->te, result);
    if (result == TE_OK) {
        if (rank == 0) result = te__ckpt_write(c, path, all, true);
        if (result != TE_OK) te__ckpt_remove_parts(path, id, size);
        result = te__ckpt_agree(c->group, c->te, result);
        if (result == TE_OK && rank == 0) te__ckpt_sweep_folder(path, id);
    } else if (written)
        te__file_remove(te__text_str(&part), NULL);
    te__text_free(&part);
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
    result = te__ckpt_agree_experts(&groups, result); /* after it, ranks gather stale masters together */
    if (result == TE_OK) {
        te__opt_sets_begin(opt);
        result = te__optimizer_before_save(opt);
        if (result == TE_OK) result = te__ckpt_collect(&c, te, m, opt);
        if (result == TE_OK) result = te__ckpt_put_all(&all, opt, metadata, num_metadata);
        if (!groups.set) {
            if (result == TE_OK && !groups.reads) result = te__ckpt_write(&c, path, &all, true);
            if (!c.told) result = te__ckpt_agree_all(&groups, result);
        } else if (!te__opt_sets_told(opt)) {
            c.group = groups.set;
            result = te__ckpt_write_set(&c, path, &all, result);
        }
    }
    te__ckpt_meta_free(&all);
    te__ckpt_close(&c);
    te__frame_end(te, NULL, 0);
    return result;
}
