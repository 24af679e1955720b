/* tests/ops/test_decoded_nan.c: the bits of NaN that every operation that decodes gives. */
#include "../te_test.h"

/* NaN of y in each format, for whatever reason: a code, a scale, infinity times 0. */
static void check_nan(const te_tensor *y, const char *what) {
    const uint8_t *bytes = (const uint8_t *)test_read_bytes(y);
    const float *v = test_read(y);
    int64_t n = te_tensor_numel(y), nan = 0, size = te_dtype_bits(te_tensor_dtype(y)) / 8;
    for (int64_t i = 0; i < n; i++) {
        uint32_t got = 0, want = size == 4 ? 0x7fffffffu : 0x7fffu;
        memcpy(&got, bytes + i * size, (size_t)size);
        if (!isnan(v[i])) continue;
        nan++;
        CHECK_MSG(got == want, "%s: element %d is %#x, not %#x", what, (int)i, got, want);
    }
    CHECK_MSG(nan > 0, "%s: no NaN", what);
}
TE_TEST_DEVICES(a_decoded_nan_is_7fffffff) {
    static const te_dtype floats[] = {TE_F32, TE_BF16, TE_F16}, codes[] = {TE_F8E4M3, TE_F8E5M2};
    uint8_t every[256], *e8m0 = (uint8_t *)test_alloc(128 * 8);
    uint32_t scales[4] = {0x3f800000u, 0xffc00001u, 0x7f800001u, 0x7f800000u}; /* 1, two NaN, infinity */
    for (int i = 0; i < 256; i++) every[i] = (uint8_t)i;
    for (int d = 0; d < 3; d++) {
        for (int k = 0; k < 2; k++) {
            te_tensor *q = te_tensor_from_host(te, codes[k], SHAPE(1, 256), every);
            test_case("%s to %s", te_dtype_name(codes[k]), te_dtype_name(floats[d]));
            const float *read = test_read(q);
            for (int i = 0; i < 256; i++) CHECK_MSG(!isnan(read[i]) || memcmp(&read[i], "\xff\xff\xff\x7f", 4) == 0, "code %#x read", (unsigned)i);
            for (int s = 0; s < 4; s++) {
                te_op_fp8_dequantize_args a = {0};
                a.q = q, a.y = test_guarded(te, floats[d], SHAPE(1, 256));
                a.scale_inv = te_tensor_from_host(te, TE_F32, SHAPE(1), &scales[s]);
                te_op_fp8_dequantize(te, &a);
                check_nan(a.y, "fp8_dequantize");
                te_op_block_dequantize_args b = {0};
                uint32_t blocks[8] = {scales[s], scales[s], 0, 0, scales[s], scales[s], 0, 0};
                b.q = q, b.y = test_guarded(te, floats[d], SHAPE(1, 256));
                b.scale_inv = te_tensor_from_host(te, TE_F32, SHAPE(2, 4), blocks);
                te_op_block_dequantize(te, &b);
                check_nan(b.y, "block_dequantize");
            }
            for (int e = 0; e < 2; e++) {
                te_op_mxfp8_dequantize_args m = {0};
                memset(e8m0, e ? 0xff : 127, 128 * 8);
                m.q = q, m.y = test_guarded(te, floats[d], SHAPE(1, 256));
                m.scale = te_tensor_from_host(te, TE_F8E8M0, SHAPE(128, 8), e8m0);
                te_op_mxfp8_dequantize(te, &m);
                check_nan(m.y, "mxfp8_dequantize");
            }
        }
        test_case("e2m1 to %s", te_dtype_name(floats[d]));
        for (int s = 0; s < 4; s++) {
            te_op_nvfp4_dequantize_args a = {0};
            memset(e8m0, s == 0 ? 0x7f : s == 1 ? 0xff : 0x38, 128 * 8);
            a.q = te_tensor_from_host(te, TE_F4E2M1, SHAPE(1, 128), every);
            a.scale = te_tensor_from_host(te, TE_F8E4M3, SHAPE(128, 8), e8m0);
            a.amax = te_tensor_from_host(te, TE_F32, SHAPE(1), &scales[s < 2 ? 0 : s]);
            a.y = test_guarded(te, floats[d], SHAPE(1, 128));
            te_op_nvfp4_dequantize(te, &a);
            check_nan(a.y, "nvfp4_dequantize");
        }
        CHECK_OK(te);
    }
}
