/* api/context.h: the context: one device with its stream, memory pool, pending error and random state.
 *
 * A context and everything made in it may be used by one thread at a time. A child process made by fork gets
 * TE_ERR_STATE. Contexts share only the loaded libraries and the table of compiled kernels, which a mutex protects. */

/* The importance of a message. A context logs the messages whose number is at most its log_level. */
typedef enum te_log_level {
    TE_LOG_ERROR = 1, /* unused: te_error returns errors instead */
    TE_LOG_WARN = 2,  /* a likely mistake, or something that is slower than necessary */
    TE_LOG_INFO = 3,  /* the first error after each te_clear_error, the chosen device, each kernel that is compiled */
    TE_LOG_DEBUG = 4  /* errors after the first, each kernel that is read from the cache */
} te_log_level;
/* Receives one message. `message` has no line end and is valid during the call. `user` is te_ctx_desc.log_user. */
typedef void (*te_log_fn)(void *user, te_log_level level, const char *message);

/* Two functions of the user that allocate and release host or device memory; give both or neither. They are called from
 * the context's own thread only. */
typedef struct te_allocator {
    void *(*alloc)(void *user, size_t bytes, size_t alignment); /* returns NULL if there is no memory; `alignment` is a
                                                                 * power of two, at most 4096 */
    void (*release)(void *user, void *pointer, size_t bytes);   /* `bytes` is the size that was asked for */
    void *user;                                                 /* handed to both; borrowed for the context's
                                                                 * lifetime */
} te_allocator;

/* The options of te_ctx_create. Strings are read during the call; borrowed pointers must outlive the context. */
typedef struct te_ctx_desc {
    const char *device;             /* "cpu", "cuda:0", "cuda:1" and so on; NULL => $TE_DEVICE, else GPU 0 if there is
                                     * one, else the CPU */
    void *cu_context;               /* an existing CUcontext (borrowed); NULL => the device's primary context */
    void *cu_stream;                /* an existing CUstream (borrowed); NULL => the context makes a stream */
    te_allocator host_allocator;    /* zero => malloc and free */
    te_allocator device_allocator;  /* zero => cuMemAlloc and cuMemFree (CUDA), the host allocator (CPU) */
    te_log_fn log;                  /* NULL => stderr */
    void *log_user;                 /* handed to `log`; borrowed */
    te_log_level log_level;         /* 0 => $TE_LOG (1 .. 4), else TE_LOG_WARN */
    int cpu_threads;                /* number of CPU threads; 0 => $TE_THREADS, else one per processor of the machine
                                     * (64 at most) */
    uint64_t seed;                  /* seed of the random state; 0 => 1234 */
    bool exact_f32;                 /* on CUDA, f32 operands of GEMMs keep all their bits, without tensor cores; false
                                     * => they are rounded to TF32 */
    bool no_cubin_cache;            /* the cache folder of compiled kernels is neither read nor written; each process
                                     * compiles its kernels itself */
} te_ctx_desc;

/* Makes a context. desc may be NULL. The caller owns the context and must call te_ctx_destroy. Returns NULL only if
 * host memory for the context could not be allocated.
 * If the device of desc or $TE_DEVICE cannot be opened, te_ok is false. te_error then says what was tried and what to
 * do.
 * If no device is named and no GPU can be used, the context runs on the CPU. */
TE_API te_ctx *te_ctx_create(const te_ctx_desc *desc);
/* Waits for the device and releases everything made in the context. Syncs. te may be NULL.
 * Modules, groups, open files, tensors, optimizers and quantizers that the caller still holds are released as well. The
 * caller must neither use nor release them afterwards. A warning says how many were released.
 * The call runs the destroy functions of module classes and the release functions of wrapped memory.
 * Graphs are not released: each needs its own te_graph_destroy.
 * In a child process made by fork, the call releases memory but leaves threads and the GPU alone. */
TE_API void te_ctx_destroy(te_ctx *te);

/* Returns true while no call has failed since te_ctx_create or te_clear_error; false for NULL. In a model's first step,
 * other threads may still compile kernels of calls that have returned. te_ok, te_error, te_error_code and
 * te_clear_error wait for these threads. */
TE_API bool te_ok(const te_ctx *te);
/* Returns the text of the first error (borrowed until te_clear_error); "" if there is none. The text names the call,
 * the wrong value, the needed value, the module's path and the remedy. */
TE_API const char *te_error(const te_ctx *te);
/* Returns the code of the first error, or TE_OK. TE_ERR_STATE for NULL. */
TE_API te_result te_error_code(const te_ctx *te);
/* Forgets the error, so that the context can be used again.
 *
 * A call that fails makes no tensor. An existing tensor that it writes has the old content, the new content, or a part
 * of each. The random state is what it was before the call. A te_optimizer_step that fails has stepped all parameters
 * or none. (Exception: custom quantizers and quantization over a group of ranks may fail on one weight after other
 * weights were stored.) A te_backward that fails has used up part of the tape. So repeat the training step as a whole:
 * te_clear_error, te_optimizer_zero_grad, then forward, te_backward, te_optimizer_step.
 *
 * Except for random numbers, the repeated step gives the same bits as if nothing had failed. For this, te_clear_error
 * restores the amaxes, histories and scales of delayed scaling to their values at the beginning of the step. It does so
 * if a te_forward, te_autocast_end, te_backward, te_graph_launch or te_optimizer_step failed, or memory ran out.
 * A step begins with an outermost te_autocast_begin (or the launch of a graph without an optimizer). It ends with the
 * next te_optimizer_step that succeeds, or with te_model_load. Without an optimizer it ends where the next step begins.
 * te_clear_error does not take back the random numbers that successful calls of the step have drawn. To draw the same
 * numbers again, call te_rng_get before the step and te_rng_set after te_clear_error. */
