/* test_grouped.c: GroupedLinear by m_splits_tensor against the same by m_splits: every group has scales of its own, whichever way its size came. Groups of very different
 * magnitude, empty ones, and sizes that no block divides; over several steps, for delayed scaling reads what earlier ones left. */
#include "../dist/ranks.h"

enum { SG_GROUPS = 5, SG_IN = 160, SG_OUT = 96, SG_SPARE = 11 };
typedef struct sg_recipe {
    const char *name;
    te_recipe recipe;
    double error, grad_error; /* of each group, relative; grad_error: where dy is a factor */
} sg_recipe;
/* A code's error is spread evenly over its last place: e4m3 2^-4 / sqrt(3) at most, 0.026 on average over a power of two, e5m2 twice that, e2m1 about 0.1; the errors of two
 * factors add up as squares do. With a third more for the few elements of a group. MXFP8's and NVFP4's scales leave up to a half of the codes' range unused, which costs little. */
static int sg_recipes(sg_recipe r[], bool all) {
    int n = 0;
    memset(r, 0, 12 * sizeof *r);
#define SG_ADD(text, make, e, g) r[n].name = text, r[n].recipe = make, r[n].error = e, r[n].grad_error = g, n++
    SG_ADD("delayed", te_recipe_delayed_scaling(), 0.05, 0.085);
    r[n - 1].recipe.delayed.amax_history_len = 4;
    SG_ADD("current", te_recipe_current_scaling(), 0.05, 0.085);
    SG_ADD("block", te_recipe_block_scaling(), 0.05, 0.05);
    SG_ADD("mxfp8", te_recipe_mxfp8(), 0.05, 0.05);
    SG_ADD("nvfp4", te_recipe_nvfp4(), 0.2, 0.2);
    r[n - 1].recipe.nvfp4.stochastic_rounding = TE_OFF; /* random numbers go to other elements: one call draws for all groups */
    if (!all) return n;
    SG_ADD("nvfp4 without transform", te_recipe_nvfp4(), 0.2, 0.2);
    r[n - 1].recipe.nvfp4.stochastic_rounding = r[n - 1].recipe.nvfp4.rht = TE_OFF;
    SG_ADD("nvfp4 4-over-6", te_recipe_nvfp4(), 0.2, 0.2);
    r[n - 1].recipe.nvfp4.stochastic_rounding = TE_OFF;
    r[n - 1].recipe.nvfp4.four_over_six = TE_NVFP4_4OVER6_ALL;
    r[n - 1].recipe.nvfp4.four_over_six_e4m3_256 = TE_NVFP4_E4M3_256_ALL;
    SG_ADD("nvfp4 4-over-6, 256 of weights alone", te_recipe_nvfp4(), 0.2, 0.2);
    r[n - 1].recipe.nvfp4.stochastic_rounding = TE_OFF;
    r[n - 1].recipe.nvfp4.four_over_six = TE_NVFP4_4OVER6_ALL;
    r[n - 1].recipe.nvfp4.four_over_six_e4m3_256 = TE_NVFP4_E4M3_256_WEIGHTS;
    SG_ADD("current by powers of two", te_recipe_current_scaling(), 0.05, 0.085);
    r[n - 1].recipe.current.power_of_two_scales = true;
    r[n - 1].recipe.amax_epsilon = 1e-6f;
    SG_ADD("block, f32 scales", te_recipe_block_scaling(), 0.05, 0.05);
    r[n - 1].recipe.block.fp32_scales = true;
    SG_ADD("delayed, most recent", te_recipe_delayed_scaling(), 0.05, 0.085);
    r[n - 1].recipe.delayed.amax_algo = TE_AMAX_MOST_RECENT;
    SG_ADD("current, backward from dequantized", te_recipe_current_scaling(), 0.05, 0.05);
    r[n - 1].recipe.backward_override = TE_BACKWARD_DEQUANTIZED;
    return n;
#undef SG_ADD
}
/* Multiples of no block, of 16, of 32 and of 128; the magnitudes go with the groups. */
static const int64_t sg_splits[][SG_GROUPS] = {{37, 0, 5, 90, 33}, {48, 16, 0, 80, 32}, {0, 32, 64, 96, 0}, {128, 0, 256, 128, 0}, {0, 0, 0, 0, 1}};
static const float sg_size[SG_GROUPS] = {1e4f, 3.0f, 1e-2f, 1.0f, 1e-2f};
static int64_t sg_rows(const int64_t *splits) {
    int64_t sum = 0;
    for (int g = 0; g < SG_GROUPS; g++) sum += splits[g];
    return sum;
}
static te_tensor *sg_parameter(te_module *m, const char *kind, int i) {
    char name[32];
    snprintf(name, sizeof name, "%s%d", kind, i);
    return te_module_parameter(m, name);
}
static te_module *sg_module(te_ctx *te, te_grouped_linear_desc d) {
    d.num_gemms = SG_GROUPS, d.in_features = SG_IN, d.out_features = SG_OUT;
    te_rng_set(te, 5, 0);
    te_module *m = te_grouped_linear_create(te, &d);
    for (int i = 0; m && !d.gemm.no_bias && i < SG_GROUPS; i++)
        te_tensor_copy(sg_parameter(m, "bias", i), test_tensor(te, te_tensor_dtype(sg_parameter(m, "bias", i)), SHAPE(SG_OUT), test_normal(SG_OUT, 40 + (uint64_t)i)));
    return m;
}
/* Rows of each group times its size; those behind the last are infinite, and nobody's. */
static te_tensor *sg_values(te_ctx *te, te_dtype dtype, const int64_t *splits, int64_t cols, uint64_t seed, float times) {
    int64_t rows = sg_rows(splits) + SG_SPARE, at = 0;
    float *v = test_normal(rows * cols + 1, seed);
    for (int g = 0; g < SG_GROUPS; g++)
        for (int64_t end = at + splits[g]; at < end; at++)
            for (int64_t k = 0; k < cols; k++) v[at * cols + k] *= sg_size[g] * times;
    for (int64_t k = at * cols; k < rows * cols; k++) v[k] = INFINITY;
    return test_tensor(te, dtype, SHAPE(rows, cols), v);
}

