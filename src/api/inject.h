/* api/inject.h: attention of a model that exists, replaced by DotProductAttention without touching the model
 * (nemo_automodel._transformers.te_attention).
 *
 * Attention modules call their core by te_scaled_dot_product_attention, or by a child `sdpa` (te_sdpa_create).
 * Injection makes a DotProductAttention for each module whose name ends in "self_attn", keeps it as the attribute
 * "attn_module", and runs it in place of that core while the module's forward runs:
 *
 *     te_module *model = te_hf_open(te, folder, NULL);
 *     te_inject_te_attention(model, NULL);                       every layer's core is DotProductAttention from here on
 *     te_forward(model, ids);
 *     te_attn_stats s = te_attn_get_stats(te);      s.te_hits: calls that DotProductAttention took
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
/* Returns softmax(scale q k^T, masked) v: q [b, H, s_q, d], k [b, H, s_kv, d], v [b, H, s_kv, dv], of any strides with
 * adjacent channels -> [b, H, s_q, dv], a view of memory [b, s_q, H, dv]. args may be NULL. Calls the function of the
 * innermost te_sdpa_begin, if there is one, else te_attention. Formats and memory as in te_attention.
 * Source: torch.nn.functional.scaled_dot_product_attention. */
TE_API te_tensor *te_scaled_dot_product_attention(te_tensor *q, te_tensor *k, te_tensor *v, const te_sdpa_args *args);
/* A function that can run in place of te_scaled_dot_product_attention; args is never NULL. Returns NULL on failure;
 * NULL without an error counts as TE_ERR_STATE. */
typedef te_tensor *(*te_sdpa_fn)(void *user, te_tensor *q, te_tensor *k, te_tensor *v, const te_sdpa_args *args);
/* Opens a region: up to te_sdpa_end te_scaled_dot_product_attention calls `fn`, in this context alone. user is handed
 * to fn (borrowed until te_sdpa_end). Regions nest, 16 deep. Inside fn the function in force is still fn. */
TE_API te_result te_sdpa_begin(te_ctx *te, te_sdpa_fn fn, void *user);
/* Closes the innermost region. TE_ERR_STATE if none is open. */
TE_API te_result te_sdpa_end(te_ctx *te);

/* ---- counters ---- */

/* Counts of calls since te_ctx_create or te_attn_reset_stats. A module that runs again in the backward pass
 * (te_module_set_checkpoint) counts again. */
typedef struct te_attn_stats {
    uint64_t te_hits;                 /* DotProductAttention has returned an output */
    uint64_t fallback_mask;           /* fell back: the mask is not that of causal attention */
    uint64_t fallback_scale_mismatch; /* fell back: the call's scale is not the module's */
    uint64_t fallback_other;          /* fell back: heads, sizes or windows that the module was not made for. te.h's own
                                       * counter: Automodel fails in these calls */
} te_attn_stats;
/* Returns the context's counters; zeros for NULL. Their sum is logged (TE_LOG_INFO) whenever it is a multiple of
 * $AUTOMODEL_TE_STATS_EVERY, which te_ctx_create reads. */
TE_API te_attn_stats te_attn_get_stats(const te_ctx *te);
/* Sets the counters to 0. The warning about scales, which is logged once a context, is not logged again. */
TE_API void te_attn_reset_stats(te_ctx *te);

/* ---- masks ---- */

/* How te_detect_causal_mask checks a mask. */
typedef struct te_mask_check {
    bool strict; /* every element must be right; false => Automodel's rules, which check the first and the last row of
                  * head 0 alone (te_op_detect_causal_mask) */
    bool cache;  /* the verdict is kept until the mask's memory is written (te_tensor_version): later calls do not wait,
                  * and may stand in a graph's capture. Memory of the program's own (te_tensor_wrap) keeps its verdict
                  * only after a te_tensor_touch has reported a write */
} te_mask_check;
/* Is `mask` that of causal attention with `window` (left, 0)? A window that is not on, or whose left is negative, means
 * no window. If true, *found (may be NULL) receives the window, or (-1, 0) for none. A mask of another format or rank,
 * or one that is not square or empty, is not causal; that is no error. check may be NULL. Syncs: one number is read.
 * Inside a graph's capture a mask without a kept verdict is not causal; in a warm-up every mask is. Source:
 * _detect_causal_mask. */
TE_API bool te_detect_causal_mask(te_tensor *mask, te_window window, const te_mask_check *check, te_window *found);

/* ---- a module's attention ---- */

/* Numbers of a user's attention module, under the names that transformers gives them; 0 => not there. */
typedef struct te_attn_attributes {
    int num_heads, num_attention_heads; /* query heads: num_heads, or num_attention_heads if num_heads is 0 */
    int num_key_value_heads;            /* heads of keys and values */
    int64_t head_dim;                   /* channels of a head */
    int64_t sliding_window;             /* keys that a query sees, its own included; negative => none */
    float scaling;                      /* factor of the scores */
} te_attn_attributes;
/* Keeps a copy of the numbers with the module, as its attribute "attn_attributes". */
TE_API te_result te_module_set_attn_attributes(te_module *m, const te_attn_attributes *attributes);

