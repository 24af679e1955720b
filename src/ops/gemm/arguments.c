/* ops/gemm/arguments.c: the arguments and options that kernels of a product share, and the launches before and behind
 * the product: operands decoded by gemm_prepare, f32 operands transposed, partial sums added up, the gradient of a
 * bias. This file must not depend on which kernel takes the product (cuda.c). */

/* ---- arguments --------------------------------------------------------------------------------------------------- */

static void te__gemm_fill_scales(te__gemm_kargs *k, const te__gemm_problem *q) {
    const te_op_gemm_args *a = q->args;
    k->factor_a = k->factor_b = 1.0f;
    k->block = q->block;
    if (a->scaling_a != TE_SCALING_TENSOR) { /* for MXFP8 and NVFP4, only gemv_k reads these fields */
        k->block_a = (const float *)te__data(a->scale_a);
        k->block_b = (const float *)te__data(a->scale_b);
        k->ld_block_a = te__cols(a->scale_a); /* a->m is not used: it may count only the rows of one phase (see
                                               * te__gemm_plan_phases) */
        k->ld_block_b = te__gemm_scale_ld(a->scaling_b, false, a->n, a->k);
        k->phase = q->phase, k->phases = q->phases, k->first_b = q->first_b;
    } else {
        k->scale_a = (const float *)te__data(a->scale_a);
        k->scale_b = (const float *)te__data(a->scale_b);
    }
    if (a->scaling_a == TE_SCALING_NVFP4) {
        k->scale_a = (const float *)te__data(a->amax_a);
        k->scale_b = (const float *)te__data(a->amax_b);
        k->factor_a = te__gemm_nvfp4_factor(a->e4m3_max_256_a);
        k->factor_b = te__gemm_nvfp4_factor(a->e4m3_max_256_b);
        k->rows_a = te__numel(a->amax_a) > 1;
        k->columns_b = te__numel(a->amax_b) > 1;
    }
}

static void te__gemm_fill_groups(te__gemm_kargs *k, const te__gemm_problem *q) {
    const te_op_grouped_gemm_args *a = q->groups;
    te__gemm_grouping *s = &k->groups;
    s->sizes = te__data(a->sizes ? a->sizes : a->offsets);
    s->dt = a->sizes ? a->sizes->dtype : a->offsets->dtype;
    s->offsets = a->offsets != NULL;
    s->count = (int)a->groups;
    s->along_k = a->along_k;
    s->b_elements = a->along_k ? a->m * k->ldd : (a->b_transposed ? a->n : a->k) * k->ldb;
    if (q->block && !a->along_k) s->block_b = te__gemm_scale_rows(a->scaling_b, false, a->n, a->k) * k->ld_block_b;
    s->each_a = !q->block && a->scale_a && te__numel(a->scale_a) > 1;
    s->each_b = !q->block && a->scale_b && te__numel(a->scale_b) > 1;
}

static void te__gemm_fill(te__gemm_kargs *k, const te__gemm_problem *q) {
    const te_op_gemm_args *a = q->args;
    k->a = q->a.data;
    k->b = q->b.data;
    k->d = te__data(a->d);
    k->aux = te__data(a->aux);
    k->bias = te__data(a->bias);
    k->m = a->m;
    k->n = a->n;
    k->k = a->k;
    k->lda = q->a.ld;
    k->ldb = q->b.ld;
    k->ldd = te__gemm_ld(a->d);
    k->ldaux = a->aux ? te__gemm_ld(a->aux) : 0;
    k->k_split = te__max(a->k, 1);
    k->a_dt = q->a.dtype;
    k->b_dt = q->b.dtype;
    k->d_dt = a->d->dtype;
    k->bias_dt = a->bias ? (int)a->bias->dtype : 0;
    k->a_t = !q->a.k_major;
    k->b_t = q->b.k_major;
    k->epilogue = a->epilogue;
    k->accumulate = a->accumulate;
    k->splits = 1;
    k->vector = k->ldd % 8 == 0 && te__is_aligned(a->d, 16) && k->ldaux % 8 == 0 && te__is_aligned(a->aux, 16);
    te__gemm_fill_scales(k, q);
    if (q->groups) te__gemm_fill_groups(k, q);
}

/* Makes the kernel of a split product write partial sums to the workspace: one f32 matrix [m, ldd] for each split.
 * Returns false if there is no workspace. */
static bool te__gemm_split(te__plan *p, te__gemm_kargs *k, const te__gemm_choice *c) {
    if (c->splits == 1) return true;
    k->k_split = c->k_split;
    k->splits = (int)c->splits;
    k->ldd = te__round_up(k->n, 8); /* gemm_reduce reads eight at a time */
    k->d_split = k->m * k->ldd;
    k->d = te__plan_workspace(p, c->splits * k->d_split * 4);
    k->d_dt = TE_F32;
    k->scale_a = k->scale_b = NULL;
    k->rows_a = k->columns_b = 0;
    k->bias = NULL;
    k->aux = NULL;
    k->ldaux = 0;
    k->epilogue = TE_EPILOGUE_NONE;
    k->accumulate = 0;
    k->vector = 1;
    return k->d != NULL;
}

