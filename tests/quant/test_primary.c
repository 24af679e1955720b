/* tests/quant/test_primary.c: models whose weights are stored quantized: which weights, what they compute, how they train, where their codes lie,
 * what a file holds of them. A twin that keeps its weights in bf16, and quantizes them in every forward, must give the same bits. */
#include "../faults/purse.h"

/* ---- recipes, and the quantizer that each has for a weight --------------------------------------------------------- */

enum { RECIPES = 7, HIDDEN = 48, BATCH = 6, OWN = 6 };
static const char *const recipe_text[RECIPES] = {"delayed", "current", "block", "mxfp8", "nvfp4", "custom (hybrid weights)", "custom (quantizer of one's own)"};
static const te_quant_kind weight_kind[RECIPES] = {TE_QUANT_DELAYED, TE_QUANT_CURRENT, TE_QUANT_BLOCK, TE_QUANT_MXFP8, TE_QUANT_NVFP4, TE_QUANT_HYBRID, TE_QUANT_CUSTOM};

/* A quantizer of one's own: eighths. */
static te_result to_eighths(void *user, te_tensor *x, int which, te_tensor **data, te_tensor **scale) {
    te_ctx *te = te_tensor_ctx(x);
    float *v, *back;
    int64_t n = te_tensor_numel(x);
    (void)which, (void)scale;
    if (user && which == TE_COLUMNWISE) return TE_ERR_UNSUPPORTED;
    v = (float *)malloc((size_t)n * 2 * sizeof *v);
    back = v + n;
    te_tensor_to_f32(x, v);
    for (int64_t i = 0; i < n; i++) back[i] = nearbyintf(v[i] * 8);
    *data = te_tensor_from_f32(te, TE_BF16, te_tensor_ndim(x), te_tensor_shape(x), back);
    free(v);
    return te_error_code(te);
}
static te_tensor *from_eighths(void *user, te_tensor *data, te_tensor *scale, int which, int ndim, const int64_t *shape, te_dtype dtype) {
    (void)user, (void)scale, (void)which, (void)ndim, (void)shape;
    return te_tensor_cast(te_scale(data, 0.125f), dtype);
}
static const te_custom_quantizer eighths = {"eighths", NULL, to_eighths, from_eighths, NULL}, broken = {"broken", "not NULL", to_eighths, from_eighths, NULL};

/* The factory's quantizer of weights; the other operands are quantized by their own amaxes. */
typedef enum factory_mode { HYBRID_WEIGHTS, OWN_WEIGHTS, PLAIN_WEIGHTS, FAILS_AT_FC2, BREAKS_HALFWAY } factory_mode;
static te_quantizer_desc hybrid_row, hybrid_col;
static void weight_desc(factory_mode mode, te_quantizer_desc *d) {
    hybrid_row.kind = TE_QUANT_CURRENT;
    hybrid_col.kind = TE_QUANT_BLOCK;
    d->kind = mode == HYBRID_WEIGHTS ? TE_QUANT_HYBRID : mode == PLAIN_WEIGHTS ? TE_QUANT_NONE : mode == FAILS_AT_FC2 ? TE_QUANT_CURRENT : TE_QUANT_CUSTOM;
    if (d->kind == TE_QUANT_HYBRID) d->hybrid.rowwise_quantizer = &hybrid_row, d->hybrid.columnwise_quantizer = &hybrid_col;
    if (d->kind == TE_QUANT_CUSTOM) d->custom = mode == BREAKS_HALFWAY ? &broken : &eighths;
}
static te_result factory(void *user, const te_quantizer_role *role, te_quantizer_desc *d) {
    factory_mode mode = *(factory_mode *)user;
    d->kind = TE_QUANT_CURRENT;
    if (role->tensor_type == TE_TENSOR_GRAD_OUTPUT) d->dtype = TE_F8E5M2;
    if (role->tensor_type == TE_TENSOR_WEIGHT) weight_desc(mode, d);
    return mode == FAILS_AT_FC2 && role->gemm == 1 ? TE_ERR_UNSUPPORTED : TE_OK;
}
static te_recipe recipe_with(factory_mode mode) {
    static factory_mode modes[] = {HYBRID_WEIGHTS, OWN_WEIGHTS, PLAIN_WEIGHTS, FAILS_AT_FC2, BREAKS_HALFWAY};
    return te_recipe_custom(factory, &modes[mode]);
}
static te_recipe recipe_of(int i) {
    te_recipe r = i == 0 ? te_recipe_delayed_scaling() : i == 1 ? te_recipe_current_scaling() : i == 2 ? te_recipe_block_scaling() : i == 3 ? te_recipe_mxfp8() : te_recipe_nvfp4();
    if (i == 0) r.delayed.amax_history_len = 4;
    return i < 5 ? r : recipe_with(i == 5 ? HYBRID_WEIGHTS : OWN_WEIGHTS);
}
/* `x` quantized as recipe i quantizes weights (delayed: with scale 1). */
static te_tensor *as_weight(int i, te_tensor *x) {
    te_quantizer_desc d = {0};
    d.kind = weight_kind[i];
    d.quantization_2d = i == 4 ? TE_ON : TE_DEFAULT;
    if (i >= 5) weight_desc(i == 5 ? HYBRID_WEIGHTS : OWN_WEIGHTS, &d);
    te_quantizer *q = te_quantizer_create(te_tensor_ctx(x), &d);
    te_tensor *y = te_quantize(q, te_tensor_detach(x));
    te_quantizer_destroy(q);
    return y;
}

/* ---- a model, its optimizer, its training -------------------------------------------------------------------------- */

typedef struct session {
    te_ctx *te;
    te_module *model;
    te_optimizer *adam;
    int recipe;
} session;
static void close_session(void *arg) {
    session *s = (session *)arg;
    te_optimizer_destroy(s->adam);
    te_module_destroy(s->model);
}
static te_module *layer_of(te_ctx *te, int64_t hidden) {
    return te_transformer_layer_create(te, &(te_transformer_layer_desc){.hidden_size = hidden, .ffn_hidden_size = 40, .attention.num_attention_heads = 2, .activation = TE_SWIGLU});
}
static session *open_session(te_ctx *te, int recipe, bool quantized, uint64_t seed) {
    session *s = (session *)test_alloc(sizeof *s);
    te_recipe r = recipe_of(recipe);
    s->te = te;
    s->recipe = recipe;
    te_seed(te, seed);
    te_quantized_model_init_begin(te, &(te_quantized_model_init_desc){.recipe = &r, .disabled = !quantized, .preserve_high_precision_init_val = true});
    s->model = layer_of(te, HIDDEN);
    te_quantized_model_init_end(te);
    s->adam = te_fused_adam_create(te, s->model, &(te_fused_adam_desc){.lr = 0.01f, .weight_decay = 0.1f, .max_grad_norm = 1});
    test_on_end(close_session, s);
    return s;
}

