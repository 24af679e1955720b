/* tests/sys/test_sys.c: threads, time, environment, shared libraries, the search for NVIDIA's libraries, and te.h's oldest enemy:
 * being included behind <stdio.h> under a strict -std. */
#include "../te_test.h"
#include "base/common.h"
#include "base/hash.c"
#include "base/text.c"
#include "sys/sys.c"
#include "sys/file.c"
#include "sys/libs.c"

enum { THREADS = 8, ROUNDS = 10000 };

typedef struct shared {
    te__mutex mutex;
    te__cond cond;
    TE__ALIGNED(8) int64_t atomic;
    int64_t guarded;
    int waiting;
    bool go;
} shared;

static void worker(void *user) {
    shared *s = (shared *)user;
    te__mutex_lock(&s->mutex);
    s->waiting++;
    te__cond_broadcast(&s->cond);
    while (!s->go) te__cond_wait(&s->cond, &s->mutex);
    te__mutex_unlock(&s->mutex);
    for (int i = 0; i < ROUNDS; i++) {
        te__atomic_add(&s->atomic, 2);
        te__mutex_lock(&s->mutex);
        s->guarded++;
        te__mutex_unlock(&s->mutex);
    }
}

TE_TEST(threads) {
    shared s = TE_ZERO;
    te__mutex_init(&s.mutex);
    te__cond_init(&s.cond);
    te__thread thread[THREADS];
    for (int i = 0; i < THREADS; i++) REQUIRE(te__thread_start(&thread[i], worker, &s));
    te__mutex_lock(&s.mutex);
    while (s.waiting < THREADS) te__cond_wait(&s.cond, &s.mutex);
    s.go = true;
    te__cond_broadcast(&s.cond);
    te__mutex_unlock(&s.mutex);
    for (int i = 0; i < THREADS; i++) te__thread_join(&thread[i]);
    CHECK_EQ_INT(te__atomic_load(&s.atomic), 2 * THREADS * ROUNDS);
    CHECK_EQ_INT(s.guarded, THREADS * ROUNDS);
    te__atomic_store(&s.atomic, 5);
    CHECK(te__atomic_add(&s.atomic, -1) == 5 && s.atomic == 4);
    te__cond_free(&s.cond);
    te__mutex_free(&s.mutex);
}

static te__once once = TE__ONCE_INIT;
TE__ALIGNED(8) static int64_t once_count;
static void count_once(void) {
    te__sleep(0.01); /* others arrive meanwhile, and wait */
    te__atomic_add(&once_count, 1);
}
static void run_once(void *seen) {
    te__once_run(&once, count_once);
    *(int64_t *)seen = te__atomic_load(&once_count);
}

TE_TEST(once_runs_once) {
    static te__mutex mutex = TE__MUTEX_INIT;
    static te__cond cond = TE__COND_INIT;
    te__mutex_lock(&mutex);
    te__cond_signal(&cond);
    te__mutex_unlock(&mutex);
    te__thread thread[4];
    int64_t seen[4] = {0};
    for (int i = 0; i < 4; i++) REQUIRE(te__thread_start(&thread[i], run_once, &seen[i]));
    for (int i = 0; i < 4; i++) te__thread_join(&thread[i]);
    for (int i = 0; i < 4; i++) CHECK_EQ_INT(seen[i], 1);
}

TE_TEST(time_and_machine) {
    double start = te__time_now();
    te__sleep(0.02);
    double passed = te__time_now() - start;
    CHECK_MSG(passed >= 0.0199 && passed < 5, "20 ms took %g s", passed);
    te__sleep(-1);
    CHECK(te__cpu_count() >= 1 && te__cpu_count() < 65536);
    CHECK(te__page_size() >= 4096 && (te__page_size() & (te__page_size() - 1)) == 0);
    CHECK(te__process_id() == (int64_t)getpid() && te__user_id() == (int64_t)getuid());
    test_setenv("TE_TEST_VARIABLE", "");
    CHECK(te__env("TE_TEST_VARIABLE") == NULL);
    test_setenv("TE_TEST_VARIABLE", "x");
    CHECK_STR(te__env("TE_TEST_VARIABLE"), "x");
    test_setenv("TE_TEST_VARIABLE", NULL);
    CHECK(te__env("TE_TEST_VARIABLE") == NULL);
}

/* Compiles `source` with the machine's C compiler. False if it has none. */
static bool have_compiler(void) { return system(TEST_CC " --version >/dev/null 2>&1") == 0; }
static bool compile(const char *flags, const char *source, const char *output) {
    te__text command = TE_ZERO;
    te__file_write_atomic(test_path("source.c"), source, strlen(source), NULL);
    te__text_printf(&command, TEST_CC " %s -o '%s' '%s' -lm -pthread -ldl 2>'%s'", flags, output, test_path("source.c"), test_path("errors"));
    bool fine = system(command.s) == 0;
    if (!fine) {
        te__text errors = TE_ZERO;
        te__file_read(test_path("errors"), 1 << 20, &errors, NULL);
        test_fail(__FILE__, __LINE__, "%s: %.1000s", command.s, te__text_str(&errors));
        te__text_free(&errors);
    }
    te__text_free(&command);
    return fine;
}

