/* quant/kind_identity.c: the kind TE_QUANT_IDENTITY. Its row-wise and column-wise copies hold the values
 * of the plain tensor. */

static te_result te__identity_fill(te_tensor *x, const te__quant_spec *spec, te__quant_copy *row, te__quant_copy *col,
                                   const te_tensor *noop) {
    te_result result = row ? te_tensor_copy(row->data, te__as_matrix(x)) : TE_OK;
    (void)spec, (void)noop;
    return col && result == TE_OK ? te_tensor_copy(col->data, te__as_matrix(x)) : result;
}

static te_tensor *te__identity_decode(const te_tensor *x, const te__quant_copy *c, int which, te_dtype dtype) {
    te_tensor *y = te__empty_like(x, dtype);
    (void)which;
    return y && te_tensor_copy(te__as_matrix(y), c->data) == TE_OK ? y : NULL;
}

static const te__quant_class te__quant_identity = {
    TE_QUANT_IDENTITY, "identity", TE__FORM_PLAIN, TE__COLUMNS_FOLLOW,
    TE_DTYPE_NONE, TE_DTYPE_NONE, {TE_SCALING_TENSOR, TE_SCALING_TENSOR}, {0, 0},
    NULL /* slices_need */, NULL /* resolve */, NULL /* scale_shape */, te__identity_fill, te__identity_decode,
    NULL /* turn_scales */, NULL /* tensor_factor */, 0, {0, 0}, NULL, 0
};
