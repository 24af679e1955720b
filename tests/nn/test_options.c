/* tests/nn/test_options.c: groups of options: every field that a module does not read is refused by its name, and options that every module hands on. */
#define TE_STATIC
#define TE_IMPLEMENTATION
#include "../te_test.h"

/* ---- what a module does not read ---- */

/* The core of a language model reads fewer options of a call than DotProductAttention, and says so. */
TE_TEST(options_of_a_call_that_sdpa_does_not_read) {
    te_ctx *te = test_context("cpu");
    te_module *m = te_sdpa_create(te, &(te_sdpa_desc){.rule.mask = TE_MASK_CAUSAL});
    te_tensor *x = te_tensor_zeros(te, TE_BF16, SHAPE(2, 1, 2, 8));
    CHECK(te__sdpa_call_group.num_fields > 10);
    for (int i = 0; i < te__sdpa_call_group.num_fields; i++) {
        const te__field *f = &te__sdpa_call_group.fields[i];
        te_forward_args call = {.input = x, .key = x, .value = x};
        char name[128];
        CHECK(te_forward_with(m, &call) != NULL);
        CHECK_OK(te);
        memset((unsigned char *)&call.attention + f->offset, 1, 1);
        snprintf(name, sizeof name, "attention.%s is not implemented yet", f->name);
        CHECK(!te_forward_with(m, &call));
        CHECK_ERROR(te, TE_ERR_UNSUPPORTED, name);
    }
    te_module_destroy(m);
}

/* So does its desc with fields of te_attn_rule; every other one is read. */
TE_TEST(options_of_a_rule_that_sdpa_does_not_read) {
    te_ctx *te = test_context("cpu");
    for (int i = 0; i < te__sdpa_rule_group.num_fields; i++) {
        const te__field *f = &te__sdpa_rule_group.fields[i];
        te_sdpa_desc d = {0};
        char name[128];
        memset((unsigned char *)&d.rule + f->offset, 1, 1);
        snprintf(name, sizeof name, "rule.%s is not implemented yet", f->name);
        CHECK(!te_sdpa_create(te, &d));
        CHECK_ERROR(te, TE_ERR_UNSUPPORTED, name);
    }
    CHECK(!te_sdpa_create(te, &(te_sdpa_desc){.rule.softmax_type = TE_SOFTMAX_LEARNABLE}));
    CHECK_ERROR(te, TE_ERR_INVALID, "rule.softmax_offset is NULL and rule.softmax_type 2");
    CHECK(!te_sdpa_create(te, &(te_sdpa_desc){.rule.softmax_offset = te_tensor_zeros(te, TE_F32, SHAPE(2))}));
    CHECK_ERROR(te, TE_ERR_INVALID, "rule.softmax_offset is given and rule.softmax_type 0");
}

TE_TEST(options_refused_masks_and_formats) {
    te_ctx *te = test_context("cpu");
    te_multihead_attention_desc d = {.hidden_size = 16, .attention.num_attention_heads = 2, .attention.qkv_format = (te_qkv_format)9};
    CHECK(!te_multihead_attention_create(te, &d));
    CHECK_ERROR(te, TE_ERR_INVALID, "attention.qkv_format 9");
    d.attention.qkv_format = TE_SBHD, d.attention.attn_mask_type = (te_attn_mask)8;
    CHECK(!te_multihead_attention_create(te, &d));
    CHECK_ERROR(te, TE_ERR_INVALID, "attention.attn_mask_type 8");
    /* a copy of a core's class has a state of zeros */
    te_module *core = te_sdpa_create(te, &(te_sdpa_desc){0});
    te_module_class copy = *te_module_get_class(core);
    te_module *m = te_module_create(te, &copy, "copy");
    CHECK(!te_forward(m, te_tensor_zeros(te, TE_BF16, SHAPE(2, 1, 2, 8))));
    CHECK_ERROR(te, TE_ERR_STATE, "SDPA: \"copy\" has no options");
    te_module_destroy(m);
    te_module_destroy(core);
    const te_sdpa_desc sdpa[] = {{.rule.mask = (te_attn_mask)8}, {.rule.softmax_type = (te_softmax_type)3, .rule.softmax_offset = NULL}, {.rule.dropout_p = 1.5f}};
    static const char *const says[] = {"te_sdpa_create: rule.mask 8, format 0", "te_sdpa_create: rule.softmax_type 3", "te_sdpa_create: rule.dropout_p 1.5"};
    for (int i = 0; i < COUNT(sdpa); i++) {
        CHECK(!te_sdpa_create(te, &sdpa[i]));
        CHECK_ERROR(te, TE_ERR_INVALID, says[i]);
    }
}

