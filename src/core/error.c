/* core/error.c: keeps a context's first error, writes the log, allocates host memory. This file must not depend on the
 * kind of device. */

static void te__log_text(te_ctx *te, te_log_level level, const char *text) {
    if (!te || level > te->log_level) return;
    if (te->log)
        te->log(te->log_user, level, text);
    else
        fprintf(stderr, "te.h: %s%s\n", level == TE_LOG_WARN ? "warning: " : "", text);
}

TE_PRINTF(3, 4) static void te__log(te_ctx *te, te_log_level level, const char *format, ...) {
    char text[2048];
    va_list args;
    if (!te || level > te->log_level) return;
    va_start(args, format);
    vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    te__log_text(te, level, text);
}

TE_PRINTF(2, 3) static void te__warn(te_ctx *te, const char *format, ...) {
    char text[2048];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    te__log_text(te, TE_LOG_WARN, text);
}

/* The error text that is used if there is no host memory for a longer text. */
static const char te__no_memory_text[] = "out of host memory";

/* Marks the current training step, if there is one, as failed, because one of its calls has failed. */
static void te__step_fails(te_ctx *te) { te->step_failed = te->step_failed || te->in_step; }
/* Ends the training step, so that te_clear_error no longer undoes its changes. Does nothing in a capture or a
 * warm-up. */
static void te__step_ends(te_ctx *te) {
    if (!te->capture && !te->warming) te->in_step = te->step_failed = false;
}

/* Keeps the first error and returns `code`. Later errors go only to the debug log. */
TE_PRINTF(3, 0) static te_result te__vfail(te_ctx *te, te_result code, const char *format, va_list args) {
    char text[4096];
    size_t used = 0, size;
    if (!te) return code;
    if (te->module_path[0]) {
        int n = snprintf(text, sizeof(text), "%s: ", te->module_path);
        used = n > 0 ? (size_t)te__min(n, (int64_t)sizeof(text) - 1) : 0;
    }
    vsnprintf(text + used, sizeof(text) - used, format, args);
    if (te->capture) te->capture->failed = true;
    if (code == TE_ERR_OUT_OF_MEMORY) te__step_fails(te);
    if (te->error_code != TE_OK) {
        te__log(te, TE_LOG_DEBUG, "after the first error: %s", text);
        return code;
    }
    te->error_code = code;
    size = strlen(text) + 1;
    te->error = (char *)malloc(size);
    if (te->error) memcpy(te->error, text, size);
    te__log(te, TE_LOG_INFO, "error: %s", text);
    return code;
}
TE_PRINTF(3, 4) static te_result te__fail(te_ctx *te, te_result code, const char *format, ...) {
    va_list args;
    va_start(args, format);
    te__vfail(te, code, format, args);
    va_end(args);
    return code;
}
/* te__no_tensor and te__not_ok call te__fail, and return NULL or false. They are for callers that return no
 * te_result. */
TE_PRINTF(3, 4) static te_tensor *te__no_tensor(te_ctx *te, te_result code, const char *format, ...) {
    va_list args;
    va_start(args, format);
    te__vfail(te, code, format, args);
    va_end(args);
    return NULL;
}
TE_PRINTF(3, 4) static bool te__not_ok(te_ctx *te, te_result code, const char *format, ...) {
    va_list args;
    va_start(args, format);
    te__vfail(te, code, format, args);
    va_end(args);
    return false;
}

/* The next four functions make a call fail because a capture cannot record it. */
static te_result te__refuse_capture(te_ctx *te, const char *what, const char *instead) {
    return te__fail(te, TE_ERR_STATE, "%s between te_graph_begin and te_graph_end, where nothing runs: %s", what,
                    instead);
}
static te_result te__refuse_wait(te_ctx *te) {
    return te__refuse_capture(te, "waiting for the device", "te_synchronize after te_graph_launch");
}
static te_result te__refuse_download(te_ctx *te) {
    return te__refuse_capture(te, "reading a tensor back (te_tensor_to_host, te_tensor_to_f32, te_tensor_item)",
                              "retain it and read it after te_graph_launch");
}
static te_result te__refuse_upload(te_ctx *te) {
    return te__refuse_capture(te, "copying from host memory (te_tensor_from_host, te_tensor_copy_from_host)",
                              "make the tensor before te_graph_begin and copy into it before each te_graph_launch");
}
#define TE__RUN_FIRST "run the step once, or te_warmup_begin/te_warmup_end around it, before te_graph_begin"

