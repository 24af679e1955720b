/* test_layouts.c: checkpoints that open in any layout: ranks that share matrices, experts, and slices of both, in each
 * pair of these. All values are those of the first file, bit for bit. */
#include "../dist/ranks.h"

enum { LAYOUT_VOCABULARY = 24, LAYOUT_IDS = 8 };

/* A way to share the model. */
typedef struct layout {
    int size, tp, ep; /* size: of all ranks; 0: one, without groups */
    te_shard shard;
} layout;
/* The model and its optimizer. */
typedef enum layout_experts { EXPERTS_NONE, EXPERTS_EACH, EXPERTS_STACKED, EXPERTS_NUMBERED } layout_experts;
typedef struct layout_model {
    layout_experts experts;
    te_dtype dtype;
    bool remainders, sgd, stored; /* stored: experts, or else all projections, are stored quantized */
} layout_model;
typedef struct layout_case {
    layout_model m;
    layout l;
    const char *from, *to; /* files; from NULL: first values */
    const float *logits;   /* of one rank; NULL: not compared */
} layout_case;

static te_module *layer_of(te_module *m, int i) {
    char path[64];
    snprintf(path, sizeof path, "model.layers.%d", i);
    return te_module_find(m, path);
}
/* A language model whose experts have names of their own; or blocks of experts in one tensor, or numbered. */
static te_module *layout_make(te_ctx *te, const layout_model *c, const te_dist *dist) {
    const te_recipe recipe = c->experts ? te_recipe_current_scaling() : te_recipe_mxfp8();
    const int width = c->experts ? 1 : 2; /* MXFP8 has blocks of 32 */
    te_module *m;
    te_seed(te, 21);
    if (c->experts > EXPERTS_EACH) {
        const te_moe_config config = {.dim = 32, .moe_inter_dim = 24, .n_routed_experts = 4, .n_activated_experts = 2, .dtype = c->dtype};
        const te_moe_backend backend = {.ep_group = dist->expert};
        return c->experts == EXPERTS_STACKED ? te_grouped_experts_create(te, &config, &backend) : te_grouped_experts_te_create(te, &config, &backend);
    }
    if (c->stored) te_quantized_model_init_begin(te, &(te_quantized_model_init_desc){.recipe = &recipe});
    m = te_causal_lm_create(te, &(te_causal_lm_desc){.vocab_size = LAYOUT_VOCABULARY,
                                                     .hidden_size = 32 * width,
                                                     .intermediate_size = width == 1 ? 40 : 192,
                                                     .num_hidden_layers = 2,
                                                     .num_attention_heads = 4,
                                                     .num_key_value_heads = 2,
                                                     .qkv_bias = true,
                                                     .o_bias = true,
                                                     .num_local_experts = c->experts ? 4 : 0,
                                                     .num_experts_per_tok = c->experts ? 2 : 0,
                                                     .params_dtype = c->dtype,
                                                     .tp_group = dist->tensor,
                                                     .ep_group = dist->expert});
    if (c->stored) te_quantized_model_init_end(te);
    return m;
}
static void layout_share(rank_state *s, te_module *m, const layout_case *c, const te_dist *dist) {
    te_data_parallel_desc d = {.group = dist->data, .shard = c->l.shard, .no_init_sync = true}, experts = d;
    experts.group = dist->expert_data;
    if (dist->size == 1) return;
    for (int i = 0; i < 2 && c->m.experts == EXPERTS_EACH; i++)
        EXPECT(s, te_fsdp_unit(te_module_find(layer_of(m, i), "block_sparse_moe.experts"), &experts) == TE_OK);
    for (int i = 0; i < 2 && c->m.experts <= EXPERTS_EACH; i++) EXPECT(s, te_fsdp_unit(layer_of(m, i), &d) == TE_OK);
    EXPECT(s, te_fsdp_unit(m, c->m.experts > EXPERTS_EACH ? &experts : &d) == TE_OK);
}
static te_optimizer *layout_optimizer(te_ctx *te, te_module *m, const layout_model *c) {
    if (c->sgd) return te_fused_sgd_create(te, m, &(te_fused_sgd_desc){.lr = 1e-2f, .momentum = 0.9f, .dampening = 0.1f});
    return te_fused_adam_create(te, m, &(te_fused_adam_desc){.lr = 1e-2f, .store_param_remainders = c->remainders, .exp_avg_dtype = c->remainders ? TE_BF16 : TE_F32});
}
/* Gives all parameters gradients but the first one, which is not `started` then. */
static bool give_grad(void *user, te_module *m, const char *path, te_tensor *x, te_entry_kind kind) {
    te_ctx *te = te_module_ctx(m);
    (void)path;
    if (kind != TE_ENTRY_PARAMETER || (*(int *)user)++ == 0) return true;
    return te_backward(te_sum_all(te_mul(x, te_tensor_normal(te, te_tensor_dtype(x), te_tensor_ndim(x), te_tensor_shape(x), 0, 1)))) == TE_OK;
}
static te_tensor *layout_logits(te_module *m) {
    static const int32_t ids[LAYOUT_IDS] = {3, 1, 4, 1, 5, 9, 2, 6};
    return te_forward(m, te_tensor_from_host(te_module_ctx(m), TE_I32, SHAPE(1, LAYOUT_IDS), ids));
}
static bool is_near(const float *a, const float *b, int n) {
    double error = 0, all = 0;
    for (int i = 0; i < n; i++) error += ((double)a[i] - b[i]) * ((double)a[i] - b[i]), all += (double)b[i] * b[i];
    return error <= 1e-10 * all;
}
static void layout_rank(rank_state *s) {
    const layout_case *c = (const layout_case *)s->arg;
    te_dist dist = {.size = 1};
    if (s->group) EXPECT(s, te_dist_init(s->te, &(te_dist_desc){.tp = c->l.tp, .ep = c->l.ep, .world = s->group}, &dist) == TE_OK);
    te_module *m = layout_make(s->te, &c->m, &dist);
    if (!m) {
        wrong(s, "no model");
        return;
    }
    layout_share(s, m, c, &dist);
    te_optimizer *opt = layout_optimizer(s->te, m, &c->m);
    if (c->from) {
        te_seed(s->te, 1 + (uint64_t)s->rank);
        EXPECT(s, te_model_load(s->te, c->from, m, opt) == TE_OK && te_optimizer_steps(opt) == 1);
    } else {
        int n = 0;
        te_scope_begin(s->te);
        if (c->m.stored) EXPECT(s, te_backward(te_mean_all(te_activate(layout_logits(m), TE_GELU, NULL))) == TE_OK);
        else EXPECT(s, te_module_visit_tensors(m, give_grad, &n));
        EXPECT(s, te_optimizer_step(opt) == TE_OK);
        te_scope_end(s->te);
    }
    if (c->to) EXPECT(s, te_model_save(s->te, c->to, m, opt, &(te_metadata){"note", "kept"}, 1) == TE_OK);
    if (c->m.experts <= EXPERTS_EACH && c->m.dtype == TE_F32) {
        float *y = (float *)malloc(LAYOUT_IDS * LAYOUT_VOCABULARY * sizeof *y);
        te_no_grad_begin(s->te);
        te_tensor *logits = layout_logits(m);
        EXPECT(s, logits && te_tensor_to_f32(logits, y) == TE_OK);
        te_no_grad_end(s->te);
        /* f32, whose sums have another order: 1e-5 */
        EXPECT(s, !c->logits || is_near(y, c->logits, LAYOUT_IDS * LAYOUT_VOCABULARY));
        s->left[s->num_left++] = y;
    }
    te_optimizer_destroy(opt);
    te_module_destroy(m);
    te_dist_finish(&dist);
}
/* The bytes of a file. */
static char *bytes_of(const char *path, size_t *n) {
    FILE *f = fopen(path, "rb");
    *n = f && fseek(f, 0, SEEK_END) == 0 ? (size_t)ftell(f) : 0;
    char *bytes = (char *)test_alloc(*n + 1);
    if (f) rewind(f);
    CHECK(f && fread(bytes, 1, *n, f) == *n);
    if (f) fclose(f);
    return bytes;
}
/* The file of one rank goes through each layout in turn. After each of them one rank opens the set, and saves it again:
 * the first file, byte for byte. */
