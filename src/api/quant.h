/* api/quant.h: quantizers, recipes, autocast.
 *
 * A quantized tensor is one object with a row-wise copy (contiguous along the last dimension: what the forward product reads), a
 * column-wise copy (for the gradients), or both, their scales, and the quantizer that made it. Its nominal dtype is what dequantizing
 * gives. A recipe says which quantizer each operand of a module's products gets. Any shape works in every kind: short blocks at the
 * edges are blocks of fewer elements, and padding never enters an amax.
 *
 * Codes, scales and amaxes are the same bytes on every device, and those of TransformerEngine wherever it takes the input. The exceptions:
 *   - stochastic rounding draws te.h's random numbers (te_nvfp4_quantize), by the place of an element and not by the thread that rounds it;
 *   - NVFP4's transform: a NaN makes the scales of its blocks NaN in both copies, of any shape. TransformerEngine's kernel for M % 64 == 0 and
 *     N % 128 == 0 does so; its others leave the NaN out of the scale, and a gradient loses it. That kernel also scales by 0 a tensor
 *     whose amax is infinite, and its others by 1, as te.h always does; it decodes to infinities and NaN either way;
 *   - NVTE_USE_FAST_MATH and NVTE_NVFP4_4OVER6_ERR_USE_FAST_MATH, which loosen NVFP4 there, do nothing here.
 * Without the transform NVFP4 has no NaN: one becomes 6 times its block's scale, there and here. A decoded NaN is 0x7fffffff in f32, 0x7fff in
 * bf16 and f16. TransformerEngine refuses what these are of te.h's own: the transform of f32 and f16; row_scaled or four_over_six with the
 * transform, with stochastic rounding or, column-wise, with each other; short blocks. */

typedef enum te_quant_kind {
    TE_QUANT_NONE = 0,
    TE_QUANT_DELAYED = 1,  /* FP8, one scale given from outside (Float8Quantizer) */
    TE_QUANT_CURRENT = 2,  /* FP8, one scale from the tensor itself (Float8CurrentScalingQuantizer) */
    TE_QUANT_BLOCK = 3,    /* FP8, f32 scales by 1 x 128 or 128 x 128 (Float8BlockQuantizer) */
    TE_QUANT_MXFP8 = 4,    /* FP8, E8M0 scales by 32 (MXFP8Quantizer) */
    TE_QUANT_NVFP4 = 5,    /* FP4, E4M3 scales by 16 under an f32 amax (NVFP4Quantizer) */
    TE_QUANT_IDENTITY = 6, /* the tensor as it is (IdentityQuantizer) */
    TE_QUANT_HYBRID = 7,   /* one kind for the row-wise, another for the column-wise copy (HybridQuantizer) */
    TE_QUANT_CUSTOM = 8    /* one's own; te_is_custom is true of its tensors */
} te_quant_kind;

/* Which copies. */
enum { TE_ROWWISE = 1, TE_COLUMNWISE = 2 };

/* A quantizer of one's own. Products decode its copies and run in high precision. */
typedef struct te_custom_quantizer {
    const char *name; /* for messages; must outlive the quantizer */
    void *user;
    /* The `which` (TE_ROWWISE or TE_COLUMNWISE) copy of x [.., N] (contiguous, float): *data, and *scale if there is one: any tensors
     * of x's context, which the library retains. On failure an error code: the tensor is then not made, and none that existed changes. */
    te_result (*quantize)(void *user, te_tensor *x, int which, te_tensor **data, te_tensor **scale);
    /* Their value as a float tensor of `shape` and `dtype`. NULL on failure. */
    te_tensor *(*dequantize)(void *user, te_tensor *data, te_tensor *scale, int which, int ndim, const int64_t *shape, te_dtype dtype);
    bool (*is_quantizable)(void *user, const te_tensor *x); /* NULL => all are */
} te_custom_quantizer;

