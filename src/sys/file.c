/* sys/file.c: files: read whole or at random, replaced atomically, locked; folders. Paths are UTF-8. Knows the operating system, and
 * nothing of what files hold.
 *
 * A function that can fail returns false and adds a whole sentence, with the path and the system's own words, to `why` (which
 * may be NULL). */

static inline bool te__file_complain(te__text *why, const char *verb, const char *path) {
    if (!why) return false;
    te__text reason = TE_ZERO;
    te__text_os_error(&reason);
    te__text_printf(why, "cannot %s %s: %s", verb, path, te__text_str(&reason));
    te__text_free(&reason);
    return false;
}

enum { TE__PATH_NONE = 0, TE__PATH_FILE = 1, TE__PATH_DIR = 2 };

/* What lies at a path, links followed. */
static inline int te__path_kind(const char *path) {
#ifdef _WIN32
    te__wide w;
    DWORD a = GetFileAttributesW(te__widen(&w, path));
    if (a == INVALID_FILE_ATTRIBUTES) return TE__PATH_NONE;
    return a & FILE_ATTRIBUTE_DIRECTORY ? TE__PATH_DIR : TE__PATH_FILE;
#else
    struct stat st;
    if (stat(path, &st) != 0) return TE__PATH_NONE;
    return S_ISDIR(st.st_mode) ? TE__PATH_DIR : TE__PATH_FILE;
#endif
}
static inline bool te__file_exists(const char *path) { return te__path_kind(path) == TE__PATH_FILE; }
static inline bool te__dir_exists(const char *path) { return te__path_kind(path) == TE__PATH_DIR; }

static inline bool te__is_slash(char c) {
#ifdef _WIN32
    return c == '/' || c == '\\';
#else
    return c == '/';
#endif
}
static inline bool te__path_is_absolute(const char *path) {
#ifdef _WIN32
    if (path[0] && path[1] == ':') return true;
#endif
    return te__is_slash(path[0]);
}
/* Length of the folder part of a path, without its last slash: 0 for "a", 1 for "/a", 3 for "b/c/d". */
static inline size_t te__path_dir_length(const char *path) {
    size_t n = strlen(path);
    while (n > 0 && !te__is_slash(path[n - 1])) n--;
    return n > 1 ? n - 1 : n;
}

/* ---- reading ---- */

#ifdef _WIN32
typedef HANDLE te__fd;
#define TE__NO_FD INVALID_HANDLE_VALUE
#else
typedef int te__fd;
#define TE__NO_FD (-1)
#ifdef O_CLOEXEC
#define TE__O_CLOEXEC O_CLOEXEC
#elif defined(__O_CLOEXEC)
#define TE__O_CLOEXEC __O_CLOEXEC /* glibc, when it hides the other */
#else
#define TE__O_CLOEXEC 0
#endif
#endif

/* One read or write call takes at most this much: Linux and Windows both stop short of 2 GiB. */
enum { TE__IO_CHUNK = 1 << 30 };

/* A file open for reading at any place, by several threads at once if they like. */
typedef struct te__file {
    te__fd fd;
    uint64_t size; /* when it was opened */
    char path[512]; /* for messages; cut when longer */
} te__file;

static inline void te__file_close(te__file *f) {
    if (f->fd == TE__NO_FD) return;
#ifdef _WIN32
    CloseHandle(f->fd);
#else
    close(f->fd);
#endif
    f->fd = TE__NO_FD;
}