/* ---- save_original_input ---- */

enum { M = 48, N = 80, K = 72 };
typedef struct result {
    float *y, *dx, *dw, *db;
} result;
static te_result mixed(void *user, const te_quantizer_role *role, te_quantizer_desc *desc) {
    desc->kind = *(const te_quant_kind *)user;
    desc->nvfp4.stochastic_rounding = desc->kind == TE_QUANT_NVFP4 && role->tensor_type == TE_TENSOR_INPUT ? TE_ON : TE_DEFAULT;
    return TE_OK;
}
static result run_linear(te_ctx *te, const te_recipe *r, bool original, bool delay) {
    te_linear_desc d = {.in_features = K, .out_features = N, .save_original_input = original, .gemm.delay_wgrad_compute = delay};
    result out;
    te_seed(te, 3);
    te_module *m = te_linear_create(te, &d);
    te_tensor *x = te_tensor_set_requires_grad(test_tensor(te, TE_BF16, SHAPE(M, K), test_normal(M * K, 1)), true), *dy = test_tensor(te, TE_BF16, SHAPE(M, N), test_normal(M * N, 2));
    te_autocast_desc cast = {.recipe = r, .disabled = !r};
    memset(&out, 0, sizeof out);
    te_autocast_begin(te, &cast);
    te_tensor *y = te_forward(m, x);
    te_autocast_end(te);
    if (y) {
        te_backward_from(y, dy);
        if (delay) te_backward_dw(m);
        out.y = test_read(y);
        out.dx = test_read(te_tensor_grad(x));
        out.dw = test_read(te_tensor_grad(te_module_parameter(m, "weight")));
        out.db = test_read(te_tensor_grad(te_module_parameter(m, "bias")));
    }
    te_module_destroy(m);
    return out;
}

/* The input is quantized again from the very numbers that the forward pass had. */
TE_TEST_DEVICES(options_save_original_input_changes_no_bit) {
    static te_recipe (*const make[])(void) = {NULL, te_recipe_current_scaling, te_recipe_block_scaling, te_recipe_mxfp8, te_recipe_nvfp4};
    for (int i = 0; i < COUNT(make); i++)
        for (int override = 0; override < (i ? 3 : 1); override++)
            for (int delay = 0; delay < 2; delay++) {
                te_recipe r = i ? make[i]() : te_recipe_current_scaling();
                r.backward_override = (te_backward_override)override;
                test_case("recipe %d, override %d, delay %d", i, override, delay);
                result kept = run_linear(te, i ? &r : NULL, false, delay), again = run_linear(te, i ? &r : NULL, true, delay);
                REQUIRE_OK(te);
                CHECK_BYTES("y", again.y, kept.y, M * N * sizeof(float));
                CHECK_BYTES("dx", again.dx, kept.dx, M * K * sizeof(float));
                CHECK_BYTES("dw", again.dw, kept.dw, N * K * sizeof(float));
                CHECK_BYTES("db", again.db, kept.db, N * sizeof(float));
            }
}
TE_TEST(options_save_original_input_is_refused_where_it_would_differ) {
    te_ctx *te = test_context("cpu");
    te_quant_kind kind = TE_QUANT_DELAYED;
    te_recipe r = te_recipe_delayed_scaling();
    run_linear(te, &r, true, false);
    CHECK_ERROR(te, TE_ERR_INVALID, "save_original_input, and the input's quantizer is delayed");
    r = te_recipe_custom(mixed, &kind);
    run_linear(te, &r, true, false);
    CHECK_ERROR(te, TE_ERR_INVALID, "save_original_input, and the input's quantizer is delayed");
    kind = TE_QUANT_NVFP4;
    run_linear(te, &r, true, false);
    CHECK_ERROR(te, TE_ERR_INVALID, "save_original_input, and the input's quantizer is stochastic");
}

