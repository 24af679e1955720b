/* The cast operations: codes against tables worked out by hand, scales and histories against TransformerEngine's rules written down again,
 * and every shape with poisoned outputs between guard bands. Every device must give the bytes that a test expects. */
#include "formats.h"

static const te_dtype formats[] = {TE_F8E4M3, TE_F8E5M2}, floats[] = {TE_F32, TE_BF16, TE_F16};
static float bits(uint32_t u) {
    float f;
    memcpy(&f, &u, 4);
    return f;
}
static te_tensor *scalar(te_ctx *te, float value) { return test_tensor(te, TE_F32, SHAPE(1), &value); }
/* A guarded f32 [1] that holds `value`. */
static te_tensor *scalar_out(te_ctx *te, float value) { return test_guarded_with(te, TE_F32, SHAPE(1), &value); }
static uint32_t bits_of(te_tensor *x) { return *(uint32_t *)test_read_bytes(x); }
static uint32_t float_bits(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    return u;
}

/* ---- quantize ---- */

typedef struct quantize_case {
    te_dtype x_dtype, q_dtype;
    int64_t m, n, ld, ldc; /* ld or ldc < 0: that copy is not made */
    float scale;
    bool misaligned;
} quantize_case;

static void check_quantize(te_ctx *te, const quantize_case *c, const float *values, float amax_before) {
    int64_t m = c->m, n = c->n, ld = c->ld, ldc = c->ldc;
    test_case("%s -> %s [%d, %d] ld %d ldc %d scale %g%s", te_dtype_name(c->x_dtype), te_dtype_name(c->q_dtype), (int)m, (int)n, (int)ld, (int)ldc,
              (double)c->scale, c->misaligned ? " misaligned" : "");
    const float *x = test_rounded(c->x_dtype, values, m * n);
    float amax = amax_before;
    te_op_fp8_quantize_args a = {0};
    a.x = test_input(te, c->x_dtype, m, n, values, c->misaligned);
    a.row = ld < 0 ? NULL : test_guarded(te, c->q_dtype, SHAPE(m, ld));
    a.col = ldc < 0 ? NULL : test_guarded(te, c->q_dtype, SHAPE(n, ldc));
    a.scale = scalar(te, c->scale);
    a.scale_inv = test_guarded(te, TE_F32, SHAPE(1));
    a.amax = scalar_out(te, amax_before);
    CHECK_EQ_INT(te_op_fp8_quantize(te, &a), TE_OK);
    REQUIRE_OK(te);

    uint8_t *row = (uint8_t *)test_alloc((size_t)(m * (ld > 0 ? ld : 0)) + 1), *col = (uint8_t *)test_alloc((size_t)(n * (ldc > 0 ? ldc : 0)) + 1);
    for (int64_t i = 0; i < m; i++)
        for (int64_t j = 0; j < n; j++) {
            volatile float scaled = x[i * n + j] * c->scale; /* one f32 product, whatever the compiler would like */
            uint8_t code = code_of(c->q_dtype, scaled);
            amax = fmaxf(amax, fabsf(x[i * n + j]));
            if (ld >= 0) row[i * ld + j] = code;
            if (ldc >= 0) col[j * ldc + i] = code;
        }
    if (a.row) CHECK_BYTES("row", test_read_bytes(a.row), row, (size_t)(m * ld));
    if (a.col) CHECK_BYTES("col", test_read_bytes(a.col), col, (size_t)(n * ldc));
    volatile float inverse = 1.0f / c->scale;
    if (isnan(c->scale)) CHECK(isnan(test_read(a.scale_inv)[0]));
    else CHECK_EQ_INT(bits_of(a.scale_inv), float_bits(inverse));
    CHECK_EQ_INT(bits_of(a.amax), float_bits(amax));
}

TE_TEST_DEVICES(quantize_all_codes) {
    for (int f = 0; f < 2; f++) {
        float value[256];
        uint8_t want[256];
        for (int i = 0; i < 256; i++) {
            value[i] = (float)code_value(formats[f], i);
            want[i] = isnan(value[i]) ? 0x7f : isinf(value[i]) ? (uint8_t)((i & 0x80) | largest_code(formats[f])) : (uint8_t)i;
        }
        te_op_fp8_quantize_args a = {0};
        a.x = test_tensor(te, TE_F32, SHAPE(16, 16), value);
        a.row = test_guarded(te, formats[f], SHAPE(16, 16));
        a.scale = scalar(te, 1);
        te_op_fp8_quantize(te, &a);
        REQUIRE_OK(te);
        CHECK_BYTES("codes", test_read_bytes(a.row), want, 256);

        /* Halfway between neighbours, and one step of f32 to either side. */
        float between[3 * 128];
        int n = 0;
        for (int i = 0; i < largest_code(formats[f]); i++) {
            float half = (float)((code_value(formats[f], i) + code_value(formats[f], i + 1)) / 2);
            between[n++] = half, between[n++] = -nextafterf(half, 0), between[n++] = nextafterf(half, INFINITY);
        }
        a.x = test_tensor(te, TE_F32, SHAPE(1, n), between);
        a.row = test_guarded(te, formats[f], SHAPE(1, n));
        te_op_fp8_quantize(te, &a);
        REQUIRE_OK(te);
        for (int i = 0; i < n; i++) {
            want[0] = code_of(formats[f], between[i]);
            CHECK_MSG(((uint8_t *)test_read_bytes(a.row))[i] == want[0], "%a", (double)between[i]);
        }
    }
}

TE_TEST_DEVICES(quantize_shapes) {
    static const int64_t shapes[][4] = {/* m, n, ld, ldc */
                                        {1, 1, 16, 16},      {1, 1, 1, 1},       {3, 5, 16, 16},     {3, 5, 5, 3},        {127, 129, 144, 128},
                                        {127, 129, 129, 127}, {128, 128, 128, 128}, {16, 4096, 4096, 16}, {64, 72, 80, 64}, {200, 24, 32, 208},
                                        {130, 8, 200, 300},  {5, 64, 64, -1},    {5, 64, -1, 16},    {0, 7, 16, 0},       {0, 7, 16, 16},
                                        {7, 0, 16, 16},      {0, 0, 0, 0}};
    for (int s = 0; s < COUNT(shapes); s++)
        for (int d = 0; d < 3; d++)
            for (int f = 0; f < 2; f++)
                for (int misaligned = 0; misaligned < 2; misaligned++) {
                    quantize_case c = {floats[d], formats[f], shapes[s][0], shapes[s][1], shapes[s][2], shapes[s][3], 0.75f, misaligned};
                    if (s == 7 && (d == 2 || misaligned)) continue;
                    check_quantize(te, &c, test_specials(c.m * c.n, (uint64_t)s), misaligned ? 3.5f : 0);
                }
}

TE_TEST_DEVICES(quantize_large) {
    quantize_case c = {TE_BF16, TE_F8E4M3, test_samples() ? 200 : 1000, 1536, 1536, 1008, 20.5f, false};
    check_quantize(te, &c, test_normal(c.m * c.n, 1), 0);
    c.q_dtype = TE_F8E5M2, c.x_dtype = TE_F32;
    check_quantize(te, &c, test_normal(c.m * c.n, 2), 0);
}