/* Anything but a regular file is refused: a folder, a pipe or a device has no size to check against. */
static inline bool te__file_open(te__file *f, const char *path, te__text *why) {
    size_t length = strlen(path);
    f->fd = TE__NO_FD;
    f->size = 0;
    if (length >= sizeof f->path) length = sizeof f->path - 1;
    memcpy(f->path, path, length);
    f->path[length] = 0;
#ifdef _WIN32
    te__wide w;
    LARGE_INTEGER size;
    f->fd = CreateFileW(te__widen(&w, path), GENERIC_READ, FILE_SHARE_READ | FILE_SHARE_WRITE | FILE_SHARE_DELETE, NULL, OPEN_EXISTING,
                        FILE_ATTRIBUTE_NORMAL, NULL);
    if (f->fd == TE__NO_FD) return te__file_complain(why, "open", path);
    if (!GetFileSizeEx(f->fd, &size)) {
        te__file_complain(why, "read the size of", path);
        te__file_close(f);
        return false;
    }
    f->size = (uint64_t)size.QuadPart;
#else
    struct stat st;
    /* Asked before opening, since opening a pipe would wait for its writer; and again behind it, of what was really opened. */
    if (stat(path, &st) != 0) return te__file_complain(why, "open", path);
    if (S_ISREG(st.st_mode)) {
        do f->fd = open(path, O_RDONLY | TE__O_CLOEXEC);
        while (f->fd < 0 && errno == EINTR);
        if (f->fd < 0 || fstat(f->fd, &st) != 0) {
            te__file_complain(why, "open", path);
            te__file_close(f);
            return false;
        }
    }
    if (!S_ISREG(st.st_mode)) {
        if (why) te__text_printf(why, "cannot open %s: not a regular file", path);
        te__file_close(f);
        return false;
    }
    f->size = (uint64_t)st.st_size;
#endif
    return true;
}

static inline uint64_t te__file_size(const te__file *f) { return f->size; }

/* All n bytes from `offset`, or false. */
static inline bool te__file_read_at(const te__file *f, uint64_t offset, void *data, size_t n, te__text *why) {
    uint8_t *p = (uint8_t *)data;
    while (n > 0) {
        size_t chunk = n < (size_t)TE__IO_CHUNK ? n : (size_t)TE__IO_CHUNK;
#ifdef _WIN32
        OVERLAPPED at;
        DWORD got = 0;
        memset(&at, 0, sizeof at);
        at.Offset = (DWORD)offset;
        at.OffsetHigh = (DWORD)(offset >> 32);
        bool fine = ReadFile(f->fd, p, (DWORD)chunk, &got, &at) || GetLastError() == ERROR_HANDLE_EOF;
#else
        ssize_t got = pread(f->fd, p, chunk, (off_t)offset);
        if (got < 0 && errno == EINTR) continue;
        bool fine = got >= 0;
#endif
        if (!fine) return te__file_complain(why, "read", f->path);
        if (got == 0) {
            if (why) te__text_printf(why, "cannot read %s: it ends at byte %llu, too early", f->path, (unsigned long long)offset);
            return false;
        }
        p += got;
        n -= (size_t)got;
        offset += (uint64_t)got;
    }
    return true;
}

/* Adds the whole file to `into`. A file of more than `limit` bytes is refused before anything is allocated. */
static inline bool te__file_read(const char *path, size_t limit, te__text *into, te__text *why) {
    te__file f;
    if (!te__file_open(&f, path, why)) return false;
    bool fine = f.size <= limit;
    if (!fine && why)
        te__text_printf(why, "cannot read %s: %llu bytes, at most %llu are expected", path, (unsigned long long)f.size, (unsigned long long)limit);
    if (fine && !te__text_reserve(into, (size_t)f.size)) {
        fine = false;
        if (why) te__text_printf(why, "cannot read %s: no memory for %llu bytes", path, (unsigned long long)f.size);
    }
    fine = fine && te__file_read_at(&f, 0, into->s + into->n, (size_t)f.size, why);
    if (fine) into->n += (size_t)f.size;
    if (into->s) into->s[into->n] = 0;
    te__file_close(&f);
    return fine;
}

static inline bool te__file_remove(const char *path, te__text *why) {
#ifdef _WIN32
    te__wide w;
    if (DeleteFileW(te__widen(&w, path))) return true;
#else
    if (unlink(path) == 0) return true;
#endif
    return te__file_complain(why, "remove", path);
}

/* ---- writing ---- */

/* Tests set this to the bytes after which every file being written meets a full disk. Negative: off. With TE_TEST_HOOKS the
 * environment variable TE_TEST_FILE_FAIL_AFTER does the same. */
static int64_t te__file_fail_after = -1;

