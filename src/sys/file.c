/* sys/file.c: files, folders, and locks between processes. Paths are UTF-8. This file must not depend on what files
 * hold.
 *
 * A function that fails returns false. The function appends the path and the system's error text to `why`, which may be
 * NULL. */

static inline bool te__file_complain(te__text *why, const char *verb, const char *path) {
    if (!why) return false;
    te__text reason = TE_ZERO;
    te__text_os_error(&reason);
    te__text_printf(why, "cannot %s %s: %s", verb, path, te__text_str(&reason));
    te__text_free(&reason);
    return false;
}

enum { TE__PATH_NONE = 0, TE__PATH_FILE = 1, TE__PATH_DIR = 2 };

/* Returns the kind of file at a path, links followed. */
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
/* Returns the index in `path` at which the file name begins, after the last slash. */
static inline size_t te__path_name_at(const char *path) {
    size_t n = strlen(path);
    while (n > 0 && !te__is_slash(path[n - 1])) n--;
#ifdef _WIN32
    if (n == 0 && path[0] && path[1] == ':') n = 2; /* "C:a" is in the current folder of a drive */
#endif
    return n;
}
/* Returns the length of the folder part of a path: 0 for "a", 1 for "/a", 3 for "b/c/d". */
static inline size_t te__path_dir_length(const char *path) {
    size_t n = te__path_name_at(path);
    return n > 1 && te__is_slash(path[n - 1]) ? n - 1 : n;
}

#ifdef _WIN32
typedef HANDLE te__fd;
#define TE__NO_FD INVALID_HANDLE_VALUE
#else
typedef int te__fd;
#define TE__NO_FD (-1)
#ifdef O_CLOEXEC
#define TE__O_CLOEXEC O_CLOEXEC
#elif defined(__O_CLOEXEC)
#define TE__O_CLOEXEC __O_CLOEXEC /* glibc's name, which stays visible where O_CLOEXEC is hidden */
#else
#define TE__O_CLOEXEC 0
#endif
#endif

/* Returns false and appends the reason to `why`. `kind` is the kind of the file, such as "a folder". `kind` is NULL for
 * an empty path. */
static inline bool te__path_complain(te__text *why, const char *verb, const char *path, const char *kind) {
    if (why && !path[0]) te__text_printf(why, "cannot %s the file: its path is empty", verb);
    else if (why) te__text_printf(why, "cannot %s %s: it is %s, not a regular file", verb, path, kind);
    return false;
}
#ifdef _WIN32
static inline const char *te__handle_kind(te__fd fd) {
    DWORD type = GetFileType(fd);
    return type == FILE_TYPE_DISK ? NULL : type == FILE_TYPE_PIPE ? "a pipe" : "a device";
}
#else
static inline const char *te__mode_kind(const struct stat *st) {
    if (S_ISREG(st->st_mode)) return NULL;
    return S_ISDIR(st->st_mode)                           ? "a folder"
           : S_ISFIFO(st->st_mode)                        ? "a pipe"
           : S_ISCHR(st->st_mode) || S_ISBLK(st->st_mode) ? "a device"
                                                          : "a socket";
}
#endif

/* ---- reading ---- */

/* The largest number of bytes for one call of read or write. Linux and Windows both limit a call to less than 2 GiB. */
enum { TE__IO_CHUNK = 1 << 30 };

/* A file that is open for reading. Several threads may read it at once, at any offset. */
typedef struct te__file {
    te__fd fd;
    uint64_t size; /* the size when the file was opened */
    char path[512]; /* for messages; cut when longer */
} te__file;

static inline void te__fd_close(te__fd *fd) {
    if (*fd == TE__NO_FD) return;
#ifdef _WIN32
    CloseHandle(*fd);
#else
    close(*fd);
#endif
    *fd = TE__NO_FD;
}
static inline void te__file_close(te__file *f) { te__fd_close(&f->fd); }

