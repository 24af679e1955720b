/* api/inject.h: replaces the attention of an existing model by DotProductAttention, without changing the model
 * (nemo_automodel._transformers.te_attention).
 *
 * An attention module calls its core, softmax(q k^T) v, as te_scaled_dot_product_attention or as a child `sdpa`
 * (te_sdpa_create). Injection makes a DotProductAttention for each module whose name ends in "self_attn". The
 * DotProductAttention becomes that module's attribute "attn_module", and computes the core in the module's forward:
 *
 *     te_module *model = te_hf_open(te, folder, NULL);
 *     te_inject_te_attention(model, NULL);                       every layer's core is now DotProductAttention
 *     te_forward(model, ids);
 *     te_attn_stats s = te_attn_get_stats(te);      s.te_hits: number of calls that DotProductAttention computed
 *     te_restore_attention(model);                               the model is as it was before
 *
 * An attribute is not a child: the model's parameters, their names in files, freezing and casts do not change. */

/* ---- the core that modules call ---- */

/* Options of te_scaled_dot_product_attention; zero is the default. */
typedef struct te_sdpa_args {
    te_tensor *attn_mask; /* broadcasts to [b, H, s_q, s_kv]; u8: 0 => the key is masked; f32, f16, bf16: added to the
                           * scores, differentiable; NULL => none */
    float dropout_p;      /* probability of zeroing an element of the softmax, in training and in evaluation; 0 => no
                           * dropout */
    bool is_causal;       /* query i sees keys 0 .. i; not with attn_mask */
    float scale;          /* factor of the scores; 0 => 1 / sqrt(d) */
    bool enable_gqa;      /* true => k and v may have G heads, where G divides q's H. Head h of q uses head h / (H /
                           * G) */
} te_sdpa_args;
/* Returns softmax(scale q k^T, masked) v for q [b, H, s_q, d], k [b, H, s_kv, d] and v [b, H, s_kv, dv], of any strides
 * with adjacent channels. The result is [b, H, s_q, dv], a view of memory [b, s_q, H, dv]. args may be NULL.
 * te_attention computes the result. Between te_sdpa_begin and te_sdpa_end, the function given to te_sdpa_begin
 * computes it instead.
 * Formats and memory are as in te_attention.
 * Source: torch.nn.functional.scaled_dot_product_attention. */
TE_API te_tensor *te_scaled_dot_product_attention(te_tensor *q, te_tensor *k, te_tensor *v, const te_sdpa_args *args);
/* A function that can replace te_scaled_dot_product_attention; args is never NULL. It returns NULL on failure;
 * te_scaled_dot_product_attention then records TE_ERR_STATE if the function recorded no error. */
typedef te_tensor *(*te_sdpa_fn)(void *user, te_tensor *q, te_tensor *k, te_tensor *v, const te_sdpa_args *args);
/* Opens a region that ends at te_sdpa_end. Inside it, te_scaled_dot_product_attention calls `fn`, in this context
 * alone. If fn itself calls te_scaled_dot_product_attention, fn is called again. `user` is handed to fn (borrowed until
 * te_sdpa_end). At most 16 regions may be nested. */
TE_API te_result te_sdpa_begin(te_ctx *te, te_sdpa_fn fn, void *user);
/* Closes the innermost region. TE_ERR_STATE if none is open. */
TE_API te_result te_sdpa_end(te_ctx *te);

/* ---- counters ---- */

/* Numbers of attention calls in modules with injected attention (te_sdpa_patch), since te_ctx_create or the last
 * te_attn_reset_stats. Such a call is computed by the injected DotProductAttention or, as a fallback, by the function
 * that computed attention before the injection. A call that a checkpoint repeats is counted twice. */
typedef struct te_attn_stats {
    uint64_t te_hits;                 /* calls that DotProductAttention computed */
    uint64_t fallback_mask;           /* fallbacks because the mask is not causal */
    uint64_t fallback_scale_mismatch; /* fallbacks because the call has another scale than DotProductAttention */
    uint64_t fallback_other;          /* fallbacks because DotProductAttention cannot take the call's heads, sizes,
                                       * window or dropout. In Automodel these calls fail */
} te_attn_stats;
/* Returns the context's counters; zeros for NULL. The counters are logged (TE_LOG_INFO) after every N calls.
 * te_ctx_create reads N from the environment variable AUTOMODEL_TE_STATS_EVERY; not set => 500; 0 or less => never
 * logged. */
