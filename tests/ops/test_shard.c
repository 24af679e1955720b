/* Quantizing by slices: however a matrix is cut, the slices together give the bytes of its whole quantization, which is written here as plain
 * loops from the formulas of api/ops_quant.h. Every device must give the bytes that a test expects. */
#include "formats.h"

/* ---- the formats, from their definitions ---- */

static float mul(float a, float b) {
    volatile float r = a * b; /* one f32 product, whatever the compiler would like */
    return r;
}
static float divide(float a, float b) {
    volatile float r = a / b;
    return r;
}

/* The smallest power of two 2^(c - 127) that is not below f. */
static uint8_t e8m0_of(float f) {
    int c = 0;
    while (c < 254 && ldexp(1, c - 127) < (double)f) c++;
    return (uint8_t)c;
}

/* ---- whole quantizations ---- */

typedef struct recipe {
    te_scaling scaling;
    te_dtype dtype;
    bool columnwise, fp32_scales, max_256;
    float epsilon;
} recipe;
static const recipe recipes[] = {
    {TE_SCALING_TENSOR, TE_F8E4M3, false, false, false, 0},  {TE_SCALING_TENSOR, TE_F8E5M2, true, false, false, 0},
    {TE_SCALING_BLOCK_2D, TE_F8E4M3, false, false, false, 0}, {TE_SCALING_BLOCK_2D, TE_F8E5M2, false, true, false, 1e-3f},
    {TE_SCALING_BLOCK_2D, TE_F8E4M3, false, true, false, 0},
    {TE_SCALING_MXFP8, TE_F8E4M3, false, false, false, 0},   {TE_SCALING_MXFP8, TE_F8E4M3, true, false, false, 0},
    {TE_SCALING_MXFP8, TE_F8E5M2, true, false, false, 0},    {TE_SCALING_NVFP4, TE_F4E2M1, false, false, false, 0},
    {TE_SCALING_NVFP4, TE_F4E2M1, false, false, true, 0},
};
static const float tensor_scale = 1.7f; /* TENSOR: the scale that is given */

typedef struct whole {
    uint8_t *code; /* [M, N], one a byte */
    uint8_t *row_scale, *col_scale;
    float *multiplier;
    te_dtype scale_dtype;
    int64_t row_m, row_n, col_m, col_n;
    float amax;
} whole;

static int64_t up(int64_t a, int64_t b) { return (a + b - 1) / b * b; }
static float largest(const float *x, int64_t n, int64_t r0, int64_t r1, int64_t c0, int64_t c1) {
    float amax = 0;
    for (int64_t r = r0; r < r1; r++)
        for (int64_t c = c0; c < c1; c++)
            if (fabsf(x[r * n + c]) > amax) amax = fabsf(x[r * n + c]);
    return amax;
}
static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

