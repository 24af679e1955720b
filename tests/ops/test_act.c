/* test_act.c: the activations: float64 formulas, finite differences, FP8 outputs, the GPU against the CPU. */
#include "../te_test.h"

typedef struct act_case {
    int64_t m, n;
    te_activation act;
    te_dtype x, y;
    float limit, alpha; /* 0: the defaults */
} act_case;

static void name_case(const act_case *c) {
    test_case("activation %d m=%lld n=%lld x=%s y=%s", (int)c->act, (long long)c->m, (long long)c->n, te_dtype_name(c->x), te_dtype_name(c->y));
}
static bool gated(const act_case *c) { return te_activation_is_gated(c->act); }
static int64_t width_of(const act_case *c) { return gated(c) ? 2 * c->n : c->n; }

/* ---- float64 ---- */

static double sigmoid(double x) { return 1 / (1 + exp(-x)); }
static double nonlinearity(te_activation act, double x) {
    switch (act) {
    case TE_GELU:
    case TE_GEGLU: return 0.5 * x * (1 + tanh(sqrt(2 / acos(-1.0)) * (x + 0.044715 * x * x * x)));
    case TE_RELU:
    case TE_REGLU: return x > 0 ? x : 0;
    case TE_SRELU:
    case TE_SREGLU: return x > 0 ? x * x : 0;
    case TE_SILU:
    case TE_SWIGLU: return x * sigmoid(x);
    case TE_QGELU:
    case TE_QGEGLU: return x * sigmoid(1.702 * x);
    default: return sigmoid(x);
    }
}
static double clamp(double x, double low, double high) { return x < low ? low : x > high ? high : x; }
static double reference(const act_case *c, double a, double b) {
    double limit = c->limit != 0 ? c->limit : 7, alpha = c->alpha != 0 ? c->alpha : 1.702f;
    if (c->act == TE_CLAMPED_SWIGLU) {
        a = a > limit ? limit : a;
        return a * sigmoid(alpha * a) * (clamp(b, -limit, limit) + 1);
    }
    return nonlinearity(c->act, a) * (gated(c) ? b : 1);
}

typedef struct act_data {
    float *x, *dy;
} act_data;
/* Inputs that stay off the kinks, where a finite difference would straddle two slopes. */
static act_data make_data(const act_case *c) {
    int64_t count = c->m * width_of(c);
    float *x = test_normal(count, 11), limit = c->limit != 0 ? c->limit : 7;
    act_data d;
    for (int64_t i = 0; i < count; i++) {
        x[i] *= 3;
        if (fabsf(x[i]) < 0.01f) x[i] = 0.01f;
        if (fabsf(fabsf(x[i]) - limit) < 0.1f) x[i] = limit + 1;
    }
    d.x = test_rounded(c->x, x, count);
    d.dy = test_rounded(c->x, test_normal(c->m * c->n, 12), c->m * c->n);
    return d;
}

/* y and, by central differences of the float64 formula, dx. */
static void expected(const act_case *c, const act_data *d, float *y, float *dx) {
    double h = 1e-5;
    for (int64_t row = 0; row < c->m; row++)
        for (int64_t i = 0; i < c->n; i++) {
            int64_t at = row * width_of(c) + i, o = row * c->n + i;
            double a = d->x[at], b = gated(c) ? d->x[at + c->n] : 0, dy = d->dy[o];
            y[o] = (float)reference(c, a, b);
            dx[at] = (float)(dy * (reference(c, a + h, b) - reference(c, a - h, b)) / (2 * h));
            if (gated(c)) dx[at + c->n] = (float)(dy * (reference(c, a, b + h) - reference(c, a, b - h)) / (2 * h));
        }
}

/* ---- the operation ---- */

