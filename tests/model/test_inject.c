/* test_inject.c: DotProductAttention in the place of a model's attention: the order of decisions, counters, and a user's block
 * with and without injection. Masks stand in test_inject_masks.c, whole models in test_inject_models.c. */
#include "inject.h"

/* ---- the function in the place of te_scaled_dot_product_attention ---- */

typedef struct heard { /* by a module in DotProductAttention's place, or by an original */
    int calls;
    int64_t q[4], k[4], v[4];
    te_attn_mask mask;
    te_window window;
    te_sdpa_args args;
    bool fails;
} heard;
static te_result mock_forward(te_module *self, te_forward_args *args) {
    heard *h = *(heard **)te_module_state(self);
    if (h->fails) return TE_ERR_UNSUPPORTED;
    h->calls++;
    memcpy(h->q, te_tensor_shape(args->input), sizeof h->q);
    memcpy(h->k, te_tensor_shape(args->key), sizeof h->k);
    memcpy(h->v, te_tensor_shape(args->value), sizeof h->v);
    h->mask = args->attention.attn_mask_type;
    h->window = args->attention.window;
    args->outputs.out = te_tensor_contiguous(args->input);
    return te_error_code(te_module_ctx(self));
}
static const te_module_class mock_class = {"Mock", sizeof(heard *), mock_forward, NULL, NULL};
static te_tensor *mock_original(void *user, te_tensor *q, te_tensor *k, te_tensor *v, const te_sdpa_args *args) {
    heard *h = (heard *)user;
    (void)k, (void)v;
    h->calls++;
    h->args = *args;
    return q;
}

typedef struct mocks {
    heard te, original;
    te_module *module;
    te_sdpa_patch *f;
} mocks;
static void mocks_open(mocks *m, te_ctx *te, int heads, int kv_heads, te_window window, float scale) {
    memset(m, 0, sizeof *m);
    m->module = te_module_create(te, &mock_class, "mock");
    *(heard **)te_module_state(m->module) = &m->te;
    m->f = te_make_te_sdpa(te, &(te_make_te_sdpa_desc){.attn_module = m->module, .num_heads = heads, .num_kv_heads = kv_heads, .original = mock_original, .original_user = &m->original,
                                                       .window_size = window, .softmax_scale = scale});
}
static void mocks_close(mocks *m) {
    te_sdpa_patch_destroy(m->f);
    te_module_destroy(m->module);
}
static te_tensor *heads_of(te_ctx *te, int64_t b, int64_t h, int64_t s, int64_t d, uint64_t seed) { return test_tensor(te, TE_F32, SHAPE(b, h, s, d), test_normal(b * h * s * d, seed)); }
#define CHECK_SHAPE(got, ...)                                                                       \
    do {                                                                                            \
        const int64_t test__want[4] = {__VA_ARGS__};                                                \
        CHECK_MSG(!memcmp(got, test__want, sizeof test__want), "%s: %lld %lld %lld %lld", #got,      \
                  (long long)(got)[0], (long long)(got)[1], (long long)(got)[2], (long long)(got)[3]); \
    } while (0)

TE_TEST(inject_sdpa_decides_in_order) {
    te_ctx *te = test_context("cpu");
    mocks m;
    mocks_open(&m, te, 8, 4, (te_window){0}, 0.125f);
    te_tensor *q = heads_of(te, 2, 8, 10, 64, 1), *k = heads_of(te, 2, 4, 10, 64, 2), *v = heads_of(te, 2, 4, 10, 64, 3);
    te_tensor *y = te_sdpa_patch_call(m.f, q, k, v, &(te_sdpa_args){.is_causal = true, .enable_gqa = true});
    CHECK_SHAPE(m.te.q, 2, 10, 8, 64);
    CHECK_SHAPE(m.te.k, 2, 10, 4, 64);
    CHECK_EQ_INT(m.te.mask, TE_MASK_CAUSAL);
    CHECK(!m.te.window.on);
    CHECK_SHAPE(te_tensor_shape(y), 2, 8, 10, 64);
    CHECK_BYTES("out", test_read(te_tensor_contiguous(y)), test_read(q), 2 * 8 * 10 * 64 * 4); /* the mock's output is its query */
    te_sdpa_patch_call(m.f, q, k, v, &(te_sdpa_args){.enable_gqa = true});
    CHECK_EQ_INT(m.te.mask, TE_MASK_NONE);
    CHECK(m.te.window.on && m.te.window.left == -1 && m.te.window.right == -1);
    check_stats(te_attn_get_stats(te), 2, 0, 0, 0);
    check_stats(te_sdpa_patch_stats(m.f), 2, 0, 0, 0);
    te_attn_reset_stats(te);
    /* scales */
    static const float scales[] = {0.5f, 0.125f, 0.125f + 1e-9f, 0, NAN, 0.5f};
    for (int i = 0; i < COUNT(scales); i++) te_sdpa_patch_call(m.f, q, k, v, &(te_sdpa_args){.is_causal = true, .enable_gqa = true, .scale = scales[i], .dropout_p = i == 5 ? 0.25f : 0});
    check_stats(te_attn_get_stats(te), 3, 0, 3, 0);
    CHECK_EQ_INT(m.original.calls, 3);
    CHECK(m.original.args.scale == 0.5f && m.original.args.dropout_p == 0.25f && m.original.args.is_causal && m.original.args.enable_gqa && !m.original.args.attn_mask);
    te_attn_reset_stats(te);
    te_sdpa_patch_call(m.f, q, k, v, &(te_sdpa_args){.scale = 0.5f, .attn_mask = te_tensor_zeros(te, TE_F32, SHAPE(1, 1, 10, 10))}); /* the scale is asked before the mask */
    check_stats(te_attn_get_stats(te), 0, 0, 1, 0);
    CHECK_EQ_INT(log_lines("a call's scale is 0.5, that of its DotProductAttention 0.125"), 1);
    mocks_close(&m);
    /* no scale of its own: no mismatch */
    mocks_open(&m, te, 8, 4, (te_window){0}, 0);
    te_sdpa_patch_call(m.f, q, k, v, &(te_sdpa_args){.scale = 0.5f, .enable_gqa = true});
    CHECK_EQ_INT(m.te.calls, 1);
    /* what no attn_module was made for */
    te_attn_reset_stats(te);
    te_sdpa_patch_call(m.f, heads_of(te, 1, 6, 4, 64, 1), k, v, NULL);
    te_sdpa_patch_call(m.f, q, q, q, &(te_sdpa_args){.enable_gqa = true}); /* nothing is stripped where heads may differ */
    te_sdpa_patch_call(m.f, q, k, v, &(te_sdpa_args){.dropout_p = 0.5f});  /* this module cannot drop */
    check_stats(te_attn_get_stats(te), 0, 0, 0, 3);
    mocks_close(&m);
    CHECK_OK(te);
}