TE_API te_attn_stats te_attn_get_stats(const te_ctx *te);
/* Sets the counters to 0. The warning of fallback_scale_mismatch is still logged only once per context. */
TE_API void te_attn_reset_stats(te_ctx *te);

/* ---- masks ---- */

/* Options of te_detect_causal_mask. */
typedef struct te_mask_check {
    bool strict; /* true => every element of the mask is checked; false => only the first and last row of head 0, as in
                  * Automodel (te_op_detect_causal_mask) */
    bool cache;  /* true => the result for a mask is kept until its memory is written (te_tensor_version). Later calls
                  * with the mask do not wait, and may be in a graph's capture. te.h does not see writes to memory of
                  * te_tensor_wrap: after such a write, call te_tensor_touch on the mask. Before the first
                  * te_tensor_touch the result for such a mask is not kept */
} te_mask_check;
/* Returns whether `mask` is the mask of causal attention with `window`. window.right is taken as 0. There is no window
 * if window.on is false or window.left is negative. If the result is true, *found (may be NULL) receives the window:
 * found->right is 0, and found->left is -1 without a window. check may be NULL.
 * A mask is u8, f32, f16 or bf16 and has 4 dimensions, the last two of equal size. A mask of another format or shape,
 * or an empty mask, gives false without an error.
 * Syncs: reads one number from the device. Without a kept result the function returns false in a graph's capture, and
 * true between te_warmup_begin and te_warmup_end.
 * Source: _detect_causal_mask. */
TE_API bool te_detect_causal_mask(te_tensor *mask, te_window window, const te_mask_check *check, te_window *found);

/* ---- a module's attention ---- */

/* Sizes of a user's attention module, named as in Hugging Face transformers; 0 => the module has no such attribute. */
typedef struct te_attn_attributes {
    int num_heads, num_attention_heads; /* number of query heads: num_heads, or num_attention_heads if num_heads is 0 */
    int num_key_value_heads;            /* heads of keys and values */
    int64_t head_dim;                   /* channels of a head */
    int64_t sliding_window;             /* number of keys that a query sees, its own included; negative => no window */
    float scaling;                      /* factor of the scores */
} te_attn_attributes;
/* Stores a copy of *attributes in the module, as its attribute "attn_attributes". */
TE_API te_result te_module_set_attn_attributes(te_module *m, const te_attn_attributes *attributes);

/* The sizes from which te_create_te_dot_product_attention makes its module. */
typedef struct te_attn_params {
    int num_heads, num_kv_heads; /* number of heads of queries, and of keys and values */
    int64_t head_dim;            /* channels of a head */
    te_window window_size;       /* (left, 0); window_size.on false => none */
    float softmax_scale;         /* factor of the scores */
} te_attn_params;
/* Returns the output size of a projection: the first of these that exists, or 0:
 *   - its attribute "out_features" (an int64_t *)
 *   - the number of rows of its parameter `weight` (allocated or not)
 *   - the output size of its child `linear`
 *
 * Source: _proj_out_features. */
TE_API int64_t te_proj_out_features(const te_module *proj);
/* Reads *params from a module with children q_proj, k_proj and v_proj. The values are those that
 * te_module_set_attn_attributes stored. If a value is missing:
 *   - numbers of heads, and head_dim, come from the module itself if it is in a model of te_causal_lm_create. In other
 *     modules a number of heads is te_proj_out_features of q_proj or k_proj, divided by head_dim
 *   - window and scale come from the child `sdpa`. Without a scale there, the scale is head_dim^-0.5
 *
 * Returns false, without an error, for modules without these children, and if head_dim is not known.
 * Source: _infer_attn_params. */
TE_API bool te_infer_attn_params(te_module *self_attn, te_attn_params *params);
/* Makes a DotProductAttention from `params`, for q, k and v [b, s, H, d]. softmax_scale 0 => 1 / sqrt(head_dim). The
 * mask is causal and the window is params->window_size, unless a forward call gives others. Owned by the caller.
 * Source: _create_te_dot_product_attention. */
TE_API te_module *te_create_te_dot_product_attention(te_ctx *te, const te_attn_params *params);

