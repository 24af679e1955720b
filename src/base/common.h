/* base/common.h: definitions that every private part uses: libc headers, attributes, TE_ZERO, minimum, maximum and
 * rounding up. This file depends on nothing else. */

#include <float.h>
#include <limits.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Refuses compiler flags that change results, for example by computing x * (1 / y) for x / y. te__arithmetic_is_exact
 * finds such flags that define no macro. */
#if defined(__FAST_MATH__) || (defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__) ||             \
    defined(__ASSOCIATIVE_MATH__) || defined(__RECIPROCAL_MATH__) || defined(__NO_SIGNED_ZEROS__) || \
    defined(_M_FP_FAST)
#error "te.h: -ffast-math (-Ofast, /fp:fast) changes codes: put -fno-fast-math (/fp:precise) last for this file alone"
#endif

/* Initializer for a struct or array: `= TE_ZERO` clears it, in C and C++, without a warning. */
#ifdef __cplusplus
#define TE_ZERO {}
#else
#define TE_ZERO {0}
#endif

/* Aligns a variable or a field to n bytes; stands in front of the whole declaration. 32-bit x86 aligns 64-bit numbers
 * to 4 bytes, but 64-bit atomics need 8. */
#ifdef __cplusplus
#define TE__ALIGNED(n) alignas(n)
#else
#define TE__ALIGNED(n) _Alignas(n)
#endif

/* Keeps a small function with many callers from being inlined, to save compile time. Stands after `static` or
 * TE_API. */
#if defined(_MSC_VER)
#define TE__NOINLINE __declspec(noinline)
#elif defined(__GNUC__)
#define TE__NOINLINE __attribute__((noinline))
#else
#define TE__NOINLINE
#endif

/* Makes the compiler fail unless `fact` is true. */
#ifdef __cplusplus
#define TE__STATIC_ASSERT(fact, text) static_assert(fact, text)
#else
#define TE__STATIC_ASSERT(fact, text) _Static_assert(fact, text)
#endif
#define TE__COUNT(array) ((int)(sizeof(array) / sizeof((array)[0])))

static inline int64_t te__min(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t te__max(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t te__div_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
static inline int64_t te__round_up(int64_t a, int64_t b) { return (a + b - 1) / b * b; }
