/* test_shard_models.c: sharded units in language models, mixtures of experts, pipelines' stages, checkpoints over
 * several units, and groups beside groups. */
#include "shards.h"

/* ---- language models ---- */

typedef struct lm_case {
    bool experts, tied, grouped_checkpoint, stored, autocast, packs; /* packs: no norm of heads */
    te_dtype dtype;
    te_shard shard;
} lm_case;
enum { LM_VOCAB = 40, LM_LAYERS = 3 };

static te_module *make_lm(te_ctx *te, const lm_case *c) {
    te_causal_lm_desc d = {.vocab_size = LM_VOCAB,
                           .hidden_size = 32,
                           .intermediate_size = 64,
                           .num_hidden_layers = LM_LAYERS,
                           .num_attention_heads = 4,
                           .num_key_value_heads = 2};
    te_recipe recipe = te_recipe_current_scaling();
    d.tie_word_embeddings = c->tied;
    d.quantized_lm_head = c->stored && !c->tied;
    d.params_dtype = c->dtype;
    d.qk_norm = !c->packs;
    if (c->experts) d.num_local_experts = 4, d.num_experts_per_tok = 2;
    te_seed(te, 21);
    if (c->stored) te_quantized_model_init_begin(te, &(te_quantized_model_init_desc){.recipe = &recipe});
    te_module *m = te_causal_lm_create(te, &d);
    if (c->stored) te_quantized_model_init_end(te);
    return m;
}
static void lm_units(rank_state *s, te_module *m, te_shard shard) {
    const te_data_parallel_desc d = {.group = s->group, .shard = shard, .no_init_sync = true};
    te_module *layers = te_module_find(m, "model.layers");
    for (int i = 0; i < LM_LAYERS; i++) EXPECT(s, te_fsdp_unit(te_module_child(layers, i), &d) == TE_OK);
    EXPECT(s, te_fsdp_unit(m, &d) == TE_OK);
}
static te_result lm_batch(rank_state *s, te_module *m, const lm_case *c, int batch) {
    te_recipe recipe = te_recipe_current_scaling();
    te_scope_begin(s->te);
    int32_t ids[2 * 9];
    for (int i = 0; i < 2 * 9; i++) ids[i] = (i * 7 + batch * 13 + s->rank * 5) % LM_VOCAB;
    te_seed(s->te, 900 + (uint64_t)batch);
    if (c->autocast) te_autocast_begin(s->te, &(te_autocast_desc){.recipe = &recipe});
    te_tensor *y = te_forward(m, te_tensor_from_host(s->te, TE_I32, SHAPE(2, 9), ids));
    if (c->autocast) te_autocast_end(s->te);
    te_result result = te_backward(te_mean_all(te_activate(y, TE_GELU, NULL)));
    te_scope_end(s->te);
    return result;
}
static void lm_rank(rank_state *s) {
    const lm_case *c = (const lm_case *)s->arg;
    te_module *m[2] = {make_lm(s->te, c), make_lm(s->te, c)};
    te_optimizer *adam[2];
    for (int k = 0; k < 2; k++) {
        lm_units(s, m[k], k ? c->shard : TE_SHARD_NONE);
        te_module_set_checkpoint(te_module_find(m[k], "model"), c->grouped_checkpoint);
        adam[k] = te_fused_adam_create(s->te, m[k], &(te_fused_adam_desc){.lr = 1e-2f});
    }
    for (int step = 0; step < 3; step++) {
        for (int k = 0; k < 2; k++)
            EXPECT(s, lm_batch(s, m[k], c, step) == TE_OK && te_optimizer_step(adam[k]) == TE_OK);
        expect_same(s, m[1], m[0], 0);
    }
    /* without gradients a forward gathers and releases as well */
    te_no_grad_begin(s->te);
    int32_t ids[4] = {1, 2, 3, 4};
    te_tensor *x = te_tensor_from_host(s->te, TE_I32, SHAPE(1, 4), ids), *y[2];
    for (int k = 0; k < 2; k++) y[k] = te_forward(m[k], x);
    te_no_grad_end(s->te);
    EXPECT(s, y[0] && y[1] && same_values(y[1], y[0], 0));
    EXPECT(s, c->shard != TE_SHARD_PARAMETERS ||
                  !te_tensor_data(te_module_parameter(te_module_find(m[1], "model.norm"), "weight")));
    for (int k = 0; k < 2; k++) {
        te_optimizer_destroy(adam[k]);
        te_module_destroy(m[k]);
    }
}
TE_TEST(shards_of_language_models) {
    const lm_case cases[] = {{.tied = true, .dtype = TE_BF16},
                             {.dtype = TE_F32, .grouped_checkpoint = true},
                             {.experts = true, .dtype = TE_F32},
                             {.experts = true, .dtype = TE_BF16, .autocast = true},
                             {.dtype = TE_BF16, .autocast = true, .grouped_checkpoint = true},
                             {.tied = true, .dtype = TE_BF16, .autocast = true, .stored = true},
                             {.dtype = TE_BF16, .autocast = true, .stored = true}}; /* lm_head as well */
    for (int i = 0; i < COUNT(cases); i++)
        for (int shard = TE_SHARD_OPTIMIZER; shard <= TE_SHARD_PARAMETERS; shard++) {
            lm_case c = cases[i];
            if ((i + shard) % test_every_sanitized(1)) continue;
            c.shard = (te_shard)shard;
            test_case("case %d, shard %d", i, shard);
            run_ranks(2, lm_rank, &c);
        }
}