/* ---- init_method, activation_params, checkpoint_core_attention ---- */

typedef struct filling {
    int calls;
    te_result result;
} filling;
static te_result fill_seven(void *user, te_tensor *weight) {
    filling *f = (filling *)user;
    CHECK(!te_tensor_is_quantized(weight) && te_tensor_dtype(weight) == TE_BF16 && te_tensor_ndim(weight) == 2);
    f->calls++;
    te_tensor_fill(weight, f->calls);
    return f->result;
}
TE_TEST_DEVICES(options_init_method_fills_every_weight) {
    filling f = {0, TE_OK};
    te_transformer_layer_desc d = {.hidden_size = 32, .ffn_hidden_size = 64, .attention.num_attention_heads = 2};
    static const char *const children[] = {"self_attention.layernorm_qkv", "self_attention.proj", "layernorm_mlp", "layernorm_mlp"};
    static const char *const weights[] = {"weight", "weight", "fc1_weight", "fc2_weight"};
    te_recipe r = te_recipe_mxfp8(); /* whole numbers this small are themselves in MXFP8 */
    d.gemm.init.init_method = d.output_layer_init.init_method = fill_seven;
    d.gemm.init.user = d.output_layer_init.user = &f;
    for (int quantized = 0; quantized < 2; quantized++) {
        f.calls = 0;
        te_quantized_model_init_begin(te, &(te_quantized_model_init_desc){.recipe = &r, .disabled = !quantized});
        te_module *m = te_transformer_layer_create(te, &d);
        te_quantized_model_init_end(te);
        REQUIRE_OK(te);
        for (int i = 0; i < COUNT(children); i++) {
            te_tensor *w = te_module_parameter(te_module_find(m, children[i]), weights[i]);
            test_case("%s.%s, %s", children[i], weights[i], quantized ? "quantized" : "plain");
            CHECK(te_tensor_is_quantized(w) == quantized);
            CHECK(test_read(te_dequantize(w, TE_F32))[5] == (float)(i + 1));
        }
        CHECK_EQ_INT(f.calls, 4);
        te_module_destroy(m);
    }
    uint64_t seed, offset, now;
    te_rng_get(te, &seed, &offset);
    f.result = TE_ERR_IO;
    CHECK(!te_transformer_layer_create(te, &d));
    CHECK_ERROR(te, TE_ERR_IO, "the init_method of \"weight\" returned TE_ERR_IO");
    te_rng_get(te, &seed, &now);
    CHECK(now == offset);
}

