/* ops/test_attn_lengths.c: attention at lengths of many tiles, and just beside whole ones, on a GPU: 16-bit tensors, on tensor cores, beside f32 ones of the same values, on the general kernels,
 * which test_attn.c holds against the formula at small lengths. */
#include "../te_test.h"

enum { RESULTS = 4 };

static void attend(te_ctx *te, te_dtype dtype, const float *const values[4], const int64_t *s, const int64_t *heads, int64_t d, const te_attn_desc *desc, float *out[RESULTS]) {
    te_tensor *x[4];
    te_scope_begin(te);
    for (int i = 0; i < 4; i++) {
        const bool keys = i == 1 || i == 2;
        x[i] = te_tensor_cast(test_tensor(te, TE_BF16, SHAPE(1, s[keys], heads[keys], d), values[i]), dtype); /* values that both formats have */
        if (i < 3) te_tensor_set_requires_grad(x[i], true);
    }
    te_tensor *o = te_attention(x[0], x[1], x[2], desc);
    te_backward_from(o, x[3]);
    out[0] = test_read(o);
    for (int i = 0; i < 3; i++) out[i + 1] = test_read(te_tensor_grad(x[i]));
    te_scope_end(te);
}

TE_TEST_DEVICES(attn_of_many_tiles) {
    static const char *const names[RESULTS] = {"o", "dq", "dk", "dv"};
    static const int64_t lengths[][2] = {{4097, 4097}, {4097, 1000}, {1000, 4097}, {1, 4097}, {4097, 1}, {17, 4097}, {4097, 129}, {1000, 1000}, {127, 1000}, {128, 128}, {129, 128}};
    static const int64_t sizes[] = {64, 96, 128, 192, 256};
    static const int64_t heads[2] = {2, 1};
    if (!te_ctx_is_cuda(te)) {
        test_skip("a GPU: f32 and 16 bits are one code on the CPU");
        return;
    }
    for (int n = 0; n < COUNT(lengths) * COUNT(sizes); n++) {
        const int64_t *s = lengths[n / COUNT(sizes)], d = sizes[n % COUNT(sizes)];
        te_attn_desc desc = {.format = TE_BSHD, .rule = {.mask = n % 3 == 0 ? TE_MASK_NONE : n % 3 == 1 ? TE_MASK_CAUSAL : TE_MASK_CAUSAL_BOTTOM_RIGHT}};
        const float *values[4];
        float *got[RESULTS], *want[RESULTS];
        if (n % 4 == 3) desc.rule.window = (te_window){true, 300, n % 3 ? 0 : 70};
        test_case("s %d, %d d %d mask %d window %d", (int)s[0], (int)s[1], (int)d, (int)desc.rule.mask, n % 4 == 3);
        for (int i = 0; i < 4; i++) values[i] = test_normal(s[i == 1 || i == 2] * heads[i == 1 || i == 2] * d, 100 + (uint64_t)i);
        attend(te, TE_BF16, values, s, heads, d, &desc, got);
        attend(te, TE_F32, values, s, heads, d, &desc, want);
        REQUIRE_OK(te);
        for (int r = 0; r < RESULTS; r++) {
            const int64_t count = s[r >= 2] * heads[r >= 2] * d;
            double error = 0, size = 0, limit = r ? 15e-3 : 6e-3; /* as in test_attn.c: a result is rounded, before it P and dS, and the backward reads rounded o */
            bool number = true;
            for (int64_t i = 0; i < count; i++) {
                const double e = (double)got[r][i] - (double)want[r][i];
                number = number && isfinite(got[r][i]);
                error += e * e, size += (double)want[r][i] * (double)want[r][i];
            }
            error = sqrt(error / (double)count), size = sqrt(size / (double)count);
            /* Of rows that see one key dS is 0, as a difference that cancels: what is left has the size of a rounding of its terms. */
            const bool one_key = s[1] == 1 || (s[0] == 1 && desc.rule.mask == TE_MASK_CAUSAL);
            CHECK_MSG(number && error <= limit * (size + (one_key ? 0.3 : 0)), "%s: the error is %.3g of %.3g (limit %.3g of it)", names[r], error, size, limit);
        }
    }
}

