/* test_te_automodel.c: the command, on a folder that is written here: its tree, counters, dry run, backends that it cannot give, and options that cannot be. */
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
    char words[512], *argv[20], program[] = "te_automodel", device[] = "--device", cpu[] = "cpu";
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

TE_TEST(automodel_applies_and_counts) {
    const char *folder = write_folder("llama", false), *text = said(0, folder, "--backend attn=te,linear=te --cast bf16 --tokens 5");
    CHECK_STR(text, "attn=te");
    CHECK_STR(text, "attention: 2 modules injected, 0 left alone");
    CHECK_STR(text, "te: 4 heads, 2 of keys and values, 8 channels, scale 0.353553");
    CHECK_STR(text, "one forward pass of 5 tokens: bf16 [1, 5, 19]");
    CHECK_EQ_INT(count_of(text, "te_hits 1, fallback_mask 0, fallback_scale_mismatch 0, fallback_other 0"), 2);
    CHECK(strstr(text, "model.layers.0.self_attn.q_proj") && strstr(text, "bf16 [32, 16]") && !strstr(text, "f32 ["));
    text = said(0, folder, "--backend attn=te,linear=te,te_fp8=current --cast bf16"); /* products in FP8 */
    CHECK_STR(text, "te_fp8=current");
    CHECK_EQ_INT(count_of(text, "te_hits 1,"), 2);
    text = said(0, folder, "--describe --backend linear=torch,attn=sdpa");
    CHECK(strstr(text, "torch\n") && strstr(text, "sdpa\n") && !strstr(text, "one forward pass") && strstr(text, "f32 [32, 16]") && !strstr(text, "injected"));
    CHECK_STR(said(0, folder, ""), "one forward pass of 16 tokens: f32 [1, 16, 19]");
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
    CHECK_STR(said(2, folder, "--cast e4m3"), "--cast e4m3; f32, f16 and bf16 are possible");
    CHECK_STR(said(2, folder, "--tokens many"), "--tokens many; a number from 1 to 1048576");
    CHECK_STR(said(2, folder, "--inkect"), "--inkect is no option");
    CHECK_STR(said(2, folder, "another"), "another: one folder is needed");
    CHECK_STR(said(2, NULL, "x --cast"), "--cast needs a value");
    CHECK_STR(said(1, folder, "--backend attn=tee"), "tee");
    CHECK_STR(said(1, folder, "--backend attn=te,rms_norm=torch,fake_balanced_gate=true"), "--backend rms_norm=torch,fake_balanced_gate=true: an open model has its modules");
    CHECK_STR(said(1, test_path("nowhere"), "--describe"), "nowhere");
}