TE_TEST(shared_library) {
    if (!have_compiler()) SKIP("no C compiler to make a library with");
    const char *path = test_path("libanswer.so");
    if (!compile("-shared -fPIC", "int answer(void) { return 42; }\n", path)) return;
    te__text why = TE_ZERO;
    char found[1024];
    void *library = te__dl_open(path, &why);
    REQUIRE(library && why.n == 0);
    int (*answer)(void) = NULL;
    REQUIRE(te__dl_function(library, "answer", (void *)&answer));
    CHECK_EQ_INT(answer(), 42);
    CHECK(!te__dl_sym(library, "question"));
    CHECK(te__dl_path(library, "answer", found, sizeof found) && strcmp(found, path) == 0);
    CHECK(!te__dl_path(library, "answer", found, 4) && !te__dl_path(library, "question", found, sizeof found));
    te__dl_close(library);
    te__dl_close(NULL);
    CHECK(!te__dl_open(test_path("missing.so"), &why) && !te__dl_open(test_path("missing.so"), NULL));
    CHECK_STR(te__text_str(&why), "missing.so");
    te__text_free(&why);
}

static const char fake_nvrtc[] = "int nvrtcVersion(int *major, int *minor) { *major = MAJOR; *minor = 4; return 0; }\n";

TE_TEST(library_search) {
    if (!have_compiler()) SKIP("no C compiler to make libraries with");
    te__lib lib;
    te__text tried = TE_ZERO;
    /* a name of which the variable alone decides */
    test_setenv("TE_NVRTC_PATH", test_path("missing"));
    CHECK(!te__lib_open(TE__LIB_NVRTC, &lib, &tried) && !lib.handle && !te__lib_open(TE__LIB_NVRTC, &lib, NULL));
    CHECK_STR(te__text_str(&tried), "TE_NVRTC_PATH is set");
    CHECK_STR(te__text_str(&tried), "missing: cannot open");
    /* a folder, and a library that is too new */
    te__text_clear(&tried);
    te__dir_make(test_path("folder"), NULL);
    test_setenv("TE_NVRTC_PATH", test_path("folder"));
    CHECK(!te__lib_open(TE__LIB_NVRTC, &lib, &tried));
    CHECK_STR(te__text_str(&tried), "folder: holds no libnvrtc");
    if (!compile("-shared -fPIC -DMAJOR=13", fake_nvrtc, test_path("folder/libnvrtc.so.13"))) return;
    te__text_clear(&tried);
    CHECK(!te__lib_open_at_most(TE__LIB_NVRTC, 12, &lib, &tried));
    CHECK_STR(te__text_str(&tried), "it is of CUDA 13.4, and the driver takes code of CUDA 12 at most");
    CHECK(te__lib_open_at_most(TE__LIB_NVRTC, 13, &lib, &tried));
    CHECK_STR(lib.path, "folder/libnvrtc.so.13");
    te__dl_close(lib.handle);
    /* a library of another kind under the right name */
    test_setenv("TE_NCCL_PATH", test_path("folder/libnvrtc.so.13"));
    te__text_clear(&tried);
    CHECK(!te__lib_open(TE__LIB_NCCL, &lib, &tried));
    CHECK_STR(te__text_str(&tried), "it has no ncclGetVersion");
    test_setenv("TE_NCCL_PATH", NULL);
    test_setenv("TE_NVRTC_PATH", NULL);
    te__text_free(&tried);
}

/* A virtual environment as pip leaves it. Only this part of the search is run: the others would open what this machine has. */
TE_TEST(library_search_in_python) {
    if (!have_compiler()) SKIP("no C compiler to make libraries with");
    te__dir_make(test_path("venv/lib/python3.11/site-packages/nvidia/cuda_nvrtc/lib"), NULL);
    te__dir_make(test_path("venv/lib/python3.11/site-packages/nvidia/cublas/lib"), NULL);
    if (!compile("-shared -fPIC -DMAJOR=10", fake_nvrtc, test_path("venv/lib/python3.11/site-packages/nvidia/cuda_nvrtc/lib/libnvrtc.so.12"))) return;
    if (!compile("-shared -fPIC", "int b;\n", test_path("venv/lib/python3.11/site-packages/nvidia/cuda_nvrtc/lib/libnvrtc-builtins.so.12.4"))) return;
    te__text bin = TE_ZERO;
    te__text_printf(&bin, "/nowhere::%s", test_path("venv/bin"));
    for (int way = 0; way < 2; way++) {
        test_setenv("VIRTUAL_ENV", way == 0 ? test_path("venv") : NULL);
        test_setenv("PATH", way == 1 ? bin.s : "/nowhere");
        te__lib lib = TE_ZERO;
        te__text tried = TE_ZERO;
        te__lib_search search = TE_ZERO;
        search.spec = &te__lib_specs[TE__LIB_NVRTC];
        search.out = &lib;
        search.tried = &tried;
        CHECK_MSG(te__lib_search_python(&search), "way %d:\n%s", way, te__text_str(&tried));
        te__text_free(&search.dirs);
        te__text_free(&tried);
        if (!lib.handle) continue;
        CHECK_STR(lib.path, "site-packages/nvidia/cuda_nvrtc/lib/libnvrtc.so.12");
        te__text maps = TE_ZERO;
        FILE *f = fopen("/proc/self/maps", "r");
        char line[2048];
        while (f && fgets(line, sizeof line, f)) te__text_put(&maps, line);
        if (f) {
            fclose(f);
            CHECK(strstr(te__text_str(&maps), "libnvrtc-builtins.so.12.4") != NULL);
        }
        te__text_free(&maps);
        te__dl_close(lib.handle);
    }
    te__text_free(&bin);
}

