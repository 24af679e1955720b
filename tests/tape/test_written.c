/* tests/tape/test_written.c: a backward pass reads the values of its forward pass: what was written in between is refused; a refused pass can be done again. */
#include "../faults/purse.h"
#include "leaf.h"

static te_module *small_linear(te_ctx *te, te_dtype dtype, int in, int out) {
    te_linear_desc d = {0};
    d.in_features = in;
    d.out_features = out;
    d.gemm.params_dtype = dtype;
    return te_linear_create(te, &d);
}

TE_TEST_DEVICES(a_parameter_written_before_backward_is_refused) {
    te_module *m = small_linear(te, TE_F32, 8, 4);
    te_tensor *x = leaf(te, SHAPE(3, 8), 1), *w = te_module_parameter(m, "weight");
    te_tensor *y = te_forward(m, x);
    te_tensor_fill(w, 5);
    CHECK_EQ_INT(te_backward(te_sum_all(y)), TE_ERR_STATE);
    CHECK_STR(te_error(te), "linear: "); /* where: the module, and the operation */
    CHECK_STR(te_error(te), "\"weight\"");
    CHECK_STR(te_error(te), "[4, 8]");
    CHECK_ERROR(te, TE_ERR_STATE, "was written after the forward pass");
    CHECK(te_tensor_grad(x) == NULL && te_tensor_grad(w) == NULL);
    CHECK_EQ_INT(te_backward(te_sum_all(te_forward(m, x))), TE_OK); /* the way out */
    const float *dx = te_tensor_grad(x) ? test_read(te_tensor_grad(x)) : test_normal(24, 1);
    for (int i = 0; i < 24; i++) CHECK(dx[i] == 20); /* four rows of fives */
    te_module_destroy(m);
    CHECK_OK(te);
}

/* Two losses, and a step of the optimizer after the first one: the second backward would go through other weights. */
TE_TEST_DEVICES(a_step_between_two_backward_passes_is_refused) {
    te_module *m = small_linear(te, TE_BF16, 16, 16);
    te_fused_adam_desc d = {0};
    te_optimizer *adam = te_fused_adam_create(te, m, &d);
    te_tensor *x = te_tensor_set_requires_grad(te_tensor_normal(te, TE_BF16, SHAPE(4, 16), 0, 1), true);
    te_tensor *first = te_mean_all(te_forward(m, x)), *second = te_mean_all(te_forward(m, x));
    CHECK_EQ_INT(te_backward(first), TE_OK);
    CHECK_EQ_INT(te_optimizer_step(adam), TE_OK);
    CHECK_EQ_INT(te_backward(second), TE_ERR_STATE);
    CHECK_ERROR(te, TE_ERR_STATE, "\"weight\"");
    CHECK_EQ_INT(te_backward(te_mean_all(te_forward(m, x))), TE_OK);
    CHECK_EQ_INT(te_optimizer_step(adam), TE_OK);
    te_optimizer_destroy(adam);
    te_module_destroy(m);
    CHECK_OK(te);
}

