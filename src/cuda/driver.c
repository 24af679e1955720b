/* cuda/driver.c: the interface to libcuda. This file must not depend on kernels. It declares the driver's types as
 * te__cu_..., so te.h needs no CUDA header and does not clash with one. */

typedef int te__cu_result; /* CUresult */
typedef int te__cu_device;
typedef unsigned long long te__cu_address; /* CUdeviceptr */
typedef void *te__cu_handle;               /* a CUcontext, CUstream, CUevent, CUmodule, CUfunction, CUgraph or
                                            * CUgraphExec */

typedef struct te__cu_uuid {
    unsigned char bytes[16];
} te__cu_uuid;
typedef struct te__cu_launch_attribute { /* CUlaunchAttribute */
    int id;
    int pad;
    union {
        unsigned char bytes[64];
        unsigned cluster[3];
        int cooperative, programmatic;
    } value;
} te__cu_launch_attribute;
typedef struct te__cu_launch_config { /* CUlaunchConfig */
    unsigned grid[3], block[3], shared_bytes;
    te__cu_handle stream;
    te__cu_launch_attribute *attributes;
    unsigned num_attributes;
} te__cu_launch_config;

/* The values of the driver's constants and flags that te.h uses: CUDA_ERROR_*, CU_DEVICE_ATTRIBUTE_*,
 * CU_FUNC_ATTRIBUTE_*, CU_LAUNCH_ATTRIBUTE_* and others. */
enum {
    TE__CU_OUT_OF_MEMORY = 2,
    TE__CU_NO_DEVICE = 100,
    TE__CU_NOT_FOUND = 500,
    TE__CU_NOT_READY = 600,
    TE__CU_NUM_SMS = 16,
    TE__CU_SM_MAJOR = 75,
    TE__CU_SM_MINOR = 76,
    TE__CU_SHARED_OPTIN = 97,
    TE__CU_FUNC_MAX_SHARED = 8,
    TE__CU_FUNC_CARVEOUT = 9, /* ..._PREFERRED_SHARED_MEMORY_CARVEOUT, in percent */
    TE__CU_PEER_ACCESS = 2,  /* CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED */
    TE__CU_PEER_ATOMICS = 3, /* CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED */
    TE__CU_LAUNCH_COOPERATIVE = 2,
    TE__CU_LAUNCH_CLUSTER = 4,
    TE__CU_LAUNCH_PROGRAMMATIC = 6, /* ..._PROGRAMMATIC_STREAM_SERIALIZATION */
    TE__CU_EVENT_NO_TIMING = 2,
    TE__CU_HOST_MAPPED = 2,
    TE__CU_STREAM_NON_BLOCKING = 1,
    TE__CU_STREAM_URGENT = -100, /* the driver makes it the highest priority that there is */
    TE__CU_CAPTURE_RELAXED = 2 /* CUstreamCaptureMode: memory may be allocated and kernels loaded during the capture */
};

