/* Language models without a folder: the mixture of experts against its formula in f64, its memory, its training in graphs; what the attention core refuses. tools/models compares whole models
 * with transformers. */
#include "../faults/purse.h"

enum { CLM_V = 12, CLM_D = 16, CLM_F = 24, CLM_E = 6, CLM_K = 2, CLM_S = 5, CLM_T = 3 * CLM_S };

static te_causal_lm_desc clm_desc(te_dtype dtype) {
    te_causal_lm_desc d = {.vocab_size = CLM_V, .hidden_size = CLM_D, .intermediate_size = CLM_F, .num_hidden_layers = 1, .num_attention_heads = 2, .num_key_value_heads = 1,
                           .num_local_experts = CLM_E, .num_experts_per_tok = CLM_K, .params_dtype = dtype, .init.std = 0.3f};
    return d;
}
static te_module *clm_part(te_module *m, const char *part) {
    char path[96];
    snprintf(path, sizeof path, "model.layers.0.block_sparse_moe%s%s", *part ? "." : "", part);
    return te_module_find(m, path);
}
static const float *clm_weight(te_module *m, int expert, const char *name) {
    char part[32];
    snprintf(part, sizeof part, "experts.%d.%s", expert, name);
    return test_read(te_module_parameter(clm_part(m, part), "weight"));
}

/* y = sum over the chosen experts e of share[e] * w2[e] (silu(w1[e] x) * (w3[e] x)), for one token. */
static void clm_formula(te_module *m, const float *gate, const float *x, float *y) {
    double level[CLM_E], share[CLM_E] = {0}, sum = 0, out[CLM_D] = {0};
    for (int e = 0; e < CLM_E; e++) {
        level[e] = 0;
        for (int i = 0; i < CLM_D; i++) level[e] += (double)gate[e * CLM_D + i] * (double)x[i];
    }
    for (int k = 0; k < CLM_K; k++) {
        int best = -1;
        for (int e = 0; e < CLM_E; e++)
            if (share[e] == 0 && (best < 0 || level[e] > level[best])) best = e;
        sum += share[best] = exp(level[best]);
    }
    for (int e = 0; e < CLM_E; e++) {
        if (share[e] == 0) continue;
        const float *w1 = clm_weight(m, e, "w1"), *w3 = clm_weight(m, e, "w3"), *w2 = clm_weight(m, e, "w2");
        for (int f = 0; f < CLM_F; f++) {
            double a = 0, b = 0;
            for (int i = 0; i < CLM_D; i++) {
                a += (double)w1[f * CLM_D + i] * (double)x[i];
                b += (double)w3[f * CLM_D + i] * (double)x[i];
            }
            for (int i = 0; i < CLM_D; i++) out[i] += share[e] / sum * (double)w2[i * CLM_F + f] * (a / (1 + exp(-a)) * b);
        }
    }
    for (int i = 0; i < CLM_D; i++) y[i] = (float)out[i];
}

TE_TEST_DEVICES(causal_lm_experts_by_hand) {
    te_causal_lm_desc d = clm_desc(TE_F32);
    te_module *m = te_causal_lm_create(te, &d);
    REQUIRE_OK(te);
    float *x = test_normal(CLM_T * CLM_D, 1), *want = test_floats(CLM_T * CLM_D);
    const float *gate = test_read(te_module_parameter(clm_part(m, "gate"), "weight"));
    for (int t = 0; t < CLM_T; t++) clm_formula(m, gate, x + t * CLM_D, want + t * CLM_D);
    te_tensor *y = te_forward(clm_part(m, ""), test_tensor(te, TE_F32, SHAPE(3, CLM_S, CLM_D), x));
    /* f32 sums of 24 numbers; on CUDA products of f32 have 10 bits of mantissa (TF32). */
    CHECK_ERROR_BELOW("experts", test_read(y), want, CLM_T * CLM_D, te_ctx_is_cuda(te) ? 5e-3 : 1e-6);
    CHECK_EQ_INT(te_tensor_ndim(y), 3);
    y = te_forward(clm_part(m, ""), te_tensor_zeros(te, TE_F32, SHAPE(3, 0, CLM_D)));
    CHECK(y && te_tensor_numel(y) == 0);
    CHECK_OK(te);
    te_module_destroy(m);
}

