/* test_inject_models.c: whole models whose attention is replaced: which modules are found, language models of the Llama and Gemma kinds, caches, graphs, ranks, memory that runs out, and everything given
 * back. */
#include "../dist/ranks.h"
#include "../faults/purse.h"
#include "inject.h"
#include <sys/stat.h>

enum { LM_V = 31, LM_S = 9 };
static te_causal_lm_desc lm_desc(te_dtype dtype, int layers) {
    return (te_causal_lm_desc){.vocab_size = LM_V, .hidden_size = 32, .intermediate_size = 48, .num_hidden_layers = layers, .num_attention_heads = 4, .num_key_value_heads = 2, .params_dtype = dtype,
                               .init.std = 0.2f};
}
static const bool slides[] = {true, false, true};
static te_causal_lm_desc gemma_desc(te_dtype dtype) {
    te_causal_lm_desc d = lm_desc(dtype, 3);
    d.head_dim = 16;
    d.activation = TE_GEGLU;
    d.qk_norm = d.feedforward_norms = d.zero_centered_gamma = d.tie_word_embeddings = true;
    d.sliding_window = 4;
    d.sliding_layers = slides;
    d.softmax_scale = 0.2f;
    d.embedding_scale = 5.65685425f;
    d.final_logit_softcapping = 30;
    return d;
}
static te_tensor *ids_of(te_ctx *te, int64_t b, int64_t s) {
    int32_t *ids = (int32_t *)test_alloc((size_t)(b * s) * sizeof(int32_t) + 1);
    for (int64_t i = 0; i < b * s; i++) ids[i] = (int32_t)((i * i * 5 + 3 * i + 1) % LM_V);
    return te_tensor_from_host(te, TE_I32, SHAPE(b, s), ids);
}
static te_module *attention_at(te_module *m, int layer) {
    char path[64];
    snprintf(path, sizeof path, "model.layers.%d.self_attn", layer);
    return te_module_find(m, path);
}
static bool add_name(void *user, te_module *m, const char *path, te_tensor *x, te_entry_kind kind) {
    char *text = (char *)user;
    (void)m, (void)x;
    snprintf(text + strlen(text), 8192 - strlen(text), "%s%s ", path, kind == TE_ENTRY_BUFFER ? "!" : "");
    return true;
}
static const char *names_of(te_module *m) {
    char *text = (char *)test_alloc(8192);
    te_module_visit_tensors(m, add_name, text);
    return text;
}

/* ---- language models ---- */

