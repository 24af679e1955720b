/* cuda/queue.c: launches the kernels of a plan on the stream, at once or through a queue. This file must not depend on
 * operations.
 *
 * Inside a forward, a backward or an optimizer step, a launch whose kernel is missing waits in a queue while a thread
 * compiles the kernel. The host continues, and queues all later work for the stream behind that launch. The queue is
 * emptied when the host needs the device. */

/* ---- one launch ---------------------------------------------------------------------------------------------- */

static te_result te__cuda_launch(te_ctx *te, const te__launch *l, te__cu_handle function) {
    void *params[1];
    te__cu_result code;
    char call[TE__LAUNCH_TEXT + 160], name[TE__LAUNCH_TEXT];
    const char *function_name = "cuLaunchKernel";
    params[0] = l->args;
    /* A cooperative launch needs the whole GPU, so it may not start early. In a capture, an early start needs a driver
     * for CUDA 12.4 or later. */
    bool follows = l->follows && !l->cooperative && (!te->capture || te__cu.version >= 12040);
    if (l->cluster > 1 || l->cooperative || follows) {
        te__cu_launch_attribute attribute[3];
        te__cu_launch_config config = TE_ZERO;
        memset(attribute, 0, sizeof(attribute));
        if (l->cluster > 1) {
            attribute[0].id = TE__CU_LAUNCH_CLUSTER;
            attribute[0].value.cluster[0] = l->cluster_y ? 1 : l->cluster;
            attribute[0].value.cluster[1] = l->cluster_y ? l->cluster : 1;
            attribute[0].value.cluster[2] = 1;
            config.num_attributes++;
        }
        if (l->cooperative) {
            attribute[config.num_attributes].id = TE__CU_LAUNCH_COOPERATIVE;
            attribute[config.num_attributes++].value.cooperative = 1;
        }
        if (follows) {
            attribute[config.num_attributes].id = TE__CU_LAUNCH_PROGRAMMATIC;
            attribute[config.num_attributes++].value.programmatic = 1;
        }
        memcpy(config.grid, l->grid, sizeof(config.grid));
        config.block[0] = l->threads;
        config.block[1] = config.block[2] = 1;
        config.shared_bytes = l->shared_bytes;
        config.stream = te->cuda->stream;
        config.attributes = attribute;
        code = te__cu.LaunchKernelEx ? te__cu.LaunchKernelEx(&config, function, params, NULL) : TE__CU_NOT_FOUND;
        function_name = "cuLaunchKernelEx";
    } else {
        code = te__cu.LaunchKernel(function, l->grid[0], l->grid[1], l->grid[2], l->threads, 1, 1, l->shared_bytes,
                                   te->cuda->stream, params, NULL);
    }
    if (!code && te->debug_sync && !te->capture) {
        code = te__cu.StreamSynchronize(te->cuda->stream);
        function_name = "while it ran";
    }
    te->jit_stats.launches++;
    if (!code) return te->debug_sync && !te->capture ? te__outside_tell(te, te->cuda->outside) : TE_OK;
    snprintf(call, sizeof(call), "kernel %s, grid %u x %u x %u, block %u, cluster %u, %u bytes of shared memory: %s",
             te__launch_text(l, name), l->grid[0], l->grid[1], l->grid[2], l->threads, l->cluster, l->shared_bytes,
             function_name);
    return te__cu_fail(te, call, code);
}

/* ---- kernels to be compiled ---------------------------------------------------------------------------------- */

/* The state of an order (a request to compile a kernel). MADE: the compilation has ended, with success or not. */
typedef enum te__order_state { TE__ORDER_WAITING, TE__ORDER_TAKEN, TE__ORDER_MADE } te__order_state;
typedef struct te__jit_order {
    struct te__jit_order *next;
    te__launch launch; /* the launch, without its arguments */
    te__jit_job job;
    te__order_state state; /* guarded by the queue's mutex */
    bool closed;           /* the kernel is in te__jit_table, or `result` is an error; used only on the context's
                            * thread */
    te_result result;
    char module_path[sizeof(((te_ctx *)0)->module_path)]; /* the module path of the call that first needed the kernel */
} te__jit_order;

