/* te_make_graphed_callables: modules whose two passes are graphs, against the same ones as usual, step by step and to the bit. */
#include "../faults/purse.h"

enum { SEQ = 6, BATCHES = 2, WIDTH = 32, N = SEQ * BATCHES * WIDTH, ENCODED = (SEQ + 1) * BATCHES * WIDTH, STEPS = 4 };

typedef struct run_case {
    const char *name;
    te_recipe (*recipe)(void);
    bool decoder, main_grad, checkpoint, microbatches;
} run_case;

static bool give_main_grads(void *user, te_module *m, const char *path, te_tensor *x, te_entry_kind kind) {
    (void)user, (void)m, (void)path;
    if (kind == TE_ENTRY_PARAMETER && te_tensor_ndim(x) == 2) te_tensor_set_main_grad(x, te_tensor_zeros(te_tensor_ctx(x), TE_F32, 2, te_tensor_shape(x)));
    return true;
}
static bool append(void *user, te_module *m, const char *path, te_tensor *x, te_entry_kind kind) {
    float **at = (float **)user;
    (void)m, (void)path, (void)kind;
    te_tensor_to_f32(x, *at);
    *at += te_tensor_numel(x);
    return true;
}
static bool count(void *user, te_module *m, const char *path, te_tensor *x, te_entry_kind kind) {
    (void)m, (void)path, (void)kind;
    *(int64_t *)user += te_tensor_numel(x);
    return true;
}

/* Outputs and input gradients of all steps, then everything that the model keeps. */
static float *train(te_ctx *te, const run_case *c, bool graphed, int64_t *n) {
    te_transformer_layer_desc d = {.hidden_size = WIDTH, .ffn_hidden_size = 48, .attention.num_attention_heads = 4, .attention.attention_dropout = 0.1f, .hidden_dropout = 0.1f,
                                   .gemm.rng_tracker_name = "model", .gemm.fuse_wgrad_accumulation = c->main_grad};
    te_linear_desc last = {.in_features = WIDTH, .out_features = WIDTH};
    te_recipe recipe = c->recipe ? c->recipe() : te_recipe_current_scaling();
    te_autocast_desc cast = {.recipe = &recipe, .disabled = !c->recipe};
    te_rotary_desc rotary = {0};
    uint64_t offset;
    if (recipe.kind == TE_RECIPE_DELAYED) recipe.delayed.amax_history_len = 3;
    if (c->checkpoint) d.attention.attention_dropout = d.hidden_dropout = 0; /* refused with random numbers */
    d.layer_type = c->decoder ? TE_LAYER_DECODER : TE_LAYER_ENCODER;
    te_scope_begin(te);
    te_seed(te, 21);
    if (te_rng_num_trackers(te) == 0) te_rng_tracker_add(te, "model", 5);
    te_rng_tracker_set(te, "model", 5, 0);
    te_module *layer = te_transformer_layer_create(te, &d), *linear = te_linear_create(te, &last);
    te_module *m = te_module_create(te, te_module_get_class(linear), "both"); /* a tree for the optimizer: it is never run */
    te_module_add_child(m, "layer", layer), te_module_add_child(m, "linear", linear);
    te_module_set_checkpoint(layer, c->checkpoint);
    if (c->main_grad) te_module_visit_tensors(layer, give_main_grads, NULL);
    te_optimizer *opt = te_fused_adam_create(te, m, NULL);
    te_tensor *x0 = te_tensor_set_requires_grad(te_tensor_zeros(te, TE_BF16, SHAPE(SEQ, BATCHES, WIDTH)), true);
    te_forward_args sample = {.input = x0, .rotary = &rotary};
    if (c->decoder) sample.encoder_output = te_tensor_set_requires_grad(te_tensor_zeros(te, TE_BF16, SHAPE(SEQ + 1, BATCHES, WIDTH)), true);
    te_graphed_desc g = {.autocast = &cast};
    if (graphed) CHECK(te_make_graphed_callables(te, &layer, &sample, 1, &g) == TE_OK);
    CHECK_OK(te);
    int64_t keep = 0;
    float *all = test_floats(STEPS * 2 * (2 * N + ENCODED) + 40000), *at = all;
    for (int step = 0; step < STEPS; step++) {
        for (int k = 0; k <= (int)c->microbatches; k++) {
            te_scope_begin(te);
            te_tensor *x = te_tensor_set_requires_grad(test_tensor(te, TE_BF16, SHAPE(SEQ, BATCHES, WIDTH), test_normal(N, 10 + (uint64_t)step * 2 + (uint64_t)k)), true);
            te_forward_args args = {.input = te_scale(x, 0.5f), .rotary = &rotary};
            if (c->decoder) args.encoder_output = te_tensor_set_requires_grad(te_tensor_normal(te, TE_BF16, SHAPE(SEQ + 1, BATCHES, WIDTH), 0, 1), true);
            te_autocast_begin(te, &cast);
            te_tensor *y = te_forward(linear, te_forward_with(layer, &args));
            te_autocast_end(te);
            te_backward_from(y, x);
            CHECK_OK(te);
            te_tensor_to_f32(y, at), at += N;
            te_tensor_to_f32(te_tensor_grad(x), at), at += N;
            if (c->decoder) te_tensor_to_f32(te_tensor_grad(args.encoder_output), at), at += ENCODED;
            te_scope_end(te);
        }
        te_optimizer_step(opt);
    }
    te_module_visit_tensors(m, count, &keep);
    CHECK(at - all + keep + 2 < STEPS * 2 * (2 * N + ENCODED) + 40000);
    te_module_visit_tensors(m, append, &at);
    te_rng_get(te, NULL, &offset), *at++ = (float)offset;
    te_rng_tracker_get(te, "model", NULL, &offset), *at++ = (float)offset;
    CHECK_OK(te);
    *n = at - all;
    te_optimizer_destroy(opt);
    te_module_destroy(m);
    te_scope_end(te);
    return all;
}

