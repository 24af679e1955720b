/* test_parallel_processes.c: tensor-parallel modules over processes (NCCL on a GPU, the stand-in on the CPU) compute the
 * bits of modules over threads. test_parallel.c compares ranks with the whole, and exchanges beside products with the
 * others. The stand-in queues nothing, so that only NCCL shows exchanges that run beside products. */
#define _GNU_SOURCE
#include "../dist/processes.h"
#include "../dist/ranks.h"

enum { LINES = 16, BATCH = 16, HIDDEN = 256 }; /* 128 rows of each of 2 ranks, for blocks */
/* The CPU runs no recipe of blocks of 128 here, and fewer columns take less time. */
static int64_t hidden_of(te_ctx *te) { return te_ctx_is_cuda(te) ? HIDDEN : 64; }

typedef struct made_bytes {
    uint8_t *at;
    size_t n;
} made_bytes;
static void add_tensor(made_bytes *t, te_tensor *x) {
    const size_t n = x ? te_tensor_bytes(x) : 0;
    t->at = (uint8_t *)realloc(t->at, t->n + n + 1);
    if (n) te_tensor_to_host(x, t->at + t->n);
    t->n += n;
}
static bool add_gradient(void *user, te_module *m, const char *path, te_tensor *x, te_entry_kind kind) {
    (void)m, (void)path;
    if (kind == TE_ENTRY_PARAMETER) add_tensor((made_bytes *)user, te_tensor_grad(x));
    return true;
}

static te_recipe recipe_of(char c) {
    te_recipe r = {0};
    switch (c) {
    case 'd': return te_recipe_delayed_scaling();
    case 'c': return te_recipe_current_scaling();
    case 'b': return te_recipe_block_scaling();
    case 'm': return te_recipe_mxfp8();
    case 'n': r = te_recipe_nvfp4(); r.nvfp4.stochastic_rounding = TE_OFF; return r;
    default: return r; /* bf16 */
    }
}
static te_parallel_options options_of(te_group *g, char way) {
    te_parallel_options o = {.tp_group = g, .set_parallel_mode = true, .sequence_parallel = way != 'r'};
    if (way == 'o') o.ub_overlap_ag = o.ub_overlap_rs = o.ub_overlap_rs_dgrad = o.ub_bulk_dgrad = true;
    if (way == 'w') o.ub_bulk_dgrad = o.ub_bulk_wgrad = true;
    if (way == 'u') o.ub_overlap_ag = o.ub_overlap_rs = o.ub_bulk_dgrad = o.ub_bulk_wgrad = true;
    return o;
}
static te_module *mlp_of(te_ctx *te, te_group *g, char way) {
    te_layernorm_mlp_desc d = {.hidden_size = hidden_of(te), .ffn_hidden_size = hidden_of(te), .parallel = options_of(g, way)};
    te_seed(te, 5);
    return te_layernorm_mlp_create(te, &d);
}
static te_tensor *step_of(te_module *m, te_tensor *x, te_tensor *dy, te_recipe *r) {
    te_autocast_begin(te_module_ctx(m), &(te_autocast_desc){.recipe = r->kind ? r : NULL, .disabled = !r->kind});
    te_tensor *y = te_forward(m, x);
    te_autocast_end(te_module_ctx(m));
    te_backward_from(y, dy);
    return y;
}
/* `list`: pairs of a recipe and a way of exchanging: r: all rows on each rank, s: sequence parallel, u: with exchanges
 * beside products, o: likewise, and all sums in the order of ranks. */
