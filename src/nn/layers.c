/* nn/layers.c: Linear, LayerNorm, RMSNorm, LayerNormLinear, LayerNormMLP, Embedding, Sequential. Knows the functions and the module tree; must not
 * know attention. */

/* ---- parameters ----
 *
 * Every forward looks its parameters up again: te_module_add_parameter may have replaced one, for example to tie weights. */

/* The first values of a plain weight. */
static te_result te__init_fill(te_tensor *x, const te_init *init) {
    te_op_random_args args = TE_ZERO;
    te__draw draw;
    te_result result;
    if (init->init_method) {
        x->te->tape.no_grad++;
        result = init->init_method(init->user, x);
        x->te->tape.no_grad--;
        if (result == TE_OK) result = te_error_code(x->te);
        /* the first error stays: this one shows if the function recorded none */
        return result == TE_OK ? TE_OK : te__fail(x->te, result, "the init_method of \"%s\" returned %s", x->name ? x->name : "weight", te_result_name(result));
    }
    args.dst = x;
    args.kind = TE_RANDOM_NORMAL;
    args.b = init->std > 0.0f ? init->std : 0.023f;
    draw = te__rng_draw(x->te, 1);
    args.seed = draw.seed;
    args.offset = draw.offset;
    args.rng = draw.rng;
    return te_op_random(x->te, &args);
}
static te_result te__init_weight(te_tensor *x, const te_init *init) {
    te_tensor *plain;
    te_result result;
    if (!x) return TE_ERR_STATE;
    if (init->no_init) return TE_OK;
    te__frame_begin(x->te);
    plain = x->quantized ? te__empty_like(x, x->dtype) : x;
    result = plain ? te__init_fill(plain, init) : te_error_code(x->te);
    if (result == TE_OK && x->quantized) result = te__primary_start(x, plain);
    te__frame_end(x->te, NULL, 0);
    return result;
}

/* Uninitialised; reset_parameters fills it. cols 0: a vector. */
static void te__add_weight(te_module *m, const char *name, te_dtype dtype, int64_t rows, int64_t cols) {
    int64_t shape[2];
    shape[0] = rows;
    shape[1] = cols;
    if (!dtype) dtype = TE_BF16;
    te__frame_begin(m->te);
    te_module_add_parameter(m, name, m->meta ? te_tensor_describe(m->te, dtype, cols ? 2 : 1, shape) : te_tensor_empty(m->te, dtype, cols ? 2 : 1, shape));
    te__frame_end(m->te, NULL, 0);
}
/* The `device` of a desc, for the parameters that are added from here on. */
static void te__params_on(te_module *m, te_params_device device) {
    m->meta = device == TE_PARAMS_META;
    if ((int)device < 0 || device > TE_PARAMS_META) te__fail(m->te, TE_ERR_INVALID, "%s: device %d; TE_PARAMS_DEFAULT (0) and TE_PARAMS_META (1) are possible", m->cls->name, (int)device);
}

/* The weight of a product. */
static void te__add_product_weight(te_module *m, const char *name, te_dtype dtype, int64_t rows, int64_t cols) {
    int before = m->num_entries;
    te__add_weight(m, name, dtype, rows, cols);
    if (m->num_entries > before) m->entries[before].product_weight = true;
}

/* Inside te_quantized_model_init: puts quantized tensors in the place of the weights of products. */
static te_result te__quantize_weights(te_module *m) {
    char path[sizeof(m->te->module_path)];
    te_result result = TE_OK;
    int i, gemm = 0;
    if (!te__quantizes_weights(m->te)) return TE_OK;
    te__making_path(m, path, sizeof(path));
    te__frame_begin(m->te);
    for (i = 0; i < m->num_entries && result == TE_OK; i++) {
        te_tensor *y;
        if (!m->entries[i].product_weight) continue;
        if (m->entries[i].tensor->quantized) { /* by an earlier call that failed after it */
            gemm++;
            continue;
        }
        y = te__primary_create(m->entries[i].tensor, m->cls->name, path, gemm++);
        result = y ? TE_OK : te_error_code(m->te);
        if (y) te_module_add_parameter(m, m->entries[i].name, y);
    }
    te__frame_end(m->te, NULL, 0);
    return result;
}

/* First values, for a module whose parameters have none. */
static te_result te__start_parameters(te_module *m) {
    te_result result = m->te->error_code;
    if (result == TE_OK && m->cls->reset_parameters) result = m->cls->reset_parameters(m);
    if (result == TE_OK) result = te__quantize_weights(m);
    return result == TE_OK ? m->te->error_code : result;
}

