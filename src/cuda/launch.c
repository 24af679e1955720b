/* cuda/launch.c: opens and closes a context's CUDA device, launches plans, and loads kernels in a warm-up. This file
 * must not depend on operations. */

/* ---- opening and closing ------------------------------------------------------------------------------------- */

/* The launches that a warm-up has recorded. te_warmup_end loads or compiles their kernels. */
typedef struct te__warm_list {
    te__launch *launches; /* launches of embedded PTX have no options */
    bool *baseline;
    int count, cap_launches, cap_baseline;
} te__warm_list;

static void te__warm_list_free(te_ctx *te) {
    te__warm_list *w = te->cuda->warm_list;
    if (!w) return;
    te__free(te, w->launches);
    te__free(te, w->baseline);
    te__free(te, w);
    te->cuda->warm_list = NULL;
}

static te_result te__cuda_open_cache(te_ctx *te) {
    te__text why = TE_ZERO;
    te__cache *cache = (te__cache *)te__alloc(te, sizeof(te__cache));
    if (!cache) return TE_ERR_OUT_OF_MEMORY;
    if (!te__cache_open(cache, &why))
        te__warn(te, "the cache of kernels is not used as asked (each process compiles its own): %s",
                 te__text_str(&why));
    te__text_free(&why);
    te->cuda->cache = cache;
    return TE_OK;
}

static void te__cuda_close(te_ctx *te) {
    bool pushed;
    if (!te->cuda) return;
    te__cuda_settle(te);
    if (te__cuda_enter(te, &pushed) == TE_OK) {
        te__jit_leave(te->cuda->context);
        te__cuda_leave(pushed);
    }
    te__warm_list_free(te);
    te__free(te, te->cuda->cache);
    te__cuda_device_close(te);
}

/* Opens the device and fills te->cuda. On failure te->cuda is NULL. */
static te_result te__cuda_open(te_ctx *te, int ordinal, void *cu_context, void *cu_stream) {
    te_result result = te__cuda_device_open(te, ordinal, cu_context, cu_stream);
    if (result != TE_OK) return result;
    if (!te__jit_enter(te->cuda->context))
        result = te__fail(te, TE_ERR_OUT_OF_MEMORY, "te_ctx_create: out of host memory");
    if (result == TE_OK && !te->no_cubin_cache) result = te__cuda_open_cache(te);
    if (result != TE_OK) te__cuda_close(te);
    return result;
}

/* ---- planning ------------------------------------------------------------------------------------------------ */

enum { TE__BESIDE_SMS = 32 }; /* NCCL's kernels have at most 32 blocks on Hopper as a rule (NCCL_MAX_CTAS) */

/* Sets the fields of a plan that depend on the device. Assumes that every kernel is available. */
static void te__cuda_plan_facts(te_ctx *te, te__plan *p) {
    const te__nvrtc *nvrtc;
    p->sm = te->cuda->sm;
    p->num_sms = (int)te__max(te->cuda->num_sms, 1); /* the driver may not tell the number */
    p->beside = te->flights ? TE__BESIDE_SMS : 0;
    p->hopper = te->cuda->sm == 90;
    nvrtc = p->hopper ? te__nvrtc_open(te__driver_major(), NULL) : NULL;
    p->edits_maps = p->hopper && (!nvrtc || nvrtc->major > 12 || nvrtc->minor >= 3);
    p->counter = te->cuda->counter;
    p->outside = te->cuda->outside;
    p->baseline = false;
}

/* Returns whether a kernel of the plan is unavailable: no NVRTC and no cubin. The caller must then plan again with
 * p->baseline, which uses only embedded kernels. */
static bool te__cuda_plan_lacks_kernels(te_ctx *te, const te__plan *p) {
    bool pushed, lacks;
    if (p->baseline || te__nvrtc_open(te__driver_major(), NULL) || te__cuda_enter(te, &pushed) != TE_OK) return false;
    lacks = !te__jit_has(te, p->launch, p->num_launches);
    te__cuda_leave(pushed);
    return lacks;
}

