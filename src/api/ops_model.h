/* api/ops_model.h: the args of the raw operations that models are made of, and, at the end, the functions of all
 * operations; the rules of api/ops.h hold. */

/* ---- gemm ---------------------------------------------------------------------------------------------------- */

/* D [m, n] = epilogue(alpha * scale_a * scale_b * op(A) op(B) + bias) + (accumulate ? D : 0), accumulated in f32.
 *   A        a: [m, lda], or with a_transposed [k, lda];  op(A) is m x k
 *   B        b: [k, ldb], or with b_transposed [n, ldb], the layout of a weight;  op(B) is k x n
 *   formats  f32 (as TF32 on tensor cores; exact on the CPU, and with exact_f32 of the context), f16, bf16, alike for A
 *            and B; e4m3/e5m2 in any mix but e5m2 x e5m2; e2m1 x e2m1. FP8 and FP4 operands are K-major (A not
 *            transposed, B transposed), except that the column-wise copies of MXFP8, which are not transposed in
 *            memory, are MN-major (A transposed, B not transposed).
 *   D        d: f32, f16 or bf16 [m, ldd]
 *   bias     [n] of any float format, optional
 *   scaling  scaling_a and scaling_b, the layouts of scale_a and scale_b (alike, or BLOCK_1D and BLOCK_2D; BLOCK_2D x
 *            BLOCK_2D is refused):
 *            TENSOR   f32 [1], optional (1): the scale_inv of FP8 operands
 *            BLOCK    f32, the scale_inv of te_op_block_quantize for that copy; the sums of each 128 k are scaled and
 *                     added in f32
 *            MXFP8    e8m0, as te_op_mxfp8_quantize wrote them
 *            NVFP4    e4m3, as te_op_nvfp4_quantize wrote them, and amax_a, amax_b f32 [1], or [m] and [n] when
 *                     row-scaled; the product is multiplied by amax_a * amax_b / (6 F)^2. k of a transformed copy is
 *                     its padded one, round_up(M, 16).
 *   swizzled_scales    MXFP8, NVFP4: both in the swizzled layout
 *   aux      [m, n] of D's format
 *   bias_gradient  [n] of any float format, optional: the sums of D's columns as stored, in f32. D is contiguous then,
 *                  and not accumulated
 *   split_accumulator  promote partial sums to full f32 regularly; false allows the tensor core's own accumulator.
 *                      BLOCK always does.
 * MXFP8 and NVFP4 operands are decoded into bf16 where tensor cores do not read them: exactly, but for digits below
 * bf16's last bit, 2^-133. That takes a workspace of up to 2 (m + n) k bytes, rows rounded up; for small m or n with
 * both operands K-major, mostly none. sm_90: an operand whose rows do not begin at multiples of 16 bytes may be copied
 * into a workspace of its size first. te_explain gives the workspace of a call. k == 0 => D = bias (or D stays when
 * accumulating); m or n == 0 => nothing is written but bias_gradient, which becomes 0. m, n, k are given because the
 * tensors may be padded or have more dimensions. */
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

/* Products of many matrices at once, one for each group (an expert and its tokens), whose sizes only the device knows:
 * no host wait.
 *   along rows  D rows of g = epilogue(scale_a scale_b op(A) rows of g times op(B[g]) + bias[g]) + ...: a forward pass,
 *               or its dgrad. A [m, lda]: the rows of group 0, then those of group 1, ...; D [m, ldd] likewise. B
 *               [groups, n, ldb] (b_transposed) or [groups, k, ldb]; bias [groups, n], optional; aux [m, n] of D's
 *               format
 *   along_k     D[g] = scale_a scale_b op(A) op(B) over the values of k of g + ...: wgrad. op(A) m x k, op(B) k x n: as
 *               te_op_gemm's, k being that of all groups; D [groups, m, ldd]. No bias, no epilogue. D[g] of an empty
 *               group is 0, or stays when accumulating
 *   sizes       i32 or i64 [groups]: rows, or values of k, of each group: any numbers from 0 up, no padding;
 *   offsets     or, in their place, i32 or i64 [groups + 1], ascending: the start of each group, and the last one's end
 *   m, n, k     m (along_k: k) is an upper bound of the sum of sizes: rows beyond the last group are neither read nor
 *               written. Sizes that exceed it or are negative are cut to m and to 0: nothing beyond the tensors is
 *               touched
 *   formats     A and B f32, f16, bf16 (alike), or e4m3/e5m2 in any mix but e5m2 x e5m2, contiguous along k. FP8
 *               along_k takes plain transposed copies, [m, lda] and [n, ldb]: groups start at any column. D f32, f16,
 *               bf16
 *   scaling     TENSOR: scale_a, scale_b f32 [1] or [groups], optional. Along rows also A BLOCK_1D with B BLOCK_2D:
 *               scale_a as te_op_block_quantize writes it for all of A, scale_b [groups, ceil(n / 128), round_up(ceil(k
 *               / 128), 4)]. along_k also BLOCK_1D with BLOCK_1D, each as te_op_block_quantize writes it: groups begin
 *               at multiples of 128 values of k then, since a block has one scale
 * a, b, d, a_transposed, b_transposed, accumulate, split_accumulator and epilogue are those of te_op_gemm. */
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

/* Of every module with a norm, and of the operations of norms. */
typedef struct te_norm_options {
    te_normalization normalization; /* 0 => LayerNorm */
    float eps;                      /* added to the variance; 0 => 1e-5 */
    bool zero_centered_gamma;       /* the norm multiplies by 1 + weight, and the weight starts at 0 */
} te_norm_options;

