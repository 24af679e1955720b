/* test_loss.c: cross entropy and mean squared error: float64 formulas, finite differences, the GPU against the CPU. */
#include "../te_test.h"

#include <float.h>

/* ---- cross entropy ---- */

typedef struct ce_case {
    int64_t m, v;
    te_dtype x, dx;
    bool wide_targets, one_dloss, count, in_place;
    float smoothing, scale;
    int64_t ignore;
} ce_case;

static void name_case(const ce_case *c) {
    test_case("m=%lld v=%lld x=%s dx=%s %s%s%s%s smoothing=%g scale=%g ignore=%d", (long long)c->m, (long long)c->v, te_dtype_name(c->x), te_dtype_name(c->dx),
              c->wide_targets ? "i64" : "i32", c->one_dloss ? " one_dloss" : "", c->count ? " count" : "", c->in_place ? " in_place" : "",
              (double)c->smoothing, (double)c->scale, (int)c->ignore);
}

typedef struct ce_data {
    float *x, *dloss;
    int64_t *target;
    int64_t counted;
} ce_data;
static bool counts(const ce_case *c, int64_t target) { return target != c->ignore && c->v > 0; }

static ce_data make_data(const ce_case *c) {
    ce_data d;
    int64_t rows = c->one_dloss ? 1 : c->m;
    float *x = test_normal(c->m * c->v, 21);
    for (int64_t i = 0; i < c->m * c->v; i++) x[i] = 4 * x[i] + 1;
    d.x = test_rounded(c->x, x, c->m * c->v);
    d.dloss = test_normal(rows, 22);
    d.target = test_integers(c->m, 23, 0, c->v > 0 ? c->v : 1);
    d.counted = 0;
    for (int64_t row = 0; row < c->m; row++) {
        if (row % 5 == 1) d.target[row] = c->ignore;
        if (c->v == 0) d.target[row] = c->ignore; /* there is no other one */
        d.counted += counts(c, d.target[row]);
    }
    return d;
}

/* The loss of one row, in float64, and its log-sum-exp. */
static double row_loss(const ce_case *c, const double *x, int64_t target, double *lse) {
    double largest = -INFINITY, s = 0, sum = 0;
    for (int64_t i = 0; i < c->v; i++) largest = x[i] > largest ? x[i] : largest;
    for (int64_t i = 0; i < c->v; i++) s += exp(x[i] - largest), sum += x[i];
    *lse = c->v ? largest + log(s) : -INFINITY;
    if (!counts(c, target)) return 0;
    return (1 - (double)c->smoothing) * (*lse - x[target]) + (double)c->smoothing * *lse - (double)c->smoothing / (double)c->v * sum;
}
static double *row_of(const ce_case *c, const ce_data *d, int64_t row) {
    double *x = test_doubles(c->v);
    for (int64_t i = 0; i < c->v; i++) x[i] = d->x[row * c->v + i];
    return x;
}
/* The factor of a row's gradient. */
static double upstream(const ce_case *c, const ce_data *d, int64_t row) {
    double count = c->count ? (double)(d->counted > 0 ? d->counted : 1) : 1;
    return d->dloss[c->one_dloss ? 0 : row] * (c->scale != 0 ? (double)c->scale : 1) / count;
}

typedef struct ce_result {
    float *loss, *lse, *count, *dx;
} ce_result;

static ce_result reference(const ce_case *c, const ce_data *d) {
    ce_result r;
    r.loss = test_floats(c->m);
    r.lse = test_floats(c->m);
    r.count = (float *)test_alloc(4);
    r.dx = test_floats(c->m * c->v);
    r.count[0] = (float)d->counted;
    for (int64_t row = 0; row < c->m; row++) {
        double *x = row_of(c, d, row), lse;
        int64_t t = d->target[row];
        r.loss[row] = (float)row_loss(c, x, t, &lse);
        r.lse[row] = (float)lse;
        for (int64_t i = 0; i < c->v && counts(c, t); i++)
            r.dx[row * c->v + i] = (float)((exp(x[i] - lse) - (double)c->smoothing / (double)c->v - (i == t ? 1 - (double)c->smoothing : 0)) * upstream(c, d, row));
    }
    return r;
}

