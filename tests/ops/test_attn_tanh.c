/* test_attn_tanh.c: compares te__attn_tanh with the C library's tanh, and checks the text that kernels are given for a user's expression. */
#define TE_STATIC
#define TE_IMPLEMENTATION
#include "../te_test.h"

static float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

/* Of every float from 2^-30 to 16, or some thousand of each power of two. The kernels' reciprocal is 1 ulp off, and their products are fused: both are within the limit. */
TE_TEST(attn_tanh_is_near_the_librarys) {
    const uint32_t step = test_every(2) > 1 ? 1009 : 127;
    double worst = 0;
    for (uint32_t bits = 0x30800000u; bits < 0x41800000u; bits += step) {
        const float x = float_of(bits), y = te__attn_tanh(x);
        const double error = fabs((double)y / tanh((double)x) - 1);
        if (error > worst) worst = error;
        if (x <= 0.5f) CHECK_MSG(fabs((double)te__attn_tanh_near(x, x * x) / tanh((double)x) - 1) < 7e-7, "near 0, of %g: %.9g", (double)x, (double)te__attn_tanh_near(x, x * x));
        if (te__attn_tanh(-x) != -y) test_fail(__FILE__, __LINE__, "tanh of %g is %.9g, and of its opposite %.9g", (double)x, (double)y, (double)te__attn_tanh(-x));
    }
    CHECK_MSG(worst < 6e-7, "the error is %.3g", worst);
    CHECK(te__attn_tanh(0) == 0 && isnan(te__attn_tanh(NAN)));
    CHECK(fabsf(te__attn_tanh(INFINITY) - 1) < 6e-7f && fabsf(te__attn_tanh(-FLT_MAX) + 1) < 6e-7f);
    CHECK(fabsf(te__attn_tanh(1e-38f) / 1e-38f - 1) < 6e-7f); /* whose square is 0 */
}

/* A division by a float's digits becomes a product; one of integers, or by anything else, stays. */
TE_TEST(score_mod_text_divides_by_products) {
    static const char *const cases[][2] = {{"50.0f * tanhf(score / 50.0f)", "(50.0f * tanhf(score * (1.0f / 50.0f)))"},
                                           {"score/2.f/.5F", "(score* (1.0f / 2.f)* (1.0f / .5F))"},
                                           {"score * (q_idx / 128)", "(score * (q_idx / 128))"},
                                           {"score / 3", "(score / 3)"},
                                           {"score / 50.0", "(score / 50.0)"},
                                           {"score / 1e-39f + score / 0x1.8p3f", "(score / 1e-39f + score / 0x1.8p3f)"},
                                           {"score / (2.0f)", "(score / (2.0f))"},
                                           {"floorf(score / 41.0f)", "(floorf(score / 41.0f))"},
                                           {"q_idx / 41.0f < 1.0f ? score : 0.0f", "(q_idx / 41.0f < 1.0f ? score : 0.0f)"},
                                           {"score / 0.00000000000000000000000000000000000000001f", "(score / 0.00000000000000000000000000000000000000001f)"}};
    for (int n = 0; n < COUNT(cases); n++) {
        te_score_mod m = {.score_mod = cases[n][0]};
        te__text out = TE_ZERO;
        test_case("%s", cases[n][0]);
        te__score_mod_code(&m, &out);
        CHECK_STR(out.s, cases[n][1]);
        te__text_free(&out);
    }
    te_score_mod mask = {.mask_mod = "q_idx / 41.0f == kv_idx / 41.0f"}; /* a mask's are exact */
    te__text out = TE_ZERO;
    te__score_mod_code(&mask, &out);
    CHECK_STR(out.s, "(q_idx / 41.0f == kv_idx / 41.0f)");
    te__text_free(&out);
}