TE_TEST_DEVICES(inject_language_models) {
    for (int n = 0; n < 4; n++) {
        const te_dtype dtype = n % 2 ? TE_BF16 : TE_F32;
        const bool gemma = n >= 2;
        /* f32: the specification's; bf16: 8 bits of mantissa, through three layers. */
        const double limit = dtype == TE_F32 ? 5e-4 : 2e-2;
        te_causal_lm_desc d = gemma ? gemma_desc(dtype) : lm_desc(dtype, 3);
        te_module *m = te_causal_lm_create(te, &d);
        te_tensor *ids = ids_of(te, 2, LM_S);
        char printed[2][4096];
        test_case("%s, %s", gemma ? "gemma" : "llama", te_dtype_name(dtype));
        REQUIRE_OK(te);
        results before = run_once(m, ids, NULL);
        const char *names = names_of(m);
        te_module_print(m, printed[0], sizeof printed[0]);
        te_attn_reset_stats(te);
        CHECK(!te_uses_te_attention(m));
        int left = -1;
        CHECK_EQ_INT(te_inject_te_attention(m, &(te_inject_desc){.left_alone = &left}), 3);
        CHECK_EQ_INT(left, 0);
        CHECK(te_uses_te_attention(m) && te_module_attribute(m, "_te_attention_injected", NULL));
        results with = run_once(m, ids, NULL);
        REQUIRE_OK(te);
        CHECK(with.n == before.n);
        CHECK_ERROR_BELOW("logits and gradients", with.x, before.x, before.n, limit);
        check_stats(te_attn_get_stats(te), 3, 0, 0, 0);
        for (int layer = 0; layer < 3; layer++) {
            void *dpa = NULL;
            te_attn_params p;
            check_stats(te_sdpa_patch_stats(te_injected_sdpa(attention_at(m, layer))), 1, 0, 0, 0);
            CHECK(te_module_attribute(attention_at(m, layer), "attn_module", &dpa) && dpa);
            CHECK_STR(te_module_get_class((te_module *)dpa)->name, "DotProductAttention");
            CHECK(te_infer_attn_params(attention_at(m, layer), &p));
            CHECK(p.num_heads == 4 && p.num_kv_heads == 2 && p.head_dim == (gemma ? 16 : 8) && p.window_size.on == (gemma && slides[layer]) && (!p.window_size.on || p.window_size.left == 3));
            CHECK(p.softmax_scale == (gemma ? 0.2f : 0.353553391f));
            /* a negative window of the user's means none, whatever the layer has */
            te_module_set_attn_attributes(attention_at(m, layer), &(te_attn_attributes){.sliding_window = -1});
            CHECK(te_infer_attn_params(attention_at(m, layer), &p) && !p.window_size.on);
            te_module_set_attn_attributes(attention_at(m, layer), &(te_attn_attributes){0});
        }
        CHECK(strcmp(names_of(m), names) == 0);
        /* keys and values of earlier calls: DotProductAttention takes these calls as well */
        te_no_grad_begin(te);
        te_kv_cache *cache = te_kv_cache_create(m, 2, LM_S);
        te_forward_args first = {.input = te_tensor_contiguous(te_tensor_narrow(ids, 1, 0, LM_S - 2)), .kv_cache = cache}, rest = {.input = te_tensor_contiguous(te_tensor_narrow(ids, 1, LM_S - 2, 2)), .kv_cache = cache};
        te_forward_with(m, &first);
        te_tensor *last = te_forward_with(m, &rest), *whole = te_forward(m, ids);
        CHECK_ERROR_BELOW("from a cache", test_read(last), test_read(te_tensor_contiguous(te_tensor_narrow(whole, 1, LM_S - 2, 2))), 2 * 2 * LM_V, te_ctx_is_cuda(te) ? 2e-2 : limit);
        te_no_grad_end(te);
        te_kv_cache_destroy(cache);
        check_stats(te_attn_get_stats(te), 12, 0, 0, 0);
        /* checkpointed: each layer runs again, and is counted again */
        for (int layer = 0; layer < 3; layer++) te_module_set_checkpoint(te_module_parent(attention_at(m, layer)), true);
        results again = run_once(m, ids, NULL);
        CHECK_BYTES("checkpointed", again.x, with.x, (size_t)with.n * sizeof(float));
        check_stats(te_attn_get_stats(te), 18, 0, 0, 0);
        for (int layer = 0; layer < 3; layer++) te_module_set_checkpoint(te_module_parent(attention_at(m, layer)), false);
        /* a second run leaves all as it is */
        const int warned = log_lines("has no self_attn that could be injected");
        CHECK_EQ_INT(te_inject_te_attention(m, &(te_inject_desc){.left_alone = &left}), 0);
        CHECK(left == 3 && log_lines("has no self_attn that could be injected") == warned);
        CHECK_EQ_INT(te_inject_te_attention(m, &(te_inject_desc){.rules_of_automodel = true}), 0);
        CHECK(log_lines("has no self_attn that could be injected") == warned + 1 && te_uses_te_attention(m));
        CHECK_EQ_INT(te_restore_attention(m), 3);
        CHECK(!te_uses_te_attention(m));
        te_module_print(m, printed[1], sizeof printed[1]);
        CHECK(strcmp(printed[0], printed[1]) == 0);
        results after = run_once(m, ids, NULL);
        CHECK_BYTES("restored", after.x, before.x, (size_t)before.n * sizeof(float));
        check_stats(te_attn_get_stats(te), 18, 0, 0, 0);
        CHECK_OK(te);
        te_module_destroy(m);
    }
}

