/* model/backend.c: the backend configuration of a model: capabilities, defaults, checks, and FP8 for a whole model.
 * This file must not depend on what a backend computes. */

/* ---- capabilities and defaults ---- */

TE_API te_backend_capabilities te_backend_get_capabilities(const te_ctx *te) {
    te_backend_capabilities c = TE_ZERO;
    if (!te || te__automodel_of(te)->has_capabilities) return te ? te__automodel_of(te)->capabilities : c;
    c.have_te = c.have_deep_ep = c.have_gmm = c.have_uccl_ep = true;
    c.cuda = te_ctx_is_cuda(te);
    return c;
}
TE_API void te_backend_set_capabilities(te_ctx *te, const te_backend_capabilities *capabilities) {
    if (!te) return;
    te__automodel_of(te)->has_capabilities = capabilities != NULL;
    if (capabilities) te__automodel_of(te)->capabilities = *capabilities;
}

static te_linear_backend te__linear_backend_of(te_linear_backend given, const te_backend_capabilities *c) {
    if (given != TE_LINEAR_DEFAULT) return given;
    return c->have_te && c->cuda ? TE_LINEAR_TE : TE_LINEAR_TORCH;
}
static te_rms_norm_backend te__rms_norm_backend_of(te_rms_norm_backend given) {
    return given != TE_RMS_NORM_DEFAULT ? given : TE_RMS_NORM_TORCH_FP32;
}
static void te__default_int(int *field, int value) {
    if (*field == 0) *field = value;
}
/* Replaces fields that are 0 by their defaults. */
static void te__config_resolve(te_backend_config *c, const te_backend_capabilities *has) {
    const bool te_on_cuda = has->have_te && has->cuda;
    if (c->attn == TE_ATTN_DEFAULT) c->attn = te_on_cuda ? TE_ATTN_TE : TE_ATTN_SDPA;
    c->linear = te__linear_backend_of(c->linear, has);
    c->rms_norm = te__rms_norm_backend_of(c->rms_norm);
    if (c->rope_fusion == TE_DEFAULT) c->rope_fusion = c->keep_rope_fusion && te_on_cuda ? TE_ON : TE_OFF;
    if (c->experts == TE_EXPERTS_DEFAULT) c->experts = has->cuda ? TE_EXPERTS_TORCH_MM : TE_EXPERTS_TORCH;
    if (c->dispatcher == TE_DISPATCHER_DEFAULT)
        c->dispatcher = has->cuda && has->have_deep_ep   ? TE_DISPATCHER_DEEPEP
                        : has->cuda && has->have_uccl_ep ? TE_DISPATCHER_UCCL_EP
                                                         : TE_DISPATCHER_TORCH;
    te__default_int(&c->dispatcher_num_sms, 20);
    te__default_int(&c->mok.fwd_num_comm_sms, 40);
    te__default_int(&c->mok.bwd_num_comm_sms, 28);
    te__default_int(&c->mok.minibatch_size, 4096);
    te__default_int(&c->mok.macrobatch_size, 131072);
    te__default_int(&c->mok.all_gather_top_experts_chunk_bytes, 2048);
    if (c->mok.schedule_capacity_multiplier == 0) c->mok.schedule_capacity_multiplier = 0.5;
}
TE_API te_backend_config te_backend_config_defaults(const te_backend_capabilities *capabilities) {
    const te_backend_capabilities none = TE_ZERO;
    te_backend_config c = TE_ZERO;
    te__config_resolve(&c, capabilities ? capabilities : &none);
    return c;
}

/* ---- the rules ---- */

#define TE__VALIDATE "te_backend_config_validate"

