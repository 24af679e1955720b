/* api/ops_model.h: the args of the raw operations for models: GEMMs, norms, activations, rotary embeddings, attention
 * and others. The rules of api/ops.h hold for all of them. */

/* ---- gemm ---- */

/* D [m, n] = epilogue(scale_a * scale_b * op(A) op(B) + bias) + (accumulate ? D : 0), accumulated in f32. op(X) is X or
 * its transpose. A, B and D may have more rows and longer rows than m, n and k say. They may have more than two
 * dimensions.
 *   A        the tensor a: [m, lda], or with a_transposed [k, lda]; op(A) is m x k
 *   B        the tensor b: [k, ldb], or with b_transposed [n, ldb], the layout of a weight; op(B) is k x n
 *   formats  A and B are both f32, both f16, both bf16, both e2m1, or any mix of e4m3 and e5m2 except e5m2 x e5m2.
 *            Tensor cores round f32 to TF32. f32 is exact on the CPU, and on CUDA if the context has exact_f32.
 *            FP8 and FP4 operands are K-major (A not transposed, B transposed).
 *            Exception: column-wise copies of MXFP8 are MN-major (A transposed, B not transposed)
 *   D        the tensor d: f32, f16 or bf16 [m, ldd]
 *   bias     [n] of any float format, optional
 *   scaling  scaling_a and scaling_b are the kinds of scale_a and scale_b. The two kinds are equal (any kind but
 *            BLOCK_2D), or one is BLOCK_1D and the other BLOCK_2D. The scales of each kind:
 *            TENSOR   f32 [1], the scale_inv of FP8 operands; NULL => 1
 *            BLOCK_*  f32, the scale_inv that te_op_block_quantize wrote. The sum over each 128 values of k is scaled.
 *                     The scaled sums are added in f32
 *            MXFP8    e8m0, as te_op_mxfp8_quantize wrote them
 *            NVFP4    e4m3, as te_op_nvfp4_quantize wrote them, with amax_a and amax_b f32 [1], or [m] and [n] if rows
 *                     have amaxes of their own. The sums are multiplied by amax_a / (6 F_a) * amax_b / (6 F_b). F_a is
 *                     448, or 256 with e4m3_max_256_a; F_b likewise.
 *                     In a column-wise copy with a Hadamard transform, k is rounded up to a multiple of 16 (padding)
 *   swizzled_scales    for MXFP8 and NVFP4: both scales are in the swizzled layout
 *   quantize_a  not 0: a is f32, f16 or bf16, contiguous [m, k] with m <= 16. The call quantizes it to codes of this
 *            format as scaling_a says, with the bits of the operation that does so row-wise: te_op_fp8_quantize,
 *            te_op_block_quantize (1 x 128), te_op_mxfp8_quantize or te_op_nvfp4_quantize. scale_a and amax_a are
 *            NULL. On CUDA a call of very few rows is one launch (te_explain)
 *   quantize_epsilon, quantize_power_of_two  for quantize_a: fields epsilon and power_of_two of te_op_fp8_quantize; for
 *            blocks epsilon, and the opposite of fp32_scales
 *   quantize_scale, quantize_amax  for quantize_a with TENSOR: fields scale and amax of te_op_fp8_quantize. No scale =>
 *            current scaling
 *   aux      [m, n] of D's format: the second tensor of the epilogue (te_epilogue)
 *   bias_gradient  [n] of any float format, optional, written: column sums of the stored D, in f32. Not with accumulate
 *                  or a strided D
 *   split_accumulator  true => partial sums of the tensor core are added in f32 at intervals (with BLOCK_*: always);
 *                      false => the tensor core accumulates all of k
 * If tensor cores cannot read MXFP8 or NVFP4, the operands are decoded to bf16. Only bits below 2^-133 are lost.
 * Decoding takes a workspace of up to 2 (m + n) k bytes, where rows are rounded up to multiples of 16 elements. With
 * small m or n and K-major operands, most calls need none. On sm_90 an operand may be copied into a workspace of its
 * size if its rows do not begin at multiples of 16 bytes, and f32 operands that are not K-major are transposed into up
 * to 1 GiB. te_explain returns the workspace of a call.
 * If k is 0, op(A) op(B) in the formula is 0. If m or n is 0, only bias_gradient is written, as 0. */
typedef struct te_op_gemm_args {
    const te_tensor *a, *b;
    te_tensor *d;
    int64_t m, n, k;
    bool a_transposed, b_transposed;
    bool accumulate;
    bool split_accumulator;
    const te_tensor *scale_a, *scale_b;
    const te_tensor *bias;
    te_epilogue epilogue;
    te_tensor *aux, *bias_gradient;
    te_scaling scaling_a, scaling_b; /* 0 => TENSOR */
    const te_tensor *amax_a, *amax_b;
    bool swizzled_scales;
    bool e4m3_max_256_a, e4m3_max_256_b; /* for NVFP4: the maximum of the block scales of A, or of B, is 256 instead of
                                          * 448 */
    te_dtype quantize_a;
    float quantize_epsilon;
    bool quantize_power_of_two;
    const te_tensor *quantize_scale;
    te_tensor *quantize_amax;
} te_op_gemm_args;

/* Multiplies one pair of matrices for each group (an expert and its tokens). The groups divide the rows of A and D
 * (forward pass and dgrad), or k (along_k, wgrad). The sizes of the groups are read on the device.
 *   rows     without along_k: D_g = epilogue(scale_a scale_b A_g op(B[g]) + bias[g]) (+ D_g), where A_g and D_g are the
 *            rows of group g. A [m, lda] and D [m, ldd] hold the rows of group 0, then of group 1 and so on. B is
 *            [groups, n, ldb] with b_transposed, else [groups, k, ldb]; bias [groups, n], optional; aux [m, n] of D's
 *            format
 *   along_k  D[g] = scale_a scale_b op(A) op(B), summed over group g's values of k (+ D[g]). op(A) is m x k and op(B) k
 *            x n, where k is the sum over all groups; D [groups, m, ldd]. No bias, no epilogue. D[g] of an empty group
 *            becomes 0 or, with accumulate, does not change
 *   sizes    i32 or i64 [groups]: the number of rows (with along_k: of values of k) of each group, 0 or more. Each
 *            group begins right behind the group before it
 *   offsets  given instead of sizes: i32 or i64 [groups + 1], ascending: the start of each group, and the end of the
 *            last one
 *   m, n, k  m (with along_k: k) is an upper bound of the sum of sizes. Rows behind the last group are neither read nor
 *            written. Sizes that exceed the bound are cut, and negative sizes count as 0
 *   formats  as in te_op_gemm, without e2m1. FP8 operands are contiguous along k. With along_k they are transposed
 *            copies, [m, lda] and [n, ldb], in which a group may start at any column
 *   scaling  TENSOR: scale_a and scale_b are f32 [1] or [groups], optional.
 *            Without along_k also BLOCK_1D for A with BLOCK_2D for B: scale_a as te_op_block_quantize writes it for all
 *            of A, scale_b [groups, ceil(n / 128), round_up(ceil(k / 128), 4)].
 *            With along_k also BLOCK_1D for both, each as te_op_block_quantize writes it; groups must begin at
 *            multiples of 128 values of k
 * a, b, d, a_transposed, b_transposed, accumulate, split_accumulator and epilogue are as in te_op_gemm. */
