/* cuda/jit.c: finds the driver's function for a launch in the process's table of loaded kernels. The table is filled
 * from the cache, NVRTC or embedded PTX. */

/* ---- names --------------------------------------------------------------------------------------------------- */

/* Writes the options of a launch, sorted by name, as in "X_DT=3,Y_DT=3". Returns false if the text is too long. */
static bool te__options_text(const te__launch *l, char out[TE__OPTIONS_TEXT]) {
    const te__option *sorted[TE__MAX_OPTIONS];
    size_t used = 0;
    out[0] = 0;
    for (int i = 0; i < l->num_options; i++) {
        int k = i;
        for (; k > 0 && strcmp(sorted[k - 1]->name, l->option[i].name) > 0; k--) sorted[k] = sorted[k - 1];
        sorted[k] = &l->option[i];
    }
    for (int i = 0; i < l->num_options; i++) {
        int n =
            snprintf(out + used, TE__OPTIONS_TEXT - used, "%s%s=%d", i ? "," : "", sorted[i]->name, sorted[i]->value);
        if (n < 0 || (size_t)n >= TE__OPTIONS_TEXT - used) return false;
        used += (size_t)n;
    }
    return true;
}

enum { TE__LAUNCH_TEXT = TE__OPTIONS_TEXT + 128 };

/* Writes to `out` the name of a launch for messages, such as "norm/norm_fwd X_DT=3,Y_DT=3", and returns `out`. */
static const char *te__launch_text(const te__launch *l, char out[TE__LAUNCH_TEXT]) {
    char options[TE__OPTIONS_TEXT];
    te__options_text(l, options);
    snprintf(out, TE__LAUNCH_TEXT, "%s/%s%s%s", l->family, l->kernel, options[0] ? " " : "", options);
    return out;
}

/* ---- the table ----------------------------------------------------------------------------------------------- */

/* A kernel that is loaded in a CUcontext, or unavailable there. All names are static strings. */
typedef struct te__jit_entry {
    struct te__jit_entry *next;
    uint64_t hash;
    te__cu_handle context, module, function; /* `function` NULL: the kernel is unavailable, because there is neither
                                              * NVRTC nor a cubin */
    const char *family, *kernel;
    te__option option[TE__MAX_OPTIONS];
    int num_options;
    bool baseline;         /* from the embedded PTX */
    bool follows;          /* see te__launch */
    bool overlaps;         /* whether `function` has the attribute that te__launch.overlaps asks for */
    unsigned shared_bytes; /* the current limit of dynamic shared memory of `function`, in bytes */
} te__jit_entry;

/* The number of te_ctx contexts that use a CUcontext. When the last of them closes, the modules are unloaded. Otherwise
 * te__jit_table could return them for a later CUcontext with the same address. */
typedef struct te__jit_user {
    struct te__jit_user *next;
    te__cu_handle context;
    int count;
} te__jit_user;

/* TE__SHARED_FREE: for at most this many bytes of dynamic shared memory, no function attribute is set. Without the
 * attribute the driver allows 48 KB of shared memory, static memory included. */
enum { TE__JIT_BUCKETS = 1024, TE__SHARED_FREE = 32 << 10 };

static te__mutex te__jit_mutex = TE__MUTEX_INIT;
static te__jit_entry *te__jit_table[TE__JIT_BUCKETS];
static te__jit_user *te__jit_users;

/* Hashes a launch. All launches of a kernel have the same names of options, so only the values are hashed. */
static uint64_t te__jit_hash(te__cu_handle context, const te__launch *l, bool baseline) {
    uint64_t words[TE__MAX_OPTIONS + 2];
    words[0] = (uint64_t)(uintptr_t)context;
    words[1] = te__hash64(l->kernel, strlen(l->kernel), baseline);
    for (int i = 0; i < l->num_options; i++) words[i + 2] = (uint64_t)(uint32_t)l->option[i].value;
    return te__hash64(words, sizeof(words[0]) * (size_t)(l->num_options + 2), 0);
}

static bool te__same_text(const char *a, const char *b) { return a == b || strcmp(a, b) == 0; }

