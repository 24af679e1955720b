/* test_gemm.c: matrix products: every format and layout against float64, tails, padding, epilogues, split k, empty sizes, all fp8 codes,
 * the same bits from any number of threads, and complaints. */
#include "../te_test.h"

typedef struct gemm_case {
    int64_t m, n, k;
    te_dtype a, b, d, bias; /* bias: TE_DTYPE_NONE for none */
    bool a_transposed, b_transposed, accumulate, split_accumulator, scaled;
    te_epilogue epilogue;
    int64_t pad; /* columns beyond the matrix in A, B, D and aux: NaN in A and B, untouched in the others */
} gemm_case;

static void name_case(const gemm_case *c) {
    test_case("m=%lld n=%lld k=%lld %s%s x %s%s -> %s bias=%s%s%s%s epilogue=%d pad=%lld", (long long)c->m, (long long)c->n, (long long)c->k,
              te_dtype_name(c->a), c->a_transposed ? "^T" : "", te_dtype_name(c->b), c->b_transposed ? "^T" : "", te_dtype_name(c->d),
              te_dtype_name(c->bias), c->accumulate ? " accumulate" : "", c->split_accumulator ? " split" : "", c->scaled ? " scaled" : "",
              (int)c->epilogue, (long long)c->pad);
}

/* rows x cols values in rows of cols + pad; `fill` in between. */
static float *padded(const float *x, int64_t rows, int64_t cols, int64_t pad, float fill) {
    float *y = (float *)test_alloc((size_t)(rows * (cols + pad) + 1) * sizeof(float));
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < cols + pad; j++) y[i * (cols + pad) + j] = j < cols ? x[i * cols + j] : fill;
    return y;
}

static double gelu(double x) { return 0.5 * x * (1.0 + tanh(0.7978845608 * x * (1.0 + 0.044715 * x * x))); }
static double dgelu(double x) {
    double t = tanh(0.7978845608 * x * (1.0 + 0.044715 * x * x));
    return 0.5 * x * (1.0 - t * t) * 0.7978845608 * (1.0 + 3 * 0.044715 * x * x) + 0.5 * (1.0 + t);
}

/* What rounding to D costs, relative to the result: half a unit in the last place, and a little for the f32 before it. */
static double output_error(te_dtype d) { return d == TE_F32 ? 1e-6 : d == TE_BF16 ? 4.1e-3 : 5.2e-4; }
/* What the sums cost, relative to sum |a b|: rounding of f32 additions; on the GPU TF32 operands (each off by 2^-11 at most, so products
 * by 2^-10; in a short sum they need not cancel) and the 14 bits or so that Hopper's fp8 tensor cores keep between additions. */
static double sum_error(const gemm_case *c, bool cuda) {
    if (cuda && c->a == TE_F32) return 1e-3;
    if (cuda && (c->a == TE_F8E4M3 || c->a == TE_F8E5M2)) return c->split_accumulator ? 3e-4 : 1e-3;
    return 3e-6;
}

/* got [m, ld] against want [m, n], each element within its own bound. */
static void compare(const char *name, const float *got, int64_t ld, const double *want, const double *bound, int64_t m, int64_t n) {
    int64_t bad = 0, worst = 0;
    for (int64_t i = 0; i < m * n; i++) {
        double error = fabs((double)got[i / n * ld + i % n] - want[i]);
        if (error <= bound[i]) continue;
        if (!bad++) worst = i;
    }
    CHECK_MSG(bad == 0, "%s: %lld of %lld elements are off; first at (%lld, %lld): %g, not %g within %g", name, (long long)bad, (long long)(m * n),
              (long long)(worst / (n ? n : 1)), (long long)(worst % (n ? n : 1)), bad ? (double)got[worst / n * ld + worst % n] : 0.0,
              bad ? want[worst] : 0.0, bad ? bound[worst] : 0.0);
}

static void check_padding(const char *name, const float *got, const float *before, int64_t m, int64_t n, int64_t pad) {
    for (int64_t i = 0; i < m; i++)
        for (int64_t j = n; j < n + pad; j++)
            if (got[i * (n + pad) + j] != before[i * (n + pad) + j]) {
                test_fail(__FILE__, __LINE__, "%s: padding at (%lld, %lld) was written", name, (long long)i, (long long)j);
                return;
            }
}

