/* Block-scaled FP8: codes and scales against the formulas written down again in plain loops, for every shape with poisoned outputs between
 * guard bands; the GPU against the CPU, byte for byte. */
#include "formats.h"

typedef struct block_case {
    te_dtype x_dtype, q_dtype;
    int64_t m, n, ld, ldc; /* ld or ldc < 0: that copy is not made */
    bool two_dimensional, fp32_scales, misaligned;
    float epsilon;
} block_case;

static float block_scale(const block_case *c, float amax) {
    double largest = c->x_dtype == TE_F32 ? (double)0x1.fffffep127f : c->x_dtype == TE_BF16 ? 0x1.fep127 : 65504;
    if (amax < c->epsilon) amax = c->epsilon;
    if (amax == 0 || isinf(amax)) return 1;
    volatile float scale = (float)(c->q_dtype == TE_F8E4M3 ? 448 : 57344) / amax;
    if (isinf(scale)) scale = (float)largest;
    if (!c->fp32_scales) { /* the power of two below */
        int exponent;
        frexpf(scale, &exponent);
        scale = ldexpf(1, exponent - 1);
    }
    return scale;
}

static int64_t blocks(int64_t n) { return (n + 127) / 128; }
static int64_t multiple_of_4(int64_t n) { return (n + 3) / 4 * 4; }

/* One copy in bytes: of x, or (columnwise) of its transpose. */
typedef struct copy {
    int64_t lines, length, ld, scale_rows, scale_cols;
    uint8_t *code;
    float *scale_inv;
} copy;
static copy copy_shape(const block_case *c, bool columnwise) {
    copy k = {0};
    k.lines = columnwise ? c->n : c->m;
    k.length = columnwise ? c->m : c->n;
    k.ld = columnwise ? c->ldc : c->ld;
    k.scale_rows = blocks(c->two_dimensional ? k.lines : k.length);
    k.scale_cols = multiple_of_4(c->two_dimensional ? blocks(k.length) : k.lines);
    return k;
}
static copy reference(const block_case *c, const float *x, bool columnwise) {
    copy k = copy_shape(c, columnwise);
    int64_t tall = c->two_dimensional ? 128 : 1; /* lines that share a scale */
    k.code = (uint8_t *)test_alloc((size_t)(k.lines * k.ld) + 1);
    k.scale_inv = test_floats(k.scale_rows * k.scale_cols);
    for (int64_t line = 0; line < k.lines; line += tall)
        for (int64_t at = 0; at < k.length; at += 128) {
            float amax = 0;
            for (int pass = 0; pass < 2; pass++) {
                float scale = pass ? block_scale(c, amax) : 0;
                for (int64_t i = line; i < line + tall && i < k.lines; i++)
                    for (int64_t j = at; j < at + 128 && j < k.length; j++) {
                        float v = columnwise ? x[j * c->n + i] : x[i * c->n + j];
                        volatile float scaled = v * scale;
                        if (pass == 0 && fabsf(v) > amax) amax = fabsf(v);
                        if (pass == 1) k.code[i * k.ld + j] = code_of(c->q_dtype, scaled);
                    }
                volatile float inverse = 1.0f / scale;
                if (pass == 1) k.scale_inv[c->two_dimensional ? line / 128 * k.scale_cols + at / 128 : at / 128 * k.scale_cols + line] = inverse;
            }
        }
    return k;
}

/* ---- calls ---- */

