/* test_outside.c: ids and labels out of range: an error of the call on the CPU; on a GPU counted, and the error of the next call that waits. */
#include "../te_test.h"

/* The call has returned `result`; `ids` names the argument, at[0 .. n - 1] are the wrong ones' places and `id` their value. */
static void check_told(te_ctx *te, te_result result, const char *op, const char *ids, int n, const int64_t *at, int64_t id, int64_t bound) {
    char want[200], range[80];
    bool found = false;
    if (te_ctx_is_cuda(te)) {
        CHECK_EQ_INT(result, TE_OK);
        CHECK_OK(te);
        CHECK_EQ_INT(te_synchronize(te), TE_ERR_INVALID);
        snprintf(want, sizeof want, "%s: %d of the %s of earlier calls", op, n, ids);
    } else {
        CHECK_EQ_INT(result, TE_ERR_INVALID);
        snprintf(want, sizeof want, "%s: %s[%lld] is %lld; 0 to %lld are possible", op, ids, (long long)at[0], (long long)id, (long long)bound - 1);
    }
    for (int i = 0; i < n; i++) { /* any of them, on a GPU */
        snprintf(range, sizeof range, "%s[%lld] is %lld; 0 to %lld are possible", ids, (long long)at[i], (long long)id, (long long)bound - 1);
        found = found || strstr(te_error(te), range);
    }
    CHECK(found);
    CHECK_ERROR(te, TE_ERR_INVALID, want); /* clears it */
    CHECK_EQ_INT(te_synchronize(te), TE_OK); /* told once */
    CHECK_OK(te);
}

enum { TOKENS = 300, VOCAB = 50, H = 24 };
static const int64_t wrong_at[2] = {17, 290};

/* Ids from 0 to VOCAB - 1, but for two of `wrong`. */
static te_tensor *ids_with(te_ctx *te, te_dtype dtype, int64_t wrong) {
    int64_t *id = test_integers(TOKENS, 3, 0, VOCAB);
    id[wrong_at[0]] = id[wrong_at[1]] = wrong;
    return dtype == TE_I64 ? te_tensor_from_host(te, TE_I64, SHAPE(TOKENS), id) : test_i32(te, SHAPE(TOKENS), id);
}

TE_TEST_DEVICES(outside_of_an_embedding) {
    static const int64_t wrong[] = {VOCAB, -1, INT32_MAX, INT32_MIN, -100};
    te_tensor *table = test_tensor(te, TE_BF16, SHAPE(VOCAB, H), test_normal(VOCAB * H, 1)), *y = te_tensor_empty(te, TE_BF16, SHAPE(TOKENS, H));
    for (int i = 0; i < COUNT(wrong); i++) {
        test_case("id %d", (int)wrong[i]);
        te_op_embedding_fwd_args f = {.ids = ids_with(te, i % 2 ? TE_I64 : TE_I32, wrong[i]), .table = table, .y = y};
        check_told(te, te_op_embedding_fwd(te, &f), "embedding_fwd", "ids", 2, wrong_at, wrong[i], VOCAB);
        te_op_embedding_bwd_args b = {.ids = f.ids, .dy = y, .dtable = te_tensor_zeros(te, TE_F32, SHAPE(VOCAB, H))};
        check_told(te, te_op_embedding_bwd(te, &b), "embedding_bwd", "ids", 2, wrong_at, wrong[i], VOCAB);
        /* of a part of a vocabulary: ids of others are legal, those of nobody are not */
        f.vocab_size = b.vocab_size = 2 * VOCAB, f.vocab_start = b.vocab_start = VOCAB;
        if (wrong[i] == VOCAB) {
            CHECK_EQ_INT(te_op_embedding_fwd(te, &f), TE_OK);
            CHECK_EQ_INT(te_op_embedding_bwd(te, &b), TE_OK);
            CHECK_EQ_INT(te_synchronize(te), TE_OK);
        } else {
            check_told(te, te_op_embedding_fwd(te, &f), "embedding_fwd", "ids", 2, wrong_at, wrong[i], 2 * VOCAB);
            check_told(te, te_op_embedding_bwd(te, &b), "embedding_bwd", "ids", 2, wrong_at, wrong[i], 2 * VOCAB);
        }
    }
    int64_t *large = test_integers(TOKENS, 3, 0, VOCAB);
    large[5] = ((int64_t)1 << 32) + 3; /* not 3 */
    te_op_embedding_fwd_args f = {.ids = te_tensor_from_host(te, TE_I64, SHAPE(TOKENS), large), .table = table, .y = y};
    check_told(te, te_op_embedding_fwd(te, &f), "embedding_fwd", "ids", 1, (const int64_t[]){5}, large[5], VOCAB);
}

