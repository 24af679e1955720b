/* NVFP4: codes, block scales and amaxes against the formulas written down again in plain loops over one element at a time; every option, odd
 * shapes, odd values, poisoned outputs between guard bands. Every device must give the bytes that a test expects. */
#include "formats.h"
#include "base/numbers.h"
#include "base/philox.h"

static const te_dtype floats[] = {TE_BF16, TE_F32, TE_F16};
static const float grid[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};

static float bits(uint32_t u) {
    float f;
    memcpy(&f, &u, 4);
    return f;
}
static int64_t round_up(int64_t a, int64_t b) { return (a + b - 1) / b * b; }
static te_tensor *scalar(te_ctx *te, float value) { return test_tensor(te, TE_F32, SHAPE(1), &value); }

/* One rounding each, whatever the compiler would like. */
static float mul(float a, float b) {
    volatile float r = a * b;
    return r;
}
static float divide(float a, float b) {
    volatile float r = a / b;
    return r;
}
static float add(float a, float b) {
    volatile float r = a + b;
    return r;
}

/* ---- the formulas ---- */

static float e4m3_value(int code) { return (float)code_value(TE_F8E4M3, code); }
static int e4m3_code(float x) { return isnan(x) ? 126 : code_of(TE_F8E4M3, x); } /* of scales: NaN is taken for the largest */
static int e2m1_code(float x) {
    double a = fabs((double)x);
    int best = 0;
    if (isnan(x)) return 7;
    if (a > 6) a = 6;
    for (int i = 1; i < 8; i++) {
        double before = fabs(a - grid[best]), now = fabs(a - grid[i]);
        if (now < before || (now == before && i % 2 == 0)) best = i;
    }
    return best | (signbit(x) ? 8 : 0);
}
static int e2m1_stochastic(float x, int k) {
    float a = fabsf(x), step = a < 2 ? 0.5f : a < 4 ? 1.0f : 2.0f, t = add(a, (float)k / 256 * step);
    int code = 0;
    if (isnan(x)) return 7;
    for (int i = 1; i < 8; i++)
        if (grid[i] <= t) code = i;
    return code | (signbit(x) ? 8 : 0);
}

typedef struct options {
    bool two, rht, no_sign, stochastic, max_256, swizzled, per_row, one_col, no_amax_col, misaligned; /* one_col: per_row, but amax_col is [1] */
    int four;
    int copies; /* 1 row, 2 column, 0 both */
    uint64_t seed, offset;
} options;

static float code_max(const options *o) { return o->max_256 ? 256 : 448; }
static float tensor_scale(const options *o, float amax) {
    float s = divide(mul(code_max(o), 6), amax);
    if (!(s < 0x1.fffffep127f)) s = 0x1.fffffep127f;
    return amax == 0 || s == 0 ? 1 : s;
}
/* The two scales that a block may have: {6, 4}; without 4-over-6 the first alone. */
static void block_codes(const options *o, float block_amax, float amax, int d[2]) {
    float s = tensor_scale(o, amax), base = mul(divide(block_amax, 6), s);
    d[0] = e4m3_code(o->four ? base : mul(block_amax, mul(s, divide(1, 6))));
    d[1] = e4m3_code(mul(base, 1.5f));
}
static void encode(const options *o, const float v[16], int d, float amax, uint64_t offset, uint64_t block, int code[16], float *error) {
    float multiplier = divide(1, mul(e4m3_value(d), divide(1, tensor_scale(o, amax))));
    uint32_t words[4] = {0};
    if (!(multiplier < 0x1.fffffep127f)) multiplier = 0x1.fffffep127f;
    if (o->stochastic) te__philox(o->seed, offset, block, words);
    *error = 0;
    for (int i = 0; i < 16; i++) {
        float y = mul(v[i], multiplier);
        code[i] = o->stochastic ? e2m1_stochastic(y, (int)(words[i / 4] >> (8 * (i % 4)) & 255)) : e2m1_code(y);
        float q = code[i] & 8 ? -grid[code[i] & 7] : grid[code[i]], e = add(divide(mul(mul(q, e4m3_value(d)), amax), mul(6, code_max(o))), -v[i]);
        *error = add(*error, o->four == TE_4OVER6_MSE ? mul(e, e) : fabsf(e));
    }
}

/* The transform's matrix, times four: the sign of element (i, j). */
static double hadamard(int i, int j, bool no_sign) {
    static const char *signs = "+++-+------+-+--";
    int both = i & j, odd = (both ^ both >> 1 ^ both >> 2 ^ both >> 3) & 1;
    return odd != (!no_sign && signs[i] == '-') ? -1 : 1;
}
/* Sums as tensor cores have them, of the products' 26 leading bits, cut to 24, then rounded to bf16. Infinities and NaN as they fall. */
static void transform(float v[16], bool no_sign) {
    static double matrix[2][16][16];
    double x[16], most = 0, unit, sum;
    bool finite = true;
    int e;
    for (int i = 0; i < 256 && matrix[no_sign][15][15] == 0; i++) matrix[no_sign][i % 16][i / 16] = hadamard(i % 16, i / 16, no_sign) * 0.25;
    for (int i = 0; i < 16; i++) {
        finite = finite && isfinite(v[i]);
        if (fabsf(v[i]) > most) most = fabsf(v[i]);
    }
    frexp(finite ? most * 0.25 : 0, &e);
    unit = ldexp(1, e - 26);
    for (int i = 0; i < 16; i++) x[i] = v[i];
    for (int j = 0; j < 16; j++) {
        sum = 0;
        for (int i = 0; i < 16; i++) {
            double product = x[i] * matrix[no_sign][i][j];
            if (finite) sum += trunc(product / unit);
            else if (!isfinite(product)) sum += product;
        }
        if (finite) {
            int bits;
            frexp(sum, &bits);
            sum = ldexp(trunc(ldexp(sum, 24 - bits)), bits - 24) * unit;
        }
        v[j] = te__bf16_to_f32(te__f32_to_bf16((float)sum));
    }
}
/* Its transpose in f32, by the matrix's recursion. */
static void transform_back(float v[16], bool no_sign) {
    for (int i = 0; i < 16; i++) v[i] = mul(v[i], 0.25f);
    for (int h = 1; h < 16; h *= 2)
        for (int i = 0; i < 16; i++)
            if (!(i & h)) {
                float a = v[i], b = v[i + h];
                v[i] = add(a, b), v[i + h] = add(a, -b);
            }
    for (int i = 0; i < 16; i++) v[i] *= (float)hadamard(i, 0, no_sign);
}
static float largest(const float *x, int64_t n, float from) {
    for (int64_t i = 0; i < n; i++)
        if (fabsf(x[i]) > from) from = fabsf(x[i]);
    return from;
}
static bool any_nan(const float *x, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        if (isnan(x[i])) return true;
    return false;
}
/* The matrix that the column-wise copy quantizes: [n, round_up(m, 16)]. */
static float *turned(const float *x, int64_t m, int64_t n, const options *o) {
    int64_t padded = round_up(m, 16);
    float *t = test_floats(n * padded);
    for (int64_t i = 0; i < m; i++)
        for (int64_t j = 0; j < n; j++) t[j * padded + i] = x[i * n + j];
    for (int64_t b = 0; o->rht && b < n * padded; b += 16) transform(t + b, o->no_sign);
    return t;
}

