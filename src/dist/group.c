/* dist/group.c: groups of ranks: the front doors of the collectives, and the group whose ranks are threads of this process. Knows
 * tensors and copies of them in host memory; must not know modules and recipes. */

typedef enum te__collective { TE__ALL_REDUCE, TE__ALL_GATHER, TE__REDUCE_SCATTER, TE__BROADCAST, TE__BARRIER, TE__COLLECTIVE_COUNT } te__collective;
static const char *te__collective_name(te__collective kind) {
    static const char *const names[TE__COLLECTIVE_COUNT] = {"te_all_reduce", "te_all_gather", "te_reduce_scatter", "te_broadcast", "te_barrier"};
    return names[kind];
}

struct te_group {
    te_ctx *te;
    te_group_desc is;
    char *name; /* is.name */
    /* Takes part in a collective with a failure in place of a tensor, so that the other ranks fail too and do not wait. NULL: the
     * implementation has no way to say that. */
    void (*refuse)(void *user, te_ctx *te, te__collective kind, te_result code);
    te__guest guest;
};

/* ---- making ---- */

static void te__group_close(void *owner) { te_group_destroy((te_group *)owner); }

TE_API te_group *te_group_create(te_ctx *te, const te_group_desc *desc) {
    te_group *group;
    const char *missing;
    if (!te || !te__has_desc(te, desc, "te_group_create")) return NULL;
    if (desc->size < 1 || desc->rank < 0 || desc->rank >= desc->size) {
        te__fail(te, TE_ERR_INVALID, "te_group_create: rank %d of %d; ranks count from 0 to size - 1", desc->rank, desc->size);
        return NULL;
    }
    missing = !desc->all_reduce       ? "all_reduce"
              : !desc->all_gather     ? "all_gather"
              : !desc->reduce_scatter ? "reduce_scatter"
              : !desc->broadcast      ? "broadcast"
              : !desc->barrier        ? "barrier"
                                      : NULL;
    if (missing) {
        te__fail(te, TE_ERR_INVALID, "te_group_create: %s is NULL; every function but destroy must be there", missing);
        return NULL;
    }
    group = (te_group *)te__alloc_zero(te, sizeof(te_group));
    if (!group) return NULL;
    group->te = te;
    group->is = *desc;
    group->name = te__copy_string(te, desc->name ? desc->name : "custom");
    group->is.name = group->name;
    if (group->name) {
        te__guest_enter(te, &group->guest, "group", te__group_close, group);
        return group;
    }
    te__free(te, group, sizeof(*group));
    return NULL;
}

TE_API void te_group_destroy(te_group *group) {
    te_ctx *te;
    if (!group) return;
    te = group->te;
    te__guest_leave(&group->guest);
    if (group->is.destroy && !te__is_forked(te)) group->is.destroy(group->is.user); /* the other ranks are the parent's */
    te__free_string(te, group->name);
    te__free(te, group, sizeof(*group));
}

TE_API int te_group_rank(const te_group *group) { return group ? group->is.rank : 0; }
TE_API int te_group_size(const te_group *group) { return group ? group->is.size : 1; }

/* ---- front doors ---- */

/* Present, of the group's context, with plain contiguous memory. A NULL passes in silence: who made it has reported already. */
static te_result te__want_shared(te_group *group, te__collective kind, const char *name, const te_tensor *x) {
    te_ctx *te;
    te_result r;
    if (!x) return TE_ERR_STATE;
    te = group ? group->te : x->te;
    r = te__refuse_fork(te);
    if (r == TE_OK) r = te__want(te, te__collective_name(kind), name, x);
    return r == TE_OK && !x->buffer ? te__no_plain_memory(x, te__collective_name(kind)) : r;
}

