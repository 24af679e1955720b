/* test_lora.c: LoRA: the formula, which modules are chosen, training of a model from a folder under every recipe, merging, peft's folders, ranks, and what is refused. */
#include "../dist/ranks.h"

#include <sys/stat.h>

enum { LO_V = 32, LO_D = 64, LO_F = 96, LO_B = 2, LO_S = 8, LO_N = LO_B * LO_S, LO_STEPS = 6 };

/* ---- a folder of transformers ---- */

static const char lora_config[] =
    "{\"architectures\": [\"LlamaForCausalLM\"], \"model_type\": \"llama\", \"vocab_size\": 32, \"hidden_size\": 64, \"intermediate_size\": 96, \"num_hidden_layers\": 2,\n"
    " \"num_attention_heads\": 4, \"num_key_value_heads\": 2, \"rms_norm_eps\": 1e-05, \"hidden_act\": \"silu\", \"tie_word_embeddings\": false}\n";

static bool lora_list_weight(void *user, te_module *m, const char *path, te_tensor *x, te_entry_kind kind) {
    te_safetensors_item **at = (te_safetensors_item **)user;
    char *name = (char *)test_alloc(128);
    (void)m, (void)kind;
    snprintf(name, 128, "%s", path);
    *(*at)++ = (te_safetensors_item){name, x};
    return true;
}
static const char *lora_path(const char *folder, const char *name) {
    char *path = (char *)test_alloc(512);
    snprintf(path, 512, "%s/%s", test_path(folder), name);
    return path;
}
static void lora_spit(const char *path, const char *text) {
    FILE *f = fopen(path, "wb");
    REQUIRE(f);
    CHECK(fwrite(text, 1, strlen(text), f) == strlen(text));
    fclose(f);
}
static void lora_make_folder(te_ctx *te, te_dtype dtype) {
    te_causal_lm_desc d = {.vocab_size = LO_V, .hidden_size = LO_D, .intermediate_size = LO_F, .num_hidden_layers = 2, .num_attention_heads = 4, .num_key_value_heads = 2,
                           .params_dtype = dtype, .init.std = 0.15f};
    te_safetensors_item items[64], *end = items;
    te_seed(te, 3);
    te_module *m = te_causal_lm_create(te, &d);
    te_module_visit_tensors(m, lora_list_weight, &end);
    mkdir(test_path("base"), 0700);
    lora_spit(lora_path("base", "config.json"), lora_config);
    te_safetensors_write(te, lora_path("base", "model.safetensors"), items, (int)(end - items), NULL, 0);
    te_module_destroy(m);
    REQUIRE_OK(te);
}
static te_module *lora_open(te_ctx *te, te_dtype dtype, const te_recipe *stored) {
    te_quantized_model_init_desc d = {.recipe = stored};
    if (stored) te_quantized_model_init_begin(te, &d);
    te_module *m = te_hf_open(te, test_path("base"), &(te_hf_desc){.params_dtype = dtype});
    if (stored) te_quantized_model_init_end(te);
    return m;
}

/* ---- running ---- */

static const te_recipe *lora_recipe; /* of forward passes; NULL: high precision */
static te_tensor *lora_logits(te_module *m) {
    te_ctx *te = te_module_ctx(m);
    int32_t ids[LO_N];
    for (int i = 0; i < LO_N; i++) ids[i] = i * 7 % LO_V;
    if (lora_recipe) te_autocast_begin(te, &(te_autocast_desc){.recipe = lora_recipe});
    te_tensor *y = te_forward(m, te_tensor_from_host(te, TE_I32, SHAPE(LO_B, LO_S), ids));
    if (lora_recipe) te_autocast_end(te);
    return y;
}
static float lora_step(te_module *m, te_optimizer *adam) {
    te_ctx *te = te_module_ctx(m);
    int32_t targets[LO_N];
    for (int i = 0; i < LO_N; i++) targets[i] = (i * i + 3) % LO_V;
    te_scope_begin(te);
    te_tensor *loss = te_cross_entropy(lora_logits(m), te_tensor_from_host(te, TE_I32, SHAPE(LO_B, LO_S), targets), NULL);
    float value = (float)te_tensor_item(loss);
    te_backward(loss);
    te_optimizer_step(adam);
    te_scope_end(te);
    return value;
}
/* The bytes of all parameters but adapters. Of quantized ones those of their decoded values. */
static bool lora_hash_base(void *user, te_module *m, const char *path, te_tensor *x, te_entry_kind kind) {
    uint64_t *hash = (uint64_t *)user;
    if (kind != TE_ENTRY_PARAMETER || strstr(path, "lora_")) return true;
    te_scope_begin(te_module_ctx(m));
    te_tensor *plain = te_tensor_is_quantized(x) ? te_dequantize(x, TE_F32) : x;
    size_t n = te_tensor_bytes(plain);
    uint8_t *bytes = (uint8_t *)malloc(n);
    te_tensor_to_host(plain, bytes);
    for (size_t i = 0; i < n; i++) *hash = (*hash ^ bytes[i]) * 1099511628211u;
    free(bytes);
    te_scope_end(te_module_ctx(m));
    return true;
}
static uint64_t lora_base_hash(te_module *m) {
    uint64_t hash = 14695981039346656037u;
    te_module_visit_tensors(m, lora_hash_base, &hash);
    return hash;
}
/* Adapters that do something. */
static bool lora_fill_adapter(void *user, te_module *m, const char *path, te_tensor *x, te_entry_kind kind) {
    (void)m, (void)kind;
    if (strstr(path, "lora_B")) te_tensor_copy(x, te_tensor_normal(te_tensor_ctx(x), te_tensor_dtype(x), te_tensor_ndim(x), te_tensor_shape(x), 0, *(float *)user));
    return true;
}
static void lora_fill(te_module *m, float std) { te_module_visit_tensors(m, lora_fill_adapter, &std); }

/* ---- the formula ---- */