TE_TEST_DEVICES(quantize_scales) {
    static const float scales[] = {1, 0.5f, 3.0f, 1e-30f, 1e30f, 3.4028235e38f, 1e-40f, 0, -2, INFINITY, NAN};
    for (int s = 0; s < COUNT(scales); s++)
        for (int f = 0; f < 2; f++) {
            quantize_case c = {TE_F32, formats[f], 33, 40, 48, 48, scales[s], false};
            check_quantize(te, &c, test_specials(33 * 40, 9), 0);
        }
}

TE_TEST_DEVICES(quantize_noop) {
    const float flags[] = {1, 0, 2};
    for (int i = 0; i < 3; i++) {
        te_op_fp8_quantize_args a = {0};
        a.x = test_tensor(te, TE_BF16, SHAPE(20, 30), test_normal(600, 3));
        a.row = test_guarded(te, TE_F8E4M3, SHAPE(20, 32));
        a.col = test_guarded(te, TE_F8E4M3, SHAPE(30, 32));
        a.scale = scalar(te, 2);
        a.scale_inv = scalar_out(te, 7);
        a.amax = scalar_out(te, 0.25f);
        a.noop = scalar(te, flags[i]);
        te_op_fp8_quantize(te, &a);
        REQUIRE_OK(te);
        const uint8_t *row = (const uint8_t *)test_read_bytes(a.row), *col = (const uint8_t *)test_read_bytes(a.col);
        int touched = 0;
        for (int k = 0; k < 20 * 32; k++) touched += row[k] != TEST_POISON;
        for (int k = 0; k < 30 * 32; k++) touched += col[k] != TEST_POISON;
        if (flags[i] == 1) CHECK(touched == 0 && test_read(a.scale_inv)[0] == 7 && test_read(a.amax)[0] == 0.25f);
        else CHECK(touched == 50 * 32 && test_read(a.scale_inv)[0] == 0.5f && test_read(a.amax)[0] > 1);
    }
}

/* ---- current scaling ---- */

/* The whole of it as a plain loop: the largest of what is not NaN, the scale of it, the codes. */
static void check_current(te_ctx *te, te_dtype x_dtype, te_dtype q_dtype, int64_t m, int64_t n, int copies, const float *values, float epsilon,
                          bool power_of_two, bool misaligned) {
    int64_t ld = (n + 15) / 16 * 16, ldc = (m + 15) / 16 * 16;
    test_case("current %s -> %s [%d, %d] copies %d epsilon %g power_of_two %d%s", te_dtype_name(x_dtype), te_dtype_name(q_dtype), (int)m, (int)n,
              copies, (double)epsilon, power_of_two, misaligned ? " misaligned" : "");
    const float *x = test_rounded(x_dtype, values, m * n);
    float amax = 0, used, largest = q_dtype == TE_F8E4M3 ? 448 : 57344;
    volatile float scale = 1, inverse, scaled;
    int exponent;
    te_op_fp8_quantize_args a = {0};
    a.x = test_input(te, x_dtype, m, n, values, misaligned);
    a.row = copies & 1 ? test_guarded(te, q_dtype, SHAPE(m, ld)) : NULL;
    a.col = copies & 2 ? test_guarded(te, q_dtype, SHAPE(n, ldc)) : NULL;
    a.scale_inv = test_guarded(te, TE_F32, SHAPE(1));
    a.amax = scalar_out(te, 1e30f); /* what it held before does not count */
    a.current = true;
    a.epsilon = epsilon;
    a.power_of_two = power_of_two;
    CHECK_EQ_INT(te_op_fp8_quantize(te, &a), TE_OK);
    REQUIRE_OK(te);

    for (int64_t i = 0; i < m * n; i++)
        if (fabsf(x[i]) > amax) amax = fabsf(x[i]);
    used = amax < epsilon ? epsilon : amax;
    if (used > 0 && used < INFINITY) {
        scale = largest / used;
        if (isinf(scale)) scale = 0x1.fffffep127f;
        if (power_of_two) frexpf(scale, &exponent), scale = ldexpf(1, exponent - 1);
    }
    inverse = 1.0f / scale;
    uint8_t *row = (uint8_t *)test_alloc((size_t)(m * ld) + 1), *col = (uint8_t *)test_alloc((size_t)(n * ldc) + 1);
    for (int64_t i = 0; i < m; i++)
        for (int64_t j = 0; j < n; j++) {
            scaled = x[i * n + j] * scale;
            row[i * ld + j] = col[j * ldc + i] = code_of(q_dtype, scaled);
        }
    CHECK_EQ_INT(bits_of(a.scale_inv), float_bits(inverse));
    CHECK_EQ_INT(bits_of(a.amax), float_bits(amax));
    if (a.row) CHECK_BYTES("row", test_read_bytes(a.row), row, (size_t)(m * ld));
    if (a.col) CHECK_BYTES("col", test_read_bytes(a.col), col, (size_t)(n * ldc));
}

TE_TEST_DEVICES(quantize_current) {
    static const int64_t shapes[][2] = {{1, 1}, {3, 5}, {127, 129}, {128, 128}, {16, 4096}, {0, 7}, {7, 0}, {33, 200}};
    static const float factors[] = {1, 1e-30f, 1e30f, 1e-42f, 0};
    for (int s = 0; s < COUNT(shapes); s++)
        for (int k = 0; k < COUNT(factors); k++) {
            int64_t m = shapes[s][0], n = shapes[s][1];
            float *values = test_normal(m * n, (uint64_t)(s + 1));
            for (int64_t i = 0; i < m * n; i++) values[i] *= factors[k];
            check_current(te, floats[k % 3 == 2 ? 0 : k % 3], formats[(s + k) % 2], m, n, 1 + (s + k) % 3, values, 0, k % 2, s % 2);
        }
    for (int d = 0; d < 3; d++)
        for (int f = 0; f < 2; f++)
            for (int power = 0; power < 2; power++) {
                float *values = test_finite_specials(65 * 72, 5), *odd = test_normal(65 * 72, 6);
                check_current(te, floats[d], formats[f], 65, 72, 3, values, 0, power, false);
                odd[70] = NAN;
                check_current(te, floats[d], formats[f], 65, 72, 3, odd, 0, power, true);
                check_current(te, floats[d], formats[f], 65, 72, 3, odd, 100, power, false);
                odd[4000] = -INFINITY;
                check_current(te, floats[d], formats[f], 65, 72, 3, odd, 0, power, false);
            }
}

TE_TEST_DEVICES(quantize_current_large) {
    float *values = test_normal(1000 * 1536, 11);
    values[1000 * 1536 - 1] = 77; /* the last element decides */
    check_current(te, TE_BF16, TE_F8E4M3, 1000, 1536, 3, values, 0, false, false);
    check_current(te, TE_BF16, TE_F8E4M3, 1000, 1536, 1, values, 0, true, true);
}