/* Every function of libcuda that te.h calls. An entry is: 1 if required, else 0; name in te.h; symbol; arguments. */
#define TE__CU_LIST(X)                                                                                                 \
    X(1, Init, "cuInit", (unsigned flags))                                                                             \
    X(1, DriverGetVersion, "cuDriverGetVersion", (int *version))                                                       \
    X(1, GetErrorName, "cuGetErrorName", (te__cu_result code, const char **text))                                      \
    X(1, GetErrorString, "cuGetErrorString", (te__cu_result code, const char **text))                                  \
    X(1, DeviceGet, "cuDeviceGet", (te__cu_device * device, int ordinal))                                              \
    X(1, DeviceGetCount, "cuDeviceGetCount", (int *count))                                                             \
    X(1, DeviceGetName, "cuDeviceGetName", (char *name, int size, te__cu_device device))                               \
    X(1, DeviceGetAttribute, "cuDeviceGetAttribute", (int *value, int attribute, te__cu_device device))                \
    X(1, DeviceTotalMem, "cuDeviceTotalMem_v2", (size_t *bytes, te__cu_device device))                                 \
    X(0, DeviceGetUuid, "cuDeviceGetUuid_v2", (te__cu_uuid * uuid, te__cu_device device))                              \
    X(0, DeviceGetP2PAttribute, "cuDeviceGetP2PAttribute",                                                             \
      (int *value, int attribute, te__cu_device device, te__cu_device peer))                                          \
    X(1, DevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain", (te__cu_handle *context, te__cu_device device))          \
    X(1, DevicePrimaryCtxRelease, "cuDevicePrimaryCtxRelease_v2", (te__cu_device device))                              \
    X(1, CtxGetCurrent, "cuCtxGetCurrent", (te__cu_handle *context))                                                  \
    X(1, CtxPushCurrent, "cuCtxPushCurrent_v2", (te__cu_handle context))                                               \
    X(1, CtxPopCurrent, "cuCtxPopCurrent_v2", (te__cu_handle *context))                                               \
    X(1, CtxGetDevice, "cuCtxGetDevice", (te__cu_device * device))                                                     \
    X(1, MemAlloc, "cuMemAlloc_v2", (te__cu_address * address, size_t bytes))                                          \
    X(1, MemFree, "cuMemFree_v2", (te__cu_address address))                                                            \
    X(1, MemGetInfo, "cuMemGetInfo_v2", (size_t *free_bytes, size_t *total_bytes))                                     \
    X(1, MemHostAlloc, "cuMemHostAlloc", (void **host, size_t bytes, unsigned flags))                                  \
    X(1, MemFreeHost, "cuMemFreeHost", (void *host))                                                                   \
    X(1, MemcpyHtoDAsync, "cuMemcpyHtoDAsync_v2",                                                                      \
      (te__cu_address dst, const void *src, size_t bytes, te__cu_handle stream))                                       \
    X(1, MemcpyDtoHAsync, "cuMemcpyDtoHAsync_v2", (void *dst, te__cu_address src, size_t bytes, te__cu_handle stream)) \
    X(1, MemcpyDtoDAsync, "cuMemcpyDtoDAsync_v2",                                                                      \
      (te__cu_address dst, te__cu_address src, size_t bytes, te__cu_handle stream))                                    \
    X(1, MemsetD8Async, "cuMemsetD8Async",                                                                             \
      (te__cu_address dst, unsigned char value, size_t bytes, te__cu_handle stream))                                   \
    X(1, StreamCreate, "cuStreamCreate", (te__cu_handle *stream, unsigned flags))                                     \
    X(1, StreamCreateWithPriority, "cuStreamCreateWithPriority",                                                       \
      (te__cu_handle *stream, unsigned flags, int priority))                                                           \
    X(1, StreamDestroy, "cuStreamDestroy_v2", (te__cu_handle stream))                                                  \
    X(1, StreamSynchronize, "cuStreamSynchronize", (te__cu_handle stream))                                             \
    X(1, StreamGetCtx, "cuStreamGetCtx", (te__cu_handle stream, te__cu_handle *context))                              \
    X(1, StreamWaitEvent, "cuStreamWaitEvent", (te__cu_handle stream, te__cu_handle event, unsigned flags))            \
    X(1, EventQuery, "cuEventQuery", (te__cu_handle event))                                                            \
    X(1, EventCreate, "cuEventCreate", (te__cu_handle *event, unsigned flags))                                        \
    X(1, EventRecord, "cuEventRecord", (te__cu_handle event, te__cu_handle stream))                                    \
    X(1, EventSynchronize, "cuEventSynchronize", (te__cu_handle event))                                                \
    X(1, EventElapsedTime, "cuEventElapsedTime", (float *milliseconds, te__cu_handle start, te__cu_handle end))        \
    X(1, EventDestroy, "cuEventDestroy_v2", (te__cu_handle event))                                                     \
    X(1, ModuleLoadDataEx, "cuModuleLoadDataEx",                                                                       \
      (te__cu_handle *module, const void *image, unsigned num_options, int *options, void **values))                  \
    X(1, ModuleUnload, "cuModuleUnload", (te__cu_handle module))                                                       \
    X(1, ModuleGetFunction, "cuModuleGetFunction", (te__cu_handle *function, te__cu_handle module, const char *name)) \
    X(1, FuncSetAttribute, "cuFuncSetAttribute", (te__cu_handle function, int attribute, int value))                   \
    X(1, FuncGetAttribute, "cuFuncGetAttribute", (int *value, int attribute, te__cu_handle function))                  \
    X(1, LaunchKernel, "cuLaunchKernel",                                                                               \
      (te__cu_handle function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,           \
       unsigned shared_bytes, te__cu_handle stream, void **params, void **extra))                                      \
    X(0, LaunchKernelEx, "cuLaunchKernelEx",                                                                           \
      (const te__cu_launch_config *config, te__cu_handle function, void **params, void **extra))                       \
    X(1, OccupancyMaxActiveBlocks, "cuOccupancyMaxActiveBlocksPerMultiprocessor",                                      \
      (int *blocks, te__cu_handle function, int threads, size_t shared_bytes))                                         \
    X(0, TensorMapEncodeTiled, "cuTensorMapEncodeTiled",                                                               \
      (void *map, int type, unsigned rank, void *address, const uint64_t *dims, const uint64_t *strides,               \
       const uint32_t *box, const uint32_t *steps, int interleave, int swizzle, int promotion, int fill))              \
    X(0, StreamBeginCapture, "cuStreamBeginCapture_v2", (te__cu_handle stream, int mode))                              \
    X(0, StreamEndCapture, "cuStreamEndCapture", (te__cu_handle stream, te__cu_handle *graph))                        \
    X(0, GraphInstantiate, "cuGraphInstantiateWithFlags",                                                              \
      (te__cu_handle *graph_exec, te__cu_handle graph, unsigned long long flags))                                     \
    X(0, GraphLaunch, "cuGraphLaunch", (te__cu_handle graph_exec, te__cu_handle stream))                               \
    X(0, GraphDestroy, "cuGraphDestroy", (te__cu_handle graph))                                                        \
    X(0, GraphExecDestroy, "cuGraphExecDestroy", (te__cu_handle graph_exec))

typedef struct te__driver {
#define TE__CU_MEMBER(must, name, symbol, args) te__cu_result(*name) args;
    TE__CU_LIST(TE__CU_MEMBER)
#undef TE__CU_MEMBER
    te__lib lib;
    int version; /* 12040: CUDA 12.4 */
    bool ready;
} te__driver;

static te__driver te__cu; /* its functions may be called only after te__driver_open has returned TE_OK */
static te__mutex te__driver_mutex = TE__MUTEX_INIT;
static int te__driver_forks; /* the value of te__forks when the driver was opened. In a forked child,
                             * te__forks is larger and the driver cannot be used */

enum { TE__DRIVER_MIN = 12000 };

#define TE__CPU_UNTIL_THEN "te.h runs on the CPU until then: te_ctx_desc.device = \"cpu\""

static te_result te__driver_load(te__driver *d, te__text *why) {
    static const struct {
        int must;
        const char *symbol;
        size_t offset;
    } list[] = {
#define TE__CU_ROW(must, name, symbol, args) {must, symbol, offsetof(te__driver, name)},
        TE__CU_LIST(TE__CU_ROW)
#undef TE__CU_ROW
    };
    const char *name = NULL, *text = NULL;
    te__text tried = TE_ZERO;
    te__cu_result code;
    bool found = te__lib_open(TE__LIB_CUDA, &d->lib, &tried);
    if (!found)
        te__text_printf(why,
                        "the NVIDIA driver's libcuda could not be opened:\n%sInstall the driver (the package named "
                        "nvidia-driver, or cuda-drivers); " TE__CPU_UNTIL_THEN,
                        te__text_str(&tried));
    te__text_free(&tried);
    if (!found) return TE_ERR_LIBRARY;
    for (int i = 0; i < TE__COUNT(list); i++) {
        if (te__dl_function(d->lib.handle, list[i].symbol, (char *)d + list[i].offset) || !list[i].must) continue;
        te__text_printf(why,
                        "%s has no %s: the driver is older than CUDA 12.0 (driver 525). Update it; " TE__CPU_UNTIL_THEN,
                        d->lib.path, list[i].symbol);
        return TE_ERR_LIBRARY;
    }
    code = d->Init(0);
    if (code) {
        d->GetErrorName(code, &name);
        d->GetErrorString(code, &text);
        te__text_printf(why, "cuInit: %s: %s. %s; " TE__CPU_UNTIL_THEN, name ? name : "unknown error",
                        text ? text : "?",
                        code == TE__CU_NO_DEVICE
                            ? "No GPU is visible to this process (CUDA_VISIBLE_DEVICES, or the container's settings)"
                            : "See whether nvidia-smi works on this machine");
        return TE_ERR_DEVICE;
    }
    d->DriverGetVersion(&d->version);
    if (d->version >= TE__DRIVER_MIN) return TE_OK;
    te__text_printf(why,
                    "the NVIDIA driver is for CUDA %d.%d, te.h needs 12.0 (driver 525). Update it; " TE__CPU_UNTIL_THEN,
                    d->version / 1000, d->version % 1000 / 10);
    return TE_ERR_LIBRARY;
}

/* Loads libcuda, once per process. A failure is not remembered: the next context tries again. */
static te_result te__driver_open(te__text *why) {
    te_result result = TE_OK;
    te__mutex_lock(&te__driver_mutex);
    if (te__cu.ready && te__driver_forks != te__forks) {
        te__text_put(why, "the driver was opened before this process was forked off, and cannot be used in a child: "
                          "fork before the first context on a GPU, or "
                          "begin a new program (exec, posix_spawn)");
        result = TE_ERR_STATE;
    } else if (!te__cu.ready) {
        te__driver d;
        memset(&d, 0, sizeof(d));
        result = te__driver_load(&d, why);
        if (result == TE_OK) {
            d.ready = true;
            te__cu = d;
            te__driver_forks = te__forks;
        } else {
            te__dl_close(d.lib.handle);
        }
    }
    te__mutex_unlock(&te__driver_mutex);
    return result;
}

/* ---- a context's device -------------------------------------------------------------------------------------- */

enum {
    TE__MAP_SETS = 64,
    TE__MAP_WAYS = 4,
    TE__MAP_BYTES = 128,
    TE__STAGES = 4,
    TE__STAGE_BYTES = 1 << 20,
    TE__SMALL_UPLOAD = 4096
};

/* Everything that a tensor map depends on. The struct must have no padding, because memcmp compares it. */
typedef struct te__map_key {
    uint64_t address, dims[5], strides[5];
    uint32_t box[5];
    int dtype, rank, swizzle_bytes;
} te__map_key;
typedef struct te__map_slot {
    te__map_key key;
    unsigned char map[TE__MAP_BYTES];
} te__map_slot;
/* One set of the set-associative cache of tensor maps. */
typedef struct te__map_set {
    te__map_slot slot[TE__MAP_WAYS];
    unsigned turn; /* counts the new maps; determines which slot the next map overwrites */
} te__map_set;

/* The cache of planning results (te__cuda_memo). Its keys and values are uninterpreted bytes. */
enum { TE__MEMO_SLOTS = 128, TE__MEMO_WAYS = 4, TE__MEMO_KEY = 56, TE__MEMO_VALUE = 48 };
typedef struct te__memo_slot {
    unsigned char key[TE__MEMO_KEY]; /* all 0: free */
    uint64_t value[TE__MEMO_VALUE / 8];
} te__memo_slot;

struct te__cuda {
    te__cu_device device;
    te__cu_handle context, stream;
    bool retained_context, own_stream; /* false: the caller's */
    int sm, num_sms, max_shared;       /* max_shared: the most shared memory of a block, in bytes */
    size_t total_bytes;
    char name[128];
    unsigned char *stage; /* pinned memory for large uploads: a ring of TE__STAGES stages */
    te__cu_handle staged[TE__STAGES]; /* the event after the last copy from each stage */
    uint64_t uploads;
    void *counter; /* device memory for te__plan_counter and te__cuda_word */
    te__outside *outside; /* core/outside.c, in pinned memory */
    te__map_set *maps;
    te__memo_slot *memo;
    unsigned memo_turn;
    struct te__cache *cache; /* cuda/cache.c */
    struct te__warm_list *warm_list; /* cuda/launch.c: the launches between te_warmup_begin and te_warmup_end */
    bool stream_shown;       /* te_ctx_cu_stream was called, so the caller may queue work on the stream */
    /* A queue (cuda/queue.c) holds launches whose kernels are still being compiled, and all later work. Without a
     * queue, `queue`, `settle` and `enqueue` are NULL.
     * settle: waits for the kernels, then launches everything in the queue.
     * enqueue: adds to the end of the queue a write of `bytes` bytes to dst. The bytes are copied from `host`, or are
     * zeros if `host` is NULL. */
    struct te__queue *queue;
    te_result (*settle)(te_ctx *te);
    te_result (*enqueue)(te_ctx *te, void *dst, const void *host, size_t bytes);
};

/* Reports an error of the driver. `call` says what failed, such as "copy to the device: cuMemcpyHtoDAsync". */
static te_result te__cu_fail(te_ctx *te, const char *call, te__cu_result code) {
    const char *name = NULL, *text = NULL, *more = "";
    te__cu.GetErrorName(code, &name);
    te__cu.GetErrorString(code, &text);
    /* after these errors (ECC, traps and faults of a kernel) every later call in the CUcontext fails in the same way */
    if (code == 214 || code == 220 || code == 700 || code == 702 || (code >= 714 && code <= 719) || code == 721)
        more = ". The GPU's context is lost; this process has to end. TE_DEBUG_SYNC=1 tells which kernel it was, "
               "compute-sanitizer where";
    return te__fail(te, code == TE__CU_OUT_OF_MEMORY ? TE_ERR_OUT_OF_MEMORY : TE_ERR_DEVICE, "%s: %s: %s: %s%s",
                    te->device_name, call, name ? name : "unknown error", text ? text : "?", more);
}

/* Makes te's CUcontext current, and sets *pushed for te__cuda_leave. */
static te_result te__cuda_enter(te_ctx *te, bool *pushed) {
    te__cu_handle current = NULL;
    te__cu_result code;
    *pushed = false;
    if (te__is_forked(te)) return te__refuse_fork(te);
    code = te__cu.CtxGetCurrent(&current);
    if (code == 0 && current == te->cuda->context) return TE_OK;
    code = te__cu.CtxPushCurrent(te->cuda->context);
    if (code) return te__cu_fail(te, "cuCtxPushCurrent", code);
    *pushed = true;
    return TE_OK;
}
static TE__NOINLINE void te__cuda_leave(bool pushed) {
    te__cu_handle popped;
    if (pushed) te__cu.CtxPopCurrent(&popped);
}

/* Launches everything that waits for its kernel to be compiled. Does nothing in a forked child, which has no compiling
 * threads: waiting would never end. */
static te_result te__cuda_settle(te_ctx *te) {
    return te->cuda && te->cuda->settle && !te__is_forked(te) ? te->cuda->settle(te) : TE_OK;
}

static void te__cuda_device_close(te_ctx *te) {
    te__cuda *c = te->cuda;
    bool pushed = false;
    int i;
    if (!c) return;
    if (c->context && te__cuda_enter(te, &pushed) == TE_OK) {
        for (i = 0; i < TE__STAGES; i++)
            if (c->staged[i]) te__cu.EventDestroy(c->staged[i]);
        if (c->stage) te__cu.MemFreeHost(c->stage);
        if (c->counter) te__cu.MemFree((te__cu_address)(uintptr_t)c->counter);
        if (c->outside) te__cu.MemFreeHost(c->outside);
        if (c->own_stream) te__cu.StreamDestroy(c->stream);
        te__cuda_leave(pushed);
    }
    if (c->retained_context && !te__is_forked(te)) te__cu.DevicePrimaryCtxRelease(c->device);
    te__free(te, c->maps);
    te__free(te, c->memo);
    te__free(te, c);
    te->cuda = NULL;
}

static int te__cu_attribute(te__cu_device device, int attribute) {
    int value = 0;
    te__cu.DeviceGetAttribute(&value, attribute, device);
    return value;
}

/* Sets c->context to cu_context, or to the primary context of the device if cu_context is NULL. */
static te_result te__cuda_take_context(te_ctx *te, int ordinal, void *cu_context) {
    te__cuda *c = te->cuda;
    te__cu_result code;
    int count = 0;
    if (cu_context) {
        bool pushed;
        te_result result;
        c->context = cu_context;
        result = te__cuda_enter(te, &pushed);
        if (result != TE_OK) return result;
        code = te__cu.CtxGetDevice(&c->device);
        te__cuda_leave(pushed);
        if (code) return te__cu_fail(te, "te_ctx_desc.cu_context: cuCtxGetDevice", code);
        snprintf(te->device_name, sizeof(te->device_name), "cuda:%d", (int)c->device);
        return TE_OK;
    }
    te__cu.DeviceGetCount(&count);
    if (ordinal >= count)
        return te__fail(
            te, TE_ERR_DEVICE,
            "te_ctx_create: device \"cuda:%d\": this process sees %d GPU%s (nvidia-smi, CUDA_VISIBLE_DEVICES)", ordinal,
            count, count == 1 ? ": cuda:0" : "s");
    code = te__cu.DeviceGet(&c->device, ordinal);
    if (code) return te__cu_fail(te, "cuDeviceGet", code);
    code = te__cu.DevicePrimaryCtxRetain(&c->context, c->device);
    if (code) return te__cu_fail(te, "cuDevicePrimaryCtxRetain", code);
    c->retained_context = true;
    return TE_OK;
}

/* Sets c->stream to cu_stream, or to a new stream, which synchronizes with the legacy default stream. te's CUcontext
 * must be current. */
static te_result te__cuda_take_stream(te_ctx *te, void *cu_stream) {
    te__cuda *c = te->cuda;
    te__cu_handle owner = NULL;
    te__cu_result code;
    if (!cu_stream) {
        code = te__cu.StreamCreate(&c->stream, 0);
        if (code) return te__cu_fail(te, "cuStreamCreate", code);
        c->own_stream = true;
        return TE_OK;
    }
    code = te__cu.StreamGetCtx(cu_stream, &owner);
    if (code) return te__cu_fail(te, "te_ctx_desc.cu_stream: cuStreamGetCtx", code);
    if (owner != c->context)
        return te__fail(
            te, TE_ERR_INVALID,
            "te_ctx_create: cu_stream belongs to another CUcontext than %s; hand in both, cu_context and cu_stream",
            c->retained_context ? "the device's primary one" : "cu_context");
    c->stream = cu_stream;
    return TE_OK;
}

/* Allocates the counter memory (te__plan_counter, te__cuda_word) and sets it to 0. te's CUcontext must be current. */
static te_result te__cuda_take_counter(te_ctx *te) {
    const size_t bytes = TE__PLAN_COUNTER_BYTES + TE__PLAN_MANY_COUNTERS * sizeof(unsigned);
    te__cu_address address = 0;
    te__cu_result code = te__cu.MemAlloc(&address, bytes);
    if (!code) te->cuda->counter = (void *)(uintptr_t)address;
    if (!code) code = te__cu.MemsetD8Async(address, 0, bytes, te->cuda->stream);
    return code ? te__cu_fail(te, "te_ctx_create: a few kilobytes of device memory", code) : TE_OK;
}
/* Allocates the counters of out-of-range ids (core/outside.c) in pinned memory. Kernels use the host's address (unified
 * addressing). */
static te_result te__cuda_take_outside(te_ctx *te) {
    void *host = NULL;
    te__cu_result code = te__cu.MemHostAlloc(&host, TE__OUTSIDE_COUNT * sizeof(te__outside), TE__CU_HOST_MAPPED);
    if (code) return te__cu_fail(te, "te_ctx_create: pinned memory for a few counts", code);
    te->cuda->outside = (te__outside *)memset(host, 0, TE__OUTSIDE_COUNT * sizeof(te__outside));
    return TE_OK;
}
/* Called after a wait for the stream. Reports the error `code` of the wait, else `result`, else the out-of-range ids
 * that kernels have found, else what te->waiters have. */
static te_result te__cuda_waited(te_ctx *te, te_result result, te__cu_result code, const char *call) {
    if (code) return te__cu_fail(te, call, code);
    return te__tell_waited(te, result == TE_OK ? te__outside_tell(te, te->cuda->outside) : result);
}

/* Returns the address of a word of 8 bytes in the first TE__PLAN_COUNTER_BYTES of the counters. Words are numbered from
 * the end: i = 0 is the last one. */
static void *te__cuda_word(te_ctx *te, int i) {
    return (char *)te->cuda->counter + TE__PLAN_COUNTER_BYTES - 8 * (i + 1);
}

/* Opens the device and fills te->cuda. On failure te->cuda is NULL. */
static te_result te__cuda_device_open(te_ctx *te, int ordinal, void *cu_context, void *cu_stream) {
    te__text why = TE_ZERO;
    te__cuda *c;
    bool pushed;
    te_result result = te__driver_open(&why);
    if (result != TE_OK) te__fail(te, result, "te_ctx_create: device \"cuda:%d\": %s", ordinal, te__text_str(&why));
    te__text_free(&why);
    if (result != TE_OK) return result;
    c = te->cuda = (te__cuda *)te__alloc_zero(te, sizeof(te__cuda));
    if (!c) return TE_ERR_OUT_OF_MEMORY;
    result = te__cuda_take_context(te, ordinal, cu_context);
    if (result == TE_OK) {
        te__cu.DeviceGetName(c->name, (int)sizeof(c->name) - 1, c->device);
        te__cu.DeviceTotalMem(&c->total_bytes, c->device);
        c->sm = 10 * te__cu_attribute(c->device, TE__CU_SM_MAJOR) + te__cu_attribute(c->device, TE__CU_SM_MINOR);
        c->num_sms = te__cu_attribute(c->device, TE__CU_NUM_SMS);
        c->max_shared = te__cu_attribute(c->device, TE__CU_SHARED_OPTIN);
        if (c->sm < 80)
            result = te__fail(
                te, TE_ERR_UNSUPPORTED,
                "te_ctx_create: %s (cuda:%d) is of compute capability %d.%d; te.h needs 8.0, or runs on the CPU: "
                "te_ctx_desc.device = \"cpu\"",
                c->name, (int)c->device, c->sm / 10, c->sm % 10);
    }
    if (result == TE_OK) result = te__cuda_enter(te, &pushed);
    if (result == TE_OK) {
        result = te__cuda_take_stream(te, cu_stream);
        if (result == TE_OK) result = te__cuda_take_counter(te);
        if (result == TE_OK) result = te__cuda_take_outside(te);
        te__cuda_leave(pushed);
    }
    if (result != TE_OK) te__cuda_device_close(te);
    return result;
}

TE_API int te_ctx_sm(const te_ctx *te) { return te && te->cuda ? te->cuda->sm : 0; }
TE_API void *te_ctx_cu_context(const te_ctx *te) { return te && te->cuda ? te->cuda->context : NULL; }
TE_API void *te_ctx_cu_stream(const te_ctx *te) {
    if (!te || !te->cuda) return NULL;
    te__cuda_settle((te_ctx *)te);
    te->cuda->stream_shown = true;
    return te->cuda->stream;
}

/* ---- memory -------------------------------------------------------------------------------------------------- */

/* Allocates device memory. Returns NULL without an error if there is not enough: the caller frees cached blocks and
 * tries again. */
static void *te__cuda_mem_alloc(te_ctx *te, size_t bytes) {
    te__cu_address address = 0;
    te__cu_result code;
    bool pushed;
    if (te__refuse_fork(te) != TE_OK) return NULL;
    if (te->device_allocator.alloc) return te->device_allocator.alloc(te->device_allocator.user, bytes, 256);
    if (te__cuda_enter(te, &pushed) != TE_OK) return NULL;
    code = te__cu.MemAlloc(&address, bytes);
    te__cuda_leave(pushed);
    if (code && code != TE__CU_OUT_OF_MEMORY) te__cu_fail(te, "cuMemAlloc", code);
    return code ? NULL : (void *)(uintptr_t)address;
}
static void te__cuda_mem_release(te_ctx *te, void *data, size_t bytes) {
    te__cu_result code;
    bool pushed;
    if (te__is_forked(te)) return; /* the memory belongs to the parent process */
    te__cuda_settle(te); /* waiting launches may write to the memory */
    if (te->device_allocator.alloc) {
        te->device_allocator.release(te->device_allocator.user, data, bytes);
        return;
    }
    if (te__cuda_enter(te, &pushed) != TE_OK) return;
    code = te__cu.MemFree((te__cu_address)(uintptr_t)data);
    te__cuda_leave(pushed);
    if (code) te__cu_fail(te, "cuMemFree", code);
}
static void te__cuda_memory_info(te_ctx *te, size_t *free_bytes, size_t *total_bytes) {
    bool pushed;
    *free_bytes = *total_bytes = 0;
    if (te__cuda_enter(te, &pushed) != TE_OK) return;
    te__cu.MemGetInfo(free_bytes, total_bytes);
    te__cuda_leave(pushed);
}

static te_result te__cuda_synchronize(te_ctx *te) {
    bool pushed;
    te_result result = te->capture ? te__refuse_wait(te) : te__cuda_enter(te, &pushed);
    te__cu_result code;
    if (result != TE_OK) return result;
    result = te__cuda_settle(te);
    code = te__cu.StreamSynchronize(te->cuda->stream);
    te__cuda_leave(pushed);
    return te__cuda_waited(te, result, code, "cuStreamSynchronize");
}

static te_result te__cuda_stage_open(te_ctx *te) {
    te__cuda *c = te->cuda;
    te__cu_result code = 0;
    void *host = NULL;
    int i;
    for (i = 0; i < TE__STAGES && !code; i++)
        if (!c->staged[i]) code = te__cu.EventCreate(&c->staged[i], TE__CU_EVENT_NO_TIMING);
    if (code) return te__cu_fail(te, "cuEventCreate", code);
    code = te__cu.MemHostAlloc(&host, (size_t)TE__STAGES * TE__STAGE_BYTES, 0);
    if (code) return te__cu_fail(te, "cuMemHostAlloc", code);
    c->stage = (unsigned char *)host;
    return TE_OK;
}

/* Copies `src` to the device. The caller may reuse `src` on return. The host waits only if the whole ring c->stage is
 * in use. The driver itself stages small copies. */
static te_result te__cuda_upload(te_ctx *te, void *dst, const void *src, size_t bytes) {
    te__cuda *c = te->cuda;
    te__cu_result code = 0;
    size_t done, n;
    bool pushed;
    te_result result;
    if (te->capture) return te__refuse_upload(te);
    if (bytes == 0) return TE_OK;
    if (c->enqueue && bytes <= TE__STAGE_BYTES) return c->enqueue(te, dst, src, bytes);
    result = te__cuda_enter(te, &pushed);
    if (result != TE_OK) return result;
    te__cuda_settle(te);
    if (bytes <= TE__SMALL_UPLOAD) {
        unsigned char staged[TE__SMALL_UPLOAD]; /* a copy on the stack, because `src` may be pinned memory */
        memcpy(staged, src, bytes);
        code = te__cu.MemcpyHtoDAsync((te__cu_address)(uintptr_t)dst, staged, bytes, c->stream);
        te__cuda_leave(pushed);
        return code ? te__cu_fail(te, "copy to the device: cuMemcpyHtoDAsync", code) : TE_OK;
    }
    if (!c->stage) result = te__cuda_stage_open(te);
    for (done = 0; result == TE_OK && done < bytes; done += n) {
        int piece = (int)(c->uploads % TE__STAGES);
        unsigned char *stage = c->stage + (size_t)piece * TE__STAGE_BYTES;
        n = bytes - done;
        if (n > TE__STAGE_BYTES) n = TE__STAGE_BYTES;
        if (c->uploads >= TE__STAGES) code = te__cu.EventSynchronize(c->staged[piece]);
        memcpy(stage, (const unsigned char *)src + done, n);
        if (!code) code = te__cu.MemcpyHtoDAsync((te__cu_address)(uintptr_t)dst + done, stage, n, c->stream);
        if (!code) code = te__cu.EventRecord(c->staged[piece], c->stream);
        if (code) result = te__cu_fail(te, "copy to the device: cuMemcpyHtoDAsync", code);
        c->uploads++;
    }
    te__cuda_leave(pushed);
    return result;
}

static te_result te__cuda_download(te_ctx *te, void *host, const void *src, size_t bytes) {
    te__cu_result code;
    bool pushed;
    te_result result;
    if (te->capture) return te__refuse_download(te);
    if (bytes == 0) return TE_OK;
    result = te__cuda_enter(te, &pushed);
    if (result != TE_OK) return result;
    result = te__cuda_settle(te);
    code = te__cu.MemcpyDtoHAsync(host, (te__cu_address)(uintptr_t)src, bytes, te->cuda->stream);
    if (!code) code = te__cu.StreamSynchronize(te->cuda->stream);
    te__cuda_leave(pushed);
    return te__cuda_waited(te, result, code, "copy from the device: cuMemcpyDtoHAsync");
}

static te_result te__cuda_clear(te_ctx *te, void *dst, size_t bytes) {
    te__cu_result code;
    bool pushed;
    te_result result;
    if (bytes == 0) return TE_OK;
    if (te->cuda->enqueue) return te->cuda->enqueue(te, dst, NULL, bytes);
    result = te__cuda_enter(te, &pushed);
    if (result != TE_OK) return result;
    code = te__cu.MemsetD8Async((te__cu_address)(uintptr_t)dst, 0, bytes, te->cuda->stream);
    te__cuda_leave(pushed);
    return code ? te__cu_fail(te, "cuMemsetD8Async", code) : TE_OK;
}

/* ---- graphs --------------------------------------------------------------------------------------------------- */

static te_result te__cuda_capture_begin(te_ctx *te) {
    te__cu_result code;
    bool pushed;
    te_result result;
    if (!te__cu.StreamBeginCapture || !te__cu.StreamEndCapture || !te__cu.GraphInstantiate || !te__cu.GraphLaunch ||
        !te__cu.GraphDestroy || !te__cu.GraphExecDestroy)
        return te__fail(te, TE_ERR_LIBRARY, "te_graph_begin: the NVIDIA driver has no graphs: update it");
    result = te__cuda_settle(te);
    if (result == TE_OK) result = te__cuda_enter(te, &pushed);
    if (result != TE_OK) return result;
    code = te__cu.StreamBeginCapture(te->cuda->stream, TE__CU_CAPTURE_RELAXED);
    te__cuda_leave(pushed);
    return code ? te__cu_fail(te, "te_graph_begin: cuStreamBeginCapture", code) : TE_OK;
}
static te_result te__cuda_capture_end(te_ctx *te, te_graph *g) {
    te__cu_handle graph = NULL;
    te__cu_result code;
    bool pushed;
    te_result result = te__cuda_enter(te, &pushed);
    if (result != TE_OK) return result;
    code = te__cu.StreamEndCapture(te->cuda->stream, &graph);
    if (g && code) result = te__cu_fail(te, "te_graph_end: cuStreamEndCapture", code);
    if (g && !code) {
        code = te__cu.GraphInstantiate(&g->exec, graph, 0);
        if (code) result = te__cu_fail(te, "te_graph_end: cuGraphInstantiate", code);
    }
    if (graph) te__cu.GraphDestroy(graph);
    te__cuda_leave(pushed);
    return result;
}
static te_result te__cuda_graph_launch(te_ctx *te, te_graph *g) {
    te__cu_result code;
    bool pushed;
    te_result result = te__cuda_settle(te);
    if (result == TE_OK) result = te__cuda_enter(te, &pushed);
    if (result != TE_OK) return result;
    code = te__cu.GraphLaunch(g->exec, te->cuda->stream);
    if (!code && te->debug_sync) code = te__cu.StreamSynchronize(te->cuda->stream);
    te__cuda_leave(pushed);
    if (!code && te->debug_sync) return te__outside_tell(te, te->cuda->outside);
    return code ? te__cu_fail(te, "te_graph_launch: cuGraphLaunch", code) : TE_OK;
}
static void te__cuda_graph_close(te_ctx *te, te_graph *g) {
    bool pushed;
    if (!g->exec || te__cuda_enter(te, &pushed) != TE_OK) return;
    te__cu.GraphExecDestroy(g->exec);
    g->exec = NULL;
    te__cuda_leave(pushed);
}

/* ---- tensor maps --------------------------------------------------------------------------------------------- */

/* A dtype of tensor maps alone: f32 that TMA rounds to TF32 while it copies. */
enum { TE__MAP_TF32 = TE_DTYPE_COUNT };

static te_result te__cuda_encode_map(te_ctx *te, const te__map_key *k, unsigned char map[TE__MAP_BYTES]) {
    /* the CUtensorMapDataType of each dtype, and of TE__MAP_TF32; elements of 8 bits or less are copied as bytes */
    static const int types[TE__MAP_TF32 + 1] = {-1, 7, 6, 9, 0, 0, 0, 0, 0, 3, 5, 1, 11};
    static const uint32_t steps[5] = {1, 1, 1, 1, 1};
    union {
        unsigned char bytes[TE__MAP_BYTES + 64];
        uint64_t align;
    } memory;
    unsigned char *aligned = memory.bytes + (64 - ((uintptr_t)memory.bytes & 63)) % 64; /* the driver requires 64-byte
                                                                                         * alignment */
    uint64_t starts = k->address; /* the bitwise OR of the address and all strides. If `starts` is a multiple of 32, so
                                   * is the address of every row */
    int i, promotion,
        swizzle = k->swizzle_bytes == 128  ? 3
                  : k->swizzle_bytes == 64 ? 2
                  : k->swizzle_bytes == 32 ? 1
                                           : 0;
    te__cu_result code;
    for (i = 0; i + 1 < k->rank; i++) starts |= k->strides[i];
    promotion = starts % 32 ? 2 : 3; /* see te__cuda_tensor_map */
    if (!te__cu.TensorMapEncodeTiled)
        return te__fail(te, TE_ERR_LIBRARY, "the NVIDIA driver has no cuTensorMapEncodeTiled: update it");
    code =
        te__cu.TensorMapEncodeTiled(aligned, types[k->dtype], (unsigned)k->rank, (void *)(uintptr_t)k->address, k->dims,
                                    k->strides, k->box, steps, 0, swizzle, promotion, 0 /* fill: zeros for elements
                                                                                         * outside */);
    if (code) {
        char call[256];
        snprintf(call, sizeof(call),
                 "tensor map of %s at 0x%llx, rank %d, size %llu x %llu, stride %llu bytes, box %u x %u, swizzle %d: "
                 "cuTensorMapEncodeTiled",
                 te_dtype_name((te_dtype)k->dtype), (unsigned long long)k->address, k->rank,
                 (unsigned long long)k->dims[0], (unsigned long long)k->dims[1], (unsigned long long)k->strides[0],
                 k->box[0], k->box[1], k->swizzle_bytes);
        return te__cu_fail(te, call, code);
    }
    memcpy(map, aligned, TE__MAP_BYTES);
    return TE_OK;
}

/* Writes a CUtensorMap of 128 bytes, for TMA, to `out128`. Writes zeros if the plan will not run (p->explain).
 * dims[rank] and box[rank] are in elements, innermost dimension first.
 * strides_bytes[rank - 1] are the strides of the outer dimensions.
 * swizzle_bytes is 0, 32, 64 or 128.
 * L2 fetches 256 bytes at a time (CU_TENSOR_MAP_L2_PROMOTION_L2_256B) if the address of every row is a multiple of 32
 * bytes, else 128 bytes (tests/bench/notes.md).
 * Maps are cached, because encoding a map takes host time. */
static te_result te__cuda_tensor_map(te__plan *p, void *out128, const void *ptr, te_dtype dtype, int rank,
                                     const uint64_t *dims, const uint64_t *strides_bytes, const uint32_t *box,
                                     int swizzle_bytes) {
    te_ctx *te = p->te;
    te__map_key key = TE_ZERO;
    te__map_set *set;
    te__map_slot *slot;
    te_result result;
    int way;
    memset(out128, 0, TE__MAP_BYTES);
    if (p->explain || !te->cuda) return TE_OK;
    if (rank < 1 || rank > 5 || (int)dtype <= 0 || (int)dtype > TE__MAP_TF32)
        return p->result = te__fail(te, TE_ERR_INVALID, "tensor map: rank %d, dtype %d", rank, (int)dtype);
    if (!te->cuda->maps) te->cuda->maps = (te__map_set *)te__alloc_zero(te, TE__MAP_SETS * sizeof(te__map_set));
    if (!te->cuda->maps) return p->result = TE_ERR_OUT_OF_MEMORY;
    key.address = (uint64_t)(uintptr_t)ptr;
    memcpy(key.dims, dims, (size_t)rank * sizeof(dims[0]));
    if (rank > 1) memcpy(key.strides, strides_bytes, (size_t)(rank - 1) * sizeof(strides_bytes[0]));
    memcpy(key.box, box, (size_t)rank * sizeof(box[0]));
    key.dtype = (int)dtype;
    key.rank = rank;
    key.swizzle_bytes = swizzle_bytes;
    set = &te->cuda->maps[te__hash64(&key, offsetof(te__map_key, strides), key.box[0] + 65536ull * key.box[1]) %
                          TE__MAP_SETS];
    for (way = 0; way < TE__MAP_WAYS && memcmp(&set->slot[way].key, &key, sizeof(key)) != 0;) way++;
    slot = &set->slot[way < TE__MAP_WAYS ? way : (int)(set->turn++ % TE__MAP_WAYS)];
    if (way == TE__MAP_WAYS) {
        slot->key.rank = 0; /* invalid until the encoding has succeeded */
        result = te__cuda_encode_map(te, &key, slot->map);
        if (result != TE_OK) return p->result = result;
        slot->key = key;
    }
    memcpy(out128, slot->map, TE__MAP_BYTES);
    return TE_OK;
}

/* ---- a cache of planning ------------------------------------------------------------------------------------- */

/* Returns the TE__MEMO_VALUE bytes cached for `key` (TE__MEMO_KEY bytes, not all 0). If *known is false, the caller
 * must fill them in, from the key and the device alone. Returns NULL if this plan cannot use the cache. */
static void *te__cuda_memo(te__plan *p, const void *key, bool *known) {
    static const unsigned char free_key[TE__MEMO_KEY] = TE_ZERO;
    te__cuda *c = p->te->cuda;
    te__memo_slot *slot = NULL;
    uint64_t hash;
    int way;
    *known = false;
    if (p->explain || !c) return NULL; /* the plan may be for another device */
    if (!c->memo) {
        c->memo = (te__memo_slot *)te__try_alloc(p->te, TE__MEMO_SLOTS * sizeof(te__memo_slot));
        if (!c->memo) return NULL;
        memset(c->memo, 0, TE__MEMO_SLOTS * sizeof(te__memo_slot));
    }
    hash = te__hash64(key, TE__MEMO_KEY, 0);
    for (way = 0; way < TE__MEMO_WAYS; way++) {
        slot = &c->memo[(hash + (uint64_t)way) % TE__MEMO_SLOTS];
        *known = memcmp(slot->key, key, TE__MEMO_KEY) == 0;
        if (*known) return slot->value;
        if (memcmp(slot->key, free_key, TE__MEMO_KEY) == 0) break;
    }
    if (way == TE__MEMO_WAYS) slot = &c->memo[(hash + c->memo_turn++ % TE__MEMO_WAYS) % TE__MEMO_SLOTS];
    memcpy(slot->key, key, TE__MEMO_KEY);
    return slot->value;
}
