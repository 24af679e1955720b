/* tests/ops/test_nvfp4_rounding.c: NVFP4's transform and its roundings, 4-over-6. Expected numbers are worked out by hand; the formulas, in plain loops, are test_nvfp4.c's. */
#include "../te_test.h"

static int64_t round_up(int64_t a, int64_t b) { return (a + b - 1) / b * b; }
static int64_t groups_of(int64_t n) { return round_up((n + 15) / 16, 4); }

/* Everything that a measuring cast of x writes: both copies, their scales and amaxes. */
typedef struct cast {
    te_tensor *row, *row_scale, *col, *col_scale, *amax_row, *amax_col;
} cast;
static cast quantize(te_ctx *te, te_tensor *x, te_op_nvfp4_quantize_args a, bool row_scaled) {
    int64_t m = te_tensor_shape(x)[0], n = te_tensor_shape(x)[1];
    cast c;
    a.x = x;
    a.row = c.row = test_guarded(te, TE_F4E2M1, SHAPE(m, round_up(n, 32)));
    a.row_scale = c.row_scale = test_guarded(te, TE_F8E4M3, SHAPE(round_up(m, 128), groups_of(n)));
    a.col = c.col = test_guarded(te, TE_F4E2M1, SHAPE(n, round_up(m, 32)));
    a.col_scale = c.col_scale = test_guarded(te, TE_F8E4M3, SHAPE(round_up(n, 128), groups_of(m)));
    a.amax_row = c.amax_row = test_guarded(te, TE_F32, SHAPE(row_scaled ? m : 1));
    a.amax_col = c.amax_col = test_guarded(te, TE_F32, SHAPE(row_scaled ? n : 1));
    a.measure = true;
    CHECK_EQ_INT(te_op_nvfp4_quantize(te, &a), TE_OK);
    CHECK_OK(te);
    return c;
}
/* A column of 16 or fewer numbers (the rest 0), transformed, and what becomes of it. */
static cast transformed(te_ctx *te, te_dtype dtype, const float *column, int n, bool no_sign) {
    te_op_nvfp4_quantize_args a = {0};
    float x[16] = {0};
    memcpy(x, column, (size_t)n * sizeof(float));
    a.rht = true, a.no_random_sign_mask = no_sign;
    return quantize(te, test_tensor(te, dtype, SHAPE(16, 1), x), a, false);
}

/* ---- the random Hadamard transform ---- */

/* Element 2 is 2.5078125 before it is rounded, 2.5 in bf16: a tie, which goes to the code of 2.5 / (12 / 6) = 1, not 1.5. */
TE_TEST_DEVICES(nvfp4_transform_is_rounded_to_bf16) {
    static const float column[16] = {6.03125f, -1, 7, 5, 3, -5, 5, -8, 1, -2, 8, -5, 8, -7, 2, 1};
    static const uint8_t want[16] = {11, 9, 2, 2, 1, 6, 5, 12, 7, 3, 2, 2, 10, 6, 14, 12};
    for (int f32 = 0; f32 < 2; f32++) {
        cast c = transformed(te, f32 ? TE_F32 : TE_BF16, column, 16, false);
        CHECK_EQ_INT(test_read(c.amax_row)[0], 8);
        CHECK(test_read(c.amax_col)[0] == 12);
        const uint8_t *q = (const uint8_t *)test_read_bytes(c.col), *d = (const uint8_t *)test_read_bytes(c.col_scale);
        CHECK_EQ_INT(d[0], 0x7e);
        for (int i = 0; i < 16; i++) CHECK_MSG((q[i / 2] >> (i % 2 * 4) & 15) == want[i], "element %d: code %d, not %d", i, q[i / 2] >> (i % 2 * 4) & 15, want[i]);
    }
}

/* The factor of 1/4 is in the matrix, so no sum of two 2e38 is ever 4e38: every other element is 9.97e37, bf16's nearest to 1e38. */
TE_TEST_DEVICES(nvfp4_transform_does_not_overflow) {
    static const float column[2] = {2e38f, 2e38f}, all[16] = {3e38f, 3e38f, 3e38f, 3e38f, 3e38f, 3e38f, 3e38f, 3e38f,
                                                              3e38f, 3e38f, 3e38f, 3e38f, 3e38f, 3e38f, 3e38f, 3e38f};
    cast c = transformed(te, TE_BF16, column, 2, false);
    const uint8_t *q = (const uint8_t *)test_read_bytes(c.col);
    CHECK(test_read(c.amax_col)[0] == 0x1.2cp+126f);
    CHECK_EQ_INT(((const uint8_t *)test_read_bytes(c.col_scale))[0], 0x7e);
    for (int i = 0; i < 8; i++) CHECK_EQ_INT(q[i], 7);
    CHECK(isinf(test_read(transformed(te, TE_BF16, all, 16, true).amax_col)[0])); /* 1.2e39 is too much for anybody */
}

