/* test_hf.c: folders of transformers, written here: a model computes what its formula says in f64, is written as it was read, and whatever contradicts itself is refused by name.
 * tools/models compares with transformers itself. */
#define _POSIX_C_SOURCE 200809L
#include "../faults/purse.h"
#include "folder.h"

#include <unistd.h>

enum { V = 11, D = 8, F = 12, LAYERS = 2, HEADS = 4, GROUPS = 2, HEAD = 4, S = 7 };

static const char config[] =
    "{\"architectures\": [\"LlamaForCausalLM\"], \"model_type\": \"llama\", \"vocab_size\": 11, \"hidden_size\": 8, \"intermediate_size\": 12, \"num_hidden_layers\": 2,\n"
    " \"num_attention_heads\": 4, \"num_key_value_heads\": 2, \"head_dim\": 4, \"rms_norm_eps\": 1e-05, \"rope_theta\": 500.0, \"hidden_act\": \"silu\",\n"
    " \"tie_word_embeddings\": false, \"attention_bias\": false, \"rope_scaling\": null, \"bos_token_id\": [1, 2], \"torch_dtype\": \"float32\", \"use_cache\": true}\n";

/* ---- the folder ---- */

typedef struct weight {
    char name[80];
    int rows, cols; /* cols 0: a vector */
    float *values;
} weight;
static weight weights[32];
static int num_weights;

static void add_weight(const char *name, int rows, int cols) {
    weight *w = &weights[num_weights];
    snprintf(w->name, sizeof w->name, "%s", name);
    w->rows = rows;
    w->cols = cols;
    w->values = test_normal(rows * (cols ? cols : 1), 100 + (uint64_t)num_weights++);
    for (int i = 0; i < rows * (cols ? cols : 1); i++) w->values[i] = cols ? 0.4f * w->values[i] : 1 + 0.2f * w->values[i];
}
static const float *weight_of(int layer, const char *name) {
    char path[80];
    if (layer < 0) snprintf(path, sizeof path, "%s.weight", name);
    else snprintf(path, sizeof path, "model.layers.%d.%s.weight", layer, name);
    for (int i = 0; i < num_weights; i++)
        if (!strcmp(weights[i].name, path)) return weights[i].values;
    test_fail(__FILE__, __LINE__, "no weight %s", path);
    return weights[0].values;
}
static void make_weights(void) {
    static const struct {
        const char *name;
        int rows, cols;
    } parts[] = {{"input_layernorm", D, 0}, {"self_attn.q_proj", HEADS * HEAD, D}, {"self_attn.k_proj", GROUPS * HEAD, D}, {"self_attn.v_proj", GROUPS * HEAD, D},
                 {"self_attn.o_proj", D, HEADS * HEAD}, {"post_attention_layernorm", D, 0}, {"mlp.gate_proj", F, D}, {"mlp.up_proj", F, D}, {"mlp.down_proj", D, F}};
    num_weights = 0;
    add_weight("model.embed_tokens.weight", V, D);
    for (int layer = 0; layer < LAYERS; layer++)
        for (int i = 0; i < COUNT(parts); i++) {
            char name[80];
            snprintf(name, sizeof name, "model.layers.%d.%s.weight", layer, parts[i].name);
            add_weight(name, parts[i].rows, parts[i].cols);
        }
    add_weight("model.norm.weight", D, 0);
    add_weight("lm_head.weight", V, D);
}

/* Weights begin .. end - 1 into a file of the folder; `skip` is left out (-1: none). */
static void write_shard(te_ctx *te, const char *path, int begin, int end, int skip) {
    te_safetensors_item items[32];
    int n = 0;
    te_scope_begin(te);
    for (int i = begin; i < end; i++) {
        const weight *w = &weights[i];
        const int64_t shape[2] = {w->rows, w->cols};
        if (i != skip) items[n++] = (te_safetensors_item){w->name, te_tensor_from_f32(te, TE_F32, w->cols ? 2 : 1, shape, w->values)};
    }
    te_safetensors_write(te, path, items, n, NULL, 0);
    te_scope_end(te);
    REQUIRE_OK(te);
}
/* A folder that is whole: the cases damage it. */
static void make_folder(te_ctx *te, const char *folder) {
    make_weights();
    REQUIRE(mkdir(test_path(folder), 0700) == 0);
    spit_text(in_folder(folder, "config.json"), config);
    write_shard(te, in_folder(folder, "model.safetensors"), 0, num_weights, -1);
}

/* ---- the formula, in f64 ---- */

static void norm(const double *x, const float *w, double *y) {
    double sum = 0;
    for (int i = 0; i < D; i++) sum += x[i] * x[i];
    for (int i = 0; i < D; i++) y[i] = x[i] / sqrt(sum / D + 1e-5) * (double)w[i];
}
static void product(const double *x, const float *w, int rows, int cols, double *y) {
    for (int r = 0; r < rows; r++) {
        y[r] = 0;
        for (int c = 0; c < cols; c++) y[r] += (double)w[r * cols + c] * x[c];
    }
}
static void rotate(double *head, int t) {
    for (int i = 0; i < HEAD / 2; i++) {
        double angle = t * pow(500, -2.0 * i / HEAD), u = head[i], v = head[i + HEAD / 2];
        head[i] = u * cos(angle) - v * sin(angle);
        head[i + HEAD / 2] = v * cos(angle) + u * sin(angle);
    }
}
static void expected(const int32_t *ids, int n, float *logits) {
    static double x[S][D], h[D], q[S][HEADS * HEAD], k[S][GROUPS * HEAD], v[S][GROUPS * HEAD], o[HEADS * HEAD], gate[F], up[F], y[D], out[V];
    for (int t = 0; t < n; t++)
        for (int i = 0; i < D; i++) x[t][i] = (double)weight_of(-1, "model.embed_tokens")[ids[t] * D + i];
    for (int l = 0; l < LAYERS; l++) {
        for (int t = 0; t < n; t++) {
            norm(x[t], weight_of(l, "input_layernorm"), h);
            product(h, weight_of(l, "self_attn.q_proj"), HEADS * HEAD, D, q[t]);
            product(h, weight_of(l, "self_attn.k_proj"), GROUPS * HEAD, D, k[t]);
            product(h, weight_of(l, "self_attn.v_proj"), GROUPS * HEAD, D, v[t]);
            for (int i = 0; i < HEADS; i++) rotate(q[t] + i * HEAD, t);
            for (int i = 0; i < GROUPS; i++) rotate(k[t] + i * HEAD, t);
        }
        for (int t = 0; t < n; t++) {
            for (int i = 0; i < HEADS; i++) {
                double p[S], sum = 0;
                const int g = i / (HEADS / GROUPS) * HEAD;
                for (int j = 0; j <= t; j++) {
                    double score = 0;
                    for (int c = 0; c < HEAD; c++) score += q[t][i * HEAD + c] * k[j][g + c];
                    sum += p[j] = exp(score / sqrt(HEAD));
                }
                for (int c = 0; c < HEAD; c++) {
                    o[i * HEAD + c] = 0;
                    for (int j = 0; j <= t; j++) o[i * HEAD + c] += p[j] / sum * v[j][g + c];
                }
            }
            product(o, weight_of(l, "self_attn.o_proj"), D, HEADS * HEAD, y);
            for (int i = 0; i < D; i++) x[t][i] += y[i];
            norm(x[t], weight_of(l, "post_attention_layernorm"), h);
            product(h, weight_of(l, "mlp.gate_proj"), F, D, gate);
            product(h, weight_of(l, "mlp.up_proj"), F, D, up);
            for (int i = 0; i < F; i++) gate[i] = gate[i] / (1 + exp(-gate[i])) * up[i];
            product(gate, weight_of(l, "mlp.down_proj"), D, F, y);
            for (int i = 0; i < D; i++) x[t][i] += y[i];
        }
    }
    for (int t = 0; t < n; t++) {
        norm(x[t], weight_of(-1, "model.norm"), h);
        product(h, weight_of(-1, "lm_head"), V, D, out);
        for (int i = 0; i < V; i++) logits[t * V + i] = (float)out[i];
    }
}

