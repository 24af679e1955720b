/* sys/libs.c: finds and opens NVIDIA's libraries. It searches the loader's path, CUDA toolkits and Python packages. It
 * calls none of their functions except nvrtcVersion. */

typedef enum te__lib_kind {
    TE__LIB_CUDA = 0,     /* the driver */
    TE__LIB_NVRTC = 1,    /* the kernel compiler */
    TE__LIB_NCCL = 2,
    TE__LIB_CUBLASLT = 3, /* for benchmarks, which compare with it */
    TE__LIB_COUNT = 4
} te__lib_kind;

typedef struct te__lib {
    void *handle;
    char path[1024]; /* the path of the library's file if the system reports it, else the name that was opened */
} te__lib;

enum { TE__LIB_MAX_NAMES = 6 };

typedef struct te__lib_spec {
    const char *title;
    const char *variable; /* environment variable that names a file or a folder; if it is set, nothing else is tried */
    const char *symbol;   /* a function that every version has */
    bool with_driver;     /* the library comes with the driver, so toolkits and Python packages are not searched for
                           * it */
    const char *names[TE__LIB_MAX_NAMES]; /* the newest first; NULL ends them */
} te__lib_spec;

static const te__lib_spec te__lib_specs[TE__LIB_COUNT] = {
#ifdef _WIN32
    {"libcuda", "TE_LIBCUDA_PATH", "cuInit", true, {"nvcuda.dll"}},
    {"libnvrtc",
     "TE_NVRTC_PATH",
     "nvrtcVersion",
     false,
     {"nvrtc64_130_0.dll", "nvrtc64_120_0.dll", "nvrtc64_112_0.dll"}},
    {"libnccl", "TE_NCCL_PATH", "ncclGetVersion", false, {"nccl.dll"}},
    {"libcublasLt",
     "TE_CUBLASLT_PATH",
     "cublasLtCreate",
     false,
     {"cublasLt64_13.dll", "cublasLt64_12.dll", "cublasLt64_11.dll"}},
#else
    {"libcuda", "TE_LIBCUDA_PATH", "cuInit", true, {"libcuda.so.1", "libcuda.so"}},
    {"libnvrtc",
     "TE_NVRTC_PATH",
     "nvrtcVersion",
     false,
     {"libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so.11.2", "libnvrtc.so"}},
    {"libnccl", "TE_NCCL_PATH", "ncclGetVersion", false, {"libnccl.so.2", "libnccl.so"}},
    {"libcublasLt",
     "TE_CUBLASLT_PATH",
     "cublasLtCreate",
     false,
     {"libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so.11", "libcublasLt.so"}},
#endif
};

/* The arguments and the results of one search. */
typedef struct te__lib_search {
    const te__lib_spec *spec;
    int newest;      /* the newest CUDA major version that is accepted; 0: any */
    te__lib *out;
    te__text *tried; /* receives a line for each name and each folder that failed, with the reason */
    te__text dirs;   /* the folders that have been searched; a NUL byte ends each of them */
} te__lib_search;

/* ---- opening ---- */

#ifndef _WIN32
/* Loads `name` if it is an NVRTC builtins library. NVRTC would find it only in the loader's path or among loaded
 * libraries. */
static bool te__lib_load_builtins(void *dir, const char *name) {
    te__text path = TE_ZERO;
    te__text_printf(&path, "%s/%s", (const char *)dir, name);
    bool builtins = te__starts_with(name, "libnvrtc-builtins.so.") && te__file_exists(te__text_str(&path));
    if (builtins) te__dl_open(te__text_str(&path), NULL);
    te__text_free(&path);
    return true;
}
#endif

/* Returns false, with the reason in `why`, for an NVRTC of a later CUDA than s->newest. Asks the library for its
 * version, because file names like libnvrtc.so have none. */
static inline bool te__lib_old_enough(const te__lib_search *s, void *handle, te__text *why) {
    int (*version)(int *major, int *minor) = NULL;
    int major = 0, minor = 0;
    if (s->newest <= 0 || s->spec != &te__lib_specs[TE__LIB_NVRTC]) return true;
    if (!te__dl_function(handle, s->spec->symbol, (void *)&version) || version(&major, &minor) != 0) return true;
    if (major <= s->newest) return true;
    te__text_printf(why, "it is of CUDA %d.%d, and the driver takes code of CUDA %d at most", major, minor, s->newest);
    return false;
}

