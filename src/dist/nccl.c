/* dist/nccl.c: the group whose ranks are processes, over NCCL. Collectives are queued on the context's stream. This
 * file must not depend on modules and recipes.
 *
 * Several threads use a group. The context's own thread queues collectives. The store's watcher (dist/store.c) ends the
 * communicator when a rank is gone, and measures how long collectives take. Any thread may abort the group. A thread
 * that holds `mutex` must not call functions of the store, because the watcher takes it while it holds the store's
 * mutex.
 *
 * Communicators block: ncclAllReduce and the others queue their kernels and return. A communicator that does not block
 * (ncclConfig_t.blocking = 0) starts a thread in each call, which takes much longer. A call may wait for another rank:
 * while NCCL connects the two, or while the stream is full behind a collective that does not end. So the context's
 * thread holds no mutex in a call; it is `inside`. The thread that ends the communicator begins a group of NCCL's and
 * calls ncclCommAbort in it. That sets flags which end the other thread's wait; NCCL frees the communicator at the end
 * of the group, when the other thread is not inside any more (a call that begins between the two fails, or queues a
 * kernel that ends at once). NCCL before 2.22 frees it in ncclCommAbort: there, communicators do not block, and it is
 * called when the other thread is not inside. */

#ifndef _WIN32

enum { TE__NCCL_MARKS = 16 };

/* A communicator and how it ends. The thread that ends it may outlive the group and the context, so this is not their
 * memory. */
typedef struct te__nccl_end_of {
    te__nccl_comm *comm; /* NULL: it does not end yet */
    bool peace;          /* it is destroyed, not aborted */
    int64_t inside;      /* atomic: the context's thread is in calls of NCCL's */
    int64_t over;        /* atomic: NCCL has ended it */
} te__nccl_end_of;

typedef struct te__nccl_rank {
    te_ctx *te;
    const char *name; /* borrowed from the te_group */
    te__store *store; /* NULL: the group has one rank */
    te__member member;
    te__waiter waiter;
    int rank, size;
    int *ranks; /* [size]: their numbers in the job */
    te__stream *on; /* where collectives are queued; NULL: on the context's own stream */
    int splits; /* te_group_split calls so far */
    bool told;  /* the context has been told that the group has failed */
    te__mutex mutex;
    te__nccl_comm *comm;  /* NULL: not made yet, or ended */
    int64_t ended;        /* atomic: the watcher, or te_group_destroy, has taken `comm` away to end it */
    te__nccl_end_of *end; /* NULL: the group has one rank */
    bool has_ender;       /* there is the thread `ender`, which ends the communicator */
    te__thread ender;
    te__nccl_comm *born; /* NCCL writes a part's communicator here, perhaps until the group's own has been ended */
    /* Events after the collectives that perhaps have not passed yet: event[(first + i) % TE__NCCL_MARKS]. */
    void *event[TE__NCCL_MARKS];
    double queued[TE__NCCL_MARKS]; /* the times at which they were queued */
    int first, marks, num_events;
    double passed; /* when the last one was seen to have passed */
} te__nccl_rank;

/* A call of NCCL's. */
typedef struct te__nccl_call {
    te__collective kind;
    const void *x;
    void *out;
    size_t count; /* elements of `dtype`; te_all_to_all: bytes of a line */
    int dtype, op, peer;
    const int64_t *send_counts, *recv_counts;
    te_tensor *const *outs, *const *ins; /* te__pass: `peer` gets `outs`, and `from` sends `ins`; te__sums: `outs` */
    int n, from;
} te__nccl_call;

/* ---- failing ---- */

static te_result te__nccl_fail(te__nccl_rank *me, te_result code, const char *who, const char *why) {
    me->told = true;
    return te__fail(me->te, code, "%s: group \"%s\", rank %d of %d: %s", who, me->name, me->rank, me->size, why);
}

