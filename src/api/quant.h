/* api/quant.h: quantizers, recipes, autocast.
 *
 * A quantized tensor has a row-wise copy (contiguous along the last dimension), a column-wise copy, or both. Each copy
 * has codes, which are the quantized elements, and scales. The forward GEMM reads row-wise copies, the GEMMs of the
 * gradients column-wise ones too. Dequantizing gives the nominal dtype. A recipe chooses the quantizers of a module.
 * The last block of a row or column may be short. Padding never enters an amax.
 *
 * Codes, scales and amaxes are the same bytes on every device. They are TransformerEngine's bytes, with these
 * exceptions:
 *   - Stochastic rounding uses te.h's random numbers (te_op_nvfp4_quantize), which depend on the index of an element.
 *   - NVFP4's Hadamard transform of a NaN: in te.h the scales of the NaN's blocks become NaN in both copies. In
 *     TransformerEngine this is so only if M % 64 == 0 and N % 128 == 0. Its kernels for other shapes lose the NaN.
 *   - NVFP4's Hadamard transform with an infinite amax: te.h scales the tensor by 1. TransformerEngine scales it by 0
 *     if M % 64 == 0 and N % 128 == 0, else by 1. In all cases the tensor decodes to infinities and NaN.
 *   - te_quantize_master_weights with 128 x 128 blocks and fp32_scales, where fp8_max / amax is infinite in f32 (E4M3:
 *     an amax below 1.3166e-36): te.h takes the largest number of the weight's nominal dtype as the scale.
 *     TransformerEngine takes this number for a whole weight, but FLT_MAX for a rank's slice (compute_scale.cu).
 *   - e4m3_max_256 without four_over_six: the largest block scale is 256 in te.h, and 448 in TransformerEngine's
 *     NVFP4Quantizer.
 *   - te.h does not read NVTE_USE_FAST_MATH and NVTE_NVFP4_4OVER6_ERR_USE_FAST_MATH.
 * NVFP4 without the Hadamard transform does not encode NaN. A NaN becomes 6 times the scale of its block, as in
 * TransformerEngine. An element that decodes to NaN becomes 0x7fffffff in f32, and 0x7fff in bf16 and f16.
 *
 * te.h also accepts inputs that TransformerEngine refuses:
 *   - the Hadamard transform of an f32 or f16 input;
 *   - row_scaled or four_over_six, together with the Hadamard transform or with stochastic rounding;
 *   - row_scaled with four_over_six in a column-wise copy;
 *   - short blocks. */

/* The kinds of quantizers, with TransformerEngine's class in parentheses. */
typedef enum te_quant_kind {
    TE_QUANT_NONE = 0,     /* a plain tensor */
    TE_QUANT_DELAYED = 1,  /* FP8, one scale given from outside (Float8Quantizer) */
    TE_QUANT_CURRENT = 2,  /* FP8, one scale from the tensor's own amax (Float8CurrentScalingQuantizer) */
    TE_QUANT_BLOCK = 3,    /* FP8, one f32 scale for 1 x 128 or 128 x 128 elements (Float8BlockQuantizer) */
    TE_QUANT_MXFP8 = 4,    /* FP8, one E8M0 scale for 32 elements (MXFP8Quantizer) */
    TE_QUANT_NVFP4 = 5,    /* FP4, one E4M3 scale for 16 elements, and an f32 amax of the tensor (NVFP4Quantizer) */
    TE_QUANT_IDENTITY = 6, /* the tensor as it is (IdentityQuantizer) */
    TE_QUANT_HYBRID = 7,   /* one kind for the row-wise, another for the column-wise copy (HybridQuantizer) */
    TE_QUANT_CUSTOM = 8    /* the program's functions (te_custom_quantizer) */
} te_quant_kind;

/* The copies of a quantized tensor. A usage is TE_ROWWISE, TE_COLUMNWISE or TE_ROWWISE | TE_COLUMNWISE. */
enum { TE_ROWWISE = 1, TE_COLUMNWISE = 2 };

