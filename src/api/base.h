/* api/base.h: the version, linkage, names of number formats, results and handles. All other headers use these. */

/* The version of this header: TE_VERSION_MAJOR.TE_VERSION_MINOR.TE_VERSION_PATCH. */
#define TE_VERSION_MAJOR 0
#define TE_VERSION_MINOR 1
#define TE_VERSION_PATCH 0

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Compiler attributes; empty for compilers without them. TE_MAYBE_UNUSED silences the warning about an unused function.
 * TE_PRINTF(f, a) makes the compiler check the format string, parameter number f, against parameters a and later. */
#if defined(__GNUC__) || defined(__clang__)
#define TE_MAYBE_UNUSED __attribute__((unused))
#define TE_PRINTF(f, a) __attribute__((format(printf, f, a)))
#else
#define TE_MAYBE_UNUSED
#define TE_PRINTF(f, a)
#endif

/* TE_API is the linkage of every public function: extern in C, and extern "C" in C++. A source file that defines
 * TE_STATIC before it includes te.h must contain the implementation too. All functions are then static. */
#ifdef TE_STATIC
#define TE_API static TE_MAYBE_UNUSED
#elif defined(__cplusplus)
#define TE_API extern "C"
#else
#define TE_API extern
#endif

/* Returns the version of the linked implementation, as MAJOR*10000 + MINOR*100 + PATCH. If te.h comes from a shared
 * library, compare this number with the macros above. */
TE_API int te_version(void);

/* Returns the name of a number format, such as "f32", "bf16" or "e4m3"; "?" for a value outside the enum. Static
 * string. */
TE_API const char *te_dtype_name(te_dtype dtype);
/* Returns the number of bits of one element: 64, 32, 16, 8 or 4; 0 for TE_DTYPE_NONE and for a value outside the
 * enum. */
TE_API int te_dtype_bits(te_dtype dtype);
/* Returns the largest finite value of a format, such as 448 for E4M3, 57344 for E5M2, 6 for E2M1 and FLT_MAX for F32; 0
 * for integers. */
TE_API float te_dtype_max(te_dtype dtype);

/* The result of most functions that do not return a tensor. After a failure, te_error returns the text of the error. */
typedef enum te_result {
    TE_OK = 0,            /* success */
    TE_ERR_INVALID,       /* an argument outside its documented range */
    TE_ERR_SHAPE,         /* shapes do not fit each other; the message names the shapes */
    TE_ERR_DTYPE,         /* number formats do not fit each other */
    TE_ERR_UNSUPPORTED,   /* the call is legal, but te.h has no implementation for this device or these options; the
                           * message says which are possible */
    TE_ERR_OUT_OF_MEMORY, /* host or device memory ran out; nothing was changed and the context stays usable */
    TE_ERR_DEVICE,        /* a call of the CUDA driver failed; the message has the driver's text */
    TE_ERR_LIBRARY,       /* libcuda, libnvrtc or libnccl is missing or too old; the message lists the paths that were
                           * tried */
    TE_ERR_COMPILE,       /* NVRTC refused a kernel; the message has NVRTC's log */
    TE_ERR_IO,            /* a file could not be read or written */
    TE_ERR_FORMAT,        /* a file's content is damaged or of another format */
    TE_ERR_STATE,         /* a call out of order, a NULL tensor, or a call after an earlier error */
    TE_RESULT_COUNT
} te_result;

/* Returns the name of a result, such as "TE_ERR_SHAPE". Static string. */
TE_API const char *te_result_name(te_result result);

/* An option with three values: on, off, and zero for a default that depends on something else. See "Options" at the top
 * of te.h. */
typedef enum te_switch {
    TE_DEFAULT = 0, /* the default, which the comment of the field names */
    TE_ON = 1,      /* yes */
    TE_OFF = 2      /* no */
} te_switch;

/* Maximum number of dimensions of a tensor. */
#define TE_MAX_DIMS 8

typedef struct te_ctx te_ctx;             /* a device, its stream and memory, and all state; made by te_ctx_create */
typedef struct te_tensor te_tensor;       /* a reference-counted view of memory, plain or quantized; see api/tensor.h,
                                           * api/quant.h */
typedef struct te_module te_module;       /* a node in a model's tree of modules; see api/module.h */
typedef struct te_optimizer te_optimizer; /* an optimizer and its states; made by te_fused_adam_create and others */
typedef struct te_quantizer te_quantizer; /* says how tensors are quantized; made by te_quantizer_create */
typedef struct te_group te_group;         /* this rank's membership in a group of ranks that compute together; made by
                                           * te_nccl_group_create, te_thread_group_create, te_group_create */
typedef struct te_kv_cache te_kv_cache;   /* keys and values of earlier positions; made by te_kv_cache_create */
typedef struct te_graph te_graph;         /* a captured sequence of calls; made by te_graph_end */