static const int32_t ids[S] = {3, 1, 10, 0, 7, 7, 2};
static te_tensor *run(te_module *m, int first, int n, te_kv_cache *cache) {
    te_forward_args args = {.input = te_tensor_from_host(te_module_ctx(m), TE_I32, SHAPE(1, n), ids + first), .kv_cache = cache};
    return te_forward_with(m, &args);
}

/* ---- models that open ---- */

TE_TEST_DEVICES(hf_computes) {
    te_ctx *cpu = test_cpu_beside(te);
    float *want = test_floats(S * V);
    make_folder(cpu ? cpu : te, "llama");
    te_module *m = te_hf_open(te, test_path("llama"), NULL);
    REQUIRE_OK(te);
    expected(ids, S, want);
    /* f32 sums of 12 numbers at most; on CUDA products of f32 have 10 bits of mantissa (TF32). */
    CHECK_ERROR_BELOW("logits", test_read(run(m, 0, S, NULL)), want, S * V, te_ctx_is_cuda(te) ? 5e-3 : 1e-6);
    CHECK(te_tensor_dtype(te_module_parameter(te_module_find(m, "model.layers.1.self_attn.q_proj"), "weight")) == TE_F32);
    CHECK(te_module_find(m, "model.layers.1.self_attn.sdpa") && !te_module_find(m, "model.layers.2"));
    te_module_destroy(m);
    m = te_hf_open(te, test_path("llama"), &(te_hf_desc){.params_dtype = TE_BF16});
    CHECK_ERROR_BELOW("logits in bf16", test_read(run(m, 0, S, NULL)), want, S * V, 3e-2); /* 8 bits, some twenty roundings */
    CHECK_OK(te);
    te_module_destroy(m);
}

/* In pieces of any size, and after a step back: the logits that the whole has. */
TE_TEST_DEVICES(hf_cache) {
    te_ctx *cpu = test_cpu_beside(te);
    float *want = test_floats(S * V);
    make_folder(cpu ? cpu : te, "llama");
    te_module *m = te_hf_open(te, test_path("llama"), NULL);
    REQUIRE_OK(te);
    expected(ids, S, want);
    te_kv_cache *c = te_kv_cache_create(m, 1, S);
    te_no_grad_begin(te);
    for (int piece = 1; piece <= 4; piece++) {
        te_kv_cache_truncate(c, 0);
        for (int at = 0; at < S; at += piece) {
            int n = at + piece <= S ? piece : S - at;
            CHECK_ERROR_BELOW("logits", test_read(run(m, at, n, c)), want + at * V, n * V, te_ctx_is_cuda(te) ? 5e-3 : 1e-6);
            CHECK_EQ_INT(te_kv_cache_length(c), at + n);
        }
    }
    CHECK_EQ_INT(te_kv_cache_truncate(c, 2), TE_OK);
    CHECK_ERROR_BELOW("logits after a step back", test_read(run(m, 2, 3, c)), want + 2 * V, 3 * V, te_ctx_is_cuda(te) ? 5e-3 : 1e-6);
    CHECK_OK(te);
    CHECK_EQ_INT(te_kv_cache_truncate(c, 6), TE_ERR_INVALID);
    CHECK_ERROR(te, TE_ERR_INVALID, "6 positions are to stay of the 5 that there are");
    CHECK(run(m, 0, 3, c) == NULL);
    CHECK_ERROR(te, TE_ERR_INVALID, "the ids are [1, 3], and kv_cache has room for 1 sequences of 7, of which 5 are there");
    te_no_grad_end(te);
    CHECK(run(m, 0, 1, c) == NULL);
    CHECK_ERROR(te, TE_ERR_STATE, "te_no_grad_begin");
    CHECK(te_kv_cache_create(te_module_find(m, "lm_head"), 1, 4) == NULL);
    CHECK_ERROR(te, TE_ERR_INVALID, "a Linear");
    te_kv_cache_destroy(c);
    te_module_destroy(m);
}

/* Another attention in the place of sdpa: it sees what an attention needs. */
static int times_seen;
static te_result seen_attention(te_module *self, te_forward_args *args) {
    const te_sdpa_desc *d = (const te_sdpa_desc *)te_module_state(self);
    const te_attn_desc a = {.format = d->format, .rule.mask = args->attention.attn_mask_type, .rule.window = d->rule.window, .rule.softmax_scale = d->rule.softmax_scale};
    times_seen++;
    CHECK(d->format == TE_BSHD && d->rule.softcap == 0 && !d->rule.window.on);
    CHECK(te_tensor_shape(args->input)[2] == HEADS && te_tensor_shape(args->key)[2] == GROUPS && te_tensor_shape(args->value)[3] == HEAD);
    args->outputs.out = te_attention(args->input, args->key, args->value, &a);
    return te_error_code(te_module_ctx(self));
}
static bool replace_attention(void *user, te_module *m) {
    (void)user;
    if (!strcmp(te_module_get_class(m)->name, "SDPA")) te_module_set_forward(m, seen_attention);
    return true;
}
TE_TEST(hf_attention_is_replaced) {
    te_ctx *te = test_context("cpu");
    make_folder(te, "llama");
    te_module *m = te_hf_open(te, test_path("llama"), NULL);
    REQUIRE_OK(te);
    float *before = test_copy(test_read(run(m, 0, S, NULL)), S * V);
    times_seen = 0;
    te_module_visit(m, replace_attention, NULL);
    CHECK_BYTES("logits", test_read(run(m, 0, S, NULL)), before, S * V * 4);
    CHECK_EQ_INT(times_seen, LAYERS);
    CHECK_OK(te);
    te_module_destroy(m);
}