/* A mask that says something else about the call than its own elements do: the original's, whatever the verdict. */
TE_TEST(inject_sdpa_holds_masks_against_the_call) {
    te_ctx *te = test_context("cpu"), *other = test_context("cpu");
    mocks m;
    mocks_open(&m, te, 2, 2, (te_window){0}, 0);
    te_sdpa_patch_destroy(m.f);
    m.f = te_make_te_sdpa(te, &(te_make_te_sdpa_desc){.attn_module = m.module, .num_heads = 2, .num_kv_heads = 2, .original = mock_original, .original_user = &m.original, .mask.strict = true});
    te_tensor *q = heads_of(te, 2, 2, 10, 8, 1), *one = heads_of(te, 2, 2, 1, 8, 2), *learned = mask_of(te, TE_F32, 1, 1, 10, sees_causal, -INFINITY);
    te_sdpa_patch_call(m.f, q, q, q, &(te_sdpa_args){.attn_mask = te_tensor_zeros(te, TE_F32, SHAPE(1, 1, 1, 1))});   /* every query sees every key */
    te_sdpa_patch_call(m.f, one, q, q, &(te_sdpa_args){.attn_mask = te_tensor_zeros(te, TE_F32, SHAPE(1, 1, 1, 1))}); /* the last query, behind a cache */
    te_sdpa_patch_call(m.f, q, q, q, &(te_sdpa_args){.attn_mask = mask_of(te, TE_F32, 1, 1, 8, sees_causal, -INFINITY)}); /* an error, which the original words */
    check_stats(te_attn_get_stats(te), 0, 3, 0, 0);
    CHECK_EQ_INT(m.original.calls, 3);
    te_sdpa_patch_call(m.f, q, q, q, &(te_sdpa_args){.attn_mask = learned});
    check_stats(te_attn_get_stats(te), 1, 3, 0, 0);
    te_tensor_set_requires_grad(learned, true); /* its gradient is the original's to give */
    te_sdpa_patch_call(m.f, q, q, q, &(te_sdpa_args){.attn_mask = learned});
    check_stats(te_attn_get_stats(te), 1, 4, 0, 0);
    te_no_grad_begin(te);
    te_sdpa_patch_call(m.f, q, q, q, &(te_sdpa_args){.attn_mask = learned});
    te_no_grad_end(te);
    check_stats(te_attn_get_stats(te), 2, 4, 0, 0);
    CHECK_OK(te);
    CHECK(!te_sdpa_patch_call(m.f, heads_of(other, 2, 2, 10, 8, 1), q, q, NULL) && m.original.calls == 4);
    CHECK_ERROR(te, TE_ERR_INVALID, "te_sdpa_patch_call");
    mocks_close(&m);
}

TE_TEST(inject_sdpa_gives_repeated_heads_back) {
    te_ctx *te = test_context("cpu");
    mocks m;
    mocks_open(&m, te, 8, 2, (te_window){0}, 0);
    te_tensor *q = heads_of(te, 1, 8, 4, 32, 1), *k = heads_of(te, 1, 8, 4, 32, 2), *v = heads_of(te, 1, 8, 4, 32, 3);
    te_sdpa_patch_call(m.f, q, k, v, &(te_sdpa_args){.is_causal = true});
    CHECK_SHAPE(m.te.k, 1, 4, 2, 32);
    CHECK_SHAPE(m.te.v, 1, 4, 2, 32);
    te_sdpa_patch_call(m.f, q, te_tensor_narrow(k, 1, 0, 2), te_tensor_narrow(v, 1, 0, 2), &(te_sdpa_args){.is_causal = true}); /* given back already */
    CHECK_SHAPE(m.te.k, 1, 4, 2, 32);
    /* masks */
    te_attn_reset_stats(te);
    te_sdpa_patch_call(m.f, q, k, v, &(te_sdpa_args){.attn_mask = te_tensor_zeros(te, TE_F32, SHAPE(1, 1, 4, 4)), .dropout_p = 0.5f});
    CHECK_EQ_INT(m.te.calls, 2);
    CHECK_EQ_INT(m.original.calls, 1);
    CHECK(m.original.args.attn_mask && m.original.args.dropout_p == 0.5f);
    te_sdpa_patch_call(m.f, q, k, v, &(te_sdpa_args){.attn_mask = mask_of(te, TE_F32, 1, 1, 4, sees_causal, -INFINITY), .is_causal = true});
    CHECK(m.te.calls == 3 && m.te.mask == TE_MASK_CAUSAL && m.te.window.left == -1);
    check_stats(te_attn_get_stats(te), 1, 1, 0, 0);
    mocks_close(&m);
    mocks_open(&m, te, 8, 2, window_of(3, 0), 0); /* a layer with a window: not where all keys are seen */
    te_sdpa_patch_call(m.f, q, k, v, NULL);
    CHECK(m.te.mask == TE_MASK_NONE && m.te.window.left == -1 && m.te.window.right == -1);
    te_sdpa_patch_call(m.f, q, k, v, &(te_sdpa_args){.is_causal = true});
    CHECK(m.te.window.on && m.te.window.left == 3 && m.te.window.right == 0);
    /* the call fails: no hit */
    te_attn_reset_stats(te);
    m.te.fails = true;
    CHECK(!te_sdpa_patch_call(m.f, q, k, v, NULL));
    CHECK_ERROR(te, TE_ERR_UNSUPPORTED, "Mock");
    check_stats(te_attn_get_stats(te), 0, 0, 0, 0);
    mocks_close(&m);
}