/* Without memory a model has its shapes; with it, the values that it would have had at once. */
TE_TEST_DEVICES(options_meta_parameters_get_the_same_values_later) {
    te_recipe r = te_recipe_current_scaling();
    for (int quantized = 0; quantized < 2; quantized++) {
        te_transformer_layer_desc d = {.hidden_size = 32, .ffn_hidden_size = 64, .attention.num_attention_heads = 2, .output_layernorm = true};
        te_quantized_model_init_desc init = {.recipe = &r, .disabled = !quantized};
        te_module *m[2];
        float *y[2];
        te_tensor *x = te_tensor_normal(te, TE_BF16, SHAPE(8, 2, 32), 0, 1);
        te_quantized_model_init_begin(te, &init);
        for (int meta = 0; meta < 2; meta++) {
            d.gemm.device = meta ? TE_PARAMS_META : TE_PARAMS_DEFAULT;
            te_seed(te, 5);
            te_memory_stats before = te_memory_get_stats(te);
            m[meta] = te_sequential_create(te, (te_module *[]){te_transformer_layer_create(te, &d)}, 1);
            CHECK(meta == (te_memory_get_stats(te).allocated == before.allocated));
            if (!meta) continue;
            CHECK(te_module_num_parameters(m[0]) == te_module_num_parameters(m[1]));
            CHECK(!te_forward(m[1], x));
            CHECK_ERROR(te, TE_ERR_STATE, "te_tensor_describe");
            CHECK(!te_fused_adam_create(te, m[1], NULL));
            CHECK_ERROR(te, TE_ERR_INVALID, "without memory");
            CHECK_EQ_INT(te_model_save(te, test_path("meta.safetensors"), m[1], NULL, NULL, 0), TE_ERR_INVALID);
            CHECK_ERROR(te, TE_ERR_INVALID, "has no memory");
            CHECK_EQ_INT(te_module_reset_parameters(m[1]), TE_OK);
            CHECK_OK(te);
        }
        te_quantized_model_init_end(te);
        for (int i = 0; i < 2; i++) y[i] = test_read(te_forward(m[i], x));
        REQUIRE_OK(te);
        CHECK_BYTES("y", y[1], y[0], 512 * sizeof(float));
        CHECK(te_tensor_is_quantized(te_module_parameter(te_module_find(m[1], "0.self_attention.proj"), "weight")) == quantized);
        te_seed(te, 5); /* and again, in the memory that there is */
        CHECK_EQ_INT(te_module_reset_parameters(m[0]), TE_OK);
        CHECK_BYTES("reset", test_read(te_forward(m[0], x)), y[0], 512 * sizeof(float));
        for (int i = 0; i < 2; i++) te_module_destroy(m[i]);
    }
    te_linear_desc odd = {.in_features = 4, .out_features = 4, .gemm.device = (te_params_device)7};
    CHECK(!te_linear_create(te, &odd));
    CHECK_ERROR(te, TE_ERR_INVALID, "device 7");
    CHECK_EQ_INT(te_module_reset_parameters(NULL), TE_ERR_STATE);
}

/* Against the operation, which has the numbers as args. */
TE_TEST_DEVICES(options_activation_params_reach_the_activation) {
    te_layernorm_mlp_desc d = {.hidden_size = 32, .ffn_hidden_size = 48, .activation = TE_CLAMPED_SWIGLU, .gemm.no_bias = true, .gemm.params_dtype = TE_F32};
    te_linear_desc back = {.in_features = 48, .out_features = 32, .gemm.no_bias = true, .gemm.params_dtype = TE_F32};
    d.gemm.init.std = back.gemm.init.std = 0.3f;
    for (int given = 0; given < 2; given++) {
        d.activation_params.limit = given ? 0.5f : 0;
        d.activation_params.alpha = given ? 1 : 0;
        te_module *m = te_layernorm_mlp_create(te, &d);
        te_tensor *x = test_tensor(te, TE_F32, SHAPE(8, 32), test_normal(256, 1)), *dy = test_tensor(te, TE_F32, SHAPE(8, 32), test_normal(256, 2));
        te_tensor *y = te_forward(m, x);
        te_backward_from(y, dy);
        te_tensor *w1 = te_module_parameter(m, "fc1_weight"), *w2 = te_module_parameter(m, "fc2_weight");
        te_tensor *h = te_layernorm(x, te_module_parameter(m, "layer_norm_weight"), te_module_parameter(m, "layer_norm_bias"), 0, false);
        te_tensor *a = te_linear(h, w1, NULL), *z = te_tensor_empty(te, TE_F32, SHAPE(8, 48)), *da = te_tensor_empty(te, TE_F32, SHAPE(8, 96)),
                  *dz = te_tensor_empty(te, TE_F32, SHAPE(8, 48)), *dw = te_tensor_empty(te, TE_F32, SHAPE(96, 32));
        te_op_act_fwd(te, &(te_op_act_fwd_args){.x = a, .y = z, .activation = TE_CLAMPED_SWIGLU, .activation_params = {.limit = given ? 0.5f : 7, .alpha = given ? 1 : 1.702f}});
        test_case("%s", given ? "given" : "by default");
        CHECK_BYTES("y", test_read(te_linear(z, w2, NULL)), test_read(y), 256 * sizeof(float));
        te_op_gemm(te, &(te_op_gemm_args){.a = dy, .b = w2, .d = dz, .m = 8, .n = 48, .k = 32, .split_accumulator = false});
        te_op_act_bwd(te, &(te_op_act_bwd_args){.dy = dz, .x = a, .dx = da, .activation = TE_CLAMPED_SWIGLU, .activation_params = {.limit = given ? 0.5f : 7, .alpha = given ? 1 : 1.702f}});
        te_op_gemm(te, &(te_op_gemm_args){.a = da, .a_transposed = true, .b = h, .d = dw, .m = 96, .n = 32, .k = 8});
        CHECK_BYTES("dw", test_read(dw), test_read(te_tensor_grad(w1)), 96 * 32 * sizeof(float)); /* the very operations of the module */
        REQUIRE_OK(te);
        te_module_destroy(m);
    }
    d.activation = TE_SWIGLU;
    CHECK(!te_layernorm_mlp_create(te, &d));
    CHECK_ERROR(te, TE_ERR_INVALID, "activation_params limit 0.5 and alpha 1");
}

