/* tests/moe/test_experts.c: experts, their dispatchers and MoE (api/experts.h) against loops over tokens and experts in double, ranks against one rank, files against parameters. */
#include "../dist/ranks.h"

enum { DIM = 8, INTER = 6, EXPERTS = 8, TOPK = 2 };

/* ---- an oracle ---- */

/* One mixture in numbers: weights [E, dim, up], [E, inter, dim], biases or NULL. */
typedef struct formula {
    int64_t tokens, dim, inter, experts, topk;
    te_expert_activation activation;
    double limit, alpha, swiglu_limit;
    const double *x, *w, *up, *down, *up_bias, *down_bias;
    const int32_t *id; /* -1: nobody */
} formula;

static double sigma(double x) { return 1 / (1 + exp(-x)); }
static double between(const formula *f, const double *h, int64_t i) {
    bool pairs = f->activation == TE_EXPERT_QUICK_GEGLU;
    double g = pairs ? h[2 * i] : h[i], u = f->activation == TE_EXPERT_RELU2 ? 0 : pairs ? h[2 * i + 1] : h[f->inter + i], c = fmin(g, f->limit);
    switch (f->activation) {
    case TE_EXPERT_SWIGLU:
        if (f->swiglu_limit > 0) g = fmin(g, f->swiglu_limit), u = fmax(fmin(u, f->swiglu_limit), -f->swiglu_limit);
        return g * sigma(g) * u;
    case TE_EXPERT_GEGLU: return 0.5 * g * (1 + tanh(0.7978845608 * (g + 0.044715 * g * g * g))) * u;
    case TE_EXPERT_RELU2: return g > 0 ? g * g : 0;
    default: return c * sigma(f->alpha * c) * (fmax(fmin(u, f->limit), -f->limit) + 1);
    }
}
/* y [tokens, dim]. */
static double *outputs_of(const formula *f) {
    double *y = test_doubles(f->tokens * f->dim);
    int64_t up = f->activation == TE_EXPERT_RELU2 ? f->inter : 2 * f->inter;
    double *h = test_doubles(up);
    for (int64_t t = 0; t < f->tokens; t++)
        for (int64_t k = 0; k < f->topk; k++) {
            int64_t e = f->id[t * f->topk + k];
            double p = f->w[t * f->topk + k];
            if (e < 0 || e >= f->experts) continue;
            for (int64_t j = 0; j < up; j++) {
                h[j] = f->up_bias ? f->up_bias[e * up + j] : 0;
                for (int64_t i = 0; i < f->dim; i++) h[j] += f->x[t * f->dim + i] * f->up[(e * f->dim + i) * up + j];
            }
            for (int64_t d = 0; d < f->dim; d++) {
                double o = 0;
                for (int64_t i = 0; i < f->inter; i++) o += between(f, h, i) * f->down[(e * f->inter + i) * f->dim + d];
                y[t * f->dim + d] += p * (o + (f->down_bias ? f->down_bias[e * f->dim + d] : 0)); /* both orders are the same sum */
            }
        }
    return y;
}

/* ---- experts of one rank ---- */

typedef te_module *(*make_experts)(te_ctx *te, const te_moe_config *c, const te_moe_backend *b);
static const struct kind {
    const char *name;
    make_experts make;
    te_experts_backend way;
} kinds[] = {{"loop", te_grouped_experts_create, TE_EXPERTS_TORCH},          {"torch_mm", te_grouped_experts_create, TE_EXPERTS_TORCH_MM},
             {"gmm", te_grouped_experts_deepep_create, TE_EXPERTS_GMM},      {"deepep torch_mm", te_grouped_experts_deepep_create, TE_EXPERTS_TORCH_MM},
             {"deepep loop", te_grouped_experts_deepep_create, TE_EXPERTS_TORCH}, {"te", te_grouped_experts_te_create, TE_EXPERTS_TE}};
enum { KINDS = 6, TE_KIND = 5 };

static te_moe_config config_of(void) {
    return (te_moe_config){.n_routed_experts = EXPERTS, .n_activated_experts = TOPK, .dim = DIM, .moe_inter_dim = INTER, .dtype = TE_F32, .init_std = 0.5f};
}
static int32_t *ids(int64_t n, uint64_t seed, int low, int high) {
    int64_t *wide = test_integers(n, seed, low, high);
    int32_t *x = (int32_t *)test_alloc((size_t)(n + 1) * sizeof(int32_t));
    for (int64_t i = 0; i < n; i++) x[i] = (int32_t)wide[i];
    return x;
}
static double *wide(const float *x, int64_t n) {
    double *y = test_doubles(n);
    for (int64_t i = 0; i < n; i++) y[i] = x[i];
    return y;
}
static float *narrow(const double *x, int64_t n) {
    float *y = test_floats(n);
    for (int64_t i = 0; i < n; i++) y[i] = (float)x[i];
    return y;
}
static te_tensor *narrow_of(te_ctx *te, int ndim, const int64_t *shape, const double *x) {
    int64_t n = 1;
    for (int i = 0; i < ndim; i++) n *= shape[i];
    return te_tensor_from_f32(te, TE_F32, ndim, shape, narrow(x, n));
}
static te_tensor *leaf(te_ctx *te, int ndim, const int64_t *shape, const double *x) { return te_tensor_set_requires_grad(narrow_of(te, ndim, shape, x), true); }

TE_TEST_DEVICES(experts_compute_what_the_formula_says) {
    enum { T = 11 };
    te = test_exact(te);
    for (int a = 0; a < 12; a++)
        for (int k = 0; k < KINDS; k++) {
            te_moe_config c = config_of();
            c.expert_activation = (te_expert_activation)(a % 5);
            c.swiglu_limit = a == 5 ? 0.7f : 0;
            c.activation_limit = a == 6 ? 0.5f : 0;
            c.activation_alpha = a == 6 ? 1.1f : 0;
            c.expert_bias = a >= 3;
            c.apply_router_weight_after_down = a == 8 || a == 9;
            if (k == TE_KIND && c.apply_router_weight_after_down) continue;
            test_case("activation %d of %s, case %d", (int)c.expert_activation, kinds[k].name, a);
            int64_t up = c.expert_activation == TE_EXPERT_RELU2 ? INTER : 2 * INTER;
            formula f = {.tokens = T, .dim = DIM, .inter = INTER, .experts = EXPERTS, .topk = TOPK, .activation = c.expert_activation, .limit = a == 6 ? 0.5 : 7, .alpha = a == 6 ? 1.1f : 1.702,
                         .swiglu_limit = c.swiglu_limit, .x = wide(test_normal(T * DIM, 1), T * DIM), .w = wide(test_uniform(T * TOPK, 2, 0, 1), T * TOPK),
                         .up = wide(test_normal(EXPERTS * DIM * up, 3), EXPERTS * DIM * up), .down = wide(test_normal(EXPERTS * INTER * DIM, 4), EXPERTS * INTER * DIM), .id = ids(T * TOPK, 5, a == 4 ? -1 : 0, a == 4 ? EXPERTS + 3 : EXPERTS)};
            if (c.expert_bias) f.up_bias = wide(test_normal(EXPERTS * up, 6), EXPERTS * up), f.down_bias = wide(test_normal(EXPERTS * DIM, 7), EXPERTS * DIM);
            te_module *m = kinds[k].make(te, &c, &(te_moe_backend){.experts = kinds[k].way});
            REQUIRE_OK(te);
            te_experts_set(m, TE_EXPERTS_GATE_AND_UP_PROJS, narrow_of(te, SHAPE(EXPERTS, DIM, up), f.up));
            te_experts_set(m, TE_EXPERTS_DOWN_PROJS, narrow_of(te, SHAPE(EXPERTS, INTER, DIM), f.down));
            if (c.expert_bias) te_experts_set(m, TE_EXPERTS_GATE_UP_PROJ_BIAS, narrow_of(te, SHAPE(EXPERTS, up), f.up_bias));
            if (c.expert_bias) te_experts_set(m, TE_EXPERTS_DOWN_PROJ_BIAS, narrow_of(te, SHAPE(EXPERTS, DIM), f.down_bias));
            te_tensor *x = leaf(te, SHAPE(T, DIM), f.x), *w = leaf(te, SHAPE(T, TOPK), f.w);
            te_forward_args args = {.input = x, .topk_weights = w, .topk_indices = te_tensor_from_host(te, TE_I32, SHAPE(T, TOPK), f.id)};
            te_tensor *y = te_forward_with(m, &args);
            REQUIRE_OK(te);
            CHECK_TENSOR(y, narrow(outputs_of(&f), T * DIM), 2e-5, 2e-5); /* sums of eight and six products in f32 */
            /* the gradient along a direction is the difference of outputs */
            float *dy = test_normal(T * DIM, 8);
            te_backward_from(y, te_tensor_from_f32(te, TE_F32, SHAPE(T, DIM), dy));
            REQUIRE_OK(te);
            for (int part = 0; part < 4; part++) {
                int64_t n = part == 0 ? T * DIM : part == 1 ? T * TOPK : part == 2 ? EXPERTS * DIM * up : EXPERTS * DIM;
                const double *at = part == 0 ? f.x : part == 1 ? f.w : part == 2 ? f.up : f.down_bias;
                if (!at || (k == TE_KIND && part > 1)) continue;
                te_tensor *grad = te_tensor_grad(part == 0 ? x : part == 1 ? w : te_module_parameter(m, part == 2 ? "gate_and_up_projs" : "down_proj_bias"));
                REQUIRE(grad);
                const float *got = test_read(grad), *direction = test_normal(n, 9);
                double *moved = test_doubles(n), along = 0, difference = 0, h = 1e-6; /* kinks of clamps are rare in so small a step */
                for (int64_t i = 0; i < n; i++) along += (double)got[i] * direction[i];
                for (int side = -1; side < 2; side += 2) {
                    formula g = f;
                    for (int64_t i = 0; i < n; i++) moved[i] = at[i] + side * h * direction[i];
                    *(part == 0 ? &g.x : part == 1 ? &g.w : part == 2 ? &g.up : &g.down_bias) = moved;
                    double *there = outputs_of(&g);
                    for (int i = 0; i < T * DIM; i++) difference += side * there[i] * dy[i] / (2 * h);
                }
                CHECK_MSG(fabs(along - difference) < 1e-4 * (1 + fabs(difference)), "part %d: %g and by differences %g", part, along, difference); /* f32 sums of some hundred products */
            }
            te_module_destroy(m);
        }
}