static void te__nccl_await_outside(te__nccl_end_of *end) {
    while (te__atomic_load(&end->inside)) te__sleep(1e-3);
}
static void te__nccl_end_now(void *user) {
    te__nccl_end_of *end = (te__nccl_end_of *)user;
    if (end->peace) {
        te__nccl.CommDestroy(end->comm);
    } else if (te__nccl_blocks()) {
        te__nccl.GroupStart();
        te__nccl.CommAbort(end->comm);
        te__nccl_await_outside(end);
        te__nccl.GroupEnd();
    } else {
        te__nccl_await_outside(end);
        te__nccl.CommAbort(end->comm);
    }
    te__atomic_store(&end->over, 1);
}

/* Ends the communicator, once. NCCL returns only when the graphs that have collectives of it are destroyed, and when
 * the other ranks have ended theirs or are gone. Neither the context's thread, which destroys graphs, nor the watcher,
 * which has other groups to end, may wait for that: a thread of its own does. */
static void te__nccl_end(te__nccl_rank *me, bool peace) {
    te__nccl_end_of *end = me->end;
    bool ends;
    te__mutex_lock(&me->mutex);
    ends = me->comm && !te__atomic_load(&me->ended);
    if (ends) {
        end->comm = me->comm;
        end->peace = peace;
    }
    me->comm = NULL;
    te__atomic_store(&me->ended, 1);
    if (ends && te__thread_start(&me->ender, te__nccl_end_now, end)) {
        me->has_ender = true; /* with the mutex, since te_group_destroy looks at it behind its own call */
        ends = false;
    }
    te__mutex_unlock(&me->mutex);
    if (ends) te__nccl_end_now(end);
}
/* The watcher calls this: the group has failed, and what it is doing must end. */
static void te__nccl_stop(void *user) { te__nccl_end((te__nccl_rank *)user, false); }

/* The host has waited for the device. If the group has failed since, the numbers are not those of its collectives. */
static te_result te__nccl_waited(void *user) {
    te__nccl_rank *me = (te__nccl_rank *)user;
    char why[TE__WHY_TEXT];
    if (me->told || !te__member_failed(me->store, &me->member, why)) return TE_OK;
    return te__nccl_fail(me, TE_ERR_STATE, "waiting for the device", why);
}

static te_result te__nccl_abort(void *user, const char *reason) {
    te__nccl_rank *me = (te__nccl_rank *)user;
    char why[TE__WHY_TEXT], name[TE__WHAT_TEXT];
    snprintf(why, sizeof why, "%s has aborted the group (te_group_abort): %.700s",
             te__store_name(me->store, me->store->rank, name), reason);
    te__member_abort(me->store, &me->member, why);
    return TE_OK;
}
/* This rank's call has failed before it reached NCCL. The others would wait for it, so that the group ends. */
static void te__nccl_refuse(void *user, te_ctx *te, te__collective kind, int peer, te_result code) {
    te__nccl_rank *me = (te__nccl_rank *)user;
    char why[TE__WHY_TEXT], name[TE__WHAT_TEXT];
    (void)code, (void)peer;
    if (!me->store) return;
    snprintf(why, sizeof why, "%s failed in %s: %.700s", te__store_name(me->store, me->store->rank, name),
             te__collective_name(kind),
             te->error_code == TE_OK ? "it was given NULL in place of a tensor" : te_error(te));
    te__member_abort(me->store, &me->member, why);
    me->told = true; /* by its own error */
}

/* NCCL has refused a call. If a rank is gone, the store knows it at about the same time, and says more. */
static te_result te__nccl_failed(te__nccl_rank *me, const char *who, te__nccl_result code) {
    const double until = te__time_now() + 1.0;
    char why[TE__WHY_TEXT], text[TE__WHY_TEXT], name[TE__WHAT_TEXT];
    const char *last = NULL;
    te__mutex_lock(&me->mutex);
    if (me->comm) last = te__nccl.GetLastError(me->comm);
    snprintf(text, sizeof text, "NCCL: %s%s%.700s", te__nccl.GetErrorString(code), last && last[0] ? ": " : "",
             last ? last : "");
    te__mutex_unlock(&me->mutex);
    while (!te__member_failed(me->store, &me->member, why) && te__time_now() < until) te__sleep(0.01);
    if (te__member_failed(me->store, &me->member, why)) return te__nccl_fail(me, TE_ERR_STATE, who, why);
    snprintf(why, sizeof why, "%s failed in %s: %.700s", te__store_name(me->store, me->store->rank, name), who, text);
    te__member_abort(me->store, &me->member, why);
    return te__nccl_fail(me, TE_ERR_DEVICE, who, text);
}

