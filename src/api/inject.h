/* api/inject.h: attention of a model that exists, replaced by DotProductAttention without touching the model
 * (nemo_automodel._transformers.te_attention).
 *
 * Attention modules reach their core by te_scaled_dot_product_attention, or by a child `sdpa` (te_sdpa_create).
 * Injection makes a DotProductAttention for each module whose name ends in "self_attn", keeps it as the attribute
 * "attn_module", and puts it in the place of that core while the module's forward runs:
 *
 *     te_module *model = te_hf_open(te, folder, NULL);
 *     te_inject_te_attention(model, NULL);                       every layer's core is DotProductAttention from here on
 *     te_forward(model, ids);
 *     te_attention_stats s = te_get_te_attention_stats(te);      s.te_hits: calls that it took
 *     te_restore_attention(model);                               the model as it was
 *
 * An attribute is no child: parameters, names in files, freezing and casts are those of the model as it was. */

/* ---- the core that modules call ---- */

/* Options of te_scaled_dot_product_attention; zero is the default. */
typedef struct te_sdpa_args {
    te_tensor *attn_mask; /* broadcasts to [b, H, s_q, s_kv]; u8: 0 => the key is masked; f32, f16, bf16: added to the
                           * scores, differentiable; NULL => none */
    float dropout_p;      /* probability of zeroing an element of the softmax, whether a module trains or not; 0 =>
                           * none */
    bool is_causal;       /* query i sees keys 0 .. i; not with attn_mask */
    float scale;          /* factor of the scores; 0 => not given: 1 / sqrt(d) */
    bool enable_gqa;      /* k and v may have fewer heads, G that divide H: head h uses head h / (H / G) */
} te_sdpa_args;
/* softmax(scale q k^T, masked) v: q [b, H, s_q, d], k [b, H, s_kv, d], v [b, H, s_kv, dv], of any strides with adjacent
 * channels -> [b, H, s_q, dv], a view of memory [b, s_q, H, dv]. args may be NULL. The function that te_sdpa_begin has
 * put in its place, if there is one, else te_attention. Formats and memory as there.
 * Source: torch.nn.functional.scaled_dot_product_attention. */
TE_API te_tensor *te_scaled_dot_product_attention(te_tensor *q, te_tensor *k, te_tensor *v, const te_sdpa_args *args);
/* A function of that kind; args is never NULL. NULL on failure; without an error of its own that is TE_ERR_STATE. */
typedef te_tensor *(*te_sdpa_fn)(void *user, te_tensor *q, te_tensor *k, te_tensor *v, const te_sdpa_args *args);
/* From here to te_sdpa_end te_scaled_dot_product_attention is `fn`, in this context alone. user is handed to it
 * (borrowed until then). Regions nest, 16 deep; inside of `fn` the function in force is still `fn`. */
TE_API te_result te_sdpa_begin(te_ctx *te, te_sdpa_fn fn, void *user);
/* Ends the innermost region. TE_ERR_STATE if none is open. */
TE_API te_result te_sdpa_end(te_ctx *te);

/* ---- counters ---- */

/* Calls since te_ctx_create or te_reset_te_attention_stats. A module that runs again in the backward pass
 * (te_module_set_checkpoint) counts again. */
typedef struct te_attention_stats {
    uint64_t te_hits;                 /* DotProductAttention has returned an output */
    uint64_t fallback_mask;           /* the mask is not that of causal attention */
    uint64_t fallback_scale_mismatch; /* a scale of the call's that is not the module's */
    uint64_t fallback_other;          /* te.h's own: heads, sizes or windows that the module was not made for; Automodel
                                       * fails there */
} te_attention_stats;
/* The context's counters; zeros for NULL. Their sum is logged (TE_LOG_INFO) whenever it is a multiple of
 * $AUTOMODEL_TE_STATS_EVERY, which te_ctx_create reads. */
TE_API te_attention_stats te_get_te_attention_stats(const te_ctx *te);
/* Sets them to 0, and not the warning about scales, which comes once a context. */
TE_API void te_reset_te_attention_stats(te_ctx *te);

/* ---- masks ---- */

/* How a mask is looked at. */
typedef struct te_mask_check {
    bool strict; /* every element must be right; off: Automodel's rules, which look at the first and the last row of
                  * head 0 (te_op_detect_causal_mask) and are blind to what stands between them */
    bool cache;  /* the verdict is kept for as long as the mask's memory is not written (te_tensor_version): later calls
                  * do not wait, and may stand in a graph's capture. Memory of the program's own (te_tensor_wrap) has
                  * its verdict kept once te_tensor_touch has told of a write */
} te_mask_check;
/* Is `mask` that of causal attention, with `window` (left, 0), or without a window where it is not on or left is
 * negative? Then true, with *found (may be NULL) the window, or (-1, 0) for none.
 * Masks of other formats or ranks, that are not square or empty, are not causal, and no error. check may be NULL.
 * Syncs: one number is read. Inside a graph's capture a mask without a kept verdict is not causal; in a warm-up each
 * is. Source: _detect_causal_mask. */
