/* Quantizers and recipes: bytes, scales, the delayed update as a module drives it, autocast nesting, misuse. */
#include "../te_test.h"

TE_TEST_DEVICES(quantizer_current_scaling) {
    const float v[6] = {1, -2, 3, 0.5f, 0, 448};
    te_quantizer_desc d = {0};
    d.kind = TE_QUANT_CURRENT;
    te_quantizer *q = te_quantizer_create(te, &d);
    te_tensor *x = test_tensor(te, TE_F32, SHAPE(2, 3), v), *y = te_quantize(q, x);
    REQUIRE_OK(te);
    CHECK(te_tensor_is_quantized(y));
    CHECK_EQ_INT(te_tensor_dtype(y), TE_F32);
    CHECK_TENSOR(y, v, 0, 0); /* amax 448 gives scale 1, and all of these are E4M3 numbers */
    te_tensor *row, *col, *scale;
    CHECK_EQ_INT(te_quantized_view(y, TE_COLUMNWISE, &col, NULL), TE_OK);
    CHECK_EQ_INT(te_quantized_view(y, TE_ROWWISE, &row, &scale), TE_OK);
    CHECK(te_tensor_shape(row)[0] == 2 && te_tensor_shape(row)[1] == 16 && te_tensor_shape(col)[0] == 3 && te_tensor_shape(col)[1] == 16);
    CHECK_TENSOR(scale, ((const float[]){1}), 0, 0);
    const uint8_t *codes = (const uint8_t *)test_read_bytes(row), *turned = (const uint8_t *)test_read_bytes(col);
    const uint8_t want[6] = {0x38, 0xC0, 0x44, 0x30, 0x00, 0x7E};
    for (int i = 0; i < 2; i++)
        for (int j = 0; j < 16; j++) CHECK_EQ_INT(codes[i * 16 + j], j < 3 ? want[i * 3 + j] : 0);
    for (int i = 0; i < 3; i++)
        for (int j = 0; j < 16; j++) CHECK_EQ_INT(turned[i * 16 + j], j < 2 ? want[j * 3 + i] : 0);
    te_quantizer_set_usage(q, TE_COLUMNWISE);
    y = te_quantize(q, x);
    CHECK_TENSOR(te_dequantize(y, TE_F32), v, 0, 0); /* from the column-wise copy alone */
    CHECK(te_quantized_view(y, TE_ROWWISE, &row, &scale) == TE_ERR_STATE);
    CHECK_ERROR(te, TE_ERR_STATE, "row-wise copy was not made");
    te_quantizer_destroy(q);
}

/* NaN stays NaN and does not enter the amax; infinity freezes the scale at 1 and saturates. */
TE_TEST_DEVICES(quantizer_nan_and_infinity) {
    te_quantizer_desc d = {0};
    d.kind = TE_QUANT_CURRENT;
    te_quantizer *q = te_quantizer_create(te, &d);
    const float v[4] = {NAN, 224, -1, 0}, w[4] = {INFINITY, -INFINITY, 2, 600};
    const float want_w[4] = {448, -448, 2, 448};
    CHECK_TENSOR(te_quantize(q, test_tensor(te, TE_F32, SHAPE(1, 4), v)), v, 0, 0);
    CHECK_TENSOR(te_quantize(q, test_tensor(te, TE_F32, SHAPE(1, 4), w)), want_w, 0, 0);
    CHECK_OK(te);
    te_quantizer_destroy(q);
}

/* TransformerEngine's update of one slot, written down again. */
typedef struct slot {
    float history[8], scale;
    int length;
} slot;
static void update_slot(slot *s, float fp8_max, float margin, bool most_recent) {
    float last = s->history[0], amax = last;
    if (last == 0) return;
    for (int i = 1; i < s->length; i++) amax = fmaxf(amax, s->history[i]);
    if (most_recent) amax = last;
    for (int i = 1; i + 1 < s->length; i++) s->history[i] = s->history[i + 1];
    if (s->length > 1) s->history[s->length - 1] = last;
    s->history[0] = 0;
    if (amax > 0 && amax < INFINITY) s->scale = fminf(fp8_max * exp2f(-margin) / amax, 3.4028234663852886e38f);
}

