/* ops/softcap/cuda.c: the kernels of capped numbers and scores, and how they are launched. Knows plans; must not know the driver. */

static te_result te__cuda_plan_softcap(te__plan *p, const te_op_softcap_args *args) {
    te__softcap_kargs a = te__softcap_problem(args);
    te__launch *l;
    if (a.count == 0) return TE_OK;
    l = te__plan_launch(p, "softcap", "softcap");
    *TE__KARGS(p, l, te__softcap_kargs) = a;
    te__launch_size(l, te__min(te__div_up(a.count, 1024), 1 << 20), 1, 1, 256, 0);
    te__plan_why(p, "general: one element at a time");
    return TE_OK;
}

static te_result te__capped_softmax_plan(te__plan *p, const te__capped_softmax_kargs *a) {
    te__launch *l;
    if (a->rows == 0 || a->s_kv == 0) return TE_OK;
    l = te__plan_launch(p, "softcap", "capped_softmax");
    *TE__KARGS(p, l, te__capped_softmax_kargs) = *a;
    te__launch_size(l, te__min(a->rows, 1 << 20), 1, 1, a->s_kv > 128 ? 256 : 32, 0);
    te__plan_why(p, "general: a block for each row, which it reads three times");
    return TE_OK;
}
static te_result te__cuda_plan_capped_softmax_fwd(te__plan *p, const te_op_capped_softmax_fwd_args *args) {
    te__capped_softmax_kargs a = te__capped_softmax_forward(args);
    return te__capped_softmax_plan(p, &a);
}
static te_result te__cuda_plan_capped_softmax_bwd(te__plan *p, const te_op_capped_softmax_bwd_args *args) {
    te__capped_softmax_kargs a = te__capped_softmax_backward(args);
    return te__capped_softmax_plan(p, &a);
}
