/* dist/hub.c: synchronizes the threads of a group by meetings of all ranks and by messages between two ranks. A wait
 * that would never end fails with an error. This file must not depend on tensors. */

/* The contribution of one rank to a collective. The rank writes the struct before a meeting (te__hub_meet). Other ranks
 * read it until the next meeting. */
typedef struct te__post {
    te_ctx *te;
    te__collective kind;
    te_dtype dtype;
    int64_t numel;
    size_t bytes;
    te_reduce_op op;
    int root;
    int64_t line, line_bytes; /* te_all_to_all: elements and bytes of a line */
    const int64_t *send_counts, *recv_counts; /* [size] numbers of lines */
    char shape[TE__SHAPE_TEXT];
    char *data; /* the rank's tensor in host memory */
    te_result result;
    char why[TE__WHY_TEXT];
} te__post;

/* A message from one rank to another. The bytes of the tensor, or the error text, follow this struct in memory. */
typedef struct te__mail {
    struct te__mail *next;
    te_result result; /* not TE_OK: there is no tensor */
    te_dtype dtype;
    int64_t numel;
    size_t bytes;
    int64_t fails; /* te_thread_hub.fails of the sender */
    char shape[TE__SHAPE_TEXT];
} te__mail;
static char *te__mail_data(te__mail *m) { return (char *)m + ((sizeof(te__mail) + 15) & ~(size_t)15); }
typedef struct te__mailbox {
    te__mail *first, *last;
    int skip; /* the number of future messages to drop, because their receives have already failed */
    int64_t skip_fails; /* te_thread_hub.fails of the receiver then */
} te__mailbox;

/* The event that a rank waits for: none, a meeting of all ranks, or a message. If all ranks wait for one another, the
 * waits end with an error. */
typedef enum te__wait_kind { TE__WAITS_NOT, TE__WAITS_MEETING, TE__WAITS_MESSAGE } te__wait_kind;
typedef struct te__wait {
    te__wait_kind kind;
    int from;   /* the sender that a receive waits for */
    bool live;  /* used only by te__hub_find_stuck */
    bool stuck; /* the wait ends with the error `text` */
    bool told;  /* all ranks know of the last failure, or will hear of it by te_thread_hub.fails */
    te_result code;
    char text[TE__WHY_TEXT];
} te__wait;

typedef enum te__seat { TE__SEAT_FREE = 0, TE__SEAT_TAKEN, TE__SEAT_LEFT } te__seat;

enum { TE__KEPT_FAILURES = 4 };
struct te_thread_hub {
    te__mutex mutex;
    te__cond cond;
    int size;
    te__seat *seat; /* [size] */
    te__post *post; /* [size] */
    te__wait *wait; /* [size] */
    te__mailbox *box; /* [from * size + to] */
    /* How often each rank has failed on its own, or has heard of such a failure. A rank that has a smaller number than
     * another one fails in its next call, once for each failure that it lacks. Failures of several ranks at a time
     * count as one. */
    int64_t *fails;        /* [size] */
    te__wait *failure; /* [TE__KEPT_FAILURES * size] code and text of each rank's last failures, and the rank that they
                        * are of (`from`): failure number n is at n % TE__KEPT_FAILURES */
    int num_receiving; /* ranks that wait for a message */
    bool aborted;      /* a rank has aborted the group; abort_text has the reason. Stays true until all ranks have
                        * left. */
    char abort_text[TE__WHY_TEXT];
    int num_taken, num_left, first_left;
    bool closed;      /* true: te_thread_hub_destroy was called; the last rank to leave frees the hub */
    int promised;     /* te_group_split has made the hub: ranks that have not left yet, or will not join after all; the
                       * last of them frees the hub. 0: made by te_thread_hub_create */
    int arrived;      /* the number of ranks that have arrived at the current meeting */
    uint64_t meeting; /* the number of meetings so far; a change tells waiting ranks that all ranks have arrived */
    int forks;         /* the value of te__forks when the hub was created; a child of fork() has a larger one */
    te_result verdict; /* the result of the last meeting */
    char text[TE__WHY_TEXT + 64];
};

static te__mailbox *te__hub_box(const te_thread_hub *hub, int from, int to) {
    return &hub->box[(size_t)from * (size_t)hub->size + (size_t)to];
}

static void te__hub_drop_mail(te_thread_hub *hub) {
    size_t i, n = (size_t)hub->size * (size_t)hub->size;
    for (i = 0; i < n; i++) {
        te__mail *m = hub->box[i].first, *next;
        for (; m; m = next) {
            next = m->next;
            free(m);
        }
    }
    memset(hub->box, 0, n * sizeof(te__mailbox));
}

