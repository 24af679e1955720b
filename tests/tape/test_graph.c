/* Graphs: a launch gives what the calls would give, to the bit, whatever changes from step to step; their memory; what they refuse. */
#include "../faults/purse.h"
#include "../trainer.h"

static te_graph *captured(trainer *t) {
    te_result begun = te_graph_begin(t->te);
    CHECK_EQ_INT(begun, TE_OK);
    train_step(t);
    te_graph *graph = te_graph_end(t->te);
    CHECK_MSG(graph != NULL, "no graph: %s", te_error(t->te));
    return graph;
}

/* Steps made by calls; then the same again: one by calls, some by launches, one by calls, the rest by launches. */
static void replay(te_ctx *te, const setup *is) {
    float losses[2][STEPS];
    uint64_t state[2][STEPS];
    test_case("%s", is->name);
    for (int run = 0; run < 2; run++) {
        trainer t;
        te_graph *graph = NULL;
        open_trainer(&t, te, is);
        for (int step = 0; step < STEPS; step++) {
            if (run == 1 && step == 1) graph = captured(&t);
            feed(&t, step);
            if (!graph || step == 4) train_step(&t);
            else {
                if (step == 5) { /* the loss of the call before took the place of the graph's */
                    te_graph_destroy(graph);
                    graph = captured(&t);
                }
                CHECK_EQ_INT(te_graph_launch(graph), TE_OK);
            }
            te_tensor_to_host(t.loss, &losses[run][step]);
            state[run][step] = state_of(&t);
        }
        te_graph_destroy(graph);
        close_trainer(&t);
        CHECK_OK(te);
        if (!te_ok(te)) return;
    }
    CHECK_BYTES("losses", losses[1], losses[0], sizeof losses[0]);
    for (int step = 0; step < STEPS; step++) CHECK_MSG(state[1][step] == state[0][step], "step %d: parameters or states differ", step);
    CHECK(losses[0][STEPS - 1] != losses[0][0]);
}
TE_TEST_DEVICES(graph_replays_training) {
    for (int i = 0; i < COUNT(setups) && te_ok(te); i += test_every_odd(2)) replay(te, &setups[i]);
}

/* ---- what a launch moves on with ---- */

TE_TEST_DEVICES(graph_draws_new_numbers) {
    float want[4][3][20], got[20];
    for (int run = 0; run < 2; run++) {
        te_graph *graph = NULL;
        te_tensor *x[3] = {NULL, NULL, NULL}, *ones = te_tensor_full(te, TE_F32, SHAPE(20), 1);
        te_seed(te, 5);
        for (int i = 0; i < 4; i++) {
            if (i == 2) te_seed(te, 6); /* in between: launches go on from there */
            if (run == 1 && i > 0)
                CHECK_EQ_INT(te_graph_launch(graph), TE_OK);
            if (run == 0 || i == 0) {
                if (run == 1) CHECK_EQ_INT(te_graph_begin(te), TE_OK);
                x[0] = te_tensor_uniform(te, TE_F32, SHAPE(20), 0, 1);
                x[1] = te_tensor_normal(te, TE_F32, SHAPE(20), 0, 1);
                x[2] = te_dropout(ones, 0.5f);
                if (run == 1) graph = te_graph_end(te);
                if (run == 1) CHECK_EQ_INT(te_graph_launch(graph), TE_OK);
            }
            for (int k = 0; k < 3; k++) {
                te_tensor_to_f32(x[k], run ? got : want[i][k]);
                if (run) CHECK_BYTES("numbers", got, want[i][k], sizeof got);
            }
        }
        te_graph_destroy(graph);
    }
    CHECK(memcmp(want[0], want[1], sizeof want[0]) != 0);
    CHECK_OK(te);
}

