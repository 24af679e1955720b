/* te_grad_scaler: steps under loss scaling against plain steps, to the bit: powers of two scale without a rounding, and a step that was skipped is one that was never made. */
#include "../te_test.h"

static void destroy_module(void *m) { te_module_destroy((te_module *)m); }
static void destroy_optimizer(void *opt) { te_optimizer_destroy((te_optimizer *)opt); }
static void destroy_scaler(void *s) { te_grad_scaler_destroy((te_grad_scaler *)s); }

/* Kinds of optimizers, with the format of the parameters and whether these are stored quantized. */
typedef struct kind {
    const char *name;
    te_fused_adam_desc adam;
    te_fused_sgd_desc sgd; /* lr 0: Adam */
    te_dtype dtype;
    bool quantized;
} kind;
static const te_param_group by_name[] = {{.pattern = "*bias", .no_weight_decay = true, .lr = 0.02f, .beta1 = 0.8f}};
static const kind kinds[] = {
    {.name = "adam", .adam = {.lr = 0.01f, .weight_decay = 0.1f}, .dtype = TE_F32},
    {.name = "adam, clipped", .adam = {.lr = 0.01f, .max_grad_norm = 0.5f}, .dtype = TE_BF16},
    {.name = "adam, groups", .adam = {.lr = 0.01f, .weight_decay = 0.1f, .groups = by_name, .num_groups = 1}, .dtype = TE_BF16},
    {.name = "adam, states of 8 bits, f16 master", .adam = {.lr = 0.01f, .exp_avg_dtype = TE_F8E4M3, .exp_avg_sq_dtype = TE_F16, .master_weight_dtype = TE_F16}, .dtype = TE_F16},
    {.name = "adam, remainders", .adam = {.lr = 0.01f, .store_param_remainders = true, .no_bias_correction = true}, .dtype = TE_BF16},
    {.name = "adam, quantized", .adam = {.lr = 0.01f}, .dtype = TE_BF16, .quantized = true},
    {.name = "adam, quantized, f16 master", .adam = {.lr = 0.01f, .master_weight_dtype = TE_F16}, .dtype = TE_BF16, .quantized = true},
    {.name = "sgd", .sgd = {.lr = 0.1f}, .dtype = TE_F32},
    {.name = "sgd with dampening", .sgd = {.lr = 0.1f, .momentum = 0.9f, .dampening = 0.5f, .max_grad_norm = 0.5f}, .dtype = TE_BF16},
};