typedef struct collector {
    test_bytes *b;
    int recipe;
} collector;
static bool put_grad(void *user, te_module *m, const char *path, te_tensor *x, te_entry_kind kind) {
    collector *c = (collector *)user;
    (void)m, (void)path;
    if (kind == TE_ENTRY_PARAMETER) {
        CHECK_MSG(te_tensor_grad(x), "%s has no gradient", path);
        test_put(c->b, te_tensor_grad(x));
    }
    return true;
}
/* Weights of products as they are stored quantized, or would be. */
static bool put_weight(void *user, te_module *m, const char *path, te_tensor *x, te_entry_kind kind) {
    collector *c = (collector *)user;
    (void)m, (void)path;
    if (kind == TE_ENTRY_PARAMETER) test_put(c->b, te_tensor_ndim(x) == 2 && !te_tensor_is_quantized(x) ? as_weight(c->recipe, x) : x);
    return true;
}
/* One step, and what came of it: output, gradients, weights. The batch is a function of the step alone. */
static test_bytes train(session *s, int step) {
    test_bytes b = {0};
    collector c = {&b, s->recipe};
    te_recipe r = recipe_of(s->recipe);
    te_scope_begin(s->te);
    te_tensor *x = test_tensor(s->te, TE_BF16, SHAPE(BATCH, 2, HIDDEN), test_normal(BATCH * 2 * HIDDEN, 100 + (uint64_t)step));
    te_autocast_begin(s->te, &(te_autocast_desc){.recipe = &r});
    te_tensor *y = te_forward(s->model, x);
    te_autocast_end(s->te);
    te_backward(te_mse_loss(y, te_scale(x, -0.5f)));
    test_put(&b, y);
    te_module_visit_tensors(s->model, put_grad, &c);
    te_optimizer_step(s->adam);
    te_module_visit_tensors(s->model, put_weight, &c);
    CHECK_OK(s->te);
    te_scope_end(s->te);
    return b;
}

/* ---- which weights ------------------------------------------------------------------------------------------------- */

typedef struct census {
    int recipe, quantized, plain;
} census;
static bool count_entry(void *user, te_module *m, const char *path, te_tensor *x, te_entry_kind kind) {
    census *c = (census *)user;
    bool product = te_tensor_ndim(x) == 2 && strcmp(te_module_get_class(m)->name, "Embedding") != 0;
    (void)kind;
    CHECK_MSG(te_tensor_is_quantized(x) == product, "%s", path);
    CHECK(te_tensor_requires_grad(x) && te_tensor_dtype(x) == TE_BF16);
    if (product) {
        CHECK_EQ_INT(te_quantized_kind(x), weight_kind[c->recipe]);
        CHECK_EQ_INT(te_quantized_usage(x), TE_ROWWISE | TE_COLUMNWISE);
        CHECK(te_is_custom(x) == (c->recipe == OWN));
        c->quantized++;
    } else
        c->plain++;
    return true;
}
TE_TEST_DEVICES(weights_of_products_alone_are_quantized) {
    for (int i = 0; i < RECIPES; i++) {
        census c = {i, 0, 0};
        te_recipe r = recipe_of(i);
        test_case("%s", recipe_text[i]);
        te_quantized_model_init_desc on = {.recipe = &r}, off = {.recipe = &r, .disabled = true};
        te_quantized_model_init_begin(te, &on);
        te_module *all[6];
        all[0] = layer_of(te, HIDDEN);
        all[1] = te_embedding_create(te, &(te_embedding_desc){.num_embeddings = 7, .embedding_dim = 5});
        all[2] = te_layernorm_create(te, &(te_norm_desc){.hidden_size = 5});
        te_quantized_model_init_begin(te, &off);
        all[3] = te_linear_create(te, &(te_linear_desc){.in_features = 5, .out_features = 3});
        te_quantized_model_init_end(te);
        all[4] = te_linear_create(te, &(te_linear_desc){.in_features = 5, .out_features = 3});
        te_quantized_model_init_end(te);
        all[5] = te_linear_create(te, &(te_linear_desc){.in_features = 5, .out_features = 3});
        REQUIRE_OK(te);
        CHECK(!te_tensor_is_quantized(te_module_parameter(all[3], "weight")) && !te_tensor_is_quantized(te_module_parameter(all[5], "weight")));
        for (int k = 0; k < 5; k++)
            if (k != 3) te_module_visit_tensors(all[k], count_entry, &c);
        CHECK_EQ_INT(c.quantized, 5);
        CHECK_EQ_INT(c.plain, 8 + 1 + 2 + 1);
        CHECK(te_quantized_init_value(te_module_parameter(all[4], "weight"), NULL) == TE_ERR_STATE);
        CHECK_ERROR(te, TE_ERR_STATE, "preserve_high_precision_init_val");
        for (int k = 0; k < 6; k++) te_module_destroy(all[k]);
    }
}

/* Gradients of the sum. */
static void back(te_tensor *y) {
    if (y) te_backward_from(y, te_tensor_full(te_tensor_ctx(y), te_tensor_dtype(y), te_tensor_ndim(y), te_tensor_shape(y), 1));
}

/* ---- values -------------------------------------------------------------------------------------------------------- */

TE_TEST_DEVICES(training_equals_that_of_a_bf16_twin) {
    for (int i = 1; i < RECIPES; i++) {
        session *s = open_session(te, i, true, 5);
        test_bytes got[4];
        for (int step = 0; step < 4; step++) got[step] = train(s, step);
        s = open_session(te, i, false, 5);
        for (int step = 0; step < 4; step++) {
            test_case("%s, step %d", recipe_text[i], step);
            CHECK_SAME("output, gradients and weights", got[step], train(s, step));
        }
    }
}

static te_module *linear_of(te_ctx *te, const te_recipe *r, bool preserve, int64_t in, int64_t out) {
    te_quantized_model_init_begin(te, &(te_quantized_model_init_desc){.recipe = r, .preserve_high_precision_init_val = preserve});
    te_module *m = te_linear_create(te, &(te_linear_desc){.in_features = in, .out_features = out});
    te_quantized_model_init_end(te);
    return m;
}
static te_tensor *run_linear(te_module *m, const te_recipe *r, int64_t in) {
    te_ctx *te = te_module_ctx(m);
    te_tensor *x = test_tensor(te, TE_BF16, SHAPE(8, in), test_normal(8 * in, 9)), *y;
    if (r) te_autocast_begin(te, &(te_autocast_desc){.recipe = r});
    y = te_forward(m, te_tensor_set_requires_grad(x, true));
    if (r) te_autocast_end(te);
    return y;
}

/* The backward pass in its variants: what is decoded, where weights' gradients are gathered, microbatches. */
TE_TEST_DEVICES(backward_passes_equal_those_of_a_bf16_twin) {
    for (int i = 1; i < RECIPES; i++)
        for (int variant = 0; variant < 3; variant++) {
            test_bytes result[2] = {{0}};
            test_case("%s, variant %d", recipe_text[i], variant);
            for (int twin = 0; twin < 2; twin++) {
                te_scope_begin(te);
                te_recipe r = recipe_of(i);
                if (variant == 1) r.backward_override = TE_BACKWARD_DEQUANTIZED;
                te_seed(te, 6);
                te_quantized_model_init_begin(te, &(te_quantized_model_init_desc){.recipe = &r, .disabled = twin});
                te_module *m = te_linear_create(te, &(te_linear_desc){.in_features = 40, .out_features = 24, .gemm.fuse_wgrad_accumulation = variant == 2});
                te_quantized_model_init_end(te);
                te_tensor *w = te_module_parameter(m, "weight"), *x = test_tensor(te, TE_BF16, SHAPE(6, 40), test_normal(240, 2));
                if (variant == 2) CHECK_EQ_INT(te_tensor_set_main_grad(w, te_tensor_full(te, TE_F32, SHAPE(24, 40), 5)), TE_OK);
                te_tensor_set_requires_grad(x, true);
                for (int micro = 0; micro < 3; micro++) {
                    te_forward_args args = {.input = x, .is_first_microbatch = variant < 2 ? TE_MICROBATCH_NONE : micro ? TE_MICROBATCH_LATER : TE_MICROBATCH_FIRST};
                    te_autocast_begin(te, &(te_autocast_desc){.recipe = &r});
                    te_tensor *y = te_forward_with(m, &args);
                    te_autocast_end(te);
                    if (y) te_backward_from(y, test_tensor(te, TE_BF16, SHAPE(6, 24), test_normal(144, 3)));
                    test_put(&result[twin], y);
                    test_put(&result[twin], te_tensor_grad(x));
                    test_put(&result[twin], variant == 2 ? te_tensor_main_grad(w) : te_tensor_grad(w));
                }
                CHECK_OK(te);
                te_module_destroy(m);
                te_scope_end(te);
            }
            CHECK(result[0].n >= 3 * (6 * 24 + 240 + 960) * 2);
            CHECK_SAME("outputs and gradients", result[0], result[1]);
        }
}

