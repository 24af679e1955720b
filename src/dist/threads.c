/* dist/threads.c: the group whose ranks are threads of this process. The group computes in host memory, in the order
 * of the ranks. This file must not depend on modules and recipes. */

/* ---- a rank of the thread group ---- */

typedef struct te__thread_rank {
    te_thread_hub *hub;
    te_ctx *te;
    te_group *group; /* which has this rank */
    int rank;
} te__thread_rank;

/* Returns this rank's post, cleared for a call without a tensor. */
static te__post *te__post_open(te__thread_rank *me, te__collective kind) {
    te__post *post = &me->hub->post[me->rank];
    post->kind = kind;
    post->dtype = TE_DTYPE_NONE;
    post->numel = 0;
    post->bytes = 0;
    post->op = TE_REDUCE_SUM;
    post->root = 0;
    post->line = post->line_bytes = 0;
    post->shape[0] = 0;
    post->data = NULL;
    post->result = TE_OK;
    return post;
}
static te__post *te__post_tensor(te__thread_rank *me, te__collective kind, const te_tensor *x) {
    te__post *post = te__post_open(me, kind);
    post->dtype = x->dtype;
    post->numel = te__numel(x);
    post->bytes = te_tensor_bytes(x);
    te__shape_text(x, post->shape);
    return post;
}
/* Returns the error text for the other ranks: the first error of this rank's context. */
static const char *te__rank_why(const te__thread_rank *me) {
    return te_ok(me->te) ? "it was given NULL in place of a tensor" : te_error(me->te);
}
static void te__post_fail(te__thread_rank *me, te__post *post, te_result code) {
    if (post->result != TE_OK || code == TE_OK) return;
    snprintf(post->why, sizeof(post->why), "%s", te__rank_why(me));
    post->result = code;
}
/* Copies x to host memory, where the other ranks can read it. */
static void te__post_data(te__thread_rank *me, te__post *post, const te_tensor *x) {
    post->data = (char *)te__alloc(me->te, post->bytes);
    te__post_fail(me, post, post->data ? te_tensor_to_host(x, post->data) : TE_ERR_OUT_OF_MEMORY);
}
static void te__post_upload(te__thread_rank *me, te__post *post, te_tensor *x, int64_t at, const char *from,
                            size_t bytes) {
    if (post->result == TE_OK && bytes)
        te__post_fail(me, post, me->te->device->upload(me->te, (char *)te__data(x) + at, from, bytes));
}

static te_result te__rank_fail(te__thread_rank *me, te__collective kind, te_result r, const char *text) {
    if (me->hub->wait[me->rank].told) te__group_is_told(me->group);
    return te__fail(me->te, r, "%s: group \"threads\", rank %d of %d: %s", te__collective_name(kind), me->rank,
                    me->hub->size, text);
}
/* Waits for all ranks at the start of a collective. Then the contribution (te__post) of every rank is complete, or all
 * ranks fail. */
static te_result te__rank_begin(te__thread_rank *me, te__collective kind) {
    char text[TE__WHY_TEXT];
    te_result r = te__hub_meet(me->hub, me->rank, true, text);
    return r == TE_OK ? r : te__rank_fail(me, kind, r, text);
}
/* Waits for all ranks, within a collective or at its end. Until this function returns, a rank must not change data that
 * other ranks read. If one rank has failed, all ranks fail. */
static te_result te__rank_meet(te__thread_rank *me, te__collective kind) {
    char text[TE__WHY_TEXT];
    te_result r = te__hub_meet(me->hub, me->rank, false, text);
    return r == TE_OK ? r : te__rank_fail(me, kind, r, text);
}
static te_result te__rank_end(te__thread_rank *me, te__post *post, te_result r) {
    te__free(me->te, post->data);
    post->data = NULL;
    return r;
}

/* ---- arithmetic: rank 0 first, then rank 1 ... ---- */

enum { TE__REDUCE_RUN = 256 }; /* the number of elements reduced at a time; they fit into the first-level cache */

