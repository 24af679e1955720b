/* lora/dora.c: DoRA on Linears (Liu et al. 2024): a trained magnitude m for each row of V = W + (alpha / dim) * B A.
 * This file must not depend on how adapters are chosen, or on files on disk.
 *
 * Computes y = x V^T * m / |V| + b, where |V| has the L2 norms of the rows. The backward pass treats |V| as a constant,
 * as in the paper (section 4.3) and in peft. */

#define TE__MAGNITUDE "lora_magnitude_vector"
/* Added to the squared norm of a row, so that a row of zeros gets the norm 1e-15. */
#define TE__DORA_EPS 1e-30f

/* Multiplies column i of u [.., N] by g[i], f32 [N]. Differentiable in u and g. */
static te_tensor *te__scale_columns(te_tensor *u, te_tensor *g) {
    te_tensor *y;
    if (te__numel(u) == 0) return u;
    y = te__view_2d(te_tensor_contiguous(u), te__rows(u), te__cols(u));
    y = te_tensor_contiguous(te_tensor_transpose(y, 0, 1));
    y = te_tensor_contiguous(te_tensor_transpose(te__scale_rows(y, g), 0, 1));
    return te_tensor_view(y, u->ndim, u->shape);
}

/* Returns V, f32 [out, in], not recorded on the tape. */
static te_tensor *te__dora_weight(te_module *m) {
    const te__linear_module *s = (const te__linear_module *)m->state;
    const te__lora_site site = te__lora_site_of(m);
    te_tensor *v;
    m->te->tape.no_grad++;
    v = te__lora_sum(te__product_weight(m, &s->params), te__lora_delta(&site, 0), te__lora_factor(te__lora_of(m)));
    m->te->tape.no_grad--;
    return v;
}
/* Scales every row of v, f32, in place to L2 norm 1. Returns the reciprocals of the old norms, f32 [rows]. */
static te_tensor *te__dora_normalize(te_tensor *v) {
    te_op_l2normalize_fwd_args args = TE_ZERO;
    args.x = args.y = v;
    args.rnorm = v ? te__empty_1d(v->te, TE_F32, te__rows(v)) : NULL;
    args.eps = TE__DORA_EPS;
    return args.rnorm && te_op_l2normalize_fwd(v->te, &args) == TE_OK ? args.rnorm : NULL;
}

/* ---- the magnitude ---- */

static te_result te__magnitude_forward(te_module *m, te_forward_args *args) {
    (void)args;
    return te__fail(m->te, TE_ERR_STATE, "%s: it is a vector beside its Linear's adapters; run the Linear",
                    m->cls->name);
}
/* Sets the magnitudes to the norms of the rows of V, so that they do not change the Linear's output. Waits for the
 * device. */
static te_result te__magnitude_reset(te_module *m) {
    te_tensor *weight = te_module_parameter(m, "weight"), *rnorm, *value;
    const size_t bytes = te_tensor_bytes(weight) / (size_t)te__dtype_size(weight->dtype) * sizeof(float);
    float *host = (float *)te__alloc(m->te, bytes);
    te_result result;
    int64_t i;
    if (!host) return TE_ERR_OUT_OF_MEMORY;
    te__frame_begin(m->te);
    rnorm = te__dora_normalize(te__dora_weight(m->parent));
    result = rnorm ? te_tensor_to_host(rnorm, host) : te_error_code(m->te);
    for (i = 0; i < te__numel(weight) && result == TE_OK; i++)
        host[i] = host[i] < 1e14f ? te__floats_divide(1.0, (double)host[i]) : 0.0f;
    value = result == TE_OK ? te__empty_like(weight, TE_F32) : NULL;
    if (result == TE_OK) result = value ? te_tensor_copy_from_host(value, host) : te_error_code(m->te);
    if (result == TE_OK) result = te_tensor_copy(weight, value);
    te__frame_end(m->te, NULL, 0);
    te__free(m->te, host);
    return result;
}
static const te_module_class te__magnitude_class = {"Magnitude", 0, te__magnitude_forward, NULL, te__magnitude_reset};