/* Padding, ids of nobody, parameters of another format, and a call in which every token is nobody's. */
TE_TEST_DEVICES(experts_pass_over_padding_and_strangers) {
    const uint8_t padding[4] = {0, 1, 0, 0};
    for (int k = 0; k < KINDS; k++) {
        test_case("%s", kinds[k].name);
        te_moe_config c = config_of();
        c.expert_bias = true;
        c.dtype = k % 2 ? TE_BF16 : TE_F32;
        te_module *m = kinds[k].make(te, &c, &(te_moe_backend){.experts = kinds[k].way});
        /* numbers of other experts change nothing: whoever is -1, or beyond, or padding, is 0 */
        te_tensor *x = te_tensor_normal(te, TE_F32, SHAPE(2, 2, DIM), 0, 1), *w = te_tensor_uniform(te, TE_F32, SHAPE(4, TOPK), 0, 1);
        te_forward_args args = {.input = k == TE_KIND ? te_tensor_cast(x, c.dtype) : x, .topk_weights = w,
                                .topk_indices = te_tensor_from_host(te, TE_I64, SHAPE(4, TOPK), (const int64_t[]){-1, 99, 1, 2, 3, 3, 8, 0})};
        args.attention.attention_mask = te_tensor_from_host(te, TE_U8, SHAPE(2, 2), padding);
        float *y = test_read(te_forward_with(m, &args));
        REQUIRE_OK(te);
        double sum[4] = {0};
        for (int i = 0; i < 4 * DIM; i++) sum[i / DIM] += fabs(y[i]);
        CHECK(sum[0] == 0 && sum[1] == 0 && sum[2] > 0 && sum[3] > 0);
        CHECK(te_tensor_dtype(args.outputs.out) == te_tensor_dtype(args.input) && te_tensor_ndim(args.outputs.out) == 3);
        /* nobody at all: zeros, and gradients of zeros for every parameter */
        te_tensor_set_requires_grad(w, true);
        args.topk_indices = te_tensor_full(te, TE_I32, SHAPE(4, TOPK), -1);
        te_backward(te_sum_all(te_forward_with(m, &args)));
        REQUIRE_OK(te);
        int with = 0, all = 0;
        for (int child = -1; child < te_module_num_children(m); child++) {
            te_module *at = child < 0 ? m : te_module_child(m, child);
            for (int i = 0; i < 4 * EXPERTS; i++) {
                char name[32];
                snprintf(name, sizeof name, "%s%d", i % 2 ? "bias" : "weight", i / 2);
                te_tensor *p = te_module_parameter(at, child < 0 ? te_experts_tensor_name((te_experts_tensor)i) : name);
                if (!p || (child < 0 && i > 3)) continue;
                all++;
                if (!te_tensor_grad(p)) continue;
                with++;
                float *g = test_read(te_tensor_grad(p));
                for (int64_t j = 0; j < te_tensor_numel(p); j++) CHECK(g[j] == 0);
            }
        }
        CHECK_MSG(with == all && all == (k == TE_KIND ? 4 * EXPERTS : 4), "%d of %d parameters have a gradient", with, all);
        te_module_destroy(m);
    }
}

/* A8: of weights that are 0 nothing stays but the sum of p b, in each implementation. */
TE_TEST_DEVICES(experts_weigh_their_last_bias) {
    for (int k = 0; k < KINDS; k++) {
        test_case("%s", kinds[k].name);
        te_moe_config c = config_of();
        c.expert_bias = true;
        te_module *m = kinds[k].make(te, &c, &(te_moe_backend){.experts = kinds[k].way});
        const float *b = test_normal(EXPERTS * DIM, 1), *p = test_uniform(6 * TOPK, 2, 0, 1);
        const int32_t *id = ids(6 * TOPK, 3, 0, EXPERTS);
        float want[6 * DIM] = {0};
        te_experts_set(m, TE_EXPERTS_GATE_AND_UP_PROJS, te_tensor_zeros(te, TE_F32, SHAPE(EXPERTS, DIM, 2 * INTER)));
        te_experts_set(m, TE_EXPERTS_DOWN_PROJS, te_tensor_zeros(te, TE_F32, SHAPE(EXPERTS, INTER, DIM)));
        te_experts_set(m, TE_EXPERTS_DOWN_PROJ_BIAS, te_tensor_from_f32(te, TE_F32, SHAPE(EXPERTS, DIM), b));
        for (int i = 0; i < 6 * TOPK; i++)
            for (int d = 0; d < DIM; d++) want[i / TOPK * DIM + d] += p[i] * b[id[i] * DIM + d];
        te_forward_args args = {.input = te_tensor_normal(te, TE_F32, SHAPE(6, DIM), 0, 1), .topk_weights = te_tensor_from_f32(te, TE_F32, SHAPE(6, TOPK), p),
                                .topk_indices = te_tensor_from_host(te, TE_I32, SHAPE(6, TOPK), id)};
        CHECK_TENSOR(te_forward_with(m, &args), want, 1e-6, 1e-6); /* a sum of two products */
        te_module_destroy(m);
    }
}

/* A7: rows of each expert are padded to the recipe's blocks, and padding shows nowhere but in nothing. */
TE_TEST_DEVICES(experts_pad_for_recipes) {
    enum { D = 64, I = 32, N = 65, GROUPS = 5 };
    const int64_t splits[GROUPS] = {0, 1, 15, 16, 33}, padded[2][GROUPS] = {{0, 16, 16, 16, 48}, {0, 32, 32, 32, 64}};
    te_moe_config c = {.n_routed_experts = GROUPS, .n_activated_experts = 1, .dim = D, .moe_inter_dim = I, .expert_bias = true};
    int32_t id[N];
    for (int64_t e = 0, at = 0; e < GROUPS; e++)
        for (int64_t i = 0; i < splits[e]; i++) id[at++ * 7 % N] = (int32_t)e;
    te_module *m = te_grouped_experts_te_create(te, &c, &(te_moe_backend){0});
    te_experts_set(m, TE_EXPERTS_GATE_UP_PROJ_BIAS, te_tensor_normal(te, TE_F32, SHAPE(GROUPS, 2 * I), 0, 0.5f));
    te_experts_set(m, TE_EXPERTS_DOWN_PROJ_BIAS, te_tensor_normal(te, TE_F32, SHAPE(GROUPS, D), 0, 0.5f));
    te_experts_set(m, TE_EXPERTS_GATE_AND_UP_PROJS, te_tensor_normal(te, TE_F32, SHAPE(GROUPS, D, 2 * I), 0, 0.2f));
    te_experts_set(m, TE_EXPERTS_DOWN_PROJS, te_tensor_normal(te, TE_F32, SHAPE(GROUPS, I, D), 0, 0.2f));
    te_tensor *x = te_tensor_normal(te, TE_BF16, SHAPE(N, D), 0, 1), *dy = te_tensor_normal(te, TE_BF16, SHAPE(N, D), 0, 1);
    float *y[3], *dw[3], *db[3];
    for (int r = 0; r < 3; r++) {
        te_recipe recipe = r == 2 ? te_recipe_mxfp8() : te_recipe_current_scaling();
        te_forward_args args = {.input = x, .topk_weights = te_tensor_set_requires_grad(te_tensor_uniform(te, TE_F32, SHAPE(N, 1), 0.5f, 1), true), .topk_indices = te_tensor_from_host(te, TE_I32, SHAPE(N, 1), id)};
        te_tensor_fill(args.topk_weights, 0.75);
        te_module_zero_grad(m);
        if (r) te_autocast_begin(te, &(te_autocast_desc){.recipe = &recipe});
        te_tensor *out = te_forward_with(m, &args);
        if (r) {
            int64_t got[GROUPS];
            te_forward_args pad = {.input = te_tensor_zeros(te, TE_BF16, SHAPE(N, D)), .m_splits = splits, .padded_m_splits = got};
            te_forward_with(te_module_find(m, "fp8_padding"), &pad);
            CHECK(memcmp(got, padded[r - 1], sizeof got) == 0);
            te_autocast_end(te);
        }
        te_backward_from(out, dy);
        REQUIRE_OK(te);
        y[r] = test_read(out), dw[r] = test_read(te_tensor_grad(args.topk_weights)), db[r] = test_read(te_tensor_grad(te_module_parameter(te_module_find(m, "down_linear"), "bias4")));
        float *nobody = test_read(te_tensor_grad(te_module_parameter(te_module_find(m, "down_linear"), "bias0")));
        for (int i = 0; i < D; i++) CHECK(nobody[i] == 0);
    }
    for (int r = 1; r < 3; r++) { /* codes of three bits behind the leading one: half a step is 1/16 of a number, and errors of a sum's terms add up as a random walk */
        CHECK_ERROR_BELOW("y", y[r], y[0], N * D, 0.08);
        CHECK_ERROR_BELOW("dweights", dw[r], dw[0], N, 0.15); /* of two such results multiplied */
        CHECK_ERROR_BELOW("dbias", db[r], db[0], D, 0.01); /* sums of p dy, which no code touches */
    }
    te_module_destroy(m);
}