TE_TEST_DEVICES(lora_formula) {
    enum { IN = 6, OUT = 5, R = 3, ROWS = 4 };
    te_module *m = te_linear_create(te, &(te_linear_desc){.in_features = IN, .out_features = OUT, .gemm.params_dtype = TE_F32});
    float *x = test_normal(ROWS * IN, 1), *b = test_normal(OUT * R, 2), *dy = test_normal(ROWS * OUT, 3), *bias = test_normal(OUT, 4);
    float *y = test_floats(ROWS * OUT), *da = test_floats(R * IN), *db = test_floats(OUT * R), *dx = test_floats(ROWS * IN);
    te_tensor *input = te_tensor_set_requires_grad(test_tensor(te, TE_F32, SHAPE(ROWS, IN), x), true);
    int n = 0;
    te_tensor_copy(te_module_parameter(m, "bias"), test_tensor(te, TE_F32, SHAPE(OUT), bias));
    const float *before = test_read(te_forward(m, input));
    CHECK_EQ_INT(te_lora_apply(m, &(te_lora_desc){.match_all_linear = true, .dim = R, .alpha = 6}, &n), TE_OK);
    CHECK_EQ_INT(n, 1);
    CHECK_BYTES("with B = 0", test_read(te_forward(m, input)), before, ROWS * OUT * sizeof(float));
    te_tensor *a_weight = te_module_parameter(te_module_find(m, "lora_A"), "weight"), *b_weight = te_module_parameter(te_module_find(m, "lora_B"), "weight");
    CHECK(te_tensor_shape(a_weight)[0] == R && te_tensor_shape(a_weight)[1] == IN && te_tensor_shape(b_weight)[0] == OUT && te_tensor_shape(b_weight)[1] == R);
    te_tensor_copy(b_weight, test_tensor(te, TE_F32, SHAPE(OUT, R), b));
    const float *a = test_read(a_weight), *w = test_read(te_module_parameter(m, "weight"));
    for (int r = 0; r < ROWS; r++) {
        double down[R] = {0}, up[R] = {0}; /* A x, and B^T dy */
        for (int k = 0; k < R; k++) {
            for (int i = 0; i < IN; i++) down[k] += (double)a[k * IN + i] * x[r * IN + i];
            for (int o = 0; o < OUT; o++) up[k] += (double)b[o * R + k] * dy[r * OUT + o];
        }
        for (int o = 0; o < OUT; o++) {
            double sum = bias[o];
            for (int i = 0; i < IN; i++) sum += (double)w[o * IN + i] * x[r * IN + i];
            for (int k = 0; k < R; k++) {
                sum += 2 * (double)b[o * R + k] * down[k];
                db[o * R + k] += (float)(2 * dy[r * OUT + o] * down[k]);
            }
            y[r * OUT + o] = (float)sum;
        }
        for (int i = 0; i < IN; i++) {
            double sum = 0;
            for (int o = 0; o < OUT; o++) sum += (double)w[o * IN + i] * dy[r * OUT + o];
            for (int k = 0; k < R; k++) {
                sum += 2 * (double)a[k * IN + i] * up[k];
                da[k * IN + i] += (float)(2 * up[k] * x[r * IN + i]);
            }
            dx[r * IN + i] = (float)sum;
        }
    }
    te_tensor *out = te_forward(m, input);
    const double limit = te_ctx_is_cuda(te) ? 5e-3 : 1e-6; /* sums of a few numbers; on CUDA products of f32 have 10 bits of mantissa (TF32) */
    CHECK_ERROR_BELOW("y", test_read(out), y, ROWS * OUT, limit);
    te_backward_from(out, test_tensor(te, TE_F32, SHAPE(ROWS, OUT), dy));
    CHECK_ERROR_BELOW("gradient of A", test_read(te_tensor_grad(a_weight)), da, R * IN, limit);
    CHECK_ERROR_BELOW("gradient of B", test_read(te_tensor_grad(b_weight)), db, OUT * R, limit);
    CHECK_ERROR_BELOW("gradient of x", test_read(te_tensor_grad(input)), dx, ROWS * IN, limit);
    CHECK(!te_tensor_grad(te_module_parameter(m, "weight")) && !te_tensor_grad(te_module_parameter(m, "bias")));
    CHECK_OK(te);
    te_module_destroy(m);
}

/* Xavier and Kaiming: moments of many numbers; B is zero. */
TE_TEST(lora_first_values) {
    enum { IN = 512, R = 64 };
    te_ctx *te = test_context("cpu");
    for (int kaiming = 0; kaiming < 2; kaiming++) {
        te_module *m = te_linear_create(te, &(te_linear_desc){.in_features = IN, .out_features = 8});
        te_lora_desc d = {.match_all_linear = true, .dim = R, .lora_A_init = kaiming ? TE_LORA_KAIMING : TE_LORA_XAVIER, .lora_dtype = TE_F32};
        te_lora_apply(m, &d, NULL);
        te_tensor *weight = te_module_parameter(te_module_find(m, "lora_A"), "weight");
        const float *a = test_read(weight), *b = test_read(te_module_parameter(te_module_find(m, "lora_B"), "weight"));
        double sum = 0, squares = 0, most = 0;
        for (int i = 0; i < IN * R; i++) {
            sum += a[i];
            squares += (double)a[i] * a[i];
            most = fmax(most, fabs((double)a[i]));
        }
        double std = sqrt(squares / (IN * R)), want = kaiming ? 1 / sqrt(3.0 * IN) : sqrt(2.0 / (IN + R));
        CHECK(te_tensor_dtype(weight) == TE_F32);
        CHECK_MSG(fabs(std / want - 1) < 0.02, "std %g, not %g", std, want); /* 5 of 32768 numbers' standard errors */
        CHECK_MSG(fabs(sum / (IN * R)) < 5 * want / sqrt(IN * R), "mean %g", sum / (IN * R));
        CHECK(!kaiming || most <= 1 / sqrt((double)IN) * (1 + 1e-6));
        for (int i = 0; i < 8 * R; i++) CHECK(b[i] == 0);
        te_tensor *y = te_forward(m, te_tensor_normal(te, TE_BF16, SHAPE(3, IN), 0, 1)); /* bf16 in, f32 adapters, bf16 out */
        CHECK(te_tensor_dtype(y) == TE_BF16);
        CHECK_OK(te);
        te_module_destroy(m);
    }
}

/* Dropout on either side: in training what is dropped is zero or doubled, in evaluation nothing is. */
TE_TEST_DEVICES(lora_dropout) {
    enum { N = 16, ROWS = 8 };
    for (int pre = 0; pre < 2; pre++) {
        test_case("%s", pre ? "pre" : "post");
        te_module *m = te_linear_create(te, &(te_linear_desc){.in_features = N, .out_features = N, .gemm.params_dtype = TE_F32, .gemm.no_bias = true});
        te_lora_desc d = {.match_all_linear = true, .dim = N, .alpha = N, .dropout = 0.5f, .dropout_position = pre ? TE_DROPOUT_PRE : TE_DROPOUT_POST};
        float one[N * N] = {0}, *x = test_uniform(ROWS * N, 3, 1, 2);
        te_lora_apply(m, &d, NULL);
        for (int i = 0; i < N; i++) one[i * N + i] = 1;
        te_tensor_fill(te_module_parameter(m, "weight"), 0);
        te_tensor_copy(te_module_parameter(te_module_find(m, "lora_A"), "weight"), test_tensor(te, TE_F32, SHAPE(N, N), one));
        te_tensor_copy(te_module_parameter(te_module_find(m, "lora_B"), "weight"), test_tensor(te, TE_F32, SHAPE(N, N), one));
        te_tensor *input = test_tensor(te, TE_F32, SHAPE(ROWS, N), x);
        const float *y = test_read(te_forward(m, input));
        int zeros = 0;
        for (int i = 0; i < ROWS * N; i++) {
            zeros += y[i] == 0;
            CHECK(y[i] == 0 || fabsf(y[i] - 2 * x[i]) <= 5e-3f * x[i]); /* TF32 on CUDA */
        }
        CHECK_MSG(zeros > 40 && zeros < 88, "%d of 128 are dropped", zeros); /* 64, and four standard deviations */
        te_module_train(m, false);
        y = test_read(te_forward(m, input));
        for (int i = 0; i < ROWS * N; i++) CHECK(fabsf(y[i] - x[i]) <= 5e-3f * x[i]);
        CHECK_OK(te);
        te_module_destroy(m);
    }
}

