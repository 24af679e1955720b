/* te_test.h: what every test file uses. Knows the public half of te.h; the runner and everything that needs no te.h type is in
 * te_test.c.
 *
 *     #include "../te_test.h"
 *
 *     TE_TEST(dtype_names) { CHECK_STR(te_dtype_name(TE_BF16), "bf16"); }
 *
 *     TE_TEST_DEVICES(fill) {                              once on the CPU, once on cuda:0; `te` is a fresh context
 *         te_tensor *x = test_guarded(te, TE_BF16, SHAPE(3, 5));
 *         te_tensor_fill(x, 2);
 *         CHECK_OK(te);
 *         for (int i = 0; i < 15; i++) CHECK(test_read(x)[i] == 2);
 *     }                                                    guard bands and leaks are checked when it ends
 *
 * A failed CHECK is reported and the test goes on; REQUIRE ends the test. A test of private functions writes
 * `#define TE_STATIC` and `#define TE_IMPLEMENTATION` above the include. */
#ifndef TE_TEST_H_INCLUDED
#define TE_TEST_H_INCLUDED

#include "te_parts.h"
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- the runner (te_test.c) ---------------------------------------------------------------------------------- */

typedef void (*test_fn)(const char *device);
void test_register(const char *file, int line, const char *name, const char *device, test_fn run);
void test_fail(const char *file, int line, const char *format, ...) TE_PRINTF(3, 4);
void test_skip(const char *reason);
/* A line that goes with every failure from here to the end of the test, or to the next: "m=17 n=1 bf16". */
void test_case(const char *format, ...) TE_PRINTF(1, 2);
/* fn(arg) runs when the test ends, whichever way; the last one first. */
void test_on_end(void (*fn)(void *arg), void *arg);
/* The device of a rank that asks for `device`. With TE_TEST_GPUS=N, ranks on cuda:0 take the first N GPUs in turns. */
static TE_MAYBE_UNUSED const char *test_device_of_rank(const char *device, int rank, char text[24]) {
    const char *gpus = getenv("TE_TEST_GPUS");
    if (strcmp(device, "cuda:0") || !gpus || atoi(gpus) < 2) return device;
    snprintf(text, 24, "cuda:%d", rank % atoi(gpus));
    return text;
}
/* Why cuda:0 cannot be used here ("no GPU"), or NULL if it can. */
const char *test_no_gpu(void);

/* Whether this build takes a sample of some cases: under both sanitizers, on 32-bit machines and on Windows, where the tests run again for something else than arithmetic. */
bool test_samples(void);
/* Strides of loops over many cases that run alike: every n-th case is taken. All of them are 1 in a build that takes every case.
 *
 *     test_every(n)               n under the thread sanitizer alone, which is ten times as slow; races are the same in all cases
 *     test_every_sanitized(n)     2 n in builds that sample: for ranks, which wait for each other on few cores, for whole trainings, and for loops of very many cases
 *     test_every_odd(n)           2 n + 1 in builds that sample: within the loop another one has an even length, and an odd stride goes through all of its values
 *     test_every_of(n, some)      n under the thread sanitizer, 2 `some` in other builds that sample: for products of every size and layout, whose code is that of their neighbours */
int test_every(int n);
int test_every_sanitized(int n);
int test_every_odd(int n);
int test_every_of(int n, int some);

/* For allocators of tests: memory of their own, from any thread. */
void *test_aligned_alloc(size_t alignment, size_t bytes);
void test_aligned_free(void *p);

/* A file that this program writes ends after so many bytes, as on a full disk; negative: as before. False where a process has no such limit. */
bool test_limit_files(int64_t bytes);

/* All of these last until the test ends. */
void *test_alloc(size_t bytes); /* zeroed */
float *test_floats(int64_t n);  /* zeroed, too, and one more than n, so that an empty array has an address */
double *test_doubles(int64_t n);
const char *test_dir(void);     /* an empty folder of the test's own */
const char *test_path(const char *name);              /* a file name in it */
uint8_t *test_read_file(const char *path, size_t *size); /* NULL if it cannot be opened; a zero stands behind its end; size may be NULL */
void test_setenv(const char *name, const char *value); /* NULL takes the variable away */