/* Folders of transformers: what te_hf_open makes of them is injected, each layer's calls are counted, and neither logits nor gradients change. */
static bool list_parameter(void *user, te_module *m, const char *path, te_tensor *x, te_entry_kind kind) {
    te_safetensors_item **at = (te_safetensors_item **)user;
    char *name = (char *)test_alloc(strlen(path) + 1);
    (void)m, (void)kind;
    strcpy(name, path);
    *(*at)++ = (te_safetensors_item){name, x};
    return true;
}
static const char *folder_of(te_ctx *te, bool gemma) {
    static const char sizes[] = "\"vocab_size\": 31, \"hidden_size\": 32, \"intermediate_size\": 48, \"num_hidden_layers\": 3, \"num_attention_heads\": 4, \"num_key_value_heads\": 2, \"rope_theta\": 10000.0";
    static const char *const kinds[2] = {
        "\"model_type\": \"llama\", \"hidden_act\": \"silu\", \"rms_norm_eps\": 1e-05, \"tie_word_embeddings\": false",
        "\"model_type\": \"gemma3_text\", \"hidden_activation\": \"gelu_pytorch_tanh\", \"rms_norm_eps\": 1e-06, \"tie_word_embeddings\": true, \"head_dim\": 16, \"query_pre_attn_scalar\": 25, "
        "\"rope_local_base_freq\": 500.0, \"sliding_window\": 4, \"layer_types\": [\"sliding_attention\", \"full_attention\", \"sliding_attention\"]"};
    te_causal_lm_desc d = gemma ? gemma_desc(TE_F32) : lm_desc(TE_F32, 3);
    te_module *m = te_causal_lm_create(te, &d);
    te_safetensors_item items[64], *end = items;
    char *folder = (char *)test_alloc(600), path[700];
    snprintf(folder, 600, "%s", test_path(gemma ? "gemma" : "llama"));
    CHECK(mkdir(folder, 0700) == 0);
    te_module_visit_tensors(m, list_parameter, &end);
    snprintf(path, sizeof path, "%s/model.safetensors", folder);
    te_safetensors_write(te, path, items, (int)(end - items), NULL, 0);
    snprintf(path, sizeof path, "%s/config.json", folder);
    FILE *f = fopen(path, "wb");
    CHECK(f && fprintf(f, "{%s, %s}", kinds[gemma], sizes) > 0);
    if (f) fclose(f);
    te_module_destroy(m);
    return folder;
}
TE_TEST_DEVICES(inject_folders) {
    for (int gemma = 0; gemma < 2; gemma++) {
        test_case("%s", gemma ? "gemma3_text" : "llama");
        te_module *m = te_hf_open(te, folder_of(te, gemma), NULL);
        REQUIRE_OK(te);
        te_tensor *ids = ids_of(te, 2, LM_S);
        results before = run_once(m, ids, NULL);
        te_attn_reset_stats(te);
        CHECK_EQ_INT(te_inject_te_attention(m, NULL), 3);
        results with = run_once(m, ids, NULL);
        REQUIRE_OK(te);
        CHECK(with.n == before.n);
        CHECK_ERROR_BELOW("logits and gradients", with.x, before.x, before.n, 5e-4); /* the specification's, in f32 */
        for (int layer = 0; layer < 3; layer++) check_stats(te_sdpa_patch_stats(te_injected_sdpa(attention_at(m, layer))), 1, 0, 0, 0);
        te_module_destroy(m);
    }
}

/* Scores that are capped stay with the attention that caps them: every layer is left alone, and said so. */
TE_TEST(inject_leaves_capped_scores_alone) {
    te_ctx *te = test_context_with(&(te_ctx_desc){.log_level = TE_LOG_DEBUG});
    te_causal_lm_desc d = gemma_desc(TE_F32);
    int left = -1;
    d.attn_logit_softcapping = 50;
    te_module *m = te_causal_lm_create(te, &d);
    results before = run_once(m, ids_of(te, 2, LM_S), NULL);
    CHECK_EQ_INT(te_inject_te_attention(m, &(te_inject_desc){.left_alone = &left}), 0);
    CHECK_EQ_INT(left, 3);
    CHECK_EQ_INT(te_inject_check(attention_at(m, 1), NULL), TE_INJECT_SOFTCAP);
    CHECK_STR(test_log_text(), "model.layers.1.self_attn: its sdpa caps scores");
    CHECK_STR(test_log_text(), "has no self_attn that could be injected; 3 were left alone");
    CHECK(!te_uses_te_attention(m));
    results after = run_once(m, ids_of(te, 2, LM_S), NULL);
    CHECK_BYTES("as before", after.x, before.x, (size_t)before.n * sizeof(float));
    te_module_destroy(m);
    CHECK_OK(te);
}

