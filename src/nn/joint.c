/* nn/joint.c: Linears whose products wait for each other, and for what is added to them, in a module that runs them.
 * This file must not depend on what such a module computes. */

/* Returns true if m is a Linear that computes its class's forward, so that nobody reads its output while it runs. */
static bool te__is_plain_linear(const te_module *m) {
    return m && m->cls == &te__linear_class && !m->own_forward && !te__runs_graphs(m) && m->parallel.size < 2 &&
           !((const te__linear_module *)m->state)->desc.gemm.return_bias;
}

/* Returns whether the Linear m can leave the sum of its input's gradient to a node before it. It cannot if te_backward
 * calls m alone once more (a checkpoint, a graph), if its forward has been replaced, or if the sum is to run beside its
 * products. */
static bool te__leaves_input_sum(const te_module *m) {
    return m && m->cls == &te__linear_class && !m->own_forward && !te__runs_graphs(m) && !m->checkpoint &&
           te__shares(&m->parallel, TE_PARALLEL_COLUMN) && m->parallel.group && !m->parallel.sequence &&
           !(m->parallel.beside & (TE__UB_OVERLAP_RS_DGRAD | TE__UB_BULK_WGRAD));
}
/* Begins calls of the Linears `names` of m, which all read x: if ranks have columns of each, the gradient of x is
 * summed over the ranks once, and not for each of them. Returns x, or what they read in its place. */
static te_tensor *te__input_sum_begin(te_module *m, te_tensor *x, const char *const *names, int n) {
    te__parallel p;
    int i;
    if (!te__wants_grad(x) || x->quantized) return x;
    for (i = 0; i < n; i++)
        if (!te__leaves_input_sum(te_module_find(m, names[i]))) return x;
    p = te_module_find(m, names[0])->parallel;
    te__functions_of(m->te)->input_sums = true;
    return te__input_sum(&p, x);
}
static void te__input_sum_end(te_ctx *te) { te__functions_of(te)->input_sums = false; }

/* Returns true if m is a norm that computes its class's forward. */
static bool te__is_plain_norm(const te_module *m) {
    return m && (m->cls == &te__rmsnorm_class || m->cls == &te__layernorm_class) && !m->own_forward &&
           !te__runs_graphs(m);
}
/* Takes over the norm that is to compute the module's input, or returns NULL if the input has its numbers. */
static te__late_norm *te__take_norm(te_ctx *te) {
    te__late_norm *n = te__functions_of(te)->normed;
    te__functions_of(te)->normed = NULL;
    return n;
}
/* Takes over the tensor that the module's output is to be added to, or returns NULL if there is none. */
static te_tensor *te__take_residual(te_ctx *te) {
    te_tensor *x = te__functions_of(te)->residual;
    te__functions_of(te)->residual = NULL;
    return x;
}
/* Returns residual + the output of the child `name`, which is one operation if the child's product can wait. `residual`
 * may be NULL: then returns the output. */
static te_tensor *te__run_child_added(te_module *m, const char *name, te_forward_args *args, te_tensor *residual) {
    te_op_joint_gemm_args step = TE_ZERO;
    te__joint joint;
    te_tensor *y;
    te_result result;
    if (!residual || !te__is_plain_linear(te_module_find(m, name))) {
        y = te__run_child(m, name, args);
        return y && residual ? te_add(residual, y) : y;
    }
    te__joint_open(m->te, &joint);
    y = te__run_child(m, name, args);
    if (te__joint_has(&joint, 0, y) && te__is_contiguous(y) && te__is_contiguous(residual) &&
        te__same_shape(y, residual) && y->dtype == residual->dtype) {
        step.residual = residual;
        step.y = te__empty_like(y, y->dtype);
        if (!step.y) y = NULL;
    }
    result = te__joint_run(m->te, &joint, y ? TE_OK : TE_ERR_STATE, step.y ? &step : NULL);
    return result != TE_OK ? NULL : step.y ? step.y : te_add(residual, y);
}
/* Returns the output of the child `name`. Its product runs as te_op_joint_gemm if it can wait: with one row that reads
 * codes with block scales faster than te_op_gemm (tests/bench/notes.md). */
static te_tensor *te__run_child_alone(te_module *m, const char *name, te_forward_args *args) {
    te__joint joint;
    te_tensor *y;
    if (!te__is_plain_linear(te_module_find(m, name))) return te__run_child(m, name, args);
    te__joint_open(m->te, &joint);
    y = te__run_child(m, name, args);
    return te__joint_run(m->te, &joint, y ? TE_OK : TE_ERR_STATE, NULL) == TE_OK ? y : NULL;
}
