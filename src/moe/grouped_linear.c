/* moe/grouped_linear.c: the module GroupedLinear, which has one weight and one bias for each group of rows. This file
 * must not depend on how groups are chosen. */

/* Backward function of the output `bias` (see return_bias). This output [n, out] has the biases of all groups as rows.
 * Row i of the output's gradient is the gradient of bias i. */
static te_result te__stacked_backward(te_ctx *te, const void *state, te_tensor *const *saved, te_tensor *const *dy,
                                      te_tensor **dx, const bool *needs) {
    te_tensor *g = te_tensor_contiguous(dy[0]);
    int i, n = *(const int *)state;
    (void)saved, (void)needs;
    for (i = 0; g && i < n; i++) {
        dx[i] = te__alias_1d(g, i * te__cols(g) * te__dtype_size(g->dtype), g->dtype, te__cols(g));
        if (!dx[i]) return te_error_code(te);
    }
    return g ? TE_OK : te_error_code(te);
}

/* Checks the group sizes of a call. Sets *sizes to m_splits_tensor, or to NULL if the sizes are on the host. */
static te_result te__call_splits(te_module *m, const te_forward_args *args, int n, int64_t rows, te_tensor **sizes) {
    te_ctx *te = m->te;
    int64_t sum = 0;
    int i;
    *sizes = args->m_splits_tensor;
    if (!args->m_splits == !args->m_splits_tensor)
        return te__fail(
            te, TE_ERR_INVALID,
            "%s: m_splits and m_splits_tensor are %s; one of them says how many rows each of the %d groups has",
            m->cls->name, args->m_splits ? "both given" : "NULL", n);
    if (args->m_splits_tensor) {
        const te_tensor *x = args->m_splits_tensor;
        char text[TE__SHAPE_TEXT];
        if (!te__same_ctx(x, te, m->cls->name)) return te_error_code(te);
        if (te__numel(x) != n || (x->dtype != TE_I32 && x->dtype != TE_I64) || !te__is_contiguous(x) || !x->buffer)
            return te__fail(te, TE_ERR_SHAPE, "%s: m_splits_tensor is %s %s; contiguous i32 or i64 [%d] is needed",
                            m->cls->name, te_dtype_name(x->dtype), te__shape_text(x, text), n);
        return TE_OK;
    }
    for (i = 0; i < n; i++) {
        if (args->m_splits[i] < 0 || args->m_splits[i] > rows - sum)
            return te__fail(te, TE_ERR_INVALID, "%s: m_splits[%d] is %lld, and %lld of %lld rows are left for it",
                            m->cls->name, i, (long long)args->m_splits[i], (long long)(rows - sum), (long long)rows);
        sum += args->m_splits[i];
    }
    return TE_OK;
}

/* Returns the weight (`kind` is "weight") or the bias (`kind` is "bias") of group i. Writes the parameter's name to
 * `name`. */
static te_tensor *te__group_parameter(te_module *m, const char *kind, int i, char *name, size_t size) {
    const te__grouped_module *s = (const te__grouped_module *)m->state;
    snprintf(name, size, "%s%d", kind, i);
    return s->borrow ? s->borrow(m, kind, i) : te_module_parameter(m, name);
}

