/* test_te_automodel.c: the command, on a folder that is written here: its help, tree, counters, adapters, what it writes, its dry run, backends that it cannot give, and options that cannot be. */
#define _POSIX_C_SOURCE 200809L
#include "../te_test.h"
#define TE_AUTOMODEL_IN_A_TEST
#include "../../tools/te_automodel.c"

#include <sys/stat.h>

/* All tensors of a model, for a file. */
typedef struct items {
    te_safetensors_item list[64];
    char names[64][96];
    int n;
} items;
static bool add_item(void *user, te_module *m, const char *path, te_tensor *x, te_entry_kind kind) {
    items *all = (items *)user;
    (void)m, (void)kind;
    if (all->n == COUNT(all->list)) return false;
    snprintf(all->names[all->n], sizeof all->names[0], "%s", path);
    all->list[all->n] = (te_safetensors_item){.name = all->names[all->n], .tensor = x};
    all->n++;
    return true;
}
/* A Llama of two layers, or a Gemma 3 whose first layer has a window. */
static const char *write_folder(const char *name, bool gemma) {
    static const char llama[] =
        "{\"model_type\": \"llama\", \"vocab_size\": 19, \"hidden_size\": 16, \"intermediate_size\": 24, \"num_hidden_layers\": 2, \"num_attention_heads\": 4, \"num_key_value_heads\": 2, "
        "\"head_dim\": 8, \"rms_norm_eps\": 1e-05, \"rope_theta\": 500.0, \"hidden_act\": \"silu\", \"tie_word_embeddings\": false, \"attention_bias\": false, \"rope_scaling\": null}";
    static const char gemma2[] =
        "{\"model_type\": \"gemma2\", \"vocab_size\": 19, \"hidden_size\": 16, \"intermediate_size\": 24, \"num_hidden_layers\": 2, \"num_attention_heads\": 4, \"num_key_value_heads\": 2, "
        "\"head_dim\": 8, \"rms_norm_eps\": 1e-06, \"rope_theta\": 500.0, \"hidden_activation\": \"gelu_pytorch_tanh\", \"attention_bias\": false, \"sliding_window\": 4, "
        "\"query_pre_attn_scalar\": 8, \"attn_logit_softcapping\": 50.0, \"final_logit_softcapping\": 30.0, \"layer_types\": [\"sliding_attention\", \"full_attention\"], "
        "\"tie_word_embeddings\": true}";
    te_ctx *te = test_context("cpu");
    te_causal_lm_desc d = {.vocab_size = 19, .hidden_size = 16, .intermediate_size = 24, .num_hidden_layers = 2, .num_attention_heads = 4, .num_key_value_heads = 2, .head_dim = 8,
                           .params_dtype = TE_F32, .feedforward_norms = gemma, .tie_word_embeddings = gemma, .zero_centered_gamma = gemma, .activation = gemma ? TE_GEGLU : TE_SWIGLU};
    te_module *m = te_causal_lm_create(te, &d);
    items *all = (items *)test_alloc(sizeof *all);
    char path[700], *folder = (char *)test_alloc(600);
    snprintf(folder, 600, "%s", test_path(name));
    CHECK(mkdir(folder, 0700) == 0);
    CHECK(te_module_visit_tensors(m, add_item, all));
    snprintf(path, sizeof path, "%s/model.safetensors", folder);
    te_safetensors_write(te, path, all->list, all->n, NULL, 0);
    CHECK_OK(te);
    snprintf(path, sizeof path, "%s/config.json", folder);
    FILE *f = fopen(path, "wb");
    CHECK(f && fputs(gemma ? gemma2 : llama, f) >= 0);
    if (f) fclose(f);
    te_module_destroy(m);
    return folder;
}

/* Runs the command with the words of `line` behind the folder, and gives what it said. */
static const char *said(int want, const char *folder, const char *line) {
    static char text[16384];
    char words[2400], *argv[24], program[] = "te_automodel", device[] = "--device", cpu[] = "cpu";
    int argc = 0;
    snprintf(words, sizeof words, "%s", line);
    argv[argc++] = program;
    if (folder) argv[argc++] = (char *)(uintptr_t)folder;
    for (char *w = strtok(words, " "); w; w = strtok(NULL, " ")) argv[argc++] = w;
    if (folder) {
        argv[argc++] = device;
        argv[argc++] = cpu;
    }
    FILE *out = fopen(test_path("said"), "w+b");
    const int status = out ? automodel(argc, argv, out) : -1;
    CHECK_MSG(status == want, "te_automodel %s: status %d, not %d", line, status, want);
    size_t n = 0;
    if (out) {
        rewind(out);
        n = fread(text, 1, sizeof text - 1, out);
        fclose(out);
    }
    text[n] = 0;
    return text;
}
static int count_of(const char *text, const char *needle) {
    int n = 0;
    for (; (text = strstr(text, needle)) != NULL; text++) n++;
    return n;
}

