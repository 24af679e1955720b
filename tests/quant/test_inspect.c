/* tests/quant/test_inspect.c: what te_quant_inspect says, against plain loops, and that it changes nothing. */
#include "../te_test.h"

typedef struct seen {
    int count;
    char text[2048];
    te_quantizer_role role[32];
    char name[32][64];
    te_quant_stats stats[32];
} seen;
static bool note(void *user, const te_quantizer_role *role, const te_quant_stats *stats) {
    seen *s = (seen *)user;
    if (s->count == COUNT(s->role)) return false;
    s->role[s->count] = *role;
    snprintf(s->name[s->count], sizeof s->name[0], "%s", role->name);
    s->stats[s->count++] = *stats;
    return true;
}

/* x [4, 16] whose numbers meet every fate at scale 1 in E4M3: kept, rounded, lost, beyond 448, infinite, NaN, zero. */
TE_TEST_DEVICES(inspection_counts_and_measures) {
    enum { N = 64 };
    float x[N], y[N];
    double xx = 0, yy = 0, xy = 0, ee = 0, amax = 0, worst = 0;
    for (int i = 0; i < N; i++) x[i] = 0.37f * (float)(i - 30);
    x[1] = 1e-4f, x[2] = -2e-4f, x[3] = 9e-4f; /* half of the smallest E4M3 number is 2^-10 */
    x[4] = 449, x[5] = 1000, x[6] = -5000;
    x[7] = INFINITY, x[8] = NAN, x[9] = -0.0f, x[10] = NAN;
    te_linear_desc d = {0};
    d.in_features = 16;
    d.out_features = 8;
    d.gemm.no_bias = true;
    d.gemm.params_dtype = TE_F32;
    te_module *m = te_linear_create(te, &d);
    te_recipe r = te_recipe_delayed_scaling(); /* starts from scale 1 */
    te_quantizer_desc same = {0};
    same.kind = TE_QUANT_DELAYED;
    te_quantizer *q = te_quantizer_create(te, &same);
    te_tensor *t = test_tensor(te, TE_F32, SHAPE(4, 16), x);
    te_tensor_to_f32(te_dequantize(te_quantize(q, t), TE_F32), y);
    CHECK_EQ_INT(te_quant_inspect(te, true), TE_OK);
    te_no_grad_begin(te);
    CHECK(test_forward(m, &r, t) != NULL);
    te_no_grad_end(te);
    seen s = {0};
    CHECK_EQ_INT(te_quant_stats_visit(te, note, &s), TE_OK);
    REQUIRE(s.count == 2); /* input and weight: there was no backward */
    const te_quant_stats *in = &s.stats[0];
    CHECK(s.role[0].tensor_type == TE_TENSOR_INPUT && s.role[1].tensor_type == TE_TENSOR_WEIGHT && s.role[0].gemm == 0);
    CHECK_STR(s.name[0], "linear");
    CHECK_STR(s.role[0].module_type, "Linear");
    int under = 0, beyond = 0, zeros = 0;
    for (int i = 0; i < N; i++) {
        under += x[i] != 0 && y[i] == 0;
        beyond += isfinite(x[i]) && fabsf(x[i]) > 448 * 1.004f;
        zeros += x[i] == 0;
        if (!isnan(x[i])) amax = fmax(amax, fabs((double)x[i]));
        if (!isfinite(x[i]) || !isfinite(y[i])) continue;
        xx += (double)x[i] * x[i], yy += (double)y[i] * y[i], xy += (double)x[i] * y[i], ee += ((double)x[i] - y[i]) * ((double)x[i] - y[i]);
        worst = fmax(worst, fabs((double)x[i] - y[i]));
    }
    CHECK(under == 3 && beyond == 2 && zeros == 2);
    CHECK_EQ_INT(in->elements, N);
    CHECK_EQ_INT(in->nan_count, 2);
    CHECK_EQ_INT(in->inf_count, 1);
    CHECK_EQ_INT(in->zeros, zeros);
    CHECK(in->kind == TE_QUANT_DELAYED && in->which == TE_ROWWISE && in->scale == 1 && in->amax == (float)amax);
    CHECK(in->underflow == (float)under / N && in->saturated == (float)beyond / N);
    /* sums of 64 numbers in f32: some 64 * 2^-24 */
    CHECK(fabs((double)in->cosine - xy / sqrt(xx * yy)) < 1e-5 && fabs((double)in->snr_db - 10 * log10(xx / ee)) < 1e-3);
    CHECK((double)in->max_error == worst);
    /* again on: forgotten; off: nothing is measured */
    te_quant_inspect(te, true);
    memset(&s, 0, sizeof s);
    te_quant_stats_visit(te, note, &s);
    CHECK_EQ_INT(s.count, 0);
    te_quant_inspect(te, false);
    test_forward(m, &r, t);
    te_quant_stats_visit(te, note, &s);
    CHECK_EQ_INT(s.count, 0);
    CHECK_OK(te);
    te_quantizer_destroy(q);
    te_module_destroy(m);
}

