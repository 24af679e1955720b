/* tests/dist/test_layout.c: groups split into parts, and the layouts of te_dist_init, over threads; test_nccl.c has
 * processes. */
#include "ranks.h"

/* The sum over a group of 2^rank says who is in it; a group of one rank is NULL. */
static int members_of(rank_state *s, te_group *g) {
    te_tensor *x = te_tensor_full(s->te, TE_F32, SHAPE(1), 1 << s->rank);
    EXPECT(s, te_all_reduce(g, x, TE_REDUCE_SUM) == TE_OK);
    return (int)te_tensor_item(x);
}

/* ---- te_group_split ---------------------------------------------------------------------------------------------- */

static void split_all(rank_state *s) {
    for (int colors = 1; colors <= s->size; colors++)
        for (int order = -1; order <= 1; order++) { /* keys fall, are equal, rise */
            int color = s->rank % colors, count = (s->size - color + colors - 1) / colors, bits = 0;
            te_group *part = te_group_split(s->group, color, order * s->rank);
            for (int k = color; k < s->size; k += colors) bits |= 1 << k;
            EXPECT(s, part && te_group_size(part) == count);
            EXPECT(s, te_group_rank(part) == (order < 0 ? count - 1 - s->rank / colors : s->rank / colors));
            EXPECT(s, members_of(s, part) == bits);
            te_group *again = te_group_split(part, te_group_rank(part) == 0 ? -1 : 7, 0); /* a part of a part */
            EXPECT(s, (again != NULL) == (te_group_rank(part) != 0) && te_ok(s->te));
            if (again) EXPECT(s, te_group_size(again) == count - 1);
            te_group_destroy(part); /* the other one outlives it */
            if (again) EXPECT(s, members_of(s, again) != 0);
            te_group_destroy(again);
        }
}
TE_TEST(split) {
    for (int size = 1; size <= MAX_RANKS; size += test_every(2)) run_ranks(size, split_all, NULL);
}

static te_result refused_reduce(void *user, te_ctx *te, te_tensor *x, te_reduce_op op) {
    return (void)user, (void)te, (void)x, (void)op, TE_OK;
}
static te_result refused_pair(void *user, te_ctx *te, const te_tensor *x, te_tensor *out) {
    return (void)user, (void)te, (void)x, (void)out, TE_OK;
}
static te_result refused_root(void *user, te_ctx *te, te_tensor *x, int root) {
    return (void)user, (void)te, (void)x, (void)root, TE_OK;
}
static te_result refused_barrier(void *user) { return (void)user, TE_OK; }
TE_TEST(split_of_custom_group) {
    te_ctx *te = test_context("cpu");
    te_group_desc d = {0};
    d.size = 2;
    d.all_reduce = refused_reduce;
    d.all_gather = d.reduce_scatter = refused_pair;
    d.broadcast = refused_root;
    d.barrier = refused_barrier;
    te_group *g = te_group_create(te, &d);
    CHECK(!te_group_split(g, 0, 0));
    CHECK_ERROR(te, TE_ERR_UNSUPPORTED, "group \"custom\" cannot be split");
    te_group_destroy(g);
}

/* A rank that cannot split frees the others. */
static void split_but_one(rank_state *s) {
    if (s->rank == 1) te_group_abort(s->group, "no part of it");
    EXPECT(s, !te_group_split(s->group, 0, 0));
    EXPECT(s, strstr(te_error(s->te), "no part of it") != NULL);
    te_clear_error(s->te);
}
TE_TEST(split_that_fails) { run_ranks(3, split_but_one, NULL); }

/* No memory of the host, at any request: no rank gets a part that lacks another, and nothing is left. */
static void split_without_memory(rank_state *s) {
    if (s->rank == 1) s->fail_at = s->requests + *(const int *)s->arg;
    te_group *part = te_group_split(s->group, 0, 0);
    s->fail_at = 0;
    s->failed = !part;
    if (part) EXPECT(s, members_of(s, part) == 7);
    te_group_destroy(part);
    EXPECT(s, te_ok(s->te) == !s->failed);
    te_clear_error(s->te);
}
TE_TEST(split_without_memory) {
    bool failed = true;
    int at = 1, failures = 0;
    for (; failed && at < 100; at += test_every(3)) {
        rank_state *all = run_ranks(3, split_without_memory, &at);
        failed = all[1].failed;
        failures += failed;
        for (int i = 0; i < 3; i++) CHECK_EQ_INT(all[i].failed, failed);
    }
    CHECK(!failed && failures > 3);
}

/* Another thread aborts the group in the midst of it, and one rank is slower than the others: they all get their part, or
 * none does, and nobody joins a part that is gone. */
static void split_and_abort(rank_state *s) {
    if (s->rank == 1) s->abort_at = s->requests + *(const int *)s->arg;
    te_group *part = te_group_split(s->group, 0, 0);
    s->failed = !part;
    if (part) EXPECT(s, members_of(s, part) == 7);
    te_group_destroy(part);
    if (s->abort_at > s->requests) s->bytes[0] = 1; /* it has not come to that */
    s->abort_at = 0;
    te_clear_error(s->te);
}
TE_TEST(split_aborted) {
    int failures = 0, at = 1;
    for (bool done = false; !done && at < 100; at++) {
        rank_state *all = run_ranks(3, split_and_abort, &at);
        for (int i = 0; i < 3; i++) CHECK_EQ_INT(all[i].failed, all[1].failed);
        failures += all[1].failed;
        done = all[1].bytes[0] != 0;
    }
    CHECK(at < 100 && failures > 3);
}

