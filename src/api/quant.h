/* api/quant.h: quantizers, recipes, autocast.
 *
 * A quantized tensor is one object with a row-wise copy (K-contiguous for the forward product), a column-wise copy (the
 * transpose, for the gradients), or both, their scales, and the format that made it. Its nominal dtype is what
 * dequantizing gives. A recipe says which quantizer each operand of a module's products gets. */

typedef enum te_recipe_kind {
    TE_RECIPE_NONE = 0,
    TE_RECIPE_DELAYED = 1, /* per tensor, scale from the amax history of earlier steps */
    TE_RECIPE_CURRENT = 2  /* per tensor, scale from the tensor itself */
} te_recipe_kind;

typedef enum te_format {
    TE_FORMAT_DEFAULT = 0, /* the recipe's own: HYBRID */
    TE_FORMAT_HYBRID = 1,  /* E4M3 forward, E5M2 gradients */
    TE_FORMAT_E4M3 = 2     /* E4M3 everywhere */
} te_format;

/* As transformer_engine.common.recipe has them. Zero-initialised fields have the documented default; make one with the functions below. */
typedef struct te_recipe {
    te_recipe_kind kind;
    te_format format;
    float margin;               /* delayed: scale = fp8_max / 2^margin / amax */
    int amax_history_len;       /* delayed; 0 => 1024 */
    te_amax_algo amax_algo;     /* delayed */
    bool power_of_two_scales;   /* current */
    float amax_epsilon;         /* current */
    /* Partial sums of each product are promoted to full f32 regularly. TransformerEngine's default is forward no, gradients
     * yes; TE_SPLIT_DEFAULT keeps that. */
    int split_fprop, split_dgrad, split_wgrad; /* 0 => default, 1 => yes, 2 => no */
} te_recipe;

TE_API te_recipe te_recipe_delayed_scaling(void);
TE_API te_recipe te_recipe_current_scaling(void);

typedef struct te_autocast_desc {
    const te_recipe *recipe; /* copied; NULL => delayed scaling */
    bool disabled;           /* inside, modules run in high precision */
    bool calibrating;        /* with disabled: products run in high precision, amaxes are recorded */
} te_autocast_desc;

/* Between these the GEMM modules quantize their operands. Nests; the outermost te_autocast_end runs the delayed-scaling
 * update of the forward slots (with gradients enabled), the end of the backward pass that of the backward slots. */
TE_API te_result te_autocast_begin(te_ctx *te, const te_autocast_desc *desc);
TE_API te_result te_autocast_end(te_ctx *te);
TE_API bool te_autocast_enabled(const te_ctx *te);

typedef enum te_quant_kind { TE_QUANT_NONE = 0, TE_QUANT_DELAYED = 1, TE_QUANT_CURRENT = 2 } te_quant_kind;

/* Which copies. */
enum { TE_ROWWISE = 1, TE_COLUMNWISE = 2 };

typedef struct te_quantizer_desc {
    te_quant_kind kind;
    te_dtype dtype;           /* TE_F8E4M3 (0 =>) or TE_F8E5M2 */
    int usage;                /* TE_ROWWISE | TE_COLUMNWISE; 0 => both */
    te_tensor *scale;         /* delayed: f32 [1], read at every cast (retained); NULL => one of its own, 1 */
    te_tensor *amax;          /* delayed: f32 [1], max-ed at every cast (retained); NULL => one of its own, 0 */
    bool power_of_two_scales; /* current */
    float amax_epsilon;       /* current */
} te_quantizer_desc;

/* Owned by the caller: te_quantizer_destroy. */
TE_API te_quantizer *te_quantizer_create(te_ctx *te, const te_quantizer_desc *desc);
TE_API void te_quantizer_destroy(te_quantizer *q);
TE_API te_result te_quantizer_set_usage(te_quantizer *q, int usage);
/* A quantized tensor of x [.., N] (float). Allocates. NaN stays NaN, infinity saturates (TransformerEngine: Float8Quantizer). */
TE_API te_tensor *te_quantize(te_quantizer *q, te_tensor *x);
/* The value in `dtype` (TE_DTYPE_NONE => the nominal one), [same shape]. Differentiable as the identity. */
TE_API te_tensor *te_dequantize(te_tensor *x, te_dtype dtype);

typedef struct te_quantized_bytes {
    void *data;         /* on the context's device (borrowed) */
    int64_t rows, cols; /* of this copy: [M, N] row-wise, [N, M] column-wise */
    int64_t ld;         /* elements from one row to the next: cols rounded up to 16, the tail is 0 */
    float *scale_inv;   /* f32 [1] on the device (borrowed) */
    te_dtype dtype;
} te_quantized_bytes;
/* The raw bytes of one copy. `which` is TE_ROWWISE or TE_COLUMNWISE; TE_ERR_STATE if that copy was not made. */
TE_API te_result te_quantized_view(const te_tensor *x, int which, te_quantized_bytes *out);
