/* ops/act/cuda.c: chooses the kernels of the activations and their options. This file must not depend on the driver. */

/* Sets the grid of a launch: tiles of 128 x 64 cover m rows and n columns. Returns the number of tiles along n. */
static unsigned te__act_tiles(te__launch *l, int64_t m, int64_t n) {
    int64_t tiles_n = te__div_up(n, 64);
    te__launch_blocks(l, te__div_up(m, 128) * tiles_n, 256);
    return (unsigned)tiles_n;
}

/* Returns the magic number and the shift that replace a division by d = `width` / 8, for dividends up to `all` / 8. The
 * shift is -1 if a plain division is needed.
 * Let 2^(l-1) < d <= 2^l. Then magic = floor(2^(31+l) / d) + 1 has 32 bits, and the result is exact for dividends of 31
 * bits. */
static te__act_divisor te__act_divisor_of(int64_t width, int64_t all) {
    te__act_divisor d = TE_ZERO;
    int l = 1;
    d.shift = -1;
    if (width % 8 || width / 8 < 2 || all / 8 >= (int64_t)1 << 31) return d;
    while ((int64_t)1 << l < width / 8) l++;
    d.magic = (unsigned)(((uint64_t)1 << (31 + l)) / (uint64_t)(width / 8) + 1);
    d.shift = l - 1;
    return d;
}

/* Returns the activation and its parameters for the kernel. n is the number of columns of y or dy. */
static te__act_rule te__act_rule_of(te_activation act, const te_activation_params *p, int64_t n) {
    te__act_rule r = TE_ZERO;
    r.block = te_activation_is_gated(act) ? p->glu_interleave_size : n;
    r.limit = p->limit;
    r.alpha = p->alpha;
    r.offset = p->no_glu_linear_offset ? 0.0f : 1.0f;
    r.act = act;
    return r;
}

static te_result te__cuda_plan_act_fwd(te__plan *p, const te_op_act_fwd_args *a) {
    const bool gated = te_activation_is_gated(a->activation);
    const te_tensor *y = a->y ? a->y : a->col;
    int64_t m = te__rows(a->x), n = gated ? te__cols(a->x) / 2 : te__cols(a->x), ld = a->y ? te__cols(a->y) : n,
            ldc = te__cols_of(a->col);
    const int unit = te__eight_bytes(y->dtype);
    const te__eight_row rows[] = {{a->x, TE_DTYPE_NONE, 16}, {a->y, TE_DTYPE_NONE, unit}};
    const char *lacks;
    int64_t block;
    te__launch *l;
    te__act_fwd_kargs *k;
    if (n == 0 || te__max(m, ldc) == 0) return TE_OK;
    if (!gated && ld == n && !a->col) { /* one long row */
        n = ld = m * n;
        m = 1;
    }
    block = gated ? a->activation_params.glu_interleave_size : n;
    lacks = te__eight_lacks(p, rows, TE__COUNT(rows), n | block | ld);
    l = te__plan_launch(p, "act", a->col ? "act_fwd_tile" : "act_fwd");
    k = TE__KARGS(p, l, te__act_fwd_kargs);
    k->x = te__data(a->x);
    k->y = te__data(a->y);
    k->col = te__data(a->col);
    k->scale = te__f32_data(a->scale);
    k->scale_inv = te__f32_data(a->scale_inv);
    k->amax = te__f32_data(a->amax);
    k->m = m;
    k->n = n;
    k->ld = ld;
    k->ldc = ldc;
    k->rule = te__act_rule_of(a->activation, &a->activation_params, n);
    k->x_dt = a->x->dtype;
    k->y_dt = y->dtype;
    k->vector_x = te__rows_aligned(a->x, n, 16);
    k->vector_y = te__rows_aligned(a->y, ld, unit);
    k->vector_col = te__rows_aligned(a->col, ldc, 16);
    if (!lacks || a->col) {
        te__launch_option(l, "ACT", a->activation);
        te__launch_option(l, "X_DT", k->x_dt);
        te__launch_option(l, "Y_DT", k->y_dt);
        if (block != n) te__launch_option(l, "INTERLEAVED", 1);
    }
    if (a->col) {
        k->tiles_n = te__act_tiles(l, te__max(m, ldc), te__max(n, ld));
        te__plan_why(p, "tiles of 128 x 64: codes of rows and of columns from one read of x");
    } else {
        k->divisor = te__act_divisor_of(ld, m * ld);
        te__launch_blocks(l, te__div_up(m * ld, !lacks && !gated ? 4096 : 2048), 256);
        te__plan_why(p, lacks ? lacks : "eight elements a thread");
    }
    return TE_OK;
}

