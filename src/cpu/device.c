/* cpu/device.c: the CPU as a device: host memory, operations that run at once, and graphs as lists of calls. This file
 * must not depend on which operations exist. */

/* ---- the calls of a graph ---- */

typedef struct te__call {
    const te__op_info *op; /* NULL, and `run` is NULL: this call sets `bytes` bytes at `clear` to 0 */
    /* Not NULL: the call is a collective (dist/calls.c). It is called after a failure of the launch too: `before` is
     * the error, which it tells the other ranks. */
    te_result (*run)(te_ctx *te, void *args, te_result before);
    void *clear;
    size_t bytes;
    void *args; /* `args_bytes` bytes: the args, followed by copies of everything that they point to */
    size_t args_bytes;
} te__call;

static te__call *te__call_add(te_ctx *te) {
    te_graph *g = te->capture;
    if (!te__grow(te, (void **)&g->records, &g->cap_records, g->num_records, sizeof(te__call))) return NULL;
    memset(&g->records[g->num_records], 0, sizeof(te__call));
    return &g->records[g->num_records];
}
static te_result te__record_clear(te_ctx *te, void *dst, size_t bytes) {
    te__call *r = te__call_add(te);
    if (!r) return TE_ERR_OUT_OF_MEMORY;
    r->clear = dst;
    r->bytes = bytes;
    te->capture->num_records++;
    return TE_OK;
}

static void te__records_free(te_ctx *te, te_graph *g) {
    int i;
    for (i = 0; i < g->num_records; i++) te__free(te, g->records[i].args);
    te__free(te, g->records);
    g->records = NULL;
    g->num_records = g->cap_records = 0;
}

/* ---- the device ---- */

static void *te__cpu_mem_alloc(te_ctx *te, size_t bytes) {
    if (te__refuse_fork(te) != TE_OK) return NULL;
    if (te->device_allocator.alloc) return te->device_allocator.alloc(te->device_allocator.user, bytes, 64);
    if (te->host_allocator.alloc) return te->host_allocator.alloc(te->host_allocator.user, bytes, 64);
    return malloc(bytes);
}
static void te__cpu_mem_release(te_ctx *te, void *data, size_t bytes) {
    if (te->device_allocator.alloc)
        te->device_allocator.release(te->device_allocator.user, data, bytes);
    else if (te->host_allocator.alloc)
        te->host_allocator.release(te->host_allocator.user, data, bytes);
    else
        free(data);
}
static te_result te__cpu_upload(te_ctx *te, void *dst, const void *src, size_t bytes) {
    if (te__is_forked(te)) return te__refuse_fork(te);
    if (te->capture) return te__refuse_upload(te);
    if (bytes) memcpy(dst, src, bytes);
    return TE_OK;
}
static te_result te__cpu_download(te_ctx *te, void *dst, const void *src, size_t bytes) {
    if (te__is_forked(te)) return te__refuse_fork(te);
    if (te->capture) return te__refuse_download(te);
    if (bytes) memcpy(dst, src, bytes);
    return te__tell_waited(te, TE_OK);
}
static te_result te__cpu_clear(te_ctx *te, void *dst, size_t bytes) {
    if (te__is_forked(te)) return te__refuse_fork(te);
    if (te->capture && bytes) return te__record_clear(te, dst, bytes);
    if (bytes) memset(dst, 0, bytes);
    return TE_OK;
}
static te_result te__cpu_synchronize(te_ctx *te) {
    return te__tell_waited(te, te->capture ? te__refuse_wait(te) : te__refuse_fork(te));
}
static te_result te__cpu_run(te_ctx *te, const te__op_info *op, const void *args) {
    if (te__is_forked(te)) return te__refuse_fork(te);
    /* The CPU compiles no kernels, so a warm-up does nothing. */
    if (te->warming) return TE_OK;
    te->jit_stats.launches++;
    return te->capture ? op->record(te, op, args) : op->cpu(te, args);
}
static te_result te__cpu_capture_begin(te_ctx *te) {
    (void)te;
    return TE_OK;
}
static te_result te__cpu_capture_end(te_ctx *te, te_graph *g) {
    (void)te, (void)g;
    return TE_OK;
}
static te_result te__cpu_graph_launch(te_ctx *te, te_graph *g) {
    te_result result = te__refuse_fork(te);
    int i;
    for (i = 0; i < g->num_records; i++) {
        const te__call *r = &g->records[i];
        if (r->run) result = r->run(te, r->args, result);
        else if (result != TE_OK) continue;
        else if (r->op) result = r->op->cpu(te, r->args);
        else memset(r->clear, 0, r->bytes);
    }
    return result;
}

/* Creates a stream or an event. The handle is NULL, because nothing ever waits: on the CPU a copy is done when its call
 * returns. */
static te_result te__cpu_handle(te_ctx *te, void **handle) {
    *handle = NULL;
    return te__refuse_fork(te);
}
static void te__cpu_handle_free(te_ctx *te, void *handle) { (void)te, (void)handle; }
static te_result te__cpu_stream_synchronize(te_ctx *te, const te__stream *s) {
    (void)s;
    return te__refuse_fork(te);
}
static te_result te__cpu_stream_wait(te_ctx *te, const te__stream *s, void *event) {
    (void)s, (void)event;
    return te__refuse_fork(te);
}
static te_result te__cpu_event_record(te_ctx *te, void *event, const te__stream *s) {
    (void)s, (void)event;
    return te__refuse_fork(te);
}
static te_result te__cpu_event_wait(te_ctx *te, void *event, bool *passed) {
    (void)event;
    if (passed) *passed = true;
    return te__refuse_fork(te);
}
static bool te__cpu_event_passed(te_ctx *te, void *event) {
    (void)te, (void)event;
    return true;
}
static te_result te__cpu_transfer(te_ctx *te, const te__stream *s, void *dst, const void *src, size_t bytes,
                                  bool to_host) {
    (void)s, (void)to_host;
    if (te__is_forked(te)) return te__refuse_fork(te);
    if (bytes) memcpy(dst, src, bytes);
    return TE_OK;
}
static void *te__cpu_pinned_alloc(te_ctx *te, size_t bytes) { return te__try_alloc(te, bytes); }
static void te__cpu_pinned_release(te_ctx *te, void *host, size_t bytes) {
    (void)bytes;
    te__free(te, host);
}

static const te__device te__cpu_device = {"cpu",
                                          te__cpu_mem_alloc,
                                          te__cpu_mem_release,
                                          te__cpu_upload,
                                          te__cpu_download,
                                          te__cpu_clear,
                                          te__cpu_synchronize,
                                          NULL,
                                          NULL,
                                          te__cpu_run,
                                          NULL,
                                          NULL,
                                          NULL,
                                          NULL,
                                          NULL,
                                          te__cpu_capture_begin,
                                          te__cpu_capture_end,
                                          te__cpu_graph_launch,
                                          te__records_free,
                                          te__cpu_handle,
                                          te__cpu_handle_free,
                                          te__cpu_stream_synchronize,
                                          te__cpu_stream_wait,
                                          te__cpu_handle,
                                          te__cpu_handle_free,
                                          te__cpu_event_record,
                                          te__cpu_event_wait,
                                          te__cpu_event_passed,
                                          te__cpu_transfer,
                                          te__cpu_pinned_alloc,
                                          te__cpu_pinned_release};
