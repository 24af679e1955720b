/* tests/dist/test_nccl.c: groups of processes, on the CPU over a library in the place of NCCL (nccl_stand_in.c, which
 * says what it cannot show): every collective against the group of threads, byte for byte; ranks that die, leave,
 * abort, differ or come late; what is said without a usable NCCL. */
#define _GNU_SOURCE
#include "processes.h"
#include "ranks.h"

/* ---- the same calls over processes and threads ------------------------------------------------------------------- */

static uint64_t step_of(uint64_t *state) { /* splitmix64 */
    uint64_t z = (*state += 0x9E3779B97F4A7C15u);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}
/* Numbers whose sums depend on their order and on each rounding, or any bytes; those of one rank. */
static te_tensor *values_of(te_ctx *te, te_dtype dtype, int64_t n, int rank, int seed) {
    uint64_t state = (uint64_t)(rank * 1000 + seed);
    bool real = dtype == TE_F32 || dtype == TE_F16 || dtype == TE_BF16, whole = getenv("TE_TEST_WHOLE") != NULL;
    size_t bytes = (size_t)n * 8 + 8;
    char *host = (char *)malloc(bytes);
    te_tensor *x;
    for (size_t i = 0; i < bytes / 8; i++) {
        uint64_t r = step_of(&state);
        if (real && whole) ((float *)host)[i] = (float)(int)(r % 17) - 8;
        else if (real) ((float *)host)[i] = ldexpf((float)(int32_t)(r >> 32) * 0x1p-31f, (int)(r % 13) - 6);
        else memcpy(host + 8 * i, &r, 8);
    }
    x = real ? te_tensor_from_f32(te, dtype, 1, &n, (const float *)host) : te_tensor_from_host(te, dtype, 1, &n, host);
    free(host);
    return x;
}
static te_tensor *zeros_of(te_ctx *te, te_dtype dtype, int64_t n) { return te_tensor_zeros(te, dtype, 1, &n); }

typedef struct tape_of_bytes {
    char *at;
    size_t n;
} tape_of_bytes;
static void add_bytes(tape_of_bytes *t, const void *p, size_t n) {
    t->at = (char *)realloc(t->at, t->n + n + 1);
    memcpy(t->at + t->n, p, n);
    t->n += n;
}
static void add_tensor(tape_of_bytes *t, const te_tensor *x) {
    size_t n = x ? te_tensor_bytes(x) : 0;
    char *host = (char *)calloc(n + 1, 1);
    if (x) te_tensor_to_host(x, host);
    add_bytes(t, host, n);
    free(host);
}

static const int64_t lengths[] = {0, 1, 5, 257, 4099};
static const struct {
    te_dtype dtype;
    bool sums;
} formats[] = {{TE_F32, true}, {TE_F16, true}, {TE_BF16, true},   {TE_I32, true},
               {TE_I64, true}, {TE_U8, false}, {TE_F8E8M0, false}};

