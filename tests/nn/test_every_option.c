/* tests/nn/test_every_option.c: options that no other test of modules sets. Each is compared with the same computation written without the option.
 * docs/transformer_engine.md names the test of every option. */
#include "../te_test.h"

enum { H = 16, FFN = 24, S = 5, B = 2, HEADS = 4, D = H / HEADS, N = S * B * H, MOST = 32 };

/* ---- modules side by side ---- */

typedef struct list {
    te_tensor *x[MOST];
    char path[MOST][96];
    int n;
} list;
static bool collect(void *user, te_module *m, const char *path, te_tensor *x, te_entry_kind kind) {
    list *l = (list *)user;
    (void)m;
    if (kind == TE_ENTRY_PARAMETER && l->n < MOST) {
        snprintf(l->path[l->n], sizeof l->path[0], "%s", path);
        l->x[l->n++] = x;
    }
    return true;
}
static list parameters_of(te_module *m) {
    list l = {.n = 0};
    te_module_visit_tensors(m, collect, &l);
    return l;
}
/* Multiples of 1/64 below 1 in magnitude: 1 can be added to them without rounding. */
static void fill_parameters(te_module *m) {
    list l = parameters_of(m);
    for (int i = 0; i < l.n; i++) {
        int64_t n = te_tensor_numel(l.x[i]);
        float *values = test_uniform(n, 50 + (uint64_t)i, -0.8f, 0.8f);
        for (int64_t k = 0; k < n; k++) values[k] = floorf(values[k] * 64) / 64;
        te_tensor_copy_from_host(l.x[i], values);
    }
}
static void copy_parameters(te_module *to, te_module *from) {
    list a = parameters_of(to), b = parameters_of(from);
    CHECK_EQ_INT(a.n, b.n);
    for (int i = 0; i < a.n && i < b.n; i++) te_tensor_copy(a.x[i], b.x[i]);
}

typedef struct passes {
    float *y, *dx;
} passes;
static passes run(te_module *m, te_forward_args args, const float *values) {
    te_ctx *te = te_module_ctx(m);
    passes p;
    args.input = te_tensor_set_requires_grad(test_tensor(te, TE_F32, SHAPE(S, B, H), values), true);
    te_tensor *y = te_forward_with(m, &args);
    p.y = test_read(y);
    te_backward_from(y, te_tensor_from_f32(te, te_tensor_dtype(y), te_tensor_ndim(y), te_tensor_shape(y), test_normal(te_tensor_numel(y), 9)));
    p.dx = test_read(te_tensor_grad(args.input));
    te_module_zero_grad(m);
    return p;
}
static void check_same(const char *name, passes got, passes want) {
    test_case("%s", name);
    CHECK_BYTES("output", got.y, want.y, N * sizeof(float));
    CHECK_BYTES("input gradient", got.dx, want.dx, N * sizeof(float));
}
static void check_differ(const char *name, passes a, passes b) {
    test_case("%s", name);
    CHECK(memcmp(a.y, b.y, N * sizeof(float)) != 0);
}

enum { LAYERNORM, RMSNORM, NORM_LINEAR, NORM_MLP, MHA, LAYER, KINDS };
static const char *const kind_names[KINDS] = {"LayerNorm", "RMSNorm", "LayerNormLinear", "LayerNormMLP", "MultiheadAttention", "TransformerLayer"};
static te_module *make(te_ctx *te, int kind, const te_norm_options *norm, const te_gemm_options *gemm) {
    te_norm_desc n = {.hidden_size = H, .norm = *norm, .params_dtype = TE_F32};
    te_layernorm_linear_desc l = {.in_features = H, .out_features = H, .norm = *norm, .gemm = *gemm};
    te_layernorm_mlp_desc p = {.hidden_size = H, .ffn_hidden_size = FFN, .norm = *norm, .gemm = *gemm};
    te_multihead_attention_desc a = {.hidden_size = H, .attention.num_attention_heads = HEADS, .norm = *norm, .gemm = *gemm, .input_layernorm = true};
    te_transformer_layer_desc t = {.hidden_size = H, .ffn_hidden_size = FFN, .attention.num_attention_heads = HEADS, .norm = *norm, .gemm = *gemm};
    switch (kind) {
    case LAYERNORM: return te_layernorm_create(te, &n);
    case RMSNORM: return te_rmsnorm_create(te, &n);
    case NORM_LINEAR: return te_layernorm_linear_create(te, &l);
    case NORM_MLP: return te_layernorm_mlp_create(te, &p);
    case MHA: return te_multihead_attention_create(te, &a);
    default: return te_transformer_layer_create(te, &t);
    }
}

/* ---- norms ---- */

/* A module whose norms multiply by 1 + weight, against one whose weights are greater by 1. */
TE_TEST_DEVICES(every_option_zero_centered_gamma) {
    const te_gemm_options gemm = {.params_dtype = TE_F32};
    const float *x = test_normal(N, 1);
    for (int kind = 0; kind < KINDS; kind++)
        for (int rms = 0; rms < (kind <= RMSNORM ? 1 : 2); rms++) {
            te_norm_options norm = {.normalization = rms ? TE_RMSNORM : TE_NORM_DEFAULT};
            te_module *plain = make(te, kind, &norm, &gemm);
            norm.zero_centered_gamma = true;
            te_module *centered = make(te, kind, &norm, &gemm);
            REQUIRE_OK(te);
            list first = parameters_of(centered);
            for (int i = 0; i < first.n; i++)
                if (strstr(first.path[i], kind <= RMSNORM ? "weight" : "layer_norm_weight")) CHECK(test_read(first.x[i])[0] == 0); /* it begins at the identity */
            fill_parameters(centered);
            copy_parameters(plain, centered);
            passes want = run(centered, (te_forward_args){0}, x);
            check_differ(kind_names[kind], want, run(plain, (te_forward_args){0}, x));
            list l = parameters_of(plain);
            int norms = 0;
            for (int i = 0; i < l.n; i++) {
                if (!strstr(l.path[i], kind <= RMSNORM ? "weight" : "layer_norm_weight")) continue;
                norms++;
                float *w = test_read(l.x[i]);
                for (int64_t k = 0; k < te_tensor_numel(l.x[i]); k++) w[k] += 1;
                te_tensor_copy_from_host(l.x[i], w);
            }
            CHECK_EQ_INT(norms, kind == LAYER ? 2 : 1);
            check_same(kind_names[kind], run(plain, (te_forward_args){0}, x), want);
            te_module_destroy(plain);
            te_module_destroy(centered);
        }
}