static whole quantize_block(const recipe *q, const float *x, int64_t m, int64_t n, float limit) {
    whole w = {0};
    int64_t tm = up(m, 128) / 128, tn = up(n, 128) / 128;
    w.scale_dtype = TE_F32;
    w.row_m = tm, w.row_n = up(tn, 4), w.col_m = tn, w.col_n = up(tm, 4);
    w.code = (uint8_t *)test_alloc((size_t)(m * n) + 1);
    w.row_scale = (uint8_t *)test_alloc((size_t)(w.row_m * w.row_n * 4) + 4);
    w.col_scale = (uint8_t *)test_alloc((size_t)(w.col_m * w.col_n * 4) + 4);
    w.multiplier = test_floats(w.row_m * w.row_n);
    for (int64_t i = 0; i < tm; i++)
        for (int64_t j = 0; j < tn; j++) {
            int64_t r1 = least(m, i * 128 + 128), c1 = least(n, j * 128 + 128);
            float a = largest(x, n, i * 128, r1, j * 128, c1), s = 1;
            if (a < q->epsilon) a = q->epsilon;
            if (a != 0 && !isinf(a)) {
                s = divide(q->dtype == TE_F8E4M3 ? 448.0f : 57344.0f, a);
                if (isinf(s)) s = limit;
                if (!q->fp32_scales) s = ldexpf(1, ilogbf(s));
            }
            w.multiplier[i * w.row_n + j] = s;
            ((float *)(void *)w.row_scale)[i * w.row_n + j] = ((float *)(void *)w.col_scale)[j * w.col_n + i] = divide(1, s);
            for (int64_t r = i * 128; r < r1; r++)
                for (int64_t c = j * 128; c < c1; c++) w.code[r * n + c] = code_of(q->dtype, mul(x[r * n + c], s));
        }
    return w;
}
static whole quantize_mxfp8(const recipe *q, const float *x, int64_t m, int64_t n) {
    whole w = {0};
    float inverse = divide(1, q->dtype == TE_F8E4M3 ? 448.0f : 57344.0f);
    w.scale_dtype = TE_F8E8M0;
    w.row_m = up(m, 128), w.row_n = up(up(n, 32) / 32, 4), w.col_m = up(up(m, 32) / 32, 4), w.col_n = up(n, 128);
    w.code = (uint8_t *)test_alloc((size_t)(m * n) + 1);
    w.row_scale = (uint8_t *)test_alloc((size_t)(w.row_m * w.row_n) + 1);
    w.col_scale = (uint8_t *)test_alloc((size_t)(w.col_m * w.col_n) + 1);
    for (int columnwise = 0; columnwise < 2; columnwise++) {
        int64_t tr = columnwise ? 32 : 1, tc = columnwise ? 1 : 32;
        for (int64_t i = 0; i * tr < m; i++)
            for (int64_t j = 0; j * tc < n; j++) {
                int64_t r1 = least(m, i * tr + tr), c1 = least(n, j * tc + tc);
                uint8_t e = e8m0_of(mul(largest(x, n, i * tr, r1, j * tc, c1), inverse));
                (columnwise ? w.col_scale : w.row_scale)[i * (columnwise ? w.col_n : w.row_n) + j] = e;
                if (columnwise != (int)q->columnwise) continue;
                for (int64_t r = i * tr; r < r1; r++)
                    for (int64_t c = j * tc; c < c1; c++) w.code[r * n + c] = code_of(q->dtype, mul(x[r * n + c], ldexpf(1, 127 - e)));
            }
    }
    return w;
}
static whole quantize_nvfp4(const recipe *q, const float *x, int64_t m, int64_t n) {
    whole w = {0};
    float f = q->max_256 ? 256 : 448, flt_max = 0x1.fffffep127f, s;
    w.amax = largest(x, n, 0, m, 0, n);
    s = divide(f * 6, w.amax);
    if (isinf(s) || isnan(s)) s = flt_max;
    if (w.amax == 0 || s == 0) s = 1;
    w.scale_dtype = TE_F8E4M3;
    w.row_m = up(m, 128), w.row_n = up(up(n, 16) / 16, 4), w.col_m = up(n, 128), w.col_n = up(up(m, 16) / 16, 4);
    w.code = (uint8_t *)test_alloc((size_t)(m * n) + 1);
    w.row_scale = (uint8_t *)test_alloc((size_t)(w.row_m * w.row_n) + 1);
    w.col_scale = (uint8_t *)test_alloc((size_t)(w.col_m * w.col_n) + 1);
    for (int64_t i = 0; i * 16 < m; i++)
        for (int64_t j = 0; j * 16 < n; j++) {
            int64_t r1 = least(m, i * 16 + 16), c1 = least(n, j * 16 + 16);
            uint8_t d = code_of(TE_F8E4M3, mul(largest(x, n, i * 16, r1, j * 16, c1), mul(s, divide(1, 6))));
            float multiplier = divide(1, mul((float)code_value(TE_F8E4M3, d), divide(1, s)));
            if (multiplier > flt_max) multiplier = flt_max;
            for (int64_t r = i * 16; r < r1; r++) w.row_scale[r * w.row_n + j] = d;
            for (int64_t c = j * 16; c < c1; c++) w.col_scale[c * w.col_n + i] = d;
            for (int64_t r = i * 16; r < r1; r++)
                for (int64_t c = j * 16; c < c1; c++) w.code[r * n + c] = code_of(TE_F4E2M1, mul(x[r * n + c], multiplier));
        }
    return w;
}
static whole quantize(const recipe *q, const float *x, int64_t m, int64_t n, float limit) {
    whole w = {0};
    if (q->scaling == TE_SCALING_BLOCK_2D) return quantize_block(q, x, m, n, limit);
    if (q->scaling == TE_SCALING_MXFP8) return quantize_mxfp8(q, x, m, n);
    if (q->scaling == TE_SCALING_NVFP4) return quantize_nvfp4(q, x, m, n);
    w.amax = largest(x, n, 0, m, 0, n);
    w.code = (uint8_t *)test_alloc((size_t)(m * n) + 1);
    for (int64_t i = 0; i < m * n; i++) w.code[i] = code_of(q->dtype, mul(x[i], tensor_scale));
    return w;
}

/* ---- the same by slices ---- */