static void te__reduce_floats(const te_thread_hub *hub, te_dtype dtype, te_reduce_op op, int64_t at, int n, char *out) {
    float sum[TE__REDUCE_RUN], x[TE__REDUCE_RUN];
    int rank, i;
    te__load_row(hub->post[0].data, dtype, at, n, sum);
    for (rank = 1; rank < hub->size; rank++) {
        te__load_row(hub->post[rank].data, dtype, at, n, x);
        for (i = 0; i < n; i++) {
            if (op == TE_REDUCE_SUM) sum[i] += x[i];
            else if (te__is_nan_bits(sum[i]) || x[i] > sum[i]) sum[i] = x[i];
        }
    }
    te__one_nan(sum, n);
    te__store_row(out, dtype, at, n, sum);
}

static int64_t te__load_int(const char *data, te_dtype dtype, int64_t i) {
    if (dtype == TE_I64) return ((const int64_t *)(const void *)data)[i];
    if (dtype == TE_I32) return ((const int32_t *)(const void *)data)[i];
    return ((const uint8_t *)data)[i];
}
static void te__reduce_ints(const te_thread_hub *hub, te_dtype dtype, te_reduce_op op, int64_t at, int n, char *out) {
    int rank, i;
    for (i = 0; i < n; i++) {
        int64_t value = te__load_int(hub->post[0].data, dtype, at + i);
        for (rank = 1; rank < hub->size; rank++) {
            int64_t x = te__load_int(hub->post[rank].data, dtype, at + i);
            /* unsigned, so that sums wrap around */
            value = op == TE_REDUCE_MAX ? te__max(value, x) : (int64_t)((uint64_t)value + (uint64_t)x);
        }
        if (dtype == TE_I64) ((int64_t *)(void *)out)[at + i] = value;
        else if (dtype == TE_I32) ((int32_t *)(void *)out)[at + i] = (int32_t)(uint32_t)(uint64_t)value;
        else ((uint8_t *)out)[at + i] = (uint8_t)value;
    }
}

/* Reduces the elements `begin` to `end` - 1 of te__post.data over all ranks. Writes the result to post->data of this
 * rank. No two ranks work on the same elements. */
static void te__reduce_range(te__thread_rank *me, te__post *post, int64_t begin, int64_t end) {
    te__floats floats = te__floats_begin();
    int64_t at;
    for (at = begin; at < end; at += TE__REDUCE_RUN) {
        int n = (int)te__min(end - at, TE__REDUCE_RUN);
        if (te__is_float(post->dtype)) te__reduce_floats(me->hub, post->dtype, post->op, at, n, post->data);
        else te__reduce_ints(me->hub, post->dtype, post->op, at, n, post->data);
    }
    te__floats_end(&floats);
}

/* ---- the group's functions ---- */

static te_result te__threads_all_reduce(void *user, te_ctx *te, te_tensor *x, te_reduce_op op) {
    te__thread_rank *me = (te__thread_rank *)user;
    te__post *post = te__post_tensor(me, TE__ALL_REDUCE, x);
    int64_t piece = te__div_up(post->numel, me->hub->size), size = te__dtype_size(post->dtype);
    te_result r;
    int rank;
    (void)te;
    post->op = op;
    te__post_data(me, post, x);
    r = te__rank_begin(me, TE__ALL_REDUCE);
    if (r != TE_OK) return te__rank_end(me, post, r);
    te__reduce_range(me, post, te__min(piece * me->rank, post->numel), te__min(piece * me->rank + piece, post->numel));
    te__rank_meet(me, TE__ALL_REDUCE);
    for (rank = 0; rank < me->hub->size; rank++) {
        int64_t begin = te__min(piece * rank, post->numel), end = te__min(begin + piece, post->numel);
        te__post_upload(me, post, x, begin * size, me->hub->post[rank].data + begin * size,
                        (size_t)((end - begin) * size));
    }
    return te__rank_end(me, post, te__rank_meet(me, TE__ALL_REDUCE));
}

