/* test_families.c: families whose files are not cut as the model is: fused and stacked tensors, texts within larger models. Each opens as the same weights do in the layout of a family that
 * test_hf.c knows, and is written as it was. tools/models compares with transformers itself. */
#define _POSIX_C_SOURCE 200809L
#include "../faults/purse.h"
#include "folder.h"

#include <unistd.h>

enum { V = 11, D = 8, F = 12, E = 3, FE = 5, LAYERS = 2, HEADS = 4, GROUPS = 2, HEAD = 2, S = 6 };

static const char sizes[] = "\"vocab_size\": 11, \"hidden_size\": 8, \"intermediate_size\": 12, \"num_hidden_layers\": 2, \"num_attention_heads\": 4, \"num_key_value_heads\": 2, \"head_dim\": 2";
static void write_config(const char *folder, const char *keys) {
    char *text = (char *)test_alloc(4096);
    snprintf(text, 4096, "{%s}", keys);
    spit_text(in_folder(folder, "config.json"), text);
}
static void write_config_of(const char *folder, const char *type, const char *more) {
    char *keys = (char *)test_alloc(2048);
    snprintf(keys, 2048, "\"model_type\": \"%s\", %s%s", type, sizes, more);
    write_config(folder, keys);
}

/* ---- files ---- */

/* The tensors of a file that is being made. */
typedef struct listed {
    te_ctx *te;
    te_safetensors_item items[96];
    char names[96][96];
    int n;
} listed;
static void add(listed *l, const char *name, te_tensor *x) {
    REQUIRE(l->n < COUNT(l->items) && x);
    snprintf(l->names[l->n], sizeof l->names[0], "%s", name);
    l->items[l->n] = (te_safetensors_item){l->names[l->n], x};
    l->n++;
}
static void add_of(listed *l, int layer, const char *name, te_tensor *x) {
    char path[96];
    snprintf(path, sizeof path, "model.layers.%d.%s", layer, name);
    add(l, path, x);
}
/* A matrix, or with cols 0 a vector around 1, of values of its own. */
static te_tensor *drawn(listed *l, int rows, int cols, uint64_t seed) {
    const int n = rows * (cols ? cols : 1);
    float *x = test_normal(n, seed);
    for (int i = 0; i < n; i++) x[i] = cols ? 0.4f * x[i] : 1 + 0.2f * x[i];
    const int64_t shape[2] = {rows, cols};
    return te_tensor_from_f32(l->te, TE_F32, cols ? 2 : 1, shape, x);
}
static te_tensor *joined(te_tensor *a, te_tensor *b) { return te_concat((te_tensor *[]){a, b}, 2, 0); }

static void add_around(listed *l, const char *prefix) {
    char path[96];
    snprintf(path, sizeof path, "%sembed_tokens.weight", prefix);
    add(l, path, drawn(l, V, D, 1));
    snprintf(path, sizeof path, "%snorm.weight", prefix);
    add(l, path, drawn(l, D, 0, 2));
}
/* Norms, attention (in one tensor, if `fused`) and, if there is any, an MLP of a Llama's kind. */
static void add_layers(listed *l, bool fused, bool norms, int first_mlp) {
    for (int i = 0; i < LAYERS; i++) {
        const uint64_t seed = 100 * (uint64_t)(i + 1);
        te_tensor *q = drawn(l, HEADS * HEAD, D, seed), *k = drawn(l, GROUPS * HEAD, D, seed + 1), *v = drawn(l, GROUPS * HEAD, D, seed + 2);
        te_tensor *gate = drawn(l, F, D, seed + 3), *up = drawn(l, F, D, seed + 4);
        add_of(l, i, "input_layernorm.weight", drawn(l, D, 0, seed + 5));
        add_of(l, i, "post_attention_layernorm.weight", drawn(l, D, 0, seed + 6));
        add_of(l, i, "self_attn.o_proj.weight", drawn(l, D, HEADS * HEAD, seed + 7));
        if (fused) add_of(l, i, "self_attn.qkv_proj.weight", joined(joined(q, k), v));
        else {
            add_of(l, i, "self_attn.q_proj.weight", q);
            add_of(l, i, "self_attn.k_proj.weight", k);
            add_of(l, i, "self_attn.v_proj.weight", v);
        }
        if (norms) {
            add_of(l, i, "self_attn.q_norm.weight", drawn(l, HEAD, 0, seed + 8));
            add_of(l, i, "self_attn.k_norm.weight", drawn(l, HEAD, 0, seed + 9));
        }
        if (i < first_mlp) continue;
        add_of(l, i, "mlp.down_proj.weight", drawn(l, D, F, seed + 10));
        if (fused) add_of(l, i, "mlp.gate_up_proj.weight", joined(gate, up));
        else {
            add_of(l, i, "mlp.gate_proj.weight", gate);
            add_of(l, i, "mlp.up_proj.weight", up);
        }
    }
}
static te_tensor *expert(listed *l, int layer, int i, int part) {
    return drawn(l, part == 2 ? D : FE, part == 2 ? FE : D, 1000 * (uint64_t)(layer + 1) + 10 * (uint64_t)i + (uint64_t)part);
}
/* names: of gate, up and down; NULL: all experts in two tensors. */
static void add_experts(listed *l, int layer, const char *block, const char *const *names) {
    char name[64];
    te_tensor *up = NULL, *down = NULL;
    snprintf(name, sizeof name, "%s.gate.weight", block);
    add_of(l, layer, name, drawn(l, E, D, 30 + (uint64_t)layer));
    for (int e = 0; e < E; e++) {
        te_tensor *parts[3] = {expert(l, layer, e, 0), expert(l, layer, e, 1), expert(l, layer, e, 2)};
        for (int p = 0; p < 3 && names; p++) {
            snprintf(name, sizeof name, "%s.experts.%d.%s.weight", block, e, names[p]);
            add_of(l, layer, name, parts[p]);
        }
        te_tensor *both = te_tensor_view(joined(parts[0], parts[1]), SHAPE(1, 2 * FE, D)), *last = te_tensor_view(parts[2], SHAPE(1, D, FE));
        up = up ? joined(up, both) : both;
        down = down ? joined(down, last) : last;
    }
    if (names) return;
    snprintf(name, sizeof name, "%s.experts.gate_up_proj", block);
    add_of(l, layer, name, up);
    snprintf(name, sizeof name, "%s.experts.down_proj", block);
    add_of(l, layer, name, down);
}
static void write_weights(listed *l, const char *folder) {
    te_safetensors_write(l->te, in_folder(folder, "model.safetensors"), l->items, l->n, NULL, 0);
    REQUIRE_OK(l->te);
}
static listed *new_list(te_ctx *te) {
    listed *l = (listed *)test_alloc(sizeof(listed));
    l->te = te;
    l->n = 0;
    return l;
}

