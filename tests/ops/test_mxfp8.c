/* MXFP8: codes, scales and padding against the formulas written down in plain loops, and the GPU against the CPU. Every device must give
 * the bytes that a test expects. */
#include "formats.h"

/* ---- the formulas ---- */

/* The exponent of the smallest power of two that is not below amax / fp8_max, as far as 2^-127 .. 2^127 reaches. */
static uint8_t scale_code(te_dtype dtype, float amax) {
    uint32_t inverse_bits = dtype == TE_F8E4M3 ? 0x3B124925 : 0x37924925; /* 1 / 448, 1 / 57344 */
    float inverse;
    int exponent;
    memcpy(&inverse, &inverse_bits, 4);
    volatile float ratio = amax * inverse;
    if (ratio == 0) return 0;
    if (isinf(ratio)) return 254;
    if (frexp((double)ratio, &exponent) == 0.5) exponent--;
    return (uint8_t)(exponent < -127 ? 0 : exponent + 127);
}

static const te_dtype formats[] = {TE_F8E4M3, TE_F8E5M2}, floats[] = {TE_BF16, TE_F32, TE_F16};
static int64_t up(int64_t a, int64_t b) { return (a + b - 1) / b * b; }

/* ---- inputs ---- */

enum { NORMAL, SPECIALS, TINY, HUGE_VALUES, DENORMAL, ZERO_BLOCKS, MIXED, NUM_INPUTS };
static const char *const input_names[] = {"normal", "specials", "tiny", "huge", "denormal", "zero blocks", "mixed"};

static float *input_values(int kind, int64_t m, int64_t n) {
    float *v = kind == SPECIALS ? test_specials(m * n + 1, 11) : test_normal(m * n + 1, 12);
    for (int64_t i = 0; i < m * n; i++) {
        int64_t row = i / n, col = i % n;
        if (kind == TINY) v[i] *= 1e-30f;
        if (kind == HUGE_VALUES) v[i] *= 1e38f;
        if (kind == DENORMAL) v[i] *= 1e-39f;
        if (kind == ZERO_BLOCKS && (row / 32 + col / 32) % 2 == 0) v[i] = i % 3 ? 0.0f : -0.0f;
        if (kind == MIXED) { /* a range of its own for every tile, and among them infinities and NaN alone */
            v[i] = ldexpf(v[i], (int)((row / 32 * 7 + col / 32 * 13) % 60) - 30);
            if (i % 1009 == 5) v[i] = NAN;
            if (i % 4001 == 7) v[i] = i % 2 ? INFINITY : -INFINITY;
            if (row / 32 == 1 && col / 32 == 0) v[i] = NAN;
        }
    }
    return v;
}

/* ---- one call, and what it must give ---- */

typedef struct mx_case {
    te_dtype x_dtype, q_dtype;
    int64_t m, n, ld, ldc; /* ld or ldc < 0: that copy is not made */
    bool two_dimensional, swizzled, misaligned;
} mx_case;

static void name_case(const mx_case *c, const char *what) {
    test_case("%s %s -> %s [%d, %d] ld %d ldc %d%s%s%s", what, te_dtype_name(c->x_dtype), te_dtype_name(c->q_dtype), (int)c->m, (int)c->n, (int)c->ld,
              (int)c->ldc, c->two_dimensional ? " 2D" : "", c->swizzled ? " swizzled" : "", c->misaligned ? " misaligned" : "");
}

static te_op_mxfp8_quantize_args call_of(te_ctx *te, const mx_case *c, te_tensor *x) {
    te_op_mxfp8_quantize_args a = {0};
    int64_t m = c->m, n = c->n;
    a.x = x;
    if (c->ld >= 0) {
        a.row = test_output(te, c->q_dtype, m, c->ld, c->misaligned);
        a.row_scale = test_output(te, TE_F8E8M0, up(m, 128), up(up(n, 32) / 32, 4), c->misaligned);
    }
    if (c->ldc >= 0) {
        a.col = test_output(te, c->q_dtype, m, c->ldc, c->misaligned);
        a.col_scale = test_output(te, TE_F8E8M0, up(up(m, 32) / 32, 4), up(n, 128), c->misaligned);
    }
    a.two_dimensional = c->two_dimensional;
    a.swizzled = c->swizzled;
    return a;
}

