/* tests/moe/test_gate.c: the gates of a mixture of experts (api/experts.h) against the formulas written down again. */
#include "../dist/ranks.h"

/* ---- an oracle ---- */

typedef struct choice {
    int64_t tokens, experts, topk;
    te_gate_score score;
    bool before, norm, biased_weights;
    int groups, limited;
    double scale;
    const double *logits; /* [tokens, experts] */
    const float *bias;    /* [experts], or NULL */
    bool rules;           /* Automodel's choice among groups */
} choice;

static double score_of(te_gate_score f, double x) {
    if (f == TE_GATE_SQRTSOFTPLUS) return sqrt(log1p(exp(x)));
    return f == TE_GATE_SIGMOID || f == TE_GATE_SIGMOID_WITH_BIAS ? 1 / (1 + exp(-x)) : x;
}
static void softmax(double *x, const bool *of, int64_t n) {
    double top = -INFINITY, sum = 0;
    for (int64_t e = 0; e < n; e++)
        if (!of || of[e]) top = fmax(top, x[e]);
    for (int64_t e = 0; e < n; e++) sum += x[e] = of && !of[e] ? 0 : exp(x[e] - top);
    for (int64_t e = 0; e < n; e++) x[e] /= sum;
}
static int64_t best_of(const double *key, const bool *taken, int64_t n) {
    int64_t best = -1;
    for (int64_t e = 0; e < n; e++)
        if (!taken[e] && (best < 0 || key[e] > key[best])) best = e;
    return best;
}
/* weights [tokens, topk], id likewise; scores [tokens, experts]: what an auxiliary loss reads. */
static void choose(const choice *c, double *weights, int32_t *id, double *scores) {
    int64_t n = c->experts, size = n / (c->groups ? c->groups : 1);
    double key[64], s[64], raw[64];
    for (int64_t t = 0; t < c->tokens; t++) {
        bool taken[64] = {false}, open[64] = {false};
        double sum = 1e-20, all = 1e-20, *w = weights + t * c->topk;
        bool softmaxes = c->score == TE_GATE_SOFTMAX || c->score == TE_GATE_SOFTMAX_WITH_BIAS;
        for (int64_t e = 0; e < n; e++) raw[e] = s[e] = score_of(c->score, c->logits[t * n + e]);
        if (softmaxes) softmax(raw, NULL, n);
        if (c->score == TE_GATE_SOFTMAX_WITH_BIAS || c->before) memcpy(s, raw, sizeof s);
        for (int64_t e = 0; e < n; e++) key[e] = s[e] + (c->bias && c->score != TE_GATE_SOFTMAX ? c->bias[e] : 0);
        if (c->biased_weights) memcpy(s, key, sizeof s), memcpy(raw, key, sizeof s);
        if (c->groups > 1 && c->score != TE_GATE_SOFTMAX && c->score != TE_GATE_SQRTSOFTPLUS) {
            double worth[64];
            bool kept[64] = {false};
            for (int g = 0; g < c->groups; g++) {
                bool used[64] = {false};
                worth[g] = 0;
                for (int i = 0; i < (c->score == TE_GATE_SIGMOID && !c->bias ? 1 : 2); i++) {
                    int64_t e = best_of(key + g * size, used, size);
                    used[e] = true, worth[g] += key[g * size + e];
                }
            }
            for (int i = 0; i < c->limited; i++) {
                int64_t g = best_of(worth, kept, c->groups);
                kept[g] = true;
                for (int64_t e = 0; e < size; e++) open[g * size + e] = true;
            }
            for (int64_t e = 0; e < n; e++)
                if (!open[e]) key[e] = c->rules && c->score != TE_GATE_SIGMOID_WITH_BIAS ? 0 : -INFINITY;
        }
        for (int64_t k = 0; k < c->topk; k++) taken[id[t * c->topk + k] = (int32_t)best_of(key, taken, n)] = true;
        if (c->score == TE_GATE_SOFTMAX && !c->before) softmax(s, taken, n);
        for (int64_t k = 0; k < c->topk; k++) sum += w[k] = s[id[t * c->topk + k]];
        for (int64_t k = 0; k < c->topk; k++) w[k] *= c->scale / (c->norm && c->topk > 1 ? sum : 1);
        for (int64_t e = 0; e < n; e++) all += raw[e];
        for (int64_t e = 0; e < n && scores; e++) scores[t * n + e] = raw[e] / (c->norm && c->topk > 1 ? all : 1);
    }
}

