/* api/context.h: the context: one device, one stream, one memory pool, one error, one random state.
 *
 * A context and everything made in it belong to one thread at a time, and to the process that created it (a child by
 * fork gets TE_ERR_STATE). Contexts share nothing: the process holds only the loaded libraries and the table of
 * compiled kernels, behind a mutex. */

/* The importance of a message; a context passes on messages of its level and below. */
typedef enum te_log_level {
    TE_LOG_ERROR = 1, /* no message has this level today: te_error holds errors */
    TE_LOG_WARN = 2,  /* a likely mistake, or something slower than it need be */
    TE_LOG_INFO = 3,  /* each first error, the device that was taken, kernels as they are compiled */
    TE_LOG_DEBUG = 4  /* errors after the first, kernels read from the cache */
} te_log_level;
/* Receives one message, without a line end, valid during the call. `user` is te_ctx_desc.log_user. */
typedef void (*te_log_fn)(void *user, te_log_level level, const char *message);

/* Replaces malloc and free, for host memory or for device memory: both functions or neither. They are called from the
 * context's own thread only. */
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
    void *cu_stream;                /* an existing CUstream (borrowed); NULL => a stream of its own */
    te_allocator host_allocator;    /* zero => malloc and free */
    te_allocator device_allocator;  /* zero => cuMemAlloc and cuMemFree (CUDA), the host allocator (CPU) */
    te_log_fn log;                  /* NULL => stderr */
    void *log_user;                 /* handed to `log`; borrowed */
    te_log_level log_level;         /* 0 => $TE_LOG (1 .. 4), else TE_LOG_WARN */
    int cpu_threads;                /* 0 => $TE_THREADS, else the processors of the machine (64 at most) */
    uint64_t seed;                  /* of the random state; 0 => 1234 */
    bool exact_f32;                 /* CUDA: f32 operands of products keep all their bits, at the speed of plain
                                     * arithmetic; false => they are rounded to TF32 */
    bool no_cubin_cache;            /* no folder of compiled kernels is read or written: each process compiles its
                                     * own */
} te_ctx_desc;

/* Makes a context. desc may be NULL. Returns NULL only if host memory for it could not be allocated. A device that was
 * named and cannot be opened gives a context whose te_ok is false and whose te_error says what was tried and what to
 * do; where no device was named, the context is of the CPU. Owned by the caller: te_ctx_destroy. */
TE_API te_ctx *te_ctx_create(const te_ctx_desc *desc);
/* Waits for the device and releases everything that was made in the context. Modules, groups, open files, tensors,
 * optimizers and quantizers that are still held go with it (classes' destroy functions and the release functions of
 * wrapped memory are called, and a warning counts them): they must be neither used nor released afterwards. Graphs
 * alone need te_graph_destroy in any case. In a child by fork it releases memory and leaves threads and the GPU alone.
 * Syncs. NULL is fine. */
TE_API void te_ctx_destroy(te_ctx *te);

/* True while no call has failed since te_ctx_create or te_clear_error. NULL => false. In a model's first step kernels
 * are compiled on other threads while the calls go on: te_ok waits for those, so that its answer holds for every call
 * before it; so do te_error, te_error_code and te_clear_error. */
TE_API bool te_ok(const te_ctx *te);
/* The text of the first error: the call, both values, the module's path, the remedy. "" if there is none. Borrowed,
 * valid until te_clear_error. */
TE_API const char *te_error(const te_ctx *te);
/* The code of the first error, or TE_OK. TE_ERR_STATE for NULL. */
TE_API te_result te_error_code(const te_ctx *te);
/* Forgets the error; the context goes on.
 *
 * After a failed call: it has made no tensor; its output tensors hold their old content, the new one, or a part of
 * each; the random state is what it was before the call. An optimizer has stepped all parameters or none (exception:
 * weights stored by custom quantizers or over a group, whose functions may fail after other weights were stored). The
 * tape of a failed te_backward is partly played, so a training step is repeated as a whole: te_clear_error,
 * te_optimizer_zero_grad, then forward, te_backward, te_optimizer_step.
 *
 * A repeated step gives the bits of one that never failed. If a te_forward, te_autocast_end, te_backward,
 * te_graph_launch or te_optimizer_step of the step failed, or memory ran out, te_clear_error restores the amaxes,
 * histories and scales of delayed scaling to their values at the step's begin. A step begins with an outermost
 * te_autocast_begin (or the launch of a graph without an optimizer) and ends with a te_optimizer_step that succeeds,
 * microbatches included, or with te_model_load; in a context without an optimizer it ends where the next one begins.
 * Random numbers drawn by a forward that succeeded stay drawn: te_rng_get before the step and te_rng_set after
 * te_clear_error repeat them. */
TE_API void te_clear_error(te_ctx *te);