/* Two steps by themselves, te_op_amax and te_op_scale_from_amax, give the scale that one call does; and noop leaves everything. */
TE_TEST_DEVICES(quantize_current_in_steps) {
    te_op_fp8_quantize_args a = {0}, b = {0};
    te_op_amax_args amax = {0};
    te_op_scale_from_amax_args scale = {0};
    a.x = b.x = amax.x = test_tensor(te, TE_BF16, SHAPE(77, 90), test_normal(77 * 90, 12));
    a.row = test_guarded(te, TE_F8E5M2, SHAPE(77, 96));
    b.row = test_guarded(te, TE_F8E5M2, SHAPE(77, 96));
    a.current = true;
    amax.amax = test_guarded(te, TE_F32, SHAPE(1));
    scale.amax = amax.amax;
    scale.scale = test_guarded(te, TE_F32, SHAPE(1));
    scale.fp8_max = 57344;
    b.scale = scale.scale;
    te_op_fp8_quantize(te, &a);
    te_op_amax(te, &amax);
    te_op_scale_from_amax(te, &scale);
    te_op_fp8_quantize(te, &b);
    REQUIRE_OK(te);
    CHECK_BYTES("row", test_read_bytes(a.row), test_read_bytes(b.row), 77 * 96);
    a.row = test_guarded(te, TE_F8E5M2, SHAPE(77, 96));
    a.amax = scalar_out(te, 3);
    a.scale_inv = scalar_out(te, 4);
    a.noop = scalar(te, 1);
    te_op_fp8_quantize(te, &a);
    REQUIRE_OK(te);
    CHECK(test_read(a.amax)[0] == 3 && test_read(a.scale_inv)[0] == 4 && ((uint8_t *)test_read_bytes(a.row))[0] == TEST_POISON);
}

/* An amax that is known beforehand gives what the cast would find itself, and is 0 afterwards. */
TE_TEST_DEVICES(quantize_current_of_known_amax) {
    static const int64_t shapes[][2] = {{1, 1}, {3, 5}, {127, 129}, {128, 128}, {16, 4096}, {0, 7}, {7, 0}, {1000, 1536}};
    for (int s = 0; s < COUNT(shapes); s++)
        for (int f = 0; f < 2; f++)
            for (int copies = 1; copies < 4; copies++) {
                int64_t m = shapes[s][0], n = shapes[s][1];
                te_op_fp8_quantize_args a = {0}, b;
                te_op_amax_args amax = {0};
                if (((2 * s + f) * 3 + copies) % test_every_odd(3)) continue;
                te_tensor *found = te_tensor_zeros(te, TE_F32, SHAPE(2));
                test_case("[%d, %d] %s copies %d", (int)m, (int)n, te_dtype_name(formats[f]), copies);
                a.x = amax.x = test_input(te, s % 2 ? TE_BF16 : TE_F32, m, n, test_normal(m * n, (uint64_t)s + 3), s % 3 == 0);
                a.current = true;
                a.power_of_two = copies == 2;
                b = a;
                a.row = copies & 1 ? test_guarded(te, formats[f], SHAPE(m, (n + 15) / 16 * 16)) : NULL;
                b.row = copies & 1 ? test_guarded(te, formats[f], SHAPE(m, (n + 15) / 16 * 16)) : NULL;
                a.col = copies & 2 ? test_guarded(te, formats[f], SHAPE(n, (m + 15) / 16 * 16)) : NULL;
                b.col = copies & 2 ? test_guarded(te, formats[f], SHAPE(n, (m + 15) / 16 * 16)) : NULL;
                a.scale_inv = test_guarded(te, TE_F32, SHAPE(1));
                b.scale_inv = test_guarded(te, TE_F32, SHAPE(1));
                a.amax = scalar_out(te, 1e30f);
                b.amax = scalar_out(te, 1e30f);
                amax.amax = te_tensor_wrap(te, TE_F32, SHAPE(1), te_tensor_data(found), NULL, NULL);
                b.x_amax = found;
                te_op_fp8_quantize(te, &a);
                te_op_amax(te, &amax);
                te_op_fp8_quantize(te, &b);
                REQUIRE_OK(te);
                CHECK_EQ_INT(bits_of(b.scale_inv), bits_of(a.scale_inv));
                CHECK_EQ_INT(bits_of(b.amax), bits_of(a.amax));
                if (a.row) CHECK_BYTES("row", test_read_bytes(b.row), test_read_bytes(a.row), te_tensor_bytes(a.row));
                if (a.col) CHECK_BYTES("col", test_read_bytes(b.col), test_read_bytes(a.col), te_tensor_bytes(a.col));
                CHECK(test_read(found)[0] == 0 && ((uint32_t *)test_read_bytes(found))[1] == 0);
            }
}

/* The sums of x's columns beside the codes, which stay what they are; the same bits each time. */
TE_TEST_DEVICES(quantize_with_bias_gradient) {
    static const int64_t shapes[][2] = {{1, 1}, {3, 5}, {127, 129}, {128, 64}, {1000, 264}, {0, 7}, {7, 0}, {16, 4096}};
    for (int s = 0; s < COUNT(shapes); s++)
        for (int mode = 0; mode < 6; mode++) { /* scale given, made here, made of a known amax; one copy, or two */
            if ((6 * s + mode) % test_every_odd(2)) continue;
            int64_t m = shapes[s][0], n = shapes[s][1], ld = (n + 15) / 16 * 16, ldc = (m + 15) / 16 * 16;
            te_dtype dtype = floats[(s + mode) % 3];
            te_op_fp8_quantize_args a = {0}, b;
            float found[2] = {3, 0};
            test_case("%s [%d, %d] mode %d", te_dtype_name(dtype), (int)m, (int)n, mode);
            const float *values = test_normal(m * n, (uint64_t)s + 31), *x = test_rounded(dtype, values, m * n);
            float *want = test_floats(n), *first = NULL;
            for (int64_t j = 0; j < n; j++) {
                double sum = 0;
                for (int64_t i = 0; i < m; i++) sum += x[i * n + j];
                want[j] = (float)sum;
            }
            a.x = test_input(te, dtype, m, n, values, s % 2);
            a.current = mode % 3 != 0;
            if (!a.current) a.scale = scalar(te, 3);
            b = a;
            for (int again = 0; again < 3; again++) {
                te_op_fp8_quantize_args *q = again ? &b : &a; /* once without, twice with the sums */
                q->row = mode < 3 ? NULL : test_guarded(te, TE_F8E5M2, SHAPE(m, ld));
                q->col = test_guarded(te, TE_F8E5M2, SHAPE(n, ldc));
                if (mode % 3 == 2) q->x_amax = te_tensor_from_host(te, TE_F32, SHAPE(2), found);
                if (again) q->dbias = test_guarded(te, TE_F32, SHAPE(n));
                te_op_fp8_quantize(te, q);
                REQUIRE_OK(te);
                if (!again) continue;
                CHECK_CLOSE("dbias", test_read(b.dbias), want, n, 1e-5, 3e-5); /* f32 sums of up to 1000 numbers of size 1 */
                if (again == 1) first = test_read(b.dbias);
                else CHECK_BYTES("dbias again", test_read(b.dbias), first, (size_t)n * 4);
                CHECK_BYTES("col", test_read_bytes(b.col), test_read_bytes(a.col), (size_t)(n * ldc));
                if (b.row) CHECK_BYTES("row", test_read_bytes(b.row), test_read_bytes(a.row), (size_t)(m * ld));
            }
        }
}

/* ---- every bf16 number ---- */

