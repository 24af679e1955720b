/* test_lora_experts.c: LoRA on the experts of mixtures: the formula, gradients, which experts are chosen and by what rank, training under recipes and in graphs, merging, files, ranks, what is refused. */
#include "../dist/ranks.h"
#include "../faults/purse.h"

#include <sys/stat.h>

enum { LE_E = 4, LE_K = 2, LE_D = 8, LE_F = 6, LE_R = 3, LE_T = 7, LE_V = 12 };
#define LE_ALPHA 6.0f

static const char *const le_stacks[4] = {"lora_gate_and_up_A", "lora_gate_and_up_B", "lora_down_A", "lora_down_B"};
static te_tensor *le_stack(te_module *experts, int i) { return te_module_parameter(te_module_find(experts, le_stacks[i]), "weight"); }
static const char *le_path(const char *folder, const char *name) {
    char *path = (char *)test_alloc(700);
    snprintf(path, 700, "%s/%s", test_path(folder), name);
    return path;
}
static void le_spit(const char *path, const char *text) {
    FILE *f = fopen(path, "wb");
    REQUIRE(f);
    CHECK(fwrite(text, 1, strlen(text), f) == strlen(text));
    fclose(f);
}

/* ---- experts of each kind ---- */

/* Experts, and what a gate has chosen for LE_T tokens. */
typedef struct le_kind {
    const char *name;
    bool model, deepep, bias, after; /* of a language model; GroupedExpertsDeepEP */
    te_experts_backend way;
    te_expert_activation activation;
} le_kind;
static const le_kind le_kinds[] = {{"of a language model", .model = true},
                                   {"loop", .way = TE_EXPERTS_TORCH},
                                   {"torch_mm", .way = TE_EXPERTS_TORCH_MM},
                                   {"gmm", .deepep = true, .way = TE_EXPERTS_GMM},
                                   {"biases", .bias = true, .way = TE_EXPERTS_TORCH_MM},
                                   {"pairs of columns", .way = TE_EXPERTS_TORCH_MM, .activation = TE_EXPERT_QUICK_GEGLU},
                                   {"relu2", .way = TE_EXPERTS_TORCH_MM, .activation = TE_EXPERT_RELU2},
                                   {"weights behind", .after = true, .way = TE_EXPERTS_TORCH_MM}};

static te_module *le_model(te_ctx *te, te_dtype dtype, int layers) {
    return te_causal_lm_create(te, &(te_causal_lm_desc){.vocab_size = LE_V, .hidden_size = LE_D, .intermediate_size = LE_F, .num_hidden_layers = layers, .num_attention_heads = 2,
                                                        .num_local_experts = LE_E, .num_experts_per_tok = LE_K, .params_dtype = dtype, .init.std = 0.4f});
}
/* *root: what is destroyed. */
static te_module *le_experts(te_ctx *te, const le_kind *k, te_module **root) {
    te_moe_config c = {.n_routed_experts = LE_E, .n_activated_experts = LE_K, .dim = LE_D, .moe_inter_dim = LE_F, .dtype = TE_F32, .init_std = 0.4f,
                       .expert_bias = k->bias, .expert_activation = k->activation, .apply_router_weight_after_down = k->after};
    te_moe_backend b = {.experts = k->way};
    *root = k->model ? le_model(te, TE_F32, 1) : k->deepep ? te_grouped_experts_deepep_create(te, &c, &b) : te_grouped_experts_create(te, &c, &b);
    te_module *m = k->model ? te_module_find(*root, "model.layers.0.block_sparse_moe.experts") : *root;
    for (int i = TE_EXPERTS_GATE_UP_PROJ_BIAS; k->bias && i <= TE_EXPERTS_DOWN_PROJ_BIAS; i++) {
        te_tensor *x = te_experts_get(m, (te_experts_tensor)i);
        te_tensor_copy(x, te_tensor_normal(te, TE_F32, te_tensor_ndim(x), te_tensor_shape(x), 0, 1));
    }
    return m;
}
static te_lora_desc le_desc(void) {
    static const char *const names[] = {"*experts", "experts"}; /* below a model, and itself */
    return (te_lora_desc){.target_modules = names, .num_target_modules = 2, .dim = LE_R, .alpha = LE_ALPHA};
}

/* The experts of token t, and how much each counts. */
static int le_chosen(int t, int k) { return (t * 3 + k * (1 + t % 2)) % LE_E; }
static float le_share(int t, int k) { return 0.25f + 0.1f * (float)((t + 2 * k) % 5); }
static te_tensor *le_run(te_ctx *te, te_tensor *const *inputs, void *user) {
    te_module *m = (te_module *)user;
    const bool maps = !strcmp(te_module_get_class(m)->name, "LinearExperts");
    uint8_t map[LE_T * LE_E] = {0};
    float all[LE_T * LE_E] = {0}, some[LE_T * LE_K];
    int32_t ids[LE_T * LE_K];
    for (int t = 0; t < LE_T; t++)
        for (int k = 0; k < LE_K; k++) {
            const int e = le_chosen(t, k);
            map[t * LE_E + e] = 1;
            all[t * LE_E + e] = some[t * LE_K + k] = le_share(t, k);
            ids[t * LE_K + k] = e;
        }
    te_forward_args args = {.input = inputs[0]};
    args.topk_weights = maps ? test_tensor(te, TE_F32, SHAPE(LE_T, LE_E), all) : test_tensor(te, TE_F32, SHAPE(LE_T, LE_K), some);
    args.topk_indices = maps ? te_tensor_from_host(te, TE_U8, SHAPE(LE_T, LE_E), map) : te_tensor_from_host(te, TE_I32, SHAPE(LE_T, LE_K), ids);
    return te_forward_with(m, &args);
}

