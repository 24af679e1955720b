/* test_act.c: the activations: float64 formulas, finite differences, FP8 outputs in both directions, amaxes, sums of columns, the GPU
 * against the CPU. */
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
    case TE_GLU: return sigmoid(x);
    default: return NAN; /* an activation without a formula here: no test of it passes */
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
    te_op_act_fwd_args f = {0};
    te_op_act_bwd_args b = {0};
    act_result r;
    f.x = test_tensor(te, c->x, SHAPE(c->m, width_of(c)), d->x);
    f.y = test_guarded(te, c->y, SHAPE(c->m, c->n));
    f.activation = b.activation = c->act;
    f.activation_params.limit = b.activation_params.limit = c->limit;
    f.activation_params.alpha = b.activation_params.alpha = c->alpha;
    te_op_act_fwd(te, &f);
    b.x = f.x;
    b.dy = test_tensor(te, c->x, SHAPE(c->m, c->n), d->dy);
    b.dx = test_guarded(te, c->y, SHAPE(c->m, width_of(c)));
    te_op_act_bwd(te, &b);
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
    float *y = test_floats(c.m * c.n), *dx = test_floats(c.m * width_of(&c));
    act_result got = run(te, &c, &d);
    expected(&c, &d, y, dx);
    CHECK_CLOSE("y", got.y, y, c.m * c.n, rtol_of(c.y), 3e-6);
    CHECK_CLOSE("dx", got.dx, dx, c.m * width_of(&c), rtol_of(c.y), 1e-5);
    te_ctx *cpu = test_cpu_beside(te);
    if (!cpu) return;
    act_result want = run(cpu, &c, &d);
    CHECK_CLOSE("y", got.y, want.y, c.m * c.n, rtol_of(c.y), 1e-6);
    CHECK_CLOSE("dx", got.dx, want.dx, c.m * width_of(&c), rtol_of(c.y), 4e-6);
}

