/* api/context.h: the context: one device with its stream, memory pool, pending error and random state.
 *
 * A context and everything made in it belong to one thread at a time, and to the process that created it (a child by
 * fork gets TE_ERR_STATE). Contexts share nothing but the loaded libraries and the table of compiled kernels, which a
 * mutex guards. */

/* The importance of a message. A context passes on messages of its level and of lower numbers. */
typedef enum te_log_level {
    TE_LOG_ERROR = 1, /* no message has this level today: te_error holds errors */
    TE_LOG_WARN = 2,  /* a likely mistake, or something slower than it need be */
    TE_LOG_INFO = 3,  /* each first error, the device that was taken, kernels as they are compiled */
    TE_LOG_DEBUG = 4  /* errors after the first, kernels read from the cache */
} te_log_level;
/* Receives one message, without a line end, valid during the call. `user` is te_ctx_desc.log_user. */
typedef void (*te_log_fn)(void *user, te_log_level level, const char *message);

/* Replaces malloc and free, for host memory or for device memory: give both functions or neither. Both are called from
 * the context's own thread only. */
typedef struct te_allocator {
    void *(*alloc)(void *user, size_t bytes, size_t alignment); /* NULL if there is no memory; alignment: a power of
                                                                 * two, at most 4096 */
    void (*release)(void *user, void *pointer, size_t bytes);   /* `bytes` is the size that was asked for */
    void *user;                                                 /* handed to both; borrowed for the context's
                                                                 * lifetime */
} te_allocator;

/* The options of te_ctx_create. Strings are read during the call; borrowed pointers must outlive the context. */
typedef struct te_ctx_desc {
    const char *device;             /* "cpu", "cuda:0" ...; NULL => $TE_DEVICE, else GPU 0 if there is one, else the
                                     * CPU */
    void *cu_context;               /* an existing CUcontext (borrowed); NULL => the device's primary context */
    void *cu_stream;                /* an existing CUstream (borrowed); NULL => the context makes a stream */
    te_allocator host_allocator;    /* zero => malloc and free */
    te_allocator device_allocator;  /* zero => cuMemAlloc and cuMemFree (CUDA), the host allocator (CPU) */
    te_log_fn log;                  /* NULL => stderr */
    void *log_user;                 /* handed to `log`; borrowed */
    te_log_level log_level;         /* 0 => $TE_LOG (1 .. 4), else TE_LOG_WARN */
    int cpu_threads;                /* 0 => $TE_THREADS, else the processors of the machine (64 at most) */
    uint64_t seed;                  /* of the random state; 0 => 1234 */
    bool exact_f32;                 /* CUDA: f32 operands of products keep all their bits, and products run without
                                     * tensor cores; false => operands are rounded to TF32 */
    bool no_cubin_cache;            /* no folder of compiled kernels is read or written: each process compiles its
                                     * kernels */
} te_ctx_desc;

/* Makes a context. desc may be NULL. Returns NULL only if host memory for the context could not be allocated. If desc
 * or $TE_DEVICE names a device that cannot be opened, the context has te_ok false, and te_error says what was tried and
 * what to do. If no device is named and no GPU can be used, the context runs on the CPU. Owned by the caller:
 * te_ctx_destroy. */
TE_API te_ctx *te_ctx_create(const te_ctx_desc *desc);
/* Waits for the device and releases everything that was made in the context. Modules, groups, open files, tensors,
 * optimizers and quantizers that are still held are released as well: they must be neither used nor released
 * afterwards. For these the destroy functions of classes and the release functions of wrapped memory are called, and a
 * warning counts them. A graph is not released: it needs te_graph_destroy in any case. In a child by fork the call
 * releases memory and leaves threads and the GPU alone. Syncs. NULL is fine. */
TE_API void te_ctx_destroy(te_ctx *te);

/* Returns true while no call has failed since te_ctx_create or te_clear_error; false for NULL. In a model's first step
 * kernels are compiled on other threads while the calls go on. te_ok, te_error, te_error_code and te_clear_error wait
 * for these kernels, so that the answer holds for every call before. */
TE_API bool te_ok(const te_ctx *te);
/* Returns the text of the first error: the call, both values, the module's path, the remedy; "" if there is none.
 * Borrowed, valid until te_clear_error. */
TE_API const char *te_error(const te_ctx *te);
/* Returns the code of the first error, or TE_OK. TE_ERR_STATE for NULL. */
TE_API te_result te_error_code(const te_ctx *te);
/* Forgets the error, so that the context can be used again.
 *
 * A failed call has made no tensor. Its output tensors hold their old content, the new one, or a part of each. The
 * random state is what it was before the call. An optimizer has stepped all parameters or none (exception: weights
 * stored by custom quantizers or over a group, whose functions may fail after other weights were stored). The tape of a
 * failed te_backward is partly played, so a training step is repeated as a whole: te_clear_error,
 * te_optimizer_zero_grad, then forward, te_backward, te_optimizer_step.
 *
 * A repeated step gives the bits of a step that never failed. If a te_forward, te_autocast_end, te_backward,
 * te_graph_launch or te_optimizer_step of the step failed, or memory ran out, te_clear_error restores the amaxes,
 * histories and scales of delayed scaling to their values at the beginning of the step. A step begins with an outermost
 * te_autocast_begin (or the launch of a graph without an optimizer). A step ends with a te_optimizer_step that
 * succeeds, microbatches included, or with te_model_load; in a context without an optimizer it ends where the next one
 * begins. Random numbers drawn by a forward that succeeded stay drawn: te_rng_get before the step and te_rng_set after
 * te_clear_error repeat them. */
