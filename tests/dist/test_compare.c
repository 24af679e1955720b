/* test_compare.c: ranks that are about to do different things hear so where they first meet, with what each was about to do; over the group of threads and over a user's. */
#define _GNU_SOURCE
#include "ranks.h"

/* A group of the user's collectives, which pass each call on to the group of threads and count the gathers. */
typedef struct own_group {
    te_group *inner;
    int gathers;
} own_group;
static te_result own_reduce(void *user, te_ctx *te, te_tensor *x, te_reduce_op op) {
    (void)te;
    return te_all_reduce(((own_group *)user)->inner, x, op);
}
static te_result own_gather(void *user, te_ctx *te, const te_tensor *x, te_tensor *out) {
    (void)te;
    ((own_group *)user)->gathers++;
    return te_all_gather(((own_group *)user)->inner, x, out);
}
static te_result own_scatter(void *user, te_ctx *te, const te_tensor *x, te_tensor *out) {
    (void)te;
    return te_reduce_scatter(((own_group *)user)->inner, x, out);
}
static te_result own_broadcast(void *user, te_ctx *te, te_tensor *x, int root) {
    (void)te;
    return te_broadcast(((own_group *)user)->inner, x, root);
}
static te_result own_barrier(void *user) { return te_barrier(((own_group *)user)->inner); }
static te_group *group_of(rank_state *s, own_group *own) {
    te_group_desc d = {.name = "mine", .rank = s->rank, .size = s->size, .user = own, .all_reduce = own_reduce, .all_gather = own_gather, .reduce_scatter = own_scatter,
                       .broadcast = own_broadcast, .barrier = own_barrier};
    own->inner = s->group;
    return te_group_create(s->te, &d);
}
static bool says(rank_state *s, const char *a, const char *b, const char *c) {
    const char *text = te_error(s->te);
    return te_error_code(s->te) == TE_ERR_STATE && strstr(text, "its ranks are about to do different things") && strstr(text, a) && strstr(text, b) && strstr(text, c);
}

/* ---- attention ---- */

static void different_masks(rank_state *s) {
    te_ctx *te = s->te;
    for (int comm = 0; comm < 3; comm++) {
        static const te_cp_comm kinds[] = {TE_CP_P2P, TE_CP_ALL_GATHER, TE_CP_A2A};
        te_tensor *x = te_tensor_full(te, TE_F32, SHAPE(8, 1, 2, 8), 1);
        for (int way = 0; way < 2; way++) {
            te_dot_product_attention_desc d = {.attention.num_attention_heads = 2, .attention.kv_channels = 8, .parallel.cp_group = s->group, .parallel.cp_comm_type = kinds[comm]};
            d.attention.attn_mask_type = way == 0 && s->rank == 1 ? TE_MASK_NONE : TE_MASK_CAUSAL;
            d.attention.window.on = way == 1, d.attention.window.left = 3 + s->rank;
            if (comm != 1 && way == 1 && kinds[comm] == TE_CP_P2P) continue; /* no windows there */
            te_module *m = te_dot_product_attention_create(te, &d);
            te_forward_args f = {.input = x, .key = x, .value = x};
            EXPECT(s, !te_forward_with(m, &f));
            EXPECT(s, way == 0 ? says(s, "Rank 0: core_attention: attention of q [8, 1, 2, 8]", "attn_mask_type 2", "attn_mask_type 1")
                               : says(s, "Rank 1: core_attention: attention of q", "window_size 3, ", "window_size 4, "));
            te_clear_error(te);
            te_module_destroy(m);
        }
        /* alike, they go on */
        te_dot_product_attention_desc d = {.attention.num_attention_heads = 2, .attention.kv_channels = 8, .parallel.cp_group = s->group, .parallel.cp_comm_type = kinds[comm]};
        te_module *m = te_dot_product_attention_create(te, &d);
        te_forward_args f = {.input = x, .key = x, .value = x};
        EXPECT(s, te_forward_with(m, &f) && te_ok(te));
        EXPECT(s, te_forward_with(m, &f) && te_ok(te));
        te_module_destroy(m);
    }
}
TE_TEST(compare_masks_of_context_parallel_ranks) { run_ranks(2, different_masks, NULL); }

