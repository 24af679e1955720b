/* Modules: each against plain arithmetic in double, gradients by differences; FP8 against the high-precision module; the tree. */
#include "../te_test.h"

static te_tensor *set_parameter(te_module *m, const char *name, const float *values) {
    te_tensor *p = te_module_parameter(m, name);
    if (!p) {
        test_fail(__FILE__, __LINE__, "no parameter %s", name);
        return NULL;
    }
    te_tensor_copy(p, test_tensor(te_tensor_ctx(p), TE_F32, te_tensor_ndim(p), te_tensor_shape(p), values));
    return p;
}

static void linear_reference(const float *x, const float *w, const float *b, int m, int n, int k, float *y) {
    for (int i = 0; i < m; i++)
        for (int j = 0; j < n; j++) {
            double s = b ? b[j] : 0;
            for (int l = 0; l < k; l++) s += (double)x[i * k + l] * w[j * k + l];
            y[i * n + j] = (float)s;
        }
}

static te_tensor *run_module(te_ctx *te, te_tensor *const *inputs, void *module) {
    (void)te;
    return te_forward((te_module *)module, inputs[0]);
}
static bool collect(void *user, te_module *m, const char *path, te_tensor *x, te_entry_kind kind) {
    te_tensor ***at = (te_tensor ***)user;
    (void)m, (void)path;
    if (kind == TE_ENTRY_PARAMETER) *(*at)++ = x;
    return true;
}
/* On the CPU: gradients of the input and of every parameter against central differences. On a GPU, whose f32 products are TF32 and
 * whose differences are therefore noise: output and gradients against the same module on the CPU. `run` is the function, `make` builds
 * the module from a freshly seeded context. */
typedef te_module *(*make_fn)(te_ctx *te, void *arg);

static void run_once(te_ctx *te, make_fn make, void *arg, test_function run, te_dtype dtype, int ndim, const int64_t *shape, float **out, int64_t *sizes) {
    te_tensor *inputs[32], **end = inputs + 1, *y;
    te_seed(te, 11);
    te_module *m = make(te, arg);
    REQUIRE_OK(te);
    inputs[0] = te_tensor_set_requires_grad(test_tensor(te, dtype, ndim, shape, test_normal(test_numel(ndim, shape), 7)), true);
    te_module_visit_tensors(m, collect, &end);
    y = run(te, inputs, m);
    REQUIRE_OK(te);
    te_backward_from(y, test_tensor(te, dtype, te_tensor_ndim(y), te_tensor_shape(y), test_normal(te_tensor_numel(y), 8)));
    REQUIRE_OK(te);
    out[0] = test_read(y);
    sizes[0] = te_tensor_numel(y);
    for (int i = 0; i < end - inputs; i++) {
        out[i + 1] = test_read(te_tensor_grad(inputs[i]));
        sizes[i + 1] = te_tensor_numel(inputs[i]);
    }
    sizes[end - inputs + 1] = -1;
    te_module_destroy(m);
}

static void check_module(te_ctx *te, make_fn make, void *arg, test_function run, int ndim, const int64_t *shape) {
    if (!te_ctx_is_cuda(te)) {
        te_tensor *inputs[32], **end = inputs + 1;
        te_seed(te, 11);
        te_module *m = make(te, arg);
        REQUIRE_OK(te);
        inputs[0] = test_tensor(te, TE_F32, ndim, shape, test_normal(test_numel(ndim, shape), 7));
        te_module_visit_tensors(m, collect, &end);
        test_check_gradients(te, run, (int)(end - inputs), inputs, m, 2e-2, 5e-3); /* what differences in f32 are good for */
        te_module_destroy(m);
        return;
    }
    float *got[40], *want[40];
    int64_t sizes[40];
    memset(sizes, 0xff, sizeof sizes);
    te_ctx *cpu = test_context("cpu");
    run_once(te, make, arg, run, TE_F32, ndim, shape, got, sizes);
    run_once(cpu, make, arg, run, TE_F32, ndim, shape, want, sizes);
    /* TF32 rounds each operand by 2^-11; a few products in a row, forward and backward */
    for (int i = 0; sizes[i] >= 0; i++) CHECK_ERROR_BELOW(i ? "gradient" : "output", got[i], want[i], sizes[i], 4e-3);
}