/* y = (x - mean) * rstd * gamma' + beta, per row of [M, N]; gamma' = gamma + 1 if norm.zero_centered_gamma.
 * RMSNorm: mean = 0, rstd = rsqrt(mean(x^2) + eps), no beta.
 *   mean, rstd  f32 [M] (mean: LayerNorm only), optional
 *   y           float; or e4m3/e5m2 [M, ld] with `scale` (f32 [1], read), and optionally `scale_inv` and `amax` as in
 *               te_op_fp8_quantize: the f32 result is quantized without an intermediate rounding
 *   amax        f32 [1], optional: max(amax, max |y|), of FP8 before scaling, else of y as it is stored; NaN left out
 *   y_amax      f32 [1], for a float y and in place of amax, optional: becomes max |y|, as by te_op_amax
 *   y_col       for an FP8 y, of its format, [N, ldc] with ldc >= M, optional: the transpose of y; columns from M on
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

/* dx [M, N], dgamma [N], dbeta [N] (both optional; dbeta: LayerNorm) from dy [M, N] and the forward's x [M, N], gamma
 * [N], mean f32 [M] (LayerNorm) and rstd f32 [M]. add: optional [M, N], added to dx in f32 before rounding; dx may be
 * add or dy, if their formats are the same. rounded: dx is rounded before that as well: the sum of two stored
 * gradients. accumulate: dgamma and dbeta are added to. */
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

/* Does the activation read [M, 2N] and give [M, N]? */
TE_API bool te_activation_is_gated(te_activation activation);

/* Numbers of an activation that has any: the clamped SwiGLU; and the layout of gated ones. */
typedef struct te_activation_params {
    float limit; /* 0 => 7 */
    float alpha; /* 0 => 1.702 */
    bool no_glu_linear_offset; /* clamped SwiGLU: nothing is added to the second half (TransformerEngine:
                                * glu_linear_offset = 0); false => 1 is */
    int64_t glu_interleave_size; /* columns of the halves alternate in blocks of this size, which divides a half (of a
                                  * rank's share); in modules: rows of fc1; 0 => one half behind the other */
} te_activation_params;

/* y [M, N] = act(x), x [M, N] or gated [M, 2N]. y may be e4m3/e5m2 [M, ld], with scale, scale_inv and amax as in
 * te_norm_fwd_args; or x, of what is not gated.
 *   col   optional, e4m3/e5m2 [N, ldc]: the same codes transposed, columns M .. ldc-1 written as 0; y may be NULL then
 *   amax  f32 [1], optional: max(amax, max |y|) of the f32 numbers, before they are scaled or rounded, as
 *         TransformerEngine has it (vectorized_pointwise.h):
 *         current scaling of y needs no pass of its own to find it
 *   activation_params.glu_interleave_size  gated: columns of x are a block of the first half, the same block of the
 *         second, the next block of the first ...; the columns of a block, which divide N; 0 => N: one half behind the
 *         other. Not with col, and in the backward not with dbias, rounded or a padded dx */
typedef struct te_op_act_fwd_args {
    const te_tensor *x;
    te_tensor *y;
    te_activation activation;               /* needed */
    te_activation_params activation_params; /* its numbers */
    const te_tensor *scale;
    te_tensor *scale_inv, *amax;
    te_tensor *col;
} te_op_act_fwd_args;

/* dx = dy * act'(x), the shape of x, and may be x, or dy of what is not gated; or e4m3/e5m2 [M, ld], with scale,
 * scale_inv, amax and col [N or 2N, ldc] as in the forward.
 *   dbias       optional [N or 2N]: the sums of dx's columns, before it is rounded: the gradient of a bias that was
 *               added to x
 *   rounded     dx is rounded to x's format first: codes, amax and dbias are those of a dx in that format; otherwise of
 *               the f32 numbers
 *   unrounded_amax  the amax is that of the f32 numbers, also with `rounded`
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

/* y [M, N] = act(x) times act_scales, one number for each row, in f32, rounded once. x [M, N] or gated [M, 2N];
 * act_scales [M]; all of any float format. y may be x of what is not gated.
 * Source: TransformerEngine, common/activation/scaled_activation.cu. */
typedef struct te_op_scaled_act_fwd_args {
    const te_tensor *x, *act_scales;
    te_tensor *y;
    te_activation activation;               /* needed */
    te_activation_params activation_params; /* as in te_op_act_fwd */
} te_op_scaled_act_fwd_args;
/* dx = (dy * act_scales) * act'(x), the shape of x, and may be x, or dy of what is not gated; dact_scales: optional [M]
 * of any float format, the sums of dy * act(x) over each row, in f32. */
typedef struct te_op_scaled_act_bwd_args {
    const te_tensor *dy, *x, *act_scales;
    te_tensor *dx, *dact_scales;
    te_activation activation;               /* needed */
    te_activation_params activation_params; /* as in the forward */
} te_op_scaled_act_bwd_args;

/* ---- rope ---------------------------------------------------------------------------------------------------- */

/* The angles of a rotary embedding (Su et al. 2021): pair i of channels of a token at position t turns by (t *
 * position_scale) * inv_freq[i], in f32. */
