/* test_lora_peft.c: folders as the peft library writes them: adapters of lm_head and embed_tokens with the base's weights beside them, modules_to_save, biases, the base model's name. */
#include "../te_test.h"

#include <sys/stat.h>

enum { PE_V = 24, PE_D = 16, PE_R = 2, PE_N = 8 };

static te_module *pe_create(te_ctx *te, te_dtype dtype, bool tied) {
    te_seed(te, 5);
    return te_causal_lm_create(te, &(te_causal_lm_desc){.vocab_size = PE_V, .hidden_size = PE_D, .intermediate_size = 24, .num_hidden_layers = 2, .num_attention_heads = 2, .qkv_bias = true,
                                                        .tie_word_embeddings = tied, .params_dtype = dtype, .init.std = 0.3f});
}
static te_tensor *pe_parameter(te_module *m, const char *path, const char *name) { return te_module_parameter(te_module_find(m, path), name); }
static const float *pe_logits(te_module *m) {
    int32_t ids[PE_N];
    for (int i = 0; i < PE_N; i++) ids[i] = i * 7 % PE_V;
    return test_copy(test_read(te_forward(m, te_tensor_from_host(te_module_ctx(m), TE_I32, SHAPE(1, PE_N), ids))), PE_N * PE_V);
}
static const char *pe_path(const char *folder, const char *name) {
    char *path = (char *)test_alloc(700);
    snprintf(path, 700, "%s/%s", test_path(folder), name);
    return path;
}
static void pe_spit(const char *path, const char *text) {
    FILE *f = fopen(path, "wb");
    REQUIRE(f);
    CHECK(fwrite(text, 1, strlen(text), f) == strlen(text));
    fclose(f);
}
static const char *pe_text(const char *folder) { return (const char *)test_read_file(pe_path(folder, "adapter_config.json"), NULL); }

/* ---- lm_head and embed_tokens ---- */

#define PE_HEAD "base_model.model.lm_head."
#define PE_TABLE "base_model.model.model.embed_tokens."
static const char pe_config[] = "{\"peft_type\": \"LORA\", \"r\": 2, \"lora_alpha\": 6, \"target_modules\": [\"lm_head\", \"embed_tokens\"], \"bias\": \"none\", \"modules_to_save\": null}";

