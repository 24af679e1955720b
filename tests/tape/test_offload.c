/* CPU offload: losses, gradients, scales and states are, bit for bit, those without it; memory, counted; tensors that share memory; refusals. */
#include "../trainer.h"

/* ---- training ---- */

static te_memory_stats train(te_ctx *te, const setup *is, const te_cpu_offload_desc *offload, bool checkpoint, float losses[STEPS], uint64_t state[STEPS]) {
    trainer t;
    open_trainer(&t, te, is);
    t.offload = offload;
    te_module_set_checkpoint(te_module_find(t.gpt, "layer.layernorm_mlp"), checkpoint);
    for (int step = 0; step < num_steps(); step++) {
        feed(&t, step);
        train_step(&t);
        te_tensor_to_host(t.loss, &losses[step]);
        state[step] = state_of(&t);
    }
    close_trainer(&t);
    return te_memory_get_stats(te);
}
TE_TEST_DEVICES(offload_changes_no_bit) {
    static const te_cpu_offload_desc ways[] = {
        {0, 1, 1},       /* nothing stays on the device */
        {0, 1, 0},       /* the largest two do */
        {0.4f, 1, 3000}, /* some leave */
        {0, 1000, 20000},
    };
    for (int i = test_every_sanitized(3) - 1; i < COUNT(setups) && te_ok(te); i += test_every_sanitized(3)) { /* with a sanitizer those that checkpoints leave out */
        float want[STEPS], got[STEPS];
        uint64_t want_state[STEPS], state[STEPS];
        train(te, &setups[i], NULL, false, want, want_state);
        for (int way = 0; way < COUNT(ways) + 1; way++) {
            te_memory_stats before = te_memory_get_stats(te), after;
            bool checkpoint = way == COUNT(ways);
            test_case("%s, way %d", setups[i].name, way);
            after = train(te, &setups[i], &ways[checkpoint ? 0 : way], checkpoint, got, state);
            CHECK_OK(te);
            CHECK_BYTES("losses", got, want, (size_t)num_steps() * sizeof(float));
            CHECK_BYTES("states", state, want_state, (size_t)num_steps() * sizeof(uint64_t));
            CHECK(after.copied_out > before.copied_out && after.offloaded == 0);
            CHECK(after.copied_in - before.copied_in <= after.copied_out - before.copied_out);
            if (way == 0) CHECK(after.copied_in > before.copied_in);
        }
    }
}

/* ---- memory ---- */

enum { DEPTH = 8, BYTES = 4096 * 4 };

/* DEPTH times gelu(1.5 x): each saves its input, which nobody else holds. */
static te_result gelus_forward(te_module *self, te_forward_args *args) {
    te_tensor *x = args->input;
    (void)self;
    for (int i = 0; i < DEPTH; i++) x = te_activate(te_scale(x, 1.5f), TE_GELU, NULL);
    args->outputs.out = x;
    return te_error_code(te_module_ctx(self));
}
static te_module *gelus_create(te_ctx *te) {
    static const te_module_class cls = {"Gelus", 0, gelus_forward, NULL, NULL};
    return te_module_create(te, &cls, "gelus");
}
static te_tensor *leaf(te_ctx *te) { return te_tensor_set_requires_grad(te_tensor_normal(te, TE_F32, SHAPE(4, 1024), 0, 1), true); }

