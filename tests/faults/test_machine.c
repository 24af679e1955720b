/* tests/faults/test_machine.c: a machine that lets us down: no driver, an old one, a broken one; the same of NVRTC; a cache folder and a disk
 * that cannot be written; processes that get in each other's way. The driver and NVRTC are made here, by the machine's C compiler: they do
 * nothing, but they are opened, asked and cached like the real ones. */
#define _GNU_SOURCE
#define TE_STATIC
#define TE_IMPLEMENTATION
#include "model.h"

#include <signal.h>
#include <sys/wait.h>

/* ---- libraries of straw ---------------------------------------------------------------------------------------- */

typedef struct fake_function {
    const char *symbol, *body; /* arguments and what they get; functions that are not here return 0 */
} fake_function;

static const fake_function cuda_functions[] = {
    {"cuInit", "(unsigned flags) { return INIT; }"},
    {"cuDriverGetVersion", "(int *version) { *version = VERSION; return 0; }"},
    {"cuGetErrorName", "(int code, const char **text) { *text = code == 100 ? \"CUDA_ERROR_NO_DEVICE\" : \"CUDA_ERROR_OF_STRAW\"; return 0; }"},
    {"cuGetErrorString", "(int code, const char **text) { *text = code == 100 ? \"no CUDA-capable device is detected\" : \"some words\"; return 0; }"},
    {"cuDeviceGetCount", "(int *count) { *count = DEVICES; return 0; }"},
    {"cuDeviceGet", "(int *device, int number) { *device = number; return 0; }"},
    {"cuDeviceGetP2PAttribute", "(int *value, int what, int a, int b) { *value = what == 2 ? a + b < 3 : what == 3 && a + b == 1; return 0; }"},
    {"cuDeviceGetAttribute", "(int *value, int what, int device) { *value = what == 75 ? 9 : what == 76 ? 0 : what == 16 ? 132 : 232448; return 0; }"},
    {"cuDevicePrimaryCtxRetain", "(void **context, int device) { *context = &held; return 0; }"},
    {"cuCtxGetCurrent", "(void **context) { *context = current; return 0; }"},
    {"cuCtxPushCurrent_v2", "(void *context) { current = context; return 0; }"},
    {"cuCtxPopCurrent_v2", "(void **context) { *context = current; current = 0; return 0; }"},
    {"cuMemAlloc_v2", "(unsigned long long *address, size_t bytes) {\n"
                      "    size_t *p = held + bytes > ROOM ? 0 : malloc(bytes + 256);\n"
                      "    if (!p) return 2;\n"
                      "    held += *p = bytes;\n"
                      "    *address = (unsigned long long)p + 256;\n"
                      "    return 0;\n"
                      "}"},
    {"cuMemFree_v2", "(unsigned long long address) { size_t *p = (size_t *)(address - 256); held -= *p; free(p); return 0; }"},
    {"cuMemGetInfo_v2", "(size_t *unused, size_t *total) { *unused = ROOM - held; *total = ROOM; return 0; }"},
    {"cuMemHostAlloc", "(void **host, size_t bytes, unsigned flags) { *host = malloc(bytes); return 0; }"},
    {"cuMemFreeHost", "(void *host) { free(host); return 0; }"},
    {"cuMemcpyHtoDAsync_v2", "(unsigned long long dst, const void *src, size_t bytes) { memcpy((void *)dst, src, bytes); return 0; }"},
    {"cuMemcpyDtoHAsync_v2", "(void *dst, unsigned long long src, size_t bytes) { memcpy(dst, (void *)src, bytes); return 0; }"},
    {"cuMemsetD8Async", "(unsigned long long dst, unsigned char value, size_t bytes) { memset((void *)dst, value, bytes); return 0; }"},
    {"cuStreamCreate", "(void **stream, unsigned flags) { *stream = &current; return 0; }"},
    {"cuStreamCreateWithPriority", "(void **stream, unsigned flags, int priority) { *stream = &current; return 0; }"},
    {"cuModuleLoadDataEx", "(void **module, const char *image) { *module = malloc(1); return strncmp(image, \"straw\", 5) && strncmp(image, \".version\", 8) ? 200 : 0; }"},
    {"cuModuleUnload", "(void *module) { free(module); return 0; }"},
    {"cuModuleGetFunction", "(void **function, void *module, const char *name) { *function = module; return 0; }"},
};

