/* test_sharding.c: units, their flags, what ranks with other data exchange and when, and the backward pass of a pipeline's stage. */
#include "../dist/ranks.h"

enum { SH_N = 8, SH_ROWS = 4, SH_BATCHES = 4 };

static te_result shell_forward(te_module *m, te_forward_args *args) {
    te_tensor *x = args->input;
    for (int i = 0; i < te_module_num_children(m) && x; i++) x = te_forward(te_module_child(m, i), x);
    args->outputs.out = x;
    return te_error_code(te_module_ctx(m));
}
static const te_module_class shell = {"Shell", 0, shell_forward, NULL, NULL};
static te_module *shell_in(te_module *parent, const char *name) { return te_module_add_child(parent, name, te_module_create(te_module_ctx(parent), &shell, name)); }
static te_module *linear_in(te_module *parent, const char *name) {
    return te_module_add_child(parent, name, te_linear_create(te_module_ctx(parent), &(te_linear_desc){.in_features = SH_N, .out_features = SH_N, .gemm.params_dtype = TE_F32}));
}

/* ---- which units there are ---- */

typedef struct seen_units {
    char names[32][96];
    int n, stop_at;
} seen_units;
static bool see_unit(void *user, te_module *m) {
    seen_units *s = (seen_units *)user;
    te_module_path(m, s->names[s->n++], sizeof s->names[0]);
    return s->n != s->stop_at;
}
/* A multimodal model with experts and a block for the tokens after the next one; units are all modules with a name, but for `model.layers`. */
static te_module *big_model(te_ctx *te) {
    te_module *root = te_module_create(te, &shell, "root"), *model = shell_in(root, "model"), *layers, *mtp;
    linear_in(model, "embed_tokens");
    te_module *tower = shell_in(model, "vision_tower");
    linear_in(shell_in(tower, "vision_model"), "patch");
    linear_in(root, "multi_modal_projector");
    layers = shell_in(model, "layers");
    for (int i = 0; i < 2; i++) {
        char name[16];
        snprintf(name, sizeof name, "%d", i);
        te_module *block = shell_in(layers, name);
        linear_in(block, "self_attn");
        linear_in(shell_in(block, i ? "moe" : "mlp"), "experts");
    }
    linear_in(root, "lm_head");
    mtp = shell_in(shell_in(root, "mtp"), "layers");
    te_module *block = shell_in(mtp, "0");
    linear_in(shell_in(block, "mlp"), "experts");
    return root;
}
static const char *const big_units[] = {"root", "model", "model.embed_tokens", "lm_head", "model.vision_tower", "model.vision_tower.vision_model.patch", "multi_modal_projector",
                                        "model.layers.0.mlp.experts", "model.layers.1.moe.experts", "mtp.layers.0", "mtp.layers.0.mlp.experts"};
static void make_units(te_module *root) {
    te_data_parallel_desc d = {0};
    for (int i = 0; i < COUNT(big_units); i++) CHECK_EQ_INT(te_fsdp_unit(i ? te_module_find(root, big_units[i]) : root, &d), TE_OK);
    CHECK_EQ_INT(te_fsdp_unit(te_module_find(root, "model.layers.0"), &d), TE_OK); /* a block: driven through the units above it */
}
static bool all_flags(te_module *root, const char *path, bool on) {
    te_fsdp_state s;
    return te_fsdp_get_state(te_module_find(root, path), &s) && s.is_last_backward == on && s.reshard_after_backward == on && s.requires_gradient_sync == on;
}
static bool all_units(te_module *root, bool on) {
    bool same = all_flags(root, "", on) && all_flags(root, "model.layers.0", on);
    for (int i = 1; i < COUNT(big_units); i++) same = same && all_flags(root, big_units[i], on);
    return same;
}

