/* tests/cuda/test_jit.c: from a kernel's name to an image: texts, marks, NVRTC, the cache, many processes at once, embedded PTX. Needs no
 * GPU; most of it needs NVRTC. */
#define _GNU_SOURCE
#define TE_STATIC
#define TE_IMPLEMENTATION
#include "../te_test.h"
#include <sys/wait.h>

/* A kernel that every build has, quick to compile. */
static te__launch fill_launch(void) {
    te__launch l = TE_ZERO;
    l.family = "math";
    l.kernel = "fill";
    return l;
}

/* Another TE_KERNELS_FILE than before, until the test ends. */
static void forget_kernels(void *arg) {
    (void)arg;
    te__kernels_close(te__kernels_of_process);
    te__kernels_of_process = NULL;
}
static void use_kernels_file(const char *path) {
    forget_kernels(NULL);
    test_on_end(forget_kernels, NULL);
    test_setenv("TE_KERNELS_FILE", path);
}

/* As on a machine whose TE_NVRTC_PATH is this, until the test ends. */
static void forget_nvrtc(void *arg) {
    (void)arg;
    te__nvrtc_state = 0;
    te__text_free(&te__nvrtc_reason);
}
static void use_nvrtc(const char *path) {
    forget_nvrtc(NULL);
    test_on_end(forget_nvrtc, NULL);
    test_setenv("TE_NVRTC_PATH", path);
}

static const te__nvrtc *find_nvrtc(void) { return te__nvrtc_open(0, NULL); }

static te__cache own_cache(void) {
    te__cache cache;
    te__text why = TE_ZERO;
    test_setenv("TE_CACHE_READONLY", NULL);
    test_setenv("TE_CACHE_DIR", test_path("cache"));
    if (!te__cache_open(&cache, &why)) test_fail(__FILE__, __LINE__, "te__cache_open: %s", te__text_str(&why));
    te__text_free(&why);
    return cache;
}

static te__jit_job run_job(const te__launch *l, const te__cache *cache, const te__nvrtc *nvrtc, int sm) {
    te__jit_job job = TE_ZERO;
    job.launch = l;
    job.cache = cache;
    job.nvrtc = nvrtc;
    job.sm = sm;
    te__jit_job_run(&job);
    return job;
}

static bool is_cubin(const te__text *image) { return image->n > 64 && memcmp(image->s, "\x7f" "ELF", 4) == 0; }

/* ---- texts ---- */

TE_TEST(kernel_marks) {
    static const char text[] = "// ops/x/y.cu: what\n//\n// te:baseline\n// te:arch 90a\n// te:row A=1 B=2\n// te:row A=3\n#include \"x\"\n// te:row A=4\n";
    char value[64];
    te__kernel_marks m = te__kernel_marks_of(text);
    CHECK(m.baseline && m.exact && m.arch == 90);
    CHECK(te__kernel_mark(text, "row", 0, value, sizeof value) && strcmp(value, "A=1 B=2") == 0);
    CHECK(te__kernel_mark(text, "row", 1, value, sizeof value) && strcmp(value, "A=3") == 0);
    CHECK(!te__kernel_mark(text, "row", 2, value, sizeof value));
    CHECK(!te__kernel_mark(text, "ro", 0, value, sizeof value));
    m = te__kernel_marks_of("// nothing\n");
    CHECK(!m.baseline && !m.exact && m.arch == 80);
}

TE_TEST(kernel_options) {
    te__launch l = fill_launch();
    char text[TE__LAUNCH_TEXT];
    CHECK(te__options_text(&l, text) && text[0] == 0);
    te__launch_option(&l, "Y_DT", 3);
    te__launch_option(&l, "A", -1);
    te__launch_option(&l, "X_DT", 10);
    CHECK(te__options_text(&l, text) && strcmp(text, "A=-1,X_DT=10,Y_DT=3") == 0);
    CHECK_STR(te__launch_text(&l, text), "math/fill A=-1,X_DT=10,Y_DT=3");
}