/* Units that are as small as a Linear or a norm: in a step with a cache their parameters are gone before products that
 * wait for each other could run. */
static void cached_rank(rank_state *s) {
    static const char *const small[] = {"input_layernorm", "self_attn.k_proj", "self_attn.o_proj", "mlp.gate_proj",
                                        "post_attention_layernorm", "mlp.down_proj"};
    const lm_case *c = (const lm_case *)s->arg;
    const te_data_parallel_desc d = {.group = s->group, .shard = TE_SHARD_PARAMETERS, .no_init_sync = true};
    float *logits[2][3];
    for (int k = 0; k < 2; k++) {
        te_module *m = make_lm(s->te, c), *layers = te_module_find(m, "model.layers");
        for (int i = 0; k && i < LM_LAYERS * COUNT(small); i++)
            EXPECT(s, te_fsdp_unit(te_module_find(te_module_child(layers, i % LM_LAYERS), small[i / LM_LAYERS]), &d) == TE_OK);
        te_no_grad_begin(s->te);
        te_kv_cache *cache = te_kv_cache_create_with(m, &(te_kv_cache_desc){.batch = 1, .max_length = 8});
        for (int i = 0; i < 3; i++) {
            const int32_t ids[3] = {3, 1, 4};
            te_forward_args args = {.input = te_tensor_from_host(s->te, TE_I32, SHAPE(1, i ? 1 : 3), ids + i), .kv_cache = cache, .logits_to_keep = 1};
            te_tensor *y = te_forward_with(m, &args);
            EXPECT(s, y != NULL);
            logits[k][i] = y ? test_read(y) : NULL;
        }
        te_no_grad_end(s->te);
        te_kv_cache_destroy(cache);
        te_module_destroy(m);
    }
    for (int i = 0; i < 3; i++)
        EXPECT(s, logits[0][i] && logits[1][i] && !memcmp(logits[0][i], logits[1][i], LM_VOCAB * sizeof(float)));
}
TE_TEST(shards_of_small_units_in_cached_steps) {
    const lm_case c = {.dtype = TE_BF16, .packs = true};
    run_ranks(2, cached_rank, &c);
}

/* ---- groups beside groups ---- */

/* Units of two groups and kinds in one model: one block is whole, one is shared by pairs, the rest by all; gradients
 * are clipped by the norm of all of them. */
