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
    equal_to_threads("cpu", 2, test_samples() ? "6" : "068");
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

/* ---- graphs: the launches of a captured step train as calls do, for each way of sharding ---- */

/* A case, as a word of TE_TEST_ARG: the kind of numbers, the way of sharding, and letters. */
typedef struct graph_case {
    shard_case c;
    te_shard shard;
    bool keep_grad; /* g: the step is made by calls, behind a graph of both passes */
    bool adds;      /* a: two microbatches, of which the last one exchanges */
    bool both;      /* b: both passes are a graph each */
    bool writes;    /* w: the program writes a parameter before the optimizer's step */
} graph_case;
static graph_case graph_case_of(const char *word, bool gpu) {
    graph_case g = {.shard = (te_shard)(word[1] - '0')};
    g.c = (shard_case){.num = &numbers[word[0] - '0'], .width = gpu ? 128 : 32, .inner = gpu ? 256 : 64};
    for (word += 2; *word && *word != ' '; word++) {
        g.writes = g.writes || *word == 'w';
        g.keep_grad = g.keep_grad || *word == 'g';
        g.adds = g.adds || *word == 'a';
        g.both = g.both || *word == 'b';
        g.c.clip = g.c.clip || *word == 'n';
        g.c.keep_gathered = g.c.keep_gathered || *word == 'k';
        g.c.checkpoint = g.c.checkpoint || *word == 'c';
        g.c.main_grads = g.c.main_grads || *word == 'm';
        g.c.remainders = g.c.remainders || *word == 'r';
        g.c.no_prefetch = g.c.no_prefetch || *word == 'p';
        g.c.frozen = g.c.frozen || *word == 'f';
        if (*word == 's') g.c.bucket = 0.003f;
        if (*word == 'e') g.c.width = 16; /* of a bias, the last two of four ranks have no elements */
        if (*word == 'o') g.c.one_unit = true;
    }
    return g;
}
static te_tensor *graph_forward(te_module *m, const graph_case *g, te_tensor *x) {
    te_recipe recipe = g->c.num->recipe();
    if (g->c.num->autocast) te_autocast_begin(te_module_ctx(m), &(te_autocast_desc){.recipe = &recipe});
    te_tensor *y = te_forward(m, x);
    if (g->c.num->autocast) te_autocast_end(te_module_ctx(m));
    return te_mean_all(te_activate(y, TE_GELU, NULL));
}
/* loss: of a forward that has run already; or NULL */
static te_result graph_passes(te_module *m, const graph_case *g, te_tensor *x, te_tensor *loss) {
    te_result result = TE_OK;
    for (int i = 0; i < (g->adds ? 2 : 1) && result == TE_OK; i++) {
        te_fsdp_state state = {.reshard_after_backward = true, .requires_gradient_sync = i == g->adds};
        te_fsdp_set_state(m, state);
        result = te_backward(loss ? loss : graph_forward(m, g, x));
    }
    if (result == TE_OK && g->writes) result = te_fsdp_unshard(m);
    if (result == TE_OK && g->writes) result = te_tensor_fill(te_module_parameter(te_module_child(m, 0), "bias"), 0.5);
    return result;
}
static te_result graph_step(te_module *m, te_optimizer *adam, const graph_case *g, te_tensor *x) {
    te_result result = graph_passes(m, g, x, NULL);
    return result == TE_OK ? te_optimizer_step(adam) : result;
}
enum { GRAPH_STEPS = 3 };
/* *peak: the most memory of a step by calls, or of the capture of one. */
static void train_by_graph(rank_state *s, const graph_case *gc, bool graphs, trained *t, size_t *peak) {
    te_ctx *te = s->te;
    te_module *m = make_model(te, &gc->c);
    param_list l = {0};
    te_graph *g[2] = {NULL, NULL};
    te_tensor *batch[GRAPH_STEPS + 2];
    make_units(s, m, &gc->c, gc->shard);
    te_optimizer *adam = make_optimizer(te, m, &gc->c);
    te_optimizer_keep_grad(adam, gc->keep_grad);
    te_seed(te, 40 + (uint64_t)s->rank);
    for (int i = 0; i < COUNT(batch); i++)
        batch[i] = te_tensor_normal(te, gc->c.num->dtype, SHAPE(TB_ROWS, gc->c.width), 0, 1);
    te_tensor *x = te_tensor_zeros(te, gc->c.num->dtype, SHAPE(TB_ROWS, gc->c.width));
    te_tensor_copy(x, batch[0]);
    EXPECT(s, graph_step(m, adam, gc, x) == TE_OK); /* kernels are compiled, states made, the order of units learned */
    te_module_zero_grad(m);
    te_memory_reset_peak(te);
    const size_t kept = te_memory_get_stats(te).allocated;
    if (graphs) {
        EXPECT(s, te_fsdp_unshard(m) == TE_OK); /* a capture does not take what is gathered */
        EXPECT(s, te_graph_begin(te) == TE_OK);
        te_memory_reset_peak(te);
        te_tensor *loss = gc->both ? graph_forward(m, gc, x) : NULL;
        if (gc->both) {
            g[0] = te_graph_end(te);
            EXPECT(s, te_graph_begin(te) == TE_OK);
        }
        EXPECT(s, graph_passes(m, gc, x, loss) == TE_OK);
        if (!gc->keep_grad) EXPECT(s, te_optimizer_step(adam) == TE_OK);
        g[1] = te_graph_end(te);
        *peak = te_memory_get_stats(te).peak_allocated - kept;
    }
    for (int i = 1; i <= GRAPH_STEPS && !s->wrong; i++) {
        te_tensor_copy(x, batch[i]);
        if (graphs) {
            if (g[0]) EXPECT(s, te_graph_launch(g[0]) == TE_OK);
            EXPECT(s, te_graph_launch(g[1]) == TE_OK);
            if (gc->keep_grad) EXPECT(s, te_optimizer_step(adam) == TE_OK);
        } else {
            te_module_zero_grad(m);
            EXPECT(s, graph_step(m, adam, gc, x) == TE_OK);
        }
        if (i == 1 && !graphs) *peak = te_memory_get_stats(te).peak_allocated - kept;
        if (i != 2) continue; /* outside of the graph, values are those of the last launch */
        EXPECT(s, te_fsdp_unshard(m) == TE_OK);
        add_values(t, te_module_parameter(te_module_child(m, 0), "weight"));
        /* a launch takes what the program has written */
        EXPECT(s, te_tensor_fill(te_module_parameter(te_module_child(m, 0), "bias"), 0.25) == TE_OK);
    }
    /* a step by calls goes on from there */
    te_tensor_copy(x, batch[GRAPH_STEPS + 1]);
    te_module_zero_grad(m);
    EXPECT(s, graph_step(m, adam, gc, x) == TE_OK);
    EXPECT(s, te_fsdp_unshard(m) == TE_OK);
    te_module_visit_tensors(m, list_param, &l);
    for (int i = 0; i < l.n; i++) {
        static const char *const names[] = {"exp_avg", "exp_avg_sq", "master_param"};
        add_values(t, l.list[i]);
        for (int k = 0; k < 3 - gc->c.remainders; k++) {
            te_tensor *state = te_optimizer_state(adam, l.list[i], names[k], NULL);
            if (state) add_values(t, state);
        }
    }
    te_graph_destroy(g[1]);
    te_graph_destroy(g[0]);
    te_optimizer_destroy(adam);
    te_module_destroy(m);
}
static void train_by_graphs(process_rank *p) {
    rank_state s = {.te = p->te, .group = p->group, .rank = p->rank, .size = p->size};
    for (const char *word = p->arg; word && *word; word = strchr(word, ' ') ? strchr(word, ' ') + 1 : "") {
        const graph_case g = graph_case_of(word, te_ctx_is_cuda(p->te));
        trained t[2] = {{NULL, 0}, {NULL, 0}};
        size_t peak[2] = {0, 0};
        for (int k = 0; k < 2 && !s.wrong; k++) {
            te_scope_begin(p->te);
            train_by_graph(&s, &g, k, &t[k], &peak[k]);
            te_scope_end(p->te);
        }
        EXPECT(&s, t[0].n > 0 && t[0].n == t[1].n && !memcmp(t[0].v, t[1].v, (size_t)t[0].n * sizeof(float)));
        /* the graph's memory: its state, and sizes that do not fit what was released */
        if (!g.both) EXPECT(&s, peak[1] <= peak[0] + 4096 + peak[0] / 8);
        if (s.wrong || !te_ok(p->te)) fprintf(p->out, "%.4s: %s %s; ", word, s.what, te_error(p->te));
        free(t[0].v);
        free(t[1].v);
        if (s.wrong) return;
    }
    fprintf(p->out, "done");
}
static void step_is_a_graph(int size, const char *words) {
    test_case("%d ranks, %s", size, words);
    test_setenv("TE_TEST_ARG", words);
    run_processes("graph_step", size);
    for (int k = 0; k < size; k++)
        CHECK_MSG(!strcmp((const char *)processes[k].said, "done"), "rank %d: %s", k, (const char *)processes[k].said);
}
/* Numbers: 1 bf16, 5 delayed, 6 current, 7 block, 8 mxfp8, 9 nvfp4, stored; 3 current scaling of plain weights. */
TE_TEST(step_is_a_graph) {
    prepare_processes();
    if (test_samples()) {
        step_is_a_graph(2, "12 61 82");
        return;
    }
    step_is_a_graph(2, "10 11 12 61 62 81 82 11n 62n 01 02");
    step_is_a_graph(2, "11g 12g 62g 11a 62a 12b 62b 12k 62k 12kb 12c 62c 11m 12m 12r 12p 12f 12s 11so 11w 12w 62w");
    step_is_a_graph(2, "31 32 51 52 71 72 91 92 82a");
    step_is_a_graph(4, "12 61 11e 12e");
}
TE_TEST(gpu_step_is_a_graph) {
    const char *why = no_nccl();
    if (why) SKIP(why);
    step_is_a_graph(2, "10 60");
    step_is_a_graph(2, "11 61 81 11n 51 71 91 31");
    step_is_a_graph(2, "12 62 82 62n 52 72 92 32");
    step_is_a_graph(2, "12a 62b 12k 62c 12m 12r 12p 12s 11g 62g 12w");
    step_is_a_graph(4, "10 11 12 61 62 12e"); /* they take turns on the GPU, so that their collectives are slow */
}

