/* Checkpointing and delayed weight gradients: losses, gradients, scales and the random state are, bit for bit, those without it; less memory; what it refuses. */
#include "../trainer.h"

/* Which modules run again: bits. */
enum { NOWHERE = 0, LAYER = 1, ATTENTION = 2, MLP = 4, WHOLE = 8, DEEP = LAYER | MLP | WHOLE };

static void set_checkpoints(trainer *t, int where) {
    te_module_set_checkpoint(t->gpt, (where & WHOLE) != 0);
    te_module_set_checkpoint(te_module_find(t->gpt, "layer"), (where & LAYER) != 0);
    te_module_set_checkpoint(te_module_find(t->gpt, "layer.self_attention"), (where & ATTENTION) != 0);
    te_module_set_checkpoint(te_module_find(t->gpt, "layer.layernorm_mlp"), (where & MLP) != 0);
}

static void same_training(te_ctx *te, int number, bool graph, bool delay) {
    static const int places[] = {NOWHERE, LAYER, ATTENTION | MLP, WHOLE, DEEP};
    const setup *is = &setups[number];
    float losses[2][STEPS];
    uint64_t state[2][STEPS];
    for (int run = 0; run < COUNT(places) && te_ok(te); run++) {
        setup own = *is;
        trainer t;
        te_graph *g = NULL;
        if (run && (run + number) % test_every_sanitized(2)) continue; /* with a sanitizer each setup has one place */
        int to = run > 0;
        own.delay = delay && run > 0; /* the first run is without anything */
        test_case("%s, checkpoints %d", is->name, places[run]);
        open_trainer(&t, te, &own);
        set_checkpoints(&t, places[run]);
        for (int step = 0; step < num_steps(); step++) {
            feed(&t, step);
            if (graph && run && step == 2) {
                CHECK_EQ_INT(te_graph_begin(te), TE_OK);
                train_step(&t);
                g = te_graph_end(te);
                CHECK_MSG(g != NULL, "no graph: %s", te_error(te));
            }
            if (g) CHECK_EQ_INT(te_graph_launch(g), TE_OK);
            else train_step(&t);
            te_tensor_to_host(t.loss, &losses[to][step]);
            state[to][step] = state_of(&t);
        }
        te_graph_destroy(g);
        close_trainer(&t);
        CHECK_OK(te);
        if (run) {
            CHECK_BYTES("losses", losses[1], losses[0], (size_t)num_steps() * sizeof(float));
            for (int step = 0; step < num_steps(); step++) CHECK_MSG(state[1][step] == state[0][step], "step %d: parameters or states differ", step);
        }
    }
}
TE_TEST_DEVICES(checkpoints_change_no_bit) {
    for (int i = 0; i < COUNT(setups) && te_ok(te); i += test_every_odd(1)) same_training(te, i, false, false);
}
TE_TEST_DEVICES(checkpoints_change_no_bit_of_a_graph) {
    for (int i = test_samples() ? 1 : 0; i < COUNT(setups) && te_ok(te); i += test_every_odd(1)) same_training(te, i, true, true);
}

/* ---- functions ---- */

typedef struct calls {
    te_tensor *factor; /* a parameter, reached by the function's own ways */
    int runs, fail_at, other_at; /* fails, or makes another shape, in run number so many */
    bool grad_was_on;
} calls;

