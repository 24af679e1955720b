/* test_lora_classes.c: adapters on every class that multiplies, and on embeddings: gradients against differences, merging, files, recipes, ranks; DoRA by its formula. */
#include "../dist/ranks.h"

enum { CL_IN = 32, CL_OUT = 48, CL_ROWS = 32, CL_R = 4, CL_GROUPS = 3 };

/* ---- modules ---- */

typedef enum cl_kind { CL_LINEAR, CL_NORM, CL_NORM_PARTS, CL_MLP, CL_MLP_GATED, CL_MLP_TURNS, CL_GROUPED, CL_GROUPED_DEVICE, CL_TABLE, CL_KINDS } cl_kind;
static const char *const cl_names[] = {"Linear", "LayerNormLinear", "LayerNormLinear in parts", "LayerNormMLP", "gated LayerNormMLP", "interleaved LayerNormMLP", "GroupedLinear",
                                       "GroupedLinear, m_splits_tensor", "Embedding"};
static const int64_t cl_splits[CL_GROUPS] = {20, 0, 12};

static te_module *cl_create(te_ctx *te, cl_kind kind, te_dtype dtype) {
    static const char *const parts[] = {"query", "rest"};
    static const int64_t sizes[] = {16, 32};
    te_seed(te, 11);
    switch (kind) {
    case CL_LINEAR: return te_linear_create(te, &(te_linear_desc){.in_features = CL_IN, .out_features = CL_OUT, .gemm.params_dtype = dtype, .gemm.init.std = 0.2f});
    case CL_NORM: return te_layernorm_linear_create(te, &(te_layernorm_linear_desc){.in_features = CL_IN, .out_features = CL_OUT, .gemm.params_dtype = dtype, .gemm.init.std = 0.2f});
    case CL_NORM_PARTS:
        return te_layernorm_linear_create(te, &(te_layernorm_linear_desc){.in_features = CL_IN, .out_features = CL_OUT, .norm.normalization = TE_RMSNORM, .gemm.params_dtype = dtype,
                                                                         .gemm.init.std = 0.2f, .parameters_split = {parts, sizes, 2}});
    case CL_MLP:
    case CL_MLP_GATED:
    case CL_MLP_TURNS:
        return te_layernorm_mlp_create(te, &(te_layernorm_mlp_desc){.hidden_size = CL_IN, .ffn_hidden_size = CL_OUT, .activation = kind == CL_MLP ? TE_GELU : TE_SWIGLU, .gemm.params_dtype = dtype,
                                                                    .gemm.init.std = 0.2f, .output_layer_init.std = 0.2f, .activation_params.glu_interleave_size = kind == CL_MLP_TURNS ? 16 : 0});
    case CL_GROUPED:
    case CL_GROUPED_DEVICE:
        return te_grouped_linear_create(te, &(te_grouped_linear_desc){.num_gemms = CL_GROUPS, .in_features = CL_IN, .out_features = CL_OUT, .gemm.params_dtype = dtype, .gemm.init.std = 0.2f});
    default: return te_embedding_create(te, &(te_embedding_desc){.num_embeddings = CL_OUT, .embedding_dim = CL_IN, .params_dtype = dtype, .init.std = 0.2f});
    }
}
static te_tensor *cl_input(te_ctx *te, cl_kind kind, te_dtype dtype) {
    int32_t ids[CL_ROWS];
    for (int i = 0; i < CL_ROWS; i++) ids[i] = i * i % CL_OUT;
    if (kind == CL_TABLE) return te_tensor_from_host(te, TE_I32, SHAPE(CL_ROWS), ids);
    return test_tensor(te, dtype, SHAPE(CL_ROWS, CL_IN), test_normal(CL_ROWS * CL_IN, 21));
}
static te_tensor *cl_run(te_module *m, cl_kind kind, te_tensor *x, const te_recipe *recipe) {
    te_ctx *te = te_module_ctx(m);
    te_forward_args args = {.input = x};
    if (kind == CL_GROUPED) args.m_splits = cl_splits;
    if (kind == CL_GROUPED_DEVICE) args.m_splits_tensor = te_tensor_from_host(te, TE_I64, SHAPE(CL_GROUPS), cl_splits);
    if (recipe) te_autocast_begin(te, &(te_autocast_desc){.recipe = recipe});
    te_tensor *y = te_forward_with(m, &args);
    if (recipe) te_autocast_end(te);
    return y;
}
static bool cl_fill_one(void *user, te_module *m, const char *path, te_tensor *x, te_entry_kind kind) {
    (void)user, (void)m, (void)kind;
    if (strstr(path, "lora_A") || strstr(path, "lora_B"))
        te_tensor_copy(x, test_tensor(te_tensor_ctx(x), TE_F32, te_tensor_ndim(x), te_tensor_shape(x), test_uniform(te_tensor_numel(x), 31 + (uint64_t)strlen(path), -0.3f, 0.3f)));
    return true;
}
/* Adapters that do something. */
static int cl_apply(te_module *m, cl_kind kind) {
    const char *name = te_module_name(m);
    te_lora_desc d = {.target_modules = &name, .num_target_modules = 1, .dim = CL_R, .alpha = 6};
    int n = 0;
    (void)kind;
    CHECK_EQ_INT(te_lora_apply(m, &d, &n), TE_OK);
    return n;
}
static void cl_fill(te_module *m) { te_module_visit_tensors(m, cl_fill_one, NULL); }