/* Attention sinks are DotProductAttention's softmax_offset: the same tensor, and the same gradient; frozen ones stay frozen. */
TE_TEST_DEVICES(inject_sinks) {
    for (int frozen = 0; frozen < 2; frozen++) {
        te_causal_lm_desc d = lm_desc(TE_F32, 1);
        te_module *m = te_causal_lm_create(te, &d), *attn = attention_at(m, 0);
        te_tensor *sinks = te_tensor_set_requires_grad(test_tensor(te, TE_F32, SHAPE(4), test_normal(4, 9)), !frozen);
        te_attn_rule *rule = &((te_sdpa_desc *)te_module_state(te_module_find(attn, "sdpa")))->rule;
        rule->softmax_type = TE_SOFTMAX_LEARNABLE;
        rule->softmax_offset = sinks;
        results runs[2];
        for (int injected = 0; injected < 2; injected++) {
            if (injected) CHECK_EQ_INT(te_inject_te_attention(m, NULL), 1);
            runs[injected] = run_once(m, ids_of(te, 2, LM_S), NULL);
            CHECK_EQ_INT(te_tensor_grad(sinks) != NULL, !frozen);
            if (!frozen) results_add(&runs[injected], test_read(te_tensor_grad(sinks)), 4);
            te_tensor_zero_grad(sinks);
        }
        check_stats(te_sdpa_patch_stats(te_injected_sdpa(attn)), 1, 0, 0, 0);
        CHECK_ERROR_BELOW("with injection", runs[1].x, runs[0].x, runs[0].n, 5e-4);
        CHECK_OK(te);
        te_module_destroy(m);
    }
}

/* A program's attention module with a child `sdpa`, in [s, b, H, d] and with a window of its own. */
static te_result core_forward(te_module *self, te_forward_args *args) {
    te_forward_args call = {.input = args->input, .key = args->key, .value = args->value};
    args->outputs.out = te_forward_with(te_module_find(self, "sdpa"), &call);
    return te_error_code(te_module_ctx(self));
}
static const te_module_class core_class = {"Cored", 0, core_forward, NULL, NULL};
TE_TEST_DEVICES(inject_cores_of_other_layouts) {
    te_tensor *q = test_tensor(te, TE_F32, SHAPE(9, 2, 4, 8), test_normal(9 * 2 * 4 * 8, 1)), *kv = test_tensor(te, TE_F32, SHAPE(9, 2, 2, 8), test_normal(9 * 2 * 2 * 8, 2));
    const te_attn_mask masks[] = {TE_MASK_DEFAULT, TE_MASK_NONE, TE_MASK_CAUSAL_BOTTOM_RIGHT, TE_MASK_NONE};
    const te_window windows[] = {{.on = true, .left = 3}, {.on = false}, {.on = true, .left = -1, .right = 5}, {.on = true, .left = 2, .right = -1}};
    for (int i = 0; i < COUNT(masks); i++) {
        te_module *m = te_module_create(te, &core_class, "self_attn");
        te_module_add_child(m, "sdpa", te_sdpa_create(te, &(te_sdpa_desc){.rule.mask = masks[i], .rule.window = windows[i], .rule.softmax_scale = 0.3f}));
        static const char *const names[] = {"q_proj", "k_proj", "v_proj"};
        for (int k = 0; k < 3; k++)
            te_module_add_child(m, names[k], te_linear_create(te, &(te_linear_desc){.in_features = 8, .out_features = k ? 16 : 32, .gemm.device = TE_PARAMS_META}));
        te_module_set_attn_attributes(m, &(te_attn_attributes){.num_heads = 4, .num_key_value_heads = 2, .head_dim = 8});
        test_case("mask %d, window %lld, %lld", (int)masks[i], (long long)windows[i].left, (long long)windows[i].right);
        te_forward_args call = {.input = q, .key = kv, .value = kv};
        te_tensor *want = te_forward_with(m, &call);
        CHECK(te_inject_te_attention_into_module(m, NULL));
        te_tensor *got = te_forward_with(m, &call);
        REQUIRE_OK(te);
        CHECK(te_tensor_ndim(got) == 4);
        CHECK_ERROR_BELOW("out", test_read(got), test_read(want), 9 * 2 * 4 * 8, 5e-4);
        check_stats(te_sdpa_patch_stats(te_injected_sdpa(m)), i < 3, 0, 0, i == 3); /* DotProductAttention has no window with one bound without a causal mask */
        te_module_destroy(m);
    }
}