/* ---- te_dist_init ------------------------------------------------------------------------------------------------ */

typedef struct layout_case {
    int size, tp, cp, ep, dp;
    int want_dp;
} layout_case;
static const layout_case layouts[] = {{1, 0, 0, 0, 0, 1}, {4, 2, 0, 0, 2, 2}, {4, 0, 2, 0, 2, 2}, {4, 1, 1, 2, 2, 2},
                                      {4, 2, 2, 0, 0, 1}, {8, 2, 2, 2, 1, 1}, {6, 3, 1, 1, 0, 2}, {8, 2, 0, 2, 0, 2},
                                      {5, 0, 0, 0, 0, 5}, {6, 0, 0, 3, 0, 2}};

/* The ranks whose places are those of `rank`, but for the ways in `shared`. */
static int members_want(const int ways[4], int size, int rank, unsigned shared) {
    int bits = 0;
    for (int other = 0; other < size; other++) {
        bool in = true;
        for (int i = 0, a = rank, b = other; i < 4; a /= ways[i], b /= ways[i], i++)
            in = in && (shared >> i & 1 || a % ways[i] == b % ways[i]);
        if (in) bits |= 1 << other;
    }
    return bits;
}
static void lay_out(rank_state *s) {
    const layout_case *c = (const layout_case *)s->arg;
    const int ways[4] = {c->tp ? c->tp : 1, c->cp ? c->cp : 1, c->ep ? c->ep : 1, c->want_dp};
    te_dist_desc d = {0};
    te_dist dist;
    d.tp = c->tp, d.cp = c->cp, d.ep = c->ep, d.dp = c->dp;
    d.world = s->group;
    EXPECT(s, te_dist_init(s->te, &d, &dist) == TE_OK);
    const struct {
        te_group *group;
        unsigned shared;
    } groups[] = {{dist.world, 15}, {dist.tensor, 1}, {dist.context, 2},
                  {dist.expert, 4}, {dist.data, 14},  {dist.expert_data, 10}};
    for (int i = 0; i < COUNT(groups); i++) {
        int want = members_want(ways, s->size, s->rank, groups[i].shared);
        EXPECT(s, members_of(s, groups[i].group) == want);
        EXPECT(s, i == 0 || (groups[i].group == NULL) == (want == 1 << s->rank));
    }
    EXPECT(s, dist.rank == s->rank && dist.size == s->size && !dist.owns_world);
    EXPECT(s, dist.data_size == ways[2] * ways[3] && dist.data_rank == s->rank / (ways[0] * ways[1]));
    te_dist_finish(&dist);
    EXPECT(s, !dist.world && !dist.data);
    te_dist_finish(&dist);
    te_dist_finish(NULL);
    EXPECT(s, members_of(s, s->group) == (1 << s->size) - 1); /* the world is the caller's */
}
TE_TEST(layouts) {
    for (int i = 0; i < COUNT(layouts); i++) {
        test_case("tp %d cp %d ep %d dp %d", layouts[i].tp, layouts[i].cp, layouts[i].ep, layouts[i].dp);
        run_ranks(layouts[i].size, lay_out, &layouts[i]);
    }
}

static void lay_out_wrong(rank_state *s) {
    static const struct {
        int tp, cp, ep, dp;
        const char *text;
    } wrong_ones[] = {{2, 1, 1, 3, "tp 2 x cp 1 x ep 1 x dp 3 make 6 ranks, and there are 4"},
                      {3, 0, 0, 0, "tp 3 x cp 1 x ep 1 x dp 1 make 3 ranks, and there are 4"},
                      {1, 1, 1, 1, "make 1 ranks, and there are 4"},
                      {1000000, 1000000, 1000000, 1000000, "make more than 1048576 ranks, and there are 4"},
                      {0, -2, 0, 0, "cp is -2"}};
    te_dist dist;
    te_dist_desc d = {0};
    d.world = s->group;
    for (int i = 0; i < COUNT(wrong_ones); i++) {
        d.tp = wrong_ones[i].tp, d.cp = wrong_ones[i].cp, d.ep = wrong_ones[i].ep, d.dp = wrong_ones[i].dp;
        note(s, te_dist_init(s->te, &d, &dist));
        EXPECT(s, s->result == TE_ERR_INVALID && strstr(s->error, wrong_ones[i].text));
        EXPECT(s, !dist.world);
    }
    /* ranks that do not agree */
    d.tp = s->rank == 3 ? 4 : 2, d.cp = 0, d.ep = 0, d.dp = 0;
    note(s, te_dist_init(s->te, &d, &dist));
    EXPECT(s, s->result == TE_ERR_STATE && strstr(s->error, "tp 2 x cp 1 x ep 1 x dp 2") &&
                  strstr(s->error, "tp 4 x cp 1 x ep 1 x dp 1"));
    note(s, te_dist_init(s->te, NULL, &dist));
    EXPECT(s, s->result == TE_ERR_INVALID);
    note(s, te_dist_init(s->te, &d, NULL));
    EXPECT(s, s->result == TE_ERR_INVALID);
    EXPECT(s, members_of(s, s->group) == 15);
}
TE_TEST(wrong_layouts) { run_ranks(4, lay_out_wrong, NULL); }