/* The weight of a projection (0 gate, 1 up, 2 down) of expert e, as [in, out], with alpha / r A B added: what the formula multiplies by. */
static double le_weight(const le_kind *k, te_module *m, int e, int proj, int i, int o) {
    const bool gated = k->activation != TE_EXPERT_RELU2, pairs = k->activation == TE_EXPERT_QUICK_GEGLU, down = proj == 2;
    const int in = down ? LE_F : LE_D, out = down ? LE_D : gated ? 2 * LE_F : LE_F, col = down || !gated ? o : pairs ? 2 * o + (proj == 1) : o + (proj == 1 ? LE_F : 0);
    const float *a = test_read(le_stack(m, down ? 2 : 0)), *b = test_read(le_stack(m, down ? 3 : 1));
    double sum = 0;
    if (k->model) {
        char part[24];
        snprintf(part, sizeof part, "%d.%s", e, proj == 0 ? "w1" : proj == 1 ? "w3" : "w2");
        sum = test_read(te_module_parameter(te_module_find(m, part), "weight"))[o * in + i];
    } else sum = test_read(te_experts_get(m, down ? TE_EXPERTS_DOWN_PROJS : TE_EXPERTS_GATE_AND_UP_PROJS))[(e * in + i) * out + col];
    for (int r = 0; r < LE_R; r++) sum += LE_ALPHA / LE_R * (double)a[(e * in + i) * LE_R + r] * b[(e * LE_R + r) * out + col];
    return sum;
}
static void le_formula(const le_kind *k, te_module *m, const float *x, float *y) {
    const bool gated = k->activation != TE_EXPERT_RELU2, pairs = k->activation == TE_EXPERT_QUICK_GEGLU;
    const float *up_bias = k->bias ? test_read(te_experts_get(m, TE_EXPERTS_GATE_UP_PROJ_BIAS)) : NULL, *down_bias = k->bias ? test_read(te_experts_get(m, TE_EXPERTS_DOWN_PROJ_BIAS)) : NULL;
    for (int e = 0; e < LE_E; e++) {
        double up[2][LE_D][LE_F], down[LE_F][LE_D];
        for (int f = 0; f < LE_F; f++)
            for (int d = 0; d < LE_D; d++) {
                for (int h = gated ? 0 : 1; h < 2; h++) up[h][d][f] = le_weight(k, m, e, h, d, f);
                down[f][d] = le_weight(k, m, e, 2, f, d);
            }
        for (int t = 0; t < LE_T; t++)
            for (int c = 0; c < LE_K; c++) {
                if (le_chosen(t, c) != e) continue;
                double out[LE_D] = {0};
                for (int f = 0; f < LE_F; f++) {
                    double h[2] = {0, 0}, a;
                    for (int i = gated ? 0 : 1; i < 2; i++) {
                        h[i] = up_bias ? up_bias[e * 2 * LE_F + i * LE_F + f] : 0;
                        for (int d = 0; d < LE_D; d++) h[i] += (double)x[t * LE_D + d] * up[i][d][f];
                    }
                    if (!gated) a = h[1] > 0 ? h[1] * h[1] : 0;
                    else if (pairs) {
                        double g = fmin(h[0], 7), u = fmax(fmin(h[1], 7), -7);
                        a = g / (1 + exp(-1.702 * g)) * (u + 1);
                    } else a = h[0] / (1 + exp(-h[0])) * h[1];
                    for (int d = 0; d < LE_D; d++) out[d] += a * down[f][d];
                }
                for (int d = 0; d < LE_D; d++) y[t * LE_D + d] += (float)(le_share(t, c) * (out[d] + (down_bias ? down_bias[e * LE_D + d] : 0)));
            }
    }
}
static void le_randomize(te_module *experts, int skip) {
    for (int i = skip; i < 4; i++) {
        te_tensor *x = le_stack(experts, i);
        te_tensor_copy(x, te_tensor_normal(te_module_ctx(experts), te_tensor_dtype(x), 3, te_tensor_shape(x), 0, 0.3f));
    }
}

/* Outputs are at first what they were; then those of the formula; after merging the same. */
TE_TEST_DEVICES(lora_experts_by_hand) {
    for (int i = 0; i < COUNT(le_kinds); i++) {
        const le_kind *k = &le_kinds[i];
        te_module *root, *m = le_experts(te, k, &root);
        te_lora_desc d = le_desc();
        float *x = test_normal(LE_T * LE_D, 3), *want = test_floats(LE_T * LE_D);
        te_tensor *in = test_tensor(te, TE_F32, SHAPE(LE_T, LE_D), x);
        int n = 0;
        test_case("%s", k->name);
        REQUIRE_OK(te);
        const float *before = test_copy(test_read(le_run(te, &in, m)), LE_T * LE_D);
        CHECK_EQ_INT(te_lora_apply(root, &d, &n), TE_OK);
        REQUIRE_OK(te);
        CHECK_EQ_INT(n, 1);
        CHECK_BYTES("at first", test_read(le_run(te, &in, m)), before, LE_T * LE_D * sizeof(float));
        le_randomize(m, 0);
        le_formula(k, m, x, want);
        /* f32 sums of a few numbers; on CUDA products of f32 have 10 bits of mantissa (TF32), three behind each other, and relu2 squares one */
        const double limit = te_ctx_is_cuda(te) ? 1e-2 : 2e-6;
        CHECK_ERROR_BELOW("y", test_read(le_run(te, &in, m)), want, LE_T * LE_D, limit);
        CHECK_EQ_INT(te_lora_merge(root), TE_OK);
        CHECK(!te_module_find(m, le_stacks[0]) && !te_module_set_forward(m, NULL));
        CHECK_ERROR_BELOW("merged", test_read(le_run(te, &in, m)), want, LE_T * LE_D, limit);
        CHECK_OK(te);
        te_module_destroy(root);
    }
}
TE_TEST(lora_experts_gradients_by_differences) {
    te_ctx *te = test_context("cpu");
    for (int i = 0; i < COUNT(le_kinds); i += i ? 2 : 1) { /* relu2 among those left out has a kink */
        te_module *root, *m = le_experts(te, &le_kinds[i], &root);
        te_lora_desc d = le_desc();
        test_case("%s", le_kinds[i].name);
        te_lora_apply(root, &d, NULL);
        le_randomize(m, 0);
        te_tensor *inputs[5] = {te_tensor_normal(te, TE_F32, SHAPE(LE_T, LE_D), 0, 1), le_stack(m, 0), le_stack(m, 1), le_stack(m, 2), le_stack(m, 3)};
        if (le_kinds[i].activation != TE_EXPERT_RELU2) test_check_gradients(te, le_run, 5, inputs, m, 2e-2, 5e-3); /* what differences in f32 are good for */
        CHECK_OK(te);
        te_module_destroy(root);
    }
}

/* torch's deviation for [E, in, r], and its bound; lora_B is zero; a format of their own; without memory at first. */
TE_TEST(lora_experts_first_values) {
    enum { E = 8, IN = 64, R = 16 };
    te_ctx *te = test_context("cpu");
    for (int i = 0; i < 4; i++) {
        const bool kaiming = i & 1, meta = i & 2;
        te_module *m = te_grouped_experts_create(te, &(te_moe_config){.n_routed_experts = E, .n_activated_experts = 2, .dim = IN, .moe_inter_dim = 16, .device = meta ? TE_PARAMS_META : TE_PARAMS_DEFAULT},
                                                 &(te_moe_backend){.experts = TE_EXPERTS_TORCH_MM});
        te_lora_desc d = le_desc();
        d.dim = R;
        d.lora_A_init = kaiming ? TE_LORA_KAIMING : TE_LORA_XAVIER;
        d.lora_dtype = TE_F32;
        CHECK_EQ_INT(te_lora_apply(m, &d, NULL), TE_OK);
        if (meta) {
            CHECK(te_tensor_bytes(le_stack(m, 0)) == 0 || te_is_tensor_unallocated(le_stack(m, 0)));
            te_module_reset_parameters(m);
        }
        REQUIRE_OK(te);
        const float *a = test_read(le_stack(m, 0)), *b = test_read(le_stack(m, 1));
        double squares = 0, most = 0, want = kaiming ? 1 / sqrt(3.0 * IN * R) : sqrt(2.0 / ((IN + E) * R));
        for (int j = 0; j < E * IN * R; j++) {
            squares += (double)a[j] * a[j];
            most = fmax(most, fabs((double)a[j]));
        }
        CHECK(te_tensor_dtype(le_stack(m, 0)) == TE_F32 && te_tensor_shape(le_stack(m, 0))[1] == IN && te_tensor_shape(le_stack(m, 2))[1] == 16);
        CHECK_MSG(fabs(sqrt(squares / (E * IN * R)) / want - 1) < 0.04, "std %g, not %g", sqrt(squares / (E * IN * R)), want); /* 5 of 8192 numbers' standard errors */
        CHECK(!kaiming || most <= 1 / sqrt((double)IN * R) * (1 + 1e-6));
        for (int j = 0; j < E * R * 32; j++) CHECK(b[j] == 0);
        CHECK(te_module_parameter(m, "down_projs") && !te_tensor_requires_grad(te_module_parameter(m, "down_projs")) && te_tensor_requires_grad(le_stack(m, 3)));
        te_tensor *y = le_run(te, (te_tensor *const[]){te_tensor_normal(te, TE_BF16, SHAPE(LE_T, IN), 0, 1)}, m); /* bf16 in, f32 adapters, bf16 out */
        CHECK(y && te_tensor_dtype(y) == TE_BF16);
        CHECK_OK(te);
        te_module_destroy(m);
    }
}

