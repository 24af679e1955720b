/* api/ops_model.h: the args of the raw operations for models: GEMMs, norms, activations, rotary embeddings, attention
 * and others. The rules of api/ops.h hold for all of them. */

/* ---- gemm ---- */

/* D [m, n] = epilogue(scale_a * scale_b * op(A) op(B) + bias) + (accumulate ? D : 0), accumulated in f32. op(X) is X or
 * its transpose. The args have m, n and k because the tensors may be padded or have more dimensions.
 *   A        the tensor a: [m, lda], or with a_transposed [k, lda]; op(A) is m x k
 *   B        the tensor b: [k, ldb], or with b_transposed [n, ldb], the layout of a weight; op(B) is k x n
 *   formats  A and B are both f32, both f16, both bf16, both e2m1, or any mix of e4m3 and e5m2 except e5m2 x e5m2. f32
 *            is rounded to TF32 on tensor cores; it is exact on the CPU, and on CUDA if the context has exact_f32. FP8
 *            and FP4 operands are K-major (A not transposed, B transposed). Exception: the column-wise copies of MXFP8
 *            are not transposed in memory, so they are MN-major (A transposed, B not transposed)
 *   D        the tensor d: f32, f16 or bf16 [m, ldd]
 *   bias     [n] of any float format, optional
 *   scaling  scaling_a and scaling_b are the kinds of scales in scale_a and scale_b. Both are equal (but not both
 *            BLOCK_2D), or one is BLOCK_1D and the other BLOCK_2D. The scales of each kind:
 *            TENSOR   f32 [1], the scale_inv of FP8 operands; NULL => 1
 *            BLOCK    f32, the scale_inv that te_op_block_quantize wrote; the sum over each 128 values of k is scaled,
 *                     and these scaled sums are added in f32
 *            MXFP8    e8m0, as te_op_mxfp8_quantize wrote them
 *            NVFP4    e4m3, as te_op_nvfp4_quantize wrote them, with amax_a and amax_b f32 [1], or [m] and [n] if rows
 *                     have amaxes of their own. The sums are multiplied by amax_a / (6 F_a) * amax_b / (6 F_b). F_a is
 *                     448, or 256 with e4m3_max_256_a; F_b likewise. In a column-wise copy with a Hadamard transform, k
 *                     includes padding: it is rounded up to a multiple of 16
 *   swizzled_scales    for MXFP8 and NVFP4: both scales are in the swizzled layout
 *   aux      [m, n] of D's format: the second tensor of the epilogue (te_epilogue)
 *   bias_gradient  [n] of any float format, optional, written: column sums of D as stored, in f32. Not possible with
 *                  accumulate or a strided D
 *   split_accumulator  true => at intervals, partial sums are taken from the tensor core and added in f32 (with BLOCK
 *                      this is always so); false => the tensor core accumulates all of k
 * If tensor cores cannot read MXFP8 or NVFP4, the operands are decoded to bf16. Only bits below 2^-133, the smallest
 * bf16, are lost. Decoding takes a workspace of up to 2 (m + n) k bytes, where each decoded row is rounded up to a
 * multiple of 16 elements. With small m or n and both operands K-major, most calls need no workspace. On sm_90
 * an operand whose rows do not begin at multiples of 16 bytes may first be copied into a workspace of its size.
 * te_explain returns the workspace of a call.
 * If k is 0, D becomes bias, or does not change with accumulate. If m or n is 0, only bias_gradient is written, as
 * 0. */
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
    bool e4m3_max_256_a, e4m3_max_256_b; /* for NVFP4: the block scales of A, or of B, were made with the maximum 256
                                          * instead of 448 */
} te_op_gemm_args;

