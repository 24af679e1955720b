/* tests/model/inject.h: counters of injected attention, lines of the log, masks, and all numbers of a forward and its backward. */
#ifndef TESTS_MODEL_INJECT_H
#define TESTS_MODEL_INJECT_H

#include "../te_test.h"

static TE_MAYBE_UNUSED te_window window_of(int64_t left, int64_t right) { return (te_window){.on = true, .left = left, .right = right}; }
static TE_MAYBE_UNUSED void check_stats(te_attn_stats s, int hits, int mask, int scale, int other) {
    CHECK_EQ_INT(s.te_hits, hits);
    CHECK_EQ_INT(s.fallback_mask, mask);
    CHECK_EQ_INT(s.fallback_scale_mismatch, scale);
    CHECK_EQ_INT(s.fallback_other, other);
}
static TE_MAYBE_UNUSED int log_lines(const char *needle) {
    int n = 0;
    for (const char *at = test_log_text(); (at = strstr(at, needle)) != NULL; at++) n++;
    return n;
}

/* ---- masks ---- */

/* Which keys row i of sequence b sees. */
typedef bool (*sees_fn)(int b, int h, int64_t i, int64_t j, int64_t s);
static TE_MAYBE_UNUSED bool sees_causal(int b, int h, int64_t i, int64_t j, int64_t s) { return (void)b, (void)h, (void)s, j <= i; }
static TE_MAYBE_UNUSED bool sees_four(int b, int h, int64_t i, int64_t j, int64_t s) { return (void)b, (void)h, (void)s, j <= i && i - j < 4; }
static TE_MAYBE_UNUSED bool sees_eight(int b, int h, int64_t i, int64_t j, int64_t s) { return (void)b, (void)h, (void)s, j <= i && i - j < 8; }
static TE_MAYBE_UNUSED bool sees_itself(int b, int h, int64_t i, int64_t j, int64_t s) { return (void)b, (void)h, (void)s, i == j; }
static TE_MAYBE_UNUSED bool sees_all(int b, int h, int64_t i, int64_t j, int64_t s) { return (void)b, (void)h, (void)i, (void)j, (void)s, true; }
static TE_MAYBE_UNUSED bool sees_none(int b, int h, int64_t i, int64_t j, int64_t s) { return (void)b, (void)h, (void)i, (void)j, (void)s, false; }
static TE_MAYBE_UNUSED bool sees_right_padded(int b, int h, int64_t i, int64_t j, int64_t s) { return (void)h, j <= i && (b || j < s - 4); }
static TE_MAYBE_UNUSED bool sees_left_padded(int b, int h, int64_t i, int64_t j, int64_t s) { return (void)h, (void)s, j <= i && (b == 0 || j >= 2); }
static TE_MAYBE_UNUSED bool sees_not_the_first(int b, int h, int64_t i, int64_t j, int64_t s) { return (void)b, (void)h, (void)s, j <= i && (i || j); }
static TE_MAYBE_UNUSED bool sees_two_at_first(int b, int h, int64_t i, int64_t j, int64_t s) { return (void)b, (void)h, (void)s, j <= i || (i == 0 && j == 1); }
static TE_MAYBE_UNUSED bool sees_no_third_key(int b, int h, int64_t i, int64_t j, int64_t s) { return (void)b, (void)h, (void)s, j <= i && j != 2; }
static TE_MAYBE_UNUSED bool sees_packed(int b, int h, int64_t i, int64_t j, int64_t s) { return (void)b, (void)h, j <= i && i / (s / 2) == j / (s / 2); }
static TE_MAYBE_UNUSED bool sees_prefix(int b, int h, int64_t i, int64_t j, int64_t s) { return (void)b, (void)h, (void)s, j <= i || j < 3; }
static TE_MAYBE_UNUSED bool sees_image(int b, int h, int64_t i, int64_t j, int64_t s) { return (void)b, (void)h, (void)s, j <= i || (i >= 2 && i <= 4 && j >= 2 && j <= 4); }
static TE_MAYBE_UNUSED bool sees_a_hole(int b, int h, int64_t i, int64_t j, int64_t s) { return (void)b, (void)h, (void)s, j <= i && !(i == 4 && j == 2); }
static TE_MAYBE_UNUSED bool sees_all_in_head_1(int b, int h, int64_t i, int64_t j, int64_t s) { return (void)b, (void)s, j <= i || h == 1; }

/* u8: 1 where a row sees a key; else 0 there and `fill` elsewhere. */
static TE_MAYBE_UNUSED te_tensor *mask_of(te_ctx *te, te_dtype dtype, int b, int h, int64_t s, sees_fn sees, float fill) {
    float *x = test_floats(b * h * s * s);
    uint8_t *bytes = (uint8_t *)test_alloc((size_t)(b * h * s * s) + 1);
    for (int64_t at = 0; at < b * h * s * s; at++) {
        const bool seen = sees((int)(at / (s * s) / h), (int)(at / (s * s) % h), at / s % s, at % s, s);
        x[at] = seen ? 0 : fill;
        bytes[at] = seen;
    }
    return dtype == TE_U8 ? te_tensor_from_host(te, TE_U8, SHAPE(b, h, s, s), bytes) : test_tensor(te, dtype, SHAPE(b, h, s, s), x);
}

/* Numbers of a forward and a backward: the output, and the gradients of all parameters behind it. */
typedef struct results {
    float *x;
    int64_t n;
} results;
static void results_add(results *r, const float *x, int64_t n) {
    float *all = test_floats(r->n + n);
    memcpy(all, r->x, (size_t)r->n * sizeof(float));
    memcpy(all + r->n, x, (size_t)n * sizeof(float));
    r->x = all;
    r->n += n;
}
static bool results_add_gradient(void *user, te_module *m, const char *path, te_tensor *x, te_entry_kind kind) {
    (void)m, (void)path;
    if (kind == TE_ENTRY_PARAMETER && te_tensor_grad(x)) results_add((results *)user, test_read(te_tensor_grad(x)), te_tensor_numel(x));
    return true;
}
static TE_MAYBE_UNUSED results run_once(te_module *m, te_tensor *x, te_sdpa_args *args) {
    te_ctx *te = te_module_ctx(m);
    results r = {test_floats(0), 0};
    te_scope_begin(te);
    te_forward_args call = {.input = x, .user = args};
    te_tensor *y = te_forward_with(m, &call);
    te_backward(te_mean_all(te_softcap(y, 3))); /* rows have gradients of their own */
    if (te_ok(te)) {
        results_add(&r, test_read(y), te_tensor_numel(y));
        te_module_visit_tensors(m, results_add_gradient, &r);
    }
    te_scope_end(te);
    te_module_zero_grad(m);
    return r;
}

#endif
