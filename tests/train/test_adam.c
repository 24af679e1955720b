/* FusedAdam over a module tree: the arithmetic in double, masters, clipping, which gradients count, and what leaves everything alone. */
#include "../te_test.h"

/* A module of parameters alone: p0 [3, 4], p1 [5], p2 [2, 2, 2]. */
static const int64_t shapes[3][3] = {{3, 4, 1}, {5, 1, 1}, {2, 2, 2}};
static const int ndims[3] = {2, 1, 3}, sizes[3] = {12, 5, 8};

static te_result bag_forward(te_module *self, te_forward_args *args) {
    (void)self;
    args->outputs.out = args->input;
    return TE_OK;
}
static const te_module_class bag_class = {"Bag", 0, bag_forward, NULL, NULL};

static void destroy_module(void *m) { te_module_destroy((te_module *)m); }
static void destroy_optimizer(void *opt) { te_optimizer_destroy((te_optimizer *)opt); }

static te_module *make_bag(te_ctx *te, te_dtype dtype) {
    static const char *const names[3] = {"p0", "p1", "p2"};
    te_module *m = te_module_create(te, &bag_class, "bag");
    for (int i = 0; i < 3; i++) te_module_add_parameter(m, names[i], test_tensor(te, dtype, ndims[i], shapes[i], test_normal(sizes[i], 5 + (uint64_t)i)));
    te_module_add_buffer(m, "scale", te_tensor_full(te, TE_F32, SHAPE(1), 3));
    test_on_end(destroy_module, m);
    return m;
}
static te_optimizer *make_adam(te_ctx *te, te_module *m, const te_fused_adam_desc *desc) {
    te_optimizer *opt = te_fused_adam_create(te, m, desc);
    test_on_end(destroy_optimizer, opt);
    return opt;
}
static te_tensor *param(te_module *m, int i) {
    const char name[3] = {'p', (char)('0' + i), 0};
    return te_module_parameter(m, name);
}
/* Gives parameter i this gradient (rounded to its format): of sum(p * g). */
static void give_grad(te_module *m, int i, const float *g) {
    te_tensor *p = param(m, i), *x = te_tensor_set_requires_grad(p, true);
    te_backward_from(te_scale(x, 1), test_tensor(te_tensor_ctx(p), te_tensor_dtype(p), ndims[i], shapes[i], g));
}

typedef struct reference {
    double p[3][12], m[3][12], v[3][12];
} reference;

static void reference_init(reference *r, te_dtype dtype) {
    memset(r, 0, sizeof *r);
    for (int i = 0; i < 3; i++) {
        const float *p = test_rounded(dtype, test_normal(sizes[i], 5 + (uint64_t)i), sizes[i]);
        for (int k = 0; k < sizes[i]; k++) r->p[i][k] = (double)p[k];
    }
}
/* TransformerEngine's FusedAdam, one step over the tensors that have a gradient. */
static void reference_step(reference *r, const te_fused_adam_desc *d, double lr, int step, float *const g[3]) {
    double b1 = d->beta1 > 0 ? (double)d->beta1 : (double)0.9f, b2 = d->beta2 > 0 ? (double)d->beta2 : (double)0.999f;
    double eps = d->eps > 0 ? (double)d->eps : 1e-8, norm = 0;
    for (int i = 0; i < 3; i++)
        for (int k = 0; g[i] && k < sizes[i]; k++) norm += (double)g[i][k] * (double)g[i][k];
    double clip = d->max_grad_norm > 0 ? fmin(1, (double)d->max_grad_norm / (sqrt(norm) + 1e-6)) : 1;
    double c1 = d->no_bias_correction ? 1 : 1 - pow(b1, step), c2 = d->no_bias_correction ? 1 : 1 - pow(b2, step);
    for (int i = 0; i < 3; i++) {
        double wd = d->decay_matrices_only && ndims[i] < 2 ? 0 : (double)d->weight_decay;
        for (int k = 0; g[i] && k < sizes[i]; k++) {
            double x = clip * (double)g[i][k] + (d->no_adam_w_mode ? wd * r->p[i][k] : 0);
            r->m[i][k] = b1 * r->m[i][k] + (1 - b1) * x;
            r->v[i][k] = b2 * r->v[i][k] + (1 - b2) * x * x;
            r->p[i][k] -= lr * (r->m[i][k] / c1 / (sqrt(r->v[i][k] / c2) + eps) + (d->no_adam_w_mode ? 0 : wd * r->p[i][k]));
        }
    }
}
static void check_params(te_module *m, const reference *r, double rtol, double atol) {
    for (int i = 0; i < 3; i++) {
        float want[12];
        for (int k = 0; k < sizes[i]; k++) want[k] = (float)r->p[i][k];
        test_case("p%d", i);
        CHECK_TENSOR(param(m, i), want, rtol, atol);
    }
}