static te_result te__grouped_run(te__grouped_call *c, te_forward_args *args) {
    te_ctx *te = c->m->te;
    const te_grouped_linear_desc *d = &c->s->desc;
    te_tensor *input = args->input;
    char text[TE__SHAPE_TEXT], name[32];
    int64_t shape[TE_MAX_DIMS];
    bool one_by_one;
    te_result result;
    int i;
    if (!te__need_float(input, "GroupedLinear")) return te_error_code(te);
    if (input->ndim < 1 || te__cols(input) != d->in_features)
        return te__fail(te, TE_ERR_SHAPE, "GroupedLinear: the input is %s; [.., %lld] is needed",
                        te__shape_text(input, text), (long long)d->in_features);
    result = te__call_splits(c->m, args, d->num_gemms, te__rows(input), &c->sizes);
    for (i = 0; i < d->num_gemms && result == TE_OK; i++) {
        c->weights[i] = te__group_parameter(c->m, "weight", i, name, sizeof(name));
        if (!c->weights[i] || te__need_memory(c->weights[i], "GroupedLinear") != TE_OK)
            return te_error_code(te) != TE_OK ? te_error_code(te) : TE_ERR_STATE;
        if (c->weights[i]->dtype != input->dtype)
            result = te__fail(te, TE_ERR_DTYPE,
                              "GroupedLinear: the input is %s and %s %s; te_tensor_cast the input, or create the "
                              "module with params_dtype %s",
                              te_dtype_name(input->dtype), name, te_dtype_name(c->weights[i]->dtype),
                              te_dtype_name(input->dtype));
        if (c->biases) c->biases[i] = te__group_parameter(c->m, "bias", i, name, sizeof(name));
    }
    if (result == TE_OK) result = te__scaling_prepare(c->m, c->s->scaling, &c->quant);
    if (result != TE_OK) return result;
    c->splits = args->m_splits;
    c->microbatch = args->is_first_microbatch != TE_MICROBATCH_NONE ? args->is_first_microbatch
                                                                    : te__quant_of(te)->is_first_microbatch;
    one_by_one = c->splits && (c->quant.enabled || c->quant.calibrating);
    if (d->gemm.return_bias && c->biases) {
        te_tensor *all = te__stack(te, c->biases, d->num_gemms);
        args->outputs.bias = all ? te__record("grouped_bias", all, te__stacked_backward, &d->num_gemms,
                                              sizeof(d->num_gemms), c->biases, d->num_gemms, NULL, 0)
                                 : NULL;
        if (!args->outputs.bias) return te_error_code(te);
        c->biases = NULL;
    }
    input = te_tensor_contiguous(input);
    c->x = input ? te__alias_2d(input, 0, input->dtype, te__rows(input), d->in_features) : NULL;
    if (!c->x) return te_error_code(te);
    c->y = te__empty_2d(te, input->dtype, te__rows(input), d->out_features);
    if (c->splits && !one_by_one) c->sizes = te__moe_splits(te, NULL, c->splits, d->num_gemms, 1, NULL);
    if (!c->y || (!one_by_one && !c->sizes)) return te_error_code(te);
    result = one_by_one ? te__grouped_each(c, input) : te__grouped_all(c, input);
    if (result != TE_OK || input->ndim == 2) return result == TE_OK ? te__output(c->m, args, c->y) : result;
    memcpy(shape, input->shape, sizeof(shape));
    shape[input->ndim - 1] = d->out_features;
    return te__output(c->m, args, te_tensor_view(c->y, input->ndim, shape));
}
static te_result te__grouped_forward(te_module *m, te_forward_args *args) {
    te__grouped_call call = TE_ZERO;
    size_t bytes;
    te_result result;
    call.m = m;
    call.s = (te__grouped_module *)m->state;
    bytes = 2 * (size_t)call.s->desc.num_gemms * sizeof(te_tensor *);
    call.weights = (te_tensor **)te__alloc_zero(m->te, bytes);
    if (!call.weights) return TE_ERR_OUT_OF_MEMORY;
    call.biases = call.s->desc.gemm.no_bias ? NULL : call.weights + call.s->desc.num_gemms;
    result = te__grouped_run(&call, args);
    te__free(m->te, call.weights);
    return result;
}
static void te__grouped_destroy(te_module *m) {
    te__grouped_module *s = (te__grouped_module *)m->state;
    int i;
    for (i = 0; s->caches && i < s->desc.num_gemms; i++) te__weight_cache_close(&s->caches[i]);
    te__free(m->te, s->caches);
    te__scaling_leave(s->scaling);
}
static te_result te__grouped_reset(te_module *m) {
    te__grouped_module *s = (te__grouped_module *)m->state;
    te_result result = TE_OK;
    char name[32];
    int i;
    for (i = 0; !s->borrow && i < s->desc.num_gemms && result == TE_OK; i++) {
        snprintf(name, sizeof(name), "weight%d", i);
        result =
            te__init_weight(m, te_module_parameter(m, name), &s->desc.gemm.init, s->desc.parallel.parallel_mode, NULL);
        snprintf(name, sizeof(name), "bias%d", i);
        if (result == TE_OK && !s->desc.gemm.no_bias) result = te_tensor_fill(te_module_parameter(m, name), 0.0);
    }
    return result;
}
static const te_module_class te__grouped_class = {"GroupedLinear", sizeof(te__grouped_module), te__grouped_forward,
                                                  te__grouped_destroy, te__grouped_reset};

/* Adds n parameters PREFIX0, PREFIX1, ... in one buffer, each [rows, cols], or [rows] if cols is 0. In a meta module
 * the parameters get no memory. */
static void te__add_stacked(te_module *m, const char *prefix, te_dtype dtype, int n, int64_t rows, int64_t cols) {
    te_tensor *all = NULL;
    char name[32];
    int i;
    if (!dtype) dtype = TE_BF16;
    te__frame_begin(m->te);
    if (!m->meta) all = te__empty_2d(m->te, dtype, n * rows, cols ? cols : 1);
    for (i = 0; i < n; i++) {
        int before = m->num_entries;
        int64_t offset = i * rows * (cols ? cols : 1) * te__dtype_size(dtype);
        snprintf(name, sizeof(name), "%s%d", prefix, i);
        if (m->meta)
            te__add_weight(m, name, dtype, rows, cols);
        else if (all)
            te_module_add_parameter(
                m, name, cols ? te__alias_2d(all, offset, dtype, rows, cols) : te__alias_1d(all, offset, dtype, rows));
        if (m->num_entries > before) m->entries[before].stacked = true;
        if (cols && m->num_entries > before) m->entries[before].product_weight = true;
    }
    te__frame_end(m->te, NULL, 0);
}

