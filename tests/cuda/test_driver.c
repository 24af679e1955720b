/* tests/cuda/test_driver.c: contexts, memory, errors, launches, the queue and tensor maps against the driver and the compiler of paper.h. Needs
 * neither a GPU nor NVRTC. */
#define _GNU_SOURCE
#define TE_STATIC
#define TE_IMPLEMENTATION
#include "../te_test.h"
#include "paper.h"
#ifndef _WIN32
#include <sys/wait.h>
#include <unistd.h>
#endif

static te_ctx *open_gpu(void *cu_context, void *cu_stream) {
    te_ctx_desc desc = TE_ZERO;
    desc.device = "cuda:0";
    desc.cu_context = cu_context;
    desc.cu_stream = cu_stream;
    desc.log = test__log;
    return te_ctx_create(&desc);
}

/* ---- contexts ---- */

TE_TEST(driver_own_context) {
    install_driver();
    te_ctx *te = open_gpu(NULL, NULL);
    CHECK_OK(te);
    CHECK(te_ctx_is_cuda(te) && te_ctx_sm(te) == 90 && te_ctx_cu_context(te) == primary && te_ctx_cu_stream(te) == own_stream);
    CHECK(fake.retained == 1 && fake.depth == 0);
    te_ctx_destroy(te);
}

TE_TEST(driver_borrowed_context) {
    install_driver();
    fake_Push(other); /* the caller's */
    te_ctx *te = open_gpu(foreign, foreign_stream);
    CHECK_OK(te);
    CHECK(te_ctx_cu_context(te) == foreign && te_ctx_cu_stream(te) == foreign_stream && strcmp(te_ctx_device(te), "cuda:3") == 0);
    CHECK(te_synchronize(te) == TE_OK);
    CHECK(fake.retained == 0 && fake.streams == 0 && fake.depth == 1 && fake.stack[0] == other);
    te_ctx_destroy(te);
    te = open_gpu(foreign, stream_of_other);
    CHECK_ERROR(te, TE_ERR_INVALID, "cu_stream belongs to another CUcontext than cu_context");
    te_ctx_destroy(te);
    te = open_gpu(NULL, foreign_stream);
    CHECK_ERROR(te, TE_ERR_INVALID, "than the device's primary one");
    te_ctx_destroy(te);
    te__cu_handle context;
    CHECK(fake_Pop(&context) == 0 && context == other);
}

TE_TEST(driver_refused_devices) {
    te_ctx_desc desc = TE_ZERO;
    install_driver();
    desc.device = "cuda:7";
    te_ctx *te = te_ctx_create(&desc);
    CHECK_ERROR(te, TE_ERR_DEVICE, "this process sees 2 GPUs");
    CHECK(!te_ctx_is_cuda(te) && te_ctx_sm(te) == 0 && !te_ctx_cu_stream(te));
    te_ctx_destroy(te);
    fake.sm_major = 7;
    te = open_gpu(NULL, NULL);
    CHECK_ERROR(te, TE_ERR_UNSUPPORTED, "Paper GPU (cuda:0) is of compute capability 7.0");
    te_ctx_destroy(te);
}

TE_TEST(driver_that_is_not_there) {
    te_ctx_desc desc = TE_ZERO;
    test_setenv("TE_LIBCUDA_PATH", "/nonexistent/libcuda.so.1");
    desc.device = "cuda:0";
    te_ctx *te = te_ctx_create(&desc);
    CHECK(strstr(te_error(te), "/nonexistent/libcuda.so.1") && strstr(te_error(te), "Install the driver"));
    CHECK_ERROR(te, TE_ERR_LIBRARY, "te_ctx_desc.device = \"cpu\"");
    te_ctx_destroy(te);
    test_setenv("TE_DEVICE", NULL);
    desc.device = NULL; /* then the CPU will do */
    te = te_ctx_create(&desc);
    CHECK_OK(te);
    CHECK(!te_ctx_is_cuda(te));
    te_ctx_destroy(te);
}

