/* ops/cast/cuda.c: plans the launches of the cast kernels. This file must not depend on what the kernels compute. */

typedef char te__cast_kargs_fit[sizeof(te__delayed_kargs) <= 4000 ? 1 : -1];

/* Plans the amaxes of groups of rows. One warp reads a row and raises the amax of the row's group. */
static te_result te__plan_amax_groups(te__plan *p, const te_op_amax_args *a) {
    te__amax_groups_kargs args = TE_ZERO;
    te__launch *l;
    args.x = te__data(a->x);
    args.groups = te__int_data(a->groups);
    args.amax = te__f32_data(a->amax);
    args.m = te__rows(a->x);
    args.n = te__cols(a->x);
    args.stride = a->amax->stride[0];
    args.count = (int)te__numel(a->amax);
    args.x_dt = a->x->dtype;
    args.vector = te__rows_aligned(a->x, args.n, 16);
    if (!a->keep) {
        te__plan_with(p, "cast", "amax_groups_zero", te__div_up(args.count, 256), 256, &args, sizeof(args));
    }
    if (te__numel(a->x) == 0) return TE_OK;
    l = te__plan_with(p, "cast", "amax_groups", te__min(te__div_up(args.m, 8), 8 * (int64_t)p->num_sms), 256, &args,
                      sizeof(args));
    te__launch_option(l, "X_DT", args.x_dt);
    te__plan_why(p, "one pass, a warp a row; the groups' maxima by atomics");
    return TE_OK;
}

/* Plans the amax of a whole tensor, with as many blocks as can run at once. Each block writes its maximum once. */
static te_result te__cuda_plan_amax(te__plan *p, const te_op_amax_args *a) {
    te__amax_kargs k = TE_ZERO;
    te__launch *l;
    int64_t size = te__dtype_size(a->x->dtype), blocks;
    if (a->groups) return te__plan_amax_groups(p, a);
    k.x = te__data(a->x);
    k.noop = te__f32_data(a->noop);
    k.n = te__numel(a->x);
    k.head = (int)te__min(k.n, (int64_t)((0 - (uintptr_t)k.x) & 15u) / size);
    k.vectors = (k.n - k.head) * size / 16;
    k.x_dt = a->x->dtype;
    blocks = te__max(1, te__min(te__div_up(k.vectors, 2048), te__plan_resident(p, 512, 0, 4)));
    k.partial = te__plan_floats(p, blocks);
    k.amax = te__f32_data(a->amax);
    k.counter = te__plan_counter(p);
    k.keep = a->keep;
    l = te__plan_with(p, "cast", "amax", blocks, 512, &k, sizeof(k));
    te__launch_option(l, "X_DT", k.x_dt);
    return te__plan_why(p, "one pass, the last block takes the largest");
}

static te_result te__cuda_plan_scale_from_amax(te__plan *p, const te_op_scale_from_amax_args *a) {
    te__scale_from_amax_kargs k = TE_ZERO;
    if (te__numel(a->amax) == 0) return TE_OK;
    k.amax = te__f32_data(a->amax);
    k.scale = te__f32_data(a->scale);
    k.scale_inv = te__f32_data(a->scale_inv);
    k.n = te__numel(a->amax);
    k.fp8_max = a->fp8_max;
    k.epsilon = a->epsilon;
    k.power_of_two = a->power_of_two;
    te__plan_with(p, "cast", "scale_from_amax", te__div_up(k.n, 256), 256, &k, sizeof(k));
    return te__plan_why(p, "one thread a scale");
}

/* Plans launches of `kernel` for `count` states, at most TE__DELAYED_MAX states a launch. State i consists of
 * history[i] and scale[i]. A slot is one column of a history, with its scale. `with` has the fields that all launches
 * share, and the amaxes of the slots of all states, or NULL. */
