/* api/ops_model.h: the args of the raw operations that models are made of. The rules of api/ops.h hold for all of
 * them. */

/* ---- gemm ---- */

/* D [m, n] = epilogue(scale_a * scale_b * op(A) op(B) + bias) + (accumulate ? D : 0), accumulated in f32. m, n and k
 * are given because the tensors may be padded or have more dimensions.
 *   A        a: [m, lda], or with a_transposed [k, lda]; op(A) is m x k
 *   B        b: [k, ldb], or with b_transposed [n, ldb], the layout of a weight; op(B) is k x n
 *   formats  of A and B: both f32, both f16 or both bf16; e4m3 and e5m2 in any mix but e5m2 x e5m2; e2m1 x e2m1. f32 is
 *            rounded to TF32 on tensor cores, and exact on the CPU and with exact_f32 of the context. FP8 and FP4
 *            operands are K-major (A not transposed, B transposed), except the column-wise copies of MXFP8: these are
 *            not transposed in memory, so they are MN-major (A transposed, B not transposed)
 *   D        d: f32, f16 or bf16 [m, ldd]
 *   bias     [n] of any float format, optional
 *   scaling  scaling_a and scaling_b are the layouts of scale_a and scale_b: equal ones (but not BLOCK_2D x BLOCK_2D),
 *            or BLOCK_1D with BLOCK_2D:
 *            TENSOR   f32 [1], optional (1): the scale_inv of FP8 operands
 *            BLOCK    f32, the scale_inv of te_op_block_quantize for the copy; the sums over each 128 k are scaled and
 *                     added in f32
 *            MXFP8    e8m0, as te_op_mxfp8_quantize wrote them
 *            NVFP4    e4m3, as te_op_nvfp4_quantize wrote them, and amax_a, amax_b f32 [1], or [m] and [n] when
 *                     row-scaled; the product is multiplied by amax_a * amax_b / (6 F)^2. k of a transformed copy is
 *                     the padded one, round_up(M, 16)
 *   swizzled_scales    MXFP8, NVFP4: both scales are in the swizzled layout
 *   aux      [m, n] of D's format
 *   bias_gradient  [n] of any float format, optional: column sums of D as stored, in f32. Not with accumulate or a
 *                  strided D
 *   split_accumulator  partial sums are added in f32 at intervals (BLOCK: always); false => the tensor core's
 *                      accumulator
 * Where tensor cores do not read MXFP8 or NVFP4, the operands are decoded into bf16: exactly, except for digits below
 * 2^-133, the last bit of bf16. This takes a workspace of up to 2 (m + n) k bytes, rows rounded up; with small m or n
 * and both operands K-major, mostly none. On sm_90 an operand whose rows do not begin at multiples of 16 bytes may
 * first be copied into a workspace of its size. te_explain gives the workspace of a call. k == 0 => D = bias, or D
 * stays with accumulate. m or n == 0 => nothing is written but bias_gradient, which becomes 0. */
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
    bool e4m3_max_256_a, e4m3_max_256_b; /* NVFP4: F is 256 for that operand */
} te_op_gemm_args;