static void go_round(const layout_model *m, const layout *layouts, int n) {
    layout_model one_rank = *m;
    char first[512], set[512], again[512];
    size_t size, other;
    snprintf(first, sizeof first, "%s", test_path("first.safetensors"));
    snprintf(again, sizeof again, "%s", test_path("again.safetensors"));
    if (!m->experts) one_rank.stored = false;
    layout_case c = {.m = one_rank, .to = first};
    const rank_state *one = run_ranks(0, layout_rank, &c);
    const char *want = bytes_of(first, &size);
    char from[512];
    snprintf(from, sizeof from, "%s", first);
    for (int i = 0; i < n; i++) {
        test_case("experts %d, %s%s%s%s: layout %d: %d ranks, tp %d, ep %d, shard %d", m->experts, te_dtype_name(m->dtype), m->remainders ? ", remainders" : "",
                  m->sgd ? ", sgd" : "", m->stored ? ", stored" : "", i, layouts[i].size, layouts[i].tp, layouts[i].ep, (int)layouts[i].shard);
        snprintf(set, sizeof set, "%s.%d", test_path("set.safetensors"), i);
        const layout_case to = {.m = *m, .l = layouts[i], .from = from, .to = set, .logits = one->num_left ? (const float *)one->left[0] : NULL},
                          back = {.m = one_rank, .from = set, .to = again, .logits = to.logits};
        run_ranks(layouts[i].size, layout_rank, &to);
        run_ranks(0, layout_rank, &back);
        const char *got = bytes_of(again, &other);
        CHECK(other == size);
        if (i == 0 && m->stored && !m->experts) {
            CHECK(memcmp(got, want, size) != 0); /* the values of codes */
            want = got;
        }
        CHECK(other == size && memcmp(got, want, size) == 0);
        snprintf(from, sizeof from, "%s", set);
    }
}
TE_TEST(checkpoints_of_parts_and_slices) {
    /* three data ranks cut a row of columns anywhere */
    static const layout layouts[] = {{2, 2, 1, TE_SHARD_NONE}, {6, 2, 1, TE_SHARD_PARAMETERS}, {3, 1, 1, TE_SHARD_OPTIMIZER},
                                     {4, 2, 1, TE_SHARD_OPTIMIZER}, {2, 2, 1, TE_SHARD_PARAMETERS}, {4, 1, 1, TE_SHARD_PARAMETERS}};
    static const layout_model models[] = {{.experts = EXPERTS_NONE, .dtype = TE_F32, .sgd = true}, {.experts = EXPERTS_NONE, .dtype = TE_BF16}, {.experts = EXPERTS_NONE, .dtype = TE_BF16, .remainders = true}};
    for (int i = 0; i < COUNT(models); i += test_every_sanitized(2)) go_round(&models[i], layouts, COUNT(layouts));
}
TE_TEST(checkpoints_of_experts) {
    static const layout layouts[] = {{2, 1, 2, TE_SHARD_NONE}, {4, 1, 2, TE_SHARD_PARAMETERS}, {4, 2, 2, TE_SHARD_OPTIMIZER}, {2, 1, 1, TE_SHARD_PARAMETERS},
                                     {4, 1, 4, TE_SHARD_PARAMETERS}, {4, 2, 2, TE_SHARD_NONE}, {8, 2, 2, TE_SHARD_PARAMETERS}};
    static const layout_model models[] = {{.experts = EXPERTS_EACH, .dtype = TE_F32}, {.experts = EXPERTS_EACH, .dtype = TE_BF16, .remainders = true}, {.experts = EXPERTS_EACH, .dtype = TE_BF16, .sgd = true}};
    for (int i = 0; i < COUNT(models); i += test_every_sanitized(2)) go_round(&models[i], layouts, COUNT(layouts));
}
TE_TEST(checkpoints_of_experts_in_other_forms) {
    static const layout layouts[] = {{2, 1, 2, TE_SHARD_NONE}, {4, 1, 2, TE_SHARD_PARAMETERS}, {4, 1, 4, TE_SHARD_NONE}, {3, 1, 1, TE_SHARD_PARAMETERS}, {4, 1, 2, TE_SHARD_OPTIMIZER}};
    static const layout_model models[] = {{.experts = EXPERTS_STACKED, .dtype = TE_BF16}, {.experts = EXPERTS_NUMBERED, .dtype = TE_BF16, .sgd = true}, {.experts = EXPERTS_STACKED, .dtype = TE_BF16, .sgd = true}, {.experts = EXPERTS_NUMBERED, .dtype = TE_F32}};
    for (int i = 0; i < COUNT(models); i += test_every_sanitized(2)) go_round(&models[i], layouts, COUNT(layouts));
}
/* Codes of experts that are stored quantized, each with scales of its own. */
TE_TEST(checkpoints_of_experts_stored_quantized) {
    static const layout layouts[] = {{2, 1, 2, TE_SHARD_NONE}, {4, 1, 2, TE_SHARD_PARAMETERS}, {2, 1, 1, TE_SHARD_PARAMETERS}};
    static const layout_model model = {.experts = EXPERTS_EACH, .dtype = TE_BF16, .stored = true};
    go_round(&model, layouts, COUNT(layouts));
}

