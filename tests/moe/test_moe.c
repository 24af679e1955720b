/* test_moe.c: the functions and modules of mixtures of experts: gradients against differences, GroupedLinear against separate Linears under every recipe, its options,
 * padding, and a router whose choice changes between the launches of a graph. */
#include "../te_test.h"

/* ---- functions ---- */

/* Which experts each token goes to. */
static te_tensor *routing(te_ctx *te, int64_t tokens, int64_t experts, int64_t topk, int64_t *counts) {
    uint8_t *mask = (uint8_t *)test_alloc((size_t)(tokens * experts + 1));
    memset(counts, 0, (size_t)experts * sizeof(int64_t));
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t k = 0, e = t * t % experts; k < topk; k++, e = (e + 3) % experts) {
            if (e == 1) e++; /* an expert without tokens */
            counts[e] += !mask[t * experts + e];
            mask[t * experts + e] = 1;
        }
    return te_tensor_from_host(te, TE_U8, SHAPE(tokens, experts), mask);
}

enum { T = 13, E = 5, H = 12 };
typedef struct permute_user {
    te_tensor *routing, *counts;
    int64_t rows, align;
    te_map_type type;
} permute_user;
/* There, each copy weighed by its own probability's square or so, and back with merging probabilities: every gradient of the four functions. */
static te_tensor *there_and_back(te_ctx *te, te_tensor *const *in, void *user) {
    const permute_user *u = (const permute_user *)user;
    te_tensor *map, *y, *moved = NULL;
    te_moe_padded made = {0};
    te_moe_unpermute_desc back = {.merging_probs = in[1], .map_type = u->type};
    (void)te;
    if (u->type == TE_MAP_INDEX) {
        y = te_moe_permute(in[0], u->routing, 0, TE_MAP_INDEX, &map);
    } else if (u->align) {
        y = te_moe_permute_and_pad_with_probs(in[0], in[2], u->routing, u->counts, u->align, u->rows, &made);
        map = made.row_id_map, moved = made.permuted_probs, back.pad_offsets = made.pad_offsets;
    } else
        y = te_moe_permute_with_probs(in[0], in[2], u->routing, u->rows, &moved, &map);
    y = te_activate(y, TE_SILU, NULL); /* not linear, or the gradient would not depend on what is saved */
    y = te_moe_unpermute(y, map, &back);
    if (!moved) return y;
    /* The probabilities that were moved along get a gradient, too: one number added everywhere would hide a wrong place. */
    int64_t n = te_tensor_numel(moved), shape[2] = {1, n};
    te_tensor *weights = test_tensor(te, TE_F32, SHAPE(H, n), test_normal(H * n, 4));
    te_tensor *row = te_linear(te_tensor_view(moved, 2, shape), weights, NULL), *all = te_tensor_zeros(te, TE_F32, SHAPE(T, H));
    te_tensor_copy(te_tensor_narrow(all, 0, 0, 1), te_tensor_detach(row));
    return te_add(te_linear(y, te_tensor_full(te, TE_F32, SHAPE(H, H), 0.1), NULL), te_linear(te_linear(te_tensor_full(te, TE_F32, SHAPE(T, 1), 1), te_tensor_view(row, 2, (int64_t[]){H, 1}), NULL), te_tensor_full(te, TE_F32, SHAPE(H, H), 0.2), NULL));
}

TE_TEST_DEVICES(moe_gradients_of_permutation) {
    te_ctx_desc exactly = {.device = te_ctx_device(te), .exact_f32 = true, .log = test__log}; /* differences of products in TF32 would be good for 1e-1 */
    int64_t counts[E], total = 0;
    te = te_ctx_create(&exactly);
    te_tensor *mask = routing(te, T, E, 2, counts);
    for (int e = 0; e < E; e++) total += counts[e];
    te_tensor *in[3] = {test_tensor(te, TE_F32, SHAPE(T, H), test_normal(T * H, 1)), test_tensor(te, TE_F32, SHAPE(T, E), test_uniform(T * E, 2, 0.2f, 1)),
                        test_tensor(te, TE_F32, SHAPE(T, E), test_uniform(T * E, 3, 0.2f, 1))};
    permute_user plain = {.routing = mask, .rows = total}, padded = {.routing = mask, .counts = te_tensor_from_host(te, TE_I64, SHAPE(E), counts), .align = 4, .rows = 2 * T + 3 * E};
    test_case("mask");
    test_check_gradients(te, there_and_back, 3, in, &plain, 2e-2, 5e-3);
    test_case("mask, padded");
    test_check_gradients(te, there_and_back, 3, in, &padded, 2e-2, 5e-3);
    padded.rows = 0; /* the host asks */
    te_tensor *y = there_and_back(te, in, &padded);
    REQUIRE_OK(te);
    for (int e = 0; e < E; e++) padded.rows += (counts[e] + 3) / 4 * 4; /* just as many */
    CHECK_TENSOR(there_and_back(te, in, &padded), test_read(y), 0, 0);
    test_case("index");
    int64_t *id = test_integers(T * 3, 8, 0, E);
    permute_user index = {.routing = te_tensor_from_host(te, TE_I64, SHAPE(T, 3), id), .type = TE_MAP_INDEX};
    te_tensor *in_index[2] = {in[0], test_tensor(te, TE_F32, SHAPE(T, 3), test_uniform(T * 3, 2, 0.2f, 1))};
    test_check_gradients(te, there_and_back, 2, in_index, &index, 2e-2, 5e-3);
    CHECK_OK(te);
    te_ctx_destroy(te);
}

typedef struct sort_user {
    te_tensor *sizes, *order;
} sort_user;
static te_tensor *sorted(te_ctx *te, te_tensor *const *in, void *user) {
    const sort_user *u = (const sort_user *)user;
    te_tensor *moved, *y = te_activate(te_moe_sort_chunks_by_index_with_probs(in[0], in[1], u->sizes, u->order, &moved), TE_SILU, NULL);
    (void)te;
    return te_linear(te_tensor_view(moved, 2, (int64_t[]){1, T}), te_tensor_contiguous(te_tensor_transpose(y, 0, 1)), NULL); /* [1, H]: both outputs, each multiplied by the other */
}
TE_TEST_DEVICES(moe_gradients_of_sorted_chunks) {
    sort_user u = {te_tensor_from_host(te, TE_I32, SHAPE(4), (const int32_t[]){3, 0, 6, 2}), te_tensor_from_host(te, TE_I64, SHAPE(4), (const int64_t[]){2, 3, 1, 0})};
    te_tensor *in[2] = {test_tensor(te, TE_F32, SHAPE(T, H), test_normal(T * H, 1)), test_tensor(te, TE_F32, SHAPE(T), test_normal(T, 2))};
    const int64_t want[T] = {3, 4, 5, 6, 7, 8, 9, 10, 0, 1, 2, 11, 12};
    te_tensor *y = te_moe_sort_chunks_by_index(in[0], u.sizes, u.order);
    REQUIRE_OK(te);
    for (int t = 0; t < T; t++) CHECK_BYTES("row", test_read(y) + t * H, test_read(in[0]) + want[t] * H, H * sizeof(float));
    test_check_gradients(te, sorted, 2, in, &u, 2e-2, 5e-3);
}

