/* ops/table.c: the operation table: one row an operation, from TE_OP_LIST, and the one way that a call goes:
 * resolve defaults, validate, plan, launch. Knows every family; must not know what they compute. */

typedef struct te__op_info {
    size_t args_size;
    te__op_check_fn check;
    te__op_cpu_fn cpu;
    te__op_plan_fn plan;
} te__op_info;

/* The families' functions take their own args types; these take any. */
#define TE__OP_WRAP(lower, UPPER, family)                                    \
    static te_result te__any_check_##lower(te_ctx *te, void *args) {         \
        return te__check_##lower(te, (te_op_##lower##_args *)args);          \
    }                                                                        \
    static te_result te__any_cpu_##lower(te_ctx *te, const void *args) {     \
        return te__cpu_##lower(te, (const te_op_##lower##_args *)args);      \
    }                                                                        \
    static te_result te__any_plan_##lower(te__plan *p, const void *args) {   \
        return te__cuda_plan_##lower(p, (const te_op_##lower##_args *)args); \
    }
TE_OP_LIST(TE__OP_WRAP)
#undef TE__OP_WRAP

#define TE__OP_ROW(lower, UPPER, family)                                                              \
    {sizeof(te_op_##lower##_args), te__any_check_##lower, te__any_cpu_##lower, te__any_plan_##lower},
static const te__op_info te__ops[TE_OP_COUNT] = {{0, NULL, NULL, NULL}, TE_OP_LIST(TE__OP_ROW)};
#undef TE__OP_ROW

/* The common checks of a call and, between them, the operation's own, which fills defaults in. */
static te_result te__check_args(te_ctx *te, te__args *l, te_op op, void *args, bool run) {
    te_result result;
    te__args_of(l, op, args, false);
    result = te__args_check(te, l, run);
    if (result == TE_OK) result = te__ops[op].check(te, args);
    return result == TE_OK ? te__args_apart(te, l) : result;
}

/* A call with checked args. */
static te_result te__run_checked(te_ctx *te, const te__args *l, const void *args) {
    if (!te->warming) te__args_touch(l); /* a warm-up writes nothing */
    return te->device->run(te, l->op, args);
}

/* ---- the trace hook ---- */

TE_API te_result te_set_trace(te_ctx *te, te_trace_fn fn, void *user) {
    if (!te) return TE_ERR_STATE;
    te->trace = fn;
    te->trace_user = user;
    return TE_OK;
}
static void te__trace_call(te_ctx *te, te_trace_fn fn, void *user, const te_trace *event, te__floats *floats) {
    te__floats_end(floats); /* the hook computes as the program does */
    te->tracing = true;
    fn(te, event, user);
    te->tracing = false;
    *floats = te__floats_begin();
}
/* The function that saw the begin of a call sees its end, whatever te_set_trace has done meanwhile. */
static te_result te__run_traced(te_ctx *te, const te__args *l, const void *args, te__floats *floats) {
    te_trace event = TE_ZERO;
    te_trace_fn fn = te->trace;
    void *user = te->trace_user;
    event.op = l->op;
    event.args = args;
    event.mode = te->warming ? TE_TRACE_WARMUP : te->capture ? TE_TRACE_CAPTURE : TE_TRACE_RUN;
    event.backward = te->playing != NULL;
    event.module = te->module_path;
    te__trace_call(te, fn, user, &event, floats);
    event.result = te__run_checked(te, l, args);
    event.phase = TE_TRACE_AFTER;
    te__trace_call(te, fn, user, &event, floats);
    return event.result;
}

static te_result te__refuse_operation(te_ctx *te, te_op op) {
    char what[64];
    snprintf(what, sizeof(what), "te_op_%s", te_query_name(op));
    return te__refuse_hook(te, what);
}

/* Runs one operation on the context's device. Defaults are filled in a copy of the args. */
static te_result te__run(te_ctx *te, te_op op, const void *args) {
    te__any_args copy;
    te__args l;
    te__floats floats;
    te_result result;
    if (!te) return TE_ERR_STATE;
    if (!args) return te__fail(te, TE_ERR_INVALID, "te_op_%s: args is NULL", te_query_name(op));
    if (te->tracing) return te__refuse_operation(te, op);
    memcpy(&copy, args, te__ops[op].args_size);
    floats = te__floats_begin(); /* defaults and plans compute, too */
    result = te__check_args(te, &l, op, &copy, true);
    if (result == TE_OK && te->capture) result = te__capture_args(te->capture, &l);
    if (result == TE_OK) result = te->trace ? te__run_traced(te, &l, &copy, &floats) : te__run_checked(te, &l, &copy);
    te__floats_end(&floats);
    return result;
}

#define TE__OP_FUNCTION(lower, UPPER, family)                                      \
    TE_API te_result te_op_##lower(te_ctx *te, const te_op_##lower##_args *args) { \
        return te__run(te, TE_OP_##UPPER, args);                                   \
    }
TE_OP_LIST(TE__OP_FUNCTION)
#undef TE__OP_FUNCTION

/* ---- the CPU device ---- */

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
    return TE_OK;
}
static te_result te__cpu_clear(te_ctx *te, void *dst, size_t bytes) {
    if (te__is_forked(te)) return te__refuse_fork(te);
    if (te->capture && bytes) return te__record_clear(te, dst, bytes);
    if (bytes) memset(dst, 0, bytes);
    return TE_OK;
}
static te_result te__cpu_synchronize(te_ctx *te) { return te->capture ? te__refuse_wait(te) : te__refuse_fork(te); }
static te_result te__cpu_run(te_ctx *te, te_op op, const void *args) {
    if (te__is_forked(te)) return te__refuse_fork(te);
    if (te->warming) return TE_OK; /* nothing to compile, and nothing may change */
    te->jit_stats.launches++;
    return te->capture ? te__record_call(te, op, args, te__ops[op].args_size) : te__ops[op].cpu(te, args);
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
    for (i = 0; i < g->num_records && result == TE_OK; i++) {
        const te__call *r = &g->records[i];
        if (r->op == TE_OP_NONE)
            memset(r->clear, 0, r->bytes);
        else
            result = te__ops[r->op].cpu(te, r->args);
    }
    return result;
}

/* All of a copy happens in its call, so there is nothing to wait for. */
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
static te_result te__cpu_transfer(te_ctx *te, const te__stream *s, void *dst, const void *src, size_t bytes,
                                  bool to_host) {
    (void)s, (void)to_host;
    if (te__is_forked(te)) return te__refuse_fork(te);
    if (bytes) memcpy(dst, src, bytes);
    return TE_OK;
}
static void *te__cpu_pinned_alloc(te_ctx *te, size_t bytes) { return te__try_alloc(te, bytes); }
static void te__cpu_pinned_release(te_ctx *te, void *host, size_t bytes) { te__free(te, host, bytes); }

static const te__device te__cpu_device = {"cpu",
                                          te__cpu_mem_alloc,
                                          te__cpu_mem_release,
                                          te__cpu_upload,
                                          te__cpu_download,
                                          te__cpu_clear,
                                          te__cpu_synchronize,
                                          NULL,
                                          te__cpu_run,
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
                                          te__cpu_transfer,
                                          te__cpu_pinned_alloc,
                                          te__cpu_pinned_release};

/* ---- the CUDA device ---- */

/* Plans one operation on te's GPU: with every kernel there is, and where those cannot be had, with the embedded
 * ones. */
static te_result te__cuda_plan(te_ctx *te, te__plan *p, te_op op, const void *args) {
    te_result result;
    te__plan_begin(p, te);
    te__cuda_plan_facts(te, p);
    result = te__ops[op].plan(p, args);
    if (result == TE_OK && p->result == TE_OK && te__cuda_plan_lacks_kernels(te, p)) {
        te__plan_end(p);
        te__plan_begin(p, te);
        te__cuda_plan_facts(te, p);
        p->baseline = true;
        p->hopper = false;
        result = te__ops[op].plan(p, args);
    }
    return result == TE_OK ? p->result : result;
}

static te_result te__cuda_run(te_ctx *te, te_op op, const void *args) {
    te__plan plan;
    bool pushed;
    te_result result = te__cuda_enter(te, &pushed); /* planning encodes tensor maps: that wants a current CUcontext,
                                                     * too */
    if (result != TE_OK) return result;
    result = te__cuda_plan(te, &plan, op, args);
    if (result == TE_OK) result = te->warming ? te__cuda_note(te, &plan) : te__cuda_execute(te, &plan);
    te__plan_end(&plan);
    te__cuda_leave(pushed);
    return result;
}

static const te__device te__cuda_device = {"cuda",
                                           te__cuda_mem_alloc,
                                           te__cuda_mem_release,
                                           te__cuda_upload,
                                           te__cuda_download,
                                           te__cuda_clear,
                                           te__cuda_synchronize,
                                           te__cuda_memory_info,
                                           te__cuda_run,
                                           te__cuda_enter,
                                           te__cuda_leave,
                                           te__cuda_settle,
                                           te__cuda_close,
                                           te__cuda_capture_begin,
                                           te__cuda_capture_end,
                                           te__cuda_graph_launch,
                                           te__cuda_graph_close,
                                           te__cuda_stream_create,
                                           te__cuda_stream_destroy,
                                           te__cuda_stream_synchronize,
                                           te__cuda_stream_wait,
                                           te__cuda_event_create,
                                           te__cuda_event_destroy,
                                           te__cuda_event_record,
                                           te__cuda_event_wait,
                                           te__cuda_transfer,
                                           te__cuda_pinned_alloc,
                                           te__cuda_pinned_release};