/* The scales of the 16 x 16 tiles of values [m, n] (rows `pitch` apart), as this copy chooses them. */
static int *tiles_of(const options *o, const float *x, int64_t m, int64_t n, int64_t pitch, float amax, uint64_t offset) {
    int64_t down = (m + 15) / 16, across = (n + 15) / 16;
    int *tile = (int *)test_alloc((size_t)(down * across) * sizeof(int) + 4);
    for (int64_t i = 0; i < down; i++)
        for (int64_t j = 0; j < across; j++) {
            float v[16][16] = {{0}}, lost[2][16], a = 0;
            int code[16], d[2];
            for (int r = 0; r < 16; r++)
                for (int c = 0; c < 16; c++)
                    if (16 * i + r < m && 16 * j + c < n) v[r][c] = x[(16 * i + r) * pitch + 16 * j + c];
            for (int r = 0; r < 16; r++) a = largest(v[r], 16, a);
            block_codes(o, a, amax, d);
            for (int k = 0; k < 2; k++) {
                for (int r = 0; r < 16; r++) encode(o, v[r], d[k], amax, offset, (uint64_t)((16 * i + r) * across + j), code, &lost[k][r]);
                for (int half = 8; half; half /= 2)
                    for (int r = 0; r < half; r++) lost[k][r] = add(lost[k][r], lost[k][r + half]);
            }
            tile[i * across + j] = o->four && lost[1][0] < lost[0][0] ? d[1] : d[0];
        }
    return tile;
}
/* One copy: values [m, n] (rows `pitch` apart) to codes [m, ld] and scales. */
typedef struct copy {
    uint8_t *q, *scale;
    size_t q_bytes, scale_bytes;
} copy;
static copy quantized(const options *o, const float *x, int64_t m, int64_t n, int64_t pitch, int64_t ld, const float *amax, bool per_row, uint64_t offset) {
    int64_t groups = round_up((n + 15) / 16, 4), bytes = (ld + 1) / 2, blocks = (n + 15) / 16;
    const int *tile = o->two ? tiles_of(o, x, m, n, pitch, *amax, offset) : NULL;
    copy c;
    c.q_bytes = (size_t)(m * bytes), c.scale_bytes = (size_t)(round_up(m, 128) * groups);
    c.q = (uint8_t *)test_alloc(c.q_bytes + 1), c.scale = (uint8_t *)test_alloc(c.scale_bytes + 1);
    for (int64_t i = 0; i < m; i++)
        for (int64_t j = 0; j < blocks; j++) {
            float v[16] = {0}, a = amax[per_row ? i : 0], six, four;
            int code[16], other[16], d[2];
            for (int k = 0; k < 16; k++) v[k] = 16 * j + k < pitch ? x[i * pitch + 16 * j + k] : 0;
            uint64_t block = (uint64_t)(i * blocks + j);
            block_codes(o, largest(v, 16, 0), a, d);
            if (tile) d[0] = tile[i / 16 * blocks + j];
            encode(o, v, d[0], a, offset, block, code, &six);
            encode(o, v, d[1], a, offset, block, other, &four);
            if (o->four && !tile && four < six) d[0] = d[1], memcpy(code, other, sizeof code);
            if (o->rht && !o->two && any_nan(v, 16)) { /* a NaN takes its block along */
                d[0] = 127;
                for (int k = 0; k < 16; k++) code[k] = 16 * j + k < pitch ? 7 : 0;
            }
            for (int k = 0; k < 16; k++)
                if ((16 * j + k) / 2 < bytes) c.q[i * bytes + (16 * j + k) / 2] |= (uint8_t)(code[k] << (k % 2 * 4));
            int64_t at = i * groups + j;
            if (o->swizzled) at = ((i / 128) * (groups / 4) + j / 4) * 512 + (i % 32) * 16 + (i % 128) / 32 * 4 + j % 4;
            c.scale[at] = (uint8_t)d[0];
        }
    return c;
}

/* ---- quantize ---- */

static te_op_nvfp4_quantize_args arguments(const options *o) {
    te_op_nvfp4_quantize_args a = {0};
    a.two_dimensional = o->two, a.rht = o->rht, a.no_random_sign_mask = o->no_sign, a.stochastic_rounding = o->stochastic;
    a.seed = o->seed, a.offset = o->offset, a.four_over_six = (te_4over6_error)o->four, a.e4m3_max_256 = o->max_256, a.swizzled = o->swizzled;
    return a;
}
static const char *text(const options *o) {
    char *s = (char *)test_alloc(160);
    snprintf(s, 160, "%s%s%s%s%s%s%s%s%s four %d copies %d", o->two ? " 2d" : "", o->rht ? " rht" : "", o->no_sign ? " unsigned" : "",
             o->stochastic ? " stochastic" : "", o->max_256 ? " 256" : "", o->swizzled ? " swizzled" : "", o->per_row ? " per row" : "",
             o->one_col ? " one column amax" : "", o->misaligned ? " misaligned" : "", o->four, o->copies);
    return s;
}

static void check_quantize(te_ctx *te, const options *o, te_dtype dtype, int64_t m, int64_t n, int64_t ld, int64_t ldc, const float *values) {
    bool with_row = o->copies != 2, with_col = o->copies != 1;
    test_case("%s [%d, %d] ld %d ldc %d%s", te_dtype_name(dtype), (int)m, (int)n, (int)ld, (int)ldc, text(o));
    const float *x = test_rounded(dtype, values, m * n), *t = turned(x, m, n, o);
    float *amax = test_floats(m), *amax_col = test_floats(n);
    bool per_col = o->per_row && !o->one_col;
    int64_t up_m = round_up(m, 16);
    amax[0] = largest(x, m * n, 0);
    amax_col[0] = o->no_amax_col ? amax[0] : largest(t, n * up_m, 0);
    for (int64_t i = 0; o->per_row && i < m; i++) amax[i] = largest(x + i * n, n, 0);
    for (int64_t j = 0; per_col && j < n; j++) amax_col[j] = largest(t + j * up_m, up_m, 0);

    te_op_nvfp4_quantize_args a = arguments(o);
    a.x = test_input(te, dtype, m, n, values, o->misaligned);
    a.amax_row = with_row || o->no_amax_col ? test_tensor(te, TE_F32, SHAPE(o->per_row ? m : 1), amax) : NULL;
    a.amax_col = with_col && !o->no_amax_col ? test_tensor(te, TE_F32, SHAPE(per_col ? n : 1), amax_col) : NULL;
    if (with_row) {
        a.row = test_guarded(te, TE_F4E2M1, SHAPE(m, ld));
        a.row_scale = test_guarded(te, TE_F8E4M3, SHAPE(round_up(m, 128), round_up((n + 15) / 16, 4)));
    }
    if (with_col) {
        a.col = test_guarded(te, TE_F4E2M1, SHAPE(n, ldc));
        a.col_scale = test_guarded(te, TE_F8E4M3, SHAPE(round_up(n, 128), round_up((m + 15) / 16, 4)));
    }
    CHECK_EQ_INT(te_op_nvfp4_quantize(te, &a), TE_OK);
    REQUIRE_OK(te);

    if (with_row) {
        copy c = quantized(o, x, m, n, n, ld, amax, o->per_row, o->offset);
        CHECK_BYTES("row", test_read_bytes(a.row), c.q, c.q_bytes);
        CHECK_BYTES("row_scale", test_read_bytes(a.row_scale), c.scale, c.scale_bytes);
    }
    if (with_col) {
        copy c = quantized(o, t, n, m, up_m, ldc, amax_col, per_col, o->offset + 1);
        CHECK_BYTES("col", test_read_bytes(a.col), c.q, c.q_bytes);
        CHECK_BYTES("col_scale", test_read_bytes(a.col_scale), c.scale, c.scale_bytes);
    }
}

