/* dist/group.c: the public functions of groups of ranks. A collective checks the call, then calls the group's
 * implementation. This file must not depend on modules and recipes. */

typedef enum te__collective {
    TE__ALL_REDUCE,
    TE__ALL_GATHER,
    TE__REDUCE_SCATTER,
    TE__BROADCAST,
    TE__BARRIER,
    TE__ALL_TO_ALL,
    TE__SEND,
    TE__RECV,
    TE__PASS, /* te__pass: te_send and te_recv at once */
    TE__BETWEEN, /* no collective: what a rank does between two of them */
    TE__COLLECTIVE_COUNT
} te__collective;
static const char *te__collective_name(te__collective kind) {
    static const char *const names[TE__COLLECTIVE_COUNT] = {"te_all_reduce", "te_all_gather", "te_reduce_scatter",
                                                            "te_broadcast",  "te_barrier",    "te_all_to_all",
                                                            "te_send",       "te_recv",       "te_send and te_recv",
                                                            "its own work"};
    return names[kind];
}

enum { TE__HAS_RANKS = 1 };
struct te_group {
    te_ctx *te;
    te_group_desc is;
    char *name; /* the memory of is.name */
    /* This rank has failed, and will not take part in the collective, so that the other ranks must fail as well. Waits
     * for nobody. `peer` is a te_send's destination or a te_recv's source: it alone must fail. `refuse` may be NULL. */
    void (*refuse)(void *user, te_ctx *te, te__collective kind, int peer, te_result code);
    te_group *(*split)(te_group *group, int color, int key); /* te_group_split; NULL: the group cannot be split */
    /* Sends out[0] to out[n - 1] to rank `to` and receives in[0] to in[n - 1] from rank `from`, all at once. All ranks
     * of the group make the call. If one refuses it, all fail. NULL: te__pass calls te_send and te_recv. */
    te_result (*pass)(void *user, te_ctx *te, te_tensor *const *out, int to, te_tensor *const *in, int from, int n);
    /* Replaces x[0] to x[n - 1], of one format that needs no f32 between the ranks (te__sum_widens), by their sums over
     * the ranks, all at once. `mean`: divided by the number of ranks, a power of two. NULL: there is no such call. */
    te_result (*sums)(void *user, te_ctx *te, te_tensor *const *x, int n, bool mean);
    /* Makes later collectives queue on `s` in place of the context's own stream; NULL: on that again. queue_on itself
     * may be NULL: the group queues on the context's own stream alone, or on none. */
    void (*queue_on)(void *user, te__stream *s);
    uint64_t told; /* the other ranks know of the error with this number (te->errors), or fail with it; 0: of none */
    te_group_count count[TE__COLLECTIVE_COUNT];
    te__stream *side; /* the stream of dist/flight.c; NULL: not made yet */
    te__closable closable;
};

/* ---- creation ---- */

static void te__group_close(void *owner) { te_group_destroy((te_group *)owner); }

TE_API te_group *te_group_create(te_ctx *te, const te_group_desc *desc) {
    te_group *group;
    const char *missing;
    if (!te || !te__has_desc(te, desc, "te_group_create")) return NULL;
    if (desc->size < 1 || desc->rank < 0 || desc->rank >= desc->size) {
        te__fail(te, TE_ERR_INVALID, "te_group_create: rank %d of %d; ranks count from 0 to size - 1", desc->rank,
                 desc->size);
        return NULL;
    }
    missing = !desc->all_reduce       ? "all_reduce"
              : !desc->all_gather     ? "all_gather"
              : !desc->reduce_scatter ? "reduce_scatter"
              : !desc->broadcast      ? "broadcast"
              : !desc->barrier        ? "barrier"
                                      : NULL;
    if (missing) {
        te__fail(
            te, TE_ERR_INVALID,
            "te_group_create: %s is NULL; all_reduce, all_gather, reduce_scatter, broadcast and barrier must be there",
            missing);
        return NULL;
    }
    group = (te_group *)te__alloc_zero(te, sizeof(te_group));
    if (!group) return NULL;
    group->te = te;
    group->is = *desc;
    group->name = te__copy_string(te, desc->name ? desc->name : "custom");
    group->is.name = group->name;
    if (group->name) {
        if (desc->size > 1) te->shared++;
        te__closable_add(te, &group->closable, "group", te__group_close, group);
        return group;
    }
    te__free(te, group);
    return NULL;
}

TE_API void te_group_destroy(te_group *group) {
    te_ctx *te;
    int i;
    if (!group) return;
    te = group->te;
    for (i = 0; i < TE__MAX_USED; i++) {
        if (te->used[i] == group) te->used[i] = NULL;
        if (te->loose[i] == group) te->loose[i] = NULL;
    }
    te__graphs_forget(te, group, "a group of ranks that it uses was destroyed", "te_group_destroy of a group");
    if (group->is.size > 1) te->shared--;
    te__closable_remove(&group->closable);
    /* in a forked child, the group still belongs to the parent */
    if (group->is.destroy && !te__is_forked(te)) group->is.destroy(group->is.user);
    te__stream_destroy(group->side); /* waits: a collective that does not end has been stopped by now */
    te__free(te, group->name);
    te__free(te, group);
}

static int te__group_rank(const te_group *group) { return group ? group->is.rank : 0; }
static int te__group_size(const te_group *group) { return group ? group->is.size : 1; }
TE_API int te_group_rank(const te_group *group) { return te__group_rank(group); }
TE_API int te_group_size(const te_group *group) { return te__group_size(group); }

