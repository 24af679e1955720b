/* tests/model/test_backend_modules.c: modules by backend: their numbers, the operations they run, shapes without memory; the flags of a step, and the kept weights that follow them. */
#include "../te_test.h"

/* ---- what is run ---- */

typedef struct tracing {
    int all, norms, rounded, weights; /* operations; rmsnorm_fwd, those with `rounded`; casts of `weight` */
    const te_tensor *weight;
} tracing;
static void note(te_ctx *te, const te_trace *e, void *user) {
    tracing *t = (tracing *)user;
    te_arg args[16];
    (void)te;
    if (e->phase != TE_TRACE_AFTER) return;
    t->all++;
    if (e->op == TE_OP_RMSNORM_FWD) {
        t->norms++;
        t->rounded += ((const te_op_rmsnorm_fwd_args *)e->args)->rounded;
    }
    if (e->op != TE_OP_FP8_QUANTIZE && e->op != TE_OP_BLOCK_QUANTIZE) return;
    int64_t n = te_query_args(e->op, e->args, args, COUNT(args));
    for (int64_t i = 0; i < n; i++)
        if (args[i].use == TE_ARG_IN && args[i].tensor && t->weight && te_tensor_data(args[i].tensor) == te_tensor_data(t->weight)) {
            t->weights++;
            return;
        }
}

static te_module *linear_of(te_ctx *te, te_linear_backend impl, int64_t in, int64_t out, te_dtype dtype, bool bias) {
    return te_initialize_linear_module(te, &(te_linear_module_desc){.linear_impl = impl, .in_features = in, .out_features = out, .dtype = dtype, .bias = bias});
}
static te_module *norm_of(te_ctx *te, te_rms_norm_backend impl, int64_t dim, float eps, te_dtype dtype) {
    return te_initialize_rms_norm_module(te, &(te_rms_norm_module_desc){.rms_norm_impl = impl, .dim = dim, .eps = eps, .dtype = dtype});
}
static bool same(te_tensor *a, te_tensor *b) {
    const size_t n = te_tensor_bytes(a);
    uint8_t *x = (uint8_t *)test_alloc(n + 1), *y = (uint8_t *)test_alloc(n + 1);
    return n == te_tensor_bytes(b) && te_tensor_to_host(a, x) == TE_OK && te_tensor_to_host(b, y) == TE_OK && memcmp(x, y, n) == 0;
}

/* ---- Float32RMSNorm ---- */

TE_TEST_DEVICES(float32_rms_norm_of_3_and_4) {
    const float x[2] = {3, 4}, want[2] = {0.84852814f, 1.1313709f}, ones[2] = {1, 1};
    te_tensor *y = te_float32_rms_norm(te_tensor_from_f32(te, TE_F32, SHAPE(2), x), te_tensor_from_f32(te, TE_F32, SHAPE(2), ones), 1e-30f);
    CHECK_TENSOR(y, want, 1e-6, 0); /* a few ulps of f32 */
    CHECK_OK(te);
}

