/* api/enums.h: the choices that host code and kernels both know. Plain enums, nothing else: kernels include this file. */

/* Number formats. E4M3 is the "fn" variant (no infinity, NaN = S.1111.111, largest 448); E5M2 is the IEEE-like one
 * (largest 57344); E8M0 is a power of two 2^(e-127) with 0xFF = NaN; E2M1 packs two values a byte, the even element in
 * the low half, and a row of odd length ends with an unused high half. */
typedef enum te_dtype {
    TE_DTYPE_NONE = 0, /* "not given": the documented default of the field applies */
    TE_F32 = 1,
    TE_F16 = 2,
    TE_BF16 = 3,
    TE_F8E4M3 = 4,
    TE_F8E5M2 = 5,
    TE_F8E8M0 = 6,
    TE_F4E2M1 = 7,
    TE_U8 = 8,
    TE_I32 = 9,
    TE_I64 = 10,
    TE_DTYPE_COUNT = 11
} te_dtype;

typedef enum te_random_kind { TE_RANDOM_UNIFORM = 0, TE_RANDOM_NORMAL = 1 } te_random_kind;

typedef enum te_amax_algo { TE_AMAX_MAX = 0, TE_AMAX_MOST_RECENT = 1 } te_amax_algo;

/* How the scales of a quantized matrix lie; the layouts stand with te_op_block_quantize, te_op_mxfp8_quantize and te_nvfp4_quantize. */
typedef enum te_scaling {
    TE_SCALING_TENSOR = 0,   /* one f32 */
    TE_SCALING_BLOCK_1D = 1, /* f32, one for 128 neighbours along the contraction */
    TE_SCALING_BLOCK_2D = 2, /* f32, one for 128 x 128 */
    TE_SCALING_MXFP8 = 3,    /* E8M0, one for 32 neighbours */
    TE_SCALING_NVFP4 = 4     /* E4M3, one for 16 neighbours, and f32 amaxes above them */
} te_scaling;

/* NVFP4: which blocks are tried with 4 as their largest code besides 6, and by what error the better is chosen. */
typedef enum te_4over6_error { TE_4OVER6_OFF = 0, TE_4OVER6_MAE = 1, TE_4OVER6_MSE = 2 } te_4over6_error;

typedef enum te_epilogue {
    TE_EPILOGUE_NONE = 0,
    TE_EPILOGUE_GELU = 1,  /* D = gelu(acc + bias); aux, if given, gets acc + bias */
    TE_EPILOGUE_DGELU = 2  /* D = acc * gelu'(aux) */
} te_epilogue;

/* As TransformerEngine computes them (GLU variants: Shazeer 2020). The gated ones take [M, 2N], the first half through the
 * nonlinearity: y = f(a) * b. */
typedef enum te_activation {
    TE_ACTIVATION_DEFAULT = 0, /* GELU in modules, no activation in te_op_act_fwd's sense: refused there */
    TE_GELU = 1,               /* the tanh form */
    TE_RELU = 2,
    TE_SILU = 3,
    TE_QGELU = 4,
    TE_SRELU = 5,
    TE_GEGLU = 6,
    TE_REGLU = 7,
    TE_SWIGLU = 8,
    TE_QGEGLU = 9,
    TE_SREGLU = 10,
    TE_GLU = 11,
    TE_CLAMPED_SWIGLU = 12 /* gpt-oss: limit, alpha */
} te_activation;

typedef enum te_qkv_format { TE_SBHD = 0, TE_BSHD = 1 } te_qkv_format;

typedef enum te_attn_mask {
    TE_MASK_DEFAULT = 0,            /* causal in modules (TransformerEngine's default) and here */
    TE_MASK_NONE = 1,
    TE_MASK_CAUSAL = 2,             /* j <= i */
    TE_MASK_CAUSAL_BOTTOM_RIGHT = 3 /* j <= i + s_kv - s_q */
} te_attn_mask;
