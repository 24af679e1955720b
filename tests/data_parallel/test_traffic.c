/* test_traffic.c: the bytes that a group counts, by hand and by the formulas of api/sharding.h; and the peak of a rank's
 * memory in a step, by theirs. */
#include "shards.h"

/* ---- by hand ---- */

static void count_rank(rank_state *s) {
    const int64_t n = s->size, sends[3] = {1, 2, 3}, receives[3] = {s->rank + 1, s->rank + 1, s->rank + 1};
    te_tensor *x = te_tensor_zeros(s->te, TE_F32, SHAPE(5)), *all = te_tensor_zeros(s->te, TE_F32, SHAPE(5 * n)),
              *lines = te_tensor_zeros(s->te, TE_BF16, SHAPE(6, 4)),
              *out = te_tensor_zeros(s->te, TE_BF16, SHAPE(3 * (s->rank + 1), 4));
    te_group_stats c;
    te_group_reset_stats(s->group);
    for (int turn = 0; turn < 2; turn++) {
        te_all_reduce(s->group, x, TE_REDUCE_SUM);
        te_all_gather(s->group, x, all);
        te_reduce_scatter(s->group, all, x);
        te_broadcast(s->group, x, 1);
        te_barrier(s->group);
        te_all_to_all(s->group, lines, sends, out, receives);
        if (s->rank == 0) te_send(s->group, x, 2);
        if (s->rank == 2) te_recv(s->group, x, 0);
    }
    EXPECT(s, te_all_gather(s->group, x, s->rank ? all : x) != TE_OK); /* counts nothing */
    te_clear_error(s->te);
    c = te_group_get_stats(s->group);
    EXPECT(s, c.all_reduce.calls == 2 && c.all_reduce.bytes == 2 * 27); /* 4/3 of 20 */
    EXPECT(s, c.all_gather.calls == 2 && c.all_gather.bytes == 2 * 40);
    EXPECT(s, c.reduce_scatter.calls == 2 && c.reduce_scatter.bytes == 2 * 40);
    EXPECT(s, c.broadcast.calls == 2 && c.broadcast.bytes == (s->rank == 1 ? 2 * 20u : 0));
    EXPECT(s, c.barrier.calls == 2 && c.barrier.bytes == 0);
    EXPECT(s, c.all_to_all.calls == 2 && c.all_to_all.bytes == 2 * (6 - (uint64_t)s->rank - 1) * 8);
    EXPECT(s, c.send.calls == (s->rank == 0 ? 2 : 0) && c.send.bytes == (s->rank == 0 ? 2 * 20u : 0));
    EXPECT(s, c.recv.calls == (s->rank == 2 ? 2 : 0) && c.recv.bytes == 0);
    te_group *part = te_group_split(s->group, 0, s->rank);
    EXPECT(s, te_group_get_stats(part).all_reduce.calls == 0);
    te_group_destroy(part);
    te_group_reset_stats(s->group);
    EXPECT(s, te_group_get_stats(s->group).all_reduce.calls == 0);
}
TE_TEST(traffic_counters) {
    te_group_stats none = te_group_get_stats(NULL);
    CHECK(none.all_reduce.calls == 0 && none.send.bytes == 0);
    te_group_reset_stats(NULL);
    run_ranks(3, count_rank, NULL);
}

/* ---- a step ---- */

/* Blocks of 2 w^2 elements, each a unit; few rows, so that activations are small beside them. */
enum { STEP_BLOCKS = 6, STEP_WIDTH = 256 };
typedef struct step_case {
    const number_case *num;
    te_shard shard;
    bool stay; /* no_reshard_after_forward */
} step_case;
static te_module *step_model(rank_state *s, const step_case *c) {
    te_recipe recipe = c->num->recipe();
    te_module *m = te_module_create(s->te, &chain, "deep");
    const te_data_parallel_desc d = {.group = s->group, .shard = c->shard, .no_reshard_after_forward = c->stay};
    te_seed(s->te, 3);
    if (c->num->stored) te_quantized_model_init_begin(s->te, &(te_quantized_model_init_desc){.recipe = &recipe});
    for (int i = 0; i < STEP_BLOCKS; i++) {
        char name[16];
        snprintf(name, sizeof name, "%d", i);
        te_module *block = te_module_add_child(
            m, name,
            te_layernorm_mlp_create(s->te, &(te_layernorm_mlp_desc){.hidden_size = STEP_WIDTH,
                                                                    .ffn_hidden_size = STEP_WIDTH,
                                                                    .gemm.params_dtype = c->num->dtype}));
        EXPECT(s, te_fsdp_unit(block, &d) == TE_OK);
    }
    if (c->num->stored) te_quantized_model_init_end(s->te);
    return m;
}
/* got is want, and up to a fiftieth more: norms and biases, flags of gradients, rounding to slices and to the pool's
 * blocks. */