enum { T = 13, DIM = 6, E = 12 };
static te_moe_config gate_config(const choice *c) {
    return (te_moe_config){.n_routed_experts = (int)c->experts, .n_activated_experts = (int)c->topk, .n_expert_groups = c->groups, .n_limited_groups = c->limited, .score_func = c->score,
                           .route_scale = (float)c->scale, .dim = DIM, .moe_inter_dim = 4, .norm_topk_prob = c->norm, .softmax_before_topk = c->before,
                           .router_weight_uses_score_correction_bias = c->biased_weights, .force_e_score_correction_bias = c->bias != NULL, .rules_of_automodel = c->rules, .dtype = TE_F32};
}
static const struct {
    te_gate_score score;
    bool before, norm, bias, biased_weights;
    int topk, groups, limited;
    double scale;
} cases[] = {{TE_GATE_SOFTMAX, false, false, false, false, 3, 0, 0, 1},          {TE_GATE_SOFTMAX, true, false, false, false, 3, 0, 0, 1},
             {TE_GATE_SOFTMAX, true, true, false, false, 4, 0, 0, 2.5},          {TE_GATE_SOFTMAX, false, true, true, false, 2, 4, 2, 1},
             {TE_GATE_SIGMOID, false, false, false, false, 3, 4, 2, 1},          {TE_GATE_SIGMOID, false, true, true, false, 2, 3, 1, 1},
             {TE_GATE_SIGMOID, false, false, true, true, 3, 0, 0, 1},            {TE_GATE_SIGMOID, false, true, true, true, 3, 0, 0, 1},
             {TE_GATE_SIGMOID_WITH_BIAS, false, true, true, false, 5, 4, 2, 3.5}, {TE_GATE_SIGMOID_WITH_BIAS, false, false, false, false, 1, 0, 0, 1},
             {TE_GATE_SOFTMAX_WITH_BIAS, false, true, true, false, 4, 4, 2, 1},  {TE_GATE_SOFTMAX_WITH_BIAS, false, false, false, false, 12, 0, 0, 1},
             {TE_GATE_SQRTSOFTPLUS, false, true, true, false, 3, 0, 0, 3.5},     {TE_GATE_SQRTSOFTPLUS, false, false, false, false, 2, 0, 0, 3.5}};

static double *logits_of(const float *x, const float *w, const float *row) {
    double *y = test_doubles(T * E);
    for (int t = 0; t < T; t++)
        for (int e = 0; e < E; e++) {
            y[t * E + e] = row ? row[e] : 0;
            for (int i = 0; i < DIM; i++) y[t * E + e] += (double)x[t * DIM + i] * w[e * DIM + i];
        }
    return y;
}
static void set(te_module *m, const char *name, const float *x) { te_tensor_copy(te_module_parameter(m, name), te_tensor_from_f32(te_module_ctx(m), TE_F32, te_tensor_ndim(te_module_parameter(m, name)), te_tensor_shape(te_module_parameter(m, name)), x)); }