static void run_case(te_ctx *te, const gemm_case *c) {
    bool cuda = te_ctx_is_cuda(te);
    int64_t m = c->m, n = c->n, k = c->k, pad = c->pad, ra = c->a_transposed ? k : m, ca = c->a_transposed ? m : k, rb = c->b_transposed ? n : k,
            cb = c->b_transposed ? k : n;
    float *a = test_rounded(c->a, test_normal(ra * ca, 1), ra * ca), *b = test_rounded(c->b, test_normal(rb * cb, 2), rb * cb);
    float *bias = test_rounded(c->bias ? c->bias : TE_F32, test_normal(n, 3), n);
    float *old = test_rounded(c->d, test_normal(m * n, 4), m * n), *aux = test_rounded(c->d, test_normal(m * n, 5), m * n);
    float scale_a = 0.37f, scale_b = 1.7f;
    double scale = c->scaled ? (double)(scale_a * scale_b) : 1.0, rounding = output_error(c->d), summing = sum_error(c, cuda);
    float *d_before = padded(old, m, n, pad, 7.0f), *aux_before = padded(aux, m, n, pad, 7.0f);
    te_gemm_args g;
    memset(&g, 0, sizeof g);
    name_case(c);
    g.a = test_tensor(te, c->a, SHAPE(ra, ca + pad), padded(a, ra, ca, pad, NAN));
    g.b = test_tensor(te, c->b, SHAPE(rb, cb + pad), padded(b, rb, cb, pad, NAN));
    g.d = test_guarded_with(te, c->d, SHAPE(m, n + pad), d_before);
    if (c->bias) g.bias = test_tensor(te, c->bias, SHAPE(n), bias);
    if (c->epilogue) g.aux = test_guarded_with(te, c->d, SHAPE(m, n + pad), aux_before);
    if (c->scaled) {
        g.scale_a = test_tensor(te, TE_F32, SHAPE(1), &scale_a);
        g.scale_b = test_tensor(te, TE_F32, SHAPE(1), &scale_b);
    }
    g.m = m, g.n = n, g.k = k;
    g.a_transposed = c->a_transposed, g.b_transposed = c->b_transposed, g.accumulate = c->accumulate, g.split_accumulator = c->split_accumulator;
    g.epilogue = c->epilogue;
    REQUIRE_OK(te);
    te_gemm(te, &g);
    REQUIRE_OK(te);

    double *want = (double *)test_alloc((size_t)(m * n + 1) * sizeof(double)), *bound = (double *)test_alloc((size_t)(m * n + 1) * sizeof(double));
    double *pre = (double *)test_alloc((size_t)(m * n + 1) * sizeof(double)), *pre_bound = (double *)test_alloc((size_t)(m * n + 1) * sizeof(double));
    for (int64_t i = 0; i < m; i++)
        for (int64_t j = 0; j < n; j++) {
            double sum = 0, size = 0, v;
            for (int64_t p = 0; p < k; p++) {
                double term = (double)a[c->a_transposed ? p * m + i : i * k + p] * (double)b[c->b_transposed ? j * k + p : p * n + j];
                sum += term;
                size += fabs(term);
            }
            v = scale * sum + (c->bias ? (double)bias[j] : 0.0);
            size = scale * size * summing;
            pre[i * n + j] = v;
            pre_bound[i * n + j] = fabs(v) * rounding + size + 1e-6;
            if (c->epilogue == TE_EPILOGUE_GELU) {
                v = gelu(v);
                size *= 1.2; /* the largest slope of GELU is 1.13 */
            } else if (c->epilogue == TE_EPILOGUE_DGELU) {
                v *= dgelu((double)aux[i * n + j]);
                size *= 1.2;
            }
            if (c->accumulate) v += (double)old[i * n + j];
            want[i * n + j] = v;
            bound[i * n + j] = (fabs(v) + (c->accumulate ? fabs((double)old[i * n + j]) : 0)) * rounding + size + 2e-6;
        }
    compare("D", test_read(g.d), n + pad, want, bound, m, n);
    check_padding("D", test_read(g.d), d_before, m, n, pad);
    if (c->epilogue == TE_EPILOGUE_GELU) compare("aux", test_read(g.aux), n + pad, pre, pre_bound, m, n);
    if (c->epilogue) check_padding("aux", test_read(g.aux), aux_before, m, n, pad);
}

static const te_dtype formats[][2] = {{TE_F32, TE_F32},         {TE_F16, TE_F16},         {TE_BF16, TE_BF16},
                                      {TE_F8E4M3, TE_F8E4M3}, {TE_F8E5M2, TE_F8E4M3}, {TE_F8E4M3, TE_F8E5M2}};