/* A file on its way: written beside the final path under a name of its own, and moved there by te__file_out_commit when every byte is
 * on the disk. Until then, and if anything fails, what was there before stays whole. */
typedef struct te__file_out {
    te__fd fd;
    te__text path, temp;
    te__text *why;      /* borrowed; may be NULL */
    uint64_t written;
    int64_t budget;     /* bytes until writes fail; negative: no limit */
    bool failed;        /* the first failure stays: only te__file_out_commit needs looking at */
} te__file_out;

/* Closes and removes the temporary file. Harmless after a commit, a failed begin, or twice. */
static inline void te__file_out_abort(te__file_out *f) {
    if (f->fd != TE__NO_FD) {
#ifdef _WIN32
        CloseHandle(f->fd);
#else
        close(f->fd);
#endif
        te__file_remove(f->temp.s, NULL);
    }
    f->fd = TE__NO_FD;
    f->failed = true;
    te__text_free(&f->path);
    te__text_free(&f->temp);
}

static inline bool te__file_out_fail(te__file_out *f, const char *verb) {
    if (!f->failed) te__file_complain(f->why, verb, te__text_str(&f->path));
    f->failed = true;
    return false;
}

/* After a failed begin, writes and the commit fail too, quietly. */
static inline bool te__file_out_begin(te__file_out *f, const char *path, te__text *why) {
    static TE__ALIGNED(8) int64_t serial; /* two threads may write one path; so may two processes */
    memset(f, 0, sizeof *f);
    f->fd = TE__NO_FD;
    f->why = why;
    f->budget = te__file_fail_after;
#ifdef TE_TEST_HOOKS
    if (te__env("TE_TEST_FILE_FAIL_AFTER")) f->budget = (int64_t)strtoll(te__env("TE_TEST_FILE_FAIL_AFTER"), NULL, 10);
#endif
    te__text_put(&f->path, path);
    te__text_printf(&f->temp, "%s.%lld.%lld.tmp", path, (long long)te__process_id(), (long long)te__atomic_add(&serial, 1));
    if (f->path.oom || f->temp.oom) {
        if (why) te__text_printf(why, "cannot write %s: out of memory", path);
        te__file_out_abort(f);
        return false;
    }
#ifdef _WIN32
    te__wide w;
    f->fd = CreateFileW(te__widen(&w, f->temp.s), GENERIC_WRITE, 0, NULL, CREATE_NEW, FILE_ATTRIBUTE_NORMAL, NULL);
#else
    do f->fd = open(f->temp.s, O_WRONLY | O_CREAT | O_EXCL | TE__O_CLOEXEC, 0666);
    while (f->fd < 0 && errno == EINTR);
#endif
    if (f->fd != TE__NO_FD) return true;
    te__file_out_fail(f, "write");
    te__file_out_abort(f);
    return false;
}

static inline bool te__file_out_write(te__file_out *f, const void *data, size_t n) {
    const uint8_t *p = (const uint8_t *)data;
    while (n > 0 && !f->failed) {
        size_t chunk = n < (size_t)TE__IO_CHUNK ? n : (size_t)TE__IO_CHUNK;
        if (f->budget >= 0 && (uint64_t)f->budget < chunk) chunk = (size_t)f->budget;
#ifdef _WIN32
        DWORD done = 0;
        if (chunk == 0) SetLastError(ERROR_DISK_FULL);
        bool fine = chunk > 0 && WriteFile(f->fd, p, (DWORD)chunk, &done, NULL) && done > 0;
#else
        if (chunk == 0) errno = ENOSPC;
        ssize_t done = chunk > 0 ? write(f->fd, p, chunk) : -1;
        if (done < 0 && errno == EINTR) continue;
        bool fine = done > 0;
#endif
        if (!fine) return te__file_out_fail(f, "write");
        p += done;
        n -= (size_t)done;
        f->written += (uint64_t)done;
        if (f->budget >= 0) f->budget -= (int64_t)done;
    }
    return !f->failed;
}

