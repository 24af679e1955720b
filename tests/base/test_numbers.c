/* tests/base/test_numbers.c: every code of every format, and f32 to all of them against rounding done in double. */
#include "../te_test.h"
#include "base/common.h"
#include "base/numbers.h"

/* Nearest value with `man` mantissa bits, exponents from min_exp up, ties to even, in double. Large values stay as they are. */
static double reference_round(double x, int man, int min_exp) {
    int e;
    if (x == 0 || isinf(x)) return x;
    frexp(x, &e); /* |x| = [0.5, 1) 2^e */
    if (e - 1 < min_exp) e = min_exp + 1;
    double unit = ldexp(1.0, e - 1 - man);
    return copysign(nearbyint(x / unit) * unit, x);
}

static bool same(double a, double b) { return isnan(a) ? isnan(b) : a == b && signbit(a) == signbit(b); }

typedef struct format {
    const char *name;
    int codes, man, min_exp;
    double max;      /* largest finite value */
    bool saturates;  /* else: infinity */
    int nan;         /* the code that every NaN becomes */
    int (*encode)(float f);
    double (*decode)(int code);
} format;

static int encode_bf16(float f) { return te__f32_to_bf16(f); }
static int encode_f16(float f) { return te__f32_to_f16(f); }
static int encode_e4m3(float f) { return te__f32_to_e4m3(f); }
static int encode_e5m2(float f) { return te__f32_to_e5m2(f); }
static int encode_e2m1(float f) { return te__f32_to_e2m1(f); }
static double decode_bf16(int c) { return te__bf16_to_f32((uint16_t)c); }
static double decode_f16(int c) { return te__f16_to_f32((uint16_t)c); }
static double decode_e4m3(int c) { return te__e4m3_to_f32((uint8_t)c); }
static double decode_e5m2(int c) { return te__e5m2_to_f32((uint8_t)c); }
static double decode_e2m1(int c) { return te__e2m1_to_f32((uint8_t)c); }

static const format formats[] = {
    {"bf16", 65536, 7, -126, 3.3895313892515355e38, false, 0x7fff, encode_bf16, decode_bf16},
    {"f16", 65536, 10, -14, 65504, false, 0x7fff, encode_f16, decode_f16},
    {"e4m3", 256, 3, -6, 448, true, 0x7f, encode_e4m3, decode_e4m3},
    {"e5m2", 256, 2, -14, 57344, true, 0x7f, encode_e5m2, decode_e5m2},
    {"e2m1", 16, 1, 0, 6, true, 7, encode_e2m1, decode_e2m1},
};

static void check_one(const format *f, float x) {
    int code = f->encode(x);
    if (isnan(x)) {
        CHECK_MSG(code == f->nan, "%s: NaN becomes %#x", f->name, (unsigned)code);
        return;
    }
    double want = reference_round((double)x, f->man, f->min_exp);
    if (fabs(want) > f->max) want = copysign(f->saturates ? f->max : HUGE_VAL, want);
    double got = f->decode(code);
    CHECK_MSG(same(got, want), "%s of %.9g is %.9g, not %.9g", f->name, (double)x, got, want);
}

TE_TEST(codes_round_trip) {
    for (int i = 0; i < COUNT(formats); i++) {
        const format *f = &formats[i];
        int finite = 0;
        for (int code = 0; code < f->codes; code++) {
            double x = f->decode(code);
            if (isnan(x)) {
                CHECK_EQ_INT(f->encode((float)x), f->nan);
                continue;
            }
            if (isinf(x) && f->saturates) { /* e5m2 alone can say infinity, and never does of itself */
                CHECK_EQ_INT(f->encode((float)x), code - 1);
                continue;
            }
            finite++;
            CHECK_MSG(f->encode((float)x) == code, "%s: code %#x is %g, which becomes %#x", f->name, (unsigned)code, x,
                      (unsigned)f->encode((float)x));
        }
        CHECK(finite > f->codes * 9 / 10);
    }
}