static made_bytes run_list(te_ctx *te, te_group *g, const char *list) {
    made_bytes t = {NULL, 0};
    for (const char *c = list; *c && te_ok(te); c += 2) {
        te_recipe recipe = recipe_of(c[0]);
        te_module *m = mlp_of(te, g, c[1]);
        const int64_t lines = c[1] == 'r' ? LINES : LINES / te_group_size(g);
        te_scope_begin(te);
        for (int step = 0; step < 2; step++) {
            te_seed(te, 40 + (uint64_t)(step + (c[1] == 'r' ? 0 : 8 * te_group_rank(g))));
            te_tensor *x = te_tensor_set_requires_grad(te_tensor_normal(te, TE_BF16, SHAPE(lines, BATCH, hidden_of(te)), 0, 1), true);
            te_tensor *dy = te_tensor_normal(te, TE_BF16, SHAPE(lines, BATCH, hidden_of(te)), 0, 1);
            add_tensor(&t, step_of(m, x, dy, &recipe));
            add_tensor(&t, te_tensor_grad(x));
        }
        te_module_visit_tensors(m, add_gradient, &t); /* of both steps */
        te_module_destroy(m);
        te_scope_end(te);
    }
    return t;
}
/* A table, a head and a loss whose vocabulary the ranks share. */
static void add_vocabulary(te_ctx *te, te_group *g, made_bytes *t) {
    enum { VOCAB = 128, TOKENS = 64 };
    int32_t ids[TOKENS];
    for (int i = 0; i < TOKENS; i++) ids[i] = i * 29 % VOCAB;
    te_scope_begin(te);
    te_seed(te, 60 + (uint64_t)te_group_rank(g));
    const int64_t own = VOCAB / te_group_size(g);
    te_tensor *table = te_tensor_set_requires_grad(te_tensor_normal(te, TE_BF16, SHAPE(own, HIDDEN), 0, 1), true);
    te_tensor *id = te_tensor_from_host(te, TE_I32, SHAPE(TOKENS), ids);
    te_tensor *x = te_vocab_parallel_embedding_lookup(table, id, VOCAB, te_group_rank(g) * own);
    te_all_reduce(g, x, TE_REDUCE_SUM); /* one term is not zero: exact in any order */
    te_tensor *logits = te_tensor_set_requires_grad(te_tensor_detach(te_tensor_contiguous(te_tensor_narrow(x, 1, 0, own))), true);
    te_tensor *loss = te_cross_entropy(logits, id, &(te_cross_entropy_desc){.dist_process_group = g});
    te_backward(loss);
    te_backward_from(x, x);
    add_tensor(t, loss);
    add_tensor(t, te_tensor_grad(logits));
    add_tensor(t, te_tensor_grad(table));
    te_scope_end(te);
}

static void run_as_process(process_rank *p) {
    made_bytes t = run_list(p->te, p->group, p->arg);
    add_vocabulary(p->te, p->group, &t);
    if (te_ok(p->te)) fwrite(t.at, 1, t.n, p->out);
    else fprintf(p->out, "%s", te_error(p->te));
    free(t.at);
}
static void run_as_thread(rank_state *s) {
    made_bytes t = run_list(s->te, s->group, (const char *)s->arg);
    add_vocabulary(s->te, s->group, &t);
    s->left[s->num_left] = t.at;
    s->bytes[s->num_left++] = t.n;
}
static void equal_to_threads(const char *device, int size, const char *list) {
    test_setenv("TE_TEST_ARG", list);
    test_case("%d ranks, %s", size, list);
    rank_state *threads = run_ranks_on(device, false, size, run_as_thread, list);
    run_processes("tensor_parallel", size);
    for (int i = 0; i < size; i++) {
        CHECK_MSG(processes[i].bytes == threads[i].bytes[0] && threads[i].bytes[0] > 1000,
                  "rank %d of %d left %zu bytes, and its thread %zu: %.500s", i, size, processes[i].bytes,
                  threads[i].bytes[0], processes[i].bytes < 4096 ? (const char *)processes[i].said : "");
        if (processes[i].bytes == threads[i].bytes[0])
            CHECK_BYTES("all that a rank computes", processes[i].said, threads[i].left[0], processes[i].bytes);
    }
}
/* Over two ranks a sum has one order. Over four, NCCL adds in an order of its own, unless products are split. */
TE_TEST(tensor_parallel_over_processes) {
    prepare_processes();
    equal_to_threads("cpu", 2, "xscumo");
    if (!test_samples()) equal_to_threads("cpu", 4, "nuxr");
}
TE_TEST(gpu_tensor_parallel_over_processes) {
    const char *why = no_nccl();
    if (why) SKIP(why);
    equal_to_threads("cuda:0", 2, "xrxsxuxocscocudubomuno");
}
TE_TEST(gpu_tensor_parallel_over_four) { /* they take turns on the GPU, so that their collectives are slow */
    const char *why = no_nccl();
    if (why) SKIP(why);
    equal_to_threads("cuda:0", 4, "xoco");
}