static te_op_block_quantize_args quantize(te_ctx *te, const block_case *c, const float *values) {
    te_op_block_quantize_args a = {0};
    copy row = copy_shape(c, false), col = copy_shape(c, true);
    a.x = test_input(te, c->x_dtype, c->m, c->n, values, c->misaligned);
    if (c->ld >= 0) {
        a.row = test_guarded(te, c->q_dtype, SHAPE(c->m, c->ld));
        a.row_scale_inv = test_guarded(te, TE_F32, SHAPE(row.scale_rows, row.scale_cols));
    }
    if (c->ldc >= 0) {
        a.col = test_guarded(te, c->q_dtype, SHAPE(c->n, c->ldc));
        a.col_scale_inv = test_guarded(te, TE_F32, SHAPE(col.scale_rows, col.scale_cols));
    }
    a.two_dimensional = c->two_dimensional;
    a.fp32_scales = c->fp32_scales;
    a.epsilon = c->epsilon;
    return a;
}
static void name_case(const block_case *c) {
    test_case("%s -> %s [%d, %d] ld %d ldc %d %s%s eps %g%s", te_dtype_name(c->x_dtype), te_dtype_name(c->q_dtype), (int)c->m, (int)c->n, (int)c->ld,
              (int)c->ldc, c->two_dimensional ? "128x128" : "1x128", c->fp32_scales ? " fp32 scales" : "", (double)c->epsilon, c->misaligned ? " misaligned" : "");
}
static void check_copy(const te_tensor *code, const te_tensor *scale_inv, const copy *want) {
    CHECK_BYTES("codes", test_read_bytes(code), want->code, (size_t)(want->lines * want->ld));
    CHECK_BYTES("scales", test_read_bytes(scale_inv), want->scale_inv, (size_t)(want->scale_rows * want->scale_cols) * 4);
}
static void check_quantize(te_ctx *te, const block_case *c, const float *values) {
    const float *x = test_rounded(c->x_dtype, values, c->m * c->n);
    name_case(c);
    te_op_block_quantize_args a = quantize(te, c, values);
    CHECK_EQ_INT(te_op_block_quantize(te, &a), TE_OK);
    REQUIRE_OK(te);
    if (a.row) {
        copy want = reference(c, x, false);
        check_copy(a.row, a.row_scale_inv, &want);
    }
    if (a.col) {
        copy want = reference(c, x, true);
        check_copy(a.col, a.col_scale_inv, &want);
    }
}

static const te_dtype formats[] = {TE_F8E4M3, TE_F8E5M2}, floats[] = {TE_F32, TE_BF16, TE_F16};

/* ---- inputs ---- */

enum { NORMAL, TINY, HUGE_ONES, DENORMAL, ZERO_BLOCKS, INFINITIES, NANS, SPECIALS, KINDS };

/* Values of one kind; in the last three normal ones among them. Each row and column has a magnitude of its own: scales differ. */
static float *values_of(int kind, te_dtype dtype, int64_t m, int64_t n) {
    float *x = kind == SPECIALS ? test_specials(m * n, 11) : test_normal(m * n, (uint64_t)kind + 1);
    float tiny = dtype == TE_F16 ? 0x1p-14f : 0x1p-120f, huge = dtype == TE_F16 ? 16000.0f : 0x1p125f, denormal = dtype == TE_F16 ? 0x1p-20f : 0x1p-132f;
    for (int64_t i = 0; i < m * n && kind != SPECIALS; i++) {
        int64_t r = i / n, c = i % n;
        x[i] = ldexpf(x[i], (int)(r % 3 - c % 4));
        if (kind == TINY) x[i] *= tiny;
        if (kind == HUGE_ONES) x[i] *= huge;
        if (kind == DENORMAL) x[i] *= denormal;
        if (kind == ZERO_BLOCKS && (c / 128 + r / 2) % 2 == 0) x[i] = r % 3 ? 0.0f : -0.0f;
        if (kind == INFINITIES && (r * 7 + c) % 301 == 5) x[i] = c % 2 ? INFINITY : -INFINITY;
        if (kind == NANS && ((r * 5 + c) % 37 == 3 || r % 8 == 6)) x[i] = r % 2 ? NAN : -NAN; /* some rows are nothing else */
    }
    return x;
}

/* ---- quantize ---- */