/* Scales [lines, groups] (a column-wise copy's: [groups, lines]) as they lie when swizzled: the 512 bytes of each 128 x 4, one after the
 * other, hold lines 0, 32, 64, 96 with their four groups, then lines 1, 33, 65, 97, and so on. */
static uint8_t *swizzle(const uint8_t *plain, int64_t lines, int64_t groups, bool columnwise) {
    uint8_t *out = (uint8_t *)test_alloc((size_t)(lines * groups) + 1), *to = out;
    for (int64_t line = 0; line < lines; line += 128)
        for (int64_t group = 0; group < groups; group += 4)
            for (int k = 0; k < 512; k++) {
                int64_t i = line + k / 16 + k % 16 / 4 * 32, j = group + k % 4;
                *to++ = columnwise ? plain[j * lines + i] : plain[i * groups + j];
            }
    return out;
}

/* The group of (i, j): rows i0 .. i1 - 1 and columns j0 .. j1 - 1. */
static uint8_t group_scale(const mx_case *c, const float *x, int64_t i0, int64_t i1, int64_t j0, int64_t j1) {
    float amax = 0;
    for (int64_t i = i0; i < i1 && i < c->m; i++)
        for (int64_t j = j0; j < j1 && j < c->n; j++)
            if (fabsf(x[i * c->n + j]) > amax) amax = fabsf(x[i * c->n + j]);
    return scale_code(c->q_dtype, amax);
}

static void check_copy(const mx_case *c, const float *x, bool columnwise, te_tensor *codes, te_tensor *scales) {
    int64_t m = c->m, n = c->n, ld = columnwise ? c->ldc : c->ld, tall = c->two_dimensional || columnwise ? 32 : 1, wide = c->two_dimensional || !columnwise ? 32 : 1;
    int64_t lines = up(columnwise ? n : m, 128), groups = up(up(columnwise ? m : n, 32) / 32, 4);
    uint8_t *want = (uint8_t *)test_alloc((size_t)(m * ld) + 1), *want_scale = (uint8_t *)test_alloc((size_t)(lines * groups) + 1);
    for (int64_t i0 = 0; i0 < m; i0 += tall)
        for (int64_t j0 = 0; j0 < n; j0 += wide) {
            uint8_t e = group_scale(c, x, i0, i0 + tall, j0, j0 + wide);
            float multiplier = (float)ldexp(1, 127 - e);
            for (int64_t i = i0; i < i0 + tall && i < m; i++)
                for (int64_t j = j0; j < j0 + wide && j < n; j++) {
                    volatile float scaled = x[i * n + j] * multiplier;
                    want[i * ld + j] = code_of(c->q_dtype, scaled);
                    if (columnwise) want_scale[i / 32 * lines + j] = e;
                    else want_scale[i * groups + j / 32] = e;
                }
        }
    if (c->swizzled) want_scale = swizzle(want_scale, lines, groups, columnwise);
    CHECK_BYTES(columnwise ? "col" : "row", test_read_bytes(codes), want, (size_t)(m * ld));
    CHECK_BYTES(columnwise ? "col_scale" : "row_scale", test_read_bytes(scales), want_scale, (size_t)(lines * groups));
}

static void check_quantize(te_ctx *te, const mx_case *c, const float *values, const char *what) {
    name_case(c, what);
    const float *x = test_rounded(c->x_dtype, values, c->m * c->n);
    te_op_mxfp8_quantize_args a = call_of(te, c, test_input(te, c->x_dtype, c->m, c->n, values, c->misaligned));
    CHECK_EQ_INT(te_op_mxfp8_quantize(te, &a), TE_OK);
    REQUIRE_OK(te);
    if (a.row) check_copy(c, x, false, a.row, a.row_scale);
    if (a.col) check_copy(c, x, true, a.col, a.col_scale);
}

/* ---- quantize ---- */

TE_TEST_DEVICES(mxfp8_shapes) {
    int turn = 0;
    static const int64_t shapes[][4] = {/* m, n, ld, ldc */
                                        {1, 1, 16, 16},       {1, 1, 1, 1},        {3, 5, 16, 5},       {32, 32, 32, 32},  {33, 31, 32, 48},
                                        {127, 129, 144, 129}, {128, 128, 128, 128}, {64, 72, 80, 80},   {200, 24, 32, -1}, {65, 264, -1, 264},
                                        {5, 100, 400, 112},   {130, 7, 200, 300},  {0, 7, 16, 16},      {7, 0, 16, 0},     {0, 0, 0, 0},
                                        {4, 0, 0, 272}};
    for (int s = 0; s < COUNT(shapes); s++) {
        const float *values = input_values(SPECIALS, shapes[s][0], shapes[s][1]);
        for (int d = 0; d < 3; d++)
            for (int f = 0; f < 2; f++)
                for (int two = 0; two < 2; two++)
                    for (int swizzled = 0; swizzled < 2; swizzled++) {
                        if (turn++ % test_every_odd(2)) continue;
                        mx_case c = {floats[d], formats[f], shapes[s][0], shapes[s][1], shapes[s][2], shapes[s][3], two, swizzled, (d + f + two) % 2};
                        check_quantize(te, &c, values, "specials");
                    }
    }
}

