/* test_shared_input.c: products of one input share its codes, and have the results and gradients of products that quantize it each on their own; where casts differ, or the input was written
 * between two products, nothing is shared. */
#define TE_STATIC
#define TE_IMPLEMENTATION
#include "../te_test.h"

enum { SHARED_ROWS = 48, SHARED_IN = 64, SHARED_OUT = 32 };

static te_module *shared_linear(te_ctx *te, uint64_t seed) {
    te_linear_desc d = {.in_features = SHARED_IN, .out_features = SHARED_OUT, .gemm = {.params_dtype = TE_BF16, .no_bias = true}};
    te_seed(te, seed);
    return te_linear_create(te, &d);
}

/* The results of two products of one input, and the gradients of the input and of both weights. */
typedef struct shared_results {
    void *y[2], *dx, *dw[2];
    bool shares; /* the second product has read the codes of the first one */
} shared_results;
static shared_results run_shared(te_ctx *te, te_module *m[2], const te_recipe *recipe, bool grads, bool shared, bool writes) {
    te_autocast_desc cast = {.recipe = recipe};
    te_tensor *x = test_tensor(te, TE_BF16, SHAPE(SHARED_ROWS, SHARED_IN), test_normal(SHARED_ROWS * SHARED_IN, 4)), *y[2];
    te__shared_input s = {0}, *outer = NULL;
    shared_results r = {0};
    const te_tensor *first = NULL;
    if (grads) te_tensor_set_requires_grad(x, true);
    else te_no_grad_begin(te);
    te_autocast_begin(te, &cast);
    if (shared) outer = te__share_begin(&s, x);
    for (int i = 0; i < 2; i++) {
        y[i] = te_forward(m[i], x);
        if (!i) first = s.codes;
        if (!i && writes) te_tensor_fill(x, 0.5);
    }
    r.shares = first && s.codes == first;
    if (shared) te__share_end(&s, outer);
    te_autocast_end(te);
    for (int i = 0; i < 2; i++) r.y[i] = test_read_bytes(y[i]);
    if (grads) {
        te_backward_from(te_add(y[0], y[1]), test_tensor(te, TE_BF16, SHAPE(SHARED_ROWS, SHARED_OUT), test_normal(SHARED_ROWS * SHARED_OUT, 5)));
        r.dx = test_read_bytes(te_tensor_grad(x));
        for (int i = 0; i < 2; i++) r.dw[i] = test_read_bytes(te_tensor_grad(te_module_parameter(m[i], "weight"))), te_module_zero_grad(m[i]);
    } else te_no_grad_end(te);
    return r;
}

TE_TEST_DEVICES(shared_input_of_two_products) {
    const te_recipe recipes[] = {te_recipe_delayed_scaling(), te_recipe_current_scaling(), te_recipe_block_scaling(), te_recipe_mxfp8(), te_recipe_nvfp4()};
    for (int r = 0; r < COUNT(recipes); r++)
        for (int grads = 0; grads < 2; grads++)
            for (int writes = 0; writes + grads < 2; writes++) {
                te_module *m[2] = {shared_linear(te, 1), shared_linear(te, 2)};
                te_scope_begin(te);
                test_case("%s, %s%s", te_recipe_name(recipes[r].kind), grads ? "with gradients" : "without gradients", writes ? ", written between" : "");
                te_seed(te, 3); /* NVFP4 rounds gradients at random */
                const shared_results apart = run_shared(te, m, &recipes[r], grads, false, writes);
                if (r == 0) te_module_destroy(m[0]), te_module_destroy(m[1]), m[0] = shared_linear(te, 1), m[1] = shared_linear(te, 2); /* scales of a first step again */
                te_seed(te, 3);
                const shared_results shared = run_shared(te, m, &recipes[r], grads, true, writes);
                REQUIRE_OK(te);
                CHECK(!apart.shares);
                CHECK(shared.shares == (r > 0 && !writes)); /* with delayed scaling each product has a scale of its own */
                for (int i = 0; i < 2; i++) {
                    CHECK_BYTES("y", shared.y[i], apart.y[i], SHARED_ROWS * SHARED_OUT * 2);
                    if (grads) CHECK_BYTES("dw", shared.dw[i], apart.dw[i], SHARED_OUT * SHARED_IN * 2);
                }
                if (grads) CHECK_BYTES("dx", shared.dx, apart.dx, SHARED_ROWS * SHARED_IN * 2);
                te_scope_end(te);
                te_module_destroy(m[0]), te_module_destroy(m[1]);
            }
}

static void count_casts(te_ctx *te, const te_trace *event, void *user) {
    (void)te;
    if (event->op == TE_OP_FP8_QUANTIZE && event->phase == TE_TRACE_BEFORE) ++*(int *)user;
}
/* The projections of queries, keys and values have one input, and gate and up: 4 casts a layer in place of 7, and one of each of 7 weights. */
TE_TEST_DEVICES(shared_input_in_a_layer) {
    enum { LAYERS = 2 };
    const te_recipe recipe = te_recipe_current_scaling();
    te_causal_lm_desc d = {.vocab_size = 32, .hidden_size = 64, .intermediate_size = 96, .num_hidden_layers = LAYERS, .num_attention_heads = 2, .params_dtype = TE_BF16};
    te_module *m = te_causal_lm_create(te, &d);
    te_autocast_desc cast = {.recipe = &recipe};
    int casts = 0;
    te_set_trace(te, count_casts, &casts);
    te_no_grad_begin(te);
    te_autocast_begin(te, &cast);
    te_forward(m, te_tensor_zeros(te, TE_I32, SHAPE(1, 24)));
    te_autocast_end(te);
    te_no_grad_end(te);
    te_set_trace(te, NULL, NULL);
    CHECK_OK(te);
    CHECK_EQ_INT(casts, LAYERS * (4 + 7));
    te_module_destroy(m);
}