typedef struct sg_result {
    float *y, *dx, *dw[SG_GROUPS], *db[SG_GROUPS];
} sg_result;
static te_tensor *sg_forward(te_module *m, const te_recipe *recipe, te_tensor *x, const int64_t *splits, bool device, te_dtype index) {
    te_ctx *te = te_module_ctx(m);
    te_forward_args args = {.input = x};
    int32_t narrow[SG_GROUPS];
    for (int g = 0; g < SG_GROUPS; g++) narrow[g] = (int32_t)splits[g];
    if (device) args.m_splits_tensor = te_tensor_from_host(te, index, SHAPE(SG_GROUPS), index == TE_I32 ? (const void *)narrow : (const void *)splits);
    else args.m_splits = splits;
    if (recipe) te_autocast_begin(te, &(te_autocast_desc){.recipe = recipe});
    te_forward_with(m, &args);
    if (recipe) te_autocast_end(te);
    return args.outputs.out;
}
static sg_result sg_step(te_module *m, const te_recipe *recipe, te_dtype dtype, const int64_t *splits, bool device, int step) {
    te_ctx *te = te_module_ctx(m);
    sg_result z;
    te_tensor *x = te_tensor_set_requires_grad(sg_values(te, dtype, splits, SG_IN, 21 + (uint64_t)step, 1.0f + (float)step), true);
    te_tensor *y = sg_forward(m, recipe, x, splits, device, step % 2 ? TE_I32 : TE_I64);
    memset(&z, 0, sizeof z);
    if (!y) return z;
    te_backward_from(y, sg_values(te, dtype, splits, SG_OUT, 51 + (uint64_t)step, 1.0f));
    z.y = test_read(y);
    z.dx = test_read(te_tensor_grad(x));
    for (int g = 0; g < SG_GROUPS; g++) {
        z.dw[g] = test_read(te_tensor_grad(sg_parameter(m, "weight", g)));
        if (sg_parameter(m, "bias", g)) z.db[g] = test_read(te_tensor_grad(sg_parameter(m, "bias", g)));
    }
    te_module_zero_grad(m);
    return z;
}
/* On the CPU every bit; a GPU's kernels for groups add in another order than those for one product, in f32, and e4m3's and e5m2's sums there keep fewer bits than f32 has. */
static void sg_same(te_ctx *te, const char *name, const float *got, const float *want, int64_t n) {
    REQUIRE(got && want);
    if (te_ctx_is_cuda(te)) CHECK_ERROR_BELOW(name, got, want, n, 4e-3);
    else CHECK_BYTES(name, got, want, (size_t)n * sizeof(float));
}
static void sg_check(te_ctx *te, const sg_result *got, const sg_result *want, const int64_t *splits) {
    int64_t at = 0;
    REQUIRE(got->y && want->y);
    for (int g = 0; g < SG_GROUPS; at += splits[g++]) { /* one by one: a small group's error is nothing beside a large one */
        char name[32];
        snprintf(name, sizeof name, "y of group %d", g);
        sg_same(te, name, got->y + at * SG_OUT, want->y + at * SG_OUT, splits[g] * SG_OUT);
        name[0] = 'd';
        sg_same(te, name, got->dx + at * SG_IN, want->dx + at * SG_IN, splits[g] * SG_IN);
        snprintf(name, sizeof name, "dw%d", g);
        sg_same(te, name, got->dw[g], want->dw[g], SG_OUT * SG_IN);
        snprintf(name, sizeof name, "db%d", g);
        if (want->db[g]) sg_same(te, name, got->db[g], want->db[g], SG_OUT);
    }
    for (int64_t k = at * SG_OUT; k < (at + SG_SPARE) * SG_OUT; k++) CHECK(got->y[k] == 0);
    for (int64_t k = at * SG_IN; k < (at + SG_SPARE) * SG_IN; k++) CHECK(got->dx[k] == 0);
}

