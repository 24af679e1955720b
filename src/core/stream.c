/* core/stream.c: streams other than the context's own, events, and pinned host memory. This file must not depend on
 * tensors or the pool.
 *
 * Operations run only on the context's own stream. A te__stream pointer that is NULL means this stream. A second stream
 * copies between device memory and pinned host memory (core/transfer.c), but not in a capture, or runs collectives
 * (dist/flight.c), in captures too. */

static te_result te__refuse_stream(te_ctx *te) {
    if (!te->capture) return te__refuse_fork(te);
    return te__refuse_capture(te, "copying on a second stream", "end the offload before te_graph_begin");
}

/* ---- events ---- */

/* Returns an event that is not recorded yet, and one reference to it. On failure returns NULL and sets the error. */
static te__event *te__event_create(te_ctx *te) {
    te__event *e = te->spare_events;
    if (e) {
        te->spare_events = e->next;
    } else {
        e = (te__event *)te__alloc_zero(te, sizeof(te__event));
        if (!e) return NULL;
        if (te->device->event_create(te, &e->handle) != TE_OK) {
            te__free(te, e);
            return NULL;
        }
        e->te = te;
    }
    e->refs = 1;
    e->pending = e->awaited = false;
    e->stream = NULL;
    return e;
}
static te__event *te__event_retain(te__event *e) {
    e->refs++;
    return e;
}
/* Releases a reference. When no reference is left, te__event_create may reuse the event. This is safe even if a stream
 * still waits for the event, because a new recording does not change that wait. */
static void te__event_release(te__event *e) {
    if (!e || --e->refs > 0) return;
    e->next = e->te->spare_events;
    e->te->spare_events = e;
}

/* Records the event behind all work that has been queued on `s` so far. */
static te_result te__event_record(te__event *e, te__stream *s) {
    te_result result = te__refuse_stream(e->te);
    if (result == TE_OK) result = e->te->device->event_record(e->te, e->handle, s);
    if (result != TE_OK) return result;
    e->stream = s;
    e->pending = true;
    e->awaited = false;
    return TE_OK;
}
/* Makes later work on `s` wait for the event; the host does not wait. Does nothing in a capture: te_graph_begin has
 * waited for all events. */
static te_result te__stream_wait(te_ctx *te, te__stream *s, te__event *e) {
    te_result result;
    if (!e || !e->pending || e->stream == s || (!s && e->awaited) || te->capture) return TE_OK;
    result = te__refuse_stream(te);
    if (result == TE_OK) result = te->device->stream_wait(te, s, e->handle);
    if (result == TE_OK && !s) e->awaited = true;
    return result;
}
/* Returns true if all work before the event is done; does not wait. If the device fails, sets an error and returns
 * true, because no more work will run. */
static bool te__event_passed(te__event *e) {
    bool passed = true;
    if (e->pending && !te__is_forked(e->te) && e->te->device->event_wait(e->te, e->handle, &passed) != TE_OK)
        passed = true;
    e->pending = !passed;
    return passed;
}
/* Waits on the host for the event. */
static te_result te__event_synchronize(te__event *e) {
    te_result result = TE_OK;
    if (e->pending && !te__is_forked(e->te)) result = e->te->device->event_wait(e->te, e->handle, NULL);
    e->pending = false;
    return result;
}

/* ---- streams ---- */

/* Returns a new stream. On failure returns NULL and sets the error. The stream lives until te__stream_destroy or the
 * end of the context. A capture may run. */
static te__stream *te__stream_open(te_ctx *te) {
    te__stream *s;
    if (te__refuse_fork(te) != TE_OK) return NULL;
    s = (te__stream *)te__alloc_zero(te, sizeof(te__stream));
    if (!s) return NULL;
    if (te->device->stream_create(te, &s->handle) != TE_OK) {
        te__free(te, s);
        return NULL;
    }
    s->te = te;
    s->next = te->streams;
    te->streams = s;
    return s;
}
/* Does what te__stream_open does, for copies: refuses in a capture. */
static inline te__stream *te__stream_create(te_ctx *te) {
    return te__refuse_stream(te) == TE_OK ? te__stream_open(te) : NULL;
}
/* Waits until the copies on the stream have finished, then destroys the stream. */
static void te__stream_destroy(te__stream *s) {
    te_ctx *te;
    te__stream **at;
    if (!s) return;
    te = s->te;
    for (at = &te->streams; *at != s;) at = &(*at)->next;
    *at = s->next;
    if (!te__is_forked(te)) {
        te->device->stream_synchronize(te, s);
        te->device->stream_destroy(te, s->handle);
    }
    te__free(te, s);
}
static te_result te__streams_synchronize(te_ctx *te) {
    te_result result = TE_OK;
    te__stream *s;
    for (s = te->streams; s && result == TE_OK; s = s->next) result = te->device->stream_synchronize(te, s);
    return result;
}


