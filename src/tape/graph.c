/* tape/graph.c: graphs, and the numbers that the host writes before each launch. This file must not depend on modules
 * or optimizers. Benchmark: "step of a layer" in tests/bench/h200.csv, and tests/bench/notes.md. */

/* ---- parts, and the state ---- */

static te__graph_part *te__graph_find_part(te_graph *g, const void *owner) {
    int i;
    for (i = 0; i < g->num_parts; i++)
        if (g->parts[i].owner == owner) return &g->parts[i];
    return NULL;
}
/* Adds a part to a graph for `owner`, for example an optimizer. The part has `bytes` bytes of host memory for the
 * owner's data, set to zero. Returns the part, or NULL with an error. */
static te__graph_part *te__graph_add_part(te_graph *g, void *owner, size_t bytes) {
    te__graph_part *p;
    void *data;
    if (!te__grow(g->te, (void **)&g->parts, &g->cap_parts, g->num_parts, sizeof(te__graph_part))) return NULL;
    data = te__alloc_zero(g->te, bytes);
    if (!data) return NULL;
    p = &g->parts[g->num_parts++];
    memset(p, 0, sizeof(*p));
    p->owner = owner;
    p->data = data;
    p->bytes = bytes;
    return p;
}
/* Returns whether the graph steps an optimizer. */
static bool te__graph_steps(const te_graph *g) {
    int i;
    for (i = 0; i < g->num_parts && !g->parts[i].steps; i++) {}
    return i < g->num_parts;
}
/* Reserves `n` words of 8 bytes, which the host writes before each launch. Returns the first index, or -1 with an
 * error. */
static int te__graph_take_words(te_graph *g, int n) {
    if (g->num_words + n > TE__GRAPH_WORDS) {
        te__fail(g->te, TE_ERR_UNSUPPORTED, "a graph can hold %d steps of optimizers at most",
                 (TE__GRAPH_WORDS - TE__GRAPH_RNG_WORDS) / n);
        return -1;
    }
    g->num_words += n;
    return g->num_words - n;
}
/* Returns `n` numbers of the graph's state as a tensor of the innermost scope. They begin at byte `byte`. */
static te_tensor *te__graph_view(te_graph *g, te_dtype dtype, int64_t byte, int64_t n) {
    return te__alias_1d(g->state, byte, dtype, n);
}

/* ---- the end of a graph ---- */

static void te__graph_empty(te_ctx *te, te_graph *g) {
    int i;
    te->device->graph_close(te, g);
    for (i = 0; i < g->num_held; i++) te__buffer_release(g->held[i]);
    for (i = 0; i < g->num_parts; i++) te__free(te, g->parts[i].data);
    for (i = 0; i < g->num_vars; i++) te__var_release(te, g->vars[i]);
    te__free(te, g->held);
    te__free(te, g->parts);
    te__free(te, g->vars);
    te_tensor_release(g->state);
    te_tensor_release(g->rng);
    te__arena_close(te, g->arena);
    g->te = NULL;
}
static void te__graph_free(te_graph *g) {
    te_allocator allocator = g->host_allocator;
    te__raw_free(&allocator, g, sizeof(*g));
}

/* Drops a capture that has failed. The device has already ended the capture. */
static void te__capture_drop(te_ctx *te) {
    te_graph *g = te->capture;
    int i;
    te->capture = NULL;
    te__deferred_forget_capture(te, g->id);
    for (i = 0; i < g->num_vars; i++) { /* no launch will compute these gradients */
        te__var *v = g->vars[i];
        te_tensor_release(v->grad);
        v->grad = NULL;
        if (!v->shard_grad || v->shard_grad->buffer->arena != g->arena) continue; /* it was there before the capture */
        te_tensor_release(v->shard_grad);
        v->shard_grad = NULL;
    }
    te__graph_empty(te, g);
    te__graph_free(g);
}

/* Breaks every graph that keeps data of `owner`, which is being destroyed. te_graph_launch then reports `why`, a static
 * text. Inside a capture that keeps such data, `what` is refused. */
static void te__graphs_forget(te_ctx *te, const void *owner, const char *why, const char *what) {
    te_graph *g;
    te__graph_part *p;
    for (g = te->graphs; g; g = g->next)
        if ((p = te__graph_find_part(g, owner)) != NULL) {
            p->owner = NULL;
            g->broken = why;
        }
    if (te->capture && (p = te__graph_find_part(te->capture, owner)) != NULL) {
        p->owner = NULL;
        te__refuse_capture(te, what, "destroy it after the graph");
    }
}

/* Called when the context is destroyed. Ends an open capture and empties all graphs. The graph handles stay valid for
 * te_graph_destroy. */