TE_TEST_DEVICES(experts_in_mxfp8) {
    enum { D = 64, I = 32, N = 40 };
    te_moe_config c = {.n_routed_experts = 4, .n_activated_experts = 2, .dim = D, .moe_inter_dim = I, .dtype = TE_F32, .init_std = 0.2f};
    float *y[2], *dx[2], *dw[2];
    te_tensor *values = te_tensor_normal(te, TE_F32, SHAPE(N, D), 0, 1), *dy = te_tensor_normal(te, TE_F32, SHAPE(N, D), 0, 1);
    for (int on = 0; on < 2; on++) {
        te_seed(te, 4);
        te_module *m = te_grouped_experts_create(te, &c, &(te_moe_backend){.experts = on ? TE_EXPERTS_TORCH_MM_MXFP8 : TE_EXPERTS_TORCH_MM});
        te_tensor *x = te_tensor_set_requires_grad(te_tensor_detach(values), true);
        te_forward_args args = {.input = x, .topk_weights = te_tensor_full(te, TE_F32, SHAPE(N, 2), 0.5), .topk_indices = te_tensor_from_host(te, TE_I32, SHAPE(N, 2), ids(2 * N, 3, 0, 4))};
        te_tensor *out = te_forward_with(m, &args);
        te_backward_from(out, dy);
        te_forward_with(m, &args);
        REQUIRE_OK(te);
        y[on] = test_read(out), dx[on] = test_read(te_tensor_grad(x)), dw[on] = test_read(te_tensor_grad(te_module_parameter(m, "down_projs")));
        te_module_destroy(m);
    }
    CHECK(memcmp(y[0], y[1], N * D * sizeof(float)) != 0);
    CHECK_ERROR_BELOW("y", y[1], y[0], N * D, 0.08); /* as above */
    CHECK_ERROR_BELOW("dx", dx[1], dx[0], N * D, 0.08);
    CHECK_ERROR_BELOW("dw", dw[1], dw[0], 4 * I * D, 0.08);
    for (int i = 0; i < 2; i++) { /* blocks that would reach into the next expert */
        c.moe_inter_dim = 24;
        te_seed(te, 4);
        te_module *m = te_grouped_experts_create(te, &c, &(te_moe_backend){.experts = i ? TE_EXPERTS_TORCH_MM_MXFP8 : TE_EXPERTS_TORCH_MM});
        te_forward_args args = {.input = values, .topk_weights = te_tensor_full(te, TE_F32, SHAPE(N, 2), 0.5), .topk_indices = te_tensor_from_host(te, TE_I32, SHAPE(N, 2), ids(2 * N, 3, 0, 4))};
        te_forward_with(m, &args);
        y[i] = test_read(te_forward_with(m, &args));
        te_module_destroy(m);
    }
    CHECK_BYTES("plain", y[1], y[0], N * D * sizeof(float));
    const char *said = strstr(test_log_text(), "sizes 64 and 24 are no multiples of 32");
    CHECK(said && !strstr(said + 1, "sizes 64 and 24"));
}

/* ---- ranks ---- */

/* A6. Each rank computes all of it beside its own part. */
typedef struct split_case {
    int kind;
    bool bias, after, unused; /* unused: nobody chooses the experts of rank 2 */
    te_dtype dtype;
    double tolerance;
    int64_t bound; /* te_set_max_dispatch_tokens */
} split_case;
enum { ALL_TOKENS = 84 };
static const int64_t *tokens_of(int ranks) {
    static const int64_t four[] = {0, 3, 17, 64}, eight[] = {0, 3, 17, 1, 40, 0, 22, 1};
    return ranks == 8 ? eight : four;
}

static void near_enough(rank_state *s, const char *what, te_tensor *got, const float *want, int64_t n, double tolerance) {
    float *v = (float *)malloc((size_t)(n + 1) * sizeof(float));
    double worst = 0, top = 1e-3;
    char text[128];
    if (!got || te_tensor_numel(got) != n || te_tensor_to_f32(got, v) != TE_OK) {
        wrong(s, what);
        free(v);
        return;
    }
    for (int64_t i = 0; i < n; i++) {
        worst = fmax(worst, v[i] == v[i] ? fabs((double)v[i] - want[i]) : INFINITY);
        top = fmax(top, fabs(want[i]));
    }
    snprintf(text, sizeof text, "%s: %g apart of %g", what, worst, top);
    if (worst > tolerance * top) wrong(s, text);
    free(v);
}
static float *rank_values(te_tensor *x) {
    float *v = (float *)calloc((size_t)te_tensor_numel(x) + 1, sizeof(float));
    te_tensor_to_f32(x, v);
    return v;
}
static void experts_of_ranks(rank_state *s) {
    const split_case *c = (const split_case *)s->arg;
    const int64_t local = EXPERTS / s->size, own = tokens_of(s->size)[s->rank];
    int64_t first = 0;
    te_ctx *te = s->te;
    te_moe_config config = config_of();
    float *parts[4], *whole[6];
    for (int r = 0; r < s->rank; r++) first += tokens_of(s->size)[r];
    config.expert_bias = c->bias;
    config.apply_router_weight_after_down = c->after;
    config.dtype = c->dtype;
    te_seed(te, 11);
    te_module *all = te_grouped_experts_create(te, &config, &(te_moe_backend){.experts = TE_EXPERTS_TORCH});
    te_module *mine = kinds[c->kind].make(te, &config, &(te_moe_backend){.experts = kinds[c->kind].way, .dispatcher = TE_DISPATCHER_DEEPEP, .ep_group = s->group});
    if (!all || !mine) {
            wrong(s, "creation");
            return;
        }
    EXPECT(s, te_set_max_dispatch_tokens(mine, c->bound) == TE_OK);
    for (int i = 0; i < (c->bias ? 4 : 2); i++) {
        te_tensor *stack = te_experts_get(all, (te_experts_tensor)i);
        if (i > 1) te_tensor_copy(stack, te_tensor_normal(te, TE_F32, te_tensor_ndim(stack), te_tensor_shape(stack), 0, 0.5f));
        EXPECT(s, te_experts_set(mine, (te_experts_tensor)i, te_tensor_contiguous(te_tensor_narrow(te_tensor_detach(stack), 0, s->rank * local, local))) == TE_OK);
    }
    te_tensor *x = te_tensor_normal(te, c->dtype, SHAPE(ALL_TOKENS, DIM), 0, 1), *w = te_tensor_uniform(te, TE_F32, SHAPE(ALL_TOKENS, TOPK), 0, 1), *dy = te_tensor_normal(te, c->dtype, SHAPE(ALL_TOKENS, DIM), 0, 1);
    int32_t id[ALL_TOKENS * TOPK];
    for (int i = 0; i < ALL_TOKENS * TOPK; i++) {
        id[i] = (i * 37 + i / 5) % (EXPERTS + 1) - (i % 11 == 3); /* nobody, somebody, and one beyond */
        if (c->unused && id[i] / local == 2) id[i] = 0;
    }
    te_tensor *which = te_tensor_from_host(te, TE_I32, SHAPE(ALL_TOKENS, TOPK), id);
    for (int part = 0; part < 2; part++) {
        te_module *m = part ? mine : all;
        int64_t from = part ? first : 0, n = part ? own : ALL_TOKENS;
        te_tensor *in = te_tensor_set_requires_grad(te_tensor_detach(te_tensor_narrow(x, 0, from, n)), true), *p = te_tensor_set_requires_grad(te_tensor_detach(te_tensor_narrow(w, 0, from, n)), true);
        te_forward_args args = {.input = in, .topk_weights = p, .topk_indices = te_tensor_narrow(which, 0, from, n)};
        te_tensor *y = te_forward_with(m, &args);
        EXPECT(s, y && te_backward_from(y, te_tensor_contiguous(te_tensor_narrow(dy, 0, from, n))) == TE_OK);
        if (!te_ok(te)) return;
        if (!part) {
            whole[0] = rank_values(y), whole[1] = rank_values(te_tensor_grad(in)), whole[2] = rank_values(te_tensor_grad(p));
            continue;
        }
        near_enough(s, "y", y, whole[0] + first * DIM, own * DIM, c->tolerance);
        near_enough(s, "dx", te_tensor_grad(in), whole[1] + first * DIM, own * DIM, c->tolerance);
        near_enough(s, "dweights", te_tensor_grad(p), whole[2] + first * TOPK, own * TOPK, c->tolerance);
        for (int i = 0; i < 3; i++) free(whole[i]);
    }
    for (int i = 0; i < (c->bias ? 4 : 2); i++) {
        const char *name = te_experts_tensor_name((te_experts_tensor)i);
        te_tensor *g = te_tensor_grad(te_module_parameter(all, name));
        int64_t size = te_tensor_numel(g) / EXPERTS, out = te_tensor_shape(g)[te_tensor_ndim(g) - 1];
        parts[i] = rank_values(g);
        if (c->kind != TE_KIND) near_enough(s, name, te_tensor_grad(te_module_parameter(mine, name)), parts[i] + s->rank * local * size, local * size, c->tolerance);
        for (int64_t e = 0; c->kind == TE_KIND && e < local; e++) { /* [out, in] of each expert */
            char path[32];
            float *turned = (float *)malloc((size_t)size * sizeof(float));
            snprintf(path, sizeof path, "%s%d", i > 1 ? "bias" : "weight", (int)e);
            for (int64_t j = 0; j < size; j++) turned[j % out * (size / out) + j / out] = parts[i][(s->rank * local + e) * size + j];
            near_enough(s, path, te_tensor_grad(te_module_parameter(te_module_find(mine, i % 2 ? "down_linear" : "gate_up_linear"), path)), turned, size, c->tolerance);
            free(turned);
        }
        if (c->unused && s->rank == 2)
            for (int64_t j = 0; j < local * size; j++) EXPECT(s, parts[i][s->rank * local * size + j] == 0);
        free(parts[i]);
    }
    float *norm = rank_values(te_clip_grad_norm(all, 1)); /* all ranks clip by the norm of all experts */
    near_enough(s, "norm", te_clip_grad_norm(mine, 1), norm, 1, c->tolerance);
    free(norm);
    te_module_destroy(all);
    te_module_destroy(mine);
}
/* On a GPU: products of f32 in TF32, 2^-11 of a factor, and other ones for other numbers of rows. Every third case has
 * all kinds. */