TE_TEST_DEVICES(quantize_every_bf16) {
    static const float scales[] = {1, 0.37f, 3e30f};
    float *x = (float *)test_alloc(65536 * sizeof(float));
    uint8_t *row = (uint8_t *)test_alloc(65536), *col = (uint8_t *)test_alloc(65536);
    uint16_t *half = (uint16_t *)test_alloc(65536 * 2);
    for (int i = 0; i < 65536; i++) half[i] = (uint16_t)i, x[i] = bits((uint32_t)i << 16);
    for (int f = 0; f < 2; f++)
        for (int s = 0; s < COUNT(scales); s++) {
            te_op_fp8_quantize_args a = {0};
            test_case("%s scale %g", te_dtype_name(formats[f]), (double)scales[s]);
            for (int i = 0; i < 65536; i++) {
                volatile float scaled = x[i] * scales[s];
                row[i] = col[i % 256 * 256 + i / 256] = code_of(formats[f], scaled);
            }
            a.x = te_tensor_from_host(te, TE_BF16, SHAPE(256, 256), half);
            a.row = test_guarded(te, formats[f], SHAPE(256, 256));
            a.col = test_guarded(te, formats[f], SHAPE(256, 256));
            a.scale = scalar(te, scales[s]);
            te_op_fp8_quantize(te, &a);
            REQUIRE_OK(te);
            CHECK_BYTES("row", test_read_bytes(a.row), row, 65536);
            CHECK_BYTES("col", test_read_bytes(a.col), col, 65536);
        }
}

/* ---- CPU and CUDA ---- */

TE_TEST(cast_cuda_equals_cpu) {
    static const int64_t shapes[][2] = {{1, 1}, {3, 5}, {127, 129}, {128, 128}, {16, 4096}, {1000, 1536}};
    static const char *const what[] = {"normal", "tiny", "huge", "denormal", "zero blocks", "infinities", "NaN"};
    static const float factors[] = {1, 1e-30f, 1e30f, 1e-42f, 1, 1, 1};
    if (test_no_gpu()) SKIP(test_no_gpu());
    te_ctx *te[2] = {test_context("cpu"), test_context("cuda:0")};
    for (int s = 0; s < COUNT(shapes); s++)
        for (int k = 0; k < COUNT(what); k++) {
            int64_t m = shapes[s][0], n = shapes[s][1], ld = (n + 15) / 16 * 16, ldc = (m + 15) / 16 * 16;
            float *values = test_normal(m * n, (uint64_t)(s * 10 + k));
            for (int64_t i = 0; i < m * n; i++) {
                values[i] *= factors[k];
                if (k == 4 && i / 64 % 3 == 0) values[i] = 0;
                if (k == 5 && i % 97 == 3) values[i] = i % 2 ? INFINITY : -INFINITY;
                if (k == 6 && i % 89 == 2) values[i] = NAN;
            }
            for (int d = 0; d < 3; d++)
                for (int f = 0; f < 2; f++)
                    for (int current = 0; current < 2; current++) {
                        te_op_fp8_quantize_args a[2];
                        if (s == 5 && (d + f) % 2 != current) continue;
                        test_case("%s %s -> %s [%d, %d] current %d", what[k], te_dtype_name(floats[d]), te_dtype_name(formats[f]), (int)m, (int)n,
                                  current);
                        memset(a, 0, sizeof a);
                        for (int c = 0; c < 2; c++) {
                            te_scope_begin(te[c]);
                            a[c].x = te_tensor_from_f32(te[c], floats[d], SHAPE(m, n), values);
                            a[c].row = te_tensor_zeros(te[c], formats[f], SHAPE(m, ld));
                            a[c].col = te_tensor_zeros(te[c], formats[f], SHAPE(n, ldc));
                            a[c].scale = current ? NULL : te_tensor_full(te[c], TE_F32, SHAPE(1), 1.7);
                            a[c].scale_inv = te_tensor_zeros(te[c], TE_F32, SHAPE(1));
                            a[c].amax = te_tensor_zeros(te[c], TE_F32, SHAPE(1));
                            a[c].current = current;
                            a[c].power_of_two = k % 2;
                            te_op_fp8_quantize(te[c], &a[c]);
                            REQUIRE_OK(te[c]);
                        }
                        CHECK_BYTES("row", test_read_bytes(a[1].row), test_read_bytes(a[0].row), (size_t)(m * ld));
                        CHECK_BYTES("col", test_read_bytes(a[1].col), test_read_bytes(a[0].col), (size_t)(n * ldc));
                        CHECK_BYTES("scale_inv", test_read_bytes(a[1].scale_inv), test_read_bytes(a[0].scale_inv), 4);
                        CHECK_BYTES("amax", test_read_bytes(a[1].amax), test_read_bytes(a[0].amax), 4);
                        for (int c = 0; c < 2; c++) te_scope_end(te[c]);
                    }
        }
}

/* ---- dequantize ---- */

TE_TEST_DEVICES(dequantize_all_codes) {
    uint8_t code[256];
    float want[256];
    for (int i = 0; i < 256; i++) code[i] = (uint8_t)i;
    for (int f = 0; f < 2; f++)
        for (int d = 0; d < 3; d++) {
            test_case("%s to %s", te_dtype_name(formats[f]), te_dtype_name(floats[d]));
            te_op_fp8_dequantize_args a = {0};
            a.q = te_tensor_from_host(te, formats[f], SHAPE(1, 256), code);
            a.scale_inv = scalar(te, 0.37f);
            a.y = test_guarded(te, floats[d], SHAPE(1, 256));
            te_op_fp8_dequantize(te, &a);
            REQUIRE_OK(te);
            for (int i = 0; i < 256; i++) {
                volatile float product = (float)code_value(formats[f], i) * 0.37f;
                want[i] = product;
            }
            CHECK_TENSOR(a.y, test_rounded(floats[d], want, 256), 0, 0);
        }
}

TE_TEST_DEVICES(dequantize_shapes) {
    static const int64_t shapes[][3] = {{1, 1, 16}, {3, 5, 5}, {3, 5, 16}, {127, 129, 144}, {128, 128, 128}, {16, 4096, 4096}, {0, 5, 16}, {1000, 24, 24}};
    for (int s = 0; s < COUNT(shapes); s++)
        for (int d = 0; d < 3; d++) {
            int64_t m = shapes[s][0], n = shapes[s][1], ld = shapes[s][2];
            test_case("[%d, %d] ld %d %s", (int)m, (int)n, (int)ld, te_dtype_name(floats[d]));
            float *values = test_finite_specials(m * ld, 4), *want = test_floats(m * n);
            uint8_t *code = (uint8_t *)test_alloc((size_t)(m * ld) + 1);
            for (int64_t i = 0; i < m * ld; i++) code[i] = code_of(TE_F8E4M3, values[i]);
            for (int64_t i = 0; i < m * n; i++) {
                volatile float product = (float)code_value(TE_F8E4M3, code[i / n * ld + i % n]) * 3.3f;
                want[i] = product;
            }
            te_op_fp8_dequantize_args a = {0};
            a.q = te_tensor_from_host(te, TE_F8E4M3, SHAPE(m, ld), code);
            a.scale_inv = scalar(te, 3.3f);
            a.y = test_guarded(te, floats[d], SHAPE(m, n));
            te_op_fp8_dequantize(te, &a);
            REQUIRE_OK(te);
            if (m) CHECK_TENSOR(a.y, test_rounded(floats[d], want, m * n), 0, 0);
        }
}

