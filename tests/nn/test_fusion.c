/* tests/nn/test_fusion.c: what a module does in one launch against the same by separate modules and functions: the same bytes, wherever
 * TransformerEngine's numbers are those of the separate steps, and not a launch more. */
#include "../te_test.h"

/* Modules one behind the other; NULL is the activation. */
typedef struct chain {
    te_module *stage[4];
    int n;
    te_activation act;
} chain;

/* act(z), stored in z's format and quantized by the amax that it had in f32: current scaling as TransformerEngine's activations have it. */
static te_tensor *activate_and_quantize(te_ctx *te, te_tensor *z, te_activation act) {
    te_op_act_fwd_args f = {0};
    te_op_scale_from_amax_args s = {0};
    te_quantizer_desc d = {.kind = TE_QUANT_DELAYED, .dtype = TE_F8E4M3};
    float amax = 0, *y;
    f.x = z;
    f.y = te_tensor_empty(te, TE_F32, SHAPE(te_tensor_shape(z)[0], te_tensor_shape(z)[1] / (te_activation_is_gated(act) ? 2 : 1)));
    f.activation = act;
    te_op_act_fwd(te, &f);
    y = test_read(f.y);
    for (int64_t i = 0; i < te_tensor_numel(f.y); i++) amax = fmaxf(amax, fabsf(y[i]));
    s.amax = test_tensor(te, TE_F32, SHAPE(1), &amax);
    s.scale = d.delayed.scale = te_tensor_empty(te, TE_F32, SHAPE(1));
    s.fp8_max = 448;
    te_op_scale_from_amax(te, &s);
    te_quantizer *q = te_quantizer_create(te, &d);
    te_tensor *quantized = te_quantize(q, te_activate(z, act, NULL));
    te_quantizer_destroy(q);
    return quantized;
}
typedef struct result {
    float *y, *dx;
    int launches; /* of the second step */
} result;

/* Two steps forward and backward: the second has the scales that the first has set. Leaves its gradients in the parameters. */
static result run_chain(te_ctx *te, const chain *c, const te_recipe *r, te_group *group, te_tensor *x, te_tensor *dy) {
    result out = {0};
    te_autocast_desc cast = {0};
    cast.recipe = r;
    cast.disabled = !r;
    cast.amax_group = group;
    for (int step = 0; step < 2; step++) {
        uint64_t before = te_jit_get_stats(te).launches;
        te_tensor *y = x;
        te_scope_begin(te);
        te_tensor_zero_grad(x);
        for (int i = 0; i < c->n; i++) te_module_zero_grad(c->stage[i]);
        te_autocast_begin(te, &cast);
        for (int i = 0; i < c->n; i++)
            y = c->stage[i] ? te_forward(c->stage[i], y) : r && r->kind == TE_RECIPE_CURRENT && !group && i + 1 < c->n ? activate_and_quantize(te, y, c->act) : te_activate(y, c->act, NULL);
        te_autocast_end(te);
        if (y) te_backward_from(y, dy);
        out.launches = (int)(te_jit_get_stats(te).launches - before);
        if (te_ok(te)) out.y = test_read(y), out.dx = test_read(te_tensor_grad(x));
        te_scope_end(te);
    }
    return out;
}

typedef struct fusion_case {
    int64_t tokens, hidden, ffn;
    te_activation act;
    bool rms, no_bias;
    te_dtype dtype;
} fusion_case;

static const fusion_case cases[] = {{40, 32, 48, TE_SWIGLU, true, true, TE_BF16},
                                    {300, 128, 192, TE_GELU, false, false, TE_BF16},
                                    {7, 17, 9, TE_SWIGLU, true, false, TE_F32},
                                    {1, 16, 16, TE_GELU, true, true, TE_BF16}};

static int64_t fc1_rows(const fusion_case *k) { return k->ffn * (te_activation_is_gated(k->act) ? 2 : 1); }
static te_module *make_mlp(te_ctx *te, const fusion_case *k) {
    te_layernorm_mlp_desc d = {0};
    d.hidden_size = k->hidden;
    d.ffn_hidden_size = k->ffn;
    d.norm.normalization = k->rms ? TE_RMSNORM : TE_LAYERNORM;
    d.activation = k->act;
    d.gemm.no_bias = k->no_bias;
    d.gemm.params_dtype = k->dtype;
    d.gemm.init.std = d.output_layer_init.std = 0.2f;
    te_module *m = te_layernorm_mlp_create(te, &d);
    if (!k->no_bias) te_tensor_copy(te_module_parameter(m, "fc1_bias"), te_tensor_normal(te, k->dtype, SHAPE(fc1_rows(k)), 0, 1));
    return m;
}