/* Delayed scaling: scale 1 until the module has run; then its scale, and its history, which an optimizer's step adds to. */
TE_TEST_DEVICES(delayed_weights_take_up_the_scale_of_their_module) {
    te_recipe r = recipe_of(0);
    te_module *m = linear_of(te, &r, true, 20, 12);
    te_tensor *w = te_module_parameter(m, "weight"), *value, *scale;
    te_optimizer *adam = te_fused_adam_create(te, m, &(te_fused_adam_desc){.lr = 1e-30f}); /* changes nothing */
    uint16_t init[240];
    CHECK_EQ_INT(te_quantized_init_value(w, init), TE_OK);
    value = te_tensor_from_host(te, TE_BF16, SHAPE(12, 20), init);
    float amax = 0, s = 1;
    for (int i = 0; i < 240; i++) amax = fmaxf(amax, fabsf(test_read(value)[i]));
    for (int step = 0; step < 4; step++) {
        test_case("step %d", step);
        te_scope_begin(te);
        te_quantized_view(w, TE_ROWWISE, NULL, &scale);
        CHECK(test_read(scale)[0] == 1 / s);
        te_quantizer_desc d = {.kind = TE_QUANT_DELAYED, .delayed.scale = te_tensor_from_f32(te, TE_F32, SHAPE(1), &s)};
        te_quantizer *q = te_quantizer_create(te, &d);
        test_bytes got = {0}, want = {0};
        test_put(&got, w);
        test_put(&want, te_quantize(q, value));
        CHECK_SAME("weight", got, want);
        te_quantizer_destroy(q);
        back(run_linear(m, &r, 20));
        if (step >= 1) s = 448.0f / amax; /* the first step of the optimizer recorded the amax, the forward after it made it a scale */
        CHECK(test_read(te_module_parameter(m, "fp8_scale_fwd"))[1] == s);
        CHECK(test_read(te_module_parameter(m, "fp8_amax_history_fwd"))[1] == 0);
        te_optimizer_step(adam);
        CHECK(test_read(te_module_parameter(m, "fp8_amax_history_fwd"))[1] == amax);
        REQUIRE_OK(te);
        te_scope_end(te);
    }
    te_optimizer_destroy(adam);
    te_module_destroy(m);
}
/* Two weights of one quantizer part when their modules have scales of their own. */
TE_TEST_DEVICES(delayed_weights_that_share_a_quantizer) {
    te_recipe r = recipe_of(0);
    te_quantizer *q = te_quantizer_create(te, &(te_quantizer_desc){.kind = TE_QUANT_DELAYED});
    te_module *m[2];
    for (int k = 0; k < 2; k++) {
        m[k] = te_linear_create(te, &(te_linear_desc){.in_features = 8, .out_features = 4, .gemm.no_bias = true});
        te_module_add_parameter(m[k], "weight", te_quantize(q, te_tensor_full(te, TE_BF16, SHAPE(4, 8), k ? 3 : 1)));
    }
    te_quantizer_destroy(q);
    for (int step = 0; step < 3; step++)
        for (int k = 0; k < 2; k++) {
            te_optimizer *adam = te_fused_adam_create(te, m[k], &(te_fused_adam_desc){.lr = 1e-30f});
            back(run_linear(m[k], &r, 8));
            te_optimizer_step(adam);
            te_optimizer_destroy(adam);
        }
    CHECK(test_read(te_module_parameter(m[0], "fp8_amax_history_fwd"))[1] == 1 && test_read(te_module_parameter(m[1], "fp8_amax_history_fwd"))[1] == 3);
    CHECK(test_read(te_module_parameter(m[0], "fp8_scale_fwd"))[1] == 448 && test_read(te_module_parameter(m[1], "fp8_scale_fwd"))[1] == 448.0f / 3);
    CHECK_OK(te);
    for (int k = 0; k < 2; k++) te_module_destroy(m[k]);
}

TE_TEST_DEVICES(outside_of_autocast_weights_are_decoded) {
    for (int i = 0; i < RECIPES; i++) {
        test_case("%s", recipe_text[i]);
        te_scope_begin(te);
        te_recipe r = recipe_of(i);
        te_module *m = linear_of(te, &r, false, 24, 10), *twin = te_linear_create(te, &(te_linear_desc){.in_features = 24, .out_features = 10});
        te_tensor_copy(te_module_parameter(twin, "weight"), te_dequantize(te_tensor_detach(te_module_parameter(m, "weight")), TE_BF16));
        te_tensor *y = run_linear(m, NULL, 24), *z = run_linear(twin, NULL, 24);
        CHECK_BYTES("output", test_read_bytes(y), test_read_bytes(z), te_tensor_bytes(z));
        back(y);
        back(z);
        te_tensor *g = te_tensor_grad(te_module_parameter(m, "weight")), *h = te_tensor_grad(te_module_parameter(twin, "weight"));
        CHECK(g && h && te_tensor_dtype(g) == TE_BF16);
        CHECK_BYTES("gradient", test_read_bytes(g), test_read_bytes(h), te_tensor_bytes(h));
        CHECK_OK(te);
        te_module_destroy(m);
        te_module_destroy(twin);
        te_scope_end(te);
    }
}

TE_TEST_DEVICES(a_weight_of_another_recipe_is_refused) {
    static const char *const kind[RECIPES] = {"delayed", "current", "block", "MXFP8", "NVFP4", "hybrid", "custom"};
    for (int i = 0; i < RECIPES; i++)
        for (int k = 0; k < RECIPES; k++) {
            char by[64], asks[64];
            if (i == k) continue;
            te_scope_begin(te);
            test_case("%s under %s", recipe_text[i], recipe_text[k]);
            te_recipe r = recipe_of(i), other = recipe_of(k);
            te_module *m = linear_of(te, &r, false, 16, 16);
            test_bytes before = {0}, after = {0};
            test_put(&before, te_module_parameter(m, "weight"));
            CHECK(!run_linear(m, &other, 16));
            snprintf(by, sizeof by, "by a %s quantizer", kind[i]);
            snprintf(asks, sizeof asks, "asks for %s", kind[k]);
            CHECK_STR(te_error(te), by);
            CHECK_STR(te_error(te), asks);
            CHECK_ERROR(te, TE_ERR_STATE, "te_quantized_model_init_begin");
            test_put(&after, te_module_parameter(m, "weight"));
            CHECK_SAME("weight", after, before);
            CHECK(run_linear(m, &r, 16) != NULL);
            CHECK_OK(te);
            te_module_destroy(m);
            te_scope_end(te);
        }
}

