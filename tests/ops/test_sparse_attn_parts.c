/* test_sparse_attn_parts.c: the backward pass of sparse attention by Hopper's kernels, whose gradients of keys are summed in parts. test_sparse_attn.c checks values. */
#define TE_STATIC
#define TE_IMPLEMENTATION
#include "../te_test.h"

/* Lists with repeated keys, empty slots and numbers outside of the keys; every third query has none. */
static int32_t *sparse_parts_lists(int64_t queries, int64_t n, int64_t keys) {
    int64_t *x = test_integers(queries * n, 7, -3, keys + 3);
    int32_t *list = test_alloc((size_t)(queries * n) * sizeof(int32_t));
    for (int64_t i = 0; i < queries * n; i++) list[i] = i / n % 3 == 2 ? -1 : (int32_t)x[i];
    return list;
}

/* Hopper's kernels with more queries than multiprocessors, and gradients of keys in parts: any number of parts gives the sums of one part but for their order, a second
 * run the same bits, and a sequence the bits that it has alone. */
TE_TEST_DEVICES(sparse_attn_parts) {
    enum { B = 2, S = 150, KV = 40, H = 3, N = 70, D = 512 };
    const int64_t most = te__sparse_partial_bytes, limits[] = {most, most, (int64_t)N * D * 2 * 7, (int64_t)N * D * 2 * 7};
    te_tensor *q = te_tensor_normal(te, TE_BF16, SHAPE(B, S, H, D), 0, 1), *kv = te_tensor_normal(te, TE_BF16, SHAPE(B, KV, D), 0, 1),
              *x = te_tensor_from_host(te, TE_I32, SHAPE(B, S, N), sparse_parts_lists(B * S, N, KV));
    static uint16_t bits[4][B * KV * D], alone[KV * D], of_q[2][B * S * H * D]; /* too large for Windows' stack */
    float *want = NULL;
    if (!te_ctx_is_cuda(te)) SKIP("for the GPU's kernels");
    for (int run = 0; run < COUNT(limits); run++) {
        te_tensor *leaf = te_tensor_set_requires_grad(te_tensor_detach(kv), true), *ql = te_tensor_set_requires_grad(te_tensor_detach(q), true), *y;
        te__sparse_partial_bytes = limits[run];
        y = te_sparse_attention(ql, leaf, x, NULL);
        te_backward_from(y, q);
        te__sparse_partial_bytes = most;
        REQUIRE_OK(te);
        te_tensor_to_host(te_tensor_grad(leaf), bits[run]);
        te_tensor_to_host(te_tensor_grad(ql), of_q[run & 1]);
        if (!want) want = test_read(te_tensor_grad(leaf));
        /* bf16 sums in another order may round to a neighbour */
        else CHECK_TENSOR(te_tensor_grad(leaf), want, 8e-3, 1e-3);
    }
    CHECK_BYTES("one part", bits[0], bits[1], sizeof(bits[0]));
    CHECK_BYTES("many parts", bits[2], bits[3], sizeof(bits[0]));
    CHECK_BYTES("dq", of_q[0], of_q[1], sizeof(of_q[0]));
    te_tensor *leaf = te_tensor_set_requires_grad(te_tensor_contiguous(te_tensor_narrow(te_tensor_detach(kv), 0, 1, 1)), true), *q1 = te_tensor_contiguous(te_tensor_narrow(q, 0, 1, 1));
    te__sparse_partial_bytes = limits[2];
    te_backward_from(te_sparse_attention(q1, leaf, te_tensor_contiguous(te_tensor_narrow(x, 0, 1, 1)), NULL), q1);
    te__sparse_partial_bytes = most;
    REQUIRE_OK(te);
    te_tensor_to_host(te_tensor_grad(leaf), alone);
    CHECK_BYTES("alone", alone, bits[2] + KV * D, sizeof(alone));
}

/* The forward pass by mma.sync, which other chips than Hopper run, against wgmma. */
TE_TEST_DEVICES(sparse_attn_by_mma) {
    static const struct {
        int64_t b, s_q, s_kv, heads, n;
        te_dtype dtype;
        bool sinks;
    } cases[] = {{1, 1, 1, 1, 1, TE_BF16, false}, {2, 7, 90, 64, 130, TE_BF16, true}, {1, 40, 70, 100, 64, TE_F16, true}, {1, 150, 300, 17, 31, TE_BF16, false}, {1, 3, 40, 128, 33, TE_F16, false}};
    if (!te_ctx_is_cuda(te)) SKIP("for the GPU's kernels");
    for (int i = 0; i < COUNT(cases); i++) {
        const int64_t b = cases[i].b, s = cases[i].s_q, n = cases[i].n, heads = cases[i].heads;
        const double step = cases[i].dtype == TE_F16 ? 1e-3 : 8e-3;
        te_op_sparse_attn_fwd_args a = {.q = te_tensor_normal(te, cases[i].dtype, SHAPE(b, s, heads, 512), 0, 1), .kv = te_tensor_normal(te, cases[i].dtype, SHAPE(b, cases[i].s_kv, 512), 0, 1),
                                        .indices = te_tensor_from_host(te, TE_I32, SHAPE(b, s, n), sparse_parts_lists(b * s, n, cases[i].s_kv)),
                                        .sinks = cases[i].sinks ? te_tensor_normal(te, TE_F32, SHAPE(heads), 0, 1) : NULL};
        float *o = NULL, *lse = NULL;
        test_case("case %d", i);
        for (int mma = 0; mma < 2; mma++) {
            a.o = test_guarded(te, cases[i].dtype, SHAPE(b, s, heads, 512)), a.lse = test_guarded(te, TE_F32, SHAPE(b, heads, s));
            te__sparse_no_wgmma = mma;
            te_op_sparse_attn_fwd(te, &a);
            te__sparse_no_wgmma = false;
            REQUIRE_OK(te);
            if (!mma) o = test_read(a.o), lse = test_read(a.lse);
        }
        /* P is rounded to 16 bits in both, but below maxima of other tiles; then o is rounded. Values are of size 1. */
        CHECK_TENSOR(a.o, o, 2 * step, step);
        CHECK_TENSOR(a.lse, lse, 1e-5, 1e-5);
    }
}
