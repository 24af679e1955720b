/* api/functions.h: differentiable functions of tensors, recorded on the tape.
 *
 * Each function takes tensors of one context and returns a new tensor that belongs to the innermost scope, or NULL with
 * the error in te_error.
 * Formats: f32, f16, bf16. All operands have the same format unless said otherwise; a norm's parameters, a bias and an
 * embedding table may have another format. All functions allocate; none syncs. */

/* Returns x + y; x and y have the same shape and format. */
TE_API te_tensor *te_add(te_tensor *x, te_tensor *y);
/* Returns x * y in x's shape and format, rounded once from f32. For x [.., N], y has the shape of x, or has one number
 * for each row of x: [..] or [.., 1]. y may have another format. If y has one number for each row, the gradient
 * of this number is the dot product of the row of x and the same row of the result's gradient. */
TE_API te_tensor *te_mul(te_tensor *x, te_tensor *y);
/* Returns x * factor. */
TE_API te_tensor *te_scale(te_tensor *x, float factor);
/* Returns the sum of all elements, f32 [1], added in a fixed order. */
TE_API te_tensor *te_sum_all(te_tensor *x);
/* Returns the mean of all elements, f32 [1]. TE_ERR_SHAPE for an empty tensor. */
TE_API te_tensor *te_mean_all(te_tensor *x);
/* Returns x [.., K] W^T + bias -> [.., N], in high precision, also inside an autocast region; weight [N, K], bias [N]
 * or NULL. */
TE_API te_tensor *te_linear(te_tensor *x, te_tensor *weight, te_tensor *bias);
/* Applies LayerNorm to each row of x [.., N] -> [.., N]; weight [N], bias [N] or NULL; eps 0 => 1e-5. If
 * zero_centered_gamma is true, the normalised row is multiplied by weight + 1 instead of weight. */
TE_API te_tensor *te_layernorm(te_tensor *x, te_tensor *weight, te_tensor *bias, float eps, bool zero_centered_gamma);
/* Applies RMSNorm to each row of x [.., N] -> [.., N]; weight [N]; eps 0 => 1e-5. If zero_centered_gamma is true, the
 * normalised row is multiplied by weight + 1 instead of weight. */
TE_API te_tensor *te_rmsnorm(te_tensor *x, te_tensor *weight, float eps, bool zero_centered_gamma);
/* Returns x / sqrt(sum(x^2) + eps), the sum over the last dimension; eps 0 => 1e-6. Source:
 * transformer_engine.pytorch.ops.L2Normalization. */
TE_API te_tensor *te_l2_normalization(te_tensor *x, float eps);
/* Applies an activation to x [.., N] -> [.., N]. A gated activation takes x [.., 2N] -> [.., N]. params may be NULL. */
TE_API te_tensor *te_activate(te_tensor *x, te_activation activation, const te_activation_params *params);
/* Returns te_activate(x) [.., N], with each row multiplied by one number from permuted_probs [..] or [.., 1]. These
 * are the router probabilities of tokens that were permuted to their experts; experts apply them before the second
 * GEMM. They are first rounded to x's format. The product is computed in f32 and rounded once. Takes any activation
 * (TransformerEngine's te.ops has only the equivalents of TE_SWIGLU, TE_SRELU and TE_CLAMPED_SWIGLU). params may be
 * NULL. TE_ERR_SHAPE unless there are as many probabilities as rows.
 * Source: transformer_engine.pytorch.ops.ScaledSwiGLU, ScaledSReLU, ScaledClampedQGeGLU
 * (common/activation/scaled_activation.cu). */
TE_API te_tensor *te_scaled_activate(te_tensor *x, te_tensor *permuted_probs, te_activation activation,
                                     const te_activation_params *params);
/* Zeroes each element with probability p and divides the elements that remain by 1 - p; p 0 => x itself. Draws from the
 * context's random state. */
TE_API te_tensor *te_dropout(te_tensor *x, float p);
/* Returns residual + dropout(x + bias, p); x, residual [.., N], bias [N]; bias and residual may be NULL. */
TE_API te_tensor *te_bias_dropout_add(te_tensor *x, te_tensor *bias, te_tensor *residual, float p);
/* Returns residual + x / (1 - p) or, with probability p, only `residual` (stochastic depth). One random number decides
 * for each index of x's first dimension. residual may be NULL. */
TE_API te_tensor *te_drop_path(te_tensor *x, te_tensor *residual, float p);
/* Returns the rows of table [V, H] at ids (i32 or i64, [..]) -> [.., H]. Ids outside 0 .. V-1 give TE_ERR_INVALID. On
 * the CPU this call returns the error. On a GPU the next call that waits for the device does (te_synchronize). */
