/* ops/gemm/op.c: sets the default values of matrix products and checks their calls. This file must not depend on the
 * backend. */

/* Returns the number of elements from one row of the matrix x [M, N] to the next. Rows of 4-bit elements start at
 * whole bytes. Returns -1 in these cases:
 * - The last dimension is strided.
 * - The other dimensions do not collapse into one.
 * - Rows overlap. */
static int64_t te__gemm_ld(const te_tensor *x) {
    int64_t cols = te__cols(x), ld = -1, expect = 0;
    int i;
    if (te__numel(x) == 0) return te__round_up(te__max(cols, 1), x->dtype == TE_F4E2M1 ? 2 : 1);
    if (x->ndim && cols > 1 && x->stride[x->ndim - 1] != 1) return -1;
    for (i = x->ndim - 2; i >= 0; i--) {
        if (x->shape[i] == 1) continue;
        if (ld < 0)
            ld = x->stride[i];
        else if (x->stride[i] != expect)
            return -1;
        expect = x->stride[i] * x->shape[i];
    }
    if (ld < 0) ld = cols;
    if (x->dtype == TE_F4E2M1) ld = te__round_up(ld, 2);
    return ld >= cols ? ld : -1;
}

/* Checks that x is a matrix of at least `rows` x `cols`, and that each row is contiguous. */
static te_result te__gemm_want(te_ctx *te, const char *op, const char *name, const te_tensor *x, int64_t rows,
                               int64_t cols, const char *what) {
    char text[TE__SHAPE_TEXT];
    if (te__gemm_ld(x) < 0)
        return te__fail(te, TE_ERR_SHAPE,
                        "%s: %s %s is strided in a way that is no matrix with contiguous rows; te_tensor_contiguous "
                        "makes a copy that is",
                        op, name, te__shape_text(x, text));
    if (te__rows(x) < rows || te__cols(x) < cols)
        return te__fail(te, TE_ERR_SHAPE, "%s: %s is %s; %s makes it [%lld, %lld] or more", op, name,
                        te__shape_text(x, text), what, (long long)rows, (long long)cols);
    return TE_OK;
}

/* The most rows of an A that the call quantizes, and the most numbers of an A that it quantizes faster than a call
 * before it does. */
enum { TE__GEMM_QUANTIZE_ROWS = 16, TE__GEMM_QUANTIZE_NUMBERS = 15 * 1024 };

/* ---- formats and scalings ---------------------------------------------------------------------------------------- */

static bool te__gemm_is_block(te_scaling s) { return s == TE_SCALING_BLOCK_1D || s == TE_SCALING_BLOCK_2D; }
static const char *te__gemm_scaling_name(te_scaling s) {
    static const char *const names[] = {"TENSOR", "BLOCK_1D", "BLOCK_2D", "MXFP8", "NVFP4"};
    return (int)s >= 0 && (int)s < TE__COUNT(names) ? names[s] : "?";
}

/* Returns how many scaling groups one line has along k. A line is a row of op(A) or a column of op(B). */
static int64_t te__gemm_groups(te_scaling s, int64_t k) {
    return te__div_up(k, s == TE_SCALING_NVFP4 ? 16 : s == TE_SCALING_MXFP8 ? 32 : 128);
}

/* Returns the leading dimension of the scales of an operand with `size` lines of k elements. `columnwise`: MXFP8
 * codes stored as [k, size]. */
static int64_t te__gemm_scale_ld(te_scaling s, bool columnwise, int64_t size, int64_t k) {
    if (s == TE_SCALING_BLOCK_1D) return te__round_up(size, 4);
    return columnwise ? te__round_up(size, 128) : te__round_up(te__gemm_groups(s, k), 4);
}

/* Returns the number of rows of the scales, for the same arguments as te__gemm_scale_ld. */
static int64_t te__gemm_scale_rows(te_scaling s, bool columnwise, int64_t size, int64_t k) {
    if (s == TE_SCALING_BLOCK_1D) return te__gemm_groups(s, k);
    if (s == TE_SCALING_BLOCK_2D) return te__div_up(size, 128);
    return columnwise ? te__round_up(te__gemm_groups(s, k), 4) : te__round_up(size, 128);
}