TE_TEST_DEVICES(mxfp8_inputs) {
    int turn = 0;
    for (int kind = 0; kind < NUM_INPUTS; kind++) {
        const float *values = input_values(kind, 127, 136);
        for (int d = 0; d < 3; d++)
            for (int f = 0; f < 2; f++)
                for (int two = 0; two < 2; two++) {
                    if (turn++ % test_every_odd(2)) continue;
                    mx_case c = {floats[d], formats[f], 127, 136, 144, 136, two, f ^ two, false};
                    check_quantize(te, &c, values, input_names[kind]);
                }
    }
}

TE_TEST_DEVICES(mxfp8_large) {
    static const mx_case cases[] = {{TE_BF16, TE_F8E4M3, 16, 4096, 4096, 4096, false, false, false},
                                    {TE_BF16, TE_F8E4M3, 1000, 1536, 1536, 1536, false, true, false},
                                    {TE_F16, TE_F8E5M2, 500, 1030, 1040, 1040, true, false, false}};
    for (int i = 0; i < COUNT(cases); i += test_every_sanitized(1)) check_quantize(te, &cases[i], input_values(MIXED, cases[i].m, cases[i].n), "mixed");
}

/* All 65,536 numbers of bf16: as the largest of their group, and in groups of 32 neighbours. */
TE_TEST_DEVICES(mxfp8_every_bf16) {
    enum { N = 65536 };
    uint16_t *alone = (uint16_t *)test_alloc(N * 32 * 2), *neighbours = (uint16_t *)test_alloc(N * 2);
    for (int i = 0; i < N; i++) alone[i * 32 + i % 32] = neighbours[i] = (uint16_t)i;
    for (int f = 0; f < 2; f++) {
        mx_case c = {TE_BF16, formats[f], 256, 256, 256, 256, false, false, false};
        name_case(&c, "neighbours");
        te_tensor *x = te_tensor_from_host(te, TE_BF16, SHAPE(256, 256), neighbours);
        te_op_mxfp8_quantize_args a = call_of(te, &c, x);
        te_op_mxfp8_quantize(te, &a);
        REQUIRE_OK(te);
        const float *v = test_read(x);
        check_copy(&c, v, false, a.row, a.row_scale);
        check_copy(&c, v, true, a.col, a.col_scale);

        mx_case one = {TE_BF16, formats[f], N / 32, 32 * 32, 32 * 32, -1, false, false, false};
        name_case(&one, "alone");
        a = call_of(te, &one, te_tensor_from_host(te, TE_BF16, SHAPE(N / 32, 32 * 32), alone));
        te_op_mxfp8_quantize(te, &a);
        REQUIRE_OK(te);
        const uint8_t *code = (const uint8_t *)test_read_bytes(a.row), *scale = (const uint8_t *)test_read_bytes(a.row_scale);
        int wrong_scales = 0, wrong_codes = 0;
        for (int i = 0; i < N; i++) {
            uint8_t e = scale_code(formats[f], isnan(v[i]) ? 0 : fabsf(v[i]));
            volatile float scaled = v[i] * (float)ldexp(1, 127 - e);
            wrong_scales += scale[i] != e;
            for (int k = 0; k < 32; k++) wrong_codes += code[i * 32 + k] != (k == i % 32 ? code_of(formats[f], scaled) : 0);
        }
        CHECK_EQ_INT(wrong_scales, 0);
        CHECK_EQ_INT(wrong_codes, 0);
    }
}

