/* The tape: gradients add up, graphs are released, views and casts pass gradients, backward inside backward, misuse is refused. */
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
        for (int k = 0; k < 5; k++) y = te_activate(y, TE_GELU, NULL);
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

/* Its nodes have gone with the scope: there is nothing to play, and the caller hears of it. */
TE_TEST(tape_of_a_scope_that_has_ended) {
    te_ctx *te = test_context("cpu");
    te_tensor *x = te_tensor_set_requires_grad(te_tensor_full(te, TE_F32, SHAPE(3), 1), true);
    te_scope_begin(te);
    te_tensor *y = te_tensor_retain(te_sum_all(x));
    te_scope_end(te);
    CHECK_EQ_INT(te_backward(y), TE_ERR_STATE);
    CHECK_ERROR(te, TE_ERR_STATE, "in a scope that has ended");
    CHECK(!te_tensor_grad(y) && !te_tensor_grad(x));
    te_tensor_release(y);
    CHECK_EQ_INT(te_backward_from(x, te_tensor_full(te, TE_F32, SHAPE(3), 2)), TE_OK); /* a leaf has no node either */
    CHECK(test_read(te_tensor_grad(x))[1] == 2);
    CHECK_OK(te);
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
    te_node_desc d = {"square", &x, 1, &y, 1, &x, 1, &factor, sizeof factor, square_backward, NULL};
    CHECK_EQ_INT(te_record(te, &d), TE_OK);
    CHECK_EQ_INT(te_backward(y), TE_OK);
    CHECK(te_tensor_item(te_tensor_grad(x)) == 3);
    CHECK_OK(te);
}

/* ---- backward inside backward ---- */

/* y = x^2 by a node whose backward function knows no derivative: it records the square again, `depth` nodes inside each other, and plays it. */
static te_tensor *square_recorded(te_ctx *te, te_tensor *x, int depth);
static te_result square_again_backward(te_ctx *te, const void *state, te_tensor *const *saved, te_tensor *const *dy, te_tensor **dx, const bool *needs) {
    int depth = *(const int *)state;
    te_tensor *x = te_tensor_set_requires_grad(te_tensor_detach(saved[0]), true), *y;
    (void)needs;
    if (te_grad_enabled(te)) return TE_ERR_STATE;
    te_enable_grad_begin(te);
    if (!te_grad_enabled(te)) return TE_ERR_STATE;
    y = depth ? square_recorded(te, x, depth - 1) : te_scale(te_mse_loss(x, te_tensor_zeros(te, TE_F32, SHAPE(1))), 1);
    te_enable_grad_end(te);
    te_result result = te_backward_from(y, dy[0]);
    dx[0] = te_tensor_grad(x);
    return result;
}
static te_tensor *square_recorded(te_ctx *te, te_tensor *x, int depth) {
    te_no_grad_begin(te);
    te_tensor *y = te_mse_loss(x, te_tensor_zeros(te, TE_F32, SHAPE(1)));
    te_no_grad_end(te);
    te_node_desc d = {"square again", &x, 1, &y, 1, &x, 1, &depth, sizeof depth, square_again_backward, NULL};
    return te_record(te, &d) == TE_OK ? y : NULL;
}
TE_TEST_DEVICES(tape_plays_inside_itself) {
    for (int depth = 0; depth < 4; depth++) {
        te_scope_begin(te);
        size_t before = te_memory_get_stats(te).allocated;
        te_tensor *x = te_tensor_set_requires_grad(te_tensor_full(te, TE_F32, SHAPE(1), 3), true);
        te_scope_begin(te);
        te_tensor *y = te_add(square_recorded(te, te_scale(x, 2), depth), te_scale(x, 7)); /* 4 x^2 + 7 x */
        CHECK_EQ_INT(te_backward(te_scale(y, 10)), TE_OK);
        te_scope_end(te);
        CHECK(te_tensor_item(te_tensor_grad(x)) == 10 * (8 * 3 + 7));
        te_scope_end(te);
        CHECK_EQ_INT(te_memory_get_stats(te).allocated, before);
    }
    CHECK_OK(te);
}

