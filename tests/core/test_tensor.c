/* Tensors: shapes, references, scopes, views, copies, and what wrong shapes get. */
#include "../te_test.h"

TE_TEST_DEVICES(tensor_round_trip) {
    static const te_dtype dtypes[] = {TE_F32, TE_F16, TE_BF16, TE_I32, TE_I64, TE_U8};
    const float values[6] = {0, 1, 2, 3, 100, 7};
    for (int i = 0; i < COUNT(dtypes); i++) {
        test_case("%s", te_dtype_name(dtypes[i]));
        te_tensor *x = test_tensor(te, dtypes[i], SHAPE(2, 3), values);
        REQUIRE_OK(te);
        CHECK_CLOSE("values", test_read(x), values, 6, 0, 0);
        CHECK_EQ_INT(te_tensor_numel(x), 6);
        CHECK_EQ_INT(te_tensor_bytes(x), 6 * te_dtype_bits(dtypes[i]) / 8);
    }
}

TE_TEST_DEVICES(tensor_scopes_release_and_retain_keeps) {
    size_t before = te_memory_get_stats(te).allocated;
    te_scope_begin(te);
    te_tensor *kept = te_tensor_retain(te_tensor_zeros(te, TE_F32, SHAPE(100)));
    te_tensor_zeros(te, TE_F32, SHAPE(1000));
    te_scope_begin(te);
    te_tensor_zeros(te, TE_F32, SHAPE(10));
    te_scope_end(te);
    CHECK(te_memory_get_stats(te).allocated > before + 4000);
    te_scope_end(te);
    CHECK(te_memory_get_stats(te).allocated >= before + 400);
    CHECK(te_memory_get_stats(te).allocated < before + 4000);
    CHECK_TENSOR(kept, test_alloc(400), 0, 0);
    te_tensor_release(kept);
    CHECK_EQ_INT(te_memory_get_stats(te).allocated, before);
    CHECK_OK(te);
    te_scope_end(te); /* the test's own */
    CHECK_OK(te);
    te_scope_end(te);
    CHECK_ERROR(te, TE_ERR_STATE, "te_scope_end without");
    te_scope_begin(te);
}

TE_TEST_DEVICES(tensor_memory_is_reused) {
    te_scope_begin(te);
    te_tensor_zeros(te, TE_F32, SHAPE(5000));
    te_scope_end(te);
    uint64_t taken = te_memory_get_stats(te).device_allocs;
    for (int i = 0; i < 10; i++) {
        te_scope_begin(te);
        te_tensor_zeros(te, TE_F32, SHAPE(5000 - i));
        te_scope_end(te);
    }
    CHECK_EQ_INT(te_memory_get_stats(te).device_allocs, taken);
    te_memory_trim(te);
    CHECK(te_memory_get_stats(te).reserved <= te_memory_get_stats(te).allocated);
}

TE_TEST_DEVICES(tensor_views_share_memory) {
    float *values = test_normal(24, 1);
    te_tensor *x = test_tensor(te, TE_F32, SHAPE(2, 3, 4), values);
    te_tensor *v = te_tensor_view(x, SHAPE(6, -1));
    REQUIRE_OK(te);
    CHECK_EQ_INT(te_tensor_shape(v)[1], 4);
    CHECK(te_tensor_data(v) == te_tensor_data(x));
    te_tensor *n = te_tensor_narrow(x, 1, 1, 2);
    float want[24];
    for (int i = 0; i < 2; i++)
        for (int j = 0; j < 2; j++)
            for (int k = 0; k < 4; k++) want[(i * 2 + j) * 4 + k] = values[(i * 3 + j + 1) * 4 + k];
    CHECK(!te_tensor_is_contiguous(n));
    CHECK_TENSOR(n, want, 0, 0);
    te_tensor *t = te_tensor_contiguous(te_tensor_transpose(x, 0, 2));
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 3; j++)
            for (int k = 0; k < 2; k++) want[(i * 3 + j) * 2 + k] = values[(k * 3 + j) * 4 + i];
    CHECK_TENSOR(t, want, 0, 0);
    te_tensor_fill(v, 5);
    CHECK(te_tensor_version(x) == te_tensor_version(v));
    CHECK(test_read(x)[23] == 5);
    CHECK_OK(te);
}

