/* lm/folder.c: the files of a model folder of Hugging Face transformers, and what of them a model needs. lm/units.c and
 * lm/hf.c open and write folders. This file must not depend on what a model computes.
 *
 * te_hf_open compares the names and shapes of the model's parameters with the tensors in the files before it allocates
 * memory for the parameters. So a wrong config.json cannot cause a large allocation. */

enum { TE__HF_MAX_SHARDS = 10000, TE__HF_MAX_CARRIED = 256 << 20, TE__HF_MIN_EXPERT = 64 /* bytes */ };

/* How te_hf_open uses a tensor of the files. */
typedef enum te__hf_use {
    TE__HF_UNKNOWN,
    TE__HF_PARAMETER,
    TE__HF_KEPT /* not a parameter; kept in memory so that te_hf_save can write it */
} te__hf_use;

typedef struct te__hf_shard {
    char *name; /* file name within the folder */
    te_safetensors *file;
    char *use; /* [number of tensors] the te__hf_use of each tensor; NULL: not allocated yet */
} te__hf_shard;

/* An entry of "weight_map" in model.safetensors.index.json. */
typedef struct te__hf_place {
    const char *tensor, *shard; /* point into te__hf_folder.index */
} te__hf_place;

typedef struct te__hf_folder {
    te_ctx *te;
    const char *path;
    te__text config, config_path, index, index_path; /* index: parsed in place */
    te__carried_file *carried;
    te__st_part *kept; /* tensors of use TE__HF_KEPT */
    int num_kept;
    te__lm_config c;
    const te__lm_family *family;
    const te__lm_rule *names; /* the entry of family->layouts that fits the files */
    te_module *model;
    te__hf_shard *shards;
    int num_shards, cap_shards;
    te__hf_place *places;
    int num_places, cap_places;
} te__hf_folder;

static void te__hf_folder_close(te__hf_folder *f) {
    int i;
    te__lm_config_close(&f->c);
    for (i = 0; i < f->num_shards; i++) {
        if (f->shards[i].use) te__free(f->te, f->shards[i].use);
        te_safetensors_close(f->shards[i].file);
        te__free(f->te, f->shards[i].name);
    }
    te__free(f->te, f->shards);
    te__free(f->te, f->places);
    te__carried_free(f->te, f->carried);
    te__st_free_kept(f->te, f->kept, f->num_kept);
    te__text_free(&f->config);
    te__text_free(&f->config_path);
    te__text_free(&f->index);
    te__text_free(&f->index_path);
}

/* Reads the text file `name` of the folder. Stores its text in `into` and its path in `path`. Rejects a file that is
 * larger than `limit` bytes or contains a 0 byte. */
static bool te__hf_read_text(te__hf_folder *f, const char *name, size_t limit, te__text *path, te__text *into) {
    te__text why = TE_ZERO;
    bool fine;
    if (!te__hf_join(path, f->te, f->path, name)) return false;
    into->memory = &f->te->host_allocator;
    fine = te__file_read(path->s, limit, into, &why);
    if (!fine) te__fail(f->te, into->oom ? TE_ERR_OUT_OF_MEMORY : TE_ERR_IO, "%s", te__text_str(&why));
    te__text_free(&why);
    if (!fine || strlen(te__text_str(into)) == into->n) return fine;
    return te__not_ok(f->te, TE_ERR_FORMAT, "%s: byte %lld is 0; a text is expected", path->s,
                      (long long)strlen(into->s));
}

/* ---- the weights' files ---- */

static int te__hf_open_shard(te__hf_folder *f, const char *name) {
    te__text path = TE_ZERO;
    te__hf_shard *s;
    if (!te__grow(f->te, (void **)&f->shards, &f->cap_shards, f->num_shards, sizeof(te__hf_shard))) return -1;
    s = &f->shards[f->num_shards];
    s->name = te__copy_string(f->te, name);
    s->use = NULL;
    if (!s->name) return -1;
    s->file = te__hf_join(&path, f->te, f->path, name) ? te_safetensors_open(f->te, path.s) : NULL;
    te__text_free(&path);
    if (s->file) return f->num_shards++;
    te__free(f->te, s->name);
    return -1;
}

