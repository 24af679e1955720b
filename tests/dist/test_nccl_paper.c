/* tests/dist/test_nccl_paper.c: a group of processes on a GPU: streams, events, captures and the end of waits, over the
 * driver of paper.h and an NCCL of paper, which moves nothing. Rank 1 is a thread that speaks to the store alone.
 * test_nccl.c has what groups compute. */
#define TE_STATIC
#define TE_IMPLEMENTATION
#include "../te_test.h"
#include "../cuda/paper.h"

/* ---- an NCCL of paper -------------------------------------------------------------------------------------------- */

static struct {
    char order[64]; /* of its calls, and of graphs that end (x); with fake.watch, in fake.order too: C, or c on another
                     * stream */
    size_t count;   /* of the last one */
    int dtype, op;
    int refuse;          /* what the next ncclAllReduce returns, if it is not 0 */
    int64_t aborts;      /* atomic: the watcher aborts */
    int64_t events_wait; /* atomic: no event passes */
    int64_t graphs;      /* atomic: graphs with collectives that there are; NCCL aborts when it is 0 */
    int64_t full;        /* atomic: the stream takes no more until an abort */
    int64_t stuck;       /* atomic: ncclAllReduce waits, or is under way, until an abort */
    int version;
    bool alike; /* ncclAllGather gives zeros, so that ranks that compare texts find them the same */
} paper_nccl;
static pthread_t paper_main;
static __thread struct {
    int depth;
    bool aborts; /* ncclCommAbort was called in the group */
} paper_group;

static void paper_call(char what, size_t count, int dtype, int op, void *stream) {
    size_t n = strlen(paper_nccl.order);
    CHECK(fake.depth > 0);
    CHECK(stream == own_stream || stream == second_stream);
    if (n + 1 < sizeof paper_nccl.order) paper_nccl.order[n] = what;
    if (fake.watch) reached(stream == own_stream ? 'C' : 'c');
    paper_nccl.count = count;
    paper_nccl.dtype = dtype;
    paper_nccl.op = op;
}
static bool paper_blocks(void) { return paper_nccl.version >= 22200; }
static int paper_version(int *version) { return *version = paper_nccl.version, 0; }
static int paper_id(te__nccl_id *id) { return memset(id, 7, sizeof *id), 0; }
static int paper_init(te__nccl_comm **comm, int size, te__nccl_id id, int rank, te__nccl_config *config) {
    CHECK(size == 2 && rank == 0 && id.bytes[5] == 7 && config->blocking == paper_blocks() && paper_group.depth == 1);
    *comm = (te__nccl_comm *)&paper_nccl;
    return 0;
}
static int paper_split(te__nccl_comm *comm, int color, int key, te__nccl_comm **part, te__nccl_config *config) {
    (void)comm, (void)color, (void)key, (void)config;
    *part = NULL;
    return 4;
}
static int paper_end(te__nccl_comm *comm) {
    CHECK(comm == (te__nccl_comm *)&paper_nccl);
    strcat(paper_nccl.order, "f");
    return 0;
}
/* NCCL takes the communicator's memory away here, or at the end of the group. Nobody may use it then. */
static void paper_reclaim(void) {
    CHECK(!paper_blocks() || !te__atomic_load(&paper_nccl.stuck));
    for (int i = 0; i < 10000 && te__atomic_load(&paper_nccl.graphs); i++) te__sleep(0.001);
    CHECK_EQ_INT(te__atomic_load(&paper_nccl.graphs), 0);
}
static int paper_abort(te__nccl_comm *comm) {
    CHECK(comm == (te__nccl_comm *)&paper_nccl);
    CHECK(paper_group.depth == paper_blocks());
    te__atomic_add(&paper_nccl.aborts, 1);
    if (paper_group.depth) paper_group.aborts = true;
    else paper_reclaim();
    return 0;
}
/* The watcher has another thread call it. */
static void wait_for_aborts(int count) {
    for (int i = 0; i < 10000 && te__atomic_load(&paper_nccl.aborts) < count; i++) te__sleep(0.001);
    CHECK_EQ_INT(te__atomic_load(&paper_nccl.aborts), count);
}
static int paper_error(te__nccl_comm *comm, int *error) {
    (void)comm, *error = te__atomic_load(&paper_nccl.stuck) ? TE__NCCL_IN_PROGRESS : 0;
    CHECK(paper_blocks() || !te__atomic_load(&paper_nccl.aborts));
    return 0;
}
static const char *paper_text(int code) { return code ? "torn" : "fine"; }
static const char *paper_last(te__nccl_comm *comm) { return (void)comm, ""; }
static int paper_reduce(const void *x, void *out, size_t count, int dtype, int op, te__nccl_comm *comm, void *stream) {
    (void)comm;
    CHECK(x == out);
    paper_call('a', count, dtype, op, stream);
    if (paper_nccl.refuse || !paper_blocks()) return paper_nccl.refuse ? paper_nccl.refuse : TE__NCCL_IN_PROGRESS;
    for (int i = 0; i < 10000 && te__atomic_load(&paper_nccl.stuck) && !te__atomic_load(&paper_nccl.aborts); i++)
        te__sleep(0.001);
    if (!te__atomic_load(&paper_nccl.stuck)) return 0;
    te__sleep(0.02); /* the call has not returned yet, and may still read the communicator */
    te__atomic_store(&paper_nccl.stuck, 0);
    return 3;
}
static int paper_gather(const void *x, void *out, size_t count, int dtype, te__nccl_comm *comm, void *stream) {
    (void)x, (void)comm;
    paper_call('g', count, dtype, 0, stream);
    if (paper_nccl.alike) memset(out, 0, 2 * count);
    return paper_blocks() ? 0 : TE__NCCL_IN_PROGRESS;
}
static int paper_scatter(const void *x, void *out, size_t count, int dtype, int op, te__nccl_comm *comm, void *stream) {
    (void)x, (void)out, (void)comm;
    paper_call('s', count, dtype, op, stream);
    return 0;
}
static int paper_broadcast(const void *x, void *out, size_t count, int dtype, int root, te__nccl_comm *comm,
                           void *stream) {
    (void)comm, (void)root;
    CHECK(x == out);
    paper_call('b', count, dtype, 0, stream);
    return 0;
}
static int paper_send(const void *x, size_t count, int dtype, int to, te__nccl_comm *comm, void *stream) {
    (void)x, (void)to, (void)comm;
    paper_call('>', count, dtype, 0, stream);
    return 0;
}
static int paper_receive(void *x, size_t count, int dtype, int from, te__nccl_comm *comm, void *stream) {
    (void)x, (void)from, (void)comm;
    paper_call('<', count, dtype, 0, stream);
    return 0;
}
static int paper_group_start(void) { return paper_group.depth++, 0; }
static int paper_group_end(void) {
    CHECK_EQ_INT(paper_group.depth--, 1);
    if (paper_group.aborts) paper_reclaim();
    paper_group.aborts = false;
    return 0;
}