TE_TEST_DEVICES(every_option_norm_eps_and_marks) {
    const float *values = test_normal(N, 2);
    for (int rms = 0; rms < 2; rms++) {
        te_norm_desc d = {.hidden_size = H, .params_dtype = TE_F32};
        d.norm.eps = 0.5f;
        d.norm.zero_centered_gamma = true;
        d.parallel.sequence_parallel = true;
        te_module *m = rms ? te_rmsnorm_create(te, &d) : te_layernorm_create(te, &d);
        REQUIRE_OK(te);
        fill_parameters(m);
        te_tensor *x = test_tensor(te, TE_F32, SHAPE(S, B, H), values), *weight = te_module_parameter(m, "weight"), *bias = te_module_parameter(m, "bias");
        te_tensor *want = rms ? te_rmsnorm(x, weight, 0.5f, true) : te_layernorm(x, weight, bias, 0.5f, true), *other = rms ? te_rmsnorm(x, weight, 0, true) : te_layernorm(x, weight, bias, 0, true);
        float *got = test_read(te_forward(m, x));
        CHECK_BYTES("output", got, test_read(want), N * sizeof(float));
        CHECK(memcmp(got, test_read(other), N * sizeof(float)) != 0);
        CHECK(te_tensor_sequence_parallel(weight));
        CHECK(rms || te_tensor_sequence_parallel(bias));
        te_module_destroy(m);
        d.parallel.sequence_parallel = false;
        m = rms ? te_rmsnorm_create(te, &d) : te_layernorm_create(te, &d);
        CHECK(!te_tensor_sequence_parallel(te_module_parameter(m, "weight")));
        te_module_destroy(m);
    }
}

/* ---- weights ---- */

static te_result give_main_grad(te_tensor *w) { return te_tensor_set_main_grad(w, te_tensor_zeros(te_tensor_ctx(w), TE_F32, te_tensor_ndim(w), te_tensor_shape(w))); }

/* Main gradients are the gradients of a module without: 1e-6 of the largest, since a product that accumulates may add in another order. */
TE_TEST_DEVICES(every_option_fuse_wgrad_accumulation) {
    const te_norm_options norm = {0};
    const float *x = test_normal(N, 3);
    for (int kind = NORM_LINEAR; kind <= MHA; kind++) {
        te_gemm_options gemm = {.params_dtype = TE_F32};
        te_module *plain = make(te, kind, &norm, &gemm);
        gemm.fuse_wgrad_accumulation = true;
        te_module *fused = make(te, kind, &norm, &gemm);
        REQUIRE_OK(te);
        fill_parameters(fused);
        copy_parameters(plain, fused);
        list a = parameters_of(fused), b = parameters_of(plain);
        for (int i = 0; i < a.n; i++)
            if (te_tensor_ndim(a.x[i]) == 2) CHECK_EQ_INT(give_main_grad(a.x[i]), TE_OK);
        for (int k = 0; k < 2; k++) {
            te_module *m = k ? plain : fused;
            te_tensor *in = test_tensor(te, TE_F32, SHAPE(S, B, H), x), *y = te_forward(m, in);
            te_backward_from(y, test_tensor(te, TE_F32, SHAPE(S, B, H), test_normal(N, 4)));
        }
        REQUIRE_OK(te);
        int products = 0;
        for (int i = 0; i < a.n; i++) {
            int64_t n = te_tensor_numel(a.x[i]);
            float *want = test_read(te_tensor_grad(b.x[i])), largest = 0;
            for (int64_t k = 0; k < n; k++) largest = fmaxf(largest, fabsf(want[k]));
            test_case("%s: %s", kind_names[kind], a.path[i]);
            CHECK(largest > 0 || strstr(a.path[i], "bias")); /* the softmax sees no bias of keys */
            bool product = te_tensor_ndim(a.x[i]) == 2;
            products += product;
            CHECK(!product || !te_tensor_grad(a.x[i]));
            CHECK_CLOSE("gradient", test_read(product ? te_tensor_main_grad(a.x[i]) : te_tensor_grad(a.x[i])), want, n, 0, 1e-6 * largest);
        }
        CHECK_EQ_INT(products, kind == NORM_LINEAR ? 1 : 2);
        te_module_destroy(plain);
        te_module_destroy(fused);
    }
}

static te_result fill_constant(void *user, te_tensor *weight) { return te_tensor_fill(weight, *(const float *)user); }
static bool is_constant(te_tensor *x, float value) {
    const float *all = test_read(x);
    for (int64_t i = 0; x && i < te_tensor_numel(x); i++)
        if (all[i] != value) return false;
    return x != NULL;
}
TE_TEST_DEVICES(every_option_output_layer_init) {
    float value = 0.25f;
    const te_init init = {.init_method = fill_constant, .user = &value};
    te_layernorm_mlp_desc p = {.hidden_size = H, .ffn_hidden_size = FFN, .gemm.params_dtype = TE_F32, .output_layer_init.init_method = init.init_method, .output_layer_init.user = init.user};
    te_multihead_attention_desc a = {.hidden_size = H, .attention.num_attention_heads = HEADS, .gemm.params_dtype = TE_F32, .output_layer_init.init_method = init.init_method,
                                     .output_layer_init.user = init.user};
    te_module *mlp = te_layernorm_mlp_create(te, &p), *mha = te_multihead_attention_create(te, &a);
    REQUIRE_OK(te);
    CHECK(is_constant(te_module_parameter(mlp, "fc2_weight"), value) && !is_constant(te_module_parameter(mlp, "fc1_weight"), value));
    CHECK(is_constant(te_module_parameter(te_module_find(mha, "proj"), "weight"), value) && !is_constant(te_module_parameter(te_module_find(mha, "qkv"), "weight"), value));
    te_module_destroy(mlp);
    te_module_destroy(mha);
}

TE_TEST_DEVICES(every_option_grouped_linear_parameters) {
    float value = -0.5f;
    te_grouped_linear_desc d = {.num_gemms = 2, .in_features = H, .out_features = 8, .gemm.params_dtype = TE_F32};
    te_seed(te, 77);
    te_module *plain = te_grouped_linear_create(te, &d);
    te_rng_tracker_add(te, "weights", 77);
    d.gemm.rng_tracker_name = "weights";
    d.name = "experts";
    te_module *tracked = te_grouped_linear_create(te, &d);
    REQUIRE_OK(te);
    CHECK_SAME("drawn from the named state", test_content(tracked), test_content(plain));
    CHECK_STR(te_module_name(tracked), "experts");
    d.gemm.rng_tracker_name = NULL;
    d.gemm.device = TE_PARAMS_META;
    te_module *meta = te_grouped_linear_create(te, &d);
    te_seed(te, 77);
    CHECK_EQ_INT(te_module_reset_parameters(meta), TE_OK);
    CHECK_SAME("made later", test_content(meta), test_content(plain));
    d.gemm.device = TE_PARAMS_DEFAULT;
    d.gemm.init.init_method = fill_constant;
    d.gemm.init.user = &value;
    te_module *constant = te_grouped_linear_create(te, &d);
    REQUIRE_OK(te);
    CHECK(is_constant(te_module_parameter(constant, "weight0"), value) && is_constant(te_module_parameter(constant, "weight1"), value) && is_constant(te_module_parameter(constant, "bias1"), 0));
    te_module *all[] = {plain, tracked, meta, constant};
    for (int i = 0; i < COUNT(all); i++) te_module_destroy(all[i]);
}

