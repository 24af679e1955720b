/* Options that optimizers share, FusedSGD, and the formats of states: each kind of optimizer is trained by calls, by a graph and through a file, and all bits are
 * compared; states by name; gradients from elsewhere; norms of many tensors. */
#include "../te_test.h"

static void destroy_module(void *m) { te_module_destroy((te_module *)m); }
static void destroy_optimizer(void *opt) { te_optimizer_destroy((te_optimizer *)opt); }

/* Every format of every state at least once. */
enum { ADAMS = 9, KINDS = ADAMS + 4 };
static te_optimizer *make_kind(te_ctx *te, te_module *m, int kind) {
    static const te_fused_adam_desc adams[ADAMS] = {
        {.lr = 0.01f},
        {.lr = 0.01f, .exp_avg_dtype = TE_BF16, .exp_avg_sq_dtype = TE_BF16},
        {.lr = 0.01f, .exp_avg_dtype = TE_F16, .exp_avg_sq_dtype = TE_F16, .weight_decay = 0.1f},
        {.lr = 0.01f, .exp_avg_dtype = TE_F8E4M3, .exp_avg_sq_dtype = TE_F16, .master_weight_dtype = TE_F16},
        {.lr = 0.01f, .exp_avg_dtype = TE_F8E4M3, .exp_avg_sq_dtype = TE_F8E4M3, .max_grad_norm = 0.5f},
        {.lr = 0.01f, .store_param_remainders = true, .weight_decay = 0.1f, .decay_matrices_only = true},
        {.lr = 0.01f, .store_param_remainders = true, .exp_avg_dtype = TE_F8E4M3, .no_adam_w_mode = true, .weight_decay = 0.1f},
        {.lr = 0.01f, .no_master_weights = true, .exp_avg_dtype = TE_BF16},
        {.lr = 0.01f, .master_weight_dtype = TE_F16},
    };
    static const te_fused_sgd_desc sgds[KINDS - ADAMS] = {
        {.lr = 0.1f},
        {.lr = 0.1f, .momentum = 0.9f, .nesterov = true, .weight_decay = 0.1f},
        {.lr = 0.1f, .momentum = 0.9f, .dampening = 0.5f, .weight_decay = 0.1f, .wd_after_momentum = true, .decay_matrices_only = true, .max_grad_norm = 0.5f},
        {.lr = 0.1f, .momentum = 0.9f, .no_master_weights = true},
    };
    te_optimizer *opt = kind < ADAMS ? te_fused_adam_create(te, m, &adams[kind]) : te_fused_sgd_create(te, m, &sgds[kind - ADAMS]);
    if (opt) test_on_end(destroy_optimizer, opt);
    return opt;
}
enum { IN = 24, OUT = 40, ROWS = 6 };
static te_module *make_model(te_ctx *te, te_dtype dtype, bool quantized) {
    te_recipe recipe = te_recipe_current_scaling();
    te_linear_desc desc = {.in_features = IN, .out_features = OUT, .gemm.params_dtype = dtype};
    te_seed(te, 5);
    if (quantized) te_quantized_model_init_begin(te, &(te_quantized_model_init_desc){.recipe = &recipe});
    te_module *m = te_linear_create(te, &desc);
    if (quantized) te_quantized_model_init_end(te);
    test_on_end(destroy_module, m);
    return m;
}
/* Forward, backward, step. */
static void train(te_ctx *te, te_module *m, te_optimizer *opt, te_tensor *x, te_tensor *target) {
    te_recipe recipe = te_recipe_current_scaling();
    te_scope_begin(te);
    te_autocast_begin(te, &(te_autocast_desc){.recipe = &recipe, .disabled = true});
    te_tensor *y = te_forward(m, x);
    te_autocast_end(te);
    te_backward(te_mse_loss(y, target));
    te_optimizer_step(opt);
    te_scope_end(te);
}
static void batch(te_ctx *te, te_dtype dtype, te_tensor **x, te_tensor **target) {
    *x = test_tensor(te, dtype, SHAPE(ROWS, IN), test_normal(ROWS * IN, 41));
    *target = test_tensor(te, dtype, SHAPE(ROWS, OUT), test_normal(ROWS * OUT, 42));
}
static float *values(te_tensor *x) {
    float *out = test_floats(te_tensor_numel(x));
    te_tensor_to_f32(x, out);
    return out;
}
/* The parameters, and the states by name, of two optimizers of one kind have the same bits. */
static void check_alike(te_module *a, te_optimizer *of_a, te_module *b, te_optimizer *of_b) {
    static const char *const params[] = {"weight", "bias"}, *const states[] = {"exp_avg", "exp_avg_sq", "momentum_buffer", "master_param"};
    te_ctx *te = te_module_ctx(a);
    for (int i = 0; i < 2; i++) {
        te_tensor *p = te_module_parameter(a, params[i]), *q = te_module_parameter(b, params[i]);
        size_t n = (size_t)te_tensor_numel(p) * sizeof(float);
        CHECK_BYTES(params[i], values(p), values(q), n);
        for (int k = 0; k < 4; k++) {
            te_tensor *x = te_optimizer_get_unscaled_state(of_a, p, states[k]);
            if (!x) { /* of this kind or this parameter there is no such state, and of nothing else is there an error */
                CHECK_ERROR(te, TE_ERR_INVALID, "has no state");
                CHECK(!te_optimizer_get_unscaled_state(of_b, q, states[k]));
                CHECK_ERROR(te, TE_ERR_INVALID, "has no state");
                continue;
            }
            CHECK_BYTES(states[k], values(x), values(te_optimizer_get_unscaled_state(of_b, q, states[k])), n);
        }
    }
    REQUIRE_OK(te);
}