TE_API te_group_stats te_group_get_stats(const te_group *group) {
    te_group_stats stats = TE_ZERO;
    if (!group) return stats;
    stats.all_reduce = group->count[TE__ALL_REDUCE];
    stats.all_gather = group->count[TE__ALL_GATHER];
    stats.reduce_scatter = group->count[TE__REDUCE_SCATTER];
    stats.broadcast = group->count[TE__BROADCAST];
    stats.barrier = group->count[TE__BARRIER];
    stats.all_to_all = group->count[TE__ALL_TO_ALL];
    stats.send = group->count[TE__SEND];
    stats.recv = group->count[TE__RECV];
    return stats;
}
TE_API void te_group_reset_stats(te_group *group) {
    if (group) memset(group->count, 0, sizeof(group->count));
}

/* ---- collectives ---- */

/* Checks that x belongs to the group's context and has plain contiguous memory. If x is NULL, fails without
 * setting an error, because the call that returned NULL has set one. */
static te_result te__want_shared(te_group *group, te__collective kind, const char *name, const te_tensor *x) {
    te_ctx *te;
    te_result r;
    if (!x) return TE_ERR_STATE;
    te = group ? group->te : x->te;
    r = te__refuse_fork(te);
    if (r == TE_OK) r = te__want(te, te__collective_name(kind), name, x);
    return r == TE_OK && !x->buffer ? te__no_plain_memory(x, te__collective_name(kind)) : r;
}

/* Checks that `op` exists and can reduce elements of x's dtype. */
static te_result te__want_reducible(te__collective kind, const te_tensor *x, te_reduce_op op) {
    const char *what = te__collective_name(kind);
    bool bytes = x->dtype == TE_U8 || x->dtype == TE_F8E8M0;
    if (op != TE_REDUCE_SUM && op != TE_REDUCE_MAX)
        return te__fail(x->te, TE_ERR_INVALID, "%s: op is %d; TE_REDUCE_SUM and TE_REDUCE_MAX are possible", what,
                        (int)op);
    if (te__is_float(x->dtype) || te__is_index(x->dtype) || (bytes && op == TE_REDUCE_MAX)) return TE_OK;
    return te__fail(x->te, TE_ERR_DTYPE,
                    "%s: x is %s; f32, f16, bf16, i32 and i64 can be reduced, and u8 and e8m0 by TE_REDUCE_MAX", what,
                    te_dtype_name(x->dtype));
}

/* Returns whether a sum of x over `size` processes needs f32 between them. NCCL rounds each addition to the tensor's
 * format; over two ranks there is one, and f32 has digits enough that its sum, rounded, is the sum rounded. */
static bool te__sum_widens(int size, const te_tensor *x) {
    return size > 2 && (x->dtype == TE_F16 || x->dtype == TE_BF16);
}

/* Checks that `whole` has the dtype of `part` and is exactly `size` times as large. */
static te_result te__want_parts(te__collective kind, const char *whole_name, const te_tensor *whole,
                                const char *part_name, const te_tensor *part, int size) {
    const char *what = te__collective_name(kind);
    char a[TE__SHAPE_TEXT], b[TE__SHAPE_TEXT];
    int64_t n = te__numel(part);
    if (whole->dtype != part->dtype)
        return te__fail(part->te, TE_ERR_DTYPE, "%s: %s is %s and %s is %s; they must be of one format", what,
                        whole_name, te_dtype_name(whole->dtype), part_name, te_dtype_name(part->dtype));
    if (n > TE__MAX_ELEMENTS / size || te__numel(whole) != n * size)
        return te__fail(part->te, TE_ERR_SHAPE,
                        "%s: %s is %s and %s is %s; %d ranks need %d times the elements of %s in %s", what, whole_name,
                        te__shape_text(whole, a), part_name, te__shape_text(part, b), size, size, part_name,
                        whole_name);
    if (te_tensor_bytes(whole) != te_tensor_bytes(part) * (size_t)size)
        return te__fail(part->te, TE_ERR_SHAPE,
                        "%s: %s is %s and %s is %s; rows of %s fill whole bytes, so their last sizes must be the same",
                        what, whole_name, te__shape_text(whole, a), part_name, te__shape_text(part, b),
                        te_dtype_name(part->dtype));
    return TE_OK;
}

/* Notes that the other ranks know of this rank's present error. */
static void te__group_is_told(te_group *group) { group->told = group->te->errors; }
/* Called where a call begins that all ranks make together: an error that this rank has from before is told again, since
 * the other ranks may have forgotten it. */
static void te__group_tells_again(te_group *group) {
    if (group && group->te->error_code != TE_OK) group->told = 0;
}
/* Informs the other ranks that this rank cannot make the call, or fails between two calls: once for each error. Returns
 * `code`. */
static te_result te__refuse_peer(te_group *group, te__collective kind, int peer, te_result code) {
    const te_ctx *te = group ? group->te : NULL;
    if (!group || group->is.size == 1 || !group->refuse || te->warming || te__is_forked(te)) return code;
    if (te->error_code != TE_OK && group->told == te->errors) return code;
    group->refuse(group->is.user, group->te, kind, peer, code);
    if (te->error_code != TE_OK && kind != TE__SEND && kind != TE__RECV) te__group_is_told(group);
    return code;
}
static te_result te__refuse(te_group *group, te__collective kind, te_result code) {
    return te__refuse_peer(group, kind, -1, code);
}
/* Returns whether there is nothing to exchange: the group has one rank, or the call is a warm-up. A warm-up exchanges
 * nothing, because ranks warm up at different times. */
static bool te__is_alone(const te_group *group) { return !group || group->is.size == 1 || group->te->warming; }