static const te_dtype outputs[] = {TE_F32, TE_BF16, TE_F16};

/* One case of each format and layout for each shape; the other choices go round. */
TE_TEST_DEVICES(gemm_formats) {
    static const int64_t shapes[][4] = {{1, 1, 1, 0}, {16, 16, 16, 0}, {17, 33, 129, 1}, {96, 128, 64, 16}, {100, 136, 264, 8}, {131, 257, 72, 0}, {3, 300, 40, 5}};
    int turn = 0;
    for (int s = 0; s < COUNT(shapes); s++)
        for (int f = 0; f < COUNT(formats); f++)
            for (int layout = 0; layout < 4; layout++) {
                gemm_case c;
                memset(&c, 0, sizeof c);
                c.m = shapes[s][0], c.n = shapes[s][1], c.k = shapes[s][2], c.pad = shapes[s][3];
                c.a = formats[f][0], c.b = formats[f][1], c.d = outputs[turn % 3];
                c.a_transposed = layout & 1, c.b_transposed = !(layout & 2);
                if (f >= 3 && layout) continue; /* fp8 operands run along k */
                c.bias = turn % 2 ? outputs[turn / 2 % 3] : TE_DTYPE_NONE;
                c.accumulate = turn % 5 == 1;
                c.split_accumulator = turn % 2;
                c.scaled = turn % 3 == 0;
                turn++;
                run_case(te, &c);
            }
}

TE_TEST_DEVICES(gemm_epilogues) {
    for (int e = TE_EPILOGUE_NONE; e <= TE_EPILOGUE_DGELU; e++)
        for (int d = 0; d < COUNT(outputs); d++)
            for (int turn = 0; turn < 4; turn++) {
                gemm_case c;
                memset(&c, 0, sizeof c);
                c.m = 70, c.n = turn & 1 ? 83 : 136, c.k = 96, c.pad = turn & 1 ? 0 : 8;
                c.a = c.b = turn & 1 ? TE_BF16 : TE_F8E4M3;
                c.d = outputs[d];
                c.b_transposed = true;
                c.bias = turn & 2 ? outputs[(d + turn) % 3] : TE_DTYPE_NONE;
                c.accumulate = turn >= 2;
                c.scaled = true;
                c.epilogue = (te_epilogue)e;
                run_case(te, &c);
            }
}

/* Small D and long k: what a GPU splits over blocks. */
TE_TEST_DEVICES(gemm_long_k) {
    for (int f = 0; f < COUNT(formats); f++) {
        gemm_case c;
        memset(&c, 0, sizeof c);
        c.m = 20 + f, c.n = 24, c.k = 4096 + 40 * f, c.pad = f & 1 ? 0 : 16;
        c.a = formats[f][0], c.b = formats[f][1], c.d = outputs[f % 3];
        c.a_transposed = f < 3 && f != 1;
        c.b_transposed = f >= 3;
        c.bias = f & 1 ? TE_F32 : TE_DTYPE_NONE;
        c.accumulate = true;
        c.split_accumulator = true;
        run_case(te, &c);
    }
}

/* More tiles than a GPU has multiprocessors. */
TE_TEST_DEVICES(gemm_many_tiles) {
    if (!te_ctx_is_cuda(te)) SKIP("for the GPU's schedule; the CPU has none");
    for (int f = 0; f < 4; f++) {
        gemm_case c;
        memset(&c, 0, sizeof c);
        c.m = 1400, c.n = 1304, c.k = 200, c.pad = 8;
        c.a = formats[f][0], c.b = formats[f][1], c.d = outputs[f % 3];
        c.b_transposed = f != 2;
        c.a_transposed = f == 2;
        run_case(te, &c);
    }
}

TE_TEST_DEVICES(gemm_empty) {
    static const int64_t shapes[][3] = {{0, 5, 3}, {5, 0, 3}, {5, 7, 0}, {0, 0, 0}};
    for (int s = 0; s < COUNT(shapes); s++)
        for (int turn = 0; turn < 4; turn++) {
            gemm_case c;
            memset(&c, 0, sizeof c);
            c.m = shapes[s][0], c.n = shapes[s][1], c.k = shapes[s][2];
            c.a = c.b = c.d = TE_BF16;
            c.bias = turn & 1 ? TE_BF16 : TE_DTYPE_NONE;
            c.accumulate = turn >= 2;
            c.b_transposed = turn & 1;
            run_case(te, &c);
        }
}