/* Under -std=c11 the C library hides what is not ISO C, and when a program includes <stdio.h> first no macro of te.h's can change that. */
TE_TEST(strict_iso_c) {
    static const char program[] =
        "#include <stdio.h>\n"
        "#include \"api/enums.h\"\n#include \"api/base.h\"\n#include \"api/context.h\"\n"
        "#include \"base/common.h\"\n#include \"base/numbers.h\"\n#include \"base/philox.h\"\n#include \"base/hash.c\"\n#include \"base/lz.c\"\n"
        "#include \"base/text.c\"\n#include \"sys/sys.c\"\n#include \"sys/file.c\"\n#include \"sys/libs.c\"\n"
        "int main(int argc, char **argv) {\n"
        "    te__text t = TE_ZERO;\n"
        "    te__lock lock;\n"
        "    bool ok = argc == 2 && te__time_now() > 0 && te__file_write_atomic(argv[1], \"abc\", 3, NULL) &&\n"
        "              te__file_read(argv[1], 3, &t, NULL) && t.n == 3 && te__lock_acquire(&lock, argv[1], NULL);\n"
        "    te__sleep(1e-3);\n"
        "    te__text_free(&t);\n"
        "    return ok ? 0 : 1;\n"
        "}\n";
    static const char *const standards[4] = {"-std=c11", "-std=c11 -D_GNU_SOURCE", "-std=c17 -D_POSIX_C_SOURCE=200112L", "-std=gnu11"};
    if (!have_compiler()) SKIP("no C compiler");
    te__text src = TE_ZERO;
    te__text_add(&src, __FILE__, te__path_dir_length(__FILE__));
    te__text_put(&src, src.n ? "/../../src" : "../../src");
    if (!te__dir_exists(src.s)) SKIP("the sources are not where they were compiled");
    for (int i = 0; i < COUNT(standards); i++) {
        te__text flags = TE_ZERO, command = TE_ZERO;
        te__text_printf(&flags, "%s -Wall -Wextra -Wpedantic -Werror '-I%s'", standards[i], src.s);
        te__text_printf(&command, "'%s' '%s'", test_path("program"), test_path("file"));
        if (compile(flags.s, program, test_path("program"))) CHECK_MSG(system(command.s) == 0, "%s: it does not work", standards[i]);
        te__text_free(&flags);
        te__text_free(&command);
    }
    te__text_free(&src);
}

TE_TEST(static_without_implementation_is_one_sentence) {
    const char *source = test_path("one.c"), *log = test_path("log");
#ifdef TE_TEST_PACKED
    const char *header = "te.h";
#else
    const char *header = "te_parts.h";
#endif
    char command[1024], line[1024];
    int lines = 0, errors = 0, said = 0;
    if (system("cc --version >/dev/null 2>&1")) SKIP("no compiler named cc");
    FILE *f = fopen(source, "w");
    REQUIRE(f != NULL);
    fprintf(f, "#define TE_STATIC\n#include \"%s\"\nint main(void) { return 0; }\n", header);
    fclose(f);
    snprintf(command, sizeof command, "cc -Wall -Wextra -I. -Isrc -fsyntax-only %s 2>%s", source, log);
    CHECK(system(command) != 0);
    f = fopen(log, "r");
    REQUIRE(f != NULL);
    while (fgets(line, sizeof line, f)) {
        lines++;
        if (strstr(line, "error:")) errors++;
        if (strstr(line, "warning:")) test_fail(__FILE__, __LINE__, "%s", line);
        if (strstr(line, "TE_STATIC makes te.h's functions private to this file: define TE_IMPLEMENTATION, too")) said++;
    }
    fclose(f);
    CHECK_EQ_INT(errors, 1);
    CHECK(said >= 1 && lines < 12);
}