static void reductions_of(te_ctx *te, te_group *g, tape_of_bytes *t) {
    int rank = te_group_rank(g), size = te_group_size(g);
    for (int f = 0; f < COUNT(formats); f++)
        for (int l = 0; l < COUNT(lengths); l++)
            for (int op = formats[f].sums ? 0 : 1; op < 2; op++) {
                te_tensor *x = values_of(te, formats[f].dtype, lengths[l], rank, f);
                te_all_reduce(g, x, op ? TE_REDUCE_MAX : TE_REDUCE_SUM);
                add_tensor(t, x);
                if (op) continue;
                x = values_of(te, formats[f].dtype, lengths[l] * size, rank, f + 20);
                te_tensor *out = zeros_of(te, formats[f].dtype, lengths[l]);
                te_reduce_scatter(g, x, out);
                add_tensor(t, out);
            }
}
static void copies_of(te_ctx *te, te_group *g, tape_of_bytes *t) {
    int rank = te_group_rank(g), size = te_group_size(g);
    for (int l = 0; l < COUNT(lengths); l++) {
        te_tensor *x = values_of(te, TE_BF16, lengths[l], rank, l), *out = zeros_of(te, TE_BF16, lengths[l] * size);
        te_all_gather(g, x, out);
        add_tensor(t, out);
        te_all_gather(g, te_tensor_narrow(out, 0, lengths[l] * rank, lengths[l]), out); /* in place */
        add_tensor(t, out);
        for (int root = 0; root < size; root++) {
            x = values_of(te, TE_U8, lengths[l], rank, root);
            te_broadcast(g, x, root);
            add_tensor(t, x);
        }
    }
    te_barrier(g);
}
/* Rank i sends (i + k) % 3 lines to rank k, and so none at times. */
static void exchanges_of(te_ctx *te, te_group *g, tape_of_bytes *t) {
    int rank = te_group_rank(g), size = te_group_size(g);
    int64_t sends[MAX_RANKS], receives[MAX_RANKS], out_lines = 0, in_lines = 0, shape[2] = {0, 7};
    for (int k = 0; k < size; k++) {
        in_lines += sends[k] = (rank + k) % 3;
        out_lines += receives[k] = (k + rank) % 3;
    }
    shape[0] = in_lines;
    te_tensor *x = te_tensor_view(values_of(te, TE_F32, in_lines * 7, rank, 3), 2, shape);
    shape[0] = out_lines;
    te_tensor *out = te_tensor_zeros(te, TE_F32, 2, shape);
    te_all_to_all(g, x, sends, out, receives);
    add_tensor(t, out);
    x = values_of(te, TE_BF16, 4 * size, rank, 4);
    out = zeros_of(te, TE_BF16, 4 * size);
    te_all_to_all(g, x, NULL, out, NULL);
    add_tensor(t, out);
}
/* A ring, in two turns: a send may wait for its receive. The last rank receives first, so that not all send. */
static void ring_of(te_ctx *te, te_group *g, tape_of_bytes *t) {
    int rank = te_group_rank(g), size = te_group_size(g), next = (rank + 1) % size, last = (rank + size - 1) % size;
    for (int l = 0; l < COUNT(lengths); l++) {
        te_tensor *x = values_of(te, TE_F16, lengths[l], rank, 5), *y = zeros_of(te, TE_F16, lengths[l]);
        if (rank < size - 1) te_send(g, x, next);
        te_recv(g, y, last);
        if (rank == size - 1) te_send(g, x, next);
        add_tensor(t, y);
    }
}
/* Subgroups: odd and even ranks, in the opposite order; and a group that one rank is not in. */
static void parts_of(te_ctx *te, te_group *g, tape_of_bytes *t) {
    int rank = te_group_rank(g), size = te_group_size(g);
    for (int turn = 0; turn < 3; turn++) {
        te_group *part =
            turn < 2 ? te_group_split(g, rank % 2, turn ? rank : -rank) : te_group_split(g, rank == 0 ? -1 : 4, 0);
        int place[2] = {te_group_rank(part), te_group_size(part)};
        add_bytes(t, place, sizeof place);
        if (turn == 2 && rank == 0) {
            if (part) add_bytes(t, "?", 1);
            continue;
        }
        te_tensor *x = values_of(te, TE_F32, 33, rank, 6), *out = zeros_of(te, TE_F32, 33 * te_group_size(part));
        te_all_gather(part, x, out);
        add_tensor(t, out);
        te_all_reduce(part, x, TE_REDUCE_SUM);
        te_all_reduce(g, x, TE_REDUCE_MAX); /* both groups at once: turn 2 would lack rank 0 */
        add_tensor(t, x);
        te_barrier(part);
        te_group_destroy(part);
    }
    if (rank == 0) te_all_reduce(g, values_of(te, TE_F32, 33, rank, 6), TE_REDUCE_MAX);
    te_barrier(g);
    (void)size;
}
static void all_calls_of(te_ctx *te, te_group *g, tape_of_bytes *t) {
    te_scope_begin(te);
    reductions_of(te, g, t);
    copies_of(te, g, t);
    exchanges_of(te, g, t);
    ring_of(te, g, t);
    parts_of(te, g, t);
    te_scope_end(te);
}

static void all_calls_of_process(process_rank *p) {
    tape_of_bytes t = {NULL, 0};
    all_calls_of(p->te, p->group, &t);
    if (te_ok(p->te)) fwrite(t.at, 1, t.n, p->out);
    else fprintf(p->out, "%s", te_error(p->te));
    free(t.at);
}
static void all_calls_of_thread(rank_state *s) {
    tape_of_bytes t = {NULL, 0};
    all_calls_of(s->te, s->group, &t);
    s->left[s->num_left] = t.at;
    s->bytes[s->num_left++] = t.n;
}
static void equal_to_threads(int size) {
    rank_state *threads = run_ranks(size, all_calls_of_thread, NULL);
    run_processes("all_calls", size);
    for (int i = 0; i < size; i++) {
        CHECK_MSG(processes[i].bytes == threads[i].bytes[0], "rank %d of %d left %zu bytes, and its thread %zu: %.300s",
                  i, size, processes[i].bytes, threads[i].bytes[0],
                  processes[i].bytes < 4096 ? (const char *)processes[i].said : "");
        if (processes[i].bytes == threads[i].bytes[0])
            CHECK_BYTES("all that a rank computes", processes[i].said, threads[i].left[0], processes[i].bytes);
    }
}
TE_TEST(equal_to_threads) {
    prepare_processes();
    for (int size = 2; size <= MAX_PROCESSES; size++) equal_to_threads(size);
    test_setenv("TE_DEBUG_SYNC", "1");
    equal_to_threads(3);
}
/* NCCL before 2.22, whose communicators do not block (dist/nccl.c). */
TE_TEST(equal_to_threads_not_blocking) {
    prepare_processes();
    test_setenv("TE_NCCL_STAND_IN_VERSION", "21805");
    equal_to_threads(2);
}