/* Sums as tensor cores make them: what an f32 has no room for is cut off, not rounded, and products are cut to 25 bits below the leading
 * bit of the largest. All of it has to be seen at a tie of bf16: 1 + 2^-8 goes to 1, and whatever is more to 1 + 2^-7. */
TE_TEST_DEVICES(nvfp4_transform_cuts_sums_as_tensor_cores_do) {
    static const struct {
        float x[16];
        float amax;
    } cases[] = {
        {{4, 0x1p-6f}, 1},
        {{4, 0x1p-6f, 0x1p-20f}, 0x1.02p0f},                      /* 2^-22 is room enough */
        {{4, 0x1p-6f, 0x1.8p-22f}, 1},                            /* 3 * 2^-25: cut, where rounding would go up */
        {{4, 0x1p-6f, 0x1p-23f, 0x1p-23f, 0x1p-23f, 0x1p-23f}, 0x1.02p0f}, /* 2^-25 each, four times: 2^-23 */
        {{4, 0x1p-6f, 0x1p-24f, 0x1p-24f, 0x1p-24f, 0x1p-24f, 0x1p-24f, 0x1p-24f, 0x1p-24f, 0x1p-24f, 0x1p-24f, 0x1p-24f}, 1}, /* 2^-26: none */
        {{4 + 0x1p-5f, -0x1p-6f, -0x1p-26f}, 0x1.04p0f},          /* signs: 4.046875 / 4 + 2^-28, cut, is a tie, and 1 + 3 * 2^-8 goes up */
    };
    for (int i = 0; i < COUNT(cases); i++)
        for (int scale = -100; scale <= 100; scale += 100) {
            float x[16];
            test_case("case %d scale 2^%d", i, scale);
            for (int k = 0; k < 16; k++) x[k] = ldexpf(cases[i].x[k], scale);
            cast c = transformed(te, TE_F32, x, 16, true), rounded = transformed(te, TE_BF16, x, 16, true);
            float got = test_read(c.amax_col)[0], same = test_read(rounded.amax_col)[0], want = ldexpf(cases[i].amax, scale);
            CHECK_MSG(got == want && same == want, "amax %a, of bf16 %a, not %a", (double)got, (double)same, (double)want);
        }
    /* Subnormal numbers: 2^-133 and 2^-133 make 2^-134, half of the smallest bf16, which goes to 0; three of them go to 2^-133. */
    static const float tiny[4] = {0x1p-133f, 0x1p-133f, 0x1p-133f, 0};
    CHECK(test_read(transformed(te, TE_BF16, tiny, 2, true).amax_col)[0] == 0);
    CHECK(test_read(transformed(te, TE_BF16, tiny, 3, true).amax_col)[0] == 0x1p-133f);
    /* No sum is -0: neither of zeros, nor of numbers that cancel. */
    static const float zeros[16] = {-0.0f, -0.0f, -0.0f, -0.0f, -0.0f, -0.0f, -0.0f, -0.0f, -0.0f, -0.0f, -0.0f, -0.0f, -0.0f, -0.0f, -0.0f, -0.0f};
    const uint8_t *q = (const uint8_t *)test_read_bytes(transformed(te, TE_BF16, zeros, 16, true).col);
    for (int i = 0; i < 8; i++) CHECK_EQ_INT(q[i], 0);
}

/* ---- 4-over-6 ---- */

/* The block's amax of 3.515625 under a tensor's of 3.9375: RN(RN(3.515625 / 6) * S) is 400, halfway between 384 and 416, which is even. In the
 * other order, 3.515625 * RN(S / 6), it is more. */