typedef struct te_quantizer_desc {
    te_quant_kind kind;
    te_dtype dtype;             /* of FP8 codes: TE_F8E4M3 (0 =>) or TE_F8E5M2 */
    int usage;                  /* TE_ROWWISE | TE_COLUMNWISE; 0 => both */
    bool optimize_for_gemm;     /* MXFP8, NVFP4: scales in the swizzled layout (te_mxfp8_quantize) */
    te_tensor *scale;           /* delayed: f32 [1], read at every cast (retained); NULL => one of its own, 1 */
    te_tensor *amax;            /* delayed: f32 [1], max-ed at every cast (retained); NULL => one of its own, 0 */
    bool power_of_two_scales;   /* current */
    float amax_epsilon;         /* current, block: amaxes below count as this */
    te_group *amax_group;       /* current, NVFP4: amaxes are reduced (MAX) over it (borrowed) */
    int block_scaling_dim;      /* block: 1 or 2; 0 => 2 */
    bool fp32_scales;           /* block: any f32 scale; false => powers of two */
    bool with_2d_quantization;  /* MXFP8: 32 x 32, NVFP4: 16 x 16 */
    bool with_rht;              /* NVFP4: random Hadamard transform of the column-wise copy */
    bool no_random_sign_mask;   /* NVFP4: the transform without its signs */
    bool stochastic_rounding;   /* NVFP4: with the context's random state, which advances by two */
    bool row_scaled;            /* NVFP4: the row-wise copy has an amax for each row of x, the column-wise one for each column, in place of one */
    te_4over6_error four_over_six; /* NVFP4: each copy chooses the scales of its blocks */
    bool e4m3_max_256;          /* NVFP4: block scales reach 256, not 448: room for 4-over-6 */
    const struct te_quantizer_desc *rowwise_quantizer, *columnwise_quantizer; /* hybrid: read during the call */
    const te_custom_quantizer *custom;                                        /* custom: copied */
} te_quantizer_desc;

/* Owned by the caller: te_quantizer_destroy (tensors that it made keep what they need of it). */
TE_API te_quantizer *te_quantizer_create(te_ctx *te, const te_quantizer_desc *desc);
TE_API void te_quantizer_destroy(te_quantizer *q);
/* Which copies the next tensors get. */
TE_API te_result te_quantizer_set_usage(te_quantizer *q, int usage);
TE_API int te_quantizer_get_usage(const te_quantizer *q);
/* A quantized tensor of x [.., N] (f32, f16, bf16), in the innermost scope. NaN stays NaN, infinity saturates. Allocates; no sync.
 * Differentiable as the identity. */
TE_API te_tensor *te_quantize(te_quantizer *q, te_tensor *x);
/* Quantizes x into the copies that dst (same shape, made by a quantizer of the same kind) has, in place. noop_flag: optional f32 [1] on
 * the device; 1.0 => nothing is written (built-in kinds). TransformerEngine: update_quantized. */
TE_API te_result te_quantize_into(te_quantizer *q, te_tensor *x, te_tensor *dst, const te_tensor *noop_flag);
/* Memory for the quantizer's copies of a tensor of this shape and nominal dtype; codes and scales are 0. */
TE_API te_tensor *te_quantizer_make_empty(te_quantizer *q, te_dtype dtype, int ndim, const int64_t *shape);
/* Delayed: amax = max |x|, without quantizing. Other kinds: nothing. */
TE_API te_result te_quantizer_calibrate(te_quantizer *q, te_tensor *x);
/* Can x be quantized? Built-in kinds: any float tensor of at least one dimension (TransformerEngine asks for multiples of 16, 32 or
 * 128; here edges may be short). Custom: what its function says. */
TE_API bool te_quantizer_is_quantizable(const te_quantizer *q, const te_tensor *x);
/* May a tensor be quantized twice with the same bytes? Not with delayed scaling (its scale moves) or stochastic rounding. */
TE_API bool te_quantizer_is_requantization_safe(const te_quantizer *q);

/* The value in `dtype` (TE_DTYPE_NONE => the nominal one), [same shape]: of the row-wise copy, or of the column-wise one if that is all
 * there is. Differentiable as the identity. */
TE_API te_tensor *te_dequantize(te_tensor *x, te_dtype dtype);
/* The copies that x is to have from here on. Dropping always works; a column-wise copy is made from a row-wise one where both hold the
 * same numbers (per-tensor FP8, 128 x 128 blocks, NVFP4 by 16 x 16; with 4-over-6 it then has the row-wise one's scales); else TE_ERR_STATE.
 * TransformerEngine: update_usage. */
TE_API te_result te_tensor_update_usage(te_tensor *x, int usage);