static ce_result run(te_ctx *te, const ce_case *c, const ce_data *d) {
    te_op_cross_entropy_fwd_args f = {0};
    te_op_cross_entropy_bwd_args b = {0};
    ce_result r;
    te_tensor *logits = c->in_place ? test_guarded_with(te, c->x, SHAPE(c->m, c->v), d->x) : test_tensor(te, c->x, SHAPE(c->m, c->v), d->x);
    f.logits = logits;
    f.target = c->wide_targets ? te_tensor_from_host(te, TE_I64, SHAPE(c->m), d->target) : test_i32(te, SHAPE(c->m), d->target);
    f.loss = test_guarded(te, TE_F32, SHAPE(c->m));
    f.lse = test_guarded(te, TE_F32, SHAPE(c->m));
    f.count = test_guarded(te, TE_F32, SHAPE(1));
    f.label_smoothing = b.label_smoothing = c->smoothing;
    f.ignore_index = b.ignore_index = c->ignore;
    te_op_cross_entropy_fwd(te, &f);
    b.logits = logits;
    b.target = f.target;
    b.lse = f.lse;
    b.dloss = test_tensor(te, TE_F32, SHAPE(c->one_dloss ? 1 : c->m), d->dloss);
    if (c->count) b.count = f.count;
    b.dlogits = c->in_place ? logits : test_guarded(te, c->dx, SHAPE(c->m, c->v));
    b.scale = c->scale;
    te_op_cross_entropy_bwd(te, &b);
    CHECK_OK(te);
    r.loss = test_read(f.loss);
    r.lse = test_read(f.lse);
    r.count = test_read(f.count);
    r.dx = test_read(b.dlogits);
    return r;
}

/* The gradient carries the rounding of lse, 1e-6 of a probability at lse = 10, also where p - 1 cancels: what comes from upstream scales it. */
static void compare(const ce_case *c, const ce_data *d, ce_result got, ce_result want) {
    double largest = 0;
    for (int64_t row = 0; row < c->m; row++) largest = fmax(largest, fabs(upstream(c, d, row)));
    CHECK_CLOSE("loss", got.loss, want.loss, c->m, 1e-6, 2e-6);
    CHECK_CLOSE("lse", got.lse, want.lse, c->m, 1e-6, 1e-6);
    CHECK_CLOSE("count", got.count, want.count, 1, 0, 0);
    CHECK_CLOSE("dx", got.dx, want.dx, c->m * c->v, c->dx == TE_F32 ? 4e-6 : c->dx == TE_F16 ? 1e-3 : 8e-3,
                1e-6 * largest + (c->dx == TE_F16 ? 6e-8 : 0));
}

TE_TEST_DEVICES(cross_entropy) {
    static const int64_t shapes[][2] = {{1, 1}, {5, 7}, {16, 8}, {37, 256}, {9, 1000}, {3, 4099}, {2, 20000}, {3, 50257}, {1100, 16}, {0, 8}, {3, 0}};
    static const te_dtype formats[] = {TE_F32, TE_BF16, TE_F16};
    for (int i = 0; i < COUNT(shapes); i++)
        for (int k = 0; k < 9; k++) {
            ce_case c = {0};
            if ((9 * i + k) % test_every_odd(2)) continue;
            c.m = shapes[i][0];
            c.v = shapes[i][1];
            c.x = c.dx = formats[k % 3];
            c.wide_targets = k & 1;
            c.in_place = k >= 6;
            if (k == 4) c.dx = TE_F32;
            c.one_dloss = k % 4 == 2;
            c.count = k & 1;
            c.smoothing = k % 3 == i % 3 ? 0.1f : 0;
            c.scale = k == 5 ? 0.5f : 0;
            c.ignore = k % 2 ? -100 : c.v / 2; /* a legal target too */
            name_case(&c);
            ce_data d = make_data(&c);
            ce_result got = run(te, &c, &d);
            compare(&c, &d, got, reference(&c, &d));
            te_ctx *cpu = test_cpu_beside(te);
            if (cpu) compare(&c, &d, got, run(cpu, &c, &d));
        }
}