/* Forward and backward in two graphs; gradients that were there are added to, those that were not are made anew. */
TE_TEST_DEVICES(graph_in_two_halves) {
    const float v[4] = {1, -2, 3, 0.5f}, w[4] = {2, 2, -1, 4};
    te_tensor *x = te_tensor_set_requires_grad(test_tensor(te, TE_F32, SHAPE(4), v), true);
    te_tensor *z = te_tensor_set_requires_grad(test_tensor(te, TE_F32, SHAPE(4), v), true), *loss;
    te_backward(te_sum_all(z)); /* z has a gradient of ones */
    CHECK_EQ_INT(te_graph_begin(te), TE_OK);
    loss = te_mse_loss(te_add(x, z), te_tensor_zeros(te, TE_F32, SHAPE(4)));
    te_graph *forward = te_graph_end(te);
    CHECK_EQ_INT(te_graph_begin(te), TE_OK);
    CHECK_EQ_INT(te_backward(loss), TE_OK);
    te_graph *backward = te_graph_end(te);
    REQUIRE_OK(te);
    uint64_t version = te_tensor_version(loss), gradient = te_tensor_version(te_tensor_grad(z));
    for (int i = 0; i < 3; i++) {
        te_tensor_copy_from_host(x, i == 1 ? w : v);
        te_graph_launch(forward);
        te_graph_launch(backward);
        float sum = 0, dx[4], dz[4];
        static float held[4] = {1, 1, 1, 1};
        for (int k = 0; k < 4; k++) {
            float s = (i == 1 ? w : v)[k] + v[k];
            sum += s * s / 4;
            dx[k] = s / 2;
            if (i == 0) held[k] = 1;
            dz[k] = held[k] += dx[k];
        }
        CHECK_CLOSE("loss", &(float){(float)te_tensor_item(loss)}, &sum, 1, 1e-6, 0);
        CHECK_TENSOR(te_tensor_grad(x), dx, 1e-6, 0);
        CHECK_TENSOR(te_tensor_grad(z), dz, 1e-6, 0);
    }
    CHECK(te_tensor_version(loss) != version && te_tensor_version(te_tensor_grad(z)) != gradient);
    te_graph_destroy(backward);
    te_graph_destroy(forward);
    CHECK_OK(te);
}

/* A parameter that somebody writes between two launches: its master starts from there, as it does between two calls. */
TE_TEST_DEVICES(graph_takes_up_written_parameters) {
    uint64_t state[2];
    for (int run = 0; run < 2; run++) {
        trainer t;
        te_graph *graph = NULL;
        open_trainer(&t, te, &setups[0]);
        te_tensor *w = te_module_parameter(te_module_find(t.gpt, "layer.self_attention.proj"), "weight");
        for (int step = 0; step < 5; step++) {
            if (step == 1) te_tensor_fill(w, 0.03); /* before the capture, too */
            if (run == 1 && step == 1) graph = captured(&t);
            if (step == 3) te_tensor_fill(w, 0.01);
            feed(&t, step);
            if (graph && step < 4) CHECK_EQ_INT(te_graph_launch(graph), TE_OK);
            else train_step(&t);
        }
        state[run] = state_of(&t);
        te_graph_destroy(graph);
        close_trainer(&t);
    }
    CHECK(state[0] == state[1]);
    CHECK_OK(te);
}