static float to_bf16(float x) { /* of a number that is neither NaN nor near infinity */
    uint32_t bits;
    memcpy(&bits, &x, 4);
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000u;
    memcpy(&x, &bits, 4);
    return x;
}
/* The error against float64 beside that of a softmax over the row's true maximum of f32 products, whose probabilities are rounded to bf16, as tensor cores take them, and summed before that. A softmax whose largest
 * probability is not exactly 1 (by an older maximum, or a rounded one) has four times the error on peaked rows. */
TE_TEST_DEVICES(attn_accuracy) {
    enum { S = 512, D = 64 };
    static const struct {
        const char *name;
        float q, k_first, k_last; /* what queries and the first and the last key are multiplied by */
    } inputs[] = {{"random", 1, 1, 1}, {"queries times 6", 6, 1, 1}, {"queries times 30", 30, 1, 1}, {"keys falling 40 to 1", 1, 40, 1}, {"keys falling 1000 to 1", 1, 1000, 1}, {"keys rising 1 to 40", 1, 1, 40}};
    double *score = test_alloc(S * sizeof(double));
    float *score32 = test_alloc(S * sizeof(float));
    for (int n = 0; n < COUNT(inputs); n += test_every_odd(2)) {
        float *x[3];
        te_tensor *t[3];
        te_attn_desc desc = {.format = TE_BSHD, .rule = {.mask = TE_MASK_CAUSAL}};
        double error = 0, allowed = 0;
        for (int i = 0; i < 3; i++) {
            x[i] = test_normal(S * D, 7 + (uint64_t)i);
            for (int64_t j = 0; j < S * D; j++)
                x[i][j] *= i == 0 ? inputs[n].q : i == 1 ? inputs[n].k_first + (inputs[n].k_last - inputs[n].k_first) * (float)(j / D) / (S - 1) : 1;
            t[i] = test_tensor(te, TE_BF16, SHAPE(1, S, 1, D), x[i]);
            x[i] = test_read(t[i]);
        }
        float *got = test_read(te_attention(t[0], t[1], t[2], &desc));
        REQUIRE_OK(te);
        for (int i = 0; i < S; i++) {
            float most32 = -INFINITY;
            double most = -1e300, exact_sum = 0, sum = 0, exact[D] = {0}, o[D] = {0};
            for (int j = 0; j <= i; j++) {
                score[j] = 0, score32[j] = 0;
                for (int c = 0; c < D; c++) {
                    score[j] += (double)x[0][i * D + c] * (double)x[1][j * D + c] / sqrt(D);
                    score32[j] = fmaf(x[0][i * D + c], x[1][j * D + c], score32[j]);
                }
                score32[j] *= 0.125f; /* 1 / sqrt(D) */
                most = fmax(most, score[j]), most32 = fmaxf(most32, score32[j]);
            }
            for (int j = 0; j <= i; j++) {
                const float p = expf(score32[j] - most32), rounded = to_bf16(p);
                exact_sum += exp(score[j] - most), sum += (double)p;
                for (int c = 0; c < D; c++) exact[c] += exp(score[j] - most) * (double)x[2][j * D + c], o[c] += (double)rounded * (double)x[2][j * D + c];
            }
            for (int c = 0; c < D; c++) {
                const double want = exact[c] / exact_sum, mine = (double)got[i * D + c] - want, theirs = (double)to_bf16((float)(o[c] / sum)) - want;
                error += mine * mine, allowed += theirs * theirs;
            }
        }
        error = sqrt(error / (S * D)), allowed = sqrt(allowed / (S * D));
        CHECK_MSG(error <= 1.15 * allowed, "%s: the error is %.3g, and %.3g with the true maximum", inputs[n].name, error, allowed);
    }
}