TE_TEST_DEVICES(block_shapes) {
    static const int64_t shapes[][4] = {/* m, n, ld, ldc */
                                        {1, 1, 16, 16},       {1, 1, 1, 1},         {3, 5, 16, 16},     {3, 5, 5, 3},      {127, 129, 144, 128},
                                        {127, 129, 129, 127}, {128, 128, 128, 128}, {16, 520, 528, 16}, {64, 72, 80, 64},  {200, 24, 32, 208},
                                        {130, 8, 300, 300},   {5, 64, 64, -1},      {5, 64, -1, 16},    {258, 40, -1, 258}, {0, 7, 16, 0},
                                        {0, 7, 16, 16},       {7, 0, 16, 16},       {0, 0, 0, 0}};
    int turn = 0;
    for (int s = 0; s < COUNT(shapes); s++)
        for (int d = 0; d < 3; d++)
            for (int v = 0; v < 8; v++) {
                if (turn++ % test_every_odd(3)) continue;
                block_case c = {floats[d], formats[v & 1], shapes[s][0], shapes[s][1], shapes[s][2], shapes[s][3], (v >> 1 & 1) != 0, (v >> 2) != 0,
                                (v ^ s ^ d) % 2 == 0, 0};
                check_quantize(te, &c, values_of(SPECIALS, c.x_dtype, c.m, c.n));
            }
}

TE_TEST_DEVICES(block_kinds_of_values) {
    int turn = 0;
    for (int kind = 0; kind < KINDS; kind++)
        for (int d = 0; d < 3; d++)
            for (int v = 0; v < 8; v++) {
                block_case c = {floats[d], formats[v & 1], 131, 264, 272, 144, (v >> 1 & 1) != 0, (v >> 2) != 0, false, 0};
                if (kind == SPECIALS || (v & 1) != kind % 2 || turn++ % test_every_odd(2)) continue;
                check_quantize(te, &c, values_of(kind, c.x_dtype, c.m, c.n));
            }
}

TE_TEST_DEVICES(block_large) {
    block_case wide = {TE_BF16, TE_F8E4M3, 16, 4096, 4096, 16, false, false, false, 0}, c = {TE_BF16, TE_F8E4M3, 1000, 1536, 1536, 1008, false, true, false, 0};
    check_quantize(te, &wide, test_normal(wide.m * wide.n, 1));
    check_quantize(te, &c, test_normal(c.m * c.n, 2));
}

/* The scale itself, where it has corners: one block, one number. */
TE_TEST_DEVICES(block_scale_table) {
    static const struct {
        te_dtype x_dtype;
        float amax, epsilon, scale, power_of_two;
    } row[] = {
        {TE_F32, 0, 0, 1, 1},
        {TE_F32, 448, 0, 1, 1},
        {TE_F32, 3, 0, 448.0f / 3.0f, 128},
        {TE_F32, 1e-45f, 0, 0x1.fffffep127f, 0x1p127f}, /* 448 / amax is beyond f32 */
        {TE_F32, 0x1.fffffep127f, 0, 448.0f / 0x1.fffffep127f, 0x1p-120f},
        {TE_F32, INFINITY, 0, 1, 1},
        {TE_F32, NAN, 0, 1, 1}, /* never part of an amax */
        {TE_F32, NAN, 2, 224, 128},
        {TE_F32, 1, 2, 224, 128},
        {TE_F32, 4, 2, 112, 64},
        {TE_F32, 0, 2, 224, 128},
        {TE_F32, 0, 1e-45f, 0x1.fffffep127f, 0x1p127f},
        {TE_F32, 1, INFINITY, 1, 1},
        {TE_BF16, 0x1p-133f, 0, 0x1.fep127f, 0x1p127f}, /* the largest of x's format */
        {TE_BF16, 0, 1e-45f, 0x1.fep127f, 0x1p127f},
        {TE_F16, 0, 1e-45f, 65504, 32768},
        {TE_F16, 0x1p-24f, 0, 448.0f * 0x1p24f, 0x1p32f}, /* finite: not limited by x's format */
    };
    for (int i = 0; i < COUNT(row); i++)
        for (int v = 0; v < 4; v++) {
            block_case c = {row[i].x_dtype, TE_F8E4M3, 1, 1, 16, 16, v % 2 != 0, v / 2 != 0, false, row[i].epsilon};
            volatile float inverse = 1.0f / (c.fp32_scales ? row[i].scale : row[i].power_of_two);
            float want[4] = {inverse, 0, 0, 0}, x = -row[i].amax;
            te_op_block_quantize_args a = quantize(te, &c, &x);
            name_case(&c);
            te_op_block_quantize(te, &a);
            REQUIRE_OK(te);
            CHECK_BYTES("row scale", test_read_bytes(a.row_scale_inv), want, 16);
            CHECK_BYTES("col scale", test_read_bytes(a.col_scale_inv), want, 16);
        }
}

