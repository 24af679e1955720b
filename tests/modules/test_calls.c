/* tests/modules/test_calls.c: modules called in orders that programs have: a step that failed and is done again, microbatches under checkpoints and graphs, forwards of the program's own. */
#include "../te_test.h"

static te_module *linear(te_ctx *te, te_linear_desc d) {
    d.in_features = 4;
    d.out_features = 2;
    d.gemm.no_bias = true;
    d.gemm.params_dtype = TE_F32;
    return te_linear_create(te, &d);
}
static te_tensor *ones(te_ctx *te, int64_t rows, int64_t columns) { return te_tensor_full(te, TE_F32, SHAPE(rows, columns), 1); }
static void check_all(const te_tensor *x, float want) {
    REQUIRE(x != NULL);
    const float *got = test_read(x);
    for (int64_t i = 0; i < te_tensor_numel(x); i++) {
        CHECK_MSG(got[i] == want, "element %lld is %g, not %g", (long long)i, (double)got[i], (double)want);
        if (got[i] != want) break;
    }
}

/* ---- a step that failed ------------------------------------------------------------------------------------------ */

static te_result fail_if(te_ctx *te, const void *state, te_tensor *const *saved, te_tensor *const *dy, te_tensor **dx, const bool *needs) {
    (void)te, (void)saved, (void)needs;
    if (**(bool *const *)state) return TE_ERR_INVALID;
    dx[0] = dy[0];
    return TE_OK;
}
/* A step that is done again has no weight gradients left over from the failed one: neither from the backward pass that failed nor from the microbatches before it. */
TE_TEST_DEVICES(delayed_weight_gradients_of_a_failed_step_are_dropped) {
    for (int second = 0; second < 2; second++) {
        te_module *m = linear(te, (te_linear_desc){.gemm.delay_wgrad_compute = true});
        te_tensor *w = te_module_parameter(m, "weight"), *x = te_tensor_set_requires_grad(ones(te, 3, 4), true);
        bool fails = false, *state = &fails;
        test_case("%d microbatches", second + 1);
        te_optimizer *sgd = te_fused_sgd_create(te, m, &(te_fused_sgd_desc){.lr = 1});
        for (int pass = 0; pass < 3; pass++) {
            for (int micro = 0; micro <= second; micro++) {
                te_tensor *copy = te_tensor_zeros(te, TE_F32, SHAPE(3, 4));
                te_node_desc node = {.name = "fails", .inputs = &x, .num_inputs = 1, .outputs = &copy, .num_outputs = 1, .state = &state, .state_size = sizeof state, .backward = fail_if};
                te_tensor_copy(copy, x);
                te_record(te, &node);
                fails = pass < 2 && micro == second;
                te_backward(te_sum_all(te_forward(m, copy)));
            }
            if (pass == 2) break;
            CHECK_ERROR(te, TE_ERR_INVALID, "fails");
            if (pass) te_optimizer_zero_grad(sgd);
            else te_module_zero_grad(m);
        }
        te_optimizer_destroy(sgd);
        CHECK_EQ_INT(te_backward_dw(m), TE_OK);
        check_all(te_tensor_grad(w), 3.0f * (float)(second + 1));
        te_module_destroy(m);
    }
    CHECK_OK(te);
}

/* ---- microbatches ------------------------------------------------------------------------------------------------ */

/* Two forward passes before the first backward pass, as in a pipeline: a checkpoint that runs again uses the microbatch flag of its first run. */
TE_TEST_DEVICES(a_checkpoint_remembers_the_microbatch) {
    for (int checkpoint = 0; checkpoint < 2; checkpoint++) {
        te_module *m = linear(te, (te_linear_desc){.gemm.fuse_wgrad_accumulation = true});
        te_tensor *main_grad = te_tensor_full(te, TE_F32, SHAPE(2, 4), 1000), *y[2];
        te_tensor_set_main_grad(te_module_parameter(m, "weight"), main_grad);
        te_module_set_checkpoint(m, checkpoint);
        for (int i = 0; i < 2; i++) {
            te_step_set_is_first_microbatch(te, i ? TE_MICROBATCH_LATER : TE_MICROBATCH_FIRST);
            y[i] = te_forward(m, ones(te, 3, 4));
        }
        for (int i = 0; i < 2; i++) te_backward(te_sum_all(y[i]));
        CHECK(te_step_get_is_first_microbatch(te) == TE_MICROBATCH_LATER);
        te_step_set_is_first_microbatch(te, TE_MICROBATCH_NONE);
        test_case("checkpoint %d", checkpoint);
        check_all(main_grad, 6);
        te_module_destroy(m);
    }
    CHECK_OK(te);
}