TE_TEST_DEVICES(gate_chooses_and_weighs) {
    te = test_exact(te);
    for (int i = 0; i < COUNT(cases); i++) {
        test_case("case %d", i);
        const float *x = test_normal(T * DIM, 1), *w = test_normal(E * DIM, 2), *row = test_normal(E, 3), *bias = test_uniform(E, 4, -0.5f, 0.5f);
        choice c = {T, E, cases[i].topk, cases[i].score, cases[i].before, cases[i].norm, cases[i].biased_weights, cases[i].groups, cases[i].limited, cases[i].scale, logits_of(x, w, row),
                    cases[i].bias ? bias : NULL, false};
        te_moe_config config = gate_config(&c);
        config.router_bias = true;
        te_module *m = te_gate_create(te, &config, TE_DTYPE_NONE, NULL);
        REQUIRE_OK(te);
        set(m, "weight", w), set(m, "bias", row);
        if (c.bias) set(m, "e_score_correction_bias", bias);
        te_tensor *in = te_tensor_set_requires_grad(te_tensor_from_f32(te, TE_F32, SHAPE(T, DIM), x), true);
        te_forward_args args = {.input = in};
        te_tensor *got = te_forward_with(m, &args);
        REQUIRE_OK(te);
        double *want = test_doubles(T * c.topk);
        int32_t id[T * E], got_id[T * E];
        float near_want[T * E];
        choose(&c, want, id, NULL);
        for (int k = 0; k < T * c.topk; k++) near_want[k] = (float)want[k];
        te_tensor_to_host(args.outputs.topk_indices, got_id);
        CHECK(memcmp(id, got_id, (size_t)(T * c.topk) * sizeof(int32_t)) == 0);
        CHECK_TENSOR(got, near_want, 1e-5, 1e-6); /* f32 sums of six products through an exponential */
        CHECK(!args.outputs.aux_loss && !te_gate_expert_load(m));
        /* the gradient of the logits' bias along a direction is the difference of weights */
        const float *dw = test_normal(T * c.topk, 5), *direction = test_normal(E, 6);
        te_backward_from(got, te_tensor_from_f32(te, TE_F32, 2, te_tensor_shape(got), dw));
        REQUIRE_OK(te);
        float *grad = test_read(te_tensor_grad(te_module_parameter(m, "bias")));
        double along = 0, difference = 0, h = 1e-6;
        for (int e = 0; e < E; e++) along += (double)grad[e] * direction[e];
        for (int side = -1; side < 2; side += 2) {
            double *moved = test_doubles(T * E);
            choice there = c;
            for (int e = 0; e < T * E; e++) moved[e] = c.logits[e] + side * h * direction[e % E];
            there.logits = moved;
            choose(&there, want, id, NULL);
            for (int k = 0; k < T * c.topk; k++) difference += side * want[k] * dw[k] / (2 * h);
        }
        CHECK_MSG(fabs(along - difference) < 1e-4 * (1 + fabs(difference)), "%g and by differences %g", along, difference); /* f32 through sums of T * topk terms */
        CHECK(te_tensor_grad(in) && te_tensor_grad(te_module_parameter(m, "weight")));
        te_module_destroy(m);
    }
}

/* Zeros of other groups compete with negative scores, in two of the three functions that have groups; where the scores are positive, the choice is the same. */
TE_TEST_DEVICES(gate_rules_of_automodel) {
    static const te_gate_score scores[] = {TE_GATE_SIGMOID, TE_GATE_SOFTMAX_WITH_BIAS, TE_GATE_SIGMOID_WITH_BIAS, TE_GATE_SQRTSOFTPLUS, TE_GATE_SOFTMAX};
    te = test_exact(te);
    for (int i = 0; i < COUNT(scores) * 4; i++) {
        const te_gate_score score = scores[i / 4];
        const bool biased = i % 4 < 3, zeroes = score == TE_GATE_SIGMOID || score == TE_GATE_SOFTMAX_WITH_BIAS;
        const float *x = test_normal(T * DIM, 20 + i), *w = test_normal(E * DIM, 21 + i), *bias = test_uniform(E, 22 + i, -1.5f, 0.2f);
        /* of 4 groups of 3 experts 2, all of whose experts are chosen if the others are left out, or 1; 5 experts are more than one group has, which only zeros make possible */
        choice c = {T, E, i % 4 == 0 ? 6 : zeroes && i % 4 == 1 ? 5 : 3, score, false, false, false, 4, i % 4 ? 1 : 2, 1, logits_of(x, w, NULL), biased ? bias : NULL, true}, left_out = c;
        test_case("score %d, way %d", (int)score, i % 4);
        te_moe_config config = gate_config(&c);
        te_module *m = te_gate_create(te, &config, TE_DTYPE_NONE, NULL);
        REQUIRE_OK(te);
        set(m, "weight", w);
        if (biased) set(m, "e_score_correction_bias", bias);
        te_tensor *in = te_tensor_set_requires_grad(te_tensor_from_f32(te, TE_F32, SHAPE(T, DIM), x), true);
        te_forward_args args = {.input = in};
        te_tensor *got = te_forward_with(m, &args);
        REQUIRE_OK(te);
        double *want = test_doubles(T * c.topk), *other = test_doubles(T * c.topk);
        float near_want[T * 6];
        int32_t id[T * 6], got_id[T * 6], other_id[T * 6];
        choose(&c, want, id, NULL);
        for (int k = 0; k < T * c.topk; k++) near_want[k] = (float)want[k];
        te_tensor_to_host(args.outputs.topk_indices, got_id);
        CHECK(memcmp(id, got_id, (size_t)(T * c.topk) * sizeof(int32_t)) == 0);
        CHECK_TENSOR(got, near_want, 1e-5, 1e-6); /* f32 sums of six products through an exponential */
        if (c.topk != 5) { /* what te.h does without the switch */
            left_out.rules = false;
            choose(&left_out, other, other_id, NULL);
            CHECK((memcmp(id, other_id, (size_t)(T * c.topk) * sizeof(int32_t)) != 0) == (zeroes && biased));
        }
        CHECK(te_backward_from(got, te_tensor_full(te, TE_F32, SHAPE(T, c.topk), 1)) == TE_OK && te_tensor_grad(in));
        te_module_destroy(m);
    }
    choice c = {T, E, 5, TE_GATE_SIGMOID, false, false, false, 4, 1, 1, NULL, NULL, false};
    te_moe_config config = gate_config(&c);
    te_module *m = te_gate_create(te, &config, TE_DTYPE_NONE, NULL);
    CHECK(!te_forward(m, te_tensor_zeros(te, TE_F32, SHAPE(1, DIM))));
    CHECK_ERROR(te, TE_ERR_INVALID, "topk 5, and 1 groups of 3 experts have 3; a smaller topk, a larger group_topk or zero_other_groups is needed");
    te_module_destroy(m);
}

