/* fp8_output and fp8_grad of Linear and LayerNormLinear: what is quantized is what the plain module gives, quantized by the recipe's quantizer, and gradients pass. */
#include "../te_test.h"

enum { IN = 64, OUT = 128, ROWS = 32 };

static te_recipe recipe_of(int i) {
    te_recipe r = i == 0 ? te_recipe_delayed_scaling() : i == 1 ? te_recipe_current_scaling() : i == 2 ? te_recipe_block_scaling() : i == 3 ? te_recipe_mxfp8() : te_recipe_nvfp4();
    if (i == 4) r.nvfp4.stochastic_rounding = TE_OFF; /* two runs draw other numbers */
    if (i == 0) r.delayed.amax_history_len = 1;
    return r;
}
enum { RECIPES = 5 };
/* The quantizer of that recipe's outputs, or of gradients of inputs. */
static te_tensor *quantized(te_tensor *x, int i, bool gradient) {
    te_quantizer_desc d = {.usage = TE_ROWWISE};
    d.kind = i == 1 ? TE_QUANT_CURRENT : i == 2 ? TE_QUANT_BLOCK : i == 3 ? TE_QUANT_MXFP8 : TE_QUANT_NVFP4;
    if (i == 1 && gradient) d.dtype = TE_F8E5M2;
    te_quantizer *q = te_quantizer_create(te_tensor_ctx(x), &d);
    te_tensor *y = te_dequantize(te_quantize(q, x), TE_DTYPE_NONE);
    te_quantizer_destroy(q);
    return y;
}

typedef struct result {
    te_tensor *y, *x;
    float *out, *dx, *dw, *db;
} result;
static te_module *make(te_ctx *te, bool norm, te_dtype dtype, int64_t in, int64_t out, uint64_t seed) {
    te_linear_desc plain = {.in_features = in, .out_features = out, .gemm.params_dtype = dtype, .gemm.init.std = 0.2f};
    te_layernorm_linear_desc with = {.in_features = in, .out_features = out, .gemm.params_dtype = dtype, .gemm.init.std = 0.2f};
    te_rng_set(te, seed, 0);
    te_module *m = norm ? te_layernorm_linear_create(te, &with) : te_linear_create(te, &plain);
    te_tensor_copy(te_module_parameter(m, "bias"), test_tensor(te, dtype, SHAPE(out), test_normal(out, 9)));
    return m;
}
static result run(te_module *m, const te_recipe *recipe, te_dtype dtype, bool fp8_output, bool fp8_grad) {
    te_ctx *te = te_module_ctx(m);
    result r = {0};
    r.x = te_tensor_set_requires_grad(test_tensor(te, dtype, SHAPE(ROWS, IN), test_normal(ROWS * IN, 1)), true);
    te_forward_args args = {.input = r.x, .fp8_output = fp8_output, .fp8_grad = fp8_grad};
    te_module_zero_grad(m);
    if (recipe) te_autocast_begin(te, &(te_autocast_desc){.recipe = recipe});
    r.y = te_forward_with(m, &args);
    if (recipe) te_autocast_end(te);
    if (!r.y) return r;
    te_backward_from(te_dequantize(r.y, TE_DTYPE_NONE), test_tensor(te, dtype, SHAPE(ROWS, OUT), test_normal(ROWS * OUT, 2)));
    r.out = test_floats(ROWS * OUT);
    te_tensor_to_f32(te_dequantize(r.y, TE_DTYPE_NONE), r.out);
    r.dx = test_read(te_tensor_grad(r.x));
    r.dw = test_read(te_tensor_grad(te_module_parameter(m, "weight")));
    r.db = test_read(te_tensor_grad(te_module_parameter(m, "bias")));
    return r;
}