/* ---- which modules ---- */

TE_TEST(lora_chooses) {
    static const struct {
        te_lora_desc d;
        const char *names[3];
        int n;
        const char *with, *without;
    } cases[] = {{{0}, {NULL}, 14, "model.layers.1.mlp.down_proj", "lm_head"},
                 {{.num_target_modules = 2}, {"q_proj", "v_proj"}, 4, "model.layers.0.self_attn.v_proj", "model.layers.0.self_attn.k_proj"},
                 {{.num_target_modules = 1}, {"*.layers.0.*.q_proj"}, 1, "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj"},
                 {{.num_target_modules = 1}, {".*gate.*"}, 2, "model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"},
                 {{.num_target_modules = 1}, {"*"}, 15, "lm_head", "model.norm"},
                 {{.num_target_modules = 1}, {"model.layers.1.mlp.u._proj"}, 1, "model.layers.1.mlp.up_proj", "model.layers.0.mlp.up_proj"},
                 {{.num_exclude_modules = 2}, {"*.lm_head", "lm_head"}, 14, "model.layers.1.self_attn.o_proj", "lm_head"},
                 {{.match_all_linear = true}, {NULL}, 15, "lm_head", "model.embed_tokens"}};
    te_ctx *te = test_context("cpu");
    lora_make_folder(te, TE_BF16);
    for (int i = 0; i < COUNT(cases); i++) {
        test_case("%d", i);
        te_module *m = lora_open(te, TE_DTYPE_NONE, NULL);
        te_lora_desc d = cases[i].d;
        int n = -1;
        d.dim = 2;
        d.target_modules = d.num_target_modules ? cases[i].names : NULL;
        d.exclude_modules = d.num_exclude_modules ? cases[i].names : NULL;
        CHECK_EQ_INT(te_lora_apply(m, &d, &n), TE_OK);
        CHECK_EQ_INT(n, cases[i].n);
        CHECK(te_module_num_children(te_module_find(m, cases[i].with)) == 2 && te_module_num_children(te_module_find(m, cases[i].without)) == 0);
        CHECK(!te_tensor_requires_grad(te_module_parameter(te_module_find(m, "model.norm"), "weight")));
        CHECK_OK(te);
        te_module_destroy(m);
    }
    /* others as they are; a second call for other modules leaves the first one's adapters in training */
    te_module *m = lora_open(te, TE_DTYPE_NONE, NULL);
    const char *q = "q_proj", *v = "v_proj";
    te_lora_apply(m, &(te_lora_desc){.target_modules = &q, .num_target_modules = 1, .skip_freeze = true}, NULL);
    CHECK(te_tensor_requires_grad(te_module_parameter(te_module_find(m, "model.norm"), "weight")));
    CHECK(!te_tensor_requires_grad(te_module_parameter(te_module_find(m, "model.layers.0.self_attn.q_proj"), "weight")));
    te_lora_apply(m, &(te_lora_desc){.target_modules = &v, .num_target_modules = 1}, NULL);
    CHECK(!te_tensor_requires_grad(te_module_parameter(te_module_find(m, "model.norm"), "weight")));
    CHECK(te_tensor_requires_grad(te_module_parameter(te_module_find(m, "model.layers.0.self_attn.q_proj.lora_A"), "weight")));
    /* a name longer than any path is not cut to one that matches */
    char long_name[2048];
    const char *name = long_name;
    memset(long_name, '*', sizeof long_name);
    strcpy(long_name + sizeof long_name - 16, "nothing");
    te_lora_apply(m, &(te_lora_desc){.target_modules = &name, .num_target_modules = 1}, NULL);
    CHECK_ERROR(te, TE_ERR_INVALID, "has 2039 bytes; at most 512 are possible");
    /* away again */
    CHECK_EQ_INT(te_lora_remove(m), TE_OK);
    CHECK(!te_module_find(m, "model.layers.0.self_attn.q_proj.lora_A") && !te_module_set_forward(te_module_find(m, "model.layers.0.self_attn.q_proj"), NULL));
    CHECK_EQ_INT(te_lora_remove(m), TE_ERR_INVALID);
    CHECK_ERROR(te, TE_ERR_INVALID, "te_lora_remove: no module below \"causal_lm\" has adapters");
    te_module_destroy(m);
}

/* ---- training ---- */

static te_recipe lora_delayed(void) { return te_recipe_delayed_scaling(); }
static te_recipe (*const lora_recipes[])(void) = {NULL, lora_delayed, te_recipe_current_scaling, te_recipe_block_scaling, te_recipe_mxfp8, te_recipe_nvfp4};