/* The watcher asks for events, in a CUcontext of its own thread. */
static int paper_push(te__cu_handle context) {
    CHECK(context == primary);
    return pthread_equal(pthread_self(), paper_main) ? fake_Push(context) : 0;
}
static int paper_pop(te__cu_handle *context) {
    *context = primary;
    return pthread_equal(pthread_self(), paper_main) ? fake_Pop(context) : 0;
}
static int paper_query(te__cu_handle event) {
    return (void)event, te__atomic_load(&paper_nccl.events_wait) ? TE__CU_NOT_READY : 0;
}
static int paper_record(te__cu_handle event, te__cu_handle stream) {
    for (int i = 0; i < 10000 && te__atomic_load(&paper_nccl.full) && !te__atomic_load(&paper_nccl.aborts); i++)
        te__sleep(0.001);
    return fake_EventRecord(event, stream);
}
static int paper_exec_destroy(te__cu_handle graph) {
    strcat(paper_nccl.order, "x");
    te__atomic_store(&paper_nccl.graphs, 0);
    return fake_GraphDestroy(graph);
}

static void remove_nccl(void *arg) { (void)arg, memset(&te__nccl, 0, sizeof te__nccl); }
static void install_nccl(int version) {
    te__libnccl n = TE_ZERO;
    memset(&paper_nccl, 0, sizeof paper_nccl);
    n.version = paper_nccl.version = version;
    n.GetVersion = paper_version;
    n.GetUniqueId = paper_id;
    n.CommInitRankConfig = paper_init;
    n.CommSplit = paper_split;
    n.CommDestroy = paper_end;
    n.CommAbort = paper_abort;
    n.CommGetAsyncError = paper_error;
    n.GetErrorString = paper_text;
    n.GetLastError = paper_last;
    n.AllReduce = paper_reduce;
    n.AllGather = paper_gather;
    n.ReduceScatter = paper_scatter;
    n.Broadcast = paper_broadcast;
    n.Send = paper_send;
    n.Recv = paper_receive;
    n.GroupStart = paper_group_start;
    n.GroupEnd = paper_group_end;
    n.ready = true;
    te__nccl = n;
    te__cu.CtxPushCurrent = paper_push;
    te__cu.CtxPopCurrent = paper_pop;
    te__cu.EventQuery = paper_query;
    te__cu.EventRecord = paper_record;
    te__cu.GraphExecDestroy = paper_exec_destroy;
    paper_main = pthread_self();
    test_on_end(remove_nccl, NULL);
}

/* ---- rank 1 ------------------------------------------------------------------------------------------------------ */

typedef struct paper_partner {
    te__meeting at;
    te__text no_secret;
    te__store *store;
    te__member member;
    int ranks[2];
    int64_t end; /* atomic: 1: leave; 2: abort first */
    te__thread thread;
} paper_partner;

