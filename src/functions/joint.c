/* functions/joint.c: products of one input that wait for each other, and the norm of that input, which waits for them.
 * They run as one operation, te_op_joint_gemm. This file must not depend on modules, nor on who notes a product. */

/* A norm that has not run, because products may compute it on their way. Its output has no numbers until then. Whoever
 * reads the output otherwise calls te__late_norm_run first. */
typedef struct te__late_norm {
    te_tensor *y;           /* the output, retained; NULL: there is no such norm, or it has run */
    te_tensor *x;           /* the input, retained */
    te_tensor *gamma, *beta; /* retained; beta may be NULL */
    te_norm_options options;
    bool rounded;
} te__late_norm;

static void te__late_norm_close(te__late_norm *n) {
    te_tensor_release(n->y);
    te_tensor_release(n->x);
    te_tensor_release(n->gamma);
    te_tensor_release(n->beta);
    memset(n, 0, sizeof(*n));
}
/* Returns whether x is the output of *n, and has no numbers yet. `n` may be NULL. */
static bool te__is_late(const te__late_norm *n, const te_tensor *x) {
    return n && n->y && x && x->buffer == n->y->buffer && x->offset == n->y->offset;
}
/* Runs the norm, unless it has run. `n` may be NULL. */
static te_result te__late_norm_run(te__late_norm *n) {
    te_norm_fwd_args a = TE_ZERO;
    te_result result;
    if (!n || !n->y) return TE_OK;
    a.x = n->x;
    a.gamma = n->gamma;
    a.beta = n->beta;
    a.y = n->y;
    a.norm = n->options;
    a.rounded = n->rounded;
    result = n->options.normalization == TE_RMSNORM ? te_op_rmsnorm_fwd(n->y->te, &a)
                                                    : te_op_layernorm_fwd(n->y->te, &a);
    te__late_norm_close(n);
    return result;
}

/* Products of one input, noted by te__linear between te__joint_open and te__joint_run, which runs them as one
 * operation. Nobody may read their results before. */
typedef struct te__joint {
    te_op_joint_gemm_args args; /* without a norm before the products and a step after them */
    te__late_norm *norm;        /* the norm whose output the products read, or NULL */
} te__joint;

static void te__joint_open(te_ctx *te, te__joint *j) {
    memset(j, 0, sizeof(*j));
    te__functions_of(te)->joint = j;
}
/* Notes a product. Returns false, and notes nothing, if it cannot be one of those of *j. */
static bool te__joint_takes(te__joint *j, const te_op_gemm_args *g) {
    te_op_joint_gemm_args *a = &j->args;
    te_joint_product *p;
    if (a->count == TE__COUNT(a->product) || g->quantize_scale || g->quantize_amax || g->scale_a || g->amax_a ||
        g->a_transposed || !g->b_transposed || g->accumulate || g->epilogue)
        return false;
    if (a->count == 0) {
        a->a = g->a;
        a->m = g->m;
        a->k = g->k;
        a->split_accumulator = g->split_accumulator;
        a->scaling_a = g->scaling_a;
        a->scaling_b = g->scaling_b;
        a->swizzled_scales = g->swizzled_scales;
        a->e4m3_max_256_a = g->e4m3_max_256_a;
        a->e4m3_max_256_b = g->e4m3_max_256_b;
        a->quantize_a = g->quantize_a;
        a->quantize_epsilon = g->quantize_epsilon;
        a->quantize_power_of_two = g->quantize_power_of_two;
    } else if (a->a != g->a || a->m != g->m || a->k != g->k || a->split_accumulator != g->split_accumulator ||
               a->scaling_a != g->scaling_a || a->scaling_b != g->scaling_b ||
               a->swizzled_scales != g->swizzled_scales || a->e4m3_max_256_a != g->e4m3_max_256_a ||
               a->e4m3_max_256_b != g->e4m3_max_256_b || a->quantize_a != g->quantize_a ||
               a->quantize_epsilon != g->quantize_epsilon || a->quantize_power_of_two != g->quantize_power_of_two)
        return false;
    p = &a->product[a->count++];
    /* the frame of the module that computes the product ends before the product runs */
    p->b = te_tensor_retain((te_tensor *)g->b);
    p->d = te_tensor_retain(g->d);
    p->bias = te_tensor_retain((te_tensor *)g->bias);
    p->scale_b = te_tensor_retain((te_tensor *)g->scale_b);
    p->amax_b = te_tensor_retain((te_tensor *)g->amax_b);
    p->n = g->n;
    return true;
}
/* Runs the products that were noted, and from now on products run at once. `result`: the result of the calls since
 * te__joint_open; the products run if it is TE_OK. `step`: fields activation, residual, y and rope of the step after
 * them, or NULL. With activation or rope `step` has product[0].d, too: the tensor whose parts are the results of all
 * products. */
static te_result te__joint_run(te_ctx *te, te__joint *j, te_result result, const te_op_joint_gemm_args *step) {
    te_op_joint_gemm_args *a = &j->args, run = *a;
    int i;
    te__functions_of(te)->joint = NULL;
    if (step) {
        run.activation = step->activation;
        run.residual = step->residual;
        run.y = step->y;
        run.rope = step->rope;
        if (step->product[0].d)
            run.product[0].d = step->product[0].d, run.product[1].d = run.product[2].d = NULL;
    }
    if (te__is_late(j->norm, a->a)) {
        run.a = j->norm->x;
        run.norm = j->norm->options;
        run.norm_weight = j->norm->gamma;
        run.norm_bias = j->norm->beta;
        run.norm_rounded = j->norm->rounded;
    }
    if (result == TE_OK && a->count) result = te_op_joint_gemm(te, &run);
    for (i = 0; i < a->count; i++) {
        te_tensor_release((te_tensor *)a->product[i].b);
        te_tensor_release(a->product[i].d);
        te_tensor_release((te_tensor *)a->product[i].bias);
        te_tensor_release((te_tensor *)a->product[i].scale_b);
        te_tensor_release((te_tensor *)a->product[i].amax_b);
    }
    a->count = 0;
    return result;
}
/* Runs the norm whose output is x, before somebody reads x. */
static te_result te__joint_reads(const te_tensor *x) {
    const te__joint *j = te__functions_of(x->te)->joint;
    return j && te__is_late(j->norm, x) ? te__late_norm_run(j->norm) : TE_OK;
}
/* Returns whether product number i of *j computes y. */
static bool te__joint_has(const te__joint *j, int i, const te_tensor *y) {
    const te_tensor *d = i < j->args.count ? j->args.product[i].d : NULL;
    return d && y && y->buffer == d->buffer && y->offset == d->offset && te__same_shape(y, d) && y->dtype == d->dtype;
}
