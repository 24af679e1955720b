/* te_sequential_create: modules run in order, in one tree, whoever walks it. */
#include "../faults/purse.h"

static te_module *linear(te_ctx *te, int in, int out, bool return_bias) {
    te_linear_desc d = {0};
    d.in_features = in;
    d.out_features = out;
    d.gemm.params_dtype = TE_BF16;
    d.gemm.return_bias = return_bias;
    return te_linear_create(te, &d);
}
static te_module *norm(te_ctx *te, int hidden) {
    te_norm_desc d = {0};
    d.hidden_size = hidden;
    return te_rmsnorm_create(te, &d);
}
enum { WORDS = 20, WIDTH = 32, TOKENS = 6 };
static te_module *layer(te_ctx *te, float dropout) {
    te_transformer_layer_desc d = {0};
    d.hidden_size = WIDTH;
    d.ffn_hidden_size = 64;
    d.attention.num_attention_heads = 2;
    d.hidden_dropout = dropout;
    d.gemm.params_dtype = TE_BF16;
    return te_transformer_layer_create(te, &d);
}
static te_module *model(te_ctx *te) {
    te_embedding_desc d = {0};
    te_module *list[5];
    d.num_embeddings = WORDS;
    d.embedding_dim = WIDTH;
    te_seed(te, 5);
    list[0] = te_embedding_create(te, &d);
    list[1] = layer(te, 0.1f);
    list[2] = layer(te, 0);
    list[3] = norm(te, WIDTH);
    list[4] = linear(te, WIDTH, WORDS, false);
    return te_sequential_create(te, list, 5);
}
static te_tensor *ids(te_ctx *te, int seed) { return test_i32(te, SHAPE(TOKENS, 1), test_integers(TOKENS, (uint64_t)seed, 0, WORDS)); }

typedef struct listing {
    char text[8192];
    uint64_t hash;
} listing;
static bool list_tensor(void *user, te_module *m, const char *path, te_tensor *x, te_entry_kind kind) {
    listing *l = (listing *)user;
    (void)m;
    snprintf(l->text + strlen(l->text), sizeof l->text - strlen(l->text), "%s\n", path);
    for (int grad = 0; grad < 2; grad++) {
        te_tensor *t = grad ? te_tensor_grad(x) : x;
        const float *v = t ? test_read(t) : NULL;
        for (int64_t i = 0; t && i < te_tensor_numel(t); i++) {
            uint32_t bits;
            memcpy(&bits, v + i, 4);
            l->hash = (l->hash ^ bits ^ (uint64_t)kind) * 0x100000001B3u;
        }
    }
    return true;
}
static listing listing_of(te_module *m) {
    listing l = {"", 0xCBF29CE484222325u};
    te_module_visit_tensors(m, list_tensor, &l);
    return l;
}

/* One step, the container's way or child after child. */
static float step(te_ctx *te, te_module *m, bool by_hand, const te_recipe *recipe, te_microbatch microbatch) {
    te_autocast_desc cast = {0};
    te_forward_args args = {0};
    te_rotary_desc rotary = {0};
    cast.recipe = recipe;
    cast.disabled = !recipe;
    args.input = ids(te, 1);
    args.is_first_microbatch = microbatch;
    args.rotary = &rotary;
    te_autocast_begin(te, &cast);
    if (by_hand)
        for (int i = 0; i < te_module_num_children(m); i++) {
            te_forward_with(te_module_child(m, i), &args);
            args.input = args.outputs.out;
        }
    else
        te_forward_with(m, &args);
    te_autocast_end(te);
    te_tensor *loss = te_cross_entropy(args.outputs.out, ids(te, 2), NULL);
    te_backward(loss);
    return (float)te_tensor_item(loss);
}