/* Returns the factor f in the decoding of NVFP4: value = code * block scale * amax * f. */
static float te__gemm_nvfp4_factor(bool e4m3_max_256) { return 1.0f / (6.0f * (e4m3_max_256 ? 256.0f : 448.0f)); }

static te_result te__gemm_check_pair(te_ctx *te, const te_op_gemm_args *a) {
    te_scaling sa = a->scaling_a, sb = a->scaling_b;
    if ((int)sa < 0 || sa > TE_SCALING_NVFP4 || (int)sb < 0 || sb > TE_SCALING_NVFP4)
        return te__fail(te, TE_ERR_INVALID, "gemm: scaling_a is %d and scaling_b %d; te_scaling has 0 to %d", (int)sa,
                        (int)sb, (int)TE_SCALING_NVFP4);
    if (sa == TE_SCALING_BLOCK_2D && sb == TE_SCALING_BLOCK_2D)
        return te__fail(te, TE_ERR_INVALID,
                        "gemm: A and B both have 128 x 128 blocks (BLOCK_2D); one of them must have 1 x 128 blocks: "
                        "quantize A or B with te_op_block_quantize "
                        "and two_dimensional = false, and pass BLOCK_1D");
    if (sa != sb && !(te__gemm_is_block(sa) && te__gemm_is_block(sb)))
        return te__fail(
            te, TE_ERR_INVALID,
            "gemm: A is scaled by %s and B by %s; only BLOCK_1D and BLOCK_2D go together: quantize both by one recipe",
            te__gemm_scaling_name(sa), te__gemm_scaling_name(sb));
    if (sa != TE_SCALING_NVFP4 && (a->amax_a || a->amax_b || a->e4m3_max_256_a || a->e4m3_max_256_b))
        return te__fail(te, TE_ERR_INVALID,
                        "gemm: amax_a, amax_b and e4m3_max_256 belong to NVFP4, and the operands are scaled by %s",
                        te__gemm_scaling_name(sa));
    if (a->swizzled_scales && sa != TE_SCALING_NVFP4 && sa != TE_SCALING_MXFP8)
        return te__fail(te, TE_ERR_INVALID,
                        "gemm: swizzled_scales belongs to MXFP8 and NVFP4, and the operands are scaled by %s",
                        te__gemm_scaling_name(sa));
    return TE_OK;
}

/* Checks that the call can quantize A. */
static te_result te__gemm_check_quantize(te_ctx *te, const te_op_gemm_args *a) {
    char text[TE__SHAPE_TEXT];
    const te_dtype d = a->quantize_a;
    if (!d)
        return !a->quantize_scale && !a->quantize_amax
                   ? TE_OK
                   : te__fail(te, TE_ERR_INVALID, "gemm: quantize_scale and quantize_amax belong to quantize_a");
    if (!te__is_fp8(d) && d != TE_F4E2M1)
        return te__fail(te, TE_ERR_DTYPE, "gemm: quantize_a is %s; e4m3, e5m2 and e2m1 are possible", te_dtype_name(d));
    if (!te__is_float(a->a->dtype))
        return te__fail(te, TE_ERR_DTYPE, "gemm: quantize_a, and A is %s; f32, f16 or bf16 is needed",
                        te_dtype_name(a->a->dtype));
    if (a->m > TE__GEMM_QUANTIZE_ROWS || a->a_transposed || te__rows(a->a) != a->m || te__cols(a->a) != a->k ||
        !te__is_contiguous(a->a))
        return te__fail(te, TE_ERR_SHAPE, "gemm: quantize_a, and A is %s; a contiguous [%lld, %lld] of at most %d rows "
                        "is needed", te__shape_text(a->a, text), (long long)a->m, (long long)a->k,
                        (int)TE__GEMM_QUANTIZE_ROWS);
    if (a->scaling_a == TE_SCALING_BLOCK_2D || a->scale_a || a->amax_a ||
        ((a->quantize_scale || a->quantize_amax) && a->scaling_a != TE_SCALING_TENSOR))
        return te__fail(te, TE_ERR_INVALID,
                        "gemm: quantize_a, and A is scaled by %s, with%s scale_a or amax_a%s; blocks are 1 x 128, the "
                        "call makes scales and amaxes, and a scale is given with TENSOR alone",
                        te__gemm_scaling_name(a->scaling_a), a->scale_a || a->amax_a ? "" : "out",
                        a->quantize_scale || a->quantize_amax ? ", with quantize_scale or quantize_amax" : "");
    return TE_OK;
}

