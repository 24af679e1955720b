/* api/functions.h: differentiable functions: tensors in, new tensors out, recorded on the tape.
 *
 * Each takes tensors of one context and returns a new tensor that belongs to the innermost scope, or NULL with the
 * error in te_error.
 * Formats: f32, f16, bf16, alike for all operands unless said otherwise; a norm's parameters, a bias and a table may be
 * of another one. All allocate; none syncs. */

/* x + y, of one shape and format. */
TE_API te_tensor *te_add(te_tensor *x, te_tensor *y);
/* x * y of one shape, or of x [.., N] and one number for each of its rows, y [..] or [.., 1] -> x's shape and format,
 * rounded once from f32. y may be of another format; its gradient is then the sums of dy * x over the rows. */
TE_API te_tensor *te_mul(te_tensor *x, te_tensor *y);
/* x * factor. */
TE_API te_tensor *te_scale(te_tensor *x, float factor);
/* The sum of all elements, f32 [1], in a fixed order. */
TE_API te_tensor *te_sum_all(te_tensor *x);
/* The mean of all elements, f32 [1]. TE_ERR_SHAPE for an empty tensor. */
TE_API te_tensor *te_mean_all(te_tensor *x);
/* x [.., K] W^T + bias -> [.., N], in high precision whatever the autocast; weight [N, K], bias [N] or NULL. */
TE_API te_tensor *te_linear(te_tensor *x, te_tensor *weight, te_tensor *bias);
/* LayerNorm of each row of x [.., N] -> [.., N]; weight [N], bias [N] or NULL; eps 0 => 1e-5; zero_centered_gamma: the
 * factor is weight + 1. */
TE_API te_tensor *te_layernorm(te_tensor *x, te_tensor *weight, te_tensor *bias, float eps, bool zero_centered_gamma);
/* RMSNorm: the same without mean and bias. */
TE_API te_tensor *te_rmsnorm(te_tensor *x, te_tensor *weight, float eps, bool zero_centered_gamma);
/* x / sqrt(sum(x^2) + eps) over the last dimension; eps 0 => 1e-6. Source:
 * transformer_engine.pytorch.ops.L2Normalization. */
TE_API te_tensor *te_l2_normalization(te_tensor *x, float eps);
/* x [.., N], or [.., 2N] for a gated activation, -> [.., N]; params may be NULL. */
TE_API te_tensor *te_activate(te_tensor *x, te_activation activation, const te_activation_params *params);
/* te_activate(x) times one number for each row, permuted_probs [..] or [.., 1], in f32 and rounded once -> [.., N]: the
 * probabilities of tokens that have been permuted to their experts, multiplied in before the experts' second product.
 * They are rounded to x's format first; both gradients come from one pass over x. Any activation; te.ops have it for
 * TE_SWIGLU, TE_SRELU and TE_CLAMPED_SWIGLU. params may be NULL. TE_ERR_SHAPE where the probabilities are not as many
 * as the rows.
 * Source: transformer_engine.pytorch.ops.ScaledSwiGLU, ScaledSReLU, ScaledClampedQGeGLU
 * (common/activation/scaled_activation.cu). */
TE_API te_tensor *te_scaled_activate(te_tensor *x, te_tensor *permuted_probs, te_activation activation,
                                     const te_activation_params *params);
/* Zeroes elements with probability p and divides the others by 1 - p; p 0 => x itself. Draws from the context's random
 * state. */
TE_API te_tensor *te_dropout(te_tensor *x, float p);
/* residual + dropout(x + bias, p); x, residual [.., N], bias [N]; bias and residual may be NULL. */
TE_API te_tensor *te_bias_dropout_add(te_tensor *x, te_tensor *bias, te_tensor *residual, float p);
/* residual + x / (1 - p), or with probability p residual alone: one draw for each index of x's first dimension
 * (stochastic depth). residual may be NULL. */
TE_API te_tensor *te_drop_path(te_tensor *x, te_tensor *residual, float p);
/* The rows of table [V, H] at ids (i32 or i64, [..]) -> [.., H]. Ids outside 0 .. V-1 are an error (TE_ERR_INVALID): of
 * the call on the CPU, of the next call that waits on a GPU (te_synchronize). */