/* Several contexts of one process, each in a thread of its own, which says its place. */
static void all_calls_of_thread_over_nccl(rank_state *s) {
    tape_of_bytes t[2] = {{NULL, 0}, {NULL, 0}};
    te_group *g = te_nccl_group_create(
        s->te, &(te_nccl_group_desc){.size = s->size, .rank = s->rank, .timeout_seconds = PROCESS_SECONDS});
    EXPECT(s, g && te_group_rank(g) == s->rank && te_group_size(g) == s->size);
    all_calls_of(s->te, s->group, &t[0]);
    if (g) all_calls_of(s->te, g, &t[1]);
    EXPECT(s, t[0].n == t[1].n && !memcmp(t[0].at, t[1].at, t[0].n));
    te_group_destroy(g);
    free(t[0].at);
    free(t[1].at);
}
TE_TEST(threads_of_one_process) {
    prepare_processes();
    run_ranks(3, all_calls_of_thread_over_nccl, NULL);
}

/* With a secret, and by a file; without a launcher's port. */
static void check_hello(int size) {
    char want[32];
    run_processes("hello", size);
    snprintf(want, sizeof want, "%d ", size * (size + 1) / 2);
    for (int i = 0; i < size; i++)
        CHECK_MSG(!strcmp((const char *)processes[i].said, want), "rank %d: %s", i, (const char *)processes[i].said);
}
TE_TEST(ways_to_meet) {
    FILE *f;
    prepare_processes();
    test_setenv("TE_DIST_SECRET", "a secret of the job's own");
    check_hello(2);
    test_setenv("TE_DIST_SECRET", NULL);
    f = fopen(test_path("secret"), "w");
    fputs("another secret of the job's own\n", f);
    fclose(f);
    chmod(test_path("secret"), 0600);
    test_setenv("TE_DIST_SECRET_FILE", test_path("secret"));
    check_hello(2);
    test_setenv("TE_DIST_SECRET_FILE", NULL);
    test_setenv("MASTER_ADDR", NULL);
    test_setenv("TE_DIST_FILE", test_path("meeting"));
    check_hello(3);
}

/* A layout of processes, made of a group that there is, and made anew by the launcher's variables. */
static void lay_out_processes(process_rank *p) {
    te_dist_desc d = {0};
    te_dist dist;
    for (int turn = 0; turn < 2; turn++) {
        d.tp = 2;
        d.dp = 2;
        d.world = turn ? NULL : p->group;
        if (te_dist_init(p->te, &d, &dist) == TE_OK) {
            te_group *groups[3] = {dist.world, dist.tensor, dist.data};
            for (int i = 0; i < 3; i++) {
                te_tensor *x = te_tensor_full(p->te, TE_F32, SHAPE(1), 1 << p->rank);
                te_all_reduce(groups[i], x, TE_REDUCE_SUM);
                fprintf(p->out, "%g ", te_tensor_item(x));
            }
            fprintf(p->out, "%d/%d%s;", dist.data_rank, dist.data_size, dist.context || dist.expert ? "?" : "");
        }
        fprintf(p->out, "%s", te_error(p->te));
        te_dist_finish(&dist);
        if (turn == 0) {
            te_group_destroy(p->group);
            p->group = NULL;
        }
    }
}
static void check_layout(void) {
    static const char *const want[4] = {"15 3 5 0/2;15 3 5 0/2;", "15 3 10 0/2;15 3 10 0/2;",
                                        "15 12 5 1/2;15 12 5 1/2;", "15 12 10 1/2;15 12 10 1/2;"};
    run_processes("layout", 4);
    for (int i = 0; i < 4; i++)
        CHECK_MSG(!strcmp((const char *)processes[i].said, want[i]), "rank %d: %s", i, (const char *)processes[i].said);
}
TE_TEST(layout) {
    prepare_processes();
    check_layout();
}

/* NaN is ignored by a maximum, unless all ranks have it. */
static void maximum_of_nans(process_rank *p) {
    float v[3] = {p->rank ? 1 : NAN, p->rank ? NAN : -2, NAN}, got[3];
    static const te_dtype dtypes[3] = {TE_F32, TE_F16, TE_BF16};
    for (int i = 0; i < 3; i++) {
        te_tensor *x = te_tensor_from_f32(p->te, dtypes[i], SHAPE(3), v);
        te_all_reduce(p->group, x, TE_REDUCE_MAX);
        te_tensor_to_f32(x, got);
        fprintf(p->out, "%g %g %s;", got[0], got[1], isnan(got[2]) ? "nan" : "?");
    }
}
static void check_maximum_of_nans(void) {
    run_processes("maximum_of_nans", 2);
    for (int i = 0; i < 2; i++) CHECK_STR((const char *)processes[i].said, "1 -2 nan;1 -2 nan;1 -2 nan;");
}
TE_TEST(maximum_of_nans) {
    prepare_processes();
    check_maximum_of_nans();
}

/* ---- ranks that fail --------------------------------------------------------------------------------------------- */

/* Calls collectives until one fails, then says why. */
static void go_on_for_ever(process_rank *p) {
    te_group *part = te_group_split(p->group, p->rank % 2, 0);
    te_result r = part ? TE_OK : te_error_code(p->te);
    for (int i = 0; r == TE_OK; i++) {
        te_scope_begin(p->te);
        te_tensor *x = te_tensor_full(p->te, TE_BF16, SHAPE(1 + i % 1000), 1);
        te_group *g = i % 3 ? p->group : part;
        r = i % 7 == 6 ? te_barrier(g) : te_all_reduce(g, x, TE_REDUCE_SUM);
        if (i % 5 == 4 && r == TE_OK) r = te_synchronize(p->te);
        if (i == 20) fputc('\n', p->out), fflush(p->out); /* see wait_until_ready */
        te_scope_end(p->te);
    }
    fprintf(p->out, "%s: %s", te_result_name(r), te_error(p->te));
    te_group_destroy(part);
}
/* The moments go from the start of the processes to the midst of their work. A rank that dies before it has come is
 * missed when the others have waited long enough; one that has come is missed at once. */
