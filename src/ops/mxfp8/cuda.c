/* ops/mxfp8/cuda.c: plans of the MXFP8 casts. This file knows how each kernel must be launched. It must not depend on
 * what the kernels compute. */

/* Sizes a launch to one block for each tile of m x n. */
static void te__mx_grid(te__launch *l, int64_t m, int64_t n) {
    int64_t most = 65535 /* the limit of y and z */, tiles_m = te__div_up(m, TE__MX_ROWS);
    te__launch_size(l, te__div_up(n, TE__MX_COLS), te__min(tiles_m, most), te__div_up(tiles_m, most), 256, 0);
}

static te_result te__cuda_plan_mxfp8_quantize(te__plan *p, const te_op_mxfp8_quantize_args *a) {
    te__mxfp8_quantize_kargs args = TE_ZERO;
    te__launch *l;
    int64_t wide; /* columns of codes and of scales, padding included */
    args.x = te__data(a->x);
    args.row = te__data(a->row);
    args.col = te__data(a->col);
    args.row_scale = te__u8_data(a->row_scale);
    args.col_scale = te__u8_data(a->col_scale);
    args.noop = te__f32_data(a->noop);
    args.m = te__rows(a->x);
    args.n = te__cols(a->x);
    args.ld = te__cols_of(a->row);
    args.ldc = te__cols_of(a->col);
    args.x_dt = a->x->dtype;
    args.y_dt = a->row ? a->row->dtype : a->col->dtype;
    args.two_dimensional = a->two_dimensional;
    args.swizzled = a->swizzled;
    args.vector_x = te__rows_aligned(a->x, args.n, 16);
    args.vector_row = a->row && te__rows_aligned(a->row, args.ld, 8);
    args.vector_col = a->col && te__rows_aligned(a->col, args.ldc, 8);
    args.scale_rows = te__round_up(args.m, 128);
    args.scale_cols = te__round_up(args.n, 128);
    wide = te__max(args.scale_cols, te__max(args.ld, args.ldc));
    if (args.m == 0 || wide == 0) return TE_OK;
    l = te__plan_launch(p, "mxfp8", "mxfp8_quantize");
    *TE__KARGS(p, l, te__mxfp8_quantize_kargs) = args;
    te__launch_option(l, "X_DT", args.x_dt);
    te__launch_option(l, "Y_DT", args.y_dt);
    te__mx_grid(l, args.scale_rows, wide);
    p->native = p->sm >= 89;
    te__plan_why(
        p, p->native
               ? "one read of x, tiles of 32 x 256; cvt instructions"
               : "one read of x, tiles of 32 x 256; FP8 rounding in integer arithmetic, which gives the same bits");
    return TE_OK;
}

static te_result te__cuda_plan_mxfp8_dequantize(te__plan *p, const te_op_mxfp8_dequantize_args *a) {
    te__launch *l;
    te__mxfp8_dequantize_kargs *k;
    if (te__numel(a->y) == 0) return TE_OK;
    l = te__plan_launch(p, "mxfp8", "mxfp8_dequantize");
    k = TE__KARGS(p, l, te__mxfp8_dequantize_kargs);
    k->q = te__data(a->q);
    k->scale = te__u8_data(a->scale);
    k->y = te__data(a->y);
    k->m = te__rows(a->y);
    k->n = te__cols(a->y);
    k->ld = te__cols(a->q);
    k->q_dt = a->q->dtype;
    k->y_dt = a->y->dtype;
    k->columnwise = a->columnwise;
    k->swizzled = a->swizzled;
    k->vector = te__rows_aligned(a->q, k->ld, 8) && te__rows_aligned(a->y, k->n, 16);
    te__launch_option(l, "Q_DT", k->q_dt);
    te__launch_option(l, "Y_DT", k->y_dt);
    te__mx_grid(l, k->m, k->n);
    p->native = p->sm >= 89;
    te__plan_why(p, p->native ? "one pass, tiles of 32 x 256; cvt instructions"
                              : "one pass, tiles of 32 x 256; FP8 decoded in integer arithmetic, exactly");
    return TE_OK;
}