static te_module *make_linear(te_ctx *te, void *desc) { return te_linear_create(te, (const te_linear_desc *)desc); }
TE_TEST_DEVICES(linear_forward_and_gradients) {
    te_linear_desc d = {0};
    d.in_features = 24;
    d.out_features = 17;
    d.gemm.params_dtype = TE_F32;
    te_module *m = te_linear_create(te, &d);
    REQUIRE_OK(te);
    float *w = test_normal(17 * 24, 1), *b = test_normal(17, 2), *x = test_normal(10 * 24, 3), want[170];
    set_parameter(m, "weight", w);
    set_parameter(m, "bias", b);
    te_tensor *in = test_tensor(te, TE_F32, SHAPE(5, 2, 24), x);
    linear_reference(x, w, b, 10, 17, 24, want);
    te_tensor *y = te_forward(m, in);
    REQUIRE_OK(te);
    CHECK_TENSOR(y, want, 1e-3, 2e-2); /* TF32 operands on the GPU: 2^-11 of each of 24 products of size 1 */
    te_module_destroy(m);
    check_module(te, make_linear, &d, run_module, SHAPE(5, 2, 24));
}

/* Two products with 3 % codes each: relative error of the sums stays below 6 %, usually 3 %. */
TE_TEST_DEVICES(linear_fp8_is_close_and_any_shape_works) {
    static const int sizes[][3] = {{1, 1, 1}, {3, 5, 7}, {16, 32, 64}, {33, 17, 129}, {128, 96, 200}};
    for (int i = 0; i < COUNT(sizes); i++)
        for (int kind = 0; kind < 2; kind++) {
            int m = sizes[i][0], n = sizes[i][1], k = sizes[i][2];
            test_case("m=%d n=%d k=%d recipe %d", m, n, k, kind);
            te_linear_desc d = {0};
            d.in_features = k;
            d.out_features = n;
            te_module *lin = te_linear_create(te, &d);
            REQUIRE_OK(te);
            te_tensor *x = te_tensor_set_requires_grad(test_tensor(te, TE_BF16, SHAPE(m, k), test_normal(m * k, 4)), true);
            te_tensor *dy = test_tensor(te, TE_BF16, SHAPE(m, n), test_normal(m * n, 5));
            te_tensor *w = te_module_parameter(lin, "weight");
            te_tensor *y0 = te_forward(lin, x);
            te_backward_from(y0, dy);
            float *dx0 = test_read(te_tensor_grad(x)), *dw0 = test_read(te_tensor_grad(w));
            te_recipe r = kind ? te_recipe_current_scaling() : te_recipe_delayed_scaling();
            if (!kind) r.delayed.amax_history_len = 4;
            te_tensor *y1 = NULL;
            for (int step = 0; step < 2; step++) { /* delayed scales are good from the second step on */
                te_tensor_zero_grad(x);
                te_tensor_zero_grad(w);
                y1 = test_forward(lin, &r, x);
                te_backward_from(y1, dy);
            }
            REQUIRE_OK(te);
            CHECK_ERROR_BELOW("y", test_read(y1), test_read(y0), m * n, 0.08);
            CHECK_ERROR_BELOW("dx", test_read(te_tensor_grad(x)), dx0, m * k, 0.12); /* E5M2 gradients: 6 % codes */
            CHECK_ERROR_BELOW("dw", test_read(te_tensor_grad(w)), dw0, n * k, 0.12);
            te_module_destroy(lin);
        }
}

static te_module *make_mlp(te_ctx *te, void *desc) { return te_layernorm_mlp_create(te, (const te_layernorm_mlp_desc *)desc); }
TE_TEST_DEVICES(layernorm_linear_and_mlp_gradients) {
    for (int rms = 0; rms < 2; rms++)
        for (int act = 0; act < 3; act++) {
            test_case("rms=%d act=%d", rms, act);
            te_layernorm_mlp_desc d = {0};
            d.hidden_size = 16;
            d.ffn_hidden_size = 24;
            d.norm.normalization = rms ? TE_RMSNORM : TE_LAYERNORM;
            d.activation = act == 0 ? TE_GELU : act == 1 ? TE_SWIGLU : TE_GEGLU;
            d.gemm.init.std = d.output_layer_init.std = 0.3f;
            d.gemm.params_dtype = TE_F32;
            check_module(te, make_mlp, &d, run_module, SHAPE(6, 16));
        }
    te_layernorm_linear_desc d = {0};
    d.in_features = 16;
    d.out_features = 9;
    d.gemm.init.std = 0.3f;
    d.gemm.params_dtype = TE_F32;
    d.return_layernorm_output = d.gemm.return_bias = true;
    te_module *m = te_layernorm_linear_create(te, &d);
    te_forward_args a = {0};
    a.input = test_tensor(te, TE_F32, SHAPE(6, 16), test_normal(96, 6));
    CHECK(te_forward_with(m, &a) != NULL);
    CHECK(a.outputs.bias && a.outputs.ln_out && !a.outputs.max_logit);
    CHECK(a.outputs.bias == te_module_parameter(m, "bias"));
    CHECK_EQ_INT(te_tensor_shape(a.outputs.ln_out)[1], 16);
    te_module_destroy(m);
}