/* ---- gradients ---- */

typedef struct cl_function {
    te_module *m;
    cl_kind kind;
    te_tensor *ids;
} cl_function;
static te_tensor *cl_call(te_ctx *te, te_tensor *const *inputs, void *user) {
    const cl_function *f = (const cl_function *)user;
    (void)te;
    return cl_run(f->m, f->kind, f->ids ? f->ids : inputs[0], NULL);
}
typedef struct cl_list {
    te_tensor *x[32];
    int n;
} cl_list;
static bool cl_list_adapter(void *user, te_module *m, const char *path, te_tensor *x, te_entry_kind kind) {
    cl_list *l = (cl_list *)user;
    (void)m, (void)kind;
    if (strstr(path, "lora_") && !strstr(path, "weight1")) l->x[l->n++] = x; /* group 1 has no rows, and a gradient of zeros */
    return true;
}
TE_TEST_DEVICES(lora_classes_gradients) {
    te = test_exact(te);
    for (int kind = 0; kind < CL_KINDS; kind++) {
        test_case("%s", cl_names[kind]);
        te_module *m = cl_create(te, (cl_kind)kind, TE_F32);
        cl_function f = {m, (cl_kind)kind, NULL};
        cl_list l = {.n = 0};
        te_tensor *x = cl_input(te, (cl_kind)kind, TE_F32);
        const int sites = kind == CL_MLP || kind == CL_MLP_GATED || kind == CL_MLP_TURNS ? 2 : 1;
        te_tensor *before = cl_run(m, (cl_kind)kind, x, NULL);
        CHECK_EQ_INT(cl_apply(m, (cl_kind)kind), sites);
        if (kind != CL_MLP) /* whose product and activation are not one step any more */
            CHECK_BYTES("adapters begin at zero", test_read(cl_run(m, (cl_kind)kind, x, NULL)), test_read(before), (size_t)te_tensor_numel(before) * sizeof(float));
        cl_fill(m);
        if (kind == CL_TABLE) f.ids = x;
        else l.x[l.n++] = x;
        te_module_visit_tensors(m, cl_list_adapter, &l);
        CHECK_EQ_INT(l.n, (kind != CL_TABLE) + 2 * sites * (kind == CL_GROUPED || kind == CL_GROUPED_DEVICE ? 2 : 1));
        test_check_gradients(te, cl_call, l.n, l.x, &f, 1e-2, 2e-3);
        te_module_destroy(m);
    }
}

/* ---- merging, removing, files ---- */