/* ---- which experts, and of what rank ---- */

TE_TEST(lora_experts_are_chosen) {
    static const struct {
        te_lora_desc d;
        const char *names[3];
        int attention, experts, gates; /* sites of two layers */
    } cases[] = {{{0}, {NULL}, 8, 2, 0},
                 {{.num_target_modules = 1}, {"*_proj"}, 8, 0, 0},
                 {{.num_target_modules = 1}, {"*"}, 8, 2, 2},
                 {{.num_target_modules = 1}, {"experts"}, 0, 2, 0},
                 {{.num_target_modules = 1}, {"*.1.*.experts"}, 0, 1, 0},
                 {{.num_target_modules = 3}, {"w1", "w2", "w3"}, 0, 2, 0},
                 {{.num_target_modules = 1}, {"*.layers.0.*.experts.*.w."}, 0, 1, 0},
                 {{.num_target_modules = 1}, {"gate"}, 0, 0, 2},
                 {{.num_exclude_modules = 1}, {"*_proj"}, 0, 2, 2},
                 {{.num_exclude_modules = 3}, {"*experts", "lm_head", "*.gate"}, 8, 0, 0},
                 {{.match_all_linear = true}, {NULL}, 8, 2, 2}};
    te_ctx *te = test_context("cpu");
    for (int i = 0; i < COUNT(cases); i++) {
        te_module *m = le_model(te, TE_F32, 2);
        te_lora_desc d = cases[i].d;
        int n = 0, head;
        test_case("%d", i);
        d.dim = 2;
        d.target_modules = d.num_target_modules ? cases[i].names : NULL;
        d.exclude_modules = d.num_exclude_modules ? cases[i].names : NULL;
        CHECK_EQ_INT(te_lora_apply(m, &d, &n), TE_OK);
        head = te_module_find(m, "lm_head.lora_A") != NULL;
        CHECK_EQ_INT(n, cases[i].attention + cases[i].experts + cases[i].gates + head);
        CHECK((te_module_find(m, "model.layers.1.block_sparse_moe.gate.lora_B") != NULL) == (cases[i].gates > 0));
        CHECK((te_module_find(m, "model.layers.1.block_sparse_moe.experts.lora_down_A") != NULL) == (cases[i].experts > (i == 6)));
        CHECK(!te_module_find(m, "model.layers.1.block_sparse_moe.experts.0.w1.lora_A") && !te_module_find(m, "model.layers.1.block_sparse_moe.experts.w1.lora_A"));
        CHECK(!te_tensor_requires_grad(te_module_parameter(te_module_find(m, "model.layers.0.block_sparse_moe.experts.2.w3"), "weight")));
        CHECK_OK(te);
        te_module_destroy(m);
    }
    /* a part of an expert has no adapters of its own; nothing has changed then */
    te_module *m = le_model(te, TE_F32, 1);
    const char *part[] = {"w1", "w3"};
    CHECK(te_lora_apply(m, &(te_lora_desc){.target_modules = part, .num_target_modules = 2}, NULL) == TE_ERR_UNSUPPORTED);
    CHECK_ERROR(te, TE_ERR_UNSUPPORTED, "the names mean 8 of the 12 Linears of experts \"model.layers.0.block_sparse_moe.experts\"");
    CHECK(te_lora_remove(m) == TE_ERR_INVALID);
    te_clear_error(te);
    /* skip_freeze: only what has adapters is frozen; away again */
    te_lora_desc d = le_desc();
    d.skip_freeze = true;
    te_module *gate = te_module_find(m, "model.layers.0.block_sparse_moe.gate"), *w1 = te_module_find(m, "model.layers.0.block_sparse_moe.experts.1.w1");
    CHECK_EQ_INT(te_lora_apply(m, &d, NULL), TE_OK);
    CHECK(te_tensor_requires_grad(te_module_parameter(gate, "weight")) && !te_tensor_requires_grad(te_module_parameter(w1, "weight")));
    CHECK_EQ_INT(te_lora_remove(m), TE_OK);
    CHECK(!te_module_find(m, "model.layers.0.block_sparse_moe.experts.lora_down_A"));
    CHECK_OK(te);
    te_module_destroy(m);
    /* Automodel's own experts are no Linears: only names reach them */
    const te_moe_config c = {.n_routed_experts = LE_E, .n_activated_experts = LE_K, .dim = LE_D, .moe_inter_dim = LE_F, .n_shared_experts = 1};
    for (int i = 0; i < 3; i++) {
        int n = 0;
        test_case("MoE, %d", i);
        m = te_moe_create(te, &c, &(te_moe_backend){.experts = TE_EXPERTS_TORCH_MM, .dispatcher = TE_DISPATCHER_TORCH, .linear = TE_LINEAR_TE});
        CHECK_EQ_INT(te_lora_apply(m, i == 0 ? NULL : i == 1 ? &(te_lora_desc){.match_all_linear = true} : &(te_lora_desc){.target_modules = (const char *const[]){"*"}, .num_target_modules = 1}, &n), TE_OK);
        CHECK_EQ_INT(n, i == 2 ? 4 : 3); /* gate_proj, up_proj, down_proj of the shared ones */
        CHECK_OK(te);
        te_module_destroy(m);
    }
    /* nor can GroupedExpertsTE have any */
    m = te_grouped_experts_te_create(te, &c, &(te_moe_backend){.experts = TE_EXPERTS_TE});
    d = le_desc();
    CHECK(te_lora_apply(m, &d, NULL) == TE_ERR_UNSUPPORTED);
    CHECK_ERROR(te, TE_ERR_UNSUPPORTED, "LoRA: \"experts\" multiplies for a GroupedExpertsTE");
    const char *up = "gate_up_linear";
    CHECK(te_lora_apply(m, &(te_lora_desc){.target_modules = &up, .num_target_modules = 1}, NULL) == TE_ERR_UNSUPPORTED);
    CHECK_ERROR(te, TE_ERR_UNSUPPORTED, "LoRA: \"gate_up_linear\" multiplies for a GroupedExpertsTE");
    te_module_destroy(m);
}