/* ---- memory ---- */

TE_TEST(driver_copies) {
    install_driver();
    te_ctx *te = open_gpu(NULL, NULL);
    const size_t sizes[] = {0, 1, TE__STAGE_BYTES - 1, TE__STAGE_BYTES, 7 * TE__STAGE_BYTES + 3};
    for (int i = 0; i < COUNT(sizes); i++) {
        size_t n = sizes[i];
        unsigned char *there = (unsigned char *)test_alloc(n + 1), *back = (unsigned char *)test_alloc(n + 1);
        for (size_t k = 0; k < n; k++) there[k] = (unsigned char)(k * 31 >> 3);
        void *device = te__cuda_mem_alloc(te, n + 1);
        CHECK(te__cuda_upload(te, device, there, n) == TE_OK && te__cuda_download(te, back, device, n) == TE_OK && memcmp(there, back, n) == 0);
        CHECK(te__cuda_clear(te, device, n) == TE_OK && te__cuda_download(te, back, device, n) == TE_OK);
        for (size_t k = 0; k < n; k++) there[k] = 0;
        CHECK(memcmp(there, back, n) == 0);
        te__cuda_mem_release(te, device, n + 1);
    }
    CHECK_OK(te);
    te_ctx_destroy(te);
}

TE_TEST(driver_errors) {
    install_driver();
    te_ctx *te = open_gpu(NULL, NULL);
    fake.refuse = 2; /* the pool asks twice */
    te_tensor *x = te_tensor_empty(te, TE_F32, SHAPE(4));
    CHECK(x != NULL);
    CHECK_OK(te);
    fake.refuse = 999;
    CHECK(!te__cuda_mem_alloc(te, 100));
    CHECK_ERROR(te, TE_ERR_DEVICE, "cuda:0: cuMemAlloc: CUDA_ERROR_OF_PAPER: some words");
    fake.fault = 700;
    CHECK(te_synchronize(te) == TE_ERR_DEVICE);
    CHECK(strstr(te_error(te), "CUDA_ERROR_ILLEGAL_ADDRESS") != NULL);
    CHECK_ERROR(te, TE_ERR_DEVICE, "The GPU's context is lost; this process has to end. TE_DEBUG_SYNC=1 tells which kernel it was");
    fake.fault = 0;
    te_ctx_destroy(te);
}

/* ---- launches ---- */

/* Puts something that this driver takes for a cubin of `l` into the cache. */
static void store_cubin(const te__launch *l) {
    te__cache cache;
    te__cache_key key = TE_ZERO;
    te__unit u;
    te__text image = TE_ZERO, why = TE_ZERO;
    CHECK(te__cache_open(&cache, &why));
    CHECK(te__unit_open(te__kernels_get(&why), l->family, l->kernel, &u, &why));
    snprintf(key.kernel, sizeof key.kernel, "%s/%s", l->family, l->kernel);
    snprintf(key.arch, sizeof key.arch, "sm_90a");
    snprintf(key.compiler, sizeof key.compiler, "paper1.0-00000000");
    te__unit_digest(&u, key.text);
    te__options_text(l, key.options);
    te__text_put(&image, "paper cubin");
    CHECK_MSG(te__cache_store(&cache, &key, &image, &why), "%s", te__text_str(&why));
    te__text_free(&image);
    te__text_free(&why);
}

/* A plan of one launch of math/fill. */
static te__launch *begin_plan(te_ctx *te, te__plan *p) {
    te__plan_begin(p, te);
    te__cuda_plan_facts(te, p);
    te__launch *l = te__plan_launch(p, "math", "fill");
    te__plan_args(p, l, 64);
    te__launch_size(l, 5, 1, 1, 128, 0);
    return l;
}
static te_result run_plan(te_ctx *te, te__plan *p) {
    bool pushed;
    te_result result = te__cuda_enter(te, &pushed);
    if (result == TE_OK) result = te__cuda_execute(te, p);
    te__cuda_leave(pushed);
    te__plan_end(p);
    return result;
}