/* Makes the call named `what` fail if a trace hook made it; a trace hook must not make this call. */
static te_result te__refuse_hook(te_ctx *te, const char *what) {
    if (!te->tracing) return TE_OK;
    return te__fail(te, TE_ERR_STATE,
                    "%s from inside a trace hook (te_set_trace): a hook only observes; retain the tensors that it "
                    "needs, and make this call when the traced call has returned",
                    what);
}

/* Returns whether this process is a forked child of the context's process. In such a child, the context's threads and
 * the driver's state do not exist. */
static bool te__is_forked(const te_ctx *te) { return te->forks != te__forks; }
static te_result te__refuse_fork(te_ctx *te) {
    if (!te__is_forked(te)) return TE_OK;
    return te__fail(te, TE_ERR_STATE,
                    "this context on %s was created in process %lld and is used in process %lld, a child of it by "
                    "fork, where its threads and its GPU are gone: "
                    "create contexts after fork",
                    te->device_name, (long long)te->process_id, (long long)te__process_id());
}

/* Checks that `desc` is not NULL. `who` is the name of the create function. */
static bool te__has_desc(te_ctx *te, const void *desc, const char *who) {
    if (desc) return true;
    te__fail(te, TE_ERR_INVALID, "%s: desc is NULL; it says what to make: zero one, and fill in what has no default",
             who);
    return false;
}

/* Returns r, the result of the program's callback `function`; a number that is no te_result becomes an error. `of` is
 * the name of the callback's object, or NULL. */
static te_result te__returned(te_ctx *te, te_result r, const char *function, const char *of) {
    if ((int)r >= 0 && (int)r < TE_RESULT_COUNT) return r;
    return te__fail(te, TE_ERR_INVALID,
                    "%s%s%s%s returned %d, which is not a te_result: TE_OK or an error's code is needed", function,
                    of ? " of \"" : "", of ? of : "", of ? "\"" : "", (int)r);
}

/* Waits for kernels that are being compiled, and so finds errors of compilation. */
static void te__settle(const te_ctx *te) {
    if (te && te->device && te->device->settle) te->device->settle((te_ctx *)te);
}
/* Calls te__settle if there is no error yet. A later failure would not change the first error. */
static void te__settle_error(const te_ctx *te) {
    if (te && te->error_code == TE_OK) te__settle(te);
}
TE_API bool te_ok(const te_ctx *te) {
    te__settle(te);
    return te && te->error_code == TE_OK;
}
TE_API const char *te_error(const te_ctx *te) {
    if (!te) return "there is no context (te_ctx_create returned NULL)";
    te__settle_error(te);
    if (te->error_code == TE_OK) return "";
    return te->error ? te->error : te__no_memory_text;
}
/* Returns the code of the first error. May wait for kernels that are being compiled; te->error_code does not. */
TE_API TE__NOINLINE te_result te_error_code(const te_ctx *te) {
    te__settle_error(te);
    return te ? te->error_code : TE_ERR_STATE;
}
static void te__forget_error(te_ctx *te) {
    free(te->error);
    te->error = NULL;
    if (te->error_code != TE_OK) te->errors++;
    te->error_code = TE_OK;
}
TE_API void te_clear_error(te_ctx *te) {
    if (!te) return;
    te__settle(te); /* earlier calls may still fail; their errors are cleared too */
    te__forget_error(te);
    /* drops an error of te__undo_step: the next step tries again and reports it */
    if (te->step_failed && !te->capture && te__undo_step(te) != TE_OK) te__forget_error(te);
}

TE_API const char *te_result_name(te_result result) {
    static const char *const names[TE_RESULT_COUNT] = {"TE_OK",         "TE_ERR_INVALID",     "TE_ERR_SHAPE",
                                                       "TE_ERR_DTYPE",  "TE_ERR_UNSUPPORTED", "TE_ERR_OUT_OF_MEMORY",
                                                       "TE_ERR_DEVICE", "TE_ERR_LIBRARY",     "TE_ERR_COMPILE",
                                                       "TE_ERR_IO",     "TE_ERR_FORMAT",      "TE_ERR_STATE"};
    return (int)result >= 0 && result < TE_RESULT_COUNT ? names[result] : "?";
}