/* Its parts, with its parameters' values. */
static void tie(te_module *part, const char *name, te_module *mlp, const char *mlp_name) {
    if (te_module_parameter(part, name)) te_tensor_copy(te_module_parameter(part, name), te_module_parameter(mlp, mlp_name));
}
static te_module *make_norm(te_ctx *te, const fusion_case *k, te_module *mlp) {
    te_norm_desc d = {0};
    d.hidden_size = k->hidden;
    d.params_dtype = k->dtype;
    te_module *m = k->rms ? te_rmsnorm_create(te, &d) : te_layernorm_create(te, &d);
    tie(m, "weight", mlp, "layer_norm_weight");
    return m;
}
static te_module *make_linear(te_ctx *te, const fusion_case *k, te_module *mlp, int fc) {
    te_linear_desc d = {0};
    d.in_features = fc == 1 ? k->hidden : k->ffn;
    d.out_features = fc == 1 ? fc1_rows(k) : k->hidden;
    d.gemm.params_dtype = k->dtype;
    d.gemm.no_bias = k->no_bias;
    te_module *m = te_linear_create(te, &d);
    tie(m, "weight", mlp, fc == 1 ? "fc1_weight" : "fc2_weight");
    tie(m, "bias", mlp, fc == 1 ? "fc1_bias" : "fc2_bias");
    return m;
}
static te_module *make_norm_linear(te_ctx *te, const fusion_case *k, te_module *mlp) {
    te_layernorm_linear_desc d = {0};
    d.in_features = k->hidden;
    d.out_features = fc1_rows(k);
    d.norm.normalization = k->rms ? TE_RMSNORM : TE_LAYERNORM;
    d.gemm.params_dtype = k->dtype;
    d.gemm.no_bias = k->no_bias;
    te_module *m = te_layernorm_linear_create(te, &d);
    tie(m, "layer_norm_weight", mlp, "layer_norm_weight");
    tie(m, "weight", mlp, "fc1_weight");
    tie(m, "bias", mlp, "fc1_bias");
    return m;
}

/* The gradients of two parameters: the same bytes, or an error below `limit`. */
static void check_gradient(te_module *a, const char *a_name, te_module *b, const char *b_name, double limit) {
    te_tensor *p = te_module_parameter(a, a_name), *q = te_module_parameter(b, b_name);
    if (!p && !q) return;
    float *got = test_read(te_tensor_grad(p)), *want = test_read(te_tensor_grad(q));
    if (limit == 0) CHECK_BYTES(a_name, got, want, (size_t)te_tensor_numel(p) * sizeof(float));
    else CHECK_ERROR_BELOW(a_name, got, want, te_tensor_numel(p), limit);
}
#define SUM_ORDER 5e-3 /* f32 sums of a column in another order, rounded to bf16 in the end */

/* In high precision and under each recipe but the delayed one every number is that of a norm, two Linears and an activation between them:
 * current scaling has its amaxes from the norm and from the activation, which is where the two would differ: the norm's is of rounded numbers, the activation's
 * of f32. But GELU's gradient in high precision, which the product before it makes: it is rounded once, not twice. */
