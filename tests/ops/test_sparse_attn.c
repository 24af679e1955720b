/* test_sparse_attn.c: attention by lists of keys: the formula in f64, the GPU against it, finite differences, odd and empty sizes, refusals, the lists of a window. */
#include "../te_test.h"

typedef struct sparse_case {
    int64_t b, s_q, s_kv, heads, n, d, d_v;
    te_dtype dtype;
    bool sinks;
} sparse_case;

/* Lists with repeated keys, empty slots and numbers outside of the keys; every third query has none. */
static int32_t *lists(const sparse_case *c) {
    int64_t n = c->b * c->s_q * c->n, *x = test_integers(n, 7, -3, c->s_kv + 3);
    int32_t *list = test_alloc((size_t)(n + 1) * sizeof(int32_t));
    for (int64_t i = 0; i < n; i++) list[i] = i / c->n % 3 == 2 ? -1 : (int32_t)x[i];
    return list;
}

/* o [b, s_q, H, d_v], lse [b, H, s_q] and, with dy, the gradients, in f64. */
static void formula(const sparse_case *c, float scale, const float *q, const float *kv, const int32_t *list, const float *sinks, const float *dy, float *o, float *lse, float *dq, float *dkv,
                    float *dsinks) {
    double *sum_kv = test_doubles(c->b * c->s_kv * c->d), *sum_sinks = test_doubles(c->heads), *p = test_doubles(c->n + 1), *row = test_doubles(c->d);
    for (int64_t b = 0; b < c->b; b++)
        for (int64_t i = 0; i < c->s_q; i++)
            for (int64_t h = 0; h < c->heads; h++) {
                const int64_t at = (b * c->s_q + i) * c->heads + h;
                const int32_t *l = list + (b * c->s_q + i) * c->n;
                double sum = sinks ? exp((double)sinks[h]) : 0, delta = 0;
                bool any = false;
                for (int64_t k = 0; k < c->n; k++) {
                    p[k] = 0;
                    if (l[k] < 0 || l[k] >= c->s_kv) continue;
                    any = true;
                    for (int64_t e = 0; e < c->d; e++) p[k] += (double)q[at * c->d + e] * (double)kv[(b * c->s_kv + l[k]) * c->d + e];
                    sum += p[k] = exp(p[k] * (double)scale);
                }
                lse[(b * c->heads + h) * c->s_q + i] = any || sinks ? (float)log(sum) : -INFINITY;
                for (int64_t e = 0; e < c->d; e++) row[e] = 0;
                for (int64_t k = 0; k < c->n; k++)
                    for (int64_t e = 0; p[k] > 0 && e < c->d_v; e++) row[e] += p[k] / sum * (double)kv[(b * c->s_kv + l[k]) * c->d + e];
                for (int64_t e = 0; e < c->d_v; e++) o[at * c->d_v + e] = (float)row[e];
                for (int64_t e = 0; e < c->d_v; e++) delta += row[e] * (double)dy[at * c->d_v + e];
                for (int64_t e = 0; e < c->d; e++) row[e] = 0;
                for (int64_t k = 0; k < c->n; k++) {
                    double dp = 0, ds;
                    const float *key = kv + (b * c->s_kv + l[k]) * c->d;
                    if (p[k] <= 0) continue;
                    for (int64_t e = 0; e < c->d_v; e++) dp += (double)dy[at * c->d_v + e] * (double)key[e];
                    ds = p[k] / sum * (dp - delta) * (double)scale;
                    for (int64_t e = 0; e < c->d; e++) row[e] += ds * (double)key[e];
                    for (int64_t e = 0; e < c->d; e++) sum_kv[(b * c->s_kv + l[k]) * c->d + e] += ds * (double)q[at * c->d + e];
                    for (int64_t e = 0; e < c->d_v; e++) sum_kv[(b * c->s_kv + l[k]) * c->d + e] += p[k] / sum * (double)dy[at * c->d_v + e];
                }
                for (int64_t e = 0; e < c->d; e++) dq[at * c->d + e] = (float)row[e];
                if (sinks) sum_sinks[h] -= exp((double)sinks[h]) / sum * delta;
            }
    for (int64_t i = 0; i < c->b * c->s_kv * c->d; i++) dkv[i] = (float)sum_kv[i];
    for (int64_t h = 0; h < c->heads; h++) dsinks[h] = (float)sum_sinks[h];
}