static void te__graphs_leave(te_ctx *te) {
    if (te->capture) {
        te->device->capture_end(te, NULL);
        te__capture_drop(te);
    }
    if (te->graphs) te->device->synchronize(te);
    while (te->graphs) {
        te_graph *g = te->graphs;
        te->graphs = g->next;
        te__graph_empty(te, g);
    }
}

/* ---- the interface ---- */

static te_result te__graph_may_begin(te_ctx *te) {
    te_result result;
    if (te->error_code != TE_OK) return te->error_code;
    if (te__refuse_hook(te, "te_graph_begin") != TE_OK) return TE_ERR_STATE;
    if (te->capture)
        return te__fail(te, TE_ERR_STATE, "te_graph_begin: a capture is under way already; te_graph_end is missing");
    if (te->rng.fork)
        return te__fail(te, TE_ERR_STATE,
                        "te_graph_begin: inside te_rng_fork_begin(\"%s\"); begin and end the region inside the capture",
                        te->rng.tracker[te->rng.fork - 1].name);
    if (te->warming) return te__fail(te, TE_ERR_STATE, "te_graph_begin: between te_warmup_begin and te_warmup_end");
    result = te__ask_capture(te, true);
    if (result == TE_OK) result = te->device->synchronize(te);
    return result == TE_OK ? te__streams_synchronize(te) : result; /* all streams are idle now, so te__stream_wait has
                                                                    * nothing to wait for inside the capture */
}

TE_API te_result te_graph_begin(te_ctx *te) {
    const int64_t bytes = 8 * TE__GRAPH_WORDS;
    te_graph *g;
    te_result result;
    int i;
    if (!te) return TE_ERR_STATE;
    result = te__graph_may_begin(te);
    if (result != TE_OK) return result;
    /* The graph is in memory that outlives the context: te_graph_destroy may be called after te_ctx_destroy. */
    g = (te_graph *)te__raw_alloc(&te->host_allocator, sizeof(te_graph));
    if (!g) return te__fail(te, TE_ERR_OUT_OF_MEMORY, "%s: te_graph_begin", te__no_memory_text);
    memset(g, 0, sizeof(*g));
    g->te = te;
    g->host_allocator = te->host_allocator;
    g->id = ++te->captures;
    g->rng_begin = te->rng_offset;
    for (i = 0; i < te->rng.num_trackers; i++) g->tracker_begin[i] = te->rng.tracker[i].offset;
    g->num_words = TE__GRAPH_RNG_WORDS;
    g->launches = te->jit_stats.launches;
    g->arena = te__arena_create(te);
    if (!g->arena) {
        te__graph_free(g);
        return TE_ERR_OUT_OF_MEMORY;
    }
    te->capture = g;
    te__frame_begin(te);
    g->state = te_tensor_retain(te_tensor_empty(te, TE_U8, 1, &bytes));
    g->rng = g->state ? te_tensor_retain(te__graph_view(g, TE_I64, 0, TE__GRAPH_RNG_WORDS)) : NULL;
    te__frame_end(te, NULL, 0);
    result = te->error_code == TE_OK ? te->device->capture_begin(te) : te->error_code;
    if (result == TE_OK) return TE_OK;
    te->capture = NULL;
    te__graph_empty(te, g);
    te__graph_free(g);
    return result;
}

/* Reorders `held`: buffers that the graph writes come first. */
static void te__graph_sort_held(te_graph *g) {
    int i;
    for (i = 0; i < g->num_held; i++)
        if (g->held[i]->written == g->id) {
            te__buffer *b = g->held[i];
            g->held[i] = g->held[g->num_written];
            g->held[g->num_written++] = b;
        }
}