/* ---- amax ---- */

TE_TEST_DEVICES(amax_values) {
    for (int d = 0; d < 3; d++)
        for (int64_t n = 0; n < 5; n++) {
            static const int64_t sizes[] = {0, 1, 17, 8192 + 3, 100000};
            float *v = test_normal(sizes[n], 5), want = 0;
            const float *x = test_rounded(floats[d], v, sizes[n]);
            for (int64_t i = 0; i < sizes[n]; i++) want = fmaxf(want, fabsf(x[i]));
            for (int keep = 0; keep < 2; keep++) {
                te_op_amax_args a = {0};
                test_case("%s [%d] keep %d", te_dtype_name(floats[d]), (int)sizes[n], keep);
                a.x = test_input(te, floats[d], 1, sizes[n], v, keep);
                a.amax = scalar_out(te, 100);
                a.keep = keep;
                te_op_amax(te, &a);
                REQUIRE_OK(te);
                CHECK_EQ_INT(bits_of(a.amax), float_bits(keep ? 100 : want));
            }
        }
}

TE_TEST_DEVICES(amax_nan_and_infinity) {
    const float nan_only[] = {NAN, -NAN, NAN}, mixed[] = {-3, NAN, 2}, endless[] = {1, -INFINITY, NAN}, zeros[] = {-0.0f, 0, -0.0f};
    const float tiny[] = {bits(1), -bits(3), 0};
    const float *x[] = {nan_only, mixed, endless, zeros, tiny}, want[] = {0, 3, INFINITY, 0, bits(3)};
    for (int i = 0; i < 5; i++) {
        te_op_amax_args a = {0};
        a.x = test_tensor(te, TE_F32, SHAPE(3), x[i]);
        a.amax = test_guarded(te, TE_F32, SHAPE(1));
        te_op_amax(te, &a);
        REQUIRE_OK(te);
        CHECK_EQ_INT(bits_of(a.amax), float_bits(want[i]));
        a.noop = scalar(te, 1);
        a.amax = scalar_out(te, -5);
        te_op_amax(te, &a);
        CHECK(test_read(a.amax)[0] == -5);
        a.noop = scalar(te, 0);
        te_op_amax(te, &a);
        CHECK_EQ_INT(bits_of(a.amax), float_bits(want[i]));
    }
}

/* ---- scales ---- */

TE_TEST_DEVICES(scale_table) {
    static const struct {
        float amax, epsilon, scale, power_of_two;
    } row[] = {
        {0, 0, 1, 1},
        {448, 0, 1, 1},
        {1, 0, 448, 256},
        {3, 0, 448.0f / 3.0f, 128},
        {1e-45f, 0, 0x1.fffffep127f, 0x1p127f},   /* 448 / amax overflows */
        {1e-36f, 0, 0x1.fffffep127f, 0x1p127f},
        {2e-36f, 0, 448.0f / 2e-36f, 0x1p127f},   /* the last that does not */
        {3e38f, 0, 448.0f / 3e38f, 0x1p-120f},
        {0x1.fffffep127f, 0, 448.0f / 0x1.fffffep127f, 0x1p-120f},
        {INFINITY, 0, 1, 1},
        {NAN, 0, 1, 1},
        {NAN, 2, 1, 1},                            /* NaN is not below epsilon */
        {0, 2, 224, 128},
        {1, 2, 224, 128},
        {4, 2, 112, 64},
        {0, 1e-45f, 0x1.fffffep127f, 0x1p127f},
        {1, INFINITY, 1, 1},
    };
    for (int i = 0; i < COUNT(row); i++)
        for (int power = 0; power < 2; power++) {
            te_op_scale_from_amax_args a = {0};
            test_case("amax %g epsilon %g power_of_two %d", (double)row[i].amax, (double)row[i].epsilon, power);
            a.amax = scalar(te, row[i].amax);
            a.scale = test_guarded(te, TE_F32, SHAPE(1));
            a.scale_inv = test_guarded(te, TE_F32, SHAPE(1));
            a.fp8_max = 448;
            a.epsilon = row[i].epsilon;
            a.power_of_two = power;
            te_op_scale_from_amax(te, &a);
            REQUIRE_OK(te);
            float want = power ? row[i].power_of_two : row[i].scale;
            volatile float inverse = 1.0f / want;
            CHECK_EQ_INT(bits_of(a.scale), float_bits(want));
            CHECK_EQ_INT(bits_of(a.scale_inv), float_bits(inverse));
        }
}

TE_TEST_DEVICES(scale_many) {
    enum { N = 1000 };
    te_op_scale_from_amax_args a = {0};
    float *amax = test_specials(N, 6);
    for (int i = 0; i < N; i++) amax[i] = fabsf(amax[i]);
    a.amax = test_tensor(te, TE_F32, SHAPE(N), amax);
    a.scale = test_guarded(te, TE_F32, SHAPE(N));
    a.fp8_max = 57344;
    te_op_scale_from_amax(te, &a);
    REQUIRE_OK(te);
    float *want = (float *)test_alloc(N * 4);
    for (int i = 0; i < N; i++) {
        volatile float s = 57344.0f / amax[i];
        want[i] = amax[i] == 0 || !isfinite(amax[i]) ? 1 : s > 0x1.fffffep127f ? 0x1.fffffep127f : s;
    }
    CHECK_BYTES("scale", test_read_bytes(a.scale), want, N * 4);
}

/* ---- delayed scaling ---- */

/* The fused update of one slot, from its description: what is kept, what rolls, what counts. */
static void reference_slot(float *history, int length, float *scale, float reduced, float scaled_max, bool most_recent) {
    float last = reduced != 0 ? reduced : history[0], rolled[1100] = {0}, amax = last;
    if (last == 0) return;
    for (int k = 1; k < length; k++)
        if (!isnan(history[k]) && (isnan(amax) || history[k] > amax)) amax = history[k];
    if (most_recent) amax = last;
    for (int k = 1; k <= length - 2; k++) rolled[k] = history[k + 1];
    if (length > 1) rolled[length - 1] = last;
    memcpy(history, rolled, (size_t)length * sizeof(float));
    if (amax > 0 && amax < INFINITY) {
        volatile float s = scaled_max / amax;
        *scale = isinf(s) ? 0x1.fffffep127f : s;
    }
}

