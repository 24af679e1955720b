/* core/memory.c: the caching pool of device memory, and reference-counted buffers from it. Knows the device only through its
 * table of functions. All work of a context is ordered by its one stream, so a block may be handed out again as soon as it
 * is released. */

/* Capacities come in steps of an eighth of a power of two, at least 512 bytes: few distinct sizes, at most 12.5 % waste. */
static size_t te__pool_capacity(size_t bytes) {
    size_t step = 512;
    while (step * 8 < bytes) step *= 2;
    return (bytes + step - 1) / step * step;
}

/* Index of the first list whose capacity is at least `capacity`. */
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
    char asked[TE__BYTES_TEXT], unused[TE__BYTES_TEXT], total[TE__BYTES_TEXT], held[TE__BYTES_TEXT], room[3 * TE__BYTES_TEXT];
    size_t free_bytes = 0, total_bytes = 0;
    if (te->device->memory_info) te->device->memory_info(te, &free_bytes, &total_bytes);
    snprintf(room, sizeof(room), "it is not known how much is free");
    if (total_bytes) snprintf(room, sizeof(room), "%s free of %s", te__bytes_text(free_bytes, unused), te__bytes_text(total_bytes, total));
    return te__fail(te, TE_ERR_OUT_OF_MEMORY,
                    "%s: out of memory: %s asked for, %s, %s held by live tensors of this context. A smaller batch, te_scope_begin/te_scope_end "
                    "around each step, or activation checkpointing need less",
                    te->device_name, te__bytes_text(bytes, asked), room, te__bytes_text(te->pool.stats.allocated, held));
}

/* A block of at least `bytes`; *capacity is what te__pool_release wants back. */
static void *te__pool_alloc(te_ctx *te, size_t bytes, size_t *capacity) {
    te__pool *pool = &te->pool;
    size_t want = te__pool_capacity(bytes);
    int i = te__pool_find(pool, want);
    void *data = NULL;
    pool->stats.allocs++;
    /* A cached block up to a quarter larger is good enough; more would starve the sizes above. */
    for (; i < pool->num_lists && pool->lists[i].capacity <= want + want / 4; i++) {
        te__free_block *b = pool->lists[i].first;
        if (!b) continue;
        pool->lists[i].first = b->next;
        b->next = pool->spare;
        pool->spare = b;
        data = b->data;
        want = pool->lists[i].capacity;
        break;
    }
    if (!data) {
        data = te->device->alloc(te, want);
        if (!data) { /* what is cached may be what is missing */
            te->device->synchronize(te);
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
    pool->stats.allocated += want;
    if (pool->stats.allocated > pool->stats.peak_allocated) pool->stats.peak_allocated = pool->stats.allocated;
    *capacity = want;
    return data;
}

/* Releasing never fails: a block that cannot be kept for want of host memory goes back to the device. */
static void te__pool_release(te_ctx *te, void *data, size_t capacity) {
    te__pool *pool = &te->pool;
    int i = te__pool_find(pool, capacity);
    te__free_block *b;
    pool->stats.allocated -= capacity;
    if (i == pool->num_lists || pool->lists[i].capacity != capacity) {
        if (!te__try_grow(te, (void **)&pool->lists, &pool->cap_lists, pool->num_lists, sizeof(te__free_list))) goto give_back;
        memmove(pool->lists + i + 1, pool->lists + i, (size_t)(pool->num_lists - i) * sizeof(te__free_list));
        pool->lists[i].capacity = capacity;
        pool->lists[i].first = NULL;
        pool->num_lists++;
    }
    b = pool->spare;
    if (b)
        pool->spare = b->next;
    else
        b = (te__free_block *)te__try_alloc(te, sizeof(te__free_block));
    if (!b) goto give_back;
    b->data = data;
    b->next = pool->lists[i].first;
    pool->lists[i].first = b;
    return;
give_back:
    te->device->release(te, data, capacity);
    pool->stats.reserved -= capacity;
}

static void te__pool_close(te_ctx *te) {
    te__pool *pool = &te->pool;
    te__free_block *b, *next;
    te__pool_trim(te);
    for (b = pool->spare; b; b = next) {
        next = b->next;
        te__free(te, b, sizeof(*b));
    }
    te__free(te, pool->lists, (size_t)pool->cap_lists * sizeof(te__free_list));
    pool->spare = NULL;
    pool->lists = NULL;
    pool->num_lists = pool->cap_lists = 0;
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
    te->device->synchronize(te);
    te__pool_trim(te);
}

/* ---- buffers ---- */

static te__buffer *te__buffer_create(te_ctx *te, size_t bytes) {
    te__buffer *b = (te__buffer *)te__alloc_zero(te, sizeof(te__buffer));
    if (!b) return NULL;
    b->te = te;
    b->refs = 1;
    b->bytes = bytes;
    b->version = 1;
    if (bytes) {
        b->data = te__pool_alloc(te, bytes, &b->capacity);
        if (!b->data) {
            te__free(te, b, sizeof(*b));
            return NULL;
        }
    }
    te->live_buffers++;
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
    te->live_buffers++;
    return b;
}

static void te__buffer_release(te__buffer *b) {
    te_ctx *te;
    if (!b || --b->refs > 0) return;
    te = b->te;
    if (b->capacity) te__pool_release(te, b->data, b->capacity);
    if (b->release) b->release(b->user);
    te->live_buffers--;
    te__free(te, b, sizeof(*b));
}
