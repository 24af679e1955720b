/* api/functions.h: differentiable functions of tensors, recorded on the tape.
 *
 * Each function returns a new tensor that belongs to the innermost scope, or NULL with the error in te_error.
 * Formats: f32, f16, bf16. All operands have one format, except norm parameters, biases and embedding tables. All
 * functions allocate; none syncs. */

/* Returns x + y; x and y have the same shape and format. */
TE_API te_tensor *te_add(te_tensor *x, te_tensor *y);
/* Returns x * y in x's shape and format, rounded once from f32. For x [.., N], y has x's shape or one number for each
 * row: [..] or [.., 1]. y may have another format. */
TE_API te_tensor *te_mul(te_tensor *x, te_tensor *y);
/* Returns x * factor. */
TE_API te_tensor *te_scale(te_tensor *x, float factor);
/* Returns the sum of all elements, f32 [1], added in a fixed order. */
TE_API te_tensor *te_sum_all(te_tensor *x);
/* Returns the mean of all elements, f32 [1]. TE_ERR_SHAPE for an empty tensor. */
TE_API te_tensor *te_mean_all(te_tensor *x);
/* Returns x [.., K] W^T + bias -> [.., N] in high precision, even inside autocast; weight [N, K], bias [N] or NULL. */
TE_API te_tensor *te_linear(te_tensor *x, te_tensor *weight, te_tensor *bias);
/* Applies LayerNorm to each row of x [.., N] -> [.., N]; weight [N], bias [N] or NULL; eps 0 => 1e-5.
 * zero_centered_gamma true => the normalised row is multiplied by weight + 1. */
TE_API te_tensor *te_layernorm(te_tensor *x, te_tensor *weight, te_tensor *bias, float eps, bool zero_centered_gamma);
/* Applies RMSNorm to each row of x [.., N] -> [.., N]; weight [N]; eps 0 => 1e-5. zero_centered_gamma true => the
 * normalised row is multiplied by weight + 1. */
TE_API te_tensor *te_rmsnorm(te_tensor *x, te_tensor *weight, float eps, bool zero_centered_gamma);
/* Returns x / sqrt(sum(x^2) + eps), the sum over the last dimension; eps 0 => 1e-6. Source:
 * transformer_engine.pytorch.ops.L2Normalization. */
TE_API te_tensor *te_l2_normalization(te_tensor *x, float eps);
/* Applies an activation to x [.., N] -> [.., N]. A gated activation takes x [.., 2N] -> [.., N]. params may be NULL. */
TE_API te_tensor *te_activate(te_tensor *x, te_activation activation, const te_activation_params *params);
/* Returns te_activate(x) [.., N], each row multiplied by one number of permuted_probs [..] or [.., 1], the router
 * probabilities of permuted tokens. The probabilities are first rounded to x's format. The product is computed in f32
 * and rounded once. params may be NULL.
 * Takes any activation (te.ops of TransformerEngine has only TE_SWIGLU, TE_SRELU and TE_CLAMPED_SWIGLU).
 * TE_ERR_SHAPE unless there are as many probabilities as rows.
 * Source: transformer_engine.pytorch.ops.ScaledSwiGLU, ScaledSReLU, ScaledClampedQGeGLU
 * (common/activation/scaled_activation.cu). */
TE_API te_tensor *te_scaled_activate(te_tensor *x, te_tensor *permuted_probs, te_activation activation,
                                     const te_activation_params *params);
/* Zeroes each element with probability p and divides the others by 1 - p; p 0 => x itself. Draws from the context's
 * random state. */
TE_API te_tensor *te_dropout(te_tensor *x, float p);
/* Returns residual + dropout(x + bias, p); x, residual [.., N], bias [N]; bias and residual may be NULL. */
TE_API te_tensor *te_bias_dropout_add(te_tensor *x, te_tensor *bias, te_tensor *residual, float p);
/* Returns residual + x / (1 - p) or, with probability p, only `residual` (stochastic depth). One random number is drawn
 * for each index of x's first dimension. residual may be NULL. */
