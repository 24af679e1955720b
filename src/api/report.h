/* api/report.h: warm-up, explanations of calls, the report on machine and context. */

/* Begins a warm-up. Until te_warmup_end, operations do not run; their kernels are listed. New tensors hold no
 * meaningful values. Parameters and all states stay as they were. TE_ERR_STATE inside a warm-up or a graph's
 * capture. */
TE_API te_result te_warmup_begin(te_ctx *te);
/* Ends the warm-up: compiles the listed kernels in parallel, or loads them from the cache. Waits for all of them. */
TE_API te_result te_warmup_end(te_ctx *te);
/* Warms up one forward and backward pass of `m` on an input of this shape and format, under the autocast in force. */
TE_API te_result te_warmup(te_module *m, te_dtype dtype, int ndim, const int64_t *shape);

/* How an operation would run. Texts that are too long are cut off. */
typedef struct te_explanation {
    bool supported;      /* false: the call would fail, and `why` is its error */
    bool native;         /* false: the operation is emulated exactly in another format */
    bool deterministic;  /* the same bits in each run */
    size_t workspace;    /* bytes, from the context's pool */
    int launches;        /* kernel launches; 0 on the CPU */
    char kernels[512];   /* "gemm/gemm_mma.A_DT=3,B_DT=3 ..." */
    char why[256];       /* one sentence */
} te_explanation;
/* Describes in `out` how `op` with these args (a te_op_NAME_args) would run on `device`: "cpu", "sm_80" ... "sm_120",
 * or NULL for the context's own device. Needs no GPU. The tensors need no memory (te_tensor_describe). Returns the
 * error that `op` would return. */
TE_API te_result te_explain(te_ctx *te, te_op op, const void *args, const char *device, te_explanation *out);
/* Returns whether `op` with these args would run on the context's device. Adds no error to the context. */
TE_API bool te_query_supported(te_ctx *te, te_op op, const void *args);
/* Makes a tensor that has a shape and no memory, for te_explain. A module that is given this tensor computes only the
 * shape of its output. Any other call that would read or write the tensor gives TE_ERR_STATE. */
TE_API te_tensor *te_tensor_describe(te_ctx *te, te_dtype dtype, int ndim, const int64_t *shape);

/* Writes a text about devices, which of them reach each other's memory, libraries (NCCL once a group has opened it),
 * the cache, memory and kernels into buffer, cut off after `size` bytes. Returns the full length. te NULL => only
 * devices and libraries. */
TE_API size_t te_report(te_ctx *te, char *buffer, size_t size);

/* Counts of a context's kernels; 0 on the CPU. */
typedef struct te_jit_stats {
    int loaded;             /* kernels in memory */
    int compiled;           /* loaded kernels that NVRTC compiled */
    int from_cache;         /* loaded kernels whose cubins were read from disk */
    int from_ptx;           /* loaded kernels that the driver compiled from embedded PTX */
    int cache_damaged;      /* damaged cache entries that were replaced */
    double compile_seconds; /* seconds during which at least one kernel was being compiled */
    uint64_t launches;      /* kernels launched so far */
} te_jit_stats;
/* Returns the counts so far; waits for kernels that are being compiled. */
TE_API te_jit_stats te_jit_get_stats(te_ctx *te);