static void paper_stop(void *user) { (void)user; }
static void paper_partner_main(void *user) {
    paper_partner *p = (paper_partner *)user;
    te__text why = TE_ZERO;
    char id[sizeof(te__nccl_id)] = "", text[TE__WHY_TEXT];
    p->store = te__store_open(&p->at, &why);
    te__text_free(&why);
    if (!p->store) return;
    p->ranks[1] = 1;
    p->member.id = 1;
    p->member.ranks = p->ranks;
    p->member.count = 2;
    p->member.timeout = 60;
    p->member.stop = paper_stop;
    te__store_add(p->store, &p->member);
    te__member_begin(p->store, &p->member, "te_nccl_group_create", true, text);
    te__store_gather(p->store, &p->member, "te_nccl_group_create", id, sizeof id, NULL, text);
    te__member_end(p->store, &p->member);
    while (!te__atomic_load(&p->end)) te__sleep(0.002);
    if (te__atomic_load(&p->end) == 2) te__member_abort(p->store, &p->member, "rank 1 is full of holes");
    while (te__atomic_load(&p->end) == 2) te__sleep(0.002);
    te__store_remove(p->store, &p->member);
    te__store_close(p->store, 5, NULL);
}

/* A GPU of paper as rank 0 of two. */
static te_group *paper_join_with(te_ctx **te, paper_partner *p, double timeout, int version) {
    te_ctx_desc desc = TE_ZERO;
    te_nccl_group_desc group = TE_ZERO;
    te__text why = TE_ZERO;
    int port = 0, fd = te__net_listen(true, &port, &why);
    te__net_close(&fd);
    te__text_free(&why);
    test_setenv("TE_DIST_SECRET", NULL);
    test_setenv("TE_DIST_SECRET_FILE", NULL);
    test_setenv("TE_DIST_FILE", NULL);
    install_driver();
    install_nccl(version);
    memset(p, 0, sizeof *p);
    p->at.rank = 1;
    p->at.size = 2;
    p->at.version = te_version();
    p->at.address = "";
    p->at.port = port;
    p->at.secret = &p->no_secret;
    p->at.one_host = true;
    p->at.timeout = 20;
    if (!te__thread_start(&p->thread, paper_partner_main, p)) abort();
    desc.device = "cuda:0";
    desc.log = test__log;
    *te = te_ctx_create(&desc);
    group.size = 2;
    group.port = port;
    group.timeout_seconds = timeout;
    return te_nccl_group_create(*te, &group);
}
static te_group *paper_join(te_ctx **te, paper_partner *p, double timeout) {
    return paper_join_with(te, p, timeout, 23207);
}
static void paper_leave(te_ctx *te, te_group *g, paper_partner *p) {
    te__atomic_store(&p->end, 1);
    te_group_destroy(g);
    te__thread_join(&p->thread);
    CHECK_EQ_INT(fake.depth, 0);
    te_ctx_destroy(te);
}

/* ---- tests ------------------------------------------------------------------------------------------------------- */

/* Every collective reaches NCCL once, on the context's stream and in its CUcontext, in the formats that it should
 * have. */
TE_TEST(paper_collectives) {
    paper_partner p;
    te_ctx *te;
    te_group *g = paper_join(&te, &p, 60);
    CHECK_OK(te);
    te_tensor *x = te_tensor_zeros(te, TE_BF16, SHAPE(6)), *out = te_tensor_zeros(te, TE_BF16, SHAPE(12)),
              *e = te_tensor_zeros(te, TE_F8E8M0, SHAPE(5));
    te_tensor *none = te_tensor_zeros(te, TE_F32, SHAPE(0));
    const int64_t sends[2] = {2, 4}, receives[2] = {3, 3};
    te_all_reduce(g, x, TE_REDUCE_SUM);
    CHECK(paper_nccl.count == 6 && paper_nccl.dtype == TE__NCCL_BF16 && paper_nccl.op == TE__NCCL_SUM);
    te_all_reduce(g, e, TE_REDUCE_MAX);
    CHECK(paper_nccl.count == 5 && paper_nccl.dtype == TE__NCCL_U8 && paper_nccl.op == TE__NCCL_MAX);
    te_all_gather(g, x, out);
    CHECK(paper_nccl.count == 12 && paper_nccl.dtype == TE__NCCL_U8);
    te_reduce_scatter(g, out, x);
    CHECK(paper_nccl.count == 6 && paper_nccl.dtype == TE__NCCL_BF16);
    te_broadcast(g, x, 1);
    te_send(g, x, 1);
    te_recv(g, x, 1);
    CHECK(paper_nccl.count == 12);
    te_all_to_all(g, x, sends, te_tensor_narrow(out, 0, 0, 6), receives);
    te_all_reduce(g, none, TE_REDUCE_SUM); /* nothing to do */
    CHECK_OK(te);
    CHECK_MSG(!strcmp(paper_nccl.order, "aagsb><><><"), "%s", paper_nccl.order);
    CHECK_EQ_INT(fake.depth, 0);
    /* NCCL refuses, and the other rank hears of it */
    paper_nccl.refuse = 4;
    CHECK_EQ_INT(te_all_reduce(g, x, TE_REDUCE_SUM), TE_ERR_DEVICE);
    CHECK_ERROR(te, TE_ERR_DEVICE, "te_all_reduce: group \"nccl\", rank 0 of 2: NCCL: torn");
    CHECK_EQ_INT(te_all_reduce(g, x, TE_REDUCE_SUM), TE_ERR_STATE);
    CHECK_ERROR(te, TE_ERR_STATE, "failed in te_all_reduce: NCCL: torn");
    paper_leave(te, g, &p);
    CHECK_EQ_INT(paper_nccl.aborts, 1);
}

