/* te_bench: how fast, as ratios against what this machine's own libraries reach in the same run: cuBLASLt (opened at run time, if it is
 * there) for products, a device-to-device copy for everything that moves memory.
 *
 *     te_bench [--csv FILE] [FILTER]
 *
 * Every figure is the median of at least 15 runs between CUDA events, on random normal data, with the L2 cache flushed before each run:
 * by writing, which leaves it as full of lines to be written back as a call that writes leaves it; before calls that only read, by writing
 * and then reading, since such a call leaves none either. Clocks are left as they are. */
#define TE_STATIC
#define TE_IMPLEMENTATION
#include "te.h"

/* ---- timing ---- */

typedef struct bench {
    te_ctx *te;
    te_tensor *flush; /* larger than the L2 cache */
    te_tensor *flushed;
    te__cu_handle start, end;
    bool reads_only;  /* what is measured writes next to nothing */
    double copy_rate; /* bytes a second, read and written */
    const char *filter;
    FILE *csv;
    struct cublaslt *lt;
} bench;

typedef void (*work_fn)(bench *b, void *arg);

static int by_value(const void *a, const void *b) {
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

/* Median seconds of one run. */
static double measure(bench *b, work_fn work, void *arg) {
    enum { RUNS = 15 };
    float times[RUNS];
    int i;
    bool pushed;
    for (i = 0; i < 3; i++) work(b, arg); /* compiles, fills the pool, wakes the clocks */
    te_synchronize(b->te);
    if (te__cuda_enter(b->te, &pushed) != TE_OK) return 0;
    for (i = 0; i < RUNS; i++) {
        te_tensor_fill(b->flush, i);
        if (b->reads_only) {
            te_amax_args read = TE_ZERO;
            read.x = b->flush;
            read.amax = b->flushed;
            te_amax(b->te, &read);
        }
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

static bool wanted(const bench *b, const char *name) { return strstr(name, b->filter) != NULL; }

/* `ours` and `theirs` in the same unit; theirs 0: nothing to compare with. */
static void report(bench *b, const char *name, const char *shape, double seconds, double ours, double theirs, const char *unit) {
    char ratio[32] = "-";
    if (!te_ok(b->te)) {
        printf("%-34s %-20s failed: %s\n", name, shape, te_error(b->te));
        te_clear_error(b->te);
        return;
    }
    if (theirs > 0) snprintf(ratio, sizeof ratio, "%.2f", ours / theirs);
    printf("%-34s %-20s %10.1f us %9.1f %-8s %9.1f  %s\n", name, shape, seconds * 1e6, ours, unit, theirs, ratio);
    fflush(stdout);
    if (b->csv) fprintf(b->csv, "%s,%s,%.3f,%.2f,%.2f,%s,%s\n", name, shape, seconds * 1e6, ours, theirs, unit, ratio);
}
static void report_bytes(bench *b, const char *name, const char *shape, double seconds, double bytes) {
    report(b, name, shape, seconds, bytes / seconds * 1e-9, b->copy_rate * 1e-9, "GB/s");
}

/* ---- cuBLASLt, the denominator ---- */

enum { LT_R_32F = 0, LT_R_16BF = 14, LT_R_8F_E4M3 = 28, LT_COMPUTE_32F = 68, LT_OP_T = 1, LT_OP_N = 0, LT_TRANSA = 3, LT_TRANSB = 4, LT_FAST_ACCUM = 25,
       LT_A_SCALE = 17, LT_B_SCALE = 18, LT_MAX_WORKSPACE = 1 };
typedef struct lt_heuristic {
    uint64_t algo[8];
    size_t workspace;
    int status;
    float waves;
    int reserved[4];
} lt_heuristic;
typedef struct cublaslt {
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
    return lt->Create(&lt->handle) == 0;
}

typedef struct product {
    te_gemm_args args;
    bool fast_accumulator;
    void *desc, *la, *lb, *ld; /* cuBLASLt's */
    lt_heuristic best;
} product;

static void run_ours(bench *b, void *arg) { te_gemm(b->te, &((product *)arg)->args); }
static void run_theirs(bench *b, void *arg) {
    product *p = (product *)arg;
    float one = 1, zero = 0;
    /* column-major: D^T = op(B)^T op(A)^T */
    b->lt->Matmul(b->lt->handle, p->desc, &one, te_tensor_data(p->args.b), p->la, te_tensor_data(p->args.a), p->lb, &zero, te_tensor_data(p->args.d), p->ld,
                  te_tensor_data(p->args.d), p->ld, p->best.algo, te_tensor_data(b->lt->workspace), te_tensor_bytes(b->lt->workspace), te_ctx_cu_stream(b->te));
}
static bool lt_prepare(bench *b, product *p) {
    const te_gemm_args *g = &p->args;
    int type = g->a->dtype == TE_F8E4M3 ? LT_R_8F_E4M3 : g->a->dtype == TE_BF16 ? LT_R_16BF : LT_R_32F, out = g->d->dtype == TE_BF16 ? LT_R_16BF : LT_R_32F;
    int ta = g->b_transposed ? LT_OP_T : LT_OP_N, tb = g->a_transposed ? LT_OP_T : LT_OP_N, got = 0;
    signed char fast = p->fast_accumulator;
    size_t bytes = te_tensor_bytes(b->lt->workspace);
    void *preference = NULL, *scale;
    cublaslt *lt = b->lt;
    if (lt->MatmulDescCreate(&p->desc, LT_COMPUTE_32F, LT_R_32F)) return false;
    lt->MatmulDescSetAttribute(p->desc, LT_TRANSA, &ta, sizeof ta);
    lt->MatmulDescSetAttribute(p->desc, LT_TRANSB, &tb, sizeof tb);
    if (type == LT_R_8F_E4M3) {
        lt->MatmulDescSetAttribute(p->desc, LT_FAST_ACCUM, &fast, sizeof fast);
        scale = te_tensor_data(g->scale_b);
        lt->MatmulDescSetAttribute(p->desc, LT_A_SCALE, &scale, sizeof scale);
        scale = te_tensor_data(g->scale_a);
        lt->MatmulDescSetAttribute(p->desc, LT_B_SCALE, &scale, sizeof scale);
    }
    lt->MatrixLayoutCreate(&p->la, type, (uint64_t)(ta ? g->k : g->n), (uint64_t)(ta ? g->n : g->k), ta ? g->k : g->n);
    lt->MatrixLayoutCreate(&p->lb, type, (uint64_t)(tb ? g->m : g->k), (uint64_t)(tb ? g->k : g->m), tb ? g->m : g->k);
    lt->MatrixLayoutCreate(&p->ld, out, (uint64_t)g->n, (uint64_t)g->m, g->n);
    lt->MatmulPreferenceCreate(&preference);
    lt->MatmulPreferenceSetAttribute(preference, LT_MAX_WORKSPACE, &bytes, sizeof bytes);
    return lt->MatmulAlgoGetHeuristic(lt->handle, p->desc, p->la, p->lb, p->ld, p->ld, preference, 1, &p->best, &got) == 0 && got > 0;
}

static void bench_gemm(bench *b, const char *name, te_dtype in, te_dtype out, bool a_t, bool b_t, bool split, int64_t m, int64_t n, int64_t k) {
    product p;
    char shape[64];
    double ours, theirs = 0, flops = 2.0 * (double)m * (double)n * (double)k;
    int64_t one = 1;
    if (!wanted(b, name)) return;
    memset(&p, 0, sizeof p);
    te_scope_begin(b->te);
    {
        int64_t sa[2], sb[2], sd[2];
        te_tensor *ra, *rb;
        sa[0] = a_t ? k : m;
        sa[1] = a_t ? m : k;
        sb[0] = b_t ? n : k;
        sb[1] = b_t ? k : n;
        sd[0] = m;
        sd[1] = n;
        ra = te_tensor_normal(b->te, te__is_fp8(in) ? TE_BF16 : in, 2, sa, 0, 1);
        rb = te_tensor_normal(b->te, te__is_fp8(in) ? TE_BF16 : in, 2, sb, 0, 1);
        if (te__is_fp8(in)) {
            te__quant_spec spec;
            memset(&spec, 0, sizeof spec);
            spec.kind = TE_QUANT_CURRENT;
            spec.dtype = in;
            spec.usage = TE_ROWWISE;
            ra = te__quantize(ra, &spec);
            rb = te__quantize(rb, &spec);
            p.args.scale_a = ra ? ra->quantized->row.scale : NULL;
            p.args.scale_b = rb ? rb->quantized->row.scale : NULL;
            ra = ra ? ra->quantized->row.data : NULL;
            rb = rb ? rb->quantized->row.data : NULL;
        }
        p.args.a = ra;
        p.args.b = rb;
        p.args.d = te_tensor_empty(b->te, out, 2, sd);
    }
    p.args.m = m;
    p.args.n = n;
    p.args.k = k;
    p.args.a_transposed = a_t;
    p.args.b_transposed = b_t;
    p.args.split_accumulator = split;
    p.fast_accumulator = !split;
    (void)one;
    snprintf(shape, sizeof shape, "%lldx%lldx%lld", (long long)m, (long long)n, (long long)k);
    ours = measure(b, run_ours, &p);
    if (b->lt && lt_prepare(b, &p)) theirs = measure(b, run_theirs, &p);
    report(b, name, shape, ours, flops / ours * 1e-12, theirs > 0 ? flops / theirs * 1e-12 : 0, "TFLOP/s");
    te_scope_end(b->te);
}

/* ---- products of scaled operands, against our own of bf16 ---- */

typedef struct scaled_product {
    te_tensor *a, *b;
    te_gemm_args args;
} scaled_product;
static void run_scaled(bench *b, void *arg) {
    scaled_product *p = (scaled_product *)arg;
    te__product(b->te, p->a, false, p->b, true, &p->args);
}

static void bench_scaled_gemm(bench *b, int64_t m, int64_t n, int64_t k) {
    static const struct {
        const char *name;
        te_quant_kind kind;
        bool b_2d;
    } row[] = {{"gemm fp8 blocks 1D x 2D", TE_QUANT_BLOCK, true}, {"gemm fp8 blocks 1D x 1D", TE_QUANT_BLOCK, false}, {"gemm mxfp8", TE_QUANT_MXFP8, false},
               {"gemm nvfp4", TE_QUANT_NVFP4, false}};
    double flops = 2.0 * (double)m * (double)n * (double)k, plain, seconds;
    scaled_product p;
    int64_t sa[2], sb[2], sd[2];
    char shape[64];
    int i;
    snprintf(shape, sizeof shape, "%lldx%lldx%lld", (long long)m, (long long)n, (long long)k);
    if (!wanted(b, "gemm fp8 blocks gemm mxfp8 gemm nvfp4")) return;
    te_scope_begin(b->te);
    sa[0] = m, sa[1] = sb[1] = k, sb[0] = sd[1] = n, sd[0] = m;
    memset(&p, 0, sizeof p);
    te_tensor *x = te_tensor_normal(b->te, TE_BF16, 2, sa, 0, 1), *w = te_tensor_normal(b->te, TE_BF16, 2, sb, 0, 1);
    p.args.d = te_tensor_empty(b->te, TE_BF16, 2, sd);
    p.a = x, p.b = w;
    plain = measure(b, run_scaled, &p);
    for (i = 0; i < 4; i++) {
        te__quant_spec spec;
        memset(&spec, 0, sizeof spec);
        spec.kind = row[i].kind;
        spec.dtype = row[i].kind == TE_QUANT_NVFP4 ? TE_F4E2M1 : TE_F8E4M3;
        spec.usage = TE_ROWWISE;
        p.a = te__quantize(x, &spec);
        spec.two_dimensional = row[i].b_2d;
        p.b = te__quantize(w, &spec);
        memset(&p.args, 0, sizeof p.args);
        p.args.d = te_tensor_empty(b->te, TE_BF16, 2, sd);
        p.args.split_accumulator = true;
        seconds = p.a && p.b ? measure(b, run_scaled, &p) : 1;
        report(b, row[i].name, shape, seconds, flops / seconds * 1e-12, flops / plain * 1e-12, "TFLOP/s");
    }
    te_scope_end(b->te);
}

/* ---- what a call costs the host ---- */

static void bench_host(bench *b) {
    static const te_quant_kind kinds[] = {TE_QUANT_DELAYED, TE_QUANT_CURRENT, TE_QUANT_BLOCK, TE_QUANT_MXFP8, TE_QUANT_NVFP4};
    enum { CALLS = 100, ROUNDS = 15 };
    static const int64_t sizes[] = {256, 4096}; /* the GPU idle, and busy all the time */
    int i, k, round, s;
    if (!wanted(b, "host time of a quantizer call")) return;
    { /* the driver's own share: the same kernel, planned once */
        te__plan *p = (te__plan *)malloc(sizeof *p);
        te_fill_args fill = TE_ZERO;
        te__cu_handle function;
        float times[ROUNDS];
        bool pushed;
        fill.dst = b->flushed;
        if (p && te_fill(b->te, &fill) == TE_OK && te__cuda_enter(b->te, &pushed) == TE_OK) {
            te__cuda_plan(b->te, p, TE_OP_FILL, &fill);
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
            report(b, "host time of a quantizer call", "a launch alone", (double)times[ROUNDS / 2], (double)times[ROUNDS / 2] * 1e6, 0, "us");
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
            snprintf(text, sizeof text, "%s %dx%d", te__quant_kind_name(kinds[i]), (int)sizes[s], (int)sizes[s]);
            report(b, "host time of a quantizer call", text, (double)times[ROUNDS / 2], (double)times[ROUNDS / 2] * 1e6, 0, "us");
            te_quantizer_destroy(q);
            te_scope_end(b->te);
        }
}

/* ---- what raw operations, a layer and a graph cost the host ---- */

typedef struct host_calls {
    te_ctx *te;
    te_gemm_args gemm;
    te_norm_fwd_args norm;
    te_norm_bwd_args norm_bwd;
    te_act_fwd_args act;
    te_act_bwd_args act_bwd;
    te_tensor *x;
    te_module *layer;
    te_optimizer *adam; /* NULL: forward and backward alone */
    te_recipe recipe;
    bool quantized;
    te_graph *graph;
} host_calls;
typedef void (*host_fn)(host_calls *h);

static void host_gemm(host_calls *h) { te_gemm(h->te, &h->gemm); }
static void host_norm(host_calls *h) { te_rmsnorm_fwd(h->te, &h->norm); }
static void host_norm_bwd(host_calls *h) { te_rmsnorm_bwd(h->te, &h->norm_bwd); }
static void host_act(host_calls *h) { te_act_fwd(h->te, &h->act); }
static void host_act_bwd(host_calls *h) { te_act_bwd(h->te, &h->act_bwd); }
static void host_upload(host_calls *h) {
    float numbers[64] = TE_ZERO;
    te_tensor_copy_from_host(h->x, numbers);
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

static void bench_host_calls(bench *b) {
    static const char what[] = "host time of a call";
    static const struct {
        const char *name;
        host_fn call;
    } raw[] = {{"te_gemm bf16", host_gemm}, {"te_rmsnorm_fwd", host_norm}, {"te_rmsnorm_bwd", host_norm_bwd}, {"te_act_fwd", host_act}, {"te_act_bwd", host_act_bwd},
               {"copy_from_host", host_upload}};
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
    h.x = te_tensor_empty(b->te, TE_F32, 1, &small);
    for (i = 0; i < 6; i++) {
        int launches = host_launches(&h, raw[i].call);
        double seconds = host_time(&h, raw[i].call, 100, false);
        char text[64];
        snprintf(text, sizeof text, "%s (%d)", raw[i].name, launches);
        report(b, what, text, seconds, seconds * 1e6, 0, "us");
    }
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
    layer.num_attention_heads = heads;
    layer.num_gqa_groups = groups;
    layer.normalization = TE_RMSNORM;
    layer.activation = TE_SWIGLU;
    layer.no_bias = true;
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
            report(b, what, text, seconds, seconds * 1e6, 0, "us");
        }
        calls = host_time(&h, host_layer, launch_bound ? 20 : 4, true);
        snprintf(text, sizeof text, "%s %s by calls", size, names[i]);
        report(b, what, text, calls, calls * 1e6, 0, "us");
        te_graph_begin(b->te);
        host_layer(&h);
        h.graph = te_graph_end(b->te);
        if (launch_bound) {
            seconds = host_time(&h, host_graph, 3, false);
            snprintf(text, sizeof text, "%s %s graph, host", size, names[i]);
            report(b, what, text, seconds, seconds * 1e6, 0, "us");
        }
        seconds = host_time(&h, host_graph, launch_bound ? 20 : 4, true);
        snprintf(text, sizeof text, "%s %s graph of %d", size, names[i], launches);
        report(b, what, text, seconds, seconds * 1e6, calls * 1e6, "us");
        te_graph_destroy(h.graph);
        te_optimizer_destroy(h.adam);
    }
    te_module_destroy(h.layer);
    te_scope_end(b->te);
}

/* ---- what moves memory ---- */

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

static void bench_memory(bench *b, int64_t m, int64_t n) {
    te_ctx *te = b->te;
    double e = (double)m * (double)n;
    char shape[64];
    any_call c;
    int64_t v[1];
    te_tensor *gamma, *mean, *rstd, *x, *dy;
    snprintf(shape, sizeof shape, "%lldx%lld bf16", (long long)m, (long long)n);
    te_scope_begin(te);
    v[0] = n;
    gamma = te_tensor_normal(te, TE_BF16, 1, v, 1, 0.1f);
    mean = te__empty_1d(te, TE_F32, m);
    rstd = te__empty_1d(te, TE_F32, m);
    te_tensor_fill(mean, 0);
    te_tensor_fill(rstd, 1);
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
    BENCH(LAYERNORM_FWD, "layernorm forward") {
        c.args.layernorm_fwd.x = x, c.args.layernorm_fwd.gamma = gamma, c.args.layernorm_fwd.beta = gamma, c.args.layernorm_fwd.y = dy;
        c.args.layernorm_fwd.mean = mean, c.args.layernorm_fwd.rstd = rstd;
        bench_call(b, "layernorm forward", shape, &c, e * 4);
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
        c.args.fp8_quantize.x = x, c.args.fp8_quantize.row = empty(b, TE_F8E4M3, m, n), c.args.fp8_quantize.scale = te_tensor_full(te, TE_F32, 1, (const int64_t[]){1}, 10);
        c.args.fp8_quantize.scale_inv = te__empty_1d(te, TE_F32, 1);
        bench_call(b, "quantize e4m3 rowwise", shape, &c, e * 3);
    }
    BENCH(FP8_QUANTIZE, "quantize e4m3 both copies") {
        c.args.fp8_quantize.x = x, c.args.fp8_quantize.row = empty(b, TE_F8E4M3, m, n), c.args.fp8_quantize.col = empty(b, TE_F8E4M3, n, m);
        c.args.fp8_quantize.scale = te_tensor_full(te, TE_F32, 1, (const int64_t[]){1}, 10), c.args.fp8_quantize.scale_inv = te__empty_1d(te, TE_F32, 1);
        bench_call(b, "quantize e4m3 both copies", shape, &c, e * 4);
    }
    BENCH(FP8_QUANTIZE, "quantize e4m3 current scaling both copies") { /* x is read twice */
        c.args.fp8_quantize.x = x, c.args.fp8_quantize.row = empty(b, TE_F8E4M3, m, n), c.args.fp8_quantize.col = empty(b, TE_F8E4M3, n, m);
        c.args.fp8_quantize.current = true, c.args.fp8_quantize.scale_inv = te__empty_1d(te, TE_F32, 1);
        bench_call(b, "quantize e4m3 current scaling both copies", shape, &c, e * 6);
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
        bench_call(b, "quantize 1x128 blocks both copies", shape, &c, e * 4);
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
        bench_call(b, "dequantize 1x128 blocks", shape, &c, e * 3);
    }
    BENCH(BLOCK_DEQUANTIZE, "dequantize 128x1 blocks") {
        c.args.block_dequantize.q = empty(b, TE_F8E4M3, n, m), c.args.block_dequantize.y = dy, c.args.block_dequantize.columnwise = true;
        c.args.block_dequantize.scale_inv = normal(b, TE_F32, te__div_up(m, 128), te__round_up(n, 4));
        bench_call(b, "dequantize 128x1 blocks", shape, &c, e * 3);
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
            te_nvfp4_quantize_args *a = &c.args.nvfp4_quantize;
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
    BENCH(ACT_FWD, "swiglu forward") {
        c.args.act_fwd.x = x, c.args.act_fwd.y = empty(b, TE_BF16, m, n / 2), c.args.act_fwd.activation = TE_SWIGLU;
        bench_call(b, "swiglu forward", shape, &c, e * 3);
    }
    BENCH(ACT_BWD, "swiglu backward") {
        c.args.act_bwd.x = x, c.args.act_bwd.dy = normal(b, TE_BF16, m, n / 2), c.args.act_bwd.dx = empty(b, TE_BF16, m, n), c.args.act_bwd.activation = TE_SWIGLU;
        bench_call(b, "swiglu backward", shape, &c, e * 5);
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
static void bench_attention(bench *b, int64_t batch, int64_t heads, int64_t groups, int64_t s, int64_t d, bool causal) {
    any_call c;
    char shape[64];
    int64_t q[4], kv[4], l[3];
    double flops = 4.0 * (double)batch * (double)heads * (double)s * (double)s * (double)d * (causal ? 0.5 : 1), seconds;
    te_tensor *tq, *tk, *tv, *o, *lse;
    if (!wanted(b, "attention")) return;
    te_scope_begin(b->te);
    q[0] = kv[0] = s, q[1] = kv[1] = batch, q[2] = heads, kv[2] = groups, q[3] = kv[3] = d;
    l[0] = batch, l[1] = heads, l[2] = s;
    tq = te_tensor_normal(b->te, TE_BF16, 4, q, 0, 1), tk = te_tensor_normal(b->te, TE_BF16, 4, kv, 0, 1), tv = te_tensor_normal(b->te, TE_BF16, 4, kv, 0, 1);
    o = te_tensor_empty(b->te, TE_BF16, 4, q), lse = te_tensor_empty(b->te, TE_F32, 3, l);
    snprintf(shape, sizeof shape, "b%d h%d/%d s%d d%d%s", (int)batch, (int)heads, (int)groups, (int)s, (int)d, causal ? " c" : "");
    memset(&c, 0, sizeof c);
    c.op = TE_OP_ATTN_FWD;
    c.args.attn_fwd.q = tq, c.args.attn_fwd.k = tk, c.args.attn_fwd.v = tv, c.args.attn_fwd.o = o, c.args.attn_fwd.lse = lse;
    c.args.attn_fwd.mask = causal ? TE_MASK_CAUSAL : TE_MASK_NONE;
    seconds = measure(b, run_call, &c);
    report(b, "attention forward", shape, seconds, flops / seconds * 1e-12, 0, "TFLOP/s");
    memset(&c, 0, sizeof c);
    c.op = TE_OP_ATTN_BWD;
    c.args.attn_bwd.q = tq, c.args.attn_bwd.k = tk, c.args.attn_bwd.v = tv, c.args.attn_bwd.o = o, c.args.attn_bwd.lse = lse;
    c.args.attn_bwd.d_o = te_tensor_normal(b->te, TE_BF16, 4, q, 0, 1);
    c.args.attn_bwd.dq = te_tensor_empty(b->te, TE_BF16, 4, q), c.args.attn_bwd.dk = te_tensor_empty(b->te, TE_BF16, 4, kv), c.args.attn_bwd.dv = te_tensor_empty(b->te, TE_BF16, 4, kv);
    c.args.attn_bwd.mask = causal ? TE_MASK_CAUSAL : TE_MASK_NONE;
    seconds = measure(b, run_call, &c);
    report(b, "attention backward", shape, seconds, 2.5 * flops / seconds * 1e-12, 0, "TFLOP/s");
    te_scope_end(b->te);
}

int main(int argc, char **argv) {
    bench b = TE_ZERO;
    cublaslt lt = TE_ZERO;
    te_ctx_desc desc = TE_ZERO;
    te_tensor *pair[2];
    int64_t bytes;
    bool pushed;
    int i;
    b.filter = "";
    for (i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--csv") == 0 && i + 1 < argc)
            b.csv = fopen(argv[++i], "w");
        else if (argv[i][0] == '-') {
            fprintf(stderr, "te_bench: %s\nusage: te_bench [--csv FILE] [FILTER]\n", argv[i]);
            return 2;
        } else
            b.filter = argv[i];
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
    printf("%s, te.h %d.%d.%d, %s; copy %.0f GB/s (read and written)\n", b.te->cuda->name, TE_VERSION_MAJOR, TE_VERSION_MINOR, TE_VERSION_PATCH,
           b.lt ? lt.path : "no cuBLASLt here: products have nothing to compare with", b.copy_rate * 1e-9);
    printf("%-34s %-20s %13s %18s %9s  ratio\n", "what", "shape", "time", "ours", "theirs");
    if (b.csv) fprintf(b.csv, "what,shape,microseconds,ours,theirs,unit,ratio\n");
    bench_gemm(&b, "gemm bf16 TN", TE_BF16, TE_BF16, false, true, false, 4096, 4096, 4096);
    bench_gemm(&b, "gemm bf16 NN", TE_BF16, TE_BF16, false, false, false, 4096, 4096, 4096);
    bench_gemm(&b, "gemm bf16 NT f32 out", TE_BF16, TE_F32, true, false, false, 4096, 4096, 4096);
    bench_gemm(&b, "gemm fp8 fast accumulation", TE_F8E4M3, TE_BF16, false, true, false, 4096, 4096, 4096);
    bench_gemm(&b, "gemm fp8 split accumulation", TE_F8E4M3, TE_BF16, false, true, true, 4096, 4096, 4096);
    bench_gemm(&b, "gemm f32 as TF32 TN", TE_F32, TE_F32, false, true, false, 4096, 4096, 4096);
    bench_gemm(&b, "gemm bf16 TN", TE_BF16, TE_BF16, false, true, false, 8192, 8192, 8192);
    bench_gemm(&b, "gemm fp8 fast accumulation", TE_F8E4M3, TE_BF16, false, true, false, 8192, 8192, 8192);
    bench_gemm(&b, "gemm bf16 TN", TE_BF16, TE_BF16, false, true, false, 8192, 3072, 1024);
    bench_gemm(&b, "gemm bf16 TN", TE_BF16, TE_BF16, false, true, false, 64, 2112, 7168);
    bench_scaled_gemm(&b, 4096, 4096, 4096);
    bench_scaled_gemm(&b, 8192, 8192, 8192);
    bench_host(&b);
    bench_host_calls(&b);
    bench_steps(&b, "small", 512, 1024, 8, 2, 128, 1);
    bench_steps(&b, "8B", 4096, 14336, 32, 8, 2048, 4);
    bench_memory(&b, 16384, 4096);
    bench_memory(&b, 8192, 8192);
    bench_adam(&b, 500, 1 << 20);
    bench_cross_entropy(&b, 8192, 128256);
    bench_attention(&b, 4, 32, 32, 4096, 128, true);
    bench_attention(&b, 4, 32, 32, 4096, 64, true);
    bench_attention(&b, 2, 32, 8, 8192, 128, false);
    te_scope_end(b.te);
    te_ctx_destroy(b.te);
    if (b.csv) fclose(b.csv);
    return 0;
}