/* An entry of the queue: a launch or, if launch.kernel is NULL, a write to device memory. The arguments of the launch,
 * or the bytes of the write, lie behind this struct in the same allocation. */
typedef struct te__queued {
    struct te__queued *next;
    size_t size; /* the size of this allocation */
    uint64_t plan; /* the number of the entry's plan: a failed launch drops the plan's other launches */
    te__jit_order *order; /* NULL: the kernel is in te__jit_table */
    te__launch launch;
    bool baseline;
    void *dst;
    const void *host; /* NULL: zeros */
    size_t bytes;
} te__queued;

enum { TE__QUEUE_MOST = 8192 }; /* the largest number of entries, which limits the host memory */
typedef struct te__queue {
    te__mutex mutex;
    te__cond changed;
    te__jit_order *orders;
    te__queued *first, *last;
    int count;
    uint64_t plan, failed_plan;
    bool sending; /* te__queue_send is running */
    bool closing;
    bool compiled; /* a kernel was compiled, not read from the cache */
    double start;
    te__thread threads[TE__JIT_THREADS];
    int num_threads;
} te__queue;

/* Compiles the kernel that `o` stands for. The caller holds q->mutex. The mutex is free during the compilation. */
static void te__order_make(te__queue *q, te__jit_order *o) {
    o->state = TE__ORDER_TAKEN;
    te__mutex_unlock(&q->mutex);
    te__jit_job_run(&o->job);
    te__mutex_lock(&q->mutex);
    o->state = TE__ORDER_MADE;
    te__cond_broadcast(&q->changed);
}
static void te__queue_worker(void *user) {
    te__queue *q = (te__queue *)user;
    te__mutex_lock(&q->mutex);
    while (!q->closing) {
        te__jit_order *o = q->orders;
        while (o && o->state != TE__ORDER_WAITING) o = o->next;
        if (o)
            te__order_make(q, o);
        else
            te__cond_wait(&q->changed, &q->mutex);
    }
    te__mutex_unlock(&q->mutex);
}

/* Returns the order (request to compile) for this launch's kernel. Makes a new order if there is none. Returns NULL if
 * memory runs out. */
static te__jit_order *te__order_for(te_ctx *te, te__queue *q, const te__launch *l) {
    te__jit_order *o, **end = &q->orders;
    for (; (o = *end) != NULL; end = &o->next)
        if (te__same_launch(l, o->launch.family, o->launch.kernel, o->launch.option, o->launch.num_options)) return o;
    o = (te__jit_order *)te__try_alloc(te, sizeof(te__jit_order));
    if (!o) return NULL;
    memset(o, 0, sizeof(*o));
    o->launch = *l;
    o->launch.args = NULL;
    o->launch.args_on_heap = false;
    o->job.launch = &o->launch;
    o->job.cache = te->cuda->cache;
    o->job.nvrtc = te__nvrtc_open(te__driver_major(), NULL);
    o->job.sm = te->cuda->sm;
    memcpy(o->module_path, te->module_path, sizeof(o->module_path));
    te__mutex_lock(&q->mutex);
    *end = o;
    te__cond_signal(&q->changed);
    te__mutex_unlock(&q->mutex);
    if (q->num_threads < te__min(te__cpu_count(), TE__JIT_THREADS) &&
        te__thread_start(&q->threads[q->num_threads], te__queue_worker, q))
        q->num_threads++;
    return o;
}

/* Closes the order if its compilation has ended: adds the kernel to te__jit_table, or sets o->result to an error.
 * `wait`: first compiles the kernel, or waits for the thread that does. Returns whether the order is closed. */