static te_result te__threads_all_gather(void *user, te_ctx *te, const te_tensor *x, te_tensor *out) {
    te__thread_rank *me = (te__thread_rank *)user;
    te__post *post = te__post_tensor(me, TE__ALL_GATHER, x);
    te_result r;
    int rank;
    (void)te;
    te__post_data(me, post, x);
    r = te__rank_begin(me, TE__ALL_GATHER);
    if (r != TE_OK) return te__rank_end(me, post, r);
    for (rank = 0; rank < me->hub->size; rank++)
        te__post_upload(me, post, out, (int64_t)post->bytes * rank, me->hub->post[rank].data, post->bytes);
    return te__rank_end(me, post, te__rank_meet(me, TE__ALL_GATHER));
}

static te_result te__threads_reduce_scatter(void *user, te_ctx *te, const te_tensor *x, te_tensor *out) {
    te__thread_rank *me = (te__thread_rank *)user;
    te__post *post = te__post_tensor(me, TE__REDUCE_SCATTER, x);
    int64_t piece = te__numel(out), size = te__dtype_size(post->dtype);
    te_result r;
    (void)te;
    te__post_data(me, post, x);
    r = te__rank_begin(me, TE__REDUCE_SCATTER);
    if (r != TE_OK) return te__rank_end(me, post, r);
    te__reduce_range(me, post, piece * me->rank, piece * me->rank + piece);
    te__post_upload(me, post, out, 0, post->data + piece * me->rank * size, (size_t)(piece * size));
    return te__rank_end(me, post, te__rank_meet(me, TE__REDUCE_SCATTER));
}

static te_result te__threads_broadcast(void *user, te_ctx *te, te_tensor *x, int root) {
    te__thread_rank *me = (te__thread_rank *)user;
    te__post *post = te__post_tensor(me, TE__BROADCAST, x);
    te_result r;
    (void)te;
    post->root = root;
    if (me->rank == root) te__post_data(me, post, x);
    r = te__rank_begin(me, TE__BROADCAST);
    if (r != TE_OK) return te__rank_end(me, post, r);
    if (me->rank != root) te__post_upload(me, post, x, 0, me->hub->post[root].data, post->bytes);
    return te__rank_end(me, post, te__rank_meet(me, TE__BROADCAST));
}

static te_result te__threads_barrier(void *user) {
    te__thread_rank *me = (te__thread_rank *)user;
    te__post_open(me, TE__BARRIER);
    return te__rank_begin(me, TE__BARRIER);
}

static te_result te__threads_all_to_all(void *user, te_ctx *te, const te_tensor *x, const int64_t *send_counts,
                                        te_tensor *out, const int64_t *recv_counts) {
    te__thread_rank *me = (te__thread_rank *)user;
    te__post *post = te__post_tensor(me, TE__ALL_TO_ALL, x);
    int64_t at = 0;
    te_result r;
    int from, to;
    (void)te;
    post->line = te__line_numel(x);
    post->line_bytes = te__line_bytes(x);
    post->send_counts = send_counts;
    post->recv_counts = recv_counts;
    te__post_data(me, post, x);
    r = te__rank_begin(me, TE__ALL_TO_ALL);
    if (r != TE_OK) return te__rank_end(me, post, r);
    for (from = 0; from < me->hub->size; from++) {
        const te__post *other = &me->hub->post[from];
        int64_t begin = 0, n = recv_counts[from] * post->line_bytes;
        for (to = 0; to < me->rank; to++) begin += other->send_counts[to] * post->line_bytes;
        te__post_upload(me, post, out, at, other->data + begin, (size_t)n);
        at += n;
    }
    return te__rank_end(me, post, te__rank_meet(me, TE__ALL_TO_ALL));
}