static void te__hub_free(te_thread_hub *hub) {
    if (hub->box) te__hub_drop_mail(hub);
    te__mutex_free(&hub->mutex);
    te__cond_free(&hub->cond);
    free(hub->seat);
    free(hub->post);
    free(hub->wait);
    free(hub->box);
    free(hub->fails);
    free(hub->failure);
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
    hub->wait = (te__wait *)calloc((size_t)size, sizeof(te__wait));
    hub->box = (te__mailbox *)calloc((size_t)size, (size_t)size * sizeof(te__mailbox));
    hub->fails = (int64_t *)calloc((size_t)size, sizeof(int64_t));
    hub->failure = (te__wait *)calloc((size_t)size, TE__KEPT_FAILURES * sizeof(te__wait));
    if (hub->seat && hub->post && hub->wait && hub->box && hub->fails && hub->failure) return hub;
    te__hub_free(hub);
    return NULL;
}

TE_API void te_thread_hub_destroy(te_thread_hub *hub) {
    bool last;
    if (!hub || hub->forks != te__forks) return; /* in a forked child, the mutex may be locked for ever */
    te__mutex_lock(&hub->mutex);
    hub->closed = true;
    last = hub->num_taken == 0;
    te__cond_broadcast(&hub->cond);
    te__mutex_unlock(&hub->mutex);
    if (last) te__hub_free(hub);
}

/* Returns whether no meeting will begin any more. */
static bool te__hub_is_over(const te_thread_hub *hub) { return hub->closed || hub->aborted; }
static bool te__hub_is_broken(const te_thread_hub *hub) { return te__hub_is_over(hub) || hub->num_left > 0; }
/* Writes to `text` why the group can no longer be used: it was aborted, the hub was destroyed, or rank `left` has
 * left. */
static te_result te__hub_why_over(const te_thread_hub *hub, int left, char *text) {
    if (hub->aborted)
        snprintf(text, TE__WHY_TEXT, "%s", hub->abort_text);
    else if (hub->closed)
        snprintf(text, TE__WHY_TEXT, "the hub has been destroyed (te_thread_hub_destroy) while its group was in use");
    else
        snprintf(text, TE__WHY_TEXT,
                 "rank %d has left the group (te_group_destroy, or the end of its context) and will not come", left);
    return TE_ERR_STATE;
}

/* Checks that each rank sends what the receiving rank expects (te_all_to_all). */
static te_result te__hub_judge_exchange(te_thread_hub *hub) {
    const te__post *a = &hub->post[0];
    char *text = hub->text;
    size_t room = sizeof(hub->text);
    int i, k;
    for (i = 1; i < hub->size; i++) {
        const te__post *b = &hub->post[i];
        if (b->dtype == a->dtype && b->line == a->line && b->line_bytes == a->line_bytes) continue;
        snprintf(text, room, "rank 0 brings %s %s and rank %d brings %s %s; %s", te_dtype_name(a->dtype), a->shape, i,
                 te_dtype_name(b->dtype), b->shape,
                 b->dtype != a->dtype ? "all ranks must use one format"
                                      : "all ranks must bring lines of the same size");
        return b->dtype != a->dtype ? TE_ERR_DTYPE : TE_ERR_SHAPE;
    }
    for (i = 0; i < hub->size; i++)
        for (k = 0; k < hub->size; k++) {
            int64_t sent = hub->post[i].send_counts[k], expected = hub->post[k].recv_counts[i];
            if (sent == expected) continue;
            snprintf(text, room,
                     "rank %d sends %lld lines to rank %d, which expects %lld (send_counts[%d] of the one, "
                     "recv_counts[%d] of the other)",
                     i, (long long)sent, k, (long long)expected, k, i);
            return TE_ERR_SHAPE;
        }
    return TE_OK;
}