static te_result te__gemm_check_formats(te_ctx *te, const te_op_gemm_args *a) {
    te_dtype ad = a->quantize_a ? a->quantize_a : a->a->dtype, bd = a->b->dtype;
    const char *an = te_dtype_name(ad), *bn = te_dtype_name(bd), *scaling = te__gemm_scaling_name(a->scaling_a);
    bool narrow = ad == TE_F4E2M1 && bd == TE_F4E2M1, fp8 = te__is_fp8(ad) && te__is_fp8(bd);
    if (ad == TE_F8E5M2 && bd == TE_F8E5M2)
        return te__fail(te, TE_ERR_DTYPE, "gemm: A and B are both e5m2; one of them must be e4m3");
    if (a->scaling_a == TE_SCALING_NVFP4 && !narrow)
        return te__fail(te, TE_ERR_DTYPE, "gemm: A is %s and B %s; NVFP4 scales belong to e2m1 codes, of both", an, bn);
    if (a->scaling_a != TE_SCALING_NVFP4 && narrow)
        return te__fail(
            te, TE_ERR_DTYPE,
            "gemm: A and B are e2m1, scaled by %s; pass their scales and amaxes, and NVFP4 as scaling_a and scaling_b",
            scaling);
    if (a->scaling_a != TE_SCALING_TENSOR && !narrow && !fp8)
        return te__fail(te, TE_ERR_DTYPE, "gemm: A is %s and B %s; %s scales belong to fp8 codes, of both", an, bn,
                        scaling);
    if ((fp8 || narrow) && a->scaling_a != TE_SCALING_MXFP8 && (a->a_transposed || !a->b_transposed))
        return te__fail(te, TE_ERR_INVALID,
                        "gemm: %s operands must be contiguous along k (A not transposed, B transposed); pass the "
                        "transposed copy of %s",
                        narrow ? "fp4" : "fp8", a->a_transposed ? "A" : "B");
    if (fp8 || narrow) return TE_OK;
    if (!te__is_float(ad) || !te__is_float(bd))
        return te__fail(te, TE_ERR_DTYPE,
                        "gemm: A is %s and B %s; both f32, both f16, both bf16, or both fp8 is needed", an, bn);
    if (ad != bd)
        return te__fail(te, TE_ERR_DTYPE, "gemm: A is %s and B %s; te_tensor_cast one of them to the other's format",
                        an, bn);
    return TE_OK;
}

/* Checks the dtype and the shape of the scales of one operand. `columnwise` says that the operand's codes are stored as
 * [k, size]. */
static te_result te__gemm_check_scale(te_ctx *te, const char *name, const te_tensor *scale, te_scaling s,
                                      bool columnwise, int64_t size, int64_t k) {
    te_dtype dtype = s == TE_SCALING_MXFP8 ? TE_F8E8M0 : s == TE_SCALING_NVFP4 ? TE_F8E4M3 : TE_F32;
    int64_t rows = te__gemm_scale_rows(s, columnwise, size, k), cols = te__gemm_scale_ld(s, columnwise, size, k);
    char text[TE__SHAPE_TEXT];
    if (scale && scale->dtype != dtype)
        return te__fail(te, TE_ERR_DTYPE, "gemm: %s is %s; the scales of %s are %s", name, te_dtype_name(scale->dtype),
                        te__gemm_scaling_name(s), te_dtype_name(dtype));
    if (s == TE_SCALING_TENSOR) return te__want_numel(te, "gemm", name, scale, 1);
    if (te__rows(scale) != rows || te__cols(scale) != cols)
        return te__fail(te, TE_ERR_SHAPE, "gemm: %s is %s; the %s scales of %lld lines of %lld values are [%lld, %lld]",
                        name, te__shape_text(scale, text), te__gemm_scaling_name(s), (long long)size, (long long)k,
                        (long long)rows, (long long)cols);
    return TE_OK;
}