typedef struct te_rope_angles {
    float base;            /* inv_freq[i] is base^(-2i / rotary_dim); 0 => 10000 */
    const float *inv_freq; /* [rotary_dim / 2] in host memory, read during the call: frequencies in place of those
                            * (te_rope_frequencies makes them); NULL => by base */
    int rotary_dim;        /* the first rotary_dim channels are rotated, the rest pass through; even, at most 1024; 0 =>
                            * d, or the size of freqs */
    bool interleaved;      /* channels 2i and 2i + 1 are a pair; false => i and i + rotary_dim / 2 */
    float position_scale;  /* 0 => 1 */
    float attention_factor; /* multiplies cosine and sine; 0 => 1 */
    int64_t position_offset; /* added to every position, at most 2^53 in magnitude */
    const te_tensor *start_positions; /* i32 [b], added to each sequence's positions; NULL => 0 */
    const te_tensor *positions; /* i32 or i64, [s], [b, s] or [tokens] (TE_THD): a token's position; NULL => its place
                                 * in its sequence */
    const te_tensor *freqs; /* f32 [positions, 1 or b, 1, rotary_dim]: the angle of each channel of a token, row t for a
                             * token at position t, in place of base, inv_freq and position_scale, which stay 0; the
                             * second size is b where sequences have angles of their own (mRoPE). A position without a
                             * row is an error on the CPU, and NaN on a GPU. NULL => angles by frequencies. Source:
                             * TransformerEngine, apply_rotary_pos_emb(freqs) */
    int cp_size, cp_rank;  /* context parallel (at most 2^20 ranks): of 2 cp_size equal chunks of each sequence, x has
                            * numbers cp_rank and 2 cp_size - 1 - cp_rank; 0 => whole sequences. Source:
                            * TransformerEngine, fused_rope */
} te_rope_angles;

/* Rotary embedding: (x, y) -> (x cos - y sin, y cos + x sin) of each pair of channels; with freqs each of the two has
 * cosine and sine of its own angle.
 *   x, y        [s, b, h, d], by `format` [b, s, h, d] or [tokens, h, d]; the channels of a head adjacent, other
 *               strides free; y may be x
 *   angles      how far each pair turns
 *   cu_seqlens  i32 [b + 1], with TE_THD: the row that each sequence begins at, and at which its positions begin anew;
 *               with cp_size those of the whole sequences
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

/* Splits a packed projection into q [s, b, H, d], k and v [s, b, G, d], rotating q and k unless no_rope; or rotates it
 * as it lies.
 *   format    TE_BSHD => b and s are exchanged in all
 *   qkv   [s, b, (H + 2G) * d]; interleaved_groups: [G, (H/G q heads, k, v), d], else [Q | K | V]
 *   num_heads, num_groups, head_dim   H, G, d
 *   rotated   in the place of q, k and v, which are NULL then: [s, b, (H + 2G) * d] in the order of qkv. It may be qkv
 *             itself: v's values stay where they are
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
/* The gradient: dqkv (`qkv`, written) from dq, dk, dv (`q`, `k`, `v`, read), or from that of `rotated`, which may be
 * qkv itself. format, num_heads, num_groups, head_dim, interleaved_groups, no_rope and angles are the forward's. */
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

/* The keys that a query sees beside its mask: from `left` before it to `right` behind it, both counted from the
 * diagonal of the window. */
typedef struct te_window {
    bool on;             /* false => no window */
    int64_t left, right; /* numbers of keys; -1 => no bound on that side */
} te_window;

/* The new score of row q_idx and key kv_idx of sequence b and head h, or its derivative by `score`. Called from several
 * threads at once; calls nothing of te.h. */
typedef float (*te_score_mod_fn)(void *user, float score, int64_t b, int64_t h, int64_t q_idx, int64_t kv_idx);
/* Does the row see the key? As above. */
typedef bool (*te_mask_mod_fn)(void *user, int64_t b, int64_t h, int64_t q_idx, int64_t kv_idx);
#define TE_SCORE_MOD_AUX 4       /* tensors that expressions may read */
#define TE_SCORE_MOD_CHARS 1000  /* the longest expression */

/* The user's own rule for scores and masks (FlexAttention; TransformerEngine: score_mod, score_mod_bprop,
 * score_mod_tensors). The score that it changes is scaled, capped and has its bias; a key that mask, window or mask_mod
 * hide is not asked about. CUDA compiles the expressions into the kernels (NVRTC is needed); the CPU calls the
 * functions: give both where both are used. Zero => none.
 *   score_mod        a CUDA C++ expression of the new score, such as "score - aux0[h] * fabsf(q_idx - kv_idx)"
 *   score_mod_bprop  one of its derivative by score, read by the backward pass
 *   mask_mod         one that is true where row q_idx sees key kv_idx, such as "aux0[q_idx] == aux0[kv_idx]"
 *   Their variables: score (float; not in mask_mod), b, h, q_idx, kv_idx (int; positions within the sequence), and aux0
 *   .. aux3: aux0[i] is element i of aux[0], whatever its
 *   shape, as float or, of integers, int (i64: long long), and 0 where there is no such element. They may use numbers,
 *   operators, true, false, float, int, INFINITY and the
 *   functions abs, min, max, fminf, fmaxf, fabsf, expf, exp2f, expm1f, logf, log2f, log1pf, tanhf, sinf, cosf, sqrtf,
 *   rsqrtf, powf, floorf, ceilf, truncf, rintf, fmodf, erff,
 *   copysignf; no other name, assignment or statement. tanhf is within 6e-7 of tanh, relative to it. A division by a
 *   number such as 50.0f is a product with the reciprocal, within 2 ulp, in score_mod
 *   and score_mod_bprop where they have no comparison and do not round
 *   additive         the derivative is 1: no score_mod_bprop is needed. Without both a gradient is refused
 *   aux              f32, f16, bf16, i32, i64 or u8, contiguous, read only: they get no gradients */
