/* tests/dist/test_exchange.c: te_all_to_all, te_send, te_recv and te_group_abort: values in every format with uneven counts and none; arguments that do not
 * fit; ranks that give up, or that wait for one another; captures; groups of a user's own. */
#include "ranks.h"

#include <time.h>

/* Byte `at` of what rank `from` sends to rank `to`. */
static uint8_t letter(int from, int to, int64_t at) { return (uint8_t)(17 * from + 101 * to + 7 * at + 3); }
/* Lines from one rank to another: anything from 0 on, and none at all in some cases. */
static int64_t lines_of(int from, int to, int seed) { return (from * 3 + to * 5 + seed) % 4; }

static te_tensor *lines_tensor(te_ctx *te, te_dtype dtype, int64_t lines, int64_t columns, const uint8_t *bytes) {
    int64_t shape[2] = {lines, columns};
    return bytes ? te_tensor_from_host(te, dtype, 2, shape, bytes) : te_tensor_zeros(te, dtype, 2, shape);
}

/* ---- all to all --------------------------------------------------------------------------------------------------- */

static const te_dtype formats[] = {TE_F32, TE_F16, TE_BF16, TE_F8E4M3, TE_F8E5M2, TE_F8E8M0, TE_F4E2M1, TE_I32, TE_I64, TE_U8};

static void exchange_one(rank_state *s, te_dtype dtype, int64_t columns, int seed, bool even) {
    int64_t send[MAX_RANKS], recv[MAX_RANKS], out_lines = 0, x_lines = 0, line = (columns * te_dtype_bits(dtype) + 7) / 8;
    uint8_t *x_bytes, *want, *got, *at;
    te_scope_begin(s->te);
    for (int k = 0; k < s->size; k++) {
        send[k] = even ? seed : lines_of(s->rank, k, seed);
        recv[k] = even ? seed : lines_of(k, s->rank, seed);
        x_lines += send[k];
        out_lines += recv[k];
    }
    at = x_bytes = (uint8_t *)calloc((size_t)(x_lines * line) + 1, 1);
    for (int k = 0; k < s->size; k++)
        for (int64_t i = 0; i < send[k] * line; i++) *at++ = letter(s->rank, k, i);
    at = want = (uint8_t *)calloc((size_t)(out_lines * line) + 1, 1);
    for (int k = 0; k < s->size; k++)
        for (int64_t i = 0; i < recv[k] * line; i++) *at++ = letter(k, s->rank, i);
    got = (uint8_t *)calloc((size_t)(out_lines * line) + 1, 1);
    te_tensor *x = lines_tensor(s->te, dtype, x_lines, columns, x_bytes), *out = lines_tensor(s->te, dtype, out_lines, columns, NULL);
    uint64_t version = te_tensor_version(out), read = te_tensor_version(x);
    EXPECT(s, te_all_to_all(s->group, x, even ? NULL : send, out, even ? NULL : recv) == TE_OK);
    EXPECT(s, te_tensor_version(out) > version && te_tensor_version(x) == read);
    te_tensor_to_host(out, got);
    if (memcmp(got, want, (size_t)(out_lines * line)) != 0) wrong(s, te_dtype_name(dtype));
    free(x_bytes);
    free(want);
    free(got);
    te_scope_end(s->te);
}
static void exchange_all(rank_state *s) {
    for (int f = 0; f < COUNT(formats); f++)
        for (int64_t columns = 0; columns <= 9; columns += 3)
            for (int seed = 0; seed < 4; seed++) {
                exchange_one(s, formats[f], columns, seed, false);
                exchange_one(s, formats[f], columns, seed, true);
            }
}
TE_TEST(all_to_all) {
    for (int size = 2; size <= 5; size++) run_ranks(size, exchange_all, NULL);
}
TE_TEST_DEVICES(exchange_on_devices) {
    const char *device = te_ctx_device(te);
    run_ranks_on(device, false, 2, exchange_all, NULL);
    run_ranks_on(device, true, 3, exchange_all, NULL);
}