TE_API te_tensor *te_drop_path(te_tensor *x, te_tensor *residual, float p);
/* Returns the index of the largest element of each row of x [.., N], i32 [..] ([1] for x [N]): the lowest index, if
 * several are equal. NaN counts as larger than all numbers, as in torch.argmax. Not differentiable. TE_ERR_SHAPE for
 * rows without elements. */
TE_API te_tensor *te_argmax(te_tensor *x);
/* Returns the rows of table [V, H] at ids (i32 or i64, [..]) -> [.., H]. TE_ERR_INVALID for ids outside 0 .. V-1: on
 * the CPU from this call, on a GPU from the next call that waits (te_synchronize). */
TE_API te_tensor *te_embedding_lookup(te_tensor *table, te_tensor *ids);
/* Looks up ids as te_embedding_lookup does, in a table split over ranks by rows. This rank's table has rows vocab_start
 * .. vocab_start + V - 1 of vocab_size rows. An id whose row is on another rank gives zeros, so te_all_reduce,
 * the sum over the ranks, completes the lookup.
 * TE_ERR_INVALID for ids outside 0 .. vocab_size - 1.
 * Source: megatron.core VocabParallelEmbedding. */
TE_API te_tensor *te_vocab_parallel_embedding_lookup(te_tensor *table, te_tensor *ids, int64_t vocab_size,
                                                     int64_t vocab_start);

/* Options of te_parallel_lm_logits; zero-initialised. */
typedef struct te_parallel_lm_logits_desc {
    te_group *tp_group;     /* ranks that share the vocabulary (borrowed for the call): rank r has rows r * V to
                             * (r + 1) * V - 1 of the table, as `table` [V, H]; NULL => this rank has all rows */
    bool sequence_parallel; /* x is this rank's part of the first dimension, and the logits are of all ranks' rows */
    bool parallel_output;   /* the result is this rank's columns, which te_cross_entropy reads with dist_process_group;
                             * false => those of all ranks, gathered. Megatron's default: true */
} te_parallel_lm_logits_desc;
/* Returns the logits x table^T of x [.., H]: [.., V], or with tp_group and without parallel_output [.., size * V]. The
 * gradient of x is summed over the ranks, and that of the table is of this rank's rows. All ranks of tp_group must call
 * it. In high precision, inside an autocast region too.
 * Source: megatron.core parallel_lm_logits. */
TE_API te_tensor *te_parallel_lm_logits(te_tensor *x, te_tensor *table, const te_parallel_lm_logits_desc *desc);

/* Returns cap * tanh(x / cap), of any shape, as Gemma 2 caps its logits. cap must be positive. */
TE_API te_tensor *te_softcap(te_tensor *x, float cap);
/* Joins the tensors x[0] .. x[n - 1] along dimension `dim`; a negative dim counts from the end. Formats, and sizes in
 * all other dimensions, are equal. n 0 gives NULL without an error. */
TE_API te_tensor *te_concat(te_tensor *const *x, int n, int dim);

/* How the frequencies of a rotary embedding change for contexts longer than in training. Frequency i is base^(-2i /
 * dim) before the change.
 * Source: transformers, modeling_rope_utils, under the same names. */
