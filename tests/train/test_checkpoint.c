/* Checkpoints: training goes on from one as if it had never stopped, bit for bit; what does not fit changes nothing; a save that fails
 * leaves the file that was there. */
#define _GNU_SOURCE
#include "../te_test.h"

/* One transformer layer under a recipe, with dropout, so that the random state matters. */
typedef struct session {
    te_ctx *te;
    te_module *model;
    te_optimizer *adam;
    te_recipe recipe;
    bool fp8;
} session;

static void close_session(void *arg) {
    session *s = (session *)arg;
    te_optimizer_destroy(s->adam);
    te_module_destroy(s->model);
}
static session *open_session(te_ctx *te, te_recipe_kind kind, uint64_t seed) {
    session *s = (session *)test_alloc(sizeof *s);
    s->te = te;
    s->fp8 = kind != TE_RECIPE_NONE;
    s->recipe = kind == TE_RECIPE_DELAYED ? te_recipe_delayed_scaling() : te_recipe_current_scaling();
    if (kind == TE_RECIPE_DELAYED) s->recipe.delayed.amax_history_len = 4;
    te_seed(te, seed);
    s->model = te_transformer_layer_create(te, &(te_transformer_layer_desc){.hidden_size = 32, .ffn_hidden_size = 48, .attention.num_attention_heads = 4,
                                                                           .attention.num_gqa_groups = 2, .norm.normalization = TE_RMSNORM, .activation = TE_SWIGLU,
                                                                           .hidden_dropout = 0.1f});
    s->adam = te_fused_adam_create(te, s->model, &(te_fused_adam_desc){.lr = 0.01f, .max_grad_norm = 1, .weight_decay = 0.1f});
    test_on_end(close_session, s);
    return s;
}
/* The loss of one training step; the batch is a function of the step alone. */
static double train(session *s, int step) {
    te_scope_begin(s->te);
    te_tensor *x = test_tensor(s->te, TE_BF16, SHAPE(8, 2, 32), test_normal(8 * 2 * 32, 100 + (uint64_t)step));
    te_autocast_begin(s->te, &(te_autocast_desc){.recipe = &s->recipe, .disabled = !s->fp8});
    te_tensor *y = te_forward(s->model, x);
    te_autocast_end(s->te);
    te_tensor *loss = te_mse_loss(y, te_scale(x, -0.5f));
    te_backward(loss);
    te_optimizer_set_lr(s->adam, 0.01f / (float)(step + 1));
    te_optimizer_step(s->adam);
    double value = te_tensor_item(loss);
    te_scope_end(s->te);
    return value;
}

/* Each parameter and buffer of one module is in the other, under its path, with the same bytes. */
static bool check_in(void *user, te_module *m, const char *path, te_tensor *x, te_entry_kind kind) {
    const char *dot = strrchr(path, '.');
    char parent[256];
    (void)m, (void)kind;
    snprintf(parent, sizeof parent, "%.*s", dot ? (int)(dot - path) : 0, path);
    te_tensor *y = te_module_parameter(te_module_find((te_module *)user, parent), dot ? dot + 1 : path);
    CHECK_MSG(y && te_tensor_bytes(x) == te_tensor_bytes(y), "%s is missing, or of another size", path);
    if (y && te_tensor_bytes(x) == te_tensor_bytes(y)) CHECK_BYTES(path, test_read_bytes(x), test_read_bytes(y), te_tensor_bytes(x));
    return true;
}