/* Ends the making of a module; on any failure destroys it and returns NULL. */
static te_module *te__module_built(te_module *m) {
    if (!m) return NULL;
    if (m->te->error_code == TE_OK && (m->meta || te__start_parameters(m) == TE_OK)) {
        m->maker = NULL;
        m->built_in = true;
        return m;
    }
    te__rng_back(m->te, m->rng);
    te_module_destroy(m);
    return NULL;
}

static te_result te__reset_tree(te_module *m) {
    te_result result = TE_OK;
    int i;
    for (i = 0; m->meta && i < m->num_entries && result == TE_OK; i++) {
        te_tensor *x = m->entries[i].tensor;
        if (!x->buffer && !x->quantized) x->buffer = te__buffer_create(m->te, te__shape_bytes(x->dtype, x->ndim, x->shape));
        if (!x->buffer && !x->quantized) result = te_error_code(m->te);
    }
    if (result == TE_OK && m->meta) result = te__start_parameters(m);
    else if (result == TE_OK && m->cls->reset_parameters) result = m->cls->reset_parameters(m);
    if (result == TE_OK) m->meta = false;
    for (i = 0; i < m->num_children && result == TE_OK; i++) result = te__reset_tree(m->children[i]);
    return result;
}
TE_API te_result te_module_reset_parameters(te_module *m) {
    te__rng_state random;
    te_ctx *te;
    te_result result;
    bool entered;
    if (!m) return TE_ERR_STATE;
    te = m->te;
    if (te->error_code != TE_OK) return te->error_code;
    if (te->capture) return te__refuse_capture(te, "te_module_reset_parameters", "give parameters their values before te_graph_begin");
    result = te__device_enter(te, &entered);
    if (result != TE_OK) return result;
    random = te__rng_now(te);
    result = te__reset_tree(m);
    if (result == TE_OK) result = te->error_code;
    if (result != TE_OK) {
        te__fail(te, result, "te_module_reset_parameters: the function of a class returned %s", te_result_name(result)); /* shows if the class recorded no error of its own */
        te__rng_back(te, random);
    }
    te__device_leave(te, entered);
    return result;
}

/* Checks the sizes and the format of a desc with weights. A gated activation doubles its rows, and the double must fit into int64_t. */
#define TE__MAX_LAYER_SIZE (INT64_MAX / 2)
static bool te__layer_desc_ok(te_ctx *te, const char *cls, int64_t in, int64_t out, te_dtype dtype) {
    if (in < 1 || out < 1 || in > TE__MAX_LAYER_SIZE || out > TE__MAX_LAYER_SIZE) {
        te__fail(te, TE_ERR_INVALID, "%s: sizes %lld and %lld; both must be at least 1 and less than 2^62", cls, (long long)in, (long long)out);
        return false;
    }
    if (dtype != TE_DTYPE_NONE && !te__is_float(dtype)) {
        te__fail(te, TE_ERR_DTYPE, "%s: params_dtype %s; f32, f16 and bf16 are possible", cls, te_dtype_name(dtype));
        return false;
    }
    return true;
}

/* ---- scaling state of a module ---- */

/* Fills *call: how the autocast region in force quantizes. If its recipe keeps scales, they become buffers of the module, unless a checkpoint has loaded
 * them as such. */