typedef struct te_score_mod {
    const char *score_mod, *score_mod_bprop, *mask_mod; /* CUDA; NULL => none */
    te_score_mod_fn score_fn, score_bprop_fn;           /* CPU: the same as functions; NULL => none */
    te_mask_mod_fn mask_fn;                             /* CPU: mask_mod as a function */
    void *user; /* handed to these; with the functions borrowed until the backward pass, or as long as a graph lives */
    bool additive;
    te_tensor *aux[TE_SCORE_MOD_AUX];
} te_score_mod;

/* All that attention is told beside q, k, v and their format: te_attention and both operations have this one struct.
 * Zero is causal attention alone; tensors are optional.
 *   mask             which keys a query may see; 0 => TE_MASK_CAUSAL
 *   window           on top of the mask: keys i + delta - left .. i + delta + right are visible; not on => unbounded;
 *                    delta = len_kv - len_q or 0: see bottom_right_diagonal
 *   softmax_scale    factor of the scores; 0 => 1 / sqrt(d)
 *   dropout_p        probability of zeroing an element of the softmax, 0 to 1
 *   softcap          scores x = scale * q k become softcap * tanh(x / softcap), before a bias or ALiBi is added,
 *                    score_mod is asked and masks hide; 0 => none. Not with TE_ATTN_BIAS_PRE_SCALE
 *   bottom_right_diagonal   the window's diagonal, and that of ALiBi, is j = i + len_kv - len_q, not j = i. 0 => on,
 *                    but for TE_MASK_CAUSAL and TE_MASK_PADDING_CAUSAL, which always have j = i; masks with
 *                    BOTTOM_RIGHT always have the other one. len_q, len_kv: s_q and s_kv, or under a padding mask the
 *                    sequence's own lengths
 *   kv_bshd          k and v are [b, s_kv, G, d] whatever the format of q, as a KV cache is; also their gradients
 *   attention_mask   u8, 4 dimensions, each 1 or that of [b, H, s_q, s_kv], any strides: 1 => the key is masked;
 *                    TE_MASK_ARBITRARY
 *   cu_seqlens_q, cu_seqlens_kv   i32 [b + 1], ascending: sequence b has cu[b + 1] - cu[b] queries or keys; padding
 *                    masks, which need both. With TE_THD cu[b] is also its first row, unless cu_seqlens_q_padded,
 *                    cu_seqlens_kv_padded (i32 [b + 1]) say where it lies. Lengths are cut at what memory there is
 *                    (wrong starts are refused on the CPU, and with TE_DEBUG_SYNC=1); other rows of o, dq, dk and dv
 *                    become 0, and those of lse -inf
 *   max_seqlen_q, max_seqlen_kv   TE_THD: the longest sequence, for which there are blocks of a launch; 0 => as long as
 *                                 all rows. Longer ones are cut
 *   core_attention_bias   B of TE_ATTN_BIAS_PRE_SCALE and _POST_SCALE: f32, f16 or bf16 [b or 1, H or 1, s_q or 1,
 *                    s_kv], contiguous (s_q, s_kv: the longest sequences)
 *   alibi_slopes     f32 [H] or [b, H] of TE_ATTN_BIAS_ALIBI, which adds -slope * |i + len_kv - len_q - j| (|i - j|:
 *                    bottom_right_diagonal); NULL => with n the largest power of 2 up to H: 2^(-8 k / n) for heads k =
 *                    1 .. n, then 2^(-4 m / n) for odd m = 1, 3 ..
 *   softmax_offset   f32 [H], TE_SOFTMAX_LEARNABLE. A row that sees no key has o 0 and lse -inf under every type
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

/* FP8 attention: the probabilities S, and the gradients dP of the scores, are replaced by the values of FP8 codes
 * before their products read them: x becomes f32(code) * RN(1 / scale) with the code of te_op_fp8_quantize. S is what
 * multiplies V and dO, after dropout; dP what multiplies K and Q, and what the gradient of a bias sums up. Under a
 * softcap the latter is not rounded: a bias is added behind the cap, so its numbers lack the cap's derivative, and may
 * be larger than those that dp_scale is made for. Products of all else are in high precision: quantize q, k, v, o and
 * their gradients outside. Zero => neither. */
typedef struct te_attn_fp8 {
    te_dtype s_dtype, dp_dtype;   /* e4m3 or e5m2; 0 => S, or dP, stays as it is. dp_dtype is read by the backward pass
                                   * alone */
    te_tensor *s_scale, *dp_scale; /* f32 [1], read; in the backward pass s_scale is that of the forward pass */
    te_tensor *s_amax, *dp_amax;  /* f32 [1], optional: max(itself, the largest magnitude of S or dP); s_amax is the
                                   * forward pass's, dp_amax the backward pass's */
} te_attn_fp8;

