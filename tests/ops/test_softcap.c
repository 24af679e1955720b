/* test_softcap.c: capped numbers, the softmax of capped scores, attention with a cap: formulas in f64, finite differences, the GPU against the CPU. */
#include "../te_test.h"

/* ---- operations ---- */

TE_TEST_DEVICES(softcap_formula) {
    static const int64_t sizes[] = {1, 7, 512, 513, 4099};
    static const te_dtype formats[] = {TE_F32, TE_BF16, TE_F16};
    for (int i = 0; i < COUNT(sizes); i++)
        for (int f = 0; f < COUNT(formats); f++) {
            int64_t n = sizes[i];
            te_dtype dtype = formats[f];
            float *x = test_rounded(dtype, test_uniform(n, 1, -9, 9), n), *dy = test_rounded(dtype, test_normal(n, 2), n), *y = test_floats(n), *dx = test_floats(n);
            te_op_softcap_args a = {.x = test_tensor(te, dtype, SHAPE(n), x), .y = test_guarded(te, dtype, SHAPE(n)), .cap = 2.5f};
            te_op_softcap_args b = {.x = a.x, .dy = test_tensor(te, dtype, SHAPE(n), dy), .y = test_guarded(te, dtype, SHAPE(n)), .cap = 2.5f};
            test_case("n=%lld %s", (long long)n, te_dtype_name(dtype));
            te_op_softcap(te, &a);
            te_op_softcap(te, &b);
            CHECK_OK(te);
            for (int64_t k = 0; k < n; k++) {
                double t = tanh((double)x[k] / 2.5);
                y[k] = (float)(2.5 * t);
                dx[k] = (float)((double)dy[k] * (1 - t * t));
            }
            /* f32: 1 - t^2 loses what t near 1 has lost; else half a unit in the last place. */
            CHECK_TENSOR(a.y, y, dtype == TE_F32 ? 1e-6 : dtype == TE_F16 ? 1e-3 : 4e-3, 1e-6);
            CHECK_TENSOR(b.y, dx, dtype == TE_F32 ? 1e-5 : dtype == TE_F16 ? 1e-3 : 4e-3, 1e-6);
        }
}

typedef struct score_case {
    int64_t heads, s_q, s_kv;
    te_dtype dtype;
    te_attn_mask mask;
    te_window window;
    float scale, cap;
} score_case;

static bool sees(const score_case *c, int64_t i, int64_t j) {
    int64_t at = i + (c->mask == TE_MASK_CAUSAL_BOTTOM_RIGHT ? c->s_kv - c->s_q : 0);
    if (c->mask != TE_MASK_NONE && j > at) return false;
    if (!c->window.on) return true;
    return (c->window.left < 0 || j >= at - c->window.left) && (c->window.right < 0 || j <= at + c->window.right);
}
static double capped(const score_case *c, double x) { return c->cap > 0 ? (double)c->cap * tanh((double)c->scale * x / (double)c->cap) : (double)c->scale * x; }

/* Probabilities of a row, and with dy its gradient, in f64. */
static void score_row(const score_case *c, int64_t i, const float *x, const float *dy, float *out) {
    double sum = 0, mean = 0;
    for (int64_t j = 0; j < c->s_kv; j++)
        if (sees(c, i, j)) sum += exp(capped(c, (double)x[j]));
    for (int64_t j = 0; j < c->s_kv && dy; j++)
        if (sees(c, i, j)) mean += exp(capped(c, (double)x[j])) / sum * (double)dy[j];
    for (int64_t j = 0; j < c->s_kv; j++) {
        double p = sees(c, i, j) ? exp(capped(c, (double)x[j])) / sum : 0, t = c->cap > 0 ? capped(c, (double)x[j]) / (double)c->cap : 0;
        out[j] = (float)(dy ? p * ((double)dy[j] - mean) * (double)c->scale * (1 - t * t) : p);
    }
}