/* A line for each compilation goes to $STRAW_LOG; $STRAW_SLEEP microseconds are slept, so that others come meanwhile. */
static const fake_function nvrtc_functions[] = {
    {"nvrtcVersion", "(int *major, int *minor) { *major = MAJOR; *minor = 4; return 0; }"},
    {"nvrtcGetErrorString", "(int code) { return \"STRAW_ERROR\"; }"},
    {"nvrtcGetNumSupportedArchs", "(int *count) { *count = 3; return 0; }"},
    {"nvrtcGetSupportedArchs", "(int *archs) { archs[0] = 80; archs[1] = 90; archs[2] = 120; return 0; }"},
    {"nvrtcCompileProgram", "(void *program, int n, const char *const *options) {\n"
                            "    FILE *f = getenv(\"STRAW_LOG\") ? fopen(getenv(\"STRAW_LOG\"), \"a\") : 0;\n"
                            "    if (f) fputs(\"compiled\\n\", f), fclose(f);\n"
                            "    if (getenv(\"STRAW_SLEEP\")) usleep(atoi(getenv(\"STRAW_SLEEP\")));\n"
                            "    return CODE;\n"
                            "}"},
    {"nvrtcGetCUBINSize", "(void *program, size_t *size) { *size = 64; return 0; }"},
    {"nvrtcGetCUBIN", "(void *program, char *cubin) { memset(cubin, 1, 64); memcpy(cubin, \"straw\", 5); return 0; }"},
    {"nvrtcGetProgramLogSize", "(void *program, size_t *size) { *size = CODE ? 40 : 1; return 0; }"},
    {"nvrtcGetProgramLog", "(void *program, char *log) { strcpy(log, CODE ? \"fill.cu(3): error: bad luck\" : \"\"); return 0; }"},
};

static void add_function(te__text *source, const char *type, const char *symbol, const fake_function *known, int num_known, const char *without) {
    const char *body = "() { return 0; }";
    if (without && strcmp(symbol, without) == 0) return;
    for (int i = 0; i < num_known; i++)
        if (strcmp(known[i].symbol, symbol) == 0) body = known[i].body;
    te__text_printf(source, "%s %s%s\n", type, symbol, body);
}

/* Makes a library; false if this machine has no C compiler. */
static bool build(const char *path, const char *flags, const te__text *source) {
    te__text command = TE_ZERO;
    FILE *f = fopen(test_path("straw.c"), "w");
    bool made = f && fputs(te__text_str(source), f) >= 0;
    if (f) fclose(f);
    te__text_printf(&command, TEST_CC " -w -shared -fPIC %s -o '%s' '%s' 2>'%s'", flags, path, test_path("straw.c"), test_path("straw.log"));
    made = made && system(te__text_str(&command)) == 0;
    te__text_free(&command);
    return made;
}

static const char head[] = "#include <stdio.h>\n#include <stdlib.h>\n#include <string.h>\n#include <unistd.h>\nstatic void *current;\nstatic size_t held;\n"
                           "#ifndef INIT\n#define INIT 0\n#endif\n#ifndef VERSION\n#define VERSION 12040\n#endif\n#ifndef ROOM\n#define ROOM ((size_t)1 << 30)\n#endif\n"
                           "#ifndef MAJOR\n#define MAJOR 12\n#endif\n#ifndef CODE\n#define CODE 0\n#endif\n#ifndef DEVICES\n#define DEVICES 1\n#endif\n";

/* libcuda or libnvrtc, without one function or (NULL) whole. */
static bool build_cuda(const char *path, const char *flags, const char *without) {
    te__text source = TE_ZERO;
    te__text_put(&source, head);
#define ADD(must, name, symbol, args) add_function(&source, "int", symbol, cuda_functions, COUNT(cuda_functions), without);
    TE__CU_LIST(ADD)
#undef ADD
    bool made = build(path, flags, &source);
    te__text_free(&source);
    return made;
}
static bool build_nvrtc(const char *path, const char *flags, const char *without) {
    te__text source = TE_ZERO;
    te__text_printf(&source, "%stypedef int te__nvrtc_result;\n", head);
#define ADD(name, symbol, type, args) add_function(&source, #type, symbol, nvrtc_functions, COUNT(nvrtc_functions), without);
    TE__NVRTC_LIST(ADD)
#undef ADD
    bool made = build(path, flags, &source);
    te__text_free(&source);
    return made;
}