/* Upstream's vectors: sums, ranges, formats, [10, 0] biased to 10.5. */
TE_TEST_DEVICES(gate_formats_and_ranges) {
    te_moe_config c = {.n_routed_experts = 4, .n_activated_experts = 2, .dim = DIM, .moe_inter_dim = 4, .dtype = TE_F32, .norm_topk_prob = true};
    for (int d = 0; d < 3; d++)
        for (int precision = 0; precision < 3; precision++)
            for (int wide = 0; wide < 2; wide++)
                for (int f = 0; f < 2; f++) {
                    const te_dtype formats[] = {TE_F32, TE_F16, TE_BF16}, gates[] = {TE_DTYPE_NONE, TE_F32, TE_BF16};
                    c.score_func = f ? TE_GATE_SIGMOID : TE_GATE_SOFTMAX;
                    c.norm_topk_prob = !f;
                    c.router_weights_fp32 = wide;
                    te_module *m = te_gate_create(te, &c, gates[precision], NULL);
                    te_forward_args args = {.input = te_tensor_normal(te, formats[d], SHAPE(3, 5, DIM), 0, 1)};
                    te_tensor *w = te_forward_with(m, &args);
                    REQUIRE_OK(te);
                    CHECK(te_tensor_dtype(w) == (wide ? TE_F32 : formats[d]));
                    CHECK(te_tensor_ndim(w) == 2 && te_tensor_shape(w)[0] == 15 && te_tensor_shape(w)[1] == 2);
                    float *v = test_read(w);
                    for (int t = 0; t < 15; t++) {
                        CHECK(v[2 * t] >= 0 && v[2 * t] <= 1 && v[2 * t + 1] >= 0 && v[2 * t + 1] <= 1);
                        if (!f) CHECK(fabs(v[2 * t] + v[2 * t + 1] - 1) < (te_tensor_dtype(w) == TE_BF16 ? 8e-3 : 1e-3)); /* each rounded to eight, or eleven, bits */
                    }
                    te_module_destroy(m);
                }
    c = (te_moe_config){.n_routed_experts = 2, .n_activated_experts = 1, .dim = 1, .moe_inter_dim = 4, .dtype = TE_F32, .score_func = TE_GATE_SIGMOID, .force_e_score_correction_bias = true,
                        .router_weight_uses_score_correction_bias = true};
    te_module *m = te_gate_create(te, &c, TE_DTYPE_NONE, NULL);
    set(m, "weight", (const float[]){1, 1}), set(m, "e_score_correction_bias", (const float[]){10, 0});
    CHECK(test_read(te_forward(m, te_tensor_zeros(te, TE_F32, SHAPE(1, 1))))[0] == 10.5f);
    te_module_destroy(m);
    CHECK(!te_gate_create(te, &(te_moe_config){.n_routed_experts = 2, .n_activated_experts = 3, .dim = 1, .moe_inter_dim = 1}, TE_DTYPE_NONE, NULL));
    CHECK_ERROR(te, TE_ERR_INVALID, "n_activated_experts is 3 of n_routed_experts 2");
    c.gate_bias_update_factor = 0.1f, c.no_train_gate = true;
    CHECK(!te_gate_create(te, &c, TE_DTYPE_NONE, NULL));
    CHECK_ERROR(te, TE_ERR_INVALID, "gate_bias_update_factor is 0.1 and no_train_gate");
    c.no_train_gate = false;
    CHECK(!te_gate_create(te, &c, TE_I32, NULL));
    CHECK_ERROR(te, TE_ERR_DTYPE, "gate_precision is i32");
    c.enable_routing_replay = true;
    CHECK(!te_gate_create(te, &c, TE_DTYPE_NONE, NULL));
    CHECK_ERROR(te, TE_ERR_UNSUPPORTED, "enable_routing_replay");
}