/* Returns true if `name` is a bare file name, without a directory or drive. */
static bool te__hf_is_plain_name(const char *name) {
    const char *p;
    for (p = name; *p; p++)
        if (te__is_slash(*p) || *p == ':') return false;
    return name[0] && strcmp(name, ".") != 0 && strcmp(name, "..") != 0;
}

static int te__hf_by_tensor(const void *a, const void *b) {
    return strcmp(((const te__hf_place *)a)->tensor, ((const te__hf_place *)b)->tensor);
}

static bool te__hf_parse_weight_map(te__hf_folder *f, te__json *j) {
    const char *tensor;
    for (tensor = te__json_first(j); tensor; tensor = te__json_next(j)) {
        te__hf_place *p;
        if (!te__grow(f->te, (void **)&f->places, &f->cap_places, f->num_places, sizeof(te__hf_place))) return false;
        p = &f->places[f->num_places];
        p->tensor = tensor;
        p->shard = te__json_string(j);
        if (j->failed) return false;
        if (!te__hf_is_plain_name(p->shard))
            return te__not_ok(f->te, TE_ERR_FORMAT,
                              "%s: weight_map says that tensor " TE__ST_NAME
                              " is in \"%.120s\"; the name of a file in the same folder is needed",
                              j->path, p->tensor, p->shard);
        f->num_places++;
    }
    return !j->failed;
}

static bool te__hf_parse_index(te__hf_folder *f) {
    te__json j = te__json_of(f->te, f->index_path.s, "the text", f->index.s, f->index.n);
    const char *name;
    int i, maps = 0;
    for (name = te__json_first(&j); name; name = te__json_next(&j)) {
        if (strcmp(name, "weight_map") != 0) te__json_skip(&j, 0);
        else if (maps++) return te__json_fail(&j, "\"weight_map\" is given twice");
        else if (!te__hf_parse_weight_map(f, &j)) return false;
    }
    if (!te__json_end(&j)) return false;
    if (!f->num_places) return te__json_fail(&j, "weight_map is %s", maps ? "empty" : "missing");
    qsort(f->places, (size_t)f->num_places, sizeof(te__hf_place), te__hf_by_tensor);
    for (i = 1; i < f->num_places; i++)
        if (strcmp(f->places[i - 1].tensor, f->places[i].tensor) == 0)
            return te__json_fail(&j, "weight_map has tensor " TE__ST_NAME " twice", f->places[i].tensor);
    return true;
}

/* Opens each shard once, and checks that the index and the shards list the same tensors. */
static bool te__hf_open_shards(te__hf_folder *f) {
    int i, k;
    for (i = 0; i < f->num_places; i++) {
        for (k = 0; k < f->num_shards && strcmp(f->shards[k].name, f->places[i].shard) != 0; k++) {}
        if (k == TE__HF_MAX_SHARDS)
            return te__not_ok(f->te, TE_ERR_FORMAT, "%s: more than %d files", f->index_path.s, (int)TE__HF_MAX_SHARDS);
        if (k == f->num_shards && te__hf_open_shard(f, f->places[i].shard) < 0) return false;
        if (te_safetensors_find(f->shards[k].file, f->places[i].tensor)) continue;
        return te__not_ok(f->te, TE_ERR_FORMAT,
                          "%s says that tensor " TE__ST_NAME " is in %s, which has no tensor of that name",
                          f->index_path.s, f->places[i].tensor, f->places[i].shard);
    }
    for (k = 0; k < f->num_shards; k++)
        for (i = 0; i < te_safetensors_count(f->shards[k].file); i++) {
            const te__hf_place *p;
            te__hf_place key;
            key.tensor = te_safetensors_at(f->shards[k].file, i)->name;
            key.shard = NULL;
            p = (const te__hf_place *)bsearch(&key, f->places, (size_t)f->num_places, sizeof(key), te__hf_by_tensor);
            if (p && strcmp(p->shard, f->shards[k].name) == 0) continue;
            return te__not_ok(f->te, TE_ERR_FORMAT, "%s has tensor " TE__ST_NAME ", which by %s is in %s",
                              f->shards[k].name, key.tensor, f->index_path.s, p ? p->shard : "no file");
        }
    return true;
}