TE_TEST(driver_launches) {
    install_driver();
    te_ctx *te = open_gpu(NULL, NULL);
    te__plan p;
    for (int run = 0; run < 3; run++) {
        te__launch *l = begin_plan(te, &p);
        store_cubin(l);
        CHECK(!te__cuda_plan_lacks_kernels(te, &p) && run_plan(te, &p) == TE_OK);
    }
    CHECK(fake.loads == 1 && fake.launches == 3 && fake.last.grid[0] == 5 && fake.last.stream == own_stream && fake.depth == 0);
    for (int value = 1; value <= 2; value++) {
        te__launch *l = begin_plan(te, &p);
        te__launch_option(l, "N", value);
        store_cubin(l);
        CHECK(run_plan(te, &p) == TE_OK);
        CHECK_EQ_INT(fake.loads, 1 + value);
    }
    /* a second context on the same GPU has the kernels already, and keeps them */
    te_ctx *second = open_gpu(NULL, NULL);
    te_ctx_destroy(te);
    begin_plan(second, &p);
    CHECK(run_plan(second, &p) == TE_OK);
    CHECK(fake.loads == 3 && fake.modules == 3);
    CHECK_OK(second);
    te_ctx_destroy(second);
    CHECK(fake.modules == 0);
}

TE_TEST(driver_launch_details) {
    install_driver();
    te_ctx *te = open_gpu(NULL, NULL);
    te__plan p;
    te__launch *l = begin_plan(te, &p);
    store_cubin(l);
    l->cluster = 2;
    l->shared_bytes = 200000;
    CHECK(run_plan(te, &p) == TE_OK);
    CHECK(fake.last_follows == 1); /* te_fill has te_follow */
    CHECK(fake.last_cluster == 2 && fake.last.shared_bytes == 200000 && fake.last.block[0] == 128 && fake.attributes == 1 && fake.last_shared == 200000);
    l = begin_plan(te, &p);
    l->shared_bytes = 150000;
    CHECK(run_plan(te, &p) == TE_OK && fake.attributes == 1); /* allowed already */
    l = begin_plan(te, &p);
    l->shared_bytes = 300000;
    CHECK(run_plan(te, &p) == TE_ERR_DEVICE);
    CHECK_ERROR(te, TE_ERR_DEVICE, "kernel math/fill with 300000 bytes of shared memory (a block may have 232448)");
    begin_plan(te, &p);
    fake.refuse = 1;
    CHECK(run_plan(te, &p) == TE_ERR_DEVICE);
    CHECK_ERROR(te, TE_ERR_DEVICE, "kernel math/fill, grid 5 x 1 x 1, block 128");
    l = begin_plan(te, &p);
    l->cooperative = true;
    CHECK(run_plan(te, &p) == TE_OK && fake.last_follows == 0); /* it needs the whole GPU */
    te__cu.version = 12020;
    CHECK_EQ_INT(te_graph_begin(te), TE_OK);
    fake.last_follows = 1;
    begin_plan(te, &p);
    CHECK(run_plan(te, &p) == TE_OK && fake.last_follows == 1); /* not through LaunchKernelEx: a capture of this driver knows no such launch */
    te_graph_destroy(te_graph_end(te));
    CHECK_OK(te);
    te_ctx_destroy(te);
}