TE_TEST_DEVICES(groups_of_either_sizes_have_the_same_bytes) {
    sg_recipe r[12];
    int n = sg_recipes(r, true);
    for (int i = 0; i < n; i++)
        for (int f32 = 0; f32 < 2; f32++) {
            te_dtype dtype = f32 ? TE_F32 : TE_BF16;
            if ((2 * i + f32) % test_every_odd(4)) continue;
            te_scope_begin(te);
            te_module *host = sg_module(te, (te_grouped_linear_desc){.gemm.params_dtype = dtype}), *device = sg_module(te, (te_grouped_linear_desc){.gemm.params_dtype = dtype});
            for (int step = 0; step < COUNT(sg_splits); step++) {
                const int64_t *splits = sg_splits[step];
                te_scope_begin(te);
                test_case("%s, %s, step %d", r[i].name, te_dtype_name(dtype), step);
                sg_result want = sg_step(host, &r[i].recipe, dtype, splits, false, step), got = sg_step(device, &r[i].recipe, dtype, splits, true, step);
                REQUIRE_OK(te);
                sg_check(te, &got, &want, splits);
                te_scope_end(te);
            }
            te_module_destroy(host);
            te_module_destroy(device);
            te_scope_end(te);
        }
}

/* Steps in turns by one way and the other, on one module: histories are those of the groups, whoever asks. */
TE_TEST_DEVICES(groups_of_sizes_in_turns) {
    te_recipe recipe = te_recipe_delayed_scaling();
    te_module *host = sg_module(te, (te_grouped_linear_desc){0}), *turns = sg_module(te, (te_grouped_linear_desc){0});
    for (int step = 0; step < 6; step++) {
        const int64_t *splits = sg_splits[step % 3];
        test_case("step %d", step);
        sg_result want = sg_step(host, &recipe, TE_BF16, splits, false, step), got = sg_step(turns, &recipe, TE_BF16, splits, step % 3 != 1, step);
        REQUIRE_OK(te);
        sg_check(te, &got, &want, splits);
    }
    for (int i = 0; i < 4; i++) {
        static const char *const name[] = {"fp8_scale_fwd", "fp8_amax_history_fwd", "fp8_scale_bwd", "fp8_amax_history_bwd"};
        te_tensor *got = te_module_parameter(turns, name[i]), *want = te_module_parameter(host, name[i]);
        REQUIRE(got && want);
        CHECK_BYTES(name[i], test_read(got), test_read(want), (size_t)te_tensor_numel(want) * sizeof(float));
    }
    te_module_destroy(host);
    te_module_destroy(turns);
}

