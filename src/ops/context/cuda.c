/* ops/context/cuda.c: chooses the kernels and launches for sequences that are split among ranks. This part may make
 * plans. It must not call the CUDA driver. */

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

/* Returns whether the kernel can read the channels of a row eight at a time. */
static bool te__context_is_vector(const te__context_merge_kargs *a) {
    bool fits = a->d % 8 == 0 && a->d > 0 && a->d <= 256 && (uintptr_t)a->x % 16 == 0 && (uintptr_t)a->o % 16 == 0;
    int i;
    for (i = 0; i < 3; i++) fits = fits && (a->size[i] == 1 || (a->x_stride[i] % 8 == 0 && a->o_stride[i] % 8 == 0));
    return fits && a->size[0] * a->size[1] * a->size[2] <= INT_MAX;
}
static te_result te__cuda_plan_context_merge(te__plan *p, const te_op_context_merge_args *args) {
    const te__context_merge_kargs a = te__context_merge_problem(args);
    const bool vector = !p->baseline && te__context_is_vector(&a);
    const long long rows = a.size[0] * a.size[1] * a.size[2], of_warp = vector ? 32 / (a.d / 8) : 1;
    te__launch *l;
    if (rows == 0 && !a.largest) return TE_OK;
    l = te__plan_launch(p, "context", "context_merge");
    *TE__KARGS(p, l, te__context_merge_kargs) = a;
    if (vector) te__launch_option(l, "X_VECTOR", a.x_dt);
    te__launch_size(l, te__max(1, te__min(te__div_up(rows, 4 * of_warp), 64 * (int64_t)te__max(p->num_sms, 1))), 1, 1,
                    128, 0);
    te__plan_why(p, vector ? "eight channels a thread" : "general: a warp for each row of a head");
    return TE_OK;
}
