/* tests/quant/test_recipes.c: what each recipe makes of a Linear's three products: compared with float64 products of the operands that
 * quantizers of the same options give. */
#include "../te_test.h"

enum { M = 40, N = 72, K = 104, RECIPES = 9 }; /* no multiple of 16, 32 or 128 among them but N's and K's 8 */

static const char *const recipe_text[RECIPES] = {"current", "current e4m3, powers of two", "block", "block 2-D x", "block any scale", "mxfp8", "mxfp8 2-D hybrid", "nvfp4", "nvfp4 plain"};
static te_recipe recipe_of(int i) {
    te_recipe r = i < 2 ? te_recipe_current_scaling() : i < 5 ? te_recipe_block_scaling() : i < 7 ? te_recipe_mxfp8() : te_recipe_nvfp4();
    if (i == 1) r.format = TE_FORMAT_E4M3, r.current.power_of_two_scales = true;
    if (i == 3) r.block.x_block_scaling_dim = 2, r.block.w_block_scaling_dim = 1, r.block.grad_block_scaling_dim = 1;
    if (i == 4) r.block.fp32_scales = true;
    if (i == 6) r.mxfp8.quantization_2d = TE_ON, r.format = TE_FORMAT_HYBRID;
    if (i == 8) r.nvfp4.rht = r.nvfp4.stochastic_rounding = r.nvfp4.quantization_2d = TE_OFF;
    return r;
}
/* The table of recipes, written down again: how each operand (0 input, 1 weight, 2 gradient) is quantized. */
static te_quantizer_desc operand_of(int i, int operand) {
    te_quantizer_desc d = {0};
    d.kind = i < 2 ? TE_QUANT_CURRENT : i < 5 ? TE_QUANT_BLOCK : i < 7 ? TE_QUANT_MXFP8 : TE_QUANT_NVFP4;
    if (i == 0 && operand == 2) d.dtype = TE_F8E5M2;
    if (i == 1) d.current.power_of_two_scales = true;
    if (i >= 2 && i < 5) d.block.block_scaling_dim = i == 3 ? (operand == 0 ? 2 : 1) : operand == 1 ? 2 : 1;
    if (i == 4) d.block.fp32_scales = true;
    if (i == 6) d.quantization_2d = operand == 1 ? TE_ON : TE_DEFAULT, d.dtype = operand == 2 ? TE_F8E5M2 : TE_F8E4M3;
    if (i == 7) d.quantization_2d = operand == 1 ? TE_ON : TE_DEFAULT, d.nvfp4.rht = operand != 1 ? TE_ON : TE_DEFAULT, d.nvfp4.stochastic_rounding = operand == 2 ? TE_ON : TE_DEFAULT;
    return d;
}

/* One copy's value. */
static float *value_of(te_quantizer *q, te_tensor *x, int which) {
    te_tensor *y = te_quantize(q, x);
    if (te_tensor_update_usage(y, which) != TE_OK) return NULL;
    return test_read(te_dequantize(y, TE_F32));
}
/* d [m, n] = a [m, k] b [n, k]^T, or with a [k, m], b [k, n] */
static float *product(const float *a, bool at, const float *b, bool bt, int m, int n, int k) {
    float *d = test_floats(m * n);
    for (int i = 0; i < m; i++)
        for (int j = 0; j < n; j++) {
            double sum = 0;
            for (int l = 0; l < k; l++) sum += (double)a[at ? l * m + i : i * k + l] * (double)b[bt ? j * k + l : l * n + j];
            d[i * n + j] = (float)sum;
        }
    return d;
}

typedef struct trial {
    te_module *m;
    te_tensor *x, *dy, *weight;
    float *y, *dx, *dw;
} trial;
static trial run_trial(te_ctx *te, const te_recipe *r) {
    trial t;
    te_linear_desc d = {0};
    d.in_features = K;
    d.out_features = N;
    d.gemm.no_bias = true;
    d.gemm.params_dtype = TE_F32;
    te_seed(te, 11);
    t.m = te_linear_create(te, &d);
    t.weight = te_module_parameter(t.m, "weight");
    t.x = te_tensor_set_requires_grad(test_tensor(te, TE_F32, SHAPE(2, M / 2, K), test_normal(M * K, 1)), true);
    t.dy = test_tensor(te, TE_F32, SHAPE(2, M / 2, N), test_normal(M * N, 2));
    te_tensor *y = test_forward(t.m, r, t.x);
    te_rng_set(te, 11, 500);
    te_backward_from(y, t.dy);
    t.y = test_read(y);
    t.dx = test_read(te_tensor_grad(t.x));
    t.dw = test_read(te_tensor_grad(t.weight));
    return t;
}