TE_API te_tensor *te_embedding_lookup(te_tensor *table, te_tensor *ids);
/* The same where ranks share the vocabulary: the table is rows vocab_start .. vocab_start + V - 1 of vocab_size. An id
 * of another rank's gives zeros, so that te_all_reduce of the ranks' results is the whole; ids outside 0 .. vocab_size
 * - 1 are the error. Source: megatron.core VocabParallelEmbedding. */
TE_API te_tensor *te_vocab_parallel_embedding_lookup(te_tensor *table, te_tensor *ids, int64_t vocab_size,
                                                     int64_t vocab_start);

/* cap * tanh(x / cap), of any shape: what Gemma 2 does to its logits. cap positive. */
TE_API te_tensor *te_softcap(te_tensor *x, float cap);
/* The tensors x[0] .. x[n - 1] behind each other along dimension `dim` (negative: from the end): alike in format and in
 * all other sizes. n at least 1: NULL for 0, without an error, which no tensor has a context for. */
TE_API te_tensor *te_concat(te_tensor *const *x, int n, int dim);

/* How a rotary embedding's frequencies change for contexts longer than those that a model was first trained on.
 * Source: transformers, modeling_rope_utils; LINEAR, DYNAMIC, LLAMA3, YARN and LONGROPE are its rope types of these
 * names. */
typedef enum te_rope_type {
    TE_ROPE_DEFAULT = 0, /* base^(-2i / dim) */
    TE_ROPE_LINEAR,      /* divided by `factor` */
    TE_ROPE_DYNAMIC,     /* sequences beyond original_max_position_embeddings have a larger base: times (factor * length
                          * / original - (factor - 1))^(dim / (dim - 2)) */
    TE_ROPE_LLAMA3,      /* with w the positions of a full turn: as they are where w < original / high_freq_factor,
                          * divided by `factor` where w > original / low_freq_factor, between these interpolated,
                          * linearly in 1 / w */
    TE_ROPE_YARN,        /* as they are for pairs that turn beta_fast times within the original context or more often,
                          * divided by `factor` for those that turn beta_slow times or less often, between these
                          * interpolated, linearly in the pair's number (Peng et al. 2023) */
    TE_ROPE_LONGROPE     /* divided by short_factor[i], or for sequences longer than the original context by
                          * long_factor[i] */
} te_rope_type;
enum { TE_MAX_ROPE_FACTORS = 256 }; /* the most factors of a list of longrope: heads of up to 512 channels */
/* A schedule and its numbers; fields that its type does not name are not looked at. */
typedef struct te_rope_scaling {
    te_rope_type type;                        /* 0 => frequencies stay as they are */
    float factor;                             /* LINEAR, DYNAMIC, LLAMA3, YARN: positive; LONGROPE: of the default
                                               * attention_factor */
    int64_t original_max_position_embeddings; /* all but LINEAR: positive */
    float low_freq_factor, high_freq_factor;  /* LLAMA3: positive, the second the larger one */
    float beta_fast, beta_slow;               /* YARN: 0 => 32, 1 */
    float mscale, mscale_all_dim;             /* YARN: both given => attention_factor is m(mscale) / m(mscale_all_dim),
                                               * m(x) = 0.1 x ln(factor) + 1, or 1 for a factor up to 1; 0 => not */
    bool no_truncate;                         /* YARN: pairs between which frequencies are interpolated need not be
                                               * whole numbers */
    float attention_factor;                   /* YARN, LONGROPE: multiplies cosine and sine; 0 => YARN: m(1), LONGROPE:
                                               * sqrt(1 + ln(factor) / ln(original)), or 1 for a factor up to 1 */
    const float *short_factor, *long_factor;  /* LONGROPE: [dim / 2] each, positive, in host memory; read whenever
                                               * frequencies are made, so modules need them for as long as they live */
} te_rope_scaling;
/* inv_freq [dim / 2] and *attention_factor of sequences of `length` tokens, dim even: te_rope_angles' fields. base 0 =>
 * 10000; scaling may be NULL. Fails where a field of the type is out of its range. */
TE_API te_result te_rope_frequencies(te_ctx *te, const te_rope_scaling *scaling, float base, int dim, int64_t length,
                                     float *inv_freq, float *attention_factor);