/* Each group as a Linear in high precision has it, but for the rounding to codes: the small ones, too. */
TE_TEST_DEVICES(groups_keep_small_numbers_beside_large_ones) {
    sg_recipe r[12];
    int n = sg_recipes(r, false);
    for (int i = 0; i < n; i++) {
        const int64_t *splits = sg_splits[0];
        int64_t at = 0;
        te_scope_begin(te);
        te_module *plain = sg_module(te, (te_grouped_linear_desc){.gemm.no_bias = true}), *m = sg_module(te, (te_grouped_linear_desc){.gemm.no_bias = true});
        test_case("%s", r[i].name);
        if (i == 0) sg_step(m, &r[i].recipe, TE_BF16, splits, true, 1); /* delayed: the scales of a step come from the one before */
        if (i == 0) sg_step(m, &r[i].recipe, TE_BF16, splits, true, 1);
        sg_result want = sg_step(plain, NULL, TE_BF16, splits, true, 1), got = sg_step(m, &r[i].recipe, TE_BF16, splits, true, 1);
        REQUIRE_OK(te);
        for (int g = 0; g < SG_GROUPS; at += splits[g++]) {
            CHECK_ERROR_BELOW("y", got.y + at * SG_OUT, want.y + at * SG_OUT, splits[g] * SG_OUT, r[i].error);
            CHECK_ERROR_BELOW("dx", got.dx + at * SG_IN, want.dx + at * SG_IN, splits[g] * SG_IN, r[i].grad_error);
            CHECK_ERROR_BELOW("dw", got.dw[g], want.dw[g], SG_OUT * SG_IN, r[i].grad_error);
        }
        te_module_destroy(plain);
        te_module_destroy(m);
        te_scope_end(te);
    }
}

/* Under a checkpoint, by the second run of which nothing changes; with the weights' gradients deferred; with the input quantized again in the backward pass. */
TE_TEST_DEVICES(groups_under_options_have_the_same_bytes) {
    sg_recipe r[12];
    int n = sg_recipes(r, false);
    for (int i = 0; i < n; i++)
        for (int option = 0; option < 3; option++) {
            const int64_t *splits = sg_splits[option];
            if ((i + option) % test_every_odd(1)) continue;
            if (option == 2 && r[i].recipe.kind == TE_RECIPE_DELAYED) continue; /* refused: quantized again, the input would be another */
            te_scope_begin(te);
            test_case("%s, option %d", r[i].name, option);
            te_module *host = sg_module(te, (te_grouped_linear_desc){0}), *m = sg_module(te, (te_grouped_linear_desc){.gemm.delay_wgrad_compute = option == 1, .save_original_input = option == 2});
            if (option == 0) te_module_set_checkpoint(m, true);
            for (int step = 0; step < 2; step++) {
                sg_result want = sg_step(host, &r[i].recipe, TE_BF16, splits, false, step), got;
                te_tensor *x = te_tensor_set_requires_grad(sg_values(te, TE_BF16, splits, SG_IN, 21 + (uint64_t)step, 1.0f + (float)step), true);
                te_tensor *y = sg_forward(m, &r[i].recipe, x, splits, true, TE_I64);
                REQUIRE(y != NULL);
                te_backward_from(y, sg_values(te, TE_BF16, splits, SG_OUT, 51 + (uint64_t)step, 1.0f));
                if (option == 1) te_backward_dw(m);
                REQUIRE_OK(te);
                got.y = test_read(y);
                got.dx = test_read(te_tensor_grad(x));
                for (int g = 0; g < SG_GROUPS; g++) {
                    got.dw[g] = test_read(te_tensor_grad(sg_parameter(m, "weight", g)));
                    got.db[g] = test_read(te_tensor_grad(sg_parameter(m, "bias", g)));
                }
                te_module_zero_grad(m);
                sg_check(te, &got, &want, splits);
            }
            te_module_destroy(host);
            te_module_destroy(m);
            te_scope_end(te);
        }
}

