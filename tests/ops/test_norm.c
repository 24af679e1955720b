/* test_norm.c: LayerNorm and RMSNorm: float64 formulas, finite differences, FP8 outputs, the GPU against the CPU. */
#include "../te_test.h"

typedef struct norm_case {
    int64_t m, n;
    te_dtype x, w, y; /* input (and its gradient), parameters (and theirs), output */
    bool layernorm, zero_centered, no_beta, add, accumulate;
} norm_case;

static void name_case(const norm_case *c) {
    test_case("%s m=%lld n=%lld x=%s w=%s y=%s%s%s%s%s", c->layernorm ? "layernorm" : "rmsnorm", (long long)c->m, (long long)c->n, te_dtype_name(c->x),
              te_dtype_name(c->w), te_dtype_name(c->y), c->zero_centered ? " zero_centered" : "", c->no_beta ? " no_beta" : "", c->add ? " add" : "",
              c->accumulate ? " accumulate" : "");
}

/* The operands, as f32 arrays of values that the formats hold exactly. */
typedef struct norm_data {
    float *x, *gamma, *beta, *dy, *add, *old_dgamma, *old_dbeta;
} norm_data;

static norm_data make_data(const norm_case *c) {
    int64_t count = c->m * c->n;
    norm_data d;
    float *x = test_normal(count, 1), *gamma = test_normal(c->n, 2);
    for (int64_t i = 0; i < count; i++) x[i] = 3.0f * x[i] + 2.0f;
    for (int64_t i = 0; i < c->n; i++) gamma[i] = 0.3f * gamma[i] + (c->zero_centered ? 0.0f : 1.0f);
    d.x = test_rounded(c->x, x, count);
    d.gamma = test_rounded(c->w, gamma, c->n);
    d.beta = test_rounded(c->w, test_normal(c->n, 3), c->n);
    d.dy = test_rounded(c->x, test_normal(count, 4), count);
    d.add = test_rounded(c->x, test_normal(count, 5), count);
    d.old_dgamma = test_rounded(c->w, test_normal(c->n, 6), c->n);
    d.old_dbeta = test_rounded(c->w, test_normal(c->n, 7), c->n);
    return d;
}

/* ---- float64 ---- */

/* Statistics and one row of y. */
static void reference_row(const norm_case *c, const norm_data *d, const double *x, double *mean, double *rstd, double *y) {
    double sum = 0, squares = 0, n = (double)c->n;
    for (int64_t i = 0; i < c->n; i++) sum += x[i];
    *mean = c->layernorm ? sum / n : 0;
    for (int64_t i = 0; i < c->n; i++) squares += (x[i] - *mean) * (x[i] - *mean);
    *rstd = 1 / sqrt(squares / n + 1e-5);
    for (int64_t i = 0; i < c->n; i++)
        y[i] = (x[i] - *mean) * *rstd * (d->gamma[i] + (c->zero_centered ? 1.0 : 0.0)) + (c->layernorm && !c->no_beta ? d->beta[i] : 0);
}
static double *row_of(const norm_case *c, const float *x, int64_t row) {
    double *r = test_doubles(c->n);
    for (int64_t i = 0; i < c->n; i++) r[i] = x[row * c->n + i];
    return r;
}

typedef struct norm_result {
    float *y, *mean, *rstd, *dx, *dgamma, *dbeta;
} norm_result;

static norm_result reference(const norm_case *c, const norm_data *d) {
    norm_result r;
    int64_t m = c->m, n = c->n;
    double *sum_gamma = test_doubles(n), *sum_beta = test_doubles(n);
    double *y = test_doubles(n), *xhat = test_doubles(n), *g = test_doubles(n);
    r.y = test_floats(m * n);
    r.dx = test_floats(m * n);
    r.mean = test_floats(m);
    r.rstd = test_floats(m);
    r.dgamma = test_floats(n);
    r.dbeta = test_floats(n);
    for (int64_t row = 0; row < m; row++) {
        double *x = row_of(c, d->x, row), mean, rstd, gx = 0, gs = 0;
        reference_row(c, d, x, &mean, &rstd, y);
        r.mean[row] = (float)mean;
        r.rstd[row] = (float)rstd;
        for (int64_t i = 0; i < n; i++) {
            double dy = d->dy[row * n + i];
            r.y[row * n + i] = (float)y[i];
            xhat[i] = (x[i] - mean) * rstd;
            g[i] = dy * (d->gamma[i] + (c->zero_centered ? 1.0 : 0.0));
            gx += g[i] * xhat[i];
            gs += g[i];
            sum_gamma[i] += dy * xhat[i];
            sum_beta[i] += dy;
        }
        for (int64_t i = 0; i < n; i++)
            r.dx[row * n + i] = (float)(rstd * (g[i] - gx / (double)n * xhat[i] - (c->layernorm ? gs / (double)n : 0)) + (c->add ? d->add[row * n + i] : 0));
    }
    for (int64_t i = 0; i < n; i++) {
        r.dgamma[i] = (float)(sum_gamma[i] + (c->accumulate ? d->old_dgamma[i] : 0));
        r.dbeta[i] = (float)(sum_beta[i] + (c->accumulate ? d->old_dbeta[i] : 0));
    }
    return r;
}

/* ---- the operation ---- */

