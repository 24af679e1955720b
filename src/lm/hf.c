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
    d.quantized_lm_head = desc && desc->quantized_lm_head;
    if (d.quantized_lm_head && d.tie_word_embeddings) {
        te__fail(f->te, TE_ERR_INVALID,
                 "%s: tie_word_embeddings is true, or the default of the model, so that there is no lm_head to "
                 "quantize; leave te_hf_desc.quantized_lm_head false",
                 f->config_path.s);
        return NULL;
    }
    f->model = te__hf_create(f, &d);
    if (!f->model) return NULL;
    if (desc && desc->dist) ((te__causal_lm *)f->model->state)->world = te__hf_world(desc->dist);
    fine = te__hf_check(f, &d) && te__hf_carry(f) && te__hf_keep(f) &&
           (desc && desc->units ? te__hf_load_units(f, desc->units, desc->dist)
                                : te_module_reset_parameters(f->model) == TE_OK &&
                                      te_module_visit_tensors(f->model, te__hf_load, f)) &&
           te__hf_hand_over(f);
    if (desc && desc->units) fine = te__hf_units_agree(f, desc, fine);
    if (fine) return f->model;
    te_module_destroy(f->model);
    return NULL;
}

TE_API te_module *te_hf_open(te_ctx *te, const char *folder, const te_hf_desc *desc) {
    te__hf_folder f;
    te_module *m = NULL;
    const bool failed = te && te->error_code != TE_OK;
    if (!te) return NULL;
    memset(&f, 0, sizeof(f));
    f.te = te;
    f.path = folder;
    f.c.j.te = te;
    if (!failed && (!folder || !folder[0]))
        te__fail(te, TE_ERR_INVALID,
                 "te_hf_open: folder is %s; the path of a model's folder is needed, \".\" for this one",
                 folder ? "empty" : "NULL");
    else if (!failed && desc && desc->params_dtype && !te__is_float(desc->params_dtype))
        te__fail(te, TE_ERR_DTYPE, "te_hf_open: params_dtype is %s", te_dtype_name(desc->params_dtype));
    else if (!failed)
        m = te__hf_build(&f, desc);
    te__hf_folder_close(&f);
    if (!m) te__hf_units_fail(te, desc, failed);
    return m;
}

/* ---- writing ---- */

/* Returns true if the module has no LoRA adapters. The Hugging Face layout has no names for adapters. */
static bool te__hf_has_no_adapters(void *user, te_module *m) {
    (void)user;
    return !te_module_attribute(m, TE__LORA, NULL);
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
    result = te__hf_save_check(model, folder, sharing.rank < sharing.writers);
    s = (const te__causal_lm *)model->state;
    te__frame_begin(te);
    te_no_grad_begin(te);
    result = te__hf_write_weights(model, folder, &sharing, result);
    if (result == TE_OK && sharing.rank == 0) { /* the weights are there: ranks that write have agreed */
        if (te__hf_join(&path, te, folder, "config.json") &&
            !te__file_write_atomic(path.s, s->config, strlen(s->config), &why))
            result = te__fail(te, TE_ERR_IO, "%s", te__text_str(&why));
        if (result == TE_OK) result = te->error_code;
        if (result == TE_OK && !te__hf_write_carried(te, s->carried, folder)) result = te_error_code(te);
    }
    result = te__ckpt_agree(sharing.group, te, result);
    /* a rank that failed has told all groups of its model; those that heard of it in one of them have heard in all */
    if (result != TE_OK && sharing.group) te__hf_tell(model, result);
    te_no_grad_end(te);
    te__frame_end(te, NULL, 0);
    te__text_free(&path);
    te__text_free(&why);
    return result;
}
