/* api/report.h: what was found, what was done, what would be done. */

/* Between these, operations are planned and not run: every kernel that they need is noted. te_warmup_end compiles them (or loads
 * them from the cache) in parallel. Tensors made in between hold no meaningful values; parameters, optimizer states, scaling
 * states and the random state are left as they were. */
TE_API te_result te_warmup_begin(te_ctx *te);
TE_API te_result te_warmup_end(te_ctx *te);
/* Kernels for one training step of `m` on an input of this shape and format, forward and backward, under the autocast in force. */
TE_API te_result te_warmup(te_module *m, te_dtype dtype, int ndim, const int64_t *shape);

typedef struct te_explanation {
    bool supported;
    bool native;         /* false: emulated, exactly, through another format */
    bool deterministic;
    size_t workspace;    /* bytes */
    int launches;
    char kernels[256];   /* "gemm/gemm_mma.TN.bf16 ..." */
    char why[256];       /* one sentence */
} te_explanation;
/* What `op` with these args would do on `device`: "cpu", "sm_80" ... "sm_120", or NULL for te's own. Needs no GPU; launches nothing.
 * The tensors in args need no memory: te_tensor_describe makes such. */
TE_API te_result te_explain(te_ctx *te, te_op op, const void *args, const char *device, te_explanation *out);
TE_API bool te_op_supported(te_ctx *te, te_op op, const void *args);
/* A tensor with a shape and no memory, for te_explain. */
TE_API te_tensor *te_tensor_describe(te_ctx *te, te_dtype dtype, int ndim, const int64_t *shape);

/* Devices, libraries and where they were found, versions, cache, memory, kernels used so far, as text into buffer (truncated to
 * fit); returns the whole length. te may be NULL: then what the machine has. */
TE_API size_t te_report(te_ctx *te, char *buffer, size_t size);

typedef struct te_jit_stats {
    int loaded;      /* kernels in memory */
    int compiled;    /* by NVRTC in this process */
    int from_cache;  /* cubins read from disk */
    int from_ptx;    /* embedded PTX, compiled by the driver */
    int cache_damaged; /* entries that were found damaged and made anew */
    double compile_seconds; /* of the clock, while at least one kernel was being compiled */
    uint64_t launches;
} te_jit_stats;
TE_API te_jit_stats te_jit_get_stats(te_ctx *te);