TE_TEST_DEVICES(mlp_equals_its_parts) {
    static te_recipe (*const recipes[])(void) = {NULL, te_recipe_current_scaling, te_recipe_block_scaling, te_recipe_mxfp8, te_recipe_nvfp4};
    for (int i = 0; i < COUNT(cases); i++)
        for (int j = 0; j < COUNT(recipes); j++) {
            if ((i + j) % test_every_sanitized(1)) continue;
            const fusion_case *k = &cases[i];
            int64_t n = k->tokens * k->hidden;
            bool epilogue = !recipes[j] && k->act == TE_GELU;
            double limit = epilogue ? 5e-3 : 0; /* 2^-9 from the second rounding */
            te_recipe r = te_recipe_delayed_scaling();
            if (recipes[j]) r = recipes[j]();
            r.nvfp4.stochastic_rounding = r.kind == TE_RECIPE_NVFP4 ? TE_OFF : TE_DEFAULT;
            test_case("case %d, %s", i, recipes[j] ? te_recipe_name(r.kind) : "high precision");
            te_scope_begin(te);
            te_tensor *x = te_tensor_set_requires_grad(test_tensor(te, k->dtype, SHAPE(k->tokens, k->hidden), test_normal(n, 1)), true);
            te_tensor *dy = test_tensor(te, k->dtype, SHAPE(k->tokens, k->hidden), test_normal(n, 2));
            chain whole = {{make_mlp(te, k)}, 1, k->act}, parts = {{0}, 4, k->act};
            te_module *mlp = whole.stage[0];
            parts.stage[0] = make_norm(te, k, mlp);
            parts.stage[1] = make_linear(te, k, mlp, 1);
            parts.stage[3] = make_linear(te, k, mlp, 2);
            result got = run_chain(te, &whole, recipes[j] ? &r : NULL, NULL, x, dy), want = run_chain(te, &parts, recipes[j] ? &r : NULL, NULL, x, dy);
            REQUIRE_OK(te);
            CHECK_BYTES("y", got.y, want.y, (size_t)n * sizeof(float));
            if (limit == 0) CHECK_BYTES("dx", got.dx, want.dx, (size_t)n * sizeof(float));
            else CHECK_ERROR_BELOW("dx", got.dx, want.dx, n, limit);
            check_gradient(mlp, "layer_norm_weight", parts.stage[0], "weight", limit);
            check_gradient(mlp, "fc1_weight", parts.stage[1], "weight", limit);
            check_gradient(mlp, "fc2_weight", parts.stage[3], "weight", 0);
            check_gradient(mlp, "fc2_bias", parts.stage[3], "bias", 0);
            check_gradient(mlp, "fc1_bias", parts.stage[1], "bias", SUM_ORDER);
            CHECK_MSG(got.launches <= want.launches - epilogue, "%d launches; its parts take %d", got.launches, want.launches);
            for (int m = 0; m < 4; m++)
                if (parts.stage[m]) te_module_destroy(parts.stage[m]);
            te_module_destroy(mlp);
            te_scope_end(te);
        }
}

/* Delayed scaling: the activation writes codes in both directions. Forward they are made of unrounded numbers, and those of a plain activation
 * backward too, so that only the gradient of a gated one comes out as by separate steps. */
TE_TEST_DEVICES(delayed_mlp_saves_launches) {
    for (int i = 0; i < COUNT(cases); i++) {
        const fusion_case *k = &cases[i];
        int64_t n = k->tokens * k->hidden;
        te_recipe r = te_recipe_delayed_scaling();
        /* E5M2 has two bits: a number on the edge of two codes falls to either side of a step of 1/4, few do */
        double limit = te_activation_is_gated(k->act) ? 0 : 0.05;
        test_case("case %d", i);
        te_scope_begin(te);
        te_tensor *x = te_tensor_set_requires_grad(test_tensor(te, k->dtype, SHAPE(k->tokens, k->hidden), test_normal(n, 1)), true);
        te_tensor *dy = test_tensor(te, k->dtype, SHAPE(k->tokens, k->hidden), test_normal(n, 2));
        chain whole = {{make_mlp(te, k)}, 1, k->act}, parts = {{0}, 3, k->act};
        te_module *mlp = whole.stage[0];
        parts.stage[0] = make_norm_linear(te, k, mlp);
        parts.stage[2] = make_linear(te, k, mlp, 2);
        result got = run_chain(te, &whole, &r, NULL, x, dy), want = run_chain(te, &parts, &r, NULL, x, dy);
        REQUIRE_OK(te);
        if (limit == 0) CHECK_BYTES("dx", got.dx, want.dx, (size_t)n * sizeof(float));
        else CHECK_ERROR_BELOW("dx", got.dx, want.dx, n, limit);
        check_gradient(mlp, "layer_norm_weight", parts.stage[0], "layer_norm_weight", limit);
        check_gradient(mlp, "fc1_weight", parts.stage[0], "weight", limit);
        check_gradient(mlp, "fc1_bias", parts.stage[0], "bias", SUM_ORDER);
        check_gradient(mlp, "fc2_bias", parts.stage[2], "bias", 0);
        CHECK_MSG(got.launches <= want.launches - 2, "%d launches; its parts take %d", got.launches, want.launches);
        te_module_destroy(parts.stage[0]);
        te_module_destroy(parts.stage[2]);
        te_module_destroy(mlp);
        te_scope_end(te);
    }
}

static te_module *make_activation(te_ctx *te, te_activation act) {
    te_activation_desc d = {.activation = act};
    return te_activation_create(te, &d);
}

