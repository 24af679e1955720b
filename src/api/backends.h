/* api/backends.h: the implementations that parts of a model choose among, by the names of NeMo Automodel.
 * "external" marks kernels of other projects, which te.h does not have: modules of these backends are refused. */

/* Attention (api/attention_backends.h). */
typedef enum te_attn_backend {
    TE_ATTN_DEFAULT = 0,  /* te on CUDA, else sdpa */
    TE_ATTN_TE = 1,       /* DotProductAttention */
    TE_ATTN_SDPA = 2,     /* te_attention over [b, H, s, d] */
    TE_ATTN_FLEX = 3,     /* masks of blocks, kept from call to call; sinks */
    TE_ATTN_EAGER = 4,    /* two products and a softmax */
    TE_ATTN_TILELANG = 5, /* external */
    TE_ATTN_CUDNN = 6,    /* external */
    TE_ATTN_MAGI = 7      /* external */
} te_attn_backend;
/* Linear layers. */
typedef enum te_linear_backend {
    TE_LINEAR_DEFAULT = 0, /* te on CUDA, else torch */
    TE_LINEAR_TORCH = 1,   /* a product in high precision, whatever recipe is in force */
    TE_LINEAR_TE = 2,      /* Linear */
    TE_LINEAR_QUACK = 3    /* external */
} te_linear_backend;
/* Norms. */
typedef enum te_rms_norm_backend {
    TE_RMS_NORM_DEFAULT = 0,    /* torch_fp32 */
    TE_RMS_NORM_TORCH = 1,      /* the normalised row is rounded to the input's format before the weight multiplies
                                 * it */
    TE_RMS_NORM_TORCH_FP32 = 2, /* Float32RMSNorm: all in f32, rounded once at the end */
    TE_RMS_NORM_TE = 3,         /* RMSNorm */
    TE_RMS_NORM_QUACK = 4       /* external */
} te_rms_norm_backend;
/* Rotary embeddings. */
typedef enum te_rope_backend {
    TE_ROPE_TORCH = 0, /* te.h's own (te_rotary_embedding) */
    TE_ROPE_QUACK = 1 /* external */
} te_rope_backend;
/* The products of experts. */
typedef enum te_experts_backend {
    TE_EXPERTS_DEFAULT = 0,        /* torch_mm on CUDA, else torch */
    TE_EXPERTS_TORCH = 1,          /* a loop over the experts */
    TE_EXPERTS_TORCH_MM = 2,       /* grouped products, sizes on the device */
    TE_EXPERTS_TORCH_MM_MXFP8 = 3, /* grouped products in MXFP8, sizes on the device */
    TE_EXPERTS_GMM = 4,            /* grouped products, sizes on the host */
    TE_EXPERTS_TE = 5              /* GroupedLinear */
} te_experts_backend;
/* How tokens travel between ranks. */
typedef enum te_dispatcher_backend {
    TE_DISPATCHER_DEFAULT = 0,  /* deepep on CUDA, else torch */
    TE_DISPATCHER_TORCH = 1,    /* all tokens to all ranks, and a sum of all results */
    TE_DISPATCHER_DEEPEP = 2,   /* all-to-all */
    TE_DISPATCHER_UCCL_EP = 3,  /* all-to-all */
    TE_DISPATCHER_HYBRIDEP = 4, /* all-to-all */
    TE_DISPATCHER_MOK = 5       /* external */
} te_dispatcher_backend;