TE_TEST(sharding_units_of_a_model) {
    te_ctx *te = test_context("cpu");
    te_module *root = big_model(te);
    seen_units seen = {0};
    CHECK(te_fsdp_units_visit(root, see_unit, &seen) && seen.n == 0);
    make_units(root);
    CHECK(te_fsdp_units_visit(root, see_unit, &seen));
    CHECK_EQ_INT(seen.n, COUNT(big_units));
    for (int i = 0; i < seen.n && i < COUNT(big_units); i++) CHECK_MSG(!strcmp(seen.names[i], big_units[i]), "unit %d is %s, not %s", i, seen.names[i], big_units[i]);
    seen.n = 0;
    seen.stop_at = 3;
    CHECK(!te_fsdp_units_visit(root, see_unit, &seen) && seen.n == 3);
    CHECK(te_fsdp_units_visit(NULL, see_unit, &seen) && !te_fsdp_units_visit(root, NULL, NULL));
    CHECK_ERROR(te, TE_ERR_INVALID, "te_fsdp_units_visit");
    /* a model without an inner one */
    te_module *flat = te_module_create(te, &shell, "flat");
    linear_in(flat, "embed_tokens");
    te_fsdp_unit(flat, &(te_data_parallel_desc){0});
    te_fsdp_unit(te_module_find(flat, "embed_tokens"), &(te_data_parallel_desc){0});
    seen.n = seen.stop_at = 0;
    te_fsdp_units_visit(flat, see_unit, &seen);
    CHECK(seen.n == 2 && !strcmp(seen.names[0], "flat") && !strcmp(seen.names[1], "embed_tokens"));
    te_fsdp_unit(flat, NULL);
    seen.n = 0;
    te_fsdp_units_visit(flat, see_unit, &seen);
    CHECK_EQ_INT(seen.n, 1);
    te_module_destroy(flat);
    te_module_destroy(root);
}

/* Off: untouched. On: deferred before accumulation, on before the last backward pass, of every unit. Under a pipeline the hooks are the schedule's. */
TE_TEST(sharding_step_hooks) {
    te_ctx *te = test_context("cpu");
    te_module *root = big_model(te);
    make_units(root);
    CHECK(all_units(root, true));
    te_prepare_for_grad_accumulation(te, &root, 1);
    CHECK(all_units(root, true));
    CHECK_EQ_INT(te_model_set_fsdp_optimizations(root, true), TE_OK);
    te_prepare_for_grad_accumulation(te, NULL, 0);
    CHECK(all_units(root, true));
    te_prepare_for_grad_accumulation(te, &root, 1);
    CHECK(all_units(root, false) && !te_step_get_is_optim_step(te));
    te_prepare_for_final_backward(te, NULL, 0);
    CHECK(all_units(root, false));
    te_prepare_for_final_backward(te, &root, 1);
    CHECK(all_units(root, true) && te_step_get_is_optim_step(te));
    te_model_set_fsdp_optimizations(root, false);
    te_model_set_requires_grad_sync(root, false);
    te_prepare_for_final_backward(te, &root, 1);
    CHECK(all_units(root, false));
    te_fsdp_set_state(te_module_find(root, "model.layers.0"), (te_fsdp_state){.reshard_after_backward = true});
    te_fsdp_state s;
    CHECK(te_fsdp_get_state(te_module_find(root, "model.layers.0.mlp.experts"), &s) && s.reshard_after_backward && !s.is_last_backward && !s.requires_gradient_sync);
    s.is_last_backward = s.requires_gradient_sync = true;
    te_fsdp_set_state(root, s);
    CHECK(all_units(root, true));
    CHECK_OK(te);
    te_module_destroy(root);
}

/* ---- ranks ---- */