TE_API te_tensor *te_embedding_lookup(te_tensor *table, te_tensor *ids);
/* Looks up ids as te_embedding_lookup does, in a table whose rows are split over ranks: this rank's table has rows
 * vocab_start .. vocab_start + V - 1 of all vocab_size rows. An id in another rank's rows gives zeros, so te_all_reduce
 * of all ranks' results gives the full lookup. Ids outside 0 .. vocab_size - 1 give TE_ERR_INVALID. Source:
 * megatron.core VocabParallelEmbedding. */
TE_API te_tensor *te_vocab_parallel_embedding_lookup(te_tensor *table, te_tensor *ids, int64_t vocab_size,
                                                     int64_t vocab_start);

/* Returns cap * tanh(x / cap), of any shape, as Gemma 2 caps its logits. cap must be positive. */
TE_API te_tensor *te_softcap(te_tensor *x, float cap);
/* Joins the tensors x[0] .. x[n - 1] along dimension `dim`; a negative dim counts from the end. They have the same
 * format, and equal sizes in all other dimensions. n must be at least 1. With n 0 the call returns NULL but records no
 * error, because there is no tensor and so no context. */
TE_API te_tensor *te_concat(te_tensor *const *x, int n, int dim);

/* How the frequencies of a rotary embedding are changed for contexts longer than the original context of training.
 * Frequency i is base^(-2i / dim) before the change.
 * Source: transformers, modeling_rope_utils; LINEAR, DYNAMIC, LLAMA3, YARN and LONGROPE are its rope types of these
 * names. */
typedef enum te_rope_type {
    TE_ROPE_DEFAULT = 0, /* unchanged: base^(-2i / dim) */
    TE_ROPE_LINEAR,      /* divided by `factor` */
    TE_ROPE_DYNAMIC,     /* sequences longer than `original` (original_max_position_embeddings) use a larger base:
                          * base * (factor * length / original - (factor - 1))^(dim / (dim - 2)) */
    TE_ROPE_LLAMA3,      /* depends on the wavelength w, in positions: unchanged if w < original / high_freq_factor,
                          * divided by `factor` if w > original / low_freq_factor, interpolated linearly in 1 / w
                          * between these bounds */
    TE_ROPE_YARN,        /* depends on how many turns a channel pair makes within the original context: unchanged with
                          * at least beta_fast turns, divided by `factor` with at most beta_slow turns. In between it is
                          * interpolated linearly in the pair's index (Peng et al. 2023) */
    TE_ROPE_LONGROPE     /* frequency i is divided by short_factor[i]; by long_factor[i] in sequences longer than the
                          * original context */
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
                                               * m(mscale_all_dim), with m(x) = 0.1 * x * ln(factor) + 1, or m(x) = 1
                                               * if `factor` is at most 1; 0 => not given */
    bool no_truncate;                         /* YARN: the bounds of the interpolation are the indices of the channel
                                               * pairs that turn beta_fast and beta_slow times. true => the bounds
                                               * may be fractions; false => they are rounded outwards to whole
                                               * numbers */
    float attention_factor;                   /* YARN, LONGROPE: multiplies cosine and sine. 0 => 1 if `factor` is
                                               * at most 1. For a larger `factor`, 0 => LONGROPE uses
                                               * sqrt(1 + ln(factor) / ln(original_max_position_embeddings)). YARN uses
                                               * the formula of mscale if mscale and mscale_all_dim are
                                               * given, else 0.1 * ln(factor) + 1 */
    const float *short_factor, *long_factor;  /* LONGROPE: [dim / 2] each, positive, in host memory; read whenever
                                               * frequencies are computed, so they must live as long as modules that use
                                               * them */
} te_rope_scaling;
/* Computes inv_freq [dim / 2] and *attention_factor, for sequences of `length` tokens. dim is even; base 0 => 10000;
 * scaling may be NULL. TE_ERR_INVALID for a field that scaling->type reads and that is out of its range. */
TE_API te_result te_rope_frequencies(te_ctx *te, const te_rope_scaling *scaling, float base, int dim, int64_t length,
                                     float *inv_freq, float *attention_factor);