static te_result te__scaling_prepare(te_module *m, te__scaling *s, te__quant_call *call) {
    static const char *const names[2][2] = {{"fp8_scale_fwd", "fp8_amax_history_fwd"}, {"fp8_scale_bwd", "fp8_amax_history_bwd"}};
    const te__autocast *cast = te__autocast_now(m->te);
    te_result result = TE_OK;
    bool warming;
    int i, length;
    memset(call, 0, sizeof(*call));
    if (!cast || !(cast->enabled || cast->calibrating)) return TE_OK;
    s->module_type = m->cls->name;
    call->scaling = s;
    call->recipe = cast->recipe;
    call->group = cast->amax_group;
    call->enabled = cast->enabled;
    call->calibrating = cast->calibrating;
    call->forward = &s->forward;
    if (call->recipe.kind == TE_RECIPE_CUSTOM) result = te__custom_prepare(m->te, s, &call->recipe, m->cls->name);
    if (result != TE_OK || !te__keeps_scales(s, &call->recipe)) return result;
    length = te__history_length(&cast->recipe);
    if (m->te->replaying) return te__snapshot_call(m->te, s, call);
    te__frame_begin(m->te);
    warming = m->te->warming; /* these outlive a warm-up, so they are really filled */
    m->te->warming = false;
    for (i = 0; i < 2 && result == TE_OK; i++) {
        te__slots *slots = i ? &s->backward : &s->forward;
        te_tensor *scale = te_module_parameter(m, names[i][0]), *history = te_module_parameter(m, names[i][1]);
        int64_t n = slots->n;
        if (scale && history && slots->scale == scale && slots->history == history && history->shape[0] == length) continue;
        if (m->te->capture) { /* each launch would fill them again */
            result = te__refuse_capture(m->te, "making the scales of a delayed recipe", TE__RUN_FIRST);
            break;
        }
        if (!scale || scale->ndim != 1 || scale->shape[0] != n) scale = te_module_add_buffer(m, names[i][0], te_tensor_full(m->te, TE_F32, 1, &n, 1.0));
        if (!history || history->ndim != 2 || history->shape[1] != n || history->shape[0] != length) {
            bool usable = history && history->ndim == 2 && history->shape[1] == n;
            history = te_module_add_buffer(m, names[i][1], te__history_resized(m->te, usable ? history : NULL, length, (int)n));
        }
        result = te__slots_set(slots, scale, history);
        if (result == TE_OK) result = te__slots_keep(slots);
    }
    m->te->warming = warming;
    te__frame_end(m->te, NULL, 0);
    return result == TE_OK ? te__snapshot_call(m->te, s, call) : result;
}

/* Can a norm or an activation quantize its output? Delayed scaling knows the scale beforehand; under current scaling the kernel leaves the amax for the
 * cast. A backward pass that reads the output in high precision rules it out. */
static bool te__fuses(const te__quant_call *q) {
    return q->enabled && !q->recipe.backward_override && (q->recipe.kind == TE_RECIPE_DELAYED || q->recipe.kind == TE_RECIPE_CURRENT);
}
/* The spec of such an output, the input of product `gemm`; NULL where the product quantizes its input itself. */
static const te__quant_spec *te__fused_spec(const te__quant_call *q, int gemm, const te_tensor *weight, te__quant_spec *spec) {
    if (!te__fuses(q)) return NULL;
    *spec = te__slot_spec(q, false, gemm, TE__SLOT_INPUT, TE_ROWWISE | (te__wants_grad(weight) ? TE_COLUMNWISE : 0));
    return spec;
}

/* The call of a module's product `gemm`: the module's options and state, and the args of its forward. */
static te__linear_call te__linear_call_of(const te__quant_call *q, int gemm, te__weight_cache *cache, const te_forward_args *args, const te_gemm_options *o,
                                        te__scaling *scaling) {
    te__linear_call c = TE_ZERO;
    c.quant = q;
    c.gemm = gemm;
    c.cache = cache;
    c.microbatch = args->is_first_microbatch;
    c.fuse_wgrad = o->fuse_wgrad_accumulation;
    c.delays = o->delay_wgrad_compute ? scaling : NULL;
    return c;
}

/* ---- Linear ---- */

typedef struct te__linear_module {
    te_linear_desc desc;
    te__scaling *scaling;
    te__weight_cache cache;
} te__linear_module;

static te_tensor *te__bias_of(te_module *m, const char *name, bool no_bias) { return no_bias ? NULL : te_module_parameter(m, name); }

static te_result te__linear_forward(te_module *m, te_forward_args *args) {
    te__linear_module *s = (te__linear_module *)m->state;
    te_tensor *bias = te__bias_of(m, "bias", s->desc.gemm.no_bias);
    te__quant_call quant;
    te_result result = te__scaling_prepare(m, s->scaling, &quant);
    te__linear_call call = te__linear_call_of(&quant, 0, &s->cache, args, &s->desc.gemm, s->scaling);
    if (result != TE_OK) return result;
    call.x = args->input;
    call.weight = te_module_parameter(m, "weight");
    call.bias = s->desc.gemm.return_bias ? NULL : bias;
    call.save_original_input = s->desc.save_original_input;
    result = te__output(m, args, te__linear(&call));
    if (s->desc.gemm.return_bias) args->outputs.bias = bias;
    return result;
}
static void te__linear_destroy(te_module *m) {
    te__linear_module *s = (te__linear_module *)m->state;
    te__weight_cache_close(&s->cache);
    te__scaling_leave(s->scaling);
}
static te_result te__linear_reset(te_module *m) {
    te__linear_module *s = (te__linear_module *)m->state;
    te_tensor *bias = te__bias_of(m, "bias", s->desc.gemm.no_bias);
    te_result result = te__init_weight(te_module_parameter(m, "weight"), &s->desc.gemm.init);
    if (result == TE_OK && bias) result = te_tensor_fill(bias, 0.0);
    return result;
}
static const te_module_class te__linear_class = {"Linear", sizeof(te__linear_module), te__linear_forward, te__linear_destroy, te__linear_reset};

