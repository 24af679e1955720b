/* Models that go on working after a cast: modules, recipes, optimizers, files, graphs, and a cast for which memory ran out. */
#include "../faults/purse.h"

static void drop_module(void *m) { te_module_destroy((te_module *)m); }
static void drop_optimizer(void *opt) { te_optimizer_destroy((te_optimizer *)opt); }
static te_module *held(te_module *m) {
    test_on_end(drop_module, m);
    return m;
}
static te_optimizer *adam_for(te_module *m, te_fused_adam_desc d) {
    te_optimizer *opt = te_fused_adam_create(te_module_ctx(m), m, &d);
    test_on_end(drop_optimizer, opt);
    return opt;
}
static te_result to(te_module *m, te_dtype dtype) { return te_cast_model_to_dtype(m, &(te_cast_model_desc){.dtype = dtype}); }
static te_tensor *weight_of(te_module *m) { return te_module_parameter(m, "weight"); }
enum { N = 32 };
static te_module *linear_of(te_ctx *te, te_dtype dtype) { return held(te_linear_create(te, &(te_linear_desc){.in_features = N, .out_features = N, .gemm.params_dtype = dtype, .gemm.init.std = 0.2f})); }
static te_tensor *rows_of(te_ctx *te, te_dtype dtype, uint64_t seed) { return test_tensor(te, dtype, SHAPE(N, 1, N), test_normal(N * N, seed)); }
/* One forward and backward of a fixed gradient. */
static te_tensor *train(te_module *m, te_tensor *x) {
    te_tensor *y = te_forward(m, x);
    te_backward_from(y, te_tensor_full(te_module_ctx(m), te_tensor_dtype(y), te_tensor_ndim(y), te_tensor_shape(y), 0.5));
    return y;
}