/* Products of many matrices in one call, one for each group (an expert and its tokens). Only the device knows the sizes
 * of the groups: no host wait. Without along_k the groups divide the rows of A and D (a forward pass, or its dgrad);
 * with along_k they divide k (wgrad).
 *   rows     D rows of g = epilogue(scale_a scale_b op(A) rows of g times op(B[g]) + bias[g]) (+ D). A [m, lda] has the
 *            rows of group 0, then those of group 1, ...; D [m, ldd] likewise. B [groups, n, ldb] (b_transposed) or
 *            [groups, k, ldb]; bias [groups, n], optional; aux [m, n] of D's format
 *   along_k  D[g] = scale_a scale_b op(A) op(B) over the values of k of g (+ D[g]). op(A) m x k, op(B) k x n, as in
 *            te_op_gemm, with the k of all groups; D [groups, m, ldd]. No bias, no epilogue. D[g] of an empty group is
 *            0, or stays with accumulate
 *   sizes    i32 or i64 [groups]: the rows, or values of k, of each group: any numbers from 0 up, without padding;
 *   offsets  or, in place of sizes, i32 or i64 [groups + 1], ascending: the start of each group, and the end of the
 *            last one
 *   m, n, k  m (along_k: k) is an upper bound of the sum of sizes: rows behind the last group are neither read nor
 *            written. Larger sizes are cut, negative ones count as 0: no memory outside is touched
 *   formats  A and B both f32, f16 or bf16, or e4m3 and e5m2 in any mix but e5m2 x e5m2, contiguous along k. FP8
 *            along_k takes plain transposed copies, [m, lda] and [n, ldb]: groups start at any column. D f32, f16, bf16
 *   scaling  TENSOR: scale_a, scale_b f32 [1] or [groups], optional. Without along_k also A BLOCK_1D with B BLOCK_2D:
 *            scale_a as te_op_block_quantize writes it for all of A, scale_b [groups, ceil(n / 128), round_up(ceil(k /
 *            128), 4)]. With along_k also BLOCK_1D with BLOCK_1D, each as te_op_block_quantize writes it: groups begin
 *            at multiples of 128 values of k then, since a block has one scale
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

/* The norm of a module that has one. */
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

/* y = (x - mean) * rstd * gamma' + beta, for each row of [M, N]; gamma' = gamma + 1 if norm.zero_centered_gamma.
 * RMSNorm: mean = 0, rstd = rsqrt(mean(x^2) + eps), no beta.
 *   mean, rstd  f32 [M] (mean: LayerNorm only), optional, written
 *   y           float; or e4m3/e5m2 [M, ld] with `scale` (f32 [1], read), and optionally `scale_inv` and `amax` as in
 *               te_op_fp8_quantize: the f32 result is quantized without an intermediate rounding
 *   amax        f32 [1], optional: max(amax, max |y|), NaN left out. An FP8 y counts as the f32 result before scaling,
 *               a float y as it is stored
 *   y_amax      f32 [1], optional, for a float y and in place of amax: becomes max |y|, as by te_op_amax
 *   y_col       [N, ldc] with ldc >= M, optional, for an FP8 y and of its format: the transpose of y; columns from M on
 *               are written as 0
 *   rounded     RMSNorm: x * rstd is rounded to x's format before gamma' multiplies it (transformers' LlamaRMSNorm,
 *               torch.nn.RMSNorm) */
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

/* dx [M, N], dgamma [N] and dbeta [N] (both optional; dbeta: LayerNorm) from dy [M, N] and the forward's x [M, N],
 * gamma [N], mean f32 [M] (LayerNorm) and rstd f32 [M]. add: optional [M, N], added to dx in f32 before rounding; dx
 * may be add or dy, in the same format. rounded: dx is rounded before add is added, too, as if two stored gradients
 * were summed. accumulate: dgamma and dbeta are added to. */
typedef struct te_norm_bwd_args {
    const te_tensor *dy, *x, *gamma, *mean, *rstd, *add;
    te_tensor *dx, *dgamma, *dbeta;
    te_norm_options norm; /* as in the forward; eps is in rstd */
    bool accumulate;
    bool rounded;
} te_norm_bwd_args;
typedef te_norm_bwd_args te_op_layernorm_bwd_args; /* with mean */
typedef te_norm_bwd_args te_op_rmsnorm_bwd_args;   /* without mean and dbeta */

/* y = x * rnorm, rnorm = 1 / sqrt(sum x^2 + eps), per row of x [M, N]; rnorm f32 [M], optional. y may be x. */
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

/* Returns whether the activation is gated: reads [M, 2N] and gives [M, N]. */
TE_API bool te_activation_is_gated(te_activation activation);

/* The numbers of the clamped SwiGLU, and the column layout of gated activations. */
typedef struct te_activation_params {
    float limit; /* clamped SwiGLU: bound of the clamp; 0 => 7 */
    float alpha; /* clamped SwiGLU: factor inside the sigmoid; 0 => 1.702 */
    bool no_glu_linear_offset; /* clamped SwiGLU: nothing is added to the second half (TransformerEngine:
                                * glu_linear_offset = 0); false => 1 is added */
    int64_t glu_interleave_size; /* gated activations: the two halves alternate in blocks of this many columns, which
                                  * divides a half (of a rank's share); in modules: rows of fc1; 0 => the second half
                                  * lies behind the first. Not with `col`; in the backward not with dbias, rounded or a
                                  * padded dx */
} te_activation_params;

