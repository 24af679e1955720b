/* ops/softcap/cuda.c: the launch of the softcap kernel. This file must not call the driver. */

static te_result te__cuda_plan_softcap(te__plan *p, const te_op_softcap_args *args) {
    te__softcap_kargs a = te__softcap_problem(args);
    if (a.count == 0) return TE_OK;
    te__plan_with(p, "softcap", "softcap", te__min(te__div_up(a.count, 1024), 1 << 20), 256, &a, sizeof(a));
    return te__plan_why(p, "general: one element at a time");
}