TE_TEST_DEVICES(tensor_empty_sizes_are_legal) {
    te_tensor *x = te_tensor_zeros(te, TE_BF16, SHAPE(0, 7));
    CHECK_EQ_INT(te_tensor_numel(x), 0);
    CHECK(te_tensor_data(x) == NULL);
    CHECK(te_tensor_cast(x, TE_F32) != NULL);
    CHECK(te_add(x, x) != NULL);
    CHECK(te_tensor_view(x, SHAPE(7, 0)) != NULL);
    CHECK_OK(te);
}

TE_TEST(tensor_random_bits_are_the_same_everywhere) {
    te_ctx *cpu = test_context("cpu");
    float *a = test_read(te_tensor_normal(cpu, TE_F32, SHAPE(1003), 1.0f, 2.0f));
    float *u = test_read(te_tensor_uniform(cpu, TE_BF16, SHAPE(1003), -1.0f, 2.0f));
    CHECK_OK(cpu);
    double mean = 0;
    for (int i = 0; i < 1003; i++) mean += a[i] / 1003;
    CHECK_MSG(fabs(mean - 1) < 0.25, "mean %g", mean); /* 4 standard deviations of the mean: 4 * 2 / sqrt(1003) */
    if (test_no_gpu()) SKIP(test_no_gpu());
    te_ctx *gpu = test_context("cuda:0");
    CHECK_BYTES("normal", test_read(te_tensor_normal(gpu, TE_F32, SHAPE(1003), 1.0f, 2.0f)), a, 1003 * sizeof(float));
    CHECK_BYTES("uniform", test_read(te_tensor_uniform(gpu, TE_BF16, SHAPE(1003), -1.0f, 2.0f)), u, 1003 * sizeof(float));
}

static void count_release(void *user) { ++*(int *)user; }
TE_TEST(tensor_wraps_foreign_memory) {
    te_ctx *te = test_context("cpu");
    static float memory[6] = {1, 2, 3, 4, 5, 6};
    int released = 0;
    te_scope_begin(te);
    te_tensor *x = te_tensor_wrap(te, TE_F32, SHAPE(2, 3), memory, count_release, &released);
    te_tensor *v = te_tensor_retain(te_tensor_narrow(x, 0, 1, 1));
    te_scope_end(te);
    CHECK_EQ_INT(released, 0);
    CHECK(test_read(v)[0] == 4);
    te_tensor_release(v);
    CHECK_EQ_INT(released, 1);
    CHECK(!te_tensor_wrap(te, TE_F32, SHAPE(3), NULL, NULL, NULL));
    CHECK_ERROR(te, TE_ERR_INVALID, "data is NULL");
    CHECK(!te_tensor_wrap(te, TE_F32, SHAPE(3), (char *)memory + 1, NULL, NULL));
    CHECK_ERROR(te, TE_ERR_INVALID, "not aligned");
}

TE_TEST(tensor_bad_shapes_are_named) {
    te_ctx *te = test_context("cpu");
    CHECK(!te_tensor_empty(te, TE_F32, SHAPE(2, -3)));
    CHECK_ERROR(te, TE_ERR_SHAPE, "[2, -3]");
    CHECK(!te_tensor_empty(te, TE_F32, SHAPE(INT64_MAX / 2, INT64_MAX / 2)));
    CHECK_ERROR(te, TE_ERR_SHAPE, "more elements");
    CHECK(!te_tensor_empty(te, (te_dtype)77, SHAPE(2)));
    CHECK_ERROR(te, TE_ERR_DTYPE, "77");
    te_tensor *x = te_tensor_zeros(te, TE_F32, SHAPE(2, 3));
    CHECK(!te_tensor_view(x, SHAPE(4, -1)));
    CHECK_ERROR(te, TE_ERR_SHAPE, "[2, 3]");
    CHECK(!te_tensor_narrow(x, 1, 2, 2));
    CHECK_ERROR(te, TE_ERR_SHAPE, "[2, 3]");
    CHECK(!te_tensor_transpose(x, 0, 2));
    CHECK_ERROR(te, TE_ERR_SHAPE, "dimensions 0 and 2 do not both exist in [2, 3]");
    CHECK(!te_add(x, te_tensor_zeros(te, TE_F32, SHAPE(3, 2))));
    CHECK_ERROR(te, TE_ERR_SHAPE, "[2, 3] and f32 [3, 2]");
    CHECK(!te_add(NULL, x)); /* silent: whoever made the NULL has complained */
    CHECK_OK(te);
    CHECK(isnan(te_tensor_item(x)));
    CHECK_ERROR(te, TE_ERR_SHAPE, "exactly one");
}