/* A rotary embedding. Source: transformer_engine.pytorch.attention.RotaryPositionEmbedding. */
typedef struct te_rotary_desc {
    float base;                                 /* angle of channel pair i: position * base^(-2i / dim); 0 => 10000 */
    float rotary_percent;                       /* fraction of the head's d channels that are rotated; 0 => 1. The first
                                                 * `dim` channels of the head are rotated, with
                                                 * dim = floor(d * rotary_percent), which may be 0 */
    bool interleaved;                           /* channels 2i and 2i + 1 form a pair; false => i and i + dim / 2 */
    float seq_len_interpolation_factor;         /* positions are divided by this factor, if
                                                 * pretrained_max_position_embeddings is given too; 0 => not divided */
    int64_t pretrained_max_position_embeddings; /* P, the context length in pretraining. If max_seqlen is larger
                                                 * than seq_len_interpolation_factor * P, positions are multiplied
                                                 * by P / max_seqlen and not divided by the factor. 0 => positions
                                                 * stay as they are */
    te_rope_scaling scaling;                    /* changes frequencies for longer contexts; 0 => unchanged */
    int64_t position_offset;                    /* added to every position */
    te_tensor *start_positions;                 /* i32 [b], added to the positions of each sequence (borrowed for the
                                                 * call); NULL => 0 */
    te_tensor *positions;                       /* i32 or i64, [s], [b, s] or [tokens]: each token's position (borrowed
                                                 * for the call); NULL => the token's place in its sequence */
    /* A table of angles that the caller gives, [positions, 1 or b, 1, dim], f32, f16 or bf16 (borrowed for the call; no
     * gradient). Row t has the angle of each channel of a token at position t. If the second size is b, each sequence
     * has a table of its own. If a table is given, the fields base, rotary_percent, seq_len_interpolation_factor and
     * scaling must stay 0. mRoPE gives a token one position for each section of channels: make one row for each token,
     * in which each channel has its angle at the position of its section, and leave `positions` NULL. freqs NULL =>
     * angles are computed from the fields above. */
    te_tensor *freqs;
    float attention_factor;                     /* factor of cosine and sine with freqs, from te_rope_freqs; 0 => 1 */
    int cp_size, cp_rank;                       /* context parallelism: the input is chunks cp_rank and 2 cp_size - 1 -
                                                 * cp_rank of the 2 cp_size chunks of each sequence; 0 => whole
                                                 * sequences */
    te_tensor *cu_seqlens;                      /* TE_THD: i32 [b + 1], the row at which each sequence begins (borrowed
                                                 * for the call); modules set it to cu_seqlens of their call */
    int64_t max_seqlen;                         /* length of the longest sequence; read if
                                                 * pretrained_max_position_embeddings is set, and by TE_ROPE_DYNAMIC and
                                                 * TE_ROPE_LONGROPE. 0 => the number of tokens of a sequence in x (times
                                                 * cp_size); the two rope types add position_offset to it. In modules
                                                 * 0 => the call's max_seqlen */
} te_rotary_desc;
/* Rotates x and returns a tensor of the same shape. `format` tells the layout of x: [s, b, H, d], [b, s, H, d] or, for
 * TE_THD, [tokens, H, d]. desc may be NULL. */
TE_API te_tensor *te_apply_rotary_pos_emb(te_tensor *x, const te_rotary_desc *desc, te_qkv_format format);

/* Options of te_attention; zero is causal attention without dropout. */
typedef struct te_attn_desc {
    te_qkv_format format; /* layout of q, k, v and the result; 0 => [s, b, H, d] */
    te_attn_rule rule;    /* mask, window, scale, dropout (from the context's random state), lengths, biases,
                           * softmax_offset, pages of a KV cache; zero => causal attention alone. Tensors are borrowed
                           * for the call */
    te_tensor *max_logit; /* f32 [H], written: the largest score of each head (borrowed); NULL => not computed */
} te_attn_desc;
/* Returns softmax(scale q k^T, masked) v: q [s_q, b, H, d], k [s_kv, b, G, d], v [s_kv, b, G, dv] (or b first, or
 * packed) -> [s_q, b, H, dv]. Head h of q uses head h / (H / G) of k and v. Differentiable in q, k, v,
 * rule.core_attention_bias and rule.softmax_offset. desc may be NULL. Deterministic, forward and backward.
 * Source: transformer_engine.pytorch.DotProductAttention. */
TE_API te_tensor *te_attention(te_tensor *q, te_tensor *k, te_tensor *v, const te_attn_desc *desc);

/* Returns softmax(scale * x) over the last dimension; scale 0 => 1. The four functions te_scaled_..softmax are the
 * softmax functions of transformer_engine.pytorch.attention (ScaledSoftmax ...), for any sizes and float formats. */
TE_API te_tensor *te_scaled_softmax(te_tensor *x, float scale);
/* Returns softmax(scale * x) of x [b, h, s_q, s_k] under a mask, u8 [b or 1, 1, s_q, s_k]: scores where the mask is not
 * 0 become -10000, and a row that is masked throughout gives zeros. mask may be NULL. scale 0 => 1. */