typedef struct mixed_case {
    te_thread_hub *pairs[2];
    const char *path;
} mixed_case;
static void mixed_rank(rank_state *s) {
    const mixed_case *f = (const mixed_case *)s->arg;
    te_group *pair = te_thread_group_create(s->te, f->pairs[s->rank / 2], s->rank % 2);
    const shard_case c = {.num = &numbers[0], .width = 32, .inner = 48};
    te_module *m[2] = {make_model(s->te, &c), make_model(s->te, &c)};
    te_optimizer *opt[2];
    float norm[2];
    for (int k = 0; k < 2; k++) {
        const te_shard some = k ? TE_SHARD_OPTIMIZER : TE_SHARD_NONE, all = k ? TE_SHARD_PARAMETERS : TE_SHARD_NONE;
        EXPECT(s, te_fsdp_unit(te_module_child(m[k], 1), &(te_data_parallel_desc){.group = s->group}) == TE_OK);
        EXPECT(s,
               te_fsdp_unit(te_module_child(m[k], 2), &(te_data_parallel_desc){.group = pair, .shard = some}) == TE_OK);
        EXPECT(s, te_fsdp_unit(te_module_child(m[k], 3), &(te_data_parallel_desc){.group = s->group, .shard = all}) ==
                      TE_OK);
        EXPECT(s, te_fsdp_unit(m[k], &(te_data_parallel_desc){.group = s->group, .shard = some}) == TE_OK);
        opt[k] = te_fused_adam_create(s->te, m[k], &(te_fused_adam_desc){.lr = 1e-3f, .max_grad_norm = 0.01f});
    }
    for (int step = 0; step < 2; step++)
        for (int k = 0; k < 2; k++)
            EXPECT(s, run_step(s, m[k], opt[k], &c, step, NULL) == TE_OK &&
                          te_tensor_to_host(te_optimizer_grad_norm(opt[k]), &norm[k]) == TE_OK);
    EXPECT(s, norm[0] > 0 && fabsf(norm[1] - norm[0]) <= 1e-6f * norm[0]); /* sums in another order */
    expect_same(s, m[1], m[0],
                1e-4); /* 1e-7 of the norm; where gradients of rows nearly cancel, Adam's quotient sees it */
    /* one file has one set of ranks */
    EXPECT(s, te_model_save(s->te, f->path, m[1], NULL, NULL, 0) == TE_ERR_UNSUPPORTED &&
                  strstr(te_error(s->te), "is shared by another group"));
    te_clear_error(s->te);
    for (int k = 0; k < 2; k++) {
        te_optimizer_destroy(opt[k]);
        te_module_destroy(m[k]);
    }
    te_group_destroy(pair);
}
TE_TEST(shards_of_several_groups) {
    const mixed_case f = {{te_thread_hub_create(2), te_thread_hub_create(2)}, test_path("mixed.safetensors")};
    run_ranks(4, mixed_rank, &f);
    te_thread_hub_destroy(f.pairs[0]);
    te_thread_hub_destroy(f.pairs[1]);
}

/* ---- clipping by hand ---- */

static void clip_rank(rank_state *s) {
    const shard_case c = {.num = &numbers[0], .width = 32, .inner = 48};
    te_module *m[2] = {make_model(s->te, &c), make_model(s->te, &c)};
    float norm[2], after[2];
    for (int k = 0; k < 2; k++) {
        make_units(s, m[k], &c, k ? TE_SHARD_PARAMETERS : TE_SHARD_NONE);
        EXPECT(s, run_batch(m[k], &c, s->rank, NULL) == TE_OK);
        te_tensor_to_host(te_clip_grad_norm(m[k], 1e-3f), &norm[k]);
        te_tensor_to_host(te_clip_grad_norm(m[k], 1e-3f), &after[k]);
    }
    EXPECT(s, norm[0] > 2e-3f && fabsf(norm[1] - norm[0]) <= 1e-6f * norm[0]);
    EXPECT(s, after[0] < 1.01e-3f && fabsf(after[1] - after[0]) <= 1e-5f * after[0]);
    te_module_destroy(m[0]);
    te_module_destroy(m[1]);
}
TE_TEST(shards_clip_by_hand) { run_ranks(4, clip_rank, NULL); }

/* ---- gradients that come later ---- */

/* A model whose weight gradients are deferred, driven as the stage of a pipeline: whole or sharded, the same values. */
static te_module *delayed_model(te_ctx *te) {
    te_module *m = te_module_create(te, &chain, "stage");
    te_seed(te, 4);
    for (int i = 0; i < 3; i++) {
        char name[16];
        te_linear_desc d = {.in_features = 24, .out_features = 24, .gemm.params_dtype = TE_F32};
        d.gemm.delay_wgrad_compute = i != 1; /* one computes them at once */
        snprintf(name, sizeof name, "%d", i);
        te_module_add_child(m, name, te_linear_create(te, &d));
    }
    return m;
}
static void stage_rank(rank_state *s) {
    const bool by_stage = *(const bool *)s->arg;
    for (int shard = TE_SHARD_OPTIMIZER; shard <= TE_SHARD_PARAMETERS; shard++) {
        te_module *m[2] = {delayed_model(s->te), delayed_model(s->te)};
        te_optimizer *opt[2];
        for (int k = 0; k < 2; k++) {
            const te_data_parallel_desc d = {.group = s->group, .shard = k ? (te_shard)shard : TE_SHARD_NONE};
            for (int i = 0; i < 3; i++) EXPECT(s, te_fsdp_unit(te_module_child(m[k], i), &d) == TE_OK);
            EXPECT(s, te_fsdp_unit(m[k], &d) == TE_OK);
            opt[k] = te_fused_adam_create(s->te, m[k], NULL);
        }
        for (int step = 0; step < 3; step++)
            for (int k = 0; k < 2; k++) {
                for (int batch = 0; batch < 2; batch++) {
                    te_scope_begin(s->te);
                    te_seed(s->te, (uint64_t)(100 + step * 20 + batch * 10 + s->rank));
                    te_tensor *x = te_tensor_normal(s->te, TE_F32, SHAPE(8, 24), 0, 1), *y = te_forward(m[k], x),
                              *dy = te_tensor_full(s->te, TE_F32, SHAPE(8, 24), 0.5f);
                    te_stage_backward_desc d = {
                        .stage_outputs = &y, .output_grads = &dy, .num_outputs = 1, .last_backward = batch == 1};
                    if (by_stage)
                        EXPECT(s, te_stage_backward(m[k], &d) == TE_OK);
                    else {
                        te_fsdp_set_state(m[k], (te_fsdp_state){.reshard_after_backward = true,
                                                                .requires_gradient_sync = batch == 1});
                        EXPECT(s, te_backward_from(y, dy) == TE_OK && te_backward_dw(m[k]) == TE_OK);
                    }
                    te_scope_end(s->te);
                }
                EXPECT(s, te_optimizer_step(opt[k]) == TE_OK);
            }
        expect_same(s, m[1], m[0], 0);
        for (int k = 0; k < 2; k++) {
            te_optimizer_destroy(opt[k]);
            te_module_destroy(m[k]);
        }
    }
}
TE_TEST(shards_of_stages_and_deferred_gradients) {
    for (int way = 0; way < 2; way++) {
        const bool by_stage = way == 1;
        test_case(by_stage ? "te_stage_backward" : "te_backward_dw");
        run_ranks(2, stage_rank, &by_stage);
    }
}