/* O = softmax(scale * Q K^T, masked) V, never materialising the score matrix.
 *   q, o  [s_q, b, H, d], k, v [s_kv, b, G, d] (format TE_BSHD: b first; TE_THD: [tokens, H, d] and [tokens, G, d],
 *         sequence behind sequence, under a padding mask); any strides, the last dimension contiguous; head h uses
 *         group h / (H / G); d up to 1024, above 256 by general kernels, which read chunks of 256 channels; v may have
 *         another head size than q and k
 *   lse   f32 [b, H, s_q], or [H, tokens]: log of the sum of exp of the scores (scaled, capped, biased and masked),
 *         -inf for a row that sees no key (its o is 0)
 *   rule.dropout_p   probability p of zeroing an element of P, rounded to a multiple of 1/65536 where it is below 1/64,
 *         else of 1/4096; a p below 1 becomes 4095/4096 at most. The others are divided by 1 - p, of the rounded p.
 *         Each element has a number of 16 bits, and is kept if that is at least 65536 p. Bit n of the number of element
 *         [b, h, i, j] is bit j % 32 of word n % 4 of block 4 w + n / 4 of Philox4x32-7 at (seed, offset) and rng, w =
 *         ((b*H + h)*s_q + i)*ceil(s_kv/32) + j/32 (TE_THD: the longest sequences for s_q and s_kv)
 *   max_logit   f32 [H], optional, written: the largest score of each head, scaled, capped, biased and masked; -inf if
 *               no row sees a key */
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

/* dq, dk, dv (shapes of q, k, v) from d_o (shape of o) and the q, k, v, o, lse of the forward, with its format, rule,
 * seed, offset and rng. Optional: dbias, the gradient of core_attention_bias, in its shape, f32, f16 or bf16;
 * dsoftmax_offset, that of softmax_offset, f32 [H]. With fp8, o may be NULL: what the other kernels take from O and dO,
 * the sum of S times its gradient, is then summed over the keys, for O is made of other values than S.
 * Deterministic. */
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

/* Attention in which each query reads the keys of a list of its own, and all heads share one head of keys, which are
 * the values, too (DeepSeek-V4):
 *   o = sum over slots k of p_k kv[idx_k],  p_k = e^(s_k - m) / (sum e^(s_k - m) + e^(sink - m)),
 *   s_k = scale q kv[idx_k],  m = max(s, -1e30), all in f32
 *   q        [b, s_q, H, d], any strides, channels adjacent; d up to 576
 *   kv       [b, s_kv, d], likewise. A value is the first d_v channels of its key
 *   indices  i32 [b, s_q, n]: the rows of kv that a query reads, in any order. -1, and any other number outside of 0 ..
 *            s_kv - 1, is an empty slot; a row that is named twice counts twice. Packed sequences: b = 1 and rows of
 *            all of kv. b s_q n and b s_kv are below 2^31
 *   sinks    f32 [H], optional: e^(sink - m) is in the denominator
 *   o        [b, s_q, H, d_v], any float format, usually q's; d_v up to d. 0 where every slot is empty
 *   lse      f32 [b, H, s_q], optional: the logarithm of the denominator, m added; of a query without keys sink, or
 *            -inf without sinks
 * Source: nemo_automodel.components.models.deepseek_v4 (sparse attention). */
typedef struct te_op_sparse_attn_fwd_args {
    const te_tensor *q, *kv, *indices, *sinks;
    te_tensor *o, *lse;
    float softmax_scale; /* 0 => 1 / sqrt(d) */
} te_op_sparse_attn_fwd_args;
/* dq and dkv (shapes of q and kv; the gradients of keys and values are added up), and dsinks f32 [H] (optional; sinks
 * are needed) from d_o (shape of o) and the forward's q, kv, indices, sinks, o, lse and softmax_scale. Each sum has one
 * order: the gradient of a key is summed over the queries that read it, ascending. CUDA: a workspace of 4 bytes for
 * each slot of indices, 8 for each query and head, and up to 260 for each key. */
typedef struct te_op_sparse_attn_bwd_args {
    const te_tensor *q, *kv, *indices, *sinks, *o, *lse, *d_o;
    te_tensor *dq, *dkv, *dsinks;
    float softmax_scale;
} te_op_sparse_attn_bwd_args;

/* ---- kv ------------------------------------------------------------------------------------------------------ */

/* cu_seqlens i32 [b + 1] from a padding mask, u8 [b, .., s] (1 => padding, behind a sequence's tokens): 0, and behind
 * each sequence the number of tokens so far. */
typedef struct te_op_cu_seqlens_args {
    const te_tensor *mask;
    te_tensor *cu_seqlens;
} te_op_cu_seqlens_args;

/* Keys and values of new tokens into a cache, beside those that are there.
 *   k, v      [s, b, G, d], or by `format` [b, s, G, d] or [tokens, G, d]; channels adjacent; v may have another head
 *             size
 *   k_cache, v_cache   [b, s, G, d]; with page_table [pages, page_size, G, d]; channels adjacent; in any of the float
 *                      formats, rounded to nearest even
 *   cu_seqlens         i32 [b + 1]: sequence b has cu[b + 1] - cu[b] new tokens, its first rows of k; with TE_THD those
 *                      from cu[b] on
 *   start_positions    i32 [b]: the place of the first of them in the cache
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
 *   strict   every element is looked at: visible ones are 0 (u8: not 0), masked ones below -10000 (u8: 0). Else, by
 *            NeMo Automodel's rules, the first and the last row of head 0 of each sequence: the first sees one key, the
 *            last as many as it should; and of sequence 0 the first key, which the first row sees, and the last one,
 *            which is below -10000 there. A mask [1, 1, 1, 1] never passes these. Source:
 *            nemo_automodel._transformers.te_attention, _detect_causal_mask */