/* Written as it was read; from shards as from one file; quantized weights decoded. */
TE_TEST(hf_save) {
    te_ctx *te = test_context("cpu");
    te_recipe recipe = te_recipe_block_scaling();
    size_t n;
    make_folder(te, "llama");
    te_module *m = te_hf_open(te, test_path("llama"), NULL);
    CHECK_EQ_INT(te_hf_save(m, in_folder("llama", "new/folder")), TE_OK);
    REQUIRE_OK(te);
    uint8_t *text = test_read_file(in_folder("llama", "new/folder/config.json"), &n);
    CHECK(text && n == strlen(config) && !memcmp(text, config, n));
    te_safetensors *f = te_safetensors_open(te, in_folder("llama", "new/folder/model.safetensors"));
    REQUIRE(f);
    CHECK_EQ_INT(te_safetensors_count(f), num_weights);
    for (int i = 0; i < num_weights; i++) CHECK_BYTES(weights[i].name, test_read(te_safetensors_read(f, weights[i].name)), weights[i].values, 4 * (size_t)weights[i].rows);
    CHECK(te_safetensors_metadata(f, "format") && !strcmp(te_safetensors_metadata(f, "format"), "pt"));
    te_safetensors_close(f);
    te_module_destroy(m);

    te_quantized_model_init_begin(te, &(te_quantized_model_init_desc){.recipe = &recipe});
    m = te_hf_open(te, test_path("llama"), NULL);
    te_quantized_model_init_end(te);
    REQUIRE_OK(te);
    CHECK(te_tensor_is_quantized(te_module_parameter(te_module_find(m, "model.layers.0.mlp.up_proj"), "weight")));
    CHECK(!te_tensor_is_quantized(te_module_parameter(te_module_find(m, "lm_head"), "weight")));
    CHECK_EQ_INT(te_hf_save(m, test_path("decoded")), TE_OK);
    f = te_safetensors_open(te, in_folder("decoded", "model.safetensors"));
    te_tensor *up = te_safetensors_read(f, "model.layers.0.mlp.up_proj.weight");
    CHECK_ERROR_BELOW("decoded", test_read(up), weight_of(0, "mlp.up_proj"), F * D, 4e-2); /* e4m3 has 4 bits */
    te_safetensors_close(f);
    te_module_destroy(m);

    te_quantized_model_init_begin(te, &(te_quantized_model_init_desc){.recipe = &recipe});
    m = te_hf_open(te, test_path("llama"), &(te_hf_desc){.quantized_lm_head = true});
    te_quantized_model_init_end(te);
    REQUIRE_OK(te);
    te_tensor *head = te_module_parameter(te_module_find(m, "lm_head"), "weight");
    CHECK(te_tensor_is_quantized(head));
    CHECK_EQ_INT(te_hf_save(m, test_path("head")), TE_OK);
    f = te_safetensors_open(te, in_folder("head", "model.safetensors"));
    te_tensor *decoded = te_safetensors_read(f, "lm_head.weight");
    CHECK_BYTES("lm_head of the file", test_read(decoded), test_read(te_dequantize(head, TE_F32)), V * D * sizeof(float));
    CHECK_ERROR_BELOW("decoded lm_head", test_read(decoded), weight_of(-1, "lm_head"), V * D, 4e-2); /* e4m3 has 4 bits */
    te_safetensors_close(f);
    te_module_destroy(m);

    te_linear_desc linear = {.in_features = 2, .out_features = 2};
    m = te_linear_create(te, &linear);
    CHECK_EQ_INT(te_hf_save(m, test_path("x")), TE_ERR_INVALID);
    CHECK_ERROR(te, TE_ERR_INVALID, "not made by te_hf_open");
    te_module_destroy(m);
    m = te_causal_lm_create(te, &(te_causal_lm_desc){.vocab_size = 4, .hidden_size = 4, .intermediate_size = 4, .num_hidden_layers = 1, .num_attention_heads = 1});
    CHECK_EQ_INT(te_hf_save(m, test_path("x")), TE_ERR_INVALID);
    CHECK_ERROR(te, TE_ERR_INVALID, "has no config.json");
    te_module_destroy(m);
}

/* The tokenizer's files and generation_config.json go along, byte for byte, whatever becomes of the folder that they came from; others do not. */
TE_TEST(hf_save_takes_files_along) {
    static const char *const names[] = {"generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
                                        "tokenizer.model", "tokenizer.model.v3", "tekken.json", "chat_template.jinja", "chat_template.json"};
    te_ctx *te = test_context("cpu");
    uint8_t bytes[COUNT(names)][300];
    size_t n;
    make_folder(te, "from");
    for (int i = 0; i < COUNT(names); i++) {
        const int64_t *pick = test_integers(300, (uint64_t)i, 0, 256); /* any bytes, 0 among them; and one file is empty */
        for (int k = 0; k < 300; k++) bytes[i][k] = (uint8_t)pick[k];
        if (i != 4) spit(in_folder("from", names[i]), bytes[i], i == 6 ? 0 : 300);
    }
    spit_text(in_folder("from", "README.md"), "no file of these");
    spit_text(in_folder("from", "optimizer.bin"), "nor this");
    REQUIRE(mkdir(in_folder("from", "added_tokens.json"), 0700) == 0); /* no file of that name */
    te_module *m = te_hf_open(te, test_path("from"), NULL);
    REQUIRE_OK(te);
    spit_text(in_folder("from", "tokenizer.json"), "written anew");
    remove(in_folder("from", "vocab.json"));
    const char *const to[] = {"to", "from"}; /* another folder, and the same one */
    for (int t = 0; t < 2; t++) {
        CHECK_EQ_INT(te_hf_save(m, test_path(to[t])), TE_OK);
        CHECK_OK(te);
        for (int i = 0; i < COUNT(names); i++) {
            test_case("%s/%s", to[t], names[i]);
            if (i == 4) {
                CHECK(t == 1 || access(in_folder(to[t], names[i]), F_OK) != 0);
                continue;
            }
            uint8_t *read = test_read_file(in_folder(to[t], names[i]), &n);
            CHECK(read && n == (i == 6 ? 0u : 300u) && !memcmp(read, bytes[i], n));
        }
    }
    test_case("files that stay");
    CHECK(access(in_folder("to", "README.md"), F_OK) != 0 && access(in_folder("to", "optimizer.bin"), F_OK) != 0 && access(in_folder("from", "README.md"), F_OK) == 0);
    /* The error names the file that cannot be replaced, and the files written before it are there. */
    remove(in_folder("to", "tokenizer.json"));
    REQUIRE(mkdir(in_folder("to", "tokenizer.json"), 0700) == 0);
    CHECK_EQ_INT(te_hf_save(m, test_path("to")), TE_ERR_IO);
    CHECK_ERROR(te, TE_ERR_IO, "to/tokenizer.json");
    te_module_destroy(m);
    m = te_hf_open(te, test_path("to"), NULL);
    CHECK(m != NULL);
    te_module_destroy(m);
    /* More than 256 MiB are no tokenizer. */
    FILE *f = fopen(in_folder("from", "merges.txt"), "r+b");
    REQUIRE(f && fseek(f, 256 << 20, SEEK_SET) == 0 && fputc('x', f) == 'x' && fclose(f) == 0);
    CHECK(te_hf_open(te, test_path("from"), NULL) == NULL);
    CHECK_ERROR(te, TE_ERR_IO, "from/merges.txt: 268435457 bytes, at most 268435456");
    remove(in_folder("from", "merges.txt"));
    CHECK_OK(te);
}

