/* test_lora_merge.c: te_lora_merge and what depends on the weights that it changes: preserved first values, modules that share a weight, inside and outside of the tree. */
#include "../te_test.h"

enum { MG_N = 32 };

/* A weight's preserved first value is in the weight's format: 2 bytes an element, where the sum is made in 4. */
TE_TEST_DEVICES(lora_merge_preserved_first_values) {
    static te_recipe (*const recipes[])(void) = {te_recipe_current_scaling, te_recipe_block_scaling, te_recipe_mxfp8, te_recipe_nvfp4};
    static const te_dtype dtypes[] = {TE_BF16, TE_F16, TE_F32};
    for (int i = 0; i < COUNT(recipes) * COUNT(dtypes); i++) {
        te_recipe recipe = recipes[i / COUNT(dtypes)]();
        const te_dtype dtype = dtypes[i % COUNT(dtypes)];
        test_case("%s, %s", te_recipe_name(recipe.kind), te_dtype_name(dtype));
        te_quantized_model_init_begin(te, &(te_quantized_model_init_desc){.recipe = &recipe, .preserve_high_precision_init_val = true});
        te_module *m = te_linear_create(te, &(te_linear_desc){.in_features = MG_N, .out_features = MG_N, .gemm.params_dtype = dtype});
        te_quantized_model_init_end(te);
        CHECK_EQ_INT(te_lora_apply(m, &(te_lora_desc){.match_all_linear = true, .dim = 4, .alpha = 4}, NULL), TE_OK);
        te_tensor_fill(te_module_parameter(te_module_find(m, "lora_A"), "weight"), 0.25);
        te_tensor_fill(te_module_parameter(te_module_find(m, "lora_B"), "weight"), 0.5); /* B A is 0.5 everywhere */
        te_tensor *weight = te_module_parameter(m, "weight");
        float *want = test_copy(test_read(te_dequantize(weight, TE_F32)), MG_N * MG_N);
        for (int k = 0; k < MG_N * MG_N; k++) want[k] += 0.5f;
        CHECK_EQ_INT(te_lora_merge(m), TE_OK);
        te_tensor *first = te_tensor_empty(te, dtype, SHAPE(MG_N, MG_N));
        uint8_t *bytes = (uint8_t *)test_alloc(te_tensor_bytes(first));
        CHECK_EQ_INT(te_quantized_init_value(weight, bytes), TE_OK);
        te_tensor_copy_from_host(first, bytes);
        CHECK_BYTES("the first value is the sum, rounded", test_read(first), test_rounded(dtype, want, MG_N * MG_N), MG_N * MG_N * sizeof(float));
        CHECK_OK(te);
        te_module_destroy(m);
    }
}

/* A weight that a module of another tree has, whole or in part: refused with both names, nothing changes, and merged when that module has gone. */
TE_TEST_DEVICES(lora_merge_refuses_weights_of_other_trees) {
    for (int part = 0; part < 2; part++) {
        test_case("part %d", part);
        te_module *m = te_linear_create(te, &(te_linear_desc){.in_features = MG_N, .out_features = MG_N, .gemm.params_dtype = TE_F32, .name = "mine"});
        te_module *child = te_linear_create(te, &(te_linear_desc){.in_features = MG_N, .out_features = part ? 8 : MG_N, .gemm.params_dtype = TE_F32, .name = "theirs"});
        te_module *other = te_sequential_create(te, &child, 1);
        te_tensor *weight = te_module_parameter(m, "weight");
        te_module_add_parameter(child, "weight", part ? te_tensor_narrow(weight, 0, 16, 8) : weight);
        CHECK_EQ_INT(te_lora_apply(m, &(te_lora_desc){.match_all_linear = true, .dim = 4, .alpha = 4}, NULL), TE_OK);
        te_tensor_fill(te_module_parameter(te_module_find(m, "lora_A"), "weight"), 0.25);
        te_tensor_fill(te_module_parameter(te_module_find(m, "lora_B"), "weight"), 0.5);
        REQUIRE_OK(te);
        float *want = test_copy(test_read(weight), MG_N * MG_N);
        CHECK_EQ_INT(te_lora_merge(m), TE_ERR_UNSUPPORTED);
        CHECK_MSG(strstr(te_error(te), "in the tree of \"sequential\", which would change with it"), "it says: %s", te_error(te));
        CHECK_ERROR(te, TE_ERR_UNSUPPORTED, "the weight of \"mine\" is also \"weight\" of \"theirs\"");
        CHECK_TENSOR(weight, want, 0, 0);
        CHECK(te_module_find(m, "lora_A") != NULL);
        te_module_destroy(other);
        CHECK_EQ_INT(te_lora_merge(m), TE_OK);
        for (int k = 0; k < MG_N * MG_N; k++) want[k] += 0.5f;
        CHECK_TENSOR(te_module_parameter(m, "weight"), want, 0, 1e-6);
        CHECK_OK(te);
        te_module_destroy(m);
    }
}