TE_TEST_DEVICES(cross_entropy_finite_differences) {
    for (int k = 0; k < 2; k++) {
        ce_case c = {0};
        c.m = 4;
        c.v = 9;
        c.x = c.dx = TE_F32;
        c.smoothing = k ? 0.2f : 0;
        c.count = k;
        c.ignore = -100;
        name_case(&c);
        ce_data d = make_data(&c);
        float *want = (float *)test_alloc(36 * 4);
        for (int64_t row = 0; row < 4; row++) {
            double *x = row_of(&c, &d, row), lse;
            for (int i = 0; i < 9; i++) {
                double at = x[i], h = 1e-5, up, down;
                x[i] = at + h;
                up = row_loss(&c, x, d.target[row], &lse);
                x[i] = at - h;
                down = row_loss(&c, x, d.target[row], &lse);
                x[i] = at;
                want[row * 9 + i] = (float)((up - down) / (2 * h) * upstream(&c, &d, row));
            }
        }
        CHECK_CLOSE("dx", run(te, &c, &d).dx, want, 36, 1e-5, 1e-7);
    }
}

/* Logits of -inf, as masks make them: whole runs of them, and rows with nothing else; limits of the format; NaN; large offsets. */
TE_TEST_DEVICES(cross_entropy_odd_values) {
    enum { M = 6, V = 640 };
    static const int64_t widths[] = {V, V - 3};
    for (int w = 0; w < 2; w++) {
        int64_t v = widths[w];
        float *x = test_normal(M * v, 1);
        int64_t target[M] = {0, 3, 2, 1, 0, 5};
        te_op_cross_entropy_fwd_args f = {0};
        test_case("v=%d", (int)v);
        for (int64_t i = 8; i < v; i++) x[i] = -INFINITY; /* row 0: most are masked */
        for (int64_t i = 0; i < v; i++) {
            x[v + i] += 30000;                               /* row 1: far off */
            x[2 * v + i] = i == 2 ? 1 : -FLT_MAX;            /* row 2: masked by a finite value */
            x[4 * v + i] = -INFINITY;                        /* row 4: nothing */
            x[5 * v + i] = i == 5 ? 3e38f : -3e38f;          /* row 5: x - max overflows */
        }
        x[3 * v + 100] = NAN;
        f.logits = test_tensor(te, TE_F32, SHAPE(M, v), x);
        f.target = test_i32(te, SHAPE(M), target);
        f.loss = test_guarded(te, TE_F32, SHAPE(M));
        f.lse = test_guarded(te, TE_F32, SHAPE(M));
        f.ignore_index = -100;
        te_op_cross_entropy_fwd(te, &f);
        CHECK_OK(te);
        float *loss = test_read(f.loss), *lse = test_read(f.lse);
        double s = 0;
        for (int i = 0; i < 8; i++) s += exp((double)x[i]);
        CHECK(fabs(loss[0] - (log(s) - (double)x[0])) < 2e-6);
        CHECK(isfinite(loss[1]) && loss[1] > 0 && loss[1] < 20 && lse[1] > 30000);
        CHECK(loss[2] == 0 && lse[2] == 1);
        CHECK(isnan(loss[3]) && isnan(lse[3]));
        CHECK(isnan(loss[4]) && lse[4] == -INFINITY);
        CHECK(loss[5] == 0 && lse[5] == 3e38f);
    }
}

TE_TEST_DEVICES(cross_entropy_same_bits) {
    ce_case c = {0};
    c.m = 200;
    c.v = 1003;
    c.x = c.dx = TE_F32;
    c.ignore = -100;
    te_ctx *other = test_context_threads(te_ctx_device(te), 5);
    if (!other) return;
    ce_data d = make_data(&c);
    ce_result a = run(te, &c, &d), b = run(other, &c, &d);
    CHECK_BYTES("loss", a.loss, b.loss, (size_t)c.m * 4);
    CHECK_BYTES("dx", a.dx, b.dx, (size_t)(c.m * c.v) * 4);
}

