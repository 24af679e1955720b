/* api/attention_backends.h: attention behind `backend.attn` (nemo_automodel.components.attention), its block masks, and
 * attention by lists of keys.
 *
 * A module of te_initialize_attn_module is called with tensors as models lay them out, [b, s, H, d] or packed [T, H,
 * d]. A call goes three steps, which are functions of their own: te_preprocess_args_for_attn turns the layout and the
 * masks into those of the backend, te_attn_call attends, te_postprocess_output_for_attn turns the layout back.
 * te_attn_forward does all three, and so does te_forward_with for input, key, value and te_attention_call.
 *
 *     te     DotProductAttention: the module is one. The model's layout as it is; padding as lengths; packed sequences;
 *            softmax_offset
 *     sdpa   te_attention over [b, H, s, d]; windows and padding are made masks of elements first
 *     flex   te_attention with a block mask, which the context keeps from call to call; sinks
 *     eager  a product, a softmax, a product: memory for b H s_q s_kv scores in f32, and as much again for a mask that
 *            is added
 *
 * All four give the same results and gradients, to rounding. One case differs: of a row whose every key is masked by
 * the smallest number of f32 or bf16, added, eager and the CPU see all keys alike; te, sdpa and flex on CUDA, whose
 * scores are in units of log2 and so below f32's range, see none, and give 0. tilelang, cudnn and magi are names of
 * other people's kernels: creating one fails. */

/* ---- modules ---- */

/* Options of te_initialize_attn_module. */
typedef struct te_attn_module_desc {
    const char *name;                   /* NULL => "attn_module" */
    int num_attention_heads;            /* query heads */
    int num_gqa_groups;                 /* heads of keys and values, which divide those; 0 => num_attention_heads */
    int64_t num_qk_channels;            /* size of a head of q and k */
    int64_t num_v_channels;             /* of v and of the result; 0 => num_qk_channels */
    float softmax_scale;                /* 0 => 1 / sqrt(num_qk_channels) */
    te_attn_mask attn_mask_type;        /* 0 => causal; of a call without masks and lengths. sdpa, flex and eager:
                                         * TE_MASK_NONE and TE_MASK_CAUSAL */
    te_qkv_format qkv_format;           /* TE_BSHD, and 0, => [b, s, H, d]; TE_THD: packed, te alone */
    /* te: TE_SOFTMAX_LEARNABLE gives it the parameter softmax_offset. flex takes sinks with the call */
    te_softmax_type softmax_type;
    float dropout_p;                    /* te and sdpa: probability of zeroing an element of the softmax, in training */
    te_parallel_options parallel;       /* te: ranks share its heads */
    bool upstream_windows;              /* a call's window is read as Automodel reads it, which differs by backend:
                                         * sdpa, flex and eager see `left` keys with the query's own (flex: 0 is no
                                         * window), te `left` keys and the query's own. false => `left` keys before the
                                         * query's own, everywhere */
    bool upstream_sink_scale;           /* flex with sinks: softmax_scale is not read, as in Automodel: the scale is 1 /
                                         * sqrt(num_qk_channels) */
} te_attn_module_desc;

/* A module of attention: te a DotProductAttention, the others one without parameters. The caller owns it until it has a
 * parent. `backend` 0: te on CUDA, else sdpa. Errors:
 * TE_ERR_UNSUPPORTED "Unsupported attention implementation" for tilelang, cudnn, magi (whose own rule, equal head sizes
 * up to 128, is checked first) and values outside of the list, and for options that the backend does not have;
 * TE_ERR_INVALID for sizes that do not fit; TE_ERR_STATE inside a graph's capture.
 * Source: initialize_attn_module_and_func. */
TE_API te_module *te_initialize_attn_module(te_ctx *te, te_attn_backend backend, const te_attn_module_desc *desc);
/* The backend that a module was made for; TE_ATTN_DEFAULT for a module that is none of attention, and for NULL. */
TE_API te_attn_backend te_attn_backend_of(const te_module *m);

/* ---- calls ---- */

