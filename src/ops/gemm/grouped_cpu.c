/* ops/gemm/grouped_cpu.c: products by groups on the CPU: one te_op_gemm for each group. Knows tensors; must not know CUDA. */

/* rows x cols elements of x as a matrix, from element (row, col) of its [M, N] view on. A tensor of the stack, for the length of a call. */
static te_tensor te__grouped_part(const te_tensor *x, int64_t ld, int64_t row, int64_t col, int64_t rows, int64_t cols) {
    te_tensor part = *x;
    part.ndim = 2;
    part.shape[0] = rows;
    part.shape[1] = cols;
    part.stride[0] = ld;
    part.stride[1] = 1;
    part.offset += (row * ld + col) * te__dtype_size(x->dtype);
    return part;
}

/* Where group g ends, given where it starts; never beyond `total`. g = -1: where group 0 starts. */
static int64_t te__grouped_end(const te_op_grouped_gemm_args *a, int64_t g, int64_t begin, int64_t total) {
    const te_tensor *x = a->sizes ? a->sizes : a->offsets;
    int64_t at = a->sizes ? g : g + 1, v = 0;
    if (at >= 0) v = x->dtype == TE_I64 ? ((const int64_t *)te__data(x))[at] : (int64_t)((const int32_t *)te__data(x))[at];
    if (a->sizes) v = te__min(te__max(v, 0), total) + begin;
    return te__min(te__max(v, begin), total);
}

static te_result te__grouped_rows(te_ctx *te, const te_op_grouped_gemm_args *a, te_op_gemm_args *g, int64_t group, int64_t begin, int64_t end) {
    te_tensor pa, pb, pd, paux, pbias, psa, psb;
    int64_t rows_b = a->b_transposed ? a->n : a->k, cols_b = a->b_transposed ? a->k : a->n, rows = end - begin;
    g->m = rows;
    pa = te__grouped_part(a->a, te__gemm_ld(a->a), begin, 0, rows, a->k);
    pb = te__grouped_part(a->b, te__gemm_ld(a->b), group * rows_b, 0, rows_b, cols_b);
    pd = te__grouped_part(a->d, te__gemm_ld(a->d), begin, 0, rows, a->n);
    g->a = &pa;
    g->b = &pb;
    g->d = &pd;
    if (a->aux) {
        paux = te__grouped_part(a->aux, te__gemm_ld(a->aux), begin, 0, rows, a->n);
        g->aux = &paux;
    }
    if (a->bias) {
        pbias = te__grouped_part(a->bias, a->n, group, 0, 1, a->n);
        g->bias = &pbias;
    }
    if (a->scaling_a != TE_SCALING_TENSOR) {
        int64_t lines = te__gemm_scale_rows(a->scaling_b, false, a->n, a->k), ld = te__gemm_scale_ld(a->scaling_b, false, a->n, a->k);
        psa = te__grouped_part(a->scale_a, te__cols(a->scale_a), 0, begin, te__rows(a->scale_a), te__cols(a->scale_a));
        psb = te__grouped_part(a->scale_b, ld, group * lines, 0, lines, ld);
        g->scale_a = &psa;
        g->scale_b = &psb;
    }
    return te__cpu_gemm(te, g);
}

static te_result te__grouped_k(te_ctx *te, const te_op_grouped_gemm_args *a, te_op_gemm_args *g, int64_t group, int64_t begin, int64_t end) {
    te_tensor pa, pb, pd;
    int64_t k = end - begin;
    if (k == 0 && a->accumulate) return TE_OK;
    g->k = k;
    pa = a->a_transposed ? te__grouped_part(a->a, te__gemm_ld(a->a), begin, 0, k, a->m) : te__grouped_part(a->a, te__gemm_ld(a->a), 0, begin, a->m, k);
    pb = a->b_transposed ? te__grouped_part(a->b, te__gemm_ld(a->b), 0, begin, a->n, k) : te__grouped_part(a->b, te__gemm_ld(a->b), begin, 0, k, a->n);
    pd = te__grouped_part(a->d, te__gemm_ld(a->d), group * a->m, 0, a->m, a->n);
    g->a = &pa;
    g->b = &pb;
    g->d = &pd;
    return te__cpu_gemm(te, g);
}

/* The scale of group `group` if each has one; else that of all. */
static const te_tensor *te__grouped_scale(const te_op_grouped_gemm_args *a, const te_tensor *scale, int64_t group, te_tensor *part) {
    if (!scale || a->scaling_a != TE_SCALING_TENSOR || te__numel(scale) == 1) return scale;
    *part = te__grouped_part(scale, 1, group, 0, 1, 1);
    return part;
}

static te_result te__cpu_grouped_gemm(te_ctx *te, const te_op_grouped_gemm_args *a) {
    int64_t total = a->along_k ? a->k : a->m, begin = te__grouped_end(a, -1, 0, total), end, group;
    te_result r = TE_OK;
    for (group = 0; group < a->groups && r == TE_OK; group++, begin = end) {
        te_op_gemm_args g = te__grouped_one(a);
        te_tensor psa, psb;
        end = te__grouped_end(a, group, begin, total);
        g.scale_a = te__grouped_scale(a, a->scale_a, group, &psa);
        g.scale_b = te__grouped_scale(a, a->scale_b, group, &psb);
        r = a->along_k ? te__grouped_k(te, a, &g, group, begin, end) : te__grouped_rows(te, a, &g, group, begin, end);
    }
    return r;
}
