/* ops/test_early.c: reads of a captured graph's kernels while the kernels ahead still run: bytes that the capture has not written, and the rows of a cache before those that it writes, once. */
#define TE_STATIC
#define TE_IMPLEMENTATION
#include "../te_test.h"

enum { EARLY_ALL = 1, EARLY_OLD = 2 }; /* all rows, or those before `start` */
typedef struct early_cache {
    te_tensor *k, *v, *start, *table;
} early_cache;
static te__cache_use early_use(const early_cache *c, bool writes) {
    te__cache_use u = TE_ZERO;
    u.k = c->k, u.v = c->v, u.table = c->table, u.sequences = 2;
    if (writes) u.start = c->start;
    return u;
}
/* Writes rows to a cache, as its operations and their plans do. */
static void early_write(te__plan *p, const early_cache *c) {
    const te__cache_use u = early_use(c, true);
    te__touch(c->k), te__touch(c->v);
    te__note_rows(p, &u);
}
static int early_of(te__plan *p, const early_cache *c) {
    const int *start;
    const te__cache_use u = early_use(c, false);
    if (!te__settled_rows(p, &u, &start)) return 0;
    if (start && start != te__int_data(c->start)) return -1;
    return start ? EARLY_OLD : EARLY_ALL;
}
static early_cache early_open(te_ctx *te) {
    early_cache c;
    c.k = te_tensor_zeros(te, TE_BF16, SHAPE(2, 32, 2, 16)), c.v = te_tensor_zeros(te, TE_BF16, SHAPE(2, 32, 2, 16));
    c.start = te_tensor_zeros(te, TE_I32, SHAPE(2)), c.table = NULL;
    return c;
}

TE_TEST(early_reads) {
    te_ctx *te = test_context("cpu");
    if (!te) return;
    te__plan plan = TE_ZERO;
    plan.te = te;
    early_cache c = early_open(te), other = early_open(te), d;
    te_tensor *lengths = te_tensor_zeros(te, TE_I32, SHAPE(3)), *table = te_tensor_zeros(te, TE_I32, SHAPE(2, 1));
    float outside[4] = {0};
    te_tensor *wrapped = te_tensor_wrap(te, TE_F32, SHAPE(4), outside, NULL, NULL);
    CHECK(!te__is_settled(&plan, lengths)); /* no capture: what runs ahead is not known */
    CHECK_EQ_INT(early_of(&plan, &c), 0);

    CHECK_EQ_INT(te_graph_begin(te), TE_OK);
    CHECK(te__is_settled(&plan, lengths) && te__is_settled(&plan, NULL));
    CHECK(!te__is_settled(&plan, wrapped)); /* other tensors may be of the same memory */
    CHECK(!te__is_settled(&plan, te_tensor_zeros(te, TE_I32, SHAPE(3)))); /* the graph's own memory */
    plan.explain = true;
    CHECK(!te__is_settled(&plan, lengths) && early_of(&plan, &c) == 0);
    plan.explain = false;
    te_tensor_fill(lengths, 1);
    CHECK(!te__is_settled(&plan, lengths)); /* written by the capture */

    CHECK_EQ_INT(early_of(&plan, &c), EARLY_ALL); /* nothing has written it */
    early_write(&plan, &c);
    CHECK_EQ_INT(early_of(&plan, &c), EARLY_OLD);
    d = c, d.k = te_tensor_narrow(c.k, 1, 1, 8); /* its rows are others than the writer's */
    CHECK_EQ_INT(early_of(&plan, &d), 0);
    d = c, d.v = te_tensor_narrow(c.v, 1, 0, 8); /* the first rows of each sequence */
    CHECK_EQ_INT(early_of(&plan, &d), EARLY_OLD);
    d = c, d.v = te_tensor_narrow(c.v, 2, 0, 1); /* and one of the heads */
    CHECK_EQ_INT(early_of(&plan, &d), EARLY_OLD);
    d = c, d.table = table; /* in pages that the writer did not have */
    CHECK_EQ_INT(early_of(&plan, &d), 0);
    early_write(&plan, &other);
    CHECK_EQ_INT(early_of(&plan, &other), EARLY_OLD);
    CHECK_EQ_INT(early_of(&plan, &c), 0); /* the latest write is of another cache */
    early_write(&plan, &c);
    CHECK_EQ_INT(early_of(&plan, &c), 0); /* a second step: rows of the first one are not old */
    te_graph_destroy(te_graph_end(te));

    CHECK_EQ_INT(te_graph_begin(te), TE_OK); /* another capture counts anew */
    early_write(&plan, &c);
    CHECK_EQ_INT(early_of(&plan, &c), EARLY_OLD);
    te_tensor_fill(c.start, 1); /* the writer's own numbers are written */
    CHECK_EQ_INT(early_of(&plan, &c), 0);
    te_scope_begin(te);
    d = early_open(te), d.k = other.k, d.v = other.v; /* numbers of the graph itself, which go with the scope */
    early_write(&plan, &d);
    te_scope_end(te);
    CHECK_EQ_INT(early_of(&plan, &other), 0);
    te__touch(other.v);
    early_write(&plan, &other); /* values that a copy has written, too */
    CHECK_EQ_INT(early_of(&plan, &other), 0);
    te_graph_destroy(te_graph_end(te));

    CHECK_EQ_INT(te_graph_begin(te), TE_OK);
    c.table = table;
    early_write(&plan, &c);
    CHECK_EQ_INT(early_of(&plan, &c), 0); /* one sequence's page may be another's */
    table->buffer->apart = true;
    CHECK_EQ_INT(early_of(&plan, &c), EARLY_OLD);
    te__touch(table);
    CHECK_EQ_INT(early_of(&plan, &c), 0);
    te_graph_destroy(te_graph_end(te));
    CHECK_OK(te);
}