static te_module *small_layer(te_ctx *te, te_dtype dtype, int variant) {
    te_transformer_layer_desc d = {0};
    d.hidden_size = 32;
    d.ffn_hidden_size = 48;
    d.attention.num_attention_heads = 4;
    d.attention.num_gqa_groups = variant == 0 ? 2 : 4;
    d.norm.normalization = variant == 0 ? TE_RMSNORM : TE_LAYERNORM;
    d.activation = variant == 0 ? TE_SWIGLU : TE_GELU;
    d.gemm.no_bias = variant == 0;
    d.parallel_attention_mlp = variant == 2;
    d.apply_residual_connection_post_layernorm = variant == 3;
    d.output_layernorm = variant == 4;
    d.attention.qkv_format = variant == 1 ? TE_BSHD : TE_SBHD;
    d.attention.no_qkv_weight_interleaved = variant == 1;
    d.gemm.init.std = d.output_layer_init.std = 0.15f;
    d.gemm.params_dtype = dtype;
    return te_transformer_layer_create(te, &d);
}

static te_module *make_layer(te_ctx *te, void *variant) { return small_layer(te, TE_F32, *(int *)variant); }
TE_TEST_DEVICES(transformer_layer_gradients) {
    for (int variant = 0; variant < 5; variant++) {
        test_case("variant %d", variant);
        check_module(te, make_layer, &variant, run_module, SHAPE(5, 2, 32));
    }
}

static te_tensor *run_with_rope(te_ctx *te, te_tensor *const *inputs, void *module) {
    te_rotary_desc rope = {0};
    te_forward_args a = {0};
    (void)te;
    a.input = inputs[0];
    a.rotary = &rope;
    return te_forward_with((te_module *)module, &a);
}
TE_TEST_DEVICES(transformer_layer_with_rope_is_causal) {
    int variant = 0;
    check_module(te, make_layer, &variant, run_with_rope, SHAPE(8, 1, 32));
    te_module *m = small_layer(te, TE_F32, 0);
    float *v = test_normal(8 * 32, 8);
    te_tensor *x = test_tensor(te, TE_F32, SHAPE(8, 1, 32), v);
    float *before = test_read(run_with_rope(te, &x, m));
    v[7 * 32] += 1; /* the last token cannot change what comes before it */
    x = test_tensor(te, TE_F32, SHAPE(8, 1, 32), v);
    CHECK_BYTES("earlier tokens", test_read(run_with_rope(te, &x, m)), before, 7 * 32 * sizeof(float));
    te_module_destroy(m);
}

/* The same program gives the same bits again. */
TE_TEST_DEVICES(transformer_layer_is_reproducible) {
    float *first = NULL;
    for (int again = 0; again < 2; again++) {
        te_seed(te, 5);
        te_module *m = small_layer(te, TE_BF16, 0);
        te_recipe r = te_recipe_current_scaling();
        te_tensor *x = te_tensor_set_requires_grad(test_tensor(te, TE_BF16, SHAPE(33, 3, 32), test_normal(33 * 3 * 32, 9)), true);
        te_tensor *y = test_forward(m, &r, x);
        te_backward(te_mean_all(te_activate(y, TE_GELU, NULL)));
        REQUIRE_OK(te);
        float *g = test_read(te_tensor_grad(te_module_parameter(te_module_find(m, "self_attention.layernorm_qkv"), "weight")));
        if (again) CHECK_BYTES("gradient", g, first, 64 * 32 * sizeof(float));
        first = g;
        te_module_destroy(m);
    }
}