/* Small whole numbers, whose sums of squares are exact in any order: so both devices have the bits of this formula. */
enum { ROWS = 5, COLUMNS = 64 };
static float as_bf16(float v) {
    union {
        float f;
        uint32_t u;
    } x;
    x.f = v;
    x.u = (x.u + 0x7fff + (x.u >> 16 & 1)) & 0xffff0000u;
    return x.f;
}
static void norm_oracle(const float *x, const float *w, float *once, float *twice) {
    for (int r = 0; r < ROWS; r++) {
        float sum = 0, rstd;
        for (int i = 0; i < COLUMNS; i++) sum += x[r * COLUMNS + i] * x[r * COLUMNS + i];
        rstd = (float)(1.0 / sqrt((double)(sum / COLUMNS + 1e-5f)));
        for (int i = 0; i < COLUMNS; i++) {
            volatile float n = x[r * COLUMNS + i] * rstd;
            once[r * COLUMNS + i] = as_bf16(n * w[i]);
            twice[r * COLUMNS + i] = as_bf16(as_bf16(n) * w[i]);
        }
    }
}
TE_TEST_DEVICES(rms_norm_backends_round_once_or_twice) {
    static const te_rms_norm_backend impls[] = {TE_RMS_NORM_TORCH_FP32, TE_RMS_NORM_TE, TE_RMS_NORM_TORCH, TE_RMS_NORM_DEFAULT};
    int64_t *whole = test_integers(ROWS * COLUMNS, 3, -8, 9);
    float x[ROWS * COLUMNS], w[COLUMNS], once[ROWS * COLUMNS], twice[ROWS * COLUMNS];
    const float *normal = test_normal(COLUMNS, 4);
    int differ = 0;
    for (int i = 0; i < ROWS * COLUMNS; i++) x[i] = (float)whole[i];
    for (int i = 0; i < COLUMNS; i++) w[i] = as_bf16(1 + 0.3f * normal[i]);
    norm_oracle(x, w, once, twice);
    for (int i = 0; i < ROWS * COLUMNS; i++) differ += once[i] != twice[i];
    CHECK_MSG(differ > 10, "both roundings give the same numbers");
    for (int i = 0; i < COUNT(impls); i++) {
        bool rounded = impls[i] == TE_RMS_NORM_TORCH;
        te_module *m = norm_of(te, impls[i], COLUMNS, 0, TE_BF16);
        tracing t = {0};
        test_case("rms_norm %s", te_backend_name("rms_norm", (int)impls[i]));
        REQUIRE_OK(te);
        CHECK_STR(te_module_get_class(m)->name, impls[i] == TE_RMS_NORM_TE ? "RMSNorm" : rounded ? "TorchRMSNorm" : "Float32RMSNorm");
        CHECK(te_tensor_dtype(te_module_parameter(m, "weight")) == TE_BF16 && te_tensor_numel(te_module_parameter(m, "weight")) == COLUMNS);
        for (int k = 0; k < COLUMNS; k++) CHECK(test_read(te_module_parameter(m, "weight"))[k] == 1);
        te_tensor_copy(te_module_parameter(m, "weight"), te_tensor_from_f32(te, TE_BF16, SHAPE(COLUMNS), w));
        te_tensor *in = te_tensor_from_f32(te, TE_BF16, SHAPE(1, ROWS, COLUMNS), x);
        te_set_trace(te, note, &t);
        te_tensor *y = te_forward(m, in);
        te_set_trace(te, NULL, NULL);
        CHECK(t.all == 1 && t.norms == 1 && t.rounded == rounded);
        CHECK(te_tensor_dtype(y) == TE_BF16 && te_tensor_ndim(y) == 3);
        CHECK_TENSOR(y, rounded ? twice : once, 0, 0);
        te_autocast_begin(te, NULL);
        CHECK_TENSOR(te_forward(m, in), rounded ? twice : once, 0, 0);
        te_autocast_end(te);
        /* reset: ones again */
        te_tensor_fill(te_module_parameter(m, "weight"), 0);
        CHECK(te_module_reset_parameters(m) == TE_OK && test_read(te_module_parameter(m, "weight"))[COLUMNS - 1] == 1);
        te_module_destroy(m);
    }
    CHECK_OK(te);
}

/* Large rows, which the fast kernels take: f16 and bf16, the weight in f32 as well, against double. */
TE_TEST_DEVICES(rms_norm_backends_of_long_rows) {
    enum { M = 6, N = 2048 };
    const float *values = test_normal(M * N, 9), *scales = test_uniform(N, 10, 0.5f, 1.5f);
    for (int i = 0; i < 4; i++) {
        te_dtype dtype = i & 1 ? TE_F16 : TE_BF16, weights = i & 2 ? TE_F32 : dtype;
        float unit = dtype == TE_BF16 ? 0x1p-8f : 0x1p-11f, *want = test_floats(M * N);
        te_tensor *x = te_tensor_from_f32(te, dtype, SHAPE(M, N), values), *w = te_tensor_from_f32(te, weights, SHAPE(N), scales);
        const float *xs = test_read(x), *ws = test_read(w);
        test_case("%s, weight %s", te_dtype_name(dtype), te_dtype_name(weights));
        for (int r = 0; r < M; r++) {
            double sum = 0;
            for (int k = 0; k < N; k++) sum += (double)xs[r * N + k] * xs[r * N + k];
            for (int k = 0; k < N; k++) want[r * N + k] = (float)(xs[r * N + k] / sqrt(sum / N + 1e-6) * ws[k]);
        }
        te_tensor *y = te_float32_rms_norm(x, w, 1e-6f);
        CHECK(te_tensor_dtype(y) == dtype);
        CHECK_TENSOR(y, want, unit * 1.01f, 1e-7); /* half a unit in the last place, and what f32 adds */
        te_op_rmsnorm_fwd_args args = {.x = x, .gamma = w, .y = test_guarded(te, dtype, SHAPE(M, N)), .norm.eps = 1e-6f, .rounded = true};
        CHECK(te_op_rmsnorm_fwd(te, &args) == TE_OK);
        CHECK_TENSOR(args.y, want, unit * 2.02f, 1e-7); /* two roundings */
        int differ = 0;
        const float *a = test_read(y), *b = test_read(args.y);
        for (int k = 0; k < M * N; k++) differ += a[k] != b[k];
        CHECK_MSG(differ > M * N / 10, "%d elements differ by the second rounding", differ);
    }
    CHECK_OK(te);
    if (te_ctx_is_cuda(te)) { /* so many rows go to another kernel, with the same bits */
        te_tensor *x = te_tensor_normal(te, TE_BF16, SHAPE(8192, N), 0, 1), *w = te_tensor_uniform(te, TE_BF16, SHAPE(N), 0.5f, 1.5f);
        te_op_rmsnorm_fwd_args many = {.x = x, .gamma = w, .y = te_tensor_empty(te, TE_BF16, SHAPE(8192, N)), .rounded = true}, few = many;
        few.x = te_tensor_narrow(x, 0, 777, M);
        few.y = te_tensor_empty(te, TE_BF16, SHAPE(M, N));
        CHECK(te_op_rmsnorm_fwd(te, &many) == TE_OK && te_op_rmsnorm_fwd(te, &few) == TE_OK);
        CHECK(same(te_tensor_contiguous(te_tensor_narrow(many.y, 0, 777, M)), few.y));
        CHECK_OK(te);
    }
    te_op_layernorm_fwd_args layer = {.rounded = true};
    layer.x = te_tensor_zeros(te, TE_F32, SHAPE(2, 4));
    layer.gamma = te_tensor_zeros(te, TE_F32, SHAPE(4));
    layer.y = te_tensor_zeros(te, TE_F32, SHAPE(2, 4));
    te_op_layernorm_fwd(te, &layer);
    CHECK_ERROR(te, TE_ERR_INVALID, "layernorm_fwd: rounded is an option of rmsnorm_fwd");
}