/* ---- time ---- */

/* Drops the events that have passed. The caller holds the mutex. */
static void te__nccl_pass(te__nccl_rank *me) {
    while (me->marks > 0 && me->te->device->event_passed(me->te, me->event[me->first])) {
        me->first = (me->first + 1) % TE__NCCL_MARKS;
        me->marks--;
        me->passed = te__time_now();
    }
}
/* Records an event behind a collective that was queued. When all events are in use, the collective goes unmarked: the
 * watcher then sees the one before it. */
static void te__nccl_mark(te__nccl_rank *me) {
    te_ctx *te = me->te;
    int at = -1;
    if (!te_ctx_is_cuda(te) || te->capture) return;
    te__mutex_lock(&me->mutex);
    te__nccl_pass(me);
    if (me->marks < TE__NCCL_MARKS) at = (me->first + me->marks) % TE__NCCL_MARKS;
    te__mutex_unlock(&me->mutex);
    /* Without the mutex: the driver waits here while its queue is full, and the watcher must be able to end the
     * collective that keeps it full. The watcher takes marks away in front alone, so that the place stays. */
    if (at < 0 || te->device->event_record(te, me->event[at], me->on) != TE_OK) return;
    te__mutex_lock(&me->mutex);
    me->queued[at] = te__time_now();
    me->marks++;
    te__mutex_unlock(&me->mutex);
}
/* The watcher asks: since when has the device been in a collective? */
static double te__nccl_waits(void *user) {
    te__nccl_rank *me = (te__nccl_rank *)user;
    double since = -1.0;
    te__mutex_lock(&me->mutex);
    te__nccl_pass(me);
    if (me->marks > 0) since = me->queued[me->first] > me->passed ? me->queued[me->first] : me->passed;
    te__mutex_unlock(&me->mutex);
    return since;
}

/* A graph's launches are collectives, too. */
static te_result te__nccl_before_launch(te_graph *g, void *owner, void *data) {
    te__nccl_rank *me = (te__nccl_rank *)owner;
    char why[TE__WHY_TEXT];
    (void)g, (void)data;
    if (te__member_begin(me->store, &me->member, "te_graph_launch", true, why)) return TE_OK;
    return te__nccl_fail(me, TE_ERR_STATE, "te_graph_launch", why);
}
static void te__nccl_after_launch(te_graph *g, void *owner, void *data) {
    te__nccl_rank *me = (te__nccl_rank *)owner;
    (void)g, (void)data;
    te__nccl_mark(me);
    te__member_end(me->store, &me->member);
}
static void te__nccl_captured(te_graph *g, void *owner, void *data) { (void)g, (void)owner, (void)data; }
/* The others have launched the graph, or will: they would wait for this rank. */
static void te__nccl_launch_failed(te_graph *g, void *owner, te_result result) {
    te__nccl_rank *me = (te__nccl_rank *)owner;
    if (!te__member_failed(me->store, &me->member, NULL)) te__nccl_refuse(me, g->te, TE__BETWEEN, -1, result);
}
static te_result te__nccl_capture(te__nccl_rank *me) {
    te_graph *g = me->te->capture;
    te__graph_part *part;
    if (!g || te__graph_find_part(g, me)) return TE_OK;
    part = te__graph_add_part(g, me, 0);
    if (!part) return TE_ERR_OUT_OF_MEMORY;
    part->before = te__nccl_before_launch;
    part->after = te__nccl_after_launch;
    part->captured = te__nccl_captured;
    part->failed = te__nccl_launch_failed;
    return TE_OK;
}

/* ---- calling NCCL ---- */

/* The context's thread begins to call NCCL. Returns the communicator, which stays until te__nccl_leave; NULL: it has
 * been ended. */
