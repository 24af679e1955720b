/* test_expanded_masks.c: masks that are expanded over sequences, heads and queries by strides of 0, which no public function makes. */
#define TE_STATIC
#define TE_IMPLEMENTATION
#include "../te_test.h"
#include "../faults/purse.h"

/* x [1, 1, s, s] as [b, heads, s, s], or its first row for all rows. */
static te_tensor *expanded(te_tensor *x, int64_t b, int64_t heads, bool one_row) {
    te_tensor *y = te_tensor_detach(x);
    y->shape[0] = b;
    y->shape[1] = heads;
    y->stride[0] = y->stride[1] = 0;
    if (one_row) y->stride[2] = 0;
    return y;
}
static te_tensor *triangle(te_ctx *te, int64_t s, bool hole) {
    float *x = test_floats(s * s);
    for (int64_t i = 0; i < s * s; i++) x[i] = i % s > i / s || (hole && i == (s - 2) * s + 1) ? -INFINITY : 0;
    return test_tensor(te, TE_F32, SHAPE(1, 1, s, s), x);
}

TE_TEST_DEVICES(expanded_masks_are_seen_through) {
    te_tensor *mask = triangle(te, 8, false), *hole = triangle(te, 8, true);
    for (int strict = 0; strict < 2; strict++) {
        const te_mask_check check = {.strict = strict != 0};
        CHECK(te_detect_causal_mask(expanded(mask, 3, 4, false), (te_window){0}, &check, NULL));
        CHECK_EQ_INT(te_detect_causal_mask(expanded(hole, 3, 4, false), (te_window){0}, &check, NULL), !strict);
        CHECK(!te_detect_causal_mask(expanded(mask, 3, 4, true), (te_window){0}, &check, NULL));
    }
    te_tensor *q = test_tensor(te, TE_F32, SHAPE(3, 4, 8, 8), test_normal(3 * 4 * 8 * 8, 1));
    te_tensor *got = te_scaled_dot_product_attention(q, q, q, &(te_sdpa_args){.attn_mask = expanded(hole, 3, 4, false)});
    te_tensor *want = te_scaled_dot_product_attention(q, q, q, &(te_sdpa_args){.attn_mask = hole});
    REQUIRE_OK(te);
    CHECK_BYTES("o", test_read(te_tensor_contiguous(got)), test_read(te_tensor_contiguous(want)), 3 * 4 * 8 * 8 * 4);
}

/* Every request for memory in turn is refused: an error, and the same call then comes through. */
TE_TEST(expanded_masks_without_memory) {
    purse *host = new_purse();
    te_ctx_desc desc = purse_desc(host, NULL);
    te_ctx *te = test_context_with(&desc);
    te_tensor *mask = expanded(triangle(te, 8, true), 2, 2, false), *q = test_tensor(te, TE_F32, SHAPE(2, 2, 8, 8), test_normal(2 * 2 * 8 * 8, 1));
    bool whole = false;
    REQUIRE_OK(te);
    for (int64_t n = 1; !whole; n++) {
        test_case("request %lld", (long long)n);
        host->calls = host->refused = 0;
        host->fail_at = n;
        te_scope_begin(te);
        te_tensor *y = te_scaled_dot_product_attention(q, q, q, &(te_sdpa_args){.attn_mask = mask});
        host->fail_at = 0;
        whole = host->refused == 0;
        CHECK(te_ok(te) == (y != NULL));
        if (!te_ok(te)) CHECK_EQ_INT(te_error_code(te), TE_ERR_OUT_OF_MEMORY);
        te_clear_error(te);
        te_scope_end(te);
        REQUIRE(n < 1000);
    }
    CHECK_OK(te);
}