static te_result te__cuda_plan_act_bwd(te__plan *p, const te_op_act_bwd_args *a) {
    const bool gated = te_activation_is_gated(a->activation);
    const te_tensor *dx = a->dx ? a->dx : a->col;
    int64_t m = te__rows(a->dy), n = te__cols(a->dy), width = te__cols(a->x), ld = a->dx ? te__cols(a->dx) : width,
            ldc = te__cols_of(a->col);
    const int unit = te__eight_bytes(dx->dtype);
    const te__eight_row rows[] = {
        {a->dy, TE_DTYPE_NONE, 16}, {a->x, TE_DTYPE_NONE, 16}, {a->dx, TE_DTYPE_NONE, unit}};
    const char *lacks;
    bool tiled, any;
    int64_t block;
    te__launch *l;
    te__act_bwd_kargs *k;
    float *partial = NULL;
    if (n == 0) return TE_OK;
    any = te__max(m, ldc) > 0;
    tiled = a->col || a->dbias || ld != width || (a->rounded && dx->dtype != a->x->dtype);
    if (!gated && !tiled) {
        n *= m;
        m = 1;
        width = ld = n;
    }
    block = gated ? a->activation_params.glu_interleave_size : n;
    lacks = te__eight_lacks(p, rows, TE__COUNT(rows), n | block);
    if (a->dbias) partial = te__plan_floats(p, te__div_up(m, 128) * width);
    if (any) {
        l = te__plan_launch(p, "act", tiled ? "act_bwd_tile" : "act_bwd");
        k = TE__KARGS(p, l, te__act_bwd_kargs);
        k->dy = te__data(a->dy);
        k->x = te__data(a->x);
        k->dx = te__data(a->dx);
        k->col = te__data(a->col);
        k->scale = te__f32_data(a->scale);
        k->scale_inv = te__f32_data(a->scale_inv);
        k->amax = te__f32_data(a->amax);
        k->partial = partial;
        k->m = m;
        k->n = n;
        k->ld = ld;
        k->ldc = ldc;
        k->rule = te__act_rule_of(a->activation, &a->activation_params, n);
        k->dy_dt = a->dy->dtype;
        k->x_dt = a->x->dtype;
        k->dx_dt = dx->dtype;
        k->vector_x = te__rows_aligned(a->dy, n, 16) && te__rows_aligned(a->x, n, 16);
        k->vector_dx = te__rows_aligned(a->dx, ld, unit) && te__rows_aligned(a->dx, n, unit);
        k->vector_col = te__rows_aligned(a->col, ldc, 16);
        if (!lacks || tiled) {
            te__launch_option(l, "ACT", a->activation);
            te__launch_option(l, "DY_DT", k->dy_dt);
            te__launch_option(l, "X_DT", k->x_dt);
            te__launch_option(l, "DX_DT", k->dx_dt);
            if (block != n) te__launch_option(l, "INTERLEAVED", 1);
        }
        k->divisor = te__act_divisor_of(n, m * n);
        k->amax_dt = te__act_amax_dtype(a);
        k->rounded = a->rounded && a->x->dtype != TE_F32 && (partial || dx->dtype != a->x->dtype);
        if (tiled) te__launch_option(l, "BIAS", partial != NULL);
        if (tiled) te__launch_option(l, "ROUNDED", k->rounded);
        if (tiled) k->tiles_n = te__act_tiles(l, te__max(m, ldc), te__max(n, ld - width + n));
        else te__launch_blocks(l, te__div_up(m * n, 2048), 256);
    }
    if (a->dbias) te__plan_column_sum_short(p, partial, te__div_up(m, 128), width, a->dbias, a->accumulate);
    return te__plan_why(p, tiled ? "tiles of 128 x 64: codes of rows and of columns, sums of columns from one read" :
                 lacks ? lacks : "eight elements a thread");
}