static const te_safetensors_entry *te__hf_find(te__hf_folder *f, const char *name, int *shard) {
    const te_safetensors_entry *e = NULL;
    for (*shard = 0; *shard < f->num_shards; ++*shard) {
        e = te_safetensors_find(f->shards[*shard].file, name);
        if (e) break;
    }
    return e;
}

/* Returns true if the folder has no pickled PyTorch weights. If it has, or if memory runs out, sets an error and
 * returns false. */
static bool te__hf_has_no_pickle(te__hf_folder *f) {
    static const char *const names[2] = {"pytorch_model.bin", "pytorch_model.bin.index.json"};
    te__text path = TE_ZERO;
    bool fine = true;
    int i;
    for (i = 0; i < 2 && fine; i++) {
        fine = te__hf_join(&path, f->te, f->path, names[i]);
        if (!fine || !te__file_exists(path.s)) continue;
        te__fail(f->te, TE_ERR_UNSUPPORTED,
                 "%s: the weights are pickled, and te.h reads safetensors. This line of Python writes them beside it, "
                 "with transformers: "
                 "AutoModelForCausalLM.from_pretrained(\"%s\", dtype=\"auto\").save_pretrained(\"%s\")",
                 path.s, f->path, f->path);
        fine = false;
    }
    te__text_free(&path);
    return fine;
}

static bool te__hf_open_weights(te__hf_folder *f) {
    te__text single = TE_ZERO;
    const bool fine = te__hf_join(&single, f->te, f->path, "model.safetensors") &&
                      te__hf_join(&f->index_path, f->te, f->path, "model.safetensors.index.json");
    const bool there = fine && te__file_exists(single.s);
    te__text_free(&single);
    if (!fine) return false;
    if (!there && !te__file_exists(f->index_path.s) && !te__hf_has_no_pickle(f)) return false;
    /* transformers, too, prefers model.safetensors to the index */
    if (there || !te__file_exists(f->index_path.s)) return te__hf_open_shard(f, "model.safetensors") >= 0;
    return te__hf_read_text(f, "model.safetensors.index.json", TE__ST_MAX_HEADER, &f->index_path, &f->index) &&
           te__hf_parse_index(f) && te__hf_open_shards(f);
}

/* ---- files that te_hf_save takes along ---- */

/* Reads the tokenizer and generation files into f->carried. te_hf_open does this, not te_hf_save: when the model is
 * saved, the folder may be gone, or te_hf_save may be writing to this same folder. */
static bool te__hf_carry(te__hf_folder *f) {
    static const char *const names[] = {"generation_config.json",
                                        "tokenizer.json",
                                        "tokenizer_config.json",
                                        "special_tokens_map.json",
                                        "added_tokens.json",
                                        "vocab.json",
                                        "merges.txt",
                                        "tokenizer.model",
                                        "tokenizer.model.v3",
                                        "tekken.json",
                                        "chat_template.jinja",
                                        "chat_template.json",
                                        "preprocessor_config.json",
                                        "processor_config.json"};
    te__text path = TE_ZERO, why = TE_ZERO;
    bool fine = true;
    int i;
    for (i = TE__COUNT(names) - 1; i >= 0 && fine; i--) {
        te__carried_file *file;
        fine = te__hf_join(&path, f->te, f->path, names[i]);
        if (!fine || !te__file_exists(path.s)) continue;
        file = (te__carried_file *)te__alloc_zero(f->te, sizeof(te__carried_file));
        fine = file != NULL;
        if (!fine) break;
        file->name = names[i];
        file->next = f->carried;
        f->carried = file;
        file->bytes.memory = &f->te->host_allocator;
        fine = te__file_read(path.s, TE__HF_MAX_CARRIED, &file->bytes, &why);
        if (!fine) te__fail(f->te, file->bytes.oom ? TE_ERR_OUT_OF_MEMORY : TE_ERR_IO, "%s", te__text_str(&why));
    }
    te__text_free(&path);
    te__text_free(&why);
    return fine;
}
static bool te__hf_write_carried(te_ctx *te, const te__carried_file *file, const char *folder) {
    te__text path = TE_ZERO, why = TE_ZERO;
    bool fine = true;
    for (; file && fine; file = file->next) {
        fine = te__hf_join(&path, te, folder, file->name);
        if (!fine || te__file_write_atomic(path.s, te__text_str(&file->bytes), file->bytes.n, &why)) continue;
        te__fail(te, TE_ERR_IO, "%s", te__text_str(&why));
        fine = false;
    }
    te__text_free(&path);
    te__text_free(&why);
    return fine;
}

