/* lm/hf.c: opens and writes model folders of Hugging Face transformers. This file must not depend on what a model
 * computes. */

/* Creates the model that *d describes. te->module_path is the path of config.json during the call, so that errors name
 * that file. */
static te_module *te__hf_create(te__hf_folder *f, const te_causal_lm_desc *d) {
    char before[sizeof(f->te->module_path)];
    te_module *m;
    memcpy(before, f->te->module_path, sizeof(before));
    snprintf(f->te->module_path, sizeof(before), "%.250s", f->config_path.s);
    m = te_causal_lm_create(f->te, d);
    memcpy(f->te->module_path, before, sizeof(before));
    return m;
}
/* Returns the dtype of the embedding table in the files. Returns F32 if the table is missing; te__hf_check later
 * reports that as an error. */
static te_dtype te__hf_dtype(te__hf_folder *f) {
    char name[TE__LM_NAME];
    int shard;
    const te_safetensors_entry *table =
        te__lm_file_name(f->names, "model.embed_tokens.weight", name) ? te__hf_find(f, name, &shard) : NULL;
    return table && te__is_float(table->dtype) ? table->dtype : TE_F32;
}
/* Moves to the model the data that te_hf_save needs. */
static bool te__hf_hand_over(te__hf_folder *f) {
    te__causal_lm *s = (te__causal_lm *)f->model->state;
    s->facts.folder = s->folder = te__copy_string(f->te, f->path);
    s->config = te__copy_string(f->te, f->config.s);
    s->names = f->names;
    s->carried = f->carried;
    s->kept = f->kept;
    s->num_kept = f->num_kept;
    f->carried = NULL;
    f->kept = NULL;
    f->num_kept = 0;
    return s->folder && s->config;
}
#ifdef TE_NO_DIST
static void te__hf_take_groups(te_causal_lm_desc *d, const struct te_dist *dist) { (void)d, (void)dist; }
static te_group *te__hf_world(const struct te_dist *dist) {
    (void)dist;
    return NULL;
}
#else
static void te__hf_take_groups(te_causal_lm_desc *d, const struct te_dist *dist) {
    d->tp_group = dist->tensor;
    d->cp_group = dist->context;
    d->ep_group = dist->expert;
}
static te_group *te__hf_world(const struct te_dist *dist) { return dist->world; }
#endif
static te_module *te__hf_build(te__hf_folder *f, const te_hf_desc *desc) {
    te_causal_lm_desc d;
    bool fine;
    if (!te__hf_read_text(f, "config.json", TE__HF_MAX_CONFIG, &f->config_path, &f->config) ||
        !te__lm_config_read(&f->c, f->te, f->config_path.s, f->config.s, &f->family) ||
        !te__lm_config_desc(&f->c, f->family, &d) || !te__hf_open_weights(f))
        return NULL;
    te__hf_choose_names(f);
    if (!te__hf_ties(f, &d) || te__hf_sizes_are_there(f, &d) != TE_OK) return NULL;
    d.params_dtype = desc && desc->params_dtype ? desc->params_dtype : te__hf_dtype(f);
    d.device = TE_PARAMS_META;
    d.init.no_init = true;
    if (desc && desc->dist) te__hf_take_groups(&d, desc->dist);
    if (desc) d.parallel = desc->parallel;
    if (desc && desc->units && !te__hf_units_go(f, &d, desc->units)) return NULL;
    f->model = te__hf_create(f, &d);
    if (!f->model) return NULL;
    if (desc && desc->dist) ((te__causal_lm *)f->model->state)->world = te__hf_world(desc->dist);
    fine = te__hf_check(f, &d) && te__hf_carry(f) && te__hf_keep(f) &&
           (desc && desc->units ? te__hf_load_units(f, desc->units)
                                : te_module_reset_parameters(f->model) == TE_OK &&
                                      te_module_visit_tensors(f->model, te__hf_load, f)) &&
           te__hf_hand_over(f);
    if (desc && desc->units) fine = te__hf_units_agree(f, desc->units, fine);
    if (fine) return f->model;
    te_module_destroy(f->model);
    return NULL;
}

