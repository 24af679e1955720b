/* test_gemm_quantize.c: products that quantize their operand A (quantize_a) have the bits of a quantizer's codes multiplied by another call: every recipe,
 * one row to sixteen, every length of k around a group, numbers that are not finite; and the modules that use it, with the bits of those that do not. */
#define TE_STATIC
#define TE_IMPLEMENTATION
#include "../te_test.h"

typedef struct recipe_case {
    const char *name;
    te_quant_kind kind;
    te_dtype dtype;
    te_scaling scaling, of_weight;
    bool power_of_two, swizzled, max_256;
    float epsilon;
} recipe_case;
static const recipe_case recipe_cases[] = {
    {"current", TE_QUANT_CURRENT, TE_F8E4M3, TE_SCALING_TENSOR, TE_SCALING_TENSOR, false, false, false, 0},
    {"current, powers of two", TE_QUANT_CURRENT, TE_F8E5M2, TE_SCALING_TENSOR, TE_SCALING_TENSOR, true, false, false, 4},
    {"delayed", TE_QUANT_DELAYED, TE_F8E4M3, TE_SCALING_TENSOR, TE_SCALING_TENSOR, false, false, false, 0},
    {"blocks", TE_QUANT_BLOCK, TE_F8E4M3, TE_SCALING_BLOCK_1D, TE_SCALING_BLOCK_2D, true, false, false, 0},
    {"blocks, f32 scales", TE_QUANT_BLOCK, TE_F8E4M3, TE_SCALING_BLOCK_1D, TE_SCALING_BLOCK_1D, false, false, false, 1},
    {"MXFP8", TE_QUANT_MXFP8, TE_F8E4M3, TE_SCALING_MXFP8, TE_SCALING_MXFP8, false, false, false, 0},
    {"MXFP8, swizzled", TE_QUANT_MXFP8, TE_F8E5M2, TE_SCALING_MXFP8, TE_SCALING_MXFP8, false, true, false, 0},
    {"NVFP4", TE_QUANT_NVFP4, TE_F4E2M1, TE_SCALING_NVFP4, TE_SCALING_NVFP4, false, false, false, 0},
    {"NVFP4, 256, swizzled", TE_QUANT_NVFP4, TE_F4E2M1, TE_SCALING_NVFP4, TE_SCALING_NVFP4, false, true, true, 0}};

static te_tensor *one_number(te_ctx *te, float f) { return test_tensor(te, TE_F32, SHAPE(1), &f); }

/* The row-wise codes of x by a quantizer of the case. `two`: 128 x 128 blocks. */
static te_tensor *codes_of(te_ctx *te, const recipe_case *c, te_tensor *x, te_dtype dtype, bool two, te_tensor *scale, te_tensor *amax, te_tensor **scales, te_tensor **amaxes) {
    te_quantizer_desc desc = {0};
    te_tensor *codes = NULL;
    desc.kind = c->kind;
    desc.dtype = dtype;
    desc.usage = TE_ROWWISE;
    desc.amax_epsilon = c->kind == TE_QUANT_CURRENT || c->kind == TE_QUANT_BLOCK ? c->epsilon : 0;
    desc.optimize_for_gemm = c->swizzled;
    if (c->kind == TE_QUANT_CURRENT) desc.current.power_of_two_scales = c->power_of_two;
    if (c->kind == TE_QUANT_DELAYED) desc.delayed.scale = scale, desc.delayed.amax = amax;
    if (c->kind == TE_QUANT_BLOCK) desc.block.block_scaling_dim = two ? 2 : 1, desc.block.fp32_scales = !c->power_of_two;
    if (c->kind == TE_QUANT_NVFP4) desc.nvfp4.e4m3_max_256 = c->max_256;
    te_quantizer *q = te_quantizer_create(te, &desc);
    te_tensor *y = q ? te_quantize(q, x) : NULL;
    if (y) te_quantized_view(y, TE_ROWWISE, &codes, scales), *amaxes = te_quantized_amax(y, TE_ROWWISE);
    te_quantizer_destroy(q);
    return codes;
}