/* The options that runs go through: each of them alone, and those that go together. */
static const options runs[] = {
    {.copies = 0},
    {.rht = true, .seed = 1},
    {.rht = true, .no_sign = true, .max_256 = true, .swizzled = true},
    {.stochastic = true, .seed = 0x123456789abcdefull, .offset = 7},
    {.rht = true, .stochastic = true, .seed = 5, .offset = 1ull << 40, .swizzled = true},
    {.two = true},
    {.two = true, .stochastic = true, .seed = 3, .swizzled = true, .no_amax_col = true},
    {.four = TE_4OVER6_MAE},
    {.four = TE_4OVER6_MSE, .max_256 = true, .rht = true},
    {.four = TE_4OVER6_MSE, .two = true, .max_256 = true},
    {.four = TE_4OVER6_MAE, .stochastic = true, .seed = 9, .two = true},
    {.per_row = true},
    {.per_row = true, .one_col = true},
    {.per_row = true, .rht = true, .stochastic = true, .seed = 2},
    {.per_row = true, .four = TE_4OVER6_MSE, .swizzled = true},
    {.four = TE_4OVER6_MAE, .two = true},
    {.per_row = true, .copies = 1, .four = TE_4OVER6_MAE, .swizzled = true},
    {.copies = 1, .misaligned = true},
    {.copies = 2, .rht = true, .misaligned = true},
    {.copies = 2, .no_amax_col = true},
    {.copies = 2, .two = true},
};

TE_TEST_DEVICES(nvfp4_quantize_shapes) {
    static const int64_t shapes[][4] = {/* m, n, ld, ldc */
                                        {1, 1, 32, 32},  {1, 1, 1, 16},      {3, 5, 5, 17},       {17, 33, 64, 32}, {127, 129, 160, 128},
                                        {64, 48, 48, 64}, {128, 128, 128, 128}, {20, 40, 200, 300}, {5, 0, 32, 32}, {0, 5, 32, 32}};
    int turn = 0;
    for (int s = 0; s < COUNT(shapes); s++)
        for (int r = 0; r < COUNT(runs); r++)
            for (int d = 0; d < 3; d++) {
                if ((s == 4 || s == 6) && d != r % 3) continue; /* the larger ones in one format each */
                if (turn++ % test_every_odd(2)) continue;
                const int64_t *z = shapes[s];
                check_quantize(te, &runs[r], floats[d], z[0], z[1], z[2], z[3], test_normal(z[0] * z[1] + 1, (uint64_t)(s + r)));
            }
}

/* Zeros, tiny and huge blocks, infinities and NaN, denormals; amaxes of 0 and infinity with them. */
static float *odd_values(int64_t n, int kind) {
    float *v = kind == 0 ? test_specials(n, 3) : kind == 1 ? test_finite_specials(n, 4) : test_normal(n, 5);
    for (int64_t i = 0; i < n; i++) {
        if (kind == 2) v[i] *= 1e-38f * (float)(i / 16 % 5); /* denormals, and whole blocks of zeros */
        if (kind == 3) v[i] *= i / 64 % 2 ? 1e-30f : 3e37f;
        if (kind == 4 && i % 97 == 5) v[i] = NAN;
        if (kind == 5) v[i] = 0;
        if (kind == 6) v[i] = i % 3 ? NAN : -NAN;
        if (kind == 7 && i % 101 == 7) v[i] = i % 2 ? INFINITY : -INFINITY;
        if (kind == 8) v[i] *= 1e-3f * (float)(1 + i % 7) * (i % 50 == 9 ? 1000.0f : 1.0f);
    }
    return v;
}
TE_TEST_DEVICES(nvfp4_quantize_values) {
    for (int kind = 0; kind < 9; kind++)
        for (int r = 0; r < COUNT(runs); r++) {
            test_case("kind %d", kind);
            check_quantize(te, &runs[r], kind == 1 || kind == 4 ? TE_BF16 : TE_F32, 35, 67, 96, 64, odd_values(35 * 67, kind));
        }
}

TE_TEST_DEVICES(nvfp4_quantize_large) {
    static const options both = {.rht = true, .seed = 1};
    check_quantize(te, &both, TE_BF16, 16, 4096, 4096, 32, test_normal(16 * 4096, 1));
    check_quantize(te, &both, TE_BF16, 500, 384, 384, 512, test_normal(500 * 384, 2));
}

/* Each bf16 there is: with neighbours, so that infinities, NaN and huge numbers set the scales, and under a scale of one. */
TE_TEST_DEVICES(nvfp4_every_bf16) {
    enum { N = 65536 };
    static const options plain = {.copies = 1};
    float *v = (float *)test_alloc(N * 4);
    for (int i = 0; i < N; i++) v[i] = bits((uint32_t)i << 16);
    check_quantize(te, &plain, TE_BF16, 64, N / 64, N / 64, 64, v);

    /* With a scale of one everywhere: amax 448 * 6, and 6 in each block. */
    te_op_nvfp4_quantize_args a = {0};
    float *x = (float *)test_alloc(N * 2 * 4);
    for (int i = 0; i < N * 2; i++) x[i] = i % 16 == 15 ? 6 : v[i / 2];
    for (int i = 0; i < N * 2; i++)
        if (!(fabsf(x[i]) <= 6)) x[i] = 0.75f;
    a.x = test_tensor(te, TE_BF16, SHAPE(N / 512, 1024), x);
    a.row = test_guarded(te, TE_F4E2M1, SHAPE(N / 512, 1024));
    a.row_scale = test_guarded(te, TE_F8E4M3, SHAPE(N / 512, 64));
    a.amax_row = scalar(te, 448 * 6);
    te_op_nvfp4_quantize(te, &a);
    REQUIRE_OK(te);
    const uint8_t *q = (const uint8_t *)test_read_bytes(a.row), *d = (const uint8_t *)test_read_bytes(a.row_scale);
    int wrong = 0;
    for (int i = 0; i < N * 2; i++) wrong += (q[i / 2] >> (i % 2 * 4) & 15) != e2m1_code(x[i]) || d[i / 16] != 0x38;
    CHECK_EQ_INT(wrong, 0);
}