TE_TEST_DEVICES(delayed_update_table) {
    /* One slot, L = 4, scale 5 before. */
    static const struct {
        const char *what;
        te_amax_algo algo;
        float history[4], reduced, after[4], scale;
    } row[] = {
        {"amax 0 leaves the slot alone", TE_AMAX_MAX, {0, 1, 2, 3}, 0, {0, 1, 2, 3}, 5},
        {"also with the latest alone", TE_AMAX_MOST_RECENT, {0, 1, 2, 3}, 0, {0, 1, 2, 3}, 5},
        {"the newest goes to the end", TE_AMAX_MAX, {4, 1, 2, 3}, 0, {0, 2, 3, 4}, 112},
        {"the evicted entry counts once more", TE_AMAX_MAX, {1, 8, 2, 3}, 0, {0, 2, 3, 1}, 56},
        {"most recent", TE_AMAX_MOST_RECENT, {2, 8, 2, 3}, 0, {0, 2, 3, 2}, 224},
        {"tiny", TE_AMAX_MAX, {1e-45f, 0, 0, 0}, 0, {0, 0, 0, 1e-45f}, 0x1.fffffep127f},
        {"infinity keeps the scale and goes in", TE_AMAX_MAX, {INFINITY, 1, 2, 3}, 0, {0, 2, 3, INFINITY}, 5},
        {"infinity in the history freezes it", TE_AMAX_MAX, {1, 2, INFINITY, 3}, 0, {0, INFINITY, 3, 1}, 5},
        {"unless only the latest counts", TE_AMAX_MOST_RECENT, {1, 2, INFINITY, 3}, 0, {0, INFINITY, 3, 1}, 448},
        {"a reduced amax replaces row 0", TE_AMAX_MAX, {1, 2, 3, 4}, 16, {0, 3, 4, 16}, 28},
        {"a reduced amax where row 0 saw nothing", TE_AMAX_MAX, {0, 2, 3, 4}, 16, {0, 3, 4, 16}, 28},
    };
    for (int i = 0; i < COUNT(row); i++)
        for (int with = 0; with < 2; with++) { /* a reduced amax of 0 is as good as none */
            te_op_delayed_update_args a = {0};
            te_tensor *history, *scale;
            if (!with && row[i].reduced != 0) continue;
            test_case("%s%s", row[i].what, with ? ", reduced" : "");
            history = test_guarded_with(te, TE_F32, SHAPE(4, 1), row[i].history);
            scale = scalar_out(te, 5);
            a.amax_history = &history;
            a.scale = &scale;
            a.count = 1;
            a.reduced = with ? scalar(te, row[i].reduced) : NULL;
            a.fp8_max = 448;
            a.algo = row[i].algo;
            te_op_delayed_update(te, &a);
            REQUIRE_OK(te);
            CHECK_BYTES("history", test_read_bytes(history), row[i].after, 16);
            CHECK_EQ_INT(bits_of(scale), float_bits(row[i].scale));
        }
}

TE_TEST_DEVICES(delayed_update_nan) {
    /* A NaN amax is written down and rolls, and the maximum looks past it. */
    const float values[] = {NAN, 2, 4};
    for (int recent = 0; recent < 2; recent++) {
        te_op_delayed_update_args a = {0};
        te_tensor *history = test_guarded_with(te, TE_F32, SHAPE(3, 1), values), *scale = scalar_out(te, 5);
        a.amax_history = &history;
        a.scale = &scale;
        a.count = 1;
        a.fp8_max = 448;
        a.algo = recent ? TE_AMAX_MOST_RECENT : TE_AMAX_MAX;
        te_op_delayed_update(te, &a);
        REQUIRE_OK(te);
        const float *after = test_read(history);
        CHECK(after[0] == 0 && after[1] == 4 && isnan(after[2]));
        CHECK(test_read(scale)[0] == (recent ? 5.0f : 112.0f));
    }
}

TE_TEST_DEVICES(delayed_update_lengths) {
    static const int lengths[] = {1, 2, 3, 16, 256, 257, 258, 300, 1024};
    static const float margins[] = {0, 1, 2.5f, -1};
    for (int l = 0; l < COUNT(lengths); l++)
        for (int n = 1; n <= 7; n += 6)
            for (int algo = 0; algo < 2; algo++) {
                int length = lengths[l];
                float margin = margins[(l + n + algo) % COUNT(margins)];
                float *history = test_uniform(length * n, 7, 0, 3), *scale = test_uniform(n, 8, 1, 2), slot[1100];
                te_op_delayed_update_args a = {0};
                te_tensor *on_device[2];
                test_case("L %d n %d algo %d margin %g", length, n, algo, (double)margin);
                on_device[0] = test_guarded_with(te, TE_F32, SHAPE(length, n), history);
                on_device[1] = test_guarded_with(te, TE_F32, SHAPE(n), scale);
                a.amax_history = &on_device[0];
                a.scale = &on_device[1];
                a.count = 1;
                a.fp8_max = 57344;
                a.margin = margin;
                a.algo = (te_amax_algo)algo;
                for (int step = 0; step < 4; step++) {
                    te_op_delayed_update(te, &a);
                    REQUIRE_OK(te);
                    for (int i = 0; i < n; i++) {
                        for (int k = 0; k < length; k++) slot[k] = history[k * n + i];
                        reference_slot(slot, length, &scale[i], 0, 57344 * powf(2, -margin), algo == TE_AMAX_MOST_RECENT);
                        for (int k = 0; k < length; k++) history[k * n + i] = slot[k];
                    }
                    CHECK_BYTES("history", test_read_bytes(on_device[0]), history, (size_t)(length * n) * 4);
                    CHECK_BYTES("scale", test_read_bytes(on_device[1]), scale, (size_t)n * 4);
                    /* The next step's amaxes; one slot sees nothing in step 1. */
                    for (int i = 0; i < n; i++) history[i] = step == 1 && i == 0 ? 0 : (float)(i + step + 1);
                    te_tensor_copy_from_host(te_tensor_narrow(on_device[0], 0, 0, 1), history);
                }
            }
}

/* A list of states of all sizes in one call: with and without reduced amaxes, and the gather of what would be reduced. */
static void check_delayed_list(te_ctx *te, int count, int most_slots, const int *lengths, int num_lengths, bool reduce) {
    te_tensor **history = (te_tensor **)test_alloc(sizeof(te_tensor *) * (size_t)count);
    te_tensor **scale = (te_tensor **)test_alloc(sizeof(te_tensor *) * (size_t)count);
    float **want_history = (float **)test_alloc(sizeof(float *) * (size_t)count);
    float **want_scale = (float **)test_alloc(sizeof(float *) * (size_t)count);
    float *rows = (float *)test_alloc(sizeof(float) * (size_t)(count * most_slots)), slot[1100];
    int total = 0;
    te_op_delayed_update_args a = {0};
    te_op_delayed_gather_args g = {0};
    test_case("%d states, up to %d slots, %d lengths%s", count, most_slots, num_lengths, reduce ? ", reduced" : "");
    for (int i = 0; i < count; i++) {
        int n = i % 11 == 5 ? 0 : 1 + (i * 7) % most_slots, length = lengths[i % num_lengths];
        want_history[i] = test_uniform(length * n + 1, (uint64_t)i, 0, 4);
        want_scale[i] = test_uniform(n + 1, (uint64_t)i + 1000, 1, 2);
        for (int k = 0; k < n; k++) {
            if ((i + k) % 5 == 1) want_history[i][k] = 0; /* has seen nothing */
            if ((i + k) % 13 == 2) want_history[i][k] = i % 2 ? INFINITY : NAN;
            if (length > 2 && (i + k) % 17 == 3) want_history[i][2 * n + k] = i % 2 ? NAN : INFINITY;
            rows[total++] = want_history[i][k];
        }
        history[i] = test_guarded_with(te, TE_F32, SHAPE(length, n), want_history[i]);
        scale[i] = test_guarded_with(te, TE_F32, SHAPE(n), want_scale[i]);
    }
    g.amax_history = history;
    g.count = count;
    g.amaxes = test_guarded(te, TE_F32, SHAPE(total));
    CHECK_EQ_INT(te_op_delayed_gather(te, &g), TE_OK);
    REQUIRE_OK(te);
    CHECK_TENSOR(g.amaxes, rows, 0, 0);
    if (reduce) { /* another rank may have seen more, or something where this one saw nothing */
        for (int k = 0; k < total; k++) rows[k] = k % 3 == 0 ? 0 : k % 3 == 1 ? 9 + (float)k : rows[k];
        a.reduced = test_tensor(te, TE_F32, SHAPE(total), rows);
    }
    a.amax_history = history;
    a.scale = scale;
    a.count = count;
    a.fp8_max = 448;
    CHECK_EQ_INT(te_op_delayed_update(te, &a), TE_OK);
    REQUIRE_OK(te);
    for (int i = 0, at = 0; i < count; i++) {
        int n = (int)te_tensor_numel(scale[i]), length = lengths[i % num_lengths], before = 0;
        for (int k = 0; k < n; k++) {
            for (int r = 0; r < length; r++) slot[r] = want_history[i][r * n + k];
            reference_slot(slot, length, &want_scale[i][k], reduce ? rows[at] : 0, 448, false);
            for (int r = 0; r < length; r++) want_history[i][r * n + k] = slot[r];
            at++;
        }
        const float *got = test_read(history[i]);
        for (int k = 0; k < length * n; k++) before += !(got[k] == want_history[i][k] || (isnan(got[k]) && isnan(want_history[i][k])));
        CHECK_MSG(before == 0, "state %d [%d, %d]: %d entries of the history differ", i, length, n, before);
        CHECK_BYTES("scale", test_read_bytes(scale[i]), want_scale[i], (size_t)n * 4);
    }
}