/* Alone, it is a copy. */
TE_TEST_DEVICES(all_to_all_alone) {
    const float values[6] = {1, 2, 3, 4, 5, 6};
    const int64_t three = 3, two = 2;
    te_tensor *x = test_tensor(te, TE_F32, SHAPE(3, 2), values), *out = test_guarded(te, TE_F32, SHAPE(3, 2));
    CHECK_EQ_INT(te_all_to_all(NULL, x, &three, out, NULL), TE_OK);
    CHECK_BYTES("out", test_read_bytes(out), values, sizeof values);
    CHECK_EQ_INT(te_all_to_all(NULL, x, &two, out, NULL), TE_ERR_SHAPE);
    CHECK_ERROR(te, TE_ERR_SHAPE, "the sum of send_counts is 2 and x is [3, 2]");
    CHECK_EQ_INT(te_all_to_all(NULL, x, NULL, x, NULL), TE_ERR_INVALID);
    CHECK_ERROR(te, TE_ERR_INVALID, "share memory");
    CHECK_EQ_INT(te_send(NULL, x, 0), TE_ERR_INVALID);
    CHECK_ERROR(te, TE_ERR_INVALID, "te_send: to is 0; it names another rank than this one, 0 of 1");
    CHECK_EQ_INT(te_group_abort(NULL, "x"), TE_OK);
    CHECK_OK(te);
}

/* ---- send and receive --------------------------------------------------------------------------------------------- */

/* Everybody sends to everybody, some messages to each, then receives, in another order of ranks. Collectives in between do not matter. */
static void mesh(rank_state *s) {
    enum { MESSAGES = 3 };
    for (int f = 0; f < COUNT(formats); f++) {
        te_scope_begin(s->te);
        int64_t columns = 5, line = (columns * te_dtype_bits(formats[f]) + 7) / 8;
        uint8_t bytes[4 * 8 * 5];
        for (int m = 0; m < MESSAGES; m++)
            for (int to = 0; to < s->size; to++) {
                for (int64_t i = 0; i < m * line; i++) bytes[i] = letter(s->rank, to, i + m);
                if (to != s->rank) EXPECT(s, te_send(s->group, lines_tensor(s->te, formats[f], m, columns, bytes), to) == TE_OK);
            }
        if (f == 0) EXPECT(s, te_barrier(s->group) == TE_OK);
        for (int from = s->size - 1; from >= 0; from--)
            for (int m = 0; m < MESSAGES && from != s->rank; m++) {
                te_tensor *x = lines_tensor(s->te, formats[f], m, columns, NULL);
                uint64_t version = te_tensor_version(x);
                EXPECT(s, te_recv(s->group, x, from) == TE_OK && te_tensor_version(x) > version);
                te_tensor_to_host(x, bytes);
                for (int64_t i = 0; i < m * line; i++) EXPECT(s, bytes[i] == letter(from, s->rank, i + m));
            }
        te_scope_end(s->te);
    }
}
/* A ring in which each rank receives before it sends, but for one. */
static void ring(rank_state *s) {
    int next = (s->rank + 1) % s->size, before = (s->rank + s->size - 1) % s->size;
    for (int round = 0; round < 50; round++) {
        float sum = (float)round;
        te_scope_begin(s->te);
        te_tensor *x = te_tensor_from_host(s->te, TE_F32, 0, NULL, &sum);
        if (s->rank == 0) EXPECT(s, te_send(s->group, x, next) == TE_OK);
        EXPECT(s, te_recv(s->group, x, before) == TE_OK);
        te_tensor_to_host(x, &sum);
        EXPECT(s, sum == (float)(round + (s->rank == 0 ? s->size : s->rank) - 1));
        sum += 1;
        te_tensor_copy_from_host(x, &sum);
        if (s->rank != 0) EXPECT(s, te_send(s->group, x, next) == TE_OK);
        te_scope_end(s->te);
    }
}
TE_TEST(send_and_receive) {
    for (int size = 2; size <= 5; size++) {
        run_ranks(size, mesh, NULL);
        run_ranks(size, ring, NULL);
    }
}
TE_TEST_DEVICES(send_on_devices) {
    run_ranks_on(te_ctx_device(te), false, 2, mesh, NULL);
    run_ranks_on(te_ctx_device(te), true, 3, mesh, NULL);
}

/* ---- arguments that do not fit ------------------------------------------------------------------------------------ */

static void goes_on(rank_state *s) {
    float mine = (float)(s->rank + 1), got = 0;
    int64_t one = 1;
    te_tensor *x = te_tensor_from_host(s->te, TE_F32, 1, &one, &mine);
    EXPECT(s, te_all_reduce(s->group, x, TE_REDUCE_SUM) == TE_OK);
    te_tensor_to_host(x, &got);
    EXPECT(s, got == (float)(s->size * (s->size + 1) / 2));
}