/* Where E8M0 turns over: fp8_max * 2^k takes the exponent k exactly, the next number above it k + 1. */
TE_TEST_DEVICES(mxfp8_exponents) {
    for (int f = 0; f < 2; f++) {
        float *x = (float *)test_alloc(3 * 254 * 32 * sizeof(float)), largest = f ? 57344.0f : 448.0f;
        int top = f ? 112 : 119; /* 1.75 * 2^127 is the largest of the kind */
        for (int i = 0; i < 254; i++) {
            int k = i - 127 > top ? top : i - 127;
            float at = ldexpf(largest, k);
            x[(3 * i) * 32] = nextafterf(at, 0), x[(3 * i + 1) * 32 + 9] = -at, x[(3 * i + 2) * 32 + 31] = nextafterf(at, INFINITY);
        }
        mx_case c = {TE_F32, formats[f], 3 * 254, 32, 32, -1, false, false, false};
        te_op_mxfp8_quantize_args a = call_of(te, &c, te_tensor_from_host(te, TE_F32, SHAPE(3 * 254, 32), x));
        te_op_mxfp8_quantize(te, &a);
        REQUIRE_OK(te);
        const uint8_t *scale = (const uint8_t *)test_read_bytes(a.row_scale);
        for (int i = 0; i < 254; i++) {
            int k = i - 127 > top ? top : i - 127;
            test_case("%s 2^%d", te_dtype_name(formats[f]), k);
            CHECK_EQ_INT(scale[(3 * i + 1) * 4], k + 127);
            CHECK_EQ_INT(scale[(3 * i + 2) * 4], scale_code(formats[f], nextafterf(ldexpf(largest, k), INFINITY)));
            CHECK(scale[3 * i * 4] <= k + 127 && scale[3 * i * 4] + 1 >= k + 127);
        }
        check_copy(&c, x, false, a.row, a.row_scale);
    }
}

TE_TEST_DEVICES(mxfp8_two_dimensional_copies_agree) {
    mx_case c = {TE_BF16, TE_F8E4M3, 100, 150, 160, 160, true, false, false};
    te_op_mxfp8_quantize_args a = call_of(te, &c, test_input(te, c.x_dtype, c.m, c.n, input_values(NORMAL, c.m, c.n), false));
    te_op_mxfp8_quantize(te, &a);
    REQUIRE_OK(te);
    CHECK_BYTES("codes", test_read_bytes(a.row), test_read_bytes(a.col), 100 * 160);
    const uint8_t *row = (const uint8_t *)test_read_bytes(a.row_scale), *col = (const uint8_t *)test_read_bytes(a.col_scale);
    for (int i = 0; i < 100; i++)
        for (int j = 0; j < 150; j++) CHECK_MSG(row[i * 8 + j / 32] == col[i / 32 * 256 + j], "scales of (%d, %d)", i, j);
}

TE_TEST_DEVICES(mxfp8_noop) {
    const float flags[] = {1, 0, 2};
    for (int i = 0; i < 3; i++) {
        mx_case c = {TE_BF16, TE_F8E4M3, 20, 30, 32, 32, false, false, false};
        te_op_mxfp8_quantize_args a = call_of(te, &c, test_input(te, c.x_dtype, 20, 30, input_values(ZERO_BLOCKS, 20, 30), false));
        a.noop = test_tensor(te, TE_F32, SHAPE(1), &flags[i]);
        te_op_mxfp8_quantize(te, &a);
        REQUIRE_OK(te);
        te_tensor *out[] = {a.row, a.col, a.row_scale, a.col_scale};
        for (int k = 0; k < 4; k++) {
            const uint8_t *bytes = (const uint8_t *)test_read_bytes(out[k]);
            int64_t n = te_tensor_numel(out[k]), poison = 0;
            for (int64_t b = 0; b < n; b++) poison += bytes[b] == TEST_POISON;
            CHECK_EQ_INT(poison, flags[i] == 1 ? n : 0);
        }
    }
}

/* ---- dequantize ---- */

static float scaled_value(te_dtype q_dtype, uint8_t code, uint8_t e) {
    return e == 255 ? NAN : (float)(code_value(q_dtype, code) * ldexp(1, e - 127)); /* an exact product, rounded once */
}

