/* test_parts.c: parameters of which each rank has a part: norms and clipping of all parts, checkpoints that open in
 * another layout. Models of the transformer kind are in lm/test_ranks.c. */
#include "../dist/ranks.h"

enum { PARTS_HIDDEN = 32, PARTS_STEPS = 3 };

static te_module *make_layer(te_ctx *te, te_group *tp, bool swiglu) {
    te_seed(te, 4);
    return te_transformer_layer_create(
        te, &(te_transformer_layer_desc){.hidden_size = PARTS_HIDDEN,
                                         .ffn_hidden_size = 48,
                                         .attention.num_attention_heads = 4,
                                         .attention.num_gqa_groups = 4,
                                         .attention.no_qkv_weight_interleaved = swiglu,
                                         .activation = swiglu ? TE_SWIGLU : TE_GELU,
                                         .gemm.params_dtype = TE_F32,
                                         .parallel = {.tp_group = tp, .set_parallel_mode = tp != NULL}});
}
static te_optimizer *make_adam(te_ctx *te, te_module *m, float norm) {
    return te_fused_adam_create(te, m, &(te_fused_adam_desc){.lr = 1e-2f, .max_grad_norm = norm});
}
static void train_layer(rank_state *s, te_module *m, te_optimizer *adam, int from, int steps) {
    for (int i = from; i < from + steps; i++) {
        te_scope_begin(s->te);
        te_seed(s->te, 50 + (uint64_t)i);
        te_tensor *x = te_tensor_normal(s->te, TE_F32, SHAPE(6, 2, PARTS_HIDDEN), 0, 1);
        EXPECT(s, te_backward(te_mean_all(te_activate(te_forward(m, x), TE_GELU, NULL))) == TE_OK);
        EXPECT(s, te_optimizer_step(adam) == TE_OK);
        te_scope_end(s->te);
    }
}
static float output_of(rank_state *s, te_module *m) {
    te_scope_begin(s->te);
    te_no_grad_begin(s->te);
    te_seed(s->te, 9);
    te_tensor *x = te_tensor_normal(s->te, TE_F32, SHAPE(6, 2, PARTS_HIDDEN), 0, 1);
    const float y = (float)te_tensor_item(te_mean_all(te_activate(te_forward(m, x), TE_GELU, NULL)));
    te_no_grad_end(s->te);
    te_scope_end(s->te);
    return y;
}
static bool near(double a, double b, double limit) { return fabs(a - b) <= limit * (fabs(a) + fabs(b)); }

/* Each rank also has the whole layer, by itself. Sums of ranks have another order: 1e-5 of numbers in f32. */
static void parts_rank(rank_state *s) {
    for (int swiglu = 0; swiglu < 2; swiglu++)
        for (int clip = 0; clip < 2; clip++) {
            te_module *part = make_layer(s->te, s->group, swiglu), *whole = make_layer(s->te, NULL, swiglu);
            te_optimizer *a = make_adam(s->te, part, clip ? 0.01f : 0), *b = make_adam(s->te, whole, clip ? 0.01f : 0);
            train_layer(s, part, a, 0, PARTS_STEPS);
            train_layer(s, whole, b, 0, PARTS_STEPS);
            if (clip)
                EXPECT(s, near(te_tensor_item(te_optimizer_grad_norm(a)), te_tensor_item(te_optimizer_grad_norm(b)), 1e-5));
            EXPECT(s, near(output_of(s, part), output_of(s, whole), 1e-4));
            te_scope_begin(s->te);
            te_seed(s->te, 3);
            te_tensor *x = te_tensor_normal(s->te, TE_F32, SHAPE(6, 2, PARTS_HIDDEN), 0, 1);
            te_backward(te_mean_all(te_activate(te_forward(part, x), TE_GELU, NULL)));
            te_backward(te_mean_all(te_activate(te_forward(whole, x), TE_GELU, NULL)));
            te_tensor *n[2] = {te_clip_grad_norm(part, 1e-3f), te_clip_grad_norm(whole, 1e-3f)};
            EXPECT(s, n[0] && n[1] && near(te_tensor_item(n[0]), te_tensor_item(n[1]), 1e-4));
            te_scope_end(s->te);
            te_optimizer_destroy(a);
            te_optimizer_destroy(b);
            te_module_destroy(part);
            te_module_destroy(whole);
        }
}
TE_TEST(parts_have_the_norm_of_the_whole) {
    run_ranks(2, parts_rank, NULL);
    run_ranks(4, parts_rank, NULL);
}