static bool te__num_gemms_ok(te_ctx *te, const char *who, int n) {
    if (n >= 1 && n <= TE_MAX_GEMMS) return true;
    return te__not_ok(te, TE_ERR_INVALID, "%s: num_gemms is %d; 1 to %d are possible", who, n, TE_MAX_GEMMS);
}

/* Replaces in_features or out_features of *d by the size of this rank's shard. Returns false, with an error recorded,
 * if *d is invalid. */
static bool te__grouped_share(te_module *m, te_grouped_linear_desc *d) {
    const te_parallel_mode mode = d->parallel.parallel_mode;
    if (!te__parallel_open(m, &d->parallel, mode)) return false;
    if (mode == TE_PARALLEL_ROW && m->parallel.size > 1 && !d->gemm.no_bias && !d->gemm.return_bias)
        return te__not_ok(
            m->te, TE_ERR_INVALID,
            "te_grouped_linear_create: parallel_mode %d (by row) over %d ranks, and a bias: each rank has a "
            "summand of the output, and the bias belongs behind the "
            "sum; set no_bias, or return_bias and add it there",
            (int)mode, m->parallel.size);
    if (!te__divides(m, mode == TE_PARALLEL_ROW ? "in_features" : "out_features",
                     mode == TE_PARALLEL_ROW ? d->in_features : d->out_features))
        return false;
    if (mode == TE_PARALLEL_COLUMN) d->out_features = te__per_rank(m, d->out_features);
    if (mode == TE_PARALLEL_ROW) d->in_features = te__per_rank(m, d->in_features);
    return true;
}
/* Marks the biases of a row-parallel module as sequence parallel if the module uses sequence parallelism. Each rank
 * adds a bias only to its own tokens, so the gradient of the bias must be summed over the ranks. */
static void te__grouped_tag_biases(te_module *m, const te_grouped_linear_desc *d) {
    char name[32];
    int i;
    for (i = 0;
         m->parallel.sequence && d->parallel.parallel_mode == TE_PARALLEL_ROW && !d->gemm.no_bias && i < d->num_gemms;
         i++) {
        snprintf(name, sizeof(name), "bias%d", i);
        te_tensor_set_sequence_parallel(te_module_parameter(m, name), true);
    }
}

static te_module *te__grouped_create(te_ctx *te, const te_grouped_linear_desc *desc, te__group_parameter_fn borrow) {
    te_module *m;
    te__grouped_module *s;
    int i;
    if (!te || !te__has_desc(te, desc, "te_grouped_linear_create") ||
        !te__num_gemms_ok(te, "te_grouped_linear_create", desc->num_gemms) ||
        !te__layer_desc_ok(te, "te_grouped_linear_create", desc->in_features, desc->out_features,
                           desc->gemm.params_dtype))
        return NULL;
    m = te__module_named(te, &te__grouped_class, desc->name, "grouped_linear");
    if (!m) return NULL;
    s = (te__grouped_module *)m->state;
    s->desc = *desc;
    s->borrow = borrow;
    s->caches = (te__weight_cache *)te__alloc_zero(te, (size_t)desc->num_gemms * sizeof(te__weight_cache));
    if (te__grouped_share(m, &s->desc)) {
        te__params_on(m, desc->gemm.device);
        te__rng_open(m, desc->gemm.rng_tracker_name);
        if (!borrow)
            te__add_stacked(m, "weight", desc->gemm.params_dtype, desc->num_gemms, s->desc.out_features,
                            s->desc.in_features);
        if (!borrow && !desc->gemm.no_bias)
            te__add_stacked(m, "bias", desc->gemm.params_dtype, desc->num_gemms, s->desc.out_features, 0);
        for (i = 0; i < m->num_entries; i++) /* a row-parallel bias is whole on each rank */
            if (m->entries[i].tensor->ndim == 2 || desc->parallel.parallel_mode == TE_PARALLEL_COLUMN)
                te__split_mark(m, m->entries[i].tensor, desc->parallel.parallel_mode, NULL);
        te__grouped_tag_biases(m, &s->desc);
    }
    s->scaling = te__scaling_create(te, m, desc->num_gemms);
    return te__module_built(m);
}
TE_API te_module *te_grouped_linear_create(te_ctx *te, const te_grouped_linear_desc *desc) {
    return te__grouped_create(te, desc, NULL);
}
