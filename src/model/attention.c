/* model/attention.c: attention modules chosen by backend ("te", "sdpa", "flex", "eager"). Each backend is one entry of
 * te__attn_backends. This file must not depend on the models that call it. */

/* Features that a backend supports. */
enum {
    TE__ATTN_PACKED = 1 << 0,        /* packed sequences; heads shared by tensor-parallel ranks */
    TE__ATTN_DROPOUT = 1 << 1,
    TE__ATTN_WHOLE_MASKS = 1 << 2,   /* 4-D masks */
    TE__ATTN_SINKS = 1 << 3,         /* sink_weights as an argument of the call */
    TE__ATTN_NO_WINDOW_OF_0 = 1 << 4 /* with upstream_windows, a window of 0 keys means no window, as in Automodel */
};
/* A backend. q, k and v are laid out as in models, [b, s, H, d]. */
typedef struct te__attn_backend {
    te__attn_impl core; /* unused for te, which is DotProductAttention */
    const char *name;   /* in error messages */
    unsigned facts;     /* TE__ATTN_* bits */
    te_result (*preprocess)(const struct te__attn_backend *b, te_module *m, const te_attn_inputs *in,
                            te_attn_args *out); /* fills *out, which is zeroed before */
    /* Changes *x, the complete attention rule (mask, scale, dropout) of a call, as this backend needs it. NULL: no
     * change. */
    te_result (*rule)(te_module *m, const te_attn_args *a, te_attn_rule *x);
    te_tensor *(*attend)(te_module *m, te__attn_run *run); /* returns [b, s, H, d_v]; NULL: the backend is te */
} te__attn_backend;

/* The state of a module of sdpa, flex or eager. */
typedef struct te__attn_module {
    te__attn_core core;
    bool upstream_windows, upstream_sink_scale;
} te__attn_module;

/* ---- all backends ---- */

/* Converts padding u8 [b, s], 1 for a token, to a mask [b, 1, 1, s], 1 for a masked key. */
static te_tensor *te__mask_of_padding(te_tensor *x) {
    const int64_t shape[4] = {x->shape[0], 1, 1, x->shape[1]};
    return te_tensor_view(te__mask_turned(x), 4, shape);
}

/* Checks attention_mask of a call: 2 or 4 dimensions, sizes that fit q and k, dtype u8 (or float for 4 dimensions). */
static te_result te__attn_mask_ok(const te__attn_backend *b, const te_module *m, const te_attn_inputs *in) {
    const te_tensor *x = in->attention_mask, *q = in->q, *k = in->k;
    char t[3][TE__SHAPE_TEXT];
    bool fits = x->ndim == 2 || x->ndim == 4;
    int i;
    if (x->te != m->te)
        return te__fail(m->te, TE_ERR_INVALID, "%s: attention_mask belongs to another context", b->name);
    if (q->ndim != 4 || k->ndim != 4)
        return te__fail(m->te, TE_ERR_SHAPE,
                        "%s: attention_mask with a query %s; packed sequences have cu_seqlens", b->name,
                        te__shape_text(q, t[0]));
    int64_t full[4] = {q->shape[0], q->shape[2], q->shape[1], k->shape[1]};
    if (x->ndim == 2) fits = x->shape[0] == full[0] && x->shape[1] >= full[3];
    for (i = 0; x->ndim == 4 && i < 4; i++) fits = fits && (x->shape[i] == full[i] || (x->shape[i] == 1 && i < 3));
    if (!fits)
        return te__fail(m->te, TE_ERR_SHAPE,
                        "%s: attention_mask is %s, q %s and k %s; padding [%lld, %lld] or [%lld or 1, %lld or 1, %lld "
                        "or 1, %lld] is needed",
                        b->name, te__shape_text(x, t[0]), te__shape_text(q, t[1]), te__shape_text(k, t[2]),
                        (long long)full[0], (long long)full[3], (long long)full[0], (long long)full[1],
                        (long long)full[2], (long long)full[3]);
    if (x->dtype != TE_U8 && !(x->ndim == 4 && te__is_float(x->dtype)))
        return te__fail(m->te, TE_ERR_DTYPE,
                        "%s: attention_mask is %s %s; u8, and of four dimensions f32, f16 and bf16, are possible",
                        b->name, te_dtype_name(x->dtype), te__shape_text(x, t[0]));
    return TE_OK;
}