/* ---- mean squared error ---- */

static void run_mse(te_ctx *te, int64_t n, te_dtype x_dtype, te_dtype t_dtype, te_dtype dx_dtype, const float *x, const float *t, float *loss, float **dx) {
    te_op_mse_fwd_args f = {0};
    te_op_mse_bwd_args b = {0};
    float dloss = 1.5f;
    f.x = test_tensor(te, x_dtype, SHAPE(n), x);
    f.target = test_tensor(te, t_dtype, SHAPE(n), t);
    f.loss = test_guarded(te, TE_F32, SHAPE(1));
    te_op_mse_fwd(te, &f);
    b.x = f.x;
    b.target = f.target;
    b.dloss = test_tensor(te, TE_F32, SHAPE(1), &dloss);
    b.dx = test_guarded(te, dx_dtype, SHAPE(n));
    te_op_mse_bwd(te, &b);
    CHECK_OK(te);
    *loss = test_read(f.loss)[0];
    *dx = test_read(b.dx);
}

TE_TEST_DEVICES(mse) {
    static const int64_t sizes[] = {1, 7, 8, 1000, 4096, 20001, 100000, 0, 2200000};
    static const te_dtype formats[][3] = {{TE_F32, TE_F32, TE_F32}, {TE_BF16, TE_BF16, TE_BF16}, {TE_BF16, TE_F32, TE_F16}};
    for (int i = 0; i < COUNT(sizes); i++)
        for (int k = 0; k < COUNT(formats); k++) {
            int64_t n = sizes[i];
            if (n > 1000000 && (k || test_samples())) continue; /* more than one round of the GPU's blocks: once is enough */
            te_dtype dx_dtype = formats[k][2];
            float *x = test_rounded(formats[k][0], test_normal(n, 1), n), *t = test_rounded(formats[k][1], test_normal(n, 2), n);
            float loss, again, *dx, *dx_again, *want = test_floats(n);
            double sum = 0;
            test_case("n=%lld x=%s target=%s dx=%s", (long long)n, te_dtype_name(formats[k][0]), te_dtype_name(formats[k][1]), te_dtype_name(dx_dtype));
            for (int64_t e = 0; e < n; e++) {
                double difference = (double)x[e] - (double)t[e];
                sum += difference * difference;
                want[e] = (float)(1.5 * 2 * difference / (double)n); /* the derivative of a square is exact: nothing to difference */
            }
            float mean = n ? (float)(sum / (double)n) : 0;
            run_mse(te, n, formats[k][0], formats[k][1], dx_dtype, x, t, &loss, &dx);
            CHECK_CLOSE("loss", &loss, &mean, 1, 2e-6, 0);
            CHECK_CLOSE("dx", dx, want, n, dx_dtype == TE_F32 ? 1e-6 : dx_dtype == TE_F16 ? 1e-3 : 8e-3, dx_dtype == TE_F16 ? 6e-8 : 0);
            run_mse(te, n, formats[k][0], formats[k][1], dx_dtype, x, t, &again, &dx_again);
            CHECK_BYTES("loss", &again, &loss, 4);
            te_ctx *cpu = test_cpu_beside(te);
            if (!cpu) continue;
            run_mse(cpu, n, formats[k][0], formats[k][1], dx_dtype, x, t, &again, &dx_again);
            CHECK_CLOSE("loss", &loss, &again, 1, 2e-6, 0);
            CHECK_BYTES("dx", dx, dx_again, (size_t)n * 4);
        }
}