TE_TEST_DEVICES(outside_of_an_embedding_from_its_end) {
    static const int64_t wrong[] = {VOCAB, -VOCAB - 1, INT32_MAX, INT32_MIN};
    te_tensor *table = test_tensor(te, TE_BF16, SHAPE(VOCAB, H), test_normal(VOCAB * H, 1)), *y = te_tensor_empty(te, TE_BF16, SHAPE(TOKENS, H));
    for (int i = 0; i < COUNT(wrong); i++) {
        test_case("id %d", (int)wrong[i]);
        te_op_embedding_fwd_args f = {.ids = ids_with(te, i % 2 ? TE_I64 : TE_I32, wrong[i]), .table = table, .y = y, .from_end = true};
        check_told(te, te_op_embedding_fwd(te, &f), "embedding_from_end", "ids", 2, wrong_at, wrong[i], VOCAB);
        te_op_embedding_bwd_args b = {.ids = f.ids, .dy = y, .dtable = te_tensor_zeros(te, TE_F32, SHAPE(VOCAB, H)), .from_end = true};
        check_told(te, te_op_embedding_bwd(te, &b), "embedding_from_end", "ids", 2, wrong_at, wrong[i], VOCAB);
    }
}

TE_TEST_DEVICES(outside_of_the_targets_of_a_loss) {
    static const int64_t wrong[] = {VOCAB, -1, -101};
    te_tensor *logits = test_tensor(te, TE_F32, SHAPE(TOKENS, VOCAB), test_normal(TOKENS * VOCAB, 1)), *rows = te_tensor_zeros(te, TE_F32, SHAPE(TOKENS));
    for (int i = 0; i < COUNT(wrong); i++) {
        test_case("target %d", (int)wrong[i]);
        te_op_cross_entropy_fwd_args f = {.logits = logits, .target = ids_with(te, TE_I64, wrong[i]), .loss = te_tensor_zeros(te, TE_F32, SHAPE(TOKENS)), .lse = rows, .ignore_index = -100};
        check_told(te, te_op_cross_entropy_fwd(te, &f), "cross_entropy_fwd", "target", 2, wrong_at, wrong[i], VOCAB);
        te_op_cross_entropy_bwd_args b = {.logits = logits, .target = f.target, .lse = rows, .dloss = te_tensor_full(te, TE_F32, SHAPE(1), 1), .ignore_index = -100};
        b.dlogits = te_tensor_empty(te, TE_F32, SHAPE(TOKENS, VOCAB));
        check_told(te, te_op_cross_entropy_bwd(te, &b), "cross_entropy_bwd", "target", 2, wrong_at, wrong[i], VOCAB);
        te_op_cross_entropy_merge_args m = {.parts = te_tensor_zeros(te, TE_F32, SHAPE(1, TOKENS, 3)), .target = f.target, .loss = f.loss, .lse = rows, .ignore_index = -100, .vocab_size = VOCAB};
        check_told(te, te_op_cross_entropy_merge(te, &m), "cross_entropy_merge", "target", 2, wrong_at, wrong[i], VOCAB);
        f.ignore_index = b.ignore_index = m.ignore_index = wrong[i]; /* what the caller ignores is legal */
        CHECK(te_op_cross_entropy_fwd(te, &f) == TE_OK && te_op_cross_entropy_bwd(te, &b) == TE_OK && te_op_cross_entropy_merge(te, &m) == TE_OK);
        CHECK_EQ_INT(te_synchronize(te), TE_OK);
    }
    /* columns of a part: a target of the other's is legal */
    te_op_cross_entropy_fwd_args part = {.logits = logits, .target = ids_with(te, TE_I32, VOCAB), .parts = te_tensor_zeros(te, TE_F32, SHAPE(TOKENS, 3)), .ignore_index = -100};
    part.vocab_size = 2 * VOCAB;
    CHECK(te_op_cross_entropy_fwd(te, &part) == TE_OK && te_synchronize(te) == TE_OK);
    part.target = ids_with(te, TE_I32, 2 * VOCAB);
    check_told(te, te_op_cross_entropy_fwd(te, &part), "cross_entropy_fwd", "target", 2, wrong_at, 2 * VOCAB, 2 * VOCAB);
}

