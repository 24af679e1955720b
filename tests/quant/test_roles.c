/* tests/quant/test_roles.c: what a custom recipe's factory is told: a role carries the module's path. */
#include "../te_test.h"

typedef struct roles {
    char weights[16][128], others[32][128]; /* "path gemm" as the factory was told */
    int num_weights, num_others;
    bool preparing; /* weights are being stored */
} roles;
static te_result note_role(void *user, const te_quantizer_role *role, te_quantizer_desc *desc) {
    roles *r = (roles *)user;
    desc->kind = TE_QUANT_CURRENT;
    if (r->preparing && r->num_weights < 16) snprintf(r->weights[r->num_weights++], 128, "%s %s %d", role->module_type, role->name, role->gemm);
    if (!r->preparing && role->tensor_type == TE_TENSOR_WEIGHT && r->num_others < 32)
        snprintf(r->others[r->num_others++], 128, "%s %s %d", role->module_type, role->name, role->gemm);
    return TE_OK;
}
static te_result run_child(te_module *self, te_forward_args *args) {
    args->outputs.out = te_forward(te_module_child(self, 0), args->input);
    return te_error_code(te_module_ctx(self));
}
static bool see_stats(void *user, const te_quantizer_role *role, const te_quant_stats *stats) {
    roles *r = (roles *)user;
    (void)stats;
    if (role->tensor_type == TE_TENSOR_INPUT && r->num_others < 32)
        snprintf(r->others[r->num_others++], 128, "%s %s %d", role->module_type, role->name, role->gemm);
    return true;
}

/* The same words when weights are stored, when a module first runs, and when it is inspected. */
TE_TEST(roles_carry_the_path_everywhere) {
    static const te_module_class cls = {"Root", 0, run_child, NULL, NULL};
    for (int norm = 0; norm < 2; norm++) {
        te_ctx *te = test_context("cpu");
        roles seen = {0}, inspected = {0};
        te_recipe recipe = te_recipe_custom(note_role, &seen);
        te_quantized_model_init_desc init = {0};
        te_transformer_layer_desc d = {0};
        te_autocast_desc cast = {0};
        cast.recipe = init.recipe = &recipe;
        d.hidden_size = d.ffn_hidden_size = 32;
        d.attention.num_attention_heads = 2;
        d.output_layernorm = norm == 1; /* the attention then begins with a plain Linear */
        d.name = "block";
        test_case("%s", norm ? "output_layernorm" : "input layernorm");
        te_quantized_model_init_begin(te, &init);
        seen.preparing = true;
        te_module *root = te_module_create(te, &cls, "root");
        te_module_add_child(root, NULL, te_transformer_layer_create(te, &d));
        seen.preparing = false;
        te_quantized_model_init_end(te);
        REQUIRE_OK(te);
        te_tensor *x = test_tensor(te, TE_BF16, SHAPE(4, 1, 32), test_normal(128, 3));
        te_autocast_begin(te, &cast);
        te_quant_inspect(te, true);
        te_forward(root, x);
        te_autocast_end(te);
        te_quant_stats_visit(te, see_stats, &inspected);
        REQUIRE_OK(te);
        CHECK_STR(seen.weights[0], norm ? "Linear block.self_attention.qkv 0" : "LayerNormLinear block.self_attention.layernorm_qkv 0");
        CHECK_EQ_INT(seen.num_weights, 4);
        CHECK_EQ_INT(seen.num_others, 4);
        for (int i = 0; i < 4; i++) {
            bool found = false, looked = false;
            for (int k = 0; k < 4; k++) found = found || strcmp(seen.weights[i], seen.others[k]) == 0;
            for (int k = 0; k < inspected.num_others; k++) looked = looked || strcmp(seen.weights[i], inspected.others[k]) == 0;
            CHECK_MSG(found, "\"%s\" when its weight was stored, and never so when it ran (\"%s\" ..)", seen.weights[i], seen.others[0]);
            CHECK_MSG(looked, "\"%s\" when its weight was stored, and never so when it was inspected", seen.weights[i]);
        }
        te_module_destroy(root);
    }
}

/* A module that stands alone is called by its name. */
TE_TEST(a_module_alone_has_its_name_as_path) {
    te_ctx *te = test_context("cpu");
    roles seen = {0};
    te_recipe recipe = te_recipe_custom(note_role, &seen);
    te_quantized_model_init_desc init = {0};
    te_linear_desc d = {0};
    d.in_features = d.out_features = 16;
    d.name = "head";
    init.recipe = &recipe;
    te_quantized_model_init_begin(te, &init);
    seen.preparing = true;
    te_module *m = te_linear_create(te, &d);
    te_quantized_model_init_end(te);
    CHECK_STR(seen.weights[0], "Linear head 0");
    CHECK_OK(te);
    te_module_destroy(m);
}