/* Sends this rank's error to rank `to`, which waits for a message. */
static void te__threads_send_failure(te__thread_rank *me, int to, te_result code) {
    const char *why = te__rank_why(me);
    char text[TE__WHY_TEXT];
    size_t bytes = strlen(why) + 1;
    te__mail *m = te__mail_create(code, bytes);
    if (!m) {
        te__hub_abort(me->hub, me->rank, "there was no host memory to tell another rank of a te_send that failed");
        return;
    }
    memcpy(te__mail_data(m), why, bytes);
    te__mail_post(me->hub, me->rank, to, m, text);
}

static te_result te__threads_send(void *user, te_ctx *te, const te_tensor *x, int to) {
    te__thread_rank *me = (te__thread_rank *)user;
    te__mail *m = te__mail_create(TE_OK, te_tensor_bytes(x));
    char text[TE__WHY_TEXT];
    te_result r;
    if (!m)
        r = te__fail(te, TE_ERR_OUT_OF_MEMORY,
                     "%s: te_send: %llu bytes for a message to rank %d could not be allocated", te__no_memory_text,
                     (unsigned long long)te_tensor_bytes(x), to);
    else r = te_tensor_to_host(x, te__mail_data(m));
    if (r != TE_OK) {
        free(m);
        te__threads_send_failure(me, to, r);
        return r;
    }
    m->dtype = x->dtype;
    m->numel = te__numel(x);
    te__shape_text(x, m->shape);
    r = te__mail_post(me->hub, me->rank, to, m, text);
    return r == TE_OK ? r : te__rank_fail(me, TE__SEND, r, text);
}

static te_result te__threads_recv(void *user, te_ctx *te, te_tensor *x, int from) {
    te__thread_rank *me = (te__thread_rank *)user;
    char text[TE__WHY_TEXT], mine[TE__SHAPE_TEXT];
    te__mail *m = te__mail_wait(me->hub, from, me->rank, text);
    te_result r = m ? m->result : me->hub->wait[me->rank].code;
    if (m && r != TE_OK) {
        snprintf(text, sizeof(text), "rank %d failed: %.900s", from, te__mail_data(m));
    } else if (m && (m->dtype != x->dtype || m->numel != te__numel(x) || m->bytes != te_tensor_bytes(x))) {
        snprintf(text, sizeof(text),
                 "rank %d sends %s %s and this rank receives %s %s; format and number of elements must be the same",
                 from, te_dtype_name(m->dtype), m->shape, te_dtype_name(x->dtype), te__shape_text(x, mine));
        r = m->dtype != x->dtype ? TE_ERR_DTYPE : TE_ERR_SHAPE;
    }
    if (r != TE_OK) r = te__rank_fail(me, TE__RECV, r, text);
    else r = te->device->upload(te, te__data(x), te__mail_data(m), m->bytes);
    free(m);
    return r;
}

static te_result te__threads_abort(void *user, const char *reason) {
    te__thread_rank *me = (te__thread_rank *)user;
    te__hub_abort(me->hub, me->rank, reason);
    return TE_OK;
}

static void te__threads_refuse(void *user, te_ctx *te, te__collective kind, int peer, te_result code) {
    te__thread_rank *me = (te__thread_rank *)user;
    (void)te;
    if (kind == TE__SEND || kind == TE__RECV) {
        if (peer < 0 || peer >= me->hub->size || peer == me->rank) return;
        if (kind == TE__SEND) te__threads_send_failure(me, peer, code);
        else te__mail_skip(me->hub, peer, me->rank);
        return;
    }
    te__hub_fail(me->hub, me->rank, code, te__rank_why(me));
}

/* ---- joining and leaving ---- */

