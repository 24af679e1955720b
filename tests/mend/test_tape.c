/* The tape: leaves own their gradients, backward reads the values of its forward, backward inside backward, programs without scopes. */
#include "../faults/purse.h"

static te_tensor *leaf(te_ctx *te, int ndim, const int64_t *shape, uint64_t seed) {
    te_tensor *x = test_tensor(te, TE_F32, ndim, shape, test_normal(test_numel(ndim, shape), seed));
    return te_tensor_set_requires_grad(x, true);
}

/* ---- 7: leaves own their gradients ---------------------------------------------------------------------------- */

/* Overwrites the gradient of x and looks whether `others` stay as they are. */
static void check_alone(const char *what, te_tensor *x, int count, te_tensor *const *others) {
    te_tensor *grad = te_tensor_grad(x);
    float *before[8];
    CHECK_MSG(grad != NULL, "%s: no gradient", what);
    if (!grad) return;
    CHECK_MSG(te_tensor_is_contiguous(grad), "%s: the gradient is strided", what);
    for (int i = 0; i < count; i++) before[i] = test_read(others[i]);
    te_tensor_fill(grad, -77);
    for (int i = 0; i < count; i++) {
        test_case("%s, tensor %d", what, i);
        CHECK_TENSOR(others[i], before[i], 0, 0); /* another tensor's memory is not written at all */
    }
    test_case("%s", what);
}

TE_TEST_DEVICES(p07_leaves_of_one_sum_own_their_gradients) {
    te_tensor *a = leaf(te, SHAPE(3, 4), 1), *b = leaf(te, SHAPE(3, 4), 2), *c = leaf(te, SHAPE(12), 3);
    te_tensor *dy = test_tensor(te, TE_F32, SHAPE(3, 4), test_normal(12, 4));
    const float *want = test_read(dy);
    te_tensor *y = te_add(te_add(a, b), te_tensor_view(c, SHAPE(3, 4)));
    CHECK_EQ_INT(te_backward_from(y, dy), TE_OK);
    REQUIRE_OK(te);
    te_tensor *all[4] = {te_tensor_grad(a), te_tensor_grad(b), te_tensor_grad(c), dy};
    for (int i = 0; i < 4; i++) CHECK_TENSOR(all[i], want, 0, 0); /* addition passes gradients on as they are */
    te_tensor *not_a[3] = {all[1], all[2], dy}, *not_b[3] = {all[0], all[2], dy}, *not_c[3] = {all[0], all[1], dy};
    check_alone("a", a, 3, not_a);
    check_alone("b", b, 3, not_b);
    check_alone("c", c, 3, not_c);
    CHECK_OK(te);
}

TE_TEST_DEVICES(p07_a_leaf_itself_takes_a_copy_of_the_given_gradient) {
    te_tensor *x = leaf(te, SHAPE(5), 1), *twice = leaf(te, SHAPE(5), 2), *dy = test_tensor(te, TE_F32, SHAPE(5), test_normal(5, 3));
    CHECK_EQ_INT(te_backward_from(x, dy), TE_OK);
    check_alone("the leaf", x, 1, &dy);
    CHECK_EQ_INT(te_backward_from(te_add(twice, twice), dy), TE_OK);
    check_alone("a leaf used twice", twice, 1, &dy);
    te_tensor *keep = te_tensor_grad(twice);
    CHECK_EQ_INT(te_backward_from(te_scale(twice, 3), dy), TE_OK);
    CHECK(te_tensor_grad(twice) == keep); /* a gradient of its own is added to in place */
    CHECK_OK(te);
}