/* y [M, N] = act(x), with x [M, N], or [M, 2N] for a gated activation. y may be e4m3/e5m2 [M, ld], with scale,
 * scale_inv and amax as in te_norm_fwd_args. If the activation is not gated, y may be x.
 *   col   optional, e4m3/e5m2 [N, ldc]: the same codes transposed, columns M .. ldc-1 written as 0; y may be NULL then
 *   amax  f32 [1], optional: max(amax, max |y|) of the f32 numbers, before they are scaled or rounded, as in
 *         TransformerEngine (vectorized_pointwise.h). So current scaling of y needs no pass to find the amax */
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
 *   dbias       optional [N or 2N]: column sums of dx before it is rounded: the gradient of a bias that was added to x
 *   rounded     dx is rounded to x's format first: codes, amax and dbias are computed from the rounded dx; false =>
 *               from the f32 numbers
 *   unrounded_amax  amax is taken from the f32 numbers, also with `rounded`
 *   accumulate  dbias is added to */
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

/* y [M, N] = act(x) * act_scales, in f32, rounded once. act_scales [M] has one factor for each row. x [M, N], or [M,
 * 2N] for a gated activation. All have any float format. If the activation is not gated, y may be x. Source:
 * TransformerEngine, common/activation/scaled_activation.cu. */
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

/* The angles of a rotary embedding (Su et al. 2021): pair i of the channels of a token at position t turns by (t *
 * position_scale) * inv_freq[i], in f32. */
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
    const te_tensor *positions; /* i32 or i64, [s], [b, s] or [tokens] (TE_THD): the position of each token; NULL => its
                                 * place in its sequence */
    const te_tensor *freqs; /* f32 [positions, 1 or b, 1, rotary_dim]: row t has the angle of each channel of a token at
                             * position t; base, inv_freq and position_scale stay 0. The second size is b if each
                             * sequence has angles of its own (mRoPE). A position without a row is an error on the CPU,
                             * and gives NaN on a GPU. NULL => angles by frequencies. Source: TransformerEngine,
                             * apply_rotary_pos_emb(freqs) */
    int cp_size, cp_rank;  /* context parallel (at most 2^20 ranks): each sequence is 2 cp_size equal chunks, and x has
                            * chunks cp_rank and 2 cp_size - 1 - cp_rank; 0 => whole sequences. Source:
                            * TransformerEngine, fused_rope */
} te_rope_angles;

/* Rotary embedding: (u, v) -> (u cos - v sin, v cos + u sin) for each pair (u, v) of channels. With freqs each of the
 * two channels has cosine and sine of its own angle.
 *   x, y        [s, b, h, d], by `format` [b, s, h, d] or [tokens, h, d]; the channels of a head are adjacent, other
 *               strides free; y may be x
 *   angles      how far each pair turns
 *   cu_seqlens  i32 [b + 1], with TE_THD: the row at which each sequence begins; its positions are counted from there.
 *               With cp_size these are the rows of the whole sequences
 *   backward    the transposed rotation
 *   no_rope     no channel is rotated: y is a copy of x, and angles and cu_seqlens are not read */
typedef struct te_op_rope_args {
    const te_tensor *x;
    te_tensor *y;
    te_qkv_format format;
    te_rope_angles angles;
    const te_tensor *cu_seqlens;
    bool backward, no_rope;
} te_op_rope_args;

/* Splits a packed projection into q [s, b, H, d], k and v [s, b, G, d], and rotates q and k unless no_rope. With
 * `rotated` it rotates the projection without splitting it.
 *   format    TE_BSHD => b and s are exchanged in all shapes
 *   qkv   [s, b, (H + 2G) * d]; interleaved_groups: [G, (H/G q heads, k, v), d], else [Q | K | V]
 *   num_heads, num_groups, head_dim   H, G, d
 *   rotated   [s, b, (H + 2G) * d] in the order of qkv, written; q, k and v are NULL then. It may be qkv itself, and
 *             the values of v stay where they are
 *   angles    of q and k */