/* Multiplies many matrices in one call, one pair for each group (an expert and its tokens). The sizes of the groups are
 * read on the device, so the host does not wait. Without along_k the groups divide the rows of A and D (forward pass
 * and dgrad); with along_k they divide k (wgrad).
 *   rows     without along_k: D_g = epilogue(scale_a scale_b A_g op(B[g]) + bias[g]) (+ D_g), where A_g and D_g are the
 *            rows of group g. A [m, lda] has the rows of group 0, then those of group 1 and so on, and D [m, ldd] too.
 *            B is [groups, n, ldb] with b_transposed, else [groups, k, ldb]; bias [groups, n], optional; aux [m, n] of
 *            D's format
 *   along_k  D[g] = scale_a scale_b op(A) op(B), summed over group g's values of k (+ D[g]). op(A) is m x k and op(B) k
 *            x n, as in te_op_gemm, where k has the values of all groups; D [groups, m, ldd]. No bias, no epilogue.
 *            D[g] of an empty group becomes 0, or does not change with accumulate
 *   sizes    i32 or i64 [groups]: the number of rows, or of values of k, of each group; 0 or more, without padding
 *   offsets  given instead of sizes: i32 or i64 [groups + 1], ascending: the start of each group, and the end of the
 *            last one
 *   m, n, k  m (with along_k: k) is an upper bound of the sum of sizes. Rows behind the last group are neither read nor
 *            written. Sizes that exceed the bound are cut, and negative ones count as 0, so no memory outside the
 *            tensors is touched
 *   formats  A and B are both f32, both f16 or both bf16, or any mix of e4m3 and e5m2 except e5m2 x e5m2, contiguous
 *            along k. FP8 with along_k takes plain transposed copies, [m, lda] and [n, ldb], in which a group may start
 *            at any column. D is f32, f16 or bf16
 *   scaling  TENSOR: scale_a and scale_b are f32 [1] or [groups], optional.
 *            Without along_k also BLOCK_1D for A with BLOCK_2D for B: scale_a as te_op_block_quantize writes it for all
 *            of A, scale_b [groups, ceil(n / 128), round_up(ceil(k / 128), 4)].
 *            With along_k also BLOCK_1D for both, each as te_op_block_quantize writes it. Then groups must begin at
 *            multiples of 128 values of k, because a block has one scale
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
 * norm.zero_centered_gamma. In RMSNorm mean is 0, rstd is rsqrt(mean(x^2) + eps), and there is no beta.
 *   mean, rstd  f32 [M], optional, written; mean for LayerNorm only
 *   y           a float tensor, or e4m3/e5m2 [M, ld] with `scale` (f32 [1], read) and optionally `scale_inv` and
 *               `amax`, as in te_op_fp8_quantize; then the f32 result is quantized without an intermediate rounding
 *   amax        f32 [1], optional, becomes max(amax, max |y|), where NaN is ignored. max |y| is that of the f32 result
 *               before scaling if y is FP8, else that of the stored y
 *   y_amax      f32 [1], optional, only for a float y and instead of amax: becomes max |y|, as in te_op_amax
 *   y_col       [N, ldc] with ldc >= M, optional, only for an FP8 y and of its format: becomes the transpose of y;
 *               columns M .. ldc - 1 become 0
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

/* The backward pass of a norm. Writes dx [M, N], and optionally dgamma [N] and dbeta [N] (LayerNorm only). Reads dy [M,
 * N] and the forward's x [M, N], gamma [N], rstd f32 [M] and mean f32 [M] (LayerNorm only).
 *   add         optional [M, N], added to dx in f32 before rounding. dx may be the same tensor as `add` or as dy
 *   rounded     dx is rounded also before `add` is added, as if two stored gradients were summed
 *   accumulate  dgamma and dbeta are added to what their tensors have; false => they replace it */
typedef struct te_norm_bwd_args {
    const te_tensor *dy, *x, *gamma, *mean, *rstd, *add;
    te_tensor *dx, *dgamma, *dbeta;
    te_norm_options norm; /* as in the forward; eps is in rstd */
    bool accumulate;
    bool rounded;
} te_norm_bwd_args;
typedef te_norm_bwd_args te_op_layernorm_bwd_args; /* with mean */
typedef te_norm_bwd_args te_op_rmsnorm_bwd_args;   /* without mean and dbeta */

/* y = x * rnorm with rnorm = 1 / sqrt(sum of squares + eps), for each row of x [M, N]. rnorm is f32 [M], optional,
 * written. y may be x. */
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
    int64_t glu_interleave_size; /* gated activations: the two halves of x alternate in blocks of this many columns (in
                                  * modules: rows of fc1). This number must divide a half, or this rank's part of a
                                  * half. 0 => the second half lies behind the first. Not possible with `col`, and in
                                  * the backward pass not with `dbias`, `rounded` or a padded dx */
} te_activation_params;

/* y [M, N] = act(x), with x [M, N], or [M, 2N] for a gated activation. y may be e4m3/e5m2 [M, ld], with scale,
 * scale_inv and amax as in te_norm_fwd_args. If the activation is not gated, y may be x.
 *   col   e4m3/e5m2 [N, ldc], optional, written: the codes of y transposed; columns M .. ldc - 1 become 0. With col, y
 *         may be NULL
 *   amax  f32 [1], optional, becomes max(amax, max |y|), with y in f32 before it is scaled or rounded, as in
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
 *   dbias       optional [N or 2N], written: column sums of dx before it is rounded, the gradient of a bias that was
 *               added to x
 *   rounded     true => dx is first rounded to x's format, and codes, amax and dbias are computed from the rounded dx;
 *               false => they are computed from the f32 values
 *   unrounded_amax  amax is computed from the f32 values even with `rounded`
 *   accumulate  dbias is added to what its tensor has; false => it replaces that */
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