/* A quantizer that the program defines. GEMMs decode its tensors, and multiply in high precision. */
typedef struct te_custom_quantizer {
    const char *name; /* for messages; must outlive the quantizer */
    void *user;       /* handed to every function; must outlive the quantizer and its tensors */
    /* Quantizes x [.., N] (contiguous, float) into the copy `which` (TE_ROWWISE or TE_COLUMNWISE). Sets *data to a
     * tensor of x's context, and *scale to another one or NULL; both are retained. After an error code no quantized
     * tensor is made or changed. */
    te_result (*quantize)(void *user, te_tensor *x, int which, te_tensor **data, te_tensor **scale);
    /* Decodes a copy into a new float tensor of `shape` and `dtype`. Returns NULL on failure. */
    te_tensor *(*dequantize)(void *user, te_tensor *data, te_tensor *scale, int which, int ndim, const int64_t *shape,
                             te_dtype dtype);
    bool (*is_quantizable)(void *user, const te_tensor *x); /* returns whether x can be quantized; NULL => true for
                                                             * every float tensor */
} te_custom_quantizer;

/* Options of a delayed quantizer. */
typedef struct te_delayed_quantizer {
    te_tensor *scale; /* f32 [1], the scale of every cast (retained); NULL => a new tensor that holds 1 */
    te_tensor *amax;  /* f32 [1], which every cast sets to max(amax, max |x|) (retained); NULL => a new tensor that
                       * holds 0 */
} te_delayed_quantizer;
/* Options of a current quantizer. */
typedef struct te_current_quantizer {
    bool power_of_two_scales; /* scales are rounded down to powers of two */
} te_current_quantizer;
/* Options of a block quantizer. */
typedef struct te_block_quantizer {
    int block_scaling_dim; /* 1 (1 x 128) or 2 (128 x 128); 0 => 2 */
    bool fp32_scales;      /* scales may be any f32 number; false => powers of two */
} te_block_quantizer;
/* Options of an NVFP4 quantizer. */
typedef struct te_nvfp4_quantizer {
    te_switch rht;                 /* random Hadamard transform of the column-wise copy; 0 => off */
    bool no_random_sign_mask;      /* with rht: the transform without random signs */
    te_switch stochastic_rounding; /* codes are rounded with random numbers of the context. Each quantization adds 2
                                    * to the context's random offset. 0 => off */
    bool row_scaled;               /* the row-wise copy has one amax for each row of x, the column-wise copy one for
                                    * each column; false => one for the tensor */
    te_4over6_error four_over_six; /* the error by which a copy chooses the scales of its blocks (4-over-6); 0 =>
                                    * 4-over-6 is off */
    bool e4m3_max_256;             /* the largest block scale is 256, which 4-over-6 can raise to 384; false => 448 */
} te_nvfp4_quantizer;
/* Options of a hybrid quantizer: the quantizers of its two copies, neither of them hybrid. te_quantizer_create reads
 * both. */
typedef struct te_hybrid_quantizer {
    const struct te_quantizer_desc *rowwise_quantizer, *columnwise_quantizer; /* both needed */
} te_hybrid_quantizer;

/* Options of te_quantizer_create. Comments name the kinds that read a field. A field that `kind` does not read must be
 * zero. */
typedef struct te_quantizer_desc {
    te_quant_kind kind;        /* needed */
    te_dtype dtype;            /* format of FP8 codes: TE_F8E4M3 or TE_F8E5M2; 0 => TE_F8E4M3 */
    int usage;                 /* TE_ROWWISE | TE_COLUMNWISE; 0 => both */
    float amax_epsilon;        /* current, block: lower bound of the amax from which a scale is computed */
    te_group *amax_group;      /* current, NVFP4: the group over which amaxes are reduced by MAX (borrowed); NULL =>
                                * none */
    bool optimize_for_gemm;    /* MXFP8, NVFP4: scales in the swizzled layout (te_op_mxfp8_quantize) */
    te_switch quantization_2d; /* MXFP8: one scale for 32 x 32 elements; NVFP4: one scale for 16 x 16 elements; 0 =>
                                * off */
    te_delayed_quantizer delayed;      /* delayed: its own options */
    te_current_quantizer current;      /* current: its own options */
    te_block_quantizer block;          /* block: its own options */
    te_nvfp4_quantizer nvfp4;          /* NVFP4: its own options */
    te_hybrid_quantizer hybrid;        /* hybrid: its own options */
    const te_custom_quantizer *custom; /* custom: the user's functions (copied) */
} te_quantizer_desc;

/* Makes a quantizer, which the caller owns (te_quantizer_destroy). Errors: TE_ERR_INVALID for options that exclude each
 * other, TE_ERR_STATE inside a graph's capture. */