/* x can be added up, or compared. */
static te_result te__want_reducible(te__collective kind, const te_tensor *x, te_reduce_op op) {
    const char *what = te__collective_name(kind);
    bool bytes = x->dtype == TE_U8 || x->dtype == TE_F8E8M0;
    if (op != TE_REDUCE_SUM && op != TE_REDUCE_MAX)
        return te__fail(x->te, TE_ERR_INVALID, "%s: op is %d; TE_REDUCE_SUM and TE_REDUCE_MAX are possible", what, (int)op);
    if (te__is_float(x->dtype) || te__is_index(x->dtype) || (bytes && op == TE_REDUCE_MAX)) return TE_OK;
    return te__fail(x->te, TE_ERR_DTYPE, "%s: x is %s; f32, f16, bf16, i32 and i64 can be reduced, and u8 and e8m0 by TE_REDUCE_MAX", what,
                    te_dtype_name(x->dtype));
}

/* `whole` holds one `part` for each rank. */
static te_result te__want_parts(te__collective kind, const char *whole_name, const te_tensor *whole, const char *part_name, const te_tensor *part,
                                int size) {
    const char *what = te__collective_name(kind);
    char a[TE__SHAPE_TEXT], b[TE__SHAPE_TEXT];
    int64_t n = te__numel(part);
    if (whole->dtype != part->dtype)
        return te__fail(part->te, TE_ERR_DTYPE, "%s: %s is %s and %s is %s; they must be of one format", what, whole_name,
                        te_dtype_name(whole->dtype), part_name, te_dtype_name(part->dtype));
    if (n > TE__MAX_ELEMENTS / size || te__numel(whole) != n * size)
        return te__fail(part->te, TE_ERR_SHAPE, "%s: %s is %s and %s is %s; %d ranks need %d times the elements of %s in %s", what, whole_name,
                        te__shape_text(whole, a), part_name, te__shape_text(part, b), size, size, part_name, whole_name);
    if (te_tensor_bytes(whole) != te_tensor_bytes(part) * (size_t)size)
        return te__fail(part->te, TE_ERR_SHAPE, "%s: %s is %s and %s is %s; rows of %s fill whole bytes, so their last sizes must be the same", what,
                        whole_name, te__shape_text(whole, a), part_name, te__shape_text(part, b), te_dtype_name(part->dtype));
    return TE_OK;
}

/* This rank cannot make the call. */
static te_result te__refuse(te_group *group, te__collective kind, te_result code) {
    if (group && group->is.size > 1 && group->refuse && !group->te->warming && !te__is_forked(group->te)) group->refuse(group->is.user, group->te, kind, code);
    return code;
}
/* Nothing is to be exchanged. During a warm-up nothing is computed that could be, and ranks warm up at times of their own. */
static bool te__is_alone(const te_group *group) { return !group || group->is.size == 1 || group->te->warming; }

/* What an implementation that failed has not said. */
static te_result te__report_collective(te_group *group, te__collective kind, te_result r) {
    if (r == TE_OK) return r;
    if ((int)r < 0 || (int)r >= TE_RESULT_COUNT)
        return te__fail(group->te, TE_ERR_INVALID, "%s: group \"%s\", rank %d of %d: it returned %d, which is not a te_result",
                        te__collective_name(kind), group->name, group->is.rank, group->is.size, (int)r);
    return te__fail(group->te, r, "%s: group \"%s\", rank %d of %d: it returned %s", te__collective_name(kind), group->name, group->is.rank,
                    group->is.size, te_result_name(r));
}

/* The bytes of x into out, whatever they mean. */
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

TE_API te_result te_all_reduce(te_group *group, te_tensor *x, te_reduce_op op) {
    te_result r = te__want_shared(group, TE__ALL_REDUCE, "x", x);
    if (r == TE_OK) r = te__want_reducible(TE__ALL_REDUCE, x, op);
    if (r != TE_OK) return te__refuse(group, TE__ALL_REDUCE, r);
    if (te__is_alone(group)) return TE_OK;
    r = group->is.all_reduce(group->is.user, group->te, x, op);
    te__touch(x);
    return te__report_collective(group, TE__ALL_REDUCE, r);
}

