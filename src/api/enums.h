/* api/enums.h: the enums that both host code and kernels use. Kernels include this file, so it contains plain enums
 * alone. */

/* The number format of a tensor's elements.
 *   E4M3  the "fn" variant: no infinity, NaN = S.1111.111, largest 448
 *   E5M2  the IEEE-like variant: largest 57344
 *   E8M0  a power of two, 2^(e - 127); 0xFF = NaN
 *   E2M1  two values per byte, the element with the even index in the low half; in a row of odd length the last high
 *         half is unused */
typedef enum te_dtype {
    TE_DTYPE_NONE = 0, /* "not given": the documented default of the field applies */
    TE_F32 = 1,        /* IEEE single */
    TE_F16 = 2,        /* IEEE half */
    TE_BF16 = 3,       /* bfloat16: the upper half of an f32 */
    TE_F8E4M3 = 4,     /* 1 byte: codes */
    TE_F8E5M2 = 5,     /* 1 byte: codes, of gradients mostly */
    TE_F8E8M0 = 6,     /* 1 byte: scales of MXFP8 */
    TE_F4E2M1 = 7,     /* half a byte: codes of NVFP4 */
    TE_U8 = 8,         /* raw bytes */
    TE_I32 = 9,        /* ids, offsets */
    TE_I64 = 10,       /* ids, offsets, counts */
    TE_I16 = 11,       /* for a router's topk_indices; kernels only copy i16 elements, and host code converts them */
    TE_DTYPE_COUNT = 12
} te_dtype;

/* The distribution of te_op_random. */
typedef enum te_random_kind {
    TE_RANDOM_UNIFORM = 0, /* on [a, b) */
    TE_RANDOM_NORMAL = 1   /* mean a, standard deviation b */
} te_random_kind;

/* Selects chunks under context parallelism. A sequence that n ranks share is cut into 2 n equal chunks; rank r
 * has chunks r and 2 n - 1 - r. */
typedef enum te_context_chunks {
    TE_CHUNKS_BOTH = 0,   /* both chunks of the rank */
    TE_CHUNKS_FIRST = 1,  /* the rank's chunk r */
    TE_CHUNKS_SECOND = 2, /* the rank's chunk 2 n - 1 - r */
    TE_CHUNKS_UP_TO = 3   /* the first chunks of the whole sequence; an argument of the operation says how many */
} te_context_chunks;

/* Selects the amax that delayed scaling takes from the amax history (TransformerEngine: amax_compute_algo). */
typedef enum te_amax_algo {
    TE_AMAX_MAX = 0,        /* the largest amax of the history ("max") */
    TE_AMAX_MOST_RECENT = 1 /* the amax of the last step ("most_recent") */
} te_amax_algo;

/* The kind of scales that a quantized matrix has. te_op_block_quantize, te_op_mxfp8_quantize and te_op_nvfp4_quantize
 * describe their layouts. */
typedef enum te_scaling {
    TE_SCALING_TENSOR = 0,   /* one f32 */
    TE_SCALING_BLOCK_1D = 1, /* f32, one for each 128 elements along the dimension that a GEMM sums over */
    TE_SCALING_BLOCK_2D = 2, /* f32, one for each 128 x 128 elements */
    TE_SCALING_MXFP8 = 3,    /* E8M0, one for each 32 elements along the dimension that a GEMM sums over */
    TE_SCALING_NVFP4 = 4     /* E4M3, one for each 16 elements along the dimension that a GEMM sums over, and an f32
                              * amax of the whole tensor or of each row */
} te_scaling;

/* The error measure of NVFP4's option 4-over-6. Each block is quantized twice: its amax becomes code value 6, then 4.
 * The smaller error wins. */
typedef enum te_4over6_error {
    TE_4OVER6_OFF = 0, /* option off: the amax becomes the code of value 6 */
    TE_4OVER6_MAE = 1, /* error: sum of |x - decoded| */
    TE_4OVER6_MSE = 2  /* error: sum of (x - decoded)^2 */
} te_4over6_error;

/* The last step of a GEMM, applied to its f32 accumulator (acc) inside the same kernel. */
typedef enum te_epilogue {
    TE_EPILOGUE_NONE = 0,  /* D = acc + bias */
    TE_EPILOGUE_GELU = 1,  /* D = gelu(acc + bias); the tensor aux, if given, becomes acc + bias */
    TE_EPILOGUE_DGELU = 2  /* D = acc * gelu'(aux); aux is read */
} te_epilogue;

/* Activations, computed as TransformerEngine does (gated ones: Shazeer 2020). A gated activation takes [M, 2N] and
 * gives [M, N]: a is the first half of a row and b the second half. */