static norm_result run(te_ctx *te, const norm_case *c, const norm_data *d) {
    norm_result r = {0};
    te_norm_fwd_args f = {0};
    te_norm_bwd_args b = {0};
    f.x = test_tensor(te, c->x, SHAPE(c->m, c->n), d->x);
    f.gamma = test_tensor(te, c->w, SHAPE(c->n), d->gamma);
    if (c->layernorm && !c->no_beta) f.beta = test_tensor(te, c->w, SHAPE(c->n), d->beta);
    f.y = test_guarded(te, c->y, SHAPE(c->m, c->n));
    f.rstd = test_guarded(te, TE_F32, SHAPE(c->m));
    if (c->layernorm) f.mean = test_guarded(te, TE_F32, SHAPE(c->m));
    f.norm.zero_centered_gamma = c->zero_centered;
    if (c->layernorm)
        te_op_layernorm_fwd(te, &f);
    else
        te_op_rmsnorm_fwd(te, &f);
    b.dy = test_tensor(te, c->x, SHAPE(c->m, c->n), d->dy);
    b.x = f.x;
    b.gamma = f.gamma;
    b.mean = f.mean;
    b.rstd = f.rstd;
    if (c->add) b.add = test_tensor(te, c->x, SHAPE(c->m, c->n), d->add);
    b.dx = test_guarded(te, c->x, SHAPE(c->m, c->n));
    b.dgamma = c->accumulate ? test_guarded_with(te, c->w, SHAPE(c->n), d->old_dgamma) : test_guarded(te, c->w, SHAPE(c->n));
    if (c->layernorm)
        b.dbeta = c->accumulate ? test_guarded_with(te, c->w, SHAPE(c->n), d->old_dbeta) : test_guarded(te, c->w, SHAPE(c->n));
    b.norm.zero_centered_gamma = c->zero_centered;
    b.accumulate = c->accumulate;
    if (c->layernorm)
        te_op_layernorm_bwd(te, &b);
    else
        te_op_rmsnorm_bwd(te, &b);
    CHECK_OK(te);
    r.y = test_read(f.y);
    r.rstd = test_read(f.rstd);
    if (f.mean) r.mean = test_read(f.mean);
    r.dx = test_read(b.dx);
    r.dgamma = test_read(b.dgamma);
    if (b.dbeta) r.dbeta = test_read(b.dbeta);
    return r;
}

/* One rounding to a format, and the neighbour where f32 and float64 round differently. */
static double rtol_of(te_dtype dtype) { return dtype == TE_F32 ? 3e-6 : dtype == TE_F16 ? 1e-3 : 8e-3; }

static void compare(const norm_case *c, norm_result got, norm_result want) {
    int64_t m = c->m, n = c->n;
    /* A sum over rows in f32 is off by about sqrt(m) units in the last place of its terms. */
    double sums = 3e-6 * sqrt((double)m + 1), largest_rstd = 0;
    for (int64_t i = 0; i < m; i++) largest_rstd = fmax(largest_rstd, (double)want.rstd[i]);
    CHECK_CLOSE("y", got.y, want.y, m * n, rtol_of(c->y), 5e-6);
    if (c->layernorm) CHECK_CLOSE("mean", got.mean, want.mean, m, 2e-6, 2e-6);
    CHECK_CLOSE("rstd", got.rstd, want.rstd, m, 2e-6, 0);
    /* dx is rstd times a difference of terms of size 1, each rounded to f32 (6e-8): rstd is 316 for a row of equal values. */
    CHECK_CLOSE("dx", got.dx, want.dx, m * n, rtol_of(c->x), 5e-6 + 1.5e-7 * largest_rstd);
    CHECK_CLOSE("dgamma", got.dgamma, want.dgamma, n, rtol_of(c->w), 4 * sums);
    if (c->layernorm) CHECK_CLOSE("dbeta", got.dbeta, want.dbeta, n, rtol_of(c->w), 4 * sums);
}

static void check_case(te_ctx *te, norm_case c) {
    name_case(&c);
    norm_data d = make_data(&c);
    norm_result got = run(te, &c, &d);
    compare(&c, got, reference(&c, &d));
    te_ctx *cpu = test_cpu_beside(te);
    if (cpu) compare(&c, got, run(cpu, &c, &d));
}

static const int64_t shapes[][2] = {{1, 1},   {1, 8},    {3, 7},    {5, 64},    {2, 255},  {9, 256},   {17, 1000}, {33, 512},
                                    {4, 1024}, {3, 1032}, {300, 96}, {40, 2048}, {6, 4096}, {2, 8192}, {3, 12288}, {2, 20000},
                                    {2, 20001}, {1, 33000}, {150, 5120}, {9, 16384}, {5000, 512}, {0, 16}, {3, 0}};

static void check_shapes(te_ctx *te, bool layernorm, te_dtype dtype) {
    const int every = test_every_odd(3);
    for (int i = 3 % every; i < COUNT(shapes); i += every) { /* 7 shares no factor with the 2, 3 and 4 of the options below */
        norm_case c = {0};
        c.m = shapes[i][0];
        c.n = shapes[i][1];
        c.x = c.w = c.y = dtype;
        c.layernorm = layernorm;
        c.zero_centered = i % 2;
        c.add = i % 3 == 0;
        c.accumulate = i % 4 < 2;
        check_case(te, c);
    }
}
TE_TEST_DEVICES(layernorm_f32) { check_shapes(te, true, TE_F32); }
TE_TEST_DEVICES(rmsnorm_f32) { check_shapes(te, false, TE_F32); }
TE_TEST_DEVICES(layernorm_bf16) { check_shapes(te, true, TE_BF16); }
TE_TEST_DEVICES(rmsnorm_bf16) { check_shapes(te, false, TE_BF16); }

