/* Children that the program has destroyed: every class of modules says so by the same words, wherever a tree is run, saved, merged or changed, and goes on when another child takes the
 * place. */
#include "../te_test.h"

enum { H = 16, HEADS = 2, EXPERTS = 4, WORDS = 32 };

/* ---- trees ---- */

static te_module *a_linear(te_ctx *te) { return te_linear_create(te, &(te_linear_desc){.in_features = H, .out_features = H, .gemm.params_dtype = TE_F32}); }
static te_module *a_layer(te_ctx *te) {
    return te_transformer_layer_create(te, &(te_transformer_layer_desc){.hidden_size = H, .ffn_hidden_size = H, .attention.num_attention_heads = HEADS, .gemm.params_dtype = TE_F32});
}
static te_module *a_moe(te_ctx *te) {
    const te_moe_config c = {.n_routed_experts = EXPERTS, .n_activated_experts = 2, .n_shared_experts = 1, .dim = H, .moe_inter_dim = H, .dtype = TE_F32};
    return te_moe_create(te, &c, &(te_moe_backend){.experts = TE_EXPERTS_TORCH, .dispatcher = TE_DISPATCHER_TORCH, .linear = TE_LINEAR_TE});
}
static te_module *a_language_model(te_ctx *te) {
    return te_causal_lm_create(te, &(te_causal_lm_desc){.vocab_size = WORDS, .hidden_size = H, .intermediate_size = H, .num_hidden_layers = 3, .num_attention_heads = HEADS,
                                                        .num_key_value_heads = HEADS, .params_dtype = TE_F32});
}
static te_module *a_lora(te_ctx *te) {
    te_module *m = a_linear(te);
    te_lora_apply(m, &(te_lora_desc){.dim = 2, .match_all_linear = true}, NULL);
    return m;
}
/* A class of the program's that keeps its child's address: nothing may lead it there once the child is gone. */
static te_result keep_forward(te_module *m, te_forward_args *args) {
    args->outputs.out = te_forward(*(te_module **)te_module_state(m), args->input);
    return args->outputs.out ? TE_OK : te_error_code(te_module_ctx(m));
}
static const te_module_class keep_class = {.name = "Keep", .state_size = sizeof(te_module *), .forward = keep_forward};
static te_module *a_keep(te_ctx *te) {
    te_module *m = te_module_create(te, &keep_class, NULL);
    return *(te_module **)te_module_state(m) = te_module_add_child(m, "inner", a_linear(te)), m;
}

static te_tensor *floats(te_ctx *te) { return te_tensor_full(te, TE_F32, SHAPE(3, 1, H), 1); }
static te_tensor *words(te_ctx *te) { return te_tensor_zeros(te, TE_I32, SHAPE(1, 3)); }

static const struct tree {
    te_module *(*make)(te_ctx *te);
    te_tensor *(*input)(te_ctx *te);
    const char *path, *text; /* of the child; of the refusal */
} trees[] = {
    {a_layer, floats, "self_attention.proj", "self_attention: MultiheadAttention: its child \"proj\" is gone"},
    {a_layer, floats, "layernorm_mlp", "layer: TransformerLayer: its child \"layernorm_mlp\" is gone"},
    {a_moe, floats, "gate", "moe: MoE: its child \"gate\" is gone"},
    {a_moe, floats, "experts", "moe: MoE: its child \"experts\" is gone"},
    {a_moe, floats, "shared_experts.up_proj", "shared_experts: MLP: its child \"up_proj\" is gone"},
    {a_language_model, words, "model.layers.0", "model.layers: ModuleList: its child \"0\" is gone"},
    {a_language_model, words, "model.layers.1.mlp", "model.layers.1: DecoderLayer: its child \"mlp\" is gone"},
    {a_language_model, words, "lm_head", "CausalLM: its child \"lm_head\" is gone"},
    {a_lora, floats, "lora_A", "linear: Linear: its child \"lora_A\" is gone"},
    {a_lora, floats, "lora_B", "linear: Linear: its child \"lora_B\" is gone"},
    {a_keep, floats, "inner", "Keep: Keep: its child \"inner\" is gone"},
};