TE_TEST_DEVICES(optimizer_kinds_go_on_from_a_file) {
    const char *path = test_path("optimizer.safetensors");
    for (int kind = 0; kind < KINDS; kind++)
        for (int form = 0; form < 3; form++) {
            te_dtype dtype = form == 0 ? TE_F32 : TE_BF16;
            if (form == 2 && (kind == 7 || kind == KINDS - 1)) continue; /* without masters */
            te_module *m = make_model(te, dtype, form == 2), *other = make_model(te, dtype, form == 2);
            te_optimizer *opt = make_kind(te, m, kind), *after = make_kind(te, other, kind);
            te_tensor *x, *target;
            test_case("kind %d, form %d", kind, form);
            batch(te, dtype, &x, &target);
            REQUIRE_OK(te);
            for (int step = 0; step < 3; step++) train(te, m, opt, x, target);
            CHECK_EQ_INT(te_model_save(te, path, m, opt, NULL, 0), TE_OK);
            CHECK_EQ_INT(te_model_load(te, path, other, after), TE_OK);
            REQUIRE_OK(te);
            check_alike(m, opt, other, after);
            for (int step = 0; step < 2; step++) train(te, m, opt, x, target), train(te, other, after, x, target);
            check_alike(m, opt, other, after);
        }
}

TE_TEST_DEVICES(optimizer_kinds_step_in_graphs) {
    for (int kind = 0; kind < KINDS; kind++)
        for (int form = 0; form < 3; form++) {
            te_dtype dtype = form == 0 ? TE_F32 : TE_BF16;
            if (form == 2 && (kind == 7 || kind == KINDS - 1)) continue;
            te_module *m = make_model(te, dtype, form == 2), *other = make_model(te, dtype, form == 2);
            te_optimizer *opt = make_kind(te, m, kind), *by_graph = make_kind(te, other, kind);
            te_tensor *x, *target;
            test_case("kind %d, form %d", kind, form);
            batch(te, dtype, &x, &target);
            for (int step = 0; step < 2; step++) train(te, m, opt, x, target), train(te, other, by_graph, x, target);
            te_graph_begin(te);
            train(te, other, by_graph, x, target);
            te_graph *graph = te_graph_end(te);
            REQUIRE_OK(te);
            for (int step = 0; step < 3; step++) {
                train(te, m, opt, x, target);
                CHECK_EQ_INT(te_graph_launch(graph), TE_OK);
            }
            CHECK_EQ_INT(te_optimizer_steps(by_graph), 5);
            check_alike(m, opt, other, by_graph);
            te_graph_destroy(graph);
        }
}

