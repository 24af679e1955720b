/* ops/nvfp4/op.c: the checks of calls that find NVFP4 amaxes or cast to NVFP4. This file must not depend on the
 * backend. */

/* Returns the number of scales of a row of `cols` codes, padding included. */
static int64_t te__nvfp4_groups(int64_t cols) { return te__round_up(te__div_up(cols, 16), 4); }
static te_result te__nvfp4_check_scale(te_ctx *te, const char *op, const char *name, const te_tensor *scale,
                                       int64_t rows, int64_t cols) {
    char text[TE__SHAPE_TEXT];
    if (te__rows(scale) != te__round_up(rows, 128) || te__cols(scale) != te__nvfp4_groups(cols))
        return te__fail(te, TE_ERR_SHAPE, "%s: %s is %s, not [%lld, %lld]", op, name, te__shape_text(scale, text),
                        (long long)te__round_up(rows, 128), (long long)te__nvfp4_groups(cols));
    return TE_OK;
}
/* Checks that an amax is [1] or [m], or NULL. */
static te_result te__nvfp4_check_amax(te_ctx *te, const char *op, const char *name, const te_tensor *amax, int64_t m) {
    char text[TE__SHAPE_TEXT];
    if (!amax || te__numel(amax) == 1 || te__numel(amax) == m) return TE_OK;
    return te__fail(te, TE_ERR_SHAPE, "%s: %s is %s, neither [1] nor [%lld]", op, name, te__shape_text(amax, text),
                    (long long)m);
}
/* Returns which transform comes before the column-wise copy: 0 for none, 1 for the Hadamard transform with random
 * signs, 2 for the one without signs. */
static int te__nvfp4_transform(bool rht, bool no_random_sign_mask) { return !rht ? 0 : no_random_sign_mask ? 2 : 1; }

/* Checks that every group of rows has its amax, and that amax_row and amax_col have equally many amaxes. */
static te_result te__nvfp4_check_groups(te_ctx *te, const char *op, const te_tensor *groups, int64_t m,
                                        const te_tensor *amax_row, const te_tensor *amax_col, const te_tensor *noop) {
    te_result result = te__want_groups(te, op, groups, m, "amax_row", amax_row);
    if (result == TE_OK) result = te__want_groups(te, op, groups, m, "amax_col", amax_col);
    if (result == TE_OK && amax_row) result = te__want_numel(te, op, "amax_col", amax_col, te__numel(amax_row));
    return result == TE_OK && noop ? te__fail(te, TE_ERR_INVALID, "%s: groups with noop; leave one of them out", op)
                                   : result;
}
/* Returns true if `amax` has one amax for each row of the row-wise or column-wise copy, false if it has one for the
 * whole tensor. */
static bool te__nvfp4_is_vector(const te_tensor *amax) { return amax && te__numel(amax) != 1; }
/* te__nvfp4_row_amax returns the amaxes of the row-wise copy. te__nvfp4_col_amax returns those of the column-wise
 * copy. */
static const te_tensor *te__nvfp4_row_amax(const te_op_nvfp4_quantize_args *a) {
    return a->amax_row ? a->amax_row : a->amax_col;
}
static const te_tensor *te__nvfp4_col_amax(const te_op_nvfp4_quantize_args *a) {
    return a->amax_col && !a->two_dimensional ? a->amax_col : te__nvfp4_row_amax(a);
}

static te_result te__check_nvfp4_amax(te_ctx *te, te_op_nvfp4_amax_args *a) {
    te_result result;
    if (!a->amax_row && !a->amax_col)
        return te__fail(te, TE_ERR_INVALID, "nvfp4_amax: neither amax_row nor amax_col is given");
    if (a->groups)
        return te__nvfp4_check_groups(te, "nvfp4_amax", a->groups, te__rows(a->x), a->amax_row, a->amax_col, a->noop);
    result = te__nvfp4_check_amax(te, "nvfp4_amax", "amax_row", a->amax_row, te__rows(a->x));
    return result == TE_OK ? te__nvfp4_check_amax(te, "nvfp4_amax", "amax_col", a->amax_col, te__cols(a->x)) : result;
}