static void check_quantized(te_ctx *te, const recipe_case *c, te_dtype in, te_dtype out, int64_t m, int64_t n, int64_t k, bool odd_numbers, bool in_shared) {
    te_op_gemm_args two = {0}, one;
    te_explanation e;
    float *values = odd_numbers ? test_specials(m * k, (uint64_t)(m + k)) : test_normal(m * k, (uint64_t)(m + k));
    te_tensor *x = test_tensor(te, in, SHAPE(m, k), values), *w = test_tensor(te, TE_BF16, SHAPE(n, k), test_normal(n * k, 7));
    te_tensor *scale = one_number(te, 37.5f), *amax[2] = {one_number(te, 0.25f), one_number(te, 0.25f)};
    test_case("%s %s m=%lld n=%lld k=%lld%s", c->name, te_dtype_name(in), (long long)m, (long long)n, (long long)k, odd_numbers ? " odd numbers" : "");
    two.m = m, two.n = n, two.k = k;
    two.b_transposed = true;
    two.scaling_a = c->scaling, two.scaling_b = c->of_weight;
    two.swizzled_scales = c->swizzled;
    two.e4m3_max_256_a = two.e4m3_max_256_b = c->max_256;
    two.bias = m % 2 ? test_tensor(te, TE_BF16, SHAPE(n), test_normal(n, 9)) : NULL;
    two.split_accumulator = m % 3 == 0;
    two.b = codes_of(te, c, w, c->kind == TE_QUANT_NVFP4 ? TE_F4E2M1 : TE_F8E4M3, c->of_weight == TE_SCALING_BLOCK_2D, NULL, NULL, (te_tensor **)&two.scale_b, (te_tensor **)&two.amax_b);
    one = two;
    two.a = codes_of(te, c, x, c->dtype, false, scale, amax[0], (te_tensor **)&two.scale_a, (te_tensor **)&two.amax_a);
    REQUIRE_OK(te);
    one.a = x;
    one.quantize_a = c->dtype;
    one.quantize_epsilon = c->epsilon;
    one.quantize_power_of_two = c->power_of_two;
    if (c->kind == TE_QUANT_DELAYED) one.quantize_scale = scale, one.quantize_amax = amax[1];
    two.d = test_guarded(te, out, SHAPE(m, n));
    one.d = test_guarded(te, out, SHAPE(m, n));
    te_op_gemm(te, &two);
    if (te_explain(te, TE_OP_GEMM, &one, "sm_90", &e) == TE_OK && in_shared) CHECK_STR(e.why, "GEMV that quantizes A");
    te_op_gemm(te, &one);
    REQUIRE_OK(te);
    CHECK_BYTES("D", test_read_bytes(one.d), test_read_bytes(two.d), te_tensor_bytes(two.d));
    CHECK_BYTES("amax", test_read_bytes(amax[1]), test_read_bytes(amax[0]), 4);
}

static void quantizes(te_ctx *te, int which) {
    static const int64_t lengths[] = {1, 15, 16, 31, 33, 127, 128, 129, 255, 264, 520, 1032, 2300, 4096}, widths[] = {16, 33, 150, 1000};
    static const te_dtype formats[] = {TE_BF16, TE_F16, TE_BF16, TE_F32};
    int turn = 0;
    for (int c = which; c < COUNT(recipe_cases); c += 3)
        for (int64_t m = 1; m <= 16; m++)
            for (int i = 0; i < COUNT(lengths); i += 1 + (int)(m % 3), turn++) {
                int64_t n = widths[turn % COUNT(widths)], k = lengths[(i + turn) % COUNT(lengths)];
                if (turn % (te_ctx_is_cuda(te) ? 1 : test_every_odd(4) + 6)) continue;
                te_scope_begin(te);
                check_quantized(te, &recipe_cases[c], formats[turn % 4], turn % 3 ? TE_BF16 : TE_F32, m, n, k, turn % 5 == 2, n >= m && m <= 8 && k <= 1032);
                te_scope_end(te);
            }
}

TE_TEST_DEVICES(gemm_quantizes_0) { quantizes(te, 0); }
TE_TEST_DEVICES(gemm_quantizes_1) { quantizes(te, 1); }
TE_TEST_DEVICES(gemm_quantizes_2) { quantizes(te, 2); }

