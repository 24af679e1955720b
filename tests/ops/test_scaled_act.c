/* tests/ops/test_scaled_act.c: activations times one number for each row, and te_mul: float64 formulas, finite differences, the GPU against the CPU. */
#include "../te_test.h"

typedef struct scaled_case {
    int64_t m, n, block; /* block: of interleaved halves; 0: one half behind the other */
    te_activation act;
    te_dtype x, scales, out;
    bool odd; /* addresses that are no multiples of 16 */
} scaled_case;
static bool gated(const scaled_case *c) { return te_activation_is_gated(c->act); }
static int64_t width_of(const scaled_case *c) { return gated(c) ? 2 * c->n : c->n; }

typedef struct scaled_result {
    float *y, *dx, *ds;
} scaled_result;
typedef struct scaled_data {
    const float *x, *dy, *scales;
} scaled_data;

static scaled_data make_data(const scaled_case *c) {
    int64_t count = c->m * width_of(c);
    float *x = test_normal(count, 11);
    scaled_data d;
    for (int64_t i = 0; i < count; i++) x[i] *= 3;
    d.x = test_rounded(c->x, x, count);
    d.dy = test_rounded(c->x, test_normal(c->m * c->n, 12), c->m * c->n);
    d.scales = test_rounded(c->scales, test_uniform(c->m, 13, -0.5f, 1), c->m);
    return d;
}
static scaled_result run(te_ctx *te, const scaled_case *c, const scaled_data *d) {
    te_op_scaled_act_fwd_args f = {0};
    te_op_scaled_act_bwd_args b = {0};
    scaled_result r;
    f.x = b.x = test_input(te, c->x, c->m, width_of(c), d->x, c->odd);
    f.act_scales = b.act_scales = test_tensor(te, c->scales, SHAPE(c->m), d->scales);
    f.y = test_output(te, c->out, c->m, c->n, c->odd);
    f.activation = b.activation = c->act;
    f.activation_params.glu_interleave_size = b.activation_params.glu_interleave_size = c->block;
    te_op_scaled_act_fwd(te, &f);
    b.dy = test_tensor(te, c->x, SHAPE(c->m, c->n), d->dy);
    b.dx = test_output(te, c->out, c->m, width_of(c), c->odd);
    b.dact_scales = test_guarded(te, TE_F32, SHAPE(c->m));
    te_op_scaled_act_bwd(te, &b);
    CHECK_OK(te);
    r.y = test_read(f.y);
    r.dx = test_read(b.dx);
    r.ds = test_read(b.dact_scales);
    b.dact_scales = NULL; /* and alone */
    b.dx = test_output(te, c->out, c->m, width_of(c), c->odd);
    te_op_scaled_act_bwd(te, &b);
    CHECK_OK(te);
    CHECK_BYTES("dx alone", test_read(b.dx), r.dx, (size_t)(c->m * width_of(c)) * 4);
    return r;
}

/* Returns the results of the plain activation in f32, times the number of each row. */
static scaled_result expected(te_ctx *cpu, const scaled_case *c, const scaled_data *d) {
    te_op_act_fwd_args f = {0};
    te_op_act_bwd_args b = {0};
    scaled_result r;
    f.x = b.x = test_tensor(cpu, c->x, SHAPE(c->m, width_of(c)), d->x);
    f.y = test_guarded(cpu, TE_F32, SHAPE(c->m, c->n));
    b.dy = test_tensor(cpu, c->x, SHAPE(c->m, c->n), d->dy);
    b.dx = test_guarded(cpu, TE_F32, SHAPE(c->m, width_of(c)));
    f.activation = b.activation = c->act;
    f.activation_params.glu_interleave_size = b.activation_params.glu_interleave_size = c->block;
    te_op_act_fwd(cpu, &f);
    te_op_act_bwd(cpu, &b);
    CHECK_OK(cpu);
    r.y = test_read(f.y);
    r.dx = test_read(b.dx);
    r.ds = test_floats(c->m);
    for (int64_t row = 0; row < c->m; row++) {
        double sum = 0;
        for (int64_t k = 0; k < c->n; k++) sum += (double)d->dy[row * c->n + k] * r.y[row * c->n + k];
        r.ds[row] = (float)sum;
        for (int64_t k = 0; k < c->n; k++) r.y[row * c->n + k] *= d->scales[row];
        for (int64_t k = 0; k < width_of(c); k++) r.dx[row * width_of(c) + k] *= d->scales[row];
    }
    return r;
}