/* Collectives whose events pass may come as slowly as they like; one that does not end is ended, and the next wait says
 * for whom it waited. */
TE_TEST(paper_time) {
    paper_partner p;
    te_ctx *te;
    te_group *g = paper_join(&te, &p, 0.4);
    te_tensor *x = te_tensor_zeros(te, TE_F32, SHAPE(3));
    double begun = te__time_now();
    float host[3];
    CHECK_OK(te);
    for (int i = 0; i < 40; i++) { /* more than there are events */
        te_all_reduce(g, x, TE_REDUCE_SUM);
        te__sleep(0.02);
    }
    CHECK_EQ_INT(te_synchronize(te), TE_OK);
    CHECK(te__atomic_load(&paper_nccl.aborts) == 0);
    /* the rank has seen the last of the forty pass; else the time counts from the beginning of that one */
    CHECK(te__nccl_waits((te__nccl_rank *)g->is.user) < 0);
    te__atomic_store(&paper_nccl.events_wait, 1);
    begun = te__time_now();
    for (int i = 0; i < 20; i++) te_all_reduce(g, x, TE_REDUCE_SUM);
    while (te_synchronize(te) == TE_OK && te__time_now() < begun + 10) te__sleep(0.01);
    CHECK(te__time_now() > begun + 0.4);
    wait_for_aborts(1);
    CHECK_ERROR(te, TE_ERR_STATE,
                "waiting for the device: group \"nccl\", rank 0 of 2: te_all_reduce f32 [3] sum has waited too long: "
                "rank 1 (process ");
    CHECK_EQ_INT(te_tensor_to_host(x, host), TE_OK); /* said once */
    CHECK_EQ_INT(te_all_reduce(g, x, TE_REDUCE_SUM), TE_ERR_STATE);
    CHECK_ERROR(te, TE_ERR_STATE, "is behind: its last call was number 1 of the group, te_nccl_group_create");
    paper_leave(te, g, &p);
}

/* Reading a tensor tells of the other rank's abort as well. */
TE_TEST(paper_reading_tells) {
    paper_partner p;
    te_ctx *te;
    te_group *g = paper_join(&te, &p, 60);
    te_tensor *x = te_tensor_zeros(te, TE_F32, SHAPE(3));
    double begun = te__time_now();
    float host[3];
    te_all_reduce(g, x, TE_REDUCE_SUM);
    CHECK_EQ_INT(te_tensor_to_host(x, host), TE_OK);
    te__atomic_store(&p.end, 2);
    while (te_tensor_to_f32(x, host) == TE_OK && te__time_now() < begun + 10) te__sleep(0.002);
    CHECK_ERROR(te, TE_ERR_STATE, "rank 1 is full of holes");
    paper_leave(te, g, &p);
    CHECK_EQ_INT(paper_nccl.aborts, 1);
}

/* A graph's launches count as collectives and have events; it ends before NCCL does. */
TE_TEST(paper_graph) {
    paper_partner p;
    te_ctx *te;
    te_group *g = paper_join(&te, &p, 60);
    te__nccl_rank *me = (te__nccl_rank *)g->is.user;
    te_tensor *x = te_tensor_zeros(te, TE_F32, SHAPE(3));
    CHECK_EQ_INT(te_graph_begin(te), TE_OK);
    te_all_reduce(g, x, TE_REDUCE_SUM);
    te_barrier(g); /* one byte's maximum */
    te_all_reduce(g, x, TE_REDUCE_SUM);
    te_graph *graph = te_graph_end(te);
    CHECK_OK(te);
    CHECK_MSG(!strcmp(paper_nccl.order, "aaa"), "%s", paper_nccl.order);
    CHECK_EQ_INT(me->marks, 0);
    te__atomic_store(&paper_nccl.events_wait, 1);
    uint64_t begun = me->member.begun;
    for (int i = 0; i < 3; i++) CHECK_EQ_INT(te_graph_launch(graph), TE_OK);
    CHECK_EQ_INT(fake.graph_launches, 3);
    CHECK_EQ_INT(me->member.begun, begun + 3);
    CHECK_EQ_INT(me->marks, 3);
    CHECK(te__nccl_waits(me) > 0);
    te__atomic_store(&paper_nccl.events_wait, 0);
    CHECK(te__nccl_waits(me) < 0);
    te__atomic_store(&p.end, 1);
    te_group_destroy(g);
    /* without peace, if the other rank is gone before this one has left */
    CHECK_MSG(!strcmp(paper_nccl.order, te__atomic_load(&paper_nccl.aborts) ? "aaax" : "aaaxf"), "%s", paper_nccl.order);
    CHECK_EQ_INT(te_graph_launch(graph), TE_ERR_STATE);
    CHECK_ERROR(te, TE_ERR_STATE, "a group of ranks that it uses was destroyed");
    te_graph_destroy(graph);
    te__thread_join(&p.thread);
    te_ctx_destroy(te);
}

