/* ops/gemm/grouped_cpu.c: grouped GEMMs on the CPU, with one te_op_gemm for each group. This file must not depend on
 * CUDA. */

/* Returns `rows` x `cols` elements of the matrix x from (row, col) on, as a view. The view is stored in *part.
 * Returns NULL if x is NULL. */
static te_tensor *te__grouped_part(te_tensor *part, const te_tensor *x, int64_t row, int64_t col, int64_t rows,
                                   int64_t cols) {
    int64_t ld;
    if (!x) return NULL;
    ld = te__gemm_ld(x);
    *part = *x;
    part->ndim = 2;
    part->shape[0] = rows;
    part->shape[1] = cols;
    part->stride[0] = ld;
    part->stride[1] = 1;
    part->offset += (row * ld + col) * te__dtype_size(x->dtype);
    return part;
}

/* Returns the end of group g, at most `total`. `begin` is the group's start. g = -1: returns the start of group 0. */
static int64_t te__grouped_end(const te_op_grouped_gemm_args *a, int64_t g, int64_t begin, int64_t total) {
    const te_tensor *x = a->sizes ? a->sizes : a->offsets;
    int64_t at = a->sizes ? g : g + 1, v = 0;
    if (at >= 0)
        v = x->dtype == TE_I64 ? ((const int64_t *)te__data(x))[at] : (int64_t)((const int32_t *)te__data(x))[at];
    if (a->sizes) v = te__min(te__max(v, 0), total) + begin;
    return te__min(te__max(v, begin), total);
}

/* Returns the scale of group `group` if each group has its own scale. Otherwise returns the common scale. */
static const te_tensor *te__grouped_scale(te_tensor *part, const te_tensor *scale, int64_t group) {
    return scale && te__numel(scale) != 1 ? te__grouped_part(part, scale, 0, group, 1, 1) : scale;
}

/* Computes the product of one group, whose rows (or values of k) are `begin` to `end` - 1. */
static te_result te__grouped_product(te_ctx *te, const te_op_grouped_gemm_args *a, int64_t group, int64_t begin,
                                     int64_t end) {
    te_op_gemm_args g = te__grouped_one(a);
    te_tensor pa, pb, pd, paux, pbias, psa, psb;
    /* inside_a says whether each row of A in memory has elements of all groups, and inside_b says so for B */
    bool inside_a = a->along_k && !a->a_transposed, inside_b = a->along_k && a->b_transposed;
    int64_t rows_b;
    if (a->along_k && a->accumulate && begin == end) return TE_OK;
    g.m = a->along_k ? a->m : end - begin;
    g.k = a->along_k ? end - begin : a->k;
    rows_b = a->b_transposed ? a->n : g.k;
    g.a = te__grouped_part(&pa, a->a, inside_a ? 0 : begin, inside_a ? begin : 0, a->a_transposed ? g.k : g.m,
                           a->a_transposed ? g.m : g.k);
    g.b = te__grouped_part(&pb, a->b,
                           !a->along_k ? group * rows_b
                           : inside_b  ? 0
                                       : begin,
                           inside_b ? begin : 0, rows_b, a->b_transposed ? g.k : a->n);
    g.d = te__grouped_part(&pd, a->d, a->along_k ? group * a->m : begin, 0, g.m, a->n);
    g.aux = te__grouped_part(&paux, a->aux, begin, 0, g.m, a->n);
    g.bias = te__grouped_part(&pbias, a->bias, 0, group * a->n, 1, a->n);
    if (a->scaling_a == TE_SCALING_TENSOR) {
        g.scale_a = te__grouped_scale(&psa, a->scale_a, group);
        g.scale_b = te__grouped_scale(&psb, a->scale_b, group);
    } else if (a->along_k) { /* groups begin with a block */
        g.scale_a = te__grouped_part(&psa, a->scale_a, begin / 128, 0, te__div_up(g.k, 128), te__cols(a->scale_a));
        g.scale_b = te__grouped_part(&psb, a->scale_b, begin / 128, 0, te__div_up(g.k, 128), te__cols(a->scale_b));
    } else {
        int64_t lines = te__gemm_scale_rows(a->scaling_b, false, a->n, a->k),
                ld = te__gemm_scale_ld(a->scaling_b, false, a->n, a->k);
        g.scale_a = te__grouped_part(&psa, a->scale_a, 0, begin, te__rows(a->scale_a), te__cols(a->scale_a));
        g.scale_b = te__grouped_part(&psb, a->scale_b, 0, group * lines * ld, lines, ld);
    }
    return te__cpu_gemm(te, &g);
}

static te_result te__cpu_grouped_gemm(te_ctx *te, const te_op_grouped_gemm_args *a) {
    int64_t total = a->along_k ? a->k : a->m, begin = te__grouped_end(a, -1, 0, total), end, group;
    te_result r = TE_OK;
    for (group = 0; group < a->groups && r == TE_OK; group++, begin = end) {
        end = te__grouped_end(a, group, begin, total);
        r = te__grouped_product(te, a, group, begin, end);
    }
    return r;
}