/* A joint product of NVFP4 reads B before the kernels ahead have ended only if the capture has written none of it: codes, block scales, amax. */
TE_TEST(early_reads_of_joint_products) {
    enum { N = 64, K = 256, GROUP = 16 };
    static const char *const names[] = {"nothing", "codes", "scales", "amax"};
    te_ctx *te = test_context("cpu");
    if (!te) return;
    for (int written = 0; written < COUNT(names); written++) {
        te__gemm_joint joint = TE_ZERO;
        te_op_gemm_args a = TE_ZERO;
        te__plan p;
        test_case("written in the capture: %s", names[written]);
        te_scope_begin(te);
        a.a = te_tensor_zeros(te, TE_BF16, SHAPE(1, K));
        a.b = te_tensor_zeros(te, TE_F4E2M1, SHAPE(N, K));
        a.scale_b = te_tensor_zeros(te, TE_F8E4M3, SHAPE(N, K / GROUP));
        a.amax_b = te_tensor_zeros(te, TE_F32, SHAPE(1));
        a.d = te_tensor_zeros(te, TE_BF16, SHAPE(1, N));
        a.m = 1, a.n = N, a.k = K, a.b_transposed = true;
        a.scaling_a = a.scaling_b = TE_SCALING_NVFP4, a.quantize_a = TE_F4E2M1;
        REQUIRE_OK(te);
        joint.count = 1;
        CHECK_EQ_INT(te_graph_begin(te), TE_OK);
        const te_tensor *const parts[] = {NULL, a.b, a.scale_b, a.amax_b};
        if (written) te__touch((te_tensor *)parts[written]);
        te__plan_begin(&p, te);
        p.hopper = p.edits_maps = true, p.sm = 90, p.num_sms = 132;
        CHECK(te__gemm_plan_joint(&p, &a, joint));
        REQUIRE(p.num_launches == 1 && !strcmp(p.launch[0].kernel, "gemv_joint"));
        CHECK_EQ_INT(((const te__gemv_joint_kargs *)p.launch[0].args)->early, !written);
        te__plan_end(&p);
        te_graph_destroy(te_graph_end(te));
        te_scope_end(te);
    }
    CHECK_OK(te);
}