TE_TEST_DEVICES(float32_rms_norm_gradients) {
    enum { M = 7, N = 40 };
    static const te_dtype formats[] = {TE_F32, TE_BF16};
    for (int f = 0; f < COUNT(formats); f++)
        for (int torch = 0; torch < 2; torch++) {
            te_dtype dtype = formats[f];
            float *dx = test_floats(M * N), *dw = test_floats(N);
            te_tensor *x = te_tensor_from_f32(te, dtype, SHAPE(M, N), test_normal(M * N, 11));
            te_tensor *dy = te_tensor_from_f32(te, dtype, SHAPE(M, N), test_normal(M * N, 12));
            te_module *m = norm_of(te, torch ? TE_RMS_NORM_TORCH : TE_RMS_NORM_TORCH_FP32, N, 1e-5f, dtype);
            te_tensor *w = te_module_parameter(m, "weight");
            test_case("%s, %s", te_dtype_name(dtype), torch ? "torch" : "torch_fp32");
            te_tensor_copy(w, te_tensor_from_f32(te, dtype, SHAPE(N), test_uniform(N, 13, 0.5f, 1.5f)));
            const float *xs = test_read(x), *gs = test_read(dy), *ws = test_read(w);
            double *sums = test_doubles(N);
            for (int r = 0; r < M; r++) {
                double sum = 0, dot = 0, s;
                for (int k = 0; k < N; k++) sum += (double)xs[r * N + k] * xs[r * N + k];
                s = 1 / sqrt(sum / N + 1e-5);
                for (int k = 0; k < N; k++) dot += (double)gs[r * N + k] * ws[k] * xs[r * N + k] * s / N;
                for (int k = 0; k < N; k++) {
                    double n = xs[r * N + k] * s;
                    dx[r * N + k] = (float)(s * ((double)gs[r * N + k] * ws[k] - n * dot));
                    sums[k] += gs[r * N + k] * n;
                }
            }
            for (int k = 0; k < N; k++) dw[k] = (float)sums[k];
            te_tensor_set_requires_grad(x, true);
            CHECK(te_backward_from(te_forward(m, x), dy) == TE_OK);
            double unit = dtype == TE_BF16 ? 0x1p-8 : 2e-6; /* one rounding to bf16; sums of 40 in f32 */
            CHECK_TENSOR(te_tensor_grad(x), dx, unit, unit);
            CHECK_TENSOR(te_tensor_grad(w), dw, unit, unit);
            CHECK(te_tensor_dtype(te_tensor_grad(w)) == dtype);
            te_module_destroy(m);
        }
    CHECK_OK(te);
}

/* ---- factories ---- */

