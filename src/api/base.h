/* api/base.h: what every other chapter uses: version, linkage, number formats, results, handles. */

#define TE_VERSION_MAJOR 0
#define TE_VERSION_MINOR 1
#define TE_VERSION_PATCH 0

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__) || defined(__clang__)
#define TE_MAYBE_UNUSED __attribute__((unused))
#define TE_PRINTF(f, a) __attribute__((format(printf, f, a)))
#else
#define TE_MAYBE_UNUSED
#define TE_PRINTF(f, a)
#endif

/* Linkage of every public function. TE_STATIC makes them private to the including file, so that two files of one
 * program can each carry a te.h of their own. Such a file has its implementation too, or it would have no functions at all. */
#ifdef TE_STATIC
#define TE_API static TE_MAYBE_UNUSED
#elif defined(__cplusplus)
#define TE_API extern "C"
#else
#define TE_API extern
#endif

/* The version of the implementation that was linked, as MAJOR*10000 + MINOR*100 + PATCH. Compare it with the header's
 * own macros when te.h comes from a shared library. */
TE_API int te_version(void);


/* "f32", "bf16", "e4m3" ...; "?" for a value outside the list. Static string. */
TE_API const char *te_dtype_name(te_dtype dtype);
/* Bits of one element: 32, 16, 8, 4, 64; 0 for a value outside the list. */
TE_API int te_dtype_bits(te_dtype dtype);
/* Largest finite value: 448 for E4M3, 57344 for E5M2, 6 for E2M1, FLT_MAX for F32 ...; 0 for integers. */
TE_API float te_dtype_max(te_dtype dtype);

/* What a function that makes no tensor returns. The text that belongs to a failure is te_error(). */
typedef enum te_result {
    TE_OK = 0,
    TE_ERR_INVALID,       /* an argument outside its documented range */
    TE_ERR_SHAPE,         /* shapes that do not fit each other; the message names both */
    TE_ERR_DTYPE,         /* number formats that do not fit each other */
    TE_ERR_UNSUPPORTED,   /* legal, but this backend has no kernel for it; the message says which has */
    TE_ERR_OUT_OF_MEMORY, /* host or device; nothing was changed and the context stays usable */
    TE_ERR_DEVICE,        /* the driver refused; the message carries its own words */
    TE_ERR_LIBRARY,       /* libcuda, libnvrtc or libnccl missing or too old; the message lists what was tried */
    TE_ERR_COMPILE,       /* NVRTC refused a kernel; the message carries its log */
    TE_ERR_IO,            /* a file could not be read or written */
    TE_ERR_FORMAT,        /* a file that is not what it says it is */
    TE_ERR_STATE,         /* a call out of order, or one that an earlier error made void */
    TE_RESULT_COUNT
} te_result;

/* "TE_ERR_SHAPE" ... Static string. */
TE_API const char *te_result_name(te_result result);

#define TE_MAX_DIMS 8

typedef struct te_ctx te_ctx;
typedef struct te_tensor te_tensor;
typedef struct te_module te_module;
typedef struct te_optimizer te_optimizer;
typedef struct te_quantizer te_quantizer;
typedef struct te_group te_group;
typedef struct te_graph te_graph;
