/* api/functions.h: differentiable functions: tensors in, new tensors out, recorded on the tape.
 *
 * Each takes tensors of one context, returns a new tensor that belongs to the innermost scope, or NULL with the story in
 * te_error. Formats: f32, f16, bf16, alike for all operands unless said otherwise; parameters are read in their own. */

/* [..same..] */
TE_API te_tensor *te_add(te_tensor *x, te_tensor *y);
TE_API te_tensor *te_scale(te_tensor *x, float factor);
/* f32 [1]. */
TE_API te_tensor *te_sum_all(te_tensor *x);
TE_API te_tensor *te_mean_all(te_tensor *x);
/* x [.., K] times weight [N, K] transposed, plus bias [N] (may be NULL) -> [.., N], in high precision. */
TE_API te_tensor *te_matmul(te_tensor *x, te_tensor *weight, te_tensor *bias);
/* weight [N], bias [N] may be NULL; eps 0 => 1e-5. */
TE_API te_tensor *te_layernorm(te_tensor *x, te_tensor *weight, te_tensor *bias, float eps, bool zero_centered_gamma);
TE_API te_tensor *te_rmsnorm(te_tensor *x, te_tensor *weight, float eps, bool zero_centered_gamma);
/* [.., N] or, gated, [.., 2N] -> [.., N]. */
TE_API te_tensor *te_activate(te_tensor *x, te_activation activation);
/* p 0 => x itself. Draws from the context's random state. */
TE_API te_tensor *te_dropout(te_tensor *x, float p);
/* residual + dropout(x + bias, p); bias and residual may be NULL. */
TE_API te_tensor *te_bias_dropout_add(te_tensor *x, te_tensor *bias, te_tensor *residual, float p);
/* ids i32/i64 [..] -> [.., H]. */
TE_API te_tensor *te_embedding_lookup(te_tensor *table, te_tensor *ids);

typedef struct te_rotary_desc {
    float base;           /* 0 => 10000 */
    float rotary_percent; /* 0 => 1: dim' = floor(dim * percent) */
    bool interleaved;
    float seq_len_interpolation_factor;         /* both set => positions are interpolated (TransformerEngine: RotaryPositionEmbedding) */
    int64_t pretrained_max_position_embeddings;
    int64_t position_offset;
    te_tensor *start_positions; /* i32 [b], borrowed for the call */
} te_rotary_desc;
/* x [s, b, h, d] or [b, s, h, d]. */
TE_API te_tensor *te_apply_rotary_pos_emb(te_tensor *x, const te_rotary_desc *desc, te_qkv_format format);

typedef struct te_attention_desc {
    te_qkv_format format;
    te_attn_mask mask; /* 0 => causal */
    bool has_window;
    int64_t window_left, window_right;
    float softmax_scale; /* 0 => 1 / sqrt(d) */
    float dropout_p;
} te_attention_desc;
/* q [s, b, H, d], k and v [s, b, G, d] (or bshd) -> [s, b, H, dv]. */
TE_API te_tensor *te_attention(te_tensor *q, te_tensor *k, te_tensor *v, const te_attention_desc *desc);

typedef struct te_cross_entropy_desc {
    float label_smoothing;
    int64_t ignore_index; /* read if has_ignore_index, else -100 */
    bool has_ignore_index;
    bool no_reduce; /* loss per row [M] in place of the mean over rows that are not ignored, [1] */
} te_cross_entropy_desc;
/* logits [.., V], target i32/i64 [..] -> f32. desc may be NULL. */
TE_API te_tensor *te_cross_entropy(te_tensor *logits, te_tensor *target, const te_cross_entropy_desc *desc);
/* f32 [1] = mean((x - target)^2). */
TE_API te_tensor *te_mse_loss(te_tensor *x, te_tensor *target);

/* A node of one's own: `backward` gets the gradients of the outputs (NULL where none arrived) and returns those of the inputs
 * (grad_inputs[i] stays NULL where none is wanted; needs[i] says whether it is). `saved` are retained until it has run, and
 * te_backward refuses to run it if one of them was written meanwhile. `state` is copied by size. */
typedef te_result (*te_backward_fn)(te_ctx *te, const void *state, te_tensor *const *saved, te_tensor *const *grad_outputs,
                                    te_tensor **grad_inputs, const bool *needs);
typedef struct te_node_desc {
    const char *name; /* static */
    te_tensor *const *inputs;
    int num_inputs;
    te_tensor *const *outputs;
    int num_outputs;
    te_tensor *const *saved;
    int num_saved;
    const void *state;
    size_t state_size;
    te_backward_fn backward;
    void (*release)(te_ctx *te, void *state); /* lets go of what the copied state owns, once, whether the node is played, forgotten or never recorded; or NULL */
} te_node_desc;
TE_API te_result te_record(te_ctx *te, const te_node_desc *desc);