TE_API bool te_detect_causal_mask(te_tensor *mask, te_window window, const te_mask_check *check, te_window *found);

/* ---- a module's attention ---- */

/* Numbers of a user's attention module, under the names that transformers gives them; 0 => not there. */
typedef struct te_attn_attributes {
    int num_heads, num_attention_heads; /* the first that is there counts */
    int num_key_value_heads;            /* heads of keys and values */
    int64_t head_dim;                   /* channels of a head */
    int64_t sliding_window;             /* keys that a query sees, its own included; negative => none */
    float scaling;                      /* factor of the scores */
} te_attn_attributes;
/* Keeps a copy with the module, as its attribute "attn_attributes". */
TE_API te_result te_module_set_attn_attributes(te_module *m, const te_attn_attributes *attributes);

/* The numbers that DotProductAttention is made from. */
typedef struct te_attn_params {
    int num_heads, num_kv_heads; /* of queries, and of keys and values */
    int64_t head_dim;            /* channels of a head */
    te_window window_size;       /* (left, 0); not on => none */
    float softmax_scale;         /* factor of the scores */
} te_attn_params;
/* The rows of a projection's weight: its attribute "out_features" (an int64_t *), else those of its parameter `weight`,
 * with or without memory, else those of its child `linear`. 0 => not known.
 * Source: _proj_out_features. */
TE_API int64_t te_proj_out_features(const te_module *proj);
/* Reads them off a module with children q_proj, k_proj and v_proj: heads, head size, window and scale from
 * te_module_set_attn_attributes, else from te_causal_lm_create's own module and its `sdpa`; heads that are nowhere are
 * out_features / head_dim of q_proj and k_proj. softmax_scale is 1 / sqrt(head_dim) where none is given. False, without
 * an error, for other modules, and where head_dim is not known. Source: _infer_attn_params. */
TE_API bool te_infer_attn_params(te_module *self_attn, te_attn_params *params);
/* A DotProductAttention of [b, s, H, d] under a causal mask, with these numbers; softmax_scale 0 => 1 / sqrt(head_dim).
 * Calls give their own mask and window. Owned by the caller.
 * Source: _create_te_dot_product_attention. */
TE_API te_module *te_create_te_dot_product_attention(te_ctx *te, const te_attn_params *params);

/* ---- the replacement of te_scaled_dot_product_attention ---- */

typedef struct te_te_sdpa te_te_sdpa; /* a function of te_scaled_dot_product_attention's kind, with what it knows */
/* Options of te_make_te_sdpa; zero-initialised. */
typedef struct te_make_te_sdpa_desc {
    te_module *attn_module;      /* gets input, key and value [b, s, heads, d], attn_mask_type and window (borrowed) */
    int num_heads, num_kv_heads; /* that it takes, of queries, and of keys and values, which divide the first */
    te_sdpa_fn original;         /* takes what the module does not; NULL => te_attention */
    void *original_user;         /* handed to it (borrowed) */
    te_window window_size;       /* (left, 0) of calls that see no later key; not on => none */
    float softmax_scale;         /* the module's; 0 => not known: no call's scale is a mismatch */
    te_mask_check mask;          /* how masks are looked at */
    bool ignore_dropout;         /* Automodel's: dropout_p is not looked at. Off: DotProductAttention draws by it */
} te_make_te_sdpa_desc;
/* Makes it. te_te_sdpa_call with it decides in this order:
 *     a scale that is more than 1e-6 from softmax_scale     original; a warning, once a context
 *     a mask that is not [.., s_q, s_kv], or, if masks
 *     are looked at strictly, one that learns               original
 *     a mask that te_detect_causal_mask does not know       original
 *     a mask that it knows, whatever is_causal              causal, with the window that it found
 *     is_causal                                             causal, with window_size
 *     neither                                               all keys, without a window
 * Repeated keys and values, which are of more than num_kv_heads heads without enable_gqa, go to the module as the heads
 * that they were repeated from: 0, n, 2n ... of n num_kv_heads. Tensors that are then not of the module's heads go to
 * original. Owned by the caller: te_te_sdpa_destroy. TE_ERR_INVALID without attn_module, and for junk in
 * AUTOMODEL_TE_STATS_EVERY. Source: _make_te_sdpa. */
TE_API te_te_sdpa *te_make_te_sdpa(te_ctx *te, const te_make_te_sdpa_desc *desc);
/* Releases it, not its module. NULL is fine. */
TE_API void te_te_sdpa_destroy(te_te_sdpa *f);
/* Calls it: a te_sdpa_fn whose `user` is a te_te_sdpa. Allocates as DotProductAttention; with a mask it syncs, unless
 * te_mask_check.cache keeps the verdict. */