TE_TEST_DEVICES(sequential_is_its_children_in_order) {
    te_recipe recipes[3] = {te_recipe_current_scaling(), te_recipe_delayed_scaling(), te_recipe_current_scaling()};
    for (int r = 0; r < 3; r++) {
        listing end[2];
        float loss[2];
        for (int by_hand = 0; by_hand < 2; by_hand++) {
            te_module *m = model(te);
            REQUIRE_OK(te);
            te_seed(te, 9);
            loss[by_hand] = step(te, m, by_hand == 1, r ? &recipes[r] : NULL, r == 2 ? TE_MICROBATCH_FIRST : TE_MICROBATCH_NONE);
            loss[by_hand] += step(te, m, by_hand == 1, r ? &recipes[r] : NULL, r == 2 ? TE_MICROBATCH_LATER : TE_MICROBATCH_NONE);
            end[by_hand] = listing_of(m);
            te_module_destroy(m);
        }
        test_case("recipe %d", r);
        CHECK(loss[0] > 0);
        if (r == 1) { /* the norm in front of the last Linear leaves codes of numbers that no rounding to bf16 (2^-9) has come before: a few codes differ */
            CHECK_MSG(fabs(loss[0] - loss[1]) < 2e-3 * loss[0], "%g and %g", loss[0], loss[1]);
        } else {
            CHECK(loss[0] == loss[1]);
            CHECK(end[0].hash == end[1].hash); /* every parameter, state and gradient, to the bit */
        }
        CHECK_STR(end[0].text, "0.weight\n");
        CHECK_STR(end[0].text, "1.self_attention.layernorm_qkv.weight\n");
        CHECK_STR(end[0].text, "2.layernorm_mlp.fc2_weight\n");
        CHECK_STR(end[0].text, "3.weight\n4.weight\n4.bias\n");
        if (r == 1) CHECK_STR(end[0].text, "4.fp8_amax_history_fwd\n");
    }
    CHECK_OK(te);
}

TE_TEST_DEVICES(sequential_is_found_frozen_printed_and_replaced) {
    te_module *m = model(te);
    char text[4096], path[128];
    REQUIRE_OK(te);
    CHECK_EQ_INT(te_module_num_children(m), 5);
    CHECK_STR(te_module_get_class(m)->name, "Sequential");
    CHECK(te_module_find(m, "1.self_attention.proj") != NULL && te_module_parent(te_module_find(m, "4")) == m);
    CHECK_STR(te_module_path(te_module_find(m, "2.layernorm_mlp"), path, sizeof path), "2.layernorm_mlp");
    te_module_print(m, text, sizeof text);
    CHECK_STR(text, "sequential: Sequential\n  0: Embedding\n");
    te_module_set_requires_grad(m, false);
    te_module_set_requires_grad(te_module_find(m, "4"), true);
    step(te, m, false, NULL, TE_MICROBATCH_NONE);
    CHECK(te_tensor_grad(te_module_parameter(te_module_find(m, "4"), "weight")) != NULL);
    CHECK(te_tensor_grad(te_module_parameter(te_module_find(m, "0"), "weight")) == NULL);
    te_module_train(m, false);
    CHECK(!te_module_is_training(te_module_find(m, "1.self_attention")));
    CHECK(te_module_add_child(m, "head", linear(te, WORDS, 3, false)) != NULL); /* grows */
    te_module_destroy(te_module_child(m, 2));                                  /* shrinks */
    te_tensor *y = te_forward(m, ids(te, 3));
    REQUIRE_OK(te);
    CHECK(te_tensor_ndim(y) == 3 && te_tensor_shape(y)[2] == 3);
    te_module_destroy(m);
    CHECK_OK(te);
}

static bool note_role(void *user, const te_quantizer_role *role, const te_quant_stats *stats) {
    char *text = (char *)user;
    (void)stats;
    snprintf(text + strlen(text), 200, "%s ", role->name);
    return true;
}
/* Paths, files, errors and inspections have the names that children were made with; a number stands for none, for one with a dot, and for one that two have. */
TE_TEST_DEVICES(sequential_keeps_the_names_of_its_children) {
    static const char *const names[] = {"up", NULL, "a.b", "twice", "twice", "down"};
    te_module *list[8], *m;
    te_recipe r = te_recipe_current_scaling();
    char text[4096] = "", path[64];
    for (int i = 0; i < COUNT(names); i++) {
        te_linear_desc d = {0};
        d.in_features = d.out_features = WIDTH;
        d.gemm.params_dtype = TE_BF16;
        d.name = names[i];
        list[i] = te_linear_create(te, &d);
    }
    list[6] = te_identity_create(te, "last");
    list[7] = te_sequential_create(te, NULL, 0);
    m = te_sequential_create(te, list, 8);
    REQUIRE_OK(te);
    CHECK_STR(te_module_path(list[0], path, sizeof path), "up");
    CHECK_STR(te_module_path(list[1], path, sizeof path), "1");
    CHECK_STR(te_module_path(list[2], path, sizeof path), "2");
    CHECK_STR(te_module_path(list[3], path, sizeof path), "3");
    CHECK_STR(te_module_path(list[4], path, sizeof path), "4");
    CHECK(te_module_find(m, "down") == list[5] && te_module_find(m, "last") == list[6] && te_module_find(m, "7") == list[7] && !te_module_find(m, "0"));
    te_quant_inspect(te, true);
    te_no_grad_begin(te);
    CHECK(test_forward(m, &r, te_tensor_full(te, TE_BF16, SHAPE(16, WIDTH), 1)) != NULL);
    te_no_grad_end(te);
    te_quant_stats_visit(te, note_role, text);
    te_quant_inspect(te, false);
    CHECK_STR(text, "up up 1 1 2 2 3 3 4 4 down down ");
    CHECK_EQ_INT(te_model_save(te, test_path("named.safetensors"), m, NULL, NULL, 0), TE_OK);
    te_safetensors *f = te_safetensors_open(te, test_path("named.safetensors"));
    CHECK(te_safetensors_find(f, "up.weight") && te_safetensors_find(f, "down.bias") && te_safetensors_find(f, "1.weight"));
    te_safetensors_close(f);
    CHECK(te_forward(m, te_tensor_full(te, TE_BF16, SHAPE(16, WIDTH / 2), 1)) == NULL);
    CHECK_ERROR(te, TE_ERR_SHAPE, "up");
    te_module_destroy(m);
    CHECK_OK(te);
}

