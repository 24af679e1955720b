/* tests/model/inject.h: counters of injected attention, lines of the log, and all numbers of a forward and its backward. */
#ifndef TESTS_MODEL_INJECT_H
#define TESTS_MODEL_INJECT_H

#include "../te_test.h"

static TE_MAYBE_UNUSED te_window window_of(int64_t left, int64_t right) { return (te_window){.on = true, .left = left, .right = right}; }
static TE_MAYBE_UNUSED void check_stats(te_attention_stats s, int hits, int mask, int scale, int other) {
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
