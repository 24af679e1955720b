/* tests/ops/test_gemm_choice.c: every tile, cluster and split that gemm could choose for a product, forced in turn, against the one that it does choose,
 * which test_gemm.c checks. A choice may change the order of sums, and nothing else. */
#define TE_STATIC
#define TE__TUNE
#define TE_IMPLEMENTATION
#include "../te_test.h"

typedef struct choice_case {
    te_dtype a, b, d;
    bool a_t, b_t, split_accumulator, accumulate, bias, aux, bias_gradient;
    te_epilogue epilogue;
    te_quant_kind kind; /* of fp8 operands with block scales */
    bool a_2d, b_2d;
    int64_t m, n, k;
} choice_case;

static te_tensor *random_tensor(te_ctx *te, te_dtype dtype, int64_t rows, int64_t cols, uint64_t seed) {
    int64_t shape[2];
    shape[0] = rows, shape[1] = cols;
    return te_tensor_from_f32(te, dtype, 2, shape, test_normal(rows * cols, seed));
}

/* Codes of one copy, and their scales. Those of 128 x 128 blocks differ from each block of rows to the next. */
static te_tensor *blocks_of(te_ctx *te, te_dtype dtype, int64_t rows, int64_t cols, bool two_d, uint64_t seed, te_tensor **scale) {
    te__quant_spec spec = TE_ZERO;
    float *values = test_normal(rows * cols, seed);
    te_tensor *q;
    spec.cls = te__quant_class_of(TE_QUANT_BLOCK);
    spec.dtype = dtype;
    spec.usage = TE_ROWWISE;
    spec.two_dimensional = two_d;
    for (int64_t i = 0; i < rows * cols; i++) values[i] *= two_d ? ldexpf(1, -(int)(i / cols / 128 % 3)) : 1;
    q = te__quantize(te_tensor_from_f32(te, TE_BF16, SHAPE(rows, cols), values), &spec);
    if (!q) return NULL;
    *scale = q->quantized->row.scale;
    return q->quantized->row.data;
}

/* D, aux and the bias gradient of one alternative; take -1: of the choice. */
static void run_choice(te_ctx *te, const choice_case *c, te_op_gemm_args g, int take, float **out) {
    int64_t m = c->m, n = c->n;
    float *old = test_rounded(c->d, test_normal(m * n, 4), m * n);
    g.d = test_guarded_with(te, c->d, SHAPE(m, n), old);
    if (c->aux) g.aux = test_guarded_with(te, c->d, SHAPE(m, n), old);
    if (c->bias_gradient) g.bias_gradient = test_guarded(te, TE_F32, SHAPE(n));
    te__gemm_tune.take = take;
    te__gemm_tune.count = 0;
    te_op_gemm(te, &g);
    te__gemm_tune.take = -1;
    REQUIRE_OK(te);
    if (!out) return;
    out[0] = test_read(g.d);
    out[1] = c->aux ? test_read(g.aux) : NULL;
    out[2] = c->bias_gradient ? test_read(g.bias_gradient) : NULL;
}

/* sqrt(k) is the size of a sum of products of normal numbers. Two roundings to D may differ by one of its steps, 2^-7 of bf16's value. Each of the k / 32
 * additions of fp8 products loses 2^-14 of the sum, on either side; f32 next to nothing; and what is between goes through GELU, whose slope is at most 1.2. A
 * column's sum collects m such differences, of either sign. */
static void check_outputs(const choice_case *c, float *const *got, float *const *want) {
    for (int o = 0; o < 3 && want[o]; o++)
        for (int64_t e = 0; e < (o == 2 ? c->n : c->m * c->n); e++) {
            double size = sqrt((double)c->k) * (o == 2 ? sqrt((double)c->m) : 1), error = fabs((double)got[o][e] - (double)want[o][e]);
            double step = te__is_fp8(c->a) ? fmax(1.2 * (double)c->k / 32 * 1.3e-4, 2e-3) : 2e-3;
            if (error <= 8e-3 * fabs((double)want[o][e]) + step * size) continue;
            CHECK_MSG(false, "output %d, element %lld (row %lld): %g, and %g by the choice", o, (long long)e, (long long)(e / c->n), (double)got[o][e], (double)want[o][e]);
            break;
        }
}

