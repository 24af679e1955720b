/* shards.h: a model of blocks that are units, and what its ranks compare. */
#ifndef TE_TEST_SHARDS_H_INCLUDED
#define TE_TEST_SHARDS_H_INCLUDED

#include "../dist/ranks.h"

/* ---- a model of blocks ---- */

enum { TB_BLOCKS = 3, TB_ROWS = 32, TB_BATCHES = 2, TB_STEPS = 3 };

static TE_MAYBE_UNUSED te_result chain_forward(te_module *m, te_forward_args *args) {
    te_tensor *x = args->input;
    for (int i = 0; i < te_module_num_children(m) && x; i++) x = te_forward(te_module_child(m, i), x);
    args->outputs.out = x;
    return te_error_code(te_module_ctx(m));
}
static const te_module_class chain = {"Chain", 0, chain_forward, NULL, NULL};

typedef te_recipe (*recipe_fn)(void);
static TE_MAYBE_UNUSED te_recipe no_recipe(void) {
    te_recipe none;
    memset((void *)&none, 0, sizeof none);
    return none;
}
/* Formats and recipes; `stored`: weights are stored quantized. */
typedef struct number_case {
    const char *name;
    te_dtype dtype;
    recipe_fn recipe;
    bool autocast, stored;
} number_case;
static const number_case numbers[] = {
    {"f32", TE_F32, no_recipe, false, false},
    {"bf16", TE_BF16, no_recipe, false, false},
    {"f16", TE_F16, no_recipe, false, false},
    {"current scaling of plain weights", TE_BF16, te_recipe_current_scaling, true, false},
    {"nvfp4 of plain weights", TE_BF16, te_recipe_nvfp4, true, false},
    {"delayed", TE_BF16, te_recipe_delayed_scaling, true, true},
    {"current", TE_BF16, te_recipe_current_scaling, true, true},
    {"block", TE_BF16, te_recipe_block_scaling, true, true},
    {"mxfp8", TE_BF16, te_recipe_mxfp8, true, true},
    {"nvfp4", TE_BF16, te_recipe_nvfp4, true, true},
    {"delayed scaling of plain weights", TE_BF16, te_recipe_delayed_scaling, true, false},
    {"block scaling of plain weights", TE_BF16, te_recipe_block_scaling, true, false},
    {"mxfp8 of plain weights", TE_BF16, te_recipe_mxfp8, true, false}};

typedef struct shard_case {
    const number_case *num;
    int64_t width, inner;
    bool preserve, checkpoint, keep_gathered, sgd, remainders, main_grads, clip, scale, one_unit, frozen;
    te_dtype moments;
    float divide, bucket; /* bucket: MiB; 0: the default */
    bool no_prefetch;
} shard_case;