TE_TEST_DEVICES(weight_cache_keeps_and_never_goes_stale) {
    te_linear_desc d = {0};
    d.in_features = d.out_features = 32;
    d.gemm.no_bias = true;
    te_module *m = te_linear_create(te, &d);
    te_recipe r = te_recipe_current_scaling();
    te_autocast_desc a = {0};
    a.recipe = &r;
    te_forward_args f = {0};
    f.input = test_tensor(te, TE_BF16, SHAPE(4, 32), test_normal(128, 3));
    te_autocast_begin(te, &a);
    f.is_first_microbatch = TE_MICROBATCH_FIRST;
    float *y0 = test_read(te_forward_with(m, &f));
    f.is_first_microbatch = TE_MICROBATCH_LATER;
    CHECK_BYTES("cached", test_read(te_forward_with(m, &f)), y0, 128 * sizeof(float));
    te_tensor *w = te_module_parameter(m, "weight");
    te_tensor_fill(w, 0); /* a write through te.h makes the copy stale */
    float *y1 = test_read(te_forward_with(m, &f));
    CHECK(y1[0] == 0 && y1[127] == 0);
    te_autocast_end(te);
    CHECK_OK(te);
    te_module_destroy(m);
}

TE_TEST_DEVICES(main_grad_gathers_weight_gradients) {
    te_linear_desc d = {0};
    d.in_features = 16;
    d.out_features = 8;
    d.gemm.fuse_wgrad_accumulation = true;
    te_module *m = te_linear_create(te, &d);
    te_tensor *w = te_module_parameter(m, "weight"), *main_grad = te_tensor_full(te, TE_F32, SHAPE(8, 16), 1);
    CHECK_EQ_INT(te_tensor_set_main_grad(w, main_grad), TE_OK);
    te_tensor *x = test_tensor(te, TE_BF16, SHAPE(4, 16), test_normal(64, 3)), *ones = te_tensor_full(te, TE_BF16, SHAPE(4, 8), 1);
    const float *xv = test_read(x);
    float want[128];
    for (int i = 0; i < 128; i++) want[i] = 1 + 2 * (xv[i % 16] + xv[16 + i % 16] + xv[32 + i % 16] + xv[48 + i % 16]);
    te_backward_from(te_forward(m, x), ones);
    te_backward_from(te_forward(m, x), ones);
    CHECK_TENSOR(main_grad, want, 1e-5, 1e-5); /* sums of eight exact products in f32 */
    CHECK(te_tensor_grad(w) == NULL);
    te_forward_args f = {0};
    f.input = x;
    f.is_first_microbatch = TE_MICROBATCH_FIRST; /* overwrites */
    te_backward_from(te_forward_with(m, &f), ones);
    for (int i = 0; i < 128; i++) want[i] = (want[i] - 1) / 2;
    CHECK_TENSOR(main_grad, want, 1e-5, 1e-5);
    CHECK_OK(te);
    te_module_destroy(m);
}

/* ---- the tree ---- */

static te_result twice_forward(te_module *self, te_forward_args *args) {
    te_tensor *y = te_forward(te_module_child(self, 0), args->input);
    args->outputs.out = te_add(y, y);
    return args->outputs.out ? TE_OK : te_error_code(te_module_ctx(self));
}
static te_result zero_forward(te_module *self, te_forward_args *args) {
    (void)self;
    args->outputs.out = te_scale(args->input, 0);
    return TE_OK;
}

TE_TEST(modules_of_ones_own_and_the_tree) {
    te_ctx *te = test_context("cpu");
    static const te_module_class twice = {"Twice", 0, twice_forward, NULL, NULL};
    te_linear_desc d = {0};
    d.in_features = 4;
    d.out_features = 4;
    d.gemm.params_dtype = TE_F32;
    te_module *root = te_module_create(te, &twice, "root"), *lin = te_module_add_child(root, "lin", te_linear_create(te, &d));
    REQUIRE_OK(te);
    char text[512];
    CHECK(te_module_find(root, "lin") == lin && te_module_parent(lin) == root && !te_module_find(root, "lin.x"));
    CHECK_STR(te_module_path(lin, text, sizeof text), "lin");
    CHECK_EQ_INT(te_module_num_parameters(root), 20);
    CHECK(te_module_print(root, text, sizeof text) == strlen(text));
    CHECK_STR(text, "lin: Linear");
    CHECK_STR(text, "weight f32 [4, 4]");
    CHECK(te_module_print(root, text, 5) > 5 && strlen(text) == 4);
    te_tensor *x = te_tensor_full(te, TE_F32, SHAPE(2, 4), 1);
    float *once = test_read(te_forward(lin, x)), *y = test_read(te_forward(root, x));
    CHECK(y[3] == 2 * once[3]);
    te_module_forward_fn before = te_module_set_forward(lin, zero_forward);
    CHECK(before == NULL);
    CHECK(test_read(te_forward(root, x))[3] == 0);
    CHECK(te_module_set_forward(lin, NULL) == zero_forward);
    CHECK(test_read(te_forward(root, x))[3] == y[3]);
    te_module *again = te_module_create(te, &twice, "again");
    CHECK(!te_module_add_child(root, "lin", again));
    te_module_destroy(again);
    CHECK_ERROR(te, TE_ERR_INVALID, "named \"lin\" already");
    CHECK(!te_module_add_child(lin, "up", root));
    CHECK_ERROR(te, TE_ERR_INVALID, "above it");
    te_forward(root, te_tensor_zeros(te, TE_F32, SHAPE(2, 5)));
    CHECK_ERROR(te, TE_ERR_SHAPE, "lin: linear: the input is [2, 5] and the weight [4, 4]");
    te_forward(root, te_tensor_zeros(te, TE_BF16, SHAPE(2, 4)));
    CHECK_ERROR(te, TE_ERR_DTYPE, "bf16");
    te_module_destroy(root);
}