TE_TEST_DEVICES(experts_of_four_ranks_are_those_of_one) {
    const bool gpu = te_ctx_is_cuda(te);
    const int every = gpu ? 3 : test_every_sanitized(5);
    for (int i = 0, n = 0; i < 2 * 2 * 2 * KINDS; i++) {
        split_case c = {.kind = i % KINDS, .bias = i / KINDS % 2, .after = i / KINDS / 2 % 2, .unused = i / KINDS / 4, .dtype = TE_F32, .tolerance = gpu ? 4e-3 : 1e-5};
        if ((c.kind == TE_KIND && c.after) || n++ % every) continue;
        c.bound = i / KINDS % 3 == 1 ? 64 : i % 5 == 2 ? 67 : 0; /* as many as a rank has; more */
        if (c.unused && c.after) c.dtype = TE_BF16, c.tolerance = 0.03; /* sums of several numbers of eight bits, rounded at each step */
        test_case("%s%s%s%s%s", kinds[c.kind].name, c.bias ? ", biases" : "", c.after ? ", weights behind" : "", c.unused ? ", a rank without rows" : "", c.bound ? ", bounded" : "");
        run_ranks_on(te_ctx_device(te), false, 4, experts_of_ranks, &c);
    }
}
TE_TEST(experts_of_eight_ranks_are_those_of_one) {
    for (int way = 0; way < 3; way += test_every_sanitized(1)) { /* rows are sent; gathered; sent to experts that pad them */
        const split_case c = {.kind = way == 2 ? TE_KIND : 1, .bias = true, .unused = way == 0, .dtype = TE_F32, .tolerance = 1e-5, .bound = way == 1 ? 64 : 0};
        test_case("%s%s", kinds[c.kind].name, c.bound ? ", bounded" : "");
        run_ranks(8, experts_of_ranks, &c);
    }
}

static void whole_moe(rank_state *s) {
    te_ctx *te = s->te;
    te_moe_config c = config_of();
    const te_dispatcher_backend dispatchers[] = {TE_DISPATCHER_TORCH, TE_DISPATCHER_DEEPEP, TE_DISPATCHER_UCCL_EP, TE_DISPATCHER_HYBRIDEP};
    const char *const classes[] = {"GroupedExperts", "GroupedExpertsDeepEP", "GroupedExpertsDeepEP", "GroupedExpertsTE"};
    const int64_t first = s->rank ? 5 : 0, n = s->rank ? 9 : 5;
    c.n_shared_experts = 2;
    c.shared_expert_gate = true;
    c.norm_topk_prob = true;
    c.gate_bias_update_factor = 0.25f;
    c.score_func = TE_GATE_SIGMOID_WITH_BIAS;
    c.aux_loss_coeff = 0.125f;
    for (int i = 0; i < 4; i++) {
        te_seed(te, 7);
        te_module *all = te_moe_create(te, &c, &(te_moe_backend){.experts = TE_EXPERTS_TORCH, .dispatcher = TE_DISPATCHER_TORCH});
        te_moe_backend b = {.experts = i == 3 ? TE_EXPERTS_TE : i == 2 ? TE_EXPERTS_TORCH : TE_EXPERTS_TORCH_MM, .dispatcher = dispatchers[i], .ep_group = s->group, .cp_group = s->group};
        te_seed(te, 7);
        te_module *mine = te_moe_create(te, &c, &b);
        if (!all || !mine) {
            wrong(s, "creation");
            return;
        }
        EXPECT(s, strcmp(te_module_get_class(te_module_find(mine, "experts"))->name, classes[i]) == 0);
        for (int k = 0; k < 2; k++) {
            te_tensor *stack = te_experts_get(all, (te_experts_tensor)k);
            EXPECT(s, te_experts_set(mine, (te_experts_tensor)k, te_tensor_contiguous(te_tensor_narrow(te_tensor_detach(stack), 0, s->rank * EXPERTS / 2, EXPERTS / 2))) == TE_OK);
        }
        for (int k = 0; k < 5; k++) {
            const char *const names[] = {"gate", "shared_experts.gate_proj", "shared_experts.up_proj", "shared_experts.down_proj", "shared_expert_gate"};
            te_tensor_copy(te_module_parameter(te_module_find(mine, names[k]), "weight"), te_module_parameter(te_module_find(all, names[k]), "weight"));
        }
        te_module_set_checkpoint(mine, i % 2); /* its exchanges run again, on all ranks */
        if (i > 1) EXPECT(s, te_set_max_dispatch_tokens(mine, 10) == TE_OK);
        te_tensor *x = te_tensor_normal(te, TE_F32, SHAPE(14, DIM), 0, 1);
        uint8_t padding[14] = {0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 0};
        te_tensor *marks = te_tensor_from_host(te, TE_U8, SHAPE(14), padding);
        te_forward_args whole = {.input = x}, part = {.input = te_tensor_contiguous(te_tensor_narrow(x, 0, first, n))};
        whole.attention.attention_mask = marks;
        part.attention.attention_mask = te_tensor_contiguous(te_tensor_narrow(marks, 0, first, n));
        te_tensor *y = te_forward_with(all, &whole), *own = te_forward_with(mine, &part);
        if (!te_ok(te)) return;
        float *v = rank_values(y), *aux = rank_values(whole.outputs.aux_loss), *grad;
        near_enough(s, "y", own, v + first * DIM, n * DIM, 1e-5);
        near_enough(s, "aux_loss", part.outputs.aux_loss, aux, 1, 1e-5);
        te_backward(te_sum_all(y));
        te_backward(te_sum_all(own));
        te_tensor *dw = te_tensor_grad(te_module_parameter(te_module_find(mine, "gate"), "weight"));
        if (!te_ok(te) || !dw) {
            wrong(s, "backward");
            return;
        }
        EXPECT(s, te_all_reduce(s->group, dw, TE_REDUCE_SUM) == TE_OK); /* the router learns from the tokens of all ranks */
        grad = rank_values(te_tensor_grad(te_module_parameter(te_module_find(all, "gate"), "weight")));
        near_enough(s, "the router's gradient", dw, grad, EXPERTS * DIM, 1e-4); /* sums over tokens in another order, through the normalisation's differences */
        /* the load of all ranks is tokens times topk, and moves the bias as that of one rank */
        double sum = 0;
        float *load = rank_values(te_gate_expert_load(te_module_find(all, "gate")));
        for (int e = 0; e < EXPERTS; e++) sum += load[e];
        EXPECT(s, sum == 11 * TOPK);
        EXPECT(s, te_gate_update_bias(te_module_find(all, "gate"), NULL) == TE_OK && te_gate_update_bias(te_module_find(mine, "gate"), s->group) == TE_OK);
        free(grad);
        grad = rank_values(te_module_parameter(te_module_find(all, "gate"), "e_score_correction_bias"));
        near_enough(s, "the bias", te_module_parameter(te_module_find(mine, "gate"), "e_score_correction_bias"), grad, EXPERTS, 0);
        free(v), free(aux), free(grad), free(load);
        te_module_destroy(all);
        te_module_destroy(mine);
    }
}
TE_TEST(moe_of_two_ranks_is_that_of_one) { run_ranks(2, whole_moe, NULL); }