/* ---- the replacement of te_scaled_dot_product_attention ---- */

typedef struct te_sdpa_patch
    te_sdpa_patch; /* a replacement for te_scaled_dot_product_attention, made by te_make_te_sdpa */
/* Options of te_make_te_sdpa; zero-initialised. */
typedef struct te_make_te_sdpa_desc {
    te_module *attn_module;      /* the module that computes attention (borrowed). It reads these fields of
                                  * te_forward_args: `input` (the queries), `key` and `value`, each [b, s, heads, d],
                                  * and attention.attn_mask_type and attention.window */
    int num_heads, num_kv_heads; /* numbers of query heads, and of key and value heads, that attn_module takes;
                                  * num_kv_heads divides num_heads */
    te_sdpa_fn original;         /* the function that computes calls which attn_module cannot compute; NULL =>
                                  * te_attention */
    void *original_user;         /* handed to `original` (borrowed) */
    te_window window_size;       /* (left, 0), for calls with is_causal; window_size.on false => none */
    float softmax_scale;         /* the scale of attn_module; 0 => not known, and the scales of calls are not checked */
    te_mask_check mask;          /* how masks are checked */
    bool ignore_dropout;         /* dropout_p of a call is ignored, as in Automodel; false => DotProductAttention
                                  * applies it */
} te_make_te_sdpa_desc;
/* Makes a replacement for te_scaled_dot_product_attention. te_sdpa_patch_call takes the first of these cases that
 * applies:
 *     a scale that is more than 1e-6 from softmax_scale     desc->original computes the call; one warning per context
 *     a mask that is not [.., s_q, s_kv], or one that
 *         requires a gradient with desc->mask.strict        desc->original computes the call
 *     a mask for which te_detect_causal_mask gives false    desc->original computes the call
 *     any other mask, with or without is_causal             causal attention, with the window of the mask
 *     is_causal                                             causal attention, with window_size
 *     any other call                                        attention to all keys, without a window
 * If keys and values have n * num_kv_heads heads and enable_gqa is false, n adjacent heads are taken as copies of one
 * head: attn_module gets heads 0, n, 2n and so on. If the heads then do not fit attn_module, desc->original computes
 * the call.
 * The caller owns the result and must call te_sdpa_patch_destroy.
 * TE_ERR_INVALID if attn_module is NULL, and if AUTOMODEL_TE_STATS_EVERY is not a whole number.
 * Source: _make_te_sdpa. */
TE_API te_sdpa_patch *te_make_te_sdpa(te_ctx *te, const te_make_te_sdpa_desc *desc);
/* Releases f, but not its attn_module. f may be NULL. */
TE_API void te_sdpa_patch_destroy(te_sdpa_patch *f);
/* Computes one call of attention. A te_sdpa_fn, whose `user` must be a te_sdpa_patch. Allocates as DotProductAttention
 * does. Syncs for a mask without a result kept by te_mask_check.cache. */
TE_API te_tensor *te_sdpa_patch_call(void *user, te_tensor *q, te_tensor *k, te_tensor *v, const te_sdpa_args *args);
/* Makes te_scaled_dot_product_attention call te_sdpa_patch_call with f while m's forward runs. Replaces an earlier f of
 * m. f is borrowed until te_restore_attention, or until m is destroyed.
 * A forward function of te_module_set_forward still runs (Automodel drops it). The forward runs in a region of
 * te_sdpa_begin, which is closed even if the forward fails.
 * Source: _patch_module_forward. */
TE_API te_result te_patch_module_forward(te_module *m, te_sdpa_patch *f);
/* Returns the counters of f alone; zeros for NULL. */
TE_API te_attn_stats te_sdpa_patch_stats(const te_sdpa_patch *f);

/* ---- injection ---- */

/* The reason why DotProductAttention cannot be injected into a module. */
typedef enum te_inject_reason {
    TE_INJECT_OK = 0,         /* no reason: the module can be injected */
    TE_INJECT_PRESENT = 1,    /* it already has an attribute attn_module */
    TE_INJECT_PROJECTIONS = 2, /* no q_proj, k_proj and v_proj */
    TE_INJECT_HEAD_DIM = 3,   /* the size of a head is not known, or is above 1024, the maximum of
                               * DotProductAttention */
    TE_INJECT_HEADS = 4,      /* the numbers of heads are not known or do not fit the projections; or the number of key
                               * heads does not divide the number of query heads */
    TE_INJECT_SOFTCAP = 5,    /* its `sdpa` has a softcap on the scores, which DotProductAttention lacks */
    TE_INJECT_FORMAT = 6      /* its `sdpa` takes packed sequences */
} te_inject_reason;
/* Returns a reason as English text (static string). */
TE_API const char *te_inject_reason_text(te_inject_reason reason);