/* Each kind of module, made in one format and cast to another, is the module that was made there with the same values. */
static te_module *make_kind(te_ctx *te, int kind, te_dtype dtype) {
    static const char *const parts[] = {"query", "key", "value"};
    te_gemm_options gemm = {.params_dtype = dtype, .init.std = 0.2f};
    te_attn_options attention = {.num_attention_heads = 2};
    switch (kind) {
    case 0: return te_linear_create(te, &(te_linear_desc){.in_features = N, .out_features = N, .gemm = gemm});
    case 1: return te_linear_create(te, &(te_linear_desc){.in_features = N, .out_features = 3 * N, .gemm = gemm, .parameters_split = {.count = 3, .names = parts}});
    case 2: return te_layernorm_linear_create(te, &(te_layernorm_linear_desc){.in_features = N, .out_features = N, .gemm = gemm});
    case 3: return te_layernorm_mlp_create(te, &(te_layernorm_mlp_desc){.hidden_size = N, .ffn_hidden_size = 2 * N, .gemm = gemm});
    case 4: return te_rmsnorm_create(te, &(te_norm_desc){.hidden_size = N, .params_dtype = dtype});
    case 5: attention.softmax_type = TE_SOFTMAX_LEARNABLE; /* an f32 parameter among those of the model's format */ /* fall through */
    case 6: return te_transformer_layer_create(te, &(te_transformer_layer_desc){.hidden_size = N, .ffn_hidden_size = 2 * N, .gemm = gemm, .attention = attention});
    default: return te_grouped_linear_create(te, &(te_grouped_linear_desc){.num_gemms = 2, .in_features = N, .out_features = N, .gemm = gemm});
    }
}
static te_tensor *run_kind(te_module *m, int kind, te_tensor *x) {
    const int64_t splits[] = {N / 4, N - N / 4};
    te_forward_args args = {.input = kind == 7 ? te_tensor_view(x, SHAPE(N, N)) : x, .m_splits = kind == 7 ? splits : NULL};
    return te_forward_with(m, &args);
}
static bool copy_value(void *user, te_module *m, const char *path, te_tensor *x, te_entry_kind kind) {
    const char *dot = strrchr(path, '.');
    char owner[256];
    (void)m, (void)kind;
    snprintf(owner, sizeof owner, "%.*s", dot ? (int)(dot - path) : 0, path);
    return te_tensor_copy(te_module_parameter(te_module_find((te_module *)user, owner), dot ? dot + 1 : path), x) == TE_OK;
}
TE_TEST_DEVICES(cast_modules_compute) {
    for (int kind = 0; kind < 8; kind++)
        for (int way = 0; way < 3; way++) {
            const te_dtype from = way == 0 ? TE_F32 : way == 1 ? TE_BF16 : TE_F32, into = way == 0 ? TE_BF16 : way == 1 ? TE_F32 : TE_F16;
            test_case("kind %d, %s to %s", kind, te_dtype_name(from), te_dtype_name(into));
            te_module *m = make_kind(te, kind, from), *fresh = make_kind(te, kind, into);
            CHECK(to(m, into) == TE_OK);
            te_module_visit_tensors(m, copy_value, fresh);
            te_tensor *x = te_tensor_set_requires_grad(rows_of(te, into, 7), true), *x2 = te_tensor_set_requires_grad(rows_of(te, into, 7), true);
            te_tensor *y = run_kind(m, kind, x), *y2 = run_kind(fresh, kind, x2);
            REQUIRE_OK(te);
            CHECK(te_tensor_dtype(y) == into && te_tensor_dtype(y2) == into);
            CHECK_BYTES("out", test_read(y), test_read(y2), (size_t)te_tensor_numel(y) * sizeof(float));
            te_backward_from(y, te_tensor_full(te, into, te_tensor_ndim(y), te_tensor_shape(y), 0.5));
            te_backward_from(y2, te_tensor_full(te, into, te_tensor_ndim(y), te_tensor_shape(y), 0.5));
            CHECK_BYTES("dx", test_read(te_tensor_grad(x)), test_read(te_tensor_grad(x2)), (size_t)te_tensor_numel(x) * sizeof(float));
            CHECK_OK(te);
            te_module_destroy(m);
            te_module_destroy(fresh);
        }
}
TE_TEST_DEVICES(cast_language_model_computes) { /* its cache of keys and the factor of its embedding follow */
    te_causal_lm_desc d = {.vocab_size = 40, .hidden_size = 16, .intermediate_size = 24, .num_hidden_layers = 2, .num_attention_heads = 2, .embedding_scale = 3.9999f, .tie_word_embeddings = true, .params_dtype = TE_F32};
    te_module *m = held(te_causal_lm_create(te, &d));
    d.params_dtype = TE_BF16;
    te_module *fresh = held(te_causal_lm_create(te, &d));
    CHECK(te_cast_model_to_dtype(m, NULL) == TE_OK);
    te_module_visit_tensors(m, copy_value, fresh);
    te_tensor *ids = test_i32(te, SHAPE(1, 5), (int64_t[]){3, 9, 1, 39, 0});
    te_module *both[] = {m, fresh};
    te_tensor *y[2];
    for (int i = 0; i < 2; i++) {
        te_kv_cache *cache = te_kv_cache_create(both[i], 1, 8);
        te_forward_args args = {.input = ids, .kv_cache = cache};
        te_no_grad_begin(te);
        y[i] = te_forward_with(both[i], &args);
        te_no_grad_end(te);
        te_kv_cache_destroy(cache);
    }
    REQUIRE_OK(te);
    CHECK(te_tensor_dtype(y[0]) == TE_BF16);
    CHECK_BYTES("logits", test_read(y[0]), test_read(y[1]), (size_t)te_tensor_numel(y[0]) * sizeof(float));
}
TE_TEST_DEVICES(cast_before_values) { /* parameters without memory get it in the new format */
    te_module *m = held(te_linear_create(te, &(te_linear_desc){.in_features = 4, .out_features = 4, .gemm.device = TE_PARAMS_META}));
    CHECK(to(m, TE_F32) == TE_OK && te_tensor_dtype(weight_of(m)) == TE_F32 && !te_tensor_data(weight_of(m)));
    te_fp32_snapshots *s = te_snapshot_fp32_tensors(m, (const char *[]){"weight"}, 1, NULL, 0);
    CHECK(te_fp32_snapshots_count(s) == 1 && to(m, TE_F16) == TE_OK && te_restore_fp32_tensor_snapshots(m, s, NULL) == TE_OK && te_tensor_dtype(weight_of(m)) == TE_F32);
    te_fp32_snapshots_destroy(s);
    CHECK(te_module_reset_parameters(m) == TE_OK && te_tensor_bytes(weight_of(m)) == 64 && te_tensor_dtype(te_module_parameter(m, "bias")) == TE_F16);
    CHECK_OK(te);
}

/* ---- recipes ---- */

