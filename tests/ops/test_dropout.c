/* test_dropout.c: dropout with bias and residual: the formula, the rate, the bits of Philox, the GPU against the CPU. */
#include "../te_test.h"

typedef struct dropout_case {
    int64_t m, n;
    te_dtype x, w, y;
    bool bias, residual;
    float p;
} dropout_case;

static float *run(te_ctx *te, const dropout_case *c, const float *x, const float *bias, const float *residual) {
    te_op_dropout_add_fwd_args f = {0};
    f.x = test_tensor(te, c->x, SHAPE(c->m, c->n), x);
    if (c->bias) f.bias = test_tensor(te, c->w, SHAPE(c->n), bias);
    if (c->residual) f.residual = test_tensor(te, c->y, SHAPE(c->m, c->n), residual);
    f.y = test_guarded(te, c->y, SHAPE(c->m, c->n));
    f.p = c->p;
    f.seed = 77;
    f.offset = 5;
    te_op_dropout_add_fwd(te, &f);
    CHECK_OK(te);
    return test_read(f.y);
}
/* dropout of ones without bias or residual, in f32: 1 / (1 - p) where an element is kept, else 0. */
static float *mask_of(te_ctx *te, int64_t count, float p) {
    te_op_dropout_add_bwd_args b = {0};
    b.dy = te_tensor_full(te, TE_F32, SHAPE(count), 1);
    b.dx = test_guarded(te, TE_F32, SHAPE(count));
    b.p = p;
    b.seed = 77;
    b.offset = 5;
    te_op_dropout_add_bwd(te, &b);
    CHECK_OK(te);
    return test_read(b.dx);
}

TE_TEST_DEVICES(formula) {
    static const int64_t shapes[][2] = {{1, 1}, {3, 7}, {5, 64}, {17, 1000}, {2, 4099}, {1, 20000}, {64, 8}, {0, 8}, {4, 0}};
    static const te_dtype formats[] = {TE_F32, TE_BF16, TE_F16};
    te_ctx *cpu = test_cpu_beside(te);
    for (int i = 0; i < COUNT(shapes); i++)
        for (int k = 0; k < 24; k++) {
            dropout_case c = {0};
            int64_t count = shapes[i][0] * shapes[i][1];
            c.m = shapes[i][0];
            c.n = shapes[i][1];
            c.bias = k & 1;
            c.residual = k & 2;
            c.p = k & 4 ? 0.3f : 0.0f;
            c.x = c.w = formats[k / 8];
            c.y = k % 8 == 7 ? TE_F32 : c.x;
            if (k % 8 == 6) c.w = TE_F32;
            test_case("m=%lld n=%lld x=%s w=%s y=%s bias=%d residual=%d p=%g", (long long)c.m, (long long)c.n, te_dtype_name(c.x), te_dtype_name(c.w),
                      te_dtype_name(c.y), c.bias, c.residual, (double)c.p);
            float *x = test_rounded(c.x, test_normal(count, 1), count), *bias = test_rounded(c.w, test_normal(c.n, 2), c.n);
            float *residual = test_rounded(c.y, test_normal(count, 3), count), *got = run(te, &c, x, bias, residual);
            float *mask = mask_of(te, count, c.p), *want = test_floats(count);
            for (int64_t e = 0; e < count; e++) {
                CHECK(mask[e] == 0.0f || mask[e] == 1.0f / (1.0f - c.p));
                want[e] = (float)((c.residual ? residual[e] : 0) + ((double)x[e] + (c.bias ? bias[e % c.n] : 0)) * (double)mask[e]);
            }
            CHECK_CLOSE("y", got, want, count, c.y == TE_F32 ? 1e-6 : c.y == TE_F16 ? 1e-3 : 8e-3, 1e-6);
            if (cpu) CHECK_BYTES("y", got, run(cpu, &c, x, bias, residual), (size_t)count * 4);
        }
}