/* f32: units in the last place of the largest intermediate. Others: one rounding. */
static double rtol_of(te_dtype dtype) { return dtype == TE_F32 ? 4e-6 : dtype == TE_F16 ? 1e-3 : 8e-3; }

TE_TEST_DEVICES(scaled_activations) {
    static const int64_t shapes[][3] = {{1, 1, 0}, {3, 7, 0}, {5, 64, 0}, {5, 64, 16}, {17, 1000, 0}, {9, 96, 3}, {2, 4099, 0}, {300, 40, 8}, {0, 8, 0}, {4, 0, 0}};
    static const te_dtype formats[] = {TE_BF16, TE_F32, TE_F16};
    te_ctx *cpu = test_context("cpu");
    int n = 0;
    for (int act = TE_GELU; act < TE_ACTIVATION_COUNT; act++)
        for (int i = 0; i < COUNT(shapes); i++)
            for (int k = 0; k < 4; k++) {
                if (n++ % test_every_odd(5)) continue;
                scaled_case c = {shapes[i][0], shapes[i][1], shapes[i][2], (te_activation)act, formats[k % 3], formats[(k + i) % 3], k == 3 ? TE_F32 : formats[k % 3], (k + i) % 3 == 1};
                if (!gated(&c)) c.block = 0;
                test_case("activation %d [%d, %d] blocks of %d, %s times %s to %s, misaligned %d", act, (int)c.m, (int)c.n, (int)c.block, te_dtype_name(c.x), te_dtype_name(c.scales),
                          te_dtype_name(c.out), c.odd);
                scaled_data d = make_data(&c);
                scaled_result got = run(te, &c, &d), want = expected(cpu, &c, &d);
                CHECK_CLOSE("y", got.y, want.y, c.m * c.n, rtol_of(c.out), 6e-6);
                CHECK_CLOSE("dx", got.dx, want.dx, c.m * width_of(&c), rtol_of(c.out), 2e-5);
                CHECK_CLOSE("dact_scales", got.ds, want.ds, c.m, 1e-5, 1e-5 * (1 + (double)c.n)); /* f32 sums of up to thousands of numbers around 1 to 10 */
            }
}

/* f64, written down: SwiGLU and squared ReLU. */
TE_TEST_DEVICES(scaled_activation_by_hand) {
    const float x[2][4] = {{0.5f, -2, 3, 0.25f}, {-1, 4, -0.5f, 2}}, p[2] = {0.75f, -0.5f}, dy[2][4] = {{1, -2, 0.5f, 3}, {-1, 0.25f, 2, 1}};
    te_tensor *in = test_tensor(te, TE_F32, SHAPE(2, 4), x[0]), *scales = test_tensor(te, TE_F32, SHAPE(2, 1), p);
    float y[2][4], dx[2][4], dp[2];
    for (int glu = 0; glu < 2; glu++) {
        const int n = glu ? 2 : 4;
        memset(dp, 0, sizeof dp);
        for (int r = 0; r < 2; r++)
            for (int c = 0; c < n; c++) {
                double a = x[r][c], s = 1 / (1 + exp(-a)), f = glu ? a * s : a > 0 ? a * a : 0, slope = glu ? s + a * s * (1 - s) : a > 0 ? 2 * a : 0, b = glu ? x[r][2 + c] : 1, g = dy[r][c];
                (&y[0][0])[r * n + c] = (float)(f * b * p[r]);
                dx[r][c] = (float)(g * p[r] * slope * b);
                if (glu) dx[r][2 + c] = (float)(g * p[r] * f);
                dp[r] += (float)(g * f * b);
            }
        te_tensor_set_requires_grad(in, true), te_tensor_set_requires_grad(scales, true);
        te_tensor_zero_grad(in), te_tensor_zero_grad(scales);
        te_tensor *out = te_scaled_activate(in, scales, glu ? TE_SWIGLU : TE_SRELU, NULL);
        float packed[8];
        for (int i = 0; i < 2 * n; i++) packed[i] = dy[i / n][i % n];
        te_backward_from(out, test_tensor(te, TE_F32, SHAPE(2, n), packed));
        REQUIRE_OK(te);
        CHECK_TENSOR(out, &y[0][0], 2e-6, 1e-6); /* a sigmoid in f32 */
        CHECK_TENSOR(te_tensor_grad(in), &dx[0][0], 2e-6, 1e-6);
        CHECK_TENSOR(te_tensor_grad(scales), dp, 2e-6, 2e-6);
        CHECK_EQ_INT(te_tensor_ndim(te_tensor_grad(scales)), 2);
    }
}