static double aux_of(const choice *c, const uint8_t *padding, double *tokens) {
    double *w = test_doubles(T * E), *scores = test_doubles(T * E), load[E] = {0}, sum[E] = {0}, loss = 0;
    int32_t id[T * E];
    choose(c, w, id, scores);
    *tokens = 0;
    for (int t = 0; t < T; t++) {
        if (padding && padding[t]) continue;
        *tokens += 1;
        for (int k = 0; k < c->topk; k++) load[id[t * c->topk + k]]++;
        for (int e = 0; e < E; e++) sum[e] += scores[t * E + e];
    }
    for (int e = 0; e < E; e++) loss += load[e] * E / (c->topk * fmax(*tokens, 1)) * sum[e] / fmax(*tokens, 1);
    return loss;
}

TE_TEST_DEVICES(gate_auxiliary_loss) {
    te = test_exact(te);
    uint8_t padding[T] = {0, 1, 0, 0, 1}, none[T];
    memset(none, 1, sizeof none);
    for (int i = 0; i < COUNT(cases); i++)
        for (int p = 0; p < 3; p++) {
            test_case("case %d, padding %d", i, p);
            const float *x = test_normal(T * DIM, 1), *w = test_normal(E * DIM, 2), *bias = test_uniform(E, 4, -0.5f, 0.5f);
            choice c = {T, E, cases[i].topk, cases[i].score, cases[i].before, cases[i].norm, cases[i].biased_weights, cases[i].groups, cases[i].limited, cases[i].scale, logits_of(x, w, NULL),
                        cases[i].bias ? bias : NULL, false};
            const uint8_t *marks = p == 2 ? none : p ? padding : NULL;
            te_moe_config config = gate_config(&c);
            double tokens, want;
            config.aux_loss_coeff = 0.25f;
            config.router_bias = true;
            te_module *m = te_gate_create(te, &config, TE_F32, NULL);
            set(m, "weight", w);
            if (c.bias) set(m, "e_score_correction_bias", bias);
            te_forward_args args = {.input = te_tensor_from_f32(te, TE_F32, SHAPE(T, DIM), x)};
            if (marks) args.attention.attention_mask = te_tensor_from_host(te, TE_U8, SHAPE(T), marks);
            te_tensor *y = te_forward_with(m, &args);
            REQUIRE_OK(te);
            want = aux_of(&c, marks, &tokens);
            REQUIRE(args.outputs.aux_loss && te_tensor_dtype(args.outputs.aux_loss) == TE_F32);
            CHECK_MSG(fabs(te_tensor_item(args.outputs.aux_loss) - want) < 1e-5 * (1 + fabs(want)), "%g, not %g", te_tensor_item(args.outputs.aux_loss), want);
            CHECK(c.bias || want >= 0);
            /* the weights' gradient is 0 here, so all that arrives is the loss's, times scale and coefficient */
            te_set_moe_aux_loss_scale(te, 10);
            te_backward_from(y, te_tensor_zeros(te, TE_F32, 2, te_tensor_shape(y)));
            te_set_moe_aux_loss_scale(te, 0);
            REQUIRE_OK(te);
            const float *grad = test_read(te_tensor_grad(te_module_parameter(m, "bias"))), *direction = test_normal(E, 6);
            double along = 0, difference = 0, h = 1e-6;
            for (int e = 0; e < E; e++) along += (double)grad[e] * direction[e];
            for (int side = -1; side < 2; side += 2) {
                double *moved = test_doubles(T * E);
                choice there = c;
                for (int e = 0; e < T * E; e++) moved[e] = c.logits[e] + side * h * direction[e % E];
                there.logits = moved;
                difference += side * 10 * 0.25 * aux_of(&there, marks, &tokens) / (2 * h);
            }
            CHECK_MSG(fabs(along - difference) < 1e-4 * (1 + fabs(difference)), "%g and by differences %g", along, difference);
            te_module_train(m, false);
            te_forward_with(m, &args);
            CHECK(!args.outputs.aux_loss);
            te_module_destroy(m);
        }
}