/* Two halves of the vocabulary, merged, are the whole: losses, and each half's gradient. */
TE_TEST_DEVICES(cross_entropy_parts) {
    enum { M = 300, V = 514, H = V / 2 };
    for (int smooth = 0; smooth < 2; smooth++) {
        ce_case c = {.m = M, .v = V, .x = TE_F32, .dx = TE_F32, .smoothing = smooth ? 0.2f : 0, .ignore = -100, .count = true};
        ce_data d = make_data(&c);
        name_case(&c);
        ce_result want = run(te, &c, &d);
        te_op_cross_entropy_merge_args merge = {0};
        float *half[2], *parts = test_floats(2 * M * 3);
        te_tensor *target = test_i32(te, SHAPE(M), d.target), *count = test_guarded(te, TE_F32, SHAPE(1));
        for (int r = 0; r < 2; r++) {
            te_op_cross_entropy_fwd_args f = {0};
            half[r] = test_floats(M * H);
            for (int i = 0; i < M * H; i++) half[r][i] = d.x[i / H * V + r * H + i % H];
            f.logits = test_tensor(te, TE_F32, SHAPE(M, H), half[r]);
            f.target = target;
            f.count = count;
            f.parts = test_guarded(te, TE_F32, SHAPE(M, 3));
            f.label_smoothing = c.smoothing;
            f.ignore_index = c.ignore;
            f.vocab_size = V;
            f.vocab_start = r * H;
            CHECK_EQ_INT(te_op_cross_entropy_fwd(te, &f), TE_OK);
            REQUIRE_OK(te);
            CHECK(test_read(count)[0] == want.count[0]);
            memcpy(parts + r * M * 3, test_read(f.parts), sizeof(float) * M * 3);
        }
        merge.parts = test_tensor(te, TE_F32, SHAPE(2, M, 3), parts);
        merge.target = target;
        merge.loss = test_guarded(te, TE_F32, SHAPE(M));
        merge.lse = test_guarded(te, TE_F32, SHAPE(M));
        merge.label_smoothing = c.smoothing;
        merge.ignore_index = c.ignore;
        merge.vocab_size = V;
        CHECK_EQ_INT(te_op_cross_entropy_merge(te, &merge), TE_OK);
        REQUIRE_OK(te);
        CHECK_TENSOR(merge.lse, want.lse, 2e-6, 1e-6);   /* f32 sums in another order */
        CHECK_TENSOR(merge.loss, want.loss, 4e-6, 4e-6);
        for (int r = 0; r < 2; r++) {
            te_op_cross_entropy_bwd_args b = {0};
            float *grad = test_floats(M * H);
            for (int i = 0; i < M * H; i++) grad[i] = want.dx[i / H * V + r * H + i % H];
            b.logits = test_tensor(te, TE_F32, SHAPE(M, H), half[r]);
            b.target = target;
            b.lse = merge.lse;
            b.dloss = test_tensor(te, TE_F32, SHAPE(M), d.dloss);
            b.count = count;
            b.dlogits = test_guarded(te, TE_F32, SHAPE(M, H));
            b.label_smoothing = c.smoothing;
            b.ignore_index = c.ignore;
            b.vocab_size = V;
            b.vocab_start = r * H;
            CHECK_EQ_INT(te_op_cross_entropy_bwd(te, &b), TE_OK);
            REQUIRE_OK(te);
            CHECK_TENSOR(b.dlogits, grad, 1e-5, 1e-7); /* two lse that differ by a rounding or two */
        }
    }
}