/* A line for every so many calls; a copy of the counters is a copy. */
TE_TEST(inject_stats_every) {
    static const struct {
        const char *every;
        int lines;
    } cases[] = {{"2", 2}, {"0", 0}, {"-3", 0}, {NULL, 0}, {"5", 1}, {" \t2", 2}, {"2 \n", 2}, {"\v +5\r\f ", 1}};
    for (int i = 0; i < COUNT(cases); i++) {
        mocks m;
        test_setenv("AUTOMODEL_TE_STATS_EVERY", cases[i].every);
        te_ctx *te = test_context_with(&(te_ctx_desc){.log_level = TE_LOG_INFO});
        const int before = log_lines("te_attention: of ");
        mocks_open(&m, te, 1, 1, (te_window){0}, 0);
        te_tensor *x = heads_of(te, 1, 1, 3, 4, 1);
        for (int n = 0; n < 5; n++) te_sdpa_patch_call(m.f, x, x, x, &(te_sdpa_args){.attn_mask = n == 1 ? te_tensor_zeros(te, TE_F32, SHAPE(1, 1, 3, 3)) : NULL});
        CHECK_EQ_INT(log_lines("te_attention: of ") - before, cases[i].lines);
        if (cases[i].lines == 2) {
            CHECK_STR(test_log_text(), "of 2 calls 1 by DotProductAttention; fallbacks: 1 for masks, 0 for scales, 0 others");
            CHECK_STR(test_log_text(), "of 4 calls 3 by DotProductAttention");
        }
        te_attn_stats copy = te_attn_get_stats(te);
        copy.te_hits += 77;
        check_stats(te_attn_get_stats(te), 4, 1, 0, 0);
        CHECK_EQ_INT(copy.te_hits, 81);
        te_attn_reset_stats(te);
        check_stats(te_attn_get_stats(te), 0, 0, 0, 0);
        mocks_close(&m);
        CHECK_OK(te);
    }
    test_setenv("AUTOMODEL_TE_STATS_EVERY", "many");
    te_ctx *te = test_context("cpu");
    te_module *m = te_linear_create(te, &(te_linear_desc){.in_features = 2, .out_features = 2});
    CHECK_OK(te);
    CHECK_EQ_INT(te_inject_te_attention(m, NULL), -1);
    CHECK_ERROR(te, TE_ERR_INVALID, "AUTOMODEL_TE_STATS_EVERY was \"many\"");
    CHECK(!te_make_te_sdpa(te, &(te_make_te_sdpa_desc){.attn_module = m, .num_heads = 1, .num_kv_heads = 1}));
    CHECK_ERROR(te, TE_ERR_INVALID, "AUTOMODEL_TE_STATS_EVERY was \"many\"");
    te_module_destroy(m);
    static const char *const junk[] = {" ", "2 2", "2x ", "- 2"};
    for (int i = 0; i < COUNT(junk); i++) {
        test_setenv("AUTOMODEL_TE_STATS_EVERY", junk[i]);
        te = test_context("cpu");
        m = te_linear_create(te, &(te_linear_desc){.in_features = 2, .out_features = 2});
        CHECK_EQ_INT(te_inject_te_attention(m, NULL), -1);
        CHECK_ERROR(te, TE_ERR_INVALID, "a whole number of calls is needed");
        te_module_destroy(m);
    }
    test_setenv("AUTOMODEL_TE_STATS_EVERY", NULL);
}

/* ---- te_scaled_dot_product_attention itself ---- */