/* Row i of A is code i and zeros, B is the identity: D has the value of every code, NaN and infinity included, in all formats of D. */
TE_TEST_DEVICES(gemm_fp8_codes) {
    static const te_dtype kinds[] = {TE_F8E4M3, TE_F8E5M2};
    for (int f = 0; f < 2; f++)
        for (int split = 0; split < 2; split++) {
            uint8_t *codes = (uint8_t *)test_alloc(256 * 16);
            float *identity = (float *)test_alloc(16 * 16 * sizeof(float)), *want = (float *)test_alloc(256 * 16 * sizeof(float));
            te_gemm_args g;
            memset(&g, 0, sizeof g);
            test_case("%s split=%d", te_dtype_name(kinds[f]), split);
            for (int i = 0; i < 256; i++) codes[16 * i + i % 16] = (uint8_t)i;
            for (int i = 0; i < 16; i++) identity[17 * i] = 1.0f;
            te_tensor *a = te_tensor_from_host(te, kinds[f], SHAPE(256, 16), codes);
            te_tensor_to_f32(a, want);
            for (int i = 0; i < 256; i++) /* 0 times NaN or infinity is NaN: it fills the row but for its own place */
                if (!isfinite(want[16 * i + i % 16]))
                    for (int j = 0; j < 16; j++)
                        if (j != i % 16) want[16 * i + j] = NAN;
            g.a = a;
            g.b = test_tensor(te, TE_F8E4M3, SHAPE(16, 16), identity);
            g.d = test_guarded(te, TE_F32, SHAPE(256, 16));
            g.m = 256, g.n = 16, g.k = 16;
            g.b_transposed = true;
            g.split_accumulator = split;
            te_gemm(te, &g);
            CHECK_OK(te);
            CHECK_CLOSE("D", test_read(g.d), want, 256 * 16, 0, 0);
        }
}

/* Views that are matrices with contiguous rows: a range of columns, merged leading dimensions. */
TE_TEST_DEVICES(gemm_views) {
    enum { B = 3, S = 5, H = 24, N = 10 };
    float *x = test_rounded(TE_BF16, test_normal(B * S * 3 * H, 1), B * S * 3 * H), *w = test_rounded(TE_BF16, test_normal(N * H, 2), N * H);
    double want[B * S * N], bound[B * S * N];
    te_gemm_args g;
    memset(&g, 0, sizeof g);
    g.a = te_tensor_narrow(test_tensor(te, TE_BF16, SHAPE(B, S, 3 * H), x), 2, H, H);
    g.b = test_tensor(te, TE_BF16, SHAPE(N, H), w);
    te_tensor *whole = test_guarded_with(te, TE_F32, SHAPE(B, S, 2 * N), test_normal(B * S * 2 * N, 3));
    float *before = test_read(whole);
    g.d = te_tensor_narrow(whole, 2, N, N);
    g.m = B * S, g.n = N, g.k = H;
    g.b_transposed = true;
    REQUIRE_OK(te);
    te_gemm(te, &g);
    REQUIRE_OK(te);
    for (int i = 0; i < B * S; i++)
        for (int j = 0; j < N; j++) {
            double sum = 0, size = 0;
            for (int p = 0; p < H; p++) {
                double term = (double)x[i * 3 * H + H + p] * (double)w[j * H + p];
                sum += term;
                size += fabs(term);
            }
            want[i * N + j] = sum;
            bound[i * N + j] = 1e-6 * size + 1e-6;
        }
    compare("D", test_read(whole) + N, 2 * N, want, bound, B * S, N);
    for (int i = 0; i < B * S; i++) CHECK_BYTES("left of D", test_read(whole) + i * 2 * N, before + i * 2 * N, N * sizeof(float));
}

