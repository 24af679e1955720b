/* core/plan.c: builds plans: the kernel launches of one operation, and the workspace. This file calls no driver. */

static void te__plan_begin(te__plan *p, te_ctx *te) {
    memset(p, 0, offsetof(te__plan, workspace)); /* the fields from `workspace` on are large, and set when used */
    p->te = te;
    p->launch = p->own_launch;
    p->cap_launches = TE__OWN_LAUNCHES;
    p->native = p->deterministic = true;
    p->why = "";
}

static void te__plan_free_launches(te__plan *p) {
    if (p->launch != p->own_launch) te__free(p->te, p->launch);
}
static void te__plan_end(te__plan *p) {
    int i;
    for (i = 0; i < p->num_workspaces; i++) te__buffer_release(p->workspace[i]);
    for (i = 0; i < p->num_launches; i++)
        if (p->launch[i].args_on_heap) te__free(p->te, p->launch[i].args);
    te__plan_free_launches(p);
    p->launch = p->own_launch;
    p->cap_launches = TE__OWN_LAUNCHES;
    p->num_workspaces = p->num_launches = 0;
}

/* Sets p->why, a sentence that te_explain reports; `why` must be static. Returns TE_OK. */
static te_result te__plan_why(te__plan *p, const char *why) {
    p->why = why;
    return TE_OK;
}

/* Moves the launches to host memory that has room for twice as many. */
static TE__NOINLINE bool te__plan_grow(te__plan *p) {
    const int more = 2 * p->cap_launches;
    te__launch *all = (te__launch *)te__alloc(p->te, (size_t)more * sizeof(te__launch));
    if (!all) return false;
    memcpy(all, p->launch, (size_t)p->num_launches * sizeof(te__launch));
    te__plan_free_launches(p);
    p->launch = all;
    p->cap_launches = more;
    return true;
}

/* Adds a launch to the plan and returns it. Beyond TE__OWN_LAUNCHES launches, earlier ones may move in memory: write
 * only to the latest. */
static te__launch *te__plan_launch(te__plan *p, const char *family, const char *kernel) {
    te__launch *l;
    if (p->num_launches == p->cap_launches && (p->result != TE_OK || !te__plan_grow(p))) {
        /* No memory: the new launch replaces the last one, so that callers always get a launch to write to. The plan
         * will not run. */
        if (p->result == TE_OK) p->result = TE_ERR_OUT_OF_MEMORY;
        p->num_launches--;
        if (p->launch[p->num_launches].args_on_heap)
            te__free(p->te, p->launch[p->num_launches].args);
    }
    l = &p->launch[p->num_launches++];
    memset(l, 0, sizeof(*l));
    l->family = family;
    l->kernel = kernel;
    l->grid[0] = l->grid[1] = l->grid[2] = 1;
    l->threads = 32;
    return l;
}

static TE__NOINLINE void te__launch_option(te__launch *l, const char *name, int value) {
    if (l->num_options == TE__MAX_OPTIONS) return; /* too many options: this one is dropped */
    l->option[l->num_options].name = name;
    l->option[l->num_options].value = value;
    l->num_options++;
}

/* User code that a kernel includes like a file. The value of the launch option TE__CODE_OPTION is the code's id. The
 * text is never freed. */
#define TE__CODE_OPTION "X_MOD"
typedef struct te__code {
    struct te__code *next;
    int id;
    te__kernel_file file;
} te__code;
static te__mutex te__codes_mutex = TE__MUTEX_INIT;
static te__code *te__codes;

static te__code *te__code_search(int id) {
    te__code *c = te__codes;
    while (c && c->id != id) c = c->next;
    return c;
}
static const te__kernel_file *te__code_find(int id) {
    const te__code *c;
    te__mutex_lock(&te__codes_mutex);
    c = te__code_search(id);
    te__mutex_unlock(&te__codes_mutex);
    return c ? &c->file : NULL;
}
/* Adds user code to a launch, and sets the launch option TE__CODE_OPTION to the code's id. The id is a hash of the
 * text. So it is the same in every process, and a process finds the kernels that other processes have compiled. A text
 * with the same hash as another gets the next free id. `path` must be static. */
static te_result te__launch_code(te__plan *p, te__launch *l, const char *path, const char *text) {
    const size_t size = strlen(text) + 1;
    int id = (int)(te__hash64(text, size, 0) & 0x3fffffffu) + 16; /* te_kcheck uses the ids below 16 */
    te__code *c;
    te__mutex_lock(&te__codes_mutex);
    while ((c = te__code_search(id)) != NULL && strcmp(c->file.text, text) != 0) id++;
    if (!c && (c = (te__code *)malloc(sizeof(*c) + size)) != NULL) {
        c->id = id;
        c->file.path = path;
        c->file.text = (const char *)memcpy(c + 1, text, size);
        c->next = te__codes;
        te__codes = c;
    }
    te__mutex_unlock(&te__codes_mutex);
    if (!c) return p->result = te__fail(p->te, TE_ERR_OUT_OF_MEMORY, "%s/%s: out of host memory", l->family, l->kernel);
    te__launch_option(l, TE__CODE_OPTION, id);
    return TE_OK;
}

static TE__NOINLINE void te__launch_size(te__launch *l, int64_t gx, int64_t gy, int64_t gz, int threads,
                                         int64_t shared_bytes) {
    l->grid[0] = (unsigned)gx;
    l->grid[1] = (unsigned)gy;
    l->grid[2] = (unsigned)gz;
    l->threads = (unsigned)threads;
    l->shared_bytes = (unsigned)shared_bytes;
}