TE_TEST_DEVICES(graphed_modules_train_alike) {
    static const run_case cases[] = {{.name = "none"}, {.name = "delayed", .recipe = te_recipe_delayed_scaling, .microbatches = true}, {.name = "current", .recipe = te_recipe_current_scaling, .decoder = true},
                                     {.name = "mxfp8, main_grad", .recipe = te_recipe_mxfp8, .main_grad = true, .microbatches = true}, {.name = "nvfp4", .recipe = te_recipe_nvfp4},
                                     {.name = "run again", .recipe = te_recipe_delayed_scaling, .checkpoint = true}};
    for (int i = 0; i < COUNT(cases); i++) {
        int64_t n, m;
        test_case("%s", cases[i].name);
        float *want = train(te, &cases[i], false, &n), *got = train(te, &cases[i], true, &m);
        CHECK_EQ_INT(n, m);
        CHECK_BYTES("training", got, want, n * 4);
    }
}

TE_TEST_DEVICES(graphed_modules_that_draw_again) {
    te_transformer_layer_desc d = {.hidden_size = WIDTH, .ffn_hidden_size = 48, .attention.num_attention_heads = 4};
    te_rng_tracker_add(te, "model", 5);
    for (int k = 0; k < 2; k++) {
        d.attention.attention_dropout = k ? 0.1f : 0, d.hidden_dropout = k ? 0 : 0.1f;
        d.gemm.rng_tracker_name = "model";
        te_module *m = te_transformer_layer_create(te, &d);
        te_forward_args sample = {.input = te_tensor_set_requires_grad(te_tensor_zeros(te, TE_BF16, SHAPE(SEQ, BATCHES, WIDTH)), true)};
        te_module_set_checkpoint(m, true);
        CHECK(te_make_graphed_callables(te, &m, &sample, 1, NULL) == TE_ERR_UNSUPPORTED);
        CHECK_ERROR(te, TE_ERR_UNSUPPORTED, "draws random numbers again");
        te_module_set_checkpoint(m, false); /* and it runs as usual */
        CHECK(te_make_graphed_callables(te, &m, &sample, 1, NULL) == TE_OK);
        CHECK_OK(te);
        te_module_destroy(m);
    }
}