typedef struct act_result {
    float *y, *dx;
} act_result;
static act_result run(te_ctx *te, const act_case *c, const act_data *d) {
    te_act_fwd_args f;
    te_act_bwd_args b;
    act_result r;
    memset(&f, 0, sizeof f);
    memset(&b, 0, sizeof b);
    f.x = test_tensor(te, c->x, SHAPE(c->m, width_of(c)), d->x);
    f.y = test_guarded(te, c->y, SHAPE(c->m, c->n));
    f.activation = b.activation = c->act;
    f.limit = b.limit = c->limit;
    f.alpha = b.alpha = c->alpha;
    te_act_fwd(te, &f);
    b.x = f.x;
    b.dy = test_tensor(te, c->x, SHAPE(c->m, c->n), d->dy);
    b.dx = test_guarded(te, c->y, SHAPE(c->m, width_of(c)));
    te_act_bwd(te, &b);
    CHECK_OK(te);
    r.y = test_read(f.y);
    r.dx = test_read(b.dx);
    return r;
}

/* f32: a few units in the last place of the largest intermediate, which is x (times the gate) and not y. Others: one rounding. */
static double rtol_of(te_dtype dtype) { return dtype == TE_F32 ? 2e-6 : dtype == TE_F16 ? 1e-3 : 8e-3; }

static void check_case(te_ctx *te, act_case c) {
    name_case(&c);
    act_data d = make_data(&c);
    float *y = (float *)test_alloc((size_t)(c.m * c.n) * 4 + 4), *dx = (float *)test_alloc((size_t)(c.m * width_of(&c)) * 4 + 4);
    act_result got = run(te, &c, &d);
    expected(&c, &d, y, dx);
    CHECK_CLOSE("y", got.y, y, c.m * c.n, rtol_of(c.y), 3e-6);
    CHECK_CLOSE("dx", got.dx, dx, c.m * width_of(&c), rtol_of(c.y), 1e-5);
    if (te_ctx_is_cuda(te)) {
        te_ctx *cpu = test_context("cpu");
        if (!cpu) return;
        act_result want = run(cpu, &c, &d);
        CHECK_CLOSE("y", got.y, want.y, c.m * c.n, rtol_of(c.y), 1e-6);
        CHECK_CLOSE("dx", got.dx, want.dx, c.m * width_of(&c), rtol_of(c.y), 4e-6);
    }
}

static void check_all(te_ctx *te, te_dtype x, te_dtype y) {
    static const int64_t shapes[][2] = {{1, 1}, {3, 7}, {5, 64}, {17, 1000}, {2, 4099}, {3, 20000}, {0, 8}, {4, 0}};
    for (int act = TE_GELU; act <= TE_CLAMPED_SWIGLU; act++)
        for (int i = 0; i < COUNT(shapes); i++) {
            act_case c;
            memset(&c, 0, sizeof c);
            c.m = shapes[i][0];
            c.n = shapes[i][1];
            c.act = (te_activation)act;
            c.x = x;
            c.y = y;
            if (i == 2) c.limit = 3.5f, c.alpha = 1.25f;
            check_case(te, c);
        }
}
TE_TEST_DEVICES(all_f32) { check_all(te, TE_F32, TE_F32); }
TE_TEST_DEVICES(all_bf16) { check_all(te, TE_BF16, TE_BF16); }
TE_TEST_DEVICES(all_f16) { check_all(te, TE_F16, TE_F16); }
TE_TEST_DEVICES(mixed_formats) { check_all(te, TE_BF16, TE_F32); }

/* ---- FP8 outputs ---- */

