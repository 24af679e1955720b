/* quant/kind_block.c: the kind TE_QUANT_BLOCK. It is FP8 with an f32 scale for each block of 1 x 128 or 128 x 128
 * elements. */

static te_result te__block_resolve(te_ctx *te, const te_quantizer_desc *desc, te__quant_spec *spec, const char *who) {
    if (desc->block.block_scaling_dim < 0 || desc->block.block_scaling_dim > 2)
        return te__fail(te, TE_ERR_INVALID, "%s: block_scaling_dim %d; 1 (1 x 128) and 2 (128 x 128) are possible", who,
                        desc->block.block_scaling_dim);
    spec->two_dimensional = desc->block.block_scaling_dim != 1;
    spec->fp32_scales = desc->block.fp32_scales;
    return TE_OK;
}

static void te__block_scale_shape(const te__quant_copy *c, bool columnwise, int64_t outer, int64_t inner,
                                  int64_t shape[2]) {
    (void)columnwise;
    shape[0] = te__div_up(c->two_dimensional ? outer : inner, 128);
    shape[1] = te__round_up(c->two_dimensional ? te__div_up(inner, 128) : outer, 4);
}

static te_result te__block_fill(te_tensor *x, const te__quant_spec *spec, te__quant_copy *row, te__quant_copy *col,
                                const te_tensor *noop) {
    te_op_block_quantize_args cast = TE_ZERO;
    cast.x = x;
    te__cast_outputs(row, col, &cast.row, &cast.row_scale_inv, &cast.col, &cast.col_scale_inv);
    cast.two_dimensional = spec->two_dimensional;
    cast.fp32_scales = spec->fp32_scales;
    cast.epsilon = spec->epsilon;
    cast.noop = noop;
    return te_op_block_quantize(x->te, &cast);
}

static te_tensor *te__block_decode(const te_tensor *x, const te__quant_copy *c, int which, te_dtype dtype) {
    te_op_block_dequantize_args args = TE_ZERO;
    args.q = c->data;
    args.scale_inv = c->scale;
    args.y = te__empty_like(x, dtype);
    args.two_dimensional = c->two_dimensional;
    args.columnwise = which == TE_COLUMNWISE;
    return args.y && te_op_block_dequantize(x->te, &args) == TE_OK ? args.y : NULL;
}

static te_result te__block_turn_scales(te_ctx *te, const te__quant_copy *row, te__quant_copy *col, int64_t m,
                                       int64_t n) {
    te_op_transpose_args turn = TE_ZERO;
    turn.src = row->scale;
    turn.dst = col->scale;
    turn.rows = te__div_up(m, 128);
    turn.columns = te__div_up(n, 128);
    return te_op_transpose(te, &turn);
}

static const te__quant_class te__quant_block = {
    TE_QUANT_BLOCK, "block", TE__FORM_CODES, TE__TRANSPOSED | TE__IN_PRODUCTS | TE__COLUMNS_FOLLOW,
    TE_DTYPE_NONE, TE_F32, {TE_SCALING_BLOCK_1D, TE_SCALING_BLOCK_2D}, {128, 128},
    "1 x 128 blocks; weights need 128 x 128 (block_scaling_dim 2)",
    te__block_resolve, te__block_scale_shape, te__block_fill, te__block_decode, te__block_turn_scales,
    NULL /* tensor_factor */, 128, {1, 0}, "128 x 128 blocks", 128
};