/* The raw bytes and the scales of one copy of x [.., N], seen as [M, N], as plain tensors (alias, in the innermost scope):
 *
 *   kind             data                                       scales
 *   delayed,current  row [M, ld], col [N, ldc] transposed       f32 [1]: scale_inv
 *   block            row [M, ld], col [N, ldc] transposed       f32, see te_block_quantize
 *   MXFP8            row [M, ld], col [M, ld] not transposed    e8m0, see te_mxfp8_quantize
 *   NVFP4            row [M, ld], col [N, ldc] transposed       e4m3, see te_nvfp4_quantize; the amax by te_quantized_amax
 *   identity         x itself                                   NULL
 *
 * ld is N (ldc: M; with the Hadamard transform round_up(M, 16)) rounded up to 16 elements, NVFP4: 32; the tail is 0. TransformerEngine
 * has no such padding: where sizes are multiples of these it lays out the same bytes. TE_ERR_STATE if that copy was not made. */
TE_API te_result te_quantized_view(const te_tensor *x, int which, te_tensor **data, te_tensor **scale);
/* NVFP4: the amax of one copy, f32 [1] or (row-scaled) [M], of the column-wise one [N]; else NULL. Alias. */
TE_API te_tensor *te_quantized_amax(const te_tensor *x, int which);
TE_API te_quant_kind te_quantized_kind(const te_tensor *x); /* TE_QUANT_NONE for a plain tensor */
TE_API int te_quantized_usage(const te_tensor *x);          /* the copies that are there */
/* Was x made by a quantizer of one's own? False for NULL and plain tensors. TransformerEngine: is_custom. */
TE_API bool te_is_custom(const te_tensor *x);

/* ---- recipes --------------------------------------------------------------------------------------------------- */

typedef enum te_recipe_kind {
    TE_RECIPE_NONE = 0,
    TE_RECIPE_DELAYED = 1, /* DelayedScaling */
    TE_RECIPE_CURRENT = 2, /* Float8CurrentScaling */
    TE_RECIPE_BLOCK = 3,   /* Float8BlockScaling */
    TE_RECIPE_MXFP8 = 4,   /* MXFP8BlockScaling */
    TE_RECIPE_NVFP4 = 5,   /* NVFP4BlockScaling */
    TE_RECIPE_CUSTOM = 6   /* CustomRecipe */
} te_recipe_kind;

typedef enum te_format {
    TE_FORMAT_DEFAULT = 0, /* the recipe's own: HYBRID for delayed and current, E4M3 for block and MXFP8 */
    TE_FORMAT_HYBRID = 1,  /* E4M3 forward, E5M2 gradients */
    TE_FORMAT_E4M3 = 2,    /* E4M3 everywhere */
    TE_FORMAT_E5M2 = 3     /* refused in training, as in TransformerEngine: E5M2 x E5M2 products do not exist */
} te_format;

/* What the backward products read in place of quantized operands. Not with delayed scaling. */
typedef enum te_backward_override {
    TE_BACKWARD_QUANTIZED = 0,
    TE_BACKWARD_HIGH_PRECISION = 1, /* the operands as they were before they were quantized */
    TE_BACKWARD_DEQUANTIZED = 2     /* the forward's quantized operands, decoded; gradients in high precision */
} te_backward_override;

typedef enum te_nvfp4_4over6 { TE_NVFP4_4OVER6_NONE = 0, TE_NVFP4_4OVER6_WEIGHTS = 1, TE_NVFP4_4OVER6_ACTIVATIONS = 2, TE_NVFP4_4OVER6_ALL = 3 } te_nvfp4_4over6;

/* The slots of a module's products. */
typedef enum te_tensor_type { TE_TENSOR_INPUT = 0, TE_TENSOR_WEIGHT = 1, TE_TENSOR_OUTPUT = 2, TE_TENSOR_GRAD_OUTPUT = 3, TE_TENSOR_GRAD_INPUT = 4 } te_tensor_type;
typedef struct te_quantizer_role {
    const char *module_type; /* "Linear", "LayerNormMLP" .. */
    const char *name;        /* path of the module (te_module_path); when its weights are stored in its create function (te_quantized_model_init): from
                              * the module on whose create function was called, "layer.self_attention.proj", for nothing stands above that one yet */
    int gemm;                /* 0; LayerNormMLP: 0 is fc1, 1 is fc2 */
    te_tensor_type tensor_type;
} te_quantizer_role;