/* ---- attention ---- */

TE_TEST_DEVICES(every_option_window_and_scale_of_the_core) {
    te_dot_product_attention_desc d = {.attention.num_attention_heads = HEADS, .attention.kv_channels = D};
    te_module *plain = te_dot_product_attention_create(te, &d);
    d.attention.window = (te_window){true, 1, 0};
    d.attention.softmax_scale = 0.7f;
    te_module *m = te_dot_product_attention_create(te, &d);
    REQUIRE_OK(te);
    te_tensor *x[3];
    for (int i = 0; i < 3; i++) x[i] = test_tensor(te, TE_F32, SHAPE(S, B, HEADS, D), test_normal(N, 20 + (uint64_t)i));
    const te_attn_desc a = {.rule.window = d.attention.window, .rule.softmax_scale = 0.7f};
    te_forward_args args = {.input = x[0], .key = x[1], .value = x[2]};
    float *want = test_read(te_attention(x[0], x[1], x[2], &a));
    CHECK_BYTES("of the module", test_read(te_forward_with(m, &args)), want, N * sizeof(float));
    CHECK(memcmp(test_read(te_forward_with(plain, &args)), want, N * sizeof(float)) != 0);
    const te_attn_desc windowed = {.rule.window = d.attention.window};
    args.attention.window = d.attention.window;
    CHECK_BYTES("of the call", test_read(te_forward_with(plain, &args)), test_read(te_attention(x[0], x[1], x[2], &windowed)), N * sizeof(float));
    te_module_destroy(plain);
    te_module_destroy(m);
}

/* [b, s, H, d] is [s, b, H, d] with the first dimensions swapped, and so are hidden states. Without a mask the last query sees what it sees under the causal one, the first one more. */
TE_TEST_DEVICES(every_option_format_and_mask) {
    te_dot_product_attention_desc d = {.attention.num_attention_heads = HEADS, .attention.kv_channels = D};
    te_multihead_attention_desc a = {.hidden_size = H, .attention.num_attention_heads = HEADS, .gemm.params_dtype = TE_F32};
    te_module *causal[2] = {te_dot_product_attention_create(te, &d), te_multihead_attention_create(te, &a)};
    d.attention.qkv_format = a.attention.qkv_format = TE_BSHD;
    te_module *swapped[2] = {te_dot_product_attention_create(te, &d), te_multihead_attention_create(te, &a)};
    d.attention.qkv_format = a.attention.qkv_format = TE_SBHD;
    d.attention.attn_mask_type = a.attention.attn_mask_type = TE_MASK_NONE;
    te_module *open[2] = {te_dot_product_attention_create(te, &d), te_multihead_attention_create(te, &a)};
    REQUIRE_OK(te);
    fill_parameters(causal[1]);
    copy_parameters(swapped[1], causal[1]), copy_parameters(open[1], causal[1]);
    for (int i = 0; i < 2; i++) {
        te_tensor *x = i ? test_tensor(te, TE_F32, SHAPE(S, B, H), test_normal(N, 25)) : test_tensor(te, TE_F32, SHAPE(S, B, HEADS, D), test_normal(N, 25));
        te_tensor *y = te_tensor_contiguous(te_tensor_transpose(x, 0, 1));
        te_forward_args args = {.input = x, .key = i ? NULL : x, .value = i ? NULL : x}, other = {.input = y, .key = i ? NULL : y, .value = i ? NULL : y};
        float *want = test_read(te_forward_with(causal[i], &args)), *all = test_read(te_forward_with(open[i], &args));
        CHECK_BYTES("batches first", test_read(te_tensor_contiguous(te_tensor_transpose(te_forward_with(swapped[i], &other), 0, 1))), want, N * sizeof(float));
        /* Two kernels, or one with blocks that the mask leaves out, may add in another order; 2e-3: f32 operands are rounded to TF32 on CUDA. */
        CHECK_CLOSE("the last query", all + N - B * H, want + N - B * H, B * H, 2e-3, 2e-3);
        CHECK(memcmp(all, want, B * H * sizeof(float)) != 0);
        te_module_destroy(causal[i]), te_module_destroy(swapped[i]), te_module_destroy(open[i]);
    }
}

TE_TEST_DEVICES(every_option_masks_of_the_core) {
    enum { KEYS = S + 3 };
    static const te_attn_mask masks[] = {TE_MASK_NONE, TE_MASK_CAUSAL, TE_MASK_CAUSAL_BOTTOM_RIGHT};
    te_tensor *q = test_tensor(te, TE_F32, SHAPE(S, B, HEADS, D), test_normal(N, 26)), *k = test_tensor(te, TE_F32, SHAPE(KEYS, B, HEADS, D), test_normal(KEYS * B * H, 27));
    float *out[3];
    for (int i = 0; i < 3; i++) {
        te_dot_product_attention_desc d = {.attention.num_attention_heads = HEADS, .attention.kv_channels = D, .attention.attn_mask_type = masks[i], .attention.softmax_type = TE_SOFTMAX_VANILLA};
        te_module *m = te_dot_product_attention_create(te, &d);
        te_forward_args args = {.input = q, .key = k, .value = k};
        const te_attn_desc a = {.rule.mask = masks[i]};
        out[i] = test_read(te_forward_with(m, &args));
        test_case("mask %d", (int)masks[i]);
        CHECK_BYTES("output", out[i], test_read(te_attention(q, k, k, &a)), N * sizeof(float));
        te_module_destroy(m);
    }
    CHECK(memcmp(out[0], out[1], N * sizeof(float)) && memcmp(out[0], out[2], N * sizeof(float)) && memcmp(out[1], out[2], N * sizeof(float)));
}