/* A flight runs on a second stream, between an event that the context's stream records and one that it waits for, also
 * in a capture. Its memory stays until then, and whatever comes later goes to the context's own stream again. */
TE_TEST(paper_flight) {
    paper_partner p;
    te_ctx *te;
    te_group *g = paper_join(&te, &p, 60);
    te__flight f[2];
    te_graph *graph = NULL;
    memset(f, 0, sizeof f);
    for (int captured = 0; captured < 2; captured++) {
        te_tensor *all = te_tensor_zeros(te, TE_F32, SHAPE(8)), *one = te_tensor_zeros(te, TE_F32, SHAPE(4));
        if (captured) CHECK_EQ_INT(te_graph_begin(te), TE_OK);
        memset(fake.order, 0, sizeof fake.order);
        fake.watch = true;
        CHECK_EQ_INT(te__flight_begin(&f[0], g, TE__REDUCE_SCATTER, all, one, TE_OK), TE_OK);
        CHECK_EQ_INT(te__flight_begin(&f[1], g, TE__ALL_REDUCE, all, NULL, TE_OK), TE_OK);
        CHECK(f[0].x == all && f[0].out == one && all->refs == 3 && one->refs == 2);
        CHECK_EQ_INT(te->flights, 2); /* products that are planned now leave room for them */
        te_tensor_fill(te_tensor_zeros(te, TE_F32, SHAPE(4)), 0);
        te__flight_drop(&f[0]); /* lands */
        CHECK_EQ_INT(te__flight_land(&f[1]), TE_OK);
        te_all_reduce(g, all, TE_REDUCE_SUM);
        fake.watch = false;
        te__flight_drop(&f[1]);
        CHECK_EQ_INT(te->flights, 0);
        CHECK(!f[0].x && !f[1].end && all->refs == 1 && one->refs == 1);
        /* R w: the second stream waits for the first. c r: the collective, and its event (outside of a capture the
         * watcher's as well). W: the first waits. */
        char order[64] = "";
        for (const char *c = fake.order; *c; c++)
            if (*c != 'Z' && *c != 'L' && strlen(order) + 1 < sizeof order) strncat(order, c, 1);
        CHECK_MSG(!strcmp(order, captured ? "RwcrRwcrWWC" : "RwcrrRwcrrWWCR"), "%s", fake.order);
        if (captured) graph = te_graph_end(te);
        CHECK_OK(te);
    }
    CHECK_MSG(!strcmp(paper_nccl.order, "saasaa"), "%s", paper_nccl.order);
    CHECK_EQ_INT(fake.streams, 2);
    te_graph_destroy(graph);
    /* a refused call leaves nothing behind */
    te_tensor *x = te_tensor_zeros(te, TE_F32, SHAPE(4));
    paper_nccl.refuse = 4;
    CHECK_EQ_INT(te__flight_begin(&f[0], g, TE__ALL_REDUCE, x, NULL, TE_OK), TE_ERR_DEVICE);
    CHECK_ERROR(te, TE_ERR_DEVICE, "NCCL: torn");
    CHECK(!f[0].x && !f[0].end && x->refs == 1);
    CHECK_EQ_INT(te__flight_begin(&f[0], g, TE__ALL_REDUCE, x, NULL, TE_ERR_OUT_OF_MEMORY), TE_ERR_OUT_OF_MEMORY);
    CHECK(!f[0].x && te->flights == 0);
    paper_leave(te, g, &p);
    CHECK_EQ_INT(fake.streams, 0);
}

/* A flight of 16-bit numbers over more than two ranks: f32 copies are made before the second stream waits for the first,
 * travel, and are copied back when the first waits for the second. The store still has two ranks. */