TE_TEST_DEVICES(resetting_and_preserved_values) {
    for (int i = 0; i < RECIPES; i++) {
        test_case("%s", recipe_text[i]);
        te_scope_begin(te);
        te_recipe r = recipe_of(i);
        uint16_t first[24 * 10], again[24 * 10];
        te_seed(te, 3);
        te_module *m = linear_of(te, &r, true, 24, 10), *plain;
        te_tensor *w = te_module_parameter(m, "weight");
        te_seed(te, 3);
        plain = te_linear_create(te, &(te_linear_desc){.in_features = 24, .out_features = 10});
        test_bytes made = {0}, want = {0}, reset = {0}, same = {0};
        test_put(&made, w);
        test_put(&want, as_weight(i, te_module_parameter(plain, "weight")));
        CHECK_SAME("the first value, quantized", made, want);
        CHECK_EQ_INT(te_quantized_init_value(w, first), TE_OK);
        CHECK_BYTES("preserved", first, test_read_bytes(te_module_parameter(plain, "weight")), sizeof first);
        te_module_get_class(m)->reset_parameters(m); /* the next draws */
        test_put(&reset, w);
        CHECK(te_module_parameter(m, "weight") == w && memcmp(reset.data, made.data, made.n) != 0);
        CHECK_EQ_INT(te_quantized_init_value(w, again), TE_OK);
        CHECK(memcmp(first, again, sizeof first) != 0);
        te_seed(te, 3);
        te_module_get_class(m)->reset_parameters(m);
        test_put(&same, w);
        CHECK_SAME("made again from the same seed", same, made);
        CHECK_EQ_INT(te_quantized_init_value(w, again), TE_OK);
        CHECK_BYTES("preserved", again, first, sizeof first);
        CHECK_EQ_INT(te_quantized_init_value(w, NULL), TE_ERR_INVALID);
        CHECK_ERROR(te, TE_ERR_INVALID, "host is NULL");
        te_quantized_clear_init_value(w);
        CHECK_EQ_INT(te_quantized_init_value(w, again), TE_ERR_STATE);
        CHECK_ERROR(te, TE_ERR_STATE, "has none");
        te_quantized_clear_init_value(w); /* again: nothing */
        te_module_destroy(m);
        te_module_destroy(plain);
        te_scope_end(te);
    }
    CHECK_EQ_INT(te_quantized_init_value(NULL, NULL), TE_ERR_STATE);
    te_quantized_clear_init_value(NULL);
    CHECK_OK(te);
}

/* Parameters that become quantized when they get their memory stay frozen, and keep their main gradients. */
TE_TEST_DEVICES(quantized_parameters_stay_frozen) {
    te_linear_desc d = {.in_features = 32, .out_features = 32, .gemm.device = TE_PARAMS_META};
    te_recipe recipe = te_recipe_current_scaling();
    te_quantized_model_init_desc init = {.recipe = &recipe};
    for (int frozen = 0; frozen < 2; frozen++) {
        te_module *m = te_linear_create(te, &d);
        te_tensor *main_grad = te_tensor_zeros(te, TE_F32, SHAPE(32, 32));
        te_module_set_requires_grad(m, !frozen);
        CHECK_EQ_INT(te_tensor_set_main_grad(te_module_parameter(m, "weight"), main_grad), TE_OK);
        te_quantized_model_init_begin(te, &init);
        te_module_reset_parameters(m);
        te_quantized_model_init_end(te);
        CHECK(te_tensor_is_quantized(te_module_parameter(m, "weight")));
        CHECK(te_tensor_requires_grad(te_module_parameter(m, "weight")) == !frozen);
        CHECK(te_tensor_main_grad(te_module_parameter(m, "weight")) == main_grad);
        te_module_destroy(m);
    }
    CHECK_OK(te);
}

/* Somebody has written the weight: the preserved value does not speak for it any more, and masters start from the codes. */
TE_TEST_DEVICES(masters_start_from_what_the_weight_is) {
    for (int i = 1; i < RECIPES; i++)
        for (int late = 0; late < 2; late++) {
            test_case("%s, written %s the optimizer was made", recipe_text[i], late ? "after" : "before");
            te_scope_begin(te);
            te_recipe r = recipe_of(i);
            te_module *m = linear_of(te, &r, true, 16, 8);
            te_tensor *w = te_module_parameter(m, "weight"), *value = te_tensor_full(te, TE_BF16, SHAPE(8, 16), 2);
            te_optimizer *adam = NULL;
            if (late) adam = te_fused_adam_create(te, m, &(te_fused_adam_desc){.lr = 1e-30f});
            te_quantizer_desc d = {.kind = weight_kind[i], .quantization_2d = i == 4 ? TE_ON : TE_DEFAULT};
            if (i >= 5) weight_desc(i == 5 ? HYBRID_WEIGHTS : OWN_WEIGHTS, &d);
            te_quantizer *q = te_quantizer_create(te, &d);
            CHECK_EQ_INT(te_quantize_into(q, value, w, NULL), TE_OK);
            te_quantizer_destroy(q);
            if (!late) adam = te_fused_adam_create(te, m, &(te_fused_adam_desc){.lr = 1e-30f});
            back(run_linear(m, &r, 16));
            te_optimizer_step(adam);
            const float *got = test_read(te_dequantize(te_tensor_detach(w), TE_F32));
            for (int k = 0; k < 128; k++) CHECK(got[k] == 2);
            CHECK_OK(te);
            te_optimizer_destroy(adam);
            te_module_destroy(m);
            te_scope_end(te);
        }
}

/* ---- where the codes lie ------------------------------------------------------------------------------------------ */

TE_TEST_DEVICES(raw_data_moves_to_other_memory) {
    static const te_quant_kind kinds[] = {TE_QUANT_DELAYED, TE_QUANT_CURRENT, TE_QUANT_BLOCK, TE_QUANT_NVFP4, TE_QUANT_IDENTITY, TE_QUANT_HYBRID};
    for (int i = 0; i < COUNT(kinds); i++)
        for (int raw = 0; raw < 2; raw++) {
            test_case("kind %d, as %s", (int)kinds[i], raw ? "bytes" : "codes");
            te_scope_begin(te);
            te_quantizer_desc d = {0};
            if (kinds[i] == TE_QUANT_HYBRID) weight_desc(HYBRID_WEIGHTS, &d);
            d.kind = kinds[i];
            d.quantization_2d = kinds[i] == TE_QUANT_NVFP4 ? TE_ON : TE_DEFAULT;
            te_quantizer *q = te_quantizer_create(te, &d);
            te_tensor *x = te_quantize(q, test_tensor(te, TE_BF16, SHAPE(7, 33), test_normal(7 * 33, 4))), *data, *scale, *fresh;
            test_bytes before = {0}, after = {0};
            test_put(&before, x);
            te_quantized_view(x, TE_ROWWISE, &data, &scale);
            int64_t n = (int64_t)te_tensor_bytes(data);
            te_tensor *buffer = te_tensor_full(te, TE_U8, SHAPE(n + 40), 0xab);
            int at = kinds[i] == TE_QUANT_IDENTITY ? 14 : i % 2 ? 16 : 5; /* aligned or not */
            te_tensor *memory = raw ? te_tensor_narrow(buffer, 0, at, n) : te_tensor_zeros(te, te_tensor_dtype(data), 2, te_tensor_shape(data));
            CHECK_EQ_INT(te_replace_raw_data(x, memory), TE_OK);
            test_put(&after, x);
            CHECK_SAME("bytes", after, before);
            te_quantized_view(x, TE_ROWWISE, &fresh, NULL);
            CHECK(te_tensor_data(fresh) == te_tensor_data(memory));
            CHECK(te_tensor_shape(fresh)[1] == te_tensor_shape(data)[1] && te_tensor_dtype(fresh) == te_tensor_dtype(data));
            /* what is written there is the tensor's value; what is written to the tensor is there */
            te_tensor *ones = te_tensor_full(te, TE_BF16, SHAPE(7, 33), 1), *other = te_quantize(q, ones);
            te_quantized_view(other, TE_ROWWISE, &data, NULL);
            te_tensor_copy_from_host(memory, test_read_bytes(data));
            CHECK_BYTES("codes", test_read_bytes(fresh), test_read_bytes(data), n);
            CHECK_EQ_INT(te_quantize_into(q, ones, x, NULL), TE_OK);
            CHECK_BYTES("codes", test_read_bytes(memory), test_read_bytes(data), n);
            for (int k = 0; k < 7 * 33; k++) CHECK(test_read(te_dequantize(x, TE_F32))[k] == 1);
            if (raw) {
                const uint8_t *all = (const uint8_t *)test_read_bytes(buffer);
                for (int k = 0; k < 40; k++) CHECK(all[k < at ? k : n + k] == 0xab);
            }
            CHECK_OK(te);
            te_quantizer_destroy(q);
            te_scope_end(te);
        }
}