/* The softmax of a call that is done again gives the same bits, dropout included. */
TE_TEST_DEVICES(every_option_checkpoint_of_a_call) {
    te_dot_product_attention_desc d = {.attention.num_attention_heads = HEADS, .attention.kv_channels = D, .attention.attention_dropout = 0.5f};
    te_multihead_attention_desc a = {.hidden_size = H, .attention.num_attention_heads = HEADS, .attention.attention_dropout = 0.5f, .gemm.params_dtype = TE_F32};
    te_module *m[2] = {te_dot_product_attention_create(te, &d), te_multihead_attention_create(te, &a)};
    REQUIRE_OK(te);
    for (int i = 0; i < 2; i++) {
        float *y[2], *dx[2];
        size_t kept[2];
        for (int again = 0; again < 2; again++) {
            te_scope_begin(te);
            te_seed(te, 41);
            te_tensor *x = te_tensor_set_requires_grad(test_tensor(te, TE_F32, SHAPE(S, B, H), test_normal(N, 28)), true), *heads = te_tensor_view(x, 4, (const int64_t[]){S, B, HEADS, D});
            te_forward_args args = {.input = i ? x : heads, .key = i ? NULL : heads, .value = i ? NULL : heads};
            args.attention.checkpoint_core_attention = again;
            te_tensor *out = te_forward_with(m[i], &args);
            kept[again] = te_memory_get_stats(te).allocated;
            te_backward(te_sum_all(te_tensor_view(out, 1, (const int64_t[]){N})));
            y[again] = test_read(out);
            dx[again] = test_read(te_tensor_grad(x));
            te_module_zero_grad(m[i]);
            te_scope_end(te);
        }
        test_case("%s", i ? "MultiheadAttention" : "DotProductAttention");
        CHECK_BYTES("output", y[1], y[0], N * sizeof(float));
        CHECK_BYTES("input gradient", dx[1], dx[0], N * sizeof(float));
        CHECK_MSG(kept[1] < kept[0], "%zu bytes are kept, and %zu without", kept[1], kept[0]);
        te_module_destroy(m[i]);
    }
}

/* A window of the module's is that of a call of a module without; the scale's default is 1 / sqrt(d). */
TE_TEST_DEVICES(every_option_window_and_scale_of_layers) {
    const te_window window = {true, 1, 0};
    const float *x = test_normal(N, 5);
    te_multihead_attention_desc a = {.hidden_size = H, .attention.num_attention_heads = HEADS, .gemm.params_dtype = TE_F32};
    te_transformer_layer_desc t = {.hidden_size = H, .ffn_hidden_size = FFN, .attention.num_attention_heads = HEADS, .gemm.params_dtype = TE_F32};
    te_module *plain[2] = {te_multihead_attention_create(te, &a), te_transformer_layer_create(te, &t)};
    a.attention.window = t.attention.window = window;
    te_module *windowed[2] = {te_multihead_attention_create(te, &a), te_transformer_layer_create(te, &t)};
    a.attention.window = t.attention.window = (te_window){false, 0, 0};
    a.attention.softmax_scale = t.attention.softmax_scale = 0.5f;
    te_module *same[2] = {te_multihead_attention_create(te, &a), te_transformer_layer_create(te, &t)};
    a.attention.softmax_scale = t.attention.softmax_scale = 1.5f;
    te_module *scaled[2] = {te_multihead_attention_create(te, &a), te_transformer_layer_create(te, &t)};
    REQUIRE_OK(te);
    for (int i = 0; i < 2; i++) {
        fill_parameters(plain[i]);
        copy_parameters(windowed[i], plain[i]), copy_parameters(same[i], plain[i]), copy_parameters(scaled[i], plain[i]);
        te_forward_args call = {0};
        passes without = run(plain[i], call, x);
        call.attention.window = window;
        passes want = run(plain[i], call, x);
        check_same("window", run(windowed[i], (te_forward_args){0}, x), want);
        check_differ("window", want, without);
        check_same("softmax_scale", run(same[i], (te_forward_args){0}, x), without);
        check_differ("softmax_scale", run(scaled[i], (te_forward_args){0}, x), without);
        te_module_destroy(plain[i]), te_module_destroy(windowed[i]), te_module_destroy(same[i]), te_module_destroy(scaled[i]);
    }
}

TE_TEST_DEVICES(every_option_return_bias_of_attention) {
    te_multihead_attention_desc a = {.hidden_size = H, .attention.num_attention_heads = HEADS, .gemm.params_dtype = TE_F32};
    te_module *plain = te_multihead_attention_create(te, &a);
    a.gemm.return_bias = true;
    te_module *m = te_multihead_attention_create(te, &a);
    REQUIRE_OK(te);
    fill_parameters(plain);
    copy_parameters(m, plain);
    te_forward_args args = {.input = test_tensor(te, TE_F32, SHAPE(S, B, H), test_normal(N, 6))};
    float *want = test_read(te_forward(plain, args.input)), *out = test_read(te_forward_with(m, &args)), *bias = test_read(args.outputs.bias);
    for (int i = 0; i < N; i++) out[i] += bias[i % H];
    CHECK_CLOSE("output and bias", out, want, N, 1e-6, 1e-6); /* one rounding of f32 more */
    CHECK(bias[0] != 0);
    te_module_destroy(plain);
    te_module_destroy(m);
}

/* Dropout of the core draws from the named state what it would draw from the context's. */
TE_TEST_DEVICES(every_option_random_state_of_attention) {
    te_multihead_attention_desc a = {.hidden_size = H, .attention.num_attention_heads = HEADS, .attention.attention_dropout = 0.5f, .gemm.params_dtype = TE_F32};
    te_module *plain = te_multihead_attention_create(te, &a);
    te_rng_tracker_add(te, "attention", 31);
    a.attention.rng_tracker_name = "attention";
    te_module *m = te_multihead_attention_create(te, &a);
    REQUIRE_OK(te);
    fill_parameters(plain);
    copy_parameters(m, plain);
    const float *x = test_normal(N, 7);
    te_seed(te, 31);
    passes want = run(plain, (te_forward_args){0}, x);
    te_seed(te, 32);
    check_same("rng_tracker_name", run(m, (te_forward_args){0}, x), want);
    te_seed(te, 32);
    check_differ("rng_tracker_name", run(plain, (te_forward_args){0}, x), want);
    te_module_destroy(plain);
    te_module_destroy(m);
}

/* Options that a layer hands on: its attention and its MLP against modules of their own with the same options. */
TE_TEST_DEVICES(every_option_of_a_layer_reaches_its_children) {
    const te_rotary_desc rotary = {0};
    const float *x = test_normal(N, 8);
    for (int k = 0; k < 2; k++) { /* without the options, the children differ */
        te_transformer_layer_desc t = {.hidden_size = H, .ffn_hidden_size = FFN, .attention.num_attention_heads = HEADS, .gemm.params_dtype = TE_F32, .activation = TE_CLAMPED_SWIGLU};
        te_multihead_attention_desc a = {.hidden_size = H, .attention.num_attention_heads = HEADS, .gemm.params_dtype = TE_F32, .gemm.return_bias = true, .input_layernorm = true};
        te_layernorm_mlp_desc p = {.hidden_size = H, .ffn_hidden_size = FFN, .gemm.params_dtype = TE_F32, .gemm.return_bias = true, .activation = TE_CLAMPED_SWIGLU};
        t.attention.qk_norm_type = a.attention.qk_norm_type = TE_QK_NORM_RMSNORM;
        t.attention.qk_norm_eps = 0.25f;
        t.attention.qk_norm_before_rope = true;
        t.activation_params.limit = 0.5f;
        t.activation_params.alpha = 3;
        if (k == 0) a.attention.qk_norm_eps = 0.25f, a.attention.qk_norm_before_rope = true, p.activation_params = t.activation_params;
        te_module *layer = te_transformer_layer_create(te, &t), *own[2] = {te_multihead_attention_create(te, &a), te_layernorm_mlp_create(te, &p)};
        te_module *child[2] = {te_module_find(layer, "self_attention"), te_module_find(layer, "layernorm_mlp")};
        REQUIRE_OK(te);
        fill_parameters(layer);
        for (int i = 0; i < 2; i++) {
            copy_parameters(own[i], child[i]);
            te_forward_args call = {.rotary = i ? NULL : &rotary};
            if (k == 0) check_same("child", run(child[i], call, x), run(own[i], call, x));
            else check_differ("child", run(child[i], call, x), run(own[i], call, x));
            te_module_destroy(own[i]);
        }
        te_module_destroy(layer);
    }
}