TE_API te_quantizer *te_quantizer_create(te_ctx *te, const te_quantizer_desc *desc);
/* Gives up the program's ownership of the quantizer, which lives on while its tensors exist. NULL is fine. */
TE_API void te_quantizer_destroy(te_quantizer *q);
/* Sets which copies q makes from now on: TE_ROWWISE, TE_COLUMNWISE or TE_ROWWISE | TE_COLUMNWISE. */
TE_API te_result te_quantizer_set_usage(te_quantizer *q, int usage);
/* Returns which copies q makes of tensors; 0 for NULL. */
TE_API int te_quantizer_get_usage(const te_quantizer *q);
/* Quantizes x [.., N] (f32, f16, bf16). In FP8 a NaN stays NaN, and infinity saturates. Allocates. Asynchronous on
 * CUDA. Differentiable as the identity. */
TE_API te_tensor *te_quantize(te_quantizer *q, te_tensor *x);
/* Quantizes x into the copies that dst has, in place. dst has the shape of x, and the kind, code format and layout of
 * q. noop_flag (optional f32 [1], FP8 and FP4): 1.0 => nothing is written. TransformerEngine: update_quantized. */
TE_API te_result te_quantize_into(te_quantizer *q, te_tensor *x, te_tensor *dst, const te_tensor *noop_flag);
/* Makes a quantized tensor of this shape and nominal dtype in the innermost scope. Codes and scales are 0. Refuses
 * custom quantizers. Allocates. */
TE_API te_tensor *te_quantizer_make_empty(te_quantizer *q, te_dtype dtype, int ndim, const int64_t *shape);
/* Sets the amax of a delayed quantizer to max(amax, max |x|). Does nothing for other kinds. TransformerEngine:
 * calibrate. */
TE_API te_result te_quantizer_calibrate(te_quantizer *q, te_tensor *x);
/* Returns whether x can be quantized: any float tensor of at least one dimension (TransformerEngine: multiples of 16,
 * 32 or 128). A custom quantizer's is_quantizable decides for itself. */
TE_API bool te_quantizer_is_quantizable(const te_quantizer *q, const te_tensor *x);
/* Returns whether quantizing a tensor twice gives the same bytes. False for delayed scaling (the scale changes),
 * stochastic rounding and custom quantizers. */
TE_API bool te_quantizer_is_requantization_safe(const te_quantizer *q);

/* Decodes x (the row-wise copy, if there is one) into a new plain tensor in `dtype` (f32, f16, bf16; TE_DTYPE_NONE =>
 * the nominal dtype). Allocates. Differentiable as the identity. */
TE_API te_tensor *te_dequantize(te_tensor *x, te_dtype dtype);
/* Sets which copies x has: TE_ROWWISE, TE_COLUMNWISE or TE_ROWWISE | TE_COLUMNWISE. Drops a copy that is not in
 * `usage`. Makes a missing column-wise copy from the row-wise copy in per-tensor FP8, FP8 with 128 x 128 blocks, NVFP4
 * with 16 x 16 blocks (without rht, row_scaled and optimize_for_gemm) and identity. Any other missing copy gives
 * TE_ERR_STATE. TransformerEngine: update_usage. */
TE_API te_result te_tensor_update_usage(te_tensor *x, int usage);

/* Sets *data and *scale to the codes and the scales of the copy `which` of x [.., N], viewed as [M, N]. Both are plain
 * tensors of the innermost scope that share x's memory:
 *
 *   kind             data                                       scales
 *   delayed,current  row [M, ld], col [N, ldc] transposed       f32 [1]: scale_inv
 *   block            row [M, ld], col [N, ldc] transposed       f32, see te_op_block_quantize
 *   MXFP8            row [M, ld], col [M, ld] not transposed    e8m0, see te_op_mxfp8_quantize
 *   NVFP4            row [M, ld], col [N, ldc] transposed       e4m3, see te_op_nvfp4_quantize;
 *                                                               te_quantized_amax returns the amax
 *   identity         x itself                                   NULL
 *
 * ld is N rounded up to a multiple of 16 elements (NVFP4: 32). ldc is M rounded up in the same way. The padding is 0.
 * Exception: with the Hadamard transform, the columns of col from M up to the next multiple of 16 have codes.
 * TransformerEngine has no such padding. TE_ERR_STATE if x does not have that copy. */