TE_TEST_DEVICES(raw_data_that_cannot_move) {
    te_quantizer_desc d = {.kind = TE_QUANT_CURRENT}, mx = {.kind = TE_QUANT_MXFP8}, turned = {.kind = TE_QUANT_CURRENT, .usage = TE_COLUMNWISE}, own = {.kind = TE_QUANT_CUSTOM, .custom = &eighths};
    te_quantizer_desc hybrid = {.kind = TE_QUANT_HYBRID, .hybrid.rowwise_quantizer = &mx, .hybrid.columnwise_quantizer = &d};
    const te_quantizer_desc *all[] = {&d, &mx, &turned, &own, &hybrid};
    te_tensor *x[5], *value = test_tensor(te, TE_BF16, SHAPE(4, 32), test_normal(128, 1)), *room = te_tensor_zeros(te, TE_U8, SHAPE(4096));
    test_bytes before = {0}, after = {0};
    for (int i = 0; i < COUNT(all); i++) {
        te_quantizer *q = te_quantizer_create(te, all[i]);
        x[i] = te_quantize(q, value);
        te_quantizer_destroy(q);
        test_put(&before, x[i]);
    }
    CHECK_EQ_INT(te_replace_raw_data(value, room), TE_ERR_INVALID);
    CHECK_ERROR(te, TE_ERR_INVALID, "plain bf16");
    for (int i = 1; i < 5; i += 3) {
        CHECK_EQ_INT(te_replace_raw_data(x[i], room), TE_ERR_UNSUPPORTED);
        CHECK_ERROR(te, TE_ERR_UNSUPPORTED, "MXFP8");
    }
    for (int i = 2; i < 4; i++) {
        CHECK_EQ_INT(te_replace_raw_data(x[i], room), TE_ERR_STATE);
        CHECK_ERROR(te, TE_ERR_STATE, "no row-wise copy of a built-in kind");
    }
    CHECK_EQ_INT(te_replace_raw_data(x[0], te_tensor_zeros(te, TE_U8, SHAPE(127))), TE_ERR_INVALID);
    CHECK_ERROR(te, TE_ERR_INVALID, "u8, 127 bytes, contiguous; u8 or e4m3, at least 128 bytes");
    CHECK_EQ_INT(te_replace_raw_data(x[0], te_tensor_zeros(te, TE_BF16, SHAPE(128))), TE_ERR_INVALID);
    CHECK_ERROR(te, TE_ERR_INVALID, "the new memory is bf16");
    te_quantizer *identity = te_quantizer_create(te, &(te_quantizer_desc){.kind = TE_QUANT_IDENTITY});
    CHECK_EQ_INT(te_replace_raw_data(te_quantize(identity, value), te_tensor_narrow(room, 0, 3, 300)), TE_ERR_INVALID);
    CHECK_ERROR(te, TE_ERR_INVALID, "odd byte");
    te_quantizer_destroy(identity);
    CHECK_EQ_INT(te_replace_raw_data(x[0], te_tensor_narrow(te_tensor_zeros(te, TE_U8, SHAPE(256, 2)), 1, 0, 1)), TE_ERR_INVALID);
    CHECK_ERROR(te, TE_ERR_INVALID, "not contiguous");
    te_ctx *other = test_context("cpu");
    CHECK_EQ_INT(te_replace_raw_data(x[0], te_tensor_zeros(other, TE_U8, SHAPE(4096))), TE_ERR_INVALID);
    CHECK_ERROR(te, TE_ERR_INVALID, "another context");
    CHECK_EQ_INT(te_replace_raw_data(NULL, room), TE_ERR_STATE);
    CHECK_EQ_INT(te_replace_raw_data(x[0], NULL), TE_ERR_STATE);
    for (int i = 0; i < COUNT(all); i++) test_put(&after, x[i]);
    CHECK_SAME("bytes", after, before);
    CHECK_OK(te);
}

/* Products read unaligned codes, too. */
TE_TEST_DEVICES(products_of_codes_that_moved) {
    for (int i = 0; i < RECIPES; i++) {
        if (i == 3 || i == OWN) continue;
        test_case("%s", recipe_text[i]);
        te_scope_begin(te);
        te_recipe r = recipe_of(i);
        te_module *m = linear_of(te, &r, false, 40, 24);
        te_tensor *w = te_module_parameter(m, "weight"), *data, *y, *z;
        te_no_grad_begin(te); /* scales rest */
        y = run_linear(m, &r, 40);
        te_quantized_view(w, TE_ROWWISE, &data, NULL);
        te_replace_raw_data(w, te_tensor_narrow(te_tensor_zeros(te, TE_U8, SHAPE(4096)), 0, 7, (int64_t)te_tensor_bytes(data)));
        z = run_linear(m, &r, 40);
        te_no_grad_end(te);
        CHECK_CLOSE("output", test_read(z), test_read(y), te_tensor_numel(y), 1e-2, 1e-3); /* other kernels, other order */
        CHECK_OK(te);
        te_module_destroy(m);
        te_scope_end(te);
    }
}

/* All codes of a model in one buffer, moved there when the optimizer has its masters: training notices nothing, not even for a weight that
 * takes no part in a step. */
static te_result no_forward(te_module *m, te_forward_args *args) {
    (void)m, (void)args;
    return TE_ERR_UNSUPPORTED;
}
static const te_module_class pair_class = {"Pair", 0, no_forward, NULL, NULL};
TE_TEST_DEVICES(training_in_one_buffer) {
    te_recipe r = recipe_of(1);
    test_bytes result[4];
    for (int turn = 0; turn < 4; turn++) {
        bool moved = turn % 2, plain = turn / 2;
        te_scope_begin(te);
        te_seed(te, 8);
        te_module *top = te_module_create(te, &pair_class, "pair"), *m[2];
        te_tensor *all = te_tensor_zeros(te, TE_BF16, SHAPE(2 * 16 * 12)); /* weights that are plain views of one buffer */
        for (int k = 0; k < 2; k++) {
            m[k] = te_module_add_child(top, k ? "b" : "a", plain ? te_linear_create(te, &(te_linear_desc){.in_features = 16, .out_features = 12}) : linear_of(te, &r, true, 16, 12));
            if (!plain || !moved) continue;
            te_tensor *view = te_tensor_view(te_tensor_narrow(all, 0, k * 16 * 12, 16 * 12), SHAPE(12, 16));
            te_tensor_copy(view, te_tensor_detach(te_module_parameter(m[k], "weight")));
            te_module_add_parameter(m[k], "weight", view);
        }
        te_optimizer *adam = te_fused_adam_create(te, top, &(te_fused_adam_desc){.lr = 1e-3f});
        te_tensor *buffer = te_tensor_zeros(te, TE_U8, SHAPE(2 * 16 * 12));
        for (int k = 0; k < 2 && moved && !plain; k++) CHECK_EQ_INT(te_replace_raw_data(te_module_parameter(m[k], "weight"), te_tensor_narrow(buffer, 0, k * 16 * 12, 16 * 12)), TE_OK);
        for (int step = 0; step < 5; step++) {
            back(run_linear(m[0], &r, 16));
            if (step % 2) back(run_linear(m[1], &r, 16));
            te_optimizer_step(adam);
        }
        result[turn] = test_content(top);
        CHECK_OK(te);
        te_optimizer_destroy(adam);
        te_module_destroy(top);
        te_scope_end(te);
    }
    CHECK_SAME("quantized weights", result[1], result[0]);
    CHECK_SAME("plain weights", result[3], result[2]);
}