/* Remembers that a collective of the group is called: data_parallel/tell.c tells its ranks of a failure. */
static void te__group_meets(te_group *group) {
    te_ctx *te = group->te;
    te_group **list = te->module_path[0] ? te->used : te->loose;
    int i;
    for (i = 0; i < TE__MAX_USED && list[i] != group; i++) {}
    if (i < TE__MAX_USED) return;
    memmove(list + 1, list, (TE__MAX_USED - 1) * sizeof(te_group *));
    list[0] = group;
}
/* Checks that a collective, which is about to be called, may be called in the current capture: it must only queue work
 * on the stream. Makes the graph keep the memory of `read` and `written`. */
static te_result te__group_captures(te_group *group, te__collective kind, const te_tensor *read, te_tensor *written) {
    te_ctx *te = group ? group->te : NULL;
    char what[128];
    te_result r = TE_OK;
    if (te__is_alone(group)) return TE_OK;
    te__group_meets(group);
    if (!te->capture) return TE_OK;
    if (group->is.captures) {
        if (read) r = te__capture_hold(te->capture, read->buffer);
        if (written && r == TE_OK) r = te__capture_hold(te->capture, written->buffer);
        return r;
    }
    snprintf(what, sizeof(what), "%s over group \"%.40s\", which does not queue its work on the stream,",
             te__collective_name(kind), group->name);
    return te__refuse_capture(te, what, "call it before te_graph_begin, or between two te_graph_launch");
}

/* Checks that the group has an optional function. `member` is the name of the function's field in te_group_desc. */
static te_result te__group_has(te_group *group, const char *what, const char *member, bool there) {
    if (te__is_alone(group) || there) return TE_OK;
    return te__fail(group->te, TE_ERR_UNSUPPORTED,
                    "%s: group \"%s\" cannot do that: te_group_desc.%s is NULL; give te_group_create a function for it",
                    what, group->name, member);
}

/* Counts a collective in which this rank has sent so many bytes. Sets an error if an implementation has failed without
 * setting one. */
static te_result te__report_collective(te_group *group, te__collective kind, uint64_t bytes, te_result r) {
    if (r == TE_OK) {
        group->count[kind].calls++;
        group->count[kind].bytes += bytes;
        return r;
    }
    if (kind != TE__SEND && kind != TE__RECV) te__group_is_told(group);
    if ((int)r < 0 || (int)r >= TE_RESULT_COUNT)
        return te__fail(group->te, TE_ERR_INVALID,
                        "%s: group \"%s\", rank %d of %d: it returned %d, which is not a te_result",
                        te__collective_name(kind), group->name, group->is.rank, group->is.size, (int)r);
    return te__fail(group->te, r, "%s: group \"%s\", rank %d of %d: it returned %s", te__collective_name(kind),
                    group->name, group->is.rank, group->is.size, te_result_name(r));
}

/* Copies the bytes of x to out, whatever their dtypes. */
static te_result te__copy_bytes(const te_tensor *x, te_tensor *out) {
    te_tensor *from, *to;
    te_result r;
    if (te__data(x) == te__data(out)) return TE_OK;
    te__frame_begin(x->te);
    from = te__alias(x);
    to = te__alias(out);
    if (from && to) {
        from->dtype = to->dtype = TE_U8;
        from->ndim = to->ndim = 1;
        from->shape[0] = to->shape[0] = (int64_t)te_tensor_bytes(x);
        from->stride[0] = to->stride[0] = 1;
    }
    r = from && to ? te_tensor_copy(to, from) : TE_ERR_OUT_OF_MEMORY;
    te__frame_end(x->te, NULL, 0);
    return r;
}

/* A collective whose arguments have been checked, for the group's implementation. */
typedef struct te__group_call {
    te__collective kind;
    te_reduce_op op;
    int peer, from, n;             /* peer: the root, the destination or the source. from: the source of TE__PASS */
    te_tensor *const *x, *const *out; /* [n] */
    const int64_t *send, *recv;    /* [the number of ranks], of TE__ALL_TO_ALL */
    bool all, mean;                /* TE__ALL_REDUCE of all `out` at once: te_group.sums */
} te__group_call;
static te_result te__group_run(te_group *group, const te__group_call *c) {
    const te_group_desc *is = &group->is;
    te_tensor *x = c->x ? c->x[0] : NULL, *out = c->out ? c->out[0] : NULL;
    te_ctx *te = group->te;
    switch (c->kind) {
    case TE__ALL_REDUCE:
        return c->all ? group->sums(is->user, te, c->out, c->n, c->mean) : is->all_reduce(is->user, te, out, c->op);
    case TE__ALL_GATHER: return is->all_gather(is->user, te, x, out);
    case TE__REDUCE_SCATTER: return is->reduce_scatter(is->user, te, x, out);
    case TE__BROADCAST: return is->broadcast(is->user, te, out, c->peer);
    case TE__ALL_TO_ALL: return is->all_to_all(is->user, te, x, c->send, out, c->recv);
    case TE__SEND: return is->send(is->user, te, x, c->peer);
    case TE__RECV: return is->recv(is->user, te, out, c->peer);
    case TE__PASS: return group->pass(is->user, te, c->x, c->peer, c->out, c->from, c->n);
    default: return is->barrier(is->user);
    }
}