/* Checks that every enum field has one of its values. */
static te_result te__config_ranges(te_ctx *te, const te_backend_config *c) {
    char number[16];
    int i;
    for (i = 0; i < TE__COUNT(te__config_fields); i++) {
        const te__config_field *f = &te__config_fields[i];
        int value;
        if (f->kind != TE__FIELD_ENUM) continue;
        value = *(const int *)(const void *)((const char *)c + f->offset);
        if (value >= 0 && value < f->names.count) continue;
        snprintf(number, sizeof(number), "%d", value);
        return te__unknown_name(te, TE__VALIDATE, f->name, number, strlen(number), &f->names);
    }
    return TE_OK;
}
static te_result te__fp8_check(te_ctx *te, const char *who, const te_fp8_config *c) {
    if ((int)c->recipe < 0 || c->recipe > TE_FP8_OBJECT)
        return te__fail(te, TE_ERR_INVALID,
                        "%s: te_fp8.recipe is %d; TE_FP8_CURRENT to TE_FP8_OBJECT (0 to %d) are possible", who,
                        (int)c->recipe, (int)TE_FP8_OBJECT);
    if (c->recipe == TE_FP8_OBJECT && !c->object)
        return te__fail(te, TE_ERR_INVALID,
                        "%s: te_fp8.recipe is TE_FP8_OBJECT and te_fp8.object NULL; give the recipe", who);
    if (c->recipe != TE_FP8_OBJECT && c->object)
        return te__fail(te, TE_ERR_INVALID,
                        "%s: te_fp8.recipe is \"%s\" and te_fp8.object a recipe; TE_FP8_OBJECT reads it", who,
                        te__fp8_names[c->recipe]);
    return TE_OK;
}
static te_result te__cuda_graph_check(te_ctx *te, int modules) {
    const int all = TE_CUDA_GRAPH_ATTN | TE_CUDA_GRAPH_TE_DPA | TE_CUDA_GRAPH_MOE_ROUTER | TE_CUDA_GRAPH_MOE_PREPROCESS,
              both = TE_CUDA_GRAPH_ATTN | TE_CUDA_GRAPH_TE_DPA;
    if (modules & ~all)
        return te__fail(te, TE_ERR_INVALID,
                        TE__VALIDATE
                        ": cuda_graph.modules is %d; bits of te_cuda_graph_module (%d together) are possible",
                        modules, all);
    if ((modules & both) == both)
        return te__fail(te, TE_ERR_INVALID,
                        TE__VALIDATE ": cuda_graph.modules has attn and te_dpa, which is a part of it; leave one out");
    if (modules & TE_CUDA_GRAPH_MOE_PREPROCESS && !(modules & TE_CUDA_GRAPH_MOE_ROUTER))
        return te__fail(te, TE_ERR_INVALID,
                        TE__VALIDATE ": cuda_graph.modules has moe_preprocess without moe_router; add moe_router");
    return TE_OK;
}
static te_result te__mok_check(te_ctx *te, const te_mok_backend_config *c) {
    const struct {
        const char *name;
        int value, multiple;
    } rows[] = {{"fwd_num_comm_sms", c->fwd_num_comm_sms, 2},
                {"bwd_num_comm_sms", c->bwd_num_comm_sms, 2},
                {"minibatch_size", c->minibatch_size, 256},
                {"macrobatch_size", c->macrobatch_size, c->minibatch_size},
                {"all_gather_top_experts_chunk_bytes", c->all_gather_top_experts_chunk_bytes, 16}};
    const double m = c->schedule_capacity_multiplier;
    int i;
    for (i = 0; i < TE__COUNT(rows); i++)
        if (rows[i].value <= 0 || rows[i].value % rows[i].multiple)
            return te__fail(te, TE_ERR_INVALID, TE__VALIDATE ": mok.%s is %d; a positive multiple of %d is needed",
                            rows[i].name, rows[i].value, rows[i].multiple);
    if (m > 0 && m - m == 0) return TE_OK;
    return te__fail(te, TE_ERR_INVALID,
                    TE__VALIDATE ": mok.schedule_capacity_multiplier is %g; a positive finite number is needed", m);
}
/* Checks rule 9 of te_backend_config_validate, on cuda_graph.modules. */
static te_result te__config_graph_rules(te_ctx *te, const te_backend_config *c) {
    const int modules = c->cuda_graph.modules;
    const char *what = modules & TE_CUDA_GRAPH_ATTN ? "attn" : "te_dpa";
    if (modules & (TE_CUDA_GRAPH_ATTN | TE_CUDA_GRAPH_TE_DPA)) {
        if (c->attn != TE_ATTN_TE)
            return te__fail(te, TE_ERR_INVALID,
                            TE__VALIDATE ": cuda_graph.modules has %s and attn is \"%s\"; attn=te is needed", what,
                            te_backend_name("attn", (int)c->attn));
        if (modules & TE_CUDA_GRAPH_ATTN &&
            (c->linear != TE_LINEAR_TORCH || c->rms_norm != TE_RMS_NORM_TORCH || c->rope_fusion == TE_ON))
            return te__fail(te, TE_ERR_INVALID,
                            TE__VALIDATE ": cuda_graph.modules has attn, linear is \"%s\", rms_norm \"%s\" and "
                                         "rope_fusion %s; linear=torch, rms_norm=torch and "
                                         "rope_fusion=false are needed",
                            te_backend_name("linear", (int)c->linear), te_backend_name("rms_norm", (int)c->rms_norm),
                            c->rope_fusion == TE_ON ? "true" : "false");
        if (c->has_te_fp8 && c->te_fp8.recipe == TE_FP8_OBJECT && c->te_fp8.object->fp8_dpa)
            return te__fail(
                te, TE_ERR_INVALID,
                TE__VALIDATE ": cuda_graph.modules has %s and the recipe of te_fp8 has fp8_dpa; leave one out", what);
    }
    if (modules & TE_CUDA_GRAPH_MOE_ROUTER && c->fake_balanced_gate)
        return te__fail(te, TE_ERR_INVALID,
                        TE__VALIDATE ": cuda_graph.modules has moe_router and fake_balanced_gate is true, in which no "
                                     "router runs; leave one out");
    if (modules & TE_CUDA_GRAPH_MOE_PREPROCESS && c->dispatcher != TE_DISPATCHER_HYBRIDEP)
        return te__fail(
            te, TE_ERR_INVALID,
            TE__VALIDATE
            ": cuda_graph.modules has moe_preprocess and dispatcher is \"%s\"; dispatcher=hybridep is needed",
            te_backend_name("dispatcher", (int)c->dispatcher));
    return TE_OK;
}
/* Applies the rules 1 to 10 of te_backend_config_validate, in this order. `speaks` is true on the rank that logs (rank
 * 0). */
