/* te_bench: measures speed, as a ratio to a reference in the same run: cuBLASLt (opened at run time, if it is there) for products, a
 * device-to-device copy for everything that moves memory.
 *
 *     te_bench [--csv FILE] [--profile] [WORD ...]
 *     te_bench dist [--csv FILE] [--device NAME] [--small] [PART ...]          in each rank of a job: bench_dist.h has the parts
 *     te_bench --tune [MxNxK | all] [tn | nn | nt] [f32] [bf16 | fp8 | fp8-split | fp8-1x128-128x128 | fp8-1x128-1x128 | mxfp8 | nvfp4]
 *
 * WORD: only rows whose name has one of them: gemm, "gemm bf16", epilogue, odd, norm, adam, layer .. --profile: below each row of a layer, the time of
 * each kernel. --tune: every tile and number of splits that te_op_gemm's choice weighs, fastest first, with the cost that the choice estimates for each.
 *
 * Every figure of the GPU is the third shortest of 16 runs between CUDA events, on random normal data, with the L2 cache flushed before each:
 * by writing, which leaves it as full of lines to be written back as a call that writes leaves it; before calls that only read, by writing
 * and then reading, since such a call leaves none either. Clocks are left as they are. Host times and steps of a layer are medians by the host's
 * clock, without a flush.
 *
 * The first line names GPU, driver, libraries, date, and the commit in the environment variable TE_BENCH_COMMIT, which `make bench` sets. */
#define TE_STATIC
#define TE_IMPLEMENTATION
#define TE__TUNE
#include "te.h"
#include <time.h>

/* ---- timing ---- */

typedef struct bench {
    te_ctx *te;
    te_tensor *flush; /* larger than the L2 cache */
    te_tensor *flushed;
    te__cu_handle start, end;
    bool reads_only;  /* the measured call writes next to nothing */
    double copy_rate; /* bytes a second, read and written */
    const char **words;
    int num_words;
    bool profile;
    FILE *csv;
    struct cublaslt *lt;
} bench;

typedef void (*work_fn)(bench *b, void *arg);