static te__nccl_comm *te__nccl_enter(te__nccl_rank *me) {
    te__nccl_comm *comm;
    te__mutex_lock(&me->mutex);
    comm = te__atomic_load(&me->ended) ? NULL : me->comm;
    if (comm) te__atomic_store(&me->end->inside, 1);
    te__mutex_unlock(&me->mutex);
    return comm;
}
/* It is through with its calls, whose result is r. Returns the result, which is no success if the communicator has been
 * ended meanwhile. */
static te__nccl_result te__nccl_leave(te__nccl_rank *me, te__nccl_result r) {
    te__atomic_store(&me->end->inside, 0);
    return te__atomic_load(&me->ended) ? TE__NCCL_IN_PROGRESS : r;
}
/* Polls a communicator until NCCL is through with the call that returned r. Returns NCCL's result. Called between
 * te__nccl_enter and te__nccl_leave. Of a communicator that does not block, ncclCommSplit returns ncclSuccess while it
 * is still at work; of each, errors of NCCL's own threads show here alone: so each call is followed by one look. */
static te__nccl_result te__nccl_settle(te__nccl_rank *me, te__nccl_comm *comm, te__nccl_result r) {
    double soon = 0; /* NCCL queues a kernel in 200 us, unless it waits for other ranks */
    if (r == TE__NCCL_SUCCESS) r = TE__NCCL_IN_PROGRESS;
    while (r == TE__NCCL_IN_PROGRESS && !te__atomic_load(&me->ended)) {
        te__nccl_result code = TE__NCCL_SUCCESS;
        r = te__nccl.CommGetAsyncError(comm, &code);
        if (r == TE__NCCL_SUCCESS) r = code;
        if (r != TE__NCCL_IN_PROGRESS) break;
        if (soon == 0) soon = te__time_now() + 200e-6;
        if (te__time_now() < soon) te__thread_yield();
        else te__sleep(20e-6);
    }
    return r;
}

/* Sends and receives blocks of lines. NCCL runs them all at once. */
static te__nccl_result te__nccl_exchange(te__nccl_rank *me, te__nccl_comm *comm, const te__nccl_call *c,
                                         void *stream) {
    te__nccl_result r = te__nccl.GroupStart(), end;
    const char *x = (const char *)c->x;
    char *out = (char *)c->out;
    int i;
    for (i = 0; i < me->size && (r == TE__NCCL_SUCCESS || r == TE__NCCL_IN_PROGRESS); i++) {
        const size_t sends = (size_t)c->send_counts[i] * c->count, receives = (size_t)c->recv_counts[i] * c->count;
        if (sends) r = te__nccl.Send(x, sends, TE__NCCL_U8, i, comm, stream);
        if (receives && (r == TE__NCCL_SUCCESS || r == TE__NCCL_IN_PROGRESS))
            r = te__nccl.Recv(out, receives, TE__NCCL_U8, i, comm, stream);
        x += sends;
        out += receives;
    }
    end = te__nccl.GroupEnd();
    return r == TE__NCCL_SUCCESS || r == TE__NCCL_IN_PROGRESS ? end : r;
}
/* Sends tensors to one rank and receives others from another. NCCL runs them all at once. */
static te__nccl_result te__nccl_pass_on(te__nccl_comm *comm, const te__nccl_call *c, void *stream) {
    te__nccl_result r = te__nccl.GroupStart(), end;
    int i;
    for (i = 0; i < 2 * c->n && (r == TE__NCCL_SUCCESS || r == TE__NCCL_IN_PROGRESS); i++) {
        const te_tensor *x = i % 2 ? c->ins[i / 2] : c->outs[i / 2];
        const size_t bytes = te_tensor_bytes(x);
        if (!bytes) continue;
        r = i % 2 ? te__nccl.Recv(te__data(x), bytes, TE__NCCL_U8, c->from, comm, stream)
                  : te__nccl.Send(te__data(x), bytes, TE__NCCL_U8, c->peer, comm, stream);
    }
    end = te__nccl.GroupEnd();
    return r == TE__NCCL_SUCCESS || r == TE__NCCL_IN_PROGRESS ? end : r;
}