typedef struct te_op_grouped_gemm_args {
    const te_tensor *a, *b;
    te_tensor *d;
    const te_tensor *sizes, *offsets;
    int64_t groups, m, n, k;
    bool along_k;
    bool a_transposed, b_transposed;
    bool accumulate;
    bool split_accumulator;
    const te_tensor *scale_a, *scale_b;
    const te_tensor *bias;
    te_epilogue epilogue;
    te_tensor *aux;
    te_scaling scaling_a, scaling_b; /* 0 => TENSOR */
} te_op_grouped_gemm_args;

/* ---- norm ---------------------------------------------------------------------------------------------------- */

/* Selects the norm of a module. */
typedef enum te_normalization {
    TE_NORM_DEFAULT = 0, /* LayerNorm */
    TE_LAYERNORM = 1,    /* (x - mean) / sqrt(variance + eps) * weight + bias */
    TE_RMSNORM = 2       /* x / sqrt(mean(x^2) + eps) * weight */
} te_normalization;

/* Options of every module with a norm, and of the operations of norms. */
typedef struct te_norm_options {
    te_normalization normalization; /* 0 => LayerNorm */
    float eps;                      /* added to the variance (RMSNorm: to the mean square); 0 => 1e-5 */
    bool zero_centered_gamma;       /* the norm multiplies by 1 + weight, and the weight starts at 0 */
} te_norm_options;

/* y = (x - mean) * rstd * gamma' + beta, for each row of x [M, N]. gamma' is gamma, or gamma + 1 with
 * norm.zero_centered_gamma.
 * RMSNorm: mean is 0, rstd is rsqrt(mean(x^2) + eps), and there is no beta.
 *   mean, rstd  f32 [M], optional, written; mean for LayerNorm only
 *   y           a float tensor, or e4m3/e5m2 [M, ld] with `scale` (f32 [1], read) and optionally `scale_inv`, as in
 *               te_op_fp8_quantize. An FP8 y is quantized from the f32 result, without rounding in between
 *   amax        f32 [1], optional, becomes max(amax, max |y|); NaN is ignored. For an FP8 y the maximum is that of the
 *               f32 result before scaling, else that of the stored y
 *   y_amax      f32 [1], optional, only for a float y and without amax: becomes max |y|, as in te_op_amax
 *   y_col       [N, ldc] with ldc >= M, optional, only for an FP8 y, of y's format: becomes the transpose of y. Columns
 *               M .. ldc - 1 become 0
 *   rounded     for RMSNorm: x * rstd is rounded to x's format before it is multiplied by gamma' (transformers'
 *               LlamaRMSNorm, torch.nn.RMSNorm) */
typedef struct te_norm_fwd_args {
    const te_tensor *x, *gamma, *beta;
    te_tensor *y, *mean, *rstd;
    te_norm_options norm; /* normalization: 0, or the operation's own */
    const te_tensor *scale;
    te_tensor *scale_inv, *amax;
    te_tensor *y_amax, *y_col;
    bool rounded;
} te_norm_fwd_args;
typedef te_norm_fwd_args te_op_layernorm_fwd_args; /* x [.., N], gamma [N], beta [N] (optional) */
typedef te_norm_fwd_args te_op_rmsnorm_fwd_args;   /* x [.., N], gamma [N] */

/* The backward pass of a norm. Writes dx [M, N], and optionally dgamma [N] and dbeta [N]. Reads dy [M, N] and the
 * forward's x, gamma, rstd and mean. RMSNorm has no dbeta and mean.
 *   add         optional [M, N], added to dx in f32 before rounding. dx may be the same tensor as `add` or as dy
 *   rounded     dx is rounded also before `add` is added, as if two stored gradients were summed
 *   accumulate  dgamma and dbeta are added to their tensors; false => they replace the old values */
typedef struct te_norm_bwd_args {
    const te_tensor *dy, *x, *gamma, *mean, *rstd, *add;
    te_tensor *dx, *dgamma, *dbeta;
    te_norm_options norm; /* as in the forward; eps is in rstd */
    bool accumulate;
    bool rounded;
} te_norm_bwd_args;
typedef te_norm_bwd_args te_op_layernorm_bwd_args; /* with mean */
typedef te_norm_bwd_args te_op_rmsnorm_bwd_args;   /* without mean and dbeta */

/* y = x * rnorm, where rnorm = 1 / sqrt(sum of squares + eps) of each row. y may be x. The output rnorm is f32 [M] and
 * optional. */
typedef struct te_op_l2normalize_fwd_args {
    const te_tensor *x;
    te_tensor *y, *rnorm;
    float eps; /* 0 => 1e-6 */
} te_op_l2normalize_fwd_args;
/* dx = rnorm * (dy - x * rnorm^2 * sum(x * dy)), from the forward's x and rnorm; dx may be dy. */
typedef struct te_op_l2normalize_bwd_args {
    const te_tensor *dy, *x, *rnorm;
    te_tensor *dx;
} te_op_l2normalize_bwd_args;

/* ---- act ----------------------------------------------------------------------------------------------------- */

/* Returns whether the activation is gated, that is, reads [M, 2N] and gives [M, N]. */
TE_API bool te_activation_is_gated(te_activation activation);

/* Parameters of the clamped SwiGLU, and the column layout of gated activations. */
typedef struct te_activation_params {
    float limit; /* clamped SwiGLU: bound of the clamp; 0 => 7 */
    float alpha; /* clamped SwiGLU: factor inside the sigmoid; 0 => 1.702 */
    bool no_glu_linear_offset; /* clamped SwiGLU: true => 0 is added to the second half of x
                                * (TransformerEngine: glu_linear_offset = 0); false => 1 is added */
    int64_t glu_interleave_size; /* gated activations: the halves of x alternate in blocks of this many columns (in
                                  * modules: rows of fc1). This number must divide a half (on this rank). 0 => one half
                                  * behind the other. te_op_act_fwd does not allow it together with `col`, and
                                  * te_op_act_bwd not together with `col`, `dbias`, `rounded` or a padded dx */
} te_activation_params;