/* Leaves the hub. When all ranks have left, the hub is reset and can be joined again. */
static void te__threads_leave(void *user) {
    te__thread_rank *me = (te__thread_rank *)user;
    te_thread_hub *hub = me->hub;
    bool last;
    te__mutex_lock(&hub->mutex);
    hub->seat[me->rank] = TE__SEAT_LEFT;
    if (hub->num_left++ == 0) hub->first_left = me->rank;
    hub->num_taken--;
    if (hub->num_left == hub->size) {
        memset(hub->seat, 0, (size_t)hub->size * sizeof(te__seat));
        memset(hub->fails, 0, (size_t)hub->size * sizeof(int64_t));
        te__hub_drop_mail(hub);
        hub->aborted = false;
        hub->num_left = 0;
    }
    te__hub_find_stuck(hub);
    last = hub->promised ? --hub->promised == 0 : hub->closed && hub->num_taken == 0;
    te__cond_broadcast(&hub->cond);
    te__mutex_unlock(&hub->mutex);
    if (last) te__hub_free(hub);
    te__free(me->te, me);
}

static te_result te__threads_join(te_ctx *te, te_thread_hub *hub, int rank) {
    te__seat seat;
    bool closed, joins;
    int i, same = -1;
    te__mutex_lock(&hub->mutex);
    for (i = 0; i < hub->size; i++)
        if (hub->seat[i] == TE__SEAT_TAKEN && hub->post[i].te == te) same = i;
    seat = hub->seat[rank];
    closed = hub->closed;
    joins = !closed && seat == TE__SEAT_FREE && same < 0;
    if (joins) {
        hub->seat[rank] = TE__SEAT_TAKEN;
        hub->post[rank].te = te;
        hub->num_taken++;
    }
    te__mutex_unlock(&hub->mutex);
    if (joins) return TE_OK;
    if (closed) return te__fail(te, TE_ERR_STATE, "te_thread_group_create: the hub has been destroyed");
    if (same >= 0)
        return te__fail(te, TE_ERR_INVALID,
                        "te_thread_group_create: this context is rank %d already; rank %d needs one of its own", same,
                        rank);
    if (seat == TE__SEAT_TAKEN)
        return te__fail(te, TE_ERR_STATE, "te_thread_group_create: rank %d of %d is taken by another context", rank,
                        hub->size);
    return te__fail(te, TE_ERR_STATE,
                    "te_thread_group_create: rank %d of %d has left; a hub starts anew when all its ranks have", rank,
                    hub->size);
}

/* ---- splitting ---- */

/* Gathers two numbers of every rank in host memory. *gathered: the ranks have exchanged them, even if this one cannot
 * read them. */
static te_result te__threads_exchange(te_group *group, const int64_t own[2], int64_t *all, bool *gathered) {
    te_ctx *te = group->te;
    int64_t n = 2;
    te_tensor *x, *out;
    te_result r;
    te__frame_begin(te);
    x = all ? te_tensor_from_host(te, TE_I64, 1, &n, own) : NULL;
    n *= group->is.size;
    out = x ? te_tensor_empty(te, TE_I64, 1, &n) : NULL;
    r = out ? te_all_gather(group, x, out) : te__refuse(group, TE__ALL_GATHER, te_error_code(te));
    *gathered = r == TE_OK;
    if (r == TE_OK) r = te_tensor_to_host(out, all);
    te__frame_end(te, NULL, 0);
    return r;
}

/* A rank that knows a hub of te_group_split's, and has not joined it, never will. */
static void te__threads_renounce(te_thread_hub *hub) {
    bool last;
    te__mutex_lock(&hub->mutex);
    last = --hub->promised == 0;
    te__mutex_unlock(&hub->mutex);
    if (last) te__hub_free(hub);
}

/* The first rank of each color makes a hub and tells the others its address. All ranks then say whether they have
 * joined: a group that lacks one is not made. Each rank that knows the hub leaves or renounces it, in whatever order:
 * one that fails early must not free the hub under another that is about to join. */
