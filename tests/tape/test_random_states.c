/* Named random states: what draws from them (nothing that fails), the same bits when a function runs again, in graphs, and on ranks; checkpoints whose input the ranks share. */
#include "../dist/ranks.h"
#include "../faults/purse.h"

static float *draw(te_ctx *te, int n) {
    float *v = test_floats(n);
    te_tensor_to_f32(te_tensor_uniform(te, TE_F32, SHAPE(n), 0, 1), v);
    return v;
}

TE_TEST_DEVICES(random_states_by_name) {
    uint64_t seed, offset;
    te_seed(te, 3);
    CHECK(te_rng_tracker_add(te, "model", 10) == TE_OK && te_rng_tracker_add(te, "data", 11) == TE_OK);
    CHECK_EQ_INT(te_rng_num_trackers(te), 2);
    CHECK_STR(te_rng_tracker_name(te, 1), "data");
    float *own[2], *model[3];
    own[0] = draw(te, 64);
    te_rng_fork_begin(te, "model");
    model[0] = draw(te, 64);
    te_rng_fork_begin(te, "data");
    float *other = draw(te, 64);
    te_rng_fork_begin(te, "model"); /* inside: it goes on */
    model[1] = draw(te, 64);
    te_rng_fork_end(te);
    te_rng_fork_end(te);
    model[2] = draw(te, 64);
    te_rng_fork_end(te);
    own[1] = draw(te, 64);
    CHECK_OK(te);
    te_seed(te, 10);
    for (int i = 0; i < 3; i++) CHECK_BYTES("model", model[i], draw(te, 64), 256);
    te_seed(te, 11);
    CHECK_BYTES("data", other, draw(te, 64), 256);
    te_seed(te, 3);
    for (int i = 0; i < 2; i++) CHECK_BYTES("own", own[i], draw(te, 64), 256);
    CHECK(te_rng_tracker_get(te, "model", &seed, &offset) == TE_OK && seed == 10 && offset == 3);
    CHECK(te_rng_tracker_set(te, "model", 10, 1) == TE_OK);
    te_rng_fork_begin(te, "model");
    CHECK_BYTES("set back", draw(te, 64), model[1], 256);
    te_rng_fork_end(te);
    /* refusals */
    te_rng_tracker_add(te, "model", 12);
    CHECK_ERROR(te, TE_ERR_INVALID, "\"model\" is there already");
    te_rng_tracker_add(te, "third", 11);
    CHECK_ERROR(te, TE_ERR_INVALID, "\"data\" has the seed 11 already");
    te_rng_tracker_add(te, "", 13);
    CHECK_ERROR(te, TE_ERR_INVALID, "one of 1 to 63 characters");
    te_rng_fork_begin(te, "nobody");
    CHECK_ERROR(te, TE_ERR_INVALID, "no random state \"nobody\"");
    te_rng_fork_end(te);
    CHECK_ERROR(te, TE_ERR_STATE, "te_rng_fork_end without");
    te_linear_desc d = {.in_features = 8, .out_features = 8, .gemm.rng_tracker_name = "nobody"};
    CHECK(!te_linear_create(te, &d));
    CHECK_ERROR(te, TE_ERR_INVALID, "no random state \"nobody\"");
    for (int i = 2; i < TE_MAX_RNG_TRACKERS; i++) te_rng_tracker_add(te, (const char[]){(char)('a' + i), 0}, 100 + (uint64_t)i);
    CHECK_OK(te);
    te_rng_tracker_add(te, "more", 200);
    CHECK_ERROR(te, TE_ERR_INVALID, "at most 16");
}

/* A capture that ends inside a region comes to nothing, and every state is where it was. */
TE_TEST_DEVICES(random_states_after_a_capture_that_ends_in_a_region) {
    uint64_t own, model;
    te_seed(te, 3);
    te_rng_tracker_add(te, "model", 10);
    draw(te, 4);
    te_rng_fork_begin(te, "model");
    draw(te, 4);
    draw(te, 4);
    te_rng_fork_end(te);
    CHECK_EQ_INT(te_graph_begin(te), TE_OK);
    te_tensor_uniform(te, TE_F32, SHAPE(4), 0, 1);
    te_rng_fork_begin(te, "model");
    te_tensor_uniform(te, TE_F32, SHAPE(4), 0, 1);
    CHECK(!te_graph_end(te));
    CHECK_ERROR(te, TE_ERR_STATE, "te_rng_fork_end belongs to the capture");
    te_rng_fork_end(te);
    te_rng_get(te, NULL, &own);
    te_rng_tracker_get(te, "model", NULL, &model);
    CHECK_EQ_INT(own, 1);
    CHECK_EQ_INT(model, 2);
    CHECK_OK(te);
}