/* Checks that the contributions (te__post) of all ranks match; else writes the reason to hub->text. Compares with rank
 * 0, so that the error is always the same. */
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
            snprintf(text, room,
                     "rank 0 calls %s and rank %d calls %s; all ranks must make the same calls in the same order", what,
                     i, te__collective_name(b->kind));
            return TE_ERR_STATE;
        }
        if (a->kind == TE__ALL_TO_ALL) continue;
        if (b->op != a->op) {
            snprintf(text, room, "rank 0 wants the %s and rank %d the %s", a->op == TE_REDUCE_MAX ? "maximum" : "sum",
                     i, b->op == TE_REDUCE_MAX ? "maximum" : "sum");
            return TE_ERR_INVALID;
        }
        if (b->root != a->root) {
            snprintf(text, room, "rank 0 names rank %d as the root and rank %d names rank %d", a->root, i, b->root);
            return TE_ERR_INVALID;
        }
        if (b->dtype != a->dtype || b->numel != a->numel || b->bytes != a->bytes) {
            snprintf(text, room, "rank 0 brings %s %s and rank %d brings %s %s; %s", te_dtype_name(a->dtype), a->shape,
                     i, te_dtype_name(b->dtype), b->shape,
                     b->dtype != a->dtype ? "all ranks must use one format"
                                          : "all ranks must bring the same number of elements");
            return b->dtype != a->dtype ? TE_ERR_DTYPE : TE_ERR_SHAPE;
        }
    }
    return a->kind == TE__ALL_TO_ALL ? te__hub_judge_exchange(hub) : TE_OK;
}

/* Writes an error text that lists the waits of the stuck ranks. */
static void te__hub_tell_stuck(te_thread_hub *hub, char *text) {
    size_t used = (size_t)snprintf(text, TE__WHY_TEXT, "no rank can go on:");
    int i;
    for (i = 0; i < hub->size && used < TE__WHY_TEXT - 128; i++) {
        const te__wait *w = &hub->wait[i];
        if (w->live) continue;
        used += (size_t)snprintf(text + used, TE__WHY_TEXT - used, " rank %d waits in %s for ", i,
                                 te__collective_name(w->kind == TE__WAITS_MESSAGE ? TE__RECV : hub->post[i].kind));
        used += (size_t)(w->kind == TE__WAITS_MESSAGE ? snprintf(text + used, TE__WHY_TEXT - used, "rank %d;", w->from)
                                                 : snprintf(text + used, TE__WHY_TEXT - used, "all ranks;"));
    }
    snprintf(text + used, TE__WHY_TEXT - used,
             " a te_send must come before the te_recv that takes it, and all ranks must make the same other calls in "
             "the same order");
}

/* ---- a rank that fails between its calls ---- */

/* Ends the wait of rank i with an error. The caller has set code and text. */
static void te__hub_release(te_thread_hub *hub, int i) {
    te__wait *w = &hub->wait[i];
    if (w->kind == TE__WAITS_MEETING) hub->arrived--;
    else hub->num_receiving--;
    w->kind = TE__WAITS_NOT;
    w->stuck = w->told = true;
}
/* Returns where failure number n of a rank is kept. */
static te__wait *te__hub_failure(const te_thread_hub *hub, int rank, int64_t n) {
    return &hub->failure[TE__KEPT_FAILURES * rank + (int)(n % TE__KEPT_FAILURES)];
}
/* If another rank has failed, and this one has not heard of it, counts that, and stores code and text in its te__wait.
 * Returns whether this is so. */
static bool te__hub_hears(te_thread_hub *hub, int rank) {
    const int64_t n = hub->fails[rank] + 1;
    te__wait *w = &hub->wait[rank], *failure;
    int i;
    for (i = 0; i < hub->size && hub->fails[i] < n; i++) {}
    if (i == hub->size) return false;
    failure = te__hub_failure(hub, rank, n);
    *failure = *te__hub_failure(hub, i, te__max(n, hub->fails[i] - TE__KEPT_FAILURES + 1));
    hub->fails[rank] = n;
    w->told = true;
    w->code = failure->code;
    snprintf(w->text, sizeof(w->text), "rank %d failed: %.900s", failure->from, failure->text);
    return true;
}
/* Returns the message from `from` that rank `to` gets next, or NULL. Drops messages that were sent before a failure of
 * which the receiver has heard. */
static te__mail *te__hub_next_mail(te_thread_hub *hub, int from, int to) {
    te__mailbox *box = te__hub_box(hub, from, to);
    te__mail *m;
    while ((m = box->first) != NULL && m->fails < hub->fails[to]) {
        box->first = m->next;
        if (!box->first) box->last = NULL;
        free(m);
    }
    return m && m->fails == hub->fails[to] ? m : NULL;
}

/* This rank has failed, and will not make the call that others wait for, or will make. Waits for nobody: each of the
 * others fails once, now if it waits, else in its next call. */