typedef struct te_op_qkv_rope_args {
    const te_tensor *qkv;
    te_tensor *q, *k, *v, *rotated;
    te_qkv_format format;
    int num_heads, num_groups, head_dim;
    bool interleaved_groups;
    bool no_rope;
    te_rope_angles angles;
} te_op_qkv_rope_args;
/* The gradient of te_op_qkv_rope: dqkv (field qkv, written) from dq, dk, dv (fields q, k, v, read), or from the
 * gradient of `rotated` (field rotated, read), which may be qkv itself. format, num_heads, num_groups, head_dim,
 * interleaved_groups, no_rope and angles are the forward's. */
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

/* A window of keys around each query's diagonal key, which restricts the mask further: from `left` keys before the
 * diagonal to `right` keys behind it. */
typedef struct te_window {
    bool on;             /* false => no window */
    int64_t left, right; /* numbers of keys; -1 => no bound on that side */
} te_window;

/* Returns the new score of query q_idx and key kv_idx of sequence b and head h, or the derivative of the new score by
 * `score`. Called from several threads at once; must call nothing of te.h. */
typedef float (*te_score_mod_fn)(void *user, float score, int64_t b, int64_t h, int64_t q_idx, int64_t kv_idx);
/* Returns whether query q_idx sees key kv_idx. Called from several threads at once; must call nothing of te.h. */
typedef bool (*te_mask_mod_fn)(void *user, int64_t b, int64_t h, int64_t q_idx, int64_t kv_idx);
#define TE_SCORE_MOD_AUX 4       /* the most tensors that expressions may read */
#define TE_SCORE_MOD_CHARS 1000  /* the longest expression */

/* The user's own rule for scores and masks (FlexAttention; TransformerEngine: score_mod, score_mod_bprop,
 * score_mod_tensors). It gets scores that are scaled, capped and biased, and is not called for keys that mask, window
 * or mask_mod hide. CUDA compiles the expressions into the kernels (NVRTC is needed); the CPU calls the functions: give
 * both where both are used. Zero => none.
 *   score_mod        a CUDA C++ expression: the new score, such as "score - aux0[h] * fabsf(q_idx - kv_idx)"
 *   score_mod_bprop  an expression: the derivative of the new score by score, used by the backward pass
 *   mask_mod         an expression: true where query q_idx sees key kv_idx, such as "aux0[q_idx] == aux0[kv_idx]"
 *   additive         the derivative is 1, so that no score_mod_bprop is needed. With neither a gradient is refused
 *   aux              f32, f16, bf16, i32, i64 or u8, contiguous, read only: these tensors get no gradients
 * Variables of expressions: score (float; not in mask_mod); b, h, q_idx, kv_idx (int; positions within the sequence);
 * aux0 .. aux3. aux0[i] is element i of aux[0], whatever the shape: as float, or as int for integers (i64: long long);
 * 0 where there is no element i. Expressions may use numbers, operators, true, false, float, int, INFINITY and the
 * functions abs, min, max, fminf, fmaxf, fabsf, expf, exp2f, expm1f, logf, log2f, log1pf, tanhf, sinf, cosf, sqrtf,
 * rsqrtf, powf, floorf, ceilf, truncf, rintf, fmodf, erff, copysignf; no other name, assignment or statement. tanhf has
 * a relative error of up to 6e-7. In score_mod and score_mod_bprop, if they neither compare nor round, a division by a
 * number such as 50.0f is a product with the reciprocal, within 2 ulp. */
typedef struct te_score_mod {
    const char *score_mod, *score_mod_bprop, *mask_mod; /* CUDA; NULL => none */
    te_score_mod_fn score_fn, score_bprop_fn;           /* CPU: the same as functions; NULL => none */
    te_mask_mod_fn mask_fn;                             /* CPU: mask_mod as a function */
    void *user; /* handed to the functions; user and functions are borrowed until the backward pass, or as long as a
                 * graph lives */
    bool additive;
    te_tensor *aux[TE_SCORE_MOD_AUX];
} te_score_mod;