TE_TEST(paper_flight_in_f32) {
    static const te__collective kinds[] = {TE__ALL_REDUCE, TE__REDUCE_SCATTER};
    paper_partner p;
    te_ctx *te;
    te_group *g = paper_join(&te, &p, 60);
    te__flight f;
    memset(&f, 0, sizeof f);
    for (int k = 0; k < 6; k++) {
        const te__collective kind = kinds[k % 2];
        const int ranks = k < 2 ? 2 : 3;
        const bool dropped = k > 3, wide = ranks > 2;
        te_tensor *x = te_tensor_zeros(te, TE_BF16, SHAPE(6 * ranks)), *out = kind == TE__REDUCE_SCATTER ? te_tensor_zeros(te, TE_BF16, SHAPE(6)) : NULL;
        ((te__nccl_rank *)g->is.user)->size = g->is.size = ranks;
        te_group_reset_stats(g);
        memset(fake.order, 0, sizeof fake.order);
        fake.watch = true;
        CHECK_EQ_INT(te__flight_begin(&f, g, kind, x, out, TE_OK), TE_OK);
        CHECK(paper_nccl.dtype == (wide ? TE__NCCL_F32 : TE__NCCL_BF16) && paper_nccl.count == (out ? 6u : 6u * (unsigned)ranks));
        /* memory that travels is no other tensor's */
        te_tensor *later = te_tensor_empty(te, TE_F32, SHAPE(6 * ranks));
        CHECK(f.x == x && f.out == out && (f.wide[0] != NULL) == wide && (f.wide[1] != NULL) == (wide && out));
        CHECK(!wide || (f.wide[0]->refs == 1 && later->buffer != f.wide[0]->buffer));
        if (dropped) te__flight_drop(&f);
        else CHECK_EQ_INT(te__flight_land(&f), TE_OK);
        CHECK(!f.end && !f.wide[0] && !f.wide[1]);
        fake.watch = false;
        te__flight_drop(&f);
        CHECK(x->refs == 1 && (!out || out->refs == 1));
        char order[64] = "";
        for (const char *c = fake.order; *c; c++) /* a copy may be several launches */
            if ((c == fake.order || *c != 'L' || c[-1] != 'L') && strlen(order) + 1 < sizeof order) strncat(order, c, 1);
        CHECK_MSG(!strcmp(order, !wide ? "RwcrrW" : dropped ? "LRwcrrW" : "LRwcrrWL"), "%d: %s", k, fake.order);
        const te_group_stats n = te_group_get_stats(g); /* in the tensors' own format */
        CHECK_EQ_INT(out ? n.reduce_scatter.bytes : n.all_reduce.bytes, (out ? 1 : 2) * (ranks - 1) * 6 * 2);
        CHECK_OK(te);
    }
    ((te__nccl_rank *)g->is.user)->size = g->is.size = 2;
    paper_leave(te, g, &p);
}

/* Three linear modules; the last one is in the unit of the whole. */
static te_module *paper_units(te_ctx *te, te_data_parallel_desc d, bool stays) {
    te_module *part[3], *m;
    for (int i = 0; i < 3; i++) {
        te_linear_desc l = TE_ZERO;
        l.in_features = l.out_features = 32;
        l.gemm.no_bias = true;
        part[i] = te_linear_create(te, &l);
    }
    m = te_sequential_create(te, part, 3);
    paper_nccl.alike = true;
    for (int i = 0; i < 2; i++) te_fsdp_unit(te_module_child(m, i), &d);
    d.no_reshard_after_forward = stays;
    te_fsdp_unit(m, &d);
    return m;
}
/* From the second pass on, each unit that a backward pass gathers is gathered beside the one before it, also when that
 * one has stayed since its forward. */
TE_TEST(paper_unit_that_stays) {
    for (int stays = 0; stays < 2; stays++) {
        paper_partner p;
        te_ctx *te;
        te_group *g = paper_join(&te, &p, 60);
        te_data_parallel_desc d = TE_ZERO;
        te_module *m;
        d.group = g;
        d.shard = TE_SHARD_PARAMETERS;
        m = paper_units(te, d, stays);
        te_tensor *x = te_tensor_set_requires_grad(te_tensor_zeros(te, TE_BF16, SHAPE(32, 32)), true);
        for (int pass = 0; pass < 2; pass++) {
            te_tensor *y = te_forward(m, x);
            int on_own = 0;
            CHECK_OK(te);
            memset(fake.order, 0, sizeof fake.order);
            fake.watch = true;
            te_backward_from(y, te_tensor_zeros(te, TE_BF16, SHAPE(32, 32)));
            fake.watch = false;
            for (const char *c = fake.order; *c; c++) on_own += *c == 'C';
            CHECK_OK(te);
            if (pass) CHECK_MSG(on_own == !stays, "%s", fake.order); /* the first one of the pass */
        }
        CHECK_EQ_INT(te->flights, 0);
        te_module_destroy(m);
        paper_leave(te, g, &p);
    }
}
/* te_fsdp_unshard: the bytes of a unit travel while the parameters of the unit before it are written. */
TE_TEST(paper_unshard) {
    for (int ahead = 0; ahead < 2; ahead++) {
        paper_partner p;
        te_ctx *te;
        te_group *g = paper_join(&te, &p, 60);
        te_data_parallel_desc d = TE_ZERO;
        te_module *m;
        d.group = g;
        d.shard = TE_SHARD_PARAMETERS;
        d.no_prefetch = !ahead;
        m = paper_units(te, d, false);
        CHECK_OK(te);
        memset(fake.order, 0, sizeof fake.order);
        fake.watch = true;
        CHECK_EQ_INT(te_fsdp_unshard(m), TE_OK);
        fake.watch = false;
        char order[sizeof fake.order] = "";
        for (const char *c = fake.order; *c; c++) /* the collectives, waits for them, and copies to parameters */
            if (strchr("cCWL", *c) && (*c != 'L' || c == fake.order || c[-1] != 'L')) strncat(order, c, 1);
        CHECK_MSG(!strcmp(order, ahead ? "ccWLcWLWL" : "CLCLCL"), "%s", fake.order);
        CHECK_EQ_INT(te->flights, 0);
        te_module_destroy(m);
        paper_leave(te, g, &p);
    }
}