/* The scale's default is 1, and the weights' own gradient passes. */
TE_TEST(gate_auxiliary_loss_adds_to_the_weights_gradient) {
    te_ctx *te = test_context("cpu");
    te_moe_config c = {.n_routed_experts = 4, .n_activated_experts = 2, .dim = DIM, .moe_inter_dim = 4, .dtype = TE_F32, .score_func = TE_GATE_SIGMOID, .aux_loss_coeff = 1, .router_bias = true};
    float grads[4][4];
    te_module *m = te_gate_create(te, &c, TE_DTYPE_NONE, NULL);
    te_tensor *x = te_tensor_normal(te, TE_F32, SHAPE(5, DIM), 0, 1);
    for (int i = 0; i < 4; i++) { /* loss alone; twice the loss; weights alone; both */
        te_module_zero_grad(m);
        te_set_moe_aux_loss_scale(te, i == 1 ? 2.0f : i == 2 ? 1e-30f : 0.0f);
        te_tensor *y = te_forward(m, x);
        te_backward_from(y, te_tensor_full(te, TE_F32, 2, te_tensor_shape(y), i < 2 ? 0 : 1));
        memcpy(grads[i], test_read(te_tensor_grad(te_module_parameter(m, "bias"))), sizeof grads[i]);
    }
    CHECK(grads[0][0] != 0 || grads[0][1] != 0);
    for (int e = 0; e < 4; e++) {
        CHECK(fabs(grads[1][e] - 2 * grads[0][e]) < 1e-6);
        CHECK(fabs(grads[3][e] - grads[0][e] - grads[2][e]) < 1e-6);
    }
    CHECK(te_set_moe_aux_loss_scale(te, INFINITY) == TE_ERR_INVALID);
    CHECK_ERROR(te, TE_ERR_INVALID, "the scale is inf");
    te_module_destroy(m);
}

TE_TEST_DEVICES(gate_bias_follows_the_load) {
    te_moe_config c = {.n_routed_experts = 3, .n_activated_experts = 1, .dim = 3, .moe_inter_dim = 4, .dtype = TE_F32, .score_func = TE_GATE_SIGMOID_WITH_BIAS, .gate_bias_update_factor = 0.125f};
    const float far_apart[] = {20, -20, -20, -20, 20, -20, -20, -20, 20}, x[] = {1, 0, 0, 1, 0, 0, 0, 1, 0, 0, 1, 0, 1, 0, 0, 0, 0, 1}; /* experts 0, 0, 1, 1, 0, 2 */
    const uint8_t last[6] = {0, 0, 0, 0, 0, 1};
    te_module *m = te_gate_create(te, &c, TE_DTYPE_NONE, NULL);
    set(m, "weight", far_apart);
    te_forward_args args = {.input = te_tensor_from_f32(te, TE_F32, SHAPE(6, 3), x)};
    CHECK(te_gate_update_bias(m, NULL) == TE_ERR_STATE);
    CHECK_ERROR(te, TE_ERR_STATE, "no tokens have been counted");
    te_forward_with(m, &args);
    args.attention.attention_mask = te_tensor_from_host(te, TE_U8, SHAPE(6), last);
    te_forward_with(m, &args);
    CHECK_TENSOR(te_gate_expert_load(m), ((const float[]){6, 4, 1}), 0, 0);
    CHECK(te_gate_update_bias(m, NULL) == TE_OK);
    CHECK_TENSOR(te_module_parameter(m, "e_score_correction_bias"), ((const float[]){-0.125f, -0.125f, 0.125f}), 0, 0);
    CHECK(!te_gate_expert_load(m));
    args.attention.attention_mask = NULL;
    /* a buffer in bf16 forgets what it cannot hold; the f32 behind it does not */
    te_module_add_buffer(m, "e_score_correction_bias", te_tensor_full(te, TE_BF16, SHAPE(3), 64));
    for (int i = 0; i < 4; i++) {
        te_forward_with(m, &args);
        CHECK(te_gate_update_bias(m, NULL) == TE_OK);
    }
    CHECK_TENSOR(te_module_parameter(m, "e_score_correction_bias"), ((const float[]){63.5f, 64.0f, 64.5f}), 0, 0);
    /* a value that was written since, as by a checkpoint, is the one that goes on */
    te_tensor_fill(te_module_parameter(m, "e_score_correction_bias"), 2);
    te_forward_with(m, &args);
    CHECK(te_gate_update_bias(m, NULL) == TE_OK);
    CHECK_TENSOR(te_module_parameter(m, "e_score_correction_bias"), ((const float[]){1.875f, 2.0f, 2.125f}), 0, 0);
    te_module_train(m, false);
    te_forward_with(m, &args);
    CHECK(!te_gate_expert_load(m) && te_gate_update_bias(m, NULL) == TE_ERR_STATE);
    CHECK_ERROR(te, TE_ERR_STATE, "in evaluation");
    te_module_destroy(m);
    c.gate_bias_update_factor = 0;
    m = te_gate_create(te, &c, TE_DTYPE_NONE, NULL);
    CHECK(te_gate_update_bias(m, NULL) == TE_ERR_INVALID);
    CHECK_ERROR(te, TE_ERR_INVALID, "gate_bias_update_factor is 0");
    te_module_destroy(m);
}

