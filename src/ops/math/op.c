/* ops/math/op.c: checks the calls of copy, fill, random, axpby, sums and embedding. This file must not depend on the
 * backend. */

/* ---- copy ---- */

static bool te__is_integer(te_dtype dtype) { return dtype == TE_U8 || dtype == TE_I32 || dtype == TE_I64; }

/* Returns whether a copy moves the bytes as they are. */
static bool te__copy_is_raw(te_dtype src, te_dtype dst) {
    return src == dst || (dst == TE_U8 && te_dtype_bits(src) == 8);
}

static te_result te__check_copy(te_ctx *te, te_op_copy_args *a) {
    te_result result = te__want_same(te, "copy", "src", a->src, "dst", a->dst);
    if (result != TE_OK) return result;
    if (!te__copy_is_raw(a->src->dtype, a->dst->dtype) &&
        !((te__is_float(a->src->dtype) || te__is_integer(a->src->dtype)) &&
          (te__is_float(a->dst->dtype) || te__is_integer(a->dst->dtype))))
        return te__fail(te, TE_ERR_DTYPE,
                        "copy: %s to %s; 8-bit floats and i16 copy to their own format, 8-bit floats also to u8 "
                        "(te_quantize and te_dequantize convert)",
                        te_dtype_name(a->src->dtype), te_dtype_name(a->dst->dtype));
    return TE_OK;
}

/* The dimensions and strides of two arrays of the same shape, merged where both allow it. At least one dimension
 * remains. The last dimension has dst's smallest stride. */
typedef struct te__copy_walk {
    int ndim;
    int64_t shape[TE_MAX_DIMS], src[TE_MAX_DIMS], dst[TE_MAX_DIMS];
} te__copy_walk;

static void te__copy_walk_make(te__copy_walk *w, const te_tensor *src, const te_tensor *dst) {
    int i, k, n = 0, merged = 0;
    for (i = 0; i < src->ndim; i++) {
        if (src->shape[i] == 1) continue;
        for (k = n++; k > 0 && w->dst[k - 1] < dst->stride[i]; k--) {
            w->shape[k] = w->shape[k - 1];
            w->src[k] = w->src[k - 1];
            w->dst[k] = w->dst[k - 1];
        }
        w->shape[k] = src->shape[i];
        w->src[k] = src->stride[i];
        w->dst[k] = dst->stride[i];
    }
    if (n == 0) {
        w->shape[n] = w->src[n] = w->dst[n] = 1;
        n = 1;
    }
    for (i = 1; i < n; i++) {
        if (w->src[merged] == w->src[i] * w->shape[i] && w->dst[merged] == w->dst[i] * w->shape[i]) {
            w->shape[merged] *= w->shape[i];
        } else {
            merged++;
            w->shape[merged] = w->shape[i];
        }
        w->src[merged] = w->src[i];
        w->dst[merged] = w->dst[i];
    }
    w->ndim = merged + 1;
}

/* Whether src and dst share memory, by their ranges from the first to the last byte. So strided tensors without a
 * common byte can count as overlapping. */
typedef enum te__copy_sides {
    TE__COPY_APART,
    TE__COPY_OVERLAPS,
    TE__COPY_SAME /* each element would be copied onto itself, so there is nothing to do */
} te__copy_sides;

static te__copy_sides te__copy_sides_of(const te_op_copy_args *a) {
    te__span src, dst;
    bool same = te__copy_is_raw(a->src->dtype, a->dst->dtype);
    int i;
    te__span_of(a->src, &src);
    te__span_of(a->dst, &dst);
    same = same && src.begin == dst.begin;
    if (!te__spans_meet(src, dst)) return TE__COPY_APART;
    for (i = 0; i < a->src->ndim; i++) same = same && (a->src->shape[i] == 1 || a->src->stride[i] == a->dst->stride[i]);
    return same ? TE__COPY_SAME : TE__COPY_OVERLAPS;
}

/* A copy between overlapping src and dst. It is done as two copies: from src to separate memory, and from there to
 * dst. */
typedef struct te__copy_detour {
    te_tensor between;
    te__buffer memory;
    te_op_copy_args there, back;
} te__copy_detour;