/* Running says what the pass gave and what each attention did in it; describing lists the modules. */
TE_TEST(automodel_applies_and_counts) {
    const char *folder = write_folder("llama", false), *text = said(0, folder, "--backend attn=te,linear=te --cast bf16 --tokens 5");
    CHECK_STR(text, "attn=te");
    CHECK_STR(text, "attention: 2 modules injected, 0 left alone");
    CHECK_STR(text, "te: 4 heads, 2 of keys and values, 8 channels, scale 0.353553");
    CHECK_STR(text, ", run\n\none forward pass of 5 tokens: bf16 [1, 5, 19]");
    CHECK_STR(text, "logits of the last token: 19 of 19 are finite; the largest is");
    CHECK_EQ_INT(count_of(text, "te_hits 1, fallback_mask 0, fallback_scale_mismatch 0, fallback_other 0"), 2);
    CHECK(strstr(text, "model.layers.0.self_attn ") && !strstr(text, "q_proj") && !strstr(text, "MODULE") && !strstr(text, "described"));
    text = said(0, folder, "--describe --backend attn=te,linear=te --cast bf16");
    CHECK_STR(text, ", described: nothing has run\n\nMODULE ");
    CHECK_STR(text, "te: 4 heads, 2 of keys and values, 8 channels, scale 0.353553");
    CHECK(strstr(text, "model.layers.0.self_attn.q_proj") && strstr(text, "bf16 [32, 16]") && !strstr(text, "f32 [") && !strstr(text, "te_hits") && !strstr(text, "forward pass"));
    CHECK_STR(text, " modules, 6064 parameters, 12128 bytes\n");
    text = said(0, folder, "--backend attn=te,linear=te,te_fp8=current --cast bf16"); /* products in FP8 */
    CHECK_STR(text, "te_fp8=current");
    CHECK_EQ_INT(count_of(text, "te_hits 1,"), 2);
    text = said(0, folder, "--describe --backend linear=torch,attn=sdpa,cuda_graph=");
    CHECK(strstr(text, "torch\n") && strstr(text, "sdpa\n") && !strstr(text, "one forward pass") && strstr(text, "f32 [32, 16]") && !strstr(text, "injected"));
    text = said(0, folder, "");
    CHECK_STR(text, "one forward pass of 16 tokens: f32 [1, 16, 19]");
    CHECK_EQ_INT(count_of(text, " sdpa\n"), 2);
}

/* All options with all of their values, of which each one works. */
TE_TEST(automodel_help) {
    const char *folder = write_folder("llama", false);
    char help[8192], line[300], values[200];
    snprintf(help, sizeof help, "%s", said(0, NULL, "--help"));
    CHECK_STR(help, "usage: te_automodel FOLDER [options]");
    for (int i = 0; i < OPTIONS; i++) {
        snprintf(line, sizeof line, "\n  %s ", all_options[i].name);
        CHECK_STR(help, line);
    }
    CHECK_STR(help, "te_cast_model_to_dtype: f32, f16, bf16\n");
    CHECK_STR(help, "ids in the forward pass: 1 to 1048576; left out: 16\n");
    CHECK_STR(said(0, NULL, "nowhere --help --cast bogus"), "usage: te_automodel FOLDER [options]");
    int words = 0;
    for (int i = 0; i < POSSIBLE; i++) {
        if (!begins_field(i)) continue;
        field_values(i, values, sizeof values);
        snprintf(line, sizeof line, " %s: %s\n", possible[i].field, values);
        CHECK_STR(help, line);
        for (const char *v = values; *v; words++) {
            const size_t n = strcspn(v, ",");
            snprintf(line, sizeof line, "--dry-run --backend %s=%.*s%s", possible[i].field, (int)n, v, strcmp(possible[i].field, "te_fp8") == 0 ? ",linear=te" : "");
            said(0, folder, line);
            v += n + (v[n] ? 2 : 0);
        }
    }
    CHECK_EQ_INT(words, 11);
    for (int i = 0; i < FORMATS; i++) {
        snprintf(line, sizeof line, "--describe --cast %s", te_dtype_name(formats[i]));
        snprintf(values, sizeof values, "%s [32, 16]", te_dtype_name(formats[i]));
        CHECK_STR(said(0, folder, line), values);
    }
}