static const int32_t ids[S] = {3, 1, 10, 0, 7, 2};
static const float *logits_of(te_module *m) {
    te_tensor *y = te_forward(m, te_tensor_from_host(te_module_ctx(m), TE_I32, SHAPE(1, S), ids));
    CHECK_OK(te_module_ctx(m));
    return test_copy(test_read(y), S * V);
}
static te_module *opened(te_ctx *te, const char *folder) {
    te_module *m = te_hf_open(te, test_path(folder), NULL);
    CHECK_OK(te);
    return m;
}
/* Both files have the same tensors, to the byte. */
static void check_files(const char *a, const char *b) {
    size_t n[2];
    uint8_t *bytes[2] = {test_read_file(in_folder(a, "model.safetensors"), &n[0]), test_read_file(in_folder(b, "model.safetensors"), &n[1])};
    REQUIRE(bytes[0] && bytes[1] && n[0] > 8 && n[1] > 8);
    /* te_hf_save adds the metadata's one entry to the header; the data is in one order. */
    size_t data[2];
    for (int i = 0; i < 2; i++) {
        uint64_t header = 0;
        for (int k = 7; k >= 0; k--) header = header << 8 | bytes[i][k];
        data[i] = n[i] - 8 - (size_t)header;
    }
    CHECK_EQ_INT(data[0], data[1]);
    CHECK_BYTES("data", bytes[1] + n[1] - data[1], bytes[0] + n[0] - data[0], data[0]);
}

/* ---- Phi-3 ---- */