/* How the model is divided into units. */
typedef enum shard_way { WHOLE, UNITS, DELAYED, FUSED, WAYS } shard_way;
typedef struct shard_case {
    shard_way way;
    te_dtype dtype;
    bool uneven; /* the model also has a module that only rank 0 calls, and one that no rank calls */
} shard_case;
static te_module *shard_model(te_ctx *te, const shard_case *c) {
    te_module *list[4];
    te_seed(te, 11);
    for (int i = 0; i < 4; i++) {
        te_linear_desc d = {.in_features = SH_N, .out_features = SH_N, .gemm.params_dtype = c->dtype};
        d.gemm.init.std = 0.3f;
        d.gemm.delay_wgrad_compute = c->way == DELAYED;
        d.gemm.fuse_wgrad_accumulation = c->way == FUSED;
        list[i] = te_linear_create(te, &d);
        if (c->way == FUSED) te_tensor_set_main_grad(te_module_parameter(list[i], "weight"), te_tensor_zeros(te, TE_F32, SHAPE(SH_N, SH_N)));
    }
    te_module *m = te_module_create(te, &shell, "model");
    for (int i = 0; i < 4; i++) {
        char name[16];
        snprintf(name, sizeof name, "%d", i);
        te_module_add_child(m, name, list[i]);
    }
    return m;
}
/* One microbatch's loss: rows of `data`, times `share`. */
static void shard_backward(te_module *m, const shard_case *c, int batch, bool extra, float share) {
    te_ctx *te = te_module_ctx(m);
    te_scope_begin(te);
    te_seed(te, 50 + (uint64_t)batch);
    te_tensor *x = te_tensor_normal(te, c->dtype, SHAPE(SH_ROWS, SH_N), 0, 1);
    x = te_forward(te_module_child(m, 1), te_forward(te_module_child(m, 0), x));
    if (extra) x = te_forward(te_module_child(m, 2), x);
    te_backward(te_scale(te_mean_all(te_activate(x, TE_GELU, NULL)), share));
    if (c->way == DELAYED) te_backward_dw(m);
    te_scope_end(te);
}
static te_tensor *grad_of(te_tensor *x) { return te_tensor_grad(x) ? te_tensor_grad(x) : te_tensor_main_grad(x); }
static bool close_to(te_tensor *got, te_tensor *want, double limit) {
    if (!got || !want) return got == want;
    int64_t n = te_tensor_numel(want);
    float *a = (float *)malloc((size_t)n * sizeof(float)), *b = (float *)malloc((size_t)n * sizeof(float));
    double square = 0, all = 0;
    te_tensor_to_f32(got, a);
    te_tensor_to_f32(want, b);
    for (int64_t i = 0; i < n; i++) {
        square += ((double)a[i] - b[i]) * ((double)a[i] - b[i]);
        all += (double)b[i] * b[i];
    }
    free(a);
    free(b);
    return square <= limit * limit * all;
}
/* Each rank has some of the microbatches, and exchanges with the last; beside it, the whole on this rank. */
static void shard_rank(rank_state *s) {
    const shard_case *c = (const shard_case *)s->arg;
    te_data_parallel_desc d = {.group = s->group};
    /* f32 sums in another order. bf16: each microbatch's gradient is rounded to 8 bits as it is added, in another order. */
    const double limit = c->dtype == TE_F32 ? 1e-6 : 1e-2;
    te_module *m = shard_model(s->te, c), *whole = shard_model(s->te, c);
    const int mine = 2;
    if (s->rank) te_tensor_fill(te_module_parameter(te_module_child(m, 0), "weight"), 3); /* rank 0's counts */
    if (c->way == UNITS) {
        te_tensor_copy(te_module_parameter(te_module_child(m, 0), "weight"), te_module_parameter(te_module_child(whole, 0), "weight"));
        EXPECT(s, te_fsdp_unit(te_module_child(m, 1), &d) == TE_OK && te_fsdp_unit(te_module_child(m, 2), &d) == TE_OK && te_fsdp_unit(m, &d) == TE_OK);
    } else
        EXPECT(s, te_data_parallel(m, &d) == TE_OK);
    te_optimizer *adam[2] = {te_fused_adam_create(s->te, m, &(te_fused_adam_desc){.lr = 1e-3f}), te_fused_adam_create(s->te, whole, &(te_fused_adam_desc){.lr = 1e-3f})};
    for (int step = 0; step < 4; step++) {
        for (int i = 0; i < mine; i++) {
            te_model_set_requires_grad_sync(m, i == mine - 1);
            shard_backward(m, c, step * 10 + s->rank * mine + i, c->uneven && s->rank == 0, 1.0f / (float)mine);
        }
        for (int i = 0; i < mine * s->size; i++) shard_backward(whole, c, step * 10 + i, c->uneven && i < mine, 1.0f / (float)(mine * s->size));
        for (int i = 0; i < 4; i++)
            for (int bias = 0; bias < 2; bias++) {
                te_tensor *a = te_module_parameter(te_module_child(m, i), bias ? "bias" : "weight"), *b = te_module_parameter(te_module_child(whole, i), bias ? "bias" : "weight");
                EXPECT(s, close_to(grad_of(a), grad_of(b), limit));
                EXPECT(s, i < 2 || c->way == FUSED || !grad_of(a) == !(i == 2 && c->uneven));
            }
        te_optimizer_step(adam[0]);
        te_optimizer_step(adam[1]);
        EXPECT(s, c->dtype != TE_F32 || close_to(te_module_parameter(te_module_child(m, 0), "weight"), te_module_parameter(te_module_child(whole, 0), "weight"), 1e-5));
    }
    te_optimizer_destroy(adam[0]);
    te_optimizer_destroy(adam[1]);
    te_module_destroy(m);
    te_module_destroy(whole);
}
TE_TEST(sharding_ranks_equal_one) {
    for (int size = 2; size <= 4; size += 2)
        for (int way = 0; way < WAYS; way++)
            for (int kind = 0; kind < 3; kind++) {
                shard_case c = {(shard_way)way, kind == 1 ? TE_BF16 : TE_F32, kind == 2};
                test_case("%d ranks, way %d, kind %d", size, way, kind);
                run_ranks(size, shard_rank, &c);
            }
}