static bool te__same_launch(const te__launch *a, const char *family, const char *kernel, const te__option *option,
                            int num_options) {
    if (a->num_options != num_options || !te__same_text(a->kernel, kernel) || !te__same_text(a->family, family))
        return false;
    for (int i = 0; i < num_options; i++)
        if (a->option[i].value != option[i].value || !te__same_text(a->option[i].name, option[i].name)) return false;
    return true;
}

/* Returns the entry of a launch in te__jit_table, or NULL. The caller must hold te__jit_mutex. An entry stays until no
 * te_ctx uses its CUcontext. */
static te__jit_entry *te__jit_search(te__cu_handle context, const te__launch *l, bool baseline, uint64_t hash) {
    te__jit_entry *e = te__jit_table[hash % TE__JIT_BUCKETS];
    while (e && !(e->hash == hash && e->context == context && e->baseline == baseline &&
                  te__same_launch(l, e->family, e->kernel, e->option, e->num_options)))
        e = e->next;
    return e;
}
static te__jit_entry *te__jit_find(te__cu_handle context, const te__launch *l, bool baseline) {
    uint64_t hash = te__jit_hash(context, l, baseline);
    te__jit_entry *e;
    te__mutex_lock(&te__jit_mutex);
    e = te__jit_search(context, l, baseline, hash);
    te__mutex_unlock(&te__jit_mutex);
    return e;
}

/* Adds a loaded kernel to te__jit_table. If another thread has just added the kernel, unloads `module`. Returns false
 * if memory runs out. */
static bool te__jit_insert(te__cu_handle context, const te__launch *l, bool baseline, bool follows,
                           te__cu_handle module, te__cu_handle function) {
    te__jit_entry *e = (te__jit_entry *)malloc(sizeof(te__jit_entry)), **bucket;
    bool added = false;
    if (e) {
        memset(e, 0, sizeof(*e));
        e->hash = te__jit_hash(context, l, baseline);
        e->context = context;
        e->module = module;
        e->function = function;
        e->family = l->family;
        e->kernel = l->kernel;
        memcpy(e->option, l->option, sizeof(e->option));
        e->num_options = l->num_options;
        e->baseline = baseline;
        e->follows = follows;
        e->shared_bytes = TE__SHARED_FREE;
        bucket = &te__jit_table[e->hash % TE__JIT_BUCKETS];
        te__mutex_lock(&te__jit_mutex);
        added = !te__jit_search(context, l, baseline, e->hash);
        if (added) {
            e->next = *bucket;
            *bucket = e;
        }
        te__mutex_unlock(&te__jit_mutex);
        if (added) return true;
        free(e);
    }
    if (module) te__cu.ModuleUnload(module);
    return e != NULL;
}

static bool te__jit_enter(te__cu_handle context) {
    te__jit_user *u;
    te__mutex_lock(&te__jit_mutex);
    for (u = te__jit_users; u && u->context != context;) u = u->next;
    if (!u && (u = (te__jit_user *)calloc(1, sizeof(te__jit_user))) != NULL) {
        u->context = context;
        u->next = te__jit_users;
        te__jit_users = u;
    }
    if (u) u->count++;
    te__mutex_unlock(&te__jit_mutex);
    return u != NULL;
}

/* Removes one user of a CUcontext, which must be current. If no user is left, unloads the modules of the
 * CUcontext. */
static void te__jit_leave(te__cu_handle context) {
    te__jit_user **at, *u;
    te__mutex_lock(&te__jit_mutex);
    for (at = &te__jit_users; *at && (*at)->context != context;) at = &(*at)->next;
    u = *at;
    if (u && --u->count == 0) {
        *at = u->next;
        free(u);
        for (int i = 0; i < TE__JIT_BUCKETS; i++) {
            te__jit_entry **link = &te__jit_table[i];
            while (*link) {
                te__jit_entry *e = *link;
                if (e->context != context) {
                    link = &e->next;
                    continue;
                }
                *link = e->next;
                if (e->module) te__cu.ModuleUnload(e->module);
                free(e);
            }
        }
    }
    te__mutex_unlock(&te__jit_mutex);
}

/* ---- images -------------------------------------------------------------------------------------------------- */

