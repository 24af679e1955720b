/* lm/kv_cache.c: the KV cache of a language model: keys and values of all layers and positions. This file must not
 * depend on what a model computes. */

typedef struct te__kv_layer {
    te_tensor *k, *v; /* [b, max_length, G, d] */
} te__kv_layer;
struct te_kv_cache {
    te_ctx *te;
    te__kv_layer *layers;
    int num_layers;
    int64_t length, max_length, batch;
    te__closable closable;
};

static void te__kv_cache_close(void *owner) { te_kv_cache_destroy((te_kv_cache *)owner); }

TE_API void te_kv_cache_destroy(te_kv_cache *c) {
    int i;
    if (!c || te__refuse_hook(c->te, "te_kv_cache_destroy") != TE_OK) return;
    te__closable_remove(&c->closable);
    for (i = 0; i < c->num_layers; i++) {
        te_tensor_release(c->layers[i].k);
        te_tensor_release(c->layers[i].v);
    }
    te__free(c->te, c->layers);
    te__free(c->te, c);
}
TE_API int64_t te_kv_cache_length(const te_kv_cache *c) { return c ? c->length : 0; }
TE_API te_result te_kv_cache_truncate(te_kv_cache *c, int64_t length) {
    if (!c) return TE_ERR_STATE;
    if (length < 0 || length > c->length)
        return te__fail(c->te, TE_ERR_INVALID,
                        "te_kv_cache_truncate: %lld positions are to stay of the %lld that there are",
                        (long long)length, (long long)c->length);
    c->length = length;
    return TE_OK;
}

/* Checks that the cache has layer `layer`. Checks that this layer has the dtype of the new keys `k`, their shape (apart
 * from the length), and enough free positions for them. */
static te_result te__kv_cache_takes(te_module *m, const te_kv_cache *c, int layer, const te_tensor *k) {
    const te_tensor *kept = c->te == m->te && layer < c->num_layers ? c->layers[layer].k : NULL;
    char a[TE__SHAPE_TEXT], b[TE__SHAPE_TEXT];
    if (!kept)
        return te__fail(m->te, TE_ERR_INVALID,
                        "%s: kv_cache has %d layers%s, and this is layer %d; te_kv_cache_create makes one for a model",
                        m->cls->name, c->num_layers, c->te != m->te ? " in another context" : "", layer);
    if (kept->shape[0] == k->shape[0] && kept->shape[2] == k->shape[2] && kept->shape[3] == k->shape[3] &&
        kept->dtype == k->dtype && k->shape[1] <= c->max_length - c->length)
        return TE_OK;
    return te__fail(m->te, TE_ERR_INVALID,
                    "%s: the keys are %s %s, and kv_cache is %s %s, of which %lld positions are taken; "
                    "te_kv_cache_create makes one for a model",
                    m->cls->name, te_dtype_name(k->dtype), te__shape_text(k, a), te_dtype_name(kept->dtype),
                    te__shape_text(kept, b), (long long)c->length);
}
/* Appends the new keys *k and values *v to the cache of a layer. Sets *k and *v to views of everything cached. Does not
 * change c->length. */
static te_result te__kv_cache_extend(te_kv_cache *c, int layer, te_tensor **k, te_tensor **v) {
    te__kv_layer *l = &c->layers[layer];
    const int64_t added = (*k)->shape[1];
    te_result result = te_tensor_copy(te_tensor_narrow(l->k, 1, c->length, added), *k);
    if (result == TE_OK) result = te_tensor_copy(te_tensor_narrow(l->v, 1, c->length, added), *v);
    *k = te_tensor_narrow(l->k, 1, 0, c->length + added);
    *v = te_tensor_narrow(l->v, 1, 0, c->length + added);
    return result == TE_OK && !(*k && *v) ? te_error_code(c->te) : result;
}