typedef struct cuts {
    int count; /* of slices */
    int64_t at[12];
    bool views; /* slices are views of one tensor, at whatever address they begin; else tensors of their own */
} cuts;
static cuts cut(int way, int64_t total) {
    cuts c = {0};
    const int64_t ragged[] = {0, 1, 1, total / 3, total / 3 + 17, total / 2 + total / 4, total - 2, total}, even[] = {0, total / 3, total / 3, total * 3 / 4, total};
    c.count = way == 0 ? 1 : way == 1 ? 7 : 4;
    c.at[1] = total;
    for (int i = 0; way > 0 && i <= c.count; i++) {
        int64_t at = way == 1 ? ragged[i] : i == 4 ? total : even[i] / 16 * 16;
        c.at[i] = at < 0 ? 0 : at > total ? total : at;
        if (i > 0 && c.at[i] < c.at[i - 1]) c.at[i] = c.at[i - 1];
    }
    c.views = way == 1;
    return c;
}
static te_tensor *slice_of(te_ctx *te, te_tensor *all, const float *x, const cuts *c, int i) {
    int64_t n = c->at[i + 1] - c->at[i];
    if (c->views) return te_tensor_narrow(all, 0, c->at[i], n);
    return test_tensor(te, te_tensor_dtype(all), SHAPE(n), x + c->at[i]);
}

/* amaxes by tile of every slice, and the largest of them all, as an all-reduce would give it. */
static te_tensor *reduced_amax(te_ctx *te, te_tensor *all, const float *x, const cuts *c, int64_t m, int64_t n, int64_t tr, int64_t tc) {
    int64_t tm = (m + tr - 1) / tr, tn = (n + tc - 1) / tc;
    float *most = test_floats(tm * tn), *want = test_floats(tm * tn);
    for (int i = 0; i < c->count; i++) {
        te_op_shard_amax_args a = {0};
        a.x = slice_of(te, all, x, c, i);
        a.amax = test_guarded(te, TE_F32, SHAPE(tm, tn));
        a.rows = m, a.columns = n, a.start = c->at[i], a.tile_rows = tr, a.tile_columns = tc;
        CHECK_EQ_INT(te_op_shard_amax(te, &a), TE_OK);
        memset(want, 0, (size_t)(tm * tn) * 4);
        for (int64_t f = c->at[i]; f < c->at[i + 1]; f++) {
            float *w = want + f / n / tr * tn + f % n / tc;
            if (fabsf(x[f]) > *w) *w = fabsf(x[f]);
        }
        CHECK_BYTES("amax of a slice", test_read_bytes(a.amax), want, (size_t)(tm * tn) * 4);
        for (int64_t t = 0; t < tm * tn; t++) most[t] = fmaxf(most[t], want[t]);
    }
    return test_tensor(te, TE_F32, SHAPE(tm, tn), most);
}