TE_TEST_DEVICES(cast_models_keep_scaling_states) { /* f32 arithmetic of the delayed recipe, and kept weights that are made anew */
    te_recipe recipe = te_recipe_delayed_scaling();
    te_module *m = linear_of(te, TE_F32);
    te_autocast_desc cast = {.recipe = &recipe};
    for (int i = 0; i < 3; i++) {
        te_autocast_begin(te, &cast);
        train(m, rows_of(te, i < 2 ? TE_F32 : TE_BF16, 7));
        te_autocast_end(te);
        REQUIRE_OK(te);
        te_tensor *scale = te_module_parameter(m, "fp8_scale_fwd"), *history = te_module_parameter(m, "fp8_amax_history_fwd");
        const float before = test_read(scale)[0];
        CHECK(to(m, TE_BF16) == TE_OK && te_tensor_dtype(scale) == TE_F32 && te_tensor_dtype(history) == TE_F32 && te_module_parameter(m, "fp8_scale_fwd") == scale && test_read(scale)[0] == before);
        CHECK(te_restore_fp32_buffers(m, (const char *[]){"fp8"}, 1) == TE_OK && te_module_parameter(m, "fp8_scale_fwd") == scale);
        if (i == 0) CHECK(to(m, TE_F32) == TE_OK);
        if (i > 0) CHECK(before != 1.0f);
    }
    recipe = te_recipe_current_scaling();
    te_tensor *x = rows_of(te, TE_BF16, 9), *y[2];
    for (int later = 0; later < 2; later++) {
        te_forward_args args = {.input = x, .is_first_microbatch = TE_MICROBATCH_FIRST};
        te_autocast_begin(te, &cast);
        te_forward_with(m, &args);
        CHECK(to(m, TE_F32) == TE_OK);
        te_tensor_fill(weight_of(m), 0.25);
        CHECK(to(m, TE_BF16) == TE_OK);
        args.is_first_microbatch = later ? TE_MICROBATCH_LATER : TE_MICROBATCH_NONE;
        te_forward_with(m, &args);
        y[later] = args.outputs.out;
        te_autocast_end(te);
    }
    REQUIRE_OK(te);
    CHECK_BYTES("kept weight", test_read(y[0]), test_read(y[1]), N * N * sizeof(float));
}
TE_TEST_DEVICES(cast_quantized_weights) { /* the nominal format changes, the codes stay, and so does training */
    te_recipe recipe = te_recipe_current_scaling();
    te_quantized_model_init_begin(te, &(te_quantized_model_init_desc){.recipe = &recipe, .preserve_high_precision_init_val = true});
    te_module *m = linear_of(te, TE_F32);
    te_quantized_model_init_end(te);
    te_tensor *w = weight_of(m), *before = te_dequantize(w, TE_F32);
    float *start = test_floats(N * N);
    uint16_t *half = (uint16_t *)test_alloc(N * N * 2);
    CHECK(te_quantized_init_value(w, start) == TE_OK);
    CHECK(te_cast_model_to_dtype(m, NULL) == TE_OK && weight_of(m) == w && te_tensor_is_quantized(w) && te_tensor_dtype(w) == TE_BF16 && te_tensor_dtype(te_module_parameter(m, "bias")) == TE_BF16);
    CHECK_BYTES("codes", test_read(te_dequantize(w, TE_F32)), test_read(before), N * N * sizeof(float));
    CHECK(te_quantized_init_value(w, half) == TE_OK);
    CHECK_TENSOR(te_tensor_from_host(te, TE_BF16, SHAPE(N, N), half), test_rounded(TE_BF16, start, N * N), 0, 0);
    te_optimizer *opt = adam_for(m, (te_fused_adam_desc){.lr = 0.01f});
    CHECK_TENSOR(te_optimizer_get_unscaled_state(opt, w, "master_param"), test_rounded(TE_BF16, start, N * N), 0, 0);
    te_autocast_begin(te, &(te_autocast_desc){.recipe = &recipe});
    train(m, rows_of(te, TE_BF16, 3));
    te_autocast_end(te);
    CHECK(te_tensor_dtype(te_tensor_grad(w)) == TE_BF16 && te_optimizer_step(opt) == TE_OK);
    CHECK(to(m, TE_F32) == TE_OK);
    train(m, rows_of(te, TE_F32, 3));
    CHECK(te_optimizer_step(opt) == TE_OK && te_tensor_dtype(w) == TE_F32);
    te_fp32_snapshots *s = te_snapshot_fp32_tensors(m, (const char *[]){"weight"}, 1, NULL, 0);
    before = te_dequantize(w, TE_F32);
    CHECK_TENSOR(te_fp32_snapshots_at(s, 0, NULL, NULL), test_read(before), 0, 0);
    CHECK(te_cast_model_to_dtype(m, NULL) == TE_OK && te_restore_fp32_tensor_snapshots(m, s, NULL) == TE_OK && te_tensor_dtype(w) == TE_F32);
    CHECK_TENSOR(te_dequantize(w, TE_F32), test_read(before), 0, 0);
    te_fp32_snapshots_destroy(s);
    CHECK_OK(te);
}

