/* tests/cuda/test_driver.c: contexts, memory, errors, launches and tensor maps against a driver made of paper: functions of this file in
 * the place of libcuda's, host memory in the place of a GPU's. Needs neither a GPU nor NVRTC. */
#define TE_STATIC
#define TE_IMPLEMENTATION
#include "../te_test.h"

/* ---- the driver ---- */

static struct {
    int sm_major, devices;
    te__cu_handle stack[8]; /* current CUcontexts */
    int depth;
    int retained, streams, events, allocations, pinned, modules, loads, launches, syncs, encodings, attributes;
    int refuse;             /* what the next call that may fail returns */
    int refuse_loads;       /* of so many modules */
    int fault;              /* what synchronizing returns */
    te__cu_launch_config last;
    unsigned last_cluster;
    int last_shared, last_follows;
    int capturing, graphs, graph_launches, captures_end; /* captures_end: what ending one returns */
} fake;

static char primary[1], foreign[1], other[1]; /* CUcontexts */
static char own_stream[1], foreign_stream[1], stream_of_other[1];

static int refusal(void) {
    int code = fake.refuse;
    fake.refuse = 0;
    return code;
}
static void must_be_inside(void) { CHECK(fake.depth > 0); }

static int fake_GetErrorName(int code, const char **text) {
    *text = code == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : code == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS" : "CUDA_ERROR_OF_PAPER";
    return 0;
}
static int fake_GetErrorString(int code, const char **text) {
    *text = code == 2 ? "out of memory" : "some words";
    return 0;
}
static int fake_DeviceGet(te__cu_device *device, int ordinal) {
    *device = ordinal;
    return 0;
}
static int fake_DeviceGetCount(int *count) {
    *count = fake.devices;
    return 0;
}
static int fake_DeviceGetName(char *name, int size, te__cu_device device) {
    (void)device;
    snprintf(name, (size_t)size, "Paper GPU");
    return 0;
}
static int fake_DeviceGetAttribute(int *value, int attribute, te__cu_device device) {
    (void)device;
    *value = attribute == TE__CU_SM_MAJOR ? fake.sm_major : attribute == TE__CU_SM_MINOR ? 0 : attribute == TE__CU_NUM_SMS ? 132 : 232448;
    return 0;
}
static int fake_DeviceTotalMem(size_t *bytes, te__cu_device device) {
    (void)device;
    *bytes = (size_t)1 << 30;
    return 0;
}
static int fake_PrimaryRetain(te__cu_handle *context, te__cu_device device) {
    (void)device;
    *context = primary;
    fake.retained++;
    return 0;
}
static int fake_PrimaryRelease(te__cu_device device) {
    (void)device;
    fake.retained--;
    return 0;
}
static int fake_GetCurrent(te__cu_handle *context) {
    *context = fake.depth ? fake.stack[fake.depth - 1] : NULL;
    return 0;
}
static int fake_Push(te__cu_handle context) {
    fake.stack[fake.depth++] = context;
    return 0;
}
static int fake_Pop(te__cu_handle *context) {
    *context = fake.stack[--fake.depth];
    return 0;
}
static int fake_CtxGetDevice(te__cu_device *device) {
    *device = fake.stack[fake.depth - 1] == foreign ? 3 : 0;
    return 0;
}
static int fake_MemAlloc(te__cu_address *address, size_t bytes) {
    must_be_inside();
    int code = refusal();
    void *p = code ? NULL : malloc(bytes);
    *address = (te__cu_address)(uintptr_t)p;
    fake.allocations += p != NULL;
    return code;
}
static int fake_MemFree(te__cu_address address) {
    free((void *)(uintptr_t)address);
    fake.allocations--;
    return 0;
}
static int fake_MemGetInfo(size_t *free_bytes, size_t *total_bytes) {
    *free_bytes = (size_t)1 << 20;
    *total_bytes = (size_t)1 << 30;
    return 0;
}
static int fake_HostAlloc(void **host, size_t bytes, unsigned flags) {
    (void)flags;
    *host = malloc(bytes);
    fake.pinned++;
    return 0;
}
static int fake_FreeHost(void *host) {
    free(host);
    fake.pinned--;
    return 0;
}
static int fake_HtoD(te__cu_address dst, const void *src, size_t bytes, te__cu_handle stream) {
    (void)stream;
    must_be_inside();
    memcpy((void *)(uintptr_t)dst, src, bytes);
    return refusal();
}
static int fake_DtoH(void *dst, te__cu_address src, size_t bytes, te__cu_handle stream) {
    (void)stream;
    memcpy(dst, (const void *)(uintptr_t)src, bytes);
    return 0;
}
static int fake_Memset(te__cu_address dst, unsigned char value, size_t bytes, te__cu_handle stream) {
    (void)stream;
    memset((void *)(uintptr_t)dst, value, bytes);
    return 0;
}
static int fake_StreamCreate(te__cu_handle *stream, unsigned flags) {
    (void)flags;
    must_be_inside();
    *stream = own_stream;
    fake.streams++;
    return 0;
}
static int fake_StreamDestroy(te__cu_handle stream) {
    CHECK(stream == own_stream);
    fake.streams--;
    return 0;
}
static int fake_StreamSync(te__cu_handle stream) {
    (void)stream;
    fake.syncs++;
    return fake.fault;
}
static int fake_StreamGetCtx(te__cu_handle stream, te__cu_handle *context) {
    *context = stream == foreign_stream ? foreign : other;
    return 0;
}
static int fake_EventCreate(te__cu_handle *event, unsigned flags) {
    (void)flags;
    *event = &fake.events;
    fake.events++;
    return 0;
}
static int fake_EventRecord(te__cu_handle event, te__cu_handle stream) {
    (void)event, (void)stream;
    return 0;
}
static int fake_EventSync(te__cu_handle event) {
    (void)event;
    return 0;
}
static int fake_EventDestroy(te__cu_handle event) {
    (void)event;
    fake.events--;
    return 0;
}
static int fake_Load(te__cu_handle *module, const void *image, unsigned num_options, int *options, void **values) {
    (void)num_options, (void)options, (void)values;
    must_be_inside();
    fake.loads++;
    if (fake.refuse_loads > 0 && fake.refuse_loads--) return 200;
    CHECK(memcmp(image, "paper ", 6) == 0 || memcmp(image, ".version ", 9) == 0);
    *module = malloc(1);
    fake.modules++;
    return 0;
}
static int fake_Unload(te__cu_handle module) {
    must_be_inside();
    free(module);
    fake.modules--;
    return 0;
}
static int fake_GetFunction(te__cu_handle *function, te__cu_handle module, const char *name) {
    CHECK(strncmp(name, "te_", 3) == 0);
    *function = module;
    return 0;
}
static int fake_FuncSetAttribute(te__cu_handle function, int attribute, int value) {
    (void)function;
    CHECK_EQ_INT(attribute, TE__CU_FUNC_MAX_SHARED);
    fake.attributes++;
    fake.last_shared = value;
    return value > 232448 ? 1 : 0;
}
static int fake_Launch(te__cu_handle function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                       te__cu_handle stream, void **params, void **extra) {
    (void)function, (void)gy, (void)gz, (void)bx, (void)by, (void)bz, (void)shared, (void)params, (void)extra;
    must_be_inside();
    fake.launches++;
    fake.last.grid[0] = gx;
    fake.last.stream = stream;
    return refusal();
}
static int fake_LaunchEx(const te__cu_launch_config *config, te__cu_handle function, void **params, void **extra) {
    (void)function, (void)params, (void)extra;
    fake.launches++;
    fake.last = *config;
    fake.last_cluster = 0;
    fake.last_follows = 0;
    for (unsigned i = 0; i < config->num_attributes; i++) {
        const te__cu_launch_attribute *a = &config->attributes[i];
        if (a->id == TE__CU_LAUNCH_CLUSTER) fake.last_cluster = a->value.cluster[0];
        if (a->id == TE__CU_LAUNCH_PROGRAMMATIC) fake.last_follows = a->value.programmatic;
    }
    return refusal();
}
static int fake_BeginCapture(te__cu_handle stream, int mode) {
    (void)stream;
    must_be_inside();
    CHECK_EQ_INT(mode, TE__CU_CAPTURE_RELAXED);
    int code = refusal();
    if (!code) fake.capturing++;
    return code;
}
static int fake_EndCapture(te__cu_handle stream, te__cu_handle *graph) {
    (void)stream;
    must_be_inside();
    CHECK_EQ_INT(fake.capturing, 1);
    fake.capturing--;
    *graph = fake.captures_end ? NULL : &fake.graphs;
    if (*graph) fake.graphs++;
    return fake.captures_end;
}
static int fake_Instantiate(te__cu_handle *exec, te__cu_handle graph, unsigned long long flags) {
    (void)flags;
    CHECK(graph == &fake.graphs);
    int code = refusal();
    if (!code) *exec = &fake.graph_launches, fake.graphs++;
    return code;
}
static int fake_GraphLaunch(te__cu_handle exec, te__cu_handle stream) {
    (void)stream;
    must_be_inside();
    CHECK(exec == &fake.graph_launches);
    fake.graph_launches++;
    return refusal();
}
static int fake_GraphDestroy(te__cu_handle graph) {
    (void)graph;
    must_be_inside();
    fake.graphs--;
    return 0;
}
static int fake_Encode(void *map, int type, unsigned rank, void *address, const uint64_t *dims, const uint64_t *strides, const uint32_t *box,
                       const uint32_t *steps, int interleave, int swizzle, int promotion, int fill) {
    (void)rank, (void)address, (void)dims, (void)strides, (void)box, (void)steps, (void)interleave, (void)promotion, (void)fill;
    CHECK(((uintptr_t)map & 63) == 0);
    memset(map, type * 16 + swizzle, TE__MAP_BYTES);
    fake.encodings++;
    return refusal();
}

