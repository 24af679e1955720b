/* lora/experts.c: the parameters of adapters of MoE experts. This file must not depend on how adapters are chosen, or
 * on files on disk.
 *
 * As in NeMo Automodel's GroupedExpertsLoRA, four stacks hold the adapters of this rank's E experts. The gate and up
 * projections share lora_A. Each stack is the parameter "weight" of a child of the experts module:
 *
 *     lora_gate_and_up_A [E, dim, r]    lora_gate_and_up_B [E, r, 2 inter] (not gated: [E, r, inter])
 *     lora_down_A [E, inter, r]         lora_down_B [E, r, dim]
 *
 * In files each Linear of an expert has its own adapters. The functions below number these Linears from 0, expert by
 * expert. The order within an expert is the gate projection (only if the experts are gated), the up projection, the
 * down projection. */

static bool te__is_grouped(const te_module *m) { return m->cls == &te__grouped_class; }

static const char *const te__expert_adapter_names[TE__EXPERTS_PRODUCTS][2] = {
    {"lora_gate_and_up_A", "lora_gate_and_up_B"}, {"lora_down_A", "lora_down_B"}};

static bool te__is_block(const te_module *m) { return m->cls == &te__block_experts_class; }
/* Returns true for GroupedExpertsTE, which cannot have adapters, as in Automodel. */
static bool te__has_no_adapters(const te_module *m) { return m->cls == &te__te_experts_class; }
static te_result te__dora_allowed(te_ctx *te, const char *path) {
    (void)te, (void)path;
    return TE_OK;
}
static bool te__is_experts(const te_module *m) {
    return m && (te__is_block(m) || m->cls == &te__grouped_experts_class || m->cls == &te__deepep_class ||
                 m->cls == &te__te_experts_class);
}
/* Returns true if m is the gate of a language model's MoE block. As in Automodel, other gates have no adapters. */
static bool te__is_block_gate(const te_module *m) {
    return m->cls == &te__gate_class && ((const te__gate_module *)m->state)->maps;
}
/* Returns the parent or grandparent of m that is an experts module; NULL if neither of them is one. */
static te_module *te__experts_above(const te_module *m) {
    te_module *up = m->parent;
    return te__is_experts(up) ? up : up && te__is_experts(up->parent) ? up->parent : NULL;
}

/* ---- Linears of experts ---- */

static const te__experts_module *te__experts_state(const te_module *m) { return (const te__experts_module *)m->state; }
static int te__experts_chosen(const te_module *m) { return te__experts_state(m)->config.n_activated_experts; }
static int te__experts_local(const te_module *m) { return te__experts_state(m)->local; }
static int te__experts_ranks(const te_module *m) { return te__experts_state(m)->ranks; }
/* Returns the first projection of each expert: gate if the experts are gated, otherwise up. */
static int te__first_proj(const te_module *m) {
    return te__expert_is_gated(te__experts_state(m)->config.expert_activation) ? TE__GATE_PROJ : TE__UP_PROJ;
}
static int te__expert_products(const te_module *m) {
    return te__experts_state(m)->local * (TE__PROJS - te__first_proj(m));
}
/* Returns the index of the expert that Linear number n belongs to. Sets *proj to its projection (gate, up or down). */
static int te__product_expert(const te_module *m, int n, int *proj) {
    const int each = TE__PROJS - te__first_proj(m);
    *proj = te__first_proj(m) + n % each;
    return n / each;
}
/* Writes the path of Linear number n, relative to the experts module, to `buffer`. Returns `buffer`. An example is
 * "3.w1". */
static const char *te__product_name(const te_module *m, int n, char *buffer, size_t size) {
    int proj, expert = te__product_expert(m, n, &proj);
    snprintf(buffer, size, "%d.%s", expert, te__experts_state(m)->proj[proj]);
    return buffer;
}
/* Returns the number of the Linear whose path, relative to the experts module, is `name`; -1 if there is none. */
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
/* Returns the module that owns the weight of Linear number n. */
static te_module *te__product_owner(te_module *m, int n) {
    int proj, expert = te__product_expert(m, n, &proj);
    return te__is_block(m) ? te_module_find(te__block_expert(m, expert), te__experts_state(m)->proj[proj]) : m;
}
/* Returns the weight [out, in] of Linear number n. Fails if a view is needed, but the parameter is quantized or has no
 * memory. */
