/* test_tell.c: a rank that fails anywhere in a forward, a backward pass, a step or while it makes units frees the ranks
 * that wait for it, with its own error; and the groups go on afterwards. */
#include "shards.h"

/* ---- out of memory in modules whose ranks share the work ---- */

typedef struct starve_case {
    int kind, phase; /* phase 0: the forward, 1: the backward pass */
    int64_t request; /* which request of host memory of rank 1 fails */
    int *reached;
} starve_case;
enum { TELL_WIDTH = 16, TELL_KINDS = 3 };
static const char *const starve_names[TELL_KINDS] = {"tensor parallel", "sequence parallel", "context parallel"};
static te_module *starving(rank_state *s, int kind) {
    te_seed(s->te, 8);
    if (kind == 2)
        return te_transformer_layer_create(
            s->te, &(te_transformer_layer_desc){.hidden_size = TELL_WIDTH,
                                                .ffn_hidden_size = TELL_WIDTH,
                                                .attention.num_attention_heads = 2,
                                                .attention.attn_mask_type = TE_MASK_CAUSAL,
                                                .parallel.cp_group = s->group,
                                                .gemm.params_dtype = TE_F32});
    return te_layernorm_mlp_create(s->te, &(te_layernorm_mlp_desc){.hidden_size = TELL_WIDTH,
                                                                   .ffn_hidden_size = 32,
                                                                   .gemm.params_dtype = TE_F32,
                                                                   .parallel.tp_group = s->group,
                                                                   .parallel.set_parallel_mode = true,
                                                                   .parallel.sequence_parallel = kind == 1});
}
static te_result starve_pass(rank_state *s, te_module *m, const starve_case *c) {
    te_result result = TE_OK;
    te_tensor *loss = NULL;
    te_scope_begin(s->te);
    te_tensor *x = te_tensor_full(s->te, TE_F32, SHAPE(8, 2, TELL_WIDTH), 1);
    te_tensor_set_requires_grad(x, true);
    for (int phase = 0; phase < 2 && result == TE_OK; phase++) {
        s->fail_at = c && s->rank == 1 && phase == c->phase ? s->requests + c->request : 0;
        if (phase == 0) {
            te_tensor *y = te_forward(m, x);
            result = y ? TE_OK : te_error_code(s->te);
            if (s->fail_at && s->rank == 1) *c->reached = s->requests >= s->fail_at;
            s->fail_at = 0;
            loss = y ? te_mean_all(te_activate(y, TE_GELU, NULL)) : NULL;
        } else
            result = te_backward(loss);
        if (phase == 1 && result == TE_OK) result = te_barrier(s->group); /* as the exchange of a step: all end alike */
        if (s->fail_at && s->rank == 1) *c->reached = s->requests >= s->fail_at;
        s->fail_at = 0;
    }
    te_scope_end(s->te);
    te_module_zero_grad(m);
    return result;
}
static void starve_rank(rank_state *s) {
    const starve_case *c = (const starve_case *)s->arg;
    te_module *m = starving(s, c->kind);
    EXPECT(s, starve_pass(s, m, NULL) == TE_OK); /* what is made once is there */
    s->failed = starve_pass(s, m, c) != TE_OK;
    if (s->failed && s->rank == 0) EXPECT(s, strstr(te_error(s->te), "rank 1 failed"));
    te_clear_error(s->te);
    EXPECT(s, starve_pass(s, m, NULL) == TE_OK); /* both go on */
    te_module_destroy(m);
}
TE_TEST(tell_of_memory_in_shared_modules) {
    const int stride = test_every_odd(3);
    for (int kind = 0; kind < TELL_KINDS; kind++)
        for (int phase = 0; phase < 2; phase++) {
            int reached = 1, failures = 0;
            for (int64_t request = 1; reached; request += stride) {
                const starve_case c = {kind, phase, request, &reached};
                test_case("%s, phase %d, request %lld", starve_names[kind], phase, (long long)request);
                rank_state *s = run_ranks(2, starve_rank, &c);
                CHECK(s[1].failed == s[0].failed);
                failures += s[1].failed;
            }
            CHECK_MSG(failures > 3, "%d failures", failures);
        }
}

/* ---- making units ---- */