TE_TEST_DEVICES(capped_softmax_formula) {
    static const int64_t shapes[][3] = {{1, 1, 1}, {2, 5, 5}, {1, 3, 700}, {3, 40, 33}, {1, 1, 1030}, {2, 130, 130}};
    static const te_dtype formats[] = {TE_F32, TE_BF16};
    static const te_window windows[] = {{false, 0, 0}, {true, 2, 0}, {true, 0, 3}, {true, -1, 1}};
    for (int s = 0; s < COUNT(shapes); s++)
        for (int k = 0; k < 24; k++) {
            score_case c = {shapes[s][0], shapes[s][1], shapes[s][2], formats[k % 2], (te_attn_mask)(1 + k / 2 % 3), windows[k % 4], 1.5f, k % 5 == 0 ? 0 : 1.25f};
            int64_t rows = c.heads * c.s_q, n = rows * c.s_kv;
            float *x = test_rounded(c.dtype, test_normal(n, 3), n), *dy = test_rounded(c.dtype, test_normal(n, 4), n), *y = test_floats(n), *dx = test_floats(n);
            te_op_capped_softmax_fwd_args a = {.x = test_tensor(te, c.dtype, SHAPE(c.heads, c.s_q, c.s_kv), x), .y = test_guarded(te, c.dtype, SHAPE(c.heads, c.s_q, c.s_kv)),
                                               .scale = c.scale, .cap = c.cap, .mask = c.mask, .window = c.window};
            te_op_capped_softmax_bwd_args b = {.x = a.x, .dy = test_tensor(te, c.dtype, SHAPE(c.heads, c.s_q, c.s_kv), dy),
                                               .dx = test_guarded(te, c.dtype, SHAPE(c.heads, c.s_q, c.s_kv)), .scale = c.scale, .cap = c.cap, .mask = c.mask, .window = c.window};
            test_case("[%lld, %lld, %lld] %s mask %d window %d %lld %lld cap %g", (long long)c.heads, (long long)c.s_q, (long long)c.s_kv, te_dtype_name(c.dtype), (int)c.mask,
                      c.window.on, (long long)c.window.left, (long long)c.window.right, (double)c.cap);
            te_op_capped_softmax_fwd(te, &a);
            te_op_capped_softmax_bwd(te, &b);
            CHECK_OK(te);
            for (int64_t r = 0; r < rows; r++) {
                score_row(&c, r % c.s_q, x + r * c.s_kv, NULL, y + r * c.s_kv);
                score_row(&c, r % c.s_q, x + r * c.s_kv, dy + r * c.s_kv, dx + r * c.s_kv);
            }
            CHECK_TENSOR(a.y, y, c.dtype == TE_F32 ? 1e-5 : 4e-3, 1e-7); /* exponentials and sums in f32, then the format's rounding */
            CHECK_TENSOR(b.dx, dx, c.dtype == TE_F32 ? 1e-4 : 4e-3, 1e-6);
        }
}

TE_TEST(softcap_refusals) {
    te_ctx *te = test_context("cpu");
    te_tensor *x = te_tensor_zeros(te, TE_F32, SHAPE(2, 3)), *y = te_tensor_zeros(te, TE_F32, SHAPE(2, 3)), *small = te_tensor_zeros(te, TE_F32, SHAPE(3));
    te_op_softcap_args a = {.x = x, .y = y};
    te_op_capped_softmax_fwd_args s = {.x = x, .y = y, .cap = -1};
    te_op_softcap(te, &a);
    CHECK_ERROR(te, TE_ERR_INVALID, "cap is 0; it is positive");
    a.cap = 1, a.y = small;
    te_op_softcap(te, &a);
    CHECK_ERROR(te, TE_ERR_SHAPE, "y is [3] and x is [2, 3]");
    te_op_capped_softmax_fwd(te, &s);
    CHECK_ERROR(te, TE_ERR_INVALID, "cap is -1; it is positive, or 0 for none");
    s.cap = 0, s.mask = TE_MASK_PADDING;
    te_op_capped_softmax_fwd(te, &s);
    CHECK_ERROR(te, TE_ERR_INVALID, "mask is 4");
    s.mask = TE_MASK_DEFAULT, s.window = (te_window){true, -2, 0};
    te_op_capped_softmax_fwd(te, &s);
    CHECK_ERROR(te, TE_ERR_INVALID, "window is -2, 0");
    s.window.on = false, s.x = s.y = small;
    s.y = te_tensor_zeros(te, TE_F32, SHAPE(3));
    te_op_capped_softmax_fwd(te, &s);
    CHECK_ERROR(te, TE_ERR_SHAPE, "x is [3]; [.., queries, keys] is needed");
}

/* ---- functions ---- */

static te_tensor *of_softcap(te_ctx *te, te_tensor *const *in, void *user) { return (void)te, (void)user, te_softcap(in[0], 1.5f); }
static te_tensor *of_concat(te_ctx *te, te_tensor *const *in, void *user) { return (void)te, (void)user, te_concat(in, 3, 1); }