/* ---- products ---- */

static te_module *column(rank_state *s, te_group *group, int64_t out, bool sequence) {
    te_linear_desc d = {.in_features = 16, .out_features = out, .name = "fc"};
    d.parallel.parallel_mode = TE_PARALLEL_COLUMN;
    d.parallel.tp_group = group;
    d.parallel.tp_size = s->size;
    d.parallel.sequence_parallel = sequence;
    return te_linear_create(s->te, &d);
}
static void different_sizes(rank_state *s) {
    own_group own = {0};
    te_group *groups[2] = {s->group, group_of(s, &own)};
    te_tensor *x = te_tensor_full(s->te, TE_BF16, SHAPE(4, 16), 1);
    for (int i = 0; i < 4; i++) {
        te_module *m = column(s, groups[i % 2], s->rank == 2 ? 36 : 24, i / 2);
        EXPECT(s, !te_forward(m, x));
        EXPECT(s, says(s, "Rank 0: fc: product 0 by column", "weight [8, 16] bf16", "Rank 2: fc: product 0 by column") && strstr(te_error(s->te), "weight [12, 16] bf16"));
        EXPECT(s, strstr(te_error(s->te), i % 2 ? "group \"mine\"" : "group \"threads\"") != NULL);
        te_clear_error(s->te);
        te_module_destroy(m);
    }
    te_group_destroy(groups[1]);
}
/* The same recipe with another option, and one that a module has of its own; alike they go on. */
static void different_options(rank_state *s) {
    te_tensor *x = te_tensor_full(s->te, TE_BF16, SHAPE(16, 16), 1);
    te_module *m = column(s, s->group, 32, false);
    for (int round = 0; round < 3; round++) {
        te_recipe recipe = te_recipe_current_scaling(), own = recipe;
        recipe.current.power_of_two_scales = round == 0 && s->rank;
        own.split_fprop = s->rank ? TE_ON : TE_OFF;
        EXPECT(s, round != 1 || te_module_set_recipe(m, &own, false) == TE_OK);
        te_autocast_begin(s->te, &(te_autocast_desc){.recipe = &recipe});
        EXPECT(s, round == 2 ? te_forward(m, x) && te_ok(s->te)
                             : !te_forward(m, x) && says(s, "Rank 0: fc: product 0 by column", "recipe current (checksum ", "Rank 1: fc: product 0 by column"));
        te_autocast_end(s->te);
        te_clear_error(s->te);
        te_module_set_recipe(m, NULL, false);
    }
    te_module_destroy(m);
}
TE_TEST(compare_options_of_recipes_of_column_parallel_ranks) { run_ranks(2, different_options, NULL); }

TE_TEST(compare_sizes_of_column_parallel_ranks) { run_ranks(3, different_sizes, NULL); }

/* ---- units of data-parallel ranks ---- */