/* The compilation of one kernel. The caller sets the fields before `image`. te__jit_job_run sets `image` and the fields
 * after it, and may run on any thread. */
typedef struct te__jit_job {
    const te__launch *launch;
    const te__cache *cache; /* NULL: none */
    const te__nvrtc *nvrtc; /* NULL: there is no NVRTC, so the kernel can come only from the cache */
    int sm;
    bool fresh;             /* true: the entry in the cache is unusable, so the cache is not read */
    te__text image, why, cache_why;
    te_result result;
    bool compiled, missing, damaged; /* missing: the only error is that there is neither NVRTC nor a cubin */
    double seconds;
    char arch[24];
} te__jit_job;

static void te__jit_job_free(te__jit_job *j) {
    te__text_free(&j->image);
    te__text_free(&j->why);
    te__text_free(&j->cache_why);
}

static te_result te__jit_compile(te__jit_job *j, const te__unit *u, const char *options) {
    char name[TE__LAUNCH_TEXT];
    double start = te__time_now();
    te__text log = TE_ZERO;
    bool done = te__nvrtc_compile(j->nvrtc, u, options, j->arch, NULL, &j->image, &log);
    j->seconds = te__time_now() - start;
    j->compiled = done;
    if (!done)
        te__text_printf(&j->why, "kernel %s does not compile for %s with NVRTC %d.%d (%s):\n%s",
                        te__launch_text(j->launch, name), j->arch, j->nvrtc->major, j->nvrtc->minor, j->nvrtc->lib.path,
                        te__text_str(&log));
    te__text_free(&log);
    return done ? TE_OK : TE_ERR_COMPILE;
}

/* Reads the kernel from the cache or compiles it. If several processes need the same kernel, one compiles it and the
 * others wait. */
static te_result te__jit_cache_or_compile(te__jit_job *j, const te__unit *u, const te__cache_key *key) {
    te__cache_lock lock;
    te_result result = TE_OK;
    bool damaged = false;
    if (!j->cache) {
        j->missing = !j->nvrtc;
        return j->nvrtc ? te__jit_compile(j, u, key->options) : TE_ERR_LIBRARY;
    }
    if (!j->fresh && te__cache_load(j->cache, key, &j->image, &damaged)) return TE_OK;
    j->damaged = damaged || j->fresh;
    if (!j->nvrtc) {
        j->missing = true;
        return TE_ERR_LIBRARY;
    }
    te__cache_lock_acquire(j->cache, key, &lock);
    if (j->fresh || !te__cache_load(j->cache, key, &j->image, &damaged)) {
        result = te__jit_compile(j, u, key->options);
        if (result == TE_OK) te__cache_store(j->cache, key, &j->image, &j->cache_why);
    }
    te__cache_lock_release(&lock);
    return result;
}

static te_result te__jit_job_try(te__jit_job *j) {
    const te__kernels *kernels = te__kernels_get(&j->why);
    const te__launch *l = j->launch;
    te__cache_key key = TE_ZERO;
    te__kernel_marks marks;
    te__unit unit;
    const te__kernel_file *code = NULL;
    te_result result;
    if (!kernels) return TE_ERR_IO;
    if (!te__unit_open(kernels, l->family, l->kernel, &unit, &j->why)) return TE_ERR_COMPILE;
    for (int i = 0; i < l->num_options; i++)
        if (strcmp(l->option[i].name, TE__CODE_OPTION) == 0) code = te__code_find(l->option[i].value);
    te__unit_replace(&unit, code);
    marks = te__kernel_marks_of(unit.file[0]->text);
    if (j->sm < marks.arch || (marks.exact && j->sm != marks.arch)) {
        te__text_printf(&j->why, "kernel %s/%s is for sm_%d%s, this GPU is sm_%d", l->family, l->kernel, marks.arch,
                        marks.exact ? "a alone" : " and later", j->sm);
        return TE_ERR_UNSUPPORTED;
    }
    if (!te__nvrtc_arch(j->nvrtc, j->sm, j->arch, sizeof(j->arch))) {
        te__text_printf(&j->why, "NVRTC %d.%d knows no architecture that sm_%d could run. Install a newer one",
                        j->nvrtc->major, j->nvrtc->minor, j->sm);
        return TE_ERR_LIBRARY;
    }
    snprintf(key.kernel, sizeof(key.kernel), "%s/%s", l->family, l->kernel);
    snprintf(key.arch, sizeof(key.arch), "%s", j->arch);
    if (j->nvrtc) memcpy(key.compiler, j->nvrtc->compiler, sizeof(key.compiler));
    te__unit_digest(&unit, key.text);
    if (!te__options_text(l, key.options)) {
        te__text_printf(&j->why, "kernel %s/%s has too many options", l->family, l->kernel);
        return TE_ERR_COMPILE;
    }
    result = te__jit_cache_or_compile(j, &unit, &key);
    /* The compiler's messages name only the macros that stand for the user's code (te__code in core/plan.c), so the
     * text of that code is added here. */
    if (result == TE_ERR_COMPILE && code) te__text_printf(&j->why, "\nThe code of the call is\n%s", code->text);
    return result;
}

