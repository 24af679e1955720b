/* ops/joint/op.c: checks the calls of te_op_joint_gemm, and writes each of its parts as a call of another operation.
 * This file must not depend on the backend. */

/* Returns x, contiguous, from element `from` on, as a matrix [rows, columns]. The view is stored in *view. */
static te_tensor *te__joint_view(te_tensor *view, const te_tensor *x, int64_t from, int64_t rows, int64_t columns) {
    *view = *x;
    view->ndim = 2;
    view->shape[0] = rows;
    view->shape[1] = view->stride[0] = columns;
    view->stride[1] = 1;
    view->offset += from * te__dtype_size(x->dtype);
    return view;
}

/* Returns the columns of all products together. */
static int64_t te__joint_width(const te_op_joint_gemm_args *a) {
    int64_t width = 0;
    int i;
    for (i = 0; i < a->count; i++) width += a->product[i].n;
    return width;
}
/* Returns product number i as a call of te_op_gemm. *d: room for its D, if that is a part of a tensor. */
static te_op_gemm_args te__joint_product(const te_op_joint_gemm_args *a, int i, te_tensor *d) {
    const te_joint_product *p = &a->product[i];
    te_op_gemm_args g = TE_ZERO;
    int64_t from = 0;
    int k;
    g.a = a->a;
    g.b = p->b;
    g.d = p->d;
    if (a->activation) g.d = te__joint_view(d, a->product[0].d, i * a->m * p->n, a->m, p->n);
    if (a->rope.q) {
        for (k = 0; k < i; k++) from += a->product[k].n;
        g.d = te__joint_view(d, a->product[0].d, from, a->m, p->n);
        d->stride[0] = te__joint_width(a);
    }
    g.bias = p->bias;
    g.scale_b = p->scale_b;
    g.amax_b = p->amax_b;
    g.m = a->m;
    g.n = p->n;
    g.k = a->k;
    g.b_transposed = true;
    g.split_accumulator = a->split_accumulator;
    g.scaling_a = a->scaling_a;
    g.scaling_b = a->scaling_b;
    g.swizzled_scales = a->swizzled_scales;
    g.e4m3_max_256_a = a->e4m3_max_256_a;
    g.e4m3_max_256_b = a->e4m3_max_256_b;
    g.quantize_a = a->quantize_a;
    g.quantize_epsilon = a->quantize_epsilon;
    g.quantize_power_of_two = a->quantize_power_of_two;
    return g;
}

/* The norm before the products as a call of te_op_rmsnorm_fwd or te_op_layernorm_fwd, and the rest of the call. The
 * memory of the normalized rows is memory.data, of `bytes`. */
typedef struct te__joint_norm {
    te_norm_fwd_args norm;
    te_op_joint_gemm_args products; /* without a norm; a is `rows` */
    te_tensor rows;
    te__buffer memory;
    int64_t bytes;
} te__joint_norm;

static void te__joint_norm_of(te_ctx *te, te__joint_norm *n, const te_op_joint_gemm_args *a) {
    static const te_norm_options none = TE_ZERO;
    memset(n, 0, sizeof(*n));
    n->bytes = te__gemm_temporary(te, &n->rows, &n->memory, a->a->dtype, a->m, a->k);
    n->norm.x = a->a;
    n->norm.gamma = a->norm_weight;
    n->norm.beta = a->norm_bias;
    n->norm.y = &n->rows;
    n->norm.norm = a->norm;
    n->norm.rounded = a->norm_rounded;
    n->products = *a;
    n->products.a = &n->rows;
    n->products.norm = none;
    n->products.norm_weight = n->products.norm_bias = NULL;
    n->products.norm_rounded = false;
}

/* The step after the products, as a call of te_op_act_fwd or te_op_axpby. */
typedef struct te__joint_step {
    te_op_act_fwd_args act;
    te_op_axpby_args add;
    te_tensor x, y; /* D_0 with D_1 behind it, and y, each as one row */
} te__joint_step;

static te_result te__joint_step_of(te_ctx *te, te__joint_step *s, const te_op_joint_gemm_args *a) {
    memset(s, 0, sizeof(*s));
    if (a->activation) {
        s->act.x = te__joint_view(&s->x, a->product[0].d, 0, 1, 2 * te__numel(a->y));
        s->act.y = te__joint_view(&s->y, a->y, 0, 1, te__numel(a->y));
        s->act.activation = a->activation;
        return te__check_act_fwd(te, &s->act);
    }
    s->add.x = a->residual;
    s->add.y = a->product[0].d;
    s->add.out = a->y;
    s->add.alpha = s->add.beta = 1.0f;
    return TE_OK;
}

/* The rotation after the products as a call of te_op_qkv_rope. */
typedef struct te__joint_rope {
    te_op_qkv_rope_args args;
    te_tensor qkv; /* D_0, D_1 and D_2 as one matrix */
} te__joint_rope;