/* Writes both adapters' tensors as peft does, with the base's weights. */
typedef enum pe_kind { PE_BOTH, PE_WRONG_HEAD, PE_WRONG_TABLE, PE_HEAD_ALONE, PE_TABLE_ALONE } pe_kind; /* WRONG: one number differs; ALONE: the other has no adapters */
static void pe_write(te_ctx *te, const float *head, const float *table, const float *const adapters[4], pe_kind kind) {
    float *h = test_copy(head, PE_V * PE_D), *t = test_copy(table, PE_V * PE_D);
    te_safetensors_item items[6];
    int n = 0;
    if (kind == PE_WRONG_HEAD) h[5 * PE_D + 1] += 1;
    if (kind == PE_WRONG_TABLE) t[PE_V * PE_D - 1] += 1;
    items[n++] = (te_safetensors_item){kind == PE_TABLE_ALONE ? PE_HEAD "weight" : PE_HEAD "base_layer.weight", te_tensor_from_f32(te, TE_F32, SHAPE(PE_V, PE_D), h)};
    items[n++] = (te_safetensors_item){kind == PE_HEAD_ALONE ? PE_TABLE "weight" : PE_TABLE "base_layer.weight", te_tensor_from_f32(te, TE_F32, SHAPE(PE_V, PE_D), t)};
    if (kind != PE_TABLE_ALONE) {
        items[n++] = (te_safetensors_item){PE_HEAD "lora_A.weight", te_tensor_from_f32(te, TE_F32, SHAPE(PE_R, PE_D), adapters[0])};
        items[n++] = (te_safetensors_item){PE_HEAD "lora_B.weight", te_tensor_from_f32(te, TE_F32, SHAPE(PE_V, PE_R), adapters[1])};
    }
    if (kind != PE_HEAD_ALONE) {
        items[n++] = (te_safetensors_item){PE_TABLE "lora_embedding_A", te_tensor_from_f32(te, TE_F32, SHAPE(PE_R, PE_V), adapters[2])};
        items[n++] = (te_safetensors_item){PE_TABLE "lora_embedding_B", te_tensor_from_f32(te, TE_F32, SHAPE(PE_D, PE_R), adapters[3])};
    }
    te_safetensors_write(te, pe_path("peft", "adapter_model.safetensors"), items, n, NULL, 0);
    pe_spit(pe_path("peft", "adapter_config.json"), pe_config);
}
TE_TEST(lora_peft_head_and_table) {
    te_ctx *te = test_context("cpu");
    te_module *m = pe_create(te, TE_F32, false), *want = pe_create(te, TE_F32, false), *low = pe_create(te, TE_BF16, false), *tied = pe_create(te, TE_F32, true);
    const float *head = test_copy(test_read(pe_parameter(m, "lm_head", "weight")), PE_V * PE_D), *table = test_copy(test_read(pe_parameter(m, "model.embed_tokens", "weight")), PE_V * PE_D);
    const float *const adapters[4] = {test_normal(PE_R * PE_D, 1), test_normal(PE_V * PE_R, 2), test_normal(PE_R * PE_V, 3), test_normal(PE_D * PE_R, 4)};
    float *sums[2] = {test_copy(head, PE_V * PE_D), test_copy(table, PE_V * PE_D)};
    mkdir(test_path("peft"), 0700);
    for (int v = 0; v < PE_V; v++)
        for (int d = 0; d < PE_D; d++)
            for (int r = 0; r < PE_R; r++) {
                sums[0][v * PE_D + d] += 6.0f / PE_R * adapters[1][v * PE_R + r] * adapters[0][r * PE_D + d];
                sums[1][v * PE_D + d] += 6.0f / PE_R * adapters[3][d * PE_R + r] * adapters[2][r * PE_V + v];
            }
    te_tensor_copy(pe_parameter(want, "lm_head", "weight"), te_tensor_from_f32(te, TE_F32, SHAPE(PE_V, PE_D), sums[0]));
    te_tensor_copy(pe_parameter(want, "model.embed_tokens", "weight"), te_tensor_from_f32(te, TE_F32, SHAPE(PE_V, PE_D), sums[1]));
    /* of another base: refused, and nothing has changed */
    const float *before = pe_logits(m), *merged = pe_logits(want);
    for (int table_too = 0; table_too < 2; table_too++) {
        pe_write(te, head, table, adapters, table_too ? PE_WRONG_TABLE : PE_WRONG_HEAD);
        CHECK_EQ_INT(te_lora_load(m, test_path("peft")), TE_ERR_FORMAT);
        CHECK_ERROR(te, TE_ERR_FORMAT, table_too ? PE_TABLE "base_layer.weight\" differs from the model's in or behind row" : PE_HEAD "base_layer.weight\" differs from the model's in or behind row");
        CHECK_BYTES("as it was", pe_logits(m), before, PE_N * PE_V * sizeof(float));
    }
    /* the base's: compared, and passed over */
    pe_write(te, head, table, adapters, PE_BOTH);
    CHECK_EQ_INT(te_lora_load(m, test_path("peft")), TE_OK);
    CHECK_ERROR_BELOW("with adapters", pe_logits(m), merged, PE_N * PE_V, 2e-6); /* f32 sums in another order */
    CHECK(!te_tensor_requires_grad(pe_parameter(m, "lm_head", "weight")) && te_tensor_requires_grad(pe_parameter(m, "model.embed_tokens.lora_A", "weight")));
    CHECK_EQ_INT(te_lora_merge(m), TE_OK);
    CHECK_TENSOR(pe_parameter(m, "lm_head", "weight"), sums[0], 1e-5, 1e-6);
    CHECK_TENSOR(pe_parameter(m, "model.embed_tokens", "weight"), sums[1], 1e-5, 1e-6);
    /* a model in bf16 has the file's numbers, rounded; the table may be there without adapters of its own, as peft writes both where it has some for one */
    CHECK_EQ_INT(te_lora_load(low, test_path("peft")), TE_OK);
    CHECK_EQ_INT(te_lora_remove(low), TE_OK);
    pe_write(te, head, table, adapters, PE_HEAD_ALONE);
    CHECK_EQ_INT(te_lora_load(low, test_path("peft")), TE_OK);
    CHECK(te_module_find(low, "lm_head.lora_A") && !te_module_find(low, "model.embed_tokens.lora_A"));
    CHECK_OK(te);
    /* a tied model has no product that they could be of */
    const float *one = test_copy(test_read(pe_parameter(tied, "model.embed_tokens", "weight")), PE_V * PE_D);
    pe_write(te, one, one, adapters, PE_BOTH);
    CHECK_EQ_INT(te_lora_load(tied, test_path("peft")), TE_ERR_UNSUPPORTED);
    CHECK_ERROR(te, TE_ERR_UNSUPPORTED, "is an adapter of lm_head, which this model has none of");
    /* but its table has adapters, beside which the product is what it was */
    te_module *apart = pe_create(te, TE_F32, false);
    float *sum = test_copy(one, PE_V * PE_D);
    for (int i = 0; i < PE_V * PE_D; i++) sum[i] += sums[1][i] - table[i];
    te_tensor_copy(pe_parameter(apart, "lm_head", "weight"), te_tensor_from_f32(te, TE_F32, SHAPE(PE_V, PE_D), one));
    te_tensor_copy(pe_parameter(apart, "model.embed_tokens", "weight"), te_tensor_from_f32(te, TE_F32, SHAPE(PE_V, PE_D), sum));
    pe_write(te, one, one, adapters, PE_TABLE_ALONE);
    CHECK_EQ_INT(te_lora_load(tied, test_path("peft")), TE_OK);
    CHECK_ERROR_BELOW("tied", pe_logits(tied), pe_logits(apart), PE_N * PE_V, 2e-6); /* f32 sums in another order */
    CHECK_OK(te);
    CHECK_EQ_INT(te_lora_merge(tied), TE_ERR_UNSUPPORTED);
    CHECK_ERROR(te, TE_ERR_UNSUPPORTED, "is that of lm_head, too (tie_word_embeddings)");
    te_module_destroy(apart);
    te_module_destroy(m), te_module_destroy(want), te_module_destroy(low), te_module_destroy(tied);
}

