/* model/sdpa.c: te_scaled_dot_product_attention, the regions in which the program replaces it (te_sdpa_begin), and
 * te_detect_causal_mask. This file must not depend on modules. */

/* ---- the state of a context ---- */

/* A cached result of te_detect_causal_mask. The mask and the arguments are its key. */
typedef struct te__mask_verdict {
    uint64_t version, written_at; /* copies of these fields of the mask's buffer. Two buffers never have the same
                                   * written_at. In an unused entry written_at is 0. */
    int64_t offset, shape[4], stride[4], left;
    const te__buffer *buffer; /* compared only, never dereferenced */
    te_dtype dtype;
    bool strict, causal;
} te__mask_verdict;
/* The functions that replace te_scaled_dot_product_attention (a stack), the call counters of te_attention
 * (model/inject.c), and the cached results of te_detect_causal_mask. */
enum { TE__MAX_SDPA = 16, TE__MASK_VERDICTS = 8 };
typedef struct te__sdpa_state {
    te_sdpa_fn fn[TE__MAX_SDPA];
    void *user[TE__MAX_SDPA];
    int depth;
    te_attn_stats stats;
    int stats_every;   /* number of calls between two log lines of the counters: $AUTOMODEL_TE_STATS_EVERY, or 500 */
    char bad_every[40]; /* the text of $AUTOMODEL_TE_STATS_EVERY if it is not a number; otherwise empty */
    bool scale_warned;
    te__mask_verdict verdict[TE__MASK_VERDICTS];
    int next_verdict;  /* index of the entry that is overwritten next */
} te__sdpa_state;
static const te__slot te__sdpa_slot = {sizeof(te__sdpa_state)};
static te__sdpa_state *te__sdpa_of(const te_ctx *te) {
    return (te__sdpa_state *)te__slot_of(te, &te__sdpa_slot);
}

static void te__sdpa_open(te_ctx *te) {
    te__sdpa_state *s = te__sdpa_of(te);
    const char *text = te__env("AUTOMODEL_TE_STATS_EVERY");
    char *end;
    long long n;
    s->stats_every = 500;
    if (!text) return;
    n = strtoll(text, &end, 10);
    if (end != text) end += strspn(end, " \t\n\v\f\r"); /* strtoll has skipped leading spaces already */
    if (end == text || *end || n < INT_MIN || n > INT_MAX)
        snprintf(s->bad_every, sizeof(s->bad_every), "%.39s", text);
    else
        s->stats_every = (int)n;
}
static const te__room te__sdpa_room = TE__ROOM(&te__sdpa_slot, te__sdpa_open, NULL);

/* ---- masks for te_attention ---- */

/* Returns `mask` with 4 dimensions. A dimension that was expanded by stride 0 gets size 1 again. */
static te_tensor *te__mask_of_four(te_tensor *mask) {
    int64_t shape[4] = {1, 1, 1, 1};
    char text[TE__SHAPE_TEXT];
    int i;
    if (mask->ndim > 4)
        return te__no_tensor(
            mask->te, TE_ERR_SHAPE,
            "te_scaled_dot_product_attention: attn_mask is %s; [b, H, s_q, s_kv], or what broadcasts to it, is needed",
            te__shape_text(mask, text));
    for (i = 0; mask && i < mask->ndim; i++)
        if (mask->stride[i] == 0 && mask->shape[i] > 1 && i < mask->ndim - 1) mask = te_tensor_narrow(mask, i, 0, 1);
    if (!mask || mask->ndim == 4) return mask;
    memcpy(shape + 4 - mask->ndim, mask->shape, (size_t)mask->ndim * sizeof(int64_t));
    return te_tensor_view(te_tensor_contiguous(mask), 4, shape);
}

/* Inverts a u8 mask as max(1 - x, 0). PyTorch masks have 0 for a masked key; those of te_attention have 1. */
static te_tensor *te__mask_turned(te_tensor *mask) {
    te_tensor *one = te_tensor_full(mask->te, TE_F32, mask->ndim, mask->shape, 1.0), *x = te__copied(mask, TE_F32);
    return one && x ? te__copied(te__axpby(x, one, -1.0f, 1.0f), TE_U8) : NULL;
}

/* Sets the masks of the rule *x. The mask is `masked` (u8, 1 for a masked key) if `masked` is not NULL. Otherwise the
 * mask is causal if `causal` is true, and there is no mask if `causal` is false. `added` (or NULL) is added to the
 * scores. */