TE_TEST(every_kernel_has_its_includes) {
    te__text why = TE_ZERO;
    const te__kernels *k = te__kernels_get(&why);
    te__unit u;
    int kernels = 0;
    REQUIRE(k != NULL);
    for (int i = 0; i < k->num_files; i++) {
        const char *path = k->files[i].path, *slash = te__starts_with(path, "ops/") ? strchr(path + 4, '/') : NULL;
        char family[64], kernel[96], entry[128];
        if (!slash || !te__ends_with(path, ".cu")) continue;
        snprintf(family, sizeof family, "%.*s", (int)(slash - path - 4), path + 4);
        snprintf(kernel, sizeof kernel, "%.*s", (int)strlen(slash) - 4, slash + 1);
        snprintf(entry, sizeof entry, "te_%s(", kernel);
        CHECK_MSG(te__unit_open(k, family, kernel, &u, &why), "%s", te__text_str(&why));
        CHECK_MSG(strstr(k->files[i].text, entry) != NULL, "%s has no entry %s", path, entry);
        kernels++;
    }
    CHECK(kernels > 10);
    CHECK(!te__unit_open(k, "math", "nonsense", &u, &why));
    CHECK_STR(te__text_str(&why), "there is no kernel src/ops/math/nonsense.cu");
    te__text_free(&why);
}

/* The digest of a kernel of these kernels. */
static const char *digest_of(const te__kernels *k, const char *kernel, char hex[TE__DIGEST_CHARS + 1]) {
    te__unit u;
    hex[0] = 0;
    if (te__unit_open(k, "math", kernel, &u, NULL)) te__unit_digest(&u, hex);
    return hex;
}

TE_TEST(kernels_file) {
    char before[TE__DIGEST_CHARS + 1], after[TE__DIGEST_CHARS + 1];
    te__text why = TE_ZERO, file = TE_ZERO;
    te__kernels *embedded = te__kernels_open(NULL, &why), *k;
    const char *path = test_path("te_kernels.cu.inc");
    REQUIRE(embedded != NULL);
    /* the same text gives the same keys */
    te__text_put(&file, "// made for a test\n//// file: ops/math/fill.cu\n");
    te__text_put(&file, te__kernels_find(embedded, "ops/math/fill.cu")->text);
    te__text_put(&file, "//// file: device/base.cuh\r\n");
    te__text_put(&file, te__kernels_find(embedded, "device/base.cuh")->text);
    REQUIRE(te__file_write_atomic(path, file.s, file.n, NULL));
    k = te__kernels_open(path, &why);
    REQUIRE(k != NULL);
    CHECK(strcmp(digest_of(embedded, "fill", before), digest_of(k, "fill", after)) == 0 && before[0]);
    te__kernels_close(k);
    /* a header's text counts for every kernel that includes it */
    te__text_put(&file, "// one more line\n//// file: device/new.cuh\n#pragma once\n");
    REQUIRE(te__file_write_atomic(path, file.s, file.n, NULL));
    k = te__kernels_open(path, &why);
    REQUIRE(k != NULL);
    CHECK(strcmp(digest_of(embedded, "fill", before), digest_of(k, "fill", after)) != 0);
    CHECK(strcmp(digest_of(embedded, "copy", before), digest_of(k, "copy", after)) != 0);
    CHECK(te__kernels_find(k, "device/new.cuh") && strcmp(te__kernels_find(k, "device/new.cuh")->text, "#pragma once\n") == 0);
    te__kernels_close(k);
    /* what is no such file */
    REQUIRE(te__file_write_atomic(path, "hello\n", 6, NULL));
    CHECK(!te__kernels_open(path, &why));
    CHECK_STR(te__text_str(&why), "no section");
    te__text_clear(&why);
    CHECK(!te__kernels_open(test_path("nowhere"), &why));
    CHECK_STR(te__text_str(&why), "nowhere");
    CHECK_STR(te__text_str(&why), "TE_KERNELS_FILE");
    te__kernels_close(embedded);
    te__text_free(&why);
    te__text_free(&file);
}

/* ---- compiling ---- */

TE_TEST(jit_architectures) {
    te__nvrtc n = TE_ZERO;
    char arch[24];
    n.archs[0] = 75, n.archs[1] = 80, n.archs[2] = 90;
    n.num_archs = 3;
    CHECK(te__nvrtc_arch(&n, 80, arch, sizeof arch) && strcmp(arch, "sm_80") == 0);
    CHECK(te__nvrtc_arch(&n, 90, arch, sizeof arch) && strcmp(arch, "sm_90a") == 0);
    CHECK(te__nvrtc_arch(&n, 89, arch, sizeof arch) && strcmp(arch, "compute_80") == 0);
    CHECK(te__nvrtc_arch(&n, 120, arch, sizeof arch) && strcmp(arch, "compute_90") == 0);
    CHECK(te__nvrtc_arch(NULL, 120, arch, sizeof arch) && strcmp(arch, "sm_120a") == 0);
    n.num_archs = 1;
    CHECK(!te__nvrtc_arch(&n, 80, arch, sizeof arch));
}