static te_tensor *attend(te_tensor *const *in, float softcap, te_qkv_format format, te_attn_mask mask, te_window window) {
    te_sdpa_desc d = {.format = format, .rule.mask = mask, .rule.window = window, .rule.softmax_scale = 0.7f, .softcap = softcap};
    te_module *m = te_sdpa_create(te_tensor_ctx(in[0]), &d);
    te_forward_args args = {.input = in[0], .key = in[1], .value = in[2]};
    te_tensor *y = te_forward_with(m, &args);
    te_module_destroy(m);
    return y;
}
static te_tensor *of_capped(te_ctx *te, te_tensor *const *in, void *user) { return (void)te, (void)user, attend(in, 0.9f, TE_BSHD, TE_MASK_CAUSAL_BOTTOM_RIGHT, (te_window){true, 3, 0}); }
static te_tensor *of_capped_sbhd(te_ctx *te, te_tensor *const *in, void *user) { return (void)te, (void)user, attend(in, 0.9f, TE_SBHD, TE_MASK_NONE, (te_window){false, 0, 0}); }

TE_TEST(gradients_by_differences) {
    te_ctx *te = test_context("cpu");
    te_tensor *x[3] = {test_tensor(te, TE_F32, SHAPE(3, 5), test_normal(15, 1)), NULL, NULL};
    test_check_gradients(te, of_softcap, 1, x, NULL, 1e-2, 1e-3);
    for (int i = 0; i < 3; i++) x[i] = test_tensor(te, TE_F32, SHAPE(3, i, 2), test_normal(6 * i, 5 + (uint64_t)i));
    test_check_gradients(te, of_concat, 3, x, NULL, 1e-2, 1e-3);
    x[0] = test_tensor(te, TE_F32, SHAPE(2, 4, 4, 3), test_normal(96, 1));
    for (int i = 1; i < 3; i++) x[i] = test_tensor(te, TE_F32, SHAPE(2, 6, 2, 3), test_normal(72, 1 + (uint64_t)i));
    test_check_gradients(te, of_capped, 3, x, NULL, 1e-2, 1e-3);
    x[0] = test_tensor(te, TE_F32, SHAPE(4, 2, 4, 3), test_normal(96, 1));
    for (int i = 1; i < 3; i++) x[i] = test_tensor(te, TE_F32, SHAPE(6, 2, 2, 3), test_normal(72, 1 + (uint64_t)i));
    test_check_gradients(te, of_capped_sbhd, 3, x, NULL, 1e-2, 1e-3);
    CHECK_OK(te);
}

