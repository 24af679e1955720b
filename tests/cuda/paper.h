/* tests/cuda/paper.h: a driver and a compiler made of paper: functions of this file in the place of libcuda's and NVRTC's, host memory in the place of
 * a GPU's. For tests that carry the implementation. */
#ifndef TE_TEST_PAPER_H
#define TE_TEST_PAPER_H

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
    char order[256];        /* of what reached the stream: L launch, H copy to the device, Z zeros, D copy to the host; */
    bool watch;             /* and R record, W wait for an event; small letters: on another stream */
    bool busy;              /* no event passes until the host waits for one */
} fake;

static char primary[1], foreign[1], other[1]; /* CUcontexts */
static TE_MAYBE_UNUSED char own_stream[1], second_stream[1], foreign_stream[1], stream_of_other[1];

static int refusal(void) {
    int code = fake.refuse;
    fake.refuse = 0;
    return code;
}
static void must_be_inside(void) { CHECK(fake.depth > 0); }
static void reached(char what) {
    size_t n = strlen(fake.order);
    if (n + 1 < sizeof fake.order) fake.order[n] = what;
}

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
    must_be_inside();
    memcpy((void *)(uintptr_t)dst, src, bytes);
    reached(stream == second_stream ? 'h' : 'H');
    return refusal();
}
static int fake_DtoH(void *dst, te__cu_address src, size_t bytes, te__cu_handle stream) {
    memcpy(dst, (const void *)(uintptr_t)src, bytes);
    reached(stream == second_stream ? 'd' : 'D');
    return 0;
}
static int fake_Memset(te__cu_address dst, unsigned char value, size_t bytes, te__cu_handle stream) {
    (void)stream;
    memset((void *)(uintptr_t)dst, value, bytes);
    reached('Z');
    return 0;
}
static int fake_StreamCreate(te__cu_handle *stream, unsigned flags) {
    must_be_inside();
    int code = refusal();
    if (code) return code;
    *stream = flags == TE__CU_STREAM_NON_BLOCKING ? second_stream : own_stream;
    fake.streams++;
    return 0;
}
static int fake_StreamCreateWithPriority(te__cu_handle *stream, unsigned flags, int priority) {
    CHECK(flags == TE__CU_STREAM_NON_BLOCKING && priority < 0);
    return fake_StreamCreate(stream, flags);
}
static int fake_StreamDestroy(te__cu_handle stream) {
    CHECK(stream == own_stream || stream == second_stream);
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
    int code = refusal();
    if (code) return code;
    *event = &fake.events;
    fake.events++;
    return 0;
}
static int fake_EventRecord(te__cu_handle event, te__cu_handle stream) {
    (void)event;
    if (fake.watch) reached(stream == second_stream ? 'r' : 'R');
    return 0;
}
static int fake_StreamWait(te__cu_handle stream, te__cu_handle event, unsigned flags) {
    (void)event, (void)flags;
    must_be_inside();
    if (fake.watch) reached(stream == second_stream ? 'w' : 'W');
    return refusal();
}
static int fake_EventQuery(te__cu_handle event) {
    (void)event;
    return fake.fault ? fake.fault : fake.busy ? 600 : 0;
}
static int fake_EventSync(te__cu_handle event) {
    (void)event;
    fake.busy = false;
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
    reached('L');
    fake.last.grid[0] = gx;
    fake.last.stream = stream;
    return refusal();
}
static int fake_LaunchEx(const te__cu_launch_config *config, te__cu_handle function, void **params, void **extra) {
    (void)function, (void)params, (void)extra;
    fake.launches++;
    reached('L');
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

/* ---- the compiler ---- */

static struct {
    int64_t begun; /* compilations so far */
    int together;  /* a compilation waits until so many have begun, itself included */
} compiler;

static te__nvrtc_result fake_CreateProgram(te__nvrtc_program *program, const char *text, const char *name, int num_headers, const char *const *headers,
                                           const char *const *header_names) {
    (void)text, (void)name, (void)num_headers, (void)headers, (void)header_names;
    *program = malloc(1);
    return 0;
}
static te__nvrtc_result fake_DestroyProgram(te__nvrtc_program *program) {
    free(*program);
    return 0;
}
/* The option BAD=1 is a mistake in the kernel. */
static te__nvrtc_result fake_CompileProgram(te__nvrtc_program program, int num_options, const char *const *options) {
    int bad = 0;
    (void)program;
    for (int i = 0; i < num_options; i++) bad |= strcmp(options[i], "-DBAD=1") == 0;
    te__atomic_add(&compiler.begun, 1);
    double start = te__time_now();
    while (te__atomic_load(&compiler.begun) < compiler.together) {
        if (te__time_now() - start > 20) return 2; /* one after the other: the test fails by this */
        te__sleep(0.001);
    }
    return bad;
}
static te__nvrtc_result fake_ImageSize(te__nvrtc_program program, size_t *size) {
    (void)program;
    *size = sizeof "paper cubin";
    return 0;
}
static te__nvrtc_result fake_Image(te__nvrtc_program program, char *image) {
    (void)program;
    memcpy(image, "paper cubin", sizeof "paper cubin");
    return 0;
}
static te__nvrtc_result fake_LogSize(te__nvrtc_program program, size_t *size) {
    (void)program;
    *size = 1;
    return 0;
}
static const char *fake_CompilerError(te__nvrtc_result code) { return code ? "a torn page" : "fine"; }

/* Until the test ends. */
static TE_MAYBE_UNUSED void install_compiler(void) {
    te__nvrtc *n = &te__nvrtc_of_process;
    n->CreateProgram = fake_CreateProgram;
    n->DestroyProgram = fake_DestroyProgram;
    n->CompileProgram = fake_CompileProgram;
    n->GetCUBINSize = fake_ImageSize;
    n->GetCUBIN = fake_Image;
    n->GetProgramLogSize = fake_LogSize;
    n->GetErrorString = fake_CompilerError;
    n->major = 13;
    n->num_archs = 1;
    n->archs[0] = 90;
    snprintf(n->compiler, sizeof n->compiler, "paper13.0-00000000");
    te__nvrtc_state = 1;
    compiler.begun = compiler.together = 0;
}

/* Until the test ends, there is this driver and no NVRTC. */
static void install_driver(void) {
    memset(&fake, 0, sizeof fake);
    fake.sm_major = 9;
    fake.devices = 2;
    te__driver d = TE_ZERO;
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
    d.StreamCreateWithPriority = fake_StreamCreateWithPriority;
    d.StreamDestroy = fake_StreamDestroy;
    d.StreamSynchronize = fake_StreamSync;
    d.StreamGetCtx = fake_StreamGetCtx;
    d.EventCreate = fake_EventCreate;
    d.EventRecord = fake_EventRecord;
    d.EventQuery = fake_EventQuery;
    d.StreamWaitEvent = fake_StreamWait;
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

#endif