/* softmax(scale q k^T + mask) v in f64, heads of k and v repeated. */
static float *attention_by_hand(const float *q, const float *k, const float *v, int b, int heads, int groups, int64_t s, int64_t d, double scale, sees_fn sees) {
    float *y = test_floats(b * heads * s * d);
    double *p = test_doubles(s);
    for (int n = 0; n < b * heads; n++)
        for (int64_t i = 0; i < s; i++) {
            const int64_t kv = (n / heads * groups + n % heads / (heads / groups)) * s * d;
            double sum = 0;
            for (int64_t j = 0; j < s; j++) {
                double x = 0;
                for (int64_t c = 0; c < d; c++) x += (double)q[(n * s + i) * d + c] * (double)k[kv + j * d + c];
                sum += p[j] = sees(n / heads, n % heads, i, j, s) ? exp(scale * x) : 0;
            }
            for (int64_t c = 0; c < d; c++) {
                double x = 0;
                for (int64_t j = 0; j < s; j++) x += p[j] / sum * (double)v[kv + j * d + c];
                y[(n * s + i) * d + c] = (float)x;
            }
        }
    return y;
}
/* A function in its place that returns NULL: an error, and the function's own if it has recorded one. */
static te_tensor *gives_nothing(void *user, te_tensor *q, te_tensor *k, te_tensor *v, const te_sdpa_args *args) {
    (void)k, (void)v, (void)args;
    if (user) te_add(q, te_tensor_narrow(q, 3, 0, 1));
    return NULL;
}
TE_TEST(inject_functions_that_give_nothing) {
    te_ctx *te = test_context("cpu");
    te_tensor *x = te_tensor_zeros(te, TE_F32, SHAPE(1, 2, 3, 8));
    for (int own = 0; own < 2; own++) {
        te_sdpa_begin(te, gives_nothing, own ? &own : NULL);
        CHECK(!te_scaled_dot_product_attention(x, x, x, NULL));
        te_sdpa_end(te);
        if (own) CHECK_ERROR(te, TE_ERR_SHAPE, "[1, 2, 3, 1]");
        else CHECK_ERROR(te, TE_ERR_STATE, "te_scaled_dot_product_attention: the function in its place (te_sdpa_begin) returned NULL");
    }
}
TE_TEST_DEVICES(inject_scaled_dot_product_attention) {
    const double limit = te_ctx_is_cuda(te) ? 5e-3 : 1e-6; /* f32 sums of 7 numbers; on CUDA products of f32 have 10 bits of mantissa (TF32) */
    float *q = test_normal(2 * 4 * 7 * 16, 1), *k = test_normal(2 * 2 * 7 * 16, 2), *v = test_normal(2 * 2 * 7 * 16, 3);
    te_tensor *x[3] = {test_tensor(te, TE_F32, SHAPE(2, 4, 7, 16), q), test_tensor(te, TE_F32, SHAPE(2, 2, 7, 16), k), test_tensor(te, TE_F32, SHAPE(2, 2, 7, 16), v)};
    static const struct {
        const char *name;
        te_dtype mask; /* 0: none */
        sees_fn sees;
        float scale;
    } cases[] = {{"all", TE_DTYPE_NONE, sees_all, 0}, {"causal", TE_DTYPE_NONE, sees_causal, 0.3f}, {"bool", TE_U8, sees_prefix, 0}, {"added", TE_F32, sees_four, 0.4f}, {"added bf16", TE_BF16, sees_image, 0}};
    for (int i = 0; i < COUNT(cases); i++) {
        test_case("%s", cases[i].name);
        te_sdpa_args args = {.enable_gqa = true, .scale = cases[i].scale, .is_causal = cases[i].sees == sees_causal};
        if (cases[i].mask) args.attn_mask = mask_of(te, cases[i].mask, 2, 1, 7, cases[i].sees, -INFINITY);
        te_tensor *y = te_scaled_dot_product_attention(x[0], x[1], x[2], &args);
        const float *want = attention_by_hand(q, k, v, 2, 4, 2, 7, 16, cases[i].scale != 0 ? (double)cases[i].scale : 0.25, cases[i].sees);
        REQUIRE_OK(te);
        CHECK_SHAPE(te_tensor_shape(y), 2, 4, 7, 16);
        CHECK_ERROR_BELOW("y", test_read(te_tensor_contiguous(y)), want, 2 * 4 * 7 * 16, limit);
    }
    /* [s, s] for all */
    te_tensor *flat = te_tensor_view(mask_of(te, TE_U8, 1, 1, 7, sees_prefix, 0), SHAPE(7, 7));
    te_tensor *y = te_scaled_dot_product_attention(x[0], x[1], x[2], &(te_sdpa_args){.enable_gqa = true, .attn_mask = flat});
    CHECK_ERROR_BELOW("flat", test_read(te_tensor_contiguous(y)), attention_by_hand(q, k, v, 2, 4, 2, 7, 16, 0.25, sees_prefix), 2 * 4 * 7 * 16, limit);
    /* what is refused */
    CHECK(!te_scaled_dot_product_attention(x[0], x[1], x[2], NULL));
    CHECK_ERROR(te, TE_ERR_SHAPE, "q is [2, 4, 7, 16], k [2, 2, 7, 16], v [2, 2, 7, 16]; [b, heads, s, d] each, of as many heads unless enable_gqa");
    CHECK(!te_scaled_dot_product_attention(x[0], x[1], x[2], &(te_sdpa_args){.enable_gqa = true, .attn_mask = flat, .is_causal = true}));
    CHECK_ERROR(te, TE_ERR_INVALID, "attn_mask [7, 7] and is_causal are both given");
    CHECK(!te_scaled_dot_product_attention(x[0], x[1], x[2], &(te_sdpa_args){.enable_gqa = true, .attn_mask = te_tensor_zeros(te, TE_I32, SHAPE(7, 7))}));
    CHECK_ERROR(te, TE_ERR_DTYPE, "attn_mask is i32");
    /* regions */
    heard h[2];
    memset(h, 0, sizeof h);
    CHECK_EQ_INT(te_sdpa_begin(te, mock_original, &h[0]), TE_OK);
    te_sdpa_begin(te, mock_original, &h[1]);
    CHECK(te_scaled_dot_product_attention(x[0], x[1], x[2], NULL) == x[0]);
    te_sdpa_end(te);
    te_scaled_dot_product_attention(x[0], x[1], x[2], NULL);
    te_scaled_dot_product_attention(x[0], x[1], x[2], NULL);
    te_sdpa_end(te);
    CHECK(h[1].calls == 1 && h[0].calls == 2);
    CHECK_OK(te);
    CHECK_EQ_INT(te_sdpa_end(te), TE_ERR_STATE);
    CHECK_ERROR(te, TE_ERR_STATE, "te_sdpa_end without te_sdpa_begin");
    te_sdpa_begin(te, NULL, NULL);
    CHECK_ERROR(te, TE_ERR_INVALID, "te_sdpa_begin: fn is NULL");
}