/* The means of a graph, without one: a random state and bias corrections from tensors do the same as these numbers in args. */
TE_TEST_DEVICES(graph_numbers_from_tensors) {
    enum { N = 64 };
    const int64_t state[2] = {99, 40}, off = 3;
    te_tensor *rng = te_tensor_from_host(te, TE_I64, SHAPE(2), state), *x = te_tensor_normal(te, TE_F32, SHAPE(N, N), 0, 1);
    te_tensor *q = te_tensor_normal(te, TE_F32, SHAPE(N, 1, 1, N), 0, 1);
    uint8_t first[6][N * N * 4], second[6][N * N * 4];
    memset(first, 0, sizeof first);
    memset(second, 0, sizeof second);
    for (int run = 0; run < 2; run++) {
        uint8_t (*out)[N * N * 4] = run ? second : first;
        uint64_t seed = run ? 1 : 99, offset = run ? (uint64_t)off : 43;
        te_tensor *y = te_tensor_zeros(te, TE_F32, SHAPE(N, N));
        const te_tensor *from = run ? rng : NULL;
        te_op_random_args random = {0};
        random.dst = y;
        random.b = 1;
        random.kind = TE_RANDOM_NORMAL;
        random.seed = seed, random.offset = offset, random.rng = from;
        CHECK_EQ_INT(te_op_random(te, &random), TE_OK);
        te_tensor_to_host(y, out[0]);
        te_op_dropout_add_fwd_args drop = {0};
        drop.x = x, drop.y = y, drop.p = 0.3f;
        drop.seed = seed, drop.offset = offset, drop.rng = from;
        CHECK_EQ_INT(te_op_dropout_add_fwd(te, &drop), TE_OK);
        te_tensor_to_host(y, out[1]);
        te_op_dropout_add_bwd_args back = {0};
        back.dy = x, back.dx = y, back.p = 0.3f;
        back.seed = seed, back.offset = offset, back.rng = from;
        CHECK_EQ_INT(te_op_dropout_add_bwd(te, &back), TE_OK);
        te_tensor_to_host(y, out[2]);
        te_op_attn_fwd_args attn = {0};
        te_tensor *o = te_tensor_zeros(te, TE_F32, SHAPE(N, 1, 1, N));
        attn.q = attn.k = attn.v = q, attn.o = o, attn.rule.dropout_p = 0.3f;
        attn.lse = te_tensor_zeros(te, TE_F32, SHAPE(1, 1, N));
        attn.seed = seed, attn.offset = offset, attn.rng = from;
        CHECK_EQ_INT(te_op_attn_fwd(te, &attn), TE_OK);
        te_tensor_to_host(o, out[3]);
        te_op_attn_bwd_args grad = {0};
        grad.q = grad.k = grad.v = q, grad.o = o, grad.lse = attn.lse, grad.d_o = q, grad.rule.dropout_p = 0.3f;
        grad.dq = te_tensor_zeros(te, TE_F32, SHAPE(N, 1, 1, N));
        grad.dk = te_tensor_zeros(te, TE_F32, SHAPE(N, 1, 1, N));
        grad.dv = te_tensor_zeros(te, TE_F32, SHAPE(N, 1, 1, N));
        grad.seed = seed, grad.offset = offset, grad.rng = from;
        CHECK_EQ_INT(te_op_attn_bwd(te, &grad), TE_OK);
        te_tensor_to_host(grad.dv, out[4]);
        te_op_nvfp4_quantize_args cast = {0};
        cast.x = x, cast.stochastic_rounding = cast.measure = true;
        cast.row = te_tensor_zeros(te, TE_F4E2M1, SHAPE(N, N)), cast.row_scale = te_tensor_zeros(te, TE_F8E4M3, SHAPE(128, 4));
        cast.col = te_tensor_zeros(te, TE_F4E2M1, SHAPE(N, N)), cast.col_scale = te_tensor_zeros(te, TE_F8E4M3, SHAPE(128, 4));
        cast.amax_row = te_tensor_zeros(te, TE_F32, SHAPE(1)), cast.amax_col = te_tensor_zeros(te, TE_F32, SHAPE(1));
        cast.seed = seed, cast.offset = offset, cast.rng = from;
        CHECK_EQ_INT(te_op_nvfp4_quantize(te, &cast), TE_OK);
        te_tensor_to_host(cast.row, out[5]);
        te_tensor_to_host(cast.col, out[5] + N * N / 2);
    }
    for (int i = 0; i < 6; i++) {
        test_case("operation %d", i);
        CHECK_BYTES("result", second[i], first[i], sizeof first[i]);
    }
    te_op_random_args random = {0};
    random.dst = x;
    random.b = 1;
    random.rng = x;
    CHECK_EQ_INT(te_op_random(te, &random), TE_ERR_DTYPE);
    CHECK_ERROR(te, TE_ERR_DTYPE, "rng is f32; i64 is needed");

    float rows[2][N];
    for (int run = 0; run < 2; run++) {
        const float unbias[2] = {(float)(1 / (1 - pow((double)0.9f, 7))), (float)(1 / (1 - pow((double)0.99f, 7)))}, rate = 0.01f;
        float *v = test_normal(N, 3);
        te_adam_tensor t = {0};
        te_op_adam_args adam = {0};
        t.grad = te_tensor_full(te, TE_F32, SHAPE(N), 0.5);
        t.param = test_tensor(te, TE_F32, SHAPE(N), v);
        t.m = te_tensor_full(te, TE_F32, SHAPE(N), 0.25);
        t.v = te_tensor_full(te, TE_F32, SHAPE(N), 0.125);
        adam.tensors = &t;
        adam.num_tensors = 1;
        adam.beta1 = 0.9f, adam.beta2 = 0.99f, adam.eps = 1e-8f, adam.lr = run ? 5 : rate, adam.step = run ? 1 : 7;
        if (run) adam.bias_correction = te_tensor_from_host(te, TE_F32, SHAPE(2), unbias), adam.lr_device = te_tensor_from_host(te, TE_F32, SHAPE(1), &rate);
        CHECK_EQ_INT(te_op_adam(te, &adam), TE_OK);
        te_tensor_to_host(t.param, rows[run]);
        if (!run) continue;
        adam.bias_correction = adam.lr_device;
        CHECK_EQ_INT(te_op_adam(te, &adam), TE_ERR_SHAPE);
    }
    CHECK_BYTES("adam", rows[1], rows[0], sizeof rows[0]);
    CHECK_ERROR(te, TE_ERR_SHAPE, "bias_correction");
}