/* A warm-up runs nothing: neither weights nor masters nor preserved values have changed after it. A column-wise copy that it asks for is
 * really made. */
TE_TEST_DEVICES(a_warm_up_changes_nothing) {
    for (int i = 0; i < RECIPES; i++) {
        test_case("%s", recipe_text[i]);
        test_bytes result[2], first[2];
        for (int warm = 0; warm < 2; warm++) {
            te_scope_begin(te);
            te_seed(te, 8);
            te_recipe r = recipe_of(i);
            te_module *m = linear_of(te, &r, true, 16, 12);
            te_tensor *w = te_module_parameter(m, "weight");
            te_optimizer *adam = te_fused_adam_create(te, m, &(te_fused_adam_desc){.lr = 1e-3f}), *second;
            if (i != 3 && i < 5) te_tensor_update_usage(w, TE_ROWWISE);
            for (int step = 0; step < 3; step++) {
                for (int turn = !warm; turn < 2; turn++) { /* the first turn is for warming up */
                    if (turn == 0) te_warmup_begin(te);
                    back(run_linear(m, &r, 16));
                    te_optimizer_step(adam);
                    if (turn == 0) te_warmup_end(te);
                }
                if (step > 0) continue;
                memset(&first[warm], 0, sizeof first[warm]);
                test_put(&first[warm], w);
            }
            result[warm] = test_content(m);
            /* a second optimizer, made when the weight is as it began, starts from the preserved value */
            te_seed(te, 8);
            te_module_get_class(m)->reset_parameters(m);
            if (warm) {
                te_warmup_begin(te);
                back(run_linear(m, &r, 16));
                te_optimizer_step(adam);
                te_warmup_end(te);
            }
            second = te_fused_adam_create(te, m, &(te_fused_adam_desc){.lr = 1e-3f});
            back(run_linear(m, &r, 16));
            te_optimizer_step(second);
            test_put(&result[warm], w);
            CHECK_OK(te);
            te_optimizer_destroy(adam);
            te_optimizer_destroy(second);
            te_module_destroy(m);
            te_scope_end(te);
        }
        CHECK_SAME("after one step", first[1], first[0]);
        CHECK_SAME("after all", result[1], result[0]);
    }
}

/* A model whose weights come from masters that somebody else steps: its column-wise copies are made anew, its outputs and gradients are those of
 * a twin with the masters' values. */
TE_TEST_DEVICES(models_take_weights_from_masters) {
    for (int i = 0; i < 5; i++) {
        test_case("%s", recipe_text[i]);
        te_scope_begin(te);
        te_recipe r = recipe_of(i);
        te_module *m = linear_of(te, &r, true, 24, 20), *twin = te_linear_create(te, &(te_linear_desc){.in_features = 24, .out_features = 20});
        te_tensor *w = te_module_parameter(m, "weight"), *master = test_tensor(te, TE_F32, SHAPE(480), test_normal(480, 12)), *y[2], *grad[2];
        te_tensor_copy(te_module_parameter(twin, "weight"), te_tensor_view(te_tensor_cast(master, TE_BF16), SHAPE(20, 24)));
        const int64_t start = 0;
        te_master_weights call = {.model_weights = &w, .master_weights = &master, .start_offsets = &start, .count = 1};
        uint16_t init[480];
        test_bytes before = {0}, warmed = {0};
        test_put(&before, w);
        te_warmup_begin(te);
        CHECK_EQ_INT(te_quantize_master_weights(te, &call), TE_OK);
        te_warmup_end(te);
        test_put(&warmed, w);
        CHECK_SAME("after a warm-up", warmed, before);
        CHECK_EQ_INT(te_quantized_init_value(w, init), TE_OK);
        CHECK_EQ_INT(te_quantize_master_weights(te, &call), TE_OK);
        CHECK_EQ_INT(te_quantized_usage(w), i == 3 ? TE_ROWWISE | TE_COLUMNWISE : TE_ROWWISE);
        CHECK_EQ_INT(te_quantized_init_value(w, init), TE_ERR_STATE);
        te_clear_error(te);
        for (int k = 0; k < 2; k++) {
            te_tensor *x = te_tensor_set_requires_grad(test_tensor(te, TE_BF16, SHAPE(8, 24), test_normal(192, 9)), true);
            te_seed(te, 2);
            te_autocast_begin(te, &(te_autocast_desc){.recipe = &r});
            y[k] = te_forward(k ? twin : m, x);
            te_autocast_end(te);
            back(y[k]);
            grad[k] = te_tensor_grad(x);
        }
        CHECK_EQ_INT(te_quantized_usage(w), TE_ROWWISE | TE_COLUMNWISE);
        CHECK_BYTES("output", test_read_bytes(y[0]), test_read_bytes(y[1]), te_tensor_bytes(y[1]));
        CHECK_BYTES("gradient", test_read_bytes(grad[0]), test_read_bytes(grad[1]), te_tensor_bytes(grad[1]));
        CHECK_OK(te);
        te_module_destroy(m);
        te_module_destroy(twin);
        te_scope_end(te);
    }
}

/* ---- files --------------------------------------------------------------------------------------------------------- */

TE_TEST_DEVICES(quantized_checkpoints_resume_to_the_bit) {
    for (int i = 0; i < RECIPES; i++) {
        test_case("%s", recipe_text[i]);
        const char *path = test_path("model.safetensors");
        session *a = open_session(te, i, true, 5), *b;
        test_bytes want[2];
        train(a, 0);
        train(a, 1);
        CHECK_EQ_INT(te_model_save(te, path, a->model, a->adam, NULL, 0), TE_OK);
        test_bytes saved = test_content(a->model);
        for (int step = 0; step < 2; step++) want[step] = train(a, 2 + step);
        b = open_session(te, i, true, 77);
        CHECK_EQ_INT(te_model_load(te, path, b->model, b->adam), TE_OK);
        REQUIRE_OK(te);
        if (i != 0) CHECK_SAME("model", test_content(b->model), saved); /* delayed: buffers of modules that have not run stand behind their weights */
        for (int step = 0; step < 2; step++) CHECK_SAME("step", train(b, 2 + step), want[step]);
    }
}