TE_API te_tensor *te_scaled_masked_softmax(te_tensor *x, te_tensor *mask, float scale);
/* Returns softmax(scale * x) of square matrices x [.., s, s] under a causal mask: row i sees its first i + 1 columns,
 * and its other columns are 0. scale 0 => 1. */
TE_API te_tensor *te_scaled_upper_triang_masked_softmax(te_tensor *x, float scale);
/* Returns softmax(scale * x) of x [.., s_q, s_k] under a causal mask aligned at the bottom right: row i sees its first
 * i + 1 + s_k - s_q columns, and a row that sees none is 0. scale 0 => 1. */
TE_API te_tensor *te_scaled_aligned_causal_masked_softmax(te_tensor *x, float scale);

/* Options of te_cross_entropy. */
typedef struct te_cross_entropy_desc {
    float label_smoothing; /* share of the target distribution that is uniform, 0 to 1 */
    int64_t ignore_index;  /* rows with this target give no loss and no gradient; -100 if has_ignore_index is false */
    bool has_ignore_index; /* ignore_index was given */
    bool no_reduce_loss;   /* the result is the loss of each row, [M]; false => the mean over the rows that are not
                            * ignored, [1]. TransformerEngine's default is the loss of each row (reduce_loss=False) */
    te_group *dist_process_group; /* ranks that share the vocabulary (borrowed for the call): with logits [.., V] on
                                   * each rank, rank r has columns r * V to (r + 1) * V - 1 of the vocabulary.
                                   * NULL => this rank has all columns */
    bool inplace_backward; /* te_backward writes the gradient over the logits, so the caller can no longer read them */
} te_cross_entropy_desc;
/* Returns the cross-entropy of logits [.., V] and target (i32 or i64, [..], M ids): f32 [1] or [M]. desc may be NULL.
 * With dist_process_group, all its ranks must call it with the same targets, and they get the same losses. Targets that
 * are neither ignore_index nor in the vocabulary give TE_ERR_INVALID. On the CPU this call fails. On a GPU the next
 * call that waits for the device fails (te_synchronize).
 * Source: transformer_engine.pytorch.parallel_cross_entropy. */
TE_API te_tensor *te_cross_entropy(te_tensor *logits, te_tensor *target, const te_cross_entropy_desc *desc);
/* Returns mean((x - target)^2), f32 [1]; x and target have the same shape and format. */
TE_API te_tensor *te_mse_loss(te_tensor *x, te_tensor *target);

/* The backward function of a recorded node. It reads the gradients of the outputs; grad_outputs[i] is NULL if output i
 * got no gradient. If needs[i] is true, it sets grad_inputs[i] to a tensor with the shape and format of input i. This
 * tensor may be one of grad_outputs. The function leaves the other grad_inputs NULL. The tape records none of its calls
 * unless it calls te_enable_grad_begin. Returns TE_OK or an error code. */
typedef te_result (*te_backward_fn)(te_ctx *te, const void *state, te_tensor *const *saved,
                                    te_tensor *const *grad_outputs, te_tensor **grad_inputs, const bool *needs);
/* One call of a user's differentiable function, to be recorded on the tape. te_record copies the lists below. */
typedef struct te_node_desc {
    const char *name;          /* name in messages; must outlive the tape (use a literal) */
    te_tensor *const *inputs;  /* [num_inputs]; an entry may be NULL */
    int num_inputs;            /* length of `inputs`, `needs` and `grad_inputs` */
    te_tensor *const *outputs; /* [num_outputs], new tensors; te_record makes them require a gradient */
    int num_outputs;           /* length of `outputs` and `grad_outputs` */
    te_tensor *const *saved;   /* [num_saved] tensors that `backward` reads, retained until it has run; te_backward
                                * fails if one was written in between; an entry may be NULL */
    int num_saved;             /* length of `saved` */
    const void *state;         /* state_size bytes, copied; `backward` gets the copy */
    size_t state_size;         /* bytes of `state`; 0 => none */
    te_backward_fn backward;   /* needed */
    /* Releases what the copied state owns. It is called exactly once, also if `backward` never runs or the node is not
     * recorded. NULL => the state owns nothing. */
    void (*release)(te_ctx *te, void *state);
} te_node_desc;
/* Records a node on the tape if an input requires a gradient and gradients are enabled; otherwise only calls `release`.
 * TE_ERR_INVALID if desc or a list that it needs is NULL, TE_ERR_STATE if an output is NULL. */
TE_API te_result te_record(te_ctx *te, const te_node_desc *desc);
