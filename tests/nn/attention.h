/* tests/nn/attention.h: two sequences of different lengths, and tensors for attention over them. Knows nothing of what is tried. */
#ifndef TEST_ATTENTION_H
#define TEST_ATTENTION_H

#include "../dist/ranks.h"

enum { S = 6, S_KV = 9, B = 2, H = 4, G = 2, D = 8, DV = 12, WIDE = 32 };

/* Lengths: two sequences of 4 and 6 queries (all that there are), and of 9 and 5 keys; of self attention, those of queries. */
static TE_MAYBE_UNUSED const int64_t q_lengths[B] = {4, 6}, kv_lengths[B] = {9, 5};

static TE_MAYBE_UNUSED te_tensor *starts(te_ctx *te, const int64_t *length, int64_t gap) {
    const int64_t at[3] = {0, length[0] + gap, length[0] + length[1] + 2 * gap};
    return test_i32(te, SHAPE(3), at);
}
static TE_MAYBE_UNUSED te_tensor *padding(te_ctx *te, const int64_t *length, int64_t s) {
    uint8_t *mask = (uint8_t *)test_alloc((size_t)(B * s));
    for (int64_t i = 0; i < B * s; i++) mask[i] = i % s >= length[i / s];
    return te_tensor_from_host(te, TE_U8, SHAPE(B, 1, 1, s), mask);
}
static TE_MAYBE_UNUSED te_tensor *leaf(te_ctx *te, te_dtype dtype, int ndim, const int64_t *shape, uint64_t seed) {
    return te_tensor_set_requires_grad(test_tensor(te, dtype, ndim, shape, test_normal(test_numel(ndim, shape), seed)), true);
}

#endif /* TEST_ATTENTION_H */