static void remove_driver(void *arg) {
    (void)arg;
    CHECK(fake.depth == 0);
    CHECK_MSG(!fake.retained && !fake.streams && !fake.events && !fake.allocations && !fake.pinned && !fake.modules,
              "left: %d primary contexts, %d streams, %d events, %d allocations, %d pinned, %d modules", fake.retained, fake.streams, fake.events,
              fake.allocations, fake.pinned, fake.modules);
    memset(&te__cu, 0, sizeof te__cu);
    te__nvrtc_state = 0;
    te__text_free(&te__nvrtc_reason);
}
/* Until the test ends, there is this driver and no NVRTC. */
static void install_driver(void) {
    memset(&fake, 0, sizeof fake);
    fake.sm_major = 9;
    fake.devices = 2;
    te__driver d;
    memset(&d, 0, sizeof d);
    d.GetErrorName = fake_GetErrorName;
    d.GetErrorString = fake_GetErrorString;
    d.DeviceGet = fake_DeviceGet;
    d.DeviceGetCount = fake_DeviceGetCount;
    d.DeviceGetName = fake_DeviceGetName;
    d.DeviceGetAttribute = fake_DeviceGetAttribute;
    d.DeviceTotalMem = fake_DeviceTotalMem;
    d.DevicePrimaryCtxRetain = fake_PrimaryRetain;
    d.DevicePrimaryCtxRelease = fake_PrimaryRelease;
    d.CtxGetCurrent = fake_GetCurrent;
    d.CtxPushCurrent = fake_Push;
    d.CtxPopCurrent = fake_Pop;
    d.CtxGetDevice = fake_CtxGetDevice;
    d.MemAlloc = fake_MemAlloc;
    d.MemFree = fake_MemFree;
    d.MemGetInfo = fake_MemGetInfo;
    d.MemHostAlloc = fake_HostAlloc;
    d.MemFreeHost = fake_FreeHost;
    d.MemcpyHtoDAsync = fake_HtoD;
    d.MemcpyDtoHAsync = fake_DtoH;
    d.MemsetD8Async = fake_Memset;
    d.StreamCreate = fake_StreamCreate;
    d.StreamDestroy = fake_StreamDestroy;
    d.StreamSynchronize = fake_StreamSync;
    d.StreamGetCtx = fake_StreamGetCtx;
    d.EventCreate = fake_EventCreate;
    d.EventRecord = fake_EventRecord;
    d.EventSynchronize = fake_EventSync;
    d.EventDestroy = fake_EventDestroy;
    d.ModuleLoadDataEx = fake_Load;
    d.ModuleUnload = fake_Unload;
    d.ModuleGetFunction = fake_GetFunction;
    d.FuncSetAttribute = fake_FuncSetAttribute;
    d.LaunchKernel = fake_Launch;
    d.LaunchKernelEx = fake_LaunchEx;
    d.StreamBeginCapture = fake_BeginCapture;
    d.StreamEndCapture = fake_EndCapture;
    d.GraphInstantiate = fake_Instantiate;
    d.GraphLaunch = fake_GraphLaunch;
    d.GraphDestroy = d.GraphExecDestroy = fake_GraphDestroy;
    d.TensorMapEncodeTiled = fake_Encode;
    d.version = 12040;
    d.ready = true;
    te__cu = d;
    te__nvrtc_state = -1;
    te__text_clear(&te__nvrtc_reason);
    te__text_put(&te__nvrtc_reason, "there is no NVRTC in this test");
    test_on_end(remove_driver, NULL);
    test_setenv("TE_CACHE_DIR", test_path("cache"));
    test_setenv("TE_CACHE_READONLY", NULL);
    test_setenv("TE_DEBUG_SYNC", NULL);
}

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
    CHECK(fake.last_follows == 1); /* te_fill begins with te_follow */
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

/* What the driver does not take is no error as long as it can be made anew; here it cannot. */
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
