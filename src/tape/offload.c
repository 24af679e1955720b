/* tape/offload.c: the hooks of te_cpu_offload_begin. They keep saved activations in pinned host memory between the
 * forward and the backward pass. This file must not depend on what the tensors mean.
 *
 * Whole buffers are copied. Tensors that share a buffer share its copy (te__offloaded). One list has all copies, in the
 * order in which nodes last saved the buffers. The newest entries form the window. Their buffers are in device memory
 * too:
 *
 *     oldest | in host memory only ............ | inside the window: on the device too | newest
 *
 * Forward pass: the copy of a saved buffer is queued, and the buffer enters the window. When the window is too large,
 * its oldest buffers leave. Their device memory is released after the copy, unless other tensors hold it. The device
 * waits for the copy; the host does not.
 *
 * Backward pass: buffers that nodes have read leave the window. Older buffers enter it before they are needed. */

enum { TE__OFFLOAD_LEAST = 512 << 10 };
typedef struct te__offload_region {
    te_ctx *te; /* the context; hooks get only a pointer to the region */
    float fraction;
    int64_t min_bytes, window_bytes;
    uint64_t offered, sent; /* bytes */
} te__offload_region;
typedef struct te__offload {
    te__offload_region region[TE__MAX_HOOKS];
    int num_regions;
    te__stream *out, *in;
    te__offloaded *oldest, *newest;
    te__offloaded *inside; /* the oldest entry inside the window: this entry and all newer ones are in device memory
                            * too. NULL: the window is empty */
    size_t inside_bytes, window;
    size_t largest; /* bytes of the largest buffer copied out so far; if window_bytes is 0, the window has twice this
                     * size */
} te__offload;

/* The handle of a saved tensor. Some or all of the tensor's buffers are copied to the host. */
typedef struct te__offloaded_tensor {
    te_tensor *x; /* the saved tensor; a part (codes, scales ..) that was copied out has no device memory */
    te__offloaded *part[TE__MAX_PARTS]; /* for each part of x: the entry of its buffer in the list; NULL: the part has
                                         * stayed on the device */
} te__offloaded_tensor;

/* ---- the list and its window ---- */

static void te__offload_unlink(te__offload *o, te__offloaded *e) {
    if (o->inside == e) o->inside = e->newer;
    *(e->older ? &e->older->newer : &o->oldest) = e->newer;
    *(e->newer ? &e->newer->older : &o->newest) = e->older;
    e->older = e->newer = NULL;
}
static void te__offload_append(te__offload *o, te__offloaded *e) {
    e->older = o->newest;
    *(o->newest ? &o->newest->newer : &o->oldest) = e;
    o->newest = e;
}

/* Puts an entry into the window. The entry must be o->newest or o->inside->older. It takes over a reference to its
 * buffer from the caller. */
static void te__offload_enter(te__offload *o, te__offloaded *e) {
    e->inside = true;
    o->inside_bytes += e->bytes;
    if (!o->inside || e->newer == o->inside) o->inside = e;
}
/* Takes an entry out of the window (the newest entries, whose buffers are in device memory too), and releases the
 * entry's reference to its buffer. */
static void te__offload_leave(te__offload *o, te__offloaded *e) {
    te__buffer *b = e->buffer;
    if (!e->inside) return;
    e->inside = false;
    o->inside_bytes -= e->bytes;
    if (o->inside == e) o->inside = e->newer;
    if (b->offloaded != e) e->buffer = NULL; /* freeing b sets e->buffer to NULL only if b->offloaded is e */
    te__buffer_release(b); /* may free b, which sets e->buffer to NULL */
}

/* Separates an entry from its buffer, for example because the buffer's bytes have changed. e->buffer stays if e->inside
 * is true: te__offload_leave needs it. */
static void te__offload_unwatch(te__offloaded *e) {
    if (e->buffer && e->buffer->offloaded == e) e->buffer->offloaded = NULL;
    if (!e->inside) e->buffer = NULL;
}

