/* tests/cuda/test_stream.c: a second stream, events, pinned memory, and device memory that crosses streams: what reaches the driver of paper.h, in which order
 * and with which blocks; values on real devices. */
#define TE_STATIC
#define TE_IMPLEMENTATION
#include "../te_test.h"
#include "paper.h"

static te_ctx *open_paper_gpu(void) {
    te_ctx_desc desc = TE_ZERO;
    desc.device = "cuda:0";
    desc.log = test__log;
    return te_ctx_create(&desc);
}

static void forget_order(void) { memset(fake.order, 0, sizeof fake.order); }

static int settled;
static te_result count_settle(te_ctx *te) {
    (void)te;
    settled++;
    return TE_OK;
}

/* A copy runs behind the context's own stream, whose line of launches has been sent off, and tells when it is done. */
TE_TEST(stream_order) {
    install_driver();
    te_ctx *te = open_paper_gpu();
    te__stream *s = te__stream_create(te);
    te__pinned *p = te__pinned_take(te, 4096);
    te_tensor *x = te_tensor_empty(te, TE_F32, SHAPE(1024));
    REQUIRE(s && p && x);
    forget_order();
    fake.watch = true;
    te->cuda->settle = count_settle;
    settled = 0;
    CHECK_EQ_INT(te__copy_out(s, p, 0, x), TE_OK);
    CHECK_MSG(strcmp(fake.order, "Rwdr") == 0, "%s", fake.order);
    CHECK_EQ_INT(settled, 1);
    forget_order();
    CHECK_EQ_INT(te__copy_in(s, x, p, 0), TE_OK); /* behind the other copy without a wait: one stream */
    CHECK_MSG(strcmp(fake.order, "Rwhr") == 0, "%s", fake.order);
    forget_order();
    CHECK_EQ_INT(te__await(x), TE_OK);
    CHECK_MSG(strcmp(fake.order, "W") == 0 && settled == 3, "%s, %d", fake.order, settled);
    te__stream *other = te__stream_create(te);
    forget_order();
    CHECK_EQ_INT(te__copy_out(other, p, 0, x), TE_OK); /* the block and the buffer are the first stream's so far */
    CHECK_MSG(strcmp(fake.order, "Rwwwdr") == 0, "%s", fake.order);
    CHECK(x->buffer->used == p->used && x->buffer->used->stream == other);
    te->cuda->settle = NULL;
    CHECK_OK(te);
    CHECK_EQ_INT(fake.depth, 0);
    te_ctx_destroy(te); /* takes streams, events and pinned memory with it */
}

/* Ids that kernels have counted are the error of the call that waits for them, once; whatever does not wait says nothing. */
TE_TEST(stream_waits_tell_ids_out_of_range) {
    install_driver();
    te_ctx *te = open_paper_gpu();
    te_tensor *x = te_tensor_zeros(te, TE_F32, SHAPE(4));
    float host[4];
    REQUIRE_OK(te);
    for (int way = 0; way < 4; way++) {
        te__outside *o = &te->cuda->outside[way % TE__OUTSIDE_COUNT];
        o->count = 3, o->id = 50257, o->place = 7, o->bound = 50257;
        CHECK(te_tensor_zeros(te, TE_F32, SHAPE(4)) && te_ok(te) && o->count == 3); /* queued: nothing waits */
        double item = way == 3 ? te_tensor_item(te_tensor_narrow(x, 0, 0, 1)) : NAN;
        te_result result = way == 0 ? te_synchronize(te) : way == 1 ? te_tensor_to_host(x, host) : way == 2 ? te_graph_begin(te) : te_error_code(te);
        CHECK(item != item);
        CHECK_EQ_INT(result, TE_ERR_INVALID);
        CHECK(!te->capture && o->count == 0);
        CHECK_ERROR(te, TE_ERR_INVALID, "were out of range, and counted as zeros; one of them: ");
        CHECK_EQ_INT(te_synchronize(te), TE_OK);
    }
    te_ctx_destroy(te);
    CHECK_EQ_INT(fake.pinned, 0);
}