/* Plays *state, a loss of the outer tape. */
static te_result plays_other_backward(te_ctx *te, const void *state, te_tensor *const *saved, te_tensor *const *dy, te_tensor **dx, const bool *needs) {
    (void)te, (void)saved, (void)needs;
    dx[0] = dy[0];
    return te_backward(*(te_tensor *const *)state);
}
/* A part of the outer tape that the outer pass does not need; gradients of the outer pass wait at the tensor that both go through. */
TE_TEST_DEVICES(tape_plays_another_part_of_itself) {
    for (int both = 0; both < 2; both++) {
        te_tensor *x = te_tensor_set_requires_grad(te_tensor_full(te, TE_F32, SHAPE(1), 1), true), *h = te_scale(x, 2);
        te_tensor *other = te_scale(both ? h : x, 3), *y = te_tensor_full(te, TE_F32, SHAPE(1), 1), *in = te_scale(x, 5);
        te_node_desc d = {"plays other", &in, 1, &y, 1, NULL, 0, &other, sizeof other, plays_other_backward, NULL};
        CHECK_EQ_INT(te_record(te, &d), TE_OK);
        te_tensor *loss = te_add(y, te_scale(h, 100)); /* the latter is played first and leaves its gradient at h */
        if (both) {
            CHECK_EQ_INT(te_backward(loss), TE_ERR_STATE);
            CHECK_ERROR(te, TE_ERR_STATE, "that the outer one needs as well");
        } else {
            CHECK_EQ_INT(te_backward(loss), TE_OK);
            CHECK(te_tensor_item(te_tensor_grad(x)) == 3 + 5 + 200);
        }
        te_tensor_zero_grad(x);
    }
    CHECK_OK(te);
}

static te_result forgets_end_backward(te_ctx *te, const void *state, te_tensor *const *saved, te_tensor *const *dy, te_tensor **dx, const bool *needs) {
    (void)state, (void)saved, (void)needs;
    te_enable_grad_begin(te);
    dx[0] = te_scale(dy[0], 2);
    return TE_OK;
}
TE_TEST_DEVICES(tape_regions_are_balanced) {
    te_tensor *x = te_tensor_set_requires_grad(te_tensor_full(te, TE_F32, SHAPE(1), 1), true), *y = te_tensor_full(te, TE_F32, SHAPE(1), 2);
    te_node_desc d = {"forgets", &x, 1, &y, 1, NULL, 0, NULL, 0, forgets_end_backward, NULL};
    CHECK_EQ_INT(te_record(te, &d), TE_OK);
    CHECK_EQ_INT(te_backward(y), TE_ERR_STATE);
    CHECK_ERROR(te, TE_ERR_STATE, "of forgets begins and ends regions");
    CHECK(te_grad_enabled(te));
    te_enable_grad_end(te);
    CHECK_ERROR(te, TE_ERR_STATE, "te_enable_grad_end without te_enable_grad_begin");
    te_no_grad_begin(te);
    te_enable_grad_begin(te);
    CHECK(te_grad_enabled(te));
    te_no_grad_begin(te);
    CHECK(!te_grad_enabled(te));
    te_no_grad_end(te);
    te_enable_grad_end(te);
    CHECK(!te_grad_enabled(te));
    te_no_grad_end(te);
    for (int i = 0; i < 65; i++) te_enable_grad_begin(te);
    CHECK_ERROR(te, TE_ERR_STATE, "64 regions are open");
    for (int i = 0; i < 64; i++) te_enable_grad_end(te);
    CHECK_OK(te);
}