/* Row i of fc1, of halves one behind the other, where blocks of `size` rows alternate. */
static int64_t alternating(int64_t i, int64_t half, int64_t size) { return i % half / size * 2 * size + i / half * size + i % size; }
/* A module whose halves alternate is the usual one with its fc1's rows moved: the same outputs and gradients. */
TE_TEST_DEVICES(options_halves_that_alternate) {
    enum { HIDDEN = 64, FFN = 96, ROWS = 32 };
    static te_recipe (*const recipes[])(void) = {NULL, te_recipe_delayed_scaling, te_recipe_current_scaling, te_recipe_block_scaling, te_recipe_mxfp8, te_recipe_nvfp4};
    static const te_dtype dtypes[] = {TE_BF16, TE_F32, TE_F16};
    /* In high precision sums of dx run in another order. Under recipes an activation that quantizes does so without a rounding between, and blocks of scales have other rows of fc1's weight
     * in them, and other columns of its output's gradient: rounding errors of the format, twice, and the largest of them, 4 bits, is 1/6 of a number in the mean. */
    static const double limits[] = {2e-3, 0.05, 0.05, 0.05, 0.05, 0.3};
    for (int r = 0; r < COUNT(recipes); r++)
        for (int size = 4; size <= FFN; size *= r % 2 == 0 && r ? 24 : 2) { /* 4 to 32, or 4 and 96 */
            te_recipe recipe = r ? recipes[r]() : te_recipe_current_scaling();
            te_dtype dtype = r ? TE_BF16 : dtypes[size / 8 % 3];
            te_layernorm_mlp_desc d = {.hidden_size = HIDDEN, .ffn_hidden_size = FFN, .activation = size == 8 ? TE_CLAMPED_SWIGLU : TE_SWIGLU, .gemm.params_dtype = dtype, .gemm.init.std = 0.2f};
            te_tensor *w[2], *b[2], *x[2], *y[2];
            te_module *m[2];
            if (FFN % size) break;
            if (recipe.kind == TE_RECIPE_NVFP4) recipe.nvfp4.stochastic_rounding = recipe.nvfp4.rht = TE_OFF; /* both go by the place of a number */
            te_scope_begin(te);
            test_case("%s, blocks of %d", r ? te_recipe_name(recipe.kind) : te_dtype_name(dtype), size);
            for (int k = 0; k < 2; k++) {
                d.activation_params.glu_interleave_size = k ? size : 0;
                te_rng_set(te, 5, 0);
                m[k] = te_layernorm_mlp_create(te, &d);
                w[k] = te_module_parameter(m[k], "fc1_weight");
                b[k] = te_module_parameter(m[k], "fc1_bias");
                te_tensor_copy(b[k], test_tensor(te, dtype, SHAPE(2 * FFN), test_normal(2 * FFN, 3)));
            }
            for (int64_t i = 0; i < 2 * FFN; i++) {
                int64_t to = alternating(i, FFN, size);
                te_tensor_copy(te_tensor_narrow(w[1], 0, to, 1), te_tensor_narrow(w[0], 0, i, 1));
                te_tensor_copy(te_tensor_narrow(b[1], 0, to, 1), te_tensor_narrow(b[0], 0, i, 1));
            }
            for (int k = 0; k < 2; k++) {
                x[k] = te_tensor_set_requires_grad(test_tensor(te, dtype, SHAPE(ROWS, HIDDEN), test_normal(ROWS * HIDDEN, 1)), true);
                y[k] = r ? test_forward(m[k], &recipe, x[k]) : te_forward(m[k], x[k]);
                te_backward_from(y[k], test_tensor(te, dtype, SHAPE(ROWS, HIDDEN), test_normal(ROWS * HIDDEN, 2)));
            }
            REQUIRE_OK(te);
            float *dw = test_read(te_tensor_grad(w[1])), *db = test_read(te_tensor_grad(b[1])), *moved = test_floats(2 * FFN * HIDDEN), *sums = test_floats(2 * FFN);
            for (int64_t i = 0; i < 2 * FFN; i++) {
                int64_t from = alternating(i, FFN, size);
                memcpy(moved + i * HIDDEN, dw + from * HIDDEN, HIDDEN * sizeof(float));
                sums[i] = db[from];
            }
            double limit = dtype == TE_F32 ? 1e-6 : limits[r];
            CHECK_ERROR_BELOW("y", test_read(y[1]), test_read(y[0]), ROWS * HIDDEN, limit);
            CHECK_ERROR_BELOW("dx", test_read(te_tensor_grad(x[1])), test_read(te_tensor_grad(x[0])), ROWS * HIDDEN, limit);
            CHECK_ERROR_BELOW("dw1", moved, test_read(te_tensor_grad(w[0])), 2 * FFN * HIDDEN, limit);
            CHECK_ERROR_BELOW("db1", sums, test_read(te_tensor_grad(b[0])), 2 * FFN, limit);
            for (int k = 0; k < 2; k++) te_module_destroy(m[k]);
            te_scope_end(te);
        }
    te_layernorm_mlp_desc d = {.hidden_size = 16, .ffn_hidden_size = 24, .activation_params.glu_interleave_size = 8};
    CHECK(!te_layernorm_mlp_create(te, &d));
    CHECK_ERROR(te, TE_ERR_INVALID, "glu_interleave_size is 8 with activation 0; a gated activation");
    d.activation = TE_SWIGLU, d.activation_params.glu_interleave_size = 16;
    CHECK(!te_layernorm_mlp_create(te, &d));
    CHECK_ERROR(te, TE_ERR_INVALID, "glu_interleave_size is 16 and ffn_hidden_size 24, of which each of 1 ranks has 24; it must divide that");
    te_transformer_layer_desc layer = {.hidden_size = 16, .ffn_hidden_size = 24, .attention.num_attention_heads = 2, .activation = TE_SWIGLU, .activation_params.glu_interleave_size = -8};
    CHECK(!te_transformer_layer_create(te, &layer));
    CHECK_ERROR(te, TE_ERR_INVALID, "glu_interleave_size is -8");
    layer.activation_params.glu_interleave_size = 8;
    te_module *m = te_transformer_layer_create(te, &layer);
    CHECK(m != NULL);
    te_module_destroy(m);
}

