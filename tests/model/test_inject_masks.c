/* test_inject_masks.c: masks that are causal and masks that only look so, by Automodel's rules and element by element; views, and verdicts that are kept. */
#include "inject.h"

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

/* Views: a matrix among others, transposed, and part of one. test_expanded_masks.c has strides of 0. */
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