/* Adds the magnitude child to Linear m, which has lora_A and lora_B already. */
static bool te__magnitude_add(te_module *m, te_dtype dtype) {
    const te__linear_module *s = (const te__linear_module *)m->state;
    te_module *child = te_module_create(m->te, &te__magnitude_class, TE__MAGNITUDE);
    if (!child) return false;
    te__params_on(child, m->meta ? TE_PARAMS_META : TE_PARAMS_DEFAULT);
    te__add_weight(child, "weight", dtype, s->desc.out_features, 0);
    if (!te__lora_attach(m, child)) return false;
    child->maker = NULL;
    child->built_in = true;
    return m->te->error_code == TE_OK && (m->meta || te__magnitude_reset(child) == TE_OK);
}

/* ---- forward, and merging ---- */

/* Returns the row factors magnitude / |V|, f32 [out], differentiable in the magnitude. */
static te_tensor *te__dora_factors(te_module *m) {
    te_tensor *weight = te_module_parameter(te_module_find(m, TE__MAGNITUDE), "weight"), *factors;
    if (!weight) return te__no_tensor(m->te, TE_ERR_STATE, "%s: its child \"" TE__MAGNITUDE "\" is gone", m->cls->name);
    factors = te__dora_normalize(te__dora_weight(m));
    const int64_t n = te__numel(weight);
    weight = factors ? te__view_2d(te_tensor_cast(weight, TE_F32), n, 1) : NULL;
    return te_tensor_view(te__scale_rows(weight, factors), 1, &n);
}
/* Returns x W^T, the Linear's own product, without bias. */
static te_tensor *te__dora_base(te_module *m, te_forward_args *args, te_tensor *x) {
    te__quant_call quant;
    te__linear_call call;
    if (te__linear_begin(m, args, &quant, &call) != TE_OK) return NULL;
    call.x = x;
    return te__linear_biased(&call, NULL, false);
}
/* Forward of a Linear with DoRA:
 *
 *     y = x W^T + b + (x' V^T * m / |V| - x' W^T)
 *
 * If dropout comes before lora_A, x' is dropout(x); otherwise x' is x. As in peft, x W^T has no dropout. */
static te_result te__dora_forward(te_module *m, te_forward_args *args) {
    const te__linear_module *s = (const te__linear_module *)m->state;
    const te__lora *l = te__lora_of(m);
    const bool drops = te_module_is_training(m) && l->dropout > 0.0f && l->position == TE_DROPOUT_PRE;
    te_tensor *x = args->input, *base, *u, *y, *bias;
    te_result result = te__lora_call_ok(m, args);
    if (result != TE_OK || te__is_unallocated(x)) return result == TE_OK ? m->cls->forward(m, args) : result;
    if (drops && x->quantized) x = te_dequantize(x, x->dtype);
    if (drops && x) x = te_dropout(x, l->dropout);
    base = x ? te__dora_base(m, args, x) : NULL;
    u = base ? te__lora_cast(te__lora_product(m, args, x, true), base->dtype) : NULL;
    u = te_add(base, u);
    y = te__dora_factors(m);
    y = u && y ? te__scale_columns(u, y) : NULL;
    if (y && drops) y = te_add(te_add(y, te_scale(base, -1.0f)), te__dora_base(m, args, args->input));
    bias = te__product_bias(m, &s->params);
    if (y && bias && !s->desc.gemm.return_bias) y = te_bias_dropout_add(y, bias, NULL, 0.0f);
    if (s->desc.gemm.return_bias) args->outputs.bias = bias;
    return te__output(m, args, y);
}
/* Computes rows of the merged weight. `v` has the rows of V from row `first` on, in f32. Scales each row to its
 * magnitude. Overwrites v. */
static te_tensor *te__dora_merged(te_module *m, te_tensor *v, int64_t first) {
    te_tensor *weight = te_module_parameter(te_module_find(m, TE__MAGNITUDE), "weight");
    if (!v || !weight || !te__dora_normalize(v)) return NULL;
    weight = te_tensor_narrow(weight, 0, first, te__rows(v));
    return te__scale_rows(v, te_tensor_cast(te_tensor_contiguous(weight), TE_F32));
}