TE_TEST_DEVICES(an_activation_written_before_backward_is_refused) {
    for (int how = 0; how < 6; how++) {
        te_tensor *x = leaf(te, SHAPE(2, 8), 1), *h = te_tensor_set_name(te_scale(x, 2), "hidden");
        te_tensor *gamma = te_tensor_full(te, TE_F32, SHAPE(8), 1), *loss;
        const int64_t ids[2] = {1, 2};
        te_tensor *target = te_tensor_set_name(test_i32(te, SHAPE(2), ids), "hidden");
        loss = how == 0   ? te_sum_all(te_activate(h, TE_GELU, NULL))
               : how == 1 ? te_sum_all(te_rmsnorm(h, gamma, 0, false))
               : how == 2 ? te_mse_loss(h, te_tensor_zeros(te, TE_F32, SHAPE(2, 8)))
               : how == 3 ? te_sum_all(te_attention(te_tensor_set_name(te_tensor_view(h, SHAPE(2, 1, 2, 4)), "hidden"), te_tensor_view(h, SHAPE(2, 1, 2, 4)),
                                                    te_tensor_view(h, SHAPE(2, 1, 2, 4)), NULL))
               : how == 4 ? te_cross_entropy(h, test_i32(te, SHAPE(2), ids), NULL)
                          : te_cross_entropy(h, target, NULL);
        test_case("function %d", how);
        if (how == 5) te_tensor_copy(target, test_i32(te, SHAPE(2), ids)); /* the same values: a write is a write */
        else te_tensor_fill(h, 3);
        CHECK_EQ_INT(te_backward(loss), TE_ERR_STATE);
        CHECK_ERROR(te, TE_ERR_STATE, "\"hidden\"");
        CHECK(te_tensor_grad(x) == NULL);
    }
    /* A tensor that no backward pass reads may be written. */
    te_tensor *x = leaf(te, SHAPE(4), 1), *h = te_scale(x, 2), *y = te_add(h, x);
    te_tensor_fill(h, 0);
    CHECK_EQ_INT(te_backward(te_sum_all(y)), TE_OK);
    const float three[4] = {3, 3, 3, 3};
    CHECK_TENSOR(te_tensor_grad(x), three, 0, 0);
    CHECK_OK(te);
}

/* y = a saved tensor times its gradient's only element; counts its runs. */
static te_result times_backward(te_ctx *te, const void *state, te_tensor *const *saved, te_tensor *const *dy, te_tensor **dx, const bool *needs) {
    (void)dy, (void)needs;
    ++**(int *const *)state;
    dx[0] = te_scale(saved[0], 1);
    return te_error_code(te);
}
static te_tensor *times(te_ctx *te, te_tensor *x, te_tensor *factor, int *runs) {
    te_tensor *y = te_tensor_zeros(te, TE_F32, SHAPE(1)), *none = NULL, *saved[2];
    saved[0] = factor;
    saved[1] = none;
    te_node_desc d = {"times", &x, 1, &y, 1, saved, 2, &runs, sizeof runs, times_backward, NULL};
    return te_record(te, &d) == TE_OK ? y : NULL;
}

TE_TEST_DEVICES(what_a_node_of_ones_own_saves_is_watched) {
    int runs = 0;
    te_tensor *x = leaf(te, SHAPE(4), 1), *factor = test_tensor(te, TE_F32, SHAPE(4), test_normal(4, 2));
    te_tensor *y = times(te, x, factor, &runs);
    te_tensor_touch(factor); /* somebody outside of te.h wrote it */
    CHECK_EQ_INT(te_backward(y), TE_ERR_STATE);
    CHECK_STR(te_error(te), "f32 [4]");
    CHECK_ERROR(te, TE_ERR_STATE, "times: its saved tensor 1 of 2");
    CHECK_EQ_INT(runs, 0);
    CHECK_EQ_INT(te_backward(times(te, x, factor, &runs)), TE_OK);
    CHECK_EQ_INT(runs, 1);
    /* Written through a view, and through the tensor that it is a view of. */
    te_tensor *part = te_tensor_view(te_tensor_detach(factor), SHAPE(2, 2));
    y = times(te, x, factor, &runs);
    te_tensor_fill(part, 1);
    CHECK_EQ_INT(te_backward(y), TE_ERR_STATE);
    CHECK_ERROR(te, TE_ERR_STATE, "times");
    CHECK_EQ_INT(runs, 1);
    CHECK_OK(te);
}