static void make_rank(rank_state *s) {
    const starve_case *c = (const starve_case *)s->arg;
    const shard_case model = {.num = &numbers[c->kind ? 6 : 1], .width = 32, .inner = 32};
    const te_data_parallel_desc d = {
        .group = s->group, .shard = (te_shard)c->phase, .no_init_sync = c->phase == TE_SHARD_PARAMETERS};
    te_result result = TE_OK;
    te_module *m = make_model(s->te, &model);
    s->fail_at = s->rank == 1 ? s->requests + c->request : 0;
    result = c->phase == TE_SHARD_NONE ? te_data_parallel(m, &d) : te_fsdp_unit(m, &d);
    if (s->rank == 1) *c->reached = s->requests >= s->fail_at;
    s->fail_at = 0;
    s->failed = result != TE_OK;
    if (s->rank == 0 && result == TE_OK) { /* hears of it when it needs the other rank */
        te_tensor *y = te_forward(m, te_tensor_full(s->te, TE_BF16, SHAPE(4, 32), 1));
        result = y ? te_backward(te_mean_all(y)) : te_error_code(s->te);
        s->failed = result != TE_OK;
    } else if (s->rank == 1 && result == TE_OK) {
        te_tensor *y = te_forward(m, te_tensor_full(s->te, TE_BF16, SHAPE(4, 32), 1));
        EXPECT(s, te_backward(te_mean_all(y)) == TE_OK);
    }
    if (s->failed && s->rank == 0) EXPECT(s, strstr(te_error(s->te), "rank 1 failed"));
    te_clear_error(s->te);
    te_module_destroy(m);
}
TE_TEST(tell_of_units_that_cannot_be_made) {
    for (int kind = 0; kind < 2; kind++)
        for (int shard = kind ? TE_SHARD_OPTIMIZER : TE_SHARD_NONE; shard <= TE_SHARD_PARAMETERS; shard++) {
            int reached = 1, failures = 0;
            for (int64_t request = 1; reached; request += test_every_odd(1)) {
                const starve_case c = {kind, shard, request, &reached};
                test_case("%s, shard %d, request %lld", kind ? "current" : "bf16", shard, (long long)request);
                rank_state *s = run_ranks(2, make_rank, &c);
                CHECK(s[0].failed == s[1].failed);
                failures += s[1].failed;
            }
            CHECK_MSG(failures > 0, "%d failures", failures);
        }
}

/* ---- nodes of the program ---- */

/* A module that fails on one rank: in its forward (0), or in the backward function of its node (1). */
typedef struct bad_node {
    int phase;
    bool armed;
} bad_node;
static te_result bad_backward(te_ctx *te, const void *state, te_tensor *const *saved, te_tensor *const *dy,
                              te_tensor **dx, const bool *needs) {
    const bad_node *n = *(bad_node *const *)state;
    (void)te, (void)saved, (void)needs;
    dx[0] = dy[0];
    return n->armed && n->phase == 1 ? TE_ERR_IO : TE_OK;
}
static te_result bad_forward(te_module *m, te_forward_args *args) {
    void *node = NULL;
    te_tensor *y = te_tensor_detach(args->input);
    te_module_attribute(m, "bad", &node);
    if (((bad_node *)node)->armed && ((bad_node *)node)->phase == 0) return TE_ERR_IO;
    te_record(te_module_ctx(m), &(te_node_desc){.name = "bad",
                                                .inputs = &args->input,
                                                .num_inputs = 1,
                                                .outputs = &y,
                                                .num_outputs = 1,
                                                .state = &node,
                                                .state_size = sizeof(node),
                                                .backward = bad_backward});
    args->outputs.out = y;
    return te_error_code(te_module_ctx(m));
}
static const te_module_class bad_class = {"Bad", 0, bad_forward, NULL, NULL};
/* A product, a node of the program, a product; all in the unit of a group. */
static te_module *bad_model(rank_state *s, te_group *group, te_shard shard, bad_node *node) {
    te_module *m = te_module_create(s->te, &chain, "model");
    te_seed(s->te, 3);
    for (int i = 0; i < 3; i++) {
        char name[2] = {(char)('0' + i), 0};
        te_module *x = i == 1 ? te_module_create(s->te, &bad_class, name)
                              : te_linear_create(s->te, &(te_linear_desc){.in_features = TELL_WIDTH,
                                                                          .out_features = TELL_WIDTH,
                                                                          .gemm.params_dtype = TE_F32});
        te_module_add_child(m, name, x);
        if (i == 1) te_module_set_attribute(x, "bad", node, NULL);
        if (i != 1) EXPECT(s, te_fsdp_unit(x, &(te_data_parallel_desc){.group = group, .shard = shard}) == TE_OK);
    }
    EXPECT(s, te_fsdp_unit(m, &(te_data_parallel_desc){.group = group, .shard = shard}) == TE_OK);
    return m;
}
static te_result bad_step(rank_state *s, te_module *m, te_optimizer *opt) {
    te_tensor *y = te_forward(m, te_tensor_full(s->te, TE_F32, SHAPE(4, TELL_WIDTH), 1 + (float)s->rank));
    te_result result = y ? te_backward(te_mean_all(te_activate(y, TE_GELU, NULL))) : te_error_code(s->te);
    if (result == TE_OK) result = te_optimizer_step(opt);
    te_optimizer_zero_grad(opt);
    return result;
}
typedef struct bad_case {
    te_shard shard;
    int phase;
} bad_case;
/* Rank 0 has a model with rank 1, and another with rank 2. It fails in the first: rank 1 hears of it, and rank 2 does
 * not. Then all goes on. */
