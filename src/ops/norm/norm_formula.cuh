// ops/norm/norm_formula.cuh: the arithmetic of LayerNorm and RMSNorm on eight elements of a row, and on the sums of a
// row. Kernels that add up these sums in one order have the same bits.
//
// The sums of x and x^2 need one pass and one barrier. The variance is sum x^2 / n - mean^2. If the mean is larger than
// the standard deviation, digits are lost. Then a second pass sums x - mean and its square.
#pragma once
#include "device/vector.cuh"

// Returns v rounded to the float format `dt`.
TE_DEV float te_norm_rounded(float v, int dt) {
    return dt == TE_BF16 ? te_bf16_to_f32(te_f32_to_bf16(v)) : dt == TE_F16 ? te_f16_to_f32(te_f32_to_f16(v)) : v;
}
// Rounds eight values to the float format DT. Two at a time: a conversion of one value is slower.
template <int DT> TE_DEV void te_norm_round(float v[8]) {
    if (DT == TE_F32) return;
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
        te_raw<DT> two;
        two.w[0] = te_f32x2_to_half(v[j], v[j + 1], DT);
        v[j] = te_raw_get(two, 0), v[j + 1] = te_raw_get(two, 1);
    }
}
// Adds the sums of x - shift (LAYER: LayerNorm) and of (x - shift)^2 over eight elements.
template <bool LAYER, int DT> TE_DEV void te_norm_add_share(float2 &sum, const te_raw<DT> &x, float shift) {
    float2 part = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int j = 0; j < 8; j++) {
        float d = te_raw_get(x, j) - shift;
        if (LAYER) part.x += d;
        part.y = fmaf(d, d, part.y);
    }
    sum.x += part.x, sum.y += part.y;
}
// The mean of a row and rstd = 1 / sqrt(variance + eps), from the sums that a row's threads have added up.
struct te_norm_moments {
    float mean, variance, rstd;
    // Takes the sums of x and of x^2. Returns whether a second pass is needed.
    template <bool LAYER> TE_DEV bool first(float2 sum, float one_nth) {
        variance = sum.y * one_nth;
        mean = 0.0f;
        if (!LAYER) return false;
        mean = sum.x * one_nth;
        variance = fmaf(-mean, mean, variance);
        // the second pass is needed too if the sum of squares overflows f32, since the variance may still fit
        return !(mean * mean <= variance) || !(sum.y <= TE_FLT_MAX);
    }
    // Takes the sums of x - mean and of (x - mean)^2, where `mean` is that of the first pass.
    TE_DEV void second(float2 sum, float one_nth) {
        sum.x *= one_nth;
        variance = fmaf(-sum.x, sum.x, sum.y * one_nth);
        mean += sum.x;
    }
    TE_DEV void finish(float eps) { rstd = __frsqrt_rn(variance + eps); }
};
// Computes eight elements of y, before they are scaled. `centred`: gamma' is 1 + gamma; `rounded`: x * rstd is rounded
// to DT before it is multiplied by gamma'. Without LAYER, beta is not read.
template <bool LAYER, int DT, int WEIGHT>
TE_DEV void te_norm_result(const te_raw<DT> &x, const te_norm_moments &of, const te_raw<WEIGHT> &gamma,
                           const te_raw<WEIGHT> &beta, bool centred, bool rounded, float y[8]) {
    // The result is exactly 0 where x equals the mean. v * rstd - mean * rstd might not be.
#pragma unroll
    for (int j = 0; j < 8; j++) y[j] = (te_raw_get(x, j) - (LAYER ? of.mean : 0.0f)) * of.rstd;
    if (rounded) te_norm_round<DT>(y);
#pragma unroll
    for (int j = 0; j < 8; j++) {
        float g = te_raw_get(gamma, j);
        if (centred) g += 1.0f;
        y[j] = LAYER ? fmaf(y[j], g, te_raw_get(beta, j)) : y[j] * g;
    }
}
