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
/* Rank 1 has no gradients of its parts, as experts that no token went to, and the others do not wait for them: the norm
 * is that of what is there, which is all that rank 0 has. */
typedef struct param_list {
    te_tensor *list[32];
    int n;
} param_list;
static bool list_param(void *user, te_module *m, const char *path, te_tensor *x, te_entry_kind kind) {
    param_list *l = (param_list *)user;
    (void)m, (void)path;
    if (kind == TE_ENTRY_PARAMETER && l->n < COUNT(l->list)) l->list[l->n++] = x;
    return true;
}
static void lacking_rank(rank_state *s) {
    for (int way = 0; way < 3; way++) {
        te_module *m = make_layer(s->te, s->group, false), *whole = make_layer(s->te, NULL, false);
        te_optimizer *adam = make_adam(s->te, m, way == 1 ? 0.01f : 0);
        te_grad_scaler *scaler = te_grad_scaler_create(s->te, &(te_grad_scaler_desc){.init_scale = 4});
        param_list params = {0}, wholes = {0}, grads = {0};
        te_scope_begin(s->te);
        te_seed(s->te, 3);
        te_tensor *x = te_tensor_normal(s->te, TE_F32, SHAPE(6, 2, PARTS_HIDDEN), 0, 1), *got = NULL;
        te_tensor *loss = te_mean_all(te_activate(te_forward(m, x), TE_GELU, NULL));
        EXPECT(s, te_backward(way == 2 ? te_grad_scaler_scale(scaler, loss) : loss) == TE_OK);
        te_module_visit_tensors(m, list_param, &params);
        te_module_visit_tensors(whole, list_param, &wholes);
        for (int i = 0; i < params.n; i++) {
            const bool part = te_tensor_numel(params.list[i]) != te_tensor_numel(wholes.list[i]);
            if (part && s->rank == 1) te_tensor_zero_grad(params.list[i]);
            if (te_tensor_grad(params.list[i])) grads.list[grads.n++] = te_tensor_grad(params.list[i]);
        }
        EXPECT(s, params.n == wholes.n && (s->rank == 1) == (grads.n < params.n));
        te_tensor *want = te_tensor_detach(te_multi_tensor_l2norm(s->te, grads.list, grads.n, NULL));
        EXPECT(s, te_broadcast(s->group, want, 0) == TE_OK);
        if (way == 0) got = te_clip_grad_norm(m, 1e-3f);
        if (way == 1) EXPECT(s, te_optimizer_step(adam) == TE_OK && (got = te_optimizer_grad_norm(adam)));
        if (way == 2) EXPECT(s, te_grad_scaler_unscale(scaler, adam) == TE_OK && te_grad_scaler_step(scaler, adam) == TE_OK);
        EXPECT(s, way == 2 || (got && near(te_tensor_item(got), te_tensor_item(want), 1e-6)));
        te_scope_end(s->te);
        te_grad_scaler_destroy(scaler);
        te_optimizer_destroy(adam);
        te_module_destroy(m);
        te_module_destroy(whole);
    }
}
TE_TEST(parts_without_gradients_on_a_rank) { run_ranks(2, lacking_rank, NULL); }
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

/* If one rank cannot write, no rank takes it for written. */
static void refuse_rank(rank_state *s) {
    te_module *m = make_layer(s->te, s->group, false);
    note(s, te_model_save(s->te, "/nonexistent/parts.safetensors", m, NULL, NULL, 0));
    EXPECT(s, s->result == TE_ERR_IO || strstr(s->error, "/nonexistent"));
    char own[600];
    snprintf(own, sizeof own, "%s.%d", (const char *)s->arg, s->rank);
    note(s, te_model_save(s->te, own, m, NULL, NULL, 0));
    EXPECT(s, s->result == TE_ERR_INVALID && strstr(s->error, "rank 1 of them gives another name than rank 0"));
    te_module_destroy(m);
}
TE_TEST(parts_refused) { run_ranks(2, refuse_rank, test_path("parts.safetensors")); }

/* A weight that is stored quantized is a part as well: the norm counts all of them. */
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
    te_module_destroy(m);
}
TE_TEST(parts_that_are_stored_quantized) { run_ranks(2, stored_rank, NULL); }

/* The weights and biases of a GroupedLinear are parts as well: gradients have the norm of the whole, and a file has the
 * whole. Sums of ranks have another order: 1e-5 of numbers in f32. */
static void grouped_rank(rank_state *s) {
    static const int64_t splits[2] = {5, 3};
    for (int row = 0; row < 2; row++) {
        te_module *m[2];
        te_tensor *norm[2];
        te_scope_begin(s->te);
        for (int k = 0; k < 2; k++) {
            te_grouped_linear_desc d = {.num_gemms = 2, .in_features = 32, .out_features = 16, .gemm.params_dtype = TE_F32};
            d.gemm.no_bias = row;
            if (k == 0) d.parallel.tp_group = s->group, d.parallel.parallel_mode = row ? TE_PARALLEL_ROW : TE_PARALLEL_COLUMN;
            te_seed(s->te, 6);
            m[k] = te_grouped_linear_create(s->te, &d);
            te_tensor *x = te_tensor_normal(s->te, TE_F32, SHAPE(8, 32), 0, 1);
            if (k == 0 && row) x = te_tensor_contiguous(te_tensor_narrow(x, 1, s->rank * 32 / s->size, 32 / s->size));
            te_forward_args args = {.input = x, .m_splits = splits};
            te_tensor *y = te_forward_with(m[k], &args);
            EXPECT(s, te_backward(te_sum_all(row ? y : te_activate(y, TE_GELU, NULL))) == TE_OK);
            norm[k] = te_clip_grad_norm(m[k], 1e-3f);
        }
        EXPECT(s, norm[0] && norm[1] && near(te_tensor_item(norm[0]), te_tensor_item(norm[1]), 1e-5));
        te_tensor *w = te_module_parameter(m[1], "weight1");
        const float before = (float)te_tensor_item(te_sum_all(te_activate(te_tensor_detach(w), TE_GELU, NULL)));
        EXPECT(s, te_model_save(s->te, (const char *)s->arg, m[0], NULL, NULL, 0) == TE_OK);
        te_tensor_fill(w, 0);
        EXPECT(s, te_model_load(s->te, (const char *)s->arg, m[1], NULL) == TE_OK);
        EXPECT(s, before != 0 && te_tensor_item(te_sum_all(te_activate(te_tensor_detach(w), TE_GELU, NULL))) == before);
        EXPECT(s, te_barrier(s->group) == TE_OK); /* all have read the file */
        te_scope_end(s->te);
        te_module_destroy(m[0]);
        te_module_destroy(m[1]);
    }
}
TE_TEST(grouped_parts_are_parts_of_the_whole) {
    run_ranks(2, grouped_rank, test_path("grouped.safetensors"));
    run_ranks(4, grouped_rank, test_path("grouped.safetensors"));
}