enum { IN = 24, OUT = 40, ROWS = 6 };
typedef struct run {
    te_ctx *te;
    te_module *m;
    te_optimizer *opt;
    te_grad_scaler *scaler; /* NULL: plain steps */
    te_tensor *x, *target;
} run;
static run make_run(te_ctx *te, const kind *k, const te_grad_scaler_desc *scaling) {
    te_recipe recipe = te_recipe_current_scaling();
    te_linear_desc desc = {.in_features = IN, .out_features = OUT, .gemm.params_dtype = k->dtype};
    run r = {.te = te};
    te_seed(te, 5);
    if (k->quantized) te_quantized_model_init_begin(te, &(te_quantized_model_init_desc){.recipe = &recipe});
    r.m = te_linear_create(te, &desc);
    if (k->quantized) te_quantized_model_init_end(te);
    test_on_end(destroy_module, r.m);
    r.opt = k->sgd.lr > 0 ? te_fused_sgd_create(te, r.m, &k->sgd) : te_fused_adam_create(te, r.m, &k->adam);
    CHECK_OK(te);
    if (r.opt) test_on_end(destroy_optimizer, r.opt);
    if (scaling) {
        r.scaler = te_grad_scaler_create(te, scaling);
        CHECK_OK(te);
        if (r.scaler) test_on_end(destroy_scaler, r.scaler);
    }
    r.x = te_tensor_zeros(te, k->dtype, SHAPE(ROWS, IN));
    r.target = te_tensor_zeros(te, k->dtype, SHAPE(ROWS, OUT));
    return r;
}
/* The data of step `index`; infinite: with one number that makes a gradient overflow. */
static void set_data(run *r, int index, bool infinite) {
    float *x = test_normal(ROWS * IN, 41 + (uint64_t)index);
    if (infinite) x[7] = INFINITY;
    te_tensor_copy(r->x, test_tensor(r->te, te_tensor_dtype(r->x), SHAPE(ROWS, IN), x));
    te_tensor_copy(r->target, test_tensor(r->te, te_tensor_dtype(r->x), SHAPE(ROWS, OUT), test_normal(ROWS * OUT, 60 + (uint64_t)index)));
}
enum { PLAIN = 0, UNSCALES = 1 };
static void train(run *r, int how) {
    te_scope_begin(r->te);
    te_tensor *loss = te_scale(te_mse_loss(te_forward(r->m, r->x), r->target), 8); /* gradients far from where f16 ends */
    te_backward(r->scaler ? te_grad_scaler_scale(r->scaler, loss) : loss);
    if (how == UNSCALES) te_grad_scaler_unscale(r->scaler, r->opt);
    if (r->scaler) te_grad_scaler_step(r->scaler, r->opt), te_grad_scaler_update(r->scaler);
    else te_optimizer_step(r->opt);
    te_scope_end(r->te);
}
static float *values(te_tensor *x) {
    float *out = test_floats(te_tensor_numel(x));
    te_tensor_to_f32(x, out);
    return out;
}
static void check_alike(run *a, run *b) {
    static const char *const params[] = {"weight", "bias"}, *const states[] = {"exp_avg", "exp_avg_sq", "momentum_buffer", "master_param"};
    for (int i = 0; i < 2; i++) {
        te_tensor *p = te_module_parameter(a->m, params[i]), *q = te_module_parameter(b->m, params[i]);
        size_t n = (size_t)te_tensor_numel(p) * sizeof(float);
        CHECK_BYTES(params[i], values(p), values(q), n);
        for (int k = 0; k < 4; k++) {
            te_tensor *x = te_optimizer_get_unscaled_state(a->opt, p, states[k]), *y;
            if (!x) CHECK_ERROR(a->te, TE_ERR_INVALID, "has no state");
            else if ((y = te_optimizer_get_unscaled_state(b->opt, q, states[k])) != NULL) CHECK_BYTES(states[k], values(x), values(y), n);
        }
    }
    CHECK_EQ_INT(te_optimizer_steps(a->opt), te_optimizer_steps(b->opt));
    REQUIRE_OK(a->te);
}

/* Steps 0 to 5; 2 and 3 overflow, and so does the first in the second round. */
TE_TEST_DEVICES(scaler_skips_steps_that_overflow) {
    const te_grad_scaler_desc scaling = {.init_scale = 1024, .growth_interval = 2};
    for (int k = 0; k < COUNT(kinds); k++)
        for (int round = 0; round < 4; round++) {
            run plain = make_run(te, &kinds[k], NULL), scaled = make_run(te, &kinds[k], &scaling);
            float scale = 1024;
            int good = 0;
            const int how = round == 3 && kinds[k].dtype != TE_F16 && kinds[k].adam.max_grad_norm == 0 && kinds[k].sgd.max_grad_norm == 0 ? UNSCALES : PLAIN;
            for (int step = 0; step < 6; step++) {
                bool infinite = round && (step == 2 || step == 3 || (round == 2 && step == 0));
                test_case("%s, round %d, step %d", kinds[k].name, round, step);
                set_data(&plain, step, false);
                set_data(&scaled, step, infinite);
                CHECK(te_tensor_item(te_grad_scaler_get_scale(scaled.scaler)) == (double)scale);
                train(&scaled, how);
                if (!infinite) train(&plain, PLAIN);
                good = infinite ? 0 : (good + 1) % 2;
                scale = infinite ? scale / 2 : good == 0 ? scale * 2 : scale;
                te_grad_scaler_state state = te_grad_scaler_get_state(scaled.scaler);
                CHECK(state.scale == scale && state.growth_tracker == good);
                CHECK(!te_tensor_grad(te_module_parameter(scaled.m, "weight")));
                check_alike(&plain, &scaled);
            }
            train(&plain, PLAIN); /* a step without the scaler goes on from there */
            te_grad_scaler *none = scaled.scaler;
            set_data(&scaled, 5, false);
            scaled.scaler = NULL;
            train(&scaled, PLAIN);
            check_alike(&plain, &scaled);
            scaled.scaler = none;
        }
}