static te_result te__config_rules(te_ctx *te, te_backend_config *c, bool speaks) {
    const bool all_to_all = c->dispatcher == TE_DISPATCHER_DEEPEP || c->dispatcher == TE_DISPATCHER_HYBRIDEP ||
                            c->dispatcher == TE_DISPATCHER_UCCL_EP || c->dispatcher == TE_DISPATCHER_MOK;
    te_result result = TE_OK;
    if (c->rope == TE_ROPE_QUACK && c->rope_fusion == TE_ON) {
        te__warn(te, "rope=quack rotates by its own kernel: rope_fusion is turned off");
        c->rope_fusion = TE_OFF;
    }
    if (c->rope_fusion == TE_ON && !c->keep_rope_fusion) {
        te__warn(te, "rope_fusion is turned off, as NeMo Automodel does: its f32 tables give other log-probabilities "
                     "than transformers and vLLM; keep_rope_fusion keeps it");
        c->rope_fusion = TE_OFF;
    }
    if (c->has_te_fp8) result = te__fp8_check(te, TE__VALIDATE, &c->te_fp8);
    if (result == TE_OK) result = te__cuda_graph_check(te, c->cuda_graph.modules);
    if (result == TE_OK) result = te__mok_check(te, &c->mok);
    if (result == TE_OK && ((int)c->gate_precision < 0 || c->gate_precision >= TE_DTYPE_COUNT))
        result = te__fail(te, TE_ERR_INVALID, TE__VALIDATE ": gate_precision is %d; a te_dtype is needed",
                          (int)c->gate_precision);
    if (result != TE_OK) return result;
    if (c->enable_deepep != TE_DEFAULT) {
        if (speaks)
            te__warn(te, "enable_deepep is gone and changes nothing: dispatcher=deepep and experts=gmm, or torch for "
                         "both, say what it said");
        c->enable_deepep = TE_DEFAULT;
    }
    if ((c->experts == TE_EXPERTS_TE || c->experts == TE_EXPERTS_GMM) && !all_to_all) {
        if (speaks)
            te__log(te, TE_LOG_INFO,
                    "experts=%s needs the dispatcher deepep, hybridep, uccl_ep or mok, and it is %s: experts=torch_mm "
                    "and dispatcher=torch are used",
                    te_backend_name("experts", (int)c->experts), te_backend_name("dispatcher", (int)c->dispatcher));
        c->dispatcher = TE_DISPATCHER_TORCH;
        c->experts = TE_EXPERTS_TORCH_MM;
    }
    result = te__config_graph_rules(te, c);
    if (result != TE_OK || !c->has_te_fp8 || c->linear == TE_LINEAR_TE || c->experts == TE_EXPERTS_TE) return result;
    return te__fail(te, TE_ERR_INVALID,
                    TE__VALIDATE ": te_fp8 requires at least one TE backend, and linear is \"%s\" and experts \"%s\"; "
                                 "set linear=te or experts=te, or leave te_fp8 out",
                    te_backend_name("linear", (int)c->linear), te_backend_name("experts", (int)c->experts));
}
TE_API te_result te_backend_config_validate(te_ctx *te, te_backend_config *config, const te_group *group) {
    te_backend_capabilities has;
    te_backend_config c;
    te_result result;
    if (!te) return TE_ERR_STATE;
    if (!config)
        return te__fail(te, TE_ERR_INVALID,
                        TE__VALIDATE ": config is NULL; zero one, and fill in what is not the default");
    has = te_backend_get_capabilities(te);
    c = *config;
    result = te__config_ranges(te, &c);
    if (result != TE_OK) return result;
    te__config_resolve(&c, &has);
    result = te__config_rules(te, &c, te__group_rank(group) == 0);
    if (result == TE_OK) *config = c;
    return result;
}