TE_API te_module *te_linear_create(te_ctx *te, const te_linear_desc *desc) {
    te_module *m;
    te__linear_module *s;
    if (!te || !te__has_desc(te, desc, "te_linear_create") ||
        !te__layer_desc_ok(te, "te_linear_create", desc->in_features, desc->out_features, desc->gemm.params_dtype) ||
        !te__options_ok(te, "te_linear_create", TE__DESC_LINEAR, desc))
        return NULL;
    m = te_module_create(te, &te__linear_class, desc->name ? desc->name : "linear");
    if (!m) return NULL;
    te__params_on(m, desc->gemm.device);
    s = (te__linear_module *)m->state;
    s->desc = *desc;
    te__add_product_weight(m, "weight", desc->gemm.params_dtype, desc->out_features, desc->in_features);
    if (!desc->gemm.no_bias) te__add_weight(m, "bias", desc->gemm.params_dtype, desc->out_features, 0);
    s->scaling = te__scaling_create(te, m, 1);
    return te__module_built(m);
}

/* ---- LayerNorm, RMSNorm ---- */

/* Parameters that the three classes with a norm share. */
typedef struct te__norm_params {
    const char *weight, *bias; /* their names */
    bool rms, zero_centered;
    float eps;
} te__norm_params;

static void te__norm_open(te_module *m, te__norm_params *n, const char *weight, const char *bias, bool rms, bool zero_centered, float eps, te_dtype dtype,
                          int64_t hidden) {
    n->weight = weight;
    n->bias = bias;
    n->rms = rms;
    n->zero_centered = zero_centered;
    n->eps = eps;
    te__add_weight(m, weight, dtype, hidden, 0);
    if (!rms) te__add_weight(m, bias, dtype, hidden, 0);
}
static te_result te__norm_reset(te_module *m, const te__norm_params *n) {
    te_result result = te_tensor_fill(te_module_parameter(m, n->weight), n->zero_centered ? 0.0 : 1.0);
    if (result == TE_OK && !n->rms) result = te_tensor_fill(te_module_parameter(m, n->bias), 0.0);
    return result;
}
static te_tensor *te__norm_run(te_module *m, const te__norm_params *n, te_tensor *x, const te__quant_spec *spec) {
    return te__norm(x, te_module_parameter(m, n->weight), n->rms ? NULL : te_module_parameter(m, n->bias), n->eps, n->rms, n->zero_centered, spec);
}

/* Also inspects the result for the product that it goes to: fused, only a second run in high precision shows what was quantized. */
static te_tensor *te__norm_run_for(te_module *m, const te__norm_params *n, te_tensor *x, const te__quant_spec *spec, const te__quant_call *q, int gemm) {
    te_tensor *y = te__norm_run(m, n, x, spec), *plain;
    if (!y || !spec || !y->te->inspecting) return y;
    y->te->tape.no_grad++;
    plain = te__norm_run(m, n, x, NULL);
    if (plain) te__inspect(q->scaling, gemm, TE_TENSOR_INPUT, plain, y);
    y->te->tape.no_grad--;
    return y;
}
static te_tensor *te__activate_for(te_tensor *x, te_activation activation, const te_activation_params *params, const te__quant_spec *spec, const te__act_grad *grad, const te__quant_call *q,
                                   int gemm) {
    te_tensor *y = te__activate(x, activation, params, spec, grad), *plain;
    if (!y || !spec || !y->te->inspecting) return y;
    y->te->tape.no_grad++;
    plain = te__activate(x, activation, params, NULL, NULL);
    if (plain) te__inspect(q->scaling, gemm, TE_TENSOR_INPUT, plain, y);
    y->te->tape.no_grad--;
    return y;
}

static te_result te__norm_forward(te_module *m, te_forward_args *args) {
    return te__output(m, args, te__norm_run(m, (const te__norm_params *)m->state, args->input, NULL));
}
static te_result te__norm_module_reset(te_module *m) { return te__norm_reset(m, (const te__norm_params *)m->state); }
static const te_module_class te__layernorm_class = {"LayerNorm", sizeof(te__norm_params), te__norm_forward, NULL, te__norm_module_reset};
static const te_module_class te__rmsnorm_class = {"RMSNorm", sizeof(te__norm_params), te__norm_forward, NULL, te__norm_module_reset};