/* Under a recipe with fp8_dpa attention is in FP8 where it was injected, and only there. */
TE_TEST_DEVICES(inject_makes_attention_fp8) {
    te_causal_lm_desc d = lm_desc(TE_BF16, 1);
    te_recipe recipe = te_recipe_current_scaling();
    recipe.fp8_dpa = true;
    d.num_key_value_heads = 4;
    d.head_dim = 16;
    te_module *m = te_causal_lm_create(te, &d);
    te_module_set_recipe(te_module_find(m, "model.layers.0.mlp"), NULL, true);
    static const char *const names[] = {"q_proj", "k_proj", "v_proj", "o_proj"};
    for (int i = 0; i < 4; i++) te_module_set_recipe(te_module_find(attention_at(m, 0), names[i]), NULL, true);
    te_tensor *y[3];
    for (int i = 0; i < 3; i++) { /* plain, the recipe, injected under the recipe */
        if (i == 2) CHECK_EQ_INT(te_inject_te_attention(m, NULL), 1);
        te_autocast_begin(te, &(te_autocast_desc){.recipe = &recipe, .disabled = i == 0});
        y[i] = te_forward(m, ids_of(te, 2, 16));
        te_autocast_end(te);
    }
    REQUIRE_OK(te);
    CHECK_BYTES("not injected", test_read(y[1]), test_read(y[0]), 2 * 16 * LM_V * sizeof(float));
    CHECK(memcmp(test_read(y[2]), test_read(y[0]), 2 * 16 * LM_V * sizeof(float)) != 0);
    CHECK_ERROR_BELOW("in FP8", test_read(y[2]), test_read(y[0]), 2 * 16 * LM_V, 0.1); /* codes of 3 bits of mantissa */
    check_stats(te_attn_get_stats(te), 1, 0, 0, 0);
    te_module_destroy(m);
}

/* One capture, two launches: those of the injected model give what its calls give. */
TE_TEST_DEVICES(inject_graphs) {
    te_causal_lm_desc d = gemma_desc(TE_F32);
    te_module *m = te_causal_lm_create(te, &d);
    te_tensor *ids = ids_of(te, 2, LM_S), *kept = te_tensor_zeros(te, TE_F32, SHAPE(2, LM_S, LM_V));
    te_inject_te_attention(m, NULL);
    te_no_grad_begin(te);
    te_tensor *want = te_forward(m, ids);
    te_graph_begin(te);
    te_scope_begin(te);
    te_tensor_copy(kept, te_forward(m, ids));
    te_scope_end(te);
    te_graph *graph = te_graph_end(te);
    REQUIRE_OK(te);
    for (int i = 0; i < 2; i++) CHECK_EQ_INT(te_graph_launch(graph), TE_OK);
    CHECK_BYTES("launched", test_read(kept), test_read(want), 2 * LM_S * LM_V * sizeof(float));
    te_no_grad_end(te);
    te_graph_destroy(graph);
    te_graph_begin(te);
    te_restore_attention(m);
    CHECK_EQ_INT(te_inject_te_attention(m, NULL), -1);
    CHECK_ERROR(te, TE_ERR_STATE, "te_module_create");
    te_graph_destroy(te_graph_end(te));
    te_clear_error(te);
    CHECK_EQ_INT(te_inject_te_attention(m, NULL), 3);
    te_module_destroy(m);
    CHECK_OK(te);
}

/* ---- which modules ---- */

static te_result pass_on(te_module *self, te_forward_args *args) {
    args->outputs.out = args->input;
    return te_error_code(te_module_ctx(self));
}
static const te_module_class part_class = {"Part", 0, pass_on, NULL, NULL};
static te_module *part(te_module *parent, const char *name) { return te_module_add_child(parent, name, te_module_create(te_module_ctx(parent), &part_class, name)); }
static te_module *attention_part(te_module *parent, const char *name) {
    static const char *const names[] = {"q_proj", "k_proj", "v_proj"};
    te_module *m = part(parent, name);
    for (int i = 0; i < 3; i++)
        te_module_add_child(m, names[i], te_linear_create(te_module_ctx(parent), &(te_linear_desc){.in_features = 8, .out_features = 16, .gemm.device = TE_PARAMS_META}));
    te_module_set_attn_attributes(m, &(te_attn_attributes){.num_heads = 4, .head_dim = 4});
    return m;
}
static int gone;
static void count_gone(void *value) { gone += value != NULL; }

