/* cuda/cache.c: the cache of compiled kernels on disk. This file must not depend on the driver, NVRTC or contexts.
 *
 * An entry is a file such as ROOT/sm_90a/norm/norm_fwd.X_DT=3,Y_DT=3.<key>.<compiler>.cubin: a header of text, then the
 * compiled image. The header has the whole key and a digest of the image, to detect wrong and damaged entries. The
 * cache never uses a folder that other users can write to, because entries are code. */

enum { TE__CACHE_FORMAT = 1, TE__CACHE_PATH = 1024, TE__CACHE_ENTRY_LIMIT = 256 << 20 };

typedef struct te__cache {
    char root[TE__CACHE_PATH];           /* "": kernels are not kept on disk */
    char read_only[4 * TE__CACHE_PATH]; /* folders searched before `root`, separated as in PATH */
} te__cache;

/* Everything that a compiled kernel depends on. */
typedef struct te__cache_key {
    char kernel[96]; /* "norm/norm_fwd" */
    char options[TE__OPTIONS_TEXT]; /* "X_DT=3,Y_DT=3", sorted */
    char arch[24];   /* "sm_90a"; "compute_90": PTX */
    char text[TE__DIGEST_CHARS + 1]; /* te__unit_digest */
    char compiler[40]; /* te__nvrtc.compiler; "": any compiler, for a process without NVRTC */
} te__cache_key;

/* ---- folders ------------------------------------------------------------------------------------------------- */

/* Sets c->root to $TE_CACHE_DIR, $XDG_CACHE_HOME/te or ~/.cache/te. An empty TE_CACHE_DIR means no cache. If the folder
 * is unusable, returns false with the reason in *why. */
static bool te__cache_open(te__cache *c, te__text *why) {
    const char *dir = getenv("TE_CACHE_DIR"), *base = te__env("XDG_CACHE_HOME"), *extra = te__env("TE_CACHE_READONLY"),
               *below = "/te";
    char root[TE__CACHE_PATH];
    int n;
    memset(c, 0, sizeof(*c));
    if (extra && strlen(extra) >= sizeof(c->read_only)) te__text_put(why, "TE_CACHE_READONLY is too long. ");
    else if (extra) memcpy(c->read_only, extra, strlen(extra) + 1);
    if (dir && !dir[0]) return why->n == 0;
    if (!dir && !base) {
        below = "/.cache/te";
        base = te__env("HOME");
#ifdef _WIN32
        below = "\\te\\cache";
        base = te__env("LOCALAPPDATA");
#endif
    }
    if (!dir && !base) {
        te__text_put(why, "there is no home folder for a cache (TE_CACHE_DIR names another)");
        return false;
    }
    n = dir ? snprintf(root, sizeof(root), "%s", dir) : snprintf(root, sizeof(root), "%s%s", base, below);
    if (n < 0 || n >= (int)sizeof(root)) {
        te__text_put(why, "the cache folder's name is too long");
        return false;
    }
    if (!te__dir_make(root, why) || !te__dir_is_private(root, why)) return false;
    memcpy(c->root, root, sizeof(root));
    return why->n == 0;
}

/* Writes the first folder name of *list to `folder`, and moves *list behind this name. *list has the form of PATH.
 * Returns false at the end of the list. */
static bool te__cache_next_folder(const char **list, char *folder, size_t size) {
    const char *end;
    while (**list == TE__PATH_SEPARATOR) ++*list;
    if (!**list) return false;
    end = strchr(*list, TE__PATH_SEPARATOR);
    if (!end) end = *list + strlen(*list);
    snprintf(folder, size, "%.*s", (int)(end - *list), *list);
    *list = end;
    return true;
}

/* ---- names --------------------------------------------------------------------------------------------------- */

/* Writes the folder of an entry: ROOT/sm_90a/norm */
static void te__cache_folder(const char *root, const te__cache_key *key, te__text *out) {
    te__text_printf(out, "%s/%s/%.*s", root, key->arch, (int)strcspn(key->kernel, "/"), key->kernel);
}

/* Writes the first part of an entry's file name, before the compiler's name:
 * norm_fwd.X_DT=3,Y_DT=3.0123456789abcdef. */
