/* open.c: opens and closes a context. A room (te__room) is a part of the library with a state of its own in each
 * context. This file must not depend on what rooms do. */

static const te__room *const te__rooms[] = {
    &te__quant_room, &te__functions_room, &te__modules_room, &te__train_room,
#ifndef TE_NO_DIST
    &te__sharding_room,
#endif
#ifndef TE_NO_MOE
    &te__moe_room,
#endif
#ifndef TE_NO_AUTOMODEL
    &te__automodel_room, &te__sdpa_room, &te__mask_room,
#endif
    &te__report_room,
};

/* A context is one block of memory. It begins with the te_ctx. The states of all rooms follow, each at a multiple of 16
 * bytes. */
static size_t te__round_16(size_t bytes) { return (bytes + 15) / 16 * 16; }
static size_t te__ctx_bytes(void) {
    size_t bytes = te__round_16(sizeof(te_ctx));
    int i;
    for (i = 0; i < TE__COUNT(te__rooms); i++) bytes += te__round_16(te__rooms[i]->slot->bytes);
    return bytes;
}
/* Clears the memory of a context. Stores the address of each room's state in the te_ctx. */
static void te__rooms_place(te_ctx *te) {
    unsigned char *at = (unsigned char *)te + te__round_16(sizeof(te_ctx));
    int i;
    memset((void *)te, 0, te__ctx_bytes());
    te->rooms = te__rooms;
    te->num_rooms = TE__COUNT(te__rooms);
    for (i = 0; i < te->num_rooms; i++) {
        te->state[i] = at;
        at += te__round_16(te__rooms[i]->slot->bytes);
    }
}

/* ---- the device ---- */

/* Returns N for "cuda:N", 0 for "cuda", and -1 for anything else. */
static int te__cuda_ordinal(const char *name) {
    char *end;
    long n;
    if (strcmp(name, "cuda") == 0) return 0;
    if (strncmp(name, "cuda:", 5) != 0 || name[5] < '0' || name[5] > '9') return -1;
    n = strtol(name + 5, &end, 10);
    return *end == 0 && n < 1024 ? (int)n : -1;
}

static void te__open_cpu(te_ctx *te) {
    snprintf(te->device_name, sizeof(te->device_name), "cpu");
    te->device = &te__cpu_device;
    te__threads_open(te);
}

/* Opens the device that `desc` or TE_DEVICE names. Without a name, opens the first GPU or, without a GPU, the CPU.
 * After a failure the context has the CPU, so that later calls do not crash. */
static void te__open_device(te_ctx *te, const te_ctx_desc *desc) {
    const char *name = desc->device ? desc->device : te__env("TE_DEVICE"),
               *whose = desc->device ? "device \"" : "TE_DEVICE is \"";
    bool any = !name || !name[0];
    int ordinal = any ? 0 : te__cuda_ordinal(name);
    if (!any && strcmp(name, "cpu") == 0) {
        te__open_cpu(te);
        return;
    }
    if (ordinal < 0) {
        te__fail(te, TE_ERR_INVALID, "te_ctx_create: %s%s\"%s is neither \"cpu\" nor \"cuda:N\"", whose, name,
                 desc->device ? "" : ", which");
        te__open_cpu(te);
        return;
    }
    if (te__cuda_open_device(te, ordinal, desc) == TE_OK) return;
    if (any && !desc->cu_context) {
        te__log(te, TE_LOG_INFO, "no GPU, running on the CPU: %s", te_error(te));
        te_clear_error(te);
    }
    te__open_cpu(te);
}

/* ---- opening ---- */

/* Returns the whole number in the environment variable `name`. If the variable is not set, returns `otherwise`. If its
 * value is not a whole number from `low` to `high`, warns and returns `otherwise`, too. */
static int te__env_number(te_ctx *te, const char *name, int low, int high, int otherwise) {
    const char *text = te__env(name);
    char *end;
    long n;
    if (!text) return otherwise;
    n = strtol(text, &end, 10);
    if (*end == 0 && n >= low && n <= high) return (int)n;
    te__warn(te, "%s is \"%.40s\"; a whole number from %d to %d is possible: it is ignored", name, text, low, high);
    return otherwise;
}

static bool te__allocator_ok(const te_allocator *a) { return !a->alloc == !a->release; }

