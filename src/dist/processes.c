/* dist/processes.c: makes groups of processes: finds the ranks' place, meets them, connects NCCL, splits groups. This
 * file must not depend on modules and recipes. */

#ifndef _WIN32

/* Makes a rank of a group: `ranks` [size], which it takes, has the numbers in the job. `store` may be NULL for one
 * rank. */
static te__nccl_rank *te__nccl_rank_create(te_ctx *te, te__store *store, uint64_t id, int rank, int size, int *ranks,
                                           double timeout) {
    te__nccl_rank *me = ranks ? (te__nccl_rank *)te__alloc_zero(te, sizeof *me) : NULL;
    if (!me) {
        te__free(te, ranks);
        return NULL;
    }
    me->te = te;
    me->name = "nccl";
    me->rank = rank;
    me->size = size;
    me->ranks = ranks;
    te__mutex_init(&me->mutex);
    if (!store) return me;
    me->end = (te__nccl_end_of *)calloc(1, sizeof *me->end);
    if (!me->end) {
        te__fail(te, TE_ERR_OUT_OF_MEMORY, "a group of %d processes: no memory of the host for its communicator", size);
        te__mutex_free(&me->mutex);
        te__free(te, ranks);
        te__free(te, me);
        return NULL;
    }
    me->store = store;
    store->refs++;
    me->member.id = id;
    me->member.ranks = ranks;
    me->member.count = size;
    me->member.timeout = timeout;
    me->member.waits = te__nccl_waits;
    me->member.stop = te__nccl_stop;
    me->member.user = me;
    te__store_add(store, &me->member);
    me->waiter.waited = te__nccl_waited;
    me->waiter.user = me;
    me->waiter.next = te->waiters;
    te->waiters = &me->waiter;
    return me;
}

/* Makes the events by which the watcher sees how far the device is. */
static te_result te__nccl_take_events(te__nccl_rank *me) {
    te_result r = TE_OK;
    while (me->num_events < TE__NCCL_MARKS && r == TE_OK) {
        r = me->te->device->event_create(me->te, &me->event[me->num_events]);
        if (r == TE_OK) me->num_events++;
    }
    return r;
}

/* Gathers `bytes` bytes of every rank in `out` [size * bytes], within the collective `who`, which has begun. */
static te_result te__nccl_gather(te__nccl_rank *me, const char *who, const void *own, size_t bytes, void *out) {
    te__text *all = (te__text *)te__alloc_zero(me->te, (size_t)me->size * sizeof *all);
    char why[TE__WHY_TEXT];
    te_result r = all ? TE_OK : TE_ERR_OUT_OF_MEMORY;
    int i;
    if (r != TE_OK) {
        te__nccl_refuse(me, me->te, TE__ALL_GATHER, -1, r);
        return r;
    }
    if (!te__store_gather(me->store, &me->member, who, own, bytes, all, why)) r = TE_ERR_STATE;
    for (i = 0; i < me->size && r == TE_OK; i++) {
        if (all[i].n == bytes) memcpy((char *)out + (size_t)i * bytes, all[i].s, bytes);
        else r = TE_ERR_STATE, snprintf(why, sizeof why, "a rank has sent a message of another length");
    }
    for (i = 0; i < me->size; i++) te__text_free(&all[i]);
    te__free(me->te, all);
    return r == TE_OK ? r : te__nccl_fail(me, r, who, why);
}

/* Makes the communicator. In a group, NCCL gives it at once and connects the ranks at the group's end: the watcher can
 * end it while this thread waits there for the others. */