/* The options of attention beside q, k, v and their format; te_attention, te_op_attn_fwd and te_op_attn_bwd share this
 * struct. Zero is plain causal attention; tensors are optional. len_q, len_kv: s_q and s_kv, or with a padding mask the
 * lengths of the sequence.
 *   mask             which keys a query may see; 0 => TE_MASK_CAUSAL
 *   window           beside the mask, query i sees only keys i + delta - left .. i + delta + right; not on =>
 *                    unbounded. delta is len_kv - len_q or 0: see bottom_right_diagonal
 *   softmax_scale    factor of the scores; 0 => 1 / sqrt(d)
 *   dropout_p        probability of zeroing an element of the softmax, 0 to 1
 *   softcap          scores x = scale * q k become softcap * tanh(x / softcap), before bias, ALiBi, score_mod and masks
 *                    are applied; 0 => none. Not with TE_ATTN_BIAS_PRE_SCALE
 *   bottom_right_diagonal   the diagonal of the window and of ALiBi is j = i + len_kv - len_q; off => j = i. 0 => on,
 *                           except for TE_MASK_CAUSAL and TE_MASK_PADDING_CAUSAL. These two are always off, and the
 *                           masks with BOTTOM_RIGHT always on
 *   kv_bshd          k, v and their gradients are [b, s_kv, G, d] whatever the format of q, as a KV cache is
 *   attention_mask   TE_MASK_ARBITRARY: u8, 4 dimensions, each 1 or that of [b, H, s_q, s_kv], any strides: 1 => masked
 *   cu_seqlens_q, cu_seqlens_kv   i32 [b + 1], ascending: sequence b has cu[b + 1] - cu[b] queries or keys. Padding
 *                                 masks need both. With TE_THD cu[b] is also the first row of the sequence, unless
 *                                 cu_seqlens_q_padded, cu_seqlens_kv_padded (i32 [b + 1]) give this row. Lengths that
 *                                 reach beyond the tensors are cut (wrong starts are refused on the CPU, and with
 *                                 TE_DEBUG_SYNC=1). Rows of no sequence become 0 in o, dq, dk and dv, and -inf in lse
 *   max_seqlen_q, max_seqlen_kv   TE_THD: length of the longest sequence, by which a launch is sized; longer sequences
 *                                 are cut. 0 => the number of all rows
 *   core_attention_bias   B of TE_ATTN_BIAS_PRE_SCALE and _POST_SCALE: f32, f16 or bf16 [b or 1, H or 1, s_q or 1,
 *                         s_kv], contiguous (s_q, s_kv: the longest sequences)
 *   alibi_slopes     f32 [H] or [b, H] of TE_ATTN_BIAS_ALIBI, which adds -slope * |i + len_kv - len_q - j|, or without
 *                    bottom_right_diagonal -slope * |i - j|. NULL => with n the largest power of 2 up to H: 2^(-8 k /
 *                    n) for heads k = 1 .. n, then 2^(-4 m / n) for odd m = 1, 3 ..
 *   softmax_offset   f32 [H], TE_SOFTMAX_LEARNABLE. Under every softmax_type a row without keys has o 0 and lse -inf
 *   page_table       i32 [b, n]: k and v are [pages, page_size, G, d]; key j of sequence b is row j % page_size of page
 *                    page_table[b, j / page_size]. Padding masks, forward alone
 *   block_mask       u8 [b or 1, H or 1, ceil(s_q / 128), ceil(s_kv / 128)], contiguous: a te_attn_block for each 128
 *                    queries and 128 keys (s_q, s_kv: the longest sequences). Empty blocks are skipped, forward and
 *                    backward; te_create_block_mask makes one
 *   score_mod        the user's own rule for scores and masks */
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

/* FP8 attention: the probabilities S and the gradients dP of the scores are replaced by the values of FP8 codes before
 * products read them: x becomes f32(code) * RN(1 / scale), with the code of te_op_fp8_quantize. S, after dropout, is
 * what multiplies V and dO. dP is what multiplies K and Q and is summed for the gradient of a bias. Exception: with a
 * softcap the numbers that a bias gradient sums are not rounded. The bias is added behind the cap, so they lack the
 * cap's derivative and may be larger than what dp_scale is made for. All other products are in high precision: quantize
 * q, k, v, o and their gradients outside. Zero => neither. */
