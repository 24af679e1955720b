/* te_test.c: the test runner: registration, running, comparing, random arrays. Knows the public half of te.h only to find out whether
 * there is a GPU.
 *
 *     te_test            every test
 *     te_test norm gelu  those whose names hold one of the words
 *     te_test --jobs 4   four processes share the tests; long ones start first (not on Windows)
 *     te_test --list     the names
 *
 * The last line is `N passed, M failed, K skipped`; the exit status is 1 if any failed. */
#define _GNU_SOURCE
#include "te_test.h"

#include <ftw.h>
#include <signal.h>
#include <stdarg.h>
#ifdef _WIN32
#include <fcntl.h>
#include <io.h>
#include <malloc.h>
#else
#include <sys/resource.h>
#endif
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#if defined(__SANITIZE_ADDRESS__)
#define TEST_ADDRESSES 1
#elif defined(__SANITIZE_THREAD__)
#define TEST_THREADS 1
#elif defined(__has_feature) /* clang, which has not always had those */
#if __has_feature(address_sanitizer)
#define TEST_ADDRESSES 1
#elif __has_feature(thread_sanitizer)
#define TEST_THREADS 1
#endif
#endif
#ifndef TEST_ADDRESSES
#define TEST_ADDRESSES 0
#endif
#ifndef TEST_THREADS
#define TEST_THREADS 0
#endif
#ifdef _WIN32
#define TEST_WINDOWS 1
#else
#define TEST_WINDOWS 0
#endif
/* The tests run again in builds that are about something else than arithmetic: these take a sample of some cases. */
enum { TEST_SANITIZED = TEST_ADDRESSES || TEST_THREADS, TEST_SAMPLED = TEST_SANITIZED || TEST_WINDOWS || sizeof(void *) < 8 };

bool test_samples(void) { return TEST_SAMPLED; }
int test_every(int n) { return TEST_THREADS ? n : 1; }
int test_every_sanitized(int n) { return TEST_SAMPLED ? 2 * n : 1; }
int test_every_odd(int n) { return TEST_SAMPLED ? 2 * n + 1 : 1; }
int test_every_of(int n, int some) { return TEST_THREADS ? n : test_every_sanitized(some); }

enum { MAX_TESTS = 8192, MAX_ENDINGS = 4096, MAX_MESSAGES = 8, MAX_JOBS = 64, NAME_SIZE = 160 };

typedef struct test_entry {
    char name[NAME_SIZE]; /* "ops/norm.rounding [cuda:0]" */
    const char *file;
    int line, order;
    const char *device; /* NULL: the test chooses */
    test_fn run;
    double ms; /* how long it took when it last ran; negative: nobody knows */
} test_entry;

typedef struct test_ending {
    void (*fn)(void *arg);
    void *arg;
} test_ending;

static test_entry *tests;
static int num_tests;
static int passed, failed, skipped;

/* The test that runs. */
static const test_entry *current;
static int messages;
static const char *skip_reason;
static char case_text[512];
static char log_text[16384];
static test_ending endings[MAX_ENDINGS];
static int num_endings;
static char dir[256];

/* ---- registration -------------------------------------------------------------------------------------------- */

void test_register(const char *file, int line, const char *name, const char *device, test_fn run) {
    if (!tests) tests = (test_entry *)calloc(MAX_TESTS, sizeof *tests);
    if (!tests || num_tests == MAX_TESTS) abort();
    const char *room = strstr(file, "tests/"), *base;
    room = room ? room + 6 : file;
    base = strrchr(room, '/');
    base = base ? base + 1 : room;
    const char *word = strncmp(base, "test_", 5) ? base : base + 5;
    test_entry *t = &tests[num_tests];
    snprintf(t->name, sizeof t->name, "%.*s%.*s.%s%s%s%s", (int)(base - room), room, (int)strcspn(word, "."), word, name,
             device ? " [" : "", device ? device : "", device ? "]" : "");
    t->file = file;
    t->line = line;
    t->order = num_tests++;
    t->device = device;
    t->run = run;
    t->ms = -1;
}

static int by_place(const void *a, const void *b) {
    const test_entry *x = (const test_entry *)a, *y = (const test_entry *)b;
    int files = strcmp(x->file, y->file);
    if (files) return files;
    return x->line != y->line ? x->line - y->line : x->order - y->order;
}