/* All alternatives against `want`; number: of the case. */
static void check_alternatives(te_ctx *te, const choice_case *c, int number, te_op_gemm_args g, float *const *want) {
    float *got[3];
    int alternatives;
    test_case("case %d", number);
    run_choice(te, c, g, -1, NULL);
    alternatives = te__gemm_tune.count;
    CHECK_MSG(alternatives > 0, "no alternatives were counted");
    te_warmup_begin(te); /* compiles them all at once */
    for (int take = 0; take < alternatives; take++) run_choice(te, c, g, take, NULL);
    te_warmup_end(te);
    for (int take = 0; take < alternatives; take++) {
        test_case("case %d, alternative %d", number, take);
        run_choice(te, c, g, take, got);
        check_outputs(c, got, want);
    }
}

/* The operands of a case, and its options. */
static te_op_gemm_args args_of(te_ctx *te, const choice_case *c) {
    te_op_gemm_args g = TE_ZERO;
    if (c->kind == TE_QUANT_BLOCK) {
        te_tensor *sa = NULL, *sb = NULL;
        g.a = blocks_of(te, c->a, c->m, c->k, c->a_2d, 1, &sa), g.b = blocks_of(te, c->b, c->n, c->k, c->b_2d, 2, &sb);
        g.scale_a = sa, g.scale_b = sb;
        g.scaling_a = c->a_2d ? TE_SCALING_BLOCK_2D : TE_SCALING_BLOCK_1D, g.scaling_b = c->b_2d ? TE_SCALING_BLOCK_2D : TE_SCALING_BLOCK_1D;
    } else {
        g.a = c->a_t ? random_tensor(te, c->a, c->k, c->m, 1) : random_tensor(te, c->a, c->m, c->k, 1);
        g.b = c->b_t ? random_tensor(te, c->b, c->n, c->k, 2) : random_tensor(te, c->b, c->k, c->n, 2);
    }
    if (c->bias) g.bias = te_tensor_from_f32(te, TE_BF16, SHAPE(c->n), test_normal(c->n, 3));
    g.m = c->m, g.n = c->n, g.k = c->k;
    g.a_transposed = c->a_t, g.b_transposed = c->b_t;
    g.split_accumulator = c->split_accumulator, g.accumulate = c->accumulate, g.epilogue = c->epilogue;
    return g;
}

