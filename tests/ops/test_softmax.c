/* test_softmax.c: softmax of scores with masks and causal ones, forward and backward: float64 formulas, finite differences, odd sizes, what is refused. */
#include "../te_test.h"

typedef struct sm_case {
    int64_t b, h, s_q, s_k;
    te_dtype x, y;
    float scale;
    int mask; /* 0: none, 1: one for all batches, 2: one for each */
    bool causal, in_place, shifted;
} sm_case;

static void name_case(const sm_case *c) {
    test_case("b=%d h=%d s_q=%d s_k=%d x=%s y=%s scale=%g mask=%d%s%s%s", (int)c->b, (int)c->h, (int)c->s_q, (int)c->s_k, te_dtype_name(c->x), te_dtype_name(c->y),
              (double)c->scale, c->mask, c->causal ? " causal" : "", c->in_place ? " in_place" : "", c->shifted ? " shifted" : "");
}
/* Row 1 of each mask is masked throughout. */
static uint8_t *make_mask(const sm_case *c) {
    int64_t n = (c->mask == 2 ? c->b : 1) * c->s_q * c->s_k;
    uint8_t *mask = (uint8_t *)test_alloc((size_t)n + 1);
    const int64_t *random = test_integers(n, 9, 0, 3);
    for (int64_t i = 0; i < n; i++) mask[i] = random[i] == 0 || i / (c->s_k ? c->s_k : 1) % c->s_q == 1;
    return mask;
}
static bool hidden(const sm_case *c, int64_t row, int64_t column) { return c->causal && column > row % c->s_q + c->s_k - c->s_q; }
static bool masked(const sm_case *c, const uint8_t *mask, int64_t row, int64_t column) {
    int64_t batch = c->mask == 2 ? row / (c->h * c->s_q) : 0;
    return mask && mask[(batch * c->s_q + row % c->s_q) * c->s_k + column];
}
static double *reference(const sm_case *c, const float *x, const uint8_t *mask) {
    int64_t rows = c->b * c->h * c->s_q;
    double *y = test_doubles(rows * c->s_k + 1), scale = c->scale != 0 ? (double)c->scale : 1;
    for (int64_t r = 0; r < rows; r++) {
        double *p = y + r * c->s_k, most = -INFINITY, sum = 0;
        for (int64_t k = 0; k < c->s_k; k++) {
            p[k] = hidden(c, r, k) ? -INFINITY : masked(c, mask, r, k) ? -10000 : scale * (double)x[r * c->s_k + k];
            most = fmax(most, p[k]);
        }
        for (int64_t k = 0; k < c->s_k; k++) sum += p[k] = most == -INFINITY || (mask && most == -10000) ? 0 : exp(p[k] - most);
        for (int64_t k = 0; k < c->s_k && sum > 0; k++) p[k] /= sum;
    }
    return y;
}
static float *as_floats(const double *x, int64_t n) {
    float *f = test_floats(n);
    for (int64_t i = 0; i < n; i++) f[i] = (float)x[i];
    return f;
}
/* A unit in the last place of the format, and a few of f32. */
static double rounding(te_dtype dtype) { return (dtype == TE_BF16 ? 0x1p-8 : dtype == TE_F16 ? 0x1p-11 : 0) + 3e-6; }
/* f16 has no 1e-8. */
static double smallest(te_dtype dtype) { return dtype == TE_F16 ? 0x1p-25 : 1e-9; }

static te_tensor *guarded(te_ctx *te, const sm_case *c, te_dtype dtype, const float *values) {
    int64_t n = c->b * c->h * c->s_q * c->s_k;
    te_tensor *x = test_guarded(te, dtype, SHAPE(n + c->shifted));
    if (c->shifted) x = te_tensor_narrow(x, 0, 1, n);
    x = te_tensor_view(x, SHAPE(c->b, c->h, c->s_q, c->s_k));
    if (values) te_tensor_copy(x, test_tensor(te, dtype, SHAPE(c->b, c->h, c->s_q, c->s_k), values));
    return x;
}