/* A rank whose call is wrong tells the others, and the group stays usable. */
static void one_rank_fails(rank_state *s) {
    te_moe_config c = config_of();
    for (int k = 0; k < 2; k++) {
        te_module *m = kinds[k ? 3 : 1].make(s->te, &c, &(te_moe_backend){.experts = TE_EXPERTS_TORCH_MM, .ep_group = s->group});
        for (int bad = 1; bad >= 0; bad--) {
            te_tensor *x = te_tensor_zeros(s->te, TE_F32, SHAPE(4, DIM + (bad && s->rank == 1)));
            te_forward_args args = {.input = x, .topk_weights = te_tensor_zeros(s->te, TE_F32, SHAPE(4, TOPK)), .topk_indices = te_tensor_zeros(s->te, TE_I32, SHAPE(4, TOPK))};
            te_tensor *y = te_forward_with(m, &args);
            EXPECT(s, (y == NULL) == (bad != 0));
            if (bad) note(s, te_error_code(s->te));
        }
        te_module_destroy(m);
    }
}
/* A rank has more tokens than it said, and then a number that is possible. */
static void one_rank_has_more(rank_state *s) {
    te_moe_config c = config_of();
    te_module *m = te_grouped_experts_deepep_create(s->te, &c, &(te_moe_backend){.experts = TE_EXPERTS_GMM, .ep_group = s->group});
    EXPECT(s, te_set_max_dispatch_tokens(NULL, 4) == TE_ERR_STATE);
    EXPECT(s, te_set_max_dispatch_tokens(m, -1) == TE_ERR_INVALID && strstr(te_error(s->te), "tokens is -1"));
    te_clear_error(s->te);
    EXPECT(s, te_set_max_dispatch_tokens(m, 4) == TE_OK);
    for (int bad = 1; bad >= 0; bad--) {
        const int64_t n = bad && s->rank == 1 ? 5 : 3 + s->rank;
        te_forward_args args = {.input = te_tensor_zeros(s->te, TE_F32, SHAPE(n, DIM)), .topk_weights = te_tensor_zeros(s->te, TE_F32, SHAPE(n, TOPK)), .topk_indices = te_tensor_zeros(s->te, TE_I32, SHAPE(n, TOPK))};
        EXPECT(s, (te_forward_with(m, &args) == NULL) == (bad != 0));
        if (bad) note(s, te_error_code(s->te));
    }
    te_module_destroy(m);
}
/* Ranks that have said different numbers, before the first call and between two; the same number then goes on. */
static void numbers_differ(rank_state *s) {
    for (int k = 0; k < 2; k++) {
        te_moe_config c = config_of();
        te_module *m = k ? te_grouped_experts_deepep_create(s->te, &c, &(te_moe_backend){.experts = TE_EXPERTS_GMM, .ep_group = s->group})
                         : te_grouped_experts_create(s->te, &c, &(te_moe_backend){.experts = TE_EXPERTS_TORCH_MM, .ep_group = s->group});
        for (int i = 0; i < 6; i++) {
            static const int64_t numbers[6][2] = {{6, 8}, {0, 8}, {8, 8}, {8, 8}, {8, 0}, {0, 0}};
            const bool same = numbers[i][0] == numbers[i][1];
            char a[64], b[64];
            te_set_max_dispatch_tokens(m, numbers[i][s->rank]);
            te_forward_args args = {.input = te_tensor_zeros(s->te, TE_F32, SHAPE(3, DIM)), .topk_weights = te_tensor_zeros(s->te, TE_F32, SHAPE(3, TOPK)), .topk_indices = te_tensor_zeros(s->te, TE_I32, SHAPE(3, TOPK))};
            EXPECT(s, (te_forward_with(m, &args) != NULL) == same);
            if (same) continue;
            snprintf(a, sizeof a, "(te_set_max_dispatch_tokens %d). Rank 1:", (int)numbers[i][0]);
            snprintf(b, sizeof b, "(te_set_max_dispatch_tokens %d). Give", (int)numbers[i][1]);
            EXPECT(s, te_error_code(s->te) == TE_ERR_STATE && strstr(te_error(s->te), a) && strstr(te_error(s->te), b));
            te_clear_error(s->te);
        }
        te_module_destroy(m);
    }
}
/* GroupedLinears of ranks with another recipe, or another option of one; alike they go on. Experts that read no recipe do not compare it. */
static void recipes_differ(rank_state *s) {
    for (int round = 0; round < 4; round++) {
        te_moe_config c = config_of();
        c.dim = 32, c.moe_inter_dim = 32, c.dtype = TE_BF16;
        te_module *m = round == 3 ? te_grouped_experts_deepep_create(s->te, &c, &(te_moe_backend){.experts = TE_EXPERTS_GMM, .ep_group = s->group})
                                  : te_grouped_experts_te_create(s->te, &c, &(te_moe_backend){.experts = TE_EXPERTS_TE, .ep_group = s->group});
        te_recipe recipe = te_recipe_current_scaling();
        recipe.current.power_of_two_scales = round == 1 && s->rank;
        te_forward_args args = {.input = te_tensor_full(s->te, TE_BF16, SHAPE(3, 32), 1), .topk_weights = te_tensor_full(s->te, TE_F32, SHAPE(3, TOPK), 1), .topk_indices = te_tensor_zeros(s->te, TE_I32, SHAPE(3, TOPK))};
        te_autocast_begin(s->te, &(te_autocast_desc){.recipe = &recipe, .disabled = s->rank && round % 3 == 0});
        EXPECT(s, (te_forward_with(m, &args) != NULL) == (round >= 2));
        te_autocast_end(s->te);
        if (round < 2) EXPECT(s, te_error_code(s->te) == TE_ERR_STATE && strstr(te_error(s->te), "recipe current (checksum") && strstr(te_error(s->te), round ? "Rank 1:" : "recipe none ("));
        te_clear_error(s->te);
        te_module_destroy(m);
    }
}
TE_TEST(experts_of_ranks_compare_their_recipes) { run_ranks(2, recipes_differ, NULL); }
/* Every maker says it. */
static void experts_do_not_divide(rank_state *s) {
    te_moe_config c = config_of();
    const te_moe_backend b = {.experts = TE_EXPERTS_TORCH_MM, .dispatcher = TE_DISPATCHER_DEEPEP, .ep_group = s->group};
    for (int way = 0; way < 2; way++) {
        EXPECT(s, !(way ? te_moe_create(s->te, &c, &b) : te_grouped_experts_create(s->te, &c, &b)));
        EXPECT(s, te_error_code(s->te) == TE_ERR_INVALID && strstr(te_error(s->te), "n_routed_experts is 8, and ep_group has 3 ranks; they must divide it"));
        te_clear_error(s->te);
    }
}
TE_TEST(experts_that_ranks_do_not_divide) { run_ranks(3, experts_do_not_divide, NULL); }

TE_TEST(experts_of_ranks_compare_their_bounds) { run_ranks(2, numbers_differ, NULL); }
TE_TEST(experts_of_ranks_fail_together) {
    rank_state *all = run_ranks(2, one_rank_has_more, NULL);
    CHECK_STR(all[1].error, "the input is [5, 8], and a rank has 4 tokens at most (te_set_max_dispatch_tokens)");
    CHECK_STR(all[0].error, "the input is [5, 8], and a rank has 4 tokens at most");
    all = run_ranks(2, one_rank_fails, NULL);
    CHECK_STR(all[1].error, "[.., 8] is needed");
    CHECK_STR(all[0].error, "rank 1");
}

/* One rank runs out of memory on its way through a call: the others hear of it from the rank, and not by its end. */
typedef struct starved_call {
    int kind, request;
    bool bounded;
} starved_call;
static void starve_call(rank_state *s) {
    static const int32_t chosen[4 * TOPK] = {0, 5, 7, 2, 3, 4, 6, 1};
    const starved_call *arg = (const starved_call *)s->arg;
    te_moe_config c = config_of();
    c.expert_bias = true;
    te_module *m = kinds[arg->kind].make(s->te, &c, &(te_moe_backend){.experts = kinds[arg->kind].way, .ep_group = s->group});
    te_forward_args args = {.input = te_tensor_set_requires_grad(te_tensor_full(s->te, TE_F32, SHAPE(4, DIM), 1), true)};
    if (arg->bounded) te_set_max_dispatch_tokens(m, 5);
    args.topk_weights = te_tensor_full(s->te, TE_F32, SHAPE(4, TOPK), 0.5);
    args.topk_indices = te_tensor_from_host(s->te, TE_I32, SHAPE(4, TOPK), chosen);
    EXPECT(s, te_ok(s->te) && te_barrier(s->group) == TE_OK);
    te_memory_trim(s->te);
    if (s->rank == 1) s->fail_at = s->requests + arg->request;
    te_forward_with(m, &args);
    s->fail_at = 0;
    s->failed = !te_ok(s->te);
    if (strstr(te_error(s->te), "rank 1 failed")) s->left[s->num_left++] = NULL;
    EXPECT(s, s->rank || !s->failed || s->num_left);
    te_clear_error(s->te);
    te_module_destroy(m);
}
TE_TEST(experts_of_a_rank_that_starves) {
    static const int of[] = {0, 1, 3, TE_KIND, 3};
    const int every = test_every_of(11, 4);
    for (int k = 0; k < COUNT(of); k++) {
        int refusals = 0, told = 0;
        for (int n = 1 + k % every; n < 600; n += every) {
            starved_call arg = {of[k], n, k == 4};
            rank_state *all = run_ranks(2, starve_call, &arg);
            test_case("%s, request %d", kinds[of[k]].name, n);
            refusals += all[1].failed;
            told += all[0].num_left;
            if (!all[1].failed && n > 300) break;
        }
        CHECK_MSG(refusals > 10 / every && told > 0, "%d refusals, of which the rank itself told %d", refusals, told);
    }
}

/* ---- what a context says ---- */

TE_TEST(experts_announce_mxfp8_once) {
    te_ctx *te = test_context_with(&(te_ctx_desc){.log_level = TE_LOG_INFO});
    te_moe_config c = {.n_routed_experts = 2, .n_activated_experts = 1, .dim = 32, .moe_inter_dim = 32, .dtype = TE_F32};
    te_module *m = te_grouped_experts_create(te, &c, &(te_moe_backend){.experts = TE_EXPERTS_TORCH_MM_MXFP8});
    te_forward_args args = {.input = te_tensor_zeros(te, TE_F32, SHAPE(3, 32)), .topk_weights = te_tensor_zeros(te, TE_F32, SHAPE(3, 1)), .topk_indices = te_tensor_zeros(te, TE_I32, SHAPE(3, 1))};
    te_forward_with(m, &args);
    te_forward_with(m, &args);
    CHECK_OK(te);
    const char *said = strstr(test_log_text(), "products of experts are made of MXFP8 values");
    CHECK(said && !strstr(said + 1, "products of experts are made of MXFP8 values"));
    te_module_destroy(m);
}

/* ---- MoE ---- */