/* Plans gemm_reduce, which adds up the partial sums and applies scales, bias and epilogue. */
static void te__gemm_plan_reduce(te__plan *p, const te__gemm_problem *q, const te__gemm_choice *c,
                                 const void *partial) {
    const te_op_gemm_args *a = q->args;
    te__launch *l = te__plan_launch(p, "gemm", "gemm_reduce");
    te__gemm_kargs *k = TE__KARGS(p, l, te__gemm_kargs);
    te__gemm_fill(k, q);
    k->partial = (const float *)partial;
    k->splits = (int)c->splits;
    te__launch_size(l, te__min(te__div_up(a->m * te__div_up(a->n, 8), 256), 8 * (int64_t)te__max(p->num_sms, 1)), 1, 1,
                    256, 0);
}

static void te__gemm_options(te__launch *l, const te__gemm_problem *q) {
    te__launch_option(l, "A_DT", q->a.dtype);
    te__launch_option(l, "B_DT", q->b.dtype);
    te__launch_option(l, "A_T", !q->a.k_major);
    te__launch_option(l, "B_T", q->b.k_major);
    if (q->block) te__launch_option(l, "BLOCK", q->block);
}

/* The reason that te_explain prints for a kernel: first how the operands were prepared, then `text`. */
#define TE__GEMM_WHY(q, text)                                                                                      \
    ((q)->args->scaling_a == TE_SCALING_MXFP8   ? "MXFP8 decoded exactly into bf16, then " text                    \
     : (q)->args->scaling_a == TE_SCALING_NVFP4 ? "NVFP4 decoded exactly into bf16, then " text                    \
     : (q)->turned                              ? "A or B transposed, since TF32 is K-major; then " text           \
     : (q)->aligned                             ? "A or B, whose rows are not 16-byte aligned, copied; then " text \
                                                : text)
/* The reason that TE__GEMM_WHY gives, followed by how the sums over 128 values of k are computed. */
#define TE__GEMM_WHY_SUMS(q, promote, text)                                       \
    ((q)->block ? TE__GEMM_WHY(q, text ", sums of 128 k scaled in f32")           \
     : promote  ? TE__GEMM_WHY(q, text ", partial sums of 128 k promoted to f32") \
                : TE__GEMM_WHY(q, text))

/* ---- gemm_prepare ------------------------------------------------------------------------------------------------ */

/* Returns how gemm_prepare copies A (i = 0) or B (i = 1). Columns and row lengths are in codes for MXFP8 and NVFP4,
 * otherwise in bytes. */
static te__gemm_prepare_side te__gemm_prepare_one(const te__gemm_problem *q, int i) {
    const te_op_gemm_args *a = q->args;
    const te__gemm_side *x = i ? &q->b : &q->a;
    bool decoded = a->scaling_a >= TE_SCALING_MXFP8;
    int64_t lines = i ? a->n : a->m, bytes = decoded ? 1 : te__dtype_size(x->dtype); /* units of s.columns and s.ld:
                                                                                      * codes if `decoded`, otherwise
                                                                                      * bytes */
    te__gemm_prepare_side s = TE_ZERO;
    s.from = (const unsigned char *)x->data;
    s.rows = x->k_major ? lines : a->k;
    s.columns = (x->k_major ? a->k : lines) * bytes;
    s.ld = x->ld * bytes;
    /* Copied rows of 512 bytes or more are padded to lines of the L2 cache, so that 128 bytes of a tile's row lie in
     * one line. Shorter rows are padded to sectors (32 bytes) or 16 bytes. */
    s.ld_out = te__round_up(s.columns, decoded ? 16 : s.columns >= 512 ? 128 : s.columns > 16 ? 32 : 16);
    if (!decoded) return s;
    s.scale = (const unsigned char *)te__data(i ? a->scale_b : a->scale_a);
    /* for swizzled scales, ld_scale is the number of scales along k, whether x is K-major or not */
    s.ld_scale = te__gemm_scale_ld(a->scaling_a, !x->k_major && !a->swizzled_scales, lines, a->k);
    s.dt = x->dtype;
    s.down = !x->k_major;
    return s;
}

/* Returns whether gemm_prepare can count the pieces of A and B (16 bytes or 16 codes) in 32 bits. A thread's counter
 * must not overflow when its last step takes it beyond the last piece. */
static bool te__gemm_fits_prepare(const te__gemm_problem *q) {
    te__gemm_prepare_side a = te__gemm_prepare_one(q, 0), b = te__gemm_prepare_one(q, 1);
    return a.rows * (a.ld_out / 16) + b.rows * (b.ld_out / 16) <= 0xf0000000;
}

/* Plans gemm_prepare. It decodes both operands into bf16, or copies the operands whose rows are not aligned. Returns
 * false if there are too many codes or no workspace. */