/* One rank's input, or its gate, is not as it should be: the ranks that share its sequences hear of it from the rank, and not by its end. */
static void gate_fails_on_one_rank(rank_state *s) {
    te_moe_config c = {.n_routed_experts = 4, .n_activated_experts = 2, .dim = 4, .moe_inter_dim = 4, .dtype = TE_F32, .aux_loss_coeff = 1, .score_func = TE_GATE_SIGMOID, .gate_bias_update_factor = 1};
    te_module *gate = te_gate_create(s->te, &c, TE_DTYPE_NONE, s->group);
    te_module *moe = te_moe_create(s->te, &c, &(te_moe_backend){.experts = TE_EXPERTS_TORCH_MM, .dispatcher = TE_DISPATCHER_TORCH, .cp_group = s->group});
    for (int way = 0; way < 2; way++)
        for (int bad = 1; bad >= 0; bad--) {
            te_forward_args args = {.input = te_tensor_full(s->te, TE_F32, SHAPE(3, 4 + (bad && s->rank == 1)), 1)};
            EXPECT(s, (te_forward_with(way ? moe : gate, &args) == NULL) == (bad != 0));
            if (bad) EXPECT(s, strstr(te_error(s->te), s->rank ? "is needed" : "rank 1 failed"));
            te_clear_error(s->te);
        }
    te_module_destroy(gate);
    te_module_destroy(moe);
}
TE_TEST(gate_of_ranks_fails_together) { run_ranks(2, gate_fails_on_one_rank, NULL); }
static void balance_fails_on_one_rank(rank_state *s) {
    te_moe_config c = {.n_routed_experts = 4, .n_activated_experts = 2, .dim = 4, .moe_inter_dim = 4, .dtype = TE_F32, .score_func = TE_GATE_SIGMOID, .gate_bias_update_factor = 1};
    te_module *m = te_gate_create(s->te, &c, TE_DTYPE_NONE, NULL);
    if (s->rank == 0) te_forward(m, te_tensor_full(s->te, TE_F32, SHAPE(3, 4), 1));
    EXPECT(s, te_gate_update_bias(m, s->group) == TE_ERR_STATE);
    EXPECT(s, strstr(te_error(s->te), s->rank ? "no tokens have been counted" : "rank 1 failed"));
    te_clear_error(s->te);
    te_module_destroy(m);
}
TE_TEST(gate_balance_of_ranks_fails_together) { run_ranks(2, balance_fails_on_one_rank, NULL); }

/* Run again in the backward pass, a gate counts once, and gives the gradients that it gives without a checkpoint. */
TE_TEST_DEVICES(gate_counts_once_under_a_checkpoint) {
    te_moe_config c = {.n_routed_experts = 4, .n_activated_experts = 2, .dim = DIM, .moe_inter_dim = 4, .dtype = TE_F32, .gate_bias_update_factor = 0.125f, .aux_loss_coeff = 0.5f,
                       .score_func = TE_GATE_SIGMOID};
    float load[2][4], grad[2][4 * DIM], aux[2];
    for (int on = 0; on < 2; on++) {
        te_seed(te, 3);
        te_module *m = te_gate_create(te, &c, TE_DTYPE_NONE, NULL);
        te_module_set_checkpoint(m, on);
        te_forward_args args = {.input = te_tensor_set_requires_grad(te_tensor_normal(te, TE_F32, SHAPE(9, DIM), 0, 1), true)};
        te_tensor *y = te_forward_with(m, &args);
        REQUIRE_OK(te);
        aux[on] = (float)te_tensor_item(args.outputs.aux_loss);
        CHECK(args.outputs.topk_indices != NULL);
        te_backward(te_sum_all(y));
        REQUIRE_OK(te);
        memcpy(load[on], test_read(te_gate_expert_load(m)), sizeof load[on]);
        memcpy(grad[on], test_read(te_tensor_grad(te_module_parameter(m, "weight"))), sizeof grad[on]);
        te_module_destroy(m);
    }
    CHECK(memcmp(load[0], load[1], sizeof load[0]) == 0 && load[0][0] + load[0][1] + load[0][2] + load[0][3] == 18);
    CHECK(memcmp(grad[0], grad[1], sizeof grad[0]) == 0 && aux[0] == aux[1]);
}