static void write_index(const char *folder, const char *map) {
    char *text = (char *)test_alloc(8192);
    snprintf(text, 8192, "{\"metadata\": {\"total_size\": 1}, \"weight_map\": {%s}}", map);
    spit_text(in_folder(folder, "model.safetensors.index.json"), text);
}
/* The tensors 0 .. split - 1 in a.safetensors, the others in b.safetensors. */
static char *map_of(int split, const char *first) {
    char *map = (char *)test_alloc(4096);
    for (int i = 0; i < num_weights; i++) snprintf(map + strlen(map), 4096 - strlen(map), "%s\"%s\": \"%s\"", i ? ", " : "", weights[i].name, i < split ? first : "b.safetensors");
    return map;
}
TE_TEST(hf_shards) {
    te_ctx *te = test_context("cpu");
    float *want = test_floats(S * V);
    make_folder(te, "llama");
    remove(in_folder("llama", "model.safetensors"));
    write_shard(te, in_folder("llama", "a.safetensors"), 0, 9, -1);
    write_shard(te, in_folder("llama", "b.safetensors"), 9, num_weights, -1);
    write_index("llama", map_of(9, "a.safetensors"));
    te_module *m = te_hf_open(te, test_path("llama"), NULL);
    REQUIRE_OK(te);
    expected(ids, S, want);
    CHECK_ERROR_BELOW("logits", test_read(run(m, 0, S, NULL)), want, S * V, 1e-6);
    te_module_destroy(m);
    write_index("llama", map_of(10, "a.safetensors"));
    CHECK(te_hf_open(te, test_path("llama"), NULL) == NULL);
    CHECK_ERROR(te, TE_ERR_FORMAT, "is in a.safetensors, which has no tensor of that name");
    write_index("llama", strstr(map_of(9, "a.safetensors"), ",") + 1);
    CHECK(te_hf_open(te, test_path("llama"), NULL) == NULL);
    CHECK_ERROR(te, TE_ERR_FORMAT, "a.safetensors has tensor \"model.embed_tokens.weight\"");
    write_index("llama", map_of(9, "../llama/a.safetensors"));
    CHECK(te_hf_open(te, test_path("llama"), NULL) == NULL);
    CHECK_ERROR(te, TE_ERR_FORMAT, "is in \"../llama/a.safetensors\"; the name of a file in the same folder is needed");
    write_index("llama", map_of(9, "c.safetensors"));
    CHECK(te_hf_open(te, test_path("llama"), NULL) == NULL);
    CHECK_ERROR(te, TE_ERR_IO, "c.safetensors");
    write_index("llama", "");
    CHECK(te_hf_open(te, test_path("llama"), NULL) == NULL);
    CHECK_ERROR(te, TE_ERR_FORMAT, "weight_map is empty");
    write_index("llama", "\"a\": \"a.safetensors\", \"a\": \"a.safetensors\"");
    CHECK(te_hf_open(te, test_path("llama"), NULL) == NULL);
    CHECK_ERROR(te, TE_ERR_FORMAT, "weight_map has tensor \"a\" twice");
}

/* ---- folders that do not open ---- */

