/* api/attention_keys.h: sparse attention by block masks, and by lists of the keys that each query sees. */

/* ---- block masks ---- */

/* Options of te_create_block_mask. A query sees a key if `mask`, `window` and mask_fn (if given) all allow it. */
typedef struct te_block_mask_desc {
    int64_t batch, heads;   /* each of `batch` sequences and each of `heads` heads has a mask of its own; 0 or 1 => all
                             * share one mask */
    int64_t s_q, s_kv;      /* queries, keys */
    te_attn_mask mask;      /* TE_MASK_NONE, TE_MASK_CAUSAL or TE_MASK_CAUSAL_BOTTOM_RIGHT; 0 => causal */
    te_window window;       /* as in te_op_attn_fwd. The window of query i lies around key i; with
                             * TE_MASK_CAUSAL_BOTTOM_RIGHT around key i + s_kv - s_q */
    te_mask_mod_fn mask_fn; /* called on the host for each query and key that `mask` and `window` allow; NULL => no
                             * further restriction */
    void *user;             /* handed to mask_fn */
} te_block_mask_desc;
/* Makes a block mask for te_attn_rule.block_mask: u8 [batch, heads, ceil(s_q / 128), ceil(s_kv / 128)], each element a
 * te_attn_block for 128 queries and 128 keys. A block is empty if no query sees a key, and full if all queries see all
 * keys. The mask belongs to the innermost scope. NULL on failure; TE_ERR_INVALID for impossible sizes and masks.
 * Source: torch.nn.attention.flex_attention.create_block_mask. */
TE_API te_tensor *te_create_block_mask(te_ctx *te, const te_block_mask_desc *desc);

/* ---- lists of keys ---- */

/* Options of te_sparse_attention. */
typedef struct te_sparse_attention_desc {
    te_tensor *sinks;    /* f32 [H], a logit in each softmax's denominator; differentiable; NULL => none */
    float softmax_scale; /* 0 => 1 / sqrt(d) */
    int64_t v_dim;       /* channels of a value. A value is the first v_dim channels of its key; 0 => d */
} te_sparse_attention_desc;
/* Computes attention over the keys that `indices` lists for each query, as te_op_sparse_attn_fwd does: q [b, s_q, H,
 * d], kv [b, s_kv, d], indices i32 [b, s_q, n] with -1 for an unused entry -> [b, s_q, H, v_dim] of q's format. desc
 * may be NULL. Differentiable in q, kv and sinks. Deterministic. */
TE_API te_tensor *te_sparse_attention(te_tensor *q, te_tensor *kv, te_tensor *indices,
                                      const te_sparse_attention_desc *desc);

/* Options of te_sparse_window_indices: a window, and compressed keys (DeepSeek-V4). */
typedef struct te_sparse_window_desc {
    int64_t batch, seq_len;   /* number of sequences, and of queries in each sequence; query q's own key is row q of
                               * kv */
    int64_t window;           /* number of keys before the query's own */
    int64_t num_compressed;   /* number of compressed keys; 0 => none */
    int64_t ratio;            /* number of keys that one compressed key stands for. Query q sees the first (q + 1) /
                               * ratio compressed keys */
    int64_t first_compressed; /* row of kv with the first compressed key; 0 => seq_len */
} te_sparse_window_desc;
/* Makes lists for te_sparse_attention: i32 [batch, seq_len, min(window + 1, seq_len) + num_compressed], in the
 * innermost scope. The list of query q has the rows max(0, q - window) .. q of kv, ascending, then the compressed keys;
 * unused entries are -1. Computed on the host: make them once for all layers. NULL on failure; TE_ERR_INVALID for
 * negative numbers. */
TE_API te_tensor *te_sparse_window_indices(te_ctx *te, const te_sparse_window_desc *desc);
