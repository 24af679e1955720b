/* test_shard_processes.c: units over processes (NCCL on a GPU, the stand-in on the CPU) train to the numbers of units
 * over threads. test_shards.c compares what is sharded with what is whole. */
#define _GNU_SOURCE
#include "../dist/processes.h"
#include "step.h"

typedef struct trained {
    float *v;
    int64_t n;
} trained;
static void add_values(trained *t, const te_tensor *x) {
    const int64_t n = te_tensor_numel(x);
    t->v = (float *)realloc(t->v, (size_t)(t->n + n) * sizeof(float));
    te_tensor_to_f32(x, t->v + t->n);
    t->n += n;
}

/* The parameters of each way of sharding after TB_STEPS steps, for one kind of numbers. */
static trained train_each_way(rank_state *s, int number) {
    const bool gpu = te_ctx_is_cuda(s->te);
    const shard_case c = {.num = &numbers[number], .width = gpu ? 128 : 64, .inner = gpu ? 256 : 160};
    trained t = {NULL, 0};
    for (int shard = TE_SHARD_NONE; shard <= TE_SHARD_PARAMETERS; shard++) {
        te_module *m = make_model(s->te, &c);
        param_list l = {0};
        make_units(s, m, &c, (te_shard)shard);
        te_optimizer *adam = make_optimizer(s->te, m, &c);
        for (int step = 0; step < TB_STEPS; step++) EXPECT(s, run_step(s, m, adam, &c, step, NULL) == TE_OK);
        EXPECT(s, te_fsdp_unshard(m) == TE_OK);
        te_module_visit_tensors(m, list_param, &l);
        for (int i = 0; i < l.n; i++) add_values(&t, l.list[i]);
        te_optimizer_destroy(adam);
        te_module_destroy(m);
    }
    return t;
}

/* TE_TEST_ARG lists the kinds of numbers: "168". */
static void train_as_process(process_rank *p) {
    rank_state s = {0};
    s.te = p->te, s.group = p->group, s.rank = p->rank, s.size = p->size;
    for (const char *c = p->arg; *c; c++) {
        trained t = train_each_way(&s, *c - '0');
        if (!s.wrong && te_ok(p->te)) fwrite(t.v, sizeof(float), (size_t)t.n, p->out);
        free(t.v);
    }
    if (s.wrong || !te_ok(p->te)) fprintf(p->out, "%s %s", s.what, te_error(p->te));
}
static void train_as_thread(rank_state *s) {
    for (const char *c = (const char *)s->arg; *c; c++) {
        trained t = train_each_way(s, *c - '0');
        s->left[s->num_left] = t.v;
        s->bytes[s->num_left++] = (size_t)t.n * sizeof(float);
    }
}

/* With two ranks a sum has one order, so bits are equal. With four, NCCL adds whole gradients in an order of its own,
 * and Adam divides nearly equal moments by each other; rounding to 8 or 4 bits may go the other way. See equal_rank of
 * test_shards.c. */
