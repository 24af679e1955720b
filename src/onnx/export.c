/* onnx/export.c: te_onnx_export. It records two runs of the module, and translates each recorded call of an
 * operation into nodes. This file must not depend on what a module computes. */

/* ---- recording the calls of a run ---- */

typedef struct te__onnx_call {
    te_op op;
    te__any_args args; /* tensors are retained */
    char *module;
    float *inv_freq;     /* A copy of a rotation's frequencies. `args` points to this copy, because the caller's array
                          * exists only during the call. */
    size_t inv_freq_bytes;
    uint64_t begin, end; /* the counter te->writes before and after the call */
    te_tensor *foreign;  /* an input whose last writer since the run began is a collective or the host; NULL: none */
} te__onnx_call;
typedef struct te__onnx_run {
    te_ctx *te;
    bool keep; /* true: the run keeps its calls; false: it only finds out whether the batch is the first dimension */
    te__onnx_call *calls;
    int num_calls, cap_calls;
    uint64_t begin; /* the counter te->writes before the run */
    bool batch_first; /* true: in the first call whose tensors have a dimension of heads, the batch comes first */
    bool has_heads;
} te__onnx_run;

/* Returns true if a collective or the host, and not a recorded call, was the last to write the buffer b during the
 * run. */
static bool te__onnx_is_foreign(const te__onnx_run *r, const te__buffer *b) {
    int low = 0, high = r->num_calls;
    if (!b || b->written_at <= r->begin) return false;
    while (low < high) { /* finds the first call that ended at or after the write */
        int middle = (low + high) / 2;
        if (r->calls[middle].end < b->written_at) low = middle + 1;
        else high = middle;
    }
    return low == r->num_calls || b->written_at <= r->calls[low].begin;
}
/* Sets the field `foreign` of all calls. It must be called right after the run, before anything else writes to
 * memory. */
static void te__onnx_look_for_foreign(te__onnx_run *r) {
    te__args l;
    int i, k;
    for (i = 0; i < r->num_calls; i++) {
        te__args_of(&l, r->calls[i].op, &r->calls[i].args, false);
        for (k = 0; k < l.n; k++)
            if (!l.arg[k].list && (l.arg[k].flags & TE__IN) &&
                te__onnx_is_foreign(r, te__arg_tensor(&l.arg[k], 0)->buffer))
                r->calls[i].foreign = te__arg_tensor(&l.arg[k], 0);
    }
}
static void te__onnx_tensors(te__onnx_call *c, void (*visit)(te_tensor *x)) {
    te__args l;
    int64_t i;
    int k;
    te__args_of(&l, c->op, &c->args, false);
    for (k = 0; k < l.n; k++)
        for (i = 0; !l.arg[k].list && i < te__arg_count(&l.arg[k]); i++) visit(te__arg_tensor(&l.arg[k], i));
}
static void te__onnx_retain(te_tensor *x) { te_tensor_retain(x); }

static void te__onnx_note(te_ctx *te, const te_trace *event, void *user) {
    te__onnx_run *r = (te__onnx_run *)user;
    te__onnx_call *c;
    te_rope_angles *angles;
    te_qkv_format format = TE_SBHD;
    bool heads = true;
    if (event->phase == TE_TRACE_AFTER && r->keep && r->num_calls > 0) r->calls[r->num_calls - 1].end = te->writes;
    if (event->phase != TE_TRACE_BEFORE) return;
    switch (event->op) {
    case TE_OP_ATTN_FWD: format = ((const te_op_attn_fwd_args *)event->args)->format; break;
    case TE_OP_ROPE: format = ((const te_op_rope_args *)event->args)->format; break;
    case TE_OP_QKV_ROPE: format = ((const te_op_qkv_rope_args *)event->args)->format; break;
    default: heads = false;
    }
    if (heads && !r->has_heads) {
        r->has_heads = true;
        r->batch_first = format == TE_BSHD;
    }
    if (!r->keep || !te__grow(te, (void **)&r->calls, &r->cap_calls, r->num_calls, sizeof(te__onnx_call))) return;
    c = &r->calls[r->num_calls];
    memset(c, 0, sizeof(*c));
    c->module = te__copy_string(te, event->module);
    if (!c->module) return;
    c->op = event->op;
    c->begin = te->writes;
    memcpy(&c->args, event->args, te__ops[event->op].args_size);
    te__onnx_tensors(c, te__onnx_retain);
    r->num_calls++;
    angles = te__angles_of(c->op, &c->args);
    if (!angles || !angles->inv_freq) return;
    c->inv_freq_bytes = (size_t)(angles->rotary_dim / 2) * sizeof(float);
    c->inv_freq = (float *)te__alloc(te, c->inv_freq_bytes);
    if (c->inv_freq) memcpy(c->inv_freq, angles->inv_freq, c->inv_freq_bytes);
    angles->inv_freq = c->inv_freq;
}
static void te__onnx_run_free(te__onnx_run *r) {
    int i;
    for (i = 0; i < r->num_calls; i++) {
        te__onnx_tensors(&r->calls[i], te_tensor_release);
        te__free(r->te, r->calls[i].inv_freq);
        te__free(r->te, r->calls[i].module);
    }
    te__free(r->te, r->calls);
}

/* ---- the inputs ---- */

