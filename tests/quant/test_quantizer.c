/* tests/quant/test_quantizer.c: every kind of quantizer through the public interface: copies, views, quantizing in place, one copy from the
 * other, custom and hybrid ones. The bytes themselves are the matter of tests/ops and tests/golden. */
#include "../te_test.h"

/* Each kind, with the options that change its layout. */
enum { KINDS = 16 };
static const char *const kind_name[KINDS] = {"delayed", "current", "current e5m2, powers of two", "block 1-D", "block 2-D", "block 2-D, any scale", "mxfp8", "mxfp8 2-D",
                                             "mxfp8 swizzled", "nvfp4", "nvfp4 2-D", "nvfp4 rht", "nvfp4 swizzled, row-scaled", "nvfp4 4-over-6", "identity", "hybrid"};
static te_quantizer_desc hybrid_row, hybrid_col;
static te_quantizer_desc desc_of(int i) {
    static const te_quant_kind kind[KINDS] = {TE_QUANT_DELAYED, TE_QUANT_CURRENT, TE_QUANT_CURRENT, TE_QUANT_BLOCK, TE_QUANT_BLOCK, TE_QUANT_BLOCK, TE_QUANT_MXFP8, TE_QUANT_MXFP8,
                                              TE_QUANT_MXFP8, TE_QUANT_NVFP4, TE_QUANT_NVFP4, TE_QUANT_NVFP4, TE_QUANT_NVFP4, TE_QUANT_NVFP4, TE_QUANT_IDENTITY, TE_QUANT_HYBRID};
    te_quantizer_desc d = {0};
    d.kind = kind[i];
    if (i == 2) d.dtype = TE_F8E5M2, d.current.power_of_two_scales = true;
    if (i == 3) d.block.block_scaling_dim = 1;
    if (i == 5) d.block.fp32_scales = true;
    d.quantization_2d = i == 7 || i == 10 ? TE_ON : TE_DEFAULT;
    d.optimize_for_gemm = i == 8 || i == 12;
    d.nvfp4.rht = i == 11 ? TE_ON : TE_DEFAULT;
    d.nvfp4.row_scaled = i == 12;
    if (i == 13) d.nvfp4.four_over_six = TE_4OVER6_MSE, d.nvfp4.e4m3_max_256 = true;
    if (i == 15) {
        memset(&hybrid_row, 0, sizeof hybrid_row);
        hybrid_col = hybrid_row;
        hybrid_row.kind = TE_QUANT_MXFP8;
        hybrid_col.kind = TE_QUANT_CURRENT;
        d.hybrid.rowwise_quantizer = &hybrid_row;
        d.hybrid.columnwise_quantizer = &hybrid_col;
    }
    return d;
}
/* Of normal numbers: half a step of a 3-bit (E4M3), 2-bit (E5M2) or 1-bit (E2M1) mantissa is at most 1/16, 1/8, 1/4 of a number; the mean
 * square over a binade is below half of that. FP4 has two binades only: what is small in its block is lost. */
static double limit_of(int i) { return i == 14 ? 0 : i >= 9 && i <= 13 ? 0.15 : i == 2 ? 0.06 : 0.03; }

static bool same_view(te_tensor *x, te_tensor *y, int which) {
    te_tensor *a, *b, *s, *t, *u = te_quantized_amax(x, which), *v = te_quantized_amax(y, which);
    if (te_quantized_view(x, which, &a, &s) != TE_OK || te_quantized_view(y, which, &b, &t) != TE_OK || !s != !t || !u != !v) return false;
    return CHECK_BYTES("data", test_read_bytes(a), test_read_bytes(b), te_tensor_bytes(b)) &&
           (!s || CHECK_BYTES("scale", test_read_bytes(s), test_read_bytes(t), te_tensor_bytes(t))) &&
           (!u || CHECK_BYTES("amax", test_read_bytes(u), test_read_bytes(v), te_tensor_bytes(v)));
}