static void te__rule_masks(te_attn_rule *x, bool causal, te_tensor *masked, te_tensor *added) {
    x->mask = masked ? TE_MASK_ARBITRARY : causal ? TE_MASK_CAUSAL : TE_MASK_NONE;
    x->attention_mask = masked;
    x->core_attention_bias = added;
    x->core_attention_bias_type = added ? TE_ATTN_BIAS_POST_SCALE : TE_ATTN_BIAS_NONE;
}
/* Transposes between [b, s, H, d] and [b, H, s, d]. */
static te_tensor *te__attn_turned(te_tensor *x) { return te_tensor_transpose(x, 1, 2); }

/* ---- te_scaled_dot_product_attention by te_attention ---- */

static te_tensor *te__plain_sdpa(te_tensor *q, te_tensor *k, te_tensor *v, const te_sdpa_args *args) {
    te_attn_desc a = TE_ZERO;
    te_tensor *mask = args->attn_mask;
    bool masked;
    char s[TE__SHAPE_TEXT], t[TE__SHAPE_TEXT], u[TE__SHAPE_TEXT];
    if (!te__operand(q, k, false, "te_scaled_dot_product_attention") ||
        !te__operand(q, v, false, "te_scaled_dot_product_attention") ||
        !te__operand(q, mask, true, "te_scaled_dot_product_attention"))
        return NULL;
    if (q->ndim != 4 || k->ndim != 4 || v->ndim != 4 ||
        (!args->enable_gqa && (q->shape[1] != k->shape[1] || q->shape[1] != v->shape[1])))
        return te__no_tensor(
            q->te, TE_ERR_SHAPE,
            "te_scaled_dot_product_attention: q is %s, k %s, v %s; [b, heads, s, d] each, of as many heads unless "
            "enable_gqa is set",
            te__shape_text(q, s), te__shape_text(k, t), te__shape_text(v, u));
    if (mask && args->is_causal)
        return te__no_tensor(
            q->te, TE_ERR_INVALID,
            "te_scaled_dot_product_attention: attn_mask %s and is_causal are both given; leave one of them out",
            te__shape_text(mask, s));
    if (mask && mask->dtype != TE_U8 && !te__is_float(mask->dtype))
        return te__no_tensor(
            q->te, TE_ERR_DTYPE,
            "te_scaled_dot_product_attention: attn_mask is %s; u8 (0 => the key is masked), f32, f16 or bf16 "
            "(added to the scores) is needed",
            te_dtype_name(mask->dtype));
    a.format = TE_BSHD;
    a.rule.softmax_scale = args->scale;
    a.rule.dropout_p = args->dropout_p;
    if (mask && !(mask = te__mask_of_four(mask))) return NULL;
    masked = mask && mask->dtype == TE_U8;
    if (mask && !(mask = masked ? te__mask_turned(mask) : te_tensor_contiguous(mask))) return NULL;
    te__rule_masks(&a.rule, args->is_causal, masked ? mask : NULL, masked ? NULL : mask);
    return te__attn_turned(te_attention(te__attn_turned(q), te__attn_turned(k), te__attn_turned(v), &a));
}
static te_tensor *te__plain_sdpa_call(void *user, te_tensor *q, te_tensor *k, te_tensor *v, const te_sdpa_args *args) {
    (void)user;
    te__frame_begin(q->te);
    return te__frame_return(q->te, te__plain_sdpa(q, k, v, args));
}

/* ---- regions ---- */

/* Calls a function that the program has put in place of te_scaled_dot_product_attention. If the function returns NULL
 * without an error, records one. */
static te_tensor *te__sdpa_call(te_sdpa_fn fn, void *user, te_tensor *q, te_tensor *k, te_tensor *v,
                                const te_sdpa_args *args) {
    te_tensor *y = fn(user, q, k, v, args);
    /* te__fail keeps the first error, so this message shows only if fn recorded none */
    if (!y)
        te__fail(q->te, TE_ERR_STATE,
                 "te_scaled_dot_product_attention: the function in its place (te_sdpa_begin) returned NULL");
    return y;
}