/* Releases a reference that a saved tensor has to an entry. The last release frees the entry. */
static void te__offload_drop(te_ctx *te, te__offloaded *e) {
    te__offload *o = te->offload;
    if (--e->refs > 0) return;
    te__offload_unlink(o, e);
    te->pool.stats.offloaded -= e->bytes;
    if (e->inside) {
        te__buffer *b = e->buffer;
        o->inside_bytes -= e->bytes;
        te__offload_unwatch(e);
        te__buffer_release(b);
    } else {
        te__offload_unwatch(e);
    }
    te__pinned_give(e->host);
    te__free(te, e);
}

/* ---- forward ---- */

/* Queues the copy of buffer b to host memory. Returns the new entry, or NULL with an error. */
static te__offloaded *te__offload_send(te_ctx *te, te__buffer *b) {
    te__offload *o = te->offload;
    te__offloaded *e = (te__offloaded *)te__alloc_zero(te, sizeof(te__offloaded));
    if (!e) return NULL;
    e->host = te__pinned_take(te, b->bytes);
    if (!e->host || te__transfer_queue(o->out, b, e->host, b->data, e->host->data, b->bytes, true) != TE_OK) {
        te__pinned_give(e->host);
        te__free(te, e);
        return NULL;
    }
    e->buffer = b;
    e->version = b->version;
    e->bytes = b->bytes;
    b->offloaded = e;
    te->pool.stats.offloaded += e->bytes;
    if (e->bytes > o->largest) o->largest = e->bytes;
    return e;
}

/* Sets *e to the entry of x's buffer, with a new reference. If the buffer has no entry, makes one, and queues the copy
 * of the buffer to host memory. Sets *e to NULL if the buffer stays on the device, for example because the fraction
 * r->fraction of the bytes saved so far is already copied. */
static te_result te__offload_buffer(te_ctx *te, te__offload_region *r, const te_tensor *x, te__offloaded **e) {
    te__offload *o = te->offload;
    te__buffer *b = x ? x->buffer : NULL;
    *e = NULL;
    if (!b || b->capacity == 0 || b->arena || (int64_t)b->bytes < r->min_bytes || b->kept_version == b->version)
        return TE_OK;
    if (b->offloaded && b->offloaded->version != b->version) te__offload_unwatch(b->offloaded);
    if (!b->offloaded) {
        r->offered += b->bytes;
        if ((double)(r->sent + b->bytes) > (double)r->fraction * (double)r->offered) {
            b->kept_version = b->version;
            return TE_OK;
        }
        *e = te__offload_send(te, b);
        if (!*e) return te_error_code(te);
        r->sent += b->bytes;
    } else {
        *e = b->offloaded;
        te__offload_unlink(o, *e);
    }
    te__offload_append(o, *e);
    (*e)->refs++;
    if ((*e)->inside) {
        if (!o->inside) o->inside = *e; /* the entry was the only one inside the window */
    } else {
        b->refs++;
        te__offload_enter(o, *e);
    }
    o->window = r->window_bytes ? (size_t)r->window_bytes : 2 * o->largest;
    while (o->inside_bytes > o->window && o->inside != *e) {
        te_result result = te__stream_wait(te, NULL, o->inside->host->used);
        if (result != TE_OK) return result;
        te__offload_leave(o, o->inside);
    }
    return TE_OK;
}

/* Frees a handle, and releases its tensor and its entries. */
static void te__offload_free(te_ctx *te, te__offloaded_tensor *h) {
    int i;
    te_tensor_release(h->x);
    for (i = 0; i < TE__MAX_PARTS; i++)
        if (h->part[i]) te__offload_drop(te, h->part[i]);
    te__free(te, h);
}

/* Returns a new tensor with the memory of x, or NULL with an error. The new tensor belongs to no scope. */
static te_tensor *te__offload_alias(te_ctx *te, const te_tensor *x) {
    te_tensor *y;
    te__frame_begin(te);
    y = te_tensor_retain(te__alias_any(x));
    te__frame_end(te, NULL, 0);
    return y;
}
/* Replaces *part by a tensor without memory. The old tensor stays unchanged, because others may hold it. */
static te_result te__offload_detach(te_ctx *te, te_tensor **part) {
    te_tensor *own = te__offload_alias(te, *part);
    if (!own) return te_error_code(te);
    te__buffer_release(own->buffer);
    own->buffer = NULL;
    te_tensor_release(*part);
    *part = own;
    return TE_OK;
}