/* Removes the options from the launches of a baseline plan, because embedded PTX has no options. */
static void te__cuda_drop_options(te__plan *p) {
    for (int i = 0; p->baseline && i < p->num_launches; i++) p->launch[i].num_options = 0;
}

/* ---- running ------------------------------------------------------------------------------------------------- */

/* Queues the launches of the plan on te's stream. If a kernel is missing, the plan waits in the queue of
 * cuda/queue.c, or this function waits for the compilation. te's CUcontext must be current. */
static te_result te__cuda_execute(te_ctx *te, te__plan *p) {
    te_result result = TE_OK;
    te__cuda_drop_options(p);
    if (te__queue_waits(te)) {
        if (te__queue_add(te, p)) return TE_OK;
        te__cuda_settle(te);
    }
    for (int i = 0; i < p->num_launches && result == TE_OK; i++) {
        if (te__jit_get_loaded(te, &p->launch[i], p->baseline, &p->launch[i].function, &result)) continue;
        if (te__queue_may_wait(te, p) && te__queue_add(te, p)) return TE_OK;
        result = te__jit_get(te, &p->launch[i], p->baseline, &p->launch[i].function);
    }
    for (int i = 0; i < p->num_launches && result == TE_OK; i++)
        result = te__cuda_launch(te, &p->launch[i], p->launch[i].function);
    return result;
}

/* ---- warm-up ------------------------------------------------------------------------------------------------- */

static bool te__warm_list_has(const te__warm_list *w, const te__launch *l, bool baseline) {
    for (int i = 0; i < w->count; i++) {
        const te__launch *o = &w->launches[i];
        if (w->baseline[i] == baseline && te__same_launch(l, o->family, o->kernel, o->option, o->num_options))
            return true;
    }
    return false;
}

/* Records the kernels of a plan for te__cuda_warm. Does not run the plan. */
static te_result te__cuda_note(te_ctx *te, te__plan *p) {
    te__warm_list *w = te->cuda->warm_list;
    if (!w) w = te->cuda->warm_list = (te__warm_list *)te__alloc_zero(te, sizeof(te__warm_list));
    if (!w) return TE_ERR_OUT_OF_MEMORY;
    te__cuda_drop_options(p);
    for (int i = 0; i < p->num_launches; i++) {
        const te__launch *l = &p->launch[i];
        if (te__jit_find(te->cuda->context, l, p->baseline) || te__warm_list_has(w, l, p->baseline)) continue;
        if (!te__grow(te, (void **)&w->launches, &w->cap_launches, w->count, sizeof(te__launch)) ||
            !te__grow(te, (void **)&w->baseline, &w->cap_baseline, w->count, sizeof(bool)))
            return TE_ERR_OUT_OF_MEMORY;
        w->launches[w->count] = *l;
        w->baseline[w->count++] = p->baseline;
    }
    return TE_OK;
}

/* Loads the kernels that te__cuda_note has recorded: reads them from the cache or compiles them, on several threads. */
static te_result te__cuda_warm(te_ctx *te) {
    te__warm_list *w = te->cuda->warm_list;
    const te__launch **compile;
    int num_compile = 0;
    bool pushed;
    te_result result;
    if (!w || w->count == 0) return TE_OK;
    result = te__cuda_enter(te, &pushed);
    if (result != TE_OK) return result;
    compile = (const te__launch **)te__alloc(te, (size_t)w->count * sizeof(*compile));
    if (!compile) result = TE_ERR_OUT_OF_MEMORY;
    for (int i = 0; i < w->count && result == TE_OK; i++) {
        if (w->baseline[i])
            result = te__jit_load_baseline(te, &w->launches[i]);
        else
            compile[num_compile++] = &w->launches[i];
    }
    if (result == TE_OK && num_compile) result = te__jit_load(te, compile, num_compile);
    te__free(te, compile);
    te__cuda_leave(pushed);
    te__warm_list_free(te);
    return result;
}