/* The activations of an MLP against its steps. 2e-3 of the largest: f32 operands of products are rounded to TF32 on CUDA, and one that differs in its last bit may be rounded the other way. */
TE_TEST_DEVICES(every_option_activation_of_the_mlp) {
    static const te_activation activations[] = {TE_GELU, TE_QGELU, TE_RELU, TE_SRELU, TE_SILU, TE_GEGLU, TE_QGEGLU, TE_REGLU, TE_SREGLU, TE_SWIGLU, TE_GLU, TE_CLAMPED_SWIGLU};
    for (int i = 0; i < COUNT(activations); i++) {
        te_layernorm_mlp_desc p = {.hidden_size = H, .ffn_hidden_size = FFN, .gemm.params_dtype = TE_F32, .activation = activations[i]};
        if (p.activation == TE_CLAMPED_SWIGLU) p.activation_params.limit = 0.5f, p.activation_params.alpha = 3;
        te_module *m = te_layernorm_mlp_create(te, &p);
        REQUIRE_OK(te);
        fill_parameters(m);
        te_tensor *x = test_tensor(te, TE_F32, SHAPE(S, B, H), test_normal(N, 11)), *w[6];
        static const char *const names[6] = {"layer_norm_weight", "layer_norm_bias", "fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias"};
        for (int k = 0; k < 6; k++) w[k] = te_module_parameter(m, names[k]);
        te_tensor *inside = te_activate(te_linear(te_layernorm(x, w[0], w[1], 0, false), w[2], w[3]), activations[i], &p.activation_params);
        float *want = test_read(te_linear(inside, w[4], w[5])), largest = 0;
        for (int k = 0; k < N; k++) largest = fmaxf(largest, fabsf(want[k]));
        test_case("activation %d", (int)activations[i]);
        CHECK_CLOSE("output", test_read(te_forward(m, x)), want, N, 0, 2e-3 * largest);
        te_module_destroy(m);
    }
}

/* ---- rotary embeddings ---- */

TE_TEST_DEVICES(every_option_rotary) {
    const te_rope_scaling llama3 = {.type = TE_ROPE_LLAMA3, .factor = 8, .low_freq_factor = 1, .high_freq_factor = 4, .original_max_position_embeddings = 32};
    float scaled[4], factor;
    CHECK(te_rope_frequencies(te, &llama3, 0, 8, 6, scaled, &factor) == TE_OK);
    struct { te_rotary_desc desc; te_rope_angles angles; } rows[] = {
        {{.base = 500}, {.base = 500}},
        {{.rotary_percent = 0.5f}, {.rotary_dim = 4}},
        {{.interleaved = true}, {.interleaved = true}},
        {{.position_offset = 7}, {.position_offset = 7}},
        {{.seq_len_interpolation_factor = 4, .pretrained_max_position_embeddings = 100}, {.position_scale = 0.25f}}, /* positions are divided by the factor */
        {{.seq_len_interpolation_factor = 2, .pretrained_max_position_embeddings = 2}, {.position_scale = 2.0f / 6}},  /* sequences beyond 2 * 2 are scaled to 2 */
        {{.seq_len_interpolation_factor = 4}, {.position_scale = 0}},                                                /* has no effect alone */
        {{.base = 10000, .scaling.type = TE_ROPE_LLAMA3, .scaling.factor = 8, .scaling.low_freq_factor = 1, .scaling.high_freq_factor = 4, .scaling.original_max_position_embeddings = 32},
         {.inv_freq = scaled}},
    };
    enum { LENGTH = 6, HEAD = 8, COUNTED = LENGTH * B * 2 * HEAD };
    float *values = test_normal(COUNTED, 12), *plain = NULL;
    for (int batches_first = 0; batches_first < 2; batches_first++)
        for (int i = 0; i < COUNT(rows); i++) {
            te_tensor *x = batches_first ? test_tensor(te, TE_F32, SHAPE(B, LENGTH, 2, HEAD), values) : test_tensor(te, TE_F32, SHAPE(LENGTH, B, 2, HEAD), values);
            te_op_rope_args a = {.angles = rows[i].angles};
            a.x = x;
            a.y = te_tensor_empty(te, TE_F32, 4, te_tensor_shape(x));
            a.format = batches_first ? TE_BSHD : TE_SBHD;
            te_op_rope(te, &a);
            test_case("row %d", i);
            REQUIRE_OK(te);
            float *got = test_read(te_apply_rotary_pos_emb(x, &rows[i].desc, batches_first ? TE_BSHD : TE_SBHD));
            plain = test_read(te_apply_rotary_pos_emb(x, NULL, batches_first ? TE_BSHD : TE_SBHD));
            /* The scale of positions is a quotient of f32, which may be rounded once more: angles are below 6. */
            CHECK_CLOSE("rotated", got, test_read(a.y), COUNTED, 1e-5, 1e-5);
            CHECK((memcmp(got, plain, COUNTED * sizeof(float)) == 0) == (i == 6));
        }
}

