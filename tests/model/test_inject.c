/* test_inject.c: DotProductAttention in the place of a model's attention: masks that are causal and masks that only look so, the order of decisions, counters, a user's block and whole language models
 * with and without injection, ranks, graphs, and everything given back. */
#include "../dist/ranks.h"
#include "../faults/purse.h"

static te_window window_of(int64_t left, int64_t right) { return (te_window){.on = true, .left = left, .right = right}; }
static void check_stats(te_attention_stats s, int hits, int mask, int scale, int other) {
    CHECK_EQ_INT(s.te_hits, hits);
    CHECK_EQ_INT(s.fallback_mask, mask);
    CHECK_EQ_INT(s.fallback_scale_mismatch, scale);
    CHECK_EQ_INT(s.fallback_other, other);
}
static int log_lines(const char *needle) {
    int n = 0;
    for (const char *at = test_log_text(); (at = strstr(at, needle)) != NULL; at++) n++;
    return n;
}

/* ---- masks ---- */

/* Which keys row i of sequence b sees. */
typedef bool (*sees_fn)(int b, int h, int64_t i, int64_t j, int64_t s);
static bool sees_causal(int b, int h, int64_t i, int64_t j, int64_t s) { return (void)b, (void)h, (void)s, j <= i; }
static bool sees_four(int b, int h, int64_t i, int64_t j, int64_t s) { return (void)b, (void)h, (void)s, j <= i && i - j < 4; }
static bool sees_eight(int b, int h, int64_t i, int64_t j, int64_t s) { return (void)b, (void)h, (void)s, j <= i && i - j < 8; }
static bool sees_itself(int b, int h, int64_t i, int64_t j, int64_t s) { return (void)b, (void)h, (void)s, i == j; }
static bool sees_all(int b, int h, int64_t i, int64_t j, int64_t s) { return (void)b, (void)h, (void)i, (void)j, (void)s, true; }
static bool sees_none(int b, int h, int64_t i, int64_t j, int64_t s) { return (void)b, (void)h, (void)i, (void)j, (void)s, false; }
static bool sees_right_padded(int b, int h, int64_t i, int64_t j, int64_t s) { return (void)h, j <= i && (b || j < s - 4); }
static bool sees_left_padded(int b, int h, int64_t i, int64_t j, int64_t s) { return (void)h, (void)s, j <= i && (b == 0 || j >= 2); }
static bool sees_not_the_first(int b, int h, int64_t i, int64_t j, int64_t s) { return (void)b, (void)h, (void)s, j <= i && (i || j); }
static bool sees_two_at_first(int b, int h, int64_t i, int64_t j, int64_t s) { return (void)b, (void)h, (void)s, j <= i || (i == 0 && j == 1); }
static bool sees_no_third_key(int b, int h, int64_t i, int64_t j, int64_t s) { return (void)b, (void)h, (void)s, j <= i && j != 2; }
static bool sees_packed(int b, int h, int64_t i, int64_t j, int64_t s) { return (void)b, (void)h, j <= i && i / (s / 2) == j / (s / 2); }
static bool sees_prefix(int b, int h, int64_t i, int64_t j, int64_t s) { return (void)b, (void)h, (void)s, j <= i || j < 3; }
static bool sees_image(int b, int h, int64_t i, int64_t j, int64_t s) { return (void)b, (void)h, (void)s, j <= i || (i >= 2 && i <= 4 && j >= 2 && j <= 4); }
static bool sees_a_hole(int b, int h, int64_t i, int64_t j, int64_t s) { return (void)b, (void)h, (void)s, j <= i && !(i == 4 && j == 2); }
static bool sees_all_in_head_1(int b, int h, int64_t i, int64_t j, int64_t s) { return (void)b, (void)s, j <= i || h == 1; }