static void check_shards(te_ctx *te, const recipe *q, te_dtype x_dtype, int64_t m, int64_t n, int64_t pad, const float *values, int way) {
    float limit = x_dtype == TE_BF16 ? 0x1.fep127f : x_dtype == TE_F16 ? 65504 : 0x1.fffffep127f;
    const float *x = test_rounded(x_dtype, values, m * n);
    whole w = quantize(q, x, m, n, limit);
    te_tensor *all = test_tensor(te, x_dtype, SHAPE(m * n), x);
    cuts c = cut(way, m * n);
    te_op_shard_cast_args a = {0};
    te_op_shard_scales_args s = {0};
    bool fp4 = q->dtype == TE_F4E2M1, tensor = q->scaling == TE_SCALING_TENSOR, transposed = tensor && q->columnwise;
    test_case("scaling %d%s %s -> %s [%d, %d] pad %d cut %d", (int)q->scaling, q->columnwise ? " columnwise" : "", te_dtype_name(x_dtype),
              te_dtype_name(q->dtype), (int)m, (int)n, (int)pad, way);
    if (tensor) {
        a.scale = test_tensor(te, TE_F32, SHAPE(1), &tensor_scale);
        a.amax = test_guarded_with(te, TE_F32, SHAPE(1), (const float[]){0});
    } else {
        int64_t size = w.scale_dtype == TE_F32 ? 4 : 1;
        bool mx = q->scaling == TE_SCALING_MXFP8;
        int64_t tile = q->scaling == TE_SCALING_BLOCK_2D ? 128 : 16;
        s.scaling = q->scaling, s.dtype = q->dtype, s.rows = m, s.columns = n;
        s.fp32_scales = q->fp32_scales, s.epsilon = q->epsilon, s.amax_limit = limit, s.e4m3_max_256 = q->max_256;
        s.amax = reduced_amax(te, all, x, &c, m, n, mx ? 1 : tile, mx ? 32 : tile);
        if (mx) s.amax_col = reduced_amax(te, all, x, &c, m, n, 32, 1);
        if (fp4) a.amax_tensor = s.amax_tensor = m * n > 0 ? reduced_amax(te, all, x, &c, m, n, m, n) : te_tensor_zeros(te, TE_F32, SHAPE(1));
        s.row_scale = test_guarded(te, w.scale_dtype, SHAPE(w.row_m, w.row_n));
        s.col_scale = test_guarded(te, w.scale_dtype, SHAPE(w.col_m, w.col_n));
        if (q->fp32_scales) a.multiplier = s.multiplier = test_guarded(te, TE_F32, SHAPE(w.row_m, w.row_n));
        CHECK_EQ_INT(te_op_shard_scales(te, &s), TE_OK);
        REQUIRE_OK(te);
        CHECK_BYTES("row_scale", test_read_bytes(s.row_scale), w.row_scale, (size_t)(w.row_m * w.row_n * size));
        CHECK_BYTES("col_scale", test_read_bytes(s.col_scale), w.col_scale, (size_t)(w.col_m * w.col_n * size));
        if (s.multiplier) CHECK_BYTES("multiplier", test_read_bytes(s.multiplier), w.multiplier, (size_t)(w.row_m * w.row_n) * 4);
        a.scale = mx && q->columnwise ? s.col_scale : s.row_scale;
    }
    /* Into the whole copy: all slices together write all codes, and nothing else. */
    int64_t height = transposed ? n : m, width = transposed ? m : n, ld = up(width, pad);
    int64_t pitch = fp4 ? (ld + 1) / 2 : ld;
    uint8_t *want = (uint8_t *)test_alloc((size_t)(height * pitch) + 1);
    memset(want, TEST_POISON, (size_t)(height * pitch));
    for (int64_t r = 0; r < m; r++)
        for (int64_t k = 0; k < n; k++) {
            uint8_t code = w.code[r * n + k], *to = fp4 ? want + r * pitch + k / 2 : transposed ? want + k * pitch + r : want + r * pitch + k;
            *to = !fp4 ? code : (uint8_t)(k % 2 ? (*to & 15) | code << 4 : (*to & 0xf0) | code);
        }
    te_tensor *copy = test_guarded(te, q->dtype, SHAPE(height, ld));
    a.scaling = q->scaling, a.rows = m, a.columns = n, a.columnwise = q->columnwise, a.e4m3_max_256 = q->max_256;
    a.dst = copy;
    for (int i = 0; i < c.count; i++) {
        a.x = slice_of(te, all, x, &c, i);
        a.start = c.at[i];
        CHECK_EQ_INT(te_op_shard_cast(te, &a), TE_OK);
    }
    REQUIRE_OK(te);
    CHECK_BYTES("copy", test_read_bytes(copy), want, (size_t)(height * pitch));
    if (tensor) CHECK(test_read(a.amax)[0] == w.amax);
    if (transposed) return;
    /* Each into a buffer of its own. */
    a.flat = true;
    for (int i = 0; i < c.count; i++) {
        int64_t count = c.at[i + 1] - c.at[i], first = fp4 ? c.at[i] % 2 : 0, bytes = fp4 ? (first + count + 1) / 2 : count;
        memset(want, TEST_POISON, (size_t)(height * pitch));
        uint8_t *flat = (uint8_t *)test_alloc((size_t)bytes + 1);
        memset(flat, TEST_POISON, (size_t)bytes);
        for (int64_t k = 0; k < count; k++) {
            uint8_t code = w.code[c.at[i] + k], *to = flat + (fp4 ? (first + k) / 2 : k);
            *to = !fp4 ? code : (uint8_t)((first + k) % 2 ? (*to & 15) | code << 4 : (*to & 0xf0) | code);
        }
        a.x = slice_of(te, all, x, &c, i);
        a.start = c.at[i];
        a.dst = test_guarded(te, q->dtype, SHAPE(first + count));
        CHECK_EQ_INT(te_op_shard_cast(te, &a), TE_OK);
        REQUIRE_OK(te);
        CHECK_BYTES("flat", test_read_bytes(a.dst), flat, (size_t)bytes);
    }
}

static const char *const kinds[] = {"normal", "tiny", "huge", "denormal", "zero blocks", "specials"};
static float *inputs(int kind, int64_t m, int64_t n) {
    float *x = kind == 5 ? test_specials(m * n, 11) : test_normal(m * n, 12 + (uint64_t)kind);
    for (int64_t i = 0; i < m * n; i++) {
        if (kind == 1) x[i] *= 1e-30f;
        if (kind == 2) x[i] *= 5e37f;
        if (kind == 3) x[i] *= 1e-40f;
        if (kind == 4 && (i / n / 16 + i % n / 32) % 2 == 0) x[i] = 0;
    }
    return x;
}