/* The gradient of each input is what `state` says. */
enum { GIVE_SAVED, GIVE_PARTS, GIVE_FOREIGN, GIVE_STRIDED, GIVE_QUANTIZED };
static te_result give_backward(te_ctx *te, const void *state, te_tensor *const *saved, te_tensor *const *dy, te_tensor **dx, const bool *needs) {
    (void)dy, (void)needs;
    te_tensor *s = saved[0];
    switch (*(const int *)state) {
    case GIVE_SAVED: dx[0] = dx[1] = s; break;
    case GIVE_PARTS:
        dx[0] = te_tensor_narrow(s, 0, 0, 4);
        dx[1] = te_tensor_narrow(s, 0, 4, 4);
        break;
    case GIVE_FOREIGN:
        dx[0] = te_tensor_wrap(te, TE_F32, SHAPE(4, 4), te_tensor_data(s), NULL, NULL);
        dx[1] = te_tensor_wrap(te, TE_F32, SHAPE(4, 4), te_tensor_data(s), NULL, NULL);
        break;
    case GIVE_STRIDED:
        dx[0] = te_tensor_transpose(te_tensor_narrow(s, 0, 0, 4), 0, 1);
        dx[1] = te_tensor_narrow(s, 0, 0, 4);
        break;
    case GIVE_QUANTIZED: {
        te_quantizer_desc d = {0};
        d.kind = TE_QUANT_CURRENT;
        te_quantizer *q = te_quantizer_create(te, &d);
        dx[0] = dx[1] = te_quantize(q, te_tensor_narrow(s, 0, 0, 4));
        te_quantizer_destroy(q);
        break;
    }
    }
    return te_error_code(te);
}

TE_TEST_DEVICES(p07_gradients_that_a_node_has_from_elsewhere_are_copied) {
    static const char *const names[] = {"a saved tensor", "parts of one buffer", "foreign memory", "strided", "quantized"};
    for (int how = GIVE_SAVED; how <= GIVE_QUANTIZED; how++) {
        int rows = how == GIVE_SAVED ? 4 : 8;
        te_tensor *in[2] = {leaf(te, SHAPE(4, 4), 1), leaf(te, SHAPE(4, 4), 2)};
        te_tensor *s = test_tensor(te, TE_F32, SHAPE(rows, 4), test_normal(rows * 4, 3)), *y = te_tensor_zeros(te, TE_F32, SHAPE(1));
        te_node_desc d = {"give", in, 2, &y, 1, &s, 1, &how, sizeof how, give_backward, NULL};
        CHECK_EQ_INT(te_record(te, &d), TE_OK);
        CHECK_EQ_INT(te_backward(y), TE_OK);
        REQUIRE_OK(te);
        CHECK_MSG(!te_tensor_is_quantized(te_tensor_grad(in[0])), "%s", names[how]); /* "same format", says te_tensor_grad */
        const float *value = test_read(s), *got = test_read(te_tensor_grad(in[0]));
        for (int i = 0; i < 16; i++) {
            float want = how == GIVE_STRIDED ? value[i % 4 * 4 + i / 4] : value[i];
            double near = how == GIVE_QUANTIZED ? 0.07 * fabs((double)want) + 1e-2 : 0; /* e4m3: half of 2^-3, and the denormals of a tensor of normals */
            CHECK_MSG(fabs((double)got[i] - want) <= near, "%s: [%d] is %g, not %g", names[how], i, (double)got[i], (double)want);
        }
        te_tensor *first[2] = {te_tensor_grad(in[1]), s}, *second[2] = {te_tensor_grad(in[0]), s};
        check_alone(names[how], in[0], 2, first);
        check_alone(names[how], in[1], 2, second);
    }
    CHECK_OK(te);
}

/* A gradient that nobody else looks at when te_backward ends is the leaf's without a copy. */
TE_TEST_DEVICES(p07_no_copy_is_made_where_none_is_needed) {
    te_tensor *a = leaf(te, SHAPE(8), 1), *x = leaf(te, SHAPE(8), 2);
    uint64_t before = te_jit_get_stats(te).launches;
    CHECK_EQ_INT(te_backward(te_sum_all(te_scale(x, 2))), TE_OK);
    uint64_t alone = te_jit_get_stats(te).launches - before;
    te_tensor_zero_grad(x);
    before = te_jit_get_stats(te).launches;
    CHECK_EQ_INT(te_backward(te_sum_all(te_add(a, te_scale(x, 2)))), TE_OK); /* what the sum passes on is a's alone once scale has run */
    CHECK_EQ_INT(te_jit_get_stats(te).launches - before, alone + 1);         /* the addition itself */
    CHECK_OK(te);
}

