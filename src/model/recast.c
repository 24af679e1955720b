/* model/recast.c: casts tensors of a model in place, either all or none. The te_tensor handles stay valid and get new
 * memory. This file must not depend on which tensors are cast, or why. */

typedef struct te__recast_item {
    te_tensor *x;
    te_dtype dtype;
    int hold; /* priority; if a tensor is listed several times, the item with the highest priority counts */
    te_tensor *fresh, *grad; /* x and its gradient in new memory, owned by the open frame; NULL: unchanged */
    void *init; /* the preserved initial value of a quantized x, converted to `dtype`; NULL: x has none */
} te__recast_item;
typedef struct te__recast {
    te_ctx *te;
    te__recast_item *item;
    int num, cap;
} te__recast;

/* Returns true for float tensors. For a quantized tensor the nominal dtype counts. */
static bool te__is_floating(const te_tensor *x) { return te__is_float(x->dtype); }

static bool te__recast_add(te__recast *r, te_tensor *x, te_dtype dtype, int hold) {
    te__recast_item *e;
    if (!te__is_floating(x)) return true;
    if (!te__grow(r->te, (void **)&r->item, &r->cap, r->num, sizeof(te__recast_item))) return false;
    e = &r->item[r->num++];
    memset(e, 0, sizeof(*e));
    e->x = x;
    e->dtype = dtype;
    e->hold = hold;
    return true;
}

static int te__by_address(const void *a, const void *b) {
    const uintptr_t x = (uintptr_t)a, y = (uintptr_t)b;
    return x < y ? -1 : x > y;
}
static int te__recast_by_tensor(const void *a, const void *b) {
    const te__recast_item *x = (const te__recast_item *)a, *y = (const te__recast_item *)b;
    const int order = te__by_address(x->x, y->x);
    return order ? order : y->hold - x->hold;
}
static int te__recast_by_memory(const void *a, const void *b) {
    const te__recast_item *x = (const te__recast_item *)a, *y = (const te__recast_item *)b;
    const int order = te__by_address(x->x->buffer, y->x->buffer);
    if (order) return order;
    if (x->x->dtype != y->x->dtype) return x->x->dtype < y->x->dtype ? -1 : 1;
    if (x->dtype != y->dtype) return x->dtype < y->dtype ? -1 : 1;
    return x->x->offset < y->x->offset ? -1 : x->x->offset > y->x->offset;
}
/* Keeps one item for each tensor whose dtype changes. Sorts the items by buffer, then by old and new dtype, then by
 * offset. */
static void te__recast_resolve(te__recast *r) {
    int i, n = 0;
    if (r->num) qsort(r->item, (size_t)r->num, sizeof(te__recast_item), te__recast_by_tensor);
    for (i = 0; i < r->num; i++)
        if (n == 0 || r->item[i].x != r->item[n - 1].x) r->item[n++] = r->item[i];
    for (i = 0, r->num = 0; i < n; i++)
        if (r->item[i].dtype != r->item[i].x->dtype) r->item[r->num++] = r->item[i];
    if (r->num) qsort(r->item, (size_t)r->num, sizeof(te__recast_item), te__recast_by_memory);
}

/* Returns how many items, from `first` on, are adjacent or overlap in one buffer. Sets *end to the end of their bytes.
 * These items stay adjacent in the new memory, because modules read adjacent parameters as one tensor. */
static int te__recast_run_of(const te__recast *r, int first, int64_t *end) {
    const te__recast_item *e = &r->item[first];
    const int64_t size = te__dtype_size(e->x->dtype);
    int i;
    *end = te__end(e->x);
    for (i = first + 1; i < r->num; i++) {
        const te__recast_item *next = &r->item[i];
        if (next->x->buffer != e->x->buffer || next->x->dtype != e->x->dtype || next->dtype != e->dtype ||
            next->x->offset > *end || (next->x->offset - e->x->offset) % size)
            break;
        *end = te__max(*end, te__end(next->x));
    }
    return i - first;
}
/* Allocates one new buffer for `count` items, beginning with item `first`. Fills it with their cast values. */
static te_result te__recast_fill(te__recast *r, int first, int count, int64_t end) {
    const int64_t begin = r->item[first].x->offset, size = te__dtype_size(r->item[first].x->dtype),
                  fresh_size = te__dtype_size(r->item[first].dtype);
    const int64_t bytes = (end - begin) / size * fresh_size;
    te__buffer *b;
    te_result result;
    int i;
    if ((uint64_t)bytes > (uint64_t)PTRDIFF_MAX) /* possible only with 32-bit addresses */
        return te__fail(r->te, TE_ERR_OUT_OF_MEMORY,
                        "a cast to %s: %lld bytes that lie together are more than addresses of %d bits reach",
                        te_dtype_name(r->item[first].dtype), (long long)bytes, (int)(8 * sizeof(void *)));
    b = te__buffer_create(r->te, (size_t)bytes);
    result = b ? TE_OK : te_error_code(r->te);
    for (i = first; i < first + count && result == TE_OK; i++) {
        te__recast_item *e = &r->item[i];
        e->fresh = te__tensor_shell(r->te, e->dtype, e->x->ndim, e->x->shape);
        if (!e->fresh) result = te_error_code(r->te);
        if (!e->fresh) break;
        memcpy(e->fresh->stride, e->x->stride, sizeof(e->x->stride));
        e->fresh->offset = (e->x->offset - begin) / size * fresh_size;
        e->fresh->buffer = b;
        b->refs++;
        result = te_tensor_copy(e->fresh, e->x);
    }
    /* The version stays the same, because a cast gives no new value. A new version would make optimizers set the master
     * weight anew. */
    if (b) b->version = te__buffer_version(r->item[first].x->buffer);
    te__buffer_release(b);
    return result;
}
/* Converts the preserved initial value of a quantized weight to the new nominal dtype. */
static te_result te__recast_init_value(te__recast_item *e) {
    const te__quantized *q = e->x->quantized;
    const int64_t n = te__numel(e->x);
    float some[256];
    int64_t at, more;
    e->init = te__alloc(e->x->te, te__shape_bytes(e->dtype, e->x->ndim, e->x->shape));
    if (!e->init) return TE_ERR_OUT_OF_MEMORY;
    for (at = 0; at < n; at += more) {
        more = te__min(n - at, 256);
        te__load_row(q->init_value, e->x->dtype, at, more, some);
        te__store_row(e->init, e->dtype, at, more, some);
    }
    return TE_OK;
}
/* Casts the gradient and the preserved initial value of the tensor e->x, if it has them. */
static te_result te__recast_prepare(te__recast_item *e) {
    const te_tensor *grad = te_tensor_grad(e->x);
    te_result result = TE_OK;
    if (e->x->shard)
        return te__fail(e->x->te, TE_ERR_STATE,
                        "a cast from %s to %s of a sharded parameter%s%s: its slices have one format; cast the model "
                        "first, then make units (te_fsdp_unit)",
                        te_dtype_name(e->x->dtype), te_dtype_name(e->dtype), e->x->name ? " " : "",
                        e->x->name ? e->x->name : "");
    if (grad && grad->buffer && te__is_floating(grad) && grad->dtype != e->dtype) {
        e->grad = te__empty_like(grad, e->dtype);
        result = e->grad ? te_tensor_copy(e->grad, grad) : te_error_code(e->x->te);
    }
    return result == TE_OK && e->x->quantized && e->x->quantized->init_value ? te__recast_init_value(e) : result;
}