/* A layer whose attention drops from "model" and whose residuals drop from the context's state. */
static te_module *layer(te_ctx *te) {
    te_transformer_layer_desc d = {.hidden_size = 32, .ffn_hidden_size = 48, .attention.num_attention_heads = 4, .attention.attention_dropout = 0.2f, .hidden_dropout = 0.1f,
                                   .gemm.params_dtype = TE_F32, .gemm.rng_tracker_name = "model"};
    return te_transformer_layer_create(te, &d);
}
static te_tensor *step(te_module *m, te_tensor *x) {
    te_tensor *y = te_forward(m, x);
    te_backward_from(y, y);
    return y;
}
TE_TEST_DEVICES(random_states_of_modules) {
    uint64_t first, offset;
    te_seed(te, 3);
    te_rng_tracker_add(te, "model", 10);
    te_module *m = layer(te);
    te_rng_get(te, NULL, &offset);
    CHECK(offset == 0); /* the weights came from the other one */
    te_rng_tracker_get(te, "model", NULL, &first);
    CHECK(first == 4);
    float *grad[3], *out[3];
    te_tensor *x = te_tensor_set_requires_grad(test_tensor(te, TE_F32, SHAPE(6, 2, 32), test_normal(6 * 2 * 32, 4)), true);
    for (int k = 0; k < 3; k++) { /* as it is; run again; run again inside a region of that state */
        te_seed(te, 5);
        te_rng_tracker_set(te, "model", 10, 50);
        te_module_set_checkpoint(m, k > 0);
        te_tensor *y = te_forward(m, x);
        if (k == 2) te_rng_fork_begin(te, "model");
        te_backward_from(y, y);
        if (k == 2) te_rng_fork_end(te);
        REQUIRE_OK(te);
        te_rng_tracker_get(te, "model", NULL, &first);
        te_rng_get(te, NULL, &offset);
        CHECK(first == 51 && offset == 2);
        out[k] = test_read(y), grad[k] = test_read(te_tensor_grad(x));
        te_tensor_zero_grad(x);
        te_module_zero_grad(m);
        if (k) CHECK_BYTES("output", out[k], out[0], 6 * 2 * 32 * 4);
        if (k) CHECK_BYTES("gradient", grad[k], grad[0], 6 * 2 * 32 * 4);
    }
    te_module_destroy(m);
}
TE_TEST_DEVICES(random_states_in_graphs) {
    enum { N = 6 * 2 * 32, LAUNCHES = 3 };
    te_seed(te, 3);
    te_rng_tracker_add(te, "model", 10);
    te_module *m = layer(te);
    te_tensor *x = test_tensor(te, TE_F32, SHAPE(6, 2, 32), test_normal(N, 4));
    float *want[LAUNCHES];
    uint64_t offset, again;
    step(m, x);
    te_seed(te, 5);
    te_rng_tracker_set(te, "model", 10, 50);
    for (int i = 0; i < LAUNCHES; i++) want[i] = test_read(te_forward(m, x));
    te_rng_tracker_get(te, "model", NULL, &offset);
    CHECK(offset == 50 + LAUNCHES);
    te_seed(te, 5);
    te_rng_tracker_set(te, "model", 10, 50);
    te_graph_begin(te);
    te_tensor *y = te_tensor_retain(te_forward(m, x));
    te_graph *g = te_graph_end(te);
    REQUIRE_OK(te);
    te_rng_tracker_get(te, "model", NULL, &again);
    CHECK(again == 50);
    for (int i = 0; i < LAUNCHES; i++) {
        te_graph_launch(g);
        REQUIRE_OK(te);
        CHECK_BYTES("launch", test_read(y), want[i], N * 4);
    }
    te_rng_tracker_get(te, "model", NULL, &again);
    CHECK(again == offset);
    te_rng_fork_begin(te, "model");
    te_graph_launch(g);
    CHECK_ERROR(te, TE_ERR_STATE, "inside te_rng_fork_begin(\"model\")");
    te_graph_begin(te);
    CHECK_ERROR(te, TE_ERR_STATE, "inside te_rng_fork_begin(\"model\")");
    te_rng_fork_end(te);
    te_graph_destroy(g);
    te_tensor_release(y);
    te_module_destroy(m);
}

/* ---- checkpoints whose input ranks share ---- */