typedef struct te_attn_fp8 {
    te_dtype s_dtype, dp_dtype;   /* e4m3 or e5m2; 0 => S, or dP, stays as it is. Only the backward pass reads
                                   * dp_dtype */
    te_tensor *s_scale, *dp_scale; /* f32 [1], read; in the backward pass s_scale is that of the forward pass */
    te_tensor *s_amax, *dp_amax;  /* f32 [1], optional, become max(amax, the largest magnitude of S or dP): s_amax in
                                   * the forward pass, dp_amax in the backward pass */
} te_attn_fp8;

/* O = softmax(scale * Q K^T, masked) V, without storing the score matrix.
 *   q, o  [s_q, b, H, d]; format TE_BSHD: b first; TE_THD: [tokens, H, d], sequence behind sequence, with a padding
 *         mask
 *   k, v  likewise [s_kv, b, G, d]; v may have another head size than q and k. Head h uses group h / (H / G). All four
 *         may have any strides, last dimension contiguous. d up to 1024; above 256 by general kernels, which read
 *         chunks of 256 channels
 *   lse   f32 [b, H, s_q], or [H, tokens]: log of the sum of exp of the scores (scaled, capped, biased and masked),
 *         -inf for a row that sees no key (its o is 0)
 *   max_logit   f32 [H], optional, written: the largest score of each head, scaled, capped, biased and masked; -inf if
 *               no row sees a key
 *   rule.dropout_p   probability p of zeroing an element of P, rounded to a multiple of 1/65536 below 1/64 and of
 *                    1/4096 above; a p below 1 becomes 4095/4096 at most. Kept elements are divided by 1 - p, with the
 *                    rounded p. Each element has a 16-bit random number, and is kept if that number is at least 65536
 *                    p. Bit n of the number of element [b, h, i, j] is bit j % 32 of word n % 4 of block 4 w + n / 4 of
 *                    Philox4x32-7 at (seed, offset) and rng, with w = ((b*H + h)*s_q + i)*ceil(s_kv/32) + j/32 (TE_THD:
 *                    the longest sequences for s_q and s_kv) */
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

/* dq, dk, dv (shapes of q, k, v) from d_o (shape of o) and the q, k, v, o, lse of the forward, with the same format,
 * rule, seed, offset and rng. Optional: dbias, the gradient of core_attention_bias in its shape, f32, f16 or bf16;
 * dsoftmax_offset f32 [H], the gradient of softmax_offset. With fp8, o may be NULL: O was made of other values than S,
 * so the sum over the keys of S times its gradient is computed directly. Deterministic. */
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

/* Attention in which each query reads the keys of its own list. All heads share one head of keys, and keys are also the
 * values (DeepSeek-V4):
 *   o = sum over slots k of p_k kv[idx_k],  p_k = e^(s_k - m) / (sum e^(s_k - m) + e^(sink - m)),
 *   s_k = scale q kv[idx_k],  m = max(s, -1e30), all in f32
 * Tensors:
 *   q        [b, s_q, H, d], any strides, channels adjacent; d up to 576
 *   kv       [b, s_kv, d], likewise. A value is the first d_v channels of its key
 *   indices  i32 [b, s_q, n]: the rows of kv that a query reads, in any order. A number outside 0 .. s_kv - 1, such as
 *            -1, is an empty slot; a row that is named twice counts twice. Packed sequences: b = 1, and indices count
 *            the rows of all of kv. b s_q n and b s_kv are below 2^31
 *   sinks    f32 [H], optional: e^(sink - m) is in the denominator
 *   o        [b, s_q, H, d_v], any float format, usually q's; d_v up to d. 0 where every slot is empty
 *   lse      f32 [b, H, s_q], optional: m + the logarithm of the denominator; for a query without keys sink, or -inf
 *            without sinks
 * Source: nemo_automodel.components.models.deepseek_v4 (sparse attention). */