TE_TEST_DEVICES(fake_gate_goes_round) {
    enum { TOKENS = 1000, EXPERTS = 8, TOPK = 2 };
    const te_dtype formats[] = {TE_F32, TE_F16, TE_BF16};
    te_moe_config c = {.n_routed_experts = EXPERTS, .n_activated_experts = TOPK, .dim = 4, .moe_inter_dim = 4};
    int32_t id[TOKENS * TOPK], again[TOKENS * TOPK];
    for (int skip = 0; skip < EXPERTS; skip += skip == 1 ? 2 : skip == 3 ? 4 : 1) { /* 0, 1, 3, 7 */
        te_module *m = te_fake_balanced_gate_create(te, &c, skip, 0);
        for (int d = 0; d < 3; d++) {
            te_forward_args args = {.input = te_tensor_normal(te, formats[d], SHAPE(TOKENS, 4), 0, 1)};
            te_tensor *w = te_forward_with(m, &args);
            int count[EXPERTS] = {0};
            REQUIRE_OK(te);
            CHECK(te_tensor_dtype(w) == formats[d] && !args.outputs.aux_loss);
            float *v = test_read(w);
            te_tensor_to_host(args.outputs.topk_indices, id);
            for (int i = 0; i < TOKENS * TOPK; i++) {
                CHECK(v[i] == 0.5f && id[i] == i % (EXPERTS - skip) + skip);
                count[id[i]]++;
            }
            for (int e = skip; e < EXPERTS; e++) CHECK(abs(count[e] * (EXPERTS - skip) - TOKENS * TOPK) <= TOKENS * TOPK / 5);
        }
        te_module_destroy(m);
    }
    /* fewer experts than are chosen: one of them twice */
    c.n_activated_experts = 4;
    te_module *m = te_fake_balanced_gate_create(te, &c, 5, 0);
    te_forward_args few = {.input = te_tensor_zeros(te, TE_F32, SHAPE(2, 4))};
    te_forward_with(m, &few);
    te_tensor_to_host(few.outputs.topk_indices, id);
    CHECK(memcmp(id, (const int32_t[]){5, 6, 7, 5, 6, 7, 5, 6}, 32) == 0 && te_gate_update_bias(m, NULL) == TE_OK);
    te_module_destroy(m);
    CHECK(!te_fake_balanced_gate_create(te, &c, 5, 0.5f));
    CHECK_ERROR(te, TE_ERR_INVALID, "4 different experts of 3");
    CHECK(!te_fake_balanced_gate_create(te, &c, 8, 0));
    CHECK_ERROR(te, TE_ERR_INVALID, "skip_first_n_experts is 8 of 8");
    /* with noise */
    c.n_activated_experts = TOPK;
    te_tensor *x = te_tensor_normal(te, TE_F32, SHAPE(TOKENS, 4), 0, 1), *other = te_tensor_normal(te, TE_F32, SHAPE(TOKENS, 4), 0, 1);
    for (int n = 1; n < 3; n++) {
        m = te_fake_balanced_gate_create(te, &c, 3, 0.5f * n);
        te_forward_args args = {.input = x};
        float *v = test_read(te_forward_with(m, &args));
        double deviation = 0;
        te_tensor_to_host(args.outputs.topk_indices, id);
        for (int t = 0; t < TOKENS; t++) {
            CHECK(id[2 * t] != id[2 * t + 1] && id[2 * t] >= 3 && id[2 * t + 1] >= 3 && id[2 * t] < EXPERTS && id[2 * t + 1] < EXPERTS);
            CHECK(fabs(v[2 * t] + v[2 * t + 1] - 1) < 1e-3 && v[2 * t] > 0 && v[2 * t + 1] > 0);
            deviation += (v[2 * t] - 0.5) * (v[2 * t] - 0.5) / TOKENS;
        }
        CHECK(sqrt(deviation) > 0.05 * n);
        te_forward_with(m, &args);
        te_tensor_to_host(args.outputs.topk_indices, again);
        CHECK(memcmp(id, again, sizeof id) == 0);
        args.input = other;
        te_forward_with(m, &args);
        te_tensor_to_host(args.outputs.topk_indices, again);
        CHECK(memcmp(id, again, sizeof id) != 0);
        te_module_destroy(m);
    }
}