/* `config` with the first `from` replaced; NULL: as it is. */
static void edit_config(const char *folder, const char *from, const char *to) {
    char *text = (char *)test_alloc(sizeof config + 512);
    const char *at = strstr(config, from);
    REQUIRE(at);
    snprintf(text, sizeof config + 512, "%.*s%s%s", (int)(at - config), config, to, at + strlen(from));
    spit_text(in_folder(folder, "config.json"), text);
}
TE_TEST(hf_refuses_configs) {
    static const struct {
        const char *from, *to;
        te_result code;
        const char *says;
    } cases[] = {
        {"\"llama\"", "\"gpt2\"", TE_ERR_UNSUPPORTED, "model_type is \"gpt2\"; llama, mistral"},
        {"\"model_type\": \"llama\", ", "", TE_ERR_FORMAT, "model_type is missing"},
        {"\"hidden_size\": 8", "\"hidden_size\": 16", TE_ERR_SHAPE, "tensor \"model.embed_tokens.weight\" is [11, 8], and by "},
        {"\"rope_theta\": 500.0", "\"rope_theta\": -10000", TE_ERR_FORMAT, "rope_theta is -10000; a positive number"},
        {"\"rope_theta\": 500.0", "\"rope_theta\": 1e60", TE_ERR_FORMAT, "rope_theta is 1e+60; a positive number"},
        {"\"rope_theta\": 500.0", "\"rope_theta\": 1e-60", TE_ERR_FORMAT, "rope_theta is 1e-60; a positive number"},
        {"\"rope_theta\": 500.0", "\"rope_theta\": 0", TE_ERR_FORMAT, "rope_theta is 0; a positive number"},
        {"\"rope_scaling\": null", "\"rope_scaling\": {\"rope_type\": \"default\", \"rope_theta\": -3}", TE_ERR_FORMAT, "rope_theta is -3"},
        {"\"hidden_size\": 8", "\"hidden_size\": null", TE_ERR_FORMAT, "hidden_size is null"},
        {"\"hidden_size\": 8", "\"hidden_size\": 0", TE_ERR_FORMAT, "hidden_size is 0; 1 to 2147483647 are possible"},
        {"\"hidden_size\": 8", "\"hidden_size\": 8.5", TE_ERR_FORMAT, "a number that is not whole"},
        {"\"hidden_size\": 8", "\"hidden_size\": -8", TE_ERR_FORMAT, "a whole number is missing"},
        {"\"hidden_size\": 8", "\"hidden_size\": 99999999999999999999", TE_ERR_FORMAT, "63 bits"},
        {"\"hidden_size\": 8", "\"hidden_size\": 4294967296", TE_ERR_FORMAT, "hidden_size is 4294967296"},
        {"\"hidden_size\": 8", "\"hidden_size\": \"8\"", TE_ERR_FORMAT, "a whole number is missing"},
        {"\"hidden_size\": 8", "\"hidden_size\": true", TE_ERR_FORMAT, "\"hidden_size\" is true"},
        {"\"hidden_size\": 8", "\"hidden_size\": 8, \"hidden_size\": 8", TE_ERR_FORMAT, "\"hidden_size\" is given twice"},
        {"\"num_hidden_layers\": 2", "\"num_hidden_layers\": 3", TE_ERR_FORMAT, "has no tensor \"model.layers.2.input_layernorm.weight\""},
        {"\"num_hidden_layers\": 2", "\"num_hidden_layers\": 1", TE_ERR_FORMAT, "tensor \"model.layers.1."},
        {"\"num_hidden_layers\": 2", "\"num_hidden_layers\": 90000", TE_ERR_FORMAT, "num_hidden_layers is 90000, and the weights' files have 21 tensors"},
        {"\"num_hidden_layers\": 2", "\"num_hidden_layers\": 2000000000", TE_ERR_FORMAT, "100000 at most"},
        {"\"num_key_value_heads\": 2", "\"num_key_value_heads\": 3", TE_ERR_FORMAT, "num_attention_heads is 4 and num_key_value_heads 3"},
        {"\"num_key_value_heads\": 2", "\"num_key_value_heads\": 4", TE_ERR_SHAPE, "model.layers.0.self_attn.k_proj.weight\" is [8, 8], and by "},
        {"\"head_dim\": 4", "\"head_dim\": 2147483647", TE_ERR_SHAPE, sizeof(void *) == 4 ? "f32 of shape [8589934588, 8] has more bytes" : "it is [8589934588, 8]"},
        {"\"head_dim\": 4, ", "", TE_ERR_SHAPE, "q_proj.weight\" is [16, 8], and by "},
        {"\"silu\"", "\"gelu\"", TE_ERR_UNSUPPORTED, "hidden_act is \"gelu\"; one of these is needed: gelu_pytorch_tanh, relu, silu"},
        {"\"rms_norm_eps\": 1e-05", "\"rms_norm_eps\": -1", TE_ERR_FORMAT, "rms_norm_eps is -1"},
        {"\"rms_norm_eps\": 1e-05", "\"rms_norm_eps\": 1e999", TE_ERR_FORMAT, "a number that is too large"},
        {"\"rope_scaling\": null", "\"rope_scaling\": {\"type\": \"su\", \"factor\": 4}", TE_ERR_UNSUPPORTED, "rope_type is \"su\"; default, linear, dynamic, llama3, yarn and longrope"},
        {"\"rope_scaling\": null", "\"rope_scaling\": {\"type\": \"longrope\", \"factor\": 4}", TE_ERR_FORMAT, "original_max_position_embeddings is missing"},
        {"\"rope_scaling\": null", "\"original_max_position_embeddings\": 4, \"rope_scaling\": {\"type\": \"longrope\", \"factor\": 4, \"short_factor\": [1], \"long_factor\": [1, 2]}", TE_ERR_FORMAT,
         "short_factor has 1 numbers and long_factor 2; 2 are needed"},
        {"\"rope_scaling\": null", "\"original_max_position_embeddings\": 4, \"rope_scaling\": {\"type\": \"longrope\", \"factor\": 4, \"short_factor\": [1, 2], \"long_factor\": [1, -2]}",
         TE_ERR_FORMAT, "long_factor[1] -2"},
        {"\"rope_scaling\": null", "\"rope_scaling\": {\"type\": \"longrope\", \"short_factor\": [1, \"2\"]}", TE_ERR_FORMAT, "a digit is missing"},
        {"\"rope_scaling\": null", "\"rope_scaling\": {\"type\": \"yarn\", \"factor\": 4}", TE_ERR_FORMAT, "original_max_position_embeddings is missing"},
        {"\"rope_scaling\": null", "\"rope_scaling\": {\"type\": \"yarn\", \"factor\": 4, \"original_max_position_embeddings\": 8, \"beta_fast\": 2, \"beta_slow\": 3}", TE_ERR_FORMAT,
         "beta_fast 2 and beta_slow 3"},
        {"\"rope_scaling\": null", "\"rope_scaling\": {\"type\": \"yarn\", \"factor\": 4, \"original_max_position_embeddings\": 8, \"mscale\": -1}", TE_ERR_FORMAT, "mscale is -1"},
        {"\"rope_scaling\": null", "\"rope_scaling\": {\"type\": \"dynamic\", \"factor\": 4}", TE_ERR_FORMAT, "max_position_embeddings is missing"},
        {"\"rope_scaling\": null", "\"rope_scaling\": {\"rope_type\": \"linear\"}", TE_ERR_FORMAT, "factor is missing"},
        {"\"rope_scaling\": null", "\"rope_scaling\": {\"rope_type\": \"llama3\", \"factor\": 8, \"low_freq_factor\": 4, \"high_freq_factor\": 1, \"original_max_position_embeddings\": 8}", TE_ERR_FORMAT, "the larger one"},
        {"\"rope_scaling\": null", "\"rope_scaling\": [1]", TE_ERR_FORMAT, "'{' is missing"},
        {"\"rope_scaling\": null", "\"partial_rotary_factor\": 0.5", TE_ERR_UNSUPPORTED, "partial_rotary_factor is 0.5"},
        {"\"rope_scaling\": null", "\"quantization_config\": {\"bits\": 4}", TE_ERR_UNSUPPORTED, "quantization_config"},
        {"\"rope_scaling\": null", "\"use_bidirectional_attention\": true", TE_ERR_UNSUPPORTED, "only causal models"},
        {"\"rope_scaling\": null", "\"layer_types\": [\"full_attention\"]", TE_ERR_FORMAT, "layer_types has 1 entries and num_hidden_layers is 2"},
        {"\"rope_scaling\": null", "\"layer_types\": [\"full_attention\", \"sliding_attention\"]", TE_ERR_UNSUPPORTED, "layer_types[1] is \"sliding_attention\", and every layer of a llama"},
        {"\"rope_scaling\": null", "\"layer_types\": null, \"layer_types\": [\"full_attention\", \"full_attention\"], \"layer_types\": []", TE_ERR_FORMAT, "\"layer_types\" is given twice"},
        {"\"rope_scaling\": null", "\"rope_scaling\": {\"factor\": 2, \"factor\": 3}", TE_ERR_FORMAT, "\"factor\" is given twice"},
        {"\"rope_scaling\": null", "\"rope_scaling\": {\"type\": \"linear\", \"factor\": NaN}", TE_ERR_FORMAT, "a digit is missing"},
        {"\"rope_scaling\": null", "\"rope_scaling\": {\"type\": \"linear\", \"factor\": 2}, \"rope_parameters\": {\"rope_theta\": 5}", TE_ERR_UNSUPPORTED,
         "it has rope_scaling and rope_parameters"},
        {"\"rope_scaling\": null", "\"rope_parameters\": {\"full_attention\": {\"rope_theta\": 5}}", TE_ERR_UNSUPPORTED, "reads those of a llama without kinds of layers"},
        {"\"rope_scaling\": null", "\"per_layer_config\": {\"1\": {\"intermediate_size\": 4}}", TE_ERR_UNSUPPORTED, "per_layer_config"},
        {"\"rope_scaling\": null", "\"is_causal\": false", TE_ERR_UNSUPPORTED, "is_causal is false; only causal models"},
        {"\"head_dim\": 4", "\"head_dim\": 0", TE_ERR_FORMAT, "head_dim is 0"},
        {"\"rope_scaling\": null", "\"layer_types\": [\"linear_attention\", \"full_attention\"]", TE_ERR_UNSUPPORTED, "layer_types[0] is \"linear_attention\""},
        {"\"tie_word_embeddings\": false", "\"tie_word_embeddings\": 1", TE_ERR_FORMAT, "neither true nor false"},
        {"\"attention_bias\": false", "\"attention_bias\": true", TE_ERR_FORMAT, "has no tensor \"model.layers.0.self_attn.q_proj.bias\""},
        {"\"llama\"", "\"qwen3\"", TE_ERR_FORMAT, "has no tensor \"model.layers.0.self_attn.q_norm.weight\", which a qwen3 of"},
        {"\"llama\"", "\"mixtral\"", TE_ERR_FORMAT, "num_local_experts is missing"},
        {"true}", "true", TE_ERR_FORMAT, "is missing"},
        {"true}", "true} x", TE_ERR_FORMAT, "something follows the end"},
    };
    te_ctx *te = test_context("cpu");
    make_folder(te, "llama");
    for (int i = 0; i < COUNT(cases); i++) {
        test_case("%s becomes %s", cases[i].from, cases[i].to);
        edit_config("llama", cases[i].from, cases[i].to);
        CHECK(te_hf_open(te, test_path("llama"), NULL) == NULL);
        CHECK_STR(strstr(te_error(te), "llama") ? "names the file" : te_error(te), "names the file");
        CHECK_ERROR(te, cases[i].code, cases[i].says);
    }
    te_module *other = te_causal_lm_create(te, &(te_causal_lm_desc){.vocab_size = 4, .hidden_size = 8, .intermediate_size = 8, .num_hidden_layers = 1, .num_attention_heads = 2});
    CHECK_EQ_INT(te_hf_save(other, ""), TE_ERR_INVALID);
    CHECK_ERROR(te, TE_ERR_INVALID, "te_hf_save: folder is empty");
    te_module_destroy(other);
    CHECK(te_hf_open(te, "", NULL) == NULL);
    CHECK_ERROR(te, TE_ERR_INVALID, "te_hf_open: folder is empty");
    /* Brackets without end. */
    char *deep = (char *)test_alloc(100001);
    memset(deep, '[', 100000);
    edit_config("llama", "null", deep);
    CHECK(te_hf_open(te, test_path("llama"), NULL) == NULL);
    te_clear_error(te);
    memcpy(deep, "{\"a\":", 5);
    spit_text(in_folder("llama", "config.json"), deep);
    CHECK(te_hf_open(te, test_path("llama"), NULL) == NULL);
    CHECK_ERROR(te, TE_ERR_FORMAT, "brackets within each other");
    for (size_t n = 0; n < strlen(config) - 1; n++) { /* cut off anywhere: the last byte alone is a space */
        test_case("the first %d bytes", (int)n);
        spit(in_folder("llama", "config.json"), config, n);
        CHECK(te_hf_open(te, test_path("llama"), NULL) == NULL);
        CHECK_ERROR(te, TE_ERR_FORMAT, "config.json");
    }
    spit(in_folder("llama", "config.json"), "{}\0{}", 5);
    CHECK(te_hf_open(te, test_path("llama"), NULL) == NULL);
    CHECK_ERROR(te, TE_ERR_FORMAT, "byte 2 is 0");
}

