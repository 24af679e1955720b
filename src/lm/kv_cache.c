/* lm/kv_cache.c: the KV cache of a language model: keys and values of all layers and positions. This file must not
 * depend on what a model computes.
 *
 * The host knows the length, and so does the device: kernels read the numbers of a step from one tensor that never
 * moves, and the last operation of a step advances them. So a captured step can be launched for one token after
 * another. The host's length advances with each launch (te__kv_part). */

typedef struct te__kv_layer {
    te_tensor *k, *v; /* [b, max_length, G, d] */
    te_tensor *k_factors, *v_factors; /* [b, max_length, G], of a cache in E4M3, or NULL */
} te__kv_layer;
struct te_kv_cache {
    te_ctx *te;
    te__kv_layer *layers;
    int num_layers;
    int64_t length, max_length, batch;
    te_tensor *numbers; /* i32: cu_seqlens_q [b + 1], cu_seqlens_kv [b + 1], start_positions [b] (te__kv_cache_list) */
    int64_t step;       /* number of new tokens of each sequence for which cu_seqlens_q and cu_seqlens_kv are ready */
    bool stale;         /* `numbers` are not those of `length` and `step`, because a warm-up writes nothing */
    te__closable closable;
};
/* The effect of a graph on a cache. The host's decisions in the capture are right for launches at lengths from
 * begin + least to begin + most; `least` may be negative. */
typedef struct te__kv_part {
    int64_t begin, added;       /* length when the capture began; number of positions that a launch adds */
    int64_t step, step_after;   /* te_kv_cache.step before and after a launch */
    int64_t least, most;
} te__kv_part;
/* Outside a capture, steps of up to this number of new tokens give attention the whole cache and the lengths in
 * `numbers`. Steps of more tokens give it views of the positions that are taken, and it runs a kernel for long
 * sequences. */
enum { TE__KV_FEW = 16 };

static void te__kv_cache_close(void *owner) { te_kv_cache_destroy((te_kv_cache *)owner); }

TE_API void te_kv_cache_destroy(te_kv_cache *c) {
    int i;
    if (!c || te__refuse_hook(c->te, "te_kv_cache_destroy") != TE_OK) return;
    te__closable_remove(&c->closable);
    te__graphs_forget(c->te, c, "its KV cache was destroyed", "destroying a KV cache that a step has extended");
    for (i = 0; i < c->num_layers; i++) {
        te_tensor_release(c->layers[i].k);
        te_tensor_release(c->layers[i].v);
        te_tensor_release(c->layers[i].k_factors);
        te_tensor_release(c->layers[i].v_factors);
    }
    te_tensor_release(c->numbers);
    te__free(c->te, c->layers);
    te__free(c->te, c);
}

/* ---- the numbers ---- */

/* Returns a list of `numbers`: cu_seqlens_q (`list` is 0), cu_seqlens_kv (1) or start_positions (2). */
static te_tensor *te__kv_cache_list(const te_kv_cache *c, int list) {
    const int64_t b = c->batch;
    return te__alias_1d(c->numbers, list * (b + 1) * (int64_t)sizeof(int32_t), TE_I32, list < 2 ? b + 1 : b);
}
/* Adds `added` to the start positions, and makes `numbers` ready for `step` new tokens of each sequence. */
static te_result te__kv_cache_advance(te_kv_cache *c, int64_t added, int64_t step) {
    te_op_advance_kv_cache_args a = TE_ZERO;
    te_result result = TE_ERR_STATE;
    te__frame_begin(c->te);
    a.cu_seqlens_q = te__kv_cache_list(c, 0);
    a.cu_seqlens_kv = te__kv_cache_list(c, 1);
    a.start_positions = te__kv_cache_list(c, 2);
    a.added = added;
    a.step = step;
    if (a.cu_seqlens_q && a.cu_seqlens_kv && a.start_positions) result = te_op_advance_kv_cache(c->te, &a);
    te__frame_end(c->te, NULL, 0);
    if (result != TE_OK) return te_error_code(c->te);
    c->step = step;
    c->stale = c->stale || c->te->warming;
    return TE_OK;
}
/* Writes `numbers` from the host's length. */
static te_result te__kv_cache_write(te_kv_cache *c, int64_t step) {
    te_result result;
    c->stale = true; /* until both writes have been queued */
    te__frame_begin(c->te);
    result = te_tensor_fill(te__kv_cache_list(c, 2), (double)c->length);
    te__frame_end(c->te, NULL, 0);
    if (result == TE_OK) result = te__kv_cache_advance(c, 0, step);
    if (result == TE_OK) c->stale = c->te->warming;
    return result;
}

/* ---- graphs ---- */

