/* api/report.h: warm-up, explanations of calls, the report on machine and context. */

/* Begins a warm-up: up to te_warmup_end operations are planned and not run, and the kernels that they need are listed.
 * Tensors made inside hold no meaningful values; parameters, optimizer states, scaling states and the random state are
 * left as they were. A program need not warm up: a model's first step compiles in parallel by itself. TE_ERR_STATE
 * inside a warm-up or a graph's capture. */
TE_API te_result te_warmup_begin(te_ctx *te);
/* Ends the warm-up: compiles the listed kernels in parallel, or loads them from the cache, and returns when all are
 * there. */
TE_API te_result te_warmup_end(te_ctx *te);
/* Runs te_warmup_begin and te_warmup_end around one forward and backward pass of `m` on an input of this shape and
 * format, under the autocast in force. */
TE_API te_result te_warmup(te_module *m, te_dtype dtype, int ndim, const int64_t *shape);

/* How an operation would run; texts are cut to fit. */
typedef struct te_explanation {
    bool supported;      /* false: the call would fail, and `why` is its error */
    bool native;         /* false: emulated, exactly, through another format */
    bool deterministic;  /* the same bits in each run */
    size_t workspace;    /* bytes, from the context's pool */
    int launches;        /* kernel launches; 0 on the CPU */
    char kernels[512];   /* "gemm/gemm_mma.A_DT=3,B_DT=3 ..." */
    char why[256];       /* one sentence */
} te_explanation;
/* Fills `out` with how `op` with these args (its te_op_..._args) would run on `device`: "cpu", "sm_80" ... "sm_120", or
 * NULL for the context's own device. Needs no GPU; launches nothing. The tensors in args need no memory
 * (te_tensor_describe). Returns the error that the call would give. */
TE_API te_result te_explain(te_ctx *te, te_op op, const void *args, const char *device, te_explanation *out);
/* Would `op` with these args run on the context's device? Adds no error to the context. */
TE_API bool te_query_supported(te_ctx *te, te_op op, const void *args);
/* Makes a tensor with a shape and no memory: for te_explain, and for modules that answer it with a shape
 * (te_is_tensor_unallocated). Any other call that would read or write it gives TE_ERR_STATE. */
TE_API te_tensor *te_tensor_describe(te_ctx *te, te_dtype dtype, int ndim, const int64_t *shape);

/* Writes devices, libraries and their paths, versions, cache, memory and kernels used so far as text into buffer
 * (truncated to fit). Returns the length of the whole text. te NULL: the machine's devices and libraries alone. */
TE_API size_t te_report(te_ctx *te, char *buffer, size_t size);

/* Counts of a context's kernels; 0 on the CPU. */
typedef struct te_jit_stats {
    int loaded;             /* kernels in memory */
    int compiled;           /* loaded kernels that NVRTC compiled */
    int from_cache;         /* loaded kernels whose cubins were read from disk */
    int from_ptx;           /* loaded kernels that the driver compiled from embedded PTX */
    int cache_damaged;      /* damaged entries of the cache that were replaced */
    double compile_seconds; /* seconds during which at least one kernel was being compiled */
    uint64_t launches;      /* kernels launched so far */
} te_jit_stats;
/* Returns the counts so far; waits for kernels that are being compiled. */
TE_API te_jit_stats te_jit_get_stats(te_ctx *te);