/* A rotary embedding. Source: transformer_engine.pytorch.attention.RotaryPositionEmbedding. */
typedef struct te_rotary_desc {
    float base;                                 /* angle of channel pair i: position * base^(-2i / dim); 0 => 10000 */
    float rotary_percent;                       /* share of the head's channels that are rotated, dim = floor(d *
                                                 * percent), which may be none; 0 => 1 */
    bool interleaved;                           /* channels 2i and 2i + 1 form a pair; false => i and i + dim / 2 */
    float seq_len_interpolation_factor;         /* with pretrained_max_position_embeddings: positions are divided by it;
                                                 * 0 => not */
    int64_t pretrained_max_position_embeddings; /* sequences beyond it times the factor are scaled to it; 0 => positions
                                                 * stay as they are */
    te_rope_scaling scaling;                    /* of frequencies, for longer contexts; 0 => as they are */
    int64_t position_offset;                    /* added to every position */
    te_tensor *start_positions;                 /* i32 [b], added to the positions of each sequence (borrowed for the
                                                 * call); NULL => 0 */
    te_tensor *positions;                       /* i32 or i64, [s], [b, s] or [tokens]: a token's position (borrowed for
                                                 * the call); NULL => its place in its sequence */
    te_tensor *freqs;                           /* the caller's own table [positions, 1 or b, 1, dim], f32, f16 or bf16:
                                                 * the angle of each channel of a token at position t is row t, of its
                                                 * sequence where the second size is b (borrowed for the call; no
                                                 * gradient). base, rotary_percent, seq_len_interpolation_factor and
                                                 * scaling stay 0; NULL => angles by these. mRoPE, whose tokens have
                                                 * several positions each: a row for each token, with positions NULL,
                                                 * and its channels' angles by the position of their section */
    float attention_factor;                     /* of cosine and sine, with freqs (te_rope_freqs gives it); 0 => 1 */
    int cp_size, cp_rank;                       /* context parallel: the input is chunks cp_rank and 2 cp_size - 1 -
                                                 * cp_rank of 2 cp_size of each sequence; 0 => whole sequences */
    te_tensor *cu_seqlens;                      /* i32 [b + 1], TE_THD: the row that each sequence begins at (borrowed
                                                 * for the call); modules put their call's there */
    int64_t max_seqlen;                         /* the longest sequence, which interpolation, TE_ROPE_DYNAMIC and
                                                 * TE_ROPE_LONGROPE look at; 0 => position_offset and the size of x
                                                 * there (cp_size times it), modules: the call's max_seqlen */
} te_rotary_desc;
/* Rotates x [s, b, H, d] or [b, s, H, d], as `format` says, or with TE_THD [tokens, H, d] -> the same shape. desc may
 * be NULL. */
TE_API te_tensor *te_apply_rotary_pos_emb(te_tensor *x, const te_rotary_desc *desc, te_qkv_format format);

/* Options of te_attention; zero is causal attention without dropout. */
typedef struct te_attention_desc {
    te_qkv_format format; /* of q, k, v and the result; 0 => [s, b, H, d] */
    te_attn_rule rule;    /* mask, window, scale, dropout (from the context's random state), lengths, biases, offsets,
                           * pages; zero => causal attention alone. Tensors are borrowed for the call */
    te_tensor *max_logit; /* f32 [H], written: the largest score of each head (borrowed); NULL => not wanted */
} te_attention_desc;
/* softmax(scale q k^T, masked) v: q [s_q, b, H, d], k [s_kv, b, G, d], v [s_kv, b, G, dv] (or b first, or packed) ->
 * [s_q, b, H, dv]. Head h uses group h / (H / G). Gradients also for rule.core_attention_bias and rule.softmax_offset.
 * desc may be NULL. Deterministic, forward and backward.
 * Source: transformer_engine.pytorch.DotProductAttention. */
TE_API te_tensor *te_attention(te_tensor *q, te_tensor *k, te_tensor *v, const te_attention_desc *desc);

/* softmax(scale * x) over the last dimension; scale 0 => 1. The four softmax functions of TransformerEngine
 * (transformer_engine.pytorch.attention's ScaledSoftmax ...), of any sizes and float formats. */
