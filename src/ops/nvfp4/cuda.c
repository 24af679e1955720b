/* ops/nvfp4/cuda.c: plans of the NVFP4 operations. This file knows how each kernel must be launched. It must not
 * depend on what the kernels compute. */

static te_result te__cuda_plan_nvfp4_amax(te__plan *p, const te_op_nvfp4_amax_args *a) {
    te__nvfp4_amax_kargs args = TE_ZERO;
    args.x = te__data(a->x);
    args.row = te__f32_data(a->amax_row);
    args.col = te__f32_data(a->amax_col);
    args.noop = te__f32_data(a->noop);
    args.m = te__rows(a->x);
    args.n = te__cols(a->x);
    args.across = (unsigned)te__div_up(args.n, 128);
    args.pieces = te__div_up(args.m, 16) * args.across;
    args.x_dt = a->x->dtype;
    args.groups = te__int_data(a->groups);
    args.count = !a->groups ? 0 : (int)te__numel(a->amax_row ? a->amax_row : a->amax_col);
    args.per_row = !a->groups && te__nvfp4_is_vector(a->amax_row);
    args.per_col = !a->groups && te__nvfp4_is_vector(a->amax_col);
    args.rht = te__nvfp4_transform(a->rht && a->amax_col, a->no_random_sign_mask);
    args.vector = te__rows_aligned(a->x, args.n, 4 * te__dtype_size(a->x->dtype));
    args.keep = a->keep;
    if (!a->keep && (args.per_row || args.per_col || args.groups || args.pieces == 0)) {
        int64_t amaxes = te__max(args.count, te__max(args.per_row ? args.m : 1, args.per_col ? args.n : 1));
        te__plan_with(p, "nvfp4", "nvfp4_amax_zero", te__max(1, te__div_up(amaxes, 256)), 256, &args, sizeof(args));
    }
    if (args.pieces > 0) {
        int64_t blocks = te__min(te__div_up(args.pieces, 8), 3 * p->num_sms);
        te__launch *l;
        args.row_part = te__plan_floats(p, 2 * blocks);
        args.col_part = args.row_part + blocks;
        args.counter = te__plan_counter(p);
        l = te__plan_with(p, "nvfp4", "nvfp4_amax", blocks, 256, &args, sizeof(args));
        te__launch_option(l, "X_DT", args.x_dt);
        te__launch_option(l, "RHT", args.rht);
        te__launch_option(l, "PER_ROW", args.per_row);
        te__launch_option(l, "PER_COL", args.per_col);
        if (args.groups) te__launch_option(l, "GROUPS", 1);
    }
    te__plan_why(p, args.rht ? "one pass; the transform in registers, 16 rows of four columns a thread"
                             : "one pass, the last block takes the largest");
    return TE_OK;
}