/* Codes by hand: the grid, its ties, and what lies beyond. */
TE_TEST_DEVICES(nvfp4_codes_by_hand) {
    static const float x[32] = {0.0f, 0.25f, 0.26f, 0.5f,  0.74f, 0.75f, 1.0f,  1.25f, 1.3f,  1.75f, 2.5f, 2.51f, 3.5f,  5.0f,  5.1f,      6.0f,
                                -0.0f, -0.25f, -0.26f, -0.5f, -0.75f, -1.25f, -1.75f, -2.5f, -3.5f, -5.0f, -5.1f, -6.0f, 1e-30f, -1e-30f, 0.24999f, -6.0f};
    static const uint8_t want[32] = {0, 0, 1, 1, 1, 2, 2, 2, 3, 4, 4, 5, 6, 6, 7, 7, 8, 8, 9, 9, 10, 10, 12, 12, 14, 14, 15, 15, 0, 8, 0, 15};
    te_op_nvfp4_quantize_args a = {0};
    a.x = test_tensor(te, TE_F32, SHAPE(1, 32), x);
    a.row = test_guarded(te, TE_F4E2M1, SHAPE(1, 32));
    a.row_scale = test_guarded(te, TE_F8E4M3, SHAPE(128, 4));
    a.amax_row = scalar(te, 448 * 6);
    te_op_nvfp4_quantize(te, &a);
    REQUIRE_OK(te);
    const uint8_t *q = (const uint8_t *)test_read_bytes(a.row), *d = (const uint8_t *)test_read_bytes(a.row_scale);
    for (int i = 0; i < 32; i++) CHECK_MSG((q[i / 2] >> (i % 2 * 4) & 15) == want[i], "%g: %d, not %d", (double)x[i], q[i / 2] >> (i % 2 * 4) & 15, want[i]);
    CHECK(d[0] == 0x38 && d[1] == 0x38 && d[2] == 0 && d[3] == 0);
}

/* Swizzled scales are the plain ones in another order, padding and all. */
TE_TEST_DEVICES(nvfp4_swizzled_is_a_permutation) {
    enum { M = 200, N = 100, GROUPS = 8, ROWS = 256 };
    uint8_t plain[ROWS * GROUPS] = {0}, moved[ROWS * GROUPS] = {0};
    int seen[ROWS * GROUPS] = {0};
    for (int swizzled = 0; swizzled < 2; swizzled++) {
        te_op_nvfp4_quantize_args a = {0};
        a.x = test_tensor(te, TE_BF16, SHAPE(M, N), test_normal(M * N, 8));
        a.row = test_guarded(te, TE_F4E2M1, SHAPE(M, 128));
        a.row_scale = test_guarded(te, TE_F8E4M3, SHAPE(ROWS, GROUPS));
        a.amax_row = scalar(te, 4);
        a.swizzled = swizzled;
        te_op_nvfp4_quantize(te, &a);
        REQUIRE_OK(te);
        memcpy(swizzled ? moved : plain, test_read_bytes(a.row_scale), sizeof plain);
    }
    for (int i = 0; i < ROWS; i++)
        for (int j = 0; j < GROUPS; j++) {
            int at = (i / 128 * (GROUPS / 4) + j / 4) * 512 + i % 32 * 16 + i % 128 / 32 * 4 + j % 4;
            seen[at]++;
            CHECK_EQ_INT(moved[at], plain[i * GROUPS + j]);
            if (i >= M || j >= (N + 15) / 16) CHECK_EQ_INT(plain[i * GROUPS + j], 0);
        }
    for (int i = 0; i < ROWS * GROUPS; i++) CHECK_EQ_INT(seen[i], 1);
}

TE_TEST_DEVICES(nvfp4_noop) {
    const float flags[] = {1, 0, 2};
    for (int i = 0; i < 3; i++) {
        float amaxes[2] = {5, 5};
        te_op_nvfp4_quantize_args a = {0};
        a.x = test_tensor(te, TE_BF16, SHAPE(20, 30), test_normal(600, 3));
        a.row = test_guarded(te, TE_F4E2M1, SHAPE(20, 32));
        a.row_scale = test_guarded(te, TE_F8E4M3, SHAPE(128, 4));
        a.col = test_guarded(te, TE_F4E2M1, SHAPE(30, 32));
        a.col_scale = test_guarded(te, TE_F8E4M3, SHAPE(128, 4));
        a.amax_row = scalar(te, 4);
        a.noop = scalar(te, flags[i]);
        te_op_nvfp4_quantize(te, &a);
        REQUIRE_OK(te);
        const uint8_t *out[4] = {(const uint8_t *)test_read_bytes(a.row), (const uint8_t *)test_read_bytes(a.col),
                                 (const uint8_t *)test_read_bytes(a.row_scale), (const uint8_t *)test_read_bytes(a.col_scale)};
        int size[4] = {20 * 16, 30 * 16, 512, 512}, poison = 0;
        for (int k = 0; k < 4; k++)
            for (int b = 0; b < size[k]; b++) poison += out[k][b] == TEST_POISON;
        if (flags[i] == 1) CHECK_EQ_INT(poison, 20 * 16 + 30 * 16 + 1024);
        else CHECK(poison < 20);
        te_op_nvfp4_amax_args m = {0};
        m.x = a.x;
        m.amax_row = test_guarded_with(te, TE_F32, SHAPE(1), amaxes);
        m.amax_col = test_guarded_with(te, TE_F32, SHAPE(1), amaxes);
        m.rht = true;
        m.noop = a.noop;
        te_op_nvfp4_amax(te, &m);
        REQUIRE_OK(te);
        CHECK((test_read(m.amax_row)[0] == 5) == (flags[i] == 1) && (test_read(m.amax_col)[0] == 5) == (flags[i] == 1));
    }
}

/* The mean of many stochastic roundings is the value. A rounding has a variance of at most step^2 / 4, and the 256 values of u put the mean
 * off by at most step / 512 (u has a mean of 255/512 and a granularity of 1/256): with n draws the mean is within step / 256 + 5 step /
 * (2 sqrt n) of the value but once in millions. */
TE_TEST_DEVICES(nvfp4_stochastic_rounding_is_unbiased) {
    enum { N = 65536 };
    static const float values[] = {0.1f, 0.3f, 0.5f, 1.2f, 1.9f, 2.3f, 3.7f, 4.4f, 5.5f};
    for (int i = 0; i < COUNT(values); i++)
        for (int sign = -1; sign < 2; sign += 2) {
            float *x = (float *)test_alloc(N * 4);
            for (int k = 0; k < N; k++) x[k] = k % 16 == 0 ? 6 : (float)sign * values[i];
            te_op_nvfp4_quantize_args a = {0};
            a.x = test_tensor(te, TE_F32, SHAPE(64, N / 64), x);
            a.row = test_guarded(te, TE_F4E2M1, SHAPE(64, N / 64));
            a.row_scale = test_guarded(te, TE_F8E4M3, SHAPE(128, N / 1024));
            a.amax_row = scalar(te, 448 * 6);
            a.stochastic_rounding = true;
            a.seed = 11 + (uint64_t)i;
            te_op_nvfp4_quantize(te, &a);
            REQUIRE_OK(te);
            const uint8_t *q = (const uint8_t *)test_read_bytes(a.row);
            double sum = 0, step = values[i] < 2 ? 0.5 : values[i] < 4 ? 1 : 2;
            int n = 0;
            for (int k = 0; k < N; k++) {
                int code = q[k / 2] >> (k % 2 * 4) & 15;
                if (k % 16 == 0) continue;
                sum += code & 8 ? -grid[code & 7] : grid[code];
                n++;
            }
            double bound = step / 256 + 5 * step / (2 * sqrt(n));
            CHECK_MSG(fabs(sum / n - (double)sign * values[i]) <= bound, "mean of %g is %g, bound %g", (double)sign * values[i], sum / n, bound);
        }
}