static void te__cache_stem(const te__cache_key *key, te__text *out) {
    const char *kernel = strchr(key->kernel, '/');
    char digest[TE__DIGEST_CHARS + 1];
    te__hasher h;
    te__hasher_init(&h);
    te__hasher_string(&h, key->kernel);
    te__hasher_string(&h, key->options);
    te__hasher_string(&h, key->arch);
    te__hasher_string(&h, key->text);
    te__hasher_hex(&h, digest);
    te__text_printf(out, "%.64s.", kernel ? kernel + 1 : key->kernel);
    if (key->options[0]) te__text_printf(out, "%.96s.", key->options); /* for human readers; the digest covers the whole
                                                                        * text */
    te__text_printf(out, "%.16s.", digest);
}
static const char *te__cache_suffix(const te__cache_key *key) {
    return te__starts_with(key->arch, "sm_") ? ".cubin" : ".ptx";
}

static void te__cache_path(const char *root, const te__cache_key *key, te__text *out) {
    te__cache_folder(root, key, out);
    te__text_put(out, "/");
    te__cache_stem(key, out);
    te__text_put(out, key->compiler);
    te__text_put(out, te__cache_suffix(key));
}

/* A search among entries that differ only in their compiler. The result is the last file name in alphabetical order. */
typedef struct te__cache_search {
    const char *stem, *suffix;
    te__text best;
} te__cache_search;
static bool te__cache_consider(void *user, const char *name) {
    te__cache_search *s = (te__cache_search *)user;
    if (te__starts_with(name, s->stem) && te__ends_with(name, s->suffix) && strcmp(name, te__text_str(&s->best)) > 0) {
        te__text_clear(&s->best);
        te__text_put(&s->best, name);
    }
    return true;
}

/* Sets the empty key->compiler to the compiler of an entry that fits the rest of the key. Returns false without such an
 * entry. */
static bool te__cache_find_compiler(const char *root, te__cache_key *key) {
    te__text folder = TE_ZERO, stem = TE_ZERO;
    te__cache_search search = TE_ZERO;
    size_t from, to;
    bool found = false;
    te__cache_folder(root, key, &folder);
    te__cache_stem(key, &stem);
    search.stem = te__text_str(&stem);
    search.suffix = te__cache_suffix(key);
    te__dir_list(te__text_str(&folder), te__cache_consider, &search, NULL);
    from = stem.n;
    to = search.best.n - strlen(search.suffix);
    if (search.best.n > from + strlen(search.suffix) && to - from < sizeof(key->compiler)) {
        memcpy(key->compiler, search.best.s + from, to - from);
        key->compiler[to - from] = 0;
        found = true;
    }
    te__text_free(&folder);
    te__text_free(&stem);
    te__text_free(&search.best);
    return found;
}

/* ---- entries ------------------------------------------------------------------------------------------------- */

/* Writes the header for an image with this key. */
static void te__cache_header(const te__cache_key *key, const char *image, size_t size, te__text *out) {
    char digest[TE__DIGEST_CHARS + 1];
    te__digest(image, size, digest);
    te__text_printf(out, "te.h compiled kernel, format %d\nkernel %s\noptions %s\narch %s\n", TE__CACHE_FORMAT,
                    key->kernel, key->options, key->arch);
    te__text_printf(out, "text %s\ncompiler %s\nsize %llu\ndigest %s\n\n", key->text, key->compiler,
                    (unsigned long long)size, digest);
}

/* Checks and removes the header of an entry. Returns false if the entry is damaged or has another key. */
static bool te__cache_check(const te__cache_key *key, te__text *entry) {
    te__text header = TE_ZERO;
    const char *end = entry->n ? strstr(entry->s, "\n\n") : NULL;
    size_t size = end ? (size_t)(end + 2 - entry->s) : 0;
    bool right = false;
    if (end && entry->n > size) {
        te__cache_header(key, entry->s + size, entry->n - size, &header);
        right = header.n == size && memcmp(header.s, entry->s, size) == 0;
    }
    te__text_free(&header);
    if (!right) return false;
    memmove(entry->s, entry->s + size, entry->n - size + 1);
    entry->n -= size;
    return true;
}