static void te__plan_delayed(te__plan *p, const char *kernel, int slots_a_block, te_tensor *const *history,
                             te_tensor *const *scale, int count, const te__delayed_kargs *with) {
    te__launch *l = NULL;
    te__delayed_kargs *k = NULL;
    int64_t slots = 0, before = 0; /* slots of this table, and of all earlier ones */
    int i;
    for (i = 0; i < count; i++) {
        int64_t length = history[i]->shape[0], n = history[i]->shape[1];
        int at = 0;
        if (n == 0) continue;
        while (k && at < TE__DELAYED_LENGTHS && k->length[at] != 0 && k->length[at] != (unsigned)length) at++;
        if (!k || k->states == TE__DELAYED_MAX || at == TE__DELAYED_LENGTHS || slots + n > INT32_MAX) {
            before += slots;
            slots = at = 0;
            l = te__plan_launch(p, "cast", kernel);
            k = TE__KARGS(p, l, te__delayed_kargs);
            k->amaxes = with->amaxes ? with->amaxes + before : NULL;
            k->scaled_max = with->scaled_max;
            k->most_recent = with->most_recent;
        }
        k->length[at] = (unsigned)length;
        k->length_index[k->states] = (unsigned char)at;
        k->history[k->states] = te__f32_data(history[i]);
        k->scale[k->states] = scale ? te__f32_data(scale[i]) : NULL;
        slots += n;
        k->first[++k->states] = (unsigned)slots;
        te__launch_blocks(l, te__div_up(slots, slots_a_block), 256);
    }
}
static te_result te__cuda_plan_delayed_update(te__plan *p, const te_op_delayed_update_args *a) {
    te__delayed_kargs with = TE_ZERO;
    with.amaxes = te__f32_data(a->reduced);
    with.scaled_max = te__delayed_scaled_max(a);
    with.most_recent = a->algo == TE_AMAX_MOST_RECENT;
    te__plan_delayed(p, "delayed_update", 1, a->amax_history, a->scale, a->count, &with);
    return te__plan_why(p, "186 states a launch, one block a slot");
}
static te_result te__cuda_plan_delayed_gather(te__plan *p, const te_op_delayed_gather_args *a) {
    te__delayed_kargs with = TE_ZERO;
    with.amaxes = te__f32_data(a->amaxes);
    te__plan_delayed(p, "delayed_gather", 256, a->amax_history, NULL, a->count, &with);
    return te__plan_why(p, "186 states a launch, one thread a slot");
}

/* Return the numbers of tiles along m and n. The tiles also cover the padding. Each number is at least 1, because a
 * thread block must write scale_inv even if x is empty. */
static int64_t te__cast_tiles_m(const te_op_fp8_quantize_args *a) {
    return te__max(1, te__div_up(te__max(te__rows(a->x), te__cols_of(a->col)), 128));
}
static int64_t te__cast_tiles_n(const te_op_fp8_quantize_args *a) {
    return te__max(1, te__div_up(te__max(te__cols(a->x), te__cols_of(a->row)), 64));
}

static te_result te__cuda_plan_fp8_quantize(te__plan *p, const te_op_fp8_quantize_args *a) {
    te__launch *l = te__plan_launch(p, "cast", "fp8_quantize");
    te__fp8_quantize_kargs *k = TE__KARGS(p, l, te__fp8_quantize_kargs);
    int64_t tiles_m = te__cast_tiles_m(a), tiles_n = te__cast_tiles_n(a), tiles = tiles_m * tiles_n;
    bool twice = a->current && !a->x_amax; /* x is read twice */
    int64_t resident = te__dtype_size(a->x->dtype) == 2 && !p->baseline ? TE__CAST_RESIDENT_HALVES : TE__CAST_RESIDENT;
    int64_t blocks = twice ? te__min(tiles, te__plan_at_once(p, 256, 9 * 1024, resident)) : tiles;
    if (twice) {
        k->partial = te__plan_floats(p, blocks);
        k->counter = te__plan_counter(p);
        l->cooperative = true;
    }
    k->m = te__rows(a->x);
    k->n = te__cols(a->x);
    if (a->dbias && k->n > 0 && !p->baseline)
        k->sums = te__plan_floats(p, tiles_m * k->n);
    k->current = twice;
    k->x_amax = (unsigned long long *)te__data(a->x_amax);
    k->tiles = (unsigned)tiles;
    k->epsilon = a->epsilon;
    k->power_of_two = a->power_of_two;
    k->x = te__data(a->x);
    k->row = te__data(a->row);
    k->col = te__data(a->col);
    k->scale = te__f32_data(a->scale);
    k->scale_inv = te__f32_data(a->scale_inv);
    k->amax = te__f32_data(a->amax);
    k->noop = te__f32_data(a->noop);
    k->ld = te__cols_of(a->row);
    k->ldc = te__cols_of(a->col);
    k->x_dt = a->x->dtype;
    k->y_dt = a->row ? a->row->dtype : a->col->dtype;
    k->fp8_max = te_dtype_max(a->row ? a->row->dtype : a->col->dtype);
    k->vector_x = te__rows_aligned(a->x, k->n, 16);
    k->vector_row = a->row && te__rows_aligned(a->row, k->ld, 8);
    k->vector_col = a->col && te__rows_aligned(a->col, k->ldc, 16);
    if (a->groups) {
        k->groups = te__int_data(a->groups);
        k->scale_stride = a->scale->stride[0];
        k->amax_stride = a->amax ? a->amax->stride[0] : 0;
        k->count = (int)te__numel(a->scale);
        te__launch_option(l, "GROUPS", 1);
    }
    k->tiles_n = (unsigned)tiles_n;
    te__launch_option(l, "X_DT", k->x_dt);
    te__launch_option(l, "Y_DT", k->y_dt);
    te__launch_option(l, "CURRENT", k->current);
    te__launch_option(l, "BIAS", k->sums != NULL);
    te__launch_blocks(l, blocks, 256);
    /* without rows dbias becomes zeros */
    if (k->sums) te__plan_column_sum(p, k->sums, TE_F32, te__div_up(k->m, 128), k->n, a->dbias, false);
    else if (a->dbias) te__plan_column_sum(p, k->x, a->x->dtype, k->m, k->n, a->dbias, false);
    p->native = p->sm >= 89;
    if (twice)
        te__plan_why(p, p->native ? "amax and cast in one launch; cvt instructions"
                                  : "amax and cast in one launch; FP8 rounding in integer arithmetic, exactly");
    else
        te__plan_why(p, p->native ? "one pass; cvt instructions"
                                  : "one pass; FP8 rounding in integer arithmetic, which gives the same bits");
    return TE_OK;
}

