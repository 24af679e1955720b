/* lora/values.c: first values of adapters, and giving a module a child that it then needs. Knows the module tree. */

/* Uniform numbers of +- 1 / sqrt(numbers that one output is made of). */
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

/* Adds `child` to m, which needs it from here on. Destroys it and returns false where that fails; child may be NULL. */
static bool te__lora_attach(te_module *m, te_module *child) {
    if (child && m->te->error_code == TE_OK && te_module_add_child(m, NULL, child) && te__module_need(child)) {
        child->evaluating = m->evaluating;
        return true;
    }
    te_module_destroy(child);
    return false;
}