/* u8: 1 where a row sees a key; else 0 there and `fill` elsewhere. */
static te_tensor *mask_of(te_ctx *te, te_dtype dtype, int b, int h, int64_t s, sees_fn sees, float fill) {
    float *x = test_floats(b * h * s * s);
    uint8_t *bytes = (uint8_t *)test_alloc((size_t)(b * h * s * s) + 1);
    for (int64_t at = 0; at < b * h * s * s; at++) {
        const bool seen = sees((int)(at / (s * s) / h), (int)(at / (s * s) % h), at / s % s, at % s, s);
        x[at] = seen ? 0 : fill;
        bytes[at] = seen;
    }
    return dtype == TE_U8 ? te_tensor_from_host(te, TE_U8, SHAPE(b, h, s, s), bytes) : test_tensor(te, dtype, SHAPE(b, h, s, s), x);
}

typedef struct mask_vector {
    const char *name;
    sees_fn sees;
    int b, h;
    int64_t s;
    te_dtype dtype;
    float fill;
    int64_t left, found; /* found: the left of the window that is found, -2: not causal */
    int64_t strict;      /* the same where every element is looked at */
} mask_vector;
#define LOWEST (-3.3895314e38f) /* of bf16, and a number of f32 */
static const mask_vector mask_vectors[] = {
    {"additive -inf", sees_causal, 1, 1, 8, TE_F32, -INFINITY, -1, -1, -1},
    {"S = 2", sees_causal, 1, 1, 2, TE_F32, -INFINITY, -1, -1, -1},
    {"S = 1", sees_causal, 1, 1, 1, TE_F32, -INFINITY, -1, -2, -1},
    {"fill -1e9", sees_causal, 1, 1, 8, TE_F32, -1e9f, -1, -1, -1},
    {"fill -10001", sees_causal, 1, 1, 8, TE_F32, -10001, -1, -1, -1},
    {"fill -1e4", sees_causal, 1, 1, 8, TE_F32, -1e4f, -1, -2, -2},
    {"lowest f32, two sequences", sees_causal, 2, 1, 16, TE_F32, -3.4028234e38f, -1, -1, -1},
    {"lowest bf16, two sequences", sees_causal, 2, 1, 16, TE_BF16, LOWEST, -1, -1, -1},
    {"f16", sees_causal, 2, 1, 16, TE_F16, -65504, -1, -1, -1},
    {"bool", sees_causal, 2, 1, 16, TE_U8, 0, -1, -1, -1},
    {"W 4, window 3", sees_four, 1, 1, 8, TE_F32, -INFINITY, 3, 3, 3},
    {"W 4, no window", sees_four, 1, 1, 8, TE_F32, -INFINITY, -1, -2, -2},
    {"full of 8, window 3", sees_causal, 1, 1, 8, TE_F32, -INFINITY, 3, -2, -2},
    {"full of 16, window 3", sees_causal, 1, 1, 16, TE_F32, -INFINITY, 3, -2, -2},
    {"full of 4, window 3", sees_causal, 1, 1, 4, TE_F32, -INFINITY, 3, 3, 3},
    {"full of 4, window 7", sees_causal, 1, 1, 4, TE_F32, -INFINITY, 7, 7, 7},
    {"W 8 of 16", sees_eight, 1, 1, 16, TE_F32, -INFINITY, 7, 7, 7},
    {"W 8 of 16, bool", sees_eight, 1, 1, 16, TE_U8, 0, 7, 7, 7},
    {"the diagonal alone, window 0", sees_itself, 1, 1, 8, TE_F32, -INFINITY, 0, 0, 0},
    {"all visible", sees_all, 1, 1, 8, TE_F32, -INFINITY, -1, -2, -2},
    {"all visible, bool", sees_all, 1, 1, 8, TE_U8, 0, -1, -2, -2},
    {"first element masked", sees_not_the_first, 1, 1, 8, TE_F32, -INFINITY, -1, -2, -2},
    {"sequence 0 padded by 4", sees_right_padded, 2, 1, 16, TE_F32, -INFINITY, -1, -2, -2},
    {"the first row sees two", sees_two_at_first, 1, 1, 8, TE_F32, -INFINITY, -1, -2, -2},
    {"left-padded", sees_left_padded, 2, 1, 8, TE_F32, -INFINITY, -1, -2, -2},
    {"a key hidden from all rows", sees_no_third_key, 1, 1, 8, TE_F32, -INFINITY, -1, -2, -2},
    {"packed 4 + 4", sees_packed, 1, 1, 8, TE_F32, -INFINITY, -1, -2, -2},
    {"prefix", sees_prefix, 1, 1, 8, TE_F32, -INFINITY, -1, -2, -2},
    {"all masked", sees_none, 1, 1, 8, TE_F32, -INFINITY, -1, -2, -2},
    /* taken for causal by the rules of Automodel, which strict checks are not */
    {"image tokens 2..4", sees_image, 1, 1, 8, TE_F32, -INFINITY, -1, -1, -2},
    {"a hole in row 4", sees_a_hole, 1, 1, 8, TE_F32, -INFINITY, -1, -1, -2},
    {"head 1 sees all", sees_all_in_head_1, 1, 2, 8, TE_F32, -INFINITY, -1, -1, -2},
    {"packed 4 + 4, window 3", sees_packed, 1, 1, 8, TE_F32, -INFINITY, 3, 3, -2},
    {"long", sees_causal, 3, 1, 301, TE_BF16, -INFINITY, -1, -1, -1},
    {"long, a hole", sees_a_hole, 3, 1, 301, TE_U8, 0, -1, -1, -2},
};

