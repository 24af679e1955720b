/* tests/tape/test_gradients.c: leaves own their gradients, which lie in no other tensor's memory and hold nothing; main gradients. */
#include "leaf.h"

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

TE_TEST_DEVICES(leaves_of_one_sum_own_their_gradients) {
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

TE_TEST_DEVICES(a_leaf_itself_takes_a_copy_of_the_given_gradient) {
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

TE_TEST_DEVICES(gradients_that_a_node_has_from_elsewhere_are_copied) {
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
TE_TEST_DEVICES(no_copy_of_a_gradient_is_made_where_none_is_needed) {
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

TE_TEST_DEVICES(leaves_own_their_gradients_in_a_graph) {
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

/* main_grad goes on being found and added to. */
TE_TEST_DEVICES(main_grads_gather_over_backward_passes) {
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

/* test_context fails the test when a tensor is alive at its end: a cycle would be. */
static te_result self_backward(te_ctx *te, const void *state, te_tensor *const *saved, te_tensor *const *dy, te_tensor **dx, const bool *needs) {
    (void)te, (void)state, (void)dy, (void)needs;
    dx[0] = saved[0];
    return TE_OK;
}
TE_TEST_DEVICES(no_gradient_holds_itself) {
    te_tensor *x[3];
    for (int i = 0; i < 3; i++) x[i] = te_tensor_set_requires_grad(te_tensor_full(te, TE_F32, SHAPE(4, 8), i), true);
    /* main gradients: the tensor, its own memory, rounds of two and three */
    CHECK(te_tensor_set_main_grad(x[0], x[0]) == TE_ERR_INVALID);
    CHECK_ERROR(te, TE_ERR_INVALID, "main_grad lies in the tensor's own memory");
    CHECK(te_tensor_set_main_grad(x[0], te_tensor_detach(x[0])) == TE_ERR_INVALID);
    CHECK_ERROR(te, TE_ERR_INVALID, "main_grad lies in the tensor's own memory");
    te_tensor *flat = te_tensor_zeros(te, TE_F32, SHAPE(9, 8));
    te_tensor *low = te_tensor_narrow(flat, 0, 0, 4), *high = te_tensor_narrow(flat, 0, 5, 4), *between = te_tensor_narrow(flat, 0, 3, 4);
    CHECK(te_tensor_set_main_grad(low, between) == TE_ERR_INVALID);
    CHECK_ERROR(te, TE_ERR_INVALID, "own memory");
    CHECK(te_tensor_set_main_grad(low, high) == TE_OK); /* beside each other in one buffer */
    te_tensor *empty = te_tensor_zeros(te, TE_F32, SHAPE(0));
    CHECK(te_tensor_set_main_grad(empty, empty) == TE_ERR_INVALID);
    te_clear_error(te);
    CHECK(te_tensor_set_main_grad(x[0], x[1]) == TE_OK);
    CHECK(te_tensor_set_main_grad(x[1], x[0]) == TE_ERR_INVALID);
    CHECK_ERROR(te, TE_ERR_INVALID, "the tensor is itself a gradient of another");
    CHECK(te_tensor_set_main_grad(x[1], x[2]) == TE_ERR_INVALID);
    te_clear_error(te);
    CHECK(te_tensor_set_main_grad(x[2], x[0]) == TE_ERR_INVALID);
    CHECK_ERROR(te, TE_ERR_INVALID, "main_grad has a main gradient itself");
    /* gradients */
    CHECK(te_backward_from(x[2], x[2]) == TE_OK);
    CHECK(te_tensor_grad(x[2]) != x[2] && test_read(te_tensor_grad(x[2]))[0] == 2);
    CHECK(te_tensor_set_main_grad(te_tensor_grad(x[2]), x[2]) == TE_ERR_INVALID);
    te_clear_error(te);
    te_tensor *a = te_tensor_set_requires_grad(te_tensor_full(te, TE_F32, SHAPE(2), 5), true);
    te_tensor *b = te_tensor_set_requires_grad(te_tensor_full(te, TE_F32, SHAPE(2), 7), true);
    CHECK(te_backward_from(a, b) == TE_OK && te_backward_from(b, a) == TE_OK);
    CHECK(test_read(te_tensor_grad(a))[0] == 7 && test_read(te_tensor_grad(b))[0] == 5);
    CHECK(te_tensor_set_main_grad(te_tensor_grad(a), a) == TE_ERR_INVALID);
    te_clear_error(te);
    /* a node whose backward gives back what it saved */
    te_tensor *c = te_tensor_set_requires_grad(te_tensor_full(te, TE_F32, SHAPE(2), 3), true), *y = te_tensor_full(te, TE_F32, SHAPE(2), 3);
    te_node_desc node = {.name = "self", .inputs = &c, .num_inputs = 1, .outputs = &y, .num_outputs = 1, .saved = &c, .num_saved = 1, .backward = self_backward};
    CHECK(te_record(te, &node) == TE_OK && te_backward(te_sum_all(y)) == TE_OK);
    CHECK(test_read(te_tensor_grad(c))[0] == 3);
    CHECK_OK(te);
}
