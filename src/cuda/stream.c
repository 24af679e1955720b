/* cuda/stream.c: the functions of te__device for other streams than the context's own, for events and for pinned
 * memory. This file must not depend on kernels.
 *
 * A launch waits in a queue while its kernel is compiled (cuda/queue.c). All queued launches are sent to the context's
 * own stream before an event is recorded on that stream, and before that stream waits for an event. */

/* Returns the driver's handle of a stream. If s is NULL, sends all queued launches to the context's own stream, and
 * returns the handle of that stream. */
static te__cu_handle te__cuda_stream_of(te_ctx *te, const te__stream *s) {
    if (s) return s->handle;
    te__cuda_settle(te); /* if a kernel does not compile, this call sets the error */
    return te->cuda->stream;
}
/* Leaves te's CUcontext. If `code` is an error, reports that the driver function named `call` has failed. */
static te_result te__cuda_leave_with(te_ctx *te, bool pushed, const char *call, te__cu_result code) {
    te__cuda_leave(pushed);
    return code ? te__cu_fail(te, call, code) : TE_OK;
}

/* Creates a stream that does not synchronize with the legacy default stream. Its blocks go ahead of those of the
 * context's own stream that have not begun: a collective of a flight otherwise begins when all blocks of the product
 * beside it have. */
static te_result te__cuda_stream_create(te_ctx *te, void **stream) {
    bool pushed;
    te_result result = te__cuda_enter(te, &pushed);
    return result == TE_OK ? te__cuda_leave_with(te, pushed, "cuStreamCreateWithPriority",
                                                 te__cu.StreamCreateWithPriority(stream, TE__CU_STREAM_NON_BLOCKING,
                                                                                 TE__CU_STREAM_URGENT))
                           : result;
}
static void te__cuda_stream_destroy(te_ctx *te, void *stream) {
    bool pushed;
    if (te__cuda_enter(te, &pushed) == TE_OK)
        te__cuda_leave_with(te, pushed, "cuStreamDestroy", te__cu.StreamDestroy(stream));
}
static te_result te__cuda_stream_synchronize(te_ctx *te, const te__stream *s) {
    bool pushed;
    te_result result = te__cuda_enter(te, &pushed);
    return result == TE_OK ? te__cuda_leave_with(te, pushed, "cuStreamSynchronize", te__cu.StreamSynchronize(s->handle))
                           : result;
}

static te_result te__cuda_event_create(te_ctx *te, void **event) {
    bool pushed;
    te_result result = te__cuda_enter(te, &pushed);
    return result == TE_OK
               ? te__cuda_leave_with(te, pushed, "cuEventCreate", te__cu.EventCreate(event, TE__CU_EVENT_NO_TIMING))
               : result;
}
static void te__cuda_event_destroy(te_ctx *te, void *event) {
    bool pushed;
    if (te__cuda_enter(te, &pushed) == TE_OK)
        te__cuda_leave_with(te, pushed, "cuEventDestroy", te__cu.EventDestroy(event));
}
static te_result te__cuda_event_record(te_ctx *te, void *event, const te__stream *s) {
    bool pushed;
    te_result result = te__cuda_enter(te, &pushed);
    return result == TE_OK
               ? te__cuda_leave_with(te, pushed, "cuEventRecord", te__cu.EventRecord(event, te__cuda_stream_of(te, s)))
               : result;
}
static te_result te__cuda_stream_wait(te_ctx *te, const te__stream *s, void *event) {
    bool pushed;
    te_result result = te__cuda_enter(te, &pushed);
    return result == TE_OK ? te__cuda_leave_with(te, pushed, "cuStreamWaitEvent",
                                                 te__cu.StreamWaitEvent(te__cuda_stream_of(te, s), event, 0))
                           : result;
}
static te_result te__cuda_event_wait(te_ctx *te, void *event, bool *passed) {
    te__cu_result code;
    bool pushed;
    te_result result = te__cuda_enter(te, &pushed);
    if (result != TE_OK) return result;
    code = passed ? te__cu.EventQuery(event) : te__cu.EventSynchronize(event);
    if (passed) *passed = code != TE__CU_NOT_READY;
    return te__cuda_leave_with(te, pushed, passed ? "cuEventQuery" : "cuEventSynchronize",
                               passed && code == TE__CU_NOT_READY ? 0 : code);
}

/* Calls the driver alone, since other threads than the context's ask. */
static bool te__cuda_event_passed(te_ctx *te, void *event) {
    te__cu_handle popped;
    te__cu_result code;
    if (te__is_forked(te) || te__cu.CtxPushCurrent(te->cuda->context) != 0) return true;
    code = te__cu.EventQuery(event);
    te__cu.CtxPopCurrent(&popped);
    return code != TE__CU_NOT_READY;
}

/* Queues a copy. The host memory is pinned, so the copy overlaps with kernels. */
static te_result te__cuda_transfer(te_ctx *te, const te__stream *s, void *dst, const void *src, size_t bytes,
                                   bool to_host) {
    te__cu_result code;
    bool pushed;
    te_result result = te__cuda_enter(te, &pushed);
    if (result != TE_OK) return result;
    code = to_host ? te__cu.MemcpyDtoHAsync(dst, (te__cu_address)(uintptr_t)src, bytes, s->handle)
                   : te__cu.MemcpyHtoDAsync((te__cu_address)(uintptr_t)dst, src, bytes, s->handle);
    if (!code && te->debug_sync) code = te__cu.StreamSynchronize(s->handle);
    return te__cuda_leave_with(
        te, pushed, to_host ? "copy to pinned memory: cuMemcpyDtoHAsync" : "copy from pinned memory: cuMemcpyHtoDAsync",
        code);
}

/* Returns pinned host memory; NULL when there is none. */
static void *te__cuda_pinned_alloc(te_ctx *te, size_t bytes) {
    void *host = NULL;
    te__cu_result code;
    bool pushed;
    if (te__cuda_enter(te, &pushed) != TE_OK) return NULL;
    code = te__cu.MemHostAlloc(&host, bytes, 0);
    te__cuda_leave(pushed);
    if (code && code != TE__CU_OUT_OF_MEMORY) te__cu_fail(te, "cuMemHostAlloc", code);
    return code ? NULL : host;
}
static void te__cuda_pinned_release(te_ctx *te, void *host, size_t bytes) {
    bool pushed;
    (void)bytes;
    if (te__cuda_enter(te, &pushed) == TE_OK)
        te__cuda_leave_with(te, pushed, "cuMemFreeHost", te__cu.MemFreeHost(host));
}