/* This process has never looked for either. */
static void forget_libraries(void *arg) {
    (void)arg;
    te__dl_close(te__cu.lib.handle);
    memset(&te__cu, 0, sizeof te__cu);
    if (te__nvrtc_state > 0) te__dl_close(te__nvrtc_of_process.lib.handle);
    memset(&te__nvrtc_of_process, 0, sizeof te__nvrtc_of_process);
    te__nvrtc_state = 0;
    te__text_free(&te__nvrtc_reason);
}
static void use_libraries(const char *cuda, const char *nvrtc) {
    static const char *const variables[] = {"TE_CACHE_READONLY", "TE_DEBUG_SYNC", "TE_DEVICE", "TE_LOG", "TE_KERNELS_FILE", "STRAW_LOG", "STRAW_SLEEP"};
    test_on_end(forget_libraries, NULL);
    forget_libraries(NULL);
    test_setenv("TE_LIBCUDA_PATH", cuda);
    test_setenv("TE_NVRTC_PATH", nvrtc);
    test_setenv("TE_CACHE_DIR", test_path("cache"));
    for (int i = 0; i < COUNT(variables); i++) test_setenv(variables[i], NULL);
}
/* A GPU of straw, and a compiler for it. */
static bool make_gpu(void) {
    if (!build_cuda(test_path("libcuda.so.1"), "", NULL) || !build_nvrtc(test_path("libnvrtc.so.12"), "", NULL)) return false;
    use_libraries(test_path("libcuda.so.1"), test_path("libnvrtc.so.12"));
    return true;
}
static const char no_compiler[] = "no C compiler to make a driver with";

static te_ctx *open_device(const char *device, te_log_level level) {
    te_ctx_desc desc = TE_ZERO;
    desc.device = device;
    desc.log = test__log;
    desc.log_level = level;
    desc.cpu_threads = 1;
    return te_ctx_create(&desc);
}

/* The context, if it is one, does what a CPU does. */
static void must_work(te_ctx *te) {
    te_scope_begin(te);
    CHECK(te_tensor_item(te_sum_all(te_tensor_full(te, TE_F32, SHAPE(3), 7))) == 21);
    te_scope_end(te);
    CHECK_OK(te);
}

/* Asked for cuda:0, te.h complains, in these words, and goes on on the CPU when the error is cleared; asked for nothing, it takes the CPU
 * and leaves a note for those who log everything. */
static void no_gpu_because(te_result code, const char *a, const char *b) {
    te_ctx *te = open_device("cuda:0", TE_LOG_WARN);
    CHECK_STR(te_error(te), "te_ctx_create: device \"cuda:0\": ");
    CHECK_STR(te_error(te), "te.h runs on the CPU until then: te_ctx_desc.device = \"cpu\"");
    CHECK_STR(te_error(te), b);
    CHECK_ERROR(te, code, a);
    CHECK(!te_ctx_is_cuda(te) && strcmp(te_ctx_device(te), "cpu") == 0);
    must_work(te);
    te_ctx_destroy(te);
    CHECK_MSG(strlen(test_log_text()) == 0, "an error is not for the log: %s", test_log_text());
    te = open_device(NULL, TE_LOG_WARN);
    CHECK(te_ok(te) && !te_ctx_is_cuda(te));
    must_work(te);
    te_ctx_destroy(te);
    CHECK_MSG(strlen(test_log_text()) == 0, "nobody asked for a GPU: %s", test_log_text());
    te = open_device(NULL, TE_LOG_INFO);
    CHECK_STR(test_log_text(), "no GPU, running on the CPU: ");
    CHECK_STR(test_log_text(), a);
    char report[4096];
    te_report(te, report, sizeof report);
    CHECK_STR(report, "driver: none. ");
    CHECK_STR(report, a);
    te_ctx_destroy(te);
}

/* ---- the driver ------------------------------------------------------------------------------------------------ */