typedef struct te_op_sparse_attn_fwd_args {
    const te_tensor *q, *kv, *indices, *sinks;
    te_tensor *o, *lse;
    float softmax_scale; /* 0 => 1 / sqrt(d) */
} te_op_sparse_attn_fwd_args;
/* dq and dkv (shapes of q and kv; dkv is the sum of the gradients of keys and values), and dsinks f32 [H] (optional;
 * needs sinks) from d_o (shape of o) and the forward's q, kv, indices, sinks, o, lse and softmax_scale. Each sum has a
 * fixed order: the gradient of a key is summed over the queries that read it, ascending. CUDA: a workspace of 4 bytes
 * for each slot of indices, 8 for each query and head, and up to 260 for each key. */
typedef struct te_op_sparse_attn_bwd_args {
    const te_tensor *q, *kv, *indices, *sinks, *o, *lse, *d_o;
    te_tensor *dq, *dkv, *dsinks;
    float softmax_scale;
} te_op_sparse_attn_bwd_args;

/* ---- kv ------------------------------------------------------------------------------------------------------ */

/* cu_seqlens i32 [b + 1] from a padding mask u8 [b, .., s] (1 => padding, behind the tokens of a sequence): entry 0 is
 * 0, entry i + 1 the number of tokens in sequences 0 .. i. */
typedef struct te_op_cu_seqlens_args {
    const te_tensor *mask;
    te_tensor *cu_seqlens;
} te_op_cu_seqlens_args;

/* Writes keys and values of new tokens into a cache, beside those that are there.
 *   k, v      [s, b, G, d], or by `format` [b, s, G, d] or [tokens, G, d]; channels adjacent; v may have another d
 *   k_cache, v_cache   [b, s, G, d]; with page_table [pages, page_size, G, d]; channels adjacent; in any of the float
 *                      formats, rounded to nearest even
 *   cu_seqlens         i32 [b + 1]: sequence b has cu[b + 1] - cu[b] new tokens, its first rows of k; with TE_THD the
 *                      rows from cu[b] on
 *   start_positions    i32 [b]: the place in the cache of the first new token of each sequence
 *   page_table         optional i32 [b, n]: token i of sequence b is row i % page_size of page page_table[b, i /
 *                      page_size]
 * Tokens beyond the cache are dropped (on the CPU, refused). Pages that no new token goes to are not looked at. */
typedef struct te_op_copy_to_kv_cache_args {
    const te_tensor *k, *v;
    te_tensor *k_cache, *v_cache;
    te_qkv_format format;
    const te_tensor *cu_seqlens, *start_positions;
    const te_tensor *page_table;
} te_op_copy_to_kv_cache_args;

/* causal i32 [1] = 1 if mask [b, H, s, s], of any strides, is that of causal attention with a window, else 0. A key is
 * visible where an f32, f16 or bf16 mask, which is added to scores, is above -10000, or a u8 mask is not 0.
 *   window   (left, 0): row i sees keys i - left .. i; not on, or left below 0: keys 0 .. i
 *   strict   every element is checked: visible ones are 0 (u8: not 0), masked ones below -10000 (u8: 0). false => NeMo
 *            Automodel's checks. In head 0 of each sequence the first row must see one key, and the last row as many as
 *            it should. In sequence 0 the first row must see the first key and have the last key below -10000. A mask
 *            [1, 1, 1, 1] never passes these. Source: nemo_automodel._transformers.te_attention, _detect_causal_mask */
typedef struct te_op_detect_causal_mask_args {
    const te_tensor *mask;
    te_tensor *causal;
    te_window window;
    bool strict;
} te_op_detect_causal_mask_args;

/* ---- context ------------------------------------------------------------------------------------------------- */

/* Makes the i32 map between the rows of all ranks and the rows of sequences that these ranks share
 * (te_parallel_options.cp_group).
 *   map         map[r * rows / ranks + i] is the row, in the order of the sequences, of local row i of rank r;
 *               `inverse`: the inverse map. As row_id_map of te_op_moe_permute with topk 1, the map puts rows of all
 *               ranks, rank behind rank, in the order of the sequences; the inverse map undoes this
 *   cu_seqlens  optional i32 [b + 1]: the first row of each sequence, all multiples of 2 * ranks; NULL => `sequences`
 *               of equal length. Rows behind the last sequence are shared evenly
 *   share       the numbers in cu_seqlens are divided by this: besides the `ranks` of the map, `share` ranks share each
 *               sequence; 0 => 1
 * Lengths that cannot be shared are refused on the CPU; on a GPU their rows stay where they are. */
