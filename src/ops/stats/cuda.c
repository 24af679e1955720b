/* ops/stats/cuda.c: the plan of the error statistics. This file must not depend on what the kernels compute. */

static te_result te__cuda_plan_quant_error(te__plan *p, const te_op_quant_error_args *a) {
    te__quant_error_kargs args = TE_ZERO;
    args.x = te__data(a->x);
    args.y = te__f32_data(a->y);
    args.limit = te__f32_data(a->limit);
    args.counts = (long long *)te__data(a->counts);
    args.sums = te__f32_data(a->sums);
    args.n = te__numel(a->x);
    args.partials = te__div_up(args.n, TE__STATS_CHUNK);
    args.partial =
        (te__quant_error_partial *)te__plan_workspace(p, args.partials * (int64_t)sizeof(te__quant_error_partial));
    args.x_dt = a->x->dtype;
    args.vector = te__is_aligned(a->x, 16) && te__is_aligned(a->y, 16) && te__is_aligned(a->limit, 16);
    if (args.partials > 0) {
        te__launch *l = te__plan_with(p, "stats", "quant_error", args.partials, 256, &args, sizeof(args));
        te__launch_option(l, "X_DT", args.x_dt);
    }
    te__plan_with(p, "stats", "quant_error_final", 1, 256, &args, sizeof(args));
    return te__plan_why(p, "one pass, a partial result for 8,192 elements, then one block over them");
}