TE_TEST(inject_finds_modules_by_name) {
    te_ctx *te = test_context("cpu");
    te_module *root = te_module_create(te, &part_class, "self_attn"); /* a root has no name */
    te_module *first = attention_part(part(root, "0"), "self_attn"), *cross = attention_part(part(root, "1"), "cross_self_attn"), *other = attention_part(part(root, "2"), "attention");
    te_module *present = attention_part(part(root, "3"), "self_attn"), *null_valued = attention_part(part(root, "4"), "self_attn");
    te_module *fused = part(part(root, "5"), "self_attn");
    static int theirs;
    int left = -1;
    void *value = NULL;
    gone = 0;
    te_module_set_attribute(present, "attn_module", &theirs, count_gone);
    te_module_set_attribute(null_valued, "attn_module", NULL, NULL);
    CHECK_EQ_INT(te_inject_te_attention(root, &(te_inject_desc){.left_alone = &left}), 3);
    CHECK_EQ_INT(left, 2);
    CHECK_EQ_INT(te_inject_check(present, NULL), TE_INJECT_PRESENT);
    CHECK_EQ_INT(te_inject_check(fused, NULL), TE_INJECT_PROJECTIONS);
    te_module_add_child(other, "sdpa", te_sdpa_create(te, &(te_sdpa_desc){.format = TE_THD}));
    CHECK_EQ_INT(te_inject_check(other, NULL), TE_INJECT_FORMAT);
    CHECK(te_injected_sdpa(first) && te_injected_sdpa(cross) && te_injected_sdpa(null_valued) && !te_injected_sdpa(other) && !te_injected_sdpa(present) && !te_injected_sdpa(fused));
    CHECK(te_module_attribute(present, "attn_module", &value) && value == &theirs);
    CHECK_EQ_INT(te_restore_attention(root), 3);
    CHECK(!te_module_attribute(first, "attn_module", NULL) && te_module_attribute(null_valued, "attn_module", &value) && value == NULL);
    CHECK(te_module_attribute(present, "attn_module", &value) && value == &theirs && gone == 0);
    /* Automodel's rule: an attribute that is NULL is one */
    CHECK_EQ_INT(te_inject_te_attention(root, &(te_inject_desc){.rules_of_automodel = true, .left_alone = &left}), 2);
    CHECK(!te_injected_sdpa(null_valued) && left == 3);
    CHECK_EQ_INT(te_restore_attention(root), 2);
    CHECK_OK(te);
    /* a model without any: a warning, no flag; an error where ranks are to share what is not there */
    te_module *none = te_module_create(te, &part_class, "none");
    const int warned = log_lines("has no self_attn that could be injected");
    CHECK_EQ_INT(te_inject_te_attention(none, NULL), 0);
    CHECK(log_lines("has no self_attn that could be injected") == warned + 1 && !te_uses_te_attention(none) && !te_module_attribute(none, "_te_attention_injected", NULL));
    CHECK_EQ_INT(te_inject_te_attention(none, &(te_inject_desc){.parallel.tp_size = 2}), -1);
    CHECK_ERROR(te, TE_ERR_INVALID, "none has no self_attn that could be injected, and parallel names ranks");
    CHECK_EQ_INT(te_inject_te_attention(NULL, NULL), -1);
    CHECK(!te_inject_te_attention_into_module(NULL, NULL) && te_restore_attention(NULL) == 0 && !te_uses_te_attention(NULL));
    /* heads that three ranks cannot share */
    CHECK_EQ_INT(te_inject_te_attention(root, &(te_inject_desc){.parallel.tp_size = 3}), -1);
    CHECK_ERROR(te, TE_ERR_INVALID, "num_attention_heads");
    CHECK_EQ_INT(te_restore_attention(root), 0);
    te_module_destroy(none);
    te_module_destroy(root);
    CHECK_EQ_INT(gone, 1);
    CHECK_OK(te);
}

/* A te_sdpa_patch that nobody destroyed, and an injected model, go with their context. */
TE_TEST(inject_goes_with_its_context) {
    purse *host = new_purse();
    te_ctx_desc desc = purse_desc(host, NULL);
    desc.log = test__log;
    te_ctx *te = te_ctx_create(&desc);
    te_causal_lm_desc d = lm_desc(TE_F32, 2);
    te_module *m = te_causal_lm_create(te, &d), *dpa = te_create_te_dot_product_attention(te, &(te_attn_params){.num_heads = 1, .num_kv_heads = 1, .head_dim = 4});
    CHECK_EQ_INT(te_inject_te_attention(m, NULL), 2);
    CHECK(te_make_te_sdpa(te, &(te_make_te_sdpa_desc){.attn_module = dpa, .num_heads = 1, .num_kv_heads = 1}) != NULL);
    te_forward(m, ids_of(te, 1, 3));
    CHECK_OK(te);
    te_ctx_destroy(te);
    CHECK(host->blocks == 0 && host->held == 0);
}