/* Reads the image for a key from the folder `root`. Returns false without a valid entry. Sets *damaged if the entry is
 * damaged. */
static bool te__cache_load_from(const char *root, const te__cache_key *key, te__text *image, bool *damaged) {
    te__cache_key whole = *key;
    te__text path = TE_ZERO;
    bool fine = false;
    if (whole.compiler[0] || te__cache_find_compiler(root, &whole)) {
        te__cache_path(root, &whole, &path);
        te__text_clear(image);
        if (te__file_exists(te__text_str(&path)) && te__file_read(path.s, TE__CACHE_ENTRY_LIMIT, image, NULL)) {
            fine = te__cache_check(&whole, image);
            if (!fine) *damaged = true;
        }
    }
    te__text_free(&path);
    return fine;
}

/* Reads the image for a key from any cache folder. A 0 byte follows the bytes of *image. Returns false without a valid
 * entry. Sets *damaged if an entry is damaged. te__cache_store replaces such an entry. */
static bool te__cache_load(const te__cache *c, const te__cache_key *key, te__text *image, bool *damaged) {
    const char *list = c->read_only;
    char folder[TE__CACHE_PATH];
    *damaged = false;
    while (te__cache_next_folder(&list, folder, sizeof(folder)))
        if (te__cache_load_from(folder, key, image, damaged)) return true;
    return c->root[0] && te__cache_load_from(c->root, key, image, damaged);
}

/* Stores the compiled kernel for a key. The store is atomic: a failure or a second writer leaves no partial entry. */
static bool te__cache_store(const te__cache *c, const te__cache_key *key, const te__text *image, te__text *why) {
    te__text folder = TE_ZERO, path = TE_ZERO, header = TE_ZERO;
    te__file_out out;
    bool done;
    if (!c->root[0]) return true;
    te__cache_folder(c->root, key, &folder);
    te__cache_path(c->root, key, &path);
    te__cache_header(key, image->s, image->n, &header);
    done = te__dir_make(te__text_str(&folder), why);
    if (done) {
        te__file_out_begin(&out, te__text_str(&path), why);
        te__file_out_write(&out, te__text_str(&header), header.n);
        te__file_out_write(&out, image->s, image->n);
        done = te__file_out_commit(&out);
    }
    te__text_free(&folder);
    te__text_free(&path);
    te__text_free(&header);
    return done;
}

/* ---- one compilation for many processes ---------------------------------------------------------------------- */

/* The number of seconds to wait for another process that compiles a kernel. Then this process compiles the kernel
 * too. */
enum { TE__CACHE_PATIENCE = 120 };

typedef struct te__cache_lock {
    te__lock lock;
    te__text path;
    bool held;
} te__cache_lock;

/* Acquires the lock of a key. The owner compiles the kernel; other processes wait here, then read the cache. Without
 * working locks, several processes may compile the same kernel. */
static void te__cache_lock_acquire(const te__cache *c, const te__cache_key *key, te__cache_lock *l) {
    double end = te__time_now() + (double)TE__CACHE_PATIENCE;
    te__text folder = TE_ZERO;
    int state = TE__LOCK_FAILED;
    memset(l, 0, sizeof(*l));
    if (!c->root[0]) return;
    te__cache_folder(c->root, key, &folder);
    if (te__dir_make(te__text_str(&folder), NULL)) {
        te__cache_path(c->root, key, &l->path);
        te__text_put(&l->path, ".lock");
        while ((state = te__lock_try(&l->lock, te__text_str(&l->path), false, NULL)) == TE__LOCK_BUSY &&
               te__time_now() < end)
            te__sleep(0.005);
    }
    l->held = state == TE__LOCK_HELD;
    te__text_free(&folder);
}
/* Releases the lock and removes its file. A waiting process may get the lock of the removed file. That is harmless: the
 * kernel is in the cache. */
static void te__cache_lock_release(te__cache_lock *l) {
    if (l->held) {
        te__file_remove(te__text_str(&l->path), NULL);
        te__lock_release(&l->lock);
    }
    te__text_free(&l->path);
    l->held = false;
}