static void te__hub_fail(te_thread_hub *hub, int rank, te_result code, const char *why) {
    te__wait *failure;
    int i;
    te__mutex_lock(&hub->mutex);
    failure = te__hub_failure(hub, rank, ++hub->fails[rank]);
    failure->code = code;
    failure->from = rank;
    snprintf(failure->text, sizeof(failure->text), "%.900s", why);
    for (i = 0; i < hub->size; i++) {
        const te__wait *w = &hub->wait[i];
        if (w->kind == TE__WAITS_MESSAGE && te__hub_next_mail(hub, w->from, i)) continue; /* gets it, and hears later */
        if (w->kind != TE__WAITS_NOT && te__hub_hears(hub, i)) te__hub_release(hub, i);
    }
    te__cond_broadcast(&hub->cond);
    te__mutex_unlock(&hub->mutex);
}
/* Returns whether rank i can continue. A rank whose wait has `live` set is already known to continue. */
static bool te__hub_can_go_on(te_thread_hub *hub, int i) {
    const te__wait *w = &hub->wait[i];
    int k;
    if (w->kind == TE__WAITS_NOT || w->live) return true;
    if (w->kind == TE__WAITS_MEETING && te__hub_is_broken(hub)) return true; /* goes on with an error */
    if (w->kind == TE__WAITS_MESSAGE) return te__hub_next_mail(hub, w->from, i) || hub->wait[w->from].live;
    for (k = 0; k < hub->size; k++)
        if (hub->wait[k].kind != TE__WAITS_MEETING && !hub->wait[k].live) return false;
    return true;
}

/* Ends all waits with an error if the ranks would wait for one another forever. Does nothing if one rank can
 * continue, because that rank may still make the call that the others wait for. */
static void te__hub_find_stuck(te_thread_hub *hub) {
    char text[TE__WHY_TEXT];
    bool more = true;
    int i;
    if (hub->num_receiving == 0) return; /* all waiting ranks wait for the same meeting */
    for (i = 0; i < hub->size; i++) hub->wait[i].live = false;
    while (more)
        for (more = false, i = 0; i < hub->size; i++)
            if (!hub->wait[i].live && te__hub_can_go_on(hub, i)) hub->wait[i].live = more = true;
    for (i = 0; i < hub->size; i++)
        if (hub->wait[i].live && hub->seat[i] != TE__SEAT_LEFT) return;
    te__hub_tell_stuck(hub, text);
    for (i = 0; i < hub->size; i++) {
        te__wait *w = &hub->wait[i];
        if (w->live) continue;
        w->code = TE_ERR_STATE;
        memcpy(w->text, text, sizeof(w->text));
        te__hub_release(hub, i);
    }
    te__cond_broadcast(&hub->cond);
}

/* Waits until all ranks have arrived. All ranks return the same result; on failure `text` gets the reason.
 * The `first` meeting of a collective also fails if a rank has left or has aborted the group. Later meetings must wait
 * in any case: other ranks may still read this rank's memory. */
static te_result te__hub_meet(te_thread_hub *hub, int rank, bool first, char *text) {
    te__wait *w = &hub->wait[rank];
    te_result r = TE_ERR_STATE;
    uint64_t meeting;
    te__mutex_lock(&hub->mutex);
    w->told = false;
    if (first && !te__hub_is_over(hub) && te__hub_hears(hub, rank)) {
        memcpy(text, w->text, TE__WHY_TEXT);
        r = w->code;
        te__mutex_unlock(&hub->mutex);
        return r;
    }
    if (first && te__hub_is_broken(hub)) {
        te__hub_why_over(hub, hub->first_left, text);
        te__mutex_unlock(&hub->mutex);
        return r;
    }
    meeting = hub->meeting;
    hub->arrived++;
    w->stuck = false;
    if (hub->arrived == hub->size) {
        int i;
        for (i = 0; i < hub->size; i++) hub->wait[i].kind = TE__WAITS_NOT;
        hub->arrived = 0;
        hub->verdict = te__hub_judge(hub);
        hub->meeting++;
        te__cond_broadcast(&hub->cond);
    } else if (first) {
        w->kind = TE__WAITS_MEETING;
        te__hub_find_stuck(hub);
    }
    while (hub->meeting == meeting && !w->stuck && !(first && te__hub_is_broken(hub)))
        te__cond_wait(&hub->cond, &hub->mutex);
    if (hub->meeting != meeting) {
        r = hub->verdict;
        if (r != TE_OK) snprintf(text, TE__WHY_TEXT, "%.*s", TE__WHY_TEXT - 1, hub->text);
    } else if (w->stuck) {
        memcpy(text, w->text, TE__WHY_TEXT);
        r = w->code;
    } else {
        hub->arrived--;
        w->kind = TE__WAITS_NOT;
        te__hub_why_over(hub, hub->first_left, text);
    }
    te__mutex_unlock(&hub->mutex);
    return r;
}