TE_API te_tensor *te_te_sdpa_call(void *user, te_tensor *q, te_tensor *k, te_tensor *v, const te_sdpa_args *args);
/* While m's forward runs, te_scaled_dot_product_attention is te_te_sdpa_call with f (borrowed until
 * te_restore_attention, or m's end), in the place of one from before. A forward of m's own (te_module_set_forward) runs
 * inside; Automodel drops it. A failed forward leaves no region open. Source: _patch_module_forward. */
TE_API te_result te_patch_module_forward(te_module *m, te_te_sdpa *f);
/* Its own counters; zeros for NULL. */
TE_API te_attention_stats te_te_sdpa_stats(const te_te_sdpa *f);

/* ---- injection ---- */

/* Why a module is left alone. */
typedef enum te_inject_reason {
    TE_INJECT_OK = 0,         /* it is not */
    TE_INJECT_PRESENT = 1,    /* it has an attn_module */
    TE_INJECT_PROJECTIONS = 2, /* no q_proj, k_proj and v_proj */
    TE_INJECT_HEAD_DIM = 3,   /* the size of a head is not known, or above 1024, which DotProductAttention does not
                               * have */
    TE_INJECT_HEADS = 4,      /* heads are not known, do not divide each other, or do not fit the projections */
    TE_INJECT_SOFTCAP = 5,    /* its `sdpa` caps scores, which DotProductAttention does not */
    TE_INJECT_FORMAT = 6      /* its `sdpa` is of packed sequences */
} te_inject_reason;
/* A reason in words (static). */
TE_API const char *te_inject_reason_text(te_inject_reason reason);

/* Options of injection; zero is the default, and desc may be NULL. */
typedef struct te_inject_desc {
    bool rules_of_automodel; /* its behaviour where te.h departs from it: masks are looked at in two rows, not in all;
                              * dropout_p is ignored; an attribute attn_module that is NULL counts as one that is there;
                              * projections are not held against the heads; a second run warns that nothing was found */
    bool cache_masks;        /* te_mask_check.cache. A model that makes its mask once a step, for all layers, waits once
                              * a step */
    te_parallel_options parallel; /* of each DotProductAttention. With cp_group, cp_comm_type is TE_CP_ALL_GATHER in
                                   * layers with a window, TE_CP_P2P in others, and a call that would fall back fails on
                                   * all ranks: the attention from before knows one rank's keys */
    int *left_alone;         /* written: modules that te_inject_te_attention has looked at and not injected; NULL => not
                              * asked for */
} te_inject_desc;
/* Injects into every module below `model` whose name ends in "self_attn". Returns how many there were; the reason of
 * each that is left alone is logged (TE_LOG_DEBUG), and where there was none at all, a warning. A model that has them
 * already is left as it is: 0, and no warning. After at least one, `model` has the attribute "_te_attention_injected".
 * -1 with the error recorded: out of memory (modules before that one stay injected; the call may be repeated),
 * TE_ERR_STATE inside a graph's capture, TE_ERR_INVALID for junk in AUTOMODEL_TE_STATS_EVERY, for heads that ranks do
 * not divide, and with tp_group, tp_size or cp_group where no module was injected. Before weights are loaded or after.
 * Source: inject_te_attention. */
TE_API int te_inject_te_attention(te_module *model, const te_inject_desc *desc);
/* The same for one module, whatever its name; one that is injected is restored first. False where it is left alone, or
 * with the error recorded.
 *
 * A module with a child `sdpa` of te_sdpa_create, without a forward of its own, has that child's forward replaced: its
 * mask, window, scale, softmax type and dropout are DotProductAttention's from then on. Any other gets a forward of its
 * own, around the one that it has: te_scaled_dot_product_attention is te_te_sdpa_call in there, with the function in
 * force now as the original (its user is borrowed until te_restore_attention, or the module's end). A module whose
 * forward does not call it computes attention by itself, and is warned about once. te_module_set_forward by the program
 * afterwards undoes that. Source: inject_te_attention_into_module. */
TE_API bool te_inject_te_attention_into_module(te_module *self_attn, const te_inject_desc *desc);
/* Would that call inject, and if not, why? Changes nothing. */
TE_API te_inject_reason te_inject_check(te_module *self_attn, const te_inject_desc *desc);
/* The function in the place of a module's attention (borrowed), or NULL. */
TE_API te_te_sdpa *te_injected_sdpa(const te_module *self_attn);
/* Takes all of it away from the modules below `model`: forwards and attributes are those from before. Returns how many
 * there were. Tape nodes stay valid. */
TE_API int te_restore_attention(te_module *model);
/* Has `model`, or a self_attn below it, been injected? */
TE_API bool te_uses_te_attention(te_module *model);