/* y [M, N] = act(x), with x [M, N], or [M, 2N] for a gated activation. y may be e4m3/e5m2 [M, ld], with scale,
 * scale_inv and amax as in te_norm_fwd_args. If the activation is not gated, y may be x.
 *   col   e4m3/e5m2 [N, ldc], optional, written: the codes of y transposed; columns M .. ldc - 1 become 0. With col, y
 *         may be NULL
 *   amax  f32 [1], optional, becomes max(amax, max |y|) of the f32 y before scaling and rounding, as in
 *         TransformerEngine (vectorized_pointwise.h). */
typedef struct te_op_act_fwd_args {
    const te_tensor *x;
    te_tensor *y;
    te_activation activation;               /* needed */
    te_activation_params activation_params; /* its numbers */
    const te_tensor *scale;
    te_tensor *scale_inv, *amax;
    te_tensor *col;
} te_op_act_fwd_args;

/* dx = dy * act'(x), in the shape of x. dx may be x, or dy if the activation is not gated. dx may be e4m3/e5m2 [M, ld],
 * with scale, scale_inv, amax and col [N or 2N, ldc] as in the forward.
 *   dbias       optional [N or 2N], written: the gradient of a bias, which is the column sums of dx
 *   rounded     true => dx is first rounded to the format of x, and codes, amax and dbias are computed from the rounded
 *               dx; false => they are computed from the f32 dx
 *   unrounded_amax  amax is computed from the f32 values even with `rounded`
 *   accumulate  dbias is added to its tensor; false => it replaces the old values */
typedef struct te_op_act_bwd_args {
    const te_tensor *dy, *x;
    te_tensor *dx;
    te_activation activation;               /* needed */
    te_activation_params activation_params; /* as in the forward */
    const te_tensor *scale;
    te_tensor *scale_inv, *amax;
    te_tensor *col, *dbias;
    bool accumulate;
    bool rounded, unrounded_amax;
} te_op_act_bwd_args;

/* y [M, N] = act(x) * act_scales, in f32, rounded once. act_scales is [M]. x is [M, N], or [M, 2N] for a gated
 * activation. Any float formats. y may be x if the activation is not gated. Source: TransformerEngine,
 * common/activation/scaled_activation.cu. */
typedef struct te_op_scaled_act_fwd_args {
    const te_tensor *x, *act_scales;
    te_tensor *y;
    te_activation activation;               /* needed */
    te_activation_params activation_params; /* as in te_op_act_fwd */
} te_op_scaled_act_fwd_args;
/* dx = (dy * act_scales) * act'(x), in the shape of x. dx may be x, or dy if the activation is not gated. dact_scales
 * [M] of any float format, optional: the row sums of dy * act(x), accumulated in f32. */
typedef struct te_op_scaled_act_bwd_args {
    const te_tensor *dy, *x, *act_scales;
    te_tensor *dx, *dact_scales;
    te_activation activation;               /* needed */
    te_activation_params activation_params; /* as in the forward */
} te_op_scaled_act_bwd_args;

/* ---- rope ---------------------------------------------------------------------------------------------------- */

/* The angles of a rotary embedding (Su et al. 2021). Position t rotates channel pair i by (t * position_scale) *
 * inv_freq[i], in f32. */
typedef struct te_rope_angles {
    float base;            /* inv_freq[i] is base^(-2i / rotary_dim); 0 => 10000 */
    const float *inv_freq; /* [rotary_dim / 2] in host memory, read during the call; NULL => computed from base */
    int rotary_dim;        /* the first rotary_dim channels are rotated, the rest stay; even, at most 1024; 0 => d, or
                            * the last size of freqs */
    bool interleaved;      /* pair i is channels 2i and 2i + 1; false => i and i + rotary_dim / 2 */
    float position_scale;  /* 0 => 1 */
    float attention_factor; /* multiplies cosine and sine; 0 => 1 */
    int64_t position_offset; /* added to every position, at most 2^53 in magnitude */
    const te_tensor *start_positions; /* i32 [b], added to each sequence's positions; NULL => 0 */
    const te_tensor *positions; /* i32 or i64, [s], [b, s] or [tokens] (TE_THD): the position of each token; NULL => the
                                 * token's index in its sequence */
    const te_tensor *freqs; /* f32 [positions, 1 or b, 1, rotary_dim]: row t has the angles at position t, for all
                             * sequences or for each (mRoPE). If freqs is given, base, inv_freq and position_scale must
                             * be 0. A position without a row is an error on the CPU, and gives NaN on a GPU. Source:
                             * TransformerEngine, apply_rotary_pos_emb(freqs) */
    int cp_size, cp_rank;  /* x holds chunks cp_rank and 2 cp_size - 1 - cp_rank of 2 cp_size equal chunks of each
                            * sequence. cp_size is at most 2^20; 0 => whole sequences. Source: TransformerEngine,
                            * fused_rope */
} te_rope_angles;

/* Rotary embedding: (u, v) -> (u cos - v sin, v cos + u sin) for each pair (u, v) of channels. With angles.freqs, u and
 * v each use the cosine and sine of their own channel's angle.
 *   x, y        [s, b, h, d], [b, s, h, d] or [tokens, h, d], by `format`. Channels are adjacent; other strides are
 *               free. y may be x
 *   angles      the angle of each pair
 *   cu_seqlens  i32 [b + 1], with TE_THD: the first row of each sequence; positions count from this row. If cp_size is
 *               set, cu_seqlens counts the rows of whole sequences, not only this rank's rows
 *   backward    true => the transposed rotation is applied
 *   no_rope     true => y is a copy of x; angles and cu_seqlens are not read */
typedef struct te_op_rope_args {
    const te_tensor *x;
    te_tensor *y;
    te_qkv_format format;
    te_rope_angles angles;
    const te_tensor *cu_seqlens;
    bool backward, no_rope;
} te_op_rope_args;

/* Splits the packed projection qkv into q [s, b, H, d], k and v [s, b, G, d]. Rotates q and k unless no_rope is true.
 *   format    TE_BSHD => b and s are exchanged in all shapes
 *   qkv   [s, b, (H + 2G) * d]: all heads of q, then of k, then of v. With interleaved_groups each of the G groups has
 *         H/G heads of q, one of k and one of v
 *   num_heads, num_groups, head_dim   H, G, d
 *   rotated   optional [s, b, (H + 2G) * d], given instead of q, k and v, which are then NULL. Receives the packed
 *             projection in the order of qkv, with q and k rotated. `rotated` may be the same tensor as qkv; the
 *             columns of v are then not written
 *   k_cache, v_cache   optional, given instead of k and v, which are then NULL: caches of qkv's format, or of e4m3 with
 *         k_factors and v_factors, into whose rows k and v are written as te_op_copy_to_kv_cache does, by cu_seqlens,
 *         cache_positions (its start_positions) and page_table, with the bits of both operations one after the other.
 *         Tokens without a place are dropped
 *   angles    the angles by which q and k are rotated */