/* Every mix of formats, each option on and off. */
TE_TEST_DEVICES(formats) {
    static const te_dtype formats[] = {TE_F32, TE_F16, TE_BF16};
    int k = 0;
    for (int x = 0; x < 3; x++)
        for (int w = 0; w < 3; w++)
            for (int y = 0; y < 3; y++, k++) {
                norm_case c = {0};
                c.m = 5;
                c.n = k % 2 ? 264 : 77;
                c.x = formats[x];
                c.w = formats[w];
                c.y = formats[y];
                c.layernorm = k % 3 != 0;
                c.no_beta = k % 4 == 1;
                c.zero_centered = k & 1;
                c.add = k & 2;
                c.accumulate = k & 4;
                check_case(te, c);
            }
}

/* A mean that is large beside the spread: one pass over x and x^2 would lose all digits. */
TE_TEST_DEVICES(large_mean) {
    enum { M = 3, N = 1024 };
    te_norm_fwd_args f = {0};
    norm_case c = {0};
    norm_data d;
    c.m = M;
    c.n = N;
    c.x = c.w = c.y = TE_F32;
    c.layernorm = c.no_beta = true;
    d = make_data(&c);
    for (int i = 0; i < M * N; i++) d.x[i] = 1000.0f + d.x[i];
    f.x = test_tensor(te, TE_F32, SHAPE(M, N), d.x);
    f.gamma = test_tensor(te, TE_F32, SHAPE(N), d.gamma);
    f.y = test_guarded(te, TE_F32, SHAPE(M, N));
    te_op_layernorm_fwd(te, &f);
    CHECK_OK(te);
    CHECK_TENSOR(f.y, reference(&c, &d).y, 0, 1e-4);
}

/* The loss sum(y * dy) moves as dx and dgamma say. */
TE_TEST_DEVICES(finite_differences) {
    for (int kind = 0; kind < 4; kind++) {
        norm_case c = {0};
        c.m = 3;
        c.n = 11;
        c.x = c.w = c.y = TE_F32;
        c.layernorm = kind & 1;
        c.zero_centered = kind & 2;
        name_case(&c);
        norm_data d = make_data(&c);
        norm_result got = run(te, &c, &d);
        float *dx = (float *)test_alloc(33 * 4), *dgamma = (float *)test_alloc(11 * 4), *dbeta = (float *)test_alloc(11 * 4);
        for (int64_t row = 0; row < c.m; row++) {
            double *x = row_of(&c, d.x, row), y[11], mean, rstd;
            for (int i = 0; i < 11; i++) {
                double loss[2], at = x[i], step = 1e-5;
                for (int side = 0; side < 2; side++) {
                    x[i] = at + (side ? step : -step);
                    reference_row(&c, &d, x, &mean, &rstd, y);
                    loss[side] = 0;
                    for (int j = 0; j < 11; j++) loss[side] += y[j] * d.dy[row * 11 + j];
                }
                x[i] = at;
                dx[row * 11 + i] = (float)((loss[1] - loss[0]) / (2 * step));
            }
            /* y is linear in gamma and beta: the difference is exact. */
            reference_row(&c, &d, x, &mean, &rstd, y);
            for (int i = 0; i < 11; i++) {
                dgamma[i] += (float)(d.dy[row * 11 + i] * (x[i] - mean) * rstd);
                dbeta[i] += d.dy[row * 11 + i];
            }
        }
        CHECK_CLOSE("dx", got.dx, dx, 33, 1e-5, 1e-5);
        CHECK_CLOSE("dgamma", got.dgamma, dgamma, 11, 1e-5, 1e-5);
        if (c.layernorm) CHECK_CLOSE("dbeta", got.dbeta, dbeta, 11, 1e-5, 1e-5);
    }
}

/* ---- FP8 outputs ---- */

/* `codes` are what the f32 result times scale rounds to. On the GPU two kernels that add in another order may lie on both sides of a tie:
 * then a neighbour within 1e-6 is right too. */
static void check_codes(te_ctx *te, te_dtype dtype, const uint8_t *codes, const float *y, float scale, int64_t m, int64_t n, int64_t ld) {
    te_ctx *cpu = test_context("cpu");
    int64_t count = m * n;
    const uint8_t *want[3];
    for (int k = 0; k < 3; k++) {
        float *scaled = test_copy(y, count);
        for (int64_t i = 0; i < count; i++) scaled[i] = scaled[i] * scale * (k == 0 ? 1.0f : k == 1 ? 1.000001f : 0.999999f);
        want[k] = (const uint8_t *)test_read_bytes(te_tensor_from_f32(cpu, dtype, SHAPE(m, n), scaled));
    }
    for (int64_t row = 0; row < m; row++)
        for (int64_t i = 0; i < ld; i++) {
            int code = codes[row * ld + i];
            if (i >= n) {
                CHECK_MSG(code == 0, "pad column %lld of row %lld is %d", (long long)i, (long long)row, code);
            } else {
                int64_t at = row * n + i;
                bool near = te_ctx_is_cuda(te) && (code == want[1][at] || code == want[2][at]);
                if (code == want[0][at] || near) continue;
                test_fail(__FILE__, __LINE__, "code [%lld, %lld] is %d, not %d: %.9g * %g", (long long)row, (long long)i, code, want[0][at],
                          (double)y[at], (double)scale);
                return;
            }
        }
}