/* Nodes that look at parts of one buffer, as a cache of keys does: only writes to the part count. */
TE_TEST_DEVICES(writes_elsewhere_in_the_same_buffer_do_not_count) {
    enum { PARTS = 40, WIDTH = 4 };
    int runs = 0;
    te_tensor *cache = te_tensor_zeros(te, TE_F32, SHAPE(PARTS, WIDTH)), *x = leaf(te, SHAPE(WIDTH), 1), *y = NULL;
    for (int i = 0; i < PARTS; i++) {
        te_tensor *row = te_tensor_view(te_tensor_narrow(cache, 0, i, 1), SHAPE(WIDTH));
        for (int k = 0; k < 3; k++) te_tensor_fill(row, i + 1);
        te_tensor *term = times(te, x, row, &runs);
        y = y ? te_add(y, term) : term;
    }
    CHECK_EQ_INT(te_backward(y), TE_OK);
    const float *got = te_tensor_grad(x) ? test_read(te_tensor_grad(x)) : test_normal(WIDTH, 1);
    for (int i = 0; i < WIDTH; i++) CHECK(got[i] == PARTS * (PARTS + 1) / 2);
    CHECK_EQ_INT(runs, PARTS);
    for (int written = 2; written <= 4; written++) { /* rows 3 .. 3 are saved */
        te_tensor_zero_grad(x);
        y = times(te, x, te_tensor_view(te_tensor_narrow(cache, 0, 3, 1), SHAPE(WIDTH)), &runs);
        for (int i = 0; i < 5000; i++) te_tensor_fill(te_tensor_narrow(cache, 0, written == 2 ? i % 2 : written == 4 ? 4 + i % 2 : 3, 1), 1);
        test_case("row %d is written", written);
        CHECK_EQ_INT(te_backward(y), written == 3 ? TE_ERR_STATE : TE_OK);
        if (written == 3) CHECK_ERROR(te, TE_ERR_STATE, "times");
    }
    y = times(te, x, te_tensor_view(te_tensor_narrow(cache, 0, 3, 1), SHAPE(WIDTH)), &runs);
    te_tensor_fill(cache, 0); /* the whole */
    CHECK_EQ_INT(te_backward(y), TE_ERR_STATE);
    CHECK_ERROR(te, TE_ERR_STATE, "times");
    CHECK_OK(te);
}

/* One Linear under a recipe, with or without a write to its weight between forward and backward: the bytes of both gradients. */
static void run_written(te_ctx *te, te_module *m, const te_recipe *recipe, bool write, float **dx, float **dw) {
    te_tensor *x = te_tensor_set_requires_grad(te_tensor_from_f32(te, TE_BF16, SHAPE(32, 32), test_normal(1024, 3)), true);
    te_tensor *w = te_module_parameter(m, "weight"), *value = te_tensor_from_f32(te, TE_BF16, SHAPE(32, 32), test_normal(1024, 4));
    te_module_zero_grad(m);
    te_tensor_copy(w, value);
    te_tensor *y = test_forward(m, recipe, x);
    if (write) te_tensor_fill(w, 1);
    CHECK_EQ_INT(te_backward(te_mean_all(y)), TE_OK);
    *dx = test_read(te_tensor_grad(x));
    *dw = test_read(te_tensor_grad(w));
}
/* The quantized copy is the forward's own: it does not change with its source, so its gradients are right. */
TE_TEST_DEVICES(a_quantized_copy_outlives_a_write_to_its_source) {
    te_recipe recipe = te_recipe_current_scaling();
    te_module *m = small_linear(te, TE_BF16, 32, 32);
    float *dx[2], *dw[2];
    for (int i = 0; i < 2; i++) run_written(te, m, &recipe, i == 1, &dx[i], &dw[i]);
    CHECK_BYTES("dx", dx[1], dx[0], 1024 * sizeof(float));
    CHECK_BYTES("dw", dw[1], dw[0], 1024 * sizeof(float));
    te_module_destroy(m);
    CHECK_OK(te);
}
TE_TEST_DEVICES(a_weight_stored_quantized_is_watched) {
    te_recipe recipes[4] = {te_recipe_current_scaling(), te_recipe_delayed_scaling(), te_recipe_mxfp8(), te_recipe_block_scaling()};
    for (int i = 0; i < 4; i++) {
        te_quantized_model_init_desc stored = {0};
        te_autocast_desc cast = {0};
        te_fused_adam_desc d = {0};
        stored.recipe = cast.recipe = &recipes[i];
        te_quantized_model_init_begin(te, &stored);
        te_module *m = small_linear(te, TE_BF16, 128, 128);
        te_quantized_model_init_end(te);
        te_optimizer *adam = te_fused_adam_create(te, m, &d);
        te_tensor *x = te_tensor_set_requires_grad(te_tensor_normal(te, TE_BF16, SHAPE(128, 128), 0, 1), true), *y[2];
        REQUIRE_OK(te);
        for (int k = 0; k < 2; k++) {
            te_autocast_begin(te, &cast);
            y[k] = te_mean_all(te_forward(m, x));
            te_autocast_end(te);
        }
        test_case("recipe %d", i);
        CHECK_EQ_INT(te_backward(y[0]), TE_OK);
        CHECK_EQ_INT(te_optimizer_step(adam), TE_OK);
        CHECK_EQ_INT(te_backward(y[1]), TE_ERR_STATE);
        CHECK_ERROR(te, TE_ERR_STATE, "\"weight\"");
        te_optimizer_destroy(adam);
        te_module_destroy(m);
    }
    CHECK_OK(te);
}