/* A graph's launches read the sizes that stand in the tensor then. */
TE_TEST_DEVICES(groups_in_a_graph_have_the_same_bytes) {
    static const int64_t splits[4][SG_GROUPS] = {{37, 0, 5, 90, 33}, {0, 60, 64, 1, 40}, {165, 0, 0, 0, 0}, {16, 16, 80, 33, 20}}; /* 165 rows each */
    sg_recipe r[12];
    int n = sg_recipes(r, false);
    const int steps = test_samples() ? 3 : 4;
    for (int i = 0; i < n; i++) {
        const int64_t rows = sg_rows(splits[0]) + SG_SPARE;
        sg_result result[2][4];
        te_scope_begin(te);
        for (int run = 0; run < 2; run++) {
            test_case("%s", r[i].name);
            te_module *m = sg_module(te, (te_grouped_linear_desc){0});
            te_tensor *x = te_tensor_set_requires_grad(te_tensor_zeros(te, TE_BF16, SHAPE(rows, SG_IN)), true), *dy = te_tensor_zeros(te, TE_BF16, SHAPE(rows, SG_OUT));
            te_tensor *sizes = te_tensor_zeros(te, TE_I64, SHAPE(SG_GROUPS)), *y = NULL;
            te_graph *graph = NULL;
            for (int step = 0; step < steps; step++) {
                if (step < 2 || !run) te_module_zero_grad(m);
                if (step < 2 || !run) te_tensor_zero_grad(x);
                if (step != 1 || !run) { /* a capture computes nothing: what it reads comes before its launch */
                    te_tensor_copy_from_host(sizes, splits[step]);
                    te_tensor_copy(x, sg_values(te, TE_BF16, splits[step], SG_IN, 70 + (uint64_t)step, 1));
                    te_tensor_copy(dy, sg_values(te, TE_BF16, splits[step], SG_OUT, 80 + (uint64_t)step, 1));
                }
                if (step < 2 || !run) { /* the first step makes what a capture must find */
                    te_forward_args args = {.input = x, .m_splits_tensor = sizes};
                    if (run && step) CHECK_EQ_INT(te_graph_begin(te), TE_OK);
                    te_autocast_begin(te, &(te_autocast_desc){.recipe = &r[i].recipe});
                    te_forward_with(m, &args);
                    te_autocast_end(te);
                    y = args.outputs.out;
                    if (y) te_backward_from(y, dy);
                    if (run && step) graph = te_graph_end(te);
                    REQUIRE_OK(te);
                    REQUIRE(y != NULL);
                }
                if (run && step == 1) {
                    te_tensor_copy_from_host(sizes, splits[step]);
                    te_tensor_copy(x, sg_values(te, TE_BF16, splits[step], SG_IN, 70 + (uint64_t)step, 1));
                    te_tensor_copy(dy, sg_values(te, TE_BF16, splits[step], SG_OUT, 80 + (uint64_t)step, 1));
                }
                if (graph) CHECK_EQ_INT(te_graph_launch(graph), TE_OK);
                REQUIRE_OK(te);
                result[run][step].y = test_read(y);
                result[run][step].dx = test_read(te_tensor_grad(x));
                for (int g = 0; g < SG_GROUPS; g++) {
                    result[run][step].dw[g] = test_read(te_tensor_grad(sg_parameter(m, "weight", g)));
                    result[run][step].db[g] = test_read(te_tensor_grad(sg_parameter(m, "bias", g)));
                }
            }
            te_graph_destroy(graph);
            te_module_destroy(m);
        }
        for (int step = 0; step < steps; step++) {
            const sg_result *got = &result[1][step], *want = &result[0][step];
            test_case("%s, step %d", r[i].name, step);
            CHECK_BYTES("y", got->y, want->y, (size_t)(rows * SG_OUT) * sizeof(float)); /* the same kernels, so on a GPU, too */
            CHECK_BYTES("dx", got->dx, want->dx, (size_t)(rows * SG_IN) * sizeof(float));
            for (int g = 0; g < SG_GROUPS; g++) {
                CHECK_BYTES("dw", got->dw[g], want->dw[g], SG_OUT * SG_IN * sizeof(float));
                CHECK_BYTES("db", got->db[g], want->db[g], SG_OUT * sizeof(float));
            }
        }
        te_scope_end(te);
    }
}