/* Sets the grid of a launch to `blocks` blocks along x, with no dynamic shared memory. */
static void te__launch_blocks(te__launch *l, int64_t blocks, int threads) {
    te__launch_size(l, blocks, 1, 1, threads, 0);
}

/* Returns a cleared argument struct of size `bytes` for the kernel of launch l. */
static void *te__plan_args(te__plan *p, te__launch *l, size_t bytes) {
    uint32_t at = (p->args_used + 15u) & ~15u;
    l->args_bytes = (uint32_t)bytes;
    if (at + bytes <= TE__PLAN_ARG_BYTES) {
        l->args = p->args.bytes + at;
        p->args_used = at + (uint32_t)bytes;
    } else {
        l->args = te__alloc(p->te, bytes);
        l->args_on_heap = l->args != NULL;
        if (!l->args) { /* no memory: the caller overwrites arguments of other launches, but the plan never runs */
            p->result = TE_ERR_OUT_OF_MEMORY;
            l->args = p->args.bytes;
        }
    }
    memset(l->args, 0, bytes);
    return l->args;
}
#define TE__KARGS(p, l, type) ((type *)te__plan_args((p), (l), sizeof(type)))

/* Adds a launch to the plan and returns it. Its arguments are a copy of the `bytes` bytes at `args`. */
static te__launch *te__plan_with(te__plan *p, const char *family, const char *kernel, int64_t blocks, int threads,
                                 const void *args, size_t bytes) {
    te__launch *l = te__plan_launch(p, family, kernel);
    te__launch_blocks(l, blocks, threads);
    memcpy(te__plan_args(p, l, bytes), args, bytes);
    return l;
}

/* Returns a counter in device memory, for te_last_block. The counter is 0 between kernels. Kernels of a context share
 * the counter, since they run one after another. */
static unsigned *te__plan_counter(const te__plan *p) {
    return p->explain ? (unsigned *)(uintptr_t)256 : (unsigned *)p->counter;
}
/* Returns TE__PLAN_COUNTERS more counters, for kernels that need several. They too are 0 between kernels. */
enum { TE__PLAN_COUNTERS = 32 };
static unsigned *te__plan_counters(const te__plan *p) { return te__plan_counter(p) + 8; }
/* Returns TE__PLAN_MANY_COUNTERS counters, for kernels that need one for each part of their work. They too are 0
 * between kernels. */
enum { TE__PLAN_COUNTER_BYTES = 256, TE__PLAN_MANY_COUNTERS = 1024 };
static unsigned *te__plan_many_counters(const te__plan *p) {
    return te__plan_counter(p) + TE__PLAN_COUNTER_BYTES / sizeof(unsigned);
}
/* Returns a float in device memory for a maximum over all blocks. The float is 0 between kernels. */
static float *te__plan_largest(const te__plan *p) { return (float *)(te__plan_counter(p) + 4); }

/* Returns the bytes of shared memory of a multiprocessor (CUDA programming guide, technical specifications); for an
 * architecture that is not listed, the least of all. Each block takes 1024 bytes in addition to its own. */
static int64_t te__sm_shared(int sm) {
    return (sm == 80 ? 164 : sm == 90 || sm == 100 || sm == 103 ? 228 : 100) * 1024;
}
/* Returns whether `blocks` blocks of a multiprocessor can have this many bytes of shared memory. */
static bool te__plan_fits(const te__plan *p, int64_t shared, int blocks) {
    return blocks * (shared + 1024) <= te__sm_shared(p->sm);
}
/* Returns the largest number of blocks that fit on the GPU together.
 * `per_sm`: the blocks per multiprocessor that the kernel's launch bounds guarantee.
 * `shared`: bytes of shared memory of a block, static ones included. */
static int64_t te__plan_resident(const te__plan *p, int64_t threads, int64_t shared, int64_t per_sm) {
    bool small_chip = p->sm == 86 || p->sm == 89 || p->sm == 120;
    per_sm = te__min(per_sm, te__min((small_chip ? 1536 : 2048) / threads, te__sm_shared(p->sm) / (shared + 1024)));
    return te__max(per_sm, 1) * p->num_sms;
}
/* Returns the same for a cooperative launch. It begins when there is room for all of its blocks. If it had as many as
 * the whole GPU has room for, it would wait until the collectives beside it have ended. */
static int64_t te__plan_at_once(te__plan *p, int64_t threads, int64_t shared, int64_t per_sm) {
    p->at_once = true;
    return te__plan_resident(p, threads, shared, per_sm) * te__max(p->num_sms - p->beside, 1) / te__max(p->num_sms, 1);
}

/* Returns device memory, aligned to 256 bytes. The memory is released when the plan's kernels have been queued. */
static void *te__plan_workspace(te__plan *p, int64_t bytes) {
    te__buffer *b = NULL;
    if (bytes <= 0) return NULL;
    p->workspace_bytes += (size_t)bytes;
    if (p->num_workspaces == TE__MAX_WORKSPACES) {
        p->result = te__fail(p->te, TE_ERR_UNSUPPORTED, "more than %d workspaces in one plan", TE__MAX_WORKSPACES);
        return NULL;
    }
    if (!p->explain && !(b = te__buffer_create(p->te, (size_t)bytes))) {
        p->result = TE_ERR_OUT_OF_MEMORY;
        return NULL;
    }
    p->workspace[p->num_workspaces++] = b;
    return b ? b->data : (void *)(uintptr_t)256;
}
static float *te__plan_floats(te__plan *p, int64_t n) { return (float *)te__plan_workspace(p, 4 * n); }
static int *te__plan_ints(te__plan *p, int64_t n) { return (int *)te__plan_workspace(p, 4 * n); }
