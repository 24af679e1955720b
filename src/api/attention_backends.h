/* api/attention_backends.h: the attention that Automodel's option `backend.attn` selects
 * (nemo_automodel.components.attention), and the masks that the context keeps for the backends.
 *
 * te_initialize_attn_module makes a module, which is called with tensors as models lay them out: [b, s, H, d], or
 * packed [T, H, d]. te_attn_forward calls these functions:
 *   te_preprocess_args_for_attn      turns the layout and the masks into those of the backend
 *   te_attn_compute                  computes attention
 *   te_postprocess_output_for_attn   turns the layout back
 * te_forward_with computes the same from the fields `input`, `key`, `value` and `attention` of te_forward_args.
 *
 *     te     the module is a DotProductAttention, which reads the model's layout. It supports packed sequences and
 *            softmax_offset
 *     sdpa   te_attention over [b, H, s, d]; windows and padding are first turned into a mask with one element per
 *            score
 *     flex   te_attention with a block mask, which the context keeps from call to call; takes sinks
 *     eager  a product, a softmax, a product. It needs memory for b H s_q s_kv scores in f32, and as much again for a
 *            mask that is added
 *
 * All four give the same results and gradients, to rounding. They differ for a query whose added mask is the most
 * negative finite value of f32 or bf16 at every key. For such a query, "eager" (and every backend on the CPU) weighs
 * all keys equally, but "te" and "sdpa" give 0 on CUDA.
 * "tilelang", "cudnn" and "magi" are kernels of other projects: te_initialize_attn_module refuses them. */

/* ---- modules ---- */

/* Options of te_initialize_attn_module. */
typedef struct te_attn_module_desc {
    const char *name;                   /* NULL => "attn_module" */
    int num_attention_heads;            /* query heads */
    int num_gqa_groups;                 /* number of heads of keys and values, a divisor of num_attention_heads; 0 =>
                                         * num_attention_heads */
    int64_t num_qk_channels;            /* channels of one head of q and k */
    int64_t num_v_channels;             /* channels of one head of v and of the result; 0 => num_qk_channels */
    float softmax_scale;                /* 0 => 1 / sqrt(num_qk_channels) */
    te_attn_mask attn_mask_type;        /* mask of a call whose `is_causal` is 0; 0 => causal. An attention_mask of four
                                         * dimensions replaces it. With padding or packed sequences, te reads only
                                         * whether it is causal. sdpa, flex and eager accept only TE_MASK_NONE and
                                         * TE_MASK_CAUSAL */
    te_qkv_format qkv_format;           /* 0 or TE_BSHD => [b, s, H, d]; TE_THD => packed, for te alone */
    /* Kind of softmax, for te alone; 0 => vanilla. TE_SOFTMAX_LEARNABLE gives the module the parameter softmax_offset.
     * (The sinks of flex are an argument of the call.) */
    te_softmax_type softmax_type;
    float dropout_p;                    /* for te and sdpa: probability of zeroing an element of the softmax, in
                                         * training */
    te_parallel_options parallel;       /* for te: ranks that share the heads */
    /* Meaning of window.left in a call. false => a query sees its own key and window.left keys before it. true => as in
     * Automodel. In "sdpa", "flex" and "eager", a query then sees window.left keys, its own included. In "flex",
     * window.left 0 then means no window. "te" always uses the meaning of false. */
    bool upstream_windows;
    bool upstream_sink_scale;           /* read by flex if a call has sinks: true => the scale is num_qk_channels^-0.5,
                                         * as in Automodel; softmax_scale is ignored */
} te_attn_module_desc;

/* Makes a module of attention: a DotProductAttention for "te", else a module without parameters. The caller owns it
 * until a parent takes it. `backend` 0 means "te" on CUDA, else "sdpa".
 * TE_ERR_UNSUPPORTED "Unsupported attention implementation" for "tilelang", "cudnn", "magi" and values outside
 * te_attn_backend.
 * TE_ERR_UNSUPPORTED for options that the backend does not have; but TE_ERR_INVALID for dropout_p.
 * TE_ERR_INVALID for sizes that do not fit. Sizes are checked first: "magi" gives this error if num_qk_channels and
 * num_v_channels differ or are above 128.
 * TE_ERR_STATE inside a graph's capture.
 * Source: initialize_attn_module_and_func. */
TE_API te_module *te_initialize_attn_module(te_ctx *te, te_attn_backend backend, const te_attn_module_desc *desc);
/* Returns the backend of a module of te_initialize_attn_module. TE_ATTN_TE for every DotProductAttention;
 * TE_ATTN_DEFAULT for other modules and NULL. */
TE_API te_attn_backend te_attn_backend_of(const te_module *m);

/* ---- calls ---- */

