/* dist/flight.c: collectives that run beside the context's own work, on a second stream. This file must not depend on
 * modules, or on when a collective is begun.
 *
 * A flight begins after all work that the context has queued so far. Work that is queued later runs beside it, until
 * te__flight_land makes the context's stream wait for it. Between the two the flight keeps its tensors, and nobody may
 * write them, or read those that the collective writes. Kernels that are planned then (te__plan.beside) leave it the
 * multiprocessors that it takes. A group that cannot queue its collectives on another stream runs them when they begin:
 * threads, and a program's own groups.
 *
 * Operations run on the context's own stream alone (core/stream.c). So a sum that needs f32 between the ranks
 * (te__sum_widens) is made of f32 copies: they are made before the flight, and copied back behind it. */

typedef struct te__flight {
    te_tensor *x, *out; /* references; out is NULL for te_all_reduce, which writes x */
    te_tensor *wide[2]; /* f32 copies that travel in the place of x and out; NULL: these do */
    te__event *end;     /* behind the collective; NULL: it has run, or is queued on the context's own stream */
} te__flight;

/* Returns whether collectives of the group may run on a second stream. */
static bool te__group_forks(const te_group *group) {
    return !te__is_alone(group) && group->queue_on;
}
/* Makes the second stream of a group wait for the context's own one. */
static te_result te__flight_fork(te_group *group, te__flight *f) {
    te_ctx *te = group->te;
    te__event *fork;
    te_result result;
    if (!group->side) group->side = te__stream_open(te);
    if (!group->side) return te_error_code(te);
    f->end = te__event_create(te);
    fork = f->end ? te__event_create(te) : NULL;
    result = fork ? te__stream_fork(group->side, fork) : te_error_code(te);
    te__event_release(fork);
    return result;
}
/* Sends the bytes of x to rank `to`, and receives those of out from rank `from`: a te_all_to_all of one line. */
static te_result te__group_exchange(te_group *group, const te_tensor *x, int to, te_tensor *out, int from) {
    te_ctx *te = x->te;
    const int size = te__group_size(group);
    int64_t *counts = (int64_t *)te__alloc_zero(te, 2 * (size_t)size * sizeof(*counts));
    te_tensor *line, *place;
    te_result result;
    if (!counts) return te__refuse(group, TE__ALL_TO_ALL, te_error_code(te));
    counts[to] = counts[size + from] = 1;
    te__frame_begin(te);
    line = te__alias_2d(x, 0, TE_U8, 1, (int64_t)te_tensor_bytes(x));
    place = te__alias_2d(out, 0, TE_U8, 1, (int64_t)te_tensor_bytes(out));
    result = line && place ? te_all_to_all(group, line, counts, place, counts + size)
                           : te__refuse(group, TE__ALL_TO_ALL, te_error_code(te));
    te__frame_end(te, NULL, 0);
    te__free(te, counts);
    return result;
}
static te_result te__flight_run(te_group *group, te__collective kind, te__flight *f, int to, int from) {
    te_tensor *x = f->wide[0] ? f->wide[0] : f->x, *out = f->wide[1] ? f->wide[1] : f->out;
    const uint64_t before = f->wide[0] ? group->count[kind].bytes : 0; /* group may be NULL, but not of a wide flight */
    te_result result;
    switch (kind) {
    case TE__ALL_REDUCE: result = te_all_reduce(group, x, TE_REDUCE_SUM); break;
    case TE__REDUCE_SCATTER: result = te_reduce_scatter(group, x, out); break;
    case TE__ALL_TO_ALL:
        result = to < 0 ? te_all_to_all(group, x, NULL, out, NULL) : te__group_exchange(group, x, to, out, from);
        break;
    default: result = te_all_gather(group, x, out);
    }
    if (f->wide[0]) /* te_group_stats: in the tensors' own format */
        group->count[kind].bytes = before + (group->count[kind].bytes - before + 1) / 2;
    return result;
}
/* Sets wide[0] to an f32 copy of x, and wide[1] to memory for that of out, which may be NULL. */
static te_result te__flight_widen(te_tensor *x, te_tensor *out, te_tensor *wide[2]) {
    wide[0] = te__empty_like(x, TE_F32);
    wide[1] = out && wide[0] ? te__empty_like(out, TE_F32) : NULL;
    return wide[0] && (wide[1] || !out) ? te_tensor_copy(wide[0], x) : te_error_code(x->te);
}
static void te__flight_drop_wide(te__flight *f) {
    int i;
    for (i = 0; i < 2; i++) {
        te_tensor_release(f->wide[i]);
        f->wide[i] = NULL;
    }
}