TE_API te_ctx *te_ctx_create(const te_ctx_desc *desc) {
    te_ctx_desc zero = TE_ZERO;
    te_ctx *te;
    te_allocator host, device;
    bool halves;
    int i;
    if (!desc) desc = &zero;
    halves = !te__allocator_ok(&desc->host_allocator) || !te__allocator_ok(&desc->device_allocator);
    host = halves ? zero.host_allocator : desc->host_allocator;
    device = halves ? zero.device_allocator : desc->device_allocator;
    te = (te_ctx *)te__raw_alloc(&host, te__ctx_bytes());
    if (!te) return NULL;
    te__rooms_place(te);
    te__watch_forks();
    te->errors = 1;
    te->forks = te__forks;
    te->process_id = te__process_id();
    te->host_allocator = host;
    te->device_allocator = device;
    te->log = desc->log;
    te->log_user = desc->log_user;
    te->log_level = desc->log_level ? desc->log_level : TE_LOG_WARN;
    if (!desc->log_level)
        te->log_level = (te_log_level)te__env_number(te, "TE_LOG", TE_LOG_ERROR, TE_LOG_DEBUG, TE_LOG_WARN);
    te->debug_sync = te__env_number(te, "TE_DEBUG_SYNC", 0, 1, 0) != 0;
    te->cpu_threads =
        desc->cpu_threads > 0 ? desc->cpu_threads : te__env_number(te, "TE_THREADS", 1, TE__MAX_THREADS, 0);
    if (te->cpu_threads <= 0) te->cpu_threads = te__cpu_count();
    if (te->cpu_threads > TE__MAX_THREADS) te->cpu_threads = TE__MAX_THREADS;
    te->no_cubin_cache = desc->no_cubin_cache;
    te->exact_f32 = desc->exact_f32;
    te->seed = desc->seed ? desc->seed : 1234;
    te->writes = 1;
    te->tape.segment = &te->tape.root;
    if (!halves) {
        te__open_device(te, desc);
    } else {
        te__fail(te, TE_ERR_INVALID,
                 "te_ctx_create: host_allocator or device_allocator has one of alloc and release; both are needed, or "
                 "neither");
        te__open_cpu(te);
    }
    for (i = 0; i < te->num_rooms; i++)
        if (te->rooms[i]->open) te->rooms[i]->open(te);
    if (!te__arithmetic_is_exact())
        te__fail(te, TE_ERR_UNSUPPORTED,
                 "te_ctx_create: te.h was compiled with flags that let sums be reordered, divisions be multiplications "
                 "or -0 be 0: quantized codes "
                 "would not be TransformerEngine's; add -fno-fast-math -fno-unsafe-math-optimizations behind them, for "
                 "the file that defines TE_IMPLEMENTATION");
    return te;
}

/* ---- closing ---- */

/* Closes the modules, groups of ranks and other objects that the program has left open. Warns if there are any. */
static void te__close_all(te_ctx *te) {
    const char *kind = NULL;
    const te__closable *c;
    int n = 0, others = 0;
    for (c = te->closables; c; c = c->next) {
        if (!kind) kind = c->kind;
        if (kind == c->kind) n++;
        else others++;
    }
    if (n)
        te__warn(te,
                 "te_ctx_destroy: %d %s%s%s still there; the context destroys all of them, and they must be neither "
                 "used nor destroyed any more",
                 n, kind, n == 1 ? "" : "s",
                 others   ? " and others are"
                 : n == 1 ? " is"
                          : " are");
    while (te->closables) te->closables->close(te->closables->owner);
}

TE_API void te_ctx_destroy(te_ctx *te) {
    te_allocator allocator;
    int i;
    if (!te || te__refuse_hook(te, "te_ctx_destroy") != TE_OK) return;
    te__graphs_leave(te);
    if (te->device) te->device->synchronize(te);
    te__segment_cut(te, &te->tape.root, 0);
    te__deferred_forget(te, NULL);
    te__close_all(te);
    for (i = 0; i < te->num_rooms; i++)
        if (te->rooms[i]->close) te->rooms[i]->close(te);
    while (te->num_live > 0) te_tensor_release(te->live[--te->num_live]);
    if (te->live_buffers > 0)
        te__warn(te,
                 "te_ctx_destroy: %lld tensors are still retained; the context releases them, and they must be neither "
                 "used nor released any more",
                 (long long)te->live_buffers);
    while (te->buffers) {
        te->buffers->refs = 1;
        te__buffer_release(te->buffers);
    }
    te__streams_close(te);
    te__pool_close(te);
    te__pinned_trim(te, true);
    te__events_close(te);
    if (te->device->close) te->device->close(te);
    te__threads_close(te);
    te__forget_error(te);
    te__free_all(te);
    allocator = te->host_allocator;
    te__raw_free(&allocator, te, te__ctx_bytes());
}
