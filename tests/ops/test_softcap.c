/* test_softcap.c: capped numbers, and attention with a cap: formulas in f64, and finite differences. */
#include "../te_test.h"
#include "attn_keep.h"

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

TE_TEST(softcap_refusals) {
    te_ctx *te = test_context("cpu");
    te_tensor *x = te_tensor_zeros(te, TE_F32, SHAPE(2, 3)), *y = te_tensor_zeros(te, TE_F32, SHAPE(2, 3)), *small = te_tensor_zeros(te, TE_F32, SHAPE(3));
    te_op_softcap_args a = {.x = x, .y = y};
    te_op_softcap(te, &a);
    CHECK_ERROR(te, TE_ERR_INVALID, "cap is 0; it is positive");
    a.cap = 1, a.y = small;
    te_op_softcap(te, &a);
    CHECK_ERROR(te, TE_ERR_SHAPE, "y is [3] and x is [2, 3]");
}

/* ---- functions ---- */

/* Attention of f32 tensors is computed in f32 on both devices, on CUDA by the general kernels. A score, of a few units,
 * comes from a tanh within 6e-7 of itself (tanh.h), and goes into an exponential of 2 ulp: P is off by up to 2e-6 of
 * itself. Sums of up to 600 terms add sqrt(600) half ulps, 1.5e-6, and dP - D, which cancels, makes a gradient's error a
 * few times as large. The CPU, which sums in f64, is off by 3e-7. */
#define IN_F32 1e-5

static te_tensor *of_softcap(te_ctx *te, te_tensor *const *in, void *user) { return (void)te, (void)user, te_softcap(in[0], 1.5f); }
static te_tensor *of_concat(te_ctx *te, te_tensor *const *in, void *user) { return (void)te, (void)user, te_concat(in, 3, 1); }

static te_tensor *attend(te_tensor *const *in, float softcap, te_qkv_format format, te_attn_mask mask, te_window window) {
    te_sdpa_desc d = {.format = format, .rule.mask = mask, .rule.window = window, .rule.softmax_scale = 0.7f, .rule.softcap = softcap};
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
    for (int c = 0; c < COUNT(cases); c += test_every_odd(2)) {
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
        CHECK_ERROR_BELOW("y", got[0], want[0], n_q, IN_F32);
        for (int i = 0; i < 3; i++) CHECK_ERROR_BELOW("gradient", got[1 + i], want[1 + i], i ? n_kv : n_q, IN_F32);
    }
}

/* ---- a cap that bends the scores: the formula in f64 ---- */

/* Attention of one sequence: q, dy [s_q, heads, d], k, v [s_kv, groups, d]. bias and keep are [heads, s_q, s_kv], NULL:
 * none; keep is what dropout multiplies P by. sink: the exponents, [heads], that the softmax has in its denominator. */
typedef struct formula {
    int64_t s_q, s_kv, heads, groups, d;
    te_attn_mask mask;
    te_window window;
    float scale, cap;
    const float *q, *k, *v, *dy, *bias, *keep, *sink;
    float *y, *dq, *dk, *dv, *dbias, *dsink; /* by attention_in_f64 */
    double most_ds, most_dbias;              /* the largest gradients of scaled products, and of scores */
} formula;