/* Notes the call and hands it to te_attention. */
static te_tensor *through(void *user, te_tensor *q, te_tensor *k, te_tensor *v, const te_sdpa_args *args) {
    te_ctx *te = te_tensor_ctx(q);
    mock_original(user, q, k, v, args);
    te_sdpa_end(te);
    te_tensor *y = te_scaled_dot_product_attention(q, k, v, args);
    te_sdpa_begin(te, through, user);
    return y;
}
/* Attention behind the name sdpa looks up the function when it is called, with the mask as that function takes it: 1 where a query sees a key. */
TE_TEST(inject_reaches_the_backend_sdpa) {
    te_ctx *te = test_context("cpu");
    te_module *m = te_initialize_attn_module(te, TE_ATTN_SDPA, &(te_attn_module_desc){.num_attention_heads = 4, .num_gqa_groups = 2, .num_qk_channels = 8, .softmax_scale = 0.4f});
    te_tensor *q = heads_of(te, 2, 5, 4, 8, 1), *kv = heads_of(te, 2, 5, 2, 8, 2); /* [b, s, heads, d] */
    const uint8_t tokens[] = {1, 1, 1, 1, 1, 0, 0, 1, 1, 1};
    heard h;
    memset(&h, 0, sizeof h);
    for (int padded = 0; padded < 2; padded++) {
        const te_attn_inputs in = {.q = q, .k = kv, .v = kv, .attention_mask = padded ? te_tensor_from_host(te, TE_U8, SHAPE(2, 5), tokens) : NULL};
        te_tensor *before = te_attn_forward(m, &in);
        te_sdpa_begin(te, through, &h);
        te_tensor *y = te_attn_forward(m, &in);
        te_sdpa_end(te);
        REQUIRE_OK(te);
        CHECK_EQ_INT(h.calls, 1 + padded);
        CHECK(h.args.scale == 0.4f && h.args.enable_gqa && h.args.is_causal == !padded && (h.args.attn_mask != NULL) == (padded != 0));
        CHECK_ERROR_BELOW("out", test_read(te_tensor_contiguous(y)), test_read(te_tensor_contiguous(before)), 2 * 5 * 4 * 8, 1e-6); /* the same kernel on the same numbers */
    }
    te_module_destroy(m);
    CHECK_OK(te);
}

/* ---- what a module says about itself ---- */

static te_result no_forward(te_module *self, te_forward_args *args) {
    args->outputs.out = args->input;
    return te_error_code(te_module_ctx(self));
}
static const te_module_class plain_class = {"Plain", 0, no_forward, NULL, NULL};
static te_module *linear_of(te_ctx *te, int64_t in, int64_t out, te_params_device device) {
    return te_linear_create(te, &(te_linear_desc){.in_features = in, .out_features = out, .gemm.params_dtype = TE_F32, .gemm.no_bias = true, .gemm.device = device, .gemm.init.std = 0.3f});
}
/* A module with those projections, without memory; 0: none. */
static te_module *attention_of(te_ctx *te, int64_t q, int64_t k, int64_t v, const te_attn_attributes *a) {
    te_module *m = te_module_create(te, &plain_class, "self_attn");
    if (q) te_module_add_child(m, "q_proj", linear_of(te, 8, q, TE_PARAMS_META));
    if (k) te_module_add_child(m, "k_proj", linear_of(te, 8, k, TE_PARAMS_META));
    if (v) te_module_add_child(m, "v_proj", linear_of(te, 8, v, TE_PARAMS_META));
    if (a) te_module_set_attn_attributes(m, a);
    return m;
}

