/* ops/attn/tanh.h: tanh without branches, for kernels that compute a tanh for each score. Tests read this file on the
 * host. */
#ifndef TE__ATTN_TANH_H
#define TE__ATTN_TANH_H

#ifdef __CUDACC_RTC__
TE_DEV float te__tanh_cut(float x) { /* clamps to -8 .. 8; NaN stays */
#if __CUDA_ARCH__ >= 800
    float y;
    asm("{ .reg .f32 t; max.NaN.f32 t, %1, 0fC1000000; min.NaN.f32 %0, t, 0f41000000; }" : "=f"(y) : "f"(x));
    return y;
#else
    return x < -8.0f ? -8.0f : x > 8.0f ? 8.0f : x;
#endif
}
TE_DEV float te__tanh_inverse(float x) { /* 1 / x within 1 ulp */
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
#define TE__TANH_FMA(a, b, c) fmaf(a, b, c)
#else
static inline float te__tanh_cut(float x) { return x < -8.0f ? -8.0f : x > 8.0f ? 8.0f : x; }
static inline float te__tanh_inverse(float x) { return 1.0f / x; }
#define TE__TANH_FMA(a, b, c) ((a) * (b) + (c)) /* fmaf may be a slow function */
#endif

/* Returns tanh x with a relative error of at most 6e-7, as x P(x^2) / Q(x^2). x is clamped to -8 .. 8: beyond 8, tanh
 * is within 3e-7 of 1. The polynomials minimize the largest relative error on 0 .. 8. Only one instruction uses the
 * special function unit, which the softmax keeps busy. */
TE__BOTH float te__attn_tanh(float x) {
    const float y = te__tanh_cut(x), u = y * y;
    float p = TE__TANH_FMA(1.14285107e-5f, u, 2.95105223e-3f), q = TE__TANH_FMA(2.45919872e-7f, u, 2.38671857e-4f);
    p = TE__TANH_FMA(p, u, 0.129257001f);
    p = TE__TANH_FMA(p, u, 0.999999858f);
    q = TE__TANH_FMA(q, u, 0.0238156996f);
    q = TE__TANH_FMA(q, u, 0.462589173f);
    q = TE__TANH_FMA(q, u, 1.0f);
    return y * p * te__tanh_inverse(q);
}
/* Returns tanh x with a relative error of at most 7e-7, for x from -0.5 to 0.5 only, without a division. `u` is x^2. */
TE__BOTH float te__attn_tanh_near(float x, float u) {
    return x *
           TE__TANH_FMA(TE__TANH_FMA(TE__TANH_FMA(-0.0444446111f, u, 0.131918896f), u, -0.333264679f), u, 0.999999477f);
}

#endif
