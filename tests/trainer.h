/* tests/trainer.h: a small GPT that is trained under any recipe, and a hash of everything that lives on from step to step. */
#include "te_test.h"

enum { WORDS = 48, WIDTH = 64, LENGTH = 6, BATCH = 2, TOKENS = LENGTH * BATCH, STEPS = 7 };

/* Sanitizers see all that they can see in four steps. */
static TE_MAYBE_UNUSED int num_steps(void) { return test_samples() ? 4 : STEPS; }

typedef struct setup {
    const char *name;
    te_recipe (*recipe)(void); /* NULL: high precision */
    int microbatches;          /* in one step; more than one: the weights are quantized once */
    bool fused;                /* weight gradients are added into f32 main_grads */
    bool primary;              /* weights are stored quantized */
    bool eight;                /* f32 parameters: no masters */
    bool delay;                /* weight gradients wait for te_backward_dw */
} setup;

typedef struct trainer {
    te_ctx *te;
    setup is;
    te_module *gpt;
    te_optimizer *adam;
    te_tensor *ids[4], *targets[4]; /* of each microbatch: where data is put */
    te_tensor *loss;                /* of the last step */
    const te_cpu_offload_desc *offload; /* of the forward passes, or NULL */
} trainer;

static te_result gpt_forward(te_module *self, te_forward_args *args) {
    te_rotary_desc rotary = {0};
    te_forward_args layer = {0};
    layer.input = te_forward(te_module_child(self, 0), args->input);
    layer.rotary = &rotary;
    layer.is_first_microbatch = args->is_first_microbatch;
    args->outputs.out =
        te_linear(te_forward_with(te_module_child(self, 1), &layer), te_module_parameter(te_module_child(self, 0), "weight"), NULL);
    return te_error_code(te_module_ctx(self));
}

static bool give_main_grad(void *user, te_module *m, const char *path, te_tensor *x, te_entry_kind kind) {
    (void)user, (void)m, (void)path;
    if (kind == TE_ENTRY_PARAMETER && te_tensor_ndim(x) == 2 && te_tensor_shape(x)[0] != WORDS)
        te_tensor_set_main_grad(x, te_tensor_zeros(te_tensor_ctx(x), TE_F32, 2, te_tensor_shape(x)));
    return true;
}

static void open_trainer(trainer *t, te_ctx *te, const setup *is) {
    static const te_module_class cls = {"GPT", 0, gpt_forward, NULL, NULL};
    te_embedding_desc table = {0};
    te_transformer_layer_desc layer = {0};
    te_fused_adam_desc adam = {0};
    te_quantized_model_init_desc stored = {0};
    te_recipe recipe = is->recipe ? is->recipe() : te_recipe_current_scaling();
    memset(t, 0, sizeof *t);
    t->te = te;
    t->is = *is;
    te_seed(te, 77);
    te_scope_begin(te);
    table.num_embeddings = WORDS;
    table.embedding_dim = layer.hidden_size = WIDTH;
    table.params_dtype = layer.gemm.params_dtype = is->eight ? TE_F32 : TE_BF16;
    layer.ffn_hidden_size = 96;
    layer.attention.num_attention_heads = 4;
    layer.hidden_dropout = layer.attention.attention_dropout = 0.1f;
    layer.gemm.fuse_wgrad_accumulation = is->fused;
    layer.gemm.delay_wgrad_compute = is->delay;
    adam.max_grad_norm = 0.5f;
    adam.weight_decay = 0.1f;
    adam.decay_matrices_only = true;
    stored.recipe = &recipe;
    t->gpt = te_module_create(te, &cls, "gpt");
    te_module_add_child(t->gpt, "embedding", te_embedding_create(te, &table));
    if (is->primary) te_quantized_model_init_begin(te, &stored);
    te_module_add_child(t->gpt, "layer", te_transformer_layer_create(te, &layer));
    if (is->primary) te_quantized_model_init_end(te);
    t->adam = te_fused_adam_create(te, t->gpt, &adam);
    if (is->fused) te_module_visit_tensors(te_module_child(t->gpt, 1), give_main_grad, NULL);
    for (int i = 0; i < is->microbatches; i++) {
        t->ids[i] = te_tensor_retain(te_tensor_zeros(te, TE_I32, SHAPE(LENGTH, BATCH)));
        t->targets[i] = te_tensor_retain(te_tensor_zeros(te, TE_I32, SHAPE(LENGTH, BATCH)));
    }
    te_scope_end(te);
}
static void close_trainer(trainer *t) {
    for (int i = 0; i < t->is.microbatches; i++) {
        te_tensor_release(t->ids[i]);
        te_tensor_release(t->targets[i]);
    }
    te_tensor_release(t->loss);
    te_optimizer_destroy(t->adam);
    te_module_destroy(t->gpt);
}