/* Where ranks meet as a unit is made (its values are copied, or it is sharded), and in the first exchange of others. */
static void different_units(rank_state *s) {
    te_ctx *te = s->te;
    static const struct {
        bool whole, keeps;
        te_shard shard;
    } ways[] = {{true, false, TE_SHARD_NONE}, {false, false, TE_SHARD_OPTIMIZER}, {false, false, TE_SHARD_PARAMETERS}, {true, true, TE_SHARD_NONE}, {false, false, TE_SHARD_NONE}};
    for (int i = 0; i < COUNT(ways) * 5; i++) {
        const int what = i % 5; /* rank 1 has another width, another format, another bucket, a frozen bias, another divisor */
        const bool differs = s->rank == 1, early = ways[i / 5].shard || (ways[i / 5].whole && !ways[i / 5].keeps);
        te_data_parallel_desc d = {.group = s->group,
                                   .shard = ways[i / 5].shard,
                                   .no_init_sync = ways[i / 5].keeps,
                                   .bucket_cap_mb = what == 2 && differs ? 3 : 0,
                                   .gradient_divide_factor = what == 4 && differs ? 3 : 0};
        te_linear_desc linear = {.in_features = 8, .out_features = what == 0 && differs ? 24 : 16, .name = "fc", .gemm.params_dtype = what == 1 && differs ? TE_BF16 : TE_F32};
        te_module *m = te_linear_create(te, &linear);
        if (what == 3) te_tensor_set_requires_grad(te_module_parameter(m, "bias"), !differs);
        te_result result = ways[i / 5].whole ? te_data_parallel(m, &d) : te_fsdp_unit(m, &d);
        if (!early) {
            EXPECT(s, result == TE_OK);
            result = te_backward(te_mean_all(te_forward(m, te_tensor_full(te, linear.gemm.params_dtype, SHAPE(4, 8), 1))));
        }
        EXPECT(s, result == TE_ERR_STATE && says(s, "Rank 0: ", "unit \"fc\" with 2 parameters of 144 elements", "Rank 1: "));
        EXPECT(s, what != 0 || strstr(te_error(te), "2 parameters of 216 elements"));
        EXPECT(s, what != 2 || strstr(te_error(te), "bucket_cap_mb 3"));
        EXPECT(s, what != 4 || (strstr(te_error(te), "divided by 2,") && strstr(te_error(te), "divided by 3,")));
        te_clear_error(te);
        te_module_destroy(m);
        EXPECT(s, te_barrier(s->group) == TE_OK);
    }
}
TE_TEST(compare_units_of_ranks) { run_ranks(2, different_units, NULL); }

/* A main_grad in f32 decides in which format gradients travel: a rank that alone has one hears so, and so does a rank
 * that has run none of the model's products. */
static void different_main_grads(rank_state *s) {
    te_ctx *te = s->te;
    for (int shard = TE_SHARD_NONE; shard <= TE_SHARD_PARAMETERS; shard++) {
        te_module *m = te_linear_create(te, &(te_linear_desc){.in_features = 16, .out_features = 16, .name = "fc", .gemm.params_dtype = TE_BF16});
        te_tensor *w = te_module_parameter(m, "weight"), *x = te_tensor_full(te, TE_BF16, SHAPE(4, 16), 1);
        EXPECT(s, te_fsdp_unit(m, &(te_data_parallel_desc){.group = s->group, .shard = (te_shard)shard}) == TE_OK);
        for (int turn = 0; turn < 3; turn++) { /* rank 1 alone; rank 1 alone, and it runs no products; all */
            if (s->rank || turn == 2) te_tensor_set_main_grad(w, te_tensor_zeros(te, TE_F32, SHAPE(16, 16)));
            /* all must run what is gathered */
            te_tensor *y = s->rank && turn == 1 && shard < TE_SHARD_PARAMETERS ? NULL : te_forward(m, x);
            const te_result result = y ? te_backward(te_mean_all(y)) : te_fsdp_post_backward(m);
            EXPECT(s, result == (turn == 2 ? TE_OK : TE_ERR_STATE));
            EXPECT(s, turn == 2 || says(s, "Rank 0: gradients of \"fc\", where 0 of 2 parameters have a main_grad in f32", "where 1 of 2", "Rank 1: "));
            te_clear_error(te);
        }
        te_module_destroy(m);
        EXPECT(s, te_barrier(s->group) == TE_OK);
    }
}
TE_TEST(compare_main_grads_of_data_ranks) { run_ranks(2, different_main_grads, NULL); }

/* Data ranks that run plain weights under different recipes, or under other options of one, hear so in the first exchange,
 * of whatever units; ranks that run alike, or nothing, go on. */