typedef enum te_rope_type {
    TE_ROPE_DEFAULT = 0, /* unchanged: base^(-2i / dim) */
    TE_ROPE_LINEAR,      /* divided by `factor` */
    TE_ROPE_DYNAMIC,     /* if `length`, the number of tokens in the sequence, is above `original`
                          * (original_max_position_embeddings), the base is multiplied by (factor * length / original -
                          * (factor - 1))^(dim / (dim - 2)) */
    TE_ROPE_LLAMA3,      /* a frequency with the wavelength w, in positions, is unchanged if w < original /
                          * high_freq_factor. It is divided by `factor` if w > original / low_freq_factor. Between these
                          * two limits it is interpolated linearly in 1 / w */
    TE_ROPE_YARN,        /* the frequency of a channel pair that makes at least beta_fast turns within the original
                          * context is unchanged. With at most beta_slow turns it is divided by `factor`. Between these
                          * two limits it is interpolated linearly in the pair's index (Peng et al. 2023) */
    TE_ROPE_LONGROPE     /* frequency i is divided by short_factor[i] or, in sequences longer than the original context,
                          * by long_factor[i] */
} te_rope_type;
enum { TE_MAX_ROPE_FACTORS = 256 }; /* at most 256 longrope factors, one per channel pair, for heads of 512 channels */
/* A te_rope_type and its parameters. The comment of each field names the types that read it; other types ignore it. */
typedef struct te_rope_scaling {
    te_rope_type type;                        /* 0 => frequencies stay unchanged */
    float factor;                             /* LINEAR, DYNAMIC, LLAMA3, YARN: positive; LONGROPE: gives the default of
                                               * attention_factor */
    int64_t original_max_position_embeddings; /* all types but LINEAR: length of the original context; positive */
    float low_freq_factor, high_freq_factor;  /* LLAMA3: low_freq_factor positive, high_freq_factor larger than it */
    float beta_fast, beta_slow;               /* YARN: 0 => 32, 1 */
    float mscale, mscale_all_dim;             /* YARN: if both are given, attention_factor is m(mscale) /
                                               * m(mscale_all_dim), where m(x) = 0.1 * x * ln(factor) + 1 (1 if `factor`
                                               * is at most 1); 0 => not given */
    bool no_truncate;                         /* YARN: the interpolation runs from the index of a pair that turns
                                               * beta_fast times to the index of a pair that turns beta_slow times.
                                               * false => these two indices are rounded outwards to whole numbers;
                                               * true => not rounded */
    float attention_factor;                   /* YARN, LONGROPE: multiplies cosine and sine. 0 => the default. If
                                               * `factor` is at most 1, the default is 1. For a larger `factor` it is:
                                               * LONGROPE: sqrt(1 + ln(factor) / ln(original_max_position_embeddings))
                                               * YARN: the formula of mscale if both mscale fields are given, otherwise
                                               * 0.1 * ln(factor) + 1 */
    const float *short_factor, *long_factor;  /* LONGROPE: [dim / 2] each, positive, in host memory (borrowed; they must
                                               * outlive modules that use them) */
} te_rope_scaling;
/* Computes inv_freq [dim / 2] and *attention_factor, for sequences of `length` tokens. dim is even; base 0 => 10000;
 * scaling may be NULL. TE_ERR_INVALID if a field that scaling->type reads is out of range. */
TE_API te_result te_rope_frequencies(te_ctx *te, const te_rope_scaling *scaling, float base, int dim, int64_t length,
                                     float *inv_freq, float *attention_factor);