/* Without a flag nothing travels; a failure on one rank reaches the others; a factor in place of the mean. */
static void shard_flags_rank(rank_state *s) {
    const shard_case c = {WHOLE, TE_F32, false};
    te_module *m = shard_model(s->te, &c);
    te_tensor *w = te_module_parameter(te_module_child(m, 0), "weight");
    te_data_parallel(m, &(te_data_parallel_desc){.group = s->group, .gradient_divide_factor = 1});
    te_model_set_requires_grad_sync(m, false);
    shard_backward(m, &c, s->rank, false, 1);
    te_tensor *alone = te_tensor_empty(s->te, TE_F32, SHAPE(SH_N, SH_N)), *sum = te_tensor_empty(s->te, TE_F32, SHAPE(SH_N, SH_N));
    te_tensor_copy(alone, te_tensor_grad(w));
    te_tensor_copy(sum, alone);
    te_all_reduce(s->group, sum, TE_REDUCE_SUM);
    EXPECT(s, !close_to(alone, sum, 0.1));
    te_model_set_requires_grad_sync(m, true);
    EXPECT(s, te_fsdp_post_backward(m) == TE_OK && close_to(te_tensor_grad(w), sum, 1e-6));
    /* a backward pass of something else exchanges nothing: this rank alone makes it */
    te_tensor *other = te_tensor_set_requires_grad(te_tensor_full(s->te, TE_F32, SHAPE(4), 1), true);
    if (s->rank == 0) EXPECT(s, te_backward(te_mean_all(te_scale(other, 2))) == TE_OK);
    EXPECT(s, close_to(te_tensor_grad(w), sum, 1e-6));
    /* rank 1 cannot play its tape: an activation's weight was written */
    te_tensor *x = te_tensor_full(s->te, TE_F32, SHAPE(SH_ROWS, SH_N), 1), *y = te_forward(m, te_tensor_set_requires_grad(x, true));
    if (s->rank == 1) te_tensor_fill(te_module_parameter(te_module_child(m, 3), "weight"), 0);
    te_result r = te_backward(te_mean_all(y));
    EXPECT(s, r == TE_ERR_STATE);
    te_clear_error(s->te);
    te_module_destroy(m);
}
TE_TEST(sharding_flags_and_failures) { run_ranks(2, shard_flags_rank, NULL); }