TE_TEST_DEVICES(delayed_scaling_over_many_steps) {
    for (int variant = 0; variant < 4; variant++) {
        test_case("variant %d", variant);
        te_recipe r = te_recipe_delayed_scaling();
        r.delayed.amax_history_len = variant == 1 ? 1 : 3;
        r.delayed.amax_algo = variant == 2 ? TE_AMAX_MOST_RECENT : TE_AMAX_MAX;
        r.delayed.margin = variant == 3 ? 2 : 0;
        te_autocast_desc a = {0};
        a.recipe = &r;
        te_linear_desc d = {0};
        d.in_features = d.out_features = 16;
        te_module *m = te_linear_create(te, &d);
        static const float amaxes[] = {2, 8, 1, 0, 4, 0.5f, 0.25f, INFINITY, 1, 1, 1, 1};
        slot in = {{0}, 1, 0}, grad = {{0}, 1, 0};
        in.length = grad.length = r.delayed.amax_history_len;
        for (int step = 0; step < COUNT(amaxes); step++) {
            te_scope_begin(te);
            te_tensor *x = te_tensor_full(te, TE_BF16, SHAPE(4, 16), amaxes[step]);
            te_autocast_begin(te, &a);
            te_autocast_begin(te, &a); /* only the outermost end updates */
            te_tensor *y = te_forward(m, x);
            te_autocast_end(te);
            te_autocast_end(te);
            te_backward_from(y, te_tensor_full(te, TE_BF16, SHAPE(4, 16), 3 * amaxes[step]));
            in.history[0] = fmaxf(in.history[0], amaxes[step]);
            grad.history[0] = fmaxf(grad.history[0], 3 * amaxes[step]);
            update_slot(&in, 448, r.delayed.margin, r.delayed.amax_algo == TE_AMAX_MOST_RECENT);
            update_slot(&grad, 57344, r.delayed.margin, r.delayed.amax_algo == TE_AMAX_MOST_RECENT);
            REQUIRE_OK(te);
            test_case("variant %d step %d", variant, step);
            CHECK(test_read(te_module_parameter(m, "fp8_scale_fwd"))[0] == in.scale);
            CHECK(test_read(te_module_parameter(m, "fp8_scale_bwd"))[0] == grad.scale);
            const float *h = test_read(te_module_parameter(m, "fp8_amax_history_fwd"));
            for (int i = 0; i < in.length; i++) CHECK(h[i * 3] == in.history[i]);
            te_scope_end(te);
        }
        te_module_destroy(m);
    }
}

TE_TEST(delayed_scaling_history_is_resized) {
    te_ctx *te = test_context("cpu");
    te_recipe r = te_recipe_delayed_scaling();
    te_module *m = te_linear_create(te, &(te_linear_desc){.in_features = 16, .out_features = 16});
    te_tensor *x = te_tensor_full(te, TE_BF16, SHAPE(4, 16), 2);
    static const int lengths[] = {4, 2, 6, 1};
    for (int i = 0; i < COUNT(lengths); i++) {
        r.delayed.amax_history_len = lengths[i];
        CHECK(test_forward(m, &r, x) != NULL);
        CHECK_EQ_INT(te_tensor_shape(te_module_parameter(m, "fp8_amax_history_fwd"))[0], lengths[i]);
    }
    CHECK(test_read(te_module_parameter(m, "fp8_scale_fwd"))[0] == 224);
    CHECK_OK(te);
    te_module_destroy(m);
}

/* With gradients off the scales rest; calibration records amaxes while products stay in high precision. */
TE_TEST(calibration_and_no_grad) {
    te_ctx *te = test_context("cpu");
    te_recipe r = te_recipe_delayed_scaling();
    r.delayed.amax_history_len = 2;
    te_autocast_desc a = {0};
    a.recipe = &r;
    te_module *m = te_linear_create(te, &(te_linear_desc){.in_features = 16, .out_features = 16});
    te_tensor *x = te_tensor_full(te, TE_BF16, SHAPE(4, 16), 2);
    te_no_grad_begin(te);
    te_autocast_begin(te, &a);
    te_forward(m, x);
    te_autocast_end(te);
    te_no_grad_end(te);
    CHECK(test_read(te_module_parameter(m, "fp8_scale_fwd"))[0] == 1);
    float *plain = test_read(te_forward(m, x));
    a.disabled = a.calibrating = true;
    te_autocast_begin(te, &a);
    CHECK_BYTES("calibrating", test_read(te_forward(m, te_tensor_full(te, TE_BF16, SHAPE(4, 16), 2))), plain, 64 * sizeof(float));
    te_autocast_end(te);
    CHECK(test_read(te_module_parameter(m, "fp8_amax_history_fwd"))[0] == 2);
    CHECK_OK(te);
    te_module_destroy(m);
}