TE_TEST_DEVICES(graphed_modules_and_their_limits) {
    te_layernorm_mlp_desc d = {.hidden_size = WIDTH, .ffn_hidden_size = 48, .gemm.return_bias = true, .return_layernorm_output = true};
    te_module *m = te_layernorm_mlp_create(te, &d);
    te_forward_args sample = {.input = te_tensor_set_requires_grad(test_tensor(te, TE_BF16, SHAPE(8, WIDTH), test_normal(8 * WIDTH, 1)), true)}, call = sample;
    CHECK(te_forward_with(m, &call));
    te_tensor *out = call.outputs.out;
    CHECK(te_make_graphed_callables(te, &m, &sample, 1, NULL) == TE_ERR_STATE);
    CHECK_ERROR(te, TE_ERR_STATE, "waits for its te_backward");
    te_backward_from(out, sample.input);
    REQUIRE_OK(te);
    te_tensor_zero_grad(sample.input);
    te_tensor *grad = te_tensor_grad(te_module_parameter(m, "fc1_weight"));
    CHECK(grad != NULL);
    float *before = test_read(grad);
    CHECK(te_make_graphed_callables(te, &m, &sample, 1, NULL) == TE_OK);
    CHECK_BYTES("gradients of before stay", test_read(te_tensor_grad(te_module_parameter(m, "fc1_weight"))), before, 48 * WIDTH * 4);
    CHECK(te_make_graphed_callables(te, &m, &sample, 1, NULL) == TE_ERR_INVALID);
    CHECK_ERROR(te, TE_ERR_INVALID, "is graphed already");
    call = sample;
    CHECK(te_forward_with(m, &call) && call.outputs.bias == te_module_parameter(m, "fc2_bias") && call.outputs.ln_out);
    CHECK_BYTES("output", test_read(call.outputs.out), test_read(out), 8 * WIDTH * 4);
    te_tensor *first = call.outputs.out;
    CHECK(te_forward_with(m, &call));
    CHECK(te_backward_from(first, sample.input) == TE_ERR_STATE);
    CHECK_ERROR(te, TE_ERR_STATE, "run forward 1 times since");
    CHECK(te_backward_from(call.outputs.out, sample.input) == TE_OK);
    CHECK_OK(te);
    call.input = te_tensor_zeros(te, TE_BF16, SHAPE(9, WIDTH));
    CHECK(!te_forward_with(m, &call));
    CHECK_ERROR(te, TE_ERR_SHAPE, "bf16 [9, 32] and was bf16 [8, 32]");
    call = sample;
    te_module_train(m, false); /* as usual */
    CHECK(te_forward_with(m, &call));
    te_module_train(m, true);
    te_no_grad_begin(te);
    call.input = te_tensor_zeros(te, TE_BF16, SHAPE(9, WIDTH));
    CHECK(te_forward_with(m, &call));
    te_no_grad_end(te);
    CHECK(te_forward(m, sample.input));
    te_tensor *w = te_module_parameter(m, "fc1_weight");
    te_tensor *y = te_forward(m, sample.input);
    te_tensor_fill(w, 0.5);
    CHECK(te_backward_from(y, sample.input) == TE_ERR_STATE); /* the graph would read the new weight */
    te_clear_error(te);
    te_graphed_reset(m);
    call = sample;
    call.input = test_tensor(te, TE_BF16, SHAPE(3, WIDTH), test_normal(3 * WIDTH, 1));
    CHECK(te_forward_with(m, &call));
    CHECK_OK(te);
    te_module_destroy(m);
}

/* A graph of a language model has the logits of as many positions as its sample: a call that wants others is refused. */
TE_TEST_DEVICES(graphed_modules_and_the_logits_they_keep) {
    te_causal_lm_desc d = {.vocab_size = 16, .hidden_size = WIDTH, .intermediate_size = 48, .num_hidden_layers = 1, .num_attention_heads = 2};
    te_module *m = te_causal_lm_create(te, &d);
    te_forward_args sample = {.input = te_tensor_zeros(te, TE_I32, SHAPE(1, SEQ)), .logits_to_keep = 2}, call = sample;
    CHECK(te_make_graphed_callables(te, &m, &sample, 1, NULL) == TE_OK);
    te_tensor *y = te_forward_with(m, &call);
    REQUIRE_OK(te);
    CHECK_EQ_INT(te_tensor_shape(y)[1], 2);
    call.logits_to_keep = 0;
    CHECK(!te_forward_with(m, &call));
    CHECK_ERROR(te, TE_ERR_INVALID, "logits_to_keep is 0 and was 2 in the sample");
    te_module_destroy(m);
}

