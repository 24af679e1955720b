/* test_backend_fields.c: the fields of te_backend_config as a program sets them, and Float32RMSNorm as a module. */
#include "../te_test.h"

/* Each value that is listed is read; a list that is none of words says what is needed. */
TE_TEST(backend_fields_say_their_values) {
    te_ctx *te = test_context("cpu");
    char values[400], pair[500], few[8];
    const char *field;
    int fields = 0, words = 0;
    for (; (field = te_backend_config_field(fields, values, sizeof values)) != NULL; fields++) {
        if (strstr(values, "number")) {
            snprintf(pair, sizeof pair, "%s=1", field);
            te_backend_config c = {0};
            CHECK_EQ_INT(te_backend_config_parse(te, pair, &c), TE_OK);
            snprintf(pair, sizeof pair, "%s=x", field);
            te_backend_config_parse(te, pair, &c);
            CHECK_ERROR(te, TE_ERR_INVALID, values);
            continue;
        }
        CHECK(values[0]);
        for (const char *v = values; *v; words++) {
            const size_t n = strcspn(v, ",");
            te_backend_config c = {0};
            snprintf(pair, sizeof pair, "%s=%.*s", field, (int)n, v);
            CHECK_EQ_INT(te_backend_config_parse(te, pair, &c), TE_OK);
            v += n + (v[n] ? 2 : 0);
        }
        snprintf(pair, sizeof pair, "%s=none of these", field);
        te_backend_config c = {0};
        te_backend_config_parse(te, pair, &c);
        CHECK_ERROR(te, TE_ERR_INVALID, values); /* the same list */
    }
    CHECK(fields > 20 && words > 50);
    CHECK(strcmp(te_backend_config_field(0, few, sizeof few), "attn") == 0 && strcmp(few, "te, sdp") == 0);
    CHECK(!te_backend_config_field(-1, values, sizeof values) && values[0] == 0 && !te_backend_config_field(fields, NULL, 0) && te_backend_config_field(1, NULL, 0));
    CHECK_OK(te);
}
TE_TEST(backend_fields_are_written_and_kept) {
    te_ctx *te = test_context("cpu");
    te_backend_config c = {0}, was;
    char text[512];
    c.rope = TE_ROPE_QUACK;
    c.dispatcher_num_sms = 24;
    c.no_dispatcher_share_token_dispatcher = true;
    c.dispatcher_async_dispatch = true;
    c.mok.minibatch_size = 512;
    c.fake_balanced_gate = true;
    c.fake_gate_noise = 0.25;
    c.no_hf_state_dict_adapter = true;
    c.enable_fsdp_optimizations = true;
    c.compile_attn = true;
    te_backend_config_print(&c, text, sizeof text);
    CHECK_STR(text, "rope=quack");
    CHECK_STR(text, "dispatcher_num_sms=24");
    CHECK_STR(text, "dispatcher_share_token_dispatcher=false");
    CHECK_STR(text, "dispatcher_async_dispatch=true");
    CHECK_STR(text, "mok.minibatch_size=512");
    CHECK_STR(text, "fake_balanced_gate=true");
    CHECK_STR(text, "fake_gate_noise=0.25");
    CHECK_STR(text, "enable_hf_state_dict_adapter=false");
    CHECK_STR(text, "enable_fsdp_optimizations=true");
    CHECK_STR(text, "compile_attn=true");
    was = c;
    CHECK_EQ_INT(te_backend_config_validate(te, &c, NULL), TE_OK);
    CHECK(c.dispatcher_num_sms == was.dispatcher_num_sms && c.no_dispatcher_share_token_dispatcher && c.dispatcher_async_dispatch && c.mok.minibatch_size == 512 && c.fake_balanced_gate &&
          c.fake_gate_noise == 0.25 && c.no_hf_state_dict_adapter && c.enable_fsdp_optimizations && c.compile_attn && c.rope == TE_ROPE_QUACK);
    /* two that validation takes back, with a warning, and rope_fusion where it is told to stay */
    c.rope = TE_ROPE_TORCH;
    c.rope_fusion = TE_ON;
    c.enable_deepep = TE_ON;
    CHECK_EQ_INT(te_backend_config_validate(te, &c, NULL), TE_OK);
    CHECK(c.rope_fusion == TE_OFF && c.enable_deepep == TE_DEFAULT);
    CHECK_STR(test_log_text(), "rope_fusion is turned off");
    CHECK_STR(test_log_text(), "enable_deepep is gone");
    c.rope_fusion = TE_ON;
    c.keep_rope_fusion = true;
    CHECK_EQ_INT(te_backend_config_validate(te, &c, NULL), TE_OK);
    CHECK(c.rope_fusion == TE_ON);
    CHECK_OK(te);
}

/* Its weight is ones; a weight of the program's multiplies the normalised row; reset gives the ones again. */
TE_TEST_DEVICES(float32_rms_norm_as_a_module) {
    enum { ROWS = 3, N = 10 };
    te_module *m = te_float32_rms_norm_create(te, &(te_rms_norm_module_desc){.dim = N, .eps = 1e-6f, .dtype = TE_F32});
    te_tensor *weight = te_module_parameter(m, "weight");
    float *x = test_normal(ROWS * N, 1), *w = test_uniform(N, 2, 0.5f, 2), *want = test_floats(ROWS * N);
    REQUIRE(weight && te_tensor_dtype(weight) == TE_F32);
    for (int i = 0; i < N; i++) CHECK(test_read(weight)[i] == 1);
    te_tensor_copy(weight, test_tensor(te, TE_F32, SHAPE(N), w));
    for (int r = 0; r < ROWS; r++) {
        double sum = 0;
        for (int i = 0; i < N; i++) sum += (double)x[r * N + i] * x[r * N + i];
        for (int i = 0; i < N; i++) want[r * N + i] = (float)(x[r * N + i] / sqrt(sum / N + 1e-6) * w[i]);
    }
    CHECK_ERROR_BELOW("y", test_read(te_forward(m, test_tensor(te, TE_F32, SHAPE(ROWS, N), x))), want, ROWS * N, 1e-6); /* f32 sums of ten numbers */
    CHECK_EQ_INT(te_module_reset_parameters(m), TE_OK);
    for (int i = 0; i < N; i++) CHECK(test_read(weight)[i] == 1);
    CHECK_OK(te);
    te_module_destroy(m);
}