TE_TEST_DEVICES(inject_masks_by_their_rules) {
    for (int i = 0; i < COUNT(mask_vectors); i++) {
        const mask_vector *v = &mask_vectors[i];
        te_tensor *mask = mask_of(te, v->dtype, v->b, v->h, v->s, v->sees, v->fill);
        for (int strict = 0; strict < 2; strict++) {
            const te_mask_check check = {.strict = strict != 0};
            const int64_t want = strict ? v->strict : v->found;
            te_window found = {0};
            test_case("%s%s", v->name, strict ? ", strict" : "");
            const bool causal = te_detect_causal_mask(mask, window_of(v->left, 0), &check, &found);
            CHECK_EQ_INT(causal, want != -2);
            if (causal) CHECK(found.on && found.left == want && found.right == 0);
        }
    }
    test_case("%s", "");
    CHECK(te_detect_causal_mask(mask_of(te, TE_F32, 1, 1, 4, sees_causal, -INFINITY), (te_window){0}, NULL, NULL)); /* no window given */
    CHECK(!te_detect_causal_mask(te_tensor_zeros(te, TE_I32, SHAPE(1, 1, 8, 8)), (te_window){0}, NULL, NULL));
    CHECK(!te_detect_causal_mask(te_tensor_zeros(te, TE_F32, SHAPE(1, 8, 8)), (te_window){0}, NULL, NULL));
    CHECK(!te_detect_causal_mask(te_tensor_zeros(te, TE_F32, SHAPE(1, 1, 4, 8)), (te_window){0}, NULL, NULL));
    CHECK(!te_detect_causal_mask(te_tensor_zeros(te, TE_F32, SHAPE(0, 1, 8, 8)), (te_window){0}, NULL, NULL));
    CHECK(!te_detect_causal_mask(NULL, (te_window){0}, NULL, NULL));
    CHECK_OK(te);
}

/* Views: a matrix among others, transposed, and expanded over sequences and heads by strides of 0. */
TE_TEST_DEVICES(inject_masks_by_their_strides) {
    te_tensor *all = mask_of(te, TE_F32, 1, 3, 8, sees_all_in_head_1, -INFINITY);
    for (int strict = 0; strict < 2; strict++) {
        const te_mask_check check = {.strict = strict != 0};
        CHECK(te_detect_causal_mask(te_tensor_narrow(all, 1, 2, 1), (te_window){0}, &check, NULL));
        CHECK(!te_detect_causal_mask(te_tensor_narrow(all, 1, 1, 1), (te_window){0}, &check, NULL));
        CHECK(!te_detect_causal_mask(te_tensor_transpose(te_tensor_narrow(all, 1, 2, 1), 2, 3), (te_window){0}, &check, NULL));
        te_tensor *part = te_tensor_narrow(te_tensor_narrow(all, 2, 2, 6), 3, 2, 6); /* still causal in itself */
        CHECK(te_detect_causal_mask(te_tensor_narrow(part, 1, 0, 1), (te_window){0}, &check, NULL));
    }
    CHECK_OK(te);
    te_op_detect_causal_mask_args a = {.mask = all, .causal = test_guarded(te, TE_I32, SHAPE(2))};
    CHECK_EQ_INT(te_op_detect_causal_mask(te, &a), TE_ERR_SHAPE);
    CHECK_ERROR(te, TE_ERR_SHAPE, "detect_causal_mask: causal is [2]; 1 element is needed");
    a.causal = te_tensor_zeros(te, TE_I32, SHAPE(1));
    a.window = window_of(3, 1);
    te_op_detect_causal_mask(te, &a);
    CHECK_ERROR(te, TE_ERR_INVALID, "detect_causal_mask: window is 3, 1");
    a.window = window_of(3, 0);
    a.mask = te_tensor_zeros(te, TE_F32, SHAPE(1, 1, 4, 8));
    te_op_detect_causal_mask(te, &a);
    CHECK_ERROR(te, TE_ERR_SHAPE, "mask is [1, 1, 4, 8]; [b, H, s, s]");
}