/* Parameters whose values the backward pass has no use for may change; gradients are those of an undisturbed run. */
TE_TEST_DEVICES(what_backward_does_not_read_may_be_written) {
    te_module *m = small_linear(te, TE_F32, 8, 4);
    te_embedding_desc d = {0};
    d.num_embeddings = 6;
    d.embedding_dim = 8;
    d.params_dtype = TE_F32;
    te_module *table = te_embedding_create(te, &d);
    const int64_t ids[3] = {1, 5, 1};
    float *dw[2], *dt[2];
    for (int i = 0; i < 2; i++) {
        te_tensor *x = test_tensor(te, TE_F32, SHAPE(3, 8), test_normal(24, 1)); /* needs no gradient, so the weight is not read again */
        te_module_zero_grad(m);
        te_module_zero_grad(table);
        te_tensor *y = te_forward(m, x), *e = te_forward(table, test_i32(te, SHAPE(3), ids));
        if (i) te_tensor_fill(te_module_parameter(m, "weight"), 9), te_tensor_fill(te_module_parameter(table, "weight"), 9);
        CHECK_EQ_INT(te_backward(te_sum_all(y)), TE_OK);
        CHECK_EQ_INT(te_backward(te_sum_all(e)), TE_OK);
        REQUIRE_OK(te);
        dw[i] = test_read(te_tensor_grad(te_module_parameter(m, "weight")));
        dt[i] = test_read(te_tensor_grad(te_module_parameter(table, "weight")));
    }
    CHECK_BYTES("linear", dw[1], dw[0], 32 * sizeof(float));
    CHECK_BYTES("embedding", dt[1], dt[0], 48 * sizeof(float));
    te_module_destroy(m);
    te_module_destroy(table);
    CHECK_OK(te);
}

/* Launches of a graph write what it holds, and what it has made. */
TE_TEST_DEVICES(launches_of_a_graph_are_writes) {
    int runs = 0;
    te_tensor *x = leaf(te, SHAPE(4), 1), *input = te_tensor_full(te, TE_F32, SHAPE(4), 2), *held = te_tensor_zeros(te, TE_F32, SHAPE(4)), *made, *y;
    te_tensor_copy(held, te_scale(input, 3));
    if (te_graph_begin(te) != TE_OK) {
        CHECK_ERROR(te, TE_ERR_LIBRARY, "graph");
        SKIP("this driver has no graphs");
    }
    made = te_scale(input, 3);
    te_tensor_copy(held, made);
    te_tensor *inside = times(te, x, made, &runs); /* recorded in the capture, played after a launch: it reads what that has written */
    te_graph *graph = te_graph_end(te);
    REQUIRE_OK(te);
    CHECK_EQ_INT(te_graph_launch(graph), TE_OK);
    CHECK_EQ_INT(te_backward(inside), TE_OK);
    for (int k = 0; k < 2; k++) {
        y = times(te, x, k ? held : made, &runs);
        CHECK_EQ_INT(te_graph_launch(graph), TE_OK);
        CHECK_EQ_INT(te_backward(y), TE_ERR_STATE);
        CHECK_ERROR(te, TE_ERR_STATE, "times");
        CHECK_EQ_INT(te_backward(times(te, x, k ? held : made, &runs)), TE_OK);
    }
    te_tensor_zero_grad(x);
    te_graph_destroy(graph);
    CHECK_OK(te);
}