/* Of the two scales each block keeps the better, and both occur. */
TE_TEST_DEVICES(nvfp4_four_over_six_is_no_worse) {
    enum { M = 32, N = 256 };
    const float *x = test_normal(M * N, 21);
    for (int four = 1; four < 3; four++) {
        double error[2] = {0, 0};
        int changed = 0;
        uint8_t before[M * N / 16];
        for (int on = 0; on < 2; on++) {
            te_op_nvfp4_quantize_args a = {0};
            te_op_nvfp4_dequantize_args b = {0};
            a.x = test_tensor(te, TE_F32, SHAPE(M, N), x);
            a.row = test_guarded(te, TE_F4E2M1, SHAPE(M, N));
            a.row_scale = test_guarded(te, TE_F8E4M3, SHAPE(128, N / 16));
            a.amax_row = scalar(te, largest(x, M * N, 0));
            a.e4m3_max_256 = b.e4m3_max_256 = true;
            a.four_over_six = on ? (te_4over6_error)four : TE_4OVER6_OFF;
            te_op_nvfp4_quantize(te, &a);
            b.q = a.row, b.scale = a.row_scale, b.amax = a.amax_row;
            b.y = test_guarded(te, TE_F32, SHAPE(M, N));
            te_op_nvfp4_dequantize(te, &b);
            REQUIRE_OK(te);
            const float *y = test_read(b.y);
            for (int i = 0; i < M * N; i++) error[on] += four == TE_4OVER6_MSE ? pow((double)x[i] - y[i], 2) : fabs((double)x[i] - y[i]);
            const uint8_t *d = (const uint8_t *)test_read_bytes(a.row_scale);
            for (int i = 0; i < M * N / 16; i++)
                if (on) changed += d[i] != before[i];
                else before[i] = d[i];
        }
        CHECK_MSG(error[1] < 0.98 * error[0], "error %g with, %g without", error[1], error[0]);
        CHECK_MSG(changed > M * N / 16 / 10 && changed < M * N / 16 * 9 / 10, "%d of %d blocks changed", changed, M * N / 16);
    }
}

/* ---- amax ---- */

TE_TEST_DEVICES(nvfp4_amax_values) {
    static const int64_t shapes[][2] = {{1, 1}, {3, 5}, {16, 128}, {127, 129}, {130, 260}, {33, 1000}, {0, 4}, {4, 0}};
    for (int s = 0; s < COUNT(shapes); s++)
        for (int d = 0; d < 3; d++)
            for (int kind = 0; kind < 9; kind++)
                for (int r = 0; r < 8; r++) {
                    options o = {.rht = r % 2 != 0, .no_sign = r == 3, .per_row = r / 2 % 2 != 0, .misaligned = r == 5};
                    bool keep = r >= 6, with_row = r != 1, with_col = r != 2;
                    int64_t m = shapes[s][0], n = shapes[s][1];
                    if ((m * n > 2000 && (kind + r) % 3 != d) || (8 * kind + r) % test_every_odd(2)) continue;
                    test_case("%s [%d, %d] kind %d keep %d%s", te_dtype_name(floats[d]), (int)m, (int)n, kind, keep, text(&o));
                    float *values = odd_values(m * n + 1, kind), *rows = test_floats(m), *cols = test_floats(n);
                    const float *x = test_rounded(floats[d], values, m * n), *t = turned(x, m, n, &o);
                    for (int64_t i = 0; i < m || i == 0; i++) rows[i] = keep ? 2.5f : 0;
                    for (int64_t j = 0; j < n || j == 0; j++) cols[j] = keep ? 2.5f : 0;
                    te_op_nvfp4_amax_args a = {0};
                    a.x = test_input(te, floats[d], m, n, values, o.misaligned);
                    int64_t size = o.per_row ? m : 1, size_col = o.per_row && r != 6 ? n : 1, up_m = round_up(m, 16);
                    float *before = test_floats(size + size_col);
                    for (int64_t i = 0; i < size + size_col; i++) before[i] = 2.5f;
                    a.amax_row = with_row ? test_guarded_with(te, TE_F32, SHAPE(size), before) : NULL;
                    a.amax_col = with_col ? test_guarded_with(te, TE_F32, SHAPE(size_col), before) : NULL;
                    a.rht = o.rht, a.no_random_sign_mask = o.no_sign, a.keep = keep;
                    te_op_nvfp4_amax(te, &a);
                    REQUIRE_OK(te);
                    for (int64_t i = 0; i < m; i++) rows[o.per_row ? i : 0] = largest(x + i * n, n, rows[o.per_row ? i : 0]);
                    for (int64_t j = 0; j < n; j++) cols[size_col > 1 ? j : 0] = largest(t + j * up_m, up_m, cols[size_col > 1 ? j : 0]);
                    if (with_row) CHECK_BYTES("row", test_read_bytes(a.amax_row), rows, (size_t)size * 4);
                    if (with_col) CHECK_BYTES("col", test_read_bytes(a.amax_col), cols, (size_t)size_col * 4);
                }
}

/* ---- dequantize ---- */

/* Every code under every scale code, row-wise and column-wise, plain and swizzled. */
TE_TEST_DEVICES(nvfp4_dequantize_all_codes) {
    static const float amaxes[] = {448 * 6, 3.3f, 0, 1e-40f, 3e38f, INFINITY};
    enum { ROWS = 256 }; /* row i has scale code i, and the codes 0 .. 15 */
    uint8_t q[ROWS * 8], scale[ROWS * 4], moved[ROWS * 4];
    for (int i = 0; i < ROWS; i++) {
        for (int b = 0; b < 8; b++) q[i * 8 + b] = (uint8_t)(2 * b | (2 * b + 1) << 4);
        for (int j = 0; j < 4; j++) {
            scale[i * 4 + j] = j ? 0 : (uint8_t)i;
            moved[i / 128 * 512 + i % 32 * 16 + i % 128 / 32 * 4 + j] = scale[i * 4 + j];
        }
    }
    for (int k = 0; k < COUNT(amaxes); k++)
        for (int d = 0; d < 3; d++)
            for (int way = 0; way < 8; way++) {
                bool columnwise = way & 1, swizzled = way & 2, max_256 = way & 4;
                float want[ROWS * 16], most = max_256 ? 256 * 6 : 448 * 6;
                for (int i = 0; i < ROWS; i++)
                    for (int c = 0; c < 16; c++) {
                        float step = mul(mul(e4m3_value(i), amaxes[k] == 0 ? most : amaxes[k]), divide(1, most));
                        want[columnwise ? c * ROWS + i : i * 16 + c] = mul(c & 8 ? -grid[c & 7] : grid[c], step);
                    }
                test_case("amax %g %s way %d", (double)amaxes[k], te_dtype_name(floats[d]), way);
                te_op_nvfp4_dequantize_args a = {0};
                a.q = te_tensor_from_host(te, TE_F4E2M1, SHAPE(ROWS, 16), q);
                a.scale = te_tensor_from_host(te, TE_F8E4M3, SHAPE(ROWS, 4), swizzled ? moved : scale);
                a.amax = scalar(te, amaxes[k]);
                a.y = columnwise ? test_guarded(te, floats[d], SHAPE(16, ROWS)) : test_guarded(te, floats[d], SHAPE(ROWS, 16));
                a.columnwise = columnwise, a.swizzled = swizzled, a.e4m3_max_256 = max_256;
                te_op_nvfp4_dequantize(te, &a);
                REQUIRE_OK(te);
                CHECK_TENSOR(a.y, test_rounded(floats[d], want, ROWS * 16), 0, 0);
            }
}