/* Options of the injection of DotProductAttention; zero is the default, and desc may be NULL. */
typedef struct te_inject_desc {
    /*                                              true: as in Automodel   false: te.h's own rules
     *   rows of a mask that are checked            first and last          all
     *   dropout_p                                  ignored                 applied
     *   an attribute attn_module that is NULL      counts as present       counts as absent
     *   numbers of heads and projections' sizes    not compared            compared
     *   a second injection of a model              logs a warning          logs no warning */
    bool rules_of_automodel;
    bool cache_masks;        /* te_mask_check.cache: the layers that read the same mask then wait for its check once per
                              * step, not once per layer */
    te_parallel_options parallel; /* parallel options of each DotProductAttention. With cp_group, cp_comm_type is
                                   * TE_CP_ALL_GATHER in layers with a window, else TE_CP_P2P. A call that the original
                                   * function would have to compute then fails on all ranks, because that function sees
                                   * only one rank's keys */
    int *left_alone;         /* written: the number of modules that te_inject_te_attention could not inject; NULL => not
                              * written */
} te_inject_desc;
/* Injects DotProductAttention into every module below `model` whose name ends in "self_attn". Weights may be loaded
 * before or after. Returns the number of modules injected. The first success sets the attribute
 * "_te_attention_injected" of `model`.
 * Logs the reason (TE_LOG_DEBUG) for each module that cannot be injected. Logs a warning if no module was injected. A
 * second injection leaves the injected modules as they are. If it injects no other module, it returns 0, and logs the
 * warning only with rules_of_automodel.
 * Returns -1 with the error recorded:
 *   - out of memory; modules before the one that failed stay injected, and the call may be repeated
 *   - TE_ERR_STATE inside a graph's capture
 *   - TE_ERR_INVALID for a value of AUTOMODEL_TE_STATS_EVERY that is no whole number
 *   - TE_ERR_INVALID if the number of ranks does not divide the number of heads
 *   - TE_ERR_INVALID if tp_group, tp_size or cp_group is given and no module was injected
 *
 * Source: inject_te_attention. */
TE_API int te_inject_te_attention(te_module *model, const te_inject_desc *desc);
/* Injects DotProductAttention into one module, whatever its name; an injected module is restored first. Returns false
 * if the module cannot be injected, or if an error was recorded.
 *
 * If the module has a child `sdpa` of te_sdpa_create, and the child has no forward function of te_module_set_forward,
 * the child's forward is replaced. DotProductAttention takes the child's mask, window, scale, softmax type and dropout.
 *
 * Any other module gets a forward function around its own, in which te_scaled_dot_product_attention calls
 * te_sdpa_patch_call. The function for calls that DotProductAttention cannot compute (te_make_te_sdpa_desc.original) is
 * the one that te_scaled_dot_product_attention would have called at the injection. (That function's user pointer is
 * borrowed until te_restore_attention, or until the module is destroyed.) If the forward does not call
 * te_scaled_dot_product_attention, one warning says so. A later te_module_set_forward disables the injection.
 * Source: inject_te_attention_into_module. */
TE_API bool te_inject_te_attention_into_module(te_module *self_attn, const te_inject_desc *desc);
/* Returns why te_inject_te_attention_into_module would not inject; TE_INJECT_OK if it would. Changes nothing. */
TE_API te_inject_reason te_inject_check(te_module *self_attn, const te_inject_desc *desc);
/* Returns the te_sdpa_patch that injection made for a module (borrowed), or NULL. */
TE_API te_sdpa_patch *te_injected_sdpa(const te_module *self_attn);
/* Undoes all injections below `model` and returns their number. Forward functions and attributes are as before; tape
 * nodes stay valid. */
TE_API int te_restore_attention(te_module *model);
/* Returns whether `model`, or a module below it, is injected. */
TE_API bool te_uses_te_attention(te_module *model);