TE_TEST(driver_missing) {
    use_libraries(test_path("nowhere/libcuda.so.1"), test_path("nowhere"));
    no_gpu_because(TE_ERR_LIBRARY, "nowhere/libcuda.so.1: cannot open shared object file", "Install the driver");
}
TE_TEST(driver_folder_is_empty) {
    use_libraries(test_dir(), test_dir());
    no_gpu_because(TE_ERR_LIBRARY, ": holds no libcuda", "(TE_LIBCUDA_PATH is set, so that nothing else is tried)");
}
TE_TEST(driver_is_no_library) {
    FILE *f = fopen(test_path("libcuda.so.1"), "w");
    REQUIRE(f && fputs("I am not a library, whatever my name says, and I am long enough to have a header.\n", f) > 0 && fclose(f) == 0);
    use_libraries(test_dir(), test_path("nowhere"));
    no_gpu_because(TE_ERR_LIBRARY, "libcuda.so.1: invalid ELF header", "could not be opened");
}
TE_TEST(driver_of_another_kind) {
    if (!build_nvrtc(test_path("libcuda.so.1"), "", NULL)) SKIP(no_compiler);
    use_libraries(test_path("libcuda.so.1"), NULL);
    no_gpu_because(TE_ERR_LIBRARY, "libcuda.so.1: it has no cuInit", "Install the driver");
}
TE_TEST(driver_too_old) {
    if (!build_cuda(test_path("libcuda.so.1"), "-DVERSION=11040", NULL)) SKIP(no_compiler);
    use_libraries(test_path("libcuda.so.1"), NULL);
    no_gpu_because(TE_ERR_LIBRARY, "the NVIDIA driver is for CUDA 11.4, te.h needs 12.0 (driver 525)", "Update it");
}
TE_TEST(driver_lacks_a_function) {
    if (!build_cuda(test_path("libcuda.so.1"), "", "cuMemcpyHtoDAsync_v2")) SKIP(no_compiler);
    use_libraries(test_path("libcuda.so.1"), NULL);
    no_gpu_because(TE_ERR_LIBRARY, "libcuda.so.1 has no cuMemcpyHtoDAsync_v2: the driver is older than CUDA 12.0 (driver 525)", "Update it");
}
TE_TEST(driver_sees_no_gpu) {
    if (!build_cuda(test_path("libcuda.so.1"), "-DINIT=100", NULL)) SKIP(no_compiler);
    use_libraries(test_path("libcuda.so.1"), NULL);
    no_gpu_because(TE_ERR_DEVICE, "cuInit: CUDA_ERROR_NO_DEVICE: no CUDA-capable device is detected", "No GPU is visible to this process (CUDA_VISIBLE_DEVICES");
}
TE_TEST(driver_is_out_of_order) {
    if (!build_cuda(test_path("libcuda.so.1"), "-DINIT=999", NULL)) SKIP(no_compiler);
    use_libraries(test_path("libcuda.so.1"), NULL);
    no_gpu_because(TE_ERR_DEVICE, "cuInit: CUDA_ERROR_OF_STRAW: some words", "See whether nvidia-smi works");
}
/* A failure is not kept: once the driver is there, the next context finds it. */
TE_TEST(driver_comes_later) {
    if (!make_gpu()) SKIP(no_compiler);
    test_setenv("TE_LIBCUDA_PATH", test_path("nowhere"));
    te_ctx *te = open_device("cuda:0", TE_LOG_WARN);
    CHECK(te_error_code(te) == TE_ERR_LIBRARY);
    te_ctx_destroy(te);
    test_setenv("TE_LIBCUDA_PATH", test_path("libcuda.so.1"));
    te = open_device(NULL, TE_LOG_WARN);
    CHECK(te_ok(te) && te_ctx_is_cuda(te) && te_ctx_sm(te) == 90);
    te_ctx_destroy(te);
}

/* Of three GPUs, 0 and 1 are linked, 0 and 2 reach each other over the bus, and 1 and 2 do not. */
TE_TEST(report_of_peers) {
    char report[4096];
    if (!build_cuda(test_path("libcuda.so.1"), "-DDEVICES=3", NULL)) SKIP(no_compiler);
    use_libraries(test_path("libcuda.so.1"), test_path("nowhere"));
    te_report(NULL, report, sizeof report);
    CHECK_STR(report, "peers of cuda:0: 2 access; 1 access and native atomics (NVLink);\n");
    CHECK_STR(report, "peers of cuda:1: 2 no access; 0 access and native atomics (NVLink);\n");
    CHECK_STR(report, "peers of cuda:2: 1 no access; 0 access;\n");
    if (!build_cuda(test_path("libcuda.so.1"), "-DDEVICES=3", "cuDeviceGetP2PAttribute")) SKIP(no_compiler);
    use_libraries(test_path("libcuda.so.1"), test_path("nowhere"));
    te_report(NULL, report, sizeof report);
    CHECK(strstr(report, "cuda:2: ") && !strstr(report, "peers"));
    if (!build_cuda(test_path("libcuda.so.1"), "", NULL)) SKIP(no_compiler);
    use_libraries(test_path("libcuda.so.1"), test_path("nowhere"));
    te_report(NULL, report, sizeof report);
    CHECK(strstr(report, "cuda:0: ") && !strstr(report, "peers"));
}

