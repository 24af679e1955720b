/* ops/dropout/cuda.c: chooses the kernel of dropout and its launch. This file must not call the CUDA driver. */

static te_result te__cuda_plan_dropout_add_fwd(te__plan *p, const te_op_dropout_add_fwd_args *a) {
    int64_t count = te__numel(a->x), n = te__cols(a->x);
    te_dtype dt = a->x->dtype;
    const te__eight_row rows[] = {
        {a->x, dt, 16}, {a->bias, TE_DTYPE_NONE, 16}, {a->residual, dt, 16}, {a->y, dt, 16}};
    const char *lacks =
        te__eight_lacks(p, rows, TE__COUNT(rows), count | (a->bias ? n : 0) | (a->run == 1 ? 0 : a->run));
    te__dropout_add_kargs k = TE_ZERO;
    te__launch *l;
    if (count == 0) return TE_OK;
    k.x = te__data(a->x);
    k.bias = te__data(a->bias);
    k.residual = te__data(a->residual);
    k.y = te__data(a->y);
    k.count = count;
    k.n = n;
    k.run = a->run;
    k.seed = a->seed;
    k.offset = a->offset;
    k.rng = te__data(a->rng);
    k.p = a->p;
    k.keep_scale = 1.0f / (1.0f - a->p);
    k.x_dt = dt;
    k.bias_dt = te__dtype_of(a->bias);
    k.residual_dt = te__dtype_of(a->residual);
    k.y_dt = a->y->dtype;
    l = te__plan_with(p, "dropout", "dropout_add", te__div_up(count, 2048), 256, &k, sizeof(k));
    if (!lacks) {
        te__launch_option(l, "X_DT", dt);
        te__launch_option(l, "W_DT", a->bias ? a->bias->dtype : dt);
    }
    return te__plan_why(p, lacks ? lacks : "eight elements a thread");
}

static te_result te__cuda_plan_dropout_add_bwd(te__plan *p, const te_op_dropout_add_bwd_args *a) {
    te_op_dropout_add_fwd_args forward = te__dropout_backward_args(a);
    return te__cuda_plan_dropout_add_fwd(p, &forward);
}