/* Attention over a ring of two: the next keys and values, and the sums of gradients, travel on the second stream beside
 * a product, and nothing else waits for the other rank. */
TE_TEST(paper_ring) {
    paper_partner p;
    te_ctx *te;
    te_group *g = paper_join(&te, &p, 60);
    te_dot_product_attention_desc d = TE_ZERO;
    te_tensor *x[3], *y;
    te_graph *graph;
    te_forward_args call = TE_ZERO;
    d.attention.num_attention_heads = 1;
    d.attention.kv_channels = 64;
    d.parallel.cp_group = g;
    te_module *m = te_dot_product_attention_create(te, &d);
    for (int i = 0; i < 3; i++)
        x[i] = te_tensor_set_requires_grad(te_tensor_zeros(te, TE_BF16, SHAPE(8, 1, 1, 64)), true);
    call.input = x[0], call.key = x[1], call.value = x[2];
    CHECK_EQ_INT(te_graph_begin(te), TE_OK);
    for (int backward = 0; backward < 2; backward++) {
        char order[sizeof fake.order] = "";
        memset(fake.order, 0, sizeof fake.order);
        fake.watch = true;
        if (!backward) y = te_forward_with(m, &call);
        else te_backward_from(y, te_tensor_zeros(te, TE_BF16, SHAPE(8, 1, 64)));
        fake.watch = false;
        for (const char *c = fake.order; *c; c++) { /* fills are launches or zeros; each sort of work once in a row */
            const char now = *c == 'Z' ? 'L' : *c;
            if (!order[0] || order[strlen(order) - 1] != now) strncat(order, &now, 1);
        }
        /* forward: one exchange; backward: keys and values, then the sums, both beside a product; at the end the sums
         * of the other rank's keys go home */
        CHECK_MSG(!strcmp(order, backward ? "LRwcrLWLRwcrLWLRwcrWL" : "LRwcrLWL"), "%s", fake.order);
    }
    graph = te_graph_end(te);
    CHECK_OK(te);
    /* k and v, then the two sums of gradients twice */
    CHECK_MSG(!strcmp(paper_nccl.order, "><><><><><><><><"), "%s", paper_nccl.order);
    CHECK_EQ_INT(te_group_get_stats(g).send.calls, 8);
    CHECK_EQ_INT(te_group_get_stats(g).send.bytes, 4 * 8 * 64 * 2 + 4 * 8 * 64 * 4);
    te_graph_destroy(graph);
    te_module_destroy(m);
    paper_leave(te, g, &p);
}

/* A mixture over two ranks in a graph: with a bound of their tokens the host copies nothing. */
TE_TEST(paper_experts) {
    paper_partner p;
    te_ctx *te;
    te_group *g = paper_join(&te, &p, 60);
    te_moe_config c = TE_ZERO;
    te_moe_backend b = TE_ZERO;
    te_graph *graph;
    c.n_routed_experts = 4, c.n_activated_experts = 2, c.dim = 32, c.moe_inter_dim = 32;
    b.experts = TE_EXPERTS_TORCH_MM;
    b.ep_group = g;
    for (int k = 0; k < 2; k++) {
        b.dispatcher = k ? TE_DISPATCHER_DEEPEP : TE_DISPATCHER_TORCH;
        te_module *m = te_moe_create(te, &c, &b);
        te_tensor *x = te_tensor_set_requires_grad(te_tensor_zeros(te, TE_BF16, SHAPE(6, 32)), true);
        CHECK_OK(te);
        te_graph_begin(te);
        CHECK(!te_forward(m, x));
        CHECK(!te_graph_end(te));
        CHECK_ERROR(te, TE_ERR_STATE, k ? "call te_set_max_dispatch_tokens before te_graph_begin"
                                        : "call te_set_max_dispatch_tokens, or the module once, before");
        /* the failure has ended the group for the other rank as well: this one goes on with another */
        te_module_destroy(m);
        paper_leave(te, g, &p);
        b.ep_group = g = paper_join(&te, &p, 60);
        m = te_moe_create(te, &c, &b);
        x = te_tensor_set_requires_grad(te_tensor_zeros(te, TE_BF16, SHAPE(6, 32)), true);
        CHECK_EQ_INT(te_set_max_dispatch_tokens(m, 6), TE_OK);
        memset(fake.order, 0, sizeof fake.order);
        CHECK_EQ_INT(te_graph_begin(te), TE_OK);
        te_backward(te_sum_all(te_forward(m, x)));
        graph = te_graph_end(te);
        CHECK_OK(te);
        CHECK_MSG(graph && !strpbrk(fake.order, "HD"), "%s", fake.order);
        /* tokens, weights and choices are gathered, results summed; the gradients of the results are gathered, those of
         * weights and tokens summed */
        CHECK_MSG(!strcmp(paper_nccl.order, "gggsgss"), "%s", paper_nccl.order);
        te_graph_destroy(graph);
        te_module_destroy(m);
        paper_leave(te, g, &p);
        if (k) break;
        b.ep_group = g = paper_join(&te, &p, 60);
    }
}

