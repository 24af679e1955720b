/* tests/mend/test_calls.c: modules called in orders that programs have: a step that failed and is done again, microbatches under checkpoints and graphs, weights that are views of
 * one memory, forwards of the program's own, a rank that is called wrongly. */
#include "../dist/ranks.h"

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
TE_TEST_DEVICES(p16_deferred_work_of_a_failed_step_is_dropped) {
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
TE_TEST_DEVICES(p16_a_checkpoint_remembers_the_microbatch) {
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

TE_TEST_DEVICES(p16_graphs_keep_their_microbatch) {
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
TE_TEST_DEVICES(p16_graphs_of_delayed_gradients_are_refused) {
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
TE_TEST(p16_microbatches_are_checked) {
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

/* ---- weights ----------------------------------------------------------------------------------------------------- */

/* A kept quantized weight belongs to one view: a parameter that becomes another view of the same memory is quantized anew. */
TE_TEST_DEVICES(p16_a_kept_weight_is_of_one_view) {
    te_linear_desc d = {.in_features = 16, .out_features = 16, .gemm.no_bias = true, .gemm.params_dtype = TE_F32};
    te_module *m = te_linear_create(te, &d);
    te_tensor *all = te_tensor_full(te, TE_F32, SHAPE(32, 16), 1);
    te_recipe recipe = te_recipe_current_scaling();
    te_forward_args args = {.input = ones(te, 2, 16)};
    te_tensor_fill(te_tensor_narrow(all, 0, 16, 16), 5);
    te_autocast_begin(te, &(te_autocast_desc){.recipe = &recipe});
    for (int half = 0; half < 2; half++) {
        te_module_add_parameter(m, "weight", te_tensor_narrow(all, 0, 16 * half, 16));
        args.is_first_microbatch = half ? TE_MICROBATCH_LATER : TE_MICROBATCH_FIRST;
        te_tensor *y = te_forward_with(m, &args);
        CHECK(y && fabsf(test_read(y)[0] - (half ? 80 : 16)) < 1e-4f); /* the inverse of a scale is rounded */
    }
    te_autocast_end(te);
    CHECK_OK(te);
    te_module_destroy(m);
}

/* Parameters that become quantized when they get their memory stay frozen, and keep their main gradients. */
TE_TEST_DEVICES(p16_quantized_parameters_stay_frozen) {
    te_linear_desc d = {.in_features = 32, .out_features = 32, .gemm.device = TE_PARAMS_META};
    te_recipe recipe = te_recipe_current_scaling();
    te_quantized_model_init_desc init = {.recipe = &recipe};
    for (int frozen = 0; frozen < 2; frozen++) {
        te_module *m = te_linear_create(te, &d);
        te_tensor *main_grad = te_tensor_zeros(te, TE_F32, SHAPE(32, 32));
        te_module_set_requires_grad(m, !frozen);
        CHECK_EQ_INT(te_tensor_set_main_grad(te_module_parameter(m, "weight"), main_grad), TE_OK);
        te_quantized_model_init_begin(te, &init);
        te_module_reset_parameters(m);
        te_quantized_model_init_end(te);
        CHECK(te_tensor_is_quantized(te_module_parameter(m, "weight")));
        CHECK(te_tensor_requires_grad(te_module_parameter(m, "weight")) == !frozen);
        CHECK(te_tensor_main_grad(te_module_parameter(m, "weight")) == main_grad);
        te_module_destroy(m);
    }
    CHECK_OK(te);
}

/* ---- forwards ---------------------------------------------------------------------------------------------------- */

static te_result twice_forward(te_module *m, te_forward_args *args) {
    te_result result = te_module_get_class(m)->forward(m, args);
    if (result == TE_OK) args->outputs.out = te_scale(args->outputs.out, 2);
    return result;
}
TE_TEST_DEVICES(p16_an_own_forward_runs_once_over_a_checkpointed_core) {
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

TE_TEST_DEVICES(p16_padded_sizes_may_lie_in_place) {
    static const float values[4] = {1, 2, 3, 4}, want[8] = {1, 0, 0, 0, 2, 3, 4, 0};
    te_module *m = te_fp8_padding_create(te, &(te_fp8_padding_desc){.num_gemms = 2, .align_size = 4});
    te_tensor *x = te_tensor_set_requires_grad(te_tensor_from_f32(te, TE_F32, SHAPE(4, 1), values), true);
    for (int k = 0; k < 4; k++) {
        int64_t sizes[2] = {1, 3}, padded[2] = {0, 0}, *to = k & 1 ? sizes : padded;
        te_forward_args args = {.input = x, .m_splits = sizes, .padded_m_splits = to};
        te_module_set_checkpoint(m, k & 2 && !(k & 1));
        te_tensor *y = te_forward_with(m, &args);
        CHECK_TENSOR(y, want, 0, 0);
        CHECK(to[0] == 4 && to[1] == 4);
        to[0] = -7; /* this memory may be gone when the backward pass comes */
        te_backward(te_sum_all(y));
        CHECK_EQ_INT(to[0], -7);
    }
    CHECK_OK(te);
    te_module_destroy(m);
}

TE_TEST(p16_a_cache_belongs_to_its_model) {
    te_ctx *te = test_context("cpu");
    te_causal_lm_desc d = {.vocab_size = 16, .hidden_size = 16, .intermediate_size = 16, .num_hidden_layers = 3, .num_attention_heads = 2, .params_dtype = TE_F32};
    te_module *big = te_causal_lm_create(te, &d);
    d.num_hidden_layers = 1;
    te_module *small = te_causal_lm_create(te, &d);
    te_kv_cache *cache = te_kv_cache_create(small, 1, 2);
    te_forward_args args = {.input = te_tensor_full(te, TE_F32, SHAPE(1, 2, 16), 1), .kv_cache = cache};
    CHECK(te_forward_with(te_module_find(big, "model.layers.0"), &args) == NULL);
    CHECK_ERROR(te, TE_ERR_STATE, "te_no_grad_begin");
    te_no_grad_begin(te);
    CHECK(te_forward_with(te_module_find(big, "model.layers.2"), &args) == NULL);
    CHECK_ERROR(te, TE_ERR_INVALID, "kv_cache has 1 layers, and this is layer 2");
    args.input = te_tensor_full(te, TE_F32, SHAPE(1, 3, 16), 1);
    CHECK(te_forward_with(te_module_find(big, "model.layers.0"), &args) == NULL);
    CHECK_ERROR(te, TE_ERR_INVALID, "kv_cache is f32 [1, 2, 2, 8]");
    args.input = te_tensor_full(te, TE_F32, SHAPE(1, 2, 16), 1);
    CHECK(te_forward_with(te_module_find(small, "model.layers.0"), &args) != NULL);
    te_no_grad_end(te);
    CHECK_OK(te);
    te_kv_cache_destroy(cache);
    te_module_destroy(big);
    te_module_destroy(small);
}

/* ---- recipes ----------------------------------------------------------------------------------------------------- */

static te_result all_delayed(void *user, const te_quantizer_role *role, te_quantizer_desc *desc) {
    (void)user, (void)role;
    desc->kind = TE_QUANT_DELAYED;
    return TE_OK;
}
static te_result hybrid_of_delayed(void *user, const te_quantizer_role *role, te_quantizer_desc *desc) {
    static const te_quantizer_desc half = {.kind = TE_QUANT_DELAYED};
    (void)user, (void)role;
    desc->kind = TE_QUANT_HYBRID;
    desc->hybrid.rowwise_quantizer = desc->hybrid.columnwise_quantizer = &half;
    return TE_OK;
}
TE_TEST(p16_custom_recipes_calibrate_and_refuse_scales_that_nothing_updates) {
    te_ctx *te = test_context("cpu");
    te_linear_desc d = {.in_features = 16, .out_features = 16, .gemm.params_dtype = TE_F32};
    te_module *m = te_linear_create(te, &d);
    te_recipe recipe = te_recipe_custom(all_delayed, NULL);
    recipe.delayed.amax_history_len = 2;
    te_autocast_begin(te, &(te_autocast_desc){.recipe = &recipe, .disabled = true, .calibrating = true});
    te_forward(m, te_tensor_full(te, TE_F32, SHAPE(4, 16), 3));
    te_autocast_end(te);
    REQUIRE_OK(te);
    const float *history = test_read(te_module_parameter(m, "fp8_amax_history_fwd"));
    CHECK(history[0] == 3 || history[3] == 3);
    te_module_destroy(m);
    m = te_linear_create(te, &d);
    recipe = te_recipe_custom(hybrid_of_delayed, NULL);
    CHECK(test_forward(m, &recipe, ones(te, 4, 16)) == NULL);
    CHECK_ERROR(te, TE_ERR_INVALID, "row-wise quantizer of a hybrid one is delayed without a scale");
    te_module_destroy(m);
}
TE_TEST(p16_scales_of_another_format_are_made_anew) {
    te_ctx *te = test_context("cpu");
    te_module *m = te_linear_create(te, &(te_linear_desc){.in_features = 16, .out_features = 16});
    te_recipe recipe = te_recipe_delayed_scaling();
    recipe.delayed.amax_history_len = 2;
    te_module_add_buffer(m, "fp8_scale_fwd", te_tensor_full(te, TE_BF16, SHAPE(3), 1));
    te_module_add_buffer(m, "fp8_amax_history_fwd", te_tensor_zeros(te, TE_BF16, SHAPE(2, 3)));
    CHECK(test_forward(m, &recipe, te_tensor_full(te, TE_BF16, SHAPE(4, 16), 1)) != NULL);
    CHECK_OK(te);
    CHECK(te_tensor_dtype(te_module_parameter(m, "fp8_scale_fwd")) == TE_F32);
    te_module_destroy(m);
}
static bool inspect_again(void *user, const te_quantizer_role *role, const te_quant_stats *stats) {
    (void)role, (void)stats;
    te_quant_inspect((te_ctx *)user, true);
    return true;
}
TE_TEST(p16_a_visitor_of_statistics_may_begin_anew) {
    te_ctx *te = test_context("cpu");
    te_module *m = te_linear_create(te, &(te_linear_desc){.in_features = 16, .out_features = 16});
    te_recipe recipe = te_recipe_current_scaling();
    te_quant_inspect(te, true);
    test_forward(m, &recipe, te_tensor_full(te, TE_BF16, SHAPE(4, 16), 1));
    CHECK_EQ_INT(te_quant_stats_visit(te, inspect_again, te), TE_OK);
    CHECK_OK(te);
    te_module_destroy(m);
}

/* ---- options ----------------------------------------------------------------------------------------------------- */

TE_TEST(p16_options_that_mean_nothing_are_refused) {
    te_ctx *te = test_context("cpu");
    te_layernorm_linear_desc l = {.in_features = 4, .out_features = 4, .norm.normalization = (te_normalization)77};
    te_norm_desc n = {.hidden_size = 4, .norm.eps = -1};
    te_transformer_layer_desc d = {.hidden_size = 16, .ffn_hidden_size = 16, .attention.num_attention_heads = 2, .parallel_attention_mlp = true};
    float factor;
    CHECK(te_layernorm_linear_create(te, &l) == NULL);
    CHECK_ERROR(te, TE_ERR_INVALID, "norm.normalization is 77");
    CHECK(te_rmsnorm_create(te, &n) == NULL);
    CHECK_ERROR(te, TE_ERR_INVALID, "norm.eps -1");
    d.output_layernorm = true;
    CHECK(te_transformer_layer_create(te, &d) == NULL);
    CHECK_ERROR(te, TE_ERR_INVALID, "parallel_attention_mlp with output_layernorm");
    d.output_layernorm = false;
    d.apply_residual_connection_post_layernorm = true;
    CHECK(te_transformer_layer_create(te, &d) == NULL);
    CHECK_ERROR(te, TE_ERR_INVALID, "parallel_attention_mlp with apply_residual_connection_post_layernorm");
    CHECK(te_rope_frequencies(te, NULL, 0, 8, 10, NULL, &factor) == TE_ERR_INVALID);
    CHECK_ERROR(te, TE_ERR_INVALID, "room for 4 numbers");
}

/* ---- ranks ------------------------------------------------------------------------------------------------------- */

/* Rank 1's input does not fit: rank 0, which waits in the module's exchange, is told. */
static void misfit(rank_state *s) {
    const int k = *(const int *)s->arg;
    te_ctx *te = s->te;
    te_parallel_options shared = {.tp_group = s->group, .set_parallel_mode = true, .sequence_parallel = k != 1, .parallel_mode = k == 1 ? TE_PARALLEL_ROW : TE_PARALLEL_COLUMN};
    te_linear_desc plain = {.in_features = k == 1 ? 16 : 8, .out_features = 8, .gemm.params_dtype = TE_F32, .parallel = shared};
    te_layernorm_linear_desc normed = {.in_features = 8, .out_features = 8, .gemm.params_dtype = TE_F32, .parallel = shared};
    te_layernorm_mlp_desc mlp = {.hidden_size = 8, .ffn_hidden_size = 8, .gemm.params_dtype = TE_F32, .parallel = shared};
    normed.return_layernorm_output = normed.return_layernorm_output_gathered = k == 4;
    te_module *m = k < 2 ? te_linear_create(te, &plain) : k == 3 ? te_layernorm_mlp_create(te, &mlp) : te_layernorm_linear_create(te, &normed);
    for (int fits = 0; fits < 2; fits++) { /* and the group goes on */
        te_tensor *y = te_forward(m, te_tensor_full(te, TE_F32, SHAPE(4, !fits && s->rank == 1 ? 9 : 8), 1));
        EXPECT(s, fits ? y && te_ok(te) : !y && strstr(te_error(te), s->rank == 1 ? "9" : "rank 1 failed"));
        te_clear_error(te);
    }
    te_module_destroy(m);
}
TE_TEST(p16_a_rank_whose_input_does_not_fit_tells_the_others) {
    for (int k = 0; k < 5; k++) {
        test_case("module %d", k);
        run_ranks(2, misfit, &k);
    }
}