TE_TEST_DEVICES(softmax_of_scores) {
    static const sm_case cases[] = {
        {2, 3, 5, 7, TE_F32, TE_F32, 0, 0, false, false, false},
        {2, 3, 16, 64, TE_BF16, TE_BF16, 0.125f, 0, false, false, false},
        {2, 3, 16, 64, TE_BF16, TE_BF16, 0.125f, 0, true, true, false},
        {2, 2, 33, 200, TE_F16, TE_F16, 2, 2, false, false, false},
        {2, 2, 33, 200, TE_F16, TE_F32, 2, 1, false, false, true},
        {3, 2, 16, 24, TE_F32, TE_BF16, 1, 1, true, false, false},
        {1, 2, 40, 13, TE_F32, TE_F32, 1, 0, true, false, false}, /* the first 27 rows see nothing */
        {1, 2, 24, 16, TE_BF16, TE_BF16, 1, 0, true, false, false},
        {1, 1, 3, 20000, TE_F32, TE_F32, 0.5f, 0, false, true, false},
        {1, 1, 3, 20001, TE_BF16, TE_BF16, 0.5f, 2, true, false, true},
        {1, 1, 900, 8, TE_F16, TE_F16, 1, 0, true, false, false},
        {2, 2, 4, 1, TE_F32, TE_F32, 1, 0, false, false, false},
        {0, 2, 4, 8, TE_F32, TE_F32, 1, 0, false, false, false},
        {2, 2, 4, 0, TE_F32, TE_F32, 1, 0, true, false, false},
    };
    for (int k = 0; k < COUNT(cases); k++) {
        const sm_case *c = &cases[k];
        int64_t n = c->b * c->h * c->s_q * c->s_k, rows = c->b * c->h * c->s_q;
        float *x = test_normal(n, 5);
        uint8_t *mask = c->mask ? make_mask(c) : NULL;
        te_op_softmax_fwd_args f = {0};
        name_case(c);
        for (int64_t i = 0; i < n; i++) x[i] *= 3;
        x = test_rounded(c->x, x, n);
        te_tensor *in = guarded(te, c, c->x, x);
        f.x = in;
        f.y = c->in_place ? in : guarded(te, c, c->y, NULL);
        if (mask) f.mask = te_tensor_from_host(te, TE_U8, SHAPE(c->mask == 2 ? c->b : 1, 1, c->s_q, c->s_k), mask);
        f.scale = c->scale;
        f.causal = c->causal;
        CHECK_EQ_INT(te_op_softmax_fwd(te, &f), TE_OK);
        REQUIRE_OK(te);
        double *want = reference(c, x, mask);
        if (n) CHECK_TENSOR(f.y, as_floats(want, n), rounding(c->y), smallest(c->y));

        /* The gradient, from the y that was stored. */
        const float *y = n ? test_copy(test_read(f.y), n) : NULL, *dy = test_rounded(c->x, test_normal(n, 6), n);
        te_tensor *upstream = guarded(te, c, c->x, dy);
        te_op_softmax_bwd_args b = {0};
        b.dy = upstream;
        b.y = f.y;
        b.dx = c->in_place ? upstream : guarded(te, c, c->x, NULL);
        b.scale = c->scale;
        CHECK_EQ_INT(te_op_softmax_bwd(te, &b), TE_OK);
        REQUIRE_OK(te);
        for (int64_t r = 0; r < rows; r++) {
            double sum = 0;
            for (int64_t i = 0; i < c->s_k; i++) sum += (double)y[r * c->s_k + i] * (double)dy[r * c->s_k + i];
            for (int64_t i = r * c->s_k; i < (r + 1) * c->s_k; i++) want[i] = (c->scale != 0 ? (double)c->scale : 1) * ((double)y[i] * (double)dy[i] - (double)y[i] * sum);
        }
        if (n) CHECK_TENSOR(b.dx, as_floats(want, n), rounding(c->x), 2e-6); /* dy and the sum, of size 1, may cancel */
    }
}

/* Rows without a finite score are NaN, as everywhere; -inf beside numbers is 0. */
TE_TEST_DEVICES(softmax_odd_values) {
    const float x[] = {-INFINITY, 0, -INFINITY, 0, -INFINITY, -INFINITY, -INFINITY, -INFINITY, 1, NAN, 0, 0};
    te_op_softmax_fwd_args f = {0};
    f.x = test_tensor(te, TE_F32, SHAPE(3, 4), x);
    f.y = test_guarded(te, TE_F32, SHAPE(3, 4));
    te_op_softmax_fwd(te, &f);
    REQUIRE_OK(te);
    const float *y = test_read(f.y);
    CHECK(y[0] == 0 && y[1] == 0.5f && y[2] == 0 && y[3] == 0.5f);
    for (int i = 4; i < 12; i++) CHECK(isnan(y[i]));
}