static te_tensor *routed(te_ctx *te, te_tensor *const *in, void *user) {
    const te_fused_topk_desc *d = (const te_fused_topk_desc *)user;
    (void)te;
    if (d->topk) return te_fused_topk_with_score_function(in[0], d, NULL);
    te_tensor *map, *scores = te_fused_compute_score_for_moe_aux_loss(in[0], 2, TE_SCORE_SIGMOID, TE_ROUTING_BYTEMAP, &map);
    te_fused_moe_aux_loss_desc loss = {.total_num_tokens = 10, .num_experts = 8, .topk = 2, .coeff = 40};
    return te_fused_moe_aux_loss(scores, te_tensor_from_host(te, TE_I32, SHAPE(8), (const int32_t[]){0, 5, 1, 2, 9, 0, 3, 7}), &loss);
}
TE_TEST_DEVICES(moe_gradients_of_router) {
    float x[5 * 8];
    for (int i = 0; i < 40; i++) x[i] = (float)(i * 5 % 8) * 0.7f - 2.5f + 0.01f * (float)(i / 8); /* apart, so that differences leave the choice */
    te_tensor *in[1] = {test_tensor(te, TE_F32, SHAPE(5, 8), x)};
    te_fused_topk_desc descs[] = {{.topk = 2}, {.topk = 3, .use_pre_softmax = true, .scaling_factor = 2}, {.topk = 2, .score_function = TE_SCORE_SIGMOID},
                                  {.topk = 4, .score_function = TE_SCORE_SQRTSOFTPLUS, .num_groups = 4, .group_topk = 2}, {.topk = 0}};
    for (int i = 0; i < COUNT(descs); i++) {
        test_case("router %d", i);
        test_check_gradients(te, routed, 1, in, &descs[i], 2e-2, 2e-3);
    }
    te_tensor *bits, *bytes, *indices = te_tensor_empty(te, TE_I32, SHAPE(5, 2));
    te_fused_topk_with_score_function(in[0], &(te_fused_topk_desc){.topk = 2, .routing_map_format = TE_ROUTING_BITMAP_U8, .topk_indices = indices}, &bits);
    te_fused_topk_with_score_function(in[0], &(te_fused_topk_desc){.topk = 2}, &bytes);
    REQUIRE_OK(te);
    for (int t = 0; t < 5; t++)
        for (int e = 0; e < 8; e++) {
            bool chosen = test_read(indices)[2 * t] == (float)e || test_read(indices)[2 * t + 1] == (float)e;
            CHECK_EQ_INT(((int)test_read(bits)[t] >> e & 1), chosen);
            CHECK_EQ_INT(test_read(bytes)[t * 8 + e], chosen);
        }
}

TE_TEST(moe_functions_complain) {
    te_ctx *te = test_context("cpu");
    te_tensor *x = te_tensor_zeros(te, TE_F32, SHAPE(4, 8)), *mask = te_tensor_zeros(te, TE_U8, SHAPE(4, 3)), *cube = te_tensor_zeros(te, TE_F32, SHAPE(2, 2, 8)), *map;
    CHECK(!te_moe_permute(x, mask, 0, TE_MAP_MASK, &map));
    CHECK_ERROR(te, TE_ERR_INVALID, "num_out_tokens is 0");
    CHECK(!te_moe_permute(cube, mask, 4, TE_MAP_MASK, &map));
    CHECK_ERROR(te, TE_ERR_SHAPE, "[tokens, hidden size] is needed");
    CHECK(!te_moe_permute(x, te_tensor_zeros(te, TE_U8, SHAPE(5, 3)), 4, TE_MAP_MASK, &map));
    CHECK_ERROR(te, TE_ERR_SHAPE, "routing_map [5, 3]");
    CHECK(!te_moe_permute_with_probs(x, te_tensor_zeros(te, TE_F32, SHAPE(4, 2)), mask, 4, NULL, NULL));
    CHECK_ERROR(te, TE_ERR_SHAPE, "probs are [4, 2]");
    CHECK(!te_moe_unpermute(x, te_tensor_zeros(te, TE_I32, SHAPE(12)), NULL));
    CHECK_ERROR(te, TE_ERR_SHAPE, "map_type says which one it is");
    CHECK(!te_fused_topk_with_score_function(x, &(te_fused_topk_desc){0}, NULL));
    CHECK_ERROR(te, TE_ERR_INVALID, "topk is 0 of 8 experts");
    te_grouped_linear_desc d = {.num_gemms = 3, .in_features = 8, .out_features = 4, .gemm.params_dtype = TE_F32};
    te_module *m = te_grouped_linear_create(te, &d);
    te_forward_args args = {.input = x};
    CHECK(!te_forward_with(m, &args));
    CHECK_ERROR(te, TE_ERR_INVALID, "m_splits and m_splits_tensor are NULL");
    args.m_splits = (const int64_t[]){1, 2, 3};
    CHECK(!te_forward_with(m, &args));
    CHECK_ERROR(te, TE_ERR_INVALID, "m_splits[2] is 3, and 1 of 4 rows are left for it");
    args.m_splits = NULL, args.m_splits_tensor = te_tensor_zeros(te, TE_I32, SHAPE(4));
    CHECK(!te_forward_with(m, &args));
    CHECK_ERROR(te, TE_ERR_SHAPE, "m_splits_tensor is i32 [4]");
    te_module_destroy(m);
    d.num_gemms = 513;
    CHECK(!te_grouped_linear_create(te, &d));
    CHECK_ERROR(te, TE_ERR_INVALID, "num_gemms is 513; 1 to 512");
}

/* ---- GroupedLinear ---- */

enum { GROUPS = 4, IN = 160, OUT = 96 };
static const int64_t even_splits[GROUPS] = {128, 0, 32, 96}, odd_splits[GROUPS] = {37, 0, 5, 90};
static int64_t sum_of(const int64_t *splits) { return splits[0] + splits[1] + splits[2] + splits[3]; }