typedef struct save_case {
    const char *path;
    bool swiglu, remainders;
} save_case;
static te_optimizer *adam_of(te_ctx *te, te_module *m) {
    return te_fused_adam_create(te, m, &(te_fused_adam_desc){.lr = 1e-2f, .exp_avg_dtype = TE_BF16});
}
static void save_rank(rank_state *s) {
    const save_case *c = (const save_case *)s->arg;
    te_module *m = make_layer(s->te, s->group, c->swiglu);
    te_optimizer *adam = adam_of(s->te, m);
    train_layer(s, m, adam, 0, 2);
    EXPECT(s, te_model_save(s->te, c->path, m, adam, NULL, 0) == TE_OK);
    train_layer(s, m, adam, 2, 2);
    float *y = (float *)malloc(sizeof *y);
    *y = output_of(s, m);
    s->left[s->num_left++] = y;
    te_optimizer_destroy(adam);
    te_module_destroy(m);
}
static void load_rank(rank_state *s) {
    const save_case *c = (const save_case *)s->arg;
    te_module *m = make_layer(s->te, s->group, c->swiglu);
    te_module_reset_parameters(m);
    te_optimizer *adam = adam_of(s->te, m);
    EXPECT(s, te_model_load(s->te, c->path, m, adam) == TE_OK);
    train_layer(s, m, adam, 2, 2);
    float *y = (float *)malloc(sizeof *y);
    *y = output_of(s, m);
    s->left[s->num_left++] = y;
    te_optimizer_destroy(adam);
    te_module_destroy(m);
}
/* Two steps in one layout, two in another: as four in one. */
TE_TEST(parts_open_in_any_layout) {
    static const int sizes[] = {0, 2, 4};
    for (int swiglu = 0; swiglu < 2; swiglu++)
        for (int from = 0; from < 3; from++) {
            const save_case c = {test_path("parts.safetensors"), swiglu != 0, false};
            rank_state *first = run_ranks(sizes[from], save_rank, &c);
            for (int to = 0; to < 3; to++) {
                test_case("swiglu %d, from %d ranks to %d", swiglu, sizes[from], sizes[to]);
                rank_state *then = run_ranks(sizes[to], load_rank, &c);
                for (int i = 0; i < (sizes[to] ? sizes[to] : 1); i++)
                    CHECK(near(*(float *)then[i].left[0], *(float *)first[0].left[0], 1e-4));
            }
        }
}

/* If one rank cannot write, no rank takes it for written; a part that is sharded as well is refused. */
static void refuse_rank(rank_state *s) {
    te_module *m = make_layer(s->te, s->group, false);
    note(s, te_model_save(s->te, "/nonexistent/parts.safetensors", m, NULL, NULL, 0));
    EXPECT(s, s->result == TE_ERR_IO || strstr(s->error, "/nonexistent"));
    EXPECT(s, te_fsdp_unit(m, &(te_data_parallel_desc){.shard = TE_SHARD_OPTIMIZER, .no_init_sync = true}) == TE_OK);
    note(s, te_model_save(s->te, (const char *)s->arg, m, NULL, NULL, 0));
    EXPECT(s, s->result == TE_ERR_UNSUPPORTED && strstr(s->error, "it is sharded as well"));
    te_module_destroy(m);
}
TE_TEST(parts_refused) { run_ranks(2, refuse_rank, test_path("parts.safetensors")); }

/* A weight that is stored quantized is a part as well: the norm counts all of them, and a checkpoint refuses them by name. */
static void stored_rank(rank_state *s) {
    const te_recipe recipe = te_recipe_current_scaling();
    te_seed(s->te, 4);
    te_quantized_model_init_begin(s->te, &(te_quantized_model_init_desc){.recipe = &recipe});
    te_module *m = te_linear_create(s->te, &(te_linear_desc){.in_features = 32, .out_features = 64, .gemm.params_dtype = TE_BF16,
                                                             .parallel = {.tp_group = s->group, .parallel_mode = TE_PARALLEL_COLUMN}});
    te_quantized_model_init_end(s->te);
    te_scope_begin(s->te);
    te_tensor *x = te_tensor_normal(s->te, TE_BF16, SHAPE(16, 32), 0, 1), *norms[2];
    te_autocast_begin(s->te, &(te_autocast_desc){.recipe = &recipe});
    te_tensor *y = te_forward(m, x);
    te_autocast_end(s->te);
    /* the parts of the ranks have gradients of other sizes */
    EXPECT(s, te_backward(te_mean_all(te_scale(y, (float)(1 + te_group_rank(s->group))))) == TE_OK);
    norms[0] = te_scale(te_tensor_detach(te_clip_grad_norm(m, 1e9f)), 1), norms[1] = te_scale(norms[0], 1);
    te_all_reduce(s->group, norms[1], TE_REDUCE_MAX);
    EXPECT(s, te_tensor_item(norms[0]) == te_tensor_item(norms[1]));
    te_scope_end(s->te);
    note(s, te_model_save(s->te, (const char *)s->arg, m, NULL, NULL, 0));
    EXPECT(s, s->result == TE_ERR_UNSUPPORTED && strstr(s->error, "stored quantized"));
    te_module_destroy(m);
}
TE_TEST(parts_that_are_stored_quantized) { run_ranks(2, stored_rank, test_path("parts.safetensors")); }