/* Every bf16 number, in a block of numbers near it and in one of all magnitudes. */
TE_TEST_DEVICES(block_every_bf16) {
    float *x = (float *)test_alloc(65536 * 4);
    for (int turned = 0; turned < 2; turned++)
        for (int v = 0; v < 4; v++) {
            block_case c = {TE_BF16, formats[v % 2], 512, 128, 128, -1, false, v / 2 != 0, false, 0};
            for (uint32_t i = 0; i < 65536; i++) {
                uint32_t h = (turned ? i % 512 * 128 + i / 512 : i) << 16;
                memcpy(&x[i], &h, 4);
            }
            if (v == 3) c.ld = -1, c.ldc = 512;
            check_quantize(te, &c, x);
        }
}

TE_TEST_DEVICES(block_epsilon) {
    for (int v = 0; v < 4; v++) {
        block_case c = {TE_BF16, TE_F8E4M3, 130, 136, 144, 144, v % 2 != 0, v / 2 != 0, false, 0.5f};
        float *x = test_normal(c.m * c.n, 5);
        for (int64_t i = 0; i < c.m * c.n; i++) x[i] *= i % 3 ? 0.02f : (float)(i % 7) * 0.1f;
        check_quantize(te, &c, x);
    }
}

TE_TEST_DEVICES(block_noop) {
    const float flags[] = {1, 0, 2};
    for (int i = 0; i < 3; i++)
        for (int two = 0; two < 2; two++) {
            block_case c = {TE_BF16, TE_F8E4M3, 20, 30, 32, 32, two != 0, false, false, 0};
            te_op_block_quantize_args a = quantize(te, &c, test_normal(600, 3));
            te_tensor *out[4];
            a.noop = test_tensor(te, TE_F32, SHAPE(1), &flags[i]);
            te_op_block_quantize(te, &a);
            REQUIRE_OK(te);
            out[0] = a.row, out[1] = a.row_scale_inv, out[2] = a.col, out[3] = a.col_scale_inv;
            for (int k = 0; k < 4; k++) {
                const uint8_t *bytes = (const uint8_t *)test_read_bytes(out[k]);
                size_t size = te_tensor_bytes(out[k]), poison = 0;
                for (size_t b = 0; b < size; b++) poison += bytes[b] == TEST_POISON;
                CHECK_EQ_INT(poison, flags[i] == 1 ? size : 0);
            }
        }
}

/* ---- dequantize ---- */