/* ---- warm-up ---- */

/* One rank warms up alone: nothing is exchanged, and nothing changes. */
static void warm_rank(rank_state *s) {
    for (int shard = TE_SHARD_OPTIMIZER; shard <= TE_SHARD_PARAMETERS; shard++)
        for (int i = 1; i < 9; i += 5) {
            const shard_case c = {.num = &numbers[i], .width = 32, .inner = 64, .clip = true};
            te_module *m[2] = {make_model(s->te, &c), make_model(s->te, &c)};
            te_optimizer *opt[2];
            for (int k = 0; k < 2; k++) {
                make_units(s, m[k], &c, (te_shard)shard);
                opt[k] = make_optimizer(s->te, m[k], &c);
            }
            if (s->rank == 1) { /* alone */
                EXPECT(s, te_warmup_begin(s->te) == TE_OK);
                EXPECT(s, run_batch(m[0], &c, 0, NULL) == TE_OK && te_optimizer_step(opt[0]) == TE_OK);
                EXPECT(s, te_warmup_end(s->te) == TE_OK);
            }
            for (int step = 0; step < 2; step++)
                for (int k = 0; k < 2; k++) EXPECT(s, run_step(s, m[k], opt[k], &c, step, NULL) == TE_OK);
            EXPECT(s, te_fsdp_unshard(m[1]) == TE_OK);
            expect_same(s, m[0], m[1], 0);
            for (int k = 0; k < 2; k++) {
                te_optimizer_destroy(opt[k]);
                te_module_destroy(m[k]);
            }
        }
}
TE_TEST(shards_warm_up_alone) { run_ranks(2, warm_rank, NULL); }

/* ---- when units travel ---- */