TE_TEST_DEVICES(sparse_attn_formula) {
    static const sparse_case cases[] = {{1, 1, 1, 1, 1, 1, 1, TE_F32, false},     {2, 5, 7, 3, 4, 8, 8, TE_F32, true},       {1, 9, 70, 10, 37, 33, 33, TE_F32, true},
                                        {2, 40, 50, 2, 65, 64, 20, TE_F32, true}, {1, 7, 40, 17, 9, 130, 130, TE_BF16, true}, {1, 6, 11, 2, 33, 576, 512, TE_BF16, false},
                                        {2, 3, 5, 4, 6, 36, 36, TE_F16, true},    {1, 4, 6, 2, 0, 8, 8, TE_F32, true},       {1, 3, 0, 2, 4, 8, 8, TE_F32, false},
                                        {1, 0, 5, 2, 4, 8, 8, TE_F32, true},      {0, 2, 3, 1, 2, 4, 4, TE_F32, false},
                                        /* 512 channels: tensor cores on Hopper, by 64 heads and 64 keys */
                                        {1, 1, 1, 1, 1, 512, 512, TE_BF16, false}, {2, 4, 90, 64, 130, 512, 512, TE_BF16, true}, {1, 5, 70, 17, 64, 512, 512, TE_F16, true},
                                        {1, 2, 300, 128, 65, 512, 512, TE_BF16, true}, {1, 4, 40, 100, 31, 512, 512, TE_F16, false}};
    for (int t = 0; t < COUNT(cases); t++) {
        const sparse_case *c = &cases[t];
        if (!te_ctx_is_cuda(te) && test_samples() && c->d == 512 && c->heads > 1) continue; /* as on the CPU all others are */
        const float scale = (float)(0.8 / sqrt((double)c->d));
        const int64_t nq = c->b * c->s_q * c->heads * c->d, no = c->b * c->s_q * c->heads * c->d_v, nk = c->b * c->s_kv * c->d, rows = c->b * c->heads * c->s_q;
        float *q = test_rounded(c->dtype, test_normal(nq, 1), nq), *kv = test_rounded(c->dtype, test_normal(nk, 2), nk), *dy = test_rounded(c->dtype, test_normal(no, 3), no);
        float *sinks = test_normal(c->heads, 4), *o = test_floats(no), *lse = test_floats(rows), *dq = test_floats(nq), *dkv = test_floats(nk), *dsinks = test_floats(c->heads);
        const double rtol = c->dtype == TE_F32 ? 2e-5 : c->dtype == TE_F16 ? 2e-3 : 1.6e-2, atol = c->dtype == TE_F32 ? te_ctx_is_cuda(te) ? 5e-5 : 1e-5 : c->dtype == TE_F16 ? 2e-3 : 2e-2;
        int32_t *list = lists(c);
        te_op_sparse_attn_fwd_args a = {.q = test_tensor(te, c->dtype, SHAPE(c->b, c->s_q, c->heads, c->d), q), .kv = test_tensor(te, c->dtype, SHAPE(c->b, c->s_kv, c->d), kv),
                                        .indices = te_tensor_from_host(te, TE_I32, SHAPE(c->b, c->s_q, c->n), list), .sinks = c->sinks ? test_tensor(te, TE_F32, SHAPE(c->heads), sinks) : NULL,
                                        .o = test_guarded(te, c->dtype, SHAPE(c->b, c->s_q, c->heads, c->d_v)), .lse = test_guarded(te, TE_F32, SHAPE(c->b, c->heads, c->s_q)),
                                        .softmax_scale = scale};
        te_op_sparse_attn_bwd_args g = {.q = a.q, .kv = a.kv, .indices = a.indices, .sinks = a.sinks, .o = a.o, .lse = a.lse, .d_o = test_tensor(te, c->dtype, SHAPE(c->b, c->s_q, c->heads, c->d_v), dy),
                                        .dq = test_guarded(te, c->dtype, SHAPE(c->b, c->s_q, c->heads, c->d)), .dkv = test_guarded(te, c->dtype, SHAPE(c->b, c->s_kv, c->d)),
                                        .dsinks = c->sinks ? test_guarded(te, TE_F32, SHAPE(c->heads)) : NULL, .softmax_scale = scale};
        test_case("b=%lld s_q=%lld s_kv=%lld H=%lld n=%lld d=%lld, %lld %s", (long long)c->b, (long long)c->s_q, (long long)c->s_kv, (long long)c->heads, (long long)c->n, (long long)c->d,
                  (long long)c->d_v, te_dtype_name(c->dtype));
        te_op_sparse_attn_fwd(te, &a);
        te_op_sparse_attn_bwd(te, &g);
        CHECK_OK(te);
        formula(c, scale, q, kv, list, c->sinks ? sinks : NULL, dy, o, lse, dq, dkv, dsinks);
        /* 16-bit formats: the output is rounded once, and the gradients read the rounded output in delta. f32: sums in f32 on the GPU, of up to 576 products. */
        CHECK_TENSOR(a.o, o, rtol, atol);
        CHECK_TENSOR(a.lse, lse, 1e-5, 1e-5);
        CHECK_TENSOR(g.dq, dq, rtol, atol);
        CHECK_TENSOR(g.dkv, dkv, rtol, 2 * atol);
        if (c->sinks) CHECK_TENSOR(g.dsinks, dsinks, c->dtype == TE_F32 ? 1e-4 : 2e-2, c->dtype == TE_F32 ? 1e-4 : 3e-2);
    }
}