TE_API te_result te_quantized_view(const te_tensor *x, int which, te_tensor **data, te_tensor **scale);
/* Returns a view of the amax of the copy `which` of an NVFP4 tensor: f32 [1]; with row_scaled, f32 [M] for the row-wise
 * copy and f32 [N] for the column-wise copy. NULL for other kinds. */
TE_API te_tensor *te_quantized_amax(const te_tensor *x, int which);
/* Returns the kind of x's quantizer; TE_QUANT_NONE for a plain tensor. */
TE_API te_quant_kind te_quantized_kind(const te_tensor *x);
/* Returns the copies that x has, TE_ROWWISE and TE_COLUMNWISE or-ed together; 0 for a plain tensor. */
TE_API int te_quantized_usage(const te_tensor *x);
/* Returns whether a custom quantizer made x. TransformerEngine: is_custom. */
TE_API bool te_is_custom(const te_tensor *x);

/* ---- recipes --------------------------------------------------------------------------------------------------- */

/* The kinds of recipes, with TransformerEngine's class. */
typedef enum te_recipe_kind {
    TE_RECIPE_NONE = 0,    /* no recipe: refused */
    TE_RECIPE_DELAYED = 1, /* DelayedScaling */
    TE_RECIPE_CURRENT = 2, /* Float8CurrentScaling */
    TE_RECIPE_BLOCK = 3,   /* Float8BlockScaling */
    TE_RECIPE_MXFP8 = 4,   /* MXFP8BlockScaling */
    TE_RECIPE_NVFP4 = 5,   /* NVFP4BlockScaling */
    TE_RECIPE_CUSTOM = 6,  /* CustomRecipe */
    TE_RECIPE_KIND_COUNT = 7
} te_recipe_kind;

/* The FP8 formats of a recipe (TransformerEngine: Format). */
typedef enum te_format {
    TE_FORMAT_DEFAULT = 0, /* the recipe's own: E4M3 for block and MXFP8, HYBRID for delayed, current and custom */
    TE_FORMAT_HYBRID = 1,  /* E4M3 forward, E5M2 gradients */
    TE_FORMAT_E4M3 = 2,    /* E4M3 everywhere */
    TE_FORMAT_E5M2 = 3     /* refused, as in TransformerEngine's training: hardware cannot multiply E5M2 by E5M2 */
} te_format;

/* The operands of the GEMMs of the backward pass. Delayed scaling allows TE_BACKWARD_QUANTIZED alone. */
typedef enum te_backward_override {
    TE_BACKWARD_QUANTIZED = 0,      /* quantized, as the recipe says */
    TE_BACKWARD_HIGH_PRECISION = 1, /* the operands as they were before they were quantized */
    TE_BACKWARD_DEQUANTIZED = 2     /* the forward's quantized operands, decoded; gradients are in high precision */
} te_backward_override;

/* The operands that the NVFP4 recipe quantizes with 4-over-6. */
typedef enum te_nvfp4_4over6 {
    TE_NVFP4_4OVER6_NONE = 0,        /* none */
    TE_NVFP4_4OVER6_WEIGHTS = 1,     /* weights */
    TE_NVFP4_4OVER6_ACTIVATIONS = 2, /* inputs */
    TE_NVFP4_4OVER6_ALL = 3          /* both */
} te_nvfp4_4over6;

/* The operands whose largest block scale is 256 instead of 448, among those that NVFP4 quantizes with 4-over-6. */
typedef enum te_nvfp4_e4m3_256 {
    TE_NVFP4_E4M3_256_DEFAULT = 0,     /* all */
    TE_NVFP4_E4M3_256_ALL = 1,         /* all */
    TE_NVFP4_E4M3_256_WEIGHTS = 2,     /* weights */
    TE_NVFP4_E4M3_256_ACTIVATIONS = 3, /* inputs */
    TE_NVFP4_E4M3_256_NONE = 4         /* none */
} te_nvfp4_e4m3_256;

