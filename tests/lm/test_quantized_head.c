/* test_quantized_head.c: language models whose lm_head is quantized as their projections are (quantized_lm_head),
 * against models without it whose hidden states go through a Linear of the same weight under the same recipe. */
#include "../te_test.h"

/* Vocabulary: groups of 16 and 32, blocks of 128, and a rest; ids of a batch, and room of a cache. */
enum { QH_V = 157, QH_D = 256, QH_P = 5, QH_ROOM = 9, QH_RECIPES = 5 };

static te_recipe qh_recipe(int i) {
    return i == 0   ? te_recipe_current_scaling()
           : i == 1 ? te_recipe_mxfp8()
           : i == 2 ? te_recipe_nvfp4()
           : i == 3 ? te_recipe_block_scaling()
                    : te_recipe_delayed_scaling();
}
/* A model of the bits of `seed`; `recipe`: its weights are stored quantized, NULL: they are not. */
static te_module *qh_make(te_ctx *te, uint64_t seed, bool head, const te_recipe *recipe) {
    const te_causal_lm_desc d = {.vocab_size = QH_V, .hidden_size = QH_D, .intermediate_size = 256,
                                 .num_hidden_layers = 1, .num_attention_heads = 4, .quantized_lm_head = head};
    te_seed(te, seed);
    if (recipe) te_quantized_model_init_begin(te, &(te_quantized_model_init_desc){.recipe = recipe});
    te_module *m = te_causal_lm_create(te, &d);
    if (recipe) te_quantized_model_init_end(te);
    return m;
}
static te_tensor *qh_weight(te_module *m) { return te_module_parameter(te_module_find(m, "lm_head"), "weight"); }
static te_tensor *qh_ids(te_ctx *te, int64_t batch, int64_t length) {
    int32_t ids[32 * QH_ROOM];
    for (int i = 0; i < batch * length; i++) ids[i] = (i * i * 7 + 3) % QH_V;
    return te_tensor_from_host(te, TE_I32, SHAPE(batch, length), ids);
}
static test_bytes qh_bytes(te_tensor *x) {
    test_bytes b = {0};
    test_put(&b, x);
    return b;
}
static test_bytes qh_logits(te_module *m, const te_recipe *recipe) {
    return qh_bytes(test_forward(m, recipe, qh_ids(te_module_ctx(m), 2, QH_P)));
}
/* A Linear with the weight of the head of `from`, in high precision. */
static te_module *qh_linear(te_ctx *te, te_module *from) {
    const te_linear_desc d = {.in_features = QH_D, .out_features = QH_V, .gemm.no_bias = true};
    te_module *m = te_linear_create(te, &d);
    te_no_grad_begin(te);
    te_tensor_copy(te_module_parameter(m, "weight"), qh_weight(from));
    te_no_grad_end(te);
    return m;
}

/* Logits, in training and without gradients, stored quantized and quantized at each call, and in a batch whose rows a
 * product does not quantize by itself; and the gradients of both matrices that have the vocabulary. */