static void resume(te_ctx *te, te_recipe_kind kind) {
    enum { BEFORE = 3, AFTER = 4 };
    const char *path = test_path("model.safetensors");
    double want[AFTER];
    session *s = open_session(te, kind, 7);
    for (int i = 0; i < BEFORE; i++) train(s, i);
    CHECK_EQ_INT(te_model_save(te, path, s->model, s->adam, NULL, 0), TE_OK);
    for (int i = 0; i < AFTER; i++) want[i] = train(s, BEFORE + i);
    REQUIRE_OK(te);
    for (int used = 0; used < 2; used++) { /* into a model that has never run, and into one that has */
        test_case("recipe %d, used %d", (int)kind, used);
        session *t = open_session(te, kind, 8);
        if (used) train(t, 50);
        CHECK_EQ_INT(te_model_load(te, path, t->model, t->adam), TE_OK);
        REQUIRE_OK(te);
        CHECK_EQ_INT(te_optimizer_steps(t->adam), BEFORE);
        CHECK(te_optimizer_lr(t->adam) == 0.01f / BEFORE);
        for (int i = 0; i < AFTER; i++) {
            double got = train(t, BEFORE + i);
            CHECK_MSG(got == want[i], "step %d: the loss is %.9g, not %.9g", BEFORE + i, got, want[i]);
        }
        te_module_visit_tensors(s->model, check_in, t->model);
        te_module_visit_tensors(t->model, check_in, s->model);
    }
    CHECK(strstr(test_log_text(), "ignored") == NULL); /* everything had its place */
}
TE_TEST_DEVICES(checkpoint_resumes_bf16) { resume(te, TE_RECIPE_NONE); }
TE_TEST_DEVICES(checkpoint_resumes_current_scaling) { resume(te, TE_RECIPE_CURRENT); }
TE_TEST_DEVICES(checkpoint_resumes_delayed_scaling) { resume(te, TE_RECIPE_DELAYED); }

TE_TEST(checkpoint_names) {
    te_ctx *te = test_context("cpu");
    session *s = open_session(te, TE_RECIPE_DELAYED, 1);
    const te_metadata metadata[] = {{"note", "a \"b\""}};
    char text[32];
    const char *path = test_path("x");
    train(s, 0);
    te_model_save(te, path, s->model, s->adam, metadata, 1);
    te_safetensors *f = te_safetensors_open(te, path);
    REQUIRE(f);
    static const char *const names[] = {"self_attention.proj.weight", "optimizer/self_attention.proj.weight.exp_avg",
                                        "optimizer/self_attention.proj.weight.exp_avg_sq", "optimizer/self_attention.proj.weight.master_param",
                                        "layernorm_mlp.fp8_scale_fwd", "layernorm_mlp.fp8_amax_history_bwd"};
    for (int i = 0; i < COUNT(names); i++) CHECK_MSG(te_safetensors_find(f, names[i]), "there is no %s", names[i]);
    te_safetensors_close(f);
    CHECK_EQ_INT(te_model_metadata(te, path, "note", text, sizeof text), TE_OK);
    CHECK_STR(text, "a \"b\"");
    CHECK_EQ_INT(te_model_metadata(te, path, "te.steps", text, sizeof text), TE_OK);
    CHECK_STR(text, "1");
    CHECK_EQ_INT(te_model_metadata(te, path, "nothing", text, sizeof text), TE_ERR_INVALID);
    CHECK_ERROR(te, TE_ERR_INVALID, "there is no metadata \"nothing\"");
    te_model_metadata(te, path, "note", text, 5);
    CHECK_ERROR(te, TE_ERR_INVALID, "has 5 characters; the buffer has room for 4");
}

/* A parameter that the program has written since the last step is saved with a master of its new value. */
TE_TEST_DEVICES(checkpoint_of_a_written_parameter) {
    session *s = open_session(te, TE_RECIPE_NONE, 1), *t = open_session(te, TE_RECIPE_NONE, 2);
    const char *path = test_path("written");
    train(s, 0);
    te_tensor_fill(te_module_parameter(te_module_find(s->model, "self_attention.proj"), "weight"), 0.25);
    CHECK_EQ_INT(te_model_save(te, path, s->model, s->adam, NULL, 0), TE_OK);
    train(s, 1);
    CHECK_EQ_INT(te_model_load(te, path, t->model, t->adam), TE_OK);
    train(t, 1);
    CHECK_OK(te);
    CHECK_SAME("model", test_content(t->model), test_content(s->model));
}

/* Weights alone, as other programs write them: the rest stays as it is. */
TE_TEST_DEVICES(checkpoint_of_weights_alone) {
    session *s = open_session(te, TE_RECIPE_NONE, 1), *t = open_session(te, TE_RECIPE_NONE, 2);
    const char *path = test_path("weights");
    uint64_t seed, offset;
    train(s, 0);
    CHECK_EQ_INT(te_model_save(te, path, s->model, NULL, NULL, 0), TE_OK);
    te_rng_set(te, 5, 1000);
    CHECK_EQ_INT(te_model_load(te, path, t->model, NULL), TE_OK);
    te_rng_get(te, &seed, &offset);
    CHECK(seed == 2 && offset < 1000); /* te.h's own file: with its random state */
    CHECK_SAME("weights", test_content(t->model), test_content(s->model));
    CHECK_EQ_INT(te_model_load(te, path, t->model, t->adam), TE_ERR_FORMAT);
    CHECK_ERROR(te, TE_ERR_FORMAT, "which the optimizer has");
    te_model_save(te, path, s->model, s->adam, NULL, 0);
    CHECK_EQ_INT(te_model_load(te, path, t->model, NULL), TE_OK); /* the optimizer's part is not asked for */
    CHECK(strstr(test_log_text(), "ignored") == NULL);
    CHECK_OK(te);
}