static inline bool te__lib_try(te__lib_search *s, const char *name) {
    te__text why = TE_ZERO;
    void *handle = te__dl_open(name, &why);
    if (handle && !te__dl_sym(handle, s->spec->symbol)) {
        te__text_printf(&why, "it has no %s", s->spec->symbol);
        te__dl_close(handle);
        handle = NULL;
    }
    if (handle && !te__lib_old_enough(s, handle, &why)) {
        te__dl_close(handle);
        handle = NULL;
    }
    if (!handle) { /* the loader's message usually begins with the name */
        const char *words = te__text_str(&why);
        bool named = te__starts_with(words, name) && te__starts_with(words + strlen(name), ": ");
        te__text_printf(s->tried, "  %s%s%s\n", named ? "" : name, named ? "" : ": ", words);
    }
    te__text_free(&why);
    if (!handle) return false;
    s->out->handle = handle;
    if (!te__dl_path(handle, s->spec->symbol, s->out->path, sizeof s->out->path))
        snprintf(s->out->path, sizeof s->out->path, "%s", name);
#ifndef _WIN32
    if (s->spec == &te__lib_specs[TE__LIB_NVRTC] && te__path_is_absolute(name)) {
        te__text dir = TE_ZERO;
        te__text_add(&dir, name, te__path_dir_length(name));
        if (dir.s) te__dir_list(dir.s, te__lib_load_builtins, dir.s, NULL);
        te__text_free(&dir);
    }
#endif
    return true;
}

/* Tries the library's names without a folder. This finds a library that is loaded already, or one in the loader's
 * path. */
static inline bool te__lib_try_names(te__lib_search *s) {
    for (int i = 0; s->spec->names[i]; i++)
        if (te__lib_try(s, s->spec->names[i])) return true;
    return false;
}

/* Searches one folder. If the folder does not exist or was searched before, does nothing and adds no line to
 * `tried`. */
static inline bool te__lib_try_dir(te__lib_search *s, const char *dir) {
    if (!te__dir_exists(dir)) return false;
    for (size_t i = 0; i < s->dirs.n; i += strlen(s->dirs.s + i) + 1)
        if (strcmp(s->dirs.s + i, dir) == 0) return false;
    te__text_add(&s->dirs, dir, strlen(dir) + 1);
    bool any = false, found = false;
    te__text path = TE_ZERO;
    for (int i = 0; s->spec->names[i] && !found; i++) {
        te__text_clear(&path);
        te__text_printf(&path, "%s/%s", dir, s->spec->names[i]);
        if (!te__file_exists(te__text_str(&path))) continue;
        any = true;
        found = te__lib_try(s, path.s);
    }
    if (!any) te__text_printf(s->tried, "  %s: holds no %s\n", dir, s->spec->title);
    te__text_free(&path);
    return found;
}

/* ---- folders ---- */

/* The names in a folder that begin with `start`, in reverse alphabetical order: 13.0 comes before 12.8. */
typedef struct te__lib_names {
    const char *start; /* the common beginning of the names */
    te__text list;     /* the names; a NUL byte ends each of them */
} te__lib_names;

static bool te__lib_collect(void *user, const char *name) {
    te__lib_names *names = (te__lib_names *)user;
    if (!te__starts_with(name, names->start)) return true;
    size_t at = 0;
    while (at < names->list.n && strcmp(names->list.s + at, name) > 0) at += strlen(names->list.s + at) + 1;
    size_t n = strlen(name) + 1, behind = names->list.n - at;
    if (!te__text_reserve(&names->list, n)) return false;
    memmove(names->list.s + at + n, names->list.s + at, behind);
    memcpy(names->list.s + at, name, n);
    names->list.n += n;
    return true;
}

/* Calls visit(s, "DIR/NAME") for every entry of the folder `dir` whose name begins with `start`. Stops when a call
 * returns true. */
static inline bool te__lib_for_each(te__lib_search *s, const char *dir, const char *start,
                                    bool (*visit)(te__lib_search *s, const char *path)) {
    te__lib_names names = {start, TE_ZERO};
    te__text path = TE_ZERO;
    bool found = false;
    if (te__dir_exists(dir)) te__dir_list(dir, te__lib_collect, &names, NULL);
    for (size_t i = 0; i < names.list.n && !found; i += strlen(names.list.s + i) + 1) {
        te__text_clear(&path);
        te__text_printf(&path, "%s/%s", dir, names.list.s + i);
        found = visit(s, te__text_str(&path));
    }
    te__text_free(&path);
    te__text_free(&names.list);
    return found;
}

static inline bool te__lib_visit_below(te__lib_search *s, const char *dir, const char *below,
                                       bool (*visit)(te__lib_search *s, const char *path)) {
    te__text path = TE_ZERO;
    te__text_printf(&path, "%s/%s", dir, below);
    bool found = visit(s, te__text_str(&path));
    te__text_free(&path);
    return found;
}