static te_result passes_backward(te_ctx *te, const void *state, te_tensor *const *saved, te_tensor *const *dy, te_tensor **dx, const bool *needs) {
    (void)te, (void)state, (void)saved, (void)needs;
    dx[0] = dy[0];
    return TE_OK;
}
static void count_release(te_ctx *te, void *state) {
    (void)te;
    ++**(int **)state;
}
/* A node's state is let go of once: played, forgotten with its scope, or never recorded. */
TE_TEST_DEVICES(tape_releases_states) {
    for (int way = 0; way < 4; way++) { /* played, forgotten, no input wants a gradient, refused */
        int released = 0, *state = &released;
        te_scope_begin(te);
        te_tensor *x = te_tensor_set_requires_grad(te_tensor_full(te, TE_F32, SHAPE(1), 1), way != 2), *y = te_tensor_full(te, TE_F32, SHAPE(1), 2);
        te_node_desc d = {"counts", &x, 1, &y, 1, NULL, 0, &state, sizeof state, way == 3 ? NULL : passes_backward, count_release};
        CHECK_EQ_INT(te_record(te, &d), way == 3 ? TE_ERR_INVALID : TE_OK);
        te_clear_error(te);
        CHECK_EQ_INT(released, way >= 2);
        if (way == 0) CHECK_EQ_INT(te_backward(y), TE_OK);
        CHECK_EQ_INT(released, way != 1);
        te_scope_end(te);
        CHECK_EQ_INT(released, 1);
    }
    CHECK_OK(te);
}

/* ---- hooks on saved tensors ---- */

/* Keeps what it is given on the host. */
typedef struct shelf {
    te_ctx *te;
    int packed, unpacked, dropped, decline_every, fail_at; /* fail_at: the unpacking that fails, from 1; how: */
    int how;
} shelf;
typedef struct box {
    te_dtype dtype;
    int ndim;
    int64_t shape[TE_MAX_DIMS];
    unsigned char bytes[1];
} box;
static void *shelf_pack(void *user, te_tensor *x) {
    shelf *s = (shelf *)user;
    if (te_tensor_is_quantized(x) || !te_tensor_is_contiguous(x) || (s->decline_every && ++s->packed % s->decline_every == 0)) return NULL;
    if (!s->decline_every) s->packed++;
    box *b = (box *)malloc(sizeof *b + te_tensor_bytes(x));
    b->dtype = te_tensor_dtype(x);
    b->ndim = te_tensor_ndim(x);
    memcpy(b->shape, te_tensor_shape(x), (size_t)b->ndim * sizeof b->shape[0]);
    te_tensor_to_host(x, b->bytes);
    return b;
}
static void shelf_drop(void *user, void *handle) {
    ((shelf *)user)->dropped++;
    free(handle);
}
static te_tensor *shelf_unpack(void *user, void *handle) {
    shelf *s = (shelf *)user;
    box *b = (box *)handle;
    bool fails = ++s->unpacked == s->fail_at;
    te_tensor *x = fails && s->how == 0 ? NULL : te_tensor_from_host(s->te, b->dtype, fails && s->how == 1 ? 0 : b->ndim, b->shape, b->bytes);
    free(b);
    return x;
}
static te_tensor *gelus(te_tensor *x, int n) {
    for (int i = 0; i < n; i++) x = te_activate(te_scale(x, 1.5f), TE_GELU, NULL);
    return te_mse_loss(x, te_tensor_zeros(te_tensor_ctx(x), te_tensor_dtype(x), te_tensor_ndim(x), te_tensor_shape(x)));
}
TE_TEST_DEVICES(tape_hooks_on_saved_tensors) {
    te_tensor *x = te_tensor_set_requires_grad(te_tensor_normal(te, TE_BF16, SHAPE(7, 16), 0, 1), true);
    float *want = NULL;
    for (int run = 0; run < 4; run++) { /* without hooks; all packed; every other one; nested inside hooks that must not be asked */
        shelf s = {te, 0, 0, 0, run == 2 ? 2 : 0, 0, 0}, outer = {te, 0, 0, 0, 0, 0, 0};
        te_saved_tensors_hooks hooks = {shelf_pack, shelf_unpack, shelf_drop, &s}, outside = {shelf_pack, shelf_unpack, shelf_drop, &outer};
        if (run == 3) CHECK_EQ_INT(te_saved_tensors_begin(te, &outside), TE_OK);
        if (run) CHECK_EQ_INT(te_saved_tensors_begin(te, &hooks), TE_OK);
        te_tensor *loss = gelus(x, 5);
        if (run) CHECK_EQ_INT(te_saved_tensors_end(te), TE_OK);
        if (run == 3) CHECK_EQ_INT(te_saved_tensors_end(te), TE_OK);
        CHECK_EQ_INT(te_backward(loss), TE_OK);
        if (run) CHECK_TENSOR(te_tensor_grad(x), want, 0, 0);
        else want = test_read(te_tensor_grad(x));
        CHECK(outer.packed == 0 && s.dropped == 0);
        if (run) CHECK(s.unpacked >= 3 && s.unpacked <= s.packed);
        te_tensor_zero_grad(x);
    }
    CHECK_OK(te);
}
TE_TEST_DEVICES(tape_hooks_that_fail) {
    te_tensor *x = te_tensor_set_requires_grad(te_tensor_normal(te, TE_F32, SHAPE(3, 4), 0, 1), true);
    for (int how = 0; how < 3; how++) { /* no tensor; another shape; the scope ends first */
        shelf s = {te, 0, 0, 0, 0, how < 2 ? 2 : 0, how};
        te_saved_tensors_hooks hooks = {shelf_pack, shelf_unpack, shelf_drop, &s};
        te_scope_begin(te);
        te_saved_tensors_begin(te, &hooks);
        te_tensor *loss = gelus(x, 3);
        te_saved_tensors_end(te);
        if (how < 2) {
            CHECK_EQ_INT(te_backward(loss), how ? TE_ERR_SHAPE : TE_ERR_STATE);
            CHECK_ERROR(te, how ? TE_ERR_SHAPE : TE_ERR_STATE, how ? "pack was given f32 [3, 4]" : "unpack gave NULL for saved tensor");
        }
        te_scope_end(te);
        CHECK_EQ_INT(s.packed, s.unpacked + s.dropped); /* nothing is lost */
        CHECK(te_tensor_grad(x) == NULL);
    }
    te_saved_tensors_hooks half = {shelf_pack, NULL, NULL, NULL};
    CHECK_EQ_INT(te_saved_tensors_begin(te, &half), TE_ERR_INVALID);
    CHECK_ERROR(te, TE_ERR_INVALID, "unpack is NULL");
    CHECK_EQ_INT(te_saved_tensors_end(te), TE_ERR_STATE);
    CHECK_ERROR(te, TE_ERR_STATE, "without te_saved_tensors_begin");
    CHECK_OK(te);
}