static bool sees(const formula *c, int64_t i, int64_t j) {
    int64_t at = i + (c->mask == TE_MASK_CAUSAL_BOTTOM_RIGHT ? c->s_kv - c->s_q : 0);
    if (c->mask != TE_MASK_NONE && j > at) return false;
    if (!c->window.on) return true;
    return (c->window.left < 0 || j >= at - c->window.left) && (c->window.right < 0 || j <= at + c->window.right);
}
static double dot(const float *x, const float *y, int64_t n) {
    double sum = 0;
    for (int64_t i = 0; i < n; i++) sum += (double)x[i] * (double)y[i];
    return sum;
}
static double *zeros(int64_t n) { return (double *)test_alloc((size_t)n * sizeof(double)); }
static float *as_floats(const double *x, int64_t n) {
    float *y = test_floats(n);
    for (int64_t i = 0; i < n; i++) y[i] = (float)x[i];
    return y;
}
static void attention_in_f64(formula *c) {
    const int64_t d = c->d, n_q = c->s_q * c->heads * d, n_kv = c->s_kv * c->groups * d, n_p = c->heads * c->s_q * c->s_kv;
    double *y = zeros(n_q), *dq = zeros(n_q), *dk = zeros(n_kv), *dv = zeros(n_kv), *dbias = zeros(n_p), *dsink = zeros(c->heads);
    double *p = zeros(c->s_kv), *dp = zeros(c->s_kv), *slope = zeros(c->s_kv);
    for (int64_t h = 0; h < c->heads; h++)
        for (int64_t i = 0; i < c->s_q; i++) {
            const int64_t q = (i * c->heads + h) * d, first = (h * c->s_q + i) * c->s_kv; /* of the row in the tables */
            const double sink = c->sink ? exp((double)c->sink[h]) : 0;
            double sum = sink, delta = 0;
            for (int64_t j = 0; j < c->s_kv; j++) {
                const int64_t k = (j * c->groups + h / (c->heads / c->groups)) * d;
                const double t = tanh((double)c->scale * dot(c->q + q, c->k + k, d) / (double)c->cap);
                slope[j] = 1 - t * t;
                p[j] = sees(c, i, j) ? exp((double)c->cap * t + (c->bias ? (double)c->bias[first + j] : 0)) : 0;
                sum += p[j];
            }
            for (int64_t j = 0; j < c->s_kv; j++) {
                const int64_t k = (j * c->groups + h / (c->heads / c->groups)) * d;
                const double keep = c->keep ? (double)c->keep[first + j] : 1;
                p[j] /= sum;
                dp[j] = c->dy ? keep * dot(c->dy + q, c->v + k, d) : 0;
                delta += p[j] * dp[j];
                for (int64_t x = 0; x < d; x++) {
                    y[q + x] += keep * p[j] * (double)c->v[k + x];
                    if (c->dy) dv[k + x] += keep * p[j] * (double)c->dy[q + x];
                }
            }
            dsink[h] -= sink / sum * delta;
            for (int64_t j = 0; c->dy && j < c->s_kv; j++) {
                const int64_t k = (j * c->groups + h / (c->heads / c->groups)) * d;
                const double ds = p[j] * (dp[j] - delta);
                dbias[first + j] = ds; /* the bias is added to what is capped */
                c->most_dbias = fmax(c->most_dbias, fabs(ds));
                c->most_ds = fmax(c->most_ds, fabs(ds * slope[j]));
                for (int64_t x = 0; x < d; x++) {
                    dq[q + x] += (double)c->scale * ds * slope[j] * (double)c->k[k + x];
                    dk[k + x] += (double)c->scale * ds * slope[j] * (double)c->q[q + x];
                }
            }
        }
    c->y = as_floats(y, n_q), c->dq = as_floats(dq, n_q), c->dk = as_floats(dk, n_kv), c->dv = as_floats(dv, n_kv);
    c->dbias = as_floats(dbias, n_p), c->dsink = as_floats(dsink, c->heads);
}
/* With normal numbers of that size. */
static formula formula_of(int64_t s_q, int64_t s_kv, int64_t heads, int64_t groups, int64_t d, float cap) {
    formula c;
    memset(&c, 0, sizeof c);
    c.s_q = s_q, c.s_kv = s_kv, c.heads = heads, c.groups = groups, c.d = d, c.cap = cap;
    c.mask = TE_MASK_CAUSAL_BOTTOM_RIGHT;
    c.scale = 0.7f; /* that of attend() */
    c.q = test_normal(s_q * heads * d, 1), c.dy = test_normal(s_q * heads * d, 4);
    c.k = test_normal(s_kv * groups * d, 2), c.v = test_normal(s_kv * groups * d, 3);
    return c;
}
/* SDPA's results and gradients. */
static void check_sdpa(te_ctx *te, formula *c, const te_attn_rule *rule) {
    te_tensor *x[3] = {test_tensor(te, TE_F32, SHAPE(1, c->s_q, c->heads, c->d), c->q),
                       test_tensor(te, TE_F32, SHAPE(1, c->s_kv, c->groups, c->d), c->k),
                       test_tensor(te, TE_F32, SHAPE(1, c->s_kv, c->groups, c->d), c->v)};
    const int64_t n_q = te_tensor_numel(x[0]), n_kv = te_tensor_numel(x[1]);
    te_sdpa_desc desc = {.format = TE_BSHD, .rule = *rule};
    te_module *m;
    uint64_t seed, offset;
    desc.rule.mask = c->mask, desc.rule.window = c->window, desc.rule.softmax_scale = c->scale, desc.rule.softcap = c->cap;
    m = te_sdpa_create(te, &desc);
    for (int i = 0; i < 3; i++) te_tensor_set_requires_grad(x[i], true);
    te_rng_get(te, &seed, &offset);
    if (rule->dropout_p > 0) c->keep = attn_keep(rule->dropout_p, seed, offset, c->heads * c->s_q, c->s_kv);
    attention_in_f64(c);
    te_tensor *y = te_forward_with(m, &(te_forward_args){.input = x[0], .key = x[1], .value = x[2]});
    te_backward_from(y, test_tensor(te, TE_F32, 4, te_tensor_shape(x[0]), c->dy));
    REQUIRE_OK(te);
    CHECK_ERROR_BELOW("y", test_read(y), c->y, n_q, IN_F32);
    CHECK_ERROR_BELOW("dq", test_read(te_tensor_grad(x[0])), c->dq, n_q, IN_F32);
    CHECK_ERROR_BELOW("dk", test_read(te_tensor_grad(x[1])), c->dk, n_kv, IN_F32);
    CHECK_ERROR_BELOW("dv", test_read(te_tensor_grad(x[2])), c->dv, n_kv, IN_F32);
    if (rule->softmax_offset)
        CHECK_ERROR_BELOW("dsoftmax_offset", test_read(te_tensor_grad(rule->softmax_offset)), c->dsink, c->heads, IN_F32);
    te_module_destroy(m);
}

