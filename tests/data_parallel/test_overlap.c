/* test_overlap.c: gradients that travel in buckets while the backward pass runs, and parameters that are gathered one
 * unit ahead. Groups of threads run a collective when it begins, so that these tests show order, bits and bytes;
 * dist/test_nccl_paper.c has the streams, and the last tests here need a GPU and NCCL. */
#define _GNU_SOURCE
#include "shards.h"

#include "../dist/ways.h"

/* ---- bits ---- */

/* Buckets of any size, and units gathered ahead or not, have the bits of one exchange of a whole unit. */
static void bucket_rank(rank_state *s) {
    const shard_case *c = (const shard_case *)s->arg;
    shard_case plain = *c;
    enum { WAYS = 4 };
    te_module *m[WAYS];
    te_optimizer *opt[WAYS];
    plain.bucket = 0;
    for (int k = 0; k < WAYS; k++) { /* unsharded in one bucket, and in many; the two ways to shard */
        m[k] = make_model(s->te, c);
        make_units(s, m[k], k == 0 ? &plain : c, (te_shard)(k < 2 ? 0 : k - 1));
        opt[k] = make_optimizer(s->te, m[k], c);
    }
    for (int step = 0; step < TB_STEPS; step++)
        for (int k = 0; k < WAYS; k++) {
            EXPECT(s, run_step(s, m[k], opt[k], c, step, NULL) == TE_OK);
            if (k) expect_same(s, m[k], m[0], 0);
        }
    for (int k = 0; k < WAYS; k++) {
        te_optimizer_destroy(opt[k]);
        te_module_destroy(m[k]);
    }
}
TE_TEST(overlap_buckets_have_the_bits_of_one) {
    static const float sizes[] = {1e-9f, 0.003f, 0.02f}; /* one parameter each; some; a bucket or two for a block */
    static const int some[] = {1, 6, 8};
    for (int i = 0; i < COUNT(some); i++)
        for (int k = 0; k < COUNT(sizes); k++) {
            if ((i + k) % test_every_odd(1)) continue; /* 3: each of both once */
            shard_case c = {.num = &numbers[some[i]], .width = 64, .inner = 96, .bucket = sizes[k]};
            c.no_prefetch = k == 1;
            c.one_unit = k == 2;
            c.checkpoint = k == 0;
            c.main_grads = i == 0;
            test_case("%s, %g MiB", c.num->name, (double)sizes[k]);
            run_ranks(2 + i, bucket_rank, &c);
        }
}

/* ---- order ---- */

/* A group that notes its collectives, and hands them to the group of threads. */
typedef struct noted_group {
    te_group *inner;
    int reduced, scattered, gathered;
} noted_group;
static te_result note_reduce(void *user, te_ctx *te, te_tensor *x, te_reduce_op op) {
    noted_group *g = (noted_group *)user;
    return (void)te, g->reduced++, te_all_reduce(g->inner, x, op);
}
static te_result note_gather(void *user, te_ctx *te, const te_tensor *x, te_tensor *out) {
    noted_group *g = (noted_group *)user;
    return (void)te, g->gathered++, te_all_gather(g->inner, x, out);
}
static te_result note_scatter(void *user, te_ctx *te, const te_tensor *x, te_tensor *out) {
    noted_group *g = (noted_group *)user;
    return (void)te, g->scattered++, te_reduce_scatter(g->inner, x, out);
}
static te_result note_broadcast(void *user, te_ctx *te, te_tensor *x, int root) {
    return (void)te, te_broadcast(((noted_group *)user)->inner, x, root);
}
static te_result note_barrier(void *user) { return te_barrier(((noted_group *)user)->inner); }
static te_group *noted(rank_state *s, noted_group *g) {
    g->inner = s->group;
    return te_group_create(s->te, &(te_group_desc){.name = "noted",
                                                   .rank = s->rank,
                                                   .size = s->size,
                                                   .user = g,
                                                   .all_reduce = note_reduce,
                                                   .all_gather = note_gather,
                                                   .reduce_scatter = note_scatter,
                                                   .broadcast = note_broadcast,
                                                   .barrier = note_barrier});
}