/* Every fourth case from `first` on: four tests, which processes share. */
static void every_choice(te_ctx *te, int first) {
    static const choice_case cases[] = {
        {TE_BF16, TE_BF16, TE_BF16, false, true, false, false, true, true, false, TE_EPILOGUE_GELU, TE_QUANT_NONE, false, false, 300, 520, 2100},
        {TE_BF16, TE_BF16, TE_BF16, false, false, false, false, false, true, true, TE_EPILOGUE_DGELU, TE_QUANT_NONE, false, false, 300, 520, 1100},
        {TE_F16, TE_F16, TE_F16, true, true, false, true, true, false, false, TE_EPILOGUE_NONE, TE_QUANT_NONE, false, false, 136, 392, 1000},
        {TE_BF16, TE_BF16, TE_F32, true, false, false, true, false, false, false, TE_EPILOGUE_NONE, TE_QUANT_NONE, false, false, 264, 264, 4100},
        {TE_BF16, TE_BF16, TE_F32, false, true, false, false, true, true, true, TE_EPILOGUE_GELU, TE_QUANT_NONE, false, false, 130, 260, 600},
        {TE_BF16, TE_BF16, TE_F32, false, true, false, true, true, true, false, TE_EPILOGUE_DGELU, TE_QUANT_NONE, false, false, 130, 260, 600},
        {TE_BF16, TE_BF16, TE_BF16, true, false, false, false, true, false, false, TE_EPILOGUE_NONE, TE_QUANT_NONE, false, false, 17, 1000, 1040},
        {TE_BF16, TE_BF16, TE_BF16, false, true, false, false, true, false, true, TE_EPILOGUE_NONE, TE_QUANT_NONE, false, false, 2700, 3100, 300},
        {TE_F8E4M3, TE_F8E4M3, TE_BF16, false, true, false, false, true, true, false, TE_EPILOGUE_GELU, TE_QUANT_NONE, false, false, 1400, 2200, 1100},
        {TE_F8E5M2, TE_F8E4M3, TE_F32, false, true, true, true, false, false, false, TE_EPILOGUE_NONE, TE_QUANT_NONE, false, false, 270, 136, 2064},
        {TE_F8E4M3, TE_F8E4M3, TE_BF16, false, true, true, false, false, true, true, TE_EPILOGUE_DGELU, TE_QUANT_NONE, false, false, 2000, 1500, 400},
        {TE_F8E4M3, TE_F8E4M3, TE_BF16, false, true, true, false, true, true, false, TE_EPILOGUE_GELU, TE_QUANT_NONE, false, false, 700, 1104, 1040},
        {TE_F8E4M3, TE_F8E4M3, TE_BF16, false, true, true, false, true, false, false, TE_EPILOGUE_NONE, TE_QUANT_BLOCK, false, true, 1500, 1700, 2000},
        {TE_F8E4M3, TE_F8E5M2, TE_F32, false, true, true, true, false, false, false, TE_EPILOGUE_NONE, TE_QUANT_BLOCK, false, false, 1300, 264, 2048},
        {TE_F8E4M3, TE_F8E4M3, TE_F32, false, true, true, false, false, false, false, TE_EPILOGUE_NONE, TE_QUANT_BLOCK, true, false, 72, 1000, 4000},
        /* rows of A, B or D that start anywhere */
        {TE_BF16, TE_BF16, TE_BF16, false, true, false, false, true, false, false, TE_EPILOGUE_NONE, TE_QUANT_NONE, false, false, 300, 521, 1101},
        {TE_BF16, TE_BF16, TE_BF16, false, false, false, false, true, true, false, TE_EPILOGUE_GELU, TE_QUANT_NONE, false, false, 130, 517, 333},
        {TE_BF16, TE_BF16, TE_F32, true, false, false, true, false, false, false, TE_EPILOGUE_NONE, TE_QUANT_NONE, false, false, 261, 131, 777},
        {TE_BF16, TE_BF16, TE_BF16, true, false, false, true, false, false, false, TE_EPILOGUE_NONE, TE_QUANT_NONE, false, false, 264, 261, 600},
        {TE_F16, TE_F16, TE_F16, true, true, false, false, true, false, false, TE_EPILOGUE_NONE, TE_QUANT_NONE, false, false, 137, 392, 1001},
        {TE_BF16, TE_BF16, TE_BF16, false, true, false, false, true, false, false, TE_EPILOGUE_NONE, TE_QUANT_NONE, false, false, 17, 1001, 1041},
        {TE_BF16, TE_BF16, TE_BF16, false, false, false, false, false, false, false, TE_EPILOGUE_NONE, TE_QUANT_NONE, false, false, 5, 3, 7},
        {TE_BF16, TE_BF16, TE_BF16, false, true, false, false, true, true, false, TE_EPILOGUE_GELU, TE_QUANT_NONE, false, false, 264, 521, 1024},
        {TE_BF16, TE_BF16, TE_BF16, false, true, false, false, false, true, true, TE_EPILOGUE_DGELU, TE_QUANT_NONE, false, false, 300, 1101, 512},
        {TE_BF16, TE_BF16, TE_F16, false, true, false, true, true, false, false, TE_EPILOGUE_GELU, TE_QUANT_NONE, false, false, 135, 259, 512},
        {TE_BF16, TE_BF16, TE_F32, false, true, false, false, false, true, false, TE_EPILOGUE_DGELU, TE_QUANT_NONE, false, false, 135, 259, 512},
        {TE_F8E4M3, TE_F8E4M3, TE_BF16, false, true, false, false, true, false, false, TE_EPILOGUE_NONE, TE_QUANT_NONE, false, false, 700, 1101, 1040},
        {TE_F8E4M3, TE_F8E4M3, TE_F16, false, true, true, false, true, false, false, TE_EPILOGUE_NONE, TE_QUANT_NONE, false, false, 700, 1101, 1040},
        {TE_F8E4M3, TE_F8E4M3, TE_F32, false, true, true, true, false, false, false, TE_EPILOGUE_NONE, TE_QUANT_BLOCK, false, true, 400, 701, 1024},
        /* several tiles a block, and both warpgroups of those that take turns */
        {TE_BF16, TE_BF16, TE_BF16, false, false, false, false, true, false, false, TE_EPILOGUE_NONE, TE_QUANT_NONE, false, false, 1500, 1701, 333},
        {TE_BF16, TE_BF16, TE_BF16, false, true, false, false, false, true, true, TE_EPILOGUE_DGELU, TE_QUANT_NONE, false, false, 2000, 2504, 400},
        {TE_BF16, TE_BF16, TE_BF16, false, false, false, false, false, true, false, TE_EPILOGUE_DGELU, TE_QUANT_NONE, false, false, 200, 264, 333},
        {TE_BF16, TE_BF16, TE_F32, false, true, false, false, false, false, false, TE_EPILOGUE_NONE, TE_QUANT_NONE, false, false, 65, 65, 2101},
    };
    if (!te_ctx_is_cuda(te)) SKIP("for the GPU's choices; the CPU has none");
    for (int i = first; i < COUNT(cases); i += 4) {
        const choice_case *c = &cases[i];
        float *want[3];
        te_op_gemm_args g = args_of(te, c);
        REQUIRE_OK(te);
        test_case("case %d, the choice", i);
        run_choice(te, c, g, -1, want);
        check_alternatives(te, c, i, g, want);
    }
}
TE_TEST_DEVICES(gemm_every_choice_0) { every_choice(te, 0); }
TE_TEST_DEVICES(gemm_every_choice_1) { every_choice(te, 1); }
TE_TEST_DEVICES(gemm_every_choice_2) { every_choice(te, 2); }
TE_TEST_DEVICES(gemm_every_choice_3) { every_choice(te, 3); }