static te_recipe grouped_recipe(int i) {
    switch (i) {
    case 0: return te_recipe_delayed_scaling();
    case 1: return te_recipe_current_scaling();
    case 2: return te_recipe_block_scaling();
    case 3: return te_recipe_mxfp8();
    default: return te_recipe_nvfp4();
    }
}
enum { RECIPES = 5 };

static te_module *grouped(te_ctx *te, te_grouped_linear_desc d) {
    d.num_gemms = GROUPS, d.in_features = IN, d.out_features = OUT;
    te_rng_set(te, 5, 0);
    te_module *m = te_grouped_linear_create(te, &d);
    for (int i = 0; m && i < GROUPS && !d.gemm.no_bias; i++) {
        char name[32];
        snprintf(name, sizeof name, "bias%d", i);
        te_tensor_copy(te_module_parameter(m, name), test_tensor(te, te_tensor_dtype(te_module_parameter(m, name)), SHAPE(OUT), test_normal(OUT, 40 + (uint64_t)i)));
    }
    return m;
}
static te_tensor *parameter(te_module *m, const char *kind, int i) {
    char name[32];
    snprintf(name, sizeof name, "%s%d", kind, i);
    return te_module_parameter(m, name);
}
typedef struct grouped_run {
    const te_recipe *recipe;
    const int64_t *splits;
    bool device;
    te_microbatch microbatch;
} grouped_run;
static te_tensor *run_grouped(te_module *m, const grouped_run *r, te_tensor *x) {
    te_ctx *te = te_module_ctx(m);
    te_forward_args args = {.input = x, .is_first_microbatch = r->microbatch};
    if (r->device) args.m_splits_tensor = te_tensor_from_host(te, TE_I64, SHAPE(GROUPS), r->splits);
    else args.m_splits = r->splits;
    if (r->recipe) te_autocast_begin(te, &(te_autocast_desc){.recipe = r->recipe});
    te_forward_with(m, &args);
    if (r->recipe) te_autocast_end(te);
    return args.outputs.out;
}
static te_tensor *input_of(te_ctx *te, te_dtype dtype, const int64_t *splits, int64_t spare) {
    float *values = test_normal((sum_of(splits) + spare) * IN + 1, 21);
    memset(values + sum_of(splits) * IN, 0, (size_t)(spare * IN) * sizeof(float));
    return te_tensor_set_requires_grad(test_tensor(te, dtype, SHAPE(sum_of(splits) + spare, IN), values), true);
}
static te_tensor *gradient_of(te_ctx *te, te_tensor *y) { return test_tensor(te, te_tensor_dtype(y), te_tensor_ndim(y), te_tensor_shape(y), test_normal(te_tensor_numel(y), 31)); }

/* Sizes of the host: every bit of each group is that of a Linear with its weight, forward and backward, over two steps. */
TE_TEST_DEVICES(grouped_linear_is_linears) {
    for (int i = 0; i < RECIPES; i++) {
        te_recipe recipe = grouped_recipe(i);
        const int64_t *splits = i % 2 ? even_splits : odd_splits;
        if (recipe.kind == TE_RECIPE_NVFP4) recipe.nvfp4.stochastic_rounding = TE_OFF; /* the random numbers of gradients are drawn in another order */
        te_scope_begin(te);
        test_case("%s", te_recipe_name(recipe.kind));
        te_module *m = grouped(te, (te_grouped_linear_desc){0}), *single[GROUPS];
        te_linear_desc one = {.in_features = IN, .out_features = OUT};
        for (int g = 0; g < GROUPS; g++) {
            single[g] = te_linear_create(te, &one);
            te_tensor_copy(te_module_parameter(single[g], "weight"), parameter(m, "weight", g));
            te_tensor_copy(te_module_parameter(single[g], "bias"), parameter(m, "bias", g));
        }
        for (int step = 0; step < 2; step++) {
            te_tensor *x = input_of(te, TE_BF16, splits, 0);
            te_rng_set(te, 9, 0);
            te_tensor *y = run_grouped(m, &(grouped_run){.recipe = &recipe, .splits = splits}, x), *dy = gradient_of(te, y);
            te_backward_from(y, dy);
            REQUIRE_OK(te);
            float *got = test_read(y), *dx = test_read(te_tensor_grad(x)), *g_all = test_read(dy);
            int64_t at = 0;
            for (int g = 0; g < GROUPS; at += splits[g++]) {
                te_tensor *part = te_tensor_set_requires_grad(test_tensor(te, TE_BF16, SHAPE(splits[g], IN), test_read(x) + at * IN), true);
                te_tensor *z = test_forward(single[g], &recipe, part);
                te_backward_from(z, test_tensor(te, TE_BF16, SHAPE(splits[g], OUT), g_all + at * OUT));
                REQUIRE_OK(te);
                test_case("%s, step %d, group %d", te_recipe_name(recipe.kind), step, g);
                CHECK_TENSOR(z, got + at * OUT, 0, 0);
                CHECK_TENSOR(te_tensor_grad(part), dx + at * IN, 0, 0);
                CHECK_TENSOR(te_tensor_grad(te_module_parameter(single[g], "weight")), test_read(te_tensor_grad(parameter(m, "weight", g))), 0, 0);
                CHECK_TENSOR(te_tensor_grad(te_module_parameter(single[g], "bias")), test_read(te_tensor_grad(parameter(m, "bias", g))), 0, 0);
            }
        }
        te_module_destroy(m);
        for (int g = 0; g < GROUPS; g++) te_module_destroy(single[g]);
        te_scope_end(te);
    }
}