/* Which elements are kept: the four words of Philox block i / 4, recomputed here from the paper's definition. */
static uint32_t philox_word(uint64_t seed, uint64_t offset, uint64_t i) {
    uint32_t key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
    uint32_t counter[4] = {(uint32_t)(i / 4), (uint32_t)(i / 4 >> 32), (uint32_t)offset, (uint32_t)(offset >> 32)};
    for (int round = 0; round < 10; round++) {
        uint64_t a = (uint64_t)0xD2511F53 * counter[0], b = (uint64_t)0xCD9E8D57 * counter[2];
        uint32_t next[4] = {(uint32_t)(b >> 32) ^ counter[1] ^ key[0], (uint32_t)b, (uint32_t)(a >> 32) ^ counter[3] ^ key[1], (uint32_t)a};
        memcpy(counter, next, sizeof next);
        key[0] += 0x9E3779B9;
        key[1] += 0xBB67AE85;
    }
    return counter[i % 4];
}
TE_TEST_DEVICES(bits) {
    static const int64_t counts[] = {4096, 4095, 3};
    for (int k = 0; k < COUNT(counts); k++) {
        float *mask = mask_of(te, counts[k], 0.25f);
        int64_t wrong = 0;
        for (int64_t i = 0; i < counts[k]; i++) wrong += (mask[i] != 0) != ((philox_word(77, 5, (uint64_t)i) >> 8) >= 0.25 * 16777216);
        CHECK_EQ_INT(wrong, 0);
    }
}

TE_TEST_DEVICES(rate) {
    enum { COUNT_OF = 200000 };
    static const float ps[] = {0.1f, 0.5f, 0.9f};
    for (int k = 0; k < COUNT(ps); k++) {
        float *mask = mask_of(te, COUNT_OF, ps[k]);
        double kept = 0;
        for (int i = 0; i < COUNT_OF; i++) kept += mask[i] != 0;
        /* five standard deviations */
        CHECK(fabs(kept / COUNT_OF - (1 - (double)ps[k])) < 5 * sqrt((double)ps[k] * (1 - (double)ps[k]) / COUNT_OF));
    }
}

/* p = 1 keeps nothing, not even a NaN; p = 0 is the identity; a dropped NaN is gone. */
TE_TEST_DEVICES(extremes) {
    float *x = test_normal(32, 1);
    dropout_case c = {0};
    c.m = 1;
    c.n = 32;
    c.x = c.y = TE_F32;
    x[7] = NAN;
    x[8] = INFINITY;
    c.p = 1;
    float *y = run(te, &c, x, NULL, NULL);
    for (int i = 0; i < 32; i++) CHECK(y[i] == 0);
    c.p = 0;
    CHECK_BYTES("identity", run(te, &c, x, NULL, NULL), x, 32 * 4);
    CHECK(isnan(x[7]));
}

TE_TEST_DEVICES(in_place_and_misaligned) {
    for (int shift = 0; shift < 2; shift++) {
        te_op_dropout_add_bwd_args b = {0};
        float *values = test_normal(257, 1), *mask = mask_of(te, 256, 0.5f), *want = (float *)test_alloc(256 * 4);
        te_tensor *x = te_tensor_narrow(test_tensor(te, TE_F32, SHAPE(257), values), 0, shift, 256);
        for (int i = 0; i < 256; i++) want[i] = values[i + shift] * mask[i];
        b.dy = b.dx = x;
        b.p = 0.5f;
        b.seed = 77;
        b.offset = 5;
        te_op_dropout_add_bwd(te, &b);
        CHECK_OK(te);
        CHECK_TENSOR(x, want, 0, 0);
    }
}

TE_TEST_DEVICES(complaints) {
    te_op_dropout_add_fwd_args f = {0};
    te_tensor *x = te_tensor_zeros(te, TE_F32, SHAPE(2, 8));
    f.x = f.y = x;
    f.p = 1.5f;
    te_op_dropout_add_fwd(te, &f);
    CHECK_ERROR(te, TE_ERR_INVALID, "p is 1.5");
    f.p = NAN;
    te_op_dropout_add_fwd(te, &f);
    CHECK_ERROR(te, TE_ERR_INVALID, "probability");
    f.p = 0.5f;
    f.bias = te_tensor_zeros(te, TE_F32, SHAPE(2));
    te_op_dropout_add_fwd(te, &f);
    CHECK_ERROR(te, TE_ERR_SHAPE, "bias is [2]; 8 elements are needed");
    f.bias = NULL;
    f.residual = te_tensor_zeros(te, TE_F32, SHAPE(8, 2));
    te_op_dropout_add_fwd(te, &f);
    CHECK_ERROR(te, TE_ERR_SHAPE, "residual is [8, 2] and x is [2, 8]");
}