static te_module *te__norm_create(te_ctx *te, const te_norm_desc *desc, bool rms) {
    const char *who = rms ? "te_rmsnorm_create" : "te_layernorm_create";
    te_module *m;
    if (!te || !te__has_desc(te, desc, who) || !te__layer_desc_ok(te, who, desc->hidden_size, desc->hidden_size, desc->params_dtype) ||
        !te__options_ok(te, who, TE__DESC_NORM, desc))
        return NULL;
    m = te_module_create(te, rms ? &te__rmsnorm_class : &te__layernorm_class, desc->name ? desc->name : rms ? "rmsnorm" : "layernorm");
    if (!m) return NULL;
    te__params_on(m, desc->device);
    te__norm_open(m, (te__norm_params *)m->state, "weight", "bias", rms, desc->norm.zero_centered_gamma, desc->norm.eps, desc->params_dtype, desc->hidden_size);
    return te__module_built(m);
}
TE_API te_module *te_layernorm_create(te_ctx *te, const te_norm_desc *desc) { return te__norm_create(te, desc, false); }
TE_API te_module *te_rmsnorm_create(te_ctx *te, const te_norm_desc *desc) { return te__norm_create(te, desc, true); }

/* ---- LayerNormLinear ---- */

typedef struct te__layernorm_linear_module {
    te_layernorm_linear_desc desc;
    te__norm_params norm;
    te__scaling *scaling;
    te__weight_cache cache;
} te__layernorm_linear_module;

static te_result te__layernorm_linear_forward(te_module *m, te_forward_args *args) {
    te__layernorm_linear_module *s = (te__layernorm_linear_module *)m->state;
    te_tensor *bias = te__bias_of(m, "bias", s->desc.gemm.no_bias);
    te__quant_call quant;
    te__quant_spec spec;
    te_result result = te__scaling_prepare(m, s->scaling, &quant);
    te__linear_call call = te__linear_call_of(&quant, 0, &s->cache, args, &s->desc.gemm, s->scaling);
    if (result != TE_OK) return result;
    call.weight = te_module_parameter(m, "weight");
    call.x = te__norm_run_for(m, &s->norm, args->input, s->desc.return_layernorm_output ? NULL : te__fused_spec(&quant, 0, call.weight, &spec), &quant, 0);
    call.bias = s->desc.gemm.return_bias ? NULL : bias;
    result = te__output(m, args, te__linear(&call));
    if (s->desc.gemm.return_bias) args->outputs.bias = bias;
    if (s->desc.return_layernorm_output) args->outputs.ln_out = call.x;
    return result;
}
static void te__layernorm_linear_destroy(te_module *m) {
    te__layernorm_linear_module *s = (te__layernorm_linear_module *)m->state;
    te__weight_cache_close(&s->cache);
    te__scaling_leave(s->scaling);
}
static te_result te__layernorm_linear_reset(te_module *m) {
    te__layernorm_linear_module *s = (te__layernorm_linear_module *)m->state;
    te_tensor *bias = te__bias_of(m, "bias", s->desc.gemm.no_bias);
    te_result result = te__norm_reset(m, &s->norm);
    if (result == TE_OK) result = te__init_weight(te_module_parameter(m, "weight"), &s->desc.gemm.init);
    if (result == TE_OK && bias) result = te_tensor_fill(bias, 0.0);
    return result;
}
static const te_module_class te__layernorm_linear_class = {"LayerNormLinear", sizeof(te__layernorm_linear_module), te__layernorm_linear_forward,
                                                           te__layernorm_linear_destroy, te__layernorm_linear_reset};

TE_API te_module *te_layernorm_linear_create(te_ctx *te, const te_layernorm_linear_desc *desc) {
    te_module *m;
    te__layernorm_linear_module *s;
    if (!te || !te__has_desc(te, desc, "te_layernorm_linear_create") ||
        !te__layer_desc_ok(te, "te_layernorm_linear_create", desc->in_features, desc->out_features, desc->gemm.params_dtype) ||
        !te__options_ok(te, "te_layernorm_linear_create", TE__DESC_LAYERNORM_LINEAR, desc))
        return NULL;
    m = te_module_create(te, &te__layernorm_linear_class, desc->name ? desc->name : "layernorm_linear");
    if (!m) return NULL;
    te__params_on(m, desc->gemm.device);
    s = (te__layernorm_linear_module *)m->state;
    s->desc = *desc;
    te__norm_open(m, &s->norm, "layer_norm_weight", "layer_norm_bias", desc->norm.normalization == TE_RMSNORM, desc->norm.zero_centered_gamma, desc->norm.eps,
                  desc->gemm.params_dtype, desc->in_features);
    te__add_product_weight(m, "weight", desc->gemm.params_dtype, desc->out_features, desc->in_features);
    if (!desc->gemm.no_bias) te__add_weight(m, "bias", desc->gemm.params_dtype, desc->out_features, 0);
    s->scaling = te__scaling_create(te, m, 1);
    return te__module_built(m);
}