TE_TEST_DEVICES(lora_classes_merge_and_files) {
    te_ctx *cpu = test_cpu_beside(te);
    if (!cpu) cpu = te;
    te = test_exact(te);
    for (int kind = 0; kind < CL_KINDS; kind++) {
        test_case("%s", cl_names[kind]);
        te_module *m = cl_create(te, (cl_kind)kind, TE_F32), *other = cl_create(te, (cl_kind)kind, TE_F32);
        te_tensor *x = cl_input(te, (cl_kind)kind, TE_F32);
        const size_t n = (size_t)te_tensor_numel(cl_run(m, (cl_kind)kind, x, NULL));
        const float *base = test_read(cl_run(m, (cl_kind)kind, x, NULL));
        cl_apply(m, (cl_kind)kind);
        cl_fill(m);
        const float *want = test_read(cl_run(m, (cl_kind)kind, x, NULL));
        CHECK(memcmp(want, base, n * sizeof(float)) != 0);
        CHECK_EQ_INT(te_lora_save(m, test_path("classes")), TE_OK);
        for (int again = 0; again < 2; again++) { /* into a module without adapters, and into one with others */
            CHECK_EQ_INT(te_lora_load(other, test_path("classes")), TE_OK);
            CHECK_BYTES("loaded", test_read(cl_run(other, (cl_kind)kind, x, NULL)), want, n * sizeof(float));
            te_module_visit_tensors(other, cl_fill_one, NULL);
        }
        CHECK_EQ_INT(te_lora_remove(other), TE_OK);
        CHECK(te_module_num_children(other) == 0 && !te_module_set_forward(other, NULL));
        CHECK_BYTES("removed", test_read(cl_run(other, (cl_kind)kind, x, NULL)), base, n * sizeof(float));
        CHECK_EQ_INT(te_lora_merge(m), TE_OK);
        CHECK(te_module_num_children(m) == 0);
        CHECK_ERROR_BELOW("merged", test_read(cl_run(m, (cl_kind)kind, x, NULL)), want, n, 2e-6); /* f32 sums of some 50 numbers in another order, twice in an MLP */
        CHECK_OK(te);
        te_module_destroy(m);
        te_module_destroy(other);
    }
}

/* Under recipes the first product's codes are those without adapters, the adapters' own are quantized as any Linear's; a step of training lowers the loss. */
TE_TEST_DEVICES(lora_classes_under_recipes) {
    te_recipe recipes[] = {te_recipe_delayed_scaling(), te_recipe_current_scaling(), te_recipe_block_scaling(), te_recipe_mxfp8()};
    for (int i = 0; i < COUNT(recipes) * CL_TABLE; i++) {
        const te_recipe *recipe = &recipes[i / CL_TABLE];
        const cl_kind kind = (cl_kind)(i % CL_TABLE);
        if (i % test_every_odd(1)) continue;
        test_case("%s, %s", te_recipe_name(recipe->kind), cl_names[kind]);
        if (kind == CL_GROUPED_DEVICE && recipe->kind == TE_RECIPE_DELAYED) continue; /* TransformerEngine has no such call */
        te_module *m = cl_create(te, kind, TE_BF16);
        const char *name = te_module_name(m);
        float first = 0, last = 0;
        te_lora_desc d = {.target_modules = &name, .num_target_modules = 1, .dim = 16, .alpha = 16}; /* ranks that MXFP8 takes */
        CHECK_EQ_INT(te_lora_apply(m, &d, NULL), TE_OK);
        te_optimizer *adam = te_fused_adam_create(te, m, &(te_fused_adam_desc){.lr = 1e-2f});
        te_tensor *x = cl_input(te, kind, TE_BF16);
        for (int step = 0; step < 6; step++) {
            te_scope_begin(te);
            te_tensor *y = cl_run(m, kind, x, recipe);
            te_tensor *loss = te_mse_loss(y, te_tensor_full(te, TE_BF16, te_tensor_ndim(y), te_tensor_shape(y), 0.5));
            last = (float)te_tensor_item(loss);
            if (step == 0) first = last;
            te_backward(loss);
            te_optimizer_step(adam);
            te_scope_end(te);
            REQUIRE_OK(te);
        }
        CHECK_MSG(last < 0.97f * first, "the loss goes from %g to %g", first, last);
        te_optimizer_destroy(adam);
        te_module_destroy(m);
    }
}