TE_TEST_DEVICES(complaints) {
    te_op_cross_entropy_fwd_args f = {0};
    te_op_cross_entropy_bwd_args b = {0};
    te_op_mse_fwd_args s = {0};
    te_tensor *x = te_tensor_zeros(te, TE_F32, SHAPE(4, 8)), *rows = te_tensor_zeros(te, TE_F32, SHAPE(4)), *ids = te_tensor_zeros(te, TE_I32, SHAPE(4));
    f.logits = x;
    f.target = rows;
    f.loss = f.lse = rows;
    te_op_cross_entropy_fwd(te, &f);
    CHECK_ERROR(te, TE_ERR_DTYPE, "cross_entropy_fwd: target is f32; i32 or i64 is needed");
    f.target = te_tensor_zeros(te, TE_I64, SHAPE(3));
    te_op_cross_entropy_fwd(te, &f);
    CHECK_ERROR(te, TE_ERR_SHAPE, "target is [3]; 4 elements are needed");
    f.target = ids;
    f.label_smoothing = -0.5f;
    te_op_cross_entropy_fwd(te, &f);
    CHECK_ERROR(te, TE_ERR_INVALID, "label_smoothing is -0.5");
    f.label_smoothing = 0;
    f.lse = NULL;
    te_op_cross_entropy_fwd(te, &f);
    CHECK_ERROR(te, TE_ERR_STATE, "lse is NULL");
    b.logits = b.dlogits = x;
    b.target = ids;
    b.lse = rows;
    b.dloss = te_tensor_zeros(te, TE_F32, SHAPE(2));
    te_op_cross_entropy_bwd(te, &b);
    CHECK_ERROR(te, TE_ERR_SHAPE, "dloss is [2]; 4 elements are needed, or one for all rows");
    s.x = x;
    s.target = te_tensor_zeros(te, TE_F32, SHAPE(8, 4));
    s.loss = te_tensor_zeros(te, TE_F32, SHAPE(1));
    te_op_mse_fwd(te, &s);
    CHECK_ERROR(te, TE_ERR_SHAPE, "mse_fwd: target is [8, 4] and x is [4, 8]");
    te_op_cross_entropy_fwd_args part = {0};
    part.logits = te_tensor_zeros(te, TE_F32, SHAPE(2, 8));
    part.target = te_tensor_zeros(te, TE_I32, SHAPE(2));
    part.parts = te_tensor_zeros(te, TE_F32, SHAPE(2, 3));
    part.vocab_size = 16;
    part.vocab_start = 9;
    te_op_cross_entropy_fwd(te, &part);
    CHECK_ERROR(te, TE_ERR_INVALID, "vocab_start is 9, the logits have 8 columns and vocab_size is 16");
    part.vocab_start = 8;
    part.loss = te_tensor_zeros(te, TE_F32, SHAPE(2));
    te_op_cross_entropy_fwd(te, &part);
    CHECK_ERROR(te, TE_ERR_INVALID, "parts and loss are given");
    te_op_cross_entropy_merge_args merge = {0};
    merge.parts = te_tensor_zeros(te, TE_F32, SHAPE(7));
    merge.target = part.target;
    merge.loss = part.loss;
    merge.lse = te_tensor_zeros(te, TE_F32, SHAPE(2));
    merge.vocab_size = 8;
    te_op_cross_entropy_merge(te, &merge);
    CHECK_ERROR(te, TE_ERR_SHAPE, "parts is [7]; a multiple of 3 x 2 elements is needed");
    merge.parts = te_tensor_zeros(te, TE_F32, SHAPE(6));
    merge.vocab_size = 0;
    te_op_cross_entropy_merge(te, &merge);
    CHECK_ERROR(te, TE_ERR_INVALID, "vocab_size 0");
}

/* The gradient over the logits: where these are a leaf, its gradient still has memory of its own. */
TE_TEST_DEVICES(cross_entropy_inplace_backward_of_a_leaf) {
    const float *x = test_normal(4 * 8, 3);
    const int64_t ids[] = {1, 7, 0, 3};
    te_tensor *leaf[2], *target = test_i32(te, SHAPE(4), ids);
    for (int k = 0; k < 2; k++) {
        te_cross_entropy_desc desc = {.inplace_backward = k == 1};
        leaf[k] = te_tensor_set_requires_grad(test_tensor(te, TE_F32, SHAPE(4, 8), x), true);
        te_backward(te_cross_entropy(leaf[k], target, &desc));
    }
    REQUIRE_OK(te);
    const float *want = test_copy(test_read(te_tensor_grad(leaf[0])), 32);
    CHECK_TENSOR(te_tensor_grad(leaf[1]), want, 0, 0);
    CHECK_TENSOR(leaf[0], x, 0, 0);
    CHECK_TENSOR(leaf[1], want, 0, 0);
    te_tensor_fill(te_tensor_grad(leaf[1]), 5);
    CHECK_TENSOR(leaf[1], want, 0, 0);
    CHECK_OK(te);
}
