/* tests/train/test_retry.c: a training step for which memory ran out, wherever it did, and that is done again: it leaves the bits of a step that
 * never failed. Where a step begins and ends. */
#include "../faults/purse.h"

enum { HIDDEN = 16, ROWS = 6, STEPS = 3 };

typedef struct kind_of_step {
    const char *name;
    te_recipe_kind recipe; /* TE_RECIPE_NONE: high precision */
    bool primary;          /* weights are stored quantized */
    bool microbatches;     /* two forwards and backwards a step */
    bool dropout, clip, decay_matrices_only, host_functions;
    bool device;    /* requests for its memory are refused, and not those for host memory */
    int every;      /* request is refused, to save time; 0 => 1 */
    bool stays_out; /* until the error has been cleared: what is given back then has to wait */
    bool offload;   /* activations go to host memory */
    bool sgd;       /* with dampening, whose first step differs from later ones */
    bool scaled;    /* the loss, by a te_grad_scaler; and parameters have groups */
    bool attention; /* attention in FP8, too */
} kind_of_step;

static te_result delayed_slots(void *user, const te_quantizer_role *role, te_quantizer_desc *desc) {
    (void)user;
    desc->kind = role->tensor_type == TE_TENSOR_WEIGHT ? TE_QUANT_CURRENT : TE_QUANT_DELAYED;
    return TE_OK;
}
static float largest(void *user, const float *history, int length) {
    float amax = 0;
    (void)user;
    for (int i = 0; i < length; i++) amax = fmaxf(amax, history[i]);
    return amax;
}
static te_recipe recipe_of(const kind_of_step *k) {
    te_recipe r = k->recipe == TE_RECIPE_CUSTOM    ? te_recipe_custom(delayed_slots, NULL)
                  : k->recipe == TE_RECIPE_CURRENT ? te_recipe_current_scaling()
                  : k->recipe == TE_RECIPE_BLOCK   ? te_recipe_block_scaling()
                  : k->recipe == TE_RECIPE_MXFP8   ? te_recipe_mxfp8()
                  : k->recipe == TE_RECIPE_NVFP4   ? te_recipe_nvfp4()
                                                   : te_recipe_delayed_scaling();
    if (k->recipe == TE_RECIPE_DELAYED || k->recipe == TE_RECIPE_CUSTOM || k->recipe == TE_RECIPE_NONE) r.delayed.amax_history_len = 3;
    if (k->host_functions) r.delayed.amax_fn = largest;
    r.fp8_dpa = k->attention;
    return r;
}

typedef struct run {
    te_ctx *te;
    te_module *m;
    te_optimizer *adam;
    te_grad_scaler *scaler; /* or NULL */
    const kind_of_step *kind;
} run;

static run make_run(te_ctx *te, const kind_of_step *k) {
    te_transformer_layer_desc layer = {0};
    te_fused_adam_desc adam = {0};
    te_quantized_model_init_desc init = {0};
    te_recipe recipe = recipe_of(k);
    static const te_param_group groups[] = {{.pattern = "*bias", .no_weight_decay = true, .lr = 0.02f, .beta1 = 0.5f}};
    run r = {te, NULL, NULL, NULL, k};
    layer.hidden_size = layer.ffn_hidden_size = HIDDEN;
    layer.attention.num_attention_heads = 2;
    layer.gemm.init.std = 0.2f;
    if (k->dropout) layer.hidden_dropout = layer.attention.attention_dropout = 0.2f;
    adam.max_grad_norm = k->clip ? 1 : 0;
    adam.weight_decay = 0.1f;
    adam.decay_matrices_only = k->decay_matrices_only;
    adam.lr = 0.05f;
    if (k->scaled) adam.groups = groups, adam.num_groups = 1;
    if (k->scaled) r.scaler = te_grad_scaler_create(te, &(te_grad_scaler_desc){.init_scale = 64, .growth_interval = 2});
    init.recipe = &recipe;
    te_seed(te, 7);
    if (k->primary) te_quantized_model_init_begin(te, &init);
    r.m = te_transformer_layer_create(te, &layer);
    if (k->primary) te_quantized_model_init_end(te);
    r.adam = k->sgd ? te_fused_sgd_create(te, r.m, &(te_fused_sgd_desc){.lr = 0.05f, .momentum = 0.9f, .dampening = 0.5f}) : te_fused_adam_create(te, r.m, &adam);
    return r;
}
static void end_run(run *r) {
    te_optimizer_destroy(r->adam);
    te_grad_scaler_destroy(r->scaler);
    te_module_destroy(r->m);
}

