/* test_shard_regions.c: sharded units inside regions of offload, below adapters whose base is frozen, and parameters
 * that the program keeps longer than their unit. */
#include "shards.h"

typedef struct region_case {
    shard_case c;
    bool offload, adapters;
} region_case;
static void region_rank(rank_state *s) {
    const region_case *r = (const region_case *)s->arg;
    te_module *m[2];
    te_optimizer *opt[2];
    for (int k = 0; k < 2; k++) {
        m[k] = make_model(s->te, &r->c);
        te_seed(s->te, 3);
        if (r->adapters)
            EXPECT(s, te_lora_apply(m[k], &(te_lora_desc){.dim = 4, .match_all_linear = true}, NULL) == TE_OK);
        make_units(s, m[k], &r->c, k ? TE_SHARD_PARAMETERS : TE_SHARD_NONE);
        opt[k] = make_optimizer(s->te, m[k], &r->c);
    }
    for (int step = 0; step < 2; step++)
        for (int k = 0; k < 2; k++) {
            if (r->offload) te_cpu_offload_begin(s->te, &(te_cpu_offload_desc){.min_bytes = 1});
            EXPECT(s, run_step(s, m[k], opt[k], &r->c, step, NULL) == TE_OK);
            if (r->offload) te_cpu_offload_end(s->te);
        }
    expect_same(s, m[1], m[0], 0); /* the ranks' sums have one order */
    for (int k = 0; k < 2; k++) {
        te_optimizer_destroy(opt[k]);
        te_module_destroy(m[k]);
    }
}
TE_TEST(shards_in_regions_equal_whole) {
    static const int some[] = {1, 6, 8};
    for (int i = 0; i < COUNT(some); i++)
        for (int way = 0; way < 4; way++) {
            const region_case r = {{.num = &numbers[some[i]], .width = 32, .inner = 64, .checkpoint = way & 1},
                                   .offload = way < 2,
                                   .adapters = way >= 2};
            test_case("%s, %s, checkpoint %d", r.c.num->name, r.offload ? "offload" : "adapters", r.c.checkpoint);
            run_ranks(2, region_rank, &r);
        }
}

/* A parameter and an optimizer outlive the unit: calls say why there is no memory. */
TE_TEST(shards_that_outlive_their_unit) {
    te_ctx *te = test_context("cpu");
    const shard_case c = {.num = &numbers[1], .width = 16, .inner = 24};
    float values[16];
    te_scope_begin(te);
    te_module *m = make_model(te, &c);
    CHECK_EQ_INT(te_fsdp_unit(m, &(te_data_parallel_desc){.shard = TE_SHARD_PARAMETERS}), TE_OK);
    te_optimizer *opt = make_optimizer(te, m, &c);
    te_tensor *bias = te_tensor_retain(te_module_parameter(te_module_child(m, 0), "bias"));
    te_module_destroy(m);
    CHECK(!te_fsdp_get_slice(bias, NULL));
    CHECK_EQ_INT(te_tensor_to_host(bias, values), TE_ERR_STATE);
    CHECK_ERROR(te, TE_ERR_STATE, "\"bias\" [16] is a sharded parameter");
    CHECK(!te_add(bias, bias));
    CHECK_ERROR(te, TE_ERR_STATE, "\"bias\" [16] is a sharded parameter");
    CHECK_EQ_INT(te_optimizer_step(opt), TE_ERR_STATE);
    CHECK_ERROR(te, TE_ERR_STATE, "was taken back; make the optimizer after the units");
    CHECK(!te_optimizer_get_unscaled_state(opt, bias, "exp_avg"));
    CHECK_ERROR(te, TE_ERR_STATE, "get_unscaled_state: the unit of parameter first.bias was taken back");
    te_optimizer_destroy(opt);
    te_tensor_release(bias);
    te_scope_end(te);
}