TE_API te_tensor *te_scaled_dot_product_attention(te_tensor *q, te_tensor *k, te_tensor *v, const te_sdpa_args *args) {
    te_sdpa_args zero = TE_ZERO;
    te__sdpa_state *s;
    if (!q || !k || !v) return NULL;
    s = te__sdpa_of(q->te);
    if (!args) args = &zero;
    if (s->depth == 0) return te__plain_sdpa_call(NULL, q, k, v, args);
    return te__sdpa_call(s->fn[s->depth - 1], s->user[s->depth - 1], q, k, v, args);
}
TE_API te_result te_sdpa_begin(te_ctx *te, te_sdpa_fn fn, void *user) {
    if (!te) return TE_ERR_STATE;
    if (!fn)
        return te__fail(te, TE_ERR_INVALID,
                        "te_sdpa_begin: fn is NULL; the function that takes the place of "
                        "te_scaled_dot_product_attention is needed");
    if (te__sdpa_of(te)->depth == TE__MAX_SDPA)
        return te__fail(te, TE_ERR_STATE,
                        "te_sdpa_begin: %d regions are open, as many as there may be; te_sdpa_end ends one",
                        TE__MAX_SDPA);
    te__sdpa_of(te)->fn[te__sdpa_of(te)->depth] = fn;
    te__sdpa_of(te)->user[te__sdpa_of(te)->depth++] = user;
    return TE_OK;
}
TE_API te_result te_sdpa_end(te_ctx *te) {
    if (!te) return TE_ERR_STATE;
    if (te__sdpa_of(te)->depth == 0) return te__fail(te, TE_ERR_STATE, "te_sdpa_end without te_sdpa_begin");
    te__sdpa_of(te)->depth--;
    return TE_OK;
}

/* ---- is a mask causal? ---- */

static te__mask_verdict te__verdict_about(const te_tensor *mask, int64_t left, bool strict) {
    te__mask_verdict v = TE_ZERO;
    v.buffer = mask->buffer;
    v.version = te__buffer_version(mask->buffer);
    v.written_at = mask->buffer->written_at;
    v.offset = mask->offset;
    memcpy(v.shape, mask->shape, sizeof(v.shape));
    memcpy(v.stride, mask->stride, sizeof(v.stride));
    v.left = left;
    v.dtype = mask->dtype;
    v.strict = strict;
    return v;
}
/* Returns the cached result whose key equals that of *v, or NULL. */
static const te__mask_verdict *te__verdict_kept(const te_ctx *te, const te__mask_verdict *v) {
    int i;
    for (i = 0; v->written_at && i < TE__MASK_VERDICTS; i++) {
        const te__mask_verdict *kept = &te__sdpa_of(te)->verdict[i];
        if (memcmp(kept, v, offsetof(te__mask_verdict, buffer)) == 0 && kept->buffer == v->buffer &&
            kept->dtype == v->dtype && kept->strict == v->strict)
            return kept;
    }
    return NULL;
}
/* Returns true if the elements of the mask are those of a causal mask. A kernel checks this, and the function waits
 * for the kernel. */
static bool te__mask_is_causal(te_tensor *mask, te_window window, bool strict) {
    te_ctx *te = mask->te;
    te_op_detect_causal_mask_args a = TE_ZERO;
    int32_t causal = 0;
    te__frame_begin(te);
    a.mask = mask;
    a.causal = te__empty_1d(te, TE_I32, 1);
    a.window = window;
    a.strict = strict;
    if (a.causal && te_op_detect_causal_mask(te, &a) == TE_OK) {
        if (te->warming) causal = 1; /* no kernel runs in a warm-up */
        else if (te_tensor_to_host(a.causal, &causal) != TE_OK) causal = 0;
    }
    te__frame_end(te, NULL, 0);
    return causal != 0;
}

TE_API bool te_detect_causal_mask(te_tensor *mask, te_window window, const te_mask_check *check, te_window *found) {
    const te_mask_check plain = TE_ZERO;
    const te__mask_verdict *kept;
    te__mask_verdict v;
    bool causal;
    te_ctx *te;
    if (!check) check = &plain;
    if (!mask) return false;
    te = mask->te;
    if (!window.on || window.left < 0) window.left = -1;
    window.on = true;
    window.right = 0;
    if (found) *found = window;
    if (mask->ndim != 4 || mask->shape[2] != mask->shape[3] || te__numel(mask) == 0 ||
        !(mask->dtype == TE_U8 || te__is_float(mask->dtype)) || !mask->buffer)
        return false;
    v = te__verdict_about(mask, window.left, check->strict);
    kept = check->cache ? te__verdict_kept(te, &v) : NULL;
    if (kept || te->capture) return kept && kept->causal;
    causal = te__mask_is_causal(mask, window, check->strict);
    if (check->cache && v.written_at && !te->warming && te_error_code(te) == TE_OK) {
        v.causal = causal;
        te__sdpa_of(te)->verdict[te__sdpa_of(te)->next_verdict] = v;
        te__sdpa_of(te)->next_verdict = (te__sdpa_of(te)->next_verdict + 1) % TE__MASK_VERDICTS;
    }
    return causal;
}