/* ---- gradients ---- */

static te_tensor *scaled(te_ctx *te, te_tensor *const *in, void *user) {
    const te_activation act = *(const te_activation *)user;
    const te_activation_params params = {.limit = act == TE_CLAMPED_SWIGLU ? 9.0f : 0, .glu_interleave_size = te_activation_is_gated(act) ? 4 : 0};
    (void)te;
    return te_scaled_activate(in[0], in[1], act, &params);
}
TE_TEST_DEVICES(scaled_activation_gradients) {
    static te_activation acts[] = {TE_SWIGLU, TE_SRELU, TE_CLAMPED_SWIGLU, TE_GELU, TE_GLU};
    for (int i = 0; i < COUNT(acts); i++) {
        te_tensor *in[2] = {te_tensor_uniform(te, TE_F32, SHAPE(3, 5, 24), 0.1f, 2), te_tensor_uniform(te, TE_F32, SHAPE(3, 5, 1), 0.2f, 1)}; /* off the kinks */
        test_case("activation %d", (int)acts[i]);
        test_check_gradients(te, scaled, 2, in, &acts[i], 1e-2, 1e-3);
    }
}

static te_tensor *product(te_ctx *te, te_tensor *const *in, void *user) { return (void)te, (void)user, te_mul(in[0], in[1]); }
TE_TEST_DEVICES(mul_gradients) {
    te_tensor *x = te_tensor_normal(te, TE_F32, SHAPE(2, 5, 7), 0, 1), *column = te_tensor_normal(te, TE_F32, SHAPE(4, 1), 0, 1);
    te_tensor *with[] = {te_tensor_normal(te, TE_F32, SHAPE(2, 5, 7), 0, 1), te_tensor_normal(te, TE_F32, SHAPE(2, 5, 1), 0, 1), te_tensor_normal(te, TE_F32, SHAPE(2, 5), 0, 1)};
    for (int i = 0; i < COUNT(with); i++) {
        te_tensor *in[2] = {x, with[i]};
        test_case("way %d", i);
        test_check_gradients(te, product, 2, in, NULL, 1e-2, 1e-3);
    }
    te_tensor *one[2] = {column, te_tensor_normal(te, TE_F32, SHAPE(4), 0, 1)};
    test_check_gradients(te, product, 2, one, NULL, 1e-2, 1e-3);
    /* x * x: both gradients meet; views are taken as they are */
    te_tensor *square = te_tensor_set_requires_grad(te_tensor_normal(te, TE_F32, SHAPE(3, 4), 0, 1), true), *turned = te_tensor_transpose(square, 0, 1);
    te_backward_from(te_mul(turned, turned), te_tensor_full(te, TE_F32, SHAPE(4, 3), 1));
    REQUIRE_OK(te);
    float *v = test_copy(test_read(square), 12);
    for (int i = 0; i < 12; i++) v[i] *= 2;
    CHECK_BYTES("2 x", test_read(te_tensor_grad(square)), v, sizeof(float) * 12);
}

