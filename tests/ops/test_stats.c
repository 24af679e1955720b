/* Error statistics: counts exactly, sums against long sums in double. */
#include "../te_test.h"

static const te_dtype floats[] = {TE_F32, TE_BF16, TE_F16};

/* The expected result of quant_error for x, y and limit (or NULL). */
static void check_error(te_ctx *te, te_dtype dtype, const float *values, const float *y, const float *limit, int64_t n, bool shifted) {
    const float *x = test_rounded(dtype, values, n);
    int64_t want[6] = {n, 0, 0, 0, 0, 0};
    double xx = 0, yy = 0, xy = 0, dd = 0;
    float largest = 0;
    test_case("%s n %d%s%s", te_dtype_name(dtype), (int)n, limit ? " limit" : "", shifted ? " shifted" : "");
    for (int64_t i = 0; i < n; i++) {
        volatile float most = limit ? 1.004f * limit[i] : INFINITY, d = x[i] - y[i];
        want[1] += x[i] != 0 && y[i] == 0;
        want[2] += isfinite(x[i]) && fabsf(x[i]) > most;
        want[3] += isnan(x[i]) != 0;
        want[4] += isinf(x[i]) != 0;
        want[5] += x[i] == 0;
        if (!isfinite(x[i]) || !isfinite(y[i])) continue;
        xx += (double)x[i] * x[i], yy += (double)y[i] * y[i], xy += (double)x[i] * y[i], dd += (double)d * d;
        largest = fmaxf(largest, fabsf(d));
    }
    te_op_quant_error_args a = {0};
    a.x = test_tensor(te, dtype, SHAPE(n), x);
    a.y = test_tensor(te, TE_F32, SHAPE(n), y);
    a.limit = limit ? test_tensor(te, TE_F32, SHAPE(n), limit) : NULL;
    if (shifted && n > 0) { /* views from the second element on, whose addresses are aligned to nothing */
        float *more = test_floats(n + 1);
        memcpy(more + 1, y, (size_t)n * 4);
        a.y = te_tensor_narrow(test_tensor(te, TE_F32, SHAPE(n + 1), more), 0, 1, n);
    }
    a.counts = test_guarded(te, TE_I64, SHAPE(6));
    a.sums = test_guarded(te, TE_F32, SHAPE(5));
    CHECK_EQ_INT(te_op_quant_error(te, &a), TE_OK);
    REQUIRE_OK(te);
    CHECK_BYTES("counts", test_read_bytes(a.counts), want, sizeof want);
    const float *got = test_read(a.sums);
    CHECK_MSG(fabs(got[0] - xx) <= 1e-5 * xx, "x^2: %g, not %g", (double)got[0], xx);
    CHECK_MSG(fabs(got[1] - yy) <= 1e-5 * yy, "y^2: %g, not %g", (double)got[1], yy);
    CHECK_MSG(fabs(got[2] - xy) <= 1e-5 * sqrt(xx * yy), "x y: %g, not %g", (double)got[2], xy);
    CHECK_MSG(fabs(got[3] - dd) <= 1e-5 * dd, "(x - y)^2: %g, not %g", (double)got[3], dd);
    CHECK(got[4] == largest);
    /* The same again. */
    float first[5];
    memcpy(first, got, sizeof first);
    te_op_quant_error(te, &a);
    CHECK_BYTES("sums once more", test_read_bytes(a.sums), first, sizeof first);
}

TE_TEST_DEVICES(quant_error_sizes) {
    static const int64_t sizes[] = {0, 1, 7, 8, 2049, 8192, 8193, 100003};
    for (int s = 0; s < COUNT(sizes); s++)
        for (int d = 0; d < 3; d++) {
            int64_t n = sizes[s];
            float *x = test_normal(n, 1), *y = test_normal(n, 2), *limit = test_uniform(n, 3, 0.1f, 3);
            for (int64_t i = 0; i < n; i++) {
                y[i] = i % 11 == 0 ? 0 : x[i] + 0.03f * y[i];
                if (i % 13 == 5) x[i] = 0;
                if (i % 101 == 7) x[i] = NAN;
                if (i % 103 == 9) x[i] = i % 2 ? INFINITY : -INFINITY;
                if (i % 107 == 3) y[i] = i % 2 ? NAN : INFINITY;
            }
            check_error(te, floats[d], x, y, s % 2 ? limit : NULL, n, false);
            check_error(te, floats[d], x, y, limit, n, true);
        }
}

/* The allowance over the limit: 1.004 of it is not beyond it, the next number is. */
TE_TEST_DEVICES(quant_error_limit) {
    volatile float edge = 1.004f * 448.0f;
    const float x[] = {448, -edge, nextafterf(edge, 1000), -nextafterf(edge, 1000), 449, 0, INFINITY, NAN}, y[] = {448, -448, 448, -448, 448, 0, 448, NAN};
    const float limit[] = {448, 448, 448, 448, 448, 0, 448, 448};
    check_error(te, TE_F32, x, y, limit, 8, false);
    te_op_quant_error_args a = {0};
    a.x = test_tensor(te, TE_F32, SHAPE(8), x);
    a.y = test_tensor(te, TE_F32, SHAPE(2, 4), y);
    a.limit = test_tensor(te, TE_F32, SHAPE(8), limit);
    a.counts = te_tensor_zeros(te, TE_I64, SHAPE(6));
    a.sums = te_tensor_zeros(te, TE_F32, SHAPE(5));
    te_op_quant_error(te, &a);
    const int64_t want[6] = {8, 0, 2, 1, 1, 1};
    CHECK_BYTES("counts", test_read_bytes(a.counts), want, sizeof want);
}

TE_TEST(quant_error_errors) {
    te_ctx *te = test_context("cpu");
    te_op_quant_error_args a = {0};
    a.x = te_tensor_zeros(te, TE_BF16, SHAPE(2, 4));
    a.y = te_tensor_zeros(te, TE_BF16, SHAPE(2, 4));
    a.counts = te_tensor_zeros(te, TE_I64, SHAPE(6));
    a.sums = te_tensor_zeros(te, TE_F32, SHAPE(5));
    te_op_quant_error(te, &a);
    CHECK_ERROR(te, TE_ERR_DTYPE, "y is bf16; f32 is needed");
    a.y = te_tensor_zeros(te, TE_F32, SHAPE(9));
    te_op_quant_error(te, &a);
    CHECK_ERROR(te, TE_ERR_SHAPE, "y is [9]; 8 elements are needed");
    a.y = te_tensor_zeros(te, TE_F32, SHAPE(8));
    a.counts = te_tensor_zeros(te, TE_I32, SHAPE(6));
    te_op_quant_error(te, &a);
    CHECK_ERROR(te, TE_ERR_DTYPE, "counts is i32; i64 is needed");
    a.counts = te_tensor_zeros(te, TE_I64, SHAPE(5));
    te_op_quant_error(te, &a);
    CHECK_ERROR(te, TE_ERR_SHAPE, "6 elements are needed");
    a.counts = te_tensor_zeros(te, TE_I64, SHAPE(6));
    a.sums = NULL;
    te_op_quant_error(te, &a);
    CHECK_ERROR(te, TE_ERR_STATE, "sums is NULL");
    a.sums = te_tensor_zeros(te, TE_F32, SHAPE(5));
    a.limit = te_tensor_zeros(te, TE_F32, SHAPE(1));
    te_op_quant_error(te, &a);
    CHECK_ERROR(te, TE_ERR_SHAPE, "limit is [1]");
    a.limit = NULL;
    CHECK_EQ_INT(te_op_quant_error(te, &a), TE_OK);
}