static void *te__offload_pack(void *user, te_tensor *x) {
    te__offload_region *r = (te__offload_region *)user;
    te_ctx *te = r->te;
    te_tensor *part[TE__MAX_PARTS], **slot[TE__MAX_PARTS];
    te__offloaded_tensor *h;
    te_result result = TE_OK;
    int i, n = te__parts(x, part), gone = 0;
    if (te->playing || te->warming) return NULL; /* Copies nothing inside a backward pass, because nodes
                                                  * recorded there need their tensors again soon. Copies
                                                  * nothing in a warm-up, because it only compiles kernels. */
    if (te__refuse_stream(te) != TE_OK) return NULL;
    h = (te__offloaded_tensor *)te__alloc_zero(te, sizeof(te__offloaded_tensor));
    if (!h) return NULL;
    for (i = 0; i < n && result == TE_OK; i++) {
        result = te__offload_buffer(te, r, part[i], &h->part[i]);
        gone += h->part[i] != NULL;
    }
    if (result == TE_OK && gone) {
        h->x = te__offload_alias(te, x);
        if (h->x) te__part_slots(&h->x, slot);
        else result = te_error_code(te);
        for (i = 0; i < n && result == TE_OK; i++)
            if (h->part[i]) result = te__offload_detach(te, slot[i]);
    }
    if (result == TE_OK && gone) return h;
    te__offload_free(te, h);
    return NULL;
}

/* ---- backward ---- */

/* Puts an entry into the window, and if needed queues the copy to a new buffer. The entry must be o->newest or
 * o->inside->older. */
static te_result te__offload_bring(te_ctx *te, te__offloaded *e) {
    te__offload *o = te->offload;
    te__buffer *b = e->buffer;
    te_result result;
    if (e->inside) return TE_OK;
    if (b && b->version == e->version) { /* the device memory still exists, held by another tensor */
        b->refs++;
        te__offload_enter(o, e);
        return TE_OK;
    }
    te__offload_unwatch(e);
    b = te__buffer_create(te, e->bytes);
    if (!b) return te_error_code(te);
    result = te__transfer_queue(o->in, b, e->host, b->data, e->host->data, e->bytes, false);
    if (result != TE_OK) {
        te__buffer_release(b);
        return result;
    }
    te__buffer_touch(b);
    b->offloaded = e;
    e->buffer = b;
    e->version = b->version;
    te__offload_enter(o, e);
    return TE_OK;
}

/* Brings older entries back to the device before they are needed, until the window has o->window bytes. */
static te_result te__offload_bring_older(te_ctx *te) {
    te__offload *o = te->offload;
    te__offloaded *e = o->inside ? o->inside->older : o->newest;
    te_result result = TE_OK;
    for (; e && o->inside_bytes + e->bytes <= o->window && result == TE_OK; e = e->older)
        result = te__offload_bring(te, e);
    return result;
}

/* Puts the saved bytes of x into device memory, and attaches this memory to x. A buffer that was written after the save
 * is not reused. */
static te_result te__offload_attach(te_ctx *te, te__offloaded *e, te_tensor *x) {
    te__offload *o = te->offload;
    te_result result;
    if (e->inside && e->buffer->version != e->version) te__offload_leave(o, e);
    if (!e->inside && e->newer != o->inside) { /* te__offload_bring takes only the newest entry or o->inside->older, so
                                                * e becomes the newest */
        te__offload_unlink(o, e);
        te__offload_append(o, e);
    }
    result = te__offload_bring(te, e);
    if (result != TE_OK) return result;
    x->buffer = e->buffer;
    x->buffer->refs++;
    return te__await(x);
}