/* With remainders the training is that with whole masters, to the bit; only the parameters' ties round upwards. */
TE_TEST_DEVICES(optimizer_remainders_are_masters) {
    te_module *m = make_model(te, TE_BF16, false), *other = make_model(te, TE_BF16, false);
    te_optimizer *whole = te_fused_adam_create(te, m, &(te_fused_adam_desc){.lr = 1e-4f});
    te_optimizer *halves = te_fused_adam_create(te, other, &(te_fused_adam_desc){.lr = 1e-4f, .store_param_remainders = true});
    test_on_end(destroy_optimizer, whole);
    test_on_end(destroy_optimizer, halves);
    te_tensor *x, *target;
    batch(te, TE_BF16, &x, &target);
    for (int step = 0; step < 20; step++) train(te, m, whole, x, target), train(te, other, halves, x, target);
    REQUIRE_OK(te);
    check_alike(m, whole, other, halves);
}

/* ---- states by name ---- */

TE_TEST_DEVICES(optimizer_states_by_name) {
    static const te_dtype formats[] = {TE_F32, TE_BF16, TE_F16, TE_F8E4M3};
    for (int f = 0; f < 4; f++) {
        te_module *m = make_model(te, TE_BF16, false);
        te_optimizer *opt = te_fused_adam_create(te, m, &(te_fused_adam_desc){.exp_avg_dtype = formats[f], .exp_avg_sq_dtype = formats[f], .store_param_remainders = f & 1});
        te_tensor *weight = te_module_parameter(m, "weight");
        float *want = test_normal(IN * OUT, 8);
        double most = 0, step = f == 0 ? 0 : f == 1 ? 0x1p-8 : f == 2 ? 0x1p-11 : 0x1p-4; /* half a unit in the last place */
        test_on_end(destroy_optimizer, opt);
        for (int i = 0; i < IN * OUT; i++) most = fmax(most, fabs((double)want[i]));
        test_case("%s", te_dtype_name(formats[f]));
        CHECK_EQ_INT(te_optimizer_set_scaled_state(opt, weight, "exp_avg", test_tensor(te, TE_F32, SHAPE(OUT, IN), want)), TE_OK);
        REQUIRE_OK(te);
        CHECK_TENSOR(te_optimizer_get_unscaled_state(opt, weight, "exp_avg"), want, step + 1e-6, f == 3 ? most / 448 * 0x1p-10 : f == 2 ? most * 0x1p-39 : 0);
        CHECK_TENSOR(te_optimizer_get_unscaled_state(opt, weight, "exp_avg_sq"), test_floats(IN * OUT), 0, 0);
        /* A master starts as the parameter; one that is set is what it was set to. */
        CHECK_BYTES("master", values(te_optimizer_get_unscaled_state(opt, weight, "master_param")), values(weight), sizeof(float) * IN * OUT);
        CHECK_EQ_INT(te_optimizer_set_scaled_state(opt, weight, "master_param", test_tensor(te, TE_F32, SHAPE(OUT, IN), want)), TE_OK);
        CHECK_BYTES("master", values(te_optimizer_get_unscaled_state(opt, weight, "master_param")), want, sizeof(float) * IN * OUT);
        te_tensor_fill(weight, 2); /* and it follows a parameter that is written */
        CHECK(values(te_optimizer_get_unscaled_state(opt, weight, "master_param"))[5] == 2);
        REQUIRE_OK(te);
        CHECK(!te_optimizer_get_unscaled_state(opt, weight, "momentum_buffer"));
        CHECK_ERROR(te, TE_ERR_INVALID, "parameter weight has no state \"momentum_buffer\"; this optimizer's are exp_avg, exp_avg_sq");
        CHECK(!te_optimizer_get_unscaled_state(opt, te_tensor_zeros(te, TE_F32, SHAPE(2)), "exp_avg"));
        CHECK_ERROR(te, TE_ERR_INVALID, "the tensor is no parameter of this optimizer");
        te_optimizer_set_scaled_state(opt, weight, "exp_avg", te_tensor_zeros(te, TE_F32, SHAPE(2)));
        CHECK_ERROR(te, TE_ERR_SHAPE, "unscaled_state is [2] and the parameter [40, 24]");
        te_optimizer_set_scaled_state(opt, weight, "exp_avg", weight);
        CHECK_ERROR(te, TE_ERR_DTYPE, "unscaled_state is bf16; f32 is needed");
    }
}