static te_result own_forward(te_module *m, te_forward_args *args) {
    (void)m;
    args->outputs.out = te_activate(args->input, TE_GELU, NULL); /* that of case 1 */
    return args->outputs.out ? TE_OK : TE_ERR_STATE;
}
/* A Sequential of a norm, a Linear, an activation and a Linear does what LayerNormMLP does, to the byte and to the launch; but for the gradient of the activation where
 * TransformerEngine's te.ops round it less than its LayerNormMLP: current scaling has its amax, and delayed scaling the codes of a gated one, from f32, without a bias or
 * behind GELU. */
TE_TEST_DEVICES(sequential_runs_chains_as_one) {
    static te_recipe (*const recipes[])(void) = {NULL, te_recipe_current_scaling, te_recipe_delayed_scaling, te_recipe_block_scaling, te_recipe_mxfp8, te_recipe_nvfp4};
    for (int i = 0; i < COUNT(cases); i++)
        for (int j = 0; j < COUNT(recipes); j++) {
            if ((i + j + 1) % test_every_sanitized(1)) continue;
            const fusion_case *k = &cases[i];
            int64_t n = k->tokens * k->hidden;
            te_recipe r = recipes[j] ? recipes[j]() : te_recipe_delayed_scaling();
            r.nvfp4.stochastic_rounding = r.kind == TE_RECIPE_NVFP4 ? TE_OFF : TE_DEFAULT;
            test_case("case %d, %s", i, recipes[j] ? te_recipe_name(r.kind) : "high precision");
            te_scope_begin(te);
            te_tensor *x = te_tensor_set_requires_grad(test_tensor(te, k->dtype, SHAPE(k->tokens, k->hidden), test_normal(n, 1)), true);
            te_tensor *dy = test_tensor(te, k->dtype, SHAPE(k->tokens, k->hidden), test_normal(n, 2));
            te_module *mlp = make_mlp(te, k), *part[4] = {make_norm(te, k, mlp), make_linear(te, k, mlp, 1), make_activation(te, k->act), make_linear(te, k, mlp, 2)};
            chain whole = {{mlp}, 1, k->act}, all = {{te_sequential_create(te, part, 4)}, 1, k->act};
            result want = run_chain(te, &whole, recipes[j] ? &r : NULL, NULL, x, dy), got = run_chain(te, &all, recipes[j] ? &r : NULL, NULL, x, dy);
            bool fused = k->dtype != TE_F32 && (k->no_bias || k->act == TE_GELU);
            bool less = recipes[j] && fused && (r.kind == TE_RECIPE_CURRENT || (r.kind == TE_RECIPE_DELAYED && te_activation_is_gated(k->act)));
            double limit = less ? 0.05 : 0; /* as in delayed_mlp_saves_launches */
            REQUIRE_OK(te);
            CHECK_BYTES("y", got.y, want.y, (size_t)n * sizeof(float));
            if (limit == 0) CHECK_BYTES("dx", got.dx, want.dx, (size_t)n * sizeof(float));
            else CHECK_ERROR_BELOW("dx", got.dx, want.dx, n, limit);
            check_gradient(part[0], "weight", mlp, "layer_norm_weight", limit);
            check_gradient(part[1], "weight", mlp, "fc1_weight", limit);
            check_gradient(part[1], "bias", mlp, "fc1_bias", 0);
            check_gradient(part[3], "weight", mlp, "fc2_weight", 0);
            check_gradient(part[3], "bias", mlp, "fc2_bias", 0);
            CHECK_MSG(got.launches <= want.launches, "%d launches; LayerNormMLP takes %d", got.launches, want.launches);
            te_module_destroy(mlp);
            te_module_destroy(all.stage[0]);
            te_scope_end(te);
        }
}