TE_TEST_DEVICES(shards_of_every_recipe) {
    static const int64_t shapes[][3] = {{1, 1, 1}, {3, 5, 16}, {33, 48, 1}, {127, 129, 1}, {128, 128, 32}, {50, 264, 32}, {5, 0, 16}, {0, 5, 1}};
    static const te_dtype dtypes[] = {TE_BF16, TE_F32, TE_F16};
    for (int r = 0; r < COUNT(recipes); r++)
        for (int s = 0; s < COUNT(shapes); s++)
            for (int way = 0; way < 3; way++)
                check_shards(te, &recipes[r], dtypes[(s + way + r) % 3], shapes[s][0], shapes[s][1], shapes[s][2],
                             inputs(r % 2 ? 0 : 5, shapes[s][0], shapes[s][1]), way);
}

TE_TEST_DEVICES(shards_of_every_input) {
    for (int r = 0; r < COUNT(recipes); r++)
        for (int kind = 0; kind < COUNT(kinds); kind++) {
            check_shards(te, &recipes[r], kind % 2 ? TE_BF16 : TE_F32, 70, 80, 32, inputs(kind, 70, 80), 1);
            check_shards(te, &recipes[r], TE_BF16, 35, 129, 1, inputs(kind, 35, 129), kind % 3);
        }
}

TE_TEST_DEVICES(shards_of_wide_rows) {
    for (int r = 0; r < COUNT(recipes); r++) check_shards(te, &recipes[r], TE_BF16, 16, 4096, 32, inputs(r % COUNT(kinds), 16, 4096), r % 3);
}

/* A slice that begins within a byte of 4-bit codes leaves its neighbour's half alone, in all four alignments. */
TE_TEST_DEVICES(shards_of_one_element) {
    const recipe *q = &recipes[8];
    for (int64_t n = 6; n < 8; n++) {
        const float *x = test_rounded(TE_F32, test_normal(5 * n, 21), 5 * n);
        whole w = quantize(q, x, 5, n, 0);
        te_tensor *row_scale = te_tensor_from_host(te, TE_F8E4M3, SHAPE(w.row_m, w.row_n), w.row_scale);
        for (int64_t start = 0; start < 5 * n; start++)
            for (int64_t count = 1; count <= 3 && start + count <= 5 * n; count++) {
                uint8_t want[2] = {TEST_POISON, TEST_POISON};
                te_op_shard_cast_args a = {0};
                test_case("n %d start %d count %d", (int)n, (int)start, (int)count);
                for (int64_t k = 0; k < count; k++) {
                    int64_t at = start % 2 + k;
                    want[at / 2] = (uint8_t)(at % 2 ? (want[at / 2] & 15) | w.code[start + k] << 4 : (want[at / 2] & 0xf0) | w.code[start + k]);
                }
                a.x = test_tensor(te, TE_F32, SHAPE(count), x + start);
                a.dst = test_guarded(te, TE_F4E2M1, SHAPE(4));
                a.scale = row_scale;
                a.amax_tensor = test_tensor(te, TE_F32, SHAPE(1), &w.amax);
                a.scaling = TE_SCALING_NVFP4;
                a.rows = 5, a.columns = n, a.start = start, a.flat = true;
                te_op_shard_cast(te, &a);
                REQUIRE_OK(te);
                CHECK_BYTES("dst", test_read_bytes(a.dst), want, 2);
            }
    }
}

TE_TEST_DEVICES(shard_amax_of_any_tile) {
    static const int64_t tiles[][2] = {{1, 1}, {7, 3}, {128, 128}, {16, 16}, {1, 32}, {32, 1}, {64, 300}, {1000, 1000}};
    const float *x = test_rounded(TE_BF16, inputs(5, 150, 270), 150 * 270);
    te_tensor *all = test_tensor(te, TE_BF16, SHAPE(150 * 270), x);
    for (int t = 0; t < COUNT(tiles); t++)
        for (int way = 0; way < 3; way++) {
            cuts c = cut(way, 150 * 270);
            test_case("tiles of %d x %d, cut %d", (int)tiles[t][0], (int)tiles[t][1], way);
            reduced_amax(te, all, x, &c, 150, 270, tiles[t][0], tiles[t][1]);
            REQUIRE_OK(te);
        }
}