TE_TEST(sparse_attn_choice) {
    te_ctx *te = test_context("cpu");
    static const struct {
        te_dtype dtype;
        int64_t d;
        const char *device, *why, *kernels;
    } cases[] = {{TE_BF16, 512, "sm_90", "tensor cores: wgmma on gathered keys", "sparse_attn_fwd_hopper"}, {TE_F16, 512, "sm_90", "tensor cores: wgmma", "sparse_attn_fwd_hopper"},
                 {TE_F32, 512, "sm_90", "not tensor cores; eight heads of a query share what is read of its keys: f32", "sparse_attn_query"},
                 {TE_BF16, 576, "sm_90", "other than 512 channels", "sparse_attn_query"}, {TE_BF16, 512, "sm_80", "mma.sync and not wgmma: the chip is no Hopper", "sparse_attn_fwd_mma"}};
    for (int i = 0; i < COUNT(cases); i++) {
        te_op_sparse_attn_fwd_args a = {.q = te_tensor_describe(te, cases[i].dtype, SHAPE(1, 4, 64, cases[i].d)), .kv = te_tensor_describe(te, cases[i].dtype, SHAPE(1, 9, cases[i].d)),
                                        .indices = te_tensor_describe(te, TE_I32, SHAPE(1, 4, 5)), .o = te_tensor_describe(te, cases[i].dtype, SHAPE(1, 4, 64, 512)),
                                        .lse = te_tensor_describe(te, TE_F32, SHAPE(1, 64, 4))};
        te_explanation e;
        test_case("%s, %lld channels, %s", te_dtype_name(cases[i].dtype), (long long)cases[i].d, cases[i].device);
        REQUIRE(te_explain(te, TE_OP_SPARSE_ATTN_FWD, &a, cases[i].device, &e) == TE_OK);
        CHECK_STR(e.why, cases[i].why);
        CHECK_STR(e.kernels, cases[i].kernels);
    }
}