TE_TEST_DEVICES(nvfp4_dequantize_shapes) {
    static const int64_t shapes[][3] = {{1, 1, 1}, {3, 5, 7}, {17, 33, 64}, {64, 64, 64}, {127, 129, 160}, {70, 200, 200}, {70, 520, 528}, {0, 4, 32}, {4, 0, 32}};
    for (int s = 0; s < COUNT(shapes); s++)
        for (int way = 0; way < 12; way++) {
            bool columnwise = way & 1, per_row = way & 2, rht = columnwise && way & 2;
            te_dtype dtype = floats[way / 4];
            int64_t m = shapes[s][0], n = shapes[s][1], rows = columnwise ? n : m, cols = columnwise ? m : n, ld = shapes[s][2];
            if (columnwise) ld = round_up(ld, 16) > round_up(m, 16) ? round_up(ld, 16) : round_up(m, 16);
            int64_t groups = round_up((cols + 15) / 16, 4), bytes = (ld + 1) / 2, reach = rht ? round_up(cols, 16) : cols;
            test_case("%s [%d, %d] ld %d way %d", te_dtype_name(dtype), (int)m, (int)n, (int)ld, way);
            uint8_t *q = (uint8_t *)test_alloc((size_t)(rows * bytes) + 1), *scale = (uint8_t *)test_alloc((size_t)(round_up(rows, 128) * groups) + 1);
            float *amax = test_uniform(rows + 1, 4, 1, 2), *values = test_floats(rows * round_up(cols, 16));
            float *want = test_floats(m * n);
            for (int64_t i = 0; i < rows * bytes; i++) q[i] = (uint8_t)(i * 37 + i / 251);
            for (int64_t i = 0; i < round_up(rows, 128) * groups; i++) scale[i] = (uint8_t)(0x30 + i % 16);
            for (int64_t i = 0; i < rows; i++) {
                for (int64_t j = 0; j < reach && j < 2 * bytes; j++) {
                    int code = q[i * bytes + j / 2] >> (j % 2 * 4) & 15;
                    float step = mul(mul(e4m3_value(scale[i * groups + j / 16]), amax[per_row ? i : 0]), divide(1, 448 * 6));
                    values[i * round_up(cols, 16) + j] = mul(code & 8 ? -grid[code & 7] : grid[code], step);
                }
                for (int64_t j = 0; rht && j < cols; j += 16) {
                    float *v = values + i * round_up(cols, 16) + j;
                    transform_back(v, !(way & 4));
                }
                for (int64_t j = 0; j < cols; j++) want[columnwise ? j * n + i : i * n + j] = values[i * round_up(cols, 16) + j];
            }
            te_op_nvfp4_dequantize_args a = {0};
            a.q = te_tensor_from_host(te, TE_F4E2M1, SHAPE(rows, ld), q);
            a.scale = te_tensor_from_host(te, TE_F8E4M3, SHAPE(round_up(rows, 128), groups), scale);
            a.amax = test_tensor(te, TE_F32, SHAPE(per_row ? rows : 1), amax);
            a.y = test_guarded(te, dtype, SHAPE(m, n));
            a.columnwise = columnwise, a.rht = rht, a.no_random_sign_mask = !(way & 4);
            te_op_nvfp4_dequantize(te, &a);
            REQUIRE_OK(te);
            if (m > 0 && n > 0) CHECK_TENSOR(a.y, test_rounded(dtype, want, m * n), 0, 0);
        }
}

/* Forward and back: what is lost is what 4 bits lose, transformed or not. Values that the codes hold exactly come back to within roundings:
 * the transform of a column with one number is 16 equal magnitudes. */
TE_TEST_DEVICES(nvfp4_transform_and_back) {
    enum { M = 50, N = 70, PADDED = 64 };
    for (int sparse = 0; sparse < 2; sparse++)
        for (int no_sign = 0; no_sign < 2; no_sign++) {
            float *x = sparse ? (float *)test_alloc(M * N * 4) : test_normal(M * N, 31);
            for (int64_t j = 0; sparse && j < N; j++) /* one number in every block of 16 rows */
                for (int64_t i = 0; i < M; i += 16) x[(i + j % (M - i < 16 ? M - i : 16)) * N + j] = 0.5f * (float)(1 + j % 7);
            te_op_nvfp4_amax_args m = {0};
            te_op_nvfp4_quantize_args a = {0};
            te_op_nvfp4_dequantize_args b = {0};
            test_case("sparse %d no_sign %d", sparse, no_sign);
            m.x = a.x = test_tensor(te, TE_F32, SHAPE(M, N), x);
            m.amax_col = test_guarded(te, TE_F32, SHAPE(1));
            m.rht = a.rht = b.rht = true;
            m.no_random_sign_mask = a.no_random_sign_mask = b.no_random_sign_mask = no_sign;
            te_op_nvfp4_amax(te, &m);
            a.amax_col = b.amax = m.amax_col;
            a.col = test_guarded(te, TE_F4E2M1, SHAPE(N, PADDED));
            a.col_scale = test_guarded(te, TE_F8E4M3, SHAPE(128, 4));
            te_op_nvfp4_quantize(te, &a);
            b.q = a.col, b.scale = a.col_scale, b.columnwise = true;
            b.y = test_guarded(te, TE_F32, SHAPE(M, N));
            te_op_nvfp4_dequantize(te, &b);
            REQUIRE_OK(te);
            /* Sparse: the block scale, in E4M3, is off by at most 1 / 16 of the value. */
            if (sparse) CHECK_CLOSE("y", test_read(b.y), x, M * N, 1.0 / 16 + 1e-5, 1e-5);
            else CHECK_ERROR_BELOW("y", test_read(b.y), x, M * N, 0.12);
        }
}

/* ---- CUDA against the CPU ---- */