typedef enum odd_kind { ODD_DTYPE, ODD_LINE, ODD_COUNT, ODD_SUM, ODD_NEGATIVE, ODD_UNEVEN, ODD_DIMS, ODD_OVERLAP, ODD_NULL, ODD_CALL, ODD_KINDS } odd_kind;
static const struct {
    te_result code;
    const char *needle;
} odd_story[ODD_KINDS] = {
    {TE_ERR_DTYPE, "all ranks must use one format"},
    {TE_ERR_SHAPE, "all ranks must bring lines of the same size"},
    {TE_ERR_SHAPE, "lines to rank"},
    {TE_ERR_SHAPE, "the sum of send_counts is 5 and x is [6, 2]"},
    {TE_ERR_SHAPE, "send_counts[1] is -1"},
    {TE_ERR_SHAPE, "without send_counts its first size must be a multiple of the 3 ranks"},
    {TE_ERR_SHAPE, "lines along the first dimension"},
    {TE_ERR_INVALID, "share memory"},
    {TE_ERR_STATE, "NULL"},
    {TE_ERR_STATE, "te_all_to_all"},
};
static void odd_exchange(rank_state *s) {
    odd_kind kind = *(const odd_kind *)s->arg;
    bool odd = s->rank == 1;
    int64_t counts[3] = {2, 2, 2}, other[3] = {2, 2, 2}, lines = odd && kind == ODD_UNEVEN ? 7 : 6, columns = odd && kind == ODD_LINE ? 3 : 2;
    te_dtype dtype = odd && kind == ODD_DTYPE ? TE_BF16 : TE_F32;
    te_tensor *x = lines_tensor(s->te, dtype, lines, columns, NULL), *out = lines_tensor(s->te, dtype, 6, columns, NULL);
    if (odd && kind == ODD_COUNT) counts[0] = 3, counts[2] = 1;
    if (odd && kind == ODD_SUM) counts[2] = 1;
    if (odd && kind == ODD_NEGATIVE) counts[1] = -1;
    if (odd && kind == ODD_DIMS) x = out = te_tensor_zeros(s->te, dtype, 0, NULL);
    if (odd && kind == ODD_OVERLAP) x = out;
    if (odd && kind == ODD_NULL) x = NULL;
    if (odd && kind == ODD_CALL) s->result = te_all_reduce(s->group, x, TE_REDUCE_SUM);
    else s->result = te_all_to_all(s->group, x, odd && kind == ODD_UNEVEN ? NULL : counts, out, other);
    snprintf(s->error, sizeof s->error, "%s", te_error(s->te));
    te_clear_error(s->te);
    goes_on(s);
}
TE_TEST(exchanges_that_do_not_fit) {
    for (int kind = 0; kind < ODD_KINDS; kind++) {
        odd_kind arg = (odd_kind)kind;
        test_case("case %d", kind);
        rank_state *all = run_ranks(3, odd_exchange, &arg);
        for (int k = 0; k < 3; k++) {
            /* a tensor without dimensions shares its memory with itself: either complaint will do */
            if (kind != ODD_DIMS) CHECK_STR(te_result_name(all[k].result), te_result_name(odd_story[kind].code));
            if (kind != ODD_DIMS && !(kind == ODD_NULL && k == 1)) CHECK_STR(all[k].error, odd_story[kind].needle);
            if (kind == ODD_DIMS) CHECK(all[k].result != TE_OK);
        }
    }
}