static void make_phi3(te_ctx *te, const char *folder) {
    listed *l = new_list(te);
    te_scope_begin(te);
    REQUIRE(mkdir(test_path(folder), 0700) == 0);
    add_around(l, "model.");
    add(l, "lm_head.weight", drawn(l, V, D, 3));
    add_layers(l, true, false, 0);
    write_weights(l, folder);
    write_config_of(folder, "phi3", ", \"rope_theta\": 500.0");
    te_scope_end(te);
}
TE_TEST_DEVICES(family_phi3_is_split) {
    te_ctx *cpu = test_cpu_beside(te), *at = cpu ? cpu : te;
    listed *l = new_list(at);
    make_phi3(at, "phi3");
    te_scope_begin(at);
    REQUIRE(mkdir(test_path("llama"), 0700) == 0);
    add_around(l, "model.");
    add(l, "lm_head.weight", drawn(l, V, D, 3));
    add_layers(l, false, false, 0);
    write_weights(l, "llama");
    write_config_of("llama", "llama", ", \"rope_theta\": 500.0, \"rms_norm_eps\": 1e-5");
    te_scope_end(at);
    te_module *phi3 = opened(te, "phi3"), *llama = opened(te, "llama");
    CHECK_BYTES("logits", logits_of(phi3), logits_of(llama), S * V * 4);
    CHECK_EQ_INT(te_hf_save(phi3, test_path("written")), TE_OK);
    check_files("phi3", "written");
    te_module_destroy(phi3);
    te_module_destroy(llama);
    /* In another format, and stored quantized: split just so, and joined again. */
    te_recipe recipe = te_recipe_block_scaling();
    te_quantized_model_init_begin(te, &(te_quantized_model_init_desc){.recipe = &recipe});
    phi3 = te_hf_open(te, test_path("phi3"), &(te_hf_desc){.params_dtype = TE_BF16});
    te_quantized_model_init_end(te);
    REQUIRE_OK(te);
    CHECK(te_tensor_is_quantized(te_module_parameter(te_module_find(phi3, "model.layers.1.self_attn.v_proj"), "weight")));
    CHECK_EQ_INT(te_hf_save(phi3, test_path("decoded")), TE_OK);
    te_safetensors *f = te_safetensors_open(te, in_folder("decoded", "model.safetensors")), *g = te_safetensors_open(te, in_folder("phi3", "model.safetensors"));
    const char *const name = "model.layers.1.self_attn.qkv_proj.weight";
    /* e4m3 has 4 bits */
    CHECK_ERROR_BELOW("decoded", test_read(te_safetensors_read(f, name)), test_read(te_safetensors_read(g, name)), (HEADS + 2 * GROUPS) * HEAD * D, 4e-2);
    te_safetensors_close(f);
    te_safetensors_close(g);
    te_module_destroy(phi3);
}
/* Part of a head rotates: the other channels are those of an unrotated model. */
TE_TEST(family_partial_rotary) {
    te_ctx *te = test_context("cpu");
    te_causal_lm_desc d = {.vocab_size = V, .hidden_size = D, .intermediate_size = F, .num_hidden_layers = 1, .num_attention_heads = 2, .params_dtype = TE_F32, .rotary.rotary_dim = 2};
    const float lists[2] = {2.5f, 4}, *longrope, *linear;
    d.rotary.scaling = (te_rope_scaling){.type = TE_ROPE_LONGROPE, .factor = 1, .original_max_position_embeddings = 4, .short_factor = lists, .long_factor = lists + 1};
    te_seed(te, 3);
    te_module *m = te_causal_lm_create(te, &d);
    longrope = logits_of(m); /* six ids: the long list */
    te_module_destroy(m);
    d.rotary.scaling = (te_rope_scaling){.type = TE_ROPE_LINEAR, .factor = 4};
    te_seed(te, 3);
    m = te_causal_lm_create(te, &d);
    linear = logits_of(m);
    CHECK_BYTES("one pair of channels", longrope, linear, S * V * 4);
    te_module_destroy(m);
    d.rotary.rotary_dim = 0;
    te_seed(te, 3);
    m = te_causal_lm_create(te, &d);
    CHECK(memcmp(logits_of(m), linear, S * V * 4) != 0);
    te_module_destroy(m);
    for (int dim = -2; dim <= 6; dim += dim == -2 ? 5 : 3) { /* -2, 3, 6 of 4 channels */
        d.rotary.rotary_dim = dim;
        CHECK(te_causal_lm_create(te, &d) == NULL);
        CHECK_ERROR(te, TE_ERR_INVALID, "of 4 channels of a head; an even number");
    }
}

/* A cache that would go beyond the original context is refused: its keys have turned in another way. */
TE_TEST(family_longrope_cache) {
    te_ctx *te = test_context("cpu");
    const float lists[4] = {1, 1.5f, 2, 4};
    te_causal_lm_desc d = {.vocab_size = V, .hidden_size = D, .intermediate_size = F, .num_hidden_layers = 1, .num_attention_heads = 2, .params_dtype = TE_F32};
    d.rotary.scaling = (te_rope_scaling){.type = TE_ROPE_LONGROPE, .factor = 2, .original_max_position_embeddings = 4, .short_factor = lists, .long_factor = lists + 2};
    te_module *m = te_causal_lm_create(te, &d);
    te_kv_cache *c = te_kv_cache_create(m, 1, S);
    REQUIRE_OK(te);
    CHECK_EQ_INT(((const te_causal_lm_desc *)te_module_state(m))->rotary.scaling.original_max_position_embeddings, 4);
    te_no_grad_begin(te);
    const float *want = logits_of(m);
    te_forward_args in = {.input = te_tensor_from_host(te, TE_I32, SHAPE(1, 4), ids), .kv_cache = c}; /* to its end */
    CHECK(te_forward_with(m, &in) != NULL);
    in.input = te_tensor_from_host(te, TE_I32, SHAPE(1, 1), ids + 4);
    CHECK(te_forward_with(m, &in) == NULL);
    CHECK_ERROR(te, TE_ERR_STATE, "kv_cache has 4 positions, 1 follow");
    te_kv_cache_truncate(c, 0);
    in.input = te_tensor_from_host(te, TE_I32, SHAPE(1, 5), ids);
    CHECK(te_forward_with(m, &in) != NULL);
    in.input = te_tensor_from_host(te, TE_I32, SHAPE(1, 1), ids + 5);
    CHECK_ERROR_BELOW("the last of six", test_read(te_forward_with(m, &in)), want + (S - 1) * V, V, 1e-6); /* f32 sums of 12 numbers */
    te_no_grad_end(te);
    CHECK_OK(te);
    te_kv_cache_destroy(c);
    te_module_destroy(m);
}

