/* ops/mxfp8/op.c: checks the calls of the MXFP8 casts, and locates scales. This file must not depend on the backend. */

enum {
    TE__MX_GROUP = 32, /* elements of one scale */
    TE__MX_LINES = 128 /* the lines of scales are padded to a multiple of this. A line is a row, or a column of a
                        * column-wise copy */
};

/* The padded sizes of the scales of one copy. A line is a row of x, or a column of x in a column-wise copy. */
typedef struct te__mx_layout {
    int64_t lines, groups;
    bool columnwise, swizzled;
} te__mx_layout;

static te__mx_layout te__mx_layout_of(int64_t m, int64_t n, bool columnwise, bool swizzled) {
    te__mx_layout l = TE_ZERO;
    l.lines = te__round_up(columnwise ? n : m, TE__MX_LINES);
    l.groups = te__round_up(te__div_up(columnwise ? m : n, TE__MX_GROUP), 4);
    l.columnwise = columnwise;
    l.swizzled = swizzled;
    return l;
}
/* Returns the index of the scale of group `group` in line `line` (a row or a column). Swizzled scales lie in the 128
 * x 4 tiles that Blackwell's tensor cores read. */
static int64_t te__mx_scale_at(const te__mx_layout *l, int64_t line, int64_t group) {
    return te__group_scale_at(l->swizzled, l->columnwise, l->columnwise && !l->swizzled ? l->lines : l->groups, line,
                              group);
}

/* Checks one copy of codes: [m, ld] with ld >= n. */
static te_result te__mx_want_codes(te_ctx *te, const char *op, const char *name, const te_tensor *q, int64_t m,
                                   int64_t n) {
    char text[TE__SHAPE_TEXT];
    if (te__rows(q) == m && te__cols(q) >= n) return TE_OK;
    return te__fail(te, TE_ERR_SHAPE, "%s: %s is %s; it must be [%lld, %lld or more]%s", op, name,
                    te__shape_text(q, text), (long long)m, (long long)n,
                    te__rows(q) == n && te__cols(q) >= m && m != n ? " (MXFP8 transposes no copy)" : "");
}
/* Checks one copy's scales: their size, padding included. */
static te_result te__mx_want_scale(te_ctx *te, const char *op, const char *name, const te_tensor *scale, int64_t m,
                                   int64_t n, bool columnwise) {
    char text[TE__SHAPE_TEXT];
    te__mx_layout l = te__mx_layout_of(m, n, columnwise, false);
    int64_t rows = columnwise ? l.groups : l.lines, cols = columnwise ? l.lines : l.groups;
    if (scale->ndim == 2 && scale->shape[0] == rows && scale->shape[1] == cols) return TE_OK;
    return te__fail(te, TE_ERR_SHAPE,
                    "%s: %s is %s; the scales of a %s [%lld, %lld], padding included, are [%lld, %lld]", op, name,
                    te__shape_text(scale, text), columnwise ? "column-wise" : "row-wise", (long long)m, (long long)n,
                    (long long)rows, (long long)cols);
}

static te_result te__check_mxfp8_quantize(te_ctx *te, te_op_mxfp8_quantize_args *a) {
    const char *op = "mxfp8_quantize";
    int64_t m = te__rows(a->x), n = te__cols(a->x);
    te_result r = TE_OK;
    if (!a->row && !a->col) return te__fail(te, TE_ERR_INVALID, "%s: neither row nor col is given", op);
    if (a->row_scale && !a->row) return te__fail(te, TE_ERR_INVALID, "%s: row_scale is given, and row is not", op);
    if (a->col_scale && !a->col) return te__fail(te, TE_ERR_INVALID, "%s: col_scale is given, and col is not", op);
    if (a->row) {
        r = te__mx_want_codes(te, op, "row", a->row, m, n);
        if (r == TE_OK) r = te__mx_want_scale(te, op, "row_scale", a->row_scale, m, n, false);
    }
    if (r == TE_OK && a->col) {
        r = te__mx_want_codes(te, op, "col", a->col, m, n);
        if (r == TE_OK) r = te__mx_want_scale(te, op, "col_scale", a->col_scale, m, n, true);
    }
    return r == TE_OK ? te__want_one_format(te, op, "row", a->row, "col", a->col) : r;
}

static te_result te__check_mxfp8_dequantize(te_ctx *te, te_op_mxfp8_dequantize_args *a) {
    const char *op = "mxfp8_dequantize";
    te_result r = te__mx_want_codes(te, op, "q", a->q, te__rows(a->y), te__cols(a->y));
    if (r == TE_OK) r = te__mx_want_scale(te, op, "scale", a->scale, te__rows(a->y), te__cols(a->y), a->columnwise);
    return r;
}

/* Returns 1 / the largest number of the format `codes`, rounded to nearest. An amax is multiplied by it. */
static float te__mx_max_inverse(te_dtype codes) {
    return codes == TE_F8E4M3 ? TE__E4M3_MAX_INVERSE : TE__E5M2_MAX_INVERSE;
}
