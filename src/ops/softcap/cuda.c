/* ops/softcap/cuda.c: the launch of the softcap kernel. This part may make plans. It must not call the driver. */

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