static void te__jit_job_run(te__jit_job *j) { j->result = te__jit_job_try(j); }

/* A list of jobs that several threads work on. Each thread runs the next job until none is left. */
typedef struct te__jit_queue {
    te__jit_job *jobs;
    int64_t count;
    TE__ALIGNED(8) int64_t next; /* atomic */
} te__jit_queue;
static void te__jit_worker(void *user) {
    te__jit_queue *q = (te__jit_queue *)user;
    for (int64_t i; (i = te__atomic_add(&q->next, 1)) < q->count;) te__jit_job_run(&q->jobs[i]);
}
enum { TE__JIT_THREADS = 16 };
static void te__jit_run(te__jit_job *jobs, int count) {
    te__thread threads[TE__JIT_THREADS];
    te__jit_queue queue = TE_ZERO;
    int wanted = (int)te__min(te__min(te__cpu_count(), TE__JIT_THREADS), count), started = 0;
    queue.jobs = jobs;
    queue.count = count;
    while (started < wanted - 1 && te__thread_start(&threads[started], te__jit_worker, &queue)) started++;
    te__jit_worker(&queue); /* this thread works too */
    while (started > 0) te__thread_join(&threads[--started]);
}

/* ---- loading ------------------------------------------------------------------------------------------------- */

/* Loads an image and adds its kernel to te__jit_table. The driver compiles a PTX image here. te's CUcontext must be
 * current. `maker` is the origin of the image, for messages. `quiet`: a rejected image gives TE_ERR_DEVICE without a
 * message. */
static te_result te__jit_load_image(te_ctx *te, const te__launch *l, bool baseline, const char *image,
                                    const char *maker, bool quiet) {
    enum { ERROR_LOG = 5, ERROR_LOG_BYTES = 6 }; /* CU_JIT_ERROR_LOG_BUFFER, ..._SIZE_BYTES */
    char log[2048] = "", entry[128], call[sizeof(log) + TE__LAUNCH_TEXT + 128], name[TE__LAUNCH_TEXT];
    int options[2] = {ERROR_LOG, ERROR_LOG_BYTES};
    void *values[2];
    te__cu_handle module = NULL, function = NULL;
    te__cu_result code;
    bool follows;
    values[0] = log;
    values[1] = (void *)(uintptr_t)(sizeof(log) - 1);
    code = te__cu.ModuleLoadDataEx(&module, image, 2, options, values);
    snprintf(entry, sizeof(entry), "te_%s", l->kernel);
    if (!code) {
        code = te__cu.ModuleGetFunction(&function, module, entry);
        if (code) te__cu.ModuleUnload(module);
    }
    if (code) {
        snprintf(call, sizeof(call), "kernel %s (%s; the driver is for CUDA %d.%d): %s%scuModuleLoadDataEx",
                 te__launch_text(l, name), maker, te__cu.version / 1000, te__cu.version % 1000 / 10, log,
                 log[0] ? ": " : "");
        return quiet ? TE_ERR_DEVICE : te__cu_fail(te, call, code);
    }
    follows = !baseline && te->cuda->sm >= 90 && te__cu.LaunchKernelEx && te__kernel_follows(l->family, l->kernel);
    if (!te__jit_insert(te->cuda->context, l, baseline, follows, module, function))
        return te__fail(te, TE_ERR_OUT_OF_MEMORY, "the table of kernels: out of host memory");
    te->jit_stats.loaded++;
    return TE_OK;
}

