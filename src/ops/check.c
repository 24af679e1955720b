/* ops/check.c: checks of one tensor, with their error messages, and the alignment that fast kernels need. This file
 * must not depend on any operation.
 *
 * The arguments `op` and `name` appear in the messages, for example "rmsnorm_fwd" and "gamma". Each function returns
 * TE_OK, or sets an error and returns its code. te__args_check has already checked the tensors of an operation, but it
 * accepts NULL for a tensor that is needed only with some dtypes of another tensor. */

/* Checks that x is not NULL, belongs to this context, is not quantized, and is contiguous. This is for functions
 * that are not operations: te__args_check does not check them. */
static te_result te__want(te_ctx *te, const char *op, const char *name, const te_tensor *x) {
    char text[TE__SHAPE_TEXT];
    if (!x) return te__fail(te, TE_ERR_STATE, "%s: %s is NULL", op, name);
    if (x->te != te) return te__fail(te, TE_ERR_INVALID, "%s: %s belongs to another context", op, name);
    if (x->quantized)
        return te__fail(te, TE_ERR_DTYPE, "%s: %s is a quantized tensor; dequantize it, or pass the data of one copy",
                        op, name);
    if (!te__is_contiguous(x))
        return te__fail(te, TE_ERR_SHAPE, "%s: %s %s is strided; te_tensor_contiguous makes a copy that is not", op,
                        name, te__shape_text(x, text));
    return TE_OK;
}

/* Checks that x is not NULL. The caller needs x because of the dtype of another tensor. */
static te_result te__want_given(te_ctx *te, const char *op, const char *name, const te_tensor *x) {
    return x ? TE_OK : te__fail(te, TE_ERR_STATE, "%s: %s is NULL; a tensor is needed there", op, name);
}
/* Checks that the dtype of x is `dtype`. */
static te_result te__want_dtype(te_ctx *te, const char *op, const char *name, const te_tensor *x, te_dtype dtype) {
    if (x->dtype == dtype) return TE_OK;
    return te__fail(te, TE_ERR_DTYPE, "%s: %s is %s; %s is needed", op, name, te_dtype_name(x->dtype),
                    te_dtype_name(dtype));
}

/* Checks that x has n elements, in any shape. x may be NULL. */
static te_result te__want_numel(te_ctx *te, const char *op, const char *name, const te_tensor *x, int64_t n) {
    char text[TE__SHAPE_TEXT];
    if (!x || te__numel(x) == n) return TE_OK;
    return te__fail(te, TE_ERR_SHAPE, "%s: %s is %s; %lld element%s needed", op, name, te__shape_text(x, text),
                    (long long)n, n == 1 ? " is" : "s are");
}

/* Checks the shapes of `groups` and `numbers`. `groups` has one element for each of `rows` rows: the row's group.
 * `numbers` has one element for each group. Both may be NULL. If `groups` is NULL, checks nothing. */
static te_result te__want_groups(te_ctx *te, const char *op, const te_tensor *groups, int64_t rows, const char *name,
                                 const te_tensor *numbers) {
    char text[TE__SHAPE_TEXT];
    if (!groups) return TE_OK;
    if (numbers && (numbers->ndim < 1 || te__numel(numbers) != numbers->shape[0] || te__numel(numbers) < 1 ||
                    te__numel(numbers) > INT32_MAX))
        return te__fail(te, TE_ERR_SHAPE,
                        "%s: %s is %s; with groups [n] or [n, 1] is needed, one number for each group", op, name,
                        te__shape_text(numbers, text));
    return te__want_numel(te, op, "groups", groups, rows);
}

/* Returns a * b for two sizes; 0 if one is not positive; INT64_MAX if the product does not fit. */
static int64_t te__size_times(int64_t a, int64_t b) {
    return a <= 0 || b <= 0 ? 0 : b > INT64_MAX / a ? INT64_MAX : a * b;
}