TE_TEST(killed) {
    enum { ROUNDS = 50 };
    uint64_t state = 99;
    int met = 0;
    for (int round = 0; round < ROUNDS; round += test_every_sanitized(5)) {
        int size = 2 + 2 * (round % 2), dead = (int)(step_of(&state) % (uint64_t)size);
        char gone[64], missing[64];
        prepare_processes();
        test_setenv("TE_TEST_SECONDS", test_samples() ? "8" : "3"); /* a rank that has not come is missed then */
        test_case("round %d: rank %d of %d is killed", round, dead, size);
        start_processes("for_ever", size);
        if (round % 20 == 10) wait_until_ready(dead); /* however slow the machine is */
        usleep((useconds_t)(round % 20 == 5 ? step_of(&state) % 15000 : 20000 + step_of(&state) % 60000));
        kill(processes[dead].pid, SIGKILL);
        snprintf(gone, sizeof gone, "rank %d (process %d on ", dead, (int)processes[dead].pid);
        snprintf(missing, sizeof missing, "missing: rank %d", dead);
        end_processes(size);
        for (int i = 0; i < size; i++) {
            const char *said = (const char *)processes[i].said;
            if (i == dead) continue;
            CHECK(WIFEXITED(processes[i].status) && WEXITSTATUS(processes[i].status) == 0);
            met += strstr(said, gone) != NULL;
            CHECK_MSG((strstr(said, gone) && strstr(said, "is gone")) || strstr(said, missing) ||
                          (dead == 0 && strstr(said, "rank 0 ")),
                      "rank %d says: %s", i, said);
            CHECK_STR(said, "TE_ERR_STATE");
        }
    }
    CHECK_MSG(met > 0, "no rank was killed at work");
}

/* A rank is killed in a call of NCCL's in which the others wait for it, or for the end of their own communicators. */
TE_TEST(killed_in_a_call) {
    static const char *const calls[] = {"ncclCommInitRankConfig", "ncclCommSplit", "ncclAllReduce", "ncclCommDestroy"};
    enum { SIZE = 3, DEAD = 1 };
    for (int k = 0; k < 2 * COUNT(calls); k += test_every_sanitized(3)) {
        const bool ends = k / 2 == COUNT(calls) - 1;
        char kills[64], gone[64];
        prepare_processes();
        test_case("%s%s", calls[k / 2], k % 2 ? " that does not block" : "");
        snprintf(kills, sizeof kills, "%d %s", DEAD, calls[k / 2]);
        test_setenv("TE_NCCL_STAND_IN_KILLS", kills);
        if (k % 2) test_setenv("TE_NCCL_STAND_IN_VERSION", "21805");
        test_setenv("TE_TEST_SECONDS", "120"); /* more than end_processes has patience: the group's time ends nothing */
        start_processes(k / 2 == 1 ? "for_ever" : "hello", SIZE);
        end_processes(SIZE);
        CHECK(WIFSIGNALED(processes[DEAD].status));
        snprintf(gone, sizeof gone, "rank %d (process %d on ", DEAD, (int)processes[DEAD].pid);
        for (int i = 0; i < SIZE; i++) {
            const char *said = (const char *)processes[i].said;
            if (i == DEAD) continue;
            CHECK(WIFEXITED(processes[i].status) && WEXITSTATUS(processes[i].status) == 0);
            CHECK_MSG(ends ? !strcmp(said, "6 ") : strstr(said, gone) && strstr(said, "is gone"), "rank %d says: %s", i,
                      said);
        }
    }
}

/* A rank that has forked a child off is killed, and the child lives on. */
static void fork_and_die(process_rank *p) {
    te_result r = te_barrier(p->group);
    if (p->rank == 1) {
        if (fork() == 0) {
            usleep(4000000);
            _exit(0);
        }
        kill(getpid(), SIGKILL);
    }
    r = te_barrier(p->group);
    fprintf(p->out, "%s: %s", te_result_name(r), te_error(p->te));
}
TE_TEST(killed_with_a_child) {
    prepare_processes();
    test_setenv("TE_TEST_SECONDS", test_samples() ? "8" : "3");
    start_processes("fork_and_die", 3);
    end_processes(3);
    for (int i = 0; i < 3; i += 2) {
        CHECK_STR((const char *)processes[i].said, "TE_ERR_STATE: te_barrier");
        CHECK_STR((const char *)processes[i].said, "is gone: its connection has ended");
    }
}

