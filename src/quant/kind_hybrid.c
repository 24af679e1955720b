/* quant/kind_hybrid.c: the kind TE_QUANT_HYBRID. Its row-wise and column-wise copies have different kinds. te__spec_of
 * returns the spec of each copy. */

/* Fills both copies. A custom copy is filled first. If the user's function fails, the other copy is still unchanged.
 * *row and *col get the new tensors of a custom copy only after both copies have been filled. */
static te_result te__hybrid_fill(te_tensor *x, const te__quant_spec *spec, te__quant_copy *row, te__quant_copy *col,
                                 const te_tensor *noop) {
    te__quant_copy fresh[2];
    te_result result = TE_OK;
    int which, turn;
    memset(fresh, 0, sizeof(fresh));
    for (turn = 0; turn < 2; turn++)
        for (which = TE_ROWWISE; which <= TE_COLUMNWISE && result == TE_OK; which++) {
            const te__quant_spec *part = te__spec_of(spec, which);
            te__quant_copy *c = which == TE_ROWWISE ? row : col, *f = &fresh[which - 1];
            if (!c || te__is_opaque(part->cls) != (turn == 0)) continue;
            *f = *c;
            te__copy_retain(f);
            result = te__fill_copies(x, part, which == TE_ROWWISE ? f : NULL, which == TE_ROWWISE ? NULL : f, noop);
        }
    for (which = TE_ROWWISE; which <= TE_COLUMNWISE; which++) {
        te__quant_copy *c = which == TE_ROWWISE ? row : col, *f = &fresh[which - 1];
        if (c && result == TE_OK) {
            te__copy_release(c);
            *c = *f;
        } else
            te__copy_release(f);
    }
    return result;
}

static const te__quant_class te__quant_hybrid = {
    TE_QUANT_HYBRID, "hybrid", TE__FORM_PARTS, 0,
    TE_DTYPE_NONE, TE_DTYPE_NONE, {TE_SCALING_TENSOR, TE_SCALING_TENSOR}, {0, 0},
    NULL /* slices_need */, NULL /* resolve */, NULL /* scale_shape */, te__hybrid_fill, NULL /* decode */,
    NULL /* turn_scales */, NULL /* tensor_factor */, 0, {0, 0}, NULL, 0
};