TE_TEST(quantizer_and_autocast_misuse) {
    te_ctx *te = test_context("cpu");
    te_quantizer_desc d = {0};
    CHECK(!te_quantizer_create(te, &d));
    CHECK_ERROR(te, TE_ERR_INVALID, "kind 0");
    d.kind = TE_QUANT_CURRENT;
    d.dtype = TE_BF16;
    CHECK(!te_quantizer_create(te, &d));
    CHECK_ERROR(te, TE_ERR_DTYPE, "bf16");
    te_autocast_end(te);
    CHECK_ERROR(te, TE_ERR_STATE, "without te_autocast_begin");
    te_recipe r = {0};
    te_autocast_desc a = {0};
    a.recipe = &r;
    te_autocast_begin(te, &a);
    CHECK_ERROR(te, TE_ERR_INVALID, "recipe kind 0");
    CHECK(!te_autocast_enabled(te));
    d.dtype = TE_F8E5M2;
    te_quantizer *q = te_quantizer_create(te, &d);
    te_ctx *other = test_context("cpu");
    CHECK(!te_quantize(q, te_tensor_zeros(other, TE_F32, SHAPE(3))));
    CHECK_ERROR(te, TE_ERR_INVALID, "another context");
    te_quantizer_destroy(q);
}

/* A field of another kind than the recipe's is refused by its name, with the kinds that have it. */
TE_TEST(recipes_refuse_the_fields_of_others) {
    static te_recipe (*const make[])(void) = {te_recipe_delayed_scaling, te_recipe_current_scaling, te_recipe_block_scaling, te_recipe_mxfp8, te_recipe_nvfp4};
    static int anything;
    static const struct {
        te_recipe r; /* one field, whose readers are: */
        unsigned readers;
        const char *name;
    } fields[] = {
#define OF(KIND) (1u << TE_RECIPE_##KIND)
        {{.format = TE_FORMAT_E4M3}, ~OF(NVFP4), "format"},
        {{.split_fprop = TE_ON}, ~0u, "split_fprop"},
        {{.backward_override = TE_BACKWARD_DEQUANTIZED}, ~OF(DELAYED), NULL}, /* refused for another reason */
        {{.amax_epsilon = 1}, OF(CURRENT) | OF(BLOCK), "amax_epsilon"},
        {{.delayed.margin = 1}, OF(DELAYED), "delayed.margin"},
        {{.delayed.amax_history_len = 3}, OF(DELAYED), "delayed.amax_history_len"},
        {{.delayed.amax_algo = TE_AMAX_MOST_RECENT}, OF(DELAYED), "delayed.amax_algo"},
        {{.delayed.no_reduce_amax = true}, OF(DELAYED), "delayed.no_reduce_amax"},
        {{.current.power_of_two_scales = true}, OF(CURRENT), "current.power_of_two_scales"},
        {{.block.x_block_scaling_dim = 1}, OF(BLOCK), "block.x_block_scaling_dim"},
        {{.block.w_block_scaling_dim = 1}, OF(BLOCK), "block.w_block_scaling_dim"},
        {{.block.grad_block_scaling_dim = 1}, OF(BLOCK), "block.grad_block_scaling_dim"},
        {{.block.fp32_scales = true}, OF(BLOCK), "block.fp32_scales"},
        {{.mxfp8.quantization_2d = TE_ON}, OF(MXFP8), "mxfp8.quantization_2d"},
        {{.nvfp4.rht = TE_OFF}, OF(NVFP4), "nvfp4.rht"},
        {{.nvfp4.stochastic_rounding = TE_OFF}, OF(NVFP4), "nvfp4.stochastic_rounding"},
        {{.nvfp4.quantization_2d = TE_OFF}, OF(NVFP4), "nvfp4.quantization_2d"},
        {{.nvfp4.row_scaled_activation = true}, OF(NVFP4), "nvfp4.row_scaled_activation"},
        {{.nvfp4.four_over_six = TE_NVFP4_4OVER6_ALL}, OF(NVFP4), "nvfp4.four_over_six"},
        {{.nvfp4.four_over_six_mse = true}, OF(NVFP4), "nvfp4.four_over_six_mse"},
        {{.nvfp4.four_over_six_e4m3_256 = TE_NVFP4_E4M3_256_NONE}, OF(NVFP4), "nvfp4.four_over_six_e4m3_256"},
        {{.custom.user = &anything}, OF(CUSTOM), "custom.user"},
#undef OF
    };
    te_ctx *te = test_context("cpu");
    for (int i = 0; i < COUNT(fields); i++)
        for (int k = 0; k < COUNT(make); k++) {
            te_recipe r = fields[i].r;
            te_autocast_desc a = {0};
            char text[96];
            r.kind = make[k]().kind;
            a.recipe = &r;
            test_case("%s under %s", fields[i].name ? fields[i].name : "backward_override", te_recipe_name(r.kind));
            bool reads = fields[i].readers >> r.kind & 1;
            te_autocast_begin(te, &a);
            if (reads) {
                CHECK_OK(te);
                te_autocast_end(te);
                continue;
            }
            snprintf(text, sizeof text, fields[i].name ? "recipe %s: %s is set" : "recipe %s", te_recipe_name(r.kind), fields[i].name);
            CHECK_ERROR(te, TE_ERR_INVALID, text);
            CHECK(!te_autocast_enabled(te));
        }
    te_recipe r = te_recipe_current_scaling();
    te_autocast_desc a = {.recipe = &r};
    r.delayed.margin = 1;
    te_autocast_begin(te, &a);
    CHECK_ERROR(te, TE_ERR_INVALID, "a field of recipes of the kind delayed, custom; leave it zero");
    r = te_recipe_mxfp8();
    r.split_wgrad = (te_switch)3;
    te_autocast_begin(te, &a);
    CHECK_ERROR(te, TE_ERR_INVALID, "split_wgrad 3");
}