/* A verdict is kept until the mask is written; a capture that has one records no wait. */
TE_TEST_DEVICES(inject_masks_keep_their_verdicts) {
    const te_mask_check keep = {.strict = true, .cache = true};
    te_tensor *mask = mask_of(te, TE_F32, 1, 1, 8, sees_causal, -INFINITY), *other = mask_of(te, TE_F32, 1, 1, 8, sees_prefix, -INFINITY);
    CHECK(te_detect_causal_mask(mask, (te_window){0}, &keep, NULL));
    CHECK(!te_detect_causal_mask(other, (te_window){0}, &keep, NULL));
    CHECK(!te_detect_causal_mask(mask, window_of(3, 0), &keep, NULL)); /* another question */
    te_graph_begin(te);
    CHECK(te_detect_causal_mask(mask, (te_window){0}, &keep, NULL));
    CHECK(!te_detect_causal_mask(other, (te_window){0}, &keep, NULL));
    CHECK(!te_detect_causal_mask(mask, (te_window){0}, NULL, NULL)); /* nothing kept is asked for, and the capture goes on */
    te_graph_destroy(te_graph_end(te));
    CHECK_OK(te);
    te_tensor_copy(mask, other);
    CHECK(!te_detect_causal_mask(mask, (te_window){0}, &keep, NULL));
    for (int i = 0; i < 20; i++) { /* more masks than places, in memory that comes back */
        te_scope_begin(te);
        te_tensor *x = mask_of(te, TE_F32, 1, 1, 8, i % 2 ? sees_causal : sees_image, -INFINITY);
        for (int again = 0; again < 2; again++) CHECK_EQ_INT(te_detect_causal_mask(x, (te_window){0}, &keep, NULL), i % 2);
        te_scope_end(te);
    }
    CHECK_OK(te);
}

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
    te_te_sdpa *f;
} mocks;
static void mocks_open(mocks *m, te_ctx *te, int heads, int kv_heads, te_window window, float scale) {
    memset(m, 0, sizeof *m);
    m->module = te_module_create(te, &mock_class, "mock");
    *(heard **)te_module_state(m->module) = &m->te;
    m->f = te_make_te_sdpa(te, &(te_make_te_sdpa_desc){.te_module = m->module, .num_heads = heads, .num_kv_heads = kv_heads, .original = mock_original, .original_user = &m->original,
                                                       .window_size = window, .softmax_scale = scale});
}
static void mocks_close(mocks *m) {
    te_te_sdpa_destroy(m->f);
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
    te_tensor *y = te_te_sdpa_call(m.f, q, k, v, &(te_sdpa_args){.is_causal = true, .enable_gqa = true});
    CHECK_SHAPE(m.te.q, 2, 10, 8, 64);
    CHECK_SHAPE(m.te.k, 2, 10, 4, 64);
    CHECK_EQ_INT(m.te.mask, TE_MASK_CAUSAL);
    CHECK(!m.te.window.on);
    CHECK_SHAPE(te_tensor_shape(y), 2, 8, 10, 64);
    CHECK_BYTES("out", test_read(te_tensor_contiguous(y)), test_read(q), 2 * 8 * 10 * 64 * 4); /* the mock's output is its query */
    te_te_sdpa_call(m.f, q, k, v, &(te_sdpa_args){.enable_gqa = true});
    CHECK_EQ_INT(m.te.mask, TE_MASK_NONE);
    CHECK(m.te.window.on && m.te.window.left == -1 && m.te.window.right == -1);
    check_stats(te_get_te_attention_stats(te), 2, 0, 0, 0);
    check_stats(te_te_sdpa_stats(m.f), 2, 0, 0, 0);
    te_reset_te_attention_stats(te);
    /* scales */
    static const float scales[] = {0.5f, 0.125f, 0.125f + 1e-9f, 0, 0.5f};
    for (int i = 0; i < COUNT(scales); i++) te_te_sdpa_call(m.f, q, k, v, &(te_sdpa_args){.is_causal = true, .enable_gqa = true, .scale = scales[i], .dropout_p = i == 4 ? 0.25f : 0});
    check_stats(te_get_te_attention_stats(te), 3, 0, 2, 0);
    CHECK_EQ_INT(m.original.calls, 2);
    CHECK(m.original.args.scale == 0.5f && m.original.args.dropout_p == 0.25f && m.original.args.is_causal && m.original.args.enable_gqa && !m.original.args.attn_mask);
    te_reset_te_attention_stats(te);
    te_te_sdpa_call(m.f, q, k, v, &(te_sdpa_args){.scale = 0.5f, .attn_mask = te_tensor_zeros(te, TE_F32, SHAPE(1, 1, 10, 10))}); /* the scale is asked before the mask */
    check_stats(te_get_te_attention_stats(te), 0, 0, 1, 0);
    CHECK_EQ_INT(log_lines("a call's scale is 0.5, that of its DotProductAttention 0.125"), 1);
    mocks_close(&m);
    /* no scale of its own: no mismatch */
    mocks_open(&m, te, 8, 4, (te_window){0}, 0);
    te_te_sdpa_call(m.f, q, k, v, &(te_sdpa_args){.scale = 0.5f, .enable_gqa = true});
    CHECK_EQ_INT(m.te.calls, 1);
    /* what no te_module was made for */
    te_reset_te_attention_stats(te);
    te_te_sdpa_call(m.f, heads_of(te, 1, 6, 4, 64, 1), k, v, NULL);
    te_te_sdpa_call(m.f, q, q, q, &(te_sdpa_args){.enable_gqa = true}); /* nothing is stripped where heads may differ */
    te_te_sdpa_call(m.f, q, k, v, &(te_sdpa_args){.dropout_p = 0.5f});  /* this module cannot drop */
    check_stats(te_get_te_attention_stats(te), 0, 0, 0, 3);
    mocks_close(&m);
    CHECK_OK(te);
}