/* Operands are the same numbers in the module and here, so only sums differ: f32 in some order, and on tensor cores, without split
 * accumulators, partial sums of 14 bits (2^-13 of the largest). Decoding a transformed copy rounds once more, 2^-24 of 16 terms. */
enum { EXACT_BITS = 11 };
static const double exact = 1.0 / (1 << EXACT_BITS);

TE_TEST_DEVICES(recipes_quantize_each_operand) {
    for (int i = 0; i < RECIPES; i++) {
        test_case("%s", recipe_text[i]);
        te_scope_begin(te);
        te_recipe r = recipe_of(i);
        trial t = run_trial(te, &r);
        REQUIRE_OK(te);
        te_quantizer *q[3];
        float *row[3], *col[3];
        te_tensor *x[3] = {te_tensor_detach(t.x), te_tensor_detach(t.weight), t.dy};
        for (int k = 0; k < 3; k++) {
            te_quantizer_desc d = operand_of(i, k);
            q[k] = te_quantizer_create(te, &d);
            te_rng_set(te, 11, 500);
            row[k] = value_of(q[k], x[k], TE_ROWWISE);
            te_rng_set(te, 11, 500);
            col[k] = value_of(q[k], x[k], TE_COLUMNWISE);
        }
        REQUIRE_OK(te);
        CHECK_ERROR_BELOW("y", t.y, product(row[0], false, row[1], true, M, N, K), M * N, exact);
        CHECK_ERROR_BELOW("dx", t.dx, product(row[2], false, col[1], false, M, K, N), M * K, exact);
        CHECK_ERROR_BELOW("dw", t.dw, product(col[2], true, col[0], false, N, K, M), N * K, exact);
        for (int k = 0; k < 3; k++) te_quantizer_destroy(q[k]);
        te_module_destroy(t.m);
        CHECK_OK(te);
        te_scope_end(te);
    }
}

TE_TEST_DEVICES(recipes_backward_override) {
    for (int i = 0; i < RECIPES; i++)
        for (int over = TE_BACKWARD_HIGH_PRECISION; over <= TE_BACKWARD_DEQUANTIZED; over++) {
            test_case("%s override %d", recipe_text[i], over);
            te_scope_begin(te);
            te_recipe r = recipe_of(i);
            r.backward_override = (te_backward_override)over;
            trial t = run_trial(te, &r);
            REQUIRE_OK(te);
            float *value[2];
            te_tensor *x[2] = {te_tensor_detach(t.x), te_tensor_detach(t.weight)};
            for (int k = 0; k < 2; k++) {
                te_quantizer_desc d = operand_of(i, k);
                te_quantizer *q = te_quantizer_create(te, &d);
                value[k] = over == TE_BACKWARD_HIGH_PRECISION ? test_read(x[k]) : value_of(q, x[k], TE_ROWWISE);
                te_quantizer_destroy(q);
            }
            const float *dy = test_read(t.dy);
            /* f32 products run as TF32 on tensor cores: operands of 11 bits */
            CHECK_ERROR_BELOW("dx", t.dx, product(dy, false, value[1], false, M, K, N), M * K, exact);
            CHECK_ERROR_BELOW("dw", t.dw, product(dy, true, value[0], false, N, K, M), N * K, exact);
            te_module_destroy(t.m);
            CHECK_OK(te);
            te_scope_end(te);
        }
}