/* A block that another stream still uses goes to nobody. */
TE_TEST(stream_memory_is_deferred) {
    install_driver();
    te_ctx *te = open_paper_gpu();
    te__stream *s = te__stream_create(te);
    te__pinned *p = te__pinned_take(te, 4096);
    te_tensor *x = te_tensor_empty(te, TE_F32, SHAPE(1024)), *y;
    void *block = te_tensor_data(x);
    int allocations = fake.allocations;
    CHECK_EQ_INT(te__copy_out(s, p, 0, x), TE_OK);
    fake.busy = true;
    te__drop(x);
    CHECK_EQ_INT(te_memory_get_stats(te).allocated, 0);
    y = te_tensor_empty(te, TE_F32, SHAPE(1024));
    CHECK(te_tensor_data(y) != block);
    CHECK_EQ_INT(fake.allocations, allocations + 1);
    fake.busy = false;
    x = te_tensor_empty(te, TE_F32, SHAPE(1024)); /* the copy has run */
    CHECK(te_tensor_data(x) == block);
    CHECK_EQ_INT(fake.allocations, allocations + 1);

    /* a copy that has run defers nothing */
    CHECK_EQ_INT(te__copy_out(s, p, 0, x), TE_OK);
    te__drop(x);
    x = te_tensor_empty(te, TE_F32, SHAPE(1024));
    CHECK(te_tensor_data(x) == block && !te->pool.pending);

    /* nor where the context's own stream waits for it: only that one will use the block */
    int waits;
    CHECK_EQ_INT(te__copy_out(s, p, 0, x), TE_OK);
    fake.busy = true;
    CHECK_EQ_INT(te__await(x), TE_OK);
    te__drop(x);
    x = te_tensor_empty(te, TE_F32, SHAPE(1024));
    CHECK(te_tensor_data(x) == block && !te->pool.pending && fake.busy);
    /* a write waits for the copy that reads the old values, on the device and once */
    CHECK_EQ_INT(te__copy_out(s, p, 0, x), TE_OK);
    forget_order();
    fake.watch = true;
    te_tensor_touch(x);
    te_tensor_touch(x);
    for (waits = 0; fake.order[waits] == 'W'; waits++) {}
    CHECK_MSG(waits == 1 && !fake.order[1], "%s", fake.order);
    fake.watch = fake.busy = false;

    /* where memory is out, the host waits for what is deferred */
    CHECK_EQ_INT(te__copy_out(s, p, 0, x), TE_OK);
    fake.busy = true;
    te__drop(x);
    CHECK(te->pool.pending != NULL);
    fake.refuse = 2;
    x = te_tensor_empty(te, TE_F32, SHAPE(4096));
    CHECK(x && !fake.busy && !te->pool.pending);
    CHECK_EQ_INT(fake.allocations, allocations + 1); /* the deferred block went back to the driver */

    /* te_memory_trim waits as well, and gives pinned blocks back that nobody has */
    CHECK_EQ_INT(te__copy_out(s, p, 0, y), TE_OK);
    fake.busy = true;
    te__drop(y);
    te__pinned_give(p);
    te_memory_trim(te);
    CHECK(!te->pool.pending && fake.pinned == 1); /* the context's counts of ids out of range */
    CHECK_EQ_INT(fake.allocations, allocations);
    CHECK_OK(te);
    te_ctx_destroy(te);
}

