/* tests/tape/test_nested.c: backward functions that play a backward pass of their own, or end scopes. */
#include "leaf.h"

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
TE_TEST_DEVICES(a_backward_inside_a_backward_of_what_the_outer_one_needs) {
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
TE_TEST(scopes_ended_inside_a_backward_do_not_crash) {
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