/* Returns how many keys a query sees in window w, the query's own key included. Returns -1 if the query sees all keys
 * up to its own key. If upstream_windows is set, w.left includes the query's own key, as in Automodel. Otherwise w.left
 * counts only the keys before it. */
static int64_t te__attn_window_keys(const te__attn_backend *b, const te_module *m, te_window w) {
    const bool upstream = ((const te__attn_module *)m->state)->upstream_windows;
    if (!w.on || w.left < 0 || (upstream && w.left == 0 && (b->facts & TE__ATTN_NO_WINDOW_OF_0))) return -1;
    return upstream || w.left == INT64_MAX ? w.left : w.left + 1; /* INT64_MAX: no overflow, and all keys anyway */
}
/* Checks a call of the backend sdpa, flex or eager. Refuses packed sequences, and q, k and v whose sizes differ from
 * the module's. */
static te_result te__attn_own_ok(const te__attn_backend *b, te_module *m, const te_attn_inputs *in) {
    te_tensor *const part[3] = {in->q, in->k, in->v};
    if (in->cu_seqlens || in->cu_seqlens_q || in->cu_seqlens_kv || in->cu_seqlens_padded || in->cu_seqlens_q_padded ||
        in->cu_seqlens_kv_padded || in->max_seqlen || in->max_seqlen_q || in->max_seqlen_kv)
        return te__fail(m->te, TE_ERR_UNSUPPORTED,
                        "%s: cu_seqlens or max_seqlen is given, and packed sequences are te's alone; give an "
                        "attention_mask, or make the module with TE_ATTN_TE",
                        b->name);
    return te__attn_core_shapes(m, b->name, part);
}

/* Checks a call and fills the fields of *out that all backends use. A 4-D mask replaces the causal mask. Fails if a 4-D
 * mask is given together with a window. */
static te_result te__attn_open(const te__attn_backend *b, te_module *m, const te_attn_inputs *in, te_attn_args *out) {
    const te_window w = in->window;
    te_tensor *mask = in->attention_mask;
    const bool whole = mask && mask->ndim == 4 && (b->facts & TE__ATTN_WHOLE_MASKS);
    bool windowed = w.on && w.left >= 0;
    out->q = in->q;
    out->k = in->k;
    out->v = in->v;
    out->is_causal =
        in->is_causal ? in->is_causal == TE_ON : te__attn_is_causal(te__attn_core_of(m)->desc.rule.mask);
    if (!(b->facts & TE__ATTN_PACKED)) {
        if (te__attn_own_ok(b, m, in) != TE_OK) return te_error_code(m->te);
        out->window_keys = te__attn_window_keys(b, m, w);
        windowed = out->window_keys >= 0;
    }
    if (in->sink_weights && !(b->facts & TE__ATTN_SINKS))
        return te__fail(m->te, TE_ERR_UNSUPPORTED,
                        "%s: sink_weights are flex's; make the module with TE_ATTN_FLEX, or with TE_ATTN_TE and "
                        "TE_SOFTMAX_LEARNABLE, whose parameter softmax_offset they are",
                        b->name);
    if (mask && te__attn_mask_ok(b, m, in) != TE_OK) return te_error_code(m->te);
    if (windowed && (whole || !out->is_causal))
        return te__fail(m->te, TE_ERR_INVALID, "%s: window (%lld, %lld) %s", b->name, (long long)w.left,
                        (long long)w.right,
                        whole ? "beside an attention_mask of four dimensions, which is the whole mask; leave one of "
                                "them out"
                              : "without a causal mask; windows go with causal masks");
    if (!whole) return TE_OK;
    out->is_causal = false;
    if (mask->dtype == TE_U8) out->masked = te__mask_turned(mask);
    else out->added = te_tensor_contiguous(mask);
    return out->masked || out->added ? TE_OK : te_error_code(m->te);
}

/* ---- te ---- */

/* Copies cu_seqlens and max_seqlen of packed sequences to *c. The input has one cu_seqlens for queries and keys
 * together, or one for each. */