/* A rank whose launch fails before its first collective: the others, which wait for it there, end with its error. */
static void launch_starves(process_rank *p) {
    rank_state s = {.te = p->te, .group = p->group, .rank = p->rank, .size = p->size};
    const shard_case c = {.num = &numbers[1], .width = 16, .inner = 32};
    te_module *m = make_model(p->te, &c);
    make_units(&s, m, &c, TE_SHARD_PARAMETERS);
    te_tensor *x = te_tensor_full(p->te, TE_BF16, SHAPE(4, 16), 1);
    EXPECT(&s, te_backward(te_mean_all(te_forward(m, x))) == TE_OK);
    te_module_zero_grad(m);
    EXPECT(&s, te_graph_begin(p->te) == TE_OK);
    EXPECT(&s, te_backward(te_mean_all(te_forward(m, x))) == TE_OK);
    te_graph *g = te_graph_end(p->te);
    EXPECT(&s, te_graph_launch(g) == TE_OK);
    EXPECT(&s, te_fsdp_unshard(m) == TE_OK); /* a launch copies to the slices what the program has written */
    EXPECT(&s, te_tensor_fill(te_module_parameter(te_module_child(m, 0), "bias"), 0.5) == TE_OK);
    if (p->rank) p->fail_at = p->requests + 1;
    const te_result result = te_graph_launch(g);
    p->fail_at = 0;
    EXPECT(&s, result == (p->rank ? TE_ERR_OUT_OF_MEMORY : TE_ERR_STATE));
    fprintf(p->out, "%s%s", s.what, te_error(p->te));
    te_clear_error(p->te);
    for (int i = 0; p->rank && i < 100; i++) usleep(10000); /* what the other hears is not that this rank has left */
    te_graph_destroy(g);
    te_module_destroy(m);
}
TE_TEST(launch_fails_on_one_rank) {
    prepare_processes();
    run_processes("launch_starves", 2);
    CHECK_MSG(strstr((const char *)processes[0].said, "failed in its own work: out of host memory"), "rank 0: %s",
              (const char *)processes[0].said);
    CHECK_MSG(!strncmp((const char *)processes[1].said, "out of ", 7), "rank 1: %s", (const char *)processes[1].said);
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

/* Gradients that some ranks lack: NCCL sums those of whole units where they are, and gives those of slices to their
 * ranks. Both have the same bits. */
static void uneven_as_process(process_rank *p) {
    rank_state s = {0};
    s.te = p->te, s.group = p->group, s.rank = p->rank, s.size = p->size;
    for (int i = 0; i < 4; i++) {
        const uneven_case c = {i % 2 ? TE_SHARD_OPTIMIZER : TE_SHARD_NONE, i / 2 ? TE_BF16 : TE_F32};
        s.arg = &c;
        uneven_rank(&s);
    }
    fprintf(p->out, "%s%d %s", s.wrong || !te_ok(p->te) ? "WRONG " : "right ", s.wrong, s.wrong ? s.what : te_error(p->te));
}
static void uneven_ranks(int size) {
    test_case("%d ranks", size);
    run_processes("uneven", size);
    for (int i = 0; i < size; i++) CHECK_MSG(!strncmp((const char *)processes[i].said, "right", 5), "rank %d: %s", i, (const char *)processes[i].said);
}
TE_TEST(units_that_not_all_processes_reach) {
    prepare_processes();
    for (int size = 2; size <= 3; size++) uneven_ranks(size);
}
TE_TEST(gpu_units_that_not_all_processes_reach) {
    const char *why = no_nccl();
    if (why) SKIP(why);
    uneven_ranks(2);
}

static const process_part parts[] = {
    {"shards", train_as_process},
    {"graph_step", train_by_graphs},
    {"launch_starves", launch_starves},
    {"step", step_as_process},
    {"uneven", uneven_as_process}};
__attribute__((constructor)) static void become_one_of_them(void) { become_a_rank(parts, COUNT(parts)); }