static te_result only_forward(te_module *self, te_forward_args *args) {
    (void)self;
    args->outputs.out = args->input;
    return TE_OK;
}
static const te_module_class two_class = {"Two", 0, only_forward, NULL, NULL};
static te_module *make_two(te_ctx *te, te_dtype dtype, int64_t width, const char *second, double value) {
    te_module *m = te_module_create(te, &two_class, "two");
    te_module_add_parameter(m, "first", te_tensor_full(te, TE_F32, SHAPE(2, 3), value));
    te_module_add_parameter(m, second, te_tensor_full(te, dtype, SHAPE(width), value));
    return m;
}

TE_TEST_DEVICES(checkpoint_that_does_not_fit_changes_nothing) {
    const struct {
        te_dtype dtype;
        int64_t width;
        const char *second;
        te_result result;
        const char *says;
    } cases[] = {{TE_F32, 5, "second", TE_ERR_SHAPE, "\"second\" is [4] in the file and [5] here"},
                 {TE_BF16, 4, "second", TE_ERR_DTYPE, "\"second\" is f32 in the file and bf16 here"},
                 {TE_F32, 4, "third", TE_ERR_FORMAT, "there is no tensor \"third\", which the model has"}};
    te_module *m = make_two(te, TE_F32, 4, "second", 1);
    te_optimizer *opt = te_fused_adam_create(te, m, NULL);
    const char *path = test_path("x");
    te_model_save(te, path, m, opt, NULL, 0);
    for (int i = 0; i < COUNT(cases); i++) {
        te_module *n = make_two(te, cases[i].dtype, cases[i].width, cases[i].second, 2);
        test_bytes before = test_content(n);
        te_rng_set(te, 3, 4);
        CHECK_EQ_INT(te_model_load(te, path, n, NULL), cases[i].result);
        CHECK_ERROR(te, cases[i].result, cases[i].says);
        CHECK_SAME("after the refusal", test_content(n), before);
        uint64_t seed, offset;
        te_rng_get(te, &seed, &offset);
        CHECK(seed == 3 && offset == 4);
        te_module_destroy(n);
    }
    /* A file cut short, and no file. */
    te_module *n = make_two(te, TE_F32, 4, "second", 2);
    test_bytes before = test_content(n);
    FILE *f = fopen(path, "r+b");
    uint8_t byte = 0xFF;
    fseek(f, 3, SEEK_SET);
    fwrite(&byte, 1, 1, f);
    fclose(f);
    CHECK_EQ_INT(te_model_load(te, path, n, NULL), TE_ERR_FORMAT);
    te_clear_error(te);
    CHECK_EQ_INT(te_model_load(te, test_path("nobody"), n, NULL), TE_ERR_IO);
    CHECK_ERROR(te, TE_ERR_IO, "nobody");
    CHECK_SAME("after the refusal", test_content(n), before);
    te_optimizer_destroy(opt);
    te_module_destroy(m);
    te_module_destroy(n);
}

TE_TEST(checkpoint_extra_tensors_are_ignored_aloud) {
    te_ctx *te = test_context("cpu");
    te_module *m = make_two(te, TE_F32, 4, "second", 1), *small = te_module_create(te, &two_class, "small");
    te_module_add_parameter(small, "first", te_tensor_zeros(te, TE_F32, SHAPE(2, 3)));
    te_model_save(te, test_path("x"), m, NULL, NULL, 0);
    CHECK_EQ_INT(te_model_load(te, test_path("x"), small, NULL), TE_OK);
    CHECK_STR(test_log_text(), "1 tensors that the model lacks are ignored, the first is \"second\"");
    CHECK(test_read(te_module_parameter(small, "first"))[5] == 1);
    te_module_destroy(m);
    te_module_destroy(small);
}