/* ---- CUDA against the CPU ---- */

typedef struct outcome {
    te_tensor *amax, *amax_col, *amax_tensor, *row_scale, *col_scale, *copy, *flat;
} outcome;

static outcome run_slice(te_ctx *te, const recipe *q, te_dtype x_dtype, const float *values, int64_t m, int64_t n, int64_t start, int64_t count) {
    outcome o = {0};
    int64_t tile = q->scaling == TE_SCALING_BLOCK_2D ? 128 : 16;
    bool mx = q->scaling == TE_SCALING_MXFP8, block = q->scaling == TE_SCALING_BLOCK_2D, transposed = q->scaling == TE_SCALING_TENSOR && q->columnwise;
    te_op_shard_cast_args a = {0};
    a.x = test_tensor(te, x_dtype, SHAPE(count), values + start);
    if (q->scaling == TE_SCALING_TENSOR) {
        a.scale = test_tensor(te, TE_F32, SHAPE(1), &tensor_scale);
        a.amax = o.amax = te_tensor_zeros(te, TE_F32, SHAPE(1));
    } else {
        te_op_shard_amax_args t = {0};
        te_op_shard_scales_args s = {0};
        t.x = a.x, t.rows = m, t.columns = n, t.start = start, t.tile_rows = mx ? 1 : tile, t.tile_columns = mx ? 32 : tile;
        t.amax = o.amax = te_tensor_empty(te, TE_F32, SHAPE((m + t.tile_rows - 1) / t.tile_rows, (n + t.tile_columns - 1) / t.tile_columns));
        te_op_shard_amax(te, &t);
        if (mx) {
            t.tile_rows = 32, t.tile_columns = 1;
            t.amax = o.amax_col = te_tensor_empty(te, TE_F32, SHAPE((m + 31) / 32, n));
            te_op_shard_amax(te, &t);
        }
        t.tile_rows = m, t.tile_columns = n;
        t.amax = o.amax_tensor = te_tensor_empty(te, TE_F32, SHAPE(1, 1));
        te_op_shard_amax(te, &t);
        s.scaling = q->scaling, s.dtype = q->dtype, s.rows = m, s.columns = n, s.fp32_scales = q->fp32_scales, s.epsilon = q->epsilon;
        s.e4m3_max_256 = q->max_256;
        s.amax = o.amax, s.amax_col = o.amax_col, s.amax_tensor = o.amax_tensor;
        te_dtype dtype = block ? TE_F32 : mx ? TE_F8E8M0 : TE_F8E4M3;
        int64_t along = block ? 128 : mx ? 32 : 16;
        s.row_scale = o.row_scale = te_tensor_empty(te, dtype, SHAPE(block ? (m + 127) / 128 : up(m, 128), up((n + along - 1) / along, 4)));
        s.col_scale = o.col_scale = mx ? te_tensor_empty(te, dtype, SHAPE(up((m + 31) / 32, 4), up(n, 128)))
                                       : te_tensor_empty(te, dtype, SHAPE(block ? (n + 127) / 128 : up(n, 128), up((m + along - 1) / along, 4)));
        if (q->fp32_scales) a.multiplier = s.multiplier = te_tensor_empty(te, TE_F32, SHAPE((m + 127) / 128, up((n + 127) / 128, 4)));
        te_op_shard_scales(te, &s);
        a.scale = mx && q->columnwise ? s.col_scale : s.row_scale;
        a.amax_tensor = q->scaling == TE_SCALING_NVFP4 ? o.amax_tensor : NULL;
    }
    a.scaling = q->scaling, a.rows = m, a.columns = n, a.start = start, a.columnwise = q->columnwise, a.e4m3_max_256 = q->max_256;
    a.dst = o.copy = te_tensor_zeros(te, q->dtype, SHAPE(transposed ? n : m, up(transposed ? m : n, 32)));
    te_op_shard_cast(te, &a);
    if (transposed) return o;
    a.flat = true;
    a.dst = o.flat = te_tensor_zeros(te, q->dtype, SHAPE(count + start % 2));
    te_op_shard_cast(te, &a);
    return o;
}
static void compare(const char *name, te_tensor *got, te_tensor *want) {
    if (want) CHECK_BYTES(name, test_read_bytes(got), test_read_bytes(want), te_tensor_bytes(want));
}
TE_TEST(shards_cuda_against_cpu) {
    static const int64_t shapes[][2] = {{1, 1}, {3, 5}, {127, 129}, {128, 128}, {16, 4096}, {1000, 1536}};
    static const te_dtype dtypes[] = {TE_BF16, TE_F32, TE_F16};
    if (test_no_gpu()) SKIP(test_no_gpu());
    for (int s = 0; s < COUNT(shapes); s++)
        for (int kind = 0; kind < COUNT(kinds); kind++) {
            te_ctx *cpu = test_context("cpu"), *cuda = test_context("cuda:0");
            int64_t m = shapes[s][0], n = shapes[s][1], total = m * n;
            const float *x = inputs(kind, m, n);
            for (int r = 0; r < COUNT(recipes); r++)
                for (int part = 0; part < 2; part++) {
                    int64_t start = part ? (total / 3) / 16 * 16 : total / 5, count = total - start - total / 7;
                    te_dtype dtype = dtypes[s == 5 ? 0 : (r + part) % 3];
                    if (s == 5 && (r + kind + part) % 4) continue; /* 1.5 million elements: not all of them */
                    test_case("%s [%d, %d] %s, recipe %d from %d on", te_dtype_name(dtype), (int)m, (int)n, kinds[kind], r, (int)start);
                    te_scope_begin(cpu);
                    te_scope_begin(cuda);
                    outcome want = run_slice(cpu, &recipes[r], dtype, x, m, n, start, count);
                    outcome got = run_slice(cuda, &recipes[r], dtype, x, m, n, start, count);
                    REQUIRE_OK(cpu);
                    REQUIRE_OK(cuda);
                    compare("amax", got.amax, want.amax);
                    compare("amax_col", got.amax_col, want.amax_col);
                    compare("amax_tensor", got.amax_tensor, want.amax_tensor);
                    compare("row_scale", got.row_scale, want.row_scale);
                    compare("col_scale", got.col_scale, want.col_scale);
                    compare("copy", got.copy, want.copy);
                    compare("flat", got.flat, want.flat);
                    te_scope_end(cpu);
                    te_scope_end(cuda);
                }
        }
}