/* The meaning of an input's dimensions. */
typedef enum te__onnx_axes {
    TE__ONNX_HIDDEN,    /* [s, b, ..] or [b, s, ..], as in the module; hidden states of 2 dimensions are [b, h] */
    TE__ONNX_HIDDEN_KV, /* as TE__ONNX_HIDDEN, for keys */
    TE__ONNX_SCORES,    /* [b or 1, H or 1, s_q or 1, s_kv or 1] */
    TE__ONNX_SCORES_KV, /* as TE__ONNX_SCORES, for cross attention */
    TE__ONNX_PADDING_Q, /* [b, 1, 1, s_q] */
    TE__ONNX_SEQUENCES, /* [b], or [tokens, K] */
    TE__ONNX_POSITIONS, /* [s] or [b, s] */
    TE__ONNX_POSITIONS_KV, /* as TE__ONNX_POSITIONS, for keys */
    TE__ONNX_FREQS,     /* [s or more positions, b or 1, 1, channels] */
    TE__ONNX_FREQS_KV,  /* as TE__ONNX_FREQS, for keys */
    TE__ONNX_SLOPES,    /* [H] or [b, H] */
    TE__ONNX_NONE,      /* all sizes are fixed */
    TE__ONNX_NO_INPUT   /* the tensor is not an input of the graph */
} te__onnx_axes;

/* The te__onnx_axes of each tensor of a module's call. A tensor with TE__ONNX_NO_INPUT is refused, or the operation
 * that reads it is refused. */
enum {
    TE__ONNX_OF_input = TE__ONNX_HIDDEN,
    TE__ONNX_OF_encoder_output = TE__ONNX_HIDDEN_KV,
    TE__ONNX_OF_key = TE__ONNX_HIDDEN_KV,
    TE__ONNX_OF_value = TE__ONNX_HIDDEN_KV,
    TE__ONNX_OF_m_splits_tensor = TE__ONNX_NONE,
    TE__ONNX_OF_topk_weights = TE__ONNX_SEQUENCES,
    TE__ONNX_OF_topk_indices = TE__ONNX_SEQUENCES,
    TE__ONNX_OF_attention_mask = TE__ONNX_SCORES,
    TE__ONNX_OF_attention_mask_q = TE__ONNX_PADDING_Q,
    TE__ONNX_OF_cu_seqlens_q = TE__ONNX_NO_INPUT,
    TE__ONNX_OF_cu_seqlens_kv = TE__ONNX_NO_INPUT,
    TE__ONNX_OF_cu_seqlens_q_padded = TE__ONNX_NO_INPUT,
    TE__ONNX_OF_cu_seqlens_kv_padded = TE__ONNX_NO_INPUT,
    TE__ONNX_OF_core_attention_bias = TE__ONNX_SCORES,
    TE__ONNX_OF_alibi_slopes = TE__ONNX_SLOPES,
    TE__ONNX_OF_k_factors = TE__ONNX_NO_INPUT,
    TE__ONNX_OF_v_factors = TE__ONNX_NO_INPUT,
    TE__ONNX_OF_qkv_layer = TE__ONNX_HIDDEN,
    TE__ONNX_OF_kv_layer = TE__ONNX_HIDDEN_KV,
    TE__ONNX_OF_enc_dec_attn_mask = TE__ONNX_SCORES_KV,
    TE__ONNX_OF_enc_dec_attn_mask_q = TE__ONNX_PADDING_Q,
    TE__ONNX_OF_start_positions = TE__ONNX_SEQUENCES,
    TE__ONNX_OF_positions = TE__ONNX_POSITIONS,
    TE__ONNX_OF_freqs = TE__ONNX_FREQS,
    TE__ONNX_OF_cu_seqlens = TE__ONNX_NO_INPUT,
    TE__ONNX_OF_start_positions_key = TE__ONNX_SEQUENCES,
    TE__ONNX_OF_positions_key = TE__ONNX_POSITIONS_KV,
    TE__ONNX_OF_freqs_key = TE__ONNX_FREQS_KV,
    TE__ONNX_OF_cu_seqlens_key = TE__ONNX_NO_INPUT
};
#define TE__ONNX_OF(field) (te__onnx_axes)TE__ONNX_OF_##field,
#define TE__ONNX_OF_KEY(field) (te__onnx_axes)TE__ONNX_OF_##field##_key,
/* The axes of the tensors that te__call_tensors lists, in the same order. The tensors of a score_mod, which come last
 * in te__call_tensors, are left out. */
static const te__onnx_axes te__onnx_call_axes[TE__FORWARD_TENSORS - TE_SCORE_MOD_AUX] = {
    TE__FORWARD_FIELDS(TE__ONNX_OF, TE__UNCOUNTED) TE__ATTENTION_FIELDS(TE__ONNX_OF, TE__UNCOUNTED)
        TE__CROSS_FIELDS(TE__ONNX_OF, TE__UNCOUNTED) TE__ROTARY_FIELDS(TE__ONNX_OF, TE__UNCOUNTED)
            TE__ROTARY_FIELDS(TE__ONNX_OF_KEY, TE__UNCOUNTED)};

typedef struct te__onnx_slot {
    const char *name;
    te_tensor **slot;
    te__onnx_axes axes;
} te__onnx_slot;
/* A call, and the addresses of its tensors. */
typedef struct te__onnx_inputs {
    te__module_call call;
    te__onnx_slot slot[TE__FORWARD_TENSORS];
    int n;
} te__onnx_inputs;