/* Everything that a step makes. */
typedef struct grouped_result {
    float *y, *dx, *dw[GROUPS], *db[GROUPS];
} grouped_result;
static grouped_result step_of(te_module *m, const grouped_run *r, te_dtype dtype, int64_t spare) {
    te_ctx *te = te_module_ctx(m);
    grouped_result z;
    memset(&z, 0, sizeof z);
    te_tensor *x = input_of(te, dtype, r->splits, spare), *y = run_grouped(m, r, x);
    if (!y) return z;
    te_backward_from(y, test_tensor(te, dtype, te_tensor_ndim(y), te_tensor_shape(y), test_normal(te_tensor_numel(y), 31)));
    z.y = test_read(y);
    z.dx = test_read(te_tensor_grad(x));
    for (int g = 0; g < GROUPS; g++) {
        z.dw[g] = test_read(te_tensor_grad(parameter(m, "weight", g)));
        if (parameter(m, "bias", g)) z.db[g] = test_read(te_tensor_grad(parameter(m, "bias", g)));
    }
    te_module_zero_grad(m);
    return z;
}
static void check_results(const grouped_result *got, const grouped_result *want, int64_t rows, double limit) {
    REQUIRE(got->y && want->y);
    CHECK_ERROR_BELOW("y", got->y, want->y, rows * OUT, limit);
    CHECK_ERROR_BELOW("dx", got->dx, want->dx, rows * IN, limit);
    for (int g = 0; g < GROUPS; g++) {
        CHECK_ERROR_BELOW("dw", got->dw[g], want->dw[g], OUT * IN, limit);
        if (want->db[g]) CHECK_ERROR_BELOW("db", got->db[g], want->db[g], OUT, limit);
    }
}

/* Sizes of the device: the same products, and under recipes the same codes (test_grouped.c compares every byte); but for stochastic rounding. Rows behind the last group give
 * zeros. */
TE_TEST_DEVICES(grouped_linear_sizes_on_the_device) {
    static const double limit[RECIPES] = {4e-3, 4e-3, 4e-3, 4e-3, 0.35}; /* sums in another order, on a GPU; of NVFP4's gradients, e2m1 drawn twice: sqrt(2) * 2^-2 */
    for (int i = -1; i < RECIPES; i++) {
        te_recipe recipe = grouped_recipe(i < 0 ? 0 : i);
        for (int odd = 0; odd < 2; odd++) {
            if ((i + odd + 1) % test_every_sanitized(1)) continue;
            const int64_t *splits = odd ? odd_splits : even_splits;
            int64_t rows = sum_of(splits);
            te_scope_begin(te);
            test_case("%s, %s", i < 0 ? "high precision" : te_recipe_name(recipe.kind), odd ? "odd" : "even");
            te_module *host = grouped(te, (te_grouped_linear_desc){0}), *device = grouped(te, (te_grouped_linear_desc){0});
            grouped_run a = {.recipe = i < 0 ? NULL : &recipe, .splits = splits}, b = a;
            b.device = true;
            grouped_result want = step_of(host, &a, TE_BF16, 24), got = step_of(device, &b, TE_BF16, 24);
            REQUIRE_OK(te);
            check_results(&got, &want, rows + 24, i < 0 ? 0 : limit[i]);
            for (int64_t k = rows * OUT; k < (rows + 24) * OUT; k++) CHECK(got.y[k] == 0 && want.y[k] == 0);
            for (int64_t k = rows * IN; k < (rows + 24) * IN; k++) CHECK(got.dx[k] == 0 && want.dx[k] == 0);
            te_module_destroy(host);
            te_module_destroy(device);
            te_scope_end(te);
        }
    }
}

static te_tensor *grouped_function(te_ctx *te, te_tensor *const *in, void *user) {
    const int64_t splits[GROUPS] = {3, 0, 2, 4};
    (void)te;
    return run_grouped((te_module *)user, &(grouped_run){.splits = splits, .device = true}, in[0]);
}
TE_TEST_DEVICES(grouped_linear_gradients) {
    te_module *m = grouped(te, (te_grouped_linear_desc){.gemm.params_dtype = TE_F32});
    te_tensor *in[] = {test_tensor(te, TE_F32, SHAPE(11, IN), test_normal(11 * IN, 1)), parameter(m, "weight", 0), parameter(m, "weight", 3), parameter(m, "bias", 2)};
    test_check_gradients(te, grouped_function, COUNT(in), in, m, 2e-2, 5e-3);
    te_module_destroy(m);
}

/* No option changes a bit of the result: delay_wgrad_compute, main_grad, microbatches, save_original_input, return_bias, weights that share no memory. */
TE_TEST_DEVICES(grouped_linear_options) {
    for (int i = 0; i < 12; i += test_every_odd(2)) {
        te_recipe recipe = te_recipe_current_scaling();
        bool device = i % 2, quantized = i / 2 % 2;
        int option = i / 4;
        te_scope_begin(te);
        test_case("option %d%s%s", option, device ? ", device" : "", quantized ? ", quantized" : "");
        grouped_run r = {.recipe = quantized ? &recipe : NULL, .splits = odd_splits, .device = device};
        te_grouped_linear_desc d = {0};
        te_module *plain = grouped(te, d);
        grouped_result want = step_of(plain, &r, TE_BF16, 0);
        if (option == 0) d.gemm.delay_wgrad_compute = true;
        if (option == 1) d.gemm.fuse_wgrad_accumulation = true;
        if (option == 2) d.save_original_input = quantized;
        te_module *m = grouped(te, d);
        te_tensor *main_grad[GROUPS];
        for (int g = 0; g < GROUPS && option == 1; g++) {
            main_grad[g] = te_tensor_full(te, TE_F32, SHAPE(OUT, IN), 2);
            te_tensor_set_main_grad(parameter(m, "weight", g), main_grad[g]);
        }
        if (option == 2) /* weights that do not lie in one stack */
            for (int g = 0; g < GROUPS; g++) {
                char name[32];
                snprintf(name, sizeof name, "weight%d", g);
                te_module_add_parameter(m, name, test_tensor(te, TE_BF16, SHAPE(OUT, IN), test_read(parameter(plain, "weight", g))));
            }
        te_tensor *x = input_of(te, TE_BF16, odd_splits, 0), *y = run_grouped(m, &r, x);
        REQUIRE(y != NULL);
        te_backward_from(y, gradient_of(te, y));
        if (option == 0) {
            CHECK(!te_tensor_grad(parameter(m, "weight", 0)));
            te_backward_dw(m);
        }
        REQUIRE_OK(te);
        CHECK_TENSOR(y, want.y, 0, 0);
        CHECK_TENSOR(te_tensor_grad(x), want.dx, 0, 0);
        for (int g = 0; g < GROUPS; g++) {
            if (option == 1) {
                float *sum = test_read(main_grad[g]);
                CHECK(!te_tensor_grad(parameter(m, "weight", g)));
                for (int k = 0; k < OUT * IN; k++) sum[k] -= 2;
                CHECK_CLOSE("main_grad", sum, want.dw[g], OUT * IN, 8e-3, 2e-5); /* want is rounded to bf16; 2 in front of a sum in f32 takes its last bits */
            } else
                CHECK_TENSOR(te_tensor_grad(parameter(m, "weight", g)), want.dw[g], 0, 0);
            CHECK_TENSOR(te_tensor_grad(parameter(m, "bias", g)), want.db[g], 0, 0);
        }
        te_module_destroy(plain);
        te_module_destroy(m);
        te_scope_end(te);
    }
}