static bool is_about(uint64_t got, uint64_t want) { return got >= want && got <= want + want / 50; }
/* Few rows in plain formats: a sixty-fourth of a unit for each activation. */
static te_result step_batch(te_module *m, const step_case *c, int seed) {
    const shard_case batch = {.num = c->num, .width = STEP_WIDTH};
    te_ctx *te = te_module_ctx(m);
    if (c->num->stored) return run_batch(m, &batch, seed, NULL);
    te_scope_begin(te);
    te_seed(te, (uint64_t)seed);
    te_tensor *y = te_forward(m, te_tensor_normal(te, c->num->dtype, SHAPE(4, STEP_WIDTH), 0, 1));
    te_result result = te_backward(te_mean_all(te_activate(y, TE_GELU, NULL)));
    te_scope_end(te);
    return result;
}
/* The most that a step in bf16 takes beside what is there between steps, in bytes for each element of a unit: the
 * formula of api/sharding.h. The pool rounds a buffer of some elements more than a power of two up by an eighth. */
static double peak_of(const step_case *c, int ranks) {
    const double n = ranks, b = STEP_BLOCKS, gradient = 2, parameter = 2, sums = 9.0 / 8 * (4 + 4 / n);
    if (c->shard == TE_SHARD_NONE) return b * gradient + 9.0 / 8 * 4;
    if (c->shard == TE_SHARD_OPTIMIZER) return (b - 1) * gradient / n + gradient + sums; /* the last unit */
    if (c->stay) return (b - 1) * parameter + gradient + sums; /* the first unit of the pass: the others are whole */
    /* the last but one: the last unit is gathered ahead of it */
    return (b - 2) * gradient / n + gradient + sums + 9.0 / 8 * parameter;
}
static void step_rank(rank_state *s) {
    const step_case *c = (const step_case *)s->arg;
    const uint64_t n = (uint64_t)s->size, one = 2 * STEP_WIDTH * STEP_WIDTH, all = STEP_BLOCKS * one;
    const uint64_t code = !c->num->stored ? 2 : c->num->recipe == te_recipe_mxfp8 ? 2 : 1; /* bytes of an element */
    te_module *m = step_model(s, c);
    te_optimizer *opt = te_fused_adam_create(s->te, m, &(te_fused_adam_desc){.lr = 1e-3f});
    for (int step = 0; step < 3; step++) {
        const size_t kept = te_memory_get_stats(s->te).allocated;
        te_group_reset_stats(s->group);
        te_memory_reset_peak(s->te);
        EXPECT(s, step_batch(m, c, step * s->size + s->rank) == TE_OK && te_optimizer_step(opt) == TE_OK);
        const te_group_stats sent = te_group_get_stats(s->group);
        const size_t peak = te_memory_get_stats(s->te).peak_allocated - kept;
        if (step == 0) continue; /* scaling state is made, and what comes next is learned */
        if (c->shard == TE_SHARD_NONE)
            EXPECT(s, is_about(sent.all_reduce.bytes, 2 * (n - 1) * 4 * all / n) && !sent.all_gather.calls);
        else {
            const uint64_t gathers = c->shard == TE_SHARD_OPTIMIZER || c->stay ? 1 : 2;
            EXPECT(s, is_about(sent.reduce_scatter.bytes, (n - 1) * 4 * all / n));
            EXPECT(s, is_about(sent.all_gather.bytes, (n - 1) * gathers * code * all / n));
        }
        /* A weight of 16 bits whose gradient is computed, or copied, is half a unit of 2 bytes an element; the rest is
         * norms, biases and activations. */
        const double want = peak_of(c, s->size), got = (double)peak / (double)one;
        if (!c->num->stored && !(got >= want && got <= want + 1.35)) {
            char text[96];
            snprintf(text, sizeof text, "the peak is %.3f bytes for each element of a unit, and not %.3f", got, want);
            wrong(s, text);
        }
    }
    te_optimizer_destroy(opt);
    te_module_destroy(m);
}
TE_TEST(traffic_and_memory_of_a_step) {
    static const int some[] = {1, 6, 8};
    for (int i = 0; i < COUNT(some); i++)
        for (int shard = TE_SHARD_NONE; shard <= TE_SHARD_PARAMETERS + 1; shard++)
            for (int size = 2; size <= 4; size += 2) {
                if ((i + shard + size / 2) % test_every_sanitized(2)) continue;
                const step_case c = {&numbers[some[i]], (te_shard)(shard == 3 ? TE_SHARD_PARAMETERS : shard), shard == 3};
                test_case("%d ranks, %s, shard %d", size, c.num->name, shard);
                run_ranks(size, step_rank, &c);
            }
}