static void te__onnx_inputs_of(te__onnx_inputs *in, const te_forward_args *args) {
    te_tensor **of_call[TE__FORWARD_TENSORS];
    int i;
    te__call_take(&in->call, args);
    te__call_point(&in->call);
    te__call_tensors(&in->call, of_call);
    memset(&in->call.args.outputs, 0, sizeof(in->call.args.outputs));
    for (i = in->n = 0; i < TE__COUNT(te__onnx_call_axes); i++)
        if (*of_call[i] && te__onnx_call_axes[i] != TE__ONNX_NO_INPUT) {
            in->slot[in->n].name = te__call_names[i];
            in->slot[in->n].slot = of_call[i];
            in->slot[in->n++].axes = te__onnx_call_axes[i];
        }
}
static bool te__onnx_is_whole(void *user, te_module *m) {
    char path[256];
    (void)user;
    if (m->parallel.size > 1)
        te__fail(m->te, TE_ERR_UNSUPPORTED,
                 "te_onnx_export: the work of \"%s\" is shared by %d ranks, and a file has one; load the parameters of "
                 "all into a module of one rank",
                 te_module_path(m, path, sizeof(path)), m->parallel.size);
    return m->parallel.size <= 1;
}
/* Sets *user to true if m is an Attention module. In such a module the batch is always the first dimension. */
static bool te__onnx_look_for_backends(void *user, te_module *m) {
    if (strcmp(te_module_get_class(m)->name, "Attention") == 0) *(bool *)user = true;
    return true;
}
static te_result te__onnx_inputs_refuse(te_module *m, const te_forward_args *args) {
    te_ctx *te = te_module_ctx(m);
    const te_attn_call *a = &args->attention;
    const te__autocast *autocast = te__autocast_now(te);
    if (!te_module_visit(m, te__onnx_is_whole, NULL)) return te_error_code(te);
    if (autocast && autocast->enabled && te__group_size(autocast->amax_group) > 1)
        return te__fail(te, TE_ERR_UNSUPPORTED,
                        "te_onnx_export: the autocast region reduces amaxes over the %d ranks of amax_group, and a "
                        "file has one rank; open a region without it",
                        te__group_size(autocast->amax_group));
    if (args->m_splits)
        return te__fail(te, TE_ERR_UNSUPPORTED,
                        "te_onnx_export: m_splits are numbers of the host, which a graph has not; give them as "
                        "m_splits_tensor, an input of the graph");
    if (args->kv_cache || a->inference_params)
        return te__fail(
            te, TE_ERR_UNSUPPORTED,
            "te_onnx_export: %s is memory that calls share, which a graph has not; export the call without it",
            args->kv_cache ? "kv_cache" : "inference_params");
    if (args->logits_to_keep)
        return te__fail(te, TE_ERR_UNSUPPORTED,
                        "te_onnx_export: logits_to_keep is %lld, a number of the host, which a graph has not; export "
                        "the call without it, and take the last logits of the graph's output",
                        (long long)args->logits_to_keep);
    if (a->cu_seqlens_q || a->cu_seqlens_kv || a->cu_seqlens_q_padded || a->cu_seqlens_kv_padded)
        return te__fail(te, TE_ERR_UNSUPPORTED,
                        "te_onnx_export: the starts of sequences (cu_seqlens) are given; a graph takes batches of "
                        "sequences, with an attention_mask where their lengths "
                        "differ");
    return TE_OK;
}

/* Returns the symbol (the varying size) for a dimension of keys. `length` is the size of this dimension in the first
 * run of the module. The symbol is TE__ONNX_SEQUENCE_KV if only TE__ONNX_SEQUENCE_KV has the size `length` in that run.
 * If TE__ONNX_SEQUENCE has this size, too, the symbol is TE__ONNX_SEQUENCE_KV only if `cross` is true. In all other
 * cases the symbol is TE__ONNX_SEQUENCE. */
static int te__onnx_keys(const te__onnx *g, int64_t length, bool cross) {
    const bool is_kv = length == g->symbol[TE__ONNX_SEQUENCE_KV].first;
    return is_kv && (cross || length != g->symbol[TE__ONNX_SEQUENCE].first) ? TE__ONNX_SEQUENCE_KV : TE__ONNX_SEQUENCE;
}
/* Returns the symbol of dimension `axis` of an input, or -1 if that dimension has a fixed size. */
static int te__onnx_axis(const te__onnx *g, const te__onnx_slot *s, int axis, bool batch_first, bool cross) {
    const te_tensor *x = *s->slot;
    const bool kv = s->axes == TE__ONNX_HIDDEN_KV;
    const bool ids = !te__is_float(x->dtype); /* ids have no hidden size as last dimension */
    const bool padding = ids && x->ndim == 4 && x->shape[1] == 1 && x->shape[2] == 1;
    switch (s->axes) {
    case TE__ONNX_HIDDEN:
    case TE__ONNX_HIDDEN_KV:
        if (x->ndim - !ids < 2) return axis == 0 && x->ndim - !ids == 1 ? TE__ONNX_BATCH : -1;
        return axis > 1                     ? -1
               : (axis == 0) == batch_first ? TE__ONNX_BATCH
               : kv                         ? TE__ONNX_SEQUENCE_KV
                                            : TE__ONNX_SEQUENCE;
    case TE__ONNX_SCORES:
    case TE__ONNX_SCORES_KV:
        if (axis == 0 && padding && x->shape[0] == g->symbol[TE__ONNX_BATCH].first)
            return TE__ONNX_BATCH; /* A padding mask is different for each sequence, so this dimension is the batch even
                                    * if its size is 1. */
        if (x->ndim != 4 || axis == 1 || x->shape[axis] == 1) return -1;
        if (axis == 0) return TE__ONNX_BATCH;
        if (axis == 2) return TE__ONNX_SEQUENCE;
        if (s->axes == TE__ONNX_SCORES_KV) return TE__ONNX_SEQUENCE_KV;
        return te__onnx_keys(g, x->shape[axis], cross);
    case TE__ONNX_PADDING_Q: return axis == 0 ? TE__ONNX_BATCH : axis == x->ndim - 1 ? TE__ONNX_SEQUENCE : -1;
    case TE__ONNX_POSITIONS:
        return axis == x->ndim - 1 ? TE__ONNX_SEQUENCE : axis == 0 && x->ndim == 2 ? TE__ONNX_BATCH : -1;
    case TE__ONNX_POSITIONS_KV:
        return axis == x->ndim - 1         ? te__onnx_keys(g, x->shape[axis], cross)
               : axis == 0 && x->ndim == 2 ? TE__ONNX_BATCH
                                           : -1;
    case TE__ONNX_FREQS:
    case TE__ONNX_FREQS_KV: {
        const int keys = s->axes == TE__ONNX_FREQS_KV ? te__onnx_keys(g, x->shape[0], cross) : TE__ONNX_SEQUENCE;
        if (axis == 1 && x->ndim == 4 && x->shape[1] > 1) return TE__ONNX_BATCH;
        /* If freqs has more rows than there are tokens, it has all positions, and its size is fixed. */
        return axis == 0 && x->shape[0] == g->symbol[keys].first ? keys : -1;
    }
    case TE__ONNX_SEQUENCES: return axis == 0 ? TE__ONNX_BATCH : -1;
    case TE__ONNX_SLOPES: return axis == 0 && x->ndim == 2 ? TE__ONNX_BATCH : -1;
    default: return -1;
    }
}