TE_TEST_DEVICES(quantizers_round_trip) {
    static const int64_t shapes[][3] = {{1, 1, 1}, {1, 3, 5}, {2, 3, 40}, {1, 127, 129}, {1, 128, 128}};
    for (int i = 0; i < KINDS; i++)
        for (int k = 0; k < COUNT(shapes); k++) {
            test_case("%s %dx%dx%d", kind_name[i], (int)shapes[k][0], (int)shapes[k][1], (int)shapes[k][2]);
            int64_t n = shapes[k][0] * shapes[k][1] * shapes[k][2];
            te_scope_begin(te);
            te_quantizer_desc d = desc_of(i);
            te_quantizer *q = te_quantizer_create(te, &d);
            float *v = test_normal(n, 7 + (uint64_t)k);
            te_tensor *x = te_tensor_set_requires_grad(test_tensor(te, TE_F32, 3, shapes[k], v), true), *y = te_quantize(q, x);
            REQUIRE_OK(te);
            CHECK(te_tensor_is_quantized(y) && te_tensor_dtype(y) == TE_F32 && te_quantized_kind(y) == d.kind && !te_is_custom(y));
            CHECK_EQ_INT(te_quantized_usage(y), TE_ROWWISE | TE_COLUMNWISE);
            CHECK_ERROR_BELOW("row", test_read(te_dequantize(y, TE_F32)), v, n, limit_of(i));
            te_tensor *turned = te_tensor_detach(y);
            CHECK_EQ_INT(te_tensor_update_usage(turned, TE_COLUMNWISE), TE_OK);
            CHECK_EQ_INT(te_quantized_usage(turned), TE_COLUMNWISE);
            CHECK_ERROR_BELOW("column", test_read(te_dequantize(turned, TE_F32)), v, n, limit_of(i));
            /* in place, into memory made beforehand */
            te_tensor *into = te_quantizer_make_empty(q, TE_F32, 3, shapes[k]);
            CHECK_EQ_INT(te_quantize_into(q, x, into, NULL), TE_OK);
            CHECK(same_view(into, y, TE_ROWWISE) && same_view(into, y, TE_COLUMNWISE));
            if (d.kind < TE_QUANT_IDENTITY) { /* a raised flag: nothing is written */
                CHECK_EQ_INT(te_quantize_into(q, te_scale(x, 3), into, te_tensor_full(te, TE_F32, SHAPE(1), 1)), TE_OK);
                CHECK(same_view(into, y, TE_ROWWISE) && same_view(into, y, TE_COLUMNWISE));
                CHECK_EQ_INT(te_quantize_into(q, x, into, te_tensor_full(te, TE_F32, SHAPE(1), 0)), TE_OK);
            }
            /* gradients pass unchanged */
            CHECK_EQ_INT(te_backward(te_sum_all(te_dequantize(y, TE_F32))), TE_OK);
            const float *g = test_read(te_tensor_grad(x));
            for (int64_t j = 0; j < n; j++) CHECK(g[j] == 1);
            CHECK_OK(te);
            te_quantizer_destroy(q);
            te_scope_end(te);
        }
}

/* Where both copies hold the same numbers one gives the other, with the bytes that quantizing gives; elsewhere it is refused. */
TE_TEST_DEVICES(quantizers_column_from_row) {
    static const int64_t shapes[][2] = {{1, 1}, {3, 5}, {40, 72}, {127, 129}, {128, 256}, {260, 17}};
    for (int i = 0; i < KINDS; i++)
        for (int k = 0; k < COUNT(shapes); k++) {
            bool agrees = i <= 2 || i == 4 || i == 5 || i == 10 || i == 14;
            test_case("%s %dx%d", kind_name[i], (int)shapes[k][0], (int)shapes[k][1]);
            te_scope_begin(te);
            te_quantizer_desc d = desc_of(i);
            te_quantizer *q = te_quantizer_create(te, &d);
            te_tensor *x = test_tensor(te, TE_BF16, 2, shapes[k], test_normal(shapes[k][0] * shapes[k][1], 3));
            te_tensor *both = te_quantize(q, x), *y = te_tensor_detach(both);
            CHECK_EQ_INT(te_tensor_update_usage(y, TE_ROWWISE), TE_OK);
            te_result result = te_tensor_update_usage(y, TE_ROWWISE | TE_COLUMNWISE);
            if (agrees) {
                CHECK_EQ_INT(result, TE_OK);
                CHECK(same_view(y, both, TE_COLUMNWISE));
            } else {
                CHECK_EQ_INT(result, TE_ERR_STATE);
                CHECK_ERROR(te, TE_ERR_STATE, "quantize with TE_ROWWISE | TE_COLUMNWISE");
                CHECK_EQ_INT(te_quantized_usage(y), TE_ROWWISE);
            }
            CHECK(same_view(y, both, TE_ROWWISE));
            CHECK_EQ_INT(te_tensor_update_usage(te_tensor_detach(y), 0), TE_ERR_INVALID);
            te_clear_error(te);
            CHECK_OK(te);
            te_quantizer_destroy(q);
            te_scope_end(te);
        }
}