/* As transformer_engine.common.recipe has them. Zero-initialised fields have the documented default; make one with the functions below. */
typedef struct te_recipe {
    te_recipe_kind kind;
    te_format format;
    te_backward_override backward_override;
    /* Partial sums of each product are promoted to full f32 regularly. 0 => TransformerEngine's default (forward no, gradients yes; block
     * scaling: always), 1 => yes, 2 => no. */
    int split_fprop, split_dgrad, split_wgrad;
    /* delayed */
    float margin;            /* scale = fp8_max / 2^margin / amax */
    int amax_history_len;    /* 0 => 1024 */
    te_amax_algo amax_algo;  /* largest of the history, or the most recent */
    /* Of one's own, on the host (the update then waits for the device): the amax of a history (row 0: the latest), and the scale. */
    float (*amax_fn)(void *user, const float *history, int length);
    float (*scale_fn)(void *user, float amax, float old_scale, float fp8_max);
    void *user;              /* of these two, or of `factory` */
    bool no_reduce_amax;     /* keep amaxes to oneself although autocast was given a group */
    bool fp8_dpa, fp8_mha;   /* FP8 attention: refused under block scaling (TransformerEngine's rule) and, for now, elsewhere */
    /* current, block */
    bool power_of_two_scales; /* current */
    float amax_epsilon;
    /* block */
    int x_block_scaling_dim, w_block_scaling_dim, grad_block_scaling_dim; /* 0 => 1, 2, 1; 2 and 2 do not meet in one product */
    bool fp32_scales;         /* false => powers of two */
    /* MXFP8 */
    bool enable_2d_quantization; /* weights by 32 x 32 */
    /* NVFP4 */
    bool disable_rht, disable_stochastic_rounding, disable_2d_quantization;
    bool row_scaled_activation; /* inputs: an amax for each row, and for each column in the column-wise copy */
    te_nvfp4_4over6 four_over_six;
    bool four_over_six_mse;      /* error by squares; false => by magnitudes */
    bool four_over_six_e4m3_256; /* block scales of those tensors reach 256 */
    /* custom: fills the zeroed desc for a slot; leaving kind 0 => that operand stays in high precision. TE_QUANT_DELAYED without a scale
     * gets the module's own scale and history (DelayedScalingRequest). Called once a slot, when a module first meets the recipe. */
    te_result (*factory)(void *user, const te_quantizer_role *role, te_quantizer_desc *desc);
} te_recipe;

TE_API te_recipe te_recipe_delayed_scaling(void);
TE_API te_recipe te_recipe_current_scaling(void);
TE_API te_recipe te_recipe_block_scaling(void);
TE_API te_recipe te_recipe_mxfp8(void);
TE_API te_recipe te_recipe_nvfp4(void);
TE_API te_recipe te_recipe_custom(te_result (*factory)(void *user, const te_quantizer_role *role, te_quantizer_desc *desc), void *user);
TE_API const char *te_recipe_name(te_recipe_kind kind);

typedef struct te_autocast_desc {
    const te_recipe *recipe; /* copied; NULL => delayed scaling */
    bool disabled;           /* inside, modules run in high precision */
    bool calibrating;        /* with disabled: products run in high precision, amaxes are recorded */
    te_group *amax_group;    /* amaxes of delayed, current and NVFP4 scaling are reduced over it (borrowed until the region's last backward) */
} te_autocast_desc;

/* Between these the GEMM modules quantize their operands. Nests; the outermost te_autocast_end runs the delayed-scaling
 * update of the forward slots (with gradients enabled), the end of the backward pass that of the backward slots. The outermost te_autocast_begin keeps
 * what delayed scaling has until here, in a launch for some thirty products: a step that fails is taken back (te_clear_error). */
TE_API te_result te_autocast_begin(te_ctx *te, const te_autocast_desc *desc);
TE_API te_result te_autocast_end(te_ctx *te);
TE_API bool te_autocast_enabled(const te_ctx *te);

/* ---- inspection ------------------------------------------------------------------------------------------------ */

/* What quantization did to one operand. */
typedef struct te_quant_stats {
    te_quant_kind kind;       /* of the copy that was measured */
    int which;                /* TE_ROWWISE; TE_COLUMNWISE if that is all there was */
    int64_t elements;
    float amax;               /* max |x|, NaN ignored */
    float scale;              /* x was multiplied by it: per tensor, NVFP4's global one; 0 for kinds with block scales alone */
    float underflow;          /* share of the elements that were not 0 and became 0 */
    float saturated;          /* share whose magnitude was beyond what their scale allows */
    int64_t nan_count, inf_count, zeros; /* in x */
    float cosine, snr_db;     /* between x and its dequantized value: x . y / |x||y|; 10 log10(sum x^2 / sum (x - y)^2) */
    float max_error;          /* max |x - y| */
} te_quant_stats;

/* on: from here every quantization of a module's operand (input, weight, gradient of the output) is measured, which decodes it
 * once more and reads it; what was measured before is forgotten. Values are the same as without. Weights that are stored quantized
 * have no high-precision value to compare with, and no slot. Off, it costs nothing. */