/* ---- names and shapes ---- */

/* Chooses the family's layout (rules for tensor names) that matches the most tensors in the files. */
static void te__hf_choose_names(te__hf_folder *f) {
    int64_t most = -1;
    int l, i, k;
    for (l = 0; l < TE__LM_LAYOUTS && f->family->layouts[l]; l++) {
        int64_t n = 0;
        for (k = 0; k < f->num_shards; k++)
            for (i = 0; i < te_safetensors_count(f->shards[k].file); i++)
                n += te__lm_knows(f->family->layouts[l], te_safetensors_at(f->shards[k].file, i)->name);
        if (n > most) f->names = f->family->layouts[l];
        most = te__max(most, n);
    }
}

/* Checks that the files have at least one matrix per layer, or per expert of a layer. So a wrong config.json cannot
 * demand a huge model. A 3-D tensor counts as shape[0] matrices, one for each expert. But if it has n bytes, it counts
 * as at most n / TE__HF_MIN_EXPERT matrices. */
static te_result te__hf_sizes_are_there(te__hf_folder *f, const te_causal_lm_desc *d) {
    int64_t have = 0, need = 0;
    int i, k;
    for (k = 0; k < f->num_shards; k++)
        for (i = 0; i < te_safetensors_count(f->shards[k].file); i++) {
            const te_safetensors_entry *e = te_safetensors_at(f->shards[k].file, i);
            have += e->ndim == 3 ? te__max(te__min(e->shape[0], (int64_t)(e->bytes / TE__HF_MIN_EXPERT)), 1) : 1;
        }
    for (i = 0; i < d->num_hidden_layers; i++)
        need += d->dense_layers && d->dense_layers[i] ? 1 : te__max(d->num_local_experts, 1);
    if (need <= have) return TE_OK;
    if (d->num_local_experts)
        return te__fail(
            f->te, TE_ERR_FORMAT,
            "%s: num_hidden_layers is %d with num_local_experts %d each, and the weights' files have %lld tensors",
            f->config_path.s, d->num_hidden_layers, d->num_local_experts, (long long)have);
    return te__fail(f->te, TE_ERR_FORMAT, "%s: num_hidden_layers is %d, and the weights' files have %lld tensors",
                    f->config_path.s, d->num_hidden_layers, (long long)have);
}

/* Returns true if the model contains a text model and the tensor `name` is outside of the text model. */
static bool te__hf_is_around(const te__hf_folder *f, const char *name) {
    int i;
    for (i = 0; f->family->inner && i < TE__COUNT(f->family->inner->kept) && f->family->inner->kept[i]; i++)
        if (te__starts_with(name, f->family->inner->kept[i])) return true;
    return false;
}
/* Returns true if the model does not need the tensor: the lm_head weight of a tied model, or RoPE's inv_freq. */
static bool te__hf_is_spare(const te__hf_folder *f, const te_causal_lm_desc *d, const char *name) {
    char head[TE__LM_NAME];
    return (d->tie_word_embeddings && te__lm_file_name(f->names, "lm_head.weight", head) && strcmp(name, head) == 0) ||
           te__ends_with(name, ".self_attn.rotary_emb.inv_freq");
}