static te_group *te__threads_split(te_group *group, int color, int key) {
    te_ctx *te = group->te;
    const int size = group->is.size, rank = group->is.rank;
    int64_t *all = (int64_t *)te__alloc(te, 2 * (size_t)size * sizeof *all), own[2];
    int *order = (int *)te__alloc(te, (size_t)size * sizeof *order);
    te_thread_hub *hub = NULL;
    te_group *part = NULL;
    te_result r;
    bool gathered, told = false;
    int i, count = 0, at = -1;
    own[0] = color;
    own[1] = key;
    r = te__threads_exchange(group, own, order ? all : NULL, &gathered);
    if (r == TE_OK && color >= 0) count = te__split_order(all, size, color, order);
    for (i = 0; i < count; i++)
        if (order[i] == rank) at = i;
    if (at == 0) {
        hub = te_thread_hub_create(count);
        if (hub) hub->promised = count;
    }
    own[0] = (int64_t)(intptr_t)hub;
    if (r == TE_OK) r = te__threads_exchange(group, own, all, &told);
    if (r == TE_OK && at > 0) hub = (te_thread_hub *)(intptr_t)all[2 * order[0]];
    if (r == TE_OK && at >= 0 && !hub)
        te__fail(te, TE_ERR_OUT_OF_MEMORY, "%s: te_group_split: a hub of %d ranks", te__no_memory_text, count);
    if (r == TE_OK && hub) part = te_thread_group_create(te, hub, at);
    own[0] = at < 0 || part;
    if (r == TE_OK) r = te__threads_exchange(group, own, all, &gathered);
    for (i = 0; i < count && r == TE_OK; i++)
        if (!all[2 * order[i]]) r = TE_ERR_STATE;
    if (r != TE_OK && hub && !told) te__hub_free(hub); /* the first rank alone has it then */
    else if (r != TE_OK && hub && !part) te__threads_renounce(hub);
    if (r != TE_OK) {
        te_group_destroy(part);
        part = NULL;
        te__fail(te, r, "te_group_split: a rank of color %d could not join its group", color);
    }
    te__free(te, all);
    te__free(te, order);
    return part;
}

/* ---- the public call ---- */

TE_API te_group *te_thread_group_create(te_ctx *te, te_thread_hub *hub, int rank) {
    te_group_desc desc = TE_ZERO;
    te__thread_rank *me;
    te_group *group;
    if (!te) return NULL;
    if (!hub) {
        te__fail(te, TE_ERR_INVALID,
                 "te_thread_group_create: hub is NULL (te_thread_hub_create takes 1 thread or more)");
        return NULL;
    }
    if (hub->forks != te__forks) {
        te__fail(te, TE_ERR_STATE,
                 "te_thread_group_create: the hub was created before fork, and its threads are the parent's: create "
                 "hubs after fork");
        return NULL;
    }
    if (rank < 0 || rank >= hub->size) {
        te__fail(te, TE_ERR_INVALID, "te_thread_group_create: rank %d; this hub has the ranks 0 to %d", rank,
                 hub->size - 1);
        return NULL;
    }
    me = (te__thread_rank *)te__alloc_zero(te, sizeof(*me));
    if (!me) return NULL;
    me->hub = hub;
    me->te = te;
    me->rank = rank;
    desc.name = "threads";
    desc.rank = rank;
    desc.size = hub->size;
    desc.user = me;
    desc.all_reduce = te__threads_all_reduce;
    desc.all_gather = te__threads_all_gather;
    desc.reduce_scatter = te__threads_reduce_scatter;
    desc.broadcast = te__threads_broadcast;
    desc.barrier = te__threads_barrier;
    desc.all_to_all = te__threads_all_to_all;
    desc.send = te__threads_send;
    desc.recv = te__threads_recv;
    desc.abort = te__threads_abort;
    desc.destroy = te__threads_leave;
    group = me->group = te_group_create(te, &desc);
    if (group && te__threads_join(te, hub, rank) == TE_OK) {
        group->refuse = te__threads_refuse;
        group->split = te__threads_split;
        return group;
    }
    if (group) group->is.destroy = NULL; /* the rank has not joined, so it must not leave */
    te_group_destroy(group);
    te__free(te, me);
    return NULL;
}