/* outputs: dropout(gelu(a * factor)) + b, and a sum of b */
static te_result some_function(te_ctx *te, void *user, te_tensor *const *in, int n, te_tensor **out, int m) {
    calls *c = *(calls **)user;
    c->runs++;
    c->grad_was_on = te_grad_enabled(te);
    if (n != 2 || m != 2) return TE_ERR_INVALID;
    if (c->runs == c->fail_at) return TE_ERR_IO;
    te_tensor *h = te_linear(in[0], c->factor, NULL);
    if (c->runs == c->other_at) h = te_tensor_narrow(h, 0, 0, 1);
    out[0] = c->runs == c->other_at ? h : te_add(te_dropout(te_activate(h, TE_GELU, NULL), 0.25f), in[1]);
    out[1] = te_sum_all(in[1]);
    return TE_OK;
}
static te_result run_some(te_ctx *te, bool checkpointed, calls *c, te_tensor **in, te_tensor **out) {
    te_checkpoint_desc d = {0};
    d.fn = some_function;
    d.user = &c;
    d.user_size = sizeof c; /* the pointer is copied: this frame is gone by the second run */
    d.inputs = in;
    d.num_inputs = 2;
    d.outputs = out;
    d.num_outputs = 2;
    return checkpointed ? te_checkpoint(te, &d) : some_function(te, &c, in, 2, out, 2);
}
TE_TEST_DEVICES(checkpointed_functions) {
    float *want[3] = {NULL, NULL, NULL};
    for (int depth = 0; depth < 2; depth++) {
        calls c = {0};
        te_seed(te, 3);
        te_tensor *in[2], *out[2], *h, *loss;
        te_tensor *x = te_tensor_set_requires_grad(te_tensor_normal(te, TE_BF16, SHAPE(4, 8), 0, 1), true);
        c.factor = te_tensor_set_requires_grad(te_tensor_normal(te, TE_BF16, SHAPE(8, 8), 0, 1), true);
        in[0] = x;
        in[1] = h = te_scale(x, 2); /* x is used inside, by h inside, and outside: the order of additions counts */
        CHECK_EQ_INT(run_some(te, depth > 0, &c, in, out), TE_OK);
        CHECK(te_tensor_requires_grad(out[0]) && te_tensor_requires_grad(out[1]));
        loss = te_add(te_mse_loss(te_add(out[0], x), te_scale(h, 0.5f)), te_scale(out[1], 0.125f));
        CHECK_EQ_INT(te_backward(loss), TE_OK);
        CHECK_EQ_INT(c.runs, depth + 1);
        float *got[3] = {test_read(te_tensor_grad(x)), test_read(te_tensor_grad(c.factor)), test_read(loss)};
        const size_t sizes[3] = {32, 64, 1};
        for (int i = 0; i < 3; i++)
            if (depth) CHECK_BYTES("gradients", got[i], want[i], sizes[i] * sizeof(float));
            else want[i] = got[i];
    }
    CHECK_OK(te);
}

TE_TEST_DEVICES(checkpoints_without_gradients) {
    calls c = {0};
    te_tensor *out[2], *in[2] = {te_tensor_normal(te, TE_BF16, SHAPE(4, 8), 0, 1), te_tensor_normal(te, TE_BF16, SHAPE(4, 8), 0, 1)};
    c.factor = te_tensor_set_requires_grad(te_tensor_normal(te, TE_BF16, SHAPE(8, 8), 0, 1), true);
    te_no_grad_begin(te);
    CHECK_EQ_INT(run_some(te, true, &c, in, out), TE_OK);
    te_no_grad_end(te);
    CHECK(!te_tensor_requires_grad(out[0]) && c.runs == 1);
    /* no input wants one, a parameter does */
    CHECK_EQ_INT(run_some(te, true, &c, in, out), TE_OK);
    CHECK(!c.grad_was_on);
    CHECK_EQ_INT(te_backward(te_mean_all(out[0])), TE_OK);
    CHECK(c.runs == 3 && c.grad_was_on && te_tensor_grad(c.factor) != NULL);
    /* a record that is never played lets go of everything */
    te_scope_begin(te);
    size_t before = te_memory_get_stats(te).allocated;
    te_scope_begin(te);
    CHECK_EQ_INT(run_some(te, true, &c, in, out), TE_OK);
    te_scope_end(te);
    CHECK_EQ_INT(te_memory_get_stats(te).allocated, before);
    te_scope_end(te);
    CHECK_OK(te);
}

