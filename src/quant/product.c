/* quant/product.c: a product of two matrices, each plain or quantized. If a kernel can multiply the quantized copies,
 * it gets them. Otherwise both matrices are decoded. This file must not depend on recipes, modules or the tape. */

static te_scaling te__scaling_kind(const te__quant_copy *c) { return c->cls->scaling[c->two_dimensional]; }

/* Returns true if a kernel can multiply these two copies. */
static bool te__copies_meet(const te__quant_copy *a, const te__quant_copy *b) {
    if (!a || !b || !a->data || !b->data) return false;
    return a->cls->facts & TE__IN_PRODUCTS && te__same_layout(a->cls, b->cls) && a->swizzled == b->swizzled &&
           a->rht == b->rht && (!a->rht || a->no_random_sign_mask == b->no_random_sign_mask);
}

/* Returns x as a plain matrix. A quantized x is decoded from copy `which` if that exists, else from the other copy. */
static te_tensor *te__plain_factor(te_tensor *x, int which, te_dtype dtype) {
    if (!x->quantized) return x;
    return te__copy_dequantize(x, te__copy_of(x, which)->data ? which : TE_ROWWISE + TE_COLUMNWISE - which, dtype);
}

/* Computes D = op(A) op(B), and writes D to g->d. The caller sets g->bias, g->accumulate and g->split_accumulator. A is
 * [m, k], or [k, m] if a_transposed. B is [k, n], or [n, k] if b_transposed. A quantized matrix is read from its copy
 * that is contiguous along k. */
static te_result te__product(te_ctx *te, te_tensor *a, bool a_transposed, te_tensor *b, bool b_transposed,
                             te_op_gemm_args *g) {
    int a_which = a_transposed ? TE_COLUMNWISE : TE_ROWWISE, b_which = b_transposed ? TE_ROWWISE : TE_COLUMNWISE;
    const te__quant_copy *ca = a->quantized ? te__copy_of(a, a_which) : NULL,
                         *cb = b->quantized ? te__copy_of(b, b_which) : NULL;
    te_result result;
    g->m = a_transposed ? te__cols(a) : te__rows(a);
    g->k = a_transposed ? te__rows(a) : te__cols(a);
    g->n = b_transposed ? te__rows(b) : te__cols(b);
    te__frame_begin(te);
    if (te__copies_meet(ca, cb)) {
        g->a = ca->data;
        g->b = cb->data;
        g->a_transposed = a_transposed && !(ca->cls->facts & TE__TRANSPOSED);
        g->b_transposed = b_transposed || cb->cls->facts & TE__TRANSPOSED;
        g->scale_a = ca->scale;
        g->scale_b = cb->scale;
        g->scaling_a = te__scaling_kind(ca);
        g->scaling_b = te__scaling_kind(cb);
        g->amax_a = ca->amax;
        g->amax_b = cb->amax;
        g->swizzled_scales = ca->swizzled;
        g->e4m3_max_256_a = ca->e4m3_max_256;
        g->e4m3_max_256_b = cb->e4m3_max_256;
        if (ca->rht) g->k = te__round_up(g->k, 16); /* the Hadamard transform of each 16 values also fills the padding
                                                     * of k, so the padding takes part in the product */
    } else {
        te_dtype dtype = a->quantized && !b->quantized ? b->dtype : a->dtype;
        g->a = te__plain_factor(a, a_which, dtype);
        g->b = te__plain_factor(b, b_which, dtype);
        g->a_transposed = a_transposed;
        g->b_transposed = b_transposed;
    }
    result = g->a && g->b ? te_op_gemm(te, g) : te_error_code(te);
    te__frame_end(te, NULL, 0);
    return result;
}