/* An activation behind or in front of nothing, one with a checkpoint, one with another forward, and modules of one function between. */
TE_TEST_DEVICES(sequential_leaves_others_alone) {
    const fusion_case *k = &cases[1];
    int64_t n = k->tokens * k->hidden, wide = k->tokens * k->ffn;
    te_tensor *x = te_tensor_set_requires_grad(test_tensor(te, k->dtype, SHAPE(k->tokens, k->hidden), test_normal(n, 1)), true);
    te_tensor *dy = test_tensor(te, k->dtype, SHAPE(k->tokens, k->ffn), test_normal(wide, 2));
    te_recipe r = te_recipe_current_scaling();
    for (int way = 0; way < 5; way++) {
        te_constant_scale_desc scale = {.scale = 1};
        te_dropout_desc drop = {.p = 0.5f};
        te_module *mlp = make_mlp(te, k), *first = make_linear(te, k, mlp, 1), *act = make_activation(te, k->act), *list[8];
        int count = 0;
        test_case("way %d", way);
        list[count++] = first;
        if (way == 1) list[count++] = te_constant_scale_create(te, &scale);
        if (way == 2) te_module_set_checkpoint(act, true);
        if (way == 4) list[count++] = te_dropout_create(te, &drop), list[count++] = te_identity_create(te, NULL);
        list[count++] = act;
        te_module *all = te_sequential_create(te, list, count);
        if (way == 3) te_module_set_forward(act, own_forward);
        if (way == 4) te_module_train(all, false); /* nothing is dropped */
        chain parts = {{make_linear(te, k, mlp, 1), NULL}, 2, k->act}, whole = {{all}, 1, k->act};
        result want = run_chain(te, &parts, &r, NULL, x, dy), got = run_chain(te, &whole, &r, NULL, x, dy);
        REQUIRE_OK(te);
        CHECK_BYTES("y", got.y, want.y, (size_t)wide * sizeof(float));
        double limit = way == 0 ? 0.05 : 0; /* GELU behind a bias: its amax is of f32 (sequential_runs_chains_as_one) */
        if (limit == 0) CHECK_BYTES("dx", got.dx, want.dx, (size_t)n * sizeof(float));
        else CHECK_ERROR_BELOW("dx", got.dx, want.dx, n, limit);
        check_gradient(first, "weight", parts.stage[0], "weight", limit);
        check_gradient(first, "bias", parts.stage[0], "bias", SUM_ORDER);
        if (way == 0) CHECK_MSG(got.launches <= want.launches, "%d launches; one by one %d", got.launches, want.launches);
        te_module_destroy(mlp);
        te_module_destroy(all);
        te_module_destroy(parts.stage[0]);
    }
}

static te_tensor *through(te_ctx *te, te_tensor *const *inputs, void *user) {
    (void)te;
    return te_forward((te_module *)user, inputs[0]);
}
TE_TEST_DEVICES(modules_of_one_function) {
    enum { ROWS = 3, N = 8 };
    float *x = test_normal(ROWS * N, 4), want[ROWS * N];
    te_bias_desc b = {.size = N, .params_dtype = TE_F32};
    te_constant_scale_desc scale = {.scale = -0.5f};
    te_l2normalization_desc l2 = {.eps = 0.1f};
    te_module *bias = te_bias_create(te, &b), *one[3] = {te_l2normalization_create(te, &l2), te_constant_scale_create(te, &scale), bias}, *m = te_sequential_create(te, one, 3);
    REQUIRE_OK(te);
    te_tensor_copy_from_host(te_module_parameter(bias, "bias"), x + N);
    for (int i = 0; i < ROWS; i++) {
        double sum = 0.1;
        for (int c = 0; c < N; c++) sum += (double)x[i * N + c] * x[i * N + c];
        for (int c = 0; c < N; c++) want[i * N + c] = (float)(-0.5 * x[i * N + c] / sqrt(sum) + x[N + c]);
    }
    te_tensor *in[2] = {test_tensor(te, TE_F32, SHAPE(ROWS, N), x), te_module_parameter(bias, "bias")};
    CHECK_TENSOR(te_forward(m, in[0]), want, 1e-5, 1e-6); /* f32 roundings of a sum of eight */
    test_check_gradients(te, through, 2, in, m, 1e-2, 1e-3);
    te_module_destroy(m);
    te_activation_desc a = {.activation = (te_activation)99};
    CHECK(!te_activation_create(te, &a));
    CHECK_ERROR(te, TE_ERR_INVALID, "activation 99");
    te_dropout_desc d = {.p = 1};
    CHECK(!te_dropout_create(te, &d));
    CHECK_ERROR(te, TE_ERR_INVALID, "p is 1");
    b.size = 0;
    CHECK(!te_bias_create(te, &b));
    CHECK_ERROR(te, TE_ERR_INVALID, "sizes 0");
}