/* The other rank ends the group while there is a graph: NCCL then returns from its abort only when the graph is gone.
 * The context's thread and the watcher go on meanwhile. */
TE_TEST(paper_graph_of_a_group_that_failed) {
    paper_partner p;
    te_ctx *te;
    te_group *g = paper_join(&te, &p, 60);
    te__nccl_rank *me = (te__nccl_rank *)g->is.user;
    te_tensor *x = te_tensor_zeros(te, TE_F32, SHAPE(3));
    te_result r = TE_OK;
    CHECK_EQ_INT(te_graph_begin(te), TE_OK);
    te_all_reduce(g, x, TE_REDUCE_SUM);
    te_graph *graph = te_graph_end(te);
    CHECK_OK(te);
    te__atomic_store(&paper_nccl.graphs, 1);
    te__atomic_store(&p.end, 2);
    wait_for_aborts(1);
    double begun = te__time_now();
    te__nccl_mark(me); /* the end of a call that had begun before */
    r = te_graph_launch(graph);
    CHECK_EQ_INT(r, TE_ERR_STATE);
    CHECK_ERROR(te, TE_ERR_STATE, "rank 1 is full of holes");
    for (bool busy = true; busy && te__time_now() < begun + 5;) { /* other groups of the job may fail, too */
        te__mutex_lock(&me->store->mutex);
        busy = me->store->stopping != NULL;
        te__mutex_unlock(&me->store->mutex);
    }
    CHECK_EQ_INT(te__atomic_load(&paper_nccl.graphs), 1);
    te__atomic_store(&p.end, 1);
    te_group_destroy(g);
    CHECK(te__time_now() < begun + 5);
    CHECK_EQ_INT(te__atomic_load(&paper_nccl.aborts), 1);
    te_graph_destroy(graph);
    te__thread_join(&p.thread);
    te_ctx_destroy(te);
}

/* The stream is full because a collective does not end, and the driver waits for room: the watcher ends the
 * collective. */
TE_TEST(paper_full_stream) {
    paper_partner p;
    te_ctx *te;
    te_group *g = paper_join(&te, &p, 0.3);
    te_tensor *x = te_tensor_zeros(te, TE_F32, SHAPE(3));
    double begun = te__time_now();
    CHECK_OK(te);
    te__atomic_store(&paper_nccl.events_wait, 1);
    te_all_reduce(g, x, TE_REDUCE_SUM);
    te__atomic_store(&paper_nccl.full, 1);
    te_all_reduce(g, x, TE_REDUCE_SUM);
    CHECK(te__time_now() < begun + 5);
    CHECK_EQ_INT(te_synchronize(te), TE_ERR_STATE);
    CHECK_ERROR(te, TE_ERR_STATE, "has waited too long");
    te__atomic_store(&paper_nccl.full, 0);
    paper_leave(te, g, &p);
    CHECK_EQ_INT(paper_nccl.aborts, 1);
}

/* A call of NCCL's waits for another rank, or for room in the stream. The watcher ends the communicator, and its memory
 * stays until the call has returned: within a group of NCCL's, and before 2.22, where no call waits, by waiting first. */
TE_TEST(paper_call_that_waits) {
    for (int old = 0; old < 2; old++) {
        paper_partner p;
        te_ctx *te;
        te_group *g = paper_join_with(&te, &p, 0.2, old ? 21805 : 22203);
        te_tensor *x = te_tensor_zeros(te, TE_F32, SHAPE(3));
        double begun = te__time_now();
        CHECK_OK(te);
        CHECK_EQ_INT(te_all_reduce(g, x, TE_REDUCE_SUM), TE_OK);
        te__atomic_store(&paper_nccl.stuck, 1);
        CHECK_EQ_INT(te_all_reduce(g, x, TE_REDUCE_SUM), TE_ERR_STATE);
        if (old) te__atomic_store(&paper_nccl.stuck, 0);
        CHECK(te__time_now() > begun + 0.2 && te__time_now() < begun + 5);
        CHECK_ERROR(te, TE_ERR_STATE, "te_all_reduce f32 [3] sum has waited too long: rank 1 (process ");
        paper_leave(te, g, &p);
        CHECK_EQ_INT(paper_nccl.aborts, 1);
    }
}