/* ---- experts ---- */

static const char *const mixtral_names[] = {"w1", "w3", "w2"}, *const qwen_names[] = {"gate_proj", "up_proj", "down_proj"};
static const char qwen_keys[] = ", \"num_experts\": 3, \"num_experts_per_tok\": 2, \"moe_intermediate_size\": 5, \"norm_topk_prob\": true, \"mlp_only_layers\": [1], \"tie_word_embeddings\": true";
static void make_qwen3_moe(te_ctx *te, const char *folder, bool stacked) {
    listed *l = new_list(te);
    te_scope_begin(te);
    REQUIRE(mkdir(test_path(folder), 0700) == 0);
    add_around(l, "model.");
    add_layers(l, false, true, 1);
    add_experts(l, 0, "mlp", stacked ? NULL : qwen_names);
    write_weights(l, folder);
    write_config_of(folder, "qwen3_moe", qwen_keys);
    te_scope_end(te);
}
TE_TEST_DEVICES(family_experts_are_stacked) {
    te_ctx *cpu = test_cpu_beside(te), *at = cpu ? cpu : te;
    make_qwen3_moe(at, "each", false);
    make_qwen3_moe(at, "all", true);
    te_module *each = opened(te, "each"), *all = opened(te, "all");
    CHECK(te_module_find(each, "model.layers.0.block_sparse_moe") && te_module_find(each, "model.layers.1.mlp") && !te_module_find(each, "model.layers.1.block_sparse_moe"));
    const float *want = logits_of(each);
    CHECK_BYTES("logits", logits_of(all), want, S * V * 4);
    CHECK_EQ_INT(te_hf_save(each, test_path("each2")), TE_OK);
    CHECK_EQ_INT(te_hf_save(all, test_path("all2")), TE_OK);
    check_files("each", "each2");
    check_files("all", "all2");
    te_module_destroy(each);
    te_module_destroy(all);
    /* Mixtral's files of both kinds. */
    for (int stacked = 0; stacked < 2; stacked++) {
        const char *folder = stacked ? "mixtral.all" : "mixtral", *to = stacked ? "mixtral.all2" : "mixtral2";
        listed *l = new_list(at);
        te_scope_begin(at);
        REQUIRE(mkdir(test_path(folder), 0700) == 0);
        add_around(l, "model.");
        add_layers(l, false, false, LAYERS);
        for (int i = 0; i < LAYERS; i++) add_experts(l, i, stacked ? "mlp" : "block_sparse_moe", stacked ? NULL : mixtral_names);
        write_weights(l, folder);
        write_config_of(folder, "mixtral", ", \"num_local_experts\": 3, \"num_experts_per_tok\": 2, \"tie_word_embeddings\": true");
        te_scope_end(at);
        CHECK(te_hf_open(te, test_path(folder), NULL) == NULL); /* its experts are of intermediate_size, 12 */
        CHECK_ERROR(te, TE_ERR_SHAPE, stacked ? "experts.gate_up_proj\" is [3, 10, 8], and by " : "experts.0.w1.weight\" is [5, 8], and by ");
        char keys[512];
        snprintf(keys, sizeof keys, "%s", sizes);
        memcpy(strstr(keys, "\"intermediate_size\": 12") + 21, " 5", 2);
        char *text = (char *)test_alloc(1024);
        snprintf(text, 1024, "\"model_type\": \"mixtral\", %s, \"num_local_experts\": 3, \"num_experts_per_tok\": 2, \"tie_word_embeddings\": true", keys);
        write_config(folder, text);
        te_module *m = opened(te, folder);
        CHECK_EQ_INT(te_hf_save(m, test_path(to)), TE_OK);
        check_files(folder, to);
        te_module_destroy(m);
    }
}
/* Shares of all experts and of the chosen ones: the first are the second times what the chosen ones have of all. */
TE_TEST_DEVICES(family_experts_weigh_their_shares) {
    te_causal_lm_desc d = {.vocab_size = V, .hidden_size = D, .intermediate_size = F, .num_hidden_layers = 1, .num_attention_heads = 2, .params_dtype = TE_F32, .num_local_experts = E, .num_experts_per_tok = 1,
                           .moe_intermediate_size = FE, .norm_topk_prob = TE_OFF};
    te_module *m = te_causal_lm_create(te, &d);
    REQUIRE_OK(te);
    te_module *block = te_module_find(m, "model.layers.0.block_sparse_moe");
    float *x = test_normal(D, 5), want[D];
    const float *gate = test_read(te_module_parameter(te_module_find(block, "gate"), "weight"));
    double level[E], sum = 0;
    int best = 0;
    for (int e = 0; e < E; e++) {
        level[e] = 0;
        for (int i = 0; i < D; i++) level[e] += (double)gate[e * D + i] * (double)x[i];
        if (level[e] > level[best]) best = e;
        sum += exp(level[e]);
    }
    char name[32];
    snprintf(name, sizeof name, "experts.%d", best);
    CHECK_EQ_INT(te_tensor_shape(te_module_parameter(te_module_find(te_module_find(block, name), "w1"), "weight"))[0], FE);
    te_tensor *in = te_tensor_from_f32(te, TE_F32, SHAPE(1, 1, D), x);
    const float *alone = test_copy(test_read(te_forward(te_module_find(block, name), in)), D);
    for (int i = 0; i < D; i++) want[i] = (float)((double)alone[i] * exp(level[best]) / sum);
    /* f32 sums of 8 numbers; on CUDA products of f32 have 10 bits of mantissa (TF32). */
    CHECK_ERROR_BELOW("one expert", test_read(te_forward(block, in)), want, D, te_ctx_is_cuda(te) ? 5e-3 : 1e-6);
    te_module_destroy(m);
}