static bool te__lib_in_dir(te__lib_search *s, const char *dir) { return te__lib_try_dir(s, dir); }
static bool te__lib_in_lib(te__lib_search *s, const char *dir) {
    return te__lib_visit_below(s, dir, "lib", te__lib_in_dir);
}

/* Searches a toolkit: /usr/local/cuda-12.8, $CUDA_HOME ... */
static bool te__lib_in_toolkit(te__lib_search *s, const char *dir) {
#ifdef _WIN32
    return te__lib_visit_below(s, dir, "bin/x64", te__lib_in_dir) || te__lib_visit_below(s, dir, "bin", te__lib_in_dir);
#else
    te__text targets = TE_ZERO;
    te__text_printf(&targets, "%s/targets", dir);
    bool found = te__lib_visit_below(s, dir, "lib64", te__lib_in_dir) || te__lib_in_lib(s, dir) ||
                 te__lib_for_each(s, te__text_str(&targets), "", te__lib_in_lib);
    te__text_free(&targets);
    return found;
#endif
}

/* Searches one of the packages that pip installs, such as site-packages/nvidia/cuda_nvrtc or
 * site-packages/nvidia/cu13. */
static bool te__lib_in_package(te__lib_search *s, const char *dir) {
#ifdef _WIN32
    return te__lib_visit_below(s, dir, "bin/x86_64", te__lib_in_dir) ||
           te__lib_visit_below(s, dir, "bin", te__lib_in_dir);
#else
    return te__lib_in_lib(s, dir);
#endif
}
/* Searches a package only if the library is in it. So `tried` gets no lines about other packages. */
static bool te__lib_in_package_if_there(te__lib_search *s, const char *dir) {
    te__text path = TE_ZERO;
    bool there = false;
#ifdef _WIN32
    static const char *const below[2] = {"bin", "bin/x86_64"};
#else
    static const char *const below[1] = {"lib"};
#endif
    for (int i = 0; i < TE__COUNT(below); i++) {
        for (int k = 0; s->spec->names[k]; k++) {
            te__text_clear(&path);
            te__text_printf(&path, "%s/%s/%s", dir, below[i], s->spec->names[k]);
            there = there || te__file_exists(te__text_str(&path));
        }
    }
    te__text_free(&path);
    return there && te__lib_in_package(s, dir);
}
static bool te__lib_in_site(te__lib_search *s, const char *dir) {
    te__text nvidia = TE_ZERO;
    te__text_printf(&nvidia, "%s/nvidia", dir);
    bool packages = te__dir_exists(te__text_str(&nvidia));
    bool found = packages && te__lib_for_each(s, nvidia.s, "", te__lib_in_package_if_there);
    if (packages && !found) te__text_printf(s->tried, "  %s: holds no usable %s\n", nvidia.s, s->spec->title);
    te__text_free(&nvidia);
    return found;
}
#ifndef _WIN32
static bool te__lib_in_python(te__lib_search *s, const char *dir) {
    return te__lib_visit_below(s, dir, "site-packages", te__lib_in_site) ||
           te__lib_visit_below(s, dir, "dist-packages", te__lib_in_site);
}
#endif

/* Searches the Python packages of an installation. `prefix` is /usr/local, a virtual environment, or a conda
 * environment. */
static inline bool te__lib_in_prefix(te__lib_search *s, const char *prefix) {
#ifdef _WIN32
    return te__lib_visit_below(s, prefix, "Lib/site-packages", te__lib_in_site) ||
           te__lib_visit_below(s, prefix, "Library/bin", te__lib_in_dir);
#else
    static const char *const libs[2] = {"lib", "lib64"};
    bool found = false;
    te__text lib = TE_ZERO;
    for (int i = 0; i < 2 && !found; i++) {
        te__text_clear(&lib);
        te__text_printf(&lib, "%s/%s", prefix, libs[i]);
        found = te__lib_for_each(s, te__text_str(&lib), "python3", te__lib_in_python);
    }
    te__text_free(&lib);
    return found;
#endif
}

#ifdef _WIN32
#define TE__PATH_SEPARATOR ';'
#else
#define TE__PATH_SEPARATOR ':'
#endif

/* Searches every prefix X with "X/bin" in $PATH. On Windows every folder in $PATH is a prefix, since python.exe lies in
 * the prefix itself. */