TE_TEST_DEVICES(graphs_keep_their_microbatch) {
    te_module *m = linear(te, (te_linear_desc){.gemm.fuse_wgrad_accumulation = true}), *twice[2] = {m, m};
    te_tensor *main_grad = te_tensor_full(te, TE_F32, SHAPE(2, 4), 1000);
    te_forward_args sample = {.input = ones(te, 3, 4)}, samples[2] = {sample, sample};
    te_tensor_set_main_grad(te_module_parameter(m, "weight"), main_grad);
    CHECK(te_make_graphed_callables(te, twice, samples, 2, NULL) == TE_ERR_INVALID);
    CHECK_ERROR(te, TE_ERR_INVALID, "modules 0 and 1 are one");
    te_step_set_is_first_microbatch(te, TE_MICROBATCH_FIRST);
    CHECK(te_make_graphed_callables(te, &m, &sample, 1, NULL) == TE_OK);
    check_all(main_grad, 1000); /* warm-up passes left no trace */
    te_backward(te_sum_all(te_forward(m, sample.input)));
    check_all(main_grad, 3);
    te_step_set_is_first_microbatch(te, TE_MICROBATCH_LATER);
    CHECK(te_forward(m, sample.input) == NULL);
    CHECK_ERROR(te, TE_ERR_STATE, "te_step_get_is_first_microbatch is 2 and was 1");
    te_step_set_is_first_microbatch(te, TE_MICROBATCH_NONE);
    te_module_destroy(m);
}
TE_TEST_DEVICES(graphs_of_delayed_gradients_are_refused) {
    te_module *m = linear(te, (te_linear_desc){.gemm.delay_wgrad_compute = true});
    te_forward_args sample = {.input = ones(te, 3, 4)};
    CHECK(te_make_graphed_callables(te, &m, &sample, 1, NULL) == TE_ERR_UNSUPPORTED);
    CHECK_ERROR(te, TE_ERR_UNSUPPORTED, "delay_wgrad_compute");
    CHECK_EQ_INT(te_backward_dw(m), TE_OK);
    CHECK(te_tensor_grad(te_module_parameter(m, "weight")) == NULL);
    te_backward(te_sum_all(te_forward(m, sample.input)));
    te_backward_dw(m);
    check_all(te_tensor_grad(te_module_parameter(m, "weight")), 3);
    CHECK_OK(te);
    te_module_destroy(m);
}
TE_TEST(microbatches_are_checked) {
    te_ctx *te = test_context("cpu");
    te_module *m = linear(te, (te_linear_desc){0});
    te_forward_args args = {.input = ones(te, 3, 4), .is_first_microbatch = (te_microbatch)9};
    CHECK(te_forward_with(m, &args) == NULL);
    CHECK_ERROR(te, TE_ERR_INVALID, "is_first_microbatch is 9");
    args.is_first_microbatch = TE_MICROBATCH_NONE;
    CHECK(te_forward_with(m, &args) != NULL && args.outputs.out);
    args.input = NULL;
    CHECK(te_forward_with(m, &args) == NULL && !args.outputs.out); /* not the last call's */
    te_module_destroy(m);
}

/* ---- forwards of the program's own ------------------------------------------------------------------------------- */

static te_result twice_forward(te_module *m, te_forward_args *args) {
    te_result result = te_module_get_class(m)->forward(m, args);
    if (result == TE_OK) args->outputs.out = te_scale(args->outputs.out, 2);
    return result;
}
TE_TEST_DEVICES(an_own_forward_runs_once_over_a_checkpointed_core) {
    for (int checkpoint = 0; checkpoint < 2; checkpoint++) {
        te_dot_product_attention_desc d = {.attention.num_attention_heads = 1, .attention.kv_channels = 4};
        te_module *m = te_dot_product_attention_create(te, &d);
        te_tensor *q = te_tensor_set_requires_grad(te_tensor_full(te, TE_F32, SHAPE(2, 1, 1, 4), 1), true);
        te_forward_args args = {.input = q, .key = q, .value = q, .attention.checkpoint_core_attention = checkpoint};
        te_module_set_forward(m, twice_forward);
        te_tensor *y = te_forward_with(m, &args);
        check_all(y, 2);
        te_backward(te_sum_all(y));
        CHECK(te_tensor_grad(q) && test_read(te_tensor_grad(q))[0] == 3); /* 2 of the first value in both rows of a causal product: 1 + 1/2 */
        te_module_destroy(m);
    }
    CHECK_OK(te);
}