/* ---- forks ----
 * A second stream that works between a fork and a join, in a capture of the context's own stream too: the fork makes it
 * part of the capture, and the join must come before the capture ends. */

/* Makes later work on `s` wait for all work that the context's own stream has so far. The host does not wait. `fork`: a
 * new event, which has no other use. */
static te_result te__stream_fork(te__stream *s, te__event *fork) {
    te_ctx *te = s->te;
    te_result result = te__refuse_fork(te);
    if (result == TE_OK) result = te->device->event_record(te, fork->handle, NULL);
    return result == TE_OK ? te->device->stream_wait(te, s, fork->handle) : result;
}
/* Records `end`, a new event, behind all work that `s` has so far. */
static te_result te__stream_mark(te__stream *s, te__event *end) {
    te_result result = te__refuse_fork(s->te);
    return result == TE_OK ? s->te->device->event_record(s->te, end->handle, s) : result;
}
/* Makes later work on the context's own stream wait for the event of te__stream_mark. The host does not wait. */
static te_result te__stream_join(te__event *end) {
    te_result result = te__refuse_fork(end->te);
    return result == TE_OK ? end->te->device->stream_wait(end->te, NULL, end->handle) : result;
}

/* ---- pinned host memory ---- */

/* Returns a block of pinned memory with at least `bytes` bytes. The caller must give the block back (te__pinned_give).
 * On failure returns NULL and sets the error.
 * Blocks are reused, because allocating pinned memory is slow and waits for the device.
 * An earlier copy from or to the block may still be running. Later copies wait for that copy. The host must call
 * te__pinned_wait before it reads or writes the block. */
static inline te__pinned *te__pinned_take(te_ctx *te, size_t bytes) {
    te__pinned *p, *best = NULL;
    for (p = te->pinned; p; p = p->next)
        if (!p->taken && p->capacity >= bytes && p->capacity <= bytes + bytes / 4 + 4096 &&
            (!best || p->capacity < best->capacity))
            best = p;
    if (best) {
        best->taken = true;
        return best;
    }
    p = (te__pinned *)te__alloc_zero(te, sizeof(te__pinned));
    if (!p) return NULL;
    p->capacity = (bytes / 4096 + 1) * 4096;
    p->data = te->device->pinned_alloc(te, p->capacity);
    if (!p->data) {
        te__fail(te, TE_ERR_OUT_OF_MEMORY, "%s: %llu bytes of pinned host memory could not be allocated",
                 te->device_name, (unsigned long long)p->capacity);
        te__free(te, p);
        return NULL;
    }
    p->taken = true;
    te->pool.stats.pinned += p->capacity;
    p->next = te->pinned;
    te->pinned = p;
    return p;
}
static inline void te__pinned_give(te__pinned *p) {
    if (p) p->taken = false;
}
/* Blocks the host until the last copy to or from the block has finished. Then the host may read and write the block. */
static te_result te__pinned_wait(te__pinned *p) { return p->used ? te__event_synchronize(p->used) : TE_OK; }

/* Frees the pinned blocks that are not taken, or every pinned block if `all` is true. */
static void te__pinned_trim(te_ctx *te, bool all) {
    te__pinned *p, **at = &te->pinned;
    while ((p = *at) != NULL) {
        if (p->taken && !all) {
            at = &p->next;
            continue;
        }
        *at = p->next;
        te__pinned_wait(p);
        te__event_release(p->used);
        te->pool.stats.pinned -= p->capacity;
        if (!te__is_forked(te)) te->device->pinned_release(te, p->data, p->capacity);
        te__free(te, p);
    }
}

/* te__streams_close and te__events_close are called when the context is destroyed. */
static void te__streams_close(te_ctx *te) {
    while (te->streams) te__stream_destroy(te->streams);
}
static void te__events_close(te_ctx *te) {
    te__event *e;
    while ((e = te->spare_events) != NULL) {
        te->spare_events = e->next;
        if (!te__is_forked(te)) te->device->event_destroy(te, e->handle);
        te__free(te, e);
    }
}
