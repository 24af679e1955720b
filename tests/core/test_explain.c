/* Explanations, warm-up, the report: what would be done, without doing it. */
#include "../te_test.h"

#include <float.h>

TE_TEST(explain_any_device_without_a_gpu) {
    static const char *const devices[] = {"cpu", "sm_80", "sm_86", "sm_89", "sm_90", "sm_90a", "sm_100", "sm_103", "sm_120"};
    te_ctx *te = test_context("cpu");
    te_op_gemm_args g = {0};
    g.a = te_tensor_describe(te, TE_BF16, SHAPE(4096, 4096));
    g.b = te_tensor_describe(te, TE_BF16, SHAPE(4096, 4096));
    g.d = te_tensor_describe(te, TE_BF16, SHAPE(4096, 4096));
    g.b_transposed = true;
    g.m = g.n = g.k = 4096;
    for (int i = 0; i < COUNT(devices); i++) {
        te_explanation e;
        test_case("%s", devices[i]);
        CHECK_EQ_INT(te_explain(te, TE_OP_GEMM, &g, devices[i], &e), TE_OK);
        CHECK(e.supported && e.deterministic && e.native);
        CHECK_STR(e.kernels, "gemm/");
        CHECK(e.why[0] != 0);
    }
    te_explanation e;
    te_explain(te, TE_OP_GEMM, &g, "sm_90", &e);
    CHECK_STR(e.kernels, "gemm_hopper");
    te_explain(te, TE_OP_GEMM, &g, "sm_80", &e);
    CHECK_STR(e.kernels, "gemm_mma");
    CHECK_EQ_INT(te_memory_get_stats(te).allocated, 0);
    CHECK(te_query_supported(te, TE_OP_GEMM, &g));
    g.m = 5000; /* A has 4096 rows */
    CHECK(!te_query_supported(te, TE_OP_GEMM, &g));
    CHECK_OK(te); /* asking is no mistake */
    CHECK(te_explain(te, TE_OP_GEMM, &g, "sm_90", &e) == TE_ERR_SHAPE);
    CHECK(!e.supported);
    CHECK_STR(e.why, "gemm");
    te_clear_error(te);
    te_explain(te, TE_OP_GEMM, &g, "toaster", &e);
    CHECK_ERROR(te, TE_ERR_INVALID, "toaster");
}

TE_TEST(exact_f32_leaves_tensor_cores) {
    for (int exact = 0; exact < 2; exact++)
        for (int k = 0; k < 2; k++) {
            te_ctx *te = test_context_with(&(te_ctx_desc){.device = "cpu", .exact_f32 = exact, .log = test__log});
            te_dtype dtype = k ? TE_BF16 : TE_F32;
            te_op_gemm_args g = {.a = te_tensor_zeros(te, dtype, SHAPE(256, 256)), .b = te_tensor_zeros(te, dtype, SHAPE(256, 256)), .d = te_tensor_zeros(te, dtype, SHAPE(256, 256)),
                                 .m = 256, .n = 256, .k = 256, .b_transposed = true};
            te_explanation e;
            test_case("exact_f32 %d, %s", exact, te_dtype_name(dtype));
            CHECK_EQ_INT(te_explain(te, TE_OP_GEMM, &g, "sm_90", &e), TE_OK);
            CHECK_MSG((strstr(e.why, "exact_f32") != NULL) == (exact && !k), "%s", e.why);
        }
}

TE_TEST(described_tensors_do_not_run) {
    te_ctx *te = test_context("cpu");
    te_op_fill_args f = {0};
    f.dst = te_tensor_describe(te, TE_F32, SHAPE(10));
    CHECK_EQ_INT(te_op_fill(te, &f), TE_ERR_STATE);
    CHECK_ERROR(te, TE_ERR_STATE, "te_tensor_describe and has no memory");
}

/* A warm-up plans a whole step and leaves everything as it was. */
TE_TEST_DEVICES(warmup_changes_nothing) {
    te_module *m = te_linear_create(te, &(te_linear_desc){.in_features = 32, .out_features = 32});
    te_fused_adam_desc a = {0};
    te_optimizer *adam = te_fused_adam_create(te, m, &a);
    te_tensor *w = te_module_parameter(m, "weight");
    float *before = test_read(w);
    uint64_t seed, offset, seed_after, offset_after;
    te_rng_get(te, &seed, &offset);
    te_recipe r = te_recipe_delayed_scaling();
    CHECK_EQ_INT(te_warmup_begin(te), TE_OK);
    te_scope_begin(te);
    te_tensor *x = te_tensor_normal(te, TE_BF16, SHAPE(8, 32), 0, 1);
    te_tensor *y = te_dropout(test_forward(m, &r, x), 0.5f);
    CHECK_EQ_INT(te_backward(te_mean_all(y)), TE_OK);
    CHECK_EQ_INT(te_optimizer_step(adam), TE_OK);
    te_scope_end(te);
    CHECK_EQ_INT(te_warmup_end(te), TE_OK);
    CHECK_OK(te);
    te_rng_get(te, &seed_after, &offset_after);
    CHECK(seed == seed_after && offset == offset_after);
    CHECK_EQ_INT(te_optimizer_steps(adam), 0);
    CHECK(te_tensor_grad(w) == NULL);
    CHECK_BYTES("weight", test_read(w), before, 32 * 32 * sizeof(float));
    CHECK(test_read(te_module_parameter(m, "fp8_scale_fwd"))[0] == 1);
    CHECK_EQ_INT(te_warmup(m, TE_BF16, SHAPE(8, 32)), TE_OK);
    CHECK(te_tensor_grad(w) == NULL);
    te_warmup_end(te);
    CHECK_ERROR(te, TE_ERR_STATE, "without te_warmup_begin");
    te_optimizer_destroy(adam);
    te_module_destroy(m);
}

TE_TEST(report_fits_any_buffer) {
    te_ctx *te = test_context("cpu");
    char text[8192], small[20];
    size_t n = te_report(te, text, sizeof text);
    CHECK(n == strlen(text));
    CHECK_STR(text, "te.h 0.1.0");
    CHECK_STR(text, "context: cpu");
    CHECK(te_report(te, small, sizeof small) > sizeof small);
    CHECK_EQ_INT(strlen(small), sizeof small - 1);
    CHECK(te_report(NULL, NULL, 0) > 0);
}

TE_TEST(report_tells_how_numbers_are_kept) {
    static const char name[] = "arithmetic: FLT_EVAL_METHOD ";
    char text[4096];
    te_report(NULL, text, sizeof text);
    const char *line = strstr(text, name);
    REQUIRE(line);
    const int method = atoi(line + strlen(name)); /* te.h's, which may be compiled for another processor than this test */
    CHECK_MSG((method == 0 || method == 16) == !strstr(line, "wider than their type"), "%s", line);
}
