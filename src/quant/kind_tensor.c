/* quant/kind_tensor.c: the kinds TE_QUANT_DELAYED and TE_QUANT_CURRENT. Both are FP8 with one scale per tensor. The
 * scale is given (delayed) or computed from the amax (current). */

/* Writes the scales for `amax` to `scale`, and the reciprocals to scale_inv, which may be NULL. A NULL `scale` is a
 * failed allocation, whose error is returned. */
static te_result te__scale_of_amax(const te__quant_spec *spec, te_tensor *amax, te_tensor *scale,
                                   te_tensor *scale_inv) {
    te_op_scale_from_amax_args args = TE_ZERO;
    args.amax = amax;
    args.scale = scale;
    args.scale_inv = scale_inv;
    args.fp8_max = te_dtype_max(spec->dtype);
    args.epsilon = spec->epsilon;
    args.power_of_two = spec->power_of_two;
    return scale ? te_op_scale_from_amax(amax->te, &args) : te_error_code(amax->te);
}

/* Makes amax the maximum over the ranks of all groups, NULL being none. A rank that fails tells the others. */
static te_result te__amax_over(te_group *const groups[3], te_tensor *amax, te_result result) {
    int i;
    for (i = 0; i < 3; i++) {
        if (te__group_size(groups[i]) < 2 || (i > 0 && groups[i] == groups[0])) continue;
        result = result == TE_OK ? te__all_reduce(groups[i], amax, TE_REDUCE_MAX)
                                 : te__refuse(groups[i], TE__ALL_REDUCE, result);
    }
    return result;
}

/* Fills the copies. Delayed scaling uses spec->scale. Current scaling uses the amax of x, reduced over the ranks.
 * spec->x_amax or spec->amax may have it already. With spec->sizes, each group of rows has its own scale. */
static te_result te__tensor_fill(te_tensor *x, const te__quant_spec *spec, te__quant_copy *row, te__quant_copy *col,
                                 const te_tensor *noop) {
    te_ctx *te = x->te;
    te_op_fp8_quantize_args cast = TE_ZERO;
    te_result result = TE_OK;
    cast.x = x;
    cast.groups = spec->sizes ? te__row_groups(te, spec->sizes, te__rows(x)) : NULL;
    if (spec->sizes && !cast.groups) return te__refuse(spec->group, TE__ALL_REDUCE, te_error_code(te));
    cast.noop = noop;
    cast.dbias = spec->bias_grad;
    cast.row = row ? row->data : NULL;
    cast.col = col ? col->data : NULL;
    cast.scale_inv = row ? row->scale : col->scale;
    if (spec->cls->facts & TE__SCALE_GIVEN) {
        cast.scale = spec->scale;
        cast.amax = spec->amax;
    } else if (te__group_size(spec->group) > 1 || spec->sizes || (spec->amax && !spec->x_amax)) {
        te_op_amax_args amax = TE_ZERO;
        int64_t n = spec->sizes ? te__numel(spec->sizes) : 1;
        te_tensor *scale = te__empty_1d(te, TE_F32, n); /* allocated before the collective, so that te__refuse can
                                                         * report a failure to the other ranks */
        amax.x = x;
        amax.amax = spec->amax ? spec->amax : te__empty_1d(te, TE_F32, n);
        amax.groups = cast.groups;
        result = !amax.amax || !scale ? te_error_code(te) : spec->amax ? TE_OK : te_op_amax(te, &amax);
        if (te__group_size(spec->group) > 1)
            result = result == TE_OK ? te__all_reduce(spec->group, amax.amax, TE_REDUCE_MAX)
                                     : te__refuse(spec->group, TE__ALL_REDUCE, result);
        if (result == TE_OK) result = te__scale_of_amax(spec, amax.amax, scale, NULL);
        if (result != TE_OK) return result;
        cast.scale = scale;
    } else {
        cast.current = true;
        cast.epsilon = spec->epsilon;
        cast.power_of_two = spec->power_of_two;
        cast.x_amax = spec->x_amax;
    }
    return te_op_fp8_quantize(te, &cast);
}

static te_tensor *te__tensor_decode(const te_tensor *x, const te__quant_copy *c, int which, te_dtype dtype) {
    te_ctx *te = x->te;
    te_op_fp8_dequantize_args args = TE_ZERO;
    args.q = c->data;
    args.scale_inv = c->scale;
    args.y = te__empty_like(x, dtype);
    if (args.y && x->quantized->sizes && te__numel(c->scale) == te__numel(x->quantized->sizes)) {
        args.groups = te__row_groups(te, x->quantized->sizes, te__rows(x));
        if (!args.groups) return NULL;
    }
    if (!args.y) return NULL;
    if (which == TE_COLUMNWISE) { /* the codes are the same in both copies */
        te_op_transpose_args turn = TE_ZERO;
        turn.src = c->data;
        turn.rows = te__cols(x);
        turn.columns = te__rows(x);
        turn.dst = te__empty_2d(te, c->data->dtype, turn.columns, te__quant_ld(c->data->dtype, turn.rows));
        if (!turn.dst || te_op_transpose(te, &turn) != TE_OK) return NULL;
        args.q = turn.dst;
    }
    return te_op_fp8_dequantize(te, &args) == TE_OK ? args.y : NULL;
}

static float te__tensor_factor(float scale_inv, bool e4m3_max_256) {
    (void)e4m3_max_256;
    return 1.0f / scale_inv;
}

#define TE__TENSOR_SCALED_ROW(kind, name, facts)                                        \
    {kind,                                                                              \
     name,                                                                              \
     TE__FORM_CODES,                                                                    \
     TE__TENSOR_SCALED | TE__TRANSPOSED | TE__IN_PRODUCTS | TE__COLUMNS_FOLLOW | facts, \
     TE_DTYPE_NONE,                                                                     \
     TE_F32,                                                                            \
     {TE_SCALING_TENSOR, TE_SCALING_TENSOR},                                            \
     {0, 0},                                                                            \
     NULL /* slices_need */,                                                            \
     NULL /* resolve */,                                                                \
     NULL /* scale_shape */,                                                            \
     te__tensor_fill,                                                                   \
     te__tensor_decode,                                                                 \
     NULL /* turn_scales */,                                                            \
     te__tensor_factor,                                                                 \
     1,                                                                                 \
     {0, 0} /* both copies have one scale */,                                           \
     NULL /* two_dimensional */,                                                        \
     1}
static const te__quant_class te__quant_delayed = TE__TENSOR_SCALED_ROW(TE_QUANT_DELAYED, "delayed", TE__SCALE_GIVEN);
static const te__quant_class te__quant_current = TE__TENSOR_SCALED_ROW(TE_QUANT_CURRENT, "current", TE__TAKES_AMAX);
#undef TE__TENSOR_SCALED_ROW