/* Are two models the same, by name, format and bits? */
static bool alike(te_module *a, te_module *b) {
    items *x = (items *)test_alloc(sizeof *x), *y = (items *)test_alloc(sizeof *y);
    bool same = te_module_visit_tensors(a, add_item, x) && te_module_visit_tensors(b, add_item, y) && x->n == y->n;
    for (int i = 0; i < x->n && same; i++) {
        te_tensor *p = (te_tensor *)(uintptr_t)x->list[i].tensor, *q = (te_tensor *)(uintptr_t)y->list[i].tensor;
        same = strcmp(x->names[i], y->names[i]) == 0 && te_tensor_dtype(p) == te_tensor_dtype(q) && te_tensor_numel(p) == te_tensor_numel(q) &&
               memcmp(test_read(p), test_read(q), (size_t)te_tensor_numel(p) * sizeof(float)) == 0;
    }
    return same;
}
/* Adapters that are made, written, read and merged, and folders that are written, are what the functions give. */
TE_TEST(automodel_adapters_and_folders) {
    te_ctx *te = test_context("cpu");
    const char *folder = write_folder("llama", false), *text;
    char fresh[700], trained[700], merged[700], cast[700], line[2400];
    snprintf(fresh, sizeof fresh, "%s", test_path("fresh"));
    snprintf(trained, sizeof trained, "%s", test_path("trained"));
    snprintf(merged, sizeof merged, "%s", test_path("merged"));
    snprintf(cast, sizeof cast, "%s", test_path("cast"));

    snprintf(line, sizeof line, "--lora q_proj,*.v_proj --lora-dim 3 --lora-alpha 6 --cast bf16 --lora-save %s --describe", fresh);
    text = said(0, folder, line);
    CHECK_STR(text, "adapters: 4 modules have some, which are new\nadapters written to ");
    CHECK_EQ_INT(count_of(text, ", adapters of rank 3\n"), 4);
    CHECK_EQ_INT(count_of(text, "bf16 [3, 16]"), 4);
    te_module *m = te_hf_open(te, folder, NULL), *other;
    CHECK_EQ_INT(te_lora_load(m, fresh), TE_OK);
    CHECK(te_module_find(m, "model.layers.1.self_attn.v_proj.lora_A") && !te_module_find(m, "model.layers.1.self_attn.k_proj.lora_A"));
    /* as if they had been trained */
    for (int i = 0; i < 4; i++) {
        char path[100];
        snprintf(path, sizeof path, "model.layers.%d.self_attn.%c_proj.lora_B", i / 2, i % 2 ? 'v' : 'q');
        te_tensor *b = te_module_parameter(te_module_find(m, path), "weight");
        REQUIRE(b);
        te_tensor_copy(b, test_tensor(te, TE_F32, te_tensor_ndim(b), te_tensor_shape(b), test_normal(te_tensor_numel(b), 7 + i)));
    }
    CHECK(te_lora_save(m, trained) == TE_OK && te_lora_merge(m) == TE_OK && te_cast_model_to_dtype(m, NULL) == TE_OK);
    snprintf(line, sizeof line, "--save %s --lora-merge --cast bf16 --lora-load %s --tokens 3", merged, trained);
    text = said(0, folder, line);
    CHECK_STR(text, "adapters: 4 modules have some\nadapters of 4 modules merged\nmodel written to ");
    CHECK_STR(text, "one forward pass of 3 tokens: bf16 [1, 3, 19]");
    other = te_hf_open(te, merged, NULL);
    CHECK(alike(m, other));
    te_module_destroy(m), te_module_destroy(other);

    snprintf(line, sizeof line, "--cast f16 --save %s --describe", cast);
    said(0, folder, line);
    m = te_hf_open(te, folder, NULL), other = te_hf_open(te, cast, NULL);
    CHECK(te_cast_model_to_dtype(m, &(te_cast_model_desc){.dtype = TE_F16}) == TE_OK && alike(m, other));
    te_module_destroy(m), te_module_destroy(other);

    snprintf(line, sizeof line, "--dry-run --lora-load %s --lora-merge --cast bf16 --save %s-not --lora-save %s-not", trained, merged, trained);
    text = said(0, folder, line);
    CHECK_STR(text, "a dry run: nothing has run, nothing is written");
    CHECK_STR(text, "lora    model.layers.1.self_attn.q_proj: rank 3, merged\n");
    CHECK_EQ_INT(count_of(text, "\nlora    "), 4);
    CHECK_EQ_INT(count_of(text, "\ncast    "), 21);
    CHECK_EQ_INT(count_of(text, "\nwrite   "), 2);
    CHECK_STR(text, "27 changes would be made; parameters: 24256 bytes now, 12128 then");
    struct stat there;
    snprintf(line, sizeof line, "%s-not", merged);
    CHECK(stat(line, &there) != 0);
    CHECK_STR(said(0, folder, "--dry-run --lora *_proj"), "lora    model.layers.0.mlp.down_proj: rank 8\n");
    text = said(0, folder, "--dry-run --lora *[q,v]_proj,o_proj --lora-dim 3");
    CHECK_EQ_INT(count_of(text, "\nlora    "), 6);
    CHECK_STR(text, "lora    model.layers.1.self_attn.v_proj: rank 3\n");
    text = said(0, folder, "--dry-run --lora embed_tokens,lm_head --lora-dim 3");
    CHECK_STR(text, "lora    model.embed_tokens: rank 3\n");
    CHECK_STR(text, "lora    lm_head: rank 3\n");
    CHECK_OK(te);
    CHECK_STR(said(1, folder, "--lora nothing"), "te_automodel: te_lora_apply");
    CHECK_STR(said(1, folder, "--lora-load nowhere"), "te_automodel: ");
}