enum { AHEAD_BLOCKS = 3, AHEAD_WIDTH = 16 };
/* The collectives that a block sees: in its forward, and in the backward pass before any of its own nodes. */
typedef struct ahead_state {
    noted_group group;
    int forward[AHEAD_BLOCKS], backward[AHEAD_BLOCKS], reduced[AHEAD_BLOCKS];
    int skip; /* a block that does not run; or -1 */
} ahead_state;
typedef struct ahead_node {
    ahead_state *state;
    int block;
} ahead_node;
static te_result ahead_backward(te_ctx *te, const void *state, te_tensor *const *saved, te_tensor *const *dy,
                                te_tensor **dx, const bool *needs) {
    const ahead_node *n = (const ahead_node *)state;
    (void)te, (void)saved, (void)needs;
    n->state->backward[n->block] = n->state->group.gathered;
    n->state->reduced[n->block] = n->state->group.reduced + n->state->group.scattered;
    dx[0] = dy[0];
    return TE_OK;
}
static ahead_state *ahead_of(const te_module *m) {
    void *state = NULL;
    te_module_attribute(m, "ahead", &state);
    return (ahead_state *)state;
}
static te_result ahead_forward(te_module *m, te_forward_args *args) {
    ahead_node n = {ahead_of(m), te_module_name(m)[0] - '0'};
    te_tensor *y = te_forward(te_module_child(m, 0), args->input), *z = te_tensor_detach(y);
    n.state->forward[n.block] = n.state->group.gathered;
    te_record(te_module_ctx(m), &(te_node_desc){.name = "ahead",
                                                .inputs = &y,
                                                .num_inputs = 1,
                                                .outputs = &z,
                                                .num_outputs = 1,
                                                .state = &n,
                                                .state_size = sizeof n,
                                                .backward = ahead_backward});
    args->outputs.out = z;
    return te_error_code(te_module_ctx(m));
}
static const te_module_class ahead_class = {"Ahead", 0, ahead_forward, NULL, NULL};
static te_result ahead_model_forward(te_module *m, te_forward_args *args) {
    const ahead_state *state = ahead_of(m);
    te_tensor *x = args->input;
    for (int i = 0; i < te_module_num_children(m) && x; i++)
        if (i != state->skip) x = te_forward(te_module_child(m, i), x);
    args->outputs.out = x;
    return te_error_code(te_module_ctx(m));
}
static const te_module_class ahead_model = {"AheadModel", 0, ahead_model_forward, NULL, NULL};
static te_module *make_ahead(rank_state *s, ahead_state *state, te_group *group, te_shard shard, bool one_unit) {
    te_module *m = te_module_create(s->te, &ahead_model, "model");
    const te_data_parallel_desc d = {.group = group, .shard = shard, .no_init_sync = true, .bucket_cap_mb = 1e-9f};
    te_seed(s->te, 21);
    te_module_set_attribute(m, "ahead", state, NULL);
    for (int i = 0; i < AHEAD_BLOCKS; i++) {
        char name[2] = {(char)('0' + i), 0};
        te_module *block = te_module_add_child(m, name, te_module_create(s->te, &ahead_class, name));
        te_module_set_attribute(block, "ahead", state, NULL);
        te_module_add_child(block, "linear",
                            te_linear_create(s->te, &(te_linear_desc){.in_features = AHEAD_WIDTH,
                                                                      .out_features = AHEAD_WIDTH,
                                                                      .gemm.params_dtype = TE_F32,
                                                                      .gemm.no_bias = true}));
        if (!one_unit) EXPECT(s, te_fsdp_unit(block, &d) == TE_OK);
    }
    EXPECT(s, (one_unit ? te_data_parallel(m, &d) : te_fsdp_unit(m, &d)) == TE_OK);
    return m;
}
static te_result ahead_step(rank_state *s, ahead_state *state, te_module *m, te_optimizer *opt, int step, int skip) {
    te_scope_begin(s->te);
    te_seed(s->te, (uint64_t)(40 + step * s->size + s->rank));
    state->skip = skip;
    state->group.reduced = state->group.scattered = state->group.gathered = 0;
    te_tensor *y = te_forward(m, te_tensor_normal(s->te, TE_F32, SHAPE(4, AHEAD_WIDTH), 0, 1));
    te_result result = te_backward(te_mean_all(te_activate(y, TE_GELU, NULL)));
    te_scope_end(s->te);
    return result == TE_OK ? te_optimizer_step(opt) : result;
}
static void ahead_rank(rank_state *s) {
    ahead_state state[2];
    te_group *group[2];
    te_module *m[2];
    te_optimizer *opt[2];
    memset(state, 0, sizeof state);
    for (int k = 0; k < 2; k++) {
        group[k] = noted(s, &state[k].group);
        m[k] = make_ahead(s, &state[k], group[k], k ? TE_SHARD_NONE : TE_SHARD_PARAMETERS, k);
        opt[k] = te_fused_sgd_create(s->te, m[k], &(te_fused_sgd_desc){.lr = 0.5f});
    }
    for (int step = 0; step < 6; step++) {
        static const int skips[] = {-1, -1, 1, -1, 2, -1};
        const bool knows = step == 1; /* the order of the step before */
        const int meets = step ? 0 : 2; /* ranks compare main_grads and recipes in the first exchange, behind the last
                                         * block's node */
        for (int k = 0; k < 2; k++) EXPECT(s, ahead_step(s, &state[k], m[k], opt[k], step, skips[step]) == TE_OK);
        const int all = state[0].group.gathered;
        expect_same(s, m[0], m[1], 0);
        for (int i = 0; i < AHEAD_BLOCKS && step < 2; i++) {
            const int last = AHEAD_BLOCKS - 1;
            EXPECT(s, state[0].forward[i] == i + 1 + (knows && i < last));
            /* the first block's weight is not needed: nobody wants the gradient of its input */
            EXPECT(s, state[0].backward[i] == AHEAD_BLOCKS + last - i + (knows && i == 1) + (i < last ? meets : 0));
            EXPECT(s, state[0].reduced[i] == last - i && state[1].reduced[i] == last - i); /* at once, also of one unit */
        }
        /* A unit that is not the next one after all, forward or backward, costs its bytes once more, once: 3 + 2 gather
         * all blocks, 2 + 1 two of them. */
        static const int gathered[] = {5, 5, 3 + 2, 5, 3 + 1, 5};
        EXPECT(s, all == gathered[step] + meets);
    }
    for (int k = 0; k < 2; k++) {
        te_optimizer_destroy(opt[k]);
        te_module_destroy(m[k]);
        te_group_destroy(group[k]);
    }
}
TE_TEST(overlap_order) { run_ranks(2, ahead_rank, NULL); }