/* Sums tensors over the ranks. NCCL makes one kernel of them. */
static te__nccl_result te__nccl_sum_list(te__nccl_comm *comm, const te__nccl_call *c, void *stream) {
    te__nccl_result r = te__nccl.GroupStart(), end;
    int i;
    for (i = 0; i < c->n && (r == TE__NCCL_SUCCESS || r == TE__NCCL_IN_PROGRESS); i++) {
        void *x = te__data(c->outs[i]);
        const size_t count = (size_t)te__numel(c->outs[i]);
        if (count) r = te__nccl.AllReduce(x, x, count, c->dtype, c->op, comm, stream);
    }
    end = te__nccl.GroupEnd();
    return r == TE__NCCL_SUCCESS || r == TE__NCCL_IN_PROGRESS ? end : r;
}

static te__nccl_result te__nccl_issue(te__nccl_rank *me, te__nccl_comm *comm, const te__nccl_call *c,
                                      void *stream) {
    switch (c->kind) {
    case TE__ALL_REDUCE:
        if (c->n) return te__nccl_sum_list(comm, c, stream);
        return te__nccl.AllReduce(c->x, c->out, c->count, c->dtype, c->op, comm, stream);
    case TE__ALL_GATHER: return te__nccl.AllGather(c->x, c->out, c->count, c->dtype, comm, stream);
    case TE__REDUCE_SCATTER: return te__nccl.ReduceScatter(c->x, c->out, c->count, c->dtype, c->op, comm, stream);
    case TE__BROADCAST: return te__nccl.Broadcast(c->x, c->out, c->count, c->dtype, c->peer, comm, stream);
    case TE__SEND: return te__nccl.Send(c->x, c->count, c->dtype, c->peer, comm, stream);
    case TE__RECV: return te__nccl.Recv(c->out, c->count, c->dtype, c->peer, comm, stream);
    case TE__PASS: return te__nccl_pass_on(comm, c, stream);
    default: return te__nccl_exchange(me, comm, c, stream);
    }
}

/* Queues a collective. `what` describes it, with its sizes; ranks compare it under TE_DEBUG_SYNC=1. */
static te_result te__nccl_run(te__nccl_rank *me, const te__nccl_call *c, const char *what) {
    te_ctx *te = me->te;
    const char *who = te__collective_name(c->kind);
    const bool all = c->kind != TE__SEND && c->kind != TE__RECV; /* of all ranks */
    char why[TE__WHY_TEXT];
    bool entered = false;
    te__nccl_result code;
    te_result r = te__nccl_capture(me);
    if (r != TE_OK) {
        te__nccl_refuse(me, te, c->kind, -1, r);
        return r;
    }
    if (!te__member_begin(me->store, &me->member, what, all, why)) return te__nccl_fail(me, TE_ERR_STATE, who, why);
    if (all && te->debug_sync && !te->capture && !te__store_gather(me->store, &me->member, what, NULL, 0, NULL, why)) {
        te__member_end(me->store, &me->member);
        return te__nccl_fail(me, TE_ERR_STATE, who, why);
    }
    r = te->device->enter ? te->device->enter(te, &entered) : TE_OK;
    if (r == TE_OK && c->count) {
        void *stream = me->on ? me->on->handle : te_ctx_cu_stream(te);
        te__nccl_comm *comm = te__nccl_enter(me);
        code = comm ? te__nccl_leave(me, te__nccl_settle(me, comm, te__nccl_issue(me, comm, c, stream)))
                    : TE__NCCL_IN_PROGRESS;
        if (code != TE__NCCL_SUCCESS) r = te__nccl_failed(me, who, code);
    }
    if (te->device->leave) te->device->leave(entered);
    if (r == TE_OK && c->count) te__nccl_mark(me);
    te__member_end(me->store, &me->member);
    return r;
}
/* "te_all_reduce bf16 [4, 8]" */
static const char *te__nccl_what(te__collective kind, const te_tensor *x, const char *more, char text[TE__WHAT_TEXT]) {
    char shape[TE__SHAPE_TEXT];
    snprintf(text, TE__WHAT_TEXT, "%s %s %.128s%s", te__collective_name(kind), te_dtype_name(x->dtype),
             te__shape_text(x, shape), more);
    return text;
}