TE_TEST_DEVICES(linear_backends) {
    enum { IN = 64, OUT = 48 };
    te_recipe recipe = te_recipe_current_scaling();
    te_tensor *x = te_tensor_from_f32(te, TE_BF16, SHAPE(3, IN), test_normal(3 * IN, 5));
    te_module *torch = linear_of(te, TE_LINEAR_TORCH, IN, OUT, 0, true), *own = linear_of(te, TE_LINEAR_TE, IN, OUT, 0, false);
    REQUIRE_OK(te);
    CHECK(te_tensor_dtype(te_module_parameter(torch, "weight")) == TE_BF16 && !te_module_parameter(own, "bias"));
    CHECK_STR(te_module_get_class(torch)->name, "TorchLinear");
    CHECK(strcmp(te_module_get_class(own)->name, "Linear") == 0);
    /* uniform on [-1/8, 1/8]: the variance is (1/8)^2 / 3, within four standard deviations of its estimate */
    const float *w = test_read(te_module_parameter(torch, "weight")), *b = test_read(te_module_parameter(torch, "bias"));
    double sum = 0, largest = 0, bias = 0;
    for (int i = 0; i < IN * OUT; i++) {
        sum += (double)w[i] * w[i];
        largest = fmax(largest, fabs(w[i]));
    }
    for (int i = 0; i < OUT; i++) bias = fmax(bias, fabs(b[i]));
    CHECK_MSG(largest <= 0.125 && largest > 0.12 && bias <= 0.125 && bias > 0.05, "largest weight %g, bias %g", largest, bias);
    CHECK_MSG(fabs(sum / (IN * OUT) * 192 - 1) < 4 * sqrt(0.8 / (IN * OUT)), "variance %g", sum / (IN * OUT));
    /* A tensor that the program has added is none of its first values. */
    te_module *more = linear_of(te, TE_LINEAR_TORCH, IN, OUT, 0, false);
    te_module_add_buffer(more, "table", te_tensor_full(te, TE_F32, SHAPE(3), 7));
    CHECK_EQ_INT(te_module_reset_parameters(more), TE_OK);
    CHECK(test_read(te_module_parameter(more, "table"))[1] == 7);
    te_module_destroy(more);
    sum = 0;
    w = test_read(te_module_parameter(own, "weight"));
    for (int i = 0; i < IN * OUT; i++) sum += (double)w[i] * w[i];
    CHECK_MSG(fabs(sqrt(sum / (IN * OUT)) / 0.023 - 1) < 4 / sqrt(2.0 * IN * OUT), "standard deviation %g", sqrt(sum / (IN * OUT)));
    /* torch stays in high precision under a recipe, te does not; with the same weight both are one product without */
    te_tensor_fill(te_module_parameter(torch, "bias"), 0);
    te_tensor_copy(te_module_parameter(own, "weight"), te_module_parameter(torch, "weight"));
    te_tensor *plain = te_forward(torch, x);
    CHECK(same(plain, te_forward(own, x)));
    te_autocast_begin(te, &(te_autocast_desc){.recipe = &recipe});
    CHECK(same(plain, te_forward(torch, x)) && !same(plain, te_forward(own, x)));
    te_autocast_end(te);
    te_module_destroy(torch);
    te_module_destroy(own);
    /* nor is its weight stored quantized */
    te_quantized_model_init_begin(te, &(te_quantized_model_init_desc){.recipe = &recipe});
    torch = linear_of(te, TE_LINEAR_TORCH, IN, OUT, 0, false);
    own = linear_of(te, TE_LINEAR_TE, IN, OUT, 0, false);
    te_quantized_model_init_end(te);
    CHECK(!te_tensor_is_quantized(te_module_parameter(torch, "weight")) && te_tensor_is_quantized(te_module_parameter(own, "weight")));
    te_module_destroy(torch);
    te_module_destroy(own);
    /* gradients */
    torch = linear_of(te, 0, 4, 3, TE_F32, true);
    CHECK(te_ctx_is_cuda(te) || strcmp(te_module_get_class(torch)->name, "TorchLinear") == 0);
    CHECK(te_backward(te_sum_all(te_forward(torch, te_tensor_full(te, TE_F32, SHAPE(2, 4), 3)))) == TE_OK);
    CHECK(test_read(te_tensor_grad(te_module_parameter(torch, "weight")))[0] == 6 && test_read(te_tensor_grad(te_module_parameter(torch, "bias")))[2] == 2);
    te_module_destroy(torch);
    CHECK_OK(te);
}

TE_TEST(backends_that_are_not_there_are_refused_by_name) {
    te_ctx *te = test_context("cpu");
    CHECK(!linear_of(te, TE_LINEAR_QUACK, 8, 16, 0, true));
    CHECK_ERROR(te, TE_ERR_UNSUPPORTED, "te_initialize_linear_module: linear='quack'");
    CHECK(!norm_of(te, TE_RMS_NORM_QUACK, 8, 1e-6f, 0));
    CHECK_ERROR(te, TE_ERR_UNSUPPORTED, "te_initialize_rms_norm_module: rms_norm='quack'");
    CHECK(!linear_of(te, (te_linear_backend)7, 8, 16, 0, false));
    CHECK_ERROR(te, TE_ERR_INVALID, "linear is 7, no backend; te and torch are possible");
    CHECK(!norm_of(te, (te_rms_norm_backend)-1, 8, 0, 0));
    CHECK_ERROR(te, TE_ERR_INVALID, "rms_norm is -1, no backend; te, torch and torch_fp32 are possible");
    CHECK(!linear_of(te, TE_LINEAR_TORCH, 0, 16, 0, false));
    CHECK_ERROR(te, TE_ERR_INVALID, "te_initialize_linear_module: sizes 0 and 16");
    CHECK(!norm_of(te, 0, 8, 0, TE_F8E4M3));
    CHECK_ERROR(te, TE_ERR_DTYPE, "te_initialize_rms_norm_module: params_dtype e4m3");
}

