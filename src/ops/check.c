/* ops/check.c: what the front doors of all operations ask of a tensor, and how they complain; the alignment that fast kernels want.
 * Knows tensors; must not know operations.
 *
 * `op` and `name` are what the message calls them: "rmsnorm_fwd", "gamma". Each returns TE_OK or the recorded error. */

/* Present, of this context, plain (not quantized), contiguous. */
static te_result te__want(te_ctx *te, const char *op, const char *name, const te_tensor *x) {
    char text[TE__SHAPE_TEXT];
    if (!x) return te__fail(te, TE_ERR_STATE, "%s: %s is NULL", op, name);
    if (x->te != te) return te__fail(te, TE_ERR_INVALID, "%s: %s belongs to another context", op, name);
    if (x->quantized)
        return te__fail(te, TE_ERR_DTYPE, "%s: %s is a quantized tensor; dequantize it, or pass the data of one copy", op, name);
    if (!te__is_contiguous(x))
        return te__fail(te, TE_ERR_SHAPE, "%s: %s %s is strided; te_tensor_contiguous makes a copy that is not", op, name, te__shape_text(x, text));
    return TE_OK;
}

static te_result te__want_float(te_ctx *te, const char *op, const char *name, const te_tensor *x) {
    te_result r = te__want(te, op, name, x);
    if (r == TE_OK && !te__is_float(x->dtype))
        r = te__fail(te, TE_ERR_DTYPE, "%s: %s is %s; f32, f16 or bf16 is needed", op, name, te_dtype_name(x->dtype));
    return r;
}

/* n elements, in any shape. */
static te_result te__want_numel(te_ctx *te, const char *op, const char *name, const te_tensor *x, int64_t n) {
    char text[TE__SHAPE_TEXT];
    if (te__numel(x) == n) return TE_OK;
    return te__fail(te, TE_ERR_SHAPE, "%s: %s is %s; %lld element%s needed", op, name, te__shape_text(x, text), (long long)n, n == 1 ? " is" : "s are");
}
/* A float vector of n elements: a parameter or its gradient. */
static te_result te__want_vector(te_ctx *te, const char *op, const char *name, const te_tensor *x, int64_t n) {
    te_result r = te__want_float(te, op, name, x);
    return r == TE_OK ? te__want_numel(te, op, name, x, n) : r;
}
/* n numbers in f32: statistics, scales, amaxes. */
static te_result te__want_f32(te_ctx *te, const char *op, const char *name, const te_tensor *x, int64_t n) {
    te_result r = te__want(te, op, name, x);
    if (r == TE_OK && x->dtype != TE_F32) r = te__fail(te, TE_ERR_DTYPE, "%s: %s is %s; f32 is needed", op, name, te_dtype_name(x->dtype));
    return r == TE_OK ? te__want_numel(te, op, name, x, n) : r;
}

/* [m, n] when all sizes but the last are multiplied; `like` is the tensor that m and n come from. */
static te_result te__want_matrix(te_ctx *te, const char *op, const char *name, const te_tensor *x, int64_t m, int64_t n, const char *like_name,
                                 const te_tensor *like) {
    char a[TE__SHAPE_TEXT], b[TE__SHAPE_TEXT];
    if (te__rows(x) == m && te__cols(x) == n) return TE_OK;
    return te__fail(te, TE_ERR_SHAPE, "%s: %s is %s and %s is %s; %s must be [%lld, %lld]", op, name, te__shape_text(x, a), like_name,
                    te__shape_text(like, b), name, (long long)m, (long long)n);
}
/* A float tensor with the rows and columns of `like`. */
static te_result te__want_like(te_ctx *te, const char *op, const char *name, const te_tensor *x, const char *like_name, const te_tensor *like) {
    te_result r = te__want_float(te, op, name, x);
    return r == TE_OK ? te__want_matrix(te, op, name, x, te__rows(like), te__cols(like), like_name, like) : r;
}

/* An output [m, n]: float, or FP8 [m, ld] with ld >= n and its scale. x is where m and n come from. */
static te_result te__want_output(te_ctx *te, const char *op, const te_tensor *y, const te_tensor *scale, const te_tensor *scale_inv,
                                 const te_tensor *amax, int64_t m, int64_t n, const te_tensor *x) {
    char a[TE__SHAPE_TEXT], b[TE__SHAPE_TEXT];
    te_result r = te__want(te, op, "y", y);
    if (r != TE_OK) return r;
    if (te__is_float(y->dtype)) {
        if (scale || scale_inv)
            return te__fail(te, TE_ERR_INVALID, "%s: scale and scale_inv belong to an e4m3 or e5m2 y, and y is %s", op, te_dtype_name(y->dtype));
        r = amax ? te__want_f32(te, op, "amax", amax, 1) : TE_OK;
        return r == TE_OK ? te__want_matrix(te, op, "y", y, m, n, "x", x) : r;
    }
    if (!te__is_fp8(y->dtype))
        return te__fail(te, TE_ERR_DTYPE, "%s: y is %s; f32, f16, bf16, e4m3 or e5m2 is needed", op, te_dtype_name(y->dtype));
    if (te__rows(y) != m || te__cols(y) < n)
        return te__fail(te, TE_ERR_SHAPE, "%s: y is %s and x is %s; y must be [%lld, %lld or more]", op, te__shape_text(y, a), te__shape_text(x, b),
                        (long long)m, (long long)n);
    r = te__want_f32(te, op, "scale", scale, 1);
    if (r == TE_OK && scale_inv) r = te__want_f32(te, op, "scale_inv", scale_inv, 1);
    if (r == TE_OK && amax) r = te__want_f32(te, op, "amax", amax, 1);
    return r;
}

/* An optional random state. */
static te_result te__want_rng(te_ctx *te, const char *op, const te_tensor *x) {
    te_result r = x ? te__want(te, op, "rng", x) : TE_OK;
    if (!x || r != TE_OK) return r;
    if (x->dtype != TE_I64) return te__fail(te, TE_ERR_DTYPE, "%s: rng is %s; i64 is needed", op, te_dtype_name(x->dtype));
    r = te__want_numel(te, op, "rng", x, 2);
    if (r == TE_OK && (uintptr_t)te__data(x) % 8) r = te__fail(te, TE_ERR_INVALID, "%s: rng is not at a multiple of 8 bytes", op);
    return r;
}

/* The address of x's first element is a multiple of `bytes`. True for NULL: nothing will be read there. */
static bool te__is_aligned(const te_tensor *x, uintptr_t bytes) { return (uintptr_t)te__data(x) % bytes == 0; }