/* ---- the group's functions ---- */

/* Sums that need f32 between the ranks (te__sum_widens) are copied on the context's own stream. So those that are
 * queued on another one come in f32 (dist/flight.c). */

static te_result te__nccl_all_reduce(void *user, te_ctx *te, te_tensor *x, te_reduce_op op) {
    te__nccl_rank *me = (te__nccl_rank *)user;
    const bool wide = op == TE_REDUCE_SUM && te__sum_widens(me->size, x);
    char what[TE__WHAT_TEXT];
    te__nccl_call c = TE_ZERO;
    te_tensor *y = x;
    te_result r = TE_OK;
    te__frame_begin(te);
    if (wide) {
        y = te__empty_like(x, TE_F32);
        r = y ? te_tensor_copy(y, x) : te_error_code(te);
        if (r != TE_OK) te__nccl_refuse(me, te, TE__ALL_REDUCE, -1, r);
    }
    if (r == TE_OK) {
        c.kind = TE__ALL_REDUCE;
        c.x = c.out = te__data(y);
        c.count = (size_t)te__numel(y);
        c.dtype = te__nccl_dtype(y->dtype);
        c.op = op == TE_REDUCE_MAX ? TE__NCCL_MAX : TE__NCCL_SUM;
        r = te__nccl_run(me, &c, te__nccl_what(c.kind, x, op == TE_REDUCE_MAX ? " max" : " sum", what));
    }
    if (r == TE_OK && wide) r = te_tensor_copy(x, y);
    te__frame_end(te, NULL, 0);
    return r;
}

static te_result te__nccl_sums(void *user, te_ctx *te, te_tensor *const *x, int n, bool mean) {
    te__nccl_rank *me = (te__nccl_rank *)user;
    char what[TE__WHAT_TEXT];
    te__nccl_call c = TE_ZERO;
    int i;
    (void)te;
    c.kind = TE__ALL_REDUCE;
    c.outs = x;
    c.n = n;
    c.dtype = te__nccl_dtype(x[0]->dtype);
    c.op = mean ? TE__NCCL_AVG : TE__NCCL_SUM;
    for (i = 0; i < n; i++) c.count += (size_t)te__numel(x[i]);
    snprintf(what, sizeof what, "%s %s, %d tensors of %llu elements in all, %s", te__collective_name(c.kind),
             te_dtype_name(x[0]->dtype), n, (unsigned long long)c.count, mean ? "mean" : "sum");
    return te__nccl_run(me, &c, what);
}

static te_result te__nccl_reduce_scatter(void *user, te_ctx *te, const te_tensor *x, te_tensor *out) {
    te__nccl_rank *me = (te__nccl_rank *)user;
    const bool wide = te__sum_widens(me->size, x);
    char what[TE__WHAT_TEXT];
    te__nccl_call c = TE_ZERO;
    const te_tensor *from = x;
    te_tensor *to = out, *y;
    te_result r = TE_OK;
    te__frame_begin(te);
    if (wide) {
        from = y = te__empty_like(x, TE_F32);
        to = y ? te__empty_like(out, TE_F32) : NULL;
        r = to ? te_tensor_copy(y, x) : te_error_code(te);
        if (r != TE_OK) te__nccl_refuse(me, te, TE__REDUCE_SCATTER, -1, r);
    }
    if (r == TE_OK) {
        c.kind = TE__REDUCE_SCATTER;
        c.x = te__data(from);
        c.out = te__data(to);
        c.count = (size_t)te__numel(out);
        c.dtype = te__nccl_dtype(from->dtype);
        c.op = TE__NCCL_SUM;
        r = te__nccl_run(me, &c, te__nccl_what(c.kind, x, "", what));
    }
    if (r == TE_OK && wide) r = te_tensor_copy(out, to);
    te__frame_end(te, NULL, 0);
    return r;
}