TE_API te_result te_all_gather(te_group *group, const te_tensor *x, te_tensor *out) {
    te_result r = te__want_shared(group, TE__ALL_GATHER, "x", x);
    if (r == TE_OK) r = te__want_shared(group, TE__ALL_GATHER, "out", out);
    if (r == TE_OK) r = te__want_parts(TE__ALL_GATHER, "out", out, "x", x, te_group_size(group));
    if (r != TE_OK) return te__refuse(group, TE__ALL_GATHER, r);
    if (te__is_alone(group)) return te_group_size(group) == 1 ? te__copy_bytes(x, out) : TE_OK;
    r = group->is.all_gather(group->is.user, group->te, x, out);
    te__touch(out);
    return te__report_collective(group, TE__ALL_GATHER, r);
}

TE_API te_result te_reduce_scatter(te_group *group, const te_tensor *x, te_tensor *out) {
    te_result r = te__want_shared(group, TE__REDUCE_SCATTER, "x", x);
    if (r == TE_OK) r = te__want_shared(group, TE__REDUCE_SCATTER, "out", out);
    if (r == TE_OK) r = te__want_reducible(TE__REDUCE_SCATTER, x, TE_REDUCE_SUM);
    if (r == TE_OK) r = te__want_parts(TE__REDUCE_SCATTER, "x", x, "out", out, te_group_size(group));
    if (r != TE_OK) return te__refuse(group, TE__REDUCE_SCATTER, r);
    if (te__is_alone(group)) return te_group_size(group) == 1 ? te__copy_bytes(x, out) : TE_OK;
    r = group->is.reduce_scatter(group->is.user, group->te, x, out);
    te__touch(out);
    return te__report_collective(group, TE__REDUCE_SCATTER, r);
}

TE_API te_result te_broadcast(te_group *group, te_tensor *x, int root) {
    te_result r = te__want_shared(group, TE__BROADCAST, "x", x);
    if (r == TE_OK && (root < 0 || root >= te_group_size(group)))
        r = te__fail(x->te, TE_ERR_INVALID, "te_broadcast: root is %d; the ranks are 0 to %d", root, te_group_size(group) - 1);
    if (r != TE_OK) return te__refuse(group, TE__BROADCAST, r);
    if (te__is_alone(group)) return TE_OK;
    r = group->is.broadcast(group->is.user, group->te, x, root);
    te__touch(x);
    return te__report_collective(group, TE__BROADCAST, r);
}

TE_API te_result te_barrier(te_group *group) {
    te_result r = group ? te__refuse_fork(group->te) : TE_OK;
    if (te__is_alone(group) || r != TE_OK) return r;
    return te__report_collective(group, TE__BARRIER, group->is.barrier(group->is.user));
}

/* ---- the hub: where threads meet ---- */

enum { TE__WHY_TEXT = 1024 };

/* What a rank brings to a collective. Written by its own thread, before a meeting; read by the others between this meeting and the next. */
typedef struct te__post {
    te_ctx *te;
    te__collective kind;
    te_dtype dtype;
    int64_t numel;
    size_t bytes;
    te_reduce_op op;
    int root;
    char shape[TE__SHAPE_TEXT];
    char *data; /* the rank's tensor in host memory */
    te_result result;
    char why[TE__WHY_TEXT];
} te__post;

typedef enum te__seat { TE__SEAT_FREE = 0, TE__SEAT_TAKEN, TE__SEAT_LEFT } te__seat;

struct te_thread_hub {
    te__mutex mutex;
    te__cond cond;
    int size;
    te__seat *seat; /* [size] */
    te__post *post; /* [size] */
    int num_taken, num_left, first_left;
    bool closed;      /* by te_thread_hub_destroy; the last rank to leave frees it */
    int arrived;      /* at the meeting under way */
    uint64_t meeting; /* counts meetings: whoever sees a new number knows that all had come */
    int forks;         /* te__forks where it was made: no thread comes to it in a child */
    te_result verdict; /* of the last meeting */
    char text[TE__WHY_TEXT + 64];
};