static te_result te__attn_te_packed(te_module *m, const te_attn_inputs *in, te_attn_call *c) {
    const bool one = in->cu_seqlens != NULL;
    if (te__attn_core_of(m)->desc.format != TE_THD)
        return te__fail(m->te, TE_ERR_INVALID,
                        "te attention: cu_seqlens are those of packed sequences, and the module was made with "
                        "qkv_format TE_BSHD; make it with TE_THD");
    if (!one && (!in->cu_seqlens_q || !in->cu_seqlens_kv))
        return te__fail(m->te, TE_ERR_INVALID,
                        "te attention: %s is NULL; give cu_seqlens, or cu_seqlens_q and cu_seqlens_kv",
                        in->cu_seqlens_q ? "cu_seqlens_kv" : "cu_seqlens_q");
    c->cu_seqlens_q = one ? in->cu_seqlens : in->cu_seqlens_q;
    c->cu_seqlens_kv = one ? in->cu_seqlens : in->cu_seqlens_kv;
    c->cu_seqlens_q_padded = one ? in->cu_seqlens_padded : in->cu_seqlens_q_padded;
    c->cu_seqlens_kv_padded = one ? in->cu_seqlens_padded : in->cu_seqlens_kv_padded;
    c->max_seqlen_q = one ? in->max_seqlen : in->max_seqlen_q;
    c->max_seqlen_kv = one ? in->max_seqlen : in->max_seqlen_kv;
    if (c->cu_seqlens_q_padded) c->pad_between_seqs = TE_ON;
    return TE_OK;
}
static te_result te__attn_te_preprocess(const te__attn_backend *b, te_module *m, const te_attn_inputs *in,
                                        te_attn_args *out) {
    const bool packed = in->cu_seqlens || in->cu_seqlens_q || in->cu_seqlens_kv;
    te_attn_call *c = &out->call;
    te_result r = te__attn_open(b, m, in, out);
    if (r != TE_OK) return r;
    c->window.on = true;
    c->window.left = in->window.on ? in->window.left : -1;
    if (out->masked || out->added) {
        c->window.on = false;
        c->attn_mask_type = out->masked ? TE_MASK_ARBITRARY : TE_MASK_NONE;
        c->core_attention_bias = out->added;
        if (out->added) c->core_attention_bias_type = TE_ATTN_BIAS_POST_SCALE;
    } else if (in->attention_mask || packed)
        c->attn_mask_type = out->is_causal ? TE_MASK_PADDING_CAUSAL : TE_MASK_PADDING;
    else if (in->is_causal)
        c->attn_mask_type = out->is_causal ? TE_MASK_CAUSAL : TE_MASK_NONE;
    if (packed && !in->attention_mask) return te__attn_te_packed(m, in, c);
    if (in->attention_mask && in->attention_mask->ndim == 2 && !(out->masked = te__mask_of_padding(in->attention_mask)))
        return te_error_code(m->te);
    c->attention_mask = out->masked;
    return TE_OK;
}
static te_tensor *te__attn_te_call(te_module *m, const te_attn_args *a) {
    te_forward_args args = TE_ZERO;
    args.input = a->q;
    args.key = a->k;
    args.value = a->v;
    args.attention = a->call;
    return te_forward_with(m, &args);
}
/* Views [b, s, H d] or [T, H d] as [.., H, d]. */
static te_tensor *te__attn_te_postprocess(te_module *m, te_tensor *x) {
    const int64_t heads = te__per_rank(m, te__attn_core_of(m)->heads);
    char t[TE__SHAPE_TEXT];
    if (x->ndim < 4 && x->shape[x->ndim - 1] % heads == 0)
        return te__as_heads(x, x->ndim - 1, heads, x->shape[x->ndim - 1] / heads);
    return te__no_tensor(m->te, TE_ERR_SHAPE,
                         "te_postprocess_output_for_attn: the input is %s; [.., %lld heads of one size] is needed",
                         te__shape_text(x, t), (long long)heads);
}

/* ---- sdpa ---- */

/* Returns the last s_kv columns of the padding mask x [b, columns] in host memory: 1 for a token, 0 for padding. The
 * caller frees the memory. Sets *all to whether there is no padding. */
static uint8_t *te__attn_tokens(te_tensor *x, int64_t s_kv, bool *all) {
    const int64_t b = x->shape[0], columns = x->shape[1];
    const size_t bytes = (size_t)te__numel(x) + 1;
    uint8_t *host = (uint8_t *)te__alloc(x->te, bytes),
            *tokens = host ? (uint8_t *)te__alloc(x->te, (size_t)(b * s_kv) + 1) : NULL;
    int64_t i, j;
    *all = true;
    if (tokens && te_tensor_to_host(x, host) != TE_OK) {
        te__free(x->te, tokens);
        tokens = NULL;
    }
    for (i = 0; tokens && i < b; i++)
        for (j = 0; j < s_kv; j++) {
            tokens[i * s_kv + j] = host[i * columns + (columns - s_kv) + j] != 0;
            *all = *all && tokens[i * s_kv + j];
        }
    te__free(x->te, host);
    return tokens;
}

