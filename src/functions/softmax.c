/* functions/softmax.c: the softmax functions of attention scores, forward and backward. This file must not depend on
 * modules. */

static te_result te__softmax_backward(te_ctx *te, const void *state, te_tensor *const *saved, te_tensor *const *dy,
                                      te_tensor **dx, const bool *needs) {
    te_op_softmax_bwd_args args = TE_ZERO;
    (void)needs;
    args.y = saved[0];
    args.dy = te_tensor_contiguous(dy[0]);
    args.dx = dx[0] = te__empty_like(saved[0], saved[0]->dtype);
    args.scale = *(const float *)state;
    return args.dy && dx[0] ? te_op_softmax_bwd(te, &args) : te_error_code(te);
}

static te_tensor *te__softmax(te_tensor *x, te_tensor *mask, float scale, bool causal, const char *function) {
    te_op_softmax_fwd_args args = TE_ZERO;
    te_tensor *y;
    if (!x || !te__operand(x, mask, true, function) || !te__need_float(x, function)) return NULL;
    x = te_tensor_contiguous(x);
    if (mask && !(mask = te_tensor_contiguous(mask))) return NULL;
    y = x ? te__empty_like(x, x->dtype) : NULL;
    if (!y) return NULL;
    args.x = x;
    args.mask = mask;
    args.y = y;
    args.scale = scale;
    args.causal = causal;
    y = te__checked(y, te_op_softmax_fwd(x->te, &args));
    return te__record(function, y, te__softmax_backward, &scale, sizeof(scale), &x, 1, &y, 1);
}

TE_API te_tensor *te_scaled_softmax(te_tensor *x, float scale) {
    return te__softmax(x, NULL, scale, false, "te_scaled_softmax");
}
TE_API te_tensor *te_scaled_masked_softmax(te_tensor *x, te_tensor *mask, float scale) {
    return te__softmax(x, mask, scale, false, "te_scaled_masked_softmax");
}
TE_API te_tensor *te_scaled_upper_triang_masked_softmax(te_tensor *x, float scale) {
    char text[TE__SHAPE_TEXT];
    if (!x) return NULL;
    if (x->ndim < 2 || x->shape[x->ndim - 1] != x->shape[x->ndim - 2])
        return te__no_tensor(x->te, TE_ERR_SHAPE,
                             "te_scaled_upper_triang_masked_softmax: x is %s; square matrices, [.., s, s], are needed: "
                             "te_scaled_aligned_causal_masked_softmax takes others",
                             te__shape_text(x, text));
    return te__softmax(x, NULL, scale, true, "te_scaled_upper_triang_masked_softmax");
}
TE_API te_tensor *te_scaled_aligned_causal_masked_softmax(te_tensor *x, float scale) {
    return te__softmax(x, NULL, scale, true, "te_scaled_aligned_causal_masked_softmax");
}