TE_TEST(jit_compiles_once) {
    const te__nvrtc *nvrtc = find_nvrtc();
    if (!nvrtc) SKIP("no NVRTC");
    te__cache cache = own_cache();
    te__launch l = fill_launch();
    te__jit_job first = run_job(&l, &cache, nvrtc, 90), second = run_job(&l, &cache, nvrtc, 90), third = run_job(&l, &cache, nvrtc, 80);
    CHECK_MSG(first.result == TE_OK, "%s", te__text_str(&first.why));
    CHECK(first.compiled && !first.damaged && is_cubin(&first.image) && strcmp(first.arch, "sm_90a") == 0 && first.cache_why.n == 0);
    CHECK(second.result == TE_OK && !second.compiled && !second.damaged);
    CHECK(second.image.n == first.image.n && memcmp(first.image.s, second.image.s, first.image.n) == 0);
    CHECK(third.result == TE_OK && third.compiled && strcmp(third.arch, "sm_80") == 0);
    te__jit_job_free(&first);
    te__jit_job_free(&second);
    te__jit_job_free(&third);
}

/* Code of the user's takes the place of a file: each text has an entry of its own, by a name that other processes would give it; the compiler's words about it come back. */
static te__launch launch_with(te_ctx *te, const char *code) {
    te__plan p;
    te__launch l;
    te__plan_begin(&p, te);
    l = *te__plan_launch(&p, "attn", "attn_bwd_bias");
    CHECK_EQ_INT(te__launch_code(&p, &l, "ops/attn/score_mod.cuh", code), TE_OK);
    te__plan_end(&p);
    return l;
}
TE_TEST(jit_compiles_code_of_the_users) {
    static const char doubled[] = "#define TE_MOD_SCORE (score * 2.0f)\n", halved[] = "#define TE_MOD_SCORE (score / 2.0f)\n", wrong[] = "#define TE_MOD_SCORE (score + fabsf(1, 2))\n";
    const te__nvrtc *nvrtc = find_nvrtc();
    te_ctx *te = test_context("cpu");
    char copy[sizeof doubled];
    if (!nvrtc) SKIP("no NVRTC");
    te__cache cache = own_cache();
    memcpy(copy, doubled, sizeof copy);
    te__launch l[3] = {launch_with(te, doubled), launch_with(te, halved), launch_with(te, copy)}, bad = launch_with(te, wrong);
    CHECK(l[0].option[0].value != l[1].option[0].value && l[0].option[0].value == l[2].option[0].value && l[0].option[0].value > 0);
    te__jit_job job[3], failed = run_job(&bad, &cache, nvrtc, 90);
    for (int i = 0; i < 3; i++) {
        job[i] = run_job(&l[i], &cache, nvrtc, 90);
        CHECK_MSG(job[i].result == TE_OK && job[i].compiled == (i < 2), "%s", te__text_str(&job[i].why));
    }
    CHECK(job[0].image.n != job[1].image.n || memcmp(job[0].image.s, job[1].image.s, job[0].image.n) != 0);
    CHECK_EQ_INT(failed.result, TE_ERR_COMPILE);
    CHECK_STR(te__text_str(&failed.why), "too many arguments in function call");
    CHECK_STR(te__text_str(&failed.why), "score + fabsf(1, 2)");
    for (int i = 0; i < 3; i++) te__jit_job_free(&job[i]);
    te__jit_job_free(&failed);
}

static bool damage_entry(void *folder, const char *name) {
    te__text path = TE_ZERO, entry = TE_ZERO;
    te__text_printf(&path, "%s/%s", (const char *)folder, name);
    if (te__file_read(path.s, 1 << 24, &entry, NULL)) {
        entry.s[entry.n / 2] ^= 16;
        te__file_write_atomic(path.s, entry.s, entry.n, NULL);
    }
    te__text_free(&path);
    te__text_free(&entry);
    return true;
}

TE_TEST(jit_replaces_damaged_entries) {
    const te__nvrtc *nvrtc = find_nvrtc();
    if (!nvrtc) SKIP("no NVRTC");
    te__cache cache = own_cache();
    te__launch l = fill_launch();
    te__jit_job job = run_job(&l, &cache, nvrtc, 90);
    te__text folder = TE_ZERO;
    te__jit_job_free(&job);
    te__text_printf(&folder, "%s/sm_90a/math", cache.root);
    CHECK(te__dir_list(folder.s, damage_entry, folder.s, NULL));
    job = run_job(&l, &cache, nvrtc, 90);
    CHECK(job.result == TE_OK && job.compiled && job.damaged && is_cubin(&job.image));
    te__jit_job_free(&job);
    job = run_job(&l, &cache, nvrtc, 90);
    CHECK(job.result == TE_OK && !job.compiled && !job.damaged);
    te__jit_job_free(&job);
    te__text_free(&folder);
}