/* Parts that are stored quantized are saved as values: MXFP8's factors are powers of two, so these give the same codes.
 * One rank that is not stored quantized opens them too. */
TE_TEST(checkpoints_of_parts_stored_quantized) {
    static const layout layouts[] = {{2, 2, 1, TE_SHARD_NONE}, {4, 2, 1, TE_SHARD_PARAMETERS}, {6, 2, 1, TE_SHARD_OPTIMIZER}, {2, 2, 1, TE_SHARD_PARAMETERS}};
    static const layout_model model = {.experts = EXPERTS_NONE, .dtype = TE_BF16, .stored = true}, plain = {.experts = EXPERTS_NONE, .dtype = TE_BF16};
    char path[6][512];
    size_t size, other;
    go_round(&model, layouts, COUNT(layouts));
    /* the codes of one rank open in parts, whose values give the codes of the whole again */
    static const struct {
        int layout; /* -1: one rank */
        bool stored;
    } turns[] = {{-1, false}, {-1, true}, {1, true}, {-1, true}, {0, true}, {-1, false}};
    for (int i = 0; i < COUNT(turns); i++) {
        test_case("turn %d", i);
        snprintf(path[i], sizeof path[i], "%s.%d", test_path("turn.safetensors"), i);
        const layout_case c = {.m = turns[i].stored ? model : plain, .l = turns[i].layout < 0 ? (layout){0} : layouts[turns[i].layout], .from = i ? path[i - 1] : NULL, .to = path[i]};
        run_ranks(c.l.size, layout_rank, &c);
    }
    const layout_case decoded = {.m = plain, .from = path[2], .to = path[0]};
    const char *got = bytes_of(path[5], &size);
    run_ranks(0, layout_rank, &decoded);
    const char *want = bytes_of(path[0], &other);
    CHECK(size == other && memcmp(got, want, size) == 0);
}
/* Neither a value nor codes. */
static void no_value_rank(rank_state *s) {
    const layout_model stored = {.experts = EXPERTS_NONE, .dtype = TE_BF16, .stored = true};
    te_dist dist;
    EXPECT(s, te_dist_init(s->te, &(te_dist_desc){.tp = 2, .world = s->group}, &dist) == TE_OK);
    te_module *m = layout_make(s->te, &stored, &dist);
    EXPECT(s, te_model_load(s->te, (const char *)s->arg, m, NULL) == TE_ERR_FORMAT);
    EXPECT(s, strstr(te_error(s->te), "there is no tensor") || strstr(te_error(s->te), "failed"));
    te_clear_error(s->te);
    te_module_destroy(m);
    te_dist_finish(&dist);
}
TE_TEST(checkpoints_without_a_part_stored_quantized) {
    te_ctx *te = test_context("cpu");
    char path[512];
    snprintf(path, sizeof path, "%s", test_path("none.safetensors"));
    te_scope_begin(te);
    CHECK_EQ_INT(te_safetensors_write(te, path, &(te_safetensors_item){"x", te_tensor_zeros(te, TE_F32, SHAPE(1))}, 1, NULL, 0), TE_OK);
    te_scope_end(te);
    run_ranks(2, no_value_rank, path);
}