/* Interleaved rotations inside of modules: attention against its steps, a layer against the sum of its halves. 2e-3 of the largest: see every_option_activation_of_the_mlp. */
static void check_near(const char *name, te_tensor *got, te_tensor *want) {
    const float *values = test_read(want);
    float largest = 0;
    for (int i = 0; i < N; i++) largest = fmaxf(largest, fabsf(values[i]));
    CHECK_CLOSE(name, test_read(got), values, N, 0, 2e-3 * largest);
}
static te_tensor *half(te_module *layer, const char *name, te_tensor *x, const te_rotary_desc *rotary) {
    te_forward_args args = {.input = x, .rotary = rotary};
    te_module *m = te_module_find(layer, name);
    te_tensor *y = te_forward_with(m, &args);
    return te_bias_dropout_add(y, args.outputs.bias, x, 0);
}
TE_TEST_DEVICES(every_option_rotary_of_modules) {
    te_rotary_desc rotary = {.base = 50}, halves = rotary;
    rotary.interleaved = true;
    te_multihead_attention_desc a = {.hidden_size = H, .attention.num_attention_heads = HEADS, .gemm.params_dtype = TE_F32, .attention.no_qkv_weight_interleaved = true};
    te_transformer_layer_desc t = {.hidden_size = H, .ffn_hidden_size = FFN, .attention.num_attention_heads = HEADS, .gemm.params_dtype = TE_F32};
    te_module *attention = te_multihead_attention_create(te, &a), *layer = te_transformer_layer_create(te, &t);
    REQUIRE_OK(te);
    fill_parameters(attention), fill_parameters(layer);
    te_tensor *x = test_tensor(te, TE_F32, SHAPE(S, B, H), test_normal(N, 29)), *part[3], *qkv = te_forward(te_module_find(attention, "qkv"), x);
    te_module *proj = te_module_find(attention, "proj");
    te_forward_args args = {.input = x, .rotary = &rotary}, other = {.input = x, .rotary = &halves};
    for (int i = 0; i < 3; i++) {
        part[i] = te_tensor_view(te_tensor_contiguous(te_tensor_narrow(qkv, 2, i * H, H)), 4, (const int64_t[]){S, B, HEADS, D});
        if (i < 2) part[i] = te_apply_rotary_pos_emb(part[i], &rotary, TE_SBHD);
    }
    te_tensor *heads = te_tensor_view(te_attention(part[0], part[1], part[2], NULL), 3, (const int64_t[]){S, B, H}), *got = te_forward_with(attention, &args);
    check_near("attention", got, te_linear(heads, te_module_parameter(proj, "weight"), te_module_parameter(proj, "bias")));
    CHECK(memcmp(test_read(got), test_read(te_forward_with(attention, &other)), N * sizeof(float)) != 0);
    got = te_forward_with(layer, &args);
    check_near("layer", got, half(layer, "layernorm_mlp", half(layer, "self_attention", x, &rotary), NULL));
    CHECK(memcmp(test_read(got), test_read(te_forward_with(layer, &other)), N * sizeof(float)) != 0);
    CHECK_OK(te);
    te_module_destroy(attention);
    te_module_destroy(layer);
}

/* ---- microbatches ---- */

/* Weights are quantized at the first microbatch and kept: a weight whose memory changes behind te.h's back shows in a call of its own, not in a later microbatch. */
TE_TEST_DEVICES(every_option_microbatches) {
    const te_norm_options norm = {0};
    const te_gemm_options gemm = {.params_dtype = TE_F32};
    te_recipe recipe = te_recipe_current_scaling();
    const te_autocast_desc cast = {.recipe = &recipe};
    te_tensor *x = test_tensor(te, TE_F32, SHAPE(S, B, H), test_normal(N, 30));
    for (int kind = NORM_LINEAR; kind <= LAYER; kind++) {
        te_module *m = make(te, kind, &norm, &gemm);
        float *y[5];
        te_autocast_begin(te, &cast);
        for (int i = 0; i < 5; i++) {
            te_forward_args args = {.input = x};
            args.is_first_microbatch = i == 0 || i == 4 ? TE_MICROBATCH_NONE : i == 1 ? TE_MICROBATCH_FIRST : TE_MICROBATCH_LATER;
            if (i == 3 && !te_ctx_is_cuda(te)) {
                list l = parameters_of(m);
                for (int k = 0; k < l.n; k++)
                    if (te_tensor_ndim(l.x[k]) == 2) ((float *)te_tensor_data(l.x[k]))[0] += 8;
            }
            y[i] = test_read(te_forward_with(m, &args));
        }
        te_autocast_end(te);
        REQUIRE_OK(te);
        test_case("%s", kind_names[kind]);
        for (int i = 1; i < 4; i++) CHECK_BYTES("a microbatch", y[i], y[0], N * sizeof(float));
        CHECK((memcmp(y[4], y[0], N * sizeof(float)) == 0) == te_ctx_is_cuda(te));
        te_module_destroy(m);
    }
}

/* ---- padding, graphs, losses, routers, optimizers, recipes ---- */

TE_TEST_DEVICES(every_option_align_size) {
    const int64_t splits[] = {3, 0, 8};
    te_fp8_padding_desc d = {.num_gemms = 3, .align_size = 8};
    te_module *pad = te_fp8_padding_create(te, &d), *unpad = te_fp8_unpadding_create(te, &d);
    te_forward_args a = {.input = test_tensor(te, TE_F32, SHAPE(11, 4), test_normal(44, 13)), .m_splits = splits}, b = {.m_splits = splits};
    te_forward_with(pad, &a);
    REQUIRE_OK(te);
    float *sizes = test_read(a.outputs.m_splits);
    CHECK(sizes[0] == 8 && sizes[1] == 0 && sizes[2] == 8);
    CHECK_EQ_INT(te_tensor_numel(a.outputs.out), 16 * 4);
    b.input = a.outputs.out;
    te_forward_with(unpad, &b);
    CHECK_BYTES("and back", test_read(b.outputs.out), test_read(a.input), 44 * sizeof(float));
    te_module_destroy(pad);
    te_module_destroy(unpad);
}

static te_result count_calls(te_module *self, te_forward_args *args) {
    ++*(int *)te_module_state(self);
    args->outputs.out = te_scale(args->input, 2);
    return args->outputs.out ? TE_OK : TE_ERR_STATE;
}
TE_TEST_DEVICES(every_option_num_warmup_iters) {
    static const te_module_class counting = {.name = "Counting", .state_size = sizeof(int), .forward = count_calls};
    int calls[3] = {0, 0, 0};
    for (int i = 0; i < 3; i++) {
        te_module *m = te_module_create(te, &counting, NULL);
        te_forward_args sample = {.input = te_tensor_set_requires_grad(te_tensor_zeros(te, TE_F32, SHAPE(4)), true)};
        te_graphed_desc g = {.num_warmup_iters = i == 0 ? 0 : i == 1 ? 1 : 5};
        CHECK_EQ_INT(te_make_graphed_callables(te, &m, &sample, 1, &g), TE_OK);
        CHECK_OK(te);
        calls[i] = *(int *)te_module_state(m);
        te_module_destroy(m);
    }
    CHECK_EQ_INT(calls[0] - calls[1], 2); /* 3 is the default */
    CHECK_EQ_INT(calls[2] - calls[1], 4);
}

TE_TEST_DEVICES(every_option_ignore_index) {
    te_tensor *logits = test_tensor(te, TE_F32, SHAPE(3, 5), test_normal(15, 14)), *target = te_tensor_from_host(te, TE_I64, SHAPE(3), (const int64_t[]){1, 3, -100});
    te_cross_entropy_desc d = {.no_reduce_loss = true};
    float *plain = test_read(te_cross_entropy(logits, target, &d));
    CHECK(plain[0] > 0 && plain[1] > 0 && plain[2] == 0); /* -100 is ignored */
    target = te_tensor_from_host(te, TE_I64, SHAPE(3), (const int64_t[]){1, 3, 2});
    d.has_ignore_index = true;
    d.ignore_index = 3;
    float *got = test_read(te_cross_entropy(logits, target, &d));
    CHECK(got[0] == plain[0] && got[1] == 0 && got[2] > 0);
}

