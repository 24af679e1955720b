/* tests/tape/leaf.h: a tensor of normal numbers that needs a gradient. */
#include "../te_test.h"

static TE_MAYBE_UNUSED te_tensor *leaf(te_ctx *te, int ndim, const int64_t *shape, uint64_t seed) {
    te_tensor *x = test_tensor(te, TE_F32, ndim, shape, test_normal(test_numel(ndim, shape), seed));
    return te_tensor_set_requires_grad(x, true);
}