static void equal_to_threads(const char *device, int size, const char *list) {
    test_setenv("TE_TEST_ARG", list);
    rank_state *threads = run_ranks_on(device, false, size, train_as_thread, list);
    for (int turn = 0; turn < size / 2; turn++) {
        uint8_t *before[MAX_PROCESSES];
        for (int i = 0; i < size; i++) before[i] = processes[i].said;
        run_processes("shards", size);
        for (int i = 0; i < size; i++) {
            const uint8_t *at = processes[i].said;
            size_t all = 0;
            for (int k = 0; k < threads[i].num_left; k++) all += threads[i].bytes[k];
            test_case("%d ranks", size);
            CHECK_MSG(processes[i].bytes == all, "rank %d left %zu bytes, and its thread %zu: ... %.500s", i,
                      processes[i].bytes, all,
                      (const char *)at + (processes[i].bytes > 500 ? processes[i].bytes - 500 : 0));
            if (processes[i].bytes != all) continue;
            for (int k = 0; k < threads[i].num_left; at += threads[i].bytes[k++]) {
                const number_case *c = &numbers[list[k] - '0'];
                test_case("%d ranks, %s%s", size, c->name, c->stored ? ", stored" : "");
                if (size > 2)
                    CHECK_ERROR_BELOW("parameters", (const float *)at, (const float *)threads[i].left[k],
                                      (int64_t)(threads[i].bytes[k] / sizeof(float)), c->stored ? 5e-3 : 2e-3);
                else CHECK_BYTES("parameters", at, threads[i].left[k], threads[i].bytes[k]);
                /* the same layout again: the same bits */
                if (turn)
                    CHECK_BYTES("parameters of another run", at, before[i] + (at - processes[i].said),
                                threads[i].bytes[k]);
            }
        }
    }
}
TE_TEST(shards_over_processes) {
    prepare_processes();
    equal_to_threads("cpu", 2, test_samples() ? "06" : "068");
    if (!test_samples()) equal_to_threads("cpu", 4, "16");
}
TE_TEST(shards_over_four_in_another_order) {
    if (test_samples()) SKIP("shards_over_processes has these cases");
    prepare_processes();
    test_setenv("TE_NCCL_STAND_IN_ORDER", "ring");
    equal_to_threads("cpu", 4, "1689");
}
TE_TEST(gpu_shards_over_processes) {
    const char *why = no_nccl();
    if (why) SKIP(why);
    equal_to_threads("cuda:0", 2, "168");
}
TE_TEST(gpu_shards_in_other_recipes) {
    const char *why = no_nccl();
    if (why) SKIP(why);
    equal_to_threads("cuda:0", 2, "3579");
}
TE_TEST(gpu_shards_over_four) { /* they take turns on the GPU, so that their collectives are slow */
    const char *why = no_nccl();
    if (why) SKIP(why);
    equal_to_threads("cuda:0", 4, "1689");
}

/* A step whose gradients are exchanged is one graph: its launches train as calls do. */
static te_result train_once(te_module *m, te_optimizer *adam, const shard_case *c, te_tensor *x) {
    te_recipe recipe = c->num->recipe();
    if (c->num->autocast) te_autocast_begin(te_module_ctx(m), &(te_autocast_desc){.recipe = &recipe});
    te_tensor *y = te_forward(m, x);
    if (c->num->autocast) te_autocast_end(te_module_ctx(m));
    te_result result = te_backward(te_mean_all(te_activate(y, TE_GELU, NULL)));
    return result == TE_OK ? te_optimizer_step(adam) : result;
}
static void train_by_graph(process_rank *p) {
    rank_state s = {0};
    const shard_case c = {.num = &numbers[atoi(p->arg)], .width = 128, .inner = 256};
    trained t[2] = {{NULL, 0}, {NULL, 0}};
    s.te = p->te, s.group = p->group, s.rank = p->rank, s.size = p->size;
    for (int k = 0; k < 2; k++) {
        te_module *m = make_model(p->te, &c);
        param_list l = {0};
        make_units(&s, m, &c, TE_SHARD_NONE);
        te_optimizer *adam = make_optimizer(p->te, m, &c);
        te_seed(p->te, 40 + (uint64_t)p->rank);
        te_tensor *x = te_tensor_normal(p->te, c.num->dtype, SHAPE(TB_ROWS, c.width), 0, 1);
        EXPECT(&s, train_once(m, adam, &c, x) == TE_OK); /* kernels are compiled, states made */
        if (k) {
            te_graph_begin(p->te);
            EXPECT(&s, train_once(m, adam, &c, x) == TE_OK);
            te_graph *g = te_graph_end(p->te);
            for (int i = 0; i < 3; i++) EXPECT(&s, te_graph_launch(g) == TE_OK);
            te_graph_destroy(g);
        } else
            for (int i = 0; i < 3; i++) EXPECT(&s, train_once(m, adam, &c, x) == TE_OK);
        te_module_visit_tensors(m, list_param, &l);
        for (int i = 0; i < l.n; i++) add_values(&t[k], l.list[i]);
        te_optimizer_destroy(adam);
        te_module_destroy(m);
    }
    EXPECT(&s, t[0].n == t[1].n && !memcmp(t[0].v, t[1].v, (size_t)t[0].n * sizeof(float)));
    fprintf(p->out, "%d %s%s", s.wrong, s.what, te_error(p->te));
    free(t[0].v);
    free(t[1].v);
}
TE_TEST(gpu_step_is_a_graph) {
    static const int some[] = {1, 6};
    const char *why = no_nccl();
    if (why) SKIP(why);
    for (int i = 0; i < COUNT(some); i++)
        for (int size = 2; size <= 4; size += 2) {
            test_case("%d ranks, %s", size, numbers[some[i]].name);
            test_setenv("TE_TEST_ARG", some[i] == 1 ? "1" : "6");
            run_processes("graph_step", size);
            for (int k = 0; k < size; k++)
                CHECK_MSG(!strcmp((const char *)processes[k].said, "0 "), "rank %d: %s", k,
                          (const char *)processes[k].said);
        }
}