/* New data and a new learning rate: what comes before a step, or a launch. */
static void feed(trainer *t, int step) {
    for (int i = 0; i < t->is.microbatches; i++) {
        int32_t ids[TOKENS + 1];
        for (int k = 0; k <= TOKENS; k++) ids[k] = (k * k * 7 + step * 5 + i * 3 + 1) % WORDS;
        te_tensor_copy_from_host(t->ids[i], ids);
        te_tensor_copy_from_host(t->targets[i], ids + 1);
    }
    te_optimizer_set_lr(t->adam, 0.01f / (float)(step + 1));
}

static void train_step(trainer *t) {
    te_ctx *te = t->te;
    te_recipe recipe = t->is.recipe ? t->is.recipe() : te_recipe_current_scaling();
    te_autocast_desc cast = {0};
    te_tensor *sum = NULL;
    if (recipe.kind == TE_RECIPE_DELAYED) recipe.delayed.amax_history_len = 3;
    cast.recipe = &recipe;
    cast.disabled = !t->is.recipe;
    te_scope_begin(te);
    for (int i = 0; i < t->is.microbatches; i++) {
        te_forward_args args = {0};
        args.input = t->ids[i];
        args.is_first_microbatch = t->is.microbatches == 1 ? TE_MICROBATCH_NONE : i == 0 ? TE_MICROBATCH_FIRST : TE_MICROBATCH_LATER;
        if (t->offload) te_cpu_offload_begin(te, t->offload);
        te_autocast_begin(te, &cast);
        te_tensor *logits = te_forward_with(t->gpt, &args);
        te_autocast_end(te);
        te_tensor *loss = te_cross_entropy(logits, t->targets[i], NULL);
        if (t->offload) te_cpu_offload_end(te);
        te_backward(loss);
        if (t->is.delay) te_backward_dw(t->gpt);
        loss = te_tensor_detach(loss);
        sum = sum ? te_add(sum, loss) : loss;
    }
    te_optimizer_step(t->adam);
    te_tensor_release(t->loss);
    t->loss = te_tensor_retain(sum);
    te_scope_end(te);
}

static bool add_tensor(void *user, te_module *m, const char *path, te_tensor *x, te_entry_kind kind) {
    uint64_t *hash = (uint64_t *)user;
    int64_t n = te_tensor_numel(x);
    float *values = (float *)malloc((size_t)n * sizeof(float));
    (void)m, (void)path, (void)kind;
    te_tensor_to_f32(x, values);
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, &values[i], 4);
        *hash = (*hash ^ bits) * 0x100000001B3u;
    }
    free(values);
    return true;
}
/* Of everything that lives on: parameters, scales and histories, the random state, steps. */
static uint64_t state_of(trainer *t) {
    uint64_t hash = 0xCBF29CE484222325u, seed, offset;
    te_module_visit_tensors(t->gpt, add_tensor, &hash);
    te_rng_get(t->te, &seed, &offset);
    return hash ^ seed * 31 ^ offset * 0x9E3779B97F4A7C15u ^ (uint64_t)te_optimizer_steps(t->adam) << 40;
}

static te_recipe delayed_attention(void) {
    te_recipe r = te_recipe_delayed_scaling();
    r.fp8_mha = true;
    return r;
}
static te_recipe current_attention(void) {
    te_recipe r = te_recipe_current_scaling();
    r.fp8_dpa = true;
    return r;
}

static const setup setups[] = {
    {"none", NULL, 1, false, false, false, false},
    {"f32", NULL, 1, false, false, true, false},
    {"delayed", te_recipe_delayed_scaling, 1, false, false, false, false},
    {"current", te_recipe_current_scaling, 1, false, false, false, false},
    {"block", te_recipe_block_scaling, 1, false, false, false, false},
    {"mxfp8", te_recipe_mxfp8, 1, false, false, false, false},
    {"nvfp4", te_recipe_nvfp4, 1, false, false, false, false},
    {"none, microbatches, main_grad", NULL, 3, true, false, false, false},
    {"delayed, microbatches, main_grad", te_recipe_delayed_scaling, 2, true, false, false, false},
    {"current, microbatches", te_recipe_current_scaling, 2, false, false, false, false},
    {"delayed, stored", te_recipe_delayed_scaling, 1, false, true, false, false},
    {"current, stored", te_recipe_current_scaling, 2, false, true, false, false},
    {"mxfp8, stored", te_recipe_mxfp8, 1, false, true, false, false},
    {"nvfp4, stored", te_recipe_nvfp4, 1, false, true, false, false},
    {"delayed, FP8 attention", delayed_attention, 1, false, false, false, false},
    {"current, FP8 attention, microbatches", current_attention, 2, false, false, false, false},
};