enum { MiB = 1 << 20 };

TE_TEST(gpu_memory_runs_out) {
    if (!build_cuda(test_path("libcuda.so.1"), "-DROOM=33554432", NULL) || !build_nvrtc(test_path("libnvrtc.so.12"), "", NULL)) SKIP(no_compiler);
    use_libraries(test_path("libcuda.so.1"), test_path("libnvrtc.so.12"));
    te_ctx *te = open_device("cuda:0", TE_LOG_WARN);
    te_scope_begin(te);
    te_tensor *kept = te_tensor_zeros(te, TE_U8, SHAPE(10 * MiB)), *more = te_tensor_zeros(te, TE_U8, SHAPE(6 * MiB));
    CHECK(kept && more);
    CHECK(!te_tensor_zeros(te, TE_U8, SHAPE(24 * MiB)));
    CHECK(!te_tensor_zeros(te, TE_U8, SHAPE(25 * MiB)) && te_tensor_narrow(kept, 0, 0, 5));
    CHECK_ERROR(te, TE_ERR_OUT_OF_MEMORY, "cuda:0: out of memory: 24.0 MiB asked for, 16.0 MiB free of 32.0 MiB, 16.0 MiB held by live tensors of this context. A smaller");
    te_memory_stats stats = te_memory_get_stats(te);
    CHECK(stats.allocated == 16 * MiB && stats.device_free == 16 * MiB - 4352 && stats.device_total == 32 * MiB); /* 4352: the counters of the context, 256 bytes and 1024 words */
    CHECK(te_tensor_zeros(te, TE_U8, SHAPE(8 * MiB)) != NULL); /* this fits */
    te_scope_end(te);
    te_scope_begin(te);
    CHECK(te_tensor_zeros(te, TE_U8, SHAPE(28 * MiB)) != NULL); /* and this, once the pool has given back what it keeps */
    CHECK_OK(te);
    te_scope_end(te);
    te_ctx_destroy(te);
}

/* ---- NVRTC ----------------------------------------------------------------------------------------------------- */

enum { KERNELS = 3 };
/* Calls that need so many kernels, each of another family's file. */
static void use_kernels(te_ctx *te) {
    te_scope_begin(te);
    te_tensor *x = te_tensor_full(te, TE_F32, SHAPE(5), 1);
    te_scale(x, 2);
    te_activate(x, TE_GELU, NULL);
    te_scope_end(te);
}

/* Without a compiler, embedded PTX runs; where there is none, the first operation says what was tried. */
static void no_nvrtc_because(const char *a, const char *b) {
    te_ctx *te = open_device("cuda:0", TE_LOG_WARN);
    REQUIRE_OK(te);
    use_kernels(te);
    if (te__num_baselines > 0) {
        CHECK_OK(te);
        CHECK_EQ_INT(te_jit_get_stats(te).from_ptx, KERNELS);
        CHECK_EQ_INT(te_jit_get_stats(te).compiled, 0);
    } else {
        CHECK_STR(te_error(te), "is neither in a cache nor embedded as PTX, and ");
        CHECK_STR(te_error(te), b);
        CHECK_ERROR(te, TE_ERR_LIBRARY, a);
    }
    char report[4096];
    te_report(te, report, sizeof report);
    CHECK_STR(report, "compiler: none. ");
    CHECK_STR(report, a);
    CHECK_STR(report, b);
    CHECK_STR(report, "pip install nvidia-cuda-nvrtc-cu12");
    te_ctx_destroy(te);
}