/* The bytes on the way, and the peaks of a rank's memory, are those of the formulas. TE_TEST_ARG: pairs of the kind of
 * numbers and the way to shard; 3: parameters that stay. */
static void step_as_process(process_rank *p) {
    rank_state s = {0};
    s.te = p->te, s.group = p->group, s.rank = p->rank, s.size = p->size;
    for (const char *pair = p->arg; *pair; pair += 2) {
        const bool gpu = te_ctx_is_cuda(p->te), stay = pair[1] == '3';
        const number_case *num = &numbers[pair[0] - '0'];
        step_peaks got = {0, 0, 0};
        const step_case c = {.num = num,
                             .shard = stay ? TE_SHARD_PARAMETERS : (te_shard)(pair[1] - '0'),
                             .stay = stay,
                             .width = gpu ? STEP_WIDTH_ON_GPU : STEP_WIDTH,
                             .flights = true,
                             .peaks = &got};
        s.arg = &c;
        step_rank(&s);
        const step_peak_range step = step_peaks_of(&c, p->size, &got, gpu), forward = forward_peaks(&c, &got, gpu);
        fprintf(p->out, "%s, shard %c: ", num->name, pair[1]);
        if (step_checks_step(&c)) fprintf(p->out, "%.3f of %.3f to %.3f", got.step, step.from, step.to);
        if (step_checks_forward(&c))
            fprintf(p->out, ", forward %.3f of %.3f to %.3f", got.forward, forward.from, forward.to);
        if (pair[2]) fprintf(p->out, "; ");
    }
    if (s.wrong || !te_ok(p->te)) fprintf(p->out, " WRONG %d %s %s", s.wrong, s.what, te_error(p->te));
}
static void memory_of(int size, const char *list) {
    test_setenv("TE_TEST_ARG", list);
    test_case("%d ranks", size);
    run_processes("step", size);
    for (int i = 0; i < size; i++) {
        const char *said = (const char *)processes[i].said;
        CHECK_MSG(strstr(said, "shard ") && !strstr(said, "WRONG"), "rank %d: %s", i, said);
    }
    if (getenv("TE_TEST_SHOW"))
        printf("%d ranks, bytes for each element of a unit: %s\n", size, (const char *)processes[0].said);
}
TE_TEST(memory_of_ranks) {
    prepare_processes();
    memory_of(2, test_samples() ? "12" : "101112136282");
    if (!test_samples()) memory_of(4, "10111213");
}
TE_TEST(gpu_memory_of_ranks) {
    const char *why = no_nccl();
    if (why) SKIP(why);
    for (int size = 2; size <= 4; size += 2) memory_of(size, "101112136282");
}

static const process_part parts[] = {
    {"shards", train_as_process}, {"graph_step", train_by_graph}, {"step", step_as_process}};
__attribute__((constructor)) static void become_one_of_them(void) { become_a_rank(parts, COUNT(parts)); }