/* y [M, N] = act(x) * act_scales, in f32, rounded once. act_scales [M] has one factor for each row. x is [M, N], or [M,
 * 2N] for a gated activation. Each tensor may have any float format. If the activation is not gated, y may be x.
 * Source: TransformerEngine, common/activation/scaled_activation.cu. */
typedef struct te_op_scaled_act_fwd_args {
    const te_tensor *x, *act_scales;
    te_tensor *y;
    te_activation activation;               /* needed */
    te_activation_params activation_params; /* as in te_op_act_fwd */
} te_op_scaled_act_fwd_args;
/* dx = (dy * act_scales) * act'(x), in the shape of x. dx may be x, or dy if the activation is not gated. dact_scales:
 * optional [M] of any float format, the sum of dy * act(x) over each row, in f32. */
typedef struct te_op_scaled_act_bwd_args {
    const te_tensor *dy, *x, *act_scales;
    te_tensor *dx, *dact_scales;
    te_activation activation;               /* needed */
    te_activation_params activation_params; /* as in the forward */
} te_op_scaled_act_bwd_args;

/* ---- rope ---------------------------------------------------------------------------------------------------- */

/* The angles of a rotary embedding (Su et al. 2021). In a token at position t, channel pair i is rotated by the angle
 * (t * position_scale) * inv_freq[i], in f32. */
typedef struct te_rope_angles {
    float base;            /* inv_freq[i] is base^(-2i / rotary_dim); 0 => 10000 */
    const float *inv_freq; /* [rotary_dim / 2] in host memory, read during the call (te_rope_frequencies makes it); NULL
                            * => computed from base */
    int rotary_dim;        /* the first rotary_dim channels are rotated, the rest stay; even, at most 1024; 0 => d, or
                            * the last size of freqs */
    bool interleaved;      /* pair i is channels 2i and 2i + 1; false => i and i + rotary_dim / 2 */
    float position_scale;  /* 0 => 1 */
    float attention_factor; /* multiplies cosine and sine; 0 => 1 */
    int64_t position_offset; /* added to every position, at most 2^53 in magnitude */
    const te_tensor *start_positions; /* i32 [b], added to each sequence's positions; NULL => 0 */
    const te_tensor *positions; /* i32 or i64, [s], [b, s] or [tokens] (TE_THD): the position of each token; NULL => the
                                 * token's index in its sequence */
    const te_tensor *freqs; /* f32 [positions, 1 or b, 1, rotary_dim]: row t has the angles of all channels of a token
                             * at position t. If freqs is given, the fields base, inv_freq and position_scale must be 0.
                             * The second size is b if each sequence has its own angles (mRoPE). A position without a
                             * row is an error on the CPU, and gives NaN on a GPU. NULL => angles are computed from
                             * frequencies. Source: TransformerEngine, apply_rotary_pos_emb(freqs) */
    int cp_size, cp_rank;  /* for context parallelism (at most 2^20 ranks): each sequence is cut into 2 cp_size equal
                            * chunks, and x has chunks cp_rank and 2 cp_size - 1 - cp_rank; 0 => whole sequences.
                            * Source: TransformerEngine, fused_rope */
} te_rope_angles;

/* Rotary embedding: (u, v) -> (u cos - v sin, v cos + u sin) for each pair (u, v) of channels. With angles.freqs, u and
 * v each use the cosine and sine of their own channel's angle.
 *   x, y        [s, b, h, d], [b, s, h, d] or [tokens, h, d], depending on `format`. The channels of a head are
 *               adjacent; other strides are free. y may be x
 *   angles      the angle of each pair
 *   cu_seqlens  i32 [b + 1], with TE_THD: the row at which each sequence begins; positions in a sequence are counted
 *               from its first row. With cp_size, cu_seqlens counts the rows of the whole sequences
 *   backward    true => the transposed rotation is applied
 *   no_rope     true => no channel is rotated: y is a copy of x, and angles and cu_seqlens are not read */