/* Rank 1 does something else; the others learn why they have waited. */
static void come_late(process_rank *p) {
    te_tensor *x = te_tensor_full(p->te, TE_F32, SHAPE(2, 3), 1);
    te_result r = te_broadcast(p->group, x, 0);
    if (p->rank == 1)
        for (int i = 0; i < 20000 && te_ok(p->te); i++) { /* the host's waits tell of the group */
            usleep(2000);
            r = te_synchronize(p->te);
        }
    else r = te_all_reduce(p->group, x, TE_REDUCE_SUM);
    if (r == TE_OK) r = te_synchronize(p->te); /* on a GPU the call itself does not wait */
    fprintf(p->out, "%s: %s", te_result_name(r), te_error(p->te));
}
TE_TEST(late) {
    prepare_processes();
    test_setenv("TE_TEST_SECONDS", test_samples() ? "4" : "1"); /* in which the processes have to start, too */
    run_processes("late", 3);
    for (int i = 0; i < 3; i++) {
        const char *said = (const char *)processes[i].said;
        CHECK_STR(said, "TE_ERR_STATE: ");
        CHECK_STR(said, i == 1 ? "waiting for the device: group \"nccl\", rank 1 of 3"
                               : "te_all_reduce: group \"nccl\", rank");
        CHECK_STR(said, "te_all_reduce f32 [2, 3] sum has waited too long");
        CHECK_STR(said, "rank 1 (process ");
        CHECK_STR(said, "is behind: its last call was number 2 of the group, te_broadcast f32 [2, 3] from rank 0");
    }
}

/* A message that is never sent. */
static void receive_nothing(process_rank *p) {
    te_tensor *x = te_tensor_zeros(p->te, TE_F32, SHAPE(2));
    te_result r = TE_OK;
    if (p->rank == 0) r = te_recv(p->group, x, 1);
    for (int i = 0; i < 5000 && r == TE_OK; i++) {
        usleep(2000);
        r = te_synchronize(p->te);
    }
    fprintf(p->out, "%s: %s", te_result_name(r), te_error(p->te));
}
static void check_receive_nothing(void) {
    run_processes("receive_nothing", 2);
    for (int i = 0; i < 2; i++) {
        CHECK_STR((const char *)processes[i].said, "te_recv f32 [2] from rank 1 has waited too long: rank 1 (process ");
        CHECK_STR((const char *)processes[i].said, "has called te_nccl_group_create last");
    }
}
TE_TEST(message_that_does_not_come) {
    prepare_processes();
    test_setenv("TE_TEST_SECONDS", test_samples() ? "4" : "1");
    check_receive_nothing();
}
TE_TEST(message_that_does_not_come_not_blocking) {
    prepare_processes();
    test_setenv("TE_NCCL_STAND_IN_VERSION", "21805");
    test_setenv("TE_TEST_SECONDS", test_samples() ? "4" : "1");
    check_receive_nothing();
}

/* One rank does what TE_TEST_ARG says; the others call te_all_reduce. Their next calls fail: the group is over. */
static void one_differs(process_rank *p) {
    te_tensor *x = te_tensor_full(p->te, TE_F32, SHAPE(4), 1), *i32 = te_tensor_zeros(p->te, TE_U8, SHAPE(4));
    te_result r = te_barrier(p->group); /* all have made the group */
    if (p->rank != 1) r = te_all_reduce(p->group, x, TE_REDUCE_SUM);
    else if (!strcmp(p->arg, "abort")) r = te_group_abort(p->group, "enough of it");
    else if (!strcmp(p->arg, "refuse")) r = te_all_reduce(p->group, i32, TE_REDUCE_SUM);
    else if (!strcmp(p->arg, "shape"))
        r = te_all_reduce(p->group, te_tensor_zeros(p->te, TE_F32, SHAPE(5)), TE_REDUCE_SUM);
    else if (!strcmp(p->arg, "call")) r = te_broadcast(p->group, x, 0);
    else if (!strcmp(p->arg, "leave")) {
        te_group_destroy(p->group);
        p->group = NULL;
    }
    fprintf(p->out, "%s: %s\n", te_result_name(r), te_error(p->te));
    te_clear_error(p->te);
    if (p->group) {
        r = te_barrier(p->group);
        fprintf(p->out, "then %s: %s", te_result_name(r), te_error(p->te));
        te_clear_error(p->te);
    }
}
static void one_does(const char *arg, const char *own, const char *others) {
    test_case("%s", arg);
    test_setenv("TE_TEST_ARG", arg);
    run_processes("one_differs", 3);
    for (int i = 0; i < 3; i++) {
        const char *said = (const char *)processes[i].said;
        CHECK_STR(said, i == 1 ? own : others);
        if (strcmp(arg, "leave")) CHECK_STR(said, "then TE_ERR_STATE");
    }
}
static void check_one_differs(void) {
    one_does("abort", "TE_OK", "has aborted the group (te_group_abort): enough of it");
    one_does("refuse", "TE_ERR_DTYPE: te_all_reduce: x is u8", "failed in te_all_reduce: te_all_reduce: x is u8");
    one_does("leave", "TE_OK", "has left the group (te_group_destroy)");
}
TE_TEST(one_differs) {
    prepare_processes();
    check_one_differs();
    /* NCCL itself does not compare; the stand-in does */
    one_does("shape", "TE_ERR_", "TE_ERR_");
}
static void check_debug_sync(void) {
    static const char *const args[2][2] = {{"shape", "te_all_reduce f32 [5] sum"},
                                           {"call", "te_broadcast f32 [4] from rank 0"}};
    test_setenv("TE_DEBUG_SYNC", "1");
    for (int i = 0; i < 2; i++) {
        test_setenv("TE_TEST_ARG", args[i][0]);
        run_processes("one_differs", 3);
        for (int k = 0; k < 3; k++) {
            CHECK_STR((const char *)processes[k].said, args[i][1]);
            CHECK_STR((const char *)processes[k].said, "te_all_reduce f32 [4] sum");
            CHECK_STR((const char *)processes[k].said, "all ranks must make the same calls");
        }
    }
}
TE_TEST(debug_sync_compares) {
    prepare_processes();
    check_debug_sync();
}