static int le_warnings;
static void le_log(void *user, te_log_level level, const char *message) {
    (void)user;
    le_warnings += level == TE_LOG_WARN && strstr(message, "dim 5 is no multiple of the 2 experts of each token of \"model.layers.0.block_sparse_moe.experts\"; rank 2 is taken") != NULL;
}
/* The rank of experts is dim / K, and alpha stays: the factor is alpha / that rank. */
TE_TEST(lora_experts_rank_scaling) {
    te_ctx_desc desc = {.device = "cpu", .log = le_log};
    te_ctx *te = test_context_with(&desc);
    te_module *m = le_model(te, TE_F32, 1), *experts = te_module_find(m, "model.layers.0.block_sparse_moe.experts");
    te_lora_desc d = {.dim = 1, .alpha = 8, .moe_rank_scaling = true};
    CHECK(te_lora_apply(m, &d, NULL) == TE_ERR_INVALID);
    CHECK_ERROR(te, TE_ERR_INVALID, "moe_rank_scaling: dim 1 for the 2 experts of each token of \"model.layers.0.block_sparse_moe.experts\" leaves rank 0; a dim of at least 2 is needed");
    d.dim = 5;
    le_warnings = 0;
    CHECK_EQ_INT(te_lora_apply(m, &d, NULL), TE_OK);
    CHECK_EQ_INT(le_warnings, 1);
    CHECK_EQ_INT(te_tensor_shape(le_stack(experts, 0))[2], 2);
    CHECK_EQ_INT(te_tensor_shape(le_stack(experts, 3))[1], 2);
    CHECK_EQ_INT(te_tensor_shape(te_module_parameter(te_module_find(m, "model.layers.0.self_attn.q_proj.lora_A"), "weight"))[0], 5);
    /* A and B of ones add alpha / rank times the rank: 8 for each token's sum */
    for (int i = 0; i < 2; i++) te_tensor_fill(le_stack(experts, i), 1);
    float *before = test_copy(test_read(te_module_parameter(te_module_find(experts, "1.w3"), "weight")), LE_D * LE_F);
    CHECK_EQ_INT(te_lora_merge(m), TE_OK);
    const float *after = test_read(te_module_parameter(te_module_find(experts, "1.w3"), "weight"));
    for (int i = 0; i < LE_D * LE_F; i++) CHECK(fabsf(after[i] - before[i] - 8) < 1e-5f); /* one rounding of a number below 16 */
    CHECK_OK(te);
    te_module_destroy(m);
}

/* A gate of a language model has adapters as the Linear that it is in files: what they add to the logits, merged, and read again; under a recipe in high precision. */
TE_TEST_DEVICES(lora_gate_of_a_language_model) {
    const char *name = "gate";
    te_recipe recipe = te_recipe_nvfp4();
    te_module *m = le_model(te, TE_F32, 1), *block = te_module_find(m, "model.layers.0.block_sparse_moe"), *gate = te_module_find(block, "gate");
    te_tensor *x = test_tensor(te, TE_F32, SHAPE(LE_T, LE_D), test_normal(LE_T * LE_D, 4));
    CHECK_EQ_INT(te_lora_apply(m, &(te_lora_desc){.target_modules = &name, .num_target_modules = 1, .dim = LE_R, .alpha = LE_ALPHA}, NULL), TE_OK);
    REQUIRE_OK(te);
    te_tensor *a = te_module_parameter(te_module_find(gate, "lora_A"), "weight"), *b = te_module_parameter(te_module_find(gate, "lora_B"), "weight");
    te_tensor_copy(b, te_tensor_normal(te, TE_F32, SHAPE(LE_E, LE_R), 0, 1));
    const float *av = test_copy(test_read(a), LE_R * LE_D), *bv = test_copy(test_read(b), LE_E * LE_R), *w = test_read(te_module_parameter(gate, "weight")), *xs = test_read(x);
    te_forward_args args = {.input = x};
    te_autocast_begin(te, &(te_autocast_desc){.recipe = &recipe});
    const float *share = test_copy(test_read(te_forward_with(gate, &args)), LE_T * LE_E);
    te_autocast_end(te);
    /* softmax of the chosen ones: ratios of shares are exponentials of differences of logits */
    for (int t = 0; t < LE_T; t++) {
        double logit[LE_E];
        int first = -1, chosen = 0;
        for (int e = 0; e < LE_E; e++) {
            logit[e] = 0;
            for (int i = 0; i < LE_D; i++) {
                double sum = w[e * LE_D + i];
                for (int r = 0; r < LE_R; r++) sum += LE_ALPHA / LE_R * (double)bv[e * LE_R + r] * av[r * LE_D + i];
                logit[e] += sum * xs[t * LE_D + i];
            }
            if (share[t * LE_E + e] > 0 && chosen++ == 0) first = e;
        }
        CHECK_EQ_INT(chosen, LE_K);
        for (int e = 0; e < LE_E; e++)
            if (share[t * LE_E + e] > 0) CHECK(fabs(log((double)share[t * LE_E + e] / share[t * LE_E + first]) - (logit[e] - logit[first])) < (te_ctx_is_cuda(te) ? 5e-2 : 1e-4)); /* TF32 */
    }
    const float *want = test_copy(test_read(te_forward(block, x)), LE_T * LE_D);
    te_backward(te_sum_all(te_forward(block, x)));
    CHECK(te_tensor_grad(a) && te_tensor_grad(b) && !te_tensor_grad(te_module_parameter(gate, "weight")));
    CHECK_EQ_INT(te_lora_save(m, test_path("gate")), TE_OK);
    CHECK_EQ_INT(te_lora_remove(m), TE_OK);
    CHECK_EQ_INT(te_lora_load(m, test_path("gate")), TE_OK);
    CHECK_BYTES("read again", test_read(te_forward(block, x)), want, LE_T * LE_D * sizeof(float));
    CHECK_EQ_INT(te_lora_merge(m), TE_OK);
    CHECK_ERROR_BELOW("merged", test_read(te_forward(block, x)), want, LE_T * LE_D, te_ctx_is_cuda(te) ? 2e-2 : 1e-5); /* f32 sums in another order; TF32 on CUDA */
    CHECK_OK(te);
    te_module_destroy(m);
}

/* ---- training ---- */