/* Returns the dtype of the separate memory of a te__copy_detour: that of src or of dst, whichever is narrower. */
static te_dtype te__copy_between(const te_op_copy_args *a) {
    return te__dtype_size(a->dst->dtype) < te__dtype_size(a->src->dtype) ? a->dst->dtype : a->src->dtype;
}
static int64_t te__copy_detour_bytes(const te_op_copy_args *a) {
    return te__numel(a->src) * te__dtype_size(te__copy_between(a));
}
static void te__copy_detour_make(te__copy_detour *d, const te_op_copy_args *a, void *memory) {
    int64_t n = 1;
    int i;
    memset(d, 0, sizeof(*d));
    d->memory.data = memory;
    d->between.te = a->src->te;
    d->between.buffer = &d->memory;
    d->between.dtype = te__copy_between(a);
    d->between.ndim = a->src->ndim;
    for (i = a->src->ndim - 1; i >= 0; i--) {
        d->between.shape[i] = a->src->shape[i];
        d->between.stride[i] = n;
        n *= a->src->shape[i];
    }
    d->there.src = a->src;
    d->there.dst = &d->between;
    d->back.src = &d->between;
    d->back.dst = a->dst;
}

/* ---- fill, random ---- */

/* Returns the bits of `value` in the format `dtype`. Floats are rounded to nearest even. e8m0 is rounded up. Integers
 * are truncated and saturated, and NaN becomes 0. For floats shorter than f32, `value` is rounded twice. The first
 * rounding gives f32, and rounds to odd. So the second rounding gives the same bits as a single one. */
static uint64_t te__fill_bits(te_dtype dtype, double value) {
    float f = (float)value;
    uint32_t u = te__f32_bits(f);
    if (dtype == TE_F32) return u;
    if (te__is_integer(dtype) || dtype == TE_I16) {
        double low = dtype == TE_U8    ? 0
                     : dtype == TE_I16 ? -32768.0
                     : dtype == TE_I32 ? -2147483648.0
                                       : -9223372036854775808.0;
        double high = dtype == TE_U8    ? 255
                      : dtype == TE_I16 ? 32767.0
                      : dtype == TE_I32 ? 2147483647.0
                                        : 9223372036854775807.0;
        if (value != value) return 0;
        if (value <= low) return dtype == TE_I64 ? (uint64_t)INT64_MIN : (uint64_t)(int64_t)low;
        return value >= high ? (dtype == TE_I64 ? (uint64_t)INT64_MAX : (uint64_t)(int64_t)high)
                             : (uint64_t)(int64_t)value;
    }
    if ((double)f != value && fabsf(f) <= FLT_MAX) {
        if (fabs((double)f) > fabs(value)) u--;
        f = te__bits_f32(u | 1u);
    }
    switch (dtype) {
    case TE_F16: return te__f32_to_f16(f);
    case TE_BF16: return te__f32_to_bf16(f);
    case TE_F8E4M3: return te__f32_to_e4m3(f);
    case TE_F8E5M2: return te__f32_to_e5m2(f);
    case TE_F8E8M0: return te__f32_to_e8m0(f);
    default: return 0; /* no operation fills other formats */
    }
}
static te_result te__check_fill(te_ctx *te, te_op_fill_args *a) {
    (void)te, (void)a;
    return TE_OK;
}

static te_result te__check_random(te_ctx *te, te_op_random_args *a) {
    if (a->kind != TE_RANDOM_UNIFORM && a->kind != TE_RANDOM_NORMAL)
        return te__fail(te, TE_ERR_INVALID, "random: %d is not a te_random_kind", (int)a->kind);
    if (!(fabsf(a->a) <= FLT_MAX) || !(fabsf(a->b) <= FLT_MAX) || (a->kind == TE_RANDOM_UNIFORM && a->b < a->a) ||
        (a->kind == TE_RANDOM_NORMAL && a->b < 0.0f))
        return te__fail(te, TE_ERR_INVALID,
                        a->kind == TE_RANDOM_UNIFORM
                            ? "random: uniform from %g to %g: the range must be finite and upwards"
                            : "random: normal with mean %g and standard deviation %g",
                        (double)a->a, (double)a->b);
    if (a->kind == TE_RANDOM_UNIFORM && !(fabsf(a->b - a->a) <= FLT_MAX)) /* kernels multiply by the difference, in
                                                                           * f32 */
        return te__fail(te, TE_ERR_INVALID, "random: uniform from %g to %g: the difference must be a finite f32, too",
                        (double)a->a, (double)a->b);
    return te__want_rng(te, "random", a->rng);
}
/* Returns the largest value of a uniform random number in the range from lo = a->a to hi = a->b. It is below hi, unless
 * lo equals hi. A limit is needed since lo + u (hi - lo) with u < 1 may round to hi in f32. */
static float te__random_below(const te_op_random_args *a) { return a->b > a->a ? nextafterf(a->b, a->a) : a->b; }