static te_result te__kv_cache_before(te_graph *g, void *owner, void *data) {
    te_kv_cache *c = (te_kv_cache *)owner;
    const te__kv_part *p = (const te__kv_part *)data;
    const int64_t shift = c->length - p->begin;
    if (p->added > c->max_length - c->length)
        return te__fail(g->te, TE_ERR_INVALID,
                        "te_graph_launch: the graph adds %lld positions to a kv_cache that has %lld, and room for "
                        "%lld; te_kv_cache_truncate it, or make a larger one",
                        (long long)p->added, (long long)c->length, (long long)c->max_length);
    if (shift < p->least || shift > p->most)
        return te__fail(g->te, TE_ERR_STATE,
                        "te_graph_launch: kv_cache has %lld positions, and the graph was captured with %lld, where "
                        "keys are rotated in another way; run the step, and capture it anew",
                        (long long)c->length, (long long)p->begin);
    return c->stale || c->step != p->step ? te__kv_cache_write(c, p->step) : TE_OK;
}
static void te__kv_cache_after(te_graph *g, void *owner, void *data) {
    te_kv_cache *c = (te_kv_cache *)owner;
    const te__kv_part *p = (const te__kv_part *)data;
    (void)g;
    c->length += p->added;
    c->step = p->step_after;
}
static void te__kv_cache_captured(te_graph *g, void *owner, void *data) {
    te_kv_cache *c = (te_kv_cache *)owner;
    te__kv_part *p = (te__kv_part *)data;
    (void)g;
    p->added = c->length - p->begin;
    p->step_after = c->step;
    c->length = p->begin;
    c->step = p->step;
}
/* Returns the cache's part of the capture, or NULL with an error. */
static te__kv_part *te__kv_part_of(te_kv_cache *c) {
    te_graph *g = c->te->capture;
    te__graph_part *part = te__graph_find_part(g, c);
    te__kv_part *p;
    if (part) return (te__kv_part *)part->data;
    part = te__graph_add_part(g, c, sizeof(te__kv_part));
    if (!part) return NULL;
    part->before = te__kv_cache_before;
    part->after = te__kv_cache_after;
    part->captured = te__kv_cache_captured;
    p = (te__kv_part *)part->data;
    p->begin = c->length;
    p->step = c->step;
    p->least = -c->length;
    p->most = INT64_MAX;
    return p;
}

/* ---- a step ---- */

/* Returns true if a step with `added` new tokens of each sequence takes its lengths from `numbers`. */
static bool te__kv_cache_on_device(const te_kv_cache *c, int64_t added) {
    return c->te->capture ? te__graph_find_part(c->te->capture, c) != NULL
                          : c->length > 0 && added <= TE__KV_FEW && c->step == added;
}
static bool te__kv_cache_codes(const te__kv_layer *l) { return l->k_factors != NULL; }
/* Begins a step with `added` new tokens of each sequence. The host's decisions in it are right for lengths from `least`
 * to `most`. */
static te_result te__kv_cache_begin(te_kv_cache *c, int64_t added, int64_t least, int64_t most) {
    if (c->te->capture) {
        te__kv_part *p = te__kv_part_of(c);
        if (!p) return te_error_code(c->te);
        p->least = te__max(p->least, least - c->length);
        p->most = te__min(p->most, most - c->length);
    } else if (c->stale && !c->te->warming) {
        te_result result = te__kv_cache_write(c, added);
        if (result != TE_OK) return result;
    }
    if (c->step == added ||
        (!c->te->capture && (c->length == 0 || added > TE__KV_FEW) && !te__kv_cache_codes(&c->layers[0])))
        return TE_OK;
    return te__kv_cache_advance(c, 0, added);
}
/* Ends a step. The next one probably has as many new tokens, or one. */
static te_result te__kv_cache_end(te_kv_cache *c, int64_t added) {
    te_result result = te__kv_cache_advance(c, added, added <= TE__KV_FEW ? added : 1);
    if (result == TE_OK) c->length += added;
    return result;
}

TE_API int64_t te_kv_cache_length(const te_kv_cache *c) { return c ? c->length : 0; }
TE_API te_result te_kv_cache_truncate(te_kv_cache *c, int64_t length) {
    if (!c) return TE_ERR_STATE;
    if (c->te->error_code != TE_OK) return c->te->error_code;
    if (c->te->capture)
        return te__refuse_capture(c->te, "te_kv_cache_truncate", "truncate the cache before a te_graph_launch");
    if (length < 0 || length > c->length)
        return te__fail(c->te, TE_ERR_INVALID,
                        "te_kv_cache_truncate: %lld positions are to stay of the %lld that there are",
                        (long long)length, (long long)c->length);
    if (length == c->length) return TE_OK;
    c->length = length;
    if (!c->te->warming) return te__kv_cache_write(c, c->step);
    c->stale = true;
    return TE_OK;
}

/* Checks that the cache has layer `layer`. Checks that this layer has the dtype of the new keys `k` (unless they become
 * codes), their shape (apart from the length), and enough free positions for them. */