/* Arrays from fixed seeds: equal (n, seed) give equal values on every machine. */
float *test_normal(int64_t n, uint64_t seed);
float *test_uniform(int64_t n, uint64_t seed, float low, float high);
/* Normal values among which every kind of odd one is found: both zeros, denormals, limits of every format and their neighbours, ties,
 * and (not in test_finite_specials) both infinities and NaN. */
float *test_specials(int64_t n, uint64_t seed);
float *test_finite_specials(int64_t n, uint64_t seed);
int64_t *test_integers(int64_t n, uint64_t seed, int64_t low, int64_t high); /* low <= value < high */
float *test_copy(const float *x, int64_t n);

bool test_close(const char *file, int line, const char *name, const float *got, const float *want, int64_t n, double rtol, double atol);
bool test_error_below(const char *file, int line, const char *name, const float *got, const float *want, int64_t n, double limit);
bool test_bytes_equal(const char *file, int line, const char *name, const void *got, const void *want, size_t n);
void test_log(void *user, int level, const char *message);
/* The log of this test's contexts. */
const char *test_log_text(void);

#ifdef __cplusplus
}
#endif

/* ---- tests --------------------------------------------------------------------------------------------------- */

#define TE_TEST(name)                                                                                  \
    static void test__##name(void);                                                                    \
    static void test__##name##_run(const char *device) {                                               \
        (void)device;                                                                                  \
        test__##name();                                                                                \
    }                                                                                                  \
    __attribute__((constructor)) static void test__##name##_register(void) {                           \
        test_register(__FILE__, __LINE__, #name, NULL, test__##name##_run);                            \
    }                                                                                                  \
    static void test__##name(void)