TE_API void te_clear_error(te_ctx *te);

/* Returns the name of the context's device: "cpu" or "cuda:N" (borrowed). */
TE_API const char *te_ctx_device(const te_ctx *te);
/* Returns whether the context runs on a GPU. */
TE_API bool te_ctx_is_cuda(const te_ctx *te);
/* Returns the GPU's architecture: 80, 86, 89, 90, 100, 103, 120 ...; 0 on the CPU. */
TE_API int te_ctx_sm(const te_ctx *te);
/* Returns the CUcontext in use (borrowed); NULL on the CPU. */
TE_API void *te_ctx_cu_context(const te_ctx *te);
/* Returns the CUstream in use (borrowed); NULL on the CPU. */
TE_API void *te_ctx_cu_stream(const te_ctx *te);
/* Waits until everything queued so far has run. Syncs. TE_ERR_DEVICE if a kernel has failed since the last wait. */
TE_API te_result te_synchronize(te_ctx *te);

/* Memory of the context's device (on the CPU: host memory of tensors), in bytes. */
typedef struct te_memory_stats {
    size_t allocated;       /* bytes in live tensors */
    size_t peak_allocated;  /* highest `allocated` since the last te_memory_reset_peak */
    size_t reserved;        /* bytes taken from the device, live or cached */
    size_t peak_reserved;   /* highest `reserved` since the last te_memory_reset_peak */
    size_t device_free;     /* bytes that the driver calls free; 0 on the CPU */
    size_t device_total;    /* bytes of the whole device; 0 on the CPU */
    uint64_t allocs;        /* requests for memory so far */
    uint64_t device_allocs; /* requests that the cache could not serve */
    size_t pinned;          /* bytes of pinned host memory, in use or cached */
    size_t offloaded;       /* bytes that CPU offload (te_cpu_offload_begin) now holds in pinned memory for a backward
                             * pass */
    uint64_t copied_out, copied_in; /* bytes copied so far to pinned memory and back */
} te_memory_stats;

/* Returns the present figures; all 0 for NULL. */
TE_API te_memory_stats te_memory_get_stats(te_ctx *te);
/* Sets both peaks to the present values. */
TE_API void te_memory_reset_peak(te_ctx *te);
/* Gives cached blocks of device memory and of pinned memory back. Syncs. */
TE_API void te_memory_trim(te_ctx *te);

/* Opens a scope. Every tensor belongs to the innermost open scope. The end of the scope releases each tensor that was
 * not retained, and the tape nodes recorded inside. A tensor made outside of all scopes belongs to the context itself:
 * a program that calls te_backward a hundred times without a scope is warned, once. Scopes nest. */
TE_API te_result te_scope_begin(te_ctx *te);
/* Ends the innermost scope. TE_ERR_STATE (te_error_code) if none is open. */
TE_API void te_scope_end(te_ctx *te);

/* Sets the random state to (seed, 0). The state is that of Philox4x32-10: the key is the seed, and each random
 * operation uses one offset. The same (seed, offset) gives the same bits on the CPU and on every GPU. TE_ERR_STATE
 * inside a graph's capture. */
TE_API void te_seed(te_ctx *te, uint64_t seed);
/* Reads the random state; either pointer may be NULL. */
TE_API void te_rng_get(const te_ctx *te, uint64_t *seed, uint64_t *offset);
/* Sets the random state to values that te_rng_get has read. TE_ERR_STATE inside a graph's capture. */
TE_API void te_rng_set(te_ctx *te, uint64_t seed, uint64_t offset);

/* Named random states: used in place of the context's state where ranks must not all draw the same numbers (weights,
 * dropout of shared heads). The modules' option rng_tracker_name selects one. Functions that run again (te_checkpoint)
 * and graphs treat named states like the context's; te_model_save does not write them. TransformerEngine:
 * CudaRNGStatesTracker.
 *
 * te_rng_tracker_add makes the state (seed, 0) under `name` (copied, at most 63 characters). The state lives as long as
 * the context. TE_ERR_INVALID if the context has a named state with this name or with this seed already, or has
 * TE_MAX_RNG_TRACKERS of them. */
#define TE_MAX_RNG_TRACKERS 16 /* the most named random states of a context */
TE_API te_result te_rng_tracker_add(te_ctx *te, const char *name, uint64_t seed);
/* te_rng_fork_begin makes the named state the context's random state until te_rng_fork_end: te_rng_get, te_seed and all
 * operations that draw use it. The next region with this name continues where this one ended. Nests. A graph's capture,
 * and te_graph_launch, stand outside of such regions; a capture may contain whole regions. */
TE_API te_result te_rng_fork_begin(te_ctx *te, const char *name);
TE_API te_result te_rng_fork_end(te_ctx *te);
/* Reads a named state; either pointer may be NULL. */
TE_API te_result te_rng_tracker_get(te_ctx *te, const char *name, uint64_t *seed, uint64_t *offset);
/* Sets a named state to values that te_rng_tracker_get has read. TE_ERR_STATE inside a graph's capture. */
TE_API te_result te_rng_tracker_set(te_ctx *te, const char *name, uint64_t seed, uint64_t offset);
TE_API int te_rng_num_trackers(const te_ctx *te);                     /* the number of named states */
TE_API const char *te_rng_tracker_name(const te_ctx *te, int index); /* the name of state `index`, in the order of
                                                                      * adding (borrowed); NULL for an index outside the
                                                                      * list */