/* A function that leaves a region open, or ends one too many, in its first run or in its second: an error, and the regions are those from before. With an error of its own that one stays. */
enum { LEAVE_NO_GRAD, LEAVE_GRAD, LEAVE_SCOPE, LEAVE_AUTOCAST, END_NO_GRAD, END_AUTOCAST, LEAVE_WAYS };
typedef struct leaver {
    int way, at, run;
    bool fails;
} leaver;
static te_result leaves_open(te_ctx *te, void *user, te_tensor *const *in, int n, te_tensor **out, int m) {
    leaver *l = *(leaver **)user;
    (void)n, (void)m;
    out[0] = te_scale(in[0], 2);
    if (++l->run != l->at) return TE_OK;
    if (l->way == LEAVE_NO_GRAD) te_no_grad_begin(te);
    if (l->way == LEAVE_GRAD) te_enable_grad_begin(te);
    if (l->way == LEAVE_SCOPE) te_scope_begin(te);
    if (l->way == LEAVE_AUTOCAST) te_autocast_begin(te, NULL);
    if (l->way == END_NO_GRAD) te_no_grad_end(te);
    if (l->way == END_AUTOCAST) te_autocast_end(te);
    return l->fails ? TE_ERR_IO : TE_OK;
}
TE_TEST(checkpoints_that_leave_regions_open) {
    static const char *const says[LEAVE_WAYS] = {"te_no_grad or te_enable_grad", "te_no_grad or te_enable_grad", "te_scope", "te_autocast", "te_no_grad or te_enable_grad", "te_autocast"};
    te_ctx *te = test_context("cpu");
    for (int way = 0; way < LEAVE_WAYS; way++)
        for (int at = 0; at < 3; at++) /* 0: without gradients; 1 and 2: that run */
            for (int fails = 0; fails < 2; fails++) {
                if (way == END_NO_GRAD && at == 2) continue; /* there is none to end */
                test_case("way %d, run %d, fails %d", way, at, fails);
                leaver l = {way, at ? at : 1, 0, fails != 0}, *user = &l;
                size_t before = te_memory_get_stats(te).allocated;
                te_scope_begin(te);
                te_tensor *x = te_tensor_set_requires_grad(te_tensor_full(te, TE_F32, SHAPE(3), 1), true), *y = NULL;
                te_autocast_begin(te, NULL);
                if (!at) te_no_grad_begin(te);
                te_result result = te_checkpoint(te, &(te_checkpoint_desc){.fn = leaves_open, .user = &user, .user_size = sizeof user, .inputs = &x, .num_inputs = 1, .outputs = &y, .num_outputs = 1});
                if (!at) te_no_grad_end(te);
                if (at == 2) {
                    CHECK_EQ_INT(result, TE_OK);
                    result = te_backward(te_sum_all(y));
                }
                CHECK_EQ_INT(result, fails ? TE_ERR_IO : TE_ERR_STATE);
                CHECK(te_grad_enabled(te) && te_autocast_enabled(te));
                te_clear_error(te); /* said below: te_autocast_end returns it */
                te_autocast_end(te);
                CHECK(!te_autocast_enabled(te));
                te_scope_end(te);
                CHECK_OK(te);
                CHECK_EQ_INT(te_memory_get_stats(te).allocated, before); /* that scope had all of them */
                te_no_grad_end(te); /* none is open */
                CHECK_ERROR(te, TE_ERR_STATE, "te_no_grad_end without te_no_grad_begin");
            }
    leaver l = {0, 1, 0, false}, *user = &l;
    te_tensor *x = te_tensor_full(te, TE_F32, SHAPE(3), 1), *y, *none = NULL;
    te_checkpoint_desc d = {.fn = leaves_open, .user = &user, .user_size = sizeof user, .inputs = &x, .num_inputs = 1, .outputs = &y, .num_outputs = 1};
    for (l.way = 0; l.way < LEAVE_WAYS; l.way++) {
        test_case("way %d", l.way);
        l.run = 0;
        te_autocast_begin(te, NULL);
        te_checkpoint(te, &d);
        CHECK_MSG(strstr(te_error(te), says[l.way]), "it says: %s", te_error(te));
        CHECK_ERROR(te, TE_ERR_STATE, "te_checkpoint: the function begins and ends regions of ");
        te_autocast_end(te);
    }
    d.inputs = &none;
    CHECK_EQ_INT(te_checkpoint(te, &d), TE_ERR_STATE);
    CHECK_ERROR(te, TE_ERR_STATE, "te_checkpoint: input 1 of 1 is NULL");
}