typedef struct te_op_rope_args {
    const te_tensor *x;
    te_tensor *y;
    te_qkv_format format;
    te_rope_angles angles;
    const te_tensor *cu_seqlens;
    bool backward, no_rope;
} te_op_rope_args;

/* Splits the packed projection qkv into q [s, b, H, d] and into k and v [s, b, G, d]. Rotates q and k unless no_rope is
 * true.
 * If the output `rotated` is given, the projection is rotated without being split.
 *   format    TE_BSHD => b and s are exchanged in all shapes
 *   qkv   [s, b, (H + 2G) * d]. The last dimension has all heads of q, then of k, then of v. With interleaved_groups it
 *         has, for each of the G groups, H/G heads of q, one of k and one of v
 *   num_heads, num_groups, head_dim   H, G, d
 *   rotated   [s, b, (H + 2G) * d], written, in the order of qkv; then q, k and v are NULL. It may be qkv itself; then
 *             the values of v are not copied
 *   angles    the angles by which q and k are rotated */
typedef struct te_op_qkv_rope_args {
    const te_tensor *qkv;
    te_tensor *q, *k, *v, *rotated;
    te_qkv_format format;
    int num_heads, num_groups, head_dim;
    bool interleaved_groups;
    bool no_rope;
    te_rope_angles angles;
} te_op_qkv_rope_args;
/* The backward pass of te_op_qkv_rope. Writes the gradient of qkv to the field qkv. Reads the gradients of q, k and v
 * from the fields q, k and v, or the gradient of `rotated` from the field `rotated`, which may be qkv itself. format,
 * num_heads, num_groups, head_dim, interleaved_groups, no_rope and angles are those of the forward. */
typedef struct te_op_qkv_rope_bwd_args {
    te_tensor *qkv;
    const te_tensor *q, *k, *v, *rotated;
    te_qkv_format format;
    int num_heads, num_groups, head_dim;
    bool interleaved_groups;
    bool no_rope;
    te_rope_angles angles;
} te_op_qkv_rope_bwd_args;

/* ---- attn ---------------------------------------------------------------------------------------------------- */

/* A window of keys, which restricts the mask further. A query sees only the keys from `left` keys before its diagonal
 * key to `right` keys behind it (te_attn_rule.window defines the diagonal). */
typedef struct te_window {
    bool on;             /* false => no window */
    int64_t left, right; /* numbers of keys; -1 => no bound on that side */
} te_window;

/* A function of the user. As score_fn it returns the new score of query q_idx and key kv_idx in sequence b and head h.
 * As score_bprop_fn it returns the derivative of the new score with respect to `score`. It is called from several
 * threads at once, and must not call te.h. */
typedef float (*te_score_mod_fn)(void *user, float score, int64_t b, int64_t h, int64_t q_idx, int64_t kv_idx);
/* A function of the user that returns whether query q_idx sees key kv_idx. It is called from several threads at once,
 * and must not call te.h. */
typedef bool (*te_mask_mod_fn)(void *user, int64_t b, int64_t h, int64_t q_idx, int64_t kv_idx);
#define TE_SCORE_MOD_AUX 4       /* maximum number of tensors that expressions may read */
#define TE_SCORE_MOD_CHARS 1000  /* maximum length of an expression */

/* The user's own change of scores and masks (FlexAttention; TransformerEngine: score_mod, score_mod_bprop,
 * score_mod_tensors). score_mod gets scores after scale, softcap and bias. It is not called for keys that are hidden by
 * the mask, the window or mask_mod. On CUDA the expressions are compiled into the kernels (NVRTC is needed); the CPU
 * calls the functions. A program that runs on CUDA and on the CPU must give expressions and functions. Zero => none.
 *   score_mod        a CUDA C++ expression: the new score, such as "score - aux0[h] * fabsf(q_idx - kv_idx)"
 *   score_mod_bprop  an expression for the backward pass: the derivative of the new score with respect to score
 *   mask_mod         an expression: true if query q_idx sees key kv_idx, such as "aux0[q_idx] == aux0[kv_idx]"
 *   additive         true => the derivative is 1, and no score_mod_bprop is needed. If there is no score_mod_bprop and
 *                    additive is false, a backward pass is refused
 *   aux              tensors that expressions read: f32, f16, bf16, i32, i64 or u8, contiguous; they get no gradients
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
    void *user; /* handed to the functions; user and functions are borrowed until the backward pass, or until a graph
                 * that uses them is destroyed */
    bool additive;
    te_tensor *aux[TE_SCORE_MOD_AUX];
} te_score_mod;