static bool te__order_closed(te_ctx *te, te__queue *q, te__jit_order *o, bool wait) {
    char path[sizeof(te->module_path)];
    bool made;
    if (o->closed) return true;
    te__mutex_lock(&q->mutex);
    if (wait && o->state == TE__ORDER_WAITING) te__order_make(q, o);
    while (wait && o->state != TE__ORDER_MADE) te__cond_wait(&q->changed, &q->mutex);
    made = o->state == TE__ORDER_MADE;
    te__mutex_unlock(&q->mutex);
    if (!made) return false;
    q->compiled |= o->job.compiled;
    memcpy(path, te->module_path, sizeof(path));
    memcpy(te->module_path, o->module_path, sizeof(path));
    o->result = te__jit_finish(te, &o->job);
    memcpy(te->module_path, path, sizeof(path));
    o->closed = true;
    return true;
}

/* ---- the queue ----------------------------------------------------------------------------------------------- */

static te_result te__queued_send(te_ctx *te, te__queued *e) {
    te__cu_handle function;
    te__cu_result code;
    te_result result;
    if (e->launch.kernel) {
        result = te__jit_get(te, &e->launch, e->baseline, &function);
        return result == TE_OK ? te__cuda_launch(te, &e->launch, function) : result;
    }
    code = e->host ? te__cu.MemcpyHtoDAsync((te__cu_address)(uintptr_t)e->dst, e->host, e->bytes, te->cuda->stream)
                   : te__cu.MemsetD8Async((te__cu_address)(uintptr_t)e->dst, 0, e->bytes, te->cuda->stream);
    return code ? te__cu_fail(te, e->host ? "copy to the device: cuMemcpyHtoDAsync" : "cuMemsetD8Async", code) : TE_OK;
}

/* Launches entries from the front of the queue until one lacks its kernel. `wait`: waits for kernels, and launches all.
 * te's CUcontext must be current. */
static te_result te__queue_send(te_ctx *te, te__queue *q, bool wait) {
    te_result first_failure = TE_OK;
    /* A log function that is called below may call te_ok, which calls te__queue_settle. That call does nothing while
     * q->sending is true. */
    q->sending = true;
    while (q->first) {
        te__queued *e = q->first;
        te_result result;
        if (e->order && !te__order_closed(te, q, e->order, wait)) break;
        result = e->order ? e->order->result : TE_OK;
        if (result == TE_OK && e->plan != q->failed_plan) result = te__queued_send(te, e);
        if (result != TE_OK) q->failed_plan = e->plan;
        if (result != TE_OK && first_failure == TE_OK) first_failure = result;
        q->first = e->next;
        q->count--;
        te__free(te, e);
    }
    if (!q->first) q->last = NULL;
    q->sending = false;
    return first_failure;
}

static te_result te__queue_settle(te_ctx *te) {
    te__queue *q = te->cuda->queue;
    te_result result, entered;
    bool pushed;
    if (q->sending) return TE_OK;
    te->cuda->settle = NULL; /* sending launches may call te__cuda_settle again */
    te->cuda->enqueue = NULL;
    entered = te__cuda_enter(te, &pushed);
    result = te__queue_send(te, q, true);
    if (entered == TE_OK) te__cuda_leave(pushed);
    te__mutex_lock(&q->mutex);
    q->closing = true;
    te__cond_broadcast(&q->changed);
    te__mutex_unlock(&q->mutex);
    while (q->num_threads > 0) te__thread_join(&q->threads[--q->num_threads]);
    while (q->orders) {
        te__jit_order *o = q->orders;
        q->orders = o->next;
        te__jit_job_free(&o->job);
        te__free(te, o);
    }
    if (q->compiled) te->jit_stats.compile_seconds += te__time_now() - q->start;
    te__cond_free(&q->changed);
    te__mutex_free(&q->mutex);
    te->cuda->queue = NULL;
    te__free(te, q);
    return entered == TE_OK ? result : entered;
}

