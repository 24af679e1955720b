/* tests/tape/test_no_scopes.c: programs without scopes are told so once. */
#include "../te_test.h"

static int count_of(const char *text, const char *needle) {
    int n = 0;
    for (const char *at = text; (at = strstr(at, needle)) != NULL; at += strlen(needle)) n++;
    return n;
}
static te_ctx *logging_context(void) {
    te_ctx_desc d = {0};
    d.device = "cpu";
    d.cpu_threads = 1;
    d.log = test__log;
    return te_ctx_create(&d);
}

static te_module *small_linear(te_ctx *te, te_dtype dtype, int in, int out) {
    te_linear_desc d = {0};
    d.in_features = in;
    d.out_features = out;
    d.gemm.params_dtype = dtype;
    return te_linear_create(te, &d);
}

static void one_step(te_ctx *te, te_module *m, te_optimizer *adam) {
    te_tensor *x = te_tensor_normal(te, TE_F32, SHAPE(2, 4), 0, 1);
    te_backward(te_mean_all(te_forward(m, x)));
    te_optimizer_step(adam);
}
TE_TEST(a_program_without_scopes_is_warned_once) {
    for (int scoped = 0; scoped < 3; scoped++) { /* without; around each step; around all */
        te_ctx *te = logging_context();
        te_module *m = small_linear(te, TE_F32, 4, 4);
        te_fused_adam_desc d = {0};
        te_optimizer *adam = te_fused_adam_create(te, m, &d);
        int before = count_of(test_log_text(), "te_scope_begin"), after_some;
        if (scoped == 2) te_scope_begin(te);
        for (int i = 0; i < 50; i++) {
            if (scoped == 1) te_scope_begin(te);
            one_step(te, m, adam);
            if (scoped == 1) te_scope_end(te);
        }
        after_some = count_of(test_log_text(), "te_scope_begin");
        CHECK_EQ_INT(after_some, before); /* a short program needs no scopes */
        for (int i = 0; i < 450; i++) {
            if (scoped == 1) te_scope_begin(te);
            one_step(te, m, adam);
            if (scoped == 1) te_scope_end(te);
        }
        test_case("scopes %d", scoped);
        CHECK_EQ_INT(count_of(test_log_text(), "te_scope_begin") - before, scoped == 0);
        if (scoped == 0) CHECK_STR(test_log_text(), "te_scope_end");
        if (scoped == 2) te_scope_end(te);
        CHECK_OK(te);
        te_optimizer_destroy(adam);
        te_module_destroy(m);
        te_ctx_destroy(te);
    }
}
TE_TEST(building_models_and_data_warns_of_nothing) {
    te_ctx *te = logging_context();
    te_module *m = small_linear(te, TE_F32, 4, 4);
    te_fused_adam_desc d = {0};
    te_optimizer *adam = te_fused_adam_create(te, m, &d);
    int before = count_of(test_log_text(), "te_scope_begin");
    for (int round = 0; round < 3; round++) {
        for (int i = 0; i < 5000; i++) te_tensor_zeros(te, TE_F32, SHAPE(1)); /* parameters of classes of one's own, a data set */
        te_scope_begin(te);
        for (int i = 0; i < 60; i++) one_step(te, m, adam);
        te_scope_end(te);
        for (int i = 0; i < 10; i++) one_step(te, m, adam); /* a look at the loss here and there */
    }
    CHECK_EQ_INT(count_of(test_log_text(), "te_scope_begin"), before);
    te_optimizer_destroy(adam);
    te_module_destroy(m);
    te_ctx_destroy(te);
}