/* Two ranks, of which this is one: the other one's amax is always 9. */
typedef struct pair {
    int calls, fail_at;
} pair;
static te_result pair_all_reduce(void *user, te_ctx *te, te_tensor *x, te_reduce_op op) {
    pair *p = (pair *)user;
    float values[2] = {0, 0};
    (void)te;
    if (++p->calls == p->fail_at || op != TE_REDUCE_MAX || te_tensor_numel(x) > 2) return TE_ERR_DEVICE;
    te_tensor_to_host(x, values);
    values[0] = fmaxf(values[0], 9);
    return te_tensor_copy_from_host(x, values);
}
static te_result pair_gather(void *user, te_ctx *te, const te_tensor *x, te_tensor *out) { return (void)user, (void)te, (void)x, (void)out, TE_ERR_UNSUPPORTED; }
static te_result pair_broadcast(void *user, te_ctx *te, te_tensor *x, int root) { return (void)user, (void)te, (void)x, (void)root, TE_ERR_UNSUPPORTED; }
static te_result pair_barrier(void *user) { return (void)user, TE_OK; }

/* A group has its say between the measuring and the cast; where it fails, what was measured is forgotten. */
TE_TEST_DEVICES(amaxes_of_a_group) {
    const fusion_case *k = &cases[0];
    int64_t n = k->tokens * k->hidden;
    pair p = {0, 0};
    te_group_desc g = {0};
    te_recipe r = te_recipe_current_scaling();
    g.size = 2;
    g.user = &p;
    g.all_reduce = pair_all_reduce;
    g.all_gather = g.reduce_scatter = pair_gather;
    g.broadcast = pair_broadcast;
    g.barrier = pair_barrier;
    te_group *group = te_group_create(te, &g);
    te_tensor *x = te_tensor_set_requires_grad(test_tensor(te, k->dtype, SHAPE(k->tokens, k->hidden), test_normal(n, 1)), true);
    te_tensor *dy = test_tensor(te, k->dtype, SHAPE(k->tokens, k->hidden), test_normal(n, 2));
    chain whole = {{make_mlp(te, k)}, 1, k->act}, parts = {{0}, 4, k->act};
    te_module *mlp = whole.stage[0];
    parts.stage[0] = make_norm(te, k, mlp);
    parts.stage[1] = make_linear(te, k, mlp, 1);
    parts.stage[3] = make_linear(te, k, mlp, 2);
    result want = run_chain(te, &parts, &r, group, x, dy);
    int calls = p.calls;
    p.calls = 0;
    result got = run_chain(te, &whole, &r, group, x, dy);
    REQUIRE_OK(te);
    CHECK_EQ_INT(p.calls, calls);
    CHECK_BYTES("y", got.y, want.y, (size_t)n * sizeof(float));
    CHECK_BYTES("dx", got.dx, want.dx, (size_t)n * sizeof(float));
    CHECK(got.launches <= want.launches); /* the amaxes are measured apart: a group reduces them */
    want = run_chain(te, &whole, &r, NULL, x, dy);
    for (p.fail_at = 1; p.fail_at <= calls / 2; p.fail_at++) {
        test_case("call %d fails", p.fail_at);
        p.calls = 0;
        run_chain(te, &whole, &r, group, x, dy);
        CHECK_ERROR(te, TE_ERR_DEVICE, "te_all_reduce");
        got = run_chain(te, &whole, &r, NULL, x, dy);
        CHECK_OK(te);
        CHECK_BYTES("y", got.y, want.y, (size_t)n * sizeof(float));
        CHECK_BYTES("dx", got.dx, want.dx, (size_t)n * sizeof(float));
    }
    for (int m = 0; m < 4; m++)
        if (parts.stage[m]) te_module_destroy(parts.stage[m]);
    te_module_destroy(mlp);
    te_group_destroy(group);
}

/* The gradient of a Linear's bias comes with the cast of its output's gradient, from the numbers before it: the others are what they are
 * without a bias, the sums are te_op_column_sum's. */