TE_TEST_DEVICES(grouped_linear_returns_its_bias) {
    te_module *m = grouped(te, (te_grouped_linear_desc){.gemm.return_bias = true}), *without = grouped(te, (te_grouped_linear_desc){.gemm.no_bias = true});
    te_forward_args args = {.input = input_of(te, TE_BF16, odd_splits, 0), .m_splits = odd_splits};
    for (int g = 0; g < GROUPS; g++) te_tensor_copy(parameter(without, "weight", g), parameter(m, "weight", g));
    te_forward_with(m, &args);
    REQUIRE_OK(te);
    CHECK_TENSOR(args.outputs.out, test_read(run_grouped(without, &(grouped_run){.splits = odd_splits}, args.input)), 0, 0);
    te_backward_from(args.outputs.bias, gradient_of(te, args.outputs.bias));
    REQUIRE_OK(te);
    for (int g = 0; g < GROUPS; g++) {
        CHECK_BYTES("bias", test_read(args.outputs.bias) + g * OUT, test_read(parameter(m, "bias", g)), OUT * sizeof(float));
        CHECK_TENSOR(te_tensor_grad(parameter(m, "bias", g)), test_rounded(TE_BF16, test_normal(GROUPS * OUT, 31) + g * OUT, OUT), 0, 0);
    }
    te_module_destroy(m);
    te_module_destroy(without);
}

/* Kept quantized weights, under a checkpoint, and quantized from the beginning. */
TE_TEST_DEVICES(grouped_linear_microbatches_checkpoints_and_primary_weights) {
    te_recipe recipe = te_recipe_current_scaling();
    for (int device = 0; device < 2; device++) {
        te_scope_begin(te);
        test_case(device ? "device" : "host");
        grouped_run r = {.recipe = &recipe, .splits = odd_splits, .device = device};
        te_module *m = grouped(te, (te_grouped_linear_desc){0});
        grouped_result want = step_of(m, &r, TE_BF16, 0);
        for (int k = 0; k < 2; k++) {
            r.microbatch = k ? TE_MICROBATCH_LATER : TE_MICROBATCH_FIRST;
            grouped_result got = step_of(m, &r, TE_BF16, 0);
            check_results(&got, &want, sum_of(odd_splits), 0);
        }
        r.microbatch = TE_MICROBATCH_NONE;
        te_module_set_checkpoint(m, true);
        grouped_result again = step_of(m, &r, TE_BF16, 0);
        check_results(&again, &want, sum_of(odd_splits), 0);
        te_module_destroy(m);
        te_quantized_model_init_begin(te, &(te_quantized_model_init_desc){.recipe = &recipe});
        m = te_grouped_linear_create(te, &(te_grouped_linear_desc){.num_gemms = GROUPS, .in_features = IN, .out_features = OUT, .gemm.no_bias = true});
        te_quantized_model_init_end(te);
        REQUIRE_OK(te);
        CHECK(te_tensor_is_quantized(parameter(m, "weight", 2)));
        /* Codes that are kept are the codes that a call would make of the value behind them. */
        te_module *plain = te_grouped_linear_create(te, &(te_grouped_linear_desc){.num_gemms = GROUPS, .in_features = IN, .out_features = OUT, .gemm.no_bias = true});
        for (int g = 0; g < GROUPS; g++) te_tensor_copy(parameter(plain, "weight", g), te_dequantize(parameter(m, "weight", g), TE_BF16));
        grouped_result primary = step_of(m, &r, TE_BF16, 0), same = step_of(plain, &r, TE_BF16, 0);
        REQUIRE_OK(te);
        check_results(&primary, &same, sum_of(odd_splits), 0);
        te_module_destroy(plain);
        te_module_destroy(m);
        te_scope_end(te);
    }
}

/* Parameters that get their memory later lie as those that had it at once, one behind the other: no call copies them together. */
TE_TEST(grouped_linear_memory_that_comes_later) {
    te_ctx *te = test_context("cpu");
    for (int bias = 0; bias < 2; bias++) {
        te_grouped_linear_desc d = {.gemm.no_bias = !bias, .gemm.device = TE_PARAMS_META, .gemm.params_dtype = TE_F32, .num_gemms = GROUPS, .in_features = IN, .out_features = OUT};
        te_module *m = te_grouped_linear_create(te, &d);
        CHECK(te_module_reset_parameters(m) == TE_OK);
        for (int g = 1; g < GROUPS; g++) {
            CHECK((char *)te_tensor_data(parameter(m, "weight", g)) == (char *)te_tensor_data(parameter(m, "weight", 0)) + g * IN * OUT * (int)sizeof(float));
            if (bias) CHECK((char *)te_tensor_data(parameter(m, "bias", g)) == (char *)te_tensor_data(parameter(m, "bias", 0)) + g * OUT * (int)sizeof(float));
        }
        te_module_destroy(m);
    }
    static const char *const names[] = {"a_", "b_"};
    const int64_t sizes[] = {8, 24};
    te_linear_desc split = {.in_features = 16, .out_features = 32, .gemm.device = TE_PARAMS_META, .parameters_split = {.names = names, .sizes = sizes, .count = 2}};
    te_module *m = te_linear_create(te, &split);
    CHECK(te_module_reset_parameters(m) == TE_OK);
    CHECK((char *)te_tensor_data(te_module_parameter(m, "b_weight")) == (char *)te_tensor_data(te_module_parameter(m, "a_weight")) + 8 * 16 * 2);
    CHECK((char *)te_tensor_data(te_module_parameter(m, "b_bias")) == (char *)te_tensor_data(te_module_parameter(m, "a_bias")) + 8 * 2);
    CHECK_OK(te);
    te_module_destroy(m);
}

