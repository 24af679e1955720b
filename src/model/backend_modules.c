/* model/backend_modules.c: creates Linear and RMSNorm by the name of a backend. This file must not depend on files on
 * disk. */

/* ---- shapes without memory ---- */

TE_API bool te_is_tensor_unallocated(const te_tensor *x) { return te__is_unallocated(x); }
TE_API void te_set_empty_is_unallocated(te_ctx *te, bool on) {
    if (te) te->empty_is_unallocated = on;
}
/* The forward function of a module for an input without memory. Computes only the shape of the output. `in` is the
 * number of input features, `out` the number of output features. */
static te_result te__module_shape(te_module *m, te_forward_args *args, int64_t in, int64_t out) {
    return te__shape_forward(m, args, in, args->input->ndim > 1 ? args->input->shape[0] : 1, out);
}

/* ---- Linear ---- */

static te_result te__torch_linear_forward(te_module *m, te_forward_args *args) {
    te_tensor *weight = te_module_parameter(m, "weight");
    if (te__is_unallocated(args->input)) return te__module_shape(m, args, weight->shape[1], weight->shape[0]);
    return te__output(m, args, te_linear(args->input, weight, te_module_parameter(m, "bias")));
}
/* Fills the parameters as the te_init in m->state says. The default is that of torch.nn.Linear: weight and bias uniform
 * in +- 1 / sqrt(in_features). */
static te_result te__torch_linear_reset(te_module *m) {
    const te_init *init = (const te_init *)m->state;
    te_tensor *const parameter[2] = {te_module_parameter(m, "weight"), te_module_parameter(m, "bias")};
    te_result result = TE_OK;
    int i;
    if (init->std > 0.0f || init->no_init || init->init_method) {
        result = te__init_weight(m, parameter[0], init, TE_PARALLEL_NONE, NULL);
        return result == TE_OK && parameter[1] ? te_tensor_fill(parameter[1], 0.0) : result;
    }
    for (i = 0; i < 2 && parameter[i] && result == TE_OK; i++) { /* not parameters that the program has added */
        te_op_random_args args = TE_ZERO;
        te__draw draw = te__rng_draw(m->te, 1);
        args.dst = parameter[i];
        args.b = (float)(1.0 / sqrt((double)parameter[0]->shape[1]));
        args.a = -args.b;
        args.seed = draw.seed;
        args.offset = draw.offset;
        args.rng = draw.rng;
        result = te_op_random(m->te, &args);
    }
    return result;
}
static const te_module_class te__torch_linear_class = {"TorchLinear", sizeof(te_init), te__torch_linear_forward, NULL,
                                                       te__torch_linear_reset};

static te_module *te__torch_linear_create(te_ctx *te, const te_linear_module_desc *desc) {
    te_module *m = te__module_named(te, &te__torch_linear_class, desc->name, "linear");
    if (!m) return NULL;
    *(te_init *)m->state = desc->init;
    te__params_on(m, desc->device);
    te__add_weight(m, "weight", desc->dtype, desc->out_features, desc->in_features);
    if (desc->bias) te__add_weight(m, "bias", desc->dtype, desc->out_features, 0);
    return te__module_built(m);
}
/* Records the error of a backend for which te.h has no module; returns NULL. */
static te_module *te__no_backend(te_ctx *te, const char *who, const char *field, int value, const char *possible) {
    if (strcmp(te_backend_name(field, value), "quack") == 0)
        te__fail(te, TE_ERR_UNSUPPORTED,
                 "%s: %s='quack' names a package of kernels outside of te.h; %s are possible, and existing modules are "
                 "not swapped for it",
                 who, field, possible);
    else te__fail(te, TE_ERR_INVALID, "%s: %s is %d, no backend; %s are possible", who, field, value, possible);
    return NULL;
}
TE_API te_module *te_initialize_linear_module(te_ctx *te, const te_linear_module_desc *desc) {
    static const char who[] = "te_initialize_linear_module";
    te_backend_capabilities has = te_backend_get_capabilities(te);
    te_linear_desc d = TE_ZERO;
    te_linear_backend impl;
    if (!te || !te__has_desc(te, desc, who) ||
        !te__layer_desc_ok(te, who, desc->in_features, desc->out_features, desc->dtype))
        return NULL;
    impl = te__linear_backend_of(desc->linear_impl, &has);
    if (impl == TE_LINEAR_TORCH) return te__torch_linear_create(te, desc);
    if (impl != TE_LINEAR_TE) return te__no_backend(te, who, "linear", (int)impl, "te and torch");
    d.in_features = desc->in_features;
    d.out_features = desc->out_features;
    d.gemm.no_bias = !desc->bias;
    d.gemm.device = desc->device;
    d.gemm.params_dtype = desc->dtype;
    d.gemm.init = desc->init;
    d.name = desc->name;
    return te_linear_create(te, &d);
}

/* ---- RMSNorm ---- */

TE_API te_tensor *te_float32_rms_norm(te_tensor *x, te_tensor *weight, float eps) {
    return te_rmsnorm(x, weight, eps, false);
}

static const te_module_class te__float32_rms_norm_class = {"Float32RMSNorm", sizeof(te__norm_params), te__norm_forward,
                                                           NULL, te__norm_module_reset};
static const te_module_class te__torch_rms_norm_class = {"TorchRMSNorm", sizeof(te__norm_params), te__norm_forward,
                                                         NULL, te__norm_module_reset};

static te_module *te__rms_norm_create(te_ctx *te, const te_module_class *cls, const te_rms_norm_module_desc *desc) {
    te_module *m = te__module_named(te, cls, desc->name, "rmsnorm");
    te_norm_options o = TE_ZERO;
    te__norm_params *n;
    if (!m) return NULL;
    n = (te__norm_params *)m->state;
    o.eps = desc->eps;
    te__params_on(m, desc->device);
    te__norm_open(m, n, "weight", NULL, true, &o, desc->dtype, desc->dim);
    n->rounded = cls == &te__torch_rms_norm_class;
    return te__module_built(m);
}
static bool te__rms_norm_desc_ok(te_ctx *te, const char *who, const te_rms_norm_module_desc *desc) {
    return te && te__has_desc(te, desc, who) && te__layer_desc_ok(te, who, desc->dim, desc->dim, desc->dtype);
}
TE_API te_module *te_float32_rms_norm_create(te_ctx *te, const te_rms_norm_module_desc *desc) {
    return te__rms_norm_desc_ok(te, "te_float32_rms_norm_create", desc)
               ? te__rms_norm_create(te, &te__float32_rms_norm_class, desc)
               : NULL;
}
TE_API te_module *te_initialize_rms_norm_module(te_ctx *te, const te_rms_norm_module_desc *desc) {
    static const char who[] = "te_initialize_rms_norm_module";
    te_norm_desc d = TE_ZERO;
    te_rms_norm_backend impl;
    if (!te__rms_norm_desc_ok(te, who, desc)) return NULL;
    impl = te__rms_norm_backend_of(desc->rms_norm_impl);
    if (impl == TE_RMS_NORM_TORCH_FP32) return te__rms_norm_create(te, &te__float32_rms_norm_class, desc);
    if (impl == TE_RMS_NORM_TORCH) return te__rms_norm_create(te, &te__torch_rms_norm_class, desc);
    if (impl != TE_RMS_NORM_TE) return te__no_backend(te, who, "rms_norm", (int)impl, "te, torch and torch_fp32");
    d.hidden_size = desc->dim;
    d.norm.eps = desc->eps;
    d.params_dtype = desc->dtype;
    d.device = desc->device;
    d.name = desc->name;
    return te_rmsnorm_create(te, &d);
}