static TE_MAYBE_UNUSED te_module *make_model(te_ctx *te, const shard_case *c) {
    te_recipe recipe = c->num->recipe();
    te_module *m = te_module_create(te, &chain, "model");
    te_seed(te, 11);
    if (c->num->stored)
        te_quantized_model_init_begin(
            te, &(te_quantized_model_init_desc){.recipe = &recipe, .preserve_high_precision_init_val = c->preserve});
    te_module_add_child(m, "first",
                        te_linear_create(te, &(te_linear_desc){.in_features = c->width,
                                                               .out_features = c->width,
                                                               .gemm.params_dtype = c->num->dtype}));
    for (int i = 0; i < TB_BLOCKS; i++) {
        char name[16];
        snprintf(name, sizeof name, "block%d", i);
        te_layernorm_mlp_desc d = {
            .hidden_size = c->width, .ffn_hidden_size = c->inner, .gemm.params_dtype = c->num->dtype};
        d.gemm.fuse_wgrad_accumulation = c->main_grads;
        te_module *block = te_module_add_child(m, name, te_layernorm_mlp_create(te, &d));
        te_module_set_checkpoint(block, c->checkpoint);
        for (int k = 0; k < 2 && c->main_grads; k++) {
            te_tensor *w = te_module_parameter(block, k ? "fc2_weight" : "fc1_weight");
            te_tensor_set_main_grad(w, te_tensor_zeros(te, TE_F32, te_tensor_ndim(w), te_tensor_shape(w)));
        }
        if (c->frozen && i == 1)
            for (int k = 0; k < 2; k++)
                te_tensor_set_requires_grad(te_module_parameter(block, k ? "fc2_weight" : "fc1_weight"), false);
    }
    te_module_add_child(m, "last",
                        te_linear_create(te, &(te_linear_desc){.in_features = c->width,
                                                               .out_features = c->width,
                                                               .gemm.params_dtype = c->num->dtype}));
    if (c->num->stored) te_quantized_model_init_end(te);
    return m;
}
/* A unit for each block, and one for the rest. */
static TE_MAYBE_UNUSED void make_units(rank_state *s, te_module *m, const shard_case *c, te_shard shard) {
    const te_data_parallel_desc d = {.group = s->group,
                                     .gradient_divide_factor = c->divide,
                                     .shard = shard,
                                     .no_reshard_after_forward = c->keep_gathered,
                                     .no_prefetch = c->no_prefetch,
                                     .bucket_cap_mb = c->bucket,
                                     .no_init_sync = true};
    for (int i = 0; i < TB_BLOCKS && !c->one_unit; i++) EXPECT(s, te_fsdp_unit(te_module_child(m, 1 + i), &d) == TE_OK);
    EXPECT(s, (c->one_unit ? te_data_parallel(m, &d) : te_fsdp_unit(m, &d)) == TE_OK);
}
static TE_MAYBE_UNUSED te_optimizer *make_optimizer(te_ctx *te, te_module *m, const shard_case *c) {
    if (c->sgd)
        return te_fused_sgd_create(te, m,
                                   &(te_fused_sgd_desc){.lr = 1e-2f,
                                                        .momentum = 0.9f,
                                                        .dampening = 0.1f,
                                                        .weight_decay = 0.01f,
                                                        .max_grad_norm = c->clip ? 0.1f : 0});
    return te_fused_adam_create(te, m,
                                &(te_fused_adam_desc){.lr = 1e-2f,
                                                      .weight_decay = 0.1f,
                                                      .store_param_remainders = c->remainders,
                                                      .decay_matrices_only = true,
                                                      .exp_avg_dtype = c->moments,
                                                      .exp_avg_sq_dtype = c->moments,
                                                      .max_grad_norm = c->clip ? 0.1f : 0});
}
/* The loss of one microbatch, and its backward pass. */
static TE_MAYBE_UNUSED te_result run_batch(te_module *m, const shard_case *c, int batch, te_grad_scaler *scaler) {
    te_ctx *te = te_module_ctx(m);
    te_recipe recipe = c->num->recipe();
    te_result result;
    te_scope_begin(te);
    te_seed(te, 500 + (uint64_t)batch);
    te_tensor *x = te_tensor_normal(te, c->num->dtype, SHAPE(TB_ROWS, c->width), 0, 1);
    if (c->num->autocast) te_autocast_begin(te, &(te_autocast_desc){.recipe = &recipe});
    te_tensor *y = te_forward(m, x);
    if (c->num->autocast) te_autocast_end(te);
    te_tensor *loss = te_scale(te_mean_all(te_activate(y, TE_GELU, NULL)), 1.0f / TB_BATCHES);
    result = te_backward(scaler ? te_grad_scaler_scale(scaler, loss) : loss);
    te_scope_end(te);
    return result;
}
static TE_MAYBE_UNUSED te_result run_step(rank_state *s, te_module *m, te_optimizer *opt, const shard_case *c, int step,
                                          te_grad_scaler *scaler) {
    te_fsdp_state state;
    te_result result = TE_OK;
    for (int i = 0; i < TB_BATCHES && result == TE_OK; i++) {
        EXPECT(s, te_fsdp_get_state(m, &state));
        state.is_last_backward = state.reshard_after_backward = state.requires_gradient_sync = i == TB_BATCHES - 1;
        te_fsdp_set_state(m, state);
        result = run_batch(m, c, (step * s->size + s->rank) * TB_BATCHES + i, scaler);
    }
    if (result != TE_OK) return result;
    result = scaler ? te_grad_scaler_step(scaler, opt) : te_optimizer_step(opt);
    return scaler && result == TE_OK ? te_grad_scaler_update(scaler) : result;
}

/* ---- memory ---- */

/* Returns the bytes that the pool takes for a tensor of `bytes` (core/memory.c): a multiple of an eighth of the next
 * power of two, and at least of 512. */
static TE_MAYBE_UNUSED size_t taken(size_t bytes) {
    size_t step = 512;
    while (step * 8 < bytes) step *= 2;
    return (bytes + step - 1) / step * step;
}

/* ---- comparing ---- */