/* LongRoPE by the formula of transformers: pair i turns by base^(-2i / d) / factor[i], of the short list up to the original context and of the long one beyond it, and cosine and sine are
 * multiplied by sqrt(1 + ln(factor) / ln(original)), factor being the key or else the quotient of both contexts. Lists that are alike for all pairs are a linear scaling. */
TE_TEST(hf_longrope) {
    static const struct {
        const char *longrope, *plain;
        int n; /* tokens */
    } cases[] = {{"\"original_max_position_embeddings\": 4, \"rope_scaling\": {\"type\": \"longrope\", \"factor\": 1, \"short_factor\": [2.5, 2.5], \"long_factor\": [4, 4]}",
                  "\"rope_scaling\": {\"type\": \"linear\", \"factor\": 2.5}", 4},
                 {"\"original_max_position_embeddings\": 4, \"rope_scaling\": {\"type\": \"longrope\", \"factor\": 1, \"short_factor\": [2.5, 2.5], \"long_factor\": [4, 4]}",
                  "\"rope_scaling\": {\"type\": \"linear\", \"factor\": 4}", 5},
                 /* base^(-2 / 4) = 1 / 100: divided by 2 it is that of a base four times as large, and the first pair's is 1 */
                 {"\"max_position_embeddings\": 9, \"rope_parameters\": {\"rope_type\": \"longrope\", \"rope_theta\": 10000, \"short_factor\": [1, 2], \"long_factor\": [4, 4]}",
                  "\"rope_parameters\": {\"rope_type\": \"default\", \"rope_theta\": 40000}", S},
                 {"\"max_position_embeddings\": 32, \"rope_parameters\": {\"rope_type\": \"longrope\", \"original_max_position_embeddings\": 4, \"short_factor\": [4, 4], \"long_factor\": [1, 1]}",
                  "\"rope_scaling\": {\"type\": \"yarn\", \"factor\": 1, \"original_max_position_embeddings\": 4, \"attention_factor\": 1.5811388300841898}", S}, /* sqrt(1 + ln 8 / ln 4) */
                 {"\"max_position_embeddings\": 99, \"rope_parameters\": {\"rope_type\": \"longrope\", \"factor\": 8, \"original_max_position_embeddings\": 4, \"short_factor\": [4, 4], \"long_factor\": [1, 1]}",
                  "\"rope_scaling\": {\"type\": \"yarn\", \"factor\": 1, \"original_max_position_embeddings\": 4, \"attention_factor\": 1.5811388300841898}", S}};
    te_ctx *te = test_context("cpu");
    make_folder(te, "llama");
    for (int i = 0; i < COUNT(cases); i++) {
        const float *got[2];
        test_case("%s", cases[i].longrope);
        for (int k = 0; k < 2; k++) {
            edit_config("llama", "\"rope_scaling\": null", k ? cases[i].plain : cases[i].longrope);
            te_module *m = te_hf_open(te, test_path("llama"), NULL);
            REQUIRE_OK(te);
            got[k] = test_copy(test_read(run(m, 0, cases[i].n, NULL)), cases[i].n * V);
            te_module_destroy(m);
        }
        CHECK_CLOSE("logits", got[0], got[1], cases[i].n * V, 1e-5, 1e-5);
    }
    CHECK_OK(te);
}