static int released_while_busy;
static void foreign_release(void *user) {
    (void)user;
    released_while_busy += fake.busy;
}
/* A stream that ends before its memory, and a context that ends before both. */
TE_TEST(stream_ends_first) {
    install_driver();
    char memory[4096];
    te_ctx *te = open_paper_gpu();
    te__stream *s = te__stream_create(te);
    te__pinned *p = te__pinned_take(te, 4096);
    te_tensor *x = te_tensor_empty(te, TE_F32, SHAPE(1024)), *f = te_tensor_wrap(te, TE_F32, SHAPE(1024), memory, foreign_release, NULL);
    released_while_busy = 0;
    CHECK_EQ_INT(te__copy_out(s, p, 0, x), TE_OK);
    CHECK_EQ_INT(te__copy_out(s, p, 0, f), TE_OK);
    fake.busy = true;
    te__drop(f); /* foreign memory: the host waits */
    CHECK_EQ_INT(released_while_busy, 0);
    int syncs = fake.syncs;
    te__stream_destroy(s);
    CHECK(fake.syncs == syncs + 1 && fake.streams == 1);
    CHECK_EQ_INT(te__await(x), TE_OK);
    fake.busy = true;
    te__drop(x);
    te__stream_destroy(NULL);
    s = te__stream_create(te); /* at the same address, perhaps */
    x = te_tensor_empty(te, TE_F32, SHAPE(1024));
    CHECK_EQ_INT(te__copy_in(s, x, p, 0), TE_OK);
    syncs = fake.syncs;
    CHECK_EQ_INT(te_synchronize(te), TE_OK);
    CHECK_EQ_INT(fake.syncs, syncs + 2); /* both streams */
    CHECK_OK(te);
    te_ctx_destroy(te);
}

/* The driver refuses: one error each, nothing lost, and the next try succeeds. */
TE_TEST(stream_refusals) {
    install_driver();
    te_ctx *te = open_paper_gpu();
    fake.refuse = 999;
    CHECK(!te__stream_create(te));
    CHECK_ERROR(te, TE_ERR_DEVICE, "cuStreamCreateWithPriority");
    te__stream *s = te__stream_create(te);
    te__pinned *p = te__pinned_take(te, 100);
    te_tensor *x = te_tensor_empty(te, TE_F32, SHAPE(16)), *big = te_tensor_empty(te, TE_F32, SHAPE(4000));
    fake.refuse = 999;
    CHECK_EQ_INT(te__copy_out(s, p, 0, x), TE_ERR_DEVICE);
    CHECK_ERROR(te, TE_ERR_DEVICE, "cuEventCreate");
    CHECK_EQ_INT(te__copy_out(s, p, 0, x), TE_OK);
    CHECK_EQ_INT(te__copy_out(s, p, 0, x), TE_OK);
    fake.refuse = 999; /* of the wait: there are events enough */
    CHECK_EQ_INT(te__copy_out(s, p, 0, x), TE_ERR_DEVICE);
    CHECK_ERROR(te, TE_ERR_DEVICE, "cuStreamWaitEvent");
    CHECK_EQ_INT(te__copy_out(s, p, 0, big), TE_ERR_SHAPE);
    CHECK_ERROR(te, TE_ERR_SHAPE, "[4000] needs 16000 bytes from byte 0 on; the block has 4096");
    CHECK_EQ_INT(te__copy_in(s, x, p, 4050), TE_ERR_SHAPE);
    CHECK_ERROR(te, TE_ERR_SHAPE, "from byte 4050 on");
    fake.fault = 700; /* a kernel has failed: what is released does not wait for ever */
    te__event *e = x->buffer->used;
    e->pending = true;
    te__drop(x);
    CHECK(!te->pool.pending);
    CHECK_ERROR(te, TE_ERR_DEVICE, "cuEventQuery");
    fake.fault = 0;
    te_ctx_destroy(te);
}

/* ---- on real devices ---------------------------------------------------------------------------------------------- */