/* First gradients of a capture, of slices too, go with it where the driver cannot end it. */
TE_TEST(driver_capture_without_end) {
    install_driver();
    te_ctx *te = open_gpu(NULL, NULL);
    te_tensor *x = te_tensor_retain(te_tensor_empty(te, TE_F32, SHAPE(4)));
    te__var *v = te_tensor_set_requires_grad(x, true)->var;
    for (int before = 0; before < 2; before++) { /* the slice's gradient is that of an exchange before the capture */
        if (before) v->shard_grad = te_tensor_retain(te_tensor_empty(te, TE_F32, SHAPE(2)));
        CHECK_EQ_INT(te_graph_begin(te), TE_OK);
        v->grad = te_tensor_retain(te_tensor_empty(te, TE_F32, SHAPE(4)));
        if (!before) v->shard_grad = te_tensor_retain(te_tensor_empty(te, TE_F32, SHAPE(2)));
        te__capture_has_grad(te, v);
        fake.captures_end = 901;
        CHECK(te_graph_end(te) == NULL);
        CHECK_ERROR(te, TE_ERR_DEVICE, "te_graph_end: cuStreamEndCapture");
        fake.captures_end = 0;
        CHECK(!v->grad && !v->shard_grad == !before);
    }
    te_tensor_release(x);
    te_ctx_destroy(te);
}

TE_TEST(driver_graphs) {
    install_driver();
    te_ctx *te = open_gpu(NULL, NULL);
    te__plan p;
    store_cubin(begin_plan(te, &p));
    fake.refuse = 999;
    CHECK_EQ_INT(te_graph_begin(te), TE_ERR_DEVICE);
    CHECK_ERROR(te, TE_ERR_DEVICE, "cuMemAlloc");
    fake.refuse = 999; /* the memory is there now */
    CHECK_EQ_INT(te_graph_begin(te), TE_ERR_DEVICE);
    CHECK_ERROR(te, TE_ERR_DEVICE, "te_graph_begin: cuStreamBeginCapture: CUDA_ERROR_OF_PAPER");
    CHECK(te_graph_end(te) == NULL);
    CHECK_ERROR(te, TE_ERR_STATE, "te_graph_end without te_graph_begin");
    CHECK_EQ_INT(te_graph_begin(te), TE_OK);
    fake.captures_end = 901; /* somebody has done what must not be done */
    CHECK(te_graph_end(te) == NULL && fake.capturing == 0);
    CHECK_ERROR(te, TE_ERR_DEVICE, "te_graph_end: cuStreamEndCapture");
    fake.captures_end = 0;
    CHECK_EQ_INT(te_graph_begin(te), TE_OK);
    fake.refuse = 2;
    CHECK(te_graph_end(te) == NULL);
    CHECK_ERROR(te, TE_ERR_OUT_OF_MEMORY, "te_graph_end: cuGraphInstantiate");
    CHECK_EQ_INT(fake.graphs, 0);
    int syncs = fake.syncs;
    CHECK_EQ_INT(te_graph_begin(te), TE_OK);
    CHECK_EQ_INT(fake.syncs, syncs + 1);
    begin_plan(te, &p);
    CHECK(run_plan(te, &p) == TE_OK);
    te_graph *graph = te_graph_end(te);
    REQUIRE(graph != NULL);
    CHECK_EQ_INT(te_graph_launch(graph), TE_OK);
    fake.refuse = 999;
    CHECK_EQ_INT(te_graph_launch(graph), TE_ERR_DEVICE);
    CHECK_ERROR(te, TE_ERR_DEVICE, "te_graph_launch: cuGraphLaunch");
    CHECK_EQ_INT(fake.graph_launches, 2);
    CHECK_EQ_INT(fake.syncs, syncs + 1); /* a launch waits for nothing */
    te_graph_destroy(graph);
    CHECK_EQ_INT(fake.graphs, 0);
    te__cu.GraphLaunch = NULL;
    CHECK_EQ_INT(te_graph_begin(te), TE_ERR_LIBRARY);
    CHECK_ERROR(te, TE_ERR_LIBRARY, "the NVIDIA driver has no graphs");
    CHECK_OK(te);
    te_ctx_destroy(te);
}