TE_TEST(jit_without_a_folder) {
    const te__nvrtc *nvrtc = find_nvrtc();
    if (!nvrtc) SKIP("no NVRTC");
    te__cache cache = own_cache();
    te__launch l = fill_launch();
    /* the disk fills up: the kernel is there all the same, and the reason is told */
    te__file_fail_after = 100;
    te__jit_job job = run_job(&l, &cache, nvrtc, 90);
    te__file_fail_after = -1;
    CHECK(job.result == TE_OK && job.compiled && is_cubin(&job.image));
    CHECK_STR(te__text_str(&job.cache_why), "No space left");
    te__jit_job_free(&job);
    cache.root[0] = 0;
    job = run_job(&l, &cache, nvrtc, 90);
    CHECK(job.result == TE_OK && job.compiled && job.cache_why.n == 0);
    te__jit_job_free(&job);
    job = run_job(&l, NULL, nvrtc, 90);
    CHECK(job.result == TE_OK && job.compiled);
    te__jit_job_free(&job);
}

TE_TEST(jit_newer_gpu_than_nvrtc) {
    const te__nvrtc *nvrtc = find_nvrtc();
    if (!nvrtc) SKIP("no NVRTC");
    te__cache cache = own_cache();
    te__launch l = fill_launch();
    for (int again = 0; again < 2; again++) {
        te__jit_job job = run_job(&l, &cache, nvrtc, 990);
        CHECK_MSG(job.result == TE_OK, "%s", te__text_str(&job.why));
        CHECK(job.compiled == !again && strncmp(job.arch, "compute_", 8) == 0);
        CHECK_STR(te__text_str(&job.image), ".entry te_fill");
        te__jit_job_free(&job);
    }
}

TE_TEST(jit_refusals) {
    const te__nvrtc *nvrtc = find_nvrtc();
    if (!nvrtc) SKIP("no NVRTC");
    static const char broken[] = "//// file: ops/math/fill.cu\n// te:arch 90a\nextern \"C\" __global__ void te_fill() { undeclared(); }\n";
    te__cache cache = own_cache();
    te__launch l = fill_launch();
    REQUIRE(te__file_write_atomic(test_path("k"), broken, sizeof broken - 1, NULL));
    use_kernels_file(test_path("k"));
    te__jit_job job = run_job(&l, &cache, nvrtc, 90);
    CHECK_EQ_INT(job.result, TE_ERR_COMPILE);
    CHECK_STR(te__text_str(&job.why), "kernel math/fill does not compile for sm_90a with NVRTC");
    CHECK_STR(te__text_str(&job.why), "ops/math/fill.cu(2): error: identifier \"undeclared\" is undefined");
    te__jit_job_free(&job);
    job = run_job(&l, &cache, nvrtc, 120);
    CHECK_EQ_INT(job.result, TE_ERR_UNSUPPORTED);
    CHECK_STR(te__text_str(&job.why), "is for sm_90a alone, this GPU is sm_120");
    te__jit_job_free(&job);
    l.kernel = "nonsense";
    job = run_job(&l, &cache, nvrtc, 90);
    CHECK_EQ_INT(job.result, TE_ERR_COMPILE);
    CHECK_STR(te__text_str(&job.why), "there is no kernel src/ops/math/nonsense.cu");
    te__jit_job_free(&job);
}

TE_TEST(jit_without_nvrtc) {
    const te__nvrtc *nvrtc = find_nvrtc();
    te__cache cache = own_cache();
    te__launch l = fill_launch();
    if (nvrtc) { /* somebody else's work */
        te__jit_job made = run_job(&l, &cache, nvrtc, 90);
        te__jit_job_free(&made);
    }
    te__text why = TE_ZERO;
    use_nvrtc("/nonexistent/libnvrtc.so");
    CHECK(!te__nvrtc_open(0, &why));
    CHECK_STR(te__text_str(&why), "/nonexistent/libnvrtc.so");
    CHECK_STR(te__text_str(&why), "pip install nvidia-cuda-nvrtc-cu12");
    te__jit_job job = run_job(&l, &cache, NULL, 80);
    CHECK(job.missing && job.result == TE_ERR_LIBRARY && !job.image.n);
    te__jit_job_free(&job);
    job = run_job(&l, &cache, NULL, 90);
    CHECK(nvrtc ? job.result == TE_OK && !job.compiled && is_cubin(&job.image) : job.missing);
    te__jit_job_free(&job);
    te__text_free(&why);
}