/* Launches against calls: the second and the last of four overflow. */
TE_TEST_DEVICES(scaler_in_graphs) {
    const te_grad_scaler_desc scaling = {.init_scale = 256, .growth_interval = 1};
    for (int k = 0; k < COUNT(kinds); k++)
        for (int twice = 0; twice < 2; twice++) { /* steps in one graph */
            run calls = make_run(te, &kinds[k], &scaling), launches = make_run(te, &kinds[k], &scaling);
            test_case("%s, %d in a graph", kinds[k].name, 1 + twice);
            for (int step = 0; step < 2; step++) {
                set_data(&calls, step, step == 1), set_data(&launches, step, step == 1);
                train(&calls, PLAIN), train(&launches, PLAIN);
            }
            te_graph_begin(te);
            for (int i = 0; i <= twice; i++) train(&launches, PLAIN);
            te_graph *graph = te_graph_end(te);
            REQUIRE_OK(te);
            for (int step = 0; step < 4; step++) {
                set_data(&calls, step, step % 2), set_data(&launches, step, step % 2);
                for (int i = 0; i <= twice; i++) train(&calls, PLAIN);
                CHECK_EQ_INT(te_graph_launch(graph), TE_OK);
                check_alike(&calls, &launches);
                CHECK(te_grad_scaler_get_state(calls.scaler).scale == te_grad_scaler_get_state(launches.scaler).scale);
            }
            set_data(&calls, 7, false), set_data(&launches, 7, false);
            train(&calls, PLAIN), train(&launches, PLAIN); /* the last launch is counted */
            check_alike(&calls, &launches);
            te_graph_destroy(graph);
        }
}

/* Two optimizers, one of which overflows: the other steps, and the scale falls once. */
TE_TEST_DEVICES(scaler_of_two_optimizers) {
    run a = make_run(te, &kinds[0], &(te_grad_scaler_desc){.init_scale = 64}), b = make_run(te, &kinds[0], NULL), want = make_run(te, &kinds[0], NULL);
    const float *before = values(te_module_parameter(b.m, "weight"));
    set_data(&a, 1, false), set_data(&want, 1, false), set_data(&b, 1, true);
    train(&want, PLAIN);
    te_backward(te_grad_scaler_scale(a.scaler, te_scale(te_mse_loss(te_forward(a.m, a.x), a.target), 8)));
    te_backward(te_grad_scaler_scale(a.scaler, te_scale(te_mse_loss(te_forward(b.m, b.x), b.target), 8)));
    te_grad_scaler_step(a.scaler, b.opt);
    te_grad_scaler_step(a.scaler, a.opt);
    te_grad_scaler_update(a.scaler);
    REQUIRE_OK(te);
    check_alike(&a, &want);
    CHECK_BYTES("skipped", values(te_module_parameter(b.m, "weight")), before, IN * OUT * sizeof(float));
    CHECK_EQ_INT(te_optimizer_steps(b.opt), 0);
    CHECK(te_grad_scaler_get_state(a.scaler).scale == 32);
}

/* The scale of a file's training goes on with its steps. */
TE_TEST_DEVICES(scaler_goes_on_from_a_file) {
    const te_grad_scaler_desc scaling = {.init_scale = 512, .growth_interval = 3};
    const char *path = test_path("scaled.safetensors");
    run a = make_run(te, &kinds[2], &scaling), b = make_run(te, &kinds[2], &scaling);
    for (int step = 0; step < 4; step++) set_data(&a, step, step == 1), train(&a, PLAIN);
    set_data(&b, 0, true), train(&b, PLAIN); /* a load forgets that b has skipped one */
    te_optimizer_set_group_lr(a.opt, 0, 0.03f);
    CHECK_EQ_INT(te_model_save(te, path, a.m, a.opt, NULL, 0), TE_OK);
    CHECK_EQ_INT(te_model_load(te, path, b.m, b.opt), TE_OK);
    CHECK(te_optimizer_group_lr(b.opt, 0) == 0.03f && te_optimizer_group_lr(b.opt, -1) == 0.01f);
    CHECK_EQ_INT(te_grad_scaler_set_state(b.scaler, te_grad_scaler_get_state(a.scaler)), TE_OK);
    for (int step = 4; step < 7; step++) set_data(&a, step, false), set_data(&b, step, false), train(&a, PLAIN), train(&b, PLAIN);
    check_alike(&a, &b);
    CHECK(te_grad_scaler_get_state(a.scaler).scale == te_grad_scaler_get_state(b.scaler).scale);
}

