/* sys/sys.c: small functions over POSIX or Windows. No other file includes headers of the operating system. This file
 * must not depend on tensors. */

#ifdef _WIN32
#ifndef WIN32_LEAN_AND_MEAN
#define WIN32_LEAN_AND_MEAN
#endif
#ifndef NOMINMAX
#define NOMINMAX
#endif
#include <windows.h>
#else
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/utsname.h>
#include <time.h>
#include <unistd.h>
/* Under -std=c11 the C library hides these functions. A feature macro comes too late if the program has included
 * <stdio.h> before. So the functions are declared here. If they were not hidden, this is a second declaration, which C
 * allows. */
#if defined(__linux__) && defined(__STRICT_ANSI__) && !defined(__cplusplus)
extern int clock_gettime(int clock, struct timespec *now);
extern int nanosleep(const struct timespec *time, struct timespec *left);
extern int fsync(int fd);
extern ssize_t readlink(const char *path, char *target, size_t size);
#if defined(__GLIBC__) && defined(__USE_FILE_OFFSET64) && !defined(__LP64__)
/* the declaration of <unistd.h> for a 64-bit off_t */
extern ssize_t pread(int fd, void *data, size_t n, off_t offset) __asm__("pread64");
#else
extern ssize_t pread(int fd, void *data, size_t n, off_t offset);
#endif
#endif
#ifndef CLOCK_MONOTONIC
#define CLOCK_MONOTONIC 1 /* the value on Linux, where -std=c11 hides this name too */
#endif
#endif

/* ---- mutex, condition variable, once ----
 *
 * `static te__mutex m = TE__MUTEX_INIT;` is ready for use. te__cond and te__once have such initialisers too. A mutex or
 * condition inside an object needs te__*_init and te__*_free. */

#ifdef _WIN32

typedef struct te__mutex { SRWLOCK os; } te__mutex;
typedef struct te__cond { CONDITION_VARIABLE os; } te__cond;
typedef struct te__once { INIT_ONCE os; } te__once;
#define TE__MUTEX_INIT {SRWLOCK_INIT}
#define TE__COND_INIT {CONDITION_VARIABLE_INIT}
#define TE__ONCE_INIT {INIT_ONCE_STATIC_INIT}

static inline void te__mutex_init(te__mutex *m) { InitializeSRWLock(&m->os); }
static inline void te__mutex_free(te__mutex *m) { (void)m; }
static inline void te__mutex_lock(te__mutex *m) { AcquireSRWLockExclusive(&m->os); }
static inline void te__mutex_unlock(te__mutex *m) { ReleaseSRWLockExclusive(&m->os); }

static inline void te__cond_init(te__cond *c) { InitializeConditionVariable(&c->os); }
static inline void te__cond_free(te__cond *c) { (void)c; }
static inline void te__cond_wait(te__cond *c, te__mutex *m) { SleepConditionVariableSRW(&c->os, &m->os, INFINITE, 0); }
static inline void te__cond_signal(te__cond *c) { WakeConditionVariable(&c->os); }
static inline void te__cond_broadcast(te__cond *c) { WakeAllConditionVariable(&c->os); }

typedef struct te__once_call { void (*fn)(void); } te__once_call;
static BOOL CALLBACK te__once_entry(PINIT_ONCE once, PVOID call, PVOID *context) {
    (void)once, (void)context;
    ((te__once_call *)call)->fn();
    return TRUE;
}
/* Runs fn in the first caller. All callers return only after fn has run. */
static inline void te__once_run(te__once *o, void (*fn)(void)) {
    te__once_call call = {fn};
    InitOnceExecuteOnce(&o->os, te__once_entry, &call, NULL);
}

#else

typedef struct te__mutex { pthread_mutex_t os; } te__mutex;
typedef struct te__cond { pthread_cond_t os; } te__cond;
typedef struct te__once { pthread_once_t os; } te__once;
#define TE__MUTEX_INIT {PTHREAD_MUTEX_INITIALIZER}
#define TE__COND_INIT {PTHREAD_COND_INITIALIZER}
#define TE__ONCE_INIT {PTHREAD_ONCE_INIT}

static inline void te__mutex_init(te__mutex *m) { pthread_mutex_init(&m->os, NULL); }
static inline void te__mutex_free(te__mutex *m) { pthread_mutex_destroy(&m->os); }
static inline void te__mutex_lock(te__mutex *m) { pthread_mutex_lock(&m->os); }
static inline void te__mutex_unlock(te__mutex *m) { pthread_mutex_unlock(&m->os); }

