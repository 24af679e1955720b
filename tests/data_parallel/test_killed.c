/* test_killed.c: processes that train together and write one checkpoint after the other, of which one is killed, or has
 * no room left on its disk: the others end with an error that names it, and the checkpoint that is there is whole and
 * goes on in another layout. Over the stand-in on the CPU, which cannot show how NCCL ends, and over NCCL on a GPU. */
#define _GNU_SOURCE
#include "../dist/processes.h"
#include "shards.h"

/* Of each kind of numbers, sizes that ranks do not divide alike. A GPU multiplies FP8 by sixteens. */
static const shard_case cases[] = {{.num = &numbers[1], .width = 48, .inner = 80},
                                   {.num = &numbers[6], .width = 48, .inner = 80}};

typedef struct trainee {
    te_module *m;
    te_optimizer *opt;
} trainee;
static trainee begin(rank_state *s, const shard_case *c, te_shard shard) {
    trainee t;
    t.m = make_model(s->te, c);
    make_units(s, t.m, c, shard);
    t.opt = make_optimizer(s->te, t.m, c);
    return t;
}
static void end(trainee t) {
    te_optimizer_destroy(t.opt);
    te_module_destroy(t.m);
}

/* TE_TEST_ARG: the number of the case, and the path of the checkpoints. */
static rank_state state_of(const process_rank *p) {
    rank_state s = {0};
    s.te = p->te, s.group = p->group, s.rank = p->rank, s.size = p->size;
    return s;
}
static void save_for_ever(process_rank *p) {
    rank_state s = state_of(p);
    const shard_case *c = &cases[p->arg[0] - '0'];
    trainee t = begin(&s, c, TE_SHARD_PARAMETERS);
    te_result r = TE_OK;
    for (int step = 0; step < 100000 && r == TE_OK; step++) {
        r = run_step(&s, t.m, t.opt, c, step, NULL);
        if (r == TE_OK) r = te_model_save(p->te, p->arg + 1, t.m, t.opt, NULL, 0);
        if (step == 0) fputc('\n', p->out), fflush(p->out); /* see wait_until_ready */
    }
    fprintf(p->out, "%s: %s", te_result_name(r), te_error(p->te));
    end(t);
}

typedef struct left_case {
    const shard_case *c;
    char set[512], one[512]; /* what the processes have left; the same steps of one model that is whole */
    int *steps;              /* how many they were */
} left_case;
/* As many steps as the checkpoint has, by threads in the layout of the processes. */
static void repeat_rank(rank_state *s) {
    const left_case *l = (const left_case *)s->arg;
    trainee t = begin(s, l->c, TE_SHARD_NONE);
    for (int step = 0; step < *l->steps; step++) EXPECT(s, run_step(s, t.m, t.opt, l->c, step, NULL) == TE_OK);
    if (s->rank == 0) EXPECT(s, te_model_save(s->te, l->one, t.m, t.opt, NULL, 0) == TE_OK);
    end(t);
}
static void count_rank(rank_state *s) {
    const left_case *l = (const left_case *)s->arg;
    trainee t = begin(s, l->c, TE_SHARD_NONE);
    EXPECT(s, te_model_load(s->te, l->set, t.m, t.opt) == TE_OK);
    *l->steps = (int)te_optimizer_steps(t.opt);
    end(t);
}
/* Model and optimizer have the bits of those steps, and train on. */
static void resume_rank(rank_state *s) {
    const left_case *l = (const left_case *)s->arg;
    trainee t = begin(s, l->c, TE_SHARD_PARAMETERS), whole = begin(s, l->c, TE_SHARD_NONE);
    EXPECT(s, te_model_load(s->te, l->set, t.m, t.opt) == TE_OK);
    EXPECT(s, te_model_load(s->te, l->one, whole.m, whole.opt) == TE_OK);
    EXPECT(s, te_optimizer_steps(t.opt) == *l->steps);
    expect_same(s, t.m, whole.m, 0);
    expect_states(s, t.opt, t.m, whole.opt, whole.m, 0);
    EXPECT(s, run_step(s, t.m, t.opt, l->c, 500, NULL) == TE_OK);
    EXPECT(s, run_step(s, whole.m, whole.opt, l->c, 500, NULL) == TE_OK);
    expect_same(s, t.m, whole.m, 0);
    end(t);
    end(whole);
}
/* The checkpoint that `size` processes on the device have left is one of theirs, in another layout. Of 16-bit gradients
 * each rank adds up its slices itself, in the order of ranks, so that NCCL changes no bit. */