static void different_recipes(rank_state *s) {
    te_ctx *te = s->te;
    for (int i = 0; i < 12; i++) {
        const int what = i % 4; /* rank 1 has: another kind, none, another option, nothing else but an evaluation before */
        const te_shard shard = (te_shard)(i / 4 == 2 ? TE_SHARD_PARAMETERS : i / 4);
        const bool differs = s->rank == 1;
        te_recipe recipe = what == 0 && differs ? te_recipe_mxfp8() : te_recipe_current_scaling();
        recipe.current.power_of_two_scales = what == 2 && differs;
        te_module *m = te_sequential_create(te, NULL, 0);
        for (int k = 0; k < 2; k++) {
            te_module *fc = te_module_add_child(m, k ? "b" : "a", te_linear_create(te, &(te_linear_desc){.in_features = 32, .out_features = 32}));
            EXPECT(s, te_fsdp_unit(fc, &(te_data_parallel_desc){.group = s->group, .shard = shard}) == TE_OK);
        }
        if (what == 3 && differs && shard != TE_SHARD_PARAMETERS) { /* evaluates by itself; sharded parameters take all ranks to gather */
            te_no_grad_begin(te);
            EXPECT(s, te_forward(m, te_tensor_full(te, TE_BF16, SHAPE(32, 32), 1)));
            te_no_grad_end(te);
        }
        for (int step = 0; step < 2; step++) {
            te_autocast_begin(te, &(te_autocast_desc){.recipe = &recipe, .disabled = what == 1 && differs});
            te_tensor *y = te_forward(m, te_tensor_full(te, TE_BF16, SHAPE(32, 32), 1));
            te_autocast_end(te);
            const te_result result = te_backward(te_mean_all(y));
            EXPECT(s, (result == TE_OK) == (what == 3));
            if (what == 3) continue;
            EXPECT(s, says(s, "Rank 0: gradients of \"sequential\", whose products run under recipe current", "in \"a\"",
                           what == 0 ? "recipe mxfp8" : what == 1 ? "recipe none" : "Rank 1: gradients of \"sequential\", whose products run under recipe current"));
            te_clear_error(te);
        }
        te_module_destroy(m);
        EXPECT(s, te_barrier(s->group) == TE_OK);
    }
}
TE_TEST(compare_recipes_of_data_ranks) { run_ranks(2, different_recipes, NULL); }

/* Once a module, unless TE_DEBUG_SYNC asks for more; a rank that fails on its way is heard, and the next call compares. */
static void how_often(rank_state *s) {
    const bool debug = s->arg != NULL;
    own_group own = {0};
    te_group *group = group_of(s, &own);
    te_tensor *x = te_tensor_full(s->te, TE_BF16, SHAPE(4, 16), 1);
    te_module *m = column(s, group, 24, false), *told = column(s, s->group, 24, false);
    for (int i = 0; i < 3; i++) EXPECT(s, te_forward(m, x) && own.gathers == (debug ? i + 1 : 1));
    EXPECT(s, !te_forward(told, s->rank == 1 ? te_tensor_full(s->te, TE_BF16, SHAPE(4, 15), 1) : x));
    EXPECT(s, strstr(te_error(s->te), s->rank == 1 ? "[4, 15]" : "rank 1 failed") != NULL);
    te_clear_error(s->te);
    EXPECT(s, te_forward(told, x) && te_ok(s->te));
    te_module_destroy(m);
    te_module_destroy(told);
    te_group_destroy(group);
}
TE_TEST(compare_once_a_module) { run_ranks(2, how_often, NULL); }
TE_TEST(compare_always_in_debug_mode) {
    static const int yes = 1;
    setenv("TE_DEBUG_SYNC", "1", 1);
    run_ranks(2, how_often, &yes);
    unsetenv("TE_DEBUG_SYNC");
}