/* Returns a copy of x that is repeated times[i] times along each dimension i. */
static te_tensor *te__onnx_repeated(te_tensor *x, const int64_t *times) {
    int64_t shape[TE_MAX_DIMS], count = 1, i;
    size_t element = (size_t)te__dtype_size(x->dtype), bytes = te_tensor_bytes(x), larger;
    char *host;
    te_tensor *y = NULL;
    int d;
    for (d = 0; d < x->ndim; d++) {
        shape[d] = x->shape[d] * times[d];
        count *= shape[d];
    }
    larger = (size_t)count * element;
    host = (char *)te__alloc(x->te, bytes + larger);
    if (!host) return NULL;
    if (te_tensor_to_host(x, host) == TE_OK) {
        for (i = 0; i < count; i++) {
            int64_t rest = i, from = 0, step = 1;
            for (d = x->ndim - 1; d >= 0; d--) {
                from += rest % shape[d] % x->shape[d] * step;
                rest /= shape[d];
                step *= x->shape[d];
            }
            memcpy(host + bytes + (size_t)i * element, host + (size_t)from * element, element);
        }
        y = te_tensor_from_host(x->te, x->dtype, x->ndim, shape, host + bytes);
    }
    te__free(x->te, host);
    return y;
}

/* Declares the graph's inputs and the sizes that vary. Fills *large with inputs whose varying sizes are larger. */
static te_result te__onnx_declare(te__onnx *g, te__onnx_inputs *in, te__onnx_inputs *large, bool batch_first,
                                  bool cross) {
    static const char *const names[TE__ONNX_SYMBOLS] = {"batch", "sequence", "sequence_kv"};
    static const int64_t primes[TE__ONNX_SYMBOLS] = {2, 3, 5};
    char text[TE__SHAPE_TEXT];
    int i, d;
    for (i = 0; i < TE__ONNX_SYMBOLS; i++) {
        g->symbol[i].name = names[i];
        g->symbol[i].times = primes[i];
    }
    for (i = 0; i < in->n; i++) {
        te_tensor *x = *in->slot[i].slot, *y;
        int64_t times[TE_MAX_DIMS];
        te__onnx_item *item;
        te__onnx_pair pair;
        te__onnx_write *w;
        if (te__numel(x) == 0)
            return te__fail(g->te, TE_ERR_INVALID,
                            "te_onnx_export: %s is %s; the module runs on it, so no size may be 0", in->slot[i].name,
                            te__shape_text(x, text));
        item = te__onnx_item_new(g, TE__ONNX_INPUT);
        if (!item || te__onnx_named(g, item, in->slot[i].name) < 0) return te_error_code(g->te);
        item->type = te__onnx_type(x->dtype);
        item->ndim = x->ndim;
        memcpy(item->shape, x->shape, sizeof(item->shape));
        for (d = 0; d < x->ndim; d++) {
            int s = te__onnx_axis(g, &in->slot[i], d, batch_first, cross);
            te__onnx_symbol *symbol = s < 0 ? NULL : &g->symbol[s];
            times[d] = symbol ? symbol->times : 1;
            if (!symbol) continue;
            item->axis[d] = symbol->name;
            if (symbol->first && symbol->first != x->shape[d])
                return te__fail(g->te, TE_ERR_INVALID,
                                "te_onnx_export: dimension %d of %s is %s, %lld, and in %s %s is %lld; give inputs "
                                "that go together",
                                d, in->slot[i].name, symbol->name, (long long)x->shape[d], g->items[symbol->input].name,
                                symbol->name, (long long)symbol->first);
            if (symbol->first) continue;
            symbol->first = x->shape[d];
            symbol->input = g->num_items - 1;
            symbol->axis = d;
        }
        y = te__onnx_repeated(x, times);
        if (!y) return te_error_code(g->te);
        *large->slot[i].slot = y;
        pair = te__onnx_pair_of(x, y);
        w = te__onnx_write_new(g, &pair, g->num_items - 1);
        if (!w) return TE_ERR_OUT_OF_MEMORY;
    }
    return TE_OK;
}

/* ---- parameters ---- */

/* Adds a parameter as a weight of the graph. If the parameter is quantized, `x` is its data or its scale, and `part` is
 * "row.data" or "row.scale". Otherwise `x` is the parameter, and `part` is NULL. */