const char *test_no_gpu(void) {
    static te_ctx *keeper; /* holds the GPU's primary context, so that each test need not make it anew */
    static bool asked;
    if (!asked) {
        te_ctx_desc desc;
        memset(&desc, 0, sizeof desc);
        desc.device = "cuda:0";
        desc.log = test__log;
        asked = true;
        keeper = te_ctx_create(&desc);
        if (!te_ok(keeper)) {
            te_ctx_destroy(keeper);
            keeper = NULL;
        }
    }
    return keeper ? NULL : "no GPU";
}

/* ---- what a test may call ------------------------------------------------------------------------------------ */

void test_fail(const char *file, int line, const char *format, ...) {
    if (++messages > MAX_MESSAGES) return;
    va_list args;
    va_start(args, format);
    printf("  %s:%d: ", file, line);
    vprintf(format, args);
    if (case_text[0]) printf("  (%s)", case_text);
    printf("\n");
    va_end(args);
    if (messages == MAX_MESSAGES) printf("  ... more failures of this test are not shown\n");
}

void test_skip(const char *reason) { skip_reason = reason; }

void test_case(const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(case_text, sizeof case_text, format, args);
    va_end(args);
}

void test_on_end(void (*fn)(void *arg), void *arg) {
    if (num_endings == MAX_ENDINGS) {
        test_fail(__FILE__, __LINE__, "more than %d things to undo in one test", MAX_ENDINGS);
        return;
    }
    endings[num_endings].fn = fn;
    endings[num_endings++].arg = arg;
}

/* Allocations form a chain of their own: a test makes many of them. */
typedef union test_block {
    union test_block *next;
    long double align;
} test_block;
static test_block *blocks;

void *test_alloc(size_t bytes) {
    test_block *b = (test_block *)calloc(1, sizeof *b + bytes);
    if (!b) {
        fprintf(stderr, "te_test: out of memory (%zu bytes)\n", bytes);
        exit(1);
    }
    b->next = __atomic_load_n(&blocks, __ATOMIC_RELAXED); /* ranks are threads */
    while (!__atomic_compare_exchange_n(&blocks, &b->next, b, false, __ATOMIC_RELEASE, __ATOMIC_RELAXED)) continue;
    return b + 1;
}

float *test_floats(int64_t n) { return (float *)test_alloc((size_t)(n + 1) * sizeof(float)); }
double *test_doubles(int64_t n) { return (double *)test_alloc((size_t)(n + 1) * sizeof(double)); }

void *test_aligned_alloc(size_t alignment, size_t bytes) {
#ifdef _WIN32
    return _aligned_malloc(bytes, alignment);
#else
    return aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
#endif
}
void test_aligned_free(void *p) {
#ifdef _WIN32
    _aligned_free(p);
#else
    free(p);
#endif
}

bool test_limit_files(int64_t bytes) {
#ifdef _WIN32
    (void)bytes;
    return false;
#else
    static void (*handler)(int);
    struct rlimit limit;
    if (getrlimit(RLIMIT_FSIZE, &limit)) return false;
    limit.rlim_cur = bytes < 0 ? limit.rlim_max : (rlim_t)bytes;
    if (setrlimit(RLIMIT_FSIZE, &limit)) return false;
    if (bytes < 0) signal(SIGXFSZ, handler);
    else handler = signal(SIGXFSZ, SIG_IGN);
    return true;
#endif
}

static int remove_entry(const char *path, const struct stat *status, int type, struct FTW *where) {
    (void)status, (void)where;
    if (type == FTW_DP || type == FTW_D) chmod(path, 0700);
    return remove(path);
}
static int open_folder(const char *path, const struct stat *status, int type, struct FTW *where) {
    (void)status, (void)where;
    if (type == FTW_D || type == FTW_DNR) chmod(path, 0700);
    return 0;
}
static void remove_dir(void *path) {
    chmod((char *)path, 0700);
    nftw((char *)path, open_folder, 16, FTW_PHYS);
    nftw((char *)path, remove_entry, 16, FTW_DEPTH | FTW_PHYS);
    *(char *)path = 0;
}

const char *test_dir(void) {
    if (dir[0]) return dir;
    const char *tmp = getenv("TMPDIR");
    snprintf(dir, sizeof dir, "%s/te_test.XXXXXX", tmp && tmp[0] ? tmp : "/tmp");
    if (!mkdtemp(dir)) {
        test_fail(__FILE__, __LINE__, "cannot make a folder: %s", dir);
        dir[0] = 0;
        return "/nonexistent";
    }
    test_on_end(remove_dir, dir);
    return dir;
}