TE_TEST(inject_sdpa_gives_repeated_heads_back) {
    te_ctx *te = test_context("cpu");
    mocks m;
    mocks_open(&m, te, 8, 2, (te_window){0}, 0);
    te_tensor *q = heads_of(te, 1, 8, 4, 32, 1), *k = heads_of(te, 1, 8, 4, 32, 2), *v = heads_of(te, 1, 8, 4, 32, 3);
    te_te_sdpa_call(m.f, q, k, v, &(te_sdpa_args){.is_causal = true});
    CHECK_SHAPE(m.te.k, 1, 4, 2, 32);
    CHECK_SHAPE(m.te.v, 1, 4, 2, 32);
    te_te_sdpa_call(m.f, q, te_tensor_narrow(k, 1, 0, 2), te_tensor_narrow(v, 1, 0, 2), &(te_sdpa_args){.is_causal = true}); /* given back already */
    CHECK_SHAPE(m.te.k, 1, 4, 2, 32);
    /* masks */
    te_reset_te_attention_stats(te);
    te_te_sdpa_call(m.f, q, k, v, &(te_sdpa_args){.attn_mask = te_tensor_zeros(te, TE_F32, SHAPE(1, 1, 4, 4)), .dropout_p = 0.5f});
    CHECK_EQ_INT(m.te.calls, 2);
    CHECK_EQ_INT(m.original.calls, 1);
    CHECK(m.original.args.attn_mask && m.original.args.dropout_p == 0.5f);
    te_te_sdpa_call(m.f, q, k, v, &(te_sdpa_args){.attn_mask = mask_of(te, TE_F32, 1, 1, 4, sees_causal, -INFINITY), .is_causal = true});
    CHECK(m.te.calls == 3 && m.te.mask == TE_MASK_CAUSAL && m.te.window.left == -1);
    check_stats(te_get_te_attention_stats(te), 1, 1, 0, 0);
    mocks_close(&m);
    mocks_open(&m, te, 8, 2, window_of(3, 0), 0); /* a layer with a window: not where all keys are seen */
    te_te_sdpa_call(m.f, q, k, v, NULL);
    CHECK(m.te.mask == TE_MASK_NONE && m.te.window.left == -1 && m.te.window.right == -1);
    te_te_sdpa_call(m.f, q, k, v, &(te_sdpa_args){.is_causal = true});
    CHECK(m.te.window.on && m.te.window.left == 3 && m.te.window.right == 0);
    /* the call fails: no hit */
    te_reset_te_attention_stats(te);
    m.te.fails = true;
    CHECK(!te_te_sdpa_call(m.f, q, k, v, NULL));
    CHECK_ERROR(te, TE_ERR_UNSUPPORTED, "Mock");
    check_stats(te_get_te_attention_stats(te), 0, 0, 0, 0);
    mocks_close(&m);
}