/* A call's own checkpoint: the same bits, dropout included, and the core's outputs for the backward pass are not kept. */
TE_TEST_DEVICES(options_checkpoint_core_attention_of_a_call) {
    te_transformer_layer_desc d = {.hidden_size = 32, .ffn_hidden_size = 32, .attention.num_attention_heads = 2, .attention.attention_dropout = 0.2f};
    te_module *m = te_transformer_layer_create(te, &d), *core = te_module_find(m, "self_attention.core_attention");
    float *y[3], *dx[3];
    for (int i = 0; i < 3; i++) { /* not; by the call; by the call of a module that is checkpointed anyway */
        te_tensor *x = te_tensor_set_requires_grad(test_tensor(te, TE_BF16, SHAPE(8, 2, 32), test_normal(512, 1)), true);
        te_forward_args args = {.input = x, .attention.checkpoint_core_attention = i > 0};
        te_module_set_checkpoint(core, i == 2);
        te_seed(te, 7);
        te_tensor *out = te_forward_with(m, &args);
        y[i] = test_read(out);
        te_backward_from(out, te_tensor_full(te, TE_BF16, SHAPE(8, 2, 32), 1));
        dx[i] = test_read(te_tensor_grad(x));
        REQUIRE_OK(te);
        test_case("way %d", i);
        CHECK_BYTES("y", y[i], y[0], 512 * sizeof(float));
        CHECK_BYTES("dx", dx[i], dx[0], 512 * sizeof(float));
    }
    te_module_destroy(m);
}