/* ---- a text within a larger model ---- */

static const char text_keys[] = ", \"sliding_window\": 4, \"query_pre_attn_scalar\": 8";
static const char *const old_prefix[] = {"language_model.", "vision_tower.", "multi_modal_projector."}, *const new_prefix[] = {"model.language_model.", "model.vision_tower.", "model.multi_modal_projector."};
/* prefix NULL: the text alone, a gemma3_text. */
static void make_gemma3(te_ctx *te, const char *folder, const char *const *prefix) {
    listed *l = new_list(te), *named = new_list(te);
    te_scope_begin(te);
    REQUIRE(mkdir(test_path(folder), 0700) == 0);
    add_around(l, "model.");
    add_layers(l, false, true, 0);
    for (int i = 0; i < LAYERS; i++) {
        add_of(l, i, "pre_feedforward_layernorm.weight", drawn(l, D, 0, 50 + (uint64_t)i));
        add_of(l, i, "post_feedforward_layernorm.weight", drawn(l, D, 0, 60 + (uint64_t)i));
    }
    for (int i = 0; i < l->n; i++) {
        char name[96];
        const char *rest = l->names[i] + (prefix == new_prefix ? strlen("model.") : 0);
        snprintf(name, sizeof name, "%s%s", prefix ? prefix[0] : "", rest);
        add(named, name, (te_tensor *)(uintptr_t)l->items[i].tensor);
    }
    for (int i = 1; i < 3 && prefix; i++) {
        char name[96];
        snprintf(name, sizeof name, "%sembeddings.weight", prefix[i]);
        add(named, name, te_tensor_cast(drawn(l, 3, 5, 70 + (uint64_t)i), i == 1 ? TE_BF16 : TE_F32));
        snprintf(name, sizeof name, "%scount", prefix[i]);
        add(named, name, te_tensor_full(te, TE_I64, 0, NULL, i));
    }
    write_weights(named, folder);
    if (prefix) {
        char *keys = (char *)test_alloc(1024);
        snprintf(keys, 1024, "\"text_config\": {\"model_type\": \"gemma3_text\", %s%s}, \"vision_config\": {\"hidden_size\": 5}, \"model_type\": \"gemma3\"", sizes, text_keys);
        write_config(folder, keys);
    } else write_config_of(folder, "gemma3_text", text_keys);
    te_scope_end(te);
}
TE_TEST_DEVICES(family_text_of_a_larger_model) {
    te_ctx *cpu = test_cpu_beside(te), *at = cpu ? cpu : te;
    make_gemma3(at, "text", NULL);
    te_module *text = opened(te, "text");
    const float *want = logits_of(text);
    te_module_destroy(text);
    for (int k = 0; k < 2; k++) {
        const char *folder = k ? "new" : "old", *to = k ? "new2" : "old2";
        make_gemma3(at, folder, k ? new_prefix : old_prefix);
        spit_text(in_folder(folder, "preprocessor_config.json"), "{}");
        te_module *m = opened(te, folder);
        CHECK_BYTES("logits", logits_of(m), want, S * V * 4);
        CHECK(te_module_find(m, "model.layers.1.mlp") && !te_module_find(m, "vision_tower"));
        /* The keys around the text's are written too, whatever becomes of the folder. */
        size_t n;
        uint8_t *bytes = test_read_file(in_folder(folder, "model.safetensors"), &n);
        remove(in_folder(folder, "model.safetensors"));
        CHECK_EQ_INT(te_hf_save(m, test_path(to)), TE_OK);
        spit(in_folder(folder, "model.safetensors"), bytes, n);
        check_files(folder, to);
        CHECK(access(in_folder(to, "preprocessor_config.json"), F_OK) == 0);
        te_module_destroy(m);
        m = opened(te, to);
        CHECK_BYTES("logits of what was written", logits_of(m), want, S * V * 4);
        te_module_destroy(m);
    }
}
/* Bytes of formats that te.h has not go along, too; other tensors of other names are refused. */
TE_TEST(family_keeps_any_format) {
    static const char header[] = "{\"vision_tower.a\":{\"dtype\":\"F64\",\"shape\":[2],\"data_offsets\":[0,16]},\"vision_tower.b\":{\"dtype\":\"BOOL\",\"shape\":[3],\"data_offsets\":[16,19]},\"vision_tower.c\":{\"dtype\":\"U64\",\"shape\":[0,9],\"data_offsets\":[19,19]}} ";
    static const uint8_t data[19] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 1, 0, 1};
    te_ctx *te = test_context("cpu");
    make_gemma3(te, "whole", old_prefix);
    rename(in_folder("whole", "model.safetensors"), in_folder("whole", "a.safetensors"));
    uint8_t file[8 + sizeof header - 1 + sizeof data] = {(sizeof header - 1) % 256, (sizeof header - 1) / 256};
    memcpy(file + 8, header, sizeof header - 1);
    memcpy(file + 8 + sizeof header - 1, data, sizeof data);
    spit(in_folder("whole", "b.safetensors"), file, sizeof file);
    char *map = (char *)test_alloc(16384);
    strcpy(map, "{\"weight_map\": {\"vision_tower.a\": \"b.safetensors\", \"vision_tower.b\": \"b.safetensors\", \"vision_tower.c\": \"b.safetensors\"");
    te_safetensors *f = te_safetensors_open(te, in_folder("whole", "a.safetensors"));
    REQUIRE(f);
    for (int i = 0; i < te_safetensors_count(f); i++) snprintf(map + strlen(map), 16384 - strlen(map), ", \"%s\": \"a.safetensors\"", te_safetensors_at(f, i)->name);
    te_safetensors_close(f);
    strcat(map, "}}");
    spit_text(in_folder("whole", "model.safetensors.index.json"), map);
    te_module *m = opened(te, "whole");
    CHECK_EQ_INT(te_hf_save(m, test_path("written")), TE_OK);
    te_module_destroy(m);
    size_t n;
    uint8_t *bytes = test_read_file(in_folder("written", "model.safetensors"), &n);
    f = te_safetensors_open(te, in_folder("written", "model.safetensors"));
    REQUIRE(f && bytes);
    static const char *const names[] = {"vision_tower.a", "vision_tower.b", "vision_tower.c"};
    static const int sizes_of[] = {16, 3, 0}, shapes[] = {2, 3, 0};
    for (int i = 0; i < 3; i++) {
        const te_safetensors_entry *e = te_safetensors_find(f, names[i]);
        REQUIRE(e != NULL);
        CHECK(e->bytes == (uint64_t)sizes_of[i] && e->ndim == (i < 2 ? 1 : 2) && e->shape[0] == shapes[i] && e->dtype == TE_DTYPE_NONE);
        uint64_t start = 8;
        for (int k = 0; k < 8; k++) start += (uint64_t)bytes[k] << 8 * k;
        CHECK(memcmp(bytes + start + e->offset, data + (i ? 16 : 0), (size_t)e->bytes) == 0);
    }
    te_safetensors_close(f);
    file[8 + 2] = 'V'; /* "Vision_tower.a" */
    spit(in_folder("whole", "b.safetensors"), file, sizeof file);
    map[strlen("{\"weight_map\": {\"")] = 'V';
    spit_text(in_folder("whole", "model.safetensors.index.json"), map);
    CHECK(te_hf_open(te, test_path("whole"), NULL) == NULL);
    CHECK_ERROR(te, TE_ERR_FORMAT, "tensor \"Vision_tower.a\" has no place in the gemma3 of");
}