/* ---- shapes without memory ---- */

static bool is_shape(te_tensor *x, te_dtype dtype, int64_t a, int64_t b, int64_t c) {
    const int64_t *s = te_tensor_shape(x);
    return te_is_tensor_unallocated(x) && x && te_tensor_dtype(x) == dtype && te_tensor_ndim(x) == 3 && s[0] == a && s[1] == b && s[2] == c;
}

/* A9. */
TE_TEST_DEVICES(shapes_pass_through_norm_linear_norm) {
    static const struct {
        te_rms_norm_backend norm;
        te_linear_backend linear;
    } kinds[] = {{TE_RMS_NORM_TE, TE_LINEAR_TE}, {TE_RMS_NORM_TORCH_FP32, TE_LINEAR_TE}, {TE_RMS_NORM_TORCH, TE_LINEAR_TORCH}};
    te_recipe recipe = te_recipe_current_scaling();
    for (int i = 0; i < COUNT(kinds); i++) {
        te_linear_module_desc d = {.linear_impl = kinds[i].linear, .in_features = 8, .out_features = 16, .bias = true, .device = TE_PARAMS_META};
        te_rms_norm_module_desc a = {.rms_norm_impl = kinds[i].norm, .dim = 8, .device = TE_PARAMS_META, .name = "before"}, b = a;
        tracing t = {0};
        b.dim = 16;
        b.name = "after";
        test_case("rms_norm %s, linear %s", te_backend_name("rms_norm", (int)a.rms_norm_impl), te_backend_name("linear", (int)d.linear_impl));
        te_module *m = te_sequential_create(te, NULL, 0);
        te_module_add_child(m, NULL, te_initialize_rms_norm_module(te, &a));
        te_module_add_child(m, NULL, te_initialize_linear_module(te, &d));
        te_module_add_child(m, NULL, te_initialize_rms_norm_module(te, &b));
        REQUIRE_OK(te);
        CHECK(te_is_tensor_unallocated(te_module_parameter(te_module_find(m, "linear"), "weight")));
        te_tensor *shape = te_tensor_describe(te, TE_F32, SHAPE(2, 5, 8)); /* another format than the parameters' */
        te_set_trace(te, note, &t);
        CHECK(is_shape(te_forward(m, shape), TE_F32, 2, 5, 16));
        te_autocast_begin(te, &(te_autocast_desc){.recipe = &recipe});
        CHECK(is_shape(te_forward(m, shape), TE_F32, 2, 5, 16));
        te_autocast_end(te);
        te_module_set_checkpoint(te_module_find(m, "linear"), true);
        CHECK(is_shape(te_forward(m, shape), TE_F32, 2, 5, 16));
        te_module_set_checkpoint(te_module_find(m, "linear"), false);
        CHECK_OK(te);
        CHECK(!te_forward(m, te_tensor_describe(te, TE_BF16, SHAPE(2, 5, 9))));
        CHECK_ERROR(te, TE_ERR_SHAPE, "the input is [2, 5, 9], a shape without memory; [.., 8] is needed");
        CHECK_EQ_INT(t.all, 0);
        /* with memory */
        CHECK(te_module_reset_parameters(m) == TE_OK && !te_is_tensor_unallocated(te_module_parameter(te_module_find(m, "linear"), "weight")));
        te_tensor *y = te_forward(m, te_tensor_from_f32(te, TE_BF16, SHAPE(2, 5, 8), test_normal(80, 6)));
        CHECK(y && !te_is_tensor_unallocated(y) && te_tensor_dtype(y) == TE_BF16 && te_tensor_numel(y) == 160 && t.all > 0);
        CHECK(is_shape(te_forward(m, shape), TE_F32, 2, 5, 16)); /* shapes still pass */
        te_set_trace(te, NULL, NULL);
        te_module_destroy(m);
    }
    CHECK_OK(te);
}