/* A Mistral's file without sliding_window has windows of 4096, and one with null has none. Its weights are named as those of a Llama. */
TE_TEST(hf_windows) {
    static const struct {
        const char *keys;
        int64_t window; /* 0: none */
    } cases[] = {{"", 4096},
                 {", \"sliding_window\": null", 0},
                 {", \"sliding_window\": 3", 3},
                 {", \"sliding_window\": 3, \"use_sliding_window\": false, \"max_window_layers\": 1", 3},
                 {", \"sliding_window\": 3, \"layer_types\": [\"sliding_attention\", \"sliding_attention\"]", 3},
                 {", \"sliding_window\": null, \"layer_types\": [\"full_attention\", \"full_attention\"]", 0}};
    te_ctx *te = test_context("cpu");
    make_folder(te, "llama");
    for (int i = 0; i < COUNT(cases); i++) {
        char text[256];
        test_case("mistral%s", cases[i].keys);
        snprintf(text, sizeof text, "\"mistral\"%s", cases[i].keys);
        edit_config("llama", "\"llama\"", text);
        te_module *m = te_hf_open(te, test_path("llama"), NULL);
        REQUIRE_OK(te);
        for (int layer = 0; layer < LAYERS; layer++) {
            char path[64];
            snprintf(path, sizeof path, "model.layers.%d.self_attn.sdpa", layer);
            const te_window *w = &((const te_sdpa_desc *)te_module_state(te_module_find(m, path)))->rule.window;
            CHECK_EQ_INT(w->on ? w->left + 1 : 0, cases[i].window);
        }
        te_module_destroy(m);
    }
    edit_config("llama", "\"llama\"", "\"mistral\", \"sliding_window\": 0");
    CHECK(te_hf_open(te, test_path("llama"), NULL) == NULL);
    CHECK_ERROR(te, TE_ERR_FORMAT, "sliding_window is 0; 1 to");
    edit_config("llama", "\"llama\"", "\"mistral\", \"layer_types\": [\"sliding_attention\", \"full_attention\"]");
    CHECK(te_hf_open(te, test_path("llama"), NULL) == NULL);
    CHECK_ERROR(te, TE_ERR_UNSUPPORTED, "layer_types[1] is \"full_attention\", and every layer of a mistral");
}

/* hidden_activation is a key of Gemma 2 and 3. */
TE_TEST(hf_activation_is_the_familys) {
    te_ctx *te = test_context("cpu");
    float *want = test_floats(S * V);
    make_folder(te, "llama");
    edit_config("llama", "\"silu\"", "\"silu\", \"hidden_activation\": \"relu\"");
    te_module *m = te_hf_open(te, test_path("llama"), NULL);
    REQUIRE_OK(te);
    expected(ids, S, want);
    CHECK_ERROR_BELOW("logits", test_read(run(m, 0, S, NULL)), want, S * V, 1e-6);
    te_module_destroy(m);
}

TE_TEST(hf_refuses_weights) {
    te_ctx *te = test_context("cpu");
    make_folder(te, "llama");
    const char *file = in_folder("llama", "model.safetensors");
    CHECK(te_hf_open(te, NULL, NULL) == NULL);
    CHECK_ERROR(te, TE_ERR_INVALID, "folder is NULL");
    CHECK(te_hf_open(te, test_path("nowhere"), NULL) == NULL);
    CHECK_ERROR(te, TE_ERR_IO, "nowhere/config.json");
    CHECK(te_hf_open(te, test_path("llama"), &(te_hf_desc){.params_dtype = TE_I32}) == NULL);
    CHECK_ERROR(te, TE_ERR_DTYPE, "params_dtype is i32");
    write_shard(te, file, 0, num_weights, 4);
    CHECK(te_hf_open(te, test_path("llama"), NULL) == NULL);
    CHECK_ERROR(te, TE_ERR_FORMAT, "model.safetensors has no tensor \"model.layers.0.self_attn.v_proj.weight\", which a llama of");
    add_weight("model.layers.0.self_attn.q_proj.bias", 16, 0);
    write_shard(te, file, 0, num_weights, -1);
    CHECK(te_hf_open(te, test_path("llama"), NULL) == NULL);
    CHECK_ERROR(te, TE_ERR_FORMAT, "tensor \"model.layers.0.self_attn.q_proj.bias\" has no place in the llama of");
    snprintf(weights[num_weights - 1].name, 80, "model.norm..weight"); /* no other name of model.norm.weight */
    write_shard(te, file, 0, num_weights, -1);
    CHECK(te_hf_open(te, test_path("llama"), NULL) == NULL);
    CHECK_ERROR(te, TE_ERR_FORMAT, "tensor \"model.norm..weight\" has no place in the llama of");
    /* Buffers that old files have beside weights are ignored; a tied model has no use for lm_head. */
    snprintf(weights[num_weights - 1].name, 80, "model.layers.0.self_attn.rotary_emb.inv_freq");
    edit_config("llama", "\"tie_word_embeddings\": false", "\"tie_word_embeddings\": true");
    weight *table = &weights[0], *head = &weights[num_weights - 2];
    write_shard(te, file, 0, num_weights, -1);
    CHECK(te_hf_open(te, test_path("llama"), NULL) == NULL);
    CHECK_ERROR(te, TE_ERR_FORMAT, "model.safetensors: tensor \"lm_head.weight\" differs from \"model.embed_tokens.weight\" at byte 0, and by ");
    memcpy(head->values, table->values, V * D * 4);
    head->values[V * D - 1] = -head->values[V * D - 1]; /* one bit, in the last byte */
    write_shard(te, file, 0, num_weights, -1);
    CHECK(te_hf_open(te, test_path("llama"), NULL) == NULL);
    CHECK_ERROR(te, TE_ERR_FORMAT, "at byte 351, and by ");
    head->values[V * D - 1] = table->values[V * D - 1];
    head->rows = V - 1;
    write_shard(te, file, 0, num_weights, -1);
    CHECK(te_hf_open(te, test_path("llama"), NULL) == NULL);
    CHECK_ERROR(te, TE_ERR_FORMAT, "tensor \"lm_head.weight\" is f32 [10, 8] and \"model.embed_tokens.weight\" f32 [11, 8], and by ");
    head->rows = V;
    write_shard(te, file, 0, num_weights, -1);
    te_module *m = te_hf_open(te, test_path("llama"), NULL);
    CHECK_OK(te);
    CHECK(m && !te_module_find(m, "lm_head"));
    te_module_destroy(m);
    CHECK(te_hf_open(te, test_path("llama"), &(te_hf_desc){.quantized_lm_head = true}) == NULL);
    CHECK_ERROR(te, TE_ERR_INVALID, "config.json: tie_word_embeddings is true, or the default of the model");
    remove(file);
    CHECK(te_hf_open(te, test_path("llama"), NULL) == NULL);
    CHECK_ERROR(te, TE_ERR_IO, "model.safetensors");
    /* Pickled weights alone: the line that converts them. */
    static const char *const pickles[] = {"pytorch_model.bin.index.json", "pytorch_model.bin"};
    for (int i = 0; i < COUNT(pickles); i++) {
        char line[1200];
        spit_text(in_folder("llama", pickles[i]), "PK");
        snprintf(line, sizeof line, "AutoModelForCausalLM.from_pretrained(\"%s\", dtype=\"auto\").save_pretrained(\"%s\")", test_path("llama"), test_path("llama"));
        CHECK(te_hf_open(te, test_path("llama"), NULL) == NULL);
        CHECK_MSG(strstr(te_error(te), pickles[i]) && strstr(te_error(te), line), "it says: %s", te_error(te));
        CHECK_ERROR(te, TE_ERR_UNSUPPORTED, pickles[i]);
    }
    write_shard(te, file, 0, num_weights, -1);
    m = te_hf_open(te, test_path("llama"), NULL); /* safetensors beside them are read, as transformers chooses */
    CHECK_OK(te);
    te_module_destroy(m);
}

