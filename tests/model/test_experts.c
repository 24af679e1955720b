/* tests/model/test_experts.c: experts, their dispatchers and MoE (api/experts.h) against loops over tokens and experts in double, ranks against one rank, files against parameters. */
#include "../dist/ranks.h"

enum { DIM = 8, INTER = 6, EXPERTS = 8, TOPK = 2 };

/* ---- an oracle ---- */

/* One mixture in numbers: weights [E, dim, up], [E, inter, dim], biases or NULL. */
typedef struct formula {
    int64_t tokens, dim, inter, experts, topk;
    te_expert_activation activation;
    double limit, alpha, swiglu_limit;
    bool after;
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
                         .swiglu_limit = c.swiglu_limit, .after = c.apply_router_weight_after_down, .x = wide(test_normal(T * DIM, 1), T * DIM), .w = wide(test_uniform(T * TOPK, 2, 0, 1), T * TOPK),
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