typedef struct te_op_qkv_rope_args {
    const te_tensor *qkv;
    te_tensor *q, *k, *v, *rotated;
    te_tensor *k_cache, *v_cache, *k_factors, *v_factors;
    const te_tensor *cu_seqlens, *cache_positions, *page_table;
    te_qkv_format format;
    int num_heads, num_groups, head_dim;
    bool interleaved_groups;
    bool no_rope;
    te_rope_angles angles;
} te_op_qkv_rope_args;
/* The backward pass of te_op_qkv_rope. qkv, q, k, v and `rotated` are gradients. Reads either q, k and v, or
 * `rotated`. Writes qkv, which may be the same tensor as `rotated`. */
typedef struct te_op_qkv_rope_bwd_args {
    te_tensor *qkv;
    const te_tensor *q, *k, *v, *rotated;
    te_qkv_format format; /* the forward's */
    int num_heads, num_groups, head_dim; /* the forward's */
    bool interleaved_groups; /* the forward's */
    bool no_rope; /* the forward's */
    te_rope_angles angles; /* the forward's */
} te_op_qkv_rope_bwd_args;

/* ---- joint --------------------------------------------------------------------------------------------------- */

/* One product of te_op_joint_gemm: D [m, n] = A B^T (+ bias). The fields are those of te_op_gemm with b_transposed.
 *   b        [n, k]
 *   d        f32, f16 or bf16 [m, n]; rows may be strided
 *   bias     [n] of any float format, optional
 *   scale_b, amax_b   as scaling_b says
 *   n        the number of columns of D */
typedef struct te_joint_product {
    const te_tensor *b;
    te_tensor *d;
    const te_tensor *bias;
    const te_tensor *scale_b, *amax_b;
    int64_t n;
} te_joint_product;

/* Up to three products that share A [m, k], with a norm before them and a step after them. The results are those of the
 * calls one after another: te_op_rmsnorm_fwd or te_op_layernorm_fwd, te_op_gemm for each product in order, then
 * te_op_act_fwd, te_op_axpby or te_op_qkv_rope. On CUDA a call is one launch if it has few rows, its weights are read
 * straight from memory, all B are of one format and all D of one, and k is a multiple of 64 (FP8: 128, NVFP4: 256);
 * with a norm, if A is f16 or bf16, and k at most 16384; with rope, if the caches are of D's format, pairs of channels
 * are rotary_dim / 2 apart, and head_dim and rotary_dim are multiples of 16. Otherwise there is a launch or more for
 * each part (te_explain).
 *   a          f32, f16 or bf16, contiguous [m, k]
 *   norm       normalization not 0: each row of A is normalized and rounded to A's format. This takes the place of A in
 *              the products; A itself does not change. TE_NORM_DEFAULT (0) => no norm
 *   norm_weight, norm_bias   [k], any float format: gamma and beta of the norm. LayerNorm may have a norm_bias
 *   norm_rounded   `rounded` of te_op_rmsnorm_fwd
 *   product    the first `count` of the three are computed, 1 to 3; the others are zero
 *   m, k       sizes of A
 *   scaling_a, scaling_b, split_accumulator, swizzled_scales, e4m3_max_256_a, e4m3_max_256_b, quantize_a,
 *   quantize_epsilon, quantize_power_of_two   as in te_op_gemm, for all products alike. A is never given as codes, and
 *              there is no quantize_scale
 *   activation not 0: a gated one without parameters of its own, count is 2, and both n are alike. product[0].d is a
 *              contiguous [2, m, n] for D_0 and D_1, and product[1].d NULL. y [m, n] = f(D_0) D_1, of D's format
 *   residual   not NULL: contiguous [m, n] of D's format, and count is 1. y [m, n] = residual + D_0
 *   y          contiguous; needed with activation or residual, which exclude each other, and NULL without them
 *   rope       rope.q not NULL: count is 3, and the products are queries, keys and values. product[0].d is a contiguous
 *              [m, (H + 2G) * d] for D_0, D_1 and D_2 side by side, and the other d are NULL. Then te_op_qkv_rope runs
 *              with this tensor as qkv. Fields as there; k_cache and v_cache are given, and qkv, k, v, rotated and
 *              interleaved_groups are not. Neither activation nor residual is given. rope.q NULL: all of it is 0 */
typedef struct te_op_joint_gemm_args {
    const te_tensor *a;
    te_norm_options norm;
    const te_tensor *norm_weight, *norm_bias;
    bool norm_rounded;
    te_joint_product product[3];
    int count;
    int64_t m, k;
    te_scaling scaling_a, scaling_b;
    bool split_accumulator, swizzled_scales, e4m3_max_256_a, e4m3_max_256_b;
    te_dtype quantize_a;
    float quantize_epsilon;
    bool quantize_power_of_two;
    te_activation activation;
    const te_tensor *residual;
    te_tensor *y;
    te_op_qkv_rope_args rope;
} te_op_joint_gemm_args;

/* ---- attn ---------------------------------------------------------------------------------------------------- */

/* A window, which restricts the mask further. A query sees keys from `left` keys before its diagonal key to `right`
 * keys behind it. te_attn_rule.window defines the diagonal. */
typedef struct te_window {
    bool on;             /* false => no window */
    int64_t left, right; /* numbers of keys; -1 => no bound on that side */
} te_window;

/* score_fn: returns the new score. score_bprop_fn: returns the derivative of the new score with respect to `score`.
 * Several threads call such a function at once. The function must not call te.h. */
typedef float (*te_score_mod_fn)(void *user, float score, int64_t b, int64_t h, int64_t q_idx, int64_t kv_idx);
/* Returns whether query q_idx sees key kv_idx. Several threads call the function at once. It must not call te.h. */
typedef bool (*te_mask_mod_fn)(void *user, int64_t b, int64_t h, int64_t q_idx, int64_t kv_idx);
#define TE_SCORE_MOD_AUX 4       /* maximum number of tensors that expressions may read */
#define TE_SCORE_MOD_CHARS 1000  /* maximum length of an expression */

