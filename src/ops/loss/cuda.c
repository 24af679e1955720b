/* ops/loss/cuda.c: chooses the kernels of the losses, and their launches. This file must not call the CUDA driver. */

/* Returns the number of threads for a row of v logits: one for every `each` logits, rounded up to whole warps, but not
 * more than the limit `most`. */
static int te__loss_threads(int64_t v, int64_t each, int64_t most) {
    return (int)te__min(most, te__round_up(te__max(1, te__div_up(v, each)), 32));
}

static te_result te__cuda_plan_cross_entropy_fwd(te__plan *p, const te_op_cross_entropy_fwd_args *a) {
    int64_t m = te__rows(a->logits), v = te__cols(a->logits);
    if (m > 0) {
        te__launch *l = te__plan_launch(p, "loss", "cross_entropy_fwd");
        te__cross_entropy_fwd_kargs *k = TE__KARGS(p, l, te__cross_entropy_fwd_kargs);
        k->outside = te__plan_outside(p, TE__OUTSIDE_cross_entropy_fwd);
        k->logits = te__data(a->logits);
        k->target = te__data(a->target);
        k->loss = te__f32_data(a->loss);
        k->lse = te__f32_data(a->lse);
        k->parts = te__f32_data(a->parts);
        k->m = m;
        k->v = v;
        k->vocab = a->vocab_size;
        k->start = a->vocab_start;
        k->ignore_index = a->ignore_index;
        k->smoothing = a->label_smoothing;
        k->logits_dt = a->logits->dtype;
        k->target_dt = a->target->dtype;
        if (!p->baseline) te__launch_option(l, "X_DT", a->logits->dtype);
        te__launch_size(l, te__min(m, INT_MAX), 1, 1, te__loss_threads(v, 16, 512), 0);
    }
    if (a->count) {
        te__launch *l = te__plan_launch(p, "loss", "cross_entropy_count");
        te__cross_entropy_count_kargs *k = TE__KARGS(p, l, te__cross_entropy_count_kargs);
        k->target = te__data(a->target);
        k->count = te__f32_data(a->count);
        k->m = m;
        k->v = a->vocab_size;
        k->ignore_index = a->ignore_index;
        k->target_dt = a->target->dtype;
        te__launch_blocks(l, 1, 1024);
    }
    return te__plan_why(p, "one pass over the logits, a block for each row");
}

static te_result te__cuda_plan_cross_entropy_merge(te__plan *p, const te_op_cross_entropy_merge_args *a) {
    int64_t m = te__numel(a->target);
    te__cross_entropy_merge_kargs k = TE_ZERO;
    if (m == 0) return TE_OK;
    k.outside = te__plan_outside(p, TE__OUTSIDE_cross_entropy_merge);
    k.parts = te__f32_data(a->parts);
    k.target = te__data(a->target);
    k.loss = te__f32_data(a->loss);
    k.lse = te__f32_data(a->lse);
    k.m = m;
    k.vocab = a->vocab_size;
    k.ignore_index = a->ignore_index;
    k.smoothing = a->label_smoothing;
    k.ranks = (int)(te__numel(a->parts) / (3 * m));
    k.target_dt = a->target->dtype;
    te__plan_with(p, "loss", "cross_entropy_merge", te__div_up(m, 256), 256, &k, sizeof(k));
    return te__plan_why(p, "a thread for each row");
}

