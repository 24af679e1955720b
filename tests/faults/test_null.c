/* tests/faults/test_null.c: NULL for a desc, which every creator refuses by its name, and sizes at the end of 64 bits. */
#include "../te_test.h"

TE_TEST(every_creator_refuses_a_null_desc) {
    te_ctx *te = test_context("cpu");
    static const char *const names[] = {"te_linear_create", "te_layernorm_create", "te_rmsnorm_create", "te_layernorm_linear_create", "te_layernorm_mlp_create",
                                        "te_dot_product_attention_create", "te_multihead_attention_create", "te_transformer_layer_create", "te_embedding_create",
                                        "te_quantizer_create", "te_group_create", "te_activation_create", "te_bias_create", "te_constant_scale_create", "te_dropout_create",
                                        "te_l2normalization_create", "te_inference_params_create", "te_module_create", "te_thread_group_create",
                                        "te_float32_rms_norm_create", "te_gate_create", "te_fake_balanced_gate_create", "te_grouped_experts_create",
                                        "te_grouped_experts_deepep_create", "te_grouped_experts_te_create", "te_moe_create", "te_sdpa_create", "te_causal_lm_create", "te_grouped_linear_create",
                                        "te_fp8_padding_create", "te_fp8_unpadding_create", "te_nccl_group_create"};
    /* Those to which NULL is a default, or that have no desc. */
    static const char *const others[] = {"te_ctx_create", "te_fused_adam_create", "te_fused_sgd_create", "te_thread_hub_create", "te_sequential_create", "te_identity_create",
                                         "te_grad_scaler_create", "te_kv_cache_create"};
#define NULL_TWICE(i, name)                                                  \
    CHECK(!name(NULL, NULL));                                                \
    CHECK(!name(te, NULL));                                                  \
    CHECK(strcmp(names[i], #name) == 0);                                     \
    CHECK_ERROR(te, TE_ERR_INVALID, #name ": desc is NULL")
    NULL_TWICE(0, te_linear_create);
    NULL_TWICE(1, te_layernorm_create);
    NULL_TWICE(2, te_rmsnorm_create);
    NULL_TWICE(3, te_layernorm_linear_create);
    NULL_TWICE(4, te_layernorm_mlp_create);
    NULL_TWICE(5, te_dot_product_attention_create);
    NULL_TWICE(6, te_multihead_attention_create);
    NULL_TWICE(7, te_transformer_layer_create);
    NULL_TWICE(8, te_embedding_create);
    NULL_TWICE(9, te_quantizer_create);
    NULL_TWICE(10, te_group_create);
    NULL_TWICE(11, te_activation_create);
    NULL_TWICE(12, te_bias_create);
    NULL_TWICE(13, te_constant_scale_create);
    NULL_TWICE(14, te_dropout_create);
    NULL_TWICE(15, te_l2normalization_create);
    NULL_TWICE(16, te_inference_params_create);
    NULL_TWICE(19, te_float32_rms_norm_create);
    NULL_TWICE(26, te_sdpa_create);
    NULL_TWICE(27, te_causal_lm_create);
    NULL_TWICE(28, te_grouped_linear_create);
    NULL_TWICE(29, te_fp8_padding_create);
    NULL_TWICE(30, te_fp8_unpadding_create);
    NULL_TWICE(31, te_nccl_group_create);
    CHECK(!te_initialize_linear_module(NULL, NULL) && !te_initialize_linear_module(te, NULL));
    CHECK_ERROR(te, TE_ERR_INVALID, "te_initialize_linear_module: desc is NULL");
    CHECK(!te_initialize_rms_norm_module(NULL, NULL) && !te_initialize_rms_norm_module(te, NULL));
    CHECK_ERROR(te, TE_ERR_INVALID, "te_initialize_rms_norm_module: desc is NULL");
    const te_moe_config one = {.n_routed_experts = 1, .n_activated_experts = 1, .dim = 1, .moe_inter_dim = 1};
#define NULL_CONFIG(name)                                                    \
    CHECK(!name(NULL, NULL, NULL) && !name(te, NULL, &(te_moe_backend){0})); \
    CHECK_ERROR(te, TE_ERR_INVALID, #name ": desc is NULL");                 \
    CHECK(!name(te, &one, NULL));                                            \
    CHECK_ERROR(te, TE_ERR_INVALID, #name ": backend is NULL")
    NULL_CONFIG(te_grouped_experts_create);
    NULL_CONFIG(te_grouped_experts_deepep_create);
    NULL_CONFIG(te_grouped_experts_te_create);
    NULL_CONFIG(te_moe_create);
    CHECK(!te_gate_create(NULL, NULL, TE_F32, NULL) && !te_gate_create(te, NULL, TE_F32, NULL));
    CHECK_ERROR(te, TE_ERR_INVALID, "te_gate_create: desc is NULL");
    CHECK(!te_fake_balanced_gate_create(NULL, NULL, 0, 0) && !te_fake_balanced_gate_create(te, NULL, 0, 0));
    CHECK_ERROR(te, TE_ERR_INVALID, "te_fake_balanced_gate_create: desc is NULL");
    CHECK(!te_module_create(NULL, NULL, NULL) && !te_module_create(te, NULL, NULL));
    CHECK_ERROR(te, TE_ERR_INVALID, "te_module_create: cls is NULL");
    CHECK(!te_initialize_attn_module(NULL, TE_ATTN_TE, NULL) && !te_initialize_attn_module(te, TE_ATTN_TE, NULL));
    CHECK_ERROR(te, TE_ERR_INVALID, "te_initialize_attn_module: desc is NULL");
    CHECK(!te_create_block_mask(NULL, NULL) && !te_create_block_mask(te, NULL));
    CHECK_ERROR(te, TE_ERR_INVALID, "te_create_block_mask: desc is NULL");
    CHECK(!te_sparse_window_indices(NULL, NULL) && !te_sparse_window_indices(te, NULL));
    CHECK_ERROR(te, TE_ERR_INVALID, "te_sparse_window_indices: desc is NULL");
    CHECK(!te_thread_group_create(NULL, NULL, 0) && !te_thread_group_create(te, NULL, 0));
    CHECK_ERROR(te, TE_ERR_INVALID, "te_thread_group_create: hub is NULL");
    CHECK(!te_fused_adam_create(NULL, NULL, NULL) && !te_fused_adam_create(te, NULL, NULL));
    CHECK(!te_fused_sgd_create(NULL, NULL, NULL) && !te_fused_sgd_create(te, NULL, NULL) && !te_grad_scaler_create(NULL, NULL));
    CHECK_OK(te); /* the module is a NULL that was reported when it came about */
    /* every creator of the public chapters stands in one of the lists */
    int found = 0;
    char part[512], chapter[64];
    FILE *parts = fopen("src/te_parts.h", "r");
    CHECK_MSG(parts != NULL, "src/te_parts.h is not there: tests run in the repository's root");
    while (parts && fgets(part, sizeof part, parts)) {
        char path[80], line[512], name[64];
        if (sscanf(part, "#include \"api/%63[a-z_]", chapter) != 1) continue;
        snprintf(path, sizeof path, "src/api/%s.h", chapter);
        FILE *f = fopen(path, "r");
        CHECK_MSG(f != NULL, "%s is not there: tests run in the repository's root", path);
        while (f && fgets(line, sizeof line, f)) {
            const char *at = strncmp(line, "TE_API", 6) == 0 ? strstr(line, "_create(") : NULL;
            const char *begin = at;
            bool known = false;
            if (!at) continue;
            while (begin[-1] != ' ' && begin[-1] != '*') begin--;
            snprintf(name, sizeof name, "%.*s_create", (int)(at - begin), begin);
            for (int k = 0; k < COUNT(names); k++) known = known || strcmp(names[k], name) == 0;
            found += known;
            for (int k = 0; k < COUNT(others); k++) known = known || strcmp(others[k], name) == 0;
            CHECK_MSG(known, "%s has no line in this test", name);
        }
        if (f) fclose(f);
    }
    if (parts) fclose(parts);
    CHECK_EQ_INT(found, COUNT(names));
}

/* The undefined-behaviour sanitizer looks on. */
TE_TEST(sizes_at_the_end_of_64_bits_do_not_overflow) {
    te_ctx *te = test_context("cpu");
    const int64_t huge = (int64_t)1 << 55, half = INT64_MAX / 2 + 1;
    te_tensor *none = te_tensor_zeros(te, TE_F32, SHAPE(0, 4));
    CHECK(!te_tensor_view(none, SHAPE(0, huge, huge)));
    CHECK_ERROR(te, TE_ERR_SHAPE, "te_tensor_view");
    CHECK(!te_tensor_view(none, SHAPE(huge, 0, huge)));
    te_clear_error(te);
    te_tensor *far = te_tensor_view(none, SHAPE(0, huge));
    CHECK(far && te_tensor_numel(far) == 0);
    /* positions */
    te_tensor *x = te_tensor_full(te, TE_F32, SHAPE(3, 1, 2, 4), 1);
    CHECK(!te_apply_rotary_pos_emb(x, &(te_rotary_desc){.position_offset = INT64_MAX}, TE_SBHD));
    CHECK_ERROR(te, TE_ERR_INVALID, "position_offset is 9223372036854775807");
    CHECK(!te_apply_rotary_pos_emb(x, &(te_rotary_desc){.position_offset = INT64_MIN}, TE_SBHD));
    te_clear_error(te);
    CHECK(te_apply_rotary_pos_emb(x, &(te_rotary_desc){.position_offset = -((int64_t)1 << 53)}, TE_SBHD) != NULL);
    te_tensor *wide = te_tensor_zeros(te, TE_F32, SHAPE(0, 1, 2, (int64_t)1 << 40));
    te_apply_rotary_pos_emb(wide, NULL, TE_SBHD);
    te_clear_error(te);
    /* modules */
    te_layernorm_mlp_desc mlp = {.hidden_size = 1, .ffn_hidden_size = half, .activation = TE_SWIGLU};
    CHECK(!te_layernorm_mlp_create(te, &mlp));
    CHECK_ERROR(te, TE_ERR_INVALID, "te_layernorm_mlp_create: sizes 1 and 4611686018427387904; both must be at least 1 and less than 2^62");
    CHECK(!te_transformer_layer_create(te, &(te_transformer_layer_desc){.hidden_size = 2, .ffn_hidden_size = half, .attention.num_attention_heads = 1, .activation = TE_SWIGLU}));
    te_clear_error(te);
    CHECK(!te_multihead_attention_create(te, &(te_multihead_attention_desc){.hidden_size = 8, .attention.num_attention_heads = 2, .attention.kv_channels = half}));
    CHECK_ERROR(te, TE_ERR_INVALID, "te_multihead_attention_create");
    CHECK(!te_multihead_attention_create(te, &(te_multihead_attention_desc){.hidden_size = INT64_MAX, .attention.num_attention_heads = 1}));
    te_clear_error(te);
    CHECK(!te_multihead_attention_create(te, &(te_multihead_attention_desc){.hidden_size = 8, .attention.num_attention_heads = INT32_MAX, .attention.kv_channels = (int64_t)1 << 40}));
    te_clear_error(te);
    CHECK(!te_linear_create(te, &(te_linear_desc){.in_features = INT64_MAX, .out_features = INT64_MAX}));
    te_clear_error(te);
    /* nothing at NULL */
    te_tensor *ids = te_tensor_zeros(te, TE_I32, SHAPE(0));
    CHECK(te_embedding_lookup(te_tensor_zeros(te, TE_F32, SHAPE(5, 0)), te_tensor_full(te, TE_I32, SHAPE(3), 9)) != NULL);
    CHECK(te_embedding_lookup(te_tensor_zeros(te, TE_F32, SHAPE(5, 4)), ids) != NULL);
    te_op_transpose_args turn = {.src = te_tensor_zeros(te, TE_F4E2M1, SHAPE(0, 4)), .dst = te_tensor_zeros(te, TE_F4E2M1, SHAPE(4, 0)), .columns = 4};
    CHECK(te_op_transpose(te, &turn) == TE_OK);
    CHECK_OK(te);
}