/* A custom recipe's quantizers: of two kinds, one for each direction of the product; delayed with the module's scales; NVFP4 with an amax for each row, which is refused. */
static te_result sg_factory(void *user, const te_quantizer_role *role, te_quantizer_desc *desc) {
    static const te_quantizer_desc current = {.kind = TE_QUANT_CURRENT, .dtype = TE_F8E4M3}, mxfp8 = {.kind = TE_QUANT_MXFP8, .dtype = TE_F8E4M3};
    int way = *(const int *)user;
    desc->kind = way == 1 ? TE_QUANT_DELAYED : way == 0 && role->tensor_type != TE_TENSOR_WEIGHT ? TE_QUANT_HYBRID : TE_QUANT_CURRENT;
    desc->dtype = way == 1 ? TE_DTYPE_NONE : TE_F8E4M3;
    if (desc->kind == TE_QUANT_HYBRID) {
        desc->dtype = TE_DTYPE_NONE;
        desc->hybrid.rowwise_quantizer = &current;
        desc->hybrid.columnwise_quantizer = &mxfp8;
    }
    return TE_OK;
}
TE_TEST_DEVICES(groups_of_custom_recipes_have_the_same_bytes) {
    for (int way = 0; way < 2; way++) {
        te_recipe recipe = te_recipe_custom(sg_factory, &way);
        te_scope_begin(te);
        te_module *host = sg_module(te, (te_grouped_linear_desc){0}), *device = sg_module(te, (te_grouped_linear_desc){0});
        for (int step = 0; step < 3; step++) {
            test_case("way %d, step %d", way, step);
            sg_result want = sg_step(host, &recipe, TE_BF16, sg_splits[step], false, step), got = sg_step(device, &recipe, TE_BF16, sg_splits[step], true, step);
            REQUIRE_OK(te);
            sg_check(te, &got, &want, sg_splits[step]);
        }
        te_module_destroy(host);
        te_module_destroy(device);
        te_scope_end(te);
    }
    te_recipe rows = te_recipe_nvfp4();
    rows.nvfp4.row_scaled_activation = true;
    te_module *m = sg_module(te, (te_grouped_linear_desc){0});
    CHECK(!sg_forward(m, &rows, sg_values(te, TE_BF16, sg_splits[0], SG_IN, 1, 1), sg_splits[0], true, TE_I32));
    CHECK_ERROR(te, TE_ERR_UNSUPPORTED, "NVFP4 with an amax for each row, and m_splits_tensor");
    te_module_destroy(m);
}

/* Inspection decodes each group by its own scales: the error is that of the codes, with whatever copies a call makes. */
static bool sg_visit(void *user, const te_quantizer_role *role, const te_quant_stats *stats) {
    if (role->tensor_type == TE_TENSOR_WEIGHT) return true;
    CHECK_MSG(stats->snr_db > 17.0f, "%s: %g dB", role->tensor_type == TE_TENSOR_INPUT ? "input" : "gradient", (double)stats->snr_db); /* e2m1: some 20 dB */
    (*(int *)user)++;
    return true;
}
TE_TEST_DEVICES(groups_are_inspected_by_their_scales) {
    sg_recipe r[12];
    int n = sg_recipes(r, false);
    for (int i = 1; i < n; i++) /* delayed: the first step's scales are 1 */
        for (int input = 0; input < 2; input++) { /* without its gradient the gradient of y has the column-wise copy alone */
            const int64_t *splits = sg_splits[0], rows = sg_rows(splits);
            int seen = 0;
            te_scope_begin(te);
            test_case("%s, %s", r[i].name, input ? "both copies" : "one copy");
            te_module *m = sg_module(te, (te_grouped_linear_desc){.gemm.no_bias = true});
            te_tensor *x = te_tensor_contiguous(te_tensor_narrow(sg_values(te, TE_BF16, splits, SG_IN, 1, 1), 0, 0, rows)), *dy = te_tensor_contiguous(te_tensor_narrow(sg_values(te, TE_BF16, splits, SG_OUT, 2, 1), 0, 0, rows));
            te_quant_inspect(te, true);
            te_tensor *y = sg_forward(m, &r[i].recipe, te_tensor_set_requires_grad(x, input != 0), splits, true, TE_I64);
            REQUIRE(y != NULL);
            te_backward_from(y, dy);
            CHECK_EQ_INT(te_quant_stats_visit(te, sg_visit, &seen), TE_OK);
            te_quant_inspect(te, false);
            CHECK_EQ_INT(seen, 2);
            REQUIRE_OK(te);
            te_module_destroy(m);
            te_scope_end(te);
        }
}