TE_TEST(overlap_refuses) {
    te_ctx *te = test_context("cpu");
    te_module *m = te_linear_create(te, &(te_linear_desc){.in_features = 8, .out_features = 8});
    CHECK_EQ_INT(te_fsdp_unit(m, &(te_data_parallel_desc){.bucket_cap_mb = -1}), TE_ERR_INVALID);
    CHECK_ERROR(te, TE_ERR_INVALID, "bucket_cap_mb is -1");
    te_module_destroy(m);
}

/* ---- processes ---- */

/* A rank's values after some steps: whole units in buckets, and sharded ones. */
static void steps_of(rank_state *s) {
    for (int k = 0; k < 6; k++) {
        const shard_case c = {
            .num = &numbers[k < 3 ? 1 : 6], .width = 32, .inner = 64, .bucket = 0.003f, .checkpoint = k % 2};
        te_module *m = make_model(s->te, &c);
        make_units(s, m, &c, (te_shard)(k % 3));
        te_optimizer *opt = make_optimizer(s->te, m, &c);
        for (int step = 0; step < TB_STEPS; step++) EXPECT(s, run_step(s, m, opt, &c, step, NULL) == TE_OK);
        param_list l = {0};
        EXPECT(s, te_fsdp_unshard(m) == TE_OK);
        te_module_visit_tensors(m, list_param, &l);
        for (int i = 0; i < l.n; i++) { /* some are quantized */
            float *v = values_of(l.list[i]);
            const size_t n = (size_t)te_tensor_numel(l.list[i]) * sizeof(float);
            memcpy(more_left(s, n), v, n);
            free(v);
        }
        te_optimizer_destroy(opt);
        te_module_destroy(m);
    }
}
static void steps_of_process(process_rank *p) { run_in_process(p, steps_of); }
/* Over the stand-in, exchanges are under way until they are waited for, as with NCCL; it adds in rank order. */
TE_TEST(overlap_of_processes_equals_threads) {
    prepare_processes();
    equal_ways("cpu", 2, "steps", steps_of, NULL);
    if (!test_samples()) equal_ways("cpu", 3, "steps", steps_of, NULL);
}
/* Over two ranks there is one order of sums. */
TE_TEST(gpu_overlap_of_processes_equals_threads) {
    const char *why = no_nccl();
    if (why) SKIP(why);
    equal_ways("cuda:0", 2, "steps", steps_of, NULL);
}