TE_TEST_DEVICES(offload_saves_memory) {
    te_module *m = gelus_create(te);
    te_tensor *x = leaf(te);
    float *want = NULL;
    size_t held[2], pinned = 0;
    for (int run = 0; run < 4; run++) { /* without; with everything out, three times */
        te_cpu_offload_desc all = {.min_bytes = 1, .window_bytes = BYTES};
        te_memory_stats before, between, after;
        te_tensor_zero_grad(x);
        te_scope_begin(te);
        before = te_memory_get_stats(te);
        if (run) CHECK_EQ_INT(te_cpu_offload_begin(te, &all), TE_OK);
        te_tensor *y = te_forward(m, x);
        if (run) CHECK_EQ_INT(te_cpu_offload_end(te), TE_OK);
        between = te_memory_get_stats(te);
        held[run > 0] = between.allocated - before.allocated;
        CHECK_EQ_INT(between.offloaded, run ? DEPTH * BYTES : 0);
        te_memory_reset_peak(te);
        CHECK_EQ_INT(te_backward(te_sum_all(y)), TE_OK);
        after = te_memory_get_stats(te);
        CHECK_EQ_INT(after.offloaded, 0);
        CHECK_EQ_INT(after.copied_out - before.copied_out, run ? DEPTH * BYTES : 0);
        CHECK_EQ_INT(after.copied_in - before.copied_in, run ? (DEPTH - 1) * BYTES : 0); /* the window's never left */
        if (run > 1) CHECK_EQ_INT(after.pinned, pinned);                                 /* blocks are used again */
        pinned = after.pinned;
        if (run) CHECK(after.peak_allocated < between.allocated + 8 * BYTES); /* one at a time comes back */
        if (run) CHECK_TENSOR(te_tensor_grad(x), want, 0, 0);
        else want = test_read(te_tensor_grad(x));
        te_scope_end(te);
    }
    CHECK_EQ_INT(held[0], (DEPTH + 1) * BYTES);
    CHECK_EQ_INT(held[1], 2 * BYTES); /* the output, and the window */
    CHECK(pinned >= DEPTH * BYTES);
    te_memory_trim(te);
    CHECK_EQ_INT(te_memory_get_stats(te).pinned, 0);
    te_module_destroy(m);
    CHECK_OK(te);
}

/* A share of the bytes goes out, spread over the region; small tensors stay. */
TE_TEST_DEVICES(offload_of_a_fraction) {
    te_module *m = gelus_create(te);
    te_tensor *x = leaf(te);
    static const struct { float fraction; int64_t least; int want; } rows[] = {
        {0.25f, 1, 2}, {0.5f, 1, 4}, {0.99f, 1, 7}, {1, BYTES, 8}, {0, BYTES + 1, 0}, {0, 0, 0},
    };
    for (int i = 0; i < COUNT(rows); i++) {
        te_cpu_offload_desc d = {.fraction = rows[i].fraction, .min_bytes = rows[i].least};
        te_scope_begin(te);
        CHECK_EQ_INT(te_cpu_offload_begin(te, &d), TE_OK);
        te_tensor *y = te_forward(m, x);
        CHECK_EQ_INT(te_cpu_offload_end(te), TE_OK);
        CHECK_MSG(te_memory_get_stats(te).offloaded == (size_t)(rows[i].want * BYTES), "row %d: %zu bytes are out", i, te_memory_get_stats(te).offloaded);
        if (i % 2) te_backward(te_sum_all(y));
        te_scope_end(te); /* or the record is forgotten */
        CHECK_EQ_INT(te_memory_get_stats(te).offloaded, 0);
    }
    te_module_destroy(m);
    CHECK_OK(te);
}

/* ---- tensors that share memory, and memory that others hold ---- */

/* h, whose memory three nodes save: two by its halves, one whole. */
typedef struct shared {
    te_tensor *h, *loss;
} shared;
static shared share(te_tensor *x, te_tensor *weight) {
    shared s;
    s.h = te_scale(x, 2);
    te_tensor *halves = te_add(te_activate(te_tensor_narrow(s.h, 0, 0, 2), TE_GELU, NULL), te_activate(te_tensor_narrow(s.h, 0, 2, 2), TE_SILU, NULL));
    s.loss = te_add(te_sum_all(halves), te_sum_all(te_linear(te_tensor_view(s.h, SHAPE(64, 64)), weight, NULL)));
    return s;
}
TE_TEST_DEVICES(offload_of_shared_memory) {
    te_tensor *x = leaf(te), *weight = te_tensor_set_requires_grad(te_tensor_normal(te, TE_F32, SHAPE(3, 64), 0, 1), true);
    float *want = NULL, *want_weight = NULL;
    for (int run = 0; run < 4; run++) { /* without; h is held; h is let go; h is held, and written before the backward pass */
        te_cpu_offload_desc all = {0, BYTES, 1};
        te_memory_stats before = te_memory_get_stats(te), after;
        shared s;
        te_tensor_zero_grad(x);
        te_tensor_zero_grad(weight);
        te_scope_begin(te);
        if (run) te_cpu_offload_begin(te, &all);
        s = share(x, weight);
        if (run) te_cpu_offload_end(te);
        CHECK_EQ_INT(te_memory_get_stats(te).copied_out - before.copied_out, run ? BYTES : 0);
        if (run == 3) te_tensor_fill(s.h, 7); /* what has been saved is safe */
        CHECK_EQ_INT(te_backward(s.loss), TE_OK);
        after = te_memory_get_stats(te);
        CHECK_EQ_INT(after.copied_in - before.copied_in, run == 3 ? BYTES : 0);
        if (run) {
            CHECK_TENSOR(te_tensor_grad(x), want, 0, 0);
            CHECK_TENSOR(te_tensor_grad(weight), want_weight, 0, 0);
        } else {
            want = test_read(te_tensor_grad(x));
            want_weight = test_read(te_tensor_grad(weight));
        }
        if (run == 3) CHECK(test_read(s.h)[0] == 7);
        te_scope_end(te);
    }
    CHECK_OK(te);
}