/* Calibration measures, wherever the sizes are. */
TE_TEST_DEVICES(grouped_linear_calibrates) {
    te_recipe recipe = te_recipe_delayed_scaling();
    for (int device = 0; device < 2; device++) {
        te_module *m = grouped(te, (te_grouped_linear_desc){0});
        te_tensor *x = input_of(te, TE_BF16, odd_splits, 0), *sizes = te_tensor_from_host(te, TE_I64, SHAPE(GROUPS), odd_splits);
        te_forward_args args = {.input = x};
        test_case(device ? "device" : "host");
        if (device) args.m_splits_tensor = sizes;
        else args.m_splits = odd_splits;
        te_autocast_begin(te, &(te_autocast_desc){.recipe = &recipe, .disabled = true, .calibrating = true});
        te_forward_with(m, &args);
        te_autocast_end(te);
        REQUIRE_OK(te);
        const float *in = test_read(x), *history = test_read(te_module_parameter(m, "fp8_amax_history_fwd"));
        const int64_t slots = te_tensor_shape(te_module_parameter(m, "fp8_amax_history_fwd"))[1], rows = te_tensor_shape(te_module_parameter(m, "fp8_amax_history_fwd"))[0];
        float most = 0, amax[3 * GROUPS] = {0};
        for (int64_t i = 0; i < (device ? sum_of(odd_splits) : odd_splits[0]) * IN; i++) most = fmaxf(most, fabsf(in[i]));
        for (int64_t r = 0; r < rows; r++)
            for (int64_t k = 0; k < slots; k++) amax[k] = fmaxf(amax[k], history[r * slots + k]);
        CHECK(amax[0] == most);
        for (int g = 0; g < GROUPS; g++) {
            const float *w = test_read(parameter(m, "weight", g));
            float largest = 0;
            for (int i = 0; i < IN * OUT; i++) largest = fmaxf(largest, fabsf(w[i]));
            CHECK(amax[3 * g + 1] == largest);
        }
        te_module_destroy(m);
    }
}

/* ---- padding ---- */

/* The recipe in force at each call says how rows are padded, m's own before the region's. */
TE_TEST(fp8_padding_follows_the_recipe) {
    te_ctx *te = test_context("cpu");
    te_module *pad = te_fp8_padding_create(te, &(te_fp8_padding_desc){.num_gemms = 1});
    te_recipe mx = te_recipe_mxfp8(), nv = te_recipe_nvfp4();
    const int64_t splits[1] = {5}, want[4] = {16, 32, 128, 16};
    for (int i = 0; i < 4; i++) { /* outside; the region's; its own; outside again */
        int64_t padded = 0;
        te_forward_args args = {.input = te_tensor_zeros(te, TE_BF16, SHAPE(5, 8)), .m_splits = splits, .padded_m_splits = &padded};
        if (i == 2) te_module_set_recipe(pad, &nv, false);
        te_autocast_begin(te, &(te_autocast_desc){.recipe = &mx, .disabled = i == 0 || i == 3});
        te_forward_with(pad, &args);
        te_autocast_end(te);
        CHECK_OK(te);
        CHECK_EQ_INT(padded, want[i]);
    }
    te_module_destroy(pad);
    CHECK(!te_fp8_padding_create(te, &(te_fp8_padding_desc){.num_gemms = 1, .align_size = (int64_t)1 << 31}));
    CHECK_ERROR(te, TE_ERR_INVALID, "align_size is 2147483648; 0 takes the recipe's, and at most 2^31 - 1");
}

TE_TEST_DEVICES(fp8_padding_and_back) {
    for (int device = 0; device < 2; device++) {
        te_fp8_padding_desc d = {.num_gemms = GROUPS};
        te_module *pad = te_fp8_padding_create(te, &d), *unpad = te_fp8_unpadding_create(te, &d);
        int64_t padded[GROUPS] = {0}, at = 0, to = 0, rows = sum_of(odd_splits);
        te_tensor *x = input_of(te, TE_BF16, odd_splits, 0), *sizes = te_tensor_from_host(te, TE_I64, SHAPE(GROUPS), odd_splits);
        te_forward_args a = {.input = x, .padded_m_splits = padded}, b = {0};
        if (device) a.m_splits_tensor = b.m_splits_tensor = sizes;
        else a.m_splits = b.m_splits = odd_splits;
        te_forward_with(pad, &a);
        REQUIRE_OK(te);
        b.input = a.outputs.out;
        te_forward_with(unpad, &b);
        REQUIRE_OK(te);
        float *in = test_read(x), *out = test_read(a.outputs.out), *got = test_read(a.outputs.m_splits);
        for (int g = 0; g < GROUPS; at += odd_splits[g], to += (int64_t)got[g], g++) {
            CHECK_EQ_INT(got[g], (odd_splits[g] + 15) / 16 * 16);
            if (!device) CHECK_EQ_INT(padded[g], got[g]);
            CHECK_BYTES("rows", out + to * IN, in + at * IN, (size_t)(odd_splits[g] * IN) * sizeof(float));
            for (int64_t k = (to + odd_splits[g]) * IN; k < (to + (int64_t)got[g]) * IN; k++) CHECK(out[k] == 0);
        }
        if (!device) CHECK_EQ_INT(te_tensor_shape(a.outputs.out)[0], to);
        CHECK_BYTES("back", test_read(b.outputs.out), in, (size_t)(rows * IN) * sizeof(float));
        te_tensor *dy = gradient_of(te, b.outputs.out);
        te_backward_from(b.outputs.out, dy);
        REQUIRE_OK(te);
        CHECK_BYTES("gradient", test_read(te_tensor_grad(x)), test_read(dy), (size_t)(rows * IN) * sizeof(float));
        te_module_destroy(pad);
        te_module_destroy(unpad);
    }
}

TE_TEST_DEVICES(fp8_padding_sizes_may_lie_in_place) {
    static const float values[4] = {1, 2, 3, 4}, want[8] = {1, 0, 0, 0, 2, 3, 4, 0};
    te_module *m = te_fp8_padding_create(te, &(te_fp8_padding_desc){.num_gemms = 2, .align_size = 4});
    te_tensor *x = te_tensor_set_requires_grad(te_tensor_from_f32(te, TE_F32, SHAPE(4, 1), values), true);
    for (int k = 0; k < 4; k++) {
        int64_t sizes[2] = {1, 3}, padded[2] = {0, 0}, *to = k & 1 ? sizes : padded;
        te_forward_args args = {.input = x, .m_splits = sizes, .padded_m_splits = to};
        te_module_set_checkpoint(m, k & 2 && !(k & 1));
        te_tensor *y = te_forward_with(m, &args);
        CHECK_TENSOR(y, want, 0, 0);
        CHECK(to[0] == 4 && to[1] == 4);
        to[0] = -7; /* this memory may be gone when the backward pass comes */
        te_backward(te_sum_all(y));
        CHECK_EQ_INT(to[0], -7);
    }
    CHECK_OK(te);
    te_module_destroy(m);
}

/* ---- a layer ---- */