TE_TEST(nvfp4_cuda_gives_the_bytes_of_the_cpu) {
    static const int64_t shapes[][2] = {{1, 1}, {3, 5}, {127, 129}, {128, 128}, {16, 4096}, {1000, 1536}};
    if (test_no_gpu()) SKIP(test_no_gpu());
    te_ctx *side[2] = {test_context("cpu"), test_context("cuda:0")};
    REQUIRE(side[0] && side[1]);
    for (int s = 0; s < COUNT(shapes); s++)
        for (int d = 0; d < 3; d++)
            for (int r = 0; r < COUNT(runs); r++)
                for (int kind = 0; kind < 9; kind++) {
                    int64_t m = shapes[s][0], n = shapes[s][1], ld = round_up(n, 32), ldc = round_up(m, 32), groups = round_up((n + 15) / 16, 4);
                    int64_t col_groups = round_up((m + 15) / 16, 4);
                    const options *o = &runs[r];
                    if (m * n > 100000 && (d || kind % 8 != r % 8)) continue;
                    if (m * n > 10000 && (kind + r) % 3 != d) continue;
                    const float *values = odd_values(m * n, kind);
                    uint8_t *got[2][7];
                    size_t size[7] = {0};
                    test_case("%s [%d, %d] kind %d%s", te_dtype_name(floats[d]), (int)m, (int)n, kind, text(o));
                    for (int c = 0; c < 2; c++) {
                        te_ctx *te = side[c];
                        te_scope_begin(te);
                        te_op_nvfp4_amax_args x = {0};
                        te_op_nvfp4_quantize_args a = arguments(o);
                        te_op_nvfp4_dequantize_args b = {0};
                        x.x = a.x = test_input(te, floats[d], m, n, values, o->misaligned);
                        x.amax_row = te_tensor_zeros(te, TE_F32, SHAPE(o->per_row ? m : 1));
                        x.amax_col = te_tensor_zeros(te, TE_F32, SHAPE(o->per_row && !o->one_col ? n : 1));
                        x.rht = o->rht, x.no_random_sign_mask = o->no_sign;
                        te_op_nvfp4_amax(te, &x);
                        a.amax_row = x.amax_row, a.amax_col = x.amax_col;
                        a.row = te_tensor_zeros(te, TE_F4E2M1, SHAPE(m, ld));
                        a.row_scale = te_tensor_zeros(te, TE_F8E4M3, SHAPE(round_up(m, 128), groups));
                        a.col = te_tensor_zeros(te, TE_F4E2M1, SHAPE(n, ldc));
                        a.col_scale = te_tensor_zeros(te, TE_F8E4M3, SHAPE(round_up(n, 128), col_groups));
                        te_op_nvfp4_quantize(te, &a);
                        b.y = te_tensor_zeros(te, floats[d], SHAPE(m, n));
                        b.q = a.col, b.scale = a.col_scale, b.amax = a.amax_col, b.columnwise = true;
                        b.rht = o->rht, b.no_random_sign_mask = o->no_sign, b.e4m3_max_256 = o->max_256, b.swizzled = o->swizzled;
                        te_op_nvfp4_dequantize(te, &b);
                        REQUIRE_OK(te);
                        const te_tensor *out[7] = {a.row, a.row_scale, a.col, a.col_scale, x.amax_row, x.amax_col, b.y};
                        for (int k = 0; k < 7; k++) {
                            size[k] = te_tensor_bytes(out[k]);
                            got[c][k] = (uint8_t *)malloc(size[k] + 1);
                            te_tensor_to_host(out[k], got[c][k]);
                        }
                        te_scope_end(te);
                    }
                    static const char *names[7] = {"row", "row_scale", "col", "col_scale", "amax_row", "amax_col", "y"};
                    for (int k = 0; k < 7; k++) {
                        CHECK_BYTES(names[k], got[1][k], got[0][k], size[k]);
                        free(got[0][k]);
                        free(got[1][k]);
                    }
                }
}

/* ---- misuse ---- */

TE_TEST(nvfp4_errors) {
    te_ctx *te = test_context("cpu"), *other = test_context("cpu");
    te_tensor *x = te_tensor_zeros(te, TE_F32, SHAPE(20, 40)), *one = te_tensor_zeros(te, TE_F32, SHAPE(1)), *rows = te_tensor_zeros(te, TE_F32, SHAPE(20));
    te_tensor *row = te_tensor_zeros(te, TE_F4E2M1, SHAPE(20, 64)), *row_scale = te_tensor_zeros(te, TE_F8E4M3, SHAPE(128, 4));
    te_tensor *col = te_tensor_zeros(te, TE_F4E2M1, SHAPE(40, 32)), *col_scale = te_tensor_zeros(te, TE_F8E4M3, SHAPE(128, 4));
    te_op_nvfp4_quantize_args a = {0};
    a.x = x;
    a.amax_row = one;
    CHECK_EQ_INT(te_op_nvfp4_quantize(te, &a), TE_ERR_INVALID);
    CHECK_ERROR(te, TE_ERR_INVALID, "neither row nor col");
    a.row = te_tensor_zeros(te, TE_F4E2M1, SHAPE(20, 39));
    a.row_scale = te_tensor_zeros(te, TE_F8E4M3, SHAPE(128, 4));
    te_op_nvfp4_quantize(te, &a);
    CHECK_ERROR(te, TE_ERR_SHAPE, "20 rows of at least 40 columns");
    a.row = te_tensor_zeros(te, TE_U8, SHAPE(20, 64));
    te_op_nvfp4_quantize(te, &a);
    CHECK_ERROR(te, TE_ERR_DTYPE, "row is u8");
    a.row = row;
    a.row_scale = NULL;
    te_op_nvfp4_quantize(te, &a);
    CHECK_ERROR(te, TE_ERR_STATE, "row_scale is NULL");
    a.row_scale = te_tensor_zeros(te, TE_F8E4M3, SHAPE(128, 3));
    te_op_nvfp4_quantize(te, &a);
    CHECK_ERROR(te, TE_ERR_SHAPE, "row_scale is [128, 3], not [128, 4]");
    a.row_scale = te_tensor_zeros(te, TE_F8E8M0, SHAPE(128, 4));
    te_op_nvfp4_quantize(te, &a);
    CHECK_ERROR(te, TE_ERR_DTYPE, "row_scale is e8m0");
    a.row_scale = row_scale;
    a.amax_row = NULL;
    te_op_nvfp4_quantize(te, &a);
    CHECK_ERROR(te, TE_ERR_STATE, "amax_row is NULL");
    a.amax_row = te_tensor_zeros(te, TE_F32, SHAPE(3));
    te_op_nvfp4_quantize(te, &a);
    CHECK_ERROR(te, TE_ERR_SHAPE, "neither [1] nor [20]");
    a.amax_row = rows;
    te_op_nvfp4_quantize(te, &a);
    CHECK_OK(te);
    a.two_dimensional = true;
    te_op_nvfp4_quantize(te, &a);
    CHECK_ERROR(te, TE_ERR_UNSUPPORTED, "row-scaled");
    a.two_dimensional = false;
    a.col = col;
    a.col_scale = col_scale;
    te_op_nvfp4_quantize(te, &a);
    CHECK_ERROR(te, TE_ERR_INVALID, "an amax_col of its own");
    a.amax_col = one;
    te_op_nvfp4_quantize(te, &a);
    CHECK_OK(te);
    a.amax_row = one;
    a.two_dimensional = a.rht = true;
    te_op_nvfp4_quantize(te, &a);
    CHECK_ERROR(te, TE_ERR_UNSUPPORTED, "one scale for both copies");
    a.two_dimensional = false;
    a.col = te_tensor_zeros(te, TE_F4E2M1, SHAPE(40, 20)); /* enough for the rows of x, but not for what the transform makes of them */
    te_op_nvfp4_quantize(te, &a);
    CHECK_ERROR(te, TE_ERR_SHAPE, "at least 32 columns");
    a.rht = false;
    te_op_nvfp4_quantize(te, &a);
    CHECK_OK(te);
    a.four_over_six = (te_4over6_error)3;
    te_op_nvfp4_quantize(te, &a);
    CHECK_ERROR(te, TE_ERR_INVALID, "te_4over6_error");
    a.four_over_six = TE_4OVER6_OFF;
    a.noop = rows;
    te_op_nvfp4_quantize(te, &a);
    CHECK_ERROR(te, TE_ERR_SHAPE, "noop");
    a.noop = NULL;
    a.amax_row = te_tensor_zeros(other, TE_F32, SHAPE(1));
    te_op_nvfp4_quantize(te, &a);
    CHECK_ERROR(te, TE_ERR_INVALID, "another context");
    a.amax_row = one;
    a.x = te_tensor_zeros(te, TE_I32, SHAPE(20, 40));
    te_op_nvfp4_quantize(te, &a);
    CHECK_ERROR(te, TE_ERR_DTYPE, "x is i32");
    a.x = te_tensor_transpose(x, 0, 1);
    te_op_nvfp4_quantize(te, &a);
    CHECK_ERROR(te, TE_ERR_SHAPE, "strided");

    te_op_nvfp4_amax_args m = {0};
    m.x = x;
    te_op_nvfp4_amax(te, &m);
    CHECK_ERROR(te, TE_ERR_INVALID, "neither amax_row nor amax_col");
    m.amax_col = rows;
    te_op_nvfp4_amax(te, &m);
    CHECK_ERROR(te, TE_ERR_SHAPE, "amax_col");
    m.amax_row = te_tensor_zeros(te, TE_BF16, SHAPE(1));
    te_op_nvfp4_amax(te, &m);
    CHECK_ERROR(te, TE_ERR_DTYPE, "amax_row is bf16");

    te_op_nvfp4_dequantize_args d = {0};
    d.q = row;
    d.scale = row_scale;
    d.amax = one;
    d.y = x;
    d.rht = true;
    te_op_nvfp4_dequantize(te, &d);
    CHECK_ERROR(te, TE_ERR_INVALID, "columnwise is not set");
    d.rht = false;
    d.columnwise = true;
    te_op_nvfp4_dequantize(te, &d);
    CHECK_ERROR(te, TE_ERR_SHAPE, "40 rows of at least 20 columns");
    d.q = col;
    d.scale = col_scale;
    d.amax = rows;
    te_op_nvfp4_dequantize(te, &d);
    CHECK_ERROR(te, TE_ERR_SHAPE, "amax");
    d.amax = one;
    te_op_nvfp4_dequantize(te, &d);
    CHECK_OK(te);
}