/* ---- a pipeline's stage ---- */

static int unit_calls, root_calls, calls_in_order;
static te_result count_unit(void *user, te_module *unit) {
    te_fsdp_state s;
    (void)user;
    CHECK(te_fsdp_get_state(unit, &s) && s.is_last_backward && s.reshard_after_backward && s.requires_gradient_sync);
    unit_calls++;
    calls_in_order += root_calls == 0;
    return TE_OK;
}
static te_result count_root(void *user, te_module *unit) {
    (void)user, (void)unit;
    root_calls++;
    return TE_OK;
}
static void run_stage(te_module *stage, te_backward_type type, bool last, bool per_microbatch, int units, int roots) {
    te_ctx *te = te_module_ctx(stage);
    te_scope_begin(te);
    te_tensor *y = te_forward(stage, te_tensor_full(te, TE_F32, SHAPE(2, SH_N), 1)), *dy = te_tensor_full(te, TE_F32, SHAPE(2, SH_N), 1);
    te_stage_backward_desc d = {.type = type, .stage_outputs = &y, .output_grads = &dy, .num_outputs = 1, .last_backward = last, .reduce_grad_per_microbatch = per_microbatch};
    unit_calls = root_calls = calls_in_order = 0;
    CHECK_EQ_INT(te_stage_backward(stage, &d), TE_OK);
    CHECK_OK(te);
    CHECK_EQ_INT(unit_calls, units);
    CHECK_EQ_INT(root_calls, roots);
    CHECK_EQ_INT(calls_in_order, units);
    te_scope_end(te);
}
TE_TEST(sharding_stage_backward) {
    te_ctx *te = test_context("cpu");
    te_data_parallel_desc d = {.post_backward = count_unit, .root_post_backward = count_root, .no_init_sync = true};
    const shard_case c = {DELAYED, TE_F32, false};
    te_module *stage = shard_model(te, &c), *first = te_module_child(stage, 0), *second = te_module_child(stage, 1);
    test_case("plain");
    run_stage(stage, TE_BACKWARD_FULL, true, false, 0, 0);
    te_tensor *w = te_module_parameter(first, "weight");
    CHECK(te_tensor_grad(w));
    te_module_zero_grad(stage);
    test_case("input, then weight");
    run_stage(stage, TE_BACKWARD_INPUT, false, false, 0, 0);
    CHECK(!te_tensor_grad(w) && te_tensor_grad(te_module_parameter(first, "bias")));
    CHECK_EQ_INT(te_stage_backward(stage, &(te_stage_backward_desc){.type = TE_BACKWARD_WEIGHT}), TE_OK);
    CHECK(te_tensor_grad(w));
    test_case("one unit");
    te_data_parallel(stage, &d);
    run_stage(stage, TE_BACKWARD_FULL, false, false, 0, 0);
    run_stage(stage, TE_BACKWARD_FULL, true, false, 1, 1);
    te_data_parallel(stage, NULL);
    test_case("a unit and two below it"); /* the flag of the step is not asked */
    te_step_set_is_optim_step(te, false);
    te_fsdp_unit(stage, &d);
    te_fsdp_unit(first, &d);
    te_fsdp_unit(second, &d);
    run_stage(stage, TE_BACKWARD_FULL, false, false, 0, 0);
    CHECK(all_flags(stage, "", false) && all_flags(stage, "0", false));
    run_stage(stage, TE_BACKWARD_FULL, true, false, 3, 1);
    CHECK(all_flags(stage, "", true) && all_flags(stage, "0", true));
    run_stage(stage, TE_BACKWARD_FULL, false, true, 3, 0);
    te_fsdp_unit(stage, NULL);
    test_case("a model that is driven");
    te_fsdp_unit(first, NULL);
    te_fsdp_unit(second, NULL);
    te_module *model = te_module_create(te, &shell, "outer"), *units[2];
    units[0] = linear_in(model, "embed_tokens");
    units[1] = linear_in(model, "lm_head");
    te_fsdp_unit(units[0], &d);
    te_fsdp_unit(units[1], &d);
    run_stage(model, TE_BACKWARD_FULL, false, false, 2, 0); /* not driven: te_backward does as the flags say */
    te_model_set_fsdp_optimizations(model, true);
    run_stage(model, TE_BACKWARD_FULL, true, false, 0, 0);
    CHECK(all_flags(model, "embed_tokens", false));
    te_step_set_is_optim_step(te, true);
    run_stage(model, TE_BACKWARD_FULL, false, false, 0, 0);
    run_stage(model, TE_BACKWARD_FULL, true, false, 2, 2);
    CHECK(all_flags(model, "lm_head", true));
    te_module_destroy(model);
    te_module_destroy(stage);
}

