/* core/transfer.c: copies between tensors and pinned host memory on a stream other than the context's own. This file
 * must not depend on the tape or on the purpose of a copy.
 *
 *     te__copy_out(s, host, at, x)   copies the bytes of x to pinned memory, from byte `at` on
 *     te__copy_in(s, x, host, at)    copies them back
 *     te__await(x)                   makes later operations wait until te__copy_in has filled x
 *
 * A copy starts after all work that the context has queued so far, and after earlier copies of the same memory. The
 * host does not wait. The buffer of x and the pinned block each store an event that is recorded behind their last copy.
 * x may be released at once, because its memory is not reused before that event. Operations that write x wait on the
 * device (te__touch). Operations that read x do not wait: between te__copy_in and te__await, x is undefined. */

/* Queues a copy between b and p on the stream s, after all earlier work. Records an event behind the copy, and stores
 * this event in b->used and p->used. */
static te_result te__transfer_queue(te__stream *s, te__buffer *b, te__pinned *p, void *device, void *host, size_t bytes,
                                    bool out) {
    te_ctx *te = s->te;
    te__event *before = te__event_create(te), *after = before ? te__event_create(te) : NULL;
    te_result result = after ? te__event_record(before, NULL) : te_error_code(te);
    if (result == TE_OK) result = te__stream_wait(te, s, before);
    if (result == TE_OK) result = te__stream_wait(te, s, b->used);
    if (result == TE_OK) result = te__stream_wait(te, s, p->used);
    if (result == TE_OK) result = te->device->copy(te, s, out ? host : device, out ? device : host, bytes, out);
    if (result == TE_OK) {
        result = te__event_record(after, s);
        if (result == TE_OK) {
            if (out) te->pool.stats.copied_out += bytes;
            else te->pool.stats.copied_in += bytes;
            te__event_release(b->used);
            te__event_release(p->used);
            b->used = te__event_retain(after);
            p->used = te__event_retain(after);
        } else {
            /* The event could not be recorded, so wait here until the copy is done. */
            te->device->stream_synchronize(te, s);
        }
    }
    te__event_release(before);
    te__event_release(after);
    return result;
}

static te_result te__transfer(te__stream *s, te_tensor *x, te__pinned *p, size_t at, bool out) {
    const char *what = out ? "copying a tensor to pinned memory" : "copying a tensor from pinned memory";
    te_ctx *te = s->te;
    char text[TE__SHAPE_TEXT];
    size_t bytes;
    te_result result = te__refuse_stream(te);
    if (result != TE_OK) return result;
    if (x->te != te) return te__fail(te, TE_ERR_INVALID, "%s: it belongs to another context than the stream", what);
    if (!x->buffer || x->form) return te__no_plain_memory(x, what);
    if (!te__is_contiguous(x)) return te__fail(te, TE_ERR_SHAPE, "%s: %s is strided", what, te__shape_text(x, text));
    bytes = te_tensor_bytes(x);
    if (at > p->capacity || bytes > p->capacity - at)
        return te__fail(te, TE_ERR_SHAPE, "%s: %s needs %llu bytes from byte %llu on; the block has %llu", what,
                        te__shape_text(x, text), (unsigned long long)bytes, (unsigned long long)at,
                        (unsigned long long)p->capacity);
    return bytes ? te__transfer_queue(s, x->buffer, p, te__data(x), (char *)p->data + at, bytes, out) : TE_OK;
}
static inline te_result te__copy_out(te__stream *s, te__pinned *host, size_t at, const te_tensor *x) {
    return te__transfer(s, (te_tensor *)x, host, at, true); /* x is not const: its buffer remembers the copy */
}
static inline te_result te__copy_in(te__stream *s, te_tensor *x, te__pinned *host, size_t at) {
    te_result result = te__transfer(s, x, host, at, false);
    if (x->buffer) te__buffer_touch(x->buffer);
    return result;
}
static inline te_result te__await(const te_tensor *x) {
    return x->buffer ? te__stream_wait(x->te, NULL, x->buffer->used) : TE_OK;
}