TE_TEST(driver_debug_sync) {
    install_driver();
    test_setenv("TE_DEBUG_SYNC", "1");
    te_ctx *te = open_gpu(NULL, NULL);
    te__plan p;
    store_cubin(begin_plan(te, &p));
    fake.fault = 700;
    CHECK(run_plan(te, &p) == TE_ERR_DEVICE);
    CHECK_ERROR(te, TE_ERR_DEVICE, "kernel math/fill, grid 5 x 1 x 1, block 128, cluster 0, 0 bytes of shared memory: while it ran: CUDA_ERROR_ILLEGAL_ADDRESS");
    fake.fault = 0;
    te_ctx_destroy(te);
}

TE_TEST(driver_without_kernels) {
    install_driver();
    te_ctx *te = open_gpu(NULL, NULL);
    te__plan p;
    te__launch *l = begin_plan(te, &p);
    te__launch_option(l, "N", 5);
    CHECK(te__cuda_plan_lacks_kernels(te, &p));
    CHECK_OK(te); /* asking is no failure */
    CHECK(run_plan(te, &p) == TE_ERR_LIBRARY);
    CHECK_ERROR(te, TE_ERR_LIBRARY, "kernel math/fill is neither in a cache nor embedded as PTX, and there is no NVRTC in this test");
    /* planned again, for the embedded ones, in which options mean nothing */
    l = begin_plan(te, &p);
    te__launch_option(l, "N", 5);
    p.baseline = true;
    CHECK(!te__cuda_plan_lacks_kernels(te, &p));
    if (te__num_baselines > 0) {
        CHECK(run_plan(te, &p) == TE_OK && fake.launches == 1 && te_jit_get_stats(te).from_ptx == 1);
        CHECK_OK(te);
    } else {
        CHECK(run_plan(te, &p) == TE_ERR_LIBRARY);
        te_clear_error(te);
    }
    te_ctx_destroy(te);
}

/* A cubin that the driver refuses is no error as long as the kernel can be compiled anew; here it cannot. */
TE_TEST(driver_refuses_a_cubin) {
    install_driver();
    te_ctx *te = open_gpu(NULL, NULL);
    te__plan p;
    store_cubin(begin_plan(te, &p));
    fake.refuse_loads = 1;
    CHECK(run_plan(te, &p) == TE_ERR_DEVICE);
    CHECK_ERROR(te, TE_ERR_DEVICE, "kernel math/fill (from a cache; the driver is for CUDA 12.4): cuModuleLoadDataEx: CUDA_ERROR_OF_PAPER");
    begin_plan(te, &p);
    CHECK(run_plan(te, &p) == TE_OK);
    te_ctx_destroy(te);
}

TE_TEST(driver_warm_up) {
    install_driver();
    te_ctx *te = open_gpu(NULL, NULL);
    te__plan p;
    CHECK(te_warmup_begin(te) == TE_OK);
    for (int i = 0; i < 6; i++) {
        te__launch *l = begin_plan(te, &p);
        te__launch_option(l, "N", i / 2);
        store_cubin(l);
        CHECK(te__cuda_note(te, &p) == TE_OK);
        te__plan_end(&p);
    }
    CHECK(fake.loads == 0);
    CHECK(te_warmup_end(te) == TE_OK);
    CHECK(fake.loads == 3 && fake.launches == 0 && te_jit_get_stats(te).from_cache == 3);
    te__launch *l = begin_plan(te, &p);
    te__launch_option(l, "N", 2);
    CHECK(run_plan(te, &p) == TE_OK && fake.loads == 3 && fake.launches == 1);
    te_ctx_destroy(te);
}

/* An operation may have another kernel beside collectives (te__plan.beside): a warm-up makes it too. The norm's sums are
 * in its own launch, or in a second one. */