/* A capture would note the copy of a written parameter to its master, and the host believe that it was made. */
TE_TEST_DEVICES(optimizer_states_in_a_capture) {
    te_module *m = make_model(te, TE_BF16, false);
    te_optimizer *opt = make_kind(te, m, 0);
    te_tensor *weight = te_module_parameter(m, "weight");
    CHECK_EQ_INT(te_graph_begin(te), TE_OK);
    CHECK(te_optimizer_get_unscaled_state(opt, weight, "master_param") != NULL); /* as the parameter is */
    te_graph_destroy(te_graph_end(te));
    te_tensor_fill(weight, 2);
    CHECK_EQ_INT(te_graph_begin(te), TE_OK);
    CHECK(!te_optimizer_get_unscaled_state(opt, weight, "master_param"));
    te_graph_destroy(te_graph_end(te));
    CHECK_ERROR(te, TE_ERR_STATE, "before te_graph_begin");
    CHECK(values(te_optimizer_get_unscaled_state(opt, weight, "master_param"))[5] == 2);
    te_tensor_fill(weight, 3);
    te_warmup_begin(te);
    te_optimizer_get_unscaled_state(opt, weight, "master_param");
    te_warmup_end(te);
    CHECK(values(te_optimizer_get_unscaled_state(opt, weight, "master_param"))[5] == 3);
    REQUIRE_OK(te);
}

/* ---- sgd ---- */

/* A momentum that is set before the first step counts in it, though dampening leaves none that a first step would make; so it does after a file. */
TE_TEST_DEVICES(sgd_goes_on_from_a_momentum_that_was_set) {
    const te_fused_sgd_desc desc = {.lr = 0.1f, .momentum = 0.9f, .dampening = 0.5f};
    const char *path = test_path("sgd.safetensors");
    for (int file = 0; file < 2; file++) {
        te_module *m = make_model(te, TE_F32, false), *other = make_model(te, TE_F32, false);
        te_optimizer *opt = te_fused_sgd_create(te, m, &desc), *after = te_fused_sgd_create(te, other, &desc);
        te_tensor *x, *target;
        test_case(file ? "through a file" : "at once");
        test_on_end(destroy_optimizer, opt);
        test_on_end(destroy_optimizer, after);
        batch(te, TE_F32, &x, &target);
        train(te, m, opt, x, target);
        for (int i = 0; i < 2; i++) {
            te_tensor *from = te_module_parameter(m, i ? "bias" : "weight"), *to = te_module_parameter(other, i ? "bias" : "weight");
            te_tensor_copy(to, from);
            CHECK_EQ_INT(te_optimizer_set_scaled_state(after, to, "momentum_buffer", te_optimizer_get_unscaled_state(opt, from, "momentum_buffer")), TE_OK);
        }
        if (file) {
            CHECK_EQ_INT(te_model_save(te, path, other, after, NULL, 0), TE_OK);
            after = te_fused_sgd_create(te, other, &desc);
            test_on_end(destroy_optimizer, after);
            CHECK_EQ_INT(te_model_load(te, path, other, after), TE_OK);
        }
        train(te, m, opt, x, target);
        train(te, other, after, x, target);
        REQUIRE_OK(te);
        check_alike(m, opt, other, after);
    }
}