#ifndef _WIN32
/* Makes the folder's new entry outlive a power cut. Some file systems cannot; the file is complete then all the same. */
static inline void te__dir_sync(const char *path_in_it) {
    te__text dir = TE_ZERO;
    te__text_add(&dir, path_in_it, te__path_dir_length(path_in_it));
    int fd = dir.oom ? -1 : open(dir.n ? dir.s : ".", O_RDONLY | TE__O_CLOEXEC);
    if (fd >= 0) {
        fsync(fd);
        close(fd);
    }
    te__text_free(&dir);
}
#endif

/* Puts the file in its place, if every write succeeded: flush to disk, rename, flush the folder. Else as te__file_out_abort. */
static inline bool te__file_out_commit(te__file_out *f) {
    bool done = false;
    if (!f->failed) {
#ifdef _WIN32
        te__wide from, to;
        done = FlushFileBuffers(f->fd) != 0;
        if (!done) te__file_out_fail(f, "flush");
        CloseHandle(f->fd);
        f->fd = TE__NO_FD;
        if (done && !MoveFileExW(te__widen(&from, f->temp.s), te__widen(&to, f->path.s), MOVEFILE_REPLACE_EXISTING | MOVEFILE_WRITE_THROUGH))
            done = te__file_out_fail(f, "replace");
#else
        int synced;
        do synced = fsync(f->fd);
        while (synced != 0 && errno == EINTR);
        /* A file on something that cannot be flushed (EINVAL) is as safe as it gets there. */
        done = synced == 0 || errno == EINVAL;
        if (!done) te__file_out_fail(f, "flush");
        if (close(f->fd) != 0 && errno != EINTR && done) done = te__file_out_fail(f, "close");
        f->fd = TE__NO_FD;
        if (done && rename(f->temp.s, f->path.s) != 0) done = te__file_out_fail(f, "replace");
        if (done) te__dir_sync(f->path.s);
#endif
        if (!done) te__file_remove(f->temp.s, NULL);
    }
    te__file_out_abort(f);
    return done;
}

/* The three steps at once. */
static inline bool te__file_write_atomic(const char *path, const void *data, size_t n, te__text *why) {
    te__file_out f;
    te__file_out_begin(&f, path, why);
    te__file_out_write(&f, data, n);
    return te__file_out_commit(&f);
}

/* ---- folders ---- */

/* Makes a folder and those above it that are missing, for this user alone (0700). True if it is there afterwards. */
static inline bool te__dir_make(const char *path, te__text *why) {
    if (te__dir_exists(path)) return true;
    te__text part = TE_ZERO;
    bool fine = true;
    for (size_t i = 1, n = strlen(path); i <= n && fine; i++) {
        if (i < n && !te__is_slash(path[i])) continue;
        te__text_clear(&part);
        te__text_add(&part, path, i);
        if (part.oom || te__dir_exists(te__text_str(&part))) continue;
#ifdef _WIN32
        te__wide w;
        fine = CreateDirectoryW(te__widen(&w, part.s), NULL) || GetLastError() == ERROR_ALREADY_EXISTS;
#else
        fine = mkdir(part.s, 0700) == 0 || errno == EEXIST;
#endif
        if (!fine) te__file_complain(why, "make the folder", part.s);
    }
    if (fine && !te__dir_exists(path)) {
        fine = false;
        if (why) te__text_printf(why, "cannot make the folder %s: %s", path, part.oom ? "out of memory" : "something else has its name");
    }
    te__text_free(&part);
    return fine;
}

/* Nobody but this user can put files there: it is the user's own and neither group nor others may write. On Windows the profile's
 * access list sees to that. */
static inline bool te__dir_is_private(const char *path, te__text *why) {
#ifdef _WIN32
    if (te__dir_exists(path)) return true;
    return te__file_complain(why, "look at the folder", path);
#else
    struct stat st;
    if (stat(path, &st) != 0) return te__file_complain(why, "look at the folder", path);
    const char *reason = NULL;
    if (!S_ISDIR(st.st_mode)) reason = "is not a folder";
    else if ((int64_t)st.st_uid != te__user_id()) reason = "belongs to another user";
    else if (st.st_mode & 022) reason = "can be written by others (chmod go-w would mend it)";
    if (reason && why) te__text_printf(why, "%s %s", path, reason);
    return reason == NULL;
#endif
}