static te__nccl_result te__nccl_init(te__nccl_rank *me, te__nccl_id id) {
    te__nccl_config config = te__nccl_config_of();
    te__nccl_comm *comm = NULL;
    te__nccl_result r = TE__NCCL_IN_PROGRESS, end;
    te__mutex_lock(&me->mutex);
    if (te__atomic_load(&me->ended)) {
        te__mutex_unlock(&me->mutex);
        return r;
    }
    r = te__nccl.GroupStart();
    if (r == TE__NCCL_SUCCESS) r = te__nccl.CommInitRankConfig(&comm, me->size, id, me->rank, &config);
    me->comm = comm;
    if (comm) te__atomic_store(&me->end->inside, 1);
    te__mutex_unlock(&me->mutex);
    end = te__nccl.GroupEnd();
    if (r == TE__NCCL_SUCCESS || r == TE__NCCL_IN_PROGRESS) r = end;
    return comm ? te__nccl_leave(me, te__nccl_settle(me, comm, r)) : r;
}
/* Makes the communicator, with the id of NCCL's that rank 0 has made. All ranks must do it. */
static te_result te__nccl_connect(te__nccl_rank *me, const char *who) {
    te__nccl_result code = TE__NCCL_SUCCESS;
    te__nccl_id own, *ids = (te__nccl_id *)te__alloc(me->te, (size_t)me->size * sizeof *ids);
    char why[TE__WHY_TEXT];
    bool entered = false;
    te_result r = ids ? te__nccl_take_events(me) : TE_ERR_OUT_OF_MEMORY;
    memset(&own, 0, sizeof own);
    if (r == TE_OK && me->te->device->enter) r = me->te->device->enter(me->te, &entered);
    if (r != TE_OK) te__nccl_refuse(me, me->te, TE__ALL_GATHER, -1, r);
    if (r == TE_OK && me->rank == 0) code = te__nccl.GetUniqueId(&own);
    if (r == TE_OK && code != TE__NCCL_SUCCESS) r = te__nccl_failed(me, who, code);
    if (r == TE_OK && !te__member_begin(me->store, &me->member, who, true, why))
        r = te__nccl_fail(me, TE_ERR_STATE, who, why);
    if (r == TE_OK) r = te__nccl_gather(me, who, &own, sizeof own, ids);
    if (r == TE_OK) {
        code = te__nccl_init(me, ids[0]);
        if (code != TE__NCCL_SUCCESS) r = te__nccl_failed(me, who, code);
    }
    te__member_end(me->store, &me->member);
    if (me->te->device->leave) me->te->device->leave(entered);
    te__free(me->te, ids);
    return r;
}

/* Wraps a rank as a group, which owns it. */
static te_group *te__nccl_wrap(te__nccl_rank *me, const char *name,
                               te_group *(*split)(te_group *group, int color, int key)) {
    te_group_desc desc = TE_ZERO;
    te_group *group;
    desc.name = name;
    desc.rank = me->rank;
    desc.size = me->size;
    desc.user = me;
    desc.all_reduce = te__nccl_all_reduce;
    desc.all_gather = te__nccl_all_gather;
    desc.reduce_scatter = te__nccl_reduce_scatter;
    desc.broadcast = te__nccl_broadcast;
    desc.barrier = te__nccl_barrier;
    desc.all_to_all = te__nccl_all_to_all;
    desc.send = te__nccl_send;
    desc.recv = te__nccl_recv;
    desc.abort = te__nccl_abort;
    desc.destroy = te__nccl_destroy;
    desc.captures = true;
    group = te_group_create(me->te, &desc);
    if (!group) {
        te__nccl_close(me);
        return NULL;
    }
    me->name = group->name;
    group->refuse = te__nccl_refuse;
    group->queue_on = te__nccl_queue_on;
    group->pass = te__nccl_pass_all;
    if (te__nccl_blocks()) group->sums = te__nccl_sums; /* else each call of the list might return before its end */
    group->split = split;
    return group;
}

/* ---- splitting ---- */

/* Makes this rank's place in its part, without a communicator. `pairs` has color and key of each rank. NULL for a
 * negative color, and without memory. */
static te__nccl_rank *te__nccl_part(te__nccl_rank *me, const int64_t *pairs, int color, int number) {
    int *order = (int *)te__alloc(me->te, (size_t)me->size * sizeof *order), i, rank = -1, count;
    uint64_t id = te__hash64(&number, sizeof number, me->member.id);
    te__nccl_rank *part;
    if (!order) return NULL;
    count = te__split_order(pairs, me->size, color, order);
    for (i = 0; i < count; i++) {
        if (order[i] == me->rank) rank = i;
        order[i] = me->ranks[order[i]];
    }
    part = te__nccl_rank_create(me->te, me->store, te__hash64(&color, sizeof color, id), rank, count, order,
                                me->member.timeout);
    if (!part || te__nccl_take_events(part) == TE_OK) return part;
    te__nccl_close(part);
    return NULL;
}

/* Splits the communicator. `part` gets its own; NULL: this rank is in no part. If the group ends meanwhile, NCCL may
 * still write the part's communicator: it stays in `born`, and te__nccl_close ends it. */