/* ---- parameters that are trained beside adapters ---- */

static bool pe_move_one(void *user, te_module *m, const char *path, te_tensor *x, te_entry_kind kind) {
    const uint64_t seed = *(const uint64_t *)user + strlen(path);
    (void)m;
    if (kind == TE_ENTRY_PARAMETER && te_tensor_requires_grad(x))
        te_tensor_copy(x, test_tensor(te_tensor_ctx(x), TE_F32, te_tensor_ndim(x), te_tensor_shape(x), test_normal(te_tensor_numel(x), seed)));
    return true;
}
/* Other values for all that is trained. */
static void pe_move(te_module *m, uint64_t seed) { te_module_visit_tensors(m, pe_move_one, &seed); }
static bool pe_in_file(te_ctx *te, const char *name) {
    te_safetensors *f = te_safetensors_open(te, pe_path("new", "adapter_model.safetensors"));
    const bool there = te_safetensors_find(f, name) != NULL;
    te_safetensors_close(f);
    return there;
}
TE_TEST(lora_peft_trains_beside) {
    static const char *const q = "q_proj", *const save = "lm_head", *const names[] = {"none", "all", "lora_only"};
    te_ctx *te = test_context("cpu");
    for (int way = 0; way < 6; way++) {
        const te_lora_bias bias = (te_lora_bias)(way % 3);
        const bool saves = way >= 3;
        char line[64];
        test_case("bias %s, modules_to_save %d", names[bias], saves);
        te_module *m = pe_create(te, TE_F32, false), *other = pe_create(te, TE_F32, false), *third = pe_create(te, TE_F32, false);
        te_tensor *head = pe_parameter(m, "lm_head", "weight"), *q_bias = pe_parameter(m, "model.layers.1.self_attn.q_proj", "bias");
        pe_move(m, 100), pe_move(other, 100), pe_move(third, 100); /* biases that are not zero */
        const float *before = pe_logits(m);
        const te_lora_desc d = {.target_modules = &q, .num_target_modules = 1, .dim = PE_R, .bias = bias, .modules_to_save = saves ? &save : NULL, .num_modules_to_save = saves};
        CHECK_EQ_INT(te_lora_apply(m, &d, NULL), TE_OK);
        CHECK_BYTES("begins as it was", pe_logits(m), before, PE_N * PE_V * sizeof(float));
        for (int loaded = 0; loaded < 2; loaded++) { /* as applied, and as read from the file */
            te_module *x = loaded ? other : m;
            if (loaded) {
                pe_move(m, 200);
                CHECK_EQ_INT(te_lora_save(m, test_path("new")), TE_OK);
                CHECK_EQ_INT(te_lora_load(other, test_path("new")), TE_OK);
            }
            CHECK(te_tensor_requires_grad(pe_parameter(x, "lm_head", "weight")) == saves);
            CHECK(te_tensor_requires_grad(pe_parameter(x, "model.layers.1.self_attn.q_proj", "bias")) == (bias != TE_LORA_BIAS_NONE));
            CHECK(te_tensor_requires_grad(pe_parameter(x, "model.layers.1.self_attn.k_proj", "bias")) == (bias == TE_LORA_BIAS_ALL));
            CHECK(!te_tensor_requires_grad(pe_parameter(x, "model.layers.1.self_attn.q_proj", "weight")) && !te_tensor_requires_grad(pe_parameter(x, "model.norm", "weight")));
        }
        CHECK_OK(te);
        /* copies are trained, the model's own tensors wait */
        CHECK((pe_parameter(m, "lm_head", "weight") != head) == saves && (pe_parameter(m, "model.layers.1.self_attn.q_proj", "bias") != q_bias) == (bias != TE_LORA_BIAS_NONE));
        const float *want = pe_logits(m);
        CHECK(memcmp(want, before, PE_N * PE_V * sizeof(float)) != 0);
        CHECK_BYTES("loaded", pe_logits(other), want, PE_N * PE_V * sizeof(float));
        /* peft's names */
        snprintf(line, sizeof line, "\"bias\": \"%s\"", names[bias]);
        CHECK_STR(pe_text("new"), line);
        CHECK_STR(pe_text("new"), saves ? "\"modules_to_save\": [\"lm_head\"]" : "\"modules_to_save\": null");
        CHECK(pe_in_file(te, "base_model.model.lm_head.weight") == saves);
        CHECK(pe_in_file(te, "base_model.model.model.layers.0.self_attn.q_proj.base_layer.bias") == (bias != TE_LORA_BIAS_NONE));
        CHECK(pe_in_file(te, "base_model.model.model.layers.0.self_attn.k_proj.bias") == (bias == TE_LORA_BIAS_ALL));
        /* kept by merging, dropped by removing */
        CHECK_EQ_INT(te_lora_merge(other), TE_OK);
        CHECK_ERROR_BELOW("merged", pe_logits(other), want, PE_N * PE_V, 2e-6); /* f32 sums in another order */
        CHECK(!te_tensor_requires_grad(pe_parameter(other, "lm_head", "weight")));
        CHECK_EQ_INT(te_lora_remove(m), TE_OK);
        CHECK(pe_parameter(m, "lm_head", "weight") == head && !te_tensor_requires_grad(head) && pe_parameter(m, "model.layers.1.self_attn.q_proj", "bias") == q_bias);
        CHECK_BYTES("removed", pe_logits(m), before, PE_N * PE_V * sizeof(float));
        /* a parameter of the file that the config does not have trained has to be the model's */
        if (bias == TE_LORA_BIAS_ALL || saves) {
            pe_spit(pe_path("new", "adapter_config.json"), "{\"peft_type\": \"LORA\", \"r\": 2, \"lora_alpha\": 32}");
            CHECK_EQ_INT(te_lora_load(third, test_path("new")), TE_ERR_FORMAT);
            CHECK_ERROR(te, TE_ERR_FORMAT, "and modules_to_save and bias do not name it");
            CHECK_BYTES("as it was", pe_logits(third), before, PE_N * PE_V * sizeof(float));
        }
        CHECK_OK(te);
        te_module_destroy(m), te_module_destroy(other), te_module_destroy(third);
    }
}
/* A model that is cast between applying and removing is of one format again. */
TE_TEST(lora_peft_casts_what_comes_back) {
    static const char *const q = "q_proj", *const save = "lm_head";
    te_ctx *te = test_context("cpu");
    te_module *m = pe_create(te, TE_F32, false), *want = pe_create(te, TE_F32, false);
    const te_lora_desc d = {.target_modules = &q, .num_target_modules = 1, .modules_to_save = &save, .num_modules_to_save = 1, .bias = TE_LORA_BIAS_ALL};
    const te_cast_model_desc to = {.dtype = TE_BF16};
    CHECK(te_lora_apply(m, &d, NULL) == TE_OK && te_cast_model_to_dtype(m, &to) == TE_OK && te_cast_model_to_dtype(want, &to) == TE_OK);
    pe_move(m, 100);
    CHECK_EQ_INT(te_lora_remove(m), TE_OK);
    CHECK(te_tensor_dtype(pe_parameter(m, "lm_head", "weight")) == TE_BF16 && !te_tensor_requires_grad(pe_parameter(m, "lm_head", "weight")));
    CHECK_BYTES("removed", pe_logits(m), pe_logits(want), PE_N * PE_V * sizeof(float));
    CHECK_OK(te);
    te_module_destroy(m), te_module_destroy(want);
}
/* The table of a tied model is its head as well: peft trains and saves both as one (ensure_weight_tying). */
TE_TEST(lora_peft_trains_a_tied_table) {
    static const char *const q = "q_proj", *const save = "embed_tokens";
    te_ctx *te = test_context("cpu");
    te_module *m = pe_create(te, TE_F32, true), *other = pe_create(te, TE_F32, true);
    CHECK_EQ_INT(te_lora_apply(m, &(te_lora_desc){.target_modules = &q, .num_target_modules = 1, .dim = PE_R, .modules_to_save = &save, .num_modules_to_save = 1}, NULL), TE_OK);
    pe_move(m, 200);
    CHECK_EQ_INT(te_lora_save(m, test_path("new")), TE_OK);
    CHECK_STR(pe_text("new"), "\"ensure_weight_tying\": true");
    CHECK(pe_in_file(te, "base_model.model.lm_head.weight") && pe_in_file(te, PE_TABLE "weight"));
    CHECK_EQ_INT(te_lora_load(other, test_path("new")), TE_OK);
    CHECK_BYTES("loaded", pe_logits(other), pe_logits(m), PE_N * PE_V * sizeof(float));
    CHECK_OK(te);
    te_module_destroy(m), te_module_destroy(other);
}

