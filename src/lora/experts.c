/* lora/experts.c: the memory of adapters of a mixture's experts. Knows experts; must not know how adapters are chosen,
 * or files.
 *
 * The adapters of one product of all experts are a pair of stacks, as those of NeMo Automodel's GroupedExpertsLoRA:
 * gate and up share lora_A. They are children of the experts, each with a parameter "weight":
 *
 *     lora_gate_and_up_A [E, dim, r]    lora_gate_and_up_B [E, r, 2 inter] (not gated: [E, r, inter])
 *     lora_down_A [E, inter, r]         lora_down_B [E, r, dim]
 *
 * In files each Linear of an expert has adapters of its own. Number n of the site's products is such a Linear: those of
 * expert 0 come first, gate (of gated ones), up, down. */

static const char *const te__expert_adapter_names[TE__EXPERTS_PRODUCTS][2] = {
    {"lora_gate_and_up_A", "lora_gate_and_up_B"}, {"lora_down_A", "lora_down_B"}};

static bool te__is_block(const te_module *m) { return m->cls == &te__block_experts_class; }
static bool te__is_experts(const te_module *m) {
    return m && (te__is_block(m) || m->cls == &te__grouped_experts_class || m->cls == &te__deepep_class ||
                 m->cls == &te__te_experts_class);
}
/* Is m the gate of a language model's mixture, a Linear in its files? Automodel's gates have no adapters. */
static bool te__is_block_gate(const te_module *m) {
    return m->cls == &te__gate_class && ((const te__gate_module *)m->state)->maps;
}
/* The experts that m is a part of: its parent, or the parent's; NULL: none. */
static te_module *te__experts_above(const te_module *m) {
    te_module *up = m->parent;
    return te__is_experts(up) ? up : up && te__is_experts(up->parent) ? up->parent : NULL;
}

/* ---- Linears of experts ---- */

static const te__experts_module *te__experts_state(const te_module *m) { return (const te__experts_module *)m->state; }
/* The first of gate, up and down that the experts have. */
static int te__first_proj(const te_module *m) {
    return te__expert_is_gated(te__experts_state(m)->config.expert_activation) ? TE__GATE_PROJ : TE__UP_PROJ;
}
static int te__expert_products(const te_module *m) {
    return te__experts_state(m)->local * (TE__PROJS - te__first_proj(m));
}
/* The expert and the projection of product n. */
static int te__product_expert(const te_module *m, int n, int *proj) {
    const int each = TE__PROJS - te__first_proj(m);
    *proj = te__first_proj(m) + n % each;
    return n / each;
}
/* "3.w1": the names behind the experts' own. */
static const char *te__product_name(const te_module *m, int n, char *buffer, size_t size) {
    int proj, expert = te__product_expert(m, n, &proj);
    snprintf(buffer, size, "%d.%s", expert, te__experts_state(m)->proj[proj]);
    return buffer;
}
/* Which product has these names; -1: none. */
static int te__product_named(const te_module *m, const char *name) {
    const int products = te__expert_products(m), each = TE__PROJS - te__first_proj(m);
    char text[64];
    int n, expert = 0;
    const char *at;
    for (at = name; *at >= '0' && *at <= '9' && expert < TE_MOE_MAX_EXPERTS; at++) expert = 10 * expert + (*at - '0');
    for (n = each * expert; n < each * (expert + 1) && n < products; n++)
        if (strcmp(te__product_name(m, n, text, sizeof(text)), name) == 0) return n;
    return -1;
}
/* The module that has the weight of product n among its parameters. */
static te_module *te__product_owner(te_module *m, int n) {
    int proj, expert = te__product_expert(m, n, &proj);
    return te__is_block(m) ? te_module_find(te__block_expert(m, expert), te__experts_state(m)->proj[proj]) : m;
}
/* The weight of a product, [out, in]: a parameter, or a view of a part of a stack; NULL: it has no memory. */
static te_tensor *te__product_base(te_module *m, int n) {
    int proj, expert = te__product_expert(m, n, &proj);
    return te__is_block(m) ? te_module_parameter(te__product_owner(m, n), "weight")
                           : te__proj_view(m, proj, false, expert);
}

/* A parameter that has the experts' format, with memory or without. */
static const te_tensor *te__experts_base(te_module *m) {
    return te__is_block(m) ? te__product_base(m, 0)
                           : te_module_parameter(m, te_experts_tensor_name(TE_EXPERTS_DOWN_PROJS));
}