/* The preprocess function of sdpa and eager. Converts windows and padding to an element mask, out->masked. */
static te_result te__attn_elements(const te__attn_backend *row, te_module *m, const te_attn_inputs *in,
                                   te_attn_args *out) {
    te_result r = te__attn_open(row, m, in, out);
    uint8_t *tokens = NULL;
    bool all = true;
    int64_t b, s_q, s_kv;
    if (r != TE_OK || out->masked || out->added) return r;
    b = in->q->shape[0];
    s_q = in->q->shape[1];
    s_kv = in->k->shape[1];
    if (in->attention_mask) {
        tokens = te__attn_tokens(in->attention_mask, s_kv, &all);
        if (!tokens) return te_error_code(m->te);
    }
    if (out->window_keys >= 0 || !all) {
        te_tensor *kept = te__element_mask(m->te, b, s_q, s_kv, out->window_keys,
                                           out->is_causal ? te__max(s_kv - s_q, 0) : s_kv, all ? NULL : tokens);
        out->masked = kept ? te_tensor_detach(kept) : NULL; /* a second handle, because the mask cache may release its
                                                             * own handle of the mask while the caller still uses the
                                                             * mask */
        out->is_causal = false;
        if (!out->masked) r = te_error_code(m->te);
    }
    te__free(m->te, tokens);
    return r;
}

static te_tensor *te__attn_sdpa_attend(te_module *m, te__attn_run *run) {
    te_tensor *q = run->part[0], *k = run->part[1], *v = run->part[2], *masked;
    const te_attn_rule *x = &run->told.rule;
    te_sdpa_args args = TE_ZERO;
    if (!te__sdpa_of(m->te)->depth) return te__sdpa_attend(m, run);
    /* a region of te_sdpa_begin is open, so te_scaled_dot_product_attention calls the function `fn` of that region */
    masked = x->attention_mask ? te__mask_turned(x->attention_mask) : NULL;
    if (x->attention_mask && !masked) return NULL;
    args.attn_mask = masked ? masked : x->core_attention_bias;
    args.is_causal = x->mask == TE_MASK_CAUSAL;
    args.scale = x->softmax_scale;
    args.dropout_p = x->dropout_p;
    args.enable_gqa = q->shape[2] != k->shape[2];
    return te__attn_turned(
        te_scaled_dot_product_attention(te__attn_turned(q), te__attn_turned(k), te__attn_turned(v), &args));
}

/* ---- flex ---- */

static te_result te__attn_flex_preprocess(const te__attn_backend *b, te_module *m, const te_attn_inputs *in,
                                          te_attn_args *out) {
    char t[TE__SHAPE_TEXT];
    te_result r = te__attn_open(b, m, in, out);
    if (r != TE_OK) return r;
    out->sink_weights = in->sink_weights;
    if (!in->attention_mask) return TE_OK;
    if (in->attention_mask->ndim != 2 || in->attention_mask->shape[1] != in->k->shape[1])
        return te__fail(m->te, TE_ERR_UNSUPPORTED,
                        "flex attention: attention_mask is %s; flex takes padding [%lld, %lld]: make the module with "
                        "TE_ATTN_SDPA for other masks",
                        te__shape_text(in->attention_mask, t), (long long)in->k->shape[0], (long long)in->k->shape[1]);
    out->padding = te__mask_of_padding(in->attention_mask);
    return out->padding ? TE_OK : te_error_code(m->te);
}
static te_result te__attn_flex_rule(te_module *m, const te_attn_args *a, te_attn_rule *x) {
    x->bottom_right_diagonal = TE_OFF;
    if (a->is_causal) {
        x->window.on = true;
        x->window.left = a->window_keys < 0 ? -1 : a->window_keys - 1;
        x->block_mask =
            te_flex_block_mask(m->te, a->window_keys, a->q->shape[0], a->q->shape[2], a->q->shape[1], a->k->shape[1]);
        if (!x->block_mask) return te_error_code(m->te);
    }
    if (!a->sink_weights) return TE_OK;
    if (((const te__attn_module *)m->state)->upstream_sink_scale) x->softmax_scale = 0.0f;
    x->softmax_type = TE_SOFTMAX_LEARNABLE;
    x->softmax_offset = a->sink_weights;
    return TE_OK;
}