TE_API te_result te_quant_inspect(te_ctx *te, bool on);
/* The latest measurement of every slot, modules in the order of their making; waits for the device. Return false to stop. */
typedef bool (*te_quant_stats_fn)(void *user, const te_quantizer_role *role, const te_quant_stats *stats);
TE_API te_result te_quant_stats_visit(te_ctx *te, te_quant_stats_fn visit, void *user);

/* ---- FP8 primary weights --------------------------------------------------------------------------------------- */

typedef struct te_quantized_model_init_desc {
    const te_recipe *recipe; /* copied; NULL => delayed scaling */
    bool disabled;
    bool preserve_high_precision_init_val; /* keep the weights' first values in host memory (te_quantized_init_value) */
} te_quantized_model_init_desc;

/* Weights of the products of modules made between these are stored quantized (both copies; no high-precision one), as the recipe
 * quantizes weights; biases, norms and embeddings are not. Such modules run under autocast with the same recipe; outside of it their
 * weights are decoded. te_fused_adam keeps f32 masters and quantizes after each step. Nests. Delayed scaling starts from scale 1. */
TE_API te_result te_quantized_model_init_begin(te_ctx *te, const te_quantized_model_init_desc *desc);
TE_API te_result te_quantized_model_init_end(te_ctx *te);
/* The value from before a weight was first quantized, in its nominal dtype [its shape]; TE_ERR_STATE if it was not preserved, or cleared.
 * reset_parameters, and a file that has the weight in high precision, put theirs in its place. An optimizer starts its master from it, unless
 * somebody has written the weight since. TransformerEngine: get_high_precision_init_val, clear_high_precision_init_val. */
TE_API te_result te_quantized_init_value(const te_tensor *x, void *host);
TE_API void te_quantized_clear_init_value(te_tensor *x);

/* Makes new_raw (u8, or the dtype of x's row-wise data; at least its bytes; contiguous) the memory of x's row-wise copy, with its present
 * codes: how a framework keeps all parameters in one buffer. Per tensor, block, NVFP4, identity, and the row-wise part of hybrid; MXFP8 has
 * two copies that no other rank could rebuild from one: TE_ERR_UNSUPPORTED. Kernels are fastest where it begins at a multiple of 16 bytes.
 * TransformerEngine: replace_raw_data. */
TE_API te_result te_replace_raw_data(te_tensor *x, te_tensor *new_raw);

typedef struct te_master_weights {
    te_tensor *const *model_weights;  /* [count] quantized, with their quantizer (te_quantize, quantized_model_init); whole on every rank */
    te_tensor *const *master_weights; /* [count] f32 [n], this rank's slice of the flattened weight; NULL, or n 0: it owns nothing */
    const int64_t *start_offsets;     /* [count] of the slice's first element */
    int count;
    te_group *group;                  /* reduces amaxes (borrowed); NULL: this rank has all */
    /* Optional [count]: the slice's codes go here, flat, and not into the weight (scales go to the weight all the same). MXFP8:
     * row-wise codes here, column-wise ones into the next list. e2m1: u8 bytes from that of the first element on. */
    te_tensor *const *shard_weights, *const *shard_columnwise;
    bool manual_post_processing; /* column-wise copies stay, stale, until te_post_all_gather_processing; false: they are dropped, and remade at need */
} te_master_weights;

/* Quantizes each rank's slices of f32 master weights (rounded to the weight's nominal dtype first) into the model's weights: together
 * the slices give the bytes that quantizing the whole gives. Every rank calls it with the same weights in the same order; the caller
 * gathers the bytes. The amaxes of all weights are reduced in one all_reduce, and everything is checked before the first byte changes: a
 * rank of a thread group that refuses makes the call fail on all. Preserved first values are cleared. Block and NVFP4 need 2-D scaling.
 * TransformerEngine: quantize_master_weights, cast_master_weights_to_fp8 (its older name). */
TE_API te_result te_quantize_master_weights(te_ctx *te, const te_master_weights *w);
TE_API te_result te_cast_master_weights_to_fp8(te_ctx *te, const te_master_weights *w);
/* After the bytes of row-wise copies were gathered: makes the column-wise copies that follow from them. MXFP8 and hybrid weights
 * (whose slices were cast into both copies) and plain tensors: nothing. */
TE_API te_result te_post_all_gather_processing(te_ctx *te, te_tensor *const *model_weights, int count);