/* ---- messages ---- */

/* Allocates a message with room for `bytes` bytes. Returns NULL if memory runs out. */
static te__mail *te__mail_create(te_result result, size_t bytes) {
    size_t head = (sizeof(te__mail) + 15) & ~(size_t)15;
    te__mail *m = bytes <= SIZE_MAX - head ? (te__mail *)malloc(head + bytes) : NULL;
    if (!m) return NULL;
    memset(m, 0, sizeof(*m));
    m->result = result;
    m->bytes = bytes;
    return m;
}

/* Queues a message and gives it to the hub, which frees it. On failure writes the reason to `text`. */
static te_result te__mail_post(te_thread_hub *hub, int from, int to, te__mail *m, char *text) {
    te__mailbox *box = te__hub_box(hub, from, to);
    te_result r = TE_OK;
    te__mutex_lock(&hub->mutex);
    m->fails = hub->fails[from];
    if (box->skip_fails < m->fails) box->skip = 0;
    if (te__hub_is_over(hub) || hub->seat[to] == TE__SEAT_LEFT) {
        r = te__hub_why_over(hub, to, text);
    } else if (box->skip > 0) {
        box->skip--;
    } else {
        if (box->last) box->last->next = m;
        else box->first = m;
        box->last = m;
        m = NULL;
        te__cond_broadcast(&hub->cond);
    }
    te__mutex_unlock(&hub->mutex);
    free(m);
    return r;
}

static te__mail *te__mailbox_pop(te__mailbox *box) {
    te__mail *m = box->first;
    if (m) box->first = m->next;
    if (!box->first) box->last = NULL;
    return m;
}

/* Waits for the next message from rank `from` to rank `to`; the caller frees the message. Returns NULL, and the reason
 * in `text`, if no message will come. A message is still received after its sender has left. */
static te__mail *te__mail_wait(te_thread_hub *hub, int from, int to, char *text) {
    te__mailbox *box = te__hub_box(hub, from, to);
    te__wait *w = &hub->wait[to];
    te__mail *m = NULL;
    te__mutex_lock(&hub->mutex);
    w->told = false;
    w->code = TE_ERR_STATE;
    w->stuck = !te__hub_next_mail(hub, from, to) && !te__hub_is_over(hub) && te__hub_hears(hub, to);
    if (!w->stuck && !te__hub_next_mail(hub, from, to) && !te__hub_is_over(hub) &&
        hub->seat[from] != TE__SEAT_LEFT) {
        w->kind = TE__WAITS_MESSAGE;
        w->from = from;
        hub->num_receiving++;
        te__hub_find_stuck(hub);
        while (!w->stuck && !te__hub_next_mail(hub, from, to) && !te__hub_is_over(hub) &&
               hub->seat[from] != TE__SEAT_LEFT)
            te__cond_wait(&hub->cond, &hub->mutex);
        if (!w->stuck) hub->num_receiving--;
        w->kind = TE__WAITS_NOT;
    }
    if (!w->stuck && !te__hub_is_over(hub) && te__hub_next_mail(hub, from, to)) m = te__mailbox_pop(box);
    if (w->stuck) memcpy(text, w->text, TE__WHY_TEXT);
    else if (!m) te__hub_why_over(hub, from, text);
    te__mutex_unlock(&hub->mutex);
    return m;
}

/* Drops the next message from rank `from` to rank `to`, because its receive has failed. */
static void te__mail_skip(te_thread_hub *hub, int from, int to) {
    te__mailbox *box = te__hub_box(hub, from, to);
    te__mail *m;
    te__mutex_lock(&hub->mutex);
    m = te__hub_next_mail(hub, from, to) ? te__mailbox_pop(box) : NULL;
    if (!m) box->skip++;
    box->skip_fails = hub->fails[to];
    te__mutex_unlock(&hub->mutex);
    free(m);
}

static void te__hub_abort(te_thread_hub *hub, int rank, const char *reason) {
    te__mutex_lock(&hub->mutex);
    if (!hub->aborted)
        snprintf(hub->abort_text, sizeof(hub->abort_text), "rank %d has aborted the group (te_group_abort): %.900s",
                 rank, reason);
    hub->aborted = true;
    te__cond_broadcast(&hub->cond);
    te__mutex_unlock(&hub->mutex);
}