static void te__joint_rope_of(te__joint_rope *r, const te_op_joint_gemm_args *a) {
    r->args = a->rope;
    r->args.qkv = te__joint_view(&r->qkv, a->product[0].d, 0, a->m, te__joint_width(a));
}

/* Checks a tensor of the step after the products: contiguous, `times` * m x n elements of D_0's format. */
static te_result te__joint_want(te_ctx *te, const te_op_joint_gemm_args *a, const char *name, const te_tensor *x,
                                int times) {
    const te_tensor *d = a->product[0].d;
    char text[TE__SHAPE_TEXT];
    if (x->dtype != d->dtype)
        return te__fail(te, TE_ERR_DTYPE, "joint_gemm: %s is %s and product[0].d %s; they must be alike", name,
                        te_dtype_name(x->dtype), te_dtype_name(d->dtype));
    if (!te__is_contiguous(x) || te__rows(x) != te__size_times(times, a->m) || te__cols(x) != a->product[0].n)
        return te__fail(te, TE_ERR_SHAPE, "joint_gemm: %s is %s; a contiguous [%lld, %lld] is needed", name,
                        te__shape_text(x, text), (long long)te__size_times(times, a->m), (long long)a->product[0].n);
    return TE_OK;
}
static te_result te__joint_check_step(te_ctx *te, const te_op_joint_gemm_args *a) {
    te_result r;
    if (a->activation && a->residual)
        return te__fail(te, TE_ERR_INVALID, "joint_gemm: activation is %d and residual is given; leave one of them 0",
                        (int)a->activation);
    if (!a->activation && !a->residual)
        return a->y ? te__fail(te, TE_ERR_INVALID,
                               "joint_gemm: y is given, and neither activation nor residual, of which it is the result")
                    : TE_OK;
    if (a->count != (a->activation ? 2 : 1))
        return te__fail(te, TE_ERR_INVALID, "joint_gemm: count is %d; with %s it is %d", a->count,
                        a->activation ? "activation" : "residual", a->activation ? 2 : 1);
    if (a->activation && (a->activation < 0 || a->activation >= TE_ACTIVATION_COUNT ||
                          !te_activation_is_gated(a->activation) || a->activation == TE_CLAMPED_SWIGLU))
        return te__fail(te, TE_ERR_INVALID,
                        "joint_gemm: activation is %d; a gated one without parameters is needed, TE_SWIGLU (%d) say",
                        (int)a->activation, (int)TE_SWIGLU);
    if (a->activation && a->product[1].n != a->product[0].n)
        return te__fail(te, TE_ERR_SHAPE, "joint_gemm: with activation, product[0].n is %lld and product[1].n %lld; "
                        "they must be alike", (long long)a->product[0].n, (long long)a->product[1].n);
    r = te__joint_want(te, a, "y", a->y, 1);
    if (r == TE_OK) r = te__joint_want(te, a, "product[0].d", a->product[0].d, a->activation ? 2 : 1);
    return r == TE_OK && a->residual ? te__joint_want(te, a, "residual", a->residual, 1) : r;
}
/* Checks the rotation after the products, and fills in its defaults. */
static te_result te__joint_check_rope(te_ctx *te, te_op_joint_gemm_args *a) {
    const te_op_qkv_rope_args *o = &a->rope;
    const te_tensor *d = a->product[0].d;
    const char *extra = o->qkv ? "qkv" : o->k ? "k" : o->v ? "v" : o->rotated ? "rotated" : NULL;
    const int64_t width = te__joint_width(a);
    char text[TE__SHAPE_TEXT];
    te__joint_rope r;
    te_result result;
    int i;
    if (!o->q)
        return extra || o->k_cache || o->v_cache || o->cu_seqlens || o->cache_positions || o->page_table ||
                       o->k_factors || o->v_factors
                   ? te__fail(te, TE_ERR_INVALID, "joint_gemm: rope.%s is given, and rope.q NULL; give both or none",
                              extra           ? extra
                              : o->k_cache    ? "k_cache"
                              : o->v_cache    ? "v_cache"
                              : o->cu_seqlens ? "cu_seqlens"
                              : o->page_table ? "page_table"
                              : o->k_factors  ? "k_factors"
                              : o->v_factors  ? "v_factors"
                                              : "cache_positions")
                   : TE_OK;
    if (a->count != 3 || a->activation || a->residual)
        return te__fail(te, TE_ERR_INVALID,
                        "joint_gemm: rope.q is given, with count %d, activation %d and residual %s; three products, 0 "
                        "and NULL are needed",
                        a->count, (int)a->activation, a->residual ? "given" : "NULL");
    if (a->product[1].d || a->product[2].d)
        return te__fail(te, TE_ERR_INVALID,
                        "joint_gemm: rope.q and product[%d].d are given; product[0].d has all three products then",
                        a->product[1].d ? 1 : 2);
    if (extra || o->interleaved_groups || !o->k_cache)
        return te__fail(te, TE_ERR_INVALID,
                        "joint_gemm: rope.%s%s; with rope.q, k_cache and v_cache are given, and qkv, k, v, rotated and "
                        "interleaved_groups are not",
                        extra                   ? extra
                        : o->interleaved_groups ? "interleaved_groups"
                                                : "k_cache",
                        extra                   ? " is given"
                        : o->interleaved_groups ? " is true"
                                                : " is NULL");
    for (i = 0; i < 3; i++) {
        const int heads = i ? o->num_groups : o->num_heads;
        if (a->product[i].n != (int64_t)heads * o->head_dim)
            return te__fail(te, TE_ERR_SHAPE,
                            "joint_gemm: product[%d].n is %lld, and rope has %d heads of %d; they must be as many", i,
                            (long long)a->product[i].n, heads, o->head_dim);
    }
    if (!te__is_contiguous(d) || te__rows(d) != a->m || te__cols(d) != width)
        return te__fail(te, TE_ERR_SHAPE,
                        "joint_gemm: product[0].d is %s; with rope.q, a contiguous [%lld, %lld] is needed",
                        te__shape_text(d, text), (long long)a->m, (long long)width);
    te__joint_rope_of(&r, a);
    result = te__check_qkv_rope(te, &r.args);
    a->rope.angles = r.args.angles;
    return result;
}
static te_result te__joint_check_norm(te_ctx *te, te_op_joint_gemm_args *a) {
    const bool layernorm = a->norm.normalization == TE_LAYERNORM;
    te_result r;
    if ((int)a->norm.normalization < 0 || a->norm.normalization > TE_RMSNORM)
        return te__fail(te, TE_ERR_INVALID,
                        "joint_gemm: norm.normalization is %d; TE_LAYERNORM (%d), TE_RMSNORM (%d), and 0 for no norm, "
                        "are possible",
                        (int)a->norm.normalization, (int)TE_LAYERNORM, (int)TE_RMSNORM);
    if (!a->norm.normalization)
        return a->norm_weight || a->norm_bias || a->norm_rounded
                   ? te__fail(te, TE_ERR_INVALID,
                              "joint_gemm: %s is given, and norm.normalization is 0, no norm; leave one of them out",
                              a->norm_weight ? "norm_weight"
                              : a->norm_bias ? "norm_bias"
                                             : "norm_rounded")
                   : TE_OK;
    if (layernorm ? a->norm_rounded : a->norm_bias != NULL)
        return te__fail(te, TE_ERR_INVALID, "joint_gemm: norm.normalization is %s, which has no %s; leave it %s",
                        layernorm ? "TE_LAYERNORM" : "TE_RMSNORM", layernorm ? "norm_rounded" : "norm_bias",
                        layernorm ? "false" : "NULL");
    r = te__check_norm_options(te, "joint_gemm", &a->norm, layernorm);
    if (r == TE_OK) r = te__want_numel(te, "joint_gemm", "norm_weight", a->norm_weight, a->k);
    return r == TE_OK ? te__want_numel(te, "joint_gemm", "norm_bias", a->norm_bias, a->k) : r;
}
static te_result te__check_joint_gemm(te_ctx *te, te_op_joint_gemm_args *a) {
    char text[TE__SHAPE_TEXT];
    te_result r = TE_OK;
    int i;
    if (a->count < 1 || a->count > TE__COUNT(a->product))
        return te__fail(te, TE_ERR_INVALID, "joint_gemm: count is %d; 1 to %d products are possible", a->count,
                        (int)TE__COUNT(a->product));
    for (i = a->count; i < TE__COUNT(a->product); i++)
        if (a->product[i].b || a->product[i].d)
            return te__fail(te, TE_ERR_INVALID, "joint_gemm: product[%d] is given, and count is %d", i, a->count);
    if (a->activation && a->product[1].d)
        return te__fail(te, TE_ERR_INVALID,
                        "joint_gemm: activation and product[1].d are given; product[0].d has both products then");
    if (te__rows(a->a) != a->m || te__cols(a->a) != a->k)
        return te__fail(te, TE_ERR_SHAPE, "joint_gemm: a is %s; [%lld, %lld] of m and k is needed",
                        te__shape_text(a->a, text), (long long)a->m, (long long)a->k);
    r = te__joint_check_norm(te, a);
    if (r == TE_OK) r = te__joint_check_step(te, a);
    if (r == TE_OK) r = te__joint_check_rope(te, a);
    for (i = 0; i < a->count && r == TE_OK; i++) {
        te_tensor d;
        te_op_gemm_args g = te__joint_product(a, i, &d);
        r = te__check_gemm(te, &g);
    }
    return r;
}