TE_TEST_DEVICES(sequential_goes_into_checkpoints_and_graphs) {
    te_module *m = model(te), *other;
    te_fused_adam_desc d = {0};
    REQUIRE_OK(te);
    te_warmup_begin(te);
    step(te, m, false, NULL, TE_MICROBATCH_NONE);
    te_warmup_end(te);
    te_optimizer *adam = te_fused_adam_create(te, m, &d);
    step(te, m, false, NULL, TE_MICROBATCH_NONE);
    CHECK_EQ_INT(te_optimizer_step(adam), TE_OK);
    const char *path = test_path("model.safetensors");
    CHECK_EQ_INT(te_model_save(te, path, m, adam, NULL, 0), TE_OK);
    other = model(te);
    CHECK(listing_of(m).hash != listing_of(other).hash);
    CHECK_EQ_INT(te_model_load(te, path, other, NULL), TE_OK);
    CHECK(listing_of(m).hash == listing_of(other).hash);
    te_tensor *in = ids(te, 1);
    te_module_train(m, false);
    const float *want = test_read(te_forward(m, in));
    if (te_graph_begin(te) == TE_OK) {
        te_tensor *y = te_forward(m, in);
        te_graph *graph = te_graph_end(te);
        REQUIRE_OK(te);
        CHECK_EQ_INT(te_graph_launch(graph), TE_OK);
        CHECK_TENSOR(y, want, 0, 0); /* the same calls */
        te_graph_destroy(graph);
    } else
        CHECK_ERROR(te, TE_ERR_LIBRARY, "graph");
    te_optimizer_destroy(adam);
    te_module_destroy(m);
    te_module_destroy(other);
    CHECK_OK(te);
}

/* The output of a child goes when the next one has run: many layers take the memory of two outputs. */
TE_TEST_DEVICES(sequential_keeps_no_outputs_that_nobody_needs) {
    enum { ROWS = 1024 };
    size_t peak[2];
    for (int i = 0; i < 2; i++) {
        int n = i ? 24 : 4;
        te_module *list[24];
        for (int k = 0; k < n; k++) list[k] = norm(te, 64);
        te_module *m = te_sequential_create(te, list, n);
        REQUIRE_OK(te);
        te_scope_begin(te);
        te_no_grad_begin(te);
        te_tensor *x = te_tensor_normal(te, TE_BF16, SHAPE(ROWS, 64), 0, 1);
        size_t before = te_memory_get_stats(te).allocated;
        te_memory_reset_peak(te);
        CHECK(te_forward(m, x) != NULL);
        peak[i] = te_memory_get_stats(te).peak_allocated - before;
        te_no_grad_end(te);
        te_scope_end(te);
        te_module_destroy(m);
    }
    CHECK_EQ_INT(peak[1], peak[0]);
    CHECK_OK(te);
}

static int destroyed;
static void count_destroy(te_module *self) {
    (void)self;
    destroyed++;
}
static te_result same_forward(te_module *self, te_forward_args *args) {
    (void)self;
    args->outputs.out = args->input;
    return TE_OK;
}
static const te_module_class same_class = {"Same", 0, same_forward, count_destroy, NULL};
static te_module *same(te_ctx *te) { return te_module_create(te, &same_class, NULL); }