static te_result te__onnx_add_weight(te__onnx *g, const char *path, const char *part, te_tensor *x) {
    te__onnx_pair pair;
    te__onnx_write *w;
    char name[640];
    int v = TE__ONNX_FAILED;
    if (!x || !x->buffer) return TE_OK;
    snprintf(name, sizeof(name), "%s%s%s", path, part ? "." : "", part ? part : "");
    pair = te__onnx_pair_of(x, x);
    if (te__onnx_last(g, &pair, g->num_writes) >= 0) return TE_OK; /* a parameter that several modules share */
    if (te__onnx_type(x->dtype) && (v = te__onnx_weight(g, name, x)) < 0) return te_error_code(g->te);
    w = te__onnx_write_new(g, &pair, v);
    if (!w) return TE_ERR_OUT_OF_MEMORY;
    w->tensor = x;
    w->path = te__copy_string(g->te, path);
    return te_error_code(g->te);
}
static bool te__onnx_add_parameter(void *user, te_module *m, const char *path, te_tensor *x, te_entry_kind kind) {
    te__onnx *g = (te__onnx *)user;
    (void)m, (void)kind;
    if (!x->quantized) return te__onnx_add_weight(g, path, NULL, x) == TE_OK;
    /* forward products read the row-wise copy */
    return te__onnx_add_weight(g, path, "row.data", x->quantized->row.data) == TE_OK &&
           te__onnx_add_weight(g, path, "row.scale", x->quantized->row.scale) == TE_OK;
}

/* ---- keeping scales and histories unchanged ---- */

typedef struct te__onnx_scales {
    te__scaling *scaling;
    te_tensor *scale, *history; /* copies that were made before the runs; NULL: there was no scale */
    bool pending;
} te__onnx_scales;

static te_result te__onnx_scales_take(te_ctx *te, te__onnx_scales **list, int *n) {
    te__scaling *s;
    te_result result = TE_OK;
    int i = 0;
    for (*n = 0, s = te__quant_of(te)->scaling; s; s = s->next) ++*n;
    *list = (te__onnx_scales *)te__alloc_zero(te, (size_t)*n * sizeof(te__onnx_scales));
    if (!*list) return TE_ERR_OUT_OF_MEMORY;
    for (s = te__quant_of(te)->scaling; s && result == TE_OK; s = s->next, i++) {
        te__onnx_scales *x = &(*list)[i];
        x->scaling = s;
        x->pending = s->forward.pending;
        if (!s->forward.scale) continue;
        x->scale = te__empty_like(s->forward.scale, TE_F32);
        x->history = te__empty_like(s->forward.history, TE_F32);
        if (!x->scale || !x->history) return te_error_code(te);
        result = te_tensor_copy(x->scale, s->forward.scale);
        if (result == TE_OK) result = te_tensor_copy(x->history, s->forward.history);
    }
    return result;
}
/* Checks that every scale existed before the first run. A scale that the export creates is 1, which would be wrong in
 * the file. */
static te_result te__onnx_scales_known(te_ctx *te, const te__onnx_scales *list, int n) {
    const te__scaling *s;
    char path[256];
    int i;
    for (s = te__quant_of(te)->scaling; s; s = s->next) {
        for (i = 0; i < n && list[i].scaling != s; i++) {}
        if (s->forward.scale && s->module && (i == n || !list[i].scale))
            return te__fail(te, TE_ERR_STATE,
                            "te_onnx_export: \"%s\" has no scales yet, and the file would have 1 in their place: under "
                            "delayed scaling a module must have run, or have loaded "
                            "its scales, before",
                            te_module_path(s->module, path, sizeof(path)));
    }
    return TE_OK;
}
/* Restores the scales and amax histories. A scale that the export created is still 1: only its history becomes 0. */
static te_result te__onnx_scales_give_back(te_ctx *te, const te__onnx_scales *list, int n) {
    te_op_fill_args zero = TE_ZERO;
    te_result result = TE_OK;
    int i;
    for (i = 0; i < n && result == TE_OK; i++) {
        te__slots *slots = &list[i].scaling->forward;
        slots->pending = list[i].pending;
        if (!slots->scale) continue;
        zero.dst = slots->history;
        if (!list[i].scale) {
            result = te_op_fill(te, &zero);
            continue;
        }
        result = te_tensor_copy(slots->scale, list[i].scale);
        if (result == TE_OK && te__same_shape(slots->history, list[i].history))
            result = te_tensor_copy(slots->history, list[i].history);
    }
    return result;
}

/* ---- calls to nodes ---- */

/* The operations that the export can translate. The function te__onnx_NAME translates the operation NAME. */
#define TE__ONNX_LIST(X)                                                                                            \
    X(copy, COPY)                                                                                                   \
    X(fill, FILL) X(axpby, AXPBY) X(mul, MUL) X(sum, SUM) X(embedding_fwd, EMBEDDING_FWD)                           \
        X(dropout_add_fwd, DROPOUT_ADD_FWD) X(amax, AMAX) X(scale_from_amax, SCALE_FROM_AMAX)                       \
            X(fp8_quantize, FP8_QUANTIZE) X(fp8_dequantize, FP8_DEQUANTIZE) X(block_quantize, BLOCK_QUANTIZE)       \
                X(mxfp8_quantize, MXFP8_QUANTIZE) X(nvfp4_quantize, NVFP4_QUANTIZE)                                 \
                    X(block_dequantize, BLOCK_DEQUANTIZE) X(mxfp8_dequantize, MXFP8_DEQUANTIZE)                     \
                        X(nvfp4_dequantize, NVFP4_DEQUANTIZE) X(gemm, GEMM) X(grouped_gemm, GROUPED_GEMM)           \
                            X(layernorm_fwd, LAYERNORM_FWD) X(rmsnorm_fwd, RMSNORM_FWD)                             \
                                X(l2normalize_fwd, L2NORMALIZE_FWD) X(act_fwd, ACT_FWD)                             \
                                    X(scaled_act_fwd, SCALED_ACT_FWD) X(rope, ROPE) X(qkv_rope, QKV_ROPE)           \
                                        X(attn_fwd, ATTN_FWD) X(cu_seqlens, CU_SEQLENS) X(softmax_fwd, SOFTMAX_FWD) \
                                            X(softcap, SOFTCAP) TE__ONNX_MOE_LIST(X)