/* ---- FP8 of a whole model ---- */

/* The recipe kind of each te_fp8_recipe. Indexed by the values of te_fp8_recipe below TE_FP8_OBJECT. */
static const te_recipe_kind te__fp8_kinds[] = {TE_RECIPE_CURRENT, TE_RECIPE_BLOCK, TE_RECIPE_MXFP8};
TE__STATIC_ASSERT(sizeof(te__fp8_kinds) / sizeof(te__fp8_kinds[0]) == TE_FP8_OBJECT, "a te_fp8_recipe has no recipe");

TE_API const te_recipe *te_fp8_config_build_recipe(te_ctx *te, const te_fp8_config *config, te_recipe *storage) {
    if (!te || !te_backend_get_capabilities(te).have_te) return NULL;
    if (!config || !storage) {
        te__fail(te, TE_ERR_INVALID, "te_fp8_config_build_recipe: %s is NULL", config ? "storage" : "config");
        return NULL;
    }
    if (te__fp8_check(te, "te_fp8_config_build_recipe", config) != TE_OK) return NULL;
    if (config->recipe == TE_FP8_OBJECT) return config->object;
    *storage = te__recipe_of(te__fp8_kinds[config->recipe]);
    if (te__recipe_has(storage, TE__EXACT_CODES))
        te__warn(te, "te_fp8 %s on %s: %s codes are multiplied as bf16, exactly and no faster than bf16",
                 te_recipe_name(storage->kind), te->device_name, te__recipe_class_of(storage)->cls->name);
    return storage;
}
TE_API te_result te_fp8_maybe_autocast_begin(te_ctx *te, const te_fp8_config *config) {
    const te__autocast *outer;
    te_autocast_desc desc = TE_ZERO;
    te_recipe storage;
    if (!te) return TE_ERR_STATE;
    if (config && te_backend_get_capabilities(te).have_te) {
        desc.recipe = te_fp8_config_build_recipe(te, config, &storage);
        if (!desc.recipe) return te_error_code(te);
    }
    outer = te__autocast_now(te);
    if (!desc.recipe) { /* begins an autocast region with the settings of the outer one, because
                         * te_fp8_maybe_autocast_end always ends a region */
        desc.disabled = !outer || !outer->enabled;
        if (outer) {
            storage = outer->recipe;
            desc.recipe = &storage;
            desc.calibrating = outer->calibrating;
            desc.amax_group = outer->amax_group;
        }
    }
    return te_autocast_begin(te, &desc);
}
TE_API te_result te_fp8_maybe_autocast_end(te_ctx *te) { return te_autocast_end(te); }