/* The tensors of a GEMM y = x W^T, and of its gradients, for which a quantizer can be chosen. */
typedef enum te_tensor_type {
    TE_TENSOR_INPUT = 0,       /* x */
    TE_TENSOR_WEIGHT = 1,      /* W */
    TE_TENSOR_OUTPUT = 2,      /* y, with fp8_output */
    TE_TENSOR_GRAD_OUTPUT = 3, /* the gradient of y */
    TE_TENSOR_GRAD_INPUT = 4   /* the gradient of x, with fp8_grad */
} te_tensor_type;
/* One quantized tensor of a module's GEMM. */
typedef struct te_quantizer_role {
    const char *module_type; /* "Linear", "LayerNormMLP" .. */
    const char *name;        /* path of the module (te_module_path). While a create function quantizes weights
                              * (te_quantized_model_init_begin), the path begins at the created module:
                              * "layer.self_attention.proj" */
    int gemm;                /* number of the GEMM: 0 in most modules. LayerNormMLP: 0 is fc1, 1 is fc2.
                              * DotProductAttention: see te_recipe.fp8_dpa */
    te_tensor_type tensor_type; /* which tensor of the GEMM */
} te_quantizer_role;

/* Options of delayed scaling. In a custom recipe they hold for tensors with TE_QUANT_DELAYED and no scale. */
typedef struct te_delayed_recipe {
    float margin;           /* scale = fp8_max / 2^margin / amax */
    int amax_history_len;   /* number of steps in the amax history; 0 => 1024 */
    te_amax_algo amax_algo; /* 0 => the largest amax of the history */
    /* Functions on the host. With one of them, each update of the scales waits for the device. history[0] is the amax
     * of the latest step. amax_fn NULL => amax_algo; scale_fn NULL => the formula of `margin`. */
    float (*amax_fn)(void *user, const float *history, int length);
    float (*scale_fn)(void *user, float amax, float old_scale, float fp8_max);
    void *user;             /* handed to amax_fn and scale_fn; borrowed while the recipe is in use */
    bool no_reduce_amax;    /* each rank keeps its own amaxes, even if te_autocast_desc.amax_group is set */
} te_delayed_recipe;
/* Options of current scaling. */
typedef struct te_current_recipe {
    bool power_of_two_scales; /* scales are rounded down to powers of two */
} te_current_recipe;
/* Options of block scaling. */
typedef struct te_block_recipe {
    /* Shape of the blocks: 1 is 1 x 128, 2 is 128 x 128. 0 => 2 for weights, 1 for inputs and gradients. At most one of
     * the three may be 2. */
    int x_block_scaling_dim, w_block_scaling_dim, grad_block_scaling_dim;
    bool fp32_scales;                                                     /* scales may be any f32 number; false =>
                                                                           * powers of two */
} te_block_recipe;
/* Options of MXFP8. */
typedef struct te_mxfp8_recipe {
    te_switch quantization_2d; /* TE_ON: weights have one scale for 32 x 32 elements; TE_OFF: one for 32 elements; 0 =>
                                * off */
} te_mxfp8_recipe;
/* Options of NVFP4. */
typedef struct te_nvfp4_recipe {
    te_switch rht;                 /* Hadamard transform of inputs and gradients; 0 => on */
    te_switch stochastic_rounding; /* TE_ON: gradients are rounded stochastically; TE_OFF: to nearest even; 0 => on */
    te_switch quantization_2d;     /* TE_ON: weights have one scale for 16 x 16 elements; TE_OFF: one for 1 x 16; 0 =>
                                    * on */
    bool row_scaled_activation;    /* inputs are row-scaled (te_nvfp4_quantizer.row_scaled); refused in a GroupedLinear
                                    * called with m_splits_tensor */
    te_nvfp4_4over6 four_over_six; /* which operands are quantized with 4-over-6; 0 => none */
    bool four_over_six_mse;        /* 4-over-6 compares squared errors; false => absolute errors */
    te_nvfp4_e4m3_256 four_over_six_e4m3_256; /* the operands of four_over_six whose largest block scale is 256; 0 =>
                                               * all of them */
} te_nvfp4_recipe;
/* Options of a custom recipe. */
typedef struct te_custom_recipe {
    /* Fills in `desc`, zero on entry, for the tensor `role`; called once for each. kind 0 => high precision.
     * TE_QUANT_DELAYED without a scale gets the module's own scale and history (DelayedScalingRequest). */
    te_result (*factory)(void *user, const te_quantizer_role *role, te_quantizer_desc *desc);
    void *user; /* handed to factory; borrowed while the recipe is in use */
} te_custom_recipe;