/* Checks that x and y have the same shape. */
static te_result te__want_same(te_ctx *te, const char *op, const char *x_name, const te_tensor *x, const char *y_name,
                               const te_tensor *y) {
    char a[TE__SHAPE_TEXT], b[TE__SHAPE_TEXT];
    if (te__same_shape(x, y)) return TE_OK;
    return te__fail(te, TE_ERR_SHAPE, "%s: %s is %s and %s is %s; they must be equal", op, x_name, te__shape_text(x, a),
                    y_name, te__shape_text(y, b));
}

/* Checks that x has m rows and n columns. Rows are all dimensions but the last. The message names `like` as the source
 * of m and n. */
static te_result te__want_matrix(te_ctx *te, const char *op, const char *name, const te_tensor *x, int64_t m, int64_t n,
                                 const char *like_name, const te_tensor *like) {
    char a[TE__SHAPE_TEXT], b[TE__SHAPE_TEXT];
    if (te__rows(x) == m && te__cols(x) == n) return TE_OK;
    return te__fail(te, TE_ERR_SHAPE, "%s: %s is %s and %s is %s; %s must be [%lld, %lld]", op, name,
                    te__shape_text(x, a), like_name, te__shape_text(like, b), name, (long long)m, (long long)n);
}
/* Checks that x has as many rows and columns as `like`. x may be NULL. */
static te_result te__want_like(te_ctx *te, const char *op, const char *name, const te_tensor *x, const char *like_name,
                               const te_tensor *like) {
    return x ? te__want_matrix(te, op, name, x, te__rows(like), te__cols(like), like_name, like) : TE_OK;
}

/* Checks the shape of a tensor of codes: [rows, ld] with ld >= cols. */
static te_result te__want_codes(te_ctx *te, const char *op, const char *name, const te_tensor *q, int64_t rows,
                                int64_t cols) {
    char text[TE__SHAPE_TEXT];
    if (te__rows(q) == rows && te__cols(q) >= cols) return TE_OK;
    return te__fail(te, TE_ERR_SHAPE, "%s: %s is %s; %lld rows of at least %lld columns are needed", op, name,
                    te__shape_text(q, text), (long long)rows, (long long)cols);
}
/* Checks that the row-wise and the column-wise codes of a tensor have the same dtype. Either may be NULL. */
static te_result te__want_one_format(te_ctx *te, const char *op, const char *x_name, const te_tensor *x,
                                     const char *y_name, const te_tensor *y) {
    if (!x || !y || x->dtype == y->dtype) return TE_OK;
    return te__fail(te, TE_ERR_DTYPE, "%s: %s is %s and %s is %s; both copies have one format", op, x_name,
                    te_dtype_name(x->dtype), y_name, te_dtype_name(y->dtype));
}

/* Checks the output of an operation on x [m, n]: floats `out` [m, n], or codes with a scale. Codes are `out` [m, ld],
 * `col` [n, ldc], or both. */
static te_result te__want_output(te_ctx *te, const char *op, const char *name, const te_tensor *out,
                                 const te_tensor *col, const char *col_name, const te_tensor *scale,
                                 const te_tensor *scale_inv, int64_t m, int64_t n, const te_tensor *x) {
    te_result r = TE_OK;
    if (out && te__is_float(out->dtype)) {
        if (scale || scale_inv || col)
            return te__fail(te, TE_ERR_INVALID,
                            "%s: scale, scale_inv and %s belong to an e4m3 or e5m2 %s, and %s is %s", op, col_name,
                            name, name, te_dtype_name(out->dtype));
        return te__want_matrix(te, op, name, out, m, n, "x", x);
    }
    if (out) r = te__want_codes(te, op, name, out, m, n);
    if (r == TE_OK && col) r = te__want_codes(te, op, col_name, col, n, m);
    if (r == TE_OK) r = te__want_one_format(te, op, name, out, col_name, col);
    return r == TE_OK ? te__want_given(te, op, "scale", scale) : r;
}