TE_TEST_DEVICES(fp8_output_and_grad_are_quantized) {
    static const te_dtype dtypes[] = {TE_BF16, TE_F16, TE_F32};
    for (int i = 0; i < RECIPES; i++)
        for (int norm = 0; norm < 2; norm++) {
            te_recipe recipe = recipe_of(i);
            te_dtype dtype = dtypes[(i + norm) % 3];
            te_scope_begin(te);
            test_case("%s%s, %s", te_recipe_name(recipe.kind), norm ? ", norm" : "", te_dtype_name(dtype));
            te_module *m = make(te, norm, dtype, IN, OUT, 5);
            for (int warm = 0; warm < 2 && i == 0; warm++) run(m, &recipe, dtype, true, true); /* delayed scales find their place */
            result plain = run(m, &recipe, dtype, false, false), both = run(m, &recipe, dtype, true, true), output = run(m, &recipe, dtype, true, false);
            REQUIRE_OK(te);
            CHECK(te_tensor_is_quantized(both.y) && te_tensor_is_quantized(output.y) && !te_tensor_is_quantized(plain.y));
            CHECK(te_tensor_dtype(both.y) == dtype && te_quantized_usage(both.y) == (TE_ROWWISE | TE_COLUMNWISE) && !te_tensor_is_quantized(te_tensor_grad(both.x)));
            if (i > 0) CHECK_BYTES("out", both.out, test_read(quantized(plain.y, i, false)), ROWS * OUT * sizeof(float));
            else CHECK_ERROR_BELOW("out", both.out, plain.out, ROWS * OUT, 0.04); /* E4M3: half of a step of 2^-3, in the root mean square 2^-5 or so */
            CHECK(memcmp(both.out, plain.out, ROWS * OUT * sizeof(float)) != 0);
            CHECK_BYTES("dw", both.dw, plain.dw, IN * OUT * sizeof(float)); /* the gradient of y has passed */
            CHECK_BYTES("db", both.db, plain.db, OUT * sizeof(float));
            CHECK_BYTES("dx", output.dx, plain.dx, ROWS * IN * sizeof(float));
            if (norm) CHECK_ERROR_BELOW("dx", both.dx, plain.dx, ROWS * IN, i == 4 ? 0.2 : 0.1); /* the norm's gradient is that of a rounded one: E5M2 or 4 bits */
            else if (i > 0) CHECK_BYTES("dx", both.dx, test_read(quantized(te_tensor_grad(plain.x), i, true)), ROWS * IN * sizeof(float));
            else CHECK_ERROR_BELOW("dx", both.dx, plain.dx, ROWS * IN, 0.08); /* E5M2 */
            CHECK(memcmp(both.dx, plain.dx, ROWS * IN * sizeof(float)) != 0);
            te_module_set_checkpoint(m, true);
            result again = run(m, &recipe, dtype, true, true);
            REQUIRE_OK(te);
            CHECK_BYTES("run again: out", again.out, both.out, ROWS * OUT * sizeof(float));
            if (i > 0) CHECK_BYTES("run again: dx", again.dx, both.dx, ROWS * IN * sizeof(float)); /* delayed scales have moved on */
            CHECK_BYTES("run again: dw", again.dw, both.dw, IN * OUT * sizeof(float));
            te_module_destroy(m);
            te_scope_end(te);
        }
    te_module *m = make(te, false, TE_BF16, IN, OUT, 5); /* outside of autocast they say nothing */
    result a = run(m, NULL, TE_BF16, false, false), b = run(m, NULL, TE_BF16, true, true);
    REQUIRE_OK(te);
    CHECK_BYTES("out", a.out, b.out, ROWS * OUT * sizeof(float));
    CHECK_BYTES("dx", a.dx, b.dx, ROWS * IN * sizeof(float));
    te_module_destroy(m);
}