TE_TEST_DEVICES(p07_leaves_own_their_gradients_in_a_graph) {
    te_tensor *a = leaf(te, SHAPE(6), 1), *b = leaf(te, SHAPE(6), 2), *dy = test_tensor(te, TE_F32, SHAPE(6), test_normal(6, 3));
    float *want = test_read(dy), third[6];
    for (int i = 0; i < 6; i++) third[i] = want[i] * 0.25f;
    CHECK_EQ_INT(te_backward_from(te_add(a, b), dy), TE_OK); /* compiles */
    te_tensor_zero_grad(a);
    te_tensor_zero_grad(b);
    if (te_graph_begin(te) != TE_OK) {
        CHECK_ERROR(te, TE_ERR_LIBRARY, "graph"); /* a driver without graphs */
        SKIP("this driver has no graphs");
    }
    te_backward_from(te_add(a, b), dy);
    te_op_axpby_args quarter = {0};
    quarter.x = quarter.out = te_tensor_grad(a);
    quarter.alpha = 0.25f;
    te_op_axpby(te, &quarter);
    te_graph *graph = te_graph_end(te);
    REQUIRE_OK(te);
    for (int i = 0; i < 3; i++) {
        CHECK_EQ_INT(te_graph_launch(graph), TE_OK);
        CHECK_TENSOR(te_tensor_grad(a), third, 0, 0); /* a power of two: exact; each launch begins anew */
        CHECK_TENSOR(te_tensor_grad(b), want, 0, 0);
        CHECK_TENSOR(dy, want, 0, 0);
    }
    te_tensor_zero_grad(a);
    te_tensor_zero_grad(b);
    te_graph_destroy(graph);
    CHECK_OK(te);
}

/* ---- 8: backward reads the values of its forward ------------------------------------------------------------------ */

static te_module *small_linear(te_ctx *te, te_dtype dtype, int in, int out) {
    te_linear_desc d = {0};
    d.in_features = in;
    d.out_features = out;
    d.gemm.params_dtype = dtype;
    return te_linear_create(te, &d);
}