static void check_quantized(te_ctx *te, int64_t m, int64_t n, int64_t ld, te_dtype x_dtype, te_dtype dtype, bool layernorm, float scale) {
    norm_case c = {0};
    te_norm_fwd_args f = {0};
    c.m = m;
    c.n = n;
    c.x = x_dtype;
    c.w = x_dtype;
    c.layernorm = layernorm;
    name_case(&c);
    norm_data d = make_data(&c);
    float before = 0.5f, huge = 1e9f;
    f.x = test_tensor(te, c.x, SHAPE(m, n), d.x);
    f.gamma = test_tensor(te, c.w, SHAPE(n), d.gamma);
    if (layernorm) f.beta = test_tensor(te, c.w, SHAPE(n), d.beta);
    f.y = test_guarded(te, TE_F32, SHAPE(m, n));
    te_result (*op)(te_ctx *, const te_norm_fwd_args *) = layernorm ? te_op_layernorm_fwd : te_op_rmsnorm_fwd;
    op(te, &f);
    float *y = test_read(f.y), amax = before;
    for (int64_t i = 0; i < m * n; i++) amax = fabsf(y[i]) > amax ? fabsf(y[i]) : amax;
    f.y = test_guarded(te, dtype, SHAPE(m, ld));
    f.scale = test_tensor(te, TE_F32, SHAPE(1), &scale);
    f.scale_inv = test_guarded(te, TE_F32, SHAPE(1));
    f.amax = test_guarded_with(te, TE_F32, SHAPE(1), &before);
    op(te, &f);
    CHECK_OK(te);
    check_codes(te, dtype, (const uint8_t *)test_read_bytes(f.y), y, scale, m, n, ld);
    if (m && n) {
        CHECK(test_read(f.scale_inv)[0] == 1.0f / scale);
        CHECK_CLOSE("amax", test_read(f.amax), &amax, 1, te_ctx_is_cuda(te) ? 1e-6 : 0, 0);
    }
    f.amax = test_guarded_with(te, TE_F32, SHAPE(1), &huge); /* a larger amax stays */
    f.scale_inv = NULL;
    op(te, &f);
    CHECK(test_read(f.amax)[0] == huge);
    f.amax = NULL;
    op(te, &f);
    CHECK_OK(te);
}

TE_TEST_DEVICES(fp8_output) {
    static const int64_t quantized[][3] = {{1, 1, 16},    {3, 7, 16},      {5, 64, 64},    {5, 40, 48},     {17, 1000, 1008}, {9, 2048, 2048},
                                           {3, 4096, 4096}, {2, 8192, 8208}, {2, 20000, 20000}, {2, 513, 513}, {0, 64, 64}};
    for (int i = 0; i < COUNT(quantized); i++) {
        const int64_t *q = quantized[i];
        te_dtype x = i % 3 == 0 ? TE_F32 : i % 3 == 1 ? TE_BF16 : TE_F16;
        check_quantized(te, q[0], q[1], q[2], x, TE_F8E4M3, true, 3.7f);
        check_quantized(te, q[0], q[1], q[2], x, TE_F8E5M2, false, 0.037f);
        check_quantized(te, q[0], q[1], q[2], x, TE_F8E4M3, false, 1e5f); /* saturates */
    }
}

/* The codes again, transposed, with zeros behind them. */
static void check_transposed(te_ctx *te, int64_t m, int64_t n, int64_t ld, int64_t ldc, te_dtype x_dtype, te_dtype dtype, bool layernorm) {
    norm_case c = {0};
    te_norm_fwd_args f = {0};
    c.m = m;
    c.n = n;
    c.x = c.w = x_dtype;
    c.y = dtype;
    c.layernorm = layernorm;
    name_case(&c);
    norm_data d = make_data(&c);
    float scale = 5.0f;
    f.x = test_tensor(te, c.x, SHAPE(m, n), d.x);
    f.gamma = test_tensor(te, c.w, SHAPE(n), d.gamma);
    f.scale = test_tensor(te, TE_F32, SHAPE(1), &scale);
    f.y = test_guarded(te, dtype, SHAPE(m, ld));
    f.y_col = test_guarded(te, dtype, SHAPE(n, ldc));
    if (layernorm)
        te_op_layernorm_fwd(te, &f);
    else
        te_op_rmsnorm_fwd(te, &f);
    CHECK_OK(te);
    const uint8_t *row = (const uint8_t *)test_read_bytes(f.y), *col = (const uint8_t *)test_read_bytes(f.y_col);
    for (int64_t i = 0; i < n; i++)
        for (int64_t k = 0; k < ldc; k++)
            if (col[i * ldc + k] != (k < m ? row[k * ld + i] : 0)) {
                test_fail(__FILE__, __LINE__, "y_col [%lld, %lld] is %d, not %d", (long long)i, (long long)k, col[i * ldc + k], k < m ? row[k * ld + i] : 0);
                return;
            }
}
TE_TEST_DEVICES(fp8_both_copies) {
    static const int64_t sizes[][4] = {{1, 1, 1, 1}, {3, 7, 16, 16}, {5, 64, 64, 5}, {40, 40, 48, 48}, {129, 1000, 1008, 144}, {200, 512, 512, 208}, {33, 4096, 4096, 48}, {0, 64, 64, 16}};
    for (int i = 0; i < COUNT(sizes); i++) {
        const int64_t *s = sizes[i];
        check_transposed(te, s[0], s[1], s[2], s[3], i % 2 ? TE_BF16 : TE_F32, TE_F8E4M3, true);
        check_transposed(te, s[0], s[1], s[2], s[3], i % 2 ? TE_F16 : TE_BF16, TE_F8E5M2, false);
    }
}