/* Relatives of the families that are there, by their model_type whatever else their config.json has, and what opens in their place. */
TE_TEST(hf_refuses_relatives) {
    static const struct {
        const char *text, *says[3];
    } cases[] = {
        {"{\"model_type\": \"llama4\", \"text_config\": {\"model_type\": \"llama4_text\", \"layer_types\": [\"chunked_attention\"]}}",
         {"model_type is \"llama4\", Llama 4 with vision", "llama, mistral,", "1 to 3 open (llama)"}},
        {"{\"layer_types\": [\"chunked_attention\", \"full_attention\"], \"model_type\": \"llama4_text\"}", {"model_type is \"llama4_text\", Llama 4 with chunked", "llama, mistral,", "1 to 3 open"}},
        {"{\"layer_types\": [\"full_attention\", \"chunked_attention\", \"x\"], \"model_type\": \"qwen3\"}", {"layer_types[1] is \"chunked_attention\"; full_attention and", "possible", ""}}};
    te_ctx *te = test_context("cpu");
    make_folder(te, "llama");
    for (int i = 0; i < COUNT(cases); i++) {
        spit_text(in_folder("llama", "config.json"), cases[i].text);
        CHECK(te_hf_open(te, test_path("llama"), NULL) == NULL);
        for (int k = 0; k < 3; k++) CHECK_MSG(strstr(te_error(te), cases[i].says[k]), "it says: %s", te_error(te));
        CHECK_ERROR(te, TE_ERR_UNSUPPORTED, "config.json");
    }
}

/* Three changed bytes of config.json: the model opens, or there is an error; nothing else. */
TE_TEST(hf_survives_damage) {
    enum { ROUNDS = 600 };
    te_ctx *te = test_context("cpu");
    const int n = (int)strlen(config);
    int64_t *at = test_integers(3 * ROUNDS, 1, 0, n), *value = test_integers(3 * ROUNDS, 2, 0, 256);
    static const char tokens[] = "{}[]\",:\\0129u-.enft";
    char *copy = (char *)test_alloc(sizeof config);
    int opened = 0;
    make_folder(te, "llama");
    for (int i = 0; i < ROUNDS; i += test_every(5)) {
        memcpy(copy, config, sizeof config);
        for (int k = 3 * i; k < 3 * i + 1 + i % 3; k++) copy[at[k]] = (char)(i % 2 ? value[k] : tokens[value[k] % (int)(sizeof tokens - 1)]);
        spit(in_folder("llama", "config.json"), copy, (size_t)n);
        test_case("%s", copy);
        te_module *m = te_hf_open(te, test_path("llama"), NULL);
        CHECK((m == NULL) == !te_ok(te));
        opened += m != NULL;
        te_module_destroy(m);
        te_clear_error(te);
    }
    CHECK_MSG(opened > ROUNDS / 50 / test_every(5), "%d of %d opened: every change was fatal", opened, ROUNDS);
}

/* Every request for memory in turn is refused: opening, running with a cache, writing. Nothing is lost, the folder that is written is whole or is not there, and the context goes on. */
TE_TEST(hf_memory_runs_out) {
    purse *host = new_purse();
    te_ctx_desc desc = purse_desc(host, NULL);
    make_folder(test_context("cpu"), "llama");
    spit_text(in_folder("llama", "tokenizer.json"), "{}");
    spit_text(in_folder("llama", "merges.txt"), "a b");
    te_ctx *te = test_context_with(&desc);
    bool whole = false;
    for (int64_t n = 1; !whole; n += test_every_of(17, 4)) {
        test_case("request %lld", (long long)n);
        te_module *m = NULL;
        te_kv_cache *c = NULL;
        te_scope_begin(te);
        te_no_grad_begin(te);
        host->calls = host->refused = 0;
        host->fail_at = n;
        m = te_hf_open(te, test_path("llama"), &(te_hf_desc){.params_dtype = TE_BF16});
        c = te_kv_cache_create(m, 1, S);
        te_tensor *y = run(m, 0, S, c);
        te_result saved = te_hf_save(m, test_path("written"));
        host->fail_at = 0;
        whole = host->refused == 0;
        CHECK(te_ok(te) == (m && c && y && saved == TE_OK) && (te_ok(te) || !whole)); /* the pool gives back what it keeps, and asks once more */
        if (!te_ok(te)) CHECK_EQ_INT(te_error_code(te), TE_ERR_OUT_OF_MEMORY);
        te_no_grad_end(te);
        te_scope_end(te);
        te_kv_cache_destroy(c);
        te_module_destroy(m);
        te_clear_error(te);
        REQUIRE(n < 100000);
    }
    te_module *m = te_hf_open(te, test_path("written"), NULL);
    CHECK_OK(te);
    te_module_destroy(m);
}