typedef struct te_op_detect_causal_mask_args {
    const te_tensor *mask;
    te_tensor *causal;
    te_window window;
    bool strict;
} te_op_detect_causal_mask_args;

/* ---- context ------------------------------------------------------------------------------------------------- */

/* Where ranks have the tokens of sequences that they share (te_parallel_options.cp_group): a map i32 of all rows.
 *   map         map[r * rows / ranks + i] = the row that local row i of rank r is of the sequences in their order;
 *               inverse: the other way round. As row_id_map of te_op_moe_permute with topk 1 it puts rows of all ranks,
 *               rank behind rank, in the order of the sequences, and the inverse puts them back
 *   cu_seqlens  optional i32 [b + 1]: the row that each sequence begins at, all multiples of 2 * ranks; NULL =>
 *               `sequences` of equal length. Rows behind the last sequence are shared evenly
 *   share       cu_seqlens counts this many times the rows that there are: those ranks share each sequence, beside the
 *               `ranks` of the map; 0 => 1
 * Lengths that cannot be shared are refused on the CPU; on a GPU their rows stay where they are. */
typedef struct te_op_context_rows_args {
    const te_tensor *cu_seqlens;
    te_tensor *map;
    int64_t sequences; /* 0 => 1; without cu_seqlens */
    int ranks, share;
    bool inverse;
} te_op_context_rows_args;

/* The part of packed sequences that lies in some chunks of each, as te_attn_rule has it: lengths, and the rows that
 * they begin at.
 *   cu_seqlens         i32 [b + 1]: the tokens of whole sequences, added up
 *   cu_seqlens_padded  optional i32 [b + 1]: where the sequences begin with their padding, at multiples of 2 * ranks;
 *                      NULL => cu_seqlens
 *   lengths            i32 [b + 1], written: 0, and the tokens in these chunks, added up
 *   starts             i32 [b + 1], written: the first row of these chunks; of rank `rank`'s rows or, with
 *                      TE_CHUNKS_UP_TO, of all. The last one is the end
 *   rank               with TE_CHUNKS_UP_TO: how many chunks, up to 2 * ranks */
typedef struct te_op_context_lengths_args {
    const te_tensor *cu_seqlens, *cu_seqlens_padded;
    te_tensor *lengths, *starts;
    int ranks, rank;
    te_context_chunks chunks;
} te_op_context_lengths_args;

/* Attention to some keys joins attention to others: with L = log(exp(lse) + exp(x_lse)), o = o exp(lse - L) + x
 * exp(x_lse - L), then lse = L, in f32. Without lse and x_lse: o += x.
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

/* y = softmax(scale * x) over the last dimension of x [.., s_q, s_k].
 *   mask    optional u8 [b or 1, 1, s_q, s_k], for x [b, h, s_q, s_k]: where it is not 0, -10000 stands in place of
 *           scale * x. A row in which nothing else is larger gives zeros, as in TransformerEngine
 *   causal  row i sees its first i + 1 + s_k - s_q columns: y is 0 in the others, and in rows that see none
 * y may be x. */
typedef struct te_op_softmax_fwd_args {
    const te_tensor *x, *mask;
    te_tensor *y;
    float scale; /* 0 => 1 */
    bool causal;
} te_op_softmax_fwd_args;
/* dx = scale * (y * dy - y * (sum over the last dimension of y * dy)), from the forward's y and its scale; dx may be
 * dy. */
typedef struct te_op_softmax_bwd_args {
    const te_tensor *dy, *y;
    te_tensor *dx;
    float scale; /* 0 => 1 */
} te_op_softmax_bwd_args;

/* ---- softcap ------------------------------------------------------------------------------------------------- */

/* y = cap * tanh(x / cap); with dy, of x's shape, the gradient: y = dy * (1 - tanh(x / cap)^2). y may be x or dy. cap
 * is positive. */
typedef struct te_op_softcap_args {
    const te_tensor *x, *dy;
    te_tensor *y;
    float cap;
} te_op_softcap_args;

/* ---- dropout ------------------------------------------------------------------------------------------------- */

/* y = residual + keep(x + bias) / (1 - p): bias [N], residual [.., N] optional. Element i is kept when the Philox
 * uniform of (seed, offset) and rng at i is >= p; p = 0 draws nothing. Evaluated in f32, rounded once. y may be x or
 * residual. run > 1: that many elements in a row are kept or not together, element i by the uniform at i / run. */
typedef struct te_op_dropout_add_fwd_args {
    const te_tensor *x, *bias, *residual;
    te_tensor *y;
    float p;
    int64_t run; /* 0 => 1 */
    uint64_t seed, offset;
    const te_tensor *rng;
} te_op_dropout_add_fwd_args;
/* dx = keep(dy) / (1 - p), with the forward's p, run, seed, offset and rng; dx may be dy. (The gradient of residual is
 * dy, that of bias the column sum of dx.) */
typedef struct te_op_dropout_add_bwd_args {
    const te_tensor *dy;
    te_tensor *dx;
    float p;
    int64_t run; /* 0 => 1 */
    uint64_t seed, offset;
    const te_tensor *rng;
} te_op_dropout_add_bwd_args;

/* ---- loss ---------------------------------------------------------------------------------------------------- */