/* y_amax is what te_op_amax finds in y, whatever stood there and however often it is asked. */
TE_TEST_DEVICES(amax_of_the_output) {
    static const int64_t sizes[][2] = {{1, 1}, {3, 7}, {5, 64}, {300, 96}, {17, 1000}, {9, 2048}, {130, 4096}, {2, 20001}, {3000, 8}, {0, 16}, {3, 0}};
    static const te_dtype formats[] = {TE_F32, TE_F16, TE_BF16};
    for (int i = 0; i < COUNT(sizes); i++)
        for (int k = 0; k < 6; k++) {
            norm_case c = {0};
            te_norm_fwd_args f = {0};
            te_op_amax_args read = {0};
            if ((6 * i + k) % test_every_odd(3)) continue;
            c.m = sizes[i][0];
            c.n = sizes[i][1];
            c.x = c.w = formats[(i + k) % 3];
            c.y = formats[k % 3];
            c.layernorm = k < 3;
            name_case(&c);
            norm_data d = make_data(&c);
            float before = 1e9f;
            if (c.m > 2 && c.n > 5) d.x[c.n + 3] = NAN; /* a row of NaN, left out */
            f.x = test_tensor(te, c.x, SHAPE(c.m, c.n), d.x);
            f.gamma = test_tensor(te, c.w, SHAPE(c.n), d.gamma);
            if (c.layernorm) f.beta = test_tensor(te, c.w, SHAPE(c.n), d.beta);
            f.y = test_guarded(te, c.y, SHAPE(c.m, c.n));
            for (int again = 0; again < 2; again++) {
                f.y_amax = test_guarded_with(te, TE_F32, SHAPE(1), &before);
                if (c.layernorm)
                    te_op_layernorm_fwd(te, &f);
                else
                    te_op_rmsnorm_fwd(te, &f);
                read.x = f.y;
                read.amax = test_guarded(te, TE_F32, SHAPE(1));
                te_op_amax(te, &read);
                CHECK_OK(te);
                CHECK_BYTES("y_amax", test_read(f.y_amax), test_read(read.amax), 4);
            }
            float largest = test_read(read.amax)[0], start[2];
            start[0] = 0;
            start[1] = 2;
            f.y_amax = NULL;
            for (int again = 0; again < 2; again++) { /* amax goes on from where it stands */
                f.amax = test_guarded_with(te, TE_F32, SHAPE(1), &start[again]);
                if (c.layernorm)
                    te_op_layernorm_fwd(te, &f);
                else
                    te_op_rmsnorm_fwd(te, &f);
                CHECK_OK(te);
                CHECK(test_read(f.amax)[0] == fmaxf(largest, start[again]));
            }
        }
}

/* NaN stays in its row and out of the amax; an infinity in x makes a row of NaN. */
/* Rows of one number have nothing but beta to say, exactly; and squares beyond f32 do not end a row whose variance is not. */
TE_TEST_DEVICES(rows_far_from_zero) {
    static const float numbers[] = {100.5f, 1008.0f, -65280.0f, 1.0e34f}; /* in bf16 */
    static const int64_t sizes[][2] = {{3, 13}, {3, 512}, {3, 4096}, {2, 5120}, {8200, 2048}};
    for (int i = 0; i < COUNT(sizes); i++) {
        int64_t m = sizes[i][0], n = sizes[i][1];
        te_norm_fwd_args f = {0};
        if (m > 8000 && !te_ctx_is_cuda(te)) m = 100;
        te_scope_begin(te);
        f.gamma = te_tensor_full(te, TE_BF16, SHAPE(n), 1);
        f.beta = te_tensor_full(te, TE_BF16, SHAPE(n), 0.25);
        f.norm.eps = 1e-5f;
        for (int k = 0; k < COUNT(numbers); k++) {
            test_case("%lld x %lld of %g", (long long)m, (long long)n, (double)numbers[k]);
            f.x = te_tensor_full(te, TE_BF16, SHAPE(m, n), numbers[k]);
            f.y = test_guarded(te, TE_BF16, SHAPE(m, n));
            te_op_layernorm_fwd(te, &f);
            REQUIRE_OK(te);
            float *y = test_read(f.y);
            for (int64_t e = 0; e < m * n; e++)
                if (y[e] != 0.25f) {
                    CHECK_MSG(false, "element %lld: %g", (long long)e, (double)y[e]);
                    break;
                }
        }
        float *x = test_normal(m * n, 7);
        for (int64_t e = 0; e < m * n; e++) x[e] = 1e18f * (1 + 0.05f * x[e]);
        test_case("%lld x %lld about 1e18", (long long)m, (long long)n);
        f.x = test_tensor(te, TE_BF16, SHAPE(m, n), x);
        f.y = test_guarded(te, TE_BF16, SHAPE(m, n));
        te_op_layernorm_fwd(te, &f);
        REQUIRE_OK(te);
        float *y = test_read(f.y);
        for (int64_t r = 0; r < m; r++) {
            double squares = 0;
            for (int64_t e = 0; e < n; e++) squares += (double)(y[r * n + e] - 0.25f) * (double)(y[r * n + e] - 0.25f);
            if (!(fabs(squares / (double)n - 1) < 0.02)) { /* 1 by definition; y is rounded to 8 bits */
                CHECK_MSG(false, "row %lld: mean square %g", (long long)r, squares / (double)n);
                break;
            }
        }
        te_scope_end(te);
    }
}