/* A recipe. The functions below make a recipe of each kind; its fields may then be changed. A field that `kind` does
 * not read must be zero, else the recipe is refused. TransformerEngine reads some defaults from environment variables
 * (NVTE_BACKWARD_OVERRIDE, NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES, NVTE_FP8_BLOCK_SCALING_FP32_SCALES, NVTE_NVFP4_..).
 * te.h reads none of them. Source: transformer_engine.common.recipe. */
typedef struct te_recipe {
    te_recipe_kind kind;                    /* needed */
    te_format format;                       /* format of the codes; 0 => the default of the kind (te_format). NVFP4 has
                                             * only one format. In a custom recipe, the format of its tensors under
                                             * delayed scaling */
    te_backward_override backward_override; /* 0 => quantized operands */
    /* On: the partial sums of a GEMM are added into full f32 at regular intervals. The GEMMs are those of the forward
     * (split_fprop), of the input's gradient (split_dgrad) and of the weight's gradient (split_wgrad). 0 => split_fprop
     * off, split_dgrad and split_wgrad on. With block scaling all three are always on. */
    te_switch split_fprop, split_dgrad, split_wgrad;
    float amax_epsilon;    /* current, block: lower bound of the amax from which a scale is computed */
    /* FP8 attention (delayed, current, MXFP8, custom). With fp8_dpa, DotProductAttention rounds q, k, v, the softmax,
     * the output o and all their gradients to FP8. The forward pass of delayed and current scaling multiplies the FP8
     * codes. On Hopper it uses FP8 tensor cores, in heads of up to 128 channels, unless there is dropout, a bias, a
     * soft cap, an offset of the softmax, max_logit, a user's rule, or a mask of elements or blocks (te_explain says
     * which). All other GEMMs run in high precision on the rounded values. The forward pass rounds each row of the
     * softmax by a scale of its own, see te_attn_fp8. The backward pass rounds the softmax by its delayed scale.
     * fp8_mha includes fp8_dpa: MultiheadAttention then gives the FP8 output of the core to its projection without
     * decoding it, except under MXFP8.
     *
     * A custom recipe's factory is called for the tensors of the core. GEMMs are numbered as in TransformerEngine. q, k
     * and v are the output of GEMM 0, o is the input of GEMM 1, the softmax is the output of GEMM 2. The gradients of
     * q, k and v are the grad_output of GEMM 0. The gradient of o is the grad_input of GEMM 1, and that of the softmax
     * is the grad_input of GEMM 2. If q, k and v get the kind delayed or current, the softmax and its gradient must get
     * TE_QUANT_DELAYED. If q, k and v get MXFP8, the kinds of the softmax and of its gradient are not read. Kinds other
     * than delayed, current and MXFP8 give TE_ERR_UNSUPPORTED in the core's forward. */
    bool fp8_dpa, fp8_mha;
    te_delayed_recipe delayed; /* delayed, custom */
    te_current_recipe current; /* current */
    te_block_recipe block;     /* block */
    te_mxfp8_recipe mxfp8;     /* MXFP8 */
    te_nvfp4_recipe nvfp4;     /* NVFP4 */
    te_custom_recipe custom;   /* custom */
} te_recipe;

TE_API te_recipe te_recipe_delayed_scaling(void); /* FP8, one scale a tensor, from the amaxes of earlier steps
                                                   * (DelayedScaling) */
TE_API te_recipe te_recipe_current_scaling(void); /* FP8, one scale a tensor, from its own amax
                                                   * (Float8CurrentScaling) */
TE_API te_recipe te_recipe_block_scaling(void);   /* FP8, one scale for 1 x 128 elements (weights: 128 x 128)
                                                   * (Float8BlockScaling) */
TE_API te_recipe te_recipe_mxfp8(void);           /* FP8, one E8M0 scale for 32 elements (MXFP8BlockScaling) */
TE_API te_recipe te_recipe_nvfp4(void);           /* FP4, one E4M3 scale for 16 elements (weights: 16 x 16)
                                                   * (NVFP4BlockScaling) */
/* Makes a custom recipe (te_custom_recipe). `user` is handed to `factory` (borrowed). TransformerEngine:
 * CustomRecipe. */
TE_API te_recipe te_recipe_custom(te_result (*factory)(void *user, const te_quantizer_role *role,
                                                       te_quantizer_desc *desc),
                                  void *user);
/* Returns "delayed", "current", "block", "mxfp8", "nvfp4", "custom" or "none"; "?" for other values. Static string. */
TE_API const char *te_recipe_name(te_recipe_kind kind);