TE_TEST_DEVICES(empty_tensors_are_real_unless_told_otherwise) {
    te_module *m = linear_of(te, TE_LINEAR_TE, 8, 16, TE_F32, false);
    te_tensor *none = te_tensor_set_requires_grad(te_tensor_empty(te, TE_F32, SHAPE(2, 0, 8)), true), *y;
    CHECK(!te_is_tensor_unallocated(none) && te_is_tensor_unallocated(NULL) && te_is_tensor_unallocated(te_tensor_describe(te, TE_F32, SHAPE(3))));
    y = te_forward(m, none);
    CHECK(te_tensor_shape(y)[2] == 16 && te_tensor_numel(y) == 0 && te_tensor_requires_grad(y) && !te_is_tensor_unallocated(y));
    CHECK(te_backward(te_sum_all(y)) == TE_OK && te_tensor_grad(te_module_parameter(m, "weight")));
    for (int i = 0; i < 128; i++) CHECK(test_read(te_tensor_grad(te_module_parameter(m, "weight")))[i] == 0);
    te_set_empty_is_unallocated(te, true); /* Automodel's way */
    CHECK(te_is_tensor_unallocated(none));
    y = te_forward(m, none);
    CHECK(y && te_tensor_shape(y)[2] == 16 && te_tensor_numel(y) == 0 && !te_tensor_requires_grad(y));
    te_set_empty_is_unallocated(te, false);
    CHECK(!te_is_tensor_unallocated(none));
    te_module_destroy(m);
    CHECK_OK(te);
}

TE_TEST(shapes_of_options_that_add_outputs) {
    te_ctx *te = test_context("cpu");
    te_module *m = te_linear_create(te, &(te_linear_desc){.in_features = 8, .out_features = 16, .gemm = {.return_bias = true}});
    te_forward_args args = {.input = te_tensor_describe(te, TE_BF16, SHAPE(8))};
    te_tensor *y = te_forward_with(m, &args);
    CHECK(te_is_tensor_unallocated(y) && te_tensor_ndim(y) == 1 && te_tensor_shape(y)[0] == 16);
    CHECK(args.outputs.bias && te_is_tensor_unallocated(args.outputs.bias) && te_tensor_shape(args.outputs.bias)[0] == 16);
    te_module_destroy(m);
    /* ranks: what an exchange does to the first dimension */
    for (int mode = TE_PARALLEL_COLUMN; mode <= TE_PARALLEL_ROW; mode++) {
        te_parallel_options two = {.tp_size = 2, .parallel_mode = (te_parallel_mode)mode, .sequence_parallel = true};
        m = te_linear_create(te, &(te_linear_desc){.in_features = 8, .out_features = 16, .parallel = two});
        y = te_forward(m, te_tensor_describe(te, TE_BF16, SHAPE(6, mode == TE_PARALLEL_ROW ? 4 : 8)));
        CHECK(y && te_tensor_shape(y)[0] == (mode == TE_PARALLEL_ROW ? 3 : 12) && te_tensor_shape(y)[1] == (mode == TE_PARALLEL_ROW ? 16 : 8));
        te_module_destroy(m);
    }
    CHECK_OK(te);
    /* other modules refuse, by name */
    m = te_layernorm_linear_create(te, &(te_layernorm_linear_desc){.in_features = 8, .out_features = 16});
    CHECK(!te_forward(m, te_tensor_describe(te, TE_BF16, SHAPE(2, 8))));
    CHECK_ERROR(te, TE_ERR_STATE, "has no memory");
    te_module_destroy(m);
}

/* ---- the flags of a step ---- */

typedef struct step_notes {
    te_ctx *te;
    char text[64];
} step_notes;
static void note_flags(step_notes *n) {
    snprintf(n->text + strlen(n->text), sizeof(n->text) - strlen(n->text), "(%c,%c)", te_step_get_is_optim_step(n->te) ? 'T' : 'F',
             te_step_get_is_first_microbatch(n->te) == TE_MICROBATCH_FIRST ? 'T' : te_step_get_is_first_microbatch(n->te) == TE_MICROBATCH_LATER ? 'F' : '-');
}
static te_result count_begin(te_module *part, void *user) {
    (void)part;
    ((int *)user)[0]++;
    return TE_OK;
}
static te_result count_final(te_module *part, void *user) {
    (void)part;
    ((int *)user)[1]++;
    return TE_OK;
}
static te_result fails(te_module *part, void *user) {
    (void)part, (void)user;
    return TE_ERR_DEVICE;
}

