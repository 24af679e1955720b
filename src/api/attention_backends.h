/* api/attention_backends.h: attention behind `backend.attn` (nemo_automodel.components.attention), and the masks that
 * it keeps.
 *
 * A module of te_initialize_attn_module is called with tensors as models lay them out, [b, s, H, d] or packed [T, H,
 * d]. A call runs three functions, which can also be called one by one: te_preprocess_args_for_attn turns the layout
 * and the masks into those of the backend, te_attn_compute computes attention, te_postprocess_output_for_attn turns the
 * layout back. te_attn_forward runs all three, and so does te_forward_with for input, key, value and te_attn_call.
 *
 *     te     DotProductAttention: the module is one. The model's layout as it is; padding as lengths; packed sequences;
 *            softmax_offset
 *     sdpa   te_attention over [b, H, s, d]; windows and padding are made masks of elements first
 *     flex   te_attention with a block mask, which the context keeps from call to call; sinks
 *     eager  a product, a softmax, a product: memory for b H s_q s_kv scores in f32, and as much again for a mask that
 *            is added
 *
 * All four give the same results and gradients, to rounding, except for one case: a query all of whose keys are masked
 * by adding the smallest number of f32 or bf16. Then eager, and every backend on the CPU, treats all keys alike. te,
 * sdpa and flex on CUDA give 0: their scores are in units of log2, where this number is below f32's range, and the
 * query sees no key. tilelang, cudnn and magi are kernels of other projects: te_initialize_attn_module refuses them. */

/* ---- modules ---- */

/* Options of te_initialize_attn_module. */
typedef struct te_attn_module_desc {
    const char *name;                   /* NULL => "attn_module" */
    int num_attention_heads;            /* query heads */
    int num_gqa_groups;                 /* heads of keys and values; divides num_attention_heads; 0 =>
                                         * num_attention_heads */
    int64_t num_qk_channels;            /* size of a head of q and k */
    int64_t num_v_channels;             /* size of a head of v and of the result; 0 => num_qk_channels */
    float softmax_scale;                /* 0 => 1 / sqrt(num_qk_channels) */
    te_attn_mask attn_mask_type;        /* mask of a call without masks and lengths; 0 => causal. sdpa, flex and eager:
                                         * TE_MASK_NONE and TE_MASK_CAUSAL */
    te_qkv_format qkv_format;           /* 0 or TE_BSHD => [b, s, H, d]; TE_THD: packed, te alone */
    /* te: with TE_SOFTMAX_LEARNABLE the module has the parameter softmax_offset. flex takes sinks with the call; 0 =>
     * vanilla */
    te_softmax_type softmax_type;
    float dropout_p;                    /* te and sdpa: probability of zeroing an element of the softmax, in training */
    te_parallel_options parallel;       /* te: ranks share its heads */
    /* How a call's window (left, 0) is read. false => a query sees its own key and `left` keys before it, in every
     * backend. true => as in Automodel, where the backends differ: sdpa, flex and eager count the own key among the
     * `left` keys (flex: 0 is no window); te sees `left` keys and the own key. */
    bool upstream_windows;
    bool upstream_sink_scale;           /* flex with sinks: softmax_scale is ignored and the scale is 1 /
                                         * sqrt(num_qk_channels), as in Automodel; false => softmax_scale is used */
} te_attn_module_desc;

/* Makes a module of attention: te a DotProductAttention, the other backends a module without parameters. The caller
 * owns it until a parent gets it. `backend` 0: te on CUDA, else sdpa. Errors:
 * TE_ERR_UNSUPPORTED "Unsupported attention implementation" for tilelang, cudnn, magi (whose own rule, equal head sizes
 * up to 128, is checked first) and values outside the list, and for options that the backend does not have;
 * TE_ERR_INVALID for sizes that do not fit; TE_ERR_STATE inside a graph's capture.
 * Source: initialize_attn_module_and_func. */
TE_API te_module *te_initialize_attn_module(te_ctx *te, te_attn_backend backend, const te_attn_module_desc *desc);
/* Returns the backend that a module was made for; TE_ATTN_DEFAULT for NULL, and for a module that
 * te_initialize_attn_module did not make. */
TE_API te_attn_backend te_attn_backend_of(const te_module *m);

/* ---- calls ---- */

