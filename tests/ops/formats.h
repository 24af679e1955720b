/* tests/ops/formats.h: e4m3, e5m2 and e2m1 from their definitions; shares no code with te.h. */
#ifndef TE_TEST_FORMATS_H_INCLUDED
#define TE_TEST_FORMATS_H_INCLUDED

#include "../te_test.h"

/* The value of a code: sign, exponent, mantissa. Infinities of e5m2 and all NaN codes as what they are. */
static TE_MAYBE_UNUSED double code_value(te_dtype dtype, int code) {
    int man_bits = dtype == TE_F8E4M3 ? 3 : dtype == TE_F8E5M2 ? 2 : 1, bias = dtype == TE_F8E4M3 ? 7 : dtype == TE_F8E5M2 ? 15 : 1;
    int sign_bit = dtype == TE_F4E2M1 ? 8 : 0x80, man = code & ((1 << man_bits) - 1), e = (code & (sign_bit - 1)) >> man_bits;
    double sign = code & sign_bit ? -1 : 1, ulp = ldexp(1, (e ? e : 1) - bias - man_bits);
    if (dtype == TE_F8E4M3 && (code & 0x7f) == 0x7f) return NAN;
    if (dtype == TE_F8E5M2 && e == 31) return man ? NAN : sign * INFINITY;
    return sign * ((e ? 1 << man_bits : 0) + man) * ulp;
}
static TE_MAYBE_UNUSED int largest_code(te_dtype dtype) { return dtype == TE_F8E4M3 ? 0x7e : dtype == TE_F8E5M2 ? 0x7b : 7; }

/* The nearest code, the even one of two; what lies beyond the largest is the largest; NaN is 0x7f, in e2m1 7. */
static TE_MAYBE_UNUSED uint8_t code_of(te_dtype dtype, float x) {
    static double value[3][128];
    double *v = value[dtype == TE_F8E4M3 ? 0 : dtype == TE_F8E5M2 ? 1 : 2], a = fabs((double)x);
    int low = 0, high = largest_code(dtype), sign = !signbit(x) ? 0 : dtype == TE_F4E2M1 ? 8 : 0x80;
    if (v[1] == 0)
        for (int i = 0; i <= high; i++) v[i] = code_value(dtype, i);
    if (isnan(x)) return dtype == TE_F4E2M1 ? 7 : 0x7f;
    if (a >= v[high]) return (uint8_t)(sign | high);
    while (high - low > 1) {
        int middle = (low + high) / 2;
        if (v[middle] <= a) low = middle;
        else high = middle;
    }
    double down = a - v[low], up = v[high] - a;
    return (uint8_t)(sign | (down < up || (down == up && low % 2 == 0) ? low : high));
}

#endif /* TE_TEST_FORMATS_H_INCLUDED */