/* Codes are the f32 result times scale, cast; on the GPU too: the same arithmetic runs in both of its kernels. */
static void check_quantized(te_ctx *te, te_activation act, int64_t m, int64_t n, int64_t ld, te_dtype x_dtype, te_dtype dtype, float scale) {
    act_case c;
    te_act_fwd_args f;
    te_ctx *cpu = test_context("cpu");
    if (!cpu) return;
    memset(&c, 0, sizeof c);
    memset(&f, 0, sizeof f);
    c.m = m;
    c.n = n;
    c.act = act;
    c.x = x_dtype;
    c.y = dtype;
    name_case(&c);
    act_data d = make_data(&c);
    float amax = 0.25f, before = amax, *y, *scaled;
    f.x = test_tensor(te, c.x, SHAPE(m, width_of(&c)), d.x);
    f.y = test_guarded(te, TE_F32, SHAPE(m, n));
    f.activation = act;
    te_act_fwd(te, &f);
    y = test_read(f.y);
    scaled = test_copy(y, m * n);
    for (int64_t i = 0; i < m * n; i++) {
        if (fabsf(y[i]) > amax) amax = fabsf(y[i]);
        scaled[i] *= scale;
    }
    const uint8_t *want = (const uint8_t *)test_read_bytes(te_tensor_from_f32(cpu, dtype, SHAPE(m, n), scaled));
    f.y = test_guarded(te, dtype, SHAPE(m, ld));
    f.scale = test_tensor(te, TE_F32, SHAPE(1), &scale);
    f.scale_inv = test_guarded(te, TE_F32, SHAPE(1));
    f.amax = test_guarded_with(te, TE_F32, SHAPE(1), &before);
    te_act_fwd(te, &f);
    CHECK_OK(te);
    const uint8_t *codes = (const uint8_t *)test_read_bytes(f.y);
    uint8_t *zeros = (uint8_t *)test_alloc((size_t)(ld - n) + 1);
    for (int64_t row = 0; row < m; row++) {
        CHECK_BYTES("codes", codes + row * ld, want + row * n, (size_t)n);
        CHECK_BYTES("padding", codes + row * ld + n, zeros, (size_t)(ld - n));
    }
    if (m * n == 0) return;
    CHECK(test_read(f.scale_inv)[0] == 1.0f / scale);
    CHECK_CLOSE("amax", test_read(f.amax), &amax, 1, 0, 0);
    f.scale_inv = f.amax = NULL;
    te_act_fwd(te, &f);
    CHECK_OK(te);
}
TE_TEST_DEVICES(fp8_output) {
    static const int64_t shapes[][3] = {{1, 1, 16}, {3, 7, 16}, {5, 64, 64}, {5, 40, 48}, {9, 1000, 1008}, {2, 513, 513}, {300, 256, 256}, {0, 16, 16}};
    for (int i = 0; i < COUNT(shapes); i++) {
        const int64_t *s = shapes[i];
        te_dtype x = i % 3 == 0 ? TE_BF16 : i % 3 == 1 ? TE_F32 : TE_F16;
        check_quantized(te, TE_SWIGLU, s[0], s[1], s[2], x, TE_F8E4M3, 3.7f);
        check_quantized(te, TE_GELU, s[0], s[1], s[2], x, TE_F8E4M3, 1e4f); /* saturates */
        check_quantized(te, TE_SRELU, s[0], s[1], s[2], x, TE_F8E5M2, 0.02f);
        check_quantized(te, TE_CLAMPED_SWIGLU, s[0], s[1], s[2], x, TE_F8E5M2, 1.3f);
    }
}

/* ---- odd values ---- */

/* relu(NaN) is 0 and so is its slope; sigmoids let NaN through; the amax ignores NaN and keeps infinity. */
TE_TEST_DEVICES(odd_values) {
    enum { N = 16 };
    static const te_activation acts[] = {TE_RELU, TE_SRELU, TE_SILU, TE_GELU};
    static const int64_t widths[] = {16, 15};
    for (int k = 0; k < COUNT(acts); k++)
        for (int w = 0; w < 2; w++) {
            int64_t n = widths[w];
            bool zero = acts[k] == TE_RELU || acts[k] == TE_SRELU;
            float *x = test_normal(N, 1), *ones = test_uniform(N, 2, 1, 2), one = 1, nothing = 0;
            te_act_fwd_args f;
            te_act_bwd_args b;
            test_case("activation %d n=%d", (int)acts[k], (int)n);
            memset(&f, 0, sizeof f);
            memset(&b, 0, sizeof b);
            x[3] = NAN;
            x[4] = INFINITY;
            x[5] = -200;
            f.x = test_tensor(te, TE_F32, SHAPE(1, n), x);
            f.y = test_guarded(te, TE_F32, SHAPE(1, n));
            f.activation = b.activation = acts[k];
            te_act_fwd(te, &f);
            float *y = test_read(f.y);
            CHECK(zero ? y[3] == 0 : isnan(y[3]));
            CHECK(y[4] == INFINITY);
            CHECK(y[5] == 0);
            b.x = f.x;
            b.dy = test_tensor(te, TE_F32, SHAPE(1, n), ones);
            b.dx = test_guarded(te, TE_F32, SHAPE(1, n));
            te_act_bwd(te, &b);
            float *dx = test_read(b.dx);
            CHECK(zero ? dx[3] == 0 : isnan(dx[3]));
            CHECK(dx[5] == 0);
            f.y = test_guarded(te, TE_F8E5M2, SHAPE(1, n));
            f.scale = test_tensor(te, TE_F32, SHAPE(1), &one);
            f.amax = test_guarded_with(te, TE_F32, SHAPE(1), &nothing);
            te_act_fwd(te, &f);
            CHECK_OK(te);
            CHECK(test_read(f.amax)[0] == INFINITY);
            y = test_read(f.y);
            CHECK(zero ? y[3] == 0 : isnan(y[3]));
            CHECK(y[4] == 57344.0f);
        }
}

