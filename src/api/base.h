/* api/base.h: version, linkage, names of number formats, results and handles, which every other chapter uses. */

/* The version of this header: TE_VERSION_MAJOR.TE_VERSION_MINOR.TE_VERSION_PATCH. */
#define TE_VERSION_MAJOR 0
#define TE_VERSION_MINOR 1
#define TE_VERSION_PATCH 0

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Compiler attributes, empty where the compiler has none: TE_MAYBE_UNUSED silences the warning about an unused
 * function, TE_PRINTF(f, a) has the format string (parameter f) checked against its arguments (from parameter a on). */
#if defined(__GNUC__) || defined(__clang__)
#define TE_MAYBE_UNUSED __attribute__((unused))
#define TE_PRINTF(f, a) __attribute__((format(printf, f, a)))
#else
#define TE_MAYBE_UNUSED
#define TE_PRINTF(f, a)
#endif

/* TE_API is the linkage of every public function: extern "C". TE_STATIC, defined before the include, makes every
 * function private to the including file, so that two files of one program can each carry a te.h of their own. A file
 * that defines TE_STATIC holds the implementation, too. */
#ifdef TE_STATIC
#define TE_API static TE_MAYBE_UNUSED
#elif defined(__cplusplus)
#define TE_API extern "C"
#else
#define TE_API extern
#endif

/* Returns the version of the implementation that was linked, as MAJOR*10000 + MINOR*100 + PATCH. Compare it with the
 * header's macros when te.h comes from a shared library. */
TE_API int te_version(void);

/* Returns the name of a number format: "f32", "bf16", "e4m3" ...; "?" for a value outside the list. Static string. */
TE_API const char *te_dtype_name(te_dtype dtype);
/* Returns the bits of one element: 32, 16, 8, 4 or 64; 0 for a value outside the list. */
TE_API int te_dtype_bits(te_dtype dtype);
/* Returns the largest finite value: 448 for E4M3, 57344 for E5M2, 6 for E2M1, FLT_MAX for F32 ...; 0 for integers. */
TE_API float te_dtype_max(te_dtype dtype);

/* The result of a function that makes no tensor. te_error gives the text of the failure. */
typedef enum te_result {
    TE_OK = 0,            /* success */
    TE_ERR_INVALID,       /* an argument outside its documented range */
    TE_ERR_SHAPE,         /* shapes do not fit each other; the message names both */
    TE_ERR_DTYPE,         /* number formats do not fit each other */
    TE_ERR_UNSUPPORTED,   /* the call is legal, but this backend has no kernel for it; the message says which backend
                           * has one */
    TE_ERR_OUT_OF_MEMORY, /* host or device memory; nothing was changed and the context stays usable */
    TE_ERR_DEVICE,        /* a call of the driver failed; the message carries the driver's text */
    TE_ERR_LIBRARY,       /* libcuda or libnvrtc is missing or too old; the message lists the paths that were tried */
    TE_ERR_COMPILE,       /* NVRTC refused a kernel; the message carries its log */
    TE_ERR_IO,            /* a file could not be read or written */
    TE_ERR_FORMAT,        /* a file's content is damaged or of another format */
    TE_ERR_STATE,         /* a call out of order, a NULL tensor, or a call after an earlier error */
    TE_RESULT_COUNT
} te_result;

/* Returns the name of a result: "TE_ERR_SHAPE" ... Static string. */
TE_API const char *te_result_name(te_result result);

/* An option that is neither on nor off while it is zero; the default then depends on something else. See "Options" at
 * the top. */
typedef enum te_switch {
    TE_DEFAULT = 0, /* the default that the field's comment names */
    TE_ON = 1,      /* yes */
    TE_OFF = 2      /* no */
} te_switch;

/* The most dimensions that a tensor can have. */
#define TE_MAX_DIMS 8

typedef struct te_ctx te_ctx;             /* a device, its stream and memory, and all state: te_ctx_create */
typedef struct te_tensor te_tensor;       /* a reference-counted view of memory, plain or quantized: api/tensor.h,
                                           * api/quant.h */
typedef struct te_module te_module;       /* a node of a model's tree: api/module.h */
typedef struct te_optimizer te_optimizer; /* an optimizer and its states: te_fused_adam_create */
typedef struct te_quantizer te_quantizer; /* how tensors are quantized: te_quantizer_create */
typedef struct te_group te_group;         /* this rank's membership in a group of ranks that compute together:
                                           * te_group_create, te_thread_group_create */
typedef struct te_kv_cache te_kv_cache;   /* keys and values of earlier positions: te_kv_cache_create */
typedef struct te_graph te_graph;         /* a captured sequence of calls: te_graph_end */