/* The options of attention other than q, k, v and their format; te_attention, te_op_attn_fwd and te_op_attn_bwd share
 * this struct. Zero is plain causal attention; tensors are optional. Below, len_q and len_kv are s_q and s_kv or, with
 * a padding mask, the numbers of queries and keys of the sequence.
 *   mask             the keys that a query sees; 0 => TE_MASK_CAUSAL
 *   window           in addition to the mask, query i sees only keys i + delta - left .. i + delta + right; window.on
 *                    false => no window. delta is len_kv - len_q or 0: see bottom_right_diagonal
 *   softmax_scale    factor of the scores; 0 => 1 / sqrt(d)
 *   dropout_p        probability of zeroing an element of the softmax, 0 to 1
 *   softcap          a score x = scale * q k becomes softcap * tanh(x / softcap), before bias, ALiBi, score_mod and
 *                    masks are applied; 0 => none. Not possible with TE_ATTN_BIAS_PRE_SCALE
 *   bottom_right_diagonal   on => the diagonal key j of query i, for window and ALiBi, is j = i + len_kv - len_q; off
 *                           => j = i. 0 => on, except with TE_MASK_CAUSAL and TE_MASK_PADDING_CAUSAL. With these two
 *                           masks it is always off; with the BOTTOM_RIGHT masks it is always on
 *   kv_bshd          true => k, v and their gradients are [b, s_kv, G, d] like a KV cache, whatever the format of q
 *   attention_mask   for TE_MASK_ARBITRARY: u8 [b or 1, H or 1, s_q or 1, s_kv or 1], any strides; 1 => masked
 *   cu_seqlens_q, cu_seqlens_kv   i32 [b + 1], ascending: sequence b has cu[b + 1] - cu[b] queries or keys. Padding
 *                                 masks need both. With TE_THD cu[b] is also the first row of the sequence, unless
 *                                 cu_seqlens_q_padded, cu_seqlens_kv_padded (i32 [b + 1]) give this row. Lengths that
 *                                 reach beyond the tensors are cut (wrong starts are refused on the CPU, and with
 *                                 TE_DEBUG_SYNC=1). Rows that belong to no sequence become 0 in o, dq, dk and dv, and
 *                                 -inf in lse
 *   max_seqlen_q, max_seqlen_kv   for TE_THD: length of the longest sequence, which determines the size of the launch;
 *                                 longer sequences are cut. 0 => the number of all rows
 *   core_attention_bias   the bias B of TE_ATTN_BIAS_PRE_SCALE and TE_ATTN_BIAS_POST_SCALE: f32, f16 or bf16 [b or 1, H
 *                         or 1, s_q or 1, s_kv], contiguous (s_q and s_kv of the longest sequences)
 *   alibi_slopes     f32 [H] or [b, H], the slopes of TE_ATTN_BIAS_ALIBI, which adds -slope * |i + len_kv - len_q - j|
 *                    to the score of query i and key j, or -slope * |i - j| if bottom_right_diagonal is off. NULL =>
 *                    2^(-8 k / n) for the first n heads, k = 1 .. n, then 2^(-4 m / n) for the other heads, m = 1, 3, 5
 *                    ..; n is the largest power of 2 up to H
 *   softmax_offset   f32 [H], for TE_SOFTMAX_LEARNABLE. With every softmax_type, a query that sees no key has o 0 and
 *                    lse -inf
 *   page_table       i32 [b, n]: k and v are [pages, page_size, G, d], and key j of sequence b is row j % page_size of
 *                    page number page_table[b, j / page_size]. Only with padding masks, and only in the forward pass
 *   block_mask       u8 [b or 1, H or 1, ceil(s_q / 128), ceil(s_kv / 128)], contiguous: one te_attn_block for each 128
 *                    queries and 128 keys (s_q and s_kv of the longest sequences). Forward and backward passes skip
 *                    empty blocks. te_create_block_mask makes such a tensor
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
    te_tensor *block_mask;
    te_score_mod score_mod; /* zero => none */
} te_attn_rule;

/* Options of FP8 attention. The probabilities S and the gradients dP of the scores are rounded to FP8 before GEMMs read
 * them. Each number is replaced by f32(code) * RN(1 / scale), where te_op_fp8_quantize defines the code and RN rounds
 * to the nearest f32. S is rounded after dropout; it multiplies V and dO. dP multiplies K and Q, and is summed for the
 * gradient of a bias. Exception: with a softcap, the bias gradient is summed from unrounded gradients. q, k, v, o and
 * their gradients are float tensors here; the caller rounds them to FP8. Zero => neither S nor dP is rounded. */