#define TE_TEST_DEVICES(name)                                                                          \
    static void test__##name(te_ctx *te);                                                              \
    static void test__##name##_run(const char *device) {                                               \
        te_ctx *te = test_context(device);                                                             \
        if (te) test__##name(te);                                                                      \
    }                                                                                                  \
    __attribute__((constructor)) static void test__##name##_register(void) {                           \
        test_register(__FILE__, __LINE__, #name, "cpu", test__##name##_run);                           \
        test_register(__FILE__, __LINE__, #name, "cuda:0", test__##name##_run);                        \
    }                                                                                                  \
    static void test__##name(te_ctx *te)

/* ---- checks -------------------------------------------------------------------------------------------------- */

#define CHECK(cond)                                                       \
    do {                                                                  \
        if (!(cond)) test_fail(__FILE__, __LINE__, "%s", #cond);          \
    } while (0)
#define CHECK_MSG(cond, ...)                                              \
    do {                                                                  \
        if (!(cond)) test_fail(__FILE__, __LINE__, __VA_ARGS__);          \
    } while (0)
#define REQUIRE(cond)                                                     \
    do {                                                                  \
        if (!(cond)) {                                                    \
            test_fail(__FILE__, __LINE__, "%s", #cond);                   \
            return;                                                       \
        }                                                                 \
    } while (0)
#define CHECK_EQ_INT(a, b)                                                                                   \
    do {                                                                                                     \
        long long test__a = (long long)(a), test__b = (long long)(b);                                        \
        if (test__a != test__b) test_fail(__FILE__, __LINE__, "%s is %lld, not %lld", #a, test__a, test__b); \
    } while (0)
/* `text` holds `needle`. */
#define CHECK_STR(text, needle)                                                                                  \
    do {                                                                                                         \
        const char *test__t = (text), *test__n = (needle);                                                       \
        if (!test__t || !strstr(test__t, test__n))                                                               \
            test_fail(__FILE__, __LINE__, "%s lacks \"%s\": \"%s\"", #text, test__n, test__t ? test__t : "NULL"); \
    } while (0)
#define CHECK_OK(te)                                                                         \
    do {                                                                                     \
        if (!te_ok(te)) test_fail(__FILE__, __LINE__, "te_error: %s", te_error(te));         \
    } while (0)
#define REQUIRE_OK(te)                                                                       \
    do {                                                                                     \
        if (!te_ok(te)) {                                                                    \
            test_fail(__FILE__, __LINE__, "te_error: %s", te_error(te));                     \
            return;                                                                          \
        }                                                                                    \
    } while (0)
/* The context's first error has this code and holds this text; then it is cleared. */
#define CHECK_ERROR(te, code, needle)                                                                        \
    do {                                                                                                     \
        if (te_error_code(te) != (code) || !strstr(te_error(te), (needle)))                                  \
            test_fail(__FILE__, __LINE__, "expected %s with \"%s\", got %s \"%s\"", te_result_name(code),    \
                      (needle), te_result_name(te_error_code(te)), te_error(te));                            \
        te_clear_error(te);                                                                                  \
    } while (0)
/* |got - want| <= atol + rtol * |want| everywhere; NaN matches NaN. float arrays of n. */
#define CHECK_CLOSE(name, got, want, n, rtol, atol) test_close(__FILE__, __LINE__, name, got, want, n, rtol, atol)
/* sqrt(sum (got - want)^2 / sum want^2) <= limit. */
#define CHECK_ERROR_BELOW(name, got, want, n, limit) test_error_below(__FILE__, __LINE__, name, got, want, n, limit)
#define CHECK_BYTES(name, got, want, n) test_bytes_equal(__FILE__, __LINE__, name, got, want, n)
/* As CHECK_CLOSE, of a whole tensor against a float array of its size. */
#define CHECK_TENSOR(x, want, rtol, atol) test_close(__FILE__, __LINE__, #x, test_read(x), want, te_tensor_numel(x), rtol, atol)

#define SKIP(reason)            \
    do {                        \
        test_skip(reason);      \
        return;                 \
    } while (0)

/* SHAPE(2, 3) is the two arguments `ndim, shape`. */
#define SHAPE(...) (int)(sizeof((int64_t[]){__VA_ARGS__}) / sizeof(int64_t)), (const int64_t[]){__VA_ARGS__}
/* A compiler of libraries that this program can open. */
#ifdef __i386__
#define TEST_CC "cc -m32"
#else
#define TEST_CC "cc"
#endif
#define COUNT(array) ((int)(sizeof(array) / sizeof((array)[0])))

/* ---- contexts and tensors ------------------------------------------------------------------------------------ */

enum { TEST_GUARD_BYTES = 256, TEST_GUARD = 0xA5, TEST_POISON = 0xFF /* NaN in every float format */ };

typedef struct test_guard {
    te_tensor *whole;
    size_t bytes;
    struct test_guard *next;
} test_guard;
typedef struct test_context_state {
    te_ctx *te;
    test_guard *guards;
    bool may_leak;
    struct test_context_state *next;
} test_context_state;
static test_context_state *test__contexts TE_MAYBE_UNUSED;

static TE_MAYBE_UNUSED test_context_state *test__state_of(te_ctx *te) {
    test_context_state *s = test__contexts;
    while (s && s->te != te) s = s->next;
    return s;
}

/* The bands around every test_guarded tensor of `te` are untouched. Runs by itself when the test ends. */
static TE_MAYBE_UNUSED void test_check_guards(te_ctx *te) {
    test_context_state *s = test__state_of(te);
    for (test_guard *g = s ? s->guards : NULL; g; g = g->next) {
        size_t total = g->bytes + 2 * TEST_GUARD_BYTES;
        uint8_t *host = (uint8_t *)malloc(total);
        if (te_ok(te) && te_tensor_to_host(g->whole, host) == TE_OK) {
            for (size_t i = 0; i < total; i++) {
                bool inside = i >= TEST_GUARD_BYTES && i < TEST_GUARD_BYTES + g->bytes;
                if (inside || host[i] == TEST_GUARD) continue;
                test_fail(__FILE__, __LINE__, "wrote outside an output of %zu bytes, at byte %lld", g->bytes,
                          (long long)i - TEST_GUARD_BYTES);
                break;
            }
        }
        free(host);
    }
}

static TE_MAYBE_UNUSED void test__log(void *user, te_log_level level, const char *message) { test_log(user, (int)level, message); }

static TE_MAYBE_UNUSED void test__close(void *arg) {
    test_context_state *s = (test_context_state *)arg;
    te_ctx *te = s->te;
    test_check_guards(te);
    while (s->guards) {
        test_guard *g = s->guards;
        s->guards = g->next;
        te_tensor_release(g->whole);
        free(g);
    }
    te_scope_end(te);
    size_t left = te_memory_get_stats(te).allocated;
    if (left && !s->may_leak) test_fail(__FILE__, __LINE__, "leak: %zu bytes of tensors are alive when the test ends", left);
    te_ctx_destroy(te);
    test_context_state **at = &test__contexts;
    while (*at != s) at = &(*at)->next;
    *at = s->next;
    free(s);
}

/* A context with an open scope, closed when the test ends; what is alive then is a leak, and a failure. desc may be NULL; its log
 * goes to test_log_text unless it names one. */
static TE_MAYBE_UNUSED te_ctx *test_context_with(const te_ctx_desc *desc) {
    te_ctx_desc d = {0};
    if (desc) d = *desc;
    if (!d.device) d.device = "cpu";
    if (!d.log) d.log = test__log;
    te_ctx *te = te_ctx_create(&d);
    if (!te_ok(te)) {
        test_fail(__FILE__, __LINE__, "te_ctx_create(%s): %s", d.device, te_error(te));
        te_ctx_destroy(te);
        return NULL;
    }
    te_scope_begin(te);
    test_context_state *s = (test_context_state *)calloc(1, sizeof *s);
    s->te = te;
    s->next = test__contexts;
    test__contexts = s;
    test_on_end(test__close, s);
    return te;
}
static TE_MAYBE_UNUSED te_ctx *test_context_threads(const char *device, int cpu_threads) {
    te_ctx_desc d = {0};
    d.device = device;
    d.cpu_threads = cpu_threads;
    return test_context_with(&d);
}
static TE_MAYBE_UNUSED te_ctx *test_context(const char *device) { return test_context_threads(device, 0); }
/* A context on te's device that multiplies f32 exactly: by TF32 differences would be noise, and sums good for three digits. */
static TE_MAYBE_UNUSED te_ctx *test_exact(te_ctx *te) {
    te_ctx_desc d = {0};
    d.device = te_ctx_device(te);
    d.exact_f32 = true;
    return test_context_with(&d);
}
/* A context of the CPU to compare a GPU's numbers with; NULL if `te` is of the CPU itself. */
static TE_MAYBE_UNUSED te_ctx *test_cpu_beside(te_ctx *te) { return te_ctx_is_cuda(te) ? test_context("cpu") : NULL; }
/* This test leaves tensors alive on purpose. */
static TE_MAYBE_UNUSED void test_may_leak(te_ctx *te) {
    if (test__state_of(te)) test__state_of(te)->may_leak = true;
}

static TE_MAYBE_UNUSED int64_t test_numel(int ndim, const int64_t *shape) {
    int64_t n = 1;
    for (int i = 0; i < ndim; i++) n *= shape[i];
    return n;
}

/* A tensor with these values, rounded to `dtype` (integers: truncated). */
static TE_MAYBE_UNUSED te_tensor *test_tensor(te_ctx *te, te_dtype dtype, int ndim, const int64_t *shape, const float *values) {
    if (dtype != TE_I32 && dtype != TE_I64 && dtype != TE_U8) return te_tensor_from_f32(te, dtype, ndim, shape, values);
    int64_t n = test_numel(ndim, shape);
    void *host = test_alloc((size_t)n * 8 + 8);
    for (int64_t i = 0; i < n; i++) {
        if (dtype == TE_I32) ((int32_t *)host)[i] = (int32_t)values[i];
        if (dtype == TE_I64) ((int64_t *)host)[i] = (int64_t)values[i];
        if (dtype == TE_U8) ((uint8_t *)host)[i] = (uint8_t)values[i];
    }
    return te_tensor_from_host(te, dtype, ndim, shape, host);
}
static TE_MAYBE_UNUSED te_tensor *test_i32(te_ctx *te, int ndim, const int64_t *shape, const int64_t *values) {
    int64_t n = test_numel(ndim, shape);
    int32_t *host = (int32_t *)test_alloc((size_t)n * 4 + 4);
    for (int64_t i = 0; i < n; i++) host[i] = (int32_t)values[i];
    return te_tensor_from_host(te, TE_I32, ndim, shape, host);
}
/* An output: memory full of TEST_POISON between two guard bands. */
static TE_MAYBE_UNUSED te_tensor *test_guarded(te_ctx *te, te_dtype dtype, int ndim, const int64_t *shape) {
    int64_t cols = ndim ? shape[ndim - 1] : 1;
    int64_t rows = ndim ? test_numel(ndim - 1, shape) : 1;
    size_t bytes = (size_t)(rows * ((cols * te_dtype_bits(dtype) + 7) / 8));
    size_t total = bytes + 2 * TEST_GUARD_BYTES;
    uint8_t *host = (uint8_t *)malloc(total);
    memset(host, TEST_GUARD, total);
    memset(host + TEST_GUARD_BYTES, TEST_POISON, bytes);
    te_tensor *whole = te_tensor_from_host(te, TE_U8, SHAPE((int64_t)total), host);
    free(host);
    test_context_state *s = test__state_of(te);
    if (!whole || !s) return NULL;
    test_guard *g = (test_guard *)calloc(1, sizeof *g);
    g->whole = te_tensor_retain(whole);
    g->bytes = bytes;
    g->next = s->guards;
    s->guards = g;
    return te_tensor_wrap(te, dtype, ndim, shape, (uint8_t *)te_tensor_data(whole) + TEST_GUARD_BYTES, NULL, NULL);
}
/* A guarded tensor that starts with these values: for outputs that are accumulated into. */
static TE_MAYBE_UNUSED te_tensor *test_guarded_with(te_ctx *te, te_dtype dtype, int ndim, const int64_t *shape, const float *values) {
    te_tensor *x = test_guarded(te, dtype, ndim, shape);
    te_tensor_copy(x, test_tensor(te, dtype, ndim, shape, values));
    return x;
}

/* An input, or a guarded output, [m, n]; misaligned: at an address that is a multiple of its element alone. */
static TE_MAYBE_UNUSED te_tensor *test__moved(te_ctx *te, te_tensor *whole, int64_t m, int64_t n) {
    te_dtype dtype = te_tensor_dtype(whole);
    return te_tensor_wrap(te, dtype, SHAPE(m, n), (char *)te_tensor_data(whole) + te_dtype_bits(dtype) / 8, NULL, NULL);
}
static TE_MAYBE_UNUSED te_tensor *test_input(te_ctx *te, te_dtype dtype, int64_t m, int64_t n, const float *values, bool misaligned) {
    te_tensor *x = test_tensor(te, dtype, SHAPE(m, n), values);
    if (!misaligned) return x;
    te_tensor *moved = test__moved(te, te_tensor_empty(te, dtype, SHAPE(m * n + 1)), m, n);
    te_tensor_copy(moved, x);
    return moved;
}
static TE_MAYBE_UNUSED te_tensor *test_output(te_ctx *te, te_dtype dtype, int64_t m, int64_t n, bool misaligned) {
    return misaligned ? test__moved(te, test_guarded(te, dtype, SHAPE(m * n + 1)), m, n) : test_guarded(te, dtype, SHAPE(m, n));
}

/* Its values as f32, or its raw bytes; they last until the test ends. A tensor that cannot be read gives NaN, or zero bytes. */
static TE_MAYBE_UNUSED float *test_read(const te_tensor *x) {
    int64_t n = x ? te_tensor_numel(x) : 0;
    float *host = test_floats(n);
    for (int64_t i = 0; i < n || i == 0; i++) host[i] = NAN;
    if (!x) test_fail(__FILE__, __LINE__, "test_read of a NULL tensor");
    else if (n) te_tensor_to_f32(x, host);
    return host;
}
static TE_MAYBE_UNUSED void *test_read_bytes(const te_tensor *x) {
    size_t bytes = x ? te_tensor_bytes(x) : 0;
    void *host = test_alloc(bytes + 1);
    if (!x) test_fail(__FILE__, __LINE__, "test_read_bytes of a NULL tensor");
    else if (bytes) te_tensor_to_host(x, host);
    return host;
}
/* `values` rounded to `dtype`, as f32: the input of a reference. */
static TE_MAYBE_UNUSED float *test_rounded(te_dtype dtype, const float *values, int64_t n) {
    te_ctx_desc d = {0};
    d.device = "cpu";
    d.cpu_threads = 1;
    te_ctx *te = te_ctx_create(&d);
    float *rounded = test_read(te_tensor_from_f32(te, dtype, SHAPE(n), values));
    te_ctx_destroy(te);
    return rounded;
}

/* ---- modules ------------------------------------------------------------------------------------------------- */

/* One forward under a recipe; the region is closed again whatever happened. */
static TE_MAYBE_UNUSED te_tensor *test_forward(te_module *m, const te_recipe *recipe, te_tensor *x) {
    te_ctx *te = te_module_ctx(m);
    te_autocast_desc cast = {0};
    cast.recipe = recipe;
    if (te_autocast_begin(te, &cast) != TE_OK) return NULL;
    te_tensor *y = te_forward(m, x);
    te_autocast_end(te);
    return y;
}

/* ---- bytes of tensors and modules ---------------------------------------------------------------------------- */

typedef struct test_bytes {
    uint8_t *data;
    size_t n, room;
} test_bytes;

/* The plain tensors that x is of: itself, or data, scales and amax of both copies; NULL in the place of one that is not there. */
static TE_MAYBE_UNUSED void test__parts(te_tensor *x, te_tensor *part[6]) {
    static const int copies[] = {TE_ROWWISE, TE_COLUMNWISE};
    memset(part, 0, 6 * sizeof *part);
    if (x && !te_tensor_is_quantized(x)) part[0] = x;
    for (int i = 0; i < 2; i++) {
        if (!x || !(te_quantized_usage(x) & copies[i])) continue;
        te_quantized_view(x, copies[i], &part[3 * i], &part[3 * i + 1]);
        part[3 * i + 2] = te_quantized_amax(x, copies[i]);
    }
}
/* The bytes of x, plain or quantized, behind those that are there; of NULL none. */
static TE_MAYBE_UNUSED void test_put(test_bytes *b, te_tensor *x) {
    te_tensor *part[6];
    test__parts(x, part);
    for (int i = 0; i < 6; i++) {
        size_t n = part[i] ? te_tensor_bytes(part[i]) : 0;
        if (!n) continue;
        if (b->n + n > b->room) {
            uint8_t *more = (uint8_t *)test_alloc(2 * (b->n + n));
            if (b->n) memcpy(more, b->data, b->n);
            b->data = more;
            b->room = 2 * (b->n + n);
        }
        te_tensor_to_host(part[i], b->data + b->n);
        b->n += n;
    }
}
static TE_MAYBE_UNUSED bool test__put_entry(void *user, te_module *m, const char *path, te_tensor *x, te_entry_kind kind) {
    (void)m, (void)path, (void)kind;
    test_put((test_bytes *)user, x);
    return true;
}
/* Every parameter and buffer, one behind the other. */
static TE_MAYBE_UNUSED test_bytes test_content(te_module *m) {
    test_bytes b = {0};
    te_module_visit_tensors(m, test__put_entry, &b);
    return b;
}
#define CHECK_SAME(name, got, want) test__same(__FILE__, __LINE__, name, got, want)
static TE_MAYBE_UNUSED void test__same(const char *file, int line, const char *name, test_bytes got, test_bytes want) {
    if (got.n != want.n) test_fail(file, line, "%s: %zu bytes, not %zu", name, got.n, want.n);
    else test_bytes_equal(file, line, name, got.data, want.data, want.n);
}

static TE_MAYBE_UNUSED bool test__hash_entry(void *user, te_module *m, const char *path, te_tensor *x, te_entry_kind kind) {
    uint64_t hash = 0xCBF29CE484222325u;
    te_tensor *part[6];
    (void)m, (void)kind;
    te_scope_begin(te_tensor_ctx(x));
    test__parts(x, part);
    for (; *path; path++) hash = (hash ^ (uint8_t)*path) * 0x100000001B3u;
    for (int i = 0; i < 6; i++)
        for (size_t k = 0; part[i] && k < te_tensor_bytes(part[i]); k++) hash = (hash ^ ((const uint8_t *)te_tensor_data(part[i]))[k]) * 0x100000001B3u;
    te_scope_end(te_tensor_ctx(x));
    *(uint64_t *)user += hash;
    return true;
}
/* Of every byte of the parameters and buffers, in whatever order they were added. CPU only: it reads them where they lie, after an error too. */
static TE_MAYBE_UNUSED uint64_t test_hash(te_module *m) {
    uint64_t hash = 0;
    te_module_visit_tensors(m, test__hash_entry, &hash);
    return hash;
}

/* ---- gradients ----------------------------------------------------------------------------------------------- */

/* A differentiable computation: reads inputs, gives any tensor. Must give the same again (te_rng_set inside, if it draws). */
typedef te_tensor *(*test_function)(te_ctx *te, te_tensor *const *inputs, void *user);

static TE_MAYBE_UNUSED double test__weighted(te_ctx *te, test_function f, te_tensor *const *inputs, void *user, const float *weights) {
    double sum = 0;
    te_scope_begin(te);
    te_no_grad_begin(te);
    te_tensor *y = f(te, inputs, user);
    const float *host = test_read(y);
    for (int64_t i = 0; y && i < te_tensor_numel(y); i++) sum += (double)host[i] * weights[i];
    te_no_grad_end(te);
    te_scope_end(te);
    return sum;
}

/* The tape's gradients of a fixed random mix of the outputs against central differences, at some elements of every input (f32,
 * contiguous). |tape - difference| <= atol + rtol * |difference|; differences in f32 are good for about 1e-2 and 1e-3. */
static TE_MAYBE_UNUSED void test_check_gradients(te_ctx *te, test_function f, int num_inputs, te_tensor *const *inputs, void *user,
                                                 double rtol, double atol) {
    enum { ELEMENTS = 12 };
    for (int i = 0; i < num_inputs; i++) te_tensor_set_requires_grad(inputs[i], true), te_tensor_zero_grad(inputs[i]);
    te_tensor *y = f(te, inputs, user);
    REQUIRE_OK(te);
    REQUIRE(y != NULL);
    const float *weights = test_normal(te_tensor_numel(y), 77);
    te_backward_from(y, test_tensor(te, te_tensor_dtype(y), te_tensor_ndim(y), te_tensor_shape(y), weights));
    REQUIRE_OK(te);
    for (int i = 0; i < num_inputs; i++) {
        int64_t n = te_tensor_numel(inputs[i]);
        CHECK_MSG(te_tensor_grad(inputs[i]), "input %d has no gradient", i);
        if (!te_tensor_grad(inputs[i])) continue;
        const float *tape = test_read(te_tensor_grad(inputs[i])), *value = test_read(inputs[i]);
        const int elements = ELEMENTS / test_every_sanitized(2);
        const int64_t *picks = n ? test_integers(ELEMENTS, 5 + (uint64_t)i, 0, n) : NULL;
        for (int k = 0; k < elements && k < n; k++) {
            int64_t at = n <= ELEMENTS ? k : picks[k];
            float *moved = test_copy(value, n);
            double step = 1e-2 * fmax(1, fabs((double)value[at])), side[2];
            volatile float up = (float)(value[at] + step), down = (float)(value[at] - step);
            moved[at] = up;
            te_tensor_copy_from_host(inputs[i], moved);
            side[0] = test__weighted(te, f, inputs, user, weights);
            moved[at] = down;
            te_tensor_copy_from_host(inputs[i], moved);
            side[1] = test__weighted(te, f, inputs, user, weights);
            double difference = (side[0] - side[1]) / ((double)up - down);
            CHECK_MSG(fabs(tape[at] - difference) <= atol + rtol * fabs(difference),
                      "input %d [%lld]: the tape says %.6g, central differences %.6g", i, (long long)at, (double)tape[at], difference);
        }
        te_tensor_copy_from_host(inputs[i], value);
    }
    CHECK_OK(te);
}

#endif /* TE_TEST_H_INCLUDED */