static void two_models_rank(rank_state *s) {
    const bad_case *c = (const bad_case *)s->arg;
    te_group *first = te_group_split(s->group, s->rank < 2 ? 0 : -1, 0),
             *second = te_group_split(s->group, s->rank != 1 ? 0 : -1, 0), *group[2] = {first, second};
    bad_node node[2] = {{c->phase, false}, {c->phase, false}};
    te_module *m[2] = {NULL, NULL};
    te_optimizer *opt[2] = {NULL, NULL};
    for (int k = 0; k < 2; k++) {
        if (!group[k]) continue;
        m[k] = bad_model(s, group[k], c->shard, &node[k]);
        opt[k] = te_fused_sgd_create(s->te, m[k], &(te_fused_sgd_desc){.lr = 0.1f});
    }
    for (int step = 0; step < 6; step++)
        for (int k = 0; k < 2; k++) {
            if (!m[k]) continue;
            te_scope_begin(s->te);
            node[k].armed = s->rank == 0 && k == 0 && step % 3 == 1;
            const bool fails = k == 0 && step % 3 == 1;
            te_result result = bad_step(s, m[k], opt[k]);
            EXPECT(s, result == (fails ? TE_ERR_IO : TE_OK));
            if (fails && s->rank) EXPECT(s, strstr(te_error(s->te), "rank 0 failed") &&
                                           strstr(te_error(s->te), c->phase ? "of bad" : "1: Bad"));
            te_clear_error(s->te);
            te_scope_end(s->te);
        }
    for (int k = 0; k < 2; k++) {
        te_optimizer_destroy(opt[k]);
        te_module_destroy(m[k]);
        te_group_destroy(group[k]);
    }
}
TE_TEST(tell_the_group_of_the_model) {
    for (int shard = TE_SHARD_NONE; shard <= TE_SHARD_PARAMETERS; shard++)
        for (int phase = 0; phase < 2; phase++) {
            const bad_case c = {(te_shard)shard, phase};
            test_case("shard %d, phase %d", shard, phase);
            run_ranks(3, two_models_rank, &c);
        }
}