TE_TEST_DEVICES(delayed_update_lists) {
    static const int one[] = {16}, few[] = {1, 2, 3, 16, 300, 1024};
    int many[40];
    for (int i = 0; i < COUNT(many); i++) many[i] = 1 + i;
    for (int reduce = 0; reduce < 2; reduce++) {
        check_delayed_list(te, 1, 1, one, 1, reduce);
        check_delayed_list(te, 186, 3, one, 1, reduce); /* as many as one launch takes, and one more */
        check_delayed_list(te, 187, 3, one, 1, reduce);
        check_delayed_list(te, 40, 9, few, COUNT(few), reduce);
        check_delayed_list(te, 90, 5, many, COUNT(many), reduce); /* more lengths than a table takes */
        check_delayed_list(te, 3, 300, few, 3, reduce);
    }
    te_op_delayed_update_args a = {0};
    te_op_delayed_gather_args g = {0};
    a.fp8_max = 448;
    g.amaxes = test_guarded(te, TE_F32, SHAPE(0));
    CHECK(te_op_delayed_update(te, &a) == TE_OK && te_op_delayed_gather(te, &g) == TE_OK); /* of nothing */
    REQUIRE_OK(te);
}

/* ---- transpose ---- */

TE_TEST_DEVICES(transpose_shapes) {
    static const te_dtype dtypes[] = {TE_U8, TE_F8E5M2, TE_BF16, TE_F32, TE_I32};
    static const int64_t shapes[][4] = {/* m, n, lds, ldd */
                                        {1, 1, 1, 1}, {1, 1, 16, 16}, {3, 5, 5, 3}, {3, 5, 16, 16}, {127, 129, 144, 128}, {128, 128, 128, 128},
                                        {65, 64, 64, 80}, {16, 1024, 1024, 16}, {300, 70, 72, 304}, {0, 4, 4, 16}, {4, 0, 16, 16}};
    for (int s = 0; s < COUNT(shapes); s++)
        for (int d = 0; d < COUNT(dtypes); d++) {
            int64_t m = shapes[s][0], n = shapes[s][1], lds = shapes[s][2], ldd = shapes[s][3];
            int size = te_dtype_bits(dtypes[d]) / 8;
            uint8_t *src = (uint8_t *)test_alloc((size_t)(m * lds * size) + 1), *want = (uint8_t *)test_alloc((size_t)(n * ldd * size) + 1);
            test_case("%s [%d, %d] lds %d ldd %d", te_dtype_name(dtypes[d]), (int)m, (int)n, (int)lds, (int)ldd);
            for (int64_t i = 0; i < m * lds * size; i++) src[i] = (uint8_t)(i * 37 + i / 251);
            for (int64_t i = 0; i < m; i++)
                for (int64_t j = 0; j < n; j++) memcpy(want + (j * ldd + i) * size, src + (i * lds + j) * size, (size_t)size);
            te_op_transpose_args a = {0};
            a.src = te_tensor_from_host(te, dtypes[d], SHAPE(m, lds), src);
            a.dst = test_guarded(te, dtypes[d], SHAPE(n, ldd));
            a.rows = m;
            a.columns = n;
            te_op_transpose(te, &a);
            REQUIRE_OK(te);
            CHECK_BYTES("dst", test_read_bytes(a.dst), want, (size_t)(n * ldd * size));
        }
}

TE_TEST_DEVICES(transpose_e2m1) {
    static const int64_t shapes[][4] = {/* m, n, lds, ldd */
                                        {1, 1, 1, 1},    {1, 1, 32, 32},       {2, 3, 3, 2},         {3, 5, 5, 3},         {3, 5, 7, 9},
                                        {3, 5, 32, 32},  {8, 8, 8, 8},         {127, 129, 160, 128}, {128, 128, 128, 128}, {255, 63, 64, 255},
                                        {256, 64, 64, 256}, {257, 65, 96, 288}, {16, 1024, 1024, 32}, {300, 70, 72, 400},  {30, 11, 13, 601},
                                        {0, 4, 4, 16},   {4, 0, 16, 16}};
    for (int s = 0; s < COUNT(shapes); s++) {
        int64_t m = shapes[s][0], n = shapes[s][1], lds = shapes[s][2], ldd = shapes[s][3], src_bytes = (lds + 1) / 2, dst_bytes = (ldd + 1) / 2;
        uint8_t *src = (uint8_t *)test_alloc((size_t)(m * src_bytes) + 1), *want = (uint8_t *)test_alloc((size_t)(n * dst_bytes) + 1);
        test_case("[%d, %d] lds %d ldd %d", (int)m, (int)n, (int)lds, (int)ldd);
        for (int64_t i = 0; i < m * src_bytes; i++) src[i] = (uint8_t)(i * 37 + i / 251 + 0x3c);
        for (int64_t i = 0; i < m; i++)
            for (int64_t j = 0; j < n; j++) want[j * dst_bytes + i / 2] |= (uint8_t)((src[i * src_bytes + j / 2] >> (j % 2 * 4) & 15) << (i % 2 * 4));
        te_op_transpose_args a = {0};
        a.src = te_tensor_from_host(te, TE_F4E2M1, SHAPE(m, lds), src);
        a.dst = test_guarded(te, TE_F4E2M1, SHAPE(n, ldd));
        a.rows = m;
        a.columns = n;
        te_op_transpose(te, &a);
        REQUIRE_OK(te);
        CHECK_BYTES("dst", test_read_bytes(a.dst), want, (size_t)(n * dst_bytes));
    }
}

/* ---- misuse ---- */