/* Losses fall, nothing but adapters changes, and the merged model has the logits of the adapted one. */
static void lora_trains(te_ctx *te, const te_recipe *recipe, te_dtype dtype, bool stored) {
    const char *targets[] = {"q_proj", "v_proj", "o_proj", "down_proj"};
    te_lora_desc d = {.target_modules = targets, .num_target_modules = 4};
    test_case("%s, %s%s", recipe ? te_recipe_name(recipe->kind) : "high precision", te_dtype_name(dtype), stored ? ", stored quantized" : "");
    te_module *m = lora_open(te, dtype, stored ? recipe : NULL);
    int n = 0;
    te_seed(te, 4);
    CHECK_EQ_INT(te_lora_apply(m, &d, &n), TE_OK);
    REQUIRE_OK(te);
    CHECK_EQ_INT(n, 8);
    lora_recipe = recipe;
    uint64_t before = lora_base_hash(m);
    te_optimizer *adam = te_fused_adam_create(te, m, &(te_fused_adam_desc){.lr = 1e-2f});
    float first = lora_step(m, adam), last = first;
    for (int step = 1; step < LO_STEPS; step++) last = lora_step(m, adam);
    CHECK_MSG(last < first - 0.2f, "the loss goes from %g to %g", first, last);
    CHECK(lora_base_hash(m) == before);
    CHECK_OK(te);
    te_optimizer_destroy(adam);
    /* In high precision: f32 sums in another order; in bf16 the sums of two products, where the merged weight is one, rounded to 8 bits, through two layers. A recipe quantizes the
     * merged weight, and did the weight and both adapters: codes of 3 bits (E4M3), of 1 bit (FP4), through two layers. Stored weights lose as much once more. */
    te_module_train(m, false);
    te_no_grad_begin(te);
    const float *adapted = test_copy(test_read(lora_logits(m)), LO_N * LO_V);
    CHECK_EQ_INT(te_lora_merge(m), TE_OK);
    CHECK(!te_module_find(m, "model.layers.0.self_attn.q_proj.lora_A") && lora_base_hash(m) != before);
    const float *merged = test_read(lora_logits(m));
    te_no_grad_end(te);
    CHECK_OK(te);
    double limit = recipe ? (recipe->kind == TE_RECIPE_NVFP4 ? 0.5 : 0.15) : dtype == TE_F32 ? (te_ctx_is_cuda(te) ? 5e-3 : 1e-5) : 3e-2;
    CHECK_ERROR_BELOW("merged", merged, adapted, LO_N * LO_V, limit);
    lora_recipe = NULL;
    te_module_destroy(m);
}
TE_TEST_DEVICES(lora_trains_under_every_recipe) {
    te_ctx *cpu = test_cpu_beside(te);
    lora_make_folder(cpu ? cpu : te, TE_F32);
    lora_trains(te, NULL, TE_F32, false);
    for (int i = 0; i < COUNT(lora_recipes); i += test_every_odd(1)) {
        te_recipe recipe = {0};
        if (lora_recipes[i]) recipe = lora_recipes[i]();
        lora_trains(te, lora_recipes[i] ? &recipe : NULL, TE_BF16, false);
        if (lora_recipes[i]) lora_trains(te, &recipe, TE_BF16, true);
    }
}

/* Layers that run again in the backward pass, and steps of a graph: the bits of plain steps. */
static bool lora_checkpoint_layer(void *user, te_module *m) {
    (void)user;
    if (!strcmp(te_module_get_class(m)->name, "DecoderLayer")) te_module_set_checkpoint(m, true);
    return true;
}
TE_TEST_DEVICES(lora_recomputes_and_captures) {
    te_ctx *cpu = test_cpu_beside(te);
    float loss[3][LO_STEPS];
    te_recipe recipe = te_recipe_current_scaling();
    lora_make_folder(cpu ? cpu : te, TE_BF16);
    lora_recipe = &recipe;
    for (int way = 0; way < 3; way++) {
        int32_t ids[LO_N], targets[LO_N];
        for (int i = 0; i < LO_N; i++) ids[i] = i * 7 % LO_V, targets[i] = (i * i + 3) % LO_V;
        te_seed(te, 5);
        te_module *m = lora_open(te, TE_DTYPE_NONE, NULL);
        te_lora_apply(m, &(te_lora_desc){.dropout = 0.1f}, NULL);
        te_optimizer *adam = te_fused_adam_create(te, m, &(te_fused_adam_desc){.lr = 1e-2f});
        if (way == 1) te_module_visit(m, lora_checkpoint_layer, NULL);
        if (way < 2)
            for (int step = 0; step < LO_STEPS; step++) loss[way][step] = lora_step(m, adam);
        else {
            te_graph *g = NULL;
            te_tensor *out = te_tensor_zeros(te, TE_F32, SHAPE(1)), *x = te_tensor_from_host(te, TE_I32, SHAPE(LO_B, LO_S), ids), *t = te_tensor_from_host(te, TE_I32, SHAPE(LO_B, LO_S), targets);
            loss[way][0] = lora_step(m, adam);
            te_graph_begin(te);
            te_scope_begin(te);
            te_autocast_begin(te, &(te_autocast_desc){.recipe = &recipe});
            te_tensor *y = te_forward(m, x);
            te_autocast_end(te);
            te_tensor *l = te_cross_entropy(y, t, NULL);
            te_tensor_copy(out, l);
            te_backward(l);
            te_optimizer_step(adam);
            te_scope_end(te);
            g = te_graph_end(te);
            for (int step = 1; step < LO_STEPS && g; step++) {
                te_graph_launch(g);
                loss[way][step] = (float)te_tensor_item(out);
            }
            te_graph_destroy(g);
        }
        CHECK_OK(te);
        te_optimizer_destroy(adam);
        te_module_destroy(m);
    }
    lora_recipe = NULL;
    CHECK_BYTES("recomputed", loss[1], loss[0], sizeof loss[0]);
    CHECK_BYTES("captured", loss[2], loss[0], sizeof loss[0]);
}

/* ---- shapes without memory ---- */

TE_TEST(lora_on_meta) {
    te_ctx *te = test_context("cpu");
    te_module *m = te_linear_create(te, &(te_linear_desc){.in_features = 8, .out_features = 4, .gemm.params_dtype = TE_F32, .gemm.device = TE_PARAMS_META});
    CHECK_EQ_INT(te_lora_apply(m, &(te_lora_desc){.match_all_linear = true, .dim = 2}, NULL), TE_OK);
    CHECK(te_lora_merge(m) == TE_ERR_STATE);
    CHECK_ERROR(te, TE_ERR_STATE, "have no values yet; te_module_reset_parameters gives them");
    CHECK_EQ_INT(te_module_reset_parameters(m), TE_OK);
    te_tensor *y = te_forward(m, te_tensor_full(te, TE_F32, SHAPE(3, 8), 1));
    CHECK(y && test_read(te_module_parameter(te_module_find(m, "lora_A"), "weight"))[0] != 0 && test_read(te_module_parameter(te_module_find(m, "lora_B"), "weight"))[0] == 0);
    CHECK_OK(te);
    te_module_destroy(m);
}

/* ---- files ---- */