TE_TEST_DEVICES(outside_of_experts_and_chunks) {
    enum { T = 5, E = 7, K = 2 };
    static const int64_t at[] = {3}, wrong[] = {E, -1, ((int64_t)1 << 32) + 1};
    for (int i = 0; i < COUNT(wrong); i++) {
        int64_t experts[T * K] = {0, 1, 2, 0, 4, 5, 6, 0, 1, 2}, order[4] = {2, 0, 1, 0};
        test_case("id %lld", (long long)wrong[i]);
        experts[3] = order[3] = wrong[i];
        te_op_moe_router_bwd_args b = {.logits = te_tensor_zeros(te, TE_F32, SHAPE(T, E)), .topk_indices = te_tensor_from_host(te, TE_I64, SHAPE(T, K), experts), .topk = K};
        b.dtopk_probs = te_tensor_zeros(te, TE_F32, SHAPE(T, K)), b.dlogits = te_tensor_empty(te, TE_F32, SHAPE(T, E));
        check_told(te, te_op_moe_router_bwd(te, &b), "moe_router_bwd", "topk_indices", 1, at, wrong[i], E);
        te_op_moe_chunk_map_args m = {.sizes = test_i32(te, SHAPE(4), (const int64_t[]){3, 1, 2, 4}), .sorted_index = te_tensor_from_host(te, TE_I64, SHAPE(4), order)};
        m.row_id_map = te_tensor_empty(te, TE_I32, SHAPE(10));
        check_told(te, te_op_moe_chunk_map(te, &m), "moe_chunk_map", "sorted_index", 1, at, wrong[i], 4);
    }
}

/* By modules, losses and every call that waits. On the CPU the module's path stands in front. */
TE_TEST_DEVICES(outside_is_told_by_whatever_waits) {
    float host[4];
    te_tensor *logits = te_tensor_zeros(te, TE_F32, SHAPE(4, 9)), *target = te_tensor_full(te, TE_I32, SHAPE(4), 9);
    for (int way = 0; way < 3; way++) {
        te_scope_begin(te);
        te_cross_entropy_desc d = {.no_reduce_loss = way == 2};
        te_tensor *loss = te_cross_entropy(logits, target, &d);
        CHECK(!loss == !te_ctx_is_cuda(te));
        if (way == 0 && loss) CHECK_EQ_INT(te_synchronize(te), TE_ERR_INVALID);
        if (way == 1 && loss) {
            double value = te_tensor_item(loss);
            CHECK(value != value); /* a loss of 0 would look like a good one */
        }
        if (way == 2 && loss) CHECK_EQ_INT(te_tensor_to_host(loss, host), TE_ERR_INVALID);
        te_scope_end(te);
        CHECK_ERROR(te, TE_ERR_INVALID, "target[");
    }
    te_embedding_desc e = {.num_embeddings = 9, .embedding_dim = 4, .name = "wte"};
    te_module *m = te_embedding_create(te, &e);
    te_forward(m, target);
    te_synchronize(te);
    CHECK_ERROR(te, TE_ERR_INVALID, te_ctx_is_cuda(te) ? "embedding_fwd: 4 of the ids" : "wte: embedding_fwd: ids[0] is 9; 0 to 8 are possible");
    te_module_destroy(m);
}