/* ---- what cannot be ---------------------------------------------------------------------------------------------- */

TE_TEST(no_library) {
    prepare_processes();
    test_setenv("TE_NCCL_PATH", "/nonexistent/libnccl.so.2");
    run_processes("hello", 1); /* a rank alone needs none */
    CHECK_STR((const char *)processes[0].said, "1 ");
    start_process("hello", 0, 2);
    end_processes(1);
    CHECK_STR((const char *)processes[0].said, "TE_ERR_LIBRARY");
    CHECK_STR((const char *)processes[0].said, "/nonexistent/libnccl.so.2");
    CHECK_STR((const char *)processes[0].said, "te_thread_group_create");
    test_setenv("TE_NCCL_PATH", beside_this_program("nccl_stand_in.so"));
    test_setenv("TE_NCCL_STAND_IN_VERSION", "21403");
    start_process("hello", 0, 2);
    end_processes(1);
    CHECK_STR((const char *)processes[0].said, "TE_ERR_LIBRARY");
    CHECK_STR((const char *)processes[0].said, "is NCCL 2.14.3; 2.18 is the oldest");
    test_setenv("TE_NCCL_STAND_IN_VERSION", NULL);
    test_setenv("TE_NCCL_PATH", beside_this_program("nccl_of_gpus.so"));
    start_process("hello", 0, 2);
    end_processes(1);
    CHECK_STR((const char *)processes[0].said, "TE_ERR_UNSUPPORTED");
    CHECK_STR((const char *)processes[0].said, "this context is on the CPU");
    CHECK_STR((const char *)processes[0].said, "te_thread_group_create");
}

TE_TEST(bad_places) {
    te_ctx *te = test_context("cpu");
    te_nccl_group_desc d = {0};
    prepare_processes();
    CHECK(!te_nccl_group_create(NULL, &d) && !te_nccl_group_create(te, NULL));
    CHECK_ERROR(te, TE_ERR_INVALID, "desc is NULL");
    d.size = 2, d.rank = 2;
    CHECK(!te_nccl_group_create(te, &d));
    CHECK_ERROR(te, TE_ERR_INVALID, "rank 2 of 2");
    d.rank = 0, d.port = 70000;
    CHECK(!te_nccl_group_create(te, &d));
    CHECK_ERROR(te, TE_ERR_INVALID, "port is 70000");
    d.port = 0, d.address = "node7.cluster";
    CHECK(!te_nccl_group_create(te, &d));
    CHECK_ERROR(te, TE_ERR_INVALID, "rank 0's host is node7.cluster, and there is no secret");
    d.address = "127.0.0.1.cluster";
    CHECK(!te_nccl_group_create(te, &d));
    CHECK_ERROR(te, TE_ERR_INVALID, "rank 0's host is 127.0.0.1.cluster, and there is no secret");
    d.address = NULL, d.size = 0;
    test_setenv("RANK", "1");
    test_setenv("WORLD_SIZE", "2");
    test_setenv("PMI_RANK", "0");
    test_setenv("PMI_SIZE", "2");
    CHECK(!te_nccl_group_create(te, &d));
    CHECK_ERROR(te, TE_ERR_INVALID, "RANK is 1 (torchrun) and PMI_RANK is 0 (MPICH)");
    test_setenv("PMI_RANK", NULL);
    test_setenv("PMI_SIZE", NULL);
    test_setenv("MASTER_ADDR", NULL);
    CHECK(!te_nccl_group_create(te, &d));
    CHECK_ERROR(te, TE_ERR_INVALID, "set MASTER_ADDR");
    test_setenv("MASTER_ADDR", "127.0.0.1");
    d.timeout_seconds = 0.2;
    CHECK(!te_nccl_group_create(te, &d));
    CHECK_ERROR(te, TE_ERR_STATE, "rank 1 of 2: rank 0 was not found within 0.2 seconds");
    CHECK(!te_group_split(NULL, 0, 0));
    d.secret = "short";
    CHECK(!te_nccl_group_create(te, &d));
    CHECK_ERROR(te, TE_ERR_INVALID, "secret has 5 bytes; a secret needs 16");
    CHECK_OK(te);
}