TE_TEST(inject_params_are_inferred) {
    te_ctx *te = test_context("cpu");
    static const struct {
        const char *name;
        int64_t q, k, v;
        te_attn_attributes a;
        bool fits;
        int heads, groups;
        int64_t left;
        float scale;
        te_inject_reason reason;
    } cases[] = {
        {"16 and 8", 2048, 1024, 1024, {.num_heads = 16, .num_key_value_heads = 8, .head_dim = 128}, true, 16, 8, -1, 0.08838834764f, TE_INJECT_OK},
        {"as many", 1024, 1024, 1024, {.num_heads = 8, .head_dim = 128}, true, 8, 8, -1, 0.08838834764f, TE_INJECT_OK},
        {"no q_proj", 0, 64, 64, {.num_heads = 2, .head_dim = 32}, false, 0, 0, 0, 0, TE_INJECT_PROJECTIONS},
        {"no head_dim", 64, 64, 64, {.num_heads = 2}, false, 0, 0, 0, 0, TE_INJECT_HEAD_DIM},
        {"head_dim -4", 64, 64, 64, {.num_heads = 2, .head_dim = -4}, false, 0, 0, 0, 0, TE_INJECT_HEAD_DIM},
        {"from the projections", 512, 256, 256, {.head_dim = 64}, true, 8, 4, -1, 0.125f, TE_INJECT_OK},
        {"num_attention_heads", 512, 256, 256, {.num_attention_heads = 8, .head_dim = 64}, true, 8, 4, -1, 0.125f, TE_INJECT_OK},
        {"a window of 512", 512, 512, 512, {.head_dim = 64, .sliding_window = 512}, true, 8, 8, 511, 0.125f, TE_INJECT_OK},
        {"a window of -1", 512, 512, 512, {.head_dim = 64, .sliding_window = -1}, true, 8, 8, -1, 0.125f, TE_INJECT_OK},
        {"scaling 1", 512, 512, 512, {.head_dim = 64, .scaling = 1}, true, 8, 8, -1, 1, TE_INJECT_OK},
        {"gated queries", 1024, 512, 512, {.num_heads = 8, .head_dim = 64}, true, 8, 8, -1, 0.125f, TE_INJECT_OK},
        {"heads that do not divide", 512, 192, 192, {.head_dim = 64}, true, 8, 3, -1, 0.125f, TE_INJECT_HEADS},
        {"heads that the projections lack", 512, 512, 512, {.num_heads = 16, .num_key_value_heads = 8, .head_dim = 64}, true, 16, 8, -1, 0.125f, TE_INJECT_HEADS},
        {"projections below one head", 32, 32, 32, {.head_dim = 64}, true, 0, 0, -1, 0.125f, TE_INJECT_HEADS},
        {"head_dim 512", 1024, 1024, 1024, {.head_dim = 512}, true, 2, 2, -1, 0.04419417382f, TE_INJECT_OK},
        {"head_dim 2048", 2048, 2048, 2048, {.head_dim = 2048}, true, 1, 1, -1, 0.02209708691f, TE_INJECT_HEAD_DIM},
    };
    for (int i = 0; i < COUNT(cases); i++) {
        te_attn_params p;
        te_module *m = attention_of(te, cases[i].q, cases[i].k, cases[i].v, &cases[i].a);
        test_case("%s", cases[i].name);
        const bool fits = te_infer_attn_params(m, &p);
        CHECK_EQ_INT(fits, cases[i].fits);
        if (fits && cases[i].fits) {
            CHECK_EQ_INT(p.num_heads, cases[i].heads);
            CHECK_EQ_INT(p.num_kv_heads, cases[i].groups);
            CHECK_EQ_INT(p.head_dim, cases[i].a.head_dim);
            CHECK_EQ_INT(p.window_size.on ? p.window_size.left : -1, cases[i].left);
            CHECK(p.softmax_scale == cases[i].scale);
        }
        CHECK_EQ_INT(te_inject_check(m, NULL), cases[i].reason);
        CHECK(te_inject_reason_text(cases[i].reason)[0] != 0);
        CHECK_EQ_INT(te_inject_te_attention_into_module(m, NULL), cases[i].reason == TE_INJECT_OK);
        CHECK_EQ_INT(te_injected_sdpa(m) != NULL, cases[i].reason == TE_INJECT_OK);
        CHECK_OK(te);
        te_module_destroy(m);
    }
    test_case("%s", "");
    /* projections */
    CHECK_EQ_INT(te_proj_out_features(NULL), 0);
    te_module *wrapper = te_module_create(te, &plain_class, "wrapper"), *bare = te_module_create(te, &plain_class, "bare"), *meta = linear_of(te, 16, 32, TE_PARAMS_META);
    CHECK_EQ_INT(te_proj_out_features(meta), 32);
    CHECK_EQ_INT(te_proj_out_features(bare), 0);
    te_module_add_child(wrapper, "linear", linear_of(te, 16, 48, TE_PARAMS_DEFAULT));
    CHECK_EQ_INT(te_proj_out_features(wrapper), 48);
    te_module_add_parameter(bare, "weight", te_tensor_zeros(te, TE_F32, SHAPE(64, 32)));
    CHECK_EQ_INT(te_proj_out_features(bare), 64);
    int64_t told = 40;
    te_module_set_attribute(bare, "out_features", &told, NULL);
    CHECK_EQ_INT(te_proj_out_features(bare), 40);
    te_module_destroy(wrapper);
    te_module_destroy(bare);
    te_module_destroy(meta);
    /* makers without their numbers */
    CHECK(!te_make_te_sdpa(te, NULL) && !te_make_te_sdpa(NULL, NULL));
    CHECK_ERROR(te, TE_ERR_INVALID, "te_make_te_sdpa: desc is NULL");
    CHECK(!te_make_te_sdpa(te, &(te_make_te_sdpa_desc){.num_heads = 4, .num_kv_heads = 3}));
    CHECK_ERROR(te, TE_ERR_INVALID, "te_make_te_sdpa: attn_module is NULL, num_heads 4, num_kv_heads 3");
    CHECK(!te_create_te_dot_product_attention(te, NULL) && !te_create_te_dot_product_attention(NULL, NULL));
    CHECK_ERROR(te, TE_ERR_INVALID, "te_create_te_dot_product_attention: desc is NULL");
    te_module *dpa = te_create_te_dot_product_attention(te, &(te_attn_params){.num_heads = 4, .num_kv_heads = 2, .head_dim = 8});
    CHECK_STR(te_module_get_class(dpa)->name, "DotProductAttention");
    te_tensor *q = heads_of(te, 2, 5, 4, 8, 1), *kv = heads_of(te, 2, 5, 2, 8, 2); /* [b, s, heads, d] */
    te_forward_args call = {.input = q, .key = kv, .value = kv};
    te_tensor *y = te_forward_with(dpa, &call), *want = te_attention(q, kv, kv, &(te_attn_desc){.format = TE_BSHD, .rule.mask = TE_MASK_CAUSAL});
    REQUIRE_OK(te);
    CHECK_BYTES("causal, bshd, 1 / sqrt(d)", test_read(y), test_read(want), 2 * 5 * 4 * 8 * 4);
    te_module_destroy(dpa);
}

/* ---- a user's attention ---- */

