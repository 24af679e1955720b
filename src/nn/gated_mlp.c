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
    if (!gate || gate->cls != &te__linear_class || s->activation == TE_CLAMPED_SWIGLU) return NULL;
    weight = x && x->buffer && !te__functions_of(x->te)->any_rows ? te_module_parameter(gate, "weight") : NULL;
    return weight && weight->ndim == 2 ? te__halves_empty(x->te, x->dtype, te__rows(x), weight->shape[0]) : NULL;
}
static te_result te__gated_mlp_forward(te_module *m, te_forward_args *args) {
    const te__gated_mlp *s = (const te__gated_mlp *)m->state;
    te_tensor *halves = te__gated_mlp_halves(m, args->input), *parts[2] = {NULL, NULL};
    te__shared_input shared, *outer;
    te_forward_args in = TE_ZERO;
    int h;
    te__hand_on(&in, args);
    in.input = args->input;
    outer = te__share_begin(&shared, args->input);
    for (h = s->gate ? 0 : 1; h < 2; h++) {
        int64_t half = halves ? halves->shape[1] / 2 : 0;
        te__functions_of(m->te)->place = halves ? te__half(halves, h, 1, &half) : NULL;
        parts[h] = te__run_child(m, h ? s->up : s->gate, &in);
    }
    te__functions_of(m->te)->place = NULL;
    te__share_end(&shared, outer);
    if (halves && te__is_half(parts[0], halves, 0) && te__is_half(parts[1], halves, 1))
        in.input = te__activate_halves(halves, parts[0], parts[1], s->activation);
    else in.input = te_activate(s->gate ? te_concat(parts, 2, -1) : parts[1], s->activation, &s->params);
    return te__output(m, args, te__run_child(m, s->down, &in));
}
static const te_module_class te__gated_mlp_class = {"MLP", sizeof(te__gated_mlp), te__gated_mlp_forward, NULL, NULL};

/* Creates an MLP without its Linears. The caller adds them and then calls te__close_part. */
static te_module *te__gated_mlp_open(te_ctx *te, const char *name, const te__gated_mlp *state, te_module **outer) {
    te_module *m = te__open_part(te, &te__gated_mlp_class, name, outer);
    if (m) *(te__gated_mlp *)m->state = *state;
    return m;
}