static te_module *le_wide(te_ctx *te, te_dtype dtype) { /* sizes that all blocks divide, and those of no block */
    return te_causal_lm_create(te, &(te_causal_lm_desc){.vocab_size = LE_V, .hidden_size = 64, .intermediate_size = 96, .num_hidden_layers = 1, .num_attention_heads = 4,
                                                        .num_local_experts = LE_E, .num_experts_per_tok = LE_K, .params_dtype = dtype, .init.std = 0.15f});
}
static void le_text(te_tensor *ids, te_tensor *targets, int step) {
    int32_t text[2 * 8 + 1];
    for (int i = 0; i <= 16; i++) text[i] = (i * i * 5 + step * 3) % LE_V;
    te_tensor_copy_from_host(ids, text);
    te_tensor_copy_from_host(targets, text + 1);
}
static te_tensor *le_logits(te_module *m, te_tensor *ids, const te_recipe *recipe) {
    te_ctx *te = te_module_ctx(m);
    te_autocast_begin(te, &(te_autocast_desc){.recipe = recipe, .disabled = !recipe});
    te_tensor *y = te_forward(m, ids);
    te_autocast_end(te);
    return y;
}
static bool le_hash_one(void *user, te_module *m, const char *path, te_tensor *x, te_entry_kind kind) {
    uint64_t *hash = (uint64_t *)user;
    (void)m;
    if (kind != TE_ENTRY_PARAMETER || strstr(path, "lora_")) return true;
    const float *values = test_read(x);
    for (int64_t i = 0; i < te_tensor_numel(x); i++) {
        uint32_t bits;
        memcpy(&bits, &values[i], 4);
        *hash = (*hash ^ bits) * 0x100000001B3u;
    }
    return true;
}
static uint64_t le_hash(te_module *m) {
    uint64_t hash = 0xCBF29CE484222325u;
    te_module_visit_tensors(m, le_hash_one, &hash);
    return hash;
}
/* Steps by calls, or the second and later ones by launches of a graph: the losses. */
static te_module *le_train(te_ctx *te, const te_recipe *recipe, te_dtype dtype, bool stored, bool launches, float *losses, int steps) {
    te_graph *graph = NULL;
    te_seed(te, 6);
    if (stored) te_quantized_model_init_begin(te, &(te_quantized_model_init_desc){.recipe = recipe});
    te_module *m = le_wide(te, dtype);
    if (stored) te_quantized_model_init_end(te);
    te_lora_desc d = le_desc();
    d.dim = 8;
    d.alpha = 32;
    CHECK_EQ_INT(te_lora_apply(m, &d, NULL), TE_OK);
    const uint64_t before = le_hash(m);
    te_optimizer *adam = te_fused_adam_create(te, m, &(te_fused_adam_desc){.lr = 2e-2f});
    te_tensor *ids = te_tensor_zeros(te, TE_I32, SHAPE(2, 8)), *targets = te_tensor_zeros(te, TE_I32, SHAPE(2, 8)), *loss = te_tensor_zeros(te, TE_F32, SHAPE(1));
    for (int step = 0; step < steps && te_ok(te); step++) {
        le_text(ids, targets, 0);
        if (!launches || step < 2) {
            if (launches && step == 1) te_graph_begin(te);
            te_scope_begin(te);
            te_tensor *mean = te_cross_entropy(le_logits(m, ids, recipe), targets, NULL);
            te_backward(mean);
            te_optimizer_step(adam);
            te_optimizer_zero_grad(adam);
            te_tensor_copy(loss, mean);
            te_scope_end(te);
            if (launches && step == 1) graph = te_graph_end(te);
        }
        if (launches && step >= 1) CHECK_EQ_INT(te_graph_launch(graph), TE_OK);
        te_tensor_to_host(loss, &losses[step]);
    }
    CHECK_MSG(le_hash(m) == before, "frozen weights have changed");
    CHECK_OK(te);
    te_graph_destroy(graph);
    te_optimizer_destroy(adam);
    return m;
}
TE_TEST_DEVICES(lora_experts_train_under_every_recipe) {
    te_recipe (*const recipes[])(void) = {NULL, te_recipe_delayed_scaling, te_recipe_current_scaling, te_recipe_block_scaling, te_recipe_mxfp8, te_recipe_nvfp4};
    enum { STEPS = 4 };
    for (int i = 0; i < 2 * COUNT(recipes); i++) {
        const bool stored = i % 2;
        te_recipe recipe = {0};
        float losses[2][STEPS];
        if ((!recipes[i / 2] && stored) || (i + i / 2) % test_every_sanitized(1)) continue; /* with a sanitizer each recipe once */
        if (recipes[i / 2]) recipe = recipes[i / 2]();
        const te_recipe *r = recipes[i / 2] ? &recipe : NULL;
        const te_dtype dtype = r ? TE_BF16 : TE_F32;
        test_case("%s%s", r ? te_recipe_name(r->kind) : "high precision", stored ? ", stored quantized" : "");
        te_module *m = le_train(te, r, dtype, stored, false, losses[0], STEPS), *again = le_train(te, r, dtype, stored, true, losses[1], STEPS);
        CHECK_MSG(losses[0][STEPS - 1] < losses[0][0] - 0.1f, "the loss goes from %g to %g", losses[0][0], losses[0][STEPS - 1]);
        CHECK_BYTES("losses of launches", losses[1], losses[0], sizeof losses[0]);
        te_module_destroy(again);
        te_tensor *ids = te_tensor_zeros(te, TE_I32, SHAPE(2, 8)), *targets = te_tensor_zeros(te, TE_I32, SHAPE(2, 8));
        le_text(ids, targets, 0);
        te_module_train(m, false);
        te_no_grad_begin(te);
        const float *adapted = test_copy(test_read(le_logits(m, ids, r)), 16 * LE_V);
        CHECK_EQ_INT(te_lora_merge(m), TE_OK);
        /* As in lora_trains_under_every_recipe: sums in another order; a recipe quantizes the merged weight where the adapters were in high precision, codes of 3 bits (E4M3) or of
         * 1 bit (FP4) through a layer of experts, whose choice is high precision's; stored ones lose as much once more. */
        const double limit = r ? (r->kind == TE_RECIPE_NVFP4 ? 0.5 : 0.15) : te_ctx_is_cuda(te) ? 5e-3 : 1e-5;
        CHECK_ERROR_BELOW("merged", test_read(le_logits(m, ids, r)), adapted, 16 * LE_V, limit);
        te_no_grad_end(te);
        CHECK_OK(te);
        te_module_destroy(m);
    }
}

/* ---- files ---- */