/* Returns the offset of the first byte that differs in two tensors of equal size, or the size if they are equal. On
 * failure returns -1. */
static int64_t te__hf_first_difference(te__hf_folder *f, int a_shard, const te_safetensors_entry *a, int b_shard,
                                       const te_safetensors_entry *b) {
    enum { CHUNK = 1 << 16 };
    char *bytes = (char *)te__alloc(f->te, 2 * (size_t)CHUNK);
    int64_t at = bytes ? 0 : -1, end = (int64_t)a->bytes;
    te__text why = TE_ZERO;
    while (at >= 0 && at < end) {
        const size_t n = (size_t)te__min(end - at, CHUNK);
        size_t i = 0;
        te_safetensors *files[2] = {f->shards[a_shard].file, f->shards[b_shard].file};
        if (!te__file_read_at(&files[0]->file, files[0]->data_start + a->offset + (uint64_t)at, bytes, n, &why) ||
            !te__file_read_at(&files[1]->file, files[1]->data_start + b->offset + (uint64_t)at, bytes + CHUNK, n,
                              &why)) {
            te__fail(f->te, TE_ERR_IO, "%s", te__text_str(&why));
            at = -1;
            break;
        }
        if (memcmp(bytes, bytes + CHUNK, n) != 0) {
            while (bytes[i] == bytes[CHUNK + i]) i++;
            at += (int64_t)i;
            break;
        }
        at += (int64_t)n;
    }
    te__text_free(&why);
    te__free(f->te, bytes);
    return at;
}

/* Checks a tied model. If the files have lm_head.weight, this tensor must equal the embedding table: transformers does
 * not tie tensors that differ. */
static bool te__hf_ties(te__hf_folder *f, const te_causal_lm_desc *d) {
    char table_name[TE__LM_NAME], head_name[TE__LM_NAME];
    const te_safetensors_entry *table = NULL, *head = NULL;
    int table_shard = 0, head_shard = 0;
    char a[TE__SHAPE_TEXT], b[TE__SHAPE_TEXT];
    int64_t at;
    if (te__lm_file_name(f->names, "model.embed_tokens.weight", table_name))
        table = te__hf_find(f, table_name, &table_shard);
    if (te__lm_file_name(f->names, "lm_head.weight", head_name)) head = te__hf_find(f, head_name, &head_shard);
    if (!d->tie_word_embeddings || !head || !table) return true; /* te__hf_check reports a missing table */
    if (head->dtype != table->dtype || head->ndim != table->ndim ||
        memcmp(head->shape, table->shape, (size_t)table->ndim * sizeof(int64_t)) != 0)
        return te__st_fail(f->shards[head_shard].file, TE_ERR_FORMAT,
                           "tensor \"%s\" is %s %s and \"%s\" %s %s, and by %s they are one (tie_word_embeddings)",
                           head_name, te_dtype_name(head->dtype), te__dims_text(head->ndim, head->shape, a), table_name,
                           te_dtype_name(table->dtype), te__dims_text(table->ndim, table->shape, b), f->config_path.s);
    at = te__hf_first_difference(f, head_shard, head, table_shard, table);
    if (at == (int64_t)table->bytes || at < 0) return at >= 0;
    return te__st_fail(f->shards[head_shard].file, TE_ERR_FORMAT,
                       "tensor \"%s\" differs from \"%s\" at byte %lld, and by %s they are one: set "
                       "tie_word_embeddings to false, or take %s out",
                       head_name, table_name, (long long)at, f->config_path.s, head_name);
}