TE_TEST_DEVICES(sequential_of_none_of_one_and_of_sequentials) {
    te_tensor *x = te_tensor_full(te, TE_F32, SHAPE(3), 2);
    te_module *none = te_sequential_create(te, NULL, 0);
    CHECK(te_forward(none, x) == x);
    te_module *in[2] = {same(te), same(te)}, *inner = te_sequential_create(te, in, 2), *out[2] = {none, inner};
    te_module *outer = te_sequential_create(te, out, 2);
    REQUIRE_OK(te);
    CHECK(te_forward(outer, x) == x);
    CHECK(te_module_find(outer, "1.0") == in[0] && te_module_find(outer, "1.1") == in[1]);
    destroyed = 0;
    te_module_destroy(outer);
    CHECK_EQ_INT(destroyed, 2);
    te_module *last = linear(te, 4, 4, true), *two = te_sequential_create(te, &last, 1);
    te_forward_args args = {0};
    args.input = te_tensor_zeros(te, TE_BF16, SHAPE(2, 4));
    CHECK(te_forward_with(two, &args) != NULL && args.outputs.bias != NULL); /* (y, bias): the last one's outputs are the container's */
    te_module_destroy(two);
    CHECK_OK(te);
}

TE_TEST(sequential_refuses_what_it_cannot_own) {
    te_ctx *te = test_context("cpu"), *second = test_context("cpu");
    te_module *list[3] = {same(te), NULL, same(te)};
    destroyed = 0;
    CHECK(te_sequential_create(te, list, 3) == NULL);
    CHECK_ERROR(te, TE_ERR_INVALID, "child 1 of 3 is NULL");
    CHECK_EQ_INT(destroyed, 2); /* nobody else has them */
    list[0] = same(te);
    list[1] = list[0];
    CHECK(te_sequential_create(te, list, 2) == NULL);
    CHECK_ERROR(te, TE_ERR_INVALID, "in this list already");
    CHECK_EQ_INT(destroyed, 3);
    for (int inside_first = 0; inside_first < 2; inside_first++) { /* one inside another, which goes with it */
        te_module *parent = same(te), *child = te_module_add_child(parent, "child", same(te));
        list[inside_first] = parent;
        list[!inside_first] = child;
        CHECK(te_sequential_create(te, list, 2) == NULL);
        CHECK_ERROR(te, TE_ERR_INVALID, "is a child of Same already");
        CHECK_EQ_INT(destroyed, 5 + 2 * inside_first);
    }
    te_module *parent = same(te);
    list[0] = te_module_add_child(parent, "kept", same(te));
    CHECK(te_sequential_create(te, list, 1) == NULL);
    CHECK_ERROR(te, TE_ERR_INVALID, "\"kept\"");
    CHECK_EQ_INT(destroyed, 7);
    te_module_destroy(parent);
    list[0] = same(te);
    list[1] = same(second);
    CHECK(te_sequential_create(te, list, 2) == NULL);
    CHECK_ERROR(te, TE_ERR_INVALID, "another context");
    CHECK(te_sequential_create(te, NULL, 2) == NULL);
    CHECK_ERROR(te, TE_ERR_INVALID, "NULL");
    CHECK(te_sequential_create(te, list, -1) == NULL);
    CHECK_ERROR(te, TE_ERR_INVALID, "-1 children");
    CHECK(te_sequential_create(NULL, NULL, 0) == NULL);
    list[0] = linear(te, 4, 4, true);
    list[1] = linear(te, 4, 4, false);
    te_module *m = te_sequential_create(te, list, 2);
    CHECK(te_forward(m, te_tensor_zeros(te, TE_BF16, SHAPE(2, 4))) == NULL);
    CHECK_STR(te_error(te), "child \"0\", a Linear, gives its bias beside its output");
    CHECK_ERROR(te, TE_ERR_STATE, "return_bias");
    CHECK(te_forward(m, te_tensor_zeros(te, TE_BF16, SHAPE(2, 5))) == NULL); /* a child's own error, with its path */
    CHECK_ERROR(te, TE_ERR_SHAPE, "0: linear");
    te_module_destroy(m);
    CHECK_OK(te);
    CHECK_OK(second);
}

/* Every request for memory fails once: the children are gone, as after any other refusal. */
TE_TEST(sequential_without_memory) {
    bool whole = false;
    for (int k = 1; !whole && k < 100; k++) {
        purse *p = new_purse();
        te_ctx_desc desc = purse_desc(p, NULL);
        te_module *list[20];
        test_case("request %d", k);
        te_ctx *te = te_ctx_create(&desc);
        for (int i = 0; i < COUNT(list); i++) list[i] = same(te);
        REQUIRE_OK(te);
        destroyed = 0;
        p->fail_at = p->calls + k;
        te_module *m = te_sequential_create(te, list, COUNT(list));
        whole = m != NULL;
        p->fail_at = 0;
        if (!whole) CHECK_ERROR(te, TE_ERR_OUT_OF_MEMORY, "");
        CHECK_EQ_INT(destroyed, whole ? 0 : COUNT(list));
        te_module_destroy(m);
        te_ctx_destroy(te);
        must_be_empty(p);
    }
    CHECK(whole);
}