typedef struct te_attn_fp8 {
    te_dtype s_dtype, dp_dtype;   /* e4m3 or e5m2; 0 => S, or dP, is not rounded. Only the backward pass reads
                                   * dp_dtype */
    te_tensor *s_scale, *dp_scale; /* f32 [1], read; the backward pass needs the s_scale of the forward pass */
    te_tensor *s_amax, *dp_amax;  /* f32 [1], optional, written: the maximum of the old value and the largest |S|
                                   * (s_amax, in the forward pass) or |dP| (dp_amax, in the backward pass) */
} te_attn_fp8;

/* O = softmax(scale * Q K^T, masked) V, without storing the score matrix.
 *   q, o  [s_q, b, H, d], or with format TE_BSHD [b, s_q, H, d], or with TE_THD [tokens, H, d], one sequence behind the
 *         other, with a padding mask
 *   k, v  [s_kv, b, G, d]; with TE_BSHD [b, s_kv, G, d]; with TE_THD [tokens, G, d]. v may have another head size than
 *         q and k. Head h of q uses head h / (H / G) of k and v. All four may have any strides, with the last dimension
 *         contiguous. d is at most 1024. If it is above 256, general kernels run, which read chunks of 256 channels
 *   lse   f32 [b, H, s_q], or [H, tokens]: log(sum of exp(score)) of each row, with scores after scale, softcap, bias
 *         and mask; -inf for a row that sees no key, whose o is 0
 *   max_logit   f32 [H], optional, written: the largest score of each head, after scale, softcap, bias and mask; -inf
 *               if no row sees a key
 *   rule.dropout_p   probability p of zeroing an element of the softmax. Below 1/64 it is rounded to a multiple of
 *                    1/65536, else to a multiple of 1/4096 of at most 4095/4096, unless p is 1. Kept elements are
 *                    divided by 1 - p, with the rounded p. Each element has a 16-bit random number, and is kept if this
 *                    number is at least 65536 * p. For element [b, h, i, j], let w = ((b*H + h)*s_q + i)*ceil(s_kv/32)
 *                    + j/32 (with TE_THD, s_q and s_kv of the longest sequences). Then bit number n of its random
 *                    number is bit number j % 32 of word n % 4 in block 4*w + n/4 of Philox4x32-7 at (seed, offset) and
 *                    rng */
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

/* The backward pass of te_op_attn_fwd. Writes dq, dk and dv, with the shapes of q, k and v. Reads d_o, with the shape
 * of o, and q, k, v, o, lse, format, rule, seed, offset and rng of the forward pass. Deterministic.
 *   dbias            optional, written: the gradient of core_attention_bias in its shape, f32, f16 or bf16
 *   dsoftmax_offset  optional f32 [H], written: the gradient of softmax_offset
 *   o                may be NULL with fp8: the backward pass then computes D_i = sum_j P_ij dP_ij (P: the softmax)
 *                    instead of D_i = o_i d_o_i */
typedef struct te_op_attn_bwd_args {
    const te_tensor *q, *k, *v, *o, *lse, *d_o;
    te_tensor *dq, *dk, *dv;
    te_qkv_format format;
    te_attn_rule rule; /* as in the forward pass */
    uint64_t seed, offset;
    const te_tensor *rng;
    te_attn_fp8 fp8;   /* as in the forward pass, with dp_dtype */
    te_tensor *dbias, *dsoftmax_offset;
} te_op_attn_bwd_args;

/* Attention in which each query has its own list of keys. All heads share one head of keys, and the keys are also the
 * values (DeepSeek-V4):
 *   o = sum of p_k kv[idx_k] over the entries k of the query's list, with
 *   p_k = e^(s_k - m) / (sum e^(s_k - m) + e^(sink - m)),
 *   s_k = scale q kv[idx_k] and m = max(-1e30, all s_k), all in f32
 * Tensors:
 *   q        [b, s_q, H, d], any strides, channels adjacent; d up to 576
 *   kv       [b, s_kv, d], strides as for q. A value is the first d_v channels of its key
 *   indices  i32 [b, s_q, n]: the list of each query: rows of kv, in any order. An entry outside 0 .. s_kv - 1, such as
 *            -1, is empty; a row that is listed twice counts twice. For packed sequences, b is 1 and the entries are
 *            rows of the whole kv. b * s_q * n and b * s_kv must be below 2^31
 *   sinks    f32 [H], optional: the sink of each head; without sinks the term e^(sink - m) is missing
 *   o        [b, s_q, H, d_v], any float format, usually q's; d_v up to d. o is 0 if all entries of a list are empty
 *   lse      f32 [b, H, s_q], optional, written: m + log(denominator). For a list without keys, lse is the sink, or
 *            -inf without sinks
 * Source: nemo_automodel.components.models.deepseek_v4 (sparse attention). */