/* A module of one parameter [4, 5]. */
static te_result one_forward(te_module *self, te_forward_args *args) {
    (void)self;
    args->outputs.out = args->input;
    return TE_OK;
}
static const te_module_class one_class = {"One", 0, one_forward, NULL, NULL};
static te_module *make_one(te_ctx *te, te_dtype dtype, const float *start) {
    te_module *m = te_module_create(te, &one_class, "one");
    te_module_add_parameter(m, "p", test_tensor(te, dtype, SHAPE(4, 5), start));
    test_on_end(destroy_module, m);
    return m;
}
static void give_grad(te_module *m, const float *g) {
    te_tensor *p = te_module_parameter(m, "p");
    te_backward_from(te_scale(p, 1), test_tensor(te_tensor_ctx(p), te_tensor_dtype(p), SHAPE(4, 5), g));
}

TE_TEST_DEVICES(sgd_follows_the_formula) {
    static const te_fused_sgd_desc descs[] = {{.lr = 0.1f},
                                              {.lr = 0.1f, .momentum = 0.9f},
                                              {.lr = 0.1f, .momentum = 0.9f, .nesterov = true, .weight_decay = 0.1f},
                                              {.lr = 0.1f, .momentum = 0.9f, .dampening = 0.5f, .weight_decay = 0.1f},
                                              {.lr = 0.1f, .momentum = 0.9f, .weight_decay = 0.1f, .wd_after_momentum = true}};
    for (int d = 0; d < COUNT(descs); d++) {
        const te_fused_sgd_desc *s = &descs[d];
        const float *start = test_normal(20, 3);
        double p[20], b[20];
        te_module *m = make_one(te, TE_F32, start);
        te_optimizer *opt = te_fused_sgd_create(te, m, s);
        test_on_end(destroy_optimizer, opt);
        for (int i = 0; i < 20; i++) p[i] = (double)start[i];
        for (int step = 0; step < 4; step++) {
            const float *g = test_normal(20, 10 + (uint64_t)step);
            float want[20];
            give_grad(m, g);
            te_optimizer_step(opt);
            for (int i = 0; i < 20; i++) {
                double grad = (double)g[i] + (s->wd_after_momentum ? 0 : (double)s->weight_decay * p[i]);
                b[i] = step == 0 ? grad : (double)s->momentum * b[i] + (1 - (double)s->dampening) * grad;
                if (s->momentum > 0) grad = s->nesterov ? grad + (double)s->momentum * b[i] : b[i];
                p[i] -= 0.1 * (grad + (s->wd_after_momentum ? (double)s->weight_decay * p[i] : 0));
                want[i] = (float)p[i];
            }
            test_case("desc %d, step %d", d, step);
            CHECK_TENSOR(te_module_parameter(m, "p"), want, 2e-6, 1e-6); /* f32 against double, a few roundings a step */
        }
        REQUIRE_OK(te);
    }
}

TE_TEST(sgd_refuses) {
    te_ctx *te = test_context("cpu"), *other = test_context("cpu");
    static const te_fused_sgd_desc bad[] = {{.lr = 0}, {.lr = -1}, {.lr = 1, .momentum = -1}, {.lr = 1, .weight_decay = NAN}, {.lr = 1, .nesterov = true},
                                            {.lr = 1, .nesterov = true, .momentum = 0.5f, .dampening = 0.1f}};
    static const char *const names[] = {"lr is 0; it has no default", "lr is -1", "momentum is -1", "weight_decay is nan", "nesterov with momentum 0", "dampening 0.1"};
    te_module *m = make_one(te, TE_F32, test_normal(20, 3));
    for (int i = 0; i < COUNT(bad); i++) {
        CHECK(te_fused_sgd_create(te, m, &bad[i]) == NULL);
        CHECK_ERROR(te, TE_ERR_INVALID, names[i]);
    }
    CHECK(te_fused_sgd_create(te, m, NULL) == NULL);
    CHECK_ERROR(te, TE_ERR_INVALID, "te_fused_sgd_create: desc is NULL");
    CHECK(te_fused_sgd_create(other, m, &(te_fused_sgd_desc){.lr = 1}) == NULL);
    CHECK_ERROR(other, TE_ERR_INVALID, "another context");
    te_optimizer *opt = te_fused_sgd_create(te, m, &(te_fused_sgd_desc){.lr = 1, .momentum = 0.5f, .dampening = 0.5f});
    test_on_end(destroy_optimizer, opt);
    te_tensor *g = test_tensor(te, TE_F32, SHAPE(4, 5), test_normal(20, 4));
    te_graph_begin(te);
    te_backward_from(te_scale(te_module_parameter(m, "p"), 1), g);
    te_optimizer_step(opt);
    CHECK(te_graph_end(te) == NULL);
    CHECK_ERROR(te, TE_ERR_STATE, "dampening");
}