/* Checks that one rank's entries, start .. start + part - 1, lie within a vocabulary of *size entries. If *size is 0,
 * first sets it to `part`. `has` and `lines` are parts of the message, such as "the table has" and "rows". */
static te_result te__want_vocabulary(te_ctx *te, const char *op, const char *has, int64_t part, const char *lines,
                                     int64_t *size, int64_t start) {
    if (*size == 0) *size = part;
    if (start >= 0 && start <= *size - part) return TE_OK;
    return te__fail(te, TE_ERR_INVALID,
                    "%s: vocab_start is %lld, %s %lld %s and vocab_size is %lld; all %s must lie in the vocabulary", op,
                    (long long)start, has, (long long)part, lines, (long long)*size, lines);
}
/* Checks that every id is in lowest .. bound - 1. If the pointer `but` is not NULL, the id at `but` is also allowed.
 * `which` is an entry of TE__OUTSIDE_LIST. */
static te_result te__want_inside(te_ctx *te, int which, const te_tensor *ids, int64_t lowest, int64_t bound,
                                 const int64_t *but) {
    int64_t n = te__numel(ids), i;
    for (i = 0; i < n; i++) {
        const int64_t id = te__load_index(te__data(ids), ids->dtype, i);
        te__outside first;
        if ((id >= lowest && id < bound) || (but && id == *but)) continue;
        first.count = 1;
        first.id = id;
        first.place = i;
        first.bound = bound;
        return te__outside_fail(te, which, &first, false);
    }
    return TE_OK;
}

/* Checks that the channels (the last dimension of x) are adjacent in memory, and that no size is above 2^28. */
static te_result te__want_channels(te_ctx *te, const char *op, const char *name, const te_tensor *x) {
    char text[TE__SHAPE_TEXT];
    const int last = x->ndim - 1;
    int i;
    if (x->shape[last] > 1 && x->stride[last] != 1)
        return te__fail(te, TE_ERR_SHAPE,
                        "%s: %s %s has channels that are %lld elements apart; te_tensor_contiguous makes a copy whose "
                        "channels are adjacent",
                        op, name, te__shape_text(x, text), (long long)x->stride[last]);
    for (i = 0; i <= last; i++)
        if (x->shape[i] > 1 << 28)
            return te__fail(te, TE_ERR_UNSUPPORTED, "%s: %s is %s; sizes of at most 2^28 are possible", op, name,
                            te__shape_text(x, text));
    return TE_OK;
}
/* Checks that x is [s, b, heads, d] or [b, s, heads, d], with adjacent channels. */
static te_result te__want_heads(te_ctx *te, const char *op, const char *name, const te_tensor *x) {
    char text[TE__SHAPE_TEXT];
    if (x->ndim != 4)
        return te__fail(te, TE_ERR_SHAPE, "%s: %s is %s; [s, b, heads, d] or [b, s, heads, d] is needed", op, name,
                        te__shape_text(x, text));
    return te__want_channels(te, op, name, x);
}
/* Checks that `factors`, one for each row of `x`, are given if x has E4M3 codes of a KV cache, and only then. x has the
 * dimensions of heads and channels at last. */