/* codes [m, ld] and plain scales through the call, against the formula. */
static void check_dequantize(te_ctx *te, te_dtype q_dtype, te_dtype y_dtype, int64_t m, int64_t n, int64_t ld, const uint8_t *code, const uint8_t *scale,
                             bool columnwise, bool swizzled) {
    int64_t lines = up(columnwise ? n : m, 128), groups = up(up(columnwise ? m : n, 32) / 32, 4);
    float *want = test_floats(m * n);
    test_case("%s to %s [%d, %d] ld %d%s%s", te_dtype_name(q_dtype), te_dtype_name(y_dtype), (int)m, (int)n, (int)ld, columnwise ? " columnwise" : "",
              swizzled ? " swizzled" : "");
    for (int64_t i = 0; i < m; i++)
        for (int64_t j = 0; j < n; j++)
            want[i * n + j] = scaled_value(q_dtype, code[i * ld + j], columnwise ? scale[i / 32 * lines + j] : scale[i * groups + j / 32]);
    te_op_mxfp8_dequantize_args a = {0};
    a.q = te_tensor_from_host(te, q_dtype, SHAPE(m, ld), code);
    if (swizzled) scale = swizzle(scale, lines, groups, columnwise);
    a.scale = te_tensor_from_host(te, TE_F8E8M0, SHAPE(columnwise ? groups : lines, columnwise ? lines : groups), scale);
    a.y = test_guarded(te, y_dtype, SHAPE(m, n));
    a.columnwise = columnwise;
    a.swizzled = swizzled;
    CHECK_EQ_INT(te_op_mxfp8_dequantize(te, &a), TE_OK);
    REQUIRE_OK(te);
    if (m > 0 && n > 0) CHECK_TENSOR(a.y, test_rounded(y_dtype, want, m * n), 0, 0);
}

/* Every code under every scale. */
TE_TEST_DEVICES(mxfp8_dequantize_all_codes) {
    uint8_t *code = (uint8_t *)test_alloc(256 * 256), *scale = (uint8_t *)test_alloc(256 * 256);
    for (int i = 0; i < 256 * 256; i++) code[i] = (uint8_t)i;
    for (int f = 0; f < 2; f++)
        for (int d = 0; d < 3; d++) {
            for (int i = 0; i < 256 * 8; i++) scale[i] = (uint8_t)(i / 8);
            check_dequantize(te, formats[f], floats[d], 256, 256, 256, code, scale, false, f == 0);
            for (int i = 0; i < 8 * 256; i++) scale[i] = (uint8_t)(i % 256 + i / 256 * 37);
            check_dequantize(te, formats[f], floats[d], 256, 256, 256, code, scale, true, f == 1);
        }
}

TE_TEST_DEVICES(mxfp8_dequantize_shapes) {
    static const int64_t shapes[][3] = {{1, 1, 16}, {3, 5, 5}, {3, 5, 16}, {127, 129, 144}, {128, 128, 128}, {65, 40, 40}, {33, 264, 600}, {0, 5, 16}, {5, 0, 16}};
    for (int s = 0; s < COUNT(shapes); s++) {
        int64_t m = shapes[s][0], n = shapes[s][1], ld = shapes[s][2];
        const int64_t *random = test_integers(m * ld + 1, 3, 0, 256), *exponents = test_integers(up(m, 128) * up(n, 128) + 1, 4, 100, 150);
        uint8_t *code = (uint8_t *)test_alloc((size_t)(m * ld) + 1), *scale = (uint8_t *)test_alloc((size_t)(up(m, 128) * up(n, 128)) + 1);
        for (int64_t i = 0; i < m * ld; i++) code[i] = (uint8_t)random[i];
        for (int64_t i = 0; i < up(m, 128) * up(n, 128); i++) scale[i] = (uint8_t)exponents[i];
        for (int d = 0; d < 3; d++)
            for (int f = 0; f < 2; f++)
                for (int k = 0; k < 4; k++) check_dequantize(te, formats[f], floats[d], m, n, ld, code, scale, k & 1, k >> 1);
    }
}

/* Scales read and written as numbers are the powers of two that they stand for. */
TE_TEST_DEVICES(mxfp8_scales_as_numbers) {
    uint8_t code[256];
    float value[256];
    for (int i = 0; i < 256; i++) code[i] = (uint8_t)i, value[i] = i == 255 ? NAN : (float)ldexp(1, i - 127);
    te_tensor *scale = te_tensor_from_host(te, TE_F8E8M0, SHAPE(256), code);
    CHECK_TENSOR(scale, value, 0, 0);
    CHECK_BYTES("codes", test_read_bytes(te_tensor_from_f32(te, TE_F8E8M0, SHAPE(256), value)), code, 256);
    CHECK_OK(te);
}