#define LE_MOE "base_model.model.model.layers.0.block_sparse_moe.experts."
static const float *le_answer(te_module *m) {
    te_ctx *te = te_module_ctx(m);
    te_tensor *ids = te_tensor_zeros(te, TE_I32, SHAPE(2, 8)), *targets = te_tensor_zeros(te, TE_I32, SHAPE(2, 8));
    le_text(ids, targets, 1);
    return test_copy(test_read(te_forward(m, ids)), 16 * LE_V);
}
/* Written and read again: the outputs' bytes, by peft's names, with ranks and alphas of their own. */
TE_TEST(lora_experts_in_files) {
    te_ctx *te = test_context("cpu");
    te_seed(te, 8);
    te_module *m = le_model(te, TE_F32, 2);
    te_seed(te, 8);
    te_module *other = le_model(te, TE_F32, 2);
    te_lora_desc d = {.dim = 4, .alpha = 8, .moe_rank_scaling = true};
    CHECK_EQ_INT(te_lora_apply(m, &d, NULL), TE_OK);
    for (int l = 0; l < 2; l++) le_randomize(te_module_find(m, l ? "model.layers.1.block_sparse_moe.experts" : "model.layers.0.block_sparse_moe.experts"), 0);
    const float *want = le_answer(m);
    CHECK_EQ_INT(te_lora_save(m, test_path("adapter")), TE_OK);
    REQUIRE_OK(te);
    te_safetensors *f = te_safetensors_open(te, le_path("adapter", "adapter_model.safetensors"));
    const te_safetensors_entry *a = te_safetensors_find(f, LE_MOE "3.w1.lora_A.weight"), *b = te_safetensors_find(f, LE_MOE "0.w3.lora_B.weight"), *down = te_safetensors_find(f, LE_MOE "2.w2.lora_A.weight");
    CHECK(a && b && down && a->shape[0] == 2 && a->shape[1] == LE_D && b->shape[0] == LE_F && b->shape[1] == 2 && down->shape[1] == LE_F);
    CHECK_EQ_INT(te_safetensors_count(f), 2 * (4 * 2 + LE_E * 3 * 2));
    /* w3 has the second half of lora_B's columns, turned */
    const float *stack = test_read(le_stack(te_module_find(m, "model.layers.0.block_sparse_moe.experts"), 1)), *own = test_read(te_safetensors_read(f, LE_MOE "0.w3.lora_B.weight"));
    for (int o = 0; o < LE_F; o++)
        for (int r = 0; r < 2; r++) CHECK(own[o * 2 + r] == stack[r * 2 * LE_F + LE_F + o]);
    te_safetensors_close(f);
    const char *config = (const char *)test_read_file(le_path("adapter", "adapter_config.json"), NULL);
    CHECK(strstr(config, "\"model.layers.1.block_sparse_moe.experts.3.w2\": 2") && strstr(config, "\"r\": 4") && strstr(config, "\"model.layers.0.block_sparse_moe.experts.0.w1\","));
    CHECK_EQ_INT(te_lora_load(other, test_path("adapter")), TE_OK);
    CHECK_BYTES("read again", le_answer(other), want, 16 * LE_V * sizeof(float));
    CHECK_EQ_INT(te_lora_load(other, test_path("adapter")), TE_OK); /* into those that are there */
    CHECK_BYTES("twice", le_answer(other), want, 16 * LE_V * sizeof(float));
    CHECK_EQ_INT(te_lora_save(other, test_path("again")), TE_OK);
    size_t sizes[2];
    const void *files[2] = {test_read_file(le_path("adapter", "adapter_model.safetensors"), &sizes[0]), test_read_file(le_path("again", "adapter_model.safetensors"), &sizes[1])};
    CHECK(sizes[0] == sizes[1] && memcmp(files[0], files[1], sizes[0]) == 0);
    CHECK_OK(te);
    te_module_destroy(m);
    te_module_destroy(other);
}
/* bias: lora_only trains those of the experts' Linears, and files have them beside adapters. */
TE_TEST(lora_experts_biases_in_files) {
    te_ctx *te = test_context("cpu");
    te_module *m[2];
    for (int i = 0; i < 2; i++) {
        te_seed(te, 10);
        m[i] = te_causal_lm_create(te, &(te_causal_lm_desc){.vocab_size = LE_V, .hidden_size = LE_D, .intermediate_size = LE_F, .num_hidden_layers = 1, .num_attention_heads = 2, .mlp_bias = true,
                                                            .qkv_bias = true, .num_local_experts = LE_E, .num_experts_per_tok = LE_K, .params_dtype = TE_F32, .init.std = 0.4f});
    }
    te_lora_desc d = le_desc();
    d.bias = TE_LORA_BIAS_LORA_ONLY;
    CHECK_EQ_INT(te_lora_apply(m[0], &d, NULL), TE_OK);
    te_module *w3 = te_module_find(m[0], "model.layers.0.block_sparse_moe.experts.2.w3");
    te_tensor *bias = te_module_parameter(w3, "bias");
    CHECK(te_tensor_requires_grad(bias) && !te_tensor_requires_grad(te_module_parameter(w3, "weight")) && !te_tensor_requires_grad(te_module_parameter(te_module_find(m[0], "model.layers.0.self_attn.q_proj"), "bias")));
    te_tensor_fill(bias, 0.5);
    le_randomize(te_module_find(m[0], "model.layers.0.block_sparse_moe.experts"), 0);
    const float *want = le_answer(m[0]);
    CHECK_EQ_INT(te_lora_save(m[0], test_path("biases")), TE_OK);
    CHECK(strstr((const char *)test_read_file(le_path("biases", "adapter_config.json"), NULL), "\"bias\": \"lora_only\""));
    CHECK_EQ_INT(te_lora_load(m[1], test_path("biases")), TE_OK);
    CHECK_BYTES("read again", le_answer(m[1]), want, 16 * LE_V * sizeof(float));
    CHECK(te_tensor_requires_grad(te_module_parameter(te_module_find(m[1], "model.layers.0.block_sparse_moe.experts.0.w1"), "bias")));
    CHECK_OK(te);
    for (int i = 0; i < 2; i++) te_module_destroy(m[i]);
}
/* Experts of NeMo Automodel, of each layout of columns. */
TE_TEST(lora_experts_of_automodel_in_files) {
    te_ctx *te = test_context("cpu");
    for (int i = 1; i < COUNT(le_kinds); i++) {
        te_module *m[2], *root;
        te_lora_desc d = le_desc();
        te_tensor *x = test_tensor(te, TE_F32, SHAPE(LE_T, LE_D), test_normal(LE_T * LE_D, 5));
        test_case("%s", le_kinds[i].name);
        for (int k = 0; k < 2; k++) {
            te_seed(te, 9);
            m[k] = le_experts(te, &le_kinds[i], &root);
        }
        te_lora_apply(m[0], &d, NULL);
        le_randomize(m[0], 0);
        CHECK_EQ_INT(te_lora_save(m[0], test_path("automodel")), TE_OK);
        te_safetensors *f = te_safetensors_open(te, le_path("automodel", "adapter_model.safetensors"));
        CHECK_EQ_INT(te_safetensors_count(f), LE_E * 2 * (le_kinds[i].activation == TE_EXPERT_RELU2 ? 2 : 3));
        CHECK(te_safetensors_find(f, "base_model.model.3.up_proj.lora_B.weight") && te_safetensors_find(f, "base_model.model.0.down_proj.lora_A.weight"));
        te_safetensors_close(f);
        CHECK_EQ_INT(te_lora_load(m[1], test_path("automodel")), TE_OK);
        REQUIRE_OK(te);
        CHECK_BYTES("y", test_read(le_run(te, &x, m[1])), test_read(le_run(te, &x, m[0])), LE_T * LE_D * sizeof(float));
        for (int k = 0; k < 2; k++) te_module_destroy(m[k]);
    }
}

