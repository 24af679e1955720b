/* tests/core/test_e2m1.c: tensors of 4-bit elements: rows fill whole bytes, on every path from shape to bytes. */
#include "../te_test.h"

TE_TEST_DEVICES(a_view_of_e2m1_keeps_its_bytes) {
    te_tensor *x = te_tensor_zeros(te, TE_F4E2M1, SHAPE(62, 128));
    CHECK_EQ_INT(te_tensor_bytes(x), 62 * 64);
    CHECK(!te_tensor_view(x, SHAPE(-1, 1))); /* would be a byte for each of 7,936 elements */
    CHECK_ERROR(te, TE_ERR_SHAPE, "[62, 128] of e2m1 has 3968 bytes and [7936, 1] 7936");
    CHECK(!te_tensor_view(te_tensor_zeros(te, TE_F4E2M1, SHAPE(4, 3)), SHAPE(12))); /* fewer are no better: the rows' padding would be elements */
    CHECK_ERROR(te, TE_ERR_SHAPE, "[4, 3] of e2m1 has 8 bytes and [12] 6");
    CHECK(te_tensor_view(x, SHAPE(31, 2, 128)) && te_tensor_view(x, SHAPE(-1)) && te_tensor_view(x, SHAPE(-1, 2)));
    te_tensor *odd = te_tensor_zeros(te, TE_F4E2M1, SHAPE(4, 3));
    CHECK(te_tensor_view(odd, SHAPE(2, 2, 3)) && te_tensor_view(odd, SHAPE(-1, 3)));
    te_tensor *none = te_tensor_zeros(te, TE_F4E2M1, SHAPE(0, 3));
    CHECK(te_tensor_view(none, SHAPE(3, 0)) && te_tensor_bytes(none) == 0);
    CHECK_OK(te);
}

/* Each size of the last dimension, and no dimension at all: bytes there, back, in memory of the user's, in a file. */
TE_TEST_DEVICES(e2m1_round_trips) {
    uint8_t host[64], back[64], all[64];
    const int64_t shapes[][3] = {{0, 0, 0}, {1, 1, 0}, {1, 7, 0}, {2, 3, 5}, {2, 3, 4}, {2, 0, 5}, {2, 5, 0}, {2, 1, 1}};
    for (int i = 0; i < COUNT(shapes); i++) {
        int ndim = (int)shapes[i][0];
        const int64_t *shape = shapes[i] + 1;
        size_t rows = ndim == 2 ? (size_t)shape[0] : 1, bytes = rows * (size_t)(((ndim ? shape[ndim - 1] : 1) + 1) / 2);
        test_case("%d dimensions, %lld, %lld", ndim, (long long)shape[0], (long long)shape[1]);
        for (int k = 0; k < 64; k++) host[k] = (uint8_t)(k * 37 + 11);
        memset(back, 0xEE, sizeof back);
        te_tensor *x = te_tensor_from_host(te, TE_F4E2M1, ndim, shape, host);
        REQUIRE_OK(te);
        CHECK_EQ_INT(te_tensor_bytes(x), bytes);
        CHECK_EQ_INT(te_tensor_to_host(x, back), TE_OK);
        CHECK(memcmp(back, host, bytes) == 0 && back[bytes] == 0xEE);
        te_tensor *memory = te_tensor_full(te, TE_U8, SHAPE(64), 0xEE); /* in the middle of other bytes */
        te_tensor *in = te_tensor_wrap(te, TE_F4E2M1, ndim, shape, (char *)te_tensor_data(memory) + 16, NULL, NULL);
        CHECK_EQ_INT(te_tensor_copy_from_host(in, host), TE_OK);
        te_tensor_to_host(memory, all);
        for (size_t k = 0; k < 64; k++) CHECK(all[k] == (k >= 16 && k < 16 + bytes ? host[k - 16] : 0xEE));
        CHECK_OK(te);
        /* as numbers: the even element in the low half, each row from a byte of its own on */
        static const float values[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
        int64_t n = te_tensor_numel(x), cols = ndim ? shape[ndim - 1] : 1;
        const float *got = test_read(x);
        CHECK_OK(te);
        for (int64_t k = 0; k < n; k++) {
            int code = host[k / cols * ((cols + 1) / 2) + k % cols / 2] >> k % cols % 2 * 4 & 15;
            CHECK_MSG(got[k] == (code & 8 ? -values[code & 7] : values[code & 7]), "element %lld is %g", (long long)k, (double)got[k]);
        }
        if (n == 1) CHECK(te_tensor_item(x) == (double)got[0]);
    }
    CHECK_OK(te);
}

/* Views that a nibble cannot give say why, and not that the elements do not exist. */
TE_TEST_DEVICES(e2m1_narrow_and_transpose_say_why_not) {
    te_tensor *x = te_tensor_zeros(te, TE_F4E2M1, SHAPE(4, 6));
    CHECK(!te_tensor_narrow(x, 1, 1, 2));
    CHECK_ERROR(te, TE_ERR_DTYPE, "e2m1 has two elements a byte");
    CHECK(!te_tensor_transpose(x, 0, 1));
    CHECK_ERROR(te, TE_ERR_DTYPE, "e2m1 has two elements a byte");
    CHECK(te_tensor_copy(x, te_tensor_zeros(te, TE_F4E2M1, SHAPE(4, 6))) != TE_OK);
    CHECK_ERROR(te, TE_ERR_DTYPE, "is e2m1; f32, f16, bf16");
}