static void check_all(te_ctx *te, te_dtype x, te_dtype y) {
    static const int64_t shapes[][2] = {{1, 1}, {3, 7}, {5, 64}, {17, 1000}, {2, 4099}, {3, 20000}, {0, 8}, {4, 0}};
    for (int act = TE_GELU; act < TE_ACTIVATION_COUNT; act++)
        for (int i = 0; i < COUNT(shapes); i++) {
            act_case c = {0};
            if ((i + act) % test_every_odd(1)) continue;
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
    act_case c = {0};
    te_op_act_fwd_args f = {0};
    te_ctx *cpu = test_context("cpu");
    if (!cpu) return;
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
    te_op_act_fwd(te, &f);
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
    te_op_act_fwd(te, &f);
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
    te_op_act_fwd(te, &f);
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

/* ---- codes of rows and of columns, forward and backward; sums of columns ---- */

/* values [m, n] times scale as codes [m, ld], padded with 0. */
static const uint8_t *codes_of(te_dtype dtype, const float *values, int64_t m, int64_t n, int64_t ld, float scale) {
    float *padded = test_floats(m * ld);
    for (int64_t i = 0; i < m; i++)
        for (int64_t k = 0; k < n; k++) padded[i * ld + k] = values[i * n + k] * scale;
    return (const uint8_t *)test_read_bytes(te_tensor_from_f32(test_context("cpu"), dtype, SHAPE(m, ld), padded));
}
static const float *transposed(const float *values, int64_t m, int64_t n) {
    float *t = test_floats(m * n);
    for (int64_t i = 0; i < m; i++)
        for (int64_t k = 0; k < n; k++) t[k * m + i] = values[i * n + k];
    return t;
}
static float amax_of(const float *values, int64_t n, float largest) {
    for (int64_t i = 0; i < n; i++)
        if (fabsf(values[i]) > largest) largest = fabsf(values[i]);
    return largest;
}
typedef struct copies_case {
    int64_t m, n, pad, ldc; /* pad: columns behind the last of `out`; ldc < 0: no `col` */
    bool row, odd;
} copies_case;

static void check_copies(te_ctx *te, te_activation act, te_dtype x_dtype, te_dtype dtype, const copies_case *k, float scale) {
    act_case c = {0};
    te_op_act_fwd_args f = {0};
    te_op_act_bwd_args b = {0};
    if (!test_context("cpu")) return;
    c.m = k->m;
    c.n = k->n;
    c.act = act;
    c.x = x_dtype;
    c.y = dtype;
    name_case(&c);
    int64_t m = k->m, width = width_of(&c);
    float zero = 0, small = 0.125f;
    act_data d = make_data(&c);
    f.x = b.x = test_tensor(te, c.x, SHAPE(m, width), d.x);
    b.dy = test_tensor(te, c.x, SHAPE(m, c.n), d.dy);
    f.activation = b.activation = act;
    f.y = test_guarded(te, TE_F32, SHAPE(m, c.n));
    b.dx = test_guarded(te, TE_F32, SHAPE(m, width));
    te_op_act_fwd(te, &f);
    te_op_act_bwd(te, &b);
    CHECK_OK(te);
    const float *y = test_read(f.y), *dx = test_read(b.dx);

    f.scale = b.scale = test_tensor(te, TE_F32, SHAPE(1), &scale);
    f.y = k->row ? test_output(te, dtype, m, c.n + k->pad, k->odd) : NULL;
    b.dx = k->row ? test_output(te, dtype, m, width + k->pad, k->odd) : NULL;
    if (k->ldc >= 0) f.col = test_output(te, dtype, c.n, k->ldc, k->odd), b.col = test_output(te, dtype, width, k->ldc, k->odd);
    f.scale_inv = test_guarded(te, TE_F32, SHAPE(1));
    b.scale_inv = test_guarded(te, TE_F32, SHAPE(1));
    f.amax = test_guarded_with(te, TE_F32, SHAPE(1), &zero);
    b.amax = test_guarded_with(te, TE_F32, SHAPE(1), &small);
    te_op_act_fwd(te, &f);
    te_op_act_bwd(te, &b);
    CHECK_OK(te);
    if (k->row) {
        CHECK_BYTES("y", test_read_bytes(f.y), codes_of(dtype, y, m, c.n, c.n + k->pad, scale), (size_t)(m * (c.n + k->pad)));
        CHECK_BYTES("dx", test_read_bytes(b.dx), codes_of(dtype, dx, m, width, width + k->pad, scale), (size_t)(m * (width + k->pad)));
    }
    if (k->ldc >= 0) {
        CHECK_BYTES("y, columns", test_read_bytes(f.col), codes_of(dtype, transposed(y, m, c.n), c.n, m, k->ldc, scale), (size_t)(c.n * k->ldc));
        CHECK_BYTES("dx, columns", test_read_bytes(b.col), codes_of(dtype, transposed(dx, m, width), width, m, k->ldc, scale), (size_t)(width * k->ldc));
    }
    if (m > 0) {
        CHECK(test_read(f.scale_inv)[0] == 1.0f / scale && test_read(b.scale_inv)[0] == 1.0f / scale);
        CHECK(test_read(f.amax)[0] == amax_of(y, m * c.n, 0));
        CHECK(test_read(b.amax)[0] == amax_of(dx, m * width, small));
    }
}

static const copies_case copies_cases[] = {/* m, n, pad, ldc, row, odd */
                                           {1, 1, 15, 16, true, false},     {3, 7, 2, 16, true, true},        {128, 64, 0, 128, true, false},
                                           {130, 72, 8, 144, true, false},  {130, 72, 0, 130, false, false},  {64, 200, 24, -1, true, false},
                                           {5, 1000, 200, 16, true, false}, {300, 136, 0, 304, true, false}, {0, 8, 0, 16, true, false},
                                           {257, 65, 0, 300, true, false},  {16, 64, 0, -1, true, false}};
TE_TEST_DEVICES(fp8_copies) {
    for (int i = 0; i < COUNT(copies_cases); i++) {
        te_dtype x = i % 3 == 0 ? TE_BF16 : i % 3 == 1 ? TE_F32 : TE_F16;
        check_copies(te, TE_SWIGLU, x, TE_F8E4M3, &copies_cases[i], 3.7f);
        check_copies(te, TE_GELU, TE_BF16, TE_F8E4M3, &copies_cases[i], 1e4f); /* saturates */
        check_copies(te, TE_SRELU, x, TE_F8E5M2, &copies_cases[i], 0.02f);
        check_copies(te, TE_CLAMPED_SWIGLU, TE_BF16, TE_F8E5M2, &copies_cases[i], 1.3f);
    }
    for (int act = TE_GELU; act < TE_ACTIVATION_COUNT; act++) check_copies(te, (te_activation)act, TE_BF16, TE_F8E5M2, &copies_cases[3], 2);
}

/* Padding is 0 even if the scale is not a number. */
TE_TEST_DEVICES(fp8_copies_of_nan) {
    act_case c = {3, 8, TE_SWIGLU, TE_BF16, TE_F8E4M3, 0, 0};
    act_data d = make_data(&c);
    te_op_act_bwd_args b = {0};
    float nan = NAN;
    b.x = test_tensor(te, c.x, SHAPE(3, 16), d.x);
    b.dy = test_tensor(te, c.x, SHAPE(3, 8), d.dy);
    b.dx = test_guarded(te, c.y, SHAPE(3, 24));
    b.col = test_guarded(te, c.y, SHAPE(16, 8));
    b.scale = test_tensor(te, TE_F32, SHAPE(1), &nan);
    b.activation = c.act;
    te_op_act_bwd(te, &b);
    CHECK_OK(te);
    const uint8_t *row = (const uint8_t *)test_read_bytes(b.dx), *col = (const uint8_t *)test_read_bytes(b.col);
    for (int i = 0; i < 3; i++)
        for (int k = 0; k < 24; k++) CHECK_EQ_INT(row[i * 24 + k], k < 16 ? 0x7f : 0);
    for (int k = 0; k < 16; k++)
        for (int i = 0; i < 8; i++) CHECK_EQ_INT(col[k * 8 + i], i < 3 ? 0x7f : 0);
}

/* The sums of dx's columns beside dx itself, in every format of either; twice, for the same bits. */
TE_TEST_DEVICES(bias_gradient) {
    int turn = 0;
    static const int64_t shapes[][2] = {{1, 1}, {3, 7}, {128, 64}, {1000, 72}, {129, 264}, {0, 8}, {700, 33}};
    static const te_dtype formats[] = {TE_BF16, TE_F32, TE_F8E5M2};
    for (int i = 0; i < COUNT(shapes); i++)
        for (int j = 0; j < COUNT(formats); j++)
            for (int accumulate = 0; accumulate < 2; accumulate++) {
                if (turn++ % test_every_odd(2)) continue;
                act_case c = {0};
                te_op_act_bwd_args b = {0};
                float scale = 4;
                c.m = shapes[i][0];
                c.n = shapes[i][1];
                c.act = (i + j) % 2 ? TE_GELU : TE_SWIGLU;
                c.x = j == 1 ? TE_F32 : TE_BF16;
                c.y = formats[j];
                name_case(&c);
                int64_t m = c.m, width = width_of(&c);
                act_data d = make_data(&c);
                float *start = test_normal(width, 5), *want = test_floats(width);
                b.x = test_tensor(te, c.x, SHAPE(m, width), d.x);
                b.dy = test_tensor(te, c.x, SHAPE(m, c.n), d.dy);
                b.dx = test_guarded(te, TE_F32, SHAPE(m, width));
                b.activation = c.act;
                te_op_act_bwd(te, &b);
                const float *dx = test_read(b.dx);
                for (int64_t k = 0; k < width; k++) {
                    double sum = accumulate ? start[k] : 0;
                    for (int64_t r = 0; r < m; r++) sum += dx[r * width + k];
                    want[k] = (float)sum;
                }
                b.dx = test_guarded(te, c.y, SHAPE(m, width));
                if (c.y == TE_F8E5M2) b.scale = test_tensor(te, TE_F32, SHAPE(1), &scale);
                b.accumulate = accumulate;
                for (int again = 0; again < 2; again++) {
                    b.dbias = test_guarded_with(te, TE_F32, SHAPE(width), start);
                    te_op_act_bwd(te, &b);
                    CHECK_OK(te);
                    const float *got = test_read(b.dbias);
                    CHECK_CLOSE("dbias", got, want, width, 1e-5, 1e-4);
                    if (again) CHECK_BYTES("dbias again", got, start, (size_t)width * 4);
                    if (accumulate) break;
                    memcpy(start, got, (size_t)width * 4);
                }
                if (c.y == TE_F8E5M2) CHECK_BYTES("dx", test_read_bytes(b.dx), codes_of(c.y, dx, m, width, width, scale), (size_t)(m * width));
                else CHECK_CLOSE("dx", test_read(b.dx), dx, m * width, rtol_of(c.y), 0);
            }
}

/* Codes, amax and sums of a gradient that is rounded on its way are those of one that was stored in between. */
TE_TEST_DEVICES(rounded_gradient) {
    int turn = 0;
    static const int64_t shapes[][2] = {{1, 1}, {3, 7}, {128, 64}, {300, 136}, {129, 264}, {0, 8}};
    static const te_dtype formats[] = {TE_BF16, TE_F16, TE_F32};
    for (int i = 0; i < COUNT(shapes); i++)
        for (int j = 0; j < COUNT(formats); j++)
            for (int bias = 0; bias < 2; bias++) {
                if (turn++ % test_every_odd(2)) continue;
                act_case c = {0};
                te_op_act_bwd_args b = {0};
                float scale = 9, small = 0.125f;
                c.m = shapes[i][0];
                c.n = shapes[i][1];
                c.act = (i + bias) % 2 ? TE_SILU : TE_SWIGLU;
                c.x = formats[j];
                c.y = TE_F8E5M2;
                name_case(&c);
                int64_t m = c.m, width = width_of(&c), ldc = (m + 15) / 16 * 16;
                act_data d = make_data(&c);
                float *want = test_floats(width);
                b.x = test_tensor(te, c.x, SHAPE(m, width), d.x);
                b.dy = test_tensor(te, c.x, SHAPE(m, c.n), d.dy);
                b.dx = test_guarded(te, c.x, SHAPE(m, width));
                b.activation = c.act;
                te_op_act_bwd(te, &b); /* the rounded one, stored */
                const float *dx = test_read(b.dx);
                for (int64_t k = 0; k < width; k++) {
                    double sum = 0;
                    for (int64_t r = 0; r < m; r++) sum += dx[r * width + k];
                    want[k] = (float)sum;
                }
                b.rounded = true;
                if (bias) { /* sums alone, of floats too */
                    b.dx = test_guarded(te, c.x, SHAPE(m, width));
                    b.dbias = test_guarded(te, TE_F32, SHAPE(width));
                    te_op_act_bwd(te, &b);
                    CHECK_OK(te);
                    CHECK_BYTES("dx", test_read(b.dx), dx, (size_t)(m * width) * 4);
                    CHECK_CLOSE("dbias of floats", test_read(b.dbias), want, width, 1e-5, 1e-5); /* f32 sums in another order */
                    b.dbias = test_guarded(te, TE_F32, SHAPE(width));
                }
                b.dx = test_guarded(te, c.y, SHAPE(m, width));
                b.col = bias ? test_guarded(te, c.y, SHAPE(width, ldc)) : NULL;
                b.scale = test_tensor(te, TE_F32, SHAPE(1), &scale);
                b.scale_inv = test_guarded(te, TE_F32, SHAPE(1));
                b.amax = test_guarded_with(te, TE_F32, SHAPE(1), &small);
                te_op_act_bwd(te, &b);
                CHECK_OK(te);
                CHECK_BYTES("codes", test_read_bytes(b.dx), codes_of(c.y, dx, m, width, width, scale), (size_t)(m * width));
                if (b.col) CHECK_BYTES("codes, columns", test_read_bytes(b.col), codes_of(c.y, transposed(dx, m, width), width, m, ldc, scale), (size_t)(width * ldc));
                if (bias) CHECK_CLOSE("dbias", test_read(b.dbias), want, width, 1e-5, 1e-5);
                if (m > 0) CHECK(test_read(b.amax)[0] == amax_of(dx, m * width, small));
            }
}

/* The amax of a float output is that of the f32 numbers, before they are rounded; that of a gradient that is rounded on its way is the rounded one's, unless
 * it is asked for otherwise. */
TE_TEST_DEVICES(amax_of_floats) {
    static const te_dtype formats[] = {TE_F32, TE_BF16, TE_F16};
    static const int64_t shapes[][2] = {{1, 1}, {3, 7}, {17, 1000}, {64, 264}};
    int turn = 0;
    for (int i = 0; i < COUNT(shapes); i++)
        for (int j = 0; j < COUNT(formats); j++)
            for (int way = 0; way < 8; way++) {
                if (turn++ % test_every_odd(3)) continue;
                const bool bias = way & 1, rounded = way & 2, unrounded_amax = way & 4;
                act_case c = {0};
                te_op_act_fwd_args f = {0};
                te_op_act_bwd_args b = {0};
                float zero = 0, large = 1e4f, *stored;
                c.m = shapes[i][0];
                c.n = shapes[i][1];
                c.act = bias ? TE_SILU : TE_GEGLU;
                c.x = c.y = formats[j];
                name_case(&c);
                act_data d = make_data(&c);
                int64_t width = width_of(&c);
                f.x = b.x = test_tensor(te, c.x, SHAPE(c.m, width), d.x);
                b.dy = test_tensor(te, c.x, SHAPE(c.m, c.n), d.dy);
                f.activation = b.activation = c.act;
                f.y = test_guarded(te, TE_F32, SHAPE(c.m, c.n));
                b.dx = test_guarded(te, TE_F32, SHAPE(c.m, width));
                te_op_act_fwd(te, &f);
                te_op_act_bwd(te, &b);
                const float *y = test_read(f.y), *dx = test_read(b.dx);
                stored = test_rounded(c.x, dx, c.m * width);
                f.y = test_guarded(te, c.y, SHAPE(c.m, c.n));
                b.dx = test_guarded(te, c.y, SHAPE(c.m, width));
                if (bias) b.dbias = test_guarded(te, TE_F32, SHAPE(c.n));
                b.rounded = rounded;
                b.unrounded_amax = unrounded_amax;
                f.amax = test_guarded_with(te, TE_F32, SHAPE(1), &zero);
                b.amax = test_guarded_with(te, TE_F32, SHAPE(1), &zero);
                te_op_act_fwd(te, &f);
                te_op_act_bwd(te, &b);
                CHECK_OK(te);
                CHECK_BYTES("dx", test_read(b.dx), stored, (size_t)(c.m * width) * 4);
                CHECK(test_read(f.amax)[0] == amax_of(y, c.m * c.n, 0));
                CHECK(test_read(b.amax)[0] == amax_of(rounded && !unrounded_amax ? stored : dx, c.m * width, 0));
                for (int64_t k = 0; k < (bias ? c.n : 0); k++) {
                    double want = 0;
                    for (int64_t r = 0; r < c.m; r++) want += (rounded ? stored : dx)[r * width + k];
                    CHECK_MSG(fabs(test_read(b.dbias)[k] - want) <= 1e-5 * (1 + fabs(want)), "dbias %d", (int)k); /* f32 sums in another order */
                    if (k == 8) break;
                }
                f.amax = test_guarded_with(te, TE_F32, SHAPE(1), &large);
                te_op_act_fwd(te, &f);
                CHECK(test_read(f.amax)[0] == large);
            }
}

/* GELU of bf16 1.0: TransformerEngine's kernel has 0.841192 in f32, and stores 0.83984375. */
TE_TEST_DEVICES(amax_of_gelu_of_one) {
    te_op_act_fwd_args f = {0};
    float one = 1, zero = 0;
    f.x = test_tensor(te, TE_BF16, SHAPE(1), &one);
    f.y = test_guarded(te, TE_BF16, SHAPE(1));
    f.activation = TE_GELU;
    f.amax = test_guarded_with(te, TE_F32, SHAPE(1), &zero);
    te_op_act_fwd(te, &f);
    CHECK_OK(te);
    CHECK(test_read(f.y)[0] == 0.83984375f);
    CHECK(fabsf(test_read(f.amax)[0] - 0.841192f) < 1e-6f); /* the digits that are given */
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
            te_op_act_fwd_args f = {0};
            te_op_act_bwd_args b = {0};
            test_case("activation %d n=%d", (int)acts[k], (int)n);
            x[3] = NAN;
            x[4] = INFINITY;
            x[5] = -200;
            f.x = test_tensor(te, TE_F32, SHAPE(1, n), x);
            f.y = test_guarded(te, TE_F32, SHAPE(1, n));
            f.activation = b.activation = acts[k];
            te_op_act_fwd(te, &f);
            float *y = test_read(f.y);
            CHECK(zero ? y[3] == 0 : isnan(y[3]));
            CHECK(y[4] == INFINITY);
            CHECK(y[5] == 0);
            b.x = f.x;
            b.dy = test_tensor(te, TE_F32, SHAPE(1, n), ones);
            b.dx = test_guarded(te, TE_F32, SHAPE(1, n));
            te_op_act_bwd(te, &b);
            float *dx = test_read(b.dx);
            CHECK(zero ? dx[3] == 0 : isnan(dx[3]));
            CHECK(dx[5] == 0);
            f.y = test_guarded(te, TE_F8E5M2, SHAPE(1, n));
            f.scale = test_tensor(te, TE_F32, SHAPE(1), &one);
            f.amax = test_guarded_with(te, TE_F32, SHAPE(1), &nothing);
            te_op_act_fwd(te, &f);
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
        act_case c = {0};
        te_op_act_fwd_args f = {0};
        te_op_act_bwd_args b = {0};
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
        te_op_act_fwd(te, &f);
        b.dy = test_tensor(te, TE_BF16, SHAPE(3, 64), d.dy);
        te_op_act_bwd(te, &b);
        CHECK_OK(te);
        CHECK_TENSOR(f.y, y, 8e-3, 3e-6);
        CHECK_TENSOR(b.dx, dx, 8e-3, 1e-5);
    }
}

TE_TEST_DEVICES(complaints) {
    te_op_act_fwd_args f = {0};
    te_op_act_bwd_args b = {0};
    te_tensor *x = te_tensor_zeros(te, TE_F32, SHAPE(2, 9));
    f.x = f.y = x;
    te_op_act_fwd(te, &f);
    CHECK_ERROR(te, TE_ERR_INVALID, "act_fwd: activation is 0");
    f.activation = TE_SWIGLU;
    te_op_act_fwd(te, &f);
    CHECK_ERROR(te, TE_ERR_SHAPE, "act_fwd: x is [2, 9]; a gated activation needs an even last size");
    f.x = te_tensor_zeros(te, TE_F32, SHAPE(2, 16));
    te_op_act_fwd(te, &f);
    CHECK_ERROR(te, TE_ERR_SHAPE, "y is [2, 9] and x is [2, 16]; y must be [2, 8]");
    f.y = te_tensor_zeros(te, TE_F32, SHAPE(2, 8));
    f.scale_inv = te_tensor_zeros(te, TE_F32, SHAPE(1));
    te_op_act_fwd(te, &f);
    CHECK_ERROR(te, TE_ERR_INVALID, "scale, scale_inv and col belong to an e4m3 or e5m2 y, and y is f32");
    f.y = te_tensor_zeros(te, TE_F8E4M3, SHAPE(2, 8));
    te_op_act_fwd(te, &f);
    CHECK_ERROR(te, TE_ERR_STATE, "act_fwd: scale is NULL");
    f.scale = f.scale_inv;
    f.col = te_tensor_zeros(te, TE_F8E5M2, SHAPE(8, 2));
    te_op_act_fwd(te, &f);
    CHECK_ERROR(te, TE_ERR_DTYPE, "act_fwd: y is e4m3 and col is e5m2");
    f.y = NULL;
    f.col = te_tensor_zeros(te, TE_F8E5M2, SHAPE(8, 1));
    te_op_act_fwd(te, &f);
    CHECK_ERROR(te, TE_ERR_SHAPE, "col is [8, 1]; 8 rows of at least 2 columns are needed");
    f.col = NULL;
    te_op_act_fwd(te, &f);
    CHECK_ERROR(te, TE_ERR_STATE, "act_fwd: y is NULL");
    f.y = te_tensor_zeros(te, TE_F32, SHAPE(2, 8));
    f.x = te_tensor_zeros(te, TE_I32, SHAPE(2, 16));
    te_op_act_fwd(te, &f);
    CHECK_ERROR(te, TE_ERR_DTYPE, "act_fwd: x is i32");
    b.activation = TE_GEGLU;
    b.x = b.dx = te_tensor_zeros(te, TE_F32, SHAPE(2, 16));
    b.dy = x;
    te_op_act_bwd(te, &b);
    CHECK_ERROR(te, TE_ERR_SHAPE, "x is [2, 16] and dy is [2, 9]; x must be [2, 18]");
    b.x = te_tensor_zeros(te, TE_F32, SHAPE(2, 18));
    b.dbias = te_tensor_zeros(te, TE_F32, SHAPE(9));
    te_op_act_bwd(te, &b);
    CHECK_ERROR(te, TE_ERR_SHAPE, "act_bwd: dbias is [9]; 18 elements are needed");
    b.dbias = NULL;
    te_op_act_bwd(te, &b);
    CHECK_ERROR(te, TE_ERR_SHAPE, "dx is [2, 16] and x is [2, 18]; dx must be [2, 18]");
}

/* ---- interleaved halves ---- */

/* Column k of half h of n stands in blocks of s. */
static int64_t interleaved(int64_t n, int64_t s, int64_t h, int64_t k) { return (void)n, k / s * 2 * s + h * s + k % s; }

/* The same bits as with one half behind the other, of the same numbers. */
TE_TEST_DEVICES(act_interleaved_halves) {
    enum { M = 37, N = 96 };
    static const te_dtype formats[] = {TE_F32, TE_BF16, TE_F16};
    static const int64_t sizes[] = {1, 3, 8, 32, N};
    for (int act = TE_GELU; act < TE_ACTIVATION_COUNT; act++)
        if (te_activation_is_gated((te_activation)act))
        for (int k = 0; k < COUNT(sizes); k++)
            for (int f = 0; f < COUNT(formats); f++) {
                int64_t size = sizes[k];
                te_dtype dtype = formats[f], out = f == 1 && k == 2 ? TE_F8E4M3 : dtype;
                const float *x = test_normal(M * 2 * N, 5), *dy = test_normal(M * N, 6), scale = 8;
                float *mixed = test_floats(M * 2 * N);
                for (int64_t i = 0; i < M * 2 * N; i++) mixed[i / (2 * N) * 2 * N + interleaved(N, size, i % (2 * N) / N, i % N)] = x[i];
                te_op_act_fwd_args fwd[2];
                te_op_act_bwd_args bwd[2];
                memset(fwd, 0, sizeof fwd);
                memset(bwd, 0, sizeof bwd);
                test_case("activation %d, blocks of %d, %s to %s", act, (int)size, te_dtype_name(dtype), te_dtype_name(out));
                for (int way = 0; way < 2; way++) {
                    fwd[way].x = bwd[way].x = test_tensor(te, dtype, SHAPE(M, 2 * N), way ? mixed : x);
                    fwd[way].y = out == dtype ? test_guarded(te, out, SHAPE(M, N)) : te_tensor_zeros(te, out, SHAPE(M, N));
                    if (out != dtype) fwd[way].scale = test_tensor(te, TE_F32, SHAPE(1), &scale);
                    fwd[way].activation = bwd[way].activation = (te_activation)act;
                    fwd[way].activation_params.limit = bwd[way].activation_params.limit = 1.5f;
                    fwd[way].activation_params.glu_interleave_size = bwd[way].activation_params.glu_interleave_size = way ? size : 0;
                    bwd[way].dy = test_tensor(te, dtype, SHAPE(M, N), dy);
                    bwd[way].dx = test_guarded(te, dtype, SHAPE(M, 2 * N));
                    CHECK_EQ_INT(te_op_act_fwd(te, &fwd[way]), TE_OK);
                    CHECK_EQ_INT(te_op_act_bwd(te, &bwd[way]), TE_OK);
                }
                REQUIRE_OK(te);
                CHECK_BYTES("y", test_read_bytes(fwd[1].y), test_read_bytes(fwd[0].y), te_tensor_bytes(fwd[0].y));
                const float *plain = test_copy(test_read(bwd[0].dx), M * 2 * N), *got = test_read(bwd[1].dx);
                for (int64_t i = 0; i < M * 2 * N; i++) {
                    float one = got[i / (2 * N) * 2 * N + interleaved(N, size, i % (2 * N) / N, i % N)];
                    CHECK_MSG(memcmp(&one, &plain[i], 4) == 0, "dx %d is %g; one half behind the other it is %g", (int)i, (double)one, (double)plain[i]);
                }
            }
}

/* te_activate hands its parameters to the operation, forward and backward. */
TE_TEST_DEVICES(activate_takes_parameters) {
    enum { M = 5, N = 12 };
    const float *x = test_normal(M * 2 * N, 5), *dy = test_normal(M * N, 6);
    for (int offset = 0; offset < 2; offset++) {
        const te_activation_params params = {.limit = 0.75f, .alpha = 1.25f, .no_glu_linear_offset = !offset, .glu_interleave_size = 4};
        te_tensor *in = te_tensor_set_requires_grad(test_tensor(te, TE_F32, SHAPE(M, 2 * N), x), true);
        te_tensor *y = te_activate(in, TE_CLAMPED_SWIGLU, &params);
        te_backward_from(y, test_tensor(te, TE_F32, SHAPE(M, N), dy));
        REQUIRE_OK(te);
        float *want = test_floats(M * N), *dx = test_floats(M * 2 * N);
        for (int i = 0; i < M * N; i++) {
            int64_t a = i / N * 2 * N + interleaved(N, 4, 0, i % N), b = i / N * 2 * N + interleaved(N, 4, 1, i % N);
            double u = fmin((double)x[a], 0.75), v = fmin(fmax((double)x[b], -0.75), 0.75) + offset, s = 1 / (1 + exp(-1.25 * u));
            want[i] = (float)(u * s * v);
            dx[a] = x[a] <= 0.75f ? (float)((double)dy[i] * (s + 1.25 * u * s * (1 - s)) * v) : 0;
            dx[b] = fabsf(x[b]) <= 0.75f ? (float)((double)dy[i] * u * s) : 0;
        }
        CHECK_TENSOR(y, want, 1e-5, 1e-6); /* the GPU's sigmoid is off by a few units in the last place */
        CHECK_TENSOR(te_tensor_grad(in), dx, 1e-5, 1e-6);
    }
    te_tensor *zeros = te_tensor_zeros(te, TE_F32, SHAPE(M, 2 * N));
    CHECK(!te_activate(zeros, TE_SWIGLU, &(te_activation_params){.no_glu_linear_offset = true}));
    CHECK_ERROR(te, TE_ERR_INVALID, "no_glu_linear_offset with activation 8");
}

TE_TEST(act_interleaving_refused) {
    te_ctx *te = test_context("cpu");
    te_op_act_fwd_args f = {0};
    te_op_act_bwd_args b = {0};
    te_tensor *x = te_tensor_zeros(te, TE_F32, SHAPE(4, 24)), *y = te_tensor_zeros(te, TE_F32, SHAPE(4, 12));
    f.x = b.x = x;
    f.y = y;
    b.dy = y;
    b.dx = te_tensor_zeros(te, TE_F32, SHAPE(4, 24));
    f.activation = b.activation = TE_SWIGLU;
    f.activation_params.glu_interleave_size = b.activation_params.glu_interleave_size = 5;
    te_op_act_fwd(te, &f);
    CHECK_ERROR(te, TE_ERR_SHAPE, "glu_interleave_size is 5 and a half has 12 columns; it must divide them");
    b.activation_params.glu_interleave_size = 4;
    b.dbias = te_tensor_zeros(te, TE_F32, SHAPE(24));
    te_op_act_bwd(te, &b);
    CHECK_ERROR(te, TE_ERR_UNSUPPORTED, "glu_interleave_size is 4 and dbias is given");
    f.x = te_tensor_zeros(te, TE_F32, SHAPE(4, 12));
    f.activation = TE_GELU;
    te_op_act_fwd(te, &f);
    CHECK_ERROR(te, TE_ERR_INVALID, "it belongs to gated activations");
}