/* Marks all graphs that use buffer b as broken, because the tensors of b have moved to new memory. */
static void te__recast_break_graphs(const te__buffer *b) {
    te_graph *g;
    int i;
    for (g = b->te->graphs; g; g = g->next) {
        for (i = 0; i < g->num_held && g->held[i] != b; i++) {}
        if (i < g->num_held || (b->arena && b->arena == g->arena))
            g->broken = "a tensor that it uses was cast to another format since: capture it again";
    }
}
/* Makes the changes of an item visible. Cannot fail. */
static void te__recast_commit(te__recast_item *e) {
    te_tensor *x = e->x;
    te__quantized *q = x->quantized;
    if (e->grad) {
        te_tensor_release(x->var->grad);
        x->var->grad = te_tensor_retain(e->grad);
        e->grad->is_gradient = true;
    }
    if (e->init) {
        te__free(x->te, q->init_value);
        q->init_value = e->init;
        q->init_bytes = te__shape_bytes(e->dtype, x->ndim, x->shape);
        e->init = NULL;
    }
    x->dtype = e->dtype;
    if (!e->fresh) return;
    if (x->buffer->held) te__recast_break_graphs(x->buffer);
    te__buffer_release(x->buffer);
    x->buffer = e->fresh->buffer;
    x->buffer->refs++;
    x->offset = e->fresh->offset;
}

static te_result te__recast_all(te__recast *r) {
    te_result result = TE_OK;
    int64_t end;
    int i, n;
    for (i = 0; i < r->num && result == TE_OK; i += n) {
        n = 1;
        if (!r->item[i].x->buffer) continue; /* quantized, or without memory yet */
        n = te__recast_run_of(r, i, &end);
        result = te__recast_fill(r, i, n, end);
    }
    for (i = 0; i < r->num && result == TE_OK; i++) result = te__recast_prepare(&r->item[i]);
    if (result == TE_OK) result = r->te->error_code;
    for (i = 0; i < r->num && result == TE_OK; i++) te__recast_commit(&r->item[i]);
    return result;
}
/* Casts the tensors listed in *r and empties the list. If `ok` is false, filling the list has failed and nothing is
 * cast. */
static te_result te__recast_run(te__recast *r, bool ok) {
    te_result result = ok ? TE_OK : te_error_code(r->te);
    bool entered;
    int i;
    if (ok) {
        te__recast_resolve(r);
        result = te__device_enter(r->te, &entered);
    }
    if (result == TE_OK) {
        te__frame_begin(r->te);
        result = te__recast_all(r);
        te__frame_end(r->te, NULL, 0);
        te__device_leave(r->te, entered);
    }
    for (i = 0; i < r->num; i++) /* left over after a failure */
        if (r->item[i].init)
            te__free(r->te, r->item[i].init);
    te__free(r->te, r->item);
    memset(r, 0, sizeof(*r));
    return result;
}

/* Checks that tensors may be cast now. Fails in a capture, in a hook, between te_warmup_begin and te_warmup_end, or
 * if an error is recorded. */
static te_result te__recast_may(te_module *m, const char *who) {
    te_ctx *te = m->te;
    if (te->error_code != TE_OK) return te->error_code;
    if (te->capture) return te__refuse_capture(te, who, "cast the model before te_graph_begin");
    if (te__refuse_hook(te, who) != TE_OK) return TE_ERR_STATE;
    if (te->warming)
        return te__fail(te, TE_ERR_STATE,
                        "%s: between te_warmup_begin and te_warmup_end, where nothing runs: cast the model before",
                        who);
    return TE_OK;
}