/* Options of te_autocast_begin. */
typedef struct te_autocast_desc {
    const te_recipe *recipe; /* copied; NULL => delayed scaling. TransformerEngine's default is MXFP8 for compute
                              * capability 10.0 up to 12.0, current scaling from 12.0 on, else delayed scaling */
    bool disabled;        /* modules inside run in high precision */
    bool calibrating;        /* with `disabled`: the amaxes of delayed scaling are still recorded */
    te_group *amax_group;    /* the group over which amaxes of delayed, current and NVFP4 scaling are reduced (borrowed
                              * until the region's last backward pass). NULL => tp_group for GEMMs with a gathered
                              * operand, else none. TransformerEngine's default for delayed scaling is all ranks */
} te_autocast_desc;

/* Opens a region in which modules quantize the operands of their GEMMs; desc may be NULL. Regions may be nested. The
 * first region of a training step saves the state of delayed scaling. te_clear_error restores this state after a failed
 * step. TE_ERR_INVALID for a recipe whose options exclude each other. A call that fails opens no region.
 * TransformerEngine: autocast. */
TE_API te_result te_autocast_begin(te_ctx *te, const te_autocast_desc *desc);
/* Closes the innermost region. The end of the outermost region updates the delayed scales of the forward, if gradients
 * are enabled. The backward pass updates the delayed scales of gradients. If this rank has an error, the ranks of
 * amax_group that would wait for its amaxes here fail with it. Asynchronous on CUDA. */
TE_API te_result te_autocast_end(te_ctx *te);
/* Returns whether a module that runs now would quantize the operands of its GEMMs. */
TE_API bool te_autocast_enabled(const te_ctx *te);

/* ---- inspection ------------------------------------------------------------------------------------------------ */

/* The effect of quantization on one operand x. */
typedef struct te_quant_stats {
    te_quant_kind kind;       /* of the copy that was measured */
    int which;                /* the copy: TE_ROWWISE, or TE_COLUMNWISE if there was no row-wise copy */
    int64_t elements;         /* in x */
    float amax;               /* max |x|, NaN ignored */
    float scale;              /* the scale of the whole tensor, by which x is multiplied before it is encoded (NVFP4: S
                               * of te_op_nvfp4_quantize). 0 if the copy has no such scale (block, MXFP8), or several of
                               * them (groups, row_scaled) */
    float underflow;          /* share of the elements that were not 0 and became 0 */
    float saturated;          /* share of the elements whose scaled magnitude exceeds the largest code */
    int64_t nan_count, inf_count, zeros; /* elements of x that are NaN, infinite, 0 */
    float cosine, snr_db;     /* similarity of x and its dequantized value y: cosine = x . y / |x||y|, snr_db = 10
                               * log10(sum x^2 / sum (x - y)^2) */
    float max_error;          /* max |x - y| */
} te_quant_stats;

/* Sets whether the quantization errors of modules' operands (input, weight, gradient of the output) are measured; off
 * by default. Measuring decodes and reads each operand once more. Switching it on forgets earlier measurements. Weights
 * that are stored quantized are not measured. */
TE_API te_result te_quant_inspect(te_ctx *te, bool on);
/* Receives the latest measurement of the tensor `role`. role and stats are valid during the call. Returns false to stop
 * the visit. */
typedef bool (*te_quant_stats_fn)(void *user, const te_quantizer_role *role, const te_quant_stats *stats);
/* Calls `visit` for every measured tensor. Modules come in the order of their creation. Syncs. */
TE_API te_result te_quant_stats_visit(te_ctx *te, te_quant_stats_fn visit, void *user);

/* ---- FP8 primary weights --------------------------------------------------------------------------------------- */

/* Options of te_quantized_model_init_begin. */
typedef struct te_quantized_model_init_desc {
    const te_recipe *recipe;               /* copied; NULL => delayed scaling. TransformerEngine's default: see
                                            * te_autocast_desc.recipe */
    bool disabled;                      /* modules made inside store plain weights */
    bool preserve_high_precision_init_val; /* initial values of weights are kept in host memory
                                            * (te_quantized_init_value) */
} te_quantized_model_init_desc;