TE_TEST_DEVICES(odd_values) {
    static const te_dtype outputs[] = {TE_F32, TE_BF16, TE_F8E4M3};
    static const int64_t widths[] = {64, 13};
    for (int w = 0; w < COUNT(widths); w++)
        for (int o = 0; o < COUNT(outputs); o++) {
            int64_t n = widths[w];
            te_norm_fwd_args f = {0};
            float *x = test_normal(3 * n, 1), one = 1, zero = 0;
            x[5] = NAN;
            x[n + 6] = INFINITY;
            f.x = test_tensor(te, TE_F32, SHAPE(3, n), x);
            f.gamma = te_tensor_full(te, TE_F32, SHAPE(n), 1);
            f.y = test_guarded(te, outputs[o], SHAPE(3, n));
            if (outputs[o] == TE_F8E4M3) {
                f.scale = test_tensor(te, TE_F32, SHAPE(1), &one);
                f.amax = test_guarded_with(te, TE_F32, SHAPE(1), &zero);
            }
            te_op_layernorm_fwd(te, &f);
            CHECK_OK(te);
            float *y = test_read(f.y);
            for (int64_t i = 0; i < 2 * n; i++) CHECK(isnan(y[i]));
            for (int64_t i = 2 * n; i < 3 * n; i++) CHECK(isfinite(y[i]));
            if (f.amax) CHECK(test_read(f.amax)[0] > 0.5f && test_read(f.amax)[0] < 10.0f);
        }
}

/* ---- many rows ---- */

/* A row's bits are its own: as many rows as take norm_fwd_queue, all at once and by parts that do not. Of LayerNorm's rows some have a mean that is
 * larger than the spread, some have not. */
static void check_parts(te_ctx *te, int64_t m, int64_t n, te_dtype dtype, bool layernorm) {
    enum { PART = 600 };
    te_norm_fwd_args f, part;
    te_tensor *x;
    te_result (*op)(te_ctx *, const te_norm_fwd_args *) = layernorm ? te_op_layernorm_fwd : te_op_rmsnorm_fwd;
    float zero = 0, scale = 9.1f;
    test_case("%s %lldx%lld to %s", layernorm ? "layernorm" : "rmsnorm", (long long)m, (long long)n, te_dtype_name(dtype));
    te_scope_begin(te);
    memset(&f, 0, sizeof f);
    f.x = x = te_tensor_normal(te, TE_BF16, SHAPE(m, n), layernorm ? 1.0f : 0.0f, 1);
    f.gamma = te_tensor_normal(te, TE_BF16, SHAPE(n), 1, 0.2f);
    if (layernorm) f.beta = te_tensor_normal(te, TE_BF16, SHAPE(n), 0, 1);
    if (dtype == TE_F8E4M3) f.scale = test_tensor(te, TE_F32, SHAPE(1), &scale);
    part = f;
    for (int again = 0; again < 2; again++) {
        f.y = test_guarded(te, dtype, SHAPE(m, n));
        f.rstd = test_guarded(te, TE_F32, SHAPE(m));
        if (layernorm) f.mean = test_guarded(te, TE_F32, SHAPE(m));
        if (f.scale) f.amax = test_guarded_with(te, TE_F32, SHAPE(1), &zero);
        op(te, &f);
        CHECK_OK(te);
    }
    size_t size = te_tensor_bytes(f.y) / (size_t)m;
    const uint8_t *y = (const uint8_t *)test_read_bytes(f.y);
    const float *rstd = test_read(f.rstd), *mean = layernorm ? test_read(f.mean) : NULL;
    if (f.scale) part.amax = test_guarded_with(te, TE_F32, SHAPE(1), &zero);
    for (int64_t first = 0; first < m; first += PART) {
        int64_t rows = m - first < PART ? m - first : PART;
        part.x = te_tensor_narrow(x, 0, first, rows);
        part.y = test_guarded(te, dtype, SHAPE(rows, n));
        part.rstd = test_guarded(te, TE_F32, SHAPE(rows));
        if (layernorm) part.mean = test_guarded(te, TE_F32, SHAPE(rows));
        op(te, &part);
        CHECK_OK(te);
        CHECK_BYTES("y", y + (size_t)first * size, test_read_bytes(part.y), (size_t)rows * size);
        CHECK_BYTES("rstd", rstd + first, test_read(part.rstd), (size_t)rows * 4);
        if (layernorm) CHECK_BYTES("mean", mean + first, test_read(part.mean), (size_t)rows * 4);
    }
    if (f.scale) CHECK_BYTES("amax", test_read(f.amax), test_read(part.amax), 4);
    te_scope_end(te);
}
TE_TEST_DEVICES(many_rows) {
    static const int64_t sizes[][2] = {{4101, 4096}, {2049, 8192}, {8203, 2048}, {3300, 5120}};
    for (int i = 0; i < COUNT(sizes); i++)
        for (int k = 0; k < 4; k++)
            if ((4 * i + k) % test_every_odd(2) == 0) check_parts(te, te_ctx_is_cuda(te) ? sizes[i][0] : 70, sizes[i][1], k & 1 ? TE_F8E4M3 : TE_BF16, k & 2);
}

/* ---- habits ---- */

/* The same bits again, and on the CPU whatever the number of threads. */
TE_TEST_DEVICES(same_bits) {
    for (int k = 0; k < 2; k++) {
        norm_case c = {0};
        c.m = 700;
        c.n = k ? 200 : 203;
        c.x = c.y = c.w = TE_F32;
        c.layernorm = true;
        name_case(&c);
        norm_data d = make_data(&c);
        te_ctx *other = test_context_threads(te_ctx_device(te), 5);
        if (!other) return;
        norm_result a = run(te, &c, &d), b = run(other, &c, &d);
        CHECK_BYTES("y", a.y, b.y, (size_t)(c.m * c.n) * 4);
        CHECK_BYTES("dx", a.dx, b.dx, (size_t)(c.m * c.n) * 4);
        CHECK_BYTES("dgamma", a.dgamma, b.dgamma, (size_t)c.n * 4);
        CHECK_BYTES("dbeta", a.dbeta, b.dbeta, (size_t)c.n * 4);
    }
}