/* One call that measures gives what te_op_nvfp4_amax and a cast that reads give: small enough for one launch on a GPU, and larger. */
TE_TEST_DEVICES(nvfp4_measure_is_amax_and_cast) {
    static const int64_t shapes[][2] = {{1, 1}, {3, 5}, {127, 129}, {256, 384}, {1000, 1536}, {4096, 640}};
    for (int i = 0; i < COUNT(shapes) - (test_samples()); i++) /* the last one is many blocks of a GPU */
        for (int kind = 0; kind < 4; kind++) { /* plain; transformed; tiles; rows' own amaxes */
            int64_t m = shapes[i][0], n = shapes[i][1], rows = kind == 3 ? m : 1;
            if ((4 * i + kind) % test_every_odd(2)) continue;
            int64_t up_m = (m + 127) / 128 * 128, up_n = (n + 127) / 128 * 128, groups_m = ((m + 15) / 16 + 3) / 4 * 4, groups_n = ((n + 15) / 16 + 3) / 4 * 4;
            test_case("%dx%d kind %d", (int)m, (int)n, kind);
            te_scope_begin(te);
            te_tensor *out[2][6];
            te_tensor *x = test_tensor(te, TE_BF16, 2, shapes[i], test_specials(m * n, 11));
            for (int call = 0; call < 2; call++) {
                te_op_nvfp4_quantize_args a = {0};
                te_op_nvfp4_amax_args amax = {0};
                a.x = amax.x = x;
                a.row = out[call][0] = te_tensor_zeros(te, TE_F4E2M1, SHAPE(m, (n + 31) / 32 * 32));
                a.col = out[call][1] = te_tensor_zeros(te, TE_F4E2M1, SHAPE(n, (m + 31) / 32 * 32));
                a.row_scale = out[call][2] = te_tensor_zeros(te, TE_F8E4M3, SHAPE(up_m, groups_n));
                a.col_scale = out[call][3] = te_tensor_zeros(te, TE_F8E4M3, SHAPE(up_n, groups_m));
                a.amax_row = amax.amax_row = out[call][4] = te_tensor_full(te, TE_F32, SHAPE(rows), 7);
                a.amax_col = amax.amax_col = out[call][5] = te_tensor_full(te, TE_F32, SHAPE(1), 7);
                a.rht = amax.rht = kind == 1;
                a.two_dimensional = kind == 2;
                a.measure = call == 1;
                if (call == 0) CHECK_EQ_INT(te_op_nvfp4_amax(te, &amax), TE_OK);
                CHECK_EQ_INT(te_op_nvfp4_quantize(te, &a), TE_OK);
            }
            for (int k = 0; k < 6; k++) CHECK_BYTES("output", test_read_bytes(out[1][k]), test_read_bytes(out[0][k]), te_tensor_bytes(out[0][k]));
            CHECK_OK(te);
            te_scope_end(te);
        }
}

/* One amax for both copies is right where both quantize the same values. */
TE_TEST(nvfp4_measure_of_one_amax) {
    te_ctx *te = test_context("cpu");
    te_tensor *amax = te_tensor_zeros(te, TE_F32, SHAPE(32));
    te_op_nvfp4_quantize_args a = {.x = te_tensor_full(te, TE_F32, SHAPE(32, 32), 2), .row = te_tensor_zeros(te, TE_F4E2M1, SHAPE(32, 32)), .col = te_tensor_zeros(te, TE_F4E2M1, SHAPE(32, 32)),
                                   .row_scale = te_tensor_zeros(te, TE_F8E4M3, SHAPE(128, 4)), .col_scale = te_tensor_zeros(te, TE_F8E4M3, SHAPE(128, 4)), .measure = true};
    a.amax_row = te_tensor_narrow(amax, 0, 0, 1), a.amax_col = te_tensor_narrow(amax, 0, 0, 1);
    CHECK_EQ_INT(te_op_nvfp4_quantize(te, &a), TE_OK);
    CHECK(test_read(amax)[0] == 2);
    a.rht = true;
    te_op_nvfp4_quantize(te, &a);
    CHECK_ERROR(te, TE_ERR_INVALID, "nvfp4_quantize: amax_row, which is written, and amax_col are the same memory");
    a.measure = false; /* given: the caller knows that they are alike */
    CHECK_EQ_INT(te_op_nvfp4_quantize(te, &a), TE_OK);
    a.rht = false, a.measure = true, a.amax_row = a.amax_col = amax;
    te_op_nvfp4_quantize(te, &a);
    CHECK_ERROR(te, TE_ERR_INVALID, "nvfp4_quantize: amax_row, which is written, and amax_col are the same memory");
    CHECK_OK(te);
}
