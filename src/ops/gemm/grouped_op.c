/* ops/gemm/grouped_op.c: checks the calls of grouped GEMMs. This file must not depend on the backend. */

/* Returns the arguments of te_op_gemm for a single product over all groups. Sets only arguments that grouped GEMMs have
 * too. */
static te_op_gemm_args te__grouped_one(const te_op_grouped_gemm_args *a) {
    te_op_gemm_args g = TE_ZERO;
    g.a = a->a;
    g.b = a->b;
    g.d = a->d;
    g.m = a->m;
    g.n = a->n;
    g.k = a->k;
    g.a_transposed = a->a_transposed;
    g.b_transposed = a->b_transposed;
    g.accumulate = a->accumulate;
    g.split_accumulator = a->split_accumulator;
    g.scale_a = a->scale_a;
    g.scale_b = a->scale_b;
    g.bias = a->bias;
    g.epilogue = a->epilogue;
    g.aux = a->aux;
    g.scaling_a = a->scaling_a;
    g.scaling_b = a->scaling_b;
    return g;
}

static te_result te__grouped_check_sizes(te_ctx *te, const te_op_grouped_gemm_args *a) {
    if (!a->sizes == !a->offsets)
        return te__fail(te, TE_ERR_INVALID, "grouped_gemm: %s; one of them says how large the groups are",
                        a->sizes ? "sizes and offsets are both given" : "sizes and offsets are NULL");
    return a->sizes ? te__want_numel(te, "grouped_gemm", "sizes", a->sizes, a->groups)
                    : te__want_numel(te, "grouped_gemm", "offsets", a->offsets, a->groups + 1);
}

/* Checks a stack of matrices, one for each group. It must have exactly `groups` * `rows` rows, since there are no gaps
 * between the groups. */
static te_result te__grouped_want_stack(te_ctx *te, const char *name, const te_tensor *x, int64_t groups, int64_t rows,
                                        int64_t cols) {
    char text[TE__SHAPE_TEXT];
    te_result r =
        te__gemm_want(te, "grouped_gemm", name, x, te__size_times(groups, rows), cols, "one matrix for each group");
    if (r == TE_OK && te__rows(x) != te__size_times(groups, rows))
        r = te__fail(te, TE_ERR_SHAPE, "grouped_gemm: %s is %s; %lld groups of %lld rows are needed", name,
                     te__shape_text(x, text), (long long)groups, (long long)rows);
    return r;
}

/* Checks a scale: one f32, or one f32 for each group. */
static te_result te__grouped_check_scale(te_ctx *te, const char *name, const te_tensor *scale, int64_t groups) {
    te_result r = scale ? te__want_dtype(te, "grouped_gemm", name, scale, TE_F32) : TE_OK;
    return r == TE_OK && scale && te__numel(scale) != 1 ? te__want_numel(te, "grouped_gemm", name, scale, groups) : r;
}
static te_result te__grouped_check_scales(te_ctx *te, const te_op_grouped_gemm_args *a) {
    te_result r = TE_OK;
    if (a->scaling_a == TE_SCALING_TENSOR) {
        r = te__grouped_check_scale(te, "scale_a", a->scale_a, a->groups);
        return r == TE_OK ? te__grouped_check_scale(te, "scale_b", a->scale_b, a->groups) : r;
    }
    if (a->scaling_a != TE_SCALING_BLOCK_1D || a->scaling_b != (a->along_k ? TE_SCALING_BLOCK_1D : TE_SCALING_BLOCK_2D))
        return te__fail(te, TE_ERR_UNSUPPORTED,
                        "grouped_gemm: A is scaled by %s and B by %s%s; groups take TENSOR, or BLOCK_1D for A, and for "
                        "B along rows BLOCK_2D, along k BLOCK_1D",
                        te__gemm_scaling_name(a->scaling_a), te__gemm_scaling_name(a->scaling_b),
                        a->along_k ? ", along k" : "");
    r = te__gemm_check_scale(te, "scale_a", a->scale_a, a->scaling_a, false, a->m, a->k);
    if (r == TE_OK && a->along_k)
        return te__gemm_check_scale(te, "scale_b", a->scale_b, a->scaling_b, false, a->n, a->k);
    if (r == TE_OK) r = te__want_dtype(te, "grouped_gemm", "scale_b", a->scale_b, TE_F32);
    if (r == TE_OK)
        r = te__want_numel(
            te, "grouped_gemm", "scale_b", a->scale_b,
            te__size_times(a->groups, te__size_times(te__gemm_scale_rows(a->scaling_b, false, a->n, a->k),
                                                     te__gemm_scale_ld(a->scaling_b, false, a->n, a->k))));
    return r;
}

static te_result te__check_grouped_gemm(te_ctx *te, te_op_grouped_gemm_args *a) {
    te_op_gemm_args one = te__grouped_one(a);
    te_result r;
    if (a->groups < 0 || a->m < 0 || a->n < 0 || a->k < 0 || a->groups > INT_MAX)
        return te__fail(
            te, TE_ERR_INVALID,
            "grouped_gemm: groups, m, n, k are %lld, %lld, %lld, %lld; sizes cannot be negative, nor groups that many",
            (long long)a->groups, (long long)a->m, (long long)a->n, (long long)a->k);
    if (a->a_transposed && !a->along_k)
        return te__fail(te, TE_ERR_INVALID, "grouped_gemm: A is transposed; groups along rows are rows of A's memory");
    r = a->a_transposed ? te__gemm_want(te, "grouped_gemm", "A", a->a, a->k, a->m, "[k, m], transposed,")
                        : te__gemm_want(te, "grouped_gemm", "A", a->a, a->m, a->k, "[m, k]");
    if (r == TE_OK && a->along_k)
        r = a->b_transposed ? te__gemm_want(te, "grouped_gemm", "B", a->b, a->n, a->k, "[n, k], transposed,")
                            : te__gemm_want(te, "grouped_gemm", "B", a->b, a->k, a->n, "[k, n]");
    else if (r == TE_OK)
        r = te__grouped_want_stack(te, "B", a->b, a->groups, a->b_transposed ? a->n : a->k,
                                   a->b_transposed ? a->k : a->n);
    if (r == TE_OK)
        r = a->along_k ? te__grouped_want_stack(te, "D", a->d, a->groups, a->m, a->n)
                       : te__gemm_want(te, "grouped_gemm", "D", a->d, a->m, a->n, "[m, n]");
    if (r == TE_OK) r = te__grouped_check_sizes(te, a);
    if (r == TE_OK) r = te__gemm_check_pair(te, &one);
    if (r == TE_OK) r = te__gemm_check_formats(te, &one);
    if (r == TE_OK && a->along_k && (a->bias || a->epilogue != TE_EPILOGUE_NONE || a->aux))
        r = te__fail(te, TE_ERR_INVALID,
                     "grouped_gemm: bias, aux and epilogues belong to groups along rows, and these lie along k");
    one.bias = NULL; /* a->bias has a row for each group; its size is checked below */
    if (r == TE_OK) r = te__gemm_check_epilogue(te, &one);
    if (r == TE_OK) r = te__want_numel(te, "grouped_gemm", "bias", a->bias, te__size_times(a->groups, a->n));
    if (r == TE_OK) r = te__grouped_check_scales(te, a);
    return r;
}
