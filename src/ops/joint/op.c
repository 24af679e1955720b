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

/* Returns product number i as a call of te_op_gemm. *d: room for its D, if that is a part of a tensor. */
static te_op_gemm_args te__joint_product(const te_op_joint_gemm_args *a, int i, te_tensor *d) {
    const te_joint_product *p = &a->product[i];
    te_op_gemm_args g = TE_ZERO;
    g.a = a->a;
    g.b = p->b;
    g.d = a->activation ? te__joint_view(d, a->product[0].d, i * a->m * p->n, a->m, p->n) : p->d;
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
static te_result te__check_joint_gemm(te_ctx *te, te_op_joint_gemm_args *a) {
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
    r = te__joint_check_step(te, a);
    for (i = 0; i < a->count && r == TE_OK; i++) {
        te_tensor d;
        te_op_gemm_args g = te__joint_product(a, i, &d);
        r = te__check_gemm(te, &g);
    }
    return r;
}