/* A refused pass leaves nothing behind: no gradients half gathered, none on their way that the next pass would carry on. */
TE_TEST_DEVICES(a_refused_pass_can_be_done_again) {
    int runs = 0;
    te_tensor *x = leaf(te, SHAPE(4), 1), *late = leaf(te, SHAPE(4), 2), *factor = test_tensor(te, TE_F32, SHAPE(4), test_normal(4, 3)), *y;
    te_tensor *h = te_scale(x, 2);
    y = te_add(te_mse_loss(h, te_tensor_zeros(te, TE_F32, SHAPE(4))), times(te, te_add(h, late), factor, &runs));
    y = te_add(y, te_sum_all(late)); /* played first: late has a gradient when the next node is refused */
    te_tensor_fill(factor, 1);
    size_t before = te_memory_get_stats(te).allocated;
    CHECK_EQ_INT(te_backward(y), TE_ERR_STATE);
    CHECK_ERROR(te, TE_ERR_STATE, "times");
    CHECK(te_tensor_grad(x) == NULL && te_tensor_grad(late) == NULL);
    CHECK(te_memory_get_stats(te).allocated <= before);
    CHECK_EQ_INT(te_backward(te_add(te_scale(te_sum_all(x), 3), te_sum_all(late))), TE_OK);
    const float three[4] = {3, 3, 3, 3}, one[4] = {1, 1, 1, 1};
    CHECK_TENSOR(te_tensor_grad(x), three, 0, 0);
    CHECK_TENSOR(te_tensor_grad(late), one, 0, 0);
    CHECK_OK(te);
}

/* Every request for memory of a backward pass fails once: the pass done again gives what an undisturbed one gives. */
TE_TEST(a_pass_without_memory_can_be_done_again) {
    for (int device = 0; device < 2; device++) {
        bool whole = false;
        for (int k = 1; !whole && k < 200; k++) {
            purse *host = new_purse(), *memory = new_purse(), *p = device ? memory : host;
            te_ctx_desc desc = purse_desc(host, memory);
            int runs = 0;
            test_case("request %d of the %s", k, device ? "device" : "host");
            te_ctx *te = te_ctx_create(&desc);
            te_scope_begin(te);
            te_tensor *a = leaf(te, SHAPE(4), 1), *b = leaf(te, SHAPE(4), 2), *factor = te_tensor_full(te, TE_F32, SHAPE(4), 4);
            te_result result = TE_ERR_STATE;
            for (int again = 0; again < 2 && result != TE_OK; again++) {
                te_tensor *y = te_add(te_add(times(te, a, factor, &runs), times(te, te_scale(te_add(a, b), 1), te_scale(factor, 1.5f), &runs)), te_sum_all(b));
                for (int i = 0; i < 2; i++) y = te_sum_all(y);
                te_tensor_fill(te_tensor_narrow(factor, 0, 0, 0), 1); /* of no bytes: not a write */
                REQUIRE_OK(te);
                te_memory_trim(te);
                int64_t refused = p->refused;
                if (!again) p->fail_at = p->calls + k;
                result = te_backward(y);
                p->fail_at = 0;
                if (!again) whole = p->refused == refused;
                if (result == TE_OK) break;
                CHECK_ERROR(te, TE_ERR_OUT_OF_MEMORY, "");
                CHECK(te_tensor_grad(a) == NULL && te_tensor_grad(b) == NULL);
            }
            CHECK_EQ_INT(result, TE_OK);
            float *got[2] = {test_read(te_tensor_grad(a)), test_read(te_tensor_grad(b))};
            for (int i = 0; i < 4; i++) CHECK(got[0][i] == 4 + 6 && got[1][i] == 6 + 1);
            te_scope_end(te);
            te_ctx_destroy(te);
            must_be_empty(host);
            must_be_empty(memory);
        }
        CHECK(whole);
    }
}