enum { EARLY_UNITS = 3 };
typedef struct early_state {
    te_module *m;
    te_shard shard;
    int seen, ready, gone;
    float grad[EARLY_UNITS]; /* unsharded: the first element of each unit's gradient */
} early_state;
static early_state *early_of; /* [ranks]; each node has the number of its rank */
/* Runs in the backward pass below the first unit's product: the units above it are exchanged and released already. */
static te_result early_backward(te_ctx *te, const void *state, te_tensor *const *saved, te_tensor *const *dy,
                                te_tensor **dx, const bool *needs) {
    early_state *e = &early_of[*(const int *)state];
    (void)te, (void)saved, (void)needs;
    e->seen++;
    for (int i = 1; i < EARLY_UNITS; i++) {
        te_tensor *w = te_module_parameter(te_module_child(e->m, i), "weight");
        te_fsdp_slice slice;
        e->ready +=
            e->shard ? te_fsdp_get_slice(w, &slice) && slice.grad && !te_tensor_grad(w) : te_tensor_grad(w) != NULL;
        e->gone += te_tensor_data(w) == NULL;
        if (!e->shard && te_tensor_grad(w)) {
            float *all = values_of(te_tensor_grad(w));
            e->grad[i] = all[0];
            free(all);
        }
    }
    dx[0] = dy[0];
    return TE_OK;
}
static void early_rank(rank_state *s) {
    const te_shard shard = *(const te_shard *)s->arg;
    te_module *m = te_module_create(s->te, &chain, "early");
    te_seed(s->te, 2);
    for (int i = 0; i < EARLY_UNITS; i++) {
        char name[16];
        snprintf(name, sizeof name, "%d", i);
        te_module *x = te_module_add_child(
            m, name,
            te_linear_create(s->te,
                             &(te_linear_desc){.in_features = 32, .out_features = 32, .gemm.params_dtype = TE_F32}));
        EXPECT(s, te_fsdp_unit(x, &(te_data_parallel_desc){.group = s->group, .shard = shard}) == TE_OK);
    }
    early_of[s->rank].m = m;
    early_of[s->rank].shard = shard;
    te_tensor *x = te_forward(te_module_child(m, 0), te_tensor_full(s->te, TE_F32, SHAPE(4, 32), 1 + s->rank)),
              *y = te_tensor_detach(x);
    EXPECT(s, te_record(s->te, &(te_node_desc){.name = "early",
                                               .inputs = &x,
                                               .num_inputs = 1,
                                               .outputs = &y,
                                               .num_outputs = 1,
                                               .state = &s->rank,
                                               .state_size = sizeof(int),
                                               .backward = early_backward}) == TE_OK);
    for (int i = 1; i < EARLY_UNITS; i++) y = te_forward(te_module_child(m, i), y);
    EXPECT(s, te_backward(te_mean_all(y)) == TE_OK);
    EXPECT(s, early_of[s->rank].seen == 1 && early_of[s->rank].ready == EARLY_UNITS - 1 &&
                  early_of[s->rank].gone == (shard == TE_SHARD_PARAMETERS ? EARLY_UNITS - 1 : 0));
    te_module_destroy(m);
}
TE_TEST(shards_travel_as_soon_as_a_unit_is_complete) {
    for (int shard = TE_SHARD_NONE; shard <= TE_SHARD_PARAMETERS; shard++) {
        early_state states[2];
        const te_shard arg = (te_shard)shard;
        memset(states, 0, sizeof states);
        early_of = states;
        test_case("shard %d", shard);
        run_ranks(2, early_rank, &arg);
        for (int i = 1; i < EARLY_UNITS && !shard; i++) /* the mean of two gradients that differ */
            CHECK(states[0].grad[i] == states[1].grad[i] && states[0].grad[i] != 0);
    }
}

/* ---- traffic ---- */

/* A group that counts what its ranks send, and hands it to the group of threads. It has no all_to_all: slices of
 * gradients travel in f32. */
typedef struct counted_group {
    te_group *inner;
    int64_t reduced, scattered, gathered; /* bytes of all_reduce's x, reduce_scatter's x, all_gather's out */
} counted_group;
static te_result count_reduce(void *user, te_ctx *te, te_tensor *x, te_reduce_op op) {
    counted_group *g = (counted_group *)user;
    (void)te;
    g->reduced += (int64_t)te_tensor_bytes(x);
    return te_all_reduce(g->inner, x, op);
}
static te_result count_gather(void *user, te_ctx *te, const te_tensor *x, te_tensor *out) {
    counted_group *g = (counted_group *)user;
    (void)te;
    g->gathered += (int64_t)te_tensor_bytes(out);
    return te_all_gather(g->inner, x, out);
}
static te_result count_scatter(void *user, te_ctx *te, const te_tensor *x, te_tensor *out) {
    counted_group *g = (counted_group *)user;
    (void)te;
    g->scattered += (int64_t)te_tensor_bytes(x);
    return te_reduce_scatter(g->inner, x, out);
}
static te_result count_broadcast(void *user, te_ctx *te, te_tensor *x, int root) {
    return (void)te, te_broadcast(((counted_group *)user)->inner, x, root);
}
static te_result count_barrier(void *user) { return te_barrier(((counted_group *)user)->inner); }
/* Bytes of a collective: flags of parameters, and what rounding to slices of 16 bytes adds, are a two-hundredth. */
static bool near_bytes(int64_t got, int64_t want) { return got >= want && got <= want + want / 200; }