#ifndef TE_NO_MOE
#define TE__ONNX_MOE_LIST(X)                                                                      \
    X(moe_router_fwd, MOE_ROUTER_FWD)                                                             \
    X(moe_chunk_map, MOE_CHUNK_MAP) X(moe_mask_map, MOE_MASK_MAP) X(moe_index_map, MOE_INDEX_MAP) \
        X(moe_permute, MOE_PERMUTE) X(moe_unpermute, MOE_UNPERMUTE)
#else
#define TE__ONNX_MOE_LIST(X)
#endif

/* A function that calls te__onnx_NAME for one operation with args of the right type. TE__ONNX_WRAP defines such a
 * function. */
typedef void (*te__onnx_emit_fn)(te__onnx *g, const te__any_args *first, const te__any_args *second);
#define TE__ONNX_WRAP(lower, UPPER)                                                                        \
    static void te__onnx_any_##lower(te__onnx *g, const te__any_args *first, const te__any_args *second) { \
        te__onnx_##lower(g, &first->lower, &second->lower);                                                \
    }
TE__ONNX_LIST(TE__ONNX_WRAP)
#undef TE__ONNX_WRAP
/* Makes no node: the operation updates the state of a recipe, which the file does not have. */
static void te__onnx_nothing(te__onnx *g, const te__any_args *first, const te__any_args *second) {
    (void)g, (void)first, (void)second;
}
static te__onnx_emit_fn te__onnx_emitter(te_op op) {
#define TE__ONNX_ROW(lower, UPPER) {TE_OP_##UPPER, te__onnx_any_##lower},
    static const struct {
        te_op op;
        te__onnx_emit_fn emit;
    } rows[] = {TE__ONNX_LIST(TE__ONNX_ROW){TE_OP_DELAYED_UPDATE, te__onnx_nothing},
                {TE_OP_DELAYED_GATHER, te__onnx_nothing}};
#undef TE__ONNX_ROW
    int i;
    for (i = 0; i < TE__COUNT(rows); i++)
        if (rows[i].op == op) return rows[i].emit;
    return NULL;
}
/* Clears the fields of args that may differ between two runs of one module:
 * - sizes, which the tensors have as well
 * - values of fill operations, which may be sizes
 * - seeds and offsets of random numbers (the export refuses dropout)
 * - angles of rotations and lengths of sequences (the functions that emit nodes compare them) */
static void te__onnx_clear_sizes(te_op op, te__any_args *a) {
    switch (op) {
    case TE_OP_GEMM: a->gemm.m = a->gemm.n = a->gemm.k = 0; break;
    case TE_OP_GROUPED_GEMM:
        a->grouped_gemm.m = a->grouped_gemm.n = a->grouped_gemm.k = a->grouped_gemm.groups = 0;
        break;
    case TE_OP_FILL: a->fill.value = 0; break;
    case TE_OP_ROPE:
        a->rope.angles.position_scale = a->rope.angles.attention_factor = 0;
        a->rope.angles.inv_freq = NULL;
        break;
    case TE_OP_QKV_ROPE:
        a->qkv_rope.angles.position_scale = a->qkv_rope.angles.attention_factor = 0;
        a->qkv_rope.angles.inv_freq = NULL;
        break;
    case TE_OP_ATTN_FWD:
        a->attn_fwd.seed = a->attn_fwd.offset = 0;
        a->attn_fwd.rule.max_seqlen_q = a->attn_fwd.rule.max_seqlen_kv = 0;
        break;
    case TE_OP_DROPOUT_ADD_FWD: a->dropout_add_fwd.seed = a->dropout_add_fwd.offset = 0; break;
#ifndef TE_NO_MOE
    case TE_OP_MOE_INDEX_MAP: a->moe_index_map.num_out_tokens = 0; break;
#endif
    default: break;
    }
}
/* Checks that both runs made the same call. Only sizes may differ. */
static bool te__onnx_is_one_call(const te__onnx_call *first, const te__onnx_call *second) {
    te__any_args a = first->args, b = second->args;
    te__args l, m;
    int k;
    if (first->op != second->op || strcmp(first->module, second->module) != 0) return false;
    te__args_of(&l, first->op, &a, true);
    te__args_of(&m, second->op, &b, true);
    for (k = 0; k < l.n; k++) {
        const te_tensor *x, *y;
        if (l.arg[k].list) return true; /* The export makes no nodes from a call that takes a list of
                                         * tensors, so the rest is not compared. */
        x = te__arg_tensor(&l.arg[k], 0);
        y = te__arg_tensor(&m.arg[k], 0);
        if (!x != !y || (x && (x->dtype != y->dtype || x->ndim != y->ndim))) return false;
        memset(te__arg_slot(&l.arg[k], 0), 0, sizeof(te_tensor *));
        memset(te__arg_slot(&m.arg[k], 0), 0, sizeof(te_tensor *));
    }
    te__onnx_clear_sizes(first->op, &a);
    te__onnx_clear_sizes(second->op, &b);
    te__args_clear_padding(first->op, &a);
    te__args_clear_padding(second->op, &b);
    return memcmp(&a, &b, te__ops[first->op].args_size) == 0;
}
/* Records a call of an operation that ONNX lacks. The export fails if an operation reads the results. The export fails
 * at once if the call writes a list of tensors. */