static void te__hub_free(te_thread_hub *hub) {
    te__mutex_free(&hub->mutex);
    te__cond_free(&hub->cond);
    free(hub->seat);
    free(hub->post);
    free(hub);
}

TE_API te_thread_hub *te_thread_hub_create(int size) {
    te_thread_hub *hub;
    if (size < 1) return NULL;
    hub = (te_thread_hub *)calloc(1, sizeof(*hub));
    if (!hub) return NULL;
    te__mutex_init(&hub->mutex);
    te__cond_init(&hub->cond);
    hub->size = size;
    hub->forks = te__forks;
    hub->seat = (te__seat *)calloc((size_t)size, sizeof(te__seat));
    hub->post = (te__post *)calloc((size_t)size, sizeof(te__post));
    if (hub->seat && hub->post) return hub;
    te__hub_free(hub);
    return NULL;
}

TE_API void te_thread_hub_destroy(te_thread_hub *hub) {
    bool last;
    if (!hub || hub->forks != te__forks) return; /* a child's copy: its mutex may be held for ever */
    te__mutex_lock(&hub->mutex);
    hub->closed = true;
    last = hub->num_taken == 0;
    te__cond_broadcast(&hub->cond);
    te__mutex_unlock(&hub->mutex);
    if (last) te__hub_free(hub);
}

/* Some rank will never come again. */
static bool te__hub_is_broken(const te_thread_hub *hub) { return hub->closed || hub->num_left > 0; }

/* Whether the posts of all ranks fit together; the complaint, if not. Ranks are compared with rank 0 in order, so that all threads hear the
 * same in every run. */
static te_result te__hub_judge(te_thread_hub *hub) {
    const te__post *a = &hub->post[0], *b = NULL;
    const char *what = te__collective_name(a->kind);
    char *text = hub->text;
    size_t room = sizeof(hub->text);
    int i;
    for (i = 0; i < hub->size; i++)
        if (hub->post[i].result != TE_OK) {
            snprintf(text, room, "rank %d failed: %s", i, hub->post[i].why);
            return hub->post[i].result;
        }
    for (i = 1; i < hub->size; i++) {
        b = &hub->post[i];
        if (b->kind != a->kind) {
            snprintf(text, room, "rank 0 calls %s and rank %d calls %s; all ranks must make the same calls in the same order", what, i,
                     te__collective_name(b->kind));
            return TE_ERR_STATE;
        }
        if (b->op != a->op) {
            snprintf(text, room, "rank 0 wants the %s and rank %d the %s", a->op == TE_REDUCE_MAX ? "maximum" : "sum", i,
                     b->op == TE_REDUCE_MAX ? "maximum" : "sum");
            return TE_ERR_INVALID;
        }
        if (b->root != a->root) {
            snprintf(text, room, "rank 0 names rank %d as the root and rank %d names rank %d", a->root, i, b->root);
            return TE_ERR_INVALID;
        }
        if (b->dtype != a->dtype || b->numel != a->numel || b->bytes != a->bytes) {
            snprintf(text, room, "rank 0 brings %s %s and rank %d brings %s %s; %s", te_dtype_name(a->dtype), a->shape, i, te_dtype_name(b->dtype),
                     b->shape, b->dtype != a->dtype ? "all ranks must use one format" : "all ranks must bring the same number of elements");
            return b->dtype != a->dtype ? TE_ERR_DTYPE : TE_ERR_SHAPE;
        }
    }
    return TE_OK;
}

/* Waits until all ranks have come; all leave with the same verdict, and `text` if it is not TE_OK. Only the first meeting of a
 * collective may be given up, because a rank has left the group: past it nobody holds memory that another might still read. */