static int by_value(const void *a, const void *b) {
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

/* Seconds of one run after a flush. After some sequences of launches a short call takes 1 us longer, and where two things run in turns, the same one of
 * them does so every time (tests/bench/notes.md). So the number of launches in front changes from run to run, and measure_both takes a low quantile. */
static float measure_once(bench *b, int index, work_fn work, void *arg) {
    float milliseconds = 0;
    int more;
    for (more = 0; more < index % 4; more++) te_tensor_fill(b->flushed, 0);
    te_tensor_fill(b->flush, index);
    if (b->reads_only) {
        te_op_amax_args read = TE_ZERO;
        read.x = b->flush;
        read.amax = b->flushed;
        te_op_amax(b->te, &read);
    }
    te__cuda_settle(b->te); /* no launch of the warm-up waits for its kernel any more */
    te__cu.EventRecord(b->start, b->te->cuda->stream);
    work(b, arg);
    te__cu.EventRecord(b->end, b->te->cuda->stream);
    te__cu.EventSynchronize(b->end);
    te__cu.EventElapsedTime(&milliseconds, b->start, b->end);
    return milliseconds * 1e-3f;
}

/* The third shortest of 16 times, in seconds, of each of two things that run in turns: the same clocks and temperature for both. `other` may be NULL. */
static void measure_both(bench *b, work_fn work, void *arg, work_fn other, void *other_arg, double seconds[2]) {
    enum { RUNS = 16, THIRD = 2 };
    float times[2][RUNS];
    int i;
    bool pushed;
    for (i = 0; i < 3; i++) { /* compiles, fills the pool, wakes the clocks */
        work(b, arg);
        if (other) other(b, other_arg);
    }
    te_synchronize(b->te);
    if (te__cuda_enter(b->te, &pushed) != TE_OK) return;
    for (i = 0; i < RUNS; i++) {
        times[0][i] = measure_once(b, i, work, arg);
        times[1][i] = other ? measure_once(b, i, other, other_arg) : 0;
    }
    te__cuda_leave(pushed);
    for (i = 0; i < 2; i++) {
        qsort(times[i], RUNS, sizeof(float), by_value);
        seconds[i] = (double)times[i][THIRD];
    }
}

static double measure(bench *b, work_fn work, void *arg) {
    double seconds[2] = {0, 0};
    measure_both(b, work, arg, NULL, NULL, seconds);
    return seconds[0];
}

/* The median of 12 single runs a few milliseconds apart, in seconds: what lasts longer than the L2 cache remembers, and heats the chip. */
static double measure_apart(bench *b, work_fn work, void *arg) {
    enum { RUNS = 12 };
    float times[RUNS];
    int i;
    bool pushed;
    for (i = 0; i < 3; i++) work(b, arg);
    te_synchronize(b->te);
    if (te__cuda_enter(b->te, &pushed) != TE_OK) return 0;
    for (i = 0; i < RUNS; i++) {
        te__sleep(0.005);
        te__cu.EventRecord(b->start, b->te->cuda->stream);
        work(b, arg);
        te__cu.EventRecord(b->end, b->te->cuda->stream);
        te__cu.EventSynchronize(b->end);
        times[i] = 0;
        te__cu.EventElapsedTime(&times[i], b->start, b->end);
    }
    te__cuda_leave(pushed);
    qsort(times, RUNS, sizeof(float), by_value);
    return (double)times[RUNS / 2] * 1e-3;
}

/* Seconds of a run back to back with others, for 40 ms and more, behind half as many: power then holds the clocks down. `once`: about how long one takes. */
static double measure_sustained(bench *b, work_fn work, void *arg, double once) {
    const int runs = (int)(0.04 / (once > 1e-6 ? once : 1e-6)) + 4;
    float milliseconds = 0;
    int i;
    bool pushed;
    if (te__cuda_enter(b->te, &pushed) != TE_OK) return 0;
    for (i = -runs / 2; i < runs; i++) {
        if (i == 0) te__cu.EventRecord(b->start, b->te->cuda->stream);
        work(b, arg);
    }
    te__cu.EventRecord(b->end, b->te->cuda->stream);
    te__cu.EventSynchronize(b->end);
    te__cu.EventElapsedTime(&milliseconds, b->start, b->end);
    te__cuda_leave(pushed);
    return milliseconds * 1e-3 / runs;
}

/* True if no word was given, or one is in the name. */
static bool wanted(const bench *b, const char *name) {
    int i;
    for (i = 0; i < b->num_words; i++)
        if (strstr(name, b->words[i])) return true;
    return b->num_words == 0;
}

/* `ours` and `theirs` (0: there is nothing) in the same unit; against: the name of theirs. */
static void report_against(bench *b, const char *name, const char *shape, double seconds, double ours, double theirs, const char *unit, const char *against) {
    char ratio[32] = "-";
    if (!te_ok(b->te)) {
        printf("%-42s %-20s failed: %s\n", name, shape, te_error(b->te));
        te_clear_error(b->te);
        return;
    }
    if (theirs > 0) snprintf(ratio, sizeof ratio, "%.2f", ours / theirs);
    printf("%-42s %-20s %10.1f us %9.1f %-8s %9.1f  %s\n", name, shape, seconds * 1e6, ours, unit, theirs, ratio);
    fflush(stdout);
    if (b->csv && theirs > 0) fprintf(b->csv, "\"%s\",\"%s\",%.3f,%.4g,%s,%s,%.4g,%.3f\n", name, shape, seconds * 1e6, ours, unit, against, theirs, ours / theirs);
    if (b->csv && theirs <= 0) fprintf(b->csv, "\"%s\",\"%s\",%.3f,%.4g,%s,,,\n", name, shape, seconds * 1e6, ours, unit);
}
static void report(bench *b, const char *name, const char *shape, double seconds, double ours, const char *unit) {
    report_against(b, name, shape, seconds, ours, 0, unit, "");
}
static void report_bytes(bench *b, const char *name, const char *shape, double seconds, double bytes) {
    report_against(b, name, shape, seconds, bytes / seconds * 1e-9, b->copy_rate * 1e-9, "GB/s", "copy");
}

/* ---- where the time of many launches goes: --profile ---- */

enum { MAX_PROFILED = 4096 };
typedef struct profiled {
    te__cu_handle function, start, end;
} profiled;
static profiled profile_row[MAX_PROFILED];
static int num_profiled;
static te__driver real_driver;

/* A row for a launch that starts now; NULL: there is no room, and the sum at the end will tell. */
static profiled *profile_begin(te__cu_handle function, te__cu_handle stream) {
    profiled *r = &profile_row[num_profiled];
    if (num_profiled == MAX_PROFILED) return NULL;
    if (!r->start) real_driver.EventCreate(&r->start, 0);
    if (!r->end) real_driver.EventCreate(&r->end, 0);
    r->function = function;
    num_profiled++;
    real_driver.EventRecord(r->start, stream);
    return r;
}
static te__cu_result profile_launch(te__cu_handle function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared_bytes,
                                    te__cu_handle stream, void **params, void **extra) {
    profiled *r = profile_begin(function, stream);
    te__cu_result code = real_driver.LaunchKernel(function, gx, gy, gz, bx, by, bz, shared_bytes, stream, params, extra);
    if (r) real_driver.EventRecord(r->end, stream);
    return code;
}
static te__cu_result profile_launch_ex(const te__cu_launch_config *config, te__cu_handle function, void **params, void **extra) {
    profiled *r = profile_begin(function, config->stream);
    te__cu_result code = real_driver.LaunchKernelEx(config, function, params, extra);
    if (r) real_driver.EventRecord(r->end, config->stream);
    return code;
}

static void profile_name(te__cu_handle function, char text[TE__LAUNCH_TEXT]) {
    int i;
    snprintf(text, TE__LAUNCH_TEXT, "?");
    for (i = 0; i < TE__JIT_BUCKETS; i++) {
        const te__jit_entry *e;
        for (e = te__jit_table[i]; e; e = e->next)
            if (e->function == function) {
                te__launch l = TE_ZERO;
                l.family = e->family;
                l.kernel = e->kernel;
                l.num_options = e->num_options;
                memcpy(l.option, e->option, sizeof l.option);
                te__launch_text(&l, text);
                return;
            }
    }
}

/* One run with an event before and after each launch; launches of the same kernel are added up, longest first. Copies and fills by the driver
 * are none. The time of the whole also counts the gaps between the launches: the events themselves, or a GPU that waits for the host. */
static void profile(bench *b, work_fn work, void *arg) {
    typedef struct total {
        te__cu_handle function;
        double seconds;
        int launches;
    } total;
    static total totals[256];
    int i, k, count = 0;
    double sum = 0, whole;
    bool pushed;
    if (te__cuda_enter(b->te, &pushed) != TE_OK) return;
    real_driver = te__cu;
    num_profiled = 0;
    te__cu.LaunchKernel = profile_launch;
    if (te__cu.LaunchKernelEx) te__cu.LaunchKernelEx = profile_launch_ex;
    real_driver.EventRecord(b->start, b->te->cuda->stream);
    work(b, arg);
    real_driver.EventRecord(b->end, b->te->cuda->stream);
    te__cu = real_driver;
    te_synchronize(b->te);
    {
        float milliseconds = 0;
        te__cu.EventElapsedTime(&milliseconds, b->start, b->end);
        whole = milliseconds * 1e-3;
    }
    for (i = 0; i < num_profiled; i++) {
        float milliseconds = 0;
        te__cu.EventElapsedTime(&milliseconds, profile_row[i].start, profile_row[i].end);
        for (k = 0; k < count && totals[k].function != profile_row[i].function; k++) continue;
        if (k == (int)(sizeof totals / sizeof *totals)) continue;
        if (k == count) {
            memset(&totals[k], 0, sizeof totals[k]);
            totals[count++].function = profile_row[i].function;
        }
        totals[k].seconds += milliseconds * 1e-3;
        totals[k].launches++;
        sum += milliseconds * 1e-3;
    }
    te__cuda_leave(pushed);
    for (i = 1; i < count; i++) /* insertion sort */
        for (k = i; k > 0 && totals[k].seconds > totals[k - 1].seconds; k--) {
            total t = totals[k];
            totals[k] = totals[k - 1];
            totals[k - 1] = t;
        }
    for (i = 0; i < count; i++) {
        char text[TE__LAUNCH_TEXT];
        profile_name(totals[i].function, text);
        printf("    %9.1f us %5.1f %% %4d x  %s\n", totals[i].seconds * 1e6, 100 * totals[i].seconds / sum, totals[i].launches, text);
    }
    printf("    %9.1f us in %d launches, %.1f us with what is between them\n", sum * 1e6, num_profiled, whole * 1e6);
}

/* ---- cuBLASLt, the denominator ---- */

enum { LT_R_32F = 0, LT_R_16BF = 14, LT_R_8F_E4M3 = 28, LT_COMPUTE_32F = 68, LT_COMPUTE_TF32 = 77, LT_OP_T = 1, LT_OP_N = 0, LT_TRANSA = 3, LT_TRANSB = 4, LT_FAST_ACCUM = 25,
       LT_EPILOGUE = 7, LT_BIAS = 8, LT_AUX = 11, LT_AUX_LD = 12, LT_WITH_BIAS = 4, LT_WITH_BIAS_GRADIENT = 16, LT_WITH_GELU = 32, LT_WITH_DGELU = 64, LT_WITH_AUX = 128,
       LT_A_SCALE = 17, LT_B_SCALE = 18, LT_A_SCALE_MODE = 31, LT_B_SCALE_MODE = 32, LT_SCALE_SCALAR = 0, LT_SCALE_VEC128 = 4, LT_SCALE_BLOCK128 = 5, LT_MAX_WORKSPACE = 1 };
typedef struct lt_heuristic {
    uint64_t algo[8];
    size_t workspace;
    int status;
    float waves;
    int reserved[4];
} lt_heuristic;
typedef struct cublaslt {
    size_t (*GetVersion)(void);
    int (*Create)(void **handle);
    int (*MatmulDescCreate)(void **desc, int compute, int scale);
    int (*MatmulDescSetAttribute)(void *desc, int attribute, const void *value, size_t bytes);
    int (*MatmulDescDestroy)(void *desc);
    int (*MatrixLayoutCreate)(void **layout, int type, uint64_t rows, uint64_t cols, int64_t ld);
    int (*MatrixLayoutDestroy)(void *layout);
    int (*MatmulPreferenceCreate)(void **preference);
    int (*MatmulPreferenceSetAttribute)(void *preference, int attribute, const void *value, size_t bytes);
    int (*MatmulAlgoGetHeuristic)(void *handle, void *desc, void *a, void *b, void *c, void *d, void *preference, int want, lt_heuristic *out, int *got);
    int (*Matmul)(void *handle, void *desc, const void *alpha, const void *a, void *la, const void *b, void *lb, const void *beta, const void *c, void *lc, void *d,
                  void *ld, const void *algo, void *workspace, size_t bytes, void *stream);
    void *handle;
    te_tensor *workspace;
    char path[1024];
    char version[32];
} cublaslt;

static bool lt_open(cublaslt *lt) {
    te__lib lib;
    te__text tried = TE_ZERO;
    bool ok = te__lib_open(TE__LIB_CUBLASLT, &lib, &tried);
    te__text_free(&tried);
    if (!ok) return false;
    snprintf(lt->path, sizeof lt->path, "%s", lib.path);
#define LT_FUNCTION(name) \
    if (!te__dl_function(lib.handle, "cublasLt" #name, &lt->name)) return false;
    LT_FUNCTION(GetVersion)
    LT_FUNCTION(Create)
    LT_FUNCTION(MatmulDescCreate)
    LT_FUNCTION(MatmulDescSetAttribute)
    LT_FUNCTION(MatmulDescDestroy)
    LT_FUNCTION(MatrixLayoutCreate)
    LT_FUNCTION(MatrixLayoutDestroy)
    LT_FUNCTION(MatmulPreferenceCreate)
    LT_FUNCTION(MatmulPreferenceSetAttribute)
    LT_FUNCTION(MatmulAlgoGetHeuristic)
    LT_FUNCTION(Matmul)
#undef LT_FUNCTION
    snprintf(lt->version, sizeof lt->version, "cuBLASLt %d.%d", (int)(lt->GetVersion() / 10000), (int)(lt->GetVersion() / 100 % 100));
    return lt->Create(&lt->handle) == 0;
}

/* A product of ours, and what cuBLASLt needs to make the same one. */
typedef struct product {
    te_op_gemm_args args;
    void *desc, *la, *lb, *ld;
    lt_heuristic best;
    int status; /* of cuBLASLt's last call */
} product;

static void run_ours(bench *b, void *arg) {
    product *p = (product *)arg;
    te_op_gemm(b->te, &p->args);
}
/* Column-major: D^T = op(B)^T op(A)^T. */
static void run_theirs(bench *b, void *arg) {
    product *p = (product *)arg;
    float one = 1, beta = p->args.accumulate;
    p->status = b->lt->Matmul(b->lt->handle, p->desc, &one, te_tensor_data(p->args.b), p->la, te_tensor_data(p->args.a), p->lb, &beta, te_tensor_data(p->args.d), p->ld,
                              te_tensor_data(p->args.d), p->ld, p->best.algo, te_tensor_data(b->lt->workspace), te_tensor_bytes(b->lt->workspace),
                              te_ctx_cu_stream(b->te));
}

static int lt_type(te_dtype d) { return d == TE_F8E4M3 ? LT_R_8F_E4M3 : d == TE_BF16 ? LT_R_16BF : LT_R_32F; }
static int lt_scale_mode(te_scaling s) { return s == TE_SCALING_BLOCK_1D ? LT_SCALE_VEC128 : s == TE_SCALING_BLOCK_2D ? LT_SCALE_BLOCK128 : LT_SCALE_SCALAR; }

/* Its own name for our epilogue, and what that reads or writes. */
static void lt_epilogue(const cublaslt *lt, product *p) {
    const te_op_gemm_args *g = &p->args;
    int epilogue = g->bias ? LT_WITH_BIAS : g->bias_gradient ? LT_WITH_BIAS_GRADIENT : 0;
    if (g->epilogue) epilogue |= g->epilogue == TE_EPILOGUE_GELU ? LT_WITH_GELU : LT_WITH_DGELU;
    if (g->aux) epilogue |= LT_WITH_AUX;
    if (!epilogue) return;
    lt->MatmulDescSetAttribute(p->desc, LT_EPILOGUE, &epilogue, sizeof epilogue);
    if (g->bias || g->bias_gradient) {
        void *bias = te_tensor_data(g->bias ? g->bias : g->bias_gradient);
        lt->MatmulDescSetAttribute(p->desc, LT_BIAS, &bias, sizeof bias);
    }
    if (g->aux) {
        void *aux = te_tensor_data(g->aux);
        int64_t ld = te__gemm_ld(g->aux);
        lt->MatmulDescSetAttribute(p->desc, LT_AUX, &aux, sizeof aux);
        lt->MatmulDescSetAttribute(p->desc, LT_AUX_LD, &ld, sizeof ld);
    }
}

static bool lt_prepare(bench *b, product *p) {
    const te_op_gemm_args *g = &p->args;
    int ta = g->b_transposed ? LT_OP_T : LT_OP_N, tb = g->a_transposed ? LT_OP_T : LT_OP_N, got = 0, mode_a = lt_scale_mode(g->scaling_b), mode_b = lt_scale_mode(g->scaling_a);
    signed char fast = !g->split_accumulator;
    size_t bytes;
    void *preference = NULL, *scale;
    cublaslt *lt = b->lt;
    if (!lt || lt->MatmulDescCreate(&p->desc, g->a->dtype == TE_F32 ? LT_COMPUTE_TF32 : LT_COMPUTE_32F, LT_R_32F)) return false;
    bytes = te_tensor_bytes(lt->workspace);
    lt->MatmulDescSetAttribute(p->desc, LT_TRANSA, &ta, sizeof ta);
    lt->MatmulDescSetAttribute(p->desc, LT_TRANSB, &tb, sizeof tb);
    if (g->scale_a) {
        lt->MatmulDescSetAttribute(p->desc, LT_FAST_ACCUM, &fast, sizeof fast);
        if (mode_a != LT_SCALE_SCALAR || mode_b != LT_SCALE_SCALAR) { /* older ones do not know these, and fail here */
            p->status = lt->MatmulDescSetAttribute(p->desc, LT_A_SCALE_MODE, &mode_a, sizeof mode_a);
            if (!p->status) p->status = lt->MatmulDescSetAttribute(p->desc, LT_B_SCALE_MODE, &mode_b, sizeof mode_b);
            if (p->status) return false;
        }
        scale = te_tensor_data(g->scale_b);
        lt->MatmulDescSetAttribute(p->desc, LT_A_SCALE, &scale, sizeof scale);
        scale = te_tensor_data(g->scale_a);
        lt->MatmulDescSetAttribute(p->desc, LT_B_SCALE, &scale, sizeof scale);
    }
    lt_epilogue(lt, p);
    lt->MatrixLayoutCreate(&p->la, lt_type(g->b->dtype), (uint64_t)(ta ? g->k : g->n), (uint64_t)(ta ? g->n : g->k), te__gemm_ld(g->b));
    lt->MatrixLayoutCreate(&p->lb, lt_type(g->a->dtype), (uint64_t)(tb ? g->m : g->k), (uint64_t)(tb ? g->k : g->m), te__gemm_ld(g->a));
    lt->MatrixLayoutCreate(&p->ld, lt_type(g->d->dtype), (uint64_t)g->n, (uint64_t)g->m, te__gemm_ld(g->d));
    lt->MatmulPreferenceCreate(&preference);
    lt->MatmulPreferenceSetAttribute(preference, LT_MAX_WORKSPACE, &bytes, sizeof bytes);
    p->status = lt->MatmulAlgoGetHeuristic(lt->handle, p->desc, p->la, p->lb, p->ld, p->ld, preference, 1, &p->best, &got);
    return p->status == 0 && got > 0;
}

/* How far their D is from ours, relative to ours: a denominator has to multiply the same matrices. */
static double lt_difference(bench *b, product *p) {
    te_op_quant_error_args e = TE_ZERO;
    te_op_copy_args copy = TE_ZERO;
    float sums[5] = {1, 0, 0, 0, 0};
    int64_t five = 5, six = 6;
    te_scope_begin(b->te);
    te_tensor_fill(p->args.d, 0);
    run_ours(b, p);
    copy.src = p->args.d;
    copy.dst = te_tensor_empty(b->te, TE_F32, p->args.d->ndim, p->args.d->shape);
    te_op_copy(b->te, &copy);
    te_tensor_fill(p->args.d, 0);
    run_theirs(b, p);
    e.x = p->args.d;
    e.y = copy.dst;
    e.counts = te_tensor_empty(b->te, TE_I64, 1, &six);
    e.sums = te_tensor_empty(b->te, TE_F32, 1, &five);
    te_op_quant_error(b->te, &e);
    te_tensor_to_host(e.sums, sums);
    te_scope_end(b->te);
    return sums[0] > 0 ? sqrt((double)sums[3] / (double)sums[0]) : 1;
}

/* ---- products ---- */

static const int64_t shapes[][3] = {{8192, 8192, 8192}, {4096, 4096, 4096}, {8192, 6144, 4096}, {8192, 4096, 4096}, {8192, 28672, 4096}, {8192, 4096, 14336},
                                    {4096, 14336, 4096}, {16384, 7168, 2048}, {512, 4096, 4096}, {64, 2112, 7168}, {1, 4096, 4096}};
/* A model that writes one word after the other, for one, four, eight or sixteen readers. */
static const int64_t gemv_shapes[][3] = {{1, 4096, 4096}, {1, 14336, 4096}, {1, 4096, 14336}, {1, 128256, 4096}, {4, 14336, 4096}, {8, 14336, 4096}, {16, 14336, 4096}};
/* Llama-8B's projections for a batch of sequences, one id of each. */
static const int64_t batch_shapes[][3] = {{8, 6144, 4096}, {8, 4096, 4096}, {8, 28672, 4096}, {8, 4096, 14336}, {8, 128256, 4096},
                                          {32, 6144, 4096}, {32, 4096, 4096}, {32, 28672, 4096}, {32, 4096, 14336}, {32, 128256, 4096}};
typedef struct shape_list {
    const int64_t (*of)[3];
    int count;
} shape_list;
static const shape_list all_shapes = {shapes, sizeof shapes / sizeof *shapes}, with_gemv = {gemv_shapes, sizeof gemv_shapes / sizeof *gemv_shapes},
                        of_batches = {batch_shapes, sizeof batch_shapes / sizeof *batch_shapes};

static void shape_text(char text[64], int64_t m, int64_t n, int64_t k) { snprintf(text, 64, "%lldx%lldx%lld", (long long)m, (long long)n, (long long)k); }

/* Layout TN, NN or NT, as BLAS calls them seen from D^T: what a forward, dgrad and wgrad are. Quantized operands are always TN. */
typedef enum layout { TN, NN, NT } layout;

/* A and B, normally distributed and quantized, and D, in the scope that is open. False: an error is recorded. */
static bool product_open(bench *b, product *p, te_quant_kind kind, bool b_2d, layout l, te_dtype in, te_dtype out, int64_t m, int64_t n, int64_t k) {
    int64_t sa[2], sb[2], sd[2];
    te_tensor *x[2];
    int i;
    memset(p, 0, sizeof *p);
    sa[l == NT] = m, sa[l != NT] = k;
    sb[l != TN] = n, sb[l == TN] = k;
    sd[0] = m, sd[1] = n;
    x[0] = te_tensor_normal(b->te, in, 2, sa, 0, 1);
    x[1] = te_tensor_normal(b->te, in, 2, sb, 0, 1);
    for (i = 0; i < 2 && kind; i++) {
        te__quant_spec spec;
        memset(&spec, 0, sizeof spec);
        spec.cls = te__quant_class_of(kind);
        spec.dtype = kind == TE_QUANT_NVFP4 ? TE_F4E2M1 : TE_F8E4M3;
        spec.usage = TE_ROWWISE;
        spec.two_dimensional = kind == TE_QUANT_BLOCK && i == 1 && b_2d;
        x[i] = x[i] ? te__quantize(x[i], &spec) : NULL;
    }
    p->args.d = te_tensor_empty(b->te, out, 2, sd);
    if (!x[0] || !x[1] || !p->args.d) return false;
    p->args.split_accumulator = kind == TE_QUANT_BLOCK;
    return te__product(b->te, x[0], l == NT, x[1], l == TN, &p->args) == TE_OK; /* fills in the rest of args */
}

/* Ratios of one kind of row. */
typedef struct family {
    const char *name;
    double logarithms, least;
    char least_shape[64];
    int count;
} family;

static void family_add(family *f, const char *shape, double ratio) {
    if (ratio <= 0) return;
    if (!f->count++ || ratio < f->least) {
        f->least = ratio;
        snprintf(f->least_shape, sizeof f->least_shape, "%s", shape);
    }
    f->logarithms += log(ratio);
}
static void family_report(const family *f) {
    double mean = f->count ? exp(f->logarithms / f->count) : 0;
    if (!f->count) return;
    printf("%-42s %d shapes: geometric mean %.3f, least %.3f (%s)\n", f->name, f->count, mean, f->least, f->least_shape);
}

/* Short products are measured at several places in memory, all held at once, with gaps of different sizes between them, and the mean counts, so that no
 * figure hangs on one place. */
static int places_of(int64_t m, int64_t n, int64_t k) { return m * k + n * k + m * n <= 1 << 25 ? 8 : 1; }
static void leave_gap(bench *b, int place) { te__empty_1d(b->te, TE_U8, (int64_t)(2 * place + 1) << 18); }

/* Against cuBLASLt. */
static void bench_product(bench *b, family *f, te_quant_kind kind, bool b_2d, layout l, te_dtype in, te_dtype out, bool split, bool accumulate, int64_t m, int64_t n, int64_t k) {
    product p;
    char shape[64];
    double seconds[2] = {0, 0}, flops = 2.0 * (double)m * (double)n * (double)k, difference;
    int place, places = places_of(m, n, k);
    bool has_theirs = true;
    shape_text(shape, m, n, k);
    te_scope_begin(b->te);
    for (place = 0; place < places && product_open(b, &p, kind, b_2d, l, in, out, m, n, k); place++) {
        double at_place[2] = {0, 0};
        leave_gap(b, place);
        p.args.split_accumulator |= split;
        p.args.accumulate = accumulate;
        if (!lt_prepare(b, &p)) {
            if (b->lt && !place) printf("%-42s %-20s cuBLASLt has no such product (status %d)\n", f->name, shape, p.status);
            at_place[0] = measure(b, run_ours, &p);
        } else if ((difference = lt_difference(b, &p)) > 0.02 || p.status) {
            if (!place) printf("%-42s %-20s cuBLASLt's D is another: status %d, relative difference %.3g\n", f->name, shape, p.status, difference);
            at_place[0] = measure(b, run_ours, &p);
        } else
            measure_both(b, run_ours, &p, run_theirs, &p, at_place);
        seconds[0] += at_place[0] / places;
        seconds[1] += at_place[1] / places;
        has_theirs = has_theirs && at_place[1] > 0;
    }
    if (!has_theirs) seconds[1] = 0;
    if (te_ok(b->te) && seconds[1] > 0) family_add(f, shape, seconds[1] / seconds[0]);
    report_against(b, f->name, shape, seconds[0], flops / seconds[0] * 1e-12, seconds[1] > 0 ? flops / seconds[1] * 1e-12 : 0, "TFLOP/s", "cuBLASLt");
    te_scope_end(b->te);
}

/* One kind of product over all shapes. */
static void bench_products(bench *b, const shape_list *list, const char *name, te_quant_kind kind, bool b_2d, layout l, te_dtype out, bool split, bool accumulate) {
    family f = TE_ZERO;
    int i;
    if (!wanted(b, name)) return;
    f.name = name;
    for (i = 0; i < list->count; i++) bench_product(b, &f, kind, b_2d, l, TE_BF16, out, split, accumulate, list->of[i][0], list->of[i][1], list->of[i][2]);
    family_report(&f);
}

static void bench_gemm(bench *b) {
    int i;
    bench_products(b, &all_shapes, "gemm bf16 TN", TE_QUANT_NONE, false, TN, TE_BF16, false, false);
    bench_products(b, &all_shapes, "gemm bf16 NN", TE_QUANT_NONE, false, NN, TE_BF16, false, false);
    bench_products(b, &all_shapes, "gemm bf16 NT", TE_QUANT_NONE, false, NT, TE_BF16, false, false);
    bench_products(b, &all_shapes, "gemm bf16 TN f32 out", TE_QUANT_NONE, false, TN, TE_F32, false, false);
    bench_products(b, &all_shapes, "gemm bf16 NN f32 out", TE_QUANT_NONE, false, NN, TE_F32, false, false);
    bench_products(b, &all_shapes, "gemm bf16 NT f32 out", TE_QUANT_NONE, false, NT, TE_F32, false, false);
    bench_products(b, &all_shapes, "gemm bf16 NT += f32", TE_QUANT_NONE, false, NT, TE_F32, false, true);
    bench_products(b, &all_shapes, "gemm fp8 fast accumulation", TE_QUANT_CURRENT, false, TN, TE_BF16, false, false);
    bench_products(b, &all_shapes, "gemm fp8 split accumulation", TE_QUANT_CURRENT, false, TN, TE_BF16, true, false);
    bench_products(b, &all_shapes, "gemm fp8 split += f32", TE_QUANT_CURRENT, false, TN, TE_F32, true, true);
    bench_products(b, &all_shapes, "gemm fp8 1x128 by 128x128", TE_QUANT_BLOCK, true, TN, TE_BF16, true, false);
    bench_products(b, &all_shapes, "gemm fp8 1x128 by 1x128 += f32", TE_QUANT_BLOCK, false, TN, TE_F32, true, true);
    static const layout layouts[] = {TN, NN, NT};
    static const char *const names[] = {"gemm f32 as TF32 TN", "gemm f32 as TF32 NN", "gemm f32 as TF32 NT"};
    for (i = 0; i < 3; i++) {
        family f = TE_ZERO;
        if (!wanted(b, names[i])) continue;
        f.name = names[i];
        bench_product(b, &f, TE_QUANT_NONE, false, layouts[i], TE_F32, TE_F32, false, false, 4096, 4096, 4096);
    }
}

/* Two products of ours, alike but for something: `changed` over `plain`. */
static void bench_against_ours(bench *b, family *f, const char *shape, product *changed, product *plain, const char *against) {
    double seconds[2] = {1, 1}, flops = 2.0 * (double)changed->args.m * (double)changed->args.n * (double)changed->args.k;
    measure_both(b, run_ours, changed, run_ours, plain, seconds);
    if (te_ok(b->te)) family_add(f, shape, seconds[1] / seconds[0]);
    report_against(b, f->name, shape, seconds[0], flops / seconds[0] * 1e-12, flops / seconds[1] * 1e-12, "TFLOP/s", against);
}

/* MXFP8 and NVFP4, which are decoded, over our bf16. */
static void bench_decoded(bench *b, const shape_list *list, const char *name, te_quant_kind kind) {
    family f = TE_ZERO;
    int i;
    if (!wanted(b, name)) return;
    f.name = name;
    for (i = 0; i < list->count; i++) {
        const int64_t m = list->of[i][0], n = list->of[i][1], k = list->of[i][2];
        product scaled, plain;
        char shape[64];
        shape_text(shape, m, n, k);
        te_scope_begin(b->te);
        if (product_open(b, &scaled, kind, false, TN, TE_BF16, TE_BF16, m, n, k) && product_open(b, &plain, TE_QUANT_NONE, false, TN, TE_BF16, TE_BF16, m, n, k))
            bench_against_ours(b, &f, shape, &scaled, &plain, "our bf16");
        te_scope_end(b->te);
    }
    family_report(&f);
}

/* A product that quantizes its rows, and the same as calls of their own. */
typedef struct quantizing {
    product p;
    te__gemm_codes codes;
} quantizing;
static void run_quantizing(bench *b, void *arg) { run_ours(b, &((quantizing *)arg)->p); }
static void run_apart(bench *b, void *arg) {
    quantizing *q = (quantizing *)arg;
    te_result result;
    TE__GEMM_QUANTIZE(result, te_op_, b->te, &q->p.args, &q->codes);
    if (result == TE_OK) te_op_gemm(b->te, &q->codes.product);
}
static void bench_quantizing(bench *b, const char *name, te_quant_kind kind) {
    family f = TE_ZERO;
    int i, j;
    if (!wanted(b, name)) return;
    f.name = name;
    for (i = 0; i < with_gemv.count; i++) {
        const int64_t m = with_gemv.of[i][0], n = with_gemv.of[i][1], k = with_gemv.of[i][2];
        int64_t size[2], bytes;
        double seconds[2] = {1, 1}, flops = 2.0 * (double)m * (double)n * (double)k;
        quantizing q;
        char shape[64];
        if (m * k > TE__GEMM_QUANTIZE_NUMBERS) continue; /* two launches */
        size[0] = m, size[1] = k;
        shape_text(shape, m, n, k);
        te_scope_begin(b->te);
        if (product_open(b, &q.p, kind, true, TN, TE_BF16, TE_BF16, m, n, k)) {
            q.p.args.a = te_tensor_normal(b->te, TE_BF16, 2, size, 0, 1);
            q.p.args.scale_a = q.p.args.amax_a = NULL;
            q.p.args.quantize_a = kind == TE_QUANT_NVFP4 ? TE_F4E2M1 : TE_F8E4M3;
            q.p.args.quantize_power_of_two = kind == TE_QUANT_BLOCK;
            te__gemm_codes_init(&q.codes, b->te, &q.p.args);
            for (j = 0; j < 3; j++) {
                te_tensor *memory;
                bytes = q.codes.bytes[j];
                memory = te_tensor_empty(b->te, TE_U8, 1, &bytes);
                q.codes.memory[j].data = memory ? te__data(memory) : NULL;
            }
            measure_both(b, run_quantizing, &q, run_apart, &q, seconds);
            if (te_ok(b->te)) family_add(&f, shape, seconds[1] / seconds[0]);
            report_against(b, f.name, shape, seconds[0], flops / seconds[0] * 1e-12, flops / seconds[1] * 1e-12, "TFLOP/s", "two launches");
        }
        te_scope_end(b->te);
    }
    family_report(&f);
}

/* The cost of cuBLASLt's own epilogue, over its product without one. */
static void bench_their_epilogue(bench *b, family *f, const char *shape, product *changed, product *plain) {
    double seconds[2] = {1, 1}, flops = 2.0 * (double)changed->args.m * (double)changed->args.n * (double)changed->args.k, difference;
    if (!b->lt || !te_ok(b->te)) return;
    if (!lt_prepare(b, plain) || !lt_prepare(b, changed)) {
        printf("%-42s %-20s cuBLASLt has no such product (status %d)\n", f->name, shape, changed->status);
        return;
    }
    if ((difference = lt_difference(b, changed)) > 0.02 || changed->status) {
        printf("%-42s %-20s cuBLASLt's D is another: status %d, relative difference %.3g\n", f->name, shape, changed->status, difference);
        return;
    }
    measure_both(b, run_theirs, changed, run_theirs, plain, seconds);
    if (te_ok(b->te)) family_add(f, shape, seconds[1] / seconds[0]);
    report_against(b, f->name, shape, seconds[0], flops / seconds[0] * 1e-12, flops / seconds[1] * 1e-12, "TFLOP/s", "cuBLASLt without it");
}

/* The cost of an epilogue, over the same product without it. */
static void bench_epilogues(bench *b) {
    enum { BIAS, GELU, DGELU, DGELU_BIAS_GRADIENT, EPILOGUES };
    static const char *const epilogue[EPILOGUES] = {"bias", "bias, GELU, aux", "dGELU", "dGELU, bias gradient"};
    static const struct {
        const char *name;
        te_quant_kind kind;
        layout backward;
    } operands[] = {{"bf16", TE_QUANT_NONE, NN}, {"fp8", TE_QUANT_CURRENT, TN}, {"fp8 blocks", TE_QUANT_BLOCK, TN}};
    static const int64_t sizes[][3] = {{8192, 14336, 4096}, {8192, 16384, 4096}, {8192, 4096, 4096}};
    int o, e, i;
    for (o = 0; o < 3; o++)
        for (e = 0; e < EPILOGUES; e++) {
            family f = TE_ZERO, theirs = TE_ZERO;
            char name[96], their_name[112];
            snprintf(name, sizeof name, "epilogue %s: %s", operands[o].name, epilogue[e]);
            snprintf(their_name, sizeof their_name, "%s (cuBLASLt)", name);
            f.name = name;
            theirs.name = their_name;
            for (i = 0; i < 3 && wanted(b, name); i++) {
                const int64_t m = sizes[i][0], n = sizes[i][1], k = sizes[i][2];
                product plain, p;
                char shape[64];
                shape_text(shape, m, n, k);
                te_scope_begin(b->te);
                if (product_open(b, &plain, operands[o].kind, true, e < DGELU ? TN : operands[o].backward, TE_BF16, TE_BF16, m, n, k)) {
                    p = plain;
                    if (e < DGELU) p.args.bias = te_tensor_normal(b->te, TE_BF16, 1, &n, 0, 1);
                    if (e != BIAS) p.args.aux = te_tensor_normal(b->te, TE_BF16, 2, plain.args.d->shape, 0, 1);
                    p.args.epilogue = e == BIAS ? TE_EPILOGUE_NONE : e == GELU ? TE_EPILOGUE_GELU : TE_EPILOGUE_DGELU;
                    if (e == DGELU_BIAS_GRADIENT) p.args.bias_gradient = te__empty_1d(b->te, TE_BF16, n);
                    bench_against_ours(b, &f, shape, &p, &plain, "without it");
                    bench_their_epilogue(b, &theirs, shape, &p, &plain);
                }
                te_scope_end(b->te);
            }
            family_report(&f);
            family_report(&theirs);
        }
}

static const int64_t odd[][3] = {{4095, 4097, 4095}, {1, 1, 1}, {3, 5, 7}, {17, 33, 65}, {127, 129, 255}, {1, 4095, 4097}, {4097, 1, 4095}, {63, 2111, 7167}, {511, 4095, 4095}, {1000, 1000, 1000},
                                 {4096, 4096, 4095}, {4096, 4095, 4096}, {4095, 4096, 4096}, {8191, 6145, 4097}, {8192, 50257, 768}, {3000, 3000, 3000}, {4096, 4096, 4104}, {8192, 6144, 4104}};
static const shape_list odd_shapes = {odd, sizeof odd / sizeof *odd};

/* Small and odd shapes, over the next multiples of 128 (k: 64): the padded shape's time over this one's. And over cuBLASLt, where it has them. */
static void bench_odd(bench *b) {
    static const struct {
        const char *name;
        te_quant_kind kind;
        layout l;
        bool split;
    } kinds[] = {{"odd bf16 TN", TE_QUANT_NONE, TN, false}, {"odd bf16 NN", TE_QUANT_NONE, NN, false}, {"odd bf16 NT", TE_QUANT_NONE, NT, false},
                 {"odd fp8 fast", TE_QUANT_CURRENT, TN, false}, {"odd fp8 split", TE_QUANT_CURRENT, TN, true}, {"odd fp8 blocks", TE_QUANT_BLOCK, TN, true}};
    int i, kind;
    for (kind = 0; kind < (int)(sizeof kinds / sizeof *kinds); kind++) {
        family f = TE_ZERO;
        f.name = kinds[kind].name;
        for (i = 0; i < (int)(sizeof odd / sizeof *odd) && wanted(b, f.name); i++) {
            const int64_t m = odd[i][0], n = odd[i][1], k = odd[i][2];
            product p, padded;
            char shape[64];
            double seconds[2] = {0, 0};
            int place, places = places_of(m, n, k);
            shape_text(shape, m, n, k);
            te_scope_begin(b->te);
            for (place = 0; place < places; place++) {
                double at_place[2] = {0, 0};
                int turn;
                bool both = true;
                for (turn = 0; turn < 2 && both; turn++) { /* every second time the padded one lies in front */
                    product *one = (turn + place) % 2 ? &padded : &p;
                    int64_t unit = one == &padded ? 128 : 1, unit_k = one == &padded ? 64 : 1;
                    both = product_open(b, one, kinds[kind].kind, true, kinds[kind].l, TE_BF16, TE_BF16, te__round_up(m, unit), te__round_up(n, unit), te__round_up(k, unit_k));
                    one->args.split_accumulator |= kinds[kind].split;
                }
                if (!both) break;
                leave_gap(b, place);
                measure_both(b, run_ours, &p, run_ours, &padded, at_place);
                seconds[0] += at_place[0] / places;
                seconds[1] += at_place[1] / places;
            }
            if (te_ok(b->te)) family_add(&f, shape, seconds[1] / seconds[0]);
            report_against(b, f.name, shape, seconds[0], 1e-3 / seconds[0], 1e-3 / seconds[1], "per ms", "padded");
            te_scope_end(b->te);
        }
        family_report(&f);
        if (f.count) printf("%-42s at most %.2f times the padded shape's time\n", f.name, 1 / f.least);
    }
    bench_products(b, &odd_shapes, "odd bf16 TN against cuBLASLt", TE_QUANT_NONE, false, TN, TE_BF16, false, false);
    bench_products(b, &odd_shapes, "odd bf16 NN against cuBLASLt", TE_QUANT_NONE, false, NN, TE_BF16, false, false);
    bench_products(b, &odd_shapes, "odd bf16 NT against cuBLASLt", TE_QUANT_NONE, false, NT, TE_BF16, false, false);
    bench_products(b, &odd_shapes, "odd fp8 fast against cuBLASLt", TE_QUANT_CURRENT, false, TN, TE_BF16, false, false);
}

/* ---- host time of a call ---- */

static void bench_host(bench *b) {
    static const te_quant_kind kinds[] = {TE_QUANT_DELAYED, TE_QUANT_CURRENT, TE_QUANT_BLOCK, TE_QUANT_MXFP8, TE_QUANT_NVFP4};
    enum { CALLS = 100, ROUNDS = 15 };
    static const int64_t sizes[] = {256, 4096}; /* the GPU idle, and busy all the time */
    int i, k, round, s;
    if (!wanted(b, "host time of a quantizer call")) return;
    { /* the driver's own share: the same kernel, planned once */
        te__plan *p = (te__plan *)malloc(sizeof *p);
        te_op_fill_args fill = TE_ZERO;
        te__cu_handle function;
        float times[ROUNDS];
        bool pushed;
        fill.dst = b->flushed;
        if (p && te_op_fill(b->te, &fill) == TE_OK && te__cuda_enter(b->te, &pushed) == TE_OK) {
            te__cuda_plan(b->te, p, &te__ops[TE_OP_FILL], &fill);
            te__jit_get(b->te, &p->launch[0], p->baseline, &function);
            for (round = 0; round < ROUNDS; round++) {
                double began;
                te_synchronize(b->te);
                began = te__time_now();
                for (k = 0; k < CALLS; k++) te__cuda_launch(b->te, &p->launch[0], function);
                times[round] = (float)((te__time_now() - began) / CALLS);
            }
            te__plan_end(p);
            te__cuda_leave(pushed);
            qsort(times, ROUNDS, sizeof(float), by_value);
            report(b, "host time of a quantizer call", "a launch alone", (double)times[ROUNDS / 2], (double)times[ROUNDS / 2] * 1e6, "us");
        }
        free(p);
    }
    for (i = 0; i < 5; i++)
        for (s = 0; s < 2; s++) {
            te_quantizer_desc desc = TE_ZERO;
            te_quantizer *q;
            te_tensor *x, *y;
            int64_t shape[2];
            float times[ROUNDS];
            char text[64];
            shape[0] = shape[1] = sizes[s];
            desc.kind = kinds[i];
            te_scope_begin(b->te);
            q = te_quantizer_create(b->te, &desc);
            x = te_tensor_normal(b->te, TE_BF16, 2, shape, 0, 1);
            y = q ? te_quantize(q, x) : NULL;
            for (round = 0; round < ROUNDS && y; round++) {
                double began;
                te_synchronize(b->te);
                began = te__time_now();
                for (k = 0; k < CALLS; k++) te_quantize_into(q, x, y, NULL);
                times[round] = (float)((te__time_now() - began) / CALLS);
            }
            if (!y) times[ROUNDS / 2] = 0;
            else qsort(times, ROUNDS, sizeof(float), by_value);
            snprintf(text, sizeof text, "%s %dx%d", te__quant_class_of(kinds[i])->name, (int)sizes[s], (int)sizes[s]);
            report(b, "host time of a quantizer call", text, (double)times[ROUNDS / 2], (double)times[ROUNDS / 2] * 1e6, "us");
            te_quantizer_destroy(q);
            te_scope_end(b->te);
        }
}

/* ---- host time of raw operations, a layer and a graph ---- */

typedef struct host_calls {
    te_ctx *te;
    te_op_gemm_args gemm;
    te_norm_fwd_args norm;
    te_norm_bwd_args norm_bwd;
    te_op_act_fwd_args act;
    te_op_act_bwd_args act_bwd;
    te_op_attn_fwd_args attn;
    te_op_attn_bwd_args attn_bwd;
    te_tensor *x;
    te_module *layer;
    te_optimizer *adam; /* NULL: forward and backward alone */
    te_recipe recipe;
    bool quantized;
    te_graph *graph;
    te_module *core; /* an attention's child `sdpa` */
    te_tensor *heads; /* [b, s, H, d] */
} host_calls;
typedef void (*host_fn)(host_calls *h);

static void host_gemm(host_calls *h) { te_op_gemm(h->te, &h->gemm); }
static void host_norm(host_calls *h) { te_op_rmsnorm_fwd(h->te, &h->norm); }
static void host_norm_bwd(host_calls *h) { te_op_rmsnorm_bwd(h->te, &h->norm_bwd); }
static void host_act(host_calls *h) { te_op_act_fwd(h->te, &h->act); }
static void host_act_bwd(host_calls *h) { te_op_act_bwd(h->te, &h->act_bwd); }
static void host_attn(host_calls *h) { te_op_attn_fwd(h->te, &h->attn); }
static void host_attn_bwd(host_calls *h) { te_op_attn_bwd(h->te, &h->attn_bwd); }
static void host_upload(host_calls *h) {
    float numbers[64] = TE_ZERO;
    te_tensor_copy_from_host(h->x, numbers);
}
static void host_core(host_calls *h) {
    te_forward_args args = TE_ZERO;
    args.input = args.key = args.value = h->heads;
    te_scope_begin(h->te);
    te_forward_with(h->core, &args);
    te_scope_end(h->te);
}
static void host_graph(host_calls *h) { te_graph_launch(h->graph); }
static void host_layer(host_calls *h) {
    te_autocast_desc cast = TE_ZERO;
    te_tensor *y;
    cast.recipe = &h->recipe;
    cast.disabled = !h->quantized;
    te_scope_begin(h->te);
    te_autocast_begin(h->te, &cast);
    y = te_forward(h->layer, h->x);
    te_autocast_end(h->te);
    te_backward_from(y, h->x);
    if (h->adam)
        te_optimizer_step(h->adam);
    else
        te_module_zero_grad(h->layer);
    te_tensor_zero_grad(h->x);
    te_scope_end(h->te);
}

/* Median seconds of one call: of the host, while the GPU has little to do or, `whole`, of both. Few calls at a time, so that none waits for
 * room in a queue of the driver. */
static double host_time(host_calls *h, host_fn call, int calls, bool whole) {
    enum { ROUNDS = 9 };
    float times[ROUNDS];
    int round, k;
    for (k = 0; k < 3; k++) call(h);
    for (round = 0; round < ROUNDS; round++) {
        double began;
        te_synchronize(h->te);
        began = te__time_now();
        for (k = 0; k < calls; k++) call(h);
        if (whole) te_synchronize(h->te);
        times[round] = (float)((te__time_now() - began) / calls);
    }
    te_synchronize(h->te);
    qsort(times, ROUNDS, sizeof(float), by_value);
    return (double)times[ROUNDS / 2];
}
static int host_launches(host_calls *h, host_fn call) {
    uint64_t before = te_jit_get_stats(h->te).launches;
    call(h);
    return (int)(te_jit_get_stats(h->te).launches - before);
}

/* The core of a language model's layer, and the same with DotProductAttention injected. */
static void bench_injected_call(bench *b, const char *what, host_calls *h) {
    const int64_t shape[4] = {1, 64, 8, 64};
    te_causal_lm_desc d = TE_ZERO;
    te_module *m;
    int injected;
    d.vocab_size = d.hidden_size = d.intermediate_size = 512;
    d.num_hidden_layers = 1;
    d.num_attention_heads = 8;
    m = te_causal_lm_create(b->te, &d);
    h->core = te_module_find(m, "model.layers.0.self_attn.sdpa");
    h->heads = te_tensor_normal(b->te, TE_BF16, 4, shape, 0, 1);
    for (injected = 0; injected < 2; injected++) {
        double seconds;
        if (injected) te_inject_te_attention(m, NULL);
        seconds = host_time(h, host_core, 100, false);
        report(b, what, injected ? "attention core, injected (1)" : "attention core (1)", seconds, seconds * 1e6, "us");
    }
    te_module_destroy(m);
}

static void bench_host_calls(bench *b) {
    static const char what[] = "host time of a call";
    static const struct {
        const char *name;
        host_fn call;
    } raw[] = {{"te_op_gemm bf16", host_gemm}, {"te_op_rmsnorm_fwd", host_norm}, {"te_op_rmsnorm_bwd", host_norm_bwd}, {"te_op_act_fwd", host_act}, {"te_op_act_bwd", host_act_bwd},
               {"te_op_attn_fwd", host_attn}, {"te_op_attn_bwd", host_attn_bwd}, {"copy_from_host", host_upload}};
    const int64_t heads[4] = {64, 1, 8, 64}, lse[3] = {1, 8, 64};
    int64_t n = 512, small = 64, shape[2];
    host_calls h = TE_ZERO;
    int i;
    if (!wanted(b, what)) return;
    te_scope_begin(b->te);
    h.te = b->te;
    shape[0] = shape[1] = n;
    h.gemm.a = te_tensor_normal(b->te, TE_BF16, 2, shape, 0, 1);
    h.gemm.b = te_tensor_normal(b->te, TE_BF16, 2, shape, 0, 1);
    h.gemm.d = te_tensor_empty(b->te, TE_BF16, 2, shape);
    h.gemm.m = h.gemm.n = h.gemm.k = n;
    h.gemm.b_transposed = true;
    h.norm.x = h.norm_bwd.x = h.norm_bwd.dy = h.act.x = h.act_bwd.x = h.act_bwd.dy = h.gemm.a;
    h.norm.gamma = h.norm_bwd.gamma = te_tensor_full(b->te, TE_BF16, 1, &n, 1.0);
    h.norm.y = h.act.y = h.act_bwd.dx = h.norm_bwd.dx = h.gemm.d;
    h.norm_bwd.rstd = h.norm.rstd = te_tensor_empty(b->te, TE_F32, 1, &n);
    h.norm_bwd.dgamma = te_tensor_empty(b->te, TE_BF16, 1, &n);
    h.act.activation = h.act_bwd.activation = TE_GELU;
    h.attn.q = h.attn.k = h.attn.v = h.attn_bwd.q = h.attn_bwd.k = h.attn_bwd.v = h.attn_bwd.d_o = te_tensor_normal(b->te, TE_BF16, 4, heads, 0, 1);
    h.attn_bwd.o = h.attn.o = te_tensor_empty(b->te, TE_BF16, 4, heads);
    h.attn_bwd.lse = h.attn.lse = te_tensor_empty(b->te, TE_F32, 3, lse);
    h.attn_bwd.dq = te_tensor_empty(b->te, TE_BF16, 4, heads);
    h.attn_bwd.dk = te_tensor_empty(b->te, TE_BF16, 4, heads);
    h.attn_bwd.dv = te_tensor_empty(b->te, TE_BF16, 4, heads);
    h.x = te_tensor_empty(b->te, TE_F32, 1, &small);
    for (i = 0; i < (int)(sizeof raw / sizeof *raw); i++) {
        int launches = host_launches(&h, raw[i].call);
        double seconds = host_time(&h, raw[i].call, 100, false);
        char text[64];
        snprintf(text, sizeof text, "%s (%d)", raw[i].name, launches);
        report(b, what, text, seconds, seconds * 1e6, "us");
    }
    bench_injected_call(b, what, &h);
    te_scope_end(b->te);
}

/* A training step of one layer by calls and by a graph: what it costs the host for each launch, and the whole. */
static void bench_steps(bench *b, const char *size, int64_t hidden, int64_t ffn, int heads, int groups, int64_t s, int64_t batch) {
    static const char what[] = "step of a layer";
    const bool launch_bound = s * batch < 1024; /* the GPU waits for the host */
    static const char *const names[] = {"bf16", "delayed", "current", "block", "mxfp8", "nvfp4"};
    static te_recipe (*const recipes[])(void) = {te_recipe_current_scaling, te_recipe_delayed_scaling, te_recipe_current_scaling, te_recipe_block_scaling,
                                                 te_recipe_mxfp8, te_recipe_nvfp4};
    te_transformer_layer_desc layer = TE_ZERO;
    host_calls h = TE_ZERO;
    int64_t shape[3];
    int i;
    if (!wanted(b, what)) return;
    te_scope_begin(b->te);
    layer.hidden_size = hidden;
    layer.ffn_hidden_size = ffn;
    layer.attention.num_attention_heads = heads;
    layer.attention.num_gqa_groups = groups;
    layer.norm.normalization = TE_RMSNORM;
    layer.activation = TE_SWIGLU;
    layer.gemm.no_bias = true;
    h.te = b->te;
    h.layer = te_transformer_layer_create(b->te, &layer);
    shape[0] = s;
    shape[1] = batch;
    shape[2] = hidden;
    h.x = te_tensor_set_requires_grad(te_tensor_normal(b->te, TE_BF16, 3, shape, 0, 1), true);
    for (i = 0; i < 6; i++) {
        double seconds, calls;
        char text[64];
        int launches;
        h.recipe = recipes[i]();
        h.quantized = i > 0;
        h.adam = te_fused_adam_create(b->te, h.layer, NULL);
        host_layer(&h);
        launches = host_launches(&h, host_layer);
        if (launch_bound) {
            seconds = host_time(&h, host_layer, 3, false) / launches;
            snprintf(text, sizeof text, "%s %s host/launch", size, names[i]);
            report(b, what, text, seconds, seconds * 1e6, "us");
        }
        calls = host_time(&h, host_layer, launch_bound ? 20 : 4, true);
        snprintf(text, sizeof text, "%s %s by calls", size, names[i]);
        report(b, what, text, calls, calls * 1e6, "us");
        te_graph_begin(b->te);
        host_layer(&h);
        h.graph = te_graph_end(b->te);
        if (launch_bound) {
            seconds = host_time(&h, host_graph, 3, false);
            snprintf(text, sizeof text, "%s %s graph, host", size, names[i]);
            report(b, what, text, seconds, seconds * 1e6, "us");
        }
        seconds = host_time(&h, host_graph, launch_bound ? 20 : 4, true);
        snprintf(text, sizeof text, "%s %s graph of %d", size, names[i], launches);
        report_against(b, what, text, seconds, seconds * 1e6, calls * 1e6, "us", "calls");
        te_graph_destroy(h.graph);
        te_optimizer_destroy(h.adam);
    }
    te_module_destroy(h.layer);
    te_scope_end(b->te);
}

/* ---- operations that move memory ---- */

static void run_copy(bench *b, void *arg) {
    te_tensor **x = (te_tensor **)arg;
    bool pushed;
    if (te__cuda_enter(b->te, &pushed) != TE_OK) return;
    te__cu.MemcpyDtoDAsync((te__cu_address)(uintptr_t)te__data(x[1]), (te__cu_address)(uintptr_t)te__data(x[0]), te_tensor_bytes(x[0]), b->te->cuda->stream);
    te__cuda_leave(pushed);
}

typedef struct any_call {
    te_op op;
    te__any_args args;
} any_call;
static void run_call(bench *b, void *arg) { te__run(b->te, ((any_call *)arg)->op, &((any_call *)arg)->args); }

static void bench_call(bench *b, const char *name, const char *shape, any_call *c, double bytes) {
    double seconds = measure(b, run_call, c);
    report_bytes(b, name, shape, seconds, bytes);
}

static void bench_reads(bench *b, const char *name, const char *shape, any_call *c, double bytes) {
    b->reads_only = true;
    bench_call(b, name, shape, c, bytes);
    b->reads_only = false;
}

static te_tensor *normal(bench *b, te_dtype d, int64_t rows, int64_t cols) {
    int64_t shape[2];
    shape[0] = rows;
    shape[1] = cols;
    return te_tensor_normal(b->te, d, 2, shape, 0, 1);
}
static te_tensor *empty(bench *b, te_dtype d, int64_t rows, int64_t cols) { return te__empty_2d(b->te, d, rows, cols); }

/* Bytes are those that must move: each operand once. */
static void bench_memory(bench *b, int64_t m, int64_t n) {
    te_ctx *te = b->te;
    double e = (double)m * (double)n;
    char shape[64];
    any_call c;
    int64_t v[1];
    te_tensor *gamma, *mean, *rstd, *x, *dy, *scale;
    snprintf(shape, sizeof shape, "%lldx%lld bf16", (long long)m, (long long)n);
    te_scope_begin(te);
    v[0] = n;
    gamma = te_tensor_normal(te, TE_BF16, 1, v, 1, 0.1f);
    mean = te__empty_1d(te, TE_F32, m);
    rstd = te__empty_1d(te, TE_F32, m);
    te_tensor_fill(mean, 0);
    te_tensor_fill(rstd, 1);
    scale = te__empty_1d(te, TE_F32, 1);
    te_tensor_fill(scale, 10);
    x = normal(b, TE_BF16, m, n);
    dy = normal(b, TE_BF16, m, n);
#define BENCH(OP, text)           \
    memset(&c, 0, sizeof c);      \
    c.op = TE_OP_##OP;            \
    if (wanted(b, text))
    BENCH(RMSNORM_FWD, "rmsnorm forward") {
        c.args.rmsnorm_fwd.x = x, c.args.rmsnorm_fwd.gamma = gamma, c.args.rmsnorm_fwd.y = dy, c.args.rmsnorm_fwd.rstd = rstd;
        bench_call(b, "rmsnorm forward", shape, &c, e * 4);
    }
    BENCH(RMSNORM_FWD, "rmsnorm forward, f32 weight") {
        c.args.rmsnorm_fwd.x = x, c.args.rmsnorm_fwd.gamma = te_tensor_cast(gamma, TE_F32), c.args.rmsnorm_fwd.y = dy, c.args.rmsnorm_fwd.rstd = rstd;
        bench_call(b, "rmsnorm forward, f32 weight", shape, &c, e * 4);
    }
    BENCH(RMSNORM_FWD, "rmsnorm forward, rounded twice") {
        c.args.rmsnorm_fwd.x = x, c.args.rmsnorm_fwd.gamma = gamma, c.args.rmsnorm_fwd.y = dy, c.args.rmsnorm_fwd.rstd = rstd, c.args.rmsnorm_fwd.rounded = true;
        bench_call(b, "rmsnorm forward, rounded twice", shape, &c, e * 4);
    }
    BENCH(LAYERNORM_FWD, "layernorm forward") {
        c.args.layernorm_fwd.x = x, c.args.layernorm_fwd.gamma = gamma, c.args.layernorm_fwd.beta = gamma, c.args.layernorm_fwd.y = dy;
        c.args.layernorm_fwd.mean = mean, c.args.layernorm_fwd.rstd = rstd;
        bench_call(b, "layernorm forward", shape, &c, e * 4);
    }
    BENCH(RMSNORM_FWD, "rmsnorm forward to e4m3") {
        c.args.rmsnorm_fwd.x = x, c.args.rmsnorm_fwd.gamma = gamma, c.args.rmsnorm_fwd.y = empty(b, TE_F8E4M3, m, n), c.args.rmsnorm_fwd.rstd = rstd;
        c.args.rmsnorm_fwd.scale = scale, c.args.rmsnorm_fwd.scale_inv = te__empty_1d(te, TE_F32, 1), c.args.rmsnorm_fwd.amax = te__empty_1d(te, TE_F32, 1);
        bench_call(b, "rmsnorm forward to e4m3", shape, &c, e * 3);
    }
    BENCH(LAYERNORM_FWD, "layernorm forward to e4m3") {
        c.args.layernorm_fwd.x = x, c.args.layernorm_fwd.gamma = gamma, c.args.layernorm_fwd.beta = gamma, c.args.layernorm_fwd.y = empty(b, TE_F8E4M3, m, n);
        c.args.layernorm_fwd.mean = mean, c.args.layernorm_fwd.rstd = rstd;
        c.args.layernorm_fwd.scale = scale, c.args.layernorm_fwd.scale_inv = te__empty_1d(te, TE_F32, 1), c.args.layernorm_fwd.amax = te__empty_1d(te, TE_F32, 1);
        bench_call(b, "layernorm forward to e4m3", shape, &c, e * 3);
    }
    BENCH(RMSNORM_BWD, "rmsnorm backward") {
        c.args.rmsnorm_bwd.dy = dy, c.args.rmsnorm_bwd.x = x, c.args.rmsnorm_bwd.gamma = gamma, c.args.rmsnorm_bwd.rstd = rstd;
        c.args.rmsnorm_bwd.dx = empty(b, TE_BF16, m, n), c.args.rmsnorm_bwd.dgamma = te__empty_1d(te, TE_BF16, n);
        bench_call(b, "rmsnorm backward", shape, &c, e * 6);
    }
    BENCH(LAYERNORM_BWD, "layernorm backward") {
        c.args.layernorm_bwd.dy = dy, c.args.layernorm_bwd.x = x, c.args.layernorm_bwd.gamma = gamma, c.args.layernorm_bwd.rstd = rstd, c.args.layernorm_bwd.mean = mean;
        c.args.layernorm_bwd.dx = empty(b, TE_BF16, m, n), c.args.layernorm_bwd.dgamma = te__empty_1d(te, TE_BF16, n);
        c.args.layernorm_bwd.dbeta = te__empty_1d(te, TE_BF16, n);
        bench_call(b, "layernorm backward", shape, &c, e * 6);
    }
    BENCH(FP8_QUANTIZE, "quantize e4m3 rowwise") {
        c.args.fp8_quantize.x = x, c.args.fp8_quantize.row = empty(b, TE_F8E4M3, m, n), c.args.fp8_quantize.scale = scale;
        c.args.fp8_quantize.scale_inv = te__empty_1d(te, TE_F32, 1);
        bench_call(b, "quantize e4m3 rowwise", shape, &c, e * 3);
    }
    BENCH(FP8_QUANTIZE, "quantize e4m3 both copies") {
        c.args.fp8_quantize.x = x, c.args.fp8_quantize.row = empty(b, TE_F8E4M3, m, n), c.args.fp8_quantize.col = empty(b, TE_F8E4M3, n, m);
        c.args.fp8_quantize.scale = scale, c.args.fp8_quantize.scale_inv = te__empty_1d(te, TE_F32, 1);
        bench_call(b, "quantize e4m3 both copies", shape, &c, e * 4);
    }
    BENCH(FP8_QUANTIZE, "quantize e4m3 current scaling both copies") { /* x is read twice */
        c.args.fp8_quantize.x = x, c.args.fp8_quantize.row = empty(b, TE_F8E4M3, m, n), c.args.fp8_quantize.col = empty(b, TE_F8E4M3, n, m);
        c.args.fp8_quantize.current = true, c.args.fp8_quantize.scale_inv = te__empty_1d(te, TE_F32, 1);
        bench_call(b, "quantize e4m3 current scaling both copies", shape, &c, e * 6);
    }
    BENCH(FP8_QUANTIZE, "quantize e4m3 known amax both copies") { /* once */
        c.args.fp8_quantize.x = x, c.args.fp8_quantize.row = empty(b, TE_F8E4M3, m, n), c.args.fp8_quantize.col = empty(b, TE_F8E4M3, n, m);
        c.args.fp8_quantize.current = true, c.args.fp8_quantize.scale_inv = te__empty_1d(te, TE_F32, 1), c.args.fp8_quantize.x_amax = te__empty_1d(te, TE_F32, 2);
        te_tensor_fill(c.args.fp8_quantize.x_amax, 0);
        bench_call(b, "quantize e4m3 known amax both copies", shape, &c, e * 4);
    }
    BENCH(FP8_QUANTIZE, "quantize e5m2 both copies, bias") {
        c.args.fp8_quantize.x = x, c.args.fp8_quantize.row = empty(b, TE_F8E5M2, m, n), c.args.fp8_quantize.col = empty(b, TE_F8E5M2, n, m);
        c.args.fp8_quantize.scale = scale, c.args.fp8_quantize.scale_inv = te__empty_1d(te, TE_F32, 1), c.args.fp8_quantize.dbias = te__empty_1d(te, TE_BF16, n);
        bench_call(b, "quantize e5m2 both copies, bias", shape, &c, e * 4);
    }
    BENCH(TRANSPOSE, "transpose e2m1") {
        c.args.transpose.src = empty(b, TE_F4E2M1, m, n), c.args.transpose.dst = empty(b, TE_F4E2M1, n, m);
        c.args.transpose.rows = m, c.args.transpose.columns = n;
        bench_call(b, "transpose e2m1", shape, &c, e);
    }
    BENCH(BLOCK_QUANTIZE, "quantize 1x128 blocks both copies") {
        c.args.block_quantize.x = x, c.args.block_quantize.row = empty(b, TE_F8E4M3, m, n), c.args.block_quantize.col = empty(b, TE_F8E4M3, n, m);
        c.args.block_quantize.row_scale_inv = empty(b, TE_F32, te__div_up(n, 128), te__round_up(m, 4));
        c.args.block_quantize.col_scale_inv = empty(b, TE_F32, te__div_up(m, 128), te__round_up(n, 4));
        bench_call(b, "quantize 1x128 blocks both copies", shape, &c, e * 4 + e / 16);
    }
    BENCH(BLOCK_QUANTIZE, "quantize 128x128 blocks both copies") {
        c.args.block_quantize.x = x, c.args.block_quantize.row = empty(b, TE_F8E4M3, m, n), c.args.block_quantize.col = empty(b, TE_F8E4M3, n, m);
        c.args.block_quantize.row_scale_inv = empty(b, TE_F32, te__div_up(m, 128), te__round_up(te__div_up(n, 128), 4));
        c.args.block_quantize.col_scale_inv = empty(b, TE_F32, te__div_up(n, 128), te__round_up(te__div_up(m, 128), 4));
        c.args.block_quantize.two_dimensional = true;
        bench_call(b, "quantize 128x128 blocks both copies", shape, &c, e * 4);
    }
    BENCH(BLOCK_DEQUANTIZE, "dequantize 1x128 blocks") {
        c.args.block_dequantize.q = empty(b, TE_F8E4M3, m, n), c.args.block_dequantize.y = dy;
        c.args.block_dequantize.scale_inv = normal(b, TE_F32, te__div_up(n, 128), te__round_up(m, 4));
        bench_call(b, "dequantize 1x128 blocks", shape, &c, e * 3 + e / 32);
    }
    BENCH(BLOCK_DEQUANTIZE, "dequantize 128x1 blocks") {
        c.args.block_dequantize.q = empty(b, TE_F8E4M3, n, m), c.args.block_dequantize.y = dy, c.args.block_dequantize.columnwise = true;
        c.args.block_dequantize.scale_inv = normal(b, TE_F32, te__div_up(m, 128), te__round_up(n, 4));
        bench_call(b, "dequantize 128x1 blocks", shape, &c, e * 3 + e / 32);
    }
    BENCH(MXFP8_QUANTIZE, "quantize mxfp8 both copies") {
        c.args.mxfp8_quantize.x = x, c.args.mxfp8_quantize.row = empty(b, TE_F8E4M3, m, n), c.args.mxfp8_quantize.col = empty(b, TE_F8E4M3, m, n);
        c.args.mxfp8_quantize.row_scale = empty(b, TE_F8E8M0, m, n / 32), c.args.mxfp8_quantize.col_scale = empty(b, TE_F8E8M0, m / 32, n);
        bench_call(b, "quantize mxfp8 both copies", shape, &c, e * 4 + e / 16);
    }
    BENCH(MXFP8_QUANTIZE, "quantize mxfp8 rowwise") {
        c.args.mxfp8_quantize.x = x, c.args.mxfp8_quantize.row = empty(b, TE_F8E4M3, m, n), c.args.mxfp8_quantize.row_scale = empty(b, TE_F8E8M0, m, n / 32);
        bench_call(b, "quantize mxfp8 rowwise", shape, &c, e * 3 + e / 32);
    }
    BENCH(MXFP8_DEQUANTIZE, "dequantize mxfp8 columnwise") {
        c.args.mxfp8_dequantize.q = empty(b, TE_F8E4M3, m, n), c.args.mxfp8_dequantize.scale = empty(b, TE_F8E8M0, m / 32, n);
        c.args.mxfp8_dequantize.y = empty(b, TE_BF16, m, n);
        c.args.mxfp8_dequantize.columnwise = true;
        bench_call(b, "dequantize mxfp8 columnwise", shape, &c, e * 3 + e / 32);
    }
    BENCH(NVFP4_AMAX, "nvfp4 amaxes plain and transformed") {
        c.args.nvfp4_amax.x = x, c.args.nvfp4_amax.amax_row = te__empty_1d(te, TE_F32, 1), c.args.nvfp4_amax.amax_col = te__empty_1d(te, TE_F32, 1);
        c.args.nvfp4_amax.rht = true;
        bench_reads(b, "nvfp4 amaxes plain and transformed", shape, &c, e * 2);
    }
    for (int kind = 0; kind < 5; kind++) {
        static const char *const text[] = {"quantize nvfp4 both copies", "quantize nvfp4 both copies transformed", "quantize nvfp4 both copies stochastic", "quantize nvfp4 16x16 both copies", "quantize nvfp4 both copies transformed, its amaxes too"};
        BENCH(NVFP4_QUANTIZE, text[kind]) {
            te_op_nvfp4_quantize_args *a = &c.args.nvfp4_quantize;
            a->x = x, a->row = empty(b, TE_F4E2M1, m, n), a->col = empty(b, TE_F4E2M1, n, m);
            a->row_scale = empty(b, TE_F8E4M3, m, n / 16), a->col_scale = empty(b, TE_F8E4M3, n, m / 16);
            a->amax_row = a->amax_col = te_tensor_full(te, TE_F32, 1, (const int64_t[]){1}, 5);
            a->rht = kind == 1 || kind == 2 || kind == 4, a->stochastic_rounding = kind == 2, a->two_dimensional = kind == 3;
            if (kind == 4) a->measure = true, a->amax_row = te__empty_1d(te, TE_F32, 1), a->amax_col = te__empty_1d(te, TE_F32, 1);
            bench_call(b, text[kind], shape, &c, e * (kind == 4 ? 5 : 3) + e / 8);
        }
    }
    BENCH(AMAX, "amax") {
        c.args.amax.x = x, c.args.amax.amax = te__empty_1d(te, TE_F32, 1);
        bench_reads(b, "amax", shape, &c, e * 2);
    }
    for (int i = 0; i < 3; i++) {
        static const struct {
            const char *forward, *quantized, *backward;
            te_activation activation;
        } row[] = {{"gelu forward", "gelu forward to e4m3", "gelu backward", TE_GELU},
                   {"swiglu forward", "swiglu forward to e4m3", "swiglu backward", TE_SWIGLU},
                   {"geglu forward", "geglu forward to e4m3", "geglu backward", TE_GEGLU}};
        bool gated = te_activation_is_gated(row[i].activation);
        int64_t width = gated ? n / 2 : n;
        double out = gated ? e / 2 : e;
        BENCH(ACT_FWD, row[i].forward) {
            c.args.act_fwd.x = x, c.args.act_fwd.y = empty(b, TE_BF16, m, width), c.args.act_fwd.activation = row[i].activation;
            bench_call(b, row[i].forward, shape, &c, e * 2 + out * 2);
        }
        BENCH(ACT_FWD, row[i].quantized) {
            c.args.act_fwd.x = x, c.args.act_fwd.y = empty(b, TE_F8E4M3, m, width), c.args.act_fwd.activation = row[i].activation;
            c.args.act_fwd.scale = scale, c.args.act_fwd.scale_inv = te__empty_1d(te, TE_F32, 1), c.args.act_fwd.amax = te__empty_1d(te, TE_F32, 1);
            bench_call(b, row[i].quantized, shape, &c, e * 2 + out);
        }
        BENCH(ACT_BWD, row[i].backward) {
            c.args.act_bwd.x = x, c.args.act_bwd.dy = normal(b, TE_BF16, m, width), c.args.act_bwd.dx = empty(b, TE_BF16, m, n), c.args.act_bwd.activation = row[i].activation;
            bench_call(b, row[i].backward, shape, &c, e * 4 + out * 2);
        }
    }
    BENCH(ACT_FWD, "gelu forward") {
        c.args.act_fwd.x = x, c.args.act_fwd.y = empty(b, TE_BF16, m, n), c.args.act_fwd.activation = TE_GELU;
        bench_call(b, "gelu forward", shape, &c, e * 4);
    }
    BENCH(ACT_BWD, "gelu backward") {
        c.args.act_bwd.x = x, c.args.act_bwd.dy = dy, c.args.act_bwd.dx = empty(b, TE_BF16, m, n), c.args.act_bwd.activation = TE_GELU;
        bench_call(b, "gelu backward", shape, &c, e * 6);
    }
    for (int kind = 0; kind < 4; kind++) { /* FP8 by a given scale; the gated ones halve or double what the others keep */
        static const char *const forward[] = {"gelu forward e4m3 rowwise", "gelu forward e4m3 both copies", "swiglu forward e4m3 rowwise", "swiglu forward e4m3 both copies"};
        static const char *const backward[] = {"gelu backward e5m2 both copies", "gelu backward e5m2 both copies, bias", "swiglu backward e5m2 both copies", "gelu backward bf16, bias"};
        te_tensor *scale = te_tensor_full(te, TE_F32, 1, (const int64_t[]){1}, 10);
        BENCH(ACT_FWD, forward[kind]) {
            te_op_act_fwd_args *a = &c.args.act_fwd;
            int64_t wide = kind < 2 ? n : n / 2;
            a->x = x, a->y = empty(b, TE_F8E4M3, m, wide), a->col = kind & 1 ? empty(b, TE_F8E4M3, wide, m) : NULL, a->activation = kind < 2 ? TE_GELU : TE_SWIGLU;
            a->scale = scale, a->scale_inv = te__empty_1d(te, TE_F32, 1), a->amax = te__empty_1d(te, TE_F32, 1);
            te_tensor_fill(a->amax, 0);
            bench_call(b, forward[kind], shape, &c, e * 2 + (double)m * (double)wide * (kind & 1 ? 2 : 1));
        }
        BENCH(ACT_BWD, backward[kind]) {
            te_op_act_bwd_args *a = &c.args.act_bwd;
            te_dtype format = kind == 3 ? TE_BF16 : TE_F8E5M2;
            int64_t wide = kind == 2 ? n / 2 : n;
            a->x = x, a->dy = normal(b, TE_BF16, m, wide), a->dx = empty(b, format, m, n), a->activation = kind == 2 ? TE_SWIGLU : TE_GELU;
            if (kind < 3) a->col = empty(b, format, n, m), a->scale = scale, a->scale_inv = te__empty_1d(te, TE_F32, 1);
            if (kind & 1) a->dbias = te__empty_1d(te, TE_BF16, n);
            a->amax = te__empty_1d(te, TE_F32, 1);
            te_tensor_fill(a->amax, 0);
            bench_call(b, backward[kind], shape, &c, e * 4 + (double)m * (double)wide * 2);
        }
    }
    BENCH(DROPOUT_ADD_FWD, "residual add") {
        c.args.dropout_add_fwd.x = x, c.args.dropout_add_fwd.residual = dy, c.args.dropout_add_fwd.y = empty(b, TE_BF16, m, n);
        bench_call(b, "residual add", shape, &c, e * 6);
    }
    BENCH(COLUMN_SUM, "column sum") {
        c.args.column_sum.x = x, c.args.column_sum.out = te__empty_1d(te, TE_BF16, n);
        bench_reads(b, "column sum", shape, &c, e * 2);
    }
    te_scope_end(te);
}

/* The rest of what moves memory. The table has `vocabulary` rows, of which m are asked for, far from one another. */
static void bench_other_memory(bench *b, int64_t m, int64_t n, int64_t vocabulary) {
    te_ctx *te = b->te;
    double e = (double)m * (double)n, rows = (double)vocabulary * (double)n;
    char shape[64];
    any_call c;
    int64_t heads[4], i;
    enum { PARTS = 64 }; /* tensors of a list */
    te_tensor *x, *y, *wide, *one, *ids, *list[PARTS], *out[PARTS];
    snprintf(shape, sizeof shape, "%lldx%lld bf16", (long long)m, (long long)n);
    te_scope_begin(te);
    x = normal(b, TE_BF16, m, n), y = normal(b, TE_BF16, m, n);
    one = te_tensor_full(te, TE_F32, 1, (const int64_t[]){1}, 1);
    BENCH(COPY, "convert to f32") {
        c.args.copy.src = x, c.args.copy.dst = empty(b, TE_F32, m, n);
        bench_call(b, "convert to f32", shape, &c, e * 6);
    }
    BENCH(COPY, "copy transposed") {
        wide = te_tensor_transpose(empty(b, TE_BF16, n, m), 0, 1);
        c.args.copy.src = wide, c.args.copy.dst = y;
        bench_call(b, "copy transposed", shape, &c, e * 4);
    }
    BENCH(AXPBY, "sum of two") {
        c.args.axpby.x = x, c.args.axpby.y = y, c.args.axpby.out = empty(b, TE_BF16, m, n), c.args.axpby.alpha = c.args.axpby.beta = 1;
        bench_call(b, "sum of two", shape, &c, e * 6);
    }
    BENCH(SUM, "sum of all") {
        c.args.sum.x = x, c.args.sum.out = te__empty_1d(te, TE_F32, 1);
        bench_reads(b, "sum of all", shape, &c, e * 2);
    }
    BENCH(FILL, "fill") { /* writes alone: over a copy's rate of reads and writes */
        c.args.fill.dst = y, c.args.fill.value = 1;
        bench_call(b, "fill", shape, &c, e * 2);
    }
    BENCH(RANDOM, "normal random") {
        c.args.random.dst = y, c.args.random.kind = TE_RANDOM_NORMAL, c.args.random.b = 1;
        bench_call(b, "normal random", shape, &c, e * 2);
    }
    BENCH(TRANSPOSE, "transpose e4m3") {
        c.args.transpose.src = empty(b, TE_F8E4M3, m, n), c.args.transpose.dst = empty(b, TE_F8E4M3, n, m), c.args.transpose.rows = m, c.args.transpose.columns = n;
        bench_call(b, "transpose e4m3", shape, &c, e * 2);
    }
    BENCH(FP8_DEQUANTIZE, "dequantize e4m3") {
        c.args.fp8_dequantize.q = empty(b, TE_F8E4M3, m, n), c.args.fp8_dequantize.scale_inv = one, c.args.fp8_dequantize.y = y;
        bench_call(b, "dequantize e4m3", shape, &c, e * 3);
    }
    BENCH(NVFP4_DEQUANTIZE, "dequantize nvfp4") {
        c.args.nvfp4_dequantize.q = empty(b, TE_F4E2M1, m, n), c.args.nvfp4_dequantize.scale = empty(b, TE_F8E4M3, m, n / 16), c.args.nvfp4_dequantize.amax = one;
        c.args.nvfp4_dequantize.y = y;
        bench_call(b, "dequantize nvfp4", shape, &c, e * 2.5 + e / 16);
    }
    BENCH(ROPE, "rotary embedding") {
        heads[0] = m, heads[1] = 1, heads[2] = n / 128, heads[3] = 128;
        c.args.rope.x = te_tensor_view(x, 4, heads), c.args.rope.y = te_tensor_view(y, 4, heads);
        bench_call(b, "rotary embedding", shape, &c, e * 4);
    }
    BENCH(CONTEXT_MERGE, "attention joins attention") {
        te_op_context_merge_args *a = &c.args.context_merge;
        heads[0] = m, heads[1] = 1, heads[2] = n / 128, heads[3] = 128;
        a->x = te_tensor_view(x, 4, heads), a->o = te_tensor_zeros(te, TE_F32, 4, heads);
        heads[0] = 1, heads[1] = n / 128, heads[2] = m;
        a->x_lse = te_tensor_zeros(te, TE_F32, 3, heads), a->lse = te_tensor_zeros(te, TE_F32, 3, heads);
        bench_call(b, "attention joins attention", shape, &c, e * 10);
    }
    BENCH(MSE_FWD, "mean squared error forward") {
        c.args.mse_fwd.x = x, c.args.mse_fwd.target = y, c.args.mse_fwd.loss = te__empty_1d(te, TE_F32, 1);
        bench_reads(b, "mean squared error forward", shape, &c, e * 4);
    }
    BENCH(MSE_BWD, "mean squared error backward") {
        c.args.mse_bwd.x = x, c.args.mse_bwd.target = y, c.args.mse_bwd.dloss = one, c.args.mse_bwd.dx = empty(b, TE_BF16, m, n);
        bench_call(b, "mean squared error backward", shape, &c, e * 6);
    }
    for (i = 0; i < PARTS; i++) list[i] = normal(b, TE_BF16, 1, m * n / PARTS), out[i] = empty(b, TE_BF16, 1, m * n / PARTS);
    BENCH(L2NORM, "norm of 64 tensors") {
        c.args.l2norm.tensors = (const te_tensor *const *)list, c.args.l2norm.num_tensors = PARTS, c.args.l2norm.norm = te__empty_1d(te, TE_F32, 1);
        bench_reads(b, "norm of 64 tensors", shape, &c, e * 2);
    }
    BENCH(MULTI_SCALE, "64 tensors scaled") {
        c.args.multi_scale.in = (const te_tensor *const *)list, c.args.multi_scale.out = out, c.args.multi_scale.num_tensors = PARTS, c.args.multi_scale.scale = 0.5f;
        bench_call(b, "64 tensors scaled", shape, &c, e * 4);
    }
    snprintf(shape, sizeof shape, "%lld of %lldx%lld bf16", (long long)m, (long long)vocabulary, (long long)n);
    if (wanted(b, "embedding")) {
        int32_t *host = (int32_t *)malloc((size_t)m * sizeof *host);
        ids = te__empty_1d(te, TE_I32, m);
        for (i = 0; host && i < m; i++) host[i] = (int32_t)(i * 7919 % vocabulary);
        if (host && ids) te_tensor_copy_from_host(ids, host);
        free(host);
        wide = normal(b, TE_BF16, vocabulary, n);
        BENCH(EMBEDDING_FWD, "embedding forward") {
            c.args.embedding_fwd.ids = ids, c.args.embedding_fwd.table = wide, c.args.embedding_fwd.y = y;
            bench_call(b, "embedding forward", shape, &c, e * 4);
        }
        BENCH(EMBEDDING_BWD, "embedding backward") { /* all of the table's gradient is written */
            c.args.embedding_bwd.ids = ids, c.args.embedding_bwd.dy = x, c.args.embedding_bwd.dtable = wide;
            bench_call(b, "embedding backward", shape, &c, e * 2 + rows * 2);
        }
    }
    te_scope_end(te);
}

/* A causal mask of s x s: two of its rows, or all of it. */
static void bench_masks(bench *b, int64_t s) {
    static const char *const names[] = {"causal mask, two rows", "causal mask, strict"};
    const int64_t shape[4] = {1, 1, s, s};
    uint16_t *host;
    char text[64];
    any_call c;
    int64_t i;
    int strict;
    if (!wanted(b, names[0]) && !wanted(b, names[1])) return;
    host = (uint16_t *)malloc((size_t)(s * s) * sizeof *host);
    if (!host) return;
    for (i = 0; i < s * s; i++) host[i] = i % s <= i / s ? 0 : 0xFF80; /* -inf in bf16 */
    te_scope_begin(b->te);
    memset(&c, 0, sizeof c);
    c.op = TE_OP_DETECT_CAUSAL_MASK;
    c.args.detect_causal_mask.mask = te_tensor_from_host(b->te, TE_BF16, 4, shape, host);
    c.args.detect_causal_mask.causal = te__empty_1d(b->te, TE_I32, 1);
    free(host);
    snprintf(text, sizeof text, "%lldx%lld bf16", (long long)s, (long long)s);
    for (strict = 0; strict < 2; strict++) {
        c.args.detect_causal_mask.strict = strict != 0;
        if (wanted(b, names[strict])) bench_reads(b, names[strict], text, &c, 2.0 * (double)s * (double)(strict ? s : 2));
    }
    te_scope_end(b->te);
}

/* The most likely ids of the logits of n rows. */
static void bench_argmax(bench *b, int64_t n) {
    const int64_t shape[2] = {n, 128256};
    char text[64];
    any_call c;
    if (!wanted(b, "argmax")) return;
    te_scope_begin(b->te);
    memset(&c, 0, sizeof c);
    c.op = TE_OP_ARGMAX;
    c.args.argmax.x = te_tensor_normal(b->te, TE_BF16, 2, shape, 0, 1);
    c.args.argmax.out = te__empty_1d(b->te, TE_I32, n);
    snprintf(text, sizeof text, "%lldx%lld bf16", (long long)shape[0], (long long)shape[1]);
    bench_reads(b, "argmax", text, &c, 2.0 * (double)(shape[0] * shape[1]));
    te_scope_end(b->te);
}

/* A language model of a billion parameters to bf16 and back: each number is read and written twice, as 4 bytes and as 2. */
static void run_casts(bench *b, void *arg) {
    te_cast_model_desc wide = TE_ZERO;
    (void)b;
    wide.dtype = TE_F32;
    te_cast_model_to_dtype((te_module *)arg, NULL);
    te_cast_model_to_dtype((te_module *)arg, &wide);
}
static void bench_casts(bench *b) {
    static const char what[] = "cast_model_to_dtype";
    te_causal_lm_desc d = TE_ZERO;
    te_module *m;
    char shape[64];
    double elements;
    if (!wanted(b, what)) return;
    d.vocab_size = 128256;
    d.hidden_size = 2048;
    d.intermediate_size = 8192;
    d.num_hidden_layers = 16;
    d.num_attention_heads = 32;
    d.num_key_value_heads = 8;
    d.tie_word_embeddings = true;
    d.params_dtype = TE_F32;
    m = te_causal_lm_create(b->te, &d);
    elements = (double)te_module_num_parameters(m);
    snprintf(shape, sizeof shape, "%.2fe9 f32 bf16 f32", elements * 1e-9);
    report_bytes(b, what, shape, measure(b, run_casts, m), 12.0 * elements);
    te_module_destroy(m);
}

static void bench_adam(bench *b, int tensors, int64_t elements) {
    te_adam_tensor *list;
    any_call c;
    char shape[64];
    int i;
    if (!wanted(b, "adam")) return;
    list = (te_adam_tensor *)calloc((size_t)tensors, sizeof *list);
    if (!list) return;
    te_scope_begin(b->te);
    for (i = 0; i < tensors; i++) {
        list[i].grad = normal(b, TE_BF16, 1, elements);
        list[i].param = normal(b, TE_BF16, 1, elements);
        list[i].m = te_tensor_zeros(b->te, TE_F32, 1, &elements);
        list[i].v = te_tensor_zeros(b->te, TE_F32, 1, &elements);
        list[i].master = normal(b, TE_F32, 1, elements);
    }
    memset(&c, 0, sizeof c);
    c.op = TE_OP_ADAM;
    c.args.adam.tensors = list;
    c.args.adam.num_tensors = tensors;
    c.args.adam.lr = 1e-3f;
    c.args.adam.beta1 = 0.9f;
    c.args.adam.beta2 = 0.999f;
    c.args.adam.eps = 1e-8f;
    c.args.adam.step = 1;
    snprintf(shape, sizeof shape, "%d x %lld", tensors, (long long)elements);
    bench_call(b, "adam bf16 with f32 states", shape, &c, (double)tensors * (double)elements * 28); /* g 2, p 2, m v master read and written 24 */
    te_scope_end(b->te);
    free(list);
}

static void bench_cross_entropy(bench *b, int64_t m, int64_t vocabulary) {
    any_call c;
    char shape[64];
    double e = (double)m * (double)vocabulary;
    if (!wanted(b, "cross-entropy")) return;
    te_scope_begin(b->te);
    te_tensor *logits = normal(b, TE_BF16, m, vocabulary), *target = te_tensor_zeros(b->te, TE_I32, 1, &m), *lse = te__empty_1d(b->te, TE_F32, m);
    snprintf(shape, sizeof shape, "%lldx%lld bf16", (long long)m, (long long)vocabulary);
    memset(&c, 0, sizeof c);
    c.op = TE_OP_CROSS_ENTROPY_FWD;
    c.args.cross_entropy_fwd.logits = logits;
    c.args.cross_entropy_fwd.target = target;
    c.args.cross_entropy_fwd.loss = te__empty_1d(b->te, TE_F32, m);
    c.args.cross_entropy_fwd.lse = lse;
    c.args.cross_entropy_fwd.ignore_index = -100;
    bench_reads(b, "cross-entropy forward", shape, &c, e * 2);
    memset(&c, 0, sizeof c);
    c.op = TE_OP_CROSS_ENTROPY_BWD;
    c.args.cross_entropy_bwd.logits = logits;
    c.args.cross_entropy_bwd.target = target;
    c.args.cross_entropy_bwd.lse = lse;
    c.args.cross_entropy_bwd.dloss = te__empty_1d(b->te, TE_F32, m);
    c.args.cross_entropy_bwd.dlogits = empty(b, TE_BF16, m, vocabulary);
    c.args.cross_entropy_bwd.ignore_index = -100;
    te_tensor_fill((te_tensor *)c.args.cross_entropy_bwd.dloss, 1e-4);
    bench_call(b, "cross-entropy backward", shape, &c, e * 4);
    te_scope_end(b->te);
}

/* FLOPs as FlashAttention counts them: forward 4 b h s^2 d, half of it when causal; backward 2.5 times that. */
static void bench_attention(bench *b, int64_t batch, int64_t heads, int64_t groups, int64_t s, int64_t d, bool causal, bool sbhd) {
    any_call c;
    char shape[64];
    int64_t q[4], kv[4], l[3];
    double flops = 4.0 * (double)batch * (double)heads * (double)s * (double)s * (double)d * (causal ? 0.5 : 1), seconds;
    te_tensor *tq, *tk, *tv, *o, *lse;
    snprintf(shape, sizeof shape, "b%d h%d/%d s%d d%d%s", (int)batch, (int)heads, (int)groups, (int)s, (int)d, causal ? sbhd ? " c sbhd" : " c" : "");
    if (!wanted(b, "attention forward") && !wanted(b, "attention backward") && !wanted(b, shape)) return;
    te_scope_begin(b->te);
    q[!sbhd] = kv[!sbhd] = s, q[sbhd] = kv[sbhd] = batch, q[2] = heads, kv[2] = groups, q[3] = kv[3] = d;
    l[0] = batch, l[1] = heads, l[2] = s;
    tq = te_tensor_normal(b->te, TE_BF16, 4, q, 0, 1), tk = te_tensor_normal(b->te, TE_BF16, 4, kv, 0, 1), tv = te_tensor_normal(b->te, TE_BF16, 4, kv, 0, 1);
    o = te_tensor_empty(b->te, TE_BF16, 4, q), lse = te_tensor_empty(b->te, TE_F32, 3, l);
    memset(&c, 0, sizeof c);
    c.op = TE_OP_ATTN_FWD;
    c.args.attn_fwd.q = tq, c.args.attn_fwd.k = tk, c.args.attn_fwd.v = tv, c.args.attn_fwd.o = o, c.args.attn_fwd.lse = lse;
    c.args.attn_fwd.format = sbhd ? TE_SBHD : TE_BSHD;
    c.args.attn_fwd.rule.mask = causal ? TE_MASK_CAUSAL : TE_MASK_NONE;
    te__sleep(0.04); /* beside_torch.py rests as well */
    seconds = measure(b, run_call, &c);
    if (wanted(b, "attention forward") || wanted(b, shape)) {
        report(b, "attention forward", shape, seconds, flops / seconds * 1e-12, "TFLOP/s");
        seconds = measure_sustained(b, run_call, &c, seconds);
        report(b, "attention forward, sustained", shape, seconds, flops / seconds * 1e-12, "TFLOP/s");
    }
    memset(&c, 0, sizeof c);
    c.op = TE_OP_ATTN_BWD;
    c.args.attn_bwd.q = tq, c.args.attn_bwd.k = tk, c.args.attn_bwd.v = tv, c.args.attn_bwd.o = o, c.args.attn_bwd.lse = lse;
    c.args.attn_bwd.d_o = te_tensor_normal(b->te, TE_BF16, 4, q, 0, 1);
    c.args.attn_bwd.dq = te_tensor_empty(b->te, TE_BF16, 4, q), c.args.attn_bwd.dk = te_tensor_empty(b->te, TE_BF16, 4, kv), c.args.attn_bwd.dv = te_tensor_empty(b->te, TE_BF16, 4, kv);
    c.args.attn_bwd.format = sbhd ? TE_SBHD : TE_BSHD;
    c.args.attn_bwd.rule.mask = causal ? TE_MASK_CAUSAL : TE_MASK_NONE;
    if (wanted(b, "attention backward") || wanted(b, shape)) {
        te__sleep(0.04);
        seconds = measure(b, run_call, &c);
        report(b, "attention backward", shape, seconds, 2.5 * flops / seconds * 1e-12, "TFLOP/s");
        seconds = measure_sustained(b, run_call, &c, seconds);
        report(b, "attention backward, sustained", shape, seconds, 2.5 * flops / seconds * 1e-12, "TFLOP/s");
    }
    te_scope_end(b->te);
}

/* x as codes; *scale_inv becomes their factor. */
static te_tensor *codes_of(bench *b, te_tensor *x, te_dtype dtype, te_tensor **scale_inv) {
    te_op_fp8_quantize_args cast;
    te_tensor *y = te_tensor_empty(b->te, dtype, te_tensor_ndim(x), te_tensor_shape(x));
    const int64_t n = te_tensor_numel(x), shape[2] = {n / te_tensor_shape(x)[3], te_tensor_shape(x)[3]};
    memset(&cast, 0, sizeof cast);
    cast.x = te_tensor_view(x, 2, shape), cast.row = te_tensor_view(y, 2, shape);
    cast.current = true;
    cast.scale_inv = *scale_inv = te__empty_1d(b->te, TE_F32, 1);
    te_op_fp8_quantize(b->te, &cast);
    return y;
}
/* FP8 attention of codes, over our own attention of bf16. */
static void bench_attention_fp8(bench *b, int64_t batch, int64_t heads, int64_t groups, int64_t s, int64_t d, bool causal) {
    static const char *const names[2][2] = {{"fp8 attention forward", "fp8 attention forward, sustained"}, {"fp8 attention backward", "fp8 attention backward, sustained"}};
    const int64_t q[4] = {batch, s, heads, d}, kv[4] = {batch, s, groups, d}, l[3] = {batch, heads, s};
    any_call plain[2], c[2];
    char shape[64];
    te_tensor *x[4];
    te_attn_fp8 *f = &c[0].args.attn_fwd.fp8;
    snprintf(shape, sizeof shape, "b%d h%d/%d s%d d%d%s", (int)batch, (int)heads, (int)groups, (int)s, (int)d, causal ? " c" : "");
    if (!wanted(b, names[0][0]) && !wanted(b, names[1][0])) return;
    te_scope_begin(b->te);
    for (int i = 0; i < 4; i++) x[i] = te_tensor_normal(b->te, TE_BF16, 4, i == 1 || i == 2 ? kv : q, 0, 1);
    memset(plain, 0, sizeof plain);
    plain[0].op = TE_OP_ATTN_FWD;
    plain[0].args.attn_fwd.q = x[0], plain[0].args.attn_fwd.k = x[1], plain[0].args.attn_fwd.v = x[2];
    plain[0].args.attn_fwd.o = te_tensor_empty(b->te, TE_BF16, 4, q), plain[0].args.attn_fwd.lse = te_tensor_empty(b->te, TE_F32, 3, l);
    plain[0].args.attn_fwd.format = TE_BSHD;
    plain[0].args.attn_fwd.rule.mask = causal ? TE_MASK_CAUSAL : TE_MASK_NONE;
    plain[1].op = TE_OP_ATTN_BWD;
    te_op_attn_bwd_args *g = &plain[1].args.attn_bwd;
    g->q = x[0], g->k = x[1], g->v = x[2], g->o = plain[0].args.attn_fwd.o, g->lse = plain[0].args.attn_fwd.lse, g->d_o = x[3];
    g->dq = te_tensor_empty(b->te, TE_BF16, 4, q), g->dk = te_tensor_empty(b->te, TE_BF16, 4, kv), g->dv = te_tensor_empty(b->te, TE_BF16, 4, kv);
    g->format = TE_BSHD, g->rule = plain[0].args.attn_fwd.rule;
    memcpy(c, plain, sizeof c);
    c[0].args.attn_fwd.q = codes_of(b, x[0], TE_F8E4M3, &f->q_scale_inv), c[0].args.attn_fwd.k = codes_of(b, x[1], TE_F8E4M3, &f->k_scale_inv);
    c[0].args.attn_fwd.v = codes_of(b, x[2], TE_F8E4M3, &f->v_scale_inv);
    f->s_dtype = TE_F8E4M3;
    f->s_amax = te__empty_1d(b->te, TE_F32, 1);
    te_tensor_fill(f->s_amax, 0);
    g = &c[1].args.attn_bwd;
    g->q = c[0].args.attn_fwd.q, g->k = c[0].args.attn_fwd.k, g->v = c[0].args.attn_fwd.v, g->fp8 = *f;
    g->d_o = codes_of(b, x[3], TE_F8E5M2, &g->fp8.do_scale_inv);
    g->fp8.dp_dtype = TE_F8E5M2;
    g->fp8.s_scale = te__empty_1d(b->te, TE_F32, 1), g->fp8.dp_scale = te__empty_1d(b->te, TE_F32, 1), g->fp8.dp_amax = te__empty_1d(b->te, TE_F32, 1);
    te_tensor_fill(g->fp8.s_scale, 448), te_tensor_fill(g->fp8.dp_scale, 1000), te_tensor_fill(g->fp8.dp_amax, 0);
    for (int i = 0; i < 2; i++) {
        const double flops = (i ? 10.0 : 4.0) * (double)batch * (double)heads * (double)s * (double)s * (double)d * (causal ? 0.5 : 1);
        if (!wanted(b, names[i][0])) continue;
        run_call(b, &c[0]); /* the backward pass reads o and lse */
        te__sleep(0.04);
        double bf16 = measure(b, run_call, &plain[i]), fp8 = measure(b, run_call, &c[i]);
        report_against(b, names[i][0], shape, fp8, flops / fp8 * 1e-12, flops / bf16 * 1e-12, "TFLOP/s", "our bf16");
        bf16 = measure_sustained(b, run_call, &plain[i], bf16), fp8 = measure_sustained(b, run_call, &c[i], fp8);
        report_against(b, names[i][1], shape, fp8, flops / fp8 * 1e-12, flops / bf16 * 1e-12, "TFLOP/s", "our bf16");
    }
    te_scope_end(b->te);
}

/* Options of attention beside plain attention, at one shape: what each costs. Rates count the products that plain attention has, so that their ratios are those of times. */
typedef struct attention_variant {
    const char *name;
    int64_t batch, s;
    te_attn_bias bias_type;
    int64_t bias[4]; /* sizes; 0: none */
    bool gradient;   /* of the bias */
    const char *score_mod, *bprop, *mask_mod;
    bool blocks, sink, packed;
    float dropout, softcap;
    int64_t window;
} attention_variant;
static const attention_variant attention_variants[] = {
    {.name = "plain", .batch = 4, .s = 4096},
    {.name = "ALiBi", .batch = 4, .s = 4096, .bias_type = TE_ATTN_BIAS_ALIBI},
    {.name = "bias 1,h,s,s", .batch = 4, .s = 4096, .bias_type = TE_ATTN_BIAS_POST_SCALE, .bias = {1, 32, 4096, 4096}},
    {.name = "bias 1,1,s,s", .batch = 4, .s = 4096, .bias_type = TE_ATTN_BIAS_POST_SCALE, .bias = {1, 1, 4096, 4096}},
    {.name = "bias b,1,1,s", .batch = 4, .s = 4096, .bias_type = TE_ATTN_BIAS_POST_SCALE, .bias = {4, 1, 1, 4096}},
    {.name = "dbias 1,h,s,s", .batch = 4, .s = 4096, .bias_type = TE_ATTN_BIAS_POST_SCALE, .bias = {1, 32, 4096, 4096}, .gradient = true},
    {.name = "dbias 1,1,s,s", .batch = 4, .s = 4096, .bias_type = TE_ATTN_BIAS_POST_SCALE, .bias = {1, 1, 4096, 4096}, .gradient = true},
    {.name = "dbias b,1,1,s", .batch = 4, .s = 4096, .bias_type = TE_ATTN_BIAS_POST_SCALE, .bias = {4, 1, 1, 4096}, .gradient = true},
    {.name = "soft cap", .batch = 4, .s = 4096, .softcap = 50},
    {.name = "soft cap, score_mod", .batch = 4, .s = 4096, .score_mod = "50.0f * tanhf(score / 50.0f)", .bprop = "1.0f - tanhf(score / 50.0f) * tanhf(score / 50.0f)"},
    {.name = "score rule", .batch = 4, .s = 4096, .score_mod = "score - 0.01f * fabsf(q_idx - kv_idx)", .bprop = "1.0f"},
    {.name = "documents", .batch = 4, .s = 4096, .mask_mod = "aux0[b * 4096 + q_idx] == aux0[b * 4096 + kv_idx]"},
    {.name = "documents, blocks", .batch = 4, .s = 4096, .mask_mod = "aux0[b * 4096 + q_idx] == aux0[b * 4096 + kv_idx]", .blocks = true},
    {.name = "sink", .batch = 4, .s = 4096, .sink = true},
    {.name = "dropout 0.1", .batch = 4, .s = 4096, .dropout = 0.1f},
    {.name = "packed", .batch = 4, .s = 4096, .packed = true},
    {.name = "plain", .batch = 1, .s = 16384},
    {.name = "window 1024", .batch = 1, .s = 16384, .window = 1024},
};
enum { BENCH_DOCUMENT = 1000 }; /* tokens of a document */
static te_attn_rule attention_variant_rule(bench *b, const attention_variant *v, int64_t heads) {
    te_attn_rule r;
    memset(&r, 0, sizeof r);
    r.mask = v->packed ? TE_MASK_PADDING_CAUSAL : TE_MASK_CAUSAL;
    r.core_attention_bias_type = v->bias_type;
    if (v->bias[0]) r.core_attention_bias = te_tensor_normal(b->te, TE_BF16, 4, v->bias, 0, 1);
    r.score_mod.score_mod = v->score_mod, r.score_mod.score_mod_bprop = v->bprop, r.score_mod.mask_mod = v->mask_mod;
    if (v->mask_mod) {
        const int64_t blocks = v->s / TE_ATTN_BLOCK_SIZE;
        int32_t *document = (int32_t *)calloc((size_t)(v->batch * v->s), sizeof(int32_t));
        uint8_t *kinds = (uint8_t *)calloc((size_t)(blocks * blocks), 1);
        for (int64_t i = 0; i < v->batch * v->s; i++) document[i] = (int32_t)(i % v->s / BENCH_DOCUMENT);
        for (int64_t i = 0; i < blocks; i++)
            for (int64_t j = 0; j < blocks; j++) {
                const int64_t n = TE_ATTN_BLOCK_SIZE, first = i * n / BENCH_DOCUMENT, last = (i * n + n - 1) / BENCH_DOCUMENT, from = j * n / BENCH_DOCUMENT, to = (j * n + n - 1) / BENCH_DOCUMENT;
                kinds[i * blocks + j] = (uint8_t)(last < from || to < first ? TE_ATTN_BLOCK_EMPTY : first == last && from == to ? TE_ATTN_BLOCK_FULL : TE_ATTN_BLOCK_PARTIAL);
            }
        r.score_mod.aux[0] = te_tensor_from_host(b->te, TE_I32, 2, (int64_t[]){v->batch, v->s}, document);
        if (v->blocks) r.block_mask = te_tensor_from_host(b->te, TE_U8, 4, (int64_t[]){1, 1, blocks, blocks}, kinds);
        free(document), free(kinds);
    }
    if (v->sink) r.softmax_type = TE_SOFTMAX_LEARNABLE, r.softmax_offset = te_tensor_zeros(b->te, TE_F32, 1, &heads);
    if (v->packed) {
        int32_t starts[9];
        int64_t n = v->batch + 1;
        for (int64_t i = 0; i < n; i++) starts[i] = (int32_t)(i * v->s);
        r.cu_seqlens_q = r.cu_seqlens_kv = te_tensor_from_host(b->te, TE_I32, 1, &n, starts);
        r.max_seqlen_q = r.max_seqlen_kv = v->s;
    }
    r.dropout_p = v->dropout;
    r.softcap = v->softcap;
    r.window.on = v->window != 0, r.window.left = v->window, r.window.right = 0;
    return r;
}
static void bench_attention_variants(bench *b) {
    static const char forward[] = "attention variants, forward", backward[] = "attention variants, backward";
    const int64_t heads = 32, groups = 8, d = 128;
    for (int i = 0; i < (int)(sizeof attention_variants / sizeof *attention_variants); i++) {
        const attention_variant *v = &attention_variants[i];
        const double flops = 2.0 * (double)v->batch * (double)heads * (double)v->s * (double)v->s * (double)d; /* causal: half */
        int64_t q[4], kv[4], l = v->batch * heads * v->s;
        any_call c;
        double seconds;
        if (!wanted(b, forward) && !wanted(b, backward) && !wanted(b, v->name)) continue;
        te_scope_begin(b->te);
        q[0] = kv[0] = v->batch, q[1] = kv[1] = v->s, q[2] = heads, kv[2] = groups, q[3] = kv[3] = d;
        if (v->packed) q[0] = kv[0] = v->batch * v->s, q[1] = heads, kv[1] = groups, q[2] = kv[2] = d;
        const int n = v->packed ? 3 : 4;
        const te_attn_rule rule = attention_variant_rule(b, v, heads);
        te_tensor *tq = te_tensor_normal(b->te, TE_BF16, n, q, 0, 1), *tk = te_tensor_normal(b->te, TE_BF16, n, kv, 0, 1), *tv = te_tensor_normal(b->te, TE_BF16, n, kv, 0, 1);
        te_tensor *o = te_tensor_empty(b->te, TE_BF16, n, q), *lse = te_tensor_empty(b->te, TE_F32, 1, &l);
        memset(&c, 0, sizeof c);
        c.op = TE_OP_ATTN_FWD;
        c.args.attn_fwd.q = tq, c.args.attn_fwd.k = tk, c.args.attn_fwd.v = tv, c.args.attn_fwd.o = o, c.args.attn_fwd.lse = lse;
        c.args.attn_fwd.format = v->packed ? TE_THD : TE_BSHD;
        c.args.attn_fwd.rule = rule;
        te__sleep(0.04);
        seconds = measure(b, run_call, &c);
        char shape[64];
        snprintf(shape, sizeof shape, "s%d %s", (int)v->s, v->name);
        if (!v->gradient) {
            report(b, forward, shape, seconds, flops / seconds * 1e-12, "TFLOP/s");
            seconds = measure_sustained(b, run_call, &c, seconds);
            report(b, "attention variants, forward, sustained", shape, seconds, flops / seconds * 1e-12, "TFLOP/s");
        }
        memset(&c, 0, sizeof c);
        c.op = TE_OP_ATTN_BWD;
        c.args.attn_bwd.q = tq, c.args.attn_bwd.k = tk, c.args.attn_bwd.v = tv, c.args.attn_bwd.o = o, c.args.attn_bwd.lse = lse;
        c.args.attn_bwd.d_o = te_tensor_normal(b->te, TE_BF16, n, q, 0, 1);
        c.args.attn_bwd.dq = te_tensor_empty(b->te, TE_BF16, n, q), c.args.attn_bwd.dk = te_tensor_empty(b->te, TE_BF16, n, kv), c.args.attn_bwd.dv = te_tensor_empty(b->te, TE_BF16, n, kv);
        c.args.attn_bwd.format = v->packed ? TE_THD : TE_BSHD;
        c.args.attn_bwd.rule = rule;
        if (v->gradient) c.args.attn_bwd.dbias = te_tensor_empty(b->te, TE_BF16, 4, v->bias);
        te__sleep(0.04);
        seconds = measure(b, run_call, &c);
        report(b, backward, shape, seconds, 2.5 * flops / seconds * 1e-12, "TFLOP/s");
        seconds = measure_sustained(b, run_call, &c, seconds);
        report(b, "attention variants, backward, sustained", shape, seconds, 2.5 * flops / seconds * 1e-12, "TFLOP/s");
        te_scope_end(b->te);
    }
}

/* Attention by lists of keys: a window of 128 and 512 compressed keys, as of DeepSeek-V4. Rates count the products with the keys of each list: forward 4 b h s n d, backward 2.5 times that. */
/* Makes k and v of an attention E4M3 codes of a cache, and gives it their factors. */
static void coded_cache(bench *b, te_op_attn_fwd_args *a) {
    te_op_copy_to_kv_cache_args copy;
    const int64_t n = a->k->shape[0] + 1;
    int32_t *cu = calloc((size_t)n, sizeof *cu);
    if (!cu) return;
    for (int64_t i = 0; i < n; i++) cu[i] = (int32_t)(i * a->k->shape[1]);
    memset(&copy, 0, sizeof copy);
    copy.k = a->k, copy.v = a->v, copy.format = TE_BSHD;
    a->k = copy.k_cache = te_tensor_empty(b->te, TE_F8E4M3, 4, a->k->shape), a->v = copy.v_cache = te_tensor_empty(b->te, TE_F8E4M3, 4, a->v->shape);
    a->rule.k_factors = copy.k_factors = te_tensor_empty(b->te, TE_F8E8M0, 3, a->k->shape), a->rule.v_factors = copy.v_factors = te_tensor_empty(b->te, TE_F8E8M0, 3, a->k->shape);
    copy.cu_seqlens = te_tensor_from_host(b->te, TE_I32, 1, &n, cu);
    const int64_t sequences = n - 1;
    copy.start_positions = te_tensor_zeros(b->te, TE_I32, 1, &sequences);
    te_op_copy_to_kv_cache(b->te, &copy);
    free(cu);
}
/* A decoding step: one query of each sequence, over all keys of its cache, in pages of 64 keys or not, in bf16 or, with `codes`, in E4M3. Counts the bytes of keys and values, with their factors. */
static void bench_decode(bench *b, int64_t batch, int64_t heads, int64_t groups, int64_t s, int64_t d, bool paged, bool codes) {
    enum { PAGE = 64 };
    const char *const name = "attention of one query";
    const double bytes = 2.0 * (double)batch * (double)groups * (double)s * (codes ? (double)d + 1 : 2 * (double)d);
    any_call c;
    char shape[64];
    int32_t *lengths = calloc((size_t)(batch + 1), sizeof *lengths), *pages = calloc((size_t)(batch * s / PAGE), sizeof *pages);
    snprintf(shape, sizeof shape, "b%d h%d/%d s%d d%d%s%s", (int)batch, (int)heads, (int)groups, (int)s, (int)d, paged ? " paged" : "", codes ? " e4m3" : "");
    if ((wanted(b, name) || wanted(b, shape)) && lengths && pages) {
        const int64_t q[4] = {batch, 1, heads, d}, kv[4] = {paged ? batch * s / PAGE : batch, paged ? PAGE : s, groups, d}, n = batch + 1, table[2] = {batch, s / PAGE}, l[3] = {batch, heads, 1};
        te_scope_begin(b->te);
        memset(&c, 0, sizeof c);
        c.op = TE_OP_ATTN_FWD;
        te_op_attn_fwd_args *a = &c.args.attn_fwd;
        a->q = te_tensor_normal(b->te, TE_BF16, 4, q, 0, 1), a->k = te_tensor_normal(b->te, TE_BF16, 4, kv, 0, 1), a->v = te_tensor_normal(b->te, TE_BF16, 4, kv, 0, 1);
        a->o = te_tensor_empty(b->te, TE_BF16, 4, q), a->lse = te_tensor_empty(b->te, TE_F32, 3, l);
        a->format = TE_BSHD;
        a->rule.mask = TE_MASK_PADDING_CAUSAL_BOTTOM_RIGHT;
        for (int64_t i = 0; i < batch; i++) lengths[i + 1] = lengths[i] + 1;
        a->rule.cu_seqlens_q = te_tensor_from_host(b->te, TE_I32, 1, &n, lengths);
        for (int64_t i = 0; i < batch; i++) lengths[i + 1] = lengths[i] + (int32_t)s;
        a->rule.cu_seqlens_kv = te_tensor_from_host(b->te, TE_I32, 1, &n, lengths);
        for (int64_t i = 0; i < batch * s / PAGE; i++) pages[i] = (int32_t)(i * 7 % (batch * s / PAGE)); /* each page once, since 7 and a power of two have no common factor */
        if (paged) a->rule.page_table = te_tensor_from_host(b->te, TE_I32, 2, table, pages);
        if (codes) coded_cache(b, a);
        report_bytes(b, name, shape, measure(b, run_call, &c), bytes);
        if (!paged) {
            memset(&c, 0, sizeof c);
            const int64_t half = (int64_t)(bytes / 4);
            c.op = TE_OP_COPY;
            c.args.copy.src = te_tensor_normal(b->te, TE_BF16, 1, &half, 0, 1), c.args.copy.dst = te_tensor_empty(b->te, TE_BF16, 1, &half);
            report_bytes(b, "a copy of as many bytes", shape, measure(b, run_call, &c), bytes);
        }
        te_scope_end(b->te);
    }
    free(lengths);
    free(pages);
}

static void bench_sparse_attention(bench *b, int64_t heads, int64_t s, int64_t d) {
    any_call c;
    char shape[64];
    te_sparse_window_desc w;
    int64_t q[4], kv[3], l[3];
    double flops, seconds;
    te_tensor *tq, *tkv, *list, *o, *lse;
    if (!wanted(b, "sparse attention")) return;
    te_scope_begin(b->te);
    memset(&w, 0, sizeof w);
    w.batch = 1, w.seq_len = s, w.window = 127, w.num_compressed = s / 8 < 512 ? s / 8 : 512, w.ratio = 4;
    q[0] = kv[0] = l[0] = 1, q[1] = l[2] = s, q[2] = l[1] = heads, q[3] = kv[2] = d, kv[1] = s + w.num_compressed;
    tq = te_tensor_normal(b->te, TE_BF16, 4, q, 0, 1), tkv = te_tensor_normal(b->te, TE_BF16, 3, kv, 0, 1), list = te_sparse_window_indices(b->te, &w);
    o = te_tensor_empty(b->te, TE_BF16, 4, q), lse = te_tensor_empty(b->te, TE_F32, 3, l);
    flops = 4.0 * (double)heads * (double)s * (double)list->shape[2] * (double)d;
    snprintf(shape, sizeof shape, "h%d s%d n%d d%d", (int)heads, (int)s, (int)list->shape[2], (int)d);
    memset(&c, 0, sizeof c);
    c.op = TE_OP_SPARSE_ATTN_FWD;
    c.args.sparse_attn_fwd.q = tq, c.args.sparse_attn_fwd.kv = tkv, c.args.sparse_attn_fwd.indices = list, c.args.sparse_attn_fwd.o = o, c.args.sparse_attn_fwd.lse = lse;
    seconds = measure(b, run_call, &c);
    report(b, "sparse attention forward", shape, seconds, flops / seconds * 1e-12, "TFLOP/s");
    if (b->profile) profile(b, run_call, &c);
    te__sparse_no_wgmma = true;
    seconds = measure(b, run_call, &c);
    te__sparse_no_wgmma = false;
    report(b, "sparse attention forward, mma.sync", shape, seconds, flops / seconds * 1e-12, "TFLOP/s");
    memset(&c, 0, sizeof c);
    c.op = TE_OP_SPARSE_ATTN_BWD;
    c.args.sparse_attn_bwd.q = tq, c.args.sparse_attn_bwd.kv = tkv, c.args.sparse_attn_bwd.indices = list, c.args.sparse_attn_bwd.o = o, c.args.sparse_attn_bwd.lse = lse;
    c.args.sparse_attn_bwd.d_o = te_tensor_normal(b->te, TE_BF16, 4, q, 0, 1);
    c.args.sparse_attn_bwd.dq = te_tensor_empty(b->te, TE_BF16, 4, q), c.args.sparse_attn_bwd.dkv = te_tensor_empty(b->te, TE_BF16, 3, kv);
    seconds = measure(b, run_call, &c);
    report(b, "sparse attention backward", shape, seconds, 2.5 * flops / seconds * 1e-12, "TFLOP/s");
    if (b->profile) profile(b, run_call, &c);
    te_scope_end(b->te);
}

/* ---- a layer ---- */

/* In place of attention, whose speed is no matter here: it gives its query on, and random gradients of key and value back. */
typedef struct no_attention {
    te_tensor *dk, *dv;
} no_attention;
static te_result no_attention_backward(te_ctx *te, const void *state, te_tensor *const *saved, te_tensor *const *grad_outputs, te_tensor **grad_inputs, const bool *needs) {
    const no_attention *s = (const no_attention *)state;
    (void)saved, (void)needs;
    int64_t shape[4];
    shape[0] = s->dk->shape[0], shape[1] = s->dk->shape[1], shape[3] = s->dk->shape[3];
    shape[2] = te_tensor_numel(grad_outputs[0]) / (shape[0] * shape[1] * shape[3]);
    grad_inputs[0] = te_tensor_view(grad_outputs[0], 4, shape);
    grad_inputs[1] = s->dk;
    grad_inputs[2] = s->dv;
    return te_error_code(te);
}
static te_result no_attention_forward(te_module *self, te_forward_args *args) {
    te_ctx *te = te_module_ctx(self);
    te_node_desc node = TE_ZERO;
    te_tensor *inputs[3], *q = args->input;
    int64_t shape[3];
    shape[0] = q->shape[0], shape[1] = q->shape[1], shape[2] = q->shape[2] * q->shape[3];
    te_no_grad_begin(te);
    args->outputs.out = te_tensor_view(q, 3, shape);
    te_no_grad_end(te);
    inputs[0] = q, inputs[1] = args->key, inputs[2] = args->value;
    node.name = "no attention";
    node.inputs = inputs, node.num_inputs = 3;
    node.outputs = &args->outputs.out, node.num_outputs = 1;
    node.state = args->user, node.state_size = sizeof(no_attention);
    node.backward = no_attention_backward;
    return te_record(te, &node);
}

typedef struct layer_step {
    te_module *layer;
    te_tensor *x, *dy;
    te_rotary_desc rotary;
    bool not_rotated;
    no_attention core;
    const te_recipe *recipe; /* NULL: bf16 */
} layer_step;

/* A layer of Llama-8B. */
enum { HIDDEN = 4096, FFN = 14336, HEADS = 32, GROUPS = 8, CHANNELS = HIDDEN / HEADS };
static te_module *llama_layer(bench *b) {
    te_transformer_layer_desc desc = TE_ZERO;
    desc.hidden_size = HIDDEN;
    desc.ffn_hidden_size = FFN;
    desc.attention.num_attention_heads = HEADS;
    desc.attention.num_gqa_groups = GROUPS;
    desc.norm.normalization = TE_RMSNORM;
    desc.activation = TE_SWIGLU;
    desc.gemm.no_bias = true;
    return te_transformer_layer_create(b->te, &desc);
}

/* Forward and backward, weights quantized anew, as the first microbatch of a step does. */
static void run_layer(bench *b, void *arg) {
    layer_step *s = (layer_step *)arg;
    te_autocast_desc autocast = TE_ZERO;
    te_forward_args args = TE_ZERO;
    te_tensor *y;
    te_scope_begin(b->te);
    args.input = s->x;
    args.is_first_microbatch = TE_MICROBATCH_FIRST;
    args.rotary = s->not_rotated ? NULL : &s->rotary;
    args.user = &s->core;
    autocast.recipe = s->recipe;
    autocast.disabled = !s->recipe;
    te_autocast_begin(b->te, &autocast);
    y = te_forward_with(s->layer, &args);
    te_autocast_end(b->te);
    te_backward_from(y, s->dy);
    te_module_zero_grad(s->layer);
    te_tensor_zero_grad(s->x);
    te_scope_end(b->te);
}

/* Seconds of the host for each launch of a step, while the GPU is busy with the step before: a processor that has waited for the GPU is slow at first. */
static double layer_host_time(bench *b, layer_step *s) {
    enum { RUNS = 15 };
    float times[RUNS];
    int i;
    for (i = 0; i < RUNS; i++) {
        uint64_t launches;
        double began;
        te_synchronize(b->te);
        run_layer(b, s);
        launches = (uint64_t)b->te->jit_stats.launches;
        began = te__time_now();
        run_layer(b, s);
        times[i] = (float)((te__time_now() - began) / (double)te__max((uint64_t)b->te->jit_stats.launches - launches, 1));
    }
    te_synchronize(b->te);
    qsort(times, RUNS, sizeof(float), by_value);
    return (double)times[RUNS / 2];
}

/* Llama-8B's, without its attention core, over our bf16. */
static void bench_layer(bench *b, int64_t tokens) {
    static const struct {
        const char *name;
        te_recipe (*recipe)(void);
    } rows[] = {{"layer bf16", NULL}, {"layer fp8 current scaling", te_recipe_current_scaling}, {"layer fp8 delayed scaling", te_recipe_delayed_scaling},
                {"layer fp8 block scaling", te_recipe_block_scaling}, {"layer mxfp8", te_recipe_mxfp8}, {"layer nvfp4", te_recipe_nvfp4}};
    const double flops = 6.0 * (double)tokens * HIDDEN * (HIDDEN * 2.0 + 2.0 * GROUPS * CHANNELS + 3.0 * FFN);
    layer_step plain = TE_ZERO;
    te_module *core;
    char shape[64];
    int64_t sizes[4];
    int i;
    bool any = false;
    for (i = 0; i < (int)(sizeof rows / sizeof *rows); i++) any |= wanted(b, rows[i].name);
    if (!any) return;
    te_scope_begin(b->te);
    plain.layer = llama_layer(b);
    core = te_module_find(plain.layer, "self_attention.core_attention");
    if (core) te_module_set_forward(core, no_attention_forward);
    sizes[0] = tokens, sizes[1] = 1, sizes[2] = HIDDEN;
    plain.x = te_tensor_set_requires_grad(te_tensor_normal(b->te, TE_BF16, 3, sizes, 0, 1), true);
    plain.dy = te_tensor_normal(b->te, TE_BF16, 3, sizes, 0, 1);
    sizes[2] = GROUPS, sizes[3] = CHANNELS;
    plain.core.dk = te_tensor_normal(b->te, TE_BF16, 4, sizes, 0, 1);
    plain.core.dv = te_tensor_normal(b->te, TE_BF16, 4, sizes, 0, 1);
    snprintf(shape, sizeof shape, "Llama-8B %lld", (long long)tokens);
    for (i = 0; i < (int)(sizeof rows / sizeof *rows) && te_ok(b->te); i++) {
        layer_step step = plain;
        te_recipe recipe;
        double seconds[2] = {1, 0};
        if (!wanted(b, rows[i].name)) continue;
        if (rows[i].recipe) recipe = rows[i].recipe(), step.recipe = &recipe;
        if (!rows[i].recipe) seconds[0] = measure(b, run_layer, &step);
        else measure_both(b, run_layer, &step, run_layer, &plain, seconds);
        report_against(b, rows[i].name, shape, seconds[0], flops / seconds[0] * 1e-12, seconds[1] > 0 ? flops / seconds[1] * 1e-12 : 0, "TFLOP/s", "our bf16");
        seconds[0] = layer_host_time(b, &step);
        report(b, "host time of a launch", rows[i].name, seconds[0], seconds[0] * 1e6, "us");
        if (b->profile) profile(b, run_layer, &step);
    }
    te_module_destroy(plain.layer);
    te_scope_end(b->te);
}

/* The same with its attention core, in milliseconds, rotated or not: attention reads q, k and v where they lie in the packed projection. */
static void bench_whole_layer(bench *b, int64_t s, int64_t batch) {
    static const struct {
        const char *name;
        te_recipe (*recipe)(void);
    } rows[] = {{"whole layer bf16", NULL}, {"whole layer fp8 delayed scaling", te_recipe_delayed_scaling}, {"whole layer fp8 current scaling", te_recipe_current_scaling},
                {"whole layer fp8 block scaling", te_recipe_block_scaling}};
    layer_step step = TE_ZERO;
    const int64_t sizes[3] = {s, batch, HIDDEN};
    int i;
    bool any = false;
    for (i = 0; i < (int)(sizeof rows / sizeof *rows); i++) any |= wanted(b, rows[i].name);
    if (!any) return;
    te_scope_begin(b->te);
    step.layer = llama_layer(b);
    step.x = te_tensor_set_requires_grad(te_tensor_normal(b->te, TE_BF16, 3, sizes, 0, 1), true);
    step.dy = te_tensor_normal(b->te, TE_BF16, 3, sizes, 0, 1);
    for (i = 0; i < 2 * (int)(sizeof rows / sizeof *rows) && te_ok(b->te); i++) {
        te_recipe recipe;
        double seconds;
        char shape[64];
        if (!wanted(b, rows[i / 2].name)) continue;
        step.recipe = NULL;
        if (rows[i / 2].recipe) recipe = rows[i / 2].recipe(), step.recipe = &recipe;
        step.not_rotated = i % 2;
        snprintf(shape, sizeof shape, "Llama-8B %lldx%lld%s", (long long)s, (long long)batch, step.not_rotated ? " no rope" : "");
        seconds = measure_apart(b, run_layer, &step);
        report(b, rows[i / 2].name, shape, seconds, seconds * 1e3, "ms");
        if (b->profile) profile(b, run_layer, &step);
    }
    te_module_destroy(step.layer);
    te_scope_end(b->te);
}

/* ---- several layers: activations kept, offloaded, computed again ---- */

typedef struct model_step {
    te_module *layers;
    te_tensor *x, *dy;
    te_rotary_desc rotary;
    float offload; /* share of the activations that leaves; 0: none */
} model_step;
static void run_model(bench *b, void *arg) {
    model_step *s = (model_step *)arg;
    te_forward_args args = TE_ZERO;
    te_cpu_offload_desc offload = TE_ZERO;
    te_scope_begin(b->te);
    args.input = s->x;
    args.rotary = &s->rotary;
    offload.fraction = s->offload;
    if (s->offload > 0) te_cpu_offload_begin(b->te, &offload);
    te_forward_with(s->layers, &args);
    if (s->offload > 0) te_cpu_offload_end(b->te);
    te_backward_from(args.outputs.out, s->dy);
    te_module_zero_grad(s->layers);
    te_tensor_zero_grad(s->x);
    te_scope_end(b->te);
}

/* Bytes each way and second over the link between the GPU and pinned memory: the floor of what goes out. */
static double link_rate(bench *b) {
    int64_t bytes = (int64_t)1 << 30;
    te_tensor *x = te_tensor_empty(b->te, TE_U8, 1, &bytes);
    te__stream *s = te__stream_create(b->te);
    te__pinned *p = te__pinned_take(b->te, (size_t)bytes);
    double began, seconds = 0;
    int i;
    for (i = 0; i < 4 && te_ok(b->te); i++) { /* the first one wakes the link */
        te_synchronize(b->te);
        began = te__time_now();
        te__copy_out(s, p, 0, x);
        te_synchronize(b->te);
        seconds = te__time_now() - began;
    }
    te__pinned_give(p);
    te__stream_destroy(s);
    te__drop(x);
    return (double)bytes / seconds;
}

/* Llama-8B's layers in bf16, attention too: activations kept, offloaded in part, computed again. */
static void bench_model(bench *b, int num_layers, int64_t tokens) {
    static const struct {
        const char *name;
        float offload;
        bool checkpoint;
    } rows[] = {{"layers, activations kept", 0, false}, {"layers, offload 1/3", 1.0f / 3, false}, {"layers, offload 2/3", 2.0f / 3, false}, {"layers, checkpointed", 0, true}};
    te_transformer_layer_desc desc = TE_ZERO;
    model_step plain = TE_ZERO;
    te_module *children[64];
    te_memory_stats held, before, after;
    double rate;
    char shape[64], memory[64];
    int64_t sizes[3];
    int i, k;
    for (i = 0; i < (int)(sizeof rows / sizeof *rows) && !wanted(b, rows[i].name); i++) {}
    if (i == (int)(sizeof rows / sizeof *rows)) return;
    te_scope_begin(b->te);
    desc.hidden_size = 4096;
    desc.ffn_hidden_size = 14336;
    desc.attention.num_attention_heads = 32;
    desc.attention.num_gqa_groups = 8;
    desc.norm.normalization = TE_RMSNORM;
    desc.activation = TE_SWIGLU;
    desc.gemm.no_bias = true;
    for (k = 0; k < num_layers; k++) children[k] = te_transformer_layer_create(b->te, &desc);
    plain.layers = te_sequential_create(b->te, children, num_layers);
    sizes[0] = tokens, sizes[1] = 1, sizes[2] = desc.hidden_size;
    plain.x = te_tensor_set_requires_grad(te_tensor_normal(b->te, TE_BF16, 3, sizes, 0, 1), true);
    plain.dy = te_tensor_normal(b->te, TE_BF16, 3, sizes, 0, 1);
    snprintf(shape, sizeof shape, "%d x Llama-8B %lld", num_layers, (long long)tokens);
    rate = link_rate(b);
    report(b, "link to pinned memory", "1 GiB", 1.073741824e9 / rate, rate * 1e-9, "GB/s");
    held = te_memory_get_stats(b->te);
    for (i = 0; i < (int)(sizeof rows / sizeof *rows) && te_ok(b->te); i++) {
        model_step step = plain;
        double seconds[2];
        if (!wanted(b, rows[i].name)) continue;
        step.offload = rows[i].offload;
        for (k = 0; k < num_layers; k++) te_module_set_checkpoint(te_module_child(plain.layers, k), rows[i].checkpoint);
        if (i && !rows[i].checkpoint) measure_both(b, run_model, &step, run_model, &plain, seconds);
        else seconds[0] = measure(b, run_model, &step), seconds[1] = 0;
        report_against(b, rows[i].name, shape, seconds[0], (double)tokens / seconds[0], seconds[1] > 0 ? (double)tokens / seconds[1] : 0, "token/s", "activations kept");
        te_memory_reset_peak(b->te);
        before = te_memory_get_stats(b->te);
        run_model(b, &step);
        te_synchronize(b->te);
        after = te_memory_get_stats(b->te);
        snprintf(memory, sizeof memory, "%s: peak", rows[i].name);
        report(b, memory, shape, seconds[0], (double)(after.peak_allocated - held.allocated) / 1048576, "MiB");
        snprintf(memory, sizeof memory, "%s: out and back", rows[i].name);
        if (step.offload > 0)
            report(b, memory, shape, (double)(after.copied_out - before.copied_out + after.copied_in - before.copied_in) / rate,
                   (double)(after.copied_out - before.copied_out) / 1048576, "MiB out");
    }
    for (k = 0; k < num_layers; k++) te_module_set_checkpoint(te_module_child(plain.layers, k), false);
    te_module_destroy(plain.layers);
    te_scope_end(b->te);
}

/* ---- alternatives of a product: --tune ---- */

typedef struct alternative {
    double seconds, cost; /* measured, and estimated by the choice in units of its own */
    int index;
    char text[TE__LAUNCH_TEXT + 32];
} alternative;

static void run_alternative(bench *b, void *arg) {
    te__gemm_tune.count = 0;
    run_ours(b, arg);
}
static int by_seconds(const void *a, const void *b) {
    double x = ((const alternative *)a)->seconds, y = ((const alternative *)b)->seconds;
    return (x > y) - (x < y);
}

/* Options of the product's own kernel and its splits, the operands' formats left out. */
static void alternative_text(bench *b, const product *p, char *text, size_t size) {
    te__plan *plan = (te__plan *)malloc(sizeof *plan);
    bool pushed;
    int i, o;
    size_t used = 0;
    text[0] = 0;
    if (!plan) return;
    if (te__cuda_enter(b->te, &pushed) == TE_OK) {
        te__gemm_tune.count = 0;
        te__cuda_plan(b->te, plan, &te__ops[TE_OP_GEMM], &p->args);
        for (i = 0; i < plan->num_launches && used < size; i++) {
            const te__launch *l = &plan->launch[i];
            bool hopper = strcmp(l->kernel, "gemm_hopper") == 0;
            int splits;
            if (!hopper && strcmp(l->kernel, "gemm_mma") != 0 && strncmp(l->kernel, "gemv_", 5) != 0) continue;
            splits = hopper ? ((const te__gemm_hopper_kargs *)l->args)->g.splits : ((const te__gemm_kargs *)l->args)->splits;
            used += (size_t)snprintf(text + used, size - used, "%s, splits %d, grid %u x %u", l->kernel, splits, l->grid[0], l->grid[1]);
            for (o = 0; o < l->num_options && used < size; o++) {
                const char *name = l->option[o].name;
                if (strcmp(name, "A_DT") && strcmp(name, "B_DT") && strcmp(name, "A_T") && strcmp(name, "B_T"))
                    used += (size_t)snprintf(text + used, size - used, ", %s %d", name, l->option[o].value);
            }
        }
        te__plan_end(plan);
        te__cuda_leave(pushed);
    }
    free(plan);
}

/* Every tile and number of splits that the choice weighs, fastest first; "*": the one that it picks, which is none of them for a GEMV. most: lines. */
static void tune_shape(bench *b, te_quant_kind kind, bool b_2d, layout l, te_dtype out, bool split, int64_t m, int64_t n, int64_t k, int most) {
    enum { MAX_ALTERNATIVES = 511 };
    static alternative list[MAX_ALTERNATIVES];
    double flops = 2.0 * (double)m * (double)n * (double)k, theirs = 0, picked = 0, cheapest = 0;
    char shape[64], pick[sizeof list[0].text];
    product p;
    int i, count, shown = 0;
    shape_text(shape, m, n, k);
    te_scope_begin(b->te);
    te__gemm_tune.take = -1;
    if (product_open(b, &p, kind, b_2d, l, TE_BF16, out, m, n, k)) {
        p.args.split_accumulator |= split;
        alternative_text(b, &p, pick, sizeof pick);
        te__gemm_tune.take = 0; /* what is weighed without gemv_k and gemv_mn, and of D as a whole */
        alternative_text(b, &p, list[0].text, sizeof list[0].text);
        count = (int)te__min(te__gemm_tune.count, MAX_ALTERNATIVES - 1);
        for (i = 0; i < count && te_ok(b->te); i++) {
            te__gemm_tune.take = list[i].index = i;
            alternative_text(b, &p, list[i].text, sizeof list[i].text);
            list[i].cost = te__gemm_tune.cost[i];
            list[i].seconds = measure(b, run_alternative, &p);
            if (i == 0 || list[i].cost < cheapest) cheapest = list[i].cost;
            if (strcmp(list[i].text, pick) == 0) picked = list[i].seconds;
        }
        te__gemm_tune.take = -1;
        te__gemm_tune.count = 0;
        if (count && picked <= 0) {
            list[count].index = count;
            list[count].cost = 0;
            list[count].seconds = picked = measure(b, run_alternative, &p);
            snprintf(list[count++].text, sizeof list[0].text, "%s", pick);
        }
        if (lt_prepare(b, &p)) theirs = measure(b, run_theirs, &p);
        qsort(list, (size_t)count, sizeof *list, by_seconds);
        if (te_ok(b->te) && !count) printf("%s: %s, without alternatives; cuBLASLt %.1f us (0: has none)\n", shape, pick, theirs * 1e6);
        if (te_ok(b->te) && count)
            printf("%s: picks %.1f us, %.0f TFLOP/s; best of %d: %.1f us, %.3f of that; cuBLASLt %.1f us (0: has none)\n", shape, picked * 1e6, flops / picked * 1e-12, count,
                   list[0].seconds * 1e6, list[0].seconds / picked, theirs * 1e6);
        for (i = 0; i < count && te_ok(b->te); i++) {
            bool is_pick = strcmp(list[i].text, pick) == 0;
            if (shown++ >= most && !is_pick) continue;
            printf("  %c %8.1f us %7.1f TFLOP/s   cost %8.1f (%.2f)   %s\n", is_pick ? '*' : ' ', list[i].seconds * 1e6, flops / list[i].seconds * 1e-12, list[i].cost,
                   list[i].cost / cheapest, list[i].text);
        }
    }
    if (!te_ok(b->te)) {
        printf("%s failed: %s\n", shape, te_error(b->te));
        te_clear_error(b->te);
    }
    fflush(stdout);
    te_scope_end(b->te);
}

/* Words: a shape as MxNxK, "all" (those of the other rows; the five fastest of each); tn, nn, nt; f32; a format. */
static int tune(bench *b) {
    static const struct {
        const char *word;
        te_quant_kind kind;
        bool b_2d, split;
    } formats[] = {{"bf16", TE_QUANT_NONE, false, false}, {"fp8", TE_QUANT_CURRENT, false, false}, {"fp8-split", TE_QUANT_CURRENT, false, true},
                   {"fp8-1x128-128x128", TE_QUANT_BLOCK, true, true}, {"fp8-1x128-1x128", TE_QUANT_BLOCK, false, true}, {"mxfp8", TE_QUANT_MXFP8, false, false},
                   {"nvfp4", TE_QUANT_NVFP4, false, false}};
    static const char *const layouts[] = {"tn", "nn", "nt"};
    int format = 0, i, w;
    int64_t m = 0, n = 0, k = 0;
    layout l = TN;
    te_dtype out = TE_BF16;
    for (w = 0; w < b->num_words; w++) {
        const char *word = b->words[w];
        long long x, y, z;
        bool known = strcmp(word, "all") == 0;
        if (sscanf(word, "%lldx%lldx%lld", &x, &y, &z) == 3 && x > 0 && y > 0 && z > 0) m = x, n = y, k = z, known = true;
        for (i = 0; i < 3; i++)
            if (strcmp(word, layouts[i]) == 0) l = (layout)i, known = true;
        if (strcmp(word, "f32") == 0) out = TE_F32, known = true;
        for (i = 0; i < (int)(sizeof formats / sizeof *formats); i++)
            if (strcmp(word, formats[i].word) == 0) format = i, known = true;
        if (!known) {
            fprintf(stderr, "te_bench: --tune [MxNxK | all] [tn | nn | nt] [f32] [bf16 | fp8 | fp8-split | fp8-1x128-128x128 | fp8-1x128-1x128 | mxfp8 | nvfp4], not %s\n", word);
            return 2;
        }
    }
    if (formats[format].kind != TE_QUANT_NONE) l = TN;
    for (i = 0; i < all_shapes.count && !m; i++)
        tune_shape(b, formats[format].kind, formats[format].b_2d, l, out, formats[format].split, shapes[i][0], shapes[i][1], shapes[i][2], 5);
    if (m) tune_shape(b, formats[format].kind, formats[format].b_2d, l, out, formats[format].split, m, n, k, 1000);
    return 0;
}

/* The first line: GPU, driver, libraries, date and commit. */
static void bench_head(bench *b) {
    const te__nvrtc *nvrtc = te__nvrtc_open(te__driver_major(), NULL);
    const char *commit = getenv("TE_BENCH_COMMIT");
    char text[512], of[64] = "", date[16] = "";
    time_t now = time(NULL);
    if (commit && commit[0]) snprintf(of, sizeof of, " (%s)", commit);
    strftime(date, sizeof date, "%Y-%m-%d", gmtime(&now));
    snprintf(text, sizeof text, "%s, driver %d.%d, NVRTC %d.%d, %s, te.h %d.%d.%d%s, copy %.0f GB/s (read and written), %s; third shortest of 16 runs, host times and steps of a layer medians", b->te->cuda->name, te__cu.version / 1000,
             te__cu.version / 10 % 100, nvrtc ? nvrtc->major : 0, nvrtc ? nvrtc->minor : 0, b->lt ? b->lt->version : "no cuBLASLt", TE_VERSION_MAJOR, TE_VERSION_MINOR,
             TE_VERSION_PATCH, of, b->copy_rate * 1e-9, date);
    printf("%s\n", text);
    printf("%-42s %-20s %13s %18s %9s  ratio\n", "what", "shape", "time", "ours", "theirs");
    if (b->csv) fprintf(b->csv, "# %s\nwhat,shape,microseconds,ours,unit,against,theirs,ratio\n", text);
}

/* ---- products by groups, over our dense product of as many operations ---- */

typedef struct grouped {
    te_op_grouped_gemm_args args;
} grouped;
static void run_grouped(bench *b, void *arg) { te_op_grouped_gemm(b->te, &((grouped *)arg)->args); }

/* Uneven sizes, one in seven 0, hardly any of them a multiple of a tile; together `total`. */
static te_tensor *uneven_sizes(bench *b, int64_t groups, int64_t total) {
    int32_t *sizes = (int32_t *)calloc((size_t)groups, sizeof *sizes);
    int64_t weights = 0, given = 0, g;
    te_tensor *x = NULL;
    for (g = 0; g < groups; g++) weights += g % 7 == 3 ? 0 : 4 + g * 37 % 9;
    for (g = 0; g < groups && sizes; g++) given += sizes[g] = (int32_t)(g % 7 == 3 ? 0 : (4 + g * 37 % 9) * total / weights);
    if (sizes) {
        sizes[0] += (int32_t)(total - given);
        x = te_tensor_from_host(b->te, TE_I32, 1, &groups, sizes);
    }
    free(sizes);
    return x;
}

static void bench_grouped(bench *b) {
    static const struct {
        const char *name;
        te_quant_kind kind;
        layout l;
        bool split, along_k;
    } kinds[] = {{"grouped bf16 TN", TE_QUANT_NONE, TN, false, false}, {"grouped bf16 NN", TE_QUANT_NONE, NN, false, false},
                 {"grouped bf16 NT += f32", TE_QUANT_NONE, NT, false, true}, {"grouped fp8 fast", TE_QUANT_CURRENT, TN, false, false},
                 {"grouped fp8 split", TE_QUANT_CURRENT, TN, true, false}, {"grouped fp8 split += f32", TE_QUANT_CURRENT, NT, true, true},
                 {"grouped fp8 1x128 by 128x128", TE_QUANT_BLOCK, TN, true, false}};
    /* groups, rows of all, n, k of each; along k: k of all, n, m of each */
    static const int64_t sizes[][4] = {{8, 16384, 4096, 4096}, {8, 16384, 14336, 4096}, {64, 32768, 4096, 2048}, {64, 32768, 2048, 7168}, {64, 8192, 2048, 7168}};
    int i, kind;
    for (kind = 0; kind < (int)(sizeof kinds / sizeof *kinds); kind++) {
        family f = TE_ZERO;
        f.name = kinds[kind].name;
        for (i = 0; i < (int)(sizeof sizes / sizeof *sizes) && wanted(b, f.name); i++) {
            const int64_t groups = sizes[i][0], total = sizes[i][1], n = sizes[i][2], other = sizes[i][3];
            bool along_k = kinds[kind].along_k, opened;
            te_quant_kind q = kinds[kind].kind;
            double seconds[2] = {1, 1}, flops = 2.0 * (double)total * (double)n * (double)other;
            product dense, stack; /* the groups' B is the stack's */
            grouped g;
            char shape[64];
            memset(&g, 0, sizeof g);
            snprintf(shape, sizeof shape, "%lld: %lldx%lldx%lld", (long long)groups, (long long)(along_k ? other : total), (long long)n, (long long)(along_k ? total : other));
            te_scope_begin(b->te);
            if (along_k) /* as many operations for a D of the same size */
                opened = product_open(b, &dense, q, true, q ? TN : NT, TE_BF16, TE_F32, groups * other, n, total / groups) &&
                         product_open(b, &stack, q, true, q ? TN : NT, TE_BF16, TE_F32, 128, n, total);
            else
                opened = product_open(b, &dense, q, true, kinds[kind].l, TE_BF16, TE_BF16, total, n, other) &&
                         product_open(b, &stack, q, true, kinds[kind].l, TE_BF16, TE_BF16, 128, kinds[kind].l == TN ? groups * n : n, kinds[kind].l == TN ? other : groups * other);
            if (opened) {
                int64_t as_k[2];
                as_k[0] = q ? other : total, as_k[1] = q ? total : other;
                g.args.a = along_k ? te_tensor_view((te_tensor *)dense.args.a, 2, as_k) : dense.args.a;
                g.args.b = stack.args.b;
                g.args.d = dense.args.d;
                g.args.sizes = uneven_sizes(b, groups, total);
                g.args.groups = groups, g.args.m = along_k ? other : total, g.args.n = n, g.args.k = along_k ? total : other;
                g.args.along_k = along_k;
                g.args.a_transposed = dense.args.a_transposed, g.args.b_transposed = dense.args.b_transposed;
                g.args.scale_a = dense.args.scale_a, g.args.scale_b = stack.args.scale_b;
                g.args.scaling_a = dense.args.scaling_a, g.args.scaling_b = dense.args.scaling_b;
                dense.args.split_accumulator = g.args.split_accumulator = kinds[kind].split;
                dense.args.accumulate = g.args.accumulate = along_k;
                measure_both(b, run_grouped, &g, run_ours, &dense, seconds);
                if (te_ok(b->te)) family_add(&f, shape, seconds[1] / seconds[0]);
            }
            report_against(b, f.name, shape, seconds[0], flops / seconds[0] * 1e-12, flops / seconds[1] * 1e-12, "TFLOP/s", "our dense");
            te_scope_end(b->te);
        }
        family_report(&f);
    }
}

/* ---- a language model that continues sequences ---- */

/* Llamas with their embedding and head: four layers of 8B, and whole models. */
typedef struct inference_model {
    const char *name;
    int64_t hidden, inner;
    int layers;
} inference_model;
static const inference_model layers_of_8b = {"4 x Llama-8B", HIDDEN, FFN, 4}, whole_models[] = {{"Llama 1.5 G", 2048, 8192, 16}, {"Llama 8.0 G", HIDDEN, FFN, 32}};
typedef struct inference {
    te_module *model;
    te_kv_cache *cache;
    te_tensor *ids, *id; /* [b, s] to begin with; the newest ones, [b, 1] */
    te_graph *graph;     /* of a step; NULL: it is run by calls */
    const te_recipe *recipe; /* NULL: bf16 */
} inference;

static void run_forward(bench *b, inference *s, te_tensor *ids) {
    te_autocast_desc autocast = TE_ZERO;
    te_forward_args args = TE_ZERO;
    te_scope_begin(b->te);
    args.input = ids;
    args.kv_cache = s->cache;
    args.logits_to_keep = 1;
    autocast.recipe = s->recipe;
    autocast.disabled = !s->recipe;
    te_autocast_begin(b->te, &autocast);
    te_tensor_copy(s->id, te_argmax(te_forward_with(s->model, &args)));
    te_autocast_end(b->te);
    te_scope_end(b->te);
}
static void run_prefill(bench *b, void *arg) {
    inference *s = (inference *)arg;
    te_kv_cache_truncate(s->cache, 0);
    run_forward(b, s, s->ids);
}
static void run_decode(bench *b, void *arg) {
    inference *s = (inference *)arg;
    if (s->graph) te_graph_launch(s->graph);
    else run_forward(b, s, s->id);
}

/* One id of each of `batch` sequences after 512, by launches of a captured step; 0: the first id after 8192. Stored quantized, over our bf16. Rows of whole models are `token`, also with a quantized lm_head. */
static void bench_inference(bench *b, const inference_model *model, int batch) {
    static const struct {
        const char *name;
        te_recipe (*recipe)(void);
    } rows[] = {{"bf16", NULL}, {"fp8 current scaling", te_recipe_current_scaling}, {"fp8 block scaling", te_recipe_block_scaling}, {"mxfp8", te_recipe_mxfp8}, {"nvfp4", te_recipe_nvfp4}};
    enum { STEPS = 64 };
    const int64_t sizes[2] = {batch ? batch : 1, batch ? 512 : 8192}, one[2] = {sizes[0], 1};
    double of_bf16 = 0;
    te_no_grad_begin(b->te);
    for (int row = 0; row < 2 * (int)(sizeof rows / sizeof *rows); row++) {
        const int i = row / 2;
        const bool head = row % 2; /* lm_head is quantized too */
        inference s = TE_ZERO;
        te_causal_lm_desc desc = TE_ZERO;
        te_quantized_model_init_desc stored = TE_ZERO;
        te_recipe recipe;
        char name[64], shape[64];
        double seconds;
        if (head && (!rows[i].recipe || model == &layers_of_8b)) continue;
        snprintf(name, sizeof name, "%s %s%s", model != &layers_of_8b ? "token" : batch ? "decode" : "prefill", rows[i].name, head ? ", lm_head too" : "");
        snprintf(shape, sizeof shape, "%s b%d s%d", model->name, (int)sizes[0], (int)sizes[1]);
        if (!wanted(b, name)) continue;
        if (rows[i].recipe) recipe = rows[i].recipe(), s.recipe = stored.recipe = &recipe;
        desc.vocab_size = 128256, desc.hidden_size = model->hidden, desc.intermediate_size = model->inner, desc.num_hidden_layers = model->layers;
        desc.num_attention_heads = HEADS, desc.num_key_value_heads = GROUPS, desc.quantized_lm_head = head;
        te_scope_begin(b->te);
        if (s.recipe) te_quantized_model_init_begin(b->te, &stored);
        s.model = te_causal_lm_create(b->te, &desc);
        if (s.recipe) te_quantized_model_init_end(b->te);
        s.cache = te_kv_cache_create(s.model, sizes[0], sizes[1] + STEPS);
        s.ids = te_tensor_zeros(b->te, TE_I32, 2, sizes), s.id = te_tensor_zeros(b->te, TE_I32, 2, one);
        run_prefill(b, &s);
        if (batch && te_ok(b->te)) {
            run_decode(b, &s); /* compiles, which a capture cannot do */
            te_graph_begin(b->te);
            run_forward(b, &s, s.id);
            s.graph = te_graph_end(b->te);
        }
        seconds = measure(b, batch ? run_decode : run_prefill, &s);
        if (!s.recipe) of_bf16 = seconds;
        report_against(b, name, shape, seconds, (double)(batch ? batch : sizes[1]) / seconds, s.recipe && of_bf16 > 0 ? (double)(batch ? batch : sizes[1]) / of_bf16 : 0, "ids/s", "our bf16");
        te_graph_destroy(s.graph);
        s.graph = NULL;
        if (b->profile) profile(b, batch ? run_decode : run_prefill, &s);
        te_kv_cache_destroy(s.cache);
        te_module_destroy(s.model);
        te_scope_end(b->te);
    }
    te_no_grad_end(b->te);
}

/* Attention of [b, s, h, d], as beside_torch.py has it: Llama-8B's heads by batch and length, as many key heads as query heads, other sizes of heads and groups; one as [s, b, h, d]. */
static const struct {
    int batch, heads, groups, s, d;
    bool causal;
} attention[] = {{4, 32, 8, 4096, 128, true},  {4, 32, 32, 4096, 128, true},  {1, 32, 8, 8192, 128, true},  {1, 32, 8, 16384, 128, true}, {16, 32, 8, 1024, 128, true}, {1, 32, 8, 2048, 128, true},
                 {4, 32, 8, 4096, 128, false}, {4, 32, 32, 4096, 128, false}, {1, 32, 8, 8192, 128, false}, {2, 32, 8, 8192, 128, false}, {1, 32, 8, 16384, 128, false}, {16, 32, 8, 1024, 128, false},
                 {4, 32, 8, 4096, 64, true},   {4, 32, 32, 4096, 64, true},   {1, 32, 8, 8192, 64, true},   {4, 32, 8, 4096, 64, false},  {1, 32, 8, 8192, 64, false},
                 {4, 32, 32, 4096, 96, true},  {4, 32, 8, 4096, 96, true},    {4, 16, 16, 4096, 192, true}, {4, 16, 4, 4096, 192, true},  {4, 16, 16, 4096, 256, true}, {4, 16, 2, 4096, 256, true}};

static void measure_all(bench *b) {
    int i;
    bench_gemm(b);
    bench_decoded(b, &all_shapes, "gemm mxfp8", TE_QUANT_MXFP8);
    bench_decoded(b, &all_shapes, "gemm nvfp4", TE_QUANT_NVFP4);
    bench_products(b, &with_gemv, "gemv bf16", TE_QUANT_NONE, false, TN, TE_BF16, false, false);
    bench_products(b, &with_gemv, "gemv bf16 NN", TE_QUANT_NONE, false, NN, TE_BF16, false, false);
    bench_products(b, &with_gemv, "gemv fp8", TE_QUANT_CURRENT, false, TN, TE_BF16, false, false);
    bench_products(b, &with_gemv, "gemv fp8 1x128 by 128x128", TE_QUANT_BLOCK, true, TN, TE_BF16, true, false);
    bench_products(b, &of_batches, "batch bf16", TE_QUANT_NONE, false, TN, TE_BF16, false, false);
    bench_products(b, &of_batches, "batch fp8", TE_QUANT_CURRENT, false, TN, TE_BF16, false, false);
    bench_decoded(b, &of_batches, "batch mxfp8", TE_QUANT_MXFP8);
    bench_decoded(b, &of_batches, "batch nvfp4", TE_QUANT_NVFP4);
    bench_decoded(b, &with_gemv, "gemv mxfp8", TE_QUANT_MXFP8);
    bench_decoded(b, &with_gemv, "gemv nvfp4", TE_QUANT_NVFP4);
    bench_quantizing(b, "gemv quantizing current", TE_QUANT_CURRENT);
    bench_quantizing(b, "gemv quantizing blocks", TE_QUANT_BLOCK);
    bench_quantizing(b, "gemv quantizing mxfp8", TE_QUANT_MXFP8);
    bench_quantizing(b, "gemv quantizing nvfp4", TE_QUANT_NVFP4);
    bench_epilogues(b);
    bench_odd(b);
    bench_host(b);
    bench_host_calls(b);
    bench_steps(b, "small", 512, 1024, 8, 2, 128, 1);
    bench_steps(b, "8B", 4096, 14336, 32, 8, 2048, 4);
    bench_memory(b, 16384, 4096);
    bench_memory(b, 8192, 8192);
    bench_other_memory(b, 16384, 4096, 128256);
    bench_masks(b, 8192);
    bench_argmax(b, 1);
    bench_argmax(b, 64);
    bench_adam(b, 500, 1 << 20);
    bench_casts(b);
    bench_cross_entropy(b, 8192, 128256);
    bench_layer(b, 8192);
    bench_whole_layer(b, 8192, 1);
    bench_whole_layer(b, 4096, 2);
    bench_model(b, 12, 8192);
    for (i = 0; i < (int)(sizeof attention / sizeof *attention); i++)
        bench_attention(b, attention[i].batch, attention[i].heads, attention[i].groups, attention[i].s, attention[i].d, attention[i].causal, false);
    bench_attention(b, 4, 32, 32, 4096, 128, true, true);
    bench_attention_fp8(b, 1, 32, 8, 8192, 128, true);
    bench_attention_fp8(b, 4, 32, 8, 4096, 128, true);
    bench_attention_fp8(b, 1, 32, 8, 16384, 128, true);
    bench_attention_fp8(b, 4, 32, 8, 4096, 128, false);
    bench_attention_fp8(b, 4, 32, 8, 4096, 64, true);
    bench_attention_variants(b);
    bench_sparse_attention(b, 64, 4096, 512);
    for (int i = 0; i < 8; i++) bench_decode(b, i / 2 % 2 ? 32 : 1, 32, i < 4 ? 8 : 32, i < 4 ? 8192 : 4096, 128, i % 2, false);
    bench_decode(b, 1, 32, 8, 512, 128, false, false);
    for (int i = 0; i < 4; i++) bench_decode(b, i / 2 ? 32 : 1, 32, 8, 8192, 128, i % 2, true);
    for (int i = 0; i < 4; i++) bench_inference(b, &layers_of_8b, (const int[]){1, 8, 32, 0}[i]);
    for (int i = 0; i < 2; i++) bench_inference(b, &whole_models[i], 1);
    bench_grouped(b);
}

#include "ranks.h"
#include "bench_dist.h"

int main(int argc, char **argv) {
    bench b = TE_ZERO;
    cublaslt lt = TE_ZERO;
    te_ctx_desc desc = TE_ZERO;
    te_tensor *pair[2];
    int64_t bytes;
    bool pushed, tunes = false, small = false;
    const char *csv = NULL, *device = NULL;
    int i, status = 0;
    b.words = (const char **)argv;
    for (i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--csv") == 0 && i + 1 < argc)
            csv = argv[++i];
        else if (strcmp(argv[i], "--device") == 0 && i + 1 < argc)
            device = argv[++i];
        else if (strcmp(argv[i], "--small") == 0)
            small = true;
        else if (strcmp(argv[i], "--profile") == 0)
            b.profile = true;
        else if (strcmp(argv[i], "--tune") == 0)
            tunes = true;
        else if (argv[i][0] == '-') {
            fprintf(stderr, "te_bench: %s\nusage: te_bench [--csv FILE] [--profile] [WORD ...]\n       te_bench dist [--csv FILE] [--device NAME] [--small] [PART ...]\n       te_bench --tune [MxNxK | all] [LAYOUT] [f32] [FORMAT]\n", argv[i]);
            return 2;
        } else
            argv[b.num_words++] = argv[i];
    }
    if (b.num_words && !strcmp(b.words[0], "dist")) return bench_dist(&b, device, csv, small);
    if (csv) b.csv = fopen(csv, "w");
    if (device || small) {
        fprintf(stderr, "te_bench: %s is of te_bench dist\n", device ? "--device" : "--small");
        return 2;
    }
    desc.device = "cuda:0";
    b.te = te_ctx_create(&desc);
    if (!te_ok(b.te)) {
        fprintf(stderr, "te_bench: %s\n", te_error(b.te));
        te_ctx_destroy(b.te);
        return 1;
    }
    te_scope_begin(b.te);
    if (te__cuda_enter(b.te, &pushed) != TE_OK) return 1;
    te__cu.EventCreate(&b.start, 0);
    te__cu.EventCreate(&b.end, 0);
    bytes = 64 << 20;
    b.flush = te_tensor_empty(b.te, TE_F32, 1, &bytes);
    b.flushed = te__empty_1d(b.te, TE_F32, 1);
    if (lt_open(&lt)) {
        bytes = 64 << 20;
        lt.workspace = te_tensor_empty(b.te, TE_U8, 1, &bytes);
        b.lt = &lt;
    }
    te__cuda_leave(pushed);
    bytes = (int64_t)1 << 30;
    pair[0] = te_tensor_empty(b.te, TE_U8, 1, &bytes);
    pair[1] = te_tensor_empty(b.te, TE_U8, 1, &bytes);
    b.copy_rate = 2.0 * (double)bytes / measure(&b, run_copy, pair);
    te__drop(pair[0]);
    te__drop(pair[1]);
    bench_head(&b);
    if (tunes) status = tune(&b);
    else measure_all(&b);
    te_scope_end(b.te);
    te_ctx_destroy(b.te);
    if (b.csv) fclose(b.csv);
    return status;
}
