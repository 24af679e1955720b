/* ops/context/cuda.c: chooses the kernels for sequences that are split among ranks, and their launches. This file must
 * not call the CUDA driver. */

static te_result te__cuda_plan_context_rows(te__plan *p, const te_op_context_rows_args *args) {
    const te__context_rows_kargs a = te__context_rows_problem(args);
    if (a.rows == 0) return TE_OK;
    te__plan_with(p, "context", "context_rows", te__min(te__div_up(a.rows, 256), 1 << 20), 256, &a, sizeof(a));
    return te__plan_why(p, "general: a thread finds the place of a row");
}

static te_result te__cuda_plan_context_lengths(te__plan *p, const te_op_context_lengths_args *args) {
    const te__context_lengths_kargs a = te__context_lengths_problem(args);
    te__plan_with(p, "context", "context_lengths", 1, TE__CONTEXT_THREADS, &a, sizeof(a));
    return te__plan_why(p, "general: one block adds up the lengths of all sequences");
}

/* Returns whether the kernel can read the channels of a row eight at a time. */
static bool te__context_is_vector(const te__context_merge_kargs *a) {
    int64_t strides = a->d;
    int i;
    for (i = 0; i < 3; i++)
        if (a->size[i] != 1) strides |= a->x_stride[i] | a->o_stride[i];
    return te__view_is_aligned(a->x, strides) && te__view_is_aligned(a->o, strides) && a->d > 0 && a->d <= 256 &&
           a->size[0] * a->size[1] * a->size[2] <= INT_MAX;
}
static te_result te__cuda_plan_context_merge(te__plan *p, const te_op_context_merge_args *args) {
    const te__context_merge_kargs a = te__context_merge_problem(args);
    const bool vector = !p->baseline && te__context_is_vector(&a);
    const long long rows = a.size[0] * a.size[1] * a.size[2], of_warp = vector ? 32 / (a.d / 8) : 1;
    te__launch *l;
    if (rows == 0 && !a.largest) return TE_OK;
    l = te__plan_with(p, "context", "context_merge",
                      te__max(1, te__min(te__div_up(rows, 4 * of_warp), 64 * (int64_t)p->num_sms)), 128, &a, sizeof(a));
    if (vector) te__launch_option(l, "X_VECTOR", a.x_dt);
    return te__plan_why(p, vector ? "eight channels a thread" : "general: a warp for each row of a head");
}