/* ---- what is refused ---- */

TE_TEST(family_refuses_configs) {
    static const struct {
        const char *keys;
        te_result code;
        const char *says;
    } cases[] = {
        {"\"model_type\": \"gemma3\"", TE_ERR_FORMAT, "text_config is missing, and a gemma3 needs it"},
        {"\"model_type\": \"gemma3\", \"text_config\": null", TE_ERR_FORMAT, "text_config is missing"},
        {"\"model_type\": \"gemma3\", \"text_config\": 7", TE_ERR_FORMAT, "text_config is missing"},
        {"\"model_type\": \"gemma3\", \"text_config\": {}, \"text_config\": {}", TE_ERR_FORMAT, "\"text_config\" is given twice"},
        {"\"text_config\": {\"model_type\": \"gemma3\", \"text_config\": {}}, \"model_type\": \"gemma3\"", TE_ERR_UNSUPPORTED, "text_config has model_type \"gemma3\"; that of a gemma3 is gemma3_text"},
        {"\"text_config\": {\"head_dim\": \"x\"}, \"model_type\": \"gemma3\"", TE_ERR_FORMAT, "config.json: byte 29 of the text: a whole number is missing"},
        {"\"text_config\": {\"final_logit_softcapping\": 2}, \"model_type\": \"gemma3\"", TE_ERR_UNSUPPORTED, "transformers computes a gemma3 without"},
        {"\"text_config\": {}, \"model_type\": \"gemma3\", \"quantization_config\": {}", TE_ERR_UNSUPPORTED, "quantization_config"},
        {"\"text_config\": {}, \"model_type\": \"gemma3\"", TE_ERR_FORMAT, "num_hidden_layers is 26, and the weights' files have"},
        {"\"model_type\": \"phi3\", \"partial_rotary_factor\": 0", TE_ERR_FORMAT, "partial_rotary_factor is 0, which rotates 0 of 2 channels"},
        {"\"model_type\": \"phi3\", \"partial_rotary_factor\": 1e300", TE_ERR_FORMAT, "partial_rotary_factor is 1e+300"},
        {"\"model_type\": \"phi3\", \"rope_scaling\": {\"type\": \"yarn\", \"short_factor\": [1], \"long_factor\": [0]}", TE_ERR_FORMAT, "long_factor[0] 0"},
        {"\"model_type\": \"phi3\", \"rope_scaling\": {\"type\": \"su\"}", TE_ERR_FORMAT, "short_factor has 0 numbers and long_factor 0; 1 are needed"},
        {"\"model_type\": \"phi3\", \"resid_pdrop\": 0.5", TE_ERR_UNSUPPORTED, "resid_pdrop is 0.5"},
        {"\"model_type\": \"qwen3_moe\", \"mlp_only_layers\": [-1]", TE_ERR_FORMAT, "a whole number is missing"},
        {"\"model_type\": \"qwen3_moe\", \"mlp_only_layers\": [1], \"mlp_only_layers\": [1]", TE_ERR_FORMAT, "\"mlp_only_layers\" is given twice"},
        {"\"model_type\": \"qwen3_moe\", \"decoder_sparse_step\": 0", TE_ERR_FORMAT, "decoder_sparse_step is 0"},
        {"\"model_type\": \"qwen3_moe\", \"moe_intermediate_size\": 99999999999", TE_ERR_FORMAT, "moe_intermediate_size is 99999999999"},
        {"\"model_type\": \"qwen3_moe\", \"num_experts\": 600", TE_ERR_FORMAT, "num_local_experts 600 each"},
        {"\"model_type\": \"qwen3_moe\", \"num_local_experts\": 4, \"num_experts\": 4", TE_ERR_FORMAT, "\"num_experts\" is given twice"},
        {"\"model_type\": \"qwen2\", \"use_sliding_window\": true, \"max_window_layers\": null", TE_ERR_FORMAT, "max_window_layers is null"},
    };
    te_ctx *te = test_context("cpu");
    make_phi3(te, "folder");
    for (int i = 0; i < COUNT(cases); i++) {
        char *keys = (char *)test_alloc(2048);
        test_case("%s", cases[i].keys);
        snprintf(keys, 2048, "%s, %s", cases[i].keys, sizes);
        write_config("folder", keys);
        CHECK(te_hf_open(te, test_path("folder"), NULL) == NULL);
        CHECK_ERROR(te, cases[i].code, cases[i].says);
    }
    test_case("other tensors");
    write_config_of("folder", "llama", "");
    CHECK(te_hf_open(te, test_path("folder"), NULL) == NULL);
    CHECK_ERROR(te, TE_ERR_FORMAT, "has no tensor \"model.layers.0.self_attn.q_proj.weight\", which a llama of");
    write_config_of("folder", "phi3", "");
    te_module *m = opened(te, "folder");
    te_module_destroy(te_module_find(m, "model.layers.1.self_attn.k_proj"));
    te_module_add_child(te_module_find(m, "model.layers.1.self_attn"), "k_proj", te_sdpa_create(te, &(te_sdpa_desc){0}));
    CHECK_EQ_INT(te_hf_save(m, test_path("cut")), TE_ERR_STATE);
    CHECK_ERROR(te, TE_ERR_STATE, "no parameter \"model.layers.1.self_attn.k_proj.weight\" any more");
    CHECK(access(in_folder("cut", "model.safetensors"), F_OK) != 0);
    te_module_destroy(m);
}
/* Three changed bytes of config.json: the model opens, or there is an error; nothing else. */
TE_TEST(family_survives_damage) {
    enum { ROUNDS = 300 };
    static const char tokens[] = "{}[]\",:\\0129u-.enft";
    static const char *const folders[] = {"phi3", "experts", "vision"};
    te_ctx *te = test_context("cpu");
    make_phi3(te, "phi3");
    make_qwen3_moe(te, "experts", true);
    make_gemma3(te, "vision", old_prefix);
    for (int k = 0; k < COUNT(folders); k++) {
        const char *path = in_folder(folders[k], "config.json");
        size_t n;
        uint8_t *config = test_read_file(path, &n), *copy = (uint8_t *)test_alloc(n);
        int64_t *at = test_integers(3 * ROUNDS, 2 * (uint64_t)k + 1, 0, (int64_t)n), *value = test_integers(3 * ROUNDS, 2 * (uint64_t)k + 2, 0, 256);
        int opened_so = 0;
        for (int i = 0; i < ROUNDS; i += test_every(5)) {
            memcpy(copy, config, n);
            for (int c = 3 * i; c < 3 * i + 1 + i % 3; c++) copy[at[c]] = (uint8_t)(i % 2 ? value[c] : tokens[value[c] % (int)(sizeof tokens - 1)]);
            spit(path, copy, n);
            test_case("%.*s", (int)n, (const char *)copy);
            te_module *m = te_hf_open(te, test_path(folders[k]), NULL);
            CHECK((m == NULL) == !te_ok(te));
            opened_so += m != NULL;
            te_module_destroy(m);
            te_clear_error(te);
        }
        CHECK_MSG(opened_so > 0, "none of %d opened: every change was fatal", ROUNDS);
    }
}
TE_TEST(family_refuses_descs) {
    te_ctx *te = test_context("cpu");
    const bool dense[1] = {true};
    const te_causal_lm_desc good = {.vocab_size = V, .hidden_size = D, .intermediate_size = F, .num_hidden_layers = 1, .num_attention_heads = 2};
    for (int i = 0; i < 5; i++) {
        te_causal_lm_desc d = good;
        if (i == 0) d.moe_intermediate_size = 4;
        if (i == 1) d.norm_topk_prob = TE_OFF;
        if (i == 2) d.dense_layers = dense;
        if (i == 3) d.norm_topk_prob = (te_switch)7, d.num_local_experts = d.num_experts_per_tok = 2;
        if (i == 4) d.moe_intermediate_size = -4, d.num_local_experts = d.num_experts_per_tok = 2;
        CHECK(te_causal_lm_create(te, &d) == NULL);
        CHECK_ERROR(te, TE_ERR_INVALID, "without experts all stay 0");
    }
}