/* In place where the shapes allow it, and at addresses that are not multiples of 16. */
TE_TEST_DEVICES(in_place_and_misaligned) {
    for (int shift = 0; shift < 2; shift++) {
        act_case c;
        te_act_fwd_args f;
        te_act_bwd_args b;
        memset(&c, 0, sizeof c);
        memset(&f, 0, sizeof f);
        memset(&b, 0, sizeof b);
        c.m = 3;
        c.n = 64;
        c.act = TE_SWIGLU;
        c.x = c.y = TE_BF16;
        name_case(&c);
        act_data d = make_data(&c);
        float *y = (float *)test_alloc(192 * 4), *dx = (float *)test_alloc(384 * 4), *padded = (float *)test_alloc(385 * 4);
        expected(&c, &d, y, dx);
        memcpy(padded + shift, d.x, 384 * 4);
        f.x = b.x = b.dx = te_tensor_view(te_tensor_narrow(test_tensor(te, TE_BF16, SHAPE(385), padded), 0, shift, 384), SHAPE(3, 128));
        f.y = test_guarded(te, TE_BF16, SHAPE(3, 64));
        f.activation = b.activation = c.act;
        te_act_fwd(te, &f);
        b.dy = test_tensor(te, TE_BF16, SHAPE(3, 64), d.dy);
        te_act_bwd(te, &b);
        CHECK_OK(te);
        CHECK_TENSOR(f.y, y, 8e-3, 3e-6);
        CHECK_TENSOR(b.dx, dx, 8e-3, 1e-5);
    }
}

TE_TEST_DEVICES(complaints) {
    te_act_fwd_args f;
    te_act_bwd_args b;
    te_tensor *x = te_tensor_zeros(te, TE_F32, SHAPE(2, 9));
    memset(&f, 0, sizeof f);
    memset(&b, 0, sizeof b);
    f.x = f.y = x;
    te_act_fwd(te, &f);
    CHECK_ERROR(te, TE_ERR_INVALID, "act_fwd: activation is 0");
    f.activation = TE_SWIGLU;
    te_act_fwd(te, &f);
    CHECK_ERROR(te, TE_ERR_SHAPE, "act_fwd: x is [2, 9]; a gated activation needs an even last size");
    f.x = te_tensor_zeros(te, TE_F32, SHAPE(2, 16));
    te_act_fwd(te, &f);
    CHECK_ERROR(te, TE_ERR_SHAPE, "y is [2, 9] and x is [2, 16]; y must be [2, 8]");
    f.y = te_tensor_zeros(te, TE_F32, SHAPE(2, 8));
    f.amax = te_tensor_zeros(te, TE_F32, SHAPE(1));
    te_act_fwd(te, &f);
    CHECK_ERROR(te, TE_ERR_INVALID, "scale, scale_inv and amax belong to an e4m3 or e5m2 y");
    f.x = te_tensor_zeros(te, TE_I32, SHAPE(2, 16));
    te_act_fwd(te, &f);
    CHECK_ERROR(te, TE_ERR_DTYPE, "act_fwd: x is i32");
    b.activation = TE_GEGLU;
    b.x = b.dx = te_tensor_zeros(te, TE_F32, SHAPE(2, 16));
    b.dy = x;
    te_act_bwd(te, &b);
    CHECK_ERROR(te, TE_ERR_SHAPE, "x is [2, 16] and dy is [2, 9]; x must be [2, 18]");
}