/* ---- ranks ---- */

static void cl_rank(rank_state *s) {
    enum { N = 32, ROWS = 8 };
    const bool sequence = *(const bool *)s->arg;
    te_module *m[2];
    te_tensor *whole = te_tensor_normal(s->te, TE_F32, SHAPE(ROWS, N), 0, 1), *y[2];
    const char *name = "layernorm_mlp";
    for (int shared = 0; shared < 2; shared++) {
        te_layernorm_mlp_desc d = {.hidden_size = N, .ffn_hidden_size = 2 * N, .activation = TE_SWIGLU, .gemm.params_dtype = TE_F32};
        if (shared) d.parallel = (te_parallel_options){.tp_group = s->group, .set_parallel_mode = true, .sequence_parallel = sequence};
        te_seed(s->te, 7);
        m[shared] = te_layernorm_mlp_create(s->te, &d);
        EXPECT(s, te_lora_apply(m[shared], &(te_lora_desc){.target_modules = &name, .num_target_modules = 1, .dim = 4}, NULL) == TE_OK);
        for (int fc = 0; fc < 2; fc++) { /* B [out, 4]: fc1's is divided, half by half of its gated rows */
            te_tensor *b = te_tensor_normal(s->te, TE_F32, SHAPE(fc ? N : 4 * N, 4), 0, 0.3f), *to = te_module_parameter(te_module_find(m[shared], fc ? "fc2.lora_B" : "fc1.lora_B"), "weight");
            const int64_t own = 2 * N / s->size;
            for (int half = 0; half < 2 && shared && !fc; half++)
                te_tensor_copy(te_tensor_narrow(to, 0, half * own, own), te_tensor_narrow(b, 0, half * 2 * N + s->rank * own, own));
            if (!shared || fc) te_tensor_copy(to, b);
        }
        te_tensor *x = shared && sequence ? te_tensor_contiguous(te_tensor_narrow(whole, 0, s->rank * ROWS / s->size, ROWS / s->size)) : whole;
        y[shared] = te_forward(m[shared], x);
    }
    te_tensor *want = sequence ? te_tensor_contiguous(te_tensor_narrow(y[0], 0, s->rank * ROWS / s->size, ROWS / s->size)) : y[0];
    for (int merged = 0; merged < 2; merged++) {
        float got[ROWS * N], right[ROWS * N];
        double worst = 0, largest = 0;
        int64_t n = te_tensor_numel(want);
        EXPECT(s, y[1] && te_tensor_numel(y[1]) == n && te_tensor_to_f32(y[1], got) == TE_OK && te_tensor_to_f32(want, right) == TE_OK);
        for (int64_t i = 0; i < n; i++) {
            worst = fmax(worst, fabs((double)got[i] - right[i]));
            largest = fmax(largest, fabs((double)right[i]));
        }
        EXPECT(s, worst < 5e-6 * largest); /* f32 sums in another order, through two products */
        if (merged) break;
        EXPECT(s, te_lora_merge(m[1]) == TE_OK);
        y[1] = te_forward(m[1], sequence ? te_tensor_contiguous(te_tensor_narrow(whole, 0, s->rank * ROWS / s->size, ROWS / s->size)) : whole);
    }
    te_module_destroy(m[0]);
    te_module_destroy(m[1]);
}
TE_TEST(lora_classes_shared_by_ranks) {
    for (int sequence = 0; sequence < 2; sequence++) {
        bool arg = sequence != 0;
        test_case("sequence %d", sequence);
        run_ranks(2, cl_rank, &arg);
    }
}
/* A rank has a part of what modules_to_save and biases train: no file of peft's is made of that. */
static void cl_rank_saves(rank_state *s) {
    const char *const names[] = {"own", "shared"};
    te_module *list[2];
    for (int shared = 0; shared < 2; shared++) {
        te_linear_desc d = {.in_features = 32, .out_features = 32, .name = names[shared]};
        if (shared) d.parallel = (te_parallel_options){.tp_group = s->group, .parallel_mode = TE_PARALLEL_COLUMN};
        list[shared] = te_linear_create(s->te, &d);
    }
    te_module *m = te_sequential_create(s->te, list, 2);
    for (int bias = 0; bias < 2; bias++) {
        te_lora_desc d = {.target_modules = names, .num_target_modules = 1, .modules_to_save = names + 1, .num_modules_to_save = !bias, .bias = bias ? TE_LORA_BIAS_ALL : TE_LORA_BIAS_NONE};
        EXPECT(s, te_lora_apply(m, &d, NULL) == TE_OK && te_lora_save(m, (const char *)s->arg) == TE_ERR_UNSUPPORTED);
        EXPECT(s, strstr(te_error(s->te), "\"shared\" is shared by 2 ranks, and each trains its part of it") != NULL);
        te_clear_error(s->te);
        EXPECT(s, te_lora_remove(m) == TE_OK);
    }
    te_module_destroy(m);
}
TE_TEST(lora_saves_no_part_of_a_rank) { run_ranks(2, cl_rank_saves, test_path("nowhere")); }