/* A product, D's memory, rows of `beside` elements beyond n of which the first `front` lie in front of D, and the kinds of rows that its phases have. */
typedef struct phases_case {
    choice_case c;
    int64_t beside, front;
    int phases;
} phases_case;

/* Launches of a kernel in the plan of a product. */
static int launches_of(te_ctx *te, const te_op_gemm_args *g, const char *kernel) {
    te__plan *plan = (te__plan *)malloc(sizeof *plan);
    int count = 0;
    bool pushed;
    if (te__cuda_enter(te, &pushed) == TE_OK) {
        te__cuda_plan(te, plan, &te__ops[TE_OP_GEMM], g);
        for (int i = 0; i < plan->num_launches; i++) count += strcmp(plan->launch[i].kernel, kernel) == 0;
        te__plan_end(plan);
        te__cuda_leave(pushed);
    }
    free(plan);
    return count;
}

/* All of D's memory. As a whole D is one product; by phases it is one for each phase, and two GEMVs for the columns at its ends. */
static float *run_phases(te_ctx *te, const phases_case *p, te_op_gemm_args g, bool by_phases) {
    int64_t m = p->c.m, cols = p->c.n + p->beside, from = te__gemm_phased_from;
    te_tensor *whole = test_guarded_with(te, p->c.d, SHAPE(m, cols), test_normal(m * cols, 4));
    g.d = te_tensor_narrow(whole, 1, p->front, cols - p->front);
    te__gemm_phased_from = by_phases ? 0 : from;
    CHECK_EQ_INT(launches_of(te, &g, "gemm_hopper"), by_phases ? p->phases : 1);
    CHECK_EQ_INT(launches_of(te, &g, "gemv_k"), by_phases ? 2 : 0);
    te_op_gemm(te, &g);
    te__gemm_phased_from = from;
    return test_read(whole);
}