/* Every class of module, forward and backward, under every recipe: near the high-precision result. */
TE_TEST_DEVICES(recipes_in_modules) {
    static const te_recipe_kind kinds[] = {TE_RECIPE_NONE, TE_RECIPE_DELAYED, TE_RECIPE_CURRENT, TE_RECIPE_BLOCK, TE_RECIPE_MXFP8, TE_RECIPE_NVFP4};
    float *plain = NULL, *plain_grad = NULL;
    for (int i = 0; i < COUNT(kinds); i++) {
        test_case("%s", te_recipe_name(kinds[i]));
        te_scope_begin(te);
        te_recipe r = kinds[i] == TE_RECIPE_NONE ? te_recipe_current_scaling() : i == 1 ? te_recipe_delayed_scaling() : recipe_of(i == 2 ? 0 : i == 3 ? 2 : i == 4 ? 5 : 7);
        te_autocast_desc a = {0};
        te_transformer_layer_desc d = {0};
        a.recipe = &r;
        a.disabled = kinds[i] == TE_RECIPE_NONE;
        d.hidden_size = 64;
        d.ffn_hidden_size = 96;
        d.attention.num_attention_heads = 4;
        d.activation = TE_SWIGLU;
        te_seed(te, 3);
        te_module *m = te_transformer_layer_create(te, &d);
        te_tensor *x = te_tensor_set_requires_grad(test_tensor(te, TE_BF16, SHAPE(9, 2, 64), test_normal(9 * 2 * 64, 5)), true);
        for (int pass = 0; pass < 2; pass++) { /* delayed scaling has its scales from the second pass on */
            te_tensor_zero_grad(x);
            te_autocast_begin(te, &a);
            te_tensor *y = te_forward(m, x);
            te_autocast_end(te);
            te_backward_from(y, test_tensor(te, TE_BF16, SHAPE(9, 2, 64), test_normal(9 * 2 * 64, 6)));
            REQUIRE_OK(te);
            if (pass == 0) continue;
            if (!plain) {
                plain = test_copy(test_read(y), 9 * 2 * 64);
                plain_grad = test_copy(test_read(te_tensor_grad(x)), 9 * 2 * 64);
            }
            /* residuals carry most of either; measured 0.002 to 0.02, FP4 0.05 */
            CHECK_ERROR_BELOW("y", test_read(y), plain, 9 * 2 * 64, kinds[i] == TE_RECIPE_NVFP4 ? 0.1 : 0.03);
            CHECK_ERROR_BELOW("dx", test_read(te_tensor_grad(x)), plain_grad, 9 * 2 * 64, kinds[i] == TE_RECIPE_NVFP4 ? 0.1 : 0.03);
        }
        te_module_destroy(m);
        CHECK_OK(te);
        te_scope_end(te);
    }
}

/* ---- custom recipes ---------------------------------------------------------------------------------------------- */

typedef struct factory {
    int calls, mode, fail_at;
    char seen[512];
} factory;
static te_result factory_make(void *user, const te_quantizer_role *role, te_quantizer_desc *desc) {
    factory *f = (factory *)user;
    size_t used = strlen(f->seen);
    snprintf(f->seen + used, sizeof f->seen - used, "%s/%s/%d/%d ", role->module_type, role->name, role->gemm, (int)role->tensor_type);
    if (++f->calls == f->fail_at) return TE_ERR_UNSUPPORTED;
    if (f->mode == 0) desc->kind = TE_QUANT_MXFP8;                                                      /* as te_recipe_mxfp8 */
    if (f->mode == 1) desc->kind = role->tensor_type == TE_TENSOR_WEIGHT ? TE_QUANT_NONE : TE_QUANT_CURRENT; /* a weight in high precision */
    if (f->mode == 2) desc->kind = TE_QUANT_DELAYED;
    if (f->mode == 3) { /* forward in MXFP8, weight gradient from per-tensor FP8 */
        static const te_quantizer_desc row = {.kind = TE_QUANT_MXFP8}, col = {.kind = TE_QUANT_CURRENT};
        desc->kind = TE_QUANT_HYBRID;
        desc->hybrid.rowwise_quantizer = &row;
        desc->hybrid.columnwise_quantizer = &col;
    }
    if (f->mode == 4) desc->kind = TE_QUANT_BLOCK; /* 128 x 128 everywhere */
    if (f->mode == 5) desc->kind = TE_QUANT_CURRENT, desc->dtype = TE_F8E5M2;
    return TE_OK;
}