static inline bool te__file_open(te__file *f, const char *path, te__text *why) {
    size_t length = strlen(path);
    f->fd = TE__NO_FD;
    f->size = 0;
    if (length >= sizeof f->path) length = sizeof f->path - 1;
    memcpy(f->path, path, length);
    f->path[length] = 0;
    if (!path[0]) return te__path_complain(why, "open", path, NULL);
#ifdef _WIN32
    te__wide w;
    LARGE_INTEGER size;
    if (te__dir_exists(path)) return te__path_complain(why, "open", path, "a folder");
    f->fd = CreateFileW(te__widen(&w, path), GENERIC_READ, FILE_SHARE_READ | FILE_SHARE_WRITE | FILE_SHARE_DELETE, NULL,
                        OPEN_EXISTING, FILE_ATTRIBUTE_NORMAL, NULL);
    if (f->fd == TE__NO_FD) return te__file_complain(why, "open", path);
    if (te__handle_kind(f->fd)) {
        te__path_complain(why, "open", path, te__handle_kind(f->fd));
        te__file_close(f);
        return false;
    }
    if (!GetFileSizeEx(f->fd, &size)) {
        te__file_complain(why, "read the size of", path);
        te__file_close(f);
        return false;
    }
    f->size = (uint64_t)size.QuadPart;
#else
    struct stat st;
    /* Opening a pipe would wait for a writer, so `stat` comes first. `fstat` then checks the file that was really
     * opened. */
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
        te__path_complain(why, "open", path, te__mode_kind(&st));
        te__file_close(f);
        return false;
    }
    f->size = (uint64_t)st.st_size;
#endif
    return true;
}

static inline uint64_t te__file_size(const te__file *f) { return f->size; }

/* Reads n bytes, beginning at `offset`. Returns false if it cannot read all of them. */
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
            if (why)
                te__text_printf(why, "cannot read %s: it ends at byte %llu, too early", f->path,
                                (unsigned long long)offset);
            return false;
        }
        p += got;
        n -= (size_t)got;
        offset += (uint64_t)got;
    }
    return true;
}

