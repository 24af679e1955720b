/* tests/quant/test_recipe_fields.c: recipes are compared by their fields, whatever stands in their padding. test_recipe_same.c looks at each field. */
#include "../dist/ranks.h"

/* A delayed recipe in memory that was full of `fill`: as one on the stack is, padding is whatever stood there. */
static void recipe_over(te_recipe *r, int fill) {
    memset(r, fill, sizeof *r);
    r->kind = TE_RECIPE_DELAYED;
    r->format = TE_FORMAT_DEFAULT;
    r->backward_override = TE_BACKWARD_QUANTIZED;
    r->split_fprop = r->split_dgrad = r->split_wgrad = TE_DEFAULT;
    r->delayed.margin = 0;
    r->delayed.amax_history_len = 4;
    r->delayed.amax_algo = TE_AMAX_MAX;
    r->delayed.amax_fn = NULL;
    r->delayed.scale_fn = NULL;
    r->delayed.user = NULL;
    memset(&r->delayed.no_reduce_amax, 0, 1);
    memset(&r->fp8_dpa, 0, 1);
    memset(&r->fp8_mha, 0, 1);
    memset(&r->current.power_of_two_scales, 0, 1);
    r->amax_epsilon = 0;
    r->block.x_block_scaling_dim = r->block.w_block_scaling_dim = r->block.grad_block_scaling_dim = 0;
    memset(&r->block.fp32_scales, 0, 1);
    memset(&r->mxfp8.quantization_2d, 0, sizeof r->mxfp8.quantization_2d);
    memset(&r->nvfp4.rht, 0, sizeof r->nvfp4.rht);
    memset(&r->nvfp4.stochastic_rounding, 0, sizeof r->nvfp4.stochastic_rounding);
    memset(&r->nvfp4.quantization_2d, 0, sizeof r->nvfp4.quantization_2d);
    memset(&r->nvfp4.row_scaled_activation, 0, 1);
    r->nvfp4.four_over_six = TE_NVFP4_4OVER6_NONE;
    memset(&r->nvfp4.four_over_six_mse, 0, 1);
    r->nvfp4.four_over_six_e4m3_256 = TE_NVFP4_E4M3_256_DEFAULT;
    r->custom.factory = NULL;
    r->custom.user = NULL;
}

static te_module *plain_linear(te_ctx *te) {
    te_linear_desc d = {0};
    d.in_features = d.out_features = 32;
    d.gemm.no_bias = true;
    return te_linear_create(te, &d);
}
static uint64_t launches(te_ctx *te) { return te_jit_get_stats(te).launches; }

static uint64_t forward_under(te_ctx *te, te_module *m, te_tensor *x, const te_recipe *r, te_microbatch micro) {
    te_autocast_desc cast = {0};
    te_forward_args f = {0};
    uint64_t before = launches(te);
    cast.recipe = r;
    f.input = x;
    f.is_first_microbatch = micro;
    te_autocast_begin(te, &cast);
    te_forward_with(m, &f);
    te_autocast_end(te);
    return launches(te) - before;
}

TE_TEST_DEVICES(kept_weights_know_a_recipe_by_its_fields) {
    te_recipe first, later;
    te_module *m = plain_linear(te);
    te_tensor *x = test_tensor(te, TE_BF16, SHAPE(4, 32), test_normal(128, 3));
    recipe_over(&first, 0xA5);
    recipe_over(&later, 0x5A);
    forward_under(te, m, x, &first, TE_MICROBATCH_NONE); /* makes the scales */
    uint64_t made = forward_under(te, m, x, &first, TE_MICROBATCH_FIRST);
    uint64_t kept = forward_under(te, m, x, &first, TE_MICROBATCH_LATER);
    CHECK(kept < made); /* the weight is not cast again */
    CHECK_EQ_INT(forward_under(te, m, x, &later, TE_MICROBATCH_LATER), kept);
    later.delayed.margin = 1; /* another recipe: the kept weight is not its own */
    CHECK_EQ_INT(forward_under(te, m, x, &later, TE_MICROBATCH_LATER), made);
    CHECK_OK(te);
    te_module_destroy(m);
}

/* Two modules run under equal recipes: their scales are updated in one launch, and in one collective on every rank. */
static uint64_t two_regions(te_ctx *te, te_module *const *m, te_tensor *x, const te_recipe *outer, const te_recipe *inner, te_group *group) {
    te_autocast_desc cast = {0};
    uint64_t before = launches(te);
    cast.amax_group = group;
    cast.recipe = outer;
    te_autocast_begin(te, &cast);
    te_forward(m[0], x);
    cast.recipe = inner;
    te_autocast_begin(te, &cast);
    te_forward(m[1], x);
    te_autocast_end(te);
    te_autocast_end(te);
    return launches(te) - before;
}

TE_TEST_DEVICES(equal_recipes_are_updated_together) {
    te_recipe a, b;
    te_module *m[2] = {plain_linear(te), plain_linear(te)};
    te_tensor *x = test_tensor(te, TE_BF16, SHAPE(4, 32), test_normal(128, 3));
    recipe_over(&a, 0xA5);
    recipe_over(&b, 0x5A);
    two_regions(te, m, x, &a, &a, NULL);
    uint64_t together = two_regions(te, m, x, &a, &a, NULL);
    CHECK_EQ_INT(two_regions(te, m, x, &a, &b, NULL), together);
    b.delayed.amax_algo = TE_AMAX_MOST_RECENT;
    CHECK_EQ_INT(two_regions(te, m, x, &a, &b, NULL), together + 1);
    CHECK_OK(te);
    for (int i = 0; i < 2; i++) te_module_destroy(m[i]);
}

/* Rank 1 alone has other padding. */
static void rank_regions(rank_state *s) {
    te_recipe a, b;
    te_module *m[2] = {plain_linear(s->te), plain_linear(s->te)};
    te_tensor *x = te_tensor_full(s->te, TE_BF16, SHAPE(4, 32), 1 + s->rank);
    recipe_over(&a, 0xA5);
    recipe_over(&b, s->rank == 1 ? 0x5A : 0xA5);
    for (int i = 0; i < 2; i++) two_regions(s->te, m, x, &a, &b, s->group);
    EXPECT(s, te_ok(s->te));
    te_clear_error(s->te);
    for (int i = 0; i < 2; i++) te_module_destroy(m[i]);
}
TE_TEST(ranks_agree_whatever_the_padding_of_recipes) { run_ranks(2, rank_regions, NULL); }