/* The numbers that DotProductAttention is made from. */
typedef struct te_attn_params {
    int num_heads, num_kv_heads; /* heads of queries; heads of keys and values */
    int64_t head_dim;            /* channels of a head */
    te_window window_size;       /* (left, 0); window_size.on false => none */
    float softmax_scale;         /* factor of the scores */
} te_attn_params;
/* Returns the number of rows of a projection's weight: its attribute "out_features" (an int64_t *), or else the rows of
 * its parameter `weight`, with or without memory, or else the result for its child `linear`. 0 => not known.
 * Source: _proj_out_features. */
TE_API int64_t te_proj_out_features(const te_module *proj);
/* Reads *params from a module with children q_proj, k_proj and v_proj. Heads, head size, window and scale come from
 * te_module_set_attn_attributes, or else from a module of te_causal_lm_create and its `sdpa`. Numbers of heads that
 * neither gives are out_features / head_dim of q_proj and k_proj. softmax_scale is 1 / sqrt(head_dim) where none is
 * given. Returns false, without an error, for other modules, and where head_dim is not known. Source:
 * _infer_attn_params. */
TE_API bool te_infer_attn_params(te_module *self_attn, te_attn_params *params);
/* Makes a DotProductAttention for [b, s, H, d] under a causal mask, with the sizes in `params`; softmax_scale 0 => 1 /
 * sqrt(head_dim). Each forward call of the module passes its own mask and window. Owned by the caller.
 * Source: _create_te_dot_product_attention. */
TE_API te_module *te_create_te_dot_product_attention(te_ctx *te, const te_attn_params *params);

/* ---- the replacement of te_scaled_dot_product_attention ---- */

typedef struct te_sdpa_patch
    te_sdpa_patch; /* a replacement of te_scaled_dot_product_attention, made by te_make_te_sdpa */
/* Options of te_make_te_sdpa; zero-initialised. */
typedef struct te_make_te_sdpa_desc {
    te_module *attn_module;      /* computes attention: called with input, key and value [b, s, heads, d],
                                  * attn_mask_type and window (borrowed) */
    int num_heads, num_kv_heads; /* heads of queries, and of keys and values, that attn_module takes; num_kv_heads
                                  * divides num_heads */
    te_sdpa_fn original;         /* computes the calls that attn_module does not take; NULL => te_attention */
    void *original_user;         /* handed to original (borrowed) */
    te_window window_size;       /* (left, 0), for calls in which no query sees a later key; window_size.on false =>
                                  * none */
    float softmax_scale;         /* the scale of attn_module; 0 => not known: no call's scale is a mismatch */
    te_mask_check mask;          /* how masks are checked */
    bool ignore_dropout;         /* dropout_p of a call is ignored, as in Automodel; false => DotProductAttention
                                  * applies it */
} te_make_te_sdpa_desc;
/* Makes a replacement of te_scaled_dot_product_attention. te_sdpa_patch_call decides about each call, in this order:
 *     a scale that is more than 1e-6 from softmax_scale     original; a warning, once a context
 *     a mask that is not [.., s_q, s_kv], or that requires
 *     a gradient and is checked strictly                    original
 *     a mask that te_detect_causal_mask does not know       original
 *     a mask that it knows, whatever is_causal              causal, with the window that it found
 *     is_causal                                             causal, with window_size
 *     neither                                               all keys, without a window
 * Keys and values of more than num_kv_heads heads, without enable_gqa, are repeated ones: attn_module gets the heads
 * that they were repeated from, 0, n, 2n ... of n num_kv_heads. Tensors that then do not have the heads of attn_module
 * go to original. Owned by the caller: te_sdpa_patch_destroy. TE_ERR_INVALID without attn_module, and for a value of
 * AUTOMODEL_TE_STATS_EVERY that is no whole number. Source: _make_te_sdpa. */
TE_API te_sdpa_patch *te_make_te_sdpa(te_ctx *te, const te_make_te_sdpa_desc *desc);
/* Releases f, not its module. NULL is fine. */
TE_API void te_sdpa_patch_destroy(te_sdpa_patch *f);
/* Computes one call of attention: a te_sdpa_fn whose `user` is a te_sdpa_patch. Allocates as DotProductAttention.
 * With a mask it syncs, unless te_mask_check.cache keeps the verdict. */
TE_API te_tensor *te_sdpa_patch_call(void *user, te_tensor *q, te_tensor *k, te_tensor *v, const te_sdpa_args *args);
/* Makes te_scaled_dot_product_attention call te_sdpa_patch_call with f while m's forward runs, in place of an
 * earlier f of m. f is borrowed until te_restore_attention, or m's end. A forward of m's own
 * (te_module_set_forward) runs inside; Automodel drops it. A failed forward leaves no region open. Source:
 * _patch_module_forward. */