/* f32 probabilities of bf16 rows: they are rounded to bf16 first, as te.ops have it, and get a gradient of their own format. */
TE_TEST_DEVICES(scaled_activation_of_other_formats) {
    enum { M = 9, N = 16 };
    const float *x = test_rounded(TE_BF16, test_normal(M * 2 * N, 1), M * 2 * N), *p = test_uniform(M, 2, 0, 1);
    te_tensor *y[2], *probs[2] = {test_tensor(te, TE_F32, SHAPE(M), p), test_tensor(te, TE_BF16, SHAPE(M), p)};
    for (int i = 0; i < 2; i++) {
        te_tensor_set_requires_grad(probs[i], true);
        y[i] = te_scaled_activate(test_tensor(te, TE_BF16, SHAPE(M, 2 * N), x), probs[i], TE_SWIGLU, NULL);
        te_backward_from(y[i], te_tensor_full(te, TE_BF16, SHAPE(M, N), 1));
        REQUIRE_OK(te);
        CHECK_EQ_INT(te_tensor_dtype(te_tensor_grad(probs[i])), i ? TE_BF16 : TE_F32);
    }
    CHECK_BYTES("y", test_read_bytes(y[0]), test_read_bytes(y[1]), te_tensor_bytes(y[0]));
    CHECK_BYTES("dprobs", test_read(te_tensor_grad(probs[0])), test_read(te_tensor_grad(probs[1])), M * sizeof(float));
    /* te_mul rounds once instead */
    te_tensor *half = te_tensor_full(te, TE_BF16, SHAPE(M, N), 1), *product = te_mul(half, probs[0]);
    REQUIRE_OK(te);
    for (int i = 0; i < M; i++) CHECK(test_read(product)[i * N] == test_rounded(TE_BF16, p, M)[i]);
}

TE_TEST(scaled_activation_refused) {
    te_ctx *te = test_context("cpu");
    te_tensor *x = te_tensor_zeros(te, TE_F32, SHAPE(2, 3, 8)), *p = te_tensor_zeros(te, TE_F32, SHAPE(5)), *fit = te_tensor_zeros(te, TE_F32, SHAPE(6));
    CHECK(!te_scaled_activate(x, p, TE_SWIGLU, NULL));
    CHECK_ERROR(te, TE_ERR_SHAPE, "the input is [2, 3, 8] and the probabilities are [5]; one for each of its 6 rows is needed");
    CHECK(!te_scaled_activate(te_tensor_zeros(te, TE_F32, SHAPE(6, 7)), fit, TE_SWIGLU, NULL));
    CHECK_ERROR(te, TE_ERR_SHAPE, "te_scaled_activate: the input is [6, 7]; a gated activation needs an even last size");
    CHECK(!te_scaled_activate(x, te_tensor_zeros(te, TE_I32, SHAPE(6)), TE_SWIGLU, NULL));
    CHECK_ERROR(te, TE_ERR_DTYPE, "te_scaled_activate: the input is i32");
    CHECK(!te_scaled_activate(x, fit, (te_activation)77, NULL));
    CHECK_ERROR(te, TE_ERR_INVALID, "scaled_act_fwd: activation is 77");
    CHECK(!te_scaled_activate(x, fit, TE_SRELU, &(te_activation_params){.glu_interleave_size = 2}));
    CHECK_ERROR(te, TE_ERR_INVALID, "glu_interleave_size is 2; it belongs to gated activations");
    CHECK(!te_scaled_activate(x, fit, TE_SWIGLU, &(te_activation_params){.glu_interleave_size = 3}));
    CHECK_ERROR(te, TE_ERR_SHAPE, "glu_interleave_size is 3 and a half has 4 columns");
    CHECK(!te_scaled_activate(NULL, fit, TE_SWIGLU, NULL) && !te_scaled_activate(x, NULL, TE_SWIGLU, NULL));
    CHECK_OK(te);
    CHECK(!te_mul(x, p));
    CHECK_ERROR(te, TE_ERR_SHAPE, "te_mul: [2, 3, 8] and [5]; the second has the first one's shape, or one number for each of its rows");
    CHECK(!te_mul(x, fit)); /* six numbers, but of another shape */
    CHECK_ERROR(te, TE_ERR_SHAPE, "te_mul: [2, 3, 8] and [6]");
    CHECK(!te_mul(x, te_tensor_zeros(te, TE_I32, SHAPE(2, 3))));
    CHECK_ERROR(te, TE_ERR_DTYPE, "te_mul");
    CHECK(!te_mul(NULL, x) && !te_mul(x, NULL));
    CHECK_OK(te);
    te_op_scaled_act_bwd_args b = {.dy = te_tensor_zeros(te, TE_F32, SHAPE(6, 4)), .x = te_tensor_zeros(te, TE_F32, SHAPE(6, 8)), .act_scales = p, .activation = TE_SWIGLU};
    b.dx = te_tensor_zeros(te, TE_F32, SHAPE(6, 8));
    te_op_scaled_act_bwd(te, &b);
    CHECK_ERROR(te, TE_ERR_SHAPE, "scaled_act_bwd: act_scales is [5]; 6 elements are needed");
    b.act_scales = fit;
    b.dact_scales = p;
    te_op_scaled_act_bwd(te, &b);
    CHECK_ERROR(te, TE_ERR_SHAPE, "scaled_act_bwd: dact_scales is [5]; 6 elements are needed");
    b.dact_scales = NULL;
    b.dx = te_tensor_zeros(te, TE_F32, SHAPE(6, 4));
    te_op_scaled_act_bwd(te, &b);
    CHECK_ERROR(te, TE_ERR_SHAPE, "dx is [6, 4]");
    b.x = b.dx;
    te_op_scaled_act_bwd(te, &b);
    CHECK_ERROR(te, TE_ERR_SHAPE, "x is [6, 4] and dy is [6, 4]; x must be [6, 8]");
}

