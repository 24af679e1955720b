/* api/enums.h: the choices that host code and kernels both know. Plain enums, nothing else: kernels include this
 * file. */

/* Number formats. E4M3 is the "fn" variant (no infinity, NaN = S.1111.111, largest 448); E5M2 is the IEEE-like one
 * (largest 57344); E8M0 is a power of two 2^(e-127) with 0xFF = NaN; E2M1 packs two values a byte, the even element in
 * the low half, and a row of odd length ends with an unused high half. */
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
    TE_I16 = 11,       /* experts that a router has chosen (topk_indices): moved and read back, converted by the host
                        * alone */
    TE_DTYPE_COUNT = 12
} te_dtype;

/* The distribution of te_op_random. */
typedef enum te_random_kind {
    TE_RANDOM_UNIFORM = 0, /* on [a, b) */
    TE_RANDOM_NORMAL = 1   /* mean a, standard deviation b */
} te_random_kind;

/* Which chunks of a sequence: 2 n ranks' chunks of equal length make it up, and rank r of n has numbers r and 2 n - 1 -
 * r. */
typedef enum te_context_chunks {
    TE_CHUNKS_BOTH = 0,   /* the two of a rank */
    TE_CHUNKS_FIRST = 1,  /* the earlier one */
    TE_CHUNKS_SECOND = 2, /* the later one */
    TE_CHUNKS_UP_TO = 3   /* so many from the beginning, of whole sequences */
} te_context_chunks;

/* Which amax of its history delayed scaling takes (TransformerEngine: amax_compute_algo). */
typedef enum te_amax_algo {
    TE_AMAX_MAX = 0,        /* the largest ("max") */
    TE_AMAX_MOST_RECENT = 1 /* the last step's ("most_recent") */
} te_amax_algo;

/* The layout of a quantized matrix's scales; te_op_block_quantize, te_op_mxfp8_quantize and te_op_nvfp4_quantize
 * describe each. */
typedef enum te_scaling {
    TE_SCALING_TENSOR = 0,   /* one f32 */
    TE_SCALING_BLOCK_1D = 1, /* f32, one for each 128 elements along the contraction */
    TE_SCALING_BLOCK_2D = 2, /* f32, one for each 128 x 128 elements */
    TE_SCALING_MXFP8 = 3,    /* E8M0, one for each 32 elements along the contraction */
    TE_SCALING_NVFP4 = 4     /* E4M3, one for each 16 elements along the contraction, and an f32 amax of the tensor or
                              * of each row */
} te_scaling;

/* NVFP4's 4-over-6: each block is quantized twice, with 6 and with 4 as its largest code, and keeps the one with the
 * smaller error. */
typedef enum te_4over6_error {
    TE_4OVER6_OFF = 0, /* always 6 */
    TE_4OVER6_MAE = 1, /* error: sum of |x - decoded| */
    TE_4OVER6_MSE = 2  /* error: sum of (x - decoded)^2 */
} te_4over6_error;

/* The last step of a product: applied to the f32 accumulator in the product's own kernel. */
typedef enum te_epilogue {
    TE_EPILOGUE_NONE = 0,  /* D = acc + bias */
    TE_EPILOGUE_GELU = 1,  /* D = gelu(acc + bias); aux, if given, is written: acc + bias */
    TE_EPILOGUE_DGELU = 2  /* D = acc * gelu'(aux); aux is read */
} te_epilogue;

/* Activations, computed as TransformerEngine does (gated ones: Shazeer 2020). A gated activation takes [M, 2N], a the
 * first and b the second half of a row, and gives [M, N]. */
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
    TE_CLAMPED_SWIGLU = 12,    /* gpt-oss: c sigmoid(alpha c) (clamp(b, -limit, limit) + 1), c = min(a, limit); without
                                * the 1 on request */
    TE_ACTIVATION_COUNT = 13
} te_activation;

/* The order of dimensions of queries, keys and values. */
typedef enum te_qkv_format {
    TE_SBHD = 0, /* [s, b, H, d] */
    TE_BSHD = 1, /* [b, s, H, d] */
    TE_THD = 2   /* [sum of s, H, d], packed, with the starts of sequences in cu_seqlens */
} te_qkv_format;

/* Which keys j query i sees. */
typedef enum te_attn_mask {
    TE_MASK_DEFAULT = 0,             /* TE_MASK_CAUSAL, as in TransformerEngine's modules; in a forward call: the
                                      * module's own */
    TE_MASK_NONE = 1,                /* all */
    TE_MASK_CAUSAL = 2,              /* j <= i */
    TE_MASK_CAUSAL_BOTTOM_RIGHT = 3, /* j <= i + s_kv - s_q */
    TE_MASK_PADDING = 4,                     /* those within the lengths of i's sequence */
    TE_MASK_PADDING_CAUSAL = 5,              /* and j <= i */
    TE_MASK_PADDING_CAUSAL_BOTTOM_RIGHT = 6, /* and j <= i + length of keys - length of queries */
    TE_MASK_ARBITRARY = 7                    /* those that a tensor leaves */
} te_attn_mask;

/* The denominator of the softmax. */
typedef enum te_softmax_type {
    TE_SOFTMAX_VANILLA = 0,    /* the sum of exp of the scores */
    TE_SOFTMAX_OFF_BY_ONE = 1, /* plus 1 */
    TE_SOFTMAX_LEARNABLE = 2   /* plus exp of a parameter `softmax_offset`, one for each head */
} te_softmax_type;

/* How much a block of queries sees of a block of keys, TE_ATTN_BLOCK_SIZE of each: an element of
 * te_attn_rule.block_mask. */
typedef enum te_attn_block {
    TE_ATTN_BLOCK_EMPTY = 0,   /* nothing, whatever the masks say: neither read nor multiplied */
    TE_ATTN_BLOCK_PARTIAL = 1, /* what the masks say */
    TE_ATTN_BLOCK_FULL = 2     /* the same, and mask_mod hides nothing of it: it is not asked */
} te_attn_block;
#define TE_ATTN_BLOCK_SIZE 128

/* A term that is added to the scores. */
typedef enum te_attn_bias {
    TE_ATTN_BIAS_NONE = 0,       /* nothing */
    TE_ATTN_BIAS_PRE_SCALE = 1,  /* scale * (q k + B) */
    TE_ATTN_BIAS_POST_SCALE = 2, /* scale * q k + B */
    TE_ATTN_BIAS_ALIBI = 3       /* minus the distance times the head's slope */
} te_attn_bias;

/* How a router turns logits into scores. */
typedef enum te_score_function {
    TE_SCORE_SOFTMAX = 0,     /* over all experts, or over the chosen ones */
    TE_SCORE_SIGMOID = 1,     /* 1 / (1 + exp(-x)) */
    TE_SCORE_SQRTSOFTPLUS = 2 /* sqrt(log(1 + exp(x))) */
} te_score_function;
