/* tape/deferred.c: the queue of work that a backward pass postpones, in the order of the calls of te__defer. This file
 * must not depend on what the work does. */

typedef te_result (*te__deferred_fn)(te_ctx *te, void *state);
typedef struct te__deferred {
    struct te__deferred *next;
    void *owner; /* te__deferred_take selects work by its owner */
    te__deferred_fn run;
    void (*release)(te_ctx *te, void *state);
    uint64_t capture; /* id of the graph whose capture was open when te__defer was called; 0: none */
    void *state;
    size_t state_size;
} te__deferred;

/* Appends work to the queue. Copies the bytes of `state`. release(state) is called when the work has run or is dropped,
 * or when te__defer fails. */
static te_result te__defer(te_ctx *te, void *owner, te__deferred_fn run, void (*release)(te_ctx *te, void *state),
                           void *state, size_t state_size) {
    te__deferred *d = (te__deferred *)te__alloc_zero(te, sizeof(te__deferred)), **end = &te->deferred;
    void *copy = d ? te__alloc(te, state_size) : NULL;
    if (!copy) {
        te__free(te, d);
        release(te, state);
        return TE_ERR_OUT_OF_MEMORY;
    }
    memcpy(copy, state, state_size);
    d->owner = owner;
    d->run = run;
    d->release = release;
    d->capture = te->capture ? te->capture->id : 0;
    d->state = copy;
    d->state_size = state_size;
    while (*end) end = &(*end)->next;
    *end = d;
    return TE_OK;
}

static void te__deferred_free(te_ctx *te, te__deferred *d) {
    d->release(te, d->state);
    te__free(te, d->state);
    te__free(te, d);
}

typedef bool (*te__owner_fn)(const void *owner, const void *user);

/* Removes an entry d from the queue if the function call of(d->owner, user) returns true. If `run` is true, also runs
 * the removed entries in order. After an entry has failed, the remaining ones are removed, but do not run. */
static te_result te__deferred_take(te_ctx *te, te__owner_fn of, const void *user, bool run) {
    te__deferred **at = &te->deferred;
    te_result result = TE_OK;
    while (*at) {
        te__deferred *d = *at;
        if (!of(d->owner, user)) {
            at = &d->next;
            continue;
        }
        *at = d->next;
        if (run && result == TE_OK && d->capture != (te->capture ? te->capture->id : 0))
            result = te__fail(te, TE_ERR_STATE,
                              "te_backward_dw %s a graph, and te_backward was called %s it: both belong to one capture",
                              te->capture ? "inside" : "outside of", d->capture ? "inside" : "outside of");
        if (run && result == TE_OK) {
            te__frame_begin(te);
            result = d->run(te, d->state);
            te__frame_end(te, NULL, 0);
        }
        te__deferred_free(te, d);
    }
    return result;
}

static bool te__any_owner(const void *owner, const void *user) {
    (void)owner, (void)user;
    return true;
}
static bool te__same_owner(const void *owner, const void *user) { return owner == user; }
/* Drops all postponed work except the first `keep` entries, after a backward pass that has failed. */
static void te__deferred_cut(te_ctx *te, int keep) {
    te__deferred **at = &te->deferred;
    while (*at && keep-- > 0) at = &(*at)->next;
    while (*at) {
        te__deferred *d = *at;
        *at = d->next;
        te__deferred_free(te, d);
    }
}
/* Drops the postponed work of `owner`, or all postponed work if `owner` is NULL. */
static void te__deferred_forget(te_ctx *te, const void *owner) {
    te__deferred_take(te, owner ? te__same_owner : te__any_owner, owner, false);
}

/* Drops the work of a capture that has failed. */
static void te__deferred_forget_capture(te_ctx *te, uint64_t capture) {
    te__deferred **at = &te->deferred;
    while (*at) {
        te__deferred *d = *at;
        if (d->capture != capture) {
            at = &d->next;
            continue;
        }
        *at = d->next;
        te__deferred_free(te, d);
    }
}

static int te__deferred_length(const te_ctx *te) {
    const te__deferred *d;
    int n = 0;
    for (d = te->deferred; d; d = d->next) n++;
    return n;
}
/* Returns how many entries of the queue belong to the current capture. Outside of captures all entries count. */
static int te__num_deferred(const te_ctx *te) {
    const te__deferred *d;
    int n = 0;
    for (d = te->deferred; d; d = d->next) n += !te->capture || d->capture == te->capture->id;
    return n;
}