TE_API te_tensor *te_scaled_softmax(te_tensor *x, float scale);
/* The same with a mask, u8 [b or 1, 1, s_q, s_k], of x [b, h, s_q, s_k]: scores where it is not 0 become -10000, and a
 * row that is masked throughout gives zeros. mask may be NULL. */
TE_API te_tensor *te_scaled_masked_softmax(te_tensor *x, te_tensor *mask, float scale);
/* The same of square matrices x [.., s, s]: row i sees its first i + 1 columns, and the others are 0. */
TE_API te_tensor *te_scaled_upper_triang_masked_softmax(te_tensor *x, float scale);
/* The same of x [.., s_q, s_k], aligned at the bottom right: row i sees its first i + 1 + s_k - s_q columns, and a row
 * that sees none is 0. */
TE_API te_tensor *te_scaled_aligned_causal_masked_softmax(te_tensor *x, float scale);

/* Options of te_cross_entropy. */
typedef struct te_cross_entropy_desc {
    float label_smoothing; /* share of the target distribution that is uniform, 0 to 1 */
    int64_t ignore_index;  /* rows with this target count for nothing; read if has_ignore_index, else -100 */
    bool has_ignore_index; /* ignore_index was given */
    bool no_reduce_loss;   /* the loss of each row, [M], in place of the mean over the rows that are not ignored, [1];
                            * TransformerEngine's default */
    te_group *dist_process_group; /* ranks that share the vocabulary (borrowed for the call): rank r has columns r V ..
                                   * (r + 1) V - 1; NULL => one has all */
    bool inplace_backward; /* the gradient is written over the logits, which te_backward takes from the caller */
} te_cross_entropy_desc;
/* The cross-entropy of logits [.., V] and target (i32 or i64, [..], M ids) -> f32 [1] or [M]. desc may be NULL. With a
 * group all ranks call it with the same targets, and get the same losses. Targets that are neither ignore_index nor in
 * the vocabulary are an error (TE_ERR_INVALID): of the call on the CPU, of the next call that waits on a GPU
 * (te_synchronize).
 * Source: transformer_engine.pytorch.parallel_cross_entropy. */
TE_API te_tensor *te_cross_entropy(te_tensor *logits, te_tensor *target, const te_cross_entropy_desc *desc);
/* mean((x - target)^2), f32 [1]; x and target of one shape and format. */
TE_API te_tensor *te_mse_loss(te_tensor *x, te_tensor *target);

/* The backward function of a recorded node: reads the gradients of the outputs (grad_outputs[i] is NULL where none
 * arrived), and sets grad_inputs[i] to a tensor of the input's shape and format (it may be one of grad_outputs) where
 * needs[i] is true, leaving the others NULL.
 * Nothing is recorded inside (te_enable_grad_begin changes that). Returns TE_OK, or an error's code. */
typedef te_result (*te_backward_fn)(te_ctx *te, const void *state, te_tensor *const *saved,
                                    te_tensor *const *grad_outputs, te_tensor **grad_inputs, const bool *needs);
/* A differentiable function of the user's. The lists are copied by te_record. */
typedef struct te_node_desc {
    const char *name;          /* for messages; must outlive the tape: a literal */
    te_tensor *const *inputs;  /* [num_inputs]; an entry may be NULL */
    int num_inputs;            /* length of `inputs`, `needs` and `grad_inputs` */
    te_tensor *const *outputs; /* [num_outputs], new tensors; they require a gradient from here on */
    int num_outputs;           /* length of `outputs` and `grad_outputs` */
    te_tensor *const *saved;   /* [num_saved], retained until `backward` has run; te_backward refuses if one was written
                                * meanwhile; an entry may be NULL */
    int num_saved;             /* length of `saved` */
    const void *state;         /* state_size bytes, copied; `backward` gets the copy */
    size_t state_size;         /* bytes of `state`; 0 => none */
    te_backward_fn backward;   /* needed */
    /* Releases what the copied state owns, once, whether the node is played, forgotten or never recorded. NULL => it
     * owns nothing. */
    void (*release)(te_ctx *te, void *state);
} te_node_desc;
/* Puts a node onto the tape if an input requires a gradient and recording is on; else only `release` is called.
 * TE_ERR_INVALID without a desc or one of its lists, TE_ERR_STATE for an output that is NULL. */
TE_API te_result te_record(te_ctx *te, const te_node_desc *desc);