/* The user's own change of scores and masks (FlexAttention; TransformerEngine: score_mod, score_mod_bprop,
 * score_mod_tensors). score_mod gets scores after scale, softcap and bias, of visible keys alone. CUDA compiles the
 * expressions into the kernels (NVRTC). The CPU calls score_fn, score_bprop_fn and mask_fn. Zero => none.
 *   score_mod        a CUDA C++ expression: the new score, such as "score - aux0[h] * fabsf(q_idx - kv_idx)"
 *   score_mod_bprop  an expression for the backward pass: the derivative of the new score with respect to score
 *   mask_mod         an expression: true if query q_idx sees key kv_idx, such as "aux0[q_idx] == aux0[kv_idx]"
 *   additive         true => the derivative is 1. A backward pass needs `additive` or score_mod_bprop
 *   aux              tensors that expressions read: f32, f16, bf16, i32, i64 or u8, contiguous, without gradients
 * Variables of expressions: score (float; not in mask_mod); b, h, q_idx, kv_idx (int; positions within the sequence);
 * aux0 .. aux3. aux0[i] is element i of aux[0], counted over all dimensions: a float, or an int for integer formats
 * (long long for i64); 0 if there is no element i. Expressions may use numbers, operators, true, false, float, int,
 * INFINITY and the functions abs, min, max, fminf, fmaxf, fabsf, expf, exp2f, expm1f, logf, log2f, log1pf, tanhf, sinf,
 * cosf, sqrtf, rsqrtf, powf, floorf, ceilf, truncf, rintf, fmodf, erff, copysignf. They must not use other names,
 * assignments or statements. tanhf has a relative error of up to 6e-7. In score_mod and score_mod_bprop a division by a
 * number such as 50.0f becomes a product with the reciprocal (within 2 ulp), unless the expression compares or
 * rounds. */
typedef struct te_score_mod {
    const char *score_mod, *score_mod_bprop, *mask_mod; /* CUDA; NULL => none */
    te_score_mod_fn score_fn, score_bprop_fn;           /* for the CPU: score_mod and score_mod_bprop as functions; NULL
                                                         * => none */
    te_mask_mod_fn mask_fn;                             /* for the CPU: mask_mod as a function; NULL => none */
    void *user; /* handed to the functions; `user` and the functions are borrowed until the backward pass, or until a
                 * graph that uses them is destroyed */
    bool additive;
    te_tensor *aux[TE_SCORE_MOD_AUX];
} te_score_mod;

/* The options of te_attention, te_op_attn_fwd and te_op_attn_bwd. Zero is plain causal attention; tensors are optional.
 * len_q and len_kv are s_q and s_kv or, with a padding mask, the lengths of the sequence.
 *   mask             the keys that a query sees; 0 => TE_MASK_CAUSAL
 *   window           query i sees only keys i + delta - left .. i + delta + right; window.on false => no window. delta
 *                    is len_kv - len_q, or 0 if bottom_right_diagonal is off
 *   softmax_scale    factor of the scores; 0 => 1 / sqrt(d)
 *   dropout_p        probability of zeroing an element of the softmax, 0 to 1
 *   softcap          a score x = scale * q k becomes softcap * tanh(x / softcap), before bias, score_mod and masks; 0
 *                    => none. Not with TE_ATTN_BIAS_PRE_SCALE
 *   bottom_right_diagonal   for window and ALiBi. on => the diagonal key j of query i is i + len_kv - len_q; off => j =
 *                           i. 0 => on. Always off with TE_MASK_CAUSAL and TE_MASK_PADDING_CAUSAL; always on with the
 *                           BOTTOM_RIGHT masks
 *   kv_bshd          true => k, v and their gradients are [b, s_kv, G, d], whatever the format of q
 *   attention_mask   for TE_MASK_ARBITRARY: u8 [b or 1, H or 1, s_q or 1, s_kv or 1], any strides; 1 => masked
 *   cu_seqlens_q, cu_seqlens_kv   i32 [b + 1], ascending: sequence b has cu[b + 1] - cu[b] queries or keys. Padding
 *                                 masks need both. With TE_THD sequence b begins at row cu[b]. If cu_seqlens_q_padded
 *                                 and cu_seqlens_kv_padded (i32 [b + 1]) are given, it begins at their element b.
 *                                 Lengths that reach beyond the tensors are cut. Wrong starts are refused on the CPU,
 *                                 and with TE_DEBUG_SYNC=1. Rows of no sequence become 0 in o, dq, dk and dv, and -inf
 *                                 in lse
 *   max_seqlen_q, max_seqlen_kv   for TE_THD: an upper bound for the length of a sequence, which sizes the launch;
 *                                 tokens beyond it are cut off. 0 => the number of all rows
 *   core_attention_bias   the bias B of TE_ATTN_BIAS_PRE_SCALE and TE_ATTN_BIAS_POST_SCALE: f32, f16 or bf16 [b or 1, H
 *                         or 1, s_q or 1, s_kv], contiguous (s_q and s_kv of the longest sequences)
 *   alibi_slopes     f32 [H] or [b, H], for TE_ATTN_BIAS_ALIBI, which adds -slope * |i + delta - j| to the score of
 *                    query i and key j (delta as for `window`). NULL => 2^(-8 k / n) for the first n heads, k = 1 .. n,
 *                    then 2^(-4 m / n) for the other heads, m = 1, 3, 5 ..; n is the largest power of 2 up to H
 *   softmax_offset   f32 [H], for TE_SOFTMAX_LEARNABLE. With every softmax_type, a query that sees no key has o 0 and
 *                    lse -inf
 *   page_table       i32 [b, n]: k and v are [pages, page_size, G, d]. Key j of sequence b is row j % page_size of page
 *                    page_table[b, j / page_size]. Only with padding masks, and only in the forward pass
 *   k_factors, v_factors   e8m0, the shape of k and of v without channels, any strides: k and v are e4m3 codes of a
 *                    cache that te_op_copy_to_kv_cache has written, q and o are not. A number is f32(code) * factor of
 *                    its row. Both or none; only in the forward pass, without te_attn_fp8
 *   block_mask       u8 [b or 1, H or 1, ceil(s_q / 128), ceil(s_kv / 128)], contiguous: one te_attn_block for 128
 *                    queries and 128 keys (s_q and s_kv of the longest sequences). te_create_block_mask makes such a
 *                    tensor
 *   score_mod        the user's own change of scores and masks */