/* D whose rows start anywhere, multiplied by phases as large ones are, against D as a whole. Memory in front of D, behind it and between its rows is untouched. */
TE_TEST_DEVICES(gemm_by_phases) {
    static const phases_case cases[] = {
        {{TE_BF16, TE_BF16, TE_BF16, false, true, false, false, false, false, false, TE_EPILOGUE_NONE, TE_QUANT_NONE, false, false, 1000, 321, 200}, 0, 0, 8},
        {{TE_BF16, TE_BF16, TE_BF16, false, true, false, false, false, false, false, TE_EPILOGUE_NONE, TE_QUANT_NONE, false, false, 517, 642, 77}, 0, 0, 4},
        {{TE_BF16, TE_BF16, TE_BF16, false, true, false, false, false, false, false, TE_EPILOGUE_NONE, TE_QUANT_NONE, false, false, 200, 67, 136}, 5, 0, 1},
        {{TE_BF16, TE_BF16, TE_BF16, false, true, false, false, false, false, false, TE_EPILOGUE_GELU, TE_QUANT_NONE, false, false, 300, 127, 136}, 9, 1, 1},
        {{TE_F16, TE_F16, TE_F16, false, true, false, false, false, false, false, TE_EPILOGUE_GELU, TE_QUANT_NONE, false, false, 300, 68, 2000}, 0, 0, 2},
        {{TE_F16, TE_F16, TE_F16, false, true, false, false, false, false, false, TE_EPILOGUE_NONE, TE_QUANT_NONE, false, false, 64, 64, 64}, 7, 3, 8},
        {{TE_F16, TE_F16, TE_F32, false, true, false, false, false, false, false, TE_EPILOGUE_NONE, TE_QUANT_NONE, false, false, 259, 130, 128}, 0, 0, 2},
        {{TE_BF16, TE_BF16, TE_F32, false, true, false, false, false, false, false, TE_EPILOGUE_NONE, TE_QUANT_NONE, false, false, 1027, 131, 128}, 2, 1, 4},
        {{TE_F8E4M3, TE_F8E4M3, TE_BF16, false, true, false, false, false, false, false, TE_EPILOGUE_NONE, TE_QUANT_NONE, false, false, 2048, 1301, 768}, 0, 0, 8},
        {{TE_F8E5M2, TE_F8E4M3, TE_F32, false, true, true, false, false, false, false, TE_EPILOGUE_NONE, TE_QUANT_NONE, false, false, 364, 367, 1041}, 0, 0, 4},
        /* a tile has scales of two blocks of B; 1027: so have D's last columns */
        {{TE_F8E4M3, TE_F8E4M3, TE_BF16, false, true, true, false, false, false, false, TE_EPILOGUE_NONE, TE_QUANT_BLOCK, false, true, 1111, 1027, 768}, 0, 0, 8},
        {{TE_F8E4M3, TE_F8E4M3, TE_BF16, false, true, true, false, false, false, false, TE_EPILOGUE_NONE, TE_QUANT_BLOCK, false, true, 515, 383, 256}, 6, 5, 8},
        {{TE_F8E5M2, TE_F8E4M3, TE_BF16, false, true, true, false, false, false, false, TE_EPILOGUE_GELU, TE_QUANT_BLOCK, false, true, 277, 636, 500}, 0, 0, 2},
        {{TE_F8E4M3, TE_F8E5M2, TE_F32, false, true, true, false, false, false, false, TE_EPILOGUE_NONE, TE_QUANT_BLOCK, false, true, 4100, 259, 144}, 0, 0, 4},
    };
    if (!te_ctx_is_cuda(te)) SKIP("for the GPU's choices; the CPU has none");
    for (int i = 0; i < COUNT(cases); i++) {
        const choice_case *c = &cases[i].c;
        const int64_t cols = c->n + cases[i].beside, front = cases[i].front;
        choice_case all = *c;
        te_op_gemm_args g = args_of(te, c);
        float *want[3] = {NULL}, *got[3] = {NULL}, *old = test_rounded(c->d, test_normal(c->m * cols, 4), c->m * cols);
        test_case("case %d", i);
        REQUIRE_OK(te);
        if (i == 0) {
            g.d = test_guarded(te, c->d, SHAPE(c->m, cols));
            if (!launches_of(te, &g, "gemm_hopper")) SKIP("for gemm_hopper");
        }
        want[0] = run_phases(te, &cases[i], g, false);
        got[0] = run_phases(te, &cases[i], g, true);
        REQUIRE_OK(te);
        all.n = cols;
        check_outputs(&all, got, want);
        for (int64_t e = 0; e < c->m * cols; e++)
            if (e % cols < front || e % cols >= front + c->n) CHECK(got[0][e] == old[e]);
    }
}