static te_result te__kv_cache_takes(te_module *m, const te_kv_cache *c, int layer, const te_tensor *k) {
    const te_tensor *kept = c->te == m->te && layer < c->num_layers ? c->layers[layer].k : NULL;
    char a[TE__SHAPE_TEXT], b[TE__SHAPE_TEXT];
    if (!kept)
        return te__fail(m->te, TE_ERR_INVALID,
                        "%s: kv_cache has %d layers%s, and this is layer %d; te_kv_cache_create makes one for a model",
                        m->cls->name, c->num_layers, c->te != m->te ? " in another context" : "", layer);
    if (kept->shape[0] == k->shape[0] && kept->shape[2] == k->shape[2] && kept->shape[3] == k->shape[3] &&
        (kept->dtype == k->dtype || te__kv_cache_codes(&c->layers[layer])) && k->shape[1] <= c->max_length - c->length)
        return TE_OK;
    return te__fail(m->te, TE_ERR_INVALID,
                    "%s: the keys are %s %s, and kv_cache is %s %s, of which %lld positions are taken; "
                    "te_kv_cache_create makes one for a model",
                    m->cls->name, te_dtype_name(k->dtype), te__shape_text(k, a), te_dtype_name(kept->dtype),
                    te__shape_text(kept, b), (long long)c->length);
}
/* Sets *rows to the rows of the cache of a layer that a step's keys and values go to, at the positions of `numbers`.
 * Returns false on failure. */
static bool te__kv_cache_rows(const te_kv_cache *c, int layer, te__cache_rows *rows) {
    const te__kv_layer *l = &c->layers[layer];
    memset(rows, 0, sizeof(*rows));
    rows->k = l->k;
    rows->v = l->v;
    rows->k_factors = l->k_factors;
    rows->v_factors = l->v_factors;
    rows->cu_seqlens = te__kv_cache_list(c, 0);
    rows->positions = te__kv_cache_list(c, 2);
    return rows->cu_seqlens && rows->positions;
}
/* Sets the lengths and factors of a call that attends to all rows of the cache. Returns false on failure. */
static bool te__kv_cache_lengths(const te_kv_cache *c, const te__cache_rows *rows, te_attn_call *call) {
    call->k_factors = rows->k_factors;
    call->v_factors = rows->v_factors;
    call->cu_seqlens_q = (te_tensor *)rows->cu_seqlens;
    call->cu_seqlens_kv = te__kv_cache_list(c, 1);
    call->attn_mask_type = TE_MASK_PADDING_CAUSAL_BOTTOM_RIGHT;
    return call->cu_seqlens_kv != NULL;
}
/* Writes the new keys k and values v to *rows. */
static te_result te__kv_cache_put(te_ctx *te, const te__cache_rows *rows, const te_tensor *k, const te_tensor *v) {
    te_op_copy_to_kv_cache_args a = TE_ZERO;
    a.k = k;
    a.v = v;
    a.k_cache = rows->k;
    a.v_cache = rows->v;
    a.k_factors = rows->k_factors;
    a.v_factors = rows->v_factors;
    a.format = TE_BSHD;
    a.cu_seqlens = rows->cu_seqlens;
    a.start_positions = rows->positions;
    return te_op_copy_to_kv_cache(te, &a);
}
/* Appends the new keys *k and values *v to the cache of a layer, at the positions of `numbers`. Sets *k and *v to all
 * positions of the cache, and the lengths and factors of `call`. Does not change c->length. */
static te_result te__kv_cache_append(te_kv_cache *c, int layer, te_tensor **k, te_tensor **v, te_attn_call *call) {
    te__cache_rows rows;
    te_result result;
    if (!te__kv_cache_rows(c, layer, &rows) || !te__kv_cache_lengths(c, &rows, call)) return te_error_code(c->te);
    result = te__kv_cache_put(c->te, &rows, *k, *v);
    *k = rows.k;
    *v = rows.v;
    return result;
}
/* Appends the new keys *k and values *v to the cache of a layer, at the host's length. Sets *k and *v to views of
 * everything cached, and the factors of `call`. Does not change c->length. */
static te_result te__kv_cache_extend(te_kv_cache *c, int layer, te_tensor **k, te_tensor **v, te_attn_call *call) {
    te__kv_layer *l = &c->layers[layer];
    const int64_t added = (*k)->shape[1], length = c->length + added;
    te__cache_rows rows;
    te_result result;
    call->attn_mask_type = c->length > 0 ? TE_MASK_CAUSAL_BOTTOM_RIGHT : TE_MASK_CAUSAL;
    if (te__kv_cache_codes(l)) {
        /* A layer that is called alone has not begun the step; otherwise this changes nothing. */
        if (te__kv_cache_begin(c, added, 0, INT64_MAX) != TE_OK || !te__kv_cache_rows(c, layer, &rows))
            return te_error_code(c->te);
        result = te__kv_cache_put(c->te, &rows, *k, *v);
        call->k_factors = te_tensor_narrow(l->k_factors, 1, 0, length);
        call->v_factors = te_tensor_narrow(l->v_factors, 1, 0, length);
        if (!call->k_factors || !call->v_factors) return te_error_code(c->te);
    } else {
        result = te_tensor_copy(te_tensor_narrow(l->k, 1, c->length, added), *k);
        if (result == TE_OK) result = te_tensor_copy(te_tensor_narrow(l->v, 1, c->length, added), *v);
    }
    *k = te_tensor_narrow(l->k, 1, 0, length);
    *v = te_tensor_narrow(l->v, 1, 0, length);
    return result == TE_OK && !(*k && *v) ? te_error_code(c->te) : result;
}