static te_result te__hub_meet(te_thread_hub *hub, bool first, char *text) {
    te_result r;
    uint64_t meeting;
    te__mutex_lock(&hub->mutex);
    meeting = hub->meeting;
    hub->arrived++;
    if (hub->arrived == hub->size) {
        hub->arrived = 0;
        hub->verdict = te__hub_judge(hub);
        hub->meeting++;
        te__cond_broadcast(&hub->cond);
    }
    while (hub->meeting == meeting && !(first && te__hub_is_broken(hub))) te__cond_wait(&hub->cond, &hub->mutex);
    if (hub->meeting != meeting) {
        r = hub->verdict;
        if (r != TE_OK) snprintf(text, TE__WHY_TEXT, "%.*s", TE__WHY_TEXT - 1, hub->text);
    } else {
        hub->arrived--;
        r = TE_ERR_STATE;
        if (hub->closed)
            snprintf(text, TE__WHY_TEXT, "the hub has been destroyed (te_thread_hub_destroy) while its group was in use");
        else
            snprintf(text, TE__WHY_TEXT, "rank %d has left the group (te_group_destroy) and will not come", hub->first_left);
    }
    te__mutex_unlock(&hub->mutex);
    return r;
}

/* ---- a rank of the thread group ---- */

typedef struct te__thread_rank {
    te_thread_hub *hub;
    te_ctx *te;
    int rank;
} te__thread_rank;

/* A new post of this rank, without a tensor. */
static te__post *te__post_open(te__thread_rank *me, te__collective kind) {
    te__post *post = &me->hub->post[me->rank];
    post->kind = kind;
    post->dtype = TE_DTYPE_NONE;
    post->numel = 0;
    post->bytes = 0;
    post->op = TE_REDUCE_SUM;
    post->root = 0;
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
/* The others hear what this rank's context says; the first error of a context is the cause of the later ones. */
static void te__post_fail(te__thread_rank *me, te__post *post, te_result code) {
    if (post->result != TE_OK || code == TE_OK) return;
    snprintf(post->why, sizeof(post->why), "%s", te_ok(me->te) ? "it was given NULL in place of a tensor" : te_error(me->te));
    post->result = code;
}
/* Copies x to where the other ranks can read it. */
static void te__post_data(te__thread_rank *me, te__post *post, const te_tensor *x) {
    post->data = (char *)te__alloc(me->te, post->bytes);
    te__post_fail(me, post, post->data ? te_tensor_to_host(x, post->data) : TE_ERR_OUT_OF_MEMORY);
}
static void te__post_upload(te__thread_rank *me, te__post *post, te_tensor *x, int64_t at, const char *from, size_t bytes) {
    if (post->result == TE_OK && bytes)
        te__post_fail(me, post, me->te->device->upload(me->te, (char *)te__data(x) + at, from, bytes));
}

/* The first meeting: all have brought what the others need, or all fail. */
static te_result te__rank_begin(te__thread_rank *me, te__collective kind) {
    char text[TE__WHY_TEXT];
    te_result r = te__hub_meet(me->hub, true, text);
    if (r == TE_OK) return r;
    return te__fail(me->te, r, "%s: group \"threads\", rank %d of %d: %s", te__collective_name(kind), me->rank, me->hub->size, text);
}
/* A later one: all have done their part, or all fail. */
static te_result te__rank_meet(te__thread_rank *me, te__collective kind) {
    char text[TE__WHY_TEXT];
    te_result r = te__hub_meet(me->hub, false, text);
    if (r == TE_OK) return r;
    return te__fail(me->te, r, "%s: group \"threads\", rank %d of %d: %s", te__collective_name(kind), me->rank, me->hub->size, text);
}
static te_result te__rank_end(te__thread_rank *me, te__post *post, te_result r) {
    te__free(me->te, post->data, post->bytes);
    post->data = NULL;
    return r;
}

/* ---- arithmetic: rank 0 first, then rank 1 ... ---- */

enum { TE__REDUCE_RUN = 256 }; /* elements at a time: they stay in the first-level cache */

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
            /* wraps around, as machines add */
            value = op == TE_REDUCE_MAX ? te__max(value, x) : (int64_t)((uint64_t)value + (uint64_t)x);
        }
        if (dtype == TE_I64) ((int64_t *)(void *)out)[at + i] = value;
        else if (dtype == TE_I32) ((int32_t *)(void *)out)[at + i] = (int32_t)(uint32_t)(uint64_t)value;
        else ((uint8_t *)out)[at + i] = (uint8_t)value;
    }
}