static te__queued *te__queued_create(te_ctx *te, const void *copied, size_t copied_bytes) {
    size_t size = ((sizeof(te__queued) + 15) & ~(size_t)15) + copied_bytes;
    te__queued *e = (te__queued *)te__try_alloc(te, size);
    if (!e) return NULL;
    memset(e, 0, sizeof(*e));
    e->size = size;
    if (copied_bytes) memcpy((char *)e + (size - copied_bytes), copied, copied_bytes);
    return e;
}
static void *te__queued_copy(te__queued *e) { return (char *)e + ((sizeof(te__queued) + 15) & ~(size_t)15); }

static te_result te__queue_write(te_ctx *te, void *dst, const void *host, size_t bytes);

static te__queue *te__queue_open(te_ctx *te) {
    te__queue *q = te->cuda->queue;
    if (q) return q;
    q = (te__queue *)te__try_alloc(te, sizeof(te__queue));
    if (!q) return NULL;
    memset(q, 0, sizeof(*q));
    te__mutex_init(&q->mutex);
    te__cond_init(&q->changed);
    q->start = te__time_now();
    te->cuda->queue = q;
    te->cuda->settle = te__queue_settle;
    te->cuda->enqueue = te__queue_write;
    return q;
}
static void te__queue_append(te__queue *q, te__queued *e) {
    if (q->last)
        q->last->next = e;
    else
        q->first = e;
    q->last = e;
    q->count++;
}

static te_result te__queue_write(te_ctx *te, void *dst, const void *host, size_t bytes) {
    te__queue *q = te->cuda->queue;
    te__queued *e = q->first ? te__queued_create(te, host, host ? bytes : 0) : NULL;
    if (!e) { /* the queue is empty, or out of memory */
        te_result result = te__queue_settle(te);
        if (result != TE_OK) return result;
        return host ? te->device->upload(te, dst, host, bytes) : te->device->clear(te, dst, bytes);
    }
    e->dst = dst;
    e->host = host ? te__queued_copy(e) : NULL;
    e->bytes = bytes;
    e->plan = ++q->plan;
    te__queue_append(q, e);
    return TE_OK;
}

/* Returns whether the queue holds launches. If so, later work must be queued after them. */
static bool te__queue_waits(const te_ctx *te) { return te->cuda->queue && te->cuda->queue->first; }

/* Returns whether a plan may wait in the queue for kernels. It may not if other code can use or inspect the stream. */
static bool te__queue_may_wait(const te_ctx *te, const te__plan *p) {
    return te->regions > 0 && te->cuda->own_stream && !te->cuda->stream_shown && !te->debug_sync && !te->capture &&
           !p->baseline && te__nvrtc_open(te__driver_major(), NULL);
}

/* Queues a plan. If memory runs out, returns false and queues nothing. te's CUcontext must be current. */
static bool te__queue_add(te_ctx *te, te__plan *p) {
    te__queue *q = te__queue_open(te);
    te__queued *made = NULL, *e;
    int i;
    if (!q) return false;
    for (i = p->num_launches - 1; i >= 0; i--) { /* backwards, so that the list ends up in order */
        const te__launch *l = &p->launch[i];
        e = te__queued_create(te, l->args, l->args_bytes);
        if (e) {
            e->launch = *l;
            e->launch.args = te__queued_copy(e);
            e->launch.args_on_heap = false;
            e->baseline = p->baseline;
            e->next = made;
            made = e;
            if (p->baseline || te__jit_find(te->cuda->context, l, false)) continue;
            e->order = te__order_for(te, q, l);
            if (e->order) continue;
        }
        while (made) {
            e = made;
            made = e->next;
            te__free(te, e);
        }
        return false;
    }
    q->plan++;
    while (made) {
        e = made;
        made = e->next;
        e->next = NULL;
        e->plan = q->plan;
        te__queue_append(q, e);
    }
    te__queue_send(te, q, false);
    if (q->count > TE__QUEUE_MOST) te__queue_settle(te);
    return true;
}
