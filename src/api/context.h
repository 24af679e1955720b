/* api/context.h: the context: one device, one stream, one memory pool, one error, one random state.
 *
 * A context and everything made in it belong to one thread at a time. Two contexts in two threads do not know of each
 * other. The process itself holds nothing but the loaded libraries and the table of compiled kernels, behind a mutex. */

typedef enum te_log_level { TE_LOG_ERROR = 1, TE_LOG_WARN = 2, TE_LOG_INFO = 3, TE_LOG_DEBUG = 4 } te_log_level;
typedef void (*te_log_fn)(void *user, te_log_level level, const char *message);

/* Replaces malloc and free, for host memory or for device memory: both or neither. `alloc` returns NULL when there is none; alignment is
 * a power of two of at most 4096. `release` gets the size back. Called from the context's own thread only. */
typedef struct te_allocator {
    void *(*alloc)(void *user, size_t bytes, size_t alignment);
    void (*release)(void *user, void *pointer, size_t bytes);
    void *user;
} te_allocator;

typedef struct te_ctx_desc {
    const char *device;             /* "cpu", "cuda:0" ...; NULL => $TE_DEVICE, else GPU 0 if there is one, else the CPU */
    void *cu_context;               /* an existing CUcontext (borrowed); NULL => the device's primary context */
    void *cu_stream;                /* an existing CUstream (borrowed); NULL => a stream of its own */
    te_allocator host_allocator;    /* zero => malloc and free */
    te_allocator device_allocator;  /* zero => cuMemAlloc and cuMemFree (CUDA), the host allocator (CPU) */
    te_log_fn log;                  /* NULL => warnings and errors on stderr; see also $TE_LOG */
    void *log_user;
    te_log_level log_level;         /* 0 => $TE_LOG (1 .. 4), else TE_LOG_WARN */
    int cpu_threads;                /* 0 => $TE_THREADS, else the processors of the machine (64 at most) */
    uint64_t seed;                  /* of the random state; 0 => 1234 */
    bool no_cubin_cache;            /* compiled kernels stay in memory */
} te_ctx_desc;

/* Makes a context. desc may be NULL. Returns NULL only if not even the host memory for it could be had: a device that
 * cannot be opened gives a context whose te_ok() is false and whose te_error() says what was tried and what to do (if the
 * device was named), or a CPU context (if it was not). Owned by the caller: te_ctx_destroy. */
TE_API te_ctx *te_ctx_create(const te_ctx_desc *desc);
/* Waits for the device and releases everything that was made in the context. Modules, optimizers and retained tensors
 * must have been released before. NULL is fine. */
TE_API void te_ctx_destroy(te_ctx *te);

/* True while no call has failed since te_ctx_create or te_clear_error. NULL => false. In a model's first step kernels are compiled on other threads
 * while the calls go on: te_ok waits for those, so that its answer holds for every call before it. */
TE_API bool te_ok(const te_ctx *te);
/* The first error's whole story: what, both values, which module, what to do. "" when there is none. Borrowed, valid
 * until te_clear_error. */
TE_API const char *te_error(const te_ctx *te);
TE_API te_result te_error_code(const te_ctx *te);
/* Forgets the error; the context goes on.
 *
 * What a failed call leaves behind. It has made no tensor. Tensors that it was to write hold what they held or something in between. The random state is
 * what it was before the call. An optimizer has stepped with all parameters or with none (weights that are stored quantized by quantizers of the
 * user's own, or over a group, are the exception: their functions may fail after others have been stored). The tape of a te_backward that failed is
 * partly played, so that a training step is done again as a whole: te_clear_error, te_optimizer_zero_grad, and forward, backward, te_optimizer_step.
 *
 * A step that is done again gives the bits of one that never failed. What delayed scaling has moved meanwhile (amaxes, histories, scales, by calls that
 * succeeded too) te_clear_error puts back to where it was when the step began, if a te_forward, te_autocast_end, te_backward, te_graph_launch or
 * te_optimizer_step of it has failed, or memory was out. A step begins with an outermost te_autocast_begin (or the launch of a graph without an
 * optimizer) and ends with a te_optimizer_step that succeeds, microbatches included; in a context without an optimizer it ends where the next one
 * begins. te_checkpoint_load ends it, too. Random numbers that a successful forward has drawn are drawn: te_rng_get before the step and te_rng_set
 * after te_clear_error give it the same ones again. */
TE_API void te_clear_error(te_ctx *te);

/* "cpu" or "cuda:N" (borrowed). */
TE_API const char *te_ctx_device(const te_ctx *te);
TE_API bool te_ctx_is_cuda(const te_ctx *te);
/* 80, 86, 89, 90, 100, 103, 120 ...; 0 on the CPU. */
TE_API int te_ctx_sm(const te_ctx *te);
/* The CUcontext and CUstream in use (borrowed); NULL on the CPU. */
TE_API void *te_ctx_cu_context(const te_ctx *te);
TE_API void *te_ctx_cu_stream(const te_ctx *te);
/* Waits until everything queued so far has run. Syncs. Reports a kernel that failed since. */
TE_API te_result te_synchronize(te_ctx *te);

typedef struct te_memory_stats {
    size_t allocated;       /* bytes in live tensors */
    size_t peak_allocated;  /* highest `allocated` since the last te_memory_reset_peak */
    size_t reserved;        /* bytes taken from the device, live or cached */
    size_t peak_reserved;
    size_t device_free;     /* as the driver says; 0 on the CPU */
    size_t device_total;    /* 0 on the CPU */
    uint64_t allocs;        /* requests so far */
    uint64_t device_allocs; /* requests that the cache could not serve */
} te_memory_stats;

TE_API te_memory_stats te_memory_get_stats(te_ctx *te);
TE_API void te_memory_reset_peak(te_ctx *te);
/* Gives cached blocks back to the device. Syncs. */
TE_API void te_memory_trim(te_ctx *te);

/* Scopes. Every tensor belongs to the innermost open scope and is released when it ends, unless it was retained; tape
 * nodes recorded inside go with it. Before the first te_scope_begin a tensor belongs to the context itself: a program that calls te_backward a
 * hundred times without a scope is warned, once. Scopes nest. */
TE_API void te_scope_begin(te_ctx *te);
TE_API void te_scope_end(te_ctx *te);

/* The random state: Philox4x32-10, key = seed, one offset for each random operation. The same (seed, offset) gives the
 * same bits on the CPU and on every GPU. */
TE_API void te_seed(te_ctx *te, uint64_t seed);
TE_API void te_rng_get(const te_ctx *te, uint64_t *seed, uint64_t *offset);
TE_API void te_rng_set(te_ctx *te, uint64_t seed, uint64_t offset);