TE_TEST_DEVICES(high_precision_checkpoints_are_quantized) {
    for (int i = 0; i < RECIPES; i++)
        for (int optimizer = 0; optimizer < 2; optimizer++) {
            test_case("%s, %s optimizer", recipe_text[i], optimizer ? "with its" : "with a new");
            const char *path = test_path("plain.safetensors");
            session *a = open_session(te, i, false, 5), *b = open_session(te, i, true, 77);
            test_bytes want = {0}, got = {0};
            collector c = {&want, i};
            train(a, 0);
            CHECK_EQ_INT(te_model_save(te, path, a->model, optimizer ? a->adam : NULL, NULL, 0), TE_OK);
            CHECK_EQ_INT(te_model_load(te, path, b->model, optimizer ? b->adam : NULL), TE_OK);
            REQUIRE_OK(te);
            te_scope_begin(te);
            te_module_visit_tensors(a->model, put_weight, &c);
            c.b = &got;
            te_module_visit_tensors(b->model, put_weight, &c);
            te_scope_end(te);
            CHECK_SAME("weights", got, want);
            if (i == 0) continue; /* in a module that has not run the scale is 1 */
            if (!optimizer) { /* both start from the weights of the file */
                te_optimizer_destroy(a->adam);
                a->adam = te_fused_adam_create(te, a->model, &(te_fused_adam_desc){.lr = 0.02f});
                te_optimizer_destroy(b->adam);
                b->adam = te_fused_adam_create(te, b->model, &(te_fused_adam_desc){.lr = 0.02f});
            }
            te_seed(te, 9);
            want = train(a, 1);
            te_seed(te, 9);
            CHECK_SAME("step", train(b, 1), want);
        }
}

static bool drop_columns(void *user, te_module *m, const char *path, te_tensor *x, te_entry_kind kind) {
    (void)user, (void)m, (void)path, (void)kind;
    if (te_tensor_is_quantized(x)) te_tensor_update_usage(x, TE_ROWWISE);
    return true;
}
TE_TEST_DEVICES(checkpoints_without_column_wise_copies) {
    for (int i = 0; i < RECIPES; i++) {
        test_case("%s", recipe_text[i]);
        const char *path = test_path("rows.safetensors");
        session *a = open_session(te, i, true, 5), *b = open_session(te, i, true, 77);
        test_bytes whole = test_content(a->model), before = test_content(b->model);
        te_module_visit_tensors(a->model, drop_columns, NULL);
        CHECK_EQ_INT(te_model_save(te, path, a->model, a->adam, NULL, 0), TE_OK);
        te_result result = te_model_load(te, path, b->model, b->adam);
        if (i != 3 && i < 5) {
            CHECK_EQ_INT(result, TE_OK);
            CHECK_SAME("model", test_content(b->model), whole);
            te_module_visit_tensors(b->model, drop_columns, NULL); /* a model without them runs, too, and makes them at need */
            test_bytes step = train(b, 0);
            session *c = open_session(te, i, true, 5);
            te_seed(te, 1);
            CHECK_EQ_INT(te_model_load(te, path, c->model, c->adam), TE_OK);
            CHECK_SAME("step", train(c, 0), step);
            CHECK_OK(te);
        } else { /* both hold numbers of their own: the file is not whole */
            CHECK_EQ_INT(result, TE_ERR_FORMAT);
            CHECK_ERROR(te, TE_ERR_FORMAT, ".col.data");
            CHECK_SAME("model", test_content(b->model), before);
        }
    }
}

/* Returns the output of a session's model, without recording. */
static test_bytes infer(session *s) {
    test_bytes b = {0};
    te_recipe r = recipe_of(s->recipe);
    te_scope_begin(s->te);
    te_no_grad_begin(s->te);
    te_autocast_begin(s->te, &(te_autocast_desc){.recipe = &r});
    test_put(&b, te_forward(s->model, test_tensor(s->te, TE_BF16, SHAPE(BATCH, 2, HIDDEN), test_normal(BATCH * 2 * HIDDEN, 7))));
    te_autocast_end(s->te);
    te_no_grad_end(s->te);
    CHECK_OK(s->te);
    te_scope_end(s->te);
    return b;
}
static bool has_rows_alone(void *user, te_module *m, const char *path, te_tensor *x, te_entry_kind kind) {
    (void)m, (void)kind;
    if (!te_tensor_is_quantized(x)) return true;
    CHECK_MSG(te_quantized_usage(x) == TE_ROWWISE, "%s: %d", path, te_quantized_usage(x));
    ++*(int *)user;
    return true;
}

/* Made without gradients, weights have the copy that forward reads: the same results in less memory. Files of both kinds of models are read. Training
 * makes the other copy, or says that the recipe cannot. */
TE_TEST_DEVICES(weights_without_gradients_have_one_copy) {
    for (int i = 0; i < RECIPES; i++) {
        int counted = 0;
        test_case("%s", recipe_text[i]);
        const char *path = test_path("both.safetensors");
        int64_t before = te_memory_get_stats(te).allocated;
        session *both = open_session(te, i, true, 5);
        int64_t of_both = te_memory_get_stats(te).allocated - before;
        te_no_grad_begin(te);
        before = te_memory_get_stats(te).allocated;
        session *one = open_session(te, i, true, 5), *loaded = open_session(te, i, true, 77);
        int64_t of_one = (te_memory_get_stats(te).allocated - before) / 2;
        te_no_grad_end(te);
        te_module_visit_tensors(one->model, has_rows_alone, &counted);
        CHECK_EQ_INT(counted, 4);
        CHECK_MSG(of_one < of_both, "%lld bytes, and %lld with both copies", (long long)of_one, (long long)of_both);
        test_bytes want = infer(both);
        CHECK_SAME("output", infer(one), want);
        CHECK_EQ_INT(te_model_save(te, path, both->model, NULL, NULL, 0), TE_OK);
        CHECK_EQ_INT(te_model_load(te, path, loaded->model, NULL), TE_OK);
        CHECK(!test_log_text() || !strstr(test_log_text(), "ignored")); /* the file's column-wise copies are no surprise */
        if (i > 0) CHECK_SAME("output of a file", infer(loaded), want); /* delayed: the file has the amaxes of the forward above */
        counted = 0;
        te_module_visit_tensors(loaded->model, has_rows_alone, &counted);
        CHECK_EQ_INT(counted, 4);
        if (i != 3 && i < 5) {
            test_bytes step = train(open_session(te, i, true, 5), 0);
            te_no_grad_begin(te);
            session *fresh = open_session(te, i, true, 5); /* delayed scaling counts the forward passes of every module */
            te_no_grad_end(te);
            CHECK_SAME("step", train(fresh, 0), step);
        } else {
            te_recipe r = recipe_of(i);
            te_autocast_begin(te, &(te_autocast_desc){.recipe = &r});
            CHECK(!te_forward(one->model, te_tensor_set_requires_grad(test_tensor(te, TE_BF16, SHAPE(BATCH, 2, HIDDEN), test_normal(BATCH * 2 * HIDDEN, 7)), true)));
            te_autocast_end(te);
            CHECK_ERROR(te, TE_ERR_STATE, "outside of te_no_grad_begin");
            CHECK_SAME("output after the error", infer(one), want);
        }
    }
}

TE_TEST_DEVICES(checkpoints_that_do_not_fit_change_nothing) {
    te_recipe r = recipe_of(1);
    const char *path = test_path("other.safetensors");
    for (int i = 0; i < 6; i++) {
        test_case("case %d", i);
        te_scope_begin(te);
        /* the file's model, and the one that it is loaded into */
        te_module *from = i == 0 || i == 4 || i == 5 ? te_linear_create(te, &(te_linear_desc){.in_features = i == 0 ? 20 : 16, .out_features = 12})
                                           : linear_of(te, &r, false, i == 1 ? 40 : 16, 12), *to;
        te_recipe mx = recipe_of(3);
        if (i == 4) te_module_add_parameter(from, "weight", te_tensor_zeros(te, TE_F32, SHAPE(192)));
        to = i == 2 ? te_linear_create(te, &(te_linear_desc){.in_features = 16, .out_features = 12}) : linear_of(te, i == 3 ? &mx : &r, true, 16, 12);
        REQUIRE_OK(te);
        test_bytes before = test_content(to);
        te_safetensors_item whole[2] = {{"weight", te_tensor_zeros(te, TE_I32, SHAPE(12, 16))}, {"bias", te_module_parameter(to, "bias")}};
        CHECK_EQ_INT(i == 5 ? te_safetensors_write(te, path, whole, 2, NULL, 0) : te_model_save(te, path, from, NULL, NULL, 0), TE_OK);
        CHECK(te_model_load(te, path, to, NULL) != TE_OK);
        CHECK_ERROR(te, i == 2 ? TE_ERR_FORMAT : TE_ERR_SHAPE, i == 2 ? "no tensor \"weight\"" : i == 0 || i >= 4 ? "stored quantized" : "weight.");
        CHECK_SAME("model", test_content(to), before);
        te_module_destroy(from);
        te_module_destroy(to);
        te_scope_end(te);
    }
}