/* Codes go from one module to the next, and back: to the bit what each gives by itself, from the decoded numbers. */
TE_TEST_DEVICES(fp8_output_goes_from_module_to_module) {
    for (int i = 1; i < 4; i++) { /* whose decoded numbers become the same codes */
        te_recipe recipe = recipe_of(i);
        te_module *first = make(te, i == 2, TE_BF16, IN, OUT, 5), *second = make(te, false, TE_BF16, OUT, IN, 6);
        te_tensor *x = te_tensor_set_requires_grad(test_tensor(te, TE_BF16, SHAPE(ROWS, IN), test_normal(ROWS * IN, 1)), true), *dz = test_tensor(te, TE_BF16, SHAPE(ROWS, IN), test_normal(ROWS * IN, 3));
        test_case("%s", te_recipe_name(recipe.kind));
        te_forward_args one = {.input = x, .fp8_output = true}, two = {.fp8_grad = true};
        te_autocast_begin(te, &(te_autocast_desc){.recipe = &recipe});
        two.input = te_forward_with(first, &one);
        te_tensor *z = te_forward_with(second, &two);
        te_autocast_end(te);
        te_backward_from(z, dz);
        REQUIRE_OK(te);
        const float *dw[2] = {test_read(te_tensor_grad(te_module_parameter(first, "weight"))), test_read(te_tensor_grad(te_module_parameter(second, "weight")))};
        const float *db = test_read(te_tensor_grad(te_module_parameter(first, "bias"))), *dx = test_read(te_tensor_grad(x)), *out = test_read(z);
        te_tensor *y = te_tensor_set_requires_grad(te_tensor_detach(te_dequantize(one.outputs.out, TE_DTYPE_NONE)), true), *again = te_tensor_set_requires_grad(te_tensor_detach(x), true);
        te_module_zero_grad(first), te_module_zero_grad(second);
        two.input = y;
        te_autocast_begin(te, &(te_autocast_desc){.recipe = &recipe});
        z = te_forward_with(second, &two);
        te_backward_from(z, dz);
        one.input = again, one.fp8_output = false;
        te_backward_from(te_forward_with(first, &one), te_tensor_grad(y));
        te_autocast_end(te);
        REQUIRE_OK(te);
        /* MXFP8's column-wise codes have scales of their own, which those of the decoded row-wise ones are not, and weights' gradients read columns. */
        const double limit = i == 1 ? 0 : 0.08;
        CHECK_BYTES("out", out, test_read(z), ROWS * IN * sizeof(float));
        CHECK_ERROR_BELOW("second dw", test_read(te_tensor_grad(te_module_parameter(second, "weight"))), dw[1], IN * OUT, limit);
        CHECK_ERROR_BELOW("first dw", test_read(te_tensor_grad(te_module_parameter(first, "weight"))), dw[0], IN * OUT, limit);
        CHECK_BYTES("first db", db, test_read(te_tensor_grad(te_module_parameter(first, "bias"))), OUT * sizeof(float));
        CHECK_BYTES("dx", dx, test_read(te_tensor_grad(again)), ROWS * IN * sizeof(float));
        te_module_destroy(first);
        te_module_destroy(second);
    }
}

/* Quantized gradients that meet are added up decoded, and other functions get them decoded; so it is in a graph, and under a checkpoint. */
TE_TEST_DEVICES(fp8_grad_meets_others) {
    te_recipe recipe = recipe_of(1);
    te_module *a = make(te, false, TE_F32, IN, OUT, 5), *b = make(te, false, TE_F32, IN, OUT, 6);
    float *sum[4];
    for (int way = 0; way < 4; way++) { /* each alone, added by hand; together; run again; launched */
        te_tensor *x = te_tensor_set_requires_grad(test_tensor(te, TE_F32, SHAPE(ROWS, IN), test_normal(ROWS * IN, 1)), true);
        te_tensor *dy = test_tensor(te, TE_F32, SHAPE(ROWS, OUT), test_normal(ROWS * OUT, 2));
        sum[way] = test_floats(ROWS * IN);
        te_module_set_checkpoint(a, way == 2);
        for (int k = 0; k < (way == 0 ? 2 : 1); k++) {
            te_graph *graph = NULL;
            if (way == 3) te_graph_begin(te);
            te_tensor *twice = te_scale(x, 2), *y[2] = {NULL, NULL};
            te_autocast_begin(te, &(te_autocast_desc){.recipe = &recipe});
            for (int n = 0; n < 2; n++) {
                te_forward_args args = {.input = twice, .fp8_grad = true};
                if (way > 0 || n == k) y[n] = te_forward_with(n ? b : a, &args);
            }
            te_autocast_end(te);
            te_backward_from(y[0] && y[1] ? te_add(y[0], y[1]) : y[0] ? y[0] : y[1], dy);
            if (way == 3) graph = te_graph_end(te), te_graph_launch(graph);
            REQUIRE_OK(te);
            const float *dx = test_read(te_tensor_grad(x));
            for (int i = 0; i < ROWS * IN; i++) sum[way][i] += dx[i];
            te_tensor_zero_grad(x);
            te_graph_destroy(graph);
        }
        test_case("way %d", way);
        CHECK_CLOSE("dx", sum[way], sum[0], ROWS * IN, 1e-6, 1e-6); /* one sum of two f32, times two before or behind it */
    }
    te_module_destroy(a);
    te_module_destroy(b);
}