static te_result never_backward(te_ctx *te, const void *state, te_tensor *const *saved, te_tensor *const *dy, te_tensor **dx, const bool *needs) {
    (void)te, (void)state, (void)saved, (void)dy, (void)dx, (void)needs;
    return TE_ERR_STATE;
}
/* More tensors than a node can have are refused when it is recorded, not when it is played. */
TE_TEST(tape_nodes_of_too_many_tensors) {
    enum { COUNT = 1041 };
    te_ctx *te = test_context("cpu");
    te_tensor *inputs[COUNT], *y = te_tensor_zeros(te, TE_F32, SHAPE(1));
    for (int i = 0; i < COUNT; i++) inputs[i] = te_tensor_set_requires_grad(te_tensor_zeros(te, TE_F32, SHAPE(1)), true);
    te_node_desc d = {.name = "wide", .inputs = inputs, .num_inputs = COUNT, .outputs = &y, .num_outputs = 1, .backward = never_backward};
    CHECK_EQ_INT(te_record(te, &d), TE_ERR_UNSUPPORTED);
    CHECK_ERROR(te, TE_ERR_UNSUPPORTED, "te_record: wide has 1041 inputs and 1 outputs; 1040 of each are possible");
    CHECK(!te_tensor_requires_grad(y));
    d.num_inputs = 64;
    CHECK_EQ_INT(te_record(te, &d), TE_OK);
    CHECK(te_tensor_requires_grad(y));
}
