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

/* Returns true if te_op_gemm can quantize the rows of x by `spec` on its own and multiply them by copy b. The caller
 * sees to it that nobody else reads the quantized x. */
static bool te__product_quantizes(const te_tensor *x, const te__quant_spec *spec, const te__quant_copy *b) {
    const te__quant_class *cls = spec->cls;
    return !x->quantized && te__numel(x) > 0 && te__rows(x) <= TE__GEMM_QUANTIZE_ROWS && te__is_contiguous(x) &&
           cls->form == TE__FORM_CODES && cls->facts & TE__IN_PRODUCTS && !spec->two_dimensional &&
           !spec->stochastic && !spec->row_scaled && !spec->four_over_six && !spec->sizes && !spec->x_amax &&
           !spec->bias_grad && (cls->facts & TE__SCALE_GIVEN || !spec->amax) && te__group_size(spec->group) <= 1 && b &&
           b->data && te__same_layout(cls, b->cls) && b->swizzled == spec->swizzled && !b->rht;
}

/* Fills in *g for D = x B^T, where the product quantizes x by `spec` (te__product_quantizes). See te__product. */
static void te__product_quantizing(te_tensor *x, const te__quant_spec *spec, const te_tensor *b, te_op_gemm_args *g) {
    const te__quant_copy *cb = te__copy_of(b, TE_ROWWISE);
    g->m = te__rows(x);
    g->k = te__cols(x);
    g->n = te__rows(b);
    g->a = x;
    g->b = cb->data;
    g->b_transposed = true;
    g->scale_b = cb->scale;
    g->amax_b = cb->amax;
    g->scaling_a = spec->cls->scaling[0];
    g->scaling_b = te__scaling_kind(cb);
    g->swizzled_scales = cb->swizzled;
    g->e4m3_max_256_a = spec->e4m3_max_256;
    g->e4m3_max_256_b = cb->e4m3_max_256;
    g->quantize_a = spec->dtype;
    g->quantize_epsilon = spec->epsilon;
    g->quantize_power_of_two = te__gemm_is_block(g->scaling_a) ? !spec->fp32_scales : spec->power_of_two;
    if (spec->cls->facts & TE__SCALE_GIVEN) {
        g->quantize_scale = spec->scale;
        g->quantize_amax = spec->amax;
    }
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