/* Fills the fields of *k that scaled_act_fwd and scaled_act_bwd have in common. Returns NULL if the kernel can move
 * eight elements at a time, otherwise the reason. */
static const char *te__scaled_act_kargs_of(te__scaled_act_kargs *k, const te__plan *p, const te_tensor *x,
                                            const te_tensor *scales, const te_tensor *out, const te_tensor *dy,
                                            te_activation act, const te_activation_params *params) {
    const te__eight_row rows[] = {{x, TE_DTYPE_NONE, 16}, {out, TE_DTYPE_NONE, 16}, {dy, TE_DTYPE_NONE, 16}};
    k->x = te__data(x);
    k->scales = te__data(scales);
    k->out = te__data(out);
    k->m = te__rows(x);
    k->n = te_activation_is_gated(act) ? te__cols(x) / 2 : te__cols(x);
    k->rule = te__act_rule_of(act, params, k->n);
    k->divisor = te__act_divisor_of(k->n, k->m * k->n);
    k->x_dt = x->dtype;
    k->scales_dt = scales->dtype;
    k->out_dt = out->dtype;
    return te__eight_lacks(p, rows, TE__COUNT(rows), k->n | k->rule.block);
}
static te_result te__cuda_plan_scaled_act_fwd(te__plan *p, const te_op_scaled_act_fwd_args *a) {
    te__scaled_act_kargs k = TE_ZERO;
    te__launch *l;
    const char *lacks;
    if (te__numel(a->y) == 0) return TE_OK;
    lacks = te__scaled_act_kargs_of(&k, p, a->x, a->act_scales, a->y, NULL, a->activation, &a->activation_params);
    l = te__plan_with(p, "act", "scaled_act_fwd", te__div_up(k.m * k.n, 2048), 256, &k, sizeof(k));
    if (!lacks) {
        te__launch_option(l, "ACT", k.rule.act);
        te__launch_option(l, "X_DT", k.x_dt);
        te__launch_option(l, "Y_DT", k.out_dt);
        if (k.rule.block != k.n) te__launch_option(l, "INTERLEAVED", 1);
    }
    return te__plan_why(p, lacks ? lacks : "eight elements a thread");
}
static te_result te__cuda_plan_scaled_act_bwd(te__plan *p, const te_op_scaled_act_bwd_args *a) {
    te__scaled_act_kargs k = TE_ZERO;
    te__launch *l;
    const char *lacks;
    if (te__rows(a->x) == 0) return TE_OK;
    lacks = te__scaled_act_kargs_of(&k, p, a->x, a->act_scales, a->dx, a->dy, a->activation, &a->activation_params);
    k.dy = te__data(a->dy);
    k.dy_dt = a->dy->dtype;
    k.dscales = te__data(a->dact_scales);
    k.dscales_dt = a->dact_scales ? a->dact_scales->dtype : TE_F32;
    l = te__plan_with(p, "act", "scaled_act_bwd", te__div_up(k.m, 8), 256, &k, sizeof(k));
    if (!lacks) {
        te__launch_option(l, "ACT", k.rule.act);
        te__launch_option(l, "DY_DT", k.dy_dt);
        te__launch_option(l, "X_DT", k.x_dt);
        te__launch_option(l, "DX_DT", k.out_dt);
        if (k.rule.block != k.n) te__launch_option(l, "INTERLEAVED", 1);
    }
    return te__plan_why(p, lacks ? lacks : "a warp a row, eight elements a lane");
}