TE_TEST_DEVICES(p08_a_parameter_written_before_backward_is_refused) {
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
TE_TEST_DEVICES(p08_a_step_between_two_backward_passes_is_refused) {
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

TE_TEST_DEVICES(p08_an_activation_written_before_backward_is_refused) {
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

TE_TEST_DEVICES(p08_what_a_node_of_ones_own_saves_is_watched) {
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
TE_TEST_DEVICES(p08_writes_elsewhere_in_the_same_buffer_do_not_count) {
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
TE_TEST_DEVICES(p08_a_quantized_copy_outlives_a_write_to_its_source) {
    te_recipe recipe = te_recipe_current_scaling();
    te_module *m = small_linear(te, TE_BF16, 32, 32);
    float *dx[2], *dw[2];
    for (int i = 0; i < 2; i++) run_written(te, m, &recipe, i == 1, &dx[i], &dw[i]);
    CHECK_BYTES("dx", dx[1], dx[0], 1024 * sizeof(float));
    CHECK_BYTES("dw", dw[1], dw[0], 1024 * sizeof(float));
    te_module_destroy(m);
    CHECK_OK(te);
}
TE_TEST_DEVICES(p08_a_weight_stored_quantized_is_watched) {
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
TE_TEST_DEVICES(p08_what_backward_does_not_read_may_be_written) {
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

/* main_grad goes on being found and added to. */
TE_TEST_DEVICES(p08_main_grads_gather_as_before) {
    te_linear_desc d = {0};
    d.in_features = d.out_features = 8;
    d.gemm.params_dtype = TE_F32;
    d.gemm.no_bias = d.gemm.fuse_wgrad_accumulation = true;
    te_module *m = te_linear_create(te, &d);
    te_tensor *w = te_module_parameter(m, "weight"), *main_grad = te_tensor_zeros(te, TE_F32, SHAPE(8, 8));
    te_tensor_set_main_grad(w, main_grad);
    for (int i = 0; i < 2; i++) CHECK_EQ_INT(te_backward(te_sum_all(te_forward(m, te_tensor_full(te, TE_F32, SHAPE(2, 8), 1)))), TE_OK);
    CHECK(te_tensor_grad(w) == NULL);
    const float *got = test_read(main_grad);
    for (int i = 0; i < 64; i++) CHECK(got[i] == 4); /* two rows of ones, twice */
    te_tensor_set_main_grad(w, NULL);
    te_module_destroy(m);
    CHECK_OK(te);
}

/* Launches of a graph write what it holds, and what it has made. */
TE_TEST_DEVICES(p08_launches_of_a_graph_are_writes) {
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
TE_TEST_DEVICES(p08_a_refused_pass_can_be_done_again) {
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
TE_TEST(p08_a_pass_without_memory_can_be_done_again) {
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

/* ---- 10: backward inside backward --------------------------------------------------------------------------------- */

typedef struct inner {
    te_tensor *y, *dy; /* dy NULL: te_backward */
    int runs;
} inner;
static te_result nested_backward(te_ctx *te, const void *state, te_tensor *const *saved, te_tensor *const *dy, te_tensor **dx, const bool *needs) {
    inner *in = *(inner *const *)state;
    (void)te, (void)saved, (void)needs;
    in->runs++;
    if (in->dy) te_backward_from(in->y, in->dy);
    else te_backward(in->y);
    dx[0] = dy[0];
    return TE_OK; /* looks away */
}
TE_TEST_DEVICES(p10_a_backward_inside_a_backward_of_what_the_outer_one_needs) {
    for (int from = 0; from < 2; from++) {
        te_tensor *x = leaf(te, SHAPE(1), 1), *h = te_scale(x, 2), *y = te_tensor_full(te, TE_F32, SHAPE(1), 1);
        inner in = {h, from ? te_tensor_full(te, TE_F32, SHAPE(1), 1) : NULL, 0}, *state = &in;
        te_node_desc d = {"nested", &h, 1, &y, 1, NULL, 0, &state, sizeof state, nested_backward, NULL};
        CHECK_EQ_INT(te_record(te, &d), TE_OK);
        CHECK_EQ_INT(te_backward(te_scale(y, 5)), TE_ERR_STATE); /* h was played, and the outer pass has a gradient for it */
        CHECK_ERROR(te, TE_ERR_STATE, "played backwards before");
        CHECK_EQ_INT(in.runs, 1);
        te_tensor_zero_grad(x);
        CHECK_EQ_INT(te_backward(te_scale(x, 4)), TE_OK); /* the context goes on */
        CHECK(te_tensor_item(te_tensor_grad(x)) == 4);
    }
    CHECK_OK(te);
}

/* A te_scope_end too many inside a backward function takes nodes away while they are played. */
static te_result ends_scopes_backward(te_ctx *te, const void *state, te_tensor *const *saved, te_tensor *const *dy, te_tensor **dx, const bool *needs) {
    (void)saved, (void)needs, (void)dy, (void)dx;
    for (int i = 0; i < *(const int *)state; i++) te_scope_end(te);
    for (int i = 0; i < *(const int *)state; i++) te_scope_begin(te);
    return TE_OK;
}
TE_TEST(p10_scopes_ended_inside_a_backward_do_not_crash) {
    te_ctx *te = test_context("cpu");
    for (int count = 1; count <= 3; count++) {
        te_tensor *x = te_tensor_retain(leaf(te, SHAPE(1), 1)), *y, *h;
        te_scope_begin(te);
        h = te_scale(x, 2);
        y = te_tensor_full(te, TE_F32, SHAPE(1), 1);
        te_node_desc d = {"ends", &h, 1, &y, 1, NULL, 0, &count, sizeof count, ends_scopes_backward, NULL};
        CHECK_EQ_INT(te_record(te, &d), TE_OK);
        te_tensor *loss = te_tensor_retain(te_scale(y, 5));
        te_backward(loss);
        te_scope_end(te);
        te_tensor_release(loss);
        te_tensor_release(x);
    }
    CHECK_OK(te);
}

/* ---- 20: programs without scopes -------------------------------------------------------------------------------------- */

static int count_of(const char *text, const char *needle) {
    int n = 0;
    for (const char *at = text; (at = strstr(at, needle)) != NULL; at += strlen(needle)) n++;
    return n;
}
static te_ctx *logging_context(void) {
    te_ctx_desc d = {0};
    d.device = "cpu";
    d.cpu_threads = 1;
    d.log = test__log;
    return te_ctx_create(&d);
}
static void one_step(te_ctx *te, te_module *m, te_optimizer *adam) {
    te_tensor *x = te_tensor_normal(te, TE_F32, SHAPE(2, 4), 0, 1);
    te_backward(te_mean_all(te_forward(m, x)));
    te_optimizer_step(adam);
}
TE_TEST(p20_a_program_without_scopes_is_warned_once) {
    for (int scoped = 0; scoped < 3; scoped++) { /* without; around each step; around all */
        te_ctx *te = logging_context();
        te_module *m = small_linear(te, TE_F32, 4, 4);
        te_fused_adam_desc d = {0};
        te_optimizer *adam = te_fused_adam_create(te, m, &d);
        int before = count_of(test_log_text(), "te_scope_begin"), after_some;
        if (scoped == 2) te_scope_begin(te);
        for (int i = 0; i < 50; i++) {
            if (scoped == 1) te_scope_begin(te);
            one_step(te, m, adam);
            if (scoped == 1) te_scope_end(te);
        }
        after_some = count_of(test_log_text(), "te_scope_begin");
        CHECK_EQ_INT(after_some, before); /* a short program needs no scopes */
        for (int i = 0; i < 450; i++) {
            if (scoped == 1) te_scope_begin(te);
            one_step(te, m, adam);
            if (scoped == 1) te_scope_end(te);
        }
        test_case("scopes %d", scoped);
        CHECK_EQ_INT(count_of(test_log_text(), "te_scope_begin") - before, scoped == 0);
        if (scoped == 0) CHECK_STR(test_log_text(), "te_scope_end");
        if (scoped == 2) te_scope_end(te);
        CHECK_OK(te);
        te_optimizer_destroy(adam);
        te_module_destroy(m);
        te_ctx_destroy(te);
    }
}
TE_TEST(p20_building_models_and_data_warns_of_nothing) {
    te_ctx *te = logging_context();
    te_module *m = small_linear(te, TE_F32, 4, 4);
    te_fused_adam_desc d = {0};
    te_optimizer *adam = te_fused_adam_create(te, m, &d);
    int before = count_of(test_log_text(), "te_scope_begin");
    for (int round = 0; round < 3; round++) {
        for (int i = 0; i < 5000; i++) te_tensor_zeros(te, TE_F32, SHAPE(1)); /* parameters of classes of one's own, a data set */
        te_scope_begin(te);
        for (int i = 0; i < 60; i++) one_step(te, m, adam);
        te_scope_end(te);
        for (int i = 0; i < 10; i++) one_step(te, m, adam); /* a look at the loss here and there */
    }
    CHECK_EQ_INT(count_of(test_log_text(), "te_scope_begin"), before);
    te_optimizer_destroy(adam);
    te_module_destroy(m);
    te_ctx_destroy(te);
}