/* "cpu" or "cuda:N" (borrowed). */
TE_API const char *te_ctx_device(const te_ctx *te);
/* Does the context run on a GPU? */
TE_API bool te_ctx_is_cuda(const te_ctx *te);
/* 80, 86, 89, 90, 100, 103, 120 ...; 0 on the CPU. */
TE_API int te_ctx_sm(const te_ctx *te);
/* The CUcontext in use (borrowed); NULL on the CPU. */
TE_API void *te_ctx_cu_context(const te_ctx *te);
/* The CUstream in use (borrowed); NULL on the CPU. */
TE_API void *te_ctx_cu_stream(const te_ctx *te);
/* Waits until everything queued so far has run. Syncs. TE_ERR_DEVICE if a kernel has failed since the last wait. */
TE_API te_result te_synchronize(te_ctx *te);

/* Memory of the context's device (on the CPU: host memory of tensors), in bytes. */
typedef struct te_memory_stats {
    size_t allocated;       /* bytes in live tensors */
    size_t peak_allocated;  /* highest `allocated` since the last te_memory_reset_peak */
    size_t reserved;        /* bytes taken from the device, live or cached */
    size_t peak_reserved;   /* highest `reserved` since the last te_memory_reset_peak */
    size_t device_free;     /* as the driver says; 0 on the CPU */
    size_t device_total;    /* 0 on the CPU */
    uint64_t allocs;        /* requests so far */
    uint64_t device_allocs; /* requests that the cache could not serve */
    size_t pinned;          /* bytes of pinned host memory, in use or cached */
    size_t offloaded;       /* bytes that te_cpu_offload_begin has copied there for a backward pass to come */
    uint64_t copied_out, copied_in; /* bytes so far, to pinned memory and back */
} te_memory_stats;

/* The figures so far; all 0 for NULL. */
TE_API te_memory_stats te_memory_get_stats(te_ctx *te);
/* Sets both peaks to the present values. */
TE_API void te_memory_reset_peak(te_ctx *te);
/* Gives cached blocks back to the device. Syncs. */
TE_API void te_memory_trim(te_ctx *te);

/* Opens a scope. Every tensor belongs to the innermost open scope and is released when it ends, unless it was retained;
 * tape nodes recorded inside go with it. Before the first te_scope_begin a tensor belongs to the context itself: a
 * program that calls te_backward a hundred times without a scope is warned, once. Scopes nest. */
TE_API void te_scope_begin(te_ctx *te);
/* Ends the innermost scope. TE_ERR_STATE (te_error_code) if none is open. */
TE_API void te_scope_end(te_ctx *te);

/* Sets the random state to (seed, 0). The state is that of Philox4x32-10: key = seed, one offset for each random
 * operation. The same (seed, offset) gives the same bits on the CPU and on every GPU. TE_ERR_STATE inside a graph's
 * capture. */
TE_API void te_seed(te_ctx *te, uint64_t seed);
/* Reads the random state; either pointer may be NULL. */
TE_API void te_rng_get(const te_ctx *te, uint64_t *seed, uint64_t *offset);
/* Sets the random state to what te_rng_get has read. TE_ERR_STATE inside a graph's capture. */
TE_API void te_rng_set(te_ctx *te, uint64_t seed, uint64_t offset);

/* Named random states beside the context's, for what must not draw the same numbers on all ranks (weights, dropout of
 * shared heads): the modules' option rng_tracker_name.
 * Functions that run again (te_checkpoint) and graphs see them as they see the context's; te_model_save does not write
 * them. TransformerEngine: CudaRNGStatesTracker.
 *
 * te_rng_tracker_add makes the state (seed, 0) under `name` (copied, at most 63 characters); they live as long as the
 * context. TE_ERR_INVALID for a name or a seed that another has, or one too many. */
#define TE_MAX_RNG_TRACKERS 16 /* the most named random states of a context */
TE_API te_result te_rng_tracker_add(te_ctx *te, const char *name, uint64_t seed);
/* From te_rng_fork_begin to te_rng_fork_end that state is the context's: te_rng_get, te_seed and all that draws use it,
 * and it goes on from there the next time. Nests. A graph's capture and its launches stand outside of such regions, or
 * hold whole ones. */
TE_API te_result te_rng_fork_begin(te_ctx *te, const char *name);
TE_API te_result te_rng_fork_end(te_ctx *te);
/* Reads a named state; either pointer may be NULL. */
TE_API te_result te_rng_tracker_get(te_ctx *te, const char *name, uint64_t *seed, uint64_t *offset);
/* Sets a named state to what te_rng_tracker_get has read. TE_ERR_STATE inside a graph's capture. */
TE_API te_result te_rng_tracker_set(te_ctx *te, const char *name, uint64_t seed, uint64_t offset);
TE_API int te_rng_num_trackers(const te_ctx *te);                     /* how many there are */
TE_API const char *te_rng_tracker_name(const te_ctx *te, int index); /* in the order of adding (borrowed); NULL
                                                                      * outside */
