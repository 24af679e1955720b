/* test_lora_memory.c: LoRA and units of data parallelism while memory runs out, request by request; LoRA where modules have graphs, in an ONNX file, in casts
 * of frozen parts, and with shapes that have no memory. */
#include "../faults/purse.h"

enum { LM_N = 16 };

static te_module *lm_pair(te_ctx *te) {
    te_module *list[2];
    te_seed(te, 1);
    for (int i = 0; i < 2; i++) list[i] = te_linear_create(te, &(te_linear_desc){.in_features = LM_N, .out_features = LM_N, .name = i ? "second" : "first"});
    return te_sequential_create(te, list, 2);
}
static bool lm_count(void *user, te_module *m) {
    *(int *)user += te_module_find(m, "lora_A") != NULL && te_module_find(m, "lora_B") != NULL;
    return true;
}
static int lm_adapters(te_module *m) {
    int n = 0;
    te_module_visit(m, lm_count, &n);
    return n;
}
static const float *lm_output(te_module *m) { return test_read(te_forward(m, te_tensor_full(te_module_ctx(m), TE_BF16, SHAPE(2, LM_N), 1))); }

/* Applying gives adapters to all or to none; merging is repeated where it stopped; loading leaves all as it was. */
TE_TEST(lora_memory_runs_out) {
    enum { APPLY, MERGE, SAVE, LOAD, CALLS };
    purse *host = new_purse(), *device = new_purse();
    te_ctx_desc desc = purse_desc(host, device);
    te_ctx *te = test_context_with(&desc);
    const te_lora_desc all = {.match_all_linear = true, .bias = TE_LORA_BIAS_ALL, .base_model_name_or_path = "base"};
    te_module *m = lm_pair(te);
    te_lora_apply(m, &all, NULL);
    te_tensor_fill(te_module_parameter(te_module_child(m, 0), "bias"), 0.5);
    te_module *second = te_module_child(m, 1);
    te_tensor_fill(te_module_parameter(te_module_find(second, "lora_B"), "weight"), 0.125);
    te_lora_save(m, test_path("adapter"));
    const float *want = test_copy(lm_output(m), 2 * LM_N);
    te_module_destroy(m);
    REQUIRE_OK(te);
    for (int call = 0; call < CALLS; call++)
        for (int on_device = 0; on_device < 2; on_device++) {
            purse *p = on_device ? device : host;
            bool whole = false;
            for (int64_t n = 1; !whole; n += test_every_of(13, 3)) {
                test_case("call %d, request %lld%s", call, (long long)n, on_device ? " on the device" : "");
                te_scope_begin(te);
                m = lm_pair(te);
                if (call == MERGE || call == SAVE) te_lora_load(m, test_path("adapter"));
                REQUIRE_OK(te);
                te_memory_trim(te);
                te_result (*const again)(te_module *, const char *) = call == SAVE ? te_lora_save : te_lora_load;
                p->calls = p->refused = 0;
                p->fail_at = n;
                te_result r = call == APPLY ? te_lora_apply(m, &all, NULL) : call == MERGE ? te_lora_merge(m) : again(m, test_path("adapter"));
                p->fail_at = 0;
                whole = p->refused == 0;
                CHECK((r == TE_OK) == te_ok(te));
                CHECK_MSG(whole ? r == TE_OK : r == TE_OK || r == TE_ERR_OUT_OF_MEMORY, "%s", te_error(te));
                te_clear_error(te);
                if (r != TE_OK && call != MERGE) CHECK_EQ_INT(lm_adapters(m), call == SAVE ? 2 : 0);
                if (r != TE_OK && call == LOAD) CHECK_MSG(test_read(te_module_parameter(te_module_child(m, 0), "bias"))[0] == 0.0f, "a trained bias stays");
                if (r != TE_OK) {
                    if (call == APPLY) te_lora_apply(m, &all, NULL);
                    else if (call == MERGE && lm_adapters(m)) te_lora_merge(m);
                    else if (call != MERGE) again(m, test_path("adapter"));
                }
                CHECK_OK(te);
                CHECK_EQ_INT(lm_adapters(m), call == MERGE ? 0 : 2);
                if (call == MERGE) CHECK_ERROR_BELOW("merged", lm_output(m), want, 2 * LM_N, 2e-2); /* a merged weight is rounded to 8 bits */
                else if (call != APPLY) CHECK_BYTES("outputs", lm_output(m), want, 2 * LM_N * sizeof(float));
                te_module_destroy(m);
                te_scope_end(te);
                REQUIRE(n < 2000);
            }
        }
}