/* ---- misuse ---- */

TE_TEST(shard_errors) {
    te_ctx *te = test_context("cpu");
    te_tensor *x = te_tensor_zeros(te, TE_F32, SHAPE(10)), *one = te_tensor_zeros(te, TE_F32, SHAPE(1));
    te_op_shard_amax_args m = {0};
    m.x = x, m.rows = 4, m.columns = 6, m.tile_rows = m.tile_columns = 16;
    m.amax = one;
    m.start = 15;
    te_op_shard_amax(te, &m);
    CHECK_ERROR(te, TE_ERR_SHAPE, "10 elements from 15 on do not lie in [4, 6]");
    m.start = -1;
    te_op_shard_amax(te, &m);
    CHECK_ERROR(te, TE_ERR_SHAPE, "10 elements from -1 on");
    m.start = 0, m.rows = INT64_MAX / 2;
    te_op_shard_amax(te, &m);
    CHECK_ERROR(te, TE_ERR_SHAPE, "the matrix is");
    m.rows = 4, m.tile_rows = 0;
    te_op_shard_amax(te, &m);
    CHECK_ERROR(te, TE_ERR_INVALID, "tiles of 0 x 16");
    m.tile_rows = 2;
    te_op_shard_amax(te, &m);
    CHECK_ERROR(te, TE_ERR_SHAPE, "amax is [1]; [2, 1] is needed");
    m.x = te_tensor_zeros(te, TE_I32, SHAPE(10));
    te_op_shard_amax(te, &m);
    CHECK_ERROR(te, TE_ERR_DTYPE, "x is i32");

    te_op_shard_scales_args s = {0};
    s.rows = 4, s.columns = 6, s.amax = te_tensor_zeros(te, TE_F32, SHAPE(1, 1));
    te_op_shard_scales(te, &s);
    CHECK_ERROR(te, TE_ERR_INVALID, "te_op_scale_from_amax");
    s.scaling = TE_SCALING_BLOCK_1D;
    te_op_shard_scales(te, &s);
    CHECK_ERROR(te, TE_ERR_INVALID, "BLOCK_2D, MXFP8 and NVFP4");
    s.scaling = TE_SCALING_BLOCK_2D;
    te_op_shard_scales(te, &s);
    CHECK_ERROR(te, TE_ERR_INVALID, "neither row_scale nor col_scale");
    s.row_scale = te_tensor_zeros(te, TE_F32, SHAPE(1, 1));
    te_op_shard_scales(te, &s);
    CHECK_ERROR(te, TE_ERR_SHAPE, "row_scale is [1, 1]; [1, 4] is needed");
    s.row_scale = te_tensor_zeros(te, TE_F32, SHAPE(1, 4)), s.amax = NULL;
    te_op_shard_scales(te, &s);
    CHECK_ERROR(te, TE_ERR_STATE, "amax is NULL");
    s.amax = s.amax_tensor = te_tensor_zeros(te, TE_F32, SHAPE(1, 1));
    s.dtype = TE_F4E2M1;
    te_op_shard_scales(te, &s);
    CHECK_ERROR(te, TE_ERR_DTYPE, "codes in e2m1");
    s.dtype = TE_F8E4M3, s.scaling = TE_SCALING_NVFP4;
    te_op_shard_scales(te, &s);
    CHECK_ERROR(te, TE_ERR_DTYPE, "NVFP4 with e2m1");
    s.dtype = TE_DTYPE_NONE, s.multiplier = s.row_scale;
    te_op_shard_scales(te, &s);
    CHECK_ERROR(te, TE_ERR_INVALID, "multiplier belongs to BLOCK_2D");
    s.multiplier = NULL, s.row_scale = te_tensor_zeros(te, TE_F8E4M3, SHAPE(128, 4)), s.amax_tensor = NULL;
    te_op_shard_scales(te, &s);
    CHECK_ERROR(te, TE_ERR_STATE, "amax_tensor is NULL");
    s.amax_limit = -1, s.amax_tensor = s.amax;
    te_op_shard_scales(te, &s);
    CHECK_ERROR(te, TE_ERR_INVALID, "amax_limit is -1");

    te_op_shard_cast_args a = {0};
    a.x = x, a.rows = 4, a.columns = 6, a.scale = one;
    a.dst = te_tensor_zeros(te, TE_F8E4M3, SHAPE(4, 5));
    te_op_shard_cast(te, &a);
    CHECK_ERROR(te, TE_ERR_SHAPE, "dst is [4, 5]; 4 rows of at least 6 columns");
    a.columnwise = true;
    te_op_shard_cast(te, &a);
    CHECK_ERROR(te, TE_ERR_SHAPE, "6 rows of at least 4 columns");
    a.flat = true;
    te_op_shard_cast(te, &a);
    CHECK_ERROR(te, TE_ERR_UNSUPPORTED, "transposed copy is in no order");
    a.columnwise = false, a.dst = te_tensor_zeros(te, TE_F8E4M3, SHAPE(9));
    te_op_shard_cast(te, &a);
    CHECK_ERROR(te, TE_ERR_SHAPE, "flat dst is [9]; [10] or more");
    a.dst = te_tensor_zeros(te, TE_U8, SHAPE(10));
    te_op_shard_cast(te, &a);
    CHECK_ERROR(te, TE_ERR_DTYPE, "dst is u8");
    a.dst = te_tensor_zeros(te, TE_F8E4M3, SHAPE(10)), a.scaling = TE_SCALING_BLOCK_1D;
    te_op_shard_cast(te, &a);
    CHECK_ERROR(te, TE_ERR_INVALID, "no format of weights");
    a.scaling = TE_SCALING_BLOCK_2D, a.columnwise = true;
    te_op_shard_cast(te, &a);
    CHECK_ERROR(te, TE_ERR_INVALID, "columnwise goes with TENSOR and MXFP8");
    a.columnwise = false;
    te_op_shard_cast(te, &a);
    CHECK_ERROR(te, TE_ERR_SHAPE, "scale is [1]; [1, 4] is needed");
    a.amax = one;
    te_op_shard_cast(te, &a);
    CHECK_ERROR(te, TE_ERR_INVALID, "amax goes with TENSOR");
    a.amax = NULL, a.scaling = TE_SCALING_NVFP4, a.amax_tensor = one;
    te_op_shard_cast(te, &a);
    CHECK_ERROR(te, TE_ERR_DTYPE, "NVFP4 goes with e2m1");
    a.start = 1, a.dst = te_tensor_zeros(te, TE_F4E2M1, SHAPE(10));
    te_op_shard_cast(te, &a);
    CHECK_ERROR(te, TE_ERR_SHAPE, "[11] or more");
    a.dst = te_tensor_zeros(te, TE_F4E2M1, SHAPE(11)), a.scale = te_tensor_zeros(te, TE_F8E4M3, SHAPE(128, 4)), a.amax_tensor = NULL;
    te_op_shard_cast(te, &a);
    CHECK_ERROR(te, TE_ERR_STATE, "amax_tensor is NULL");
    a.amax_tensor = one;
    CHECK_EQ_INT(te_op_shard_cast(te, &a), TE_OK);
    a.start = 20;
    te_op_shard_cast(te, &a);
    CHECK_ERROR(te, TE_ERR_SHAPE, "10 elements from 20 on");
}