static inline void te__cond_init(te__cond *c) { pthread_cond_init(&c->os, NULL); }
static inline void te__cond_free(te__cond *c) { pthread_cond_destroy(&c->os); }
static inline void te__cond_wait(te__cond *c, te__mutex *m) { pthread_cond_wait(&c->os, &m->os); }
static inline void te__cond_signal(te__cond *c) { pthread_cond_signal(&c->os); }
static inline void te__cond_broadcast(te__cond *c) { pthread_cond_broadcast(&c->os); }

/* Runs fn in the first caller. Every caller returns after fn has run. */
static inline void te__once_run(te__once *o, void (*fn)(void)) { pthread_once(&o->os, fn); }

#endif

/* ---- threads ---- */

/* A thread. The struct must stay in place from te__thread_start to te__thread_join, because the thread reads it. */
typedef struct te__thread {
    void (*fn)(void *user);
    void *user;
#ifdef _WIN32
    HANDLE os;
#else
    pthread_t os;
#endif
} te__thread;

/* The stack size of a thread, enough for every loop of the CPU backend. The defaults of systems go from 128 KiB to 8
 * MiB. */
enum { TE__THREAD_STACK = 2 << 20 };

#ifdef _WIN32
static DWORD WINAPI te__thread_entry(LPVOID thread) {
    te__thread *t = (te__thread *)thread;
    t->fn(t->user);
    return 0;
}
static inline bool te__thread_start(te__thread *t, void (*fn)(void *user), void *user) {
    t->fn = fn;
    t->user = user;
    t->os = CreateThread(NULL, TE__THREAD_STACK, te__thread_entry, t, STACK_SIZE_PARAM_IS_A_RESERVATION, NULL);
    return t->os != NULL;
}
static inline void te__thread_join(te__thread *t) {
    WaitForSingleObject(t->os, INFINITE);
    CloseHandle(t->os);
}
#else
static void *te__thread_entry(void *thread) {
    te__thread *t = (te__thread *)thread;
    t->fn(t->user);
    return NULL;
}
/* Starts a thread. Returns false if the system refuses another thread. */
static inline bool te__thread_start(te__thread *t, void (*fn)(void *user), void *user) {
    pthread_attr_t attributes;
    t->fn = fn;
    t->user = user;
    if (pthread_attr_init(&attributes) != 0) return false;
    pthread_attr_setstacksize(&attributes, TE__THREAD_STACK);
    bool started = pthread_create(&t->os, &attributes, te__thread_entry, t) == 0;
    pthread_attr_destroy(&attributes);
    return started;
}
static inline void te__thread_join(te__thread *t) { pthread_join(t->os, NULL); }
#endif

/* Lets another thread or process run, if one waits for the processor. */
static inline void te__thread_yield(void) {
#ifdef _WIN32
    Sleep(0);
#else
    sched_yield();
#endif
}

/* ---- sequentially consistent atomics on int64_t, whose addresses must be multiples of 8 (TE__ALIGNED) ---- */

#if defined(__GNUC__) || defined(__clang__)
/* An int64_t at a multiple of 8. Where int64_t is aligned to 4, clang would call a library function for atomic
 * operations on a plain int64_t. */
typedef int64_t te__atomic_word __attribute__((aligned(8)));
/* Adds `by` to *x. Returns the value that *x had before. */
static inline int64_t te__atomic_add(int64_t *x, int64_t by) {
    return __atomic_fetch_add((te__atomic_word *)x, by, __ATOMIC_SEQ_CST);
}
static inline int64_t te__atomic_load(const int64_t *x) {
    return __atomic_load_n((const te__atomic_word *)x, __ATOMIC_SEQ_CST);
}
static inline void te__atomic_store(int64_t *x, int64_t value) {
    __atomic_store_n((te__atomic_word *)x, value, __ATOMIC_SEQ_CST);
}
#else
static inline int64_t te__atomic_add(int64_t *x, int64_t by) {
    return InterlockedExchangeAdd64((volatile LONG64 *)x, by);
}
static inline int64_t te__atomic_load(const int64_t *x) {
    return InterlockedCompareExchange64((volatile LONG64 *)(uintptr_t)x, 0, 0);
}
static inline void te__atomic_store(int64_t *x, int64_t value) { InterlockedExchange64((volatile LONG64 *)x, value); }
#endif

/* ---- time ---- */

/* Returns the seconds since some fixed time. The result never goes back. */
static inline double te__time_now(void) {
#ifdef _WIN32
    LARGE_INTEGER now, per_second;
    QueryPerformanceCounter(&now);
    QueryPerformanceFrequency(&per_second);
    return (double)now.QuadPart / (double)per_second.QuadPart;
#else
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
#endif
}