/* An error that the context has already, of a call outside of modules: the next call of the model tells it. */
static void earlier_rank(rank_state *s) {
    bad_node node = {0, false};
    te_module *m = bad_model(s, s->group, TE_SHARD_NONE, &node);
    te_optimizer *opt = te_fused_sgd_create(s->te, m, &(te_fused_sgd_desc){.lr = 0.1f});
    for (int way = 0; way < 3; way++) {
        te_tensor *x = te_tensor_full(s->te, TE_F32, SHAPE(4, TELL_WIDTH), 1), *y, *wrong_one = NULL;
        if (s->rank == 1 && way == 0) wrong_one = te_add(x, te_tensor_full(s->te, TE_F32, SHAPE(3), 1));
        y = te_forward(m, s->rank == 1 && way == 0 ? wrong_one : x);
        te_tensor *loss = te_mean_all(y);
        if (s->rank == 1 && way == 1) te_add(x, te_tensor_full(s->te, TE_F32, SHAPE(3), 1));
        te_result result = te_backward(s->rank == 1 && way == 2 ? y : loss); /* no loss: it has several elements */
        if (!loss) result = te_error_code(s->te);
        EXPECT(s, result == TE_ERR_SHAPE);
        if (s->rank == 0) EXPECT(s, strstr(te_error(s->te), "rank 1 failed"));
        te_clear_error(s->te);
        te_module_zero_grad(m);
        EXPECT(s, bad_step(s, m, opt) == TE_OK);
    }
    te_optimizer_destroy(opt);
    te_module_destroy(m);
}
TE_TEST(tell_an_earlier_error) { run_ranks(2, earlier_rank, NULL); }

/* ---- messages ---- */

/* A rank that fails while others wait for its messages. Messages that were sent before belong to the failed pass,
 * and are not taken for later ones. */
static void messages_rank(rank_state *s) {
    bad_node node = {0, s->rank == 0};
    te_module *m = bad_model(s, s->group, TE_SHARD_NONE, &node);
    te_tensor *x = te_tensor_full(s->te, TE_F32, SHAPE(4, TELL_WIDTH), 1),
              *mail = te_tensor_full(s->te, TE_F32, SHAPE(2), s->rank + 1);
    if (s->rank == 0) { /* fails in its forward, and neither sends nor receives */
        EXPECT(s, !te_forward(m, x) && te_error_code(s->te) == TE_ERR_IO);
    } else if (s->rank == 1) {
        te_send(s->group, mail, 0);
        EXPECT(s, te_recv(s->group, mail, 0) == TE_ERR_IO && strstr(te_error(s->te), "te_recv: ") &&
                      strstr(te_error(s->te), "rank 0 failed"));
    } else
        EXPECT(s, te_all_reduce(s->group, mail, TE_REDUCE_SUM) == TE_ERR_IO &&
                      strstr(te_error(s->te), "rank 0 failed"));
    te_clear_error(s->te);
    node.armed = false;
    /* the same with what is sent now */
    te_tensor_fill(mail, 10 * (s->rank + 1));
    if (s->rank == 1) EXPECT(s, te_send(s->group, mail, 0) == TE_OK);
    if (s->rank == 0) EXPECT(s, te_recv(s->group, mail, 1) == TE_OK && te_tensor_item(te_mean_all(mail)) == 20);
    EXPECT(s, te_all_reduce(s->group, mail, TE_REDUCE_MAX) == TE_OK && te_tensor_item(te_mean_all(mail)) == 30);
    te_module_destroy(m);
}
TE_TEST(tell_ranks_that_wait_for_messages) {
    for (int round = 0; round < 20; round++) run_ranks(3, messages_rank, NULL);
}

/* ---- errors that are not cleared ---- */

/* Rank 1 keeps its error, and comes to calls that all ranks make together: they fail on both, each time. */
static void kept_rank(rank_state *s) {
    bad_node node = {0, s->rank == 1};
    char path[256];
    te_module *m = bad_model(s, s->group, TE_SHARD_PARAMETERS, &node);
    snprintf(path, sizeof path, "%s", (const char *)s->arg);
    EXPECT(s, !te_forward(m, te_tensor_full(s->te, TE_F32, SHAPE(4, TELL_WIDTH), 1)));
    EXPECT(s, te_error_code(s->te) == TE_ERR_IO); /* rank 0 waits for it in the last product's gathering */
    for (int turn = 0; turn < 3; turn++) {
        if (s->rank == 0) te_clear_error(s->te);
        EXPECT(s, te_model_save(s->te, path, m, NULL, NULL, 0) == TE_ERR_IO);
        EXPECT(s, s->rank || strstr(te_error(s->te), "rank 1 failed"));
    }
    te_clear_error(s->te);
    EXPECT(s, te_model_save(s->te, path, m, NULL, NULL, 0) == TE_OK);
    te_module_destroy(m);
}
TE_TEST(tell_a_kept_error_where_all_meet) { run_ranks(2, kept_rank, test_path("kept.safetensors")); }