static te_result by_role(void *user, const te_quantizer_role *role, te_quantizer_desc *desc) {
    int *asked = (int *)user;
    asked[role->tensor_type]++;
    if (role->tensor_type == TE_TENSOR_OUTPUT) desc->kind = TE_QUANT_MXFP8;
    if (role->tensor_type == TE_TENSOR_GRAD_INPUT) desc->kind = TE_QUANT_CURRENT, desc->dtype = TE_F8E5M2;
    return TE_OK;
}
/* A factory is asked about both, and may leave either plain. */
TE_TEST_DEVICES(fp8_output_of_a_custom_recipe) {
    int asked[5] = {0};
    te_recipe recipe = te_recipe_custom(by_role, asked);
    te_module *m = make(te, false, TE_BF16, IN, OUT, 5);
    result plain = run(m, &recipe, TE_BF16, false, false), both = run(m, &recipe, TE_BF16, true, true);
    REQUIRE_OK(te);
    for (int i = 0; i < 5; i++) CHECK_EQ_INT(asked[i], 1);
    CHECK(te_quantized_kind(both.y) == TE_QUANT_MXFP8);
    CHECK_BYTES("out", both.out, test_read(quantized(plain.y, 3, false)), ROWS * OUT * sizeof(float));
    CHECK_BYTES("dx", both.dx, test_read(quantized(te_tensor_grad(plain.x), 1, true)), ROWS * IN * sizeof(float));
    te_module_destroy(m);
}

TE_TEST(fp8_output_refused_elsewhere) {
    te_ctx *te = test_context("cpu");
    te_layernorm_mlp_desc mlp = {.hidden_size = 16, .ffn_hidden_size = 16};
    te_norm_desc norm = {.hidden_size = 16};
    te_linear_desc linear = {.in_features = 16, .out_features = 16};
    te_tensor *x = te_tensor_zeros(te, TE_BF16, SHAPE(2, 16));
    for (int i = 0; i < 3; i++) {
        te_module *m = i == 0 ? te_layernorm_mlp_create(te, &mlp) : i == 1 ? te_rmsnorm_create(te, &norm) : te_sequential_create(te, (te_module *[]){te_rmsnorm_create(te, &norm)}, 1);
        te_forward_args args = {.input = x, .fp8_output = true};
        CHECK(!te_forward_with(m, &args));
        CHECK_ERROR(te, TE_ERR_UNSUPPORTED, "fp8_output: this module's output stays in high precision; Linear and LayerNormLinear quantize both");
        args.fp8_output = false, args.fp8_grad = true;
        CHECK(!te_forward_with(m, &args));
        CHECK_ERROR(te, TE_ERR_UNSUPPORTED, "fp8_grad: this module's input's gradient stays in high precision");
        te_module_destroy(m);
    }
    te_module *m = te_linear_create(te, &linear);
    te_forward_args args = {.input = x, .fp8_output = true};
    CHECK(te_make_graphed_callables(te, &m, &args, 1, NULL) != TE_OK);
    CHECK_ERROR(te, TE_ERR_UNSUPPORTED, "the sample has fp8_output");
    te_module_destroy(m);
}