/* ---- training ---- */

TE_TEST_DEVICES(cast_gradients_go_along) {
    te_module *m = linear_of(te, TE_F32);
    te_tensor *w = weight_of(m), *main_grad = te_tensor_full(te, TE_F32, SHAPE(N), 1), *decoupled = te_tensor_full(te, TE_F32, SHAPE(N), 2);
    te_tensor_set_main_grad(te_module_parameter(m, "bias"), main_grad);
    te_tensor_set_decoupled_grad(te_module_parameter(m, "bias"), decoupled);
    train(m, rows_of(te, TE_F32, 3));
    const float *g = test_read(te_tensor_grad(w));
    CHECK(te_cast_model_to_dtype(m, NULL) == TE_OK && te_tensor_dtype(te_tensor_grad(w)) == TE_BF16);
    CHECK_TENSOR(te_tensor_grad(w), test_rounded(TE_BF16, g, N * N), 0, 0);
    CHECK(te_tensor_main_grad(te_module_parameter(m, "bias")) == main_grad && te_tensor_dtype(te_tensor_decoupled_grad(te_module_parameter(m, "bias"))) == TE_F32);
    train(m, rows_of(te, TE_BF16, 3)); /* the next one is added to it */
    CHECK(te_tensor_dtype(te_tensor_grad(w)) == TE_BF16);
    CHECK_ERROR_BELOW("sum", test_read(te_tensor_grad(w)), test_read(te_scale(te_tensor_from_f32(te, TE_F32, SHAPE(N, N), g), 2)), N * N, 0.01); /* two roundings to 8 bits */
    CHECK_OK(te);
    /* The values of the weight that a backward pass needs are gone. */
    te_tensor *x = te_tensor_set_requires_grad(rows_of(te, TE_BF16, 3), true), *y = te_forward(m, x);
    CHECK(to(m, TE_F32) == TE_OK);
    te_backward_from(y, te_tensor_full(te, TE_BF16, SHAPE(N, 1, N), 1));
    CHECK_ERROR(te, TE_ERR_STATE, "written");
}
/* Adam after a cast, for every format before and after, with whole masters and remainders: masters that are there go on with every bit, and where one is missing it is the
 * parameter's value. */