TE_TEST(driver_warms_up_for_collectives) {
    te_op_rmsnorm_bwd_args a = TE_ZERO;
    install_driver();
    install_compiler();
    te_ctx *te = open_gpu(NULL, NULL);
    a.dy = a.x = te_tensor_empty(te, TE_BF16, SHAPE(1024, 1024));
    a.dx = te_tensor_empty(te, TE_BF16, SHAPE(1024, 1024));
    a.gamma = te_tensor_empty(te, TE_BF16, SHAPE(1024));
    a.dgamma = te_tensor_empty(te, TE_BF16, SHAPE(1024));
    a.rstd = te_tensor_empty(te, TE_F32, SHAPE(1024));
    CHECK(te_warmup_begin(te) == TE_OK && te_op_rmsnorm_bwd(te, &a) == TE_OK);
    CHECK(te->flights == 0 && fake.launches == 0);
    CHECK(te_warmup_end(te) == TE_OK);
    CHECK_EQ_INT(compiler.begun, 2);
    for (te->flights = 0; te->flights < 2; te->flights++) {
        fake.launches = 0;
        CHECK_EQ_INT(te_op_rmsnorm_bwd(te, &a), TE_OK);
        CHECK_EQ_INT(fake.launches, 1 + te->flights);
    }
    te->flights = 0;
    CHECK_EQ_INT(compiler.begun, 2);
    CHECK_OK(te);
    te_ctx_destroy(te);
}

/* ---- the queue ---- */

/* A plan of one launch whose kernel is option N's, run as a call inside of a forward. */
static te_result run_numbered(te_ctx *te, int n, bool bad) {
    te__plan p;
    te__launch *l = begin_plan(te, &p);
    te__launch_option(l, bad ? "BAD" : "N", bad ? 1 : n);
    return run_plan(te, &p);
}

/* As many kernels as the machine has cores, at most four, are compiled at one time: none of the compilations ends before so many have begun. Everything reaches the stream in the order of the
 * calls. */
TE_TEST(driver_compiles_ahead) {
    unsigned char host[64] = {1, 2, 3}, back[64];
    bool entered;
    install_driver();
    install_compiler();
    te_ctx *te = open_gpu(NULL, NULL);
    void *device = te__cuda_mem_alloc(te, 64);
    compiler.together = te__cpu_count() < 4 ? te__cpu_count() : 4;
    CHECK(te__device_enter(te, &entered) == TE_OK);
    for (int n = 1; n <= 4; n++) {
        CHECK(run_numbered(te, n, false) == TE_OK);
        if (n == 2) CHECK(te__cuda_clear(te, device, 64) == TE_OK && te__cuda_upload(te, device, host, 32) == TE_OK);
    }
    CHECK(run_numbered(te, 1, false) == TE_OK); /* the kernel is on order: not a second time */
    memset(host, 0, sizeof host); /* the copy has left it */
    te__device_leave(te, entered);
    CHECK(te__cuda_download(te, back, device, 64) == TE_OK);
    CHECK_STR(fake.order + strlen(fake.order) - 8, "LLZHLLLD");
    CHECK(back[0] == 1 && back[2] == 3 && back[40] == 0);
    CHECK(compiler.begun == 4 && fake.loads == 4 && te_jit_get_stats(te).compiled == 4 && te_jit_get_stats(te).launches == 5);
    CHECK(!te->cuda->queue && !te->cuda->settle && fake.depth == 0);
    te__cuda_mem_release(te, device, 64);
    CHECK_OK(te);
    te_ctx_destroy(te);
}

/* The first error names the module whose call met the kernel; the plan's other launches go nowhere, those of other plans run. */
TE_TEST(driver_queue_tells_what_does_not_compile) {
    bool entered;
    install_driver();
    install_compiler();
    te_ctx *te = open_gpu(NULL, NULL);
    te__plan p;
    CHECK(te__device_enter(te, &entered) == TE_OK);
    snprintf(te->module_path, sizeof te->module_path, "decoder.3.mlp");
    te__launch *l = begin_plan(te, &p);
    te__launch_option(l, "BAD", 1);
    l = te__plan_launch(&p, "math", "fill");
    te__plan_args(&p, l, 64);
    CHECK(run_plan(te, &p) == TE_OK);
    te->module_path[0] = 0;
    CHECK(run_numbered(te, 1, false) == TE_OK);
    te__device_leave(te, entered);
    CHECK(!te_ok(te) && fake.launches == 1);
    CHECK(strstr(te_error(te), "a torn page") != NULL);
    CHECK_ERROR(te, TE_ERR_COMPILE, "decoder.3.mlp: kernel math/fill BAD=1 does not compile for sm_90a");
    CHECK(run_numbered(te, 0, true) == TE_ERR_COMPILE); /* outside of modules a call says it itself */
    te_clear_error(te);
    te_ctx_destroy(te);
}