/* The class of its experts for each dispatcher, number of ranks and way. */
TE_TEST(moe_chooses_its_class) {
    static const struct {
        te_dispatcher_backend dispatcher;
        int world;
        te_experts_backend experts;
        bool upstream;
        const char *name, *said;
    } rows[] = {{TE_DISPATCHER_TORCH, 1, TE_EXPERTS_TORCH, false, "GroupedExperts", NULL},
                {TE_DISPATCHER_TORCH, 8, TE_EXPERTS_GMM, false, "GroupedExperts", NULL},
                {TE_DISPATCHER_DEFAULT, 1, TE_EXPERTS_DEFAULT, false, "GroupedExperts", NULL},
                {TE_DISPATCHER_DEEPEP, 1, TE_EXPERTS_TE, false, "GroupedExperts", "dispatcher deepep, and world size is 1"},
                {TE_DISPATCHER_HYBRIDEP, 1, TE_EXPERTS_TORCH_MM, false, "GroupedExperts", "dispatcher hybridep, and world size is 1"},
                {TE_DISPATCHER_UCCL_EP, 1, TE_EXPERTS_GMM, false, "GroupedExperts", "dispatcher uccl_ep, and world size is 1"},
                {TE_DISPATCHER_DEEPEP, 2, TE_EXPERTS_TE, false, "GroupedExpertsTE", NULL},
                {TE_DISPATCHER_DEEPEP, 2, TE_EXPERTS_GMM, false, "GroupedExpertsDeepEP", NULL},
                {TE_DISPATCHER_HYBRIDEP, 2, TE_EXPERTS_TORCH_MM, false, "GroupedExpertsDeepEP", NULL},
                {TE_DISPATCHER_UCCL_EP, 2, TE_EXPERTS_TORCH_MM_MXFP8, false, "GroupedExpertsDeepEP", NULL},
                {TE_DISPATCHER_DEEPEP, 2, TE_EXPERTS_TORCH, false, "GroupedExpertsDeepEP", NULL},
                {TE_DISPATCHER_DEEPEP, 2, TE_EXPERTS_TORCH, true, "GroupedExpertsTE", NULL}};
    for (int i = 0; i < COUNT(rows); i++) {
        te_ctx *te = test_context("cpu");
        te_moe_config c = config_of();
        test_case("row %d", i);
        te_moe_backend b = {.experts = rows[i].experts, .dispatcher = rows[i].dispatcher, .world_size = rows[i].world, .te_experts_for_torch = rows[i].upstream,
                            .dispatcher_num_sms = 12, .dispatcher_share_token_dispatcher = TE_OFF, .dispatcher_async_dispatch = true};
        te_module *m = te_moe_create(te, &c, &b);
        REQUIRE_OK(te);
        CHECK(strcmp(te_module_get_class(te_module_find(m, "experts"))->name, rows[i].name) == 0);
        if (rows[i].said) CHECK_STR(test_log_text(), rows[i].said);
        te_forward_args args = {.input = te_tensor_normal(te, TE_F32, SHAPE(2, 3, DIM), 0, 1)};
        te_tensor *y = te_forward_with(m, &args);
        REQUIRE_OK(te);
        CHECK(te_tensor_ndim(y) == 3 && te_tensor_shape(y)[0] == 2 && te_tensor_shape(y)[1] == 3 && te_tensor_shape(y)[2] == DIM && te_tensor_dtype(y) == TE_F32);
        te_module_destroy(m);
    }
    te_ctx *te = test_context("cpu");
    te_moe_config c = config_of();
    te_moe_backend b = {.dispatcher = TE_DISPATCHER_MOK, .world_size = 6};
    CHECK(!te_moe_create(te, &c, &b));
    CHECK_ERROR(te, TE_ERR_INVALID, "world_size is 6; a multiple of 4");
    b.world_size = 8;
    CHECK(!te_moe_create(te, &c, &b));
    CHECK_ERROR(te, TE_ERR_UNSUPPORTED, "dispatcher mok is an external one");
    c.n_shared_experts = 1, c.shared_expert_activation = TE_EXPERT_GEGLU;
    CHECK(!te_moe_create(te, &c, &(te_moe_backend){0}));
    CHECK_ERROR(te, TE_ERR_INVALID, "shared_expert_activation 3");
    c.shared_expert_activation = TE_EXPERT_SWIGLU;
    CHECK(!te_moe_create(te, &c, &(te_moe_backend){.linear = TE_LINEAR_QUACK}));
    CHECK_ERROR(te, TE_ERR_UNSUPPORTED, "quack");
    c.apply_router_weight_after_down = true;
    CHECK(!te_grouped_experts_te_create(te, &c, &(te_moe_backend){0}));
    CHECK_ERROR(te, TE_ERR_INVALID, "apply_router_weight_after_down");
}

/* A row of a product with a weight [out, in]. */
static void product(const float *x, const float *w, const float *b, int64_t in, int64_t out, double *y) {
    for (int64_t o = 0; o < out; o++) {
        y[o] = b ? b[o] : 0;
        for (int64_t i = 0; i < in; i++) y[o] += (double)x[i] * w[o * in + i];
    }
}
/* Shared experts, their gate, projections to a latent size: y is the sum of the parts, each computed by hand from the children's parameters. */
TE_TEST_DEVICES(moe_adds_its_parts) {
    enum { T = 7, LATENT = 4 };
    te = test_exact(te);
    for (int i = 0; i < 8; i++) {
        test_case("case %d", i);
        te_moe_config c = config_of();
        c.n_shared_experts = i % 2 ? 2 : 1;
        c.shared_expert_gate = i & 1;
        c.shared_expert_activation = i & 2 ? TE_EXPERT_RELU2 : TE_EXPERT_SWIGLU;
        c.swiglu_limit = i == 5 ? 0.3f : 0;
        c.moe_latent_size = i & 4 ? LATENT : 0;
        c.expert_bias = i == 6;
        c.shared_expert_inter_dim = i == 3 ? 5 : 0;
        te_module *m = te_moe_create(te, &c, &(te_moe_backend){.experts = TE_EXPERTS_TORCH_MM, .dispatcher = TE_DISPATCHER_TORCH, .linear = i & 1 ? TE_LINEAR_TE : TE_LINEAR_TORCH, .fake_balanced_gate = i == 7});
        REQUIRE_OK(te);
        int64_t inter = c.n_shared_experts * (i == 3 ? 5 : INTER), inner = i & 4 ? LATENT : DIM;
        te_tensor *x = te_tensor_normal(te, TE_F32, SHAPE(T, DIM), 0, 1);
        float *xs = test_read(x), *latent = test_floats(T * LATENT), want[T * DIM];
        double row[64], up[64], gate[64], down[64];
        te_forward_args args = {.input = x}, call = {.input = x};
        float *routed;
        if (i & 4)
            for (int t = 0; t < T; t++) {
                te_module *l = te_module_find(m, "fc1_latent_proj");
                product(xs + t * DIM, test_read(te_module_parameter(l, "weight")), c.expert_bias ? test_read(te_module_parameter(l, "bias")) : NULL, DIM, LATENT, row);
                for (int d = 0; d < LATENT; d++) latent[t * LATENT + d] = (float)row[d];
            }
        call.topk_weights = te_forward_with(te_module_find(m, "gate"), &args);
        call.topk_indices = args.outputs.topk_indices;
        if (i & 4) call.input = te_tensor_from_f32(te, TE_F32, SHAPE(T, LATENT), latent);
        routed = test_read(te_forward_with(te_module_find(m, "experts"), &call));
        args = (te_forward_args){.input = x};
        te_tensor *y = te_forward_with(m, &args);
        REQUIRE_OK(te);
        CHECK(args.outputs.topk_indices && !args.outputs.aux_loss);
        for (int t = 0; t < T; t++) {
            float h[64];
            double weight = 1;
            te_module *s = te_module_find(m, "shared_experts");
            product(xs + t * DIM, test_read(te_module_parameter(te_module_find(s, "up_proj"), "weight")), NULL, DIM, inter, up);
            if (i & 2) CHECK(!te_module_find(s, "gate_proj"));
            else product(xs + t * DIM, test_read(te_module_parameter(te_module_find(s, "gate_proj"), "weight")), NULL, DIM, inter, gate);
            for (int64_t j = 0; j < inter; j++) {
                double g = gate[j], u = up[j];
                if (c.swiglu_limit > 0) g = fmin(g, c.swiglu_limit), u = fmax(fmin(u, c.swiglu_limit), -c.swiglu_limit);
                h[j] = (float)(i & 2 ? (u > 0 ? u * u : 0) : g * sigma(g) * u);
            }
            product(h, test_read(te_module_parameter(te_module_find(s, "down_proj"), "weight")), NULL, inter, DIM, down);
            if (c.shared_expert_gate) {
                product(xs + t * DIM, test_read(te_module_parameter(te_module_find(m, "shared_expert_gate"), "weight")), NULL, DIM, 1, row);
                weight = sigma(row[0]);
            }
            if (i & 4) product(routed + t * inner, test_read(te_module_parameter(te_module_find(m, "fc2_latent_proj"), "weight")), NULL, LATENT, DIM, row);
            for (int d = 0; d < DIM; d++) want[t * DIM + d] = (float)((i & 4 ? row[d] : routed[t * DIM + d]) + weight * down[d]);
        }
        CHECK_TENSOR(y, want, 2e-5, 2e-5); /* three products in f32 */
        te_backward(te_sum_all(y));
        CHECK_OK(te);
        te_module_destroy(m);
    }
}

/* Parameters on no device get memory and first values later, those of GroupedLinears as well. */
TE_TEST(moe_on_no_device) {
    te_ctx *te = test_context("cpu");
    te_moe_config c = config_of();
    c.device = TE_PARAMS_META;
    c.router_bias = c.expert_bias = true;
    c.n_shared_experts = 1;
    c.force_e_score_correction_bias = true;
    for (int k = 0; k < 2; k++) {
        te_module *m = te_moe_create(te, &c, &(te_moe_backend){.experts = k ? TE_EXPERTS_TE : TE_EXPERTS_TORCH_MM, .dispatcher = k ? TE_DISPATCHER_DEEPEP : TE_DISPATCHER_TORCH, .world_size = 2});
        te_tensor *x = te_tensor_normal(te, TE_F32, SHAPE(3, DIM), 0, 1);
        CHECK(!te_forward(m, x));
        CHECK(te_error_code(te) == TE_ERR_STATE);
        te_clear_error(te);
        CHECK(te_module_reset_parameters(m) == TE_OK);
        CHECK(te_forward(m, x) != NULL);
        CHECK_OK(te);
        float *w = test_read(te_experts_get(m, TE_EXPERTS_DOWN_PROJS));
        double sum = 0;
        for (int i = 0; i < EXPERTS * INTER * DIM; i++) sum += w[i] * w[i];
        sum = sqrt(sum / (EXPERTS * INTER * DIM));
        CHECK_MSG(sum > (k ? 0.02 : 0.45) && sum < (k ? 0.026 : 0.55), "the deviation of first values is %g", sum); /* 0.023 and init_std 0.5, of 384 numbers */
        te_module_destroy(m);
    }
}

/* ---- stacks and files ---- */

