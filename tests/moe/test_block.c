/* test_block.c: the mixture of experts of a model that exists (moe/block.c), whose gate gives maps, beside NeMo Automodel's MoE of the same weights, whose gate gives lists: every score, groups,
 * the bias of the choice, loads and the auxiliary loss. */
#define TE_STATIC
#define TE_IMPLEMENTATION
#include "../te_test.h"

enum { BL_T = 19, BL_D = 16, BL_F = 12, BL_E = 8 };

/* Gives MoE `to` the weights of block `from`. */
static void bl_copy_weights(te_module *from, te_module *to) {
    float *up = test_floats(BL_E * BL_D * 2 * BL_F), *down = test_floats(BL_E * BL_F * BL_D);
    te_ctx *te = te_module_ctx(from);
    for (int e = 0; e < BL_E; e++)
        for (int p = 0; p < 3; p++) {
            char part[32];
            snprintf(part, sizeof part, "experts.%d.%s", e, p == 0 ? "first" : p == 1 ? "second" : "third");
            const float *w = test_read(te_module_parameter(te_module_find(from, part), "weight"));
            for (int i = 0; i < BL_D; i++)
                for (int f = 0; f < BL_F; f++)
                    if (p < 2) up[(e * BL_D + i) * 2 * BL_F + p * BL_F + f] = w[f * BL_D + i];
                    else down[(e * BL_F + f) * BL_D + i] = w[i * BL_F + f];
        }
    te_experts_set(to, TE_EXPERTS_GATE_AND_UP_PROJS, test_tensor(te, TE_F32, SHAPE(BL_E, BL_D, 2 * BL_F), up));
    te_experts_set(to, TE_EXPERTS_DOWN_PROJS, test_tensor(te, TE_F32, SHAPE(BL_E, BL_F, BL_D), down));
    te_tensor_copy(te_module_parameter(te_module_find(to, "gate"), "weight"), te_module_parameter(te_module_find(from, "gate"), "weight"));
}
TE_TEST_DEVICES(moe_block_is_that_of_lists) {
    static const te_moe_config configs[] = {
        {.n_activated_experts = 2},
        {.n_activated_experts = 3, .softmax_before_topk = true, .norm_topk_prob = true, .aux_loss_coeff = 0.5f},
        {.n_activated_experts = 1, .score_func = TE_GATE_SIGMOID, .route_scale = 2},
        {.n_activated_experts = 4, .score_func = TE_GATE_SIGMOID_WITH_BIAS, .norm_topk_prob = true, .n_expert_groups = 4, .n_limited_groups = 2, .gate_bias_update_factor = 0.5f, .aux_loss_coeff = 1},
        {.n_activated_experts = 2, .score_func = TE_GATE_SOFTMAX_WITH_BIAS, .force_e_score_correction_bias = true},
        {.n_activated_experts = 2, .score_func = TE_GATE_SQRTSOFTPLUS, .norm_topk_prob = true, .router_bias = true}};
    for (int i = 0; i < COUNT(configs); i++) {
        te__moe_block b = {.config = configs[i], .activation = TE_SWIGLU, .gate = "first", .up = "second", .down = "third", .init.std = 0.3f};
        b.config.n_routed_experts = BL_E;
        b.config.dim = BL_D;
        b.config.moe_inter_dim = BL_F;
        b.config.dtype = TE_F32;
        te_moe_config c = b.config;
        c.router_weights_fp32 = c.apply_router_weight_after_down = true;
        test_case("config %d", i);
        te_module *m[2] = {te__moe_block_create(te, &b), te_moe_create(te, &c, &(te_moe_backend){.experts = TE_EXPERTS_TORCH_MM, .dispatcher = TE_DISPATCHER_TORCH})};
        REQUIRE_OK(te);
        bl_copy_weights(m[0], m[1]);
        const float *x = test_normal(BL_T * BL_D, 1), *dy = test_normal(BL_T * BL_D, 2), *bias = test_normal(BL_E, 3);
        const float *y[2], *dx[2], *dgate[2], *load[2] = {NULL, NULL}, *loss[2] = {NULL, NULL};
        for (int k = 0; k < 2; k++) {
            te_module *gate = te_module_find(m[k], "gate");
            te_tensor *in = te_tensor_set_requires_grad(test_tensor(te, TE_F32, SHAPE(1, BL_T, BL_D), x), true), *row = te_module_parameter(gate, "e_score_correction_bias");
            te_forward_args args = {.input = in};
            if (row) te_tensor_copy(row, test_tensor(te, TE_F32, SHAPE(BL_E), bias));
            if (configs[i].router_bias) te_tensor_copy(te_module_parameter(gate, "bias"), test_tensor(te, TE_F32, SHAPE(BL_E), bias));
            te_tensor *out = te_forward_with(m[k], &args);
            te_backward_from(out, test_tensor(te, TE_F32, SHAPE(1, BL_T, BL_D), dy));
            REQUIRE_OK(te);
            y[k] = test_copy(test_read(out), BL_T * BL_D);
            dx[k] = test_copy(test_read(te_tensor_grad(in)), BL_T * BL_D);
            dgate[k] = test_copy(test_read(te_tensor_grad(te_module_parameter(gate, "weight"))), BL_E * BL_D);
            if (args.outputs.aux_loss) loss[k] = test_copy(test_read(args.outputs.aux_loss), 1);
            if (te_gate_expert_load(gate)) load[k] = test_copy(test_read(te_gate_expert_load(gate)), BL_E);
        }
        /* f32 sums of up to four experts in another order; on CUDA products of f32 have 10 bits of mantissa, and differ in where they round */
        const double limit = te_ctx_is_cuda(te) ? 5e-3 : 1e-6;
        CHECK_ERROR_BELOW("y", y[0], y[1], BL_T * BL_D, limit);
        CHECK_ERROR_BELOW("dx", dx[0], dx[1], BL_T * BL_D, limit);
        CHECK_ERROR_BELOW("gradient of the gate", dgate[0], dgate[1], BL_E * BL_D, limit);
        CHECK((loss[0] != NULL) == (configs[i].aux_loss_coeff > 0) && (load[0] != NULL) == (configs[i].gate_bias_update_factor > 0));
        if (loss[0]) CHECK_BYTES("loss", loss[0], loss[1], sizeof(float));
        if (load[0]) CHECK_BYTES("load", load[0], load[1], BL_E * sizeof(float));
        for (int k = 0; k < 2; k++) te_module_destroy(m[k]);
    }
}
/* Experts read no attention mask: it says nothing about padding. They refuse a mask together with a map. */
TE_TEST(moe_block_reads_no_mask) {
    te_ctx *te = test_context("cpu");
    te__moe_block b = {.config = {.n_routed_experts = BL_E, .n_activated_experts = 2, .dim = BL_D, .moe_inter_dim = BL_F, .dtype = TE_F32}, .activation = TE_GEGLU, .gate = "first", .up = "second", .down = "third"};
    te_module *m = te__moe_block_create(te, &b);
    te_tensor *x = test_tensor(te, TE_F32, SHAPE(BL_T, BL_D), test_normal(BL_T * BL_D, 1)), *ones = te_tensor_full(te, TE_U8, SHAPE(BL_T), 1);
    const float *want = test_copy(test_read(te_forward(m, x)), BL_T * BL_D);
    te_forward_args args = {.input = x, .attention.attention_mask = ones};
    CHECK_BYTES("with a mask", test_read(te_forward_with(m, &args)), want, BL_T * BL_D * sizeof(float));
    te_forward_args direct = {.input = x, .attention.attention_mask = ones, .topk_weights = te_tensor_full(te, TE_F32, SHAPE(BL_T, BL_E), 1), .topk_indices = te_tensor_full(te, TE_U8, SHAPE(BL_T, BL_E), 1)};
    CHECK(!te_forward_with(te_module_find(m, "experts"), &direct));
    CHECK_ERROR(te, TE_ERR_UNSUPPORTED, "LinearExperts: padding with a map of the choice");
    direct.attention.attention_mask = NULL;
    direct.topk_indices = te_tensor_full(te, TE_F32, SHAPE(BL_T, BL_E), 1);
    CHECK(!te_forward_with(te_module_find(m, "experts"), &direct));
    CHECK_ERROR(te, TE_ERR_SHAPE, "both must be [19, K], and indices i32 or i64");
    CHECK(te_experts_get(m, TE_EXPERTS_DOWN_PROJS) == NULL);
    CHECK_ERROR(te, TE_ERR_INVALID, "te_experts_get: moe; experts, or an MoE, and one of te_experts_tensor are needed");
    te_module_destroy(m);
    b.config.n_activated_experts = 9;
    CHECK(te__moe_block_create(te, &b) == NULL);
    CHECK_ERROR(te, TE_ERR_INVALID, "n_activated_experts is 9 of n_routed_experts 8");
}