const char *test_path(const char *name) {
    size_t size = strlen(test_dir()) + strlen(name) + 2;
    char *path = (char *)test_alloc(size);
    snprintf(path, size, "%s/%s", dir, name);
    return path;
}

uint8_t *test_read_file(const char *path, size_t *size) {
    FILE *f = fopen(path, "rb");
    size_t n = 0;
    uint8_t *bytes = NULL;
    if (f) {
        fseek(f, 0, SEEK_END);
        n = (size_t)ftell(f);
        rewind(f);
        bytes = (uint8_t *)test_alloc(n + 1);
        if (fread(bytes, 1, n, f) != n) n = 0;
        fclose(f);
    }
    if (size) *size = n;
    return bytes;
}

typedef struct saved_variable {
    char name[64];
    char *value;
} saved_variable;

static void restore_variable(void *arg) {
    saved_variable *v = (saved_variable *)arg;
    if (v->value) setenv(v->name, v->value, 1);
    else unsetenv(v->name);
}

void test_setenv(const char *name, const char *value) {
    saved_variable *v = (saved_variable *)test_alloc(sizeof *v);
    const char *old = getenv(name);
    snprintf(v->name, sizeof v->name, "%s", name);
    if (old) {
        v->value = (char *)test_alloc(strlen(old) + 1);
        memcpy(v->value, old, strlen(old) + 1);
    }
    test_on_end(restore_variable, v);
    if (value) setenv(name, value, 1);
    else unsetenv(name);
}

void test_log(void *user, int level, const char *message) {
    (void)user, (void)level;
    size_t used = strlen(log_text);
    snprintf(log_text + used, sizeof log_text - used, "%s\n", message);
}
const char *test_log_text(void) { return log_text; }

/* ---- random arrays ------------------------------------------------------------------------------------------- */

/* Inlined, the state is a register: a sanitizer has nothing to watch here, and a test makes millions of numbers. */
#define RANDOM static inline __attribute__((always_inline))
RANDOM uint64_t next_random(uint64_t *state) { /* splitmix64 */
    uint64_t z = (*state += 0x9E3779B97F4A7C15u);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}
RANDOM double next_uniform(uint64_t *state) { return (double)(next_random(state) >> 11) * 0x1p-53; }

/* The sum of twelve uniforms: no libm, so every machine gets the same bits. */
RANDOM double next_normal(uint64_t *state) {
    double sum = -6;
    for (int i = 0; i < 12; i++) sum += next_uniform(state);
    return sum;
}

float *test_normal(int64_t n, uint64_t seed) {
    float *x = test_floats(n);
    for (int64_t i = 0; i < n; i++) x[i] = (float)next_normal(&seed);
    return x;
}

float *test_uniform(int64_t n, uint64_t seed, float low, float high) {
    float *x = test_floats(n);
    for (int64_t i = 0; i < n; i++) x[i] = (float)(low + ((double)high - low) * next_uniform(&seed));
    return x;
}

int64_t *test_integers(int64_t n, uint64_t seed, int64_t low, int64_t high) {
    int64_t *x = (int64_t *)test_alloc((size_t)n * sizeof *x);
    for (int64_t i = 0; i < n; i++) x[i] = low + (int64_t)(next_random(&seed) % (uint64_t)(high - low));
    return x;
}

float *test_copy(const float *x, int64_t n) {
    float *y = test_floats(n);
    if (n) memcpy(y, x, (size_t)n * sizeof *y);
    return y;
}