static char *te__hf_use_of(te__hf_folder *f, int shard, const te_safetensors_entry *e) {
    return &f->shards[shard].use[(const te__st_entry *)(const void *)e - f->shards[shard].file->entries];
}
/* Checks that the files have a float tensor `name` of this shape, and marks the tensor as a parameter. */
static bool te__hf_has(te__hf_folder *f, const char *name, int ndim, const int64_t *shape) {
    int shard;
    const te_safetensors_entry *e = te__hf_find(f, name, &shard);
    char a[TE__SHAPE_TEXT], b[TE__SHAPE_TEXT];
    if (!e)
        return te__not_ok(f->te, TE_ERR_FORMAT, "%s has no tensor " TE__ST_NAME ", which a %s of %s needs",
                          f->num_places ? f->index_path.s : f->shards[0].file->path, name, f->c.model_type,
                          f->config_path.s);
    if (e->ndim != ndim || memcmp(e->shape, shape, (size_t)ndim * sizeof(int64_t)) != 0)
        return te__st_fail(f->shards[shard].file, TE_ERR_SHAPE, "tensor " TE__ST_NAME " is %s, and by %s it is %s",
                           name, te__dims_text(e->ndim, e->shape, a), f->config_path.s, te__dims_text(ndim, shape, b));
    if (!te__is_float(e->dtype))
        return te__st_fail(f->shards[shard].file, TE_ERR_UNSUPPORTED,
                           "tensor " TE__ST_NAME " is %s; f32, f16 and bf16 are possible", name,
                           te_dtype_name(e->dtype));
    *te__hf_use_of(f, shard, e) = TE__HF_PARAMETER;
    return true;
}
/* Returns how many ranks have an expert each in the place of the one whose parameter x is: 1 for other parameters. */
static int te__hf_expert_ranks(const te_tensor *x) {
    const te__split *s = te__lm_split(x);
    return s && s->dim < 0 ? s->size : 1;
}
/* Writes to `other` the path of a parameter of the expert that rank k has in the place of the one of `path`. */
static bool te__hf_expert_path(te_module *model, const te_tensor *x, const char *path, int k, char *other) {
    const te_causal_lm_desc *d = &((const te__causal_lm *)model->state)->desc;
    const char *at = strstr(path, ".experts.");
    const int local = d->num_local_experts / te__hf_expert_ranks(x);
    char *end;
    long number;
    if (te__hf_expert_ranks(x) == 1 || !at) return snprintf(other, TE__LM_NAME, "%s", path) < TE__LM_NAME;
    at += strlen(".experts.");
    number = strtol(at, &end, 10);
    return snprintf(other, TE__LM_NAME, "%.*s%ld%s", (int)(at - path), path, number % local + (long)k * local, end) <
           TE__LM_NAME;
}
static bool te__hf_compare(void *user, te_module *m, const char *path, te_tensor *x, te_entry_kind kind) {
    te__hf_folder *f = (te__hf_folder *)user;
    te__lm_group g;
    char name[TE__LM_NAME], other[TE__LM_NAME];
    int64_t shape[TE_MAX_DIMS];
    int i, k, ndim;
    (void)m;
    if (kind != TE_ENTRY_PARAMETER || te__lm_group_of(f->names, f->model, path, &g) != 0) return true;
    ndim = te__lm_file_shape(&g, f->model, shape);
    for (k = 0; k < (g.stacked[TE__LM_MODEL] ? 1 : te__hf_expert_ranks(x)); k++) {
        if (!g.stacked[TE__LM_MODEL] && (!te__hf_expert_path(f->model, x, path, k, other) ||
                                         te__lm_group_of(f->names, f->model, other, &g) != 0))
            return false;
        for (i = 0; i < g.count[TE__LM_FILE]; i++)
            if (!te__lm_member(&g, TE__LM_FILE, i, name) || !te__hf_has(f, name, ndim, shape)) return false;
    }
    return true;
}

/* Checks that the files have every parameter. Any other tensor must be spare (te__hf_is_spare) or outside of the text
 * model (te__hf_is_around). Tensors outside are marked TE__HF_KEPT. */