/* The arguments of a call. Zero means "not given"; tensors are borrowed for the call.
 *   q, k, v         [b, s_q, H, d], [b, s_kv, G, d], [b, s_kv, G, d_v], or packed [T, H, d] ...; any strides, channels
 *                   adjacent
 *   attention_mask  [b, s_kv]: u8, 1 for a token, 0 for padding; te: the padding lies behind the tokens of each
 *                   sequence. Or [b or 1, H or 1, s_q or 1, s_kv] (eager: 1 for H): u8, 1 where a query sees a key, or
 *                   f32, f16, bf16, which is added to the scores (without a gradient under eager). A mask of four
 *                   dimensions is the whole mask: no causal mask is added to it
 *   cu_seqlens      te, packed: i32 [b + 1], starts of sequences, for queries and keys. Or cu_seqlens_q and
 *                   cu_seqlens_kv, both
 *   cu_seqlens_padded, cu_seqlens_q_padded, cu_seqlens_kv_padded   te, packed: where the sequences of cu_seqlens,
 *                   cu_seqlens_q, cu_seqlens_kv lie in memory
 *   max_seqlen      te, packed: the longest sequence, for queries and keys; or max_seqlen_q and max_seqlen_kv; 0 => as
 *                   long as all tokens
 *   window          (left, 0): `left` is the number of keys that a query sees before its own; window.on false, and left
 *                   -1 => all. Causal masks alone; see te_attn_module_desc.upstream_windows
 *   sink_weights    flex: f32 [H], a logit in each softmax's denominator; differentiable
 *   is_causal       0 => by the mask, or else by the module's attn_mask_type */
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

/* The arguments as the backend takes them; filled by te_preprocess_args_for_attn. */
typedef struct te_attn_args {
    te_tensor *q, *k, *v;         /* te: as given; sdpa, flex, eager: views of them, [b, H, s, d] */
    te_tensor *masked;            /* u8, 1 => masked: [b or 1, 1, s_q, s_kv] where windows, padding or a boolean mask
                                   * need one; te: padding [b, 1, 1, s]; NULL => none */
    te_tensor *added;             /* added to the scores; NULL => none */
    bool is_causal;               /* query i sees keys 0 .. i; false beside a mask that already says which keys it
                                   * sees */
    te_attn_call call;       /* te: the call of DotProductAttention */
    int64_t window_keys;          /* flex: keys that a query sees, its own included; -1 => all before it */
    te_tensor *padding;           /* flex: u8 [b, 1, 1, s_kv], 1 => masked; NULL => none */
    te_tensor *sink_weights;      /* flex: as given */
} te_attn_args;

/* Fills *out with the arguments as the module's backend takes them; its tensors belong to the innermost scope.
 *
 * te: reads the first of attention_mask, cu_seqlens, cu_seqlens_q with cu_seqlens_kv that is given; without any it uses
 * the module's own mask. sdpa and eager: copy an attention_mask of two dimensions to the host, which waits for the
 * device. A mask without padding is ignored. With padding or a window they make a mask of elements, whose last row ends
 * at the last key. The context keeps the last four such masks, until its last module of sdpa, flex and eager is
 * destroyed. Inside a graph's capture calls that copy the mask to the host are refused.
 * Source: preprocess_args_and_kwargs_for_attn. */
TE_API te_result te_preprocess_args_for_attn(te_module *m, const te_attn_inputs *in, te_attn_args *out);
/* Computes attention -> te: [b, s_q, H d_v] or [T, H d_v], as DotProductAttention returns it; sdpa, flex, eager: [b, H,
 * s_q, d_v]. In the innermost scope. NULL on failure. */
TE_API te_tensor *te_attn_compute(te_module *m, const te_attn_args *args);
/* Returns x, the result of te_attn_compute, in the layout of models: [b, s_q, H, d_v] or [T, H, d_v], a view where
 * possible. Source: postprocess_output_for_attn. */
TE_API te_tensor *te_postprocess_output_for_attn(te_module *m, te_tensor *x);
/* Runs te_preprocess_args_for_attn, te_attn_compute and te_postprocess_output_for_attn. NULL on failure. */
TE_API te_tensor *te_attn_forward(te_module *m, const te_attn_inputs *in);

/* ---- masks that the context keeps ---- */

/* Returns the block mask of flex for causal attention, b sequences and H heads: u8 [1, 1, ceil(s_q / 128), ceil(s_kv /
 * 128)]. window_keys: keys of the window, the query's own included; -1 => no window. The mask is made once and kept in
 * the context by all five numbers. The context keeps at most 64 masks: the oldest goes first, and all go with the last
 * module of sdpa, flex and eager. Borrowed until then; NULL on failure. Making a mask copies from host memory, which a
 * graph's capture refuses: call this once before the capture. */
TE_API te_tensor *te_flex_block_mask(te_ctx *te, int64_t window_keys, int64_t b, int64_t heads, int64_t s_q,
                                     int64_t s_kv);
/* Returns the number of masks of te_flex_block_mask that the context keeps. */
TE_API int te_flex_block_mask_count(const te_ctx *te);