static te_result te__nccl_split_comm(te__nccl_rank *me, te__nccl_rank *part, int color, int key, const char *who) {
    te__nccl_config config = te__nccl_config_of();
    te__nccl_result code = TE__NCCL_IN_PROGRESS;
    te__nccl_comm *whole = te__nccl_enter(me), *comm = NULL;
    if (whole) {
        code = te__nccl.CommSplit(whole, part ? color : TE__NCCL_NO_COLOR, key, &me->born, &config);
        code = te__nccl_settle(me, whole, code);
        if (code == TE__NCCL_SUCCESS && me->born) code = te__nccl_settle(me, me->born, code);
        code = te__nccl_leave(me, code);
    }
    te__mutex_lock(&me->mutex);
    if (!te__atomic_load(&me->ended)) {
        comm = me->born;
        me->born = NULL;
    }
    te__mutex_unlock(&me->mutex);
    if (comm && part && code == TE__NCCL_SUCCESS) {
        te__mutex_lock(&part->mutex);
        if (!te__atomic_load(&part->ended)) {
            part->comm = comm;
            comm = NULL;
        }
        te__mutex_unlock(&part->mutex);
    }
    if (comm) te__nccl.CommAbort(comm);
    return code == TE__NCCL_SUCCESS ? TE_OK : te__nccl_failed(me, who, code);
}

static te_group *te__nccl_split(te_group *group, int color, int key) {
    te__nccl_rank *me = (te__nccl_rank *)group->is.user, *part = NULL;
    te_ctx *te = me->te;
    const char *who = "te_group_split";
    const int64_t own[2] = {color, key};
    int64_t *pairs = (int64_t *)te__alloc(te, 2 * (size_t)me->size * sizeof *pairs);
    char why[TE__WHY_TEXT];
    bool entered = false;
    te_result r = pairs ? TE_OK : TE_ERR_OUT_OF_MEMORY;
    if (r == TE_OK && te->device->enter) r = te->device->enter(te, &entered);
    if (r != TE_OK) te__refuse(group, TE__ALL_GATHER, r);
    if (r == TE_OK && me->store && !te__member_begin(me->store, &me->member, who, true, why))
        r = te__nccl_fail(me, TE_ERR_STATE, who, why);
    if (r == TE_OK && me->store) r = te__nccl_gather(me, who, own, sizeof own, pairs);
    else if (r == TE_OK) memcpy(pairs, own, sizeof own); /* one rank: nobody to ask */
    if (r == TE_OK && color >= 0) { /* known to the store before NCCL, so that no news of the part is lost */
        part = te__nccl_part(me, pairs, color, me->splits);
        if (!part) r = te__refuse(group, TE__ALL_GATHER, te_error_code(te));
    }
    me->splits++;
    if (r == TE_OK && me->store) r = te__nccl_split_comm(me, part, color, key, who);
    if (me->store) te__member_end(me->store, &me->member);
    if (te->device->leave) te->device->leave(entered);
    te__free(te, pairs);
    if (part && r == TE_OK) return te__nccl_wrap(part, group->name, te__nccl_split);
    if (part) te__nccl_close(part);
    return NULL;
}

/* ---- the public call ---- */

/* Finds rank, size and rendezvous: those of `desc`, else what the launcher has set. */
static te_result te__processes_place(const te_nccl_group_desc *desc, te__place *place, te__text *why) {
    te_result r = TE_OK;
    memset(place, 0, sizeof *place);
    if (desc->size == 0) {
        r = te__place_read(place, why);
    } else if (desc->size < 0 || desc->rank < 0 || desc->rank >= desc->size) {
        te__text_printf(why, "rank %d of %d; ranks count from 0 to size - 1", desc->rank, desc->size);
        r = TE_ERR_INVALID;
    } else {
        place->rank = desc->rank;
        place->size = desc->size;
        place->one_host = !desc->address;
        r = te__place_port(place, why);
    }
    if (r == TE_OK && desc->address) {
        snprintf(place->address, sizeof place->address, "%s", desc->address);
        place->one_host = false;
    }
    if (r == TE_OK && (desc->port < 0 || desc->port > 65535)) {
        te__text_printf(why, "port is %d; ports are 1 to 65535, and 0 takes the one of TE_DIST_PORT or MASTER_PORT",
                        desc->port);
        r = TE_ERR_INVALID;
    }
    if (r == TE_OK && desc->port) place->port = desc->port;
    return r;
}