/* More lines than are resident at once, and so many that a product of bf16 has another kernel. */
TE_TEST_DEVICES(gemm_quantizes_for_many) {
    if (!te_ctx_is_cuda(te)) SKIP("for the GPU's schedule; the CPU has none");
    for (int c = 0; c < COUNT(recipe_cases); c++)
        for (int64_t m = 1; m <= 9; m += 4) {
            te_scope_begin(te);
            check_quantized(te, &recipe_cases[c], TE_BF16, TE_BF16, m, m == 1 ? 30011 : 5000, 1096, false, m <= 8 && (m > 1 || recipe_cases[c].scaling != TE_SCALING_TENSOR)); /* gemm_hopper has 30011 lines of one scale */
            te_scope_end(te);
        }
}

/* Products whose codes lie in shared memory have the bits of those that read them into registers. */
TE_TEST_DEVICES(gemm_few_shared) {
    int64_t most = te__gemv_most_shared;
    if (!te_ctx_is_cuda(te)) SKIP("two ways of a GPU's kernel");
    for (int c = 0; c < COUNT(recipe_cases); c++)
        for (int64_t m = 1; m <= 16; m += 3)
            for (int long_a = 0; long_a < 2; long_a++) {
                const recipe_case *r = &recipe_cases[c];
                te_op_gemm_args g = {0};
                /* 22013: blocks go over several tiles, the last of which is not whole, and MXFP8 of more than four rows is shared; 4360: each warp has several turns of k */
                int64_t n = m % 6 == 1 || m == 16 ? 22013 : 700, k = n == 700 || m == 13 ? 2300 : 4360;
                void *bytes[2];
                te_explanation e;
                if (r->scaling != r->of_weight && long_a) continue;
                te_scope_begin(te);
                test_case("%s m=%lld long_a=%d", r->name, (long long)m, long_a);
                g.m = long_a ? n : m, g.n = long_a ? m : n, g.k = k;
                g.b_transposed = true;
                g.scaling_a = r->scaling, g.scaling_b = r->of_weight;
                g.swizzled_scales = r->swizzled;
                g.a = codes_of(te, r, te_tensor_normal(te, TE_BF16, SHAPE(g.m, k), 0, 1), r->dtype, false, NULL, NULL, (te_tensor **)&g.scale_a, (te_tensor **)&g.amax_a);
                g.b = codes_of(te, r, te_tensor_normal(te, TE_BF16, SHAPE(g.n, k), 0, 1), r->kind == TE_QUANT_NVFP4 ? TE_F4E2M1 : TE_F8E4M3, r->of_weight == TE_SCALING_BLOCK_2D, NULL, NULL,
                               (te_tensor **)&g.scale_b, (te_tensor **)&g.amax_b);
                for (int i = 0; i < 2; i++) {
                    g.d = test_guarded(te, TE_F32, SHAPE(g.m, g.n));
                    te__gemv_most_shared = i ? 0 : most;
                    te_explain(te, TE_OP_GEMM, &g, NULL, &e);
                    if (strstr(e.kernels, "gemv_k")) CHECK(!i || !strstr(e.kernels, "SHARED=1"));
                    te_op_gemm(te, &g);
                    te__gemv_most_shared = most;
                    REQUIRE_OK(te);
                    bytes[i] = test_read_bytes(g.d);
                }
                if (strstr(e.kernels, "gemv_k")) CHECK_BYTES("D", bytes[0], bytes[1], te_tensor_bytes(g.d));
                te_scope_end(te);
            }
}

