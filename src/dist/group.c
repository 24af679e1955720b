/* dist/group.c: groups of ranks: how they are made and ended, what each collective checks, and how a rank tells the
 * others that it fails. This file must not depend on modules and recipes. */

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
    /* Replaces each of x[0] to x[n - 1] by its sum over the ranks, all in one call. They have one format, whose sums
     * need no f32 between the ranks (te__sum_widens). `mean`: by its mean; the number of ranks is a power of two then.
     * NULL: the group has no such call. */
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

/* ---- what collectives check, and telling of failures ---- */

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