/* ---- memory ---- */

TE_TEST_DEVICES(graph_keeps_its_memory) {
    const float v[8] = {1, 2, 3, 4, 5, 6, 7, 8};
    te_memory_trim(te);
    size_t before = te_memory_get_stats(te).reserved;
    te_scope_begin(te);
    te_tensor *x = test_tensor(te, TE_F32, SHAPE(8), v), *y, *inner;
    float want[8];
    CHECK_EQ_INT(te_graph_begin(te), TE_OK);
    te_scope_begin(te);
    inner = te_scale(x, 3); /* released inside: the next one may lie there */
    inner = te_add(inner, te_scale(inner, 2));
    y = te_tensor_retain(te_scale(inner, 0.5f));
    te_scope_end(te);
    te_graph *graph = te_graph_end(te);
    REQUIRE_OK(te);
    te_scope_end(te); /* x goes, its memory does not */
    for (int i = 0; i < 8; i++) want[i] = v[i] * 4.5f;
    for (int round = 0; round < 3; round++) {
        te_scope_begin(te);
        for (int i = 0; i < 40; i++) te_tensor_full(te, TE_F32, SHAPE(8), NAN); /* whatever is free gets poisoned */
        te_graph_launch(graph);
        CHECK_TENSOR(y, want, 0, 0);
        te_scope_end(te);
    }
    te_graph_destroy(graph);
    CHECK_TENSOR(y, want, 0, 0); /* outlives the graph */
    te_tensor_release(y);
    te_memory_trim(te);
    CHECK_EQ_INT(te_memory_get_stats(te).reserved, before);
    CHECK_OK(te);
}

/* ---- refusals ---- */

/* Each of these ends the capture of whoever tries it; the context goes on as if nothing had been. */
static void no_wait(trainer *t) { te_synchronize(t->te); }
static void no_item(trainer *t) { te_tensor_item(te_sum_all(te_module_parameter(te_module_child(t->gpt, 0), "weight"))); }
static void no_read(trainer *t) {
    float x[WORDS * WIDTH];
    te_tensor_to_f32(te_module_parameter(te_module_child(t->gpt, 0), "weight"), x);
}
static void no_write(trainer *t) {
    int32_t ids[TOKENS] = {0};
    te_tensor_copy_from_host(t->ids[0], ids);
}
static void no_trim(trainer *t) { te_memory_trim(t->te); }
static void no_begin(trainer *t) { te_graph_begin(t->te); }
static void no_warmup(trainer *t) { te_warmup_begin(t->te); }
static void no_seed(trainer *t) { te_seed(t->te, 4); }
static void no_module(trainer *t) {
    te_norm_desc norm = {0};
    norm.hidden_size = 4;
    CHECK(!te_rmsnorm_create(t->te, &norm));
}
static void no_optimizer(trainer *t) { CHECK(!te_fused_adam_create(t->te, t->gpt, NULL)); }
static void no_quantizer(trainer *t) {
    te_quantizer_desc desc = {0};
    desc.kind = TE_QUANT_CURRENT;
    CHECK(!te_quantizer_create(t->te, &desc));
}
static void no_later(trainer *t) {
    te_recipe recipe = te_recipe_current_scaling();
    te_autocast_desc cast = {0};
    te_forward_args args = {0};
    cast.recipe = &recipe;
    args.input = t->ids[0];
    args.is_first_microbatch = TE_MICROBATCH_LATER;
    te_autocast_begin(t->te, &cast);
    te_forward_with(t->gpt, &args);
    te_autocast_end(t->te);
}
static void no_first_scales(trainer *t) {
    te_recipe recipe = te_recipe_delayed_scaling();
    te_autocast_desc cast = {0};
    cast.recipe = &recipe;
    te_autocast_begin(t->te, &cast);
    te_forward(t->gpt, t->ids[0]);
    te_autocast_end(t->te);
}
static void no_old_gradient(trainer *t) {
    te_graph *none = te_graph_end(t->te); /* begun anew, after a gradient has been left behind */
    te_graph_destroy(none);
    te_backward(te_sum_all(te_module_parameter(te_module_child(t->gpt, 0), "weight")));
    te_graph_begin(t->te);
    te_optimizer_step(t->adam);
    te_optimizer_zero_grad(t->adam);
}
static void no_open_region(trainer *t) { te_autocast_begin(t->te, NULL); }
static void no_shape(trainer *t) { te_add(t->loss, te_module_parameter(te_module_child(t->gpt, 0), "weight")); }
static void no_memory(trainer *t) { CHECK(!te_tensor_empty(t->te, TE_F32, SHAPE((int64_t)1 << 50))); }
static void no_cleared_error(trainer *t) {
    te_synchronize(t->te);
    te_clear_error(t->te);
}