TE_TEST(known_values) {
    CHECK(decode_e4m3(0x7e) == 448 && decode_e4m3(0x08) == 0.015625 && decode_e4m3(0x01) == 0.001953125 && isnan(decode_e4m3(0xff)));
    CHECK(decode_e5m2(0x7b) == 57344 && decode_e5m2(0x01) == ldexp(1, -16) && isinf(decode_e5m2(0x7c)) && isnan(decode_e5m2(0x7d)));
    CHECK(decode_f16(0x7bff) == 65504 && decode_f16(1) == ldexp(1, -24) && isinf(decode_f16(0xfc00)) && isnan(decode_f16(0x7c01)));
    CHECK(decode_bf16(0x3f80) == 1 && decode_bf16(0xc049) == -3.140625);
    static const double e2m1[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    for (int c = 0; c < 16; c++) CHECK(same(decode_e2m1(c), c < 8 ? e2m1[c] : -e2m1[c - 8]));
    CHECK(te__f32_to_e4m3(HUGE_VALF) == 0x7e && te__f32_to_e4m3(-1e30f) == 0xfe && te__f32_to_e4m3(-0.0f) == 0x80);
    CHECK(te__f32_to_e5m2(-HUGE_VALF) == 0xfb && te__f32_to_e5m2(65536.0f) == 0x7b);
    CHECK(te__f32_to_f16(65519.996f) == 0x7bff && te__f32_to_f16(65520.0f) == 0x7c00 && te__f32_to_bf16(FLT_MAX) == 0x7f80);
    CHECK(te__f32_to_e4m3(-nanf("")) == 0x7f && te__f32_to_e5m2(-nanf("")) == 0x7f && te__f32_to_bf16(te__bits_f32(0xff800001u)) == 0x7fff);
}

TE_TEST(ties_and_neighbours) {
    for (int i = 0; i < COUNT(formats); i++) {
        const format *f = &formats[i];
        if (f->codes == 65536 && f->man == 7) continue; /* bf16: random values hit these */
        for (int code = 0; code < f->codes; code++) {
            float x = (float)f->decode(code), y = (float)f->decode((code + 1) % f->codes);
            if (isnan(x) || isnan(y) || isinf(x) || isinf(y)) continue;
            float middle = (x + y) / 2;
            check_one(f, middle);
            check_one(f, nextafterf(middle, HUGE_VALF));
            check_one(f, nextafterf(middle, -HUGE_VALF));
            check_one(f, nextafterf(x, HUGE_VALF));
            check_one(f, nextafterf(x, -HUGE_VALF));
        }
    }
}

TE_TEST(random) {
    uint64_t state = 12345;
    for (int n = 0; n < 400000; n += test_every_of(5, 2)) {
        state = state * 6364136223846793005ull + 1442695040888963407ull;
        uint32_t bits = (uint32_t)(state >> 32);
        float any = te__bits_f32(bits);
        float near_one = te__bits_f32((bits & 0x87ffffffu) | 0x38000000u); /* 2^-15 to 2, where small formats live */
        float large = ldexpf(near_one, 16);
        float tie = te__bits_f32(bits & 0xfffc0000u), bf16_tie = te__bits_f32(bits & 0xffff8000u);
        for (int i = 0; i < COUNT(formats); i++) {
            check_one(&formats[i], any);
            check_one(&formats[i], near_one);
            check_one(&formats[i], large);
            check_one(&formats[i], tie);
            check_one(&formats[i], bf16_tie);
        }
    }
}

TE_TEST(e8m0) {
    for (int c = 0; c < 255; c++) {
        float x = te__e8m0_to_f32((uint8_t)c);
        CHECK((double)x == ldexp(1, c - 127));
        CHECK_EQ_INT(te__f32_to_e8m0(x), c);
        CHECK_EQ_INT(te__f32_to_e8m0(-x), c);
        CHECK_EQ_INT(te__f32_to_e8m0(nextafterf(x, HUGE_VALF)), c < 254 ? c + 1 : 254);
        if (c > 0) CHECK_EQ_INT(te__f32_to_e8m0(nextafterf(x, 0)), c);
    }
    CHECK(isnan(te__e8m0_to_f32(255)));
    CHECK_EQ_INT(te__f32_to_e8m0(0), 0);
    CHECK_EQ_INT(te__f32_to_e8m0(nanf("")), 255);
    CHECK_EQ_INT(te__f32_to_e8m0(HUGE_VALF), 254);
    CHECK_EQ_INT(te__f32_to_e8m0(te__bits_f32(1)), 0);
}
