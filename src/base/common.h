/* base/common.h: the words that every private part uses: libc, attributes, zero, min and max. Knows nothing else. */

#include <float.h>
#include <limits.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* `= TE_ZERO` clears a struct or array in both languages without a warning. */
#ifdef __cplusplus
#define TE_ZERO {}
#else
#define TE_ZERO {0}
#endif

#define TE__COUNT(array) ((int)(sizeof(array) / sizeof((array)[0])))

static inline int64_t te__min(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t te__max(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t te__div_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
static inline int64_t te__round_up(int64_t a, int64_t b) { return (a + b - 1) / b * b; }