TE_TEST_DEVICES(children_that_are_gone_are_named) {
    for (int i = 0; i < COUNT(trees); i++) {
        const struct tree *t = &trees[i];
        char text[8192];
        test_case("%s", t->text);
        te_module *m = t->make(te);
        REQUIRE_OK(te);
        te_module_destroy(te_module_find(m, t->path));
        CHECK(te_forward(m, t->input(te)) == NULL);
        CHECK_ERROR(te, TE_ERR_STATE, t->text);
        CHECK_EQ_INT(te_model_save(te, test_path("m.safetensors"), m, NULL, NULL, 0), TE_ERR_STATE);
        CHECK_ERROR(te, TE_ERR_STATE, t->text);
        CHECK_EQ_INT(te_module_reset_parameters(m), TE_ERR_STATE);
        CHECK_ERROR(te, TE_ERR_STATE, t->text);
        CHECK_EQ_INT(te_lora_apply(m, &(te_lora_desc){.match_all_linear = true}, NULL), TE_ERR_STATE);
        CHECK_ERROR(te, TE_ERR_STATE, t->text);
        CHECK(te_onnx_export(m, &(te_forward_args){.input = t->input(te)}, test_path("m.onnx")) == TE_ERR_STATE);
        CHECK_ERROR(te, TE_ERR_STATE, t->text);
        te_module_print(m, text, sizeof text);
        const char *name = strrchr(t->path, '.');
        char line[64];
        snprintf(line, sizeof line, "%s: gone\n", name ? name + 1 : t->path);
        CHECK_STR(text, line);
        te_module_destroy(m);
        CHECK_OK(te);
    }
}

/* Adapters are given by te_lora_apply and taken back by te_lora_remove, which is the way out. */
TE_TEST_DEVICES(adapters_that_are_gone_are_neither_merged_nor_saved) {
    for (int half = 0; half < 2; half++) {
        const char *name = half ? "lora_B" : "lora_A";
        char text[64];
        snprintf(text, sizeof text, "its child \"%s\" is gone", name);
        te_module *m = a_lora(te);
        float *before = test_copy(test_read(te_module_parameter(m, "weight")), H * H);
        te_module_destroy(te_module_find(m, name));
        CHECK_EQ_INT(te_lora_merge(m), TE_ERR_STATE);
        CHECK_ERROR(te, TE_ERR_STATE, text);
        CHECK_EQ_INT(te_lora_save(m, test_path("adapters")), TE_ERR_STATE);
        CHECK_ERROR(te, TE_ERR_STATE, text);
        CHECK_EQ_INT(te_lora_load(m, test_path("adapters")), TE_ERR_STATE);
        CHECK_ERROR(te, TE_ERR_STATE, text);
        CHECK_BYTES("weight", test_read(te_module_parameter(m, "weight")), before, H * H * sizeof(float));
        CHECK(te_module_remove_child(m, half ? "lora_A" : "lora_B") == NULL);
        CHECK_ERROR(te, TE_ERR_INVALID, "te_module_remove_child: linear runs its child");
        CHECK_EQ_INT(te_lora_remove(m), TE_OK);
        CHECK(te_forward(m, floats(te)) != NULL && te_module_num_children(m) == 0);
        CHECK_EQ_INT(te_lora_apply(m, &(te_lora_desc){.match_all_linear = true}, NULL), TE_OK);
        CHECK_EQ_INT(te_lora_merge(m), TE_OK);
        CHECK_OK(te);
        te_module_destroy(m);
    }
}

/* A new child stands where the old one stood: the layers of a language model have an order. */
TE_TEST_DEVICES(children_come_back_in_their_place) {
    te_module *m = a_language_model(te), *list = te_module_find(m, "model.layers"), *layer = a_layer(te);
    char text[4096];
    REQUIRE_OK(te);
    te_module_destroy(te_module_child(list, 0));
    te_module_destroy(te_module_child(list, 0));
    CHECK_STR(te_module_name(te_module_child(list, 0)), "2");
    CHECK(te_module_add_child(list, "1", a_linear(te)) && te_module_add_child(list, "extra", a_linear(te)) && te_module_add_child(list, "0", a_linear(te)));
    for (int i = 0; i < 4; i++) CHECK_STR(te_module_name(te_module_child(list, i)), ((const char *[]){"0", "1", "2", "extra"})[i]);
    te_module_print(m, text, sizeof text);
    CHECK(!strstr(text, "gone"));
    te_module_destroy(te_module_find(list, "extra")); /* the class does not run it */
    te_module_destroy(te_module_find(list, "0"));     /* a child that came back is as needed as the first one */
    CHECK(te_forward(m, words(te)) == NULL);
    CHECK_ERROR(te, TE_ERR_STATE, "model.layers: ModuleList: its child \"0\" is gone");
    te_module_destroy(m);

    test_case("a tree that is whole again runs");
    te_module_destroy(te_module_find(layer, "self_attention.proj"));
    CHECK(te_forward(layer, floats(te)) == NULL);
    CHECK_ERROR(te, TE_ERR_STATE, "its child \"proj\" is gone");
    CHECK(te_module_add_child(te_module_find(layer, "self_attention"), "proj", a_linear(te)) != NULL);
    CHECK(te_forward(layer, floats(te)) != NULL);
    te_module_destroy(layer);
    CHECK_OK(te);
}