typedef struct te_attn_rule {
    te_attn_mask mask;   /* 0 => causal */
    te_window window;    /* zero => none */
    float softmax_scale; /* 0 => 1 / sqrt(d) */
    float dropout_p;     /* 0 => none */
    float softcap;       /* 0 => none */
    te_switch bottom_right_diagonal;
    bool kv_bshd;
    te_tensor *attention_mask;
    te_tensor *cu_seqlens_q, *cu_seqlens_kv;
    te_tensor *cu_seqlens_q_padded, *cu_seqlens_kv_padded;
    int64_t max_seqlen_q, max_seqlen_kv;
    te_attn_bias core_attention_bias_type; /* 0 => none */
    te_tensor *core_attention_bias;
    te_tensor *alibi_slopes;
    te_softmax_type softmax_type; /* 0 => vanilla */
    te_tensor *softmax_offset;
    te_tensor *page_table;
    te_tensor *k_factors, *v_factors;
    te_tensor *block_mask;
    te_score_mod score_mod; /* zero => none */
} te_attn_rule;

/* Options of FP8 attention. The probabilities S and the gradients dP of the scores are rounded to FP8 before GEMMs.
 * Each number becomes f32(code) * RN(1 / scale), with the code of te_op_fp8_quantize. RN rounds to the nearest f32. S
 * is rounded after dropout. The gradient of a bias sums rounded dP; with a softcap it sums unrounded gradients. The
 * caller rounds o and the gradients, and q, k and v: either to numbers of their format, or to FP8 codes.
 *
 * Both passes take q, k and v as codes of FP8 (all three), with the factors q_scale_inv, k_scale_inv and v_scale_inv: a
 * number is f32(code) * factor. The backward pass then takes d_o as codes, too, with the factor do_scale_inv.
 *
 * Without s_scale the forward pass rounds each row of S by a scale of its own: the numbers e^(score - m) are scaled and
 * become codes, before the factor 1 / (1 - p) of dropout. The general kernels take the row's largest score as m and 2^8
 * as the scale, so that the largest number is exact. Hopper's kernel for e4m3 codes knows that score only at the end of
 * the row. Its m is the largest score so far, its scale is 2^3, and m changes only when a number exceeds 448. Its
 * denominator sums the numbers before rounding, except that the largest one counts as its code. In lse that one is not
 * rounded either. s_amax gets the largest S before rounding, as with s_scale.
 *
 * The backward pass rounds S by s_scale and dP by dp_scale, the scales of delayed scaling: a kernel that does not store
 * S and dP cannot measure them first. dp_amax gets the largest dP before rounding; the amax of S is the forward's. The
 * general kernels compute D_i = sum_j P_ij dP_ij and multiply rounded numbers. Hopper's kernel for codes (e4m3 of q, k
 * and v, e5m2 of d_o, dp_dtype e5m2) is closer to unrounded gradients: it computes D_i as o_i d_o_i and so needs o, it
 * rounds dP by dp_scale for dq alone, and takes S and dP in bf16 for dv and dk. */
typedef struct te_attn_fp8 {
    te_dtype s_dtype, dp_dtype;   /* e4m3 or e5m2; 0 => not rounded. Only the backward pass reads dp_dtype */
    te_tensor *s_scale, *dp_scale; /* f32 [1], read; s_scale: NULL in the forward pass => a scale for each row. The
                                    * backward pass needs an s_scale */
    te_tensor *s_amax, *dp_amax;  /* f32 [1], optional: the forward pass sets s_amax to max(s_amax, max |S|), the
                                   * backward pass dp_amax to max(dp_amax, max |dP|) */
    te_tensor *q_scale_inv, *k_scale_inv, *v_scale_inv; /* f32 [1], read; only for FP8 codes of q, k and v, which need
                                                         * them */
    te_tensor *do_scale_inv;      /* f32 [1], read by the backward pass alone; only for FP8 codes of d_o */
    bool part_of_keys;            /* backward pass: o and lse are those of more keys than k and v have (ranks that share
                                   * sequences). D_i is o_i d_o_i then, whatever the kernel, and needs o */
} te_attn_fp8;

/* O = softmax(scale * Q K^T, masked) V, without storing the score matrix.
 *   q, o  [s_q, b, H, d], or with format TE_BSHD [b, s_q, H, d], or with TE_THD [tokens, H, d], one sequence behind the
 *         other, with a padding mask
 *   k, v  [s_kv, b, G, d]; with TE_BSHD [b, s_kv, G, d]; with TE_THD [tokens, G, d]. v may have another head size than
 *         q and k. Head h of q uses head h / (H / G) of k and v. q, k, v and o may have any strides, with adjacent
 *         channels. d is at most 1024. q, k and v may be FP8 codes, see te_attn_fp8; k and v alone those of a cache,
 *         see rule.k_factors. On CUDA, unless there are few queries, the numbers of such a cache go through a workspace
 *         of q's format, [b, s_kv, G, d] each
 *   lse   f32 [b, H, s_q], or [H, tokens]: log(sum of exp(score)) of each row, after scale, softcap, bias and mask. A
 *         row that sees no key has lse -inf and o 0
 *   max_logit   f32 [H], optional, written: the largest of these scores of each head; -inf if no row sees a key
 *   rule.dropout_p   probability p of zeroing an element of the softmax. p is rounded: below 1/64 to a multiple of
 *                    1/65536, else to a multiple of 1/4096. A p below 1 is never rounded up to 1. Kept elements are
 *                    divided by 1 - p, with the rounded p. An element is kept if its 16-bit random number is at least
 *                    65536 * p. The number comes from blocks of Philox4x32-7 (`seed`, `offset`, `rng`), which have four
 *                    words each. For key j and query i of head h in sequence b, let w =
 *                    ((b*H + h)*s_q + i)*ceil(s_kv/32) + j/32. Blocks 4*w to 4*w + 3 have 16 words, which 32
 *                    neighbouring keys share. Bit n of the number is bit j % 32 of word n. With TE_THD, s_q is
 *                    rule.max_seqlen_q, and s_kv is rule.max_seqlen_kv (0 => the number of all rows) */
typedef struct te_op_attn_fwd_args {
    const te_tensor *q, *k, *v;
    te_tensor *o, *lse;
    te_qkv_format format;
    te_attn_rule rule; /* zero => causal */
    uint64_t seed, offset;
    const te_tensor *rng;
    te_attn_fp8 fp8;   /* zero => high precision */
    te_tensor *max_logit;
} te_op_attn_fwd_args;

/* The backward pass of te_op_attn_fwd. Writes dq, dk and dv. Reads d_o, which has the shape of o. q, k, v, o and lse
 * are the forward's. Deterministic.
 *   dbias            optional, written: the gradient of core_attention_bias in its shape, f32, f16 or bf16
 *   dsoftmax_offset  optional f32 [H], written: the gradient of softmax_offset
 *   d_o              FP8 codes if q, k and v are codes, see te_attn_fp8
 *   o                may be NULL with fp8.s_dtype or fp8.dp_dtype, which make D_i sum_j P_ij dP_ij (P: the softmax)
 *                    instead of o_i d_o_i. Hopper's kernel for FP8 codes needs o */
