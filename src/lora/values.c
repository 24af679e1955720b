/* lora/values.c: fills adapters with initial values, and adds child modules that the class of the parent needs. */

/* Fills `weight` with uniform random values within +- 1 / sqrt(fan-in). The argument `numbers` is the fan-in that torch
 * computes from the shape of `weight`. */
static te_result te__lora_fill_within(te_tensor *weight, int64_t numbers) {
    te_op_random_args args = TE_ZERO;
    te__draw draw = te__rng_draw(weight->te, 1);
    args.dst = weight;
    args.kind = TE_RANDOM_UNIFORM;
    args.b = 1.0f / sqrtf((float)numbers);
    args.a = -args.b;
    args.seed = draw.seed;
    args.offset = draw.offset;
    args.rng = draw.rng;
    return te_op_random(weight->te, &args);
}
static te_result te__lora_fill_uniform(void *user, te_tensor *weight) {
    (void)user;
    return te__lora_fill_within(weight, te__cols(weight));
}
static te_result te__lora_fill_zero(void *user, te_tensor *weight) {
    (void)user;
    return te_tensor_fill(weight, 0.0);
}

/* Adds `child` to m, and marks it as a child that the class of m needs (te__module_need). On failure, destroys `child`
 * and returns false. A `child` that is NULL counts as a failure. */
static bool te__lora_attach(te_module *m, te_module *child) {
    if (child && m->te->error_code == TE_OK && te_module_add_child(m, NULL, child) && te__module_need(child)) {
        child->evaluating = m->evaluating;
        return true;
    }
    te_module_destroy(child);
    return false;
}