/* Opens a region in which created modules store the weights of their GEMMs quantized by the recipe, as a row-wise and a
 * column-wise copy, without a plain one. Biases, norms and embeddings stay plain. Run the modules inside
 * te_autocast_begin with the same recipe. Outside of autocast the modules decode their weights and compute in high
 * precision. Delayed scaling starts from scale 1. Regions may be nested. desc may be NULL.
 * A weight created between te_no_grad_begin and te_no_grad_end gets the row-wise copy alone, which is the copy that the
 * forward pass reads. A forward pass that is recorded makes the column-wise copy from the row-wise one. If the recipe
 * cannot do so (MXFP8, for example), that forward pass gives TE_ERR_STATE.
 * TransformerEngine: quantized_model_init, fp8_model_init. */
TE_API te_result te_quantized_model_init_begin(te_ctx *te, const te_quantized_model_init_desc *desc);
/* Closes the innermost region. */
TE_API te_result te_quantized_model_init_end(te_ctx *te);
/* Copies the preserved initial value of the weight x to `host`, in x's shape and nominal dtype. The initial value is
 * the one that x had before its first quantization. te_module_reset_parameters replaces this value, and so does loading
 * the weight in high precision. Masters start from the value, unless the weight was written in the meantime.
 * TE_ERR_STATE if the value was not preserved, or was cleared. TransformerEngine: get_high_precision_init_val. */
TE_API te_result te_quantized_init_value(const te_tensor *x, void *host);
/* Frees the preserved initial value of x. TransformerEngine: clear_high_precision_init_val. */
TE_API void te_quantized_clear_init_value(te_tensor *x);

/* Moves the codes of x's row-wise copy into new_raw (retained), which becomes the memory of this copy. new_raw is
 * contiguous, is u8 or has the dtype of the codes, and has at least as many bytes as the codes. TE_ERR_STATE without a
 * row-wise copy of a built-in kind. TE_ERR_UNSUPPORTED for MXFP8, whose column-wise copy cannot be made from row-wise
 * codes. Kernels are fastest where new_raw begins at a multiple of 16 bytes. TransformerEngine: replace_raw_data. */
TE_API te_result te_replace_raw_data(te_tensor *x, te_tensor *new_raw);

/* This rank's slices of master weights. te_quantize_master_weights reads the lists during the call. */
typedef struct te_master_weights {
    te_tensor *const *model_weights;  /* [count] quantized weights, whole on every rank */
    te_tensor *const *master_weights; /* [count] f32 [n], this rank's slice of the flattened weight; NULL or empty if
                                       * this rank owns none */
    const int64_t *start_offsets;     /* [count] index of the slice's first element in the flattened weight */
    int count;                        /* length of the lists */
    te_group *group;                  /* the group over which amaxes are reduced (borrowed); NULL => this rank owns all
                                       * slices */
    /* Optional [count]. With shard_weights, shard_weights[i] receives the codes of the slice, flat, and the weight
     * receives the scales alone. shard_columnwise[i] receives the column-wise codes of MXFP8. These tensors are u8, or
     * have the dtype of the codes. The first byte of an e2m1 slice has the code of the slice's first element, in the
     * high half if start_offsets[i] is odd. */
    te_tensor *const *shard_weights, *const *shard_columnwise;
    /* true: column-wise copies keep their old codes until te_post_all_gather_processing; false: a column-wise copy is
     * made anew when it is read. */
    bool manual_post_processing;
} te_master_weights;

/* Rounds this rank's slices of f32 master weights to the weight's nominal dtype, and quantizes them into the model's
 * weights. The slices of all ranks together give the bytes of quantizing the whole weight. Every rank must make this
 * call, with the same weights in the same order. The caller gathers the bytes afterwards. A refused call changes
 * nothing. If one rank refuses the call, and the ranks are threads of one process, the call fails on all ranks. Clears
 * preserved initial values (te_quantized_init_value). Block and NVFP4 need 2-D scaling.
 * TransformerEngine: quantize_master_weights. */
TE_API te_result te_quantize_master_weights(te_ctx *te, const te_master_weights *w);
/* Calls te_quantize_master_weights; TransformerEngine's older name. */
TE_API te_result te_cast_master_weights_to_fp8(te_ctx *te, const te_master_weights *w);
/* Makes the column-wise copies of model_weights [count] from their row-wise copies. Call it after the row-wise copies
 * were gathered. Does nothing for plain tensors, MXFP8 and hybrid weights. TransformerEngine:
 * post_all_gather_processing. */
TE_API te_result te_post_all_gather_processing(te_ctx *te, te_tensor *const *model_weights, int count);