static bool te__hf_check(te__hf_folder *f, const te_causal_lm_desc *d) {
    int i, k;
    for (k = 0; k < f->num_shards; k++) {
        f->shards[k].use = (char *)te__alloc_zero(f->te, (size_t)te_safetensors_count(f->shards[k].file));
        if (!f->shards[k].use) return false;
    }
    if (!te_module_visit_tensors(f->model, te__hf_compare, f)) return false;
    for (k = 0; k < f->num_shards; k++)
        for (i = 0; i < te_safetensors_count(f->shards[k].file); i++) {
            const char *name = te_safetensors_at(f->shards[k].file, i)->name;
            if (f->shards[k].use[i] == TE__HF_PARAMETER || te__hf_is_spare(f, d, name)) continue;
            f->shards[k].use[i] = TE__HF_KEPT;
            if (te__hf_is_around(f, name)) continue;
            return te__st_fail(f->shards[k].file, TE_ERR_FORMAT,
                               "tensor " TE__ST_NAME " has no place in the %s of %s (%d layers%s)", name,
                               f->c.model_type, f->config_path.s, d->num_hidden_layers,
                               d->tie_word_embeddings ? ", tied embeddings" : "");
        }
    return true;
}
/* Reads the TE__HF_KEPT tensors into memory for te_hf_save, because the folder may be gone when the model is saved. */
static bool te__hf_keep(te__hf_folder *f) {
    int i, k, n = 0;
    for (k = 0; k < f->num_shards; k++)
        for (i = 0; i < te_safetensors_count(f->shards[k].file); i++) n += f->shards[k].use[i] == TE__HF_KEPT;
    if (!n) return true;
    f->kept = (te__st_part *)te__alloc_zero(f->te, (size_t)n * sizeof(te__st_part));
    if (!f->kept) return false;
    f->num_kept = n;
    for (k = 0, n = 0; k < f->num_shards; k++)
        for (i = 0; i < te_safetensors_count(f->shards[k].file); i++)
            if (f->shards[k].use[i] == TE__HF_KEPT && !te__st_keep(f->shards[k].file, i, &f->kept[n++])) return false;
    return true;
}

/* Reads elements of the file tensors of a group, which lie behind each other, from number `from` on into dst, a vector,
 * and casts them to its format. */
static te_result te__hf_read_range(te__hf_folder *f, const te__lm_group *g, int64_t from, te_tensor *dst) {
    const int64_t end = from + te__numel(dst);
    te_result result = TE_OK;
    int64_t at = 0;
    int i;
    for (i = 0; i < g->count[TE__LM_FILE] && result == TE_OK && at < end; i++) {
        char name[TE__LM_NAME];
        const te_safetensors_entry *e;
        int64_t numel, first, last, size;
        te_tensor *part, *into;
        int shard;
        te__lm_member(g, TE__LM_FILE, i, name);
        e = te__hf_find(f, name, &shard);
        size = te__dtype_size(e->dtype);
        numel = (int64_t)e->bytes / size;
        first = te__max(from, at) - at;
        last = te__min(end, at + numel) - at;
        if (first < last) {
            part = te__alias_1d(dst, (at + first - from) * te__dtype_size(dst->dtype), dst->dtype, last - first);
            into = part && e->dtype != dst->dtype ? te__empty_1d(f->te, e->dtype, last - first) : part;
            if (!into) return te_error_code(f->te);
            te__touch(into);
            result = te__st_load_part(f->shards[shard].file, (const te__st_entry *)(const void *)e,
                                      (uint64_t)(first * size), into, 0, (uint64_t)((last - first) * size));
            if (result == TE_OK && into != part) result = te_tensor_copy(part, into);
        }
        at += numel;
    }
    return result;
}
/* Returns whether ranks divide the rows of a parameter. */
static bool te__has_rows(const te_tensor *x) { return te__lm_split(x) && x->split->dim == 0; }
/* Returns whether the files have this rank's elements of each parameter of a group in the parameter's own order, behind
 * each other, and as numbers: whole parameters, rows that ranks divide, or experts of its own. */
