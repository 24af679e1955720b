/* quant/kind_mxfp8.c: the kind TE_QUANT_MXFP8. It is FP8 with an E8M0 scale for each 32 elements along the contraction,
 * or for each block of 32 x 32 elements. */

static te_result te__mxfp8_resolve(te_ctx *te, const te_quantizer_desc *desc, te__quant_spec *spec, const char *who) {
    (void)te, (void)who;
    spec->two_dimensional = desc->quantization_2d == TE_ON;
    spec->swizzled = desc->optimize_for_gemm;
    return TE_OK;
}

static void te__mxfp8_scale_shape(const te__quant_copy *c, bool columnwise, int64_t outer, int64_t inner,
                                  int64_t shape[2]) {
    (void)c;
    shape[!columnwise] = te__round_up(te__div_up(inner, 32), 4);
    shape[columnwise] = te__round_up(outer, 128);
}

static te_result te__mxfp8_fill(te_tensor *x, const te__quant_spec *spec, te__quant_copy *row, te__quant_copy *col,
                                const te_tensor *noop) {
    te_op_mxfp8_quantize_args cast = TE_ZERO;
    cast.x = x;
    te__cast_outputs(row, col, &cast.row, &cast.row_scale, &cast.col, &cast.col_scale);
    cast.two_dimensional = spec->two_dimensional;
    cast.swizzled = spec->swizzled;
    cast.noop = noop;
    return te_op_mxfp8_quantize(x->te, &cast);
}

static te_tensor *te__mxfp8_decode(const te_tensor *x, const te__quant_copy *c, int which, te_dtype dtype) {
    te_op_mxfp8_dequantize_args args = TE_ZERO;
    args.q = c->data;
    args.scale = c->scale;
    args.y = te__empty_like(x, dtype);
    args.columnwise = which == TE_COLUMNWISE;
    args.swizzled = c->swizzled;
    return args.y && te_op_mxfp8_dequantize(x->te, &args) == TE_OK ? args.y : NULL;
}

static const te__quant_class te__quant_mxfp8 = {
    TE_QUANT_MXFP8,
    "MXFP8",
    TE__FORM_CODES,
    TE__IN_PRODUCTS | TE__BOTH_FROM_SLICES | TE__EXACT_CODES | TE__BLOCKS_IN_ATTENTION,
    TE_DTYPE_NONE,
    TE_F8E8M0,
    {TE_SCALING_MXFP8, TE_SCALING_MXFP8},
    {1, 32},
    "MXFP8 with 32 x 32 blocks or swizzled scales; slices need 1 x 32 and plain scales",
    te__mxfp8_resolve,
    te__mxfp8_scale_shape,
    te__mxfp8_fill,
    te__mxfp8_decode,
    NULL /* turn_scales */,
    NULL /* tensor_factor */,
    32,
    {0, 0},
    "quantization_2d",
    32};
