/* nn/gated_mlp.c: an MLP of two or three Linears, as in language models and in experts. This file must not depend on
 * who creates the Linears. */

/* State of an MLP; `gate` is NULL if the activation is not gated. */
typedef struct te__gated_mlp {
    const char *gate, *up, *down; /* names of the children (string literals) */
    te_activation activation;
    te_activation_params params;
} te__gated_mlp;

/* Returns one block of memory for the outputs of `gate` and `up`: the activation then reads both without a copy.
 * Returns NULL if that is impossible. */
static te_tensor *te__gated_mlp_halves(te_module *m, const te_tensor *x) {
    const te__gated_mlp *s = (const te__gated_mlp *)m->state;
    te_module *gate = s->gate ? te_module_find(m, s->gate) : NULL;
    const te_tensor *weight;
    te__parallel p;
    if (!gate || gate->cls != &te__linear_class || s->activation == TE_CLAMPED_SWIGLU) return NULL;
    p = te__parallel_as(gate, ((const te__linear_module *)gate->state)->desc.parallel.parallel_mode);
    weight = x && x->buffer && !te__functions_of(x->te)->any_rows ? te_module_parameter(gate, "weight") : NULL;
    if (!weight || weight->ndim != 2) return NULL;
    return te__halves_empty(x->te, x->dtype, te__rows(x) * (te__gathers(&p, TE_PARALLEL_COLUMN) ? p.size : 1),
                            weight->shape[0]);
}
/* Begins *joint. If the outputs of `gate` and `up` have the place `halves` and nobody reads them before the activation,
 * their products wait for each other and for `norm` in *joint; else *joint stays empty, and the norm runs. */
static te_result te__joint_begin(te_module *m, const te_tensor *halves, te__late_norm *norm, te__joint *joint) {
    const te__gated_mlp *s = (const te__gated_mlp *)m->state;
    te__joint_open(m->te, joint);
    joint->norm = norm;
    if (halves && te__is_plain_linear(te_module_find(m, s->gate)) && te__is_plain_linear(te_module_find(m, s->up)))
        return TE_OK;
    te__functions_of(m->te)->joint = NULL;
    return te__late_norm_run(norm);
}
static te_result te__gated_mlp_forward(te_module *m, te_forward_args *args) {
    const te__gated_mlp *s = (const te__gated_mlp *)m->state;
    te_tensor *halves = te__gated_mlp_halves(m, args->input), *parts[2] = {NULL, NULL};
    te__shared_input shared, *outer;
    te_tensor *residual = te__take_residual(m->te);
    te__late_norm *norm = te__take_norm(m->te);
    te_op_joint_gemm_args step = TE_ZERO;
    te_forward_args in = TE_ZERO;
    te__joint joint;
    te_result result;
    const char *const names[2] = {s->up, s->gate};
    int h;
    te__hand_on(&in, args);
    in.input = te__input_sum_begin(m, args->input, names, s->gate ? 2 : 1);
    if (!in.input) {
        te__input_sum_end(m->te);
        return te_error_code(m->te);
    }
    outer = te__share_begin(&shared, in.input);
    result = te__joint_begin(m, halves, norm, &joint);
    for (h = s->gate ? 0 : 1; h < 2 && result == TE_OK; h++) {
        int64_t half = halves ? halves->shape[1] / 2 : 0;
        te__functions_of(m->te)->place = halves ? te__half(halves, h, 1, &half) : NULL;
        parts[h] = te__run_child(m, h ? s->up : s->gate, &in);
        if (!parts[h]) break; /* ranks that know of it would not come to the exchange of the next one */
    }
    te__functions_of(m->te)->place = NULL;
    te__share_end(&shared, outer);
    te__input_sum_end(m->te);
    if (te__joint_has(&joint, 0, parts[0]) && te__joint_has(&joint, 1, parts[1]) && te__is_half(parts[0], halves, 0) &&
        te__is_half(parts[1], halves, 1)) {
        step.activation = s->activation;
        step.product[0].d = te__alias_2d(halves, 0, halves->dtype, 2 * te__rows(parts[0]), te__cols(parts[0]));
        step.y = step.product[0].d ? te__empty_like(parts[0], parts[0]->dtype) : NULL;
        if (!step.y) parts[1] = NULL;
    }
    result = te__joint_run(m->te, &joint, parts[1] && (parts[0] || !s->gate) ? TE_OK : TE_ERR_STATE,
                           step.y ? &step : NULL);
    if (result != TE_OK) return te_error_code(m->te);
    if (step.y) in.input = step.y;
    else if (halves && te__is_half(parts[0], halves, 0) && te__is_half(parts[1], halves, 1))
        in.input = te__activate_halves(halves, parts[0], parts[1], s->activation);
    else in.input = te_activate(s->gate ? te_concat(parts, 2, -1) : parts[1], s->activation, &s->params);
    return te__output(m, args, te__run_child_added(m, s->down, &in, residual));
}
static const te_module_class te__gated_mlp_class = {"MLP", sizeof(te__gated_mlp), te__gated_mlp_forward, NULL, NULL};

/* Creates an MLP without its Linears. The caller adds them and then calls te__close_part. */
static te_module *te__gated_mlp_open(te_ctx *te, const char *name, const te__gated_mlp *state, te_module **outer) {
    te_module *m = te__open_part(te, &te__gated_mlp_class, name, outer);
    if (m) *(te__gated_mlp *)m->state = *state;
    return m;
}