typedef struct moe_layer {
    te_module *router, *up, *down;
} moe_layer;
static te_tensor *layer_forward(const moe_layer *l, te_tensor *x) {
    te_ctx *te = te_module_ctx(l->up);
    int64_t tokens = te_tensor_shape(x)[0];
    te_tensor *map, *rows, *moved, *probs = te_fused_topk_with_score_function(te_forward(l->router, x), &(te_fused_topk_desc){.topk = 2}, &map);
    te_tensor *y = te_moe_permute_with_probs(x, probs, map, 2 * tokens, &moved, &rows), *counts = te_tensor_empty(te, TE_I64, SHAPE(GROUPS));
    te_op_moe_mask_map_args count = {.routing_map = map, .row_id_map = te_tensor_empty(te, TE_I32, SHAPE(tokens, 2 * GROUPS + 1)), .tokens_per_expert = counts};
    te_op_moe_mask_map(te, &count);
    te_forward_args up = {.input = y, .m_splits_tensor = counts};
    te_forward_args down = {.input = te_activate(te_forward_with(l->up, &up), TE_SILU, NULL), .m_splits_tensor = counts};
    return te_moe_unpermute(te_forward_with(l->down, &down), rows, &(te_moe_unpermute_desc){.merging_probs = probs});
}
/* The same steps by calls and by launches of a graph: the router's choice, and so the sizes, change from step to step. */
TE_TEST_DEVICES(moe_layer_trains_in_a_graph) {
    enum { TOKENS = 48, WIDTH = 32, STEPS = 4 };
    float *end[2], *last[2];
    for (int i = 0; i < 4; i++) {
        bool graph = i % 2, quantized = i / 2;
        te_recipe recipe = te_recipe_delayed_scaling();
        te_scope_begin(te);
        test_case("%s%s", graph ? "launches" : "calls", quantized ? ", FP8" : "");
        te_rng_set(te, 3, 0);
        te_linear_desc route = {.in_features = WIDTH, .out_features = GROUPS, .gemm.no_bias = true, .gemm.params_dtype = TE_F32, .gemm.init.std = 0.3f};
        te_grouped_linear_desc wide = {.num_gemms = GROUPS, .in_features = WIDTH, .out_features = 2 * WIDTH, .gemm.params_dtype = TE_F32};
        te_grouped_linear_desc narrow = {.num_gemms = GROUPS, .in_features = 2 * WIDTH, .out_features = WIDTH, .gemm.params_dtype = TE_F32};
        moe_layer l = {te_linear_create(te, &route), te_grouped_linear_create(te, &wide), te_grouped_linear_create(te, &narrow)};
        te_module *all = te_sequential_create(te, (te_module *[]){l.router, l.up, l.down}, 3);
        te_optimizer *o = te_fused_adam_create(te, all, &(te_fused_adam_desc){.lr = 0.02f});
        te_tensor *x = te_tensor_zeros(te, TE_F32, SHAPE(TOKENS, WIDTH)), *target = test_tensor(te, TE_F32, SHAPE(TOKENS, WIDTH), test_normal(TOKENS * WIDTH, 8));
        te_tensor *loss = te_tensor_retain(te_tensor_zeros(te, TE_F32, SHAPE(1)));
        te_graph *g = NULL;
        REQUIRE_OK(te);
        for (int step = 0; step < STEPS + 1; step++) {
            te_tensor_copy_from_host(x, test_normal(TOKENS * WIDTH, 100 + (uint64_t)step % 3));
            bool record = graph && step == 1;
            if (graph && step > 1) {
                te_graph_launch(g);
                continue;
            }
            if (record) te_graph_begin(te);
            te_scope_begin(te);
            if (quantized) te_autocast_begin(te, &(te_autocast_desc){.recipe = &recipe});
            te_tensor *error = te_mse_loss(layer_forward(&l, x), target);
            if (quantized) te_autocast_end(te);
            te_backward(error);
            te_optimizer_step(o);
            te_optimizer_zero_grad(o);
            te_tensor_copy(loss, error);
            te_scope_end(te);
            if (record) {
                g = te_graph_end(te);
                te_graph_launch(g);
            }
            REQUIRE_OK(te);
        }
        end[graph] = test_read(parameter(l.up, "weight", 2));
        last[graph] = test_read(loss);
        if (graph) {
            CHECK_BYTES("weights", end[1], end[0], 2 * WIDTH * WIDTH * sizeof(float));
            CHECK_BYTES("loss", last[1], last[0], sizeof(float));
        }
        te_graph_destroy(g);
        te_tensor_release(loss);
        te_optimizer_destroy(o);
        te_module_destroy(all);
        te_scope_end(te);
    }
}

/* ---- rows of codes ---- */

static te_quantizer *codes_of(te_ctx *te, int kind) {
    te_quantizer_desc d = {.kind = kind <= 1 ? TE_QUANT_CURRENT : kind <= 3 ? TE_QUANT_BLOCK : TE_QUANT_MXFP8, .usage = kind % 2 ? TE_ROWWISE : 0};
    if (kind == 1) d.dtype = TE_F8E5M2;
    if (d.kind == TE_QUANT_BLOCK) d.block.block_scaling_dim = 1, d.block.fp32_scales = kind == 3;
    return te_quantizer_create(te, &d);
}

