/* ops/test_attn_lengths.c: attention at lengths of many tiles, and just beside whole ones, on a GPU: 16-bit tensors, on tensor cores, beside f32 ones of the same values, on the general kernels,
 * which test_attn.c holds against the formula at small lengths. */
#include "../te_test.h"

enum { RESULTS = 4 };

static void attend(te_ctx *te, te_dtype dtype, const float *const values[4], const int64_t *s, const int64_t *heads, int64_t d, const te_attention_desc *desc, float *out[RESULTS]) {
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
    if (!te_ctx_is_cuda(te)) return; /* f32 and 16 bits are one code there */
    for (int n = 0; n < COUNT(lengths) * COUNT(sizes); n++) {
        const int64_t *s = lengths[n / COUNT(sizes)], d = sizes[n % COUNT(sizes)];
        te_attention_desc desc = {.format = TE_BSHD, .rule = {.mask = n % 3 == 0 ? TE_MASK_NONE : n % 3 == 1 ? TE_MASK_CAUSAL : TE_MASK_CAUSAL_BOTTOM_RIGHT}};
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