/* Out, released, overwritten by others, and back. */
TE_TEST_DEVICES(stream_round_trips) {
    enum { N = 1 << 20, TENSORS = 4, ROUNDS = 6 };
    te__stream *s = te__stream_create(te);
    te__pinned *p[TENSORS];
    REQUIRE(s);
    for (int round = 0; round < ROUNDS; round += test_every(3)) {
        te_scope_begin(te);
        for (int i = 0; i < TENSORS; i++) {
            te_scope_begin(te);
            te_tensor *x = te_tensor_full(te, TE_F32, SHAPE(N), 100 * round + i);
            p[i] = te__pinned_take(te, te_tensor_bytes(x));
            REQUIRE(p[i]);
            CHECK_EQ_INT(te__copy_out(s, p[i], 0, x), TE_OK);
            te_scope_end(te); /* x goes while it is copied */
            te_scope_begin(te);
            te_tensor_full(te, TE_F32, SHAPE(N), -1);
            te_tensor_full(te, TE_F32, SHAPE(N), -2);
            te_scope_end(te);
        }
        for (int i = TENSORS - 1; i >= 0; i--) {
            te_tensor *y = te_tensor_full(te, TE_F32, SHAPE(N), -3);
            uint64_t version = te_tensor_version(y);
            CHECK_EQ_INT(te__copy_in(s, y, p[i], 0), TE_OK);
            CHECK(te_tensor_version(y) > version);
            CHECK_EQ_INT(te__await(y), TE_OK);
            te_tensor *z = te_tensor_full(te, TE_F32, SHAPE(N), 0);
            te_tensor_copy(z, y); /* an operation reads it */
            const float *back = test_read(z);
            CHECK_MSG(back[0] == (float)(100 * round + i) && back[N - 1] == back[0] && back[N / 2] == back[0], "round %d, tensor %d: %g", round, i, (double)back[0]);
            te__pinned_give(p[i]);
        }
        te_scope_end(te);
    }
    CHECK_OK(te);
    int blocks = 0;
    for (te__pinned *q = te->pinned; q; q = q->next) blocks++;
    CHECK_EQ_INT(blocks, TENSORS); /* each round took those of the one before */
    te__stream_destroy(s);
}

/* No elements; parts of a block; a capture. */
TE_TEST_DEVICES(stream_edges) {
    te__stream *s = te__stream_create(te);
    te__pinned *p = te__pinned_take(te, 64);
    const float values[4] = {1, 2, 3, 4};
    te_tensor *none = te_tensor_empty(te, TE_F32, SHAPE(0)), *x = test_tensor(te, TE_F32, SHAPE(4), values), *y = te_tensor_zeros(te, TE_F32, SHAPE(2, 4));
    CHECK_EQ_INT(te__copy_out(s, p, 0, none), TE_OK);
    CHECK_EQ_INT(te__copy_out(s, p, 0, x), TE_OK);
    CHECK_EQ_INT(te__copy_out(s, p, 16, x), TE_OK);
    CHECK_EQ_INT(te__pinned_wait(p), TE_OK);
    CHECK_BYTES("host", p->data, values, sizeof values);
    CHECK_EQ_INT(te__copy_in(s, y, p, 0), TE_OK);
    CHECK_EQ_INT(te__await(y), TE_OK);
    CHECK_BYTES("second half", test_read(y) + 4, values, sizeof values);
    CHECK_EQ_INT(te__copy_out(s, p, 0, te_tensor_transpose(y, 0, 1)), TE_ERR_SHAPE);
    CHECK_ERROR(te, TE_ERR_SHAPE, "strided");
    CHECK_EQ_INT(te__copy_out(s, p, 0, te_tensor_describe(te, TE_F32, SHAPE(4))), TE_ERR_STATE);
    CHECK_ERROR(te, TE_ERR_STATE, "te_tensor_describe");
    te_graph_begin(te);
    CHECK_EQ_INT(te__copy_out(s, p, 0, x), TE_ERR_STATE);
    CHECK(te_graph_end(te) == NULL);
    CHECK_ERROR(te, TE_ERR_STATE, "copying on a second stream between te_graph_begin and te_graph_end");
    te__pinned_give(p);
    te__pinned_give(NULL);
}