TE_TEST_DEVICES(quantized_head_equals_a_linear) {
    for (int n = 0; n < QH_RECIPES * 4; n += test_every_odd(1)) {
        const te_recipe recipe = qh_recipe(n / 4);
        const bool stored = n % 2, no_grad = n / 2 % 2;
        const int64_t batch = no_grad ? 1 : 16, length = no_grad ? QH_P : 2; /* 16 x 2: rows in whole groups of 32 */
        test_case("%s%s%s", te_recipe_name(recipe.kind), stored ? ", stored" : "", no_grad ? ", no gradients" : "");
        if (no_grad) te_no_grad_begin(te);
        te_module *m = qh_make(te, 5, true, stored ? &recipe : NULL);
        te_module *plain = qh_make(te, 5, false, stored ? &recipe : NULL), *linear = qh_linear(te, plain);
        te_tensor *ids = qh_ids(te, batch, length), *y[2];
        CHECK(te_tensor_is_quantized(qh_weight(m)) == stored && !te_tensor_is_quantized(qh_weight(plain)));
        te_seed(te, 9);
        y[0] = test_forward(m, &recipe, ids);
        if (!no_grad) te_backward(te_cross_entropy(y[0], ids, NULL));
        te_seed(te, 9);
        y[1] = test_forward(linear, &recipe, test_forward(te_module_find(plain, "model"), &recipe, ids));
        if (!no_grad) te_backward(te_cross_entropy(y[1], ids, NULL));
        REQUIRE_OK(te);
        CHECK_SAME("logits", qh_bytes(y[0]), qh_bytes(y[1]));
        for (int i = 0; i < 2 && !no_grad; i++) {
            static const char table[] = "model.embed_tokens";
            te_tensor *x[2] = {te_module_parameter(te_module_find(m, i ? table : "lm_head"), "weight"),
                               te_module_parameter(i ? te_module_find(plain, table) : linear, "weight")};
            CHECK_SAME(i ? "gradient of the table" : "gradient of the head", qh_bytes(te_tensor_grad(x[0])),
                       qh_bytes(te_tensor_grad(x[1])));
        }
        /* in high precision, as without the option, they are others */
        const float *got = test_read(y[0]), *high = test_read(test_forward(plain, &recipe, ids));
        CHECK(memcmp(got, high, sizeof(float) * QH_V) != 0);
        if (no_grad) te_no_grad_end(te);
        te_module_destroy(linear);
        te_module_destroy(plain);
        te_module_destroy(m);
        CHECK_OK(te);
    }
}

/* A forward for the lm_head of a model without the option: it runs under the recipe, although the model turns the recipe
 * off for it. */
static const te_recipe *qh_recipe_of_head;
static te_result qh_quantized(te_module *m, te_forward_args *args) {
    te_ctx *te = te_module_ctx(m);
    te_autocast_begin(te, &(te_autocast_desc){.recipe = qh_recipe_of_head});
    const te_result result = te_module_get_class(m)->forward(m, args);
    te_autocast_end(te);
    return result;
}

