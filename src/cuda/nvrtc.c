/* cuda/nvrtc.c: the interface to libnvrtc. It compiles a kernel's text to a cubin, or to PTX for GPUs newer than NVRTC.
 * Every function may be called from any thread. */

typedef int te__nvrtc_result;
typedef void *te__nvrtc_program;

#define TE__NVRTC_LIST(X)                                                                                            \
    X(Version, "nvrtcVersion", te__nvrtc_result, (int *major, int *minor))                                           \
    X(GetErrorString, "nvrtcGetErrorString", const char *, (te__nvrtc_result code))                                  \
    X(GetNumSupportedArchs, "nvrtcGetNumSupportedArchs", te__nvrtc_result, (int *count))                             \
    X(GetSupportedArchs, "nvrtcGetSupportedArchs", te__nvrtc_result, (int *archs))                                   \
    X(CreateProgram, "nvrtcCreateProgram", te__nvrtc_result,                                                         \
      (te__nvrtc_program *program, const char *text, const char *name, int num_headers, const char *const *headers, \
       const char *const *header_names))                                                                             \
    X(DestroyProgram, "nvrtcDestroyProgram", te__nvrtc_result, (te__nvrtc_program *program))                        \
    X(CompileProgram, "nvrtcCompileProgram", te__nvrtc_result,                                                       \
      (te__nvrtc_program program, int num_options, const char *const *options))                                      \
    X(GetCUBINSize, "nvrtcGetCUBINSize", te__nvrtc_result, (te__nvrtc_program program, size_t *size))                \
    X(GetCUBIN, "nvrtcGetCUBIN", te__nvrtc_result, (te__nvrtc_program program, char *cubin))                         \
    X(GetPTXSize, "nvrtcGetPTXSize", te__nvrtc_result, (te__nvrtc_program program, size_t *size))                    \
    X(GetPTX, "nvrtcGetPTX", te__nvrtc_result, (te__nvrtc_program program, char *ptx))                               \
    X(GetProgramLogSize, "nvrtcGetProgramLogSize", te__nvrtc_result, (te__nvrtc_program program, size_t *size))      \
    X(GetProgramLog, "nvrtcGetProgramLog", te__nvrtc_result, (te__nvrtc_program program, char *log))

enum { TE__MAX_ARCHS = 64, TE__NVRTC_MIN_MAJOR = 12 };

typedef struct te__nvrtc {
#define TE__NVRTC_MEMBER(name, symbol, type, args) type(*name) args;
    TE__NVRTC_LIST(TE__NVRTC_MEMBER)
#undef TE__NVRTC_MEMBER
    te__lib lib;
    int major, minor;
    int archs[TE__MAX_ARCHS], num_archs;
    char compiler[40]; /* version and build, such as "nvrtc13.0-1a2b3c4d". The cache key and the file name of each cubin
                        * contain it */
} te__nvrtc;

#define TE__NVRTC_INSTALL                                                                                     \
    "Install one (pip install nvidia-cuda-nvrtc-cu12, or the cuda-nvrtc package of a CUDA toolkit), or name " \
    "its file in TE_NVRTC_PATH"

static bool te__nvrtc_load(te__nvrtc *n, int newest, te__text *why) {
    static const struct {
        const char *symbol;
        size_t offset;
    } list[] = {
#define TE__NVRTC_ROW(name, symbol, type, args) {symbol, offsetof(te__nvrtc, name)},
        TE__NVRTC_LIST(TE__NVRTC_ROW)
#undef TE__NVRTC_ROW
    };
    te__text tried = TE_ZERO;
    te__file file;
    uint64_t bytes = 0;
    bool found = te__lib_open_at_most(TE__LIB_NVRTC, newest, &n->lib, &tried);
    if (!found)
        te__text_printf(why, "the kernel compiler libnvrtc could not be opened:\n%s" TE__NVRTC_INSTALL,
                        te__text_str(&tried));
    te__text_free(&tried);
    if (!found) return false;
    for (int i = 0; i < TE__COUNT(list); i++) {
        if (te__dl_function(n->lib.handle, list[i].symbol, (char *)n + list[i].offset)) continue;
        te__text_printf(why, "%s has no %s: it is older than CUDA 12.0. " TE__NVRTC_INSTALL, n->lib.path,
                        list[i].symbol);
        return false;
    }
    n->Version(&n->major, &n->minor);
    if (n->major < TE__NVRTC_MIN_MAJOR) {
        te__text_printf(why, "%s is of CUDA %d.%d, te.h needs 12.0 or newer. " TE__NVRTC_INSTALL, n->lib.path, n->major,
                        n->minor);
        return false;
    }
    if (n->GetNumSupportedArchs(&n->num_archs) || n->num_archs < 1 || n->num_archs > TE__MAX_ARCHS ||
        n->GetSupportedArchs(n->archs)) {
        te__text_printf(why, "%s does not tell which architectures it knows", n->lib.path);
        return false;
    }
    if (te__file_open(&file, n->lib.path, NULL)) {
        bytes = te__file_size(&file); /* different builds of one version have different sizes */
        te__file_close(&file);
    }
    snprintf(n->compiler, sizeof(n->compiler), "nvrtc%d.%d-%08x", n->major, n->minor,
             (unsigned)(te__hash64(&bytes, sizeof(bytes), 0) & 0xffffffffu));
    return true;
}

static te__mutex te__nvrtc_mutex = TE__MUTEX_INIT;
static te__nvrtc te__nvrtc_of_process;
static int te__nvrtc_state; /* 0: not searched yet; 1: found; -1: not found, and te__nvrtc_reason says why */
static te__text te__nvrtc_reason;