/* A cap far above every score changes nothing: te_attention's results and gradients, of sequences that take many tiles of queries, and of queries that see no key. */
TE_TEST_DEVICES(a_cap_that_is_far_away) {
    static const struct {
        int64_t s_q, s_kv;
        te_attn_mask mask;
        te_window window;
    } cases[] = {{9, 12, TE_MASK_CAUSAL_BOTTOM_RIGHT, {true, 4, 0}},  {9, 12, TE_MASK_NONE, {false, 0, 0}},         {9, 12, TE_MASK_NONE, {true, 2, 3}},
                 {12, 9, TE_MASK_NONE, {true, 2, -1}},                {12, 9, TE_MASK_NONE, {true, -1, 1}},         {12, 9, TE_MASK_CAUSAL, {false, 0, 0}},
                 {12, 5, TE_MASK_CAUSAL, {true, 2, 0}},               {12, 9, TE_MASK_CAUSAL_BOTTOM_RIGHT, {false, 0, 0}}, {5, 12, TE_MASK_CAUSAL, {true, 3, 0}},
                 {600, 600, TE_MASK_CAUSAL, {false, 0, 0}},         {600, 600, TE_MASK_CAUSAL, {true, 100, 0}}, {530, 700, TE_MASK_CAUSAL_BOTTOM_RIGHT, {true, 300, 0}},
                 {530, 100, TE_MASK_CAUSAL, {true, 50, 0}},          {600, 30, TE_MASK_CAUSAL_BOTTOM_RIGHT, {false, 0, 0}}, {600, 600, TE_MASK_NONE, {true, 20, 9}},
                 {600, 40, TE_MASK_NONE, {false, 0, 0}},              {1, 600, TE_MASK_CAUSAL_BOTTOM_RIGHT, {true, INT64_MAX, 0}}};
    for (int c = 0; c < COUNT(cases); c += test_every(5)) {
        const int64_t q[4] = {1, cases[c].s_q, 4, 8}, kv[4] = {1, cases[c].s_kv, 2, 8}, n_q = 32 * cases[c].s_q, n_kv = 16 * cases[c].s_kv;
        float *got[4], *want[4];
        test_case("%lld queries, %lld keys, mask %d, window %d %lld %lld", (long long)cases[c].s_q, (long long)cases[c].s_kv, (int)cases[c].mask, cases[c].window.on,
                  (long long)cases[c].window.left, (long long)cases[c].window.right);
        for (int k = 0; k < 2; k++) {
            te_tensor *x[3] = {test_tensor(te, TE_F32, 4, q, test_normal(n_q, 1)), test_tensor(te, TE_F32, 4, kv, test_normal(n_kv, 2)), test_tensor(te, TE_F32, 4, kv, test_normal(n_kv, 3))};
            for (int i = 0; i < 3; i++) te_tensor_set_requires_grad(x[i], true);
            te_tensor *y = attend(x, k ? 1e4f : 0, TE_BSHD, cases[c].mask, cases[c].window);
            te_backward_from(y, test_tensor(te, TE_F32, 4, q, test_normal(n_q, 4)));
            REQUIRE_OK(te);
            (k ? got : want)[0] = test_copy(test_read(y), n_q);
            for (int i = 0; i < 3; i++) (k ? got : want)[1 + i] = test_copy(test_read(te_tensor_grad(x[i])), te_tensor_numel(x[i]));
        }
        /* CUDA's limit is from when these products were made in TF32. The general kernels, which serve f32 now, multiply in f32: the CPU's limit has not been tried on them. */
        double limit = te_ctx_is_cuda(te) ? 4e-3 : 1e-5;
        CHECK_ERROR_BELOW("y", got[0], want[0], n_q, limit);
        for (int i = 0; i < 3; i++) CHECK_ERROR_BELOW("gradient", got[1 + i], want[1 + i], i ? n_kv : n_q, limit);
    }
}

/* A cap that bends the scores: the formula in f64. */
TE_TEST_DEVICES(capped_attention_formula) {
    enum { LONG = 600, HEAD = 4 };
    const score_case c = {1, LONG, LONG, TE_F32, TE_MASK_CAUSAL, {true, 200, 0}, 0.7f, 0.9f};
    const int64_t shape[4] = {1, LONG, 1, HEAD};
    float *q = test_normal(LONG * HEAD, 1), *k = test_normal(LONG * HEAD, 2), *v = test_normal(LONG * HEAD, 3), *want = test_floats(LONG * HEAD);
    float *row = test_floats(LONG), *p = test_floats(LONG);
    te_tensor *x[3] = {test_tensor(te, TE_F32, 4, shape, q), test_tensor(te, TE_F32, 4, shape, k), test_tensor(te, TE_F32, 4, shape, v)};
    for (int64_t i = 0; i < LONG; i++) {
        for (int64_t j = 0; j < LONG; j++) {
            double dot = 0;
            for (int d = 0; d < HEAD; d++) dot += (double)q[i * HEAD + d] * (double)k[j * HEAD + d];
            row[j] = (float)dot;
        }
        score_row(&c, i, row, NULL, p);
        for (int d = 0; d < HEAD; d++) {
            double sum = 0;
            for (int64_t j = 0; j < LONG; j++) sum += (double)p[j] * (double)v[j * HEAD + d];
            want[i * HEAD + d] = (float)sum;
        }
    }
    CHECK_ERROR_BELOW("y", test_read(attend(x, 0.9f, TE_BSHD, TE_MASK_CAUSAL, c.window)), want, LONG * HEAD, te_ctx_is_cuda(te) ? 4e-3 : 1e-5); /* CUDA: as above; the CPU: sums of 200 products in f32 */
    CHECK_OK(te);
}