TE_TEST_DEVICES(adam_follows_the_formula) {
    static const te_fused_adam_desc descs[] = {
        {.lr = 0},
        {.lr = 0.05f, .beta1 = 0.8f, .beta2 = 0.95f, .eps = 1e-5f, .weight_decay = 0.1f},
        {.lr = 0.05f, .weight_decay = 0.1f, .decay_matrices_only = true},
        {.lr = 0.05f, .weight_decay = 0.1f, .no_adam_w_mode = true, .no_bias_correction = true},
        {.lr = 0.05f, .weight_decay = 0.1f, .no_adam_w_mode = true, .decay_matrices_only = true, .max_grad_norm = 0.5f},
        {.lr = 0.05f, .max_grad_norm = 1000},
    };
    for (int d = 0; d < COUNT(descs); d++) {
        te_module *m = make_bag(te, TE_F32);
        te_optimizer *opt = make_adam(te, m, &descs[d]);
        reference r;
        reference_init(&r, TE_F32);
        REQUIRE(opt);
        CHECK(te_optimizer_grad_norm(opt) == NULL);
        CHECK(te_optimizer_lr(opt) == (descs[d].lr > 0 ? descs[d].lr : 1e-3f));
        double lr = (double)te_optimizer_lr(opt);
        for (int step = 1; step <= 4; step++) {
            float *g[3];
            if (step == 3) te_optimizer_set_lr(opt, (float)(lr = 0.01));
            for (int i = 0; i < 3; i++) {
                g[i] = step == 2 && i == 1 ? NULL : test_normal(sizes[i], 100 * (uint64_t)step + (uint64_t)i); /* p1 sits out the second */
                if (g[i]) give_grad(m, i, g[i]);
            }
            reference_step(&r, &descs[d], lr, step, g);
            CHECK_EQ_INT(te_optimizer_step(opt), TE_OK);
            CHECK_EQ_INT(te_optimizer_steps(opt), step);
            for (int i = 0; i < 3; i++) CHECK(te_tensor_grad(param(m, i)) == NULL);
            check_params(m, &r, 1e-5, 1e-6); /* f32 against double, a few roundings a step */
        }
        REQUIRE_OK(te);
        CHECK((te_optimizer_grad_norm(opt) != NULL) == (descs[d].max_grad_norm > 0));
    }
}

TE_TEST_DEVICES(adam_grad_norm_is_the_norm) {
    te_module *m = make_bag(te, TE_F32);
    te_optimizer *opt = make_adam(te, m, &(te_fused_adam_desc){.max_grad_norm = 1});
    double sum = 0;
    for (int i = 0; i < 3; i++) {
        const float *g = test_normal(sizes[i], 40 + (uint64_t)i);
        for (int k = 0; k < sizes[i]; k++) sum += (double)g[k] * (double)g[k];
        give_grad(m, i, g);
    }
    te_optimizer_step(opt);
    CHECK(fabs(te_tensor_item(te_optimizer_grad_norm(opt)) / sqrt(sum) - 1) < 1e-6);
    CHECK_OK(te);
}