TE_TEST(adam_refuses_formats) {
    te_ctx *te = test_context("cpu");
    static const te_fused_adam_desc bad[] = {{.exp_avg_dtype = TE_F8E5M2}, {.exp_avg_sq_dtype = TE_I32}, {.master_weight_dtype = TE_BF16}};
    static const char *const names[] = {"exp_avg_dtype is e5m2; f32, f16, bf16 or e4m3", "exp_avg_sq_dtype is i32", "master_weight_dtype is bf16; f32 or f16"};
    te_module *m = make_one(te, TE_F32, test_normal(20, 3));
    for (int i = 0; i < COUNT(bad); i++) {
        CHECK(te_fused_adam_create(te, m, &bad[i]) == NULL);
        CHECK_ERROR(te, TE_ERR_INVALID, names[i]);
    }
    CHECK(te_fused_adam_create(te, m, &(te_fused_adam_desc){.amsgrad = true}) == NULL);
    CHECK_ERROR(te, TE_ERR_UNSUPPORTED, "amsgrad");
}

/* ---- gradients ---- */

TE_TEST_DEVICES(optimizer_reads_decoupled_gradients) {
    const float *start = test_normal(20, 3), *g = test_normal(20, 4);
    te_module *m = make_one(te, TE_BF16, start), *plain = make_one(te, TE_BF16, start);
    te_optimizer *opt = te_fused_adam_create(te, m, &(te_fused_adam_desc){.use_decoupled_grad = true}), *usual = te_fused_adam_create(te, plain, NULL);
    te_tensor *p = te_module_parameter(m, "p"), *grad = test_tensor(te, TE_F32, SHAPE(4, 5), test_rounded(TE_BF16, g, 20));
    test_on_end(destroy_optimizer, opt);
    test_on_end(destroy_optimizer, usual);
    give_grad(m, start); /* not read, and not forgotten */
    give_grad(plain, g);
    CHECK(te_tensor_decoupled_grad(p) == NULL);
    CHECK_EQ_INT(te_tensor_set_decoupled_grad(p, grad), TE_OK);
    CHECK_BYTES("decoupled", values(te_tensor_decoupled_grad(p)), values(grad), 80);
    te_optimizer_step(opt);
    te_optimizer_step(usual);
    CHECK_BYTES("p", values(p), values(te_module_parameter(plain, "p")), 80);
    CHECK(te_tensor_decoupled_grad(p) == NULL && te_tensor_grad(p) != NULL);
    CHECK_OK(te);
    te_tensor_set_decoupled_grad(p, te_tensor_zeros(te, TE_F32, SHAPE(5)));
    CHECK_ERROR(te, TE_ERR_SHAPE, "the gradient is [5], the tensor is [4, 5]");
    te_tensor_set_decoupled_grad(p, te_tensor_zeros(te, TE_I32, SHAPE(4, 5)));
    CHECK_ERROR(te, TE_ERR_INVALID, "the gradient is i32");
}