static void check_dequantize(te_ctx *te, const block_case *c, te_dtype y_dtype, bool columnwise) {
    copy k = copy_shape(c, columnwise);
    float *scale = test_uniform(k.scale_rows * k.scale_cols, 8, 0.01f, 3), *want = test_floats(c->m * c->n);
    k.code = (uint8_t *)test_alloc((size_t)(k.lines * k.ld) + 1);
    for (int64_t i = 0; i < k.lines * k.ld; i++) k.code[i] = (uint8_t)(i * 37 + i / 251);
    for (int64_t i = 0; i < c->m; i++)
        for (int64_t j = 0; j < c->n; j++) {
            int64_t line = columnwise ? j : i, at = columnwise ? i : j;
            float s = scale[c->two_dimensional ? line / 128 * k.scale_cols + at / 128 : at / 128 * k.scale_cols + line];
            volatile float product = (float)code_value(c->q_dtype, k.code[line * k.ld + at]) * s;
            want[i * c->n + j] = product;
        }
    name_case(c);
    te_op_block_dequantize_args a = {0};
    a.q = te_tensor_from_host(te, c->q_dtype, SHAPE(k.lines, k.ld), k.code);
    a.scale_inv = test_tensor(te, TE_F32, SHAPE(k.scale_rows, k.scale_cols), scale);
    a.y = test_guarded(te, y_dtype, SHAPE(c->m, c->n));
    a.two_dimensional = c->two_dimensional;
    a.columnwise = columnwise;
    CHECK_EQ_INT(te_op_block_dequantize(te, &a), TE_OK);
    REQUIRE_OK(te);
    if (c->m && c->n) CHECK_TENSOR(a.y, test_rounded(y_dtype, want, c->m * c->n), 0, 0);
}

TE_TEST_DEVICES(block_dequantize_shapes) {
    static const int64_t shapes[][4] = {{1, 1, 16, 16},     {3, 5, 5, 3},    {3, 5, 16, 16}, {127, 129, 144, 128}, {128, 128, 128, 128}, {16, 520, 528, 16},
                                        {130, 264, 272, 144}, {200, 6, 6, 200}, {0, 5, 16, 16}, {5, 0, 16, 16}};
    for (int s = 0; s < COUNT(shapes); s++)
        for (int d = 0; d < 3; d++)
            for (int v = 0; v < 8; v++) {
                block_case c = {TE_F32, formats[v & 1], shapes[s][0], shapes[s][1], shapes[s][2], shapes[s][3], (v >> 1 & 1) != 0, false, false, 0};
                if ((24 * s + 8 * d + v) % test_every_odd(2) == 0) check_dequantize(te, &c, floats[d], v >> 2);
            }
    block_case large = {TE_F32, TE_F8E4M3, test_samples() ? 200 : 1000, 1536, 1536, 1008, false, false, false, 0};
    check_dequantize(te, &large, TE_BF16, false);
    check_dequantize(te, &large, TE_BF16, true);
}

/* Each copy decodes to within half a step of its block's largest. */
TE_TEST_DEVICES(block_round_trip) {
    for (int v = 0; v < 4; v++) {
        block_case c = {TE_F32, TE_F8E4M3, 150, 300, 304, 160, v % 2 != 0, v / 2 != 0, false, 0};
        float *x = test_normal(c.m * c.n, 4);
        te_op_block_quantize_args a = quantize(te, &c, x);
        te_op_block_quantize(te, &a);
        REQUIRE_OK(te);
        for (int columnwise = 0; columnwise < 2; columnwise++) {
            te_op_block_dequantize_args d = {0};
            d.q = columnwise ? a.col : a.row;
            d.scale_inv = columnwise ? a.col_scale_inv : a.row_scale_inv;
            d.y = test_guarded(te, TE_F32, SHAPE(c.m, c.n));
            d.two_dimensional = c.two_dimensional;
            d.columnwise = columnwise != 0;
            te_op_block_dequantize(te, &d);
            REQUIRE_OK(te);
            name_case(&c);
            CHECK_TENSOR(d.y, x, 0.0626, 0.02);
        }
    }
}

/* ---- the GPU against the CPU ---- */