/* f32 rows that TMA cannot store whole are stored by gemm_hopper's stage: the GEMVs that give 16-bit products their last columns read no f32. */
TE_TEST(gemm_of_unaligned_f32_has_no_phases) {
    te_ctx *te = test_context("cpu");
    if (!te) return;
    for (int t = 0; t < 2; t++) {
        te_explanation e;
        te_op_gemm_args g = {.m = 4096, .n = 50257, .k = 768, .b_transposed = t == 0};
        g.a = te_tensor_describe(te, TE_F32, SHAPE(g.m, g.k)), g.d = te_tensor_describe(te, TE_F32, SHAPE(g.m, g.n));
        g.b = t == 0 ? te_tensor_describe(te, TE_F32, SHAPE(g.n, g.k)) : te_tensor_describe(te, TE_F32, SHAPE(g.k, g.n));
        REQUIRE_OK(te);
        CHECK(te_explain(te, TE_OP_GEMM, &g, "sm_90", &e) == TE_OK && e.supported);
        CHECK_STR(e.kernels, "gemm_hopper");
        CHECK_MSG(!strstr(e.kernels, "gemv"), "%s", e.kernels);
    }
    CHECK_OK(te);
}

/* x rounded to TF32, to the nearest; `slack` is one of its steps if x is a tie, which may go either way. */
static double nearest_tf32(float x, double *slack) {
    uint32_t bits, up;
    float y;
    memcpy(&bits, &x, 4);
    up = (bits + 0x1000u) & ~0x1fffu;
    memcpy(&y, &up, 4);
    *slack = (bits & 0x1fffu) == 0x1000u ? 2 * fabs((double)y - (double)x) : 0;
    return (double)y;
}
/* The products and sums of g in f64, of operands in TF32, and what ties may add. Operands lie as args_of makes them. */
static void product_of_tf32(const choice_case *c, const float *a, const float *b, int64_t row, int64_t column, double *sum, double *slack) {
    *sum = *slack = 0;
    for (int64_t k = 0; k < c->k; k++) {
        double of_a, of_b, x = nearest_tf32(a[c->a_t ? k * c->m + row : row * c->k + k], &of_a), y = nearest_tf32(b[c->b_t ? column * c->k + k : k * c->n + column], &of_b);
        *sum += x * y;
        *slack += of_a * fabs(y) + of_b * fabs(x);
    }
}