TE_TEST_DEVICES(cast_parameters_are_stepped) {
    static const te_dtype formats[] = {TE_F32, TE_F16, TE_BF16};
    for (int i = 0; i < 3 * 3 * 3; i++) {
        const te_dtype from = formats[i / 9], into = formats[i / 3 % 3];
        const int way = i % 3; /* 0: masters; 1: remainders; 2: none */
        test_case("%s to %s, %s", te_dtype_name(from), te_dtype_name(into), way == 0 ? "masters" : way == 1 ? "remainders" : "no masters");
        te_seed(te, 5);
        te_module *m = te_linear_create(te, &(te_linear_desc){.in_features = N, .out_features = N, .gemm.no_bias = true, .gemm.params_dtype = from, .gemm.init.std = 0.2f});
        te_tensor *w = weight_of(m);
        te_optimizer *opt = te_fused_adam_create(te, m, &(te_fused_adam_desc){.lr = 0.01f, .store_param_remainders = way == 1, .no_master_weights = way == 2});
        train(m, rows_of(te, from, 3));
        CHECK(te_optimizer_step(opt) == TE_OK);
        const bool had_master = way < 2 && from != TE_F32, wants = way < 2 && into != TE_F32;
        const float *value = had_master ? test_read(te_optimizer_get_unscaled_state(opt, w, "master_param")) : test_read(w), *moment = test_read(te_optimizer_get_unscaled_state(opt, w, "exp_avg"));
        CHECK(to(m, into) == TE_OK);
        CHECK_TENSOR(te_optimizer_get_unscaled_state(opt, w, "exp_avg"), moment, 0, 0);
        if (had_master || wants) CHECK_TENSOR(te_optimizer_get_unscaled_state(opt, w, "master_param"), had_master ? value : test_rounded(into, value, N * N), 0, 0);
        if (way == 1) CHECK((te_tensor_dtype(te_optimizer_state(opt, w, "master_param", NULL)) == TE_U8) == (into == TE_BF16 && from != TE_F16));
        /* Another step: the reference is an optimizer of an f32 parameter of that value and those moments. */
        te_module *reference = te_linear_create(te, &(te_linear_desc){.in_features = N, .out_features = N, .gemm.no_bias = true, .gemm.params_dtype = TE_F32});
        te_tensor *r = weight_of(reference);
        te_tensor_copy(r, had_master ? test_tensor(te, TE_F32, SHAPE(N, N), value) : w);
        te_optimizer *same = te_fused_adam_create(te, reference, &(te_fused_adam_desc){.lr = 0.01f});
        te_tensor *g = test_tensor(te, into, SHAPE(N, N), test_normal(N * N, 17));
        te_backward_from(te_scale(r, 1), te_tensor_full(te, TE_F32, SHAPE(N, N), 0)); /* counts as step 1, and changes nothing */
        te_optimizer_step(same);
        te_optimizer_set_scaled_state(same, r, "exp_avg", te_optimizer_get_unscaled_state(opt, w, "exp_avg"));
        te_optimizer_set_scaled_state(same, r, "exp_avg_sq", te_optimizer_get_unscaled_state(opt, w, "exp_avg_sq"));
        te_backward_from(te_scale(w, 1), g), te_backward_from(te_scale(r, 1), te_tensor_cast(g, TE_F32));
        CHECK(te_optimizer_step(opt) == TE_OK && te_optimizer_step(same) == TE_OK);
        CHECK_OK(te);
        if (way == 1 && into == TE_BF16) CHECK_ERROR_BELOW("stepped, in halves", test_read(w), test_read(r), N * N, 0.004); /* the upper half is rounded up at ties */
        else CHECK_TENSOR(w, test_rounded(into, test_read(r), N * N), 0, 0);
        te_optimizer_destroy(opt), te_optimizer_destroy(same);
        te_module_destroy(m), te_module_destroy(reference);
    }
}
TE_TEST_DEVICES(cast_parameters_are_stepped_by_sgd) { /* likewise, where the momentum has the parameter's format */
    for (int masters = 0; masters < 2; masters++) {
        te_module *m = linear_of(te, TE_F32);
        te_tensor *w = weight_of(m), *master;
        te_optimizer *opt = te_fused_sgd_create(te, m, &(te_fused_sgd_desc){.lr = 0.1f, .momentum = 0.9f, .no_master_weights = !masters});
        test_on_end(drop_optimizer, opt);
        train(m, rows_of(te, TE_F32, 3));
        CHECK(te_optimizer_step(opt) == TE_OK && te_cast_model_to_dtype(m, NULL) == TE_OK);
        const float *before = test_read(w);
        train(m, rows_of(te, TE_BF16, 3));
        te_optimizer_keep_grad(opt, true);
        CHECK(te_optimizer_step(opt) == TE_OK && !te_optimizer_state(opt, w, "master_param", NULL) == !masters);
        const float *momentum = test_read(te_optimizer_get_unscaled_state(opt, w, "momentum_buffer"));
        float *want = test_floats(N * N);
        for (int i = 0; i < N * N; i++) want[i] = before[i] - 0.1f * momentum[i];
        CHECK_TENSOR(w, test_rounded(TE_BF16, want, N * N), 0.008, 1e-6); /* one bf16 step: the product may be fused with the difference, which moves ties */
        if (masters) {
            master = te_optimizer_get_unscaled_state(opt, w, "master_param");
            CHECK_TENSOR(w, test_rounded(TE_BF16, test_read(master), N * N), 0, 0);
            CHECK_TENSOR(master, want, 1e-6, 1e-6); /* likewise, in f32 */
        }
    }
    CHECK_OK(te);
}
TE_TEST_DEVICES(cast_models_in_files) { /* saved after a cast, loaded into a model that was cast, states and all */
    te_module *m = linear_of(te, TE_F32), *other = linear_of(te, TE_F32);
    te_optimizer *a = adam_for(m, (te_fused_adam_desc){0}), *b = adam_for(other, (te_fused_adam_desc){0});
    train(m, rows_of(te, TE_F32, 3));
    CHECK(te_optimizer_step(a) == TE_OK && te_cast_model_to_dtype(m, NULL) == TE_OK && te_cast_model_to_dtype(other, NULL) == TE_OK);
    CHECK(te_model_save(te, test_path("m.safetensors"), m, a, NULL, 0) == TE_OK && te_model_load(te, test_path("m.safetensors"), other, b) == TE_OK);
    CHECK(te_tensor_dtype(weight_of(other)) == TE_BF16);
    CHECK_BYTES("weight", test_read(weight_of(other)), test_read(weight_of(m)), N * N * sizeof(float));
    CHECK_TENSOR(te_optimizer_get_unscaled_state(b, weight_of(other), "master_param"), test_read(weight_of(m)), 0, 0);
    for (int i = 0; i < 2; i++) train(i ? other : m, rows_of(te, TE_BF16, 4)), te_optimizer_step(i ? b : a);
    CHECK_BYTES("stepped", test_read(weight_of(other)), test_read(weight_of(m)), N * N * sizeof(float));
    CHECK(te_cast_model_to_dtype(other, &(te_cast_model_desc){.dtype = TE_F16}) == TE_OK);
    te_model_load(te, test_path("m.safetensors"), other, NULL);
    CHECK_ERROR(te, TE_ERR_DTYPE, "is bf16 in the file and f16 here");
}
TE_TEST_DEVICES(cast_ends_graphs) { /* one that uses a tensor which was cast cannot run; a new capture can; none of it inside of one */
    te_module *m = linear_of(te, TE_F32), *aside = linear_of(te, TE_F32);
    te_tensor *x = rows_of(te, TE_F32, 3), *half = rows_of(te, TE_BF16, 3);
    te_forward(m, x), te_forward(aside, x);
    te_graph_begin(te);
    te_forward(m, x);
    te_graph *g = te_graph_end(te);
    te_graph_begin(te);
    te_forward(aside, x);
    te_graph *other = te_graph_end(te);
    CHECK(g && other && te_graph_launch(g) == TE_OK && te_cast_model_to_dtype(m, NULL) == TE_OK);
    CHECK_OK(te);
    te_graph_launch(g);
    CHECK_ERROR(te, TE_ERR_STATE, "a tensor that it uses was cast to another format since: capture it again");
    CHECK(te_graph_launch(other) == TE_OK);
    te_graph_destroy(g);
    te_forward(m, half);
    te_graph_begin(te);
    te_tensor *y = te_forward(m, half);
    te_tensor_retain(y);
    g = te_graph_end(te);
    CHECK(g && te_graph_launch(g) == TE_OK);
    CHECK_BYTES("captured", test_read(y), test_read(te_forward(m, half)), N * N * sizeof(float));
    te_tensor_release(y);
    te_graph_destroy(g);
    te_graph_destroy(other);
    CHECK_OK(te);
    te_graph_begin(te);
    te_cast_model_to_dtype(m, NULL);
    CHECK(!te_graph_end(te));
    CHECK_ERROR(te, TE_ERR_STATE, "te_cast_model_to_dtype between te_graph_begin and te_graph_end");
    te_warmup_begin(te);
    CHECK(to(m, TE_F16) == TE_ERR_STATE && te_tensor_dtype(weight_of(m)) == TE_BF16);
    CHECK_ERROR(te, TE_ERR_STATE, "te_cast_model_to_dtype: between te_warmup_begin and te_warmup_end");
    te_warmup_end(te);
}