/* ---- a mixture of experts whose probabilities go into the activation ---- */

/* Between the experts' products, what te_moe_unpermute with merging probabilities does behind them: p (act(x W) V) = (p act(x W)) V. */
TE_TEST_DEVICES(probabilities_before_the_second_product) {
    enum { T = 20, E = 3, H = 16, F = 24 };
    te = test_exact(te); /* TF32 would round the product's input before the probability in one way, and after it in the other */
    te_tensor *x = te_tensor_normal(te, TE_F32, SHAPE(T, H), 0, 1), *out[2], *dprobs[2];
    te_grouped_linear_desc up = {.num_gemms = E, .in_features = H, .out_features = 2 * F}, down = {.num_gemms = E, .in_features = F, .out_features = H};
    up.gemm.params_dtype = down.gemm.params_dtype = TE_F32;
    up.gemm.no_bias = down.gemm.no_bias = true;
    up.gemm.init.std = down.gemm.init.std = 0.2f;
    te_module *first = te_grouped_linear_create(te, &up), *second = te_grouped_linear_create(te, &down);
    uint8_t mask[T * E];
    float weights[T * E];
    int64_t sizes[E] = {0};
    const float *drawn = test_uniform(T * E, 4, 0.1f, 1);
    for (int i = 0; i < T * E; i++) mask[i] = i % E != (i / E) % E, weights[i] = mask[i] ? drawn[i] : 0, sizes[i % E] += mask[i];
    for (int way = 0; way < 2; way++) {
        te_tensor *probs = te_tensor_set_requires_grad(test_tensor(te, TE_F32, SHAPE(T, E), weights), true), *map = te_tensor_from_host(te, TE_U8, SHAPE(T, E), mask), *permuted = NULL, *rows;
        te_moe_unpermute_desc u = {.merging_probs = way ? NULL : probs};
        te_tensor *y = way ? te_moe_permute_with_probs(x, probs, map, 2 * T, &permuted, &rows) : te_moe_permute(x, map, 2 * T, TE_MAP_MASK, &rows);
        y = te_forward_with(first, &(te_forward_args){.input = y, .m_splits = sizes});
        y = way ? te_scaled_activate(y, permuted, TE_SWIGLU, NULL) : te_activate(y, TE_SWIGLU, NULL);
        y = te_forward_with(second, &(te_forward_args){.input = y, .m_splits = sizes});
        out[way] = te_moe_unpermute(y, rows, &u);
        te_backward_from(out[way], te_tensor_full(te, TE_F32, SHAPE(T, H), 1));
        REQUIRE_OK(te);
        dprobs[way] = te_tensor_grad(probs);
    }
    CHECK_CLOSE("out", test_read(out[1]), test_read(out[0]), T * H, 1e-4, 1e-5); /* f32 sums of other terms */
    for (int i = 0; i < T * E; i++)
        if (mask[i]) CHECK_MSG(fabs((double)test_read(dprobs[1])[i] - test_read(dprobs[0])[i]) < 1e-4, "dprobs [%d]: %g, not %g", i, (double)test_read(dprobs[1])[i], (double)test_read(dprobs[0])[i]);
    te_module_destroy(first);
    te_module_destroy(second);
}