/* ---- eager ---- */

static te_result te__attn_eager_preprocess(const te__attn_backend *b, te_module *m, const te_attn_inputs *in,
                                          te_attn_args *out) {
    char t[TE__SHAPE_TEXT];
    te_result r = te__attn_elements(b, m, in, out);
    if (r == TE_OK && out->masked && out->masked->shape[1] != 1)
        return te__fail(m->te, TE_ERR_UNSUPPORTED,
                        "eager attention: attention_mask is %s; a u8 mask alike for all heads is needed, [b or 1, 1, "
                        "s_q or 1, s_kv]: make the module with TE_ATTN_SDPA for "
                        "others, or give a float mask",
                        te__shape_text(out->masked, t));
    return r;
}
/* If s_q != s_kv, replaces the causal mask by an element mask. The softmax kernel aligns its causal mask bottom right,
 * but this backend aligns top left. */
static te_result te__attn_eager_rule(te_module *m, const te_attn_args *a, te_attn_rule *x) {
    const int64_t s_q = a->q->shape[1], s_kv = a->k->shape[1];
    if (x->mask != TE_MASK_CAUSAL || s_q == s_kv) return TE_OK;
    te__rule_masks(x, false, te__element_mask(m->te, a->q->shape[0], s_q, s_kv, -1, 0, NULL), NULL);
    return x->attention_mask ? TE_OK : te_error_code(m->te);
}
static te_tensor *te__attn_eager_attend(te_module *m, te__attn_run *run) {
    (void)m;
    return te__attn_turned(te__eager_attention(te__attn_turned(run->part[0]), te__attn_turned(run->part[1]),
                                               te__attn_turned(run->part[2]), &run->told.rule));
}

/* ---- the module of sdpa, flex and eager ---- */

/* Converts the arguments of te_forward_with to *in. attention_mask has 1 for a masked key in `args`, but 1 for a seen
 * key in *in. */
static te_result te__attn_inputs_of(te_module *m, const te_forward_args *args, te_attn_inputs *in) {
    const te_attn_call *c = &args->attention;
    const te__field *f = te__option_set(&te__sdpa_call_group, 1, c);
    const char *option = f                  ? f->name
                         : c->cu_seqlens_q  ? "cu_seqlens_q"
                         : c->cu_seqlens_kv ? "cu_seqlens_kv"
                                            : NULL;
    const te_attn_mask mask = c->attn_mask_type;
    te_tensor *keep;
    if (!args->input || !args->key || !args->value)
        return te__fail(m->te, TE_ERR_INVALID, "attention: key and value are needed beside the input (the query)");
    if (option || (mask && mask != TE_MASK_NONE && mask != TE_MASK_CAUSAL && !c->attention_mask))
        return te__fail(m->te, TE_ERR_UNSUPPORTED,
                        "attention: %s: an option of the call (attn_mask_type %d) is te's alone, as packed sequences "
                        "are te's alone; sdpa, flex and eager take attention_mask and a window, and TE_MASK_NONE and "
                        "TE_MASK_CAUSAL without a mask",
                        option ? option : "attn_mask_type", (int)mask);
    in->q = args->input;
    in->k = args->key;
    in->v = args->value;
    in->window = c->window;
    if (mask) in->is_causal = te__attn_is_causal(mask) ? TE_ON : TE_OFF;
    if (!c->attention_mask) return TE_OK;
    keep = te__mask_turned(c->attention_mask);
    if (keep && keep->ndim > 1 && mask != TE_MASK_ARBITRARY) {
        int64_t shape[2];
        shape[0] = keep->shape[0];
        shape[1] = keep->shape[keep->ndim - 1];
        keep = te__numel(keep) == shape[0] * shape[1] ? te_tensor_view(keep, 2, shape) : keep;
    }
    in->attention_mask = keep;
    return keep ? TE_OK : te_error_code(m->te);
}