/* ---- LayerNormMLP ---- */

typedef struct te__layernorm_mlp_module {
    te_layernorm_mlp_desc desc;
    te__norm_params norm;
    te__scaling *scaling;
    te__weight_cache fc1, fc2;
} te__layernorm_mlp_module;
enum { TE__FC1 = 0, TE__FC2 = 1 }; /* products of its scaling state */

static te_result te__layernorm_mlp_forward(te_module *m, te_forward_args *args) {
    te__layernorm_mlp_module *s = (te__layernorm_mlp_module *)m->state;
    te_tensor *fc2_bias = te__bias_of(m, "fc2_bias", s->desc.gemm.no_bias), *z;
    te__quant_call quant;
    te__quant_spec spec;
    te_result result = te__scaling_prepare(m, s->scaling, &quant);
    te__linear_call fc1 = te__linear_call_of(&quant, TE__FC1, &s->fc1, args, &s->desc.gemm, s->scaling);
    te__linear_call fc2 = te__linear_call_of(&quant, TE__FC2, &s->fc2, args, &s->desc.gemm, s->scaling);
    if (result != TE_OK) return result;
    fc1.weight = te_module_parameter(m, "fc1_weight");
    fc2.weight = te_module_parameter(m, "fc2_weight");
    fc1.bias = te__bias_of(m, "fc1_bias", s->desc.gemm.no_bias);
    fc2.bias = s->desc.gemm.return_bias ? NULL : fc2_bias;
    fc1.bias_grad_elsewhere = true;
    fc1.x = te__norm_run_for(m, &s->norm, args->input, s->desc.return_layernorm_output ? NULL : te__fused_spec(&quant, TE__FC1, fc1.weight, &spec), &quant, TE__FC1);
    z = te__linear(&fc1);
    if (s->desc.activation == TE_GELU && !quant.enabled) { /* fc2's node computes GELU's gradient as well */
        fc2.gelu_of = z;
        fc2.gelu_bias = fc1.bias;
        m->te->tape.no_grad++;
        fc2.x = te__activate(z, TE_GELU, NULL, NULL, NULL);
        m->te->tape.no_grad--;
    } else { /* the activation's backward pass gives fc1's bias gradient, and quantizes its own if it can */
        te__act_grad grad = TE_ZERO;
        grad.bias = fc1.bias;
        grad.gemm = TE__FC1;
        grad.usage = (te__wants_grad(fc1.x) ? TE_ROWWISE : 0) | (te__wants_grad(fc1.weight) ? TE_COLUMNWISE : 0);
        if (grad.usage && te__fuses(&quant)) grad.quant = &quant;
        fc2.x = te__activate_for(z, s->desc.activation, &s->desc.activation_params, te__fused_spec(&quant, TE__FC2, fc2.weight, &spec), &grad, &quant, TE__FC2);
    }
    result = te__output(m, args, te__linear(&fc2));
    if (s->desc.gemm.return_bias) args->outputs.bias = fc2_bias;
    if (s->desc.return_layernorm_output) args->outputs.ln_out = fc1.x;
    return result;
}
static void te__layernorm_mlp_destroy(te_module *m) {
    te__layernorm_mlp_module *s = (te__layernorm_mlp_module *)m->state;
    te__weight_cache_close(&s->fc1);
    te__weight_cache_close(&s->fc2);
    te__scaling_leave(s->scaling);
}
static te_result te__layernorm_mlp_reset(te_module *m) {
    te__layernorm_mlp_module *s = (te__layernorm_mlp_module *)m->state;
    te_tensor *fc1_bias = te__bias_of(m, "fc1_bias", s->desc.gemm.no_bias), *fc2_bias = te__bias_of(m, "fc2_bias", s->desc.gemm.no_bias);
    te_result result = te__norm_reset(m, &s->norm);
    if (result == TE_OK) result = te__init_weight(te_module_parameter(m, "fc1_weight"), &s->desc.gemm.init);
    if (result == TE_OK) result = te__init_weight(te_module_parameter(m, "fc2_weight"), &s->desc.output_layer_init);
    if (result == TE_OK && fc1_bias) result = te_tensor_fill(fc1_bias, 0.0);
    if (result == TE_OK && fc2_bias) result = te_tensor_fill(fc2_bias, 0.0);
    return result;
}
static const te_module_class te__layernorm_mlp_class = {"LayerNormMLP", sizeof(te__layernorm_mlp_module), te__layernorm_mlp_forward,
                                                        te__layernorm_mlp_destroy, te__layernorm_mlp_reset};