TE_TEST(quantizers_layouts) {
    te_ctx *te = test_context("cpu");
    /* 70 x 150: data, then scales, row-wise and column-wise, as api/quant.h and api/ops_quant.h give them */
    static const struct {
        int kind;
        int64_t data[2][2], scale[2][2];
    } row[] = {
        {1, {{70, 160}, {150, 80}}, {{1, 1}, {1, 1}}},      {3, {{70, 160}, {150, 80}}, {{2, 72}, {1, 152}}},  {4, {{70, 160}, {150, 80}}, {{1, 4}, {2, 4}}},
        {6, {{70, 160}, {70, 160}}, {{128, 8}, {4, 256}}},  {9, {{70, 160}, {150, 96}}, {{128, 12}, {256, 8}}}, {14, {{70, 150}, {70, 150}}, {{0, 0}, {0, 0}}},
    };
    for (int i = 0; i < COUNT(row); i++)
        for (int w = 0; w < 2; w++) {
            test_case("%s %d", kind_name[row[i].kind], w);
            te_quantizer_desc d = desc_of(row[i].kind);
            te_quantizer *q = te_quantizer_create(te, &d);
            te_tensor *y = te_quantizer_make_empty(q, TE_BF16, SHAPE(70, 150)), *data, *scale;
            CHECK_EQ_INT(te_quantized_view(y, w ? TE_COLUMNWISE : TE_ROWWISE, &data, &scale), TE_OK);
            REQUIRE(data != NULL);
            CHECK(te_tensor_shape(data)[0] == row[i].data[w][0] && te_tensor_shape(data)[1] == row[i].data[w][1]);
            if (row[i].scale[w][0] == 0)
                CHECK(scale == NULL);
            else if (te_tensor_ndim(scale) == 1)
                CHECK(te_tensor_shape(scale)[0] == 1);
            else
                CHECK(te_tensor_shape(scale)[0] == row[i].scale[w][0] && te_tensor_shape(scale)[1] == row[i].scale[w][1]);
            te_quantizer_destroy(q);
        }
    CHECK_OK(te);
}

TE_TEST(quantizers_that_are_safe_to_repeat) {
    te_ctx *te = test_context("cpu");
    for (int i = 0; i < KINDS; i++) {
        te_quantizer_desc d = desc_of(i);
        te_quantizer *q = te_quantizer_create(te, &d);
        CHECK(te_quantizer_is_requantization_safe(q) == (i != 0));
        te_quantizer_destroy(q);
    }
    te_quantizer_desc d = {0};
    d.kind = TE_QUANT_NVFP4;
    d.nvfp4.stochastic_rounding = TE_ON;
    te_quantizer *q = te_quantizer_create(te, &d);
    CHECK(!te_quantizer_is_requantization_safe(q));
    /* it draws from the context's random state: again from the same state, the same bytes; from the next one, others */
    te_tensor *x = te_tensor_normal(te, TE_BF16, SHAPE(64, 64), 0, 1), *a, *b, *c, *va, *vb, *vc;
    te_rng_set(te, 5, 100);
    a = te_quantize(q, x);
    c = te_quantize(q, x);
    te_rng_set(te, 5, 100);
    b = te_quantize(q, x);
    te_quantized_view(a, TE_ROWWISE, &va, NULL);
    te_quantized_view(b, TE_ROWWISE, &vb, NULL);
    te_quantized_view(c, TE_ROWWISE, &vc, NULL);
    CHECK(same_view(a, b, TE_ROWWISE) && same_view(a, b, TE_COLUMNWISE));
    CHECK(memcmp(test_read_bytes(va), test_read_bytes(vc), te_tensor_bytes(va)) != 0);
    CHECK_OK(te);
    te_quantizer_destroy(q);
}

/* The amax of a delayed quantizer gathers; its scale is whatever it holds when a tensor is quantized. */
TE_TEST_DEVICES(quantizers_delayed_scale_and_calibration) {
    te_quantizer_desc d = {0};
    d.kind = TE_QUANT_DELAYED;
    d.delayed.scale = te_tensor_full(te, TE_F32, SHAPE(1), 2);
    d.delayed.amax = te_tensor_zeros(te, TE_F32, SHAPE(1));
    te_quantizer *q = te_quantizer_create(te, &d);
    CHECK_EQ_INT(te_quantizer_calibrate(q, te_tensor_full(te, TE_F32, SHAPE(3, 3), -5)), TE_OK);
    CHECK(test_read(d.delayed.amax)[0] == 5);
    te_tensor *y = te_quantize(q, te_tensor_full(te, TE_F32, SHAPE(3, 3), 3)), *scale;
    CHECK(test_read(d.delayed.amax)[0] == 5);
    te_quantized_view(y, TE_ROWWISE, NULL, &scale);
    CHECK(test_read(scale)[0] == 0.5f && test_read(te_dequantize(y, TE_F32))[0] == 3);
    CHECK_OK(te);
    te_quantizer_destroy(q);
}