static te_result te__nccl_all_gather(void *user, te_ctx *te, const te_tensor *x, te_tensor *out) {
    te__nccl_rank *me = (te__nccl_rank *)user;
    char what[TE__WHAT_TEXT];
    te__nccl_call c = TE_ZERO;
    (void)te;
    c.kind = TE__ALL_GATHER;
    c.x = te__data(x);
    c.out = te__data(out);
    c.count = te_tensor_bytes(x);
    c.dtype = TE__NCCL_U8;
    return te__nccl_run(me, &c, te__nccl_what(c.kind, x, "", what));
}

static te_result te__nccl_broadcast(void *user, te_ctx *te, te_tensor *x, int root) {
    te__nccl_rank *me = (te__nccl_rank *)user;
    char what[TE__WHAT_TEXT], more[32];
    te__nccl_call c = TE_ZERO;
    (void)te;
    c.kind = TE__BROADCAST;
    c.x = c.out = te__data(x);
    c.count = te_tensor_bytes(x);
    c.dtype = TE__NCCL_U8;
    c.peer = root;
    snprintf(more, sizeof more, " from rank %d", root);
    return te__nccl_run(me, &c, te__nccl_what(c.kind, x, more, what));
}

/* In a capture, a barrier is a collective of one byte. Otherwise ranks meet at the store, since NCCL has no barrier
 * that leaves the stream alone. */
static te_result te__nccl_barrier(void *user) {
    te__nccl_rank *me = (te__nccl_rank *)user;
    const char *who = te__collective_name(TE__BARRIER);
    const int64_t one = 1;
    char why[TE__WHY_TEXT];
    te_result r;
    if (me->te->capture) {
        te_tensor *x;
        te__frame_begin(me->te);
        x = te_tensor_zeros(me->te, TE_U8, 1, &one);
        r = x ? te__nccl_all_reduce(me, me->te, x, TE_REDUCE_MAX) : te_error_code(me->te);
        te__frame_end(me->te, NULL, 0);
        return r;
    }
    if (!te__member_begin(me->store, &me->member, who, true, why)) return te__nccl_fail(me, TE_ERR_STATE, who, why);
    r = te__store_gather(me->store, &me->member, who, NULL, 0, NULL, why) ? TE_OK
                                                                          : te__nccl_fail(me, TE_ERR_STATE, who, why);
    te__member_end(me->store, &me->member);
    return r;
}

static te_result te__nccl_all_to_all(void *user, te_ctx *te, const te_tensor *x, const int64_t *send_counts,
                                     te_tensor *out, const int64_t *recv_counts) {
    te__nccl_rank *me = (te__nccl_rank *)user;
    te__nccl_call c = TE_ZERO;
    char what[TE__WHAT_TEXT];
    (void)te;
    c.kind = TE__ALL_TO_ALL;
    c.x = te__data(x);
    c.out = te__data(out);
    c.count = (size_t)te__line_bytes(x);
    c.send_counts = send_counts;
    c.recv_counts = recv_counts;
    /* numbers of lines differ between ranks: the format and the bytes of a line must not */
    snprintf(what, sizeof what, "%s %s, lines of %llu bytes", te__collective_name(c.kind), te_dtype_name(x->dtype),
             (unsigned long long)c.count);
    return te__nccl_run(me, &c, what);
}

static te_result te__nccl_send(void *user, te_ctx *te, const te_tensor *x, int to) {
    te__nccl_rank *me = (te__nccl_rank *)user;
    char what[TE__WHAT_TEXT], more[32];
    te__nccl_call c = TE_ZERO;
    (void)te;
    c.kind = TE__SEND;
    c.x = te__data(x);
    c.count = te_tensor_bytes(x);
    c.dtype = TE__NCCL_U8;
    c.peer = to;
    snprintf(more, sizeof more, " to rank %d", to);
    return te__nccl_run(me, &c, te__nccl_what(c.kind, x, more, what));
}
static te_result te__nccl_recv(void *user, te_ctx *te, te_tensor *x, int from) {
    te__nccl_rank *me = (te__nccl_rank *)user;
    char what[TE__WHAT_TEXT], more[32];
    te__nccl_call c = TE_ZERO;
    (void)te;
    c.kind = TE__RECV;
    c.out = te__data(x);
    c.count = te_tensor_bytes(x);
    c.dtype = TE__NCCL_U8;
    c.peer = from;
    snprintf(more, sizeof more, " from rank %d", from);
    return te__nccl_run(me, &c, te__nccl_what(c.kind, x, more, what));
}