/* A step as users write it, checked by nobody, on data that `factor` makes larger. */
static void step(run *r, int index, float factor) {
    te_ctx *te = r->te;
    te_recipe recipe = recipe_of(r->kind);
    te_autocast_desc cast = {0};
    const te_cpu_offload_desc offload = {.min_bytes = 1, .window_bytes = 1};
    float x[ROWS * HIDDEN];
    cast.recipe = &recipe;
    cast.disabled = r->kind->recipe == TE_RECIPE_NONE;
    for (int micro = 0; micro <= r->kind->microbatches; micro++) {
        te_forward_args args = {0};
        for (int i = 0; i < ROWS * HIDDEN; i++) x[i] = factor * (float)((i * 37 + index * 11 + micro * 5) % 29 - 14) / 8;
        te_scope_begin(te);
        args.input = te_tensor_from_f32(te, TE_BF16, SHAPE(ROWS / 2, 2, HIDDEN), x);
        args.is_first_microbatch = !r->kind->microbatches ? TE_MICROBATCH_NONE : micro ? TE_MICROBATCH_LATER : TE_MICROBATCH_FIRST;
        if (r->kind->offload) te_cpu_offload_begin(te, &offload);
        te_autocast_begin(te, &cast);
        te_tensor *y = te_forward_with(r->m, &args);
        te_autocast_end(te);
        if (r->kind->offload) te_cpu_offload_end(te);
        te_tensor *loss = te_mse_loss(y, args.input);
        te_backward(r->scaler ? te_grad_scaler_scale(r->scaler, loss) : loss);
        te_scope_end(te);
    }
    if (!r->scaler) te_optimizer_step(r->adam);
    else if (te_grad_scaler_step(r->scaler, r->adam) == TE_OK) te_grad_scaler_update(r->scaler);
}

/* STEPS steps. At step `at` request number `fail` is refused, to a step on other data; what is left of it is then seen in the same step on its own data,
 * and in those that follow. Returns false when no request was left to refuse, or the step did without. */
enum { UNHARMED, NO_MORE, DID_WITHOUT };
static int train(const kind_of_step *k, int at, int64_t fail, uint64_t *hash) {
    purse p = {0};
    te_ctx_desc desc = k->device ? purse_desc(NULL, &p) : purse_desc(&p, NULL);
    int outcome = UNHARMED;
    te_ctx *te = te_ctx_create(&desc);
    run r = make_run(te, k);
    for (int i = 0; i < STEPS && outcome == UNHARMED; i++) {
        te_rng_set(te, 5, 100 * (uint64_t)i);
        if (i == at && fail) {
            uint64_t before = test_hash(r.m);
            if (k->device) te_memory_trim(te);
            p.fail_at = p.calls + fail;
            p.stays_out = k->device || k->stays_out; /* a device that refuses once is asked again, after the pool has given back all it can */
            step(&r, i, 3);
            if (te_ok(te)) {
                outcome = p.refused ? DID_WITHOUT : NO_MORE;
                break;
            }
            CHECK_ERROR(te, TE_ERR_OUT_OF_MEMORY, "");
            p.fail_at = 0;
            if (i > 0 && !k->stays_out) CHECK_MSG(test_hash(r.m) == before, "the step that failed has left traces"); /* the first one makes scales */
            te_optimizer_zero_grad(r.adam);
            te_rng_set(te, 5, 100 * (uint64_t)i);
        }
        step(&r, i, 1);
        CHECK_OK(te);
        te_clear_error(te);
    }
    if (outcome == UNHARMED) {
        *hash = test_hash(r.m);
        CHECK_EQ_INT(te_optimizer_steps(r.adam), STEPS);
    }
    end_run(&r);
    te_ctx_destroy(te);
    must_be_empty(&p);
    return outcome;
}