static inline void te__sleep(double seconds) {
    if (!(seconds > 0)) return;
#ifdef _WIN32
    Sleep((DWORD)(seconds * 1e3 + 0.999));
#else
    struct timespec t;
    t.tv_sec = (time_t)seconds;
    t.tv_nsec = (long)((seconds - (double)t.tv_sec) * 1e9);
    while (nanosleep(&t, &t) != 0 && errno == EINTR) {}
#endif
}

/* ---- environment, process, machine ---- */

/* Returns the value of an environment variable, or NULL if the variable is missing or empty. The environment owns the
 * value. */
static inline const char *te__env(const char *name) {
    const char *value = getenv(name);
    return value && value[0] ? value : NULL;
}

static inline int64_t te__process_id(void) {
#ifdef _WIN32
    return (int64_t)GetCurrentProcessId();
#else
    return (int64_t)getpid();
#endif
}

/* The generation of this process: 0 in the process that first called te__watch_forks, 1 in a forked child of that
 * process, 2 in a forked child of that child. Always 0 on Windows. */
static TE_MAYBE_UNUSED int te__forks;
#ifdef _WIN32
static inline void te__watch_forks(void) {}
#else
static void te__count_fork(void) { te__forks++; }
static void te__watch_forks_once(void) { pthread_atfork(NULL, NULL, te__count_fork); }
static inline void te__watch_forks(void) {
    static te__once once = TE__ONCE_INIT;
    te__once_run(&once, te__watch_forks_once);
}
#endif

/* Returns the user's number; 0 on Windows, which has none. */
static inline int64_t te__user_id(void) {
#ifdef _WIN32
    return 0;
#else
    return (int64_t)getuid();
#endif
}

/* Returns a number that identifies this host. It is always the same on one host, and most likely different on
 * another. */
static inline uint32_t te__host_token(void) {
#ifdef _WIN32
    char name[MAX_COMPUTERNAME_LENGTH + 1];
    DWORD n = (DWORD)sizeof name;
    return GetComputerNameA(name, &n) ? (uint32_t)te__hash64(name, n, 0) : 0;
#else
    struct utsname system;
    return uname(&system) >= 0 ? (uint32_t)te__hash64(system.nodename, strlen(system.nodename), 0) : 0;
#endif
}

static inline size_t te__page_size(void) {
#ifdef _WIN32
    SYSTEM_INFO info;
    GetSystemInfo(&info);
    return (size_t)info.dwPageSize;
#else
    long bytes = sysconf(_SC_PAGESIZE);
    return bytes > 0 ? (size_t)bytes : 4096;
#endif
}

#if defined(__linux__)
/* Returns the number of bits that are 1 in the affinity mask of this process. /proc/self/status has the mask in a line
 * such as "Cpus_allowed: ff,ffffffff". Returns 0 if the mask is unknown. */
static inline int te__cpus_allowed(void) {
    char line[4096];
    int count = 0;
    FILE *f = fopen("/proc/self/status", "r");
    if (!f) return 0;
    while (fgets(line, (int)sizeof line, f)) {
        if (strncmp(line, "Cpus_allowed:", 13) != 0) continue;
        for (const char *p = line + 13; *p; p++) {
            const char *digits = "0123456789abcdef", *digit = strchr(digits, *p);
            for (int bits = digit ? (int)(digit - digits) : 0; bits; bits &= bits - 1) count++;
        }
        break;
    }
    fclose(f);
    return count;
}
/* Returns the container's CPU quota (cgroup v2) as a number of processors, rounded up. Returns 0 if the quota is
 * unlimited or unknown. */
static inline int te__cpus_granted(void) {
    long long quota = 0, period = 0;
    FILE *f = fopen("/sys/fs/cgroup/cpu.max", "r");
    if (!f) return 0;
    int read = fscanf(f, "%lld %lld", &quota, &period);
    fclose(f);
    return read == 2 && quota > 0 && period > 0 ? (int)((quota + period - 1) / period) : 0;
}
#endif

/* Returns the number of online processors, limited by the affinity mask and the container's quota. The result is at
 * least 1. */
static inline int te__cpu_count(void) {
#ifdef _WIN32
    SYSTEM_INFO info;
    GetSystemInfo(&info);
    return info.dwNumberOfProcessors > 0 ? (int)info.dwNumberOfProcessors : 1;
#else
    long online = sysconf(_SC_NPROCESSORS_ONLN);
    int count = online > 0 && online < 65536 ? (int)online : 1;
#if defined(__linux__)
    int allowed = te__cpus_allowed(), granted = te__cpus_granted();
    if (allowed > 0 && allowed < count) count = allowed;
    if (granted > 0 && granted < count) count = granted;
#endif
    return count;
#endif
}

/* ---- error texts and path encoding of the operating system ---- */