TE_TEST_DEVICES(bias_gradient_comes_with_the_cast) {
    static te_recipe (*const recipes[])(void) = {te_recipe_delayed_scaling, te_recipe_current_scaling, te_recipe_block_scaling};
    enum { M = 72, N = 48, K = 32 };
    for (int i = 0; i < COUNT(recipes); i++) {
        te_recipe r = recipes[i]();
        test_case("%s", te_recipe_name(r.kind));
        te_scope_begin(te);
        te_linear_desc d = {0};
        d.in_features = K;
        d.out_features = N;
        te_module *with = te_linear_create(te, &d);
        d.gemm.no_bias = true;
        te_module *without = te_linear_create(te, &d);
        te_tensor_copy(te_module_parameter(without, "weight"), te_module_parameter(with, "weight"));
        te_tensor *x = te_tensor_set_requires_grad(test_tensor(te, TE_BF16, SHAPE(M, K), test_normal(M * K, 1)), true);
        te_tensor *dy = test_tensor(te, TE_BF16, SHAPE(M, N), test_normal(M * N, 2));
        chain a = {{with}, 1, TE_GELU}, b = {{without}, 1, TE_GELU};
        result got = run_chain(te, &a, &r, NULL, x, dy), want = run_chain(te, &b, &r, NULL, x, dy);
        te_op_column_sum_args sum = {0};
        sum.x = dy;
        sum.out = te_tensor_empty(te, TE_BF16, SHAPE(N));
        te_op_column_sum(te, &sum);
        REQUIRE_OK(te);
        CHECK_BYTES("dx", got.dx, want.dx, M * K * sizeof(float));
        check_gradient(with, "weight", without, "weight", 0);
        CHECK_ERROR_BELOW("bias", test_read(te_tensor_grad(te_module_parameter(with, "bias"))), test_read(sum.out), N, SUM_ORDER);
        CHECK(got.launches <= want.launches + 1);
        te_module_destroy(with);
        te_module_destroy(without);
        te_scope_end(te);
    }
}

/* Weight gradients are added up in f32 by the product itself: no launch more than without, and microbatches give the sum of their gradients. */
TE_TEST_DEVICES(wgrad_accumulates_within_its_product) {
    enum { M = 64, N = 48, K = 32 };
    for (int recipe = 0; recipe < 3; recipe++) {
        te_recipe r = recipe == 1 ? te_recipe_current_scaling() : te_recipe_block_scaling();
        test_case("recipe %d", recipe);
        te_scope_begin(te);
        te_linear_desc d = {0};
        d.in_features = K;
        d.out_features = N;
        d.gemm.no_bias = true;
        te_module *plain = te_linear_create(te, &d);
        d.gemm.fuse_wgrad_accumulation = true;
        te_module *fused = te_linear_create(te, &d);
        te_tensor *w = te_module_parameter(fused, "weight"), *main_grad = te_tensor_zeros(te, TE_F32, SHAPE(N, K));
        te_tensor_copy(te_module_parameter(plain, "weight"), w);
        te_tensor_set_main_grad(w, main_grad);
        te_tensor *x = te_tensor_set_requires_grad(test_tensor(te, TE_BF16, SHAPE(M, K), test_normal(M * K, 1)), true);
        te_tensor *dy = test_tensor(te, TE_BF16, SHAPE(M, N), test_normal(M * N, 2));
        chain a = {{fused}, 1, TE_GELU}, b = {{plain}, 1, TE_GELU};
        result got = run_chain(te, &a, recipe ? &r : NULL, NULL, x, dy), want = run_chain(te, &b, recipe ? &r : NULL, NULL, x, dy);
        REQUIRE_OK(te);
        CHECK(got.launches <= want.launches);
        CHECK(te_tensor_grad(w) == NULL);
        float *once = test_read(te_tensor_grad(te_module_parameter(plain, "weight")));
        for (int i = 0; i < N * K; i++) once[i] *= 2; /* run_chain makes two steps */
        CHECK_ERROR_BELOW("main_grad", test_read(main_grad), once, N * K, 4e-3); /* the other one is rounded to bf16 */
        te_tensor_set_main_grad(w, NULL);
        te_module_destroy(plain);
        te_module_destroy(fused);
        te_scope_end(te);
    }
}

/* A norm's backward pass adds what the residual branch has given its input already: the sum of two stored gradients, to the bit, in the
 * launches of the norm alone. */