/* ---- one's own --------------------------------------------------------------------------------------------------- */

/* x as f16, with a scale of 1/4. */
typedef struct halves {
    te_ctx *te;
    int calls, fail_at; /* the call that fails, from 1; 0: none */
} halves;
static te_result halves_quantize(void *user, te_tensor *x, int which, te_tensor **data, te_tensor **scale) {
    halves *h = (halves *)user;
    (void)which;
    if (++h->calls == h->fail_at) return TE_ERR_UNSUPPORTED;
    *data = te_tensor_cast(te_scale(te_tensor_detach(x), 4), TE_F16);
    *scale = te_tensor_full(h->te, TE_F32, SHAPE(1), 0.25);
    return *data && *scale ? TE_OK : TE_ERR_OUT_OF_MEMORY;
}
static te_tensor *halves_dequantize(void *user, te_tensor *data, te_tensor *scale, int which, int ndim, const int64_t *shape, te_dtype dtype) {
    (void)user, (void)which, (void)ndim, (void)shape, (void)scale;
    return te_tensor_cast(te_scale(te_tensor_cast(data, TE_F32), 0.25f), dtype);
}
static bool halves_takes(void *user, const te_tensor *x) {
    (void)user;
    return te_tensor_shape(x)[0] != 13;
}

TE_TEST_DEVICES(quantizers_of_ones_own) {
    halves h = {te, 0, 0};
    te_custom_quantizer custom = {"halves", &h, halves_quantize, halves_dequantize, halves_takes};
    te_quantizer_desc d = {0}, hybrid = {0}, row = {0};
    d.kind = TE_QUANT_CUSTOM;
    d.custom = &custom;
    row.kind = TE_QUANT_CURRENT;
    hybrid.kind = TE_QUANT_HYBRID;
    hybrid.hybrid.rowwise_quantizer = &row;
    hybrid.hybrid.columnwise_quantizer = &d;
    const float v[6] = {1, -2, 3.5f, 0, 5, 6}, w[6] = {9, 9, 9, 9, 9, 9};
    for (int i = 0; i < 2; i++) {
        test_case(i ? "as the column-wise half of a hybrid" : "alone");
        te_quantizer *q = te_quantizer_create(te, i ? &hybrid : &d);
        te_tensor *x = test_tensor(te, TE_F32, SHAPE(2, 3), v), *other = test_tensor(te, TE_F32, SHAPE(2, 3), w), *y = te_quantize(q, x);
        REQUIRE_OK(te);
        CHECK(te_is_custom(y) && !te_quantizer_is_requantization_safe(q));
        CHECK_TENSOR(te_dequantize(y, TE_F32), v, i ? 0.07 : 0, 0); /* E4M3 in the hybrid: half a step of 3 bits */
        /* halfway, a failure: no tensor, and none that existed changes */
        h.calls = 0;
        h.fail_at = i ? 1 : 2;
        CHECK(!te_quantize(q, other));
        CHECK_ERROR(te, TE_ERR_UNSUPPORTED, "custom quantizer \"halves\": its quantize function returned TE_ERR_UNSUPPORTED for the column-wise copy");
        h.calls = 0;
        CHECK_EQ_INT(te_quantize_into(q, other, y, NULL), TE_ERR_UNSUPPORTED);
        CHECK_ERROR(te, TE_ERR_UNSUPPORTED, "nothing was changed");
        CHECK_TENSOR(te_dequantize(y, TE_F32), v, i ? 0.07 : 0, 0);
        h.fail_at = 0;
        CHECK_EQ_INT(te_quantize_into(q, other, y, NULL), TE_OK);
        CHECK_TENSOR(te_dequantize(y, TE_F32), w, i ? 0.07 : 0, 0);
        CHECK(te_quantizer_is_quantizable(q, x));
        te_tensor *bad = te_tensor_zeros(te, TE_F32, SHAPE(13, 2));
        CHECK(!te_quantizer_is_quantizable(q, bad) && !te_quantize(q, bad));
        CHECK_ERROR(te, TE_ERR_SHAPE, "\"halves\" does not take f32 [13, 2]");
        CHECK(!te_quantizer_make_empty(q, TE_F32, SHAPE(2, 2)));
        CHECK_ERROR(te, TE_ERR_UNSUPPORTED, "only its own function knows the layout");
        te_quantizer_destroy(q);
        CHECK_TENSOR(te_dequantize(y, TE_F32), w, i ? 0.07 : 0, 0); /* a tensor outlives its quantizer */
    }
    CHECK_OK(te);
}