TE_TEST_DEVICES(four_over_six_block_scale_rounds_in_its_own_order) {
    static const float x[16] = {2.40625f, 1.34375f, -1.75f, 3.515625f, 0.4140625f, 0.984375f, 0.396484375f, -1.5625f,
                                1.0859375f, 0.53515625f, -0.64453125f, 0.69921875f, 0.4375f, 0.353515625f, 0.0341796875f, 0.65625f};
    static const uint8_t want[8] = {0x46, 0x7d, 0x41, 0xd1, 0x24, 0x2a, 0x12, 0x20};
    float amax = 3.9375f;
    te_op_nvfp4_quantize_args a = {0};
    a.x = test_tensor(te, TE_BF16, SHAPE(1, 16), x);
    a.row = test_guarded(te, TE_F4E2M1, SHAPE(1, 16));
    a.row_scale = test_guarded(te, TE_F8E4M3, SHAPE(128, 4));
    a.amax_row = test_tensor(te, TE_F32, SHAPE(1), &amax);
    a.four_over_six = TE_4OVER6_MAE;
    te_op_nvfp4_quantize(te, &a);
    CHECK_OK(te);
    CHECK_EQ_INT(((const uint8_t *)test_read_bytes(a.row_scale))[0], 0x7c);
    CHECK_BYTES("row", test_read_bytes(a.row), want, 8);
}

/* An amax of 4.6e-37: S is at its limit, and d / S, a subnormal number, says little of what the codes are worth. */
TE_TEST_DEVICES(four_over_six_of_tiny_tensors_goes_by_their_amax) {
    static const uint16_t x[64] = {
        0x824d, 0x82aa, 0x817e, 0x01d7, 0x0291, 0x00e1, 0x820d, 0x8249, 0x0240, 0x02d1, 0x018c, 0x829e, 0x8275, 0x02cd, 0x0150, 0x82de,
        0x80ab, 0x8295, 0x8221, 0x81fa, 0x8237, 0x020e, 0x8081, 0x8217, 0x01d2, 0x0254, 0x82d2, 0x8183, 0x827b, 0x8131, 0x82a5, 0x002a,
        0x804e, 0x819c, 0x8286, 0x81cb, 0x828c, 0x82ad, 0x0166, 0x828e, 0x0296, 0x0237, 0x8300, 0x018b, 0x828d, 0x0044, 0x0059, 0x82ff,
        0x816f, 0x8183, 0x0276, 0x8297, 0x023d, 0x828d, 0x81aa, 0x8257, 0x02b9, 0x0211, 0x031c, 0x0224, 0x0258, 0x0257, 0x821b, 0x808f};
    static const uint8_t want[2][4] = {{0x5e, 0x59, 0x5b, 0x62}, {0x59, 0x59, 0x5b, 0x5d}};
    for (int mse = 0; mse < 2; mse++) {
        te_op_nvfp4_quantize_args a = {0};
        a.four_over_six = mse ? TE_4OVER6_MSE : TE_4OVER6_MAE;
        cast c = quantize(te, te_tensor_from_host(te, TE_BF16, SHAPE(1, 64), x), a, false);
        CHECK_BYTES("row_scale", test_read_bytes(c.row_scale), want[mse], 4);
    }
}

/* A tile's scale in the row-wise copy (0) and in the column-wise one (1) of x [16, 16], with one element set to v. */
static void tile_scales(te_ctx *te, float *x, float v, int four, int scale[2]) {
    te_op_nvfp4_quantize_args a = {0};
    float amax = 4;
    x[0] = v;
    te_scope_begin(te);
    a.x = test_tensor(te, TE_F32, SHAPE(16, 16), x);
    a.row = te_tensor_empty(te, TE_F4E2M1, SHAPE(16, 32)), a.col = te_tensor_empty(te, TE_F4E2M1, SHAPE(16, 32));
    a.row_scale = te_tensor_empty(te, TE_F8E4M3, SHAPE(128, 4)), a.col_scale = te_tensor_empty(te, TE_F8E4M3, SHAPE(128, 4));
    a.amax_row = test_tensor(te, TE_F32, SHAPE(1), &amax);
    a.four_over_six = (te_4over6_error)four, a.two_dimensional = true;
    te_op_nvfp4_quantize(te, &a);
    scale[0] = ((const uint8_t *)test_read_bytes(a.row_scale))[0];
    scale[1] = ((const uint8_t *)test_read_bytes(a.col_scale))[0];
    te_scope_end(te);
}
/* Tiles: the row-wise copy adds its errors by rows, the column-wise one by columns. The sums are equal but for their roundings, which decide where
 * one element is moved until 4 is as good as 6. There the copies disagree, and the column-wise copy is still the row-wise one of the transpose. */