/* Per row of logits [M, V]: loss f32 [M] = (1-e)(lse - x_y) + e*lse - (e/V) sum x, lse f32 [M] saved.
 * target i32 or i64 [M]; a target == ignore_index gives loss 0 and gradient 0. Any other one outside 0 .. vocab_size -
 * 1 is an error (TE_ERR_INVALID): of the call on the CPU, of the next call that waits on a GPU (te_synchronize), where
 * it counts as ignored. label_smoothing: e, 0 to 1. count: optional f32 [1], the number of targets that are not
 * ignored.
 *   vocab_size, vocab_start   logits are columns vocab_start .. vocab_start + V - 1 of a vocabulary of vocab_size,
 *                             which ranks share; 0 => V: all of it
 *   parts   f32 [M, 3], in place of loss and lse: lse, x_y (-inf where it is another rank's) and, if e > 0, sum x of
 *           these columns */
typedef struct te_op_cross_entropy_fwd_args {
    const te_tensor *logits, *target;
    te_tensor *loss, *lse, *count;
    float label_smoothing;
    int64_t ignore_index; /* TransformerEngine's default is -100; 0 is a legal target, so this field has no default */
    int64_t vocab_size, vocab_start;
    te_tensor *parts;
} te_op_cross_entropy_fwd_args;
/* loss f32 [M] and lse f32 [M] of rows whose columns ranks share, from parts f32 [R, M, 3], those of all R of them, and
 * the forward's target, label_smoothing, ignore_index and vocab_size. */
typedef struct te_op_cross_entropy_merge_args {
    const te_tensor *parts, *target;
    te_tensor *loss, *lse;
    float label_smoothing;
    int64_t ignore_index, vocab_size;
} te_op_cross_entropy_merge_args;
/* dlogits [M, V] = (softmax - target distribution) * dloss[m] * scale / max(count, 1), from the forward's logits,
 * target, lse, label_smoothing, ignore_index, vocab_size and vocab_start; dloss f32 [M] or [1] (broadcast); count:
 * optional f32 [1]. dlogits may be logits. */
typedef struct te_op_cross_entropy_bwd_args {
    const te_tensor *logits, *target, *lse, *dloss, *count;
    te_tensor *dlogits;
    float scale; /* 0 => 1 */
    float label_smoothing;
    int64_t ignore_index;
    int64_t vocab_size, vocab_start;
} te_op_cross_entropy_bwd_args;

/* loss f32 [1] = mean((x - target)^2); x and target of one shape, each of any float format. */
typedef struct te_op_mse_fwd_args {
    const te_tensor *x, *target;
    te_tensor *loss;
} te_op_mse_fwd_args;
/* dx = dloss * 2 (x - target) / numel, of the shape of x and target and any float format; dloss f32 [1]. */
typedef struct te_op_mse_bwd_args {
    const te_tensor *x, *target, *dloss;
    te_tensor *dx;
} te_op_mse_bwd_args;

/* ---- optim --------------------------------------------------------------------------------------------------- */

/* The numbers of Adam that parameters may have of their own. Read as they are: no defaults. */
typedef struct te_adam_numbers {
    float lr, beta1, beta2, eps, weight_decay; /* as those of te_op_adam_args */
} te_adam_numbers;
/* One parameter of te_op_adam. All but the scales have one number of elements.
 *   grad, param  f32, f16 or bf16
 *   m, v         the moments: f32 or bf16; or f16 or e4m3 with a scale
 *   master       optional: the step works on it, and param = round(master). f32; or f16 with a scale; or, for a param
 *                in bf16, its remainders: u8 of twice as many elements, the lower 16 bits of an f32 master whose upper
 *                16 bits are param, which is one more where these are 2^15 or more
 *   m_scale, v_scale, master_scale  f32 [1], needed for f16 and e4m3 (else NULL): the state stands for its elements
 *                                   times the scale. A step chooses the scale
 *                anew, max |x| / 32752 (f16) or max |x| / 448 (e4m3), without NaN; too small a max stores zeros */
typedef struct te_adam_tensor {
    const te_tensor *grad;
    te_tensor *param, *m, *v, *master;
    te_tensor *m_scale, *v_scale, *master_scale;
    bool own_numbers;        /* it has numbers of its own, in place of those of the args */
    te_adam_numbers numbers; /* these. Entries with the same ones stand best together: each run of them takes a
                              * launch */
    int place;               /* of its learning rate in lr_device, and of its pair in bias_correction */
} te_adam_tensor;
/* One Adam(W) step over a list of tensors (as FusedAdam).
 *   p -= lr * (m/bc1 / (sqrt(v/bc2) + eps) + weight_decay * p)       bc = 1 - beta^step, or 1 if no_bias_correction
 * grad_scale: optional f32 [1] on the device, multiplies every gradient (clipping, un-scaling). found_inf: optional f32
 * [1]; if it is not 0 nothing is changed. lr_device: optional f32 [P], replaces lr; bias_correction: optional f32 [P,
 * 2], 1/bc1 and 1/bc2, replaces step and no_bias_correction; P is more than the largest `place`. One call changes all
 * parameters, or none. */
typedef struct te_op_adam_args {
    const te_adam_tensor *tensors;             /* [num_tensors] */
    int num_tensors, num_undecayed;            /* the last num_undecayed take no weight decay */
    float lr, beta1, beta2, eps, weight_decay; /* read as they are: no defaults */
    int64_t step;                              /* 1 for the first */
    bool no_adam_w_mode;                       /* weight decay goes into the gradient (Adam); false => into the step
                                                * (AdamW) */
    bool no_bias_correction;                   /* bc = 1 */
    const te_tensor *grad_scale, *found_inf, *lr_device, *bias_correction;
} te_op_adam_args;