/* The backward pass of one rank's stage fails while no flag is set: the other, which is about to exchange, hears of it. */
static void stage_fails_on_one_rank(rank_state *s) {
    const shard_case c = {WHOLE, TE_F32, false};
    const te_data_parallel_desc d = {.group = s->group};
    te_step_set_is_optim_step(s->te, true);
    for (int way = 0; way < 3; way++) {
        te_module *m = shard_model(s->te, &c), *root = m;
        if (way == 0) te_data_parallel(m, &d);
        if (way == 1) te_fsdp_unit(m, &d);
        if (way == 2) {
            root = te_module_create(s->te, &shell, "outer");
            te_module_add_child(root, "lm_head", m);
            te_fsdp_unit(m, &d);
            te_model_set_fsdp_optimizations(root, true);
        }
        te_tensor *y = te_forward(root, te_tensor_full(s->te, TE_F32, SHAPE(2, SH_N), 1)), *dy = te_tensor_full(s->te, TE_F32, SHAPE(2, SH_N + s->rank), 1);
        EXPECT(s, te_ok(s->te));
        te_result r = te_stage_backward(root, &(te_stage_backward_desc){.stage_outputs = &y, .output_grads = &dy, .num_outputs = 1, .last_backward = true});
        EXPECT(s, r != TE_OK && (s->rank || strstr(te_error(s->te), "rank 1 failed")));
        te_clear_error(s->te);
        te_module_destroy(root);
    }
}
TE_TEST(sharding_stages_fail_together) { run_ranks(2, stage_fails_on_one_rank, NULL); }

/* ---- what is refused ---- */