TE_API te_module *te_hf_open(te_ctx *te, const char *folder, const te_hf_desc *desc) {
    te__hf_folder f;
    te_module *m;
    if (!te || te->error_code != TE_OK) {
        if (te && desc && desc->units) te__hf_units_fail(te, desc->units, true);
        return NULL;
    }
    if (!folder || !folder[0])
        return te__no_module(te, TE_ERR_INVALID,
                             "te_hf_open: folder is %s; the path of a model's folder is needed, \".\" for this one",
                             folder ? "empty" : "NULL");
    if (desc && desc->params_dtype && !te__is_float(desc->params_dtype))
        return te__no_module(te, TE_ERR_DTYPE, "te_hf_open: params_dtype is %s", te_dtype_name(desc->params_dtype));
    memset(&f, 0, sizeof(f));
    f.te = te;
    f.path = folder;
    f.c.j.te = te;
    m = te__hf_build(&f, desc);
    te__hf_folder_close(&f);
    if (!m && desc && desc->units) te__hf_units_fail(te, desc->units, false);
    return m;
}

/* ---- writing ---- */

typedef struct te__hf_writer {
    te__st_list list;
    te_module *model;
    const te__lm_rule *names;
    bool reads; /* another rank writes: this one has parts of parameters, which it gives */
} te__hf_writer;

/* Lists a tensor, NULL after an error, under the name that file tensor i of the group has. */
static bool te__hf_list_add(te__hf_writer *w, te_module *m, const te__lm_group *g, int i, te_tensor *x,
                            te_entry_kind kind) {
    char name[TE__LM_NAME];
    return x && te__lm_member(g, TE__LM_FILE, i, name) && (w->reads || te__st_list_add(&w->list, m, name, x, kind));
}
/* Lists the experts that the ranks have in the place of the one whose parameter x is. All ranks must call it. */
static bool te__hf_list_experts(te__hf_writer *w, te_module *m, const char *path, te_tensor *x, te_entry_kind kind) {
    te_ctx *te = w->list.te;
    te_tensor *plain, *all;
    const int64_t rows = x->shape[0];
    bool fine = true;
    int k;
    te__frame_begin(te);
    plain = x->quantized ? te_dequantize(x, TE_DTYPE_NONE) : te_tensor_contiguous(x);
    all = te__gather(x->split->group, plain);
    te__frame_end(te, &all, 1);
    for (k = 0; k < x->split->size && all && fine; k++) {
        te__lm_group g;
        char other[TE__LM_NAME];
        fine = te__hf_expert_path(w->model, x, path, k, other);
        if (fine) te__lm_group_of(w->names, w->model, other, &g);
        fine = fine && te__hf_list_add(w, m, &g, 0, te_tensor_narrow(all, 0, k * rows, rows), kind);
    }
    return all && fine;
}

/* A visitor of parameters. At the first parameter of a group (te__lm_group), adds the file tensors of the group to the
 * writer's list. */
static bool te__hf_list_group(void *user, te_module *m, const char *path, te_tensor *x, te_entry_kind kind) {
    te__hf_writer *w = (te__hf_writer *)user;
    te_ctx *te = w->list.te;
    te_tensor **parts;
    te__lm_group g;
    te_result result;
    int i, n, place;
    if (kind != TE_ENTRY_PARAMETER) return true;
    place = te__lm_group_of(w->names, w->model, path, &g);
    if (!te__lm_is_complete(&g, w->model)) return false;
    if (place > 0) return true;
    if (te__hf_expert_ranks(x) > 1 && !g.stacked[TE__LM_MODEL]) return te__hf_list_experts(w, m, path, x, kind);
    n = g.count[TE__LM_FILE];
    parts = (te_tensor **)te__alloc_zero(te, (size_t)n * sizeof(te_tensor *));
    if (!parts) return false;
    te__frame_begin(te);
    result = te__lm_put_out(&g, w->model, parts);
    te__frame_end(te, parts, n);
    for (i = 0; i < n && result == TE_OK; i++)
        if (!te__hf_list_add(w, m, &g, i, parts[i], kind)) result = te_error_code(te);
    te__free(te, parts);
    return result == TE_OK;
}
/* Returns true if the module has no LoRA adapters. The Hugging Face layout has no names for adapters. */
static bool te__hf_has_no_adapters(void *user, te_module *m) {
    (void)user;
    return !te_module_attribute(m, TE__LORA, NULL);
}