TE_TEST(step_flags_follow_the_microbatches) {
    te_ctx *te = test_context("cpu"), *other = test_context("cpu");
    int counts[2] = {0, 0};
    te_step_hooks hooks = {count_begin, count_final, counts}, half = {NULL, count_final, counts}, bad = {fails, NULL, NULL};
    te_module *parts[4] = {te_identity_create(te, "a"), NULL, te_identity_create(te, "b"), te_identity_create(te, "c")};
    te_module_set_step_hooks(parts[0], &hooks);
    te_module_set_step_hooks(parts[2], &half);
    CHECK(te_step_get_is_first_microbatch(te) == TE_MICROBATCH_NONE && !te_step_get_is_optim_step(te));
    for (int n = 3; n >= 1; n -= 2) {
        step_notes notes = {te, ""};
        te_prepare_for_grad_accumulation(te, parts, 4);
        for (int i = 0; i < n; i++) {
            if (i == n - 1) te_prepare_for_final_backward(te, parts, 4);
            note_flags(&notes);
            if (i == 0) te_prepare_after_first_microbatch(te);
        }
        CHECK_MSG(strcmp(notes.text, n == 3 ? "(F,T)(F,F)(T,F)" : "(T,T)") == 0, "%d microbatches: %s", n, notes.text);
    }
    CHECK(counts[0] == 2 && counts[1] == 4);
    te_prepare_for_grad_accumulation(te, NULL, 0); /* with pipeline parallelism the caller sees to its parts */
    te_prepare_for_final_backward(te, NULL, 0);
    CHECK(counts[0] == 2 && counts[1] == 4 && te_step_get_is_optim_step(te));
    /* each context has its own */
    CHECK(te_step_get_is_first_microbatch(other) == TE_MICROBATCH_NONE && !te_step_get_is_optim_step(other));
    te_step_set_is_first_microbatch(other, TE_MICROBATCH_LATER);
    CHECK(te_step_get_is_first_microbatch(te) == TE_MICROBATCH_FIRST);
    te_step_set_is_first_microbatch(te, TE_MICROBATCH_NONE);
    CHECK(te_step_get_is_first_microbatch(te) == TE_MICROBATCH_NONE);
    te_step_set_is_first_microbatch(te, (te_microbatch)3);
    CHECK_ERROR(te, TE_ERR_INVALID, "te_step_set_is_first_microbatch: 3");
    CHECK(te_step_get_is_first_microbatch(te) == TE_MICROBATCH_NONE);
    te_module_set_step_hooks(parts[0], NULL);
    te_module_set_step_hooks(parts[3], &bad);
    CHECK(te_prepare_for_grad_accumulation(te, parts, 4) == TE_ERR_DEVICE && counts[0] == 2);
    CHECK_ERROR(te, TE_ERR_DEVICE, "te_prepare_for_grad_accumulation: the hook of \"c\" returned TE_ERR_DEVICE");
    CHECK(te_prepare_for_final_backward(te, NULL, 2) == TE_ERR_INVALID);
    CHECK_ERROR(te, TE_ERR_INVALID, "2 parts, and parts is NULL");
    CHECK(te_prepare_for_grad_accumulation(NULL, NULL, 0) == TE_ERR_STATE);
    for (int i = 0; i < 4; i++) te_module_destroy(parts[i]);
}

/* Casts of the weight in one call. */
static int casts_of(te_ctx *te, te_module *m, te_tensor *weight, te_forward_args *args) {
    tracing t = {.weight = weight};
    te_set_trace(te, note, &t);
    CHECK(te_forward_with(m, args) != NULL);
    te_set_trace(te, NULL, NULL);
    return t.weights;
}
TE_TEST_DEVICES(calls_without_a_microbatch_take_the_contexts) {
    enum { N = 32 };
    te_recipe recipe = te_recipe_current_scaling();
    const int64_t splits[2] = {16, 16};
    for (int kind = 0; kind < 3; kind++) {
        te_module *m = kind == 0   ? te_linear_create(te, &(te_linear_desc){.in_features = N, .out_features = N, .gemm.no_bias = true})
                       : kind == 1 ? te_grouped_linear_create(te, &(te_grouped_linear_desc){.num_gemms = 2, .in_features = N, .out_features = N, .gemm.no_bias = true})
                                   : te_layernorm_linear_create(te, &(te_layernorm_linear_desc){.in_features = N, .out_features = N, .gemm.no_bias = true});
        te_tensor *weight = te_module_parameter(m, kind == 1 ? "weight0" : "weight");
        te_forward_args args = {.input = te_tensor_from_f32(te, TE_BF16, SHAPE(N, N), test_normal(N * N, 8)), .m_splits = kind == 1 ? splits : NULL};
        test_case("%s", te_module_get_class(m)->name);
        te_autocast_begin(te, &(te_autocast_desc){.recipe = &recipe});
        CHECK_EQ_INT(casts_of(te, m, weight, &args), 1); /* none given: each call */
        CHECK_EQ_INT(casts_of(te, m, weight, &args), 1);
        te_step_set_is_first_microbatch(te, TE_MICROBATCH_FIRST);
        CHECK_EQ_INT(casts_of(te, m, weight, &args), 1);
        te_step_set_is_first_microbatch(te, TE_MICROBATCH_LATER);
        CHECK_EQ_INT(casts_of(te, m, weight, &args), kind == 2); /* Automodel leaves LayerNormLinear alone */
        args.is_first_microbatch = TE_MICROBATCH_FIRST; /* given: it counts */
        CHECK_EQ_INT(casts_of(te, m, weight, &args), 1);
        te_step_set_is_first_microbatch(te, TE_MICROBATCH_FIRST);
        args.is_first_microbatch = TE_MICROBATCH_LATER;
        CHECK_EQ_INT(casts_of(te, m, weight, &args), 0);
        te_step_set_is_first_microbatch(te, TE_MICROBATCH_NONE);
        te_autocast_end(te);
        te_module_destroy(m);
    }
    CHECK_OK(te);
}