/* A save and a load need one tensor beside the model, however many there are. */
enum { MEMORY_LAYERS = 6, MEMORY_WIDTH = 192 };
static te_result never_run(te_module *m, te_forward_args *args) {
    (void)args;
    return te_error_code(te_module_ctx(m));
}
static const te_module_class layers_class = {"Layers", 0, never_run, NULL, NULL};
static void memory_rank(rank_state *s) {
    te_dist dist;
    EXPECT(s, te_dist_init(s->te, &(te_dist_desc){.tp = 2, .world = s->group}, &dist) == TE_OK);
    te_seed(s->te, 2);
    te_module *all = te_module_create(s->te, &layers_class, "all");
    for (int i = 0; i < MEMORY_LAYERS; i++) {
        char name[16];
        snprintf(name, sizeof name, "l%d", i);
        te_module_add_child(all, name, te_linear_create(s->te, &(te_linear_desc){.in_features = MEMORY_WIDTH, .out_features = MEMORY_WIDTH, .gemm = {.params_dtype = TE_F32, .no_bias = true},
                                                                                        .parallel = {.tp_group = dist.tensor, .parallel_mode = TE_PARALLEL_ROW}}));
    }
    EXPECT(s, te_fsdp_unit(all, &(te_data_parallel_desc){.group = dist.data, .shard = TE_SHARD_PARAMETERS, .no_init_sync = true}) == TE_OK);
    te_optimizer *adam = te_fused_adam_create(s->te, all, &(te_fused_adam_desc){.lr = 1e-3f});
    for (int loads = 0; loads < 2; loads++) {
        te_memory_trim(s->te);
        te_memory_reset_peak(s->te);
        const size_t before = te_memory_get_stats(s->te).allocated,
                     own = MEMORY_WIDTH * MEMORY_WIDTH * sizeof(float) / (size_t)s->size; /* of one tensor */
        EXPECT(s, (loads ? te_model_load(s->te, (const char *)s->arg, all, adam) : te_model_save(s->te, (const char *)s->arg, all, adam, NULL, 0)) == TE_OK);
        /* twice what a rank has of one of 18 tensors, both ways with tp 2; an eighth: blocks of the pool */
        EXPECT(s, te_memory_get_stats(s->te).peak_allocated - before <= 2 * own * 9 / 8);
    }
    te_optimizer_destroy(adam);
    te_module_destroy(all);
    te_dist_finish(&dist);
}
TE_TEST(checkpoints_need_one_tensor_more) {
    char path[512];
    snprintf(path, sizeof path, "%s", test_path("memory.safetensors"));
    run_ranks(2, memory_rank, path);
    run_ranks(4, memory_rank, path);
}