typedef enum te_activation {
    TE_ACTIVATION_DEFAULT = 0, /* GELU in modules; te_activate and te_op_act_fwd refuse it */
    TE_GELU = 1,               /* x Phi(x), the tanh approximation */
    TE_RELU = 2,               /* max(x, 0) */
    TE_SILU = 3,               /* x sigmoid(x) */
    TE_QGELU = 4,              /* x sigmoid(1.702 x) */
    TE_SRELU = 5,              /* max(x, 0)^2 */
    TE_GEGLU = 6,              /* gelu(a) b */
    TE_REGLU = 7,              /* relu(a) b */
    TE_SWIGLU = 8,             /* silu(a) b */
    TE_QGEGLU = 9,             /* qgelu(a) b */
    TE_SREGLU = 10,            /* srelu(a) b */
    TE_GLU = 11,               /* sigmoid(a) b */
    TE_CLAMPED_SWIGLU = 12,    /* of gpt-oss: c sigmoid(alpha c) (clamp(b, -limit, limit) + 1) with c = min(a, limit).
                                * With no_glu_linear_offset, + 1 is left out */
    TE_ACTIVATION_COUNT = 13
} te_activation;

/* The order of dimensions of queries, keys and values. */
typedef enum te_qkv_format {
    TE_SBHD = 0, /* [s, b, H, d] */
    TE_BSHD = 1, /* [b, s, H, d] */
    TE_THD = 2   /* [sum of s, H, d]: packed sequences, whose starts are in cu_seqlens */
} te_qkv_format;

/* The keys j that query i sees. */
typedef enum te_attn_mask {
    TE_MASK_DEFAULT = 0,             /* in a module's options it means TE_MASK_CAUSAL, as in TransformerEngine; in a
                                      * forward call it means the module's own mask */
    TE_MASK_NONE = 1,                /* all */
    TE_MASK_CAUSAL = 2,              /* j <= i */
    TE_MASK_CAUSAL_BOTTOM_RIGHT = 3, /* j <= i + s_kv - s_q */
    TE_MASK_PADDING = 4,                     /* keys of i's sequence that are not padding; none if query i is padding */
    TE_MASK_PADDING_CAUSAL = 5,              /* TE_MASK_PADDING, and j <= i */
    TE_MASK_PADDING_CAUSAL_BOTTOM_RIGHT = 6, /* TE_MASK_PADDING, and j <= i + (number of keys - number of queries) of
                                              * the sequence */
    TE_MASK_ARBITRARY = 7                    /* the keys that attention_mask does not mask */
} te_attn_mask;

/* The denominator of the softmax. */
typedef enum te_softmax_type {
    TE_SOFTMAX_VANILLA = 0,    /* the sum of exp of the scores */
    TE_SOFTMAX_OFF_BY_ONE = 1, /* 1 plus the sum of exp of the scores */
    TE_SOFTMAX_LEARNABLE = 2   /* exp(softmax_offset) plus the sum of exp of the scores; softmax_offset is trained, one
                                * per head */
} te_softmax_type;

/* An element of te_attn_rule.block_mask. It stands for one block of the score matrix, with TE_ATTN_BLOCK_SIZE queries
 * and as many keys. It says which of these keys the queries see. */
typedef enum te_attn_block {
    TE_ATTN_BLOCK_EMPTY = 0,   /* no keys, whatever other masks allow; attention skips the block */
    TE_ATTN_BLOCK_PARTIAL = 1, /* the keys that all other masks allow */
    TE_ATTN_BLOCK_FULL = 2     /* as TE_ATTN_BLOCK_PARTIAL, but mask_mod is not called */
} te_attn_block;
#define TE_ATTN_BLOCK_SIZE 128

/* The bias that is added to the scores of attention. */
typedef enum te_attn_bias {
    TE_ATTN_BIAS_NONE = 0,       /* nothing */
    TE_ATTN_BIAS_PRE_SCALE = 1,  /* scale * (q k + B) */
    TE_ATTN_BIAS_POST_SCALE = 2, /* scale * q k + B */
    TE_ATTN_BIAS_ALIBI = 3       /* minus the head's slope times the distance between query and key */
} te_attn_bias;

/* How a router turns logits into scores. */
typedef enum te_score_function {
    TE_SCORE_SOFTMAX = 0,     /* softmax over all experts, or over the chosen experts alone */
    TE_SCORE_SIGMOID = 1,     /* 1 / (1 + exp(-x)) */
    TE_SCORE_SQRTSOFTPLUS = 2 /* sqrt(log(1 + exp(x))) */
} te_score_function;