/* ---- DoRA ---- */

/* y = g (x W^T + s B A x) + b, g = m / |W + s B A|, and its gradients with |..| taken as constants. */
TE_TEST_DEVICES(lora_dora_formula) {
    enum { IN = 6, OUT = 5, R = 3, ROWS = 4 };
    te = test_exact(te);
    te_module *m = te_linear_create(te, &(te_linear_desc){.in_features = IN, .out_features = OUT, .gemm.params_dtype = TE_F32});
    te_tensor *x = te_tensor_set_requires_grad(test_tensor(te, TE_F32, SHAPE(ROWS, IN), test_normal(ROWS * IN, 1)), true);
    te_tensor_copy(te_module_parameter(m, "bias"), test_tensor(te, TE_F32, SHAPE(OUT), test_normal(OUT, 4)));
    te_tensor_copy(te_module_parameter(m, "weight"), test_tensor(te, TE_F32, SHAPE(OUT, IN), test_normal(OUT * IN, 5)));
    const float *before = test_read(te_forward(m, x));
    CHECK_EQ_INT(te_lora_apply(m, &(te_lora_desc){.match_all_linear = true, .dim = R, .alpha = 6, .use_dora = true}, NULL), TE_OK);
    CHECK_ERROR_BELOW("the first magnitude is the length", test_read(te_forward(m, x)), before, ROWS * OUT, 1e-6);
    te_tensor *a_weight = te_module_parameter(te_module_find(m, "lora_A"), "weight"), *b_weight = te_module_parameter(te_module_find(m, "lora_B"), "weight");
    te_tensor *length = te_module_parameter(te_module_find(m, "lora_magnitude_vector"), "weight");
    te_tensor_copy(b_weight, test_tensor(te, TE_F32, SHAPE(OUT, R), test_normal(OUT * R, 2)));
    te_tensor_copy(length, test_tensor(te, TE_F32, SHAPE(OUT), test_uniform(OUT, 6, 0.5f, 2)));
    const float *w = test_read(te_module_parameter(m, "weight")), *a = test_read(a_weight), *b = test_read(b_weight), *len = test_read(length), *in = test_read(x), *bias = test_read(te_module_parameter(m, "bias"));
    const float *dy = test_normal(ROWS * OUT, 3);
    float *y = test_floats(ROWS * OUT), *da = test_floats(R * IN), *db = test_floats(OUT * R), *dx = test_floats(ROWS * IN), *dm = test_floats(OUT);
    double g[OUT], norm[OUT], v[OUT][IN];
    for (int o = 0; o < OUT; o++) {
        norm[o] = 0;
        for (int i = 0; i < IN; i++) {
            v[o][i] = w[o * IN + i];
            for (int k = 0; k < R; k++) v[o][i] += 2 * (double)b[o * R + k] * a[k * IN + i];
            norm[o] += v[o][i] * v[o][i];
        }
        norm[o] = sqrt(norm[o]);
        g[o] = len[o] / norm[o];
    }
    for (int r = 0; r < ROWS; r++)
        for (int o = 0; o < OUT; o++) {
            double u = 0, dg = dy[r * OUT + o] * g[o];
            for (int i = 0; i < IN; i++) {
                u += v[o][i] * in[r * IN + i];
                dx[r * IN + i] += (float)(v[o][i] * dg);
                for (int k = 0; k < R; k++) {
                    da[k * IN + i] += (float)(2 * b[o * R + k] * dg * in[r * IN + i]);
                    db[o * R + k] += (float)(2 * a[k * IN + i] * dg * in[r * IN + i]);
                }
            }
            y[r * OUT + o] = (float)(g[o] * u + bias[o]);
            dm[o] += (float)(dy[r * OUT + o] * u / norm[o]);
        }
    te_tensor *out = te_forward(m, x);
    te_backward_from(out, test_tensor(te, TE_F32, SHAPE(ROWS, OUT), dy));
    CHECK_ERROR_BELOW("y", test_read(out), y, ROWS * OUT, 2e-6); /* f32 sums of ten numbers, and a square root */
    CHECK_ERROR_BELOW("gradient of A", test_read(te_tensor_grad(a_weight)), da, R * IN, 2e-6);
    CHECK_ERROR_BELOW("gradient of B", test_read(te_tensor_grad(b_weight)), db, OUT * R, 2e-6);
    CHECK_ERROR_BELOW("gradient of the magnitude", test_read(te_tensor_grad(length)), dm, OUT, 2e-6);
    CHECK_ERROR_BELOW("gradient of x", test_read(te_tensor_grad(x)), dx, ROWS * IN, 2e-6);
    CHECK(!te_tensor_grad(te_module_parameter(m, "weight")) && !te_tensor_grad(te_module_parameter(m, "bias")));
    CHECK_OK(te);
    /* a file, and merging: y is the same */
    CHECK_EQ_INT(te_lora_save(m, test_path("dora")), TE_OK);
    te_module *other = te_linear_create(te, &(te_linear_desc){.in_features = IN, .out_features = OUT, .gemm.params_dtype = TE_F32});
    te_tensor_copy(te_module_parameter(other, "bias"), te_module_parameter(m, "bias"));
    te_tensor_copy(te_module_parameter(other, "weight"), te_module_parameter(m, "weight"));
    CHECK_EQ_INT(te_lora_load(other, test_path("dora")), TE_OK);
    CHECK_BYTES("loaded", test_read(te_forward(other, x)), test_read(te_forward(m, x)), ROWS * OUT * sizeof(float));
    CHECK_EQ_INT(te_lora_merge(m), TE_OK);
    CHECK_ERROR_BELOW("merged", test_read(te_forward(m, x)), y, ROWS * OUT, 2e-6);
    CHECK_OK(te);
    te_module_destroy(other);
    te_module_destroy(m);
}
static te_tensor *cl_dora_call(te_ctx *te, te_tensor *const *inputs, void *user) {
    te_rng_set(te, 5, 0);
    return te_forward((te_module *)user, inputs[0]);
}
/* Dropout of both kinds against differences, in x and in the magnitude: with the one in front of lora_A x goes two ways. */
TE_TEST_DEVICES(lora_dora_dropout) {
    te = test_exact(te);
    for (int pre = 0; pre < 2; pre++) {
        test_case("%s", pre ? "pre" : "post");
        te_module *m = cl_create(te, CL_LINEAR, TE_F32);
        CHECK_EQ_INT(te_lora_apply(m, &(te_lora_desc){.match_all_linear = true, .dim = CL_R, .use_dora = true, .dropout = 0.5f, .dropout_position = (te_dropout_position)pre}, NULL), TE_OK);
        cl_fill(m);
        te_tensor *x[] = {cl_input(te, CL_LINEAR, TE_F32), te_module_parameter(te_module_find(m, "lora_magnitude_vector"), "weight")};
        te_tensor_fill(x[1], 1.5);
        test_check_gradients(te, cl_dora_call, 2, x, m, 1e-2, 2e-3);
        const float *drawn = test_read(cl_dora_call(te, x, m));
        te_module_train(m, false);
        const float *whole = test_read(te_forward(m, x[0]));
        CHECK(memcmp(drawn, whole, CL_ROWS * CL_OUT * sizeof(float)) != 0);
        te_lora_merge(m);
        CHECK_ERROR_BELOW("merged", test_read(te_forward(m, x[0])), whole, CL_ROWS * CL_OUT, 2e-6);
        CHECK_OK(te);
        te_module_destroy(m);
    }
}
/* Trained under recipes, on stored weights, without memory at first; a Linear of zeros; in a graph. */
TE_TEST_DEVICES(lora_dora_elsewhere) {
    te_recipe recipe = te_recipe_current_scaling();
    for (int way = 0; way < 3; way++) {
        test_case("%d", way);
        if (way == 1) te_quantized_model_init_begin(te, &(te_quantized_model_init_desc){.recipe = &recipe});
        te_module *m = te_linear_create(te, &(te_linear_desc){.in_features = CL_IN, .out_features = CL_OUT, .gemm.init.std = 0.2f, .gemm.device = way == 2 ? TE_PARAMS_META : TE_PARAMS_DEFAULT});
        if (way == 1) te_quantized_model_init_end(te);
        te_tensor *x = cl_input(te, CL_LINEAR, TE_BF16);
        CHECK_EQ_INT(te_lora_apply(m, &(te_lora_desc){.match_all_linear = true, .dim = 16, .alpha = 16, .use_dora = true}, NULL), TE_OK);
        if (way == 2) CHECK_EQ_INT(te_module_reset_parameters(m), TE_OK);
        te_optimizer *adam = te_fused_adam_create(te, m, &(te_fused_adam_desc){.lr = 1e-2f});
        float first = 0, last = 0;
        for (int step = 0; step < 6; step++) {
            te_scope_begin(te);
            te_tensor *y = cl_run(m, CL_LINEAR, x, &recipe), *loss = te_mse_loss(y, te_tensor_full(te, TE_BF16, SHAPE(CL_ROWS, CL_OUT), 0.5));
            last = (float)te_tensor_item(loss);
            if (step == 0) first = last;
            te_backward(loss);
            te_optimizer_step(adam);
            te_scope_end(te);
            REQUIRE_OK(te);
        }
        CHECK_MSG(last < 0.97f * first, "the loss goes from %g to %g", first, last);
        te_optimizer_destroy(adam);
        const float *adapted = test_read(te_forward(m, x));
        CHECK_EQ_INT(te_lora_merge(m), TE_OK);
        CHECK_ERROR_BELOW("merged", test_read(te_forward(m, x)), adapted, CL_ROWS * CL_OUT, way == 1 ? 0.06 : 1e-2); /* a weight rounded to 8 bits, stored ones to 4 */
        CHECK_OK(te);
        te_module_destroy(m);
    }
    te_module *m = cl_create(te, CL_LINEAR, TE_F32);
    te_tensor_fill(te_module_parameter(m, "weight"), 0);
    CHECK_EQ_INT(te_lora_apply(m, &(te_lora_desc){.match_all_linear = true, .use_dora = true}, NULL), TE_OK);
    const float *y = test_read(te_forward(m, cl_input(te, CL_LINEAR, TE_F32))); /* rows of length 0 */
    for (int i = 0; i < CL_ROWS * CL_OUT; i++) CHECK(y[i] == 0);
    CHECK(te_tensor_numel(te_forward(m, te_tensor_zeros(te, TE_F32, SHAPE(0, CL_IN)))) == 0);
    CHECK_OK(te);
    te_module_destroy(m);
}