/* The arguments of a call. Zero means "not given"; tensors are borrowed for the call.
 *   q, k, v         [b, s_q, H, d], [b, s_kv, G, d], [b, s_kv, G, d_v], or packed [T, H, d] ...; any strides, channels
 *                   adjacent
 *   attention_mask  [b, s_kv]: u8, 1 for a token, 0 for padding; te: behind the tokens of each sequence. Or [b or 1, H
 *                   or 1, s_q or 1, s_kv] (eager: 1 for H): u8, 1 where a query sees a key, or f32, f16, bf16, which is
 *                   added to the scores (without a gradient under eager); it is then the whole mask, and no causal one
 *                   is added
 *   cu_seqlens      te, packed: i32 [b + 1], starts of sequences, for queries and keys. Or cu_seqlens_q and
 *                   cu_seqlens_kv, both. A padded one says where they lie in memory
 *   max_seqlen      te, packed: the longest sequence, for queries and keys; or max_seqlen_q and max_seqlen_kv; 0 => as
 *                   long as all tokens
 *   window          keys before the query's own that it sees: (left, 0); not on, and left -1, => all. Causal masks
 *                   alone; see upstream_windows
 *   sink_weights    flex: f32 [H], a logit in each softmax's denominator; differentiable
 *   is_causal       0 => the module's attn_mask_type, or what the mask makes of it
 * The mask of elements that te_preprocess_args_for_attn makes: masked u8 [b or 1, 1, s_q, s_kv], 1 => masked. */
typedef struct te_attn_inputs {
    te_tensor *q, *k, *v;
    te_tensor *attention_mask;
    te_tensor *cu_seqlens, *cu_seqlens_padded;                   /* the second: where sequences lie in memory */
    te_tensor *cu_seqlens_q, *cu_seqlens_kv;
    te_tensor *cu_seqlens_q_padded, *cu_seqlens_kv_padded;       /* likewise */
    int64_t max_seqlen, max_seqlen_q, max_seqlen_kv;
    te_window window;
    te_tensor *sink_weights;
    te_switch is_causal;
} te_attn_inputs;

/* The arguments as the backend takes them; filled by te_preprocess_args_for_attn. */
typedef struct te_attn_args {
    te_tensor *q, *k, *v;         /* te: as given; the others: [b, H, s, d], views of those */
    te_tensor *masked;            /* u8, 1 => masked: [b or 1, 1, s_q, s_kv] where windows, padding or a boolean mask
                                   * ask for one; te: padding [b, 1, 1, s]; NULL => none */
    te_tensor *added;             /* added to the scores; NULL => none */
    bool is_causal;               /* query i sees keys 0 .. i. False beside a mask that says all */
    te_attention_call call;       /* te: the call of DotProductAttention */
    int64_t window_keys;          /* flex: keys that a query sees with its own; -1 => all before it */
    te_tensor *padding;           /* flex: u8 [b, 1, 1, s_kv], 1 => masked; NULL => none */
    te_tensor *sink_weights;      /* flex */
} te_attn_args;

/* *out: the arguments as the module's backend takes them. For te the first of attention_mask, cu_seqlens, cu_seqlens_q
 * with _kv that is given counts, and without any the module's own mask. sdpa and eager read an attention_mask of two
 * dimensions on the host, which waits for the device; without padding in it, it is ignored, and with padding or a
 * window a mask of elements is made, whose last row ends at the last key; the context keeps the last four, until its
 * last module of sdpa, flex and eager goes. Tensors in *out belong to the innermost scope. Refused inside a graph's
 * capture where it reads the mask.
 * Source: preprocess_args_and_kwargs_for_attn. */
TE_API te_result te_preprocess_args_for_attn(te_module *m, const te_attn_inputs *in, te_attn_args *out);
/* Attends -> [b, s_q, H d_v] or [T, H d_v] of te (as DotProductAttention has it), [b, H, s_q, d_v] of the others; in
 * the innermost scope. NULL on failure. */
TE_API te_tensor *te_attn_call(te_module *m, const te_attn_args *args);
/* x of te_attn_call as models lay it out: [b, s_q, H, d_v] or [T, H, d_v], a view where it can be. Source:
 * postprocess_output_for_attn. */