TE_API te_module *te_layernorm_mlp_create(te_ctx *te, const te_layernorm_mlp_desc *desc) {
    te_module *m;
    te__layernorm_mlp_module *s;
    int64_t fc1_rows;
    if (!te || !te__has_desc(te, desc, "te_layernorm_mlp_create") ||
        !te__layer_desc_ok(te, "te_layernorm_mlp_create", desc->hidden_size, desc->ffn_hidden_size, desc->gemm.params_dtype) ||
        !te__options_ok(te, "te_layernorm_mlp_create", TE__DESC_LAYERNORM_MLP, desc))
        return NULL;
    if ((int)desc->activation < 0 || desc->activation > TE_CLAMPED_SWIGLU) {
        te__fail(te, TE_ERR_INVALID, "te_layernorm_mlp_create: activation %d is not in te_activation", (int)desc->activation);
        return NULL;
    }
    if (desc->activation != TE_CLAMPED_SWIGLU && (desc->activation_params.limit != 0.0f || desc->activation_params.alpha != 0.0f)) {
        te__fail(te, TE_ERR_INVALID, "te_layernorm_mlp_create: activation_params limit %g and alpha %g with activation %d; TE_CLAMPED_SWIGLU (%d) alone has them: leave both 0",
                 (double)desc->activation_params.limit, (double)desc->activation_params.alpha, (int)desc->activation, (int)TE_CLAMPED_SWIGLU);
        return NULL;
    }
    m = te_module_create(te, &te__layernorm_mlp_class, desc->name ? desc->name : "layernorm_mlp");
    if (!m) return NULL;
    te__params_on(m, desc->gemm.device);
    s = (te__layernorm_mlp_module *)m->state;
    s->desc = *desc;
    if (s->desc.activation == TE_ACTIVATION_DEFAULT) s->desc.activation = TE_GELU;
    fc1_rows = desc->ffn_hidden_size * (te_activation_is_gated(s->desc.activation) ? 2 : 1);
    te__norm_open(m, &s->norm, "layer_norm_weight", "layer_norm_bias", desc->norm.normalization == TE_RMSNORM, desc->norm.zero_centered_gamma, desc->norm.eps,
                  desc->gemm.params_dtype, desc->hidden_size);
    te__add_product_weight(m, "fc1_weight", desc->gemm.params_dtype, fc1_rows, desc->hidden_size);
    if (!desc->gemm.no_bias) te__add_weight(m, "fc1_bias", desc->gemm.params_dtype, fc1_rows, 0);
    te__add_product_weight(m, "fc2_weight", desc->gemm.params_dtype, desc->hidden_size, desc->ffn_hidden_size);
    if (!desc->gemm.no_bias) te__add_weight(m, "fc2_bias", desc->gemm.params_dtype, desc->hidden_size, 0);
    s->scaling = te__scaling_create(te, m, 2);
    return te__module_built(m);
}

/* ---- Embedding ---- */

static te_result te__embedding_forward(te_module *m, te_forward_args *args) {
    return te__output(m, args, te_embedding_lookup(te_module_parameter(m, "weight"), args->input));
}
static te_result te__embedding_reset(te_module *m) {
    return te__init_weight(te_module_parameter(m, "weight"), &((te_embedding_desc *)m->state)->init);
}
static const te_module_class te__embedding_class = {"Embedding", sizeof(te_embedding_desc), te__embedding_forward, NULL, te__embedding_reset};

TE_API te_module *te_embedding_create(te_ctx *te, const te_embedding_desc *desc) {
    te_module *m;
    if (!te || !te__has_desc(te, desc, "te_embedding_create") ||
        !te__layer_desc_ok(te, "te_embedding_create", desc->num_embeddings, desc->embedding_dim, desc->params_dtype))
        return NULL;
    m = te_module_create(te, &te__embedding_class, desc->name ? desc->name : "embedding");
    if (!m) return NULL;
    te__params_on(m, desc->device);
    *(te_embedding_desc *)m->state = *desc;
    te__add_weight(m, "weight", desc->params_dtype, desc->num_embeddings, desc->embedding_dim);
    return te__module_built(m);
}