/* A line for every so many calls; a copy of the counters is a copy. */
TE_TEST(inject_stats_every) {
    static const struct {
        const char *every;
        int lines;
    } cases[] = {{"2", 2}, {"0", 0}, {"-3", 0}, {NULL, 0}, {"5", 1}};
    for (int i = 0; i < COUNT(cases); i++) {
        mocks m;
        test_setenv("AUTOMODEL_TE_STATS_EVERY", cases[i].every);
        te_ctx *te = test_context_with(&(te_ctx_desc){.log_level = TE_LOG_INFO});
        const int before = log_lines("te_attention: of ");
        mocks_open(&m, te, 1, 1, (te_window){0}, 0);
        te_tensor *x = heads_of(te, 1, 1, 3, 4, 1);
        for (int n = 0; n < 5; n++) te_te_sdpa_call(m.f, x, x, x, &(te_sdpa_args){.attn_mask = n == 1 ? te_tensor_zeros(te, TE_F32, SHAPE(1, 1, 3, 3)) : NULL});
        CHECK_EQ_INT(log_lines("te_attention: of ") - before, cases[i].lines);
        if (cases[i].lines == 2) {
            CHECK_STR(test_log_text(), "of 2 calls 1 by DotProductAttention; fallbacks: 1 for masks, 0 for scales, 0 others");
            CHECK_STR(test_log_text(), "of 4 calls 3 by DotProductAttention");
        }
        te_attention_stats copy = te_get_te_attention_stats(te);
        copy.te_hits += 77;
        check_stats(te_get_te_attention_stats(te), 4, 1, 0, 0);
        CHECK_EQ_INT(copy.te_hits, 81);
        te_reset_te_attention_stats(te);
        check_stats(te_get_te_attention_stats(te), 0, 0, 0, 0);
        mocks_close(&m);
        CHECK_OK(te);
    }
    test_setenv("AUTOMODEL_TE_STATS_EVERY", "many");
    te_ctx *te = test_context("cpu");
    te_module *m = te_linear_create(te, &(te_linear_desc){.in_features = 2, .out_features = 2});
    CHECK_OK(te);
    CHECK_EQ_INT(te_inject_te_attention(m, NULL), -1);
    CHECK_ERROR(te, TE_ERR_INVALID, "AUTOMODEL_TE_STATS_EVERY was \"many\"");
    CHECK(!te_make_te_sdpa(te, &(te_make_te_sdpa_desc){.te_module = m, .num_heads = 1, .num_kv_heads = 1}));
    CHECK_ERROR(te, TE_ERR_INVALID, "AUTOMODEL_TE_STATS_EVERY was \"many\"");
    te_module_destroy(m);
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