/* Messages that do not fit, or could not be sent, or not be received: one error, and the next message is the next one. */
static void odd_messages(rank_state *s) {
    int64_t three = 3, four = 4, minus = -1;
    te_tensor *x = te_tensor_zeros(s->te, TE_F32, 1, &three), *y = te_tensor_zeros(s->te, TE_BF16, 1, &three), *z = te_tensor_zeros(s->te, TE_F32, 1, &four);
    te_result r[3];
    if (s->rank == 0) {
        EXPECT(s, te_send(s->group, y, 1) == TE_OK);
        EXPECT(s, te_send(s->group, z, 1) == TE_OK);
        EXPECT(s, te_send(s->group, NULL, 1) == TE_ERR_STATE);
        EXPECT(s, te_send(s->group, te_tensor_zeros(s->te, TE_F32, 1, &minus), 1) == TE_ERR_STATE);
        te_clear_error(s->te);
        EXPECT(s, te_send(s->group, x, 1) == TE_OK); /* to a rank that cannot take it */
        EXPECT(s, te_send(s->group, x, 0) == TE_ERR_INVALID && strstr(te_error(s->te), "0 of 2"));
        te_clear_error(s->te);
    } else {
        r[0] = te_recv(s->group, x, 0);
        EXPECT(s, r[0] == TE_ERR_DTYPE && strstr(te_error(s->te), "rank 0 sends bf16 [3] and this rank receives f32 [3]"));
        te_clear_error(s->te);
        r[1] = te_recv(s->group, x, 0);
        EXPECT(s, r[1] == TE_ERR_SHAPE && strstr(te_error(s->te), "rank 0 sends f32 [4] and this rank receives f32 [3]"));
        te_clear_error(s->te);
        r[2] = te_recv(s->group, x, 0);
        EXPECT(s, r[2] == TE_ERR_STATE && strstr(te_error(s->te), "rank 0 failed: it was given NULL"));
        te_clear_error(s->te);
        EXPECT(s, te_recv(s->group, x, 0) == TE_ERR_STATE && strstr(te_error(s->te), "negative size"));
        te_clear_error(s->te);
        EXPECT(s, te_recv(s->group, NULL, 0) == TE_ERR_STATE); /* x of rank 0, before or after it was sent */
        EXPECT(s, te_recv(s->group, x, 5) == TE_ERR_INVALID && strstr(te_error(s->te), "from is 5"));
        te_clear_error(s->te);
    }
    goes_on(s);
    mesh(s);
}
TE_TEST(messages_that_do_not_fit) {
    for (int round = 0; round < 20; round++) run_ranks(2, odd_messages, NULL);
}

/* ---- ranks that give up, or wait for one another ------------------------------------------------------------------ */

static void sleep_a_little(void) {
    struct timespec t = {0, 20000000};
    nanosleep(&t, NULL);
}

/* On three ranks: each but `except` ends with an error that holds both texts. */
static void all_are_told(void (*fn)(rank_state *s), const void *arg, int except, const char *text, const char *more) {
    rank_state *all = run_ranks(3, fn, arg);
    for (int k = 0; k < 3; k++) {
        if (k == except) continue;
        CHECK_EQ_INT(all[k].result, TE_ERR_STATE);
        CHECK_STR(all[k].error, text);
        CHECK_STR(all[k].error, more);
    }
}

typedef enum end_kind { END_ABORT, END_ABORT_RECV, END_ABORT_LATER, END_LEAVE_RECV, END_CONTEXT, END_KINDS } end_kind;
static void ends(rank_state *s) {
    end_kind kind = *(const end_kind *)s->arg;
    int64_t six = 6;
    te_tensor *x = te_tensor_zeros(s->te, TE_F32, 1, &six);
    EXPECT(s, te_barrier(s->group) == TE_OK);
    if (s->rank == 1) {
        if (kind == END_ABORT_LATER) sleep_a_little();
        if (kind == END_LEAVE_RECV) { /* what was sent before still comes */
            EXPECT(s, te_send(s->group, x, 0) == TE_OK && te_send(s->group, x, 2) == TE_OK);
            return;
        }
        if (kind == END_CONTEXT) { /* the group goes with its context */
            te_scope_end(s->te);
            te_ctx_destroy(s->te);
            te_ctx_desc desc = {0};
            desc.device = "cpu";
            desc.log = no_log;
            s->te = te_ctx_create(&desc);
            te_scope_begin(s->te);
            s->group = NULL;
            return;
        }
        EXPECT(s, te_group_abort(s->group, "the loss is NaN") == TE_OK);
        EXPECT(s, te_group_abort(s->group, "another reason") == TE_OK);
    }
    if (kind == END_LEAVE_RECV) EXPECT(s, te_recv(s->group, x, 1) == TE_OK);
    if (kind == END_ABORT_RECV || kind == END_LEAVE_RECV) note(s, te_recv(s->group, x, s->rank == 1 ? 0 : 1));
    else note(s, te_all_reduce(s->group, x, TE_REDUCE_SUM));
    if (kind == END_LEAVE_RECV || kind == END_CONTEXT) return;
    EXPECT(s, te_barrier(s->group) == TE_ERR_STATE); /* and every later call */
    te_clear_error(s->te);
    EXPECT(s, te_send(s->group, x, s->rank == 1 ? 0 : 1) == TE_ERR_STATE);
    te_clear_error(s->te);
}
TE_TEST(groups_that_end) {
    for (int kind = 0; kind < END_KINDS; kind++)
        for (int round = 0; round < 10; round++) {
            end_kind arg = (end_kind)kind;
            test_case("case %d", kind);
            bool leaves = kind == END_LEAVE_RECV || kind == END_CONTEXT;
            all_are_told(ends, &arg, leaves ? 1 : -1, leaves ? "has left the group" : "rank 1 has aborted the group (te_group_abort): the loss is NaN", "");
        }
}