TE_API te_graph *te_graph_end(te_ctx *te) {
    te_graph *g;
    bool whole;
    int i;
    if (!te) return NULL;
    g = te->capture;
    if (!g) {
        te__fail(te, TE_ERR_STATE, "te_graph_end without te_graph_begin");
        return NULL;
    }
    if (te__refuse_hook(te, "te_graph_end") != TE_OK) return NULL;
    te__ask_capture(te, false);
    if (te->rng.fork)
        te__fail(te, TE_ERR_STATE,
                 "te_graph_end: inside te_rng_fork_begin(\"%s\"); te_rng_fork_end belongs to the capture",
                 te->rng.tracker[te->rng.fork - 1].name);
    if (te__num_deferred(te) > 0)
        te__fail(te, TE_ERR_STATE,
                 "te_graph_end: %d weight gradients of the capture wait for te_backward_dw, which belongs to it",
                 te__num_deferred(te));
    if (g->failed && te->error_code == TE_OK)
        te__fail(te, TE_ERR_STATE,
                 "te_graph_end: a call since te_graph_begin has failed; its error was cleared, but there is no graph");
    for (i = 0; i < g->num_parts; i++)
        if (g->parts[i].owner) g->parts[i].captured(g, g->parts[i].owner, g->parts[i].data);
    if (te->rng.fork) { /* a random fork is still open, which is an error. The random offsets return to their values
                         * from before the capture */
        te->rng.own_offset = g->rng_begin;
        te->rng_offset = g->tracker_begin[te->rng.fork - 1];
    } else {
        g->rng_used = te->rng_offset - g->rng_begin;
        te->rng_offset = g->rng_begin;
    }
    g->launches = te->jit_stats.launches - g->launches;
    te->jit_stats.launches -= g->launches;
    whole = te->error_code == TE_OK;
    whole = te->device->capture_end(te, whole ? g : NULL) == TE_OK && whole;
    if (!whole) {
        te__capture_drop(te);
        return NULL;
    }
    for (i = 0; i < g->num_vars; i++) te__var_release(te, g->vars[i]);
    g->num_vars = 0;
    te__graph_sort_held(g);
    te->capture = NULL;
    g->next = te->graphs;
    te->graphs = g;
    return g;
}

/* Writes the graph's state to the device, and launches the graph. */
static te_result te__graph_launch(te_ctx *te, te_graph *g) {
    te_result result = TE_OK;
    int i;
    for (i = 0; i < g->num_parts && result == TE_OK; i++)
        result = g->parts[i].before(g, g->parts[i].owner, g->parts[i].data);
    if (result == TE_OK && (g->draws || g->num_words > TE__GRAPH_RNG_WORDS)) {
        g->word[0] = te->seed;
        g->word[1] = te->rng_offset;
        result = te->device->upload(te, te__data(g->state), g->word, (size_t)g->num_words * sizeof(g->word[0]));
    }
    return result == TE_OK ? te->device->graph_launch(te, g) : result;
}

TE_API te_result te_graph_launch(te_graph *g) {
    te_ctx *te;
    te__floats floats;
    te_result result = TE_OK;
    int i;
    if (!g || !g->te) return TE_ERR_STATE;
    te = g->te;
    if (te->error_code != TE_OK) return te->error_code;
    if (te__refuse_hook(te, "te_graph_launch") != TE_OK) return TE_ERR_STATE;
    if (te->capture) return te__refuse_capture(te, "te_graph_launch", "launch both graphs one after the other");
    if (te->warming) return TE_OK; /* its kernels are compiled already */
    if (te->rng.fork)
        return te__fail(te, TE_ERR_STATE,
                        "te_graph_launch: inside te_rng_fork_begin(\"%s\"); launch it before or after that region",
                        te->rng.tracker[te->rng.fork - 1].name);
    if (g->broken) return te__fail(te, TE_ERR_STATE, "te_graph_launch: %s", g->broken);
    /* A graph without an optimizer is a part of a training step, and a later part may fail. So te__ask_step saves what
     * must then be restored. A graph with an optimizer ends the step, so no later part can fail. */
    if (!te__graph_steps(g)) result = te__ask_step(te);
    floats = te__floats_begin();
    if (result == TE_OK) result = te__graph_launch(te, g);
    te__floats_end(&floats);
    if (result != TE_OK) {
        te__step_fails(te);
        for (i = 0; i < g->num_parts; i++)
            if (g->parts[i].failed) g->parts[i].failed(g, g->parts[i].owner, result);
        return result;
    }
    if (te__graph_steps(g)) te__step_ends(te);
    te->rng_offset += g->rng_used;
    te->jit_stats.launches += g->launches;
    g->arena->launches++;
    g->arena->launched_at = ++te->writes;
    for (i = 0; i < g->num_written; i++) te__buffer_touch(g->held[i]);
    for (i = 0; i < g->num_parts; i++) g->parts[i].after(g, g->parts[i].owner, g->parts[i].data);
    return TE_OK;
}

TE_API void te_graph_destroy(te_graph *g) {
    te_ctx *te;
    te_graph **at;
    if (!g) return;
    te = g->te;
    if (te && te->capture) {
        te__refuse_capture(te, "te_graph_destroy", "destroy it after te_graph_end");
        return;
    }
    if (te && te__refuse_hook(te, "te_graph_destroy") != TE_OK) return;
    if (te) {
        te->device->synchronize(te);
        for (at = &te->graphs; *at != g;) at = &(*at)->next;
        *at = g->next;
        te__graph_empty(te, g);
    }
    te__graph_free(g);
}