static void te__onnx_opaque(te__onnx *g, te__onnx_call *first, te__onnx_call *second) {
    te__args l, m;
    int k;
    te__args_of(&l, first->op, &first->args, false);
    te__args_of(&m, second->op, &second->args, false);
    for (k = 0; k < l.n && k < m.n; k++) {
        if (!(l.arg[k].flags & TE__OUT)) continue;
        if (!l.arg[k].list)
            te__onnx_store(g, te__arg_tensor(&l.arg[k], 0), te__arg_tensor(&m.arg[k], 0), TE__ONNX_FAILED);
        else te__onnx_refuse(g, "it writes a list of tensors, which has no form in ONNX");
    }
}
/* Fails if a recorded call wrote to the memory of x before a collective or the host did (te__onnx_is_foreign). */
static te_result te__onnx_refuse_foreign(te__onnx *g, const te_tensor *x) {
    te__onnx_pair pair = te__onnx_pair_of(x, x);
    char text[TE__SHAPE_TEXT];
    /* Memory that no call wrote is a constant. te__onnx_constant checks that it is the same in both runs. */
    if (te__onnx_last(g, &pair, g->num_writes) < 0) return TE_OK;
    te__onnx_refuse(
        g, "%s was written by something that is no operation, a collective or the host; a graph cannot do that",
        te__shape_text(x, text));
    return te_error_code(g->te);
}
static te_result te__onnx_translate(te__onnx *g, te__onnx_run *first, te__onnx_run *second) {
    int i = 0, k = 0;
    te_result result = te_error_code(g->te);
    while (i < first->num_calls && k < second->num_calls && result == TE_OK) {
        te__onnx_call *a = &first->calls[i], *b = &second->calls[k];
        te__onnx_emit_fn emit = te__onnx_emitter(a->op);
        if (!te__onnx_is_one_call(a, b)) break;
        g->module = a->module;
        g->op = te_query_name(a->op);
        if (a->foreign && (result = te__onnx_refuse_foreign(g, a->foreign)) != TE_OK) break;
        if (emit) emit(g, &a->args, &b->args);
        else te__onnx_opaque(g, a, b);
        result = te_error_code(g->te);
        i++, k++;
    }
    g->op = NULL;
    if (result != TE_OK || (i == first->num_calls && k == second->num_calls)) return result;
    return te__fail(g->te, TE_ERR_UNSUPPORTED,
                    "te_onnx_export: call %d of an operation is %s of \"%s\" for these inputs, and for larger ones %s "
                    "of \"%s\", or with other "
                    "arguments; the file serves all sizes, so the module must make the same calls for all of them",
                    i + 1, i < first->num_calls ? te_query_name(first->calls[i].op) : "none",
                    i < first->num_calls ? first->calls[i].module : "",
                    k < second->num_calls ? te_query_name(second->calls[k].op) : "none",
                    k < second->num_calls ? second->calls[k].module : "");
}

static te_result te__onnx_add_output(te__onnx *g, const char *name, te_tensor *first, te_tensor *second) {
    te__onnx_pair pair;
    te__onnx_output *y;
    int v;
    if (!first || !second) return TE_OK;
    if (first->quantized)
        return te__fail(g->te, TE_ERR_UNSUPPORTED,
                        "te_onnx_export: the output \"%s\" is quantized; export the module without fp8_output", name);
    if (!te__onnx_type(first->dtype))
        return te__fail(g->te, TE_ERR_UNSUPPORTED,
                        "te_onnx_export: the output \"%s\" is %s, a format that ONNX's opset %d lacks", name,
                        te_dtype_name(first->dtype), (int)TE__ONNX_OPSET);
    if (te__is_fp8(first->dtype)) /* A graph holds the decoded values of such a tensor, not its codes. */
        return te__fail(g->te, TE_ERR_UNSUPPORTED,
                        "te_onnx_export: the output \"%s\" is codes, %s, without their scale; a graph gives what they "
                        "stand for: te_op_fp8_dequantize them",
                        name, te_dtype_name(first->dtype));
    pair = te__onnx_pair_of(first, second);
    v = te__onnx_read(g, first, second);
    if (v >= 0 && first->dtype != TE_F32 && first->dtype != TE_I64)
        v = te__onnx_cast(g, v, te__onnx_type(first->dtype));
    if (v < 0 || !te__grow(g->te, (void **)&g->outputs, &g->cap_outputs, g->num_outputs, sizeof(te__onnx_output)))
        return te_error_code(g->te);
    y = &g->outputs[g->num_outputs++];
    y->name = name;
    y->item = v;
    y->type = te__onnx_type(first->dtype);
    y->ndim = first->ndim;
    te__onnx_dims(&pair, y->shape);
    return TE_OK;
}

/* ---- the two runs ---- */

static te_result te__onnx_forward(te_module *m, te__onnx_inputs *in, te__onnx_run *r, bool keep) {
    te_ctx *te = te_module_ctx(m);
    te_tensor *y;
    r->keep = keep;
    r->begin = te->writes;
    te_set_trace(te, te__onnx_note, r);
    te__functions_of(te)->any_rows = true;
    te_no_grad_begin(te);
    y = te_forward_with(m, &in->call.args);
    te_no_grad_end(te);
    te__functions_of(te)->any_rows = false;
    te_set_trace(te, NULL, NULL);
    te__onnx_look_for_foreign(r);
    return y                            ? te_error_code(te)
           : te_error_code(te) != TE_OK ? te_error_code(te)
                                        : te__fail(te, TE_ERR_STATE, "te_onnx_export: the module made no output");
}