/* ---- host memory ---- */

/* Allocates host memory without a te__block header: for the context itself, and for objects that outlive it. */
static void *te__raw_alloc(const te_allocator *a, size_t bytes) {
    return a->alloc ? a->alloc(a->user, bytes, 16) : malloc(bytes);
}
static void te__raw_free(const te_allocator *a, void *p, size_t bytes) {
    if (a->release)
        a->release(a->user, p, bytes);
    else
        free(p);
}

/* The header in front of all memory from te__try_alloc and te__alloc, aligned to 16 bytes. te_ctx_destroy frees the
 * list of headers. */
struct te__block {
    union {
        struct {
            te__block *next, **at; /* at: the address of the pointer to this block */
            size_t bytes;
        } is;
        uint64_t align[4];
    } u;
};

/* Allocates host memory. If there is none, returns NULL and sets no error. */
static void *te__try_alloc(te_ctx *te, size_t bytes) {
    te__block *b;
    if (bytes == 0) bytes = 1;
    b = bytes <= SIZE_MAX - sizeof(te__block)
            ? (te__block *)te__raw_alloc(&te->host_allocator, sizeof(te__block) + bytes)
            : NULL;
    if (!b) return NULL;
    b->u.is.bytes = bytes;
    b->u.is.next = te->blocks;
    b->u.is.at = &te->blocks;
    if (te->blocks) te->blocks->u.is.at = &b->u.is.next;
    te->blocks = b;
    return b + 1;
}
static TE__NOINLINE void *te__alloc(te_ctx *te, size_t bytes) {
    void *p = te__try_alloc(te, bytes);
    if (!p)
        te__fail(te, TE_ERR_OUT_OF_MEMORY, "%s: %llu bytes could not be allocated", te__no_memory_text,
                 (unsigned long long)bytes);
    return p;
}
static TE__NOINLINE void *te__alloc_zero(te_ctx *te, size_t bytes) {
    void *p = te__alloc(te, bytes);
    if (p) memset(p, 0, bytes ? bytes : 1);
    return p;
}
/* Frees memory from te__try_alloc or te__alloc. p may be NULL. */
static void te__free(te_ctx *te, void *p) {
    te__block *b;
    if (!p) return;
    b = (te__block *)p - 1;
    *b->u.is.at = b->u.is.next;
    if (b->u.is.next) b->u.is.next->u.is.at = b->u.is.at;
    te__raw_free(&te->host_allocator, b, sizeof(te__block) + b->u.is.bytes);
}
static void te__free_all(te_ctx *te) {
    while (te->blocks) te__free(te, te->blocks + 1);
}

/* ---- objects to close: see te__closable ---- */

static void te__closable_add(te_ctx *te, te__closable *c, const char *kind, void (*close)(void *owner), void *owner) {
    c->kind = kind;
    c->close = close;
    c->owner = owner;
    c->next = te->closables;
    c->at = &te->closables;
    if (te->closables) te->closables->at = &c->next;
    te->closables = c;
}
static void te__closable_remove(te__closable *c) {
    if (!c->at) return;
    *c->at = c->next;
    if (c->next) c->next->at = c->at;
    c->at = NULL;
}
/* Makes room for one more element of an array. If there is no memory, returns false and leaves the array as it was. */
static bool te__try_grow(te_ctx *te, void **array, int *capacity, int count, size_t element) {
    int more;
    void *p;
    if (count < *capacity) return true;
    more = *capacity ? 2 * *capacity : 16;
    p = te__try_alloc(te, (size_t)more * element);
    if (!p) return false;
    if (*array) memcpy(p, *array, (size_t)count * element);
    te__free(te, *array);
    *array = p;
    *capacity = more;
    return true;
}
static bool te__grow(te_ctx *te, void **array, int *capacity, int count, size_t element) {
    if (te__try_grow(te, array, capacity, count, element)) return true;
    te__fail(te, TE_ERR_OUT_OF_MEMORY, "%s: a list of %d entries cannot grow", te__no_memory_text, count);
    return false;
}
static char *te__copy_string(te_ctx *te, const char *s) {
    size_t n = strlen(s) + 1;
    char *p = (char *)te__alloc(te, n);
    if (p) memcpy(p, s, n);
    return p;
}