TE_TEST(dropout_is_off_in_evaluation) {
    te_ctx *te = test_context("cpu");
    te_transformer_layer_desc d = {0};
    d.hidden_size = 16;
    d.ffn_hidden_size = 16;
    d.attention.num_attention_heads = 2;
    d.hidden_dropout = d.attention.attention_dropout = 0.5f;
    te_module *m = te_transformer_layer_create(te, &d);
    te_tensor *x = test_tensor(te, TE_BF16, SHAPE(4, 1, 16), test_normal(64, 1));
    float *a = test_read(te_forward(m, x)), *b = test_read(te_forward(m, x));
    CHECK(memcmp(a, b, 64 * sizeof(float)) != 0);
    te_module_train(m, false);
    a = test_read(te_forward(m, x)), b = test_read(te_forward(m, x));
    CHECK_BYTES("evaluation", a, b, 64 * sizeof(float));
    CHECK_OK(te);
    te_module_destroy(m);
}

/* ---- a recipe of a subtree's own ---- */

static float *under(te_ctx *te, te_module *m, te_tensor *x, const te_recipe *r) {
    te_autocast_desc cast = {.recipe = r};
    if (r) te_autocast_begin(te, &cast);
    te_tensor *y = te_forward(m, x);
    if (r) te_autocast_end(te);
    te_backward_from(y, x);
    CHECK_OK(te);
    float *both = test_floats(2 * te_tensor_numel(x));
    te_tensor_to_f32(y, both);
    te_tensor_to_f32(te_tensor_grad(x), both + te_tensor_numel(x));
    te_tensor_zero_grad(x);
    te_module_zero_grad(m);
    return both;
}
TE_TEST_DEVICES(recipes_of_subtrees) {
    enum { N = 32 * 64 };
    te_recipe mxfp8 = te_recipe_mxfp8(), current = te_recipe_current_scaling(), bad = te_recipe_current_scaling();
    te_linear_desc d = {.in_features = 64, .out_features = 64};
    te_module *one = te_linear_create(te, &d), *two = te_linear_create(te, &d), *m = te_sequential_create(te, (te_module *[]){one, two}, 2);
    te_tensor *x = te_tensor_set_requires_grad(test_tensor(te, TE_BF16, SHAPE(32, 64), test_normal(N, 1)), true);
    float *plain = under(te, m, x, NULL), *all_mxfp8 = under(te, m, x, &mxfp8), *all_current = under(te, m, x, &current);
    CHECK(memcmp(plain, all_mxfp8, 2 * N * 4) && memcmp(all_mxfp8, all_current, 2 * N * 4));
    CHECK(te_module_set_recipe(m, &mxfp8, false) == TE_OK);
    CHECK_BYTES("another recipe", under(te, m, x, &current), all_mxfp8, 2 * N * 4);
    CHECK_BYTES("outside of autocast", under(te, m, x, NULL), plain, 2 * N * 4);
    CHECK(te_module_set_recipe(m, NULL, true) == TE_OK);
    CHECK_BYTES("off", under(te, m, x, &current), plain, 2 * N * 4);
    CHECK(te_module_set_recipe(one, &current, false) == TE_OK && te_module_set_recipe(two, &current, false) == TE_OK);
    CHECK_BYTES("the nearest counts", under(te, m, x, &mxfp8), all_current, 2 * N * 4);
    CHECK(te_module_set_recipe(two, NULL, false) == TE_OK);
    float *mixed = under(te, m, x, &mxfp8);
    CHECK(memcmp(mixed, all_current, 2 * N * 4) && memcmp(mixed, plain, 2 * N * 4));
    te_module_set_recipe(one, NULL, false), te_module_set_recipe(m, NULL, false);
    CHECK_BYTES("taken away", under(te, m, x, &current), all_current, 2 * N * 4);
    te_module_set_recipe(m, &current, true);
    CHECK_ERROR(te, TE_ERR_INVALID, "a recipe (current) and off");
    bad.amax_epsilon = -1;
    te_module_set_recipe(m, &bad, false);
    CHECK_ERROR(te, TE_ERR_INVALID, "amax_epsilon -1");
    te_module_destroy(m);
}