/* One rank needs neither a library nor others. */
TE_TEST(alone) {
    te_ctx *te = test_context("cpu");
    te_nccl_group_desc d = {0};
    prepare_processes();
    test_setenv("TE_NCCL_PATH", "/nonexistent");
    for (int by_desc = 0; by_desc < 2; by_desc++) {
        d.size = by_desc;
        te_group *g = te_nccl_group_create(te, &d), *part = te_group_split(g, 3, 0);
        CHECK(g && part && !te_group_split(g, -1, 0));
        CHECK_EQ_INT(te_group_size(part), 1);
        te_tensor *x = te_tensor_full(te, TE_F32, SHAPE(2), 3);
        CHECK_EQ_INT(te_all_reduce(part, x, TE_REDUCE_SUM), TE_OK);
        CHECK_EQ_INT(te_barrier(g), TE_OK);
        CHECK(test_read(x)[1] == 3);
        CHECK_EQ_INT(te_group_abort(g, "nothing"), TE_OK);
        te_group_destroy(g);
        te_group_destroy(part);
    }
    CHECK_OK(te);
}

/* ---- NCCL itself, on one GPU ------------------------------------------------------------------------------------- */

/* Over two ranks there is one order of sums. Over four, whole numbers have the same sum in each. */
TE_TEST(gpu_equal_to_threads) {
    const char *why = no_nccl();
    if (why) SKIP(why);
    equal_to_threads(2);
    test_setenv("TE_TEST_WHOLE", "1");
    equal_to_threads(4);
}

/* Collectives in a graph: each launch multiplies x by the number of ranks. */
static void launch_graph(process_rank *p) {
    const int64_t n = 1000;
    te_tensor *x = te_tensor_full(p->te, TE_BF16, SHAPE(n), 1),
              *out = te_tensor_zeros(p->te, TE_BF16, SHAPE(n * p->size));
    te_tensor *back = te_tensor_zeros(p->te, TE_BF16, SHAPE(n * p->size));
    te_graph *g;
    for (int i = 0; i < 2; i++) { /* once as calls, then in a capture */
        if (i) te_graph_begin(p->te);
        te_all_reduce(p->group, x, TE_REDUCE_SUM);
        te_all_gather(p->group, x, out);
        te_barrier(p->group);
        te_all_to_all(p->group, out, NULL, back, NULL);
    }
    g = te_graph_end(p->te);
    for (int i = 0; i < 3; i++) te_graph_launch(g);
    float *host = (float *)calloc((size_t)(n * p->size), sizeof *host);
    te_tensor_to_f32(back, host);
    fprintf(p->out, "%g %g %s", host[0], host[n * p->size - 1], te_error(p->te));
    free(host);
    te_graph_destroy(g);
}
static void check_launch_graph(void) {
    for (int size = 2; size <= 4; size += 2) {
        run_processes("graph", size);
        for (int i = 0; i < size; i++)
            CHECK_MSG(!strcmp((const char *)processes[i].said, size == 2 ? "16 16 " : "256 256 "), "rank %d: %s", i,
                      (const char *)processes[i].said);
    }
}
TE_TEST(graph) { /* on the CPU each launch makes the collectives */
    prepare_processes();
    check_launch_graph();
}
TE_TEST(gpu_graph) {
    const char *why = no_nccl();
    if (why) SKIP(why);
    check_launch_graph();
}

/* On the CPU a launch may fail before its collectives: the other ranks hear of it. */
static void fail_in_a_launch(process_rank *p) {
    te_tensor *table = te_tensor_full(p->te, TE_F32, SHAPE(4, 8), 1), *y = te_tensor_zeros(p->te, TE_F32, SHAPE(2, 8)),
              *ids = te_tensor_zeros(p->te, TE_I32, SHAPE(2));
    const te_op_embedding_fwd_args args = {.ids = ids, .table = table, .y = y};
    te_graph_begin(p->te);
    te_op_embedding_fwd(p->te, &args);
    te_all_reduce(p->group, y, TE_REDUCE_SUM);
    te_graph *g = te_graph_end(p->te);
    te_result r = te_graph_launch(g);
    if (r == TE_OK && p->rank == 1) te_tensor_copy_from_host(ids, (int[]){0, 4});
    if (r == TE_OK) r = te_graph_launch(g);
    fprintf(p->out, "%s: %s", te_result_name(r), te_error(p->te));
    te_clear_error(p->te);
    te_graph_destroy(g);
}
TE_TEST(one_fails_in_a_launch) {
    prepare_processes();
    run_processes("fail_in_a_launch", 3);
    for (int i = 0; i < 3; i++) {
        const char *said = (const char *)processes[i].said;
        CHECK_STR(said, i == 1 ? "TE_ERR_INVALID: embedding_fwd" : "rank 1 (process ");
        CHECK_STR(said, "ids");
    }
}

/* Launches a graph of collectives until a launch or a wait fails, then says why. */
static void launch_for_ever(process_rank *p) {
    te_tensor *x = te_tensor_full(p->te, TE_F32, SHAPE(5000), 1), *out = te_tensor_zeros(p->te, TE_F32, SHAPE(5000 * p->size));
    te_result r = te_all_reduce(p->group, x, TE_REDUCE_MAX);
    te_graph *g;
    te_graph_begin(p->te);
    te_all_reduce(p->group, x, TE_REDUCE_MAX);
    te_all_gather(p->group, x, out);
    g = te_graph_end(p->te);
    for (int i = 0; r == TE_OK && (r = te_error_code(p->te)) == TE_OK; i++) {
        r = te_graph_launch(g);
        if (i % 10 == 9 && r == TE_OK) r = te_synchronize(p->te);
        if (i == 10) fputc('\n', p->out), fflush(p->out); /* see wait_until_ready */
    }
    fprintf(p->out, "%s: %s", te_result_name(r), te_error(p->te));
    te_graph_destroy(g);
}