static te_result te__cuda_plan_nvfp4_quantize(te__plan *p, const te_op_nvfp4_quantize_args *a) {
    enum { PER_SM = 4, SHARED = 128 * (272 + 72) + 2048 }; /* the kernel's launch bounds and shared memory */
    int64_t size = te__dtype_size(a->x->dtype), columns = 256 / size, reach_m, reach_n, tiles, blocks;
    const te_tensor *amax_row, *amax_col;
    bool at_once;
    te__launch *l;
    te__nvfp4_quantize_kargs *k;
    reach_m = te__round_up(te__max(te__rows(a->x), te__cols_of(a->col)), 128);
    reach_n = te__round_up(te__max(te__cols(a->x), te__cols_of(a->row)), 128);
    tiles = reach_m / 128 * (reach_n / columns);
    amax_row = te__nvfp4_row_amax(a);
    amax_col = te__nvfp4_col_amax(a);
    if (te__numel(amax_row) == 0) amax_row = amax_col; /* a copy without rows has no amax; the kernel then reads the
                                                        * other copy's, but does not use it */
    if (te__numel(amax_col) == 0) amax_col = amax_row;
    at_once = a->measure && tiles > 0 && !te__nvfp4_is_vector(a->amax_row) && !te__nvfp4_is_vector(a->amax_col);
    blocks = at_once ? te__min(tiles, te__plan_at_once(p, 256, SHARED, PER_SM)) : tiles;
    if (a->measure && !at_once) {
        te_op_nvfp4_amax_args measures = te__nvfp4_measures(a);
        te_result result = te__cuda_plan_nvfp4_amax(p, &measures);
        if (result != TE_OK) return result;
    }
    if (tiles == 0 || te__numel(amax_row) == 0) return TE_OK;
    l = te__plan_launch(p, "nvfp4", "nvfp4_quantize");
    k = TE__KARGS(p, l, te__nvfp4_quantize_kargs);
    k->x = te__data(a->x);
    k->m = te__rows(a->x);
    k->n = te__cols(a->x);
    if (a->row) {
        k->row = te__u8_data(a->row);
        k->row_scale = te__u8_data(a->row_scale);
        k->ld = te__cols(a->row);
        k->vector_row = te__rows_aligned(a->row, k->ld, 16) && te__is_aligned(a->row_scale, 2);
    }
    if (a->col) {
        k->col = te__u8_data(a->col);
        k->col_scale = te__u8_data(a->col_scale);
        k->ldc = te__cols(a->col);
        k->vector_col = te__rows_aligned(a->col, k->ldc, 16) && te__is_aligned(a->col_scale, 4);
    }
    k->row_groups = te__nvfp4_groups(k->n);
    k->col_groups = te__nvfp4_groups(k->m);
    k->amax_row = te__f32_data(amax_row);
    k->amax_col = te__f32_data(amax_col);
    if (at_once) {
        k->out_row = te__f32_data(a->amax_row);
        k->out_col = te__f32_data(a->amax_col);
        k->part = te__plan_floats(p, 2 * blocks);
        k->counter = te__plan_counter(p);
        l->cooperative = true;
    }
    k->groups = te__int_data(a->groups);
    k->count = a->groups ? (int)te__numel(amax_row) : 0;
    k->per_row = a->groups || te__nvfp4_is_vector(te__nvfp4_row_amax(a));
    k->per_col = a->groups || te__nvfp4_is_vector(te__nvfp4_col_amax(a));
    k->noop = te__f32_data(a->noop);
    k->seed = a->seed;
    k->offset = a->offset;
    k->rng = te__data(a->rng);
    k->tiles = (unsigned)tiles;
    k->tiles_n = (unsigned)(reach_n / columns);
    k->code_max = a->e4m3_max_256 ? 256.0f : 448.0f;
    k->x_dt = a->x->dtype;
    k->two = a->two_dimensional;
    k->rht = te__nvfp4_transform(a->rht && !a->two_dimensional, a->no_random_sign_mask);
    k->stochastic = a->stochastic_rounding;
    k->four = (int)a->four_over_six;
    k->swizzled = a->swizzled;
    k->vector_x = te__rows_aligned(a->x, k->n, 16);
    te__launch_option(l, "X_DT", k->x_dt);
    te__launch_option(l, "TWO", k->two);
    te__launch_option(l, "RHT", k->rht);
    te__launch_option(l, "STOCHASTIC", k->stochastic);
    te__launch_option(l, "FOUR", k->four);
    te__launch_option(l, "MEASURE", at_once);
    te__launch_option(l, "PER_LINE", k->per_row || k->per_col);
    te__launch_blocks(l, blocks, 256);
    return te__plan_why(p, at_once ? "one launch: amaxes, then both copies of each tile in shared memory"
                            : "one read of x, a tile in shared memory, both copies from it");
}

static te_result te__cuda_plan_nvfp4_dequantize(te__plan *p, const te_op_nvfp4_dequantize_args *a) {
    te__nvfp4_dequantize_kargs k = TE_ZERO;
    te__launch *l;
    if (te__numel(a->y) == 0) return TE_OK;
    k.q = te__u8_data(a->q);
    k.scale = te__u8_data(a->scale);
    k.amax = te__f32_data(a->amax);
    k.y = te__data(a->y);
    k.m = te__rows(a->y);
    k.n = te__cols(a->y);
    k.ld = te__cols(a->q);
    k.groups = te__cols(a->scale);
    k.tiles_n = (unsigned)te__div_up(k.n, a->columnwise ? 64 : 256);
    k.code_max = a->e4m3_max_256 ? 256.0f : 448.0f;
    k.y_dt = a->y->dtype;
    k.group_of = te__int_data(a->groups);
    k.count = a->groups ? (int)te__numel(a->amax) : 0;
    k.per_row = !a->groups && te__nvfp4_is_vector(a->amax);
    k.columnwise = a->columnwise;
    k.rht = te__nvfp4_transform(a->rht, a->no_random_sign_mask);
    k.swizzled = a->swizzled;
    k.vector_q = te__rows_aligned(a->q, k.ld, 8);
    k.vector_y = te__rows_aligned(a->y, k.n, 16);
    l = te__plan_with(p, "nvfp4", "nvfp4_dequantize",
                      te__div_up(k.m, k.columnwise ? 64 : 32) * (int64_t)k.tiles_n, 256, &k, sizeof(k));
    te__launch_option(l, "Y_DT", k.y_dt);
    te__launch_option(l, "COLUMNWISE", k.columnwise);
    te__launch_option(l, "RHT", k.rht);
    return te__plan_why(p, k.columnwise ? "tiles through shared memory, 16 bytes a store"
                                        : "one pass, eight elements at a time");
}