/* Three tokens, the experts 1, 0 and both: copies by expert, then by token. */
TE_TEST_DEVICES(every_option_permutation) {
    te_tensor *x = test_tensor(te, TE_F32, SHAPE(3, 2), (const float[]){1, 2, 3, 4, 5, 6}), *map;
    te_tensor *mask = te_tensor_from_host(te, TE_U8, SHAPE(3, 2), (const uint8_t[]){0, 1, 1, 0, 1, 1}), *index = te_tensor_from_host(te, TE_I32, SHAPE(3, 1), (const int32_t[]){1, 0, 1});
    CHECK_TENSOR(te_moe_permute(x, mask, 4, TE_MAP_MASK, &map), ((const float[]){3, 4, 5, 6, 1, 2, 5, 6}), 0, 0);
    CHECK_TENSOR(te_moe_permute(x, mask, 5, TE_MAP_MASK, &map), ((const float[]){3, 4, 5, 6, 1, 2, 5, 6, 0, 0}), 0, 0); /* a row that nothing comes to */
    CHECK_TENSOR(te_moe_permute(x, index, 0, TE_MAP_INDEX, &map), ((const float[]){3, 4, 1, 2, 5, 6}), 0, 0);
    CHECK_TENSOR(te_moe_permute(x, index, 2, TE_MAP_INDEX, &map), ((const float[]){3, 4, 1, 2}), 0, 0); /* the last copy is dropped */
}

TE_TEST_DEVICES(every_option_router) {
    te_tensor *logits = test_tensor(te, TE_F32, SHAPE(4, 8), test_normal(32, 15)), *map, *bits, *bytes;
    te_fused_topk_desc d = {.topk = 1, .score_function = TE_SCORE_SIGMOID};
    d.expert_bias = test_tensor(te, TE_F32, SHAPE(8), (const float[]){0, 0, 0, 0, 0, 2, 0, 0}); /* sigmoids differ by less than 1 */
    float *probs = test_read(te_fused_topk_with_score_function(logits, &d, &map)), *x = test_read(logits);
    REQUIRE_OK(te);
    for (int i = 0; i < 32; i++) {
        CHECK_EQ_INT(test_read(map)[i], i % 8 == 5);
        CHECK(fabsf(probs[i] - (i % 8 == 5 ? 1 / (1 + expf(-x[i])) : 0)) < 1e-6f); /* the bias is not part of the probability; a few roundings of f32 */
    }
    te_fused_compute_score_for_moe_aux_loss(logits, 2, TE_SCORE_SOFTMAX, TE_ROUTING_BITMAP_U8, &bits);
    te_tensor *scores = te_fused_compute_score_for_moe_aux_loss(logits, 2, TE_SCORE_SOFTMAX, TE_ROUTING_BYTEMAP, &bytes);
    REQUIRE_OK(te);
    for (int i = 0; i < 32; i++) CHECK_EQ_INT((int)test_read(bits)[i / 8] >> i % 8 & 1, test_read(bytes)[i]);
    te_fused_moe_aux_loss_desc loss = {.total_num_tokens = 4, .num_experts = 8, .topk = 2, .coeff = 3};
    te_tensor *counts = te_tensor_from_host(te, TE_I32, SHAPE(8), (const int32_t[]){1, 0, 2, 1, 1, 0, 2, 1});
    double want = te_tensor_item(te_fused_moe_aux_loss(scores, counts, &loss));
    loss.total_num_tokens = 0;
    loss.total_num_tokens_tensor = te_tensor_from_host(te, TE_I64, SHAPE(1), (const int64_t[]){4});
    CHECK(want > 0 && te_tensor_item(te_fused_moe_aux_loss(scores, counts, &loss)) == want);
}

TE_TEST_DEVICES(every_option_gradients_after_a_step_of_sgd) {
    for (int keep = 0; keep < 2; keep++) {
        te_linear_desc l = {.in_features = H, .out_features = H, .gemm.params_dtype = TE_F32};
        te_module *m = te_linear_create(te, &l);
        te_fused_sgd_desc d = {.lr = 0.5f};
        if (keep) d.no_set_grad_none = true;
        te_optimizer *opt = te_fused_sgd_create(te, m, &d);
        te_tensor *weight = te_module_parameter(m, "weight");
        te_backward(te_sum_all(te_forward(m, test_tensor(te, TE_F32, SHAPE(S, H), test_normal(S * H, 16)))));
        CHECK(te_tensor_grad(weight) && !is_constant(te_tensor_grad(weight), 0));
        CHECK_EQ_INT(te_optimizer_step(opt), TE_OK);
        if (keep) CHECK(is_constant(te_tensor_grad(weight), 0));
        else CHECK(!te_tensor_grad(weight));
        te_optimizer_destroy(opt);
        te_module_destroy(m);
    }
}