TE_TEST_DEVICES(experts_get_and_set) {
    for (int k = 0; k < KINDS; k += TE_KIND)
        for (int a = 0; a < 2; a++) {
            te_moe_config c = config_of();
            c.expert_activation = a ? TE_EXPERT_RELU2 : TE_EXPERT_SWIGLU;
            c.expert_bias = a;
            const int64_t up = a ? INTER : 2 * INTER;
            te_module *m = kinds[k].make(te, &c, &(te_moe_backend){.experts = kinds[k].way});
            const int64_t shapes[4][3] = {{EXPERTS, DIM, up}, {EXPERTS, INTER, DIM}, {EXPERTS, up, 0}, {EXPERTS, DIM, 0}};
            for (int i = 0; i < 4; i++) {
                te_tensor *x = te_experts_get(m, (te_experts_tensor)i);
                if (i > 1 && !a) {
                    CHECK(!x && te_ok(te));
                    te_experts_set(m, (te_experts_tensor)i, te_tensor_zeros(te, TE_F32, SHAPE(EXPERTS, DIM)));
                    CHECK_ERROR(te, TE_ERR_INVALID, "the experts have no");
                    continue;
                }
                REQUIRE(x && te_tensor_ndim(x) == (i > 1 ? 2 : 3));
                CHECK(memcmp(te_tensor_shape(x), shapes[i], (size_t)te_tensor_ndim(x) * sizeof(int64_t)) == 0);
                te_tensor *value = te_tensor_normal(te, TE_F32, te_tensor_ndim(x), te_tensor_shape(x), 0, 1);
                CHECK(te_experts_set(m, (te_experts_tensor)i, value) == TE_OK && te_experts_set(m, (te_experts_tensor)i, NULL) == TE_OK);
                CHECK_BYTES("value", test_read(te_experts_get(m, (te_experts_tensor)i)), test_read(value), (size_t)te_tensor_numel(x) * sizeof(float));
            }
            if (k == TE_KIND) {
                te_module *linear = te_module_find(m, "gate_up_linear");
                CHECK(te_tensor_shape(te_module_parameter(linear, "weight7"))[0] == up && !te_module_parameter(linear, "weight8"));
                /* [in, out] of a stack is [out, in] of a Linear */
                CHECK(test_read(te_experts_get(m, TE_EXPERTS_GATE_AND_UP_PROJS))[1] == test_read(te_module_parameter(linear, "weight0"))[DIM]);
            }
            te_experts_set(m, TE_EXPERTS_DOWN_PROJS, te_tensor_zeros(te, TE_F32, SHAPE(EXPERTS, INTER, DIM + 1)));
            CHECK_ERROR(te, TE_ERR_SHAPE, "down_projs is [8, 6, 8] and the value [8, 6, 9]");
            te_module_destroy(m);
        }
    te_module *other = te_identity_create(te, NULL);
    CHECK(!te_experts_get(other, TE_EXPERTS_DOWN_PROJS));
    CHECK_ERROR(te, TE_ERR_INVALID, "te_experts_get: identity");
    te_module_destroy(other);
    CHECK_STR(te_experts_tensor_name(TE_EXPERTS_GATE_UP_PROJ_BIAS), "gate_up_proj_bias");
    CHECK_STR(te_experts_tensor_name((te_experts_tensor)4), "?");
}

TE_TEST(expert_ranges) {
    te_ctx *te = test_context("cpu");
    for (int n = 0; n < 12; n++)
        for (int size = 1; size < 6; size++)
            for (int rank = 0, at = 0; rank < size; rank++) {
                int first = -1, count = -1;
                CHECK(te_expert_range(te, n, rank, size, &first, &count) == TE_OK);
                CHECK(first == at && count == n / size + (rank < n % size));
                at += count;
                if (rank == size - 1) CHECK(at == n);
            }
    int first, count;
    CHECK(te_expert_range(te, 4, 3, 3, &first, &count) == TE_ERR_INVALID);
    CHECK_ERROR(te, TE_ERR_INVALID, "rank 3 of 3");
}

/* Each class writes the same names and numbers, and each reads them. */
TE_TEST_DEVICES(experts_in_files) {
    static const te_expert_activation activations[] = {TE_EXPERT_SWIGLU, TE_EXPERT_QUICK_GEGLU, TE_EXPERT_RELU2};
    for (int a = 0; a < 3; a++) {
        te_moe_config c = config_of();
        c.expert_activation = activations[a];
        c.expert_bias = a == 1;
        const int64_t up = a == 2 ? INTER : 2 * INTER;
        test_case("activation %d", (int)activations[a]);
        te_module *from = te_grouped_experts_create(te, &c, &(te_moe_backend){0});
        if (c.expert_bias) te_experts_set(from, TE_EXPERTS_GATE_UP_PROJ_BIAS, te_tensor_normal(te, TE_F32, SHAPE(EXPERTS, up), 0, 1));
        CHECK(te_experts_save_hf(from, test_path("a.safetensors"), "model.layers.3.mlp.") == TE_OK);
        te_safetensors *f = te_safetensors_open(te, test_path("a.safetensors"));
        REQUIRE(f);
        CHECK(te_safetensors_count(f) == EXPERTS * (a == 2 ? 2 : 3) * (c.expert_bias ? 2 : 1));
        const te_safetensors_entry *e = te_safetensors_find(f, "model.layers.3.mlp.experts.5.up_proj.weight");
        REQUIRE(e && e->ndim == 2 && e->shape[0] == INTER && e->shape[1] == DIM);
        CHECK(!te_safetensors_find(f, "model.layers.3.mlp.experts.5.gate_proj.weight") == (a == 2));
        const float *stack = test_read(te_experts_get(from, TE_EXPERTS_GATE_AND_UP_PROJS)), *in_file = test_read(te_safetensors_read(f, e->name));
        for (int o = 0; o < INTER; o++)
            for (int i = 0; i < DIM; i++) CHECK(in_file[o * DIM + i] == stack[(5 * DIM + i) * up + (a == 0 ? INTER + o : a == 1 ? 2 * o + 1 : o)]);
        for (int k = 0; k < KINDS; k += TE_KIND)
            for (int d = 0; d < 2; d++) {
                c.dtype = d ? TE_BF16 : TE_F32;
                te_module *to = kinds[k].make(te, &c, &(te_moe_backend){.experts = kinds[k].way});
                CHECK(te_experts_load_hf(to, &f, 1, "model.layers.3.mlp.") == TE_OK);
                CHECK_OK(te);
                for (int i = 0; i < (c.expert_bias ? 4 : 2); i++) {
                    te_tensor *want = te_tensor_cast(te_tensor_detach(te_experts_get(from, (te_experts_tensor)i)), c.dtype);
                    CHECK_BYTES(te_experts_tensor_name((te_experts_tensor)i), test_read(te_experts_get(to, (te_experts_tensor)i)), test_read(want), (size_t)te_tensor_numel(want) * sizeof(float));
                }
                te_module_destroy(to);
            }
        te_safetensors_close(f);
        te_module_destroy(from);
    }
}

/* Two ranks' files, read by one; what is missing, does not fit or is of codes. */
static void save_part(rank_state *s) {
    te_moe_config c = config_of();
    te_module *m = te_moe_create(s->te, &c, &(te_moe_backend){.experts = TE_EXPERTS_TE, .dispatcher = TE_DISPATCHER_DEEPEP, .ep_group = s->group});
    te_tensor *all = te_tensor_full(s->te, TE_F32, SHAPE(EXPERTS / 2, INTER, DIM), s->rank + 1);
    EXPECT(s, te_experts_set(m, TE_EXPERTS_DOWN_PROJS, all) == TE_OK && te_experts_save_hf(m, ((const char *const *)s->arg)[s->rank], NULL) == TE_OK);
    te_module_destroy(m);
}
TE_TEST(experts_files_of_ranks_and_their_faults) {
    char paths[2][512];
    for (int r = 0; r < 2; r++) snprintf(paths[r], sizeof paths[r], "%s", test_path(r ? "part1.safetensors" : "part0.safetensors"));
    const char *const both[2] = {paths[0], paths[1]};
    run_ranks(2, save_part, both);
    te_ctx *te = test_context("cpu");
    te_moe_config c = config_of();
    te_module *m = te_moe_create(te, &c, &(te_moe_backend){.dispatcher = TE_DISPATCHER_TORCH});
    te_safetensors *files[2] = {te_safetensors_open(te, paths[0]), te_safetensors_open(te, paths[1])};
    REQUIRE(files[0] && files[1]);
    CHECK(te_experts_load_hf(m, files, 2, NULL) == TE_OK);
    float *down = test_read(te_experts_get(m, TE_EXPERTS_DOWN_PROJS));
    CHECK(down[0] == 1 && down[EXPERTS * INTER * DIM - 1] == 2);
    te_tensor_fill(te_experts_get(m, TE_EXPERTS_DOWN_PROJS), 9);
    CHECK(te_experts_load_hf(m, files, 1, "") == TE_ERR_FORMAT);
    CHECK_STR(te_error(te), "12 tensors of this rank's experts are in none of the 1 files: experts.4.gate_proj.weight, experts.4.up_proj.weight");
    CHECK_ERROR(te, TE_ERR_FORMAT, "experts.5.up_proj.weight ...");
    CHECK(test_read(te_experts_get(m, TE_EXPERTS_DOWN_PROJS))[0] == 9); /* nothing was written */
    te_module_destroy(m);
    c.moe_inter_dim = INTER + 1;
    m = te_moe_create(te, &c, &(te_moe_backend){.dispatcher = TE_DISPATCHER_TORCH});
    CHECK(te_experts_load_hf(m, files, 2, NULL) == TE_ERR_SHAPE);
    CHECK_ERROR(te, TE_ERR_SHAPE, "experts.0.gate_proj.weight does not fit: the experts have [7, 8] there");
    CHECK(te_experts_load_hf(m, NULL, 1, NULL) == TE_ERR_INVALID);
    CHECK_ERROR(te, TE_ERR_INVALID, "files[0] is NULL");
    te_safetensors_close(files[0]);
    files[0] = te_safetensors_open(test_context("cpu"), paths[0]); /* of another context */
    CHECK(te_experts_load_hf(m, files, 1, NULL) == TE_ERR_INVALID);
    CHECK_ERROR(te, TE_ERR_INVALID, "files[0] belongs to another context");
    te_safetensors_close(files[0]);
    te_safetensors_close(files[1]);
    te_module_destroy(m);
}