static te_result te__nccl_pass_all(void *user, te_ctx *te, te_tensor *const *out, int to, te_tensor *const *in,
                                   int from, int n) {
    te__nccl_rank *me = (te__nccl_rank *)user;
    char what[TE__WHAT_TEXT], shape[TE__SHAPE_TEXT];
    te__nccl_call c = TE_ZERO;
    int i;
    (void)te;
    c.kind = TE__PASS;
    c.outs = out;
    c.ins = in;
    c.n = n;
    c.peer = to;
    c.from = from;
    for (i = 0; i < n; i++) c.count += te_tensor_bytes(out[i]) + te_tensor_bytes(in[i]);
    /* neighbours are other ranks on each rank: the text leaves them out, since ranks compare it */
    snprintf(what, sizeof what, "%s in a ring, %d tensors, the first %s %.128s", te__collective_name(c.kind), n,
             te_dtype_name(out[0]->dtype), te__shape_text(out[0], shape));
    return te__nccl_run(me, &c, what);
}

/* ---- the end ---- */

/* Breaks the graphs that have collectives of the group, and frees what the device holds of them: NCCL waits for that
 * before it ends a communicator. */
static void te__nccl_leave_graphs(te__nccl_rank *me) {
    te_ctx *te = me->te;
    te_graph *g;
    for (g = te->graphs; g; g = g->next)
        if (te__graph_find_part(g, me)) te->device->graph_close(te, g);
    te__graphs_forget(te, me, "a group of ranks that it uses was destroyed", "te_group_destroy of a group");
}

/* Takes the rank's parts apart, in the order opposite to that in which they were made. The others are told before the
 * communicator ends: NCCL waits then until they have ended theirs, which those that wait for this rank do only now. */
static void te__nccl_close(te__nccl_rank *me) {
    te_ctx *te = me->te;
    bool over = true;
    int i;
    if (me->store) {
        te__waiter **at = &te->waiters;
        const double until = te__time_now() + me->member.timeout;
        bool peace;
        while (*at && *at != &me->waiter) at = &(*at)->next;
        if (*at) *at = me->waiter.next;
        if (!te->capture && !te__member_failed(me->store, &me->member, NULL)) te->device->synchronize(te);
        te__nccl_leave_graphs(me);
        te__store_leave(me->store, &me->member);
        peace = !te->capture && !te__member_failed(me->store, &me->member, NULL);
        te__nccl_end(me, peace);
        while (me->has_ender && !(over = te__atomic_load(&me->end->over) != 0) && te__time_now() < until)
            te__sleep(1e-3);
        te__store_remove(me->store, &me->member);
        if (me->has_ender && over) te__thread_join(&me->ender);
        if (over) free(me->end);
        if (me->born) te__nccl.CommAbort(me->born);
        for (i = 0; i < me->num_events; i++) te->device->event_destroy(te, me->event[i]);
        if (--me->store->refs == 0) te__store_close(me->store, me->store->timeout, NULL);
    }
    if (!over) /* its thread goes on, with memory of its own */
        te__log(te, TE_LOG_WARN,
                "te_group_destroy: group \"%s\", rank %d of %d: NCCL has not ended its communicator within %g seconds",
                me->name, me->rank, me->size, me->member.timeout);
    te__mutex_free(&me->mutex);
    te__free(te, me->ranks);
    te__free(te, me);
}
static void te__nccl_queue_on(void *user, te__stream *s) { ((te__nccl_rank *)user)->on = s; }
static void te__nccl_destroy(void *user) { te__nccl_close((te__nccl_rank *)user); }

#endif