static te_result te__cuda_plan_fp8_dequantize(te__plan *p, const te_op_fp8_dequantize_args *a) {
    te__fp8_dequantize_kargs k = TE_ZERO;
    te__launch *l;
    if (te__numel(a->y) == 0) return TE_OK;
    k.q = te__data(a->q);
    k.scale_inv = te__f32_data(a->scale_inv);
    k.groups = te__int_data(a->groups);
    k.count = (int)te__numel(a->scale_inv);
    k.y = te__data(a->y);
    k.m = te__rows(a->y);
    k.n = te__cols(a->y);
    k.ld = te__cols(a->q);
    k.q_dt = a->q->dtype;
    k.y_dt = a->y->dtype;
    k.vector = te__rows_aligned(a->q, k.ld, 8) && te__rows_aligned(a->y, k.n, 16);
    l = te__plan_with(p, "cast", "fp8_dequantize", te__div_up(k.m * te__div_up(k.n, 8), 1024), 256, &k, sizeof(k));
    te__launch_option(l, "Q_DT", k.q_dt);
    te__launch_option(l, "Y_DT", k.y_dt);
    if (k.groups) te__launch_option(l, "GROUPS", 1);
    p->native = p->sm >= 89;
    te__plan_why(p, p->native ? "one pass; cvt instructions" : "one pass; FP8 decoded in integer arithmetic, exactly");
    return TE_OK;
}

static te_result te__cuda_plan_transpose(te__plan *p, const te_op_transpose_args *a) {
    te__transpose_nibbles_kargs *n;
    te__transpose_kargs t = TE_ZERO;
    te__launch *l;
    if (te__numel(a->dst) == 0) return TE_OK;
    if (te_dtype_bits(a->src->dtype) == 4) {
        l = te__plan_launch(p, "cast", "transpose_nibbles");
        n = TE__KARGS(p, l, te__transpose_nibbles_kargs);
        n->src = te__data(a->src);
        n->dst = te__data(a->dst);
        n->m = a->rows;
        n->n = a->columns;
        n->lds = te__div_up(te__cols(a->src), 2);
        n->ldd = te__div_up(te__cols(a->dst), 2);
        n->vector_src = te__rows_aligned(a->src, te__cols(a->src), 4);
        n->vector_dst = te__rows_aligned(a->dst, te__cols(a->dst), 16);
        n->tiles_n = (unsigned)te__div_up(n->n, 128);
        te__launch_blocks(l, te__div_up(n->ldd, 128) * n->tiles_n, 256);
        return te__plan_why(p, "tiles through shared memory, eight elements turned in registers, 16 bytes a store");
    }
    t.src = te__data(a->src);
    t.dst = te__data(a->dst);
    t.m = a->rows;
    t.n = a->columns;
    t.lds = te__cols(a->src);
    t.ldd = t.filled = te__cols(a->dst);
    t.size = (int)te__dtype_size(a->src->dtype);
    te__plan_transpose(p, &t);
    return TE_OK;
}