static te_tensor *clm_run_experts(te_ctx *te, te_tensor *const *inputs, void *user) {
    (void)te;
    return te_forward((te_module *)user, inputs[0]);
}
TE_TEST(causal_lm_expert_gradients_by_differences) {
    te_ctx *te = test_context("cpu");
    te_causal_lm_desc d = clm_desc(TE_F32);
    te_module *m = te_causal_lm_create(te, &d);
    REQUIRE_OK(te);
    te_tensor *inputs[4] = {te_tensor_normal(te, TE_F32, SHAPE(1, CLM_T, CLM_D), 0, 1), te_module_parameter(clm_part(m, "gate"), "weight"),
                            te_module_parameter(clm_part(m, "experts.1.w1"), "weight"), te_module_parameter(clm_part(m, "experts.1.w2"), "weight")};
    test_check_gradients(te, clm_run_experts, COUNT(inputs), inputs, clm_part(m, ""), 2e-2, 5e-3); /* what differences in f32 are good for */
    /* Experts that no token went to have gradients of zeros: their optimizer's states go on. */
    te_module_zero_grad(m);
    te_backward(te_sum_all(te_forward(clm_part(m, ""), te_tensor_narrow(inputs[0], 1, 0, 1))));
    int zeros = 0;
    for (int e = 0; e < CLM_E; e++) {
        char part[32];
        snprintf(part, sizeof part, "experts.%d.w3", e);
        te_tensor *grad = te_tensor_grad(te_module_parameter(clm_part(m, part), "weight"));
        REQUIRE(grad != NULL);
        const float *g = test_read(grad);
        double sum = 0;
        for (int i = 0; i < CLM_F * CLM_D; i++) sum += fabs((double)g[i]);
        zeros += sum == 0;
    }
    CHECK_EQ_INT(zeros, CLM_E - CLM_K);
    CHECK_OK(te);
    te_module_destroy(m);
}

/* The weights of all experts are one matrix, so the product of all reads them where they are; without memory at first as well. */
TE_TEST(causal_lm_experts_lie_together) {
    te_ctx *te = test_context("cpu");
    for (int meta = 0; meta < 2; meta++) {
        te_causal_lm_desc d = clm_desc(TE_BF16);
        d.device = meta ? TE_PARAMS_META : TE_PARAMS_DEFAULT;
        te_seed(te, 3);
        te_module *m = te_causal_lm_create(te, &d);
        if (meta) {
            te_seed(te, 3);
            te_module_reset_parameters(m);
        }
        REQUIRE_OK(te);
        const char *at = (const char *)te_tensor_data(te_module_parameter(clm_part(m, "experts.0.w2"), "weight"));
        for (int e = 1; e < CLM_E; e++) {
            char part[32];
            snprintf(part, sizeof part, "experts.%d.w2", e);
            CHECK((const char *)te_tensor_data(te_module_parameter(clm_part(m, part), "weight")) == at + e * CLM_D * CLM_F * 2);
        }
        CHECK(te_module_parameter(clm_part(m, "experts.w2"), "weight0") == NULL);
        te_module *last = clm_part(m, "experts.5.w1"); /* drawn by itself: not the values of expert 0 */
        CHECK(memcmp(test_read(te_module_parameter(last, "weight")), clm_weight(m, 0, "w1"), CLM_D * CLM_F * 4) != 0);
        te_module_destroy(m);
    }
    CHECK_OK(te);
}

/* ---- training ---- */

typedef struct clm_setup {
    const char *name;
    te_recipe (*recipe)(void); /* NULL: high precision */
    bool stored;               /* weights are stored quantized */
} clm_setup;

static bool clm_add_tensor(void *user, te_module *m, const char *path, te_tensor *x, te_entry_kind kind) {
    uint64_t *hash = (uint64_t *)user;
    const float *values = test_read(x);
    (void)m, (void)path, (void)kind;
    for (int64_t i = 0; i < te_tensor_numel(x); i++) {
        uint32_t bits;
        memcpy(&bits, &values[i], 4);
        *hash = (*hash ^ bits) * 0x100000001B3u;
    }
    return true;
}