static bool te__hf_by_rows(const te__lm_group *g, te_module *m) {
    int i;
    for (i = 0; i < g->count[TE__LM_MODEL]; i++) {
        const te_tensor *x = te__lm_model_tensor(g, m, i);
        const te__split *s = te__lm_split(x);
        if (x->quantized || (s && (s->dim > 0 || s->sharding.num_blocks))) return false;
    }
    return !g->rule->transposed;
}
/* Returns the number that the first element of parameter `place` of a group, by rows, has among those of the file. */
static int64_t te__hf_first_element(const te__lm_group *g, te_module *m, int place) {
    const te_tensor *x = te__lm_model_tensor(g, m, place);
    int64_t first = te__has_rows(x) ? te__group_rank(x->split->group) * te__numel(x) : 0;
    int i;
    for (i = 0; g->stacked[TE__LM_MODEL] && i < te__lm_patterns(g->rule->model); i++) /* experts of ranks before */
        first += g->first * te__numel(te__lm_model_tensor(g, m, i));
    for (i = 0; i < place; i++) {
        x = te__lm_model_tensor(g, m, i);
        first += te__numel(x) * (te__has_rows(x) ? x->split->size : 1);
    }
    return first;
}
/* Reads this rank's elements of the parameters of a group, by rows. */
static te_result te__hf_load_rows(te__hf_folder *f, const te__lm_group *g) {
    te_result result = TE_OK;
    int i;
    for (i = 0; i < g->count[TE__LM_MODEL] && result == TE_OK; i++) {
        te_tensor *x = te__lm_model_tensor(g, f->model, i);
        te__frame_begin(f->te);
        x = te__alias_1d(x, 0, x->dtype, te__numel(x));
        result = x ? te__hf_read_range(f, g, te__hf_first_element(g, f->model, i), x) : te_error_code(f->te);
        te__frame_end(f->te, NULL, 0);
    }
    return result;
}

/* Reads the file tensors of the group g (te__lm_group), and sets the group's parameters from them. */
static te_result te__hf_load_group(te__hf_folder *f, const te__lm_group *g) {
    const int n = g->count[TE__LM_FILE];
    te_tensor **parts = (te_tensor **)te__alloc_zero(f->te, (size_t)n * sizeof(te_tensor *));
    te_result result = parts ? TE_OK : TE_ERR_OUT_OF_MEMORY;
    char name[TE__LM_NAME];
    int i, shard;
    te__frame_begin(f->te);
    for (i = 0; i < n && result == TE_OK; i++) {
        te__lm_member(g, TE__LM_FILE, i, name);
        te__hf_find(f, name, &shard);
        parts[i] = te_safetensors_read(f->shards[shard].file, name);
        if (!parts[i]) result = te_error_code(f->te);
    }
    if (result == TE_OK) result = te__lm_take_in(g, f->model, parts);
    te__frame_end(f->te, NULL, 0);
    te__free(f->te, parts);
    return result;
}
static bool te__hf_load(void *user, te_module *m, const char *path, te_tensor *x, te_entry_kind kind) {
    te__hf_folder *f = (te__hf_folder *)user;
    const te_safetensors_entry *e;
    te__lm_group g;
    char name[TE__LM_NAME];
    int shard;
    (void)m;
    if (kind != TE_ENTRY_PARAMETER || te__lm_group_of(f->names, f->model, path, &g) != 0) return true;
    te__lm_member(&g, TE__LM_FILE, 0, name);
    e = te__hf_find(f, name, &shard);
    if (te__lm_is_whole(&g) && !x->quantized && e->dtype == x->dtype && !(te__lm_split(x) && x->split->dim >= 0))
        return te_safetensors_read_into(f->shards[shard].file, name, x) == TE_OK;
    if (te__has_rows(x) && te__hf_by_rows(&g, f->model)) return te__hf_load_rows(f, &g) == TE_OK;
    return te__hf_load_group(f, &g) == TE_OK;
}