TE_TEST_DEVICES(graph_refusals) {
    static const struct {
        void (*call)(trainer *t);
        te_result code;
        const char *what, *instead;
    } bad[] = {
        {no_wait, TE_ERR_STATE, "waiting for the device", "after te_graph_launch"},
        {no_item, TE_ERR_STATE, "te_tensor_item", "after te_graph_launch"},
        {no_read, TE_ERR_STATE, "te_tensor_to_f32", "after te_graph_launch"},
        {no_write, TE_ERR_STATE, "copying from host memory", "before each te_graph_launch"},
        {no_trim, TE_ERR_STATE, "waiting for the device", ""},
        {no_begin, TE_ERR_STATE, "a capture is under way already", "te_graph_end is missing"},
        {no_warmup, TE_ERR_STATE, "te_warmup_begin", "before te_graph_begin"},
        {no_seed, TE_ERR_STATE, "te_seed", "before te_graph_begin"},
        {no_module, TE_ERR_STATE, "te_module_create", "before te_graph_begin"},
        {no_optimizer, TE_ERR_STATE, "te_fused_adam_create", "before te_graph_begin"},
        {no_quantizer, TE_ERR_STATE, "te_quantizer_create", "before te_graph_begin"},
        {no_later, TE_ERR_STATE, "is_first_microbatch is LATER inside", "one capture"},
        {no_first_scales, TE_ERR_STATE, "the scales of a delayed recipe", "run the step once"},
        {no_old_gradient, TE_ERR_STATE, "with a gradient from before", "forget gradients before te_graph_begin"},
        {no_open_region, TE_ERR_STATE, "te_graph_end: inside an autocast region", "te_autocast_end"},
        {no_shape, TE_ERR_SHAPE, "te_add", ""},
        {no_memory, TE_ERR_OUT_OF_MEMORY, "out of memory", ""},
        {no_cleared_error, TE_ERR_STATE, "its error was cleared", ""},
    };
    trainer t, other;
    open_trainer(&t, te, &setups[0]);
    open_trainer(&other, te, &setups[0]); /* the same, left in peace */
    feed(&t, 0);
    feed(&other, 0);
    te_seed(te, 78);
    train_step(&t);
    te_seed(te, 78);
    train_step(&other);
    for (int i = 0, steps = 0; i < COUNT(bad); i++) {
        uint64_t seed, offset, after;
        if (bad[i].call == no_memory && !te_ctx_is_cuda(te)) continue; /* here graph_without_memory does it */
        steps++;
        test_case("%s", bad[i].what);
        te_rng_get(te, &seed, &offset);
        te_scope_begin(te);
        CHECK_EQ_INT(te_graph_begin(te), TE_OK);
        train_step(&t);
        CHECK_OK(te);
        bad[i].call(&t);
        CHECK(te_graph_end(te) == NULL);
        te_scope_end(te);
        CHECK_STR(te_error(te), bad[i].instead);
        CHECK_ERROR(te, bad[i].code, bad[i].what);
        if (te_autocast_enabled(te)) te_autocast_end(te);
        te_rng_get(te, &seed, &after);
        CHECK(after == offset);
        CHECK_EQ_INT(te_optimizer_steps(t.adam), steps);
        for (int run = 0; run < 2; run++) { /* nothing has changed: both go on alike */
            te_rng_set(te, seed, offset);
            feed(run ? &other : &t, steps);
            train_step(run ? &other : &t);
        }
        CHECK(state_of(&t) == state_of(&other));
        CHECK_OK(te);
    }
    close_trainer(&t);
    close_trainer(&other);
}