/* A kept quantized weight belongs to one view: a parameter that becomes another view of the same memory is quantized anew. */
TE_TEST_DEVICES(a_kept_weight_is_of_one_view) {
    te_linear_desc d = {.in_features = 16, .out_features = 16, .gemm.no_bias = true, .gemm.params_dtype = TE_F32};
    te_module *m = te_linear_create(te, &d);
    te_tensor *all = te_tensor_full(te, TE_F32, SHAPE(32, 16), 1);
    te_recipe recipe = te_recipe_current_scaling();
    te_forward_args args = {.input = te_tensor_full(te, TE_F32, SHAPE(2, 16), 1)};
    te_tensor_fill(te_tensor_narrow(all, 0, 16, 16), 5);
    te_autocast_begin(te, &(te_autocast_desc){.recipe = &recipe});
    for (int half = 0; half < 2; half++) {
        te_module_add_parameter(m, "weight", te_tensor_narrow(all, 0, 16 * half, 16));
        args.is_first_microbatch = half ? TE_MICROBATCH_LATER : TE_MICROBATCH_FIRST;
        te_tensor *y = te_forward_with(m, &args);
        CHECK(y && fabsf(test_read(y)[0] - (half ? 80 : 16)) < 1e-4f); /* the inverse of a scale is rounded */
    }
    te_autocast_end(te);
    CHECK_OK(te);
    te_module_destroy(m);
}

static te_result all_delayed(void *user, const te_quantizer_role *role, te_quantizer_desc *desc) {
    (void)user, (void)role;
    desc->kind = TE_QUANT_DELAYED;
    return TE_OK;
}
static te_result hybrid_of_delayed(void *user, const te_quantizer_role *role, te_quantizer_desc *desc) {
    static const te_quantizer_desc half = {.kind = TE_QUANT_DELAYED};
    (void)user, (void)role;
    desc->kind = TE_QUANT_HYBRID;
    desc->hybrid.rowwise_quantizer = desc->hybrid.columnwise_quantizer = &half;
    return TE_OK;
}
TE_TEST(custom_recipes_calibrate_and_refuse_scales_that_nothing_updates) {
    te_ctx *te = test_context("cpu");
    te_linear_desc d = {.in_features = 16, .out_features = 16, .gemm.params_dtype = TE_F32};
    te_module *m = te_linear_create(te, &d);
    te_recipe recipe = te_recipe_custom(all_delayed, NULL);
    recipe.delayed.amax_history_len = 2;
    te_autocast_begin(te, &(te_autocast_desc){.recipe = &recipe, .disabled = true, .calibrating = true});
    te_forward(m, te_tensor_full(te, TE_F32, SHAPE(4, 16), 3));
    te_autocast_end(te);
    REQUIRE_OK(te);
    const float *history = test_read(te_module_parameter(m, "fp8_amax_history_fwd"));
    CHECK(history[0] == 3 || history[3] == 3);
    te_module_destroy(m);
    m = te_linear_create(te, &d);
    recipe = te_recipe_custom(hybrid_of_delayed, NULL);
    CHECK(test_forward(m, &recipe, te_tensor_full(te, TE_F32, SHAPE(4, 16), 1)) == NULL);
    CHECK_ERROR(te, TE_ERR_INVALID, "row-wise quantizer of a hybrid one is delayed without a scale");
    te_module_destroy(m);
}
TE_TEST(scales_of_another_format_are_made_anew) {
    te_ctx *te = test_context("cpu");
    te_module *m = te_linear_create(te, &(te_linear_desc){.in_features = 16, .out_features = 16});
    te_recipe recipe = te_recipe_delayed_scaling();
    recipe.delayed.amax_history_len = 2;
    te_module_add_buffer(m, "fp8_scale_fwd", te_tensor_full(te, TE_BF16, SHAPE(3), 1));
    te_module_add_buffer(m, "fp8_amax_history_fwd", te_tensor_zeros(te, TE_BF16, SHAPE(2, 3)));
    CHECK(test_forward(m, &recipe, te_tensor_full(te, TE_BF16, SHAPE(4, 16), 1)) != NULL);
    CHECK_OK(te);
    CHECK(te_tensor_dtype(te_module_parameter(m, "fp8_scale_fwd")) == TE_F32);
    te_module_destroy(m);
}
