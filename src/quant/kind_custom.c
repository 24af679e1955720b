/* quant/kind_custom.c: the kind TE_QUANT_CUSTOM. The user's functions make the row-wise and column-wise
 * copies and read them. */

static te_result te__custom_resolve(te_ctx *te, const te_quantizer_desc *desc, te__quant_spec *spec, const char *who) {
    if (!desc->custom || !desc->custom->quantize || !desc->custom->dequantize || !desc->custom->name)
        return te__fail(te, TE_ERR_INVALID,
                        "%s: a custom quantizer needs a name and the functions quantize and dequantize", who);
    spec->custom = *desc->custom;
    return TE_OK;
}

static te_result te__custom_fill(te_tensor *x, const te__quant_spec *spec, te__quant_copy *row, te__quant_copy *col,
                                 const te_tensor *noop) {
    te_ctx *te = x->te;
    const char *why;
    te__quant_copy made[2];
    te_result result = TE_OK;
    int which;
    (void)noop;
    memset(made, 0, sizeof(made));
    for (which = TE_ROWWISE; which <= TE_COLUMNWISE && result == TE_OK; which++) {
        te__quant_copy *c = which == TE_ROWWISE ? row : col, *fresh = &made[which - 1];
        if (!c) continue;
        if (te->capture && c->data) { /* the next launch would read the old memory */
            result = te__refuse_capture(
                te, "a custom quantizer, whose function makes new memory, for a tensor that has some",
                "keep such weights out of it");
            break;
        }
        *fresh = *c;
        fresh->data = fresh->scale = NULL;
        result = te__returned(te, spec->custom.quantize(spec->custom.user, x, which, &fresh->data, &fresh->scale),
                              "the quantize function", spec->custom.name);
        if (result == TE_OK && !fresh->data) {
            result = TE_ERR_STATE;
            why = "no data";
        } else if (result == TE_OK && (fresh->data->te != te || (fresh->scale && fresh->scale->te != te))) {
            result = TE_ERR_INVALID;
            why = "a tensor of another context";
        } else
            why = te_result_name(result);
        te_tensor_retain(fresh->data);
        te_tensor_retain(fresh->scale);
        if (result != TE_OK)
            te__fail(te, result,
                     "custom quantizer \"%s\": its quantize function returned %s for the %s copy; nothing was changed",
                     spec->custom.name, why, which == TE_ROWWISE ? "row-wise" : "column-wise");
    }
    for (which = TE_ROWWISE; which <= TE_COLUMNWISE; which++) { /* all copies take effect, or none */
        te__quant_copy *c = which == TE_ROWWISE ? row : col, *fresh = &made[which - 1];
        if (c && result == TE_OK && !(te->warming && c->data)) { /* a warm-up computes nothing, and must not change
                                                                  * existing copies */
            te__copy_release(c);
            *c = *fresh;
        } else
            te__copy_release(fresh);
    }
    return result;
}

static te_tensor *te__custom_decode(const te_tensor *x, const te__quant_copy *c, int which, te_dtype dtype) {
    te_tensor *y = c->custom.dequantize(c->custom.user, c->data, c->scale, which, x->ndim, x->shape, dtype);
    if (y && te__same_shape(y, x) && y->dtype == dtype && y->te == x->te) return y;
    return te__no_tensor(x->te, TE_ERR_STATE, "custom quantizer \"%s\": its dequantize function returned %s",
                         c->custom.name, y ? "a tensor of another shape, format or context" : "NULL");
}

static const te__quant_class te__quant_custom = {
    TE_QUANT_CUSTOM, "custom", TE__FORM_OPAQUE, 0,
    TE_DTYPE_NONE, TE_DTYPE_NONE, {TE_SCALING_TENSOR, TE_SCALING_TENSOR}, {0, 0},
    "a custom quantizer cannot quantize slices; quantize the whole weight (te_quantize_into)",
    te__custom_resolve, NULL /* scale_shape */, te__custom_fill, te__custom_decode, NULL /* turn_scales */,
    NULL /* tensor_factor */, 0, {0, 0}, NULL, 0
};
