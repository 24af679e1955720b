/* core/memory.c: the caching pool of device memory, the arenas of graphs, and buffers.
 *
 * The operations of a context run one after another, so a released block is free at once. If another stream has used
 * the block, it is free after an event on that stream. */

static te_result te__device_enter(te_ctx *te, bool *entered) {
    te_result result;
    *entered = false;
    if (te__is_forked(te)) return te__refuse_fork(te);
    result = te->device->enter ? te->device->enter(te, entered) : TE_OK;
    if (result == TE_OK) te->regions++;
    return result;
}
static void te__device_leave(te_ctx *te, bool entered) {
    te->regions--;
    if (entered) te->device->leave(entered);
}

/* Rounds `bytes` up to a multiple of `step`: an eighth of the next power of two, at least 512. A large block wastes
 * less than a fifth. */
static size_t te__pool_capacity(size_t bytes) {
    size_t step = 512;
    while (step * 8 < bytes) step *= 2;
    return (bytes + step - 1) / step * step;
}

/* Returns the index of the pool's first list of free blocks with a capacity of at least `capacity`. */
static int te__pool_find(const te__pool *pool, size_t capacity) {
    int low = 0, high = pool->num_lists;
    while (low < high) {
        int middle = (low + high) / 2;
        if (pool->lists[middle].capacity < capacity)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static void te__pool_trim(te_ctx *te) {
    te__pool *pool = &te->pool;
    int i;
    for (i = 0; i < pool->num_lists; i++) {
        te__free_block *b = pool->lists[i].first, *next;
        for (; b; b = next) {
            next = b->next;
            te->device->release(te, b->data, pool->lists[i].capacity);
            pool->stats.reserved -= pool->lists[i].capacity;
            b->next = pool->spare;
            pool->spare = b;
        }
        pool->lists[i].first = NULL;
    }
}

enum { TE__BYTES_TEXT = 32 };
static const char *te__bytes_text(size_t bytes, char *out) {
    if (bytes < 1u << 20)
        snprintf(out, TE__BYTES_TEXT, "%d bytes", (int)bytes);
    else
        snprintf(out, TE__BYTES_TEXT, "%.1f MiB", (double)bytes / 1048576.0);
    return out;
}

static te_result te__pool_fail(te_ctx *te, size_t bytes) {
    char asked[TE__BYTES_TEXT], unused[TE__BYTES_TEXT], total[TE__BYTES_TEXT], held[TE__BYTES_TEXT],
        room[3 * TE__BYTES_TEXT];
    size_t free_bytes = 0, total_bytes = 0;
    if (te->device->memory_info) te->device->memory_info(te, &free_bytes, &total_bytes);
    snprintf(room, sizeof(room), "it is not known how much is free");
    if (total_bytes)
        snprintf(room, sizeof(room), "%s free of %s", te__bytes_text(free_bytes, unused),
                 te__bytes_text(total_bytes, total));
    return te__fail(te, TE_ERR_OUT_OF_MEMORY,
                    "%s: out of memory: %s asked for, %s, %s held by live tensors of this context. A smaller batch, "
                    "te_scope_begin/te_scope_end "
                    "around each step, te_checkpoint or te_cpu_offload_begin need less",
                    te->device_name, te__bytes_text(bytes, asked), room,
                    te__bytes_text(te->pool.stats.allocated, held));
}

/* Takes a free block out of the pool. The capacity of the block is at least *want, and at most a quarter larger. Sets
 * *want to this capacity. Returns NULL if the pool has no such block. */
static void *te__pool_take(te__pool *pool, size_t *want) {
    size_t most = *want + *want / 4;
    int i = te__pool_find(pool, *want);
    for (; i < pool->num_lists && pool->lists[i].capacity <= most; i++) {
        te__free_block *b = pool->lists[i].first;
        if (!b) continue;
        pool->lists[i].first = b->next;
        b->next = pool->spare;
        pool->spare = b;
        *want = pool->lists[i].capacity;
        return b->data;
    }
    return NULL;
}

/* Returns the index of the list for this capacity. Adds the list if there is none. Returns -1 without host memory. */
static int te__pool_list(te_ctx *te, te__pool *pool, size_t capacity) {
    int i = te__pool_find(pool, capacity);
    if (i < pool->num_lists && pool->lists[i].capacity == capacity) return i;
    if (!te__try_grow(te, (void **)&pool->lists, &pool->cap_lists, pool->num_lists, sizeof(te__free_list))) return -1;
    memmove(pool->lists + i + 1, pool->lists + i, (size_t)(pool->num_lists - i) * sizeof(te__free_list));
    pool->lists[i].capacity = capacity;
    pool->lists[i].first = NULL;
    pool->num_lists++;
    return i;
}
static bool te__pool_add_spare(te_ctx *te, te__pool *pool) {
    te__free_block *b = (te__free_block *)te__try_alloc(te, sizeof(te__free_block));
    if (!b) return false;
    b->next = pool->spare;
    pool->spare = b;
    return true;
}
/* Adds a free block to its list. Returns false if there is no host memory. */
static bool te__pool_put(te_ctx *te, te__pool *pool, void *data, size_t capacity) {
    int i = te__pool_list(te, pool, capacity);
    te__free_block *b;
    if (i < 0 || (!pool->spare && !te__pool_add_spare(te, pool))) return false;
    b = pool->spare;
    pool->spare = b->next;
    b->data = data;
    b->next = pool->lists[i].first;
    pool->lists[i].first = b;
    return true;
}
/* Adds a free block to the context's pool. Never fails: without host memory, the block goes back to the device. */
static void te__pool_keep(te_ctx *te, void *data, size_t capacity) {
    if (te__pool_put(te, &te->pool, data, capacity)) return;
    te->device->release(te, data, capacity);
    te->pool.stats.reserved -= capacity;
}

/* Puts a released block back into the pool. Another stream may use the block until the event `used` has passed. Takes
 * over the caller's reference to this event. */
static void te__pool_defer(te_ctx *te, void *data, size_t capacity, te__event *used) {
    te__pool *pool = &te->pool;
    te__free_block *b;
    bool waits = !used->awaited && !te__event_passed(used); /* used->awaited: the context's own stream, which uses the
                                                             * block next, already waits for the event */
    if (!waits || (!pool->spare && !te__pool_add_spare(te, pool))) {
        if (waits) te__event_synchronize(used);
        te__event_release(used);
        te__pool_keep(te, data, capacity);
        return;
    }
    b = pool->spare;
    pool->spare = b->next;
    b->data = data;
    b->capacity = capacity;
    b->used = used;
    b->next = pool->pending;
    pool->pending = b;
}
/* Puts each pending block into its list of free blocks if the block's event has passed, or if the context's stream
 * already waits for the event. If `wait` is true, first waits for the events. */
static void te__pool_reclaim(te_ctx *te, bool wait) {
    te__pool *pool = &te->pool;
    te__free_block *b, **at = &pool->pending;
    while ((b = *at) != NULL) {
        if (wait) te__event_synchronize(b->used);
        if (!b->used->awaited && !te__event_passed(b->used)) {
            at = &b->next;
            continue;
        }
        *at = b->next;
        te__event_release(b->used);
        b->next = pool->spare; /* te__pool_put takes this list node */
        pool->spare = b;
        te__pool_keep(te, b->data, b->capacity);
    }
}

/* Returns a block of at least `bytes`, and its *capacity; NULL after an error. If `arena` is not NULL, allocates the
 * block's list entry now, because te__pool_release must not fail. */
static void *te__pool_alloc(te_ctx *te, te__arena *arena, size_t bytes, size_t *capacity) {
    te__pool *pool = &te->pool;
    size_t want = te__pool_capacity(bytes);
    void *data = arena ? te__pool_take(&arena->pool, &want) : NULL;
    bool adopt = arena && !data;
    pool->stats.allocs++;
    if (pool->pending && !te->capture) te__pool_reclaim(te, false);
    if (!data) data = te__pool_take(pool, &want);
    if (!data) {
        data = te->device->alloc(te, want);
        if (!data) { /* Gives the cached blocks back to the device, which must be idle. In a capture it is idle,
                      * because te_graph_begin has waited for it */
            if (!te->capture) te->device->synchronize(te);
            te__pool_reclaim(te, true);
            te__pool_trim(te);
            data = te->device->alloc(te, want);
        }
        if (!data) {
            te__pool_fail(te, bytes);
            return NULL;
        }
        pool->stats.device_allocs++;
        pool->stats.reserved += want;
        if (pool->stats.reserved > pool->stats.peak_reserved) pool->stats.peak_reserved = pool->stats.reserved;
    }
    if (adopt && (te__pool_list(te, &arena->pool, want) < 0 || !te__pool_add_spare(te, &arena->pool))) {
        te__pool_keep(te, data, want);
        te__fail(te, TE_ERR_OUT_OF_MEMORY, "%s: the memory of a graph", te__no_memory_text);
        return NULL;
    }
    pool->stats.allocated += want;
    if (pool->stats.allocated > pool->stats.peak_allocated) pool->stats.peak_allocated = pool->stats.allocated;
    *capacity = want;
    return data;
}

/* Takes back a block. `used` is the event after the block's last copy on another stream, or NULL. The function takes
 * over a reference to `used`. */
static void te__pool_release(te_ctx *te, te__arena *arena, void *data, size_t capacity, te__event *used) {
    te->pool.stats.allocated -= capacity;
    if (used && arena && arena->open) { /* the graph's next launch writes this block and does not wait for the event */
        te__event_synchronize(used);
        te__event_release(used);
        used = NULL;
    }
    if (arena && arena->open)
        te__pool_put(te, &arena->pool, data, capacity);
    else if (used)
        te__pool_defer(te, data, capacity, used);
    else
        te__pool_keep(te, data, capacity);
}

static void te__pool_free_lists(te_ctx *te, te__pool *pool) {
    te__free_block *b, *next;
    for (b = pool->spare; b; b = next) {
        next = b->next;
        te__free(te, b);
    }
    te__free(te, pool->lists);
    pool->spare = NULL;
    pool->lists = NULL;
    pool->num_lists = pool->cap_lists = 0;
}
static void te__pool_close(te_ctx *te) {
    te__pool_reclaim(te, true);
    te__pool_trim(te);
    te__pool_free_lists(te, &te->pool);
}

/* ---- arenas ---- */

static te__arena *te__arena_create(te_ctx *te) {
    te__arena *a = (te__arena *)te__alloc_zero(te, sizeof(te__arena));
    if (!a) return NULL;
    a->refs = 1;
    a->open = true;
    return a;
}
static void te__arena_drop(te_ctx *te, te__arena *a) {
    if (a && --a->refs == 0) te__free(te, a);
}
/* Closes the arena of a graph that is being destroyed. The device must be idle. A block that is still in use goes to
 * the context's pool when it is released. */
static void te__arena_close(te_ctx *te, te__arena *a) {
    int i;
    if (!a) return;
    a->open = false;
    for (i = 0; i < a->pool.num_lists; i++)
        while (a->pool.lists[i].first) {
            te__free_block *b = a->pool.lists[i].first;
            a->pool.lists[i].first = b->next;
            te__pool_keep(te, b->data, a->pool.lists[i].capacity);
            b->next = a->pool.spare;
            a->pool.spare = b;
        }
    te__pool_free_lists(te, &a->pool);
    te__arena_drop(te, a);
}

TE_API te_memory_stats te_memory_get_stats(te_ctx *te) {
    te_memory_stats stats = TE_ZERO;
    if (!te) return stats;
    stats = te->pool.stats;
    if (te->device && te->device->memory_info) te->device->memory_info(te, &stats.device_free, &stats.device_total);
    return stats;
}
TE_API void te_memory_reset_peak(te_ctx *te) {
    if (!te) return;
    te->pool.stats.peak_allocated = te->pool.stats.allocated;
    te->pool.stats.peak_reserved = te->pool.stats.reserved;
}
TE_API void te_memory_trim(te_ctx *te) {
    if (!te || !te->device) return;
    if (te->device->synchronize(te) != TE_OK && te->capture) return;
    te__pool_reclaim(te, true);
    te__pool_trim(te);
    te__pinned_trim(te, false);
}

/* ---- buffers ---- */

static void te__buffer_list(te_ctx *te, te__buffer *b) {
    b->next = te->buffers;
    b->at = &te->buffers;
    if (te->buffers) te->buffers->at = &b->next;
    te->buffers = b;
    te->live_buffers++;
}

static te__buffer *te__buffer_create(te_ctx *te, size_t bytes) {
    te__arena *arena = te->capture ? te->capture->arena : NULL;
    te__buffer *b = (te__buffer *)te__alloc_zero(te, sizeof(te__buffer));
    if (!b) return NULL;
    b->te = te;
    b->refs = 1;
    b->bytes = bytes;
    b->version = 1;
    if (bytes) {
        b->data = te__pool_alloc(te, arena, bytes, &b->capacity);
        if (!b->data) {
            te__free(te, b);
            return NULL;
        }
    }
    b->arena = arena; /* of no bytes, too: te__is_outside */
    if (arena) arena->refs++;
    te__buffer_list(te, b);
    return b;
}

static te__buffer *te__buffer_wrap(te_ctx *te, void *data, size_t bytes, void (*release)(void *), void *user) {
    te__buffer *b = (te__buffer *)te__alloc_zero(te, sizeof(te__buffer));
    if (!b) return NULL;
    b->te = te;
    b->refs = 1;
    b->data = data;
    b->bytes = bytes;
    b->version = 1;
    b->release = release;
    b->user = user;
    te__buffer_list(te, b);
    return b;
}

static void te__buffer_release(te__buffer *b) {
    te_ctx *te;
    if (!b || --b->refs > 0) return;
    te = b->te;
    *b->at = b->next;
    if (b->next) b->next->at = b->at;
    if (b->offloaded) b->offloaded->buffer = NULL; /* b->offloaded points to this buffer */
    if (b->capacity) {
        te__pool_release(te, b->arena, b->data, b->capacity, b->used);
    } else if (b->used) { /* the program owns this memory and does not know the event */
        te__event_synchronize(b->used);
        te__event_release(b->used);
    }
    te__arena_drop(te, b->arena);
    if (b->release) {
        te__settle(te); /* launches that still wait for a compilation may use this memory, so they are queued first */
        b->release(b->user);
    }
    te->live_buffers--;
    te__free(te, b->writes);
    te__free(te, b);
}

/* Records a write to b. It counts as a write to the whole of b. */
static void te__buffer_touch(te__buffer *b) {
    b->version++;
    b->written_at = b->whole_at = ++b->te->writes;
    b->num_writes = 0;
}

/* Makes room in b->writes. Removes writes that are older than every node on the tape. If necessary, merges pairs of
 * neighbouring entries into one byte range. */
enum { TE__MAX_WRITES = 1024 };
static void te__writes_shrink(te_ctx *te, te__buffer *b) {
    const te__segment *root = &te->tape.root;
    uint64_t oldest = root->num_nodes && root->nodes[0] ? root->nodes[0]->saved_at : 0;
    int i, old = 0;
    while (old < b->num_writes && b->writes[old].at <= oldest) old++;
    for (i = old; old && i < b->num_writes; i++) b->writes[i - old] = b->writes[i];
    b->num_writes -= old;
    if (b->num_writes < TE__MAX_WRITES) return;
    for (i = 0; i < b->num_writes / 2; i++) {
        const te__write *x = &b->writes[2 * i], *y = x + 1;
        te__write both;
        both.at = y->at;
        both.begin = te__min(x->begin, y->begin);
        both.end = te__max(x->end, y->end);
        b->writes[i] = both;
    }
    b->num_writes /= 2;
}

/* Records a write to the bytes begin .. end - 1 of b, a buffer that tape nodes have saved. */
static void te__buffer_touch_part(te__buffer *b, int64_t begin, int64_t end) {
    te_ctx *te = b->te;
    te__write *last = b->num_writes ? &b->writes[b->num_writes - 1] : NULL;
    b->version++;
    b->written_at = ++te->writes;
    /* a repeated write of the same range needs no new entry, unless a node has saved the buffer in between */
    if (last && last->begin == begin && last->end == end && last->at > b->saved_at) {
        last->at = te->writes;
        return;
    }
    if (b->num_writes == b->cap_writes) te__writes_shrink(te, b);
    if (!te__try_grow(te, (void **)&b->writes, &b->cap_writes, b->num_writes, sizeof(te__write))) {
        b->whole_at = te->writes;
        b->num_writes = 0;
        return;
    }
    b->writes[b->num_writes].at = te->writes;
    b->writes[b->num_writes].begin = begin;
    b->writes[b->num_writes++].end = end;
}

/* Returns whether any of the bytes begin .. end - 1 of b was written after the time `at` (a value of te->writes). */
static bool te__buffer_written(const te__buffer *b, int64_t begin, int64_t end, uint64_t at) {
    int i;
    if (b->arena && b->arena->launched_at > at) return true;
    if (b->whole_at > at) return true;
    for (i = b->num_writes - 1; i >= 0 && b->writes[i].at > at; i--)
        if (b->writes[i].begin < end && begin < b->writes[i].end) return true;
    return false;
}

/* Returns the number of writes to b so far. Each launch of a graph counts as a write to every buffer of its arena. */
static uint64_t te__buffer_version(const te__buffer *b) { return b->version + (b->arena ? b->arena->launches : 0); }

/* Takes a reference to b until the graph is destroyed. Buffers of the graph's own arena need no reference. */
static te_result te__capture_hold(te_graph *g, te__buffer *b) {
    if (!b || b->arena == g->arena || b->held == g->id) return TE_OK;
    if (!te__grow(g->te, (void **)&g->held, &g->cap_held, g->num_held, sizeof(te__buffer *)))
        return TE_ERR_OUT_OF_MEMORY;
    g->held[g->num_held++] = b;
    b->held = g->id;
    b->refs++;
    return TE_OK;
}
/* Returns the number of references to b, not counting that of the current capture. */
static int te__buffer_users(const te__buffer *b) { return b->refs - (b->te->capture && b->held == b->te->capture->id); }
/* Returns whether b was made before the current capture began; false outside of a capture. */
static bool te__is_outside(const te__buffer *b) { return b->te->capture && b->arena != b->te->capture->arena; }