/* A folder as peft writes it for transformers' Mixtral, whose w1 and w3 have each a lora_A of their own. */
typedef enum le_damage { LE_WHOLE, LE_ALIKE, LE_LACKS_ONE, LE_SHAPE, LE_RANK, LE_UNKNOWN, LE_ALPHAS, LE_FUSED, LE_DAMAGES } le_damage;
static void le_write(te_ctx *te, te_module *m, le_damage damage, float *const values[LE_E * 3 * 2]) {
    static const char *const proj[] = {"w1", "w3", "w2"};
    te_safetensors_item items[LE_E * 3 * 2 + 1];
    int n = 0;
    (void)m;
    mkdir(test_path("peft"), 0700);
    for (int e = 0; e < LE_E; e++)
        for (int p = 0; p < 3; p++)
            for (int b = 0; b < 2; b++) {
                const int in = p == 2 ? LE_F : LE_D, out = p == 2 ? LE_D : LE_F, odd = damage == LE_RANK && e == 1 && p == 2;
                const float *v = values[(e * 3 + (damage == LE_ALIKE && p == 1 && !b ? 0 : p)) * 2 + b];
                char *name = (char *)test_alloc(160);
                snprintf(name, 160, LE_MOE "%d.%s.lora_%c.weight", damage == LE_UNKNOWN && e == 3 ? 4 : e, proj[p], b ? 'B' : 'A');
                if (damage == LE_LACKS_ONE && e == 2 && p == 1 && b) continue;
                items[n++] = (te_safetensors_item){name, b ? test_tensor(te, TE_F32, SHAPE(out + (damage == LE_SHAPE && e == 0 && p == 1), LE_R - odd), v) : test_tensor(te, TE_F32, SHAPE(LE_R - odd, in), v)};
            }
    te_safetensors_write(te, le_path("peft", "adapter_model.safetensors"), items, n, NULL, 0);
    le_spit(le_path("peft", "adapter_config.json"),
            damage == LE_ALPHAS  ? "{\"peft_type\": \"LORA\", \"r\": 3, \"lora_alpha\": 6, \"alpha_pattern\": {\"w2\": 3}, \"target_modules\": [\"w1\", \"w2\", \"w3\"]}"
            : damage == LE_FUSED ? "{\"peft_type\": \"LORA\", \"r\": 3, \"lora_alpha\": 6, \"target_parameters\": [\"mlp.experts.down_proj\"], \"target_modules\": []}"
                                 : "{\"peft_type\": \"LORA\", \"r\": 3, \"lora_alpha\": 6, \"target_modules\": [\"w1\", \"w2\", \"w3\"]}");
    REQUIRE_OK(te);
}
TE_TEST(lora_experts_from_peft) {
    static const struct {
        te_result code;
        const char *says;
    } wants[LE_DAMAGES] = {[LE_LACKS_ONE] = {TE_ERR_FORMAT, LE_MOE "2.w3.lora_A.weight\" is there without"},
                           [LE_SHAPE] = {TE_ERR_SHAPE, LE_MOE "0.w3.lora_B.weight\" has 2 dimensions, 7 and 3; [6, 3] is needed"},
                           [LE_RANK] = {TE_ERR_SHAPE, LE_MOE "1.w2.lora_A.weight\" has 2 dimensions, 2 and 6; [3, 6] is needed"},
                           [LE_UNKNOWN] = {TE_ERR_FORMAT, LE_MOE "4.w1.lora_A.weight\" is no adapter of a product of this model"},
                           [LE_ALPHAS] = {TE_ERR_UNSUPPORTED, "alpha_pattern: \"model.layers.0.block_sparse_moe.experts.0.w2\" has another alpha than the Linears before it"},
                           [LE_FUSED] = {TE_ERR_UNSUPPORTED, "\"target_parameters\" is set"}};
    te_ctx *te = test_context("cpu");
    float *values[LE_E * 3 * 2];
    for (int i = 0; i < LE_E * 3 * 2; i++) {
        values[i] = test_normal(64, 100 + i);
        for (int k = 0; k < 64; k++) values[i][k] *= 0.3f;
    }
    for (int damage = 0; damage < LE_DAMAGES; damage++) {
        te_seed(te, 12);
        te_module *m = le_model(te, TE_F32, 1);
        te_seed(te, 12);
        te_module *want = le_model(te, TE_F32, 1);
        const float *before = le_answer(m);
        test_case("damage %d", damage);
        le_write(te, m, (le_damage)damage, values);
        CHECK_EQ_INT(te_lora_load(m, test_path("peft")), wants[damage].code);
        if (damage > LE_ALIKE) {
            CHECK_ERROR(te, wants[damage].code, wants[damage].says);
            CHECK(!te_module_find(m, "model.layers.0.block_sparse_moe.experts.lora_down_A"));
            CHECK_BYTES("as it was", le_answer(m), before, 16 * LE_V * sizeof(float));
        } else {
            REQUIRE_OK(te);
            for (int e = 0; e < LE_E; e++)
                for (int p = 0; p < 3; p++) {
                    const int in = p == 2 ? LE_F : LE_D, out = p == 2 ? LE_D : LE_F;
                    const float *a = values[(e * 3 + (damage == LE_ALIKE && p == 1 ? 0 : p)) * 2], *b = values[(e * 3 + p) * 2 + 1];
                    char part[64];
                    snprintf(part, sizeof part, "model.layers.0.block_sparse_moe.experts.%d.%s", e, p == 0 ? "w1" : p == 1 ? "w3" : "w2");
                    te_tensor *weight = te_module_parameter(te_module_find(want, part), "weight");
                    float *sum = test_copy(test_read(weight), in * out);
                    for (int o = 0; o < out; o++)
                        for (int i = 0; i < in; i++)
                            for (int r = 0; r < LE_R; r++) sum[o * in + i] += 2 * b[o * LE_R + r] * a[r * in + i];
                    te_tensor_copy(weight, test_tensor(te, TE_F32, SHAPE(out, in), sum));
                }
            const float *right = le_answer(want);
            CHECK_ERROR_BELOW("outputs", le_answer(m), right, 16 * LE_V, 1e-5); /* f32 sums in another order, through a layer */
            CHECK_EQ_INT(te_tensor_shape(le_stack(te_module_find(m, "model.layers.0.block_sparse_moe.experts"), 0))[2], damage == LE_ALIKE ? LE_R : 2 * LE_R);
            CHECK_EQ_INT(te_lora_save(m, test_path("back")), TE_OK);
            CHECK_EQ_INT(te_lora_remove(m), TE_OK);
            CHECK_EQ_INT(te_lora_load(m, test_path("back")), TE_OK);
            CHECK_ERROR_BELOW("written and read", le_answer(m), right, 16 * LE_V, 1e-5);
            CHECK_EQ_INT(te_lora_merge(m), TE_OK);
            CHECK_ERROR_BELOW("merged", le_answer(m), right, 16 * LE_V, 1e-5);
            CHECK_OK(te);
        }
        te_module_destroy(m);
        te_module_destroy(want);
    }
    /* adapters of another rank are in the way */
    te_module *m = le_model(te, TE_F32, 1);
    te_lora_desc d = le_desc();
    te_lora_apply(m, &d, NULL);
    le_write(te, m, LE_WHOLE, values);
    CHECK(te_lora_load(m, test_path("peft")) == TE_ERR_SHAPE);
    CHECK_ERROR(te, TE_ERR_SHAPE, "has rank 6 and the adapters of \"model.layers.0.block_sparse_moe.experts\" 3; te_lora_remove those");
    te_module_destroy(m);
}

/* ---- ranks ---- */