static void traffic_rank(rank_state *s) {
    const number_case *num = (const number_case *)s->arg;
    const int64_t w = 128, codes = 2 * TB_BLOCKS * w * w, rest = TB_BLOCKS * 4 * w, elements = codes + rest,
                  batches = TB_BATCHES;
    counted_group count = {.inner = s->group};
    const te_group_desc d = {.name = "counted",
                             .rank = s->rank,
                             .size = s->size,
                             .user = &count,
                             .all_reduce = count_reduce,
                             .all_gather = count_gather,
                             .reduce_scatter = count_scatter,
                             .broadcast = count_broadcast,
                             .barrier = count_barrier};
    te_group *group = te_group_create(s->te, &d);
    const bool twice = !num->stored || num->recipe == te_recipe_mxfp8, half = num->recipe == te_recipe_nvfp4;
    const int64_t bytes = rest * 2 + (twice ? 2 * codes : half ? codes / 2 : codes);
    for (int kind = 0; kind < 4; kind++) {
        const te_shard shard = kind == 3 ? TE_SHARD_PARAMETERS : (te_shard)kind;
        te_recipe recipe = num->recipe();
        te_module *m = te_module_create(s->te, &chain, "deep");
        const shard_case c = {.num = num, .width = w};
        te_seed(s->te, 3);
        if (num->stored) te_quantized_model_init_begin(s->te, &(te_quantized_model_init_desc){.recipe = &recipe});
        for (int i = 0; i < TB_BLOCKS; i++) {
            char name[16];
            snprintf(name, sizeof name, "%d", i);
            te_module *block = te_module_add_child(
                m, name,
                te_layernorm_mlp_create(
                    s->te,
                    &(te_layernorm_mlp_desc){.hidden_size = w, .ffn_hidden_size = w, .gemm.params_dtype = num->dtype}));
            EXPECT(s, te_fsdp_unit(block, &(te_data_parallel_desc){.group = group,
                                                                   .shard = shard,
                                                                   .no_reshard_after_forward = kind == 3}) == TE_OK);
        }
        if (num->stored) te_quantized_model_init_end(s->te);
        EXPECT(s, te_fsdp_unit(m, &(te_data_parallel_desc){.group = group}) ==
                      TE_OK); /* has no parameters; its flags are those of all */
        te_optimizer *opt = te_fused_adam_create(s->te, m, NULL);
        count.reduced = count.scattered = count.gathered = 0;
        for (int i = 0; i < batches; i++) {
            te_fsdp_set_state(
                m, (te_fsdp_state){.reshard_after_backward = true, .requires_gradient_sync = i == batches - 1});
            EXPECT(s, run_batch(m, &c, i, NULL) == TE_OK);
        }
        EXPECT(s, te_optimizer_step(opt) == TE_OK);
        if (kind == 0)
            EXPECT(s, near_bytes(count.reduced, 2 * elements) && count.scattered == 0 &&
                          count.gathered == (TB_BLOCKS + 2) * 512 * s->size); /* ranks compare units that they have
                                                                               * not met in, main_grads and recipes */
        else {
            EXPECT(s, near_bytes(count.scattered, 4 * elements) &&
                          count.reduced <=
                              codes / 4 + 64); /* amaxes of weights: of MXFP8 one for each 32 codes of two copies */
            EXPECT(s, near_bytes(count.gathered - 2 * 512 * s->size, kind == 1   ? bytes
                                                 : kind == 2 ? 2 * batches * bytes
                                                             : batches * bytes));
        }
        te_optimizer_destroy(opt);
        te_module_destroy(m);
    }
    te_group_destroy(group);
}
TE_TEST(shards_send_the_bytes_of_the_formula) {
    static const int some[] = {1, 6, 8, 9}; /* bf16; codes of 1 byte, of 1 byte in two copies, of half a byte */
    for (int i = 0; i < COUNT(some); i += test_every_sanitized(1)) {
        test_case("%s", numbers[some[i]].name);
        run_ranks(2, traffic_rank, &numbers[some[i]]);
    }
}

/* ---- models that no rank could hold ---- */

/* A model without memory gets that of one unit at a time; its slices have the values of a model that gets them in the
 * same order and stays whole. */