static te_result refuse_unit(void *user, te_module *unit) { return (void)user, (void)unit, TE_ERR_UNSUPPORTED; }
TE_TEST(sharding_refuses) {
    te_ctx *te = test_context("cpu"), *other = test_context("cpu");
    const shard_case c = {WHOLE, TE_F32, false};
    te_module *m = shard_model(te, &c), *child = te_module_child(m, 0);
    te_thread_hub *hub = te_thread_hub_create(1);
    te_group *group = te_thread_group_create(other, hub, 0);
    te_fsdp_state s = {0};
    te_stage_backward_desc d = {.type = (te_backward_type)3};
    CHECK(te_data_parallel(NULL, NULL) == TE_ERR_STATE && te_fsdp_set_state(NULL, s) == TE_ERR_STATE && te_fsdp_post_backward(NULL) == TE_ERR_STATE &&
          te_stage_backward(NULL, &d) == TE_ERR_STATE && te_model_set_requires_grad_sync(NULL, true) == TE_ERR_STATE && te_model_set_fsdp_optimizations(NULL, false) == TE_ERR_STATE &&
          !te_fsdp_get_state(m, &s));
    CHECK_OK(te);
    CHECK(te_data_parallel(m, &(te_data_parallel_desc){.group = group}) == TE_ERR_INVALID);
    CHECK_ERROR(te, TE_ERR_INVALID, "the group is of another context");
    CHECK(te_data_parallel(m, &(te_data_parallel_desc){.gradient_divide_factor = -2}) == TE_ERR_INVALID);
    CHECK_ERROR(te, TE_ERR_INVALID, "gradient_divide_factor is -2");
    CHECK(te_fsdp_set_state(m, s) == TE_ERR_INVALID);
    CHECK_ERROR(te, TE_ERR_INVALID, "te_fsdp_set_state: \"model\" is no unit");
    CHECK(te_fsdp_post_backward(m) == TE_ERR_INVALID);
    CHECK_ERROR(te, TE_ERR_INVALID, "te_fsdp_post_backward: \"model\" is no unit");
    te_fsdp_unit(child, &(te_data_parallel_desc){.post_backward = refuse_unit});
    CHECK(te_data_parallel(child, &(te_data_parallel_desc){0}) == TE_ERR_INVALID);
    CHECK_ERROR(te, TE_ERR_INVALID, "is a unit by te_fsdp_unit");
    CHECK(te_stage_backward(m, &d) == TE_ERR_INVALID);
    CHECK_ERROR(te, TE_ERR_INVALID, "te_stage_backward: type 3");
    d.type = TE_BACKWARD_FULL;
    CHECK(te_stage_backward(m, &d) == TE_ERR_INVALID);
    CHECK_ERROR(te, TE_ERR_INVALID, "0 outputs, and stage_outputs is NULL");
    CHECK(te_stage_backward(m, NULL) == TE_ERR_INVALID);
    te_clear_error(te);
    te_tensor *y = te_forward(m, te_tensor_full(te, TE_F32, SHAPE(2, SH_N), 1));
    CHECK(te_backward(te_mean_all(y)) == TE_ERR_UNSUPPORTED);
    CHECK_ERROR(te, TE_ERR_UNSUPPORTED, "the post_backward of \"0\" returned");
    te_group_destroy(group);
    te_thread_hub_destroy(hub);
    te_module_destroy(m);
    te_quantized_model_init_begin(te, NULL);
    te_module *q = te_linear_create(te, &(te_linear_desc){.in_features = 16, .out_features = 16});
    te_quantized_model_init_end(te);
    CHECK(te_data_parallel(q, &(te_data_parallel_desc){0}) == TE_ERR_UNSUPPORTED);
    CHECK_ERROR(te, TE_ERR_UNSUPPORTED, "set no_init_sync");
    CHECK(te_data_parallel(q, &(te_data_parallel_desc){.no_init_sync = true}) == TE_OK);
    te_module_destroy(q);
}

/* ---- several models of one context ---- */

/* Weight gradients that one model has left for later hold up its own exchange alone. */
TE_TEST(sharding_beside_deferred_work) {
    te_ctx *te = test_context("cpu");
    const shard_case late_case = {DELAYED, TE_F32, false}, soon_case = {WHOLE, TE_F32, false};
    const te_data_parallel_desc d = {.post_backward = count_unit, .no_init_sync = true};
    te_module *late = shard_model(te, &late_case), *soon = shard_model(te, &soon_case);
    te_data_parallel(late, &d);
    te_data_parallel(soon, &d);
    te_tensor *x = te_tensor_full(te, TE_F32, SHAPE(SH_ROWS, SH_N), 1);
    unit_calls = 0;
    CHECK_EQ_INT(te_backward(te_mean_all(te_forward(late, x))), TE_OK);
    CHECK_EQ_INT(unit_calls, 0);
    CHECK_EQ_INT(te_backward(te_mean_all(te_forward(soon, x))), TE_OK);
    CHECK_EQ_INT(unit_calls, 1);
    CHECK_EQ_INT(te_backward_dw(late), TE_OK);
    CHECK_EQ_INT(unit_calls, 2);
    CHECK_OK(te);
    te_module_destroy(late);
    te_module_destroy(soon);
}