static void note_release(void *user) { ++*(int *)user; }
TE_TEST(cast_gives_foreign_memory_back) { /* and views that the program made keep it for as long as they live */
    te_ctx *te = test_context("cpu");
    float memory[4] = {1, 2, 3, 4.001f};
    int released = 0;
    te_module *m = linear_of(te, TE_F32);
    te_scope_begin(te);
    te_tensor *x = te_module_add_buffer(m, "mine", te_tensor_wrap(te, TE_F32, SHAPE(4), memory, note_release, &released)), *view = te_tensor_view(x, SHAPE(2, 2));
    CHECK(te_cast_model_to_dtype(m, NULL) == TE_OK && te_tensor_data(x) != (void *)memory && released == 0);
    CHECK(te_tensor_dtype(view) == TE_F32 && te_tensor_data(view) == (void *)memory && test_read(x)[2] == 3 && test_read(x)[3] == 4);
    te_scope_end(te);
    CHECK(released == 1 && te_module_parameter(m, "mine") == x && test_read(x)[0] == 1);
    CHECK_OK(te);
}

/* ---- failure ---- */

TE_TEST_DEVICES(cast_waits_for_errors_to_be_cleared) {
    te_module *m = linear_of(te, TE_F32);
    te_tensor_view(weight_of(m), SHAPE(3));
    CHECK(te_cast_model_to_dtype(m, NULL) == TE_ERR_SHAPE && !te_fp32_scope_open(m, NULL) && te_apply_patches(te) == TE_ERR_SHAPE && te_tensor_dtype(weight_of(m)) == TE_F32);
    CHECK(te_cast_frozen_modules_to_compute_dtype(m, &(te_cast_frozen_desc){.compute_dtype = TE_BF16}) == TE_ERR_SHAPE && !te_snapshot_fp32_tensors(m, NULL, 0, NULL, 0));
    CHECK(te_restore_fp32_modules(m, NULL, 0) == TE_ERR_SHAPE && te_restore_fp32_tensor_snapshots(m, NULL, NULL) == TE_ERR_SHAPE);
    CHECK_ERROR(te, TE_ERR_SHAPE, "te_tensor_view");
    CHECK(te_cast_model_to_dtype(m, NULL) == TE_OK);
}
/* Regions that the program forgets to end go with the context. */
TE_TEST(cast_regions_left_open) {
    te_ctx *te = te_ctx_create(&(te_ctx_desc){.device = "cpu", .cpu_threads = 1, .log = test__log});
    te_scope_begin(te);
    te_module *m = te_linear_create(te, &(te_linear_desc){.in_features = 4, .out_features = 4});
    CHECK(te_fp32_scope_open(m, NULL) && te_snapshot_fp32_tensors(m, (const char *[]){""}, 1, NULL, 0));
    te_scope_end(te);
    te_ctx_destroy(te);
}