static void meta_rank(rank_state *s) {
    te_causal_lm_desc d = {.vocab_size = LM_VOCAB,
                           .hidden_size = 64,
                           .intermediate_size = 256,
                           .num_hidden_layers = LM_LAYERS,
                           .num_attention_heads = 4,
                           .device = TE_PARAMS_META};
    const te_data_parallel_desc unit = {.group = s->group, .shard = TE_SHARD_PARAMETERS};
    static const char *const rest[] = {"model.embed_tokens", "model.norm", "lm_head"};
    const size_t layer = 2 * (4 * 64 * 64 + 3 * 64 * 256 + 2 * 64);
    te_module *m[2];
    for (int k = 0; k < 2; k++) {
        te_memory_trim(s->te);
        const size_t before = te_memory_get_stats(s->te).allocated;
        te_memory_reset_peak(s->te);
        te_seed(s->te, 31);
        m[k] = te_causal_lm_create(s->te, &d);
        te_module *layers = te_module_find(m[k], "model.layers");
        for (int i = 0; i < LM_LAYERS; i++) {
            EXPECT(s, te_module_reset_parameters(te_module_child(layers, i)) == TE_OK);
            if (k) EXPECT(s, te_fsdp_unit(te_module_child(layers, i), &unit) == TE_OK);
        }
        for (int i = 0; i < COUNT(rest); i++)
            EXPECT(s, te_module_reset_parameters(te_module_find(m[k], rest[i])) == TE_OK);
        if (k) EXPECT(s, te_fsdp_unit(m[k], &unit) == TE_OK);
        /* this rank's halves of the layers, one whole layer, embedding and lm_head; a fifth for the pool's blocks */
        const size_t bound = (LM_LAYERS * layer / 2 + layer + 2 * 2 * LM_VOCAB * 64) * 6 / 5;
        EXPECT(s, (te_memory_get_stats(s->te).peak_allocated - before < bound) == (k == 1));
    }
    expect_same(s, m[1], m[0], 0);
    te_module_destroy(m[0]);
    te_module_destroy(m[1]);
}
TE_TEST(shards_of_models_without_memory) { run_ranks(2, meta_rank, NULL); }

/* ---- overflows ---- */

/* An infinite gradient in a slice of one rank: the step is skipped on all ranks, and the scale falls alike. */
static void overflow_rank(rank_state *s) {
    for (int way = 0; way < 4; way++) {
        const bool unscales = way & 1;
        const shard_case c = {.num = &numbers[way & 2 ? 6 : 0], .width = 32, .inner = 48};
        te_module *m = make_model(s->te, &c), *like = make_model(s->te, &c);
        make_units(s, m, &c, TE_SHARD_PARAMETERS);
        te_optimizer *opt = make_optimizer(s->te, m, &c);
        te_grad_scaler *scaler = te_grad_scaler_create(s->te, &(te_grad_scaler_desc){.init_scale = 256});
        EXPECT(s, run_batch(m, &c, s->rank, scaler) == TE_OK);
        te_fsdp_slice slice;
        EXPECT(s, te_fsdp_get_slice(te_module_parameter(te_module_child(m, 2), "fc1_bias"), &slice) && slice.grad);
        if (s->rank == 1) te_tensor_fill(slice.grad, INFINITY);
        if (unscales) EXPECT(s, te_grad_scaler_unscale(scaler, opt) == TE_OK);
        EXPECT(s, te_grad_scaler_step(scaler, opt) == TE_OK && te_grad_scaler_update(scaler) == TE_OK);
        EXPECT(s, te_optimizer_steps(opt) == 0 && te_grad_scaler_get_state(scaler).scale == 128);
        expect_same(s, m, like, 0);
        EXPECT(s, run_batch(m, &c, s->rank, scaler) == TE_OK);
        if (unscales) EXPECT(s, te_grad_scaler_unscale(scaler, opt) == TE_OK);
        EXPECT(s, te_grad_scaler_step(scaler, opt) == TE_OK && te_grad_scaler_update(scaler) == TE_OK);
        EXPECT(s, te_optimizer_steps(opt) == 1 && te_grad_scaler_get_state(scaler).scale == 128);
        te_grad_scaler_destroy(scaler);
        te_optimizer_destroy(opt);
        te_module_destroy(m);
        te_module_destroy(like);
    }
}
TE_TEST(shards_overflow_together) { run_ranks(2, overflow_rank, NULL); }

/* ---- other modules ---- */