/* Several records, played in another order than that of their recording. */
/* One half of a buffer is saved and copied out; then the other half is written and saved. The buffer is copied out again, while the first copy's entry still holds its
 * device memory. */
static void halves(te_ctx *te, const te_cpu_offload_desc *offload, float out[3 * BYTES / 4]) {
    int64_t n = BYTES / 4;
    te_scope_begin(te);
    te_tensor *x = te_tensor_set_requires_grad(test_tensor(te, TE_F32, SHAPE(2, n), test_normal(2 * n, 7)), true), *other = test_tensor(te, TE_F32, SHAPE(1, n), test_normal(n, 8));
    if (offload) te_cpu_offload_begin(te, offload);
    te_tensor *y = te_scale(x, 2.0f), *first = te_activate(te_tensor_narrow(y, 0, 0, 1), TE_GELU, NULL);
    te_no_grad_begin(te);
    te_tensor_copy(te_tensor_narrow(y, 0, 1, 1), other);
    te_no_grad_end(te);
    te_tensor *second = te_activate(te_tensor_narrow(y, 0, 1, 1), TE_GELU, NULL);
    if (offload) te_cpu_offload_end(te);
    te_backward(te_sum_all(te_add(first, second)));
    te_tensor_to_host(te_add(first, second), out);
    te_tensor_to_host(te_tensor_grad(x), out + n);
    te_scope_end(te);
}
TE_TEST_DEVICES(offload_of_a_buffer_written_between_two_nodes) {
    static const te_cpu_offload_desc ways[] = {{0, 1, 1}, {0, 1, 0}, {0, 1, 1 << 30}};
    static float want[3 * BYTES / 4], got[3 * BYTES / 4]; /* the output [n], the gradient [2, n] */
    halves(te, NULL, want);
    CHECK_OK(te);
    for (int way = 0; way < COUNT(ways); way++) {
        te_memory_stats before = te_memory_get_stats(te), after;
        test_case("way %d", way);
        memset(got, 0, sizeof got);
        halves(te, &ways[way], got);
        after = te_memory_get_stats(te);
        CHECK_OK(te);
        CHECK_BYTES("output and gradient", got, want, sizeof want);
        CHECK(after.offloaded == 0 && after.allocated == before.allocated && after.copied_out > before.copied_out);
    }
}

TE_TEST_DEVICES(offload_out_of_order) {
    te_module *m = gelus_create(te);
    te_tensor *x[3], *y[3];
    float *want[3] = {NULL, NULL, NULL};
    for (int i = 0; i < 3; i++) x[i] = leaf(te);
    for (int run = 0; run < 2; run++) {
        static const int order[3] = {0, 2, 1};
        te_cpu_offload_desc all = {0, 1, 3 * BYTES};
        if (run) te_cpu_offload_begin(te, &all);
        for (int i = 0; i < 3; i++) y[i] = te_forward(m, x[i]);
        if (run) te_cpu_offload_end(te);
        for (int i = 0; i < 3; i++) {
            CHECK_EQ_INT(te_backward(te_sum_all(y[order[i]])), TE_OK);
            if (run) CHECK_TENSOR(te_tensor_grad(x[order[i]]), want[order[i]], 0, 0);
            else want[order[i]] = test_read(te_tensor_grad(x[order[i]]));
            te_tensor_zero_grad(x[order[i]]);
        }
    }
    CHECK_EQ_INT(te_memory_get_stats(te).offloaded, 0);
    te_module_destroy(m);
    CHECK_OK(te);
}