typedef struct block_state {
    int heads, groups;
    int64_t d;
    bool repeats;   /* keys and values, as transformers' repeat_kv does; else enable_gqa */
    bool by_itself; /* it does not call te_scaled_dot_product_attention */
    bool fails;
} block_state;
static te_tensor *block_project(te_module *m, const char *name, te_tensor *x, int heads, int64_t d) {
    te_tensor *y = te_forward(te_module_find(m, name), x);
    return y ? te_tensor_transpose(te_tensor_view(y, SHAPE(te_tensor_shape(x)[0], te_tensor_shape(x)[1], heads, d)), 1, 2) : NULL;
}
static te_tensor *block_repeat(te_tensor *x, int times) {
    te_tensor *list[16];
    int n = 0;
    for (int64_t h = 0; x && h < te_tensor_shape(x)[1]; h++)
        for (int i = 0; i < times; i++) list[n++] = te_tensor_contiguous(te_tensor_narrow(x, 1, h, 1));
    return x ? te_concat(list, n, 1) : NULL;
}
static te_result block_forward(te_module *m, te_forward_args *args) {
    const block_state *s = (const block_state *)te_module_state(m);
    te_sdpa_args a = {0};
    if (args->user) a = *(const te_sdpa_args *)args->user;
    if (s->fails) return TE_ERR_UNSUPPORTED;
    te_tensor *q = block_project(m, "q_proj", args->input, s->heads, s->d), *k = block_project(m, "k_proj", args->input, s->groups, s->d);
    te_tensor *v = block_project(m, "v_proj", args->input, s->groups, s->d);
    if (s->repeats) {
        k = block_repeat(k, s->heads / s->groups);
        v = block_repeat(v, s->heads / s->groups);
    }
    a.enable_gqa = !s->repeats;
    te_tensor *y = s->by_itself ? q : te_scaled_dot_product_attention(q, k, v, &a);
    y = te_tensor_contiguous(te_tensor_transpose(y, 1, 2));
    if (y) args->outputs.out = te_forward(te_module_find(m, "o_proj"), te_tensor_view(y, SHAPE(te_tensor_shape(args->input)[0], te_tensor_shape(args->input)[1], -1)));
    return te_error_code(te_module_ctx(m));
}
static const te_module_class block_class = {"Block", sizeof(block_state), block_forward, NULL, NULL};

enum { BLOCK_H = 4, BLOCK_G = 2, BLOCK_D = 16, BLOCK_S = 33, BLOCK_B = 2, BLOCK_HIDDEN = 24 };
static te_module *block_create(te_ctx *te, te_dtype dtype, int64_t window, bool repeats) {
    te_module *m = te_module_create(te, &block_class, "self_attn");
    const int64_t out[] = {BLOCK_H * BLOCK_D, BLOCK_G * BLOCK_D, BLOCK_G * BLOCK_D, BLOCK_HIDDEN};
    static const char *const names[] = {"q_proj", "k_proj", "v_proj", "o_proj"};
    for (int i = 0; i < 4; i++)
        te_module_add_child(m, names[i], te_linear_create(te, &(te_linear_desc){.in_features = i == 3 ? BLOCK_H * BLOCK_D : BLOCK_HIDDEN, .out_features = out[i], .gemm.params_dtype = dtype,
                                                                              .gemm.no_bias = true, .gemm.init.std = 0.3f}));
    *(block_state *)te_module_state(m) = (block_state){.heads = BLOCK_H, .groups = BLOCK_G, .d = BLOCK_D, .repeats = repeats};
    te_module_set_attn_attributes(m, &(te_attn_attributes){.num_heads = BLOCK_H, .num_key_value_heads = BLOCK_G, .head_dim = BLOCK_D, .sliding_window = window});
    return m;
}

/* A5 */
TE_TEST_DEVICES(inject_block_computes_the_same) {
    static const te_dtype dtypes[] = {TE_F32, TE_BF16};
    for (int n = 0; n < 4; n++) {
        const te_dtype dtype = dtypes[n % 2];
        const bool repeats = n >= 2;
        /* f32: the specification's; bf16: 8 bits of mantissa, several roundings behind each other. */
        const double limit = dtype == TE_F32 ? 5e-4 : 2e-2;
        te_tensor *x = test_tensor(te, dtype, SHAPE(BLOCK_B, BLOCK_S, BLOCK_HIDDEN), test_normal(BLOCK_B * BLOCK_S * BLOCK_HIDDEN, 7));
        const struct {
            const char *name;
            te_sdpa_args args;
            int64_t window;
            bool hit;
        } cases[] = {
            {"the canonical mask", {.attn_mask = mask_of(te, TE_F32, BLOCK_B, 1, BLOCK_S, sees_causal, -INFINITY)}, 0, true},
            {"is_causal", {.is_causal = true}, 0, true},
            {"a padded mask", {.attn_mask = mask_of(te, TE_F32, BLOCK_B, 1, BLOCK_S, sees_right_padded, -INFINITY)}, 0, false},
            {"a window of 8", {.attn_mask = mask_of(te, TE_F32, BLOCK_B, 1, BLOCK_S, sees_eight, -INFINITY)}, 8, true},
            {"all keys", {.scale = 0.25f}, 8, true},
        };
        for (int i = 0; i < COUNT(cases); i++) {
            te_module *m = block_create(te, dtype, cases[i].window, repeats);
            te_sdpa_args args = cases[i].args;
            test_case("%s, %s%s", cases[i].name, te_dtype_name(dtype), repeats ? ", repeated" : "");
            results before = run_once(m, x, &args);
            REQUIRE_OK(te);
            te_attn_reset_stats(te);
            CHECK(te_inject_te_attention_into_module(m, NULL));
            results with = run_once(m, x, &args);
            REQUIRE_OK(te);
            CHECK(with.n == before.n);
            CHECK_ERROR_BELOW("with injection", with.x, before.x, before.n, limit);
            check_stats(te_attn_get_stats(te), cases[i].hit, !cases[i].hit, 0, 0);
            check_stats(te_sdpa_patch_stats(te_injected_sdpa(m)), cases[i].hit, !cases[i].hit, 0, 0);
            CHECK_EQ_INT(te_restore_attention(m), 1);
            results after = run_once(m, x, &args);
            CHECK_BYTES("restored", after.x, before.x, (size_t)before.n * sizeof(float));
            check_stats(te_attn_get_stats(te), cases[i].hit, !cases[i].hit, 0, 0);
            te_module_destroy(m);
        }
    }
}