/* 4-over-6 changes the codes of the operands that it is asked for, and of no others. */
typedef struct errors {
    float input, weight;
} errors;
static bool note_errors(void *user, const te_quantizer_role *role, const te_quant_stats *stats) {
    CHECK_STR(role->module_type, "Linear");
    if (role->tensor_type == TE_TENSOR_INPUT) ((errors *)user)->input = stats->snr_db;
    if (role->tensor_type == TE_TENSOR_WEIGHT) ((errors *)user)->weight = stats->snr_db;
    return true;
}
static errors errors_of(te_ctx *te, te_module *m, const te_nvfp4_recipe *nvfp4, te_tensor *x) {
    errors e = {0, 0};
    te_recipe r = te_recipe_nvfp4();
    r.nvfp4 = *nvfp4;
    r.nvfp4.rht = TE_OFF; /* not with 4-over-6 in TransformerEngine */
    te_quant_inspect(te, true);
    test_forward(m, &r, x);
    te_quant_stats_visit(te, note_errors, &e);
    te_quant_inspect(te, false);
    CHECK_OK(te);
    return e;
}
TE_TEST_DEVICES(every_option_4over6_of_operands) {
    static const te_nvfp4_4over6 all[] = {TE_NVFP4_4OVER6_NONE, TE_NVFP4_4OVER6_WEIGHTS, TE_NVFP4_4OVER6_ACTIVATIONS, TE_NVFP4_4OVER6_ALL};
    te_linear_desc l = {.in_features = 64, .out_features = 64};
    te_module *m = te_linear_create(te, &l);
    te_tensor *x = test_tensor(te, TE_BF16, SHAPE(64, 64), test_normal(4096, 17));
    te_recipe r = te_recipe_nvfp4();
    errors e[6], by_scope[5];
    r.nvfp4.four_over_six_e4m3_256 = TE_NVFP4_E4M3_256_NONE;
    for (int i = 0; i < 4; i++) {
        r.nvfp4.four_over_six = all[i];
        e[i] = errors_of(te, m, &r.nvfp4, x);
    }
    CHECK(e[1].weight > e[0].weight && e[1].input == e[0].input); /* of two codes each block keeps the one with the smaller error */
    CHECK(e[2].weight == e[0].weight && e[2].input > e[0].input);
    CHECK(e[3].weight == e[1].weight && e[3].input == e[2].input);
    r.nvfp4.four_over_six_mse = true;
    e[4] = errors_of(te, m, &r.nvfp4, x);
    CHECK(e[4].weight > e[3].weight && e[4].input > e[3].input); /* the ratio is of squares, and now these are compared */
    r.nvfp4.four_over_six_e4m3_256 = TE_NVFP4_E4M3_256_ALL;
    e[5] = errors_of(te, m, &r.nvfp4, x);
    CHECK(e[5].weight != e[4].weight && e[5].input != e[4].input && e[5].weight > 0 && e[5].input > 0);
    static const te_nvfp4_e4m3_256 scopes[] = {TE_NVFP4_E4M3_256_DEFAULT, TE_NVFP4_E4M3_256_ALL, TE_NVFP4_E4M3_256_WEIGHTS, TE_NVFP4_E4M3_256_ACTIVATIONS, TE_NVFP4_E4M3_256_NONE};
    for (int i = 0; i < 5; i++) {
        r.nvfp4.four_over_six_e4m3_256 = scopes[i];
        by_scope[i] = errors_of(te, m, &r.nvfp4, x);
        CHECK(by_scope[i].weight == e[i == 3 || i == 4 ? 4 : 5].weight);
        CHECK(by_scope[i].input == e[i == 2 || i == 4 ? 4 : 5].input);
    }
    r.nvfp4.four_over_six = TE_NVFP4_4OVER6_WEIGHTS; /* 256 is of 4-over-6 alone: the inputs keep 448 */
    r.nvfp4.four_over_six_e4m3_256 = TE_NVFP4_E4M3_256_DEFAULT;
    errors weights = errors_of(te, m, &r.nvfp4, x);
    CHECK(weights.weight == e[5].weight && weights.input == e[0].input);
    te_autocast_desc a = {.recipe = &r};
    r.nvfp4.four_over_six_e4m3_256 = (te_nvfp4_e4m3_256)5;
    CHECK(te_autocast_begin(te, &a) == TE_ERR_INVALID);
    CHECK_ERROR(te, TE_ERR_INVALID, "four_over_six_e4m3_256 5");
    te_module_destroy(m);
}

/* The transform's signs touch the column-wise copy alone, which decodes to the same numbers but for rounding: an E2M1 code is off by at most a quarter of the largest of 16. */
TE_TEST_DEVICES(every_option_random_sign_mask) {
    te_tensor *x = test_tensor(te, TE_BF16, SHAPE(64, 64), test_normal(4096, 18)), *row[2], *column[2], *scale;
    for (int i = 0; i < 2; i++) {
        te_quantizer_desc d = {.kind = TE_QUANT_NVFP4, .nvfp4.rht = TE_ON};
        if (i) d.nvfp4.no_random_sign_mask = true;
        te_quantizer *q = te_quantizer_create(te, &d);
        te_tensor *y = te_quantize(q, x);
        te_quantized_view(y, TE_ROWWISE, &row[i], &scale);
        te_quantized_view(y, TE_COLUMNWISE, &column[i], &scale);
        REQUIRE_OK(te);
        te_tensor_update_usage(y, TE_COLUMNWISE);
        float *got = test_read(te_dequantize(y, TE_F32)), *want = test_read(x), error = 0, sum = 0;
        for (int k = 0; k < 4096; k++) error += (got[k] - want[k]) * (got[k] - want[k]), sum += want[k] * want[k];
        CHECK_MSG(error < 0.04f * sum, "%g of %g", error, sum); /* uniform errors of codes whose steps are a sixth to a third of the block's largest */
        te_quantizer_destroy(q);
    }
    CHECK_EQ_INT(te_tensor_bytes(row[0]), te_tensor_bytes(row[1]));
    CHECK_BYTES("row-wise", test_read_bytes(row[0]), test_read_bytes(row[1]), te_tensor_bytes(row[0]));
    CHECK(memcmp(test_read_bytes(column[0]), test_read_bytes(column[1]), te_tensor_bytes(column[0])) != 0);
}

/* Explicit choices of where partial sums are promoted: those of the defaults change no bit. Without promotion a tensor core may keep fourteen bits of a sum and cut off the rest, in each of
 * sixteen steps: 16 / 2^14 of the largest sum, which is a few times the usual one: 4e-3. */
TE_TEST_DEVICES(every_option_split_accumulators) {
    enum { K = 512, ROWS = 32, COLUMNS = 48 };
    te_linear_desc l = {.in_features = K, .out_features = COLUMNS, .gemm.params_dtype = TE_F32};
    te_module *m = te_linear_create(te, &l);
    float *y[3], *dx[3], *dw[3];
    for (int i = 0; i < 3; i++) {
        te_recipe r = te_recipe_current_scaling();
        if (i == 1) {
            r.split_fprop = TE_OFF;
            r.split_dgrad = TE_ON;
            r.split_wgrad = TE_ON;
        }
        if (i == 2) {
            r.split_fprop = TE_ON;
            r.split_dgrad = TE_OFF;
            r.split_wgrad = TE_OFF;
        }
        te_tensor *x = te_tensor_set_requires_grad(test_tensor(te, TE_F32, SHAPE(ROWS, K), test_normal(ROWS * K, 19)), true), *out = test_forward(m, &r, x);
        te_backward_from(out, test_tensor(te, TE_F32, SHAPE(ROWS, COLUMNS), test_normal(ROWS * COLUMNS, 20)));
        REQUIRE_OK(te);
        y[i] = test_read(out);
        dx[i] = test_read(te_tensor_grad(x));
        dw[i] = test_read(te_tensor_grad(te_module_parameter(m, "weight")));
        te_module_zero_grad(m);
    }
    CHECK_BYTES("output", y[1], y[0], ROWS * COLUMNS * sizeof(float));
    CHECK_BYTES("input gradient", dx[1], dx[0], ROWS * K * sizeof(float));
    CHECK_BYTES("weight gradient", dw[1], dw[0], COLUMNS * K * sizeof(float));
    CHECK_ERROR_BELOW("output", y[2], y[0], ROWS * COLUMNS, 4e-3);
    CHECK_ERROR_BELOW("input gradient", dx[2], dx[0], ROWS * K, 4e-3);
    CHECK_ERROR_BELOW("weight gradient", dw[2], dw[0], COLUMNS * K, 4e-3);
    te_module_destroy(m);
}