/* The arguments of a call. Zero means "not given"; tensors are borrowed for the call.
 *   q, k, v         [b, s_q, H, d], [b, s_kv, G, d], [b, s_kv, G, d_v], or packed [T, H, d] and so on; any strides,
 *                   channels adjacent
 *   attention_mask  of two dimensions [b, s_kv]: u8, 1 for a token, 0 for padding; the backend "te" needs the padding
 *                   behind the tokens of each sequence.
 *                   Of four dimensions [b or 1, H or 1, s_q or 1, s_kv]: u8, 1 where a query sees a key; or f32, f16,
 *                   bf16, which is added to the scores. "eager" takes u8 masks only with 1 in place of H, and gives
 *                   added masks no gradient. No causal mask is used in addition to a mask of four dimensions
 *   cu_seqlens      "te", packed: i32 [b + 1], the starts of the sequences, for queries and keys alike. Or give both
 *                   cu_seqlens_q and cu_seqlens_kv
 *   cu_seqlens_padded, cu_seqlens_q_padded, cu_seqlens_kv_padded   "te", packed: i32 [b + 1], the rows at which the
 *                   sequences of cu_seqlens, cu_seqlens_q, cu_seqlens_kv begin in memory
 *   max_seqlen      "te", packed: length of the longest sequence, for queries and keys alike. Or give max_seqlen_q and
 *                   max_seqlen_kv. 0 => the number of all tokens
 *   window          (left, 0): `left` is the number of keys that a query sees before its own; window.on false or `left`
 *                   -1 => all of them. For causal masks alone; see te_attn_module_desc.upstream_windows
 *   sink_weights    "flex": f32 [H], one more logit in the denominator of each softmax of a head; differentiable
 *   is_causal       0 => as the module's attn_mask_type says */
typedef struct te_attn_inputs {
    te_tensor *q, *k, *v;
    te_tensor *attention_mask;
    te_tensor *cu_seqlens, *cu_seqlens_padded;
    te_tensor *cu_seqlens_q, *cu_seqlens_kv;
    te_tensor *cu_seqlens_q_padded, *cu_seqlens_kv_padded;
    int64_t max_seqlen, max_seqlen_q, max_seqlen_kv;
    te_window window;
    te_tensor *sink_weights;
    te_switch is_causal;
} te_attn_inputs;

/* The arguments in the form that the backend takes; te_preprocess_args_for_attn fills them. */
typedef struct te_attn_args {
    te_tensor *q, *k, *v;         /* backend "te": the given tensors; other backends: views of them, [b, H, s, d] */
    te_tensor *masked;            /* u8 [b or 1, 1, s_q, s_kv], 1 => the query does not see the key; NULL => none. "te"
                                   * also takes padding masks [b, 1, 1, s] */
    te_tensor *added;             /* mask that is added to the scores; NULL => none */
    bool is_causal;               /* query i sees keys 0 .. i; false if `masked` or `added` already says what a query
                                   * sees */
    te_attn_call call;       /* te: the options of the call of DotProductAttention */
    int64_t window_keys;          /* flex: number of keys that a query sees, its own included; -1 => all keys up to its
                                   * own */
    te_tensor *padding;           /* flex: u8 [b, 1, 1, s_kv], 1 => masked; NULL => none */
    te_tensor *sink_weights;      /* flex: as in te_attn_inputs */
} te_attn_args;

/* Fills *out with the arguments in the form that the module's backend takes. The tensors in *out belong to the
 * innermost scope.
 *
 * "te" reads only the first of these that is given: attention_mask; cu_seqlens; cu_seqlens_q with cu_seqlens_kv. Unless
 * attention_mask has four dimensions, every backend also masks causally if `is_causal` is on, or if `is_causal` is 0
 * and the module's attn_mask_type is causal.
 * "sdpa" and "eager" copy an attention_mask of two dimensions to the host. The copy syncs, and fails inside a graph's
 * capture. Both ignore a mask without padding. With padding or a window they make a mask with one element per score. It
 * is aligned at the bottom right: the last query sees keys up to the last key. The context keeps the last four such
 * masks, until the last module with the backend "sdpa", "flex" or "eager" is destroyed.
 * Source: preprocess_args_and_kwargs_for_attn. */
TE_API te_result te_preprocess_args_for_attn(te_module *m, const te_attn_inputs *in, te_attn_args *out);
/* Computes attention. The result is [b, s_q, H d_v] or [T, H d_v] for te, and [b, H, s_q, d_v] for sdpa, flex and
 * eager. It belongs to the innermost scope. NULL on failure. */
TE_API te_tensor *te_attn_compute(te_module *m, const te_attn_args *args);
/* Returns x, the result of te_attn_compute, in the layout of models: [b, s_q, H, d_v] or [T, H, d_v], a view where
 * possible. Source: postprocess_output_for_attn. */
TE_API te_tensor *te_postprocess_output_for_attn(te_module *m, te_tensor *x);
/* Runs te_preprocess_args_for_attn, te_attn_compute and te_postprocess_output_for_attn. NULL on failure. */
TE_API te_tensor *te_attn_forward(te_module *m, const te_attn_inputs *in);

/* ---- masks that the context keeps ---- */

/* Returns the block mask of the backend "flex" for causal attention: u8 [1, 1, ceil(s_q / 128), ceil(s_kv / 128)], the
 * same for all b sequences and all heads. window_keys is the number of keys in the window, the query's own included; -1
 * means no window. NULL on failure.
 * The first call makes the mask; the context keeps it for calls with the same arguments. The result is borrowed until
 * its release. The 65th mask releases the oldest. The destruction of the last module with the backend "sdpa", "flex" or
 * "eager" releases all.
 * Making a mask copies from host memory, which a graph's capture refuses: call this function once before the
 * capture. */
TE_API te_tensor *te_flex_block_mask(te_ctx *te, int64_t window_keys, int64_t b, int64_t heads, int64_t s_q,
                                     int64_t s_kv);
/* Returns the number of masks that the context keeps for te_flex_block_mask. */
TE_API int te_flex_block_mask_count(const te_ctx *te);
