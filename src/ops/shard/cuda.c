/* ops/shard/cuda.c: plans of the operations on slices of a matrix. This file must not depend on what the kernels
 * compute. */

static te_result te__cuda_plan_shard_amax(te__plan *p, const te_op_shard_amax_args *a) {
    int64_t tr = a->tile_rows, tc = a->tile_columns, blocks;
    te__shard_amax_kargs k = TE_ZERO;
    te__launch *l;
    if (te__numel(a->amax) == 0) return TE_OK;
    k.x = te__data(a->x);
    k.amax = te__f32_data(a->amax);
    k.rows = a->rows;
    k.columns = a->columns;
    k.start = a->start;
    k.n = te__numel(a->x);
    k.tiles_m = te__rows(a->amax);
    k.tiles_n = te__cols(a->amax);
    k.tile_rows = tr;
    k.tile_columns = tc;
    k.blocks_n = (unsigned)te__div_up(a->columns, 256);
    k.x_dt = a->x->dtype;
    k.vector = te__view_is_aligned(k.x, a->columns | a->start);
    k.kind = tr == 128 && tc == 128 ? TE__SHARD_128X128
             : tr == 16 && tc == 16 ? TE__SHARD_16X16
             : tr == 1 && tc == 32  ? TE__SHARD_1X32
             : tr == 32 && tc == 1  ? TE__SHARD_32X1
                                    : TE__SHARD_ANY;
    blocks = te__div_up(a->rows, k.kind == TE__SHARD_128X128 ? 128 : 32) * k.blocks_n;
    if (k.kind == TE__SHARD_ANY) blocks = te__min(te__numel(a->amax), 65535);
    l = te__plan_with(p, "shard", "shard_amax", blocks, 256, &k, sizeof(k));
    if (k.kind != TE__SHARD_ANY) {
        te__launch_option(l, "X_DT", k.x_dt);
        te__launch_option(l, "KIND", k.kind);
    }
    return te__plan_why(p, k.kind == TE__SHARD_ANY ? "one block a tile" : "one pass; each amax is written once");
}

static te_result te__cuda_plan_shard_scales(te__plan *p, const te_op_shard_scales_args *a) {
    const te_tensor *row = a->row_scale ? a->row_scale : a->multiplier;
    int64_t quads = ((row ? te__numel(row) : 0) + (a->col_scale ? te__numel(a->col_scale) : 0)) / 4;
    te__shard_scales_kargs k = TE_ZERO;
    if (quads == 0) return TE_OK;
    k.amax = te__f32_data(a->amax);
    k.amax_col = te__f32_data(a->amax_col);
    k.amax_tensor = te__f32_data(a->amax_tensor);
    k.row_scale = te__data(a->row_scale);
    k.col_scale = te__data(a->col_scale);
    k.multiplier = te__f32_data(a->multiplier);
    k.rows = a->rows;
    k.columns = a->columns;
    k.row_m = row ? te__rows(row) : 0;
    k.row_n = te__cols_of(row);
    k.col_m = a->col_scale ? te__rows(a->col_scale) : 0;
    k.col_n = te__cols_of(a->col_scale);
    k.fp8_max = te__shard_fp8_max(a->dtype);
    k.fp8_max_inverse = a->dtype == TE_F8E5M2 ? TE__E5M2_MAX_INVERSE : TE__E4M3_MAX_INVERSE;
    k.epsilon = a->epsilon;
    k.limit = a->amax_limit;
    k.code_max = a->e4m3_max_256 ? 256.0f : 448.0f;
    k.scaling = a->scaling;
    k.power_of_two = !a->fp32_scales;
    te__plan_with(p, "shard", "shard_scales", te__div_up(quads, 256), 256, &k, sizeof(k));
    return te__plan_why(p, "one thread for four scales");
}

static te_result te__cuda_plan_shard_cast(te__plan *p, const te_op_shard_cast_args *a) {
    bool transposed = a->scaling == TE_SCALING_TENSOR && a->columnwise;
    int64_t n = te__numel(a->x), last;
    te__launch *l;
    te__shard_cast_kargs *k;
    if (n == 0) return TE_OK;
    last = a->start + n - 1;
    l = te__plan_launch(p, "shard", transposed ? "shard_cast_transposed" : "shard_cast");
    k = TE__KARGS(p, l, te__shard_cast_kargs);
    k->x = te__data(a->x);
    k->dst = te__data(a->dst);
    k->scale = te__data(a->scale);
    k->multiplier = te__f32_data(a->multiplier);
    k->amax_tensor = te__f32_data(a->amax_tensor);
    k->amax = te__f32_data(a->amax);
    k->rows = a->rows;
    k->columns = a->columns;
    k->start = a->start;
    k->n = n;
    k->ld = te__cols(a->dst);
    k->scale_ld = te__cols(a->scale);
    k->code_max = a->e4m3_max_256 ? 256.0f : 448.0f;
    k->x_dt = a->x->dtype;
    k->q_dt = a->dst->dtype;
    k->scaling = a->scaling;
    k->columnwise = a->columnwise;
    k->flat = a->flat;
    te__launch_option(l, "X_DT", k->x_dt);
    p->native = p->sm >= 89 && a->scaling != TE_SCALING_NVFP4;
    if (transposed) {
        k->vector = te__view_is_aligned(k->x, a->columns | a->start);
        k->tiles_n = (unsigned)te__div_up(a->columns, 64);
        k->first_tile = a->start / a->columns / 128;
        te__launch_blocks(l, (last / a->columns / 128 - k->first_tile + 1) * k->tiles_n, 256);
        return te__plan_why(p, "tiles through shared memory, 16 bytes a store");
    }
    k->straight = a->flat && a->scaling == TE_SCALING_NVFP4 && a->columns % 2 != 0;
    k->vector = te__is_aligned(a->x, 16) && te__is_aligned(a->dst, 16) && a->columns % 16 == 0 && a->start % 16 == 0 &&
                (a->flat || k->ld % 16 == 0) && (a->scaling != TE_SCALING_MXFP8 || te__is_aligned(a->scale, 16));
    k->groups_per_row = te__div_up(k->straight ? a->rows * a->columns : a->columns, 16);
    k->first = k->straight ? a->start / 16 : a->start / a->columns * k->groups_per_row + a->start % a->columns / 16;
    k->count =
        (k->straight ? last / 16 : last / a->columns * k->groups_per_row + last % a->columns / 16) - k->first + 1;
    te__launch_option(l, "SCALING", k->scaling);
    te__launch_blocks(l, te__div_up(k->count, 256), 256);
    return te__plan_why(p, k->vector ? "one pass, 16 codes a thread"
                              : "one pass, element by element: columns, start or addresses are no multiples of 16");
}