/* On the CPU nothing is queued: a capture keeps the call, and each launch makes it. */
typedef struct te__group_kept {
    te_group *group;
    te__group_call call;
} te__group_kept;
static te_result te__group_replay(te_ctx *te, void *args, te_result before) {
    const te__group_kept *kept = (const te__group_kept *)args;
    te_result result;
    (void)te;
    if (before != TE_OK) return te__refuse(kept->group, kept->call.kind, before);
    result = te__group_run(kept->group, &kept->call);
    return result == TE_OK ? result : te__report_collective(kept->group, kept->call.kind, 0, result);
}
/* Copies a list of n tensors into `memory`, as te__call_room does. */
static te_tensor *const *te__group_keep_list(te_tensor *const *list, int n, unsigned char *memory, size_t *used) {
    te_tensor **to = list ? (te_tensor **)te__call_room(memory, used, (size_t)n * sizeof(te_tensor *)) : NULL;
    int i;
    for (i = 0; i < n && list; i++) {
        te_tensor *copy = te__keep_tensor(list[i], memory, used);
        if (!to || !copy) continue;
        /* a program's own collective may call operations, which note their writes */
        copy->buffer->writes = NULL;
        copy->buffer->num_writes = copy->buffer->cap_writes = 0;
        copy->buffer->saved_at = 0;
        copy->buffer->used = NULL;
        to[i] = copy;
    }
    return to;
}
static const int64_t *te__group_keep_counts(const int64_t *counts, int n, unsigned char *memory, size_t *used) {
    int64_t *to = counts ? (int64_t *)te__call_room(memory, used, (size_t)n * sizeof(int64_t)) : NULL;
    return to ? (const int64_t *)memcpy(to, counts, (size_t)n * sizeof(int64_t)) : NULL;
}
/* Copies a call into `memory`; NULL: counts its bytes alone. */
static void te__group_keep(te_group *group, const te__group_call *c, unsigned char *memory, size_t *used) {
    te__group_kept *kept = (te__group_kept *)te__call_room(memory, used, sizeof(te__group_kept)), none;
    if (!kept) kept = &none;
    kept->group = group;
    kept->call = *c;
    kept->call.x = te__group_keep_list(c->x, c->n, memory, used);
    kept->call.out = te__group_keep_list(c->out, c->n, memory, used);
    kept->call.send = te__group_keep_counts(c->send, group->is.size, memory, used);
    kept->call.recv = te__group_keep_counts(c->recv, group->is.size, memory, used);
}
static te_result te__group_no_launch(te_graph *g, void *owner, void *data) {
    (void)g, (void)owner, (void)data;
    return TE_OK;
}
static void te__group_launched(te_graph *g, void *owner, void *data) { (void)g, (void)owner, (void)data; }
/* The launch of this rank may have failed before its first collective, for which the others wait. */
static void te__group_launch_failed(te_graph *g, void *owner, te_result result) {
    (void)g;
    te__refuse((te_group *)owner, TE__BETWEEN, result);
}
static te_result te__group_record(te_group *group, const te__group_call *c) {
    te_ctx *te = group->te;
    te__call *r = te__call_add(te);
    size_t used = 0;
    if (!r) return TE_ERR_OUT_OF_MEMORY;
    if (!te__graph_find_part(te->capture, group)) { /* the graph is broken when the group is destroyed */
        te__graph_part *part = te__graph_add_part(te->capture, group, 0);
        if (!part) return TE_ERR_OUT_OF_MEMORY;
        part->before = te__group_no_launch;
        part->after = part->captured = te__group_launched;
        part->failed = te__group_launch_failed;
    }
    te__group_keep(group, c, NULL, &used);
    r->args_bytes = used;
    r->args = te__alloc(te, used);
    if (!r->args) return TE_ERR_OUT_OF_MEMORY;
    used = 0;
    te__group_keep(group, c, (unsigned char *)r->args, &used);
    r->run = te__group_replay;
    te->capture->num_records++;
    return TE_OK;
}
/* Runs or queues a collective, or makes it a part of the graph. x and out may be NULL. */
static te_result te__group_call_one(te_group *group, te__group_call *c, const te_tensor *x, te_tensor *out) {
    te_tensor *read = (te_tensor *)x;
    if (x) c->x = &read;
    if (out) c->out = &out;
    if (x || out) c->n = 1;
    return group->te->capture && !te_ctx_is_cuda(group->te) ? te__group_record(group, c) : te__group_run(group, c);
}
/* Does te__group_call_one for a collective that has no more arguments than these. */
static te_result te__group_call_kind(te_group *group, te__collective kind, const te_tensor *x, te_tensor *out,
                                     int peer) {
    te__group_call c = TE_ZERO;
    c.kind = kind;
    c.peer = peer;
    return te__group_call_one(group, &c, x, out);
}

TE_API te_result te_all_reduce(te_group *group, te_tensor *x, te_reduce_op op) {
    te__group_call c = TE_ZERO;
    const uint64_t n = (uint64_t)te__group_size(group);
    te_result r = te__want_shared(group, TE__ALL_REDUCE, "x", x);
    if (r == TE_OK) r = te__want_reducible(TE__ALL_REDUCE, x, op);
    if (r == TE_OK) r = te__group_captures(group, TE__ALL_REDUCE, NULL, x);
    if (r != TE_OK) return te__refuse(group, TE__ALL_REDUCE, r);
    if (te__is_alone(group)) return TE_OK;
    c.kind = TE__ALL_REDUCE;
    c.op = op;
    r = te__group_call_one(group, &c, NULL, x);
    te__touch(x);
    return te__report_collective(group, TE__ALL_REDUCE,
                                 (2 * (n - 1) * (uint64_t)te_tensor_bytes(x) + n - 1) / n, r);
}

/* Calls te_group.sums, which is not NULL. All ranks make the call. `result`: an error of this rank from before, which
 * it tells the others. */