/* A copy out that no backward pass has waited for does not keep a graph from writing the memory. */
TE_TEST_DEVICES(offload_before_a_graph) {
    const te_cpu_offload_desc all = {.min_bytes = 1};
    te_tensor *h = te_scale(leaf(te), 1.5f);
    te_scope_begin(te);
    CHECK_EQ_INT(te_cpu_offload_begin(te, &all), TE_OK);
    te_activate(h, TE_GELU, NULL);
    CHECK(te_memory_get_stats(te).copied_out > 0);
    CHECK_EQ_INT(te_cpu_offload_end(te), TE_OK);
    te_scope_end(te);
    CHECK_EQ_INT(te_graph_begin(te), TE_OK);
    te_tensor_fill(h, 2);
    te_graph *g = te_graph_end(te);
    CHECK_MSG(g != NULL, "no graph: %s", te_error(te));
    CHECK_EQ_INT(te_graph_launch(g), TE_OK);
    CHECK(test_read(h)[7] == 2);
    te_graph_destroy(g);
    CHECK_OK(te);
}

/* ---- refusals ---- */

static void *keep(void *user, te_tensor *x) {
    (void)user, (void)x;
    return NULL;
}
static te_tensor *never(void *user, void *handle) {
    (void)user, (void)handle;
    return NULL;
}
TE_TEST_DEVICES(offload_refusals) {
    static const struct { te_cpu_offload_desc desc; const char *text; } wrong[] = {
        {{-0.5f, 0, 0}, "fraction is -0.5"}, {{1.5f, 0, 0}, "fraction is 1.5"}, {{NAN, 0, 0}, "0 (all) to 1"}, {{0, -1, 0}, "min_bytes is -1"}, {{0, 0, -8}, "window_bytes -8"},
    };
    te_saved_tensors_hooks hooks = {keep, never, NULL, NULL};
    te_tensor *x = leaf(te);
    for (int i = 0; i < COUNT(wrong); i++) {
        CHECK_EQ_INT(te_cpu_offload_begin(te, &wrong[i].desc), TE_ERR_INVALID);
        CHECK_ERROR(te, TE_ERR_INVALID, wrong[i].text);
    }
    CHECK_EQ_INT(te_cpu_offload_end(te), TE_ERR_STATE);
    CHECK_ERROR(te, TE_ERR_STATE, "no te_cpu_offload_begin");
    CHECK_EQ_INT(te_cpu_offload_begin(te, NULL), TE_OK);
    CHECK_EQ_INT(te_saved_tensors_begin(te, &hooks), TE_OK);
    CHECK_EQ_INT(te_cpu_offload_end(te), TE_ERR_STATE);
    CHECK_ERROR(te, TE_ERR_STATE, "te_saved_tensors_begin: end it first");
    CHECK_EQ_INT(te_saved_tensors_end(te), TE_OK);
    CHECK_EQ_INT(te_cpu_offload_end(te), TE_OK);
    CHECK(te_cpu_offload_begin(NULL, NULL) == TE_ERR_STATE && te_cpu_offload_end(NULL) == TE_ERR_STATE);

    /* a capture, inside the region and around it: one error, and no graph */
    te_cpu_offload_desc all = {0, 1, 0};
    te_module *m = gelus_create(te);
    for (int way = 0; way < 2; way++) {
        if (way) te_cpu_offload_begin(te, &all);
        CHECK_EQ_INT(te_graph_begin(te), TE_OK);
        if (!way) te_cpu_offload_begin(te, &all);
        te_forward(m, x);
        CHECK(!te_graph_end(te));
        CHECK_ERROR(te, TE_ERR_STATE, "end the offload before te_graph_begin");
        if (way) te_cpu_offload_end(te);
        CHECK_OK(te);
    }

    /* a context that ends while activations are out takes them with it */
    te_ctx_desc desc = {0};
    desc.device = te_ctx_device(te);
    te_ctx *other = te_ctx_create(&desc);
    te_module *n = gelus_create(other);
    te_cpu_offload_begin(other, &all);
    te_forward(n, leaf(other));
    CHECK(te_memory_get_stats(other).offloaded > 0);
    te_module_destroy(n);
    te_ctx_destroy(other);
    te_module_destroy(m);
    CHECK_OK(te);
}