/* The error names the reason, which is not the range. */
TE_TEST(tensor_views_need_plain_memory) {
    te_ctx *te = test_context("cpu");
    te_tensor *shape = te_tensor_describe(te, TE_F32, SHAPE(2, 3));
    CHECK(!te_tensor_narrow(shape, 0, 0, 1));
    CHECK_ERROR(te, TE_ERR_STATE, "te_tensor_narrow: the tensor [2, 3] was made by te_tensor_describe");
    CHECK(!te_tensor_transpose(shape, 0, 1));
    CHECK_ERROR(te, TE_ERR_STATE, "te_tensor_transpose: the tensor [2, 3] was made by te_tensor_describe");
    te_quantizer *quantizer = te_quantizer_create(te, &(te_quantizer_desc){.kind = TE_QUANT_CURRENT});
    te_tensor *q = te_quantize(quantizer, te_tensor_full(te, TE_BF16, SHAPE(32, 32), 1));
    CHECK(!te_tensor_narrow(q, 0, 0, 16));
    CHECK_ERROR(te, TE_ERR_STATE, "te_tensor_narrow: the tensor [32, 32] is quantized: te_dequantize it first");
    CHECK(!te_tensor_transpose(q, 0, 1));
    CHECK_ERROR(te, TE_ERR_STATE, "te_tensor_transpose: the tensor [32, 32] is quantized: te_dequantize it first");
    te_quantizer_destroy(quantizer);
}

/* As te_tensor_copy converts: truncated and saturated, NaN gives 0. */
TE_TEST(tensor_integers_from_f32) {
    te_ctx *te = test_context("cpu");
    const float in[6] = {-1.9f, 1.9f, 300.0f, 3e9f, -1e30f, NAN};
    const uint8_t u8[6] = {0, 1, 255, 255, 0, 0};
    const int32_t i32[6] = {-1, 1, 300, INT32_MAX, INT32_MIN, 0};
    const int64_t i64[6] = {-1, 1, 300, 3000000000, INT64_MIN, 0};
    uint8_t a[6];
    int32_t b[6];
    int64_t c[6];
    CHECK(te_tensor_to_host(te_tensor_from_f32(te, TE_U8, SHAPE(6), in), a) == TE_OK && memcmp(a, u8, sizeof a) == 0);
    CHECK(te_tensor_to_host(te_tensor_from_f32(te, TE_I32, SHAPE(6), in), b) == TE_OK && memcmp(b, i32, sizeof b) == 0);
    CHECK(te_tensor_to_host(te_tensor_from_f32(te, TE_I64, SHAPE(6), in), c) == TE_OK && memcmp(c, i64, sizeof c) == 0);
}

/* Sizes in bytes are computed in 64 bits; where addresses have 32, larger tensors are refused. */
TE_TEST(tensor_of_many_bytes) {
    te_ctx *te = test_context("cpu");
    CHECK(te_tensor_bytes(te_tensor_describe(te, TE_F32, SHAPE((int64_t)1 << 27))) == (size_t)1 << 29);
    te_tensor *large = te_tensor_describe(te, TE_F32, SHAPE(3, (int64_t)1 << 28));
    if (sizeof(void *) == 8) {
        CHECK(te_tensor_bytes(large) == (size_t)3 * ((size_t)1 << 30));
    } else {
        CHECK(!large);
        CHECK_ERROR(te, TE_ERR_SHAPE, "tensor: f32 of shape [3, 268435456] has more bytes than the 2147483647 that a tensor can have where addresses have 32 bits");
        CHECK(te_tensor_describe(te, TE_F32, SHAPE(0, (int64_t)1 << 40)) != NULL);
    }
    CHECK_OK(te);
}

TE_TEST(tensor_first_error_is_kept) {
    te_ctx *te = test_context("cpu");
    te_tensor *x = te_tensor_zeros(te, TE_F32, SHAPE(2, 3));
    te_tensor *bad = te_tensor_view(x, SHAPE(5));
    te_tensor *worse = te_add(te_scale(bad, 2), bad);
    CHECK(!worse);
    CHECK(te_backward(worse) != TE_OK);
    CHECK(!te_tensor_view(x, SHAPE(7)));
    CHECK_ERROR(te, TE_ERR_SHAPE, "as [5]");
    CHECK_OK(te);
}