/* ---- failures ---- */

typedef struct broken_case {
    const char *path, *of_rank_1;
    int64_t request; /* which request of memory of rank 1 fails; 0: none */
    bool loads;
    int *reached;
} broken_case;
static te_module *broken_make(rank_state *s, te_dist *dist) {
    static const layout_case c = {.m = {.experts = EXPERTS_EACH, .dtype = TE_F32}, .l = {.shard = TE_SHARD_PARAMETERS}};
    EXPECT(s, te_dist_init(s->te, &(te_dist_desc){.tp = 2, .world = s->group}, dist) == TE_OK);
    te_module *m = layout_make(s->te, &c.m, dist);
    layout_share(s, m, &c, dist);
    return m;
}
/* A rank that fails, wherever the others then are, ends their call with its own error; a failed save leaves a checkpoint
 * that opens: the one before, or the new one if all of it was written. */
static void broken_rank(rank_state *s) {
    const broken_case *b = (const broken_case *)s->arg;
    te_dist dist;
    te_module *m = broken_make(s, &dist);
    const char *path = s->rank == 1 ? b->of_rank_1 : b->path;
    s->fail_at = s->rank == 1 && b->request ? s->requests + b->request : 0;
    te_result result = b->loads ? te_model_load(s->te, path, m, NULL) : te_model_save(s->te, path, m, NULL, NULL, 0);
    if (s->fail_at) *b->reached = s->requests >= s->fail_at;
    s->fail_at = 0;
    s->failed = result != TE_OK;
    EXPECT(s, !s->failed || s->rank == 1 || strstr(te_error(s->te), "rank 1") || strstr(te_error(s->te), "failed"));
    te_clear_error(s->te);
    EXPECT(s, te_barrier(s->group) == TE_OK && te_model_load(s->te, b->path, m, NULL) == TE_OK);
    te_module_destroy(m);
    te_dist_finish(&dist);
}
static void whole_rank(rank_state *s) {
    te_dist dist;
    te_module *m = broken_make(s, &dist);
    EXPECT(s, te_model_save(s->te, (const char *)s->arg, m, NULL, NULL, 0) == TE_OK);
    te_module_destroy(m);
    te_dist_finish(&dist);
}
TE_TEST(checkpoints_of_a_rank_that_fails) {
    char path[512], other[600];
    snprintf(path, sizeof path, "%s", test_path("kept.safetensors"));
    run_ranks(4, whole_rank, path);
    /* the same name in a folder that is not there: it fails while the others exchange rows */
    snprintf(other, sizeof other, "%s/kept.safetensors", test_path("nowhere"));
    for (int loads = 0; loads < 2; loads++) {
        const broken_case b = {.path = path, .of_rank_1 = other, .loads = loads};
        test_case("%s", loads ? "load" : "save");
        const rank_state *s = run_ranks(4, broken_rank, &b);
        for (int i = 0; i < 4; i++) CHECK(s[i].failed);
    }
    for (int loads = 0; loads < 2; loads++) {
        int reached = 1, failures = 0;
        broken_case b = {.path = path, .of_rank_1 = path, .loads = loads, .reached = &reached};
        const int step = 13 * test_every_odd(loads ? 5 : 3);
        for (b.request = 1; reached; b.request += step) {
            test_case("%s, request %lld", loads ? "load" : "save", (long long)b.request);
            const rank_state *s = run_ranks(4, broken_rank, &b);
            for (int i = 0; i < 4; i++) CHECK(s[1].failed || !s[i].failed);
            failures += s[1].failed;
        }
        CHECK_MSG(failures > (test_samples() ? 1 : 5), "%d failures", failures);
    }
}

