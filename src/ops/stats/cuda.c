/* ops/stats/cuda.c: the plan of the error statistics. This part may use the kernels' arguments. It must not depend on
 * what the kernels compute. */

static te_result te__cuda_plan_quant_error(te__plan *p, const te_op_quant_error_args *a) {
    te__quant_error_kargs args = TE_ZERO;
    te__launch *l;
    args.x = te__data(a->x);
    args.y = (const float *)te__data(a->y);
    args.limit = (const float *)te__data(a->limit);
    args.counts = (long long *)te__data(a->counts);
    args.sums = (float *)te__data(a->sums);
    args.n = te__numel(a->x);
    args.partials = te__div_up(args.n, TE__STATS_CHUNK);
    args.partial =
        (te__quant_error_partial *)te__plan_workspace(p, args.partials * (int64_t)sizeof(te__quant_error_partial));
    args.x_dt = a->x->dtype;
    args.vector = te__is_aligned(a->x, 16) && te__is_aligned(a->y, 16) && (!a->limit || te__is_aligned(a->limit, 16));
    if (args.partials > 0) {
        l = te__plan_launch(p, "stats", "quant_error");
        te__launch_option(l, "X_DT", args.x_dt);
        te__launch_size(l, args.partials, 1, 1, 256, 0);
        *TE__KARGS(p, l, te__quant_error_kargs) = args;
    }
    l = te__plan_launch(p, "stats", "quant_error_final");
    te__launch_size(l, 1, 1, 1, 256, 0);
    *TE__KARGS(p, l, te__quant_error_kargs) = args;
    te__plan_why(p, "one pass, a partial result for 8,192 elements, then one block over them");
    return TE_OK;
}