/* Calls each(user, name) for every entry but . and .., in the system's order, until it returns false. */
static inline bool te__dir_list(const char *path, bool (*each)(void *user, const char *name), void *user, te__text *why) {
#ifdef _WIN32
    te__text pattern = TE_ZERO;
    te__wide w;
    WIN32_FIND_DATAW entry;
    char name[1024];
    te__text_printf(&pattern, "%s\\*", path);
    HANDLE dir = FindFirstFileW(te__widen(&w, te__text_str(&pattern)), &entry);
    te__text_free(&pattern);
    if (dir == INVALID_HANDLE_VALUE) return te__file_complain(why, "list the folder", path);
    do {
        if (!te__narrow(name, sizeof name, entry.cFileName) || strcmp(name, ".") == 0 || strcmp(name, "..") == 0) continue;
        if (!each(user, name)) break;
    } while (FindNextFileW(dir, &entry));
    FindClose(dir);
#else
    DIR *dir = opendir(path);
    if (!dir) return te__file_complain(why, "list the folder", path);
    for (struct dirent *entry = readdir(dir); entry; entry = readdir(dir)) {
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0) continue;
        if (!each(user, entry->d_name)) break;
    }
    closedir(dir);
#endif
    return true;
}

/* ---- locks between processes ---- */

/* Held by at most one holder on the machine (threads of one process exclude each other, too). The system lets go of it when the
 * process ends, however it ends; the empty file stays. */
typedef struct te__lock {
    te__fd fd;
} te__lock;

enum { TE__LOCK_FAILED = 0, TE__LOCK_HELD = 1, TE__LOCK_BUSY = 2 };

static inline void te__lock_release(te__lock *l) {
    if (l->fd == TE__NO_FD) return;
#ifdef _WIN32
    CloseHandle(l->fd);
#else
    close(l->fd);
#endif
    l->fd = TE__NO_FD;
}

/* TE__LOCK_BUSY comes only with wait == false, without words; TE__LOCK_FAILED means that locking does not work here at all. */
static inline int te__lock_try(te__lock *l, const char *path, bool wait, te__text *why) {
#ifdef _WIN32
    te__wide w;
    OVERLAPPED at;
    memset(&at, 0, sizeof at);
    l->fd = CreateFileW(te__widen(&w, path), GENERIC_READ | GENERIC_WRITE, FILE_SHARE_READ | FILE_SHARE_WRITE | FILE_SHARE_DELETE, NULL,
                        OPEN_ALWAYS, FILE_ATTRIBUTE_NORMAL, NULL);
    if (l->fd != TE__NO_FD && LockFileEx(l->fd, LOCKFILE_EXCLUSIVE_LOCK | (wait ? 0u : LOCKFILE_FAIL_IMMEDIATELY), 0, 1, 0, &at))
        return TE__LOCK_HELD;
    bool busy = l->fd != TE__NO_FD && !wait && GetLastError() == ERROR_LOCK_VIOLATION;
#else
    do l->fd = open(path, O_RDWR | O_CREAT | TE__O_CLOEXEC, 0600);
    while (l->fd < 0 && errno == EINTR);
    int locked = -1;
    if (l->fd >= 0) {
        do locked = flock(l->fd, LOCK_EX | (wait ? 0 : LOCK_NB));
        while (locked != 0 && errno == EINTR);
    }
    if (locked == 0) return TE__LOCK_HELD;
    bool busy = l->fd >= 0 && !wait && errno == EWOULDBLOCK;
#endif
    if (!busy) te__file_complain(why, "lock", path);
    te__lock_release(l);
    return busy ? TE__LOCK_BUSY : TE__LOCK_FAILED;
}

/* Waits for the lock. False when it cannot be had at all (a file system without locks, an unwritable folder). */
static inline bool te__lock_acquire(te__lock *l, const char *path, te__text *why) {
    return te__lock_try(l, path, true, why) == TE__LOCK_HELD;
}