static te_result te__gemm_check_epilogue(te_ctx *te, const te_op_gemm_args *a) {
    te_result r = TE_OK;
    if ((int)a->epilogue < TE_EPILOGUE_NONE || a->epilogue > TE_EPILOGUE_DGELU)
        return te__fail(te, TE_ERR_INVALID, "gemm: epilogue is %d; te_epilogue has 0 to %d", (int)a->epilogue,
                        (int)TE_EPILOGUE_DGELU);
    if (a->epilogue == TE_EPILOGUE_NONE && a->aux)
        return te__fail(te, TE_ERR_INVALID, "gemm: aux belongs to the GELU and DGELU epilogues, and there is none");
    if (a->aux) {
        r = te__gemm_want(te, "gemm", "aux", a->aux, a->m, a->n, "D [m, n]");
        if (r == TE_OK && a->aux->dtype != a->d->dtype)
            r = te__fail(te, TE_ERR_DTYPE, "gemm: aux is %s and D %s; they must be alike", te_dtype_name(a->aux->dtype),
                         te_dtype_name(a->d->dtype));
    }
    if (r == TE_OK) r = te__want_numel(te, "gemm", "bias", a->bias, a->n);
    if (r == TE_OK) r = te__want_numel(te, "gemm", "bias_gradient", a->bias_gradient, a->n);
    if (r != TE_OK || !a->bias_gradient) return r;
    if (a->accumulate)
        return te__fail(te, TE_ERR_INVALID,
                        "gemm: bias_gradient and accumulate exclude each other; add the product to D by itself, or "
                        "call te_op_column_sum");
    if (te__rows(a->d) != a->m || te__cols(a->d) != a->n || !te__is_contiguous(a->d))
        return te__fail(te, TE_ERR_SHAPE, "gemm: with bias_gradient D must be a contiguous [%lld, %lld]",
                        (long long)a->m, (long long)a->n);
    return TE_OK;
}

/* Returns the arguments of the column sum that computes bias_gradient from D, after D has been written. */
static te_op_column_sum_args te__gemm_column_sum(const te_op_gemm_args *a) {
    te_op_column_sum_args sum = TE_ZERO;
    sum.x = a->d;
    sum.out = a->bias_gradient;
    return sum;
}

static te_result te__check_gemm(te_ctx *te, te_op_gemm_args *a) {
    te_result r;
    if (a->m < 0 || a->n < 0 || a->k < 0)
        return te__fail(te, TE_ERR_INVALID, "gemm: m, n, k are %lld, %lld, %lld; sizes cannot be negative",
                        (long long)a->m, (long long)a->n, (long long)a->k);
    r = a->a_transposed ? te__gemm_want(te, "gemm", "A", a->a, a->k, a->m, "[k, m], transposed,")
                        : te__gemm_want(te, "gemm", "A", a->a, a->m, a->k, "[m, k]");
    if (r == TE_OK)
        r = a->b_transposed ? te__gemm_want(te, "gemm", "B", a->b, a->n, a->k, "[n, k], transposed,")
                            : te__gemm_want(te, "gemm", "B", a->b, a->k, a->n, "[k, n]");
    if (r == TE_OK) r = te__gemm_want(te, "gemm", "D", a->d, a->m, a->n, "[m, n]");
    if (r == TE_OK) r = te__gemm_check_pair(te, a);
    if (r == TE_OK) r = te__gemm_check_quantize(te, a);
    if (r == TE_OK) r = te__gemm_check_formats(te, a);
    if (r == TE_OK) r = te__gemm_check_epilogue(te, a);
    if (r == TE_OK && !a->quantize_a)
        r = te__gemm_check_scale(te, "scale_a", a->scale_a, a->scaling_a, a->a_transposed, a->m, a->k);
    if (r == TE_OK) r = te__gemm_check_scale(te, "scale_b", a->scale_b, a->scaling_b, !a->b_transposed, a->n, a->k);
    if (r == TE_OK && a->amax_a && te__numel(a->amax_a) != 1) r = te__want_numel(te, "gemm", "amax_a", a->amax_a, a->m);
    if (r == TE_OK && a->amax_b && te__numel(a->amax_b) != 1) r = te__want_numel(te, "gemm", "amax_b", a->amax_b, a->n);
    return r;
}