enum { KIND_LAYER, KIND_SPLIT, KIND_GROUPED, KIND_GROUPED_SIZES, KINDS };
typedef struct kind_case {
    int kind;
    const number_case *num;
    bool checkpoint, first_later; /* first_later: is_first_microbatch tells modules to keep quantized weights */
} kind_case;
static te_module *make_kind(te_ctx *te, const kind_case *c) {
    te_recipe recipe = c->num->recipe();
    te_module *m = NULL;
    te_seed(te, 8);
    if (c->num->stored) te_quantized_model_init_begin(te, &(te_quantized_model_init_desc){.recipe = &recipe});
    if (c->kind == KIND_LAYER)
        m = te_transformer_layer_create(te, &(te_transformer_layer_desc){.hidden_size = 64,
                                                                         .ffn_hidden_size = 96,
                                                                         .attention.num_attention_heads = 4,
                                                                         .activation = TE_SWIGLU,
                                                                         .gemm.params_dtype = c->num->dtype});
    if (c->kind == KIND_SPLIT) { /* parameters that lie in one memory, until they are gathered each on its own */
        static const char *const names[] = {"query_", "key_", "value_"};
        static const int64_t rows[] = {32, 32, 64};
        te_linear_desc d = {.in_features = 64, .out_features = 128, .gemm.params_dtype = c->num->dtype};
        d.parameters_split = (te_parameters_split){.names = names, .sizes = rows, .count = 3};
        m = te_linear_create(te, &d);
    }
    if (c->kind >= KIND_GROUPED)
        m = te_grouped_linear_create(
            te, &(te_grouped_linear_desc){
                    .num_gemms = 3, .in_features = 64, .out_features = 96, .gemm.params_dtype = c->num->dtype});
    if (c->num->stored) te_quantized_model_init_end(te);
    te_module_set_checkpoint(m, c->checkpoint);
    return m;
}
static te_result kind_batch(rank_state *s, te_module *m, const kind_case *c, int batch) {
    static const int64_t splits[3] = {16, 0, 32}, three = 3;
    te_recipe recipe = c->num->recipe();
    te_scope_begin(s->te);
    te_seed(s->te, (uint64_t)(40 + batch * 4 + s->rank));
    te_tensor *x = c->kind == KIND_LAYER ? te_tensor_normal(s->te, c->num->dtype, SHAPE(16, 3, 64), 0, 1)
                                         : te_tensor_normal(s->te, c->num->dtype, SHAPE(48, 64), 0, 1);
    te_tensor_set_requires_grad(x, true); /* so that products with weights are in the backward pass */
    te_forward_args args = {.input = x,
                            .is_first_microbatch = !c->first_later ? TE_MICROBATCH_NONE
                                                   : batch % 2     ? TE_MICROBATCH_LATER
                                                                   : TE_MICROBATCH_FIRST};
    if (c->kind == KIND_GROUPED) args.m_splits = splits;
    if (c->kind == KIND_GROUPED_SIZES) args.m_splits_tensor = te_tensor_from_host(s->te, TE_I64, 1, &three, splits);
    if (c->num->autocast) te_autocast_begin(s->te, &(te_autocast_desc){.recipe = &recipe});
    te_tensor *y = te_forward_with(m, &args);
    if (c->num->autocast) te_autocast_end(s->te);
    te_result result = te_backward(te_mean_all(te_activate(y, TE_GELU, NULL)));
    te_scope_end(s->te);
    return result;
}
static void kind_rank(rank_state *s) {
    const kind_case *c = (const kind_case *)s->arg;
    for (int shard = TE_SHARD_OPTIMIZER; shard <= TE_SHARD_PARAMETERS; shard++) {
        te_module *m[2] = {make_kind(s->te, c), make_kind(s->te, c)};
        te_optimizer *opt[2];
        for (int k = 0; k < 2; k++) {
            EXPECT(s,
                   te_fsdp_unit(m[k], &(te_data_parallel_desc){.group = s->group,
                                                               .shard = k ? (te_shard)shard : TE_SHARD_NONE}) == TE_OK);
            opt[k] = te_fused_adam_create(s->te, m[k], &(te_fused_adam_desc){.lr = 1e-2f});
        }
        for (int step = 0; step < 3; step++)
            for (int k = 0; k < 2; k++) {
                for (int i = 0; i < 2; i++) {
                    te_fsdp_set_state(m[k], (te_fsdp_state){.reshard_after_backward = i == 1 || step == 1,
                                                            .requires_gradient_sync = i == 1});
                    EXPECT(s, kind_batch(s, m[k], c, step * 2 + i) == TE_OK);
                }
                EXPECT(s, te_optimizer_step(opt[k]) == TE_OK);
            }
        expect_same(s, m[1], m[0], 0);
        for (int k = 0; k < 2; k++) {
            te_optimizer_destroy(opt[k]);
            te_module_destroy(m[k]);
        }
    }
}
TE_TEST(shards_of_other_modules) {
    static const int some[] = {1, 3, 6, 8};
    for (int kind = 0; kind < KINDS; kind++)
        for (int i = 0; i < COUNT(some); i++)
            for (int way = 0; way < 3; way++) {
                const kind_case c = {kind, &numbers[some[i]], way == 1, way == 2};
                if ((kind + i + way) % test_every_sanitized(3)) continue;
                if (kind == KIND_SPLIT && c.num->stored) continue; /* split parameters are not stored quantized */
                test_case("kind %d, %s, way %d", kind, c.num->name, way);
                run_ranks(2, kind_rank, &c);
            }
}