static te_result te__sums(te_group *group, te_tensor *const *x, int n, bool mean, te_result result) {
    const uint64_t size = (uint64_t)te__group_size(group);
    te__group_call c = TE_ZERO;
    uint64_t bytes = 0;
    int i;
    for (i = 0; i < n && result == TE_OK; i++) {
        result = te__want_shared(group, TE__ALL_REDUCE, "x", x[i]);
        if (result == TE_OK) result = te__want_reducible(TE__ALL_REDUCE, x[i], TE_REDUCE_SUM);
        if (result == TE_OK) result = te__group_captures(group, TE__ALL_REDUCE, NULL, x[i]);
        if (result == TE_OK) bytes += (uint64_t)te_tensor_bytes(x[i]);
    }
    if (result != TE_OK) return te__refuse(group, TE__ALL_REDUCE, result);
    if (te__is_alone(group)) return TE_OK;
    c.kind = TE__ALL_REDUCE;
    c.out = x;
    c.n = n;
    c.all = true;
    c.mean = mean;
    result = te__group_call_one(group, &c, NULL, NULL);
    for (i = 0; i < n; i++) te__touch(x[i]);
    return te__report_collective(group, TE__ALL_REDUCE, (2 * (size - 1) * bytes + size - 1) / size, result);
}

TE_API te_result te_all_gather(te_group *group, const te_tensor *x, te_tensor *out) {
    te_result r = te__want_shared(group, TE__ALL_GATHER, "x", x);
    if (r == TE_OK) r = te__want_shared(group, TE__ALL_GATHER, "out", out);
    if (r == TE_OK) r = te__want_parts(TE__ALL_GATHER, "out", out, "x", x, te_group_size(group));
    if (r == TE_OK) r = te__group_captures(group, TE__ALL_GATHER, x, out);
    if (r != TE_OK) return te__refuse(group, TE__ALL_GATHER, r);
    if (te__is_alone(group)) return te_group_size(group) == 1 ? te__copy_bytes(x, out) : TE_OK;
    r = te__group_call_kind(group, TE__ALL_GATHER, x, out, -1);
    te__touch(out);
    return te__report_collective(group, TE__ALL_GATHER,
                                 (uint64_t)(group->is.size - 1) * (uint64_t)te_tensor_bytes(x), r);
}

TE_API te_result te_reduce_scatter(te_group *group, const te_tensor *x, te_tensor *out) {
    te_result r = te__want_shared(group, TE__REDUCE_SCATTER, "x", x);
    if (r == TE_OK) r = te__want_shared(group, TE__REDUCE_SCATTER, "out", out);
    if (r == TE_OK) r = te__want_reducible(TE__REDUCE_SCATTER, x, TE_REDUCE_SUM);
    if (r == TE_OK) r = te__want_parts(TE__REDUCE_SCATTER, "x", x, "out", out, te_group_size(group));
    if (r == TE_OK) r = te__group_captures(group, TE__REDUCE_SCATTER, x, out);
    if (r != TE_OK) return te__refuse(group, TE__REDUCE_SCATTER, r);
    if (te__is_alone(group)) return te_group_size(group) == 1 ? te__copy_bytes(x, out) : TE_OK;
    r = te__group_call_kind(group, TE__REDUCE_SCATTER, x, out, -1);
    te__touch(out);
    return te__report_collective(group, TE__REDUCE_SCATTER,
                                 (uint64_t)(group->is.size - 1) * (uint64_t)te_tensor_bytes(out), r);
}

TE_API te_result te_broadcast(te_group *group, te_tensor *x, int root) {
    te_result r = te__want_shared(group, TE__BROADCAST, "x", x);
    if (r == TE_OK && (root < 0 || root >= te_group_size(group)))
        r = te__fail(x->te, TE_ERR_INVALID, "te_broadcast: root is %d; the ranks are 0 to %d", root,
                     te_group_size(group) - 1);
    if (r == TE_OK) r = te__group_captures(group, TE__BROADCAST, NULL, x);
    if (r != TE_OK) return te__refuse(group, TE__BROADCAST, r);
    if (te__is_alone(group)) return TE_OK;
    r = te__group_call_kind(group, TE__BROADCAST, NULL, x, root);
    te__touch(x);
    return te__report_collective(group, TE__BROADCAST, group->is.rank == root ? te_tensor_bytes(x) : 0, r);
}

TE_API te_result te_barrier(te_group *group) {
    te_result r = group ? te__refuse_fork(group->te) : TE_OK;
    if (te__is_alone(group) || r != TE_OK) return r;
    r = te__group_captures(group, TE__BARRIER, NULL, NULL);
    if (r != TE_OK) return te__refuse(group, TE__BARRIER, r);
    return te__report_collective(group, TE__BARRIER, 0, te__group_call_kind(group, TE__BARRIER, NULL, NULL, -1));
}

/* ---- all to all ---- */

/* Returns the number of elements of a line of x. A line is the slice x[i] at one index i of the first dimension. */
static int64_t te__line_numel(const te_tensor *x) {
    int64_t n = 1;
    int i;
    for (i = 1; i < x->ndim; i++) n *= x->shape[i];
    return n;
}
static int64_t te__line_bytes(const te_tensor *x) {
    return (int64_t)te__shape_bytes(x->dtype, x->ndim - 1, x->shape + 1);
}

/* Sets full[i] to the number of lines of x that are exchanged with rank i. The number is counts[i], or the same for
 * all ranks if `counts` is NULL. Checks that the sum of these numbers is the number of lines of x. */