enum { LE_RANKS = 2 };
static float *le_values(te_tensor *x) {
    float *v = (float *)calloc((size_t)te_tensor_numel(x) + 1, sizeof(float));
    te_tensor_to_f32(x, v);
    return v;
}
static void le_near(rank_state *s, const char *what, te_tensor *x, const float *want) {
    float *v = le_values(x);
    for (int64_t i = 0; i < te_tensor_numel(x); i++)
        if (!(fabs((double)v[i] - want[i]) <= 1e-5 * (1 + fabs((double)want[i])))) { /* f32 sums in another order */
            wrong(s, what);
            break;
        }
    free(v);
}
/* Each rank has half of the experts and of the tokens: outputs and gradients are those of one that has all. */
static void le_ranks(rank_state *s) {
    const bool deepep = *(const bool *)s->arg;
    enum { TOKENS = 10, OWN = TOKENS / LE_RANKS, LOCAL = LE_E / LE_RANKS };
    const te_moe_config c = {.n_routed_experts = LE_E, .n_activated_experts = LE_K, .dim = LE_D, .moe_inter_dim = LE_F, .dtype = TE_F32, .init_std = 0.4f};
    te_ctx *te = s->te;
    float *whole[2] = {NULL, NULL};
    int32_t id[TOKENS * LE_K];
    te_seed(te, 21);
    te_module *all = te_grouped_experts_create(te, &c, &(te_moe_backend){.experts = TE_EXPERTS_TORCH}), *mine;
    const te_moe_backend b = {.experts = TE_EXPERTS_TORCH_MM, .dispatcher = TE_DISPATCHER_DEEPEP, .ep_group = s->group};
    mine = deepep ? te_grouped_experts_deepep_create(te, &c, &b) : te_grouped_experts_create(te, &c, &b);
    te_lora_desc d = le_desc();
    EXPECT(s, te_lora_apply(all, &d, NULL) == TE_OK && te_lora_apply(mine, &d, NULL) == TE_OK);
    for (int i = 0; i < 2; i++) {
        te_tensor *stack = te_experts_get(all, (te_experts_tensor)i);
        te_experts_set(mine, (te_experts_tensor)i, te_tensor_contiguous(te_tensor_narrow(te_tensor_detach(stack), 0, s->rank * LOCAL, LOCAL)));
    }
    te_seed(te, 22);
    for (int i = 0; i < 4; i++) {
        te_tensor *x = le_stack(all, i);
        te_tensor_copy(x, te_tensor_normal(te, TE_F32, 3, te_tensor_shape(x), 0, 0.3f));
        te_tensor_copy(le_stack(mine, i), te_tensor_contiguous(te_tensor_narrow(te_tensor_detach(x), 0, s->rank * LOCAL, LOCAL)));
    }
    te_tensor *x = te_tensor_normal(te, TE_F32, SHAPE(TOKENS, LE_D), 0, 1), *w = te_tensor_uniform(te, TE_F32, SHAPE(TOKENS, LE_K), 0, 1), *dy = te_tensor_normal(te, TE_F32, SHAPE(TOKENS, LE_D), 0, 1);
    for (int i = 0; i < TOKENS * LE_K; i++) id[i] = (i * 5 + i / 3) % LE_E;
    te_tensor *which = te_tensor_from_host(te, TE_I32, SHAPE(TOKENS, LE_K), id);
    for (int part = 0; part < 2 && te_ok(te); part++) {
        const int64_t from = part ? s->rank * OWN : 0, n = part ? OWN : TOKENS;
        te_tensor *in = te_tensor_set_requires_grad(te_tensor_detach(te_tensor_narrow(x, 0, from, n)), true);
        te_forward_args args = {.input = in, .topk_weights = te_tensor_narrow(w, 0, from, n), .topk_indices = te_tensor_narrow(which, 0, from, n)};
        te_tensor *y = te_forward_with(part ? mine : all, &args);
        EXPECT(s, y && te_backward_from(y, te_tensor_contiguous(te_tensor_narrow(dy, 0, from, n))) == TE_OK);
        if (!y) break;
        if (!part) whole[0] = le_values(y), whole[1] = le_values(te_tensor_grad(in));
        else {
            le_near(s, "y", y, whole[0] + from * LE_D);
            le_near(s, "dx", te_tensor_grad(in), whole[1] + from * LE_D);
        }
    }
    for (int i = 0; i < 4 && te_ok(te); i++) {
        te_tensor *g = te_tensor_grad(le_stack(all, i));
        float *v = le_values(g);
        le_near(s, le_stacks[i], te_tensor_grad(le_stack(mine, i)), v + s->rank * te_tensor_numel(g) / LE_RANKS);
        free(v);
    }
    EXPECT(s, !te_tensor_grad(te_experts_get(mine, TE_EXPERTS_DOWN_PROJS)));
    EXPECT(s, te_lora_save(mine, "nowhere") == TE_ERR_UNSUPPORTED && strstr(te_error(te), "is shared by 2 ranks, and each has its part of the adapters"));
    te_clear_error(te);
    for (int i = 0; i < 2; i++) free(whole[i]);
    te_module_destroy(all);
    te_module_destroy(mine);
}
TE_TEST(lora_experts_of_two_ranks_are_those_of_one) {
    for (int deepep = 0; deepep < 2; deepep++) {
        const bool arg = deepep;
        test_case("%s", deepep ? "deepep" : "torch");
        run_ranks(LE_RANKS, le_ranks, &arg);
    }
}

/* ---- memory ---- */

/* Applying gives all stacks or none; merging is repeated where it stopped, with the same outputs at each stop; loading leaves all as it was. */
TE_TEST(lora_experts_memory_runs_out) {
    enum { APPLY, MERGE, LOAD, CALLS };
    purse *host = new_purse();
    te_ctx_desc desc = purse_desc(host, NULL);
    te_ctx *te = test_context_with(&desc);
    te_lora_desc d = le_desc();
    te_seed(te, 2);
    te_module *m = le_model(te, TE_F32, 1);
    te_lora_apply(m, &d, NULL);
    le_randomize(te_module_find(m, "model.layers.0.block_sparse_moe.experts"), 0);
    te_lora_save(m, test_path("purse"));
    const float *want = le_answer(m);
    te_module_destroy(m);
    REQUIRE_OK(te);
    for (int call = 0; call < CALLS; call++) {
        bool whole = false;
        for (int64_t n = 1; !whole; n += test_every_of(37, 6)) {
            test_case("call %d, request %lld", call, (long long)n);
            te_scope_begin(te);
            te_seed(te, 2);
            m = le_model(te, TE_F32, 1);
            te_module *experts = te_module_find(m, "model.layers.0.block_sparse_moe.experts");
            if (call == MERGE) te_lora_load(m, test_path("purse"));
            REQUIRE_OK(te);
            te_memory_trim(te);
            host->calls = host->refused = 0;
            host->fail_at = n;
            te_result r = call == APPLY ? te_lora_apply(m, &d, NULL) : call == MERGE ? te_lora_merge(m) : te_lora_load(m, test_path("purse"));
            host->fail_at = 0;
            whole = host->refused == 0;
            CHECK((r == TE_OK) == te_ok(te));
            CHECK_MSG(whole ? r == TE_OK : r == TE_OK || r == TE_ERR_OUT_OF_MEMORY, "%s", te_error(te));
            te_clear_error(te);
            if (r != TE_OK && call != MERGE) CHECK(!te_module_find(experts, le_stacks[0]) && !te_module_find(experts, le_stacks[3]));
            if (r != TE_OK && call == MERGE) {
                CHECK_ERROR_BELOW("stopped", le_answer(m), want, 16 * LE_V, 1e-5); /* sums in another order */
                CHECK_EQ_INT(te_lora_merge(m), TE_OK);
            } else if (r != TE_OK) CHECK_EQ_INT(call == APPLY ? te_lora_apply(m, &d, NULL) : te_lora_load(m, test_path("purse")), TE_OK);
            if (call != APPLY) CHECK_ERROR_BELOW("outputs", le_answer(m), want, 16 * LE_V, 1e-5);
            CHECK_OK(te);
            te_module_destroy(m);
            te_scope_end(te);
            REQUIRE(n < 5000);
        }
    }
}