/* Returns the NVRTC of this process. The first call looks for it, and later calls return the same result. Without a
 * usable NVRTC, returns NULL and adds the reason to `why` (may be NULL). `newest` is the newest CUDA major version of
 * the driver; 0: any. */
static const te__nvrtc *te__nvrtc_open(int newest, te__text *why) {
    int state;
    te__mutex_lock(&te__nvrtc_mutex);
    if (te__nvrtc_state == 0) {
        te__nvrtc_state = te__nvrtc_load(&te__nvrtc_of_process, newest, &te__nvrtc_reason) ? 1 : -1;
        if (te__nvrtc_state < 0) te__dl_close(te__nvrtc_of_process.lib.handle);
    }
    state = te__nvrtc_state;
    te__mutex_unlock(&te__nvrtc_mutex);
    if (state < 0 && why) te__text_put(why, te__text_str(&te__nvrtc_reason));
    return state > 0 ? &te__nvrtc_of_process : NULL;
}

/* Writes the compilation target for a GPU of architecture `sm`: a cubin such as "sm_90a", or PTX such as "compute_90"
 * if the GPU is newer than NVRTC.
 * `n` is NULL without NVRTC. In that case the target is a cubin, to be searched in the disk cache.
 * Returns false if NVRTC has no suitable architecture. */
static bool te__nvrtc_arch(const te__nvrtc *n, int sm, char *name, size_t size) {
    int i, best = 0;
    bool known = !n;
    for (i = 0; n && i < n->num_archs; i++) {
        if (n->archs[i] == sm) known = true;
        if (n->archs[i] <= sm && n->archs[i] > best) best = n->archs[i];
    }
    if (known)
        snprintf(name, size, "sm_%d%s", sm, sm >= 90 ? "a" : "");
    else
        snprintf(name, size, "compute_%d", best);
    return known || best >= 80;
}

/* ---- compiling ----------------------------------------------------------------------------------------------- */

enum { TE__OPTIONS_TEXT = 512 };

/* A list of compiler options, in memory of its own. */
typedef struct te__nvrtc_options {
    const char *list[TE__MAX_OPTIONS + 4];
    int count;
    te__text text; /* the options, each with a NUL behind it */
} te__nvrtc_options;

/* Builds the list of compiler options. `options` is a text such as "X_DT=3,Y_DT=3". `extra` is NULL or one more
 * compiler option. */
static bool te__nvrtc_options_make(te__nvrtc_options *o, const char *options, const char *arch, const char *extra) {
    memset(o, 0, sizeof(*o));
    te__text_printf(&o->text, "-arch=%s%c-std=c++17%c", arch, 0, 0);
    if (extra) te__text_add(&o->text, extra, strlen(extra) + 1);
    for (size_t n; *options; options += n + (options[n] == ',')) {
        n = strcspn(options, ",");
        te__text_printf(&o->text, "-D%.*s%c", (int)n, options, 0);
    }
    for (size_t at = 0; at < o->text.n; at += strlen(o->text.s + at) + 1) {
        if (o->count == TE__COUNT(o->list)) return false;
        o->list[o->count++] = o->text.s + at;
    }
    return !o->text.oom;
}

static bool te__nvrtc_take(const te__nvrtc *n, te__nvrtc_program program, bool ptx, te__text *image) {
    size_t size = 0;
    te__text_clear(image);
    if ((ptx ? n->GetPTXSize(program, &size) : n->GetCUBINSize(program, &size)) || size == 0 ||
        !te__text_reserve(image, size))
        return false;
    if (ptx ? n->GetPTX(program, image->s) : n->GetCUBIN(program, image->s)) return false;
    image->n = size;
    image->s[size] = 0;
    return true;
}

/* Compiles a unit: a kernel's file and the files that it includes.
 * `options` is a text such as "X_DT=3,Y_DT=3". `extra` is NULL or one more compiler option.
 * `image` becomes a cubin for an `arch` such as "sm_90a", or PTX with a final 0 byte for "compute_80".
 * Adds the compiler's messages to `log`, even on success. */
static bool te__nvrtc_compile(const te__nvrtc *n, const te__unit *u, const char *options, const char *arch,
                              const char *extra, te__text *image, te__text *log) {
    const char *texts[TE__MAX_UNIT_FILES], *names[TE__MAX_UNIT_FILES];
    te__nvrtc_options o;
    te__nvrtc_program program = NULL;
    te__nvrtc_result code;
    bool done = false;
    size_t said = 0;
    for (int i = 1; i < u->num_files; i++) {
        texts[i - 1] = u->file[i]->text;
        names[i - 1] = u->file[i]->path;
    }
    if (!te__nvrtc_options_make(&o, options, arch, extra)) {
        te__text_put(log, "too many options");
        te__text_free(&o.text);
        return false;
    }
    code = n->CreateProgram(&program, u->file[0]->text, u->file[0]->path, u->num_files - 1, texts, names);
    if (code == 0) {
        code = n->CompileProgram(program, o.count, o.list);
        if (n->GetProgramLogSize(program, &said) == 0 && said > 1 && te__text_reserve(log, said)) {
            n->GetProgramLog(program, log->s + log->n);
            log->n += strlen(log->s + log->n);
        }
        if (code == 0) done = te__nvrtc_take(n, program, te__starts_with(arch, "compute_"), image);
        n->DestroyProgram(&program);
    }
    if (code && said <= 1) te__text_put(log, n->GetErrorString(code));
    te__text_free(&o.text);
    return done;
}