/* Fills *run with q, k, v and the rule (mask, scale, dropout) of the arguments. *run must be zero before the call. */
static te_result te__attn_run_of(const te__attn_backend *b, te_module *m, const te_attn_args *a, te__attn_run *run) {
    const te_attn_call nothing = TE_ZERO;
    te_attn_rule *x = &run->told.rule;
    run->part[0] = a->q;
    run->part[1] = a->k;
    run->part[2] = a->v;
    run->told.format = TE_BSHD;
    te__attn_core_rule(m, &nothing, x);
    te__rule_masks(x, a->is_causal, a->masked ? a->masked : a->padding, a->added);
    return b->rule ? b->rule(m, a, x) : TE_OK;
}
static const te__attn_backend *te__attn_own_backend(const te_module *m) {
    return (const te__attn_backend *)(const void *)te__attn_core_of(m)->impl;
}
static te_result te__attn_prepare(te_module *m, const te_forward_args *args, te__attn_run *run) {
    const te__attn_backend *b = te__attn_own_backend(m);
    te_attn_inputs in = TE_ZERO;
    te_attn_args a = TE_ZERO;
    te_result r = te__attn_inputs_of(m, args, &in);
    if (r == TE_OK) r = b->preprocess(b, m, &in, &a);
    return r == TE_OK ? te__attn_run_of(b, m, &a, run) : r;
}
static te_tensor *te__attn_attend(te_module *m, te__attn_run *run) {
    return te__heads_joined(te_tensor_contiguous(te__attn_own_backend(m)->attend(m, run)));
}
static void te__attn_module_destroy(te_module *m) {
    if (te__attn_core_of(m)->impl && --te__masks_of(m->te)->mask_users == 0) te__masks_drop(m->te);
}

/* ---- the table ---- */

#define TE__ATTN_CORE                                                                              \
    {{"Attention", sizeof(te__attn_module), te__attn_core_forward, te__attn_module_destroy, NULL}, \
     "te_initialize_attn_module",                                                                  \
     {"attn_mask_type", "qkv_format", "softmax_type", "", "dropout_p"},                            \
     te__attn_prepare,                                                                             \
     te__attn_attend}
/* Indexed by te_attn_backend - TE_ATTN_TE. Backends after TE_ATTN_EAGER have no entry: their kernels are not in
 * te.h. */
static const te__attn_backend te__attn_backends[] = {
    {{{NULL, 0, NULL, NULL, NULL}, NULL, {NULL, NULL, NULL, NULL, NULL}, NULL, NULL},
     "te attention",
     TE__ATTN_PACKED | TE__ATTN_DROPOUT | TE__ATTN_WHOLE_MASKS,
     te__attn_te_preprocess,
     NULL,
     NULL},
    {TE__ATTN_CORE, "sdpa attention", TE__ATTN_DROPOUT | TE__ATTN_WHOLE_MASKS, te__attn_elements, NULL,
     te__attn_sdpa_attend},
    {TE__ATTN_CORE, "flex attention", TE__ATTN_SINKS | TE__ATTN_NO_WINDOW_OF_0, te__attn_flex_preprocess,
     te__attn_flex_rule, te__sdpa_attend},
    {TE__ATTN_CORE, "eager attention", TE__ATTN_WHOLE_MASKS, te__attn_eager_preprocess, te__attn_eager_rule,
     te__attn_eager_attend}};
#undef TE__ATTN_CORE

TE_API te_attn_backend te_attn_backend_of(const te_module *m) {
    int i;
    if (m && te__dpa_of(m)) return TE_ATTN_TE;
    for (i = 1; m && i < (int)TE__COUNT(te__attn_backends); i++)
        if (m->cls == &te__attn_backends[i].core.cls) return (te_attn_backend)(TE_ATTN_TE + i);
    return TE_ATTN_DEFAULT;
}

/* ---- creation ---- */

