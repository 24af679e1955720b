/* test_traffic.c: the bytes that a group counts, by hand and by the formulas of api/sharding.h; and the peak of a rank's
 * memory in a step, by theirs. */
#include "step.h"

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

TE_TEST(traffic_and_memory_of_a_step) {
    static const int some[] = {1, 6, 8};
    for (int i = 0; i < COUNT(some); i++)
        for (int shard = TE_SHARD_NONE; shard <= TE_SHARD_PARAMETERS + 1; shard++)
            for (int size = 2; size <= 4; size += 2) {
                if ((i + shard + size / 2) % test_every_odd(3)) continue; /* 7: one of them */
                const step_case c = {.num = &numbers[some[i]],
                                     .shard = (te_shard)(shard == 3 ? TE_SHARD_PARAMETERS : shard),
                                     .stay = shard == 3,
                                     .width = i > 0 && shard != TE_SHARD_PARAMETERS ? 256 : STEP_WIDTH};
                test_case("%d ranks, %s, shard %d", size, c.num->name, shard);
                run_ranks(size, step_rank, &c);
            }
    if (test_samples()) return;
    const step_case wide = {.num = &numbers[6], .shard = TE_SHARD_PARAMETERS, .width = STEP_WIDE};
    test_case("4 ranks, %s, wide", wide.num->name);
    run_ranks(4, step_rank, &wide); /* slices that are small beside a unit's codes */
}