static te_result te__want_lines(const char *name, const te_tensor *x, const char *counts_name, const int64_t *counts,
                                int size, int64_t *full) {
    const char *what = te__collective_name(TE__ALL_TO_ALL);
    char text[TE__SHAPE_TEXT];
    int64_t sum = 0, lines = x->ndim ? x->shape[0] : 0;
    int i;
    te__shape_text(x, text);
    if (x->ndim == 0 || (x->ndim == 1 && te_dtype_bits(x->dtype) < 8))
        return te__fail(x->te, TE_ERR_SHAPE,
                        "%s: %s is %s %s; lines along the first dimension are exchanged, each of whole bytes: view it "
                        "as [lines, n]",
                        what, name, te_dtype_name(x->dtype), text);
    if (!counts && lines % size != 0)
        return te__fail(x->te, TE_ERR_SHAPE,
                        "%s: %s is %s; without %s its first size must be a multiple of the %d ranks", what, name, text,
                        counts_name, size);
    for (i = 0; i < size; i++) {
        full[i] = counts ? counts[i] : lines / size;
        if (full[i] < 0 || full[i] > lines - sum) break;
        sum += full[i];
    }
    if (i < size)
        return te__fail(x->te, TE_ERR_SHAPE,
                        "%s: %s[%d] is %lld, after a sum of %lld before it; %s is %s, so %lld line%s are left", what,
                        counts_name, i, (long long)full[i], (long long)sum, name, text, (long long)(lines - sum),
                        lines - sum == 1 ? "" : "s");
    if (sum == lines) return TE_OK;
    return te__fail(x->te, TE_ERR_SHAPE,
                    "%s: the sum of %s is %lld and %s is %s; the counts must add up to its first size, %lld", what,
                    counts_name, (long long)sum, name, text, (long long)lines);
}

/* Checks that x and out have one dtype, have lines (te__line_numel) of one size, and share no memory. */
static te_result te__want_exchange(const te_tensor *x, const te_tensor *out) {
    const char *what = te__collective_name(TE__ALL_TO_ALL);
    char a[TE__SHAPE_TEXT], b[TE__SHAPE_TEXT];
    bool lines = x->ndim == out->ndim;
    int i;
    for (i = 1; i < x->ndim && lines; i++) lines = x->shape[i] == out->shape[i];
    if (x->dtype != out->dtype)
        return te__fail(x->te, TE_ERR_DTYPE, "%s: x is %s and out is %s; they must be of one format", what,
                        te_dtype_name(x->dtype), te_dtype_name(out->dtype));
    if (!lines)
        return te__fail(x->te, TE_ERR_SHAPE, "%s: x is %s and out is %s; they may differ in the first size alone", what,
                        te__shape_text(x, a), te__shape_text(out, b));
    if (x->buffer == out->buffer && x->offset < te__end(out) && out->offset < te__end(x))
        return te__fail(x->te, TE_ERR_INVALID, "%s: x %s and out %s share memory; out must be a tensor of its own",
                        what, te__shape_text(x, a), te__shape_text(out, b));
    return TE_OK;
}

static te_result te__all_to_all(te_group *group, const te_tensor *x, const int64_t *send_counts, te_tensor *out,
                                const int64_t *recv_counts, int64_t *full) {
    int size = te_group_size(group);
    te__group_call c = TE_ZERO;
    te_result r = te__want_lines("x", x, "send_counts", send_counts, size, full);
    if (r == TE_OK) r = te__want_lines("out", out, "recv_counts", recv_counts, size, full + size);
    if (r == TE_OK && size == 1 && full[0] != full[1])
        r = te__fail(x->te, TE_ERR_SHAPE, "te_all_to_all: this rank is alone, sends %lld lines and receives %lld",
                     (long long)full[0], (long long)full[1]);
    if (r == TE_OK) r = te__group_captures(group, TE__ALL_TO_ALL, x, out);
    if (r != TE_OK) return te__refuse(group, TE__ALL_TO_ALL, r);
    if (te__is_alone(group)) return size == 1 ? te__copy_bytes(x, out) : TE_OK;
    c.kind = TE__ALL_TO_ALL;
    c.send = full;
    c.recv = full + size;
    r = te__group_call_one(group, &c, x, out);
    te__touch(out);
    return te__report_collective(
        group, TE__ALL_TO_ALL,
        te_tensor_bytes(x) - (uint64_t)full[group->is.rank] * (uint64_t)te__line_bytes(x), r);
}

TE_API te_result te_all_to_all(te_group *group, const te_tensor *x, const int64_t *send_counts, te_tensor *out,
                               const int64_t *recv_counts) {
    size_t bytes = 2 * (size_t)te_group_size(group) * sizeof(int64_t);
    te_result r = te__want_shared(group, TE__ALL_TO_ALL, "x", x);
    int64_t *full = NULL;
    if (r == TE_OK) r = te__want_shared(group, TE__ALL_TO_ALL, "out", out);
    if (r == TE_OK) r = te__want_exchange(x, out);
    if (r == TE_OK) r = te__group_has(group, "te_all_to_all", "all_to_all", group && group->is.all_to_all);
    if (r == TE_OK) full = (int64_t *)te__alloc(x->te, bytes);
    if (r == TE_OK && !full) r = TE_ERR_OUT_OF_MEMORY;
    if (r != TE_OK) return te__refuse(group, TE__ALL_TO_ALL, r);
    r = te__all_to_all(group, x, send_counts, out, recv_counts, full);
    te__free(x->te, full);
    return r;
}

/* ---- from one rank to another ---- */

static te_result te__want_peer(te_group *group, te__collective kind, const te_tensor *x, const char *name, int peer) {
    int rank = te_group_rank(group), size = te_group_size(group);
    te_result r = te__want_shared(group, kind, "x", x);
    if (r == TE_OK && (peer < 0 || peer >= size || peer == rank))
        r = te__fail(x->te, TE_ERR_INVALID, "%s: %s is %d; it names another rank than this one, %d of %d",
                     te__collective_name(kind), name, peer, rank, size);
    return r;
}