TE_TEST_DEVICES(residual_gradient_is_added_by_the_norm) {
    static const int64_t shapes[][2] = {{40, 64}, {7, 17}, {300, 2048}, {1, 8}};
    for (int i = 0; i < COUNT(shapes); i++)
        for (int kind = 0; kind < 4; kind++) { /* LayerNorm, RMSNorm; of a leaf, of what another function made */
            if ((kind + i) % test_every_odd(1)) continue;
            int64_t m = shapes[i][0], n = shapes[i][1];
            te_dtype dtype = i == 1 ? TE_F32 : i == 3 ? TE_F16 : TE_BF16;
            bool rms = kind & 1, leaf = kind & 2;
            test_case("[%d, %d] kind %d", (int)m, (int)n, kind);
            te_scope_begin(te);
            te_tensor *a = te_tensor_set_requires_grad(test_tensor(te, dtype, SHAPE(m, n), test_normal(m * n, 3)), true);
            te_tensor *b = te_tensor_set_requires_grad(test_tensor(te, dtype, SHAPE(m, n), test_normal(m * n, 3)), true);
            te_tensor *dy = test_tensor(te, dtype, SHAPE(m, n), test_normal(m * n, 4));
            te_tensor *gamma = te_tensor_set_requires_grad(test_tensor(te, dtype, SHAPE(n), test_uniform(n, 5, 0.5f, 2)), true);
            te_tensor *x[2], *y[2], *want;
            int launches[2];
            x[0] = leaf ? a : te_scale(a, 1);
            x[1] = leaf ? b : te_scale(b, 1);
            for (int k = 0; k < 2; k++) y[k] = rms ? te_rmsnorm(x[k], gamma, 0, false) : te_layernorm(x[k], gamma, NULL, 0, false);
            y[1] = te_add(y[1], x[1]);
            for (int k = 0; k < 2; k++) {
                uint64_t before = te_jit_get_stats(te).launches;
                te_backward_from(y[k], dy);
                launches[k] = (int)(te_jit_get_stats(te).launches - before);
                if (k == 0) te_tensor_zero_grad(gamma);
            }
            te_no_grad_begin(te);
            want = te_add(te_tensor_grad(a), dy);
            CHECK_BYTES("sum", test_read_bytes(te_tensor_grad(b)), test_read_bytes(want), te_tensor_bytes(want));
            CHECK_EQ_INT(launches[1], launches[0]);
            CHECK_BYTES("dy stays", test_read(dy), test_rounded(dtype, test_normal(m * n, 4), m * n), (size_t)(m * n) * sizeof(float));
            if (leaf) { /* once more, on top of it */
                want = te_add(te_add(want, dy), te_tensor_grad(a));
                te_no_grad_end(te);
                te_backward_from(te_add(rms ? te_rmsnorm(b, gamma, 0, false) : te_layernorm(b, gamma, NULL, 0, false), b), dy);
                te_no_grad_begin(te);
                CHECK_BYTES("twice", test_read_bytes(te_tensor_grad(b)), test_read_bytes(want), te_tensor_bytes(want));
            }
            te_no_grad_end(te);
            CHECK_OK(te);
            te_scope_end(te);
        }
}

/* A step without tokens: its weights' gradients are 0, whatever lies in memory that nobody has written yet. */
TE_TEST_DEVICES(no_tokens) {
    static te_recipe (*const recipes[])(void) = {te_recipe_delayed_scaling, te_recipe_current_scaling, te_recipe_block_scaling, te_recipe_mxfp8, te_recipe_nvfp4};
    static const char *const weights[] = {"layer_norm_weight", "fc1_weight", "fc2_weight", "fc1_bias", "fc2_bias"};
    for (int i = 0; i < 2 * COUNT(recipes); i++) {
        fusion_case k = cases[i % 2];
        te_recipe r = recipes[i / 2]();
        test_case("case %d, %s", i % 2, te_recipe_name(r.kind));
        k.tokens = 0;
        te_scope_begin(te);
        te_module *mlp = make_mlp(te, &k);
        te_tensor *x = te_tensor_set_requires_grad(te_tensor_empty(te, k.dtype, SHAPE(0, k.hidden)), true), *dy = te_tensor_empty(te, k.dtype, SHAPE(0, k.hidden));
        te_scope_begin(te);
        for (int64_t n = 1; n <= 1 << 18; n *= 2) /* what the pool hands out next */
            for (int j = 0; j < (n > 1024 ? 4 : 64); j++) te_tensor_full(te, TE_F32, SHAPE(n), NAN);
        te_scope_end(te);
        te_tensor *y = test_forward(mlp, &r, x);
        te_backward_from(y, dy);
        REQUIRE_OK(te);
        for (int w = 0; w < COUNT(weights); w++) {
            te_tensor *parameter = te_module_parameter(mlp, weights[w]);
            float *grad = parameter ? test_read(te_tensor_grad(parameter)) : NULL;
            for (int64_t e = 0; grad && e < te_tensor_numel(parameter); e++)
                if (grad[e] != 0) {
                    CHECK_MSG(false, "gradient of %s, element %lld: %g", weights[w], (long long)e, (double)grad[e]);
                    break;
                }
        }
        te_module_destroy(mlp);
        te_scope_end(te);
    }
}