/* state f16 or e4m3 and scale f32 [1] from x, of as many elements, as te_op_adam stores a state; amax f32 [1]: max |x|,
 * as by te_op_amax. */
typedef struct te_op_store_state_args {
    const te_tensor *x, *amax;
    te_tensor *state, *scale;
} te_op_store_state_args;

/* The numbers of SGD that parameters may have of their own. Read as they are: no defaults. */
typedef struct te_sgd_numbers {
    float lr, weight_decay; /* as those of te_op_sgd_args */
} te_sgd_numbers;
/* One parameter of te_op_sgd: grad and param, and optionally momentum and master (f32, f16, bf16; a master: f32): with
 * it the step works on the master, and param = round(master). All have one number of elements. */
typedef struct te_sgd_tensor {
    const te_tensor *grad;
    te_tensor *param, *momentum, *master;
    bool first;             /* the momentum becomes the gradient: dampening does not count */
    bool own_numbers;       /* it has numbers of its own, in place of those of the args */
    te_sgd_numbers numbers; /* these */
    int place;              /* of its learning rate in lr_device */
} te_sgd_tensor;
/* One step of stochastic gradient descent over a list of tensors (as FusedSGD); each line where its condition holds.
 *   d = grad * grad_scale
 *   d += weight_decay * p                               unless wd_after_momentum
 *   b = momentum * b + (1 - dampening) * d              momentum not 0; b is the tensor `momentum`
 *   d = b; with nesterov d = d + momentum * b           momentum not 0
 *   d += weight_decay * p                               wd_after_momentum
 *   p -= lr * d
 * grad_scale, found_inf, lr_device: as in te_op_adam. One call changes all parameters, or none. */
typedef struct te_op_sgd_args {
    const te_sgd_tensor *tensors;               /* [num_tensors] */
    int num_tensors, num_undecayed;             /* the last num_undecayed take no weight decay */
    float lr, momentum, dampening, weight_decay; /* read as they are: no defaults */
    bool nesterov, wd_after_momentum;
    const te_tensor *grad_scale, *found_inf, *lr_device;
} te_op_sgd_args;

/* norm f32 [1] = sqrt(sum over tensors[0 .. num_tensors - 1] of sum x^2), in a fixed order. per_tensor: optional f32
 * [num_tensors], the norm of each. inv_scale: optional f32 [1]: x is multiplied by it first, and the tensors stay as
 * they are. clip: optional f32 [1] = min(1, max_norm / (norm + 1e-6)).
 * NaN and inf propagate; found_inf: optional f32 [1], becomes 1 if the norm is not finite, and else stays. */
typedef struct te_op_l2norm_args {
    const te_tensor *const *tensors;
    int num_tensors;
    te_tensor *norm, *per_tensor, *clip;
    float max_norm;
    const te_tensor *inv_scale;
    te_tensor *found_inf;
} te_op_l2norm_args;

/* out[i] = in[i] * scale * (scale_device ? *scale_device : 1) for num_tensors tensors; out[i] may be in[i]. found_inf:
 * optional f32 [1], becomes 1 if an input is not finite, and else stays. */
typedef struct te_op_multi_scale_args {
    const te_tensor *const *in;
    te_tensor *const *out;
    int num_tensors;
    float scale;
    const te_tensor *scale_device;
    te_tensor *found_inf;
} te_op_multi_scale_args;

/* The numbers of a step that may have been preceded by skipped ones, on the device. skipped f32 [1] is how many were:
 * the call adds the last step's flag to it, found_inf f32 [1] (optional; NULL: it was added before), where `count` is
 * set, and clears the flag. bias_correction f32 [P, 2], from betas f32 [P, 2], is 1 / (1 - beta^n) for n = step -
 * skipped, or 1 if no_bias_correction; both are optional together. step_device: optional f32 [1], replaces step. */
typedef struct te_op_step_numbers_args {
    te_tensor *found_inf, *skipped;
    bool count;
    int64_t step; /* 1 for the first, skipped ones among them */
    const te_tensor *step_device;
    const te_tensor *betas;
    te_tensor *bias_correction;
    bool no_bias_correction;
} te_op_step_numbers_args;

/* The scale of a loss after a step, as torch.amp.GradScaler has it. found_inf f32 [1] not 0: scale f32 [1] *=
 * backoff_factor, and growth_tracker f32 [1] = 0; else growth_tracker grows by 1, and at growth_interval it becomes 0
 * and scale *= growth_factor, where that is finite. inv_scale f32 [1] = 1 / scale, and found_inf = 0. */
typedef struct te_op_update_scale_args {
    te_tensor *scale, *inv_scale, *growth_tracker, *found_inf;
    float growth_factor, backoff_factor; /* read as they are: no defaults */
    int growth_interval;
} te_op_update_scale_args;

/* One function an operation: te_result te_op_gemm(te_ctx *te, const te_op_gemm_args *args), and so on. Errors:
 * TE_ERR_SHAPE, TE_ERR_DTYPE, TE_ERR_INVALID, TE_ERR_UNSUPPORTED, TE_ERR_OUT_OF_MEMORY, TE_ERR_COMPILE,
 * TE_ERR_DEVICE. */
#define TE_OP_FUNCTION(lower, UPPER, family)                                      \
    TE_API te_result te_op_##lower(te_ctx *te, const te_op_##lower##_args *args);
TE_OP_LIST(TE_OP_FUNCTION)
#undef TE_OP_FUNCTION