TE_API te_result te_patch_module_forward(te_module *m, te_sdpa_patch *f);
/* Returns the counters of f alone; zeros for NULL. */
TE_API te_attn_stats te_sdpa_patch_stats(const te_sdpa_patch *f);

/* ---- injection ---- */

/* Why a module is left alone. */
typedef enum te_inject_reason {
    TE_INJECT_OK = 0,         /* it is not left alone: it can be injected */
    TE_INJECT_PRESENT = 1,    /* it has an attn_module */
    TE_INJECT_PROJECTIONS = 2, /* no q_proj, k_proj and v_proj */
    TE_INJECT_HEAD_DIM = 3,   /* the size of a head is not known, or above 1024, the most that DotProductAttention
                               * takes */
    TE_INJECT_HEADS = 4,      /* heads are not known, do not divide each other, or do not fit the projections */
    TE_INJECT_SOFTCAP = 5,    /* its `sdpa` caps scores, which DotProductAttention does not */
    TE_INJECT_FORMAT = 6      /* its `sdpa` is of packed sequences */
} te_inject_reason;
/* Returns a reason in words (static). */
TE_API const char *te_inject_reason_text(te_inject_reason reason);

/* Options of injection; zero is the default, and desc may be NULL. */
typedef struct te_inject_desc {
    /* true => Automodel's rules: two rows of a mask are checked, dropout_p is ignored, an attribute attn_module that is
     * NULL counts as present, heads are not compared with the projections, and a second run warns that nothing was
     * found. false => te.h's rules: all rows are checked, DotProductAttention applies dropout_p, a NULL attribute
     * counts as absent, heads are compared, and a second run does not warn. */
    bool rules_of_automodel;
    bool cache_masks;        /* te_mask_check.cache: a model that makes one mask a step, for all layers, waits once a
                              * step */
    te_parallel_options parallel; /* of each DotProductAttention. With cp_group, cp_comm_type is TE_CP_ALL_GATHER in
                                   * layers with a window and TE_CP_P2P in others, and a call that would fall back fails
                                   * on all ranks, because the original attention knows one rank's keys alone */
    int *left_alone;         /* written: the number of modules that te_inject_te_attention left alone; NULL => not asked
                              * for */
} te_inject_desc;
/* Injects into every module below `model` whose name ends in "self_attn", before or after weights are loaded. Returns
 * how many were injected. Logs the reason for each module that is left alone (TE_LOG_DEBUG), and a warning if none was
 * injected. If the model is injected already, changes nothing, returns 0 and logs no warning (but one with
 * rules_of_automodel). After at least one injection `model` has the attribute "_te_attention_injected".
 * Returns -1 with the error recorded:
 *   - out of memory; modules before the one that failed stay injected, and the call may be repeated
 *   - TE_ERR_STATE inside a graph's capture
 *   - TE_ERR_INVALID for a value of AUTOMODEL_TE_STATS_EVERY that is no whole number
 *   - TE_ERR_INVALID for heads that ranks do not divide
 *   - TE_ERR_INVALID with tp_group, tp_size or cp_group where no module was injected
 * Source: inject_te_attention. */
TE_API int te_inject_te_attention(te_module *model, const te_inject_desc *desc);
/* Injects into one module, whatever its name; an injected one is restored first. Returns false if the module is left
 * alone, or with the error recorded.
 *
 * A module with a child `sdpa` of te_sdpa_create, and without a forward of its own: the child's forward is replaced,
 * and DotProductAttention takes over its mask, window, scale, softmax type and dropout. Any other module gets a forward
 * of its own, around the one that it has. Inside that forward te_scaled_dot_product_attention is
 * te_sdpa_patch_call, whose original is the function in force now (the user pointer of that function is borrowed
 * until te_restore_attention, or the module's end). A module whose forward does not call
 * te_scaled_dot_product_attention computes attention by itself, and one warning says so. A later
 * te_module_set_forward by the program undoes the injection. Source: inject_te_attention_into_module. */
TE_API bool te_inject_te_attention_into_module(te_module *self_attn, const te_inject_desc *desc);
/* Would te_inject_te_attention_into_module inject, and if not, why? Changes nothing. */
TE_API te_inject_reason te_inject_check(te_module *self_attn, const te_inject_desc *desc);
/* Returns the replacement that runs in a module (borrowed), or NULL. */
TE_API te_sdpa_patch *te_injected_sdpa(const te_module *self_attn);
/* Undoes all injections below `model`: forwards and attributes are those from before. Returns how many there were. Tape
 * nodes stay valid. */
TE_API int te_restore_attention(te_module *model);
/* Has `model`, or a self_attn below it, been injected? */
TE_API bool te_uses_te_attention(te_module *model);
