/* lora/no_experts.c: replaces lora/experts.c under TE_NO_MOE. The te__is_* functions return false here, so the other
 * functions are never called. */

enum { TE__EXPERTS_PRODUCTS = 2, TE__GATE_PROJ = 1, TE__UP_PROJ, TE__PROJS };
static const char *const te__expert_adapter_names[TE__EXPERTS_PRODUCTS][2] = {{"", ""}, {"", ""}};

static bool te__is_grouped(const te_module *m) {
    (void)m;
    return false;
}
static bool te__is_block(const te_module *m) { return te__is_grouped(m); }
static bool te__is_experts(const te_module *m) { return te__is_grouped(m); }
static bool te__is_block_gate(const te_module *m) { return te__is_grouped(m); }
static te_module *te__experts_above(const te_module *m) {
    (void)m;
    return NULL;
}
static int te__experts_chosen(const te_module *m) { return m != NULL; }
static int te__experts_local(const te_module *m) { return m != NULL; }
static int te__experts_ranks(const te_module *m) { return m != NULL; }
static int te__first_proj(const te_module *m) {
    (void)m;
    return 0;
}
static int te__expert_products(const te_module *m) { return te__first_proj(m); }
static int te__product_expert(const te_module *m, int n, int *proj) {
    (void)n;
    *proj = 0;
    return te__first_proj(m);
}
static const char *te__product_name(const te_module *m, int n, char *buffer, size_t size) {
    (void)m, (void)n, (void)size;
    buffer[0] = 0;
    return buffer;
}
static int te__product_named(const te_module *m, const char *name) {
    (void)m, (void)name;
    return -1;
}
static te_module *te__product_owner(te_module *m, int n) {
    (void)n;
    return m;
}
static te_tensor *te__product_base(te_module *m, int n) {
    (void)m, (void)n;
    return NULL;
}
static const te_tensor *te__experts_base(te_module *m) { return te__product_base(m, 0); }
static te_tensor *te__adapter_stack(te_module *m, int product, int b) {
    (void)b;
    return te__product_base(m, product);
}
static te_tensor *te__product_adapter(te_module *m, int n, int b) { return te__adapter_stack(m, n, b); }
static te_tensor *te__of_expert(te_tensor *x, int i) {
    (void)i;
    return x;
}
static bool te__has_no_adapters(const te_module *m) { return te__is_grouped(m); }
/* Refuses use_dora: DoRA scales rows with an MoE kernel, which TE_NO_MOE leaves out. */
static te_result te__dora_allowed(te_ctx *te, const char *path) {
    return te__fail(te, TE_ERR_UNSUPPORTED,
                    "LoRA: \"%s\": use_dora, and te.h was compiled with TE_NO_MOE; compile it without", path);
}
static te_tensor *te__scale_rows(te_tensor *x, te_tensor *factors) {
    (void)x, (void)factors;
    return NULL;
}
static bool te__adapters_add(te_module *m, int64_t r, te_lora_init first, te_dtype dtype) {
    (void)m, (void)r, (void)first, (void)dtype;
    return false;
}
static void te__adapters_drop(te_module *m) { (void)m; }
