/* tape/random.c: the random state of a context, the named random states, and the numbers that operations draw. This
 * file must not depend on which operation draws. */

TE_API void te_seed(te_ctx *te, uint64_t seed) { te_rng_set(te, seed, 0); }
TE_API void te_rng_get(const te_ctx *te, uint64_t *seed, uint64_t *offset) {
    if (seed) *seed = te ? te->seed : 0;
    if (offset) *offset = te ? te->rng_offset : 0;
}
TE_API void te_rng_set(te_ctx *te, uint64_t seed, uint64_t offset) {
    if (!te) return;
    if (te->capture) {
        te__refuse_capture(te, "te_seed, te_rng_set",
                           "set the random state before te_graph_begin, or before a te_graph_launch");
        return;
    }
    te->seed = seed;
    te->rng_offset = offset;
}

static te__rng_state te__rng_now(const te_ctx *te) {
    te__rng_state s = te->rng;
    s.seed = te->seed;
    s.offset = te->rng_offset;
    return s;
}
static void te__rng_back(te_ctx *te, te__rng_state s) {
    int made = te->rng.num_trackers;
    te->seed = s.seed;
    te->rng_offset = s.offset;
    /* Named states that were added after te__rng_now are kept. */
    memcpy(s.tracker + s.num_trackers, te->rng.tracker + s.num_trackers,
           (size_t)(made - s.num_trackers) * sizeof(s.tracker[0]));
    s.num_trackers = made;
    te->rng = s;
}

/* ---- named states ---- */

static te__rng_tracker *te__rng_tracker_find(te_ctx *te, const char *name, const char *who) {
    int i;
    for (i = 0; name && i < te->rng.num_trackers; i++)
        if (strcmp(te->rng.tracker[i].name, name) == 0) return &te->rng.tracker[i];
    te__fail(te, TE_ERR_INVALID, "%s: there is no random state \"%s\"; te_rng_tracker_add makes one", who,
             name ? name : "(NULL)");
    return NULL;
}
TE_API te_result te_rng_tracker_add(te_ctx *te, const char *name, uint64_t seed) {
    int i;
    if (!te) return TE_ERR_STATE;
    if (!name || !name[0] || strlen(name) >= sizeof(te->rng.tracker[0].name))
        return te__fail(te, TE_ERR_INVALID,
                        "te_rng_tracker_add: the name \"%.80s\"; one of 1 to %d characters is needed",
                        name ? name : "(NULL)", (int)sizeof(te->rng.tracker[0].name) - 1);
    for (i = 0; i < te->rng.num_trackers; i++) {
        if (strcmp(te->rng.tracker[i].name, name) == 0)
            return te__fail(te, TE_ERR_INVALID,
                            "te_rng_tracker_add: \"%s\" is there already; te_rng_tracker_set gives it another state",
                            name);
        if (te->rng.tracker[i].first_seed == seed)
            return te__fail(te, TE_ERR_INVALID,
                            "te_rng_tracker_add: \"%s\" has the seed %llu already, and \"%s\" would draw the same "
                            "numbers; take another seed",
                            te->rng.tracker[i].name, (unsigned long long)seed, name);
    }
    if (te->rng.num_trackers == TE_MAX_RNG_TRACKERS)
        return te__fail(te, TE_ERR_INVALID,
                        "te_rng_tracker_add: \"%s\" would be number %d; a context has at most %d (TE_MAX_RNG_TRACKERS)",
                        name, te->rng.num_trackers + 1, TE_MAX_RNG_TRACKERS);
    i = te->rng.num_trackers++;
    memset(&te->rng.tracker[i], 0, sizeof(te->rng.tracker[i]));
    memcpy(te->rng.tracker[i].name, name, strlen(name) + 1);
    te->rng.tracker[i].seed = te->rng.tracker[i].first_seed = seed;
    return TE_OK;
}

/* Returns the named state that is in use. Returns NULL if the context's own state is in use. */
static te__rng_tracker *te__rng_forked(te_ctx *te) { return te->rng.fork ? &te->rng.tracker[te->rng.fork - 1] : NULL; }
/* Saves the random state that is in use, and makes state number `fork` the one in use. Number 0 is the context's own
 * state. */
