/* ops/cast/cuda.c: plans of the casts. Knows the kernels' contracts; must not know what they compute. */

/* Rows of ld elements all start at multiples of `bytes`. */
static bool te__cast_aligned(const te_tensor *x, int64_t ld, int64_t bytes) {
    return (uintptr_t)te__data(x) % (uintptr_t)bytes == 0 && ld * te__dtype_size(x->dtype) % bytes == 0;
}

static te_result te__cuda_plan_amax(te__plan *p, const te_amax_args *a) {
    te__amax_kargs args = TE_ZERO;
    te__launch *l;
    args.x = te__data(a->x);
    args.amax = (float *)te__data(a->amax);
    args.noop = (const float *)te__data(a->noop);
    args.n = te__numel(a->x);
    args.x_dt = a->x->dtype;
    args.vector = te__cast_aligned(a->x, 16, 16);
    if (!a->keep) {
        l = te__plan_launch(p, "cast", "amax_zero");
        *TE__KARGS(p, l, te__amax_kargs) = args;
    }
    if (args.n > 0) {
        l = te__plan_launch(p, "cast", "amax");
        te__launch_option(l, "X_DT", args.x_dt);
        te__launch_size(l, te__div_up(args.n, 8192), 1, 1, 256, 0);
        *TE__KARGS(p, l, te__amax_kargs) = args;
    }
    te__plan_why(p, "one pass, one atomic maximum a block");
    return TE_OK;
}

static te_result te__cuda_plan_scale_from_amax(te__plan *p, const te_scale_from_amax_args *a) {
    te__launch *l;
    te__scale_from_amax_kargs *k;
    if (te__numel(a->amax) == 0) return TE_OK;
    l = te__plan_launch(p, "cast", "scale_from_amax");
    k = TE__KARGS(p, l, te__scale_from_amax_kargs);
    k->amax = (const float *)te__data(a->amax);
    k->scale = (float *)te__data(a->scale);
    k->scale_inv = (float *)te__data(a->scale_inv);
    k->n = te__numel(a->amax);
    k->fp8_max = a->fp8_max;
    k->epsilon = a->epsilon;
    k->power_of_two = a->power_of_two;
    te__launch_size(l, te__div_up(k->n, 256), 1, 1, 256, 0);
    te__plan_why(p, "one thread a scale");
    return TE_OK;
}

static te_result te__cuda_plan_delayed_update(te__plan *p, const te_delayed_update_args *a) {
    te__launch *l;
    te__delayed_update_kargs *k;
    if (a->amax_history->shape[1] == 0) return TE_OK;
    l = te__plan_launch(p, "cast", "delayed_update");
    k = TE__KARGS(p, l, te__delayed_update_kargs);
    k->history = (float *)te__data(a->amax_history);
    k->scale = (float *)te__data(a->scale);
    k->reduced = (const float *)te__data(a->reduced);
    k->length = a->amax_history->shape[0];
    k->n = a->amax_history->shape[1];
    k->scaled_max = te__delayed_scaled_max(a);
    k->most_recent = a->algo == TE_AMAX_MOST_RECENT;
    te__launch_size(l, k->n, 1, 1, 256, 0);
    te__plan_why(p, "one block a slot");
    return TE_OK;
}

static te_result te__cuda_plan_fp8_quantize(te__plan *p, const te_fp8_quantize_args *a) {
    te__launch *l = te__plan_launch(p, "cast", "fp8_quantize");
    te__fp8_quantize_kargs *k = TE__KARGS(p, l, te__fp8_quantize_kargs);
    int64_t tiles_m;
    k->x = te__data(a->x);
    k->row = te__data(a->row);
    k->col = te__data(a->col);
    k->scale = (const float *)te__data(a->scale);
    k->scale_inv = (float *)te__data(a->scale_inv);
    k->amax = (float *)te__data(a->amax);
    k->noop = (const float *)te__data(a->noop);
    k->m = te__rows(a->x);
    k->n = te__cols(a->x);
    k->ld = a->row ? te__cols(a->row) : 0;
    k->ldc = a->col ? te__cols(a->col) : 0;
    k->x_dt = a->x->dtype;
    k->y_dt = a->row ? a->row->dtype : a->col->dtype;
    k->vector_x = te__cast_aligned(a->x, k->n, 16);
    k->vector_row = a->row && te__cast_aligned(a->row, k->ld, 8);
    k->vector_col = a->col && te__cast_aligned(a->col, k->ldc, 16);
    /* Tiles cover the padding too. One also when there is nothing to cast: scale_inv is written all the same. */
    tiles_m = te__max(1, te__div_up(te__max(k->m, k->ldc), 128));
    k->tiles_n = (unsigned)te__max(1, te__div_up(te__max(k->n, k->ld), 64));
    te__launch_option(l, "X_DT", k->x_dt);
    te__launch_option(l, "Y_DT", k->y_dt);
    te__launch_size(l, tiles_m * k->tiles_n, 1, 1, 256, 0);
    p->native = p->sm >= 89;
    te__plan_why(p, p->native ? "one pass; cvt instructions" : "one pass; FP8 rounding in integer arithmetic, which gives the same bits");
    return TE_OK;
}

static te_result te__cuda_plan_fp8_dequantize(te__plan *p, const te_fp8_dequantize_args *a) {
    te__launch *l;
    te__fp8_dequantize_kargs *k;
    if (te__numel(a->y) == 0) return TE_OK;
    l = te__plan_launch(p, "cast", "fp8_dequantize");
    k = TE__KARGS(p, l, te__fp8_dequantize_kargs);
    k->q = te__data(a->q);
    k->scale_inv = (const float *)te__data(a->scale_inv);
    k->y = te__data(a->y);
    k->m = te__rows(a->y);
    k->n = te__cols(a->y);
    k->ld = te__cols(a->q);
    k->q_dt = a->q->dtype;
    k->y_dt = a->y->dtype;
    k->vector = te__cast_aligned(a->q, k->ld, 8) && te__cast_aligned(a->y, k->n, 16);
    te__launch_option(l, "Q_DT", k->q_dt);
    te__launch_option(l, "Y_DT", k->y_dt);
    te__launch_size(l, te__div_up(k->m * te__div_up(k->n, 8), 1024), 1, 1, 256, 0);
    p->native = p->sm >= 89;
    te__plan_why(p, p->native ? "one pass; cvt instructions" : "one pass; FP8 decoded in integer arithmetic, exactly");
    return TE_OK;
}

static te_result te__cuda_plan_transpose(te__plan *p, const te_transpose_args *a) {
    te__launch *l;
    te__transpose_kargs *k;
    if (te__numel(a->dst) == 0) return TE_OK;
    l = te__plan_launch(p, "cast", "transpose");
    k = TE__KARGS(p, l, te__transpose_kargs);
    k->src = te__data(a->src);
    k->dst = te__data(a->dst);
    k->m = a->rows;
    k->n = a->columns;
    k->lds = te__cols(a->src);
    k->ldd = te__cols(a->dst);
    k->size = (int)te__dtype_size(a->src->dtype);
    k->vector_src = te__cast_aligned(a->src, k->lds, k->size == 1 ? 8 : 16) && k->lds % 8 == 0;
    k->vector_dst = te__cast_aligned(a->dst, k->ldd, 16);
    k->tiles_n = (unsigned)te__div_up(k->n, 64);
    te__launch_option(l, "SIZE", k->size);
    te__launch_size(l, te__div_up(k->ldd, 128 / k->size) * k->tiles_n, 1, 1, 256, 0);
    te__plan_why(p, "tiles through shared memory, 16 bytes a store");
    return TE_OK;
}