TE_TEST_DEVICES(recipes_custom) {
    factory f = {0};
    te_recipe r = te_recipe_custom(factory_make, &f), mx = te_recipe_mxfp8(), delayed = te_recipe_delayed_scaling();
    te_scope_begin(te);
    trial a = run_trial(te, &mx), b = run_trial(te, &r);
    CHECK_BYTES("y", b.y, a.y, M * N * sizeof(float));
    CHECK_BYTES("dx", b.dx, a.dx, M * K * sizeof(float));
    CHECK_BYTES("dw", b.dw, a.dw, N * K * sizeof(float));
    CHECK_EQ_INT(f.calls, 5);
    CHECK_STR(f.seen, "Linear/linear/0/0 Linear/linear/0/1 Linear/linear/0/2 Linear/linear/0/3 Linear/linear/0/4 ");
    te_module_destroy(a.m);
    te_module_destroy(b.m);
    f.mode = 2; /* the module's own scales and history, as delayed scaling has them */
    a = run_trial(te, &delayed);
    b = run_trial(te, &r);
    CHECK_BYTES("y", b.y, a.y, M * N * sizeof(float));
    CHECK_BYTES("scales", test_read(te_module_parameter(b.m, "fp8_scale_fwd")), test_read(te_module_parameter(a.m, "fp8_scale_fwd")), 3 * sizeof(float));
    CHECK_BYTES("scales", test_read(te_module_parameter(b.m, "fp8_scale_bwd")), test_read(te_module_parameter(a.m, "fp8_scale_bwd")), 2 * sizeof(float));
    te_module_destroy(a.m);
    te_module_destroy(b.m);
    const float *x = test_normal(M * K, 1), *dy = test_normal(M * N, 2);
    for (f.mode = 1; f.mode <= 3; f.mode += 2) { /* what no kernel takes together is decoded: near the plain product */
        test_case("mode %d", f.mode);
        a = run_trial(te, &r);
        REQUIRE_OK(te);
        const float *w = test_read(a.weight);
        /* half a step of E4M3 in one operand or two: measured 0.026 to 0.037 */
        CHECK_ERROR_BELOW("y", a.y, product(x, false, w, true, M, N, K), M * N, 0.05);
        CHECK_ERROR_BELOW("dx", a.dx, product(dy, false, w, false, M, K, N), M * K, 0.05);
        CHECK_ERROR_BELOW("dw", a.dw, product(dy, true, x, false, N, K, M), N * K, 0.05);
        te_module_destroy(a.m);
    }
    te_scope_end(te);
    CHECK_OK(te);
}

/* ---- the delayed recipe's own functions --------------------------------------------------------------------------- */

static float second_of(void *user, const float *history, int length) {
    ++*(int *)user;
    return length > 1 ? fmaxf(history[0], history[1]) : history[0];
}
static float half_scale(void *user, float amax, float old_scale, float fp8_max) {
    (void)user, (void)old_scale;
    return amax > 0 ? 0.5f * fp8_max / amax : 1;
}
TE_TEST_DEVICES(recipes_user_functions) {
    int calls = 0;
    te_recipe r = te_recipe_delayed_scaling();
    r.delayed.amax_history_len = 3;
    r.delayed.amax_fn = second_of;
    r.delayed.scale_fn = half_scale;
    r.delayed.user = &calls;
    te_linear_desc d = {0};
    d.in_features = d.out_features = 16;
    te_module *m = te_linear_create(te, &d);
    static const float amax[] = {2, 8, 1, 1}, want[] = {2, 8, 1, 2}; /* rolled: [0, 0, 2], [0, 2, 8], [0, 8, 1]: the last call sees 1 and 8 */
    for (int i = 0; i < COUNT(amax); i++) {
        test_case("step %d", i);
        te_scope_begin(te);
        test_forward(m, &r, te_tensor_full(te, TE_BF16, SHAPE(4, 16), amax[i]));
        const float *h = test_read(te_module_parameter(m, "fp8_amax_history_fwd")), scale = test_read(te_module_parameter(m, "fp8_scale_fwd"))[0];
        CHECK(h[0] == 0 && h[2 * 3] == amax[i]);
        CHECK_EQ_INT(calls, 3 * (i + 1));
        CHECK_MSG(i == 3 ? scale == 0.5f * 448 / 8 : i == 2 ? scale == 0.5f * 448 / 2 : scale == 0.5f * 448 / want[i], "scale %g", (double)scale);
        te_scope_end(te);
    }
    CHECK_OK(te);
    te_module_destroy(m);
}