/* sum(w * f(x)) and its gradient against differences; f by number. */
static te_tensor *call(int f, te_tensor *x, te_tensor *mask) {
    switch (f) {
    case 0: return te_scaled_softmax(x, 0.7f);
    case 1: return te_scaled_masked_softmax(x, mask, 0.7f);
    case 2: return te_scaled_upper_triang_masked_softmax(x, 0.7f);
    default: return te_scaled_aligned_causal_masked_softmax(x, 0.7f);
    }
}
static double weighted(te_ctx *te, int f, const float *x, te_tensor *mask, const float *w, int64_t s_q, int64_t s_k, te_tensor **grad) {
    te_tensor *in = te_tensor_set_requires_grad(test_tensor(te, TE_F32, SHAPE(2, 2, s_q, s_k), x), true);
    te_tensor *y = call(f, in, mask);
    const float *out = test_read(y);
    double sum = 0;
    for (int64_t i = 0; i < 4 * s_q * s_k; i++) sum += (double)out[i] * (double)w[i];
    te_backward_from(y, test_tensor(te, TE_F32, SHAPE(2, 2, s_q, s_k), w));
    if (grad) *grad = te_tensor_grad(in);
    return sum;
}
TE_TEST_DEVICES(softmax_finite_differences) {
    for (int f = 0; f < 4; f++) {
        int64_t s_q = 5, s_k = f == 2 ? 5 : 8, n = 4 * s_q * s_k;
        float *x = test_normal(n, 3);
        const float *w = test_normal(n, 4);
        sm_case c = {.b = 2, .h = 2, .s_q = s_q, .s_k = s_k, .mask = 2};
        te_tensor *mask = te_tensor_from_host(te, TE_U8, SHAPE(2, 1, s_q, s_k), make_mask(&c)), *grad;
        test_case("function %d", f);
        weighted(te, f, x, mask, w, s_q, s_k, &grad);
        REQUIRE_OK(te);
        const float *g = test_copy(test_read(grad), n);
        for (int64_t i = 0; i < n; i += 3) {
            float at = x[i], h = 1e-2f;
            x[i] = at + h;
            double up = weighted(te, f, x, mask, w, s_q, s_k, NULL);
            x[i] = at - h;
            double down = weighted(te, f, x, mask, w, s_q, s_k, NULL);
            x[i] = at;
            CHECK_MSG(fabs((up - down) / (2 * (double)h) - (double)g[i]) < 2e-4, "dx[%d] is %g; by differences %g", (int)i, (double)g[i], (up - down) / (2 * (double)h));
        }
        REQUIRE_OK(te);
    }
}

TE_TEST(softmax_complaints) {
    te_ctx *te = test_context("cpu");
    te_tensor *x = te_tensor_zeros(te, TE_F32, SHAPE(2, 3, 4, 8));
    CHECK(te_scaled_masked_softmax(x, te_tensor_zeros(te, TE_U8, SHAPE(2, 3, 4, 8)), 1) == NULL);
    CHECK_ERROR(te, TE_ERR_SHAPE, "mask is [2, 3, 4, 8] and x is [2, 3, 4, 8]; [b or 1, 1, s_q, s_k] and [b, h, s_q, s_k] are needed");
    CHECK(te_scaled_masked_softmax(x, te_tensor_zeros(te, TE_F32, SHAPE(2, 1, 4, 8)), 1) == NULL);
    CHECK_ERROR(te, TE_ERR_DTYPE, "mask is f32; u8 is needed");
    CHECK(te_scaled_upper_triang_masked_softmax(x, 1) == NULL);
    CHECK_ERROR(te, TE_ERR_SHAPE, "x is [2, 3, 4, 8]; square matrices");
    CHECK(te_scaled_softmax(te_tensor_zeros(te, TE_I32, SHAPE(4)), 1) == NULL);
    CHECK_ERROR(te, TE_ERR_DTYPE, "te_scaled_softmax");
    CHECK(te_scaled_aligned_causal_masked_softmax(te_tensor_zeros(te, TE_F32, SHAPE(4)), 1) == NULL);
    CHECK_ERROR(te, TE_ERR_SHAPE, "at least 2 dimensions");
    CHECK(te_scaled_softmax(NULL, 1) == NULL && te_scaled_upper_triang_masked_softmax(NULL, 1) == NULL);
}