typedef struct te_op_attn_bwd_args {
    const te_tensor *q, *k, *v, *o, *lse, *d_o;
    te_tensor *dq, *dk, *dv;
    te_qkv_format format; /* the forward's */
    te_attn_rule rule; /* as in the forward pass */
    uint64_t seed, offset; /* the forward's */
    const te_tensor *rng; /* the forward's */
    te_attn_fp8 fp8;   /* as in the forward pass, with s_scale, dp_dtype and dp_scale; for codes, do_scale_inv */
    te_tensor *dbias, *dsoftmax_offset;
} te_op_attn_bwd_args;

/* Attention in which each query has its own list of keys. All heads share one head of keys, which are also the values
 * (DeepSeek-V4):
 *   o = sum of p_k kv[idx_k] over the entries k of the query's list, with
 *   p_k = e^(s_k - m) / (sum e^(s_k - m) + e^(sink - m)),
 *   s_k = scale q kv[idx_k] and m = max(-1e30, all s_k), all in f32
 * Tensors:
 *   q        [b, s_q, H, d], any strides, channels adjacent; d up to 576
 *   kv       [b, s_kv, d], strides as for q. A value is the first d_v channels of its key
 *   indices  i32 [b, s_q, n]: the list of each query. An entry is the index of a row of kv. The entries may have
 *            any order. An entry outside 0 .. s_kv - 1 is empty. A row listed twice counts twice. With packed sequences
 *            b is 1, and an entry is the index of a row of the whole kv. The products b * s_q * n and b * s_kv must be
 *            below 2^31
 *   sinks    f32 [H], optional: the sink of each head; NULL => no term e^(sink - m)
 *   o        [b, s_q, H, d_v], any float format, usually q's; d_v up to d. o is 0 if all entries of a list are empty
 *   lse      f32 [b, H, s_q], optional, written: m + log(denominator). For a list without keys, lse is the sink, or
 *            -inf without sinks
 * Source: nemo_automodel.components.models.deepseek_v4 (sparse attention). */
typedef struct te_op_sparse_attn_fwd_args {
    const te_tensor *q, *kv, *indices, *sinks;
    te_tensor *o, *lse;
    float softmax_scale; /* 0 => 1 / sqrt(d) */
} te_op_sparse_attn_fwd_args;
/* The backward pass of te_op_sparse_attn_fwd. Writes dq, dkv and dsinks f32 [H] (optional; needs sinks). dkv is the
 * gradient of the keys plus that of the values. Reads d_o, which has the shape of o. q, kv, indices, sinks, o and lse
 * are the forward's. Every sum has a fixed order. On CUDA the workspace has 4 bytes for each entry of indices, 8 for
 * each query and head, and up to 260 for each key. */
typedef struct te_op_sparse_attn_bwd_args {
    const te_tensor *q, *kv, *indices, *sinks, *o, *lse, *d_o;
    te_tensor *dq, *dkv, *dsinks;
    float softmax_scale; /* the forward's */
} te_op_sparse_attn_bwd_args;

/* ---- kv ------------------------------------------------------------------------------------------------------ */

/* Computes cu_seqlens i32 [b + 1], the running sums of the lengths (from 0), from a padding mask u8 [b, .., s], 1 =>
 * padding. Padding must be behind the tokens. */
typedef struct te_op_cu_seqlens_args {
    const te_tensor *mask;
    te_tensor *cu_seqlens;
} te_op_cu_seqlens_args;

/* Writes keys and values of new tokens into a cache. The other rows of the cache do not change.
 *   k, v      [s, b, G, d], [b, s, G, d] or [tokens, G, d], depending on `format`; channels adjacent; v may have
 *             another d
 *   k_cache, v_cache   [b, s, G, d], or with page_table [pages, page_size, G, d]; channels adjacent; any float format,
 *                      to which k and v are rounded to nearest even; or e4m3, with d up to 1024
 *   k_factors, v_factors   for e4m3, written: e8m0, the shape of the cache without channels, any strides. Each head of
 *                      each token has a factor of its own, a power of two, so no calibration is needed, and what is
 *                      written never changes later: the least factor not below max |x| / 448 (as in MXFP8, with the
 *                      channels of a head as the block). An element becomes the nearest code of x / factor: within 1/16
 *                      of itself, or within 2^-17 of max |x|. A NaN keeps to its own element
 *   cu_seqlens         i32 [b + 1]: sequence i has n = cu_seqlens[i + 1] - cu_seqlens[i] new tokens. In k and v they
 *                      are the first n rows of the sequence or, with TE_THD, the n rows from row cu_seqlens[i] on
 *   start_positions    i32 [b]: the index in the cache of each sequence's first new token
 *   page_table         optional i32 [b, n]: token j of sequence i is row j % page_size of page
 *                      page_table[i, j / page_size]. Entries that no new token needs are not read
 * Tokens beyond the end of the cache are dropped on a GPU and refused on the CPU. */
typedef struct te_op_copy_to_kv_cache_args {
    const te_tensor *k, *v;
    te_tensor *k_cache, *v_cache, *k_factors, *v_factors;
    te_qkv_format format;
    const te_tensor *cu_seqlens, *start_positions;
    const te_tensor *page_table;
} te_op_copy_to_kv_cache_args;

/* Advances the numbers of a cache whose b sequences grow together: each has got `added` tokens, and gets `step` tokens
 * in the next step. A captured step that ends with this operation is ready to be launched again.
 *   start_positions    i32 [b]: the number of tokens of each sequence; becomes start_positions + added
 *   cu_seqlens_q       i32 [b + 1], written: 0, step, 2 step ..
 *   cu_seqlens_kv      i32 [b + 1], written: running sums, from 0, of the new start_positions + step */
typedef struct te_op_advance_kv_cache_args {
    te_tensor *start_positions, *cu_seqlens_q, *cu_seqlens_kv;
    int64_t added, step;
} te_op_advance_kv_cache_args;

/* Sets `causal`, i32 [1], to 1 if `mask` [b, H, s, s] is a mask of causal attention with the given window, else to 0.
 * `mask` may have any strides. In an f32, f16 or bf16 mask a key is visible if its element is above -10000; in a u8
 * mask, if it is not 0.
 *   window   (left, 0): row i sees keys i - left .. i. If window.on is false or left is negative, it sees keys 0 .. i
 *   strict   true => every element is checked: those of visible keys must be 0 (u8: not 0), those of masked keys below
 *            -10000 (u8: 0).
 *            false => NeMo Automodel's checks. In head 0 of each sequence, the first row must see one key, and the last
 *            row as many keys as the window gives. In sequence 0, the first row must see the first key, and its element
 *            of the last key must be below -10000. A mask [1, 1, 1, 1] never passes.
 *            Source: nemo_automodel._transformers.te_attention, _detect_causal_mask */