static void retry(const kind_of_step *k) {
    /* The requests of a step are refused one by one without a sanitizer; sanitizers take every sixteenth or 43rd of them. */
    const int every = test_every_of(43, 8);
    for (int at = 0; at < 2; at++) { /* the step that makes the scales, and one that finds them */
        uint64_t want = 0, got = 0;
        int64_t tried = 0, other = 0;
        test_case("%s", k->name);
        REQUIRE(train(k, at, 0, &want) == UNHARMED);
        for (int64_t fail = 1 + at % every;; fail += every * (k->every ? k->every : 1)) {
            test_case("%s: request %lld of step %d is refused", k->name, (long long)fail, at);
            int outcome = train(k, at, fail, &got);
            if (outcome == NO_MORE) break;
            tried += outcome == UNHARMED;
            other += outcome == UNHARMED && got != want;
        }
        test_case("%s, step %d", k->name, at);
        CHECK_MSG(other == 0, "%lld of %lld steps that were done again left other bits", (long long)other, (long long)tried);
        CHECK_MSG(tried > (k->device ? 10 : 60) / every, "only %lld steps failed", (long long)tried);
    }
}
#define RETRY(words, ...)                                      \
    TE_TEST(a_step_done_again_##words) {                   \
        const kind_of_step k = {.name = #words, .recipe = __VA_ARGS__}; \
        retry(&k);                                             \
    }
RETRY(high_precision, TE_RECIPE_NONE, .dropout = true, .clip = true, .decay_matrices_only = true)
RETRY(delayed, TE_RECIPE_DELAYED, .dropout = true, .clip = true, .decay_matrices_only = true)
RETRY(delayed_on_the_device, TE_RECIPE_DELAYED, .dropout = true, .clip = true, .device = true)
RETRY(delayed_out_for_long, TE_RECIPE_DELAYED, .dropout = true, .every = 2, .stays_out = true)
RETRY(high_precision_by_sgd, TE_RECIPE_NONE, .sgd = true)
RETRY(high_precision_scaled, TE_RECIPE_NONE, .scaled = true, .clip = true)
RETRY(current_scaled_stored_weights, TE_RECIPE_CURRENT, .scaled = true, .primary = true)
RETRY(delayed_scaled_on_the_device, TE_RECIPE_DELAYED, .scaled = true, .device = true)
RETRY(delayed_by_sgd_on_the_device, TE_RECIPE_DELAYED, .sgd = true, .device = true)
RETRY(delayed_microbatches, TE_RECIPE_DELAYED, .microbatches = true, .every = 3)
RETRY(delayed_stored_weights, TE_RECIPE_DELAYED, .primary = true, .clip = true, .decay_matrices_only = true)
RETRY(delayed_host_functions, TE_RECIPE_DELAYED, .host_functions = true)
RETRY(delayed_offloaded, TE_RECIPE_DELAYED, .dropout = true, .offload = true)
RETRY(current_offloaded_on_the_device, TE_RECIPE_CURRENT, .offload = true, .device = true)
RETRY(custom_delayed_slots, TE_RECIPE_CUSTOM)
RETRY(delayed_attention, TE_RECIPE_DELAYED, .dropout = true, .attention = true, .every = 2)
RETRY(current_attention_on_the_device, TE_RECIPE_CURRENT, .attention = true, .device = true)
RETRY(current, TE_RECIPE_CURRENT)
RETRY(current_stored_weights, TE_RECIPE_CURRENT, .primary = true, .dropout = true, .decay_matrices_only = true)
RETRY(block_stored_weights, TE_RECIPE_BLOCK, .primary = true)
RETRY(mxfp8_stored_weights, TE_RECIPE_MXFP8, .primary = true)
RETRY(nvfp4, TE_RECIPE_NVFP4, .dropout = true, .every = 5)
RETRY(nvfp4_stored_weights_on_the_device, TE_RECIPE_NVFP4, .primary = true, .device = true)

/* ---- where a step begins and ends ------------------------------------------------------------------------------- */

static te_module *small_linear(te_ctx *te) {
    te_linear_desc d = {0};
    d.in_features = d.out_features = 32;
    d.gemm.no_bias = true;
    return te_linear_create(te, &d);
}
/* Of delayed scaling, with one row of history more than updates; on x = value everywhere. */
static void half_step(te_module *m, float value, bool backward) {
    te_ctx *te = te_module_ctx(m);
    te_recipe r = te_recipe_delayed_scaling();
    r.delayed.amax_history_len = 4;
    te_scope_begin(te);
    te_tensor *y = test_forward(m, &r, te_tensor_full(te, TE_BF16, SHAPE(4, 32), value));
    if (backward) te_backward(te_sum_all(y));
    te_scope_end(te);
}
/* Scales and histories of both directions, one after the other. */
enum { SCALES = 3 + 12 + 2 + 8 };
static const float *scales(te_module *m) {
    static const char *const names[] = {"fp8_scale_fwd", "fp8_amax_history_fwd", "fp8_scale_bwd", "fp8_amax_history_bwd"};
    float *all = (float *)test_alloc(SCALES * sizeof(float)), *at = all;
    for (int i = 0; i < 4; i++) {
        te_tensor *x = te_module_parameter(m, names[i]);
        memcpy(at, test_read(x), (size_t)te_tensor_numel(x) * sizeof(float));
        at += te_tensor_numel(x);
    }
    CHECK_EQ_INT(at - all, SCALES);
    return all;
}
/* A forward that fails in the middle of a step, as any call might. */
static void fail_forward(te_module *m) {
    te_ctx *te = te_module_ctx(m);
    te_scope_begin(te);
    CHECK(!te_forward(m, te_tensor_zeros(te, TE_BF16, SHAPE(4, 31))));
    te_scope_end(te);
    CHECK_ERROR(te, TE_ERR_SHAPE, "[4, 31]");
}

/* After any error all that the step has moved goes back, and only that. */
TE_TEST_DEVICES(a_failed_step_is_taken_back) {
    te_module *m = small_linear(te);
    te_optimizer *adam = te_fused_adam_create(te, m, NULL);
    half_step(m, 1, true);
    te_optimizer_step(adam);
    const float *before = scales(m);
    half_step(m, 5, true);
    half_step(m, 7, true); /* a second microbatch belongs to it */
    CHECK(memcmp(scales(m), before, SCALES * sizeof(float)) != 0);
    fail_forward(m);
    CHECK_BYTES("taken back", scales(m), before, SCALES * sizeof(float));
    te_optimizer_zero_grad(adam);
    half_step(m, 5, true);
    te_optimizer_step(adam);
    const float *after = scales(m);
    fail_forward(m); /* that step has ended */
    CHECK_BYTES("kept", scales(m), after, SCALES * sizeof(float));
    te_clear_error(te);
    CHECK_BYTES("kept", scales(m), after, SCALES * sizeof(float));
    /* an error that is no call of the step leaves the step alone */
    half_step(m, 9, true);
    after = scales(m);
    CHECK(!te_tensor_view(te_tensor_zeros(te, TE_F32, SHAPE(2)), SHAPE(3)));
    te_clear_error(te);
    CHECK_BYTES("of a step under way", scales(m), after, SCALES * sizeof(float));
    te_optimizer_step(adam);
    CHECK_OK(te);
    te_optimizer_destroy(adam);
    te_module_destroy(m);
}

/* Without an optimizer each region is a step. */
TE_TEST_DEVICES(without_an_optimizer_a_step_is_a_region) {
    te_module *m = small_linear(te);
    half_step(m, 1, true);
    half_step(m, 5, true);
    const float *before = scales(m);
    half_step(m, 7, true);
    fail_forward(m);
    CHECK_BYTES("one region is taken back", scales(m), before, SCALES * sizeof(float));
    CHECK_OK(te);
    te_module_destroy(m);
}

/* Scales that were loaded from a file stay, also if an error follows. */
TE_TEST_DEVICES(a_checkpoint_ends_the_step) {
    te_module *m = small_linear(te);
    te_optimizer *adam = te_fused_adam_create(te, m, NULL);
    const char *path = test_path("model.safetensors");
    half_step(m, 1, true);
    te_optimizer_step(adam);
    CHECK_EQ_INT(te_model_save(te, path, m, adam, NULL, 0), TE_OK);
    const float *saved = scales(m);
    half_step(m, 5, true);
    te_optimizer_step(adam);
    half_step(m, 7, true);
    CHECK_EQ_INT(te_model_load(te, path, m, adam), TE_OK);
    CHECK_BYTES("loaded", scales(m), saved, SCALES * sizeof(float));
    fail_forward(m);
    CHECK_BYTES("still so", scales(m), saved, SCALES * sizeof(float));
    CHECK_OK(te);
    te_optimizer_destroy(adam);
    te_module_destroy(m);
}

/* A launch that holds a forward and a backward pass belongs to a step, too. */
TE_TEST_DEVICES(launches_of_graphs_are_taken_back) {
    te_module *m = small_linear(te);
    te_optimizer *adam = te_fused_adam_create(te, m, NULL);
    half_step(m, 1, true);
    te_optimizer_step(adam);
    te_graph_begin(te);
    half_step(m, 5, true);
    te_graph *g = te_graph_end(te);
    REQUIRE_OK(te);
    const float *before = scales(m);
    te_graph_launch(g);
    CHECK(memcmp(scales(m), before, SCALES * sizeof(float)) != 0);
    fail_forward(m);
    CHECK_BYTES("taken back", scales(m), before, SCALES * sizeof(float));
    te_graph_launch(g);
    const float *launched = scales(m);
    te_optimizer_step(adam);
    fail_forward(m);
    CHECK_BYTES("kept", scales(m), launched, SCALES * sizeof(float));
    CHECK_OK(te);
    te_graph_destroy(g);
    te_optimizer_destroy(adam);
    te_module_destroy(m);
}