/* ---- misuse -------------------------------------------------------------------------------------------------------- */

TE_TEST_DEVICES(quantized_models_misused) {
    te_recipe r = recipe_of(1), bad = recipe_of(1);
    bad.format = TE_FORMAT_E5M2;
    CHECK_EQ_INT(te_quantized_model_init_end(te), TE_ERR_STATE);
    CHECK_ERROR(te, TE_ERR_STATE, "without te_quantized_model_init_begin");
    CHECK_EQ_INT(te_quantized_model_init_begin(te, &(te_quantized_model_init_desc){.recipe = &bad}), TE_ERR_INVALID);
    CHECK_ERROR(te, TE_ERR_INVALID, "E5M2");
    te_module *m = te_linear_create(te, &(te_linear_desc){.in_features = 5, .out_features = 3}); /* no region was opened */
    CHECK(!te_tensor_is_quantized(te_module_parameter(m, "weight")));
    te_module_destroy(m);
    int depth = 0;
    while (te_quantized_model_init_begin(te, NULL) == TE_OK && depth < 1000) depth++;
    CHECK_ERROR(te, TE_ERR_STATE, "te_quantized_model_init_end missing");
    m = te_linear_create(te, &(te_linear_desc){.in_features = 5, .out_features = 3});
    CHECK_EQ_INT(te_quantized_kind(te_module_parameter(m, "weight")), TE_QUANT_DELAYED); /* without a desc */
    te_module_destroy(m);
    while (depth-- > 0) CHECK_EQ_INT(te_quantized_model_init_end(te), TE_OK);
    CHECK_EQ_INT(te_quantized_model_init_begin(NULL, NULL), TE_ERR_STATE);
    CHECK_EQ_INT(te_quantized_model_init_end(NULL), TE_ERR_STATE);
    /* masters are needed */
    m = linear_of(te, &r, false, 8, 8);
    CHECK(!te_fused_adam_create(te, m, &(te_fused_adam_desc){.no_master_weights = true}));
    CHECK_ERROR(te, TE_ERR_INVALID, "quantized weights need masters");
    te_module_destroy(m);
    /* factories and quantizers that fail leave no module behind */
    static const factory_mode modes[] = {FAILS_AT_FC2, BREAKS_HALFWAY};
    for (int i = 0; i < COUNT(modes); i++) {
        test_case("mode %d", (int)modes[i]);
        r = recipe_with(modes[i]);
        te_quantized_model_init_begin(te, &(te_quantized_model_init_desc){.recipe = &r, .preserve_high_precision_init_val = true});
        CHECK(!te_layernorm_mlp_create(te, &(te_layernorm_mlp_desc){.hidden_size = 8, .ffn_hidden_size = 8}));
        CHECK_ERROR(te, TE_ERR_UNSUPPORTED, i ? "custom quantizer \"broken\"" : "the factory returned");
        te_quantized_model_init_end(te);
    }
    /* a factory that leaves weights alone */
    r = recipe_with(PLAIN_WEIGHTS);
    m = linear_of(te, &r, true, 8, 8);
    CHECK(m && !te_tensor_is_quantized(te_module_parameter(m, "weight")));
    CHECK(run_linear(m, &r, 8) != NULL);
    te_module_destroy(m);
    CHECK_OK(te);
}

/* A quantizer that fails halfway: the copy that it had made is not taken. */
TE_TEST_DEVICES(a_failed_requantization_changes_nothing) {
    te_quantizer *q = te_quantizer_create(te, &(te_quantizer_desc){.kind = TE_QUANT_CUSTOM, .custom = &eighths});
    te_quantizer *bad = te_quantizer_create(te, &(te_quantizer_desc){.kind = TE_QUANT_CUSTOM, .custom = &broken});
    te_tensor *x = te_tensor_full(te, TE_BF16, SHAPE(4, 4), 1), *w = te_quantize(q, x);
    test_bytes before = {0}, after = {0};
    test_put(&before, w);
    CHECK_EQ_INT(te_quantize_into(bad, te_tensor_full(te, TE_BF16, SHAPE(4, 4), 3), w, NULL), TE_ERR_UNSUPPORTED);
    CHECK_ERROR(te, TE_ERR_UNSUPPORTED, "nothing was changed");
    test_put(&after, w);
    CHECK_SAME("weight", after, before);
    te_quantizer_destroy(q);
    te_quantizer_destroy(bad);
    CHECK_OK(te);
}

/* Host memory fails at every single request in turn: the first error says it, and what was made is released. */
static int64_t starve(int recipe, int64_t fail_at) {
    purse p = {0};
    te_ctx_desc desc = purse_desc(&p, NULL);
    const int64_t start = 0;
    p.fail_at = fail_at;
    te_ctx *te = te_ctx_create(&desc);
    if (te_ok(te)) {
        te_recipe r = recipe_of(recipe);
        te_scope_begin(te);
        te_module *m = linear_of(te, &r, true, 8, 8);
        te_optimizer *adam = m ? te_fused_adam_create(te, m, NULL) : NULL;
        te_tensor *w = te_module_parameter(m, "weight"), *master = te_tensor_full(te, TE_F32, SHAPE(64), 2);
        if (w) back(run_linear(m, &r, 8));
        te_optimizer_step(adam);
        if (w && recipe < 5) te_quantize_master_weights(te, &(te_master_weights){.model_weights = &w, .master_weights = &master, .start_offsets = &start, .count = 1});
        if (w && recipe < 5) te_post_all_gather_processing(te, &w, 1);
        if (m && te_ok(te) && recipe == 2) te_model_save(te, test_path("starved.safetensors"), m, adam, NULL, 0);
        if (m && te_ok(te) && recipe == 2) te_model_load(te, test_path("starved.safetensors"), m, adam);
        if (m && te_ok(te) && recipe < 3) {
            te_tensor *data;
            if (te_quantized_view(w, TE_ROWWISE, &data, NULL) == TE_OK) te_replace_raw_data(w, te_tensor_zeros(te, TE_U8, SHAPE(256)));
        }
        te_optimizer_destroy(adam);
        te_module_destroy(m);
        te_scope_end(te);
        CHECK_MSG(te_memory_get_stats(te).allocated == 0, "request %lld: tensors are left", (long long)fail_at);
    }
    CHECK_MSG(te_error_code(te) == TE_ERR_OUT_OF_MEMORY || (te && te_ok(te)), "request %lld: %s", (long long)fail_at, te_error(te)); /* some can be done without */
    te_ctx_destroy(te);
    CHECK_MSG(p.held == 0, "request %lld: %d test_bytes are left", (long long)fail_at, (int)p.held);
    return p.refused;
}
TE_TEST(memory_fails_at_every_request) {
    for (int i = 0; i < RECIPES; i++) {
        test_case("%s", recipe_text[i]);
        int64_t k = 2; /* the first is the context */
        while (starve(i, k)) k += test_every_of(29, 4);
        CHECK(k > 100);
    }
}