TE_TEST(checkpoint_damaged_numbers) {
    static const struct {
        const char *steps, *lr, *offset, *says;
    } cases[] = {{"-1", "1", "0", "te.steps"}, {"1.5", "1", "0", "te.steps"}, {"", "1", "0", "te.steps"}, {"99999999999999999999", "1", "0", "te.steps"},
                 {"1", "nan", "0", "te.lr"},   {"1", "-1", "0", "te.lr"},     {"1", "1e99", "0", "te.lr"}, {"1", "1 ", "0", "te.lr"},
                 {"1", "1", "x", "te.offset"}, {"1", "1", "18446744073709551616", "te.offset"}};
    te_ctx *te = test_context("cpu");
    te_module *m = make_two(te, TE_F32, 4, "second", 1);
    te_optimizer *opt = te_fused_adam_create(te, m, NULL);
    te_tensor *zero6 = te_tensor_zeros(te, TE_F32, SHAPE(2, 3)), *zero4 = te_tensor_zeros(te, TE_F32, SHAPE(4));
    const te_safetensors_item items[] = {{"first", zero6}, {"optimizer/first.exp_avg", zero6}, {"optimizer/first.exp_avg_sq", zero6},
                                         {"second", zero4}, {"optimizer/second.exp_avg", zero4}, {"optimizer/second.exp_avg_sq", zero4}};
    test_bytes before = test_content(m);
    for (int i = 0; i < COUNT(cases); i++) {
        const te_metadata metadata[] = {{"te.steps", cases[i].steps}, {"te.lr", cases[i].lr}, {"te.seed", "1"}, {"te.offset", cases[i].offset}};
        test_case("steps %s lr %s offset %s", cases[i].steps, cases[i].lr, cases[i].offset);
        te_safetensors_write(te, test_path("x"), items, COUNT(items), metadata, 4);
        CHECK_EQ_INT(te_model_load(te, test_path("x"), m, opt), TE_ERR_FORMAT);
        CHECK_ERROR(te, TE_ERR_FORMAT, cases[i].says);
        CHECK_SAME("after the refusal", test_content(m), before);
    }
    te_safetensors_write(te, test_path("x"), items, COUNT(items), NULL, 0);
    CHECK_EQ_INT(te_model_load(te, test_path("x"), m, opt), TE_ERR_FORMAT);
    CHECK_ERROR(te, TE_ERR_FORMAT, "\"te.steps\" is missing");
    CHECK_EQ_INT(te_model_load(te, test_path("x"), m, NULL), TE_OK);
    CHECK(test_read(te_module_parameter(m, "second"))[0] == 0);
    te_optimizer_destroy(opt);
    te_module_destroy(m);
}

TE_TEST(checkpoint_save_refuses_and_keeps) {
    te_ctx *te = test_context("cpu"), *other = test_context("cpu");
    te_module *m = make_two(te, TE_F32, 1 << 16, "second", 1), *n = make_two(te, TE_F32, 1 << 16, "second", 2);
    const char *path = test_path("model.safetensors");
    const te_metadata reserved = {"te.steps", "9"};
    CHECK_EQ_INT(te_model_save(te, path, m, NULL, &reserved, 1), TE_ERR_INVALID);
    CHECK_ERROR(te, TE_ERR_INVALID, "te.steps");
    CHECK_EQ_INT(te_model_save(other, path, m, NULL, NULL, 0), TE_ERR_INVALID);
    CHECK_ERROR(other, TE_ERR_INVALID, "another context");
    CHECK_EQ_INT(te_model_save(te, NULL, m, NULL, NULL, 0), TE_ERR_INVALID);
    te_clear_error(te);
    CHECK_EQ_INT(te_model_save(te, path, m, NULL, NULL, 0), TE_OK);
    test_bytes want = test_content(m);
    /* The disk fills up. */
    if (test_limit_files(100000)) {
        te_result result = te_model_save(te, path, n, NULL, NULL, 0);
        test_limit_files(-1);
        CHECK_EQ_INT(result, TE_ERR_IO);
        /* An error is pending still: what it left is not saved either. */
        CHECK_EQ_INT(te_model_save(te, path, n, NULL, NULL, 0), TE_ERR_IO);
        CHECK_ERROR(te, TE_ERR_IO, "model.safetensors");
    }
    CHECK_EQ_INT(te_model_load(te, path, n, NULL), TE_OK);
    CHECK_SAME("the previous file", test_content(n), want);
    te_module_destroy(m);
    te_module_destroy(n);
}