/* Every request for memory in turn is refused while a model is injected, run and restored: an error, nothing lost, and the context goes on. */
TE_TEST(inject_memory_runs_out) {
    purse *host = new_purse();
    te_ctx_desc desc = purse_desc(host, NULL);
    te_ctx *te = test_context_with(&desc);
    te_causal_lm_desc d = lm_desc(TE_F32, 2);
    te_module *m = te_causal_lm_create(te, &d);
    te_tensor *ids = ids_of(te, 1, 3);
    bool whole = false;
    REQUIRE_OK(te);
    for (int64_t n = 1; !whole; n += test_every_of(13, 3)) {
        test_case("request %lld", (long long)n);
        host->calls = host->refused = 0;
        host->fail_at = n;
        te_scope_begin(te);
        const int injected = te_inject_te_attention(m, NULL);
        te_tensor *y = te_forward(m, ids);
        host->fail_at = 0;
        whole = host->refused == 0;
        CHECK(te_ok(te) == (injected == 2 && y != NULL));
        if (!te_ok(te)) CHECK_EQ_INT(te_error_code(te), TE_ERR_OUT_OF_MEMORY);
        te_clear_error(te);
        if (injected < 0) CHECK(te_inject_te_attention(m, NULL) + te_restore_attention(m) >= 2); /* the call is repeated, and finishes */
        else CHECK_EQ_INT(te_restore_attention(m), 2);
        te_scope_end(te);
        REQUIRE(n < 10000);
    }
    CHECK_OK(te);
    te_module_destroy(m);
}

/* ---- ranks ---- */

/* A4: rank 0 is inside injected attention while rank 1 calls te_scaled_dot_product_attention; contexts share neither the function in force nor the counters. */
static void swap_or_not(rank_state *s) {
    const int calls = *(const int *)s->arg;
    te_module *dpa = te_create_te_dot_product_attention(s->te, &(te_attn_params){.num_heads = 2, .num_kv_heads = 1, .head_dim = 4});
    te_sdpa_patch *f = te_make_te_sdpa(s->te, &(te_make_te_sdpa_desc){.attn_module = dpa, .num_heads = 2, .num_kv_heads = 1});
    te_tensor *x = te_tensor_full(s->te, TE_F32, SHAPE(1, 2, 3, 4), 1);
    te_no_grad_begin(s->te);
    if (s->rank == 0) te_sdpa_begin(s->te, te_sdpa_patch_call, f);
    for (int i = 0; i < calls; i++) {
        te_scope_begin(s->te);
        EXPECT(s, te_scaled_dot_product_attention(x, x, x, &(te_sdpa_args){.is_causal = i % 2 != 0}) != NULL);
        te_scope_end(s->te);
    }
    EXPECT(s, te_attn_get_stats(s->te).te_hits == (uint64_t)(s->rank == 0 ? calls : 0));
    EXPECT(s, te_sdpa_patch_stats(f).te_hits == (uint64_t)(s->rank == 0 ? calls : 0));
    if (s->rank == 0) te_sdpa_end(s->te);
    te_no_grad_end(s->te);
    te_sdpa_patch_destroy(f);
    te_module_destroy(dpa);
}
TE_TEST(inject_ranks_do_not_meet) {
    const int calls = 10000 / test_every_sanitized(20);
    run_ranks(2, swap_or_not, &calls);
}

/* Two ranks with half of the heads each: as one rank with all. */
static void shared_heads(rank_state *s) {
    te_module *root = te_module_create(s->te, &part_class, "root"), *m = part(root, "self_attn");
    static const char *const names[] = {"q_proj", "k_proj", "v_proj"};
    const int64_t out[] = {8, 4, 4}; /* this rank's: two of four heads of 4, one of two of keys and values */
    for (int i = 0; i < 3; i++) te_module_add_child(m, names[i], te_linear_create(s->te, &(te_linear_desc){.in_features = 8, .out_features = out[i]}));
    te_module_set_attn_attributes(m, &(te_attn_attributes){.num_heads = 4, .num_key_value_heads = 2, .head_dim = 4});
    EXPECT(s, te_inject_te_attention(root, &(te_inject_desc){.parallel.tp_group = s->group}) == 1);
    te_tensor *q = te_tensor_normal(s->te, TE_F32, SHAPE(1, 4, 5, 4), 0, 1), *k = te_tensor_normal(s->te, TE_F32, SHAPE(1, 2, 5, 4), 0, 1);
    te_tensor *want = te_scaled_dot_product_attention(q, k, k, &(te_sdpa_args){.is_causal = true, .enable_gqa = true});
    want = te_tensor_contiguous(te_tensor_narrow(want, 1, 2 * s->rank, 2));
    te_tensor *got = te_sdpa_patch_call(te_injected_sdpa(m), te_tensor_narrow(q, 1, 2 * s->rank, 2), te_tensor_narrow(k, 1, s->rank, 1), te_tensor_narrow(k, 1, s->rank, 1),
                                     &(te_sdpa_args){.is_causal = true, .enable_gqa = true});
    EXPECT(s, te_attn_get_stats(s->te).te_hits == 1);
    got = te_tensor_contiguous(got);
    float a[40] = {0}, b[40] = {1};
    te_tensor_to_host(got, a);
    te_tensor_to_host(want, b);
    EXPECT(s, memcmp(a, b, sizeof a) == 0); /* one kernel, one order of sums */
    te_module_destroy(root);
}
TE_TEST(inject_ranks_share_heads) { run_ranks(2, shared_heads, NULL); }