/* Each sum has one order: a second run gives the same bits. */
TE_TEST_DEVICES(sparse_attn_is_deterministic) {
    const sparse_case c = {2, 70, 33, 4, 20, 40, 40, TE_BF16, true};
    te_tensor *q = te_tensor_normal(te, TE_BF16, SHAPE(2, 70, 4, 40), 0, 1), *kv = te_tensor_normal(te, TE_BF16, SHAPE(2, 33, 40), 0, 1), *x = te_tensor_from_host(te, TE_I32, SHAPE(2, 70, 20), lists(&c));
    te_sparse_attention_desc d = {.sinks = te_tensor_normal(te, TE_F32, SHAPE(4), 0, 1)};
    uint16_t bits[2][2 * 33 * 40];
    for (int run = 0; run < 2; run++) {
        te_tensor *leaf = te_tensor_set_requires_grad(te_tensor_detach(kv), true), *y;
        y = te_sparse_attention(q, leaf, x, &d);
        te_backward_from(y, q);
        REQUIRE_OK(te);
        te_tensor_to_host(te_tensor_grad(leaf), bits[run]);
    }
    CHECK_BYTES("dkv", bits[0], bits[1], sizeof(bits[0]));
}

static te_tensor *of_sparse(te_ctx *te, te_tensor *const *in, void *user) {
    te_sparse_attention_desc d = {.sinks = in[2], .softmax_scale = 0.6f, .v_dim = 4};
    (void)te;
    return te_sparse_attention(in[0], in[1], (te_tensor *)user, &d);
}
TE_TEST(sparse_attn_gradients) {
    te_ctx *te = test_context("cpu");
    static const int32_t list[] = {0, 1, -1, 3, 3, 0, -1, -1, -1, 2, 9, 1, 1, 0, 2, 4, 4, 3};
    te_tensor *x[3] = {test_tensor(te, TE_F32, SHAPE(2, 3, 2, 5), test_normal(60, 1)), test_tensor(te, TE_F32, SHAPE(2, 5, 5), test_normal(50, 2)), test_tensor(te, TE_F32, SHAPE(2), test_normal(2, 3))};
    test_check_gradients(te, of_sparse, 3, x, te_tensor_from_host(te, TE_I32, SHAPE(2, 3, 3), list), 1e-2, 1e-3);
    CHECK_OK(te);
}

/* Strided queries, keys and results: q and kv are parts of one packed projection. */
TE_TEST_DEVICES(sparse_attn_strided) {
    static const int32_t list[] = {0, -1, 1, 0, 2, 1};
    te_tensor *all = te_tensor_normal(te, TE_F32, SHAPE(1, 3, 3, 8), 0, 1), *q = te_tensor_narrow(all, 2, 0, 2), *kv = te_tensor_narrow(all, 2, 2, 1), *x, *a, *b;
    x = te_tensor_from_host(te, TE_I32, SHAPE(1, 3, 2), list);
    a = te_sparse_attention(te_tensor_contiguous(q), te_tensor_view(te_tensor_contiguous(kv), 3, (const int64_t[]){1, 3, 8}), x, NULL);
    kv = te_tensor_narrow(te_tensor_view(all, 3, (const int64_t[]){1, 3, 24}), 2, 16, 8);
    b = te_sparse_attention(q, kv, x, NULL);
    REQUIRE_OK(te);
    CHECK_BYTES("o", test_read(a), test_read(b), 48 * sizeof(float));
}