/* Writes all parameters to model.safetensors, from whole tensors in memory. If ranks have parts of parameters, all of
 * them must call it: they gather the whole tensors, and one of them writes. `result`: an error of this rank from
 * before. */
static te_result te__hf_write_whole(te_module *model, const char *folder, const te__hf_sharing *h, te_result result) {
    const te__causal_lm *s = (const te__causal_lm *)model->state;
    te_ctx *te = model->te;
    te__hf_writer w = TE_ZERO;
    te__text path = TE_ZERO;
    result = te__ckpt_agree(h->group, te, result); /* before the first gathering */
    if (result != TE_OK) return result;
    w.list.te = te;
    w.model = model;
    w.names = s->names;
    w.reads = h->rank > 0;
    if (!te_module_visit_tensors(model, te__hf_list_group, &w)) result = te_error_code(te);
    if (result == TE_OK && !w.reads && te__hf_join(&path, te, folder, "model.safetensors"))
        result = te__st_write_with(te, path.s, w.list.items, w.list.n, s->kept, s->num_kept, te__hf_format, 1);
    if (result == TE_OK && te->error_code == TE_OK && !w.reads) result = te__hf_remove_others(te, folder, 1);
    te__st_list_free(&w.list);
    te__text_free(&path);
    return result == TE_OK ? te->error_code : result;
}
/* Checks a call of te_hf_save, and makes the folder if this rank writes files. */
static te_result te__hf_save_check(te_module *model, const char *folder, bool writes) {
    te_ctx *te = model->te;
    te__text why = TE_ZERO;
    te_result result = TE_OK;
    if (te->error_code != TE_OK) return te->error_code;
    if (!folder || !folder[0])
        return te__fail(te, TE_ERR_INVALID, "te_hf_save: folder is %s", folder ? "empty" : "NULL");
    if (model->cls != &te__causal_lm_class || !((const te__causal_lm *)model->state)->config)
        return te__fail(te, TE_ERR_INVALID, "te_hf_save: the model was not made by te_hf_open, and has no config.json");
    if (te__tree_whole(model) != TE_OK) return TE_ERR_STATE;
    if (!te_module_visit(model, te__hf_has_no_adapters, NULL))
        return te__fail(te, TE_ERR_INVALID,
                        "te_hf_save: the model has adapters, which this layout has no names for; te_lora_merge them "
                        "first, or te_lora_save them alone");
    if (writes && !te__dir_make(folder, &why)) result = te__fail(te, TE_ERR_IO, "%s", te__text_str(&why));
    te__text_free(&why);
    return result;
}

TE_API te_result te_hf_save(te_module *model, const char *folder) {
    te__hf_sharing sharing;
    const te__causal_lm *s;
    te__text path = TE_ZERO, why = TE_ZERO;
    te_result result;
    te_ctx *te;
    if (!model) return TE_ERR_STATE;
    te = model->te;
    result = te__hf_shared(model, &sharing);
    if (result != TE_OK) return result; /* on all ranks alike */
    result = te__hf_save_check(model, folder, sharing.sharded || sharing.rank == 0);
    s = (const te__causal_lm *)model->state;
    te__frame_begin(te);
    te_no_grad_begin(te);
    if (sharing.sharded) result = te__hf_write_units(model, folder, &sharing, result);
    else result = te__hf_write_whole(model, folder, &sharing, result);
    if (result == TE_OK && sharing.rank == 0) { /* the weights are there: ranks that write have agreed */
        if (te__hf_join(&path, te, folder, "config.json") &&
            !te__file_write_atomic(path.s, s->config, strlen(s->config), &why))
            result = te__fail(te, TE_ERR_IO, "%s", te__text_str(&why));
        if (result == TE_OK) result = te->error_code;
        if (result == TE_OK && !te__hf_write_carried(te, s->carried, folder)) result = te_error_code(te);
    }
    result = te__ckpt_agree(sharing.group, te, result);
    if (result != TE_OK && sharing.group && !sharing.sharded) te__hf_tell(model, result); /* some may be gathering */
    te_no_grad_end(te);
    te__frame_end(te, NULL, 0);
    te__text_free(&path);
    te__text_free(&why);
    return result;
}
