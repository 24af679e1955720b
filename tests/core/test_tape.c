/* The tape: gradients add up, graphs are released, views and casts pass gradients, misuse is refused. */
#include "../te_test.h"

TE_TEST_DEVICES(tape_gradients_add_up) {
    const float v[4] = {1, -2, 3, 0.5f};
    te_tensor *x = te_tensor_set_requires_grad(test_tensor(te, TE_F32, SHAPE(4), v), true);
    te_tensor *y = te_add(te_scale(x, 3), te_add(x, x)); /* 5 x */
    CHECK_EQ_INT(te_backward(te_sum_all(y)), TE_OK);
    const float five[4] = {5, 5, 5, 5}, ten[4] = {10, 10, 10, 10};
    CHECK_TENSOR(te_tensor_grad(x), five, 0, 0);
    y = te_add(te_scale(x, 3), te_add(x, x));
    CHECK_EQ_INT(te_backward(te_sum_all(y)), TE_OK);
    CHECK_TENSOR(te_tensor_grad(x), ten, 0, 0);
    te_tensor_zero_grad(x);
    CHECK(te_tensor_grad(x) == NULL);
    CHECK_OK(te);
}

TE_TEST_DEVICES(tape_views_pass_gradients) {
    float *v = test_normal(24, 2), want[24];
    te_tensor *x = te_tensor_set_requires_grad(test_tensor(te, TE_F32, SHAPE(2, 3, 4), v), true);
    te_tensor *part = te_tensor_contiguous(te_tensor_transpose(te_tensor_narrow(x, 1, 1, 2), 0, 2));
    te_tensor *loss = te_mse_loss(te_tensor_view(part, SHAPE(16)), te_tensor_zeros(te, TE_F32, SHAPE(16)));
    CHECK_EQ_INT(te_backward(loss), TE_OK);
    for (int i = 0; i < 24; i++) want[i] = (i / 4) % 3 == 0 ? 0 : 2 * v[i] / 16;
    CHECK_TENSOR(te_tensor_grad(x), want, 1e-6, 1e-7); /* one f32 division and one product */
    te_tensor *h = te_tensor_cast(x, TE_BF16);
    te_tensor_zero_grad(x);
    CHECK_EQ_INT(te_backward(te_mean_all(h)), TE_OK);
    CHECK_EQ_INT(te_tensor_dtype(te_tensor_grad(x)), TE_F32);
    CHECK_OK(te);
}

TE_TEST(tape_lets_go_of_memory) {
    te_ctx *te = test_context("cpu");
    te_tensor *x = te_tensor_set_requires_grad(te_tensor_normal(te, TE_F32, SHAPE(1000), 0, 1), true);
    size_t before = 0;
    for (int i = 0; i < 3; i++) {
        te_scope_begin(te);
        te_tensor *y = x;
        for (int k = 0; k < 5; k++) y = te_activate(y, TE_GELU);
        if (i != 1) CHECK_EQ_INT(te_backward(te_mean_all(y)), TE_OK); /* one graph is never played */
        te_scope_end(te);
        te_tensor_zero_grad(x);
        if (i == 0) before = te_memory_get_stats(te).allocated;
        CHECK_EQ_INT(te_memory_get_stats(te).allocated, before);
    }
    CHECK_OK(te);
}

TE_TEST(tape_no_grad_records_nothing) {
    te_ctx *te = test_context("cpu");
    te_tensor *x = te_tensor_set_requires_grad(te_tensor_zeros(te, TE_F32, SHAPE(3)), true);
    te_no_grad_begin(te);
    te_tensor *y = te_sum_all(x);
    te_no_grad_end(te);
    CHECK(!te_tensor_requires_grad(y));
    CHECK(te_backward(y) == TE_ERR_STATE);
    CHECK_ERROR(te, TE_ERR_STATE, "requires a gradient");
    te_no_grad_end(te);
    CHECK_ERROR(te, TE_ERR_STATE, "te_no_grad_begin");
}

TE_TEST(tape_misuse_is_refused) {
    te_ctx *te = test_context("cpu");
    te_tensor *x = te_tensor_set_requires_grad(te_tensor_full(te, TE_F32, SHAPE(3), 1), true);
    te_tensor *shared = te_scale(x, 2);
    CHECK(te_backward(shared) == TE_ERR_SHAPE);
    CHECK_ERROR(te, TE_ERR_SHAPE, "[3]");
    te_tensor *a = te_sum_all(shared), *b = te_mean_all(shared);
    CHECK_EQ_INT(te_backward(a), TE_OK);
    CHECK(te_backward(b) == TE_ERR_STATE);
    CHECK_ERROR(te, TE_ERR_STATE, "played backwards before");
    te_tensor_set_requires_grad(te_tensor_zeros(te, TE_I32, SHAPE(3)), true);
    CHECK_ERROR(te, TE_ERR_DTYPE, "i32");
}

static te_result square_backward(te_ctx *te, const void *state, te_tensor *const *saved, te_tensor *const *dy, te_tensor **dx, const bool *needs) {
    (void)te, (void)needs;
    dx[0] = te_scale(dy[0], 2 * *(const float *)state * (float)te_tensor_item(saved[0]));
    return TE_OK;
}
TE_TEST_DEVICES(tape_nodes_of_ones_own) {
    te_tensor *x = te_tensor_set_requires_grad(te_tensor_full(te, TE_F32, SHAPE(1), 3), true);
    te_tensor *y = te_tensor_full(te, TE_F32, SHAPE(1), 9 * 0.5);
    float factor = 0.5f;
    te_node_desc d = {"square", &x, 1, &y, 1, &x, 1, &factor, sizeof factor, square_backward};
    CHECK_EQ_INT(te_record(te, &d), TE_OK);
    CHECK_EQ_INT(te_backward(y), TE_OK);
    CHECK(te_tensor_item(te_tensor_grad(x)) == 3);
    CHECK_OK(te);
}