typedef struct param_list {
    te_tensor *list[128];
    int n;
} param_list;
static TE_MAYBE_UNUSED bool list_param(void *user, te_module *m, const char *path, te_tensor *x, te_entry_kind kind) {
    param_list *l = (param_list *)user;
    (void)m, (void)path;
    if (kind == TE_ENTRY_PARAMETER) l->list[l->n++] = x;
    return true;
}
static TE_MAYBE_UNUSED float *values_of(const te_tensor *x) {
    float *v = (float *)malloc((size_t)te_tensor_numel(x) * sizeof(float) + 1);
    te_tensor_to_f32(x, v);
    return v;
}
/* limit 0: the same bits; else the largest normalised error. */
static TE_MAYBE_UNUSED bool same_values(const te_tensor *got, const te_tensor *want, double limit) {
    const int64_t n = te_tensor_numel(want);
    float *a = values_of(got), *b = values_of(want);
    double error = 0, all = 0;
    bool same = te_tensor_numel(got) == n && memcmp(a, b, (size_t)n * sizeof(float)) == 0;
    for (int64_t i = 0; i < n; i++) {
        error += ((double)a[i] - b[i]) * ((double)a[i] - b[i]);
        all += (double)b[i] * b[i];
    }
    free(a);
    free(b);
    return same || (limit > 0 && error <= limit * limit * all);
}
static TE_MAYBE_UNUSED void expect_same(rank_state *s, te_module *got, te_module *want, double limit) {
    param_list a = {0}, b = {0};
    EXPECT(s, te_fsdp_unshard(got) == TE_OK);
    te_module_visit_tensors(got, list_param, &a);
    te_module_visit_tensors(want, list_param, &b);
    EXPECT(s, a.n == b.n);
    for (int i = 0; i < a.n; i++) EXPECT(s, same_values(a.list[i], b.list[i], limit));
    EXPECT(s, te_fsdp_reshard(got) == TE_OK);
}
/* The optimizer's states of this rank are its slices of the whole ones. */
static TE_MAYBE_UNUSED void expect_states(rank_state *s, te_optimizer *got, te_module *m, te_optimizer *want,
                                          te_module *whole, double limit) {
    static const char *const names[2][2] = {{"exp_avg", "exp_avg_sq"}, {"momentum_buffer", NULL}};
    param_list a = {0}, b = {0};
    te_module_visit_tensors(m, list_param, &a);
    te_module_visit_tensors(whole, list_param, &b);
    for (int i = 0; i < a.n; i++)
        for (int k = 0; k < 2; k++) {
            const char *name = names[te_optimizer_state(want, b.list[i], names[0][0], NULL) == NULL][k];
            te_tensor *x = name ? te_optimizer_state(got, a.list[i], name, NULL) : NULL,
                      *y = name ? te_optimizer_state(want, b.list[i], name, NULL) : NULL;
            te_fsdp_slice slice;
            if (!x || !y) continue;
            const int64_t n = te_tensor_numel(y);
            if (!te_fsdp_get_slice(a.list[i], &slice)) slice.start = 0, slice.length = n; /* whole */
            EXPECT(s, te_tensor_numel(x) == slice.length && te_tensor_dtype(x) == te_tensor_dtype(y));
            te_tensor *part = te_tensor_narrow(te_tensor_view(y, 1, &n), 0, slice.start, slice.length);
            EXPECT(s, same_values(x, part, limit));
        }
}

typedef struct uneven_case {
    te_shard shard;
    te_dtype dtype;
} uneven_case;
/* Ranks that reach different units exchange them in one order: each of two experts runs on one rank alone, or on none.
 */
static TE_MAYBE_UNUSED void uneven_rank(rank_state *s) {
    const uneven_case *c = (const uneven_case *)s->arg;
    const te_data_parallel_desc d = {.group = s->group, .shard = c->shard, .no_init_sync = true};
    te_module *m[2];
    te_optimizer *adam[2];
    for (int k = 0; k < 2; k++) {
        m[k] = te_module_create(s->te, &chain, "experts");
        te_seed(s->te, 9);
        for (int i = 0; i < 4; i++) {
            char name[16];
            snprintf(name, sizeof name, "%d", i);
            te_module *x = te_module_add_child(
                m[k], name,
                te_linear_create(
                    s->te, &(te_linear_desc){.in_features = 24, .out_features = 24, .gemm.params_dtype = c->dtype}));
            if (k) EXPECT(s, te_fsdp_unit(x, &d) == TE_OK);
        }
        if (k)
            EXPECT(s, te_fsdp_unit(m[k], &d) == TE_OK);
        else
            EXPECT(s, te_data_parallel(m[k], &(te_data_parallel_desc){.group = s->group}) == TE_OK);
        adam[k] = te_fused_adam_create(s->te, m[k], &(te_fused_adam_desc){.lr = 1e-2f});
    }
    for (int step = 0; step < 4; step++)
        for (int k = 0; k < 2; k++) {
            te_scope_begin(s->te);
            te_seed(s->te, 70 + (uint64_t)(step * s->size + s->rank));
            te_tensor *x = te_tensor_normal(s->te, c->dtype, SHAPE(8, 24), 0, 1);
            for (int i = 0; i < 3;
                 i++) /* the first on all ranks; in turn, the second and the third on some; the last on none */
                if (i == 0 || (s->rank + step) % 3 == i) x = te_forward(te_module_child(m[k], i), x);
            EXPECT(s, te_backward(te_mean_all(te_activate(x, TE_GELU, NULL))) == TE_OK &&
                          te_optimizer_step(adam[k]) == TE_OK);
            te_scope_end(s->te);
        }
    expect_same(s, m[1], m[0], 0);
    for (int k = 0; k < 2; k++) {
        te_optimizer_destroy(adam[k]);
        te_module_destroy(m[k]);
    }
}

#endif /* TE_TEST_SHARDS_H_INCLUDED */