/* ---- A1, A2: kept weights ---- */

/* Four microbatches; bits of their outputs and of the gradient; casts of the weight. */
static int accumulate(te_ctx *te, const te_fp8_config *fp8, bool flags, te_tensor *out[5]) {
    enum { N = 128 };
    tracing t = {0};
    te_seed(te, 77);
    te_module *m = linear_of(te, TE_LINEAR_TE, N, N, TE_BF16, false);
    t.weight = te_module_parameter(m, "weight");
    te_set_trace(te, note, &t);
    if (flags) te_prepare_for_grad_accumulation(te, &m, 1);
    for (int i = 0; i < 4; i++) {
        te_tensor *x = te_tensor_from_f32(te, TE_BF16, SHAPE(32, N), test_normal(32 * N, (uint64_t)(20 + i)));
        if (flags && i == 3) te_prepare_for_final_backward(te, &m, 1);
        te_fp8_maybe_autocast_begin(te, fp8);
        out[i] = te_forward(m, x);
        te_backward_from(out[i], x);
        te_fp8_maybe_autocast_end(te);
        if (flags && i == 0) te_prepare_after_first_microbatch(te);
    }
    te_set_trace(te, NULL, NULL);
    te_step_set_is_first_microbatch(te, TE_MICROBATCH_NONE);
    out[4] = te_tensor_cast(te_tensor_grad(t.weight), TE_F32);
    te_module_destroy(m);
    return t.weights;
}
TE_TEST_DEVICES(microbatches_share_one_quantized_weight_to_the_bit) {
    static const te_fp8_config configs[] = {{.recipe = TE_FP8_CURRENT}, {.recipe = TE_FP8_BLOCK}};
    for (int c = 0; c < COUNT(configs); c++) {
        te_tensor *once[5], *each[5];
        test_case("%s", c ? "block" : "current");
        CHECK_EQ_INT(accumulate(te, &configs[c], true, once), 1);
        CHECK_EQ_INT(accumulate(te, &configs[c], false, each), 4);
        for (int i = 0; i < 5; i++) CHECK_MSG(same(once[i], each[i]), i < 4 ? "the output of microbatch %d" : "the gradient (%d)", i);
    }
    CHECK_OK(te);
}

TE_TEST_DEVICES(a_step_of_the_optimizer_makes_kept_weights_anew) {
    enum { N = 64 };
    te_fp8_config fp8 = {0};
    tracing t = {0};
    te_module *m = linear_of(te, TE_LINEAR_TE, N, N, TE_BF16, false);
    te_optimizer *adam = te_fused_adam_create(te, m, &(te_fused_adam_desc){.lr = 0.1f});
    te_tensor *x = te_tensor_from_f32(te, TE_BF16, SHAPE(16, N), test_normal(16 * N, 30)), *before, *after, *fresh;
    te_prepare_for_grad_accumulation(te, &m, 1);
    te_fp8_maybe_autocast_begin(te, &fp8);
    before = te_forward(m, x);
    te_backward_from(before, x);
    te_fp8_maybe_autocast_end(te);
    te_prepare_after_first_microbatch(te);
    CHECK(te_optimizer_step(adam) == TE_OK);
    /* validation: Automodel's flag still says LATER */
    CHECK(te_step_get_is_first_microbatch(te) == TE_MICROBATCH_LATER);
    te_no_grad_begin(te);
    te_fp8_maybe_autocast_begin(te, &fp8);
    t.weight = te_module_parameter(m, "weight");
    te_set_trace(te, note, &t);
    after = te_forward(m, x);
    te_set_trace(te, NULL, NULL);
    te_step_set_is_first_microbatch(te, TE_MICROBATCH_NONE);
    fresh = te_forward(m, x);
    te_fp8_maybe_autocast_end(te);
    te_no_grad_end(te);
    CHECK(t.weights == 1 && same(after, fresh) && !same(after, before));
    te_optimizer_destroy(adam);
    te_module_destroy(m);
    CHECK_OK(te);
}