/* 16-bit parameters are the rounded masters, so that small steps add up; without masters they are lost. */
TE_TEST_DEVICES(adam_masters) {
    static const te_dtype types[2] = {TE_BF16, TE_F16};
    for (int t = 0; t < 2; t++) {
        te_fused_adam_desc desc = {.lr = 1e-4f, .weight_decay = 0.1f};
        te_module *m = make_bag(te, types[t]);
        te_optimizer *opt = make_adam(te, m, &desc);
        reference r;
        reference_init(&r, types[t]);
        for (int step = 1; step <= 20; step++) {
            float *g[3];
            for (int i = 0; i < 3; i++) {
                g[i] = test_rounded(types[t], test_normal(sizes[i], 60 + (uint64_t)(step + 30 * i)), sizes[i]);
                give_grad(m, i, g[i]);
            }
            reference_step(&r, &desc, 1e-4, step, g);
            te_optimizer_step(opt);
        }
        REQUIRE_OK(te);
        check_params(m, &r, types[t] == TE_BF16 ? 1.0 / 256 : 1.0 / 2048, 1e-5); /* half a unit in the last place, and an f32 master's error */
    }
}

/* The next step starts from the value that the user has written into a parameter, not from an old master. */
TE_TEST_DEVICES(adam_master_follows_a_written_parameter) {
    te_module *m = make_bag(te, TE_BF16);
    te_optimizer *opt = make_adam(te, m, &(te_fused_adam_desc){.lr = 0.25f});
    const float g[5] = {1, 1, 1, 1, 1}, start[5] = {8, 8, 8, 8, 8};
    give_grad(m, 1, g);
    te_optimizer_step(opt);
    te_tensor_fill(param(m, 1), 8);
    give_grad(m, 0, test_normal(12, 3)); /* a step that p1 sits out forgets nothing */
    te_optimizer_step(opt);
    give_grad(m, 1, g);
    te_optimizer_step(opt);
    CHECK_TENSOR(param(m, 1), start, 0, 0.3); /* at most lr away from what was written */
    CHECK_OK(te);
}

TE_TEST_DEVICES(adam_main_grads) {
    const float a[5] = {1, 2, 3, 4, 5}, b[5] = {1, 1, 1, 1, 1}, both[5] = {2, 3, 4, 5, 6};
    float *g[3] = {NULL, NULL, NULL};
    te_fused_adam_desc desc = {.lr = 0.1f, .max_grad_norm = 1};
    te_module *m = make_bag(te, TE_F32);
    te_optimizer *opt = make_adam(te, m, &desc);
    te_tensor *main_grad = test_tensor(te, TE_F32, SHAPE(5), a);
    reference r;
    reference_init(&r, TE_F32);
    te_tensor_set_main_grad(param(m, 1), main_grad);
    give_grad(m, 1, b); /* both count */
    g[1] = test_copy(both, 5);
    reference_step(&r, &desc, (double)0.1f, 1, g);
    te_optimizer_step(opt);
    check_params(m, &r, 1e-5, 1e-6);
    const float zero[5] = {0};
    CHECK_TENSOR(main_grad, zero, 0, 0); /* forgotten, as gradients are */
    CHECK(te_tensor_grad(param(m, 1)) == NULL);
    te_tensor_set_main_grad(param(m, 1), NULL);
    CHECK_OK(te);
}

TE_TEST_DEVICES(adam_keeps_gradients_if_told) {
    te_module *m = make_bag(te, TE_F32);
    te_optimizer *opt = make_adam(te, m, NULL);
    te_optimizer_keep_grad(opt, true);
    give_grad(m, 0, test_normal(12, 3));
    te_optimizer_step(opt);
    CHECK_TENSOR(te_tensor_grad(param(m, 0)), test_normal(12, 3), 0, 0);
    te_optimizer_zero_grad(opt);
    CHECK(te_tensor_grad(param(m, 0)) == NULL);
    CHECK_OK(te);
}