TE_TEST(experts_say_what_is_wrong) {
    te_ctx *te = test_context("cpu");
    te_moe_config c = config_of();
    te_module *m = te_grouped_experts_create(te, &c, &(te_moe_backend){0});
    te_forward_args args = {.input = te_tensor_zeros(te, TE_F32, SHAPE(3, DIM))};
    CHECK(!te_forward_with(m, &args));
    CHECK_ERROR(te, TE_ERR_STATE, "topk_weights and topk_indices are NULL");
    args.topk_weights = te_tensor_zeros(te, TE_F32, SHAPE(3, 2)), args.topk_indices = te_tensor_zeros(te, TE_I32, SHAPE(2, 2));
    CHECK(!te_forward_with(m, &args));
    CHECK_ERROR(te, TE_ERR_SHAPE, "topk_weights are [3, 2] and topk_indices i32 [2, 2]; both must be [3, K]");
    te_tensor_set_sharded(args.input, true);
    CHECK(!te_forward_with(m, &args));
    CHECK_ERROR(te, TE_ERR_INVALID, "the input is a shard");
    te_tensor_set_sharded(args.input, false);
    args.topk_indices = te_tensor_zeros(te, TE_I32, SHAPE(3, 2)), args.attention.attention_mask = te_tensor_zeros(te, TE_U8, SHAPE(4));
    CHECK(!te_forward_with(m, &args));
    CHECK_ERROR(te, TE_ERR_SHAPE, "attention_mask is u8 [4]; the padding of 3 tokens");
    te_module_destroy(m);
    c.swiglu_limit = -1;
    CHECK(!te_grouped_experts_create(te, &c, &(te_moe_backend){0}));
    CHECK_ERROR(te, TE_ERR_INVALID, "swiglu_limit is -1");
    c.swiglu_limit = 0, c.score_func = (te_gate_score)7;
    CHECK(!te_moe_create(te, &c, &(te_moe_backend){0}));
    CHECK_ERROR(te, TE_ERR_INVALID, "score_func 7");
    c.score_func = TE_GATE_SOFTMAX, c.n_shared_experts = 3, c.shared_expert_inter_dim = INT64_MAX / 2;
    CHECK(!te_moe_create(te, &c, &(te_moe_backend){0}));
    CHECK_ERROR(te, TE_ERR_INVALID, "n_shared_experts is 3, each of size 4611686018427387903");
    c.n_shared_experts = 0, c.shared_expert_inter_dim = 0;
    CHECK(!te_moe_create(te, &c, &(te_moe_backend){.world_size = -2}));
    CHECK_ERROR(te, TE_ERR_INVALID, "world_size is -2");
    CHECK(!te_fake_balanced_gate_create(te, &c, 0, INFINITY));
    CHECK_ERROR(te, TE_ERR_INVALID, "noise inf");
    CHECK(!te_moe_create(te, &c, NULL));
    CHECK_ERROR(te, TE_ERR_INVALID, "te_moe_create: backend is NULL; a zeroed te_moe_backend has the defaults");
    CHECK(!te_grouped_experts_create(te, &c, NULL));
    CHECK_ERROR(te, TE_ERR_INVALID, "te_grouped_experts_create: backend is NULL");
}

/* A step whose routing changes from launch to launch: gate, torch_mm and shared experts wait for nothing. */
TE_TEST_DEVICES(moe_in_a_graph) {
    te_moe_config c = config_of();
    c.n_shared_experts = 1;
    c.gate_bias_update_factor = 0.5f;
    c.aux_loss_coeff = 0.25f;
    c.expert_bias = true;
    c.score_func = TE_GATE_SIGMOID_WITH_BIAS;
    const int64_t n = EXPERTS * DIM;
    float *grads[2][3];
    for (int graph = 0; graph < 2; graph++) {
        te_seed(te, 6);
        te_module *m = te_moe_create(te, &c, &(te_moe_backend){.experts = TE_EXPERTS_TORCH_MM, .dispatcher = TE_DISPATCHER_TORCH});
        te_tensor *x = te_tensor_zeros(te, TE_F32, SHAPE(9, DIM)), *weight = te_module_parameter(te_module_find(m, "gate"), "weight");
        te_graph *g = NULL;
        for (int step = 0; step < 3; step++) {
            te_tensor_copy_from_host(x, test_normal(9 * DIM, 20 + (uint64_t)step));
            te_scope_begin(te);
            if (graph && !g) te_graph_begin(te);
            if (!g) {
                te_module_zero_grad(m);
                te_backward(te_sum_all(te_forward(m, x)));
            }
            if (graph && !g) g = te_graph_end(te);
            REQUIRE_OK(te);
            if (graph) te_graph_launch(g);
            grads[graph][step] = test_read(te_tensor_grad(weight));
            CHECK(te_gate_expert_load(te_module_find(m, "gate")) && te_gate_update_bias(te_module_find(m, "gate"), NULL) == TE_OK);
            te_scope_end(te);
            REQUIRE_OK(te);
        }
        te_graph_destroy(g);
        te_module_destroy(m);
    }
    for (int step = 0; step < 3; step++) CHECK_BYTES("the router's gradient", grads[1][step], grads[0][step], (size_t)n * sizeof(float));
}

/* ---- upstream's vectors ---- */

/* g = 50, u = 0.5 and L = 1: silu(1) / 2. Of one expert with identities for weights, whose second product sums one number. */
TE_TEST_DEVICES(experts_clamp_swiglu) {
    te = test_exact(te);
    te_moe_config c = {.n_routed_experts = 1, .n_activated_experts = 1, .dim = 2, .moe_inter_dim = 1, .dtype = TE_F32, .swiglu_limit = 1};
    te_module *m = te_grouped_experts_create(te, &c, &(te_moe_backend){.experts = TE_EXPERTS_TORCH_MM});
    te_experts_set(m, TE_EXPERTS_GATE_AND_UP_PROJS, te_tensor_from_f32(te, TE_F32, SHAPE(1, 2, 2), (const float[]){1, 0, 0, 1}));
    te_experts_set(m, TE_EXPERTS_DOWN_PROJS, te_tensor_full(te, TE_F32, SHAPE(1, 1, 2), 1));
    te_forward_args args = {.input = te_tensor_from_f32(te, TE_F32, SHAPE(1, 2), (const float[]){50, 0.5f}), .topk_weights = te_tensor_full(te, TE_F32, SHAPE(1, 1), 1), .topk_indices = te_tensor_zeros(te, TE_I32, SHAPE(1, 1))};
    CHECK_TENSOR(te_forward_with(m, &args), ((const float[]){0.36553f, 0.36553f}), 1e-5, 0); /* the vector has five digits */
    te_module_destroy(m);
}

/* A bias of numbers that cancel is summed in double on the CPU: its gradient is exact. */
TE_TEST(experts_sum_bias_gradients) {
    te_ctx *te = test_context("cpu");
    te_moe_config c = {.n_routed_experts = 2, .n_activated_experts = 1, .dim = 1, .moe_inter_dim = 1, .dtype = TE_F32, .expert_bias = true};
    for (int k = 0; k < KINDS; k++) {
        te_module *m = kinds[k].make(te, &c, &(te_moe_backend){.experts = kinds[k].way});
        te_forward_args args = {.input = te_tensor_zeros(te, TE_F32, SHAPE(4, 1)), .topk_weights = te_tensor_full(te, TE_F32, SHAPE(4, 1), 1),
                                .topk_indices = te_tensor_from_host(te, TE_I32, SHAPE(4, 1), (const int32_t[]){1, 1, 0, 1})};
        te_backward_from(te_forward_with(m, &args), te_tensor_from_f32(te, TE_F32, SHAPE(4, 1), (const float[]){1e8f, 1.25f, 3, -1e8f}));
        te_tensor *g = k == TE_KIND ? te_tensor_grad(te_module_parameter(te_module_find(m, "down_linear"), "bias1")) : te_tensor_grad(te_module_parameter(m, "down_proj_bias"));
        CHECK_OK(te);
        CHECK(g && test_read(g)[k == TE_KIND ? 0 : 1] == 1.25f);
        te_module_destroy(m);
    }
}

/* [[0, 3], [1, 5]], a single choice, nobody at all, nobody in part, a single token: between two ranks, by the dispatcher's own functions of what comes where. */
static void few_tokens(rank_state *s) {
    static const int32_t id[5][4] = {{0, 3, 1, 5}, {2, -1, 7, -1}, {-1, -1, -1, -1}, {-1, 4, 0, -1}, {6, 1, -1, -1}};
    te_ctx *te = s->te;
    te_moe_config c = config_of();
    te_module *m = te_grouped_experts_deepep_create(te, &c, &(te_moe_backend){.experts = TE_EXPERTS_GMM, .ep_group = s->group});
    te_module *loop = te_grouped_experts_create(te, &c, &(te_moe_backend){.experts = TE_EXPERTS_TORCH, .ep_group = s->group});
    for (int i = 0; i < 2; i++) te_experts_set(loop, (te_experts_tensor)i, te_experts_get(m, (te_experts_tensor)i));
    for (int i = 0; i < 5; i++) {
        te_set_max_dispatch_tokens(loop, i % 2 ? 3 : 0);
        const int64_t n = i == 4 ? 1 : 2;
        te_forward_args args = {.input = te_tensor_normal(te, TE_F32, SHAPE(n, DIM), 0, 1), .topk_weights = te_tensor_uniform(te, TE_F32, SHAPE(n, 2), 0, 1), .topk_indices = te_tensor_from_host(te, TE_I32, SHAPE(n, 2), id[i])};
        te_tensor *y = te_forward_with(m, &args);
        if (!y) return;
        float *got = rank_values(y), sum = 0;
        near_enough(s, "by the other dispatcher", te_forward_with(loop, &args), got, n * DIM, 1e-5);
        for (int j = 0; j < n * DIM; j++) sum += fabsf(got[j]);
        EXPECT(s, (sum == 0) == (i == 2));
        free(got);
    }
    te_module_destroy(m);
    te_module_destroy(loop);
}
TE_TEST(experts_of_few_tokens) { run_ranks(2, few_tokens, NULL); }