/* A part of a tree that is broken elsewhere runs, and so does another tree. */
TE_TEST_DEVICES(children_that_are_gone_stop_their_tree_alone) {
    te_module *broken = a_layer(te), *whole = a_layer(te);
    te_module_destroy(te_module_find(broken, "self_attention.proj"));
    CHECK(te_forward(whole, floats(te)) != NULL && te_forward(te_module_find(broken, "layernorm_mlp"), floats(te)) != NULL);
    CHECK_OK(te);
    te_module_destroy(broken);
    te_module_destroy(whole);
}

/* Between a forward pass and its second run. */
TE_TEST_DEVICES(children_that_go_before_a_second_run) {
    te_module *m = a_layer(te);
    te_module_set_checkpoint(m, true);
    te_tensor *loss = te_sum_all(te_forward(m, floats(te)));
    REQUIRE_OK(te);
    te_module_destroy(te_module_find(m, "layernorm_mlp"));
    CHECK(te_backward(loss) == TE_ERR_STATE);
    CHECK_ERROR(te, TE_ERR_STATE, "TransformerLayer: its child \"layernorm_mlp\" is gone");
    te_module_destroy(m);
    CHECK_OK(te);
}

/* Which child a program may take away: a Sequential's, and those of its own classes. */
TE_TEST_DEVICES(children_that_may_go) {
    te_module *list = te_sequential_create(te, (te_module *[]){a_linear(te), a_linear(te), a_linear(te)}, 3), *keep = a_keep(te), *inner;
    te_module_destroy(te_module_child(list, 1));
    CHECK(te_forward(list, floats(te)) != NULL);
    inner = te_module_remove_child(list, "0");
    REQUIRE(inner != NULL && te_module_parent(inner) == NULL);
    CHECK(te_module_num_children(list) == 1 && te_forward(list, floats(te)) != NULL && te_forward(inner, floats(te)) != NULL);
    te_module_destroy(inner);
    CHECK_OK(te);

    CHECK(te_module_remove_child(keep, NULL) == NULL);
    CHECK_ERROR(te, TE_ERR_INVALID, "Keep has no child \"(NULL)\"");
    CHECK(te_module_remove_child(keep, "inner.weight") == NULL && te_module_remove_child(NULL, "inner") == NULL);
    CHECK_ERROR(te, TE_ERR_INVALID, "has no child \"inner.weight\"");
    inner = te_module_remove_child(keep, "inner"); /* still the caller's, so the address that the class keeps is good */
    REQUIRE(inner != NULL);
    CHECK(te_forward(keep, floats(te)) != NULL);
    te_module_destroy(inner);
    CHECK_OK(te);
    te_module_destroy(keep);
    te_module_destroy(list);
}

TE_TEST_DEVICES(experts_that_are_gone) {
    const te_moe_config c = {.n_routed_experts = EXPERTS, .n_activated_experts = 2, .dim = H, .moe_inter_dim = H, .dtype = TE_F32};
    te_module *m = te_grouped_experts_te_create(te, &c, &(te_moe_backend){.experts = TE_EXPERTS_TE});
    REQUIRE_OK(te);
    te_module_destroy(te_module_find(m, "down_linear"));
    CHECK(te_experts_get(m, TE_EXPERTS_DOWN_PROJS) == NULL);
    CHECK_ERROR(te, TE_ERR_STATE, "GroupedExpertsTE: its child \"down_linear\" is gone");
    CHECK_EQ_INT(te_experts_save_hf(m, test_path("e.safetensors"), NULL), TE_ERR_STATE);
    CHECK_ERROR(te, TE_ERR_STATE, "its child \"down_linear\" is gone");
    te_module_destroy(m);
    CHECK_OK(te);
}