/* A Linear whose weight is several parameters: all of them take their sums, or none, so outputs stay what they are wherever a merge stops. */
TE_TEST(lora_merges_parts_while_memory_runs_out) {
    static const char *const names[] = {"query", "key_value"};
    static const int64_t sizes[] = {8, 16};
    purse *host = new_purse(), *device = new_purse();
    te_ctx_desc desc = purse_desc(host, device);
    te_ctx *te = test_context_with(&desc);
    bool whole = false;
    int refusals = 0;
    for (int64_t n = 1; !whole; n++) {
        test_case("request %lld", (long long)n);
        te_scope_begin(te);
        te_module *m = te_linear_create(te, &(te_linear_desc){.in_features = 8, .out_features = 24, .gemm.params_dtype = TE_F32, .parameters_split = {names, sizes, 2}});
        te_tensor *x = te_tensor_normal(te, TE_F32, SHAPE(5, 8), 0, 1);
        te_lora_apply(m, &(te_lora_desc){.match_all_linear = true}, NULL);
        te_tensor_fill(te_module_parameter(te_module_find(m, "lora_B"), "weight"), 0.5);
        const float *want = test_copy(test_read(te_forward(m, x)), 5 * 24);
        REQUIRE_OK(te);
        te_memory_trim(te);
        host->calls = host->refused = 0;
        host->fail_at = n;
        te_result r = te_lora_merge(m);
        host->fail_at = 0;
        whole = host->refused == 0;
        refusals += r != TE_OK;
        te_clear_error(te);
        CHECK_EQ_INT(lm_adapters(m), r != TE_OK);
        CHECK_ERROR_BELOW("stopped", test_read(te_forward(m, x)), want, 5 * 24, 1e-5);
        if (r != TE_OK) CHECK_EQ_INT(te_lora_merge(m), TE_OK);
        CHECK_ERROR_BELOW("merged", test_read(te_forward(m, x)), want, 5 * 24, 1e-5);
        CHECK_OK(te);
        te_module_destroy(m);
        te_scope_end(te);
        REQUIRE(n < 2000);
    }
    CHECK_MSG(refusals > 5, "only %d refusals", refusals);
}

TE_TEST(lora_and_graphs_of_modules) {
    te_ctx *te = test_context("cpu");
    te_module *m = lm_pair(te);
    te_forward_args sample = {.input = te_tensor_full(te, TE_BF16, SHAPE(2, LM_N), 1)};
    const te_lora_desc all = {.match_all_linear = true};
    te_make_graphed_callables(te, &m, &sample, 1, NULL);
    REQUIRE_OK(te);
    CHECK(te_lora_apply(te_module_child(m, 0), &all, NULL) == TE_ERR_STATE);
    CHECK_ERROR(te, TE_ERR_STATE, "te_lora_apply: a module of the tree has graphs");
    te_module_destroy(m);
    m = lm_pair(te);
    te_graph_begin(te);
    CHECK(te_lora_apply(m, &all, NULL) == TE_ERR_STATE);
    te_clear_error(te);
    te_graph_destroy(te_graph_end(te));
    te_clear_error(te);
    CHECK_EQ_INT(te_lora_apply(m, &all, NULL), TE_OK);
    CHECK_EQ_INT(te_onnx_export(m, &sample, test_path("m.onnx")), TE_OK);
    CHECK_OK(te);
    te_module_destroy(m);
}