static bool te__gemm_plan_prepare(te__plan *p, te__gemm_problem *q) {
    const bool decoded = q->args->scaling_a >= TE_SCALING_MXFP8;
    te__launch *l = te__plan_launch(p, "gemm", "gemm_prepare");
    te__gemm_prepare_kargs *k = TE__KARGS(p, l, te__gemm_prepare_kargs);
    int64_t pieces = 0;
    int i;
    if (!te__gemm_fits_prepare(q)) {
        p->result = te__fail(p->te, TE_ERR_UNSUPPORTED,
                             "gemm: A and B of m, n, k = %lld, %lld, %lld have more than 64424509440 codes to decode; "
                             "multiply them in parts",
                             (long long)q->args->m, (long long)q->args->n, (long long)q->args->k);
        return false;
    }
    for (i = 0; i < 2; i++) {
        te__gemm_side *x = i ? &q->b : &q->a;
        te__gemm_prepare_side *s = &k->side[i];
        if (!decoded && te__gemm_side_is_aligned(x)) continue;
        *s = te__gemm_prepare_one(q, i);
        s->out = (unsigned char *)te__plan_workspace(p, s->rows * s->ld_out * (decoded ? 2 : 1));
        if (!s->out) return false;
        x->data = s->out;
        x->ld = decoded ? s->ld_out : s->ld_out / te__dtype_size(x->dtype);
        if (decoded) x->dtype = TE_BF16;
        pieces = te__max(pieces, s->rows * (s->ld_out / 16));
    }
    k->swizzled = q->args->swizzled_scales;
    q->aligned = !decoded;
    te__launch_option(l, "DECODED", decoded);
    te__launch_size(l, te__min(te__div_up(pieces, 256), 8 * (int64_t)te__max(p->num_sms, 1)), 2, 1, 256, 0);
    return true;
}

/* ---- K-major f32 ------------------------------------------------------------------------------------------------- */

static double te__gemm_turned_from = 1.0; /* factor of the thresholds of te__gemm_pays_turning; tests set another */

#define TE__GEMM_TURNED_BYTES 1073741824.0 /* the most bytes of transposed copies */
/* Returns whether gemm_hopper takes less time than gemm_mma for f32 operands, with any transposes. wgmma multiplies
 * only K-major TF32. A transpose pays if each value of the operand is in a few hundred products. */
static bool te__gemm_pays_turning(const te__gemm_problem *q) {
    const double m = (double)q->args->m, n = (double)q->args->n, k = (double)q->args->k;
    if (4 * k * ((q->a.k_major ? 0 : m) + (q->b.k_major ? 0 : n)) > TE__GEMM_TURNED_BYTES) return false;
    return (q->a.k_major && q->b.k_major) ||
           (m * n >= 256.0 * (m + n) * te__gemm_turned_from && m * n * k >= 5e8 * te__gemm_turned_from);
}

/* Plans the transposes of operands that are not K-major. Returns false if there is no workspace. */
static bool te__gemm_plan_turns(te__plan *p, te__gemm_problem *q) {
    int i;
    for (i = 0; i < 2; i++) {
        te__gemm_side *x = i ? &q->b : &q->a;
        te__transpose_kargs t = TE_ZERO;
        if (x->k_major) continue;
        t.src = x->data;
        t.size = (int)te__dtype_size(x->dtype);
        t.m = t.filled = q->args->k;
        t.n = i ? q->args->n : q->args->m;
        t.lds = x->ld;
        t.ldd = te__round_up(t.m, 32);
        t.dst = te__plan_workspace(p, t.n * t.ldd * t.size);
        if (!t.dst) return false;
        te__plan_transpose(p, &t);
        x->data = t.dst, x->ld = t.ldd, x->k_major = q->turned = true;
    }
    return true;
}

/* ---- bias gradient ----------------------------------------------------------------------------------------------- */

/* Plans bias_gradient, the sums of D's columns. `sums` [rows, n] are partial sums of a kernel, or NULL: D is summed.
 * Returns false if there is no workspace. */
static bool te__gemm_plan_bias_gradient(te__plan *p, const te_op_gemm_args *a, const float *sums, int64_t rows) {
    te_op_column_sum_args of_d = te__gemm_column_sum(a);
    enum { SHORT = 1024 }; /* the most rows for column_sum_short, which has one block for each 32 columns */
    if (!sums) return te__cuda_plan_column_sum(p, &of_d) == TE_OK;
    if (rows <= SHORT) {
        te__plan_column_sum_short(p, sums, rows, a->n, a->bias_gradient, false);
        return true;
    }
    return te__plan_column_sum(p, sums, TE_F32, rows, a->n, a->bias_gradient, false) == TE_OK;
}

/* Returns whether the product must use its f32 operands exactly. Tensor cores would round them to TF32. */
static bool te__gemm_is_exact(const te__plan *p, const te__gemm_problem *q) {
    return q->a.dtype == TE_F32 && p->te->exact_f32;
}