TE_TEST(lora_files) {
    te_ctx *te = test_context("cpu");
    const char *q = "q_proj", *down = "model.layers.1.mlp.down_proj";
    lora_make_folder(te, TE_F32);
    te_module *m = lora_open(te, TE_DTYPE_NONE, NULL), *other = lora_open(te, TE_DTYPE_NONE, NULL);
    te_lora_apply(m, &(te_lora_desc){.target_modules = &q, .num_target_modules = 1, .dim = 4, .alpha = 10}, NULL);
    te_lora_apply(m, &(te_lora_desc){.target_modules = &down, .num_target_modules = 1, .dim = 3, .alpha = 6.5f}, NULL);
    lora_fill(m, 0.2f);
    CHECK(te_hf_save(m, test_path("whole")) == TE_ERR_INVALID);
    CHECK_ERROR(te, TE_ERR_INVALID, "te_hf_save: the model has adapters");
    CHECK_EQ_INT(te_lora_save(m, test_path("adapter")), TE_OK);
    const float *want = test_copy(test_read(lora_logits(m)), LO_N * LO_V);
    const char *text = (const char *)test_read_file(lora_path("adapter", "adapter_config.json"), NULL);
    CHECK_STR(text, "\"peft_type\": \"LORA\"");
    CHECK_STR(text, "\"r\": 4,");
    CHECK_STR(text, "\"lora_alpha\": 10,");
    CHECK_STR(text, "\"rank_pattern\": {\"model.layers.1.mlp.down_proj\": 3}");
    CHECK_STR(text, "\"alpha_pattern\": {\"model.layers.1.mlp.down_proj\": 6.5}");
    CHECK_STR(text, "\"target_modules\": [\"model.layers.0.self_attn.q_proj\", \"model.layers.1.self_attn.q_proj\", \"model.layers.1.mlp.down_proj\"]");
    te_safetensors *f = te_safetensors_open(te, lora_path("adapter", "adapter_model.safetensors"));
    CHECK_EQ_INT(te_safetensors_count(f), 6);
    const te_safetensors_entry *a = te_safetensors_find(f, "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight");
    CHECK(a && a->shape[0] == 4 && a->shape[1] == LO_D);
    te_safetensors_close(f);
    /* into a model without adapters, into one that has the same, and, merged, as a folder of transformers */
    for (int again = 0; again < 2; again++) {
        CHECK_EQ_INT(te_lora_load(other, test_path("adapter")), TE_OK);
        CHECK_BYTES("loaded", test_read(lora_logits(other)), want, LO_N * LO_V * sizeof(float));
        lora_fill(other, 0.5f);
    }
    te_lora_load(other, test_path("adapter"));
    te_lora_merge(other);
    CHECK_EQ_INT(te_hf_save(other, test_path("merged")), TE_OK);
    te_module *merged = te_hf_open(te, test_path("merged"), NULL);
    CHECK_ERROR_BELOW("merged", test_read(lora_logits(merged)), want, LO_N * LO_V, 1e-5); /* f32 sums in another order */
    CHECK_OK(te);
    te_module_destroy(merged);
    /* peft's rsLoRA: alpha / sqrt(r) */
    lora_spit(lora_path("adapter", "adapter_config.json"), "{\"peft_type\": \"LORA\", \"r\": 4, \"lora_alpha\": 5, \"use_rslora\": true, \"bias\": \"none\", \"modules_to_save\": null,\n"
              "\"alpha_pattern\": {\"down_proj\": 3.752776749732568}, \"target_modules\": \"all-linear\", \"layers_to_transform\": [1, {\"a\": null}], \"use_dora\": false}");
    CHECK_EQ_INT(te_lora_load(other, test_path("adapter")), TE_OK);
    CHECK_OK(te);
    te_module *q0 = te_module_find(other, "model.layers.0.self_attn.q_proj");
    CHECK(q0 && te_module_find(q0, "lora_A"));
    CHECK_EQ_INT(te_lora_remove(other), TE_OK);
    /* 10 / 4 = 5 / sqrt(4), and 6.5 / 3 = 3.7527.. / sqrt(3): the same adapters, on the weights from before */
    te_module *fresh = lora_open(te, TE_DTYPE_NONE, NULL);
    CHECK_EQ_INT(te_lora_load(fresh, test_path("adapter")), TE_OK);
    CHECK_ERROR_BELOW("rsLoRA", test_read(lora_logits(fresh)), want, LO_N * LO_V, 1e-6); /* the factors differ by their rounding */
    te_module_destroy(fresh);
    te_module_destroy(other);
    te_module_destroy(m);
    CHECK_OK(te);
}

