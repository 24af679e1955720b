/* sys/floats.c: sets the processor's modes for rounding and subnormal numbers. Any library may have changed them, for
 * example one linked with -ffast-math. The codes of a cast must not depend on these modes. So arithmetic runs between
 * te__floats_begin and te__floats_end. */

#include <fenv.h>
#if defined(__SSE__) || defined(_M_X64) || (defined(_M_IX86_FP) && _M_IX86_FP > 0)
#define TE__FLOATS_SSE 1
#include <xmmintrin.h>
#elif defined(__aarch64__) && (defined(__GNUC__) || defined(__clang__))
#define TE__FLOATS_FPCR 1
#endif

/* The modes that te__floats_begin found. te__floats_end restores them. */
typedef struct te__floats {
    int rounding;     /* rounding mode of <fenv.h> */
    uint64_t control; /* the control register; 0 where there is none */
    bool changed;
} te__floats;

/* Returns the processor's control register for rounding, subnormals and exception traps. Returns 0 if there is none. */
static inline uint64_t te__floats_control(void) {
#if defined(TE__FLOATS_SSE)
    return _mm_getcsr();
#elif defined(TE__FLOATS_FPCR)
    uint64_t control;
    __asm__ volatile("mrs %0, fpcr" : "=r"(control));
    return control;
#else
    return 0;
#endif
}
static inline void te__floats_set_control(uint64_t control) {
#if defined(TE__FLOATS_SSE)
    _mm_setcsr((unsigned)control);
#elif defined(TE__FLOATS_FPCR)
    __asm__ volatile("msr fpcr, %0" : : "r"(control) : "memory");
#else
    (void)control;
#endif
}
/* Returns the value of the control register in a new process: rounding to nearest, subnormals kept, no traps. x86:
 * keeps the exception flags of `control`. */
static inline uint64_t te__floats_usual(uint64_t control) {
#if defined(TE__FLOATS_SSE)
    return (control & 0x3fu) | 0x1f80u;
#else
    (void)control;
    return 0;
#endif
}

static inline te__floats te__floats_begin(void) {
    te__floats was;
    was.control = te__floats_control();
    was.rounding = fegetround();
    was.changed = was.rounding != FE_TONEAREST || was.control != te__floats_usual(was.control);
    if (was.changed) {
        fesetround(FE_TONEAREST); /* sets the rounding of the x87, too */
        te__floats_set_control(te__floats_usual(was.control));
    }
    return was;
}
static inline void te__floats_end(const te__floats *was) {
    if (!was->changed) return;
    fesetround(was->rounding);
    te__floats_set_control(was->control);
}

/* Returns a / b, for host code outside of operations. `volatile` keeps the division between te__floats_begin and
 * te__floats_end. */
static inline float te__floats_divide(double a, double b) {
    volatile double x = a, y = b;
    volatile float quotient;
    te__floats was = te__floats_begin();
    quotient = (float)(x / y);
    te__floats_end(&was);
    return quotient;
}

/* Whether sums and products of f32 may be kept wider than f32. 16, of processors with instructions for _Float16, says
 * of that type alone that it is computed as it is. */
#define TE__FLOATS_ARE_WIDE (FLT_EVAL_METHOD != 0 && FLT_EVAL_METHOD != 16)

/* Returns false if the compiler may reorder sums, divide by multiplying, or ignore the sign of zero. Tests this with a
 * few computations, because clang defines no macros for these single parts of -ffast-math. If floats are wide, returns
 * true without a test (see te_report). */
static inline bool te__arithmetic_is_exact(void) {
#if !TE__FLOATS_ARE_WIDE
    volatile float large = 16777216.0f, one = 1.0f, five = 5.0f, minus_zero = -0.0f, quotient, zero;
    float a = large, b = one;
    te__floats was = te__floats_begin();
    bool exact = (a + b) - a == 0.0f; /* 2^24 + 1 rounds to 2^24 */
    quotient = five / 49.0f;          /* 5 * (1 / 49) rounds to another number */
    zero = minus_zero + 0.0f;
    exact = exact && te__f32_bits(quotient) == 0x3dd0fac7u && te__f32_bits(zero) == 0;
    te__floats_end(&was);
    return exact;
#else
    return true;
#endif
}