static int attributes_gone;
static void count_attribute(void *value) { attributes_gone += *(int *)value; }
TE_TEST_DEVICES(attributes_stay_with_their_module) {
    int one = 1, ten = 10;
    void *value = &one;
    te_module *m = te_linear_create(te, &(te_linear_desc){.in_features = 2, .out_features = 2});
    attributes_gone = 0;
    CHECK(!te_module_attribute(m, "note", &value) && !value);
    CHECK(te_module_set_attribute(m, "note", &one, count_attribute) == TE_OK && te_module_set_attribute(m, "nothing", NULL, NULL) == TE_OK);
    CHECK(te_module_attribute(m, "nothing", &value) && !value);
    CHECK(te_module_attribute(m, "note", &value) && value == &one);
    te_module_set_attribute(m, "note", &one, count_attribute); /* itself: nothing goes */
    CHECK_EQ_INT(attributes_gone, 0);
    te_module_set_attribute(m, "note", &ten, count_attribute);
    CHECK_EQ_INT(attributes_gone, 1);
    te_module_remove_attribute(m, "note");
    te_module_remove_attribute(m, "note");
    CHECK(attributes_gone == 11 && !te_module_attribute(m, "note", NULL) && te_module_attribute(m, "nothing", NULL));
    te_module_set_attribute(m, "last", &ten, count_attribute);
    te_module_destroy(m);
    CHECK_EQ_INT(attributes_gone, 21);
}
TE_TEST_DEVICES(buffers_that_are_not_saved) {
    const char *path = test_path("buffers.safetensors");
    te_module *m = te_linear_create(te, &(te_linear_desc){.in_features = 2, .out_features = 2});
    te_safetensors *file;
    te_tensor *kept = te_module_add_buffer(m, "kept", te_tensor_full(te, TE_F32, SHAPE(3), 1)), *not_kept = te_module_add_buffer(m, "not_kept", te_tensor_full(te, TE_F32, SHAPE(3), 2));
    CHECK(te_module_set_buffer_persistent(m, "not_kept", false) == TE_OK);
    CHECK(te_model_save(te, path, m, NULL, NULL, 0) == TE_OK);
    te_tensor_fill(kept, 5), te_tensor_fill(not_kept, 6);
    CHECK(te_model_load(te, path, m, NULL) == TE_OK);
    CHECK(te_tensor_item(te_tensor_narrow(kept, 0, 0, 1)) == 1 && te_tensor_item(te_tensor_narrow(not_kept, 0, 0, 1)) == 6);
    file = te_safetensors_open(te, path);
    CHECK(file && te_safetensors_find(file, "kept") && !te_safetensors_find(file, "not_kept"));
    te_safetensors_close(file);
    /* A file from before has an entry for it, of any size; no warning tells of that. */
    te_module_set_buffer_persistent(m, "kept", false);
    CHECK(te_module_add_buffer(m, "kept", te_tensor_full(te, TE_F32, SHAPE(7), 8)) && te_model_load(te, path, m, NULL) == TE_OK);
    CHECK(te_tensor_item(te_tensor_narrow(te_module_parameter(m, "kept"), 0, 0, 1)) == 8);
    CHECK_MSG(!strstr(test_log_text(), "ignored"), "%s", test_log_text());
    te_module_set_buffer_persistent(m, "weight", false);
    CHECK_ERROR(te, TE_ERR_INVALID, "weight\": that is a parameter");
    CHECK(!te_tensor_is_sharded(kept) && !te_tensor_is_sharded(NULL));
    te_tensor_set_sharded(kept, true);
    CHECK(te_tensor_is_sharded(kept));
    te_module_destroy(m);
}