static te_module *te__attn_create(te_ctx *te, const te__attn_backend *b, const te_attn_module_desc *d) {
    te__attn_core core = TE_ZERO;
    te__attn_module *s;
    te_module *m;
    core.desc.name = d->name;
    core.desc.format = d->qkv_format;
    core.desc.rule.mask = d->attn_mask_type;
    core.desc.rule.softmax_scale = d->softmax_scale;
    core.desc.rule.softmax_type = d->softmax_type;
    core.desc.rule.dropout_p = d->dropout_p;
    core.heads = d->num_attention_heads;
    core.groups = d->num_gqa_groups;
    core.channels = d->num_qk_channels;
    if (!b->attend) return te__dpa_create(te, core, &d->parallel, NULL);
    core.v_channels = d->num_v_channels;
    if (d->qkv_format == TE_THD || d->softmax_type ||
        (d->attn_mask_type != TE_MASK_NONE && d->attn_mask_type != TE_MASK_CAUSAL) || d->parallel.tp_group)
        return te__no_module(
            te, TE_ERR_UNSUPPORTED,
            "te_initialize_attn_module: qkv_format %d, softmax_type %d, attn_mask_type %d, parallel.tp_group %s: "
            "sdpa, flex and eager have TE_BSHD (%d), softmax_type 0, "
            "TE_MASK_NONE (%d) or TE_MASK_CAUSAL (%d), and no group; TE_ATTN_TE has the others",
            (int)d->qkv_format, (int)d->softmax_type, (int)d->attn_mask_type, d->parallel.tp_group ? "given" : "NULL",
            (int)TE_BSHD, (int)TE_MASK_NONE, (int)TE_MASK_CAUSAL);
    m = te__attn_core_create(te, &b->core, NULL, core);
    if (!m) return NULL;
    te__masks_of(te)->mask_users++;
    s = (te__attn_module *)m->state;
    s->upstream_windows = d->upstream_windows;
    s->upstream_sink_scale = d->upstream_sink_scale;
    return te__module_built(m);
}

TE_API te_module *te_initialize_attn_module(te_ctx *te, te_attn_backend backend, const te_attn_module_desc *desc) {
    static const char who[] = "te_initialize_attn_module";
    const te__attn_backend *row;
    te_attn_module_desc d;
    const char *name;
    if (!te || !te__has_desc(te, desc, who)) return NULL;
    d = *desc;
    if (!d.name) d.name = "attn_module";
    if (!d.num_gqa_groups) d.num_gqa_groups = d.num_attention_heads;
    if (!d.num_v_channels) d.num_v_channels = d.num_qk_channels;
    if (!d.attn_mask_type) d.attn_mask_type = TE_MASK_CAUSAL;
    if (!d.qkv_format) d.qkv_format = TE_BSHD;
    if (backend == TE_ATTN_DEFAULT) backend = te_ctx_is_cuda(te) ? TE_ATTN_TE : TE_ATTN_SDPA;
    name = (int)backend >= 0 && (int)backend < (int)TE__COUNT(te__attn_names) ? te__attn_names[backend] : NULL;
    row = name && backend <= TE_ATTN_EAGER ? &te__attn_backends[backend - TE_ATTN_TE] : NULL;
    if (d.num_attention_heads < 1 || d.num_gqa_groups < 1 || d.num_attention_heads % d.num_gqa_groups ||
        d.num_qk_channels < 1 || d.num_v_channels < 1)
        te__fail(te, TE_ERR_INVALID,
                 "%s: %d heads in %d groups, of %lld channels of q and k and %lld of v; sizes from 1 on, and groups "
                 "that divide the heads, are needed",
                 who, d.num_attention_heads, d.num_gqa_groups, (long long)d.num_qk_channels,
                 (long long)d.num_v_channels);
    else if (backend == TE_ATTN_MAGI && (d.num_qk_channels != d.num_v_channels || d.num_qk_channels > 128))
        te__fail(te, TE_ERR_INVALID,
                 "%s: magi with %lld channels of q and k and %lld of v; magi attention has one head size, up to 128",
                 who, (long long)d.num_qk_channels, (long long)d.num_v_channels);
    else if (!row)
        te__fail(te, TE_ERR_UNSUPPORTED,
                 "%s: Unsupported attention implementation: %s (%d)%s; te (1), sdpa (2), flex (3) and eager (4) are "
                 "possible",
                 who, name ? name : "unknown", (int)backend, name ? ", whose kernels are not te.h's" : "");
    else if (!(d.dropout_p >= 0.0f && d.dropout_p <= (row->facts & TE__ATTN_DROPOUT ? 1.0f : 0.0f)))
        te__fail(te, TE_ERR_INVALID,
                 "%s: dropout_p %g with %s; a probability, 0 to 1, and 0 but for te and sdpa, is needed", who,
                 (double)d.dropout_p, name);
    else return te__attn_create(te, row, &d);
    return NULL;
}

/* ---- calls ---- */