/* Every request for memory in turn is refused, while fused and stacked tensors are taken apart and put together. */
TE_TEST(family_memory_runs_out) {
    te_ctx *files = test_context("cpu");
    make_phi3(files, "phi3");
    make_qwen3_moe(files, "stacked", true);
    make_gemma3(files, "vision", old_prefix);
    static const char *const folders[] = {"phi3", "stacked", "vision"};
    for (int k = 0; k < COUNT(folders); k++) {
        purse *host = new_purse();
        te_ctx_desc desc = purse_desc(host, NULL);
        te_ctx *te = test_context_with(&desc);
        bool whole = false;
        for (int64_t n = 1; !whole; n += test_every_of(23, 4)) {
            test_case("%s, request %lld", folders[k], (long long)n);
            te_scope_begin(te);
            host->calls = host->refused = 0;
            host->fail_at = n;
            te_module *m = te_hf_open(te, test_path(folders[k]), &(te_hf_desc){.params_dtype = TE_BF16});
            te_result saved = te_hf_save(m, test_path("written"));
            host->fail_at = 0;
            whole = host->refused == 0;
            CHECK(te_ok(te) == (m && saved == TE_OK) && (te_ok(te) || !whole));
            if (!te_ok(te)) CHECK_EQ_INT(te_error_code(te), TE_ERR_OUT_OF_MEMORY);
            te_scope_end(te);
            te_module_destroy(m);
            te_clear_error(te);
            REQUIRE(n < 100000);
        }
        te_module_destroy(opened(te, "written"));
    }
}