typedef struct te_op_context_rows_args {
    const te_tensor *cu_seqlens;
    te_tensor *map;
    int64_t sequences; /* 0 => 1; without cu_seqlens */
    int ranks, share;
    bool inverse;
} te_op_context_rows_args;

/* The lengths and first rows, as te_attn_rule takes them, of the part of packed sequences that lies in some of their
 * chunks.
 *   cu_seqlens         i32 [b + 1]: the tokens of whole sequences, added up
 *   cu_seqlens_padded  optional i32 [b + 1]: the first row of each sequence, padding included, at multiples of 2 *
 *                      ranks; NULL => cu_seqlens
 *   lengths            i32 [b + 1], written: 0, then the tokens in these chunks, added up
 *   starts             i32 [b + 1], written: the first row of these chunks in each sequence, counted in the rows of
 *                      rank `rank`, or in all rows with TE_CHUNKS_UP_TO; the last entry is the end
 *   rank               with TE_CHUNKS_UP_TO: the number of chunks, up to 2 * ranks */
typedef struct te_op_context_lengths_args {
    const te_tensor *cu_seqlens, *cu_seqlens_padded;
    te_tensor *lengths, *starts;
    int ranks, rank;
    te_context_chunks chunks;
} te_op_context_lengths_args;

/* Merges two attentions of the same queries, to different keys: with L = log(exp(lse) + exp(x_lse)), o = o exp(lse - L)
 * + x exp(x_lse - L), then lse = L, in f32. Without lse and x_lse: o += x.
 *   x, o          [s, b, H, d] (format TE_BSHD: b first; TE_THD: [tokens, H, d]), any strides, the last dimension
 *                 contiguous
 *   x_lse, lse    f32 [b, H, s], or [1, H, tokens]; lse with any strides
 *   x_max_logit, max_logit   optional, both or neither, f32 [H]: max_logit becomes the larger one */
typedef struct te_op_context_merge_args {
    const te_tensor *x, *x_lse, *x_max_logit;
    te_tensor *o, *lse, *max_logit;
    te_qkv_format format;
} te_op_context_merge_args;

/* ---- softmax ------------------------------------------------------------------------------------------------- */

/* y = softmax(scale * x) over the last dimension of x [.., s_q, s_k]. y may be x.
 *   mask    optional u8 [b or 1, 1, s_q, s_k], for x [b, h, s_q, s_k]: where it is not 0, -10000 replaces scale * x. A
 *           row with no larger number gives zeros, as in TransformerEngine
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

/* y = cap * tanh(x / cap). With dy, of x's shape, the gradient instead: y = dy * (1 - tanh(x / cap)^2). y may be x or
 * dy. cap is positive. */
typedef struct te_op_softcap_args {
    const te_tensor *x, *dy;
    te_tensor *y;
    float cap;
} te_op_softcap_args;

/* ---- dropout ------------------------------------------------------------------------------------------------- */

/* y = residual + keep(x + bias) / (1 - p), in f32, rounded once; keep(..) is its argument or 0. bias [N], residual [..,
 * N] optional. y may be x or residual. Element i is kept if the Philox uniform of (seed, offset) and rng at i is >= p;
 * p = 0 draws nothing. run > 1: element i uses the uniform at i / run, so `run` neighbours share it. */
typedef struct te_op_dropout_add_fwd_args {
    const te_tensor *x, *bias, *residual;
    te_tensor *y;
    float p;
    int64_t run; /* 0 => 1 */
    uint64_t seed, offset;
    const te_tensor *rng;
} te_op_dropout_add_fwd_args;
/* dx = keep(dy) / (1 - p), with the forward's p, run, seed, offset and rng; dx may be dy. (The gradient of residual is
 * dy, the gradient of bias the column sums of dx.) */
typedef struct te_op_dropout_add_bwd_args {
    const te_tensor *dy;
    te_tensor *dx;
    float p;
    int64_t run; /* 0 => 1 */
    uint64_t seed, offset;
    const te_tensor *rng;
} te_op_dropout_add_bwd_args;