/* Appends the whole file to `into`. A file of more than `limit` bytes is refused before memory is allocated. */
static inline bool te__file_read_all(const te__file *f, size_t limit, te__text *into, te__text *why) {
    bool fine = f->size <= limit;
    if (!fine && why)
        te__text_printf(why, "cannot read %s: %llu bytes, at most %llu are expected", f->path,
                        (unsigned long long)f->size, (unsigned long long)limit);
    if (fine && !te__text_reserve(into, (size_t)f->size)) {
        fine = false;
        if (why)
            te__text_printf(why, "cannot read %s: no memory for %llu bytes", f->path, (unsigned long long)f->size);
    }
    fine = fine && te__file_read_at(f, 0, into->s + into->n, (size_t)f->size, why);
    if (fine) into->n += (size_t)f->size;
    if (into->s) into->s[into->n] = 0;
    return fine;
}
static inline bool te__file_read(const char *path, size_t limit, te__text *into, te__text *why) {
    te__file f;
    bool fine;
    if (!te__file_open(&f, path, why)) return false;
    fine = te__file_read_all(&f, limit, into, why);
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

/* ---- listing, links ---- */

/* Calls each(user, name) for every entry of a folder except "." and "..", in the order of the system. Stops when `each`
 * returns false. */
static inline bool te__dir_list(const char *path, bool (*each)(void *user, const char *name), void *user,
                                te__text *why) {
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
        if (!te__narrow(name, sizeof name, entry.cFileName) || strcmp(name, ".") == 0 || strcmp(name, "..") == 0)
            continue;
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

/* Follows symbolic links from `path`, and sets `file` to the path of the file itself. The file need not exist. */
static inline bool te__path_follow(const char *path, te__text *file, te__text *why) {
    te__text_clear(file);
    te__text_put(file, path);
#ifdef _WIN32
    te__wide w;
    DWORD a = GetFileAttributesW(te__widen(&w, path));
    if (a != INVALID_FILE_ATTRIBUTES && (a & FILE_ATTRIBUTE_REPARSE_POINT)) {
        HANDLE h = CreateFileW(w.s, 0, FILE_SHARE_READ | FILE_SHARE_WRITE | FILE_SHARE_DELETE, NULL, OPEN_EXISTING,
                               FILE_FLAG_BACKUP_SEMANTICS, NULL);
        char real[4096];
        DWORD n = h != INVALID_HANDLE_VALUE ? GetFinalPathNameByHandleW(h, w.s, TE__COUNT(w.s), 0) : 0;
        bool found = n > 0 && n < (DWORD)TE__COUNT(w.s) && te__narrow(real, sizeof real, w.s);
        if (h != INVALID_HANDLE_VALUE) CloseHandle(h);
        if (!found) return te__file_complain(why, "follow the link", path);
        te__text_clear(file);
        te__text_put(file, real);
    }
#else
    char target[4096];
    int links;
    for (links = 0; !file->oom; links++) {
        ssize_t n = readlink(te__text_str(file), target, sizeof target - 1);
        if (n < 0) break; /* not a link, or no file */
        if (links == 40) { /* the same limit as in Linux */
            if (why) te__text_printf(why, "cannot follow the link %s: it leads through more than 40 others", path);
            return false;
        }
        target[n] = 0;
        if (te__path_is_absolute(target)) te__text_clear(file);
        else file->s[file->n = te__path_name_at(file->s)] = 0;
        te__text_put(file, target);
    }
#endif
    if (file->oom && why) te__text_printf(why, "cannot follow %s: out of memory", path);
    return !file->oom;
}

/* Returns the kind of the file at a path, such as "a pipe". Links are followed. Returns NULL for a regular file, or if
 * nothing is there. */
static inline const char *te__path_other_kind(const char *path) {
#ifdef _WIN32
    const DWORD share = FILE_SHARE_READ | FILE_SHARE_WRITE | FILE_SHARE_DELETE;
    const char *kind;
    te__wide w;
    HANDLE h;
    if (te__dir_exists(path)) return "a folder";
    h = CreateFileW(te__widen(&w, path), 0, share, NULL, OPEN_EXISTING, FILE_ATTRIBUTE_NORMAL, NULL);
    if (h == INVALID_HANDLE_VALUE) return NULL;
    kind = te__handle_kind(h);
    CloseHandle(h);
    return kind;
#else
    struct stat st;
    return stat(path, &st) == 0 ? te__mode_kind(&st) : NULL;
#endif
}

/* ---- temporary files ----
 *
 * FILE is first written as FILE.HOST.PROCESS.SERIAL.tmp in the same folder. A killed process leaves the temporary file
 * behind. The next process that opens or writes FILE removes the temporary file.
 *
 * A process id does not prove that the writer still runs. Ids are reused, and differ between containers. So a writer
 * locks its file (flock). If a file of this host can be locked, its writer has ended. Locks may not work between hosts.
 * So a file of another host is removed only if it is also an hour old.
 *
 * On Windows the process id decides whether a writer on this host has ended. A file that is open cannot be removed
 * there. */

enum { TE__TEMP_PATIENCE = 3600 };

static inline bool te__read_digits(const char **at, int64_t *number) {
    const char *p = *at;
    for (*number = 0; *p >= '0' && *p <= '9' && *number < INT64_MAX / 10 - 9; p++) *number = *number * 10 + (*p - '0');
    if (p == *at) return false;
    *at = p;
    return true;
}
/* Returns true if `name` names a temporary file of the file `base`. Sets *host and *process to the numbers in the
 * name. */
static inline bool te__temp_parse(const char *name, const char *base, size_t base_length, uint32_t *host,
                                  int64_t *process) {
    const char *p = name + base_length, *digits = "0123456789abcdef", *digit = NULL;
    int64_t serial;
    int i;
    if (strncmp(name, base, base_length) != 0 || *p++ != '.') return false;
    for (*host = 0, i = 0; i < 8 && *p && (digit = strchr(digits, *p)) != NULL; i++, p++)
        *host = *host << 4 | (uint32_t)(digit - digits);
    return i == 8 && *p++ == '.' && te__read_digits(&p, process) && *p++ == '.' && te__read_digits(&p, &serial) &&
           strcmp(p, ".tmp") == 0;
}

/* Returns the length of the name of the file of which `name` is a temporary file; of another file's, all of it. */
static inline size_t te__temp_base_length(const char *name) {
    uint32_t host;
    int64_t process;
    size_t n;
    for (n = 0; name[n]; n++)
        if (name[n] == '.' && te__temp_parse(name, name, n, &host, &process)) return n;
    return n;
}

typedef struct te__temp_search {
    const char *file; /* path of the file whose temporary files are looked for; the folder is the first `dir` characters
                       * of this path */
    size_t dir;
    te__text path; /* path of the candidate */
} te__temp_search;

static inline bool te__temp_consider(void *user, const char *name) {
    te__temp_search *s = (te__temp_search *)user;
    const char *base = s->file + s->dir;
    uint32_t host;
    int64_t process;
    if (!te__temp_parse(name, base, strlen(base), &host, &process)) return true;
    te__text_clear(&s->path);
    te__text_add(&s->path, s->file, s->dir);
    te__text_put(&s->path, name);
    if (s->path.oom) return false;
#ifdef _WIN32
    HANDLE writer = host == te__host_token() ? OpenProcess(SYNCHRONIZE, FALSE, (DWORD)process) : NULL;
    bool gone = host == te__host_token() &&
                (writer ? WaitForSingleObject(writer, 0) == WAIT_OBJECT_0 : GetLastError() == ERROR_INVALID_PARAMETER);
    if (writer) CloseHandle(writer);
    if (gone) te__file_remove(s->path.s, NULL);
#else
    struct stat st;
    int fd = open(s->path.s, O_WRONLY | O_NONBLOCK | TE__O_CLOEXEC);
    if (fd < 0) return true;
    if (flock(fd, LOCK_EX | LOCK_NB) == 0 && fstat(fd, &st) == 0 && S_ISREG(st.st_mode) &&
        (host == te__host_token() || (int64_t)st.st_mtime + TE__TEMP_PATIENCE < (int64_t)time(NULL)))
        te__file_remove(s->path.s, NULL);
    close(fd);
#endif
    return true;
}

/* Removes the temporary files of `file` whose writers have ended. */
static inline void te__temps_remove(const char *file) {
    te__temp_search s;
    te__text dir = TE_ZERO;
    memset(&s, 0, sizeof s);
    s.file = file;
    s.dir = te__path_name_at(file);
    te__text_add(&dir, s.dir ? file : ".", s.dir ? s.dir : 1);
    if (!dir.oom) te__dir_list(te__text_str(&dir), te__temp_consider, &s, NULL);
    te__text_free(&dir);
    te__text_free(&s.path);
}
/* Calls te__temps_remove for the file at `path`, or for the file to which the link `path` leads. */
static inline void te__temps_remove_of(const char *path) {
    te__text file = TE_ZERO;
    if (path[0] && te__path_follow(path, &file, NULL)) te__temps_remove(te__text_str(&file));
    te__text_free(&file);
}

/* ---- writing ---- */

/* For tests: every file behaves as if the disk were full after this many bytes. Negative: off. */
static int64_t te__file_fail_after = -1;

/* A file that is being written under a temporary name. te__file_out_commit renames it to `path`. Until then an older
 * file at `path` stays as it is. */
typedef struct te__file_out {
    te__fd fd;
    te__text path, temp;
    te__text *why;      /* borrowed; may be NULL */
    uint64_t written;
    int64_t budget;     /* bytes until writes fail; negative: no limit */
    bool failed;        /* once true, it stays true; so callers need to check only the result of te__file_out_commit */
} te__file_out;

#ifndef _WIN32
/* Returns a second descriptor of an open file, or -1. Programs started by this process do not inherit the
 * descriptor. */
static inline int te__fd_copy(int fd) {
#ifdef F_DUPFD_CLOEXEC
    return fcntl(fd, F_DUPFD_CLOEXEC, 0);
#else
    int copy = dup(fd);
    if (copy >= 0) fcntl(copy, F_SETFD, FD_CLOEXEC);
    return copy;
#endif
}
#endif

/* Closes and removes the temporary file. Does nothing after te__file_out_commit, after a te__file_out_begin that has
 * failed, or when called twice. */
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

/* Creates a temporary file and locks it. Returns false if the name is in use, or if another process removed the file
 * before the lock. */
static inline bool te__temp_create(te__file_out *f) {
    TE__ALIGNED(8) static int64_t serial; /* makes names differ, since two threads may write the same path at once */
    te__text_clear(&f->temp);
    te__text_printf(&f->temp, "%s.%08x.%lld.%lld.tmp", te__text_str(&f->path), (unsigned)te__host_token(),
                    (long long)te__process_id(), (long long)te__atomic_add(&serial, 1));
    if (f->temp.oom) return false;
#ifdef _WIN32
    te__wide w;
    f->fd = CreateFileW(te__widen(&w, f->temp.s), GENERIC_WRITE, 0, NULL, CREATE_NEW, FILE_ATTRIBUTE_NORMAL, NULL);
    return f->fd != TE__NO_FD;
#else
    struct stat st;
    do f->fd = open(f->temp.s, O_WRONLY | O_CREAT | O_EXCL | TE__O_CLOEXEC, 0666);
    while (f->fd < 0 && errno == EINTR);
    if (f->fd < 0) return false;
    if ((flock(f->fd, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK) && fstat(f->fd, &st) == 0 && st.st_nlink > 0)
        return true;
    close(f->fd);
    f->fd = TE__NO_FD;
    errno = EEXIST;
    return false;
#endif
}
static inline bool te__name_is_taken(void) {
#ifdef _WIN32
    return GetLastError() == ERROR_FILE_EXISTS;
#else
    return errno == EEXIST;
#endif
}

/* Begins to write a file. If te__file_out_begin fails, te__file_out_commit fails too, without another message. If
 * `path` is a link, the file behind the link is replaced. */
static inline bool te__file_out_begin(te__file_out *f, const char *path, te__text *why) {
    const char *kind;
    int tries = 0;
    memset(f, 0, sizeof *f);
    f->fd = TE__NO_FD;
    f->why = why;
    f->budget = te__file_fail_after;
#ifdef TE_TEST_HOOKS
    if (te__env("TE_TEST_FILE_FAIL_AFTER")) f->budget = (int64_t)strtoll(te__env("TE_TEST_FILE_FAIL_AFTER"), NULL, 10);
#endif
    kind = path[0] ? te__path_other_kind(path) : NULL;
    if (!path[0] || kind) {
        te__path_complain(why, "write", path, kind);
    } else if (te__path_follow(path, &f->path, why)) {
        te__temps_remove(te__text_str(&f->path));
        while (!te__temp_create(f) && !f->temp.oom && te__name_is_taken() && ++tries < 100) {}
        if (f->fd != TE__NO_FD) return true;
        if (!f->temp.oom) te__file_out_fail(f, "write");
        else if (why) te__text_printf(why, "cannot write %s: out of memory", path);
    }
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

/* Makes the next write begin at byte `at` of the file, before or behind its end. */
static inline bool te__file_out_seek(te__file_out *f, uint64_t at) {
    bool fine;
    if (f->failed) return false;
#ifdef _WIN32
    LARGE_INTEGER to;
    to.QuadPart = (LONGLONG)at;
    fine = SetFilePointerEx(f->fd, to, NULL, FILE_BEGIN) != 0;
#else
    fine = (uint64_t)(off_t)at == at && lseek(f->fd, (off_t)at, SEEK_SET) == (off_t)at; /* off_t may have 32 bits */
#endif
    return fine || te__file_out_fail(f, "write");
}

#ifndef _WIN32
/* Flushes the folder of `path_in_it`, so that its new entry survives a power failure. Errors are ignored: some file
 * systems cannot flush folders. */
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

/* If every write succeeded, flushes the file to disk, renames it to its final path, and flushes the folder. Otherwise
 * does what te__file_out_abort does. */
static inline bool te__file_out_commit(te__file_out *f) {
    bool done = false;
    if (!f->failed) {
#ifdef _WIN32
        te__wide from, to;
        done = FlushFileBuffers(f->fd) != 0;
        if (!done) te__file_out_fail(f, "flush");
        CloseHandle(f->fd);
        f->fd = TE__NO_FD;
        if (done && !MoveFileExW(te__widen(&from, f->temp.s), te__widen(&to, f->path.s),
                                 MOVEFILE_REPLACE_EXISTING | MOVEFILE_WRITE_THROUGH))
            done = te__file_out_fail(f, "replace");
#else
        int synced;
        do synced = fsync(f->fd);
        while (synced != 0 && errno == EINTR);
        /* EINVAL: the file system has nothing to flush. */
        done = synced == 0 || errno == EINVAL;
        if (!done) te__file_out_fail(f, "flush");
        int locked = te__fd_copy(f->fd); /* this second descriptor keeps the file locked until it is renamed */
        if (close(f->fd) != 0 && errno != EINTR && done) done = te__file_out_fail(f, "close");
        f->fd = TE__NO_FD;
        if (done && rename(f->temp.s, f->path.s) != 0) done = te__file_out_fail(f, "replace");
        if (locked >= 0) close(locked);
        if (done) te__dir_sync(f->path.s);
#endif
        if (!done) te__file_remove(f->temp.s, NULL);
    }
    te__file_out_abort(f);
    return done;
}

/* Writes a whole file: begin, write and commit. */
static inline bool te__file_write_atomic(const char *path, const void *data, size_t n, te__text *why) {
    te__file_out f;
    te__file_out_begin(&f, path, why);
    te__file_out_write(&f, data, n);
    return te__file_out_commit(&f);
}

/* ---- folders ---- */

/* Makes a folder (mode 0700) and its missing parents. Returns true if the folder exists at the end. */
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
        if (why)
            te__text_printf(why, "cannot make the folder %s: %s", path,
                            part.oom ? "out of memory" : "something else has its name");
    }
    te__text_free(&part);
    return fine;
}

/* Returns true if only this user can put files into a folder. On Windows only checks that the folder exists, because
 * user profiles are private. */
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

/* ---- locks between processes ---- */

/* A lock on an empty file. The lock excludes other processes and other threads. The system releases the lock when the
 * process ends. te__lock_release does not remove the file. */
typedef struct te__lock {
    te__fd fd;
} te__lock;

enum { TE__LOCK_FAILED = 0, TE__LOCK_HELD = 1, TE__LOCK_BUSY = 2 };

static inline void te__lock_release(te__lock *l) { te__fd_close(&l->fd); }

/* Takes a lock. If another holder has it, waits (`wait` is true) or returns TE__LOCK_BUSY. Returns TE__LOCK_FAILED if
 * locks do not work for this path. */
static inline int te__lock_try(te__lock *l, const char *path, bool wait, te__text *why) {
#ifdef _WIN32
    te__wide w;
    OVERLAPPED at;
    memset(&at, 0, sizeof at);
    l->fd = CreateFileW(te__widen(&w, path), GENERIC_READ | GENERIC_WRITE,
                        FILE_SHARE_READ | FILE_SHARE_WRITE | FILE_SHARE_DELETE, NULL, OPEN_ALWAYS,
                        FILE_ATTRIBUTE_NORMAL, NULL);
    if (l->fd != TE__NO_FD &&
        LockFileEx(l->fd, LOCKFILE_EXCLUSIVE_LOCK | (wait ? 0u : LOCKFILE_FAIL_IMMEDIATELY), 0, 1, 0, &at))
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

/* Waits for the lock and takes it. Returns false if locks do not work, for example in a read-only folder. */
static inline bool te__lock_acquire(te__lock *l, const char *path, te__text *why) {
    return te__lock_try(l, path, true, why) == TE__LOCK_HELD;
}