/* After an abort all leave, and the hub is as new. */
TE_TEST(a_hub_after_an_abort) {
    te_ctx *te[2] = {test_context("cpu"), test_context("cpu")};
    te_thread_hub *hub = te_thread_hub_create(2);
    te_group *group[2];
    int64_t two = 2;
    for (int round = 0; round < 2; round++) {
        for (int k = 0; k < 2; k++) group[k] = te_thread_group_create(te[k], hub, k);
        REQUIRE(group[0] && group[1]);
        CHECK_EQ_INT(te_send(group[0], te_tensor_zeros(te[0], TE_F32, 1, &two), 1), TE_OK); /* nobody takes it */
        CHECK_EQ_INT(te_group_abort(group[1], NULL), TE_OK);
        CHECK_EQ_INT(te_recv(group[1], te_tensor_zeros(te[1], TE_F32, 1, &two), 0), TE_ERR_STATE);
        CHECK_ERROR(te[1], TE_ERR_STATE, "rank 1 has aborted the group (te_group_abort): no reason was given");
        for (int k = 0; k < 2; k++) te_group_destroy(group[k]);
    }
    for (int k = 0; k < 2; k++) group[k] = te_thread_group_create(te[k], hub, k);
    CHECK_OK(te[0]);
    CHECK_EQ_INT(te_send(group[0], te_tensor_zeros(te[0], TE_F32, 1, &two), 1), TE_OK);
    CHECK_EQ_INT(te_recv(group[1], te_tensor_zeros(te[1], TE_F32, 1, &two), 0), TE_OK); /* the only message there is */
    for (int k = 0; k < 2; k++) te_group_destroy(group[k]);
    te_thread_hub_destroy(hub);
}

/* Waits that no other call will end: every rank of the circle is told of all of it. */
typedef enum stuck_kind { STUCK_CIRCLE, STUCK_MEETING, STUCK_CHAIN, STUCK_KINDS } stuck_kind;
static void stuck(rank_state *s) {
    stuck_kind kind = *(const stuck_kind *)s->arg;
    int64_t six = 6;
    te_tensor *x = te_tensor_zeros(s->te, TE_F32, 1, &six);
    bool receives = kind == STUCK_CIRCLE || (kind == STUCK_MEETING ? s->rank == 0 : s->rank < 2);
    note(s, receives ? te_recv(s->group, x, (s->rank + 1) % s->size) : te_all_reduce(s->group, x, TE_REDUCE_SUM));
    goes_on(s);
}
TE_TEST(ranks_that_wait_for_one_another) {
    static const char *const needle[STUCK_KINDS] = {"rank 2 waits in te_recv for rank 0", "rank 1 waits in te_all_reduce for all ranks", "rank 2 waits in te_all_reduce for all ranks"};
    for (int kind = 0; kind < STUCK_KINDS; kind++)
        for (int round = 0; round < 20; round++) {
            stuck_kind arg = (stuck_kind)kind;
            test_case("case %d", kind);
            all_are_told(stuck, &arg, -1, "no rank can go on: rank 0 waits in te_recv for rank 1;", needle[kind]);
        }
}