TE_TEST_DEVICES(graph_calls_out_of_order) {
    trainer t;
    te_autocast_desc cast = {0};
    CHECK(te_graph_end(te) == NULL);
    CHECK_ERROR(te, TE_ERR_STATE, "te_graph_end without te_graph_begin");
    CHECK_EQ_INT(te_graph_launch(NULL), TE_ERR_STATE);
    te_graph_destroy(NULL);
    CHECK_EQ_INT(te_graph_begin(NULL), TE_ERR_STATE);
    CHECK(te_graph_end(NULL) == NULL);
    te_warmup_begin(te);
    CHECK_EQ_INT(te_graph_begin(te), TE_ERR_STATE);
    CHECK_ERROR(te, TE_ERR_STATE, "te_warmup_end");
    te_warmup_end(te);
    te_autocast_begin(te, &cast);
    CHECK_EQ_INT(te_graph_begin(te), TE_ERR_STATE);
    CHECK_ERROR(te, TE_ERR_STATE, "autocast");
    te_autocast_end(te);
    CHECK_OK(te);
    open_trainer(&t, te, &setups[0]);
    feed(&t, 0);
    train_step(&t);
    te_graph *graph = captured(&t);
    CHECK_EQ_INT(te_graph_begin(te), TE_OK);
    CHECK_EQ_INT(te_graph_launch(graph), TE_ERR_STATE);
    CHECK(te_graph_end(te) == NULL);
    CHECK_ERROR(te, TE_ERR_STATE, "te_graph_launch");
    CHECK_EQ_INT(te_graph_begin(te), TE_OK);
    te_graph_destroy(graph); /* refused: it is still there */
    CHECK(te_graph_end(te) == NULL);
    CHECK_ERROR(te, TE_ERR_STATE, "te_graph_destroy");
    CHECK_EQ_INT(te_graph_launch(graph), TE_OK);
    te_add(t.loss, t.ids[0]);
    CHECK_EQ_INT(te_graph_launch(graph), te_error_code(te)); /* after an error nothing runs */
    CHECK_EQ_INT(te_optimizer_steps(t.adam), 2);
    te_clear_error(te);
    close_trainer(&t); /* the optimizer that it steps is gone */
    CHECK_EQ_INT(te_graph_launch(graph), TE_ERR_STATE);
    CHECK_ERROR(te, TE_ERR_STATE, "its optimizer was destroyed");
    te_graph_destroy(graph);
    CHECK_OK(te);
}

TE_TEST(graph_outlives_its_context) {
    te_ctx *te = te_ctx_create(&(te_ctx_desc){.device = test_no_gpu() ? "cpu" : "cuda:0"});
    te_tensor *x = te_tensor_zeros(te, TE_F32, SHAPE(4));
    CHECK_EQ_INT(te_graph_begin(te), TE_OK);
    te_scale(x, 2);
    te_graph *graph = te_graph_end(te);
    CHECK_EQ_INT(te_graph_launch(graph), TE_OK);
    CHECK_EQ_INT(te_graph_begin(te), TE_OK); /* a second one, never ended */
    te_scale(x, 3);
    te_ctx_destroy(te);
    CHECK_EQ_INT(te_graph_launch(graph), TE_ERR_STATE);
    te_graph_destroy(graph);
}

/* Every request for host memory and for device memory between begin and end fails once. */
TE_TEST(graph_without_memory) {
    for (int device = 0; device < 2; device++) {
        bool whole = false;
        for (int k = 1; !whole && k < 4000; k += test_every_odd(5) * (k < 40 ? 1 : 7)) {
            purse *host = new_purse(), *memory = new_purse();
            te_ctx_desc desc = purse_desc(host, memory);
            trainer t;
            te_graph *graph;
            test_case("request %d of the %s", k, device ? "device" : "host");
            te_ctx *te = te_ctx_create(&desc);
            open_trainer(&t, te, &setups[2]);
            feed(&t, 0);
            train_step(&t);
            REQUIRE_OK(te);
            te_memory_trim(te);
            purse *p = device ? memory : host;
            p->fail_at = p->calls + k;
            int64_t refused = p->refused;
            bool begun = te_graph_begin(te) == TE_OK;
            if (begun) train_step(&t);
            graph = begun ? te_graph_end(te) : NULL;
            whole = p->refused == refused;
            p->fail_at = 0;
            if (whole) CHECK(graph != NULL);
            /* the pool may do with another block, and lists grow when they can: then there is a graph */
            CHECK(graph ? te_ok(te) : te_error_code(te) == TE_ERR_OUT_OF_MEMORY);
            te_clear_error(te);
            if (graph) CHECK_EQ_INT(te_graph_launch(graph), TE_OK);
            train_step(&t);
            CHECK_OK(te);
            CHECK_EQ_INT(te_optimizer_steps(t.adam), graph ? 3 : 2);
            te_graph_destroy(graph);
            close_trainer(&t);
            te_ctx_destroy(te);
            must_be_empty(host);
            must_be_empty(memory);
        }
        CHECK(whole);
    }
}