static void te__jit_count(te_ctx *te, const te__jit_job *j) {
    char name[TE__LAUNCH_TEXT];
    te->jit_stats.cache_damaged += j->damaged;
    if (j->result != TE_OK) return;
    te->jit_stats.compiled += j->compiled;
    te->jit_stats.from_cache += !j->compiled;
    if (j->compiled)
        te__log(te, TE_LOG_INFO, "compiled %s for %s in %.0f ms", te__launch_text(j->launch, name), j->arch,
                1e3 * j->seconds);
    else
        te__log(te, TE_LOG_DEBUG, "%s for %s is from the cache", te__launch_text(j->launch, name), j->arch);
}

/* Logs the compilation j, which has ended. Loads its image and adds the kernel to te__jit_table. */
static te_result te__jit_finish(te_ctx *te, te__jit_job *j) {
    const char *maker = j->nvrtc ? j->nvrtc->compiler : "from a cache";
    te_result result = j->result;
    te__jit_count(te, j);
    if (result == TE_OK) {
        /* The cached image may be for another driver. If this driver rejects the image, compile again. */
        bool again = !j->compiled && j->nvrtc;
        result = te__jit_load_image(te, j->launch, false, j->image.s, maker, again);
        if (result == TE_ERR_DEVICE && again) {
            te->jit_stats.from_cache--;
            j->fresh = true;
            te__jit_job_run(j);
            te__jit_count(te, j);
            result =
                j->result == TE_OK ? te__jit_load_image(te, j->launch, false, j->image.s, maker, false) : j->result;
        }
    }
    if (j->cache_why.n && te->cuda->cache && te->cuda->cache->root[0]) {
        te__warn(te, "the cache of kernels is not written to (each process compiles its own): %s",
                 te__text_str(&j->cache_why));
        te->cuda->cache->root[0] = 0;
    }
    /* Adds an entry without a function to te__jit_table, so that the next plan does not search the disk again. */
    if (j->missing)
        return te__jit_insert(te->cuda->context, j->launch, false, false, NULL, NULL) ? TE_OK : TE_ERR_OUT_OF_MEMORY;
    return j->result == TE_OK ? result : te__fail(te, j->result, "%s", te__text_str(&j->why));
}

static int te__driver_major(void) { return te__cu.ready ? te__cu.version / 1000 : 0; }

/* Loads or compiles kernels on several threads. te's CUcontext must be current. Without NVRTC, a missing kernel gets an
 * entry without a function, not an error. */
static te_result te__jit_load(te_ctx *te, const te__launch *const *launches, int count) {
    te__jit_job *jobs = (te__jit_job *)te__alloc_zero(te, (size_t)count * sizeof(te__jit_job));
    te_result result = TE_OK;
    double start = te__time_now();
    bool compiled = false;
    if (!jobs) return TE_ERR_OUT_OF_MEMORY;
    for (int i = 0; i < count; i++) {
        jobs[i].launch = launches[i];
        jobs[i].cache = te->cuda->cache;
        jobs[i].nvrtc = te__nvrtc_open(te__driver_major(), NULL);
        jobs[i].sm = te->cuda->sm;
    }
    te__jit_run(jobs, count);
    for (int i = 0; i < count; i++) compiled |= jobs[i].compiled;
    if (compiled) te->jit_stats.compile_seconds += te__time_now() - start;
    for (int i = 0; i < count; i++) {
        if (result == TE_OK) result = te__jit_finish(te, &jobs[i]);
        te__jit_job_free(&jobs[i]);
    }
    te__free(te, jobs);
    return result;
}

static te_result te__jit_fail_missing(te_ctx *te, const te__launch *l) {
    te__text why = TE_ZERO;
    te_result result;
    te__nvrtc_open(te__driver_major(), &why);
    result =
        te__fail(te, TE_ERR_LIBRARY, "kernel %s/%s is neither in a cache nor embedded as PTX%s, and %s", l->family,
                 l->kernel, te__num_baselines > 0 ? "" : " (te.h was compiled with TE_NO_PTX)", te__text_str(&why));
    te__text_free(&why);
    return result;
}