/* Four steps by calls, or one by calls and three by launches; the experts that tokens go to change from step to step. Gives the losses and a hash of all that is trained. */
static uint64_t clm_train(te_ctx *te, const clm_setup *is, bool launches, float *losses) {
    te_causal_lm_desc d = clm_desc(is->recipe ? TE_BF16 : TE_F32);
    te_recipe recipe = is->recipe ? is->recipe() : te_recipe_current_scaling();
    te_graph *graph = NULL;
    uint64_t hash = 0xCBF29CE484222325u;
    te_seed(te, 11);
    if (is->stored) te_quantized_model_init_begin(te, &(te_quantized_model_init_desc){.recipe = &recipe, .preserve_high_precision_init_val = true});
    te_module *m = te_causal_lm_create(te, &d);
    if (is->stored) te_quantized_model_init_end(te);
    te_optimizer *adam = te_fused_adam_create(te, m, &(te_fused_adam_desc){.lr = 1e-2f});
    te_tensor *ids = te_tensor_zeros(te, TE_I32, SHAPE(3, CLM_S)), *targets = te_tensor_zeros(te, TE_I32, SHAPE(3, CLM_S)), *loss = te_tensor_zeros(te, TE_F32, SHAPE(1));
    for (int step = 0; step < 4; step++) {
        int32_t text[CLM_T + 1];
        for (int i = 0; i <= CLM_T; i++) text[i] = (i * i * 5 + step * 7 + 1) % CLM_V;
        te_tensor_copy_from_host(ids, text);
        te_tensor_copy_from_host(targets, text + 1);
        if (!launches || step < 2) {
            if (launches && step == 1) te_graph_begin(te);
            te_scope_begin(te);
            te_autocast_begin(te, &(te_autocast_desc){.recipe = &recipe, .disabled = !is->recipe});
            te_tensor *logits = te_forward(m, ids);
            te_autocast_end(te);
            te_tensor *mean = te_cross_entropy(logits, targets, NULL);
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
    te_module_visit_tensors(m, clm_add_tensor, &hash);
    CHECK_OK(te);
    te_graph_destroy(graph);
    te_optimizer_destroy(adam);
    te_module_destroy(m);
    return hash;
}
TE_TEST_DEVICES(causal_lm_experts_in_a_graph) {
    static const clm_setup setups[] = {{"none", NULL, false},
                                       {"delayed", te_recipe_delayed_scaling, false},
                                       {"current", te_recipe_current_scaling, false},
                                       {"block", te_recipe_block_scaling, false},
                                       {"mxfp8", te_recipe_mxfp8, false},
                                       {"nvfp4", te_recipe_nvfp4, false},
                                       {"delayed, stored", te_recipe_delayed_scaling, true},
                                       {"current, stored", te_recipe_current_scaling, true},
                                       {"block, stored", te_recipe_block_scaling, true},
                                       {"mxfp8, stored", te_recipe_mxfp8, true},
                                       {"nvfp4, stored", te_recipe_nvfp4, true}};
    for (int i = 0; i < COUNT(setups) && te_ok(te); i++) {
        float losses[2][4];
        if (i && (i + 1) % test_every_sanitized(1)) continue; /* with a sanitizer each recipe once */
        test_case("%s", setups[i].name);
        uint64_t calls = clm_train(te, &setups[i], false, losses[0]), launches = clm_train(te, &setups[i], true, losses[1]);
        CHECK_BYTES("losses", losses[1], losses[0], sizeof losses[0]);
        CHECK_MSG(calls == launches, "parameters or states differ");
        CHECK(losses[0][3] < losses[0][0]);
    }
}

/* ---- the MLP ---- */

/* As the class's, in memory of its own. */
static te_result clm_elsewhere(te_module *gate, te_forward_args *args) {
    te_tensor *y;
    te_module_set_forward(gate, NULL);
    y = te_forward_with(gate, args);
    te_module_set_forward(gate, clm_elsewhere);
    args->outputs.out = y ? te_mul(y, te_tensor_full(te_module_ctx(gate), te_tensor_dtype(y), te_tensor_ndim(y), te_tensor_shape(y), 1.0)) : NULL;
    return te_error_code(te_module_ctx(gate));
}
static void clm_count_copies(te_ctx *te, const te_trace *event, void *user) {
    (void)te;
    *(int *)user += event->phase == TE_TRACE_AFTER && event->op == TE_OP_COPY;
}
/* gate and up write where the activation reads: the bits of a copy of both, and no copy, where rows allow it. */
TE_TEST_DEVICES(causal_lm_mlp_reads_both_products) {
    static const te_dtype formats[] = {TE_F32, TE_BF16, TE_F16};
    static const char *const parts[] = {"gate_proj", "up_proj", "down_proj"};
    for (int n = 0; n < 3 * 2 * 2 * 2; n++) {
        const te_dtype dtype = formats[n % 3];
        const bool odd = n / 3 % 2, fp8 = n / 6 % 2, no_grad = n / 12;
        te_causal_lm_desc d = {.vocab_size = CLM_V, .hidden_size = CLM_D, .intermediate_size = odd ? 23 : 24, .num_hidden_layers = 1, .num_attention_heads = 2, .params_dtype = dtype, .init.std = 0.3f};
        te_module *m = te_causal_lm_create(te, &d), *mlp = te_module_find(m, "model.layers.0.mlp");
        te_recipe recipe = te_recipe_current_scaling();
        float *got[2][5] = {{NULL}};
        int64_t sizes[5] = {0};
        int copies[2] = {0, 0};
        test_case("%s%s%s%s", te_dtype_name(dtype), odd ? ", odd" : "", fp8 ? ", fp8" : "", no_grad ? ", without gradients" : "");
        REQUIRE_OK(te);
        if (odd && fp8) { /* rows of codes are padded, all alike */
            te_module_destroy(m);
            continue;
        }
        for (int run = 0; run < 2; run++) {
            te_tensor *x = te_tensor_set_requires_grad(test_tensor(te, dtype, SHAPE(3, CLM_S, CLM_D), test_normal(CLM_T * CLM_D, 1)), true), *y;
            if (run) te_module_set_forward(te_module_find(mlp, "gate_proj"), clm_elsewhere);
            te_module_zero_grad(m);
            te_set_trace(te, clm_count_copies, &copies[run]);
            if (no_grad) te_no_grad_begin(te);
            if (fp8) te_autocast_begin(te, &(te_autocast_desc){.recipe = &recipe});
            y = te_forward(mlp, x);
            if (fp8) te_autocast_end(te);
            if (no_grad) te_no_grad_end(te);
            else te_backward_from(y, test_tensor(te, dtype, SHAPE(3, CLM_S, CLM_D), test_normal(CLM_T * CLM_D, 2)));
            te_set_trace(te, NULL, NULL);
            REQUIRE_OK(te);
            sizes[0] = te_tensor_numel(y), got[run][0] = test_read(y);
            if (no_grad) continue;
            sizes[1] = te_tensor_numel(x), got[run][1] = test_read(te_tensor_grad(x));
            for (int i = 0; i < 3; i++) {
                te_tensor *g = te_tensor_grad(te_module_parameter(te_module_find(mlp, parts[i]), "weight"));
                sizes[2 + i] = te_tensor_numel(g), got[run][2 + i] = test_read(g);
            }
        }
        for (int i = 0; i < (no_grad ? 1 : 5); i++) CHECK_BYTES(i < 2 ? i ? "dx" : "out" : parts[i - 2], got[0][i], got[1][i], (size_t)sizes[i] * sizeof(float));
        CHECK(copies[1] >= 2); /* CLM_T rows of 23 have no whole number of 16 bytes */
        CHECK(odd ? copies[0] >= 2 : copies[0] == 0);
        te_module_destroy(m);
    }
}

/* Every request for memory in turn is refused while a model with experts is made and trained for a step: an error, nothing lost, and the context goes on. */
TE_TEST(causal_lm_memory_runs_out) {
    purse *host = new_purse();
    te_ctx_desc desc = purse_desc(host, NULL);
    te_ctx *te = test_context_with(&desc);
    te_causal_lm_desc d = clm_desc(TE_F32);
    const int32_t text[CLM_S] = {1, 5, 2, 7, 3};
    bool whole = false;
    d.device = TE_PARAMS_META;
    for (int64_t n = 1; !whole; n += test_every_of(17, 6)) {
        test_case("request %lld", (long long)n);
        host->calls = host->refused = 0;
        host->fail_at = n;
        te_scope_begin(te);
        te_module *m = te_causal_lm_create(te, &d);
        if (m) te_module_reset_parameters(m);
        te_tensor *ids = te_tensor_from_host(te, TE_I32, SHAPE(1, CLM_S), text), *loss = te_cross_entropy(te_forward(m, ids), ids, NULL);
        te_result played = te_backward(loss);
        host->fail_at = 0;
        whole = host->refused == 0;
        CHECK(te_ok(te) == (m && loss && played == TE_OK) && (te_ok(te) || !whole)); /* the pool gives back what it keeps, and asks once more */
        if (!te_ok(te)) CHECK_EQ_INT(te_error_code(te), TE_ERR_OUT_OF_MEMORY);
        te_scope_end(te);
        te_module_destroy(m);
        te_clear_error(te);
        REQUIRE(n < 100000);
    }
    CHECK_OK(te);
}

/* ---- logits of the last positions alone ---- */

TE_TEST_DEVICES(causal_lm_keeps_the_last_logits) {
    enum { B = 2, S = 5 };
    const int32_t ids[B * S] = {3, 1, 4, 1, 5, 9, 2, 6, 5, 3};
    for (int tied = 0; tied < 2; tied++)
        for (int64_t kept = 0; kept <= S; kept++) {
            const int64_t last = kept ? kept : S, n = B * last * CLM_V;
            te_causal_lm_desc d = clm_desc(TE_F32);
            test_case("tied %d, %d kept", tied, (int)kept);
            d.tie_word_embeddings = tied;
            te_seed(te, 3);
            te_module *m = te_causal_lm_create(te, &d);
            te_tensor *input = te_tensor_from_host(te, TE_I32, SHAPE(B, S), ids), *weight = te_module_parameter(te_module_find(m, tied ? "model.embed_tokens" : "lm_head"), "weight");
            te_tensor *dy = test_tensor(te, TE_F32, SHAPE(B, last, CLM_V), test_normal(n, 4));
            const float *logits[2], *grads[2];
            for (int i = 0; i < 2; i++) { /* logits of all positions, of which the last ones are taken; then of those alone */
                te_forward_args args = {.input = input, .logits_to_keep = i ? kept : 0};
                te_tensor *y = te_forward_with(m, &args);
                if (!i) y = te_tensor_narrow(y, 1, S - last, last);
                REQUIRE_OK(te);
                CHECK_EQ_INT(te_tensor_shape(y)[1], last);
                logits[i] = test_read(y);
                te_backward_from(y, dy);
                grads[i] = test_read(te_tensor_grad(weight));
                te_module_zero_grad(m);
                REQUIRE_OK(te);
            }
            /* the same products: the CPU's rows do not depend on each other; on CUDA another number of rows may get another kernel, and operands are rounded to TF32, 10 bits */
            CHECK_ERROR_BELOW("logits", logits[1], logits[0], n, te_ctx_is_cuda(te) ? 2e-3 : 0);
            CHECK_ERROR_BELOW("gradient", grads[1], grads[0], CLM_V * CLM_D, te_ctx_is_cuda(te) ? 2e-3 : 1e-6); /* sums of other lengths, of which the difference are zeros */
            te_module_destroy(m);
        }
}

/* ---- what is refused ---- */

TE_TEST(causal_lm_refusals) {
    te_ctx *te = test_context("cpu");
    te_causal_lm_desc d = clm_desc(TE_F32);
    d.num_local_experts = TE_MAX_GEMMS + 1;
    CHECK(te_causal_lm_create(te, &d) == NULL);
    CHECK_ERROR(te, TE_ERR_INVALID, "2 of 513 experts for each token");
    d.num_local_experts = 1;
    CHECK(te_causal_lm_create(te, &d) == NULL);
    CHECK_ERROR(te, TE_ERR_INVALID, "2 of 1 experts for each token");
    CHECK(te_sdpa_create(te, &(te_sdpa_desc){.format = (te_qkv_format)77}) == NULL);
    CHECK_ERROR(te, TE_ERR_INVALID, "format 77");
    CHECK(te_sdpa_create(te, &(te_sdpa_desc){.rule.softcap = -1}) == NULL);
    CHECK_ERROR(te, TE_ERR_INVALID, "rule.softcap is -1");
    te_module *m = te_sdpa_create(te, &(te_sdpa_desc){.rule.softcap = 30, .format = TE_BSHD});
    CHECK_OK(te);
    te_module_destroy(m);
    d.num_local_experts = d.num_experts_per_tok = 0;
    m = te_causal_lm_create(te, &d);
    CHECK_OK(te);
    CHECK(te_forward(m, te_tensor_zeros(te, TE_I32, SHAPE(0, 5))) == NULL);
    CHECK_ERROR(te, TE_ERR_SHAPE, "CausalLM: the ids are [0, 5]; [b, s] is needed, at least one of each");
    CHECK(te_forward(m, te_tensor_zeros(te, TE_I32, SHAPE(3, 0))) == NULL);
    CHECK_ERROR(te, TE_ERR_SHAPE, "CausalLM: the ids are [3, 0]; [b, s] is needed, at least one of each");
    te_forward_args args = {.input = te_tensor_zeros(te, TE_I32, SHAPE(2, 5)), .logits_to_keep = 6};
    CHECK(te_forward_with(m, &args) == NULL);
    CHECK_ERROR(te, TE_ERR_INVALID, "CausalLM: logits_to_keep is 6, and the ids are [2, 5]; 0, for all logits, to 5 are possible");
    args.logits_to_keep = -1;
    CHECK(te_forward_with(m, &args) == NULL);
    CHECK_ERROR(te, TE_ERR_INVALID, "CausalLM: logits_to_keep is -1");
    te_module_destroy(m);
}

TE_TEST(causal_lm_cache_belongs_to_its_model) {
    te_ctx *te = test_context("cpu");
    te_causal_lm_desc d = {.vocab_size = 16, .hidden_size = 16, .intermediate_size = 16, .num_hidden_layers = 3, .num_attention_heads = 2, .params_dtype = TE_F32};
    te_module *big = te_causal_lm_create(te, &d);
    d.num_hidden_layers = 1;
    te_module *small = te_causal_lm_create(te, &d);
    te_kv_cache *cache = te_kv_cache_create(small, 1, 2);
    te_forward_args args = {.input = te_tensor_full(te, TE_F32, SHAPE(1, 2, 16), 1), .kv_cache = cache};
    CHECK(te_forward_with(te_module_find(big, "model.layers.0"), &args) == NULL);
    CHECK_ERROR(te, TE_ERR_STATE, "te_no_grad_begin");
    te_no_grad_begin(te);
    CHECK(te_forward_with(te_module_find(big, "model.layers.2"), &args) == NULL);
    CHECK_ERROR(te, TE_ERR_INVALID, "kv_cache has 1 layers, and this is layer 2");
    args.input = te_tensor_full(te, TE_F32, SHAPE(1, 3, 16), 1);
    CHECK(te_forward_with(te_module_find(big, "model.layers.0"), &args) == NULL);
    CHECK_ERROR(te, TE_ERR_INVALID, "kv_cache is f32 [1, 2, 2, 8]");
    args.input = te_tensor_full(te, TE_F32, SHAPE(1, 2, 16), 1);
    CHECK(te_forward_with(te_module_find(small, "model.layers.0"), &args) != NULL);
    te_no_grad_end(te);
    CHECK_OK(te);
    te_kv_cache_destroy(cache);
    te_module_destroy(big);
    te_module_destroy(small);
}