/* ---- the base model's name ---- */

static bool pe_list(void *user, te_module *m, const char *path, te_tensor *x, te_entry_kind kind) {
    te_safetensors_item **at = (te_safetensors_item **)user;
    char *name = (char *)test_alloc(128);
    (void)m, (void)kind;
    snprintf(name, 128, "%s", path);
    *(*at)++ = (te_safetensors_item){name, x};
    return true;
}
/* AutoPeftModel opens the model of that name: the folder of te_hf_open, or what the program or a file says. */
TE_TEST(lora_peft_base_model_name) {
    static const char *const q = "q_proj";
    te_ctx *te = test_context("cpu");
    te_safetensors_item items[64], *end = items;
    char line[800];
    te_lora_desc d = {.target_modules = &q, .num_target_modules = 1};
    te_module *m = pe_create(te, TE_F32, false), *other = pe_create(te, TE_F32, false);
    te_module_visit_tensors(m, pe_list, &end);
    mkdir(test_path("base"), 0700);
    te_safetensors_write(te, pe_path("base", "model.safetensors"), items, (int)(end - items), NULL, 0);
    pe_spit(pe_path("base", "config.json"), "{\"model_type\": \"qwen2\", \"vocab_size\": 24, \"hidden_size\": 16, \"intermediate_size\": 24, \"num_hidden_layers\": 2, \"num_attention_heads\": 2, "
                                            "\"num_key_value_heads\": 2, \"rms_norm_eps\": 1e-05, \"hidden_act\": \"silu\", \"tie_word_embeddings\": false}");
    te_module *opened = te_hf_open(te, test_path("base"), NULL);
    REQUIRE_OK(te);
    CHECK(te_lora_apply(opened, &d, NULL) == TE_OK && te_lora_save(opened, test_path("new")) == TE_OK);
    snprintf(line, sizeof line, "\"base_model_name_or_path\": \"%s\"", test_path("base"));
    CHECK_STR(pe_text("new"), line);
    /* a model that no folder was opened for: of the file, else null, else the program's word, with whatever JSON has to escape */
    CHECK(te_lora_load(other, test_path("new")) == TE_OK && te_lora_save(other, test_path("again")) == TE_OK);
    CHECK_STR(pe_text("again"), line);
    CHECK(te_lora_remove(other) == TE_OK && te_lora_apply(other, &d, NULL) == TE_OK && te_lora_save(other, test_path("again")) == TE_OK);
    CHECK_STR(pe_text("again"), "\"base_model_name_or_path\": null");
    d.base_model_name_or_path = "some\"where/\\Llama";
    CHECK(te_lora_apply(m, &d, NULL) == TE_OK && te_lora_save(m, test_path("again")) == TE_OK);
    CHECK_STR(pe_text("again"), "\"base_model_name_or_path\": \"some\\\"where/\\\\Llama\"");
    CHECK_OK(te);
    te_module_destroy(m), te_module_destroy(other), te_module_destroy(opened);
}