/* Ranks are threads: each has patches, slots, words and casts of its own. */
typedef struct rank_of {
    pthread_t thread;
    int number, failures;
} rank_of;
static void *cast_as_rank(void *user) {
    rank_of *r = (rank_of *)user;
    te_fused_adam_methods legacy = {te_initialize_state_legacy, 0};
    for (int i = 0; i < 20; i++) {
        te_ctx *te = te_ctx_create(&(te_ctx_desc){.device = "cpu", .cpu_threads = 1});
        te_module *m = te_linear_create(te, &(te_linear_desc){.in_features = 8, .out_features = 8, .gemm.params_dtype = TE_F32});
        if (r->number) te_set_library_version(te, "2.11"), te_fused_adam_set_methods(te, &legacy);
        te_apply_patches(te);
        r->failures += te_patch_at(te, 0).state != (r->number ? TE_PATCH_APPLIED : TE_PATCH_SKIPPED);
        if (r->number) te_module_set_keep_in_fp32(m, (const char *[]){"weight"}, 1, false);
        te_cast_model_to_dtype(m, NULL);
        r->failures += te_tensor_dtype(weight_of(m)) != (r->number ? TE_F32 : TE_BF16) || !te_ok(te);
        te_module_destroy(m);
        te_ctx_destroy(te);
    }
    return NULL;
}
TE_TEST(cast_on_ranks) {
    rank_of rank[2] = {{.number = 0}, {.number = 1}};
    for (int i = 0; i < 2; i++) REQUIRE(pthread_create(&rank[i].thread, NULL, cast_as_rank, &rank[i]) == 0);
    for (int i = 0; i < 2; i++) {
        pthread_join(rank[i].thread, NULL);
        CHECK_EQ_INT(rank[i].failures, 0);
    }
}