TE_TEST_DEVICES(checkpoints_that_change_their_mind) {
    for (int way = 0; way < 4; way++) {
        calls c = {0};
        te_tensor *out[2], *in[2];
        in[0] = te_tensor_set_requires_grad(te_tensor_normal(te, TE_BF16, SHAPE(4, 8), 0, 1), true);
        in[1] = te_tensor_normal(te, TE_BF16, SHAPE(4, 8), 0, 1);
        c.factor = te_tensor_set_name(te_tensor_set_requires_grad(te_tensor_normal(te, TE_BF16, SHAPE(8, 8), 0, 1), true), "factor");
        c.fail_at = way == 0 ? 1 : way == 1 ? 2 : 0;
        c.other_at = way == 2 ? 2 : 0;
        te_result result = run_some(te, true, &c, in, out);
        if (way == 0) {
            CHECK_EQ_INT(result, TE_ERR_IO);
            CHECK(out[0] == NULL && out[1] == NULL);
            CHECK_ERROR(te, TE_ERR_IO, "te_checkpoint: the function returned");
            continue;
        }
        CHECK_EQ_INT(result, TE_OK);
        if (way == 3) te_tensor_fill(c.factor, 1);
        CHECK(te_backward(te_mean_all(out[0])) != TE_OK);
        CHECK(te_tensor_grad(in[0]) == NULL && te_grad_enabled(te));
        if (way == 1) CHECK_ERROR(te, TE_ERR_IO, "te_checkpoint: the function returned");
        if (way == 2) {
            CHECK(strstr(te_error(te), "[1, 8]") != NULL);
            CHECK_ERROR(te, TE_ERR_STATE, "was bf16 [4, 8]");
        }
        if (way == 3) CHECK_ERROR(te, TE_ERR_STATE, "the parameter factor, bf16 [8, 8], was written after the forward pass");
    }
    te_checkpoint_desc d = {0};
    CHECK_EQ_INT(te_checkpoint(te, NULL), TE_ERR_INVALID);
    CHECK_ERROR(te, TE_ERR_INVALID, "desc is NULL");
    CHECK_EQ_INT(te_checkpoint(te, &d), TE_ERR_INVALID);
    CHECK_ERROR(te, TE_ERR_INVALID, "fn is NULL");
    d.fn = some_function;
    CHECK_EQ_INT(te_checkpoint(te, &d), TE_ERR_INVALID);
    CHECK_ERROR(te, TE_ERR_INVALID, "0 inputs and 0 outputs");
    CHECK_OK(te);
}

/* The gradient that an input has from before stays, wherever the backward pass fails: in the second run's record, or behind it. */
static te_result never_plays(te_ctx *te, const void *state, te_tensor *const *saved, te_tensor *const *dy, te_tensor **dx, const bool *needs) {
    return (void)te, (void)state, (void)saved, (void)dy, (void)dx, (void)needs, TE_ERR_IO;
}
static te_tensor *unplayable(te_ctx *te, te_tensor *x) {
    te_no_grad_begin(te);
    te_tensor *y = te_scale(x, 1);
    te_no_grad_end(te);
    te_node_desc d = {.name = "unplayable", .inputs = &x, .num_inputs = 1, .outputs = &y, .num_outputs = 1, .backward = never_plays};
    return te_record(te, &d) == TE_OK ? y : NULL;
}
static te_result twice(te_ctx *te, void *user, te_tensor *const *in, int n, te_tensor **out, int m) {
    (void)n, (void)m;
    out[0] = *(const int *)user ? te_add(te_scale(in[0], 2), unplayable(te, in[0])) : te_scale(in[0], 2);
    return te_error_code(te);
}
TE_TEST_DEVICES(checkpoints_that_fail_keep_gradients_from_before) {
    for (int inside = 0; inside < 2; inside++) {
        te_tensor *x = te_tensor_set_requires_grad(te_tensor_full(te, TE_F32, SHAPE(4), 1), true), *y = NULL;
        te_checkpoint_desc d = {.fn = twice, .user = &inside, .user_size = sizeof inside, .inputs = &x, .num_inputs = 1, .outputs = &y, .num_outputs = 1};
        test_case("inside %d", inside);
        CHECK_EQ_INT(te_backward(te_sum_all(te_scale(x, 5))), TE_OK);
        te_tensor *bad = inside ? x : unplayable(te, x); /* recorded before the checkpoint, so played after it */
        CHECK_EQ_INT(te_checkpoint(te, &d), TE_OK);
        CHECK_EQ_INT(te_backward(te_sum_all(te_add(bad, y))), TE_ERR_IO);
        te_clear_error(te);
        CHECK(te_tensor_grad(x) != NULL);
        if (te_tensor_grad(x)) CHECK(test_read(te_tensor_grad(x))[3] >= 5);
    }
    CHECK_OK(te);
}