TE_API te_result te_send(te_group *group, const te_tensor *x, int to) {
    te_result r = te__want_peer(group, TE__SEND, x, "to", to);
    if (r == TE_OK) r = te__group_has(group, "te_send", "send", group->is.send != NULL);
    if (r == TE_OK) r = te__group_captures(group, TE__SEND, x, NULL);
    if (r != TE_OK) return te__refuse_peer(group, TE__SEND, to, r);
    return te__is_alone(group)
               ? TE_OK
               : te__report_collective(group, TE__SEND, te_tensor_bytes(x),
                                       te__group_call_kind(group, TE__SEND, x, NULL, to));
}

TE_API te_result te_recv(te_group *group, te_tensor *x, int from) {
    te_result r = te__want_peer(group, TE__RECV, x, "from", from);
    if (r == TE_OK) r = te__group_has(group, "te_recv", "recv", group->is.recv != NULL);
    if (r == TE_OK) r = te__group_captures(group, TE__RECV, NULL, x);
    if (r != TE_OK) return te__refuse_peer(group, TE__RECV, from, r);
    if (te__is_alone(group)) return TE_OK;
    r = te__group_call_kind(group, TE__RECV, NULL, x, from);
    te__touch(x);
    return te__report_collective(group, TE__RECV, 0, r);
}

/* te__pass by te_send and te_recv. A te_send may wait for its te_recv, so odd ranks receive first. */
static te_result te__pass_in_turns(te_group *group, te_tensor *const *out, int to, te_tensor *const *in, int from,
                                   int n, te_result result) {
    int turn, i;
    for (turn = 0; turn < 2; turn++)
        for (i = 0; i < n; i++) {
            if (turn == group->is.rank % 2) {
                if (result == TE_OK) result = te_send(group, out[i], to);
                else te__refuse_peer(group, TE__SEND, to, result);
            } else if (result == TE_OK)
                result = te_recv(group, in[i], from);
            else
                te__refuse_peer(group, TE__RECV, from, result);
        }
    return result;
}
static te_result te__pass_at_once(te_group *group, te_tensor *const *out, int to, te_tensor *const *in, int from,
                                  int n, te_result result) {
    te__group_call c = TE_ZERO;
    uint64_t bytes = 0;
    int i;
    for (i = 0; i < n && result == TE_OK; i++) {
        result = te__want_shared(group, TE__PASS, "x", out[i]);
        if (result == TE_OK) result = te__want_shared(group, TE__PASS, "x", in[i]);
        if (result == TE_OK) result = te__group_captures(group, TE__PASS, out[i], in[i]);
        if (result == TE_OK) bytes += (uint64_t)te_tensor_bytes(out[i]);
    }
    if (result != TE_OK) return te__refuse(group, TE__PASS, result);
    if (te__is_alone(group)) return TE_OK;
    c.kind = TE__PASS;
    c.x = out;
    c.out = in;
    c.peer = to;
    c.from = from;
    c.n = n;
    result = te__group_call_one(group, &c, NULL, NULL);
    for (i = 0; i < n; i++) te__touch(in[i]);
    result = te__report_collective(group, TE__PASS, bytes, result);
    if (result == TE_OK) { /* to the program these are calls of te_send and te_recv */
        group->count[TE__SEND].calls += (uint64_t)n;
        group->count[TE__SEND].bytes += bytes;
        group->count[TE__RECV].calls += (uint64_t)n;
    }
    return result;
}
/* Sends n tensors to rank `to` and receives as many from rank `from`. All ranks make the call. `result`: an error of
 * this rank from before, which it tells the others. */
static te_result te__pass(te_group *group, te_tensor *const *out, int to, te_tensor *const *in, int from, int n,
                          te_result result) {
    int i;
    for (i = 0; i < n && result == TE_OK; i++)
        if (!out[i] || !in[i]) result = te_error_code(group->te);
    return (group->pass ? te__pass_at_once : te__pass_in_turns)(group, out, to, in, from, n, result);
}

/* ---- comparing ---- */

/* Ranks that call different operations compute wrong numbers or wait forever. So the ranks compare texts about what
 * each will do next: in the first call of a module, or in every call if TE_DEBUG_SYNC=1 on all ranks.
 * A rank's message is a checksum of its text, then TE__COMPARED_TEXT bytes: the module path and the start of the
 * text. */
enum { TE__COMPARED_TEXT = 504, TE__COMPARED_BYTES = TE__COMPARED_TEXT + 8 };

/* Returns whether the ranks compare their texts now. `met`: they have compared before. Ranks do not compare in a
 * capture, because nothing is computed. */
static bool te__group_compares(const te_group *group, bool met) {
    return !te__is_alone(group) && !group->te->capture && (!met || group->te->debug_sync);
}

/* Gathers the messages of all ranks in host memory. A message is a checksum, then a text. */
static te_result te__group_texts(te_group *group, const unsigned char own[TE__COMPARED_BYTES], unsigned char *all) {
    te_ctx *te = group->te;
    int64_t bytes = TE__COMPARED_BYTES;
    te_tensor *x, *out;
    te_result result;
    te__frame_begin(te);
    /* An error of an earlier kernel must appear before the exchange, so that all ranks fail. If it appeared later, only
     * this rank would fail. */
    result = te->device->synchronize(te);
    x = result == TE_OK ? te_tensor_from_host(te, TE_U8, 1, &bytes, own) : NULL;
    bytes *= group->is.size;
    out = x ? te_tensor_empty(te, TE_U8, 1, &bytes) : NULL;
    result = out ? te_all_gather(group, x, out) : te__refuse(group, TE__ALL_GATHER, te_error_code(te));
    if (result == TE_OK) result = te_tensor_to_host(out, all);
    te__frame_end(te, NULL, 0);
    return result;
}