TE_TEST(nvrtc_missing) {
    if (!make_gpu()) SKIP(no_compiler);
    test_setenv("TE_NVRTC_PATH", test_path("nowhere/libnvrtc.so"));
    no_nvrtc_because("the kernel compiler libnvrtc could not be opened", "nowhere/libnvrtc.so: cannot open shared object file");
}
TE_TEST(nvrtc_folder_is_empty) {
    if (!make_gpu()) SKIP(no_compiler);
    REQUIRE(mkdir(test_path("empty"), 0700) == 0);
    test_setenv("TE_NVRTC_PATH", test_path("empty"));
    no_nvrtc_because("the kernel compiler libnvrtc could not be opened", "empty: holds no libnvrtc");
}
TE_TEST(nvrtc_too_old) {
    if (!make_gpu() || !build_nvrtc(test_path("old.so"), "-DMAJOR=11", NULL)) SKIP(no_compiler);
    test_setenv("TE_NVRTC_PATH", test_path("old.so"));
    no_nvrtc_because("old.so is of CUDA 11.4, te.h needs 12.0 or newer", "TE_NVRTC_PATH");
}
TE_TEST(nvrtc_lacks_a_function) {
    if (!make_gpu() || !build_nvrtc(test_path("old.so"), "", "nvrtcGetSupportedArchs")) SKIP(no_compiler);
    test_setenv("TE_NVRTC_PATH", test_path("old.so"));
    no_nvrtc_because("old.so has no nvrtcGetSupportedArchs: it is older than CUDA 12.0", "TE_NVRTC_PATH");
}
TE_TEST(nvrtc_too_new) {
    if (!make_gpu() || !build_nvrtc(test_path("new.so"), "-DMAJOR=13", NULL)) SKIP(no_compiler);
    test_setenv("TE_NVRTC_PATH", test_path("new.so"));
    no_nvrtc_because("the kernel compiler libnvrtc could not be opened", "new.so: it is of CUDA 13.4, and the driver takes code of CUDA 12 at most");
}
TE_TEST(nvrtc_refuses_a_kernel) {
    if (!make_gpu() || !build_nvrtc(test_path("broken.so"), "-DCODE=6", NULL)) SKIP(no_compiler);
    test_setenv("TE_NVRTC_PATH", test_path("broken.so"));
    te_ctx *te = open_device("cuda:0", TE_LOG_WARN);
    use_kernels(te);
    CHECK_STR(te_error(te), "kernel math/fill");
    CHECK_STR(te_error(te), "does not compile for sm_90a with NVRTC 12.4 (");
    CHECK_ERROR(te, TE_ERR_COMPILE, "broken.so):\nfill.cu(3): error: bad luck");
    use_kernels(te);
    CHECK(te_error_code(te) == TE_ERR_COMPILE); /* again, not a crash */
    te_ctx_destroy(te);
}

/* ---- the cache ------------------------------------------------------------------------------------------------- */

static int lines_of(const char *text) {
    int n = 0;
    for (; *text; text++) n += *text == '\n';
    return n;
}
static te_jit_stats use_kernels_once(void) {
    te_ctx *te = open_device("cuda:0", TE_LOG_WARN);
    CHECK_OK(te);
    use_kernels(te);
    CHECK_OK(te);
    te_jit_stats stats = te_jit_get_stats(te);
    CHECK_EQ_INT(stats.loaded, KERNELS);
    te_ctx_destroy(te);
    return stats;
}
/* Kernels are compiled, work, and one line is logged. */
static void one_warning(const char *a, const char *b) {
    int before = lines_of(test_log_text());
    te_jit_stats stats = use_kernels_once();
    CHECK_EQ_INT(stats.compiled, KERNELS);
    CHECK_EQ_INT(lines_of(test_log_text()) - before, 1);
    CHECK_STR(test_log_text(), a);
    CHECK_STR(test_log_text(), b);
}