TE_TEST_DEVICES(gemm_quantize_complaints) {
    te_op_gemm_args good = {0}, g;
    te_tensor *one = one_number(te, 1);
    good.a = te_tensor_zeros(te, TE_BF16, SHAPE(4, 32)), good.b = te_tensor_zeros(te, TE_F8E4M3, SHAPE(5, 32)), good.d = te_tensor_zeros(te, TE_BF16, SHAPE(4, 5));
    good.m = 4, good.n = 5, good.k = 32;
    good.b_transposed = true;
    good.quantize_a = TE_F8E4M3;
    te_op_gemm(te, &good);
    CHECK_OK(te);
    g = good, g.quantize_a = TE_BF16, te_op_gemm(te, &g);
    CHECK_ERROR(te, TE_ERR_DTYPE, "quantize_a is bf16");
    g = good, g.a = te_tensor_zeros(te, TE_F8E4M3, SHAPE(4, 32)), te_op_gemm(te, &g);
    CHECK_ERROR(te, TE_ERR_DTYPE, "A is e4m3");
    g = good, g.m = 3, te_op_gemm(te, &g);
    CHECK_ERROR(te, TE_ERR_SHAPE, "contiguous [3, 32]");
    g = good, g.m = 17, g.a = te_tensor_zeros(te, TE_BF16, SHAPE(17, 32)), g.d = te_tensor_zeros(te, TE_BF16, SHAPE(17, 5)), te_op_gemm(te, &g);
    CHECK_ERROR(te, TE_ERR_SHAPE, "at most 16 rows");
    g = good, g.scale_a = one, te_op_gemm(te, &g);
    CHECK_ERROR(te, TE_ERR_INVALID, "with scale_a");
    g = good, g.quantize_a = TE_DTYPE_NONE, g.quantize_scale = one, te_op_gemm(te, &g);
    CHECK_ERROR(te, TE_ERR_INVALID, "belong to quantize_a");
}

/* ---- modules ----------------------------------------------------------------------------------------------------------- */

/* The output of a module for few rows: with gradients the input is quantized by launches of its own. */
static void *rows_of(te_ctx *te, te_module *m, const te_recipe *recipe, te_tensor *x, bool no_grad) {
    te_autocast_desc cast = {0};
    te_tensor *y;
    cast.recipe = recipe;
    if (no_grad) te_no_grad_begin(te);
    te_autocast_begin(te, &cast);
    y = te_forward(m, x);
    te_autocast_end(te);
    if (no_grad) te_no_grad_end(te);
    return y ? test_read_bytes(y) : NULL;
}
TE_TEST_DEVICES(gemm_quantizes_in_modules) {
    const te_recipe recipes[] = {te_recipe_current_scaling(), te_recipe_block_scaling(), te_recipe_mxfp8(), te_recipe_nvfp4(), te_recipe_delayed_scaling()};
    te_linear_desc linear = {0};
    te_layernorm_linear_desc normed = {0};
    te_layernorm_mlp_desc mlp = {0};
    linear.in_features = 264, linear.out_features = 160;
    linear.gemm.params_dtype = TE_BF16;
    normed.in_features = 264, normed.out_features = 160;
    normed.gemm.params_dtype = TE_BF16;
    normed.norm.normalization = TE_RMSNORM;
    mlp.hidden_size = 264, mlp.ffn_hidden_size = 320;
    mlp.gemm.params_dtype = TE_BF16;
    mlp.activation = TE_SWIGLU;
    te_module *modules[] = {te_linear_create(te, &linear), te_layernorm_linear_create(te, &normed), te_layernorm_mlp_create(te, &mlp)};
    REQUIRE_OK(te);
    for (int i = 0; i < COUNT(modules); i++)
        for (int r = 0; r < COUNT(recipes); r++)
            for (int64_t rows = 1; rows <= 7; rows += 3) {
                te_scope_begin(te);
                te_tensor *x = test_tensor(te, TE_BF16, SHAPE(rows, 264), test_normal(rows * 264, (uint64_t)rows));
                test_case("module %d %s rows=%lld", i, te_recipe_name(recipes[r].kind), (long long)rows);
                if (r == 4) rows_of(te, modules[i], &recipes[r], x, false); /* the scales of the delayed recipe change after a call with gradients */
                void *waits = rows_of(te, modules[i], &recipes[r], x, true), *apart = rows_of(te, modules[i], &recipes[r], x, false);
                REQUIRE_OK(te);
                CHECK_BYTES("y", waits, apart, rows * (i == 2 ? 264 : 160) * 2);
                te_scope_end(te);
            }
    for (int i = 0; i < COUNT(modules); i++) te_module_destroy(modules[i]);
}