/* Addresses that are not multiples of 16 take the general kernels; dx may take the place of dy. */
TE_TEST_DEVICES(misaligned_and_in_place) {
    for (int shift = 0; shift < 2; shift++) {
        enum { M = 5, N = 256 };
        norm_case c = {0};
        te_norm_fwd_args f = {0};
        te_norm_bwd_args b = {0};
        c.m = M;
        c.n = N;
        c.x = c.w = c.y = TE_BF16;
        norm_data d = make_data(&c);
        norm_result want = reference(&c, &d);
        float *padded = (float *)test_alloc((M * N + 1) * 4);
        te_tensor *x, *dy;
        memcpy(padded + shift, d.x, M * N * 4);
        x = te_tensor_narrow(test_tensor(te, TE_BF16, SHAPE(M * N + 1), padded), 0, shift, M * N);
        memcpy(padded + shift, d.dy, M * N * 4);
        dy = te_tensor_narrow(test_tensor(te, TE_BF16, SHAPE(M * N + 1), padded), 0, shift, M * N);
        f.x = te_tensor_view(x, SHAPE(M, N));
        f.gamma = test_tensor(te, TE_BF16, SHAPE(N), d.gamma);
        f.y = test_guarded(te, TE_BF16, SHAPE(M, N));
        f.rstd = test_guarded(te, TE_F32, SHAPE(M));
        te_op_rmsnorm_fwd(te, &f);
        b.dx = te_tensor_view(dy, SHAPE(M, N));
        b.dy = b.dx;
        b.x = f.x;
        b.gamma = f.gamma;
        b.rstd = f.rstd;
        te_op_rmsnorm_bwd(te, &b); /* without dgamma */
        CHECK_OK(te);
        CHECK_TENSOR(f.y, want.y, 8e-3, 5e-6);
        CHECK_TENSOR(b.dx, want.dx, 8e-3, 5e-6);
    }
}

TE_TEST_DEVICES(complaints) {
    te_norm_fwd_args f = {0};
    te_norm_bwd_args b = {0};
    te_tensor *x = te_tensor_zeros(te, TE_F32, SHAPE(2, 3, 8)), *v = te_tensor_zeros(te, TE_F32, SHAPE(8)), *rows = te_tensor_zeros(te, TE_F32, SHAPE(6));
    f.x = x;
    f.y = x;
    te_op_rmsnorm_fwd(te, &f);
    CHECK_ERROR(te, TE_ERR_STATE, "rmsnorm_fwd: gamma is NULL");
    f.gamma = te_tensor_zeros(te, TE_F32, SHAPE(7));
    te_op_rmsnorm_fwd(te, &f);
    CHECK_ERROR(te, TE_ERR_SHAPE, "rmsnorm_fwd: gamma is [7]; 8 elements are needed");
    f.gamma = v;
    f.beta = v;
    te_op_rmsnorm_fwd(te, &f);
    CHECK_ERROR(te, TE_ERR_INVALID, "RMSNorm has no beta");
    f.y = te_tensor_zeros(te, TE_F32, SHAPE(5, 8));
    te_op_layernorm_fwd(te, &f);
    CHECK_ERROR(te, TE_ERR_SHAPE, "layernorm_fwd: y is [5, 8] and x is [2, 3, 8]; y must be [6, 8]");
    f.y = te_tensor_zeros(te, TE_F8E4M3, SHAPE(6, 8));
    te_op_layernorm_fwd(te, &f);
    CHECK_ERROR(te, TE_ERR_STATE, "layernorm_fwd: scale is NULL");
    f.scale = te_tensor_full(te, TE_F32, SHAPE(1), 1);
    f.y_amax = te_tensor_zeros(te, TE_F32, SHAPE(1));
    te_op_layernorm_fwd(te, &f);
    CHECK_ERROR(te, TE_ERR_INVALID, "y_amax belongs to a float y, and y is e4m3");
    f.y_amax = NULL;
    f.y_col = te_tensor_zeros(te, TE_F8E5M2, SHAPE(8, 6));
    te_op_layernorm_fwd(te, &f);
    CHECK_ERROR(te, TE_ERR_DTYPE, "y is e4m3 and y_col is e5m2");
    f.y_col = te_tensor_zeros(te, TE_F8E4M3, SHAPE(8, 5));
    te_op_layernorm_fwd(te, &f);
    CHECK_ERROR(te, TE_ERR_SHAPE, "y_col is [8, 5]; 8 rows of at least 6 columns are needed");
    f.y_col = NULL;
    f.scale = NULL;
    f.y = te_tensor_zeros(te, TE_I32, SHAPE(6, 8));
    te_op_layernorm_fwd(te, &f);
    CHECK_ERROR(te, TE_ERR_DTYPE, "y is i32");
    f.y = x;
    f.amax = f.y_amax = te_tensor_zeros(te, TE_F32, SHAPE(1));
    te_op_layernorm_fwd(te, &f);
    CHECK_ERROR(te, TE_ERR_INVALID, "amax and y_amax; one of them is possible");
    f.amax = f.y_amax = NULL;
    f.norm.eps = -1;
    te_op_layernorm_fwd(te, &f);
    CHECK_ERROR(te, TE_ERR_INVALID, "eps is -1");
    f.norm.eps = 0;
    f.x = te_tensor_transpose(te_tensor_zeros(te, TE_F32, SHAPE(8, 6)), 0, 1);
    te_op_layernorm_fwd(te, &f);
    CHECK_ERROR(te, TE_ERR_SHAPE, "strided");
    b.x = b.dx = x;
    b.dy = te_tensor_zeros(te, TE_F32, SHAPE(6, 9));
    b.gamma = v;
    b.rstd = rows;
    te_op_rmsnorm_bwd(te, &b);
    CHECK_ERROR(te, TE_ERR_SHAPE, "rmsnorm_bwd: dy is [6, 9] and x is [2, 3, 8]");
    b.dy = x;
    te_op_layernorm_bwd(te, &b);
    CHECK_ERROR(te, TE_ERR_STATE, "layernorm_bwd: mean is NULL");
    b.mean = v;
    te_op_layernorm_bwd(te, &b);
    CHECK_ERROR(te, TE_ERR_SHAPE, "mean is [8]; 6 elements are needed");
}