TE_TEST_DEVICES(scaler_scales_gradients_of_losses) {
    te_grad_scaler *s = te_grad_scaler_create(te, &(te_grad_scaler_desc){.init_scale = 8}), *off = te_grad_scaler_create(te, &(te_grad_scaler_desc){.disabled = true});
    test_on_end(destroy_scaler, s);
    test_on_end(destroy_scaler, off);
    te_tensor *x = te_tensor_set_requires_grad(te_tensor_full(te, TE_F32, SHAPE(3), 2), true), *loss = te_sum_all(x), *scaled = te_grad_scaler_scale(s, loss);
    CHECK(te_tensor_item(scaled) == 48);
    te_backward(scaled);
    CHECK(te_tensor_item(te_sum_all(te_tensor_grad(x))) == 24);
    CHECK(te_grad_scaler_scale(off, loss) == loss);
    CHECK_OK(te);
}

TE_TEST(scaler_refuses) {
    te_ctx *te = test_context("cpu"), *other = test_context("cpu");
    static const te_grad_scaler_desc bad[] = {{.init_scale = -1}, {.growth_factor = 1}, {.backoff_factor = 1}, {.growth_interval = -2}, {.init_scale = NAN}};
    for (int i = 0; i < COUNT(bad); i++) {
        CHECK(!te_grad_scaler_create(te, &bad[i]));
        CHECK_ERROR(te, TE_ERR_INVALID, "te_grad_scaler_create: init_scale");
    }
    run r = make_run(te, &kinds[0], &(te_grad_scaler_desc){0}), half = make_run(te, &kinds[3], &(te_grad_scaler_desc){.init_scale = 4}), far_off = make_run(other, &kinds[0], NULL);
    set_data(&r, 0, false);
    CHECK_EQ_INT(te_grad_scaler_step(r.scaler, far_off.opt), TE_ERR_INVALID);
    CHECK_ERROR(te, TE_ERR_INVALID, "belongs to another context");
    te_backward(te_grad_scaler_scale(r.scaler, te_mse_loss(te_forward(r.m, r.x), r.target)));
    CHECK_EQ_INT(te_grad_scaler_unscale(r.scaler, r.opt), TE_OK);
    CHECK_EQ_INT(te_grad_scaler_unscale(r.scaler, r.opt), TE_ERR_STATE);
    CHECK_ERROR(te, TE_ERR_STATE, "unscaled already");
    CHECK_EQ_INT(te_grad_scaler_step(r.scaler, r.opt), TE_OK);
    CHECK_OK(te);
    set_data(&half, 0, false);
    te_backward(te_grad_scaler_scale(half.scaler, te_mse_loss(te_forward(half.m, half.x), half.target)));
    te_grad_scaler_unscale(half.scaler, half.opt);
    CHECK_ERROR(te, TE_ERR_DTYPE, "the gradient of weight is f16");
    te_grad_scaler_set_state(r.scaler, (te_grad_scaler_state){.scale = 0});
    CHECK_ERROR(te, TE_ERR_INVALID, "scale 0 and growth_tracker 0");
    run fresh = make_run(te, &kinds[0], &(te_grad_scaler_desc){0});
    te_graph_begin(te);
    train(&fresh, PLAIN);
    CHECK(!te_graph_end(te));
    CHECK_ERROR(te, TE_ERR_STATE, "the first step of an optimizer under loss scaling");
    CHECK(te_grad_scaler_step(NULL, r.opt) == TE_ERR_STATE && te_grad_scaler_update(NULL) == TE_ERR_STATE && !te_grad_scaler_scale(NULL, r.x));
}