/* There and back: no element moves by more than half a step of its code under the group's scale. */
TE_TEST_DEVICES(mxfp8_round_trip) {
    mx_case c = {TE_F32, TE_F8E4M3, 70, 90, 96, 96, false, true, false};
    const float *x = input_values(NORMAL, c.m, c.n);
    te_op_mxfp8_quantize_args a = call_of(te, &c, test_input(te, TE_F32, c.m, c.n, x, false));
    te_op_mxfp8_quantize(te, &a);
    for (int columnwise = 0; columnwise < 2; columnwise++) {
        te_op_mxfp8_dequantize_args d = {0};
        d.q = columnwise ? a.col : a.row;
        d.scale = columnwise ? a.col_scale : a.row_scale;
        d.y = test_guarded(te, TE_F32, SHAPE(c.m, c.n));
        d.columnwise = columnwise;
        d.swizzled = true;
        te_op_mxfp8_dequantize(te, &d);
        REQUIRE_OK(te);
        CHECK_TENSOR(d.y, x, 1.0 / 16, 1e-4);
    }
}

/* ---- the GPU against the CPU ---- */

static const int64_t both_shapes[][2] = {{1, 1}, {3, 5}, {127, 129}, {128, 128}, {16, 4096}, {1000, 1536}};

TE_TEST(mxfp8_cuda_gives_the_bytes_of_the_cpu) {
    if (test_no_gpu()) SKIP(test_no_gpu());
    te_ctx *te[2] = {test_context("cpu"), test_context("cuda:0")};
    for (int s = 0; s < COUNT(both_shapes); s++)
        for (int kind = 0; kind < NUM_INPUTS; kind++) {
            int64_t m = both_shapes[s][0], n = both_shapes[s][1];
            const float *values = input_values(kind, m, n);
            for (int k = 0; k < 24; k++) {
                mx_case c = {floats[k % 3], formats[k / 3 % 2], m, n, up(n, 16), n, k / 6 % 2, k / 12, false};
                te_op_mxfp8_quantize_args a[2];
                if (s == COUNT(both_shapes) - 1 && k % 8) continue; /* time and memory */
                for (int side = 0; side < 2; side++) {
                    name_case(&c, input_names[kind]);
                    te_scope_begin(te[side]);
                    a[side] = call_of(te[side], &c, test_input(te[side], c.x_dtype, m, n, values, false));
                    te_op_mxfp8_quantize(te[side], &a[side]);
                    REQUIRE_OK(te[side]);
                }
                CHECK_BYTES("row", test_read_bytes(a[1].row), test_read_bytes(a[0].row), (size_t)te_tensor_bytes(a[0].row));
                CHECK_BYTES("col", test_read_bytes(a[1].col), test_read_bytes(a[0].col), (size_t)te_tensor_bytes(a[0].col));
                CHECK_BYTES("row_scale", test_read_bytes(a[1].row_scale), test_read_bytes(a[0].row_scale), (size_t)te_tensor_bytes(a[0].row_scale));
                CHECK_BYTES("col_scale", test_read_bytes(a[1].col_scale), test_read_bytes(a[0].col_scale), (size_t)te_tensor_bytes(a[0].col_scale));
                te_tensor *y[2];
                for (int side = 0; side < 2; side++) {
                    te_op_mxfp8_dequantize_args d = {0};
                    d.q = k & 1 ? a[side].col : a[side].row;
                    d.scale = k & 1 ? a[side].col_scale : a[side].row_scale;
                    d.y = y[side] = te_tensor_empty(te[side], floats[k / 2 % 3], SHAPE(m, n));
                    d.columnwise = k & 1;
                    d.swizzled = c.swizzled;
                    te_op_mxfp8_dequantize(te[side], &d);
                    REQUIRE_OK(te[side]);
                }
                CHECK_CLOSE("dequantized", test_read(y[1]), test_read(y[0]), m * n, 0, 0);
                for (int side = 0; side < 2; side++) te_scope_end(te[side]);
            }
        }
}

/* ---- misuse ---- */