TE_TEST(cache_below_a_file) {
    if (!make_gpu()) SKIP(no_compiler);
    test_setenv("TE_CACHE_DIR", test_path("straw.c/cache"));
    one_warning("the cache of kernels is not used as asked (each process compiles its own): ", "straw.c/cache: Not a directory");
}
TE_TEST(cache_open_to_others) {
    if (!make_gpu()) SKIP(no_compiler);
    REQUIRE(mkdir(test_path("cache"), 0700) == 0 && chmod(test_path("cache"), 0777) == 0);
    one_warning("the cache of kernels is not used as asked", "can be written by others (chmod go-w would mend it)");
}
TE_TEST(cache_without_home) {
    if (!make_gpu()) SKIP(no_compiler);
    test_setenv("TE_CACHE_DIR", NULL);
    test_setenv("XDG_CACHE_HOME", NULL);
    test_setenv("HOME", NULL);
    one_warning("the cache of kernels is not used as asked", "there is no home folder for a cache");
}
TE_TEST(cache_that_cannot_be_written) {
    if (!make_gpu()) SKIP(no_compiler);
    REQUIRE(mkdir(test_path("cache"), 0700) == 0);
    FILE *f = fopen(test_path("cache/sm_90a"), "w"); /* in the way of a folder; permissions would not stop root */
    REQUIRE(f && fclose(f) == 0);
    one_warning("the cache of kernels is not written to (each process compiles its own): ", "cache/sm_90a");
}
TE_TEST(cache_on_a_full_disk) {
    if (!make_gpu()) SKIP(no_compiler);
    te__file_fail_after = 100;
    one_warning("the cache of kernels is not written to (each process compiles its own): ", "No space left on device");
    te__file_fail_after = -1;
    CHECK_EQ_INT(use_kernels_once().compiled, KERNELS); /* nothing was left that could be taken for an entry */
    CHECK_EQ_INT(use_kernels_once().from_cache, KERNELS);
}
TE_TEST(cache_turned_off) {
    if (!make_gpu()) SKIP(no_compiler);
    test_setenv("TE_CACHE_DIR", "");
    CHECK_EQ_INT(use_kernels_once().compiled, KERNELS);
    CHECK_EQ_INT(use_kernels_once().compiled, KERNELS);
    CHECK_EQ_INT(lines_of(test_log_text()), 0);
}

typedef struct cached_files {
    char path[64][512];
    int count;
} cached_files;
static bool list_cached(void *user, const char *name);
static cached_files *listing;
static char listed_folder[400];
static void list_below(cached_files *files, const char *folder) {
    char here[400];
    memcpy(here, listed_folder, sizeof here);
    snprintf(listed_folder, sizeof listed_folder, "%s", folder);
    listing = files;
    te__dir_list(folder, list_cached, NULL, NULL);
    memcpy(listed_folder, here, sizeof here);
}
static bool list_cached(void *user, const char *name) {
    char path[512];
    (void)user;
    snprintf(path, sizeof path, "%.300s/%.200s", listed_folder, name);
    if (te__dir_exists(path)) list_below(listing, path);
    else if (listing->count < 64) memcpy(listing->path[listing->count++], path, sizeof path);
    return true;
}
/* Every file of the cache; there is one for each kernel, and nothing else: no lock, no temporary file. */
static cached_files cached(void) {
    cached_files files = TE_ZERO;
    list_below(&files, test_path("cache"));
    CHECK_EQ_INT(files.count, KERNELS);
    for (int i = 0; i < files.count; i++) CHECK_MSG(te__ends_with(files.path[i], ".cubin"), "%s", files.path[i]);
    return files;
}

TE_TEST(damaged_entries_are_made_anew) {
    if (!make_gpu()) SKIP(no_compiler);
    CHECK_EQ_INT(use_kernels_once().compiled, KERNELS);
    CHECK_EQ_INT(use_kernels_once().from_cache, KERNELS);
    cached_files files = cached();
    for (int kind = 0; kind < 5; kind++) {
        test_case("kind %d", kind);
        for (int i = 0; i < files.count; i++) {
            te__text entry = TE_ZERO;
            REQUIRE(te__file_read(files.path[i], 1 << 20, &entry, NULL));
            if (kind == 0) entry.s[entry.n - 1] ^= 1;                 /* a bit of the code */
            if (kind == 1) entry.s[30] ^= 1;                          /* of what is written above it */
            if (kind == 2) entry.n /= 2;
            if (kind == 3) entry.n = 0;
            if (kind == 4) memset(entry.s, 'x', entry.n);
            FILE *f = fopen(files.path[i], "w");
            CHECK(f && fwrite(entry.s, 1, entry.n, f) == entry.n);
            if (f) fclose(f);
            te__text_free(&entry);
        }
        te_jit_stats stats = use_kernels_once();
        CHECK_EQ_INT(stats.compiled, KERNELS);
        CHECK_EQ_INT(stats.cache_damaged, KERNELS);
        CHECK_EQ_INT(use_kernels_once().from_cache, KERNELS);
        cached();
    }
    CHECK_EQ_INT(lines_of(test_log_text()), 0);
}

static int compilations(void) {
    te__text log = TE_ZERO;
    te__file_read(test_path("compilations"), 1 << 20, &log, NULL);
    int n = lines_of(te__text_str(&log));
    te__text_free(&log);
    return n;
}