static float *with_specials(int64_t n, uint64_t seed, bool finite) {
    static const float odd[] = {
        0.0f, -0.0f, 1.0f, -1.0f,
        448.0f, -448.0f, 464.0f, 464.5f, 480.0f,            /* E4M3: largest, the tie above it, beyond */
        57344.0f, -57344.0f, 61440.0f, 61441.0f, 65504.0f,  /* E5M2, and f16's largest */
        6.0f, -6.0f, 0.25f, 0.75f, 2.5f, 3.5f, 5.0f,        /* E2M1: largest, ties */
        0x1p-6f, 0x1p-7f, 0x1p-9f, 0x1p-10f, 0x1.8p-10f, -0x1.8p-9f, /* E4M3 denormals and ties */
        0x1p-14f, 0x1p-16f, 0x1p-17f, 0x1.8p-17f, 0x1p-24f, 0x1p-25f, /* E5M2 and f16 denormals */
        17.0f, 19.0f, 0x1.1p0f, 0x1.3p0f, 0x1.01p0f, 0x1.03p0f, 0x1.002p0f, 0x1.006p0f, /* ties of 3-, 7- and 10-bit mantissas */
        0x1p-126f, 0x1p-127f, 0x1p-149f, -0x1p-149f, 0x1.fffffcp-127f, /* f32 denormals */
        0x1.fffffep127f, -0x1.fffffep127f, 0x1.fep127f, 65536.0f,      /* f32's and bf16's largest */
    };
    static const float endless[] = {INFINITY, -INFINITY, NAN, -NAN};
    float *x = test_normal(n, seed);
    uint64_t state = seed ^ 0x5bd1e995u;
    for (int64_t i = 0; i < n; i++) {
        uint64_t r = next_random(&state);
        if (!finite && r % 16 == 0) x[i] = endless[(r >> 8) % COUNT(endless)];
        else if (r % 2) x[i] = odd[(r >> 8) % COUNT(odd)];
    }
    return x;
}
float *test_specials(int64_t n, uint64_t seed) { return with_specials(n, seed, false); }
float *test_finite_specials(int64_t n, uint64_t seed) { return with_specials(n, seed, true); }

/* ---- comparing ----------------------------------------------------------------------------------------------- */

/* Normalised error over the elements that are finite on both sides. */
static double normalised_error(const float *got, const float *want, int64_t n) {
    double error = 0, size = 0;
    for (int64_t i = 0; i < n; i++) {
        if (!isfinite(got[i]) || !isfinite(want[i])) continue;
        error += ((double)got[i] - want[i]) * ((double)got[i] - want[i]);
        size += (double)want[i] * want[i];
    }
    return error == 0 ? 0 : sqrt(error / (size > 0 ? size : 1e-300));
}

bool test_close(const char *file, int line, const char *name, const float *got, const float *want, int64_t n, double rtol, double atol) {
    int64_t worst = -1, wrong = 0;
    double worst_excess = 0;
    for (int64_t i = 0; i < n; i++) {
        double g = got[i], w = want[i], excess;
        if ((isnan(g) && isnan(w)) || g == w) continue;
        if (!isfinite(g) || !isfinite(w)) excess = INFINITY;
        else excess = fabs(g - w) / (atol + rtol * fabs(w) + 1e-300);
        if (excess <= 1) continue;
        wrong++;
        if (excess > worst_excess) worst_excess = excess, worst = i;
    }
    if (!wrong) return true;
    test_fail(file, line, "%s: %" PRId64 " of %" PRId64 " differ; worst [%" PRId64 "]: %.9g, not %.9g (%.3g x the tolerance rtol %g atol %g); "
              "normalised error %.3g", name, wrong, n, worst, (double)got[worst], (double)want[worst], worst_excess, rtol, atol,
              normalised_error(got, want, n));
    return false;
}

bool test_error_below(const char *file, int line, const char *name, const float *got, const float *want, int64_t n, double limit) {
    for (int64_t i = 0; i < n; i++) {
        if (isfinite(got[i]) == isfinite(want[i]) && isnan(got[i]) == isnan(want[i])) continue;
        test_fail(file, line, "%s[%" PRId64 "]: %.9g, not %.9g", name, i, (double)got[i], (double)want[i]);
        return false;
    }
    double error = normalised_error(got, want, n);
    if (error <= limit) return true;
    test_fail(file, line, "%s: normalised error %.3g over %.3g (%" PRId64 " elements)", name, error, limit, n);
    return false;
}

bool test_bytes_equal(const char *file, int line, const char *name, const void *got, const void *want, size_t n) {
    const uint8_t *g = (const uint8_t *)got, *w = (const uint8_t *)want;
    size_t first = n, wrong = 0;
    for (size_t i = 0; i < n; i++) {
        if (g[i] == w[i]) continue;
        if (!wrong++) first = i;
    }
    if (!wrong) return true;
    test_fail(file, line, "%s: %zu of %zu bytes differ; first [%zu]: 0x%02x, not 0x%02x", name, wrong, n, first, g[first], w[first]);
    return false;
}

/* ---- running ------------------------------------------------------------------------------------------------- */

static double now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