/* Two wait for each other, and the third leaves. */
static void stuck_pair(rank_state *s) {
    int64_t six = 6;
    te_tensor *x = te_tensor_zeros(s->te, TE_F32, 1, &six);
    if (s->rank == 2) sleep_a_little();
    else note(s, te_recv(s->group, x, 1 - s->rank));
}
TE_TEST(two_ranks_wait_for_each_other_and_one_leaves) {
    rank_state *all = run_ranks(3, stuck_pair, NULL);
    for (int k = 0; k < 2; k++) {
        CHECK_EQ_INT(all[k].result, TE_ERR_STATE);
        CHECK(strstr(all[k].error, "rank 0 waits in te_recv for rank 1; rank 1 waits in te_recv for rank 0") || strstr(all[k].error, "has left the group"));
    }
}

/* ---- captures ----------------------------------------------------------------------------------------------------- */

/* Nothing runs in a capture, and all hear of it. */
static void captured(rank_state *s) {
    int64_t six = 6;
    te_tensor *x = te_tensor_zeros(s->te, TE_F32, 1, &six);
    if (s->rank == 1) te_graph_begin(s->te);
    note(s, te_all_reduce(s->group, x, TE_REDUCE_SUM));
    if (s->rank == 1) {
        EXPECT(s, te_graph_end(s->te) == NULL);
        te_clear_error(s->te);
    }
    goes_on(s);
}
TE_TEST_DEVICES(captures_are_refused) {
    rank_state *all = run_ranks_on(te_ctx_device(te), false, 2, captured, NULL);
    for (int k = 0; k < 2; k++) {
        CHECK_EQ_INT(all[k].result, TE_ERR_STATE);
        CHECK_STR(all[k].error, "te_all_reduce over group \"threads\", which does not queue its work on the stream, between te_graph_begin and te_graph_end");
    }
}

/* ---- groups of a user's own --------------------------------------------------------------------------------------- */

typedef struct own {
    te_ctx *te;
    int calls;
    int64_t send[3], recv[3];
    char reason[64];
} own;
static te_result own_all_reduce(void *user, te_ctx *te, te_tensor *x, te_reduce_op op) {
    (void)op;
    ((own *)user)->calls++;
    return te_op_fill(te, &(te_op_fill_args){.dst = x, .value = 7});
}
static te_result own_two(void *user, te_ctx *te, const te_tensor *x, te_tensor *out) {
    (void)user, (void)te, (void)x, (void)out;
    return TE_OK;
}
static te_result own_broadcast(void *user, te_ctx *te, te_tensor *x, int root) {
    (void)user, (void)te, (void)x, (void)root;
    return TE_OK;
}
static te_result own_barrier(void *user) {
    (void)user;
    return TE_OK;
}
static te_result own_all_to_all(void *user, te_ctx *te, const te_tensor *x, const int64_t *send, te_tensor *out, const int64_t *recv) {
    own *o = (own *)user;
    (void)te, (void)x, (void)out;
    memcpy(o->send, send, sizeof o->send);
    memcpy(o->recv, recv, sizeof o->recv);
    return TE_OK;
}
static te_result own_send(void *user, te_ctx *te, const te_tensor *x, int to) {
    (void)te, (void)x;
    ((own *)user)->calls = 100 + to;
    return TE_OK;
}
static te_result own_recv(void *user, te_ctx *te, te_tensor *x, int from) {
    (void)te, (void)x;
    ((own *)user)->calls = 200 + from;
    return TE_ERR_IO;
}
static te_result own_abort(void *user, const char *reason) {
    snprintf(((own *)user)->reason, sizeof ((own *)user)->reason, "%s", reason);
    return TE_OK;
}
static te_group_desc own_desc(own *o) {
    te_group_desc d = {0};
    d.name = "mine";
    d.size = 3;
    d.user = o;
    d.all_reduce = own_all_reduce;
    d.all_gather = d.reduce_scatter = own_two;
    d.broadcast = own_broadcast;
    d.barrier = own_barrier;
    return d;
}

