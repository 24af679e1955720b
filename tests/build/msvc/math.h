#ifndef TE_MSVC_MATH
#define TE_MSVC_MATH
#ifdef __cplusplus
extern "C" {
#endif
/* Microsoft's are constants only as far as its own compiler goes: an overflowing product. */
#define INFINITY ((float)(1e+300 * 1e+300))
#define NAN (-(float)(INFINITY * 0.0F))
#define HUGE_VALF INFINITY
#define HUGE_VAL ((double)INFINITY)
short _fdtest(float *x);
short _dtest(double *x);
int te_msvc_classify(double x);
#define isnan(x) (te_msvc_classify(x) == 2)
#define isinf(x) (te_msvc_classify(x) == 1)
#define isfinite(x) (te_msvc_classify(x) <= 0)
#define signbit(x) (te_msvc_classify(x) == 7)
double acos(double), asin(double), atan2(double, double), ceil(double), copysign(double, double), cos(double), erf(double), exp(double), exp2(double), expm1(double),
    fabs(double), floor(double), fma(double, double, double), fmax(double, double), fmin(double, double), fmod(double, double), frexp(double, int *),
    ldexp(double, int), log(double), log10(double), log1p(double), log2(double), nearbyint(double), nextafter(double, double), pow(double, double),
    rint(double), round(double), sin(double), sqrt(double), tanh(double), trunc(double);
float ceilf(float), copysignf(float, float), cosf(float), erff(float), exp2f(float), expf(float), expm1f(float), fabsf(float), floorf(float),
    fmaf(float, float, float), fmaxf(float, float), fminf(float, float), fmodf(float, float), frexpf(float, int *), ldexpf(float, int), log1pf(float),
    log2f(float), logf(float), nearbyintf(float), nextafterf(float, float), powf(float, float), rintf(float), roundf(float), sinf(float), sqrtf(float),
    tanhf(float), truncf(float);
#ifdef __cplusplus
}
#endif
#endif