typedef struct te_op_sparse_attn_fwd_args {
    const te_tensor *q, *kv, *indices, *sinks;
    te_tensor *o, *lse;
    float softmax_scale; /* 0 => 1 / sqrt(d) */
} te_op_sparse_attn_fwd_args;
/* The backward pass of te_op_sparse_attn_fwd. Writes dq and dkv, with the shapes of q and kv, and dsinks f32 [H]
 * (optional; needs sinks). dkv is the gradient of the keys plus that of the values. Reads d_o, with the shape of o, and
 * q, kv, indices, sinks, o, lse and softmax_scale of the forward pass. Every sum has a fixed order: the gradient of a
 * key is summed over the queries that read it, in ascending order. On CUDA the workspace has 4 bytes for each entry of
 * indices, 8 for each query and head, and up to 260 for each key. */
typedef struct te_op_sparse_attn_bwd_args {
    const te_tensor *q, *kv, *indices, *sinks, *o, *lse, *d_o;
    te_tensor *dq, *dkv, *dsinks;
    float softmax_scale;
} te_op_sparse_attn_bwd_args;

/* ---- kv ------------------------------------------------------------------------------------------------------ */

/* Computes cu_seqlens i32 [b + 1] from a padding mask u8 [b, .., s] (1 => padding, which must be behind the tokens of a
 * sequence). Entry 0 is 0; entry i + 1 is the number of tokens in sequences 0 .. i together. */
typedef struct te_op_cu_seqlens_args {
    const te_tensor *mask;
    te_tensor *cu_seqlens;
} te_op_cu_seqlens_args;

/* Writes keys and values of new tokens into a cache. The other rows of the cache do not change.
 *   k, v      [s, b, G, d], [b, s, G, d] or [tokens, G, d], depending on `format`; channels adjacent; v may have
 *             another d
 *   k_cache, v_cache   [b, s, G, d], or with page_table [pages, page_size, G, d]; channels adjacent; any float format,
 *                      to which k and v are rounded to nearest even
 *   cu_seqlens         i32 [b + 1]: sequence b has cu_seqlens[b + 1] - cu_seqlens[b] new tokens. They are its first
 *                      rows in k and v or, with TE_THD, the rows from cu_seqlens[b] on
 *   start_positions    i32 [b]: the index in the cache at which the first new token of each sequence is written
 *   page_table         optional i32 [b, n]: token i of sequence b is row i % page_size of page number page_table[b, i /
 *                      page_size]
 * Tokens beyond the end of the cache are dropped on a GPU and refused on the CPU. Entries of page_table that no new
 * token needs are not read. */
typedef struct te_op_copy_to_kv_cache_args {
    const te_tensor *k, *v;
    te_tensor *k_cache, *v_cache;
    te_qkv_format format;
    const te_tensor *cu_seqlens, *start_positions;
    const te_tensor *page_table;
} te_op_copy_to_kv_cache_args;

/* Sets `causal`, i32 [1], to 1 if `mask` [b, H, s, s] is a mask of causal attention with the given window, else to 0.
 * `mask` may have any strides. An f32, f16 or bf16 mask is added to scores; a key is visible if its element is above
 * -10000. In a u8 mask a key is visible if its element is not 0.
 *   window   (left, 0): row i sees keys i - left .. i. If window.on is false or left is negative, it sees keys 0 .. i
 *   strict   true => every element is checked: those of visible keys must be 0 (u8: not 0), those of masked keys below
 *            -10000 (u8: 0). false => NeMo Automodel's checks. In head 0 of each sequence, the first row must see one
 *            key, and the last row as many keys as the window gives. In sequence 0, the first row must see the first
 *            key, and its element of the last key must be below -10000. A mask [1, 1, 1, 1] never passes Automodel's
 *            checks. Source: nemo_automodel._transformers.te_attention, _detect_causal_mask */
typedef struct te_op_detect_causal_mask_args {
    const te_tensor *mask;
    te_tensor *causal;
    te_window window;
    bool strict;
} te_op_detect_causal_mask_args;

/* ---- context ------------------------------------------------------------------------------------------------- */