/* A leaf that a second run has reached is forgotten as the others are, when the backward pass fails behind it. */
static te_result times_leaf(te_ctx *te, void *user, te_tensor *const *in, int n, te_tensor **out, int m) {
    (void)n, (void)m;
    out[0] = te_linear(in[0], *(te_tensor **)user, NULL);
    return te_error_code(te);
}
TE_TEST_DEVICES(checkpoints_before_a_failure_leave_no_gradients) {
    te_tensor *w = te_tensor_set_requires_grad(te_tensor_full(te, TE_F32, SHAPE(4, 4), 1), true), *x = te_tensor_set_requires_grad(te_tensor_full(te, TE_F32, SHAPE(2, 4), 1), true), *y;
    const te_checkpoint_desc d = {.fn = times_leaf, .user = &w, .inputs = &x, .num_inputs = 1, .outputs = &y, .num_outputs = 1};
    for (int before = 0; before < 2; before++) { /* is there a gradient already? Then it stays, and may have been added to */
        test_case("before %d", before);
        if (before) CHECK_EQ_INT(te_backward(te_sum_all(te_scale(w, 5))), TE_OK);
        te_tensor *bad = unplayable(te, x);
        CHECK_EQ_INT(te_checkpoint(te, &d), TE_OK);
        CHECK_EQ_INT(te_backward(te_sum_all(te_add(bad, y))), TE_ERR_IO);
        te_clear_error(te);
        CHECK(!te_tensor_grad(x) && (te_tensor_grad(w) != NULL) == before);
        if (te_tensor_grad(w)) CHECK(test_read(te_tensor_grad(w))[3] >= 5);
        CHECK_EQ_INT(te_checkpoint(te, &d), TE_OK);
        te_tensor_zero_grad(w);
        CHECK_EQ_INT(te_backward(te_sum_all(y)), TE_OK);
        CHECK(test_read(te_tensor_grad(w))[3] == 2);
        te_tensor_zero_grad(w);
        te_tensor_zero_grad(x);
    }
    CHECK_OK(te);
}

/* An output may be an input, or another output: the input stays what it was, and gradients count once. */
static te_result hand_on(te_ctx *te, void *user, te_tensor *const *in, int n, te_tensor **out, int m) {
    (void)user, (void)n, (void)m;
    out[0] = out[1] = te_scale(in[0], 2);
    out[2] = in[1];
    return te_error_code(te);
}
TE_TEST_DEVICES(checkpoints_that_hand_tensors_on) {
    te_tensor *x = te_tensor_set_requires_grad(te_tensor_full(te, TE_F32, SHAPE(4), 1), true), *given = te_tensor_full(te, TE_F32, SHAPE(4), 3), *in[2] = {x, given}, *out[3];
    for (int run = 0; run < 2; run++) {
        const te_checkpoint_desc d = {.fn = hand_on, .inputs = in, .num_inputs = 2, .outputs = out, .num_outputs = 3};
        test_case("run %d", run);
        CHECK_EQ_INT(te_checkpoint(te, &d), TE_OK);
        CHECK(!te_tensor_requires_grad(given));
        CHECK_EQ_INT(te_backward(te_sum_all(te_add(te_add(out[0], te_scale(out[1], 3)), te_add(out[2], given)))), TE_OK);
        REQUIRE_OK(te);
        CHECK(test_read(te_tensor_grad(x))[2] == 2 * (1 + 3));
        te_tensor_zero_grad(x);
    }
}