/* Exchanges beside products are parts of a graph: its launches give the bits of calls, and these give about what they
 * give without the options. At this size a product has the same kernel, whole or split. */
enum { GRAPH_LINES = 1024 };
/* TE_TEST_ARG: a recipe, and the way of exchanging. On the CPU there are no graphs. */
static void launch_products(process_rank *p) {
    const bool gpu = te_ctx_is_cuda(p->te);
    const int64_t lines = gpu ? GRAPH_LINES : 16 * p->size, hidden = hidden_of(p->te);
    made_bytes t[3] = {{NULL, 0}, {NULL, 0}, {NULL, 0}};
    te_recipe recipe = recipe_of(p->arg[0]);
    te_seed(p->te, 40 + (uint64_t)p->rank);
    te_tensor *x = te_tensor_set_requires_grad(te_tensor_normal(p->te, TE_BF16, SHAPE(lines, 1, hidden), 0, 1), true);
    te_tensor *dy = te_tensor_normal(p->te, TE_BF16, SHAPE(lines, 1, hidden), 0, 1);
    int wrong_bytes = 0;
    for (int k = 0; k < (gpu ? 3 : 2); k++) { /* without the options; with them; in a graph */
        te_module *m = mlp_of(p->te, p->group, k ? p->arg[1] : 's');
        te_graph *g = NULL;
        te_tensor *y = step_of(m, x, dy, &recipe); /* kernels are compiled, gradients there */
        if (k == 2) te_graph_begin(p->te);
        te_tensor_zero_grad(x);
        te_module_zero_grad(m);
        y = step_of(m, x, dy, &recipe);
        if (k == 2) {
            g = te_graph_end(p->te);
            for (int i = 0; i < 2; i++) te_graph_launch(g);
        }
        add_tensor(&t[k], y);
        add_tensor(&t[k], te_tensor_grad(x));
        te_module_visit_tensors(m, add_gradient, &t[k]);
        te_graph_destroy(g);
        te_module_destroy(m);
        te_tensor_zero_grad(x);
    }
    for (int k = 1; k < (gpu ? 3 : 2); k++)
        for (size_t i = 0; i < t[0].n; i++) wrong_bytes += t[k].n != t[0].n || t[k].at[i] != t[0].at[i];
    fprintf(p->out, "%d of %s bytes differ %s", wrong_bytes, t[0].n > (gpu ? 1000000 : 10000) ? "many" : "few", te_error(p->te));
    for (int k = 0; k < 3; k++) free(t[k].at);
}
static void launch_list(const char *const *list, int size) {
    for (; *list; list++) {
        test_setenv("TE_TEST_ARG", *list);
        run_processes("graph_of_products", size);
        for (int k = 0; k < size; k++)
            CHECK_MSG(!strcmp((const char *)processes[k].said, "0 of many bytes differ "), "%s, rank %d: %s", *list, k,
                      (const char *)processes[k].said);
    }
}
TE_TEST(gpu_products_beside_in_a_graph) {
    static const char *const list[] = {"xo", "co", "mo", NULL};
    const char *why = no_nccl();
    if (why) SKIP(why);
    launch_list(list, 2);
}
/* Sums of bf16 over more than two ranks travel in f32, beside a product or not: NCCL has one order for both. */
TE_TEST(sums_beside_products_over_four) {
    static const char *const list[] = {"xw", NULL};
    prepare_processes();
    launch_list(list, 4);
}
TE_TEST(gpu_sums_beside_products_over_four) {
    static const char *const list[] = {"xw", "cw", NULL};
    const char *why = no_nccl();
    if (why) SKIP(why);
    launch_list(list, 4);
}

static const process_part parts[] = {{"tensor_parallel", run_as_process}, {"graph_of_products", launch_products}};
__attribute__((constructor)) static void become_one_of_these(void) { become_a_rank(parts, COUNT(parts)); }