/* ---- refusals ----------------------------------------------------------------------------------------------------- */

TE_TEST(recipes_refuse) {
    te_ctx *te = test_context("cpu");
    te_recipe (*const make[])(void) = {te_recipe_delayed_scaling, te_recipe_current_scaling, te_recipe_block_scaling, te_recipe_mxfp8, te_recipe_nvfp4};
    static const char *const names[] = {"delayed", "current", "block", "mxfp8", "nvfp4"};
    te_autocast_desc a = {0};
    for (int i = 0; i < COUNT(make); i++) {
        te_recipe r = make[i](), bad = r;
        a.recipe = &bad;
        CHECK(strcmp(te_recipe_name(r.kind), names[i]) == 0);
        bad.format = TE_FORMAT_E5M2;
        CHECK_EQ_INT(te_autocast_begin(te, &a), TE_ERR_INVALID);
        CHECK_ERROR(te, TE_ERR_INVALID, "a product of E5M2 with E5M2 does not exist: use TE_FORMAT_HYBRID");
        bad = r;
        bad.fp8_dpa = true;
        CHECK_EQ_INT(te_autocast_begin(te, &a), i == 2 || i == 4 ? TE_ERR_INVALID : TE_OK);
        if (i == 2 || i == 4) CHECK_ERROR(te, TE_ERR_INVALID, i == 2 ? "attention takes no block scales" : "attention takes no FP4 operands");
        else te_autocast_end(te);
        bad = r;
        bad.backward_override = TE_BACKWARD_DEQUANTIZED;
        CHECK_EQ_INT(te_autocast_begin(te, &a), i == 0 ? TE_ERR_INVALID : TE_OK);
        if (i == 0) CHECK_ERROR(te, TE_ERR_INVALID, "the scales of gradients would never be updated");
        if (i != 0) te_autocast_end(te);
    }
    static const int dims[][3] = {{2, 2, 1}, {1, 2, 2}, {2, 1, 2}, {2, 2, 2}, {3, 1, 1}};
    for (int i = 0; i < COUNT(dims); i++) {
        te_recipe r = te_recipe_block_scaling();
        a.recipe = &r;
        r.block.x_block_scaling_dim = dims[i][0];
        r.block.w_block_scaling_dim = dims[i][1];
        r.block.grad_block_scaling_dim = dims[i][2];
        CHECK_EQ_INT(te_autocast_begin(te, &a), TE_ERR_INVALID);
        CHECK_ERROR(te, TE_ERR_INVALID, i < 4 ? "two operands with 128 x 128 blocks do not meet in one product" : "1 (1 x 128) and 2 (128 x 128) are possible");
    }
    te_recipe r = te_recipe_custom(NULL, NULL);
    a.recipe = &r;
    te_autocast_begin(te, &a);
    CHECK_ERROR(te, TE_ERR_INVALID, "the factory is NULL");
    /* a factory that fails, and what its quantizers cannot do together */
    factory f = {0};
    r = te_recipe_custom(factory_make, &f);
    te_module *m = te_linear_create(te, &(te_linear_desc){.in_features = 16, .out_features = 16});
    te_tensor *x = te_tensor_full(te, TE_BF16, SHAPE(4, 16), 2);
    static const struct {
        int mode, fail_at;
        te_result code;
        const char *text;
    } row[] = {{0, 2, TE_ERR_UNSUPPORTED, "the factory returned TE_ERR_UNSUPPORTED"}, {4, 0, TE_ERR_INVALID, "BLOCK_2D"}, {5, 0, TE_ERR_INVALID, "e5m2"}};
    factory g[COUNT(row)] = {{0}}; /* a module asks each factory and user once */
    for (int i = 0; i < COUNT(row); i++) {
        g[i].mode = row[i].mode;
        g[i].fail_at = row[i].fail_at;
        r = te_recipe_custom(factory_make, &g[i]);
        te_autocast_begin(te, &a);
        CHECK(!te_forward(m, x));
        te_autocast_end(te);
        CHECK_MSG(te_error_code(te) != TE_OK && strstr(te_error(te), row[i].text), "\"%s\" in \"%s\"", row[i].text, te_error(te));
        te_clear_error(te);
    }
    CHECK(te_forward(m, x) != NULL);
    CHECK_OK(te);
    te_module_destroy(m);
}