TE_TEST_DEVICES(optimizer_zeroes_gradients_if_told) {
    te_module *m = make_one(te, TE_F32, test_normal(20, 3));
    te_optimizer *opt = te_fused_adam_create(te, m, &(te_fused_adam_desc){.no_set_grad_none = true});
    te_tensor *p = te_module_parameter(m, "p");
    test_on_end(destroy_optimizer, opt);
    give_grad(m, test_normal(20, 4));
    te_optimizer_step(opt);
    CHECK_TENSOR(te_tensor_grad(p), test_floats(20), 0, 0);
    give_grad(m, test_normal(20, 4));
    CHECK_TENSOR(te_tensor_grad(p), test_normal(20, 4), 0, 0);
    te_optimizer_zero_grad(opt);
    CHECK_TENSOR(te_tensor_grad(p), test_floats(20), 0, 0);
    CHECK_OK(te);
}

TE_TEST_DEVICES(clip_grad_norm_scales_all_gradients) {
    te_module *m = make_one(te, TE_F32, test_normal(20, 3)), *child = make_one(te, TE_F32, test_normal(20, 5));
    const float *g = test_normal(20, 6), *main_grad = test_normal(20, 7);
    double norm = 0;
    te_module_add_child(m, "child", child);
    te_module_add_child(m, "twin", te_module_create(te, &one_class, "twin"));
    te_module_add_parameter(te_module_child(m, 1), "tied", te_module_parameter(child, "p"));
    te_tensor_set_main_grad(te_module_parameter(child, "p"), test_tensor(te, TE_F32, SHAPE(4, 5), main_grad));
    give_grad(m, g);
    for (int i = 0; i < 20; i++) norm += (double)g[i] * (double)g[i] + (double)main_grad[i] * (double)main_grad[i];
    norm = sqrt(norm);
    for (int round = 0; round < 2; round++) { /* the second: below the maximum already */
        te_tensor *got = te_clip_grad_norm(m, 2);
        float a[20], b[20];
        REQUIRE_OK(te);
        CHECK(fabs(te_tensor_item(got) / (round ? 2 : norm) - 1) < 2e-6);
        for (int i = 0; i < 20; i++) a[i] = (float)((double)g[i] * 2 / norm), b[i] = (float)((double)main_grad[i] * 2 / norm);
        CHECK_TENSOR(te_tensor_grad(te_module_parameter(m, "p")), a, 2e-6, 0);
        CHECK_TENSOR(te_tensor_main_grad(te_module_parameter(child, "p")), b, 2e-6, 0);
    }
    CHECK(te_clip_grad_norm(m, 0) == NULL);
    CHECK_ERROR(te, TE_ERR_INVALID, "max_norm is 0");
    te_tensor_set_main_grad(te_module_parameter(child, "p"), NULL);
}

TE_TEST_DEVICES(multi_tensor_functions) {
    const float a[] = {3, 4}, b[] = {0, 12, 0}, half = 0.5f, each[] = {2.5f, 6};
    te_tensor *list[2], *per_tensor, *found_inf = te_tensor_zeros(te, TE_F32, SHAPE(1));
    list[0] = test_tensor(te, TE_F32, SHAPE(2), a);
    list[1] = test_tensor(te, TE_BF16, SHAPE(3), b);
    CHECK(te_tensor_item(te_multi_tensor_l2norm(te, list, 2, NULL)) == 13);
    CHECK(te_tensor_item(te_multi_tensor_unscale_l2norm(te, list, 2, test_tensor(te, TE_F32, SHAPE(1), &half), &per_tensor)) == 6.5);
    CHECK_TENSOR(per_tensor, each, 0, 0);
    CHECK_EQ_INT(te_multi_tensor_scale(te, list, list, 2, 2, found_inf), TE_OK);
    CHECK(te_tensor_item(te_multi_tensor_l2norm(te, list, 2, NULL)) == 26 && te_tensor_item(found_inf) == 0);
    CHECK_OK(te);
    CHECK(te_multi_tensor_l2norm(te, list, -1, NULL) == NULL);
    CHECK_ERROR(te, TE_ERR_INVALID, "te_multi_tensor_l2norm: num_tensors is -1");
}