static te_result te__check_nvfp4_quantize(te_ctx *te, te_op_nvfp4_quantize_args *a) {
    int64_t m = te__rows(a->x), n = te__cols(a->x);
    te_result result = TE_OK;
    if (!a->row && !a->col) return te__fail(te, TE_ERR_INVALID, "nvfp4_quantize: neither row nor col is given");
    if (a->row) {
        result = te__want_codes(te, "nvfp4_quantize", "row", a->row, m, n);
        if (result == TE_OK) result = te__nvfp4_check_scale(te, "nvfp4_quantize", "row_scale", a->row_scale, m, n);
    }
    if (result == TE_OK && a->col) {
        result = te__want_codes(te, "nvfp4_quantize", "col", a->col, n, a->rht ? te__round_up(m, 16) : m);
        if (result == TE_OK) result = te__nvfp4_check_scale(te, "nvfp4_quantize", "col_scale", a->col_scale, n, m);
    }
    if (result == TE_OK && a->groups) {
        result = te__nvfp4_check_groups(te, "nvfp4_quantize", a->groups, m, a->amax_row, a->amax_col, a->noop);
        if (result == TE_OK && (a->two_dimensional || a->measure))
            result = te__fail(te, TE_ERR_INVALID, "nvfp4_quantize: groups with %s",
                              a->measure ? "measure; te_op_amax and te_op_nvfp4_amax make the groups' amaxes"
                                         : "two_dimensional: a block of 16 rows may be of two groups");
    } else if (result == TE_OK) {
        result = te__nvfp4_check_amax(te, "nvfp4_quantize", "amax_row", a->amax_row, m);
        if (result == TE_OK) result = te__nvfp4_check_amax(te, "nvfp4_quantize", "amax_col", a->amax_col, n);
    }
    if (result == TE_OK) result = te__want_rng(te, "nvfp4_quantize", a->rng);
    if (result != TE_OK) return result;
    if ((int)a->four_over_six < TE_4OVER6_OFF || (int)a->four_over_six > TE_4OVER6_MSE)
        return te__fail(te, TE_ERR_INVALID, "nvfp4_quantize: %d is not a te_4over6_error", (int)a->four_over_six);
    if (a->two_dimensional && a->rht && a->col)
        return te__fail(
            te, TE_ERR_UNSUPPORTED,
            "nvfp4_quantize: two_dimensional blocks have one scale for both copies, and rht changes one of them");
    if (a->two_dimensional && (te__nvfp4_is_vector(a->amax_row) || te__nvfp4_is_vector(a->amax_col)))
        return te__fail(te, TE_ERR_UNSUPPORTED,
                        "nvfp4_quantize: a row-scaled %s gives no scale to a two_dimensional block",
                        te__nvfp4_is_vector(a->amax_row) ? "amax_row" : "amax_col");
    if (a->col && !a->amax_col && !a->groups && te__nvfp4_is_vector(a->amax_row))
        return te__fail(
            te, TE_ERR_INVALID,
            "nvfp4_quantize: amax_row is row-scaled; the column-wise copy needs an amax_col of its own, [%lld] or [1]",
            (long long)n);
    return TE_OK;
}

/* Returns the arguments of nvfp4_amax, the operation that finds the amaxes before a cast with the option `measure`. */
static te_op_nvfp4_amax_args te__nvfp4_measures(const te_op_nvfp4_quantize_args *a) {
    te_op_nvfp4_amax_args m = TE_ZERO;
    m.x = a->x;
    m.amax_row = (te_tensor *)a->amax_row;
    m.amax_col = (te_tensor *)a->amax_col;
    m.rht = a->rht && a->col;
    m.no_random_sign_mask = a->no_random_sign_mask;
    m.noop = a->noop;
    return m;
}

static te_result te__check_nvfp4_dequantize(te_ctx *te, te_op_nvfp4_dequantize_args *a) {
    int64_t m = te__rows(a->y), n = te__cols(a->y);
    te_result result;
    if (a->rht && !a->columnwise)
        return te__fail(te, TE_ERR_INVALID,
                        "nvfp4_dequantize: rht belongs to the column-wise copy, and columnwise is not set");
    if (a->columnwise) {
        result = te__want_codes(te, "nvfp4_dequantize", "q", a->q, n, a->rht ? te__round_up(m, 16) : m);
        if (result == TE_OK) result = te__nvfp4_check_scale(te, "nvfp4_dequantize", "scale", a->scale, n, m);
    } else {
        result = te__want_codes(te, "nvfp4_dequantize", "q", a->q, m, n);
        if (result == TE_OK) result = te__nvfp4_check_scale(te, "nvfp4_dequantize", "scale", a->scale, m, n);
    }
    if (result == TE_OK && a->groups) return te__want_groups(te, "nvfp4_dequantize", a->groups, m, "amax", a->amax);
    if (result == TE_OK) result = te__nvfp4_check_amax(te, "nvfp4_dequantize", "amax", a->amax, a->columnwise ? n : m);
    return result;
}