static void check_left(const char *device, const shard_case *c, const char *set, int size, int other) {
    int steps = 0;
    left_case l = {.c = c, .steps = &steps};
    snprintf(l.set, sizeof l.set, "%s", set);
    snprintf(l.one, sizeof l.one, "%s", test_path("one.safetensors"));
    run_ranks(0, count_rank, &l);
    CHECK_MSG(steps > 0, "no step is in the checkpoint");
    run_ranks_on(device, false, size, repeat_rank, &l);
    run_ranks_on(device, false, other, resume_rank, &l);
}
/* Kills rank `dead` so long after the first checkpoint. The processes are prepared. */
static void kill_while_all_save(const char *device, int which, int size, int other, int dead, int microseconds) {
    char gone[64], arg[600], set[512];
    snprintf(set, sizeof set, "%s", test_path("kept.safetensors"));
    snprintf(arg, sizeof arg, "%d%s", which, set);
    test_setenv("TE_TEST_ARG", arg);
    start_processes("save_for_ever", size);
    for (int i = 0; i < size; i++) wait_until_ready(i);
    usleep((useconds_t)microseconds);
    kill(processes[dead].pid, SIGKILL);
    snprintf(gone, sizeof gone, "rank %d (process %d on ", dead, (int)processes[dead].pid);
    end_processes(size);
    for (int i = 0; i < size; i++) {
        const char *said = (const char *)processes[i].said;
        if (i == dead) continue;
        CHECK(WIFEXITED(processes[i].status) && WEXITSTATUS(processes[i].status) == 0);
        CHECK_MSG(strstr(said, gone) && strstr(said, "is gone"), "rank %d says: %s", i, said);
    }
    check_left(device, &cases[which], set, size, other);
}

/* The moments are spread over steps and saves, from the first checkpoint on. */
TE_TEST(killed_while_all_save) {
    const int rounds = test_samples() ? 2 : 50;
    const int64_t *random = test_integers(2 * rounds, 5, 0, 1 << 30);
    for (int round = 0; round < rounds; round++) {
        const int size = 2 + round % 2, other = (round / 2 % 2) * (size + 1), which = round / 2 % COUNT(cases);
        const int dead = (int)(random[2 * round] % size);
        prepare_processes();
        test_setenv("TE_TEST_SECONDS", test_samples() ? "8" : "3");
        test_case("round %d: rank %d of %d is killed", round, dead, size);
        kill_while_all_save("cpu", which, size, other, dead, (int)(random[2 * round + 1] % 40000));
    }
}
/* A rank alone, or three, go on with what two have left; one, or two, with what three have left. A step and its
 * checkpoint take longer here. */
TE_TEST(gpu_killed_while_all_save) {
    enum { ROUNDS = 8 };
    const int64_t *random = test_integers(2 * ROUNDS, 6, 0, 1 << 30);
    const char *why = no_nccl();
    if (why) SKIP(why);
    for (int round = 0; round < ROUNDS; round++) {
        const int size = 2 + round % 2, other = round / 2 % 2 ? 0 : 5 - size, which = round / 4;
        const int dead = (int)(random[2 * round] % size);
        test_case("round %d: rank %d of %d is killed", round, dead, size);
        kill_while_all_save("cuda:0", which, size, other, dead, (int)(random[2 * round + 1] % 300000));
    }
}

/* Rank 1's file cannot grow beyond some bytes: no rank replaces anything, and all say whose file it was. The group is
 * over then: the program begins again with the checkpoint of before. */
static void save_without_room(process_rank *p) {
    rank_state s = state_of(p);
    const shard_case *c = &cases[p->arg[0] - '0'];
    trainee t = begin(&s, c, TE_SHARD_PARAMETERS);
    EXPECT(&s, run_step(&s, t.m, t.opt, c, 0, NULL) == TE_OK);
    EXPECT(&s, te_model_save(p->te, p->arg + 1, t.m, t.opt, NULL, 0) == TE_OK);
    EXPECT(&s, run_step(&s, t.m, t.opt, c, 1, NULL) == TE_OK);
    if (p->rank == 1 && !test_limit_files(3000)) wrong(&s, "no limit on the size of files here");
    te_result r = te_model_save(p->te, p->arg + 1, t.m, t.opt, NULL, 0);
    if (p->rank == 1) test_limit_files(-1);
    EXPECT(&s, p->rank == 1 ? r == TE_ERR_IO : r != TE_OK && strstr(te_error(p->te), "rank 1 (process "));
    EXPECT(&s, strstr(te_error(p->te), "kept.safetensors") && strstr(te_error(p->te), "File too large"));
    te_clear_error(p->te);
    fprintf(p->out, "%d %s", s.wrong, s.what);
    end(t);
}
TE_TEST(full_disk_while_all_save) {
    char arg[600], set[512];
    prepare_processes();
    snprintf(set, sizeof set, "%s", test_path("kept.safetensors"));
    snprintf(arg, sizeof arg, "0%s", set);
    test_setenv("TE_TEST_ARG", arg);
    run_processes("without_room", 3);
    for (int i = 0; i < 3; i++)
        CHECK_MSG(!strcmp((const char *)processes[i].said, "0 "), "rank %d: %s", i, (const char *)processes[i].said);
    check_left("cpu", &cases[0], set, 3, 2);
}

static const process_part parts[] = {{"save_for_ever", save_for_ever}, {"without_room", save_without_room}};
__attribute__((constructor)) static void become_one_of_them(void) { become_a_rank(parts, COUNT(parts)); }