/* A rotary embedding. Source: transformer_engine.pytorch.attention.RotaryPositionEmbedding. */
typedef struct te_rotary_desc {
    float base;                                 /* angle of channel pair i: position * base^(-2i / dim); 0 => 10000 */
    float rotary_percent;                       /* fraction of the head's d channels that are rotated; 0 => 1. The first
                                                 * dim = floor(d * rotary_percent) channels are rotated */
    bool interleaved;                           /* channels 2i and 2i + 1 form a pair; false => i and i + dim / 2 */
    float seq_len_interpolation_factor;         /* positions are divided by this factor; needs
                                                 * pretrained_max_position_embeddings; 0 => not divided */
    int64_t pretrained_max_position_embeddings; /* P, the context length in pretraining; 0 => not given. If max_seqlen >
                                                 * seq_len_interpolation_factor * P, positions are multiplied by P /
                                                 * max_seqlen instead of divided by the factor */
    te_rope_scaling scaling;                    /* changes frequencies for longer contexts; 0 => unchanged */
    int64_t position_offset;                    /* added to every position */
    te_tensor *start_positions;                 /* i32 [b], added to the positions of each sequence (borrowed for the
                                                 * call); NULL => 0 */
    te_tensor *positions;                       /* i32 or i64, [s], [b, s] or [tokens]: each token's position (borrowed
                                                 * for the call); NULL => the token's place in its sequence */
    /* A table of the caller's angles, [positions, 1 or b, 1, dim], f32, f16 or bf16 (borrowed for the call; no
     * gradient). Row t has the angle of each channel of a token at position t. If the second size is b, each sequence
     * has a table of its own; if it is 1, all sequences share one. NULL => angles come from the fields above.
     * With a table, base, rotary_percent, seq_len_interpolation_factor and scaling must be 0.
     * For mRoPE, which has one position for each section of channels, make one row for each token and leave `positions`
     * NULL. */
    te_tensor *freqs;
    float attention_factor;                     /* factor of cosine and sine with freqs, from te_rope_freqs; 0 => 1 */
    int cp_size, cp_rank;                       /* context parallelism: the input is chunks cp_rank and 2 cp_size - 1 -
                                                 * cp_rank of the 2 cp_size chunks of each sequence; 0 => whole
                                                 * sequences */
    te_tensor *cu_seqlens;                      /* TE_THD: i32 [b + 1], each sequence's first row (borrowed for the
                                                 * call); modules set it */
    int64_t max_seqlen;                         /* length of the longest sequence; read with
                                                 * pretrained_max_position_embeddings, and by TE_ROPE_DYNAMIC and
                                                 * TE_ROPE_LONGROPE. 0 => the first of these that is given:
                                                 *   - in modules with inference_params, the length of the longest
                                                 *     sequence in the cache
                                                 *   - in modules with TE_THD, max_seqlen_q or max_seqlen_kv of the call
                                                 *   - the size of x along the tokens, times cp_size (if set).
                                                 *     TE_ROPE_DYNAMIC and TE_ROPE_LONGROPE add position_offset to it */
} te_rotary_desc;
/* Rotates x and returns a tensor of the same shape. `format` is the layout of x: [s, b, H, d], [b, s, H, d] or, for
 * TE_THD, [tokens, H, d]. desc may be NULL. */
TE_API te_tensor *te_apply_rotary_pos_emb(te_tensor *x, const te_rotary_desc *desc, te_qkv_format format);

/* Options of te_attention; zero is causal attention without dropout. */
typedef struct te_attn_desc {
    te_qkv_format format; /* layout of q, k, v and the result; 0 => [s, b, H, d] */
    te_attn_rule rule;    /* mask, window, scale, dropout (from the context's random state) and more (tensors borrowed
                           * for the call); zero => causal attention alone */
    te_tensor *max_logit; /* f32 [H], written: the largest score of each head (borrowed); NULL => not computed */
} te_attn_desc;
/* Returns softmax(scale q k^T, masked) v: q [s_q, b, H, d], k [s_kv, b, G, d], v [s_kv, b, G, dv] -> [s_q, b, H, dv].
 * desc->format can put b first, or pack the sequences. Head h of q uses head h / (H / G) of k and v. desc may be NULL.
 * Differentiable in q, k, v, rule.core_attention_bias and rule.softmax_offset. Deterministic.
 * Source: transformer_engine.pytorch.DotProductAttention. */
TE_API te_tensor *te_attention(te_tensor *q, te_tensor *k, te_tensor *v, const te_attn_desc *desc);

/* Returns softmax(scale * x) over the last dimension; scale 0 => 1. The four te_scaled_..softmax are those of
 * transformer_engine.pytorch.attention (ScaledSoftmax ...), for any sizes and float formats. */
TE_API te_tensor *te_scaled_softmax(te_tensor *x, float scale);
/* Returns softmax(scale * x) of x [b, h, s_q, s_k] under a mask, u8 [b or 1, 1, s_q, s_k]; mask may be NULL. Where the
 * mask is not 0, scores become -10000. A fully masked row gives zeros. scale 0 => 1. */
TE_API te_tensor *te_scaled_masked_softmax(te_tensor *x, te_tensor *mask, float scale);
/* Returns softmax(scale * x) of square matrices x [.., s, s] under a causal mask: row i sees its first i + 1 columns.
 * Masked columns are 0. scale 0 => 1. */