TE_TEST(block_cuda_is_cpu) {
    static const int64_t shapes[][2] = {{1, 1}, {3, 5}, {127, 129}, {128, 128}, {16, 4096}, {1000, 1536}};
    if (test_no_gpu()) SKIP(test_no_gpu());
    te_ctx *cpu = test_context("cpu"), *gpu = test_context("cuda:0");
    REQUIRE(cpu && gpu);
    for (int s = 0; s < COUNT(shapes); s++)
        for (int kind = 0; kind < KINDS; kind++)
            for (int v = 0; v < 12; v++) {
                int64_t m = shapes[s][0], n = shapes[s][1];
                block_case c = {floats[v % 3], formats[kind % 2], m, n, (n + 15) / 16 * 16, (m + 15) / 16 * 16, v / 3 % 2 != 0, v / 6 != 0, kind % 3 == 2, 0};
                if (s == 5 && v % 3 != 1) continue;
                const float *x = values_of(kind, c.x_dtype, m, n);
                te_op_block_quantize_args want = quantize(cpu, &c, x), got = quantize(gpu, &c, x);
                name_case(&c);
                te_op_block_quantize(cpu, &want);
                te_op_block_quantize(gpu, &got);
                REQUIRE_OK(cpu);
                REQUIRE_OK(gpu);
                CHECK_BYTES("row", test_read_bytes(got.row), test_read_bytes(want.row), te_tensor_bytes(want.row));
                CHECK_BYTES("col", test_read_bytes(got.col), test_read_bytes(want.col), te_tensor_bytes(want.col));
                CHECK_BYTES("row scale", test_read_bytes(got.row_scale_inv), test_read_bytes(want.row_scale_inv), te_tensor_bytes(want.row_scale_inv));
                CHECK_BYTES("col scale", test_read_bytes(got.col_scale_inv), test_read_bytes(want.col_scale_inv), te_tensor_bytes(want.col_scale_inv));
                for (int columnwise = 0; columnwise < 2; columnwise++) {
                    te_op_block_dequantize_args a = {0}, b = {0};
                    a.q = columnwise ? want.col : want.row, b.q = columnwise ? got.col : got.row;
                    a.scale_inv = columnwise ? want.col_scale_inv : want.row_scale_inv, b.scale_inv = columnwise ? got.col_scale_inv : got.row_scale_inv;
                    a.y = test_guarded(cpu, c.x_dtype, SHAPE(m, n)), b.y = test_guarded(gpu, c.x_dtype, SHAPE(m, n));
                    a.two_dimensional = b.two_dimensional = c.two_dimensional;
                    a.columnwise = b.columnwise = columnwise != 0;
                    te_op_block_dequantize(cpu, &a);
                    te_op_block_dequantize(gpu, &b);
                    REQUIRE_OK(cpu);
                    REQUIRE_OK(gpu);
                    test_close(__FILE__, __LINE__, "y", test_read(b.y), test_read(a.y), m * n, 0, 0); /* NaN payloads are the formats' own */
                }
            }
}

/* ---- misuse ---- */