/* ---- refusals ---------------------------------------------------------------------------------------------------- */

TE_TEST(quantizers_refuse) {
    te_ctx *te = test_context("cpu");
    static const struct {
        te_quantizer_desc d;
        te_result code;
        const char *text;
    } row[] = {
        {{.kind = (te_quant_kind)9}, TE_ERR_INVALID, "kind 9"},
        {{.kind = TE_QUANT_NVFP4, .dtype = TE_F8E4M3}, TE_ERR_DTYPE, "the codes of NVFP4 are e2m1"},
        {{.kind = TE_QUANT_MXFP8, .dtype = TE_F4E2M1}, TE_ERR_DTYPE, "e4m3 and e5m2 are possible"},
        {{.kind = TE_QUANT_BLOCK, .block.block_scaling_dim = 3}, TE_ERR_INVALID, "block_scaling_dim 3"},
        {{.kind = TE_QUANT_CURRENT, .amax_epsilon = -1}, TE_ERR_INVALID, "amax_epsilon -1"},
        {{.kind = TE_QUANT_NVFP4, .nvfp4.rht = TE_ON, .quantization_2d = TE_ON}, TE_ERR_INVALID, "choose one"},
        {{.kind = TE_QUANT_NVFP4, .nvfp4.four_over_six = (te_4over6_error)7}, TE_ERR_INVALID, "four_over_six 7"},
        {{.kind = TE_QUANT_HYBRID}, TE_ERR_INVALID, "needs a row-wise quantizer"},
        {{.kind = TE_QUANT_CUSTOM}, TE_ERR_INVALID, "needs a name and the functions"},
        {{.kind = TE_QUANT_BLOCK, .usage = 4}, TE_ERR_INVALID, "usage 4"},
    };
    for (int i = 0; i < COUNT(row); i++) {
        CHECK(!te_quantizer_create(te, &row[i].d));
        CHECK_ERROR(te, row[i].code, row[i].text);
    }
    te_quantizer_desc a = desc_of(6), b = desc_of(4);
    te_quantizer *mx = te_quantizer_create(te, &a), *block = te_quantizer_create(te, &b);
    te_tensor *x = te_tensor_full(te, TE_BF16, SHAPE(4, 8), 2), *y = te_quantize(mx, x), *data;
    CHECK_EQ_INT(te_quantize_into(block, x, y, NULL), TE_ERR_INVALID);
    CHECK_ERROR(te, TE_ERR_INVALID, "(MXFP8) was made by a quantizer that differs from this one (block)");
    CHECK_EQ_INT(te_quantize_into(mx, te_tensor_zeros(te, TE_BF16, SHAPE(8, 4)), y, NULL), TE_ERR_SHAPE);
    CHECK_ERROR(te, TE_ERR_SHAPE, "[8, 4] and the destination [4, 8]");
    CHECK_EQ_INT(te_quantize_into(mx, x, x, NULL), TE_ERR_INVALID);
    CHECK_ERROR(te, TE_ERR_INVALID, "te_quantizer_make_empty makes one");
    CHECK_EQ_INT(te_quantize_into(mx, x, y, te_tensor_zeros(te, TE_F32, SHAPE(2))), TE_ERR_INVALID);
    CHECK_ERROR(te, TE_ERR_INVALID, "noop_flag is an f32 [1]");
    CHECK(!te_dequantize(y, TE_I32));
    CHECK_ERROR(te, TE_ERR_DTYPE, "f32, f16 and bf16");
    CHECK_EQ_INT(te_quantized_view(y, 3, &data, NULL), TE_ERR_INVALID);
    CHECK_ERROR(te, TE_ERR_INVALID, "TE_ROWWISE (1) or TE_COLUMNWISE (2)");
    CHECK(!te_quantize(mx, y));
    CHECK_ERROR(te, TE_ERR_DTYPE, "quantized, nominally bf16");
    CHECK(test_read(te_dequantize(y, TE_F32))[31] == 2);
    CHECK(te_quantized_kind(x) == TE_QUANT_NONE && te_quantized_usage(x) == 0 && !te_is_custom(x) && !te_is_custom(NULL));
    te_quantizer_destroy(mx);
    te_quantizer_destroy(block);
    CHECK_OK(te);
}