/* A module that its owner has destroyed stays until the backward pass has run it again. */
TE_TEST_DEVICES(checkpoints_hold_their_modules) {
    te_linear_desc d = {0};
    d.in_features = d.out_features = 16;
    for (int played = 0; played < 2; played++) {
        te_scope_begin(te);
        te_module *m = te_linear_create(te, &d);
        te_tensor *x = te_tensor_set_requires_grad(te_tensor_normal(te, TE_BF16, SHAPE(4, 16), 0, 1), true);
        te_module_set_checkpoint(m, true);
        te_tensor *y = te_forward(m, x);
        te_module_destroy(m);
        if (played) CHECK_EQ_INT(te_backward(te_mean_all(y)), TE_OK);
        CHECK(!played || te_tensor_grad(x) != NULL);
        te_scope_end(te);
    }
    CHECK_OK(te);
}

/* Twelve layers: a step keeps one layer's activations at a time, and the layers' inputs. */
TE_TEST_DEVICES(checkpoints_save_memory) {
    enum { LAYERS = 12, HIDDEN = 64 };
    const int64_t rows = test_samples() ? 16 : 128;
    te_transformer_layer_desc d = {0};
    te_module *layers[LAYERS];
    size_t peak[2];
    d.hidden_size = HIDDEN;
    d.ffn_hidden_size = 4 * HIDDEN;
    d.attention.num_attention_heads = 4;
    for (int i = 0; i < LAYERS; i++) layers[i] = te_transformer_layer_create(te, &d);
    for (int run = 0; run < 2; run++) {
        for (int i = 0; i < LAYERS; i++) te_module_set_checkpoint(layers[i], run == 1);
        te_scope_begin(te);
        te_tensor *x = te_tensor_normal(te, TE_BF16, SHAPE(rows, 2, HIDDEN), 0, 1);
        size_t before = te_memory_get_stats(te).allocated;
        te_memory_reset_peak(te);
        for (int i = 0; i < LAYERS; i++) x = te_forward(layers[i], x);
        peak[run] = te_memory_get_stats(te).peak_allocated - before; /* of the forward pass: the backward pass's gradients of parameters are the same in both */
        CHECK_EQ_INT(te_backward(te_mean_all(x)), TE_OK);
        te_scope_end(te);
        for (int i = 0; i < LAYERS; i++) te_module_zero_grad(layers[i]);
    }
    CHECK_MSG(peak[1] * 4 < peak[0], "%zu bytes with checkpoints, %zu without", peak[1], peak[0]);
    for (int i = 0; i < LAYERS; i++) te_module_destroy(layers[i]);
    CHECK_OK(te);
}

/* ---- delayed weight gradients ---- */

TE_TEST_DEVICES(delayed_weight_gradients_change_no_bit) {
    for (int i = test_samples() ? 2 : 0; i < COUNT(setups) && te_ok(te); i += test_every_odd(1)) {
        float losses[2][STEPS];
        uint64_t state[2][STEPS];
        for (int run = 0; run < 2; run++) {
            setup own = setups[i];
            trainer t;
            own.delay = run == 1;
            test_case("%s", own.name);
            open_trainer(&t, te, &own);
            for (int step = 0; step < num_steps(); step++) {
                feed(&t, step);
                train_step(&t);
                te_tensor_to_host(t.loss, &losses[run][step]);
                state[run][step] = state_of(&t);
            }
            close_trainer(&t);
        }
        CHECK_BYTES("losses", losses[1], losses[0], (size_t)num_steps() * sizeof(float));
        CHECK_BYTES("states", state[1], state[0], (size_t)num_steps() * sizeof(uint64_t));
    }
    CHECK_OK(te);
}