typedef struct kept_value {
    te_tensor *x;
    te_dtype dtype;
    const void *memory;
    float *value;
} kept_value;
static te_result nothing(te_ctx *te, void *user) {
    (void)user;
    return te_error_code(te);
}
/* Memory is refused at each request in turn, the host's and the device's: the model is what it was, and the same call then works. */
TE_TEST(cast_without_memory) {
    static const char *const calls[] = {"cast", "keep", "frozen", "snapshot", "scope", "patches"};
    for (int call = 0; call < COUNT(calls); call++)
        for (int device = 0; device < 2; device++) {
            bool done = false;
            for (int64_t fail = 1; !done; fail++) {
                purse host = {.owner = pthread_self()}, memory = {.owner = pthread_self()};
                te_ctx *te = te_ctx_create(&(te_ctx_desc){.device = "cpu", .cpu_threads = 1, .host_allocator = allocator_of(&host), .device_allocator = allocator_of(&memory), .log = test__log});
                purse *p = device ? &memory : &host;
                test_case("%s, request %d of the %s", calls[call], (int)fail, device ? "device" : "host");
                te_scope_begin(te);
                te_quantized_model_init_begin(te, &(te_quantized_model_init_desc){.preserve_high_precision_init_val = true});
                te_module *m = te_layernorm_linear_create(te, &(te_layernorm_linear_desc){.in_features = 16, .out_features = 16, .gemm.params_dtype = TE_F32});
                te_quantized_model_init_end(te);
                te_module_add_buffer(m, "table", te_tensor_full(te, TE_F32, SHAPE(3), 0.1f));
                te_module_set_keep_in_fp32(m, (const char *[]){"norm"}, 1, false);
                if (call == 2) te_module_set_requires_grad(m, false);
                REQUIRE_OK(te);
                static const char *const names[] = {"layer_norm_weight", "layer_norm_bias", "bias", "table"};
                kept_value before[COUNT(names)];
                for (int i = 0; i < COUNT(names); i++) {
                    te_tensor *x = te_module_parameter(m, names[i]);
                    before[i] = (kept_value){x, te_tensor_dtype(x), te_tensor_data(x), test_read(x)};
                }
                te_memory_trim(te); /* or the pool would have what is asked for */
                p->fail_at = p->calls + fail;
                te_result result = TE_OK;
                for (int again = 0; again < 2; again++) {
                    te_fp32_snapshots *s = NULL;
                    if (call == 0) result = te_cast_model_to_dtype(m, NULL);
                    if (call == 1) result = te_module_set_keep_in_fp32(m, (const char *[]){"table", "norm"}, 2, true);
                    if (call == 2) result = te_cast_frozen_modules_to_compute_dtype(m, &(te_cast_frozen_desc){.compute_dtype = TE_BF16});
                    if (call == 3) {
                        s = te_snapshot_fp32_tensors(m, (const char *[]){"bias"}, 1, (const char *[]){"table"}, 1);
                        result = s ? TE_OK : te_error_code(te);
                        te_fp32_snapshots_destroy(s);
                    }
                    if (call == 4) {
                        te_fp32_scope *scope = te_fp32_scope_open(m, &(te_fp32_scope_desc){.restore_dtype = TE_BF16});
                        result = scope ? TE_OK : te_error_code(te);
                        if (scope) {
                            result = te_fp32_scope_close(scope);
                            if (result != TE_OK) {
                                te_clear_error(te);
                                CHECK(te_fp32_scope_close(scope) == TE_OK);
                            }
                        }
                    }
                    if (call == 5) {
                        te_patch patch = {.name = "p", .fixed_in = "9", .apply = nothing, .undo = nothing};
                        result = te_set_library_version(te, "3");
                        if (result == TE_OK && te_num_patches(te) == 1) result = te_register_patch(te, &patch);
                        if (result == TE_OK) result = te_apply_patches(te);
                    }
                    if (again == 0 && p->refused == 0) done = true;
                    if (result == TE_OK) break;
                    CHECK(again == 0 && result == TE_ERR_OUT_OF_MEMORY);
                    for (int i = 0; i < COUNT(names); i++) {
                        te_tensor *x = te_module_parameter(m, names[i]);
                        if (call == 4 && te_tensor_dtype(x) != before[i].dtype) continue; /* the region's end, done again above */
                        CHECK(x == before[i].x && te_tensor_dtype(x) == before[i].dtype && te_tensor_data(x) == before[i].memory);
                        te_clear_error(te);
                        CHECK_BYTES(names[i], test_read(x), before[i].value, (size_t)te_tensor_numel(x) * sizeof(float));
                    }
                    te_clear_error(te);
                }
                CHECK_OK(te);
                te_module_destroy(m);
                te_scope_end(te);
                te_ctx_destroy(te);
                CHECK(host.blocks == 0 && memory.blocks == 0);
            }
        }
}
