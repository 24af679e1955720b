/* quant/kinds.c: the table of the kinds of quantizers, and the check that a te_quantizer_desc sets no field that its
 * kind ignores. */

/* The entries, in the order of te_quant_kind. */
static const te__quant_class *const te__quant_classes[] = {NULL,
                                                           &te__quant_delayed,
                                                           &te__quant_current,
                                                           &te__quant_block,
                                                           &te__quant_mxfp8,
                                                           &te__quant_nvfp4,
                                                           &te__quant_identity,
                                                           &te__quant_hybrid,
                                                           &te__quant_custom};

/* Returns the table entry of a kind. Returns NULL for TE_QUANT_NONE and for invalid numbers. */
static const te__quant_class *te__quant_class_of(te_quant_kind kind) {
    return (int)kind >= 0 && (int)kind < TE__COUNT(te__quant_classes) ? te__quant_classes[kind] : NULL;
}
static te_result te__quant_unknown(te_ctx *te, te_quant_kind kind, const char *who) {
    return te__fail(te, TE_ERR_INVALID, "%s: kind %d; TE_QUANT_DELAYED (%d) to TE_QUANT_CUSTOM (%d) are possible", who,
                    (int)kind, (int)TE_QUANT_DELAYED, (int)TE_QUANT_CUSTOM);
}

/* The fields of te_quantizer_desc that only some kinds read. Each entry has a mask with one bit for each kind that
 * reads the field. */
static const te__field te__quantizer_fields[] = {
#define TE__OF(KIND) (1 << TE_QUANT_##KIND)
#define TE__ROW(group, KIND, field) TE__FIELD_IN(te_quantizer_desc, group, te_##group##_quantizer, field, TE__OF(KIND))
    TE__FIELD(te_quantizer_desc, amax_epsilon, TE__OF(CURRENT) | TE__OF(BLOCK)),
    TE__FIELD(te_quantizer_desc, amax_group, TE__OF(CURRENT) | TE__OF(NVFP4)),
    TE__FIELD(te_quantizer_desc, optimize_for_gemm, TE__OF(MXFP8) | TE__OF(NVFP4)),
    TE__FIELD(te_quantizer_desc, quantization_2d, TE__OF(MXFP8) | TE__OF(NVFP4)),
    TE__ROW(delayed, DELAYED, scale),
    TE__ROW(delayed, DELAYED, amax),
    TE__ROW(current, CURRENT, power_of_two_scales),
    TE__ROW(block, BLOCK, block_scaling_dim),
    TE__ROW(block, BLOCK, fp32_scales),
    TE__ROW(nvfp4, NVFP4, rht),
    TE__ROW(nvfp4, NVFP4, no_random_sign_mask),
    TE__ROW(nvfp4, NVFP4, stochastic_rounding),
    TE__ROW(nvfp4, NVFP4, row_scaled),
    TE__ROW(nvfp4, NVFP4, four_over_six),
    TE__ROW(nvfp4, NVFP4, e4m3_max_256),
    TE__ROW(hybrid, HYBRID, rowwise_quantizer),
    TE__ROW(hybrid, HYBRID, columnwise_quantizer),
    TE__FIELD(te_quantizer_desc, custom, TE__OF(CUSTOM))
#undef TE__OF
#undef TE__ROW
};

/* Fails if the desc sets a field that its kind does not read. */
static te_result te__quant_check_kinds(te_ctx *te, const te_quantizer_desc *desc, const te__quant_class *cls,
                                       const char *who) {
    int i;
    for (i = 0; i < TE__COUNT(te__quantizer_fields); i++) {
        const te__field *f = &te__quantizer_fields[i];
        if (!(f->mark & 1 << cls->kind) && te__field_is_set(desc, f))
            return te__fail(te, TE_ERR_INVALID,
                            "%s: %s is set, which a quantizer of the kind %s does not read; leave it zero, or use a "
                            "kind that reads it",
                            who, f->name, cls->name);
    }
    return TE_OK;
}