/* The logits after the prompt and after each of the ids behind it, by calls or by launches of a captured step. */
static void qh_decode(te_module *m, const te_recipe *recipe, bool launches, float *logits[QH_ROOM]) {
    te_ctx *te = te_module_ctx(m);
    te_kv_cache *cache = te_kv_cache_create(m, 1, QH_ROOM);
    te_tensor *all = qh_ids(te, 1, QH_ROOM), *id = te_tensor_zeros(te, TE_I32, SHAPE(1, 1)),
              *y = te_tensor_zeros(te, TE_BF16, SHAPE(1, 1, QH_V));
    te_graph *graph = NULL;
    for (int i = QH_P - 1; i < QH_ROOM; i++) {
        te_forward_args args = {.input = i < QH_P ? qh_ids(te, 1, QH_P) : id, .kv_cache = cache, .logits_to_keep = 1};
        const bool captures = launches && i == QH_P + 1;
        te_tensor_copy(id, te_tensor_narrow(all, 1, i, 1));
        if (captures) te_graph_begin(te);
        if (!graph) {
            te_scope_begin(te);
            te_autocast_begin(te, &(te_autocast_desc){.recipe = recipe});
            te_tensor_copy(y, te_forward_with(m, &args));
            te_autocast_end(te);
            te_scope_end(te);
        }
        if (captures) graph = te_graph_end(te);
        if (graph) te_graph_launch(graph);
        REQUIRE_OK(te);
        logits[i] = test_read(y);
    }
    te_graph_destroy(graph);
    te_kv_cache_destroy(cache);
}
/* Calls have the numbers of the head that is quantized by a forward of its own, and launches the bits of calls. */
TE_TEST_DEVICES(quantized_head_decodes) {
    for (int n = 0; n < QH_RECIPES; n += test_every_odd(1)) {
        const te_recipe recipe = qh_recipe(n);
        /* bf16: 8 bits, some roundings. A scale of a whole tensor (current, NVFP4) is another one of a single row than
         * of all, and so are the codes: those of E4M3 are off by 2.6e-2 in the mean, of E2M1 by 0.1, in 8 products */
        const double limit = recipe.kind == TE_RECIPE_NVFP4 ? 0.3 : recipe.kind == TE_RECIPE_CURRENT ? 0.1 : 5e-2;
        float *calls[QH_ROOM], *want[QH_ROOM], *launches[QH_ROOM];
        test_case("%s", te_recipe_name(recipe.kind));
        te_no_grad_begin(te);
        te_module *m = qh_make(te, 5, true, &recipe), *plain = qh_make(te, 5, false, &recipe);
        qh_recipe_of_head = &recipe;
        te_module_set_forward(te_module_find(plain, "lm_head"), qh_quantized);
        qh_decode(m, &recipe, false, calls);
        qh_decode(plain, &recipe, false, want);
        for (int i = QH_P - 1; i < QH_ROOM; i++) {
            /* On CUDA a joint product, of block, MXFP8 and NVFP4, adds up k in another order: sums up to 4 sqrt(QH_D), of
             * QH_D terms, round by 2^-24 of that; then bf16 rounds once on each side. */
            if (te_ctx_is_cuda(te)) CHECK_CLOSE("calls", calls[i], want[i], QH_V, 0x1p-7, 4 * QH_D * 0x1p-24);
            else CHECK_BYTES("calls", calls[i], want[i], QH_V * sizeof(float));
        }
        if (recipe.kind != TE_RECIPE_DELAYED) { /* whose scales are another step's */
            qh_decode(m, &recipe, true, launches);
            for (int i = QH_P - 1; i < QH_ROOM; i++)
                CHECK_BYTES("launches", launches[i], calls[i], QH_V * sizeof(float));
        }
        const float *whole = test_read(test_forward(m, &recipe, qh_ids(te, 1, QH_ROOM)));
        for (int i = QH_P - 1; i < QH_ROOM; i++)
            CHECK_ERROR_BELOW("without a cache", calls[i], whole + i * QH_V, QH_V, limit);
        te_no_grad_end(te);
        CHECK_OK(te);
        te_module_destroy(plain);
        te_module_destroy(m);
    }
}

/* A head with a forward of its own, which reads its product, runs by itself. */
static te_result qh_doubled(te_module *m, te_forward_args *args) {
    te_result result = te_module_get_class(m)->forward(m, args);
    if (result == TE_OK) args->outputs.out = te_scale(args->outputs.out, 2);
    return args->outputs.out ? result : TE_ERR_STATE;
}
TE_TEST_DEVICES(quantized_head_with_a_forward_of_its_own) {
    for (int n = 0; n < QH_RECIPES; n += test_every_odd(1)) {
        const te_recipe recipe = qh_recipe(n);
        float *once[QH_ROOM], *twice[QH_ROOM];
        test_case("%s", te_recipe_name(recipe.kind));
        te_no_grad_begin(te);
        te_module *m = qh_make(te, 5, true, &recipe);
        te_module_set_forward(te_module_find(m, "lm_head"), qh_quantized);
        qh_recipe_of_head = &recipe;
        qh_decode(m, &recipe, false, once);
        te_module_set_forward(te_module_find(m, "lm_head"), qh_doubled);
        if (recipe.kind == TE_RECIPE_DELAYED) te_module_destroy(m), m = qh_make(te, 5, true, &recipe), te_module_set_forward(te_module_find(m, "lm_head"), qh_doubled);
        qh_decode(m, &recipe, false, twice);
        for (int i = QH_P - 1; i < QH_ROOM; i++) {
            for (int v = 0; v < QH_V; v++) once[i][v] *= 2; /* exact */
            CHECK_BYTES("doubled", twice[i], once[i], QH_V * sizeof(float));
        }
        te_no_grad_end(te);
        CHECK_OK(te);
        te_module_destroy(m);
    }
}