static te_tensor *te__offload_unpack(void *user, void *handle) {
    te_ctx *te = ((te__offload_region *)user)->te;
    te__offloaded_tensor *h = (te__offloaded_tensor *)handle;
    te_tensor *x = h->x, *part[TE__MAX_PARTS];
    te_result result = te__grow(te, (void **)&te->live, &te->cap_live, te->num_live, sizeof(te_tensor *))
                           ? TE_OK
                           : TE_ERR_OUT_OF_MEMORY;
    int i, n = te__parts(x, part);
    for (i = n - 1; i >= 0 && result == TE_OK; i--)
        if (h->part[i]) result = te__offload_attach(te, h->part[i], part[i]);
    if (result == TE_OK) te->live[te->num_live++] = te_tensor_retain(x); /* x belongs to the innermost scope */
    te__offload_free(te, h);
    if (result == TE_OK) result = te__offload_bring_older(te);
    return result == TE_OK ? x : NULL;
}

static void te__offload_forget(void *user, void *handle) {
    te__offload_free(((te__offload_region *)user)->te, (te__offloaded_tensor *)handle);
}

/* ---- regions ---- */

/* Returns te->offload, or NULL with an error. The first call makes it. te->offload lives as long as the context. */
static te__offload *te__offload_open(te_ctx *te) {
    te__offload *o = te->offload;
    if (!o) o = te->offload = (te__offload *)te__alloc_zero(te, sizeof(te__offload));
    if (o && !o->out) o->out = te__stream_create(te);
    if (o && o->out && !o->in) o->in = te__stream_create(te);
    return o && o->out && o->in ? o : NULL;
}

TE_API te_result te_cpu_offload_begin(te_ctx *te, const te_cpu_offload_desc *desc) {
    te_cpu_offload_desc zero = TE_ZERO;
    te_saved_tensors_hooks hooks = TE_ZERO;
    te__offload_region *r;
    te__offload *o;
    te_result result;
    if (!te) return TE_ERR_STATE;
    if (!desc) desc = &zero;
    if (!(desc->fraction >= 0 && desc->fraction <= 1))
        return te__fail(te, TE_ERR_INVALID, "te_cpu_offload_begin: fraction is %g; 0 (all) to 1 is possible",
                        (double)desc->fraction);
    if (desc->min_bytes < 0 || desc->window_bytes < 0)
        return te__fail(te, TE_ERR_INVALID,
                        "te_cpu_offload_begin: min_bytes is %lld and window_bytes %lld; neither can be negative",
                        (long long)desc->min_bytes, (long long)desc->window_bytes);
    if (te__refuse_stream(te) != TE_OK) return te_error_code(te);
    o = te__offload_open(te);
    if (!o) return te_error_code(te);
    /* A region and its hooks have the same index. After a region has ended, a new region may take its element of
     * o->region. Nodes of the ended region still point to this element, but read only the field `te`. */
    r = &o->region[te__min(te->tape.num_hooks, TE__MAX_HOOKS - 1)];
    hooks.pack = te__offload_pack;
    hooks.unpack = te__offload_unpack;
    hooks.drop = te__offload_forget;
    hooks.user = r;
    result = te_saved_tensors_begin(te, &hooks);
    if (result != TE_OK) return result;
    memset(r, 0, sizeof(*r));
    r->te = te;
    r->fraction = desc->fraction > 0 ? desc->fraction : 1.0f;
    r->min_bytes = desc->min_bytes ? desc->min_bytes : (int64_t)TE__OFFLOAD_LEAST;
    r->window_bytes = desc->window_bytes;
    return TE_OK;
}
TE_API te_result te_cpu_offload_end(te_ctx *te) {
    const te__tape *tape;
    if (!te) return TE_ERR_STATE;
    tape = &te->tape;
    if (tape->num_hooks == 0 || tape->hooks[tape->num_hooks - 1].pack != te__offload_pack)
        return te__fail(te, TE_ERR_STATE, "te_cpu_offload_end: %s",
                        tape->num_hooks ? "the innermost region is that of te_saved_tensors_begin: end it first"
                                        : "there is no te_cpu_offload_begin before it");
    return te_saved_tensors_end(te);
}