/* Elements begin .. end - 1 of this rank's copy become the result over all ranks. Each rank has a range of its own, which no other reads
 * nor writes in any copy, so this needs neither locks nor more memory. */
static void te__reduce_range(te__thread_rank *me, te__post *post, int64_t begin, int64_t end) {
    te__floats floats = te__floats_begin();
    int64_t at;
    for (at = begin; at < end; at += TE__REDUCE_RUN) {
        int n = (int)te__min(end - at, TE__REDUCE_RUN);
        if (te__is_float(post->dtype))
            te__reduce_floats(me->hub, post->dtype, post->op, at, n, post->data);
        else
            te__reduce_ints(me->hub, post->dtype, post->op, at, n, post->data);
    }
    te__floats_end(&floats);
}

/* ---- the five functions ---- */

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
        te__post_upload(me, post, x, begin * size, me->hub->post[rank].data + begin * size, (size_t)((end - begin) * size));
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

static void te__threads_refuse(void *user, te_ctx *te, te__collective kind, te_result code) {
    te__thread_rank *me = (te__thread_rank *)user;
    char text[TE__WHY_TEXT];
    (void)te;
    te__post_fail(me, te__post_open(me, kind), code);
    te__hub_meet(me->hub, true, text); /* the verdict is news for the others alone */
}

/* ---- joining and leaving ---- */

/* A hub of which all ranks have left is as new. */
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
        hub->num_left = 0;
    }
    last = hub->closed && hub->num_taken == 0;
    te__cond_broadcast(&hub->cond);
    te__mutex_unlock(&hub->mutex);
    if (last) te__hub_free(hub);
    te__free(me->te, me, sizeof(*me));
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
        return te__fail(te, TE_ERR_INVALID, "te_thread_group_create: this context is rank %d already; rank %d needs one of its own", same, rank);
    if (seat == TE__SEAT_TAKEN)
        return te__fail(te, TE_ERR_STATE, "te_thread_group_create: rank %d of %d is taken by another context", rank, hub->size);
    return te__fail(te, TE_ERR_STATE, "te_thread_group_create: rank %d of %d has left; a hub starts anew when all its ranks have", rank, hub->size);
}

TE_API te_group *te_thread_group_create(te_ctx *te, te_thread_hub *hub, int rank) {
    te_group_desc desc = TE_ZERO;
    te__thread_rank *me;
    te_group *group;
    if (!te) return NULL;
    if (!hub) {
        te__fail(te, TE_ERR_INVALID, "te_thread_group_create: hub is NULL (te_thread_hub_create takes 1 thread or more)");
        return NULL;
    }
    if (hub->forks != te__forks) {
        te__fail(te, TE_ERR_STATE, "te_thread_group_create: the hub was created before fork, and its threads are the parent's: create hubs after fork");
        return NULL;
    }
    if (rank < 0 || rank >= hub->size) {
        te__fail(te, TE_ERR_INVALID, "te_thread_group_create: rank %d; this hub has the ranks 0 to %d", rank, hub->size - 1);
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
    desc.destroy = te__threads_leave;
    group = te_group_create(te, &desc);
    if (group && te__threads_join(te, hub, rank) == TE_OK) {
        group->refuse = te__threads_refuse;
        return group;
    }
    if (group) group->is.destroy = NULL; /* it has not joined, so it cannot leave */
    te_group_destroy(group);
    te__free(te, me, sizeof(*me));
    return NULL;
}