/* dropout_p reaches DotProductAttention, but for rules_of_automodel; a module that runs again in the backward pass draws the same bits. */
TE_TEST_DEVICES(inject_dropout_is_drawn) {
    te_tensor *x = test_tensor(te, TE_F32, SHAPE(BLOCK_B, BLOCK_S, BLOCK_HIDDEN), test_normal(BLOCK_B * BLOCK_S * BLOCK_HIDDEN, 7));
    te_module *m = block_create(te, TE_F32, 0, false);
    te_sdpa_args args = {.is_causal = true};
    te_inject_te_attention_into_module(m, NULL);
    results plain = run_once(m, x, &args);
    args.dropout_p = 0.5f;
    te_seed(te, 5);
    results dropped = run_once(m, x, &args);
    CHECK(memcmp(plain.x, dropped.x, (size_t)plain.n * sizeof(float)) != 0);
    te_module_set_checkpoint(m, true);
    te_seed(te, 5);
    results again = run_once(m, x, &args);
    CHECK_BYTES("run again", again.x, dropped.x, (size_t)dropped.n * sizeof(float));
    te_module_set_checkpoint(m, false);
    te_restore_attention(m);
    te_seed(te, 5);
    results native = run_once(m, x, &args);
    CHECK_ERROR_BELOW("te_attention's", dropped.x, native.x, native.n, 1e-6); /* the same bits are drawn, and the same kernels run */
    te_inject_te_attention_into_module(m, &(te_inject_desc){.rules_of_automodel = true});
    results ignored = run_once(m, x, &args);
    CHECK_BYTES("ignored", ignored.x, plain.x, (size_t)plain.n * sizeof(float));
    CHECK_OK(te);
    te_module_destroy(m);
}

/* Forwards and regions around an injected module: restored after a failure, kept where the program had one. */
static int own_calls;
static te_result own_forward(te_module *m, te_forward_args *args) {
    own_calls++;
    return block_forward(m, args);
}
TE_TEST(inject_forwards_and_regions) {
    te_ctx *te = test_context("cpu");
    te_tensor *x = test_tensor(te, TE_F32, SHAPE(1, 5, BLOCK_HIDDEN), test_normal(5 * BLOCK_HIDDEN, 7));
    te_module *m = block_create(te, TE_F32, 0, false);
    block_state *s = (block_state *)te_module_state(m);
    te_sdpa_args args = {.is_causal = true};
    te_forward_args call = {.input = x, .user = &args};
    te_inject_te_attention_into_module(m, NULL);
    te_module_forward_fn injected = te_module_set_forward(m, NULL);
    CHECK(injected != NULL);
    te_module_set_forward(m, injected);
    s->fails = true;
    CHECK(!te_forward_with(m, &call));
    CHECK_ERROR(te, TE_ERR_UNSUPPORTED, "Block");
    s->fails = false;
    CHECK_EQ_INT(te_sdpa_end(te), TE_ERR_STATE); /* none is left open */
    te_clear_error(te);
    /* again: in the place of the first, not around it */
    CHECK(te_inject_te_attention_into_module(m, NULL));
    te_forward_with(m, &call);
    check_stats(te_attn_get_stats(te), 1, 0, 0, 0);
    te_restore_attention(m);
    CHECK(te_module_set_forward(m, own_forward) == NULL);
    /* a forward of the program's own goes on inside, and stays behind */
    own_calls = 0;
    te_inject_te_attention_into_module(m, NULL);
    te_forward_with(m, &call);
    CHECK_EQ_INT(own_calls, 1);
    check_stats(te_attn_get_stats(te), 2, 0, 0, 0);
    te_restore_attention(m);
    CHECK(te_module_set_forward(m, NULL) == own_forward);
    /* the function in force at the time of injection takes what falls back */
    heard h;
    memset(&h, 0, sizeof h);
    te_sdpa_begin(te, mock_original, &h);
    te_inject_te_attention_into_module(m, NULL);
    te_sdpa_end(te);
    args = (te_sdpa_args){.attn_mask = mask_of(te, TE_F32, 1, 1, 5, sees_prefix, -INFINITY)};
    te_forward_with(m, &call);
    CHECK_EQ_INT(h.calls, 1);
    CHECK_OK(te);
    /* a function of the program's own making: borrowed, and no attn_module comes or goes with it */
    te_restore_attention(m);
    te_module *dpa = te_create_te_dot_product_attention(te, &(te_attn_params){.num_heads = BLOCK_H, .num_kv_heads = BLOCK_G, .head_dim = BLOCK_D});
    te_sdpa_patch *f = te_make_te_sdpa(te, &(te_make_te_sdpa_desc){.attn_module = dpa, .num_heads = BLOCK_H, .num_kv_heads = BLOCK_G, .mask.strict = true});
    CHECK_EQ_INT(te_patch_module_forward(m, f), TE_OK);
    te_module_set_attribute(m, "attn_module", &h, NULL);
    args = (te_sdpa_args){.is_causal = true};
    te_forward_with(m, &call);
    check_stats(te_sdpa_patch_stats(f), 1, 0, 0, 0);
    CHECK_EQ_INT(te_restore_attention(m), 1);
    CHECK(te_module_attribute(m, "attn_module", NULL) && te_module_set_forward(m, NULL) == NULL);
    te_module_remove_attribute(m, "attn_module");
    CHECK_EQ_INT(te_patch_module_forward(m, NULL), TE_ERR_INVALID);
    CHECK_ERROR(te, TE_ERR_INVALID, "te_patch_module_forward: the te_sdpa_patch for self_attn is NULL");
    te_sdpa_patch_destroy(f);
    te_module_destroy(dpa);
    te_inject_te_attention_into_module(m, NULL);
    /* one that computes attention by itself is found out */
    s->by_itself = true;
    for (int i = 0; i < 3; i++) te_forward_with(m, &call);
    CHECK_EQ_INT(log_lines("self_attn has run without a call of te_scaled_dot_product_attention"), 1);
    CHECK_OK(te);
    te_module_destroy(m);
}
