/* tests/quant/test_amax_words.c: the words in which an amax goes from the operation that finds it to the cast. */
#define TE_STATIC
#define TE_IMPLEMENTATION
#include "../te_test.h"

static te__quant_spec current_spec(void) {
    te__quant_spec spec = TE_ZERO;
    spec.cls = te__quant_class_of(TE_QUANT_CURRENT);
    spec.dtype = TE_F8E4M3;
    spec.usage = TE_ROWWISE;
    return spec;
}
static te_result norm_into(te_tensor *x, te__quant_out *out) {
    te_norm_fwd_args args = TE_ZERO;
    args.x = x;
    args.gamma = te_tensor_full(x->te, TE_F32, SHAPE(te__cols(x)), 1);
    args.y = out->plain;
    args.rstd = te__empty_1d(x->te, TE_F32, te__rows(x));
    args.amax = out->amax;
    return te_op_rmsnorm_fwd(x->te, &args);
}
static te_result act_into(te_tensor *x, te__quant_out *out) {
    te_op_act_fwd_args args = TE_ZERO;
    args.x = x;
    args.y = out->plain;
    args.activation = TE_GELU;
    args.amax = out->amax;
    return te_op_act_fwd(x->te, &args);
}
static int words_taken(te_ctx *te) {
    int n = 0;
    for (int i = 0; i < TE__AMAX_WORDS; i++) {
        n += te__quant_of(te)->amax_words[i].taken;
        if (te__quant_of(te)->amax_words[i].taken) continue;
        const uint32_t *bits = (const uint32_t *)test_read_bytes(&te__quant_of(te)->amax_words[i].pair);
        CHECK(bits[0] == 0 && bits[1] == 0);
    }
    return n;
}

/* Each quantizer reads the amax that it was handed, whatever is quantized in between, in a word, or without one in a tensor: the same codes, also where the amax is
 * that of numbers before they were rounded. */
TE_TEST_DEVICES(amaxes_are_handed_over) {
    enum { ROWS = 5, COLS = 64 };
    te__quant_spec spec = current_spec();
    te_tensor *x[2] = {te_tensor_normal(te, TE_BF16, SHAPE(ROWS, COLS), 0, 1), te_tensor_normal(te, TE_BF16, SHAPE(ROWS, COLS), 3, 9)}, *words[TE__AMAX_WORDS];
    te__quant_out out[2];
    for (int i = 0; i < 2; i++) {
        out[i] = te__quant_out_open(te, TE_BF16, SHAPE(ROWS, COLS), &spec);
        REQUIRE(out[i].y && out[i].x_amax && out[i].amax);
    }
    CHECK(out[0].x_amax != out[1].x_amax && words_taken(te) == 2);
    for (int i = 0; i < 2; i++) CHECK_EQ_INT((i ? act_into : norm_into)(x[i], &out[i]), TE_OK); /* both are on their way at once */
    for (int i = 0; i < 2; i++) CHECK_EQ_INT(te__quant_out_close(&out[i], &spec, TE_OK), TE_OK);
    CHECK_EQ_INT(words_taken(te), 0);
    for (int i = 0; i < TE__AMAX_WORDS; i++) CHECK((words[i] = te__amax_take(te)) != NULL);
    CHECK(!te__amax_take(te));
    for (int i = 0; i < 2; i++) {
        te__quant_out measured = te__quant_out_open(te, TE_BF16, SHAPE(ROWS, COLS), &spec);
        REQUIRE(measured.y && !measured.x_amax && measured.amax);
        CHECK_EQ_INT((i ? act_into : norm_into)(x[i], &measured), TE_OK);
        CHECK_EQ_INT(te__quant_out_close(&measured, &spec, TE_OK), TE_OK);
        CHECK_BYTES("codes", test_read_bytes(out[i].y->quantized->row.data), test_read_bytes(measured.y->quantized->row.data), ROWS * COLS);
        CHECK_BYTES("scale", test_read_bytes(out[i].y->quantized->row.scale), test_read_bytes(measured.y->quantized->row.scale), 4);
    }
    for (int i = 0; i < TE__AMAX_WORDS; i++) te__amax_give(words[i], true);

    /* a call that fails in between leaves nothing in its word */
    out[0] = te__quant_out_open(te, TE_BF16, SHAPE(ROWS, COLS), &spec);
    CHECK_EQ_INT(norm_into(x[1], &out[0]), TE_OK);
    CHECK_EQ_INT(te__quant_out_close(&out[0], &spec, TE_ERR_INVALID), TE_ERR_INVALID);
    CHECK_EQ_INT(words_taken(te), 0);
    CHECK_OK(te);
}

/* The amax of what a norm leaves goes to the quantizer behind it by a word of two halves, which has to lie at a multiple of 8 bytes. */
TE_TEST_DEVICES(current_scaling_behind_a_norm) {
    te_recipe recipe = te_recipe_current_scaling();
    te_layernorm_linear_desc d = {0};
    d.in_features = d.out_features = 64;
    te_module *m = te_layernorm_linear_create(te, &d);
    te_tensor *y = test_forward(m, &recipe, te_tensor_normal(te, TE_BF16, SHAPE(32, 64), 0, 1));
    CHECK_OK(te);
    CHECK(y != NULL);
    te_module_destroy(m);
}