enum { TE__CODED_ROW = 1024 };
static te_result te__want_factors(te_ctx *te, const char *op, const char *name, const te_tensor *x,
                                  const char *factors_name, const te_tensor *factors) {
    const bool codes = x->dtype == TE_F8E4M3;
    char a[TE__SHAPE_TEXT], b[TE__SHAPE_TEXT];
    if (!codes == !factors) {
        if (!codes) return TE_OK;
        if (x->shape[x->ndim - 1] > TE__CODED_ROW)
            return te__fail(te, TE_ERR_UNSUPPORTED, "%s: %s is %s in e4m3, which takes heads of at most %d channels",
                            op, name, te__shape_text(x, a), (int)TE__CODED_ROW);
        if (factors->ndim == x->ndim - 1 &&
            memcmp(factors->shape, x->shape, (size_t)factors->ndim * sizeof(int64_t)) == 0)
            return TE_OK;
        return te__fail(te, TE_ERR_SHAPE, "%s: %s is %s and %s is %s; each row has one factor: %s without channels", op,
                        name, te__shape_text(x, a), factors_name, te__shape_text(factors, b), name);
    }
    return codes ? te__fail(te, TE_ERR_STATE,
                            "%s: %s is e4m3 and %s is NULL; codes need the factors of their rows, e8m0, %s without "
                            "channels",
                            op, name, factors_name, name)
                 : te__fail(te, TE_ERR_INVALID, "%s: %s is %s and %s is given, which belongs to e4m3; leave it NULL",
                            op, name, te_dtype_name(x->dtype), factors_name);
}
static te_result te__want_format(te_ctx *te, const char *op, te_qkv_format format) {
    if (format == TE_SBHD || format == TE_BSHD) return TE_OK;
    return te__fail(te, format == TE_THD ? TE_ERR_UNSUPPORTED : TE_ERR_INVALID,
                    "%s: format is %d%s; TE_SBHD (0) and TE_BSHD (1) are possible", op, (int)format,
                    format == TE_THD ? " (TE_THD), which is not implemented yet" : "");
}

/* Checks that x is a random state, or NULL. */
static te_result te__want_rng(te_ctx *te, const char *op, const te_tensor *x) {
    te_result r = te__want_numel(te, op, "rng", x, 2);
    if (r == TE_OK && (uintptr_t)te__data(x) % 8)
        r = te__fail(te, TE_ERR_INVALID, "%s: rng is not at a multiple of 8 bytes", op);
    return r;
}

/* Returns whether x's first element is at a multiple of `bytes`. Returns true if x is NULL. */
static TE__NOINLINE bool te__is_aligned(const te_tensor *x, uintptr_t bytes) {
    return (uintptr_t)te__data(x) % bytes == 0;
}
/* Returns whether every row of x, of `cols` elements, starts at a multiple of `bytes`. Returns true if x is NULL. */
static TE__NOINLINE bool te__rows_aligned(const te_tensor *x, int64_t cols, int64_t bytes) {
    return te__is_aligned(x, (uintptr_t)bytes) && (!x || te__div_up(cols * te_dtype_bits(x->dtype), 8) % bytes == 0);
}
/* Returns whether eight elements can be moved at a time in each row of a view at p. `strides` is the bitwise or of the
 * strides and sizes, in elements, that must be multiples of 8. */
static bool te__view_is_aligned(const void *p, int64_t strides) {
    return (uintptr_t)p % 16 == 0 && strides % 8 == 0;
}

/* ---- which kernel ---- */

/* One tensor's conditions for a kernel that moves eight elements at a time. */
typedef struct te__eight_row {
    const te_tensor *x; /* NULL: the tensor is not given, and always passes */
    te_dtype dtype;     /* the dtype that is needed; TE_DTYPE_NONE: any */
    int bytes;          /* the address must be a multiple of this: 16, or 8 for codes */
} te__eight_row;
/* Returns why a kernel that moves eight elements at a time cannot run, or NULL if it can. `sizes` is the bitwise or of
 * the sizes that must be multiples of 8. */
static const char *te__eight_lacks(const te__plan *p, const te__eight_row *rows, int n, int64_t sizes) {
    int i;
    if (p->baseline) return "general, one element at a time: no NVRTC to compile other kernels";
    if (sizes % 8) return "general, one element at a time: sizes that are no multiples of 8";
    for (i = 0; i < n; i++)
        if (rows[i].x && rows[i].dtype && rows[i].x->dtype != rows[i].dtype)
            return "general, one element at a time: tensors of different formats";
    for (i = 0; i < n; i++)
        if (!te__is_aligned(rows[i].x, (uintptr_t)rows[i].bytes))
            return "general, one element at a time: tensors that do not start at multiples of 16 bytes";
    return NULL;
}
static int te__eight_bytes(te_dtype dtype) { return te__is_fp8(dtype) ? 8 : 16; }