static te_result twice(te_ctx *te, void *user, te_tensor *const *inputs, int num_inputs, te_tensor **outputs, int num_outputs) {
    (void)te, (void)num_inputs, (void)num_outputs;
    te_tensor *y = te_dropout(te_forward((te_module *)user, inputs[0]), 0.3f);
    te_rng_fork_begin(te, "rank");
    outputs[0] = te_add(te_dropout(y, 0.5f), inputs[1]);
    te_rng_fork_end(te);
    return te_error_code(te);
}
static void shared_input(rank_state *s) {
    te_ctx *te = s->te;
    te_linear_desc d = {.in_features = 12, .out_features = 12, .gemm.params_dtype = TE_F32};
    float out[60], grad[60];
    te_rng_tracker_add(te, "rank", 20 + (uint64_t)s->rank);
    te_seed(te, 7);
    te_module *m = te_linear_create(te, &d);
    for (int k = 0; k < 3; k++) { /* a checkpoint, one whose input is shared, none */
        te_seed(te, 9);
        te_rng_tracker_set(te, "rank", 20 + (uint64_t)s->rank, 0);
        te_scope_begin(te);
        te_tensor *x = te_tensor_set_requires_grad(te_tensor_normal(te, TE_F32, SHAPE(5, 12), 0, 1), true), *more = te_tensor_normal(te, TE_F32, SHAPE(5, 12), 0, 1), *y = NULL;
        te_tensor *in[2] = {x, more};
        te_checkpoint_desc c = {.fn = twice, .user = m, .inputs = in, .num_inputs = 2, .outputs = &y, .num_outputs = 1, .distribute_saved_activations = k == 1, .tp_group = s->group};
        if (k < 2) EXPECT(s, te_checkpoint(te, &c) == TE_OK);
        else EXPECT(s, twice(te, m, in, 2, &y, 1) == TE_OK);
        te_backward_from(y, te_tensor_detach(y));
        EXPECT(s, te_ok(te));
        float o[60], g[60];
        te_tensor_to_f32(y, o), te_tensor_to_f32(te_tensor_grad(x), g);
        if (k == 0) memcpy(out, o, sizeof o), memcpy(grad, g, sizeof g);
        EXPECT(s, memcmp(out, o, sizeof o) == 0);
        EXPECT(s, memcmp(grad, g, sizeof g) == 0);
        te_module_zero_grad(m);
        te_scope_end(te);
    }
    te_tensor *odd = te_tensor_zeros(te, TE_F32, SHAPE(1, 5)), *y = NULL;
    te_tensor *in[2] = {odd, odd};
    te_checkpoint_desc c = {.fn = twice, .user = m, .inputs = in, .num_inputs = 2, .outputs = &y, .num_outputs = 1, .distribute_saved_activations = true, .tp_group = s->group};
    EXPECT(s, te_checkpoint(te, &c) == TE_ERR_INVALID && strstr(te_error(te), "of 4 ranks and a first input [1, 5]"));
    te_clear_error(te);
    c.tp_group = NULL;
    EXPECT(s, te_checkpoint(te, &c) == TE_ERR_INVALID && strstr(te_error(te), "tp_group NULL"));
    te_clear_error(te);
    te_module_destroy(m);
}
TE_TEST(random_states_and_shared_inputs_of_checkpoints) { run_ranks(4, shared_input, NULL); }

static void draw_by(te_ctx *te, te_tensor *x, int what) {
    te_quantizer_desc q = {0};
    te_attn_desc a = {0};
    te_transformer_layer_desc layer = {0};
    switch (what) {
    case 0: te_tensor_normal(te, TE_F32, SHAPE(64), 0, 1); break;
    case 1: te_dropout(x, 0.5f); break;
    case 2:
        a.rule.dropout_p = 0.5f;
        te_attention(x, x, x, &a);
        break;
    case 3: {
        q.kind = TE_QUANT_NVFP4;
        q.nvfp4.stochastic_rounding = TE_ON;
        te_quantizer *quantizer = te_quantizer_create(te, &q);
        te_quantize(quantizer, x);
        te_quantizer_destroy(quantizer);
        break;
    }
    default:
        layer.hidden_size = layer.ffn_hidden_size = 16;
        layer.attention.num_attention_heads = 2;
        te_module_destroy(te_transformer_layer_create(te, &layer));
    }
}
/* A call that fails has drawn nothing, whichever request for memory it was that failed. */
TE_TEST(a_failed_call_draws_nothing) {
    for (int what = 0; what <= 4; what++)
        for (int64_t fail = 1, more = 1; more; fail++) {
            purse p = {0};
            te_ctx_desc desc = purse_desc(&p, NULL);
            uint64_t before, after;
            te_ctx *te = te_ctx_create(&desc);
            te_scope_begin(te);
            te_tensor *x = te_tensor_set_requires_grad(te_tensor_zeros(te, TE_F32, SHAPE(2, 2, 2, 16)), true);
            te_rng_get(te, NULL, &before);
            p.fail_at = p.calls + fail;
            draw_by(te, x, what);
            te_rng_get(te, NULL, &after);
            more = p.refused;
            test_case("call %d, request %lld", what, (long long)fail);
            CHECK_MSG((after == before) == !te_ok(te), "the random state went from %llu to %llu: %s", (unsigned long long)before, (unsigned long long)after,
                      te_ok(te) ? "no error" : te_error(te));
            te_clear_error(te);
            te_scope_end(te);
            te_ctx_destroy(te);
            must_be_empty(&p);
        }
}