TE_TEST(cast_errors) {
    te_ctx *te = test_context("cpu"), *other = test_context("cpu");
    te_tensor *x = te_tensor_zeros(te, TE_F32, SHAPE(4, 6)), *one = te_tensor_zeros(te, TE_F32, SHAPE(1));
    te_op_fp8_quantize_args a = {0};
    a.x = x;
    a.scale = one;
    CHECK_EQ_INT(te_op_fp8_quantize(te, &a), TE_ERR_INVALID);
    CHECK_ERROR(te, TE_ERR_INVALID, "neither row nor col");
    a.row = te_tensor_zeros(te, TE_F8E4M3, SHAPE(4, 5));
    te_op_fp8_quantize(te, &a);
    CHECK_ERROR(te, TE_ERR_SHAPE, "row is [4, 5]; 4 rows of at least 6 columns");
    a.row = te_tensor_zeros(te, TE_U8, SHAPE(4, 6));
    te_op_fp8_quantize(te, &a);
    CHECK_ERROR(te, TE_ERR_DTYPE, "row is u8");
    a.row = te_tensor_zeros(te, TE_F8E4M3, SHAPE(4, 6));
    a.col = te_tensor_zeros(te, TE_F8E5M2, SHAPE(6, 4));
    te_op_fp8_quantize(te, &a);
    CHECK_ERROR(te, TE_ERR_DTYPE, "row is e4m3 and col is e5m2");
    a.col = NULL;
    a.scale = te_tensor_zeros(te, TE_F32, SHAPE(2));
    te_op_fp8_quantize(te, &a);
    CHECK_ERROR(te, TE_ERR_SHAPE, "scale is [2]; 1 element is needed");
    a.scale = te_tensor_zeros(other, TE_F32, SHAPE(1));
    te_op_fp8_quantize(te, &a);
    CHECK_ERROR(te, TE_ERR_INVALID, "another context");
    a.scale = one;
    a.x = te_tensor_transpose(x, 0, 1);
    te_op_fp8_quantize(te, &a);
    CHECK_ERROR(te, TE_ERR_SHAPE, "x [6, 4] is strided");
    a.x = NULL;
    CHECK_EQ_INT(te_op_fp8_quantize(te, &a), TE_ERR_STATE);
    te_clear_error(te);

    a.x = x;
    a.row = te_tensor_zeros(te, TE_F8E4M3, SHAPE(4, 6));
    a.current = true;
    te_op_fp8_quantize(te, &a);
    CHECK_ERROR(te, TE_ERR_INVALID, "scale is given, and with `current` the scale comes from x");
    a.scale = NULL;
    a.x_amax = one;
    te_op_fp8_quantize(te, &a);
    CHECK_ERROR(te, TE_ERR_SHAPE, "x_amax is [1]; 2 elements are needed");
    a.x_amax = te_tensor_zeros(te, TE_F32, SHAPE(2));
    a.noop = one;
    te_op_fp8_quantize(te, &a);
    CHECK_ERROR(te, TE_ERR_INVALID, "x_amax with noop");
    a.x_amax = NULL;
    a.dbias = te_tensor_zeros(te, TE_F32, SHAPE(6));
    te_op_fp8_quantize(te, &a);
    CHECK_ERROR(te, TE_ERR_INVALID, "dbias with noop");
    a.noop = NULL;
    a.dbias = one;
    te_op_fp8_quantize(te, &a);
    CHECK_ERROR(te, TE_ERR_SHAPE, "dbias is [1]; 6 elements are needed");
    a.dbias = NULL;
    a.x_amax = te_tensor_zeros(te, TE_F32, SHAPE(2));
    a.current = false;
    a.scale = one;
    te_op_fp8_quantize(te, &a);
    CHECK_ERROR(te, TE_ERR_INVALID, "x_amax belongs to `current`");
    a.x_amax = NULL;
    a.scale = NULL;
    te_op_fp8_quantize(te, &a);
    CHECK_ERROR(te, TE_ERR_STATE, "scale is NULL");

    /* The second of two states is at fault: the first keeps its numbers. */
    te_op_delayed_update_args d = {0};
    te_tensor *history[2], *scale[2];
    history[0] = te_tensor_full(te, TE_F32, SHAPE(4, 2), 3);
    history[1] = te_tensor_zeros(te, TE_F32, SHAPE(3));
    scale[0] = te_tensor_full(te, TE_F32, SHAPE(2), 7);
    scale[1] = te_tensor_zeros(te, TE_F32, SHAPE(3));
    d.amax_history = history;
    d.scale = scale;
    d.count = 2;
    d.fp8_max = 448;
    te_op_delayed_update(te, &d);
    CHECK_ERROR(te, TE_ERR_SHAPE, "amax_history[1] is [3]");
    history[1] = te_tensor_zeros(te, TE_F32, SHAPE(4, 2));
    te_op_delayed_update(te, &d);
    CHECK_ERROR(te, TE_ERR_SHAPE, "scale[1] is [3], not [2]");
    scale[1] = NULL;
    te_op_delayed_update(te, &d);
    CHECK_ERROR(te, TE_ERR_STATE, "scale[1] is NULL");
    scale[1] = te_tensor_zeros(te, TE_F32, SHAPE(2));
    d.reduced = te_tensor_zeros(te, TE_F32, SHAPE(2));
    te_op_delayed_update(te, &d);
    CHECK_ERROR(te, TE_ERR_SHAPE, "reduced is [2]; 4 elements are needed");
    d.reduced = NULL;
    d.scale = NULL;
    te_op_delayed_update(te, &d);
    CHECK_ERROR(te, TE_ERR_INVALID, "the list of 2 scale is NULL");
    CHECK(test_read(history[0])[0] == 3 && test_read(scale[0])[0] == 7);
    te_op_delayed_gather_args g = {0};
    g.amax_history = history;
    g.count = 2;
    g.amaxes = te_tensor_zeros(te, TE_F32, SHAPE(3));
    te_op_delayed_gather(te, &g);
    CHECK_ERROR(te, TE_ERR_SHAPE, "amaxes is [3]; 4 elements are needed");
    g.count = -1;
    te_op_delayed_gather(te, &g);
    CHECK_ERROR(te, TE_ERR_INVALID, "delayed_gather: count is -1");
    te_op_transpose_args t = {0};
    t.src = x;
    t.dst = te_tensor_zeros(te, TE_F32, SHAPE(6, 4));
    t.rows = 6;
    t.columns = 4;
    te_op_transpose(te, &t);
    CHECK_ERROR(te, TE_ERR_SHAPE, "rows 6 and columns 4");
}

TE_TEST_DEVICES(delayed_update_margins) {
    te_tensor *history = te_tensor_full(te, TE_F32, SHAPE(1, 1), 1), *scale = te_tensor_full(te, TE_F32, SHAPE(1), 1);
    te_op_delayed_update_args d = {.amax_history = &history, .scale = &scale, .count = 1, .fp8_max = 448, .margin = 64};
    CHECK_EQ_INT(te_op_delayed_update(te, &d), TE_OK);
    REQUIRE_OK(te);
    CHECK(test_read(scale)[0] == ldexpf(448, -64));
    d.margin = 64.5f, te_op_delayed_update(te, &d);
    CHECK_ERROR(te, TE_ERR_INVALID, "margin is 64.5; -64 to 64 are possible");
}