static te_tensor *te__product_base(te_module *m, int n) {
    int proj, expert = te__product_expert(m, n, &proj);
    return te__is_block(m) ? te_module_parameter(te__product_owner(m, n), "weight")
                           : te__proj_view(m, proj, false, expert);
}

/* Returns one parameter of the experts. Callers read its dtype and whether it has memory, but no values. */
static const te_tensor *te__experts_base(te_module *m) {
    return te__is_block(m) ? te__product_base(m, 0)
                           : te_module_parameter(m, te_experts_tensor_name(TE_EXPERTS_DOWN_PROJS));
}

/* ---- stacks ---- */

/* Returns a stack for `product` (TE__EXPERTS_UP or TE__EXPERTS_DOWN): lora_A if b is 0, lora_B if b is 1. NULL if the
 * stack was removed. */
static te_tensor *te__adapter_stack(te_module *m, int product, int b) {
    return te_module_parameter(te_module_find(m, te__expert_adapter_names[product][b]), "weight");
}
/* Returns a view of the adapter of Linear number n: lora_A [r, in] if b is 0, lora_B [out, r] if b is 1. NULL if the
 * stack was removed or has no memory. */
static te_tensor *te__product_adapter(te_module *m, int n, int b) {
    int proj, expert = te__product_expert(m, n, &proj);
    te_tensor *x = te__adapter_stack(m, proj == TE__DOWN_PROJ ? TE__EXPERTS_DOWN : TE__EXPERTS_UP, b),
              *y = x && x->buffer ? te__of_expert(x, expert) : NULL;
    if (y) te__turn(y);
    if (y && b && proj != TE__DOWN_PROJ && te__first_proj(m) == TE__GATE_PROJ)
        te__proj_rows(te__experts_state(m), y, proj);
    return y;
}

/* ---- making ---- */

static te_result te__lora_fill_stack(void *user, te_tensor *weight) { /* [E, in, r] */
    (void)user;
    return te__lora_fill_within(weight, weight->shape[1] * weight->shape[2]);
}

/* te__adapter_class is the class of a module that holds one stack. The state of such a module is the te_init that fills
 * the stack. */
static te_result te__adapter_forward(te_module *m, te_forward_args *args) {
    (void)args;
    return te__fail(m->te, TE_ERR_STATE, "%s: \"%s\" is a stack of experts' adapters; run the experts", m->cls->name,
                    m->name);
}
static te_result te__adapter_reset(te_module *m) {
    return te__init_fill(te_module_parameter(m, "weight"), (const te_init *)m->state);
}
static const te_module_class te__adapter_class = {"Adapter", sizeof(te_init), te__adapter_forward, NULL,
                                                  te__adapter_reset};

static bool te__adapter_add(te_module *m, const char *name, te_dtype dtype, int64_t rows, int64_t cols,
                            const te_init *init, bool meta) {
    te_module *child = te__module_with_desc(m->te, &te__adapter_class, init, NULL, name);
    if (!child) return false;
    te__params_on(child, meta ? TE_PARAMS_META : TE_PARAMS_DEFAULT);
    te__add_experts(child, "weight", dtype, te__experts_state(m)->local, rows, cols);
    if (!te__lora_attach(m, child)) return false;
    child->maker = NULL;
    child->built_in = true;
    return meta || te__adapter_reset(child) == TE_OK;
}
/* Adds the four stacks, of LoRA rank r, to the experts module m. lora_B starts at zero. lora_A starts with random
 * values, as in torch. In the formulas, E is the number of experts of all ranks, and `in` is the number of input
 * features:
 * - TE_LORA_XAVIER: normal with standard deviation sqrt(2 / ((in + E) r))
 * - otherwise: uniform between -1 / sqrt(in r) and 1 / sqrt(in r) */
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