/* Runs the module and makes the graph. The caller's te__frame_end releases the tensors that this function creates. */
static te_result te__onnx_make(te__onnx *g, te_module *m, const te_forward_args *inputs, te__onnx_run *first,
                               te__onnx_run *second) {
#define TE__ONNX_NAME(field, onnx, passes) onnx,
    static const char *const names[TE__OUTPUTS] = {TE__OUTPUT_LIST(TE__ONNX_NAME)};
#undef TE__ONNX_NAME
    te_ctx *te = g->te;
    te__onnx_inputs in = TE_ZERO, large = TE_ZERO;
    te_tensor *made[TE__OUTPUTS], *made2[TE__OUTPUTS];
    te__onnx_scales *scales = NULL;
    te__rng_state random = te__rng_now(te);
    te_result result, back;
    bool foreign[TE__OUTPUTS];
    int num_scales = 0, i;
    te__onnx_inputs_of(&in, inputs);
    te__onnx_inputs_of(&large, inputs);
    for (i = 0; i < in.n; i++) {
        te_tensor *x = *in.slot[i].slot;
        if (x->te != te || te__need_memory(x, "te_onnx_export") != TE_OK || x->quantized)
            return te_error_code(te) != TE_OK
                       ? te_error_code(te)
                       : te__fail(te, TE_ERR_INVALID,
                                  "te_onnx_export: %s %s; it must be a plain tensor of the module's context",
                                  in.slot[i].name, x->quantized ? "is quantized" : "belongs to another context");
        *in.slot[i].slot = te__empty_like(x, x->dtype); /* A copy. The export recognises inputs by their memory, so an
                                                         * input must not share memory with another input or with a
                                                         * parameter. */
        if (!*in.slot[i].slot || te_tensor_copy(*in.slot[i].slot, x) != TE_OK) return te_error_code(te);
    }
    result = te__onnx_scales_take(te, &scales, &num_scales);
    if (result != TE_OK) { /* no run has changed the scales yet */
        te__free(te, scales);
        return result;
    }
    /* This run is not recorded. It creates the scales and amax histories, as the first call of a module does. */
    result = te__onnx_forward(m, &in, first, false);
    if (result == TE_OK && !first->has_heads && !te_module_visit(m, te__onnx_look_for_backends, &first->batch_first))
        result = te_error_code(te);
    if (result == TE_OK) result = te__onnx_scales_known(te, scales, num_scales);
    if (result == TE_OK)
        result = te__onnx_declare(g, &in, &large, first->batch_first,
                                  strcmp(te_module_get_class(m)->name, "MultiheadAttention") == 0 || inputs->key);
    if (result == TE_OK && !te_module_visit_tensors(m, te__onnx_add_parameter, g)) result = te_error_code(te);
    if (result == TE_OK) result = te__onnx_forward(m, &in, first, true);
    te__outputs_list(&in.call.args.outputs, made);
    for (i = 0; i < TE__OUTPUTS; i++) foreign[i] = made[i] && te__onnx_is_foreign(first, made[i]->buffer);
    if (result == TE_OK) result = te__onnx_forward(m, &large, second, true);
    te__rng_back(te, random);
    back = te__onnx_scales_give_back(te, scales, num_scales);
    if (result == TE_OK) result = back;
    te__free(te, scales);
    if (result == TE_OK) result = te__onnx_translate(g, first, second);
    te__outputs_list(&large.call.args.outputs, made2);
    for (i = 0; i < TE__OUTPUTS && result == TE_OK; i++)
        if (made[i] && foreign[i]) result = te__onnx_refuse_foreign(g, made[i]);
    for (i = 0; i < TE__OUTPUTS && result == TE_OK; i++) result = te__onnx_add_output(g, names[i], made[i], made2[i]);
    return result;
}

TE_API te_result te_onnx_export(te_module *module, const te_forward_args *inputs, const char *path) {
    te__onnx_run first = TE_ZERO, second = TE_ZERO;
    te_trace_fn trace;
    void *trace_user;
    te__onnx *g;
    te_ctx *te;
    te_result result;
    if (!module)
        return te__fail(inputs && inputs->input ? inputs->input->te : NULL, TE_ERR_STATE,
                        "te_onnx_export: the module is NULL");
    te = te_module_ctx(module);
    if (te->error_code != TE_OK) return te->error_code;
    if (!inputs || (!inputs->input && !inputs->attention.qkv_layer) || !path)
        return te__fail(te, TE_ERR_INVALID, "te_onnx_export: %s is NULL",
                        !path     ? "path"
                        : !inputs ? "inputs"
                                  : "inputs->input");
    if (te->capture || te->warming || te->tracing)
        return te__fail(te, TE_ERR_STATE, "te_onnx_export inside %s; call it outside",
                        te->capture   ? "a graph's capture"
                        : te->warming ? "a warm-up"
                                      : "a trace hook");
    result = te__onnx_inputs_refuse(module, inputs);
    if (result != TE_OK) return result;
    g = (te__onnx *)te__alloc_zero(te, sizeof(te__onnx));
    if (!g) return TE_ERR_OUT_OF_MEMORY;
    g->te = first.te = second.te = te;
    trace = te->trace;
    trace_user = te->trace_user;
    te_set_trace(te, NULL, NULL); /* The program's trace function must not see the calls that the export makes. */
    te__frame_begin(te);
    result = te__onnx_make(g, module, inputs, &first, &second);
    if (result == TE_OK) result = te__onnx_write_file(g, path, te_module_name(module));
    te__onnx_run_free(&first);
    te__onnx_run_free(&second);
    te__onnx_plain_free(g);
    te__onnx_memory_free(g);
    te__onnx_graph_free(g);
    te__free(te, g);
    te__frame_end(te, NULL, 0);
    te_set_trace(te, trace, trace_user);
    return result;
}