/* Loads a kernel from the embedded PTX, which has no options. te's CUcontext must be current. */
static te_result te__jit_load_baseline(te_ctx *te, const te__launch *l) {
    te__text ptx = TE_ZERO;
    bool there = te__baseline_find(l->family, l->kernel, &ptx);
    te_result result =
        there ? te__jit_load_image(te, l, true, ptx.s, "embedded PTX", false) : te__jit_fail_missing(te, l);
    te->jit_stats.from_ptx += result == TE_OK;
    te__text_free(&ptx);
    return result;
}

/* ---- for launch.c ---------------------------------------------------------------------------------- */

/* Sets the function's attributes: the one that te__launch.overlaps asks for, and a higher limit of dynamic shared
 * memory if this launch needs more than all earlier launches. */
static te_result te__jit_allow_shared(te_ctx *te, const te__launch *l, te__jit_entry *e) {
    char call[TE__LAUNCH_TEXT + 128], name[TE__LAUNCH_TEXT];
    te__cu_result code = 0;
    te__mutex_lock(&te__jit_mutex);
    if (l->overlaps && !e->overlaps) {
        code = te__cu.FuncSetAttribute(e->function, TE__CU_FUNC_CARVEOUT, 100);
        e->overlaps = !code;
    }
    if (!code && l->shared_bytes > e->shared_bytes) {
        code = te__cu.FuncSetAttribute(e->function, TE__CU_FUNC_MAX_SHARED, (int)l->shared_bytes);
        if (!code) e->shared_bytes = l->shared_bytes;
    }
    te__mutex_unlock(&te__jit_mutex);
    if (!code) return TE_OK;
    snprintf(call, sizeof(call), "kernel %s with %u bytes of shared memory (a block may have %d): cuFuncSetAttribute",
             te__launch_text(l, name), l->shared_bytes, te->cuda->max_shared);
    return te__cu_fail(te, call, code);
}

/* Looks up the kernel of a launch in te__jit_table. If `baseline` is true, looks for the version that was loaded from
 * the embedded PTX. Returns false if the table lacks the kernel. Otherwise sets *result and, on success, *function.
 * te's CUcontext must be current. */
static bool te__jit_get_loaded(te_ctx *te, te__launch *l, bool baseline, te__cu_handle *function, te_result *result) {
    te__jit_entry *e = te__jit_find(te->cuda->context, l, baseline);
    if (!e) return false;
    if (e->function) {
        *function = e->function;
        l->follows = e->follows;
        *result = l->shared_bytes > TE__SHARED_FREE || l->overlaps ? te__jit_allow_shared(te, l, e) : TE_OK;
    } else
        *result = te__jit_fail_missing(te, l);
    return true;
}
/* Sets *function to the driver's function for a launch. If te__jit_table does not have the kernel, first loads or
 * compiles it. */
static te_result te__jit_get(te_ctx *te, te__launch *l, bool baseline, te__cu_handle *function) {
    const te__launch *one = l;
    te_result result;
    if (te__jit_get_loaded(te, l, baseline, function, &result)) return result;
    result = baseline ? te__jit_load_baseline(te, l) : te__jit_load(te, &one, 1);
    if (result != TE_OK) return result;
    return te__jit_get_loaded(te, l, baseline, function, &result) ? result : te__jit_fail_missing(te, l);
}

/* Returns whether the kernels of all launches are available: always with NVRTC, else if a cache has all of them. te's
 * CUcontext must be current. */
static bool te__jit_has(te_ctx *te, const te__launch *launches, int count) {
    if (te__nvrtc_open(te__driver_major(), NULL)) return true;
    for (int i = 0; i < count; i++) {
        const te__launch *l = &launches[i];
        te__jit_entry *e = te__jit_find(te->cuda->context, l, false);
        if (!e && te__jit_load(te, &l, 1) == TE_OK) e = te__jit_find(te->cuda->context, l, false);
        if (!e || !e->function) return false;
    }
    return true;
}