/* Every slot of every module once, and not a bit of the results differs: also where a norm or an activation quantizes on its way out,
 * with dropout, and where rounding is random. */
TE_TEST_DEVICES(inspection_changes_nothing) {
    te_recipe (*const make[])(void) = {te_recipe_delayed_scaling, te_recipe_current_scaling, te_recipe_block_scaling, te_recipe_mxfp8, te_recipe_nvfp4};
    static const char *const modules[] = {"self_attention.layernorm_qkv", "self_attention.proj", "layernorm_mlp"};
    for (int i = 0; i < COUNT(make); i++) {
        te_recipe r = make[i]();
        uint8_t *y[2], *dx[2];
        size_t bytes = 0;
        test_case("%s", te_recipe_name(r.kind));
        for (int on = 0; on < 2; on++) {
            te_scope_begin(te);
            te_transformer_layer_desc d = {0};
            d.hidden_size = 32;
            d.ffn_hidden_size = 48;
            d.attention.num_attention_heads = 2;
            d.hidden_dropout = 0.25f;
            te_seed(te, 9);
            te_module *m = te_transformer_layer_create(te, &d);
            te_tensor *x = te_tensor_set_requires_grad(test_tensor(te, TE_BF16, SHAPE(5, 2, 32), test_normal(320, 4)), true), *out = NULL;
            te_quant_inspect(te, on);
            for (int pass = 0; pass < 2; pass++) { /* the second has delayed scales that the first one left */
                te_tensor_zero_grad(x);
                out = test_forward(m, &r, x);
                te_backward_from(out, test_tensor(te, TE_BF16, SHAPE(5, 2, 32), test_normal(320, 6)));
            }
            REQUIRE_OK(te);
            bytes = te_tensor_bytes(out);
            y[on] = (uint8_t *)test_read_bytes(out);
            dx[on] = (uint8_t *)test_read_bytes(te_tensor_grad(x));
            seen s = {0};
            te_quant_stats_visit(te, note, &s);
            CHECK_EQ_INT(s.count, on ? 12 : 0); /* four products with three operands each */
            for (int k = 0; k < s.count; k++) {
                CHECK_STR(s.name[k], modules[k < 3 ? 0 : k < 6 ? 1 : 2]);
                CHECK(s.role[k].gemm == (k >= 9) && s.stats[k].elements > 0 && s.stats[k].amax > 0 && s.stats[k].cosine > 0.9f && s.stats[k].nan_count == 0);
                for (int j = 0; j < k; j++) CHECK(strcmp(s.name[j], s.name[k]) || s.role[j].gemm != s.role[k].gemm || s.role[j].tensor_type != s.role[k].tensor_type);
            }
            te_quant_inspect(te, false);
            te_module_destroy(m);
            te_scope_end(te);
        }
        CHECK_BYTES("y", y[1], y[0], bytes);
        CHECK_BYTES("dx", dx[1], dx[0], bytes);
    }
    CHECK_OK(te);
}

static bool inspect_again(void *user, const te_quantizer_role *role, const te_quant_stats *stats) {
    (void)role, (void)stats;
    te_quant_inspect((te_ctx *)user, true);
    return true;
}
TE_TEST(a_visitor_of_statistics_may_begin_anew) {
    te_ctx *te = test_context("cpu");
    te_module *m = te_linear_create(te, &(te_linear_desc){.in_features = 16, .out_features = 16});
    te_recipe recipe = te_recipe_current_scaling();
    te_quant_inspect(te, true);
    test_forward(m, &recipe, te_tensor_full(te, TE_BF16, SHAPE(4, 16), 1));
    CHECK_EQ_INT(te_quant_stats_visit(te, inspect_again, te), TE_OK);
    CHECK_OK(te);
    te_module_destroy(m);
}