TE_API te_tensor *te_scaled_upper_triang_masked_softmax(te_tensor *x, float scale);
/* Returns softmax(scale * x) of x [.., s_q, s_k] under a causal mask aligned at the bottom right: row i sees its first
 * i + 1 + s_k - s_q columns. A fully masked row is 0. scale 0 => 1. */
TE_API te_tensor *te_scaled_aligned_causal_masked_softmax(te_tensor *x, float scale);

/* Options of te_cross_entropy. */
typedef struct te_cross_entropy_desc {
    float label_smoothing; /* share of the target distribution that is uniform, 0 to 1 */
    int64_t ignore_index;  /* rows with this target give no loss and no gradient; -100 if has_ignore_index is false */
    bool has_ignore_index; /* ignore_index was given */
    bool no_reduce_loss;   /* true => the result is the loss of each row, [M], as by default in TransformerEngine; false
                            * => [1], the mean over the rows that are not ignored */
    te_group *dist_process_group; /* ranks that share the vocabulary (borrowed for the call): rank r has columns r * V
                                   * to (r + 1) * V - 1, as logits [.., V]; NULL => this rank has all columns */
    bool inplace_backward; /* te_backward overwrites the logits by their gradient */
} te_cross_entropy_desc;
/* Returns the cross-entropy of logits [.., V] and target (i32 or i64, [..], M ids): f32 [1] or [M]. desc may be NULL.
 * All ranks of dist_process_group must call it with the same targets. They get the same losses.
 * TE_ERR_INVALID for a target that is neither ignore_index nor in the vocabulary: on the CPU from this call, on a GPU
 * from the next call that waits (te_synchronize).
 * Source: transformer_engine.pytorch.parallel_cross_entropy. */
TE_API te_tensor *te_cross_entropy(te_tensor *logits, te_tensor *target, const te_cross_entropy_desc *desc);
/* Returns mean((x - target)^2), f32 [1]; x and target have the same shape and format. */
TE_API te_tensor *te_mse_loss(te_tensor *x, te_tensor *target);

/* The backward function of a recorded node. Returns TE_OK or an error code.
 * grad_outputs[i] is the gradient of output i, or NULL if there is none.
 * If needs[i] is true, the function sets grad_inputs[i] to a tensor with the shape and format of input i. This tensor
 * may be one of grad_outputs. Other entries of grad_inputs stay NULL.
 * Calls inside the function are not recorded, except after te_enable_grad_begin. */
typedef te_result (*te_backward_fn)(te_ctx *te, const void *state, te_tensor *const *saved,
                                    te_tensor *const *grad_outputs, te_tensor **grad_inputs, const bool *needs);
/* One call of a user's differentiable function, to be recorded on the tape. te_record copies the lists below. */
typedef struct te_node_desc {
    const char *name;          /* name in messages; must outlive the tape (use a literal) */
    te_tensor *const *inputs;  /* [num_inputs]; an entry may be NULL */
    int num_inputs;            /* length of `inputs`, `needs` and `grad_inputs` */
    te_tensor *const *outputs; /* [num_outputs], new tensors; te_record makes them require a gradient */
    int num_outputs;           /* length of `outputs` and `grad_outputs` */
    te_tensor *const *saved;   /* [num_saved] tensors that `backward` reads, retained until `backward` has run; entries
                                * may be NULL. te_backward fails if one was written after te_record */
    int num_saved;             /* length of `saved` */
    const void *state;         /* state_size bytes, copied; `backward` gets the copy */
    size_t state_size;         /* bytes of `state`; 0 => none */
    te_backward_fn backward;   /* needed */
    /* Releases what the copied state owns. Called exactly once, even if `backward` never runs or the node is not
     * recorded. NULL => the state owns nothing. */
    void (*release)(te_ctx *te, void *state);
} te_node_desc;
/* Records a node on the tape if an input requires a gradient and gradients are enabled; otherwise only calls `release`.
 * TE_ERR_INVALID if desc or a list that it needs is NULL.
 * TE_ERR_STATE if an output is NULL. */
TE_API te_result te_record(te_ctx *te, const te_node_desc *desc);