/* Passes that make graphs are no backward passes of the program. */
TE_TEST(sharding_of_graphed_modules) {
    te_ctx *te = test_context("cpu");
    te_module *m = linear_in(te_module_create(te, &shell, "outer"), "linear");
    te_data_parallel(m, &(te_data_parallel_desc){.post_backward = count_unit, .no_init_sync = true});
    te_tensor *x = te_tensor_full(te, TE_F32, SHAPE(SH_ROWS, SH_N), 1);
    unit_calls = 0;
    CHECK_EQ_INT(te_make_graphed_callables(te, &m, &(te_forward_args){.input = x}, 1, NULL), TE_OK);
    CHECK_EQ_INT(unit_calls, 0);
    CHECK_EQ_INT(te_backward(te_mean_all(te_forward(m, x))), TE_OK);
    CHECK_EQ_INT(unit_calls, 1);
    CHECK_OK(te);
    te_module_destroy(te_module_parent(m));
}

/* A group that no call of this test may reach. */
static te_result unused_reduce(void *user, te_ctx *te, te_tensor *x, te_reduce_op op) { return (void)user, (void)te, (void)x, (void)op, TE_ERR_LIBRARY; }
static te_result unused_parts(void *user, te_ctx *te, const te_tensor *x, te_tensor *out) { return (void)user, (void)te, (void)x, (void)out, TE_ERR_LIBRARY; }
static te_result unused_broadcast(void *user, te_ctx *te, te_tensor *x, int root) { return (void)user, (void)te, (void)x, (void)root, TE_ERR_LIBRARY; }
static te_result unused_barrier(void *user) { return (void)user, TE_ERR_LIBRARY; }
/* Rank 1 fails in the backward pass of the second model, or in its te_backward_dw: the ranks of that model's group hear of it, whatever groups other models have. */
static void second_model_fails(rank_state *s) {
    const te_group_desc unused = {.rank = s->rank, .size = s->size, .all_reduce = unused_reduce, .all_gather = unused_parts, .reduce_scatter = unused_parts, .broadcast = unused_broadcast,
                                  .barrier = unused_barrier};
    te_group *others = te_group_create(s->te, &unused);
    for (int way = 0; way < 3; way++) { /* as usual; run again in the backward pass; its weights later */
        const shard_case c = {way == 2 ? DELAYED : WHOLE, TE_F32, false};
        te_module *first = shard_model(s->te, &c), *second = shard_model(s->te, &c);
        EXPECT(s, te_fsdp_unit(first, &(te_data_parallel_desc){.group = others}) == TE_OK && te_fsdp_unit(second, &(te_data_parallel_desc){.group = s->group}) == TE_OK);
        te_module_set_checkpoint(second, way == 1);
        te_tensor *y = te_forward(second, te_tensor_full(s->te, TE_F32, SHAPE(SH_ROWS, SH_N), 1)), *loss = te_mean_all(y);
        if (s->rank == 1 && way < 2) te_tensor_fill(te_module_parameter(te_module_child(second, 2), "weight"), 0);
        te_result r = te_backward(loss);
        if (way == 2) {
            EXPECT(s, r == TE_OK);
            s->fail_at = s->rank == 1 ? s->requests + 1 : 0;
            r = te_backward_dw(second);
            s->fail_at = 0;
        }
        EXPECT(s, r == (way == 2 ? TE_ERR_OUT_OF_MEMORY : TE_ERR_STATE) && (s->rank || strstr(te_error(s->te), "rank 1 failed")));
        te_clear_error(s->te);
        te_module_destroy(first);
        te_module_destroy(second);
    }
    te_group_destroy(others);
}
TE_TEST(sharding_failures_reach_the_group_of_their_model) { run_ranks(2, second_model_fails, NULL); }