static void te__rng_swap(te_ctx *te, int fork) {
    te__rng_tracker *from = te__rng_forked(te), *to;
    if (from) {
        from->seed = te->seed;
        from->offset = te->rng_offset;
    } else {
        te->rng.own_seed = te->seed;
        te->rng.own_offset = te->rng_offset;
    }
    te->rng.fork = fork;
    to = te__rng_forked(te);
    te->seed = to ? to->seed : te->rng.own_seed;
    te->rng_offset = to ? to->offset : te->rng.own_offset;
}
TE_API te_result te_rng_fork_begin(te_ctx *te, const char *name) {
    te__rng_tracker *t;
    if (!te) return TE_ERR_STATE;
    t = te__rng_tracker_find(te, name, "te_rng_fork_begin");
    if (!t) return TE_ERR_INVALID;
    if (te->rng.num_forks == TE__MAX_FORKS)
        return te__fail(te, TE_ERR_STATE,
                        "te_rng_fork_begin: %d regions are open, which is the most; is a te_rng_fork_end missing?",
                        TE__MAX_FORKS);
    te->rng.outer_fork[te->rng.num_forks++] = te->rng.fork;
    te__rng_swap(te, (int)(t - te->rng.tracker) + 1);
    return TE_OK;
}
TE_API te_result te_rng_fork_end(te_ctx *te) {
    if (!te) return TE_ERR_STATE;
    if (te->rng.num_forks == 0) return te__fail(te, TE_ERR_STATE, "te_rng_fork_end without te_rng_fork_begin");
    te->rng.num_forks--;
    te__rng_swap(te, te->rng.outer_fork[te->rng.num_forks]);
    return TE_OK;
}
TE_API te_result te_rng_tracker_get(te_ctx *te, const char *name, uint64_t *seed, uint64_t *offset) {
    te__rng_tracker *t = te ? te__rng_tracker_find(te, name, "te_rng_tracker_get") : NULL;
    if (!t) return te ? TE_ERR_INVALID : TE_ERR_STATE;
    if (seed) *seed = te__rng_forked(te) == t ? te->seed : t->seed;
    if (offset) *offset = te__rng_forked(te) == t ? te->rng_offset : t->offset;
    return TE_OK;
}
TE_API te_result te_rng_tracker_set(te_ctx *te, const char *name, uint64_t seed, uint64_t offset) {
    te__rng_tracker *t = te ? te__rng_tracker_find(te, name, "te_rng_tracker_set") : NULL;
    if (!t) return te ? TE_ERR_INVALID : TE_ERR_STATE;
    if (te->capture)
        return te__refuse_capture(te, "te_rng_tracker_set",
                                  "set random states before te_graph_begin, or before a te_graph_launch");
    t->seed = seed;
    t->offset = offset;
    if (te__rng_forked(te) == t) {
        te->seed = seed;
        te->rng_offset = offset;
    }
    return TE_OK;
}
TE_API int te_rng_num_trackers(const te_ctx *te) { return te ? te->rng.num_trackers : 0; }
TE_API const char *te_rng_tracker_name(const te_ctx *te, int index) {
    return te && index >= 0 && index < te->rng.num_trackers ? te->rng.tracker[index].name : NULL;
}

/* ---- drawing ---- */

/* The record that a graph keeps of a named random state. A launch begins at the state's current offset, and then adds
 * `used` to this offset. */
typedef struct te__tracker_part {
    uint64_t begin, used;
    int word;
} te__tracker_part;
static te_result te__tracker_before(te_graph *g, void *owner, void *data) {
    const te__rng_tracker *t = (const te__rng_tracker *)owner;
    const te__tracker_part *p = (const te__tracker_part *)data;
    g->word[p->word] = t->seed;
    g->word[p->word + 1] = t->offset;
    return TE_OK;
}
static void te__tracker_after(te_graph *g, void *owner, void *data) {
    (void)g;
    ((te__rng_tracker *)owner)->offset += ((te__tracker_part *)data)->used;
}
static void te__tracker_captured(te_graph *g, void *owner, void *data) {
    te__rng_tracker *t = (te__rng_tracker *)owner;
    te__tracker_part *p = (te__tracker_part *)data;
    (void)g;
    p->used = t->offset - p->begin;
    t->offset = p->begin;
}
static te__tracker_part *te__tracker_part_of(te_graph *g, te__rng_tracker *t) {
    te__graph_part *part = te__graph_find_part(g, t);
    te__tracker_part *p;
    int word;
    if (part) return (te__tracker_part *)part->data;
    word = te__graph_take_words(g, TE__GRAPH_RNG_WORDS);
    part = word >= 0 ? te__graph_add_part(g, t, sizeof(te__tracker_part)) : NULL;
    if (!part) return NULL;
    part->before = te__tracker_before;
    part->after = te__tracker_after;
    part->captured = te__tracker_captured;
    p = (te__tracker_part *)part->data;
    p->word = word;
    p->begin = g->tracker_begin[t - g->te->rng.tracker];
    return p;
}

/* The random state that one random operation gets. */
typedef struct te__draw {
    uint64_t seed, offset;
    te_tensor *rng; /* in a capture: the random state at the start of a launch, in device memory; the kernel adds
                     * `offset` to it. Outside of captures: NULL */
} te__draw;

/* Returns true if `offset`, an offset of the random state in use, was drawn before the capture began. */
static bool te__draws_before(te_ctx *te, uint64_t offset) {
    te__tracker_part *p = te->rng.fork ? te__tracker_part_of(te->capture, te__rng_forked(te)) : NULL;
    return offset < (te->rng.fork ? p ? p->begin : 0 : te->capture->rng_begin);
}

/* Draws `count` offsets from the random state in force. */
static te__draw te__rng_draw(te_ctx *te, uint64_t count) {
    te__draw d;
    d.seed = te->seed;
    d.offset = te->rng_offset;
    d.rng = NULL;
    te->rng_offset += count;
    if (te->capture && te->tape.replays && te__draws_before(te, d.offset))
        te__fail(te, TE_ERR_UNSUPPORTED,
                 "a graph's capture: a function that ran before the capture runs again inside and draws random numbers "
                 "again, and no launch could know which; capture "
                 "both runs (the forward pass and its te_backward) in one graph, or run it without te_checkpoint");
    if (te->capture && te->rng.fork) {
        te__tracker_part *p = te__tracker_part_of(te->capture, te__rng_forked(te));
        if (p) d.offset -= p->begin;
        if (p) d.rng = te__graph_view(te->capture, TE_I64, 8 * p->word, TE__GRAPH_RNG_WORDS);
    } else if (te->capture) {
        d.offset -= te->capture->rng_begin;
        d.rng = te->capture->rng;
        te->capture->draws = true;
    }
    return d;
}