/* Cached quantized weights are made from the weights that a checkpoint brought. */
TE_TEST_DEVICES(checkpoint_renews_cached_weights) {
    te_linear_desc desc = {.in_features = 16, .out_features = 16, .gemm.no_bias = true};
    te_recipe recipe = te_recipe_current_scaling();
    te_module *m = te_linear_create(te, &desc), *n = te_linear_create(te, &desc);
    te_tensor *x = te_tensor_normal(te, TE_BF16, SHAPE(16, 16), 0, 1), *y[3];
    te_model_save(te, test_path("x"), m, NULL, NULL, 0);
    te_no_grad_begin(te);
    te_autocast_begin(te, &(te_autocast_desc){.recipe = &recipe});
    te_forward_with(n, &(te_forward_args){.input = x, .is_first_microbatch = TE_MICROBATCH_FIRST});
    y[0] = te_forward(m, x);
    te_model_load(te, test_path("x"), n, NULL);
    y[1] = te_forward_with(n, &(te_forward_args){.input = x, .is_first_microbatch = TE_MICROBATCH_LATER});
    te_autocast_end(te);
    te_no_grad_end(te);
    REQUIRE_OK(te);
    CHECK_BYTES("output", test_read_bytes(y[1]), test_read_bytes(y[0]), te_tensor_bytes(y[0]));
    te_module_destroy(m);
    te_module_destroy(n);
}

/* A file gives a module scaling state only under the four names and in the sizes that the module would make itself. Entries with similar names are ignored, and the model can read its own
 * files after them. */
TE_TEST(checkpoint_scaling_state_of_others_is_ignored) {
    static const struct {
        const char *name;
        te_dtype dtype;
        int ndim;
        int64_t shape[2];
        bool taken;
    } cases[] = {{"fp8_scale_foo", TE_F32, 1, {1}, false}, {"fp8_scale_fwd", TE_F32, 0, {0}, false}, {"fp8_scale_fwd", TE_F32, 2, {3, 1}, false}, {"fp8_scale_fwd", TE_F32, 1, {4}, false},
                 {"fp8_scale_fwd", TE_BF16, 1, {3}, false}, {"fp8_amax_history_fwd", TE_F32, 1, {3}, false}, {"fp8_amax_history_fwd", TE_F32, 2, {0, 3}, false},
                 {"fp8_amax_history_fwd", TE_F32, 2, {2, 3}, true}, {"fp8_scale_bwd", TE_F32, 1, {2}, true}};
    te_ctx *te = test_context("cpu");
    for (int norm = 0; norm < 2; norm++) /* a norm has no scales: what is right elsewhere is nothing there */
        for (int i = norm ? COUNT(cases) - 1 : 0; i < COUNT(cases); i++) {
            te_linear_desc ld = {.in_features = 4, .out_features = 3};
            te_module *m = norm ? te_rmsnorm_create(te, &(te_norm_desc){.hidden_size = 4}) : te_linear_create(te, &ld);
            REQUIRE(m != NULL);
            const bool taken = cases[i].taken && !norm;
            te_safetensors_item items[3];
            memset(items, 0, sizeof items);
            items[0].name = "weight", items[0].tensor = te_module_parameter(m, "weight");
            items[1].name = cases[i].name, items[1].tensor = te_tensor_zeros(te, cases[i].dtype, cases[i].ndim, cases[i].shape);
            items[2].name = "bias", items[2].tensor = te_module_parameter(m, "bias");
            test_case("%s, %s", norm ? "norm" : "linear", cases[i].name);
            if (norm || i == 0) te_model_save(te, test_path("own"), m, NULL, NULL, 0);
            te_safetensors_write(te, test_path("other"), items, items[2].tensor ? 3 : 2, NULL, 0);
            REQUIRE_OK(te);
            CHECK_EQ_INT(te_model_load(te, test_path("other"), m, NULL), TE_OK);
            CHECK((te_module_parameter(m, cases[i].name) != NULL) == taken);
            if (!taken) {
                CHECK_STR(test_log_text(), "1 tensors that the model lacks are ignored, the first is \"fp8_");
                CHECK_EQ_INT(te_model_load(te, test_path("own"), m, NULL), TE_OK);
            }
            CHECK_OK(te);
            te_module_destroy(m);
        }
}
