/* api/attention_keys.h: sparse attention: block masks, and lists of the keys that each query sees. */

/* ---- block masks ---- */

/* Options of te_create_block_mask. A query sees the keys that mask and window allow and, if mask_fn is given, mask_fn
 * allows too. */
typedef struct te_block_mask_desc {
    int64_t batch, heads;   /* sequences and heads that have masks of their own; 0 => 1: one mask for all */
    int64_t s_q, s_kv;      /* queries, keys */
    te_attn_mask mask;      /* 0 => causal; TE_MASK_NONE, TE_MASK_CAUSAL, TE_MASK_CAUSAL_BOTTOM_RIGHT */
    te_window window;       /* as in te_op_attn_fwd; the window's diagonal is j = i, or with TE_MASK_CAUSAL_BOTTOM_RIGHT
                             * the diagonal of the mask */
    te_mask_mod_fn mask_fn; /* called on the host for each element that mask and window allow; NULL => no further
                             * restriction */
    void *user;             /* handed to mask_fn */
} te_block_mask_desc;
/* Makes a block mask for te_attn_rule.block_mask: u8 [batch, heads, ceil(s_q / 128), ceil(s_kv / 128)] of
 * te_attn_block. A block is empty if none of its elements is seen, and full if all are. The mask belongs to the
 * innermost scope. NULL on failure; TE_ERR_INVALID for sizes and masks that are not possible. Source:
 * torch.nn.attention.flex_attention.create_block_mask. */
TE_API te_tensor *te_create_block_mask(te_ctx *te, const te_block_mask_desc *desc);

/* ---- lists of keys ---- */

/* Options of te_sparse_attention. */
typedef struct te_sparse_attention_desc {
    te_tensor *sinks;    /* f32 [H], a logit in each softmax's denominator; differentiable; NULL => none */
    float softmax_scale; /* 0 => 1 / sqrt(d) */
    int64_t v_dim;       /* channels of a value: the value is the first v_dim channels of its key; 0 => d */
} te_sparse_attention_desc;
/* Computes attention over the keys that `indices` lists for each query: te_op_sparse_attn_fwd as a differentiable
 * function of q [b, s_q, H, d], kv [b, s_kv, d] and sinks -> [b, s_q, H, v_dim] of q's format. indices i32 [b, s_q, n],
 * -1 for an empty slot. desc may be NULL. Deterministic, forward and backward. */
TE_API te_tensor *te_sparse_attention(te_tensor *q, te_tensor *kv, te_tensor *indices,
                                      const te_sparse_attention_desc *desc);

/* Options of te_sparse_window_indices: a window, and compressed keys (DeepSeek-V4). */
typedef struct te_sparse_window_desc {
    int64_t batch, seq_len;   /* sequences, and queries of each sequence; query q's own key is row q */
    int64_t window;           /* keys before the query's own */
    int64_t num_compressed;   /* compressed keys; 0 => none */
    int64_t ratio;            /* keys that one compressed key stands for: query q sees the first (q + 1) / ratio of the
                               * compressed keys */
    int64_t first_compressed; /* row of the first compressed key; 0 => seq_len */
} te_sparse_window_desc;
/* Makes lists for te_sparse_attention: i32 [batch, seq_len, min(window + 1, seq_len) + num_compressed]. The list of
 * query q has rows max(0, q - window) .. q, ascending, then the compressed keys; unused entries are -1. Computed on
 * the host: make the lists once for all layers. The tensor belongs to the innermost scope. NULL on failure;
 * TE_ERR_INVALID for negative numbers. */
TE_API te_tensor *te_sparse_window_indices(te_ctx *te, const te_sparse_window_desc *desc);