/* The clamp at -1e30: a row whose scores are all far below it is as one without keys, and sinks beyond every score do not overflow. */
TE_TEST_DEVICES(sparse_attn_extremes) {
    static const int32_t list[] = {0, 0};
    static const float far_below[] = {-3e38f}, one[] = {1}, high[] = {1000};
    te_tensor *q = test_tensor(te, TE_F32, SHAPE(1, 1, 1, 1), far_below), *kv = test_tensor(te, TE_F32, SHAPE(1, 1, 1), one), *x = te_tensor_from_host(te, TE_I32, SHAPE(1, 1, 2), list);
    te_sparse_attention_desc d = {.sinks = test_tensor(te, TE_F32, SHAPE(1), high), .softmax_scale = 1};
    te_tensor *y = te_sparse_attention(q, kv, x, &d), *z = te_sparse_attention(test_tensor(te, TE_F32, SHAPE(1, 1, 1, 1), one), kv, x, &d);
    REQUIRE_OK(te);
    CHECK(test_read(y)[0] == 0);
    CHECK(test_read(z)[0] == 0); /* 2 e^(1 - 1000) is 0 in f32 */
    /* a sink of -inf, which is none, beside a query without keys: every gradient is 0 */
    static const int32_t no_keys[] = {-1, -1};
    static const float none[] = {-INFINITY};
    te_op_sparse_attn_fwd_args f = {.q = q, .kv = kv, .indices = te_tensor_from_host(te, TE_I32, SHAPE(1, 1, 2), no_keys), .sinks = test_tensor(te, TE_F32, SHAPE(1), none),
                                    .o = te_tensor_zeros(te, TE_F32, SHAPE(1, 1, 1, 1)), .lse = te_tensor_zeros(te, TE_F32, SHAPE(1, 1, 1)), .softmax_scale = 1};
    te_op_sparse_attn_bwd_args g = {.q = q, .kv = kv, .indices = f.indices, .sinks = f.sinks, .o = f.o, .lse = f.lse, .d_o = test_tensor(te, TE_F32, SHAPE(1, 1, 1, 1), one),
                                    .dq = test_guarded(te, TE_F32, SHAPE(1, 1, 1, 1)), .dkv = test_guarded(te, TE_F32, SHAPE(1, 1, 1)), .dsinks = test_guarded(te, TE_F32, SHAPE(1)),
                                    .softmax_scale = 1};
    te_op_sparse_attn_fwd(te, &f);
    te_op_sparse_attn_bwd(te, &g);
    REQUIRE_OK(te);
    CHECK(test_read(f.lse)[0] == -INFINITY);
    CHECK(test_read(g.dq)[0] == 0 && test_read(g.dkv)[0] == 0 && test_read(g.dsinks)[0] == 0);
}

TE_TEST(sparse_window_lists) {
    te_ctx *te = test_context("cpu");
    te_sparse_window_desc d = {.batch = 2, .seq_len = 5, .window = 2, .num_compressed = 2, .ratio = 2};
    static const int32_t want[5][5] = {{-1, -1, 0, -1, -1}, {-1, 0, 1, 5, -1}, {0, 1, 2, 5, -1}, {1, 2, 3, 5, 6}, {2, 3, 4, 5, 6}};
    int32_t got[2][5][5], wide[4];
    te_tensor *x = te_sparse_window_indices(te, &d);
    REQUIRE_OK(te);
    REQUIRE(te_tensor_numel(x) == 50 && te_tensor_shape(x)[2] == 5);
    te_tensor_to_host(x, got);
    for (int b = 0; b < 2; b++) CHECK_BYTES("list", got[b], want, sizeof(want));
    d = (te_sparse_window_desc){.batch = 1, .seq_len = 2, .window = 900};
    x = te_sparse_window_indices(te, &d);
    te_tensor_to_host(x, wide);
    CHECK(wide[0] == -1 && wide[1] == 0 && wide[2] == 0 && wide[3] == 1);
    d.window = -1;
    CHECK(!te_sparse_window_indices(te, &d));
    CHECK_ERROR(te, TE_ERR_INVALID, "window -1");
    d.window = 1, d.num_compressed = 3;
    CHECK(!te_sparse_window_indices(te, &d));
    CHECK_ERROR(te, TE_ERR_INVALID, "ratio 0");
    CHECK(!te_sparse_window_indices(te, NULL));
    CHECK_ERROR(te, TE_ERR_INVALID, "te_sparse_window_indices");
}