TE_TEST_DEVICES(capped_attention_formula) {
    formula c = formula_of(600, 600, 1, 1, 4, 0.9f);
    c.mask = TE_MASK_CAUSAL, c.window = (te_window){true, 200, 0};
    check_sdpa(te, &c, &(te_attn_rule){0});
}

/* Dropout behind a cap, of which the backward pass draws the same bits: what is dropped has a share in the softmax's sum,
 * and none in y and dv. */
TE_TEST_DEVICES(capped_attention_with_dropout) {
    formula c = formula_of(17, 40, 4, 2, 8, 0.9f);
    te_seed(te, 11);
    check_sdpa(te, &c, &(te_attn_rule){.dropout_p = 0.3f});
}

/* Sinks are exponents like scores, but are not capped: one is above the cap. Off by one has exponents of 0. */
TE_TEST_DEVICES(capped_attention_with_sinks) {
    static const float learned[4] = {-1, 0.5f, 2.5f, 0}, zero[4] = {0};
    for (int k = 0; k < 2; k++) {
        formula c = formula_of(17, 40, 4, 2, 8, 0.9f);
        te_attn_rule rule = {.softmax_type = k ? TE_SOFTMAX_OFF_BY_ONE : TE_SOFTMAX_LEARNABLE};
        if (!k) rule.softmax_offset = te_tensor_set_requires_grad(test_tensor(te, TE_F32, SHAPE(4), learned), true);
        c.sink = k ? zero : learned;
        test_case("%s", k ? "off by one" : "learned");
        check_sdpa(te, &c, &rule);
    }
}

