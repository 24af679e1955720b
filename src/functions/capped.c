/* functions/capped.c: te_softcap, which computes cap * tanh(x / cap) as in the logits of Gemma 2. It is a
 * differentiable function like those in functions/elements.c. */

static te_tensor *te__softcap(te_tensor *x, te_tensor *dy, float cap) {
    te_op_softcap_args args = TE_ZERO;
    args.x = x;
    args.dy = dy;
    args.y = te__empty_like(x, x->dtype);
    args.cap = cap;
    return args.y ? te__checked(args.y, te_op_softcap(x->te, &args)) : NULL;
}
static te_result te__softcap_backward(te_ctx *te, const void *state, te_tensor *const *saved, te_tensor *const *dy,
                                      te_tensor **dx, const bool *needs) {
    te_tensor *g = te_tensor_contiguous(dy[0]);
    (void)needs;
    dx[0] = g ? te__softcap(saved[0], g, *(const float *)state) : NULL;
    return dx[0] ? TE_OK : te_error_code(te);
}
TE_API te_tensor *te_softcap(te_tensor *x, float cap) {
    if (!x || !te__need_float(x, "te_softcap")) return NULL;
    x = te_tensor_contiguous(x);
    return x ? te__record("softcap", te__softcap(x, NULL, cap), te__softcap_backward, &cap, sizeof(cap), &x, 1, &x, 1)
             : NULL;
}