TE_TEST(block_errors) {
    te_ctx *te = test_context("cpu"), *other = test_context("cpu");
    te_tensor *x = te_tensor_zeros(te, TE_BF16, SHAPE(130, 6));
    te_op_block_quantize_args a = {0}, before;
    a.x = x;
    CHECK_EQ_INT(te_op_block_quantize(te, &a), TE_ERR_INVALID);
    CHECK_ERROR(te, TE_ERR_INVALID, "neither row nor col");
    a.row_scale_inv = te_tensor_zeros(te, TE_F32, SHAPE(1, 132));
    a.col = te_tensor_zeros(te, TE_F8E4M3, SHAPE(6, 144));
    a.col_scale_inv = te_tensor_zeros(te, TE_F32, SHAPE(2, 8));
    te_op_block_quantize(te, &a);
    CHECK_ERROR(te, TE_ERR_INVALID, "row_scale_inv is given without row");
    a.col_scale_inv = NULL;
    a.row = te_tensor_zeros(te, TE_F8E4M3, SHAPE(130, 16));
    te_op_block_quantize(te, &a);
    CHECK_ERROR(te, TE_ERR_STATE, "col_scale_inv is NULL");
    a.col_scale_inv = te_tensor_zeros(te, TE_F32, SHAPE(2, 8));
    CHECK_EQ_INT(te_op_block_quantize(te, &a), TE_OK);
    before = a;

    a.row = te_tensor_zeros(te, TE_F8E4M3, SHAPE(130, 5));
    te_op_block_quantize(te, &a);
    CHECK_ERROR(te, TE_ERR_SHAPE, "row is [130, 5]; 130 rows of at least 6 columns");
    a.row = te_tensor_zeros(te, TE_U8, SHAPE(130, 16));
    te_op_block_quantize(te, &a);
    CHECK_ERROR(te, TE_ERR_DTYPE, "row is u8; e4m3 or e5m2 is needed");
    a.row = te_tensor_zeros(te, TE_F8E5M2, SHAPE(130, 16));
    te_op_block_quantize(te, &a);
    CHECK_ERROR(te, TE_ERR_DTYPE, "row is e5m2 and col is e4m3");
    a = before;
    a.row_scale_inv = te_tensor_zeros(te, TE_F32, SHAPE(1, 130));
    te_op_block_quantize(te, &a);
    CHECK_ERROR(te, TE_ERR_SHAPE, "row_scale_inv is [1, 130]; with 1 x 128 blocks, row of 130 rows and 6 columns has [1, 132]");
    a = before;
    a.col_scale_inv = te_tensor_zeros(te, TE_BF16, SHAPE(2, 8));
    te_op_block_quantize(te, &a);
    CHECK_ERROR(te, TE_ERR_DTYPE, "col_scale_inv is bf16; f32");
    a = before;
    a.two_dimensional = true;
    te_op_block_quantize(te, &a);
    CHECK_ERROR(te, TE_ERR_SHAPE, "row_scale_inv is [1, 132]; with 128 x 128 blocks, row of 130 rows and 6 columns has [2, 4]");
    a = before;
    a.noop = te_tensor_zeros(te, TE_F32, SHAPE(2));
    te_op_block_quantize(te, &a);
    CHECK_ERROR(te, TE_ERR_SHAPE, "noop is [2]");
    a = before;
    a.x = te_tensor_zeros(other, TE_BF16, SHAPE(130, 6));
    te_op_block_quantize(te, &a);
    CHECK_ERROR(te, TE_ERR_INVALID, "another context");
    a.x = te_tensor_transpose(te_tensor_zeros(te, TE_BF16, SHAPE(6, 130)), 0, 1);
    te_op_block_quantize(te, &a);
    CHECK_ERROR(te, TE_ERR_SHAPE, "strided");
    a.x = te_tensor_zeros(te, TE_I32, SHAPE(130, 6));
    te_op_block_quantize(te, &a);
    CHECK_ERROR(te, TE_ERR_DTYPE, "x is i32");
    a.x = NULL;
    CHECK_EQ_INT(te_op_block_quantize(te, &a), TE_ERR_STATE);
    te_clear_error(te);

    te_op_block_dequantize_args d = {0};
    d.q = before.row;
    d.scale_inv = before.row_scale_inv;
    d.y = te_tensor_zeros(te, TE_BF16, SHAPE(130, 6));
    CHECK_EQ_INT(te_op_block_dequantize(te, &d), TE_OK);
    d.columnwise = true;
    te_op_block_dequantize(te, &d);
    CHECK_ERROR(te, TE_ERR_SHAPE, "q is [130, 16]; 6 rows of at least 130 columns");
    d.q = before.col;
    te_op_block_dequantize(te, &d);
    CHECK_ERROR(te, TE_ERR_SHAPE, "scale_inv is [1, 132]");
    d.y = te_tensor_zeros(te, TE_F8E4M3, SHAPE(130, 6));
    te_op_block_dequantize(te, &d);
    CHECK_ERROR(te, TE_ERR_DTYPE, "y is e4m3");
}