/* ---- what a capture holds ---- */

/* te_query_args lists this field. Lists are NULL in `none`, so their fields are looked for in the operation's line. */
static bool field_listed(te_op op, const char *field, const char *rows) {
    static const long long none[64];
    te_arg list[32];
    char key[96];
    const char *at, *found;
    int64_t n = te_query_args(op, none, list, 32);
    while (n-- > 0)
        if (!strcmp(list[n].name, field)) return true;
    snprintf(key, sizeof key, "#define TE__ARGS_%s(T, L)", te_query_name(op));
    at = strstr(rows, key);
    snprintf(key, sizeof key, "L(%s,", field);
    found = at ? strstr(at, key) : NULL;
    return found && found < strstr(at, "\n#define");
}
/* Every tensor in every args struct of this chapter of the API is listed in ops/args.c: one that is not would be gone when the graph is launched. */
static void count_listed(const char *chapter, const char *rows, int *num_structs, int *num_fields) {
    const char *ops = (const char *)test_read_file(chapter, NULL);
    int structs = 0, fields = 0;
    REQUIRE(ops != NULL);
    for (const char *at = ops; (at = strstr(at, "typedef struct te_")) != NULL; at++) {
        static const char shared[] = "typedef struct te_attn_rule {"; /* a part of both attention operations */
        char name[64] = "attn_fwd_args";
        const char *end = strstr(at, "\n}"), *prefix = strncmp(at, shared, sizeof shared - 1) ? "" : "rule.";
        int op = 1;
        if ((!*prefix && sscanf(at, "typedef struct te_op_%63[a-z0-9_]", name) != 1) || strlen(name) < 6 || strcmp(name + strlen(name) - 5, "_args") != 0) continue;
        name[strlen(name) - 5] = 0;
        while (op < TE_OP_COUNT && strcmp(te_query_name((te_op)op), name)) op++;
        test_case("te_op_%s_args", name);
        CHECK(op < TE_OP_COUNT);
        structs += !*prefix;
        for (const char *p = strchr(at, '\n'); p && p < end; p = strchr(p + 1, '\n')) {
            static const char *const tuples[] = {"te_adam_tensor *", "te_sgd_tensor *"};
            const char *semicolon = strchr(p + 1, ';'), *star = strstr(p + 1, "te_tensor *");
            for (int t = 0; t < COUNT(tuples); t++) {
                const char *tuple = strstr(p + 1, tuples[t]);
                if (tuple && (!star || tuple < star)) star = tuple;
            }
            if (!star || !semicolon || star > semicolon) continue;
            for (star = strchr(star, '*'); star && star < semicolon; star = strchr(star + 1, '*')) {
                char field[64];
                if (sscanf(star, "*%63[a-z0-9_]", field) != 1 || !strcmp(field, "const")) continue; /* *const *name: the second star */
                char listed[80];
                snprintf(listed, sizeof listed, "%s%s", prefix, field);
                CHECK_MSG(field_listed((te_op)op, listed, rows), "%s is not listed", listed);
                fields++;
            }
        }
    }
    *num_structs += structs;
    *num_fields += fields;
}
TE_TEST(graph_knows_every_tensor) {
    const char *rows = (const char *)test_read_file("src/ops/args.c", NULL);
    int structs = 0, fields = 0;
    if (!rows) SKIP("not run from the repository");
    count_listed("src/api/ops.h", rows, &structs, &fields);
    count_listed("src/api/ops_quant.h", rows, &structs, &fields);
    count_listed("src/api/ops_moe.h", rows, &structs, &fields);
    count_listed("src/api/ops_model.h", rows, &structs, &fields);
    count_listed("src/api/ops_train.h", rows, &structs, &fields);
    CHECK_MSG(structs >= TE_OP_COUNT - 5 && fields >= 200, "%d structs of %d, %d fields", structs, TE_OP_COUNT - 1, fields); /* four share another's */
}