/* The changes to come, one by one; the folder stays as it is under all options. */
TE_TEST(automodel_dry_run) {
    const char *folder = write_folder("llama", false), *text = said(0, folder, "--dry-run --inject --cast bf16 --backend linear=torch");
    char weights[700];
    size_t before, after;
    snprintf(weights, sizeof weights, "%s/model.safetensors", folder);
    const uint8_t *bytes = test_read_file(weights, &before);
    CHECK_STR(text, "inject  model.layers.0.self_attn\n");
    CHECK_STR(text, "inject  model.layers.1.self_attn\n");
    CHECK_STR(text, "cast    model.layers.1.mlp.down_proj.weight: f32 -> bf16\n");
    CHECK_STR(text, "linear  lm_head: te -> torch\n");
    CHECK_EQ_INT(count_of(text, "cast    "), 21);
    CHECK_EQ_INT(count_of(text, "linear  "), 15);
    CHECK_STR(text, "38 changes would be made; parameters: 24256 bytes now, 12128 then");
    CHECK(!strstr(text, "one forward pass"));
    said(0, folder, "--inject --cast bf16 --backend linear=torch");
    const uint8_t *again = test_read_file(weights, &after);
    CHECK(before == after && memcmp(bytes, again, before) == 0);
    CHECK_STR(said(0, folder, "--dry-run"), "0 changes would be made");
    folder = write_folder("gemma", true);
    text = said(0, folder, "--dry-run --inject");
    CHECK_EQ_INT(count_of(text, "leave   model.layers."), 2);
    CHECK_STR(text, "model.layers.0.self_attn: its sdpa caps scores");
}

TE_TEST(automodel_refusals) {
    const char *folder = write_folder("llama", false);
    CHECK_STR(said(2, NULL, ""), "usage: te_automodel FOLDER");
    CHECK_STR(said(2, folder, "--cast e4m3"), "--cast e4m3; f32, f16, bf16 are possible");
    CHECK_STR(said(2, folder, "--tokens many"), "--tokens many; a number is needed, 1 to 1048576; left out: 16");
    CHECK_STR(said(2, folder, "--tokens 0"), "--tokens 0; a number is needed");
    CHECK_STR(said(2, folder, "--lora q_proj --lora-dim 3x"), "--lora-dim 3x; a number is needed, 1 to 65536");
    CHECK_STR(said(2, folder, "--lora q_proj --lora-alpha nan"), "--lora-alpha nan; a number that is not 0 is needed");
    CHECK_STR(said(2, folder, "--lora q_proj --lora-load x"), "--lora and --lora-load exclude each other");
    CHECK_STR(said(2, folder, "--lora-dim 3"), "--lora-dim and --lora-alpha belong to --lora");
    CHECK_STR(said(2, folder, "--lora-merge"), "--lora-merge and --lora-save need adapters");
    CHECK_STR(said(2, folder, "--lora q_proj --save x"), "--save writes a model without adapters: add --lora-merge");
    CHECK_STR(said(2, folder, "--describe --dry-run"), "--describe and --dry-run exclude each other");
    CHECK_STR(said(2, folder, "--inkect"), "--inkect is no option");
    CHECK_STR(said(2, folder, "another"), "another: one folder is needed");
    CHECK_STR(said(2, NULL, "x --cast"), "--cast needs a value");
    CHECK_STR(said(1, folder, "--backend attn=tee"), "tee");
    CHECK_STR(said(1, folder, "--backend attn=te,rms_norm=torch,fake_balanced_gate=true"), "--backend rms_norm=torch,fake_balanced_gate=true: an open model has its modules; attn (te, sdpa), linear (te, torch), rms_norm (te, torch_fp32), experts (torch_mm), dispatcher (torch), te_fp8 (current, block, mxfp8) can be said");
    CHECK_STR(said(1, test_path("nowhere"), "--describe"), "nowhere");
}