/* A tensor in two places of the tree is one parameter; a frozen one and a buffer are none. */
TE_TEST_DEVICES(adam_steps_each_parameter_once) {
    te_module *m = make_bag(te, TE_F32), *twin = te_module_create(te, &bag_class, "twin");
    te_module_add_child(m, "twin", twin);
    te_module_add_parameter(twin, "tied", param(m, 1));
    te_tensor_set_requires_grad(param(m, 2), false);
    te_fused_adam_desc desc = {.lr = 0.1f};
    te_optimizer *opt = make_adam(te, m, &desc);
    reference r;
    reference_init(&r, TE_F32);
    float *g[3] = {NULL, test_normal(5, 9), NULL};
    give_grad(m, 1, g[1]);
    give_grad(m, 2, test_normal(8, 9));
    reference_step(&r, &desc, (double)0.1f, 1, g);
    te_optimizer_step(opt);
    check_params(m, &r, 1e-5, 1e-6);
    CHECK_TENSOR(te_module_parameter(m, "scale"), ((const float[]){3}), 0, 0);
    CHECK_OK(te);
}

TE_TEST_DEVICES(adam_leaves_all_alone_after_an_error) {
    te_module *m = make_bag(te, TE_BF16);
    te_optimizer *opt = make_adam(te, m, &(te_fused_adam_desc){.max_grad_norm = 1});
    reference r;
    reference_init(&r, TE_BF16);
    give_grad(m, 0, test_normal(12, 3));
    te_tensor_narrow(param(m, 0), 0, 0, 99);
    CHECK_EQ_INT(te_optimizer_step(opt), TE_ERR_SHAPE);
    te_clear_error(te);
    CHECK_EQ_INT(te_optimizer_steps(opt), 0);
    CHECK(te_tensor_grad(param(m, 0)) != NULL && te_optimizer_grad_norm(opt) == NULL);
    check_params(m, &r, 0, 0);
    te_optimizer_step(opt);
    CHECK_EQ_INT(te_optimizer_steps(opt), 1);
    CHECK_OK(te);
}

TE_TEST_DEVICES(adam_warmup_changes_nothing) {
    te_module *m = make_bag(te, TE_BF16);
    te_optimizer *opt = make_adam(te, m, &(te_fused_adam_desc){.lr = 0.1f, .max_grad_norm = 1, .weight_decay = 0.1f, .decay_matrices_only = true});
    te_optimizer *plain = make_adam(te, m, &(te_fused_adam_desc){.lr = 0.1f});
    reference r;
    reference_init(&r, TE_BF16);
    te_warmup_begin(te);
    for (int k = 0; k < 2; k++) {
        for (int i = 0; i < 3; i++) give_grad(m, i, test_normal(sizes[i], 3));
        CHECK_EQ_INT(te_optimizer_step(k ? plain : opt), TE_OK);
    }
    te_warmup_end(te);
    CHECK_OK(te);
    CHECK_EQ_INT(te_optimizer_steps(opt), 0);
    CHECK(te_optimizer_grad_norm(opt) == NULL && te_tensor_grad(param(m, 0)) == NULL);
    check_params(m, &r, 0, 0);
}

TE_TEST(adam_refuses) {
    te_ctx *te = test_context("cpu"), *other = test_context("cpu");
    static const te_fused_adam_desc bad[] = {{.lr = -1}, {.beta1 = 1}, {.beta2 = -0.5f}, {.eps = -1}, {.weight_decay = NAN}, {.max_grad_norm = -1}};
    static const char *const names[] = {"lr", "beta1", "beta2", "eps", "weight_decay", "max_grad_norm"};
    te_module *m = make_bag(te, TE_F32);
    for (int i = 0; i < COUNT(bad); i++) {
        CHECK(te_fused_adam_create(te, m, &bad[i]) == NULL);
        CHECK_ERROR(te, TE_ERR_INVALID, names[i]);
    }
    CHECK(te_fused_adam_create(other, m, NULL) == NULL);
    CHECK_ERROR(other, TE_ERR_INVALID, "another context");
    CHECK(te_fused_adam_create(te, NULL, NULL) == NULL && te_fused_adam_create(NULL, m, NULL) == NULL);
    CHECK_EQ_INT(te_optimizer_step(NULL), TE_ERR_STATE);
    te_optimizer_destroy(NULL);
    te_optimizer_zero_grad(NULL);
    te_optimizer *none = make_adam(te, te_module_parent(m), NULL);
    CHECK(none == NULL);
    CHECK_OK(te);
}