/* f32 rounded by TMA for wgmma: the choice against f64, and every choice against it. */
TE_TEST_DEVICES(gemm_rounds_f32) {
    static const choice_case cases[] = {
        {TE_F32, TE_F32, TE_F32, false, true, false, false, false, false, false, TE_EPILOGUE_NONE, TE_QUANT_NONE, false, false, 300, 260, 224},
        {TE_F32, TE_F32, TE_F32, true, true, false, false, false, false, false, TE_EPILOGUE_NONE, TE_QUANT_NONE, false, false, 130, 400, 1031},
        {TE_F32, TE_F32, TE_F32, true, false, false, false, false, false, false, TE_EPILOGUE_NONE, TE_QUANT_NONE, false, false, 129, 65, 640},
        {TE_F32, TE_F32, TE_F32, false, false, false, false, false, false, false, TE_EPILOGUE_NONE, TE_QUANT_NONE, false, false, 33, 35, 5},
        {TE_F32, TE_F32, TE_F32, false, true, false, false, false, false, false, TE_EPILOGUE_NONE, TE_QUANT_NONE, false, false, 1, 70, 33},
        {TE_F32, TE_F32, TE_F32, false, false, false, true, true, true, false, TE_EPILOGUE_GELU, TE_QUANT_NONE, false, false, 520, 132, 77},
        {TE_F32, TE_F32, TE_BF16, false, true, false, false, true, false, true, TE_EPILOGUE_NONE, TE_QUANT_NONE, false, false, 120, 65, 640},
        {TE_F32, TE_F32, TE_F32, false, true, false, false, false, true, true, TE_EPILOGUE_DGELU, TE_QUANT_NONE, false, false, 97, 200, 64},
    };
    const double from = te__gemm_turned_from;
    if (!te_ctx_is_cuda(te)) SKIP("for the GPU's choices; the CPU has none");
    for (int i = 0; i < COUNT(cases); i++) {
        const choice_case *c = &cases[i];
        te_op_gemm_args g = args_of(te, c);
        const float *a = test_read((te_tensor *)g.a), *b = test_read((te_tensor *)g.b);
        float *want[3];
        int hopper;
        REQUIRE_OK(te);
        test_case("case %d", i);
        te__gemm_turned_from = 0;
        g.d = test_guarded(te, c->d, SHAPE(c->m, c->n));
        hopper = launches_of(te, &g, "gemm_hopper");
        if (hopper) CHECK_EQ_INT(launches_of(te, &g, "transpose"), (c->a_t && c->m > 1) + (!c->b_t && c->n > 1));
        run_choice(te, c, g, -1, want);
        /* Sums in f32 lose a few units. Without rounding, wgmma would lose up to 2^-10 of each operand. */
        for (int64_t e = 0; i < 5 && e < c->m * c->n; e++) {
            double sum, slack;
            product_of_tf32(c, a, b, e / c->n, e % c->n, &sum, &slack);
            if (fabs((double)want[0][e] - sum) <= 2e-5 * sqrt((double)c->k) + 1e-5 * fabs(sum) + 1.01 * slack) continue;
            CHECK_MSG(false, "element %lld: %g, not %g within rounding, slack %g", (long long)e, (double)want[0][e], sum, slack);
            break;
        }
        if (hopper) check_alternatives(te, c, i, g, want);
        te__gemm_turned_from = from;
    }
}

/* A count of pieces that 32 bits do not hold is refused, and one that they do is not: no memory is needed to ask. */
TE_TEST(gemm_decodes_what_it_can_count) {
    te_ctx *te = test_context("cpu");
    te_op_gemm_args g = TE_ZERO;
    te__gemm_problem q = TE_ZERO;
    te__plan p;
    g.m = g.k = (int64_t)1 << 18, g.n = 64;
    g.scaling_a = g.scaling_b = TE_SCALING_NVFP4;
    q.args = &g;
    q.a.dtype = q.b.dtype = TE_F4E2M1;
    q.a.k_major = q.b.k_major = true;
    q.a.ld = q.b.ld = g.k;
    te__plan_begin(&p, te);
    CHECK(!te__gemm_plan_prepare(&p, &q));
    te__plan_end(&p);
    CHECK_ERROR(te, TE_ERR_UNSUPPORTED, "m, n, k = 262144, 64, 262144 have more than 64424509440 codes");
    g.m /= 2;
    CHECK(te__gemm_fits_prepare(&q));
}