static void lora_write_adapter(te_ctx *te, const char *name_a, int64_t rank_a, int64_t in, const char *name_b, int64_t out, int64_t rank_b) {
    te_safetensors_item items[2];
    int n = 0;
    te_scope_begin(te);
    if (name_a) items[n++] = (te_safetensors_item){name_a, te_tensor_full(te, TE_F32, SHAPE(rank_a, in), 1)};
    if (name_b) items[n++] = (te_safetensors_item){name_b, te_tensor_full(te, TE_F32, SHAPE(out, rank_b), 1)};
    te_safetensors_write(te, lora_path("bad", "adapter_model.safetensors"), items, n, NULL, 0);
    te_scope_end(te);
}
/* Keys of alpha_pattern are peft's: the first one that is the path, or its end behind a dot, counts; ^, an escaped dot and .* are those of a regular expression. */
TE_TEST(lora_alpha_patterns) {
    static const struct {
        const char *pattern;
        int alpha;
    } cases[] = {{"{}", 4},
                 {"{\"q_proj\": 9, \"self_attn.q_proj\": 7}", 9},
                 {"{\"proj\": 9, \"^self_attn.q_proj$\": 9, \"^model.layers.0.self_attn.q_proj$\": 7}", 7},
                 {"{\"layers\\\\.0\\\\..*\": 7}", 7},
                 {"{\"layers.1.*\": 9, \".*q_proj\": 7}", 7}};
    te_ctx *te = test_context("cpu");
    lora_make_folder(te, TE_F32);
    te_module *m = lora_open(te, TE_DTYPE_NONE, NULL);
    mkdir(test_path("bad"), 0700);
    lora_write_adapter(te, "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight", 2, LO_D, "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight", LO_D, 2);
    for (int i = 0; i < COUNT(cases); i++) {
        char text[256], want[32];
        test_case("%s", cases[i].pattern);
        snprintf(text, sizeof text, "{\"lora_alpha\": 4, \"init_lora_weights\": \"gaussian\", \"alpha_pattern\": %s}\n", cases[i].pattern);
        snprintf(want, sizeof want, "\"lora_alpha\": %d,", cases[i].alpha);
        lora_spit(lora_path("bad", "adapter_config.json"), text);
        CHECK_EQ_INT(te_lora_load(m, test_path("bad")), TE_OK);
        CHECK_EQ_INT(te_lora_save(m, test_path("again")), TE_OK);
        CHECK_OK(te);
        CHECK_STR((const char *)test_read_file(lora_path("again", "adapter_config.json"), NULL), want);
    }
    te_module_destroy(m);
}
TE_TEST(lora_files_refused) {
    static const char good[] = "{\"peft_type\": \"LORA\", \"r\": 2, \"lora_alpha\": 4}";
    static const char qa[] = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight", qb[] = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight";
    static const struct {
        const char *config;
        te_result code;
        const char *says;
    } configs[] = {{"{\"peft_type\": \"LOHA\"}", TE_ERR_UNSUPPORTED, "\"peft_type\" is LOHA"},
                   {"{\"use_dora\": true}", TE_ERR_FORMAT, "use_dora is true, and \"model.layers.0.self_attn.q_proj\" has no lora_magnitude_vector"},
                   {"{\"modules_to_save\": [\"lm_head\"]}", TE_ERR_FORMAT, "there is no tensor \"base_model.model.lm_head.weight\", which modules_to_save names"},
                   {"{\"modules_to_save\": \"lm_head\"}", TE_ERR_FORMAT, "adapter_config.json: byte"},
                   {"{\"modules_to_save\": [1]}", TE_ERR_FORMAT, "adapter_config.json: byte"},
                   {"{\"fan_in_fan_out\": true}", TE_ERR_UNSUPPORTED, "\"fan_in_fan_out\" is set"},
                   {"{\"bias\": \"some\"}", TE_ERR_UNSUPPORTED, "\"bias\" is some"},
                   {"{\"lora_dropout\": 1.5}", TE_ERR_FORMAT, "lora_dropout 1.5"},
                   {"{\"lora_alpha\": 1e39}", TE_ERR_FORMAT, "lora_alpha is inf"},
                   {"{\"alpha_pattern\": {\"q_proj\": -1e39}}", TE_ERR_FORMAT, "the alpha_pattern of \"q_proj\" is -inf"},
                   {"{\"lora_alpha\": \"x\"}", TE_ERR_FORMAT, "adapter_config.json: byte"},
                   {"[]", TE_ERR_FORMAT, "adapter_config.json: byte"},
                   {"{\"r\": 2} {", TE_ERR_FORMAT, "something follows the end"},
                   {"{\"init_lora_weights\": \"pissa_niter_16\"}", TE_ERR_UNSUPPORTED, "\"init_lora_weights\" is pissa_niter_16"},
                   {"{\"alpha_pattern\": {\"layers.{2}\": 4}}", TE_ERR_UNSUPPORTED, "alpha_pattern: the pattern \"layers.{2}\" has a count (\"{\")"},
                   {"{\"r\": 2", TE_ERR_FORMAT, "adapter_config.json: byte"},
                   {"", TE_ERR_FORMAT, "adapter_config.json: byte"}};
    static const struct {
        const char *a, *b;
        int64_t rank_a, in, out, rank_b;
        te_result code;
        const char *says;
    } files[] = {{NULL, qb, 2, LO_D, LO_D, 2, TE_ERR_FORMAT, "is there without"},
                 {qa, NULL, 2, LO_D, LO_D, 2, TE_ERR_FORMAT, "is there without"},
                 {qa, qb, 2, LO_D - 1, LO_D, 2, TE_ERR_SHAPE, "[2, 64] is needed for the features"},
                 {qa, qb, 2, LO_D, LO_D + 1, 2, TE_ERR_SHAPE, "[64, 2] is needed for the features"},
                 {qa, qb, 2, LO_D, LO_D, 3, TE_ERR_SHAPE, "all its adapters have one rank"},
                 {"base_model.model.model.norm.lora_A.weight", NULL, 2, LO_D, 0, 0, TE_ERR_FORMAT, "is no adapter of a product of this model"},
                 {"base_model.model.nowhere.lora_A.weight", NULL, 2, LO_D, 0, 0, TE_ERR_FORMAT, "is no adapter of a product of this model"},
                 {"base_model.model.lm_head.weight", NULL, LO_V, LO_D, 0, 0, TE_ERR_FORMAT, "differs from the model's in or behind row 0"},
                 {"base_model.model.model.layers.0.self_attn.q_proj..lora_A.weight", "base_model.model.model.layers.0.self_attn.q_proj..lora_B.weight", 2, LO_D, LO_D, 2, TE_ERR_FORMAT,
                  "is no adapter of a product of this model"},
                 {".lora_A.weight", NULL, 2, LO_D, 0, 0, TE_ERR_FORMAT, "is no adapter of a product of this model"},
                 {NULL, NULL, 0, 0, 0, 0, TE_ERR_FORMAT, "there are no adapters in it"}};
    te_ctx *te = test_context("cpu");
    lora_make_folder(te, TE_F32);
    te_module *m = lora_open(te, TE_DTYPE_NONE, NULL);
    CHECK(te_lora_load(m, test_path("bad")) == TE_ERR_IO);
    te_clear_error(te);
    mkdir(test_path("bad"), 0700);
    lora_write_adapter(te, qa, 2, LO_D, qb, LO_D, 2);
    for (int i = 0; i < COUNT(configs); i++) {
        test_case("config %d", i);
        lora_spit(lora_path("bad", "adapter_config.json"), configs[i].config);
        CHECK_EQ_INT(te_lora_load(m, test_path("bad")), configs[i].code);
        CHECK_ERROR(te, configs[i].code, configs[i].says);
    }
    lora_spit(lora_path("bad", "adapter_config.json"), good);
    for (int i = 0; i < COUNT(files); i++) {
        test_case("file %d", i);
        lora_write_adapter(te, files[i].a, files[i].rank_a, files[i].in, files[i].b, files[i].out, files[i].rank_b);
        CHECK_OK(te);
        CHECK_EQ_INT(te_lora_load(m, test_path("bad")), files[i].code);
        CHECK_ERROR(te, files[i].code, files[i].says);
    }
    test_case("as it was");
    CHECK(te_module_num_children(te_module_find(m, "model.layers.0.self_attn.q_proj")) == 0 && te_tensor_requires_grad(te_module_parameter(te_module_find(m, "model.norm"), "weight")));
    /* adapters of other modules and of another rank */
    const char *names[] = {"q_proj"};
    te_lora_apply(m, &(te_lora_desc){.target_modules = names, .num_target_modules = 1, .dim = 3}, NULL);
    lora_write_adapter(te, qa, 2, LO_D, qb, LO_D, 2);
    CHECK(te_lora_load(m, test_path("bad")) == TE_ERR_SHAPE);
    CHECK_ERROR(te, TE_ERR_SHAPE, "has rank 2 and the adapters of \"model.layers.0.self_attn.q_proj\" 3");
    lora_write_adapter(te, qa, 3, LO_D, qb, LO_D, 3);
    CHECK(te_lora_load(m, test_path("bad")) == TE_ERR_FORMAT);
    CHECK_ERROR(te, TE_ERR_FORMAT, "\"model.layers.1.self_attn.q_proj\" has adapters");
    te_module_destroy(m);
}

/* ---- ranks ---- */

typedef struct lora_shared {
    te_parallel_mode mode;
    bool sequence;
} lora_shared;