typedef struct te_op_detect_causal_mask_args {
    const te_tensor *mask;
    te_tensor *causal;
    te_window window;
    bool strict;
} te_op_detect_causal_mask_args;

/* ---- context ------------------------------------------------------------------------------------------------- */

/* Makes an i32 map between two orders of the rows of sequences that are split among ranks
 * (te_parallel_options.cp_group). The order of the ranks has all rows of rank 0, then of rank 1 and so on. The other
 * order is that of the sequences.
 *   map         [rows]: map[r * rows / ranks + i] is the index, in the order of the sequences, of row i of rank r. As
 *               row_id_map of te_op_moe_permute (topk 1), this map brings rows from the order of the ranks into the
 *               order of the sequences. With `inverse` the inverse of this map is written, which brings rows back
 *   cu_seqlens  optional i32 [b + 1]: the first row of each sequence, all multiples of 2 * ranks * `share`. NULL =>
 *               `sequences` sequences of equal length. Rows behind the last sequence are divided evenly among the ranks
 *   share       these ranks together have 1 / `share` of the rows that cu_seqlens counts. The entries of cu_seqlens are
 *               divided by `share` first; 0 => 1
 * If 2 * ranks does not divide the length of a sequence, the CPU refuses the call; on a GPU the rows of the sequence
 * stay in place. */
typedef struct te_op_context_rows_args {
    const te_tensor *cu_seqlens;
    te_tensor *map;
    int64_t sequences; /* 0 => 1; without cu_seqlens */
    int ranks, share;
    bool inverse;
} te_op_context_rows_args;

/* Computes the lengths and first rows of the chunks that `chunks` selects from each packed sequence, for te_attn_rule.
 * A sequence has 2 * ranks chunks of equal length.
 *   cu_seqlens         i32 [b + 1]: running sums of the numbers of tokens of the whole sequences
 *   cu_seqlens_padded  optional i32 [b + 1]: the first row of each sequence in memory, if there is padding between
 *                      sequences; multiples of 2 * ranks; NULL => cu_seqlens
 *   lengths            i32 [b + 1], written: running sums, from 0, of the numbers of tokens in the selected chunks
 *   starts             i32 [b + 1], written: the first row of each sequence's selected chunks; the last entry is the
 *                      end. Rows are numbered within this rank's part; with TE_CHUNKS_UP_TO, within the rows of all
 *                      ranks
 *   rank               the index of this rank, from 0; with TE_CHUNKS_UP_TO a count of chunks, up to 2 * ranks */
typedef struct te_op_context_lengths_args {
    const te_tensor *cu_seqlens, *cu_seqlens_padded;
    te_tensor *lengths, *starts;
    int ranks, rank;
    te_context_chunks chunks;
} te_op_context_lengths_args;

/* Merges two attention outputs in f32. (o, lse) and (x, x_lse) are the outputs of the same queries for two different
 * sets of keys. The merged output replaces o and lse:
 * L = log(exp(lse) + exp(x_lse)); o becomes o exp(lse - L) + x exp(x_lse - L), and lse becomes L.
 * Without lse and x_lse, o becomes o + x.
 *   x, o          [s, b, H, d], or with format TE_BSHD [b, s, H, d], or with TE_THD [tokens, H, d]; any strides, the
 *                 last dimension contiguous
 *   x_lse, lse    f32 [b, H, s], or [1, H, tokens]; lse may have any strides
 *   x_max_logit, max_logit   f32 [H], optional, both or neither: max_logit becomes the larger of the two */
typedef struct te_op_context_merge_args {
    const te_tensor *x, *x_lse, *x_max_logit;
    te_tensor *o, *lse, *max_logit;
    te_qkv_format format;
} te_op_context_merge_args;

/* ---- softmax ------------------------------------------------------------------------------------------------- */

/* y = softmax(scale * x) over the last dimension of x [.., s_q, s_k]. y may be x.
 *   mask    optional u8 [b or 1, 1, s_q, s_k], for x [b, h, s_q, s_k]: where it is not 0, scale * x becomes -10000. A
 *           row without a number above -10000 gives zeros, as in TransformerEngine
 *   causal  row i sees its first i + 1 + s_k - s_q columns; y is 0 in the other columns, and in rows that see none */
typedef struct te_op_softmax_fwd_args {
    const te_tensor *x, *mask;
    te_tensor *y;
    float scale; /* 0 => 1 */
    bool causal;
} te_op_softmax_fwd_args;
/* dx = scale * (y * dy - y * (sum over the last dimension of y * dy)), from the forward's y and scale; dx may be dy. */
typedef struct te_op_softmax_bwd_args {
    const te_tensor *dy, *y;
    te_tensor *dx;
    float scale; /* 0 => 1 */
} te_op_softmax_bwd_args;

/* ---- softcap ------------------------------------------------------------------------------------------------- */

/* y = cap * tanh(x / cap). With dy, y is the gradient: dy * (1 - tanh(x / cap)^2). y may be x or dy. cap is
 * positive. */
typedef struct te_op_softcap_args {
    const te_tensor *x, *dy;
    te_tensor *y;
    float cap;
} te_op_softcap_args;

/* ---- dropout ------------------------------------------------------------------------------------------------- */

/* y = residual + keep(x + bias) / (1 - p), in f32, rounded once. keep(v) is v or 0. bias [N] and residual [.., N] are
 * optional. y may be x or residual.
 * Element i is kept if Philox's uniform number with the index i / run is at least p. So `run` neighbours are kept or
 * dropped together. */
typedef struct te_op_dropout_add_fwd_args {
    const te_tensor *x, *bias, *residual;
    te_tensor *y;
    float p;
    int64_t run; /* 0 => 1 */
    uint64_t seed, offset; /* see api/ops.h */
    const te_tensor *rng; /* optional */
} te_op_dropout_add_fwd_args;
/* dx = keep(dy) / (1 - p), with the forward's fields; dx may be dy. The gradient of residual is dy, that of bias the
 * column sums of dx. */
typedef struct te_op_dropout_add_bwd_args {
    const te_tensor *dy;
    te_tensor *dx;
    float p;
    int64_t run; /* 0 => 1 */
    uint64_t seed, offset; /* the forward's */
    const te_tensor *rng; /* the forward's */
} te_op_dropout_add_bwd_args;
