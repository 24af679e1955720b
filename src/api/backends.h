/* api/backends.h: the implementations (backends) of the parts of a model, named as in NeMo Automodel. "external" marks
 * kernels of another project: creating a module with such a backend fails. */

/* Attention (api/attention_backends.h). */
typedef enum te_attn_backend {
    TE_ATTN_DEFAULT = 0,  /* te on CUDA, else sdpa */
    TE_ATTN_TE = 1,       /* DotProductAttention */
    TE_ATTN_SDPA = 2,     /* te_attention over [b, H, s, d] */
    TE_ATTN_FLEX = 3,     /* te_attention with block masks, which are cached between calls; takes attention sinks */
    TE_ATTN_EAGER = 4,    /* a GEMM, a softmax and a GEMM, with the scores in memory */
    TE_ATTN_TILELANG = 5, /* external */
    TE_ATTN_CUDNN = 6,    /* external */
    TE_ATTN_MAGI = 7      /* external */
} te_attn_backend;
/* Linear layers. */
typedef enum te_linear_backend {
    TE_LINEAR_DEFAULT = 0, /* te on CUDA, else torch */
    TE_LINEAR_TORCH = 1,   /* a GEMM in high precision under every recipe */
    TE_LINEAR_TE = 2,      /* the module Linear, which follows the recipe */
    TE_LINEAR_QUACK = 3    /* external */
} te_linear_backend;
/* Norms. */
typedef enum te_rms_norm_backend {
    TE_RMS_NORM_DEFAULT = 0,    /* torch_fp32 */
    TE_RMS_NORM_TORCH = 1,      /* rounds the normalised row to the input's format before multiplying by the weight */
    TE_RMS_NORM_TORCH_FP32 = 2, /* Float32RMSNorm: computes in f32, rounds once at the end */
    TE_RMS_NORM_TE = 3,         /* the module RMSNorm */
    TE_RMS_NORM_QUACK = 4       /* external */
} te_rms_norm_backend;
/* Rotary embeddings. */
typedef enum te_rope_backend {
    TE_ROPE_TORCH = 0, /* te.h's own (te_rotary_embedding) */
    TE_ROPE_QUACK = 1 /* external */
} te_rope_backend;
/* The GEMMs of experts. */
typedef enum te_experts_backend {
    TE_EXPERTS_DEFAULT = 0,        /* torch_mm on CUDA, else torch */
    TE_EXPERTS_TORCH = 1,          /* one GEMM for each expert; group sizes on the host */
    TE_EXPERTS_TORCH_MM = 2,       /* grouped GEMM; group sizes on the device */
    TE_EXPERTS_TORCH_MM_MXFP8 = 3, /* grouped GEMM of MXFP8 values; group sizes on the device */
    TE_EXPERTS_GMM = 4,            /* grouped GEMM if the dispatcher is an all-to-all, otherwise as TE_EXPERTS_TORCH */
    TE_EXPERTS_TE = 5              /* GroupedLinear */
} te_experts_backend;
/* The dispatcher: how tokens are sent to the ranks of their experts. */
typedef enum te_dispatcher_backend {
    TE_DISPATCHER_DEFAULT = 0,  /* deepep on CUDA, else torch */
    TE_DISPATCHER_TORCH = 1,    /* all-gather of all tokens, then all-reduce of the results */
    TE_DISPATCHER_DEEPEP = 2,   /* all-to-all */
    TE_DISPATCHER_UCCL_EP = 3,  /* all-to-all */
    TE_DISPATCHER_HYBRIDEP = 4, /* all-to-all */
    TE_DISPATCHER_MOK = 5       /* external */
} te_dispatcher_backend;