/* Several threads, more jobs than threads. */
TE_TEST(jit_in_parallel) {
    const te__nvrtc *nvrtc = find_nvrtc();
    if (!nvrtc) SKIP("no NVRTC");
    enum { JOBS = 6 };
    te__cache cache = own_cache();
    te__launch launches[JOBS];
    te__jit_job jobs[JOBS] = TE_ZERO;
    for (int i = 0; i < JOBS; i++) {
        launches[i] = fill_launch();
        te__launch_option(&launches[i], "NOBODY_ASKS", i / 2); /* each one twice */
        jobs[i].launch = &launches[i];
        jobs[i].cache = &cache;
        jobs[i].nvrtc = nvrtc;
        jobs[i].sm = 90;
    }
    te__jit_run(jobs, JOBS);
    int compiled = 0;
    for (int i = 0; i < JOBS; i++) {
        CHECK(jobs[i].result == TE_OK && is_cubin(&jobs[i].image));
        compiled += jobs[i].compiled;
        te__jit_job_free(&jobs[i]);
    }
    CHECK_EQ_INT(compiled, JOBS / 2);
}

static bool count_files(void *user, const char *name) {
    (void)name;
    ++*(int *)user;
    return true;
}

TE_TEST(jit_in_many_processes) {
    const te__nvrtc *nvrtc = find_nvrtc();
    if (!nvrtc) SKIP("no NVRTC");
    enum { PROCESSES = 8 };
    te__cache cache = own_cache();
    te__launch l = fill_launch();
    pid_t child[PROCESSES];
    for (int i = 0; i < PROCESSES; i++) {
        child[i] = fork();
        if (child[i] == 0) {
            te__jit_job job = run_job(&l, &cache, nvrtc, 90);
            _exit(job.result != TE_OK || !is_cubin(&job.image) ? 2 : job.compiled ? 1 : 0);
        }
        REQUIRE(child[i] > 0);
    }
    int compiled = 0, entries = 0;
    for (int i = 0; i < PROCESSES; i++) {
        int status = -1;
        REQUIRE(waitpid(child[i], &status, 0) == child[i]);
        CHECK_MSG(WIFEXITED(status) && WEXITSTATUS(status) < 2, "process %d: status %d", i, status);
        compiled += WIFEXITED(status) && WEXITSTATUS(status) == 1;
    }
    CHECK_EQ_INT(compiled, 1);
    te__text folder = TE_ZERO;
    te__text_printf(&folder, "%s/sm_90a/math", cache.root);
    te__dir_list(folder.s, count_files, &entries, NULL);
    CHECK_EQ_INT(entries, 1); /* neither locks nor temporary files stay */
    te__text_free(&folder);
}