/* ---- Sequential ---- */

/* Each child gets the call with its predecessor's output as the input; the sweep releases that output after the child has run, unless the tape retains it. */
static te_result te__sequential_forward(te_module *m, te_forward_args *args) {
    te_forward_args call = *args;
    te_tensor *made[TE__OUTPUTS];
    te_result result = TE_OK;
    int i;
    memset(&call.outputs, 0, sizeof(call.outputs));
    call.outputs.out = args->input; /* the result without children */
    te__frame_begin(m->te);
    for (i = 0; i < m->num_children && result == TE_OK; i++) {
        if (call.outputs.bias || call.outputs.ln_out || call.outputs.max_logit || call.outputs.m_splits) {
            const te_module *before = m->children[i - 1];
            result = te__fail(m->te, TE_ERR_STATE, "Sequential: child \"%s\", a %s, gives its %s beside its output, and \"%s\" after it takes one input; leave out what makes "
                              "it return more (return_bias, return_layernorm_output), or write a class of your own around them",
                              before->name, before->cls->name, call.outputs.bias ? "bias" : call.outputs.ln_out ? "ln_out" : call.outputs.max_logit ? "max_logit" : "m_splits", m->children[i]->name);
            break;
        }
        call.input = call.outputs.out;
        if (!te_forward_with(m->children[i], &call)) result = te_error_code(m->te) != TE_OK ? te_error_code(m->te) : TE_ERR_STATE;
        te__outputs_list(&call.outputs, made);
        te__frame_sweep(m->te, made, TE__OUTPUTS);
    }
    te__outputs_list(&call.outputs, made);
    te__frame_end(m->te, made, result == TE_OK ? TE__OUTPUTS : 0);
    args->outputs = call.outputs;
    return result;
}
static const te_module_class te__sequential_class = {"Sequential", 0, te__sequential_forward, NULL, NULL};

/* Can these become children, each once? */
static bool te__sequential_children_ok(te_ctx *te, te_module *const *children, int n) {
    int i, k;
    if (n < 0 || (n > 0 && !children)) {
        te__fail(te, TE_ERR_INVALID, "te_sequential_create: %d children%s", n, n > 0 ? ", and the list is NULL" : "; 0 or more are possible");
        return false;
    }
    for (i = 0; i < n; i++) {
        const te_module *c = children[i];
        if (!c) {
            te__fail(te, TE_ERR_INVALID, "te_sequential_create: child %d of %d is NULL", i, n);
            return false;
        }
        if (c->te != te) {
            te__fail(te, TE_ERR_INVALID, "te_sequential_create: child %d, \"%s\", is of another context (%s); create it in this one (%s)", i, c->name,
                     c->te->device_name, te->device_name);
            return false;
        }
        for (k = 0; k < i && children[k] != c; k++) {}
        if (c->parent || k < i) {
            te__fail(te, TE_ERR_INVALID, "te_sequential_create: child %d, \"%s\", is %s%s already; a module has one place in one tree (to tie weights, give "
                     "two modules one parameter: te_module_add_parameter)", i, c->name, c->parent ? "a child of " : "in this list",
                     c->parent ? c->parent->name : "");
            return false;
        }
    }
    return true;
}

/* Destroys those that have no parent. They are chained first: one may lie in the tree of another, and one may be listed twice. */
static void te__destroy_orphans(te_module *const *children, int n) {
    te_module end, *first = &end;
    int i;
    for (i = 0; children && i < n; i++)
        if (children[i] && !children[i]->parent) {
            children[i]->parent = first;
            first = children[i];
        }
    while (first != &end) {
        te_module *m = first;
        first = m->parent;
        m->parent = NULL;
        te_module_destroy(m);
    }
}

TE_API te_module *te_sequential_create(te_ctx *te, te_module *const *children, int n) {
    te_module *m = NULL;
    char name[16];
    int i;
    if (te && te__sequential_children_ok(te, children, n)) m = te_module_create(te, &te__sequential_class, "sequential");
    for (i = 0; m && i < n; i++) {
        snprintf(name, sizeof(name), "%d", i);
        if (!te_module_add_child(m, name, children[i])) break;
    }
    if (m && i == n) {
        m = te__module_built(m);
        if (m) m->built_in = false; /* a call's options are its children's */
        return m;
    }
    te__destroy_orphans(children, n);
    te_module_destroy(m);
    return NULL;
}