TE_TEST_DEVICES(own_group_without_the_optional_functions) {
    own o = {0};
    te_group_desc d = own_desc(&o);
    te_group *g = te_group_create(te, &d);
    te_tensor *x = te_tensor_zeros(te, TE_F32, SHAPE(3, 2)), *out = te_tensor_zeros(te, TE_F32, SHAPE(3, 2));
    CHECK_EQ_INT(te_all_to_all(g, x, NULL, out, NULL), TE_ERR_UNSUPPORTED);
    CHECK_ERROR(te, TE_ERR_UNSUPPORTED, "te_all_to_all: group \"mine\" cannot do that: te_group_desc.all_to_all is NULL");
    CHECK_EQ_INT(te_send(g, x, 1), TE_ERR_UNSUPPORTED);
    CHECK_ERROR(te, TE_ERR_UNSUPPORTED, "te_group_desc.send is NULL");
    CHECK_EQ_INT(te_recv(g, x, 1), TE_ERR_UNSUPPORTED);
    CHECK_ERROR(te, TE_ERR_UNSUPPORTED, "te_group_desc.recv is NULL");
    CHECK_EQ_INT(te_group_abort(g, "why"), TE_ERR_UNSUPPORTED);
    CHECK_ERROR(te, TE_ERR_UNSUPPORTED, "te_group_desc.abort is NULL");
    te_warmup_begin(te); /* nothing is made, so nothing is missing */
    CHECK_EQ_INT(te_send(g, x, 1), TE_OK);
    CHECK_EQ_INT(te_all_to_all(g, x, NULL, out, NULL), TE_OK);
    te_warmup_end(te);
    te_group_destroy(g);
}

TE_TEST_DEVICES(own_group_with_them) {
    own o = {0};
    te_group_desc d = own_desc(&o);
    d.all_to_all = own_all_to_all;
    d.send = own_send;
    d.recv = own_recv;
    d.abort = own_abort;
    te_group *g = te_group_create(te, &d);
    te_tensor *x = te_tensor_zeros(te, TE_F32, SHAPE(6, 2)), *out = te_tensor_zeros(te, TE_F32, SHAPE(4, 2));
    CHECK_EQ_INT(te_all_to_all(g, x, NULL, out, (int64_t[]){0, 4, 0}), TE_OK);
    CHECK(o.send[0] == 2 && o.send[1] == 2 && o.send[2] == 2 && o.recv[0] == 0 && o.recv[1] == 4 && o.recv[2] == 0);
    CHECK_EQ_INT(te_send(g, x, 2), TE_OK);
    CHECK_EQ_INT(o.calls, 102);
    CHECK_EQ_INT(te_recv(g, x, 1), TE_ERR_IO);
    CHECK_EQ_INT(o.calls, 201);
    CHECK_ERROR(te, TE_ERR_IO, "te_recv: group \"mine\", rank 0 of 3: it returned TE_ERR_IO");
    CHECK_EQ_INT(te_group_abort(g, "why"), TE_OK);
    CHECK(strcmp(o.reason, "why") == 0);
    te_group_destroy(g);
}

/* A group that only queues is part of the graph, on a GPU, and the graph holds what it reads and writes. */
TE_TEST_DEVICES(own_group_in_a_capture) {
    own o = {0};
    te_group_desc d = own_desc(&o);
    for (int captures = 0; captures < 2; captures++) {
        o.calls = 0;
        d.captures = captures != 0;
        te_group *g = te_group_create(te, &d);
        te_tensor *x = te_tensor_retain(te_tensor_zeros(te, TE_F32, SHAPE(4)));
        te_op_fill(te, &(te_op_fill_args){.dst = x, .value = 1});
        te_synchronize(te);
        uint64_t version = te_tensor_version(x);
        te_graph_begin(te);
        te_result r = te_all_reduce(g, x, TE_REDUCE_SUM);
        te_graph *graph = te_graph_end(te);
        if (!captures) {
            CHECK_EQ_INT(r, TE_ERR_STATE);
            CHECK(!graph && o.calls == 0);
            CHECK_ERROR(te, TE_ERR_STATE, "which does not queue its work on the stream");
        } else {
            const int queued = te_ctx_is_cuda(te); /* on the CPU each launch makes the call */
            CHECK_OK(te);
            CHECK(o.calls == queued && test_read(x)[0] == 1);
            CHECK_EQ_INT(te_graph_launch(graph), TE_OK);
            CHECK(o.calls == 1 && test_read(x)[3] == 7 && te_tensor_version(x) > version);
            te_group_destroy(g);
            g = NULL;
            if (!queued) {
                CHECK_EQ_INT(te_graph_launch(graph), TE_ERR_STATE);
                CHECK_ERROR(te, TE_ERR_STATE, "a group of ranks that it uses was destroyed");
            }
        }
        te_tensor_release(x);
        te_graph_destroy(graph);
        te_group_destroy(g);
    }
}