#ifdef _WIN32
typedef struct te__wide { wchar_t s[4096]; } te__wide;
/* Converts UTF-8 to the wide text that Windows functions take. A path that cannot be converted becomes "", and every
 * Windows function refuses "". */
static inline const wchar_t *te__widen(te__wide *w, const char *utf8) {
    if (!MultiByteToWideChar(CP_UTF8, 0, utf8, -1, w->s, TE__COUNT(w->s))) w->s[0] = 0;
    return w->s;
}
static inline bool te__narrow(char *utf8, size_t cap, const wchar_t *wide) {
    return WideCharToMultiByte(CP_UTF8, 0, wide, -1, utf8, (int)cap, NULL, NULL) > 0;
}
#endif

/* Appends the system's text for the error of the last system call, for example "No space left on device". */
static inline void te__text_os_error(te__text *t) {
#ifdef _WIN32
    DWORD code = GetLastError();
    wchar_t wide[512];
    char text[1024];
    DWORD n = FormatMessageW(FORMAT_MESSAGE_FROM_SYSTEM | FORMAT_MESSAGE_IGNORE_INSERTS, NULL, code, 0, wide,
                             TE__COUNT(wide) - 1, NULL);
    while (n > 0 && (wide[n - 1] == L'\n' || wide[n - 1] == L'\r' || wide[n - 1] == L'.')) n--;
    wide[n] = 0;
    if (n && te__narrow(text, sizeof text, wide)) te__text_put(t, text);
    else te__text_printf(t, "error %lu", (unsigned long)code);
#else
    te__text_put(t, strerror(errno));
#endif
}

/* ---- shared libraries ---- */

/* Opens a shared library. If `name` has no slash, the system looks for it in its library folders. On failure returns
 * NULL, and appends the reason to `why` unless `why` is NULL. */
static inline void *te__dl_open(const char *name, te__text *why) {
#ifdef _WIN32
    te__wide w;
    bool path = strchr(name, '\\') || strchr(name, '/');
    void *handle = (void *)LoadLibraryExW(te__widen(&w, name), NULL, path ? LOAD_WITH_ALTERED_SEARCH_PATH : 0);
    if (!handle && why) te__text_os_error(why);
    return handle;
#else
    void *handle = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (!handle && why) {
        const char *error = dlerror();
        te__text_put(why, error ? error : "dlopen failed");
    }
    return handle;
#endif
}

/* Returns the address of a symbol, or NULL if the library lacks it. */
static inline void *te__dl_sym(void *library, const char *symbol) {
#ifdef _WIN32
    FARPROC f = GetProcAddress((HMODULE)library, symbol);
    void *address;
    memcpy(&address, &f, sizeof address);
    return address;
#else
    return dlsym(library, symbol);
#endif
}

/* Sets the function pointer *fn to `symbol`. Returns false if the symbol is missing. Copies bytes, because ISO C cannot
 * cast object pointers to function pointers. */
static inline bool te__dl_function(void *library, const char *symbol, void *fn) {
    void *address = te__dl_sym(library, symbol);
    memcpy(fn, &address, sizeof address);
    return address != NULL;
}

static inline void te__dl_close(void *library) {
    if (!library) return;
#ifdef _WIN32
    FreeLibrary((HMODULE)library);
#else
    dlclose(library);
#endif
}

#ifndef _WIN32
/* This is the struct Dl_info, which the function dladdr fills. The headers of the C library may hide Dl_info. Every
 * POSIX system has this layout. */
typedef struct te__dl_info {
    const char *file;
    void *base;
    const char *symbol;
    void *address;
} te__dl_info;
#endif

/* Writes the path of a loaded library's file to `path`. `symbol` is any symbol of the library. Returns false if the
 * path is unknown. */
static inline bool te__dl_path(void *library, const char *symbol, char *path, size_t cap) {
#ifdef _WIN32
    te__wide w;
    (void)symbol;
    DWORD n = GetModuleFileNameW((HMODULE)library, w.s, TE__COUNT(w.s));
    return n > 0 && n < (DWORD)TE__COUNT(w.s) && te__narrow(path, cap, w.s);
#else
    int (*address_info)(const void *, te__dl_info *) = NULL;
    te__dl_info info = TE_ZERO;
    void *address = te__dl_sym(library, symbol), *program = dlopen(NULL, RTLD_LAZY);
    bool found = address && program && te__dl_function(program, "dladdr", (void *)&address_info) &&
                 address_info(address, &info) != 0 && info.file && strlen(info.file) < cap;
    if (found) memcpy(path, info.file, strlen(info.file) + 1);
    if (program) dlclose(program);
    return found;
#endif
}