/* The rank's part of a matrix [rows, cols] along dimension `dim`. */
static te_tensor *lora_part(rank_state *s, te_tensor *whole, int dim) {
    int64_t n = te_tensor_shape(whole)[dim] / s->size;
    return te_tensor_contiguous(te_tensor_narrow(whole, dim, s->rank * n, n));
}
static bool lora_alike(te_tensor *got, te_tensor *want) {
    int64_t n = te_tensor_numel(want);
    float *a = (float *)malloc((size_t)n * sizeof(float)), *b = (float *)malloc((size_t)n * sizeof(float));
    double square = 0, all = 0;
    bool fine = got && te_tensor_numel(got) == n && te_tensor_to_f32(got, a) == TE_OK && te_tensor_to_f32(want, b) == TE_OK;
    for (int64_t i = 0; fine && i < n; i++) {
        square += ((double)a[i] - b[i]) * ((double)a[i] - b[i]);
        all += (double)b[i] * b[i];
    }
    free(a);
    free(b);
    return fine && square <= 1e-10 * all; /* f32 sums in another order */
}
static void lora_rank(rank_state *s) {
    enum { N = 32, R = 4, ROWS = 8 };
    const lora_shared *c = (const lora_shared *)s->arg;
    const bool column = c->mode == TE_PARALLEL_COLUMN;
    const int in = column ? -1 : 1, out = column ? 1 : -1; /* dimensions along which ranks share x and y, without sequence parallelism */
    te_tensor *y[2], *x[2], *whole_x = te_tensor_normal(s->te, TE_F32, SHAPE(ROWS, N), 0, 1), *whole_dy = te_tensor_normal(s->te, TE_F32, SHAPE(ROWS, N), 0, 1), *grad_b = NULL;
    te_module *m[2];
    for (int shared = 0; shared < 2; shared++) { /* the whole on each rank, and this rank's part of it */
        te_linear_desc d = {.in_features = N, .out_features = N, .gemm.params_dtype = TE_F32};
        if (shared) d.parallel = (te_parallel_options){.tp_group = s->group, .parallel_mode = c->mode, .sequence_parallel = c->sequence};
        te_seed(s->te, 7);
        m[shared] = te_linear_create(s->te, &d);
        EXPECT(s, te_lora_apply(m[shared], &(te_lora_desc){.match_all_linear = true, .dim = R}, NULL) == TE_OK);
        te_tensor *b = te_tensor_normal(s->te, TE_F32, SHAPE(N, R), 0, 1), *weight = te_module_parameter(te_module_find(m[shared], "lora_B"), "weight");
        te_tensor_copy(weight, shared && column ? lora_part(s, b, 0) : b);
        x[shared] = whole_x;
        te_tensor *dy = whole_dy;
        if (shared && (in >= 0 || c->sequence)) x[shared] = lora_part(s, whole_x, in >= 0 ? in : 0);
        if (shared && (out >= 0 || c->sequence)) dy = lora_part(s, whole_dy, out >= 0 ? out : 0);
        x[shared] = te_tensor_set_requires_grad(te_tensor_detach(x[shared]), true);
        y[shared] = te_forward(m[shared], x[shared]);
        te_backward_from(y[shared], dy);
    }
    te_tensor *want = y[0];
    if (out >= 0 || c->sequence) want = lora_part(s, want, out >= 0 ? out : 0);
    EXPECT(s, lora_alike(y[1], want));
    want = te_tensor_grad(x[0]);
    if (in >= 0 || c->sequence) want = lora_part(s, want, in >= 0 ? in : 0);
    EXPECT(s, lora_alike(te_tensor_grad(x[1]), want));
    for (int k = 0; k < 2; k++) {
        const char *name = k ? "lora_B" : "lora_A";
        const bool divided = column == (k == 1);
        te_tensor *whole = te_module_parameter(te_module_find(m[0], name), "weight"), *part = te_module_parameter(te_module_find(m[1], name), "weight");
        grad_b = te_tensor_grad(part);
        EXPECT(s, te_tensor_sequence_parallel(part) == (c->sequence && !divided));
        if (te_tensor_sequence_parallel(part)) te_all_reduce(s->group, grad_b, TE_REDUCE_SUM);
        EXPECT(s, lora_alike(grad_b, divided ? lora_part(s, te_tensor_grad(whole), column ? 0 : 1) : te_tensor_grad(whole)));
    }
    /* merged: this rank's part of the merged weight */
    EXPECT(s, te_lora_save(m[1], "nowhere") == TE_ERR_UNSUPPORTED);
    te_clear_error(s->te);
    EXPECT(s, te_lora_merge(m[0]) == TE_OK && te_lora_merge(m[1]) == TE_OK);
    EXPECT(s, lora_alike(te_module_parameter(m[1], "weight"), lora_part(s, te_module_parameter(m[0], "weight"), column ? 0 : 1)));
    te_module_destroy(m[0]);
    te_module_destroy(m[1]);
}
TE_TEST(lora_shared_by_ranks) {
    for (int mode = TE_PARALLEL_COLUMN; mode <= TE_PARALLEL_ROW; mode++)
        for (int sequence = 0; sequence < 2; sequence++) {
            lora_shared c = {(te_parallel_mode)mode, sequence != 0};
            test_case("mode %d, sequence %d", mode, sequence);
            run_ranks(2, lora_rank, &c);
            if (sequence) run_ranks(4, lora_rank, &c);
        }
}

/* ---- merging ---- */

TE_TEST(lora_merges_parts) {
    static const char *const names[] = {"query", "key_value"};
    static const int64_t sizes[] = {8, 16};
    te_ctx *te = test_context("cpu");
    te_linear_desc d = {.in_features = 8, .out_features = 24, .gemm.params_dtype = TE_F32, .parameters_split = {names, sizes, 2}};
    te_module *m = te_linear_create(te, &d);
    te_tensor *x = te_tensor_normal(te, TE_F32, SHAPE(5, 8), 0, 1);
    te_lora_apply(m, &(te_lora_desc){.match_all_linear = true}, NULL);
    CHECK(!te_tensor_requires_grad(te_module_parameter(m, "key_value_weight")) && !te_tensor_requires_grad(te_module_parameter(m, "query_bias")));
    lora_fill(m, 0.3f);
    const float *want = test_copy(test_read(te_forward(m, x)), 5 * 24);
    CHECK_EQ_INT(te_lora_merge(m), TE_OK);
    CHECK_ERROR_BELOW("merged", test_read(te_forward(m, x)), want, 5 * 24, 1e-6); /* f32 sums of 16 numbers in another order */
    CHECK_OK(te);
    te_module_destroy(m);
    /* one weight of two modules */
    te_module *two[] = {te_linear_create(te, &(te_linear_desc){.in_features = 8, .out_features = 8, .name = "a"}), te_linear_create(te, &(te_linear_desc){.in_features = 8, .out_features = 8, .name = "b"})};
    te_module_add_parameter(two[1], "weight", te_module_parameter(two[0], "weight"));
    m = te_sequential_create(te, two, 2);
    const char *a = "0";
    te_module *first = te_module_child(m, 0);
    a = te_module_name(first);
    te_lora_apply(m, &(te_lora_desc){.target_modules = &a, .num_target_modules = 1}, NULL);
    CHECK(te_lora_merge(m) == TE_ERR_UNSUPPORTED);
    CHECK_ERROR(te, TE_ERR_UNSUPPORTED, "\" is also \"weight\" of \"");
    te_module_destroy(m);
}