/* FP8 attention: dP's scale is of the gradients of products, which have the cap's derivative. Those of the bias lack it,
 * and are larger here: rounded by that scale they would saturate. */
TE_TEST_DEVICES(capped_fp8_attention_does_not_round_the_gradient_of_a_bias) {
    enum { HEADS = 2, S_Q = 19, S_KV = 37, D = 8 };
    formula c = formula_of(S_Q, S_KV, HEADS, HEADS, D, 0.25f);
    const int64_t q[4] = {1, S_Q, HEADS, D}, kv[4] = {1, S_KV, HEADS, D};
    c.bias = test_normal(HEADS * S_Q * S_KV, 5);
    attention_in_f64(&c);
    CHECK(c.most_dbias > 1.5 * c.most_ds); /* the largest number that FP8 has under this scale */
    te_op_attn_fwd_args f = {.q = test_tensor(te, TE_F32, 4, q, c.q), .k = test_tensor(te, TE_F32, 4, kv, c.k),
                             .v = test_tensor(te, TE_F32, 4, kv, c.v), .o = test_guarded(te, TE_F32, 4, q),
                             .lse = test_guarded(te, TE_F32, SHAPE(1, HEADS, S_Q)), .format = TE_BSHD};
    f.rule.mask = c.mask, f.rule.softmax_scale = c.scale, f.rule.softcap = c.cap;
    f.rule.core_attention_bias_type = TE_ATTN_BIAS_POST_SCALE;
    f.rule.core_attention_bias = test_tensor(te, TE_F32, SHAPE(1, HEADS, S_Q, S_KV), c.bias);
    te_op_attn_bwd_args b = {.q = f.q, .k = f.k, .v = f.v, .o = f.o, .lse = f.lse, .d_o = test_tensor(te, TE_F32, 4, q, c.dy),
                             .dq = test_guarded(te, TE_F32, 4, q), .dk = test_guarded(te, TE_F32, 4, kv),
                             .dv = test_guarded(te, TE_F32, 4, kv), .format = TE_BSHD, .rule = f.rule};
    b.dbias = test_guarded(te, TE_F32, SHAPE(1, HEADS, S_Q, S_KV));
    b.fp8.dp_dtype = TE_F8E4M3;
    b.fp8.dp_scale = te_tensor_full(te, TE_F32, SHAPE(1), 448 / c.most_ds);
    b.fp8.dp_amax = te_tensor_zeros(te, TE_F32, SHAPE(1));
    te_op_attn_fwd(te, &f);
    te_op_attn_bwd(te, &b);
    REQUIRE_OK(te);
    CHECK_ERROR_BELOW("dbias", test_read(b.dbias), c.dbias, HEADS * S_Q * S_KV, IN_F32);
    CHECK_ERROR_BELOW("dq", test_read(b.dq), c.dq, te_tensor_numel(b.dq), 0.0625); /* E4M3: each dS is off by up to 1/16 of itself */
    CHECK(fabs((double)test_read(b.fp8.dp_amax)[0] - c.most_ds) < 1e-4 * c.most_ds); /* dP - D cancels */
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
    CHECK(te_sdpa_create(te, &(te_sdpa_desc){.rule.softcap = -2}) == NULL);
    CHECK_ERROR(te, TE_ERR_INVALID, "softcap is -2");
    te_tensor *qkv[3] = {te_tensor_zeros(te, TE_F32, SHAPE(1, 2, 3, 4)), te_tensor_zeros(te, TE_F32, SHAPE(1, 2, 2, 4)), te_tensor_zeros(te, TE_F32, SHAPE(1, 2, 2, 4))};
    CHECK(attend(qkv, 1, TE_BSHD, TE_MASK_CAUSAL, (te_window){false, 0, 0}) == NULL);
    CHECK_ERROR(te, TE_ERR_SHAPE, "q has 3 heads and k has 2");
}