TE_API te_tensor *te_postprocess_output_for_attn(te_module *m, te_tensor *x);
/* The three in a row. NULL on failure. */
TE_API te_tensor *te_attn_forward(te_module *m, const te_attn_inputs *in);

/* ---- block masks ---- */

/* Options of te_create_block_mask: a query sees the keys that mask, window and, if it is given, mask_fn leave. */
typedef struct te_block_mask_desc {
    int64_t batch, heads;   /* 0 => 1: alike for all */
    int64_t s_q, s_kv;      /* queries, keys */
    te_attn_mask mask;      /* 0 => causal; TE_MASK_NONE, TE_MASK_CAUSAL, TE_MASK_CAUSAL_BOTTOM_RIGHT */
    te_window window;       /* as in te_op_attn_fwd; its diagonal is j = i, but for TE_MASK_CAUSAL_BOTTOM_RIGHT */
    te_mask_mod_fn mask_fn; /* called for each element that those leave, on the host; NULL => all are seen */
    void *user;             /* handed to it */
} te_block_mask_desc;
/* u8 [batch, heads, ceil(s_q / 128), ceil(s_kv / 128)] of te_attn_block, for te_attn_rule.block_mask: a block is empty
 * where nothing is seen, and full where everything is. In the innermost scope; NULL on failure, with TE_ERR_INVALID for
 * sizes and masks that are not possible. Source: torch.nn.attention.flex_attention.create_block_mask. */
TE_API te_tensor *te_create_block_mask(te_ctx *te, const te_block_mask_desc *desc);

/* The block mask of flex for causal attention with a window of `window_keys` keys, the query's own among them (-1 => no
 * window), b sequences and H heads: u8 [1, 1, ceil(s_q / 128), ceil(s_kv / 128)]. Made once and kept in the context by
 * all five numbers, at most 64 of them: the oldest goes, and all with the last module of sdpa, flex and eager. Borrowed
 * until then; NULL on failure. Making one copies from host memory, which a graph's capture refuses: a call before it
 * makes the mask. */
TE_API te_tensor *te_flex_block_mask(te_ctx *te, int64_t window_keys, int64_t b, int64_t heads, int64_t s_q,
                                     int64_t s_kv);
/* How many of them the context keeps. */
TE_API int te_flex_block_mask_count(const te_ctx *te);

/* ---- lists of keys ---- */

/* Options of te_sparse_attention; zero is none of them. */
typedef struct te_sparse_attention_desc {
    te_tensor *sinks;    /* f32 [H], a logit in each softmax's denominator; differentiable; NULL => none */
    float softmax_scale; /* 0 => 1 / sqrt(d) */
    int64_t v_dim;       /* channels of a value, the first ones of its key; 0 => d */
} te_sparse_attention_desc;
/* te_op_sparse_attn_fwd as a differentiable function of q [b, s_q, H, d], kv [b, s_kv, d] and sinks -> [b, s_q, H,
 * v_dim] of q's format. indices i32 [b, s_q, n], -1 for an empty slot. desc may be NULL. Deterministic, forward and
 * backward. */
TE_API te_tensor *te_sparse_attention(te_tensor *q, te_tensor *kv, te_tensor *indices,
                                      const te_sparse_attention_desc *desc);

/* The lists of a window and of compressed keys (DeepSeek-V4). */
typedef struct te_sparse_window_desc {
    int64_t batch, seq_len;   /* queries of each sequence; query q has its own key in row q */
    int64_t window;           /* keys before the query's own */
    int64_t num_compressed;   /* compressed keys; 0 => none */
    int64_t ratio;            /* keys in one compressed key: query q sees the first (q + 1) / ratio of them */
    int64_t first_compressed; /* row of the first one; 0 => seq_len */
} te_sparse_window_desc;
/* i32 [batch, seq_len, min(window + 1, seq_len) + num_compressed]: rows max(0, q - window) .. q, ascending, then the
 * compressed keys; -1 where there is none. Made on the host, so made once for many layers; in the innermost scope. NULL
 * on failure; TE_ERR_INVALID for negative numbers. */
TE_API te_tensor *te_sparse_window_indices(te_ctx *te, const te_sparse_window_desc *desc);