/* A process that dies while it compiles leaves its lock to the system and its place to the next. */
TE_TEST(jit_after_a_dead_process) {
    const te__nvrtc *nvrtc = find_nvrtc();
    if (!nvrtc) SKIP("no NVRTC");
    te__cache cache = own_cache();
    te__launch l = fill_launch();
    pid_t child = fork();
    if (child == 0) {
        te__cache_key key = TE_ZERO;
        te__cache_lock lock;
        te__unit u;
        if (!te__unit_open(te__kernels_get(NULL), "math", "fill", &u, NULL)) _exit(1);
        snprintf(key.kernel, sizeof key.kernel, "math/fill");
        snprintf(key.arch, sizeof key.arch, "sm_90a");
        memcpy(key.compiler, nvrtc->compiler, sizeof key.compiler);
        te__unit_digest(&u, key.text);
        te__cache_lock_acquire(&cache, &key, &lock);
        _exit(lock.held ? 0 : 1);
    }
    int status = -1;
    REQUIRE(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    te__jit_job job = run_job(&l, &cache, nvrtc, 90);
    CHECK(job.result == TE_OK && job.compiled);
    te__jit_job_free(&job);
}

/* ---- embedded PTX ---- */

TE_TEST(ptx_numbers) {
    te__text out = TE_ZERO;
    te__ptx_unfold("add.s64 %rd+5,%rd-2,%r+7;\n@%p+1 bra $L__BB0_+3;\nld.f32 %f+0,[%rd+4+16];\nmov.u32 %r-7,%tid.x;\n.reg .b32 %r<9>;", &out);
    CHECK(strcmp(te__text_str(&out), "add.s64 %rd5,%rd3,%r7;\n@%p1 bra $L__BB0_3;\nld.f32 %f0,[%rd7+16];\nmov.u32 %r0,%tid.x;\n.reg .b32 %r<9>;") == 0);
    te__text_free(&out);
}

TE_TEST(embedded_ptx) {
    if (te__num_baselines == 0) SKIP("src/cuda/baseline.inc is empty: make ptx");
    for (int i = 0; i < te__num_baselines; i++) {
        char family[64], entry[128];
        const char *slash = strchr(te__baselines[i].kernel, '/');
        te__text ptx = TE_ZERO;
        REQUIRE(slash != NULL);
        snprintf(family, sizeof family, "%.*s", (int)(slash - te__baselines[i].kernel), te__baselines[i].kernel);
        snprintf(entry, sizeof entry, ".visible .entry te_%s(", slash + 1);
        test_case("%s", te__baselines[i].kernel);
        CHECK(te__baseline_find(family, slash + 1, &ptx));
        CHECK(te__starts_with(te__text_str(&ptx), ".version 8.0\n.target sm_80\n") && strstr(te__text_str(&ptx), entry));
        te__text_free(&ptx);
    }
    te__text none = TE_ZERO;
    CHECK(!te__baseline_find("math", "nonsense", &none));
}

/* ---- on a GPU ---- */

/* Fills a tensor, converts it and reads it back, in a context of its own; what that took. */
static te_jit_stats use_gpu(bool no_cubin_cache) {
    te_ctx_desc desc = TE_ZERO;
    te__cu_handle current = NULL;
    desc.device = "cuda:0";
    desc.no_cubin_cache = no_cubin_cache;
    te_ctx *te = te_ctx_create(&desc);
    float host[15] = TE_ZERO;
    te_scope_begin(te);
    te_tensor_to_f32(te_tensor_cast(te_tensor_full(te, TE_F32, SHAPE(3, 5), 2.5), TE_BF16), host);
    CHECK_OK(te);
    for (int i = 0; i < 15; i++) CHECK(host[i] == 2.5f);
    CHECK(te__cu.CtxGetCurrent(&current) == 0 && !current); /* as it was before */
    te_jit_stats stats = te_jit_get_stats(te);
    CHECK(stats.launches > 0 && stats.loaded > 0 && stats.loaded == stats.compiled + stats.from_cache + stats.from_ptx);
    te_scope_end(te);
    te_ctx_destroy(te);
    return stats;
}

TE_TEST(jit_on_a_gpu) {
    if (test_no_gpu()) SKIP(test_no_gpu());
    if (!find_nvrtc()) SKIP("no NVRTC");
    own_cache();
    te_jit_stats cold = use_gpu(false), warm = use_gpu(false), without = use_gpu(true);
    CHECK(cold.compiled > 0 && cold.from_cache == 0 && cold.from_ptx == 0);
    CHECK(warm.compiled == 0 && warm.from_cache == cold.compiled);
    CHECK(without.compiled == cold.compiled && without.from_cache == 0);
}

/* A driver alone: everything runs from embedded PTX, slower. */
TE_TEST(jit_on_a_gpu_without_nvrtc) {
    if (test_no_gpu()) SKIP(test_no_gpu());
    if (te__num_baselines == 0) SKIP("src/cuda/baseline.inc is empty: make ptx");
    own_cache();
    use_nvrtc("/nonexistent/libnvrtc.so");
    te_jit_stats stats = use_gpu(false);
    CHECK(stats.from_ptx > 0 && stats.compiled == 0 && stats.from_cache == 0);
}

/* Kernels that were compiled elsewhere, and no NVRTC here: they run as they are. */
TE_TEST(jit_on_a_gpu_with_a_pack) {
    if (test_no_gpu()) SKIP(test_no_gpu());
    if (!find_nvrtc()) SKIP("no NVRTC to make a pack with");
    te__cache pack = own_cache();
    use_gpu(false);
    use_nvrtc("/nonexistent/libnvrtc.so");
    test_setenv("TE_CACHE_DIR", "");
    test_setenv("TE_CACHE_READONLY", pack.root);
    te_jit_stats stats = use_gpu(false);
    CHECK(stats.from_cache > 0 && stats.from_ptx == 0 && stats.compiled == 0);
}
