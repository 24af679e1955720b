/* tests/base/test_philox.c: known answers of Philox4x32-10, moments, and bits of the normal distribution that must never change. */
#include "../te_test.h"
#include "base/common.h"
#include "base/numbers.h"
#include "base/philox.h"

/* Vectors published with Random123: key and counter all zero, all one, digits of pi. */
TE_TEST(known_answers) {
    static const struct {
        uint64_t seed, offset, block;
        uint32_t want[4];
    } known[3] = {
        {0, 0, 0, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
        {~0ull, ~0ull, ~0ull, {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
        {0x299f31d0a4093822ull, 0x0370734413198a2eull, 0x85a308d3243f6a88ull, {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
    };
    for (int i = 0; i < 3; i++) {
        uint32_t got[4];
        te__philox(known[i].seed, known[i].offset, known[i].block, got);
        for (int k = 0; k < 4; k++) CHECK_EQ_INT(got[k], known[i].want[k]);
    }
}

TE_TEST(uniform) {
    CHECK(te__uniform01(0) == 0 && te__uniform01(255) == 0 && te__uniform01(0xffffffffu) == 1 - ldexpf(1, -24));
    double sum = 0, squares = 0;
    int n = 1000000;
    for (int i = 0; i < n / 4; i++) {
        uint32_t word[4];
        te__philox(7, 3, (uint64_t)i, word);
        for (int k = 0; k < 4; k++) {
            double x = te__uniform01(word[k]);
            sum += x;
            squares += x * x;
        }
    }
    CHECK(fabs(sum / n - 0.5) < 4 * sqrt(1.0 / 12 / n));
    CHECK(fabs(squares / n - 1.0 / 3) < 4 * sqrt(4.0 / 45 / n));
}

TE_TEST(ln_and_sincos) {
    for (int i = 0; i < 200000; i++) {
        uint32_t word[4];
        te__philox(1, 2, (uint64_t)i, word);
        float u = te__fma((float)word[0] + 1, 2.3283064365386963e-10f, 0);
        double ln = log((double)u);
        CHECK_MSG(fabs(te__ln_unit(u) - ln) <= 3e-7 * fabs(ln), "ln %.9g is %.9g, not %.9g", (double)u, (double)te__ln_unit(u), ln);
        float s, c;
        double angle = word[1] * (6.283185307179586 / 4294967296.0);
        te__sincos_turn(word[1], &s, &c);
        CHECK(fabs(s - sin(angle)) < 2e-7 && fabs(c - cos(angle)) < 2e-7);
    }
    float s, c;
    for (uint32_t quarter = 0; quarter < 4; quarter++) {
        te__sincos_turn(quarter << 30, &s, &c);
        CHECK(fabsf(s - (float)sin(quarter * 1.5707963267948966)) < 1e-7f && fabsf(c - (float)cos(quarter * 1.5707963267948966)) < 1e-7f);
    }
    CHECK(te__ln_unit(1.0f) == 0);
}

TE_TEST(normal) {
    double moment[7] = {0};
    int n = 2000000, beyond = 0;
    uint32_t bits = 0;
    for (int i = 0; i < n / 4; i++) {
        uint32_t word[4];
        te__philox(42, 1, (uint64_t)i, word);
        for (int k = 0; k < 4; k += 2) {
            float pair[2];
            te__normal2(word[k], word[k + 1], pair);
            for (int j = 0; j < 2; j++) {
                double x = (double)pair[j], power = x;
                for (int m = 1; m <= 6; m++, power *= x) moment[m] += power;
                beyond += fabs(x) > 1.959963984540054;
                bits = bits * 31 + te__f32_bits(pair[j]);
            }
        }
    }
    /* mean of x^m, four standard deviations of that mean: var(x^m) = E x^2m - (E x^m)^2 */
    static const double mean[7] = {1, 0, 1, 0, 3, 0, 15}, spread[7] = {0, 1, 2, 15, 96, 945, 10170};
    for (int m = 1; m <= 6; m++)
        CHECK_MSG(fabs(moment[m] / n - mean[m]) < 4 * sqrt(spread[m] / n), "moment %d is %g", m, moment[m] / n);
    CHECK(fabs((double)beyond / n - 0.05) < 4 * sqrt(0.05 * 0.95 / n));
    /* Saved training runs replay their noise: the bits belong to the format. Compilers and flags do not change them. */
    CHECK_MSG(bits == 0x938877cfu, "the bits changed: %#010x", bits);
    float edge[2];
    te__normal2(0, 0, edge);
    CHECK(edge[0] > 6.7f && edge[0] < 6.8f && edge[1] == 0);
    te__normal2(0xffffffffu, 0, edge);
    CHECK(edge[0] == 0 && edge[1] == 0);
}

/* 1 + 2^-11 + 2^-24 is halfway between two floats: what lies far below decides, and is lost where the sum is rounded to a double before. MinGW's fmaf does so. */
TE_TEST(fused_multiplications_round_once) {
    const float a = 1 + 0x1p-12f;
    volatile float above = 0x1p-60f, below = -0x1p-60f;
    CHECK(te__fma(a, a, above) == 1 + 0x1p-11f + 0x1p-23f);
    CHECK(te__fma(a, a, below) == 1 + 0x1p-11f);
    CHECK(te__fma(a, a, 0) == 1 + 0x1p-11f); /* the even one */
    CHECK(te__fma(-a, a, below) == -1 - 0x1p-11f - 0x1p-23f);
    CHECK(te__fma(a, a, INFINITY) == INFINITY && isnan(te__fma(a, INFINITY, -INFINITY)));
    CHECK(te__fma(0x1p-75f, 0x1p-75f, 0) == 0 && te__fma(0x1.8p-75f, 0x1p-75f, 0x1p-149f) == 0x1p-148f); /* 2^-150 and 1.75 * 2^-149 */
}