/* ---- stacks ---- */

/* One of the two stacks of TE__EXPERTS_UP or TE__EXPERTS_DOWN; NULL: it is gone. */
static te_tensor *te__adapter_stack(te_module *m, int product, int b) {
    return te_module_parameter(te_module_find(m, te__expert_adapter_names[product][b]), "weight");
}
/* What product n has of the stacks, as the weight of a Linear, lora_A [r, in] or lora_B [out, r]: a view; NULL: there
 * is none. */
static te_tensor *te__product_adapter(te_module *m, int n, int b) {
    int proj, expert = te__product_expert(m, n, &proj);
    te_tensor *x = te__adapter_stack(m, proj == TE__DOWN_PROJ ? TE__EXPERTS_DOWN : TE__EXPERTS_UP, b),
              *y = x && x->buffer ? te__of_expert(x, expert) : NULL;
    if (y) te__turn(y);
    if (y && b && proj != TE__DOWN_PROJ && te__first_proj(m) == TE__GATE_PROJ)
        te__proj_rows(te__experts_state(m), y, proj);
    return y;
}

/* ---- first values ---- */

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
static te_result te__lora_fill_stack(void *user, te_tensor *weight) { /* [E, in, r] */
    (void)user;
    return te__lora_fill_within(weight, weight->shape[1] * weight->shape[2]);
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

/* One stack, as a module that begins with values of its own. */
typedef struct te__adapter {
    te_init init;
} te__adapter;
static te_result te__adapter_forward(te_module *m, te_forward_args *args) {
    (void)args;
    return te__fail(m->te, TE_ERR_STATE, "%s: \"%s\" is a stack of experts' adapters; run the experts", m->cls->name,
                    m->name);
}
static te_result te__adapter_reset(te_module *m) {
    return te__init_fill(te_module_parameter(m, "weight"), &((const te__adapter *)m->state)->init);
}
static const te_module_class te__adapter_class = {"Adapter", sizeof(te__adapter), te__adapter_forward, NULL,
                                                  te__adapter_reset};

static bool te__adapter_add(te_module *m, const char *name, te_dtype dtype, int64_t rows, int64_t cols,
                            const te_init *init, bool meta) {
    te_module *child = te_module_create(m->te, &te__adapter_class, name);
    if (!child) return false;
    ((te__adapter *)child->state)->init = *init;
    te__params_on(child, meta ? TE_PARAMS_META : TE_PARAMS_DEFAULT);
    te__add_experts(child, "weight", dtype, te__experts_state(m)->local, rows, cols);
    if (!te__lora_attach(m, child)) return false;
    child->maker = NULL;
    child->built_in = true;
    return meta || te__adapter_reset(child) == TE_OK;
}
/* Gives experts m their four stacks of rank r. Normal numbers have torch's deviation for a tensor of three dimensions,
 * sqrt(2 / ((in + E) r)), and uniform ones its bound, 1 / sqrt(in r), with the experts of all ranks. */
static bool te__adapters_add(te_module *m, int64_t r, te_lora_init first, te_dtype dtype) {
    const te__experts_module *s = te__experts_state(m);
    const te_tensor *base = te__experts_base(m);
    const bool meta = base && !base->buffer && !base->quantized;
    int i;
    for (i = 0; i < TE__EXPERTS_PRODUCTS; i++) {
        const bool down = i == TE__EXPERTS_DOWN;
        const int64_t in = down ? s->config.moe_inter_dim : te__expert_dim(&s->config),
                      out = down ? te__expert_dim(&s->config) : te__up_size(&s->config);
        te_init a = TE_ZERO, zero = TE_ZERO;
        zero.init_method = te__lora_fill_zero;
        if (first == TE_LORA_XAVIER) a.std = sqrtf(2.0f / ((float)(in + s->config.n_routed_experts) * (float)r));
        else a.init_method = te__lora_fill_stack;
        if (!te__adapter_add(m, te__expert_adapter_names[i][0], dtype, in, r, &a, meta) ||
            !te__adapter_add(m, te__expert_adapter_names[i][1], dtype, r, out, &zero, meta))
            return false;
    }
    return true;
}
static void te__adapters_drop(te_module *m) {
    int i;
    for (i = 0; i < 2 * TE__EXPERTS_PRODUCTS; i++) te__module_drop(m, te__expert_adapter_names[i / 2][i % 2]);
}