/* The graphs make no gradient for a parameter that was frozen when they were made: to thaw it is an error. To freeze one later is none. */
TE_TEST_DEVICES(graphed_modules_whose_parameters_thaw) {
    static const char *const names[2] = {"weight", "bias"};
    for (int k = 0; k < 4; k++) {
        const bool before = k & 2;
        te_module *m = te_linear_create(te, &(te_linear_desc){.in_features = WIDTH, .out_features = WIDTH});
        te_tensor *frozen = te_module_parameter(m, names[k & 1]), *other = te_module_parameter(m, names[~k & 1]);
        te_forward_args sample = {.input = test_tensor(te, TE_BF16, SHAPE(8, WIDTH), test_normal(8 * WIDTH, 1))};
        test_case("%s is frozen %s", names[k & 1], before ? "before" : "after");
        te_tensor_set_requires_grad(frozen, !before);
        CHECK_EQ_INT(te_make_graphed_callables(te, &m, &sample, 1, NULL), TE_OK);
        te_tensor_set_requires_grad(frozen, true);
        if (before) {
            CHECK(!te_forward(m, sample.input));
            CHECK_ERROR(te, TE_ERR_STATE, k & 1 ? "parameter \"bias\"" : "parameter \"weight\"");
        }
        te_tensor_set_requires_grad(frozen, false);
        CHECK_EQ_INT(te_backward_from(te_forward(m, sample.input), sample.input), TE_OK);
        CHECK(te_tensor_grad(other) && !te_tensor_grad(frozen));
        te_module_destroy(m);
    }
    CHECK_OK(te);
}

/* Adapters on a large model: any number of frozen parameters. */
TE_TEST(graphed_modules_with_many_frozen_parameters) {
    enum { LAYERS = 600 };
    te_ctx *te = test_context("cpu");
    te_module *m = te_sequential_create(te, NULL, 0), *last = NULL;
    te_forward_args sample = {.input = te_tensor_full(te, TE_F32, SHAPE(2, 4), 1)};
    for (int i = 0; i < LAYERS; i++) {
        last = te_linear_create(te, &(te_linear_desc){.in_features = 4, .out_features = 4, .gemm.params_dtype = TE_F32});
        char name[16];
        snprintf(name, sizeof name, "%d", i);
        te_module_add_child(m, name, last);
    }
    te_module_set_requires_grad(m, false);
    te_module_set_requires_grad(last, true);
    CHECK_EQ_INT(te_make_graphed_callables(te, &m, &sample, 1, NULL), TE_OK);
    te_tensor *y = te_forward(m, sample.input);
    CHECK_EQ_INT(te_backward_from(y, y), TE_OK);
    CHECK(te_tensor_grad(te_module_parameter(last, "weight")) != NULL);
    CHECK_OK(te);
    te_module_destroy(m);
}

/* Where memory runs out the call leaves nothing behind, and can be made again. */
TE_TEST(graphed_modules_without_memory) {
    for (int64_t fail = 1, more = 1; more; fail += test_every_sanitized(5)) {
        purse p = {0};
        te_ctx_desc desc = purse_desc(&p, NULL);
        te_ctx *te = te_ctx_create(&desc);
        te_module *m = te_linear_create(te, &(te_linear_desc){.in_features = 8, .out_features = 8});
        const te_forward_args sample = {.input = te_tensor_set_requires_grad(te_tensor_full(te, TE_BF16, SHAPE(4, 8), 1), true)};
        test_case("request %d", (int)fail);
        te_tensor_set_requires_grad(te_module_parameter(m, "bias"), false);
        REQUIRE_OK(te);
        p.fail_at = p.calls + fail;
        te_result result = te_make_graphed_callables(te, &m, &sample, 1, NULL);
        more = p.refused;
        p.fail_at = 0;
        te_clear_error(te);
        if (result != TE_OK) CHECK_EQ_INT(te_make_graphed_callables(te, &m, &sample, 1, NULL), TE_OK);
        CHECK_OK(te);
        te_module_destroy(m);
        te_ctx_destroy(te);
        CHECK_MSG(p.blocks == 0, "%d blocks are left", (int)p.blocks);
    }
}

/* An input that a module returns is the call's own: its gradient arrives, and the next call leaves it alone. */
TE_TEST_DEVICES(graphed_modules_that_return_their_input) {
    te_module *m = te_identity_create(te, NULL);
    const te_forward_args sample = {.input = te_tensor_set_requires_grad(te_tensor_full(te, TE_F32, SHAPE(4), 1), true)};
    te_tensor *x = te_tensor_set_requires_grad(te_tensor_full(te, TE_F32, SHAPE(4), 5), true);
    CHECK_EQ_INT(te_make_graphed_callables(te, &m, &sample, 1, NULL), TE_OK);
    te_tensor *y = te_forward(m, x);
    CHECK_EQ_INT(te_backward(te_sum_all(te_scale(y, 3))), TE_OK);
    CHECK(te_tensor_grad(x) && test_read(te_tensor_grad(x))[1] == 3);
    te_tensor *other = te_forward(m, te_tensor_full(te, TE_F32, SHAPE(4), 7));
    CHECK(test_read(y)[2] == 5 && test_read(other)[2] == 7);
    CHECK_OK(te);
    te_module_destroy(m);
}