/* Files of before have the flags of a first step in one tensor, for all parameters. */
TE_TEST(checkpoints_with_all_flags_in_one_tensor) {
    static const char *const keys[] = {"te.seed", "te.offset", "te.steps", "te.lr"};
    const layout_model c = {.experts = EXPERTS_NONE, .dtype = TE_F32, .sgd = true};
    const te_dist alone = {.size = 1};
    te_ctx *te = test_context("cpu");
    char first[512], old[512], again[512];
    te_safetensors_item items[256];
    te_metadata facts[COUNT(keys) + 1] = {{"note", "kept"}};
    size_t size, other;
    int n = 0, flags = 0;
    snprintf(first, sizeof first, "%s", test_path("first.safetensors"));
    snprintf(old, sizeof old, "%s", test_path("old.safetensors"));
    snprintf(again, sizeof again, "%s", test_path("again.safetensors"));
    const layout_case make = {.m = c, .to = first};
    run_ranks(0, layout_rank, &make);
    te_scope_begin(te);
    te_module *m = layout_make(te, &c, &alone);
    te_optimizer *opt = layout_optimizer(te, m, &c);
    te_safetensors *f = te_safetensors_open(te, first);
    uint8_t started[64];
    memset(started, 1, sizeof started);
    started[0] = 0; /* see give_grad */
    for (int i = 0; i < te_safetensors_count(f); i++) {
        const char *name = te_safetensors_at(f, i)->name;
        const size_t length = strlen(name);
        if (length > 8 && !strcmp(name + length - 8, ".started")) flags++;
        else items[n++] = (te_safetensors_item){name, te_safetensors_read(f, name)};
    }
    REQUIRE(flags > 10 && flags <= COUNT(started) && n < COUNT(items));
    items[n++] = (te_safetensors_item){"optimizer/started", te_tensor_from_host(te, TE_U8, 1, &(int64_t){flags}, started)};
    for (int i = 0; i < COUNT(keys); i++) facts[1 + i] = (te_metadata){keys[i], te_safetensors_metadata(f, keys[i])};
    CHECK_EQ_INT(te_safetensors_write(te, old, items, n, facts, COUNT(facts)), TE_OK);
    CHECK_EQ_INT(te_model_load(te, old, m, opt), TE_OK);
    CHECK_EQ_INT(te_model_save(te, again, m, opt, facts, 1), TE_OK);
    const char *want = bytes_of(first, &size), *got = bytes_of(again, &other);
    CHECK(other == size && memcmp(got, want, size) == 0);
    te_safetensors_close(f);
    te_optimizer_destroy(opt);
    te_module_destroy(m);
    te_scope_end(te);
}
