/* quant/kind_hybrid.c: the kind TE_QUANT_HYBRID. Its row-wise copy is of one kind and its column-wise copy of another.
 * Other files get the spec of each copy from te__spec_of. */

/* Fills both copies. A copy of the custom kind is filled first, by a function of the user. So if the user's function
 * fails, the memory of the other copy has not been overwritten yet. The structs *row and *col are replaced only if
 * both copies could be filled. */
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