static te_module *delaying_linear(te_ctx *te) {
    te_linear_desc d = {0};
    d.in_features = d.out_features = 16;
    d.gemm.delay_wgrad_compute = true;
    return te_linear_create(te, &d);
}
TE_TEST_DEVICES(delayed_weight_gradients_wait) {
    te_module *m[2] = {delaying_linear(te), delaying_linear(te)}, *both = te_sequential_create(te, m, 2);
    te_tensor *x = te_tensor_normal(te, TE_BF16, SHAPE(4, 16), 0, 1), *first = te_module_parameter(m[0], "weight"), *second = te_module_parameter(m[1], "weight");
    te_fused_adam_desc d = {0};
    te_optimizer *adam = te_fused_adam_create(te, both, &d);
    CHECK_EQ_INT(te_backward(te_mean_all(te_forward(both, x))), TE_OK);
    CHECK(!te_tensor_grad(first) && !te_tensor_grad(second) && te_tensor_grad(te_module_parameter(m[0], "bias")));
    CHECK_EQ_INT(te_backward_dw(m[1]), TE_OK); /* that module's alone */
    CHECK(!te_tensor_grad(first) && te_tensor_grad(second));
    CHECK(strstr(test_log_text(), "te_backward_dw") == NULL);
    CHECK_EQ_INT(te_optimizer_step(adam), TE_OK);
    CHECK_STR(test_log_text(), "1 weight gradients wait for te_backward_dw");
    CHECK_EQ_INT(te_backward_dw(both), TE_OK);
    CHECK(te_tensor_grad(first) != NULL);
    te_tensor *kept = te_tensor_grad(first);
    CHECK_EQ_INT(te_backward_dw(both), TE_OK); /* nothing waits */
    CHECK(te_tensor_grad(first) == kept);
    /* the input is written before its turn */
    CHECK_EQ_INT(te_backward(te_mean_all(te_forward(both, x))), TE_OK);
    te_tensor_fill(x, 0);
    CHECK_EQ_INT(te_backward_dw(both), TE_ERR_STATE);
    CHECK_ERROR(te, TE_ERR_STATE, "te_backward_dw: the input of a linear layer was written after te_backward");
    CHECK_EQ_INT(te_backward_dw(NULL), TE_ERR_STATE);
    /* modules that go, before their backward pass and after it */
    te_tensor *y = te_forward(both, x);
    CHECK_EQ_INT(te_backward(te_mean_all(te_forward(both, x))), TE_OK);
    te_tensor_zero_grad(second);
    te_optimizer_destroy(adam);
    te_module_destroy(both);
    CHECK_EQ_INT(te_backward(te_mean_all(y)), TE_OK);
    CHECK_OK(te);
}
TE_TEST_DEVICES(delayed_weight_gradients_in_graphs) {
    te_module *m = delaying_linear(te);
    te_tensor *x = te_tensor_normal(te, TE_BF16, SHAPE(4, 16), 0, 1);
    te_forward(m, x);
    CHECK_EQ_INT(te_graph_begin(te), TE_OK);
    CHECK_EQ_INT(te_backward(te_mean_all(te_forward(m, x))), TE_OK);
    CHECK(te_graph_end(te) == NULL);
    CHECK_ERROR(te, TE_ERR_STATE, "1 weight gradients of the capture wait for te_backward_dw");
    CHECK_EQ_INT(te_backward(te_mean_all(te_forward(m, x))), TE_OK);
    CHECK_EQ_INT(te_graph_begin(te), TE_OK);
    CHECK_EQ_INT(te_backward_dw(m), TE_ERR_STATE);
    te_graph_destroy(te_graph_end(te));
    CHECK_ERROR(te, TE_ERR_STATE, "te_backward_dw inside a graph, and te_backward was called outside of it");
    te_module_destroy(m);
    CHECK_OK(te);
}