/* Makes later work of the context wait for the flight's collective. */
static te_result te__flight_join(te__flight *f) {
    te_result result;
    if (!f->end) return TE_OK;
    result = te__stream_join(f->end);
    f->end->te->flights--;
    te__event_release(f->end);
    f->end = NULL;
    return result;
}
/* Makes later work of the context wait for the flight. */
static te_result te__flight_land(te__flight *f) {
    te_result result = te__flight_join(f);
    if (f->wide[0] && result == TE_OK)
        result = te_tensor_copy(f->out ? f->out : f->x, f->wide[f->out ? 1 : 0]);
    te__flight_drop_wide(f);
    return result;
}
/* Drops a flight, landed or not. */
static void te__flight_drop(te__flight *f) {
    te__flight_join(f);
    te__flight_drop_wide(f);
    te_tensor_release(f->x);
    te_tensor_release(f->out);
    memset(f, 0, sizeof(*f));
}
/* Begins a flight that is empty, and makes the group queue on its second stream until te__flight_closes. */
static te_result te__flight_opens(te__flight *f, te_group *group, te_result result) {
    memset(f, 0, sizeof(*f));
    if (result != TE_OK || !te__group_forks(group)) return result;
    result = te__flight_fork(group, f);
    if (result == TE_OK) {
        group->queue_on(group->is.user, group->side);
        group->te->flights++;
        return TE_OK;
    }
    te__event_release(f->end);
    f->end = NULL;
    return result;
}
/* The collectives of the flight have been queued, with this result. */
static te_result te__flight_closes(te__flight *f, te_group *group, te_result result) {
    te_result marked;
    if (!f->end) return result;
    marked = te__stream_mark(group->side, f->end);
    group->queue_on(group->is.user, NULL);
    return result == TE_OK ? marked : result;
}
static te_result te__flight_start(te__flight *f, te_group *group, te__collective kind, te_tensor *x, te_tensor *out,
                                  int to, int from, te_result result) {
    te_tensor *wide[2] = {NULL, NULL};
    int i;
    if (result == TE_OK && x && te__group_forks(group) && (kind == TE__ALL_REDUCE || kind == TE__REDUCE_SCATTER) &&
        te__sum_widens(group->is.size, x))
        result = te__flight_widen(x, out, wide);
    result = te__flight_opens(f, group, result);
    if (result == TE_OK) {
        f->x = te_tensor_retain(x);
        f->out = te_tensor_retain(out);
        for (i = 0; i < 2; i++) f->wide[i] = te_tensor_retain(wide[i]);
    }
    for (i = 0; i < 2; i++) te__drop(wide[i]); /* the flight has them */
    if (result != TE_OK) return te__refuse(group, kind, result);
    result = te__flight_closes(f, group, te__flight_run(group, kind, f, to, from));
    if (!f->end && f->out) { /* the collective has read x, as far as the context's stream goes */
        te_tensor_release(f->x);
        f->x = NULL;
    }
    if (result != TE_OK) te__flight_drop(f);
    return result;
}
/* Begins te_all_reduce (a sum; out is NULL), te_reduce_scatter, te_all_gather, or te_all_to_all of equal blocks. `f` is
 * empty. On failure it stays so. `result`: an error of this rank from before, which it tells the others. */
static te_result te__flight_begin(te__flight *f, te_group *group, te__collective kind, te_tensor *x, te_tensor *out,
                                  te_result result) {
    return te__flight_start(f, group, kind, x, out, -1, -1, result);
}
/* Begins to send x to rank `to`, and to receive out from rank `from`. All ranks call it, each with other ranks. */
static te_result te__flight_exchange(te__flight *f, te_group *group, te_tensor *x, int to, te_tensor *out, int from,
                                     te_result result) {
    return te__flight_start(f, group, TE__ALL_TO_ALL, x, out, to, from, result);
}
/* Begins te__sums. The caller keeps the tensors until the flight has landed. On failure `f` is empty. */
static te_result te__flight_sums(te__flight *f, te_group *group, te_tensor *const *x, int n, bool mean,
                                 te_result result) {
    result = te__flight_opens(f, group, result);
    result = te__flight_closes(f, group, te__sums(group, x, n, mean, result));
    if (result != TE_OK) te__flight_drop(f);
    return result;
}
/* Begins te__pass. The caller keeps the tensors until the flight has landed. On failure `f` is empty. */
static te_result te__flight_pass(te__flight *f, te_group *group, te_tensor *const *out, int to, te_tensor *const *in,
                                 int from, int n, te_result result) {
    result = te__flight_opens(f, group, result);
    result = te__flight_closes(f, group, te__pass(group, out, to, in, from, n, result));
    if (result != TE_OK) te__flight_drop(f);
    return result;
}