/* ---- axpby, sums ---- */

static te_result te__check_axpby(te_ctx *te, te_op_axpby_args *a) {
    te_result result = a->y ? te__want_same(te, "axpby", "x", a->x, "y", a->y) : TE_OK;
    return result == TE_OK ? te__want_same(te, "axpby", "x", a->x, "out", a->out) : result;
}
/* Returns whether y has one factor for each row of x. If not, it has one for each element. */
static bool te__mul_by_rows(const te_op_mul_args *a) { return te__numel(a->y) != te__numel(a->x); }
static te_result te__check_mul(te_ctx *te, te_op_mul_args *a) {
    char x[TE__SHAPE_TEXT], y[TE__SHAPE_TEXT];
    if (!te__same_shape(a->x, a->y) && te__numel(a->y) != te__rows(a->x))
        return te__fail(te, TE_ERR_SHAPE,
                        "mul: x is %s and y is %s; they must be equal, or y one number for each of x's %lld rows",
                        te__shape_text(a->x, x), te__shape_text(a->y, y), (long long)te__rows(a->x));
    return te__want_same(te, "mul", "x", a->x, "out", a->out);
}
static te_result te__check_row_dot(te_ctx *te, te_op_row_dot_args *a) {
    te_result result = te__want_same(te, "row_dot", "x", a->x, "y", a->y);
    return result == TE_OK ? te__want_numel(te, "row_dot", "out", a->out, te__rows(a->x)) : result;
}
static te_result te__check_argmax(te_ctx *te, te_op_argmax_args *a) {
    char text[TE__SHAPE_TEXT];
    if (a->x->ndim < 1 || te__cols(a->x) < 1 || te__cols(a->x) > INT32_MAX)
        return te__fail(te, TE_ERR_SHAPE, "argmax: x is %s; [.., N] with N from 1 to 2^31 - 1 is needed",
                        te__shape_text(a->x, text));
    return te__want_numel(te, "argmax", "out", a->out, te__rows(a->x));
}
static te_result te__check_sum(te_ctx *te, te_op_sum_args *a) {
    (void)te;
    if (a->scale == 0.0f) a->scale = 1.0f;
    return TE_OK;
}
static te_result te__check_column_sum(te_ctx *te, te_op_column_sum_args *a) {
    char x[TE__SHAPE_TEXT], out[TE__SHAPE_TEXT];
    if (te__numel(a->out) == te__cols(a->x)) return TE_OK;
    return te__fail(te, TE_ERR_SHAPE, "column_sum: x is %s, so out must be [%lld], not %s", te__shape_text(a->x, x),
                    (long long)te__cols(a->x), te__shape_text(a->out, out));
}

/* ---- embedding ---- */

/* Checks the tensors of an embedding: `table` must be [V, H], and `rows` must be [.., H] with one row for each id. */
static te_result te__embedding_check(te_ctx *te, const char *op, const te_tensor *ids, const char *table_name,
                                     const te_tensor *table, const char *rows_name, const te_tensor *rows,
                                     int64_t *vocab_size, int64_t vocab_start) {
    char a[TE__SHAPE_TEXT], b[TE__SHAPE_TEXT], c[TE__SHAPE_TEXT];
    if (table->ndim != 2 || rows->ndim < 1 || te__cols(rows) != table->shape[1] || te__rows(rows) != te__numel(ids))
        return te__fail(te, TE_ERR_SHAPE, "%s: ids %s, %s %s, %s %s; [..], [V, H] and [.., H] are needed", op,
                        te__shape_text(ids, a), table_name, te__shape_text(table, b), rows_name,
                        te__shape_text(rows, c));
    if (te__numel(ids) > UINT32_MAX)
        return te__fail(te, TE_ERR_INVALID, "%s: %lld ids; at most 2^32 - 1 go in one call", op,
                        (long long)te__numel(ids));
    return te__want_vocabulary(te, op, "the table has", table->shape[0], "rows", vocab_size, vocab_start);
}
static te_result te__check_embedding_fwd(te_ctx *te, te_op_embedding_fwd_args *a) {
    return te__embedding_check(te, "embedding_fwd", a->ids, "table", a->table, "y", a->y, &a->vocab_size,
                               a->vocab_start);
}
static te_result te__check_embedding_bwd(te_ctx *te, te_op_embedding_bwd_args *a) {
    return te__embedding_check(te, "embedding_bwd", a->ids, "dtable", a->dtable, "dy", a->dy, &a->vocab_size,
                               a->vocab_start);
}
