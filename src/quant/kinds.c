/* quant/kinds.c: every kind of quantizer, in the order of te_quant_kind. */

static const te__quant_class *const te__quant_classes[] = {NULL,              &te__quant_delayed, &te__quant_current,  &te__quant_block, &te__quant_mxfp8,
                                                           &te__quant_nvfp4, &te__quant_identity, &te__quant_hybrid, &te__quant_custom};

/* NULL: there is no such kind. */
static const te__quant_class *te__quant_class_of(te_quant_kind kind) { return (int)kind >= 0 && (int)kind < TE__COUNT(te__quant_classes) ? te__quant_classes[kind] : NULL; }
static te_result te__quant_unknown(te_ctx *te, te_quant_kind kind, const char *who) {
    return te__fail(te, TE_ERR_INVALID, "%s: kind %d; TE_QUANT_DELAYED (%d) to TE_QUANT_CUSTOM (%d) are possible", who, (int)kind, (int)TE_QUANT_DELAYED, (int)TE_QUANT_CUSTOM);
}