/* One group, and inputs without any row. */
TE_TEST_DEVICES(groups_of_no_rows) {
    sg_recipe r[12];
    int n = sg_recipes(r, true);
    for (int i = 0; i < n; i++)
        for (int64_t rows = 0; rows < 18; rows += 17)
            for (int gemms = 1; gemms < 3; gemms++) {
                te_tensor *y[2], *dx[2], *dw[2];
                te_scope_begin(te);
                test_case("%s, %lld rows, %d groups", r[i].name, (long long)rows, gemms);
                for (int device = 0; device < 2; device++) {
                    const int64_t splits[2] = {rows, 0};
                    te_rng_set(te, 5, 0);
                    te_module *m = te_grouped_linear_create(te, &(te_grouped_linear_desc){.num_gemms = gemms, .in_features = 40, .out_features = 24, .gemm.no_bias = true});
                    te_tensor *x = te_tensor_set_requires_grad(test_tensor(te, TE_BF16, SHAPE(rows, 40), test_normal(rows * 40 + 1, 1)), true);
                    te_forward_args args = {.input = x, .m_splits = device ? NULL : splits, .m_splits_tensor = device ? te_tensor_from_host(te, TE_I64, SHAPE(gemms), splits) : NULL};
                    te_autocast_begin(te, &(te_autocast_desc){.recipe = &r[i].recipe});
                    te_forward_with(m, &args);
                    te_autocast_end(te);
                    REQUIRE_OK(te);
                    y[device] = args.outputs.out;
                    te_backward_from(y[device], test_tensor(te, TE_BF16, SHAPE(rows, 24), test_normal(rows * 24 + 1, 2)));
                    REQUIRE_OK(te);
                    dx[device] = te_tensor_grad(x);
                    dw[device] = te_tensor_retain(te_tensor_grad(te_module_parameter(m, "weight0")));
                    te_module_destroy(m);
                }
                sg_same(te, "y", test_read(y[1]), test_read(y[0]), rows * 24);
                sg_same(te, "dx", test_read(dx[1]), test_read(dx[0]), rows * 40);
                sg_same(te, "dw", test_read(dw[1]), test_read(dw[0]), 24 * 40);
                for (int device = 0; device < 2; device++) te_tensor_release(dw[device]);
                te_scope_end(te);
            }
}

/* Ranks that reduce their amaxes, with other sizes on each, empty groups of one rank alone among them: each group has the amax of its rows on all ranks. */
static void sg_ranks(rank_state *s) {
    const te_recipe *recipe = (const te_recipe *)s->arg;
    te_autocast_desc cast = {.recipe = recipe, .amax_group = s->group};
    float *y[2] = {NULL, NULL}, *dx[2] = {NULL, NULL}, *dw[2] = {NULL, NULL};
    te_module *m[2];
    for (int device = 0; device < 2; device++) m[device] = sg_module(s->te, (te_grouped_linear_desc){0});
    for (int step = 0; step < 3; step++) {
        const int64_t *splits = sg_splits[(s->rank + step) % 3];
        const size_t rows = (size_t)(sg_rows(splits) + SG_SPARE);
        te_scope_begin(s->te);
        for (int device = 0; device < 2; device++) {
            te_tensor *x = te_tensor_set_requires_grad(sg_values(s->te, TE_BF16, splits, SG_IN, 21 + (uint64_t)(7 * s->rank + step), 1.0f + (float)s->rank), true);
            te_module_zero_grad(m[device]);
            te_autocast_begin(s->te, &cast);
            te_tensor *out = sg_forward(m[device], NULL, x, splits, device != 0, TE_I64);
            te_autocast_end(s->te);
            te_backward_from(out, sg_values(s->te, TE_BF16, splits, SG_OUT, 51 + (uint64_t)(7 * s->rank + step), 1.0f));
            EXPECT(s, te_ok(s->te));
            if (!te_ok(s->te)) break;
            y[device] = test_read(out), dx[device] = test_read(te_tensor_grad(x)), dw[device] = test_read(te_tensor_grad(sg_parameter(m[device], "weight", 2)));
        }
        if (te_ok(s->te)) {
            EXPECT(s, memcmp(y[0], y[1], rows * SG_OUT * sizeof(float)) == 0);
            EXPECT(s, memcmp(dx[0], dx[1], rows * SG_IN * sizeof(float)) == 0);
            EXPECT(s, memcmp(dw[0], dw[1], SG_OUT * SG_IN * sizeof(float)) == 0);
        }
        te_scope_end(s->te);
    }
    for (int device = 0; device < 2; device++) te_module_destroy(m[device]);
}
TE_TEST(groups_of_ranks_have_the_same_bytes) {
    sg_recipe r[12];
    int n = sg_recipes(r, true);
    for (int i = 0; i < n; i += test_every_sanitized(3)) {
        test_case("%s", r[i].name);
        run_ranks(2, sg_ranks, &r[i].recipe);
    }
}