/* Every question about errors waits for the kernels of the calls before it, and te_clear_error forgets their errors, too. */
TE_TEST(driver_queue_ends_before_an_answer) {
    for (int question = 0; question < 4; question++) {
        bool entered;
        install_driver();
        install_compiler();
        te_ctx *te = open_gpu(NULL, NULL);
        test_case("question %d", question);
        CHECK(te__device_enter(te, &entered) == TE_OK && run_numbered(te, 0, true) == TE_OK);
        te__device_leave(te, entered);
        switch (question) {
        case 0: CHECK(!te_ok(te)); break;
        case 1: CHECK(strstr(te_error(te), "kernel math/fill BAD=1 does not compile") != NULL); break;
        case 2: CHECK_EQ_INT(te_error_code(te), TE_ERR_COMPILE); break;
        default:
            te_clear_error(te);
            CHECK(!te->cuda->queue && te->error_code == TE_OK);
        }
        te_clear_error(te);
        CHECK_OK(te);
        te_ctx_destroy(te);
    }
}

/* Wrapped memory goes back to its owner once the launches that wait for their kernels, and may use it, are on the stream. */
static int launches_at_release;
static void note_release(void *user) {
    (void)user;
    launches_at_release = fake.launches;
}
TE_TEST(driver_queue_ends_before_wrapped_memory) {
    bool entered;
    float memory[64];
    install_driver();
    install_compiler();
    te_ctx *te = open_gpu(NULL, NULL);
    te_tensor *x = te_tensor_wrap(te, TE_F32, SHAPE(64), memory, note_release, NULL);
    REQUIRE(x != NULL);
    CHECK(te__device_enter(te, &entered) == TE_OK);
    for (int n = 1; n <= 3; n++) CHECK(run_numbered(te, n, false) == TE_OK);
    launches_at_release = -1;
    te__drop(x);
    CHECK_EQ_INT(launches_at_release, 3);
    te__device_leave(te, entered);
    CHECK_OK(te);
    te_ctx_destroy(te);
}

#ifndef _WIN32
/* A child by fork has none of the threads that compile: it waits for no kernel. */
TE_TEST(driver_queue_ends_with_its_process) {
    bool entered;
    int status = -1;
    install_driver();
    install_compiler();
    te_ctx *te = open_gpu(NULL, NULL);
    compiler.together = 2; /* the compilation is under way at the fork */
    CHECK(te__device_enter(te, &entered) == TE_OK && run_numbered(te, 1, false) == TE_OK);
    while (te__atomic_load(&compiler.begun) == 0) te__sleep(0.001);
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        alarm(10);
        bool fine = te_ok(te);
        te_ctx_destroy(te);
        _exit(fine ? 0 : 1);
    }
    REQUIRE(child > 0 && waitpid(child, &status, 0) == child);
    CHECK_MSG(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the child's status is %d%s", status, WIFSIGNALED(status) ? ": it waited" : "");
    CHECK(run_numbered(te, 2, false) == TE_OK); /* the parent goes on */
    te__device_leave(te, entered);
    CHECK(te_synchronize(te) == TE_OK && fake.launches == 2);
    te_ctx_destroy(te);
}
#endif