TE_TEST(processes_that_compile_at_once) {
    if (!make_gpu()) SKIP(no_compiler);
    enum { PROCESSES = 6 };
    pid_t child[PROCESSES];
    test_setenv("STRAW_LOG", test_path("compilations"));
    test_setenv("STRAW_SLEEP", "30000");
    for (int i = 0; i < PROCESSES; i++) {
        child[i] = fork();
        REQUIRE(child[i] >= 0);
        if (child[i]) continue;
        te_ctx *te = open_device("cuda:0", TE_LOG_WARN);
        use_kernels(te);
        te_jit_stats stats = te_jit_get_stats(te);
        _exit(te_ok(te) && stats.loaded == KERNELS && stats.cache_damaged == 0 ? 0 : 1);
    }
    for (int i = 0; i < PROCESSES; i++) {
        int status = -1;
        CHECK(waitpid(child[i], &status, 0) == child[i]);
        CHECK_MSG(WIFEXITED(status) && WEXITSTATUS(status) == 0, "process %d: status %d", i, status);
    }
    CHECK_EQ_INT(compilations(), KERNELS);
    cached();
}

/* One that is killed while it compiles holds nobody up. */
TE_TEST(a_process_that_dies_while_it_compiles) {
    if (!make_gpu()) SKIP(no_compiler);
    test_setenv("STRAW_LOG", test_path("compilations"));
    test_setenv("STRAW_SLEEP", "60000000");
    pid_t child = fork();
    REQUIRE(child >= 0);
    if (child == 0) {
        use_kernels(open_device("cuda:0", TE_LOG_WARN));
        _exit(0);
    }
    double start = te__time_now();
    while (compilations() < 1 && te__time_now() < start + 10) te__sleep(0.005);
    CHECK_EQ_INT(compilations(), 1);
    kill(child, SIGKILL);
    CHECK(waitpid(child, NULL, 0) == child);
    test_setenv("STRAW_SLEEP", NULL);
    start = te__time_now();
    CHECK_EQ_INT(use_kernels_once().compiled, KERNELS);
    CHECK_MSG(te__time_now() - start < 5, "it took %.1f s", te__time_now() - start);
    cached();
}

/* ---- the disk -------------------------------------------------------------------------------------------------- */

static bool forbid_leftovers(void *user, const char *name) {
    (void)user;
    CHECK_MSG(strcmp(name, "model.safetensors") == 0, "%s was left behind", name);
    return true;
}

/* The disk fills up at one place after the other while a checkpoint is saved: the one before survives, and training goes on. */
TE_TEST(full_disk_while_saving) {
    te_ctx *te = test_context("cpu");
    model m = model_create(te, TE_RECIPE_DELAYED, true), same = model_create(te, TE_RECIPE_DELAYED, true);
    const char *path = test_path("model.safetensors");
    te__text before = TE_ZERO, after = TE_ZERO;
    model_step(te, &m);
    REQUIRE(te_model_save(te, path, m.gpt, m.adam, NULL, 0) == TE_OK && te__file_read(path, 1 << 24, &before, NULL));
    uint64_t saved = test_hash(m.gpt);
    for (int64_t room = 0; room < (int64_t)before.n; room += room < 16 ? 1 : 997) {
        test_case("room for %lld bytes", (long long)room);
        model_step(te, &m);
        te__file_fail_after = room;
        te_result result = te_model_save(te, path, m.gpt, m.adam, NULL, 0);
        te__file_fail_after = -1;
        CHECK_EQ_INT(result, TE_ERR_IO);
        CHECK_STR(te_error(te), "cannot write ");
        CHECK_ERROR(te, TE_ERR_IO, "model.safetensors: No space left on device; what was there before is untouched");
        te__text_clear(&after);
        CHECK(te__file_read(path, 1 << 24, &after, NULL) && after.n == before.n && memcmp(after.s, before.s, after.n) == 0);
        te__dir_list(test_dir(), forbid_leftovers, NULL, NULL);
    }
    CHECK(te_model_load(te, path, same.gpt, same.adam) == TE_OK && test_hash(same.gpt) == saved && te_optimizer_steps(same.adam) == 1);
    CHECK(te_model_save(te, path, m.gpt, m.adam, NULL, 0) == TE_OK); /* somebody has made room */
    CHECK(te_model_load(te, path, same.gpt, same.adam) == TE_OK && test_hash(same.gpt) == test_hash(m.gpt));
    CHECK_OK(te);
    te__text_free(&before);
    te__text_free(&after);
    model_destroy(&m);
    model_destroy(&same);
}
