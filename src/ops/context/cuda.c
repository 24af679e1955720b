/* ops/context/cuda.c: the kernels of ranks that share sequences, and how they are launched. Knows plans; must not know the driver. */

static te_result te__cuda_plan_context_rows(te__plan *p, const te_op_context_rows_args *args) {
    const te__context_rows_kargs a = te__context_rows_problem(args);
    te__launch *l;
    if (a.rows == 0) return TE_OK;
    l = te__plan_launch(p, "context", "context_rows");
    *TE__KARGS(p, l, te__context_rows_kargs) = a;
    te__launch_size(l, te__min(te__div_up(a.rows, 256), 1 << 20), 1, 1, 256, 0);
    te__plan_why(p, "general: a thread finds the place of a row");
    return TE_OK;
}

static te_result te__cuda_plan_context_lengths(te__plan *p, const te_op_context_lengths_args *args) {
    te__launch *l = te__plan_launch(p, "context", "context_lengths");
    *TE__KARGS(p, l, te__context_lengths_kargs) = te__context_lengths_problem(args);
    te__launch_size(l, 1, 1, 1, TE__CONTEXT_THREADS, 0);
    te__plan_why(p, "general: one block adds up the lengths of all sequences");
    return TE_OK;
}

static te_result te__cuda_plan_context_merge(te__plan *p, const te_op_context_merge_args *args) {
    const te__context_merge_kargs a = te__context_merge_problem(args);
    const long long rows = a.size[0] * a.size[1] * a.size[2];
    te__launch *l;
    if (rows == 0 && !a.largest) return TE_OK;
    l = te__plan_launch(p, "context", "context_merge");
    *TE__KARGS(p, l, te__context_merge_kargs) = a;
    te__launch_size(l, te__max(1, te__min(te__div_up(rows, 4), 1 << 20)), 1, 1, 128, 0);
    te__plan_why(p, "general: a warp for each row of a head");
    return TE_OK;
}