/* Causal attention with a window, by lists and by te_attention with one head of keys. */
TE_TEST_DEVICES(sparse_window_is_attention) {
    te_tensor *q = te_tensor_normal(te, TE_F32, SHAPE(2, 37, 3, 16), 0, 1), *kv = te_tensor_normal(te, TE_F32, SHAPE(2, 37, 16), 0, 1), *k = te_tensor_view(kv, 4, (const int64_t[]){2, 37, 1, 16});
    te_sparse_window_desc w = {.batch = 2, .seq_len = 37, .window = 8};
    te_attn_desc d = {.format = TE_BSHD, .rule.window = {true, 8, 0}};
    te_tensor *y = te_sparse_attention(q, kv, te_sparse_window_indices(te, &w), NULL), *z = te_attention(q, k, k, &d);
    REQUIRE_OK(te);
    CHECK_TENSOR(y, test_read(z), 1e-5, 1e-5); /* two orders of sums in f32 */
}

TE_TEST(sparse_attn_refusals) {
    te_ctx *te = test_context("cpu");
    te_tensor *q = te_tensor_zeros(te, TE_F32, SHAPE(1, 2, 3, 4)), *kv = te_tensor_zeros(te, TE_F32, SHAPE(1, 5, 4)), *x = te_tensor_full(te, TE_I32, SHAPE(1, 2, 2), 0);
    te_op_sparse_attn_fwd_args a = {.q = q, .kv = kv, .indices = x, .o = te_tensor_zeros(te, TE_F32, SHAPE(1, 2, 3, 4))};
    te_op_sparse_attn_bwd_args g = {.q = q, .kv = kv, .indices = x, .o = a.o, .lse = te_tensor_zeros(te, TE_F32, SHAPE(1, 3, 2)), .d_o = a.o, .dq = te_tensor_zeros(te, TE_F32, SHAPE(1, 2, 3, 4)),
                                    .dkv = te_tensor_zeros(te, TE_F32, SHAPE(1, 5, 4)), .dsinks = te_tensor_zeros(te, TE_F32, SHAPE(3))};
    te_op_sparse_attn_bwd(te, &g);
    CHECK_ERROR(te, TE_ERR_INVALID, "dsinks is given and sinks is NULL");
    a.kv = te_tensor_zeros(te, TE_F32, SHAPE(1, 5, 3));
    te_op_sparse_attn_fwd(te, &a);
    CHECK_ERROR(te, TE_ERR_SHAPE, "q is [1, 2, 3, 4], kv [1, 5, 3], indices [1, 2, 2] and o [1, 2, 3, 4]");
    a.kv = kv, a.o = te_tensor_zeros(te, TE_F32, SHAPE(1, 2, 12));
    te_op_sparse_attn_fwd(te, &a);
    CHECK_ERROR(te, TE_ERR_SHAPE, "o [1, 2, 12]; [b, s_q, H, d], [b, s_kv, d], [b, s_q, n] and [b, s_q, H, d_v] are needed");
    a.kv = kv, a.o = te_tensor_zeros(te, TE_F32, SHAPE(1, 2, 3, 5));
    te_op_sparse_attn_fwd(te, &a);
    CHECK_ERROR(te, TE_ERR_UNSUPPORTED, "keys have 4 channels and values 5; 1 to 576 are possible");
    a.o = te_tensor_zeros(te, TE_F32, SHAPE(1, 2, 2, 4));
    te_op_sparse_attn_fwd(te, &a);
    CHECK_ERROR(te, TE_ERR_SHAPE, "o is [1, 2, 2, 4]; with this q, kv and o it must be [1, 2, 3, 4]");
    CHECK(!te_sparse_attention(q, NULL, x, NULL));
    te_clear_error(te);
    a.o = te_tensor_zeros(te, TE_F32, SHAPE(1, 2, 3, 4)), a.indices = te_tensor_zeros(te, TE_I64, SHAPE(1, 2, 2));
    te_op_sparse_attn_fwd(te, &a);
    CHECK_ERROR(te, TE_ERR_DTYPE, "indices is i64");
}