/* Two ranks with half of the tokens each, chunks 0 and 3 and chunks 1 and 2 of four: as one rank with all. A call that would fall back on one rank fails on both, and none waits. */
static void shared_tokens(rank_state *s) {
    te_module *root = te_module_create(s->te, &part_class, "root"), *m = part(root, "self_attn");
    static const char *const names[] = {"q_proj", "k_proj", "v_proj"};
    for (int i = 0; i < 3; i++) te_module_add_child(m, names[i], te_linear_create(s->te, &(te_linear_desc){.in_features = 8, .out_features = 8}));
    te_module_set_attn_attributes(m, &(te_attn_attributes){.num_heads = 2, .num_key_value_heads = 2, .head_dim = 4});
    EXPECT(s, te_inject_te_attention(root, &(te_inject_desc){.parallel.cp_group = s->group}) == 1);
    te_sdpa_patch *f = te_injected_sdpa(m);
    te_tensor *all = te_tensor_normal(s->te, TE_F32, SHAPE(1, 2, 8, 4), 0, 1), *half[2], *mine, *want, *got;
    te_tensor *masks[2] = {mask_of(s->te, TE_F32, 1, 1, 4, sees_causal, -INFINITY), mask_of(s->te, TE_F32, 1, 1, 8, sees_causal, -INFINITY)}; /* of this rank's tokens, and of all */
    float a[32] = {0}, b[32] = {1};
    half[0] = te_tensor_narrow(all, 2, 2 * s->rank, 2);
    half[1] = te_tensor_narrow(all, 2, 6 - 2 * s->rank, 2);
    mine = te_concat(half, 2, 2);
    want = te_scaled_dot_product_attention(all, all, all, &(te_sdpa_args){.is_causal = true});
    half[0] = te_tensor_narrow(want, 2, 2 * s->rank, 2);
    half[1] = te_tensor_narrow(want, 2, 6 - 2 * s->rank, 2);
    te_tensor_to_host(te_tensor_contiguous(te_concat(half, 2, 2)), b);
    for (int i = 0; i < 3; i++) {
        got = te_sdpa_patch_call(f, mine, mine, mine, &(te_sdpa_args){.is_causal = i == 0, .attn_mask = i ? masks[i - 1] : NULL});
        te_tensor_to_host(te_tensor_contiguous(got), a);
        for (int j = 0; j < 32; j++) EXPECT(s, fabsf(a[j] - b[j]) < 1e-5f);
    }
    EXPECT(s, te_ok(s->te) && te_sdpa_patch_stats(f).te_hits == 3);
    for (int i = 0; i < 4; i++) { /* rank 0 alone has another mask, another scale, other heads, no keys */
        te_sdpa_args odd = {.is_causal = i > 0, .attn_mask = i ? NULL : te_tensor_zeros(s->te, TE_F32, SHAPE(1, 1, 4, 4)), .scale = i == 1 ? 3.0f : 0};
        te_tensor *q = i == 2 ? te_tensor_narrow(mine, 1, 0, 1) : mine;
        got = s->rank ? te_sdpa_patch_call(f, mine, mine, mine, &(te_sdpa_args){.is_causal = true}) : te_sdpa_patch_call(f, q, i == 3 ? NULL : mine, mine, &odd);
        EXPECT(s, got == NULL);
        if (s->rank == 0 && i < 3) EXPECT(s, strstr(te_error(s->te), "of cp_group with 2 ranks; make calls with is_causal"));
        te_clear_error(s->te);
    }
    EXPECT(s, te_sdpa_patch_stats(f).te_hits == 3 && te_sdpa_patch_stats(f).fallback_mask == 0 && te_sdpa_patch_stats(f).fallback_other == 0);
    te_module_destroy(root);
}
TE_TEST(inject_ranks_share_tokens) { run_ranks(2, shared_tokens, NULL); }