/* Makes an i32 map between two orders of the rows of sequences that ranks share (te_parallel_options.cp_group): the
 * order of the ranks (all rows of rank 0, then of rank 1 and so on) and the order of the sequences.
 *   map         [rows]: map[r * rows / ranks + i] is the index, in the order of the sequences, of row i of rank r. With
 *               `inverse` it is the inverse map. te_op_moe_permute with topk 1 and this map as row_id_map brings rows
 *               from the order of the ranks into the order of the sequences; the inverse map undoes this
 *   cu_seqlens  optional i32 [b + 1]: the first row of each sequence, all multiples of 2 * ranks. NULL => there are as
 *               many sequences of equal length as the field `sequences` says. Rows behind the last sequence are shared
 *               evenly
 *   share       the ranks together have 1 / `share` of each sequence, so the numbers in cu_seqlens are first divided by
 *               `share`; 0 => 1
 * If 2 * ranks does not divide the length of a sequence, the CPU refuses it; on a GPU its rows stay in place. */
typedef struct te_op_context_rows_args {
    const te_tensor *cu_seqlens;
    te_tensor *map;
    int64_t sequences; /* 0 => 1; without cu_seqlens */
    int ranks, share;
    bool inverse;
} te_op_context_rows_args;

/* Computes the lengths and first rows of the chunks that `chunks` selects from each packed sequence, in the form that
 * te_attn_rule takes. A sequence is cut into 2 * ranks chunks of equal length.
 *   cu_seqlens         i32 [b + 1]: running sums of the numbers of tokens of the whole sequences
 *   cu_seqlens_padded  optional i32 [b + 1]: where each sequence starts in memory, if there is padding between
 *                      sequences; multiples of 2 * ranks; NULL => cu_seqlens
 *   lengths            i32 [b + 1], written: running sums, from 0, of the numbers of tokens in the selected chunks
 *   starts             i32 [b + 1], written: the first row of each sequence's selected chunks, counted in the rows of
 *                      the rank or, with TE_CHUNKS_UP_TO, in all rows; the last entry is the end
 *   rank               the index of this rank, from 0; with TE_CHUNKS_UP_TO it is a count of chunks instead, up to 2 *
 *                      ranks */
typedef struct te_op_context_lengths_args {
    const te_tensor *cu_seqlens, *cu_seqlens_padded;
    te_tensor *lengths, *starts;
    int ranks, rank;
    te_context_chunks chunks;
} te_op_context_lengths_args;

/* Merges the results of two attentions, of the same queries to different keys, into o and lse, in f32. With L =
 * log(exp(lse) + exp(x_lse)), o becomes o exp(lse - L) + x exp(x_lse - L), and lse becomes L. Without lse and x_lse, o
 * becomes o + x.
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
 *   mask    optional u8 [b or 1, 1, s_q, s_k], for x [b, h, s_q, s_k]: where it is not 0, scale * x is replaced by
 *           -10000. A row in which no number is larger than -10000 gives zeros, as in TransformerEngine
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

/* y = cap * tanh(x / cap). If dy, of x's shape, is given, y is the gradient instead: y = dy * (1 - tanh(x / cap)^2). y
 * may be x or dy. cap must be positive. */
typedef struct te_op_softcap_args {
    const te_tensor *x, *dy;
    te_tensor *y;
    float cap;
} te_op_softcap_args;

/* ---- dropout ------------------------------------------------------------------------------------------------- */

/* y = residual + keep(x + bias) / (1 - p), in f32, rounded once. keep(v) is v if the element is kept, else 0. bias [N]
 * and residual [.., N] are optional. y may be x or residual. Uniform numbers come from Philox with seed, offset and
 * rng. Element i is kept if number i is at least p; with p = 0 no numbers are drawn. With run > 1, element i uses
 * number i / run, so each run of `run` neighbouring elements is kept or dropped together. */
typedef struct te_op_dropout_add_fwd_args {
    const te_tensor *x, *bias, *residual;
    te_tensor *y;
    float p;
    int64_t run; /* 0 => 1 */
    uint64_t seed, offset;
    const te_tensor *rng;
} te_op_dropout_add_fwd_args;
/* dx = keep(dy) / (1 - p), with the forward's p, run, seed, offset and rng; dx may be dy. (The gradient of residual is
 * dy. The gradient of bias is the column sums of dx.) */
typedef struct te_op_dropout_add_bwd_args {
    const te_tensor *dy;
    te_tensor *dx;
    float p;
    int64_t run; /* 0 => 1 */
    uint64_t seed, offset;
    const te_tensor *rng;
} te_op_dropout_add_bwd_args;