/* A program that shares the stream finds every launch on it when the call returns; memory that launches in line write is not given back before them. */
TE_TEST(driver_queue_keeps_to_others) {
    bool entered;
    install_driver();
    install_compiler();
    fake_Push(foreign);
    te_ctx *te = open_gpu(foreign, foreign_stream);
    CHECK(te__device_enter(te, &entered) == TE_OK && run_numbered(te, 1, false) == TE_OK);
    CHECK_EQ_INT(fake.launches, 1);
    te__device_leave(te, entered);
    te_ctx_destroy(te);
    te__cu_handle context;
    CHECK(fake_Pop(&context) == 0);

    te = open_gpu(NULL, NULL);
    void *device = te__cuda_mem_alloc(te, 64);
    CHECK(te__device_enter(te, &entered) == TE_OK && run_numbered(te, 2, false) == TE_OK);
    te__cuda_mem_release(te, device, 64);
    CHECK_EQ_INT(fake.launches, 2);
    CHECK(run_numbered(te, 3, false) == TE_OK && te_ctx_cu_stream(te) == own_stream);
    CHECK_EQ_INT(fake.launches, 3);
    CHECK(run_numbered(te, 4, false) == TE_OK); /* the caller has the stream now */
    CHECK_EQ_INT(fake.launches, 4);
    te__device_leave(te, entered);
    te_ctx_destroy(te);

    te = open_gpu(NULL, NULL); /* a context that goes while launches are in line */
    CHECK(te__device_enter(te, &entered) == TE_OK && run_numbered(te, 5, false) == TE_OK);
    te__device_leave(te, entered);
    CHECK_EQ_INT(te_graph_begin(te), TE_OK); /* a capture begins behind them */
    CHECK_EQ_INT(fake.launches, 5);
    te_graph_destroy(te_graph_end(te));
    CHECK(te__device_enter(te, &entered) == TE_OK && run_numbered(te, 6, false) == TE_OK);
    te__device_leave(te, entered);
    te_ctx_destroy(te);
    CHECK_EQ_INT(fake.launches, 6);
}

/* ---- tensor maps ---- */

TE_TEST(driver_tensor_maps) {
    install_driver();
    te_ctx *te = open_gpu(NULL, NULL);
    te__plan p;
    const uint64_t dims[2] = {64, 32}, strides[1] = {128};
    const uint32_t box[2] = {64, 16};
    unsigned char map[TE__MAP_BYTES], zero[TE__MAP_BYTES] = TE_ZERO;
    te__plan_begin(&p, te);
    for (int i = 0; i < 3; i++) CHECK(te__cuda_tensor_map(&p, map, primary, TE_BF16, 2, dims, strides, box, 128) == TE_OK);
    CHECK(fake.encodings == 1 && map[0] == 9 * 16 + 3 && map[127] == map[0]);
    CHECK(te__cuda_tensor_map(&p, map, primary, TE_F8E4M3, 2, dims, strides, box, 64) == TE_OK);
    CHECK(fake.encodings == 2 && map[0] == 2);
    CHECK(te__cuda_tensor_map(&p, map, foreign, TE_F8E4M3, 2, dims, strides, box, 64) == TE_OK && fake.encodings == 3);
    fake.refuse = 1;
    CHECK(te__cuda_tensor_map(&p, map, other, TE_F32, 2, dims, strides, box, 0) == TE_ERR_DEVICE && p.result == TE_ERR_DEVICE);
    CHECK_ERROR(te, TE_ERR_DEVICE, "rank 2, size 64 x 32, stride 128 bytes, box 64 x 16, swizzle 0: cuTensorMapEncodeTiled");
    CHECK(te__cuda_tensor_map(&p, map, other, TE_F32, 2, dims, strides, box, 0) == TE_OK && fake.encodings == 5);
    p.explain = true;
    CHECK(te__cuda_tensor_map(&p, map, other, TE_F32, 2, dims, strides, box, 0) == TE_OK && fake.encodings == 5 && memcmp(map, zero, sizeof map) == 0);
    te_ctx_destroy(te);
}