/* Stored quantized, the head takes the bytes of its codes, once in a model made without gradients. */
TE_TEST_DEVICES(quantized_head_takes_less_memory) {
    for (int n = 0; n < QH_RECIPES; n += test_every_odd(1)) {
        const te_recipe recipe = qh_recipe(n);
        size_t bytes[2];
        test_case("%s", te_recipe_name(recipe.kind));
        te_module *both = qh_make(te, 5, true, &recipe);
        CHECK_EQ_INT(te_quantized_usage(qh_weight(both)), TE_ROWWISE | TE_COLUMNWISE);
        te_module_destroy(both);
        te_no_grad_begin(te);
        for (int head = 0; head < 2; head++) {
            const size_t before = te_memory_get_stats(te).allocated;
            te_module *m = qh_make(te, 5, head, &recipe);
            bytes[head] = te_memory_get_stats(te).allocated - before;
            if (head) CHECK_EQ_INT(te_quantized_usage(qh_weight(m)), TE_ROWWISE);
            te_module_destroy(m);
        }
        te_no_grad_end(te);
        CHECK_OK(te);
        /* of 2 bytes for each number 1 and a little is left, or 1/2 + 1/16; two copies would leave 2 or 1 + 1/8 */
        const double saved = ((double)bytes[0] - (double)bytes[1]) / (QH_V * QH_D);
        CHECK_MSG(saved > (recipe.kind == TE_RECIPE_NVFP4 ? 1.3 : 0.8), "%g bytes for each number", saved);
    }
}

/* Files of the model, and of one whose weights are plain, give another model the same codes, and so the same logits. */
TE_TEST_DEVICES(quantized_head_is_saved_and_loaded) {
    const char *path = test_path("head.safetensors");
    for (int n = 0; n < QH_RECIPES; n += test_every_odd(1)) {
        const te_recipe recipe = qh_recipe(n);
        te_module *m = qh_make(te, 5, true, &recipe), *plain = qh_make(te, 5, false, NULL);
        for (int from = 0; from < 2; from++) {
            test_case("%s, %s", te_recipe_name(recipe.kind), from ? "of a plain model" : "of codes");
            te_module *other = qh_make(te, 77, true, &recipe);
            CHECK(qh_bytes(qh_weight(other)).n == qh_bytes(qh_weight(m)).n);
            CHECK_EQ_INT(te_model_save(te, path, from ? plain : m, NULL, NULL, 0), TE_OK);
            CHECK_EQ_INT(te_model_load(te, path, other, NULL), TE_OK);
            CHECK(te_tensor_is_quantized(qh_weight(other)));
            CHECK_SAME("codes", qh_bytes(qh_weight(other)), qh_bytes(qh_weight(m)));
            te_no_grad_begin(te);
            if (recipe.kind != TE_RECIPE_DELAYED) /* a file has no amaxes of calls that were not made */
                CHECK_SAME("logits", qh_logits(other, &recipe), qh_logits(m, &recipe));
            te_no_grad_end(te);
            CHECK_OK(te);
            te_module_destroy(other);
        }
        te_module_destroy(plain);
        te_module_destroy(m);
    }
}

TE_TEST(quantized_head_refused_in_a_tied_model) {
    te_ctx *te = test_context("cpu");
    const te_causal_lm_desc d = {.vocab_size = 8, .hidden_size = 8, .intermediate_size = 8, .num_hidden_layers = 1,
                                 .num_attention_heads = 1, .tie_word_embeddings = true, .quantized_lm_head = true};
    CHECK(te_causal_lm_create(te, &d) == NULL);
    CHECK_ERROR(te, TE_ERR_INVALID, "quantized_lm_head and tie_word_embeddings are true");
}