TE_TEST(mxfp8_errors) {
    te_ctx *te = test_context("cpu"), *other = test_context("cpu");
    te_tensor *x = te_tensor_zeros(te, TE_BF16, SHAPE(40, 70));
    te_tensor *row = te_tensor_zeros(te, TE_F8E4M3, SHAPE(40, 80)), *row_scale = te_tensor_zeros(te, TE_F8E8M0, SHAPE(128, 4));
    te_tensor *col_scale = te_tensor_zeros(te, TE_F8E8M0, SHAPE(4, 128));
    te_op_mxfp8_quantize_args a = {0};
    CHECK_EQ_INT(te_op_mxfp8_quantize(te, &a), TE_ERR_STATE);
    CHECK_ERROR(te, TE_ERR_STATE, "x is NULL");
    a.x = x;
    te_op_mxfp8_quantize(te, &a);
    CHECK_ERROR(te, TE_ERR_INVALID, "neither row nor col");
    a.row = row;
    te_op_mxfp8_quantize(te, &a);
    CHECK_ERROR(te, TE_ERR_STATE, "row_scale is NULL");
    a.row_scale = col_scale;
    te_op_mxfp8_quantize(te, &a);
    CHECK_ERROR(te, TE_ERR_SHAPE, "row_scale is [4, 128]; the scales of a row-wise [40, 70], padding included, are [128, 4]");
    a.row_scale = te_tensor_zeros(te, TE_U8, SHAPE(128, 4));
    te_op_mxfp8_quantize(te, &a);
    CHECK_ERROR(te, TE_ERR_DTYPE, "row_scale is u8; e8m0 is needed");
    a.row_scale = row_scale;
    a.col_scale = col_scale;
    te_op_mxfp8_quantize(te, &a);
    CHECK_ERROR(te, TE_ERR_INVALID, "col_scale is given, and col is not");
    a.col = te_tensor_zeros(te, TE_F8E4M3, SHAPE(70, 48));
    te_op_mxfp8_quantize(te, &a);
    CHECK_ERROR(te, TE_ERR_SHAPE, "MXFP8 transposes no copy");
    a.col = te_tensor_zeros(te, TE_F8E5M2, SHAPE(40, 80));
    te_op_mxfp8_quantize(te, &a);
    CHECK_ERROR(te, TE_ERR_DTYPE, "row is e4m3 and col is e5m2; both copies have one format");
    a.col = te_tensor_zeros(te, TE_F8E4M3, SHAPE(40, 69));
    te_op_mxfp8_quantize(te, &a);
    CHECK_ERROR(te, TE_ERR_SHAPE, "col is [40, 69]; it must be [40, 70 or more]");
    a.col = te_tensor_zeros(te, TE_BF16, SHAPE(40, 70));
    te_op_mxfp8_quantize(te, &a);
    CHECK_ERROR(te, TE_ERR_DTYPE, "col is bf16; e4m3 or e5m2");
    a.col = te_tensor_zeros(te, TE_F8E4M3, SHAPE(40, 80));
    a.noop = te_tensor_zeros(te, TE_F32, SHAPE(2));
    te_op_mxfp8_quantize(te, &a);
    CHECK_ERROR(te, TE_ERR_SHAPE, "noop is [2]");
    a.noop = te_tensor_zeros(other, TE_F32, SHAPE(1));
    te_op_mxfp8_quantize(te, &a);
    CHECK_ERROR(te, TE_ERR_INVALID, "another context");
    a.noop = NULL;
    a.x = te_tensor_zeros(te, TE_I32, SHAPE(40, 70));
    te_op_mxfp8_quantize(te, &a);
    CHECK_ERROR(te, TE_ERR_DTYPE, "x is i32");
    a.x = x;
    CHECK_EQ_INT(te_op_mxfp8_quantize(te, &a), TE_OK);

    te_op_mxfp8_dequantize_args d = {0};
    d.q = row;
    d.scale = row_scale;
    d.y = te_tensor_zeros(te, TE_BF16, SHAPE(40, 70));
    CHECK_EQ_INT(te_op_mxfp8_dequantize(te, &d), TE_OK);
    d.columnwise = true;
    te_op_mxfp8_dequantize(te, &d);
    CHECK_ERROR(te, TE_ERR_SHAPE, "scale is [128, 4]; the scales of a column-wise [40, 70], padding included, are [4, 128]");
    d.columnwise = false;
    d.q = te_tensor_zeros(te, TE_F8E4M3, SHAPE(40, 64));
    te_op_mxfp8_dequantize(te, &d);
    CHECK_ERROR(te, TE_ERR_SHAPE, "q is [40, 64]");
    d.q = row;
    d.y = te_tensor_zeros(te, TE_F8E4M3, SHAPE(40, 70));
    te_op_mxfp8_dequantize(te, &d);
    CHECK_ERROR(te, TE_ERR_DTYPE, "y is e4m3");
}