static void on_crash(int number) {
    char text[512];
    int n = snprintf(text, sizeof text, "FAIL  %s: crashed with signal %d; the tests after it did not run\n%d passed, %d failed, %d skipped\n",
                     current ? current->name : "?", number, passed, failed + 1, skipped);
    ssize_t written = write(STDOUT_FILENO, text, (size_t)n);
    _exit(written < 0 ? 2 : 1);
}

static void run(test_entry *t) {
    double start = now_ms();
    current = t;
    messages = 0;
    skip_reason = NULL;
    case_text[0] = log_text[0] = 0;
    if (t->device && !strncmp(t->device, "cuda", 4) && test_no_gpu()) skip_reason = test_no_gpu();
    else t->run(t->device);
    while (num_endings) {
        num_endings--;
        endings[num_endings].fn(endings[num_endings].arg);
    }
    while (blocks) {
        test_block *next = blocks->next;
        free(blocks);
        blocks = next;
    }
    t->ms = now_ms() - start;
    if (messages && log_text[0]) printf("  log: %s", log_text);
    if (messages) failed++;
    else if (skip_reason) skipped++;
    else passed++;
    if (messages || !skip_reason) printf("%s  %s  (%.0f ms)\n", messages ? "FAIL" : "ok  ", t->name, t->ms);
    else printf("skip  %s: %s\n", t->name, skip_reason);
    fflush(stdout);
    current = NULL;
}

static bool wanted(const test_entry *t, int num_words, char **words) {
    for (int i = 0; i < num_words; i++)
        if (strstr(t->name, words[i])) return true;
    return num_words == 0;
}

#ifndef _WIN32
#include "te_jobs.h"
#endif

/* ---- the program --------------------------------------------------------------------------------------------- */

static void run_here(const int *queue, int n, const char **broken) {
    static const int deadly[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT};
    for (int i = 0; i < COUNT(deadly) && !TEST_SANITIZED; i++) signal(deadly[i], on_crash);
    for (int i = 0; i < n; i++) {
        int before = failed;
        run(&tests[queue[i]]);
        if (failed > before) broken[before] = tests[queue[i]].name;
    }
}

static int usage(void) {
    fprintf(stderr, "usage: te_test [--list] [--jobs N] [WORD ...]\n");
    return 2;
}

int main(int argc, char **argv) {
    bool list = false;
    int jobs = 1, num_words = 0, n = 0;
    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "--list")) list = true;
        else if (!strcmp(argv[i], "--jobs") && i + 1 < argc && atoi(argv[i + 1]) > 0) jobs = atoi(argv[++i]);
        else if (argv[i][0] == '-') return usage();
        else argv[1 + num_words++] = argv[i];
    }
#ifdef _WIN32
    _setmode(1, _O_BINARY); /* lines end as everywhere: run.sh reads the last one */
    if (jobs > 1) fprintf(stderr, "te_test: --jobs needs fork, which Windows lacks; one process runs the tests\n");
    jobs = 1;
#endif
    unsetenv("TE_DEVICE"); /* each test names its device */
    unsetenv("TE_LOG");
    if (num_tests) qsort(tests, (size_t)num_tests, sizeof *tests, by_place);
    int *queue = (int *)calloc((size_t)num_tests + 1, sizeof *queue);
    /* Beside the tests' own names: ends of processes, at most one for each test and job. */
    const char **broken = (const char **)calloc(2 * (size_t)num_tests + MAX_JOBS, sizeof *broken);
    for (int i = 0; i < num_tests; i++) {
        if (!wanted(&tests[i], num_words, argv + 1)) continue;
        if (list) printf("%s\n", tests[i].name);
        else queue[n++] = i;
    }
    if (jobs > n) jobs = n;
    if (jobs > MAX_JOBS) jobs = MAX_JOBS;
    if (jobs > 1) {
#ifndef _WIN32
        run_in_processes(jobs, queue, n, argv[0], broken);
#endif
    } else {
        run_here(queue, n, broken);
    }
    if (!list) {
        for (int i = 0; i < failed; i++) printf("%s%s\n", i ? "        " : "\nfailed: ", broken[i]);
        if (skipped && test_no_gpu()) printf("\nskipped for want of a GPU or of a library: the lines above say which\n");
        printf("%d passed, %d failed, %d skipped\n", passed, failed, skipped);
    }
    free(broken);
    free(queue);
    free(tests);
    return failed ? 1 : 0;
}