/* Neither a second run nor the number of threads changes a bit. */
TE_TEST_DEVICES(gemm_same_bits) {
    enum { M = 205, N = 139, K = 1500 };
    float *a = test_normal(M * K, 1), *b = test_normal(K * N, 2);
    void *first = NULL;
    for (int run = 0; run < 4; run++) {
        te_ctx_desc desc;
        memset(&desc, 0, sizeof desc);
        desc.device = te_ctx_is_cuda(te) ? "cuda:0" : "cpu";
        desc.cpu_threads = run ? 2 * run - 1 : 1;
        te_ctx *own = test_context_with(&desc);
        te_gemm_args g;
        REQUIRE(own);
        memset(&g, 0, sizeof g);
        g.a = test_tensor(own, TE_BF16, SHAPE(M, K), a);
        g.b = test_tensor(own, TE_BF16, SHAPE(K, N), b);
        g.d = test_guarded(own, TE_F32, SHAPE(M, N));
        g.m = M, g.n = N, g.k = K;
        te_gemm(own, &g);
        REQUIRE_OK(own);
        void *bytes = test_read_bytes(g.d);
        if (first)
            CHECK_BYTES("D", bytes, first, M * N * sizeof(float));
        else
            first = bytes;
    }
}

TE_TEST_DEVICES(gemm_complaints) {
    te_tensor *a = te_tensor_zeros(te, TE_BF16, SHAPE(4, 6)), *b = te_tensor_zeros(te, TE_BF16, SHAPE(5, 6)), *d = te_tensor_zeros(te, TE_BF16, SHAPE(4, 5));
    te_tensor *e4m3 = te_tensor_zeros(te, TE_F8E4M3, SHAPE(8, 16)), *e5m2 = te_tensor_zeros(te, TE_F8E5M2, SHAPE(8, 16));
    te_gemm_args good, g;
    memset(&good, 0, sizeof good);
    good.a = a, good.b = b, good.d = d;
    good.m = 4, good.n = 5, good.k = 6;
    good.b_transposed = true;
    te_gemm(te, &good);
    CHECK_OK(te);

    g = good, g.a = NULL;
    CHECK(te_gemm(te, &g) == TE_ERR_INVALID);
    CHECK_ERROR(te, TE_ERR_INVALID, "A is NULL");
    g = good, g.k = 7;
    te_gemm(te, &g);
    CHECK_ERROR(te, TE_ERR_SHAPE, "A is [4, 6]; [m, k] makes it [4, 7] or more");
    g = good, g.b_transposed = false;
    te_gemm(te, &g);
    CHECK_ERROR(te, TE_ERR_SHAPE, "B is [5, 6]; [k, n] makes it [6, 5] or more");
    g = good, g.m = -1;
    te_gemm(te, &g);
    CHECK_ERROR(te, TE_ERR_INVALID, "cannot be negative");
    g = good, g.b = te_tensor_zeros(te, TE_F16, SHAPE(5, 6));
    te_gemm(te, &g);
    CHECK_ERROR(te, TE_ERR_DTYPE, "A is bf16 and B f16");
    g = good, g.d = te_tensor_zeros(te, TE_U8, SHAPE(4, 5));
    te_gemm(te, &g);
    CHECK_ERROR(te, TE_ERR_DTYPE, "D is u8");
    g = good, g.a = e5m2, g.b = e5m2;
    te_gemm(te, &g);
    CHECK_ERROR(te, TE_ERR_DTYPE, "both e5m2");
    g = good, g.a = e4m3, g.b = e4m3, g.b_transposed = false;
    te_gemm(te, &g);
    CHECK_ERROR(te, TE_ERR_INVALID, "contiguous along k");
    g = good, g.bias = te_tensor_zeros(te, TE_BF16, SHAPE(4));
    te_gemm(te, &g);
    CHECK_ERROR(te, TE_ERR_SHAPE, "bias is [4]");
    g = good, g.epilogue = TE_EPILOGUE_DGELU;
    te_gemm(te, &g);
    CHECK_ERROR(te, TE_ERR_INVALID, "aux is NULL");
    g = good, g.epilogue = TE_EPILOGUE_GELU, g.aux = te_tensor_zeros(te, TE_F32, SHAPE(4, 5));
    te_gemm(te, &g);
    CHECK_ERROR(te, TE_ERR_DTYPE, "aux is f32 and D bf16");
    g = good, g.aux = d;
    te_gemm(te, &g);
    CHECK_ERROR(te, TE_ERR_INVALID, "there is none");
    g = good, g.a = te_tensor_transpose(te_tensor_zeros(te, TE_BF16, SHAPE(6, 4)), 0, 1);
    te_gemm(te, &g);
    CHECK_ERROR(te, TE_ERR_SHAPE, "strided");
    g = good, g.scale_a = te_tensor_zeros(te, TE_F32, SHAPE(2));
    te_gemm(te, &g);
    CHECK_ERROR(te, TE_ERR_SHAPE, "scale_a");
}