TE_TEST_DEVICES(four_over_six_copies_choose_for_themselves) {
    int disagree = 0;
    for (int seed = 1; seed <= 6; seed++) {
        int four = seed % 2 ? TE_4OVER6_MAE : TE_4OVER6_MSE, first[2], now[2], turned[2];
        float *x = test_normal(256, (uint64_t)seed), t[256], low = 0, high = 0;
        x[1] = 3.5f;
        tile_scales(te, x, 0, four, first);
        for (float v = 0.0625f; v < 3 && high == 0; v += 0.0625f) {
            tile_scales(te, x, v, four, now);
            if (now[0] != first[0]) high = v;
            else low = v;
        }
        for (int i = 0; i < 24 && high != 0; i++) {
            float middle = low + (high - low) / 2;
            tile_scales(te, x, middle, four, now);
            if (now[0] != first[0]) high = middle;
            else low = middle;
        }
        for (int i = -24; i <= 24 && high != 0; i++) {
            float v = high;
            for (int k = 0; k < abs(i); k++) v = nextafterf(v, i < 0 ? 0.0f : 4.0f);
            tile_scales(te, x, v, four, now);
            for (int k = 0; k < 256; k++) t[k % 16 * 16 + k / 16] = x[k];
            tile_scales(te, t, v, four, turned);
            CHECK_MSG(now[0] == turned[1] && now[1] == turned[0], "seed %d: scales %d %d, of the transpose %d %d", seed, now[0], now[1], turned[0], turned[1]);
            disagree += now[0] != now[1];
        }
    }
    CHECK_MSG(disagree > 0, "no tile of which the copies choose different scales");
    CHECK_OK(te);
}

/* ---- all of it, CUDA against the CPU, at sizes with many tiles ---- */

TE_TEST(nvfp4_cuda_gives_the_bytes_of_the_cpu_at_size) {
    enum { M = 1040, N = 1552 };
    static const te_dtype floats[] = {TE_BF16, TE_F16, TE_F32};
    static const struct {
        bool rht, no_sign, two, row_scaled, stochastic, max_256;
        int four;
    } ways[] = {
        {.rht = true}, {.rht = true, .no_sign = true, .stochastic = true}, {.four = 1}, {.four = 2, .max_256 = true}, {.four = 1, .two = true, .max_256 = true},
        {.four = 2, .two = true}, {.row_scaled = true}, {.row_scaled = true, .rht = true}, {.row_scaled = true, .four = 1}, {.rht = true, .four = 2},
    };
    if (test_no_gpu()) SKIP(test_no_gpu());
    te_ctx *side[2] = {test_context("cpu"), test_context("cuda:0")};
    REQUIRE(side[0] && side[1]);
    for (int kind = 0; kind < 4; kind++) { /* normal; many magnitudes; specials; normal, but too small for S */
        float *x = kind == 2 ? test_specials(M * N, 9) : test_normal(M * N, 10);
        int64_t *e = test_integers(M * N, 11, -40, 41);
        for (int i = 0; i < M * N && kind == 1; i++) x[i] = ldexpf(x[i], (int)e[i]);
        for (int i = 0; i < M * N && kind == 3; i++) x[i] *= 0x1p-121f;
        for (int w = 0; w < COUNT(ways); w++) {
            te_dtype dtype = floats[(kind + w) % 3 ? 0 : (w + kind) / 3 % 3];
            uint8_t *got[2][6];
            size_t size[6];
            if (kind == 3 && dtype == TE_F16) dtype = TE_BF16;
            test_case("kind %d %s way %d", kind, te_dtype_name(dtype), w);
            for (int c = 0; c < 2; c++) {
                te_op_nvfp4_quantize_args a = {0};
                a.rht = ways[w].rht, a.no_random_sign_mask = ways[w].no_sign, a.two_dimensional = ways[w].two, a.stochastic_rounding = ways[w].stochastic;
                a.four_over_six = (te_4over6_error)ways[w].four, a.e4m3_max_256 = ways[w].max_256, a.seed = 17;
                te_scope_begin(side[c]);
                cast q = quantize(side[c], test_tensor(side[c], dtype, SHAPE(M, N), x), a, ways[w].row_scaled);
                const te_tensor *out[6] = {q.row, q.row_scale, q.col, q.col_scale, q.amax_row, q.amax_col};
                for (int k = 0; k < 6; k++) {
                    size[k] = te_tensor_bytes(out[k]);
                    got[c][k] = (uint8_t *)malloc(size[k] + 1);
                    te_tensor_to_host(out[k], got[c][k]);
                }
                te_scope_end(side[c]);
            }
            static const char *names[6] = {"row", "row_scale", "col", "col_scale", "amax_row", "amax_col"};
            for (int k = 0; k < 6; k++) {
                CHECK_BYTES(names[k], got[1][k], got[0][k], size[k]);
                free(got[0][k]);
                free(got[1][k]);
            }
        }
    }
}
