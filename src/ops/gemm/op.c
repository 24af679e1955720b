/* ops/gemm/op.c: the front door of matrix products: defaults and checks. Knows tensors; must not know which backend runs. */

/* Elements from one row of the [M, N] view to the next; -1 when there is no such number: the last dimension is strided, the
 * leading ones do not collapse into one, or rows overlap. */
static int64_t te__gemm_ld(const te_tensor *x) {
    int64_t cols = te__cols(x), ld = -1, expect = 0;
    int i;
    if (te__numel(x) == 0) return te__max(cols, 1);
    if (x->ndim && cols > 1 && x->stride[x->ndim - 1] != 1) return -1;
    for (i = x->ndim - 2; i >= 0; i--) {
        if (x->shape[i] == 1) continue;
        if (ld < 0)
            ld = x->stride[i];
        else if (x->stride[i] != expect)
            return -1;
        expect = x->stride[i] * x->shape[i];
    }
    return ld < 0 ? cols : ld >= cols ? ld : -1;
}

/* A plain matrix of this context of at least rows x cols. */
static te_result te__gemm_want(te_ctx *te, const char *name, const te_tensor *x, int64_t rows, int64_t cols, const char *what) {
    char text[TE__SHAPE_TEXT];
    if (!x) return te__fail(te, TE_ERR_INVALID, "gemm: %s is NULL", name);
    if (x->te != te) return te__fail(te, TE_ERR_INVALID, "gemm: %s belongs to another context", name);
    if (x->quantized) return te__fail(te, TE_ERR_DTYPE, "gemm: %s is a quantized tensor; pass the data of one copy, and its scale_inv", name);
    if (te__gemm_ld(x) < 0)
        return te__fail(te, TE_ERR_SHAPE, "gemm: %s %s is strided in a way that is no matrix with contiguous rows; te_tensor_contiguous makes a copy that is",
                        name, te__shape_text(x, text));
    if (te__rows(x) < rows || te__cols(x) < cols)
        return te__fail(te, TE_ERR_SHAPE, "gemm: %s is %s; %s makes it [%lld, %lld] or more", name, te__shape_text(x, text), what, (long long)rows, (long long)cols);
    return TE_OK;
}

static te_result te__gemm_check_formats(te_ctx *te, const te_gemm_args *a) {
    te_dtype ad = a->a->dtype, bd = a->b->dtype;
    const char *an = te_dtype_name(ad), *bn = te_dtype_name(bd);
    if (te__is_fp8(ad) && te__is_fp8(bd)) {
        if (ad == TE_F8E5M2 && bd == TE_F8E5M2)
            return te__fail(te, TE_ERR_DTYPE, "gemm: A and B are both e5m2; one of them must be e4m3");
        if (a->a_transposed || !a->b_transposed)
            return te__fail(te, TE_ERR_INVALID, "gemm: fp8 operands must be contiguous along k (A not transposed, B transposed); pass the transposed copy of %s",
                            a->a_transposed ? "A" : "B");
        return TE_OK;
    }
    if (!te__is_float(ad) || !te__is_float(bd))
        return te__fail(te, TE_ERR_DTYPE, "gemm: A is %s and B %s; both f32, both f16, both bf16, or both fp8 is needed", an, bn);
    if (ad != bd) return te__fail(te, TE_ERR_DTYPE, "gemm: A is %s and B %s; te_tensor_cast one of them to the other's format", an, bn);
    return TE_OK;
}

static te_result te__gemm_check_epilogue(te_ctx *te, const te_gemm_args *a) {
    te_result r = TE_OK;
    if ((int)a->epilogue < TE_EPILOGUE_NONE || a->epilogue > TE_EPILOGUE_DGELU)
        return te__fail(te, TE_ERR_INVALID, "gemm: epilogue is %d; te_epilogue has 0 to %d", (int)a->epilogue, (int)TE_EPILOGUE_DGELU);
    if (a->epilogue == TE_EPILOGUE_NONE && a->aux) return te__fail(te, TE_ERR_INVALID, "gemm: aux belongs to the GELU and DGELU epilogues, and there is none");
    if (a->epilogue == TE_EPILOGUE_DGELU && !a->aux)
        return te__fail(te, TE_ERR_INVALID, "gemm: aux is NULL; the DGELU epilogue reads what the GELU one wrote there");
    if (a->aux) {
        r = te__gemm_want(te, "aux", a->aux, a->m, a->n, "D [m, n]");
        if (r == TE_OK && a->aux->dtype != a->d->dtype)
            r = te__fail(te, TE_ERR_DTYPE, "gemm: aux is %s and D %s; they must be alike", te_dtype_name(a->aux->dtype), te_dtype_name(a->d->dtype));
    }
    if (r == TE_OK && a->bias) r = te__want_vector(te, "gemm", "bias", a->bias, a->n);
    return r;
}

static te_result te__check_gemm(te_ctx *te, te_gemm_args *a) {
    te_result r;
    if (a->m < 0 || a->n < 0 || a->k < 0)
        return te__fail(te, TE_ERR_INVALID, "gemm: m, n, k are %lld, %lld, %lld; sizes cannot be negative", (long long)a->m, (long long)a->n, (long long)a->k);
    r = a->a_transposed ? te__gemm_want(te, "A", a->a, a->k, a->m, "[k, m], transposed,") : te__gemm_want(te, "A", a->a, a->m, a->k, "[m, k]");
    if (r == TE_OK) r = a->b_transposed ? te__gemm_want(te, "B", a->b, a->n, a->k, "[n, k], transposed,") : te__gemm_want(te, "B", a->b, a->k, a->n, "[k, n]");
    if (r == TE_OK) r = te__gemm_want(te, "D", a->d, a->m, a->n, "[m, n]");
    if (r == TE_OK) r = te__gemm_check_formats(te, a);
    if (r == TE_OK && !te__is_float(a->d->dtype))
        r = te__fail(te, TE_ERR_DTYPE, "gemm: D is %s; f32, f16 or bf16 is needed", te_dtype_name(a->d->dtype));
    if (r == TE_OK) r = te__gemm_check_epilogue(te, a);
    if (r == TE_OK && a->scale_a) r = te__want_f32(te, "gemm", "scale_a", a->scale_a, 1);
    if (r == TE_OK && a->scale_b) r = te__want_f32(te, "gemm", "scale_b", a->scale_b, 1);
    if (r != TE_OK) return r;
    te__touch(a->d);
    if (a->epilogue == TE_EPILOGUE_GELU) te__touch(a->aux);
    return TE_OK;
}