/* Checks that ranks of other hosts can find rank 0, and that strangers of other hosts cannot join. */
static te_result te__processes_safe(const te__place *place, const te__meeting *at, te__text *why) {
    if (at->file || place->one_host) return TE_OK;
    if (!place->address[0]) {
        te__text_printf(
            why,
            "%s has started %d ranks, perhaps on several hosts, and nothing names rank 0's: set MASTER_ADDR "
            "to it on all ranks, or TE_DIST_FILE to a file that all hosts see",
            place->by, place->size);
        return TE_ERR_INVALID;
    }
    if (at->secret->n || te__net_is_loopback(place->address)) return TE_OK;
    te__text_printf(why,
                    "rank 0's host is %s, and there is no secret that keeps strangers out: set TE_DIST_SECRET, or "
                    "TE_DIST_SECRET_FILE to a file of mode 0600, on all ranks; or TE_DIST_FILE. Without one, only "
                    "127.0.0.1 is used",
                    place->address);
    return TE_ERR_INVALID;
}

static te__store *te__processes_meet(te_ctx *te, const te_nccl_group_desc *desc, const te__place *place, double timeout,
                                     const char *who) {
    te__text why = TE_ZERO, secret = TE_ZERO;
    te__meeting at = TE_ZERO;
    te__store *store = NULL;
    te_result r = TE_OK;
    at.rank = place->rank;
    at.size = place->size;
    at.version = te_version();
    at.address = place->address;
    at.port = place->port;
    at.file = desc->file ? desc->file : te__env("TE_DIST_FILE");
    at.secret = &secret;
    at.one_host = place->one_host;
    at.timeout = timeout;
    if (!te__store_secret(desc->secret, &secret, &why)) r = TE_ERR_INVALID;
    if (r == TE_OK) r = te__processes_safe(place, &at, &why);
    if (r == TE_OK) {
        store = te__store_open(&at, &why);
        if (!store) r = TE_ERR_STATE;
    }
    if (r != TE_OK) te__fail(te, r, "%s: rank %d of %d: %s", who, place->rank, place->size, te__text_str(&why));
    te__text_free(&why);
    te__text_free(&secret);
    return store;
}

TE_API te_group *te_nccl_group_create(te_ctx *te, const te_nccl_group_desc *desc) {
    const char *who = "te_nccl_group_create";
    te__text why = TE_ZERO;
    te__place place;
    te__store *store = NULL;
    te__nccl_rank *me = NULL;
    double timeout;
    int *ranks, i;
    te_result r;
    if (!te || !te__has_desc(te, desc, who) || te__refuse_fork(te) != TE_OK) return NULL;
    if (te->capture) {
        te__refuse_capture(te, who, "make the group before te_graph_begin");
        return NULL;
    }
    timeout = desc->timeout_seconds > 0 ? desc->timeout_seconds : 600.0;
    r = te__processes_place(desc, &place, &why);
    if (r != TE_OK) te__fail(te, r, "%s: %s", who, te__text_str(&why));
    te__text_free(&why);
    if (r == TE_OK && place.size > 1) r = te__nccl_open(te, who);
    if (r == TE_OK && place.size > 1 && !te_ctx_is_cuda(te) && !te__nccl.takes_host)
        r = te__fail(te, TE_ERR_UNSUPPORTED,
                     "%s: this context is on the CPU, and NCCL works in the memory of GPUs alone; ranks on the CPU are "
                     "threads of one process (te_thread_group_create)",
                     who);
    if (r == TE_OK && place.size > 1) {
        store = te__processes_meet(te, desc, &place, timeout, who);
        if (!store) r = TE_ERR_STATE;
    }
    if (r != TE_OK) return NULL;
    ranks = (int *)te__alloc(te, (size_t)place.size * sizeof *ranks);
    for (i = 0; ranks && i < place.size; i++) ranks[i] = i;
    me = te__nccl_rank_create(te, store, 1, place.rank, place.size, ranks, timeout);
    if (!me) {
        if (store) {
            char why[TE__WHY_TEXT], name[TE__WHAT_TEXT];
            snprintf(why, sizeof why, "%s failed in %s: %.700s", te__store_name(store, place.rank, name), who,
                     te_error(te));
            te__store_close(store, TE__LINGER_SECONDS, why);
        }
        return NULL;
    }
    if (desc->name) me->name = desc->name;
    if (store && te__nccl_connect(me, who) != TE_OK) {
        te__nccl_close(me);
        return NULL;
    }
    return te__nccl_wrap(me, desc->name ? desc->name : "nccl", te__nccl_split);
}

#else

TE_API te_group *te_nccl_group_create(te_ctx *te, const te_nccl_group_desc *desc) {
    if (te && te__has_desc(te, desc, "te_nccl_group_create"))
        te__fail(
            te, TE_ERR_UNSUPPORTED,
            "te_nccl_group_create: te.h has no groups of processes on Windows; threads of one process can be ranks "
            "(te_thread_group_create)");
    return NULL;
}

#endif