/* Checks that all ranks are about to do `what`; else fails with TE_ERR_STATE. A rank that gives "" agrees with all. If
 * one rank fails, here or already in `result`, all ranks fail: no rank may go on alone. */
static te_result te__group_compare(te_group *group, const char *what, te_result result) {
    te_ctx *te = group->te;
    unsigned char own[TE__COMPARED_BYTES], *all;
    const size_t bytes = (size_t)group->is.size * TE__COMPARED_BYTES;
    const uint64_t sum = what && what[0] ? te__hash64(what, strlen(what), 0) : 0;
    int r, first = 0; /* first: the rank that others are compared with */
    if (result != TE_OK) return te__refuse(group, TE__ALL_GATHER, result);
    all = (unsigned char *)te__alloc(te, bytes);
    if (!all) return te__refuse(group, TE__ALL_GATHER, TE_ERR_OUT_OF_MEMORY);
    memset(own, 0, sizeof(own));
    memcpy(own, &sum, 8);
    snprintf((char *)own + 8, TE__COMPARED_TEXT, "%s%s%s", te->module_path, te->module_path[0] ? ": " : "", what);
    result = te__group_texts(group, own, all);
    for (r = 1; r < group->is.size && result == TE_OK; r++) {
        unsigned char *one = all + (size_t)first * TE__COMPARED_BYTES, *other = all + (size_t)r * TE__COMPARED_BYTES;
        uint64_t sums[2];
        memcpy(&sums[0], one, 8);
        memcpy(&sums[1], other, 8);
        if (!sums[0]) first = r;
        if (!sums[0] || !sums[1] || sums[0] == sums[1]) continue;
        one[TE__COMPARED_BYTES - 1] = other[TE__COMPARED_BYTES - 1] = 0; /* the texts come from other ranks and may lack
                                                                          * a 0 */
        result = te__fail(te, TE_ERR_STATE,
                          "group \"%.40s\": its ranks are about to do different things. Rank %d: %s. Rank %d: %s. Give "
                          "all ranks the same modules, options and shapes, in the same order",
                          group->name, first, (const char *)one + 8, r, (const char *)other + 8);
    }
    te__free(te, all);
    return result;
}

/* ---- aborting ---- */

/* Sets an error only if the group has no abort function. Otherwise does not write to the context, because another
 * thread may be inside a collective of this group. */
TE_API te_result te_group_abort(te_group *group, const char *reason) {
    if (!group || group->is.size == 1) return TE_OK;
    if (te__is_forked(group->te)) return TE_ERR_STATE;
    if (group->is.abort) return group->is.abort(group->is.user, reason ? reason : "no reason was given");
    return te__group_has(group, "te_group_abort", "abort", false);
}

/* ---- splitting ---- */

/* Lists the ranks of `color` in the order of their new numbers: by key, and by rank where keys are equal. `pairs` has
 * color and key of each rank. Returns how many there are. */
static inline int te__split_order(const int64_t *pairs, int size, int color, int *order) {
    int count = 0, i, at;
    for (i = 0; i < size; i++) {
        if (pairs[2 * i] != color) continue;
        for (at = count++; at > 0 && pairs[2 * order[at - 1] + 1] > pairs[2 * i + 1]; at--) order[at] = order[at - 1];
        order[at] = i;
    }
    return count;
}

TE_API te_group *te_group_split(te_group *group, int color, int key) {
    te_ctx *te = group ? group->te : NULL;
    if (!group || te__refuse_fork(te) != TE_OK) return NULL;
    if (te->capture) {
        te__refuse_capture(te, "te_group_split", "split the group before te_graph_begin");
        return NULL;
    }
    if (group->split) return group->split(group, color, key);
    te__fail(
        te, TE_ERR_UNSUPPORTED,
        "te_group_split: group \"%s\" cannot be split; groups of threads (te_thread_group_create) and of processes "
        "(te_nccl_group_create) can",
        group->name);
    return NULL;
}

/* ---- for other folders (dist/none.c has these functions if TE_NO_DIST is defined) ---- */

static te_result te__all_reduce(te_group *group, te_tensor *x, te_reduce_op op) { return te_all_reduce(group, x, op); }
static te_result te__all_gather(te_group *group, const te_tensor *x, te_tensor *out) {
    return te_all_gather(group, x, out);
}
static te_result te__reduce_scatter(te_group *group, const te_tensor *x, te_tensor *out) {
    return te_reduce_scatter(group, x, out);
}
static te_result te__barrier(te_group *group) { return te_barrier(group); }
static te_result te__lines_exchanged(te_group *group, const te_tensor *x, const int64_t *send_counts, te_tensor *out,
                                     const int64_t *recv_counts) {
    return te_all_to_all(group, x, send_counts, out, recv_counts);
}
static te_result te__ranks_allowed(te_ctx *te, int ranks, const char *who, const char *what) {
    (void)te, (void)ranks, (void)who, (void)what;
    return TE_OK;
}
/* Checks that `group` (may be NULL) belongs to this context. The error message names the option `what` and the function
 * `who`. */
static te_result te__group_allowed(te_ctx *te, const te_group *group, const char *who, const char *what) {
    if (!group || group->te == te) return TE_OK;
    return te__fail(te, TE_ERR_INVALID,
                    "%s: %s is of another context (%s) than this (%s); each rank takes the group that it joined", who,
                    what, group->te->device_name, te->device_name);
}
