/* A process that runs out of memory on its way through a step whose exchanges run beside other work (dist/flight.c), or
 * whose program's own node fails: the others end with its error, nobody waits, and no tensor is left. Over the stand-in
 * on the CPU, and over NCCL on a GPU, where the others wait in its kernels. tests/nn/test_parallel.c and
 * tests/context_parallel/test_context_parallel.c do this to threads, whose exchanges end where they begin. */
#define _GNU_SOURCE
#include "processes.h"

enum { HEADS = 4, D = 8, WIDTH = 48 };

/* A case is a letter. Attention over shared sequences: p ring, g gathered, a heads; u and U ring and heads in FP8 under
 * current scaling, D heads under delayed scaling. Products that ranks share, with all their exchanges beside them: c by
 * column, r by row, n by column without sequence parallelism, m an MLP, M an MLP in FP8. e: experts with a bound. b: an
 * MLP, and a node of the program behind it, whose backward function fails. */
static bool is_attention(char c) { return strchr("pgauUD", c) != NULL; }
static te_module *make_case(process_rank *p, char c, te_tensor **x) {
    te_ctx *te = p->te;
    te_parallel_options o = {.tp_group = p->group, .set_parallel_mode = true, .sequence_parallel = c != 'n'};
    int64_t shape[4] = {48, WIDTH, HEADS, D};
    int ndim = 2;
    te_module *m;
    o.ub_overlap_ag = o.ub_overlap_rs = o.ub_bulk_dgrad = o.ub_bulk_wgrad = true;
    o.ub_overlap_rs_dgrad = c == 'm';
    if (is_attention(c)) {
        const te_cp_comm comm = c == 'g' ? TE_CP_ALL_GATHER : c == 'p' || c == 'u' ? TE_CP_P2P : TE_CP_A2A;
        const te_dot_product_attention_desc d = {.attention.num_attention_heads = HEADS, .attention.kv_channels = D,
                                                 .parallel.cp_group = p->group, .parallel.cp_comm_type = comm};
        shape[0] = 4, shape[1] = 2, ndim = 4;
        m = te_dot_product_attention_create(te, &d);
    } else if (c == 'e') {
        const te_moe_config config = {.n_routed_experts = 6, .n_activated_experts = 2, .dim = WIDTH,
                                      .moe_inter_dim = WIDTH, .norm_topk_prob = true};
        const te_moe_backend backend = {.ep_group = p->group, .experts = TE_EXPERTS_TORCH_MM,
                                        .dispatcher = TE_DISPATCHER_DEEPEP};
        m = te_moe_create(te, &config, &backend);
        te_set_max_dispatch_tokens(m, shape[0]);
    } else if (strchr("mMb", c)) {
        const te_layernorm_mlp_desc d = {.hidden_size = WIDTH, .ffn_hidden_size = 2 * WIDTH, .parallel = o};
        m = te_layernorm_mlp_create(te, &d);
    } else {
        te_linear_desc d = {.in_features = WIDTH, .out_features = WIDTH, .parallel = o};
        d.parallel.parallel_mode = c == 'r' ? TE_PARALLEL_ROW : TE_PARALLEL_COLUMN;
        if (c == 'r') shape[1] /= p->size;
        m = te_linear_create(te, &d);
    }
    *x = te_tensor_set_requires_grad(te_tensor_full(te, TE_BF16, ndim, shape, 1), true);
    return m;
}

static te_result break_now(te_ctx *te, const void *state, te_tensor *const *saved, te_tensor *const *dy,
                           te_tensor **dx, const bool *needs) {
    (void)te, (void)saved, (void)needs;
    dx[0] = dy[0];
    return *(const bool *)state ? TE_ERR_IO : TE_OK;
}
static te_tensor *breakable(te_tensor *x, bool breaks) {
    te_tensor *y = te_tensor_detach(x);
    te_record(te_tensor_ctx(x), &(te_node_desc){.name = "breakable", .inputs = &x, .num_inputs = 1, .outputs = &y,
                                                .num_outputs = 1, .state = &breaks, .state_size = sizeof breaks,
                                                .backward = break_now});
    return y;
}

/* TE_TEST_ARG: a letter, and the request of rank 1 that is refused, in the second step; 0: none, and each rank leaves
 * the number of its requests. Of b, any request: the node breaks. */