static te_result te__cuda_plan_cross_entropy_bwd(te__plan *p, const te_op_cross_entropy_bwd_args *a) {
    int64_t m = te__rows(a->logits), v = te__cols(a->logits);
    te__launch *l;
    te__cross_entropy_bwd_kargs *k;
    const te__eight_row rows[] = {{a->dlogits, a->logits->dtype, 1}};
    const char *lacks = te__eight_lacks(p, rows, TE__COUNT(rows), 0);
    int threads;
    if (m == 0 || v == 0) return TE_OK;
    if (!lacks && ((uintptr_t)te__data(a->logits) - (uintptr_t)te__data(a->dlogits)) % 16)
        lacks = "general, one element at a time: rows of dlogits that start elsewhere than those of logits";
    threads = te__loss_threads(v, 8, 256);
    l = te__plan_launch(p, "loss", "cross_entropy_bwd");
    k = TE__KARGS(p, l, te__cross_entropy_bwd_kargs);
    k->outside = te__plan_outside(p, TE__OUTSIDE_cross_entropy_bwd);
    k->logits = te__data(a->logits);
    k->target = te__data(a->target);
    k->lse = te__f32_data(a->lse);
    k->dloss = te__f32_data(a->dloss);
    k->count = te__f32_data(a->count);
    k->dlogits = te__data(a->dlogits);
    k->m = m;
    k->v = v;
    k->vocab = a->vocab_size;
    k->start = a->vocab_start;
    k->ignore_index = a->ignore_index;
    k->dloss_step = te__numel(a->dloss) == 1 ? 0 : 1;
    k->scale = a->scale;
    k->smoothing = a->label_smoothing;
    k->logits_dt = a->logits->dtype;
    k->target_dt = a->target->dtype;
    k->dlogits_dt = a->dlogits->dtype;
    if (!lacks) te__launch_option(l, "X_DT", a->logits->dtype);
    te__launch_size(l, te__min(m, INT_MAX), te__min(te__div_up(v, 32 * threads), 65535), 1, threads, 0);
    return te__plan_why(p, lacks ? lacks : "eight logits a thread");
}

static te_result te__cuda_plan_mse_fwd(te__plan *p, const te_op_mse_fwd_args *a) {
    int64_t count = te__numel(a->x), parts = te__min(1024, te__div_up(count, 2048));
    float *partial = te__plan_floats(p, parts);
    const te__eight_row rows[] = {{a->x, TE_DTYPE_NONE, 16}, {a->target, TE_DTYPE_NONE, 16}};
    te__launch *l;
    te__mse_kargs *k;
    if (p->result != TE_OK) return p->result;
    if (count > 0) {
        l = te__plan_launch(p, "loss", "mse_fwd");
        k = TE__KARGS(p, l, te__mse_kargs);
        k->x = te__data(a->x);
        k->target = te__data(a->target);
        k->partial = partial;
        k->count = count;
        k->x_dt = a->x->dtype;
        k->target_dt = a->target->dtype;
        if (!te__eight_lacks(p, rows, TE__COUNT(rows), count)) {
            te__launch_option(l, "X_DT", a->x->dtype);
            te__launch_option(l, "T_DT", a->target->dtype);
        }
        te__launch_blocks(l, parts, 256);
    }
    l = te__plan_launch(p, "loss", "mse_sum");
    k = TE__KARGS(p, l, te__mse_kargs);
    k->partial = partial;
    k->parts = parts;
    k->count = count;
    k->loss = te__f32_data(a->loss);
    te__launch_blocks(l, 1, 1024);
    return te__plan_why(p, "partial sums, added in fixed order");
}

static te_result te__cuda_plan_mse_bwd(te__plan *p, const te_op_mse_bwd_args *a) {
    int64_t count = te__numel(a->x);
    const te__eight_row rows[] = {
        {a->x, TE_DTYPE_NONE, 16}, {a->target, TE_DTYPE_NONE, 16}, {a->dx, a->x->dtype, 16}};
    const char *lacks = te__eight_lacks(p, rows, TE__COUNT(rows), count);
    te__mse_kargs k = TE_ZERO;
    te__launch *l;
    if (count == 0) return TE_OK;
    k.x = te__data(a->x);
    k.target = te__data(a->target);
    k.dx = te__data(a->dx);
    k.dloss = te__f32_data(a->dloss);
    k.count = count;
    k.x_dt = a->x->dtype;
    k.target_dt = a->target->dtype;
    k.dx_dt = a->dx->dtype;
    l = te__plan_with(p, "loss", "mse_bwd", te__div_up(count, 2048), 256, &k, sizeof(k));
    if (!lacks) {
        te__launch_option(l, "X_DT", a->x->dtype);
        te__launch_option(l, "T_DT", a->target->dtype);
    }
    return te__plan_why(p, lacks ? lacks : "eight elements a thread");
}