/* Returns the entry of te__attn_backends for m. Fails if m is not an attention module, or if q, k or v is NULL or of
 * another context. */
static const te__attn_backend *te__attn_check_call(te_module *m, const char *who, const te_tensor *q,
                                                   const te_tensor *k, const te_tensor *v) {
    const te_attn_backend backend = te_attn_backend_of(m);
    if (!q || !k || !v)
        te__fail(m->te, TE_ERR_STATE, "%s: %s is NULL; q, k and v are needed", who, !q ? "q" : !k ? "k" : "v");
    else if (!te__same_ctx(q, m->te, who) || !te__same_ctx(k, m->te, who) || !te__same_ctx(v, m->te, who)) return NULL;
    else if (backend) return &te__attn_backends[backend - TE_ATTN_TE];
    else
        te__fail(m->te, TE_ERR_INVALID, "%s: the module is a %s; one of te_initialize_attn_module is needed", who,
                 m->cls->name);
    return NULL;
}
/* Runs attention on q, k and v [b, s, H, d]. Backend te returns [.., H d_v], the others [b, s, H, d_v]. */
static te_tensor *te__attn_call(te_module *m, const te__attn_backend *row, const te_attn_args *a) {
    te__attn_run run = TE_ZERO;
    if (!row->attend) return te__attn_te_call(m, a);
    return te__attn_run_of(row, m, a, &run) == TE_OK ? row->attend(m, &run) : NULL;
}
/* Transposes q, k and v between [b, s, H, d] and [b, H, s, d]; does nothing for backend te. */
static bool te__attn_turn(const te__attn_backend *row, te_attn_args *a) {
    if (!row->attend) return true;
    a->q = te__attn_turned(a->q);
    a->k = te__attn_turned(a->k);
    a->v = te__attn_turned(a->v);
    return a->q && a->k && a->v;
}

TE_API te_result te_preprocess_args_for_attn(te_module *m, const te_attn_inputs *in, te_attn_args *out) {
    static const char who[] = "te_preprocess_args_for_attn";
    const te__attn_backend *row;
    te_result r;
    if (!m) return TE_ERR_STATE;
    if (!in || !out) return te__fail(m->te, TE_ERR_STATE, "%s: %s is NULL", who, in ? "out" : "in");
    memset(out, 0, sizeof(*out));
    row = te__attn_check_call(m, who, in->q, in->k, in->v);
    r = row ? row->preprocess(row, m, in, out) : te_error_code(m->te);
    return r != TE_OK || te__attn_turn(row, out) ? r : te_error_code(m->te);
}
TE_API te_tensor *te_attn_compute(te_module *m, const te_attn_args *args) {
    const te__attn_backend *row;
    te_attn_args a;
    te_tensor *y;
    if (!m || !te__has_desc(m->te, args, "te_attn_compute")) return NULL;
    row = te__attn_check_call(m, "te_attn_compute", args->q, args->k, args->v);
    a = *args;
    y = row && te__attn_turn(row, &a) ? te__attn_call(m, row, &a) : NULL;
    return y && row->attend ? te__attn_turned(y) : y;
}
TE_API te_tensor *te_postprocess_output_for_attn(te_module *m, te_tensor *x) {
    static const char who[] = "te_postprocess_output_for_attn";
    const te__attn_backend *row = m && x ? te__attn_check_call(m, who, x, x, x) : NULL;
    char t[TE__SHAPE_TEXT];
    if (!row) return NULL;
    if (!row->attend) return te__attn_te_postprocess(m, x);
    if (x->ndim == 4) return te__attn_turned(x);
    return te__no_tensor(m->te, TE_ERR_SHAPE, "%s: the input is %s; [b, H, s, d] is needed", who, te__shape_text(x, t));
}
TE_API te_tensor *te_attn_forward(te_module *m, const te_attn_inputs *in) {
    te_attn_args a = TE_ZERO;
    const te__attn_backend *row;
    te_tensor *y;
    if (!m || !te__has_desc(m->te, in, "te_attn_forward")) return NULL;
    row = te__attn_check_call(m, "te_attn_forward", in->q, in->k, in->v);
    if (!row) return NULL;
    te__frame_begin(m->te);
    y = row->preprocess(row, m, in, &a) == TE_OK ? te__attn_call(m, row, &a) : NULL;
    return te__frame_return(m->te, y && !row->attend ? te__attn_te_postprocess(m, y) : y);
}