static void starve(process_rank *p) {
    const char c = p->arg[0];
    const int at = atoi(p->arg + 1);
    te_recipe recipe = c == 'D' ? te_recipe_delayed_scaling() : te_recipe_current_scaling();
    te_autocast_desc cast = {.recipe = &recipe, .disabled = !strchr("uUDM", c)};
    te_tensor *x, *dy = NULL;
    te_module *m = make_case(p, c, &x);
    te_forward_args call = {.input = x};
    if (is_attention(c)) recipe.fp8_dpa = true, call.key = call.value = x;
    for (int step = 0; step < 2; step++) {
        int64_t before;
        te_scope_begin(p->te);
        te_autocast_begin(p->te, &cast);
        before = p->requests;
        const bool fails = step && at && p->rank == 1;
        if (fails && c != 'b') p->fail_at = before + at;
        te_tensor *y = te_forward_with(m, &call);
        te_autocast_end(p->te);
        if (y && c == 'b') y = breakable(y, fails);
        if (y && !dy) dy = te_tensor_retain(te_tensor_full(p->te, TE_BF16, te_tensor_ndim(y), te_tensor_shape(y), 1));
        if (y) te_backward_from(y, dy);
        p->fail_at = 0;
        if (!step && !te_ok(p->te)) fprintf(p->out, "the first step: ");
        if (step && !at) fprintf(p->out, "%d", (int)(p->requests - before));
        te_scope_end(p->te);
    }
    te_barrier(p->group); /* a rank that has come through hears of it here */
    fprintf(p->out, "%s", te_error(p->te));
    te_clear_error(p->te);
    te_tensor_release(dy);
    te_module_destroy(m);
}
/* The processes are prepared. `moments`: of 2, of which each falls into another pass. */
static void check_starving(char c, int size, int moments, int shift) {
    const char *error = c == 'b' ? "the backward function of breakable" : "out of host memory";
    char arg[16] = {c, '0'};
    test_setenv("TE_TEST_ARG", arg);
    run_processes("starve", size);
    const int all = atoi((const char *)processes[1].said);
    CHECK_MSG(all > 10, "%s: %s", arg, (const char *)processes[1].said);
    for (int i = 2 - moments; i < 2 && all > 10; i++) {
        snprintf(arg, sizeof arg, "%c%d", c, 1 + (all - 1) * (4 * i + 2) / 8 + shift);
        test_setenv("TE_TEST_ARG", arg);
        test_case("%s of %d requests, %d ranks", arg, all, size);
        run_processes("starve", size);
        for (int r = 0; r < size; r++) {
            const char *said = (const char *)processes[r].said;
            if (!processes[1].bytes && c != 'b') CHECK_MSG(!processes[r].bytes, "rank %d said %.300s, and rank 1 nothing", r, said); /* it went on without that memory */
            else if (r == 1) CHECK_STR(said, error);
            else CHECK_MSG(strstr(said, "rank 1 (process ") && strstr(said, error) && !strstr(said, "too long"), "rank %d said %.300s", r, said);
            /* a rank that is behind may hear of it in its first step */
            CHECK_MSG((r != 1 || !strstr(said, "the first step")) && !strstr(said, "tensors are left"), "rank %d said %.300s", r, said);
        }
    }
}
TE_TEST(a_process_that_starves_beside_flights) {
    static const char cases[] = "apgUuDcnreMmb"; /* each third over three ranks */
    prepare_processes();
    for (int k = 0; k < COUNT(cases) - 1; k += test_every_sanitized(2)) /* more than two ranks: sums of bf16 travel in f32 */
        check_starving(cases[k], k % 3 == 1 ? 3 : 2, 2 - (cases[k] == 'b'), k % 5);
}
TE_TEST(gpu_a_process_that_starves) {
    static const char cases[] = "pmeb";
    const char *why = no_nccl();
    if (why) SKIP(why);
    for (int k = 0; k < COUNT(cases) - 1; k++) check_starving(cases[k], 2, 1, 0); /* in the backward pass */
}

static const process_part starving_parts[] = {{"starve", starve}};
__attribute__((constructor)) static void become_one_that_starves(void) {
    become_a_rank(starving_parts, COUNT(starving_parts));
}