TE_API void te_clear_error(te_ctx *te);

/* Returns the name of the context's device: "cpu" or "cuda:N" (borrowed). */
TE_API const char *te_ctx_device(const te_ctx *te);
/* Returns whether the context runs on a GPU. */
TE_API bool te_ctx_is_cuda(const te_ctx *te);
/* Returns the GPU's architecture as a number, such as 90 for sm_90; 0 on the CPU. */
TE_API int te_ctx_sm(const te_ctx *te);
/* Returns the CUcontext in use (borrowed); NULL on the CPU. */
TE_API void *te_ctx_cu_context(const te_ctx *te);
/* Returns the CUstream in use (borrowed); NULL on the CPU. */
TE_API void *te_ctx_cu_stream(const te_ctx *te);
/* Waits until all work queued so far has run. Syncs. TE_ERR_DEVICE if a kernel has failed since the last wait. */
TE_API te_result te_synchronize(te_ctx *te);

/* Figures about the memory of the context's device (on the CPU: host memory of tensors). */
typedef struct te_memory_stats {
    size_t allocated;       /* bytes in live tensors */
    size_t peak_allocated;  /* highest `allocated` since the last te_memory_reset_peak */
    size_t reserved;        /* bytes taken from the device, live or cached */
    size_t peak_reserved;   /* highest `reserved` since the last te_memory_reset_peak */
    size_t device_free;     /* bytes that the driver reports as free; 0 on the CPU */
    size_t device_total;    /* bytes of the whole device; 0 on the CPU */
    uint64_t allocs;        /* number of allocations so far */
    uint64_t device_allocs; /* number of allocations that the cache of free blocks could not serve */
    size_t pinned;          /* bytes of pinned host memory, in use or cached */
    size_t offloaded;       /* bytes in pinned memory that te_cpu_offload_begin holds for a backward pass */
    uint64_t copied_out, copied_in; /* bytes that CPU offload has copied so far to pinned memory, and back */
} te_memory_stats;

/* Returns the present figures; all 0 for NULL. */
TE_API te_memory_stats te_memory_get_stats(te_ctx *te);
/* Sets both peaks to the present values. */
TE_API void te_memory_reset_peak(te_ctx *te);
/* Gives all cached blocks of device memory and pinned memory back to the driver or allocator. Syncs. */
TE_API void te_memory_trim(te_ctx *te);

/* Opens a scope. Every tensor belongs to the innermost open scope. The end of the scope releases each tensor that was
 * not retained, and the tape nodes recorded inside. Scopes may be nested.
 * A tensor made outside of all scopes lives as long as the context. (A hundred calls of te_backward without a scope
 * give one warning.) */
TE_API te_result te_scope_begin(te_ctx *te);
/* Ends the innermost scope. TE_ERR_STATE (te_error_code) if none is open. */
TE_API void te_scope_end(te_ctx *te);

/* Sets the random state to (seed, 0). Random numbers come from Philox4x32-10, whose key is the seed; each random
 * operation uses one offset. The same (seed, offset) gives the same bits on the CPU and on every GPU. TE_ERR_STATE
 * inside a graph's capture. */
TE_API void te_seed(te_ctx *te, uint64_t seed);
/* Reads the random state; either pointer may be NULL. */
TE_API void te_rng_get(const te_ctx *te, uint64_t *seed, uint64_t *offset);
/* Sets the random state to values that te_rng_get has read. TE_ERR_STATE inside a graph's capture. */
TE_API void te_rng_set(te_ctx *te, uint64_t seed, uint64_t offset);

/* Named random states. A named state replaces the context's random state where each rank must draw its own numbers:
 * for sharded weights, and for dropout in attention whose heads are split over ranks. The modules' option
 * rng_tracker_name selects a named state. te_checkpoint and graphs treat named states like the context's random state.
 * te_model_save does not write named states.
 * TransformerEngine: CudaRNGStatesTracker.
 *
 * te_rng_tracker_add makes the state (seed, 0), which lives as long as the context. Its name is copied and has at
 * most 63 characters. TE_ERR_INVALID if the name or the seed is taken, or if there already are TE_MAX_RNG_TRACKERS
 * states. */
#define TE_MAX_RNG_TRACKERS 16 /* maximum number of named random states in a context */
#define TE_DIST_RNG "te.dist"  /* the name of the state that te_dist_seed makes */
TE_API te_result te_rng_tracker_add(te_ctx *te, const char *name, uint64_t seed);
/* te_rng_fork_begin makes the named state the context's random state until te_rng_fork_end: te_rng_get, te_seed and all
 * random operations use it. The next region with this name continues where this one ended. Regions may be nested. A
 * graph's capture may contain whole regions, but must not begin or end inside one. te_graph_launch must be outside. */
TE_API te_result te_rng_fork_begin(te_ctx *te, const char *name);
TE_API te_result te_rng_fork_end(te_ctx *te);
/* Reads a named state; either pointer may be NULL. */
TE_API te_result te_rng_tracker_get(te_ctx *te, const char *name, uint64_t *seed, uint64_t *offset);
/* Sets a named state to values that te_rng_tracker_get has read. TE_ERR_STATE inside a graph's capture. */
TE_API te_result te_rng_tracker_set(te_ctx *te, const char *name, uint64_t seed, uint64_t offset);
TE_API int te_rng_num_trackers(const te_ctx *te);                     /* the number of named states */
TE_API const char *te_rng_tracker_name(const te_ctx *te, int index); /* the name of state number `index`, in the order
                                                                      * of te_rng_tracker_add (borrowed); NULL for an
                                                                      * index outside the list */