/* A Linear with adapters owns frozen matrices, and its adapters are cast with them; the other trained parameters stay. Shapes pass through. */
TE_TEST(lora_casts_and_shapes) {
    te_ctx *te = test_context("cpu");
    te_module *list[2];
    for (int i = 0; i < 2; i++) list[i] = te_linear_create(te, &(te_linear_desc){.in_features = LM_N, .out_features = LM_N, .gemm.params_dtype = TE_F32, .name = i ? "second" : "first"});
    te_module *m = te_sequential_create(te, list, 2), *first = te_module_child(m, 0);
    const char *name = te_module_name(first);
    te_lora_apply(m, &(te_lora_desc){.target_modules = &name, .num_target_modules = 1, .skip_freeze = true}, NULL);
    CHECK_EQ_INT(te_cast_frozen_modules_to_compute_dtype(m, &(te_cast_frozen_desc){.compute_dtype = TE_BF16}), TE_OK);
    te_tensor *a = te_module_parameter(te_module_find(first, "lora_A"), "weight");
    CHECK(te_tensor_dtype(te_module_parameter(first, "weight")) == TE_BF16 && te_tensor_dtype(a) == TE_BF16 && te_tensor_requires_grad(a));
    CHECK(te_tensor_dtype(te_module_parameter(te_module_child(m, 1), "weight")) == TE_F32);
    te_tensor *y = te_forward(first, te_tensor_full(te, TE_BF16, SHAPE(2, LM_N), 1)), *shape = te_forward(first, te_tensor_describe(te, TE_BF16, SHAPE(7, 3, LM_N)));
    CHECK(y && te_tensor_dtype(y) == TE_BF16);
    CHECK(shape && te_is_tensor_unallocated(shape) && te_tensor_ndim(shape) == 3 && te_tensor_shape(shape)[0] == 7 && te_tensor_shape(shape)[2] == LM_N);
    CHECK_OK(te);
    te_module_destroy(m);
}

/* With a gradient_divide_factor even a single rank exchanges gradients. With each request for memory refused in turn, the gradients are right, or the step fails and is done again. */
TE_TEST(sharding_memory_runs_out) {
    purse *host = new_purse();
    te_ctx_desc desc = purse_desc(host, NULL);
    te_ctx *te = test_context_with(&desc);
    te_module *m = lm_pair(te);
    te_tensor *w = te_module_parameter(te_module_child(m, 0), "weight");
    bool whole = false;
    te_data_parallel(m, &(te_data_parallel_desc){.gradient_divide_factor = 2});
    for (int64_t n = 1; !whole; n += test_every_of(13, 3)) {
        test_case("request %lld", (long long)n);
        te_module_zero_grad(m);
        te_scope_begin(te);
        te_tensor *loss = te_sum_all(te_forward(m, te_tensor_full(te, TE_BF16, SHAPE(2, LM_N), 1)));
        te_memory_trim(te);
        host->calls = host->refused = 0;
        host->fail_at = n;
        te_result r = te_backward(loss);
        host->fail_at = 0;
        whole = host->refused == 0;
        CHECK((r == TE_OK) == te_ok(te));
        te_clear_error(te);
        if (r != TE_OK) {
            te_module_zero_grad(m);
            te_backward(te_sum_all(te_forward(m, te_tensor_full(te, TE_BF16, SHAPE(2, LM_N), 1))));
        }
        CHECK_OK(te);
        const float *b = test_read(te_tensor_grad(te_module_parameter(te_module_child(m, 1), "bias")));
        for (int i = 0; i < LM_N; i++) CHECK(b[i] == 1); /* two rows, divided by 2 */
        CHECK(te_tensor_grad(w));
        te_scope_end(te);
        REQUIRE(n < 2000);
    }
    te_module_destroy(m);
}