TE_TEST(gpu_layout) {
    const char *why = no_nccl();
    if (why) SKIP(why);
    check_layout();
}
TE_TEST(gpu_maximum_of_nans) {
    const char *why = no_nccl();
    if (why) SKIP(why);
    check_maximum_of_nans();
}
TE_TEST(gpu_one_differs) {
    const char *why = no_nccl();
    if (why) SKIP(why);
    check_one_differs();
}
TE_TEST(gpu_debug_sync_compares) {
    const char *why = no_nccl();
    if (why) SKIP(why);
    check_debug_sync();
}
TE_TEST(gpu_message_that_does_not_come) {
    const char *why = no_nccl();
    if (why) SKIP(why);
    test_setenv("TE_TEST_SECONDS", "6"); /* in which the processes have to start, too */
    check_receive_nothing();
}

/* Queues more than the stream takes behind a collective that does not end: a call of NCCL's waits for room. */
static void fill_the_stream(process_rank *p) {
    te_tensor *x = te_tensor_zeros(p->te, TE_F32, SHAPE(4));
    te_result r = te_all_reduce(p->group, x, TE_REDUCE_SUM);
    for (int i = 0; i < 5000 && r == TE_OK; i++) {
        if (p->rank) usleep(2000);
        r = p->rank ? te_synchronize(p->te) : te_all_reduce(p->group, x, TE_REDUCE_SUM);
    }
    fprintf(p->out, "%s: %s", te_result_name(r), te_error(p->te));
}
TE_TEST(gpu_full_stream) {
    const char *why = no_nccl();
    if (why) SKIP(why);
    test_setenv("TE_TEST_SECONDS", "6"); /* in which the processes have to start, too */
    run_processes("fill_the_stream", 2);
    for (int i = 0; i < 2; i++) {
        CHECK_STR((const char *)processes[i].said, "TE_ERR_STATE: ");
        CHECK_STR((const char *)processes[i].said, "te_all_reduce f32 [4] sum has waited too long: rank 1 (process ");
    }
}

TE_TEST(gpu_late) {
    const char *why = no_nccl();
    if (why) SKIP(why);
    test_setenv("TE_TEST_SECONDS", "10"); /* the ranks' first collective, which compiles kernels, has to end in it */
    run_processes("late", 2);
    for (int i = 0; i < 2; i++) {
        CHECK_STR((const char *)processes[i].said, "TE_ERR_STATE: ");
        CHECK_STR((const char *)processes[i].said, "te_all_reduce f32 [2, 3] sum has waited too long");
        CHECK_STR((const char *)processes[i].said, "rank 1 (process ");
    }
}

static void kill_at_work(const char *part, int rounds) {
    uint64_t state = 7;
    for (int round = 0; round < rounds; round++) {
        int size = 2 + 2 * (round % 2), dead = (int)(step_of(&state) % (uint64_t)size);
        char gone[64];
        test_case("round %d: rank %d of %d is killed", round, dead, size);
        start_processes(part, size);
        /* at work: a rank that is killed before it has come is missed after a minute alone */
        for (int i = 0; i < size; i++) wait_until_ready(i);
        usleep((useconds_t)(step_of(&state) % 300000));
        kill(processes[dead].pid, SIGKILL);
        snprintf(gone, sizeof gone, "rank %d (process %d on ", dead, (int)processes[dead].pid);
        end_processes(size);
        for (int i = 0; i < size; i++) {
            if (i == dead) continue;
            CHECK(WIFEXITED(processes[i].status) && WEXITSTATUS(processes[i].status) == 0);
            CHECK_STR((const char *)processes[i].said, gone);
            CHECK_STR((const char *)processes[i].said, "is gone");
        }
    }
}
TE_TEST(gpu_killed) {
    const char *why = no_nccl();
    if (why) SKIP(why);
    kill_at_work("for_ever", 8);
}
TE_TEST(killed_in_graphs) {
    prepare_processes();
    kill_at_work("graphs", 4);
}
TE_TEST(gpu_killed_in_graphs) {
    const char *why = no_nccl();
    if (why) SKIP(why);
    kill_at_work("graphs", 4);
}

static const process_part parts[] = {
    {"fork_and_die", fork_and_die},       {"receive_nothing", receive_nothing}, {"graph", launch_graph},
    {"layout", lay_out_processes},        {"all_calls", all_calls_of_process},  {"graphs", launch_for_ever},
    {"maximum_of_nans", maximum_of_nans}, {"for_ever", go_on_for_ever},         {"late", come_late},
    {"one_differs", one_differs},         {"fill_the_stream", fill_the_stream},
    {"fail_in_a_launch", fail_in_a_launch}};
__attribute__((constructor)) static void become_one_of_them(void) { become_a_rank(parts, COUNT(parts)); }