/* ---- what is refused ---- */

static te_result lora_own_forward(te_module *m, te_forward_args *args) { return te_module_get_class(m)->forward(m, args); }
TE_TEST(lora_refuses) {
    static const char *const some[] = {"q_proj", NULL};
    static const struct {
        te_lora_desc d;
        te_result code;
        const char *says;
    } descs[] = {{{.bias = (te_lora_bias)3}, TE_ERR_INVALID, "bias 3"},
                 {{.match_all_linear = true, .modules_to_save = some, .num_modules_to_save = 1}, TE_ERR_INVALID, "modules_to_save: no module below \"linear\" is named \"q_proj\""},
                 {{.num_modules_to_save = 1}, TE_ERR_INVALID, "1 modules_to_save (NULL)"},
                 {{.base_model_name_or_path = "\xff"}, TE_ERR_INVALID, "base_model_name_or_path is no UTF-8"},
                 {{.dim = -1}, TE_ERR_INVALID, "dim -1"},
                 {{.alpha = INFINITY}, TE_ERR_INVALID, "alpha inf"},
                 {{.dropout = 1}, TE_ERR_INVALID, "dropout 1"},
                 {{.dropout = NAN}, TE_ERR_INVALID, "dropout"},
                 {{.dropout_position = (te_dropout_position)2}, TE_ERR_INVALID, "dropout_position 2"},
                 {{.lora_A_init = (te_lora_init)-1}, TE_ERR_INVALID, "lora_A_init -1"},
                 {{.lora_dtype = TE_F8E4M3}, TE_ERR_DTYPE, "lora_dtype"},
                 {{.num_target_modules = 1}, TE_ERR_INVALID, "1 target_modules (NULL)"},
                 {{.target_modules = some, .num_target_modules = -1}, TE_ERR_INVALID, "-1 target_modules"},
                 {{.target_modules = some, .num_target_modules = 2}, TE_ERR_INVALID, "name 1 of 2 is NULL"},
                 {{.target_modules = some, .num_target_modules = 1, .exclude_modules = some, .num_exclude_modules = 1}, TE_ERR_INVALID, "target_modules and exclude_modules exclude each other"},
                 {{.target_modules = some, .num_target_modules = 1, .match_all_linear = true}, TE_ERR_INVALID, "target_modules and match_all_linear exclude each other"},
                 {{0}, TE_ERR_INVALID, "is one of *_proj"}};
    te_ctx *te = test_context("cpu");
    te_module *linear = te_linear_create(te, &(te_linear_desc){.in_features = 8, .out_features = 8});
    for (int i = 0; i < COUNT(descs); i++) {
        test_case("%d", i);
        int n = 5;
        CHECK_EQ_INT(te_lora_apply(linear, &descs[i].d, &n), descs[i].code);
        CHECK_ERROR(te, descs[i].code, descs[i].says);
        CHECK_EQ_INT(n, 0);
    }
    test_case("classes");
    CHECK(te_lora_apply(NULL, NULL, NULL) == TE_ERR_STATE && te_lora_merge(NULL) == TE_ERR_STATE && te_lora_remove(NULL) == TE_ERR_STATE && te_lora_save(NULL, "x") == TE_ERR_STATE &&
          te_lora_load(NULL, "x") == TE_ERR_STATE);
    CHECK_OK(te);
    te_lora_desc all = {.match_all_linear = true}, star = {.target_modules = (const char *const[]){"*"}, .num_target_modules = 1};
    CHECK(te_lora_save(linear, test_path("none")) == TE_ERR_INVALID);
    CHECK_ERROR(te, TE_ERR_INVALID, "te_lora_save: no module below \"linear\" has adapters");
    CHECK(te_lora_load(linear, NULL) == TE_ERR_INVALID);
    CHECK_ERROR(te, TE_ERR_INVALID, "te_lora_load: folder is NULL");
    te_module_set_forward(linear, lora_own_forward);
    CHECK(te_lora_apply(linear, &all, NULL) == TE_ERR_INVALID);
    CHECK_ERROR(te, TE_ERR_INVALID, "\"linear\" has a forward of its own");
    te_module_set_forward(linear, NULL);
    te_lora_apply(linear, &all, NULL);
    CHECK(te_lora_save(linear, NULL) == TE_ERR_INVALID);
    CHECK_ERROR(te, TE_ERR_INVALID, "te_lora_save: folder is NULL");
    CHECK(te_lora_apply(linear, &all, NULL) == TE_ERR_INVALID);
    CHECK_ERROR(te, TE_ERR_INVALID, "\"linear\" has adapters already");
    te_forward_args args = {.input = te_tensor_full(te, TE_BF16, SHAPE(2, 8), 1), .fp8_output = true};
    CHECK(!te_forward_with(linear, &args));
    CHECK_ERROR(te, TE_ERR_UNSUPPORTED, "LoRA: fp8_output");
    te_module_destroy(linear);
    te_module *layer = te_transformer_layer_create(te, &(te_transformer_layer_desc){.hidden_size = 16, .ffn_hidden_size = 32, .attention.num_attention_heads = 2});
    te_lora_desc dora = star;
    dora.use_dora = true;
    CHECK(te_lora_apply(layer, &dora, NULL) == TE_ERR_UNSUPPORTED);
    CHECK_ERROR(te, TE_ERR_UNSUPPORTED, "is a LayerNormLinear; use_dora is for Linears that one rank has");
    CHECK(te_lora_apply(layer, &all, NULL) == TE_OK);
    te_module_destroy(layer);
    te_causal_lm_desc d = {.vocab_size = 8, .hidden_size = 16, .intermediate_size = 16, .num_hidden_layers = 1, .num_attention_heads = 2, .num_local_experts = 2, .num_experts_per_tok = 1};
    te_module *experts = te_causal_lm_create(te, &d);
    CHECK(te_lora_apply(experts, &dora, NULL) == TE_ERR_UNSUPPORTED);
    CHECK_ERROR(te, TE_ERR_UNSUPPORTED, "is a Gate; use_dora is for Linears that one rank has");
    dora.target_modules = (const char *const[]){"experts"};
    CHECK(te_lora_apply(experts, &dora, NULL) == TE_ERR_UNSUPPORTED);
    CHECK_ERROR(te, TE_ERR_UNSUPPORTED, "is a LinearExperts; use_dora is for Linears that one rank has");
    CHECK(te_lora_apply(experts, &all, NULL) == TE_OK);
    CHECK(te_lora_apply(experts, &star, NULL) == TE_ERR_INVALID);
    CHECK_ERROR(te, TE_ERR_INVALID, "has adapters already");
    te_module_destroy(experts);
}