/* Moving codes and then decoding them gives the bits of decoding and then moving: each row has its scales with it. */
TE_TEST_DEVICES(moe_permute_moves_codes_with_their_scales) {
    enum { T = 9, E = 4, K = 2, R = 24 };
    static const int64_t widths[] = {300, 33, 128};
    for (int kind = 0; kind < 5; kind++)
        for (int w = 0; w < COUNT(widths); w++)
            for (int way = 0; way < 4; way++) { /* mask, index, probabilities, chunks */
                static const char *const names[] = {"mask", "index", "probabilities", "chunks"};
                int64_t h = widths[w], mask[T * E] = {0}, experts[T * K];
                float *x = test_normal(T * h, 3), *p = test_uniform(T * E, 4, 0.1f, 1);
                test_case("kind %d, [%d, %d], %s", kind, T, (int)h, names[way]);
                for (int64_t i = 0; i < T * h; i++) x[i] *= (float)(1 << (i / h)); /* rows of different size: another row's scale would show */
                for (int t = 0; t < T; t++) experts[t * K] = t % E, experts[t * K + 1] = (t * 3 + 1) % E == t % E ? (t + 1) % E : (t * 3 + 1) % E;
                for (int i = 0; i < T * K; i++) mask[i / K * E + experts[i]] = 1;
                te_quantizer *q = codes_of(te, kind);
                te_tensor *plain = test_tensor(te, TE_BF16, SHAPE(T, h), x), *out[2], *moved[2] = {NULL, NULL}, *leaf[2], *map;
                te_tensor *routing = test_i32(te, SHAPE(T, way == 1 ? K : E), way == 1 ? experts : mask);
                te_tensor *probs = test_tensor(te, TE_F32, SHAPE(T, E), p), *sizes = test_i32(te, SHAPE(3), (const int64_t[]){4, 3, 2}), *order = test_i32(te, SHAPE(3), (const int64_t[]){1, 2, 0});
                REQUIRE_OK(te);
                for (int codes = 0; codes < 2; codes++) {
                    leaf[codes] = te_tensor_cast(plain, TE_BF16);
                    te_tensor_set_requires_grad(leaf[codes], true);
                    te_tensor *in = te_quantize(q, leaf[codes]);
                    if (!codes) in = te_dequantize(in, TE_BF16);
                    out[codes] = way == 2   ? te_moe_permute_with_probs(in, probs, routing, R, &moved[codes], &map)
                                 : way == 3 ? te_moe_sort_chunks_by_index(in, sizes, order)
                                            : te_moe_permute(in, routing, R, way == 1 ? TE_MAP_INDEX : TE_MAP_MASK, &map);
                    REQUIRE_OK(te);
                    CHECK_EQ_INT(te_quantized_usage(out[codes]), codes ? TE_ROWWISE : 0);
                    te_backward_from(out[codes], test_tensor(te, TE_BF16, SHAPE(way == 3 ? T : R, h), test_normal(R * h, 6)));
                }
                REQUIRE_OK(te);
                CHECK_EQ_INT(te_quantized_kind(out[1]), kind <= 1 ? TE_QUANT_CURRENT : kind <= 3 ? TE_QUANT_BLOCK : TE_QUANT_MXFP8);
                CHECK_TENSOR(te_dequantize(out[1], TE_BF16), test_read(out[0]), 0, 0);
                if (way == 2) CHECK_TENSOR(moved[1], test_read(moved[0]), 0, 0);
                CHECK_TENSOR(te_tensor_grad(leaf[1]), test_read(te_tensor_grad(leaf[0])), 0, 0);
                te_quantizer_destroy(q);
            }
}

TE_TEST_DEVICES(moe_permute_refuses_codes_that_cannot_move) {
    const te_quantizer_desc descs[] = {{.kind = TE_QUANT_BLOCK, .block.block_scaling_dim = 2}, {.kind = TE_QUANT_NVFP4}, {.kind = TE_QUANT_MXFP8, .optimize_for_gemm = true},
                                       {.kind = TE_QUANT_MXFP8, .quantization_2d = TE_ON}, {.kind = TE_QUANT_IDENTITY}, {.kind = TE_QUANT_CURRENT, .usage = TE_COLUMNWISE}};
    static const char *const words[] = {"128 x 128 blocks", "codes of 4 bits", "optimize_for_gemm", "quantization_2d", "no codes of te.h's own", "column-wise copy alone"};
    te_tensor *x = test_tensor(te, TE_BF16, SHAPE(32, 64), test_normal(2048, 3)), *routing = te_tensor_full(te, TE_I32, SHAPE(32, 2), 1);
    for (int i = 0; i < COUNT(descs); i++) {
        te_quantizer *q = te_quantizer_create(te, &descs[i]);
        test_case("%s", words[i]);
        CHECK(!te_moe_permute(te_quantize(q, x), routing, 64, TE_MAP_MASK, NULL));
        CHECK_ERROR(te, i == 5 ? TE_ERR_STATE : TE_ERR_UNSUPPORTED, words[i]);
        te_quantizer_destroy(q);
    }
    te_quantizer *q = codes_of(te, 0);
    te_tensor *map = NULL, *y = te_moe_permute(te_quantize(q, x), routing, 64, TE_MAP_MASK, &map);
    REQUIRE_OK(te);
    CHECK(!te_moe_unpermute(y, map, NULL)); /* sums are of numbers, not codes */
    CHECK(te_error_code(te) != TE_OK);
    te_clear_error(te);
    te_quantizer_destroy(q);
}

/* Counts that no tensor has the rows for, whose sum no 64 bits have: the first one too many is named. */
TE_TEST_DEVICES(moe_counts_beyond_all_rows) {
    static const int64_t huge[][E] = {{INT64_MAX, INT64_MAX, INT64_MAX, INT64_MAX}, {3, INT64_MAX - 5, 1, 9}, {1, INT32_MAX, 0, 0}, {INT64_MAX / 2, INT64_MAX / 2, INT64_MAX / 2, 7}};
    int64_t counts[E];
    te_tensor *mask = routing(te, T, E, 2, counts), *x = te_tensor_full(te, TE_F32, SHAPE(T, H), 1), *probs = te_tensor_full(te, TE_F32, SHAPE(T, E), 1);
    for (int i = 0; i < COUNT(huge); i++)
        for (int align = 1; align <= 16; align += 15) {
            test_case("counts %lld, %lld .., align %d", (long long)huge[i][0], (long long)huge[i][1], align);
            te_moe_padded made;
            CHECK(te_moe_permute_and_pad_with_probs(x, probs, mask, te_tensor_from_host(te, TE_I64, SHAPE(E), huge[i]), align, 0, &made) == NULL);
            CHECK(made.permuted_probs == NULL);
            CHECK_ERROR(te, TE_ERR_INVALID, i % 3 == 0 ? "te_moe_permute_and_pad_with_probs: tokens_per_expert[0], padded, is " : "te_moe_permute_and_pad_with_probs: tokens_per_expert[1], padded, is ");
            CHECK(te_moe_permute_and_pad_with_probs(x, probs, mask, te_tensor_from_host(te, TE_I64, SHAPE(E), huge[i]), align, 2 * T + E * 15, &made) != NULL); /* reads no sum */
        }
    te_op_moe_chunk_map_args map = {.sizes = te_tensor_from_host(te, TE_I64, SHAPE(E), huge[0]), .sorted_index = te_tensor_from_host(te, TE_I64, SHAPE(E), ((int64_t[]){4, 3, 2, 1, 0})),
                                    .row_id_map = te_tensor_zeros(te, TE_I32, SHAPE(T))};
    CHECK_EQ_INT(te_op_moe_chunk_map(te, &map), TE_OK);
    map.offsets = map.sizes;
    map.sorted_index = NULL;
    CHECK_EQ_INT(te_op_moe_chunk_map(te, &map), TE_OK);
    CHECK_OK(te);
}