/* Memory for some queries' scores, not for all: twice the length takes twice the memory, not four times. */
TE_TEST(capped_attention_memory_is_linear) {
    te_ctx *te = test_context("cpu");
    size_t peak[2];
    for (int k = 0; k < 2; k++) {
        const int64_t shape[4] = {1, 1024 << k, 1, 4};
        te_tensor *x = te_tensor_normal(te, TE_F32, 4, shape, 0, 1), *in[3] = {x, x, x};
        te_no_grad_begin(te);
        te_memory_reset_peak(te);
        const size_t before = te_memory_get_stats(te).allocated;
        attend(in, 0.9f, TE_BSHD, TE_MASK_CAUSAL, (te_window){false, 0, 0});
        peak[k] = te_memory_get_stats(te).peak_allocated - before;
        te_no_grad_end(te);
    }
    REQUIRE_OK(te);
    CHECK_MSG(peak[1] < 2.2 * (double)peak[0], "%lld bytes, then %lld", (long long)peak[0], (long long)peak[1]);
}

/* Sinks of -inf are none; one that is far above every score leaves nothing of the values. */
TE_TEST_DEVICES(sinks) {
    te_tensor *x[3] = {test_tensor(te, TE_F32, SHAPE(1, 5, 4, 8), test_normal(160, 1)), test_tensor(te, TE_F32, SHAPE(1, 5, 2, 8), test_normal(80, 2)),
                       test_tensor(te, TE_F32, SHAPE(1, 5, 2, 8), test_normal(80, 3))};
    const float none[4] = {-INFINITY, -INFINITY, 60, -INFINITY}, *want = test_read(attend(x, 0, TE_BSHD, TE_MASK_CAUSAL, (te_window){false, 0, 0}));
    te_module *m = te_sdpa_create(te, &(te_sdpa_desc){.format = TE_BSHD, .rule.softmax_scale = 0.7f, .rule.softmax_type = TE_SOFTMAX_LEARNABLE, .rule.softmax_offset = test_tensor(te, TE_F32, SHAPE(4), none)});
    te_forward_args args = {.input = x[0], .key = x[1], .value = x[2]};
    const float *got = test_read(te_forward_with(m, &args));
    CHECK_OK(te);
    for (int i = 0; i < 160; i++) CHECK(i / 8 % 4 == 2 ? fabsf(got[i]) < 1e-6f : fabsf(got[i] - want[i]) < 1e-5f);
    te_module_destroy(m);
}

TE_TEST(functions_refuse) {
    te_ctx *te = test_context("cpu");
    te_tensor *a = te_tensor_zeros(te, TE_F32, SHAPE(2, 3)), *b = te_tensor_zeros(te, TE_F32, SHAPE(2, 4)), *c = te_tensor_zeros(te, TE_BF16, SHAPE(2, 3));
    te_tensor *ab[2] = {a, b}, *ac[2] = {a, c}, *none[2] = {a, NULL};
    CHECK(te_concat(ab, 2, 0) == NULL);
    CHECK_ERROR(te, TE_ERR_SHAPE, "f32 [2, 3] and f32 [2, 4] along dimension 0");
    CHECK(te_concat(ac, 2, 0) == NULL);
    CHECK_ERROR(te, TE_ERR_DTYPE, "f32 [2, 3] and bf16 [2, 3]");
    CHECK(te_concat(ab, 2, 2) == NULL);
    CHECK_ERROR(te, TE_ERR_INVALID, "dimension 2 of tensors that have 2");
    CHECK(te_concat(none, 2, 0) == NULL);
    CHECK_ERROR(te, TE_ERR_STATE, "te_concat: tensor 2 of 2 is NULL");
    CHECK(te_concat(NULL, 2, 0) == NULL && te_concat(ab, 0, 0) == NULL);
    CHECK_OK(te);
    CHECK(te_softcap(a, -1) == NULL);
    CHECK_ERROR(te, TE_ERR_INVALID, "cap is -1");
    CHECK(te_sdpa_create(te, &(te_sdpa_desc){.softcap = -2}) == NULL);
    CHECK_ERROR(te, TE_ERR_INVALID, "softcap is -2");
    te_tensor *qkv[3] = {te_tensor_zeros(te, TE_F32, SHAPE(1, 2, 3, 4)), te_tensor_zeros(te, TE_F32, SHAPE(1, 2, 2, 4)), te_tensor_zeros(te, TE_F32, SHAPE(1, 2, 2, 4))};
    CHECK(attend(qkv, 1, TE_BSHD, TE_MASK_CAUSAL, (te_window){false, 0, 0}) == NULL);
    CHECK_ERROR(te, TE_ERR_SHAPE, "q has 3 heads and k has 2");
}
