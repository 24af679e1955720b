/* dist/calls.c: how a checked collective reaches the group's implementation: at once, or by the launches of a graph.
 * This file must not depend on what a collective is for. */

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