TE_TEST(options_that_mean_nothing_are_refused) {
    te_ctx *te = test_context("cpu");
    te_layernorm_linear_desc l = {.in_features = 4, .out_features = 4, .norm.normalization = (te_normalization)77};
    te_norm_desc n = {.hidden_size = 4, .norm.eps = -1};
    te_transformer_layer_desc d = {.hidden_size = 16, .ffn_hidden_size = 16, .attention.num_attention_heads = 2, .parallel_attention_mlp = true};
    float factor;
    CHECK(te_layernorm_linear_create(te, &l) == NULL);
    CHECK_ERROR(te, TE_ERR_INVALID, "norm.normalization is 77");
    CHECK(te_rmsnorm_create(te, &n) == NULL);
    CHECK_ERROR(te, TE_ERR_INVALID, "norm.eps -1");
    d.output_layernorm = true;
    CHECK(te_transformer_layer_create(te, &d) == NULL);
    CHECK_ERROR(te, TE_ERR_INVALID, "parallel_attention_mlp with output_layernorm");
    d.output_layernorm = false;
    d.apply_residual_connection_post_layernorm = true;
    CHECK(te_transformer_layer_create(te, &d) == NULL);
    CHECK_ERROR(te, TE_ERR_INVALID, "parallel_attention_mlp with apply_residual_connection_post_layernorm");
    CHECK(te_rope_frequencies(te, NULL, 0, 8, 10, NULL, &factor) == TE_ERR_INVALID);
    CHECK_ERROR(te, TE_ERR_INVALID, "room for 4 numbers");
}

/* The lengths of sequences are read, with a padding mask: keys beyond them do not count. */
TE_TEST_DEVICES(options_of_a_call_with_lengths) {
    te_module *m = te_sdpa_create(te, &(te_sdpa_desc){.format = TE_BSHD});
    te_tensor *q = test_tensor(te, TE_F32, SHAPE(1, 2, 2, 8), test_normal(32, 1)), *k = test_tensor(te, TE_F32, SHAPE(1, 7, 2, 8), test_normal(112, 2));
    te_forward_args all = {.input = q, .key = k, .value = k}, part = {.input = q, .key = te_tensor_narrow(k, 1, 0, 5), .value = te_tensor_narrow(k, 1, 0, 5)};
    all.attention.attn_mask_type = TE_MASK_PADDING_CAUSAL_BOTTOM_RIGHT;
    all.attention.cu_seqlens_q = te_tensor_from_host(te, TE_I32, SHAPE(2), (const int32_t[]){0, 2});
    all.attention.cu_seqlens_kv = te_tensor_from_host(te, TE_I32, SHAPE(2), (const int32_t[]){0, 5});
    part.attention.attn_mask_type = TE_MASK_CAUSAL_BOTTOM_RIGHT;
    CHECK_ERROR_BELOW("five keys of seven", test_read(te_forward_with(m, &all)), test_read(te_forward_with(m, &part)), 32, 1e-6); /* sums of the same numbers */
    all.attention.cu_seqlens_kv = NULL;
    CHECK(!te_forward_with(m, &all));
    CHECK_ERROR(te, TE_ERR_STATE, "cu_seqlens_kv");
    te_module_destroy(m);
}