static inline bool te__lib_in_path_variable(te__lib_search *s) {
    const char *path = te__env("PATH");
    te__text prefix = TE_ZERO;
    bool found = false;
    while (path && *path && !found) {
        const char *end = strchr(path, TE__PATH_SEPARATOR);
        size_t n = end ? (size_t)(end - path) : strlen(path);
        te__text_clear(&prefix);
        te__text_add(&prefix, path, n);
        path += end ? n + 1 : n;
        if (prefix.n == 0) continue;
#ifndef _WIN32
        if (!te__ends_with(prefix.s, "/bin")) continue;
        prefix.n -= 4;
        prefix.s[prefix.n] = 0;
        if (prefix.n == 0) te__text_put(&prefix, "/usr"); /* /bin is a link to /usr/bin */
#endif
        found = te__lib_in_prefix(s, te__text_str(&prefix));
    }
    te__text_free(&prefix);
    return found;
}

static inline bool te__lib_search_toolkits(te__lib_search *s) {
    static const char *const variables[3] = {"CUDA_HOME", "CUDA_PATH", "CUDA_ROOT"};
    for (int i = 0; i < TE__COUNT(variables); i++)
        if (te__env(variables[i]) && te__lib_in_toolkit(s, te__env(variables[i]))) return true;
#ifdef _WIN32
    return te__lib_for_each(s, "C:/Program Files/NVIDIA GPU Computing Toolkit/CUDA", "v", te__lib_in_toolkit);
#else
    return te__lib_for_each(s, "/usr/local", "cuda", te__lib_in_toolkit) || te__lib_in_toolkit(s, "/opt/cuda");
#endif
}

static inline bool te__lib_search_python(te__lib_search *s) {
    static const char *const variables[2] = {"VIRTUAL_ENV", "CONDA_PREFIX"};
    bool found = false;
    for (int i = 0; i < TE__COUNT(variables) && !found; i++) {
        const char *prefix = te__env(variables[i]);
        if (!prefix) continue;
        /* conda's own packages have the library in PREFIX/lib */
        found = te__lib_in_prefix(s, prefix) || te__lib_in_lib(s, prefix);
    }
    if (!found) found = te__lib_in_path_variable(s);
#ifndef _WIN32
    if (!found) found = te__lib_in_prefix(s, "/usr/local") || te__lib_in_prefix(s, "/usr");
    if (!found && te__env("HOME")) {
        te__text local = TE_ZERO;
        te__text_printf(&local, "%s/.local", te__env("HOME")); /* pip install --user */
        found = te__lib_in_prefix(s, te__text_str(&local));
        te__text_free(&local);
    }
#endif
    return found;
}

/* Searches the folders where containers, WSL and NixOS put the driver. The loader does not search these folders. */
static inline bool te__lib_search_driver(te__lib_search *s) {
#ifdef _WIN32
    (void)s;
    return false;
#else
    return te__lib_try_dir(s, "/usr/local/nvidia/lib64") || te__lib_try_dir(s, "/usr/lib/wsl/lib") ||
           te__lib_try_dir(s, "/run/opengl-driver/lib");
#endif
}

/* ---- the search ---- */

/* Opens a library. The caller closes it by te__dl_close(out->handle). `newest` is the newest CUDA major version of
 * NVRTC that the driver takes; 0: any. `tried` receives a line for every name and folder that failed.
 *
 * If the environment variable te__lib_spec.variable is set, only its file or folder is tried. Otherwise the loader's
 * path comes first, then toolkits, then Python packages. */
static inline bool te__lib_open_at_most(te__lib_kind kind, int newest, te__lib *out, te__text *tried) {
    te__lib_search s = TE_ZERO;
    te__text ignored = TE_ZERO;
    bool found = false;
    memset(out, 0, sizeof *out);
    s.spec = &te__lib_specs[kind];
    s.newest = newest;
    s.out = out;
    s.tried = tried ? tried : &ignored;
    const char *given = te__env(s.spec->variable);
    if (given) {
        te__text_printf(s.tried, "  (%s is set, so that nothing else is tried)\n", s.spec->variable);
        found = te__dir_exists(given) ? te__lib_try_dir(&s, given) : te__lib_try(&s, given);
    } else {
        found = te__lib_try_names(&s);
        if (!found && s.spec->with_driver) found = te__lib_search_driver(&s);
        else if (!found) found = te__lib_search_toolkits(&s) || te__lib_search_python(&s);
    }
    te__text_free(&s.dirs);
    te__text_free(&ignored);
    return found;
}

static inline bool te__lib_open(te__lib_kind kind, te__lib *out, te__text *tried) {
    return te__lib_open_at_most(kind, 0, out, tried);
}