/* ---- L2 ---- */

TE_TEST_DEVICES(l2_normalization) {
    static const int64_t sizes[][2] = {{5, 7}, {300, 64}, {3, 2000}, {1, 1}, {0, 8}};
    static const te_dtype formats[] = {TE_F32, TE_BF16, TE_F16};
    for (int k = 0; k < COUNT(sizes); k++)
        for (int f = 0; f < 6; f++) {
            int64_t m = sizes[k][0], n = sizes[k][1];
            te_dtype dtype = formats[f % 3];
            bool in_place = f >= 3;
            double step = dtype == TE_BF16 ? 0x1p-8 : dtype == TE_F16 ? 0x1p-11 : 0;
            float *x = test_normal(m * n, 3), *want = test_floats(m * n), *slope = test_floats(m * n), *rnorm = test_floats(m);
            for (int64_t i = 0; i < n && m > 1; i++) x[n + i] = 0; /* a row without a norm */
            x = test_rounded(dtype, x, m * n);
            const float *dy = test_rounded(dtype, test_normal(m * n, 4), m * n);
            test_case("[%d, %d] %s%s", (int)m, (int)n, te_dtype_name(dtype), in_place ? ", in place" : "");
            for (int64_t r = 0; r < m; r++) {
                double square = 0, along = 0, inverse;
                for (int64_t i = r * n; i < (r + 1) * n; i++) square += (double)x[i] * (double)x[i], along += (double)x[i] * (double)dy[i];
                inverse = 1 / sqrt(square + 1e-6);
                rnorm[r] = (float)inverse;
                for (int64_t i = r * n; i < (r + 1) * n; i++) {
                    want[i] = (float)((double)x[i] * inverse);
                    slope[i] = (float)(inverse * ((double)dy[i] - (double)x[i] * inverse * inverse * along));
                }
            }
            te_tensor *in = test_tensor(te, dtype, SHAPE(m, n), x), *upstream = test_guarded_with(te, dtype, SHAPE(m, n), dy);
            te_op_l2normalize_fwd_args fwd = {0};
            te_op_l2normalize_bwd_args bwd = {0};
            fwd.x = bwd.x = in;
            fwd.rnorm = test_guarded(te, TE_F32, SHAPE(m));
            bwd.rnorm = fwd.rnorm;
            bwd.dy = upstream;
            bwd.dx = in_place ? upstream : test_guarded(te, dtype, SHAPE(m, n));
            fwd.y = test_guarded_with(te, dtype, SHAPE(m, n), x);
            if (in_place) fwd.x = fwd.y;
            CHECK_EQ_INT(te_op_l2normalize_fwd(te, &fwd), TE_OK);
            CHECK_EQ_INT(te_op_l2normalize_bwd(te, &bwd), TE_OK);
            REQUIRE_OK(te);
            if (m == 0) continue;
            CHECK_TENSOR(fwd.rnorm, rnorm, 2e-6, 0);
            CHECK_TENSOR(fwd.y, want, step + 3e-6, 1e-7);
            /* dy and its part along x may cancel: f32 of numbers of the size of rnorm, 1000 for the row of zeros. */
            CHECK_TENSOR(bwd.dx, slope, step + 4e-6, n == 1 ? 4e-3 : 4e-6);
        }
    /* The function, by differences. */
    float *x = test_normal(12, 9);
    const float *w = test_normal(12, 10);
    double at[2];
    te_tensor *in = te_tensor_set_requires_grad(test_tensor(te, TE_F32, SHAPE(3, 4), x), true);
    te_backward_from(te_l2_normalization(in, 0.1f), test_tensor(te, TE_F32, SHAPE(3, 4), w));
    REQUIRE_OK(te);
    const float *g = test_copy(test_read(te_tensor_grad(in)), 12);
    for (int i = 0; i < 12; i++) {
        for (int side = 0; side < 2; side++) {
            float before = x[i];
            x[i] += side ? -1e-2f : 1e-2f;
            const float *y = test_read(te_l2_normalization(test_tensor(te, TE_F32, SHAPE(3, 4), x), 0.1f));
            at[side] = 0;
            for (int j = 0; j < 12; j++) at[side] += (double)y[j] * (double)w[j];
            x[i] = before;
        }
        CHECK_MSG(fabs((at[0] - at[1]) / 2e-2 - (double)g[i]) < 2e-4, "dx[%d] is %g; by differences %g", i, (double)g[i], (at[0] - at[1]) / 2e-2);
    }
    te_op_l2normalize_fwd_args bad = {0};
    bad.x = in;
    bad.y = te_tensor_zeros(te, TE_F32, SHAPE(3, 5));
    te_op_l2normalize_fwd(te, &bad);
    CHECK_ERROR(te, TE_ERR_SHAPE, "l2normalize_fwd: y is [3, 5] and x is [3, 4]");
    CHECK(te_l2_normalization(in, -1) == NULL);
    CHECK_ERROR(te, TE_ERR_INVALID, "eps is -1; it must be positive");
}