/* Unsharded units in a graph: the second stream joins the capture, and leaves it before its end. */
static void graph_of_units(process_rank *p) {
    rank_state s = {.te = p->te, .group = p->group, .rank = p->rank, .size = p->size};
    const shard_case c = {.num = &numbers[1], .width = 64, .inner = 128, .bucket = 0.003f};
    te_module *m = make_model(p->te, &c);
    param_list l = {0};
    float *want[128];
    te_graph *g = NULL;
    make_units(&s, m, &c, TE_SHARD_NONE);
    te_module_visit_tensors(m, list_param, &l);
    te_tensor *x = te_tensor_normal(p->te, TE_BF16, SHAPE(TB_ROWS, c.width), 0, 1 + (float)p->rank);
    for (int turn = 0; turn < 2; turn++) {
        te_module_zero_grad(m);
        if (turn) te_graph_begin(p->te);
        te_backward(te_mean_all(te_activate(te_forward(m, x), TE_GELU, NULL)));
        if (turn) g = te_graph_end(p->te);
        for (int launch = 0; launch < 3 && turn; launch++) te_graph_launch(g);
        for (int i = 0; i < l.n && te_ok(p->te); i++) {
            float *v = values_of(te_tensor_grad(l.list[i]));
            if (!turn) want[i] = v;
            else if (memcmp(v, want[i], (size_t)te_tensor_numel(l.list[i]) * sizeof(float))) s.wrong++;
            if (turn) free(v);
        }
    }
    fprintf(p->out, "%d gradients, %d differ %s", l.n, s.wrong, te_error(p->te));
    for (int i = 0; i < l.n; i++) free(want[i]);
    te_graph_destroy(g);
    te_module_destroy(m);
}
static void check_graph_of_units(void) {
    run_processes("graph_of_units", 2);
    for (int i = 0; i < 2; i++)
        CHECK_MSG(!strcmp((const char *)processes[i].said, "22 gradients, 0 differ "), "rank %d: %s", i,
                  (const char *)processes[i].said);
}
TE_TEST(overlap_in_a_graph) {
    prepare_processes();
    check_graph_of_units();
}
TE_TEST(gpu_overlap_in_a_graph) {
    const char *why = no_nccl();
    if (why) SKIP(why);
    check_graph_of_units();
}

static const process_part overlap_parts[] = {{"steps", steps_of_process}, {"graph_of_units", graph_of_units}};
__attribute__((constructor)) static void become_one_of_the_overlap(void) {
    become_a_rank(overlap_parts, COUNT(overlap_parts));
}