/* Each launch of a graph looks again. */
TE_TEST_DEVICES(outside_in_a_graph) {
    const int32_t good[3] = {0, 4, 2}, bad[3] = {0, 5, -7};
    te_tensor *table = te_tensor_full(te, TE_F32, SHAPE(5, 8), 1), *ids = te_tensor_from_host(te, TE_I32, SHAPE(3), good), *y = te_tensor_empty(te, TE_F32, SHAPE(3, 8));
    te_op_embedding_fwd_args f = {.ids = ids, .table = table, .y = y};
    CHECK_EQ_INT(te_op_embedding_fwd(te, &f), TE_OK);
    te_graph_begin(te);
    te_op_embedding_fwd(te, &f);
    te_graph *g = te_graph_end(te);
    REQUIRE_OK(te);
    for (int turn = 0; turn < 3; turn++) {
        test_case("turn %d", turn);
        te_tensor_copy_from_host(ids, turn == 1 ? bad : good);
        te_result launched = te_graph_launch(g);
        if (turn == 1) {
            CHECK_EQ_INT(launched, te_ctx_is_cuda(te) ? TE_OK : TE_ERR_INVALID);
            CHECK_EQ_INT(te_ctx_is_cuda(te) ? te_synchronize(te) : launched, TE_ERR_INVALID);
            CHECK_ERROR(te, TE_ERR_INVALID, te_ctx_is_cuda(te) ? "embedding_fwd: 2 of the ids" : "embedding_fwd: ids[1] is 5; 0 to 4 are possible");
        } else {
            CHECK(launched == TE_OK && te_synchronize(te) == TE_OK);
        }
    }
    te_graph_destroy(g);
}

/* Two parts of a vocabulary give the whole: the rows' sums, and the gradients one above the other. */
TE_TEST_DEVICES(outside_of_a_part_is_another_ranks) {
    int64_t *id = test_integers(TOKENS, 3, 0, VOCAB);
    te_tensor *ids = test_i32(te, SHAPE(TOKENS), id), *dy = test_tensor(te, TE_F32, SHAPE(TOKENS, H), test_normal(TOKENS * H, 2)), *sum = NULL, *gradient[3];
    const float *values = test_normal(VOCAB * H, 1);
    static const int64_t first[] = {0, 0, 20}, rows[] = {VOCAB, 20, VOCAB - 20};
    float *want = NULL;
    for (int part = 0; part < 3; part++) {
        te_tensor *table = test_tensor(te, TE_F32, SHAPE(rows[part], H), values + first[part] * H);
        te_tensor_set_requires_grad(table, true);
        te_tensor *y = part ? te_vocab_parallel_embedding_lookup(table, ids, VOCAB, first[part]) : te_embedding_lookup(table, ids);
        te_backward_from(y, dy);
        REQUIRE_OK(te);
        gradient[part] = te_tensor_grad(table);
        if (part == 0) want = test_read(y);
        else sum = sum ? te_add(sum, y) : y;
    }
    CHECK_TENSOR(sum, want, 0, 0);
    const float *whole = test_read(gradient[0]);
    CHECK_TENSOR(gradient[1], whole, 0, 0);
    CHECK_TENSOR(gradient[2], whole + 20 * H, 0, 0);
    CHECK(!te_vocab_parallel_embedding_lookup(te_tensor_zeros(te, TE_F32, SHAPE(5, 2)), ids, VOCAB, 46));
    CHECK_ERROR(te, TE_ERR_INVALID, "vocab_start is 46, the table has 5 rows and vocab_size is 50");
}
